"""FedBE: an ensemble is drawn from a distribution over the clients' models, and distilled into one model.

Chen & Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021, arXiv:2009.01974,
sections 3 and 4. After a round in which K clients, with p_k = n_k / Σ n, returned w_1 … w_K:

    mean       w̄ = Σ_k p_k·w_k
    Gaussian   w ~ N(w̄, v·diag Σ_k p_k·(w_k − w̄)²)
    Dirichlet  w = Σ_k γ_k·w_k, γ ~ Dir(c·K·p)
    ensemble   M models drawn from one of the two, w̄, and w_1 … w_K: the mean p̄ of their probabilities
    next model w̄ as the student, distilled on p ∝ p̄^(1/T) for the server's unlabelled examples

For clients with equal n_k, Dir(c·K·p) is the paper's symmetric Dir(c, …, c); otherwise the parameters contain the
weights, so that the mean of the draws is w̄, as for the Gaussian.

The paper's text has v = 1 and T = 1. The authors' released code has T = 0.5, and multiplies the deviation by 0.1, so
that v = 0.01.

Without distillation ("random sampling to replace knowledge distillation") the next model is one draw.

Only parameters are drawn. Buffers, such as BatchNorm's statistics, are those of w̄ in every drawn model. The clients'
models of a round are in a file; one model of the ensemble at a time is in memory. The bytes are FedAvg's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, Unpack

import numpy as np
from pydantic import BaseModel, Field

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import MODEL, Reply
from tepal.strategies.fedavg import FedAvgMethod, ModelMerger, ModelState
from tepal.strategies.method import MethodError, Run, ServerModel
from tepal.strategies.mixing import Models, weighted_rows
from tepal.strategies.options import Positive, RoundOptions, listed
from tepal.strategies.personal.store import ModelStore, RowLayout
from tepal.strategies.rounds.strategy import MethodStrategy

Distil = Callable[[Iterable[Arrays], Arrays], Arrays]
"""(entries of one model of the ensemble after another; of the student) → entries of the trained student."""

_BLOCK = 1 << 23  # elements of all clients' models together that are in memory at a time
_DRAWS = 0xFEDBE  # the purpose of a generator, which is seeded with it, the run's seed and the round


@dataclass(frozen=True)
class GaussianModels:
    """The distribution N(mean, diag(deviation²)) of the P parameters of a model."""

    mean: np.ndarray
    deviation: np.ndarray

    @staticmethod
    def fit(models: Models, shares: np.ndarray, counted: int, variance_scale: float = 1.0) -> GaussianModels:
        """Fit mean and variance of each parameter, weighted over the clients.

        Args:
            models: (K, ≥ counted).
            shares: (K,) p, at least 0, with the sum 1.
            counted: P, the number of parameters, which come first in a row.
            variance_scale: factor of the variances, above 0.
        """
        mean, deviation = np.empty(counted), np.empty(counted)
        step = max(_BLOCK // len(shares), 1024)
        for start in range(0, counted, step):
            block = models.block(start, min(start + step, counted)).astype(np.float64)
            center = shares @ block
            mean[start : start + step] = center
            # Not E[w²] − E[w]²: the clients' models differ by little, and rounding would dominate the difference.
            deviation[start : start + step] = np.sqrt(variance_scale * (shares @ np.square(block - center)))
        return GaussianModels(mean, deviation)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw the parameters of one model, (P,) float64."""
        drawn: np.ndarray = rng.standard_normal(len(self.mean))
        drawn *= self.deviation
        drawn += self.mean
        return drawn


