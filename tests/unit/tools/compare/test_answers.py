"""What sections answer: differences paired by seed with their intervals, and the sentences, tables and files."""

import csv
import io
import math
import statistics

import pytest
from rich.console import Console
from scipy import stats

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory
from tepal.tools.compare.answers import Compared, answer, paired
from tepal.tools.compare.bars import draw_bars
from tepal.tools.compare.comparison import Measured, measure, results_of
from tepal.tools.compare.runs import write_comparison
from tepal.tools.compare.tables import about_seeds, comparison_table
from tepal.tools.compare.text_files import latex, markdown, runs_csv, strategies_csv
from tests.comparisons import variants_in

SEEDS = (1, 2, 3)
MB = 1_000_000

# --- intervals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "baseline"),
    [([0.8, 0.83, 0.9], [0.7, 0.8, 0.8]), ([0.8, 0.7], [0.7, 0.8]), ([0.5, 0.6, 0.7, 0.9], [0.1, 0.1, 0.2, 0.1])],
)
def test_a_difference_has_students_interval_of_the_pairs(variant, baseline):
    found = paired(dict(enumerate(variant)), dict(enumerate(baseline)), len(variant))
    test = stats.ttest_rel(variant, baseline)
    expected = test.confidence_interval(0.95)
    assert found.mean == pytest.approx(statistics.fmean(variant) - statistics.fmean(baseline))
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.undecided == (test.pvalue > 0.05), "the interval includes 0 where the test rejects nothing"
    assert found.verdict == ("undecided" if test.pvalue > 0.05 else "higher")


def test_a_ratio_has_the_interval_of_logarithms_as_factors():
    variant, baseline = {1: 2.0, 2: 4.0, 3: 5.0}, {1: 21.0, 2: 38.0, 3: 55.0}
    found = paired(variant, baseline, 3, ratio=True)
    test = stats.ttest_rel([math.log(baseline[k]) for k in SEEDS], [math.log(variant[k]) for k in SEEDS])
    expected = test.confidence_interval(0.95)
    assert found.mean == pytest.approx((21 / 2 * 38 / 4 * 55 / 5) ** (1 / 3))
    assert found.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert found.verdict == "higher" and not found.undecided
    assert paired(baseline, variant, 3, ratio=True).verdict == "lower"


def test_pairs_are_of_the_seeds_that_both_have():
    found = paired({1: 0.5, 2: 0.9, 4: 0.8}, {4: 0.1, 1: 0.2, 3: 0.9}, 4)
    assert (found.pairs, found.seeds) == (2, 4) and found.mean == pytest.approx((0.3 + 0.7) / 2)
    assert "2 of 4 seeds" in found.text
    assert paired({1: 0.5}, {2: 0.5}, 2) is None


def test_one_pair_of_several_seeds_is_undecided_and_one_seed_claims_nothing():
    found = paired({1: 0.9}, {1: 0.1}, 3)
    assert found.interval is None and found.undecided and found.text == "+0.8000 (1 of 3 seeds, undecided)"
    found = paired({1: 0.9}, {1: 0.1}, 1)
    assert found.interval is None and not found.undecided and (found.text, found.verdict) == ("+0.8000", "")


def test_equal_figures_are_undecided_and_a_ratio_to_nothing_is_unknown():
    found = paired(dict.fromkeys(SEEDS, 0.5), dict.fromkeys(SEEDS, 0.5), 3)
    assert found.interval == (0, 0) and found.undecided
    assert paired({1: 0.0}, {1: 3.0}, 1, ratio=True) is None and paired({1: 3.0}, {1: 0.0}, 1, ratio=True) is None


def test_a_ratio_needs_all_seeds():
    """Those that reach the target may be the easy ones."""
    found = paired({1: 1.0, 2: 1.0}, {1: 10.0, 2: 10.0, 3: 10.0}, 3, ratio=True)
    assert found.interval == pytest.approx((10, 10)) and found.undecided


@pytest.mark.parametrize("value", [1e300, -1e300, 1e-320])
def test_no_number_is_too_large(value):
    found = paired({1: value, 2: 0.0}, {1: -value, 2: 1.0}, 2)
    assert found is None or found.undecided
    assert paired({1: abs(value)}, {1: 1.0}, 1, ratio=True).mean > 0


