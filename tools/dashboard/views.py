"""Runs and comparisons in a folder, with their state and facts: for the dashboard, `tepal runs` and `tepal show`.

To list a run that has ended, only its `config.toml` and `summary.json` are read, so that hundreds of runs are listed
quickly. `metrics.jsonl` is read if there is no summary yet, and to show a run.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    ACCURACY,
    CONFIG,
    LATEST,
    METRICS,
    RMSE,
    SUMMARY,
    add,
    as_json,
    ending,
    find_run,
    is_held,
    summarise,
)
from tepal.report.clients import natural
from tepal.report.run_files import RunFiles
from tepal.tools.compare.answers import answer
from tepal.tools.compare.comparison import PLAN, Comparison, Group, Results, is_comparison, read_comparison

FINISHED, RUNNING, FAILED, INTERRUPTED, UNREADABLE = "finished", "running", "failed", "interrupted", "unreadable"

_PLACE_KEYS = ("runs", "resume")  # of the run config: where a run lies, which its path says
_START = re.compile(r"(\d{8}-\d{6})-")


@dataclass(frozen=True)
class RunView(RunFiles):
    """A run directory with the state of its run."""

    @cached_property
    def running(self) -> bool:
        return is_held(self.path)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self.written_summary or summarise(self.metrics, self.config)

    @property
    def state(self) -> str:
        if self.running:
            return RUNNING
        if self.written_summary is None:
            return INTERRUPTED
        return FAILED if self.written_summary.get("stopped_by") else FINISHED

    @property
    def started(self) -> datetime:
        return _started(self.path)

    def facts(self) -> dict[str, Any]:
        """The run as a flat dictionary of JSON's types, for `--json` and for the table."""
        by = ACCURACY if self.summary.get("rmse") is None else RMSE
        return {
            "kind": "run",
            "name": self.path.name,
            "path": str(self.path),
            "strategy": _name(self.summary.get("strategy") or self.config.get("strategy")),
            "model": _name(self.summary.get("model") or self.config.get("model")),
            "dataset": _name(self.config.get("dataset")),
            "rounds": self.summary.get("rounds"),
            "rounds_asked": self.config.get("num-server-rounds"),
            "state": self.state,
            "reason": self.summary.get("stopped_by") or "",
            "ending": ending(self.summary),
            "measure": by.key,
            "score": self.summary.get(by.key),
            "bytes": add(self.summary.get("bytes_down"), self.summary.get("bytes_up")),
            "seconds": self.summary.get("seconds"),
            "started": _timestamp(self.started),
        }


@dataclass(frozen=True)
class ComparisonView:
    """The folder of a comparison, which is listed as one line; its runs are listed by listing this folder."""

    path: Path

    @cached_property
    def comparison(self) -> Comparison:
        return read_comparison(self.path)

    @property
    def state(self) -> str:
        outcomes = {run.outcome for run in self.comparison.runs}
        if is_held(self.path):
            return RUNNING
        if outcomes == {"finished"}:
            return FINISHED
        return FAILED if "failed" in outcomes else INTERRUPTED

    @property
    def started(self) -> datetime:
        return _started(self.path)

    def facts(self) -> dict[str, Any]:
        runs, config = self.comparison.runs, self.comparison.run_config
        return {
            "kind": "comparison",
            "name": self.path.name,
            "path": str(self.path),
            "strategy": ", ".join(self.comparison.strategies),
            "model": _name(config.get("model")),
            "dataset": _name(config.get("dataset")),
            "runs": sum(run.outcome == "finished" for run in runs),
            "runs_asked": len(runs),
            "state": self.state,
            "reason": "; ".join(f"{self.comparison.name(run)}: {run.reason}" for run in runs if run.reason),
            "started": _timestamp(self.started),
        }


def views(folder: Path) -> list[RunView | ComparisonView]:
    """All runs and comparisons in a folder, the newest first. Raises OSError if there is no such folder."""
    try:
        inside = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and not entry.is_symlink()]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no folder {folder}: expected one with run directories, as the key `runs` of the run config "
            "names it"
        ) from error
    except NotADirectoryError as error:
        raise NotADirectoryError(f"{folder} is not a folder: expected one with run directories") from error
    found: list[RunView | ComparisonView] = []
    for path in (Path(entry.path) for entry in inside if entry.is_dir(follow_symlinks=False)):
        if os.path.isfile(path / PLAN):
            found.append(ComparisonView(path))
        elif any(os.path.lexists(path / name) for name in (CONFIG, METRICS, SUMMARY)):
            found.append(RunView(path))
    return sorted(found, key=lambda view: (view.started, natural(view.path.name)), reverse=True)


def facts_of(view: RunView | ComparisonView) -> dict[str, Any]:
    """The facts of a run or comparison; if its files cannot be read, the reason."""
    try:
        return view.facts()
    except Exception as error:  # a run that is damaged in any way must not hide the others
        kind = "run" if isinstance(view, RunView) else "comparison"
        known = {"kind": kind, "name": view.path.name, "path": str(view.path), "started": _timestamp(view.started)}
        expected = isinstance(error, OSError | ValueError)
        return {**known, "state": UNREADABLE, "reason": str(error) if expected else f"{type(error).__name__}: {error}"}


