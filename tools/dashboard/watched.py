"""Runs as the dashboard shows them: read from their files when these change, and sent in parts.

A part is one figure or one section of the page. Only the parts that depend on a changed file are made again, so that
the state of a client is sent at once, and the heat maps of a thousand rounds less often.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tepal.host.text import LONGEST_NAME, visible
from tepal.records.columns import UNKNOWN, bytes_text, score_text, seconds_text
from tepal.records.live import TOTALS, ClientNow, Now, read_clients, read_now, read_segments
from tepal.records.run_directory import (
    BLOCKS,
    CLIENTS,
    CONFIG,
    LABELS,
    METRICS,
    NOW,
    ROUNDS,
    SUMMARY,
    read_label_counts,
    read_records,
)
from tepal.report.clients import natural
from tepal.report.diagram import diagram_html, last_diagram
from tepal.report.headlines import headlines_html
from tepal.report.method_figures import label_figures, method_figures, travel_figures
from tepal.report.page import Figure, config_html, spoken
from tepal.report.round_figures import figures
from tepal.report.round_tables import rounds_html, trouble_html
from tepal.report.templates import render
from tepal.report.uncertainty_figures import uncertainty_figures
from tepal.tools.dashboard.pages import TEMPLATES
from tepal.tools.dashboard.views import RUNNING, UNREADABLE, ComparisonView, RunView, facts_of, views

_TIMES, _LONGEST = 5, 10.0  # what took t seconds to make is made again after 5 t, or 10 s
_MOST_ROWS = 200  # of the tables of rounds and of incidents, the last ones

_MOST_CLIENTS = 10_000  # of the table of clients

_SENT = ("bytes_down", "bytes_up", "seconds")
_COUNTS = ("rounds", "replied", "refused", "lost")


def _heading(heading: str, key: str) -> tuple[str, str]:
    kind = {bytes_text: "bytes", seconds_text: "seconds"}.get(TOTALS[key].text, "number")
    return heading, kind


CLIENT_COLUMNS = {
    "client": ("client", "text"),
    "state": ("state", "state"),
    **{key: _heading(TOTALS[key].title, key) for key in ("examples", "budget")},
    **{key: _heading(f"{TOTALS[key].heading}, this round", key) for key in _SENT},
    **{key: _heading(TOTALS[key].heading, key) for key in _COUNTS},
    **{f"total_{key}": _heading(f"{TOTALS[key].heading}, all rounds", key) for key in _SENT},
    "reason": (TOTALS["reason"].heading, "text"),
}
"""Columns of the part `clients`: heading, and how the page writes a value (`write` in dashboard.js)."""


@dataclass
class _Group:
    """Parts that depend on the same files."""

    files: tuple[str, ...]
    make: Callable[[RunView], Iterable[dict[str, Any]]]
    signature: object = None
    due: float = 0.0
    problem: str = ""


Sent = dict[str, int]
"""What was sent to one reader: part → its version."""


class WatchedRun:
    """The parts of a run directory; several readers share them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[int, str]] = {}
        self._known: dict[Path, Any] = {}
        self._groups = (
            _Group((CONFIG, METRICS, SUMMARY, NOW), self._state),
            _Group((CONFIG, METRICS, SUMMARY), self._numbers),
            _Group((NOW, CLIENTS), self._clients),
            _Group((NOW, BLOCKS), self._diagram),
            _Group((METRICS,), self._curves),
            _Group((ROUNDS, BLOCKS), self._records),
            _Group((LABELS,), lambda view: self._drawn("clients", label_figures(read_label_counts(view.path)))),
        )

    def changes(self, sent: Sent) -> list[str]:
        """The parts, each as JSON, of the first group that has new ones for a reader; [] if there are none."""
        with self._lock:
            for group in self._groups:
                self._refresh(group)
                new = [name for name, (version, _) in self._parts.items() if sent.get(name) != version]
                if new:
                    sent.update({name: self._parts[name][0] for name in new})
                    return [self._parts[name][1] for name in new]
        return []

    def _refresh(self, group: _Group) -> None:
        begun = time.monotonic()
        if begun < group.due:
            return
        view = RunView(self.path)
        signature = (view.running, *(_stamp(self.path / name) for name in group.files))
        if signature == group.signature:
            return
        problem = ""
        try:
            for part in group.make(view):
                self._keep(part)
        except Exception as error:  # of damaged files: the other parts are shown
            problem = render("notice.html", text=f"{type(error).__name__}: {error}")
        group.problem = problem
        said = {each.problem: None for each in self._groups if each.problem}
        self._keep(_html("problems", "".join(said)))
        group.signature = signature
        took = time.monotonic() - begun
        group.due = begun + took + min(_TIMES * took, _LONGEST)

    def _keep(self, part: dict[str, Any]) -> None:
        text = json.dumps(part, allow_nan=False)
        version, before = self._parts.get(part["id"], (0, ""))
        if text != before:
            self._parts[part["id"]] = version + 1, text

    # --- groups -----------------------------------------------------------------------------------------------------

    def _state(self, view: RunView) -> Iterator[dict[str, Any]]:
        facts, now = view.facts(), read_now(self.path)
        asked = facts["rounds_asked"]
        done, doing = facts["rounds"] or 0, ""
        if view.running and now and not now.ended:
            states = [client.state for client in now.clients.values()]
            phase = visible(now.phase, LONGEST_NAME)
            doing = f"round {now.round}, {phase}: {states.count('replied')} of {len(states)} clients answered"
        said = f"{done} of {UNKNOWN if asked is None else asked} rounds" + (f"; {doing}" if doing else "")
        yield _html("state", render("state.html.j2", TEMPLATES, facts=facts, done=done, said=said))
        score = "" if facts["score"] is None else f", {facts['measure']} {score_text(facts['score'])}"
        yield {"id": "said", "kind": "text", "text": f"Round {done} has ended{score}." if done else ""}
        title = f"{done}/{asked} · {facts['strategy']}" if view.running else f"{facts['strategy']} · {self.path.name}"
        yield {"id": "title", "kind": "title", "text": visible(title, LONGEST_NAME)}

    def _numbers(self, view: RunView) -> Iterator[dict[str, Any]]:
        ended = view.state != RUNNING
        yield _html("headlines", headlines_html(view.config, view.metrics, view.summary, ended=ended))
        yield _html("trouble", trouble_html(view.metrics, _MOST_ROWS))
        yield _html("rounds", rounds_html(view.metrics, _MOST_ROWS))
        yield _html("config", config_html(view.config))

    def _clients(self, view: RunView) -> Iterator[dict[str, Any]]:
        now, totals = read_now(self.path) or Now(), read_clients(self.path)
        rows = []
        for name in sorted({*now.clients, *totals}, key=natural)[:_MOST_CLIENTS]:
            one, whole = now.clients.get(name, ClientNow()), vars(totals[name]) if name in totals else {}
            examples = whole.get("examples") if one.examples is None else one.examples
            budget = whole.get("budget") if one.budget is None else one.budget
            sent = (one.bytes_down, one.bytes_up, one.seconds or None)
            counts = (whole.get(key) for key in (*_COUNTS, *_SENT))
            reason = visible(one.reason or whole.get("reason", ""))
            state = one.state and visible(one.state, LONGEST_NAME)
            rows.append([visible(name, LONGEST_NAME), state, examples, budget, *sent, *counts, reason])
        columns = list(CLIENT_COLUMNS.values())
        yield {"id": "clients", "kind": "clients", "round": now.round, "columns": columns, "rows": rows}

    def _diagram(self, view: RunView) -> Iterator[dict[str, Any]]:
        segments, now = read_segments(self.path), read_now(self.path) or Now()
        shares = now.travel
        if len(segments) > 1 and shares and all(len(each) == len(segments) for each in shares.values()) and any(
            any(each) for each in shares.values()
        ):
            caption = f"Round {now.round}{'' if now.ended else ', in progress'}: {now.phase}."
            yield _html("diagram", diagram_html(segments, shares, caption))
        elif "diagram" not in self._parts:  # until a round has transferred something, the last one is shown
            yield _html("diagram", last_diagram(read_records(self.path, most=2), segments))

    def _curves(self, view: RunView) -> Iterator[dict[str, Any]]:
        yield from self._drawn("figures", figures(view.metrics, view.summary))
        yield from self._drawn("uncertainty", uncertainty_figures(view.metrics))

    def _records(self, view: RunView) -> Iterator[dict[str, Any]]:
        records = read_records(self.path, known=self._known)
        yield from self._drawn("travel", travel_figures(records, read_segments(self.path)))
        yield from self._drawn("method", method_figures(records, view.metrics))

    def _drawn(self, section: str, drawn: Iterable[Figure]) -> Iterator[dict[str, Any]]:
        for place, figure in enumerate(drawn):
            yield {
                "id": f"figure-{figure.key}", "kind": "figure", "section": section, "place": place,
                "title": figure.title, "caption": figure.caption,
                "spoken": spoken(figure), "plot": figure.plot and json.loads(figure.plot.to_json()),
            }  # fmt: skip