# --- answers --------------------------------------------------------------------------------------------------------


def results(folder, sections, rounds, seeds=SEEDS, **values):
    """Results of runs that finished. `rounds`: (name, seed) → records."""
    comparison = variants_in(folder, sections, seeds, **values)
    for run in comparison.runs:
        run.outcome = "finished"
    return results_of(
        comparison, [Measured(run, rounds.get((run.variant, run.seed), []), {}) for run in comparison.runs]
    )


def scores(*accuracies, megabytes):
    """Rounds on the server's data that transfer this much each, half of it up."""
    half = megabytes * MB // 2
    return [
        RoundRecord(round=k, accuracy=accuracy, accuracy_of="server", bytes_down=half, bytes_up=half)
        for k, accuracy in enumerate(accuracies, start=1)
    ]


BYTES = [("Fewer bytes", "bytes", {"FedAvg": "fedavg", "small": "selective", "never": "fedacs"}, {"within": 0.005})]


def test_bytes_are_counted_to_the_baselines_accuracy_less_what_is_allowed(tmp_path):
    rounds = {
        ("FedAvg", 7): scores(0.5, 0.97, 0.98, 0.9861, megabytes=10),
        ("small", 7): scores(0.7, 0.9811, 0.9, megabytes=2),
        ("never", 7): scores(0.7, 0.981, megabytes=2),
    }
    found = results(tmp_path, BYTES, rounds, seeds=(7,))
    [group] = found.sections
    assert group.target.score == pytest.approx(0.9811)
    assert answer(group) == (
        "FedAvg's final accuracy less 0.5 points (0.9811) is reached with 4.00 MB by small; FedAvg needs 40.0 MB, 10 "
        "times as many; never does not reach it."
    )
    row = {row["variant"]: row for row in csv.DictReader(io.StringIO(strategies_csv(found)))}
    assert float(row["small"]["times_fewer_bytes_to_target"]) == pytest.approx(10)
    assert row["small"]["times_fewer_bytes_to_target_low"] == "" == row["small"]["times_fewer_bytes_to_target_verdict"]
    assert (row["never"]["bytes_to_target"], row["never"]["times_fewer_bytes_to_target"]) == ("", "")
    assert row["FedAvg"]["section"] == "Fewer bytes" and row["FedAvg"]["answer"] == answer(group)
    assert about_seeds(found) == "One seed, 7: differences may be chance"


@pytest.mark.parametrize(
    ("rounds", "values", "expected"),
    [
        (
            {"FedAvg": (0.5, 0.9), "small": (0.7, 0.8, 0.9), "never": (0.9,)}, {"target": 0.9},
            "An accuracy of 0.9000 is reached with 10.0 MB by never; FedAvg needs 20.0 MB, 2 times as many.",
        ),
        (
            {"FedAvg": (0.95,), "small": (0.7, 0.95), "never": (0.5,)}, {},
            "FedAvg's final accuracy less 0.5 points (0.9450) is reached with 10.0 MB by FedAvg itself; small needs "
            "20.0 MB, 2 times as many; never does not reach it.",
        ),
        (
            {"FedAvg": (0.95,), "small": (0.7,), "never": (0.5,)}, {},
            "FedAvg's final accuracy less 0.5 points (0.9450) is reached with 10.0 MB by FedAvg, the baseline; small "
            "does not reach it; never does not reach it.",
        ),
        (
            {"FedAvg": (0.5,), "small": (0.7,), "never": (0.5,)}, {"target": 0.6},
            "An accuracy of 0.6000 is reached with 10.0 MB by small; FedAvg does not reach it; never does not reach "
            "it.",
        ),
        ({"FedAvg": (0.5,)}, {"target": 0.6}, "An accuracy of 0.6000 is reached by no variant."),
        (
            {"small": (0.5,)}, {},
            "No finished run of FedAvg has an accuracy on the server's data, so there is no target.",
        ),
    ],
)  # fmt: skip
def test_whoever_reaches_the_target_the_answer_is_a_sentence(tmp_path, rounds, values, expected):
    runs = {(name, 7): scores(*accuracies, megabytes=10) for name, accuracies in rounds.items()}
    assert answer(results(tmp_path, BYTES, runs, seeds=(7,), **values).sections[0]) == expected


