"""`tepal compare --vary`: which values it reads, which runs it makes of them, what it refuses, and how it goes on."""

import csv
import json
import re
import tomllib
from itertools import product

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tepal.records.run_directory import read_config
from tepal.server_app.config import ConfigError
from tepal.tools.cli.main import main
from tepal.tools.compare.comparison import Comparison, planned_variants, read_comparison
from tepal.tools.compare.grid.expand import planned_text, strategies_grid, variants_grid
from tepal.tools.compare.grid.values import read_vary, split_values, value_of
from tepal.tools.compare.sections import Section, Variant
from tepal.tools.compare.variants import read_variants
from tests.comparisons import Killed


@pytest.fixture(autouse=True)
def no_pages(monkeypatch):
    """Pages take half a second, after every run."""
    monkeypatch.setattr("tepal.tools.compare.runs.comparison_page", lambda results: "")


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("learning-rate=0.001,0.01", "learning-rate", (0.001, 0.01)),
        ("learning-rate = 1e-3 , 1", "learning-rate", (1e-3, 1)),
        ("local-epochs=1,2,3", "local-epochs", (1, 2, 3)),
        ("score-in-training=true,false", "score-in-training", (True, False)),
        ("wire-dtype=float32,int8", "wire-dtype", ("float32", "int8")),
        ("wire-dtype=\"float32\",'int8'", "wire-dtype", ("float32", "int8")),
        ('pretrained="a.pt,b.pt","c \\"d\\".pt"', "pretrained", ("a.pt,b.pt", 'c "d".pt')),
        ('class-names="[1, 2]","x=y"', "class-names", ("[1, 2]", "x=y")),
        ('pretrained="","a#b"', "pretrained", ("", "a#b")),
        ("fedprox.mu=0.1,1", "fedprox.mu", (0.1, 1)),
    ],
)
def test_values_are_toml_and_words_need_no_quotes(text, key, values):
    found = read_vary([text])
    assert found == {key: values} and list(map(type, found[key])) == list(map(type, values))


_WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=12)


@given(st.lists(st.one_of(st.booleans(), st.integers(-9, 9), st.floats(-9, 9), _WORDS), min_size=1, max_size=6))
def test_any_values_that_toml_writes_are_read_back(values):
    written = [tomli_w.dumps({"v": value}).removeprefix("v = ").strip() for value in values]
    parts = split_values(" , ".join(written))
    assert parts == written
    assert [value_of(part) for part in parts] == [tomllib.loads(f"v = {text}")["v"] for text in written] == values


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["learning-rate"], ["--vary 'learning-rate'", "expected KEY=VALUE,VALUE"]),
        (["=1,2"], ["expected KEY=VALUE,VALUE"]),
        (["learning-rate="], ["--vary learning-rate: there is an empty value"]),
        (["learning-rate=0.1,,0.2"], ["an empty value"]),
        (["learning-rate=0.1,0.2,"], ["an empty value"]),
        (["learning-rate=0.1"], ["1 value, expected at least two", "set in the run config"]),
        (["learning-rate=0.1,0.10"], ["0.1 is named twice"]),
        (["learning-rate=1,1.0"], ["1.0 is named twice"]),
        (["learning-rate=0.1,0.2", "learning-rate=0.3,0.4"], ["learning-rate is varied twice"]),
        (["learning-rate=0.1,0.2x"], ["'0.2x' is not a TOML value", "quotes"]),
        (["learning-rate=0.1 0.2,1"], ["'0.1 0.2' is not a TOML value"]),
        (["score-in-training=True,false"], ["True is not a TOML value: write true"]),
        (["blocks.layers=[0,1],[2]"], ["'[0,1]' is no value of a run config key", "needs quotes"]),
        (["learning-rate={a=1},1"], ["'{a=1}' is no value"]),
        (["learning-rate=2020-01-01,1"], ["'2020-01-01' is no value"]),
        (['pretrained="a,b'], ['the quote " is not closed']),
        (["blocks.layers=[0,1"], ["a bracket is not closed: ] is missing"]),
        (["learning-rate=1,2#3"], ["# begins a comment"]),
        (["learning-rat=1,2"], ["--vary: 'learning-rat' is not a key", "did you mean 'learning-rate'"]),
        (["strategy=fedavg,fedacs"], ["strategy cannot be varied", "--strategies"]),
        (["seed=1,2"], ["seed cannot be varied", "--seeds"]),
        (["runs=a,b"], ["runs cannot be varied"]),
        (["resume=a,b"], ["resume cannot be varied", "--resume"]),
    ],
)
def test_what_cannot_be_varied_is_refused(options, said):
    with pytest.raises(ConfigError) as error:
        read_vary(options)
    assert all(text in str(error.value) for text in said), error.value