class WatchedFolder:
    """The table of the runs in a folder; several readers share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._facts: dict[Path, tuple[object, Mapping[str, Any]]] = {}
        self._part = 0, ""
        self._due = 0.0

    def changes(self, sent: Sent) -> list[str]:
        """The table, as JSON, if the reader does not have it yet. Raises OSError if there is no such folder."""
        with self._lock:
            if time.monotonic() >= self._due:
                begun = time.monotonic()
                text = json.dumps(_html("runs", self._table()))
                if text != self._part[1]:
                    self._part = self._part[0] + 1, text
                self._due = begun + max(1.0, _TIMES * (time.monotonic() - begun))
            if sent.get("runs") == self._part[0]:
                return []
            sent["runs"] = self._part[0]
            return [self._part[1]]

    def html(self) -> str:
        """The table as it is now; if the folder cannot be read, the reason."""
        try:
            self.changes(Sent())
        except OSError as error:
            return render("notice.html", text=str(error))
        return str(json.loads(self._part[1])["html"])

    def _table(self) -> str:
        facts: dict[Path, tuple[object, Mapping[str, Any]]] = {}
        for view in views(self.folder):
            try:
                signature = _signature_of(view)
            except OSError:  # its facts have the reason
                signature = object()
            known = self._facts.get(view.path)
            facts[view.path] = known if known and known[0] == signature else (signature, facts_of(view))
        self._facts = facts
        runs = [each for _, each in facts.values()]
        return render(
            "table.html.j2", TEMPLATES, folder=self.folder, runs=runs, unreadable=UNREADABLE, bytes_text=bytes_text,
            score_text=score_text, link=_link,
        )  # fmt: skip


def _link(name: str) -> str:
    """The part of an address that names a run; "" for a name that an address cannot have."""
    try:
        return quote(name, safe="") if name.isprintable() and "\\" not in name else ""
    except UnicodeEncodeError:
        return ""


def _html(name: str, html: str) -> dict[str, Any]:
    return {"id": name, "kind": "html", "html": html}


def _signature_of(view: RunView | ComparisonView) -> object:
    """A value that changes whenever `facts` may change."""
    if isinstance(view, ComparisonView):
        inside = sorted(entry.name for entry in os.scandir(view.path) if entry.is_dir(follow_symlinks=False))
        return tuple((name, _stamp(view.path / name / SUMMARY)) for name in inside), time.monotonic() // 2
    return (view.running, *(_stamp(view.path / name) for name in (CONFIG, METRICS, SUMMARY)))


def _stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes with a file's content, or with the names in a folder."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
