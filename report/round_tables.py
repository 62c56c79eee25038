"""The tables of a run's rounds: every round, and every incident."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from tepal.records.columns import Column
from tepal.records.round_record import COLUMNS, WIRE, RoundRecord, columns
from tepal.records.run_directory import ACCURACY, measured_by
from tepal.report.table import Table
from tepal.report.templates import render

_SHOWN = columns(
    "round", "phase", "clients_asked", "clients_replied", "refused", "lost", "accuracy", "accuracy_of", "rmse", "loss",
    "macro_f1", "perplexity", "calibration_error", "entropy_threshold", "flagged_letters", "flagged_noise",
    "flagged_covered", "train_loss", "learning_rate", "bytes_down", "bytes_up", "bytes_overhead", "bytes_fedavg", *WIRE,
    "resent", "seconds", "seconds_train", "step_seconds",
)  # fmt: skip
_OF_SOME_RUNS = (
    "macro_f1", "perplexity", "rmse", "calibration_error", "entropy_threshold", "flagged_letters", "flagged_noise",
    "flagged_covered", *WIRE,
)  # fmt: skip
_INCIDENTS = (COLUMNS["round"], *(Column(heading, left=True) for heading in ("client", "incident", "reason")))


def trouble_html(metrics: Sequence[RoundRecord], most: int | None = None) -> Markup:
    """The table of all incidents, or of the last `most`; "" where there is none."""
    rows = [
        (line.round, client, COLUMNS[kind].heading, reason)
        for line in metrics
        for kind, client, reason in line.incidents()
    ]
    if not rows:
        return Markup()
    shown = rows if most is None else rows[-most:]
    note = "" if len(shown) == len(rows) else f"The last {len(shown):,} of {len(rows):,}."
    return render("incidents.html", note=note, table=Table("Incidents", _INCIDENTS, shown).html())


def mixed(metrics: Sequence[RoundRecord]) -> bool:
    """Whether the scores of a run are not all on the same test data."""
    return len({line.accuracy_of for line in metrics} - {None}) > 1


def rounds_html(metrics: Sequence[RoundRecord], most: int | None = None) -> Markup:
    """The table of all rounds, or of the last `most`, folded."""
    if not metrics:
        return Markup()
    absent = {key for key in _OF_SOME_RUNS if all(line.value(key) is None for line in metrics)}
    if measured_by(metrics) != ACCURACY:
        absent.add(ACCURACY.key)
    if not mixed(metrics):
        absent.add("accuracy_of")
    shown = metrics if most is None else metrics[-most:]
    kept = [column for column in _SHOWN if column.key not in absent]
    table = Table("Every round", kept, [[line.value(each.key) for each in kept] for line in shown])
    what = "Every round" if len(shown) == len(metrics) else f"The last {len(shown)} of {len(metrics)} rounds"
    return render("folded.html", summary=f"{what}, as a table", note="", table=table.html())
