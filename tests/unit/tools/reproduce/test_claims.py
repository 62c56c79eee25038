"""Verdicts on the papers' claims: how intervals decide them, and the pages that show them."""

import json
import lzma
import runpy
import sys
from dataclasses import replace
from typing import ClassVar

import pytest

from tepal.tools.compare.answers import paired
from tepal.tools.reproduce import experiment
from tepal.tools.reproduce.experiment import FAILS, HOLDS, UNDECIDED, Claim, Reproduction, Trial, claims_table, table
from tepal.tools.reproduce.runner import EXPERIMENTS, reproduce
from tepal.tools.reproduce.versus import ahead, as_good, as_most
from tests.packages import ROOT

PAGES = sorted((ROOT / "docs" / "papers").glob("*.md"))


@pytest.fixture(scope="module")
def papers():
    return runpy.run_path(str(ROOT / "docs" / "papers.py"))


# --- verdicts -------------------------------------------------------------------------------------------------------


def gain(low, high):
    """A difference with this interval."""
    return replace(paired({1: 0.2, 2: 0.3}, {1: 0.1, 2: 0.1}, 2), mean=(low + high) / 2, interval=(low, high))


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(0.01, 0.05), (0.2, 0.3)], HOLDS),
        ([(0.01, 0.05), (-0.01, 0.3)], UNDECIDED),
        ([(-0.05, -0.01), (-0.01, 0.3)], FAILS),
        ([(-0.05, -0.01), (0.2, 0.3)], FAILS),
    ],
)
def test_a_method_is_ahead_if_it_is_ahead_of_each(intervals, verdict):
    gains = {f"method {k}": gain(*each) for k, each in enumerate(intervals)}
    assert ahead("It is best.", gains).verdict == verdict


def test_being_ahead_by_more_than_a_number_needs_the_whole_interval_beyond_it():
    for interval, verdict in (((0.21, 0.3), HOLDS), ((0.19, 0.3), UNDECIDED), ((0.1, 0.19), FAILS)):
        assert ahead("By .2.", {"FedAvg": gain(*interval)}, least=0.2).verdict == verdict


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(-0.004, 0.005)], HOLDS),
        ([(-0.004, 0.006)], UNDECIDED),
        ([(0.006, 0.008)], FAILS),
        ([(-0.02, -0.006)], FAILS),
        ([(-0.004, 0.005), (-0.1, 0.1)], UNDECIDED),
    ],
)
def test_methods_are_alike_if_their_interval_is_narrow_enough(intervals, verdict):
    gains = {f"method {k}": gain(*each) for k, each in enumerate(intervals)}
    assert as_good("As good.", gains, 0.005).verdict == verdict


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(-0.004, 0.005), (-0.001, 0.001), (0.1, 0.2)], HOLDS),
        ([(-0.004, 0.005), (-0.004, 0.006), (0.1, 0.2)], UNDECIDED),
        ([(-0.004, 0.005), (-0.2, -0.1), (0.1, 0.2)], FAILS),
        ([(-0.004, 0.005), (0.1, 0.2)], FAILS),
        ([(-0.004, 0.005), (-0.004, 0.006)], UNDECIDED),
    ],
)
def test_a_method_is_like_most_others_if_more_than_half_of_the_intervals_are_narrow_enough(intervals, verdict):
    gains = {f"method {k}": gain(*each) for k, each in enumerate(intervals)}
    assert as_most("As most.", gains, 0.005, gains).verdict == verdict


def test_methods_that_are_not_computed_yet_count_among_most_others():
    gains = {"one": gain(-0.001, 0.001), "two": gain(-0.002, 0.002), "three": gain(0.1, 0.2)}
    for wanted, verdict in (("two", HOLDS), ("four", UNDECIDED)):
        assert as_most("As most.", gains, 0.005, [wanted]).verdict == verdict
    assert as_most("As most.", {"three": gain(0.1, 0.2)}, 0.005, ["one", "two"]).verdict == UNDECIDED
    assert as_most("As most.", {"three": gain(0.1, 0.2)}, 0.005, ["one"]).verdict == FAILS


