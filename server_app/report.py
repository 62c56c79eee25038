"""A run as one HTML file: figures, tables, config; opens from disk, offline, for as long as there are browsers.

Everything is in the file: plotly.js once, each figure as JSON, the style. A content security policy inside the page
forbids any request, so that neither plotly nor a name from a run can make the page load something. The template is
text in this file because a Flower app bundle carries no other kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from tepal.server_app.run_directory import (
    REPORT,
    add,
    find_run,
    read_config,
    read_metrics,
    read_summary,
    summarise,
    total,
    write_whole,
)
from tepal.server_app.terminal import UNKNOWN, bytes_text, score_text, seconds_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

Lines = Sequence[Mapping[str, Any]]

# Whose test data an accuracy is of, as `accuracy_of` says it: (short, for legends; long, for sentences).
TEST_DATA = {
    "server": ("server's test data", "on the server's held-out data, the model after the round's merge"),
    "clients": (
        "clients' test data",
        "on the clients' own test splits, weighted by their sizes, the model after the round's merge",
    ),
    "personal": (
        "clients' own models, own test data",
        "of each client's own model on its own test split, the mean over the clients, after the round's training",
    ),
}


def write_report(run: Path) -> Path:
    """Write `report.html` for a run directory (or the `latest` link) and return its path.

    A run without `summary.json` (in progress, or stopped) gets the report of the rounds that have ended. Raises
    FileNotFoundError where there is no run, OSError naming the file where it cannot be written.
    """
    run = find_run(run)
    page = _page(run.name, read_config(run), read_metrics(run), read_summary(run))
    write_whole(run / REPORT, page.encode())
    return run / REPORT


def frozen_after(metrics: Lines, summary: Mapping[str, Any]) -> int | None:
    """The round after which query and key are fixed; None if the run has no such point, or has not come to it."""
    frozen = [line["round"] for line in metrics if line.get("phase") == "frozen"]
    stated = summary.get("frozen_after")
    if type(stated) is int and metrics and stated <= metrics[-1]["round"]:
        return stated
    return min(frozen) - 1 if frozen else None


# --- figures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One figure of the page. `plot` is None where there is nothing to draw; `caption` then says why."""

    key: str
    title: str
    caption: str
    plot: go.Figure | None


def figures(metrics: Lines, summary: Mapping[str, Any]) -> list[Figure]:
    """The six figures. Round 0, the initial model, belongs to the scores but moves nothing, so it has no bar."""
    trained = [line for line in metrics if line["round"] > 0]
    freeze = frozen_after(metrics, summary)
    moved = [add(line.get("bytes_down"), line.get("bytes_up")) for line in metrics]
    # The initial model's score is at the origin even where its line names no bytes.
    sent = _cumulative([0 if m is None and line["round"] == 0 else m for m, line in zip(moved, metrics, strict=True)])
    whole = _cumulative([0 if line["round"] == 0 else line.get("bytes_fedavg") for line in metrics])
    return [
        *_score_figures("accuracy", metrics, sent, freeze),
        *_score_figures("loss", metrics, sent, freeze),
        _bytes_per_round(trained, freeze),
        _bytes_against_fedavg(metrics, sent, whole, freeze),
    ]


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

    name = key.capitalize()
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

    per_round = _empty("round", name, rounds=len(metrics))
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
        divisor, unit = _unit(max(known))
        per_byte = _empty(f"sent so far, down and up, all clients ({unit})", name)
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
    divisor, unit = _unit(max(highest, *(value or 0 for value in values)))
    plot = _empty("round", unit, rounds=len(trained))
    for label, name, role in (("down, to clients", "bytes_down", "down"), ("up, from clients", "bytes_up", "up")):
        plot.add_bar(
            x=rounds,
            y=[_scaled(line.get(name), divisor) for line in trained],
            name=label,
            meta={"role": role},
            hovertemplate=f"round %{{x}}: %{{y:.4~g}} {unit}",
        )
    caption = (
        "Payload bytes of all clients, down and up. Where clients score the model after a round, as after the last, "
        "its way down counts in that round."
    )
    fedavg = [_scaled(line.get("bytes_fedavg"), divisor) for line in trained]
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
    divisor, unit = _unit(max(known))
    rounds = [line["round"] for line in metrics]
    plot = _empty("round", unit, rounds=len(metrics))
    drawn = []
    for label, values, role, dash in (("this run", sent, "main", "solid"), ("FedAvg", whole, "fedavg", "dash")):
        # Round 0 alone is the origin, no measurement.
        if any(value is not None and number > 0 for number, value in zip(rounds, values, strict=True)):
            drawn.append(label)
            plot.add_scatter(
                x=rounds,
                y=[_scaled(value, divisor) for value in values],
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


def _empty(x_title: str, y_title: str, *, rounds: int | None = None) -> go.Figure:
    # Not at the top: plotly looks up its own version as it is imported, which fails now and then while Flower changes
    # sys.path in another thread. When a report is written, that is long over.
    import plotly.graph_objects as go

    plot = go.Figure()
    plot.update_layout(
        template="none",
        height=340,
        margin={"l": 8, "r": 12, "t": 34, "b": 8},
        hovermode="closest" if rounds is None else "x unified",
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "traceorder": "normal"},
        showlegend=True,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        bargap=0.25,
    )
    plot.update_xaxes(
        title={"text": x_title, "standoff": 8, "font_size": 13}, automargin=True, zeroline=False, showgrid=False
    )
    plot.update_yaxes(
        title={"text": y_title, "standoff": 8, "font_size": 13}, automargin=True, zeroline=False, nticks=6
    )
    if rounds is None:
        plot.update_xaxes(rangemode="tozero")
    elif rounds <= 12:
        plot.update_xaxes(dtick=1)  # no such thing as round 1.5
    return plot


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
    return _scaled(at[0], divisor) if at else None


