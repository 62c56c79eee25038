"""A comparison's tables and the notes below them, and what a terminal shows of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Group as Parts
from rich.console import RenderableType
from rich.table import Table as TerminalTable
from rich.text import Text

from tepal.host.text import visible
from tepal.records.columns import Column, bytes_text, score_text, seconds_text, step_text
from tepal.report.table import MISSING, Table
from tepal.tools.compare.answers import answer, compared_in, share_text, threshold
from tepal.tools.compare.comparison import (
    CSV,
    HTML,
    LATEX,
    MARKDOWN,
    RUNS_CSV,
    SVG,
    Comparison,
    Group,
    Measured,
    Result,
    Results,
    Statistic,
)
from tepal.tools.compare.doubt import DOUBT_COLUMNS, FLAGGED
from tepal.tools.compare.figure_columns import count_text, grid_columns, rows
from tepal.tools.compare.grid.best import best_notes, best_of, grid_notes, marks
from tepal.tools.compare.sections import BYTES, DOUBT, OWN_TESTS, value_text
from tepal.tools.terminal import indented, shown


def noun(comparison: Comparison) -> str:
    """What is compared, as the heading of a column."""
    return "strategy" if comparison.of_strategies else "variant"


def headline(group: Group) -> str:
    """The heading of a comparison."""
    of = "strategies" if group.comparison.of_strategies else "variants"
    return f"{group.comparison.task}: {of} compared"


def variants_table(group: Group, columns: Iterable[Column]) -> Table:
    """A row for each strategy or variant, whose name is the first column, with the values of varied keys next to it."""
    title = group.section.title or headline(group)
    first = Column(noun(group.comparison), "name", left=True)
    return Table.of(title, (first, *grid_columns(group), *columns), rows(group))


# --- notes ----------------------------------------------------------------------------------------------------------


def about_seeds(results: Results) -> str:
    """A sentence on the seeds, and on what follows a ±."""
    seeds, asks = results.comparison.seeds, results.comparison.asks
    if len(seeds) == 1:
        return f"One seed, {seeds[0]}: differences may be chance" if asks else f"Seed {seeds[0]}"
    said = f"Seeds {', '.join(map(str, seeds))}: mean ± standard deviation over the seeds"
    paired = "differences to the baseline are paired by seed, with 95% intervals (Student's t)"
    return f"{said}; {paired}; undecided: the interval includes 0 (of a factor, 1)" if asks else said


def about_target(group: Group) -> str:
    """A sentence on the target and how it was chosen."""
    target, by = group.target, group.by
    if target is not None and target.margin is not None:
        each = ", each seed's own; their mean" if len(target.by_seed or ()) > 1 else ""
        without = [seed for seed in group.comparison.seeds if target.at(seed) is None]
        beyond = "" if by.possible(target.score) else f"; no {by.name} can reach it"
        return f"Target: {threshold(group)}{each}{beyond}{_without(without, target.of)}"
    if target is None and (group.section.question == BYTES or group.comparison.relative_target):
        return threshold(group)
    if target is None:
        return f"No run finished with an {by.name} on the server's held-out data, so there is no common target"
    share = "90% of" if by.share else "1/0.9 of"
    of = f", {share} {target.of}'s final {by.name} on {target.data}" if target.of else f" on {target.data}"
    return f"Target: an {by.name} of {target.score:.4f}{of}"


def _without(seeds: Sequence[int], of: str) -> str:
    """Why seeds have no target."""
    if not seeds:
        return ""
    named = f"seed {seeds[0]} has" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))} have"
    return f"; {named} none, because {of} did not finish with {'it' if len(seeds) == 1 else 'them'}"


def how_it_ended(group: Group, measured: Measured) -> str:
    """The state of an unfinished run, with the reason if it failed."""
    run = measured.run
    planned = {**group.comparison.settings_of(run), **measured.changed}.get("num-server-rounds")
    after = f" after round {measured.summary.get('rounds')} of {planned}" if run.directory and planned else ""
    return f"{group.comparison.name(run)}: {run.outcome}{after}{f': {run.reason}' if run.reason else ''}"


def changed_settings(results: Results) -> list[str]:
    """A sentence on each run that was resumed without its comparison, with other settings."""
    comparison, said = results.comparison, []
    for each in results.runs:
        planned = comparison.settings_of(each.run)
        changes = (
            f"{key}={value_text(value)} (the comparison has {value_text(planned[key])})"
            for key, value in each.changed.items()
        )
        if each.changed:
            said.append(f"{comparison.name(each.run)}: it was resumed with other settings: {', '.join(changes)}")
    return said


def notes(results: Results) -> list[str]:
    """The notes below the last table: on runs, on the only section if it has no title, and on seeds."""
    notes = [*(how_it_ended(results, each) for each in results.unfinished), *changed_settings(results)]
    notes += [
        f"{result.label}: {result.outcome}; its figures are of the finished runs"
        for result in results.variants
        if 0 < result.finished < len(result.runs)
    ]
    notes += [note for group in results.sections if not group.section.title for note in group_notes(group)]
    return [*notes, about_seeds(results), *grid_notes(results)]


def group_notes(group: Group) -> list[str]:
    """The notes below a section's table."""
    if group.section.question not in ("", BYTES):
        return [_FLAGGED] if group.section.question == DOUBT else []
    reached = [
        f"{result.label}: {result.figures['rounds_to_target'].runs} of {result.aimed} runs reached the target"  # type: ignore[union-attr]
        for result in group.unreached
    ]
    return [*best_notes(group), *reached, about_target(group)]


