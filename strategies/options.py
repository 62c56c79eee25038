"""The declaration of a strategy's options, and its line in the catalogue.

A strategy is a class with the decorator `listed`. Its options are the keyword-only arguments of its constructor whose
defaults are numbers, booleans or strings. Each is declared once: its range in the annotation, its default in the
signature, its help text in the docstring's `Args`. The constructor's checks, the keys of the run config,
`tepal strategies` and two pages of the documentation are derived from these.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from tepal.strategies.rounds.strategy import MethodStrategy

if TYPE_CHECKING:
    from torch import nn

    from tepal.exchange.encodings import Encoding
    from tepal.strategies.method import ModelBlocks
    from tepal.strategies.rounds.checkpoint import Checkpoints
    from tepal.strategies.rounds.report import RoundReport

S = TypeVar("S", bound=MethodStrategy)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a moment, in [0, 1)."""


class RoundOptions(TypedDict, total=False):
    """Keyword arguments that every strategy has: those of `MethodStrategy`, where they are described."""

    model: nn.Module | ModelBlocks | None
    fraction_train: float
    fraction_evaluate: float
    min_available_nodes: int
    min_replies: int
    max_replies: int | None
    schedule: str
    seed: int
    deterministic: bool
    robust: str
    max_weight_share: float
    classes: int | None
    hostile_share: float
    krum_keep: int
    encoding: Encoding | None
    experiment: str | None
    checkpoints: Checkpoints | Path | str | None
    resume: bool
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    on_round: Callable[[RoundReport], None] | None
    on_progress: Callable[[RoundReport], None] | None


@dataclass(frozen=True)
class Listing:
    """One strategy of the catalogue, and its section of the run config."""

    strategy: type[MethodStrategy]
    name: str
    """Value of the key `strategy`, and prefix of the strategy's own keys."""
    title: str
    """Name of the method, as its paper writes it."""
    does: str
    """What the method does, in some words."""
    paper: str
    transfers: str
    """Payload bytes for one client and round; P are the bytes of the model."""
    result: str
    """What the resulting model of a run is, if each client has a personal model; else ""."""
    options: type[BaseModel]
    """The section of the run config: a field for each option, with its key as alias, default, range and help text."""


LISTED: dict[type[MethodStrategy], Listing] = {}


def listed(
    name: str,
    *,
    title: str,
    does: str,
    paper: str,
    transfers: str = "P down, P up",
    result: str = "",
    further: type[BaseModel] | None = None,
) -> Callable[[type[S]], type[S]]:
    """Class decorator that adds a strategy to the catalogue, and a check of the options to its constructor.

    The constructor then raises ValueError for an option out of range, with its name, the value found, and what is
    allowed.

    Args:
        name, title, does, paper, transfers, result: see `Listing`.
        further: keys of the run config that are not options of the constructor. The server app reads them.
    """

    def declare(strategy: type[S]) -> type[S]:
        annotations = get_type_hints(strategy.__init__, include_extras=True)
        options = {
            argument.name: (annotations[argument.name], argument.default)
            for argument in inspect.signature(strategy.__init__).parameters.values()
            if argument.kind is argument.KEYWORD_ONLY and isinstance(argument.default, bool | int | float | str)
        }
        helps = {option: _with_keys(_help(strategy, option), name, options) for option in options}
        fields: dict[str, Any] = {
            option: (_alternatives(annotation)[0], Field(default, description=helps[option]))
            for option, (annotation, default) in options.items()
        }
        fields |= {key: (field.annotation, field) for key, field in (further.model_fields if further else {}).items()}
        config = ConfigDict(
            alias_generator=lambda option: f"{name}.{_key(option)}", populate_by_name=True, extra="ignore", frozen=True
        )
        section = create_model(f"{strategy.__name__}Options", __config__=config, **fields)
        LISTED[strategy] = Listing(strategy, name, title, does, paper, transfers, result, section)
        if "__init__" in vars(strategy):
            _check_in_constructor(strategy, {option: annotation for option, (annotation, _) in options.items()})
        return strategy

    return declare


def _check_in_constructor(strategy: type[MethodStrategy], annotations: Mapping[str, Any]) -> None:
    init = strategy.__init__

    @wraps(init)
    def checked(self: MethodStrategy, *args: Any, **given: Any) -> None:
        for option in filter(given.__contains__, annotations):
            annotation, value = annotations[option], given[option]
            try:
                given[option] = TypeAdapter(annotation).validate_python(value)
            except ValidationError as error:
                allowed = ", or ".join(map(_allowed, _alternatives(annotation)))
                raise ValueError(f"{option} is {value!r}; it must be {allowed}") from error
        init(self, *args, **given)

    strategy.__init__ = checked  # type: ignore[method-assign]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type. In a run config, only values of the first one are possible."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _allowed(annotation: Any) -> str:
    """The values that a type allows, in words."""
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return f"one of {', '.join(values)}" if len(values) > 1 else repr(values[0])
    field = FieldInfo.from_annotation(annotation)
    bounds = [
        f"{words} {getattr(limit, bound):g}"
        for limit in field.metadata
        for bound, words in _BOUNDS.items()
        if hasattr(limit, bound)
    ]
    return ", ".join(filter(None, [_KINDS[field.annotation], " and ".join(bounds)]))  # type: ignore[index]


def _key(option: str) -> str:
    return "lambda" if option == "lam" else option.replace("_", "-")  # Python does not allow `lambda` as a name


def _with_keys(text: str, name: str, options: Collection[str]) -> str:
    """A text in which options of the strategy, in backquotes, are called by their keys."""
    return re.sub(r"`(\w+)`", lambda found: f"`{name}.{_key(found[1])}`" if found[1] in options else found[0], text)


def _help(strategy: type, option: str) -> str:
    """Entry of an option in the `Args` of the docstring of the strategy, or else of one of its base classes."""
    entry = re.compile(rf"^    {option}: (.*(?:\n {{5,}}.*)*)", re.MULTILINE)
    for each in strategy.__mro__:
        if found := entry.search(inspect.cleandoc(each.__doc__ or "")):
            return " ".join(found[1].split()).removesuffix(".")
    return ""
