"""The headline figures of a run: its score, bytes, rounds, time and refused replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tepal.records.columns import UNKNOWN, bytes_text, score_text, seconds_text
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import add, measured_by, savings, total
from tepal.report.round_figures import TEST_DATA
from tepal.report.templates import render


def headlines_html(
    config: Mapping[str, Any], metrics: Sequence[RoundRecord], summary: Mapping[str, Any], *, ended: bool
) -> Markup:
    """The headline figures, as the content of a `<dl>`."""
    by, planned = measured_by(metrics), config.get("num-server-rounds")
    score = summary.get(by.key)
    down, up = summary.get("bytes_down"), summary.get("bytes_up")
    ratio, fedavg = summary.get("bytes_vs_fedavg"), total(metrics, "bytes_fedavg")
    scored = [line for line in metrics if line.value(by.key) is not None]
    if score is None:
        where = "no round reported one"
    elif scored and scored[-1].value(by.key) == score:
        short = TEST_DATA.get(str(scored[-1].accuracy_of), ("test data not named", ""))[0]
        where = f"{short}, round {scored[-1].round}"
    else:
        where = "of the final model"
    training = total(metrics, "seconds_train")
    saved = savings(add(down, up), summary.get("bytes_plain"), fedavg)
    parts = "" if saved is None else f"; {saved[0]:.4f} by the strategy × {saved[1]:.4f} by the encoding"
    lost = sum(len(line.lost) for line in metrics)
    refused = summary.get("refused_replies")
    headlines = (
        (
            f"{'Final' if ended else 'Latest'} {by.name}",
            UNKNOWN if score is None else f"{100 * score:.2f} %" if by.share else score_text(score),
            where,
        ),
        ("Transferred bytes", bytes_text(add(down, up)), f"{bytes_text(down)} down, {bytes_text(up)} up"),
        (
            "Relative to FedAvg",
            UNKNOWN if ratio is None else f"{ratio:.4f}",
            "FedAvg's bytes are not known" if fedavg is None else f"FedAvg would transfer {bytes_text(fedavg)}{parts}",
        ),
        ("Rounds", str(summary.get("rounds", UNKNOWN)), f"of {planned} planned" if planned else ""),
        (
            "Time",
            seconds_text(summary.get("seconds")),
            "" if training is None or not metrics else f"{seconds_text(training)} of it training",
        ),
        ("Refused replies", UNKNOWN if refused is None else str(refused), f"{lost} more lost" if lost else "none lost"),
    )  # name, figure, small print
    return render("headlines.html", headlines=headlines, unknown=UNKNOWN)
