"""`tepal compare --variants`: what a file of variants may have, what is refused, and what the command runs of it."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tepal.records.run_directory import read_config
from tepal.server_app.config import ConfigError, read_run_config
from tepal.tools.cli.main import main
from tepal.tools.compare.comparison import Comparison, planned_variants, read_comparison
from tepal.tools.compare.sections import Section, Variant
from tepal.tools.compare.variants import read_variants
from tepal.training.data import DataError
from tests.comparisons import Killed
from tests.packages import ROOT

SECTIONS = """
seeds = [1, 2]
clients = 3
[common]
num-server-rounds = 3
fedacs.quantile = 0.25
[[section]]
title = "Fewer bytes, one model"
about = "What compression saves."
question = "bytes"
baseline = "FedAvg"
within = 0.1
[section.common]
learning-rate = 0.01
[[section.variant]]
name = "frozen-int8"
strategy = "fedfrozen"
wire-dtype = "int8"
learning-rate = 0.02
[[section.variant]]
name = "FedAvg"
strategy = "fedavg"
[[section]]
title = "Own <b>models</b>"
question = "own-tests"
[[section.variant]]
name = "one-for-all"
strategy = "fedavg"
[[section.variant]]
name = "own_1"
strategy = "fedacs"
[section.variant.fedacs]
alpha = 0.75
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "variants.toml"
        path.write_text(text)
        return path

    return write


def one(variant, before="", section=""):
    """A file with one section of two variants, the second of which has these lines."""
    return f"""{before}
[[section]]
title = "Bytes"
{section}
[[section.variant]]
name = "first"
strategy = "fedavg"
[[section.variant]]
{variant}
"""


_51 = range(51)  # sections, one too many

# --- reading --------------------------------------------------------------------------------------------------------


def test_the_comparison_of_encodings_is_the_table_of_the_docs():
    found = read_variants(ROOT / "conf" / "encodings.toml")
    assert (found.seeds, found.clients) == ((1, 2, 3, 4, 5), 10)
    for section, baseline in zip(found.sections, ("float32", "float32-vit"), strict=True):
        assert (section.question, section.baseline, section.within) == ("bytes", baseline, 0.005)
    keys = ("wire-dtype", "wire-top-k", "wire-top-k-down", "wire-start", "num-server-rounds")
    assert [tuple(variant.run_config.get(key) for key in keys) for section in found.sections
            for variant in section.variants] == [
        (None, None, None, None, 15), ("int8", None, None, None, 15), (None, 0.01, None, None, 45),
        ("sign", 0.1, 0.1, None, 45), ("rank4", None, None, "made", 45), ("auto", None, None, "sent", 45),
        ("auto", None, None, None, 45),
        (None, None, None, None, 15), ("auto", None, None, None, 45),
    ]  # fmt: skip
    page = (ROOT / "docs" / "encodings.md").read_text()
    told = page.partition("conf/encodings.toml")[2].partition("\n\nAll seeds")[0]
    assert re.findall(r"^\| ([^|]*) \| [\d.]+ \|", told, re.M) == [
        "float32", "int8", "top 1 % up", "top 10 % in signs both ways, the first in int4",
        "rank4, the initial model made by clients", "auto, the initial model sent", "auto", "`tiny-vit`, float32",
        "`tiny-vit`, auto",
    ]


def test_a_file_with_sections_is_read(file):
    found = read_variants(file(SECTIONS))
    assert (found.seeds, found.clients, found.target) == ((1, 2), 3, None)
    assert found.common == {"num-server-rounds": 3, "fedacs.quantile": 0.25}
    frozen = {"learning-rate": 0.02, "strategy": "fedfrozen", "wire-dtype": "int8"}
    assert found.sections == (
        Section(
            "Fewer bytes, one model",
            (Variant("frozen-int8", frozen), Variant("FedAvg", {"learning-rate": 0.01, "strategy": "fedavg"})),
            "What compression saves.", "bytes", "FedAvg", 0.1,
        ),
        Section(
            "Own <b>models</b>",
            (
                Variant("one-for-all", {"strategy": "fedavg"}),
                Variant("own_1", {"strategy": "fedacs", "fedacs.alpha": 0.75}),
            ),
            question="own-tests",
            baseline="one-for-all",  # the first one
        ),
    )  # fmt: skip


