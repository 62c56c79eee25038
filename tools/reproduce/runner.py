"""`tepal reproduce`: compute the trials of an experiment, each once, and write its tables, figures and findings.

    runs/reproduce/<name>/           the small setting; <name>-full/ the paper's
        cells/<trial>.json           a computed trial: options, values, seconds, date
        data.json                    number of files and bytes of the data sets that were used
        <table>.csv, results.md      the tables, with the paper's numbers next to ours
        index.html                   tables and figures as a page
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import lru_cache, partial
from html import escape
from pathlib import Path
from typing import Any

from tepal import __version__
from tepal.records.columns import seconds_text
from tepal.records.run_directory import as_json, held, read_json, write_whole
from tepal.report.page import figure_html, page
from tepal.strategies import RoundFailed
from tepal.tools.cluster.connection import Cluster
from tepal.tools.compare.page import style
from tepal.tools.reproduce.data import find_data, sizes
from tepal.tools.reproduce.defaults import Defaults
from tepal.tools.reproduce.ensemble_images import EnsembleCifar10, EnsembleCifar100, EnsembleMnist
from tepal.tools.reproduce.ensemble_shakespeare import EnsembleShakespeare
from tepal.tools.reproduce.ensemble_toy import EnsembleToy
from tepal.tools.reproduce.experiment import (
    WEIGHTS,
    Experiment,
    MissingData,
    Reproduction,
    Trial,
    TrialInputs,
    Values,
)
from tepal.tools.reproduce.fedacs import FedAcs
from tepal.tools.reproduce.fedfrozen_costs import FedFrozenCosts
from tepal.tools.reproduce.fedfrozen_simulation import FedFrozenSimulation
from tepal.tools.reproduce.fedfrozen_vision import KINDS as FEDFROZEN
from tepal.tools.reproduce.fedfrozen_vision import FedFrozenVision
from tepal.tools.reproduce.hostile_clients import HostileClients
from tepal.tools.reproduce.machine.device import AUTO, find_device
from tepal.tools.reproduce.machine.memory import check_memory
from tepal.tools.reproduce.machine.processes import processes
from tepal.tools.reproduce.machine.progress import Progress, TimeLeft
from tepal.tools.reproduce.machine.weights import missing_weights
from tepal.tools.reproduce.on_cluster import compute_on
from tepal.tools.reproduce.runs import METHOD_ROLE
from tepal.tools.reproduce.selective import KINDS, Selective

EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each
    for each in (
        FedFrozenSimulation(), FedFrozenCosts(), *map(FedFrozenVision, FEDFROZEN.values()), EnsembleToy(),
        EnsembleMnist(), EnsembleCifar10(), EnsembleCifar100(), EnsembleShakespeare(),
        FedAcs("fashion-mnist", "Fashion-MNIST"), FedAcs("cifar-10", "CIFAR-10"), *map(Selective, KINDS),
        HostileClients(), Defaults(),
    )
}  # fmt: skip
"""All experiments by name."""

TRIALS = "cells"
"""Folder of the computed trials in an experiment's folder."""
_DATA = "data.json"
_STYLE = ".plot { height: auto; }\n"  # these figures have their own heights


Compute = Callable[[Trial, TrialInputs], Values]
"""As `Experiment.compute`."""


class UnknownExperiment(ValueError):
    """No experiment has that name."""


class OtherData(ValueError):
    """The kept results of an experiment were computed from other data than the data that is given now."""


