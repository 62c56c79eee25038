"""Pretrained weights that trials start from: which are missing, and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from tepal.host.toml import separated
from tepal.models.pretrained import FILES, INDEX, PICKLE, SAFETENSORS, find_weights


def missing_weights(folder: Path, wanted: Mapping[str, str]) -> str:
    """Name the weights that are not below a folder, each on a line; "" if none is missing.

    Args:
        folder: of all pretrained weights.
        wanted: name of a folder in it → what belongs into it.
    """
    absent = [name for name in wanted if not any((folder / name / file).is_file() for file in FILES)]
    return "".join(f"\n  {folder / name}/: {wanted[name]}, as {SAFETENSORS} or {PICKLE}" for name in absent)


def digests(pretrained: str, folder: Path) -> dict[str, str]:
    """The SHA-256 of the weights that a run starts from.

    Args:
        pretrained: that key of the run config; "" for random weights.
        folder: paths in it are named relative to it.

    Returns:
        Source → digest in hexadecimal; of weights in several files, source/file → digest of each.

    Raises:
        ModelError: there are no weights at a source, or those that come with Tepal are damaged.
    """
    whole = pretrained.strip()
    sources = (whole,) if whole and Path(whole).expanduser().exists() else separated(whole)
    return {name: digest for source in sources for name, digest in _digests_of(source, folder)}


def _digests_of(source: str, folder: Path) -> Iterator[tuple[str, str]]:
    file, path = find_weights(source), Path(source).expanduser()
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else source
    if file.name == INDEX:
        for part in sorted(file.parent.glob("*.safetensors")):
            yield f"{name}/{part.name}", _digest(part)
    else:
        yield name, _digest(file)


def _digest(file: Path) -> str:
    state = file.stat()
    return _read_digest(file, state.st_mtime_ns, state.st_size)


@lru_cache
def _read_digest(file: Path, changed: int, size: int) -> str:
    """The SHA-256 of a file, read once as long as its date and size (`changed`, `size`) stay."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
