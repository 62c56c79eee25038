"""`tepal reproduce`: trials that are computed once, tables with the paper's numbers, and the experiments' claims."""

import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tepal.records.run_directory import RunInUse, held
from tepal.report.page import Figure
from tepal.strategies import RoundFailed
from tepal.tools.cli.main import main
from tepal.tools.reproduce import ensemble_toy, runner
from tepal.tools.reproduce.ensemble_toy import PAPER, EnsembleToy, bias_and_variance, centres_of, data_of, trained
from tepal.tools.reproduce.experiment import HOLDS, MissingData, Reproduction, Trial, TrialInputs, table
from tepal.tools.reproduce.fedfrozen_costs import FedFrozenCosts
from tepal.tools.reproduce.runner import UnknownExperiment, find_experiment, reproduce
from tests.quiet import quiet  # noqa: F401

NOWHERE = TrialInputs(Path())


class Squares:
    """An experiment for tests: squares of numbers."""

    name, title, paper = "squares", "Squares of <numbers>", "Nobody, Table 1"
    deviations = ("The paper has no zero.",)

    def __init__(self, numbers=(0, 1, 2), fails=()):
        self.numbers, self.fails, self.computed = numbers, fails, []

    def data(self, full):
        return ()

    def weights(self, full):
        return {}

    def scale(self, full):
        return "All of it." if full else "Few numbers."

    def trials(self, full):
        return [Trial(f"square-{n}", {"number": n}) for n in self.numbers]

    def compute(self, trial, inputs):
        number = trial.options["number"]
        if number in self.fails:
            raise self.fails[number]
        self.computed.append(number)
        return {"square": number * number}

    def results(self, found):
        rows = [(name, of["square"], None) for name, of in found.items()]
        figure = Figure("squares", "Squares", "None.", None)
        return Reproduction([table("All squares", ("cell", "ours", "paper"), rows)], [figure], ["They grow."])


def results(page):
    return (page.parent / "results.md").read_text()


def test_a_trial_is_computed_once_and_again_only_for_other_options(tmp_path):
    experiment, lines = Squares(), []
    page = reproduce(experiment, tmp_path, full=False, log=lines.append)
    assert page == tmp_path / "squares" / "index.html" and experiment.computed == [0, 1, 2]
    assert "Few numbers." in lines[0] and [line.split(":")[0] for line in lines[1:]] == [
        "1/3 square-0", "2/3 square-1", "3/3 square-2",
    ]  # fmt: skip
    reproduce(experiment, tmp_path, full=False, log=lines.append)
    assert experiment.computed == [0, 1, 2]
    kept = page.parent / "cells" / "square-1.json"
    kept.write_text(kept.read_text()[:20])  # torn
    changed = json.loads((page.parent / "cells" / "square-2.json").read_text())
    (page.parent / "cells" / "square-2.json").write_text(json.dumps({**changed, "options": {"number": 7}}))
    reproduce(experiment, tmp_path, full=False, log=lines.append)
    assert experiment.computed == [0, 1, 2, 1, 2]
    assert reproduce(experiment, tmp_path, full=True, log=lines.append).parent.name == "squares-full"