def test_all_problems_of_the_options_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        read_vary(["learning-rate=0.1,0.2x", "momentum=1", "modle=a,b", "seed=1,2"])
    assert len(str(error.value).splitlines()) == 4


def test_paths_are_those_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.npz").touch()
    assert read_vary(["dataset=a.npz,digits"]) == {"dataset": (str(tmp_path / "a.npz"), "digits")}


# --- the grid -------------------------------------------------------------------------------------------------------

KEYS = ["learning-rate", "momentum", "local-epochs", "fedprox.mu"]


@given(
    st.lists(st.sampled_from(["fedavg", "fedprox", "fedacs"]), min_size=1, unique=True),
    st.dictionaries(
        st.sampled_from(KEYS), st.lists(st.integers(0, 9), min_size=2, max_size=4, unique=True), min_size=1, max_size=3
    ),
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
)
def test_a_grid_has_every_combination_once(strategies, grid, seeds):
    sections = strategies_grid(strategies, {key: tuple(values) for key, values in grid.items()}, len(seeds))
    runs = planned_variants(sections, seeds)
    comparison = Comparison("", runs, {"model": "cnn"}, 3, sections=sections)
    found = [comparison.settings_of(run) | {"seed": run.seed} for run in runs]
    # By counting: the number of a run in a mixed base says the place of each of its values.
    sizes = [len(strategies), *(len(values) for values in grid.values())]
    expected = []
    for seed in seeds:
        for number in range(len(runs) // len(seeds)):
            places = []
            for size in reversed(sizes):
                number, place = divmod(number, size)
                places.append(place)
            strategy, *rest = reversed(places)
            values = {key: grid[key][place] for key, place in zip(grid, rest, strict=True)}
            expected.append({"model": "cnn", "strategy": strategies[strategy], **values, "seed": seed})
    assert found == expected
    assert len({run.variant for run in runs}) * len(seeds) == len(runs) == len({comparison.name(run) for run in runs})
    assert comparison.of_strategies and comparison.bases == strategies
    assert comparison.grid == {key: tuple(values) for key, values in grid.items()}
    factors = [int(number) for number in re.findall(r"(?:: |× )(\d+)", planned_text(comparison))]
    assert factors == [*sizes, len(seeds)] and planned_text(comparison).startswith(f"{len(runs)} run")


def test_names_of_long_variants_differ():
    variants = [Variant("n" * 63 + letter, {"strategy": "fedavg"}) for letter in "ab"]
    [section] = variants_grid([Section("", variants)], {"momentum": (0.1, 0.2)}, 1)
    assert len(set(section.names)) == 4 and max(map(len, section.names)) <= 64
    assert [variant.base[-1] for variant in section.variants] == ["a", "a", "b", "b"]


def test_a_section_with_a_question_is_one_for_each_combination():
    variants = (Variant("a", {"strategy": "fedavg"}), Variant("b", {"strategy": "fedprox"}))
    asked = Section("Bytes", variants, "About.", "bytes", "b", 0.1)
    plain = Section("Others", (Variant("c", {"strategy": "fedavg"}),), baseline="c")
    grid = {"momentum": (0.1, 0.2), "score-in-training": (True, False)}
    made = variants_grid([asked, plain], grid, 1)
    assert [section.title for section in made] == [
        *(f"Bytes: momentum={m}, score-in-training={s}" for m in ("0.1", "0.2") for s in ("true", "false")), "Others",
    ]  # fmt: skip
    for section, (momentum, scored) in zip(made, product((0.1, 0.2), (True, False)), strict=False):
        own = {"momentum": momentum, "score-in-training": scored}
        assert [(one.base, one.values) for one in section.variants] == [("a", own), ("b", own)]
        assert next(one.base for one in section.variants if one.name == section.baseline) == "b"
        assert (section.about, section.question, section.within) == ("About.", "bytes", 0.1)
    assert len(made[-1].variants) == 4 and made[-1].baseline == made[-1].variants[0].name


def test_a_grid_that_is_too_large_is_refused_before_it_is_made():
    many = {key: tuple(range(100)) for key in KEYS}
    with pytest.raises(ConfigError, match=r"100,000,000 runs.* at most 10,000"):
        strategies_grid(["fedavg"], many, 1)
    variants = tuple(Variant(name, {"strategy": "fedavg"}) for name in "ab")
    asked = Section("t", variants, question="bytes", baseline="a")
    with pytest.raises(ConfigError, match=r"100 sections.*at most 50"):
        variants_grid([asked], {"momentum": tuple(range(100))}, 1)
    with pytest.raises(ConfigError, match="has 107 characters: at most 100"):
        variants_grid([Section("t" * 95, variants, question="bytes", baseline="a")], {"momentum": (1, 2)}, 1)


# --- the command ----------------------------------------------------------------------------------------------------


def rows_of(folder, name):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def said_by(done):
    return " ".join(done.output.split())


GRID = ("--strategies", "fedavg,fedacs", "--vary", "learning-rate=0.001,0.02", "--vary", "wire-dtype=float32,int8")


def test_every_combination_runs_with_every_seed(compare):
    done = compare(*GRID, "--seeds", "1,2")
    assert done.exit_code == 0, done.output
    assert "16 runs: 2 strategies × 2 values of learning-rate × 2 values of wire-dtype × 2 seeds" in done.output
    keys = ("seed", "strategy", "learning-rate", "wire-dtype")
    order = [(1, 2), ("fedavg", "fedacs"), (0.001, 0.02), ("float32", "int8")]
    assert [tuple(config[key] for key in keys) for config, _ in compare.started] == [*product(*order)]
    rest = [{key: value for key, value in config.items() if key not in keys} for config, _ in compare.started]
    rest = [{key: value for key, value in config.items() if key != "fedfrozen.warmup-rounds"} for config in rest]
    assert all(config == rest[0] for config in rest)
    assert "2/16 fedavg learning-rate=0.001 wire-dtype=int8 seed 1: round 3/3" in done.output
    (folder,) = compare.runs.glob("*-compare")
    columns = ("strategy", "learning-rate", "wire-dtype")
    rows = rows_of(folder, "comparison.csv")
    assert list(rows[0])[:3] == list(columns) and "best" in rows[0] and "variant" not in rows[0]
    expected = [tuple(map(str, one)) for one in product(*order[1:])]
    assert [tuple(row[key] for key in columns) for row in rows] == expected
    runs = rows_of(folder, "runs.csv")
    assert [tuple(row[key] for key in columns) for row in runs] == expected * 2
    for row in runs:
        config = read_config(folder / row["run"])
        assert all(str(config[key]) == row[key] for key in (*columns, "seed"))
    names = [run["name"] for run in json.loads(CliRunner().invoke(main, ["runs", str(folder), "--json"]).stdout)]
    assert sorted(names) == sorted(row["run"] for row in runs)
    told = json.loads(CliRunner().invoke(main, ["show", str(folder), "--json"]).stdout)
    assert list(told["strategies"])[1] == "fedavg learning-rate=0.001 wire-dtype=int8"


def test_a_comparison_without_a_grid_says_its_number_of_runs_too(compare):
    assert "2 runs: 2 strategies × 1 seed" in compare("--strategies", "fedavg,fedacs").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vary", "learning-rate=0.1,-1,-2"], ["learning-rate=-1", "learning-rate=-2", "greater than"]),
        (["--vary", "wire-dtype=int8,int9"], ["wire-dtype=int9", "did you mean 'int8'?"]),
        (["--vary", "learning-rate=fast,0.1"], ["learning-rate='fast'"]),
        (["--vary", "learning-rate=0.1,nan"], ["learning-rate=nan"]),
        (["--vary", "model=tiny-vit,cnn"], ["fedfrozen model=cnn", "strategy='fedfrozen' with model='cnn'"]),
        (["--vary", "min-clients=2,5"], ["fedavg min-clients=5", "--clients is 3"]),
        (["--vary", "learning-rate=0.1,0.2", "-c", "learning-rate=1"], ["learning-rate=1 in the run config", "--vary"]),
        (["--vary", "lerning-rate=0.1,0.2"], ["did you mean 'learning-rate'?"]),
    ],
    ids=lambda value: value[1] if value[0] == "--vary" else "",
)
def test_a_combination_that_cannot_run_is_refused_before_the_first_run(compare, arguments, said):
    done = compare("--strategies", "fedavg,fedfrozen", *arguments)
    assert done.exit_code == 1 and all(text in said_by(done) for text in said), done.output
    assert compare.started == [] and not compare.runs.exists()


