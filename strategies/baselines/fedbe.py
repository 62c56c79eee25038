"""FedBE: a distribution over models is fitted to the clients' models, and its ensemble is distilled into one model.

Chen & Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021, arXiv:2009.01974,
sections 3 and 4. After a round in which K clients, with p_k = n_k / Σ n, returned w_1 … w_K:

    mean       w̄ = Σ_k p_k·w_k
    Gaussian   w ~ N(w̄, diag Σ_k p_k·(w_k − w̄)²)
    Dirichlet  w = Σ_k γ_k·w_k, γ ~ Dir(c·K·p)
    ensemble   M models drawn from one of the two, w̄, and w_1 … w_K: the mean of their probabilities
    next model w̄ as the student, distilled on the ensemble's predictions for unlabelled examples of the server's

For clients of equal size Dir(c·K·p) is the paper's symmetric Dir(c, …, c); for others the weights stand in the
parameters, so that the draws' mean is w̄ as it is for the Gaussian.

Without distillation ("random sampling to replace knowledge distillation") the next model is one draw.

What is drawn are the parameters. Buffers, such as BatchNorm's statistics, are w̄'s in every drawn model. The clients'
models of one round lie in a file; one model of the ensemble at a time is in memory. What is sent, both ways, is
FedAvg's.
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
from tepal.strategies.fedavg import Averaging, ModelMerger, ModelState
from tepal.strategies.method import MethodError, Run, ServerModel
from tepal.strategies.mixing import Models, weighted_rows
from tepal.strategies.options import Positive, RoundOptions, listed
from tepal.strategies.personal.store import ModelStore, RowLayout
from tepal.strategies.rounds.strategy import MethodStrategy

Distil = Callable[[Iterable[Arrays], Arrays], Arrays]
"""(entries of the ensemble's models, one by one; of the student) → entries of the student, trained."""

_BLOCK = 1 << 23  # numbers of all clients together that are in memory at a time
_DRAWS = 0xFEDBE  # what a generator is for, beside (seed, round)


@dataclass(frozen=True)
class GaussianModels:
    """N(mean, diag(deviation²)): means and standard deviations of P parameters."""

    mean: np.ndarray
    deviation: np.ndarray

    @staticmethod
    def fit(models: Models, shares: np.ndarray, counted: int) -> GaussianModels:
        """Weighted mean and variance, entry by entry, over the clients.

        Args:
            models: (K, ≥ counted).
            shares: (K,) p, at least 0, with the sum 1.
            counted: P, how many of the first numbers are parameters.
        """
        mean, deviation = np.empty(counted), np.empty(counted)
        step = max(_BLOCK // len(shares), 1024)
        for start in range(0, counted, step):
            block = models.block(start, min(start + step, counted)).astype(np.float64)
            center = shares @ block
            mean[start : start + step] = center
            # Around the mean, not as E[w²] − E[w]²: clients differ by little, and that would lose it.
            deviation[start : start + step] = np.sqrt(shares @ np.square(block - center))
        return GaussianModels(mean, deviation)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """One model's parameters, (P,) float64."""
        drawn: np.ndarray = rng.standard_normal(len(self.mean))
        drawn *= self.deviation
        drawn += self.mean
        return drawn


@dataclass(frozen=True)
class DirichletModels:
    """Convex combinations Σ_k γ_k·w_k of the clients' models, γ ~ Dir(c·K·p).

    models: (K, …).
    shares: (K,) p, above 0, with the sum 1.
    concentration: c, above 0: the smaller it is, the nearer are the draws to single clients' models.
    """

    models: Models
    shares: np.ndarray
    concentration: float

    def gamma(self, rng: np.random.Generator) -> np.ndarray:
        """One draw of γ (K,): at least 0, with the sum 1 and the mean p."""
        return rng.dirichlet(self.concentration * len(self.shares) * self.shares)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """One model, all numbers of its row, in the dtype of the models."""
        return np.concatenate([part for _, part in weighted_rows(self.models, self.gamma(rng)[None])])


class BayesianEnsemble(Averaging):
    """The method of FedBE. Arguments are those of `FedBE`."""

    def __init__(
        self,
        distribution: str = "gaussian",
        samples: int = 10,
        concentration: float = 1.0,
        distil: Distil | Literal[False] | None = None,
    ) -> None:
        if not callable(distil) and distil is not False:
            raise MethodError(
                "FedBE distils its ensemble into the next global model on unlabelled examples, and none are given: "
                "set distil to a function that does so, such as tepal.server_app.distillation.Distiller(model, layout, "
                "inputs, ...), or distil=False for a random draw in its place"
            )
        self.distribution = distribution
        self.samples = samples
        self.concentration = concentration
        self.distil = distil
        self.rows: RowLayout
        self.run: Run

    def init(self, model: ServerModel, run: Run) -> ModelState:
        self.rows = RowLayout.of(model, needed_for="FedBE draws")
        self.run = run
        return super().init(model, run)

    def merger(self, state: ModelState, round: int) -> EnsembleDistiller:
        return EnsembleDistiller(self, state, round)

    def describe(self) -> Mapping[str, str | int | float]:
        return {
            "distribution": self.distribution,
            "samples": self.samples,
            "concentration": self.concentration,
            "distil": bool(self.distil),
        }


class EnsembleDistiller(ModelMerger[ModelState]):
    """Puts each client's model into a file as it comes; at the end the ensemble is drawn from there, and distilled."""

    def __init__(self, method: BayesianEnsemble, state: ModelState, round: int) -> None:
        super().__init__(state)
        self._method = method
        self._round = round
        self._slots: dict[str, int] = {}
        self._examples: dict[str, int] = {}
        self._counters: dict[str, Arrays] = {}

    @cached_property
    def _store(self) -> ModelStore:
        # Made at the first reply, where a disk that is full costs that reply and not the run.
        rows = self._method.rows
        return ModelStore(None, rows.width, rows.dtype, folder=self._method.run.folder)

    def add(self, reply: Reply) -> None:
        part, rows = reply.parts[MODEL], self._method.rows
        self._slots[reply.client] = self._store.write(rows.pieces(part))
        self._examples[reply.client] = reply.examples
        self._counters[reply.client] = {name: np.array(part[name]) for name in rows.own}
        super().add(reply)

    def finish(self) -> ModelState:
        averaged = super().finish()
        mean, distribution, distil = averaged.entries, self._fit(), self._method.distil
        merged = distil(self._ensemble(distribution, mean), mean) if distil else self._draw(distribution, mean, 0)
        self._store.close()
        return replace(averaged, entries={**mean, **merged})

    @property
    def _clients(self) -> list[str]:
        return sorted(self._slots)  # not in the order in which they replied, which the draws must not depend on

    def _fit(self) -> GaussianModels | DirichletModels:
        method = self._method
        models = self._store.rows(self._slots[client] for client in self._clients)
        examples = np.array([self._examples[client] for client in self._clients], np.float64)
        shares = examples / examples.sum()
        if method.distribution == "gaussian":
            return GaussianModels.fit(models, shares, method.rows.counted)
        return DirichletModels(models, shares, method.concentration)

    def _draw(self, distribution: GaussianModels | DirichletModels, mean: Arrays, number: int) -> dict[str, np.ndarray]:
        """A model whose parameters are drawn, and whose other entries are the mean's."""
        rows = self._method.rows
        drawn = distribution.draw(np.random.default_rng([self._method.run.seed, self._round, _DRAWS, number]))
        return {**mean, **rows.entries_of(drawn[: rows.counted])}

    def _ensemble(self, distribution: GaussianModels | DirichletModels, mean: Arrays) -> Iterator[Arrays]:
        """The ensemble's models, made one by one: those drawn, the mean, and the clients' own."""
        for number in range(self._method.samples):
            yield self._draw(distribution, mean, number)
        yield mean
        for client in self._clients:
            row = self._store.row(self._slots[client])
            yield {**mean, **self._method.rows.entries_of(row), **self._counters[client]}


class Distillation(BaseModel):
    """Keys of the run config that say how the server app distils, with a `Distiller` of its own as `distil`."""

    distil: bool = Field(
        True,
        description="the ensemble is distilled into the next model, on the server's unlabelled examples "
        "(server-share); false: the next model is one draw",
    )
    epochs: int = Field(20, ge=1, le=10_000, description="passes over these examples in one distillation")
    learning_rate: float = Field(
        1e-3, gt=0, le=100, description="of the distillation's SGD; it falls to 0.4 of it in cycles of 25 steps"
    )
    batch_size: int = Field(128, ge=1, description="examples in a step of the distillation")


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
        distribution: fitted over the clients' models of each round.
        samples: M, models drawn from it for the ensemble; the paper has 10.
        concentration: c of the Dirichlet distribution: the smaller, the nearer to single clients' models. With 1, γ of
            equally large clients is uniform on the simplex.
        distil: trains the student on the ensemble's predictions, for example a `Distiller` of
            `tepal.server_app.distillation`; it gets the entries of the ensemble's models, which it must take one by
            one, and the student's, and returns the student's. False: the next global model is one draw.
        round_options: see `MethodStrategy`. `model` says what is a buffer and is not drawn; a model whose only buffers
            are BatchNorm's need not be given. The clients' models of a round lie in an unnamed file in the folder of
            the checkpoints, or in that for temporary files.

    Raises:
        ValueError: an option out of range; as MethodError where nothing is given to distil with.
    """

    def __init__(
        self,
        *,
        distribution: Literal["gaussian", "dirichlet"] = "gaussian",
        samples: Annotated[int, Field(ge=0, le=1000)] = 10,
        concentration: Positive = 1.0,
        distil: Distil | Literal[False] | None = None,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(BayesianEnsemble(distribution, samples, concentration, distil), **round_options)
