"""A linear probe: what a logistic regression makes of a frozen model's features."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Features (n, width) and labels (n,)."""


def probe(train: Labelled, test: Labelled) -> float:
    """The accuracy on `test` of a logistic regression that is fitted to `train`.

    Features are scaled to mean 0 and standard deviation 1. The penalty is the best of four on a fifth of `train`.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, labels = train
    order, fitted = np.random.default_rng(0).permutation(len(labels)), len(labels) * 4 // 5

    def regression(strength: float, chosen: NDArray[np.int64]) -> Any:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=500))
        return model.fit(features[chosen], labels[chosen])

    validated = {
        strength: regression(strength, order[:fitted]).score(features[order[fitted:]], labels[order[fitted:]])
        for strength in (0.001, 0.01, 0.1, 1.0)
    }
    best = max(validated, key=lambda strength: validated[strength])
    return float(regression(best, order).score(*test))
