"""`tepal compare`: what it runs in which order, what it leaves out when it goes on, and runs that fail."""

import csv
import io
import json
import re
import shutil

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tepal.host.superlink import RunError
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import find_run, held, read_config
from tepal.server_app.run import build_model
from tepal.tools.cli.main import main
from tepal.tools.compare.checks import USUAL
from tepal.tools.compare.comparison import read_comparison
from tepal.tools.compare.picture import STRATEGIES
from tepal.tools.terminal import RoundProgress, TimeLeft
from tepal.training.data import DataError
from tests.comparisons import Killed, comparison_in
from tests.lines import read_lines
from tests.packages import ROOT


class Terminal(io.StringIO):
    def isatty(self):
        return True


# --- time -----------------------------------------------------------------------------------------------------------


def test_the_time_left_counts_starts_and_rounds_of_all_runs():
    now = [0.0]
    left = TimeLeft(2, 3, clock=lambda: now[0])

    def after(seconds, round_ended):
        now[0] += seconds
        left.update(RoundRecord(round=round_ended))
        return left.seconds

    left.begin()
    assert after(5, 0) is None and after(5, 1) is None  # nothing is known of a usual round
    assert after(2, 2) == 2 + (10 + 2 + 2)
    assert after(4, 3) == 0 + (10 + 3 + 3)
    left.begin()
    now[0] += 4
    assert left.seconds == (10 - 4) + 3 + 3
    now[0] += 60
    assert left.seconds == 0


def test_the_time_left_of_a_run_that_goes_on_counts_only_what_it_still_does():
    now = [0.0]
    left = TimeLeft(2, 5, clock=lambda: now[0])
    left.begin(done=2)
    for old in (0, 1, 2):
        left.update(RoundRecord(round=old))
    assert left.seconds is None and left.rounds_done == 2
    for number, seconds in ((3, 10), (4, 2)):
        now[0] += seconds
        left.update(RoundRecord(round=number))
    assert left.seconds == 2 + (10 + 4 * 2)
    assert (left.rounds_done, left.rounds) == (4, 10)
    left.begin()
    assert left.seconds == 10 + 4 * 2 and left.rounds_done == 5


def test_the_time_left_of_runs_of_different_lengths_counts_the_rounds_of_each():
    now = [0.0]
    left = TimeLeft(3, 5, of_each=(2, 1, 5), clock=lambda: now[0])
    left.begin()
    for number, seconds in ((1, 10), (2, 4)):
        now[0] += seconds
        left.update(RoundRecord(round=number))
    assert left.seconds == 0 + 10 + (10 + 4 * 4)
    left.begin()
    left.begin()
    assert left.seconds == 10 + 4 * 4 and (left.rounds_done, left.rounds) == (3, 8)


def test_the_bar_is_that_of_all_runs_and_every_run_leaves_a_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    left = TimeLeft(2, 2)
    for number, name in enumerate(("1/2 fedavg", "2/2 fedacs")):
        with RoundProgress(2, name=name, time_left=left, console=Console(file=out, width=100)) as progress:
            for line in (1, 2):
                progress.update(RoundRecord(round=line, accuracy=0.5, bytes_down=10, bytes_up=10, seconds=1.0))
                task = progress._progress.tasks[0]
                assert (task.completed, task.total) == (2 * number + line, 4)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in out.getvalue().splitlines()]
    for name in ("1/2 fedavg", "2/2 fedacs"):
        assert f"{name}: round 2/2  accuracy 0.5000  40 B transferred  2.0 s" in lines


# --- the command ----------------------------------------------------------------------------------------------------


