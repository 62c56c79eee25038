"""Checkpoints: all that a server needs to resume a run, written to disk after every round.

    <folder>/round-000007/state.safetensors     the arrays of the method's state
    <folder>/round-000007/checkpoint.json       all else, and the place of each array in the state

A checkpoint is written under a temporary name and renamed, so it exists as a whole or not at all. It is checked when it
is read; if the newest is damaged, the one before it is used. A method's state may consist of dataclasses, dicts, lists,
tuples, numbers, text, None and numpy arrays, in any nesting; an array that occurs twice in it is written once.
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

log = getLogger("flwr")

STATE, FACTS = "state.safetensors", "checkpoint.json"
FORMAT = 2
"""2: the digests of arrays are BLAKE3. 1, which is read as well: they are SHA-256."""

_WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What reading a damaged value raises."""

_PREFIX, _BESIDE = "round-", ".writing-"


class CheckpointError(ValueError):
    """A checkpoint from which this run cannot be resumed; the text says why and what to do."""


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


# ---- a state as JSON and arrays --------------------------------------------------------------------------------------


def to_json(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """`value` as JSON, in which arrays are references; the arrays are added to `arrays`.

    Raises TypeError for a value that a state must not contain.
    """
    return _encoded(value, arrays, {id(array): name for name, array in arrays.items()})


def _encoded(value: Any, arrays: dict[str, np.ndarray], known: dict[int, str]) -> Any:
    # Not a function within `to_json`: one that calls itself keeps the arrays until the garbage collector runs.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (np.ndarray, np.memmap):
        if value.dtype.name not in _DTYPES:
            raise TypeError(f"a method's state has an array of {value.dtype}, which no checkpoint can have")
        name = known.setdefault(id(value), str(len(known)))
        arrays[name] = value
        return {"array": name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _can_come_back(type(value)):
        items = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {"type": _name_of(type(value)), "fields": {name: _encoded(items[name], arrays, known) for name in items}}
    if type(value) is dict:
        return {"dict": [[_encoded(each, arrays, known) for each in item] for item in value.items()]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encoded(inner, arrays, known) for inner in value]}
    raise TypeError(
        f"a method's state has a {type(value).__name__}, which cannot be saved in a checkpoint; a state may have "
        "dataclasses defined in a module, dicts, lists, tuples, numbers, text, None and numpy arrays"
    )


def from_json(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that `to_json` encoded. Raises DamagedFile, and CheckpointError for an unknown type."""
    try:
        return _decoded(value, arrays)
    except (DamagedFile, CheckpointError):
        raise
    except _WRONG as error:
        raise DamagedFile(f"fields of its state are missing or wrong ({error!r})") from error


def _decoded(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    match value:
        case {"array": str(name)}:
            return arrays[name]
        case {"type": str(name), "fields": dict(fields)}:
            return _class_of(name)(**{key: _decoded(inner, arrays) for key, inner in fields.items()})
        case {"dict": list(items)}:
            return {_decoded(key, arrays): _decoded(inner, arrays) for key, inner in items}
        case {"list": list(items)}:
            return [_decoded(inner, arrays) for inner in items]
        case {"tuple": list(items)}:
            return tuple(_decoded(inner, arrays) for inner in items)
    raise DamagedFile(f"its state has {sorted(value)}")


_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", *(f"{u}int{n}" for u in ("u", "") for n in (8, 16, 32, 64))]
)


_MOVED = {
    "tepal.strategies.fedopt": "tepal.strategies.baselines.fedopt",
    "tepal.strategies.scaffold": "tepal.strategies.baselines.scaffold",
    "tepal.strategies.personal_models": "tepal.strategies.personal.models",
}
"""Modules as named in checkpoints of earlier versions → their present names."""

_RENAMED = {
    "Averaging": "FedAvgMethod",
    "Freezing": "FedFrozenMethod",
    "Selecting": "SelectiveLayersMethod",
    "Ensembling": "FedEnsembleMethod",
    "Mixing": "FedACSMethod",
    "TrainingByName": "PartialTrainingMethod",
    "Proximal": "FedProxMethod",
    "Momentum": "FedAvgMMethod",
    "Adagrad": "FedAdagradMethod",
    "Yogi": "FedYogiMethod",
    "Adam": "FedAdamMethod",
    "Normalised": "FedNovaMethod",
    "Controlled": "ScaffoldMethod",
    "ControlledState": "ScaffoldState",
    "BayesianEnsemble": "FedBEMethod",
    "Alone": "LocalMethod",
    "Regularised": "DittoMethod",
    "MetaLearning": "PerFedAvgMethod",
    "MoreauEnvelope": "PFedMeMethod",
    "Mixture": "APFLMethod",
    "AttentiveMixing": "FedAMPMethod",
}
"""Classes of methods and states as checkpoints of earlier versions name them → their names now."""


_ADDED: Mapping[str, Mapping[str, Any]] = {
    "FedACSMethod": {"follow rate": False, "newcomers": "initial"},
    "FedAMPMethod": {"unit": "absolute", "newcomers": "initial"},
    "FedBEMethod": {"variance scale": 1.0, "temperature": 1.0},
    "PFedMeMethod": {"outer-step": 0.0},
    "SelectiveLayersMethod": {"fill": False},
}
"""Class of a method → options that checkpoints of earlier versions do not have → what these versions did."""


def current_names(method: Mapping[str, Any]) -> dict[str, Any]:
    """Name and options of a strategy from a checkpoint, with the names and options that methods have now."""
    named = {key: _RENAMED.get(value, value) if key in ("name", "member") else value for key, value in method.items()}
    of_member = {f"member {key}": value for key, value in _ADDED.get(named.get("member", ""), {}).items()}
    return {**_ADDED.get(named.get("name", ""), {}), **of_member, **named}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _can_come_back(kind: type) -> bool:
    """Whether a dataclass can be found by its name and made from its fields."""
    try:
        return _class_of(_name_of(kind)) is kind and all(item.init for item in dataclasses.fields(kind))
    except CheckpointError:
        return False


def _class_of(name: str) -> Any:
    """The dataclass of this name. Its module must be imported already: reading a checkpoint imports no code."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(_MOVED.get(module, module))
    for part in qualified.split("."):
        found = getattr(found, part, None) or getattr(found, _RENAMED.get(part, part), None)
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
        facts["method"] = current_names(facts["method"])
        return _checkpoints().validate_python(facts)
    except (DamagedFile, CheckpointError):
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DamagedFile(f"{'.'.join(map(str, first['loc']))!r} is wrong: {first['msg']}") from None
    except _WRONG as error:
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
    except _WRONG as error:
        raise DamagedFile(f"it cannot be read ({error!r})") from error
