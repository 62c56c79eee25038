"""Trials that train: one run of a run config each; and tables, figures and sentences that compare such runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import stdev
from typing import Any, TypeVar

from tepal.records.run_directory import (
    CHECKPOINTS,
    MODEL,
    as_json,
    read_json,
    read_metrics,
    read_records,
    total,
    write_whole,
)
from tepal.report.page import Figure, empty_plot
from tepal.report.table import Table
from tepal.server_app.config import defaults
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.tools.compare.picture import looks
from tepal.tools.reproduce.experiment import Trial, TrialInputs, Values, table
from tepal.tools.reproduce.machine.weights import digests
from tepal.tools.reproduce.scores import ClientScores, correct_examples

PAPER = "paper"
"""The label of a line that shows the paper's numbers."""
METHOD_ROLE = "s-"
"""Prefix of the roles of traces that have a method's colour."""
_ENSEMBLE_METRICS = ("lowest_accuracy", "highest_accuracy", "entropy", "mode_entropy")
_MARKS = "lines+markers"

Connect = Callable[[Sequence[Node], Mapping[str, Any]], InProcessGrid]
Row = TypeVar("Row", bound=str | int)
Setting = TypeVar("Setting")


# --- training -------------------------------------------------------------------------------------------------------


def trained(
    trial: Trial,
    inputs: TrialInputs,
    *,
    weights: Path | None = None,
    grid: Connect | None = None,
    **files: str | float,
) -> Values:
    """Train as a trial's options `config` and `clients` say.

    Args:
        trial: the run; the data set that its config names is read from the path among the inputs.
        inputs: folder and data sets.
        weights: where to save the final model.
        grid: see `measured`.
        files: keys of the run config that depend on this machine or on other trials.

    Returns:
        As `measured`, and `weights`: the pretrained weights that it started from, by name, with their SHA-256.
    """
    config = dict(trial.options["config"])
    name = str(config.get("dataset", ""))
    if name in inputs.data and "dataset" not in files:
        files["dataset-path"] = str(inputs.data[name])
    folder, config = run_folder(trial, inputs), config | files
    started = digests(str(config.get("pretrained", "")), inputs.folder)
    values = measured(
        config, int(trial.options["clients"]), folder, weights=weights, grid=grid, device=inputs.device
    )
    return {**values, "weights": started}


def run_folder(trial: Trial, inputs: TrialInputs) -> Path:
    """The folder of a trial's run and of its clients' caches, until the trial is computed."""
    return inputs.folder / "runs" / trial.name


def measured(
    config: Mapping[str, Any],
    clients: int,
    folder: Path,
    *,
    weights: Path | None = None,
    grid: Connect | None = None,
    device: str = "",
) -> Values:
    """Train as a run config says, in this process, and return what was measured.

    An interrupted run continues after its last round. The folder of a finished run is removed.

    Args:
        config: changes to the default run config.
        clients: number of clients.
        folder: for the run's files and the clients' caches.
        weights: where to save the final model.
        grid: function of the nodes and the run config that connects them, and may replace their apps.
        device: of the clients, as in their node config; "": a GPU if there is one, else the CPU.

    Returns:
        `server`, `clients`: accuracy on the server's examples, and mean over the clients of the accuracy on their own
        (None: not measured); `spread`: standard deviation of the latter over the clients; `of_clients`: each client's
        latest score (see `ClientScores`); `correct`: see `correct_examples`; `curve`: pairs (round,
        accuracy); `bytes`: of all messages; `rounds`; for an ensemble the accuracy of its worst and best mode, the
        entropy of the mean prediction and the mean of the modes' entropies, in nats; `layers`: for each round the share
        of its clients that train each layer, if a method selects layers.
    """
    # Imported here: only training needs Flower's apps and torch.
    from tepal.client_app.app import app
    from tepal.server_app.run import run

    values = defaults() | dict(config) | {"runs": str(folder / "runs")}
    scores = ClientScores(app)
    _start_anew_if_changed(folder, {**config, "num-partitions": clients})
    begun = [path for path in sorted((folder / "runs").glob("*")) if not path.is_symlink()]
    if stopped := [path for path in begun if Checkpoints(path / CHECKPOINTS).latest()]:
        values["resume"] = str(stopped[-1])
    common: dict[str, str | int | float] = {"num-partitions": clients, "cache-path": str(folder / "clients")}
    if device:
        common["device"] = device
    nodes = [Node(scores, {**common, "partition-id": k}) for k in range(clients)]
    directory = run((grid or InProcessGrid)(nodes, values), values)
    metrics = read_metrics(directory)
    if stopped and not scores.last() and metrics[-1].clients_accuracy is not None:
        # The run was stopped after its last evaluation, whose scores nobody has.
        shutil.rmtree(folder)
        return measured(config, clients, folder, weights=weights, grid=grid, device=device)
    if weights is not None:
        weights.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(directory / MODEL, weights)
    masks = [record["masks"] for _, record in read_records(directory, most=len(metrics)) if "masks" in record]
    last = metrics[-1]
    on_server = correct_examples(directory, device) if last.accuracy_of == "server" and weights is None else None
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "server": last.accuracy if last.accuracy_of == "server" else None,
        "clients": last.clients_accuracy,
        "spread": last.clients_spread,
        "of_clients": scores.last(),
        "correct": on_server,
        "curve": [(line.round, line.accuracy) for line in metrics if line.accuracy is not None],
        "bytes": (total(metrics, "bytes_down") or 0) + (total(metrics, "bytes_up") or 0),
        "rounds": last.round,
        **{key: last.value(key) for key in _ENSEMBLE_METRICS},
        "layers": [[round(float(share), 4) for share in of_round.mean(axis=0)] for of_round in masks],
    }


