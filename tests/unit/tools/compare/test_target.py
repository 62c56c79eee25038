"""`tepal compare --target`: a score, or a final score with a margin, which each seed has its own of."""

import csv

import pytest

from tepal.tools.compare.answers import answer
from tepal.tools.compare.bars import draw_bars
from tepal.tools.compare.comparison import measure, read_comparison
from tepal.tools.compare.grid.expand import strategies_grid
from tepal.tools.compare.page import figures
from tepal.tools.compare.plan import Comparison, planned_variants
from tepal.tools.compare.tables import about_target
from tepal.tools.compare.target import FinalScore, final_score, target_value
from tests import comparisons
from tests.comparisons import CONFIG, comparison_in, finish, leave_run, variants_in

# What the seeds add to the accuracies of `RUNS`.
ADDED = {1: 0.0, 2: 0.02, 3: 0.07}


def rows_of(folder, name="runs.csv"):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


# --- what is given --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "of", "margin"),
    [
        ("fedavg-0.005", "fedavg", -0.005),
        ("baseline-.01", "baseline", -0.01),
        ("FedAvg+0.05", "FedAvg", 0.05),
        ("selective-1-int8-0.02", "selective-1-int8", -0.02),
        ("selective-1-0.02", "selective-1", -0.02),
        ("own_1-0", "own_1", 0),
    ],
)
def test_a_final_score_is_a_name_and_a_margin(given, of, margin):
    assert target_value(given) == given and final_score(given) == FinalScore(of, margin)


@pytest.mark.parametrize(("given", "score"), [("0.9", 0.9), (0.9, 0.9), (1, 1), ("1e-3", 0.001), ("0", 0), ("-0", 0)])
def test_a_number_is_a_score(given, score):
    assert target_value(given) == score and final_score(target_value(given)) is None
    assert not str(target_value(given)).startswith("-")


def test_a_margin_with_an_exponent_is_refused_with_how_it_is_written():
    with pytest.raises(ValueError, match="what is added or subtracted, written without an exponent"):
        target_value("fedavg-0.1e-3")


@pytest.mark.parametrize("given", ["-0.5", "nan", "inf", "", "fedavg", "fedavg-", "a b-0.1", "x" * 65 + "-0.1", True,
                                   None, [], float("nan"), -1, 10**400, "fedavg-0.1\n"], ids=repr)  # fmt: skip
def test_anything_else_is_refused_with_what_is_expected(given):
    with pytest.raises(ValueError, match=r"expected a score of at least 0, such as 0\.9, or a final score with a"):
        target_value(given)


# --- each seed's own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "baseline"])
def test_each_seed_has_the_target_of_the_run_with_the_same_seed(tmp_path, name):
    comparison = finish(comparison_in(tmp_path, ["selective", "fedavg"], ADDED, target=f"{name}-0.1"), ADDED.get)
    rows = {(row["strategy"], int(row["seed"])): row for row in rows_of(tmp_path)}
    # FedAvg ends with 0.80, 0.82 and 0.87, and has 0.1 less after its second round of 20 MB. Selective ends, after its
    # third round of 10 MB, with 0.70, 0.72 and 0.77: that is enough of each seed, though less than the mean of 0.73.
    for seed, added in ADDED.items():
        assert float(rows["selective", seed]["target_accuracy"]) == pytest.approx(0.7 + added)
    needed = {key: (float(row["bytes_to_target"]), row["rounds_to_target"]) for key, row in rows.items()}
    assert needed == {
        **{("selective", seed): (30e6, "3") for seed in ADDED}, **{("fedavg", seed): (40e6, "2") for seed in ADDED},
    }  # fmt: skip
    [selective, _] = rows_of(tmp_path, "comparison.csv")
    assert selective["reached_target"] == "3" and float(selective["target_accuracy"]) == pytest.approx(0.73)
    said = about_target(measure(comparison))
    assert said == "Target: fedavg's final accuracy less 10 points (0.7300), each seed's own; their mean"
    assert said in (tmp_path / "comparison.md").read_text()


