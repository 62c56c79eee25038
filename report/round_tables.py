"""The tables of a run's rounds: every round, and every incident."""

from __future__ import annotations

from markupsafe import Markup

from tepal.records.run_directory import ACCURACY, measured_by
from tepal.report.run_files import Lines
from tepal.report.table import Column, Table
from tepal.report.templates import render
from tepal.report.terminal import bytes_text, score_text, seconds_text, step_text

# Keys of a round under which clients with an incident stand, and the word for each.
TROUBLE = {"refused": "refused", "lost": "lost", "late": "late", "left_out": "left out", "notes": "recovered"}

COLUMNS = (
    Column("round", "round"),
    Column("phase", "phase", left=True),
    Column("asked", "clients_asked", "clients"),
    Column("replied", "clients_replied", "clients"),
    Column("refused", "refused", "replies", lambda value: str(len(value))),
    Column("lost", "lost", "replies", lambda value: str(len(value))),
    Column("accuracy", "accuracy", text=score_text),
    Column("RMSE", "rmse", text=score_text),
    Column("loss", "loss", text=score_text),
    Column("macro-F1", "macro_f1", text=score_text),
    Column("perplexity", "perplexity", text=lambda value: f"{value:.4g}"),
    Column("training loss", "train_loss", text=score_text),
    Column("learning rate", "learning_rate", text=lambda value: f"{value:.3g}"),
    Column("down", "bytes_down", "bytes", bytes_text),
    Column("up", "bytes_up", "bytes", bytes_text),
    Column("names, digests", "bytes_overhead", "bytes", bytes_text),
    Column("FedAvg", "bytes_fedavg", "bytes", bytes_text),
    Column("sent again", "resent", "parts"),
    Column("time", "seconds", text=seconds_text),
    Column("of it training", "seconds_train", text=seconds_text),
    Column("local step", "step_seconds", text=step_text),
)
"""Of the table of rounds; keys are those of metrics.jsonl."""

_INCIDENTS = (Column("round"), *(Column(heading, left=True) for heading in ("client", "incident", "reason")))
_OF_TASKS = ("macro_f1", "perplexity", "rmse")


def trouble_html(metrics: Lines, most: int | None = None) -> Markup:
    """Every incident, or the last `most`; "" where there is none."""
    rows = [
        (line["round"], reply.get("client"), TROUBLE[what], reply.get("reason") or "no reason given")
        for line in metrics
        for what in TROUBLE
        for reply in line.get(what) or ()
    ]
    if not rows:
        return Markup()
    table = Table("Incidents", _INCIDENTS, rows if most is None else rows[-most:])
    return render("incidents.html", table=table.html())


def rounds_html(metrics: Lines, most: int | None = None) -> Markup:
    """The table of all rounds, or of the last `most`, folded."""
    if not metrics:
        return Markup()
    # Some columns belong to some tasks alone.
    absent = {key for key in _OF_TASKS if all(line.get(key) is None for line in metrics)}
    if measured_by(metrics) != ACCURACY:
        absent.add(ACCURACY.key)
    shown = metrics if most is None else metrics[-most:]
    table = Table.of("Every round", (column for column in COLUMNS if column.key not in absent), shown)
    what = "Every round" if len(shown) == len(metrics) else f"The last {len(shown)} of {len(metrics)} rounds"
    return render("folded.html", summary=f"{what}, as a table", note="", table=table.html())