def _unit(largest: float) -> tuple[float, str]:
    """MB, unless the numbers would be awkward in it."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB") if largest >= 1e6 else (1e3, "kB")


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _cumulative(values: Iterable[float | None]) -> list[float | None]:
    """Running sum; from the first unknown on it is unknown."""
    so_far: float | None = 0
    return [so_far := add(so_far, value) for value in values]


# --- page ----------------------------------------------------------------------------------------------------


def _page(name: str, config: Mapping[str, Any], metrics: Lines, written_summary: Mapping[str, Any] | None) -> str:
    summary = {**summarise(metrics, config), **(written_summary or {})}
    strategy, model = (str(summary.get(key) or "") for key in ("strategy", "model"))
    dataset = str(config.get("dataset") or "")
    title = " · ".join(part for part in (strategy, model, dataset) if part) or name
    drawn = figures(metrics, summary)
    return Template(_PAGE).substitute(
        title=escape(title),
        heading=escape(strategy or name),
        subtitle=escape(" on ".join(part for part in (model, dataset) if part) or "model and dataset not recorded"),
        run=escape(name),
        notice=_notice(metrics, config, written_summary is not None),
        headlines="".join(
            _headline(*figure) for figure in _headlines(config, metrics, summary, ended=written_summary is not None)
        ),
        figures="".join(map(_figure_html, drawn)),
        replies=_trouble_html(metrics),
        rounds=_rounds_html(metrics),
        config=_config_html(config),
        provenance=_provenance(metrics),
        style=_STYLE,
        script=_SCRIPT,
        plotly=_plotly_js() if any(figure.plot for figure in drawn) else "",
    )


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
    accuracy, planned = summary.get("accuracy"), config.get("num-server-rounds")
    moved = add(summary.get("bytes_down"), summary.get("bytes_up"))
    ratio, fedavg = summary.get("bytes_vs_fedavg"), total(metrics, "bytes_fedavg")
    scored = [line for line in metrics if line.get("accuracy") is not None]
    if accuracy is None:
        where = "no round reported one"
    elif scored and scored[-1]["accuracy"] == accuracy:
        short = TEST_DATA.get(str(scored[-1].get("accuracy_of")), ("test data not named", ""))[0]
        where = f"{short}, round {scored[-1]['round']}"
    else:
        where = "of the final model"
    training = total(metrics, "seconds_train")
    lost = sum(len(line.get("lost") or ()) for line in metrics)
    refused = summary.get("refused_replies")
    return [
        (
            "Final accuracy" if ended else "Latest accuracy",
            UNKNOWN if accuracy is None else f"{100 * accuracy:.2f} %",
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


def _headline(name: str, figure: str, small: str) -> str:
    quiet = ' class="unknown"' if figure == UNKNOWN else ""
    below = f"<dd>{escape(small)}</dd>" if small else ""
    return f"<div><dt>{escape(name)}</dt><dd{quiet}>{escape(figure)}</dd>{below}</div>"


def _figure_html(figure: Figure) -> str:
    title, caption = escape(figure.title), escape(figure.caption)
    if figure.plot is None:
        body = '<p class="empty">nothing to draw</p>'
    else:
        label = escape(f"{figure.title}. {_spoken(figure.plot)} Every number is in the table of rounds below.")
        # to_json writes < and > as escapes, so no name can end the script element.
        body = (
            f'<div class="plot" id="{figure.key}" role="img" aria-label="{label}"></div>'
            f'<script type="application/json" data-for="{figure.key}">{figure.plot.to_json()}</script>'
        )
    return f"<figure><h3>{title}</h3>{body}<figcaption>{caption}</figcaption></figure>"


def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _spoken(plot: go.Figure) -> str:
    """First and last value of every curve, for those who do not see it."""
    said = []
    for trace in plot.data:
        values = [value for value in trace.y if value is not None]
        if values:
            said.append(f"{trace.name}: from {values[0]:.4g} to {values[-1]:.4g}.")
    return " ".join(said)


def _trouble_html(metrics: Lines) -> str:
    rows = [
        (line["round"], reply.get("client"), _TROUBLE[what], reply.get("reason") or "no reason given")
        for line in metrics
        for what in _TROUBLE
        for reply in line.get(what) or ()
    ]
    if not rows:
        return ""
    table = _table("What went wrong", ("round", "client", "what", "reason"), rows, words={1, 2, 3})
    return f"<section><h2>What went wrong</h2>{table}</section>"


_TROUBLE = {"refused": "refused", "lost": "lost", "late": "late", "left_out": "left out", "notes": "got over"}


# Column of the table of rounds: heading, key in metrics.jsonl, how a value is written.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("round", "round", str),
    ("phase", "phase", str),
    ("asked", "clients_asked", str),
    ("replied", "clients_replied", str),
    ("refused", "refused", lambda value: str(len(value))),
    ("lost", "lost", lambda value: str(len(value))),
    ("accuracy", "accuracy", score_text),
    ("loss", "loss", score_text),
    ("training loss", "train_loss", score_text),
    ("learning rate", "learning_rate", lambda value: f"{value:.3g}"),
    ("down", "bytes_down", bytes_text),
    ("up", "bytes_up", bytes_text),
    ("names, digests", "bytes_overhead", bytes_text),
    ("FedAvg", "bytes_fedavg", bytes_text),
    ("sent again", "resent", str),
    ("time", "seconds", seconds_text),
    ("of it training", "seconds_train", seconds_text),
)


def _rounds_html(metrics: Lines) -> str:
    if not metrics:
        return ""
    rows = [["–" if line.get(key) is None else text(line[key]) for _, key, text in _COLUMNS] for line in metrics]
    table = _table("Every round", [heading for heading, _, _ in _COLUMNS], rows, words={1})
    return f"<details><summary>Every round, as a table</summary>{table}</details>"


def _config_html(config: Mapping[str, Any]) -> str:
    if not config:
        return "<p>No config.toml was found beside this report.</p>"
    written = {True: "true", False: "false"}
    rows = [(key, written[value] if isinstance(value, bool) else value) for key, value in config.items()]
    table = _table("The run config", ("key", "value"), rows, words={0, 1})
    return f"<details><summary>The whole run config</summary>{table}</details>"


def _table(label: str, headings: Iterable[str], rows: Iterable[Sequence[Any]], *, words: set[int]) -> str:
    """A table that scrolls inside its frame, by keyboard too. `words`: the columns set flush left, the others are
    numbers.
    """

    def kind(column: int) -> str:
        return "" if column in words else ' class="number"'

    head = "".join(f'<th scope="col"{kind(i)}>{escape(text)}</th>' for i, text in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(f"<td{kind(i)}>{escape(str(cell))}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


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
        "<code>metrics.jsonl</code> and <code>summary.json</code> in the folder of this file.</p>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header>
<p class="run">Tepal run <code>$run</code></p>
<h1>$heading</h1>
<p class="subtitle">$subtitle</p>
</header>
$notice
<dl class="headlines" aria-label="Headline figures">$headlines</dl>
<section aria-labelledby="figures"><h2 id="figures">Rounds and bytes</h2>
<noscript><p class="notice">The figures need JavaScript; the table of rounds below has every number.</p></noscript>
<div class="figures">$figures</div></section>
$replies
<section><h2>Numbers and settings</h2>
$rounds
$config
</section>
<section class="provenance"><h2>Where the figures come from</h2>
$provenance
</section>
</main>
<script>$plotly</script>
<script>$script</script>
</body>
</html>
"""

