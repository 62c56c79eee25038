"""FedAMP: each client's model is mixed with the models near it (Huang et al. 2021, AAAI, arXiv:2007.03797).

With the attention-inducing function A(x) = 1 − e^(−x/σ) of the squared distances of the clients' models, and its
derivative A′(x) = e^(−x/σ)/σ (sections "The general method" and "FedAMP"):

    ξ_ij = α·A′(‖w_i − w_j‖²) for j ≠ i, scaled down where Σ_j ξ_ij > 1
    u_i  = (1 − Σ_j ξ_ij)·w_i + Σ_j ξ_ij·w_j
    w_i  = argmin_w F_i(w) + λ/(2α)·‖w − u_i‖²

Client i starts from u_i, trains with the proximal term, and returns w_i, its personal model, which is scored. α is the
same in all rounds. `personal/models.py` stores the models and sends the mixtures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from tepal.exchange.plan import PROXIMAL, Plan, Reply
from tepal.strategies.method import check_number
from tepal.strategies.mixing import Models
from tepal.strategies.options import NonNegative, Positive, RoundOptions, listed
from tepal.strategies.personal.models import MEAN_MODEL, PersonalMixing
from tepal.strategies.personal.storage import PersonalModels
from tepal.strategies.rounds.strategy import MethodStrategy


def squared_distances(gram: np.ndarray) -> np.ndarray:
    """Squared distances ‖w_i − w_j‖² of all pairs of models, from their dot products: G_ii + G_jj − 2·G_ij.

    Their error is that of the dot products, which is relative to ‖w‖²: subtract one vector near the models from all of
    them to get more digits of the same distances.

    Args:
        gram: (n, n), dot products of all pairs.

    Returns:
        (n, n) float64, at least 0 (negative results of rounding are set to 0), symmetric if `gram` is, with a diagonal
        of 0. A model that diverged, whose products are not finite, is infinitely far from all others.
    """
    squares = np.diagonal(gram)
    with np.errstate(invalid="ignore"):  # infinity − infinity
        distances: np.ndarray = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0)
    distances[~np.isfinite(distances)] = np.inf
    np.fill_diagonal(distances, 0.0)
    return distances


def attention_weights(
    distances: np.ndarray, sigma: float, alpha: float, rows: Sequence[int] | None = None
) -> np.ndarray:
    """Weights of all models in the mixtures of some clients: 1 − Σ_j ξ_ij of their own model, ξ_ij of the others.

    Args:
        distances: (n, n), squared, from `squared_distances`.
        sigma: σ of A, above 0, in the unit of the squared distances.
        alpha: α, above 0, in the same unit: two equal models have the weight α/σ in each other's mixture.
        rows: the clients; default: all.

    Returns:
        (len(rows), n) float64, at least 0; each row sums to 1.

    Raises:
        ValueError: sigma or alpha out of range.
    """
    check_number("sigma", sigma, sigma > 0, "a positive number")
    check_number("alpha", alpha, alpha > 0, "a positive number")
    chosen = np.arange(len(distances)) if rows is None else np.asarray(rows, np.intp)
    own = np.arange(len(chosen)), chosen
    xi: np.ndarray = alpha / sigma * np.exp(-distances[chosen] / sigma)
    xi[own] = 0.0
    sums = xi.sum(axis=1, keepdims=True)
    xi /= np.maximum(sums, 1.0)
    xi[own] = np.maximum(1.0 - xi.sum(axis=1), 0.0)
    return xi


class FedAMPMethod(PersonalMixing):
    """The method of FedAMP. Arguments are those of `FedAMP`."""

    name = "FedAMP"

    def __init__(self, sigma: float, alpha: float, lam: float) -> None:
        self.sigma, self.alpha, self.lam = sigma, alpha, lam

    def plan(
        self, state: PersonalModels, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        # λ/(2α)·‖w − u‖² is (μ/2)·‖w − w_received‖² with μ = λ/α.
        return [replace(plan, options={PROXIMAL: self.lam / self.alpha}) for plan in plans] if self.lam else plans

    def compared(self, models: Models, state: PersonalModels) -> Models:
        """The models' differences from the initial model: they have the same distances, with less rounding error."""
        rows = self.storage.rows
        return _Differences(models, np.concatenate([*rows.pieces(state.initial)]).astype(rows.dtype))

    def weights(self, state: PersonalModels, rows: Sequence[int]) -> np.ndarray:
        return attention_weights(squared_distances(state.gram), self.sigma, self.alpha, rows)

    def measures(self, state: PersonalModels) -> Mapping[str, np.ndarray]:
        """Squared `distances` (n, n) of the clients' models."""
        return {"distances": squared_distances(state.gram).astype(np.float32)}

    def describe(self) -> Mapping[str, str | int | float]:
        return {"sigma": self.sigma, "alpha": self.alpha, "lambda": self.lam}


@listed(
    "fedamp",
    title="FedAMP",
    does="a personal model for each client, mixed with nearby clients' models",
    paper="Huang et al. 2021, arXiv:2007.03797",
    result=MEAN_MODEL,
)
class FedAMP(MethodStrategy):
    """FedAMP over Tepal's exchange.

    The result's arrays are the mean of the clients' models. Each personal model is in the server's store and in its
    client's cache. The client's training function must add the plan's proximal term to the loss.

    Args:
        sigma: σ, the squared distance at which the weight of a model is 1/e of that of an equal model. Squared
            distances grow with the number of parameters, the learning rate and the local steps, so choose σ for the
            task: start with one or two times the median of the `distances` in an early round's record.
        alpha: α, in the same unit: equal models have the weight α/σ in each other's mixture. With σ/n, n equal clients
            start from their mean.
        lam: λ of the proximal term λ/(2α)·‖w − u‖².
        round_options: see `MethodStrategy`. `model` defines which entries are buffers, which are not compared; a model
            with no buffers but BatchNorm's need not be given. The store of models is a file in the folder of the
            checkpoints; without checkpoints, a temporary file.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        *,
        sigma: Positive = 100.0,
        alpha: Positive = 10.0,
        lam: NonNegative = 1.0,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(FedAMPMethod(sigma, alpha, lam), **round_options)


class _Differences:
    """Models less one row, which is subtracted from each of them."""

    def __init__(self, models: Models, row: np.ndarray) -> None:
        self._models = models
        self._row = row
        self.shape = models.shape

    def block(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(over="ignore"):  # a model that diverged
            return np.asarray(self._models.block(start, stop) - self._row[start:stop])