def test_a_seed_whose_reference_did_not_finish_has_no_target(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg", "selective"], [1, 2], target="fedavg-0.1")
    comparison.runs[0].outcome, comparison.runs[0].reason = "failed", "no memory"
    finish(comparison)
    rows = {(row["strategy"], row["seed"]): row for row in rows_of(tmp_path)}
    assert [rows["selective", seed]["rounds_to_target"] for seed in "12"] == ["", "3"]
    assert rows["selective", "1"]["target_accuracy"] == ""
    found = measure(comparison)
    assert found.unreached == []
    said = about_target(found)
    assert said.endswith("less 10 points (0.7000); seed 1 has none, because fedavg did not finish with it")
    assert said in (tmp_path / "comparison.md").read_text()


def test_a_seed_without_a_target_is_no_failure_to_reach_it(tmp_path):
    sections = [("S", "bytes", {"FedAvg": "fedavg", "small": "selective"}, {"baseline": "FedAvg"})]
    comparison = variants_in(tmp_path, sections, (1, 2, 3), target="baseline-0.1")
    for run in comparison.runs:
        if run.compared == "FedAvg" and run.seed != 2:
            run.outcome = "failed"
    [group] = measure(finish(comparison)).sections
    # Both reach 0.7 with seed 2, the only one with a target: small with 3 x 10 MB, FedAvg with 2 x 20 MB.
    assert answer(group) == (
        "FedAvg's final accuracy less 10 points (0.7000) is reached with 30.0 MB by small; FedAvg needs 40.0 MB, 1.33 "
        "times as many (undecided: no interval of 1 of 3 seeds)."
    )
    assert about_target(group).endswith("; seeds 1, 3 have none, because FedAvg did not finish with them")
    text = (tmp_path / "comparison.md").read_text()
    assert "| 30.0 MB |" in text and "of 3)" not in text and "(1 of 1)" not in text
    [fedavg, small] = rows_of(tmp_path, "comparison.csv")
    assert (fedavg["reached_target"], small["reached_target"]) == ("1", "1")
    assert "(1 of 3)" not in (tmp_path / "comparison.svg").read_text()


def test_a_variant_that_finished_with_no_seed_that_has_a_target_is_reported_as_such(tmp_path):
    sections = [("S", "bytes", {"FedAvg": "fedavg", "small": "selective"}, {"baseline": "FedAvg"})]
    comparison = variants_in(tmp_path, sections, (1, 2), target="baseline-0.1")
    for run in comparison.runs:
        if (run.compared, run.seed) in (("FedAvg", 1), ("small", 2)):
            run.outcome = "failed"
    [group] = measure(finish(comparison)).sections
    assert answer(group).endswith("by FedAvg, the baseline; small finished with no seed that has a target.")


def test_without_a_finished_reference_there_is_no_target(tmp_path):
    comparison = comparison_in(tmp_path, ["fedavg", "selective"], target="fedavg-0.1")
    comparison.runs[0].outcome = "failed"
    found = measure(finish(comparison))
    assert found.target is None
    said = "No finished run of fedavg has an accuracy on the server's data, so there is no target"
    assert about_target(found) == said


@pytest.mark.parametrize(
    ("target", "rounds"), [("fedavg-0", {"fedavg": 3}), ("fedavg-0.05", {"fedavg": 3, "selective": 3})]
)
def test_a_score_that_is_the_target_reaches_it_whatever_is_lost_by_rounding(tmp_path, monkeypatch, target, rounds):
    # Of 360 examples, 348 and 330 are 18 apart: exactly 5 points.
    monkeypatch.setitem(comparisons.RUNS, "fedavg", ([0.1, 0.2, 0.3, 348 / 360], (10, 10)))
    monkeypatch.setitem(comparisons.RUNS, "selective", ([0.1, 0.2, 329 / 360, 330 / 360], (6, 4)))
    found = measure(finish(comparison_in(tmp_path, ["fedavg", "selective"], target=target)))
    reached = {result.name: result.figures["rounds_to_target"] for result in found.variants}
    assert {name: figure.mean for name, figure in reached.items() if figure} == rounds


def test_an_error_may_be_larger_by_the_margin(tmp_path):
    comparison = finish(comparison_in(tmp_path, ["fedavg", "fedfrozen"], target="fedavg+0.15"), regression=True)
    rows = {row["strategy"]: row for row in rows_of(tmp_path)}
    # FedAvg's errors are 0.9, 0.5, 0.3 and 0.2, FedFrozen's 0.9, 0.6, 0.27 and 0.29: 0.35 is reached after two rounds.
    assert [float(row["target_rmse"]) for row in rows.values()] == pytest.approx([0.35, 0.35])
    assert [rows[name]["rounds_to_target"] for name in ("fedavg", "fedfrozen")] == ["2", "2"]
    assert about_target(measure(comparison)) == "Target: fedavg's final RMSE plus 0.15 (0.3500)"


def test_each_section_has_the_target_of_its_own_baseline(tmp_path):
    sections = [
        ("Bytes", "bytes", {"frozen": "fedfrozen", "FedAvg": "fedavg"}, {"baseline": "FedAvg", "within": 0.3}),
        ("Own", "own-tests", {"small": "selective", "each": "fedacs"}, {"baseline": "small"}),
    ]
    found = measure(finish(variants_in(tmp_path, sections, target="baseline-0.1")))
    assert [group.target.score for group in found.sections] == pytest.approx([0.7, 0.6])
    assert [group.target.of for group in found.sections] == ["FedAvg", "small"]
    # FedFrozen has 0.73 after two rounds of 14 MB: the target takes the place of `within`.
    assert answer(found.sections[0]).startswith(
        "FedAvg's final accuracy less 10 points (0.7000) is reached with 28.0 MB by frozen; FedAvg needs 40.0 MB"
    )


def test_of_varied_values_the_best_combination_is_the_reference(tmp_path):
    sections = strategies_grid(["fedavg", "selective"], {"learning-rate": (0.001, 0.01)}, 2)
    comparison = Comparison(
        tmp_path, planned_variants(sections, (1, 2)), dict(CONFIG), 10, sections=sections, target="fedavg-0.1"
    )
    for run in comparison.runs:
        # The second rate of FedAvg is the better one over the seeds, though not with the second.
        rate = comparison.settings_of(run)["learning-rate"]
        add = {(0.001, 1): 0.0, (0.001, 2): 0.02, (0.01, 1): 0.1, (0.01, 2): 0.01}[rate, run.seed]
        run.directory, run.outcome = leave_run(tmp_path, run.strategy, seed=run.seed, add=add), "finished"
    target = measure(comparison).target
    assert target.by_seed == pytest.approx({1: 0.8, 2: 0.71}) and target.of == "fedavg learning-rate=0.01"


@pytest.mark.parametrize("regression", [False, True])
def test_the_best_combination_is_one_of_those_that_finished_with_most_seeds(tmp_path, regression):
    sections = strategies_grid(["fedavg", "selective"], {"learning-rate": (0.001, 0.01)}, 2)
    target = f"fedavg{'+' if regression else '-'}0.1"
    comparison = Comparison(
        tmp_path, planned_variants(sections, (1, 2)), dict(CONFIG), 10, sections=sections, target=target
    )
    for run in comparison.runs:
        rate = comparison.settings_of(run)["learning-rate"]
        if (run.strategy, rate, run.seed) == ("fedavg", 0.01, 1):
            run.outcome = "failed"  # what is left of it is the easy seed: 0.9, more than the mean of 0.8 and 0.9
            continue
        add = {1: 0.0, 2: 0.1}[run.seed]
        run.directory = leave_run(tmp_path, run.strategy, seed=run.seed, add=add, regression=regression)
        run.outcome = "finished"
    target = measure(comparison).target
    assert target.of == "fedavg learning-rate=0.001"
    assert target.by_seed == pytest.approx({1: 0.3, 2: 0.2} if regression else {1: 0.7, 2: 0.8})


# The accuracies end with 0.8 and 0.7: all figures' lines, of what is above 1 and below 0, would be at the edge.
@pytest.mark.parametrize(
    ("target", "drawn", "said"),
    [
        ("fedavg-0.1", True, "Target: fedavg's final accuracy less 10 points (0.7000)"),
        ("fedavg+0.2", True, "Target: fedavg's final accuracy plus 20 points (1.0000)"),
        ("fedavg+0.3", False, "Target: fedavg's final accuracy plus 30 points (1.1000); no accuracy can reach it"),
        ("fedavg-0.9", False, "Target: fedavg's final accuracy less 90 points (-0.1000)"),
    ],
)
def test_a_target_that_is_no_accuracy_is_no_line_of_the_picture(tmp_path, target, drawn, said):
    found = measure(finish(comparison_in(tmp_path, ["fedavg", "selective"], target=target)))
    assert about_target(found) == said
    picture = (tmp_path / "comparison.svg").read_text()
    assert ('<path class="target"' in picture, "Target: " in picture) == (drawn, drawn)


def test_an_error_below_0_cannot_be_reached(tmp_path):
    found = measure(finish(comparison_in(tmp_path, ["fedavg"], target="fedavg-0.5"), regression=True))
    assert about_target(found) == "Target: fedavg's final RMSE less 0.5 (-0.3000); no RMSE can reach it"


@pytest.mark.parametrize(("question", "lines"), [("", 2), ("own-tests", 0), ("doubt", 0)])
def test_figures_have_a_target_where_tables_have_what_it_takes(tmp_path, question, lines):
    sections = [("Own", question, {"one": "fedavg", "small": "selective"}, {"baseline": "one"})]
    found = measure(finish(variants_in(tmp_path, sections, target="baseline-0.1")))
    drawn = [figure for figure in figures(found) if figure.plot and figure.plot.layout.shapes]
    assert len(drawn) == lines and all("Dotted: the target" in figure.caption for figure in drawn)
    assert sum("Dotted" in figure.caption for figure in figures(found)) == lines


def test_without_a_margin_the_target_is_the_final_score(tmp_path):
    found = measure(finish(comparison_in(tmp_path, ["fedavg", "selective"], target="fedavg-0")))
    assert about_target(found) == "Target: fedavg's final accuracy (0.8000)"


def test_a_changed_file_may_name_what_is_not_compared(tmp_path):
    found = measure(finish(comparison_in(tmp_path, ["fedavg"], target="nope-0.1")))
    assert about_target(found).startswith("No finished run of nope has an accuracy on the server's data")


# --- personal models ------------------------------------------------------------------------------------------------

# FedACS' in `RUNS`, on the clients' own tests after each round of 10 MB: .80, .85 and .90.


def test_personal_models_have_a_target_on_the_clients_own_tests(tmp_path):
    names, added = {"float32": "fedacs", "other": "fedacs"}, {1: 0.0, 2: 0.01, 3: 0.02}
    sections = [("S", "bytes", names, {"baseline": "float32", "within": 0.06})]
    [group] = measure(finish(variants_in(tmp_path, sections, (1, 2, 3)), added.get)).sections
    assert group.target.own_tests and group.target.by_seed == pytest.approx({1: 0.84, 2: 0.85, 3: 0.86})
    assert answer(group) == (
        "float32's final accuracy on the clients' own tests less 6 points (0.8500) is reached with 20.0 MB by float32 "
        "itself; other needs 20.0 MB, 1 times as many (undecided: 95% interval 1 to 1)."
    )
    rows = rows_of(tmp_path)
    assert [row["rounds_to_target"] for row in rows] == ["2"] * 6
    assert sorted({float(row["target_accuracy"]) for row in rows}) == pytest.approx([0.84, 0.85, 0.86])
    text = (tmp_path / "comparison.md").read_text()
    assert "accuracy, clients’ own tests" in text and "server’s data" not in text and "0.9100" in text


@pytest.mark.parametrize("target", [None, "own-0.1"])
def test_beside_global_models_personal_ones_have_no_target(tmp_path, target):
    """A global model has a score on the clients' own tests after its last round alone, whichever round reached it."""
    sections = [("S", "bytes", {"own": "fedacs", "global": "fedavg"}, {"baseline": "own", "within": 0.15})]
    [group] = measure(finish(variants_in(tmp_path, sections, target=target))).sections
    assert group.target is None and [result.figures["bytes_to_target"] for result in group.variants] == [None] * 2
    assert answer(group) == "No finished run of own has an accuracy on the server's data, so there is no target."


def test_a_global_model_that_is_not_scored_yet_decides_as_one_that_is(tmp_path):
    comparison = comparison_in(tmp_path, ["fedacs", "fedavg"], target=0.85)
    comparison.runs[1].outcome = "running"
    found = measure(finish(comparison))
    assert not found.target.own_tests and found.variants[0].figures["rounds_to_target"] is None


@pytest.mark.parametrize("outcome", ["failed", "running"])
def test_a_personal_model_that_is_not_scored_yet_decides_as_one_that_is(tmp_path, outcome):
    comparison = comparison_in(tmp_path, ["fedacs", "fedamp"], (1, 2), target=0.85)
    for run in comparison.runs:
        if run.strategy == "fedamp":
            run.outcome = outcome
    found = measure(finish(comparison))
    assert found.target.own_tests and found.variants[0].figures["rounds_to_target"].mean == 2
    assert [row["bytes_to_target"] for row in rows_of(tmp_path)] == ["20000000", ""] * 2


def test_a_global_baselines_target_is_on_the_servers_data(tmp_path):
    sections = [("S", "bytes", {"own": "fedacs", "global": "fedavg"}, {"baseline": "global", "within": 0.1})]
    [group] = measure(finish(variants_in(tmp_path, sections))).sections
    assert not group.target.own_tests and group.target.score == pytest.approx(0.7)
    assert group.variants[0].figures["rounds_to_target"] is None
    assert answer(group) == (
        "global's final accuracy less 10 points (0.7000) is reached with 40.0 MB by global, the baseline; own has no "
        "score on the server's data."
    )
    assert "no score on the server&#39;s data" in draw_bars(measure(group.comparison))


@pytest.mark.parametrize(
    ("strategies", "target", "said", "rounds"),
    [
        (["fedacs"], 0.85, "an accuracy of 0.8500 on the clients' own tests", "2"),
        (["fedacs"], None, "an accuracy of 0.8100, 90% of fedacs's final accuracy on the clients' own tests", "2"),
        (["fedacs"], "fedacs-0.1", "fedacs's final accuracy on the clients' own tests less 10 points (0.8000)", "1"),
        (["fedacs", "fedavg"], 0.75, "an accuracy of 0.7500 on the server's data", ""),
    ],
)
def test_where_all_models_are_personal_the_target_is_on_the_clients_own_tests(
    tmp_path, strategies, target, said, rounds
):
    found = measure(finish(comparison_in(tmp_path, strategies, target=target)))
    assert about_target(found) == f"Target: {said}" and said in (tmp_path / "comparison.md").read_text()
    assert rows_of(tmp_path)[0]["rounds_to_target"] == rounds
    data = "the server's data" if "server" in said else "the clients' own tests"
    assert f"on {data}.</desc>" in (tmp_path / "comparison.svg").read_text().replace("&#39;", "'")
    for name in ("comparison.csv", "runs.csv"):
        assert rows_of(tmp_path, name)[0]["target_data"] == ("server" if "server" in said else "clients")
    assert f"Dotted: the target on {data}." in figures(found)[0].caption


def test_a_target_on_the_clients_own_tests_may_be_an_error(tmp_path):
    found = measure(finish(comparison_in(tmp_path, ["fedacs"], target="fedacs+0.05"), regression=True))
    # Of the errors in `RUNS`, 1 - .85, 1 - .90 and 1 - .95, they have .05 less: .10, .05 and 0.
    assert about_target(found) == "Target: fedacs's final RMSE on the clients' own tests plus 0.05 (0.0500)"
    assert rows_of(tmp_path)[0]["rounds_to_target"] == "2"


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_takes_a_final_score_and_another_one_when_it_is_resumed(compare):
    done = compare("--strategies", "fedavg,selective", "--target", "fedavg-0.1")
    assert done.exit_code == 0, done.output
    assert "Target: fedavg's final accuracy less 10 points (0.7000)" in done.output
    (folder,) = compare.runs.glob("*-compare")
    assert read_comparison(folder).target == "fedavg-0.1"
    started = len(compare.started)
    done = compare("--resume", str(folder), "--target", "selective-0.2", config=None)
    assert done.exit_code == 0 and "Target: selective's final accuracy less 20 points (0.5000)" in done.output
    assert read_comparison(folder).target == "selective-0.2" and len(compare.started) == started
    done = compare("--resume", str(folder), "--target", "fedacs-0.2", config=None)
    assert done.exit_code == 1 and "'fedacs' is not compared" in " ".join(done.output.split())
    assert read_comparison(folder).target == "selective-0.2"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("fedavg-0.005", ["--target fedavg-0.005: 'fedavg' is not compared", "Allowed are selective, fedacs", "Add"]),
        ("baseline-0.005", ["'baseline' is fedavg, which is not compared", "Add the strategy with --strategies"]),
        ("fedavg-1e-3", ["'fedavg-1e' is not compared", "A margin is written without an exponent: 0.001, not 1e-3"]),
        ("selective-5", ["the margin is 5, expected less than 1", "0.005 is half a point"]),
        ("selective", ["--target 'selective': expected a score of at least 0", "such as fedavg-0.005"]),
        ("-0.1", ["expected a score of at least 0"]),
    ],
)
def test_a_target_that_nothing_has_is_refused_before_the_first_run(compare, target, said):
    done = compare("--strategies", "selective,fedacs", f"--target={target}")
    message = " ".join(done.output.split())
    assert done.exit_code == 1 and all(text in message for text in said), message
    assert compare.started == [] and not compare.runs.exists()