def test_a_file_without_sections_is_one_group(file):
    text = '[common]\nstrategy = "fedavg"\n[[variant]]\nname = "a"\n[[variant]]\nname = "b"\nlocal-epochs = 2'
    found = read_variants(file(text))
    second = Variant("b", {"strategy": "fedavg", "local-epochs": 2})
    assert found.sections == (Section("", (Variant("a", {"strategy": "fedavg"}), second)),)


def test_the_documents_example_is_a_file(file):
    page = (ROOT / "docs" / "simulation.md").read_text()
    [example] = [block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[[section]]" in block]
    found = read_variants(file(example))
    assert [(section.question, section.baseline) for section in found.sections] == [
        ("bytes", "FedAvg"), ("own-tests", "one-for-all"),
    ]  # fmt: skip
    for section in found.sections:
        for variant in section.variants:
            read_run_config({**found.common, **variant.run_config})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["it has no variants", "[[variant]]"]),
        ("a = [", ["cannot be read"]),
        ("a." * 300 + "b = 1", ["more than 200 dots"]),
        ('[[variant]]\nname="a"\nstrategy="fedavg"\n[[section]]\ntitle="x"', ["has [[variant]] and [[section]]"]),
        ('[variant]\nname="a"', ["variant is not an array of tables", "[[variant]]"]),
        ("section = 3", ["section is not an array of tables", "[[section]]"]),
        (one('name="b"', before="sedes = [1]"), ["unknown key 'sedes': did you mean 'seeds'?"]),
        (one('name="b"', before="seeds = [1, 1]"), ["seeds=[1, 1]", "different whole numbers", "[1, 2, 3]"]),
        (one('name="b"', before="seeds = [true]"), ["seeds=[True]"]),
        (one('name="b"', before="seeds = [-1]"), ["seeds=[-1]", "of 0 to 4294967295"]),
        (one('name="b"', before="seeds = [4294967296, 1]"), ["seeds=[4294967296, 1]", "of 0 to 4294967295"]),
        (one('name="b"', before="seeds = 1"), ["seeds=1"]),
        (one('name="b"', before="clients = 1"), ["clients=1", "at least 2"]),
        (one('name="b"', before="clients = 2.0"), ["clients=2.0"]),
        (one('name="b"', before="target = nan"), ["target=nan"]),
        (one('name="b"', before="target = -0.5"), ["target=-0.5", "at least 0"]),
        (one('name="b"', before="common = 3"), ["[common]: 3 is not a table"]),
        (one('name="b"', before="[common]\nseed = 3"), ["[common]: seed=3", "seeds = [1, 2, 3] at the top"]),
        (one('name="b"', before='[common]\nmodle = "cnn"'), ["[common]: 'modle'", "did you mean 'model'"]),
        (one('name="b"', section='titel = "x"'), ["section 'Bytes': unknown key 'titel': did you mean 'title'?"]),
        (one('name="b"', section='question = "byte"'), ["section 'Bytes': question='byte'", "did you mean 'bytes'"]),
        (one('name="b"', section="question = 3"), ["section 'Bytes': question=3", "bytes, own-tests, doubt"]),
        (one('name="b"', section='question = ""'), ["section 'Bytes': question=''", "leave the key out"]),
        (one('name="b"\nstrategy="fedacs"', section='baseline = "furst"'), ["baseline='furst'", "'first'"]),
        (one('name="b"', section='question="bytes"\nwithin = -1'), ["within=-1", "at least 0"]),
        (one('name="b"', section='question="bytes"\nwithin = "x"'), ["within='x'"]),
        (one('name="b"', section="within = 0.1"), ["within is for question = 'bytes' only"]),
        (one('name="b"', section=f'about = "{"x" * 501}"'), ["section 'Bytes': about=", "at most 500 characters"]),
        (one('name="b"', section='[section.common]\nruns = "x"'), ["[section.common]: runs='x'", "-c 'runs="]),
        (one('strategy="fedavg"'), ["section 'Bytes', variant 2: no name", "letters, digits, - and _"]),
        (one('name="a b"\nstrategy="fedavg"'), ["section 'Bytes', variant 'a b': name='a b'"]),
        (one(f'name="{"x" * 65}"\nstrategy="fedavg"'), ["1 to 64 letters"]),
        (one("name=3"), ["variant 2: name=3"]),
        (one('name="b"'), ["section 'Bytes', variant 'b': no strategy"]),
        (one('name="b"\nstrategy=3'), ["section 'Bytes', variant 'b': strategy=3"]),
        (one('name="first"\nstrategy="fedacs"'), ["section 'Bytes', variant 'first': a second variant has this name"]),
        (one('name="b"\nstrategy="fedavg"\nseed=3'), ["section 'Bytes', variant 'b': seed=3"]),
        (one('name="b"\nstrategy="fedavg"\nresume="x"'), ["section 'Bytes', variant 'b': resume='x'"]),
        (one('name="b"\nlearning-rat=3'), ["section 'Bytes', variant 'b': 'learning-rat'", "'learning-rate'"]),
        (one('name="b"\nmodel=["cnn"]'), ["variant 'b': model=['cnn']", "a text, a number, true or false"]),
        (one('name="b"\n[section.variant.fedacs]\nalpa=1'), ["variant 'b': 'fedacs.alpa'", "'fedacs.alpha'"]),
        ('[[section]]\ntitle="x"', ["section 'x': no variants"]),
        ('[[section]]\n[[section.variant]]\nname="b"\nstrategy="fedavg"', ["section 1: title=''", "1 to 100"]),
        ('[[section]]\ntitle=7\n[[section.variant]]\nname="b"\nstrategy="fedavg"', ["section 1: title=7"]),
        (
            '[[section]]\ntitle="x"\nquestion="doubt"\n[[section.variant]]\nname="b"\nstrategy="fedavg"',
            ["section 'x': question='doubt' with one variant", "at least one other"],
        ),
        (
            "".join(f'[[section]]\ntitle="x"\n[[section.variant]]\nname="{n}"\nstrategy="fedavg"\n' for n in "ab"),
            ["section 'x': a second section has this title"],
        ),
        (
            "".join(
                f'[[section]]\ntitle="{n}"\n[[section.variant]]\nname="v{n}"\nstrategy="fedavg"\n' for n in range(51)
            ),
            ["51 sections: at most 50"],
        ),
        (
            f'seeds = {list(range(5001))}\n[[variant]]\nname="a"\nstrategy="fedavg"\n[[variant]]\nname="b"\n'
            'strategy="fedavg"',
            ["10002 runs", "at most 10,000"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_refused_with_its_place(file, text, said):
    path = file(text)
    with pytest.raises(ConfigError) as error:
        read_variants(path)
    assert all(words in str(error.value) for words in (*said, str(path))), str(error.value)


def test_all_problems_are_reported_at_once(file):
    text = one('name="b"\nstrategy="fedavg"\nseed=3\nmodle="x"', before="clients = 0", section='question="x"')
    with pytest.raises(ConfigError) as error:
        read_variants(file(text))
    assert len(str(error.value).splitlines()) == 4


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--variants .*nothing\.toml cannot be read"):
        read_variants(tmp_path / "nothing.toml")


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_pages(monkeypatch):
    """Pages take half a second for each section, after every run."""
    monkeypatch.setattr("tepal.tools.compare.runs.comparison_page", lambda results: "")


def with_variants(compare, file, *arguments, text=SECTIONS, config=None):
    """Call the command without a number of clients of its own."""
    runs = f'runs="{compare.runs}" {config or ""}'
    return CliRunner().invoke(main, ["compare", ".", "--variants", str(file(text)), "-c", runs, *arguments])


def test_every_variant_runs_with_every_seed_and_its_own_run_config(compare, file):
    done = with_variants(compare, file)
    assert done.exit_code == 0, done.output
    configs = [config for config, _ in compare.started]
    assert compare.cells() == [
        (strategy, seed) for seed in (1, 2) for strategy in ("fedfrozen", "fedavg", "fedavg", "fedacs")
    ]
    assert compare.asked[0]["clients"] == 3
    frozen, bytes_avg, own_avg, acs, *_ = configs
    assert (frozen["wire-dtype"], bytes_avg["wire-dtype"]) == ("int8", "float32")
    assert [config["learning-rate"] for config in configs[:2]] == [0.02, 0.01]
    assert own_avg["learning-rate"] not in (0.02, 0.01)
    assert (acs["fedacs.alpha"], acs["fedacs.quantile"]) == (0.75, 0.25)
    (folder,) = compare.runs.glob("*-compare")
    comparison = read_comparison(folder)
    assert [run.variant for run in comparison.runs[:4]] == ["frozen-int8", "FedAvg", "one-for-all", "own_1"]
    assert all(read_config(run.directory)["strategy"] == run.strategy for run in comparison.runs)
    assert "3/8 one-for-all seed 1: round 3/3" in done.output
    lines = done.output.strip().splitlines()
    # The last lines: an answer for each section, and the page.
    assert lines[-1].split() == [str(folder / "comparison.html"), "(open", "it", "in", "a", "browser)"]
    bytes_answer, own_answer = lines[-4:-2]
    assert bytes_answer.startswith("Fewer bytes, one model: FedAvg's final accuracy less 10 points (0.7000) is reached")
    assert own_answer.startswith("Own <b>models</b>: The highest accuracy on the clients' own tests is that of own_1")


def test_options_take_precedence_over_the_file_and_a_variant_over_them(compare, file):
    options = ("--seeds", "7", "--clients", "4", "--target", "0.6")
    done = with_variants(compare, file, *options, config="num-server-rounds=2 learning-rate=0.5")
    assert done.exit_code == 0, done.output
    assert {config["seed"] for config, _ in compare.started} == {7} and compare.asked[0]["clients"] == 4
    configs = [config for config, _ in compare.started]
    assert {config["num-server-rounds"] for config in configs} == {2}, "of the common part"
    assert [config["learning-rate"] for config in configs] == [0.02, 0.01, 0.5, 0.5]
    assert "An accuracy of 0.6000 is reached with" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategies", "fedavg"], ["--strategies and --variants", "leave out one"]),
        (["-c", 'strategy="fedavg"'], ["strategy='fedavg' in the run config", "Set it in"]),
        (["-c", "seed=3"], ["seed=3 in the run config and seeds=[1, 2]", "leave out one"]),
        (["-c", "seed=3", "--seeds", "4"], ["seed=3 in the run config and --seeds 4"]),
        (["-c", 'resume="x"'], ["resume='x'"]),
        (["-c", "local-epochs=-1"], ["all variants: the run config is invalid", "local-epochs=-1"]),
        (["--target", "1.5"], ["target is 1.5, expected an accuracy"]),
        (["--clients", "2", "-c", "min-clients=3"], ["all variants: --clients is 2"]),
    ],
    ids=str,
)
def test_contradicting_options_are_refused(compare, file, arguments, said):
    done = with_variants(compare, file, *arguments)
    message = " ".join(done.output.split())
    assert done.exit_code == 1 and all(text in message for text in said), message
    assert compare.started == [] and not compare.runs.exists()


