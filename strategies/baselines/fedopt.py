"""Server optimizers: FedAvgM, FedAdagrad, FedYogi and FedAdam take the mean of the clients' changes as a gradient.

    Δ_t = Σ_k (n_k / Σ n)·w_k − w_t

    FedAvgM      m_t = β·m_{t−1} + Δ_t                                 w_{t+1} = w_t + η·m_t
    FedAdagrad   v_t = v_{t−1} + Δ_t²                             ⎫
    FedYogi      v_t = v_{t−1} − (1 − β₂)·Δ_t²·sign(v_{t−1} − Δ_t²)  ⎬    w_{t+1} = w_t + η·m_t / (√v_t + τ)
    FedAdam      v_t = β₂·v_{t−1} + (1 − β₂)·Δ_t²                   ⎭    m_t = β₁·m_{t−1} + (1 − β₁)·Δ_t

FedAvgM: Hsu et al. 2019, arXiv:1909.06335, section 4.3. The others: Reddi et al. 2021, arXiv:2003.00295, algorithm 2,
with v_{−1} = τ² and without bias correction. (Flower's FedAvgM is the paper's. Its FedAdagrad, FedYogi and FedAdam
start from v = 0, and its FedAdam corrects the bias.) Only parameters have moments; buffers, such as BatchNorm's
statistics, are averaged as in FedAvg.

v remembers one large Δ_t for many rounds, FedAdagrad's for ever: a single hostile reply would slow the whole run down.
FedAdagrad, FedYogi and FedAdam therefore scale Δ_t down, for both moments, to the lesser of two norms:

    Σ_k (n_k / Σ n)·min(‖w_k − w_t‖, c·median_k ‖w_k − w_t‖)      of this round; the median is weighted by n_k
    c·median ‖Δ‖ of the last rounds                              c = `MOST_TIMES`

The first is for weighted means, and for rounds in which a client's change exceeds c times the median; the norms of the
clients' changes are those found as their replies are read. Of fewer than `FEWEST` values no median says what is usual.
Otherwise the steps are the papers'.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Unpack

import numpy as np

from tepal.exchange.bounds import BadReply
from tepal.exchange.layout import Arrays, Names
from tepal.exchange.norms import squared_norms
from tepal.exchange.plan import MODEL, Reply
from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.fedavg import GlobalModelMethod, ModelMerger, ModelState, only_start
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import Decay, Positive, RoundOptions, listed
from tepal.strategies.rounds.norms import ROUNDS
from tepal.strategies.rounds.strategy import MethodStrategy

MOST_TIMES = 10.0
"""c: so many times the usual norm is the most that counts in the norm of an adaptive optimizer's pseudo-gradient."""

FEWEST = 3
"""Norms from which their median says what is usual."""

_ROUNDING = 1 + 1e-3  # norms that exceed the limit by rounding errors do not exceed it


@dataclass(frozen=True)
class OptimizerState(ModelState):
    """A global model, and the moments m and v for each parameter, in float32 or wider; None before the first round."""

    first: Arrays | None = None
    second: Arrays | None = None
    norms: tuple[float, ...] = ()
    """‖Δ‖ over the parameters in the last rounds, scaled down; of adaptive optimizers."""
    factors: tuple[float, ...] = ()
    """Factors of the learning rate in these rounds. States of earlier versions have none."""


class ServerOptimizerMethod(GlobalModelMethod[OptimizerState]):
    """Base class of the methods of this module. Subclasses define `step`."""

    limits_delta = False
    """Whether Δ_t is scaled down if it is far larger than usual."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._parameters: Names
        self._run: Run

    def init(self, model: ServerModel, run: Run) -> OptimizerState:
        self._parameters, self._run, self.mean = parameters_of(model), run, run.mean
        return OptimizerState(only_start(model))

    def merger(self, state: OptimizerState, round: int) -> OptimizerMerger:
        return OptimizerMerger(self, state, self._run.factor(round))

    @abstractmethod
    def step(
        self, delta: np.ndarray, first: np.ndarray | None, second: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Step of one parameter: (w_{t+1} − w_t, m_t, v_t) from Δ_t, m_{t−1} and v_{t−1}, None in the first round."""

    def describe(self) -> Mapping[str, str | int | float]:
        return {"learning rate": self.learning_rate}


