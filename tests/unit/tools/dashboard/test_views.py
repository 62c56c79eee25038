"""`tepal runs` and `tepal show`: what they say of runs that ended, go on, failed, were killed or cannot be read."""

import json
import os
import time
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory, RunInUse, current_summary, held, is_held
from tepal.report.run_files import RunFiles
from tepal.server_app.config import defaults
from tepal.tools.api.run import load
from tepal.tools.cli.main import main
from tepal.tools.compare.measured import measured
from tepal.tools.compare.plan import ComparedRun
from tepal.tools.dashboard import views
from tests.comparisons import comparison_in, finish, leave_run, variants_in


def told(*arguments):
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


def named(run, name):
    return run.rename(run.with_name(name))


def test_runs_are_listed_the_newest_first_with_what_they_reached(runs):
    old = named(leave_run(runs, "fedavg"), "20260101-000000-fedavg")
    new = named(leave_run(runs, "fedfrozen"), "20260102-000000-fedfrozen")
    first, second = told("runs", runs)
    assert [first["name"], second["name"]] == [new.name, old.name]
    assert (first["rounds"], first["rounds_asked"], first["state"]) == (3, 3, "finished")
    # 8 MB down and 6 MB up in each of three rounds; the accuracy of the last.
    assert (first["bytes"], first["score"], first["measure"]) == (3 * 14_000_000, 0.71, "accuracy")
    assert first["started"] == "2026-01-02T00:00:00Z"
    table = CliRunner().invoke(main, ["runs", str(runs)]).stdout.splitlines()
    said = "20260102-000000-fedfrozen fedfrozen tiny-vit digits 3/3 finished 0.7100 42.0 MB 2026-01-02 00:00"
    assert " ".join(table[1].split()) == said


def test_a_run_is_running_while_its_directory_is_held_and_interrupted_when_it_is_not(runs):
    run = leave_run(runs, "fedavg", rounds=1, summary=False)
    with held(run):
        [facts] = told("runs", runs)
        assert (facts["state"], facts["rounds"]) == ("running", 1)
    [facts] = told("runs", runs)
    assert (facts["state"], facts["bytes"]) == ("interrupted", 20_000_000)


def test_a_run_that_its_clients_failed_says_why(runs):
    run = leave_run(runs, "fedavg", rounds=2, summary=False)
    RunDirectory(run, {}).write_summary(stopped_by="2 good replies of 3")
    done = CliRunner().invoke(main, ["runs", str(runs)]).stdout
    assert " failed " in done and f"{run.name}: 2 good replies of 3" in done
    assert "failed: 2 good replies of 3" in CliRunner().invoke(main, ["show", str(run)]).stdout


def test_a_run_that_was_prolonged_and_killed_is_not_finished(runs):
    run = leave_run(runs, "fedavg", rounds=2)
    os.utime(run / "summary.json", (1, 1))
    [facts] = told("runs", runs)
    assert (facts["state"], facts["rounds"]) == ("finished", 2), "a copy may have its files in any order of time"
    RunDirectory(run, {}).append(RoundRecord(round=3, accuracy=0.8, bytes_down=1, bytes_up=1))
    [facts] = told("runs", runs)
    assert (facts["state"], facts["rounds"], facts["score"]) == ("interrupted", 3, 0.8)


def test_of_a_run_that_was_prolonged_every_reader_has_the_rounds_so_far(runs):
    run = leave_run(runs, "fedavg", rounds=2)
    os.utime(run / "summary.json", (1, 1))
    RunDirectory(run, {}).append(RoundRecord(round=3, accuracy=0.8, bytes_down=1, bytes_up=1))
    compared = measured(ComparedRun("fedavg", 1, run), {})
    for summary in (views.RunView(run).summary, RunFiles(run).summary, load(run).summary, compared.summary):
        assert (summary["rounds"], summary["accuracy"]) == (3, 0.8)
    assert RunFiles(run).written_summary is None