def test_a_file_of_c_may_set_a_varied_key(compare, tmp_path):
    (tmp_path / "own.toml").write_text("learning-rate = 0.5\nmomentum = 0.25")
    done = compare("--strategies", "fedavg", "--vary", "learning-rate=0.1,0.2", "-c", str(tmp_path / "own.toml"))
    assert done.exit_code == 0, done.output
    assert [(c["learning-rate"], c["momentum"]) for c, _ in compare.started] == [(0.1, 0.25), (0.2, 0.25)]


# --- variants files -------------------------------------------------------------------------------------------------

FILE = """
seeds = [1, 2]
[common]
num-server-rounds = 3
learning-rate = 0.5
[vary]
learning-rate = [0.001, 0.02]
fedprox.mu = [0.1, 1]
[[variant]]
name = "plain"
strategy = "fedavg"
[[variant]]
name = "near"
strategy = "fedprox"
momentum = 0.5
"""


@pytest.fixture
def with_file(compare, tmp_path):
    def run(text, *arguments):
        (tmp_path / "variants.toml").write_text(text)
        file = ["--variants", str(tmp_path / "variants.toml"), "--clients", "3"]
        return CliRunner().invoke(main, ["compare", ".", *file, "-c", f'runs="{compare.runs}"', *arguments])

    return run