def test_without_an_interval_there_is_no_verdict():
    one_seed = paired({1: 0.5}, {1: 0.4}, 1)
    assert ahead("It is best.", {"FedAvg": one_seed}) is None and as_good("As good.", {"FedAvg": one_seed}, 1) is None
    assert ahead("It is best.", {}) is None
    known = ahead("It is best.", {"FedAvg": one_seed, "Local": gain(0.1, 0.2)})
    measured = "Local: +0.1500 (+0.1000 to +0.2000); FedAvg: not computed yet"
    assert known == Claim("It is best.", measured, UNDECIDED), "another method is missing"
    whole = ahead("It is best.", {"Local": gain(0.1, 0.2)})
    assert whole == Claim("It is best.", "+0.1500 (+0.1000 to +0.2000)", HOLDS)
    assert ahead("It is best.", {"Local": gain(0.1, 0.2)}, wanted=["Local", "FedAvg"]).verdict == UNDECIDED
    assert ahead("It is best.", {"Local": gain(-0.2, -0.1)}, wanted=["Local", "FedAvg"]).verdict == FAILS
    assert ahead("It is best.", {"Local": replace(gain(0.1, 0.2), seeds=3)}).verdict == UNDECIDED, "a seed is missing"
    two = ahead("It is best.", {"FedAvg": gain(0.1, 0.2), "Local": gain(-0.1, 0.2)})
    assert two.measured == "FedAvg: +0.1500 (+0.1000 to +0.2000); Local: +0.0500 (-0.1000 to +0.2000, undecided)"


# --- the pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_papers_page_has_the_tables_of_the_kept_trials(papers, page):
    trials = papers["all_kept"]()
    assert papers["with_tables"](page.read_text(), trials) == page.read_text()
    names = [found[2] for found in papers["_PLACE"].finditer(page.read_text())]
    assert names and {name.removesuffix("-full") for name in names} <= EXPERIMENTS.keys()


def test_the_index_has_the_verdicts_of_all_pages(papers):
    trials, index = papers["all_kept"](), ROOT / "docs" / "reproduce.md"
    pages = {page: page.read_text() for page in PAGES}
    assert papers["with_verdicts"](index.read_text(), pages, trials) == index.read_text()
    shown = [name for page in pages.values() for name in trials if f"<!-- reproduced: {name} -->" in page]
    assert sorted(shown) == sorted(trials), "kept trials are shown on one page each"


def test_trials_of_the_experiment_are_kept_and_no_others(papers, tmp_path, monkeypatch):
    folder = tmp_path / "ensemble-toy"
    (folder / "cells").mkdir(parents=True)
    trial, other = EXPERIMENTS["ensemble-toy"].trials(False)[:2]
    cell = {"options": dict(trial.options), "needs": {}, "values": {"bias": 0.2}, "seconds": 1.5}
    (folder / "cells" / f"{trial.name}.json").write_text(json.dumps(cell))
    (folder / "cells" / f"{other.name}.json").write_text(json.dumps(cell))  # of other options
    (folder / "cells" / "renamed.json").write_text(json.dumps(cell))
    monkeypatch.setitem(papers["keep"].__globals__, "PAPERS", tmp_path)
    file = papers["keep"](folder)
    assert file.name == "ensemble-toy.json.xz"
    assert papers["kept"](file) == json.loads(lzma.decompress(file.read_bytes())) == {trial.name: cell}


def test_kept_trials_are_not_computed_again(papers, tmp_path, monkeypatch):
    monkeypatch.setitem(papers["keep"].__globals__, "PAPERS", tmp_path)
    experiment, computed_now = EXPERIMENTS["ensemble-toy"], []
    three = experiment.trials(False)[:3]
    monkeypatch.setattr(type(experiment), "trials", lambda self, full: three)
    monkeypatch.setattr(type(experiment), "compute", lambda self, trial, inputs: computed_now.append(trial.name)
                        or {"bias": 0.2, "variance": 0.1})  # fmt: skip
    first, second = tmp_path / "first", tmp_path / "second"
    reproduce(experiment, first, full=False, log=str)
    file = papers["keep"](first / experiment.name)
    (first / experiment.name / "cells" / f"{computed_now[0]}.json").unlink()
    assert papers["write_kept"](second / experiment.name) == 3
    reproduce(experiment, second, full=False, log=str)
    assert len(computed_now) == 3 and papers["kept"](papers["keep"](second / experiment.name)) == papers["kept"](file)
    assert papers["write_kept"](first / experiment.name) == 1, "what is there stays"