def test_a_summary_does_not_count_while_its_run_goes_on(runs):
    run = leave_run(runs, "fedavg", rounds=2)
    assert current_summary(run)["rounds"] == 2
    with held(run):
        assert current_summary(run) is None and views.RunView(run).written_summary is None
        assert RunFiles(run).written_summary["rounds"] == 2, "a run that has ended writes its report itself"


def test_of_runs_that_ended_no_rounds_are_read(runs, monkeypatch):
    for number in range(3):
        named(leave_run(runs, "fedavg"), f"20260101-00000{number}-fedavg")
    read = []
    for reader in ("tepal.report.run_files", "tepal.records.run_directory.reading"):
        monkeypatch.setattr(f"{reader}.read_metrics", read.append)
    assert len(told("runs", runs)) == 3 and read == []


def test_200_runs_are_listed_quickly(runs):
    for number in range(200):
        named(leave_run(runs, "fedavg"), f"20260101-{number:06d}-fedavg")
    begun = time.process_time()
    assert len([views.facts_of(view) for view in views.views(runs)]) == 200
    assert time.process_time() - begun < 1


def test_a_damaged_run_does_not_hide_the_others(runs):
    leave_run(runs, "fedavg")
    broken = leave_run(runs, "fedacs")
    (broken / "summary.json").write_text("{")
    states = {facts["name"]: facts["state"] for facts in told("runs", runs)}
    assert states[broken.name] == "unreadable" and sorted(states.values()) == ["finished", "unreadable"]
    done = CliRunner().invoke(main, ["runs", str(runs)])
    assert done.exit_code == 0 and f"{broken.name}: " in done.stdout


def test_a_comparison_is_one_line_and_its_folder_lists_its_runs(tmp_path):
    comparison = finish(comparison_in(tmp_path / "runs" / "20260101-000000-compare", ("fedavg", "fedacs")))
    [facts] = told("runs", tmp_path / "runs")
    assert (facts["kind"], facts["strategy"], facts["state"]) == ("comparison", "fedavg, fedacs", "finished")
    assert (facts["runs"], facts["runs_asked"]) == (len(comparison.runs),) * 2
    assert {each["strategy"] for each in told("runs", comparison.folder)} == {"fedavg", "fedacs"}
    shown = told("show", comparison.folder.name, "--runs", tmp_path / "runs")
    assert shown["strategies"]["fedavg"]["bytes_total"]["mean"] == 60_000_000
    assert "fedacs" in CliRunner().invoke(main, ["show", str(comparison.folder)]).stdout
    inside = comparison.runs[0].directory.name
    assert told("show", inside, "--runs", tmp_path / "runs")["name"] == inside


def test_a_comparison_of_variants_is_shown_with_its_sections_and_answers(tmp_path):
    sections = [("Own", "own-tests", {"one": "fedavg", "each": "fedacs"}, {"about": "Why."})]
    comparison = finish(variants_in(tmp_path / "runs" / "20260101-000000-compare", sections))
    assert told("runs", tmp_path / "runs")[0]["strategy"] == "fedavg, fedacs"
    shown = told("show", comparison.folder)
    assert shown["variants"]["each"]["clients_accuracy"]["mean"] == pytest.approx(0.9) and "strategies" not in shown
    [section] = shown["sections"]
    assert (section["title"], section["question"], section["variants"]) == ("Own", "own-tests", ["one", "each"])
    assert section["answer"].startswith("The highest accuracy on the clients' own tests is that of each")
    assert section["answer"] in CliRunner().invoke(main, ["show", str(comparison.folder)]).stdout


def test_a_run_is_found_by_path_by_name_and_as_the_latest(runs, tmp_path):
    old = named(leave_run(runs, "fedavg"), "20260101-000000-fedavg")
    new = leave_run(runs, "fedacs")
    assert told("show", old.name, "--runs", runs)["name"] == old.name
    assert told("show", old)["name"] == old.name
    assert told("show", "latest", "--runs", runs)["name"] == new.name
    failed = CliRunner().invoke(main, ["show", "fedavg", "--runs", str(runs)])
    assert failed.exit_code == 1 and f"did you mean {old.name}?" in failed.stderr
    assert CliRunner().invoke(main, ["runs", str(tmp_path / "nothing")]).exit_code == 1


