"""The combinations of a grid, as variants in sections."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count, product

from tepal.host.toml import Value
from tepal.server_app.config import ConfigError
from tepal.tools.compare.grid.values import Grid
from tepal.tools.compare.plan import MOST_RUNS, Comparison
from tepal.tools.compare.sections import LONGEST_TITLE, MOST_SECTIONS, Section, Variant, value_text

_BASE = 58  # characters of a base's name in that of a combination, which has 64 with its number


def combinations(grid: Grid) -> Iterator[dict[str, Value]]:
    """Yield every combination of the values, those of the last key changing first."""
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def strategies_grid(strategies: Sequence[str], grid: Grid, seeds: int) -> tuple[Section, ...]:
    """The only section of a comparison of strategies: each with every combination. Raises ConfigError for too many."""
    _check_runs(len(strategies), grid, seeds)
    numbers = count(1)
    variants = [
        _combination(Variant(name, {"strategy": name}), values, next(numbers), "")
        for name in strategies
        for values in combinations(grid)
    ]
    return (Section("", tuple(variants)),)


def variants_grid(sections: Sequence[Section], grid: Grid, seeds: int) -> tuple[Section, ...]:
    """The sections of a variants file, each variant with every combination.

    A section that asks a question becomes one section for each combination: the question is about variants that
    otherwise have equal settings. Its title then has the values.

    Raises:
        ConfigError: with all variants that have a value of their own for a varied key, or for too many runs, too many
            sections, or titles that are too long.
    """
    problems = [
        f"{section.place}variant {variant.name!r} has {key}={variant.run_config[key]!r} of its own (also by "
        f"[section.common]), so {key} cannot be varied: leave it out of the variant, or do not vary it"
        for section in sections
        for variant in section.variants
        for key in grid
        if key in variant.run_config
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    _check_runs(sum(len(section.variants) for section in sections), grid, seeds)
    number = math.prod(map(len, grid.values()))
    asking = sum(bool(section.question) for section in sections)
    if (found := len(sections) + asking * (number - 1)) > MOST_SECTIONS:
        raise ConfigError(
            f"{found} sections, one for each section that asks a question and each of {number} combinations of varied "
            f"values: at most {MOST_SECTIONS} are allowed; vary fewer values, or remove the questions"
        )
    numbers, made = count(1), []
    for section in sections:
        groups = [[each] for each in combinations(grid)] if section.question else [[*combinations(grid)]]
        for group in groups:
            variants = tuple(
                _combination(variant, values, next(numbers), variant.name)
                for variant in section.variants
                for values in group
            )
            made.append(_section(section, variants))
    if long := [section.title for section in made if len(section.title) > LONGEST_TITLE]:
        raise ConfigError(
            f"the title {long[0]!r}, with the varied values, has {len(long[0])} characters: at most {LONGEST_TITLE} "
            "are allowed; shorten the section's title"
        )
    return tuple(made)


def planned_text(comparison: Comparison) -> str:
    """What is run, such as "12 runs: 2 strategies × 3 values of learning-rate × 2 seeds"."""
    bases = {variant.base for section in comparison.groups for variant in section.variants}
    kind = "strategy strategies" if comparison.of_strategies else "variant variants"
    values = [_counted(len(found), f"value values of {key}") for key, found in comparison.grid.items()]
    factors = [_counted(len(bases), kind), *values, _counted(len(comparison.seeds), "seed seeds")]
    finished = sum(run.outcome == "finished" for run in comparison.runs)
    rest = f"; {finished} finished before" if finished else ""
    return f"{_counted(len(comparison.runs), 'run runs')}: {' × '.join(factors)}{rest}"


def _counted(number: int, words: str) -> str:
    """A number with the first word, or the second if it is not one; further words follow both."""
    one, several, *rest = words.split(" ")
    return " ".join([str(number), one if number == 1 else several, *rest])


def _check_runs(bases: int, grid: Grid, seeds: int) -> None:
    runs = bases * math.prod(map(len, grid.values())) * max(1, seeds)
    if runs > MOST_RUNS:
        raise ConfigError(
            f"{runs:,} runs, the product of the strategies or variants, the varied values and the seeds: at most "
            f"{MOST_RUNS:,} are allowed"
        )


def _combination(variant: Variant, values: dict[str, Value], number: int, of: str) -> Variant:
    # The number is that of all combinations, so names differ even if their beginnings are cut off at the same place.
    return Variant(f"{variant.name[:_BASE]}-{number}", {**variant.run_config, **values}, values, of)


def _section(section: Section, variants: tuple[Variant, ...]) -> Section:
    """A section with these combinations of its variants; the baseline is its first combination."""
    baseline = next((variant.name for variant in variants if variant.of == section.baseline), "")
    title = section.title
    if section.question:
        title += ": " + ", ".join(f"{key}={value_text(value)}" for key, value in variants[0].values.items())
    return Section(title, variants, section.about, section.question, baseline, section.within)
