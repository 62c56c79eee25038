"""A comparison as tables: CSV with unrounded figures, Markdown, LaTeX, and the table for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table as TerminalTable
from rich.text import Text

from tepal.host.text import visible
from tepal.records.columns import Column, bytes_text, score_text, seconds_text, step_text
from tepal.records.round_record import COLUMNS
from tepal.records.run_directory import Measure
from tepal.report.table import MISSING, Table, markdown_text
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
from tepal.tools.terminal import indented, shown

Figure = tuple[Statistic, int]
"""A figure of a strategy over its seeds, and the number of the strategy's runs."""


def _count_text(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _mean(write: Callable[[float], str], *, deviates: bool = False) -> Callable[[Figure], str]:
    """A text of a figure: its mean, if `deviates` with ± its deviation; if only some runs have it, their number."""

    def text(figure: Figure) -> str:
        statistic, counted = figure
        spread = f" ± {write(statistic.deviation)}" if deviates and statistic.deviation is not None else ""
        some = "" if statistic.runs == counted else f" ({statistic.runs} of {counted})"
        return write(statistic.mean) + spread + some

    return text


def _of_rounds(name: str, *, deviates: bool = False) -> Column:
    """A column of the rounds as a column of their mean or sum."""
    return replace(COLUMNS[name], text=_mean(COLUMNS[name].text, deviates=deviates))


_COLUMNS = (
    _of_rounds("clients_spread"),
    Column("rounds to target", "rounds_to_target", text=_mean(_count_text, deviates=True)),
    Column("bytes to target", "bytes_to_target", text=_mean(bytes_text, deviates=True)),
    _of_rounds("bytes_down"),
    _of_rounds("bytes_up"),
    Column("bytes in total", "bytes_total", text=_mean(bytes_text)),
    Column("share of FedAvg’s bytes", "bytes_vs_fedavg", text=_mean(score_text)),
    _of_rounds("seconds", deviates=True),
    Column("time per round", "round_seconds", text=_mean(seconds_text, deviates=True)),
    Column("client’s step", "step_seconds", text=_mean(step_text)),
)
_NOT_IN_A_TEXT = ("bytes_down", "bytes_up")  # a page is not wide enough for them


def columns_of(by: Measure) -> tuple[Column, ...]:
    """The columns of all figures of a strategy; keys are those of `Result.figures`."""
    score = _mean(score_text, deviates=True)
    return (
        Column(f"{by.name}, server’s data", f"server_{by.key}", text=score),
        Column(f"{by.name}, clients’ own tests", f"clients_{by.key}", text=score),
        *_COLUMNS,
    )


def strategies_table(results: Results, columns: Iterable[Column]) -> Table:
    """A row for each strategy, which is the first column."""
    records = (
        {
            "strategy": result.strategy,
            "outcome": result.outcome,
            **{key: figure and (figure, len(result.counted)) for key, figure in result.figures.items()},
        }
        for result in results.strategies
    )
    title = f"{results.comparison.task}: strategies compared"
    return Table.of(title, (Column("strategy", "strategy", left=True), *columns), records)


def about_seeds(results: Results) -> str:
    """A sentence on the seeds, and on what follows a ±."""
    seeds = results.comparison.seeds
    if len(seeds) == 1:
        return f"Seed {seeds[0]}"
    return f"Seeds {', '.join(map(str, seeds))}: mean ± standard deviation over the seeds"


def about_target(results: Results) -> str:
    """A sentence on the target and how it was chosen."""
    target, by = results.target, results.by
    if target is None:
        return f"No run finished with an {by.name} on the server's held-out data, so there is no common target"
    share = "90% of" if by.share else "1/0.9 of"
    of = f", {share} {target.of}'s final {by.name} on the server's data" if target.of else " on the server's data"
    return f"Target: an {by.name} of {target.score:.4f}{of}"


def how_it_ended(results: Results, measured: Measured) -> str:
    """The state of an unfinished run, with the reason if it failed."""
    run, planned = measured.run, results.comparison.run_config.get("num-server-rounds")
    after = f" after round {measured.summary.get('rounds')} of {planned}" if run.directory and planned else ""
    return f"{results.comparison.name(run)}: {run.outcome}{after}{f': {run.reason}' if run.reason else ''}"


def notes(results: Results) -> list[str]:
    """The notes below every table."""
    notes = [how_it_ended(results, each) for each in results.unfinished]
    notes += [
        f"{result.strategy}: {result.outcome}; its figures are of the finished runs"
        for result in results.strategies
        if 0 < result.finished < len(result.runs)
    ]
    notes += [
        f"{result.strategy}: {result.figures['rounds_to_target'].runs} of {len(result.counted)} runs reached the target"  # type: ignore[union-attr]
        for result in results.unreached
    ]
    return [*notes, about_target(results), about_seeds(results)]


# --- CSV ------------------------------------------------------------------------------------------------------------


def strategies_csv(results: Results) -> str:
    """One line per strategy: mean and standard deviation over its seeds; unknown values are empty."""
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
    """One line per run, in the order in which they are run; unknown values are empty."""
    target = results.target.score if results.target else None
    return _csv(
        {
            "strategy": each.run.strategy,
            "seed": each.run.seed,
            "outcome": each.run.outcome,
            "reason": each.run.reason,
            "run": each.run.directory.name if each.run.directory else "",
            "rounds": each.summary.get("rounds"),
            **each.figures(target),
            f"target_{results.by.key}": target,
        }
        for each in results.runs
    )


def _csv(records: Iterable[Mapping[str, Any]]) -> str:
    lines = list(records)
    return Table.of("", [Column(key, key) for key in lines[0]], lines).csv()


# --- Markdown and LaTeX ---------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """The table in Markdown, with the notes below it."""
    table = _text_table(results)
    below = "\n".join(f"- {markdown_text(note)}" for note in (*notes(results), _setting(results)))
    return f"# {markdown_text(table.title)}\n\n{table.markdown()}\n\n{below}\n"


def latex(results: Results) -> str:
    """The table in LaTeX with the package booktabs; the notes are comments."""
    table = _text_table(results)
    lines = (table.title, *notes(results), _setting(results), r"Needs \usepackage{booktabs}.")
    comments = "\n".join(f"% {visible(line)}" for line in lines)
    return f"{comments}\n{table.latex()}\n"


def _text_table(results: Results) -> Table:
    return strategies_table(results, (column for column in columns_of(results.by) if column.key not in _NOT_IN_A_TEXT))


def _setting(results: Results) -> str:
    config, clients = results.comparison.run_config, results.comparison.clients
    rounds = config.get("num-server-rounds")
    return f"{clients} simulated clients, {rounds} rounds; bytes are payload of all clients, both ways"


# --- terminal -------------------------------------------------------------------------------------------------------


def comparison_table(results: Results) -> Group:
    """The table, the notes and the paths of the results, for `console.print(…, soft_wrap=True)`."""
    comparison = results.comparison
    one_seed = len(comparison.seeds) == 1
    table = TerminalTable(
        title=shown(_title(results), style="bold"), title_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False, padding=0,
    )  # fmt: skip  # for a terminal of 80
    table.add_column("\nstrategy")
    to_target = f"{results.target.score:.4f}" if results.target else "target"
    for heading in (
        "server's\ndata", "clients'\nown tests", "\nbytes", "until\nround", f"until\n{to_target}", "a\nround",
        "client's\nstep",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for result in results.strategies:
        name = visible(result.strategy) + ("" if result.outcome == "finished" else f"\n{result.outcome}")
        table.add_row(Text(name), *_terminal_row(result, one_seed))
    behind = "over the clients" if one_seed else "over the seeds"
    lines = [*notes(results), f"Clients' own tests: mean ± standard deviation {behind}"]
    if results.unfinished:
        lines += [f"Resume the unfinished runs with `tepal compare --resume {comparison.folder}`"]
    lines += [f"Results in {comparison.folder}"]
    files = [f"{comparison.folder / HTML}  (open it in a browser)"]
    files += [f"{comparison.folder / name}" for name in (CSV, RUNS_CSV, MARKDOWN, LATEX, SVG)]
    return Group(table, *map(shown, lines), *map(indented, files))


def _title(results: Results) -> str:
    return results.comparison.task + ("" if results.by.share else f", {results.by.name}")


def _terminal_row(result: Result, one_seed: bool) -> list[str]:
    figures, key = result.figures, result.by.key
    clients, spread = figures.get(f"clients_{key}"), figures.get("clients_spread")
    if one_seed and clients is not None and spread is not None:
        clients = Statistic(clients.mean, spread.mean, 1)
    means = {
        "bytes_total": bytes_text, "rounds_to_target": _count_text, "bytes_to_target": bytes_text,
        "round_seconds": seconds_text, "step_seconds": step_text,
    }  # fmt: skip
    return [
        _short(figures.get(f"server_{key}")),
        _short(clients),
        *(MISSING if (figure := figures.get(key)) is None else write(figure.mean) for key, write in means.items()),
    ]


def _short(score: Statistic | None) -> str:
    if score is None:
        return MISSING
    deviation = "" if score.deviation is None else f" ±{score.deviation:.4f}".replace("±0.", "±.")
    return score_text(score.mean) + deviation
