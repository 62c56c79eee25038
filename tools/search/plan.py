"""What is searched: the file of a search, read and checked before anything runs.

    clients = 10                     # simulated clients
    seed = 1000                      # of the search: of its draws, and the run config's `seed` in all its runs
    [common]                         # run config of every trial
    [common.search]                  # ranges of every variant
    [[variant]]                      # one that is searched on its own; with `name`, and its own run config
    [variant.search]                 # its own ranges

A range is `{ from = 1e-4, to = 1e-2, log = true }`, `{ from = 8, to = 64, step = 8 }` or `{ choices = [1, 2, 4] }`.
What a variant sets takes precedence over what [common] sets, whether it is a value or a range.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from tepal import models
from tepal.host.toml import Value, flat, parse_untrusted
from tepal.server_app.config import ConfigError, RunConfig, defaults, read_run_config
from tepal.tools.paths import absolute_paths
from tepal.tools.spaces import Choices, Range, Space
from tepal.training.data.inputs import InputConfig

SEED = 1000
"""The default seed of a search: not one of those that results are usually reported for."""
CLIENTS = 10

ACCURACY, RMSE = "clients_accuracy", "clients_rmse"
"""Measures of trials: means over the clients, each counted alike, on their own test examples."""

USUAL = "usual"
"""Key of the app's run config in a search's JSON."""

_OWN_KEYS = ("seed", "runs", "resume")  # of the run config, which the search sets itself
_OF_NO_TRIAL = (*_OWN_KEYS, "checkpoints", "trackers", "mlflow.", "wandb.")  # beginnings of keys with no part in scores
# Of a client's steps alone: the model, the partition and the replies are the same with other values.
_OF_STEPS = ("batch-size", "clip-norm", "learning-rate", "local-epochs", "local-steps", "momentum", "weight-decay")
_RANGE_KEYS = ("from", "to", "log", "step", "choices")
_EXAMPLES = "{ from = 1e-4, to = 1e-2, log = true } or { choices = [1, 2, 4] }"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # as `tepal compare` has the names of what it compares


@dataclass(frozen=True)
class SearchedVariant:
    """A variant: its name, its own run config (without that of [common]), and the keys that are searched."""

    name: str
    config: Mapping[str, Value]
    search: Mapping[str, Space]


@dataclass(frozen=True)
class SearchPlan:
    """What a search file says."""

    clients: int
    seed: int
    common: Mapping[str, Value]
    variants: tuple[SearchedVariant, ...]

    @property
    def searched(self) -> tuple[SearchedVariant, ...]:
        """The variants with ranges."""
        return tuple(variant for variant in self.variants if variant.search)

    def config_of(self, variant: SearchedVariant, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return the run config of a trial with these values: what differs from the app's own."""
        return {**self.common, **variant.config, **values, "seed": self.seed}

    def to_json(self, usual: Mapping[str, Value]) -> str:
        """Return everything that determines the trials, as JSON: the plan, and what it takes from the app's run config.

        `usual`: run config of the app, which the plan's values change.
        """
        own = [{*self.common, *variant.config, *variant.search} for variant in self.searched]
        taken = {
            key: value
            for key, value in usual.items()
            if not key.startswith(_OF_NO_TRIAL) and not all(key in keys for keys in own)
        }
        return json.dumps({**asdict(self), USUAL: taken}, indent=2) + "\n"


def read_plan(file: Path) -> SearchPlan:
    """Read a search file. Raises ConfigError with all problems of its form; OSError if there is no such file.

    Whether the run config allows the values is checked by `check_values`.
    """
    try:
        table = parse_untrusted(file.expanduser().read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} is not a TOML file: {error}") from error
    reader = _Reader(file.expanduser().parent)
    plan = reader.plan(table)
    if reader.problems:
        raise _invalid(file, reader.problems)
    return plan


def check_values(plan: SearchPlan, usual: Mapping[str, Value], file: Path) -> str:
    """Check the run config at the ends of all ranges and with each choice, and return the measure of all trials.

    Args:
        usual: run config of the app, which the plan's values change.
        file: for the message.

    Returns:
        The column of `metrics.jsonl` with the clients' scores: ACCURACY or RMSE.

    Raises:
        ConfigError: with the problems of all variants, each once.
    """
    found: list[tuple[SearchedVariant, str]] = []
    measured: set[str] = set()
    for variant in plan.variants:
        for number, values in enumerate(_samples(variant)):
            config = {**usual, **plan.config_of(variant, values)}
            problems = list(_problems(config, plan.clients, warn=not number))  # once for a variant
            if not problems:
                regression = InputConfig.from_run_config(config).kind == models.SEQUENCES
                measured.add(RMSE if regression else ACCURACY)
            found += [(variant, problem) for problem in problems]
    _refuse(found, file)
    if len(measured) > 1:
        raise _invalid(
            file, ["some models classify and others are for a regression: their scores cannot be compared"]
        )
    return measured.pop()