class Sums:
    """An experiment for tests, whose trials `b` and `c` need `a`; `d` is optional."""

    name, title, paper, deviations = "sums", "Sums", "Nobody, Table 1", ()
    first: ClassVar = {"part": "search"}

    def scale(self, full):
        return "All."

    def trials(self, full):
        needing = [Trial(name, {"of": name}, ("a",)) for name in "bc"]
        return [Trial("a", self.first), *needing, Trial("d", {}, optional=True)]

    def results(self, found):
        rows = [(name, of["sum"]) for name, of in found.items()]
        return Reproduction([table("All sums", ("trial", "sum"), rows)], claims=[Claim("They grow.", "+1", HOLDS)])


class Trained(Sums):
    """Its first trial trains the weights that the others start from."""

    first: ClassVar = {"part": "pretraining"}


@pytest.fixture
def sums(papers, tmp_path, monkeypatch):
    """Functions of papers.py, with a page of the experiment `sums`; its folder."""
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "it.md").write_text("# A paper\n\n<!-- reproduced: sums -->\n<!-- end -->\n")
    (tmp_path / "index.md").write_text("<!-- verdicts -->\n<!-- end -->\n")
    monkeypatch.setitem(papers["keep"].__globals__, "PAPERS", tmp_path / "papers")
    monkeypatch.setitem(papers["keep"].__globals__, "INDEX", tmp_path / "index.md")
    monkeypatch.setitem(papers["keep"].__globals__, "EXPERIMENTS", {"sums": Sums()})
    return tmp_path / "sums"


def compute(folder, *names, day=1, of=Sums, **others):
    """Put trials into a folder as if they were computed on a day."""
    options = {trial.name: trial.options for trial in of().trials(False)}
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    for name in names:
        needs = {"a": f"2030-01-0{others.get('needs', day)}"} if name in "bc" else {}
        cell = {"options": options[name], "needs": needs, "values": {"sum": day}, "seconds": 1.0}
        (folder / "cells" / f"{name}.json").write_text(json.dumps({**cell, "computed": f"2030-01-0{day}"}))


def call(papers, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["papers.py", *map(str, arguments)])
    papers["main"]()


def values(papers, folder):
    return {name: of["values"]["sum"] for name, of in papers["all_kept"]()[folder.name].items()}


def test_an_experiment_is_shown_once_all_its_trials_are_kept(papers, sums, monkeypatch):
    page, index = sums.parent / "papers" / "it.md", sums.parent / "index.md"
    compute(sums, "a", "b")
    call(papers, monkeypatch, sums)
    note = "<!-- reproduced: sums -->\n\n*Computed in part: 2 of 4 trials are kept.*\n\n<!-- end -->"
    assert page.read_text() == f"# A paper\n\n{note}\n" and "They grow." not in index.read_text()
    compute(sums, "c")
    call(papers, monkeypatch, sums)
    assert "| c | 1 |" in page.read_text() and "in part" not in page.read_text(), "one that is missing is optional"
    assert "3 of 4 trials" in page.read_text() and "| They grow. | **holds** |" in index.read_text()


def test_kept_trials_of_other_options_do_not_count(papers, sums, monkeypatch):
    compute(sums, "a", "b", "c")
    papers["keep"](sums)
    monkeypatch.setattr(Sums, "first", {"part": "search", "trials": 20})
    call(papers, monkeypatch)
    assert "*Computed in part: 0 of 4 trials are kept.*" in (sums.parent / "papers" / "it.md").read_text()


def test_trials_that_a_folder_lacks_stay_kept(papers, sums):
    compute(sums, "a", "b", "d")
    papers["keep"](sums)
    for path in (sums / "cells").iterdir():
        path.unlink()
    assert papers["write_kept"](sums) == 3
    compute(sums, "c", day=2, needs=1)
    compute(sums, "d", day=2)
    (sums / "cells" / "b.json").unlink()
    papers["keep"](sums)
    assert values(papers, sums) == {"a": 1, "b": 1, "c": 2, "d": 2}
    (sums / "cells" / "a.json").unlink()
    assert papers["write_kept"](sums) == 2 and values(papers, sums)["c"] == 2, "a and b; the folder's own stay"


