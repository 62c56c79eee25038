"""Paths that a user gives on the command line: of the app, and of files in its run config.

ServerApp and clients have other current folders: with a relative path they would look there for a file that the command
has found here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tepal import models
from tepal.host.superlink import app_run_config
from tepal.host.toml import Value, parse_run_config
from tepal.server_app.config import defaults
from tepal.server_app.config.client_tables import PREFIX
from tepal.training.data.config import DIGITS, LOCAL
from tepal.training.data.hub import HUB
from tepal.training.data.known import KNOWN
from tepal.training.node_settings import CLIENT_SETTINGS


def absolute_paths(config: Mapping[str, Value], *folders: Path) -> dict[str, Value]:
    """Return a run config in which the files and folders that it names have absolute paths.

    `dataset`, `dataset-path`, `model`, `tokenizer` and `pretrained` may be paths. One that exists in several of
    `folders` is that of the first. What is in none of them is left as it is, and so are names of data sets and models.
    A client's own `data-path` and `model-path` are always paths; one that does not exist is in the first folder.
    """
    found = dict(config)
    for key, names in _NAMES.items():
        value = config.get(key)
        if isinstance(value, str) and value not in names and not value.startswith(HUB):
            found[key] = _existing(value, folders) or value
    given = config.get("pretrained")
    if isinstance(given, str):  # a path may have a comma, but commas also separate sources
        each = [_existing(source.strip(), folders) or source.strip() for source in given.split(",")]
        found["pretrained"] = _existing(given, folders) or ",".join(each)
    for key, value in config.items():  # such as client.3.data-path
        if key.startswith(PREFIX) and key.endswith(_PATHS) and value and isinstance(value, str):
            found[key] = _existing(value, folders) or str(folders[0].absolute() / Path(value).expanduser())
    return found


def with_paths(config: Mapping[str, Value], other: Callable[[Path], str]) -> dict[str, Value]:
    """Return a run config with other paths in place of those of the files and folders that it names.

    Args:
        config: with absolute paths (see `absolute_paths`), and checked if it has `client-settings`.
        other: what stands in place of a path.
    """

    def of(text: str) -> str:
        return other(Path(text)) if text.startswith("/") and os.path.exists(text) else text

    found = dict(config)
    for key, value in config.items():
        if not isinstance(value, str):
            continue
        if key == "pretrained" and not os.path.exists(value):
            found[key] = ",".join(of(source.strip()) for source in value.split(","))
        elif key in _NAMES or key == "pretrained" or (key.startswith(PREFIX) and key.endswith(_PATHS)):
            found[key] = of(value)
        elif key == CLIENT_SETTINGS and value:
            tables: dict[str, dict[str, Value]] = json.loads(value)
            for table in tables.values():
                table |= {own: of(str(table[own])) for own in ("data-path",) if own in table}
            found[key] = json.dumps(tables)
    return found


def files_in(config: Mapping[str, Value]) -> list[Path]:
    """Return the files and folders that a run config names, as `with_paths` finds them."""
    found: list[Path] = []

    def note(path: Path) -> str:
        found.append(path)
        return str(path)

    with_paths(config, note)
    return found


_PATHS = ("data-path", "model-path")
"""Ends of a client's own keys that are paths."""
_NAMES: Mapping[str, Iterable[str]] = {
    "dataset": {DIGITS, LOCAL, *KNOWN}, "dataset-path": (), "model": models.MODELS, "tokenizer": (),
}  # fmt: skip
"""Keys with paths, and the names that each may have instead."""


def _existing(text: str, folders: Iterable[Path]) -> str:
    """Return the absolute path of what exists in the first possible folder; "" if there is none."""
    if not text:
        return ""
    paths = (folder.absolute() / Path(text).expanduser() for folder in folders)
    return next((str(path) for path in paths if os.path.exists(path)), "")  # a list may be too long for a path


def given_run_config(arguments: Iterable[str]) -> dict[str, Value]:
    """Read the values of `--run-config`; its paths become absolute.

    They are looked for in the current folder, those of a TOML file then in the file's. Raises ValueError for text that
    cannot be read.
    """
    config: dict[str, Value] = {}
    for argument in arguments:
        beside = [Path(argument).expanduser().parent] if argument.endswith(".toml") else []
        config |= absolute_paths(parse_run_config([argument]), Path(), *beside)
    return config


def usual_run_config(app: Path) -> dict[str, Value]:
    """Return the app's own run config; its paths are looked for in the current folder, then in the app's."""
    return absolute_paths(app_run_config(app), Path(), app)


def has_our_keys(app: Path) -> bool:
    """Return whether an app takes Tepal's run config, as Tepal's own app does. Raises RunError if it is not an app."""
    return defaults().keys() <= app_run_config(app).keys()
