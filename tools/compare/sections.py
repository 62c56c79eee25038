"""Variants in sections: what a comparison compares, as a variants file has it and `comparison.json` keeps it.

A variant is a run config with a name. A section is a group of variants that are compared with each other; it may ask
one of QUESTIONS, and then has the tables, the picture and the sentence that answer it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tepal.host.text import visible
from tepal.host.toml import Value
from tepal.records.columns import is_number

BYTES, OWN_TESTS, DOUBT = "bytes", "own-tests", "doubt"
QUESTIONS = (BYTES, OWN_TESTS, DOUBT)
"""How many bytes lead to the baseline's accuracy; how well clients are served on their own tests; how reliable the
probabilities are."""

WITHIN = 0.005
"""By how much less than the baseline's final accuracy is enough, unless a section says otherwise."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # also the name of a colour in style sheets
LONGEST_TITLE, LONGEST_ABOUT = 100, 500  # characters
_LONGEST_VALUE = 40  # characters of a varied value
MOST_SECTIONS = 50  # each has figures on the page, which take half a second to make


@dataclass(frozen=True)
class Variant:
    """A named run config.

    Args:
        name: What tables, curves and pages call it; unique in a comparison.
        run_config: Its keys that are not common to the comparison's runs, `strategy` among them.
        values: Of a combination of a grid, the varied keys with their values, which are in its run config too.
        of: Of a combination, the variant of the file that it is made from; "": made from a strategy.
    """

    name: str
    run_config: Mapping[str, Value]
    values: Mapping[str, Value] = field(default_factory=dict)
    of: str = ""

    @property
    def base(self) -> str:
        """The variant or strategy that a combination is made from; without a grid, the name."""
        return (self.of or self.strategy) if self.values else self.name

    @property
    def label(self) -> str:
        """What messages and tables call it: the base, and the values of the varied keys."""
        return " ".join([self.base, *(f"{key}={value_text(value)}" for key, value in self.values.items())])

    @property
    def short(self) -> str:
        """What figures call it: the base, and the values without their keys."""
        return " ".join(filter(None, (self.base, ", ".join(map(value_text, self.values.values())))))

    @property
    def strategy(self) -> str:
        return str(self.run_config["strategy"])


@dataclass(frozen=True)
class Section:
    """Variants that are compared with each other.

    Args:
        title: Its heading; "" for the only section of a comparison without sections.
        variants: What is compared, in order.
        about: A sentence on what is compared and why.
        question: One of QUESTIONS, or "" for none.
        baseline: The name of the variant that the others are compared with; "" for none.
        within: For the question "bytes": by how much less than the baseline's final accuracy is enough.
    """

    title: str
    variants: Sequence[Variant]
    about: str = ""
    question: str = ""
    baseline: str = ""
    within: float = WITHIN

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]

    @property
    def counts(self) -> bool:
        """Whether its tables have what it takes until the target."""
        return self.question in ("", BYTES)

    @property
    def place(self) -> str:
        """How messages name it, before what they name in it; "" without a title."""
        return f"section {self.title!r}, " if self.title else ""

    def to_dict(self) -> dict[str, Any]:
        """Return its values under the keys of `comparison.json`."""
        return {**vars(self), "variants": [_to_dict(variant) for variant in self.variants]}


def value_text(value: Value) -> str:
    """A value of a run config as TOML writes it, but without quotes. Of a long one the end is kept, as of a path."""
    text = str(value).lower() if isinstance(value, bool) else visible(value)
    return text if len(text) <= _LONGEST_VALUE else f"…{text[1 - _LONGEST_VALUE :]}"


def _to_dict(variant: Variant) -> dict[str, Any]:
    told = {"name": variant.name, "run_config": dict(variant.run_config)}
    return {**told, "values": dict(variant.values), "of": variant.of} if variant.values else told


def section_of(values: Mapping[str, Any]) -> Section:
    """The section that `comparison.json` has. Raises ValueError, KeyError or TypeError where it is not one."""
    given = dict(values)
    variants = tuple(_variant(dict(each)) for each in given.pop("variants"))
    section = Section(variants=variants, **given)
    for problem in problems(section, titled=False):
        raise ValueError(problem)
    return section


def _variant(values: dict[str, Any]) -> Variant:
    variant = Variant(**values)
    if not isinstance(variant.name, str) or not NAME.fullmatch(variant.name):
        raise ValueError("the name of a variant is not of letters, digits, - and _")
    config = variant.run_config
    if not isinstance(config, dict) or not isinstance(config.get("strategy"), str):
        raise ValueError("the run config of a variant is of another type, or has no strategy")
    if not all(isinstance(value, bool | int | float | str) for value in config.values()):
        raise ValueError("a value of a variant's run config is of another type")
    if not isinstance(variant.values, dict) or any(
        key not in config or config[key] != value for key, value in variant.values.items()
    ):
        raise ValueError("the varied values of a variant are not those of its run config")
    if not isinstance(variant.of, str) or (variant.of and not NAME.fullmatch(variant.of)):
        raise ValueError("the variant that a combination is made from has no name of letters, digits, - and _")
    return variant


def problems(section: Section, *, titled: bool = True) -> Iterator[str]:
    """What is wrong with a section, whose variants are right. `titled`: it must have a title.

    The values come from a file, so each may be of any type.
    """
    names = section.names
    if not names:
        yield "no variants: expected at least one [[section.variant]]"
    for key, longest in (("title", LONGEST_TITLE), ("about", LONGEST_ABOUT)):
        text = getattr(section, key)
        if not isinstance(text, str) or len(text) > longest or (titled and key == "title" and not text.strip()):
            expected = f"a text of {'1 to' if key == 'title' else 'at most'} {longest} characters"
            yield f"{key}={_quoted(text)}: expected {expected}"
    if section.question not in ("", *QUESTIONS):
        yield f"question={_quoted(section.question)}: {near(section.question, QUESTIONS)}"
    elif section.question and len(names) == 1:
        yield f"question={section.question!r} with one variant: expected a baseline and at least one other variant"
    if section.baseline not in ("", *names):
        yield f"baseline={_quoted(section.baseline)} is not a variant of this section: {near(section.baseline, names)}"
    within = section.within
    if not is_number(within) or not math.isfinite(within) or within < 0:
        yield f"within={_quoted(within)}: expected a number of at least 0"


def near(value: Any, allowed: Sequence[str]) -> str:
    """A hint for a wrong value: the name that it resembles, and those that are allowed."""
    found = get_close_matches(str(value), allowed, n=1)
    return (f"did you mean {found[0]!r}? " if found else "") + f"allowed are {', '.join(allowed)}"


def _quoted(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
