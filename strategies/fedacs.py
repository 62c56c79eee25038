"""FedACS: every client has a model of its own, mixed by how much the models point the same way (arXiv:2312.15148).

    s_ij = cos(w_i, w_j)        δ = p-quantile of all s_ij        u_i = Σ_{j: s_ij > δ} s_ij·w_j / Σ_{j: s_ij > δ} s_ij

Client i gets its mixture u_i, trains it, and returns w_i: FedAvg's bytes. The mathematics is in `mixing.py`. The server
holds the models that clients returned last in a file (`model_store.py`), and of every pair the dot product; only what
changed in a round is computed anew. A client that has not reported yet starts from the common initial model.

The client keeps what it returned, and scores it when it is asked; the server sends it to a client that lost it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tepal.exchange.layout import Arrays, Entry, Names
from tepal.exchange.plan import EVALUATE, SCORED_AS, Plan, Reply, Tree
from tepal.strategies.base import MethodStrategy
from tepal.strategies.method import Method, MethodError, ModelBlocks, ServerModel
from tepal.strategies.mixing import cosine, mix_rows, mixing_weights, threshold, update_gram
from tepal.strategies.model_store import ModelStore

if TYPE_CHECKING:
    from torch import nn

log = getLogger("flwr")

T = TypeVar("T")

MIXTURE: Tree = "mixture"
PERSONAL: Tree = "personal"

STORE = "models.bin"
"""File of the clients' models, in the folder of the checkpoints."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's, where no model says what is a buffer


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