def test_a_run_shows_the_settings_that_are_its_own(runs):
    own = {**defaults(), "strategy": "fedavg", "seed": 7, "learning-rate": 0.5, "runs": "elsewhere", "later": 1}
    run = leave_run(runs, "fedavg", config=own)
    assert told("show", run)["config"] == {"strategy": "fedavg", "seed": 7, "learning-rate": 0.5, "later": 1}


def test_a_run_shows_every_client_with_its_troubles(runs):
    directory = RunDirectory.create(runs, "fedavg", {"strategy": "fedavg"})
    directory.append(RoundRecord(round=1, refused=[{"client": "site-10", "reason": "NaN"}]))
    refused, lost = [{"client": "site-10", "reason": "[shape]"}], [{"client": "site-2", "reason": "gone"}]
    directory.append(RoundRecord(round=2, refused=refused, lost=lost))
    clients = told("show", directory.path)["clients"]
    assert clients == [
        {"client": "site-2", "counts": {"lost": 1}, "last_round": 2, "last_reason": "gone"},
        {"client": "site-10", "counts": {"refused": 2}, "last_round": 2, "last_reason": "[shape]"},
    ]
    assert "round 2: [shape]" in CliRunner().invoke(main, ["show", str(directory.path)]).stdout


def test_a_long_run_shows_some_rounds_and_says_so(runs):
    directory = RunDirectory.create(runs, "fedavg", {"strategy": "fedavg"})
    for number in range(1, 101):
        directory.append(RoundRecord(round=number, phase="train", accuracy=number / 100))
    page = CliRunner().invoke(main, ["show", str(directory.path)]).stdout
    rounds = [int(line.split()[0]) for line in page.splitlines() if " train " in line]
    assert len(rounds) == 20 and rounds[0] == 1 and rounds[-1] == 100
    assert {later - before for before, later in pairwise(rounds)} <= {5, 6}
    assert "20 of 100 rounds" in page
    page = CliRunner().invoke(main, ["show", str(directory.path), "--all-rounds"]).stdout
    assert sum(" train " in line for line in page.splitlines()) == 100
    assert len(told("show", directory.path)["metrics"]) == 100


def test_the_uncertainty_of_a_run_is_a_column_of_its_rounds_where_it_was_measured(runs):
    directory = RunDirectory.create(runs, "fedavg", {"strategy": "fedavg"})
    directory.append(RoundRecord(round=1, calibration_error=0.03125, flagged_noise=0.875, calibration_examples=[1, 3]))
    page = CliRunner().invoke(main, ["show", str(directory.path)]).stdout
    assert "calibration error" in page and "0.0312" in page and "noise flagged" in page and "0.8750" in page
    assert "letters flagged" not in page
    [line] = told("show", directory.path)["metrics"]
    assert (line["calibration_error"], line["calibration_examples"]) == (0.03125, [1, 3])


def test_files_count_with_all_that_is_in_a_folder(runs):
    run = leave_run(runs, "fedavg")
    (run / "checkpoint" / "round-1").mkdir(parents=True)
    (run / "checkpoint" / "round-1" / "a").write_bytes(b"x" * 300)
    (run / "checkpoint" / "b").write_bytes(b"x" * 33)
    files = told("show", run)["files"]
    assert files["checkpoint/"] == 333 and files["config.toml"] == (run / "config.toml").stat().st_size


def test_a_pipe_gets_no_colours(runs, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = leave_run(runs, "fedavg")
    for arguments in (["runs", str(runs)], ["show", str(run)]):
        assert "\x1b" not in CliRunner().invoke(main, arguments).stdout


def test_who_looks_whether_a_run_goes_on_does_not_keep_it_from_starting(runs):
    run = leave_run(runs, "fedavg")
    assert not is_held(run)
    with held(run):
        assert is_held(run)
        with pytest.raises(RunInUse), held(run):
            pass
    assert not is_held(run)
