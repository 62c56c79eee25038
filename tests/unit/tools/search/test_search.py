"""Searches: which trials they have, also when interrupted, and what they write. Most do not train."""

import csv
import io
import json
import math
import threading
import tomllib
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from tepal.host.superlink import RunError
from tepal.host.toml import flat
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory, RunInUse, held, read_config, read_metrics
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.tools.cluster.engine import ClusterFailed
from tepal.tools.search import __main__ as main
from tepal.tools.search.__main__ import TrialProgress, app
from tepal.tools.search.plan import SearchedVariant, SearchPlan
from tepal.tools.search.results import best_table, trial_line
from tepal.tools.search.running import JOURNAL, open_search, run_trials, score_of
from tepal.tools.search.study import VariantStudy
from tepal.tools.simulation.engine import RunStopped
from tepal.tools.spaces import Choices, Range
from tests.packages import ROOT

optuna = pytest.importorskip("optuna", reason="pip install 'tepal[search]'")

SPACES = {
    "learning-rate": Range(1e-4, 1e-1, log=True), "batch-size": Range(8, 64, step=8),
    "local-epochs": Choices((1, 2, 4)), "momentum": Range(0.1, 0.9, step=0.1),
}  # fmt: skip
PLAN = SearchPlan(
    clients=3,
    seed=1000,
    common={"model": "cnn", "num-server-rounds": 1},
    variants=(
        SearchedVariant("FedAvg", {"strategy": "fedavg"}, SPACES),
        SearchedVariant("as-it-is", {"strategy": "local", "momentum": 0.5}, {}),
        SearchedVariant("FedProx", {"strategy": "fedprox"}, {**SPACES, "fedprox.mu": Range(1e-3, 1.0, log=True)}),
    ),
)


def hill(config):
    """A score with its best value inside of the ranges."""
    distance = abs(math.log10(config["learning-rate"]) + 2) + abs(config["momentum"] - 0.5)
    return 1 / (1 + distance + config["batch-size"] / 100 + config["local-epochs"] / 10)


class Fake:
    """An objective that scores without a run; it notes its run configs, and may stop at one of its calls."""

    def __init__(self, folder, score=hill, stop_at=None):
        self.folder, self.score, self.stop_at = folder, score, stop_at
        self.configs = []

    def __call__(self, name, config, on_run):
        run = self.folder / f"run-{len(list(self.folder.glob('run-*')))}"
        run.mkdir()
        on_run(run)
        self.configs.append(dict(config))
        if len(self.configs) == self.stop_at:
            raise KeyboardInterrupt
        return self.score(config)


def search(folder, trials, objective=None, *, plan=PLAN, minimise=False):
    folder.mkdir(parents=True, exist_ok=True)
    open_search(plan, {}, folder)
    ended = []
    found = run_trials(
        plan, folder, trials, objective or Fake(folder), minimise=minimise, on_trial=ended.append
    )  # fmt: skip
    return found, ended


