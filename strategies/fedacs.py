"""FedACS: a personal model for each client, mixed with the models of similar clients (arXiv:2312.15148, eq. 4).

    s_ij = cos(w_i, w_j)        δ = p-quantile of all s_ij        u_i = Σ_{j: s_ij > δ} s_ij·w_j / Σ_{j: s_ij > δ} s_ij

Client i receives its mixture u_i, trains it, and returns w_i: FedAvg's bytes. The mathematics is in `mixing/`;
`personal/models.py` stores the models and sends the mixtures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Unpack

import numpy as np
from pydantic import Field

from tepal.strategies.mixing import cosine, mixing_weights, threshold
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.personal.models import MEAN, MEAN_MODEL, Newcomers, PersonalMixing
from tepal.strategies.personal.storage import PersonalModels
from tepal.strategies.rounds.strategy import MethodStrategy


class FedACSMethod(PersonalMixing):
    """The method of FedACS. Arguments are those of `FedACS`."""

    name = "FedACS"

    def __init__(
        self, quantile: float, alpha: float = 1.0, follow_rate: bool = True, newcomers: Newcomers = MEAN
    ) -> None:
        super().__init__(newcomers)
        self.quantile = quantile
        self.alpha = alpha
        self.follow_rate = follow_rate

    def weights(self, state: PersonalModels, rows: Sequence[int], round: int) -> np.ndarray:
        similarity = cosine(state.gram)
        alpha = self.alpha * (self._run.factor(round) if self.follow_rate else 1.0)
        return mixing_weights(similarity, threshold(similarity, self.quantile), rows, alpha=alpha)

    def measures(self, state: PersonalModels) -> Mapping[str, np.ndarray]:
        """Cosine `similarity` S (n, n) of the clients' models, and its `threshold` δ."""
        similarity = cosine(state.gram)
        return {
            "similarity": similarity.astype(np.float32),
            "threshold": np.array(threshold(similarity, self.quantile)),
        }

    def describe(self) -> Mapping[str, str | int | float]:
        return {
            "quantile": self.quantile, "alpha": self.alpha, "follow rate": self.follow_rate, **super().describe(),
        }  # fmt: skip


@listed(
    "fedacs",
    title="FedACS",
    does="a personal model for each client, mixed with similar clients' models",
    paper="arXiv:2312.15148",
    result=MEAN_MODEL,
)
class FedACS(MethodStrategy):
    """FedACS over Tepal's exchange.

    The result's arrays are the mean of the clients' models. Each personal model is in the server's store and in its
    client's cache.

    Args:
        quantile: p, the share of the similarities that are below the threshold. From 1 − 1/n on every client trains
            alone.
        alpha: α of the start (1 − α)·w_i + α·u_i; 1 is the paper's.
        follow_rate: whether α is multiplied by the factor that the schedule gives the learning rate. Training moves w_i
            in proportion to the rate. With a constant α the mixture would undo more and more of it towards the end of a
            falling schedule.
        newcomers: what a client starts from that has not replied yet: the "mean" of the clients' models, or the
            "initial" model.
        round_options: see `MethodStrategy`. `model` defines which entries are buffers, which are not compared; a model
            with no buffers but BatchNorm's need not be given. The store of models is a file in the folder of the
            checkpoints; without checkpoints, a temporary file.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        *,
        quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5,
        alpha: Annotated[float, Field(gt=0, le=1)] = 1.0,
        follow_rate: bool = True,
        newcomers: Newcomers = MEAN,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(FedACSMethod(quantile, alpha, follow_rate, newcomers), **round_options)
