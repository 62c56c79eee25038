"""A strategy declares its options once: what the constructor, its checks and the run config make of them."""

import inspect
import math
import tomllib
from typing import Annotated, Literal, Unpack, get_type_hints

import pytest
from pydantic import Field

from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.run import build_model, build_strategy
from tepal.strategies import STRATEGIES, FedFrozen, FedProx, MethodStrategy, SelectiveLayers
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.options import LISTED, NonNegative, Positive, RoundOptions, listed
from tests.packages import ROOT


class Method(FedAvgMethod):
    """Keeps what it was given."""

    def __init__(self, **options):
        self.options = options


@pytest.fixture
def declared():
    """A strategy of its own, and its listing."""

    @listed("sketch", title="Sketch", does="sends sketches", paper="nobody 2030", transfers="S down, S up")
    class Sketch(MethodStrategy):
        """Sketches.

        Args:
            width: W, of the sketch. It is
                counted in columns.
            lam: λ of its penalty.
            kind: of hash, with its `width` and `lam`, and `helper`.
            size: a share, or "all".
            helper: is no option.
            round_options: see `MethodStrategy`.
        """

        def __init__(
            self,
            *,
            width: Annotated[int, Field(ge=1, le=64)] = 8,
            lam: NonNegative = 0.5,
            kind: Literal["sign", "count"] = "sign",
            size: Positive | Literal["all"] = 0.5,
            helper: object | None = None,
            **round_options: Unpack[RoundOptions],
        ) -> None:
            super().__init__(Method(width=width, lam=lam, kind=kind, size=size), **round_options)

    yield Sketch, LISTED.pop(Sketch)


def test_the_keys_of_the_run_config_are_the_arguments_with_their_defaults_and_help(declared):
    fields = declared[1].options.model_fields.values()
    assert [(field.alias, field.default, field.description) for field in fields] == [
        ("sketch.width", 8, "W, of the sketch. It is counted in columns"),
        ("sketch.lambda", 0.5, "λ of its penalty"),
        ("sketch.kind", "sign", "of hash, with its `sketch.width` and `sketch.lambda`, and `helper`"),
        ("sketch.size", 0.5, 'a share, or "all"'),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"width": 0}, "width is 0; it must be a whole number, at least 1 and at most 64"),
        ({"width": 2.5}, "width is 2.5; it must be a whole number, at least 1 and at most 64"),
        ({"lam": -1.0}, "lam is -1.0; it must be a number, at least 0"),
        ({"lam": math.inf}, "lam is inf; it must be a number, at least 0"),
        ({"kind": "sing"}, "kind is 'sing'; it must be one of sign, count"),
        ({"size": "none"}, "size is 'none'; it must be a number, above 0, or 'all'"),
        ({"fraction_train": 0}, "fraction_train is 0; it must be in (0, 1]"),
    ],
)
def test_the_constructor_names_the_option_the_value_and_what_is_allowed(declared, given, said):
    with pytest.raises(ValueError) as error:
        declared[0](**given)
    assert str(error.value) == said


def test_the_constructor_takes_what_is_in_range_and_hands_on_the_rest(declared):
    strategy = declared[0](width=64, size="all", fraction_train=0.25)
    assert strategy.method.options == {"width": 64, "lam": 0.5, "kind": "sign", "size": "all"}
    assert strategy.rules.fraction_train == 0.25
    with pytest.raises(TypeError, match="widht"):
        declared[0](widht=3)


def test_the_constructor_shows_its_arguments(declared):
    assert list(inspect.signature(declared[0]).parameters)[:4] == ["width", "lam", "kind", "size"]


def test_a_subclass_that_is_not_listed_checks_likewise():
    class Other(FedProx):
        pass

    with pytest.raises(ValueError, match="mu is -1; it must be a number, at least 0"):
        Other(mu=-1)


def test_the_options_of_a_round_are_those_of_the_base_class():
    of_base = inspect.signature(MethodStrategy.__init__).parameters
    declared = RoundOptions.__annotations__
    assert {name: kind.__forward_arg__ for name, kind in declared.items()} == {
        name: one.annotation for name, one in of_base.items() if name not in ("self", "method")
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_has_a_help_text_and_a_key_of_the_strategys_name(name):
    for field in STRATEGIES[name].options.model_fields.values():
        assert field.description, field.alias
        assert str(field.alias).startswith(f"{name}.")


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_says_what_a_round_may_be_given(name):
    """And so an editor completes it, and mypy checks it."""
    strategy = STRATEGIES[name].strategy
    assert get_type_hints(strategy.__init__)["round_options"] == Unpack[RoundOptions]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_that_sets_nothing_has_the_constructors_defaults(name):
    config = read_run_config({"strategy": name, "server-share": 0.2, "optimizer": "sgd", "pfedme.lambda": 15.0})
    blocks = build_model(config)[1]
    made = build_strategy(config, blocks).method.describe()
    if name == "fedbe":
        assert made.pop("distil")
        assert made.items() <= STRATEGIES[name].strategy(distil=False).method.describe().items()
    else:
        method = STRATEGIES[name].strategy(model=blocks).method
        method.begin(config.rounds.num_server_rounds)
        assert made == method.describe()


def test_an_unknown_strategy_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=f"did you mean 'ditto'. allowed are {', '.join(STRATEGIES)}"):
        read_run_config({"strategy": "dito"})


def test_drawn_budgets_can_be_asked_for_in_two_ways():
    for given in ({"budget": "drawn"}, {"draw_budgets": True}):
        assert SelectiveLayers(**given).method.budget == "drawn"


def test_the_calls_of_before_go_on_working():
    strategy = FedFrozen(warmup_rounds=2, ridge=1, fraction_train=0.5)
    assert (strategy.method.warmup_rounds, strategy.method.ridge, strategy.rules.fraction_train) == (2, 1, 0.5)


def test_the_keys_that_flower_knows_are_those_of_the_code():
    """Flower refuses a key that is not in pyproject.toml; `docs/run_config.py` writes them there."""
    text = (ROOT / "pyproject.toml").read_text()
    keys = text.partition("[tool.flwr.app.config]\n")[2].partition("\n# === End")[0].splitlines()
    assert [key.partition(" = ")[0] for key in keys] == list(defaults())
    assert tomllib.loads("\n".join(keys))["fedfrozen"] == {"warmup-rounds": -1, "ridge": 0.0}