def test_a_wrong_value_is_reported_with_file_section_and_variant_before_any_run(compare, file):
    done = with_variants(compare, file, text=SECTIONS.replace('"int8"', '"int9"'))
    message = " ".join(done.output.split())
    place = "variants.toml: section 'Fewer bytes, one model', variant 'frozen-int8': the run config is invalid"
    assert done.exit_code == 1 and place in message and "did you mean 'int8'?" in message, message
    assert "one-for-all" not in message and compare.started == [] and not compare.runs.exists()


def test_a_seed_without_a_partition_is_reported_with_the_variants_that_have_it(compare, file, monkeypatch):
    def check_partition(config, clients, kind):
        if config.seed == 2 and config.dirichlet_alpha == 0.1:
            raise DataError("no partition was found")

    monkeypatch.setattr("tepal.training.data.check_partition", check_partition)
    skewed = SECTIONS.replace('strategy = "fedfrozen"', 'strategy = "fedfrozen"\ndirichlet-alpha = 0.1')
    done = with_variants(compare, file, "--seeds", "1,2,3", text=skewed)
    said = "section 'Fewer bytes, one model', variant 'frozen-int8' with seed 2: no partition was found"
    assert done.exit_code == 1 and f"variants.toml: {said}" in " ".join(done.output.split())
    done = with_variants(compare, file, "--seeds", "1,2,3", config="dirichlet-alpha=0.1")
    assert done.exit_code == 1 and "all variants with seed 2: no partition was found" in " ".join(done.output.split())
    assert compare.started == []


