"""FedAMP: each client's model is mixed with the models near it (Huang et al. 2021, AAAI, arXiv:2007.03797).

With the attention-inducing function A(x) = 1 − e^(−x/σ) of the squared distances of the clients' models, and its
derivative A′(x) = e^(−x/σ)/σ (sections "The general method" and "FedAMP"):

    ξ_ij = α·A′(‖w_i − w_j‖²) for j ≠ i, scaled down where Σ_j ξ_ij > 1
    u_i  = (1 − Σ_j ξ_ij)·w_i + Σ_j ξ_ij·w_j
    w_i  = argmin_w F_i(w) + λ/(2α)·‖w − u_i‖²

Client i starts from u_i, trains with the proximal term, and returns w_i, its personal model, which is scored. σ and α
are fixed, as in the paper, or measured each round by the models' distances. `personal/models.py` stores the models and
sends the mixtures.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack

import numpy as np

from tepal.exchange.plan import PROXIMAL, Plan, Reply
from tepal.strategies.method import check_number
from tepal.strategies.mixing import Models
from tepal.strategies.options import NonNegative, Positive, RoundOptions, listed
from tepal.strategies.personal.models import MEAN, MEAN_MODEL, Newcomers, PersonalMixing
from tepal.strategies.personal.storage import PersonalModels
from tepal.strategies.rounds.strategy import MethodStrategy

Unit = Literal["median", "absolute"]


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


@dataclass(frozen=True)
class Attention:
    """σ and α of one round."""

    sigma: float
    """σ, a squared distance, at least 0. At 0 models that differ have no weight in each other's mixture."""
    equal: float
    """α/σ, above 0: the weight of two equal models in each other's mixture."""

    @property
    def alpha(self) -> float:
        """α, in the unit of σ."""
        return self.sigma * self.equal


def attention(distances: np.ndarray, sigma: float, alpha: float, unit: Unit) -> Attention:
    """σ and α of a round, from the options of these names.

    Args:
        distances: (n, n), squared, symmetric, from `squared_distances`; infinite to a model that diverged.
        sigma, alpha: above 0.
        unit: "absolute": both are squared distances, as in the paper. "median": σ is `sigma` times the median of the
            finite distances of the pairs i < j, and α is `alpha`·σ/n. Then the weights do not change if all distances
            are multiplied by a number, and with `alpha` up to 1 the weight of a client's own model is at least 1/n. σ
            and α are 0 if there is no such pair, or if half of the pairs or more are of equal models.

    Raises:
        ValueError: sigma or alpha out of range.
    """
    check_number("sigma", sigma, sigma > 0, "a positive number")
    check_number("alpha", alpha, alpha > 0, "a positive number")
    if unit == "absolute":
        return Attention(sigma, alpha / sigma)
    n = len(distances)
    pairs = distances[~np.tri(n, dtype=bool)]
    finite = pairs[np.isfinite(pairs)]
    median = float(np.median(finite)) if len(finite) else 0.0
    return Attention(min(sigma * median, sys.float_info.max), alpha / max(n, 1))


def attention_weights(
    distances: np.ndarray, attention: Attention, rows: Sequence[int] | None = None
) -> np.ndarray:
    """Weights of all models in the mixtures of some clients: 1 − Σ_j ξ_ij of their own model, ξ_ij of the others.

    Args:
        distances: (n, n), squared, from `squared_distances`.
        attention: σ, in the unit of the distances, and α/σ. With σ = 0 the weights are their limit for σ → 0, in
            which e^(−x/σ) is 1 for x = 0 and else 0.
        rows: the clients; default: all.

    Returns:
        (len(rows), n) float64, at least 0; each row sums to 1.
    """
    chosen = np.arange(len(distances)) if rows is None else np.asarray(rows, np.intp)
    own = np.arange(len(chosen)), chosen
    apart = distances[chosen]
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.where(apart > 0, apart / attention.sigma, 0.0)
    xi: np.ndarray = attention.equal * np.exp(-exponents)
    xi[own] = 0.0
    sums = xi.sum(axis=1, keepdims=True)
    xi /= np.maximum(sums, 1.0)
    xi[own] = np.maximum(1.0 - xi.sum(axis=1), 0.0)
    return xi


