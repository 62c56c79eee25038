"""A run of this project as a cell of an experiment: a run config, so many clients, and what was measured."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import stdev
from typing import Any

from tepal.records.run_directory import CHECKPOINTS, MODEL, read_metrics, read_records, total
from tepal.report.page import Figure, empty_plot
from tepal.server_app.config import defaults
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.tools.compare.picture import looks
from tepal.tools.reproduce.experiment import Cell, Place, Values

PAPER = "paper"
"""What a line of the paper's numbers is called."""
LOOK = "s-"
"""What roles of traces begin with that have a method's colour."""


_OF_MODES = ("lowest_accuracy", "highest_accuracy", "entropy")  # of an ensemble


def measured(config: Mapping[str, Any], clients: int, folder: Path, *, weights: Path | None = None) -> Values:
    """Train as a run config says, in this process, and say what came out.

    A run that was stopped goes on from its last round. When it is finished its folder is gone.

    Args:
        config: changes to the run config.
        clients: how many there are.
        folder: for the run's files, and what its clients keep.
        weights: where to leave the final model.

    Returns `server` and `clients`: accuracies on the server's examples and, as a mean over the clients, on their own
    (None: not measured), `spread`: of the latter over the clients, `curve`: pairs (round, accuracy), `bytes`: of all
    messages, `rounds`, of an ensemble's modes the worst and best accuracy and the entropy, and `layers`: by
    round, the share of its clients that train each, where a method selects them.
    """
    # Flower and torch are loaded by who trains alone.
    from tepal.client_app.app import app
    from tepal.server_app.run import run

    values = defaults() | dict(config) | {"runs": str(folder / "runs")}
    begun = [path for path in sorted((folder / "runs").glob("*")) if not path.is_symlink()]
    if stopped := [path for path in begun if Checkpoints(path / CHECKPOINTS).latest()]:
        values["resume"] = str(stopped[-1])
    nodes = [Node(app, {"partition-id": k, "num-partitions": clients}) for k in range(clients)]
    with _kept_by_clients(folder / "clients"):
        directory = run(InProcessGrid(nodes, values), values)
    metrics = read_metrics(directory)
    if weights is not None:
        weights.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(directory / MODEL, weights)
    records = [record["masks"] for _, record in read_records(directory, most=len(metrics)) if "masks" in record]
    layers = [[round(float(share), 4) for share in masks.mean(axis=0)] for masks in records]
    last = metrics[-1]
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "server": last.accuracy if last.accuracy_of == "server" else None,
        "clients": last.clients_accuracy,
        "spread": last.clients_spread,
        "curve": [(line.round, line.accuracy) for line in metrics if line.accuracy is not None],
        "bytes": (total(metrics, "bytes_down") or 0) + (total(metrics, "bytes_up") or 0),
        "rounds": last.round,
        **{key: last.value(key) for key in _OF_MODES},
        "layers": layers,
    }


@contextmanager
def _kept_by_clients(folder: Path) -> Iterator[None]:
    before = os.environ.get("TEPAL_CACHE")
    os.environ["TEPAL_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TEPAL_CACHE"]
        else:
            os.environ["TEPAL_CACHE"] = before


def trained(cell: Cell, place: Place, **files: str | float) -> Values:
    """A cell whose options are a run: `config`, `clients`. `files`: keys of the config that depend on the machine."""
    config = dict(cell.options["config"])
    name = str(config.get("dataset", ""))
    if name in place.data and "dataset" not in files:
        files["dataset-path"] = str(place.data[name])
    return measured(config | files, int(cell.options["clients"]), place.folder / "runs" / cell.name)


def mean_text(values: Sequence[float]) -> str | None:
    """Mean and standard deviation over seeds, as a table has them; None of none."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return f"{mean:.4f} ± {stdev(values):.4f}" if len(values) > 1 else f"{mean:.4f}"


def curves(methods: Mapping[str, Sequence[Values]], key: str, title: str, caption: str) -> Figure:
    """Accuracy over rounds by method: the mean over its seeds."""
    known = {label: cells for label, cells in methods.items() if cells}
    rounds = max((of["rounds"] for cells in known.values() for of in cells), default=1)
    plot = empty_plot("round", "accuracy", rounds=rounds)
    for label, cells in known.items():
        points = list(zip(*(of["curve"] for of in cells), strict=False))
        plot.add_scatter(
            x=[each[0][0] for each in points], y=[sum(score for _, score in each) / len(each) for each in points],
            name=label, **_look(label),
        )  # fmt: skip
    return Figure(key, title, caption, plot)


def by_setting(
    methods: Mapping[str, Mapping[Any, Sequence[float]]], key: str, title: str, x_title: str, caption: str
) -> Figure:
    """The mean over seeds by setting, a line for each method; settings as words stand side by side."""
    plot = empty_plot(x_title, "accuracy")
    for label, values in methods.items():
        known = {setting: scores for setting, scores in values.items() if scores}
        plot.add_scatter(
            x=[*known], y=[sum(scores) / len(scores) for scores in known.values()], name=label, **_look(label)
        )
    plot.update_xaxes(type="category")
    return Figure(key, title, caption, plot)


def _look(label: str) -> dict[str, Any]:
    """Colour and mark of a method, by its name: a strategy's are the same on all pages. The paper's own are grey."""
    if label == PAPER:
        return {"mode": "lines+markers", "line": {"dash": "dash"}, "meta": {"role": "fedavg"}}
    name = re.sub("[^a-z0-9]", "", label.lower())
    symbol = looks([name])[name].symbol
    return {"mode": "lines+markers", "marker": {"symbol": symbol}, "meta": {"role": f"{LOOK}{name}"}}
