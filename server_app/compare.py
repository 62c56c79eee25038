"""Several strategies on one task: what each reached, and how many bytes it moved for that.

The runs of a comparison lie in one folder, `runs/<start>-compare/`, and differ in their strategy alone:

    <start>-<strategy>/   each run's own directory
    comparison.csv        one line a strategy; the other two can be drawn anew from it and from the runs
    comparison.html       table and figures, in the manner of a run's report.html
    comparison.svg        accuracy against bytes moved, as a picture
    latest                a link to its newest run; `runs/latest` leads there, too

Every figure is read from the runs' `metrics.jsonl` and `summary.json`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cached_property
from html import escape
from pathlib import Path
from string import Template
from typing import Any, get_args

from rich import box
from rich.console import Console, Group
from rich.markup import escape as escape_markup
from rich.table import Table
from rich.text import Text

from tepal.server_app.config import ConfigError, RunConfig, StrategyName
from tepal.server_app.flower import RunError
from tepal.server_app.page import Figure, config_html, cumulative, empty_plot, figure_html, page, table_html, unit_of
from tepal.server_app.report import TEST_DATA
from tepal.server_app.run_directory import (
    REPORT,
    add,
    make_first_free,
    point_latest_at,
    read_config,
    read_metrics,
    read_summary,
    summarise,
    write_whole,
)
from tepal.server_app.terminal import RoundProgress, TimeLeft, bytes_text, score_text, seconds_text

STRATEGIES: tuple[str, ...] = get_args(StrategyName)

CSV, HTML, SVG = "comparison.csv", "comparison.html", "comparison.svg"

NONE = "—"  # there is no such figure

_TARGET = 0.9  # of FedAvg's final accuracy

_OWN_TESTS = "mean ± standard deviation over the clients"

Start = Callable[[RunConfig, RoundProgress, Callable[[Path], None]], Path]
"""Runs one config with its progress, tells the run's directory as soon as there is one, and returns it."""


@dataclass
class Entry:
    """One strategy of a comparison, and how its run went."""

    strategy: str
    run: Path | None = None
    outcome: str = "not run"  # or "running", "finished", "failed", "stopped"
    reason: str = ""  # why it failed


# --- running -------------------------------------------------------------------------------------------------------


