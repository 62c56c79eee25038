"""Search files: what is read from them, and what is refused before anything runs."""

import logging
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tepal.server_app.config import ConfigError, defaults
from tepal.tools.search import __main__ as main
from tepal.tools.search.__main__ import app
from tepal.tools.search.plan import check_values, read_plan
from tepal.tools.spaces import Choices, Range, spread_out
from tests.packages import ROOT

LEARNING_RATE = "learning-rate = { from = 1e-4, to = 1e-2, log = true }"


def written(tmp_path, text):
    file = tmp_path / "search.toml"
    file.write_text(text)
    return file


def read(tmp_path, text):
    return read_plan(written(tmp_path, text))


def checked(tmp_path, text):
    file = written(tmp_path, text)
    return check_values(read_plan(file), defaults(), file)


def one_variant(search, config=""):
    return f'[[variant]]\nname = "A"\nstrategy = "fedprox"\n{config}\n[variant.search]\n{search}\n'


def refusals(function, *arguments):
    """The problems that an error names, without the line with the file."""
    with pytest.raises(ConfigError) as error:
        function(*arguments)
    head, *problems = str(error.value).splitlines()
    assert "search.toml" in head
    return [problem.strip() for problem in problems]


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_file_says_what_is_searched(tmp_path):
    plan = read(
        tmp_path,
        """
        clients = 6
        seed = 5
        [common]
        model = "cnn"
        momentum = 0.5
        [common.search]
        learning-rate = { from = 1e-4, to = 1e-2, log = true }
        local-epochs = { choices = [1, 2, 4] }
        [[variant]]
        name = "FedAvg"
        strategy = "fedavg"
        local-epochs = 3
        [[variant]]
        name = "FedProx"
        strategy = "fedprox"
        [variant.search]
        batch-size = { from = 8, to = 64, step = 8 }
        learning-rate = { from = 0.1, to = 0.5 }
        fedprox.mu = { from = 0.1, to = 0.7, step = 0.2 }
        """,
    )
    assert (plan.clients, plan.seed, plan.common) == (6, 5, {"model": "cnn", "momentum": 0.5})
    fedavg, fedprox = plan.variants
    # Its own value of local-epochs takes the place of the common range.
    assert fedavg.config == {"strategy": "fedavg", "local-epochs": 3}
    assert fedavg.search == {"learning-rate": Range(1e-4, 1e-2, log=True)}
    assert fedprox.search == {
        "learning-rate": Range(0.1, 0.5), "local-epochs": Choices((1, 2, 4)), "batch-size": Range(8, 64, step=8),
        "fedprox.mu": Range(0.1, 0.7, step=0.2),
    }  # fmt: skip
    assert [fedprox.search[key].whole for key in ("learning-rate", "batch-size")] == [False, True]
    assert plan.config_of(fedavg, {"learning-rate": 0.002}) == {
        "model": "cnn", "momentum": 0.5, "strategy": "fedavg", "local-epochs": 3, "learning-rate": 0.002, "seed": 5,
    }  # fmt: skip


def test_clients_and_seed_have_defaults_and_a_variant_may_have_nothing_to_search(tmp_path):
    plan = read(tmp_path, one_variant(LEARNING_RATE) + '[[variant]]\nname = "as-it-is"\nstrategy = "fedavg"\n')
    assert (plan.clients, plan.seed) == (10, 1000)
    assert [variant.name for variant in plan.variants] == ["A", "as-it-is"]
    assert [variant.name for variant in plan.searched] == ["A"]


@pytest.mark.parametrize(
    ("space", "drawn", "expected"),
    [
        (Range(0.1, 0.9, step=0.1), 0.1 + 2 * 0.1, 0.3),
        (Range(0, 0.3, step=0.1), 0.30000000000000004, 0.3),
        (Range(8, 64, step=8), 24, 24),
        (Range(0.1, 0.9), 0.30000000000000004, 0.30000000000000004),
        (Choices(("a", "b")), "b", "b"),
    ],
)
def test_multiples_of_a_step_are_decimals(space, drawn, expected):
    assert space.exact(drawn) == expected and type(space.exact(drawn)) is type(expected)