def _start_anew_if_changed(folder: Path, config: Mapping[str, Any]) -> None:
    """Remove what is left of a run with another config, which is then not continued, and note this one."""
    file, options = folder / "config.json", as_json(config)
    if folder.exists() and read_json(file) != options:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(options).encode())


# --- comparing ------------------------------------------------------------------------------------------------------


def slug(label: str) -> str:
    """A method's label as part of a trial's name."""
    return re.sub("[^a-z0-9]", "", label.lower())


def seeds_of(found: Mapping[str, Values], name: str) -> list[Values]:
    """The values of the trials `<name>-<seed>`."""
    return [values for each, values in found.items() if each.rpartition("-")[0] == name]


def mean_text(values: Sequence[float]) -> str | None:
    """Mean and, of several values, standard deviation as text; None without values."""
    if not values:
        return None
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{_mean(values):.4f}{deviation}"


def compared(ours: Sequence[float], others: Sequence[float]) -> str:
    """By how much the mean of the first is above or below that of the others."""
    gain = _mean(ours) - _mean(others)
    return f"{abs(gain):.4f} {'above' if gain > 0 else 'below'}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def paper_table(
    title: str,
    corner: str,
    headings: Mapping[Setting, str],
    rows: Iterable[Row],
    ours: Callable[[Row, Setting], str | float | None],
    paper: Callable[[Row, Setting], float | None],
    paper_heading: str = PAPER,
) -> Table:
    """A table with two columns for each setting: our number, and the paper's.

    Args:
        title: of the table.
        corner: heading of the first column.
        headings: of the columns with our numbers, by setting.
        rows: what the first column shows.
        ours, paper: the numbers of a row and a setting, None if not known.
        paper_heading: of the columns with the paper's numbers.
    """
    pairs = [[row, *chain.from_iterable((ours(row, each), paper(row, each)) for each in headings)] for row in rows]
    return table(title, (corner, *chain.from_iterable((text, paper_heading) for text in headings.values())), pairs)


def curves(methods: Mapping[str, Sequence[Values]], key: str, title: str, caption: str) -> Figure:
    """Accuracy over rounds by method: the mean over its seeds."""
    known = {label: runs for label, runs in methods.items() if runs}
    rounds = max((of["rounds"] for runs in known.values() for of in runs), default=1)
    plot = empty_plot("round", "accuracy", rounds=rounds)
    for label, runs in known.items():
        points = list(zip(*(of["curve"] for of in runs), strict=False))
        accuracies = [_mean([accuracy for _, accuracy in each]) for each in points]
        plot.add_scatter(x=[each[0][0] for each in points], y=accuracies, name=label, **_look(label))
    return Figure(key, title, caption, plot)


def by_setting(
    methods: Mapping[str, Mapping[Any, Sequence[float]]], key: str, title: str, x_title: str, caption: str
) -> Figure:
    """Accuracy by setting, a line for each method: the mean over its seeds.

    Settings are categories; numeric ones are sorted.
    """
    plot = empty_plot(x_title, "accuracy")
    for label, values in methods.items():
        means = {setting: _mean(scores) for setting, scores in values.items() if scores}
        plot.add_scatter(x=[*means], y=[*means.values()], name=label, **_look(label))
    settings = [*dict.fromkeys(chain.from_iterable(methods.values()))]
    if all(isinstance(each, int | float) for each in settings):
        settings.sort()
    # Without it a category has the place of the first line that has it.
    plot.update_xaxes(type="category", categoryorder="array", categoryarray=settings)
    return Figure(key, title, caption, plot)


def _look(label: str) -> dict[str, Any]:
    """Colour and mark of a method by its label, as on all pages; the paper's line is grey and dashed."""
    if label == PAPER:
        return {"mode": _MARKS, "line": {"dash": "dash"}, "meta": {"role": "fedavg"}}
    name = slug(label)
    return {"mode": _MARKS, "marker": {"symbol": looks([name])[name].symbol}, "meta": {"role": f"{METHOD_ROLE}{name}"}}