class OptimizerMerger(ModelMerger[OptimizerState]):
    """Merge replies as FedAvg does, then step from the model before the round along the difference.

    Args:
        method: that makes the step.
        state: before the round.
        factor: of the learning rate in the round.
    """

    def __init__(self, method: ServerOptimizerMethod, state: OptimizerState, factor: float) -> None:
        super().__init__(state, mean=method.mean)
        self._method = method
        self._factor = factor
        # Norms of which it is not known at which learning rate they were found are forgotten.
        known = len(state.norms) == len(state.factors)
        self._earlier = tuple(zip(state.norms, state.factors, strict=True)) if known else ()
        """(‖Δ‖, factor) of the last rounds."""
        self._changes: list[tuple[float, int]] = []
        """(norm of the client's change of the parameters, n_k)."""

    def add(self, reply: Reply) -> None:
        super().add(reply)
        squares = reply.squares.get(MODEL, {})
        change = math.sqrt(sum(squares.get(name, 0.0) for name in self._method._parameters))
        self._changes.append((change, reply.examples))

    def finish(self) -> OptimizerState:
        state, entries = self._state, self._mean.result()
        first, second = dict(state.first or {}), dict(state.second or {})
        share, rounds = self._limited(entries) if self._method.limits_delta else (1.0, ())
        for name in self._method._parameters:
            w = state.entries[name]
            wide = np.result_type(w.dtype, np.float32)  # squares of changes are too small for float16
            delta = np.subtract(entries[name], w, dtype=wide)
            if share < 1:
                delta = delta * share
            change, m, v = self._method.step(delta, first.get(name), second.get(name))
            # Arithmetic on arrays without dimensions gives numpy's scalars, which no state can have.
            entries[name] = np.asarray(w + change, dtype=w.dtype)
            first[name] = np.asarray(m, dtype=wide)
            if v is not None:
                second[name] = np.asarray(v, dtype=wide)
        norms, factors = tuple(norm for norm, _ in rounds), tuple(factor for _, factor in rounds)
        return self._next_state(entries, first=first, second=second, norms=norms, factors=factors)

    def _limited(self, entries: Arrays) -> tuple[float, tuple[tuple[float, float], ...]]:
        """The share of Δ_t that enters the step, and (‖Δ‖, factor) of the last rounds and this one."""
        earlier = self._earlier
        parameters = {name: entries[name] for name in self._method._parameters}
        try:
            norm = math.sqrt(sum(squared_norms(parameters, self._state.entries).values()))
        except BadReply:  # such a merge does not count
            return 1.0, earlier
        most = min(self._most_of_clients(), self._most_of_rounds())
        share, counted = (most / norm, most) if norm > most * _ROUNDING else (1.0, norm)
        return share, (*earlier, (counted, self._factor))[-ROUNDS:] if math.isfinite(counted) else earlier

    def _most_of_rounds(self) -> float:
        """Largest norm of Δ_t beside those of the last rounds.

        Where the learning rate rises, as it does if a run with a cosine schedule is prolonged, what is usual rises with
        it. It does not fall with it: not all of a change need follow the learning rate.
        """
        now, earlier = self._factor, [(norm, then) for norm, then in self._earlier if then > 0]
        usual = median(norm * max(now / then, 1.0) for norm, then in earlier) if len(earlier) >= FEWEST else 0.0
        return MOST_TIMES * usual if usual > 0 else math.inf  # a learning rate of zero says nothing

    def _most_of_clients(self) -> float:
        """Largest norm of Δ_t that the clients' changes allow, each counted up to what is usual among them."""
        # The norm of a robust mean may exceed the mean of the norms.
        if len(self._changes) < FEWEST or not isinstance(self._mean, WeightedMean):
            return math.inf
        most = MOST_TIMES * _weighted_median(self._changes)
        if most == 0 or all(norm <= most for norm, _ in self._changes):
            return math.inf
        return sum(n * min(norm, most) for norm, n in self._changes) / sum(n for _, n in self._changes)


def _weighted_median(norms: Sequence[tuple[float, int]]) -> float:
    """The least norm for which those up to it have half of the weight."""
    half, so_far = sum(weight for _, weight in norms) / 2, 0
    for norm, weight in sorted(norms):
        so_far += weight
        if so_far >= half:
            return norm
    return math.inf


