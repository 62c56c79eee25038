"""Finding a run directory and reading its files.

A directory may be from someone else: files have limits (`limits.py`), links that lead out of it are not followed, and
whatever is not as a run writes it raises OSError or ValueError, naming the file.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from tepal.host.text import visible
from tepal.host.toml import parse_untrusted
from tepal.records.columns import is_number
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory.holding import is_held
from tepal.records.run_directory.limits import (
    DEEPEST,
    LARGEST_ROUND,
    MOST_CONFIG,
    MOST_METRICS_FILE,
    MOST_RECORD,
    MOST_RECORDS,
    MOST_STATE,
    MOST_SUMMARY,
)
from tepal.records.run_directory.metrics import scored, summarise
from tepal.records.run_directory.names import CONFIG, LABELS, LATEST, METRICS, ROUNDS, SUMMARY


def find_run(path: Path) -> Path:
    """The run directory at `path`: `path` itself, or the target of its `latest` link, or of `path` if it is the link.

    Raises FileNotFoundError if there is none.
    """
    path = Path(path)
    if (path / LATEST).exists():
        path = path / LATEST
    if path.is_file() and path.name == LATEST:
        path = path.parent / read_file(path, _LONGEST_PATH).decode(errors="replace").strip()
    try:
        path = path.resolve()
    except (RuntimeError, ValueError) as error:  # a loop of links, or NUL in the name
        raise FileNotFoundError(f"no run directory at {visible(path)}: {visible(error)}") from error
    if not path.is_dir():
        raise FileNotFoundError(f"no run directory at {path}: expected runs/<start>-<strategy> or runs/{LATEST}")
    if not any((path / name).exists() for name in (CONFIG, METRICS, SUMMARY)):
        raise FileNotFoundError(f"{path} is not a run directory: it has none of {CONFIG}, {METRICS}, {SUMMARY}")
    return path


_LONGEST_PATH = 4096


def read_file(path: Path, most: int | None) -> bytes:
    """The content of a file in a run directory.

    Args:
        path: The file.
        most: Its largest size in bytes; None for no limit.

    Raises OSError if it cannot be read, FileNotFoundError if it is missing, ValueError if it is larger, is no regular
    file, or is a link to a file outside of its folder.
    """
    # `realpath` raises no error for a loop of links; opening it does.
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise ValueError(f"{path} is a link to a file outside of its folder: put a copy of the file in its place")
    # Opened without waiting: a pipe would wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise ValueError(f"{path} has {max(status.st_size, len(content)):,} bytes, and {most:,} are allowed")
    return content


def read_metrics(path: Path, most: int | None = MOST_METRICS_FILE) -> list[RoundRecord]:
    """Read the rounds of a run in their order; [] where none has ended yet.

    An incomplete last line is ignored. Of a round that a resumed run repeated, the last line counts.

    Args:
        path: A run directory, or its `metrics.jsonl`.
        most: As of `read_file`.

    Raises ValueError, with file and line, where another line is not a round.
    """
    path = Path(path)
    if path.name != METRICS or path.is_dir():
        path = path / METRICS
    try:
        content = read_file(path, most)
    except FileNotFoundError:
        return []
    lines = content.split(b"\n")
    rounds: dict[int, RoundRecord] = {}
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                parsed = parse_line(line)
                rounds[parsed.round] = parsed
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number}: {error}. Each line must be a JSON object with a whole number as its "
                    '"round"; remove the line, or take the file from a copy'
                ) from error
    return scored([rounds[number] for number in sorted(rounds)])


def parse_line(line: bytes) -> RoundRecord:
    """Parse one line of `metrics.jsonl`. Raises ValueError where it is not an object with a round."""
    parsed = _parsed(line)
    if not isinstance(parsed, dict) or type(parsed.get("round")) is not int:
        raise ValueError("not a round")
    if not 0 <= parsed["round"] <= LARGEST_ROUND:
        raise ValueError(f"its round is not one of 0 to {LARGEST_ROUND:,}")
    return RoundRecord.from_line(parsed)


def _parsed(content: bytes) -> Any:
    """The value of a JSON file; NaN and infinity are None. Raises ValueError."""
    try:
        return json.loads(content, parse_constant=lambda _: None)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def read_config(run: Path) -> dict[str, Any]:
    """The run config from `config.toml`; {} if the file is missing. Raises OSError or ValueError, naming the file."""
    path = run / CONFIG
    try:
        config = parse_untrusted(read_file(path, MOST_CONFIG), MOST_CONFIG)
        _check_depth(config)
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: lists or tables are nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not text in UTF-8") from error
    except ValueError as error:
        raise _damaged(path, error) from error
    planned = config.get("num-server-rounds", 0)
    if type(planned) is not int or not 0 <= planned <= LARGEST_ROUND:
        raise ValueError(f"{path} is damaged: num-server-rounds is not a whole number of 0 to {LARGEST_ROUND:,}")
    return config


def _check_depth(value: Any, left: int = DEEPEST) -> None:
    """Raise ValueError if lists or objects are nested so deeply that what is done with them may fail."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not left:
        raise ValueError(f"lists or objects are nested more than {DEEPEST} levels deep")
    for each in inner:
        _check_depth(each, left - 1)