_STYLE = """
:root {
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d1b20; --soft: #5f5a66; --rule: #e4e0e6; --grid: #ece9ee;
  --main: #a3295e; --second: #1f6f8b; --third: #8a6d00; --down: #2f6ea5; --up: #d9793a; --fedavg: #6b6573;
  --freeze: #a3295e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16141a; --card: #1f1c24; --ink: #efecf2; --soft: #aba4b4; --rule: #37323e; --grid: #2e2a35;
    --main: #f07fae; --second: #6cc3df; --third: #dfc15c; --down: #6aa9de; --up: #eb9a62; --fedavg: #b3acbc;
    --freeze: #f07fae;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1440px; margin: 0 auto; padding: clamp(20px, 4vw, 56px) clamp(16px, 4vw, 56px) 64px; }
h1, h2, h3 { line-height: 1.2; text-wrap: balance; overflow-wrap: anywhere; }
h1 { font-size: clamp(1.9rem, 4vw, 2.75rem); margin: 0; letter-spacing: -0.02em; }
h2 { font-size: 1.25rem; margin: 48px 0 16px; }
h3 { font-size: 1rem; margin: 0 0 4px; }
p { margin: 0 0 12px; }
code { font: 0.92em ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.run { color: var(--soft); margin: 0 0 8px; font-size: 0.9rem; }
.subtitle { color: var(--soft); font-size: 1.2rem; margin: 6px 0 0; overflow-wrap: anywhere; }
.notice { margin: 24px 0 0; padding: 12px 16px; border-left: 4px solid var(--main); background: var(--card); }
.headlines {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(150px, 42%), 1fr)); gap: 1px; margin: 32px 0 0;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden;
}
.headlines div { background: var(--card); padding: 16px 18px; }
.headlines dt { color: var(--soft); font-size: 0.85rem; }
.headlines dd { margin: 0; color: var(--soft); font-size: 0.82rem; line-height: 1.35; }
.headlines dt + dd {
  color: var(--ink); font-size: 1.6rem; font-weight: 650; line-height: 1.35; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap;
}
.headlines dt + dd.unknown { color: var(--soft); font-weight: 400; }
.figures { display: grid; grid-template-columns: minmax(0, 1fr); gap: 20px; }
@media (min-width: 960px) { .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
figure {
  margin: 0; padding: 18px 18px 14px; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  display: flex; flex-direction: column; min-width: 0;
}
figcaption { color: var(--soft); font-size: 0.85rem; line-height: 1.45; margin-top: 6px; max-width: 72ch; }
.plot { height: 340px; }
.empty { flex: 1; min-height: 140px; display: grid; place-items: center; margin: 8px 0; color: var(--soft);
  border: 1px dashed var(--rule); border-radius: 8px; }
.scroll { overflow: auto; max-height: 70vh; background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--main); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; text-align: left; vertical-align: top; overflow-wrap: break-word; }
th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 600; vertical-align: bottom;
  box-shadow: inset 0 -1px 0 var(--rule); }
td { border-top: 1px solid var(--grid); }
.number { text-align: right; }
td.number { white-space: nowrap; }
td:not(:last-child) { white-space: nowrap; }
td:last-child:not(.number) { min-width: 14rem; overflow-wrap: anywhere; }
details { margin: 0 0 12px; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
.provenance p { color: var(--soft); max-width: 78ch; }
@media (max-width: 480px) { figure { padding: 14px 10px 12px; } td:last-child:not(.number) { min-width: 10rem; }
  .headlines div { padding: 12px 14px; }
  .headlines dt + dd { font-size: 1.35rem; } }
@media print { figure { break-inside: avoid; } .scroll { max-height: none; } }
"""