def find_experiment(name: str) -> Experiment:
    """The experiment of a name. Raises UnknownExperiment with a similar name, or all names."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    similar = get_close_matches(name, EXPERIMENTS, n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(EXPERIMENTS)}"
    raise UnknownExperiment(f"there is no experiment {name!r}: {hint}")


def reproduce(
    experiment: Experiment,
    folder: Path,
    *,
    full: bool,
    log: Callable[[str], None],
    data: Path = Path("data"),
    at_once: int = 1,
    device: str = AUTO,
    cluster: Cluster | None = None,
) -> Path:
    """Compute the missing trials of an experiment, write its results, and return the page's path.

    Args:
        experiment: which one.
        folder: of all experiments; this one's subfolder has its name.
        full: the paper's scale instead of the small one.
        log: called with a line for each trial, and with the progress of long runs and the time left.
        data: folder of the data sets, each under its name.
        at_once: number of trials to compute at a time, each in a process of its own with one thread; 1: in this one.
        device: on which clients train; see `find_device`.
        cluster: compute the trials on its machines, as many at a time as they have room for, and not here.

    Raises:
        MissingData: data sets or pretrained weights are missing.
        TooLittleMemory: the largest trials need more than is free, whatever else they need.
        ValueError: this machine does not have the device.
        OtherData: kept trials were computed from other data.
        RunInUse: another process computes this experiment.
        ProcessError: a process of `at_once` was killed.
        OSError: a file cannot be written.
    """
    place = folder / (f"{experiment.name}-full" if full else experiment.name)
    trials = experiment.trials(full)
    # Of a cluster only the machine of a trial knows its device.
    where = find_device(device) if cluster is None else ""
    compute: Compute = experiment.compute
    if cluster is not None:
        compute, at_once = partial(compute_on, cluster, experiment, full, log), cluster.at_once
    todo = _missing(place, trials)
    found = _find_inputs(experiment, full, data, place, any_left=bool(todo))
    if not isinstance(where, str):
        check_memory(todo, at_once, where)
    (place / TRIALS).mkdir(parents=True, exist_ok=True)
    left_out = dict[str, str]()
    with held(place):
        _check_data(place, found)
        log(f"{experiment.title}: {experiment.paper}. {experiment.scale(full)}")
        numbers = {trial.name: number for number, trial in enumerate(trials, start=1)}
        inputs = TrialInputs(place.absolute(), found, device=str(where) or (device if device != AUTO else ""))
        todo = _missing(place, trials)
        with (
            Progress(place, _time_left(place, trials, todo, at_once), log) as progress,
            closing(_compute(compute, todo, inputs, at_once, cluster)) as computing,
        ):
            for trial, ended in computing:
                said = f"{numbers[trial.name]}/{len(trials)} {trial.name}"
                if isinstance(ended, str):
                    left_out[trial.name] = ended
                    log(f"{said}: left out: {ended}")
                else:
                    log(f"{said}: {seconds_text(ended)}")
                progress.ended(trial.name, None if isinstance(ended, str) else ended)
        return _write(experiment, place, trials, full, left_out)


def _find_inputs(experiment: Experiment, full: bool, data: Path, place: Path, *, any_left: bool) -> dict[str, Path]:
    """The data sets; raises MissingData that names all data and, if any trial is left, all weights that are missing."""
    problems, found = list[str](), dict[str, Path]()
    try:
        found = find_data(data, experiment.data(full))
    except MissingData as error:
        problems.append(str(error))
    if any_left and (absent := missing_weights(place / WEIGHTS, experiment.weights(full))):
        problems.append(f"missing pretrained weights; put them there:{absent}")
    if problems:
        raise MissingData("\n".join(problems))
    return found


def _time_left(place: Path, trials: Sequence[Trial], todo: Sequence[Trial], at_once: int) -> TimeLeft:
    left = [trial.name for trial in todo]
    kept = {name: read_json(_file(place, name)) for name in (trial.name for trial in trials) if name not in left}
    return TimeLeft(trials, {name: of["seconds"] for name, of in kept.items() if of}, left, at_once)


def _check_data(place: Path, found: Mapping[str, Path]) -> None:
    """Record the sizes of the data the first time; later, raise OtherData if they have changed."""
    now, before = sizes(found), read_json(place / _DATA) or {}
    for name in [name for name in now if before.get(name, now[name]) != now[name]]:
        both = (f"{of['bytes']:,} in {of['files']:,}" for of in (before[name], now[name]))
        raise OtherData(
            f"{place} was computed from another {name} than {found[name]} is now (bytes in files: "
            f"{', now '.join(both)}): choose another --folder, or remove that one"
        )
    write_whole(place / _DATA, (json.dumps(now) + "\n").encode())


def _missing(place: Path, trials: Sequence[Trial]) -> list[Trial]:
    """The trials to compute: those without values, and those that need a trial which is to be, or was, recomputed."""
    due = set[str]()
    for trial in trials:
        if computed(place, trial) is None or not due.isdisjoint(trial.needs):
            due.add(trial.name)
    return [trial for trial in trials if trial.name in due]


def _compute(
    compute: Compute, todo: Sequence[Trial], inputs: TrialInputs, at_once: int, cluster: Cluster | None
) -> Generator[tuple[Trial, float | str]]:
    """Compute and keep trials, each after those that it needs; yields each with its seconds, or why it was left out."""
    if cluster is not None:
        with ThreadPoolExecutor(at_once) as pool:
            yield from _in_pool(pool, compute, todo, inputs, at_once, cluster.stopped.set)
    elif at_once == 1:
        for trial in todo:
            yield trial, _compute_one(compute, trial, inputs)
    else:
        with processes(at_once) as pool:
            yield from _in_pool(pool, compute, todo, inputs, at_once)


def _in_pool(
    pool: Executor,
    compute: Compute,
    todo: Sequence[Trial],
    inputs: TrialInputs,
    at_once: int,
    stop: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Trial, float | str]]:
    """Compute in a pool. `stop` ends what is under way when something fails."""
    waiting, running = list(todo), dict[Future[float | str], Trial]()
    try:
        while waiting or running:
            due = {trial.name for trial in (*waiting, *running.values())}
            for trial in [trial for trial in waiting if due.isdisjoint(trial.needs)][: at_once - len(running)]:
                waiting.remove(trial)
                running[pool.submit(_compute_one, compute, trial, inputs)] = trial
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(ended), ended.result()
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _compute_one(compute: Compute, trial: Trial, inputs: TrialInputs) -> float | str:
    """Compute and keep a trial. Returns its seconds, or why it was left out: missing data, or a round that failed."""
    begun = time.monotonic()
    try:
        _file(inputs.folder, trial.name).unlink(missing_ok=True)  # of other options or other trials
        needed = {name: read_json(_file(inputs.folder, name)) for name in trial.needs}
        if absent := [name for name, kept in needed.items() if kept is None]:
            return f"it needs {', '.join(absent)}, which was not computed"
        values = {name: kept["values"] for name, kept in needed.items() if kept}
        with _QUIET:
            computed = compute(trial, replace(inputs, needed=values))
    except (MissingData, RoundFailed) as error:
        return str(error)
    seconds = time.monotonic() - begun
    _keep(inputs.folder, trial, computed, seconds)
    return seconds


class _Quiet:
    """Keeps Flower from logging every one of thousands of rounds, in whichever threads it is entered."""

    def __init__(self) -> None:
        self._log, self._lock = logging.getLogger("flwr"), threading.Lock()
        self._entered, self._level = 0, logging.NOTSET

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._level = self._log.level
                self._log.setLevel(logging.ERROR)
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._log.setLevel(self._level)


_QUIET = _Quiet()


def _file(place: Path, name: str) -> Path:
    return place / TRIALS / f"{name}.json"


def computed(place: Path, trial: Trial) -> dict[str, Any] | None:
    """What was kept of a trial; None if it is missing, damaged, or computed from other options or other trials."""
    kept: dict[str, Any] | None = read_json(_file(place, trial.name))
    return kept if kept and fits(trial, kept, _dates(place, trial)) else None


def fits(trial: Trial, kept: Mapping[str, Any], dates: Mapping[str, str | None]) -> bool:
    """Whether what was kept has a trial's options, and was computed from the needed trials of these dates."""
    return kept.get("options") == as_json(trial.options) and kept.get("needs") == dates