def test_a_regression_and_a_classification_are_not_compared(compare, file, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones((200, 2)), y=np.arange(200.0))
    own = f'dataset="{tmp_path}/x.npz"\nmodel="linear-attention"\npartitioner="iid"\n'
    done = with_variants(compare, file, text=one(f'name="b"\nstrategy="fedavg"\n{own}'))
    message = " ".join(done.output.split())
    assert "section 'Bytes', variant 'b' is a regression and section 'Bytes', variant 'first' is not" in message
    both = one('name="b"\nstrategy="fedavg"', section=f'question="doubt"\n[section.common]\n{own}')
    done = with_variants(compare, file, text=both)
    assert "question='doubt' is for classification" in " ".join(done.output.split())
    assert compare.started == []


# --- resuming -------------------------------------------------------------------------------------------------------


def test_a_comparison_that_was_killed_between_two_runs_is_resumed_without_its_file(compare, file):
    assert with_variants(compare, file).exit_code == 0
    (whole,) = compare.runs.glob("*-compare")
    compare.cells()
    # The third run is killed as it begins.
    compare.failing["fedacs", 1] = Killed()
    with pytest.raises(Killed):
        with_variants(compare, file)
    compare.failing.clear()
    assert compare.cells() == [("fedfrozen", 1), ("fedavg", 1), ("fedavg", 1), ("fedacs", 1)]
    [killed] = [folder for folder in compare.runs.glob("*-compare*") if folder != whole]
    file("").unlink()
    done = compare("--resume", str(killed), config=None)
    assert done.exit_code == 0, done.output
    assert compare.cells() == [("fedacs", 1), *((name, 2) for name in ("fedfrozen", "fedavg", "fedavg", "fedacs"))]
    for name in ("comparison.csv", "comparison.md", "comparison.tex", "comparison.svg"):
        assert (killed / name).read_text() == (whole / name).read_text(), name
    assert read_comparison(killed).sections == read_comparison(whole).sections
    assert [run.variant for run in read_comparison(killed).runs] == [run.variant for run in read_comparison(whole).runs]


