"""The figures of a run over its rounds: scores, bytes per round, and bytes in total against FedAvg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from tepal.records.round_record import COLUMNS, RoundRecord
from tepal.records.run_directory import add, measured_by
from tepal.report.page import Figure, add_curve, cumulative, empty_plot, scaled, thin, unit_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

# The test data of a score, by `accuracy_of`: (short, for legends; long, for sentences).
TEST_DATA = {
    "server": ("server's test data", "on the server's held-out data, the model after the round's merge"),
    "clients": (
        "clients' test data",
        "on the clients' own test splits, weighted by their sizes, the model after the round's merge",
    ),
    "personal": (
        "clients' personal models",
        "of each client's personal model on its own test split, the mean over the clients, after the round's training",
    ),
}
Lines = Sequence[RoundRecord]
_NO_BYTES = "The bytes of this run's rounds are not known."


def frozen_after(metrics: Lines, summary: Mapping[str, Any]) -> int | None:
    """The round after which query and key are frozen; None if they are not, or not yet."""
    frozen = [line.round for line in metrics if line.phase == "frozen"]
    stated = summary.get("frozen_after")
    if type(stated) is int and metrics and stated <= metrics[-1].round:
        return stated
    return min(frozen) - 1 if frozen else None


def figures(metrics: Lines, summary: Mapping[str, Any]) -> list[Figure]:
    """The figures. Round 0, the initial model, has scores but transfers nothing, so it has no bar."""
    trained = [line for line in metrics if line.round > 0]
    freeze = frozen_after(metrics, summary)
    sent = transferred(metrics)
    whole = cumulative([0 if line.round == 0 else line.bytes_fedavg for line in metrics])
    drawn = [
        *_score_figures(measured_by(metrics).key, metrics, sent, freeze),
        *_score_figures("loss", metrics, sent, freeze),
        _bytes_per_round(trained, freeze),
        _bytes_against_fedavg(metrics, sent, whole, freeze),
        *_encoded_per_round(trained),
        *_left_out_per_round(trained),
        *_budget_per_round(trained),
    ]
    for figure in drawn:
        if figure.plot is not None:
            thin(figure.plot)
    return drawn


def transferred(metrics: Lines) -> list[float | None]:
    """Payload bytes of all clients, both ways, up to and including each round; unknown after an unknown one."""
    each = (add(line.bytes_down, line.bytes_up) for line in metrics)
    # The initial model's score is at the origin even where its line has no bytes.
    return cumulative(0 if n is None and line.round == 0 else n for n, line in zip(each, metrics, strict=True))


def _score_figures(key: str, metrics: Lines, sent: Sequence[float | None], freeze: int | None) -> list[Figure]:
    curves: dict[str, list[tuple[int, float | None, float]]] = {}
    kinds, training = set(), COLUMNS["train_loss"].heading
    for line, bytes_sent in zip(metrics, sent, strict=True):
        if (score := line.value(key)) is not None:
            kind = line.accuracy_of
            kinds.add(kind)
            short = TEST_DATA.get(str(kind), (str(kind or "data not named"), ""))[0]
            curves.setdefault(short, []).append((line.round, bytes_sent, score))
    if key == "loss":
        curves = {f"loss, {name}": points for name, points in curves.items()}
        for line, bytes_sent in zip(metrics, sent, strict=True):
            if line.train_loss is not None:
                curves.setdefault(training, []).append((line.round, bytes_sent, line.train_loss))

    heading = COLUMNS[key].heading
    name = heading[0].upper() + heading[1:]
    titles = f"{name} per round", f"{name} over transferred bytes"
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
    if key == "loss" and training in curves:
        measured += " Training loss: mean over the clients of the round, during their local training."
    fmt = ".2%" if key == "accuracy" else ".4f"
    known = [bytes_sent for bytes_sent in sent if bytes_sent is not None]
    divisor, unit = unit_of(max(known, default=0))
    per_round = empty_plot("round", name, rounds=len(metrics))
    per_byte = empty_plot(f"transferred so far, down and up, all clients ({unit})", name)
    placed = 0
    for role, (label, points) in zip(cycle(("main", "second", "third")), curves.items(), strict=False):
        rounds, _, scores = zip(*points, strict=True)
        add_curve(per_round, rounds, scores, name=label, role=role, hover=f"round %{{x}}: %{{y:{fmt}}}")
        at = [(bytes_sent / divisor, score, number) for number, bytes_sent, score in points if bytes_sent is not None]
        placed += len(at)
        add_curve(
            per_byte, [x for x, _, _ in at], [y for _, y, _ in at], customdata=[number for *_, number in at],
            name=label, role=role, hover=f"%{{x:.4~g}} {unit}, after round %{{customdata}}: %{{y:{fmt}}}",
        )  # fmt: skip
    _mark_freeze(per_round, freeze, freeze, [line.round for line in metrics])
    if placed:
        _mark_freeze(per_byte, freeze, _at_freeze(metrics, sent, freeze, divisor), [b / divisor for b in known])
    if key == "accuracy":
        for plot in (per_round, per_byte):
            plot.update_yaxes(tickformat=".4~%")
    caption = "The same scores over the payload bytes transferred up to and including their round."
    return [
        Figure(f"{key}-rounds", titles[0], measured, per_round),
        Figure(f"{key}-bytes", titles[1], caption if placed else _NO_BYTES, per_byte if placed else None),
    ]


def _bytes_per_round(trained: Lines, freeze: int | None) -> Figure:
    key, title = "bytes-rounds", "Transferred bytes per round"
    values = [each for line in trained for each in (line.bytes_down, line.bytes_up, line.bytes_fedavg)]
    if not any(value is not None for value in values):
        why = _NO_BYTES if trained else "No round has ended yet."
        return Figure(key, title, why, None)
    rounds = [line.round for line in trained]
    highest = max((add(line.bytes_down, line.bytes_up) or 0 for line in trained), default=0)
    divisor, unit = unit_of(max(highest, *(value or 0 for value in values)))
    plot = empty_plot("round", f"payload ({unit})", rounds=len(trained))
    hover = f"round %{{x}}: %{{y:.4~g}} {unit}"
    down, up = [line.bytes_down for line in trained], [line.bytes_up for line in trained]
    for label, each, role in (("down, to clients", down, "down"), ("up, from clients", up, "up")):
        bars = [scaled(value, divisor) for value in each]
        plot.add_bar(x=rounds, y=bars, name=label, meta={"role": role}, hovertemplate=hover)
    caption = (
        "Payload bytes of all clients by round, down and up. Where clients score the model after a round, as after the "
        "last, sending it to them counts in that round."
    )
    fedavg = [scaled(line.bytes_fedavg, divisor) for line in trained]
    if any(value is not None for value in fedavg):
        add_curve(
            plot, rounds, fedavg, name="FedAvg, calculated", role="fedavg", hover=hover,
            mode="lines+markers" if len(rounds) == 1 else "lines", line={"dash": "dash", "shape": "hvh"},
        )  # fmt: skip
        caption += " Dashed: what FedAvg would have transferred in the same rounds with the same clients, down and up."
    else:
        caption += " What FedAvg would have transferred is not known."
    top = max(highest, *(line.bytes_fedavg or 0 for line in trained), 0) / divisor
    plot.update_layout(barmode="stack")
    plot.update_yaxes(range=[0, 1.08 * top or 1])
    # Between two bars, where the change is.
    _mark_freeze(plot, freeze, None if freeze is None else freeze + 0.5, [0.5, rounds[-1] + 0.5])
    return Figure(key, title, caption, plot)


def _encoded_per_round(trained: Lines) -> list[Figure]:
    """The figure of what the encoding makes of the values; none for a run without an encoding."""
    both = [(line.round, add(line.bytes_down, line.bytes_up), line.bytes_plain) for line in trained]
    shares = [(number, sent / plain) for number, sent, plain in both if sent is not None and plain]
    if all(share == 1 for _, share in shares):
        return []
    plot = empty_plot("round", "share of the bytes without an encoding", rounds=len(trained))
    rounds, values = zip(*shares, strict=True)
    add_curve(plot, rounds, values, name="this run", role="main", hover="round %{x}: %{y:.3~%}")
    plot.update_yaxes(tickformat=".3~%", rangemode="tozero")
    caption = (
        "Payload bytes of a round, down and up, as a share of those of the same values without an encoding. Of "
        "float32, 3 % are about one bit for each value. A client that is sent its first values is sent more bits."
    )
    return [Figure("encoded-rounds", "Share of bytes that the encoding leaves", caption, plot)]


def _left_out_per_round(trained: Lines) -> list[Figure]:
    """The figure of what encodings in `auto` leave out; none for a run without one."""
    plot = empty_plot("round", "left out, share of the squared norm", rounds=len(trained))
    for way in ("down", "up"):
        key = f"wire_left_out_{way}"
        if known := [(line.round, share) for line in trained if (share := line.value(key)) is not None]:
            rounds, shares = zip(*known, strict=True)
            add_curve(plot, rounds, shares, name=way, role=way, hover="round %{x}: %{y:.3~%}")
    if not plot.data:
        return []
    plot.update_yaxes(tickformat=".3~%", rangemode="tozero")
    caption = (
        "Share of the squared norm of the encoded changes that is left out, by round. Down: mean over messages with "
        "changes. Up: mean over clients whose replies were merged. With error feedback it is sent in later rounds; in "
        "uploads that are scaled up it is not."
    )
    return [Figure("left-out-rounds", "Share of the changes that the encoding leaves out", caption, plot)]


def _budget_per_round(trained: Lines) -> list[Figure]:
    """The figure of the bytes within a round's budget; none for a run without one."""
    lines = [line for line in trained if line.wire_budget is not None]
    if not lines:
        return []
    rounds = [line.round for line in lines]
    both = [add(line.wire_budget_down, line.wire_budget_up) or 0 for line in lines]
    divisor, unit = unit_of(max(*both, *(line.wire_budget or 0 for line in lines)))
    plot = empty_plot("round", f"payload ({unit})", rounds=len(trained))
    hover = f"round %{{x}}: %{{y:.4~g}} {unit}"
    for way in ("down", "up"):
        bars = [scaled(line.value(f"wire_budget_{way}"), divisor) for line in lines]
        plot.add_bar(x=rounds, y=bars, name=way, meta={"role": way}, hovertemplate=hover)
    budget = [scaled(line.wire_budget, divisor) for line in lines]
    add_curve(
        plot, rounds, budget, name="budget", role="fedavg", hover=hover,
        mode="lines+markers" if len(rounds) == 1 else "lines", line={"dash": "dash", "shape": "hvh"},
    )  # fmt: skip
    plot.update_layout(barmode="stack")
    plot.update_yaxes(rangemode="tozero")
    caption = (
        "Payload bytes that count in the round's budget (dashed): changes sent to clients, and uploads. Whole parts "
        "for new clients, resends, and models that are sent only to be scored do not count."
    )
    return [Figure("budget-rounds", "Bytes of the budget", caption, plot)]