def check_trials(
    plan: SearchPlan, usual: Mapping[str, Value], file: Path, check: Callable[[RunConfig], None], *, begun: bool = False
) -> None:
    """Check trials with their clients and data, for the values of `check_values`, which is called first.

    Args:
        plan: whose searched variants are checked.
        usual: run config of the app, which the plan's values change.
        file: for the message.
        check: raises ConfigError for a trial that cannot be run, each line a problem. It may build the model, so it is
            not called for other values of keys that change nothing but the clients' steps.
        begun: whether the search goes on: it may have failed trials, so only the first values are checked.

    Raises:
        ConfigError: with the problems of all variants, each once.
    """
    found: list[tuple[SearchedVariant, str]] = []
    for variant in plan.searched:
        for values in islice(_samples(variant, without=_OF_STEPS), 1 if begun else None):
            try:
                check(read_run_config({**usual, **plan.config_of(variant, values)}, warn=False))
            except ConfigError as error:
                found += [(variant, line) for line in str(error).splitlines()]
    _refuse(found, file)


def _samples(variant: SearchedVariant, without: Collection[str] = ()) -> Iterator[dict[str, Value]]:
    """Yield the first values of all ranges, then each of the others in place of its key's first, but of some keys."""
    first = {key: space.samples[0] for key, space in variant.search.items()}
    yield first
    for key, space in variant.search.items():
        for value in () if key in without else space.samples[1:]:
            yield {**first, key: value}


def _problems(config: Mapping[str, Value], clients: int, *, warn: bool) -> Iterator[str]:
    try:
        read_run_config(config, clients, warn=warn)
    except ConfigError as error:
        yield from (line.strip() for line in str(error).splitlines()[1:])
        return
    if not config["fraction-evaluate"]:
        yield (
            "fraction-evaluate=0: no client scores the final model, so trials have no score; set it above 0, best to 1"
        )


def _refuse(found: Iterable[tuple[SearchedVariant, str]], file: Path) -> None:
    """Raise ConfigError with the problems, each once, with the names of the variants that have it; not if none has."""
    wrong: dict[str, dict[str, None]] = {}
    for variant, problem in found:
        wrong.setdefault(problem, {})[variant.name] = None
    if wrong:
        raise _invalid(file, [f"{', '.join(names)}: {problem}" for problem, names in wrong.items()])


def _invalid(file: Path, problems: Sequence[str]) -> ConfigError:
    return ConfigError("\n".join([f"{file} is invalid:", *(f"  {problem}" for problem in problems)]))


