"""A comparison as text: CSV with unrounded figures, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tepal.host.text import visible
from tepal.records.columns import Column
from tepal.records.round_record import WIRE
from tepal.report.table import Table, markdown_text
from tepal.tools.compare.answers import Compared, answer, compared_in
from tepal.tools.compare.comparison import Group, Measured, Result, Results, aim
from tepal.tools.compare.doubt import DOUBT_COLUMNS
from tepal.tools.compare.figure_columns import columns_of, difference_key, group_columns
from tepal.tools.compare.grid.best import marks
from tepal.tools.compare.sections import DOUBT, value_text
from tepal.tools.compare.tables import group_notes, headline, notes, setting, variants_table

# --- CSV ------------------------------------------------------------------------------------------------------------


def strategies_csv(results: Results) -> str:
    """One line per strategy, variant or combination of varied values; unknown values are empty.

    It has the mean and the standard deviation over the seeds.

    Of variants also the section with its question and answer, and the difference to its baseline with its interval.
    """
    lines = []
    for group in results.sections:
        best = {result.name: "" for result in group.variants} | marks(group)
        for result in group.variants:
            given = {"best": best[result.name]} if results.comparison.grid else {}
            lines.append(_row(result, group, results, given))
    return _csv(lines)


def _row(result: Result, group: Group, results: Results, best: Mapping[str, str]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for key in (*(column.key for column in columns_of(results.by)), *_doubt_keys(results)):
        statistic = result.figures.get(key)
        figures[key] = statistic and statistic.mean
        figures[f"{key}_sd"] = statistic and statistic.deviation
    reached = result.figures.get("rounds_to_target")
    return {
        **_names(result, group),
        "runs": len(result.runs),
        "finished": result.finished,
        **figures,
        f"target_{results.by.key}": group.target and group.target.score,
        "target_data": group.target and group.target.of_data,
        "reached_target": reached.runs if reached else 0,
        **best,
        **_differences(result, group, results),
    }


def _names(result: Result, group: Group) -> dict[str, Any]:
    values = {key: value_text(value) if isinstance(value, bool) else value for key, value in result.values.items()}
    if group.comparison.of_strategies:
        return {"strategy": result.strategy, **values}
    titled = {"section": group.section.title} if any(one.title for one in group.comparison.sections) else {}
    return {**titled, "variant": result.base, "strategy": result.strategy, **values}


def _doubt_keys(results: Results) -> list[str]:
    asked = any(group.section.question == DOUBT for group in results.sections)
    return [column.key for column in DOUBT_COLUMNS] if asked else []


def _wire_keys(results: Results) -> list[str]:
    """What `auto` left out and the bytes of the budget, if a run has them."""
    return [key for key in WIRE if any(line.value(key) is not None for each in results.runs for line in each.metrics)]


def _mean(values: Iterable[float | None]) -> float | None:
    """Of the rounds that have it."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _differences(result: Result, group: Group, results: Results) -> dict[str, Any]:
    """Mean, interval and verdict of every figure that some section compares; then the section's question and answer."""
    if not results.comparison.asks:
        return {}
    compared = {one.key: one for each in results.sections for one in compared_in(each)}
    here = {one.key for one in compared_in(group)}
    row: dict[str, Any] = {}
    for key, one in compared.items():
        found = one.of(result, group) if key in here else None
        low, high = found.interval if found and found.interval else (None, None)
        name = _name(one)
        row |= {name: found and found.mean, f"{name}_low": low, f"{name}_high": high,
                f"{name}_verdict": found and found.verdict}  # fmt: skip
    section = group.section
    asked = group.baseline.base if section.question else ""
    return {**row, "question": section.question, "baseline": asked, "answer": answer(group)}


def _name(compared: Compared) -> str:
    return "times_fewer_bytes_to_target" if compared.ratio else difference_key(compared.key)


def runs_csv(results: Results) -> str:
    """One line per run, in the order in which they are run; unknown values are empty."""
    found = {result.name: (result, group) for group in results.sections for result in group.variants}
    wire = _wire_keys(results)
    return _csv(_run_row(each, *found[each.run.compared], results, wire) for each in results.runs)


def _run_row(
    each: Measured, result: Result, group: Group, results: Results, wire: Sequence[str]
) -> dict[str, Any]:
    target, own_tests = aim(group.target, each)
    return {
        **_names(result, group),
        "seed": each.run.seed,
        "outcome": each.run.outcome,
        "reason": each.run.reason,
        "run": each.run.directory.name if each.run.directory else "",
        "rounds": each.summary.get("rounds"),
        **each.figures(target, own_tests),
        **{key: each.doubt[key] for key in _doubt_keys(results)},
        **{key: _mean(line.value(key) for line in each.metrics) for key in wire},
        f"target_{results.by.key}": target,
        "target_data": group.target and group.target.of_data,
    }


def _csv(records: Iterable[Mapping[str, Any]]) -> str:
    lines = list(records)
    return Table.of("", [Column(key, key) for key in lines[0]], lines).csv()


# --- Markdown and LaTeX ---------------------------------------------------------------------------------------------

_NOT_IN_A_TEXT = ("bytes_down", "bytes_up")  # a page is not wide enough for them


def markdown(results: Results) -> str:
    """The table of each section in Markdown, with the notes below."""
    parts = [f"# {markdown_text(headline(results))}"]
    for group in results.sections:
        section = group.section
        below = _list(group_notes(group)) if section.title else ""
        title, about, answered = map(markdown_text, (section.title, section.about, answer(group)))
        table = _text_table(group).markdown()
        parts += filter(None, (title and f"## {title}", about, table, answered, below))
    return "\n\n".join((*parts, _list([*notes(results), setting(results)]))) + "\n"


def _list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {markdown_text(text)}" for text in texts)


def latex(results: Results) -> str:
    """The table of each section in LaTeX with the package booktabs; headings, sentences and notes are comments."""
    lines = [headline(results), *notes(results), setting(results), r"Needs \usepackage{booktabs}."]
    parts = [_comments(lines)]
    for group in results.sections:
        if section := group.section.title:
            said = (section, group.section.about, answer(group), *group_notes(group))
            parts.append(_comments(filter(None, said)))
        parts.append(_text_table(group).latex())
    return "\n".join(parts) + "\n"


def _comments(lines: Iterable[str]) -> str:
    return "\n".join(f"% {visible(line)}" for line in lines)


def _text_table(group: Group) -> Table:
    return variants_table(group, (column for column in group_columns(group) if column.key not in _NOT_IN_A_TEXT))
