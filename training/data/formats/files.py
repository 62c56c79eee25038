"""Files as they lie on a disk: plain, or compressed as .gz or .xz."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from tepal.training.data.config import DataError

_OPEN: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def suffix_of(path: Path) -> str:
    """The suffix that tells the format: of "a.csv.gz" it is ".csv". Lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in _OPEN), "")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's content, decompressed by its name. Raises DataError, also for what goes wrong while it is read."""
    try:
        with _OPEN.get(path.suffix.lower(), open)(path, "rb") as content:
            yield content
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: cannot be decompressed ({error}): it is cut off or damaged; copy it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


@contextmanager
def opened_text(path: Path) -> Iterator[IO[str]]:
    """A file's content as UTF-8 text, line ends as they are. Raises DataError."""
    try:
        with opened(path) as content, TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
            yield text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}): save it as UTF-8") from error