def read_label_counts(run: Path, most: int | None = MOST_STATE) -> dict[str, list[int]]:
    """The number of examples of each class, by client, as far as clients reported them.

    `most` is as of `read_file`. Raises OSError or ValueError, naming the file.
    """
    path = run / LABELS
    try:
        counts = _parsed(read_file(path, most))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(counts, dict) or not all(isinstance(each, list) for each in counts.values()):
        raise ValueError(f"{path} is damaged: it is not an object with a list for each client")
    if not all(type(count) is int and 0 <= count <= _MOST_EXAMPLES for each in counts.values() for count in each):
        raise ValueError(f"{path} is damaged: a number of examples is not a whole number of 0 to {_MOST_EXAMPLES:,}")
    return counts


_MOST_EXAMPLES = 2**53


def _damaged(path: Path, error: ValueError) -> ValueError:
    """An error that names the file."""
    text = visible(error)
    return error if text.startswith(str(path)) else ValueError(f"{path} is damaged: {text}")


def read_json(path: Path) -> Any | None:
    """The content of an optional JSON file; None if it is missing or cannot be read."""
    try:
        value = _parsed(read_file(path, MOST_STATE))
        _check_depth(value)
        return value
    except (OSError, ValueError):
        return None


def read_summary(run: Path) -> dict[str, Any] | None:
    """The content of `summary.json`; None if it is missing, as in a run in progress or one that was killed.

    Raises OSError or ValueError, naming the file.
    """
    path = run / SUMMARY
    try:
        summary = _parsed(read_file(path, MOST_SUMMARY))
        _check_depth(summary)
        if not isinstance(summary, dict):
            raise ValueError("it is not an object")
        for name in _TEXTS:
            if not isinstance(summary.get(name), str | None):
                raise ValueError(f"its {name} is not text")
        for name in _NUMBERS & summary.keys():
            value = summary[name]
            if value is not None and not is_number(value):
                raise ValueError(f"its {name} is not a number")
            if isinstance(value, float) and not abs(value) <= _LARGEST:
                summary[name] = None
        if not 0 <= (summary.get("rounds") or 0) <= LARGEST_ROUND:
            raise ValueError(f"its rounds are not 0 to {LARGEST_ROUND:,}")
        return summary
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, error) from error


def current_summary(run: Path, running: bool | None = None) -> dict[str, Any] | None:
    """The content of `summary.json`; None if it is missing, or if the run goes on or went on after it was written.

    Args:
        run: The run directory.
        running: Whether the run goes on; None: whether its directory is locked.

    Raises OSError or ValueError, naming the file.
    """
    summary = read_summary(run)
    if summary is None or (is_held(run) if running is None else running):
        return None
    try:
        newer = (run / METRICS).stat().st_mtime_ns > (run / SUMMARY).stat().st_mtime_ns
    except FileNotFoundError:
        return summary
    # A copy of a run may have its files in any order of time. A run that went back has fewer rounds.
    return None if newer and summarise(read_metrics(run), {})["rounds"] != (summary.get("rounds") or 0) else summary


_LARGEST = 1e300  # as of `from_values`
_TEXTS = ("strategy", "model", "stopped_by", "deliver", "best_by", "ended_early")
_NUMBERS = {
    "parameters", "rounds", "accuracy", "loss", "bytes_up", "bytes_down", "bytes_vs_fedavg", "bytes_plain",
    "seconds", "refused_replies", "step_seconds", "rmse", "frozen_after",
    "delivered_round", "best_round", "best_score",
}  # fmt: skip


def read_records(
    run: Path, most: int = 200, known: dict[Path, tuple[int, dict[str, np.ndarray]]] | None = None
) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Read the arrays that a method recorded of its rounds (`rounds/`), in their order: (round, arrays).

    A file that cannot be read is ignored: it is incomplete, is being written, or has arrays of more than MOST_RECORD.

    Args:
        run: The run directory.
        most: Of more rounds only every second, fourth, … and the last is read; they stay the same as a run goes on.
        known: file → (time of its last change, arrays) of an earlier call, which this one updates.
    """
    files = sorted(file for file in (run / ROUNDS).glob("*.npz") if re.fullmatch("[0-9]{1,9}", file.stem))
    apart = 1
    while (len(files) + apart - 1) // apart + 1 > max(most, 2) < len(files):
        apart *= 2
    files = [*files[:-1:apart], *files[-1:]]
    read: dict[Path, tuple[int, dict[str, np.ndarray]]] = {}
    left = MOST_RECORDS
    for file in reversed(files):
        with suppress(OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, RuntimeError):
            changed = file.stat().st_mtime_ns
            arrays = known[file][1] if known and file in known and known[file][0] == changed else _arrays(file)
            left -= sum(array.nbytes for array in arrays.values())
            if left < 0:
                break
            read[file] = changed, arrays
    if known is not None:
        known.clear()
        known.update(read)
    return [(int(file.stem), arrays) for file, (_, arrays) in reversed(read.items())]


def _arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file in `rounds/`. Raises ValueError if they are larger than MOST_RECORD."""
    packed = io.BytesIO(read_file(file, MOST_RECORD))
    with zipfile.ZipFile(packed) as archive:
        if sum(member.file_size for member in archive.infolist()) > MOST_RECORD:
            raise ValueError(f"{file} has arrays of more than {MOST_RECORD:,} bytes")
        for member in archive.infolist():
            with archive.open(member) as content:
                _check_size(content, member.file_size)
    packed.seek(0)
    with np.load(packed) as arrays:
        return dict(arrays)


def _check_size(content: IO[bytes], size: int) -> None:
    """Raise ValueError if an array's header names more than the file has: numpy would make room for it."""
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(content)
    if math.prod(shape) * kind.itemsize > size:
        raise ValueError("an array is not complete")