def test_what_stopped_half_way_goes_on_with_the_rest(tmp_path):
    broken = Squares(fails={2: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        reproduce(broken, tmp_path, full=False, log=lambda text: None)
    whole = Squares()
    reproduce(whole, tmp_path, full=False, log=lambda text: None)
    assert (broken.computed, whole.computed) == ([0, 1], [2])


def test_tables_are_written_for_people_and_for_programs(tmp_path):
    page = reproduce(Squares(), tmp_path, full=False, log=lambda text: None)
    with (page.parent / "all-squares.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["cell", "ours", "paper"], ["square-0", "0", ""], ["square-1", "1", ""], ["square-2", "4", ""],
        ]  # fmt: skip
    text = results(page)
    assert "| square-2 | 4 | – |" in text and "- They grow." in text and "- The paper has no zero." in text
    html = page.read_text()
    assert "Squares of &lt;numbers&gt;" in html and "square-2" in html


def test_what_is_not_at_hand_is_left_out_and_said(tmp_path):
    lines = []
    page = reproduce(Squares(fails={1: MissingData("get it there")}), tmp_path, full=False, log=lines.append)
    assert any("square-1: left out: get it there" in line for line in lines)
    assert "Left out: square-1: get it there." in results(page) and "square-2" in results(page)


def test_clients_that_all_fail_are_the_end_of_their_trial_alone(tmp_path):
    failed = Squares(fails={0: RoundFailed("round 3 failed: all clients diverged")})
    page = reproduce(failed, tmp_path, full=False, log=lambda text: None)
    assert "Left out: square-0: round 3 failed: all clients diverged." in results(page) and failed.computed == [1, 2]


def test_two_do_not_compute_the_same(tmp_path):
    (tmp_path / "squares").mkdir()
    with held(tmp_path / "squares"), pytest.raises(RunInUse):
        reproduce(Squares(), tmp_path, full=False, log=lambda text: None)


def test_the_command_lists_finds_and_runs_experiments(tmp_path, monkeypatch):
    listed = CliRunner().invoke(main, ["reproduce"])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in runner.EXPERIMENTS)
    wrong = CliRunner().invoke(main, ["reproduce", "ensemble-toi"])
    assert wrong.exit_code == 1 and "did you mean 'ensemble-toy'?" in wrong.stderr
    with pytest.raises(UnknownExperiment, match="there is no experiment 'x': there are fedfrozen-simulation, "):
        find_experiment("x")
    monkeypatch.setattr(runner, "EXPERIMENTS", {"squares": Squares()})
    done = CliRunner().invoke(main, ["reproduce", "squares", "--folder", str(tmp_path)])
    assert done.exit_code == 0 and "| square-2 | 4 | – |" in done.stdout and "index.html" in done.stdout


# --- the experiments ------------------------------------------------------------------------------------------------


def test_the_costs_of_the_papers_models_are_the_papers():
    experiment = FedFrozenCosts()
    trials = [trial for trial in experiment.trials(False) if "paper" in trial.options]
    assert len(trials) == 5
    found = {trial.name: experiment.compute(trial, NOWHERE) for trial in trials}
    results = experiment.results(found)
    for model, parameters, share, printed_share, up, printed, _ in results.tables[0].rows:
        assert model in ("T5-small", "BART-base") or share == pytest.approx(printed_share, abs=5e-5)
        assert up == pytest.approx(1 - 0.8 * share) and up == pytest.approx(printed, abs=5e-5) and parameters > 10**7
    (claim,) = results.claims
    assert claim.verdict == HOLDS and "Our costs differ from the paper's by at most 0.0000" in claim.measured


def test_local_steps_of_the_toy_are_gradient_steps_and_repetitions_do_not_touch():
    (x, y), centres = data_of(3)[0], centres_of(3)
    weights = np.random.default_rng(0).normal(size=(3, ensemble_toy.BASES))
    after = trained(weights, ensemble_toy.features(x, centres), y)
    for row, end in zip(weights, after, strict=True):
        w = row.copy()
        for _ in range(ensemble_toy.EPOCHS):
            gradient = np.zeros_like(w)
            for point, target in zip(x, y, strict=True):
                phi = np.array([np.exp(-((point - centre) ** 2) / (2 * ensemble_toy.WIDTH**2)) for centre in centres])
                gradient += 2 * (phi @ w - target) * phi / len(x)
            w -= ensemble_toy.RATE * gradient
        np.testing.assert_allclose(end, w, rtol=1e-10)


def test_the_toys_centres_are_drawn_anew_with_its_data_and_fill_the_range():
    one, again, other = centres_of(1), centres_of(1), centres_of(2)
    assert np.array_equal(one, again) and not np.any(np.isclose(one, other))
    assert np.abs(one).max() <= 1 and np.ptp(np.diff(np.sort(one))) > 0.01, "no grid"
    assert min(np.histogram(np.concatenate([one, other]), 4, (-1, 1))[0]) > 30


def test_bias_and_variance_do_not_depend_on_the_number_of_repetitions():
    """Of predictions whose mean is .3 off, with a variance of .25."""
    rng, expected = np.random.default_rng(0), np.linspace(-1, 1, 20_000)
    for repetitions in (2, 3, 50):
        found = bias_and_variance(expected + 0.3 + rng.normal(0, 0.5, (repetitions, 20_000)), expected)
        assert found["variance"] == pytest.approx(0.25, rel=0.05) and found["bias"] == pytest.approx(0.3, rel=0.05)
    assert bias_and_variance(np.stack([expected, expected]), expected) == {"bias": 0.0, "variance": 0.0}


def test_the_toys_variance_falls_with_the_modes(monkeypatch):
    """The paper's claim, with ten clients and 20 rounds. Measured: .48 and .45 of it, .10 and .14."""
    monkeypatch.setattr(ensemble_toy, "CLIENTS", 10)
    monkeypatch.setattr(ensemble_toy, "ROUNDS", 20)
    experiment = EnsembleToy()
    trials = {trial.name: trial for trial in experiment.trials(False)}
    for seed in (1, 2):
        names = [f"modes-{modes}-{seed}" for modes in (1, 2, 10)]
        one, two, ten = (experiment.compute(trials[name], NOWHERE)["variance"] for name in names)
        assert two < 0.7 * one and ten < 0.2 * one


def test_the_toys_differences_are_paired_by_draw():
    draws, modes = ensemble_toy.DRAWS, (1, 2, 10)
    variances = {1: [0.5, 0.9, 0.6, 0.8, 0.7], 2: [0.25, 0.46, 0.3, 0.39, 0.35], 10: [0.05, 0.09, 0.06, 0.08, 0.07]}
    biases = {1: [0.1, 0.2, 0.3, 0.2, 0.1], 2: [0.1, 0.21, 0.29, 0.21, 0.1], 10: [0.12, 0.22, 0.32, 0.22, 0.13]}
    found = {
        f"modes-{k}-{seed}": {"bias": biases[k][place], "variance": variances[k][place]}
        for k in modes for place, seed in enumerate(draws)
    }  # fmt: skip
    results = EnsembleToy().results(found)
    table, differences = results.tables
    assert [row[0] for row in table.rows] == [*modes] and table.rows[0][2] == PAPER[1]["bias"]
    assert table.rows[0][3] == f"0.7000 ± {np.std(variances[1], ddof=1):.4f}"
    rows = dict(differences.rows)
    assert list(rows) == [
        "variance, K = 2 less K = 1", "variance, K = 10 less K = 2", "bias, K = 2 less K = 1", "bias, K = 10 less K = 1"
    ]  # fmt: skip
    less = np.subtract(variances[2], variances[1])
    half = 2.776 * np.std(less, ddof=1) / 5**0.5  # Student's t, four degrees of freedom
    interval = f"({less.mean() - half:+.4f} to {less.mean() + half:+.4f})"
    assert rows["variance, K = 2 less K = 1"] == f"{less.mean():+.4f} {interval}"
    assert results.findings[0] == "The variance falls from K = 1 to 2, from K = 2 to 10."
    assert [finding.partition(" (")[0] for finding in results.findings[1:]] == [
        "The bias is higher than that at K = 1 for K = 10",
        "The bias is not shown to differ from that at K = 1 for K = 2",
    ]
    assert [claim.verdict for claim in results.claims] == ["holds", "does not hold"]
    further = {20: [0.03, 0.05, 0.04, 0.05, 0.04], 40: [0.0299, 0.0498, 0.0399, 0.0499, 0.0398]}
    found |= {
        f"modes-{k}-{seed}": {"bias": 0.2, "variance": of[place]} for k, of in further.items()
        for place, seed in enumerate(draws)
    }  # fmt: skip
    claims = {claim.text: claim for claim in EnsembleToy().results(found).claims}
    slower = next(claim for text, claim in claims.items() if text.startswith("The variance falls more slowly than 1/K"))
    assert slower.verdict == "holds" and slower.measured.startswith(f"{40 * np.mean(further[40]) - 0.7:+.4f}")
    assert claims["The variance at K = 40 is at most .0003 below that at K = 20 (.0042, .0045)."].verdict == "holds"
    falls = claims["The variance falls from each K to the next up to 20 (.0496 to .0045)."]
    assert "K = 20" in falls.measured and "K = 40" not in falls.measured


@pytest.mark.long
def test_the_toys_bias_is_flat_and_its_variance_falls():
    """The paper's claim with all of its clients."""
    experiment = EnsembleToy()
    found = {}
    for modes in (1, 2, 10):
        trial = Trial(f"modes-{modes}-1", {"modes": modes, "repetitions": 30, "seed": 1})
        found[trial.name] = experiment.compute(trial, NOWHERE)
    bias, variance = ([of[key] for of in found.values()] for key in ("bias", "variance"))
    assert max(bias) - min(bias) < 0.25 * max(bias)
    assert all(after < 0.75 * before for before, after in pairwise(variance))
    assert variance[2] < 0.2 * variance[0]