class _Reader:
    """Reads the tables of a search file, and collects what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._with_strategy = False  # whether [common] sets it for all variants

    def plan(self, table: Mapping[str, Any]) -> SearchPlan:
        self._only(table, ("clients", "seed", "common", "variant"), "")
        clients = self._whole(table, "clients", CLIENTS, at_least=2)
        seed = self._whole(table, "seed", SEED, at_least=0)
        common, ranges = self._table(table.get("common", {}), "[common]")
        self._with_strategy = "strategy" in common
        listed = table.get("variant", [])
        if not isinstance(listed, list) or not listed:
            self.problems.append("there is no [[variant]]: add one for each method or setting that is searched")
            listed = []
        variants = tuple(self._variant(one, number, ranges) for number, one in enumerate(listed, 1))
        names = [variant.name for variant in variants]
        self.problems += [
            f"two variants are named {name!r}: each needs a name of its own"
            for name in dict.fromkeys(names)
            if name and names.count(name) > 1
        ]
        if listed and not self.problems and not any(variant.search for variant in variants):
            self.problems.append(
                "no variant has a table [variant.search], and there is no [common.search]: add the run config keys to "
                f"search, such as learning-rate = {_EXAMPLES}"
            )
        return SearchPlan(clients, seed, common, variants)

    def _variant(self, table: Any, number: int, common: Mapping[str, Space]) -> SearchedVariant:
        where = f"[[variant]] {number}"
        if not isinstance(table, Mapping):
            self.problems.append(f"{where} is {table!r}, expected a table")
            return SearchedVariant("", {}, {})
        name = table.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self.problems.append(
                f"{where}: name is {name!r}, expected 1 to 64 letters, digits, - and _"
                if "name" in table
                else f'{where} has no name: add one, such as name = "FedAvg"'
            )
            name = ""
        where = f"variant {name!r}" if name else where
        config, ranges = self._table({key: value for key, value in table.items() if key != "name"}, where)
        inherited = {key: space for key, space in common.items() if key not in config}
        if not (self._with_strategy or any("strategy" in keys for keys in (config, ranges, inherited))):
            self.problems.append(f'{where}: no strategy: add one, such as strategy = "fedavg"')
        return SearchedVariant(name, config, {**inherited, **ranges})

    def _table(self, table: Any, where: str) -> tuple[dict[str, Value], dict[str, Space]]:
        """Return the run config and the ranges of [common] or of a variant."""
        if not isinstance(table, Mapping):
            self.problems.append(f"{where} is {table!r}, expected a table")
            return {}, {}
        values = flat({key: value for key, value in table.items() if key != "search"})
        config = absolute_paths(values, Path(), self._folder)
        search = table.get("search", {})
        if not isinstance(search, Mapping):
            self.problems.append(f"{where}: search is {search!r}, expected a table of ranges")
            search = {}
        ranges = dict(self._ranges(search, "", where))
        for key in (*config, *ranges):
            if key in _OWN_KEYS:
                why = "set seed at the top of the file" if key == "seed" else "leave it out"
                self.problems.append(f"{where}: {key} is set by the search itself: {why}")
        self.problems += [
            f"{where}: {key} has both a value and a range: keep one of them" for key in config if key in ranges
        ]
        return config, ranges

    def _ranges(self, table: Mapping[str, Any], prefix: str, where: str) -> Iterator[tuple[str, Space]]:
        """Yield the keys of a search table with their ranges; `fedprox.mu` may stand in a table of its own."""
        for name, value in table.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value and all(isinstance(each, Mapping) for each in value.values()):
                yield from self._ranges(value, f"{key}.", where)
            elif isinstance(value, Mapping):
                space = self._space(value, key, f"{where}: search of {key}")
                if space is not None:
                    yield key, space
            else:
                self.problems.append(f"{where}: search of {key} is {value!r}, expected {_EXAMPLES}")

    def _space(self, table: Mapping[str, Any], key: str, where: str) -> Space | None:
        before = len(self.problems)
        self._only(table, _RANGE_KEYS, f"{where}: ")
        if len(self.problems) > before:
            return None
        if "choices" in table:
            return self._choices(table, where)
        return self._range(table, key, where)

    def _choices(self, table: Mapping[str, Any], where: str) -> Choices | None:
        values = table["choices"]
        if len(table) > 1:
            self.problems.append(f"{where} has choices and {', '.join(key for key in table if key != 'choices')}: keep "
                                 "the choices, or from and to")  # fmt: skip
        elif not isinstance(values, list) or not all(isinstance(value, bool | int | float | str) for value in values):
            self.problems.append(f"{where}: choices is {values!r}, expected a list of numbers, texts or true and false")
        elif len(values) < 2:
            self.problems.append(f"{where}: choices is {values!r}, expected at least two; a fixed value is set outside "
                                 "of the search table")  # fmt: skip
        elif any(values.index(value) < number for number, value in enumerate(values)):
            self.problems.append(f"{where}: choices {values!r} has a value twice: name each once")
        else:
            return Choices(tuple(values))
        return None

    def _range(self, table: Mapping[str, Any], key: str, where: str) -> Range | None:
        if "from" not in table or "to" not in table:
            self.problems.append(f"{where} is {dict(table)!r}, expected {_EXAMPLES}")
            return None
        given = Range(table["from"], table["to"], table.get("log", False), table.get("step"))
        wrong = list(_range_problems(given, key))
        self.problems += [f"{where}: {text}" for text in wrong]
        return None if wrong else given

    def _whole(self, table: Mapping[str, Any], key: str, usual: int, at_least: int) -> int:
        value = table.get(key, usual)
        if type(value) is not int or not at_least <= value < 2**32:
            self.problems.append(f"{key} is {value!r}, expected a whole number from {at_least} on")
            return usual
        return value

    def _only(self, table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        """Note the keys of a table that are not known, with a similar one."""
        for key in table:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(known)}"
                self.problems.append(f"{where}{key!r} is not a key of {'a range' if where else 'the file'}: {hint}")


def _range_problems(given: Range, key: str) -> Iterator[str]:
    """Yield what is wrong with a range, whose values may be of any type, for a key of the run config."""
    low, high, step, usual = given.low, given.high, given.step, defaults().get(key)
    if not isinstance(given.log, bool):
        yield f"log is {given.log!r}, expected true or false"
        return
    if not _is_number(low) or not _is_number(high):
        yield f"from is {low!r} and to is {high!r}, expected numbers"
        return
    if not low < high:
        yield f"from is {low!r} and to is {high!r}, expected from < to"
    if isinstance(usual, bool | str):
        yield f"{key} is not a number: name its choices, choices = [...]"
    elif isinstance(usual, int) and not given.whole:
        yield f"{key} is a whole number, but from is {low!r} and to is {high!r}: write both without a point"
    if given.log and low <= 0:
        yield f"log = true and from is {low!r}, expected from > 0: a log scale has no 0"
    if step is None:
        return
    if given.log:
        yield f"log = true and step is {step!r}: leave one of them out"
    if not _is_number(step) or step <= 0 or (given.whole and not isinstance(step, int)):
        yield f"step is {step!r}, expected a {'whole ' if given.whole else ''}number above 0"
    elif step > high - low > 0:
        yield f"step is {step!r}, expected at most to - from = {high - low:g}"
    elif low < high and (last := _last_step(low, high, step)) != high:
        yield (
            f"to is {high!r}, expected from = {low!r} and a whole number of steps of {step!r}: the last value is "
            f"{last!r}, write to = {last!r}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _last_step(low: int | float, high: int | float, step: int | float) -> int | float:
    """Return the largest number of the range that is `low` and a whole number of steps, computed in decimals."""
    start, each = Decimal(str(low)), Decimal(str(step))
    last = start + (Decimal(str(high)) - start) // each * each
    return int(last) if isinstance(high, int) and last == int(last) else float(last)