def test_bytes_that_were_not_counted_are_not_known(tmp_path):
    """A run that reached the target without its bytes is neither one that did not, nor part of a mean."""
    uncounted = [RoundRecord(round=1, accuracy=0.95, accuracy_of="server", bytes_down=MB, seconds=2.0)]
    rounds = {("FedAvg", 7): scores(0.95, megabytes=4), ("small", 7): uncounted, ("never", 7): scores(0.5, megabytes=2)}
    found = results(tmp_path, BYTES, rounds, seeds=(7,))
    assert answer(found.sections[0]) == (
        "FedAvg's final accuracy less 0.5 points (0.9450) is reached with 4.00 MB by FedAvg, the baseline; the bytes "
        "of small are not known; never does not reach it."
    )
    row = {row["variant"]: row for row in csv.DictReader(io.StringIO(strategies_csv(found)))}["small"]
    keys = ("bytes_to_target", "bytes_down_to_target", "bytes_up_to_target", "seconds_to_target", "reached_target")
    assert [row[key] for key in keys] == ["", "1000000.0", "", "2.0", "1"]
    assert "bytes not known" in draw_bars(found)
    found = results(tmp_path, BYTES, {**rounds, ("FedAvg", 7): uncounted}, seeds=(7,))
    assert answer(found.sections[0]).endswith("is reached, but the bytes of FedAvg and small until then are not known.")
    rounds = {("small", 1): scores(0.95, megabytes=2), ("small", 2): uncounted}
    [_, small, _] = results(tmp_path, BYTES, rounds, seeds=(1, 2), target=0.9).variants
    assert small.figures["rounds_to_target"].runs == 2 and small.figures["bytes_to_target"] is None


def test_a_target_that_the_initial_model_has_needs_no_bytes(tmp_path):
    start = [RoundRecord(round=0, accuracy=0.5, accuracy_of="server", bytes_down=0, bytes_up=0)]
    rounds = {(name, 7): start + scores(0.5, megabytes=2) for name in ("FedAvg", "small", "never")}
    said = answer(results(tmp_path, BYTES, rounds, seeds=(7,)).sections[0])
    assert said.endswith("(0.4950) is reached by the initial model, before anything is transferred.")


def test_each_seed_has_the_target_of_its_own_baseline(tmp_path):
    finals = {1: 0.90, 2: 0.95, 3: 0.85}
    two = [("Bytes", "bytes", {"FedAvg": "fedavg", "small": "selective"}, {})]
    # The baseline has its own final accuracy after its second round; the variant needs 4, 6 or 5 MB.
    rounds = {("FedAvg", seed): scores(0.1, final, megabytes=20) for seed, final in finals.items()}
    rounds |= {
        ("small", 1): scores(0.2, 0.89, 0.90, 0.90, megabytes=2)[:2] + scores(0.2, 0.89, 0.895, megabytes=2)[2:],
        ("small", 2): scores(0.2, 0.9, 0.946, megabytes=2),
        ("small", 3): scores(0.2, 0.84, 0.846, megabytes=2),
    }
    found = results(tmp_path, two, rounds)
    [group] = found.sections
    assert group.target.by_seed == pytest.approx({seed: final - 0.005 for seed, final in finals.items()})
    needed = {1: 6.0, 2: 6.0, 3: 6.0}
    assert found.sections[0].variants[1].by_seed("bytes_to_target") == {seed: n * MB for seed, n in needed.items()}
    assert answer(group) == (
        "FedAvg's final accuracy less 0.5 points (0.8950) is reached with 6.00 MB by small; FedAvg needs 40.0 MB, "
        "6.67 times as many (95% interval 6.67 to 6.67)."
    )
    targets = [float(row["target_accuracy"]) for row in csv.DictReader(io.StringIO(runs_csv(found)))]
    assert targets == pytest.approx([0.895, 0.895, 0.945, 0.945, 0.845, 0.845])


