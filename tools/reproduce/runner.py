"""`tepal reproduce`: computes an experiment's cells, each once, and writes tables, figures and findings of them.

    runs/reproduce/<name>/           the small setting; <name>-full/ the paper's
        cells/<cell>.json            what was computed of a cell: options, values, seconds, when
        data.json                    the data sets that it is computed from, by files and bytes
        <table>.csv, results.md      the tables, with the paper's numbers beside ours
        index.html                   tables and figures as a page
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from html import escape
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from tepal import __version__
from tepal.records.columns import Column, seconds_text
from tepal.records.run_directory import LATEST, NOW, as_json, held, read_json, write_whole
from tepal.report.page import figure_html, page
from tepal.report.table import Table as ReportTable
from tepal.strategies import RoundFailed
from tepal.tools.compare.page import style
from tepal.tools.reproduce.data import at_hand, sizes
from tepal.tools.reproduce.ensemble_mnist import EnsembleMnist
from tepal.tools.reproduce.ensemble_shakespeare import EnsembleShakespeare
from tepal.tools.reproduce.ensemble_toy import EnsembleToy
from tepal.tools.reproduce.experiment import Cell, Experiment, NotAtHand, Outcome, Place, Table
from tepal.tools.reproduce.fedacs import FedAcs
from tepal.tools.reproduce.fedfrozen_costs import FedFrozenCosts
from tepal.tools.reproduce.fedfrozen_simulation import FedFrozenSimulation
from tepal.tools.reproduce.fedfrozen_vision import FedFrozenVision
from tepal.tools.reproduce.runs import LOOK
from tepal.tools.reproduce.selective import Selective

EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each
    for each in (
        FedFrozenSimulation(), FedFrozenCosts(), FedFrozenVision(), EnsembleToy(), EnsembleMnist(),
        EnsembleShakespeare(), FedAcs(), Selective(),
    )
}  # fmt: skip
"""All experiments by name."""

_CELLS = "cells"
_DATA = "data.json"
_A_WHILE = 60.0  # seconds between two lines on runs in progress
_STYLE = ".plot { height: auto; }\n"  # figures have their own


class UnknownExperiment(ValueError):
    """There is no experiment of that name."""


class OtherData(ValueError):
    """What a folder holds was computed from other data than what is there now."""


def find_experiment(name: str) -> Experiment:
    """The experiment of a name. Raises UnknownExperiment, naming those that are alike."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    alike = get_close_matches(name, EXPERIMENTS, n=1)
    hint = f"did you mean {alike[0]!r}?" if alike else f"there are {', '.join(EXPERIMENTS)}"
    raise UnknownExperiment(f"there is no experiment {name!r}: {hint}")


def reproduce(
    experiment: Experiment,
    folder: Path,
    *,
    full: bool,
    said: Callable[[str], None],
    data: Path = Path("data"),
    at_once: int = 1,
) -> Path:
    """Compute what is missing in a folder, write the results there, and return the page's path.

    Args:
        experiment: which.
        folder: of all experiments; this one's has its name.
        full: the paper's scale.
        said: is told of each cell.
        data: where the data sets lie, each under its name.
        at_once: so many cells are computed at once, each in a process of its own with one thread; 1: in this one.

    Raises NotAtHand where data is missing, OtherData where what is kept is of other data, RunInUse where another
    process computes it, OSError where a file cannot be written.
    """
    place = folder / (f"{experiment.name}-full" if full else experiment.name)
    found = at_hand(data, experiment.data(full))
    (place / _CELLS).mkdir(parents=True, exist_ok=True)
    cells = experiment.cells(full)
    left_out = dict[str, str]()
    with held(place), _told_of_rounds(place, said):
        _check_data(place, found)
        said(f"{experiment.title}: {experiment.paper}. {experiment.scale(full)}")
        todo = _missing(place, cells)
        numbers = {cell.name: number for number, cell in enumerate(cells, start=1)}
        for cell, ended in _compute(experiment, todo, Place(place.absolute(), found), at_once):
            where = f"{numbers[cell.name]}/{len(cells)} {cell.name}"
            if isinstance(ended, str):
                left_out[cell.name] = ended
                said(f"{where}: left out: {ended}")
            else:
                said(f"{where}: {seconds_text(ended)}")
        return _write(experiment, place, cells, full, left_out)


