"""The files of a run with personal models: each client's last model, and the mixtures from which a cohort starts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import TypeVar

import numpy as np

from tepal.exchange.layout import Arrays
from tepal.strategies.method import MethodError, Run, ServerModel
from tepal.strategies.mixing import weighted_rows
from tepal.strategies.personal.store import ModelStore, RowLayout, StoredModels, write_at

log = getLogger("flwr")

T = TypeVar("T")

STORE = "models.bin"
"""File of the clients' models, in the folder of the checkpoints."""


@dataclass(frozen=True)
class PersonalModels:
    """The state: the n clients that have replied. Their models are in a `PersonalStorage`."""

    initial: Arrays
    order: tuple[str, ...]
    """Entries in the order in which a row of the file contains them."""
    counted: int
    """How many of the numbers in a row are compared."""
    clients: tuple[str, ...] = ()
    """In the order of the rows of `gram`."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Client → slot of its model in the file."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Client → digest of its model's row."""
    counters: Mapping[str, Arrays] = field(default_factory=dict)
    """Client → its entries that are not floating-point numbers; they are not mixed."""
    gram: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    """(n, n) dot products of the models."""


class PersonalStorage:
    """The personal models of one run (a `Storage`): `PersonalModels` refers to them by slot.

    Args:
        model: the model that the run starts from.
        run: its folder, and how many checkpoints it keeps.
        name: of the strategy, for errors.

    Raises:
        MethodError: a model without floating-point parameters, or a file that cannot be made.
    """

    def __init__(self, model: ServerModel, run: Run, *, name: str) -> None:
        self.rows = RowLayout.of(model, needed_for=f"{name} compares")
        self._run, self._name = run, name
        self._current: frozenset[int] = frozenset()  # slots of the state from which the run continues
        self._before: frozenset[int] = frozenset()  # slots of the state before the last merge
        self._saved: list[frozenset[int]] = []  # slots of the states that the run may return to, the newest last
        self._mixtures: dict[str, np.ndarray] = {}  # of one round's cohort
        self._shared: dict[str, Arrays] = {}
        try:
            self._store = ModelStore(run.folder / STORE if run.folder else None, self.rows.width, self.rows.dtype)
        except OSError as error:
            raise MethodError(f"the clients' models cannot be stored on this server: {error}") from error
        self._store.keep(())

    # ---- the states that the run may return to --------------------------------------------------------------------

    def restore(self, state: PersonalModels, older: Iterable[PersonalModels]) -> PersonalModels:
        """Remove clients whose model in the file is damaged: they start anew, as newcomers do."""
        if (state.order, state.counted) != (self.rows.names, self.rows.counted):
            raise MethodError(
                "the checkpoint has the entries of the clients' models in another order, because the run was started "
                f"with other information about the model's buffers: resume with {self._name}(model=...) if it was "
                "started so, and without `model` if it was not"
            )
        if lost := [client for client in state.clients if not self._is_whole(client, state)]:
            log.error(
                "The models of %s in %s are damaged: these clients start anew.",
                ", ".join(lost), STORE,
            )  # fmt: skip
            left = [k for k, client in enumerate(state.clients) if client not in lost]
            state = replace(
                state,
                clients=tuple(state.clients[k] for k in left),
                slots=_without(state.slots, lost),
                digests=_without(state.digests, lost),
                counters=_without(state.counters, lost),
                gram=state.gram[np.ix_(left, left)],
            )
        # All older states that exist, even if fewer are kept from now on.
        self._saved = [frozenset(one.slots.values()) for one in [state, *older]][::-1]
        self.use(state)
        return state

    def _is_whole(self, client: str, state: PersonalModels) -> bool:
        try:
            return self._store.has_digest(state.slots[client], state.digests[client])
        except ValueError:  # the file ends before this slot
            return False

    def use(self, state: PersonalModels, *, before: PersonalModels | None = None) -> None:
        """Continue from this state. `before`: the one of which a merge made it; None if it was not made now.

        Models may be overwritten to which neither the state nor the one before the last merge nor a checkpoint refers.
        """
        self._current = frozenset(state.slots.values())
        if before is not None:
            self._before = frozenset(before.slots.values())
        slots = self._current.union(self._before, *self._saved)
        self._store.keep(slot for slot in slots if slot < len(self._store))

    def flush(self) -> None:
        self._store.flush()

    def saved(self, state: PersonalModels) -> None:
        self._saved = [*self._saved, frozenset(state.slots.values())][-self._run.keep :]

    def close(self) -> None:
        self._store.close()
        self._mixtures, self._shared = {}, {}

    # ---- models ---------------------------------------------------------------------------------------------------

    def write(self, model: Arrays) -> tuple[int, str]:
        """Write a client's model, which stays while a state refers to its slot. Returns slot and digest."""
        slot = self._store.write(self.rows.pieces(model))
        return slot, self._store.digest(slot)

    def row(self, slot: int) -> np.ndarray:
        """(width,) the model in a slot, read-only."""
        return self._store.row(slot)

    def models(self, slots: Iterable[int]) -> StoredModels:
        """The models in these slots, in this order."""
        return self._store.rows(slots)

    def mixture(self, name: str, *, shared: bool = False) -> Arrays:
        """The entries of the mixture of this name that the last call of `mix` made. `shared`: many clients receive it;
        they are the same arrays every time, which are packed and hashed once, and stay in memory."""
        if not shared:
            return self.rows.entries_of(self._mixtures[name])
        if name not in self._shared:
            self._shared[name] = self.rows.entries_of(self._mixtures[name])
        return self._shared[name]

    def mix(self, state: PersonalModels, names: Sequence[str], weights: Callable[[], np.ndarray]) -> None:
        """Make the mixtures of a cohort, in one pass over the models, in an unnamed file.

        Args:
            state: what the mixtures are made from, n clients.
            names: of the mixtures.
            weights: returns (len(names), n), the weight of each model in each mixture; called only if there are names.

        Raises:
            OSError: the file cannot be written.
        """
        mixtures = np.empty((0, 0))
        if names:
            models = self.models(state.slots[client] for client in state.clients)
            width, dtype = self.rows.width, self.rows.dtype
            with tempfile.TemporaryFile(dir=self._run.folder, prefix=".mixtures-", buffering=0) as file:
                written = [0] * len(names)
                for k, chunk in weighted_rows(models, weights()):
                    write_at(file.fileno(), (k * width + written[k]) * dtype.itemsize, chunk)
                    written[k] += chunk.size
                mixtures = np.memmap(file, dtype, "r", shape=(len(names), width))
        self._mixtures, self._shared = dict(zip(names, mixtures, strict=True)), {}


def _without(of_clients: Mapping[str, T], lost: Collection[str]) -> dict[str, T]:
    return {client: value for client, value in of_clients.items() if client not in lost}
