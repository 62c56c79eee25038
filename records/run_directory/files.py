"""Writing files and folders: atomically, with errors that name a remedy, and with values that JSON can represent."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tepal.host.files import replacing
from tepal.records.run_directory.names import LATEST

log = logging.getLogger(__name__)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old or the new content. Raises OSError naming the file."""
    with explained("write", path), replacing(path) as partial:
        partial.write_bytes(content)


def as_json(value: Any) -> Any:
    """Convert `value` to JSON's types: numpy values unpacked, NaN and infinity as None, other types as text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return [as_json(inner) for inner in sorted(value, key=str)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [as_json(inner) for inner in value]
    return str(value)


def json_line(value: Any) -> bytes:
    """`value` as one line of JSON in UTF-8, of JSON's types (`as_json`). Only what UTF-8 cannot encode is escaped."""
    # Escaped, a letter of a script other than Latin would have three times as many bytes. What is not valid in UTF-8, a
    # lone surrogate, becomes its escape, which JSON reads as the same.
    text = json.dumps(as_json(value), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def make_first_free(base: Path, name: str) -> Path:
    """Make a folder `name` in `base`, or `name`-2, -3, … where it is taken, and return it."""
    attempt = 1
    while True:
        path = base / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            attempt += 1


def point_latest_at(run: Path, folder: Path | None = None) -> None:
    """Make `latest` in a folder (by default the run's parent) a link to this run."""
    # Only a convenience, so a failure (no right to make links, a folder of that name) must not stop a run.
    folder = folder or run.parent
    target, latest = os.path.relpath(run, folder), folder / LATEST
    try:
        with replacing(latest) as partial:
            try:
                partial.symlink_to(target, target_is_directory=True)
            except (OSError, NotImplementedError):
                partial.write_text(target + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("%s does not point at the newest run %s: %s", latest, run.name, error)


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Turn the system's error into one that names the failed action, the path and a remedy."""
    try:
        yield
    except OSError as error:
        message = f"cannot {what} {path}: {error.strerror or error}"
        # safetensors' errors have no number, so their message always has the free space.
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                folder = next(folder for folder in path.absolute().parents if folder.is_dir())
                message += f"; {folder} has {shutil.disk_usage(folder).free / 1e6:,.0f} MB free: make room there"
        else:
            message += "; choose a folder that this user may write to"
        raise (OSError(error.errno, message) if error.errno else OSError(message)) from error