_FLAGGED = "Flagged: the share of foreign images that are flagged while 5% of the held-out images are, too"


def setting(results: Results) -> str:
    """A sentence on clients, rounds and bytes."""
    comparison = results.comparison
    settings = [comparison.settings_of(run) for run in comparison.runs]
    rounds = ", ".join(dict.fromkeys(str(config.get("num-server-rounds")) for config in settings))
    return f"{comparison.clients} simulated clients, {rounds} rounds; bytes are payload of all clients, both ways"


# --- terminal -------------------------------------------------------------------------------------------------------


def resume_command(comparison: Comparison, options: str = "") -> str:
    """The command that goes on with a comparison; `options`: of the engine, as `Runner.options`."""
    return f"tepal compare --resume {shlex.quote(str(comparison.folder))} {options}".rstrip()


def comparison_table(results: Results, options: str = "") -> Parts:
    """Tables, notes, paths of the results, and answers, for `console.print(…, soft_wrap=True)`.

    `options`: of the engine, for the command that goes on with what is not finished.
    """
    comparison, shows = results.comparison, []  # type: tuple[Comparison, list[RenderableType]]
    titled = any(group.section.title for group in results.sections)
    if titled:
        shows.append(shown(_title(results), style="bold"))
    for group in results.sections:
        shows += _section(group) if titled else [_terminal_table(group, shown(_title(results), style="bold"))]
    behind = "over the clients" if len(comparison.seeds) == 1 else "over the seeds"
    lines = [*([""] if titled else []), *notes(results), f"Clients' own tests: mean ± standard deviation {behind}"]
    if results.unfinished:
        lines += [f"Resume the unfinished runs with `{resume_command(comparison, options)}`"]
    lines += [f"Results in {comparison.folder}"]
    page = f"{comparison.folder / HTML}  (open it in a browser)"
    files = [f"{comparison.folder / name}" for name in (CSV, RUNS_CSV, MARKDOWN, LATEX, SVG)]
    if not comparison.asks:
        return Parts(*shows, *map(shown, lines), *map(indented, (page, *files)))
    answers = [f"{group.section.title}: {said}" for group in results.sections if (said := answer(group))]
    return Parts(*shows, *map(shown, lines), *map(indented, files), *map(shown, ("", *answers, "")), shown(page))


def _title(results: Results) -> str:
    return results.comparison.task + ("" if results.by.share else f", {results.by.name}")


def _section(group: Group) -> list[RenderableType]:
    """A section with its heading, its sentence, its table and its notes."""
    section = group.section
    heads = [shown(""), shown(section.title, style="bold"), *([shown(section.about)] if section.about else [])]
    return [*heads, _terminal_table(group), *map(shown, group_notes(group))]


Cell = Callable[[Result], str]


def _terminal_table(group: Group, title: Text | None = None) -> TerminalTable:
    """The table of a section for a terminal of 80 columns."""
    table = TerminalTable(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
        if group.section.question else 0,
    )  # fmt: skip
    table.add_column(f"\n{noun(group.comparison)}", overflow="fold")
    columns = _QUESTION_COLUMNS.get(group.section.question, _usual_columns)(group)
    for key in group.varied:
        table.add_column(_narrow(key), justify="right", overflow="fold")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in group.variants:
        name = visible(result.base) + ("" if result.outcome == "finished" else f"\n{result.outcome}")
        values = (Text(value_text(result.values[key])) for key in group.varied)
        table.add_row(Text(name), *values, *(text(result) for _, text in columns))
    return table


def _narrow(heading: str) -> str:
    """The name of a key on two lines or more, so that its column is as wide as a value."""
    *lines, last = re.split(r"(?<=[-.])", heading)
    return "\n".join([*lines, last]) if lines else f"\n{last}"


