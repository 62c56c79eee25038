"""`RunDirectory`: a new run's directory or a resumed run's, to which rounds, models and the summary are written."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tepal import __version__
from tepal.host.files import remove_abandoned, replacing
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory.files import (
    as_json,
    explained,
    json_line,
    make_first_free,
    point_latest_at,
    write_whole,
)
from tepal.records.run_directory.holding import held
from tepal.records.run_directory.metrics import summarise
from tepal.records.run_directory.names import CONFIG, LABELS, METRICS, MODEL, ROUNDS, SUMMARY
from tepal.records.run_directory.reading import find_run, parse_line, read_config, read_label_counts, read_metrics

log = logging.getLogger(__name__)


class RunDirectory:
    """The directory of one run. `create` makes a new one, `resume` opens that of a run to be resumed."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = dict(config)
        self._unwritten: list[RoundRecord] = []
        self._label_counts: dict[str, list[int]] | None = None  # None: not read yet
        self._resumed = False  # and no round was written since

    @classmethod
    def create(
        cls, base: Path, strategy: str, config: Mapping[str, Any], *, started: datetime | None = None
    ) -> RunDirectory:
        """Make `base/<start>-<strategy>`, write `config.toml` into it and point `base/latest` at it.

        `started` (default: now) is written in UTC. If the name is taken, -2, -3, … is added, so that two servers that
        start in the same second never share a directory. Raises OSError, naming the folder, if it cannot be written.
        """
        base = Path(base)
        start = (started or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%d-%H%M%S")
        name = f"{start}-{re.sub(r'[^A-Za-z0-9_-]+', '-', strategy).strip('-') or 'run'}"
        with explained("create a run directory in", base):
            base.mkdir(parents=True, exist_ok=True)
            path = make_first_free(base, name)
        run = cls(path, config)
        run.write_config(config)
        point_latest_at(path)
        return run

    @classmethod
    def resume(cls, path: Path) -> RunDirectory:
        """Open the run directory in `path` (or the `latest` link), to resume the run."""
        path = find_run(path)
        run = cls(path, read_config(path))
        run._resumed = True
        return run

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lock the directory against other processes, until the block or this process ends.

        An incomplete last line of the metrics is removed. Raises RunInUse if another process has the lock.
        """
        with held(self.path):
            remove_abandoned(self.path)
            metrics = self.path / METRICS
            with explained("write", metrics):
                if metrics.exists():
                    _mend_last_line(metrics)
            yield

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write `config.toml`, for a new run or for one that is resumed with other settings."""
        self.config = dict(config)
        write_whole(self.path / CONFIG, tomli_w.dumps(_toml_table(config)).encode())

    def add(self, line: RoundRecord) -> None:
        """Call `append`; a line that cannot be written is logged and written with a later one, and the run goes on."""
        self._unwritten.append(line)
        try:
            self._write_kept_back()
        except OSError as error:
            log.error("%s. The run continues, and round %s is written later.", error, line.round)

    def _write_kept_back(self) -> None:
        while self._unwritten:
            self.append(self._unwritten[0])
            del self._unwritten[0]

    def append(self, record: RoundRecord) -> None:
        """Add one round to `metrics.jsonl` and wait until it is on disk.

        What JSON cannot represent (NaN, infinity) becomes null: a diverged loss must not end the run. The first round
        of a resumed run replaces those from it on: after an older checkpoint they are of a model that is gone.
        """
        line = json_line(record.to_line())
        path = self.path / METRICS
        if self._resumed:
            _drop_rounds(self.path, record.round)
            self._resumed = False
        with explained("write", path), path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if (written := file.write(line)) != len(line):
                    file.write(line[written:])
                os.fsync(file.fileno())
            except OSError:
                # The next line would otherwise be appended to half a line.
                with suppress(OSError):
                    file.truncate(before)
                raise

    def add_label_counts(self, counts: Mapping[str, Sequence[float]]) -> None:
        """Add clients' numbers of examples of each class to `labels.json`. Counts that cannot be true are left out.

        Raises OSError if it cannot be written, and ValueError if it is damaged, naming the file.
        """
        from tepal.exchange.bounds import is_count  # a reader of runs needs no exchange

        true = {name: [int(n) for n in each] for name, each in counts.items() if all(map(is_count, each))}
        if true:
            if self._label_counts is None:
                self._label_counts = read_label_counts(self.path, most=None)
            self._label_counts.update(true)
            write_whole(self.path / LABELS, (json.dumps(self._label_counts, sort_keys=True) + "\n").encode())

    def write_record(self, round: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the arrays that a method records of a round, `rounds/<round>.npz`. Raises OSError naming the file."""
        content = io.BytesIO()
        np.savez_compressed(content, **dict(arrays))  # type: ignore[arg-type]
        path = self.path / ROUNDS / f"{round:06d}.npz"
        with explained("write", path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, content.getvalue())

    def write_model(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Path:
        """Write `model.safetensors`, with run, strategy, model, config and `metadata` in its header."""
        # safetensors ignores an array's strides, so a transposed view would be stored wrong. (np.ascontiguousarray
        # would turn BatchNorm's scalar counters into vectors.)
        contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        header: dict[str, str] = {
            "format": "pt",
            "tepal": __version__,
            "run": self.path.name,
            **{key: str(self.config[key]) for key in ("strategy", "model", "dataset") if key in self.config},
            "config": json.dumps(as_json(self.config), allow_nan=False),
            **(metadata or {}),
        }
        path = self.path / MODEL
        with explained("write", path), replacing(path) as partial:
            try:
                save_file(contiguous, partial, metadata=header)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            # safetensors makes files that only their owner may read; the other files here follow the umask.
            partial.chmod(stat.S_IMODE((self.path / CONFIG).stat().st_mode))
        return path

    def write_summary(self, **values: Any) -> dict[str, Any]:
        """Write `summary.json` and return it; `values` replace or complete the figures of `summarise`.

        Raises OSError if it cannot be written, or if a line that could not be written before still cannot.
        """
        self._write_kept_back()
        summary = as_json(summarise(read_metrics(self.path, most=None), self.config) | values)
        write_whole(self.path / SUMMARY, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
        return summary


def _toml_table(config: Mapping[str, Any]) -> dict[str, Any]:
    # TOML has no null, so keys without a value are left out; its floats may be NaN or infinite.
    plain = {}
    for key, value in config.items():
        if isinstance(value, np.generic):
            value = value.item()
        if value is not None:
            plain[str(key)] = value if isinstance(value, float) else as_json(value)
    return plain


def _drop_rounds(run: Path, first: int) -> None:
    """Remove the lines of the rounds from `first` on, and the arrays of the rounds after it, which has written its own.

    Raises OSError naming the file.
    """
    path = run / METRICS
    with explained("read", path):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if not line.strip() or parse_line(line).round < first]
    if len(kept) < len(lines):
        write_whole(path, b"".join(kept))
    for file in (run / ROUNDS).glob("*.npz"):
        if file.stem.isdecimal() and int(file.stem) > first:
            with suppress(OSError):
                file.unlink()


def _mend_last_line(metrics: Path) -> None:
    content = metrics.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    with metrics.open("r+b") as file:
        try:
            parse_line(content[end:])
        except ValueError:
            file.truncate(end)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
