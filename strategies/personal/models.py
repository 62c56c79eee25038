"""Personal models that start each round as means of the clients' models: what FedACS and FedAMP share.

A method of this family defines the weights of the means. Client i is sent its mixture u_i, trains it, and returns w_i:
as many bytes as in FedAvg. The server keeps the models that clients returned last in a file (`storage.py`), and the dot
product of each pair; a round computes only the products that changed. A newcomer, who has not replied yet, starts from
the mean of the clients' models, or from the initial model.

A client caches the model that it returned, and scores it in an evaluation; the server sends it to a client that has
lost it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal

import numpy as np

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import EVALUATE, SCORED_AS, Plan, Reply, Tree
from tepal.strategies.method import Method, MethodError, Run, ServerModel
from tepal.strategies.mixing import Models, update_gram
from tepal.strategies.personal.storage import PersonalModels, PersonalStorage

MIXTURE: Tree = "mixture"
PERSONAL: Tree = "personal"

MEAN: Final = "mean"
Newcomers = Literal["mean", "initial"]
"""What a client starts from that has not replied yet: the mean of the clients' models, if there is any, or the initial
model."""
_NEWCOMERS = ""
"""Name of the newcomers' mixture, which no client has."""

MEAN_MODEL = "the mean of the clients' personal models, which no client uses"
"""The global model of such a run, for reports."""