def test_the_table_of_a_file_varies_each_variant(compare, with_file):
    done = with_file(FILE)
    assert done.exit_code == 0, done.output
    assert "16 runs: 2 variants × 2 values of learning-rate × 2 values of fedprox.mu × 2 seeds" in done.output
    keys = ("seed", "strategy", "learning-rate", "fedprox.mu")
    order = [(1, 2), ("fedavg", "fedprox"), (0.001, 0.02), (0.1, 1)]
    assert [tuple(config[key] for key in keys) for config, _ in compare.started] == [*product(*order)]
    assert {config["momentum"] for config, _ in compare.started if config["strategy"] == "fedprox"} == {0.5}
    (folder,) = compare.runs.glob("*-compare")
    row = rows_of(folder, "comparison.csv")[-1]
    assert list(row)[:4] == ["variant", "strategy", "learning-rate", "fedprox.mu"]
    assert [row[key] for key in list(row)[:4]] == ["near", "fedprox", "0.02", "1"]


def test_the_option_takes_precedence_over_the_table(compare, with_file):
    done = with_file(FILE, "--vary", "learning-rate=0.3,0.4", "--vary", "local-epochs=1,2", "--seeds", "1")
    assert done.exit_code == 0, done.output
    found = [(c["strategy"], c["learning-rate"], c["fedprox.mu"], c["local-epochs"]) for c, _ in compare.started]
    assert found == [*product(("fedavg", "fedprox"), (0.3, 0.4), (0.1, 1), (1, 2))]


