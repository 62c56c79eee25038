"""What a comparison's files say: its figures by hand, its tables, page and picture as a reader gets them."""

import csv
import io
import json
import re
import runpy
import shlex
import statistics
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory, held
from tepal.server_app.config import defaults, reading
from tepal.tools.compare.comparison import (
    ComparedRun,
    Result,
    find_comparison,
    measure,
    measured,
    over_seeds,
    read_comparison,
)
from tepal.tools.compare.measured import CHANGEABLE
from tepal.tools.compare.picture import STRATEGIES, draw, looks
from tepal.tools.compare.runs import new_folder, write_comparison
from tepal.tools.compare.tables import comparison_table, resume_command
from tests.comparisons import RUNS, comparison_in, finish, leave_run
from tests.packages import ROOT

SVG = "{http://www.w3.org/2000/svg}"
FILES = ("comparison.csv", "runs.csv", "comparison.md", "comparison.tex", "comparison.svg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four strategies that finished, and one that failed in its first round."""
    folder = new_folder(tmp_path_factory.mktemp("runs"))
    comparison = comparison_in(folder, RUNS)
    failed = next(run for run in comparison.runs if run.strategy == "selective")
    failed.directory = leave_run(folder, "selective", rounds=0, summary=False)
    failed.outcome, failed.reason = "failed", "The run failed: <no> memory"
    return finish(comparison).folder


@pytest.fixture(scope="module")
def comparison(folder):
    return read_comparison(folder)


# What the seeds of the second comparison add to the accuracies of `RUNS`.
ADDED = {1: 0.0, 2: 0.02, 3: 0.07}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Three strategies with three seeds each; FedFrozen's second run failed."""
    folder = new_folder(tmp_path_factory.mktemp("runs"))
    comparison = comparison_in(folder, ["fedavg", "fedfrozen", "fedacs"], ADDED)
    failed = next(run for run in comparison.runs if (run.strategy, run.seed) == ("fedfrozen", 2))
    failed.directory = leave_run(folder, "fedfrozen", seed=2, rounds=1, summary=False)
    failed.outcome, failed.reason = "failed", "no memory"
    return finish(comparison, ADDED.get).folder


def over(values):
    """(mean, deviation) by the textbook."""
    values = list(values)
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def rows_of_csv(folder, name="comparison.csv"):
    with (folder / name).open(newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


def rows_of_runs(folder):
    with (folder / "runs.csv").open(newline="") as file:
        return {(row["strategy"], int(row["seed"])): row for row in csv.DictReader(file)}


def shown(comparison, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(comparison_table(measure(comparison)), soft_wrap=True)
    return out.getvalue()


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_table_has_every_figure_of_every_strategy(comparison):
    text = shown(comparison)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.split()}
    # 90 % of FedAvg's 0.8 is 0.72: FedAvg has it after its third round, FedFrozen after its second, Fed-ensemble never.
    # Two rounds of 8 MB down and 6 MB up; three seconds for the first round, one for each other.
    assert rows["fedavg"] == "0.8000 0.7500 ±.0200 60.0 MB 30.0 MB 30.0 MB 3 5.0 s"
    assert rows["fedfrozen"] == "0.7100 0.6600 ±.0200 28.0 MB 16.0 MB 12.0 MB 2 4.0 s"
    assert rows["fedensemble"] == "0.6000 0.5500 ±.0200 – – – – –"
    assert rows["fedacs"] == "– 0.9000 ±.0200 – – – – –"
    assert "an accuracy of 0.7200, 90% of fedavg's final accuracy on the server's data" in text


@pytest.mark.parametrize("which", ["folder", "seeds"])
def test_the_table_fits_a_terminal_and_ends_with_whole_paths(which, request):
    folder = request.getfixturevalue(which)
    lines = shown(read_comparison(folder)).splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if " failed after round " in line)]
    assert max(map(len, table)) <= 80
    assert f"  {folder / 'comparison.html'}  (open it in a browser)" in lines
    assert all(f"  {folder / name}" in lines and (folder / name).is_file() for name in FILES)


def test_a_failed_run_is_in_the_table_with_its_reason(comparison):
    lines = shown(comparison).splitlines()
    row = lines.index(next(line for line in lines if line.startswith("selective")))
    assert lines[row + 1].strip() == "failed"
    assert "selective: failed after round 0 of 3: The run failed: <no> memory" in lines
    assert f"Resume the unfinished runs with `tepal compare --resume {comparison.folder}`" in lines