def test_kept_trials_are_not_replaced_by_fewer(papers, sums, monkeypatch):
    compute(sums, "a", "b", "c")
    file = papers["keep"](sums)
    before, again = file.read_bytes(), sums.parent / "again" / "sums"
    compute(again, "a", day=2)
    with pytest.raises(SystemExit, match=r"has 3 trials, and would have 1 with those of .*again.sums, because"):
        call(papers, monkeypatch, again)
    assert file.read_bytes() == before
    assert papers["write_kept"](again) == 0, "the others need another a"
    compute(again, "b", "c", day=2)
    papers["keep"](again)
    assert values(papers, sums) == {"a": 2, "b": 2, "c": 2}


def test_continuing_says_when_weights_are_not_kept(papers, sums, monkeypatch, capsys):
    compute(sums, "a", "b")
    papers["keep"](sums)
    call(papers, monkeypatch, "--continue", sums.parent / "new" / "sums")
    assert capsys.readouterr().out == f"{sums.parent / 'new' / 'sums'}: 2 trials written\n"
    monkeypatch.setitem(papers["keep"].__globals__, "EXPERIMENTS", {"sums": Trained()})
    other = sums.parent / "other" / "sums"
    call(papers, monkeypatch, "--continue", other)
    assert capsys.readouterr().out.startswith(f"{other}: nothing written: ") and not other.exists()


def test_weights_of_an_experiment_are_kept_until_all_its_trials_are(papers, sums, monkeypatch, capsys):
    monkeypatch.setitem(papers["keep"].__globals__, "EXPERIMENTS", {"sums": Trained()})
    compute(sums, "a", "b", of=Trained)
    (sums / "weights").mkdir()
    (sums / "weights" / "it.safetensors").write_bytes(b"trained")
    papers["keep"](sums)
    there = sums.parent / "there" / "sums"
    (there / "weights").mkdir(parents=True)
    (there / "weights" / "it.safetensors").write_bytes(b"of an attempt whose trial was not written")
    papers["keep"](there)
    assert (sums.parent / "papers" / "sums.weights" / "it.safetensors").read_bytes() == b"trained"
    call(papers, monkeypatch, "--continue", there)
    assert capsys.readouterr().out == f"{there}: 2 trials written\n"
    assert (there / "weights" / "it.safetensors").read_bytes() == b"trained"
    compute(there, "c", day=1)
    papers["keep"](there)
    assert values(papers, sums) == {"a": 1, "b": 1, "c": 1}
    assert not (sums.parent / "papers" / "sums.weights").exists(), "`d` is optional"


def test_claims_that_nothing_was_computed_for_are_in_the_index(papers, tmp_path):
    page = (
        "# A paper\n\n## A table\n\n<!-- reproduced: ensemble-toy -->\n<!-- end -->\n\n"
        "## Not tested here\n\n| claim | why |\n| --- | --- |\n| It is fast. | No GPU. |\n| It is good. | No data. |\n"
        "\nText.\n"
    )
    index = papers["with_verdicts"]("a\n<!-- verdicts -->\nold\n<!-- end -->\nb\n", {tmp_path / "it.md": page}, {})
    rows = [line for line in index.splitlines() if line.startswith("| [")]
    toy = EXPERIMENTS["ensemble-toy"].title
    assert rows == [
        f"| [A paper](papers/it.md) | `ensemble-toy` | {toy} | not computed |",
        *(f"| [A paper](papers/it.md) | | {text} | not tested |" for text in ("It is fast.", "It is good.")),
    ]
    assert index.startswith("a\n<!-- verdicts -->\n") and index.endswith("<!-- end -->\nb\n") and "old" not in index
    assert "*Not computed yet.*" in papers["with_tables"](page, {})


def test_claims_are_a_table_of_text():
    table = claims_table([Claim("It is best.", "+0.1", experiment.HOLDS)])
    assert table.markdown().splitlines()[-1] == "| It is best. | +0.1 | holds |"