def strategy_names(text: str) -> list[str]:
    """Names with commas between. Raises ConfigError for one that is unknown, or there twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    problems = []
    for name in dict.fromkeys(names):
        if name not in STRATEGIES:
            near = get_close_matches(name, STRATEGIES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"--strategies: there is no strategy {name!r}: {hint}known are {', '.join(STRATEGIES)}")
        elif names.count(name) > 1:
            problems.append(f"--strategies: {name!r} is there twice")
    if not names:
        problems.append(f"--strategies names none: known are {', '.join(STRATEGIES)}")
    if problems:
        raise ConfigError("\n".join(problems))
    return names


def new_folder(runs: Path) -> Path:
    """Make the folder of a comparison that begins now. Raises OSError where that cannot be."""
    runs.mkdir(parents=True, exist_ok=True)
    return make_first_free(runs, f"{datetime.now(UTC):%Y%m%d-%H%M%S}-compare")


def run_each(
    configs: Mapping[str, RunConfig], folder: Path, start: Start, *, console: Console, errors: Console
) -> list[Entry]:
    """Run the strategies in turn, and write the comparison after each of them.

    A run that fails ends alone. Ctrl-C ends this one and those to come; what there is of them is returned.
    """
    entries = [Entry(strategy) for strategy in configs]
    time_left = TimeLeft(len(configs), max(config.rounds.num_server_rounds for config in configs.values()))
    try:
        for number, entry in enumerate(entries, start=1):
            config = configs[entry.strategy]
            name = f"{number}/{len(entries)} {entry.strategy}"
            progress = RoundProgress(config.rounds.num_server_rounds, name=name, time_left=time_left, console=console)
            try:
                with progress:
                    _run(entry, config, folder, start, progress)
            except (RunError, OSError) as error:
                entry.outcome = "failed"
                entry.reason = (error.reason if isinstance(error, RunError) else str(error)).partition("\n")[0]
                text = f"[bold red]error:[/] {escape_markup(f'{entry.strategy}: {error}')}"
                errors.print(text, highlight=False, soft_wrap=True)
            write_comparison(folder, entries)
    except KeyboardInterrupt:
        if entry.outcome != "finished":
            entry.outcome = "stopped"
        write_comparison(folder, entries)
    finally:
        with suppress(OSError):
            folder.rmdir()  # where not even one run could begin, and nothing is in it
    return entries


def _run(entry: Entry, config: RunConfig, folder: Path, start: Start, progress: RoundProgress) -> None:
    def begun(run: Path) -> None:
        entry.run, entry.outcome = run, "running"
        # As it is without a comparison: for `tepal report runs`, or to resume it.
        point_latest_at(run, folder.parent)

    entry.run = start(config, progress, begun)
    entry.outcome = "finished"


# --- what was measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Accuracy of a run against its bytes: (round, bytes moved until its end, accuracy), and whose data it is of."""

    of: str  # as `accuracy_of` in metrics.jsonl
    points: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Measured:
    """An entry with what its run left."""

    entry: Entry
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]

    @property
    def strategy(self) -> str:
        return self.entry.strategy

    @property
    def server_accuracy(self) -> float | None:
        """The result's on the server's held-out data; None where every client has a model of its own."""
        of_server = [line["accuracy"] for line in self.metrics if line.get("accuracy_of") == "server"]
        return of_server[-1] if of_server else None

    @property
    def clients_accuracy(self) -> float | None:
        """The result's on the clients' own test splits. Of the last round alone: an earlier model is not the result."""
        return self.metrics[-1].get("clients_accuracy") if self.metrics else None

    @property
    def clients_spread(self) -> float | None:
        return self.metrics[-1].get("clients_spread") if self.metrics else None

    @cached_property
    def moved(self) -> list[float | None]:
        """Payload bytes of all clients, both ways, up to and including each line's round."""
        each = [add(line.get("bytes_down"), line.get("bytes_up")) for line in self.metrics]
        pairs = zip(each, self.metrics, strict=True)
        return cumulative(0 if moved is None and line["round"] == 0 else moved for moved, line in pairs)

    @cached_property
    def curve(self) -> Curve | None:
        """On the server's held-out data where it was measured, else on the clients' own."""
        for of in TEST_DATA:
            points = tuple(
                (line["round"], moved, line["accuracy"])
                for line, moved in zip(self.metrics, self.moved, strict=True)
                if line.get("accuracy") is not None and line.get("accuracy_of") == of and moved is not None
            )
            if points:
                return Curve(of, points)
        return None

    def bytes_until(self, accuracy: float | None) -> float | None:
        """Bytes moved until the server's held-out data were first read this well; None if never."""
        if accuracy is None or self.curve is None or self.curve.of != "server":
            return None
        return next((moved for _, moved, reached in self.curve.points if reached >= accuracy), None)


def measured(entry: Entry) -> Measured:
    """Read what the entry's run has left until now."""
    if entry.run is None:
        return Measured(entry, {}, (), {})
    config, metrics = read_config(entry.run), read_metrics(entry.run)
    return Measured(entry, config, metrics, {**summarise(metrics, config), **(read_summary(entry.run) or {})})


def target_accuracy(results: Sequence[Measured]) -> tuple[float, str] | None:
    """The accuracy that bytes are counted until, and the strategy it comes from: FedAvg, else the first that has one.

    Only of a run that finished, and on the server's held-out data.
    """
    known = [
        (result.server_accuracy, result.strategy)
        for result in results
        if result.entry.outcome == "finished" and result.server_accuracy is not None
    ]
    known.sort(key=lambda one: one[1] != "fedavg")
    return (_TARGET * known[0][0], known[0][1]) if known else None