def _bytes_against_fedavg(
    metrics: Lines, sent: Sequence[float | None], whole: Sequence[float | None], freeze: int | None
) -> Figure:
    key, title = "bytes-total", "Transferred bytes in total, compared with FedAvg"
    if not any(line.round > 0 for line in metrics):
        return Figure(key, title, "No round has ended yet.", None)
    known = [value for value in (*sent, *whole) if value is not None]
    if max(known, default=0) == 0:
        return Figure(key, title, _NO_BYTES, None)
    divisor, unit = unit_of(max(known))
    rounds = [line.round for line in metrics]
    plot = empty_plot("round", f"payload ({unit})", rounds=len(metrics))
    drawn = []
    for label, values, role, dash in (("this run", sent, "main", "solid"), ("FedAvg", whole, "fedavg", "dash")):
        # Round 0 alone is the origin, no measurement.
        if any(value is not None and number > 0 for number, value in zip(rounds, values, strict=True)):
            drawn.append(label)
            add_curve(
                plot, rounds, [scaled(value, divisor) for value in values], name=label, role=role, line={"dash": dash},
                mode="lines+markers" if role == "main" else "lines", hover=f"after round %{{x}}: %{{y:.4~g}} {unit}",
            )  # fmt: skip
    plot.update_yaxes(rangemode="tozero")
    _mark_freeze(plot, freeze, freeze, rounds)
    caption = "Payload bytes since the start, down and up, and FedAvg's for the same rounds and clients."
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
    at = [bytes_sent for line, bytes_sent in zip(metrics, sent, strict=True) if line.round == freeze]
    return scaled(at[0], divisor) if at else None