def test_what_a_resumed_comparison_compares_cannot_change(compare, file):
    assert with_variants(compare, file).exit_code == 0
    (folder,) = compare.runs.glob("*-compare")
    done = compare("--resume", str(folder), "--variants", str(file(SECTIONS)), config=None)
    assert done.exit_code == 1 and "leave out --variants" in " ".join(done.output.split())


# --- what others wrote ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda plan: plan["sections"][0].update(title=3),
        lambda plan: plan["sections"][0].update(title="x" * 101),
        lambda plan: plan["sections"][0].update(about=["x"]),
        lambda plan: plan["sections"][0].update(question="why"),
        lambda plan: plan["sections"][0].update(baseline="nobody"),
        lambda plan: plan["sections"][0].update(within="x"),
        lambda plan: plan["sections"][0].update(within=float("inf")),
        lambda plan: plan["sections"][0].update(variants=[]),
        lambda plan: plan["sections"][0].update(more=1),
        lambda plan: plan["sections"][0].pop("title"),
        lambda plan: plan["sections"][0]["variants"][0].update(name="a{color:red}"),
        lambda plan: plan["sections"][0]["variants"][0].update(name="FedAvg"),
        lambda plan: plan["sections"][0]["variants"][0].update(run_config=[]),
        lambda plan: plan["sections"][0]["variants"][0]["run_config"].pop("strategy"),
        lambda plan: plan["sections"][0]["variants"][0]["run_config"].update(model={"a": 1}),
        lambda plan: plan.update(sections=3),
        lambda plan: plan.update(sections={"a": 1}),
        lambda plan: plan.update(sections=[]),
        lambda plan: plan["sections"].pop(),
        lambda plan: plan.update(sections=plan["sections"] * 26),
        lambda plan: plan["cells"][0].update(variant="nobody"),
        lambda plan: plan["cells"][0].update(variant=3),
        lambda plan: plan["cells"][0].update(strategy="fedacs"),
        lambda plan: plan["cells"].pop(),
        lambda plan: plan["cells"].append(plan["cells"][0]),
    ],
)
def test_a_damaged_plan_is_refused(file, tmp_path, damage):
    found = read_variants(file(SECTIONS))
    runs = planned_variants(found.sections, found.seeds)
    written = Comparison(tmp_path.resolve(), runs, dict(found.common), 3, sections=found.sections)
    written.save()
    assert read_comparison(tmp_path) == written
    plan = json.loads((tmp_path / "comparison.json").read_text())
    damage(plan)
    (tmp_path / "comparison.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"comparison\.json is damaged"):
        read_comparison(tmp_path)