def rows(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def told(trials):
    """What must be the same in two searches."""
    return {(trial.variant, trial.number): (trial.values, trial.score, trial.reason) for trial in trials}


# --- trials ---------------------------------------------------------------------------------------------------------


def test_every_searched_variant_has_the_same_number_of_trials_in_turn(tmp_path):
    objective = Fake(tmp_path)
    found, ended = search(tmp_path, 4, objective)
    assert [(trial.variant, trial.number) for trial in ended] == [
        (name, number) for number in range(4) for name in ("FedAvg", "FedProx")
    ]
    assert {trial.outcome for trial in found.trials} == {"finished"}
    for trial, config in zip(ended, objective.configs, strict=True):
        own = {"strategy": trial.variant.lower(), "seed": 1000, **PLAN.common}
        assert config == {**own, **trial.values} and trial.score == hill(config)


def test_variants_and_seeds_have_draws_of_their_own(tmp_path):
    first, _ = search(tmp_path / "a", 3)
    other, _ = search(tmp_path / "b", 3, plan=SearchPlan(3, 1001, PLAN.common, PLAN.variants))
    rates = [trial.values["learning-rate"] for trial in (*first.trials, *other.trials)]
    assert len(set(rates)) == len(rates)


@pytest.mark.parametrize("stop_at", [1, 2, 7, 13])
def test_an_interrupted_search_has_the_same_trials_as_one_that_is_not(tmp_path, stop_at):
    whole, _ = search(tmp_path / "whole", 8)
    folder = tmp_path / "stopped"
    folder.mkdir()
    stopped = Fake(folder, stop_at=stop_at)
    with pytest.raises(KeyboardInterrupt):
        search(folder, 8, stopped)
    again = Fake(folder)
    found, ended = search(folder, 8, again)
    assert told(found.trials) == told(whole.trials) == told(ended)
    # What was cut off is run again with the same values, and nothing else is.
    assert again.configs[0] == stopped.configs[-1]
    assert len(stopped.configs) + len(again.configs) == 16 + 1
    assert (folder / "trials.csv").exists() and len(rows(folder)) == 16
    runs = {row["run"] for row in rows(folder)}
    assert runs == {path.name for path in folder.glob("run-*")}, "the run that was cut off is removed"


FEW = SearchPlan(2, 1000, {}, (SearchedVariant("A", {"strategy": "fedavg"}, {"local-epochs": Choices((1, 2))}),))
"""Its third trial repeats the values of one before."""


def test_a_search_that_is_killed_as_it_notes_a_repeated_trial_keeps_the_run_of_the_first(tmp_path, monkeypatch):
    objective = Fake(tmp_path, lambda config: config["local-epochs"] / 10)
    search(tmp_path, 2, objective, plan=FEW)
    keep = VariantStudy._keep

    def killed(self, trial, **values):
        keep(self, trial, **values)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(VariantStudy, "_keep", killed)
        search(tmp_path, 3, objective, plan=FEW)
    found, _ = search(tmp_path, 3, objective, plan=FEW)
    assert {trial.run for trial in found.trials} == {path.name for path in tmp_path.glob("run-*")}
    assert len(found.trials) == 3 and (tmp_path / found.best["A"].run).is_dir()


@pytest.mark.parametrize("name", [".", "..", "run-0/", "a/.."])
def test_no_other_folder_is_removed_for_a_trial_that_was_cut_off(tmp_path, name):
    folder = tmp_path / "search"
    objective = Fake(folder, lambda config: config["local-epochs"] / 10)
    search(folder, 1, objective, plan=FEW)
    study = VariantStudy(folder / JOURNAL, FEW.variants[0], 1000, minimise=False)
    study.begin(study.next_trial(), name)
    found, _ = search(folder, 2, objective, plan=FEW)
    assert [(folder / trial.run).is_dir() for trial in found.trials] == [True, True]


def test_a_journal_whose_last_line_was_cut_off_is_read(tmp_path):
    whole, _ = search(tmp_path / "whole", 4)
    folder = tmp_path / "cut"
    search(folder, 3)
    journal = folder / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-25])
    found, _ = search(folder, 4)
    assert told(found.trials) == told(whole.trials)


def test_the_number_of_trials_is_a_total(tmp_path):
    search(tmp_path, 2)
    more = Fake(tmp_path)
    found, ended = search(tmp_path, 3, more)
    assert len(more.configs) == 2 and len(found.trials) == 6 == len(ended)
    fewer = Fake(tmp_path)
    found, _ = search(tmp_path, 1, fewer)
    assert fewer.configs == [] and len(found.trials) == 6


def test_later_trials_are_drawn_near_good_ones(tmp_path):
    """With seeds that are fixed; the mean of all draws from the ranges is the measure."""
    found, _ = search(tmp_path, 30)
    scores = [trial.score for trial in found.trials if trial.variant == "FedAvg"]
    drawn, guided = scores[:5], scores[15:]
    assert sum(guided) / len(guided) > sum(drawn) / len(drawn)


def test_values_that_were_scored_are_not_run_again(tmp_path):
    small = SearchPlan(3, 7, {}, (SearchedVariant("A", {}, {"local-epochs": Choices((1, 2))}),))
    objective = Fake(tmp_path, lambda config: config["local-epochs"] / 4)
    found, _ = search(tmp_path, 8, objective, plan=small)
    assert sorted(config["local-epochs"] for config in objective.configs) == [1, 2]
    assert len(found.trials) == 8
    assert all(trial.score == trial.values["local-epochs"] / 4 for trial in found.trials)
    assert len({(trial.values["local-epochs"], trial.run) for trial in found.trials}) == 2


def test_values_are_repeated_only_when_all_were_tried(tmp_path):
    choices = (0.1, 0.2, 0.3, 0.4)
    plan = SearchPlan(3, 7, {}, (SearchedVariant("A", {}, {"momentum": Choices(choices)}),))
    found, _ = search(tmp_path, 7, Fake(tmp_path, lambda config: config["momentum"]), plan=plan)
    assert sorted(trial.values["momentum"] for trial in found.trials[:4]) == [*choices]


