"""Which runs a server resumes, and when: functions of plain values and of files."""

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
"""The run config key of apps whose runs can be resumed."""

_RUN_PAUSES = 0.0, 5.0, 30.0, 120.0  # seconds before a run is resumed, by the number of attempts; then the last


@dataclass(frozen=True)
class RunOnDisk:
    """The state of a run directory."""

    path: Path
    begun: float
    """The time of its start or last resumption, in seconds since 1970."""
    round: int | None
    """The round of the newest checkpoint."""
    ended: bool
    """Whether it has a summary and was not resumed since."""
    stopped_by: str | None = None
    """The reason of an early end."""
    in_use: bool = False
    """Whether a live process runs in it."""


@dataclass
class JournalEntry:
    """The journal's entry for a run directory, or for the run of --run-config."""

    outcome: str = ""
    """"" while the run may be resumed; else ended, stopped (by a person), failed, given up, left (for a newer)."""
    reason: str = ""
    attempts: int = 0
    """Number of resumptions since the last finished round."""
    round: int | None = None
    """The last finished round at the last attempt; of the run of --run-config, the last one that is known."""
    tried: float = 0.0
    """When the last attempt failed, until then when it was submitted, in seconds since 1970; 0: pause no more."""
    directory: str = ""
    """The run directory of the run of --run-config, as soon as it is known."""
    begun: float = 0.0
    """The time when the run of --run-config was submitted."""


@dataclass
class Due:
    """A run to submit: the resumption of a run directory or, if `directory` is None, the run of --run-config."""

    directory: Path | None
    when: float
    logged: bool = False
    """Whether the log has reported that the run is still in use."""

    def __str__(self) -> str:
        return str(self.directory) if self.directory else "the run of --run-config"


def read_run(path: Path) -> RunOnDisk | None:
    """Return the state of a run directory, None if it is not one.

    A resumed run writes its config again and keeps the earlier summary, so a summary may be older than the run.
    """
    from tepal.records.run_directory import CHECKPOINTS, CONFIG, SUMMARY, is_held

    try:
        begun, in_use = (path / CONFIG).stat().st_mtime, is_held(path)
    except OSError:
        return None
    numbers = (entry.name.removeprefix("round-") for entry in (path / CHECKPOINTS).glob("round-*"))
    newest = max((int(number) for number in numbers if number.isdigit()), default=None)
    ended, stopped_by = False, None
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # a damaged summary counts as none
        written = (path / SUMMARY).stat().st_mtime
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        resumed = newest is not None and newest < _rounds(path / CONFIG) and begun > written
        ended = (newest or 0) <= (summary.get("rounds") or 0) and not resumed
        stopped_by = summary.get("stopped_by") if ended else None
    return RunOnDisk(path, begun, newest, ended, stopped_by, in_use)


def _rounds(config: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(tomllib.loads(config.read_text(encoding="utf-8")).get("num-server-rounds", 0))
    return 0


def unfinished(runs: Iterable[RunOnDisk], entries: Mapping[str, JournalEntry]) -> list[RunOnDisk]:
    """Return the runs to resume, the newest first: those with a checkpoint and neither an end nor an outcome."""
    found = [
        run
        for run in runs
        if run.round is not None and not run.ended and not entries.get(str(run.path), JournalEntry()).outcome
    ]
    return sorted(found, key=lambda run: (run.begun, run.path.name), reverse=True)


def outcome_of(status: str, run: RunOnDisk | None, reason: str) -> str:
    """Return the outcome of a run: ended, stopped, failed, or again (resume it).

    Args:
        status: Flower's: completed, failed, stopped (by a person); or lost, when its process died.
        run: Its directory, if it has one.
        reason: The error that the app raised, from `explain`.
    """
    if run is not None and run.ended:
        return "failed" if run.stopped_by else "ended"
    if status == "completed":
        return "ended"
    if status == "stopped":
        return "stopped"
    if reason.startswith("ConfigError"):  # it would be raised again
        return "failed"
    return "again"


def pause(times: int, longest: float) -> float:
    """Return the seconds to wait after so many attempts: 0, 1, 2, 4, … up to `longest`."""
    return 0.0 if times < 1 else min(longest, 2.0 ** min(times - 1, 30))


def next_attempt(entry: JournalEntry, newest: int | None, limit: int, now: float) -> float | None:
    """Return when to resume a run whose last finished round is `newest`, in seconds since 1970; None: no more.

    The pause begins at `entry.tried`, or now if the clock was set back.
    A round that was finished since the last attempt resets the count of attempts in `entry`.
    """
    if newest is not None and (entry.round is None or newest > entry.round):
        entry.attempts, entry.round = 0, newest
    if entry.attempts >= limit:
        return None
    return max(now, min(entry.tried, now) + _RUN_PAUSES[min(entry.attempts, len(_RUN_PAUSES) - 1)])


def config_digest(run_config: Mapping[str, Value]) -> str:
    """Return the key of a run config in the journal."""
    return hashlib.sha256(json.dumps(dict(run_config), sort_keys=True).encode()).hexdigest()[:16]


def find_submitted(runs: Iterable[RunOnDisk], run_config: Mapping[str, Value], since: float) -> RunOnDisk | None:
    """Return the newest run directory that was begun with this run config after `since`.

    For a server that was killed between submitting a run and learning its directory.
    """
    from tepal.records.run_directory import read_config

    own = {key: value for key, value in run_config.items() if key not in ("runs", RESUMES)}
    for run in sorted(runs, key=lambda run: run.begun, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            if run.begun >= since and own.items() <= read_config(run.path).items():
                return run
    return None
