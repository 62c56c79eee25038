"""The tables of a run's rounds: every round, and everything that went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tepal.records.run_directory import ACCURACY, measured_by
from tepal.report.page import table_html
from tepal.report.run_files import Lines
from tepal.report.terminal import bytes_text, score_text, seconds_text, step_text

# Keys of a round under which clients stand that something went wrong with, and the word for each.
TROUBLE = {"refused": "refused", "lost": "lost", "late": "late", "left_out": "left out", "notes": "got over"}

# Column of the table of rounds: heading, key in metrics.jsonl, how a value is written.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("round", "round", str),
    ("phase", "phase", str),
    ("asked", "clients_asked", str),
    ("replied", "clients_replied", str),
    ("refused", "refused", lambda value: str(len(value))),
    ("lost", "lost", lambda value: str(len(value))),
    ("accuracy", "accuracy", score_text),
    ("RMSE", "rmse", score_text),
    ("loss", "loss", score_text),
    ("macro-F1", "macro_f1", score_text),
    ("perplexity", "perplexity", lambda value: f"{value:.4g}"),
    ("training loss", "train_loss", score_text),
    ("learning rate", "learning_rate", lambda value: f"{value:.3g}"),
    ("down", "bytes_down", bytes_text),
    ("up", "bytes_up", bytes_text),
    ("names, digests", "bytes_overhead", bytes_text),
    ("FedAvg", "bytes_fedavg", bytes_text),
    ("sent again", "resent", str),
    ("time", "seconds", seconds_text),
    ("of it training", "seconds_train", seconds_text),
    ("local step", "step_seconds", step_text),
)

_OF_TASKS = ("macro_f1", "perplexity", "rmse")


def trouble_html(metrics: Lines, most: int | None = None) -> str:
    """Everything that went wrong, or the last `most`; "" where nothing did."""
    rows = [
        (line["round"], reply.get("client"), TROUBLE[what], reply.get("reason") or "no reason given")
        for line in metrics
        for what in TROUBLE
        for reply in line.get(what) or ()
    ]
    if not rows:
        return ""
    rows = rows if most is None else rows[-most:]
    table = table_html("What went wrong", ("round", "client", "what", "reason"), rows, words={1, 2, 3})
    return f"<section><h2>What went wrong</h2>{table}</section>"


def rounds_html(metrics: Lines, most: int | None = None) -> str:
    """The table of all rounds, or of the last `most`, folded."""
    if not metrics:
        return ""
    # Some figures belong to some tasks alone.
    absent = {key for key in _OF_TASKS if not _known(metrics, key)}
    if measured_by(metrics) != ACCURACY:
        absent.add(ACCURACY.key)
    columns = [column for column in COLUMNS if column[1] not in absent]
    shown = metrics if most is None else metrics[-most:]
    rows = [["–" if line.get(key) is None else text(line[key]) for _, key, text in columns] for line in shown]
    table = table_html("Every round", [heading for heading, _, _ in columns], rows, words={1})
    what = "Every round" if len(shown) == len(metrics) else f"The last {len(shown)} of {len(metrics)} rounds"
    return f"<details><summary>{what}, as a table</summary>{table}</details>"


def _known(metrics: Lines, key: str) -> bool:
    return any(line.get(key) is not None for line in metrics)
