"""A comparison as tables: CSV with every figure unrounded, Markdown, LaTeX, and the one that a terminal shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tepal.records.run_directory import Measure
from tepal.report.terminal import bytes_text, score_text, seconds_text, step_text
from tepal.tools.compare.comparison import (
    CSV,
    HTML,
    LATEX,
    MARKDOWN,
    RUNS_CSV,
    SVG,
    Measured,
    Result,
    Results,
    Statistic,
)

NONE = "—"  # there is no such figure


class Column(NamedTuple):
    """A figure of every strategy: its key in `Result.figures`, its heading, and how a value of it is written.

    `deviates`: its deviation is shown (the CSV has that of every figure).
    """

    key: str
    heading: str
    text: Callable[[float], str]
    deviates: bool = False


def _count_text(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


_COLUMNS = (
    Column("clients_spread", "spread over clients", score_text),
    Column("rounds_to_target", "rounds to target", _count_text, True),
    Column("bytes_to_target", "bytes to target", bytes_text, True),
    Column("bytes_down", "down", bytes_text),
    Column("bytes_up", "up", bytes_text),
    Column("bytes_total", "bytes in total", bytes_text),
    Column("bytes_vs_fedavg", "share of FedAvg’s bytes", score_text),
    Column("seconds", "time", seconds_text, True),
    Column("round_seconds", "a round", seconds_text, True),
    Column("step_seconds", "client’s step", step_text),
)
_NOT_IN_A_TEXT = ("bytes_down", "bytes_up")  # which is as wide as a page


def columns_of(by: Measure) -> tuple[Column, ...]:
    """All figures of strategies that are measured so."""
    return (
        Column(f"server_{by.key}", f"{by.name}, server’s data", score_text, True),
        Column(f"clients_{by.key}", f"{by.name}, clients’ own tests", score_text, True),
        *_COLUMNS,
    )


def figure_text(result: Result, column: Column) -> str:
    """Mean ± standard deviation over the seeds; where only some runs have the figure, how many."""
    statistic = result.figures.get(column.key)
    if statistic is None:
        return NONE
    text = column.text(statistic.mean)
    if column.deviates and statistic.deviation is not None:
        text += f" ± {column.text(statistic.deviation)}"
    counted = len(result.counted)
    return text if statistic.runs == counted else f"{text} ({statistic.runs} of {counted})"


def about_seeds(results: Results) -> str:
    """Which seeds, and what stands behind a ±."""
    seeds = results.comparison.seeds
    if len(seeds) == 1:
        return f"Seed {seeds[0]}"
    return f"Seeds {', '.join(map(str, seeds))}: mean ± standard deviation over the seeds"


def about_target(results: Results) -> str:
    """What the target is, and where it comes from."""
    target, by = results.target, results.by
    if target is None:
        return f"No run finished with an {by.name} on the server's held-out data, so there is no common target"
    share = "90% of" if by.share else "1/0.9 of"
    of = f", {share} {target.of}'s final {by.name} on the server's data" if target.of else " on the server's data"
    return f"Target: an {by.name} of {target.score:.4f}{of}"


def how_it_ended(results: Results, run: Measured) -> str:
    """What became of a run that has not finished."""
    cell, planned = run.cell, results.comparison.run_config.get("num-server-rounds")
    after = f" after round {run.summary.get('rounds')} of {planned}" if cell.run and planned else ""
    return f"{results.comparison.name(cell)}: {cell.outcome}{after}{f': {cell.reason}' if cell.reason else ''}"


def notes(results: Results) -> list[str]:
    """What is said below every table."""
    said = [how_it_ended(results, run) for run in results.unfinished]
    said += [
        f"{result.strategy}: {result.outcome}; its figures are of those"
        for result in results.strategies
        if 0 < result.finished < len(result.runs)
    ]
    said += [
        f"{result.strategy}: {result.figures['rounds_to_target'].runs} of {len(result.counted)} runs reached the target"  # type: ignore[union-attr]
        for result in results.unreached
    ]
    return [*said, about_target(results), about_seeds(results)]


# --- CSV ------------------------------------------------------------------------------------------------------------


def strategies_csv(results: Results) -> str:
    """One line a strategy: mean and standard deviation over its seeds; what is not known is empty."""
    return _csv(_strategy_row(result, results) for result in results.strategies)


def _strategy_row(result: Result, results: Results) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for column in columns_of(results.by):
        statistic = result.figures.get(column.key)
        figures[column.key] = statistic and statistic.mean
        figures[f"{column.key}_sd"] = statistic and statistic.deviation
    reached = result.figures.get("rounds_to_target")
    return {
        "strategy": result.strategy,
        "runs": len(result.runs),
        "finished": result.finished,
        **figures,
        f"target_{results.by.key}": results.target and results.target.score,
        "reached_target": reached.runs if reached else 0,
    }


def runs_csv(results: Results) -> str:
    """One line a run, in the order in which they are run; what is not known is empty."""
    target = results.target.score if results.target else None
    by_cell = {id(run.cell): run for result in results.strategies for run in result.runs}
    runs = [by_cell[id(cell)] for cell in results.comparison.cells]
    return _csv(
        {
            "strategy": run.cell.strategy,
            "seed": run.cell.seed,
            "outcome": run.cell.outcome,
            "reason": run.cell.reason,
            "run": run.cell.run.name if run.cell.run else "",
            "rounds": run.summary.get("rounds"),
            **run.figures(target),
            f"target_{results.by.key}": target,
        }
        for run in runs
    )


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


# --- Markdown and LaTeX ---------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """The table for a text."""
    head, *rows = _text_rows(results)
    rule = ["---", *["---:"] * (len(head) - 1)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
    below = "\n".join(f"- {note}" for note in (*notes(results), _setting(results)))
    return f"# {results.comparison.task}: strategies compared\n\n{table}\n\n{below}\n"


def latex(results: Results) -> str:
    """The table for a paper, in the manner of booktabs; what is said below it are comments."""
    head, *rows = _text_rows(results)
    said = [f"{results.comparison.task}: strategies compared", *notes(results), _setting(results)]
    return "\n".join(
        [
            *(f"% {' '.join(line.split())}" for line in said),
            r"% Needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"\toprule",
            _latex_row(head),
            r"\midrule",
            *map(_latex_row, rows),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _text_rows(results: Results) -> list[list[str]]:
    """Heading, and a row for every strategy."""
    columns = [column for column in columns_of(results.by) if column.key not in _NOT_IN_A_TEXT]
    return [
        ["strategy", *(column.heading for column in columns)],
        *([result.strategy, *(figure_text(result, column) for column in columns)] for result in results.strategies),
    ]


_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "’": "'",
        NONE: "---",
    }
)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"


def _setting(results: Results) -> str:
    config, clients = results.comparison.run_config, results.comparison.clients
    rounds = config.get("num-server-rounds")
    return f"{clients} simulated clients, {rounds} rounds; bytes are payload of all clients, both ways"


# --- terminal -------------------------------------------------------------------------------------------------------


def comparison_table(results: Results) -> Group:
    """The comparison for a terminal, for `console.print(…, soft_wrap=True)`: table, failures, where it all is."""
    comparison = results.comparison
    one_seed = len(comparison.seeds) == 1
    table = Table(
        title=Text(_title(results), style="bold"), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0
    )  # for a terminal of 80
    table.add_column("\nstrategy")
    to_target = f"{results.target.score:.4f}" if results.target else "target"
    for heading in (
        "server's\ndata", "clients'\nown tests", "\nmoved", "until\nround", f"until\n{to_target}", "a\nround",
        "client's\nstep",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for result in results.strategies:
        name = result.strategy + ("" if result.outcome == "finished" else f"\n{result.outcome}")
        table.add_row(name, *_terminal_row(result, one_seed))
    behind = "over the clients" if one_seed else "over the seeds"
    lines = [*notes(results), f"Clients' own tests: mean ± standard deviation {behind}"]
    if results.unfinished:
        lines += [f"What is not finished goes on with `tepal compare --resume {comparison.folder}`"]
    lines += [f"Results in {comparison.folder}", f"  {comparison.folder / HTML}  (open it in a browser)"]
    lines += [f"  {comparison.folder / name}" for name in (CSV, RUNS_CSV, MARKDOWN, LATEX, SVG)]
    return Group(table, *(Text(line) for line in lines))


def _title(results: Results) -> str:
    return results.comparison.task + ("" if results.by.share else f", {results.by.name}")


def _terminal_row(result: Result, one_seed: bool) -> list[str]:
    figures, key = result.figures, result.by.key
    clients, spread = figures.get(f"clients_{key}"), figures.get("clients_spread")
    if one_seed and clients is not None and spread is not None:
        clients = Statistic(clients.mean, spread.mean, 1)
    writes = {column.key: column.text for column in _COLUMNS}
    means = ("bytes_total", "rounds_to_target", "bytes_to_target", "round_seconds", "step_seconds")
    return [
        _short(figures.get(f"server_{key}")),
        _short(clients),
        *(NONE if (figure := figures.get(key)) is None else writes[key](figure.mean) for key in means),
    ]


def _short(score: Statistic | None) -> str:
    if score is None:
        return NONE
    deviation = "" if score.deviation is None else f" ±{score.deviation:.4f}".replace("±0.", "±.")
    return score_text(score.mean) + deviation