def test_the_csv_has_the_measured_figures_unrounded(folder):
    rows = rows_of_csv(folder)
    assert list(rows) == ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]
    frozen = rows["fedfrozen"]
    assert float(frozen["server_accuracy"]) == 0.71 and float(frozen["clients_accuracy"]) == 0.71 - 0.05
    assert (float(frozen["bytes_down"]), float(frozen["bytes_up"])) == (24e6, 18e6)
    assert (float(frozen["bytes_total"]), float(frozen["bytes_vs_fedavg"])) == (42e6, 0.7)
    assert float(frozen["target_accuracy"]) == pytest.approx(0.72)
    assert (float(frozen["rounds_to_target"]), float(frozen["bytes_to_target"])) == (2, 28e6)
    ways = ("bytes_down_to_target", "bytes_up_to_target", "overhead_to_target", "seconds_to_target")
    # Manifests and headers have 3 kB in the first round, and 6 kB in the second.
    assert [float(frozen[key]) for key in ways] == [16e6, 12e6, 9e3, 4]
    assert [float(rows_of_csv(folder, "runs.csv")["fedfrozen"][key]) for key in ways] == [16e6, 12e6, 9e3, 4]
    assert all(rows["fedensemble"][key] == "" for key in ways), "it never reaches the target"
    assert rows["fedacs"]["server_accuracy"] == "" == rows["fedacs"]["bytes_to_target"]
    assert all(value == "" for row in rows.values() for key, value in row.items() if key.endswith("_sd")), "one seed"
    assert (rows["selective"]["runs"], rows["selective"]["finished"]) == ("1", "0")
    runs = rows_of_csv(folder, "runs.csv")
    assert (runs["selective"]["outcome"], runs["selective"]["reason"]) == ("failed", "The run failed: <no> memory")
    assert (folder / runs["fedfrozen"]["run"] / "metrics.jsonl").is_file()


def test_over_seeds_figures_are_means_with_their_deviation(seeds):
    rows, runs = rows_of_csv(seeds), rows_of_runs(seeds)
    avg = rows["fedavg"]
    finals = [0.8 + added for added in ADDED.values()]
    assert float(avg["server_accuracy"]) == pytest.approx(over(finals)[0])
    assert float(avg["server_accuracy_sd"]) == pytest.approx(over(finals)[1])
    assert float(avg["clients_accuracy"]) == pytest.approx(over(finals)[0] - 0.05)
    assert float(avg["clients_accuracy_sd"]) == pytest.approx(over(finals)[1])
    assert float(avg["clients_spread"]) == pytest.approx(0.02)
    assert (avg["runs"], avg["finished"]) == ("3", "3")
    assert [float(runs["fedavg", seed]["server_accuracy"]) for seed in ADDED] == pytest.approx(finals)
    # Of the rounds' 3, 1 and 1 s, and of the steps' 10, 20 and 30 ms, the median.
    assert (float(avg["seconds"]), float(avg["round_seconds"]), float(avg["round_seconds_sd"])) == (5, 1, 0)
    assert (float(avg["step_seconds"]), float(avg["step_seconds_sd"])) == (0.02, 0)


def test_what_did_not_finish_is_in_no_mean(seeds):
    frozen = rows_of_csv(seeds)["fedfrozen"]
    mean, deviation = over([0.71, 0.71 + 0.07])
    assert float(frozen["server_accuracy"]) == pytest.approx(mean)
    assert float(frozen["server_accuracy_sd"]) == pytest.approx(deviation)
    assert (frozen["runs"], frozen["finished"]) == ("3", "2")
    text = shown(read_comparison(seeds))
    assert "fedfrozen seed 2: failed after round 1 of 3: no memory" in text
    assert "fedfrozen: 2 of 3 finished; its figures are of the finished runs" in text


def test_the_way_to_the_target_is_of_the_runs_that_reached_it(seeds):
    target = 0.9 * statistics.mean(0.8 + added for added in ADDED.values())  # 0.747
    rows, runs = rows_of_csv(seeds), rows_of_runs(seeds)
    assert float(rows["fedavg"]["target_accuracy"]) == pytest.approx(target)
    # FedAvg: in the third round, but with the third seed 0.77 in the second. FedFrozen: 0.73 and 0.71, or 0.80.
    assert [runs["fedavg", seed]["rounds_to_target"] for seed in ADDED] == ["3", "3", "2"]
    assert float(rows["fedavg"]["rounds_to_target"]) == pytest.approx(8 / 3)
    assert float(rows["fedavg"]["bytes_to_target"]) == pytest.approx(160e6 / 3)
    mean, deviation = over([5, 5, 4])
    assert float(rows["fedavg"]["seconds_to_target"]) == pytest.approx(mean)
    assert float(rows["fedavg"]["seconds_to_target_sd"]) == pytest.approx(deviation)
    assert float(rows["fedavg"]["bytes_up_to_target"]) == pytest.approx(80e6 / 3)
    overhead = [sum(3_000 * number for number in range(1, rounds + 1)) for rounds in (3, 3, 2)]
    assert float(rows["fedavg"]["overhead_to_target"]) == pytest.approx(statistics.mean(overhead))
    assert float(rows["fedavg"]["overhead_to_target_sd"]) == pytest.approx(statistics.stdev(overhead))
    assert [runs["fedfrozen", seed]["rounds_to_target"] for seed in ADDED] == ["", "", "2"]
    assert (float(rows["fedfrozen"]["rounds_to_target"]), rows["fedfrozen"]["reached_target"]) == (2, "1")
    assert "28.0 MB (1 of 2)" in (seeds / "comparison.md").read_text()
    assert "fedfrozen: 1 of 2 runs reached the target" in shown(read_comparison(seeds))


