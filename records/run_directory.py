"""The directory that a run leaves behind: `runs/<start>-<strategy>/`.

    config.toml         the whole validated run config, flat kebab-case keys
    metrics.jsonl       one JSON line a round, on disk before the next round starts
    rounds/             what a method tells of a round beside its metrics, as arrays: `np.load("rounds/000001.npz")`
    model.safetensors   the final model under its raw state_dict names; an ensemble's begin with `mode/<k>/`
    summary.json        the figures of the whole run
    report.html         written by `tepal.report.run_page`
    blocks.json, now.json, clients.json
                        the model's parts, the round that goes on, the clients so far (`tepal.records.live`)
    checkpoint/         what it takes to resume the run (`tepal.strategies.rounds.checkpoint`)
    ../latest           a link to the newest run

Files that are written whole appear whole: they are written beside and renamed. Only `metrics.jsonl` grows in place; a
server that is killed leaves at most one torn last line there, which `read_metrics` passes over and
`RunDirectory.in_use` cuts off.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import re
import shutil
import stat
import time
import tomllib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tomli_w
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tepal import __version__

log = logging.getLogger(__name__)

CONFIG, METRICS, MODEL, SUMMARY, REPORT, LATEST = (
    "config.toml",
    "metrics.jsonl",
    "model.safetensors",
    "summary.json",
    "report.html",
    "latest",
)

CHECKPOINTS = "checkpoint"
ROUNDS = "rounds"
LABELS, BLOCKS, NOW, CLIENTS = "labels.json", "blocks.json", "now.json", "clients.json"

_A_LOOK = 0.2  # seconds in which `is_held` lets a folder go

KEPT_IN = "This run is kept in "
"""How a run's log says where its directory is; what follows a run from outside looks for it."""

METRICS_KEYS = (
    "round",
    "phase",
    "clients_asked",
    "clients_replied",
    "refused",
    "lost",
    "late",
    "left_out",
    "notes",
    "accuracy",
    "loss",
    "macro_f1",
    "perplexity",
    "rmse",
    "accuracy_of",
    "clients_accuracy",
    "clients_rmse",
    "clients_spread",
    "received_accuracy",
    "received_loss",
    "received_rmse",
    "trained_accuracy",
    "train_loss",
    "learning_rate",
    "bytes_down",
    "bytes_up",
    "bytes_overhead",
    "bytes_fedavg",
    "bytes_fedavg_down",
    "resent",
    "seconds",
    "seconds_train",
    "step_seconds",
)

SUMMARY_KEYS = (
    "strategy",
    "model",
    "parameters",
    "rounds",
    "accuracy",
    "loss",
    "bytes_up",
    "bytes_down",
    "bytes_vs_fedavg",
    "seconds",
    "refused_replies",
    "stopped_by",
    "step_seconds",
    "rmse",
)


@dataclass(frozen=True)
class Measure:
    """What results are measured by: its key in `metrics.jsonl`, and its name in a sentence.

    share: of 0 … 1, the more the better; else an error, the less the better.
    """

    key: str
    name: str
    share: bool

    @property
    def title(self) -> str:
        return self.name[0].upper() + self.name[1:]

    def text(self, digits: int = 4) -> str:
        """How plotly writes a value."""
        return f".{digits - 2}%" if self.share else f".{digits}f"

    def good(self, score: float, target: float) -> bool:
        """Whether a score is as good as the target."""
        return score >= target if self.share else score <= target


ACCURACY, RMSE = Measure("accuracy", "accuracy", True), Measure("rmse", "RMSE", False)


def measured_by(metrics: Sequence[Mapping[str, Any]]) -> Measure:
    """The measure of a run: of a regression, which has no accuracy, the root mean squared error."""
    return RMSE if any(line.get("rmse") is not None for line in metrics) else ACCURACY


class RunInUse(RuntimeError):
    """Another process runs in this run directory."""