def test_a_trial_that_fails_counts_as_the_worst_and_is_named(tmp_path):
    errors = iter([RunError("it diverged\nat length"), OSError("disk full"), ConfigError("invalid:\n  key: wrong")])

    def score(config):
        if error := next(errors, None):
            raise error
        return -1.0

    plan = SearchPlan(3, 1000, {}, PLAN.variants[:1])
    found, ended = search(tmp_path, 5, Fake(tmp_path, score), plan=plan)
    assert [trial.reason for trial in ended] == ["it diverged", "disk full", "invalid: key: wrong", "", ""]
    assert [trial.outcome for trial in ended] == ["failed"] * 3 + ["finished"] * 2
    assert found.best["FedAvg"].number == 3 and found.without == []
    study = optuna.load_study(
        study_name="FedAvg",
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / JOURNAL))
        ),
    )  # fmt: skip
    assert [trial.value for trial in study.trials] == [-math.inf] * 3 + [-1.0] * 2
    assert [row["outcome"] for row in rows(tmp_path)] == ["failed"] * 3 + ["finished"] * 2
    assert rows(tmp_path)[0]["score"] == "" and rows(tmp_path)[0]["reason"] == "it diverged"
    again = Fake(tmp_path, score)
    search(tmp_path, 5, again, plan=plan)
    assert again.configs == []


def test_a_low_error_is_best(tmp_path):
    found, _ = search(tmp_path, 6, minimise=True)
    for name, best in found.best.items():
        assert best.score == min(trial.score for trial in found.trials if trial.variant == name)
    high, _ = search(tmp_path / "high", 6)
    for name, best in high.best.items():
        assert best.score == max(trial.score for trial in high.trials if trial.variant == name)


def test_a_folder_goes_on_only_with_the_same_search_and_in_one_process(tmp_path):
    search(tmp_path, 1)
    with pytest.raises(ConfigError, match="has another search: clients, variants differ"):
        open_search(SearchPlan(4, 1000, PLAN.common, PLAN.variants[:1]), {}, tmp_path)
    with held(tmp_path), pytest.raises(RunInUse):
        search(tmp_path, 2)
    (tmp_path / "search.json").write_text("[")
    with pytest.raises(ConfigError, match=r"search.json is damaged"):
        open_search(PLAN, {}, tmp_path)


def test_a_folder_goes_on_only_with_what_its_search_takes_from_the_app(tmp_path):
    usual = {**defaults(), "num-server-rounds": 3, "fedprox.mu": 0.5}
    plan = replace(PLAN, common={"model": "cnn"})
    open_search(plan, usual, tmp_path)
    # The plan sets the model itself, and scores are the same with other trackers and more checkpoints.
    ours = {"model": "mlp", "strategy": "local", "trackers": "mlflow", "mlflow.experiment": "x", "checkpoints": 9}
    own = {**ours, "seed": 7, "runs": "elsewhere", "resume": "x"}
    open_search(plan, {**usual, **own}, tmp_path)
    message = (
        r"num-server-rounds=5 \(the search has 3\), fedprox\.mu=0\.1 \(the search has 0\.5\)\. A search goes on only "
        "as it began: give the app these values again, or start a new one with --folder"
    )
    with pytest.raises(ConfigError, match=message):
        open_search(plan, {**usual, "num-server-rounds": 5, "fedprox.mu": 0.1}, tmp_path)


