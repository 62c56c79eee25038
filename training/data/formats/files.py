"""Files on disk, plain or compressed (.gz, .xz)."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from tepal.training.data.config import DataError

_OPEN: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def suffix_of(path: Path) -> str:
    """Return the suffix of the format in lower case: ".csv" for "a.csv.gz"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in _OPEN), "")


def without_copies(files: Iterable[Path]) -> list[Path]:
    """Return the files, sorted, each once: without "a.csv.gz" beside "a.csv", and without "a.csv.xz" beside either."""
    chosen: dict[Path, Path] = {}
    for file in sorted(files):  # a plain file comes first
        chosen.setdefault(file.with_suffix("") if file.suffix.lower() in _OPEN else file, file)
    return list(chosen.values())


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed by its suffix. Raises DataError, also for errors while it is read."""
    try:
        with _OPEN.get(path.suffix.lower(), open)(path, "rb") as content:
            yield content
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: cannot be decompressed ({error}): it is truncated or damaged, copy it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}: check permissions and disk") from error


@contextmanager
def opened_text(path: Path) -> Iterator[IO[str]]:
    """Open a file as UTF-8 text with unchanged line ends. Raises DataError."""
    try:
        with opened(path) as content, TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
            yield text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}): save it as UTF-8") from error
