"""A method's state as JSON and arrays, and what earlier versions called the classes in it.

A state may consist of dataclasses, dicts, lists, tuples, numbers, text, None and numpy arrays, in any nesting. An array
that occurs twice in it is written once.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tepal.exchange.files import DamagedFile

WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What reading a damaged value raises."""


class CheckpointError(ValueError):
    """A checkpoint from which this run cannot be resumed; the text says why and what to do."""


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
    except WRONG as error:
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
