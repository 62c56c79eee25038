"""The K models of an ensemble as one ArrayRecord (and one file): the names of mode k begin with `mode/<k>/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from flwr.app import Array, ArrayRecord

from tepal.exchange.plan import Tree

_TREE = "mode/"
OF_MODE = re.compile(r"mode/(0|[1-9][0-9]*)/(.*)", re.DOTALL)
"""Pattern of an ensemble's names: (number of the mode, name in its model)."""


def tree_of_mode(mode: int) -> Tree:
    """The tree in which a mode is sent and cached."""
    return f"{_TREE}{mode}"


def of_mode(tree: Tree) -> bool:
    """Whether a tree is a mode's."""
    return tree.startswith(_TREE)


def mode_of_tree(tree: Tree) -> int:
    """The number of the mode that is sent in a tree. Raises ValueError for other trees."""
    return int(tree.removeprefix(_TREE))


def join_modes(models: Iterable[Mapping[str, Array]]) -> ArrayRecord:
    """The models of an ensemble in one record. A single model keeps its names, unless they match `OF_MODE`."""
    models = list(models)
    alone = len(models) == 1 and not all(map(OF_MODE.fullmatch, models[0]))
    joined = ArrayRecord()
    for k, model in enumerate(models):
        for name, array in model.items():
            joined[name if alone else f"mode/{k}/{name}"] = array
    return joined


def modes_of(record: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The models in a record of `join_modes`: one, or one for each mode. Raises ValueError if a mode is missing."""
    found = [OF_MODE.fullmatch(name) for name in record]
    if not found or not all(found):
        return [dict(record)]
    models: dict[int, dict[str, Array]] = {}
    for match in found:
        assert match is not None
        models.setdefault(int(match[1]), {})[match[2]] = record[match[0]]
    if missing := set(range(max(models) + 1)).difference(models):
        raise ValueError(f"the arrays have mode {max(models)} of an ensemble, but no mode {min(missing)}")
    return [models[k] for k in range(len(models))]