# --- one run --------------------------------------------------------------------------------------------------------


def find(name: str, runs: Path) -> Path:
    """Find a run or comparison by a path, by its name in the folder `runs` or in a comparison there, or by `latest`.

    Raises FileNotFoundError with similar names if there is none.
    """
    if name == LATEST:
        return find_run(runs)
    path = Path(name).expanduser()
    inside = [path, runs / name, *sorted(runs.glob(f"*/{name}"))] if _is_name(name) else [path]
    for candidate in inside:
        if candidate.exists():
            return candidate.resolve() if is_comparison(candidate) else find_run(candidate)
    known = [view.path.name for view in views(runs)] if runs.is_dir() else []
    alike = [each for each in known if name in each] or get_close_matches(name, known, n=3)
    hint = f"did you mean {', '.join(alike[:5])}?" if alike else f"`tepal runs {quote(str(runs))}` lists all runs"
    raise FileNotFoundError(f"no run {name} was found, neither as a path nor in {runs}: {hint}")


def own_settings(config: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run whose values differ from `usual`, the defaults."""
    return {
        key: value
        for key, value in config.items()
        if key not in _PLACE_KEYS and (key not in usual or value != usual[key])
    }


@dataclass(frozen=True)
class Troubles:
    """The incidents of a client: the number of each kind, and the last one."""

    client: str
    counts: Mapping[str, int]
    last_round: int
    last_reason: str


def troubles(metrics: Iterable[RoundRecord]) -> list[Troubles]:
    """The incidents of each client that had any, in the order of the clients' names."""
    counts: dict[str, Counter[str]] = {}
    last: dict[str, tuple[int, str]] = {}
    for line in metrics:
        for kind, client, reason in line.incidents():
            counts.setdefault(client, Counter())[kind] += 1
            last[client] = line.round, reason
    return [Troubles(client, dict(counts[client]), *last[client]) for client in sorted(counts, key=natural)]


def files_of(run: Path) -> dict[str, int]:
    """Bytes of each file in a run directory, and of each folder with all its files."""
    sizes = {}
    for entry in sorted(os.scandir(run), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            inside = (Path(folder) / name for folder, _, names in os.walk(entry.path) for name in names)
            sizes[f"{entry.name}/"] = sum(file.stat().st_size for file in inside if file.is_file())
        elif entry.is_file():
            sizes[entry.name] = entry.stat().st_size
    return sizes


def run_facts(view: RunView, usual: Mapping[str, Any]) -> dict[str, Any]:
    """What `tepal show --json` prints of a run."""
    told: dict[str, Any] = as_json(
        {
            **view.facts(),
            "config": own_settings(view.config, usual),
            "summary": view.summary,
            "metrics": [line.to_line() for line in view.metrics],
            "clients": [asdict(each) for each in troubles(view.metrics)],
            "label_counts": view.label_counts,
            "files": files_of(view.path),
        }
    )
    return told


def comparison_facts(view: ComparisonView, results: Results) -> dict[str, Any]:
    """What `tepal show --json` prints of a comparison: the figures of each strategy or variant over its seeds."""
    times = Counter(result.full_label for result in results.variants)
    told: dict[str, Any] = as_json(
        {
            **view.facts(),
            "target": asdict(results.target) if results.target else None,
            ("strategies" if results.comparison.of_strategies else "variants"): {
                result.full_label if times[result.full_label] == 1 else result.name: {
                    key: asdict(value) if value else None for key, value in result.figures.items()
                }
                for result in results.variants
            },
            **({"sections": list(map(_section_facts, results.sections))} if results.comparison.sections else {}),
            "cells": [run.to_dict() for run in view.comparison.runs],
        }
    )
    return told


def _section_facts(group: Group) -> dict[str, Any]:
    section = group.section
    told = {key: getattr(section, key) for key in ("title", "about", "question", "baseline")}
    told["baseline"] = next((one.label for one in section.variants if one.name == section.baseline), "")
    return {
        **told,
        "variants": [variant.label for variant in section.variants],
        "target": asdict(group.target) if group.target else None,
        "answer": answer(group),
    }


def _is_name(text: str) -> bool:
    return os.sep not in text and not set(text) & set("*?[") and text not in ("", ".", "..")


def _started(path: Path) -> datetime:
    """The start in the directory's name; if it has none, when the config was written."""
    if match := _START.match(path.name):
        try:
            return datetime.strptime(match[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
        except ValueError:
            pass
    for file in (path / CONFIG, path):
        try:
            return datetime.fromtimestamp(file.lstat().st_mtime, UTC)
        except (OSError, ValueError, OverflowError):  # missing, or a time that no calendar has
            continue
    return datetime.fromtimestamp(0, UTC)


def _timestamp(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _name(value: Any) -> str | None:
    """A name from a run config, where it may be anything."""
    return None if value is None else str(value)
