"""Checkpoints: what a server must remember to go on with a run, on disk after every round.

    <folder>/round-000007/state.safetensors     the arrays of the method's state
    <folder>/round-000007/checkpoint.json       all else, and where in the state each array belongs

A checkpoint is written beside and renamed, so it is there as a whole or not at all, and it is checked when it is read:
where the newest is damaged, the one before it is taken. A method's state may consist of dataclasses, dicts, lists,
tuples, numbers, text, None and numpy arrays, in any nesting; an array that stands in it twice is written once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from tepal.exchange.files import DamagedFile, map_arrays, read_arrays, write_arrays
from tepal.exchange.layout import Layout, Names
from tepal.exchange.parts import Digests
from tepal.host.files import sync_folder

log = getLogger("flwr")

STATE, FACTS = "state.safetensors", "checkpoint.json"
FORMAT = 1

_PREFIX, _BESIDE = "round-", ".writing-"


class CheckpointError(ValueError):
    """A checkpoint that this run cannot go on from; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A run after one of its rounds."""

    round: int
    experiment: str
    seed: int
    """All randomness derives from it, the round and the clients' names: there is no other state of it."""
    method: Mapping[str, Any]
    """Name and options of the strategy."""
    layout: str
    """Digest of the model's layout."""
    state: Any
    """The method's."""
    held: Mapping[str, Names] = field(default_factory=dict)
    """Client → ids of the parts that it holds."""
    current: Mapping[str, str] = field(default_factory=dict)
    """Client → id of the exchange whose personal state counts."""
    standing: Mapping[str, Any] = field(default_factory=dict)
    """Which clients have failed how often, and who is left out until when."""
    clients: Names = ()
    """Who could take part in the round."""
    history: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """The rounds' metrics so far, as Flower's `Result` has them: kind → round → metric → value."""