@dataclass(frozen=True)
class DirichletModels:
    """Convex combinations Σ_k γ_k·w_k of the clients' models, with γ ~ Dir(c·K·p).

    Args:
        models: (K, …).
        shares: (K,) p, above 0, with the sum 1.
        concentration: c, above 0: the smaller, the nearer the draws are to single clients' models.
    """

    models: Models
    shares: np.ndarray
    concentration: float

    def gamma(self, rng: np.random.Generator) -> np.ndarray:
        """Draw γ, (K,): at least 0, with the sum 1 and the mean p."""
        return rng.dirichlet(self.concentration * len(self.shares) * self.shares)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw one model: its whole row, in the dtype of the models."""
        return np.concatenate([part for _, part in weighted_rows(self.models, self.gamma(rng)[None])])


class FedBEMethod(FedAvgMethod):
    """The method of FedBE. Arguments are those of `FedBE`."""

    averages = False  # models are drawn from the distribution of the clients'

    def __init__(
        self,
        distribution: str = "gaussian",
        samples: int = 10,
        concentration: float = 1.0,
        variance_scale: float = 1.0,
        distil: Distil | Literal[False] | None = None,
    ) -> None:
        if not callable(distil) and distil is not False:
            raise MethodError(
                "FedBE distils its ensemble into the next global model on unlabelled examples, and none are given: "
                "set distil to a function that does so, such as tepal.server_app.distillation.Distiller(model, layout, "
                "inputs, ...), or choose distil=False, with which the next model is a random draw"
            )
        self.distribution = distribution
        self.samples = samples
        self.concentration = concentration
        self.variance_scale = variance_scale
        self.distil = distil
        self.rows: RowLayout
        self.run: Run

    def init(self, model: ServerModel, run: Run) -> ModelState:
        self.rows = RowLayout.of(model, needed_for="FedBE draws")
        self.run = run
        return super().init(model, run)

    def merger(self, state: ModelState, round: int) -> FedBEMerger:
        return FedBEMerger(self, state, round)

    def describe(self) -> Mapping[str, str | int | float]:
        return {
            "distribution": self.distribution,
            "samples": self.samples,
            "concentration": self.concentration,
            "variance scale": self.variance_scale,
            "distil": bool(self.distil),
            "temperature": float(getattr(self.distil, "temperature", 1.0)),
        }


class FedBEMerger(ModelMerger[ModelState]):
    """Store each client's model in a file as it arrives; at the end draw the ensemble from the file and distil it."""

    def __init__(self, method: FedBEMethod, state: ModelState, round: int) -> None:
        super().__init__(state, mean=method.mean)
        self._method = method
        self._round = round
        self._slots: dict[str, int] = {}
        self._examples: dict[str, int] = {}
        self._counters: dict[str, Arrays] = {}

    @cached_property
    def _store(self) -> ModelStore:
        # Created with the first reply: if the disk is full, that reply is lost, but not the run.
        rows = self._method.rows
        return ModelStore(None, rows.width, rows.dtype, folder=self._method.run.folder)

    def add(self, reply: Reply) -> None:
        part, rows = reply.parts[MODEL], self._method.rows
        add = self._mean.prepare(part, reply.examples)
        counters = {name: np.array(part[name]) for name in rows.own}
        self._slots[reply.client] = self._store.write(rows.pieces(part))
        self._examples[reply.client] = reply.examples
        self._counters[reply.client] = counters
        add()

    def finish(self) -> ModelState:
        averaged = super().finish()
        mean, distribution, distil = averaged.entries, self._fit(), self._method.distil
        merged = distil(self._ensemble(distribution, mean), mean) if distil else self._draw(distribution, mean, 0)
        self._store.close()
        return replace(averaged, entries={**mean, **merged})

    @property
    def _clients(self) -> list[str]:
        return sorted(self._slots)  # the draws must not depend on the order of the replies

    def _fit(self) -> GaussianModels | DirichletModels:
        method = self._method
        models = self._store.rows(self._slots[client] for client in self._clients)
        examples = np.array([self._examples[client] for client in self._clients], np.float64)
        shares = examples / examples.sum()
        if method.distribution == "gaussian":
            return GaussianModels.fit(models, shares, method.rows.counted, method.variance_scale)
        return DirichletModels(models, shares, method.concentration)

    def _draw(self, distribution: GaussianModels | DirichletModels, mean: Arrays, number: int) -> dict[str, np.ndarray]:
        """A model with drawn parameters, and the other entries of the mean."""
        rows = self._method.rows
        drawn = distribution.draw(np.random.default_rng([self._method.run.seed, self._round, _DRAWS, number]))
        return {**mean, **rows.entries_of(drawn[: rows.counted])}

    def _ensemble(self, distribution: GaussianModels | DirichletModels, mean: Arrays) -> Iterator[Arrays]:
        """The models of the ensemble, one after the other: the draws, the mean, and the clients' models."""
        for number in range(self._method.samples):
            yield self._draw(distribution, mean, number)
        yield mean
        for client in self._clients:
            row = self._store.row(self._slots[client])
            yield {**mean, **self._method.rows.entries_of(row), **self._counters[client]}


class Distillation(BaseModel):
    """Keys of the run config for the `Distiller` that the server app passes as `distil`."""

    distil: bool = Field(
        True,
        description="distil the ensemble into the next model, on the server's unlabelled examples "
        "(server-share); false: the next model is one draw",
    )
    epochs: int = Field(20, ge=1, le=10_000, description="passes over these examples in one distillation")
    learning_rate: float = Field(
        1e-3, gt=0, le=100, description="of the distillation's SGD; it falls to 0.4 of this value in cycles of 25 steps"
    )
    batch_size: int = Field(128, ge=1, description="examples in a step of the distillation")
    temperature: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="T: the student is trained on p ∝ p̄^(1/T), where p̄ are the ensemble's mean probabilities. 1: on p̄, "
        "as in the paper's text; below 1: on more certain predictions. The authors' released code has 0.5",
    )


@listed(
    "fedbe",
    title="FedBE",
    does="an ensemble drawn from the clients' models, distilled on the server",
    paper="Chen & Chao 2021, arXiv:2009.01974",
    further=Distillation,
)
class FedBE(MethodStrategy):
    """FedBE over Tepal's exchange.

    Args:
        distribution: distribution that is fitted to the clients' models of each round.
        samples: M, models that are drawn from it for the ensemble; the paper has 10.
        concentration: c of the Dirichlet distribution: the smaller, the nearer to single clients' models. With 1, and
            clients with equal numbers of examples, γ is uniform on the simplex.
        variance_scale: factor of the Gaussian's variance: 1 in the paper's text. The authors' released code multiplies
            the standard deviation by 0.1, which is 0.01 here.
        distil: function that trains the student on the ensemble's predictions, such as a `Distiller` of
            `tepal.server_app.distillation`. Its arguments are an iterator over the entries of each model of the
            ensemble, and the student's entries; it returns the trained entries. Its attribute `temperature`, if it has
            one, is an option of the run. False: the next model is one draw.
        round_options: see `MethodStrategy`. `model` defines which entries are buffers, which are not drawn; a model
            with no buffers but BatchNorm's need not be given. The clients' models of a round are in an unnamed file in
            the folder of the checkpoints; without checkpoints, in the folder for temporary files.

    Raises:
        ValueError: an option out of range.
        MethodError: `distil` is neither a function nor False.
    """

    def __init__(
        self,
        *,
        distribution: Literal["gaussian", "dirichlet"] = "gaussian",
        samples: Annotated[int, Field(ge=0, le=1000)] = 10,
        concentration: Positive = 1.0,
        variance_scale: Positive = 1.0,
        distil: Distil | Literal[False] | None = None,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        method = FedBEMethod(distribution, samples, concentration, variance_scale, distil)
        super().__init__(method, **round_options)