def rows_of_runs(folder):
    with (folder / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def outcomes(folder):
    return [row["outcome"] for row in rows_of_runs(folder)]


def test_the_runs_differ_in_their_strategy_alone(compare):
    done = compare("--strategies", "fedfrozen,fedavg,fedacs", "-c", "seed=5")
    assert done.exit_code == 0, done.output
    configs = [config for config, *_ in compare.started]
    assert [config.pop("strategy") for config in configs] == ["fedfrozen", "fedavg", "fedacs"]
    warmups = [config.pop("fedfrozen.warmup-rounds") for config in configs]
    assert warmups == [1, -1, -1], "three tenths of three rounds; others have no use for it"
    assert configs[0] == configs[1] == configs[2] and configs[0]["seed"] == 5
    assert {of["clients"] for _, of in compare.started} == {3}


def test_every_strategy_runs_with_every_seed_and_those_of_a_seed_differ_in_it_alone(compare):
    done = compare("--strategies", "fedavg,fedacs", "--seeds", "1,2,7", "--cpus", "0.5")
    assert done.exit_code == 0, done.output
    configs = [config for config, *_ in compare.started]
    assert [(config.pop("strategy"), config["seed"]) for config in configs] == [
        (strategy, seed) for seed in (1, 2, 7) for strategy in ("fedavg", "fedacs")
    ]
    assert configs[0] == configs[1] and configs[2] == configs[3] and configs[4] == configs[5]
    assert {**configs[0], "seed": 2} == configs[2]
    assert {of["cpus"] for _, of in compare.started} == {0.5}
    assert len(compare.asked) == 1, "one engine serves all runs"
    assert "4/6 fedacs seed 2: round 3/3" in done.output
    (folder,) = compare.runs.glob("*-compare")
    assert [(row["strategy"], row["seed"]) for row in rows_of_runs(folder)] == [
        (strategy, seed) for seed in "127" for strategy in ("fedavg", "fedacs")
    ]
    assert all(read_config(folder / row["run"])["seed"] == int(row["seed"]) for row in rows_of_runs(folder))


def test_the_usual_strategies_are_compared_in_one_folder(compare):
    done = compare()
    assert done.exit_code == 0, done.output
    (folder,) = compare.runs.glob("*-compare")
    assert re.fullmatch(r"\d{8}-\d{6}-compare", folder.name)
    rows = rows_of_runs(folder)
    assert tuple(row["strategy"] for row in rows) == USUAL
    assert all(row["outcome"] == "finished" and (folder / row["run"]).is_dir() for row in rows)
    assert str(folder / "comparison.html") in done.output.split()
    for number, strategy in enumerate(USUAL, start=1):
        assert f"{number}/5 {strategy}: round 3/3" in done.output


def test_all_are_all_strategies_that_are_known(compare):
    done = compare("--strategies", "all", "-c", "conf/all.toml")
    assert done.exit_code == 0, done.output
    assert tuple(strategy for strategy, _ in compare.cells()) == STRATEGIES


def test_latest_is_the_newest_run_and_the_comparison_can_be_written_anew(compare):
    compare("--strategies", "fedavg,fedacs")
    (folder,) = compare.runs.glob("*-compare")
    assert read_config(find_run(compare.runs))["strategy"] == "fedacs"
    assert find_run(compare.runs).parent == folder.resolve()
    report = CliRunner().invoke(main, ["report", str(compare.runs)])
    assert report.output.strip().endswith("-fedacs/report.html")
    written = ["comparison.csv", "comparison.md", "comparison.svg", "comparison.tex", "runs.csv"]
    before = {name: (folder / name).read_text() for name in written}
    for name in (*written, "comparison.html"):
        (folder / name).unlink()
    again = CliRunner().invoke(main, ["report", str(folder)])
    assert again.output.strip() == str(folder / "comparison.html")
    assert {name: (folder / name).read_text() for name in written} == before
    assert "fedacs" in (folder / "comparison.html").read_text()


def test_a_run_that_fails_ends_alone(compare):
    compare.failing["fedfrozen"] = RunError("The run failed: [all] clients are gone\nand more of it")
    done = compare("--strategies", "fedavg,fedfrozen,fedacs")
    assert done.exit_code == 1
    (folder,) = compare.runs.glob("*-compare")
    assert outcomes(folder) == ["finished", "failed", "finished"]
    assert "fedfrozen: failed after round 1 of 3: The run failed: [all] clients are gone" in done.output
    assert "error: fedfrozen: The run failed" in done.output and "flower.log" in done.output
    assert f"`tepal compare --resume {folder}`" in done.output


def test_sigterm_says_how_to_go_on(compare):
    compare.failing["fedfrozen"] = SystemExit(143)
    done = compare("--strategies", "fedavg,fedfrozen,fedacs")
    (folder,) = compare.runs.glob("*-compare")
    assert done.exit_code == 143 and f"Resume it with `tepal compare --resume {folder}`" in done.output


def test_ctrl_c_ends_all_and_shows_what_is_there(compare):
    compare.failing["fedfrozen"] = KeyboardInterrupt()
    done = compare("--strategies", "fedavg,fedfrozen,fedacs")
    assert done.exit_code == 130
    assert [strategy for strategy, _ in compare.cells()] == ["fedavg", "fedfrozen"]
    (folder,) = compare.runs.glob("*-compare")
    assert outcomes(folder) == ["finished", "stopped", "not run"]
    assert "fedfrozen: stopped after round 1 of 3" in done.output and "fedacs: not run" in done.output
    assert f"`tepal compare --resume {folder}`" in done.output
    assert (folder / "comparison.html").is_file()


def test_nothing_is_left_where_no_run_could_begin(compare):
    compare.failing["fedavg"] = ValueError("cpus_per_client is 99, but this machine has 2 cores")
    done = compare("--strategies", "fedavg,fedacs")
    assert done.exit_code == 1 and done.output.strip().endswith("but this machine has 2 cores")
    assert list(compare.runs.iterdir()) == []


@pytest.mark.parametrize("regression", [False, True])
def test_an_accuracy_above_1_is_no_target_and_an_error_may_be_one(compare, tmp_path, regression):
    np.savez(tmp_path / "x.npz", x=np.ones((200, 2)), y=np.arange(200.0))
    own = ["-c", f'model="linear-attention" dataset="{tmp_path}/x.npz" partitioner="iid"'] if regression else []
    done = compare("--strategies", "fedavg", "--target", "1.5", *own)
    said = done.output
    assert (done.exit_code, "--target is 1.5, expected" in said) == ((0, False) if regression else (1, True))


# --- going on -------------------------------------------------------------------------------------------------------


def kill_in(compare, *cell):
    """Begin six runs and be killed in one of them; returns the folder."""
    compare.failing[cell] = Killed()
    with pytest.raises(Killed):
        CliRunner().invoke(
            main,
            ["compare", ".", "-c", f'num-server-rounds=3 local-epochs=2 runs="{compare.runs}"', "--clients", "4",
             "--strategies", "fedavg,fedfrozen,fedacs", "--seeds", "1,2", "--target", "0.5"],
        )  # fmt: skip
    compare.failing.clear()
    compare.cells()
    (folder,) = compare.runs.glob("*-compare")
    return folder


def test_what_a_comparison_is_to_do_is_known_from_its_folder_when_it_is_killed_in_its_first_run(compare):
    folder = kill_in(compare, "fedavg", 1)
    comparison = read_comparison(folder)
    assert [(run.strategy, run.seed) for run in comparison.runs] == [
        (strategy, seed) for seed in (1, 2) for strategy in ("fedavg", "fedfrozen", "fedacs")
    ]
    assert [run.outcome for run in comparison.runs] == ["stopped", *["not run"] * 5]
    assert (comparison.clients, comparison.target, comparison.run_config["local-epochs"]) == (4, 0.5, 2)


def test_what_finished_is_not_run_again_and_what_was_under_way_goes_on(compare):
    folder = kill_in(compare, "fedacs", 1)
    before = {row["strategy"]: row for row in rows_of_runs(folder) if row["outcome"] == "finished"}
    assert set(before) == {"fedavg", "fedfrozen"}
    finished = {name: (folder / row["run"] / "metrics.jsonl").stat().st_mtime_ns for name, row in before.items()}
    killed = read_comparison(folder).runs[2].directory

    done = compare("--resume", str(folder), config=None)
    assert done.exit_code == 0, done.output
    configs = [config for config, *_ in compare.started]
    assert {of["clients"] for _, of in compare.started} == {4}
    assert all(config["local-epochs"] == 2 and config["num-server-rounds"] == 3 for config in configs)
    assert [config["resume"] for config in configs] == [str(killed), "", "", ""]
    assert compare.cells() == [("fedacs", 1), ("fedavg", 2), ("fedfrozen", 2), ("fedacs", 2)]
    assert "3/6 fedacs seed 1: round 3/3" in done.output and "1/6" not in done.output

    rows = rows_of_runs(folder)
    assert len(rows) == 6 and {row["outcome"] for row in rows} == {"finished"}
    assert rows[2]["run"] == killed.name and [line["round"] for line in read_lines(killed)] == [1, 2, 3]
    after = {name: (folder / row["run"] / "metrics.jsonl").stat().st_mtime_ns for name, row in before.items()}
    assert after == finished
    assert len(list(folder.glob("*-fed*"))) == 6, "a run directory each"

    again = compare("--resume", str(folder), config=None)
    assert again.exit_code == 0 and compare.cells() == [], "nothing is left to do"


def test_a_run_without_a_checkpoint_is_run_anew(compare):
    folder = kill_in(compare, "fedfrozen", 2)
    killed = read_comparison(folder).runs[4].directory
    (killed / "checkpoint" / "round-000001").rmdir()
    caches = [folder / ".clients" / f"{name}-0123abcd" for name in (killed.name, f"{killed.name}-2")]
    for cache in caches:
        (cache / "personal" / "client-1").mkdir(parents=True)
    done = compare("--resume", str(folder), config=None)
    assert done.exit_code == 0, done.output
    assert [config["resume"] for config, *_ in compare.started] == ["", ""]
    assert compare.cells() == [("fedfrozen", 2), ("fedacs", 2)]
    assert not killed.exists() and [cache.exists() for cache in caches] == [False, True]
    assert {path.name for path in folder.glob("*-fed*")} == {row["run"] for row in rows_of_runs(folder)}


def test_no_directory_of_another_run_is_removed_for_one_that_is_run_anew(compare):
    folder = kill_in(compare, "fedfrozen", 2)
    plan = json.loads((folder / "comparison.json").read_text())
    other = folder / plan["cells"][0]["run"]
    plan["cells"][4]["run"] = other.name
    (folder / "comparison.json").write_text(json.dumps(plan))
    (other / "summary.json").unlink()
    (other / "checkpoint" / "round-000001").rmdir()
    assert compare("--resume", str(folder), config=None).exit_code == 0
    assert compare.cells() == [("fedfrozen", 2), ("fedacs", 2)] and other.exists()


def test_a_run_that_failed_is_tried_again(compare):
    compare.failing["fedfrozen"] = RunError("no memory")
    assert compare("--strategies", "fedavg,fedfrozen").exit_code == 1
    compare.failing.clear()
    compare.cells()
    (folder,) = compare.runs.glob("*-compare")
    assert compare("--resume", str(folder), config=None).exit_code == 0
    assert [strategy for strategy, _ in compare.cells()] == ["fedfrozen"] and outcomes(folder) == ["finished"] * 2
    assert [row["reason"] for row in rows_of_runs(folder)] == ["", ""]


def test_the_comparison_that_was_at_work_last_is_found(compare, monkeypatch):
    folder = kill_in(compare, "fedfrozen", 1)
    monkeypatch.setattr("tepal.tools.cli.compare.usual_run_config", lambda _app: {"runs": str(compare.runs)})
    done = compare("--resume", "latest", "--target", "0.6", config=None)
    assert done.exit_code == 0, done.output
    assert compare.cells()[0] == ("fedfrozen", 1) and str(folder / "comparison.html") in done.output.split()
    assert "an accuracy of 0.6000" in done.output, "what is said of the runs may change, not what they are"


def test_two_cannot_be_at_work_on_one_comparison(compare):
    folder = kill_in(compare, "fedfrozen", 1)
    with held(folder):
        done = compare("--resume", str(folder), config=None)
    assert done.exit_code == 1 and "has not ended; stop that one first" in done.output
    assert compare.cells() == []


@pytest.fixture
def fork(compare, tmp_path):
    """A checkout of Tepal in another folder, in which a comparison was killed; with that comparison's folder."""
    app = tmp_path / "fork"
    app.mkdir()
    shutil.copy(ROOT / "pyproject.toml", app)
    compare.failing["fedacs"] = Killed()
    with pytest.raises(Killed):
        CliRunner().invoke(
            main,
            ["compare", str(app), "-c", f'num-server-rounds=3 runs="{compare.runs}"', "--clients", "3",
             "--strategies", "fedavg,fedacs"],
        )  # fmt: skip
    compare.failing.clear()
    (folder,) = compare.runs.glob("*-compare")
    return app, folder


@pytest.mark.parametrize("named", [False, True])
def test_a_comparison_goes_on_with_the_app_that_it_began_with(compare, fork, monkeypatch, tmp_path, named):
    app, folder = fork
    monkeypatch.chdir(tmp_path if named else ROOT)
    done = CliRunner().invoke(main, ["compare", *(["fork"] if named else []), "--resume", str(folder)])
    assert done.exit_code == 0, done.output
    assert [of["app"].resolve() for of in compare.asked] == [app, app]


def test_a_comparison_does_not_go_on_with_another_app(compare, fork):
    app, folder = fork
    refused = compare("--resume", str(folder), config=None)  # of the app in this folder
    said = f"{folder}: its runs are of the app in {app}, not of the one in {ROOT}: leave out the folder of the app"
    assert refused.exit_code == 1 and said in refused.stderr
    shutil.rmtree(app)
    refused = CliRunner().invoke(main, ["compare", "--resume", str(folder)])
    said = f"its runs are of the app in {app}, which is no longer there: put it back or, if it was moved, change app in"
    assert refused.exit_code == 1 and said in refused.stderr
    assert len(compare.asked) == 1


@pytest.mark.parametrize("app", ["fork", 3, None])
def test_an_app_that_is_no_absolute_path_is_refused(tmp_path, app):
    comparison = comparison_in(tmp_path, ["fedavg"], app=str(tmp_path))
    comparison.save()
    plan = json.loads((tmp_path / "comparison.json").read_text())
    (tmp_path / "comparison.json").write_text(json.dumps({**plan, "app": app}))
    with pytest.raises(ValueError, match="the folder of the app is not an absolute path"):
        read_comparison(tmp_path)


def test_a_comparison_of_tepals_own_app_names_none_as_in_earlier_versions(compare, fork):
    app, folder = fork
    plan = json.loads((folder / "comparison.json").read_text())
    assert plan.pop("app") == str(app)
    (folder / "comparison.json").write_text(json.dumps(plan))
    assert compare("--resume", str(folder), config=None).exit_code == 0 and compare.asked[-1]["app"].resolve() == ROOT
    assert "app" not in json.loads((folder / "comparison.json").read_text())
    assert compare("--strategies", "fedavg").exit_code == 0
    newest = max(compare.runs.glob("*-compare*"))
    assert "app" not in json.loads((newest / "comparison.json").read_text())


@pytest.mark.parametrize(
    "option", [["--strategies", "fedavg"], ["--seeds", "1"], ["--clients", "5"], ["-c", "local-epochs=3"]], ids=str
)
def test_what_was_begun_cannot_become_something_else(compare, option):
    folder = kill_in(compare, "fedfrozen", 1)
    done = compare("--resume", str(folder), *option, config=None)
    message = " ".join(done.output.split())
    assert done.exit_code == 1 and "is resumed with its own settings" in message
    assert {"-c": "--run-config"}.get(option[0], option[0]) in message.partition("Only --target")[0]
    assert compare.cells() == []


def test_a_folder_in_which_no_comparison_was_begun_is_refused(compare, tmp_path):
    done = compare("--resume", str(tmp_path), config=None)
    assert done.exit_code == 1 and f"no comparison at {tmp_path}" in done.output


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", 'strategy="fedavg"'], ["strategy='fedavg'", "sets the strategy itself", "--strategies"]),
        (["-c", str(ROOT / "conf" / "fedavg.toml")], ["strategy='fedavg'", "--strategies"]),
        (["-c", 'resume="runs/latest"'], ["resume='runs/latest'", "tepal compare --resume"]),
        (["--strategies", "fedavg,fedfrosen"], ["'fedfrosen'", "did you mean 'fedfrozen'?", "allowed are fedavg"]),
        (["--strategies", "fedavg,fedavg"], ["'fedavg' is named twice"]),
        (["--strategies", ","], ["names none"]),
        (["--seeds", "1,two"], ["--seeds '1,two'", "whole numbers", "1,2,3"]),
        (["--seeds", "1,2,1"], ["--seeds: 1 is named twice"]),
        (["--seeds", "1,-2"], ["seed=-2", "greater than or equal to 0"]),
        (["--seeds", ","], ["--seeds names none"]),
        (["--seeds", "1,2", "-c", "seed=5"], ["seed=5", "--seeds 1,2", "leave out one"]),
        (["-c", "seed=-1"], ["seed=-1"]),
        (["-c", "selective.budget=0 fedacs.alpha=2"], ["selective.budget=0", "fedacs.alpha=2"]),
        (["-c", 'model="cnn"'], ["fedfrozen: strategy='fedfrozen' with model='cnn'"]),
        (["-c", "min-clients=5"], ["min-clients=5", "--clients is 3"]),
        (["-c", "seed"], ["'seed' is not of the form"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value[0].startswith("-") else "",
)
def test_what_cannot_be_compared_is_refused_before_the_first_run(compare, arguments, said):
    done = compare(*arguments)
    assert done.exit_code == 1, done.output
    message = " ".join(done.output.split())
    assert message.startswith("error: ") and "Traceback" not in message
    for text in said:
        assert text in message
    assert compare.started == [] and not compare.runs.exists()


def test_the_partition_is_checked_with_each_seed_and_all_else_once(compare, monkeypatch):
    asked, built, impossible = [], [], {2}  # seeds

    def check_partition(config, clients, kind):
        asked.append(config.seed)
        if config.seed in impossible:
            raise DataError("no partition was found")

    monkeypatch.setattr("tepal.training.data.check_partition", check_partition)
    monkeypatch.setattr("tepal.server_app.run.build_model", lambda config: built.append(config) or build_model(config))
    done = compare("--strategies", "fedavg,fedprox", "--seeds", "1,2,3")
    assert done.exit_code == 1 and done.output.strip() == "error: with seed 2: no partition was found"
    assert asked == [1, 2, 3, 1, 2, 3] and [config.rounds.seed for config in built] == [1, 1]
    for seeds, said in (({1, 3}, "with seeds 1, 3: "), ({1, 2, 3}, "")):
        impossible = seeds
        done = compare("--strategies", "fedavg,fedprox", "--seeds", "1,2,3")
        assert done.exit_code == 1 and done.output.strip() == f"error: {said}no partition was found"
    assert compare.started == [] and not compare.runs.exists()


def test_with_other_seeds_a_strategy_is_not_checked_again_that_is_wrong_with_the_first(compare):
    done = compare("--strategies", "fedavg,fedfrozen", "--seeds", "1,2", "-c", 'model="cnn"')
    assert done.exit_code == 1 and done.output.count("strategy='fedfrozen' with model='cnn'") == 1


def test_a_seed_without_a_partition_does_not_keep_the_others_of_a_begun_comparison_from_going_on(compare, monkeypatch):
    folder = kill_in(compare, "fedavg", 1)

    def check_partition(config, clients, kind):
        raise DataError("no partition was found")

    monkeypatch.setattr("tepal.training.data.check_partition", check_partition)
    done = compare("--resume", str(folder), config=None)
    assert done.exit_code == 0 and outcomes(folder) == ["finished"] * 6, done.output


def test_what_is_wrong_for_all_strategies_is_said_once(compare):
    assert compare("-c", "seed=-1").output.count("seed=-1") == 1


def test_a_setting_that_is_probably_not_intended_is_said_once_and_not_with_each_seed(compare, caplog):
    assert compare("--strategies", "fedavg,selective", "--seeds", "1,2,3").exit_code == 0
    assert len(compare.started) == 6 and caplog.text.count("this method is for fine-tuning") == 1


@pytest.mark.parametrize(("before", "engine"), [(True, "process"), (False, "auto")])
def test_a_comparison_that_was_begun_before_there_were_engines_is_read(compare, before, engine):
    folder = kill_in(compare, "fedacs", 1)
    plan = json.loads((folder / "comparison.json").read_text())
    assert plan.pop("engine") == "auto"
    (folder / "comparison.json").write_text(json.dumps({**plan, "in_process": before}))
    assert read_comparison(folder).engine == engine