def test_the_command_does_not_go_on_when_the_app_has_other_rounds(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    engine = SimpleNamespace(here=True, start_ahead=lambda runs: None, description="", at_once=1, stop=None)
    monkeypatch.setattr(main, "_engine", lambda *_: nullcontext(engine))
    monkeypatch.setattr(main, "run_trials", stopped)
    file = tmp_path / "search.toml"
    ranges = "[variant.search]\nlocal-epochs = { from = 1, to = 2 }"
    file.write_text(f'[[variant]]\nname = "A"\nstrategy = "fedavg"\n{ranges}')
    for rounds, status in ((3, 130), (5, 1), (3, 130)):
        monkeypatch.setattr(main, "usual_run_config", lambda app, rounds=rounds: {"num-server-rounds": rounds})
        ended = CliRunner().invoke(app, [str(file), "--folder", str(tmp_path / "found"), "--app", str(ROOT)])
        assert ended.exit_code == status
        assert ("num-server-rounds=5 (the search has 3)" in ended.stderr) == (rounds == 5)


def test_a_search_of_another_version_goes_on_if_its_new_keys_have_their_defaults(tmp_path):
    usual, old = defaults(), defaults()
    del old["max-weight-share"]
    open_search(PLAN, old, tmp_path)
    open_search(PLAN, usual, tmp_path)
    open_search(PLAN, {**usual, "of-another-version": 3}, tmp_path / "later")
    open_search(PLAN, usual, tmp_path / "later")
    with pytest.raises(ConfigError, match=r"max-weight-share=0\.25 \(the search has 0\.5\)"):
        open_search(PLAN, {**usual, "max-weight-share": 0.25}, tmp_path)
    (tmp_path / "search.json").write_text(PLAN.to_json(usual))
    open_search(PLAN, old, tmp_path)
    kept = json.loads((tmp_path / "search.json").read_text())
    del kept["usual"]
    (tmp_path / "search.json").write_text(json.dumps(kept))
    open_search(PLAN, {**usual, "max-weight-share": 0.25}, tmp_path)
    (tmp_path / "search.json").write_text(json.dumps({**kept, "usual": 7}))
    with pytest.raises(ConfigError, match=r"search.json is damaged"):
        open_search(PLAN, usual, tmp_path)


# --- values ---------------------------------------------------------------------------------------------------------


@st.composite
def ranges(draw):
    kind = draw(st.sampled_from(["float", "log", "step", "whole", "whole log", "whole step", "choices"]))
    if kind == "choices":
        value = st.one_of(st.integers(-5, 5), st.floats(-1, 1), st.text(max_size=3))
        return Choices(tuple(draw(st.lists(value, min_size=2, max_size=4, unique=True))))
    low, step, count = draw(st.integers(1, 50)), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    high = low + step * count
    if kind.startswith("whole"):
        return Range(low, high, log=kind == "whole log", step=step if kind == "whole step" else None)
    return Range(low / 100, high / 100, log=kind == "log", step=step / 100 if kind == "step" else None)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(ranges(), st.integers(0, 2**32 - 1))
def test_values_are_of_their_range(tmp_path_factory, space, seed):
    folder = tmp_path_factory.mktemp("search")
    study = VariantStudy(folder / JOURNAL, SearchedVariant("A", {}, {"key": space}), seed, minimise=False)
    for number in range(7):
        trial = study.next_trial()
        value = trial.values["key"]
        if isinstance(space, Choices):
            assert any(value == choice and type(value) is type(choice) for choice in space.choices)
        else:
            assert space.low <= value <= space.high and type(value) is type(space.low)
            if space.step is not None:  # in hundredths, which all its numbers are
                low, step, drawn = (round(100 * each) for each in (space.low, space.step, value))
                assert (drawn - low) % step == 0 and value == (drawn / 100 if not space.whole else value)
        trial.score = float(number)
        study.end(trial)


# --- files and terminal ---------------------------------------------------------------------------------------------


def test_found_toml_has_the_best_values_in_place_of_the_ranges(tmp_path):
    found, _ = search(tmp_path, 5)
    read = tomllib.loads((tmp_path / "found.toml").read_text())
    assert read.keys() == {"clients", "common", "variant"}
    assert (read["clients"], read["common"]) == (PLAN.clients, PLAN.common)
    assert [variant.pop("name") for variant in read["variant"]] == ["FedAvg", "as-it-is", "FedProx"]
    for read_variant, variant in zip(read["variant"], PLAN.variants, strict=True):
        best = found.best.get(variant.name)
        assert read_variant == {**variant.config, **(best.values if best else {})}
        read_run_config({**PLAN.common, **flat(read_variant)})
    for row in rows(tmp_path):
        trial = next(
            each for each in found.trials if (each.variant, each.number + 1) == (row["variant"], int(row["trial"]))
        )
        assert (float(row["learning-rate"]), int(row["batch-size"])) == (
            trial.values["learning-rate"], trial.values["batch-size"],
        )  # fmt: skip
        assert float(row["score"]) == trial.score and row["run"] == trial.run
        assert (row["fedprox.mu"] == "") == (row["variant"] == "FedAvg")


def test_found_toml_is_a_file_of_variants_for_comparisons(tmp_path):
    variants = pytest.importorskip("tepal.tools.compare.variants", reason="there is no `tepal compare --variants`")
    found, _ = search(tmp_path, 2)
    read = variants.read_variants(tmp_path / "found.toml")
    assert (read.clients, read.common) == (PLAN.clients, PLAN.common)
    compared = {variant.name: variant.run_config for section in read.sections for variant in section.variants}
    assert compared == {
        variant.name: {**variant.config, **(found.best[variant.name].values if variant.search else {})}
        for variant in PLAN.variants
    }


def test_files_are_written_after_each_trial(tmp_path):
    folder = tmp_path / "stopped"
    folder.mkdir()
    with suppress(KeyboardInterrupt):
        search(folder, 8, Fake(folder, stop_at=2))
    assert [row["variant"] for row in rows(folder)] == ["FedAvg"]
    names = [variant["name"] for variant in tomllib.loads((folder / "found.toml").read_text())["variant"]]
    assert names == ["FedAvg", "as-it-is"], "of FedProx no trial has ended"


def test_the_terminal_has_a_line_for_each_trial_and_a_table_of_the_best(tmp_path):
    def score(config):
        if config["strategy"] == "fedprox":
            raise RunError("too few replies")
        return 0.5

    found, ended = search(tmp_path, 2, Fake(tmp_path, score))
    good, bad = (trial_line(trial, 2, False).plain for trial in ended[:2])
    assert good.startswith("FedAvg 1/2  accuracy 0.5000  learning-rate=") and good.endswith("  run-0")
    assert bad.startswith("FedProx 1/2  failed: too few replies  learning-rate=")
    assert "\n" not in good and trial_line(ended[0], 2, True).plain.startswith("FedAvg 1/2  rmse 0.5")
    console = Console(width=200, record=True)
    console.print(best_table(found, tmp_path))
    text = console.export_text()
    assert "seed 1000" in text and "1 of 2" in text and "– of 2" in text
    assert "Failed trials, which counted as the worst: FedProx 1, FedProx 2" in text
    assert "not in found.toml: FedProx" in text


def test_a_terminal_shows_the_current_round_of_a_trial_and_a_file_nothing():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    with TrialProgress(3, "FedAvg trial 1", terminal) as progress:
        progress.stage("Starting ...")
        progress.update(RoundRecord(round=2))
    assert "FedAvg trial 1: round 2/3" in terminal.file.getvalue()
    piped = Console(file=io.StringIO())
    with TrialProgress(3, "FedAvg trial 1", piped) as progress:
        progress.update(RoundRecord(round=2))
    assert piped.file.getvalue() == ""


# --- scores ---------------------------------------------------------------------------------------------------------


def left(folder, lines):
    run = RunDirectory.create(folder, "fedavg", {})
    for line in lines:
        run.append(RoundRecord.from_line(line))
    return run.path


def test_the_score_is_that_of_the_clients_tests_after_the_last_round(tmp_path):
    lines = [
        {"round": 1, "accuracy": 0.3, "accuracy_of": "server", "clients_accuracy": 0.4},
        {"round": 2, "accuracy": 0.5, "accuracy_of": "server", "clients_accuracy": 0.6},
    ]
    run = left(tmp_path, lines)
    assert score_of(run, "clients_accuracy", 2) == 0.6
    assert score_of(left(tmp_path, [{"round": 1, "clients_rmse": 1.5}]), "clients_rmse", 1) == 1.5
    for measure, rounds in (("clients_accuracy", 3), ("clients_rmse", 2)):
        with pytest.raises(RunError, match=rf"no {measure} after round {rounds}"):
            score_of(run, measure, rounds)
    RunDirectory(run, {}).write_summary(ended_early=None)
    with pytest.raises(RunError, match="no clients_accuracy after round 9"):
        score_of(run, "clients_accuracy", 9)
    RunDirectory(run, {}).write_summary(ended_early="3 evaluations without improvement")
    assert score_of(run, "clients_accuracy", 9) == 0.6


# --- with training --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_trains_and_its_best_values_are_those_of_the_best_run(tmp_path):
    file = tmp_path / "search.toml"
    file.write_text(
        """
        clients = 2
        [common]
        model = "cnn"
        num-server-rounds = 1
        local-steps = 5
        local-epochs = 0
        server-share = 0.5
        [[variant]]
        name = "FedAvg"
        strategy = "fedavg"
        [variant.search]
        learning-rate = { from = 1e-4, to = 1e-2, log = true }
        """
    )
    command = [str(file), "--folder", str(tmp_path / "found"), "--trials", "2", "--app", str(ROOT)]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("FedAvg ") for line in lines) == 2 and "Best mean accuracy" in ended.stdout
    scores = {}
    for row in rows(tmp_path / "found"):
        run = tmp_path / "found" / row["run"]
        config = read_config(run)
        assert (config["learning-rate"], config["seed"]) == (float(row["learning-rate"]), 1000)
        scores[config["learning-rate"]] = last = read_metrics(run)[-1].clients_accuracy
        assert float(row["score"]) == last
    assert len(scores) == 2
    found = tomllib.loads((tmp_path / "found" / "found.toml").read_text())
    assert found["variant"][0]["learning-rate"] == max(scores, key=scores.get)
    # Nothing is left to run. (Of two runs that begin within a second, the name of the second ends with -2.)
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and len(list((tmp_path / "found").glob("*-fedavg*"))) == 2


