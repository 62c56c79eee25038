"""Finding a run directory and reading its files."""

from __future__ import annotations

import json
import tomllib
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory.metrics import scored
from tepal.records.run_directory.names import CONFIG, LABELS, LATEST, METRICS, ROUNDS, SUMMARY


def find_run(path: Path) -> Path:
    """The run directory at `path`: `path` itself, or the target of its `latest` link, or of `path` if it is the link.

    Raises FileNotFoundError if there is none.
    """
    path = Path(path)
    if (path / LATEST).exists():
        path = path / LATEST
    if path.is_file() and path.name == LATEST:
        path = path.parent / path.read_text(encoding="utf-8").strip()
    path = path.resolve()
    if not path.is_dir():
        raise FileNotFoundError(f"no run directory at {path}: expected runs/<start>-<strategy> or runs/{LATEST}")
    if not any((path / name).exists() for name in (CONFIG, METRICS, SUMMARY)):
        raise FileNotFoundError(f"{path} is not a run directory: it has none of {CONFIG}, {METRICS}, {SUMMARY}")
    return path


def read_metrics(path: Path) -> list[RoundRecord]:
    """Read the rounds of a run in their order; [] where none has ended yet.

    An incomplete last line is ignored. Of a round that a resumed run repeated, the last line counts.

    Args:
        path: A run directory, or its `metrics.jsonl`.

    Raises ValueError, with file and line, where another line is not a round.
    """
    path = Path(path)
    if path.name != METRICS or path.is_dir():
        path = path / METRICS
    try:
        content = path.read_bytes()
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
    parsed = json.loads(line, parse_constant=lambda _: None)
    if not isinstance(parsed, dict) or type(parsed.get("round")) is not int:
        raise ValueError("not a round")
    return RoundRecord.from_line(parsed)


def read_config(run: Path) -> dict[str, Any]:
    """The run config from `config.toml`; {} if the file is missing."""
    try:
        return tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def read_label_counts(run: Path) -> dict[str, list[int]]:
    """The number of examples of each class, by client, as far as clients reported them."""
    if not (run / LABELS).is_file():
        return {}
    counts: dict[str, list[int]] = json.loads((run / LABELS).read_text(encoding="utf-8"))
    return counts


def read_json(path: Path) -> Any | None:
    """The content of an optional JSON file; None if it is missing or cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_summary(run: Path) -> dict[str, Any] | None:
    """The content of `summary.json`; None if it is missing, as in a run in progress or one that was killed."""
    try:
        return json.loads((run / SUMMARY).read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except FileNotFoundError:
        return None


def read_records(
    run: Path, most: int = 200, known: dict[Path, tuple[int, dict[str, np.ndarray]]] | None = None
) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Read the arrays that a method recorded of its rounds (`rounds/`), in their order: (round, arrays).

    A file that cannot be read is ignored: it is incomplete, or is being written.

    Args:
        run: The run directory.
        most: Of more rounds only every second, fourth, … and the last is read; they stay the same as a run goes on.
        known: file → (time of its last change, arrays) of an earlier call, which this one updates.
    """
    files = sorted((run / ROUNDS).glob("[0-9]*.npz"))
    apart = 1
    while (len(files) + apart - 1) // apart + 1 > max(most, 2) < len(files):
        apart *= 2
    files = [*files[:-1:apart], *files[-1:]]
    read: dict[Path, tuple[int, dict[str, np.ndarray]]] = {}
    for file in files:
        with suppress(OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
            changed = file.stat().st_mtime_ns
            if known and file in known and known[file][0] == changed:
                read[file] = known[file]
                continue
            with np.load(file) as arrays:
                read[file] = changed, dict(arrays)
    if known is not None:
        known.clear()
        known.update(read)
    return [(int(file.stem), arrays) for file, (_, arrays) in read.items()]