def test_the_file_of_the_documentation_is_accepted(tmp_path):
    section = (ROOT / "docs/simulation.md").read_text().partition("## Searching for settings")[2]
    (block,) = re.findall(r"```toml\n(.*?)```", section, flags=re.DOTALL)
    assert checked(tmp_path, block) == "clients_accuracy"
    assert [len(variant.search) for variant in read(tmp_path, block).variants] == [1, 4]


# --- refusals of the form -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ("learning-rate = { from = 0.1, to = 0.01 }", "from is 0.1 and to is 0.01, expected from < to"),
        ("learning-rate = { from = 0.1, to = 0.1 }", "expected from < to"),
        ("learning-rate = { from = 0.0, to = 0.1, log = true }", "a log scale has no 0"),
        ("learning-rate = { from = 0.1, to = 0.2, log = 1 }", "log is 1, expected true or false"),
        ("learning-rate = { from = 0.1, to = 0.2, log = true, step = 0.1 }", "leave one of them out"),
        ("learning-rate = { from = 'low', to = 0.2 }", "from is 'low' and to is 0.2, expected numbers"),
        ("learning-rate = { from = nan, to = inf }", "from is nan and to is inf, expected numbers"),
        ("learning-rate = { from = true, to = 2 }", "from is True and to is 2, expected numbers"),
        ("learning-rate = { from = 0.1 }", "expected { from = 1e-4, to = 1e-2, log = true } or { choices"),
        ("learning-rate = {}", "expected { from = 1e-4"),
        ("learning-rate = 0.1", "search of learning-rate is 0.1, expected { from = 1e-4"),
        ("learning-rate = { form = 0.1, to = 0.2 }", "'form' is not a key of a range: did you mean 'from'?"),
        ("learning-rate = { choice = [0.1, 0.2] }", "'choice' is not a key of a range: did you mean 'choices'?"),
        ("fedprox = { mu = { from = 0.1, to = 0.2, distribution = 1 } }", "allowed are from, to, log, step, choices"),
        ("batch-size = { from = 8, to = 64, step = 0.5 }", "step is 0.5, expected a whole number above 0"),
        ("batch-size = { from = 8, to = 64, step = 0 }", "step is 0, expected a whole number above 0"),
        ("batch-size = { from = 8, to = 16, step = 9 }", "step is 9, expected at most to - from = 8"),
        ("batch-size = { from = 8, to = 62, step = 8 }", "the last value is 56, write to = 56"),
        ("momentum = { from = 0.1, to = 0.45, step = 0.1 }", "the last value is 0.4, write to = 0.4"),
        ("batch-size = { from = 8.0, to = 64.0 }", "batch-size is a whole number, but from is 8.0 and to is 64.0"),
        ("optimizer = { from = 1, to = 2 }", "optimizer is not a number: name its choices"),
        ("deterministic = { from = 0, to = 1 }", "deterministic is not a number: name its choices"),
        ("batch-size = { choices = [8, 16], step = 8 }", "has choices and step: keep the choices, or from and to"),
        ("batch-size = { choices = 8 }", "choices is 8, expected a list"),
        ("batch-size = { choices = [[8], [16]] }", "choices is [[8], [16]], expected a list of numbers"),
        ("batch-size = { choices = [8] }", "choices is [8], expected at least two"),
        ("batch-size = { choices = [8, 16, 8] }", "choices [8, 16, 8] has a value twice"),
        ("deterministic = { choices = [true, 1] }", "has a value twice"),
        ("seed = { choices = [1, 2] }", "seed is set by the search itself: set seed at the top of the file"),
        ("runs = { choices = ['a', 'b'] }", "runs is set by the search itself: leave it out"),
        ("strategy = { choices = ['fedavg', 'fedprox'] }", "strategy has both a value and a range"),
    ],
)
def test_a_range_that_is_none_is_refused(tmp_path, search, problem):
    (refusal,) = refusals(read, tmp_path, one_variant(search))
    assert refusal.startswith("variant 'A': ") and problem in refusal


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no [[variant]]"),
        ("variant = 3", "there is no [[variant]]"),
        ("variant = [3]", "[[variant]] 1 is 3, expected a table"),
        ("client = 3\n" + one_variant(LEARNING_RATE), "'client' is not a key of the file: did you mean 'clients'?"),
        ("[[variants]]\nname='A'", "'variants' is not a key of the file: did you mean 'variant'?"),
        ("clients = 1\n" + one_variant(LEARNING_RATE), "clients is 1, expected a whole number from 2 on"),
        ("clients = true\n" + one_variant(LEARNING_RATE), "clients is True, expected a whole number"),
        ("seed = -1\n" + one_variant(LEARNING_RATE), "seed is -1, expected a whole number from 0 on"),
        ("common = 1\n" + one_variant(LEARNING_RATE), "[common] is 1, expected a table"),
        ("[common]\nseed = 1\n" + one_variant(LEARNING_RATE), "[common]: seed is set by the search itself"),
        (one_variant(LEARNING_RATE).replace('name = "A"', ""), '[[variant]] 1 has no name: add one, such as name = "F'),
        (one_variant(LEARNING_RATE).replace('"A"', "3"), "[[variant]] 1: name is 3, expected 1 to 64 letters"),
        (one_variant(LEARNING_RATE).replace('"A"', '"A B"'), "[[variant]] 1: name is 'A B', expected 1 to 64 letters"),
        (one_variant(LEARNING_RATE).replace("strategy", "schedule"), "variant 'A': no strategy: add one"),
        (one_variant(LEARNING_RATE) * 2, "two variants are named 'A'"),
        ('[[variant]]\nname = "A"\nsearch = 1', "variant 'A': search is 1, expected a table of ranges"),
        ('[[variant]]\nname = "A"\nstrategy = "fedavg"', "no variant has a table [variant.search]"),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused(tmp_path, text, problem):
    assert any(problem in refusal for refusal in refusals(read, tmp_path, text))