class FedAMPMethod(PersonalMixing):
    """The method of FedAMP. Arguments are those of `FedAMP`."""

    name = "FedAMP"

    def __init__(self, sigma: float, alpha: float, lam: float, unit: Unit, newcomers: Newcomers = MEAN) -> None:
        super().__init__(newcomers)
        self.sigma, self.alpha, self.lam, self.unit = sigma, alpha, lam, unit

    def plan(
        self, state: PersonalModels, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        alpha = self._attention(squared_distances(state.gram)).alpha
        if not (self.lam and alpha):
            return plans
        # λ/(2α)·‖w − u‖² is (μ/2)·‖w − w_received‖² with μ = λ/α.
        return [replace(plan, options={PROXIMAL: self.lam / alpha}) for plan in plans]

    def compared(self, models: Models, state: PersonalModels) -> Models:
        """The models' differences from the initial model: they have the same distances, with less rounding error."""
        rows = self.storage.rows
        return _Differences(models, np.concatenate([*rows.pieces(state.initial)]).astype(rows.dtype))

    def weights(self, state: PersonalModels, rows: Sequence[int], round: int) -> np.ndarray:
        distances = squared_distances(state.gram)
        return attention_weights(distances, self._attention(distances), rows)

    def measures(self, state: PersonalModels) -> Mapping[str, np.ndarray]:
        """Squared `distances` (n, n) of the clients' models, and the round's σ and α, in the same unit."""
        distances = squared_distances(state.gram)
        attention = self._attention(distances)
        return {
            "distances": distances.astype(np.float32),
            "sigma": np.array(attention.sigma),
            "alpha": np.array(attention.alpha),
        }

    def describe(self) -> Mapping[str, str | int | float]:
        return {
            "sigma": self.sigma, "alpha": self.alpha, "unit": self.unit, "lambda": self.lam, **super().describe(),
        }  # fmt: skip

    def _attention(self, distances: np.ndarray) -> Attention:
        return attention(distances, self.sigma, self.alpha, self.unit)


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
    client's cache. With `lam` above 0 the client's training function must add the plan's proximal term to the loss.

    Args:
        sigma: σ, the squared distance at which the weight of a model is 1/e of that of an equal model. The larger, the
            more the models are mixed. It is a multiple of the median of the round's squared distances, or with the unit
            "absolute" a squared distance.
        alpha: α. Equal models have the weight α/σ in each other's mixture. A multiple of σ/n for n clients: with 1, n
            equal clients start from their mean, and a client's own model has at least the weight 1/n. With the unit
            "absolute" a squared distance.
        unit: "median" for σ and α that follow the models' distances in each round. "absolute" for fixed squared
            distances, as in the paper. These grow with the number of parameters, the learning rate and the local
            steps, so the defaults are of no use with it: set σ to one or two times the median of the `distances` in an
            early round's record, and α to σ/n.
        lam: λ of the proximal term λ/(2α)·‖w − u‖²; with 0 there is none. With the unit "median" α is measured in the
            models' squared distances, and λ is in the unit of the loss: a model at the median distance from its mixture
            costs λ·n/2 with the other defaults, so keep λ far below 1/n. The term is left out in a round in which α is
            0, such as the first.
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
        sigma: Positive = 1.0,
        alpha: Positive = 1.0,
        unit: Unit = "median",
        lam: NonNegative = 0.0,
        newcomers: Newcomers = MEAN,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(FedAMPMethod(sigma, alpha, lam, unit, newcomers), **round_options)


class _Differences:
    """Models less one row, which is subtracted from each of them."""

    def __init__(self, models: Models, row: np.ndarray) -> None:
        self._models = models
        self._row = row
        self.shape = models.shape

    def block(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(over="ignore"):  # a model that diverged
            return np.asarray(self._models.block(start, stop) - self._row[start:stop])