# --- at the same time -----------------------------------------------------------------------------------------------


class Parallel(Fake):
    """An objective that is called in threads: in `together` of them it scores at the same time."""

    def __init__(self, folder, together, score=hill):
        super().__init__(folder, score)
        self.barrier, self.lock = threading.Barrier(together), threading.Lock()

    def __call__(self, name, config, on_run):
        self.barrier.wait(20)
        with self.lock:
            return super().__call__(name, config, on_run)


def search_at_once(folder, trials, objective, stop=lambda: None):
    folder.mkdir(parents=True, exist_ok=True)
    open_search(PLAN, {}, folder)
    ended = []
    found = run_trials(
        PLAN, folder, trials, objective, minimise=False, on_trial=ended.append, at_once=2, stop=stop
    )  # fmt: skip
    return found, ended


def without_times(folder):
    """The lines of trials.csv, of each its run's own values alone."""
    return [{key: value for key, value in row.items() if key not in ("seconds", "run")} for row in rows(folder)]


def test_trials_at_the_same_time_are_those_of_trials_in_turn(tmp_path):
    in_turn, _ = search(tmp_path / "in turn", 7)
    folder = tmp_path / "at once"
    objective = Parallel(folder, 2)
    found, ended = search_at_once(folder, 7, objective)
    assert told(found.trials) == told(ended) == told(in_turn.trials)
    assert without_times(folder) == without_times(tmp_path / "in turn")
    assert (folder / "found.toml").read_text() == (tmp_path / "in turn" / "found.toml").read_text()
    again = Parallel(folder, 2)
    search_at_once(folder, 7, again)
    assert len(objective.configs) == 14 and again.configs == []