FILE = """
target = "{target}"
[common]
num-server-rounds = 3
[[section]]
title = "Bytes"
question = "bytes"
[[section.variant]]
name = "FedAvg"
strategy = "fedavg"
[[section.variant]]
name = "small"
strategy = "selective"
[[section]]
title = "Own"
[[section.variant]]
name = "one"
strategy = "fedavg"
"""
SECOND = """
[[section.variant]]
name = "two"
strategy = "selective"
"""
OWN_TESTS = ('title = "Own"', 'title = "Own"\nquestion = "own-tests"')


def test_a_file_has_a_final_score_of_every_section(compare, tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text(FILE.format(target="baseline-0.1"))
    done = compare("--variants", str(path))
    assert done.exit_code == 0, done.output
    assert "Bytes: FedAvg's final accuracy less 10 points (0.7000) is reached with 30.0 MB by small" in done.output
    assert "Target: one's final accuracy less 10 points (0.7000)" in done.output


def test_a_section_that_does_not_count_need_not_have_the_name(compare, tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text(FILE.format(target="FedAvg-0.1").replace(*OWN_TESTS) + SECOND)
    done = compare("--variants", str(path))
    assert done.exit_code == 0, done.output
    assert "Bytes: FedAvg's final accuracy less 10 points (0.7000) is reached with 30.0 MB by small" in done.output
    [folder] = compare.runs.glob("*-compare")
    assert [row["target_accuracy"] for row in rows_of(folder, "comparison.csv") if row["variant"] == "one"] == [""]


def test_a_name_is_that_of_a_variant_also_where_no_section_counts(compare, tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text(FILE.format(target="nope-0.1").replace('"bytes"', '"own-tests"').replace(*OWN_TESTS) + SECOND)
    done = compare("--variants", str(path))
    assert done.exit_code == 1 and "section 'Bytes' has no variant 'nope'" in " ".join(done.output.split())


@pytest.mark.parametrize(("baseline", "allowed"), [("FedAvg", False), ("baseline", True)])
def test_a_variant_that_is_named_baseline_is_the_baseline(compare, tmp_path, baseline, allowed):
    path = tmp_path / "variants.toml"
    text = FILE.format(target="baseline-0.1").replace('name = "small"', 'name = "baseline"')
    path.write_text(text.replace('question = "bytes"', f'question = "bytes"\nbaseline = "{baseline}"'))
    done = compare("--variants", str(path))
    said = "section 'Bytes' has a variant 'baseline', but its baseline is 'FedAvg'. Give the variant another name"
    assert (done.exit_code, said in " ".join(done.output.split())) == ((0, False) if allowed else (1, True))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("FedAvg-0.1", ["target FedAvg-0.1: section 'Own' has no variant 'FedAvg'. Allowed are baseline, one."]),
        ("half", ["target='half': expected a score of at least 0"]),
    ],
)
def test_a_file_with_a_target_that_a_section_does_not_have_is_refused(compare, tmp_path, target, said):
    path = tmp_path / "variants.toml"
    path.write_text(FILE.format(target=target))
    done = compare("--variants", str(path))
    message = " ".join(done.output.split())
    assert done.exit_code == 1 and all(text in message for text in said), message
    assert compare.started == [] and not compare.runs.exists()
