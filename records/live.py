"""What a run is doing now, in files of its directory that others look at while it goes on.

    blocks.json     the model's cells (`strategies/rounds/travel.py`): stage, kind, parameters' bytes
    now.json        the round that goes on, or the last one: each client's part in it, what has travelled
    clients.json    each client over the whole run: rounds, replies, refusals, losses, examples, bytes, seconds

All are written whole, and none is needed to resume a run: where one cannot be written, the run goes on without.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tepal.records.run_directory import BLOCKS, CLIENTS, NOW, as_json, read_json, write_whole
from tepal.strategies.rounds.report import RoundReport
from tepal.strategies.rounds.travel import Segment

log = logging.getLogger(__name__)

_OFTEN = 0.25  # seconds between two writings of a file that changes all the time, at least,
_SHARE = 20  # and so many times what writing it took: of very many clients it is large


class Live:
    """Tells of a run from its reports.

    Args:
        path: the run directory.
        rounds: how many are planned.
        clock: seconds.
    """

    def __init__(self, path: Path, rounds: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._rounds = rounds
        self._clock = clock
        self._due: dict[str, float] = {}
        self._said: set[str] = set()
        known = read_json(path / CLIENTS) or {}
        self._totals: dict[str, dict[str, Any]] = {name: dict(each) for name, each in known.items()}

    def model(self, cells: Sequence[Segment]) -> None:
        """Tell what the model is made of."""
        told = [{"stage": cell.stage, "kind": cell.kind, "bytes": cell.nbytes} for cell in cells]
        self._write(BLOCKS, lambda: told, whenever=True)

    def progress(self, report: RoundReport) -> None:
        """A round has come further; it is written now and then."""
        self._write(NOW, lambda: self._now(report, ended=False))

    def end_round(self, report: RoundReport) -> None:
        """A round has ended, or failed."""
        for name, client in report.clients.items():
            total = self._totals.setdefault(name, _nobody())
            total["rounds"] += 1
            for key, value in (("bytes_down", client.bytes_down), ("bytes_up", client.bytes_up)):
                total[key] += value
            total["seconds"] = round(total["seconds"] + client.seconds, 3)
            total["last_round"], total["state"] = report.round, client.state
            for key, latest in (("examples", client.examples), ("budget", client.budget)):
                total[key] = total[key] if latest is None else latest
        for name in report.replied:
            self._totals.setdefault(name, _nobody())["replied"] += 1
        for key, failed in (("refused", report.refused), ("lost", report.lost)):
            for name, reason in failed:
                total = self._totals.setdefault(name, _nobody())
                total[key] += 1
                total["reason"] = f"round {report.round}: {reason}"
        self._write(NOW, lambda: self._now(report, ended=True), whenever=True)
        self._write(CLIENTS, lambda: self._totals, whenever=report.round >= self._rounds)

    def close(self) -> None:
        """Write what was kept back."""
        if self._totals:
            self._write(CLIENTS, lambda: self._totals, whenever=True)

    def _now(self, report: RoundReport, *, ended: bool) -> Mapping[str, Any]:
        clients = {
            name: {key: value for key, value in asdict(client).items() if value is not None}
            for name, client in report.clients.items()
        }
        for name, reason in [*report.refused, *report.lost]:
            if name in clients:
                clients[name]["reason"] = reason
        travel = report.travel.shares(len(report.clients)) if report.travel else {}
        return {
            "round": report.round,
            "rounds": self._rounds,
            "phase": report.phase,
            "ended": ended,
            "clients": clients,
            **travel,
        }

    def _write(self, name: str, content: Callable[[], Any], *, whenever: bool = False) -> None:
        begun = self._clock()
        if not whenever and begun < self._due.get(name, 0.0):
            return
        try:
            write_whole(self._path / name, json.dumps(as_json(content()), allow_nan=False).encode() + b"\n")
            self._said.discard(name)
        except OSError as error:
            if name not in self._said:  # once, not four times a second
                self._said.add(name)
                log.error("%s. The run goes on without.", error)
        now = self._clock()
        self._due[name] = now + max(_OFTEN, _SHARE * (now - begun))


def _nobody() -> dict[str, Any]:
    return {
        "rounds": 0, "replied": 0, "refused": 0, "lost": 0, "examples": None, "budget": None, "bytes_down": 0,
        "bytes_up": 0, "seconds": 0.0, "last_round": 0, "state": "", "reason": "",
    }  # fmt: skip