def test_every_text_has_the_bytes_to_the_target_by_direction(folder):
    rows = (folder / "comparison.md").read_text().splitlines()
    head, frozen = (next(row for row in rows if row.startswith(f"| {name} ")) for name in ("strategy", "fedfrozen"))
    of = dict(zip(head.split(" | "), frozen.split(" | "), strict=True))
    names = (
        "bytes to target", "bytes down to target", "bytes up to target", "manifests and headers to target",
        "rounds to target", "time to target",
    )  # fmt: skip
    assert [of[name] for name in names] == ["28.0 MB", "16.0 MB", "12.0 MB", "9.00 kB", "2", "4.0 s"]
    tex = (folder / "comparison.tex").read_text()
    assert " & 28.0 MB & 16.0 MB & 12.0 MB & 9.00 kB & 2 & 4.0 s & " in tex


def test_without_a_target_the_table_has_the_bytes_in_total(tmp_path):
    comparison = comparison_in(tmp_path, ["fedacs"])
    comparison.runs[0].directory = leave_run(tmp_path, "fedacs", summary=False)  # only a finished run has a target
    comparison.runs[0].outcome = "stopped"
    text = shown(finish(comparison))
    assert "– 0.9000 ±.0200 30.0 MB 1.0 s 20 ms" in " ".join(text.split()) and "until" not in text


def test_a_target_that_is_given_is_the_target(tmp_path):
    finish(comparison_in(tmp_path, ["fedavg", "fedfrozen"], target=0.5))
    rows = rows_of_csv(tmp_path)
    assert [float(rows[name]["rounds_to_target"]) for name in rows] == [1, 2]
    assert float(rows["fedavg"]["target_accuracy"]) == 0.5
    assert "Target: an accuracy of 0.5000 on the server's data" in shown(read_comparison(tmp_path))


def test_without_fedavg_the_target_is_of_the_first_that_finished_with_an_accuracy(tmp_path):
    def target(*strategies):
        (tmp_path / "-".join(strategies)).mkdir()
        comparison = comparison_in(tmp_path / "-".join(strategies), strategies)
        for run in comparison.runs:
            if run.strategy == "selective":
                run.outcome = "failed"
        return measure(finish(comparison)).target

    found = target("fedacs", "selective", "fedfrozen", "fedensemble")
    assert (found.score, found.of) == (pytest.approx(0.9 * 0.71), "fedfrozen")
    assert target("fedacs", "fedensemble", "fedavg").of == "fedavg"
    assert target("selective") is None


def test_a_regression_is_compared_by_its_errors_and_the_least_is_the_best(tmp_path):
    comparison = finish(comparison_in(new_folder(tmp_path), ["fedavg", "fedfrozen", "fedacs"]), regression=True)
    text, folder = shown(comparison), comparison.folder
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.split()}
    # FedAvg's 0.2 / 0.9 is 0.2222, which it has after its third round, and FedFrozen, with 0.27 at best, never.
    assert rows["fedavg"] == "0.2000 0.1500 ±.0200 60.0 MB 30.0 MB 30.0 MB 3 5.0 s"
    assert rows["fedfrozen"] == "0.2900 0.2400 ±.0200 – – – – –"
    assert rows["fedacs"] == "– 0.0000 ±.0200 – – – – –"
    assert "an RMSE of 0.2222, 1/0.9 of fedavg's final RMSE on the server's data" in text
    of = rows_of_csv(folder)["fedfrozen"]
    assert (float(of["server_rmse"]), float(of["target_rmse"])) == (pytest.approx(0.29), pytest.approx(0.2 / 0.9))
    assert "server_accuracy" not in of and "accuracy" not in "".join(rows_of_csv(folder, "runs.csv")["fedavg"])
    found = Page(folder / "comparison.html")
    drawn = found.figures["rmse-rounds"]["data"]
    assert [curve["y"] for curve in drawn if curve["name"].startswith("fedfrozen")] == [
        pytest.approx([0.9, 0.6, 0.27, 0.29])
    ]
    words_of = (found.text, (folder / "comparison.svg").read_text(), (folder / "comparison.md").read_text())
    assert all("RMSE" in text and "ccuracy" not in text for text in words_of)


def test_models_of_the_clients_own_have_no_accuracy_on_the_servers_data(tmp_path):
    run = leave_run(tmp_path, "fedacs")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 4, "accuracy": 0.6, "accuracy_of": "server"}) + "\n")
    result = measured(ComparedRun("fedacs", 7, run), {})
    assert result.server_score is None and result.curve.of == "personal"


def test_an_earlier_models_score_on_the_clients_is_not_the_results(tmp_path):
    run = leave_run(tmp_path, "fedacs")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 4, "clients_accuracy": None}) + "\n")
    assert measured(ComparedRun("fedacs", 7, run), {}).figures(None)["clients_accuracy"] is None


def test_bytes_after_an_unknown_round_are_not_made_up(tmp_path):
    run = RunDirectory.create(tmp_path, "fedavg", {})
    for number, down in ((1, 1000), (2, None), (3, 1000)):
        run.append(RoundRecord(round=number, accuracy=0.1 * number, accuracy_of="server", bytes_down=down, bytes_up=0))
    result = measured(ComparedRun("fedavg", 7, run.path, "finished"), {})
    assert [(point.round, point.transferred) for point in result.curve.points] == [(1, 1000), (2, None), (3, None)]
    assert [point.round for point in Result("fedavg", [result]).over_bytes] == [1]
    figures = result.figures(0.3)
    assert (figures["rounds_to_target"], figures["bytes_to_target"], figures["bytes_total"]) == (3, None, None)
    assert (figures["bytes_down_to_target"], figures["bytes_up_to_target"]) == (None, 0), "up is known of every round"
    assert figures["seconds_to_target"] is None, "no round has its seconds"
    assert figures["overhead_to_target"] is None, "nor the bytes of its manifests and headers"
    assert result.figures(0.1)["bytes_down_to_target"] == 1000, "the unknown round is a later one"