def _check_data(place: Path, found: Mapping[str, Path]) -> None:
    """Note what is computed from, the first time; later, raise OtherData for what has changed."""
    now, before = sizes(found), read_json(place / _DATA) or {}
    for name in [name for name in now if before.get(name, now[name]) != now[name]]:
        told = (f"{of['bytes']:,} in {of['files']:,}" for of in (before[name], now[name]))
        raise OtherData(
            f"{place} was computed from another {name} than {found[name]} is now (bytes in files: "
            f"{', now '.join(told)}); name another --folder, or remove that one"
        )
    write_whole(place / _DATA, (json.dumps(now) + "\n").encode())


def _missing(place: Path, cells: Sequence[Cell]) -> list[Cell]:
    """Cells to compute: those that are not there, and those computed from what is to be computed, or was anew."""
    due = set[str]()
    for cell in cells:
        if _computed(place, cell) is None or not due.isdisjoint(cell.needs):
            due.add(cell.name)
    return [cell for cell in cells if cell.name in due]


@contextmanager
def _told_of_rounds(place: Path, said: Callable[[str], None]) -> Iterator[None]:
    """Say once a while which round the runs have come to that go on for longer than that."""
    over = threading.Event()

    def tell() -> None:
        before: dict[str, str] = {}
        while not over.wait(_A_WHILE):
            runs = {path.parents[2].name: read_json(path) for path in sorted(place.glob(f"runs/*/runs/{LATEST}/{NOW}"))}
            now = {cell: f"{cell} at round {of['round']} of {of['rounds']}" for cell, of in runs.items() if of}
            if news := [text for cell, text in now.items() if cell in before and text != before[cell]]:
                said(f"   {', '.join(news)}")
            before = now

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _compute(
    experiment: Experiment, todo: Sequence[Cell], place: Place, at_once: int
) -> Iterator[tuple[Cell, float | str]]:
    """Compute cells and keep them, each after those that it needs; yields each, as it ends, with its seconds, or with
    why there is nothing of it.
    """
    if at_once == 1:
        for cell in todo:
            yield cell, _compute_one(experiment, cell, place)
        return
    with ProcessPoolExecutor(at_once, get_context("spawn"), _prepared) as pool:
        waiting, running = list(todo), dict[Future[float | str], Cell]()
        try:
            while waiting or running:
                due = {cell.name for cell in (*waiting, *running.values())}
                for cell in [cell for cell in waiting if due.isdisjoint(cell.needs)][: at_once - len(running)]:
                    waiting.remove(cell)
                    running[pool.submit(_compute_one, experiment, cell, place)] = cell
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(ended), ended.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _prepared() -> None:
    """Of a process of the pool: one thread, and an end when the process that asks is gone."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compute_one(experiment: Experiment, cell: Cell, place: Place) -> float | str:
    """Compute a cell and keep it; the seconds that it took, or why there is nothing of it: something is missing, or its
    clients gave no good reply, as where all of them diverge.
    """
    quiet = logging.getLogger("flwr")
    level, begun = quiet.level, time.monotonic()
    try:
        quiet.setLevel(logging.ERROR)  # rounds by the thousand
        needed = {name: _kept(place.folder, name) for name in cell.needs}
        if absent := [name for name, of in needed.items() if of is None]:
            return f"it needs {', '.join(absent)}"
        found = {name: of["values"] for name, of in needed.items() if of}
        values = experiment.compute(cell, replace(place, found=found))
    except (NotAtHand, RoundFailed) as error:
        return str(error)
    finally:
        quiet.setLevel(level)
    took = time.monotonic() - begun
    _keep(place.folder, cell, values, took)
    return took


def _computed(place: Path, cell: Cell) -> dict[str, Any] | None:
    """What was kept of a cell; None where it is missing, torn, or was computed from other options or cells."""
    kept = _kept(place, cell.name)
    same = kept and kept.get("options") == as_json(cell.options) and kept.get("needs") == _ages(place, cell)
    return kept if same else None


def _ages(place: Path, cell: Cell) -> dict[str, str | None]:
    """When the cells that it needs were computed."""
    return {name: (_kept(place, name) or {}).get("computed") for name in cell.needs}


def _kept(place: Path, name: str) -> dict[str, Any] | None:
    try:
        kept = json.loads((place / _CELLS / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) else None


def _keep(place: Path, cell: Cell, values: Mapping[str, Any], seconds: float) -> None:
    kept = {
        "options": cell.options, "needs": _ages(place, cell), "values": values, "seconds": round(seconds, 3),
        "tepal": __version__, "computed": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    write_whole(place / _CELLS / f"{cell.name}.json", (json.dumps(as_json(kept), indent=1) + "\n").encode())


def _write(
    experiment: Experiment, place: Path, cells: Sequence[Cell], full: bool, left_out: Mapping[str, str]
) -> Path:
    kept = {cell.name: found for cell in cells if (found := _computed(place, cell)) is not None}
    outcome = experiment.outcome({name: of["values"] for name, of in kept.items()})
    for table in outcome.tables:
        write_whole(place / f"{_file_name(table.title)}.csv", _as_report(table).csv().encode())
    about = _about(experiment, full, kept)
    about += [f"Left out: {name}: {why}." for name, why in left_out.items()]
    write_whole(place / "results.md", _markdown(experiment, outcome, about).encode())
    write_whole(place / "index.html", _page(experiment, outcome, about).encode())
    return place / "index.html"


def _about(experiment: Experiment, full: bool, kept: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on how it was computed."""
    seconds = sum(of["seconds"] for of in kept.values())
    dates = sorted({of["computed"][:10] for of in kept.values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "nothing yet"
    how = f"{len(kept)} cells, {seconds_text(seconds)} in all, {when}, tepal {__version__}."
    return [f"{experiment.paper}. {experiment.scale(full)}", *experiment.deviations, how]


def _text(value: str | float | int) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else value


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _as_report(table: Table) -> ReportTable:
    columns = [Column(heading, text=_text, left=not number) for number, heading in enumerate(table.headings)]
    return ReportTable(table.title, columns, table.rows)


def _markdown(experiment: Experiment, outcome: Outcome, about: Sequence[str]) -> str:
    parts = [f"## {experiment.title}", "\n".join(f"- {each}" for each in about)]
    for table in outcome.tables:
        parts += [f"### {table.title}", _as_report(table).markdown()]
    parts.append("\n".join(f"- {each}" for each in outcome.findings))
    return "\n\n".join(part for part in parts if part) + "\n"


def _page(experiment: Experiment, outcome: Outcome, about: Sequence[str]) -> str:
    def points(sentences: Sequence[str]) -> str:
        return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in sentences)}</ul>"

    tables = "".join(f"<h2>{escape(table.title)}</h2>{_as_report(table).html()}" for table in outcome.tables)
    body = (
        f"<header><h1>{escape(experiment.title)}</h1></header>{points(about)}"
        f"<h2>What came out</h2>{points(outcome.findings)}{tables}"
        f'<h2>Figures</h2><div class="figures">{"".join(map(figure_html, outcome.figures))}</div>'
    )
    roles = {trace.meta["role"] for figure in outcome.figures if figure.plot for trace in figure.plot.data}
    methods = sorted(role.removeprefix(LOOK) for role in roles if role.startswith(LOOK))
    return page(experiment.title, body, outcome.figures, style=style(methods) + _STYLE)