class PersonalMixing(Method[PersonalModels]):
    """A method in which clients start from mixtures of their models. Subclasses define the weights of the mixtures."""

    train_metrics_of = "trained"
    eval_metrics_of = "personal"
    storage: PersonalStorage

    name: str
    """Of the strategy, in errors."""

    def __init__(self, newcomers: Newcomers) -> None:
        self.newcomers = newcomers

    @abstractmethod
    def weights(self, state: PersonalModels, rows: Sequence[int], round: int) -> np.ndarray:
        """(len(rows), n): the weight of each model in some clients' mixtures of a round; each row sums to 1."""

    def measures(self, state: PersonalModels) -> Mapping[str, np.ndarray]:
        """The figures that the weights of a round depend on, for its record: name → array. There is at least one
        client."""
        return {}

    def compared(self, models: Models, state: PersonalModels) -> Models:
        """The models whose dot products are kept: by default the clients' models as they are."""
        return models

    def init(self, model: ServerModel, run: Run) -> PersonalModels:
        if len(model.starts) > 1:
            raise MethodError(
                f"the initial arrays are of {len(model.starts)} models; {self.name} starts from one: pass those of one"
            )
        self.storage = PersonalStorage(model, run, name=self.name)
        self._run = run
        return PersonalModels(model.entries, self.storage.rows.names, self.storage.rows.counted)

    def plan(
        self, state: PersonalModels, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        rows = _rows_of(state, cohort)
        mixtures = [state.clients[row] for row in rows]
        if len(rows) < len(cohort) and self._mean_weights(state) is not None:
            mixtures.append(_NEWCOMERS)
        self.storage.mix(state, mixtures, partial(self._weights_of, state, rows, round, len(mixtures)))
        names = tuple(state.initial)
        return [
            Plan(
                client=client,
                round=round,
                needs={MIXTURE: names},
                trains=names,
                returns={MIXTURE: names},
                remembers={MIXTURE: PERSONAL},
            )
            for client in cohort
        ]

    def evaluation(self, state: PersonalModels, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        """Plans by which each client scores the model that it returned last. A client that has not trained has none."""
        needs = {PERSONAL: tuple(state.initial)}
        options = {SCORED_AS: self.eval_metrics_of}
        return [
            Plan(client=client, round=round, action=EVALUATE, needs=needs, keeps=needs, options=options)
            for client in cohort
            if client in state.slots
        ]

    def values(self, state: PersonalModels, client: str, tree: Tree) -> Arrays:
        if client not in state.slots:
            if tree == PERSONAL or self._mean_weights(state) is None:
                return state.initial
            return {**state.initial, **self.storage.mixture(_NEWCOMERS, shared=True)}
        if tree == MIXTURE:
            return {**self.storage.mixture(client), **state.counters[client]}
        return {**self.storage.rows.entries_of(self.storage.row(state.slots[client])), **state.counters[client]}

    def initial_values(self, model: ServerModel, state: PersonalModels) -> Mapping[Tree, Arrays]:
        return {MIXTURE: model.entries}

    def _weights_of(self, state: PersonalModels, rows: Sequence[int], round: int, count: int) -> np.ndarray:
        """(count, n): the weights of the mixtures of these clients and, if there is one more, of the newcomers'."""
        clients = self.weights(state, rows, round) if rows else np.empty((0, len(state.clients)))
        mean = self._mean_weights(state)
        return clients if count == len(rows) or mean is None else np.vstack((clients, mean))

    def _mean_weights(self, state: PersonalModels) -> np.ndarray | None:
        """(n,): equal weights of all models that did not diverge; None if newcomers start from the initial model."""
        whole = np.isfinite(np.diagonal(state.gram))
        return whole / whole.sum() if self.newcomers == MEAN and whole.any() else None

    def merger(self, state: PersonalModels, round: int) -> PersonalMerger:
        self.storage.use(state)  # and not the models of an attempt that failed
        return PersonalMerger(state, self.storage, partial(self.compared, state=state))

    def models(self, state: PersonalModels) -> tuple[Arrays, ...]:
        """The mean of the clients' models: no client's model, but the best estimate for a new client."""
        if not state.clients:
            return (state.initial,)
        rows = self.storage.rows
        mean = np.zeros(rows.width, np.float64)
        for client in state.clients:
            mean += self.storage.row(state.slots[client])
        mean /= len(state.clients)
        return ({**state.initial, **rows.entries_of(mean.astype(rows.dtype))},)

    def personal(self, state: PersonalModels, client: str) -> Arrays:
        """The model that this client returned last; the initial model if it has not replied yet."""
        return self.values(state, client, PERSONAL)

    def describe(self) -> Mapping[str, str | int | float]:
        return {"newcomers": self.newcomers}

    def record(self, state: PersonalModels, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """The round's mixtures: `clients` (n,), the method's measures of them, and for the `cohort` (m,) the `weights`
        (m, n) of their mixtures. A client without a model has no weights."""
        clients = np.array(state.clients, str)
        if not state.clients:
            return {"clients": clients, "cohort": np.array([], str)}
        rows = _rows_of(state, [plan.client for plan in plans])
        return {
            "clients": clients,
            **self.measures(state),
            "cohort": clients[rows],
            "weights": self.weights(state, rows, plans[0].round if plans else 0).astype(np.float32),
        }


class PersonalMerger:
    """Writes each client's model to the storage as it arrives, and keeps none in memory.

    Args:
        state: from which the round started.
        storage: of the clients' models.
        compared: from the models in the storage to those whose dot products are kept.
    """

    def __init__(
        self, state: PersonalModels, storage: PersonalStorage, compared: Callable[[Models], Models]
    ) -> None:
        self._state, self._storage, self._compared = state, storage, compared
        self._slots: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self._counters: dict[str, Arrays] = {}

    def add(self, reply: Reply) -> None:
        part = reply.parts[MIXTURE]
        counters = {name: np.array(part[name]) for name in self._storage.rows.own}
        slot, digest = self._storage.write(part)
        self._slots[reply.client], self._digests[reply.client] = slot, digest
        self._counters[reply.client] = counters

    def finish(self) -> PersonalModels:
        state = self._state
        joiners = sorted(set(self._slots).difference(state.clients))
        clients = (*state.clients, *joiners)
        slots = {**state.slots, **self._slots}
        changed = [k for k, client in enumerate(clients) if client in self._slots]
        models = self._compared(self._storage.models(slots[client] for client in clients))
        finished = replace(
            state,
            clients=clients,
            slots=slots,
            digests={**state.digests, **self._digests},
            counters={**state.counters, **self._counters},
            gram=update_gram(state.gram, models, changed, counted=self._storage.rows.counted),
        )
        self._storage.use(finished, before=state)
        return finished


def _rows_of(state: PersonalModels, cohort: Sequence[str]) -> list[int]:
    """Places in `state.clients` of those clients of a cohort that have a model."""
    wanted = set(cohort)
    return [k for k, client in enumerate(state.clients) if client in wanted]