# --- the folder -----------------------------------------------------------------------------------------------------


def test_a_comparison_is_read_as_it_was_written(tmp_path):
    written = comparison_in(tmp_path, ["fedavg", "fedacs"], [3, 1], target=0.5, gpus=0.25)
    written.runs[2].outcome, written.runs[2].reason = "failed", "no “memory”"
    written.save()
    assert read_comparison(tmp_path) == written
    assert [(run.strategy, run.seed) for run in written.runs] == [
        ("fedavg", 3), ("fedacs", 3), ("fedavg", 1), ("fedacs", 1),
    ]  # fmt: skip


def test_a_comparison_of_an_earlier_version_goes_on_with_the_settings_of_then(tmp_path):
    comparison = comparison_in(tmp_path, ["selective", "fedacs"])
    later = {"selective.coupling": 0.3, "selective.absolute-coupling": 0.0, "fedacs.follow-rate": True}
    comparison.run_config = {**defaults(), **later}
    assert later.items() <= comparison.config_of(comparison.runs[0]).items()
    comparison.run_config = {key: value for key, value in defaults().items() if key not in later}
    comparison.run_config["selective.coupling"] = 10.0
    then = {"selective.coupling": 0.0, "selective.absolute-coupling": 10.0, "fedacs.follow-rate": False}
    assert then.items() <= comparison.config_of(comparison.runs[1]).items()