def test_a_search_that_is_stopped_at_the_same_time_goes_on_with_the_same_trials(tmp_path):
    whole, _ = search(tmp_path / "whole", 5)
    folder, stopped = tmp_path / "stopped", threading.Event()

    class Interrupted(Parallel):
        def __call__(self, name, config, on_run):
            score = super().__call__(name, config, on_run)
            if len(self.configs) > 4 and config["strategy"] == "fedavg":
                raise KeyboardInterrupt  # in the place of one in the main thread
            if len(self.configs) > 4:
                assert stopped.wait(20)
                raise RunStopped
            return score

    with pytest.raises(KeyboardInterrupt):
        search_at_once(folder, 5, Interrupted(folder, 2), stopped.set)
    assert len(rows(folder)) == 4
    again = Parallel(folder, 2)
    found, _ = search_at_once(folder, 5, again)
    assert told(found.trials) == told(whole.trials) and len(again.configs) == 6


def test_a_trial_that_fails_beside_another_is_one_that_failed(tmp_path):
    def score(config):
        if config["strategy"] == "fedprox":
            raise RunError("too few replies")
        return hill(config)

    found, _ = search_at_once(tmp_path, 2, Parallel(tmp_path, 2, score))
    assert [(trial.variant, trial.reason) for trial in found.trials] == [
        ("FedAvg", ""), ("FedAvg", ""), ("FedProx", "too few replies"), ("FedProx", "too few replies"),
    ]  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_trial_is_not_judged_by_machines_that_failed(tmp_path, at_once):
    """Its values are drawn, and it is run again by the next search, with the result that it has."""
    whole, _ = search(tmp_path / "whole", 3)
    folder, begin = tmp_path / "lost", search if at_once == 1 else search_at_once

    def score(config):
        if len(lost.configs) > 3:
            raise ClusterFailed("its machine was lost 3 times in a row")
        return hill(config)

    folder.mkdir()
    lost = Parallel(folder, at_once, score)
    with pytest.raises(ClusterFailed, match="was lost"):
        begin(folder, 3, lost)
    found, _ = begin(folder, 3, Parallel(folder, 1))
    assert told(found.trials) == told(whole.trials) and not any(trial.reason for trial in found.trials)