def test_bytes_that_differ_by_chance_are_undecided(tmp_path):
    two = [("Bytes", "bytes", {"FedAvg": "fedavg", "small": "selective"}, {})]
    needs = {1: (4, 2), 2: (2, 4), 3: (4, 3)}  # MB of the baseline and of the variant
    rounds = {}
    for seed, (base, variant) in needs.items():
        rounds["FedAvg", seed] = scores(*[0.1] * (base - 1), 0.9, megabytes=1)
        rounds["small", seed] = scores(*[0.1] * (variant - 1), 0.9, megabytes=1)
    found = results(tmp_path, two, rounds)
    logs = [math.log(base / variant) for base, variant in needs.values()]
    low, high = (math.exp(end) for end in stats.t.interval(0.95, 2, statistics.fmean(logs), stats.sem(logs)))
    said = answer(found.sections[0])
    assert said.endswith(f"1.1 times as many (undecided: 95% interval {low:.3g} to {high:.3g}).")
    row = {row["variant"]: row for row in csv.DictReader(io.StringIO(strategies_csv(found)))}["small"]
    assert row["times_fewer_bytes_to_target_verdict"] == "undecided"
    assert float(row["times_fewer_bytes_to_target_high"]) == pytest.approx(high)
    assert "undecided" in markdown(found) and "undecided" in shown(found)


def test_what_reaches_the_target_with_some_seeds_is_not_the_best(tmp_path):
    rounds = {("FedAvg", seed): scores(0.1, 0.9, megabytes=20) for seed in SEEDS}
    rounds |= {("small", seed): scores(0.9 if seed == 1 else 0.5, megabytes=1) for seed in SEEDS}
    rounds |= {("never", seed): scores(0.1, 0.9, megabytes=15) for seed in SEEDS}
    said = answer(results(tmp_path, BYTES, rounds).sections[0])
    assert "is reached with 30.0 MB by never; FedAvg needs 40.0 MB, 1.33 times as many" in said
    assert said.endswith("; small reaches it with 1 of 3 seeds.")


def own(accuracy, spread=0.1):
    return [RoundRecord(round=1, clients_accuracy=accuracy, clients_spread=spread, accuracy_of="clients")]


OWN = [("Own models", "own-tests", {"one": "fedavg", "each": "fedacs", "near": "ditto"}, {"baseline": "one"})]


def test_own_tests_name_the_best_the_baseline_and_the_others(tmp_path):
    found = results(tmp_path, OWN, {("one", 7): own(0.7), ("each", 7): own(0.9), ("near", 7): own(0.65)}, seeds=(7,))
    assert answer(found.sections[0]) == (
        "The highest accuracy on the clients' own tests is that of each: 0.9000 (+0.2000); one has 0.7000 (the "
        "baseline), near 0.6500 (-0.0500)."
    )
    assert "0.9000 ±.1000" in shown(found)
    found = results(tmp_path, OWN, {("one", 7): own(0.7), ("near", 7): own(0.6)}, seeds=(7,))
    assert answer(found.sections[0]) == (
        "The highest accuracy on the clients' own tests is that of one: 0.7000 (the baseline); near has 0.6000 "
        "(-0.1000); each was not scored."
    )
    assert answer(results(tmp_path, OWN, {}).sections[0]) == "No result was scored on the clients' own tests."


def test_own_tests_of_several_seeds_have_intervals(tmp_path):
    base, each, near = (0.70, 0.72, 0.74), (0.90, 0.91, 0.95), (0.75, 0.70, 0.74)
    rounds = {
        (name, seed): own(value)
        for name, values in (("one", base), ("each", each), ("near", near))
        for seed, value in zip(SEEDS, values, strict=True)
    }
    found = results(tmp_path, OWN, rounds)
    said = answer(found.sections[0])
    low, high = stats.ttest_rel(each, base).confidence_interval(0.95)
    assert f"each: 0.9200 (+0.2000, 95% interval {low:+.4f} to {high:+.4f}); one has 0.7200 (the baseline)" in said
    low, high = stats.ttest_rel(near, base).confidence_interval(0.95)
    assert said.endswith(f"near 0.7300 (+0.0100, 95% interval {low:+.4f} to {high:+.4f}, undecided).")
    assert "undecided" in shown(found)
    assert f"+0.0100 ({low:+.4f} to {high:+.4f}, undecided)" in markdown(found)


