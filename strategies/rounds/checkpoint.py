"""Checkpoints: all that a server needs to resume a run, written to disk after every round.

    <folder>/round-000007/state.safetensors     the arrays of the method's state
    <folder>/round-000007/checkpoint.json       all else, and the place of each array in the state

A checkpoint is written under a temporary name and renamed, so it exists as a whole or not at all. It is checked when it
is read; if the newest is damaged, the one before it is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import StrictInt, TypeAdapter, ValidationError

from tepal.exchange.files import DamagedFile, map_arrays, read_arrays, remove_unfinished, write_arrays
from tepal.exchange.layout import Layout, Names
from tepal.exchange.parts import Digests
from tepal.host.files import sync_folder
from tepal.strategies.rounds.state_json import WRONG, CheckpointError, current_names, from_json, to_json

log = getLogger("flwr")

STATE, FACTS = "state.safetensors", "checkpoint.json"
FORMAT = 2
"""2: the digests of arrays are BLAKE3. 1, which is read as well: they are SHA-256."""

_PREFIX, _BESIDE = "round-", ".writing-"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after one of its rounds."""

    round: StrictInt
    experiment: str
    seed: StrictInt
    """All random numbers derive from it, the round and the clients' names: no generator has a state of its own."""
    method: Mapping[str, Any]
    """Name and options of the method."""
    layout: str
    """Digest of the model's layout."""
    state: Any
    """The state of the method."""
    held: Mapping[str, Names] = field(default_factory=dict)
    """Client → ids of the parts in its cache."""
    current: Mapping[str, str] = field(default_factory=dict)
    """Client → id of the exchange from which its current personal state is."""
    standing: Mapping[str, Any] = field(default_factory=dict)
    """`failures`: client → exchanges in a row without a good reply; `until`: client → round of its next plan; `sizes`:
    client → number of examples of its last reply, of clients whose introduction says none; `proofs`: client → digest of
    its secret; `refused`: client that is not drawn again → reason; `norms`: of updates, see `UpdateNorms`. Earlier
    versions have the first two only."""
    clients: Names = ()
    """The available clients of the round."""
    history: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """Metrics of all rounds so far, as in Flower's `Result`: kind → round → metric → value."""