def test_a_run_that_was_resumed_and_finished_since_counts_as_finished(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg"])
    comparison.runs[0].directory = leave_run(tmp_path, "fedavg", rounds=1, summary=False)
    comparison.runs[0].outcome = "stopped"
    comparison.save()
    assert read_comparison(tmp_path).runs[0].outcome == "stopped"
    run = RunDirectory(comparison.runs[0].directory, {})
    run.write_summary(stopped_by="too few replies, in the last round")
    assert read_comparison(tmp_path).runs[0].outcome == "stopped"
    run.write_summary()
    assert read_comparison(tmp_path).runs[0].outcome == "finished"


def test_a_run_that_was_resumed_alone_with_other_settings_is_named(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg", "fedfrozen"], [1, 2])
    comparison.run_config = {**comparison.run_config, "patience": "0", "checkpoints": 3, "fraction-evaluate": 1}
    finish(comparison)
    assert "it was resumed" not in shown(comparison)
    for run in comparison.runs:
        resumed = RunDirectory.resume(run.directory)
        own = {"num-server-rounds": 40, "patience": 2} if run is comparison.runs[1] else {"patience": 0}
        resumed.write_config({**comparison.settings_of(run), "fraction-evaluate": 1.0, "checkpoints": 5, **own})
    (comparison.runs[3].directory / "config.toml").write_text("no table")  # its figures are shown all the same
    write_comparison(comparison)
    said = (
        "fedfrozen seed 1: it was resumed with other settings: num-server-rounds=40 (the comparison has 3), patience=2 "
        "(the comparison has 0)"
    )
    for text in (shown(comparison), (tmp_path / "comparison.tex").read_text(), Page(tmp_path / "comparison.html").text):
        assert said in text and text.count("resumed with other settings") == 1
    assert "fedfrozen seed 1: it was resumed" in (tmp_path / "comparison.md").read_text()


def test_an_unfinished_run_ended_after_some_of_its_own_rounds(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg"])
    run = comparison.runs[0]
    run.directory = leave_run(tmp_path, "fedavg", config={"num-server-rounds": 40}, summary=False)
    run.outcome = "stopped"
    assert "fedavg: stopped after round 3 of 40" in shown(comparison)


def test_the_settings_that_are_compared_are_all_that_a_run_may_change_and_that_change_its_results():
    others = {key for key in reading.CHANGEABLE if key.startswith(("checkpoints", "trackers", "mlflow.", "wandb."))}
    assert {*CHANGEABLE} == {*reading.CHANGEABLE} - others and len(others) == 7


def test_a_command_with_a_folder_is_one_for_a_shell(tmp_path):
    comparison = comparison_in(tmp_path / "it's my folder", ["fedavg"])
    words = ["tepal", "compare", "--resume", str(comparison.folder), "--ray", "far:1"]
    assert shlex.split(resume_command(comparison, "--ray far:1")) == words


def test_a_run_that_ended_early_counts_as_finished(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg"])
    comparison.runs[0].directory = leave_run(tmp_path, "fedavg", rounds=2, summary=False)
    comparison.runs[0].outcome = "running"
    comparison.save()
    RunDirectory(comparison.runs[0].directory, {}).write_summary(ended_early="1 evaluation without improvement")
    assert read_comparison(tmp_path).runs[0].outcome == "finished"


def test_a_run_of_a_comparison_that_was_killed_is_not_taken_for_running(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg", "fedacs"])
    comparison.runs[0].directory, comparison.runs[0].outcome = leave_run(tmp_path, "fedavg", summary=False), "running"
    comparison.save()
    with held(tmp_path):
        assert read_comparison(tmp_path).runs[0].outcome == "running"
    assert [run.outcome for run in read_comparison(tmp_path).runs] == ["stopped", "not run"]


def test_a_run_whose_directory_is_gone_was_not_run(tmp_path):
    comparison = finish(comparison_in(tmp_path, ["fedavg"]))
    comparison.runs[0].directory.rename(tmp_path.parent / "elsewhere")
    (run,) = read_comparison(tmp_path).runs
    assert (run.directory, run.outcome) == (None, "not run")


def test_a_comparison_that_was_moved_is_found_with_its_runs(tmp_path):
    (tmp_path / "here").mkdir()
    finish(comparison_in(tmp_path / "here", ["fedavg"]))
    there = (tmp_path / "here").rename(tmp_path / "there")
    assert read_comparison(there).runs[0].directory.parent == there
    assert find_comparison(there) == there == find_comparison(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"cells": [{"name": "fedavg"}]}', '{"cells": 3}'])
def test_a_plan_that_cannot_be_read_is_refused_by_name(tmp_path, content):
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(ValueError, match=r"comparison\.json is damaged"):
        read_comparison(tmp_path)


def test_a_folder_that_is_no_comparison_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected runs/<start>-compare"):
        find_comparison(tmp_path)
    (tmp_path / "comparison.csv").touch()
    with pytest.raises(FileNotFoundError, match=r"has no comparison\.json"):
        read_comparison(tmp_path)


# --- Markdown and LaTeX ---------------------------------------------------------------------------------------------


def test_the_markdown_table_is_one(seeds):
    lines = (seeds / "comparison.md").read_text().splitlines()
    head, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    assert {len(row) for row in (head, rule, *rows)} == {len(head)} and set(rule) == {"---", "---:"}
    assert [row[0] for row in rows] == ["fedavg", "fedfrozen", "fedacs"]
    mean, deviation = over(0.8 + added for added in ADDED.values())
    assert rows[0][1] == f"{mean:.4f} ± {deviation:.4f}" and rows[2][1] == "–"
    assert any("Seeds 1, 2, 3: mean ± standard deviation" in line for line in lines)


def test_the_latex_table_is_one(seeds):
    text = (seeds / "comparison.tex").read_text()
    begin, *body, end = [line for line in text.splitlines() if not line.startswith("%")]
    (columns,) = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", begin).groups()
    assert end == r"\end{tabular}"
    assert [line for line in body if "&" not in line] == [r"\toprule", r"\midrule", r"\bottomrule"]
    rows = [line.removesuffix(r" \\").split(" & ") for line in body if line.endswith(r" \\")]
    assert {len(row) for row in rows} == {len(columns)}
    assert [row[0] for row in rows] == ["strategy", "fedavg", "fedfrozen", "fedacs"]
    mean, deviation = over(0.8 + added for added in ADDED.values())
    assert rows[1][1] == rf"{mean:.4f} $\pm$ {deviation:.4f}" and rows[3][1] == "--"
    assert "\n".join(body).isascii() and r"\usepackage{booktabs}" in text


# --- picture --------------------------------------------------------------------------------------------------------


def words(element):
    return " ".join("".join(text.itertext()) for text in element.iter(f"{SVG}text"))


def scale(svg, anchor, along):
    """What a reader does with the tick labels of an axis: position → value."""
    ticks = [
        (float(text.get(along)), float(text.text))
        for text in svg.iter(f"{SVG}text")
        if text.get("class") == "tick" and text.get("text-anchor") == anchor
    ]
    (at, low), *_, (end, high) = ticks
    return lambda position: low + (position - at) * (high - low) / (end - at)


def test_the_picture_has_one_line_a_strategy_where_its_values_are(folder):
    svg = ET.parse(folder / "comparison.svg").getroot()
    lines = {
        group.get("class").split()[1].removeprefix("s-"): group
        for group in svg.iter(f"{SVG}g")
        if "curve" in group.get("class").split()
    }
    assert list(lines) == ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]
    to_mb, to_accuracy = scale(svg, "middle", "x"), scale(svg, "end", "y")
    offset = 4  # of a tick's label below its line

    def points(name):
        pairs = (pair.split(",") for pair in lines[name].find(f"{SVG}polyline").get("points").split())
        return [(to_mb(float(x)), to_accuracy(float(y) + offset)) for x, y in pairs]

    moved = {"fedavg": [0, 20, 40, 60], "fedfrozen": [0, 14, 28, 42]}
    for name, megabytes in moved.items():
        expected = list(zip(megabytes, RUNS[name][0], strict=True))
        assert [x for x, _ in points(name)] == pytest.approx([x for x, _ in expected], abs=0.01)
        assert [y for _, y in points(name)] == pytest.approx([y for _, y in expected], abs=0.001)
    assert [y for _, y in points("fedacs")] == pytest.approx([0.85, 0.9, 0.95], abs=0.001)
    assert points("selective") == [(0, pytest.approx(0.1, abs=0.001))]
    assert all(len(lines[name].findall(f"{SVG}use")) == len(points(name)) for name in lines)


def test_the_picture_sets_the_clients_data_apart(folder):
    svg = ET.parse(folder / "comparison.svg").getroot()
    curves = [group.get("class").split() for group in svg.iter(f"{SVG}g") if "curve" in group.get("class").split()]
    assert [names[1] for names in curves if "of-clients" in names] == ["s-fedacs"]
    style = svg.find(f"{SVG}style").text
    assert re.search(r"\.of-clients polyline[^{]*\{stroke-dasharray", style)
    assert "clients' personal models" in words(svg)
    assert "not comparable with solid lines" in words(svg)


def test_the_picture_is_told_to_those_who_do_not_see_it(folder):
    svg = ET.parse(folder / "comparison.svg").getroot()
    assert svg.get("role") == "img" and svg.get("aria-labelledby") == "title desc"
    assert svg.find(f"{SVG}title").text == "Accuracy over transferred bytes, tiny-vit on digits"
    told = svg.find(f"{SVG}desc").text
    assert "fedfrozen: 0.7100 on the server's test data after 42.0 MB." in told
    assert "fedacs: 0.9500 on the clients' personal models after 30.0 MB." in told


def test_the_pictures_legend_does_not_overlap(folder):
    svg = ET.parse(folder / "comparison.svg").getroot()
    at = sorted(float(text.get("y")) for text in svg.iter(f"{SVG}text") if float(text.get("x") or 0) > 600)
    assert len(at) >= 10
    assert min(after - before for before, after in pairwise(at)) >= 14
    assert at[-1] < float(svg.get("height"))


def test_the_picture_follows_light_and_dark_and_loads_nothing(folder):
    text = (folder / "comparison.svg").read_text()
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"url\(|@import|<script|<image", text)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_the_picture_of_runs_that_measured_nothing_says_so(tmp_path):
    svg = ET.fromstring(draw(measure(comparison_in(tmp_path, ["fedavg", "fedacs"]))))
    assert not list(svg.iter(f"{SVG}polyline"))
    assert words(svg).count("nothing measured") == 2


def test_the_picture_of_several_seeds_is_the_mean_in_a_band(seeds):
    svg = ET.parse(seeds / "comparison.svg").getroot()
    to_accuracy = scale(svg, "end", "y")
    (curve,) = [group for group in svg.iter(f"{SVG}g") if group.get("class").startswith("curve s-fedavg ")]

    def accuracies(shape):
        pairs = curve.find(f"{SVG}{shape}").get("points").split()
        return [to_accuracy(float(pair.split(",")[1]) + 4) for pair in pairs]

    each = [over(accuracy + added for added in ADDED.values()) for accuracy in RUNS["fedavg"][0]]
    assert accuracies("polyline") == pytest.approx([mean for mean, _ in each], abs=0.001)
    outline = [*(mean + by for mean, by in each), *(mean - by for mean, by in reversed(each))]
    assert accuracies("polygon") == pytest.approx(outline, abs=0.001)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Twenty strategies: those that there are, and names that there are not."""
    names = [*STRATEGIES, *(f"fedother{k}" for k in range(20 - len(STRATEGIES)))]
    return finish(comparison_in(tmp_path_factory.mktemp("many"), names)).folder


def test_the_picture_of_many_strategies_has_a_line_of_the_legend_for_each(many):
    svg = ET.parse(many / "comparison.svg").getroot()
    names = [text for text in svg.iter(f"{SVG}text") if text.get("class") == "name"]
    assert len({text.text for text in names}) == len(names) == 20
    at = [float(text.get("y")) for text in names]
    assert min(after - before for before, after in pairwise(at)) >= 16 and at[-1] < float(svg.get("height"))
    widest = max(len(text.text) * 8 + len(text[0].text) * 6.5 for text in names)  # pixels, some more than they take
    assert float(names[0].get("x")) + widest < float(svg.get("width"))
    assert max(float(text.get("y") or 0) for text in svg.iter(f"{SVG}text")) < float(svg.get("height"))


def test_the_page_of_many_strategies_has_room_for_its_legends(many, page):
    heights = {figure["layout"]["height"] for figure in Page(many / "comparison.html").figures.values()}
    assert heights == {560} and {figure["layout"]["height"] for figure in page.figures.values()} == {340}


def test_looks_differ_and_follow_from_the_name_alone():
    names = [*STRATEGIES, *(f"fedother{k}" for k in range(20))]
    all_looks = looks(names)
    assert len({(look.light, look.symbol) for look in all_looks.values()}) == len(names)
    assert len({(look.dark, look.mark) for look in all_looks.values()}) == len(names)
    for name in STRATEGIES:
        assert looks([name]) == {name: all_looks[name]}, "whatever else is compared"
    assert looks(reversed(names)) == all_looks
    assert looks(["fedavg"])["fedavg"].light == "#5b5663", "as in every picture so far"


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_stands_out_from_its_ground():
    """The contrast that WCAG 2.1 asks of graphics is 3."""
    for look in looks(STRATEGIES).values():
        assert 1.05 / (luminance(look.light) + 0.05) > 4
        assert (luminance(look.dark) + 0.05) / (luminance("#1f1c24") + 0.05) > 4


# --- page -----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What these tests want to know of a page: its tags, text, figures and tables."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.figures, self.tables, self.text, self.scripts = [], {}, [], "", []
        self._inside = {}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = {"tag": tag, **dict(attrs)}
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        if self._inside.get("tag") == "script":
            self.scripts.append(data)
            if "data-for" in self._inside:
                self.figures[self._inside["data-for"]] = json.loads(data)
        elif self._inside.get("tag") in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if self._inside.get("tag") not in ("script", "style"):
            self.text += data

    def handle_endtag(self, tag):
        self._inside = {}


@pytest.fixture(scope="module")
def page(folder):
    return Page(folder / "comparison.html")


def test_the_page_asks_the_network_for_nothing(page):
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "img", "form")]
    assert not [a for _, a in page.tags if "src" in a or any(name.startswith("on") for name in a)]
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert all(re.fullmatch(r"[\w-]+/report\.html", link) for link in links)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and not re.search(r"https?:|\*", policy)
    assert len([script for script in page.scripts if "plotly.js v" in script[:200]]) == 1


def test_the_page_has_all_strategies_with_the_tables_figures(page):
    table = page.tables[0]
    assert [row[0] for row in table[1:]] == ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]
    frozen = dict(zip(table[0], table[2], strict=True))
    headings = ("rounds to target", "bytes to target", "down (bytes)", "up (bytes)", "bytes in total")
    assert [frozen[key] for key in headings] == ["2", "28.0 MB", "24.0 MB", "18.0 MB", "42.0 MB"]
    headings = ("bytes down to target", "bytes up to target", "manifests and headers to target", "time to target")
    assert [frozen[key] for key in headings] == ["16.0 MB", "12.0 MB", "9.00 kB", "4.0 s"]
    assert frozen["accuracy, server’s data"] == "0.7100" and frozen["outcome"] == "finished"
    assert table[5][1] == "–"
    assert "selective: failed after round 0 of 3: The run failed: <no> memory" in page.text
    assert all(a.get("scope") == "col" for tag, a in page.tags if tag == "th")


def test_the_page_draws_accuracy_over_rounds_and_over_bytes(page):
    for figure, frozen_x, own_x in (
        ("accuracy-rounds", [0, 1, 2, 3], [1, 2, 3]),
        ("accuracy-bytes", [0, 14, 28, 42], [10, 20, 30]),
    ):
        curves = {trace["name"]: trace for trace in page.figures[figure]["data"]}
        frozen = curves["fedfrozen, server's test data"]
        assert frozen["x"] == frozen_x and frozen["y"] == RUNS["fedfrozen"][0]
        assert frozen["line"]["dash"] == "solid"
        own = curves["fedacs, clients' personal models"]
        assert own["x"] == own_x and own["line"]["dash"] == "dash"


def test_the_target_is_a_line_in_both_figures_and_in_the_picture(page, folder, seeds):
    for name in ("accuracy-rounds", "accuracy-bytes"):
        [line] = page.figures[name]["layout"]["shapes"]
        assert (line["y0"], line["y1"]) == (pytest.approx(0.72), pytest.approx(0.72)) and line["line"]["dash"] == "dot"
        [note] = page.figures[name]["layout"]["annotations"]
        assert note["text"] == "target 72.00%" and note["y"] == pytest.approx(0.72)
    svg = ET.parse(folder / "comparison.svg").getroot()
    [line] = [path for path in svg.iter(f"{SVG}path") if path.get("class") == "target"]
    height = float(re.fullmatch(r"M58 ([\d.]+)H556", line.get("d"))[1])
    assert scale(svg, "end", "y")(height + 4) == pytest.approx(0.72, abs=0.001)
    assert "target 0.7200 on the server's data" in words(svg)
    assert "Target: 0.7200 on the server's data." in svg.find(f"{SVG}desc").text
    assert "Dotted: the target on the server's data." in page.text
    [line] = Page(seeds / "comparison.html").figures["accuracy-bytes"]["layout"]["shapes"]
    assert line["y0"] == pytest.approx(0.9 * statistics.mean(0.8 + added for added in ADDED.values()))


def test_a_target_without_a_curve_of_its_data_is_not_drawn(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg"], target=0.9)
    comparison.runs[0].outcome = "failed"  # before it had a score
    finish(comparison)
    found = Page(comparison.folder / "comparison.html")
    assert all("shapes" not in figure["layout"] for figure in found.figures.values())
    svg = ET.parse(tmp_path / "comparison.svg").getroot()
    assert not [path for path in svg.iter(f"{SVG}path") if path.get("class") == "target"]
    assert "Dotted" not in found.text


def test_a_target_above_all_curves_is_within_the_picture(tmp_path):
    comparison = finish(comparison_in(tmp_path, ["fedavg"], target=0.97))
    svg = ET.parse(comparison.folder / "comparison.svg").getroot()
    [line] = [path for path in svg.iter(f"{SVG}path") if path.get("class") == "target"]
    height = float(re.search(r" ([\d.]+)H", line.get("d"))[1])
    assert scale(svg, "end", "y")(height + 4) == pytest.approx(0.97, abs=0.001)


def test_the_page_draws_several_seeds_as_their_mean_in_a_band(seeds):
    data = Page(seeds / "comparison.html").figures["accuracy-rounds"]["data"]
    band, line = [trace for trace in data if trace["meta"]["role"] == "s-fedavg"]
    each = [over(accuracy + added for added in ADDED.values()) for accuracy in RUNS["fedavg"][0]]
    assert line["y"] == pytest.approx([mean for mean, _ in each])
    assert band["meta"]["band"] and band["fill"] == "toself" and band["x"] == [0, 1, 2, 3, 3, 2, 1, 0]
    outline = [*(mean + by for mean, by in each), *(mean - by for mean, by in reversed(each))]
    assert band["y"] == pytest.approx(outline)
    assert band["legendgroup"] == line["legendgroup"], "the legend hides both"


def test_the_page_compares_all_on_the_clients_own_tests(page, seeds):
    bars = page.figures["own-tests"]["data"]
    assert [bar["x"] for bar in bars] == [["fedavg"], ["fedfrozen"], ["fedensemble"], ["fedacs"]]
    assert [bar["y"][0] for bar in bars] == pytest.approx([0.75, 0.66, 0.55, 0.9])
    assert all(bar["error_y"]["array"] == [0.02] for bar in bars), "over the clients"
    _, deviation = over(ADDED.values())
    assert Page(seeds / "comparison.html").figures["own-tests"]["data"][0]["error_y"]["array"] == [
        pytest.approx(deviation)
    ]


def test_every_figure_is_spoken_and_coloured_and_every_round_is_in_a_table(folder, page):
    spoken = [a["aria-label"] for tag, a in page.tags if a.get("role") == "group"]
    assert len(spoken) == 3 and all("fedfrozen" in text for text in spoken)
    rounds = next(table for table in page.tables if table[0][:3] == ["strategy", "seed", "round"])
    assert len(rounds) == 1 + 3 * 4 + 3 + 1
    roles = {trace["meta"]["role"] for figure in page.figures.values() for trace in figure["data"]}
    assert roles == {f"s-{name}" for name in RUNS}
    (style,) = re.findall(r"<style>(.*?)</style>", (folder / "comparison.html").read_text(), re.S)
    assert all(style.count(f"--{role}: #") == 2 for role in roles), "a colour on light, and one on dark"
    assert not re.search(r"url\(|@import|https?:", style)


def test_the_page_has_the_config_that_the_runs_share(page, seeds):
    config = next(table for table in page.tables if table[0] == ["key", "value"])
    assert ["seed", "7"] in config and "strategy" not in [key for key, _ in config]
    config = next(table for table in Page(seeds / "comparison.html").tables if table[0] == ["key", "value"])
    assert ["seed", "1, 2, 3"] in config


def test_the_readmes_picture_is_that_of_a_comparison(folder, tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "picture.py"))
    script["main"](folder, tmp_path / "main-job.svg")
    assert (tmp_path / "main-job.svg").read_text() == (folder / "comparison.svg").read_text()


# --- what others wrote ----------------------------------------------------------------------------------------------


def test_a_hostile_reason_is_text_in_every_form(tmp_path):
    evil = "=1+1\n\x1b[2J\u202e\\input{/etc/passwd} | <script>alert(1)</script> [a](http://b) " + "x" * 5000
    comparison = comparison_in(tmp_path, ["fedavg", "fedfrozen"])
    finish(comparison)
    comparison.runs[1].outcome, comparison.runs[1].reason = "failed", evil
    write_comparison(comparison)
    file = io.StringIO()
    Console(file=file, width=200, color_system=None).print(comparison_table(measure(comparison)), soft_wrap=True)
    texts = {name: (tmp_path / name).read_text() for name in ("comparison.csv", "runs.csv", "comparison.md",
                                                              "comparison.tex", "comparison.svg")}  # fmt: skip
    for name, text in {**texts, "terminal": file.getvalue()}.items():
        assert text.replace("\n", "").isprintable() and "x" * 2001 not in text, name
    [row] = [row for row in csv.DictReader(io.StringIO(texts["runs.csv"])) if row["strategy"] == "fedfrozen"]
    assert row["reason"].startswith("'=1+1\\n\\x1b[2J")
    tokens = MarkdownIt().enable("table").parse(texts["comparison.md"])
    inline = {child.type for token in tokens for child in token.children or ()}
    assert inline <= {"text", "text_special"} and not [token for token in tokens if token.type.startswith("html")]
    comments = [line for line in texts["comparison.tex"].splitlines() if "input" in line]
    assert all(line.startswith("% ") for line in comments) and comments
    page = (tmp_path / "comparison.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


@pytest.mark.parametrize("score", [1e300, -1e300, 1e-320, 0.0, None])
def test_any_score_is_compared(tmp_path, score):
    comparison = comparison_in(tmp_path, ["fedavg", "fedfrozen"], seeds=[1, 2])
    finish(comparison)
    for run in comparison.runs:
        with open(run.directory / "metrics.jsonl", "a") as file:
            keys = ("rmse", "loss", "clients_rmse", "seconds", "bytes_down", "bytes_up")
            file.write(json.dumps({"round": 4, "accuracy_of": "server", **dict.fromkeys(keys, score)}) + "\n")
        (run.directory / "summary.json").unlink()
        RunDirectory(run.directory, {}).write_summary()
    write_comparison(comparison)
    assert comparison_table(measure(comparison))


def test_a_mean_that_no_float_has_is_not_known():
    assert over_seeds([1.7e308, 1.7e308]) is None and over_seeds([1.0, 3.0]).mean == 2
