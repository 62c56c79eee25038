"""Server optimizers: the mean of the clients' changes is a pseudo-gradient, and the server takes a step along it.

    Δ_t = Σ_k (n_k / Σ n)·w_k − w_t

    FedAvgM      m_t = β·m_{t−1} + Δ_t                                 w_{t+1} = w_t + η·m_t
    FedAdagrad   v_t = v_{t−1} + Δ_t²                             ⎫
    FedYogi      v_t = v_{t−1} − (1 − β₂)·Δ_t²·sign(v_{t−1} − Δ_t²)  ⎬    w_{t+1} = w_t + η·m_t / (√v_t + τ)
    FedAdam      v_t = β₂·v_{t−1} + (1 − β₂)·Δ_t²                   ⎭    m_t = β₁·m_{t−1} + (1 − β₁)·Δ_t

FedAvgM: Hsu et al. 2019, arXiv:1909.06335, section 4.3. The others: Reddi et al. 2021, arXiv:2003.00295, algorithm 2,
with v_{−1} = τ² and without a correction of the bias. (Flower's FedAvgM is the paper's. Its FedAdagrad, FedYogi and
FedAdam start from v = 0, and its FedAdam corrects the bias.) Moments are of the parameters; buffers, such as a
BatchNorm's statistics, are averaged as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from tepal.exchange.layout import Arrays, Names
from tepal.strategies.fedavg import GlobalModel, ModelMerger, ModelState, only_start
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import Decay, Positive, RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


@dataclass(frozen=True)
class OptimizerState(ModelState):
    """A global model and the moments of its changes, by parameter; before the first round there are none."""

    first: Arrays | None = None
    second: Arrays | None = None


class ServerOptimizer(GlobalModel[OptimizerState]):
    """The methods of this file. `step` is what differs."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._parameters: Names

    def init(self, model: ServerModel, run: Run) -> OptimizerState:
        self._parameters = parameters_of(model)
        return OptimizerState(only_start(model))

    def merger(self, state: OptimizerState, round: int) -> OptimizerMerger:
        return OptimizerMerger(state, self._parameters, self.step)

    def step(
        self, delta: np.ndarray, first: np.ndarray | None, second: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(what is added to an entry, m_t, v_t) for its Δ_t, m_{t−1} and v_{t−1} (None before the first round)."""
        raise NotImplementedError

    def describe(self) -> Mapping[str, str | int | float]:
        return {"learning rate": self.learning_rate}


class OptimizerMerger(ModelMerger[OptimizerState]):
    """Averages as FedAvg, then steps."""

    def __init__(self, state: OptimizerState, parameters: Names, step: Callable[..., Any]) -> None:
        super().__init__(state)
        self._parameters = parameters
        self._step = step

    def finish(self) -> OptimizerState:
        state, mean = self._state, self._mean.result()
        entries, first, second = {**state.entries, **mean}, dict(state.first or {}), dict(state.second or {})
        for name in self._parameters:
            w = state.entries[name]
            change, m, v = self._step(mean[name] - w, first.get(name), second.get(name))
            entries[name] = (w + change).astype(w.dtype, copy=False)
            first[name] = m.astype(w.dtype, copy=False)
            if v is not None:
                second[name] = v.astype(w.dtype, copy=False)
        return replace(state, entries=entries, merges=state.merges + 1, first=first, second=second)


class Momentum(ServerOptimizer):
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


class Adaptive(ServerOptimizer):
    """The methods of FedAdagrad, FedYogi and FedAdam; `second` is what differs."""

    def __init__(self, learning_rate: float, beta1: float, beta2: float, tau: float) -> None:
        super().__init__(learning_rate)
        self.beta1, self.beta2, self.tau = beta1, beta2, tau

    def step(
        self, delta: np.ndarray, first: np.ndarray | None, second: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        m = (1 - self.beta1) * delta if first is None else self.beta1 * first + (1 - self.beta1) * delta
        v = self.second(np.full_like(delta, self.tau**2) if second is None else second, np.square(delta))
        return self.learning_rate * m / (np.sqrt(v) + self.tau), m, v

    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        """v_t from v_{t−1} and Δ_t²."""
        raise NotImplementedError

    def describe(self) -> Mapping[str, str | int | float]:
        return {**super().describe(), "beta1": self.beta1, "beta2": self.beta2, "tau": self.tau}


class Adagrad(Adaptive):
    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        total: np.ndarray = v + squared
        return total


class Yogi(Adaptive):
    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        moved: np.ndarray = v - (1 - self.beta2) * squared * np.sign(v - squared)
        return moved


class Adam(Adaptive):
    def second(self, v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        mean: np.ndarray = self.beta2 * v + (1 - self.beta2) * squared
        return mean


@listed("fedavgm", title="FedAvgM", does="momentum on the server", paper="Hsu et al. 2019, arXiv:1909.06335")
class FedAvgM(MethodStrategy):
    """FedAvg with momentum at the server.

    Args:
        learning_rate: η of the server; 1 without momentum is FedAvg.
        momentum: β of the server.
        round_options: see `MethodStrategy`.
    """

    def __init__(
        self, *, learning_rate: Positive = 1.0, momentum: Decay = 0.9, **round_options: Unpack[RoundOptions]
    ) -> None:
        super().__init__(Momentum(learning_rate, momentum), **round_options)


@listed("fedadagrad", title="FedAdagrad", does="Adagrad on the server", paper="Reddi et al. 2021, arXiv:2003.00295")
class FedAdagrad(MethodStrategy):
    """Adagrad at the server.

    Args:
        learning_rate: η of the server.
        beta1: β₁, of the first moment; the paper's experiments have 0.
        tau: τ, how adaptive it is: the smaller, the more.
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
        super().__init__(Adagrad(learning_rate, beta1, 0.0, tau), **round_options)


@listed("fedadam", title="FedAdam", does="Adam on the server", paper="Reddi et al. 2021, arXiv:2003.00295")
class FedAdam(MethodStrategy):
    """Adam at the server, without bias correction.

    Args:
        learning_rate: η of the server.
        beta1: β₁, of the first moment.
        beta2: β₂, of the second moment.
        tau: τ, how adaptive it is: the smaller, the more.
        round_options: see `MethodStrategy`.
    """

    _method: type[Adaptive] = Adam

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
    """Yogi at the server: as `FedAdam`, but v changes by no more than (1 − β₂)·Δ_t², whichever way."""

    _method = Yogi