def test_all_problems_are_named_at_once(tmp_path):
    text = "client = 3\n" + one_variant("learning-rate = { from = 2, to = 1 }\nbatch-size = { choices = [] }")
    assert len(refusals(read, tmp_path, text)) == 3


def test_a_file_that_is_not_toml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a TOML file: "):
        read(tmp_path, "a = ")


# --- refusals of values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ("learning-rat = { from = 0.1, to = 0.2 }", "'learning-rat' is not a key of the run config: did you mean"),
        ("mu = { from = 0.1, to = 0.2 }", "'mu' is not a key of the run config: did you mean 'fedprox.mu'?"),
        ("momentum = { from = 0.5, to = 1.5 }", "A: momentum=1.5: "),
        ("momentum = { from = -0.5, to = 0.5 }", "A: momentum=-0.5: "),
        ("optimizer = { choices = ['sgd', 'adam', 'sdg'] }", "A: optimizer='sdg': did you mean 'sgd'?"),
        ("strategy = { choices = ['fedavg', 'scaffold'] }", "strategy='scaffold' and optimizer='adamw'"),
        ("fraction-evaluate = { from = 0.0, to = 1.0 }", "fraction-evaluate=0: no client scores the final model"),
    ],
)
def test_a_value_that_the_run_config_does_not_allow_is_refused(tmp_path, search, problem):
    text = one_variant(search) if "strategy" not in search else f'[[variant]]\nname = "A"\n[variant.search]\n{search}'
    (refusal,) = refusals(checked, tmp_path, text)
    assert problem in refusal


def test_a_problem_of_several_variants_is_named_once(tmp_path):
    text = f'[common]\nmodel = "cmn"\n{one_variant(LEARNING_RATE)}[[variant]]\nname = "B"\nstrategy = "fedavg"\n'
    (refusal,) = refusals(checked, tmp_path, text)
    assert refusal.startswith("A, B: ") and "'cmn'" in refusal


def test_every_good_file_is_accepted_and_a_warning_is_shown_once(tmp_path, caplog):
    text = one_variant(f"{LEARNING_RATE}\nbatch-size = {{ from = 8, to = 64, step = 8 }}").replace(
        "fedprox", "fedfrozen"
    )
    log = logging.getLogger("flwr")
    propagates, log.propagate = log.propagate, True
    try:
        checked(tmp_path, "[common]\nnum-server-rounds = 2\nfedfrozen.warmup-rounds = 2\n" + text)
    finally:
        log.propagate = propagates
    assert [record.message for record in caplog.records if "nothing is ever frozen" in record.message] != []
    assert len(caplog.records) == 1