def test_a_regressions_best_is_its_least_error(tmp_path):
    def wrong(error):
        return [RoundRecord(round=1, rmse=error, clients_rmse=error, accuracy_of="server", bytes_down=MB, bytes_up=0)]

    sections = [
        ("Own", "own-tests", {"a": "fedavg", "b": "fedacs"}, {}),
        ("Bytes", "bytes", {"c": "fedavg", "d": "fedacs"}, {}),
    ]
    rounds = {("a", 7): wrong(0.2), ("b", 7): wrong(0.3), ("c", 7): wrong(0.2), ("d", 7): wrong(0.204)}
    own_answer, bytes_answer = map(answer, results(tmp_path, sections, rounds, seeds=(7,)).sections)
    assert own_answer == (
        "The lowest RMSE on the clients' own tests is that of a: 0.2000 (the baseline); b has 0.3000 (+0.1000)."
    )
    assert bytes_answer.startswith("c's final RMSE plus 0.005 (0.2050) is reached with 1.00 MB by c itself; d")


DOUBT = [("Doubt", "doubt", {"single": "fedavg", "ensemble": "fedensemble"}, {"baseline": "single"})]


def doubtful(accuracy, loss, error, letters, noise=None):
    return [
        RoundRecord(round=1, accuracy=0.1, loss=9.0, accuracy_of="server", calibration_error=0.9, flagged_letters=0.1),
        RoundRecord(round=2, accuracy=accuracy, loss=loss, accuracy_of="server", calibration_error=error,
               flagged_letters=letters, flagged_noise=noise),
        RoundRecord(round=3),
    ]  # fmt: skip


def test_doubt_compares_what_was_measured(tmp_path):
    rounds = {
        ("single", 7): doubtful(0.9, 0.4, 0.08, 0.45, 1.0),
        ("ensemble", 7): doubtful(0.92, 0.25, 0.02, 0.714, 0.9),
    }
    found = results(tmp_path, DOUBT, rounds, seeds=(7,))
    assert answer(found.sections[0]) == (
        "Compared with single (in brackets), ensemble has accuracy 0.9200 (0.9000), loss 0.2500 (0.4000), calibration "
        "error 0.0200 (0.0800), 71.4% of letters flagged (45.0%) and 90.0% of noise flagged (100.0%)."
    )
    row = {row["variant"]: row for row in csv.DictReader(io.StringIO(strategies_csv(found)))}["ensemble"]
    assert (float(row["calibration_error"]), float(row["flagged_letters"])) == (0.02, 0.714)
    assert row["flagged_covered"] == "" and float(row["loss_vs_baseline"]) == pytest.approx(-0.15)
    assert "71.4%" in shown(found)
    runs = [row for row in csv.DictReader(io.StringIO(runs_csv(found)))]
    assert [float(row["loss"]) for row in runs] == [0.4, 0.25]


def test_runs_csv_has_what_auto_left_out_in_the_mean_over_the_rounds(tmp_path):
    plain = [RoundRecord(round=1, accuracy=0.5, accuracy_of="server")]
    auto = [
        RoundRecord(round=1, accuracy=0.5, accuracy_of="server", wire_left_out_up=0.5),
        RoundRecord(round=2, accuracy=0.5, accuracy_of="server", wire_left_out_up=0.75, wire_left_out_down=0.5),
    ]

    def lines(**rounds):
        one = [("", "", dict.fromkeys(rounds, "fedavg"), {})]
        found = results(tmp_path, one, {(name, 7): each for name, each in rounds.items()}, seeds=(7,))
        return [*csv.DictReader(io.StringIO(runs_csv(found)))]

    first, second = lines(a=plain, b=auto)
    assert (first["wire_left_out_up"], first["wire_left_out_down"]) == ("", "")
    assert (float(second["wire_left_out_up"]), float(second["wire_left_out_down"])) == (0.625, 0.5)
    assert not [key for key in second if key.startswith("wire_budget")], "no run has a budget"
    assert not [key for key in lines(a=plain, b=plain)[0] if key.startswith("wire")]


