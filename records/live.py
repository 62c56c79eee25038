"""The state of a run in progress, in files of its directory.

    blocks.json     the model's segments (`strategies/rounds/travel.py`): stage, kind, parameters' bytes
    now.json        the current round, or the last one: the state of each client, and what was transferred
    clients.json    each client over the whole run: rounds, replies, refusals, losses, examples, bytes, seconds

Each is replaced as a whole. None is needed to resume a run: if one cannot be written, the run goes on without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tepal.host.text import visible
from tepal.records.columns import bytes_text, column, columns_of, from_values, is_number, seconds_text
from tepal.records.run_directory import BLOCKS, CLIENTS, MOST_SEGMENTS, NOW, json_line, read_json, write_whole

if TYPE_CHECKING:  # reading a run needs neither Flower nor torch
    from tepal.strategies.rounds.report import RoundReport
    from tepal.strategies.rounds.travel import Segment

log = logging.getLogger(__name__)

_INTERVAL = 0.25  # seconds between two writings of a file, at least,
_SHARE = 20  # and this many times the duration of the last writing, which is long if there are many clients


class StoredSegment(TypedDict):
    """A segment of the model in `blocks.json`; `bytes` are those of its parameters."""

    stage: str
    kind: str
    bytes: int


@dataclass
class ClientTotals:
    """A client over the whole run, in `clients.json`; its fields are the columns of the table of clients."""

    rounds: int = column("rounds", default=0)
    replied: int = column("replied", "rounds", default=0)
    refused: int = column("refused", "replies", default=0)
    lost: int = column("lost", "replies", default=0)
    examples: int | None = column("examples", text="{:,}".format)
    budget: float | None = column("budget", "layers", "{:g}".format)
    bytes_down: int = column("down", "bytes", bytes_text, default=0)
    bytes_up: int = column("up", "bytes", bytes_text, default=0)
    seconds: float = column("time", text=seconds_text, default=0.0)
    last_round: int = 0
    state: str = ""
    reason: str = column("last incident", left=True, default="")


TOTALS = columns_of(ClientTotals)
"""The columns of the table of clients."""


@dataclass
class ClientNow:
    """A client in the current round, in `now.json`; `reason`: why it was refused or lost."""

    state: str | None = None
    examples: int | None = None
    budget: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    seconds: float | None = None
    reason: str = ""


@dataclass
class Now:
    """The current round, or the last one, in `now.json`; `travel_…` as of `RoundReport.shares`, None if not known."""

    round: int | None = None
    phase: str = ""
    ended: bool = False
    clients: dict[str, ClientNow] = field(default_factory=dict)
    travel_down: Sequence[float] | None = None
    travel_up: Sequence[float] | None = None
    travel_trains: Sequence[float] | None = None

    @property
    def travel(self) -> dict[str, Sequence[float]]:
        """The shares that are known, by their names."""
        return {name: each for name, each in vars(self).items() if name.startswith("travel_") and each is not None}


def read_now(run: Path) -> Now | None:
    """Read `now.json`; None if it is missing or cannot be read. Raises ValueError if it is not a state of a round."""
    values = read_json(run / NOW)
    if not values:
        return None
    clients = {name: from_values(ClientNow, each) for name, each in _object(run / NOW, values, "clients").items()}
    return from_values(Now, {**values, "clients": clients})


def read_clients(run: Path) -> dict[str, ClientTotals]:
    """Read `clients.json`; {} if it is missing or cannot be read. Raises ValueError if it does not have clients."""
    values = _object(run / CLIENTS, {"clients": read_json(run / CLIENTS)}, "clients")
    return {name: from_values(ClientTotals, each) for name, each in values.items()}


def read_segments(run: Path) -> list[StoredSegment]:
    """Read `blocks.json`; [] if it is missing or cannot be read. Raises ValueError if it does not have segments."""
    segments = read_json(run / BLOCKS) or []
    if not isinstance(segments, list) or len(segments) > MOST_SEGMENTS or not all(map(_is_segment, segments)):
        raise ValueError(f"{run / BLOCKS} is damaged: it is not a list of at most {MOST_SEGMENTS:,} segments")
    return segments


def _is_segment(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("stage"), str)
        and isinstance(value.get("kind"), str)
        and is_number(value.get("bytes"))
    )


def _object(path: Path, values: Any, key: str) -> Mapping[str, Any]:
    """The object under a key of another; {} for none."""
    inner = values.get(key) if isinstance(values, dict) else values
    if inner is not None and not isinstance(inner, dict):
        raise ValueError(f"{path} is damaged: the clients are not an object")
    return inner or {}


def _earlier(run: Path) -> dict[str, ClientTotals]:
    """The totals of a run that is resumed; {} if they are damaged, which must not end the run."""
    try:
        return read_clients(run)
    except ValueError as error:
        log.error("%s. The run continues, and its clients are counted from this round on.", error)
        return {}


class Live:
    """Writes the state of a run from the reports of its rounds.

    Args:
        path: The run directory.
        rounds: The number of planned rounds.
        clock: Returns seconds.
        timer: Makes a timer that calls a function after so many seconds, in a thread.
    """

    def __init__(
        self,
        path: Path,
        rounds: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        self._path = path
        self._rounds = rounds
        self._clock = clock
        self._timer = timer
        self._due: dict[str, float] = {}
        self._failed: set[str] = set()
        self._totals = defaultdict(ClientTotals, _earlier(path))
        self._lock = threading.Lock()  # held to write, and to change the following
        self._unwritten: RoundReport | None = None  # has changed since `now.json` was written
        self._later: threading.Timer | None = None  # writes it

    def model(self, segments: Sequence[Segment]) -> None:
        """Write the segments of the model."""
        stored = [{"stage": each.stage, "kind": each.kind, "bytes": each.nbytes} for each in segments]
        with self._lock:
            self._write(BLOCKS, lambda: stored, at_once=True)

    def progress(self, report: RoundReport) -> None:
        """Write the state of a round; if it was written just before, after a pause, as it is then.

        Nothing else may happen for as long as a client trains, so that no later call would write it.
        """
        with self._lock:
            self._unwritten = report
            pause = self._due.get(NOW, 0.0) - self._clock()
            if pause <= 0:
                self._write_now(report, ended=False)
            elif self._later is None:
                self._later = self._timer(pause, self._write_unwritten)
                self._later.daemon = True
                try:
                    self._later.start()
                except RuntimeError:  # there can be no more threads; the next call writes, or tries it again
                    self._later = None

    def end_round(self, report: RoundReport) -> None:
        """Write the state of a round that has ended or failed, and add it to the clients' totals."""
        for name, client in report.clients.items():
            total = self._totals[name]
            total.rounds += 1
            total.bytes_down += client.bytes_down
            total.bytes_up += client.bytes_up
            total.seconds = round(total.seconds + client.seconds, 3)
            total.last_round, total.state = report.round, client.state
            total.examples = total.examples if client.examples is None else client.examples
            total.budget = total.budget if client.budget is None else client.budget
        for name in report.replied:
            self._totals[name].replied += 1
        for name, _ in report.refused:
            self._totals[name].refused += 1
        for name, _ in report.lost:
            self._totals[name].lost += 1
        for name, reason in (*report.refused, *report.lost):
            self._totals[name].reason = visible(f"round {report.round}: {reason}")
        with self._lock:
            self._write_now(report, ended=True)
            self._write(CLIENTS, self._clients, at_once=report.round >= self._rounds)

    def close(self) -> None:
        """Write the clients' totals, which may not have been written since the last round, and nothing later."""
        with self._lock:
            self._leave_nothing()
            if self._totals:
                self._write(CLIENTS, self._clients, at_once=True)

    def _clients(self) -> Mapping[str, Any]:
        return {name: vars(total) for name, total in self._totals.items()}

    def _now(self, report: RoundReport, *, ended: bool) -> Mapping[str, Any]:
        # In a timer's thread the report may change meanwhile: its dict and lists are copied before they are read. What
        # is half changed is written again: `progress` is called after every event.
        clients = {
            name: {key: value for key, value in vars(client).items() if value is not None}
            for name, client in report.clients.copy().items()
        }
        for name, reason in [*report.refused, *report.lost]:
            if name in clients:
                clients[name]["reason"] = visible(reason)
        return {
            "round": report.round,
            "rounds": self._rounds,
            "phase": report.phase,
            "ended": ended,
            "clients": clients,
            **report.shares(),
        }

    def _write_unwritten(self) -> None:
        """Write what `progress` left, in a timer's thread; nothing if it was written since, or the round has ended."""
        with self._lock:
            if self._unwritten is not None:
                self._write_now(self._unwritten, ended=False)

    def _write_now(self, report: RoundReport, *, ended: bool) -> None:
        self._leave_nothing()
        self._write(NOW, lambda: self._now(report, ended=ended), at_once=True)

    def _leave_nothing(self) -> None:
        """Leave nothing to be written by a timer."""
        self._unwritten = None
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _write(self, name: str, content: Callable[[], Any], *, at_once: bool = False) -> None:
        begun = self._clock()
        if not at_once and begun < self._due.get(name, 0.0):
            return
        try:
            write_whole(self._path / name, json_line(content()))
            self._failed.discard(name)
        except OSError as error:
            if name not in self._failed:  # logged once, not four times a second
                self._failed.add(name)
                log.error("%s. The run continues without this file.", error)
        now = self._clock()
        self._due[name] = now + max(_INTERVAL, _SHARE * (now - begun))