SECTION = '[[section]]\ntitle = "S"\n[section.common]\nbatch-size = 8\n'


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (FILE, ["--vary", "momentum=0.1,0.2"], ["variants.toml: variant 'near' has momentum=0.5 of its own"]),
        (
            SECTION + '[[section.variant]]\nname = "a"\nstrategy = "fedavg"', ["--vary", "batch-size=4,16"],
            ["section 'S', variant 'a' has batch-size=8 of its own", "[section.common]"],
        ),
        (FILE.replace("[0.001, 0.02]", "0.001"), [], ["[vary]: learning-rate=0.001: expected a list of values"]),
        (FILE.replace("[0.001, 0.02]", "[0.1, 0.1]"), [], ["[vary]: learning-rate=[0.1, 0.1]: 0.1 is named twice"]),
        (FILE.replace("[0.001, 0.02]", "[0.1]"), [], ["1 value, expected at least two"]),
        (FILE.replace("[0.001, 0.02]", "[]"), [], ["no values, expected at least two"]),
        (FILE.replace("[0.001, 0.02]", "[[1], [2]]"), [], ["[1]: expected numbers, texts, true or false"]),
        (FILE.replace("fedprox.mu", "fedprox.nu"), [], ["[vary]: 'fedprox.nu' is not a key", "fedprox.mu"]),
        (FILE.replace("fedprox.mu", "seed"), [], ["[vary]: seed cannot be varied"]),
        ('vary = 3\n[[variant]]\nname = "a"\nstrategy = "fedavg"', [], ["vary=3 is not a table"]),
        (FILE.replace("0.02]", "-1]"), [], ["variant 'plain' learning-rate=-1 fedprox.mu=0.1", "invalid"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_files_grid_is_refused_with_its_place(compare, with_file, text, arguments, said):
    done = with_file(text, *arguments)
    assert done.exit_code == 1 and all(words in said_by(done) for words in said), done.output
    assert compare.started == [] and not compare.runs.exists()


def test_a_file_without_the_table_has_no_grid(tmp_path):
    (tmp_path / "v.toml").write_text('[[variant]]\nname = "a"\nstrategy = "fedavg"')
    assert read_variants(tmp_path / "v.toml").vary == {}


# --- going on -------------------------------------------------------------------------------------------------------


def test_a_grid_that_was_killed_is_resumed_where_it_was(compare):
    whole = compare(*GRID, "--seeds", "1,2")
    assert whole.exit_code == 0, whole.output
    (first,) = compare.runs.glob("*-compare")
    compare.cells()
    compare.failing["fedacs", 1] = Killed()
    with pytest.raises(Killed):
        compare_again(compare, *GRID, "--seeds", "1,2")
    compare.failing.clear()
    assert compare.cells() == [("fedavg", 1)] * 4 + [("fedacs", 1)]
    [killed] = [folder for folder in compare.runs.glob("*-compare*") if folder != first]
    done = compare("--resume", str(killed), config=None)
    assert done.exit_code == 0, done.output
    assert "16 runs:" in done.output and "; 4 finished before" in done.output
    assert compare.cells() == [("fedacs", 1)] * 4 + [("fedavg", 2)] * 4 + [("fedacs", 2)] * 4
    for name in ("comparison.csv", "comparison.md", "comparison.tex", "comparison.svg"):
        assert (killed / name).read_text() == (first / name).read_text(), name
    assert read_comparison(killed).sections == read_comparison(first).sections
    refused = compare("--resume", str(killed), "--vary", "momentum=0,0.1", config=None)
    assert refused.exit_code == 1 and "leave out --vary" in said_by(refused)


def compare_again(compare, *arguments):
    """As `compare`, but what is raised in it is raised here."""
    given = ["-c", f'num-server-rounds=3 runs="{compare.runs}"', "--clients", "3"]
    return CliRunner().invoke(main, ["compare", ".", *given, *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda variant: variant.update(values=[]),
        lambda variant: variant.update(values={"momentum": 0.1}),
        lambda variant: variant["values"].update({"learning-rate": 7}),
        lambda variant: variant.update(values={}),
        lambda variant: variant.update(of="a{color:red}"),
        lambda variant: variant.update(of=3),
    ],
)
def test_a_damaged_grid_is_refused(tmp_path, damage):
    sections = strategies_grid(["fedavg"], {"learning-rate": (0.1, 0.2)}, 1)
    written = Comparison(tmp_path.resolve(), planned_variants(sections, [1]), {}, 3, sections=sections)
    written.save()
    assert read_comparison(tmp_path) == written
    plan = json.loads((tmp_path / "comparison.json").read_text())
    damage(plan["sections"][0]["variants"][0])
    (tmp_path / "comparison.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"comparison\.json is damaged"):
        read_comparison(tmp_path)