def test_doubt_of_several_seeds_says_what_is_undecided(tmp_path):
    rounds = {("single", seed): doubtful(0.9, 0.4, 0.08 + 0.01 * seed, 0.45) for seed in SEEDS}
    rounds |= {("ensemble", seed): doubtful(0.9, 0.3 + 0.001 * seed, 0.09 + 0.01 * (seed % 2), 0.7) for seed in SEEDS}
    found = results(tmp_path, DOUBT, rounds)
    said = answer(found.sections[0])
    assert "accuracy 0.9000 (0.9000, undecided), loss 0.3020 (0.4000)," in said
    assert "calibration error 0.0967 (0.1000, undecided) and 70.0% of letters flagged (45.0%)." in said
    assert "undecided" in shown(found)


def test_the_doubt_of_a_model_that_diverged_is_not_that_from_before(tmp_path):
    diverged = [
        RoundRecord(round=number, accuracy=accuracy, loss=loss, accuracy_of="server", calibration_error=0.1 * number)
        for number, (accuracy, loss) in enumerate([(0.8, 0.5), (0.1, None), (0.1, None)], start=1)
    ]
    rounds = {("single", 7): doubtful(0.9, 0.4, 0.08, 0.45), ("ensemble", 7): diverged}
    found = results(tmp_path, DOUBT, rounds, seeds=(7,))
    assert (found.runs[1].server_score, found.runs[1].doubt["loss"]) == (0.1, None)
    assert answer(found.sections[0]) == (
        "Compared with single (in brackets), ensemble has accuracy 0.1000 (0.9000) and calibration error 0.3000 "
        "(0.0800)."
    )
    assert [row["loss"] for row in csv.DictReader(io.StringIO(runs_csv(found)))] == ["0.4", ""]


@pytest.mark.parametrize("baseline", [[], [RoundRecord(round=1, accuracy=0.9, accuracy_of="personal")]])
def test_doubt_of_a_baseline_without_figures_has_no_answer_yet(tmp_path, baseline):
    rounds = {("single", 7): baseline, ("ensemble", 7): doubtful(0.9, 0.4, 0.08, 0.45)}
    found = results(tmp_path, DOUBT, rounds, seeds=(7,))
    assert answer(found.sections[0]).startswith("Loss, calibration error and flagged images were not measured")


def test_runs_that_did_not_finish_decide_nothing(tmp_path):
    """The baseline failed with every seed after two rounds, and the other variant has gone on."""
    rounds = {("base", seed): scores(0.1, 0.2 + seed / 1000, megabytes=1) for seed in SEEDS}
    rounds |= {("other", seed): scores(0.1, 0.2, 0.6 + seed / 900, megabytes=1) for seed in SEEDS}
    comparison = variants_in(tmp_path, [("", "", {"base": "fedavg", "other": "fedavg"}, {"baseline": "base"})], SEEDS)
    compared = Compared("server_accuracy", "accuracy")

    def group_in():
        measured = [Measured(run, rounds[run.variant, run.seed], {}) for run in comparison.runs]
        return results_of(comparison, measured).sections[0]

    for run in comparison.runs:
        run.outcome = "finished"
    group = group_in()
    assert compared.of(group.variants[1], group).verdict == "higher"
    for run in comparison.runs:
        run.outcome = "failed" if run.variant == "base" else "finished"
    group = group_in()
    found = compared.of(group.variants[1], group)
    assert found.text.endswith(", not finished, undecided)")
    assert found.verdict == "undecided" and found.mean == pytest.approx(0.4, abs=0.01)


def test_doubt_that_was_not_measured_has_no_answer(tmp_path):
    found = results(tmp_path, DOUBT, {("single", 7): scores(0.9, megabytes=1)}, seeds=(7,))
    assert answer(found.sections[0]).startswith("Loss, calibration error and flagged images were not measured")


# --- all forms ------------------------------------------------------------------------------------------------------


def shown(found, width=80):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(comparison_table(found), soft_wrap=True)
    return out.getvalue()


EVIL = "<script>alert(1)</script> | [a](http://b) \\input{x} \x1b[2J"


