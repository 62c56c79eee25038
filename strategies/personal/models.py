"""Every client has a model of its own, which starts each round as a mean of the clients' models: FedACS and FedAMP.

A method of this kind says with which weights the models are mixed; all else is here. Client i gets its mixture u_i,
trains it, and returns w_i: FedAvg's bytes. The server holds the models that clients returned last in a file
(`store.py`), and of every pair the dot product; only what changed in a round is computed anew. A client that has
not reported yet starts from the common initial model.

The client keeps what it returned, and scores it when it is asked; the server sends it to a client that lost it.
"""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TypeVar

import numpy as np

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import EVALUATE, SCORED_AS, Plan, Reply, Tree
from tepal.strategies.method import Method, MethodError, ServerModel
from tepal.strategies.mixing import Models, update_gram, weighted_rows
from tepal.strategies.personal.store import ModelStore, RowLayout

log = getLogger("flwr")

T = TypeVar("T")

MIXTURE: Tree = "mixture"
PERSONAL: Tree = "personal"

MEAN_MODEL = "the mean of the clients' own models, which no client uses"
"""What the model of such a run is."""

STORE = "models.bin"
"""File of the clients' models, in the folder of the checkpoints."""


@dataclass(frozen=True)
class PersonalModels:
    """What the server knows of n clients that have reported; their models lie in the store."""

    initial: Arrays
    order: tuple[str, ...]
    """Entries in the order in which a row of the store has them."""
    counted: int
    """Of the numbers in a row, how many are compared."""
    clients: tuple[str, ...] = ()
    """In the order of the rows of `gram`."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Client → where its model lies in the store."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Client → digest of its model's row."""
    counters: Mapping[str, Arrays] = field(default_factory=dict)
    """Client → its entries that are no floating-point numbers: they are its own, and are not mixed."""
    gram: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    """(n, n) dot products of the models."""