def _usual_columns(group: Group) -> Sequence[tuple[str, Cell]]:
    """The columns of a section that asks no question."""
    to_target = f"{group.target.score:.4f}" if group.target else "target"
    server, own = f"server_{group.by.key}", f"clients_{group.by.key}"
    scores = (("server's\ndata", _short(server)), ("clients'\nown tests", _own_tests(group)))
    nbytes = ("\nbytes", _mean("bytes_total", bytes_text))
    bytes_to_target = (f"until\n{to_target}", _mean("bytes_to_target", bytes_text))
    if group.varied:  # whose columns take the place of the others
        marked = [(head, _marked(text, group, key)) for key, (head, text) in zip((server, own), scores, strict=True)]
        return (*marked, nbytes, bytes_to_target)
    if group.target is None:
        times = (("a\nround", "round_seconds", seconds_text), ("client's\nstep", "step_seconds", step_text))
        return (*scores, nbytes, *((heading, _mean(key, write)) for heading, key, write in times))
    return (
        *scores,
        bytes_to_target,
        ("of it\ndown", _mean("bytes_down_to_target", bytes_text)),
        ("of it\nup", _mean("bytes_up_to_target", bytes_text)),
        ("after\nrounds", _mean("rounds_to_target", count_text)),
        ("and\ntime", _mean("seconds_to_target", seconds_text)),
    )


def _marked(text: Cell, group: Group, key: str) -> Cell:
    """A score, with the mark of a best combination below it if that is the best by this score."""
    best = {one.result.name for one in best_of(group) if one.key == key}
    marked = {name: mark for name, mark in marks(group).items() if name in best}
    return lambda result: "\n".join(filter(None, (text(result), marked.get(result.name, ""))))


def _bytes_columns(group: Group) -> Sequence[tuple[str, Cell]]:
    to_target = f"{group.target.score:.4f}" if group.target else "target"
    own = group.target is not None and group.target.own_tests
    score = ("clients'\nown tests" if own else "server's\ndata", _short(group.score_key))

    def until(result: Result) -> str:
        figure = result.figures.get("bytes_to_target")
        some = "" if figure is None or figure.runs == result.aimed else f"\n{figure.runs} of {result.aimed}"
        return _mean("bytes_to_target", bytes_text)(result) + some

    return (
        score,
        (f"bytes until\n{to_target}", until),
        ("down,\nup", _both(_mean("bytes_down_to_target", bytes_text), _mean("bytes_up_to_target", bytes_text))),
        ("rounds,\ntime", _both(_mean("rounds_to_target", count_text), _mean("seconds_to_target", seconds_text))),
        ("times\nfewer", _difference(group)),
    )


def _own_tests_columns(group: Group) -> Sequence[tuple[str, Cell]]:
    return (("clients'\nown tests", _own_tests(group)), ("difference\nto the baseline", _difference(group)))


def _doubt_columns(group: Group) -> Sequence[tuple[str, Cell]]:
    """Each figure, with the word "undecided" below it where it is."""

    def cell(key: str, write: Callable[[float], str]) -> Cell:
        compared = next(one for one in compared_in(group) if one.key == key)

        def text(result: Result) -> str:
            found = compared.of(result, group)
            return _mean(key, write)(result) + ("\nundecided" if found and found.undecided else "")

        return text

    heads = ("\nloss", "calibration\nerror", "letters\nflagged", "noise\nflagged", "covered\nflagged")
    score = ("server's\ndata", cell(f"server_{group.by.key}", score_text))
    return (
        score,
        *(
            (head, cell(column.key, share_text if column.key in FLAGGED else score_text))
            for head, column in zip(heads, DOUBT_COLUMNS, strict=True)
        ),
    )


_QUESTION_COLUMNS = {BYTES: _bytes_columns, OWN_TESTS: _own_tests_columns, DOUBT: _doubt_columns}


def _difference(group: Group) -> Cell:
    """The difference to the baseline with its interval below it; of the baseline, its name as such."""
    [compared] = compared_in(group)

    def text(result: Result) -> str:
        if result is group.baseline:
            return "baseline"
        found = compared.of(result, group)
        certainty = found.certainty.split(", ") if found and found.certainty else []
        return MISSING if found is None else "\n".join((found.write(found.mean), *certainty))

    return text


def _mean(key: str, write: Callable[[float], str]) -> Cell:
    return lambda result: MISSING if (figure := result.figures.get(key)) is None else write(figure.mean)


def _both(above: Cell, below: Cell) -> Cell:
    """Two figures, one below the other; if both are missing, one line."""

    def text(result: Result) -> str:
        texts = (above(result), below(result))
        return MISSING if texts == (MISSING, MISSING) else "\n".join(texts)

    return text


def _own_tests(group: Group) -> Cell:
    """The score on the clients' own tests: ± its spread over the clients, or its deviation over the seeds."""
    one_seed, key = len(group.comparison.seeds) == 1, f"clients_{group.by.key}"

    def text(result: Result) -> str:
        clients, spread = result.figures.get(key), result.figures.get("clients_spread")
        if one_seed and clients is not None and spread is not None:
            clients = Statistic(clients.mean, spread.mean, 1)
        return _score(clients)

    return text


def _short(key: str) -> Cell:
    return lambda result: _score(result.figures.get(key))


def _score(score: Statistic | None) -> str:
    if score is None:
        return MISSING
    deviation = "" if score.deviation is None else f" ±{score.deviation:.4f}".replace("±0.", "±.")
    return score_text(score.mean) + deviation