def everything(folder, seeds=SEEDS, **more):
    """A section of each question, and one of none, with titles that are markup."""
    sections = [
        (f"Bytes {EVIL}", "bytes", {"FedAvg": "fedavg", "x" * 64: "selective"}, {"about": f"About {EVIL}"}),
        ("Own", "own-tests", {"one": "fedavg", "y" * 64: "fedacs"}, {}),
        ("Doubt", "doubt", {"single": "fedavg", "z" * 64: "fedensemble"}, {}),
        ("Nothing asked", "", {"plain": "fedavg", "w-2": "selective"}, {}),
    ]
    rounds = {}
    for seed in seeds:
        for name in ("FedAvg", "x" * 64, "plain", "w-2"):
            rounds[name, seed] = scores(0.5, 0.9 + 0.01 * seed, megabytes=seed + len(name))
        for name in ("one", "y" * 64):
            rounds[name, seed] = own(0.5 + 0.01 * seed * len(name) ** 0.5)
        for name in ("single", "z" * 64):
            rounds[name, seed] = doubtful(0.9, 0.3 + 0.01 * (seed * len(name) % 5), 0.0234, 0.9876, 0.5)
    return results(folder, sections, rounds, seeds, **more)


@pytest.mark.parametrize("seeds", [(7,), SEEDS])
def test_a_terminal_of_80_columns_has_all_tables_and_ends_with_answers_and_page(tmp_path, seeds):
    found = everything(tmp_path, seeds)
    lines = shown(found).splitlines()
    rules = [k for k, line in enumerate(lines) if line.startswith("──")]
    assert len(rules) == 4
    for k in rules:
        table = lines[k - 2 : k + 1]
        for line in lines[k + 1 :]:
            if not line.strip() or line.startswith(("Target", "Flagged")):
                break
            table.append(line)
        assert max(map(len, table)) <= 80 and "…" not in "".join(table)
    answers = [f"{group.section.title}: {answer(group)}" for group in found.sections[:3]]
    assert lines[-2:] == ["", f"{found.comparison.folder / 'comparison.html'}  (open it in a browser)"]
    assert [line.replace("\\x1b", "\x1b") for line in lines[-5:-2]] == answers
    assert ("One seed, 7" in shown(found)) == (len(seeds) == 1)


def test_every_form_groups_the_variants_and_shows_titles_as_text(tmp_path):
    found = everything(tmp_path)
    text = markdown(found)
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(heads) == 4 and heads[1] == "## Own"
    assert "<script>" not in text and "\x1b" not in text
    assert text.index("## Own") < text.index("| one |") < text.index("The highest accuracy") < text.index("## Doubt")
    tex = latex(found)
    assert tex.count(r"\begin{tabular}") == 4 and "\x1b" not in tex
    assert all(line.startswith("%") for line in tex.splitlines() if "input" in line or "script" in line)
    rows = list(csv.DictReader(io.StringIO(strategies_csv(found))))
    assert [row["section"] for row in rows][2:] == ["Own", "Own", "Doubt", "Doubt", "Nothing asked", "Nothing asked"]
    assert len({row["variant"] for row in rows}) == 8 and all(None not in row for row in rows)
    assert rows[-1]["answer"] == "" == rows[-1]["baseline"]


def test_the_page_has_a_part_for_each_section(tmp_path):
    comparison = everything(tmp_path).comparison
    for run in comparison.runs:
        directory = RunDirectory.create(tmp_path, run.strategy, {"strategy": run.strategy, "seed": run.seed})
        for line in scores(0.5, 0.9, megabytes=3):
            directory.append(line)
        directory.write_summary()
        run.directory = directory.path
    comparison.save()
    page = write_comparison(comparison).read_text()
    assert "<script>alert" not in page and "\x1b" not in page
    assert page.count('<h2 id="section-') == 4 and page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2
    keys = [f"accuracy-rounds{number}" for number in ("", "-2", "-3", "-4")]
    assert all(page.count(f'<div class="plot" id="{key}"') == 1 for key in keys)
    assert all(answer(group) in page.replace("&#39;", "'") for group in measure(comparison).sections[1:3])
    assert "is reached with" in page
    for name in ("x" * 64, "y" * 64):
        assert page.count(f"--s-{name}: #") == 2