class Checkpoints:
    """The checkpoints of one run, in a folder of its own.

    Args:
        folder: made when the first checkpoint is written.
        keep: how many of the last ones stay, at least 1.
    """

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must be kept")
        self.folder = Path(folder)
        self.keep = keep
        self.digests = Digests()
        """Of the arrays of states that were saved; who sends them has no need to hash them again."""

    def rounds(self) -> list[int]:
        """Rounds of which there is a checkpoint, in their order."""
        found = (path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*"))
        return sorted(int(number) for number in found if number.isdigit())

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove those that are not kept any more.

        Where the disk is full, all but the newest that is whole make room for it. Raises OSError when that is not
        enough; that one is still there.
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
        # Those of later rounds were damaged, else this run would have gone on from them.
        self._remove(number for number in self.rounds() if number > checkpoint.round)
        self._remove(self.rounds()[: -self.keep])

    def saved_state(self, number: int) -> Any:
        """The state of a checkpoint that this process has just written, its arrays as the file has them.

        See `map_arrays`: they take no memory that the system could not have back. Raises OSError and DamagedFile.
        """
        return self._mapped(self._path(number), _read_facts(self._path(number) / FACTS)["state"])

    def on_disk(self, state: Any) -> Any:
        """A state with its arrays in a file of this folder that has no name, as `saved_state`. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_BESIDE) as beside:
            arrays: dict[str, np.ndarray] = {}
            facts = to_json(state, arrays)
            write_arrays(Path(beside) / STATE, arrays, digests=self.digests)
            return self._mapped(Path(beside), facts)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None when there is none. Damaged ones are passed over, and said."""
        return next((checkpoint for _, checkpoint in self._readable()), None)

    def versions(self) -> list[Mapping[str, str]]:
        """`current` of all checkpoints that are whole, the oldest first."""
        return [checkpoint.current for _, checkpoint in self._readable()][::-1]

    def states(self, *, before: int) -> Iterator[Any]:
        """States of the checkpoints of earlier rounds that are whole, the newest first, read one by one."""
        return (checkpoint.state for number, checkpoint in self._readable() if number < before)

    def _readable(self) -> Iterator[tuple[int, Checkpoint]]:
        for number in reversed(self.rounds()):
            try:
                yield number, _read(self._path(number))
            except (OSError, DamagedFile) as error:
                log.warning("The checkpoint of round %d in %s cannot be used: %s.", number, self.folder, error)

    def _path(self, number: int) -> Path:
        return self.folder / f"{_PREFIX}{number:06d}"

    def _write(self, checkpoint: Checkpoint) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for torn in self.folder.glob(f"{_BESIDE}*"):  # of a server that was killed
            shutil.rmtree(torn, ignore_errors=True)
        beside = Path(tempfile.mkdtemp(dir=self.folder, prefix=_BESIDE))
        try:
            arrays: dict[str, np.ndarray] = {}
            facts = {item.name: getattr(checkpoint, item.name) for item in dataclasses.fields(checkpoint)}
            facts["state"] = to_json(checkpoint.state, arrays)
            write_arrays(beside / STATE, arrays, digests=self.digests)
            _write_facts(beside / FACTS, facts)
            path = self._path(checkpoint.round)
            if path.exists():  # a round that a resumed run repeats, because its checkpoint was damaged
                shutil.rmtree(path)
            os.replace(beside, path)
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


# ---- a state as JSON and arrays --------------------------------------------------------------------------------------


def to_json(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """`value` as JSON, in which arrays are references; the arrays go into `arrays`.

    Raises TypeError for what a state must not hold.
    """
    known = {id(array): name for name, array in arrays.items()}

    def encode(value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (np.ndarray, np.memmap):
            if value.dtype.name not in _DTYPES:
                raise TypeError(f"a method's state holds an array of {value.dtype}, which no checkpoint can keep")
            name = known.setdefault(id(value), str(len(known)))
            arrays[name] = value
            return {"array": name}
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _can_come_back(type(value)):
            fields = {item.name: encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
            return {"type": _name_of(type(value)), "fields": fields}
        if type(value) is dict:
            return {"dict": [[encode(key), encode(inner)] for key, inner in value.items()]}
        if type(value) in (tuple, list):
            return {type(value).__name__: [encode(inner) for inner in value]}
        raise TypeError(
            f"a method's state holds a {type(value).__name__}, which no checkpoint can keep; it may hold dataclasses "
            "that are defined in a module, dicts, lists, tuples, numbers, text, None and numpy arrays"
        )

    return encode(value)


def from_json(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that `to_json` encoded. Raises DamagedFile, and CheckpointError for a type that is not known here."""
    if not isinstance(value, dict):
        return value
    match value:
        case {"array": str(name)}:
            return arrays[name]
        case {"type": str(name), "fields": dict(fields)}:
            return _class_of(name)(**{key: from_json(inner, arrays) for key, inner in fields.items()})
        case {"dict": list(items)}:
            return {from_json(key, arrays): from_json(inner, arrays) for key, inner in items}
        case {"list": list(items)}:
            return [from_json(inner, arrays) for inner in items]
        case {"tuple": list(items)}:
            return tuple(from_json(inner, arrays) for inner in items)
    raise DamagedFile(f"its state has {sorted(value)}")


_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", *(f"{u}int{n}" for u in ("u", "") for n in (8, 16, 32, 64))]
)


_MOVED = {
    "tepal.strategies.fedopt": "tepal.strategies.baselines.fedopt",
    "tepal.strategies.scaffold": "tepal.strategies.baselines.scaffold",
    "tepal.strategies.personal_models": "tepal.strategies.personal.models",
}
"""Modules as checkpoints of earlier versions name them → where they are now."""


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _can_come_back(kind: type) -> bool:
    """Whether a dataclass is found by its name, and made from its fields."""
    try:
        return _class_of(_name_of(kind)) is kind and all(item.init for item in dataclasses.fields(kind))
    except CheckpointError:
        return False


def _class_of(name: str) -> Any:
    """The dataclass of this name, of a module that is already imported: a checkpoint does not run code."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(_MOVED.get(module, module))
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise CheckpointError(
            f"a checkpoint has a state of type {name}, which this version of Tepal does not have: resume the run with "
            "the version that it was started with"
        )
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Checkpoint:
    facts = _read_facts(path / FACTS)
    try:
        facts["state"] = from_json(facts["state"], read_arrays(path / STATE))
        facts["held"] = {client: tuple(ids) for client, ids in facts["held"].items()}
        facts["clients"] = tuple(facts["clients"])
        return Checkpoint(**facts)
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedFile(f"it does not say all that it must ({error!r})") from error


def _write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    text = json.dumps(facts)  # once: of many clients it has megabytes
    digest = hashlib.sha256(text.encode()).hexdigest()
    with path.open("x", encoding="utf-8") as file:
        file.write(f'{{"format": {FORMAT}, "sha256": "{digest}", "facts": {text}}}')
        file.flush()
        os.fsync(file.fileno())


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise DamagedFile(f"it has format {content['format']}, and this version of Tepal reads {FORMAT}")
        if hashlib.sha256(json.dumps(content["facts"]).encode()).hexdigest() != content["sha256"]:
            raise DamagedFile("its digest is not that of its content")
        return dict(content["facts"])
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, DamagedFile) else DamagedFile(f"it cannot be read ({error!r})") from error
