"""The K models of an ensemble as one ArrayRecord, and so as one file: the names of mode k begin with `mode/<k>/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import Array, ArrayRecord

_MODE = "mode/{}/"


def join_modes(models: Iterable[Mapping[str, Array]]) -> ArrayRecord:
    """The models of an ensemble in one record: the names of mode k begin with `mode/<k>/`. One model stays as it is."""
    models = list(models)
    if len(models) == 1:
        return ArrayRecord(dict(models[0]))
    named = ((_MODE.format(k) + name, array) for k, model in enumerate(models) for name, array in model.items())
    return ArrayRecord(dict(named))


def modes_of(record: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The models in a record that `join_modes` made: one, or one for each mode."""
    models: list[dict[str, Array]] = []
    while True:
        prefix = _MODE.format(len(models))
        mode = {name.removeprefix(prefix): array for name, array in record.items() if name.startswith(prefix)}
        if not mode:
            return models or [dict(record)]
        models.append(mode)