# Colours come from the style sheet, so that figures follow the reader's light or dark setting, also when it changes.
_SCRIPT = """
(() => {
  if (!window.Plotly) return;
  const touch = matchMedia('(pointer: coarse)').matches;
  const config = {
    displaylogo: false, plotlyServerURL: '', showSendToCloud: false, responsive: true,
    modeBarButtons: [['toImage', 'resetScale2d']],
    displayModeBar: touch || innerWidth < 700 ? false : 'hover',  // on a phone it would cover the labels
  };
  const draw = () => {
    const css = getComputedStyle(document.documentElement);
    const colour = name => css.getPropertyValue('--' + name).trim();
    const font = getComputedStyle(document.body).fontFamily;
    for (const source of document.querySelectorAll('script[data-for]')) {
      const {data, layout} = JSON.parse(source.textContent);
      for (const trace of data) {
        const own = colour(trace.meta.role);
        trace.marker = {...trace.marker, color: own, ...(trace.type === 'bar' ? {} : {size: 6})};
        if (trace.type === 'bar') continue;
        trace.line = {...trace.line, color: own, width: 2};
        trace.cliponaxis = false;  // the first marker sits on the axis
      }
      for (const axis of [layout.xaxis, layout.yaxis])
        Object.assign(axis, {gridcolor: colour('grid'), linecolor: colour('rule'), tickcolor: colour('rule')});
      for (const shape of layout.shapes ?? []) shape.line.color = colour('freeze');
      for (const note of layout.annotations ?? []) note.font = {...note.font, color: colour('freeze')};
      layout.modebar = {bgcolor: 'transparent', color: colour('fedavg'), activecolor: colour('ink')};
      layout.font = {family: font, size: 13, color: colour('soft')};
      layout.hoverlabel = {
        bgcolor: colour('card'), bordercolor: colour('rule'), font: {family: font, color: colour('ink')},
      };
      if (touch) layout.dragmode = false;  // a finger on a figure scrolls the page
      Plotly.react(document.getElementById(source.dataset.for), data, layout, config);
    }
  };
  draw();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
})();
"""
