"""Ranges of settings that are searched, and values that Optuna's TPE sampler draws from them.

Optuna is an optional dependency, imported when values are drawn: `pip install 'tepal[search]'`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from tepal.host.toml import Value

if TYPE_CHECKING:
    import optuna

RANDOM_TRIALS = 5
"""First trials whose values are drawn uniformly, because there are too few scores to draw them by."""

_DRAWS = 30  # of a trial, until values are drawn that no trial had


def optuna_is_missing() -> str:
    """Return what to do about it if Optuna is not installed, else ""."""
    if importlib.util.find_spec("optuna"):
        return ""
    return "a search needs optuna, which this Python does not have: pip install 'tepal[search]'"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included: whole ones if both ends are; in steps, or on a log scale."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def samples(self) -> tuple[Value, ...]:
        """The values that are checked before the search: both ends."""
        return (self.low, self.high)

    def at(self, share: float) -> Value:
        """The number at this share of the range, from 0 to 1."""
        wide = self.high - self.low
        return self.exact(self.low * (self.high / self.low) ** share if self.log else self.low + share * wide)

    def exact(self, value: Value) -> Value:
        """Return the number of the range that is nearest: without step, if it need not be whole, itself.

        Multiples of a step are computed in decimals: 0.1 + 2 · 0.1 is 0.3, not 0.30000000000000004.
        """
        if self.step is None and not self.whole:
            return value
        low, step = Decimal(str(self.low)), Decimal(str(self.step or 1))
        found = low + round((Decimal(str(value)) - low) / step) * step
        return int(found) if self.whole else float(found)


@dataclass(frozen=True)
class Choices:
    """One of several values."""

    choices: tuple[Value, ...]

    @property
    def samples(self) -> tuple[Value, ...]:
        """The values that are checked before the search: all."""
        return self.choices

    def at(self, share: float) -> Value:
        """The value at this share of the list, from 0 to 1."""
        return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]

    def exact(self, value: Value) -> Value:
        return value


Space = Range | Choices


def distribution(space: Space) -> optuna.distributions.BaseDistribution:
    """The range in Optuna's terms."""
    import optuna

    if not isinstance(space, Range):
        return optuna.distributions.CategoricalDistribution(space.choices)
    if space.whole:
        return optuna.distributions.IntDistribution(
            int(space.low), int(space.high), log=space.log, step=1 if space.step is None else int(space.step)
        )
    return optuna.distributions.FloatDistribution(
        float(space.low), float(space.high), log=space.log, step=None if space.step is None else float(space.step)
    )


def spread_out(spaces: Mapping[str, Space], number: int, count: int = RANDOM_TRIALS) -> dict[str, Value]:
    """The values of trial `number` of `count` in a Latin hypercube: of every range the centre of one of `count` parts.

    The parts are equal on the range's own scale. Their order depends on the key alone, so searches that share a key
    have the same values for it in trials with the same number.
    """
    found = dict[str, Value]()
    for key, space in spaces.items():
        order = np.random.default_rng(list(key.encode())).permutation(count)
        found[key] = space.at((int(order[number]) + 0.5) / count)
    return found


def draw(
    spaces: Mapping[str, optuna.distributions.BaseDistribution],
    earlier: Sequence[optuna.trial.FrozenTrial],
    *,
    minimise: bool,
    seed: Callable[[int], int],
) -> dict[str, Any]:
    """Draw the values of a new trial from the scores of all others.

    Values that no trial had, unless a number of draws in a row has only such ones.

    Args:
        spaces: key → what is drawn from.
        earlier: all trials before this one.
        minimise: whether low scores are better.
        seed: of a draw, by its number from 0.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it logs every study
    tried, drawn = [trial.params for trial in earlier], dict[str, Any]()
    for number in range(_DRAWS):
        sampler = optuna.samplers.TPESampler(seed=seed(number), n_startup_trials=RANDOM_TRIALS, constant_liar=False)
        scratch = optuna.create_study(sampler=sampler, direction="minimize" if minimise else "maximize")
        scratch.add_trials(earlier)
        drawn = scratch.ask(dict(spaces)).params
        if drawn not in tried:
            break
    return drawn
