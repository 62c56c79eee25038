"""Remarks on a run whose figures look well and are not: what stands in no column of its tables."""

from __future__ import annotations

from collections.abc import Sequence

from tepal.records.columns import score_text
from tepal.records.round_record import RoundRecord

_RISE = 1.2
"""Of the loss on test data over its lowest value, from which on it is remarked."""


def remarks(metrics: Sequence[RoundRecord]) -> list[str]:
    """Return sentences about a run's rounds: a model that answers at a guess, or that learns its examples by heart."""
    return [*_guesses(metrics), *_by_heart(metrics)]


def _guesses(metrics: Sequence[RoundRecord]) -> list[str]:
    """Of the last round with a score on the server's held-out data."""
    scored = [line for line in metrics if line.accuracy is not None and line.largest_class is not None]
    if not scored:
        return []
    last = scored[-1]
    share = f"{score_text(last.largest_class)} of the held-out examples have the most frequent class"
    if last.predicted_classes == 1:
        return [
            f"After round {last.round} the model answers the same class for every held-out example; {share}. Train "
            "longer, with another learning rate, or from trained weights"
        ]
    if (last.accuracy or 0.0) <= (last.largest_class or 0.0):
        return [
            f"After round {last.round} the accuracy, {score_text(last.accuracy)}, is not above that of a constant "
            f"answer: {share}. Train longer, with another learning rate, or from trained weights"
        ]
    return []


def _by_heart(metrics: Sequence[RoundRecord]) -> list[str]:
    """If the loss on the same test data has risen while that of training has fallen."""
    scored = [line for line in metrics if line.loss is not None and line.train_loss is not None]
    scored = [line for line in scored if line.accuracy_of == scored[-1].accuracy_of]
    if not scored:
        return []
    last, best = scored[-1], min(scored, key=lambda line: line.loss or 0.0)
    if (last.loss or 0.0) <= _RISE * (best.loss or 0.0) or (last.train_loss or 0.0) >= (best.train_loss or 0.0):
        return []
    return [
        f"The test loss rose from {score_text(best.loss)} in round {best.round} to {score_text(last.loss)}, "
        f"while the training loss fell to {score_text(last.train_loss)}: the model learns its examples by heart. Train "
        "for fewer rounds or local epochs, or with weight-decay or augmented images"
    ]