class RunDirectory:
    """One run's directory. `create` starts a new one, `resume` goes on with one that was begun."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = dict(config)
        self._unwritten: list[Mapping[str, Any]] = []

    @classmethod
    def create(
        cls, base: Path, strategy: str, config: Mapping[str, Any], *, started: datetime | None = None
    ) -> RunDirectory:
        """Make `base/<start>-<strategy>`, write `config.toml` into it and point `base/latest` at it.

        `started` (default: now) is shown in UTC. A name that is taken gets -2, -3, …; two servers that start in the
        same second never share a directory. Raises OSError, naming the folder, where it cannot be made or written.
        """
        base = Path(base)
        start = (started or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%d-%H%M%S")
        name = f"{start}-{re.sub(r'[^A-Za-z0-9_-]+', '-', strategy).strip('-') or 'run'}"
        with _explained("create a run directory in", base):
            base.mkdir(parents=True, exist_ok=True)
            path = make_first_free(base, name)
        run = cls(path, config)
        run.write_config(config)
        point_latest_at(path)
        return run

    @classmethod
    def resume(cls, path: Path) -> RunDirectory:
        """The run in `path` (or the `latest` link), to go on with it."""
        path = find_run(path)
        point_latest_at(path)
        return cls(path, read_config(path))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other processes from running in this directory; the lock ends with the block, or with this process.

        A torn last line of the metrics is removed. Raises RunInUse where another process has the lock.
        """
        with held(self.path):
            metrics = self.path / METRICS
            with _explained("write", metrics):
                if metrics.exists():
                    _mend_last_line(metrics)
            yield

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write `config.toml`, of a run that begins or goes on with other settings."""
        self.config = dict(config)
        write_whole(self.path / CONFIG, tomli_w.dumps(_toml_table(config)).encode())

    def add(self, round_line: Mapping[str, Any]) -> None:
        """`append`, for a run that must go on: a line that cannot be written is said, and written with a later one."""
        self._unwritten.append(round_line)
        try:
            self._write_kept_back()
        except OSError as error:
            log.error("%s. The run goes on, and writes round %s later.", error, round_line.get("round"))

    def _write_kept_back(self) -> None:
        while self._unwritten:
            self.append(self._unwritten[0])
            del self._unwritten[0]

    def append(self, round_line: Mapping[str, Any]) -> None:
        """Add one round to `metrics.jsonl` and wait until it is on disk.

        Known keys come first and in their order, a missing one as null, further keys behind them. What JSON cannot
        say (NaN, infinity) becomes null: a diverged loss must be readable afterwards, not end the run.
        """
        ordered = {key: round_line.get(key) for key in METRICS_KEYS} | dict(round_line)
        line = json.dumps(as_json(ordered), allow_nan=False).encode() + b"\n"
        path = self.path / METRICS
        with _explained("write", path), path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if (written := file.write(line)) != len(line):
                    file.write(line[written:])
                os.fsync(file.fileno())
            except OSError:
                # Half a line would swallow the next one.
                with suppress(OSError):
                    file.truncate(before)
                raise

    def add_label_counts(self, counts: Mapping[str, Sequence[float]]) -> None:
        """Enter how many examples of each class clients have, in `labels.json`. Raises OSError naming the file."""
        if counts:
            known = read_label_counts(self.path) | {client: [int(n) for n in each] for client, each in counts.items()}
            write_whole(self.path / LABELS, (json.dumps(known, sort_keys=True) + "\n").encode())

    def write_record(self, round: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write what a method tells of a round, `rounds/<round>.npz`. Raises OSError naming the file."""
        content = io.BytesIO()
        np.savez_compressed(content, **dict(arrays))  # type: ignore[arg-type]
        path = self.path / ROUNDS / f"{round:06d}.npz"
        with _explained("write", path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, content.getvalue())

    def write_model(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Path:
        """Write `model.safetensors`; its header tells run, strategy, model and config, and `metadata` beside them."""
        # safetensors writes the buffer behind an array whatever its strides, so a transposed view would be stored
        # wrong. (np.ascontiguousarray would turn BatchNorm's scalar counters into vectors.)
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
        part = _beside(path)
        with _explained("write", path):
            try:
                save_file(contiguous, part, metadata=header)
                # safetensors makes files that only their owner may read; the other files here follow the umask.
                part.chmod(stat.S_IMODE((self.path / CONFIG).stat().st_mode))
                os.replace(part, path)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            finally:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
        return path

    def write_summary(self, **values: Any) -> dict[str, Any]:
        """Write `summary.json` and return it. Keys that `values` leaves out follow from metrics and config.

        Raises OSError where it cannot be written, or a round that was kept back still cannot.
        """
        self._write_kept_back()
        known = summarise(read_metrics(self.path), self.config)
        summary = as_json({key: values.get(key, known[key]) for key in SUMMARY_KEYS} | values)
        write_whole(self.path / SUMMARY, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
        return summary


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder from other processes that hold it, too, until the block or this process ends. Raises RunInUse."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        give_up = time.monotonic() + _A_LOOK
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise RunInUse(f"{folder} belongs to a run that has not ended; stop that one first") from error
                time.sleep(_A_LOOK / 10)  # `is_held` has it for an instant
        yield
    finally:
        os.close(handle)


def read_records(
    run: Path, most: int = 200, known: dict[Path, tuple[int, dict[str, np.ndarray]]] | None = None
) -> list[tuple[int, dict[str, np.ndarray]]]:
    """What was told of rounds (`rounds/`), in their order: (round, arrays).

    A file that cannot be read is passed over: it is torn, or being written.

    Args:
        run: its directory.
        most: of more rounds, every second, fourth, … is read, with the last: while a run goes on mostly the same ones.
        known: file → (time of its last change, arrays), as it was read before; it is brought up to date.
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


def is_held(folder: Path) -> bool:
    """Whether a process that has not ended holds a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Shared: those who look do not take each other for a run.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run (its directory, or its `metrics.jsonl`) in their order; [] where none has ended yet.

    A torn last line is passed over. A round that stands there twice, because a resumed run repeated it, counts as it
    went the last time. Raises ValueError, with file and line, where another line is not a round.
    """
    path = Path(path)
    if path.name != METRICS or path.is_dir():
        path = path / METRICS
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = content.split(b"\n")
    rounds: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                parsed = parse_line(line)
                rounds[parsed["round"]] = parsed
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number}: {error}. Each line must be a JSON object with a whole number as its "
                    '"round"; remove the line, or take the file from a copy'
                ) from error
    return scored([rounds[number] for number in sorted(rounds)])


def scored(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fill in scores that the clients gave a round later: what they *received* is the model after the round before."""
    for line, following in pairwise(metrics):
        if line.get("accuracy") is None and line.get("loss") is None and following["round"] == line["round"] + 1:
            scores = {key: following.get(f"received_{key}") for key in ("accuracy", "loss", "rmse")}
            if any(score is not None for score in scores.values()):
                line |= scores | {"accuracy_of": "clients"}
    return metrics


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of `metrics.jsonl`. Raises ValueError where it is not an object with a round."""
    parsed = json.loads(line, parse_constant=lambda _: None)
    if not isinstance(parsed, dict) or type(parsed.get("round")) is not int:
        raise ValueError("not a round")
    return parsed


def read_config(run: Path) -> dict[str, Any]:
    """The run config from `config.toml`; {} where there is none."""
    try:
        return tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def read_label_counts(run: Path) -> dict[str, list[int]]:
    """How many examples of each class a run's clients have, as far as they tell it."""
    if not (run / LABELS).is_file():
        return {}
    counts: dict[str, list[int]] = json.loads((run / LABELS).read_text(encoding="utf-8"))
    return counts


def read_json(path: Path) -> Any | None:
    """A file that is written whole and that nothing depends on; None where there is none, or it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_summary(run: Path) -> dict[str, Any] | None:
    """`summary.json`, or None for a run that goes on, or that was stopped before its end."""
    try:
        return json.loads((run / SUMMARY).read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except FileNotFoundError:
        return None


def summarise(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `summary.json`, as far as metrics and config tell them (`parameters` they do not).

    Accuracy and loss are the last ones measured, `step_seconds` is the median of the rounds that tell it. A sum over
    rounds of which one is unknown is unknown (None), not smaller.
    """
    down, up, fedavg = (total(metrics, key) for key in ("bytes_down", "bytes_up", "bytes_fedavg"))
    steps = [line["step_seconds"] for line in metrics if line.get("step_seconds") is not None]
    return {
        "strategy": config.get("strategy"),
        "model": config.get("model"),
        "parameters": None,
        "rounds": max((line["round"] for line in metrics if line.get("clients_replied") != 0), default=0),
        "accuracy": _last_known(metrics, "accuracy"),
        "loss": _last_known(metrics, "loss"),
        "rmse": _last_known(metrics, "rmse"),
        "bytes_up": up,
        "bytes_down": down,
        "bytes_vs_fedavg": (down + up) / fedavg if fedavg and down is not None and up is not None else None,
        "seconds": total(metrics, "seconds"),
        "step_seconds": median(steps) if steps else None,
        "refused_replies": sum(len(line.get("refused") or ()) for line in metrics),
        "stopped_by": None,
    }


def total(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Sum of one key over the rounds, None if a round lacks it; the initial model's score (round 0) may."""
    return add(*(line.get(key) for line in metrics if line["round"] > 0 or line.get(key) is not None))


def add(*values: float | None) -> float | None:
    """Their sum, None if one of them is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def find_run(path: Path) -> Path:
    """The run directory that `path` means: itself, the latest one in a folder of runs, or what `latest` names."""
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


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part. Raises OSError naming the file."""
    part = _beside(path)
    with _explained("write", path):
        try:
            part.write_bytes(content)
            os.replace(part, path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def as_json(value: Any) -> Any:
    """`value` in JSON's own types: numpy values unpacked, NaN and infinity as None, what is unknown as text."""
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


def _toml_table(config: Mapping[str, Any]) -> dict[str, Any]:
    # TOML has no null: a key that is not set is not there. Its floats may be NaN or infinite, so those stay.
    plain = {}
    for key, value in config.items():
        if isinstance(value, np.generic):
            value = value.item()
        if value is not None:
            plain[str(key)] = value if isinstance(value, float) else as_json(value)
    return plain


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
    """Let `latest` in a folder (by default the one that the run lies in) be this run."""
    # A convenience, so whatever goes wrong with it (no right to make links, a folder of that name) is no reason to
    # stop a run.
    folder = folder or run.parent
    target = os.path.relpath(run, folder)
    latest, part = folder / LATEST, folder / f".{LATEST}-{os.getpid()}"
    try:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        try:
            part.symlink_to(target, target_is_directory=True)
        except (OSError, NotImplementedError):
            part.write_text(target + "\n", encoding="utf-8")
        os.replace(part, latest)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        log.warning("%s does not point at the newest run %s: %s", latest, run.name, error)


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


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _last_known(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((line[key] for line in reversed(metrics) if line.get(key) is not None), None)


@contextmanager
def _explained(what: str, path: Path) -> Iterator[None]:
    """Turn the system's error into one that says what could not be done, where, and what helps."""
    try:
        yield
    except OSError as error:
        message = f"cannot {what} {path}: {error.strerror or error}"
        # safetensors gives no number, so there the free space is said in any case.
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                folder = next(folder for folder in path.absolute().parents if folder.is_dir())
                message += f"; {folder} has {shutil.disk_usage(folder).free / 1e6:,.0f} MB free: make room there"
        else:
            message += "; choose a folder that this user may write to"
        raise (OSError(error.errno, message) if error.errno else OSError(message)) from error