def _dates(place: Path, trial: Trial) -> dict[str, str | None]:
    """When each trial that this one needs was computed."""
    return {name: (read_json(_file(place, name)) or {}).get("computed") for name in trial.needs}


def _keep(place: Path, trial: Trial, values: Mapping[str, Any], seconds: float) -> None:
    kept = {
        "options": trial.options, "needs": _dates(place, trial), "values": values, "seconds": round(seconds, 3),
        "tepal": __version__, "commit": _commit(), "computed": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    write_whole(_file(place, trial.name), (json.dumps(as_json(kept), indent=1) + "\n").encode())


@lru_cache
def _commit() -> str:
    """The commit of the checkout that this package is in, with "+" if files differ from it; "" without one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        same = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.strip() + ("" if same else "+")


# --- the results ----------------------------------------------------------------------------------------------------


def _write(
    experiment: Experiment, place: Path, trials: Sequence[Trial], full: bool, left_out: Mapping[str, str]
) -> Path:
    kept = {trial.name: of for trial in trials if (of := computed(place, trial)) is not None}
    results = experiment.results({name: of["values"] for name, of in kept.items()})
    for table in results.tables:
        write_whole(place / f"{_file_name(table.title)}.csv", table.csv().encode())
    said = [*about(experiment, full, kept), *(f"Left out: {name}: {why}." for name, why in left_out.items())]
    write_whole(place / "results.md", _markdown(experiment, results, said).encode())
    write_whole(place / "index.html", _page(experiment, results, said).encode())
    return place / "index.html"


def about(experiment: Experiment, full: bool, kept: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on the setting, and on when and how long it was computed."""
    seconds = sum(of["seconds"] for of in kept.values())
    dates = sorted({of["computed"][:10] for of in kept.values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "none computed yet"
    commits = ", ".join(sorted({of.get("commit") or "" for of in kept.values()} - {""}))
    versions = ", ".join(sorted({str(of["tepal"]) for of in kept.values() if "tepal" in of})) or __version__
    version = f"tepal {versions}{f' (commit {commits})' if commits else ''}"
    count, whole = len(kept), len(experiment.trials(full))
    share = str(count) if count == whole else f"{count} of {whole}"
    how = f"{share} trials, {seconds_text(seconds)} in total, {when}, {version}."
    return [f"{experiment.paper}. {experiment.scale(full)}", *experiment.deviations, how, *_weights_of(kept)]


def _weights_of(kept: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence on the pretrained weights that the trials started from, if any."""
    started = {item for of in kept.values() for item in (of["values"].get("weights") or {}).items()}
    texts = [f"{name} (sha256 {digest[:8]}…)" for name, digest in sorted(started)]
    return [f"Pretrained weights: {', '.join(texts)}."] if texts else []


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _markdown(experiment: Experiment, results: Reproduction, about: Sequence[str]) -> str:
    parts = [f"## {experiment.title}", "\n".join(f"- {each}" for each in about)]
    for table in results.shown_tables:
        parts += [f"### {table.title}", table.markdown()]
    parts.append("\n".join(f"- {each}" for each in results.findings))
    return "\n\n".join(part for part in parts if part) + "\n"


def _page(experiment: Experiment, results: Reproduction, about: Sequence[str]) -> str:
    def points(sentences: Sequence[str]) -> str:
        return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in sentences)}</ul>"

    tables = "".join(f"<h2>{escape(table.title)}</h2>{table.html()}" for table in results.shown_tables)
    body = (
        f"<header><h1>{escape(experiment.title)}</h1></header>{points(about)}"
        f"<h2>Findings</h2>{points(results.findings)}{tables}"
        f'<h2>Figures</h2><div class="figures">{"".join(map(figure_html, results.figures))}</div>'
    )
    roles = {trace.meta["role"] for figure in results.figures if figure.plot for trace in figure.plot.data}
    methods = sorted(role.removeprefix(METHOD_ROLE) for role in roles if role.startswith(METHOD_ROLE))
    return page(experiment.title, body, results.figures, style=style(methods) + _STYLE)