class Checkpoints:
    """The checkpoints of one run, in a folder of its own.

    Args:
        folder: created when the first checkpoint is written.
        keep: how many of the newest checkpoints are kept, at least 1. Two are kept in any case: a resumed run
            returns to the state before the newest one, if that has a checkpoint, where no client can train from it.
    """

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must be kept")
        self.folder = Path(folder)
        self.keep = max(keep, 2)
        self.digests = Digests()
        """Digests of the arrays that were saved, so that the sender does not compute them again."""
        self._written: tuple[int, Any] = 0, None  # the round that was written last, and its state as JSON

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, ascending."""
        found = (path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*"))
        return sorted(int(number) for number in found if number.isdigit())

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove those that need not be kept.

        If the disk is full, all but the newest whole checkpoint are removed to make room. Raises OSError if that does
        not suffice; that checkpoint still exists then.
        """
        try:
            self._write(checkpoint)
        except OSError:
            others = self.rounds()
            whole = next((number for number, _ in self._readable()), None) if len(others) > 1 else None
            if whole is None:
                raise
            self._remove(number for number in others if number != whole)
            self._write(checkpoint)
        # Checkpoints of later rounds are damaged: else the run would have been resumed from them.
        self._remove(number for number in self.rounds() if number > checkpoint.round)
        self._remove(self.rounds()[: -self.keep])

    def prune(self, round: int) -> None:
        """Remove what `save` of this round, the last one, would have removed if the server had not been killed."""
        self._remove([number for number in self.rounds() if number <= round][: -self.keep])

    def saved_state(self, number: int) -> Any:
        """The state of a checkpoint that this process has just written, its arrays mapped from the file.

        The system can release the memory of mapped arrays, see `map_arrays`. Raises OSError and DamagedFile.
        """
        (written, state), self._written = self._written, (0, None)
        if written != number:
            facts = _read_facts(self._path(number) / FACTS)
            if "state" not in facts:
                raise DamagedFile("it has no state")
            state = facts["state"]
        return self._mapped(self._path(number), state)

    def on_disk(self, state: Any) -> Any:
        """A state with its arrays mapped from an unnamed file in this folder. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_BESIDE) as beside:
            arrays: dict[str, np.ndarray] = {}
            facts = to_json(state, arrays)
            write_arrays(Path(beside) / STATE, arrays, digests=self.digests)
            return self._mapped(Path(beside), facts)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None. Damaged ones are logged and skipped."""
        return next((checkpoint for _, checkpoint in self._readable()), None)

    def versions(self) -> dict[int, Mapping[str, str]]:
        """Round → `current` of its checkpoint, of all whole ones, the oldest first."""
        found = dict[int, Mapping[str, str]]()
        for number, checkpoint in self._readable():
            found[number] = checkpoint.current
            del checkpoint  # it is as large as the state, and the next one is read now
        return dict(reversed(found.items()))

    def standing(self, number: int) -> Mapping[str, Any]:
        """`standing` of a checkpoint, whose state is not read. Raises OSError and DamagedFile."""
        found: Mapping[str, Any] = _read_facts(self._path(number) / FACTS).get("standing", {})
        return found

    def state(self, number: int) -> Any | None:
        """The state of a checkpoint, with its arrays in memory; None if it cannot be used."""
        return next((checkpoint.state for _, checkpoint in self._readable([number])), None)

    def states(self, *, before: int) -> Iterator[Any]:
        """States of the whole checkpoints of earlier rounds, the newest first, read one by one."""
        return (checkpoint.state for number, checkpoint in self._readable() if number < before)

    def _readable(self, rounds: Iterable[int] | None = None) -> Iterator[tuple[int, Checkpoint]]:
        for number in reversed(self.rounds()) if rounds is None else rounds:
            try:
                yield number, _read(self._path(number))
            except (OSError, DamagedFile) as error:
                log.warning("The checkpoint of round %d in %s cannot be used: %s.", number, self.folder, error)

    def _path(self, number: int) -> Path:
        return self.folder / f"{_PREFIX}{number:06d}"

    def _write(self, checkpoint: Checkpoint) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for torn in self.folder.glob(f"{_BESIDE}*"):  # left by a server that was killed
            shutil.rmtree(torn, ignore_errors=True)
        remove_unfinished(self.folder, after=0)  # a model beside the checkpoints
        beside = Path(tempfile.mkdtemp(dir=self.folder, prefix=_BESIDE))
        try:
            arrays: dict[str, np.ndarray] = {}
            facts = {item.name: getattr(checkpoint, item.name) for item in dataclasses.fields(checkpoint)}
            facts["state"] = to_json(checkpoint.state, arrays)
            write_arrays(beside / STATE, arrays, digests=self.digests)
            _write_facts(beside / FACTS, facts)
            path = self._path(checkpoint.round)
            if path.exists():  # the round is repeated, because its checkpoint was damaged
                shutil.rmtree(path)
            os.replace(beside, path)
            self._written = checkpoint.round, facts["state"]
            sync_folder(self.folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _mapped(self, path: Path, facts: Any) -> Any:
        arrays = map_arrays(path / STATE)
        for array, value in arrays.values():
            self.digests.know(array, value)
        return from_json(facts, {name: array for name, (array, _) in arrays.items()})

    def _remove(self, rounds: Iterable[int]) -> None:
        for number in rounds:
            shutil.rmtree(self._path(number), ignore_errors=True)


def layout_digest(layout: Layout) -> str:
    """Digest of names, shapes and dtypes of a model's entries."""
    return hashlib.sha256(json.dumps(layout.to_json()).encode()).hexdigest()[:32]


def _read(path: Path) -> Checkpoint:
    facts = _read_facts(path / FACTS)
    try:
        facts["state"] = from_json(facts["state"], read_arrays(path / STATE))
        facts["method"] = current_names(facts["method"])
        return _checkpoints().validate_python(facts)
    except (DamagedFile, CheckpointError):
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DamagedFile(f"{'.'.join(map(str, first['loc']))!r} is wrong: {first['msg']}") from None
    except WRONG as error:
        raise DamagedFile(f"fields are missing or wrong ({error!r})") from error


@cache
def _checkpoints() -> TypeAdapter[Checkpoint]:
    """Checks the types of a checkpoint's fields. It is made on demand."""
    return TypeAdapter(Checkpoint)


def _write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    text = json.dumps(facts)  # encoded once: with many clients it has megabytes
    digest = hashlib.sha256(text.encode()).hexdigest()
    with path.open("x", encoding="utf-8") as file:
        file.write(f'{{"format": {FORMAT}, "sha256": "{digest}", "facts": {text}}}')
        file.flush()
        os.fsync(file.fileno())


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if type(number := content["format"]) is int and number > FORMAT:
            raise CheckpointError(
                f"{path.parent} was written by a later version of Tepal (format {number}; this version reads up to "
                f"{FORMAT}): install that version, or choose another folder. This one would remove it"
            )
        if number not in (1, FORMAT):
            raise DamagedFile(f"it has the format {number}; this version of Tepal reads 1 and {FORMAT}")
        if hashlib.sha256(json.dumps(content["facts"]).encode()).hexdigest() != content["sha256"]:
            raise DamagedFile("its digest is not that of its content")
        return dict(content["facts"])
    except (DamagedFile, CheckpointError):
        raise
    except WRONG as error:
        raise DamagedFile(f"it cannot be read ({error!r})") from error
