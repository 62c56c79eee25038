"""What a comparison is asked for, checked before its runs begin: names, seeds, configs, and the target of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches

from tepal import models
from tepal.host.toml import parts_of
from tepal.server_app.config import ConfigError, RunConfig, read_run_config
from tepal.tools.compare.comparison import ComparedRun, Comparison
from tepal.tools.compare.picture import STRATEGIES
from tepal.tools.compare.plan import FEDAVG
from tepal.tools.compare.sections import DOUBT, Section
from tepal.tools.compare.target import BASELINE, FinalScore
from tepal.training.data.inputs import InputConfig

USUAL = ("fedavg", "fedfrozen", "selective", "fedensemble", "fedacs")
"""The strategies that are compared unless others are named."""

ALL = "all"  # in place of the strategies' names

Check = Callable[[RunConfig], None]
"""Raises ConfigError for a config that cannot be run."""


def strategy_names(text: str) -> list[str]:
    """Parse names of strategies with commas between, or "all". Raises ConfigError for unknown or repeated names."""
    if text.strip() == ALL:
        return list(STRATEGIES)
    names = parts_of(text)
    problems = []
    for name in dict.fromkeys(names):
        if name not in STRATEGIES:
            near = get_close_matches(name, STRATEGIES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"--strategies: there is no strategy {name!r}: {hint}allowed are {', '.join(STRATEGIES)}")
        elif names.count(name) > 1:
            problems.append(f"--strategies: {name!r} is named twice")
    if not names:
        problems.append(f"--strategies names none: allowed are {', '.join(STRATEGIES)}; {ALL!r} means all of them")
    if problems:
        raise ConfigError("\n".join(problems))
    return names


def seed_numbers(text: str) -> list[int]:
    """Parse seeds: whole numbers with commas between. Raises ConfigError for invalid or repeated ones."""
    parts = parts_of(text)
    try:
        seeds = [int(part) for part in parts]
    except ValueError as error:
        raise ConfigError(f"--seeds {text!r}: expected whole numbers with commas between, such as 1,2,3") from error
    if not seeds:
        raise ConfigError("--seeds names none: expected whole numbers with commas between, such as 1,2,3")
    if twice := [str(seed) for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]:
        raise ConfigError(f"--seeds: {', '.join(twice)} is named twice; name each seed once")
    for seed in seeds:
        read_run_config({"seed": seed})
    return seeds


def check(
    comparison: Comparison, check_one: Check, check_seed: Check | None, where: str = "", *, warn: bool = True
) -> None:
    """Check that all unfinished runs can be run. Raises ConfigError with the problems of all strategies or variants.

    Args:
        comparison: whose runs are checked.
        check_one: what else is checked of each strategy or variant, by the config of its first run.
        check_seed: what differs between its runs, and is checked of each; None for nothing.
        where: what names the variants file, before each problem.
        warn: as of `read_run_config`.
    """
    places: dict[str, list[ComparedRun]] = {}
    for run in comparison.runs:
        if run.outcome != "finished":
            places.setdefault(comparison.place(run), []).append(run)
    wrong: dict[tuple[str, str], list[str]] = {}  # problem, and of which seeds: the places that have it
    for place, runs in places.items():
        try:
            config = read_run_config(comparison.config_of(runs[0]), comparison.clients, warn=warn)
            check_one(config)
        except ConfigError as error:
            wrong.setdefault((str(error), ""), []).append(place)
            continue
        if check_seed is None:
            continue
        failing: dict[str, list[int]] = {}
        for seed in [run.seed for run in runs]:
            try:
                check_seed(replace(config, data=config.data.model_copy(update={"seed": seed})))
            except ConfigError as error:
                failing.setdefault(str(error), []).append(seed)
        for problem, seeds in failing.items():
            wrong.setdefault((problem, "" if len(seeds) == len(runs) else _with_seeds(seeds)), []).append(place)
    if wrong:
        # A problem of all of them is reported once, without their names.
        every = "all variants" if len(places) > 1 and not comparison.of_strategies else ""
        named = ((every if len(found) == len(places) else _some(found)) + seeds for (_, seeds), found in wrong.items())
        heads = (f"{name.strip()}: " if name else "" for name in named)
        raise ConfigError("\n".join(f"{where}{head}{text}" for head, (text, _) in zip(heads, wrong, strict=True)))


def _with_seeds(seeds: list[int]) -> str:
    return f" with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


_MOST_PLACES = 8  # of a grid, whose problems name the key and its value too


def _some(places: list[str]) -> str:
    more = len(places) - _MOST_PLACES
    return ", ".join(places) if more <= 0 else f"{', '.join(places[:_MOST_PLACES])} and {more} more"


def check_tasks(comparison: Comparison) -> None:
    """Raise ConfigError for a target that is no score of the task, or variants that have no common score."""
    regressions = {
        comparison.place(run): InputConfig.from_run_config(comparison.settings_of(run)).kind == models.SEQUENCES
        for run in comparison.runs
    }
    if len(set(regressions.values())) > 1:
        errors = [place for place, regression in regressions.items() if regression]
        others = [place for place, regression in regressions.items() if not regression]
        raise ConfigError(
            f"{errors[0]} is a regression and {others[0]} is not: an error and an accuracy cannot be compared. Make a "
            "comparison of each"
        )
    regression = any(regressions.values())
    if regression and any(section.question == DOUBT for section in comparison.sections):
        raise ConfigError(f"question={DOUBT!r} is for classification, but the variants are regressions: remove it")
    _check_target(comparison, regression)


def _check_target(comparison: Comparison, regression: bool) -> None:
    given = "--target" if comparison.of_strategies else "target"  # of variants it may be the file's
    relative = comparison.relative_target
    counting = [section for section in comparison.groups if section.counts] or comparison.groups
    if relative and (problems := [text for one in counting if (text := _unknown(comparison, one, relative))]):
        raise ConfigError("\n".join(f"{given} {comparison.target}: {text}" for text in problems))
    if regression:
        return
    if relative and abs(relative.margin) >= 1:
        raise ConfigError(
            f"{given} {comparison.target}: the margin is {abs(relative.margin):g}, expected less than 1: an accuracy "
            "is a share, so 0.005 is half a point"
        )
    if isinstance(comparison.target, float | int) and comparison.target > 1:
        raise ConfigError(f"{given} is {comparison.target:g}, expected an accuracy from 0 to 1")


def _unknown(comparison: Comparison, section: Section, target: FinalScore) -> str:
    """What is wrong with a target that is relative to a final score, in a section where its name is not of one."""
    of, reference = target.of, comparison.reference(section, target.of)
    where = section.place.removesuffix(", ") or "the comparison"
    if of == BASELINE and reference != BASELINE and any(variant.base == BASELINE for variant in section.variants):
        return f"{where} has a variant {BASELINE!r}, but its baseline is {reference!r}. Give the variant another name"
    if reference:
        return ""
    bases = list(dict.fromkeys(variant.base for variant in section.variants))
    if comparison.of_strategies:
        what = f"{of!r} is {FEDAVG}, which is not compared" if of == BASELINE else f"{of!r} is not compared"
        remedy = "Add the strategy with --strategies, or name one of these"
        return f"{what}.{target.hint} Allowed are {', '.join(bases)}. {remedy}"
    allowed = f"Allowed are {', '.join((BASELINE, *bases))}. {BASELINE!r} is the baseline of each section"
    return f"{where} has no variant {of!r}.{target.hint} {allowed}"
