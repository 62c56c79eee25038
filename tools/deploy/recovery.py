"""Which runs of a server can and shall go on, and when: functions of plain values, and of what is on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:

    from tepal.host.toml import Value

RESUMES = "resume"
"""The run config key by which an app says that its runs can go on."""

_LONGEST_RUN_PAUSE = 120.0  # seconds before a run is let go on again


@dataclass(frozen=True)
class RunOnDisk:
    """A run directory as it is now."""

    path: Path
    begun: float
    """When it was started, or resumed the last time: seconds since 1970."""
    round: int | None
    """Of the newest checkpoint."""
    ended: bool
    """It has a summary, and was not resumed since."""
    stopped_by: str | None = None
    """Why it ended early."""
    in_use: bool = False
    """A living process runs in it."""


@dataclass
class Record:
    """What is remembered of a run directory, or of the run that --run-config asks for."""

    outcome: str = ""
    """"" while it may go on; else ended, stopped (by a person), failed, given up, or left (for a newer one)."""
    reason: str = ""
    attempts: int = 0
    """To let it go on, since the last finished round."""
    round: int | None = None
    """The last finished round at the last attempt."""
    tried: float = 0.0
    """When, in seconds since 1970."""
    directory: str = ""
    """Where the run of --run-config is, as soon as that is known."""
    begun: float = 0.0
    """When the run of --run-config was submitted."""


@dataclass
class Due:
    """A run to be submitted: one to go on with, or (`directory` is None) the one that --run-config asks for."""

    directory: Path | None
    when: float
    said: bool = False

    def __str__(self) -> str:
        return str(self.directory) if self.directory else "the run of --run-config"


def look_at(path: Path) -> RunOnDisk | None:
    """Look at a run directory; None where there is none.

    A resumed run writes its config anew and keeps the summary of before, so a summary may be older than the run.
    """
    from tepal.records.run_directory import CHECKPOINTS, CONFIG, SUMMARY, is_held

    try:
        begun, in_use = (path / CONFIG).stat().st_mtime, is_held(path)
    except OSError:
        return None
    numbers = (entry.name.removeprefix("round-") for entry in (path / CHECKPOINTS).glob("round-*"))
    newest = max((int(number) for number in numbers if number.isdigit()), default=None)
    ended, stopped_by = False, None
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # a damaged one is none
        written = (path / SUMMARY).stat().st_mtime
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        goes_on = newest is not None and newest < _rounds(path / CONFIG)
        ended = (newest or 0) <= (summary.get("rounds") or 0) and not (begun > written and goes_on)
        stopped_by = summary.get("stopped_by") if ended else None
    return RunOnDisk(path, begun, newest, ended, stopped_by, in_use)


def _rounds(config: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(tomllib.loads(config.read_text(encoding="utf-8")).get("num-server-rounds", 0))
    return 0


def unfinished(runs: Iterable[RunOnDisk], records: Mapping[str, Record]) -> list[RunOnDisk]:
    """The runs that can and shall go on, the last begun first: a checkpoint, no end, and nothing said against it."""
    found = [
        run
        for run in runs
        if run.round is not None and not run.ended and not records.get(str(run.path), Record()).outcome
    ]
    return sorted(found, key=lambda run: (run.begun, run.path.name), reverse=True)


def judge(status: str, run: RunOnDisk | None, reason: str) -> str:
    """What became of a run: ended, stopped, failed, or again (it is to go on).

    Args:
        status: Flower's word: completed, failed, stopped (only a person does that); or lost, when its process died.
        run: Its directory, if it has one.
        reason: The error that the app raised, as `explain` tells it.
    """
    if run is not None and run.ended:
        return "failed" if run.stopped_by else "ended"
    if status == "completed":
        return "ended"
    if status == "stopped":
        return "stopped"
    if reason.startswith("ConfigError"):  # it would be the same again
        return "failed"
    return "again"


def pause(times: int, longest: float) -> float:
    """Seconds to wait after so many attempts: 0, 1, 2, 4, … up to `longest`."""
    return 0.0 if times < 1 else min(longest, 2.0 ** min(times - 1, 30))


def next_attempt(record: Record, newest: int | None, limit: int, now: float) -> float | None:
    """When to let a run go on whose last finished round is `newest`, in seconds since 1970; None: no more.

    A round that was finished since the last attempt begins the count anew, in `record` too.
    """
    if newest is not None and (record.round is None or newest > record.round):
        record.attempts, record.round = 0, newest
    if record.attempts >= limit:
        return None
    # The clock may have been set back.
    return min(record.tried, now) + pause(record.attempts, _LONGEST_RUN_PAUSE)


def config_digest(run_config: Mapping[str, Value]) -> str:
    """What a run config is remembered by."""
    return hashlib.sha256(json.dumps(dict(run_config), sort_keys=True).encode()).hexdigest()[:16]


def find_submitted(runs: Iterable[RunOnDisk], run_config: Mapping[str, Value], since: float) -> RunOnDisk | None:
    """The newest run directory that was begun with this run config after `since`.

    For a server that was killed between submitting a run and hearing where it is.
    """
    from tepal.records.run_directory import read_config

    own = {key: value for key, value in run_config.items() if key not in ("runs", RESUMES)}
    for run in sorted(runs, key=lambda run: run.begun, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            if run.begun >= since and own.items() <= read_config(run.path).items():
                return run
    return None
