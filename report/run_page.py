"""A run as one HTML page (`page.py`): figures, tables, config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from tepal.records.run_directory import (
    ACCURACY,
    BLOCKS,
    CLIENTS,
    REPORT,
    add,
    find_run,
    measured_by,
    read_config,
    read_json,
    read_label_counts,
    read_metrics,
    read_records,
    read_summary,
    summarise,
    total,
    write_whole,
)
from tepal.report.diagram import DIAGRAM_STYLE, diagram_html
from tepal.report.method_figures import Records, method_figures, travel_figures
from tepal.report.page import (
    Figure,
    config_html,
    cumulative,
    empty_plot,
    figure_html,
    page,
    scaled,
    table_html,
    thin,
    unit_of,
)
from tepal.report.terminal import UNKNOWN, bytes_text, score_text, seconds_text, step_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

Lines = Sequence[Mapping[str, Any]]

_MOST_CLIENTS = 300  # rows of a figure that can still be told apart

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


def write_report(run: Path) -> Path:
    """Write `report.html` for a run directory (or the `latest` link) and return its path.

    A run without `summary.json` (in progress, or stopped) gets the report of the rounds that have ended. Raises
    FileNotFoundError where there is no run, OSError naming the file where it cannot be written.
    """
    run = find_run(run)
    write_whole(run / REPORT, _page(run.name, RunFiles.of(run)).encode())
    return run / REPORT


@dataclass(frozen=True)
class RunFiles:
    """What a run has left until now, as it is read from its directory."""

    config: Mapping[str, Any]
    metrics: Lines
    written_summary: Mapping[str, Any] | None
    records: Records
    label_counts: Mapping[str, Sequence[int]]
    cells: Sequence[Mapping[str, Any]]
    clients: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(run: Path) -> RunFiles:
        """Those of a run directory."""
        return RunFiles(
            read_config(run), read_metrics(run), read_summary(run), read_records(run), read_label_counts(run),
            read_json(run / BLOCKS) or [], read_json(run / CLIENTS) or {},
        )  # fmt: skip

    @property
    def summary(self) -> dict[str, Any]:
        """As far as it is known."""
        return {**summarise(self.metrics, self.config), **(self.written_summary or {})}

    @property
    def title(self) -> str:
        """Strategy, model and dataset."""
        known = (self.summary.get("strategy"), self.summary.get("model"), self.config.get("dataset"))
        return " · ".join(str(each) for each in known if each)


def frozen_after(metrics: Lines, summary: Mapping[str, Any]) -> int | None:
    """The round after which query and key are fixed; None if the run has no such point, or has not come to it."""
    frozen = [line["round"] for line in metrics if line.get("phase") == "frozen"]
    stated = summary.get("frozen_after")
    if type(stated) is int and metrics and stated <= metrics[-1]["round"]:
        return stated
    return min(frozen) - 1 if frozen else None


# --- figures ----------------------------------------------------------------------------------------------------


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


def labels_figure(counts: Mapping[str, Sequence[int]]) -> Figure:
    """How the classes are spread over the clients, by what these told: client → examples of each class."""
    clients = sorted(counts, key=natural)
    shown = clients[:_MOST_CLIENTS]
    classes = max(map(len, counts.values()))
    rows = [[*counts[client], *[0] * (classes - len(counts[client]))] for client in shown]
    plot = empty_plot("class", "client")
    plot.add_heatmap(
        z=[[count / (sum(row) or 1) for count in row] for row in rows],
        y=shown,
        customdata=rows,
        showscale=False,
        xgap=1 if classes <= 20 else 0,
        ygap=1 if len(shown) <= 40 else 0,
        meta={"role": "second", "spoken": f"{len(shown)} clients, {classes} classes."},
        hovertemplate="%{y}, class %{x}: %{customdata} examples, %{z:.0%} of its own<extra></extra>",
    )
    plot.update_yaxes(autorange="reversed", type="category")
    plot.update_xaxes(rangemode="normal", **({"dtick": 1} if classes <= 20 else {}))
    total = sum(map(sum, counts.values()))
    caption = f"The darker, the larger the class's share of the client's own examples. {total:,} examples"
    caption += f"; the first {len(shown)} of {len(clients)} clients." if len(shown) < len(clients) else "."
    return Figure("labels", "Labels at the clients", caption, plot)


def natural(name: str) -> list[tuple[int, str]]:
    """By which client-2 comes before client-10."""
    return [(int(part or 0), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


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


# --- page ----------------------------------------------------------------------------------------------------


def drawn_of(run: RunFiles) -> dict[str, list[Figure]]:
    """All figures of a run, by section."""
    return {
        "figures": figures(run.metrics, run.summary),
        "travel": travel_figures(run.records, run.cells),
        "method": method_figures(run.records, run.metrics, natural),
        "clients": label_figures(run.label_counts),
    }


def _page(name: str, run: RunFiles) -> str:
    summary, metrics, drawn = run.summary, run.metrics, drawn_of(run)
    strategy, model, dataset = (
        str(each or "") for each in (summary.get("strategy"), summary.get("model"), run.config.get("dataset"))
    )
    sections = [
        ("figures", "Rounds and bytes", ""),
        ("travel", "What travels", last_diagram(run.records, run.cells)),
        ("method", f"What {strategy or 'the method'} tells", ""),
        ("clients", "Clients", clients_html(run.clients)),
    ]
    body = Template(_BODY).substitute(
        heading=escape(strategy or name),
        subtitle=escape(" on ".join(part for part in (model, dataset) if part) or "model and dataset not recorded"),
        run=escape(name),
        notice=_notice(metrics, run.config, run.written_summary is not None),
        headlines=headlines_html(run.config, metrics, summary, ended=run.written_summary is not None),
        sections="".join(
            f'<section aria-labelledby="{key}"><h2 id="{key}">{escape(heading)}</h2>{above}'
            f'<div class="figures">{"".join(map(figure_html, drawn[key]))}</div></section>'
            for key, heading, above in sections
            if above or drawn[key]
        ),
        replies=trouble_html(metrics),
        rounds=rounds_html(metrics),
        config=config_html(run.config),
        provenance=_provenance(metrics),
    )
    return page(run.title or name, body, chain.from_iterable(drawn.values()), style=DIAGRAM_STYLE)


def last_diagram(records: Records, cells: Sequence[Mapping[str, Any]]) -> str:
    """The block diagram of the last round that is known; "" of a model in one part."""
    told = [(number, record) for number, record in records if len(record.get("travel_up", ())) == len(cells) > 1]
    if not told:
        return ""
    number, record = told[-1]
    shares = {key: record[key].tolist() for key in ("travel_trains", "travel_down", "travel_up")}
    return diagram_html(cells, shares, f"In round {number}, the last: what clients trained, were sent and returned.")


def clients_html(clients: Mapping[str, Mapping[str, Any]]) -> str:
    """What each client did in the whole run, those with trouble first; "" where it is not known."""
    if not clients:
        return ""

    def trouble(name: str) -> tuple[int, Any]:
        return -(clients[name].get("refused", 0) + clients[name].get("lost", 0)), natural(name)

    names = sorted(clients, key=trouble)
    shown = names[:_MOST_CLIENTS]
    known = [
        column for column in CLIENT_COLUMNS if any(clients[name].get(column[1]) not in (None, "") for name in shown)
    ]
    rows = [
        (name, *("–" if clients[name].get(key) in (None, "") else text(clients[name][key]) for _, key, text in known))
        for name in shown
    ]
    words = {0, *(k for k, (_, key, _) in enumerate(known, start=1) if key == "reason")}
    table = table_html("Table of clients", ("client", *(heading for heading, _, _ in known)), rows, words=words)
    few = len(shown) < len(names)
    more = f"<p>The first {len(shown)} of {len(names)}, those with trouble first.</p>" if few else ""
    return f"<details><summary>Every client, as a table</summary>{more}{table}</details>"


# Column of the table of clients: heading, key in clients.json, how a value is written.
CLIENT_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rounds", "rounds", str),
    ("replied", "replied", str),
    ("refused", "refused", str),
    ("lost", "lost", str),
    ("examples", "examples", lambda value: f"{value:,}"),
    ("budget", "budget", lambda value: f"{value:g}"),
    ("down", "bytes_down", bytes_text),
    ("up", "bytes_up", bytes_text),
    ("time", "seconds", seconds_text),
    ("last trouble", "reason", str),
)


def label_figures(counts: Mapping[str, Sequence[int]]) -> list[Figure]:
    """`labels_figure`, where there is something to draw."""
    return [labels_figure(counts)] if counts else []


def _notice(metrics: Lines, config: Mapping[str, Any], ended: bool) -> str:
    done = metrics[-1]["round"] if metrics else 0
    planned = config.get("num-server-rounds")
    of = f" of {planned}" if planned else ""
    if ended and planned and done < planned:
        text = f"This run ended after round {done}{of}."
    elif ended:
        return ""
    elif done:
        text = (
            f"This run has no summary yet: it is in progress, or it was stopped. What follows covers {done}{of} rounds."
        )
    else:
        text = "No round of this run has ended yet, so there is nothing to draw."
    return f'<p class="notice" role="note">{escape(text)}</p>'


def _headlines(
    config: Mapping[str, Any], metrics: Lines, summary: Mapping[str, Any], *, ended: bool
) -> list[tuple[str, str, str]]:
    """(name, figure, small print) of each headline figure."""
    by, planned = measured_by(metrics), config.get("num-server-rounds")
    score = summary.get(by.key)
    moved = add(summary.get("bytes_down"), summary.get("bytes_up"))
    ratio, fedavg = summary.get("bytes_vs_fedavg"), total(metrics, "bytes_fedavg")
    scored = [line for line in metrics if line.get(by.key) is not None]
    if score is None:
        where = "no round reported one"
    elif scored and scored[-1][by.key] == score:
        short = TEST_DATA.get(str(scored[-1].get("accuracy_of")), ("test data not named", ""))[0]
        where = f"{short}, round {scored[-1]['round']}"
    else:
        where = "of the final model"
    training = total(metrics, "seconds_train")
    lost = sum(len(line.get("lost") or ()) for line in metrics)
    refused = summary.get("refused_replies")
    return [
        (
            f"{'Final' if ended else 'Latest'} {by.name}",
            UNKNOWN if score is None else f"{100 * score:.2f} %" if by.share else score_text(score),
            where,
        ),
        (
            "Bytes moved",
            bytes_text(moved),
            f"{bytes_text(summary.get('bytes_down'))} down, {bytes_text(summary.get('bytes_up'))} up",
        ),
        (
            "Relative to FedAvg",
            UNKNOWN if ratio is None else f"{ratio:.4f}",
            "FedAvg's bytes are not known" if fedavg is None else f"FedAvg would move {bytes_text(fedavg)}",
        ),
        ("Rounds", str(summary.get("rounds", UNKNOWN)), f"of {planned} planned" if planned else ""),
        (
            "Time",
            seconds_text(summary.get("seconds")),
            "" if training is None or not metrics else f"{seconds_text(training)} of it training",
        ),
        (
            "Refused replies",
            UNKNOWN if refused is None else str(refused),
            f"{lost} more never came" if lost else "none was lost",
        ),
    ]


def headlines_html(
    config: Mapping[str, Any], metrics: Lines, summary: Mapping[str, Any], *, ended: bool
) -> str:
    """The headline figures, for a `<dl>`."""
    return "".join(_headline(*figure) for figure in _headlines(config, metrics, summary, ended=ended))


def _headline(name: str, figure: str, small: str) -> str:
    quiet = ' class="unknown"' if figure == UNKNOWN else ""
    below = f"<dd>{escape(small)}</dd>" if small else ""
    return f"<div><dt>{escape(name)}</dt><dd{quiet}>{escape(figure)}</dd>{below}</div>"


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


def _known(metrics: Lines, key: str) -> bool:
    return any(line.get(key) is not None for line in metrics)


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


def _provenance(metrics: Lines) -> str:
    overhead = total(metrics, "bytes_overhead")
    beside = f" ({bytes_text(overhead)} in this run)" if metrics and overhead is not None else ""
    return (
        "<p>Bytes are payload, measured at the exchange: the encoded arrays that the server handed over for each "
        "client and that each client handed back, summed over the clients of a round. "
        f"Names and digests{beside} are counted apart; what the transport adds (framing, TLS) is not counted.</p>"
        "<p>FedAvg’s bytes are calculated, not run: every entry of the model, down and up, for the same clients in the "
        "same rounds.</p>"
        "<p>Time is the server’s clock, per round. Everything here is drawn from <code>config.toml</code>, "
        "<code>metrics.jsonl</code>, <code>summary.json</code>, <code>labels.json</code>, "
        "<code>blocks.json</code>, <code>clients.json</code> and <code>rounds/</code> in the folder of this file.</p>"
    )


_BODY = """<header>
<p class="run">Tepal run <code>$run</code></p>
<h1>$heading</h1>
<p class="subtitle">$subtitle</p>
</header>
$notice
<dl class="headlines" aria-label="Headline figures">$headlines</dl>
<noscript><p class="notice">The figures need JavaScript; the table of rounds below has every number.</p></noscript>
$sections
$replies
<section><h2>Numbers and settings</h2>
$rounds
$config
</section>
<section class="provenance"><h2>Where the figures come from</h2>
$provenance
</section>"""