class PersonalMixing(Method[PersonalModels]):
    """A method in which clients start from mixtures of their models. Subclasses say how the models are mixed."""

    train_metrics_of = "trained"
    eval_metrics_of = "personal"

    name: str
    """Of the strategy, in errors."""

    @abstractmethod
    def weights(self, state: PersonalModels, rows: Sequence[int]) -> np.ndarray:
        """(len(rows), n): how much of each model goes into the mixture of some clients; each row sums to 1."""

    def measures(self, state: PersonalModels) -> Mapping[str, np.ndarray]:
        """What the weights of a round follow from, for its record: name → array. There is at least one client."""
        return {}

    def compared(self, models: Models, state: PersonalModels) -> Models:
        """The models whose dot products are kept; those in the store by default."""
        return models

    def init(self, model: ServerModel, seed: int) -> PersonalModels:
        if len(model.starts) > 1:
            raise MethodError(f"the initial arrays are of {len(model.starts)} models, and {self.name} starts from one")
        self._rows = RowLayout.of(model, needed_for=f"{self.name} compares")
        self._current: frozenset[int] = frozenset()  # slots of the state that the run goes on from
        self._mixtures: dict[str, np.ndarray] = {}  # of one round's cohort
        return PersonalModels(model.entries, self._rows.names, self._rows.counted)

    # ---- the store --------------------------------------------------------------------------------------------------

    def open(self, folder: Path | None, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._saved: list[frozenset[int]] = []  # slots of the states that the run may go back to, the newest last
        try:
            self._store = ModelStore(folder / STORE if folder else None, self._rows.width, self._rows.dtype)
        except OSError as error:
            raise MethodError(f"the clients' models cannot be kept on this server: {error}") from error
        self._store.keep(())

    def resume(self, state: PersonalModels, older: Iterable[PersonalModels]) -> PersonalModels:
        """Forget clients whose model in the store is not what it was: they start from the initial model again."""
        if (state.order, state.counted) != (self._rows.names, self._rows.counted):
            raise MethodError(
                "the clients' models were kept in another order, since what is a buffer was told otherwise: resume "
                f"with the model that the run was started with, {self.name}(model=...), or without one as it was"
            )
        lost = [client for client in state.clients if not self._is_whole(client, state)]
        if lost:
            log.error("The models of %s in %s are damaged, and begin anew.", ", ".join(lost), STORE)
            left = [k for k, client in enumerate(state.clients) if client not in lost]
            state = replace(
                state,
                clients=tuple(state.clients[k] for k in left),
                slots=_without(state.slots, lost),
                digests=_without(state.digests, lost),
                counters=_without(state.counters, lost),
                gram=state.gram[np.ix_(left, left)],
            )
        # All that are there, also where fewer will be kept from now on.
        self._saved = [frozenset(one.slots.values()) for one in [state, *older]][::-1]
        self.keep(state)
        return state

    def _is_whole(self, client: str, state: PersonalModels) -> bool:
        try:
            return self._store.digest(state.slots[client]) == state.digests[client]
        except ValueError:  # the file is shorter than that
            return False

    def keep(self, state: PersonalModels) -> None:
        """The run goes on from `state`: all models that neither it nor a checkpoint refers to are let go of."""
        self._current = frozenset(state.slots.values())
        slots = self._current.union(*self._saved)
        self._store.keep(slot for slot in slots if slot < len(self._store))

    def settle(self, state: PersonalModels) -> None:
        self._store.flush()

    def saved(self, state: PersonalModels) -> None:
        self._saved = [*self._saved, frozenset(state.slots.values())][-self._keep :]

    def close(self) -> None:
        self._store.close()
        self._mixtures = {}

    # ---- the round --------------------------------------------------------------------------------------------------

    def plan(
        self, state: PersonalModels, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        self._mix(state, cohort)
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
        """Each client scores the model that it returned last; who has not trained has none."""
        needs = {PERSONAL: tuple(state.initial)}
        options = {SCORED_AS: self.eval_metrics_of}
        return [
            Plan(client=client, round=round, action=EVALUATE, needs=needs, keeps=needs, options=options)
            for client in cohort
            if client in state.slots
        ]

    def values(self, state: PersonalModels, client: str, tree: Tree) -> Arrays:
        if client not in state.slots:
            return state.initial
        row = self._mixtures[client] if tree == MIXTURE else self._store.row(state.slots[client])
        return {**self._rows.entries_of(row), **state.counters[client]}

    def _mix(self, state: PersonalModels, cohort: Sequence[str]) -> None:
        """The mixtures of a cohort, all in one pass over the models, in a file that nobody else sees."""
        wanted = set(cohort)
        rows = {k: client for k, client in enumerate(state.clients) if client in wanted}
        mixtures = np.empty((0, 0))
        if rows:
            models = self._store.rows(state.slots[client] for client in state.clients)
            width, dtype = self._rows.width, self._rows.dtype
            with tempfile.TemporaryFile(dir=self._folder, prefix=".mixtures-", buffering=0) as file:
                written = [0] * len(rows)
                for k, chunk in weighted_rows(models, self.weights(state, [*rows])):
                    write_at(file.fileno(), (k * width + written[k]) * dtype.itemsize, chunk)
                    written[k] += chunk.size
                mixtures = np.memmap(file, dtype, "r", shape=(len(rows), width))
        self._mixtures = {client: mixtures[k] for k, client in enumerate(rows.values())}

    def merger(self, state: PersonalModels, round: int) -> ModelKeeper:
        self.keep(state)  # and not what came in an attempt that failed
        compared = partial(self.compared, state=state)
        return ModelKeeper(state, self._store, self._rows, compared, self.keep)

    def models(self, state: PersonalModels) -> tuple[Arrays, ...]:
        """The mean of the clients' models. It is no model of the method's, and the best guess for somebody new."""
        if not state.clients:
            return (state.initial,)
        mean = np.zeros(self._rows.width, np.float64)
        for client in state.clients:
            mean += self._store.row(state.slots[client])
        mean /= len(state.clients)
        mean = mean.astype(self._rows.dtype)
        return ({**state.initial, **self._rows.entries_of(mean)},)

    def personal(self, state: PersonalModels, client: str) -> Arrays:
        """The model that this client returned last; the initial one for a client that has not reported."""
        return self.values(state, client, PERSONAL)

    def record(self, state: PersonalModels, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """Before the round: `clients` (n,), what the method measures of them, and of the `cohort` (m,) the `weights`
        (m, n) with which each of its models is mixed. A client that has no model yet has no weights."""
        clients = np.array(state.clients, str)
        if not state.clients:
            return {"clients": clients, "cohort": np.array([], str)}
        asked = {plan.client for plan in plans}
        rows = [k for k, client in enumerate(state.clients) if client in asked]
        return {
            "clients": clients,
            **self.measures(state),
            "cohort": clients[rows],
            "weights": self.weights(state, rows).astype(np.float32),
        }


class ModelKeeper:
    """Puts each client's model into the store as it comes, and holds none.

    Args:
        state: that the round begins with.
        store: of the clients' models.
        rows: how a model is a row of it.
        compared: the models whose dot products are kept, of those in the store.
        keep: called with the next state: it refers to the models that must stay in the store.
    """

    def __init__(
        self,
        state: PersonalModels,
        store: ModelStore,
        rows: RowLayout,
        compared: Callable[[Models], Models],
        keep: Callable[[PersonalModels], None],
    ) -> None:
        self._state, self._store, self._rows = state, store, rows
        self._compared, self._keep = compared, keep
        self._slots: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self._counters: dict[str, Arrays] = {}

    def add(self, reply: Reply) -> None:
        part = reply.parts[MIXTURE]
        slot = self._store.write(self._rows.pieces(part))
        self._slots[reply.client] = slot
        self._digests[reply.client] = self._store.digest(slot)
        self._counters[reply.client] = {name: np.array(part[name]) for name in self._rows.own}

    def finish(self) -> PersonalModels:
        state = self._state
        joiners = sorted(set(self._slots).difference(state.clients))
        clients = (*state.clients, *joiners)
        slots = {**state.slots, **self._slots}
        changed = [k for k, client in enumerate(clients) if client in self._slots]
        models = self._compared(self._store.rows(slots[client] for client in clients))
        finished = replace(
            state,
            clients=clients,
            slots=slots,
            digests={**state.digests, **self._digests},
            counters={**state.counters, **self._counters},
            gram=update_gram(state.gram, models, changed, counted=self._rows.counted),
        )
        self._keep(finished)
        return finished


def write_at(handle: int, offset: int, values: np.ndarray) -> None:
    """Write all of an array at a place of an open file. Raises OSError."""
    left = memoryview(np.ascontiguousarray(values).view(np.uint8))  # type: ignore[arg-type]
    while left:
        written = os.pwrite(handle, left, offset)
        left, offset = left[written:], offset + written


def _without(of_clients: Mapping[str, T], lost: Collection[str]) -> dict[str, T]:
    return {client: value for client, value in of_clients.items() if client not in lost}