class Mixing(Method):
    """The method of FedACS. Arguments are those of `FedACS`."""

    scored = "trained"
    judged = "personal"

    def __init__(self, quantile: float, alpha: float = 1.0) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; it must be between 0 and 1, both excluded")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1 (1 is the paper's)")
        self.quantile = quantile
        self.alpha = alpha
        self._rows: _Rows
        self._store: ModelStore
        self._folder: Path | None
        self._keep: int
        self._current: frozenset[int] = frozenset()  # slots of the state that the run goes on from
        self._saved: list[frozenset[int]] = []  # and of those that it may go back to, the newest last
        self._mixtures: dict[str, np.ndarray] = {}  # of one round's cohort

    def init(self, model: ServerModel, seed: int) -> PersonalModels:
        if len(model.starts) > 1:
            raise MethodError(f"the initial arrays are of {len(model.starts)} models, and FedACS starts from one")
        self._rows = _Rows.of(model)
        return PersonalModels(model.entries, self._rows.names, self._rows.counted)

    # ---- the store --------------------------------------------------------------------------------------------------

    def open(self, folder: Path | None, keep: int) -> None:
        self._folder, self._keep, self._saved = folder, keep, []
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
                "with the model that the run was started with, FedACS(model=...), or without one as it was"
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
        self, state: PersonalModels, round: int, phase: str, cohort: Sequence[str], heard: Mapping[str, Reply]
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
        options = {SCORED_AS: self.judged}
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
            number = {row: k for k, row in enumerate(rows)}
            models = self._store.rows(state.slots[client] for client in state.clients)
            width, dtype = self._rows.width, self._rows.dtype
            with tempfile.TemporaryFile(dir=self._folder, prefix=".mixtures-", buffering=0) as file:
                at = dict.fromkeys(rows, 0)
                mixed = mix_rows(models, rows, self.quantile, similarity=cosine(state.gram), alpha=self.alpha)
                for row, chunk in mixed:
                    _write_at(file.fileno(), (number[row] * width + at[row]) * dtype.itemsize, chunk)
                    at[row] += chunk.size
                mixtures = np.memmap(file, dtype, "r", shape=(len(rows), width))
        self._mixtures = {client: mixtures[k] for k, client in enumerate(rows.values())}

    def merger(self, state: PersonalModels, round: int) -> ModelKeeper:
        self.keep(state)  # and not what came in an attempt that failed
        return ModelKeeper(self, state)

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

    def describe(self) -> Mapping[str, str | int | float]:
        return {"quantile": self.quantile, "alpha": self.alpha}

    def record(self, state: PersonalModels, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """Before the round: `clients` (n,) with `similarity` S (n, n), `threshold` δ; and of the `cohort` (m,) the
        `weights` (m, n) with which each of its models is mixed. A client that has no model yet has no weights."""
        clients = np.array(state.clients, str)
        if not state.clients:
            return {"clients": clients, "cohort": np.array([], str)}
        asked = {plan.client for plan in plans}
        rows = [k for k, client in enumerate(state.clients) if client in asked]
        similarity = cosine(state.gram)
        delta = threshold(similarity, self.quantile)
        return {
            "clients": clients,
            "similarity": similarity.astype(np.float32),
            "threshold": np.array(delta),
            "cohort": clients[rows],
            "weights": mixing_weights(similarity, delta, rows, alpha=self.alpha).astype(np.float32),
        }


class ModelKeeper:
    """Puts each client's model into the store as it comes, and holds none."""

    def __init__(self, method: Mixing, state: PersonalModels) -> None:
        self._method = method
        self._state = state
        self._slots: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self._counters: dict[str, Arrays] = {}

    def add(self, reply: Reply) -> None:
        part, method = reply.parts[MIXTURE], self._method
        slot = method._store.write(part[entry.name].reshape(-1) for entry in method._rows.entries)
        self._slots[reply.client] = slot
        self._digests[reply.client] = method._store.digest(slot)
        self._counters[reply.client] = {name: np.array(part[name]) for name in method._rows.own}

    def finish(self) -> PersonalModels:
        state, method = self._state, self._method
        joiners = sorted(set(self._slots).difference(state.clients))
        clients = (*state.clients, *joiners)
        slots = {**state.slots, **self._slots}
        changed = [k for k, client in enumerate(clients) if client in self._slots]
        models = method._store.rows(slots[client] for client in clients)
        finished = replace(
            state,
            clients=clients,
            slots=slots,
            digests={**state.digests, **self._digests},
            counters={**state.counters, **self._counters},
            gram=update_gram(state.gram, models, changed, counted=method._rows.counted),
        )
        method.keep(finished)
        return finished


class FedACS(MethodStrategy):
    """FedACS over Tepal's exchange.

    The result's arrays are the mean of the clients' models; each client's own is in the store, and with the client.

    Args:
        quantile: p, between 0 and 1: the share of the similarities that are too small to count. From 1 − 1/n on every
            client trains alone.
        alpha: α in (0, 1]: how far a client goes from its own model to the mixture; 1 is the paper's.
        model: the torch model, or its blocks from `find_blocks`, which say what is a buffer and is not compared. Not
            needed for models whose only buffers are BatchNorm's.
        round_options: see `MethodStrategy`. The store of models lies in the folder of the checkpoints; without one it
            is a temporary file.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        *,
        quantile: float,
        alpha: float = 1.0,
        model: nn.Module | ModelBlocks | None = None,
        **round_options: Any,
    ) -> None:
        super().__init__(Mixing(quantile, alpha), model=model, **round_options)


@dataclass(frozen=True)
class _Rows:
    """How a model lies in a row of the store: its parameters, then its floating-point buffers."""

    entries: tuple[Entry, ...]
    counted: int
    """Numbers of parameters: what similarity is computed from."""
    width: int
    dtype: np.dtype
    own: Names
    """Entries that are no floating-point numbers, such as counters."""

    @property
    def names(self) -> Names:
        return tuple(entry.name for entry in self.entries)

    @staticmethod
    def of(model: ServerModel) -> _Rows:
        buffers = (
            {name for name in model.layout.names if name.rpartition(".")[2] in _BUFFERS}
            if model.blocks is None
            else set(model.blocks.buffers)
        )
        floating = [entry for entry in model.layout.entries if np.dtype(entry.dtype).kind == "f"]
        parameters = [entry for entry in floating if entry.name not in buffers]
        if not parameters:
            raise MethodError(f"{model.name} has no floating-point parameters, which FedACS compares")
        entries = (*parameters, *(entry for entry in floating if entry.name in buffers))
        return _Rows(
            entries=entries,
            counted=sum(entry.size for entry in parameters),
            width=sum(entry.size for entry in entries),
            dtype=np.result_type(np.float32, *(np.dtype(entry.dtype) for entry in entries)),
            own=tuple(entry.name for entry in model.layout.entries if entry not in floating),
        )

    def entries_of(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """The entries in a row: views where the row has their dtype."""
        row = np.asarray(row)
        found: dict[str, np.ndarray] = {}
        start = 0
        for entry in self.entries:
            found[entry.name] = row[start : start + entry.size].astype(entry.dtype, copy=False).reshape(entry.shape)
            start += entry.size
        return found


def _without(of_clients: Mapping[str, T], lost: Collection[str]) -> dict[str, T]:
    return {client: value for client, value in of_clients.items() if client not in lost}


def _write_at(handle: int, offset: int, values: np.ndarray) -> None:
    left = memoryview(np.ascontiguousarray(values).view(np.uint8))  # type: ignore[arg-type]
    while left:
        written = os.pwrite(handle, left, offset)
        left, offset = left[written:], offset + written