def test_scores_of_classes_and_of_a_regression_are_not_compared(tmp_path):
    common = """
        [common]
        dataset = "local"
        strategy = "fedavg"
        [common.search]
        learning-rate = { from = 0.1, to = 0.2 }
        """
    images = '[[variant]]\nname = "images"\nimage-shape = "1x8x8"\nclasses = 3\n'
    numbers = '[[variant]]\nname = "numbers"\nmodel = "linear-attention"\nfeatures = 3\noutputs = 1\n'
    assert checked(tmp_path, common + images) == "clients_accuracy"
    assert checked(tmp_path, common + numbers) == "clients_rmse"
    (refusal,) = refusals(checked, tmp_path, common + images + numbers)
    assert "their scores cannot be compared" in refusal


def test_the_command_refuses_before_it_makes_anything(tmp_path, monkeypatch):
    monkeypatch.setattr("tepal.tools.search.__main__.optuna_is_missing", lambda: "")
    file = written(tmp_path, one_variant("learning-rate = { from = -1.0, to = 0.1 }"))
    ended = CliRunner().invoke(app, [str(file), "--folder", str(tmp_path / "out")])
    assert ended.exit_code == 1 and "learning-rate=-1.0" in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("strategy", "search", "named"),
    [
        ("fedprox", "min-replies = { choices = [2, 20] }", "--clients is 10, expected at least 20 because of min-"),
        ("fedensemble", "fedensemble.strata = { choices = [2, 20] }", "fedensemble.strata=20"),
        ("fedprox", "min-partition-size = { choices = [2, 100000] }", "min-partition-size=100000"),
        ("fedfrozen", "model = { choices = ['tiny-vit', 'cnn'] }", "FedFrozen freezes query and key projections"),
    ],
)
def test_every_choice_is_checked_with_the_clients_and_the_data_before_the_first_trial(
    tmp_path, monkeypatch, strategy, search, named
):
    """The learning rate has no part in it: a model is not built again for each of its values."""
    checks, check = [], main.check_clients
    engine = SimpleNamespace(here=True, start_ahead=lambda runs: None)
    monkeypatch.setattr(main, "_engine", lambda *_: nullcontext(engine))
    monkeypatch.setattr(main, "run_trials", lambda *_, **__: pytest.fail("a trial was started"))
    monkeypatch.setattr(main, "check_clients", lambda *of, **more: (checks.append(of), check(*of, **more)))
    variant = one_variant(f"{LEARNING_RATE}\n{search}").replace('"fedprox"', f'"{strategy}"')
    file = written(tmp_path, variant + variant.replace('"A"', '"B"'))
    ended = CliRunner().invoke(main.app, [str(file), "--folder", str(tmp_path / "out"), "--app", str(ROOT)])
    assert ended.exit_code == 1 and ended.stderr.count("A, B: ") == ended.stderr.count(named) == 1
    assert len(checks) == 4 and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "search.json").write_text("{}")
    ended = CliRunner().invoke(main.app, [str(file), "--folder", str(tmp_path / "out"), "--app", str(ROOT)])
    assert "has another search" in ended.stderr and len(checks) == 6, "one that goes on may have trials that failed"


def test_without_optuna_the_command_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tepal.tools.spaces.importlib.util.find_spec", lambda name: None)
    ended = CliRunner().invoke(app, [str(tmp_path / "none.toml"), "--folder", str(tmp_path / "out")])
    assert ended.exit_code == 1 and "pip install 'tepal[search]'" in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [1, 5, 12])
def test_trials_that_are_spread_out_are_one_in_each_part_of_every_range_and_the_same_for_all_that_have_a_key(count):
    rate, share = Range(1e-4, 1e-2, log=True), Range(0.0, 3.0)
    spaces = {"rate": rate, "share": share, "layers": Range(1, 9, step=2), "kind": Choices(("a", "b"))}
    drawn = [spread_out(spaces, number, count) for number in range(count)]
    expected = [10 ** (-4 + 2 * (part + 0.5) / count) for part in range(count)]
    assert sorted(each["rate"] for each in drawn) == pytest.approx(expected)
    assert sorted(each["share"] for each in drawn) == pytest.approx([3 * (n + 0.5) / count for n in range(count)])
    assert {each["layers"] for each in drawn} <= {1, 3, 5, 7, 9} and {each["kind"] for each in drawn} <= {"a", "b"}
    assert all(type(each["layers"]) is int for each in drawn)
    again = [spread_out({"other": share, "rate": rate}, number, count) for number in range(count)]
    assert [each["rate"] for each in again] == [each["rate"] for each in drawn]
