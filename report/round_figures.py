"""The figures of a run over its rounds: scores, bytes per round, and bytes in total against FedAvg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tepal.records.run_directory import add, measured_by
from tepal.report.page import Figure, cumulative, empty_plot, scaled, thin, unit_of
from tepal.report.run_files import Lines

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Whose test data an accuracy is of, as `accuracy_of` says it: (short, for legends; long, for sentences).
TEST_DATA = {
    "server": ("server's test data", "on the server's held-out data, the model after the round's merge"),
    "clients": (
        "clients' test data",
        "on the clients' own test splits, weighted by their sizes, the model after the round's merge",
    ),
    "personal": (
        "clients' own models",
        "of each client's own model on its own test split, the mean over the clients, after the round's training",
    ),
}


def frozen_after(metrics: Lines, summary: Mapping[str, Any]) -> int | None:
    """The round after which query and key are fixed; None if the run has no such point, or has not come to it."""
    frozen = [line["round"] for line in metrics if line.get("phase") == "frozen"]
    stated = summary.get("frozen_after")
    if type(stated) is int and metrics and stated <= metrics[-1]["round"]:
        return stated
    return min(frozen) - 1 if frozen else None


def figures(metrics: Lines, summary: Mapping[str, Any]) -> list[Figure]:
    """The six figures. Round 0, the initial model, belongs to the scores but moves nothing, so it has no bar."""
    trained = [line for line in metrics if line["round"] > 0]
    freeze = frozen_after(metrics, summary)
    moved = [add(line.get("bytes_down"), line.get("bytes_up")) for line in metrics]
    # The initial model's score is at the origin even where its line names no bytes.
    sent = cumulative([0 if m is None and line["round"] == 0 else m for m, line in zip(moved, metrics, strict=True)])
    whole = cumulative([0 if line["round"] == 0 else line.get("bytes_fedavg") for line in metrics])
    drawn = [
        *_score_figures(measured_by(metrics).key, metrics, sent, freeze),
        *_score_figures("loss", metrics, sent, freeze),
        _bytes_per_round(trained, freeze),
        _bytes_against_fedavg(metrics, sent, whole, freeze),
    ]
    for figure in drawn:
        if figure.plot is not None:
            thin(figure.plot)
    return drawn


def _score_figures(key: str, metrics: Lines, sent: Sequence[float | None], freeze: int | None) -> list[Figure]:
    curves: dict[str, list[tuple[int, float | None, float]]] = {}
    kinds = set()
    for line, bytes_sent in zip(metrics, sent, strict=True):
        if line.get(key) is not None:
            kind = line.get("accuracy_of")
            kinds.add(kind)
            short = TEST_DATA.get(str(kind), (str(kind or "data not named"), ""))[0]
            curves.setdefault(short, []).append((line["round"], bytes_sent, line[key]))
    if key == "loss":
        curves = {f"loss, {name}": points for name, points in curves.items()}
        for line, bytes_sent in zip(metrics, sent, strict=True):
            if line.get("train_loss") is not None:
                curves.setdefault("training loss", []).append((line["round"], bytes_sent, line["train_loss"]))

    name = {"rmse": "RMSE"}.get(key, key.capitalize())
    titles = f"{name} per round", f"{name} per byte sent"
    if not curves:
        why = f"No {key} is known: no round of this run reported one."
        return [Figure(f"{key}-rounds", titles[0], why, None), Figure(f"{key}-bytes", titles[1], why, None)]

    said = "; ".join(TEST_DATA[kind][1] for kind in TEST_DATA if kind in kinds)
    if said:
        measured = f"{name} {said}."
    elif kinds:
        measured = f"{name} as reported; the run does not say on whose data."
    else:
        measured = "No test loss is known."
    if key == "loss" and "training loss" in curves:
        measured += " Training loss: mean over the clients of the round, during their local training."
    fmt = ".2%" if key == "accuracy" else ".4f"
    roles = ["main", "second", "third"]

    per_round = empty_plot("round", name, rounds=len(metrics))
    for role, (label, points) in zip(roles * len(curves), curves.items(), strict=False):
        per_round.add_scatter(
            x=[point[0] for point in points],
            y=[point[2] for point in points],
            name=label,
            mode="lines+markers",
            meta={"role": role},
            hovertemplate=f"round %{{x}}: %{{y:{fmt}}}",
        )
    _mark_freeze(per_round, freeze, freeze, [line["round"] for line in metrics])

    known = [bytes_sent for bytes_sent in sent if bytes_sent is not None]
    if not any(point[1] is not None for points in curves.values() for point in points):
        per_byte = None
        caption = "The bytes of this run's rounds are not known."
    else:
        divisor, unit = unit_of(max(known))
        per_byte = empty_plot(f"sent so far, down and up, all clients ({unit})", name)
        for role, (label, points) in zip(roles * len(curves), curves.items(), strict=False):
            placed = [point for point in points if point[1] is not None]
            per_byte.add_scatter(
                x=[point[1] / divisor for point in placed],  # type: ignore[operator]
                y=[point[2] for point in placed],
                customdata=[point[0] for point in placed],
                name=label,
                mode="lines+markers",
                meta={"role": role},
                hovertemplate=f"%{{x:.4~g}} {unit}, after round %{{customdata}}: %{{y:{fmt}}}",
            )
        _mark_freeze(per_byte, freeze, _at_freeze(metrics, sent, freeze, divisor), [b / divisor for b in known])
        caption = "The same scores over the payload bytes sent up to and including their round."
    for plot in (per_round, per_byte):
        if plot is not None and key == "accuracy":
            plot.update_yaxes(tickformat=".4~%")
    return [
        Figure(f"{key}-rounds", titles[0], measured, per_round),
        Figure(f"{key}-bytes", titles[1], caption, per_byte),
    ]


def _bytes_per_round(trained: Lines, freeze: int | None) -> Figure:
    key, title = "bytes-rounds", "Bytes per round"
    values = [line.get(name) for line in trained for name in ("bytes_down", "bytes_up", "bytes_fedavg")]
    if not any(value is not None for value in values):
        why = "The bytes of this run's rounds are not known." if trained else "No round has ended yet."
        return Figure(key, title, why, None)
    rounds = [line["round"] for line in trained]
    highest = max((add(line.get("bytes_down"), line.get("bytes_up")) or 0 for line in trained), default=0)
    divisor, unit = unit_of(max(highest, *(value or 0 for value in values)))
    plot = empty_plot("round", unit, rounds=len(trained))
    for label, name, role in (("down, to clients", "bytes_down", "down"), ("up, from clients", "bytes_up", "up")):
        plot.add_bar(
            x=rounds,
            y=[scaled(line.get(name), divisor) for line in trained],
            name=label,
            meta={"role": role},
            hovertemplate=f"round %{{x}}: %{{y:.4~g}} {unit}",
        )
    caption = (
        "Payload bytes of all clients, down and up. Where clients score the model after a round, as after the last, "
        "its way down counts in that round."
    )
    fedavg = [scaled(line.get("bytes_fedavg"), divisor) for line in trained]
    if any(value is not None for value in fedavg):
        plot.add_scatter(
            x=rounds,
            y=fedavg,
            name="FedAvg would move",
            mode="lines+markers" if len(rounds) == 1 else "lines",
            line={"dash": "dash", "shape": "hvh"},
            meta={"role": "fedavg"},
            hovertemplate=f"round %{{x}}: %{{y:.4~g}} {unit}",
        )
        caption += " Dashed: what FedAvg would have moved in the same rounds with the same clients, down and up."
    else:
        caption += " What FedAvg would have moved is not known."
    top = max(highest, *(line.get("bytes_fedavg") or 0 for line in trained), 0) / divisor
    plot.update_layout(barmode="stack")
    plot.update_yaxes(range=[0, 1.08 * top or 1])
    # Between two bars, where the change is.
    _mark_freeze(plot, freeze, None if freeze is None else freeze + 0.5, [0.5, rounds[-1] + 0.5])
    return Figure(key, title, caption, plot)


def _bytes_against_fedavg(
    metrics: Lines, sent: Sequence[float | None], whole: Sequence[float | None], freeze: int | None
) -> Figure:
    key, title = "bytes-total", "Bytes in total against FedAvg"
    if not any(line["round"] > 0 for line in metrics):
        return Figure(key, title, "No round has ended yet.", None)
    known = [value for value in (*sent, *whole) if value is not None]
    if max(known, default=0) == 0:
        return Figure(key, title, "The bytes of this run's rounds are not known.", None)
    divisor, unit = unit_of(max(known))
    rounds = [line["round"] for line in metrics]
    plot = empty_plot("round", unit, rounds=len(metrics))
    drawn = []
    for label, values, role, dash in (("this run", sent, "main", "solid"), ("FedAvg", whole, "fedavg", "dash")):
        # Round 0 alone is the origin, no measurement.
        if any(value is not None and number > 0 for number, value in zip(rounds, values, strict=True)):
            drawn.append(label)
            plot.add_scatter(
                x=rounds,
                y=[scaled(value, divisor) for value in values],
                name=label,
                mode="lines+markers" if role == "main" else "lines",
                line={"dash": dash},
                meta={"role": role},
                hovertemplate=f"after round %{{x}}: %{{y:.4~g}} {unit}",
            )
    plot.update_yaxes(rangemode="tozero")
    _mark_freeze(plot, freeze, freeze, rounds)
    caption = "Payload bytes since the start, down and up, beside FedAvg's for the same rounds and clients."
    if len(drawn) < 2:
        missing = "FedAvg's bytes are" if "this run" in drawn else "This run's own bytes are"
        caption = f"Payload bytes since the start, down and up. {missing} not known, so there is no comparison."
    return Figure(key, title, caption, plot)


def _mark_freeze(plot: go.Figure, freeze: int | None, x: float | None, xs: Sequence[float]) -> None:
    if freeze is None or x is None:
        return
    label = f"query/key frozen after round {freeze}" if freeze else "query/key frozen from the start"
    share = (x - min(xs)) / ((max(xs) - min(xs)) or 1)
    plot.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, yref="paper", line={"width": 1.5, "dash": "dot"})
    # Above the plot, where no curve runs; towards the side that has the room.
    anchor = "left" if share < 0.4 else "right" if share > 0.6 else "center"
    plot.add_annotation(
        x=x, y=1, yref="paper", yanchor="bottom", yshift=3, xanchor=anchor, text=label, showarrow=False, font_size=12
    )


def _at_freeze(metrics: Lines, sent: Sequence[float | None], freeze: int | None, divisor: float) -> float | None:
    if freeze == 0:
        return 0
    at = [bytes_sent for line, bytes_sent in zip(metrics, sent, strict=True) if line["round"] == freeze]
    return scaled(at[0], divisor) if at else None