def read_comparison(folder: Path) -> list[Entry]:
    """The entries of a comparison, from its folder. Raises OSError or ValueError where it is none."""
    with (folder / CSV).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        entries = [
            Entry(row["strategy"], folder / row["run"] if row["run"] else None, row["outcome"], row["reason"])
            for row in rows
        ]
    except KeyError as error:
        raise ValueError(f"{folder / CSV} has no column {error}") from error
    for entry in entries:
        # A run that was stopped, or that failed, may have been resumed and finished since.
        summary = read_summary(entry.run) if entry.run else None
        if summary is not None and summary.get("stopped_by") is None:
            entry.outcome, entry.reason = "finished", ""
    return entries


# --- table and files ------------------------------------------------------------------------------------------------


def write_comparison(folder: Path, entries: Sequence[Entry]) -> Path:
    """Write CSV, picture and page anew; returns the page. Raises OSError naming a file that cannot be written."""
    results = [measured(entry) for entry in entries]
    write_whole(folder / CSV, _csv(results).encode())
    write_whole(folder / SVG, draw(results).encode())
    write_whole(folder / HTML, _page(folder.name, results).encode())
    return folder / HTML


def comparison_table(folder: Path, entries: Sequence[Entry]) -> Group:
    """The comparison for a terminal, for `console.print(…, soft_wrap=True)`: table, failures, where it all is."""
    results = [measured(entry) for entry in entries]
    target = target_accuracy(results)
    table = Table(
        title=Text(_task(results), style="bold"), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0
    )  # 78 wide, for a terminal of 80
    table.add_column("\nstrategy")
    for heading in (
        "server's\ndata", "clients'\nown tests", "\ndown", "\nup", "share of\nFedAvg's",
        f"until\n{target[0]:.4f}" if target else "until\na target", "\ntime",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for result in results:
        name = result.strategy + ("" if result.entry.outcome == "finished" else f"\n{result.entry.outcome}")
        table.add_row(name, *_cells(result, target))
    lines = [_how_it_ended(result) for result in results if result.entry.outcome != "finished"]
    lines += [_about_target(target), f"Clients' own tests: {_OWN_TESTS}"]
    if any(result.entry.run and result.entry.outcome in ("stopped", "failed") for result in results):
        lines += [f"After a run has gone on with `tepal simulate`, `tepal report {folder}` compares anew"]
    lines += [f"Results in {folder}"]
    lines += [f"  {folder / name}{'  (open it in a browser)' if name == HTML else ''}" for name in (HTML, CSV, SVG)]
    return Group(table, *(Text(line) for line in lines))


def _cells(result: Measured, target: tuple[float, str] | None) -> list[str]:
    """A strategy's figures as table and page show them."""

    def text(value: float | None, write: Callable[[float], str]) -> str:
        return NONE if value is None else write(value)

    figures, spread = result.summary if result.metrics else {}, result.clients_spread
    return [
        text(result.server_accuracy, score_text),
        text(result.clients_accuracy, score_text) + ("" if spread is None else f" ±{spread:.4f}"),
        text(figures.get("bytes_down"), bytes_text),
        text(figures.get("bytes_up"), bytes_text),
        text(figures.get("bytes_vs_fedavg"), lambda ratio: f"{ratio:.4f}"),
        text(result.bytes_until(target[0]) if target else None, bytes_text),
        text(figures.get("seconds"), seconds_text),
    ]


def _how_it_ended(result: Measured) -> str:
    entry, planned = result.entry, result.config.get("num-server-rounds")
    after = f" after round {result.summary.get('rounds')} of {planned}" if planned else ""
    return f"{entry.strategy}: {entry.outcome}{after}{f': {entry.reason}' if entry.reason else ''}"


def _about_target(target: tuple[float, str] | None) -> str:
    if target is None:
        return "No run finished with an accuracy on the server's held-out data, so there is no common target"
    return f"Until {target[0]:.4f}: bytes until {_TARGET:.0%} of {target[1]}'s final accuracy on the server's data"


def _task(results: Sequence[Measured]) -> str:
    """Model and dataset that all runs share."""
    config = _shared(results)
    return " on ".join(str(config[key]) for key in ("model", "dataset") if key in config) or "strategies compared"


def _shared(results: Sequence[Measured]) -> dict[str, Any]:
    configs = [result.config for result in results if result.config]
    return {
        key: value
        for key, value in (configs[0].items() if configs else ())
        if key not in ("runs", "resume", "strategy") and all(other.get(key) == value for other in configs)
    }


def _csv(results: Sequence[Measured]) -> str:
    """One line a strategy; what is not known, or does not exist, is empty."""
    target = target_accuracy(results)
    text = io.StringIO()
    rows = [
        {
            "strategy": result.strategy,
            "outcome": result.entry.outcome,
            "reason": result.entry.reason,
            "run": result.entry.run.name if result.entry.run else "",
            "rounds": result.summary.get("rounds"),
            "server_accuracy": result.server_accuracy,
            "clients_accuracy": result.clients_accuracy,
            "clients_spread": result.clients_spread,
            **{key: result.summary.get(key) for key in ("bytes_down", "bytes_up", "bytes_vs_fedavg")},
            "target_accuracy": target[0] if target else None,
            "bytes_until_target": result.bytes_until(target[0]) if target else None,
            "seconds": result.summary.get("seconds"),
        }
        for result in results
    ]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# --- picture --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a strategy is drawn: colour on light and on dark ground, plotly's name of its mark, the mark as a path."""

    light: str
    dark: str
    symbol: str
    mark: str


# Told apart by the colour-blind too (after Okabe and Ito), and by their marks where there is no colour.
LOOKS: Mapping[str, Look] = {
    "fedavg": Look("#5b5663", "#b9b2c2", "circle", "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z"),
    "fedfrozen": Look("#0069a8", "#56b4e9", "square", "M-3-3h6v6h-6z"),
    "selective": Look("#c04e00", "#f08f45", "diamond", "M0-4.3L4.3 0L0 4.3L-4.3 0z"),
    "fedensemble": Look("#00795a", "#33c79c", "triangle-up", "M0-4.2L4.2 3.2H-4.2z"),
    "fedacs": Look("#a63d7f", "#e693c4", "triangle-down", "M0 4.2L4.2-3.2H-4.2z"),
}

_WIDTH, _HEIGHT = 760, 424
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 556, 46, 320  # of the plot
_LEGEND = 580


def _data_note(results: Sequence[Measured]) -> tuple[str, ...]:
    """Whose data the lines are of; in the picture a text is one line."""
    if all(result.curve is None or result.curve.of == "server" for result in results):
        return ("The result after each round, on the server's held-out data.",)
    return (
        "Solid: the result on the server's held-out data. Dashed: on the clients' own test splits (for fedacs each",
        "client's own model). Those hold only their client's labels, an easier task: not comparable with solid lines.",
    )


def draw(results: Sequence[Measured]) -> str:
    """Accuracy against bytes moved as an SVG, one line a strategy; it follows the reader's light or dark setting."""
    curves = [(result, result.curve) for result in results]
    points = [point for _, curve in curves if curve for point in curve.points]
    divisor, unit = unit_of(max((moved for _, moved, _ in points), default=0))
    x_ticks = _ticks(max((moved for _, moved, _ in points), default=0) / divisor)
    y_ticks = _ticks(max((accuracy for _, _, accuracy in points), default=1))

    def x(value: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * value / x_ticks[-1], 2)

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * value / y_ticks[-1], 2)

    drawn, spoken, note = [], [], _data_note(results)
    for tick in x_ticks:
        drawn.append(f'<text class="tick" x="{x(tick)}" y="{_BOTTOM + 20}" text-anchor="middle">{tick:g}</text>')
        drawn.append(f'<path class="grid" d="M{x(tick)} {_TOP}V{_BOTTOM}"/>')
    for tick in y_ticks:
        drawn.append(f'<text class="tick" x="{_LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
        drawn.append(f'<path class="grid" d="M{_LEFT} {y(tick)}H{_RIGHT}"/>')
    down = _TOP + 8
    for result, curve in curves:
        look = f"s-{escape(result.strategy)}"
        whose = f"{look} of-{'server' if curve.of == 'server' else 'clients'}" if curve else look
        lines = [f'<text class="name" x="{_LEGEND + 42}" y="{down + 4}">{escape(result.strategy)}</text>']
        if curve:
            at = [(x(moved / divisor), y(accuracy)) for _, moved, accuracy in curve.points]
            path = " ".join(f"{across},{up}" for across, up in at)
            marks = "".join(f'<use href="#{look}" x="{across}" y="{up}"/>' for across, up in at)
            _, moved, accuracy = curve.points[-1]
            data = TEST_DATA[curve.of][0]
            drawn.append(f'<g class="curve {whose}"><polyline points="{path}"/>{marks}</g>')
            spoken.append(f"{result.strategy}: {score_text(accuracy)} on the {data} after {bytes_text(moved)}.")
            lines.append(f'<g class="{whose}"><path d="M{_LEGEND} {down}h32"/>')
            lines.append(f'<use href="#{look}" x="{_LEGEND + 16}" y="{down}"/></g>')
            small = [f"{score_text(accuracy)}, {bytes_text(moved)}"]
            small += [data] if curve.of != "server" else []
        else:
            small = ["nothing measured"]
            spoken.append(f"{result.strategy}: nothing measured.")
        small += [result.entry.outcome] if result.entry.outcome not in ("finished", "not run") else []
        for text in small:
            down += 16
            lines.append(f'<text x="{_LEGEND + 42}" y="{down + 4}">{escape(text)}</text>')
        drawn += lines
        down += 26
    return Template(_PICTURE).substitute(
        width=_WIDTH,
        height=max(_HEIGHT, down),
        title=f"Accuracy against bytes moved, {escape(_task(results))}",
        spoken=escape(" ".join((*spoken, *note))),
        colours="".join(f".s-{name}{{color:{look.light}}}" for name, look in LOOKS.items()),
        dark="".join(f".s-{name}{{color:{look.dark}}}" for name, look in LOOKS.items()),
        marks="".join(f'<path id="s-{name}" d="{look.mark}"/>' for name, look in LOOKS.items()),
        left=_LEFT,
        middle=(_LEFT + _RIGHT) / 2,
        centre=(_TOP + _BOTTOM) / 2,
        below=_BOTTOM + 42,
        unit=unit,
        drawn="\n".join(drawn),
        note="\n".join(
            f'<text x="{_LEFT}" y="{_BOTTOM + 70 + 17 * line}">{escape(said)}</text>' for line, said in enumerate(note)
        ),
    )


def _ticks(largest: float) -> list[float]:
    """Some five round numbers from 0 to `largest` or a little more."""
    if not largest > 0:
        return [0, 1]
    power = 10 ** math.floor(math.log10(largest / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= largest * 0.9999)
    return [round(step * k, 12) for k in range(math.ceil(largest / step - 1e-9) + 1)]


_PICTURE = """<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" width="$width" height="$height" role="img" \
aria-labelledby="title desc">
<title id="title">$title</title>
<desc id="desc">$spoken</desc>
<style>
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#5f5a66}
.head{font-size:15px;font-weight:600;fill:#1d1b20}.name{font-size:13px;font-weight:600;fill:#1d1b20}
.ground{fill:#fff}.grid{stroke:#e4e0e6;stroke-width:1}
polyline,g>path{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}use{fill:currentColor;stroke:currentColor}
.of-clients polyline,.of-clients>path{stroke-dasharray:6 4}.of-clients use{fill:#fff;stroke-width:1.5}
$colours
@media (prefers-color-scheme:dark){
text{fill:#aba4b4}.head,.name{fill:#efecf2}.ground{fill:#1f1c24}.grid{stroke:#37323e}.of-clients use{fill:#1f1c24}
$dark
}
</style>
<defs>$marks</defs>
<rect class="ground" width="$width" height="$height" rx="8"/>
<text class="head" x="$left" y="26">$title</text>
$drawn
<text x="$middle" y="$below" text-anchor="middle">$unit moved, all clients, both ways</text>
<text transform="translate(16 $centre) rotate(-90)" text-anchor="middle">accuracy</text>
$note
</svg>
"""


# --- page -----------------------------------------------------------------------------------------------------------


def figures(results: Sequence[Measured]) -> list[Figure]:
    """Accuracy against bytes, and the accuracy of the results on the clients' own tests."""
    return [_against_bytes(results), _on_own_tests(results)]


def _against_bytes(results: Sequence[Measured]) -> Figure:
    key, title = "accuracy-bytes", "Accuracy against bytes moved"
    curves = [(result, result.curve) for result in results if result.curve]
    if not curves:
        return Figure(key, title, "No accuracy was measured.", None)
    divisor, unit = unit_of(max(moved for _, curve in curves if curve for _, moved, _ in curve.points))
    plot = empty_plot(f"sent so far, down and up, all clients ({unit})", "accuracy")
    for result, curve in curves:
        assert curve is not None
        plot.add_scatter(
            x=[moved / divisor for _, moved, _ in curve.points],
            y=[accuracy for _, _, accuracy in curve.points],
            customdata=[round for round, _, _ in curve.points],
            name=f"{result.strategy}, {TEST_DATA[curve.of][0]}",
            mode="lines+markers",
            line={"dash": "dash" if curve.of != "server" else "solid"},
            marker={"symbol": LOOKS[result.strategy].symbol + ("-open" if curve.of != "server" else "")},
            meta={"role": f"s-{result.strategy}"},
            hovertemplate=f"%{{x:.4~g}} {unit}, after round %{{customdata}}: %{{y:.2%}}",
        )
    plot.update_yaxes(tickformat=".4~%", rangemode="tozero")
    caption = (
        " ".join(_data_note(results)) + " Where clients score the result, as after the last round, its way down counts "
        "in that round."
    )
    return Figure(key, title, caption, plot)


def _on_own_tests(results: Sequence[Measured]) -> Figure:
    key, title = "own-tests", "Accuracy on the clients’ own test splits"
    shown = [result for result in results if result.clients_accuracy is not None]
    if not shown:
        return Figure(key, title, "No result was scored on the clients' own test splits.", None)
    plot = empty_plot("", "accuracy")
    for result in shown:
        plot.add_bar(
            x=[result.strategy],
            y=[result.clients_accuracy],
            error_y={"type": "data", "array": [result.clients_spread or 0], "thickness": 1.5, "width": 5},
            text=[f"{result.clients_accuracy:.1%}"],
            textposition="inside",
            insidetextanchor="start",
            textangle=0,
            name=result.strategy,
            meta={"role": f"s-{result.strategy}"},
            hovertemplate="%{y:.2%} ± %{error_y.array:.2%}",
        )
    plot.update_layout(barmode="overlay", showlegend=False)
    plot.update_yaxes(tickformat=".4~%", rangemode="tozero")
    caption = (
        "The result of each run on the same test splits: of fedacs each client's own model, of the others the common "
        "one. Here all strategies can be compared. Mean over the clients; whiskers: standard deviation over them."
    )
    return Figure(key, title, caption, plot)


def _page(name: str, results: Sequence[Measured]) -> str:
    target = target_accuracy(results)
    drawn = figures(results)
    unfinished = [result for result in results if result.entry.outcome != "finished"]
    headings = (
        "strategy", "accuracy, server’s data", "accuracy, clients’ own tests", "down", "up", "share of FedAvg’s bytes",
        f"until {target[0]:.4f}" if target else "until a target", "time", "outcome",
    )  # fmt: skip
    rows = [(result.strategy, *_cells(result, target), result.entry.outcome) for result in results]
    body = Template(_BODY).substitute(
        heading=escape(" · ".join(result.strategy for result in results)),
        subtitle=escape(_task(results)),
        name=escape(name),
        notices="".join(f'<p class="notice" role="note">{escape(_how_it_ended(result))}</p>' for result in unfinished),
        table=table_html("All strategies", headings, rows, words={0, 8}),
        target=escape(_about_target(target)),
        figures="".join(map(figure_html, drawn)),
        rounds=_rounds_html(results),
        runs="".join(map(_run_html, results)),
        config=config_html(_shared(results)),
    )
    return page(f"{_task(results)}: strategies compared", body, drawn, style=_own_style())


def _rounds_html(results: Sequence[Measured]) -> str:
    headings = (
        "strategy", "round", "accuracy", "on whose test data", "clients’ own tests", "spread", "down", "up",
        "moved so far", "time",
    )  # fmt: skip

    def cell(value: Any, write: Callable[[Any], str]) -> str:
        return NONE if value is None else write(value)

    rows = [
        (
            result.strategy,
            line["round"],
            cell(line.get("accuracy"), score_text),
            cell(line.get("accuracy_of"), str),
            cell(line.get("clients_accuracy"), score_text),
            cell(line.get("clients_spread"), score_text),
            cell(line.get("bytes_down"), bytes_text),
            cell(line.get("bytes_up"), bytes_text),
            cell(moved, bytes_text),
            cell(line.get("seconds"), seconds_text),
        )
        for result in results
        for line, moved in zip(result.metrics, result.moved, strict=True)
    ]
    table = table_html("Every round of every run", headings, rows, words={0, 3})
    return f"<details><summary>Every round of every run, as a table</summary>{table}</details>"


def _run_html(result: Measured) -> str:
    run = result.entry.run
    if run is None:
        return f"<li>{escape(result.strategy)}: {escape(result.entry.outcome)}</li>"
    name = escape(run.name)
    linked = f'<a href="{name}/{REPORT}">{name}</a>' if (run / REPORT).exists() else f"<code>{name}</code>"
    return f"<li>{escape(result.strategy)}: {linked}</li>"


def _own_style() -> str:
    light, dark = (
        "".join(f"--s-{name}: {colour}; " for name, colour in colours)
        for colours in (
            [(name, look.light) for name, look in LOOKS.items()],
            [(name, look.dark) for name, look in LOOKS.items()],
        )
    )
    return (
        f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
        # plotly draws whiskers in one fixed grey.
        "path.yerror { stroke: var(--ink) !important; }\na { color: inherit; }\n.scroll + p { margin-top: 8px; }\n"
    )


_BODY = """<header>
<p class="run">Tepal comparison <code>$name</code></p>
<h1>$heading</h1>
<p class="subtitle">$subtitle</p>
</header>
$notices
<section aria-labelledby="results"><h2 id="results">What each reached, and what it moved</h2>
$table
<p>$target.</p></section>
<section aria-labelledby="figures"><h2 id="figures">Accuracy and bytes</h2>
<noscript><p class="notice">The figures need JavaScript; the table of rounds below has every number.</p></noscript>
<div class="figures">$figures</div></section>
<section aria-labelledby="runs"><h2 id="runs">Runs and settings</h2>
<ul>$runs</ul>
$rounds
<p>The runs differ in their strategy alone. This is the run config that they share:</p>
$config
</section>
<section class="provenance" aria-labelledby="origin"><h2 id="origin">Where the figures come from</h2>
<p>Bytes are payload, measured at the exchange, summed over the clients. FedAvg’s, which the share is of, are
calculated: every entry of the model, down and up, for the same clients in the same rounds of each run.</p>
<p>The bytes of a target are those of all rounds up to the first one whose result reached it on the server’s held-out
data; where clients have models of their own there is no such measure. Time is the server’s clock over the rounds; the
first has the clients’ start in it.</p>
<p>Everything here is read from <code>metrics.jsonl</code>, <code>summary.json</code> and <code>config.toml</code> of
the runs beside this file.</p>
</section>"""