class FedAvgMMethod(ServerOptimizerMethod):
    """The method of FedAvgM."""

    def __init__(self, learning_rate: float, momentum: float) -> None:
        super().__init__(learning_rate)
        self.momentum = momentum

    def step(
        self, delta: np.ndarray, first: np.ndarray | None, second: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        m = delta if first is None else self.momentum * first + delta
        return self.learning_rate * m, m, None

    def describe(self) -> Mapping[str, str | int | float]:
        return {**super().describe(), "momentum": self.momentum}


class AdaptiveOptimizerMethod(ServerOptimizerMethod):
    """Base class of the methods of FedAdagrad, FedYogi and FedAdam. Subclasses define `second`."""

    limits_delta = True

    def __init__(self, learning_rate: float, beta1: float, beta2: float, tau: float) -> None:
        super().__init__(learning_rate)
        self.beta1, self.beta2, self.tau = beta1, beta2, tau

    def step(
        self, delta: np.ndarray, first: np.ndarray | None, second: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        m = (1 - self.beta1) * delta if first is None else self.beta1 * first + (1 - self.beta1) * delta
        v = self.second(np.full_like(delta, self.tau**2) if second is None else second, np.square(delta))
        return self.learning_rate * m / (np.sqrt(v) + self.tau), m, v

    @abstractmethod
    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        """Second moment v_t, from v_{t−1} and Δ_t²."""

    def describe(self) -> Mapping[str, str | int | float]:
        return {**super().describe(), "beta1": self.beta1, "beta2": self.beta2, "tau": self.tau}


class FedAdagradMethod(AdaptiveOptimizerMethod):
    """The method of FedAdagrad."""

    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        return np.asarray(v + squared)


class FedYogiMethod(AdaptiveOptimizerMethod):
    """The method of FedYogi."""

    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        return np.asarray(v - (1 - self.beta2) * squared * np.sign(v - squared))


class FedAdamMethod(AdaptiveOptimizerMethod):
    """The method of FedAdam."""

    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        return np.asarray(self.beta2 * v + (1 - self.beta2) * squared)


@listed("fedavgm", title="FedAvgM", does="momentum on the server", paper="Hsu et al. 2019, arXiv:1909.06335")
class FedAvgM(MethodStrategy):
    """FedAvgM: momentum at the server.

    Args:
        learning_rate: η of the server; 1 without momentum is FedAvg.
        momentum: β of the server.
        round_options: see `MethodStrategy`.
    """

    def __init__(
        self, *, learning_rate: Positive = 1.0, momentum: Decay = 0.9, **round_options: Unpack[RoundOptions]
    ) -> None:
        super().__init__(FedAvgMMethod(learning_rate, momentum), **round_options)


@listed("fedadagrad", title="FedAdagrad", does="Adagrad on the server", paper="Reddi et al. 2021, arXiv:2003.00295")
class FedAdagrad(MethodStrategy):
    """FedAdagrad: Adagrad at the server.

    Args:
        learning_rate: η of the server.
        beta1: β₁, of the first moment; the paper's experiments have 0.
        tau: τ, added to √v: the smaller, the more adaptive.
        round_options: see `MethodStrategy`.
    """

    def __init__(
        self,
        *,
        learning_rate: Positive = 0.1,
        beta1: Decay = 0.0,
        tau: Positive = 1e-3,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(FedAdagradMethod(learning_rate, beta1, 0.0, tau), **round_options)


@listed("fedadam", title="FedAdam", does="Adam on the server", paper="Reddi et al. 2021, arXiv:2003.00295")
class FedAdam(MethodStrategy):
    """FedAdam: Adam at the server, without bias correction.

    Args:
        learning_rate: η of the server.
        beta1: β₁, of the first moment.
        beta2: β₂, of the second moment.
        tau: τ, added to √v: the smaller, the more adaptive.
        round_options: see `MethodStrategy`.
    """

    _method: type[AdaptiveOptimizerMethod] = FedAdamMethod

    def __init__(
        self,
        *,
        learning_rate: Positive = 0.01,
        beta1: Decay = 0.9,
        beta2: Decay = 0.99,
        tau: Positive = 1e-3,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(self._method(learning_rate, beta1, beta2, tau), **round_options)


@listed("fedyogi", title="FedYogi", does="Yogi on the server", paper="Reddi et al. 2021, arXiv:2003.00295")
class FedYogi(FedAdam):
    """FedYogi: Yogi at the server, which is Adam with a v that changes by at most (1 − β₂)·Δ_t² in a round."""

    _method = FedYogiMethod
