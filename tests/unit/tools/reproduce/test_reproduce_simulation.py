"""FedFrozen's simulation: its closed forms against autograd and plain loops, and the claims on few seeds and rounds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch.func import functional_call

from tepal.models.blocks import find_blocks
from tepal.models.linear_attention import LinearAttention
from tepal.records.run_directory import as_json
from tepal.report.page import figure_html, spoken
from tepal.strategies import FedFrozen, FedProx, Scaffold
from tepal.tools.reproduce.attention_clients import (
    FAR,
    WIDTH,
    Client,
    affine_round,
    drift,
    matrices_of,
    mean_quadratic,
    problem,
    steepness,
    train,
)
from tepal.tools.reproduce.experiment import FAILS, HOLDS, UNDECIDED, Trial, TrialInputs
from tepal.tools.reproduce.fedfrozen_figures import WARMUPS, against, lower, spread
from tepal.tools.reproduce.fedfrozen_simulation import RIDGE, FedFrozenSimulation
from tests.quiet import quiet  # noqa: F401

RATE, STEPS = 1e-3, 3
NOWHERE = TrialInputs(Path())


def ignored(number, arrays):
    return None


def start_of(student):
    return ArrayRecord(student.state_dict())


def trained(strategy, clients, start, rounds, *, own_ridge=0.0, steps=STEPS, rate=RATE, **options):
    made = strategy(fraction_evaluate=0, min_available_nodes=len(clients), deterministic=True, **options)
    return train(made, clients, start, rounds, ignored, rate=rate, steps=steps, ridge=own_ridge)


def frozen(clients, student, start, rounds, warmup, **options):
    return trained(FedFrozen, clients, start, rounds, warmup_rounds=warmup, model=find_blocks(student), **options)


def squared_error(client, seed, matrices):
    """F_k by its definition, with the project's own model."""
    query, key, value = matrices
    model = LinearAttention(WIDTH, 32, 32)
    outputs = functional_call(model, {"query": query, "key": key, "value": value}, (client.inputs[seed].to(query),))
    return (outputs - client.labels[seed].to(query)).square().sum(-1).mean()


def slopes(loss, matrices):
    return torch.autograd.grad(loss, matrices)


def of_seed(matrices, seed=0):
    return [matrix[seed].detach().double().requires_grad_() for matrix in matrices]


# --- the problem ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 2.0])
def test_gradients_are_those_of_autograd(rho):
    clients, student = problem([0, 1], rho)
    at = [p.detach() for p in student.parameters()]
    for client in clients[:2]:
        ours, of_value = client.gradient(*at), client.frozen_gradient(*at)
        for seed in range(2):
            matrices = of_seed(at, seed)
            expected = slopes(squared_error(client, seed, matrices), matrices)
            for one, other in zip([*ours, of_value], [*expected, expected[2]], strict=True):
                scale = float(other.abs().max())
                torch.testing.assert_close(one[seed].double(), other, rtol=1e-4, atol=1e-5 * scale)


def test_a_kept_attention_map_is_computed_anew_for_other_queries():
    (client, *_), student = problem([0], 1.0)
    query, key, value = (p.detach() for p in student.parameters())
    before = client.frozen_gradient(query, key, value)
    assert torch.equal(client.frozen_gradient(query, key, value), before)
    fresh = Client(client.inputs, client.labels).frozen_gradient(2 * query, key, value)
    assert torch.equal(client.frozen_gradient(2 * query, key, value), fresh) and not torch.equal(fresh, before)


def test_the_profile_is_the_least_loss_at_its_queries_and_keys():
    clients, student = problem([0, 1], 1.0)
    query, key, _ = (p.detach() for p in student.parameters())
    ridge = 0.5
    of = mean_quadratic(clients, query, key)
    best = of.ridge_solution(ridge)
    for seed in range(2):
        matrices = [*of_seed([query, key], seed), best[seed].clone().requires_grad_()]
        losses = torch.stack([squared_error(client, seed, matrices) for client in clients])
        whole = losses.mean() + ridge / 2 * matrices[2].square().sum()
        assert whole.item() == pytest.approx(float(of.profile(ridge)[seed]), rel=1e-9)
        assert losses.mean().item() == pytest.approx(float(of.loss(best)[seed]), rel=1e-9)
        assert float(slopes(whole, [matrices[2]])[0].abs().max()) < 1e-9


def test_clients_differ_by_their_means_alone():
    alike, shifted = (problem([3], rho)[0] for rho in (0.0, 2.0))
    for one, other in zip(alike, shifted, strict=True):
        moved = other.inputs - one.inputs
        assert moved.std(dim=(0, 1, 2)).max() < 1e-5 and 1.5 < moved.std() < 2.5


# --- training -------------------------------------------------------------------------------------------------------


def by_plain_loops(clients, student, rounds, *, mu=0.0, ridge=0.0, variates=False):
    """FedAvg, FedProx or SCAFFOLD of one seed; its variates as means of gradients, which they are under SGD."""
    x = of_seed(student.parameters())
    c, own = [torch.zeros_like(w) for w in x], [[torch.zeros_like(w) for w in x] for _ in clients]
    for _ in range(rounds):
        ends, means = [], []
        for client, mine in zip(clients, own, strict=True):
            y, seen = [w.detach().clone().requires_grad_() for w in x], [torch.zeros_like(w) for w in x]
            for _ in range(STEPS):
                near = sum((w - w0.detach()).square().sum() for w, w0 in zip(y, x, strict=True))
                loss = squared_error(client, 0, y) + ridge / 2 * y[2].square().sum() + mu / 2 * near
                gradients = slopes(loss, y)
                seen = [s + g / STEPS for s, g in zip(seen, gradients, strict=True)]
                corrected = [g - m + all_ for g, m, all_ in zip(gradients, mine, c, strict=True)]
                y = [(w - RATE * g).detach().requires_grad_() for w, g in zip(y, corrected, strict=True)]
            ends.append(y)
            means.append(seen)
        x = [torch.stack(each).mean(0) for each in zip(*ends, strict=True)]
        if variates:
            own = means
            c = [torch.stack(each).mean(0) for each in zip(*means, strict=True)]
    return x


@pytest.mark.parametrize("method", ["FedAvg", "FedProx", "SCAFFOLD"])
def test_methods_are_their_plain_loops(method):
    clients, student = problem([0], 1.0)
    clients, start, ridge = clients[:3], start_of(student), 0.5
    if method == "FedAvg":  # the ridge comes with the server's plan
        found = frozen(clients, student, start, 3, warmup=3, ridge=ridge)
    elif method == "FedProx":
        found = trained(FedProx, clients, start, 3, own_ridge=ridge, mu=200.0)
    else:
        found = trained(Scaffold, clients, start, 3, own_ridge=ridge)
    plain = {"FedAvg": {}, "FedProx": {"mu": 200.0}, "SCAFFOLD": {"variates": True}}[method]
    expected = by_plain_loops(clients, student, 3, ridge=ridge, **plain)
    for one, other, begun in zip(matrices_of(found), expected, student.parameters(), strict=True):
        moved = (other - begun[0]).abs().max().item()
        torch.testing.assert_close(one[0].double(), other.detach(), rtol=0, atol=2e-3 * moved)


def test_methods_are_told_apart_by_the_plain_loops():
    """What the test above can see: the methods differ by more than its tolerance."""
    clients, student = problem([0], 1.0)
    plain, near, corrected = (
        by_plain_loops(clients[:3], student, 3, **how) for how in ({}, {"mu": 200.0}, {"variates": True})
    )
    for other in (near, corrected):
        for one, two, begun in zip(plain, other, student.parameters(), strict=True):
            assert (one - two).abs().max() > 0.02 * (one - begun[0]).abs().max()


def test_seeds_do_not_touch():
    clients, student = problem([0, 1], 1.0)
    alone, student_alone = problem([1], 1.0)
    for warmup in (2, 1):
        both = matrices_of(frozen(clients[:3], student, start_of(student), 2, warmup))
        one = matrices_of(frozen(alone[:3], student_alone, start_of(student_alone), 2, warmup))
        for stacked, single in zip(both, one, strict=True):
            torch.testing.assert_close(stacked[1], single[0], rtol=1e-5, atol=1e-6)


def test_a_seed_that_diverges_stays_where_it_is_and_the_other_goes_on():
    clients, student = problem([0, 1], 0.0)
    wild = [Client(torch.stack([client.inputs[0] * 30, client.inputs[1]]), client.labels) for client in clients[:3]]
    alone, student_alone = problem([1], 0.0)
    both = matrices_of(frozen(wild, student, start_of(student), 4, 1))
    one = matrices_of(frozen(alone[:3], student_alone, start_of(student_alone), 4, 1))
    assert 1e3 < both[2][0].abs().max() <= FAR
    torch.testing.assert_close(both[2][1], one[2][0], rtol=1e-5, atol=1e-6)


def test_freezing_goes_on_from_fedavg_as_if_it_were_one_run():
    clients, student = problem([0, 1], 1.0)
    clients, start = clients[:3], start_of(student)
    at_once = frozen(clients, student, start, 4, warmup=2, ridge=0.1)
    half = frozen(clients, student, start, 2, warmup=2, ridge=0.1)
    in_two = frozen(clients, student, half, 2, warmup=0, ridge=0.1)
    for one, other in zip(matrices_of(at_once), matrices_of(in_two), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(matrices_of(half)[0], matrices_of(at_once)[0])


def test_a_frozen_round_is_affine():
    clients, student = problem([0, 1], 1.0)
    query, key, value = (p.detach() for p in student.parameters())
    p, b = affine_round(clients, query, key, rate=RATE, ridge=0.1, steps=STEPS)
    found = frozen(clients, student, start_of(student), 2, warmup=0, ridge=0.1)
    torch.testing.assert_close(matrices_of(found)[2].double(), p @ (p @ value.double() + b) + b, rtol=0, atol=1e-5)
    assert torch.equal(matrices_of(found)[0], query)


def test_steps_on_theta_diverge_above_two_over_the_steepness_and_not_below():
    clients, student = problem([0], 1.0)
    query, key, value = (p.detach() for p in student.parameters())
    steepest = max(clients, key=lambda client: float(steepness([client], query, key)))
    limit = 2 / float(steepness(clients, query, key))
    for rate, ends in ((0.9 * limit, False), (1.1 * limit, True)):
        theta = value.double()
        of = steepest.quadratic(query, key)
        for _ in range(200):
            theta = theta - rate * (of.hessian @ theta - of.linear)
        assert bool(theta.abs().max() > 1e6) == ends


def test_the_fixed_point_of_single_steps_is_the_ridge_solution_and_of_many_is_not():
    clients, student = problem([0], 2.0)
    query, key, _ = (p.detach() for p in student.parameters())
    best = mean_quadratic(clients, query, key).ridge_solution(0.1)
    away = []
    for steps in (1, 10):
        p, b = affine_round(clients, query, key, rate=1e-4, ridge=0.1, steps=steps)
        fixed = torch.linalg.solve(torch.eye(WIDTH).double() - p, b)
        away.append(float((fixed - best).norm() / best.norm()))
    assert away[0] < 1e-6 < 1e-3 < away[1]


def test_drift_is_the_mean_distance_to_the_mean():
    clients, _ = problem([0, 1], 0.0)
    for k, client in enumerate(clients[:3]):
        client.trained = (torch.full((2, 4, 5), float(k)), torch.full((2, 4, 1), float(k)))
    distance = math.sqrt(4 * 5 + 4 * 1)
    torch.testing.assert_close(drift(clients[:3]), torch.full((2,), 2 / 3 * distance))


# --- the experiment -------------------------------------------------------------------------------------------------


def options(**of):
    return {
        "method": "FedAvg", "rho": 2.0, "steps": 20, "ridge": RIDGE, "rate": 2e-4, "seeds": 1, "rounds": 50,
        "profile": False, "warmups": (0.75,), **of,
    }  # fmt: skip


def test_no_training_is_computed_twice_and_the_papers_grids_are_there():
    experiment = FedFrozenSimulation()
    for full in (False, True):
        trials = experiment.trials(full)
        assert len({trial.name for trial in trials}) == len(trials)
        of = [{key: value for key, value in trial.options.items() if key != "warmups"} for trial in trials]
        assert len({json.dumps(each, sort_keys=True) for each in of}) == len(trials)
    by_rho = [trial.options for trial in experiment.trials(True) if set(trial.options["warmups"]) >= {0, 0.25, 0.5, 1}]
    assert [of["rho"] for of in by_rho] == [0, 0.5, 1, 1.5, 2]
    assert {of["seeds"] for of in by_rho} == {10} and {of["rounds"] for of in by_rho} == {200}
    steps = {trial.options["steps"] for trial in experiment.trials(True)}
    assert steps == {5, 10, 20, 40}
    assert {trial.options["ridge"] for trial in experiment.trials(True)} == {0, 0.1, 1, 10, 100, RIDGE}


def test_medians_and_quartiles_count_what_diverged_as_the_largest():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3, 2, 4)
    assert spread([1.0, None, 2.0, 3.0, 1e12]) == (3, 2, math.inf)
    assert spread([None, math.nan, 1.0]) == (math.inf, math.inf, math.inf)


def test_losses_are_compared_as_factors_seed_by_seed_with_student_s_interval():
    ours, others = [2.0, 3.0, 5.0, 4.0, 9.0], [4.0, 5.0, 11.0, 9.0, 16.0]
    logarithms = np.log(np.divide(ours, others))
    half = 2.776445 * np.std(logarithms, ddof=1) / math.sqrt(5)  # Student's t of four degrees of freedom
    mean, low, high = np.exp([logarithms.mean(), logarithms.mean() - half, logarithms.mean() + half])
    assert against(ours, others) == (f"{mean:.4f} ({low:.4f} to {high:.4f})", "lower")
    assert against(others, ours)[1] == "higher"
    text, verdict = against([1.0, 3.0, 2.0], [2.0, 2.0, 2.0])
    assert verdict == "undecided" and text.endswith(", undecided)")
    assert against([1.0], [2.0]) == ("0.5000", "")
    assert against([36.0, 36.0], [1.0, 1.0]) == ("36 (36 to 36)", "higher")


def test_where_seeds_diverged_no_factor_is_given():
    assert against([1.0, 2.0], [None, 1e12]) == ("0 of 2 seeds diverged, against 2 of 2", "lower")
    assert against([None, math.nan], [1.0, 2.0]) == ("2 of 2 seeds diverged, against 0 of 2", "higher")
    assert against([1.0, 2.0], [None, 2.0]) == ("0 of 2 seeds diverged, against 1 of 2", "undecided")
    assert against([1.0], [None]) == ("0 of 1 seeds diverged, against 1 of 1", "")


@pytest.mark.long
def test_an_interior_warmup_is_best_under_shift_and_the_ratio_falls_with_local_steps():
    """The paper's two claims, at ρ = 2, with one seed and 50 rounds."""
    experiment = FedFrozenSimulation()
    found = {}
    for steps in (5, 20, 40):
        trial = Trial(f"steps-{steps}", options(steps=steps, warmups=WARMUPS if steps == 20 else (0.75, 1.0)))
        found[trial.name] = as_json(experiment.compute(trial, NOWHERE))
    results = experiment.results(found)
    tables = {table.title: table.rows for table in results.tables}
    losses = {row[1]: math.inf if row[2] is None else row[2] for row in tables["Final loss by warm-up"]}
    assert min(losses["0.75"], losses["0.9"]) < 0.97 * min(losses["1"], losses["0"])
    ratios = [row[3] for row in tables["Final loss by local steps"]]
    assert [row[0] for row in tables["Final loss by local steps"]] == ["5", "20", "40"]
    assert ratios[0] > 1 > ratios[1] > ratios[2]
    findings = " ".join(results.findings)
    assert "is not shown to be better than both ends" in findings  # one seed has no interval
    assert all(away < 1e-4 for of in found.values() for share, run in of["runs"].items() if share not in ("0", "1")
               for away in run["from closed form"])  # fmt: skip


def test_what_is_told_follows_from_the_numbers():
    """Losses that contradict the paper are said to."""

    def run(loss, drift=1.0):
        return {"loss": [loss, loss], "drift": [drift, drift], "from closed form": [1e-6, 1e-6]}

    shares = dict(zip(("0", "0.25", "0.5", "0.75", "0.9", "1"), (6.0, 5.0, 4.0, 3.0, 2.0, 1.0), strict=True))
    whole = {**options(warmups=WARMUPS), "runs": {share: run(loss) for share, loss in shares.items()}, "h": []}
    whole["steepness"] = [5e3, 2e4]
    more = {**whole, "steps": 40, "warmups": [0.75], "runs": {"0.75": run(9.0), "1": run(1.0)}}
    ridge = {**more, "steps": 20, "ridge": 100.0, "runs": {"0.75": run(2.0, drift=4.0), "1": run(1.0)}}
    others = {
        f"{name}{rho:g}": {**whole, "method": name, "rho": rho, "warmups": [], "runs": {"1": run(rho + 0.5)}}
        for name in ("FedProx", "SCAFFOLD") for rho in (1.0, 2.0)
    }  # fmt: skip
    at_one = {**whole, "rho": 1.0}
    profile = {**whole, "profile": True, "warmups": [], "h": [[3.0, 3.0], [1.0, 1.0], [2.0, None]]}
    found = {"a": whole, "b": more, "c": ridge, "d": profile, "e": at_one, **others}
    results = FedFrozenSimulation().results(found)
    findings = "\n".join(results.findings)
    assert "ρ = 2: the least median loss is at T_warm/T = 1, 1 (never frozen 1, frozen from the start 6): freezing in "
    assert "never freezing: 3.0000 (3.0000 to 3.0000); of freezing from the start: 0.5000 (0.5000 to 0.50" in findings
    assert "Freezing in between is not shown to be better than both ends" in findings
    assert "FedAvg's: 3.0000 (3.0000 to 3.0000) at E = 20; 9.0000 (9.0000 to 9.0000) at E = 40." in findings
    assert "ρ = 2, median losses in increasing order: FedAvg 1, FedProx 2.5, SCAFFOLD 2.5, FedFrozen 3." in findings
    assert "FedFrozen's as a factor of FedAvg's: 3.0000 (3.0000 to 3.0000); FedProx's: 1.2000 (1.2" in findings
    assert "SCAFFOLD's: 1.2000" in findings
    assert "1 (FedFrozen), 1 (FedAvg), 1.667 (FedProx)" in findings
    assert "The loss is least at λ = 100: 2" in findings
    assert "The drift is least at λ = 0.001: 1; at λ = 100 it is 4 (medians)" in findings
    assert "As a factor of that at λ = 0.001: 4.0000 (4.0000 to 4.0000) at 100" in findings
    assert "h_λ of FedAvg changes from 3 to diverged, rises in 1 of 2 rounds and is least in round 1" in findings
    assert "that in round 1: 1 of 2 seeds diverged, against 0 of 2; that at the start: 1 of 2" in findings
    assert "to a relative difference of 1e-06" in findings
    assert "for the steepest client: 4 at η = 0.0002, ρ = 1; 4 at η = 0.0002, ρ = 2." in findings
    assert [(claim.text.split(":")[0], claim.measured, claim.verdict) for claim in results.claims] == [
        ("ρ = 1", "3.0000 (3.0000 to 3.0000)", FAILS),
        ("ρ = 2", "3.0000 (3.0000 to 3.0000)", FAILS),
        ("The more local steps E, the lower FedFrozen's loss is as a factor of FedAvg's.",
         "E = 20 to 40: 3.0000 (3.0000 to 3.0000)", FAILS),
        ("From ρ = 1 to 2 FedFrozen's loss grows by a lower factor than the others'.",
         "less than FedAvg's: 1.0000 (1.0000 to 1.0000, undecided); less than FedProx's: 0.6000 (0.6000 to 0.6000); "
         "less than SCAFFOLD's: 0.6000 (0.6000 to 0.6000)", UNDECIDED),
        ("ρ = 2", "the least as a factor of the start: 0.3333 (0.3333 to 0.3333); "
         "the least as a factor of the end: 0 of 2 seeds diverged, against 1 of 2", UNDECIDED),
    ]  # fmt: skip
    assert {figure.key for figure in results.figures} == {
        "warmup", "heat", "steps", "rho", "ridge-loss", "ridge-drift", "profile-2",
    }  # fmt: skip
    for figure in results.figures:
        assert all(trace.meta["role"] for trace in figure.plot.data)
        assert spoken(figure) and figure.key in figure_html(figure)


def claims_of(**trials):
    return {claim.text: claim.verdict for claim in FedFrozenSimulation()._results(trials).claims}


def ridged(ridge, loss, drift=1.0):
    runs = {"0.75": {"loss": [loss] * 2, "drift": [drift] * 2}, "1": {"loss": [1.0] * 2, "drift": [1.0] * 2}}
    return {**options(ridge=ridge), "runs": runs, "h": [], "steepness": [1.0]}


def test_a_moderate_ridge_is_best_if_one_is_below_the_least_and_the_largest():
    text = "The {} is lower at a moderate λ than at the least and the largest."
    found = claims_of(a=ridged(RIDGE, 2.0, 2.0), b=ridged(1.0, 1.0, 1.0), c=ridged(100.0, 3.0, 0.5))
    assert found == {text.format("loss"): HOLDS, text.format("drift"): FAILS}
    u = {"a": ridged(RIDGE, 2.0), "b": ridged(0.1, 1.0), "c": ridged(10.0, 2.5), "d": ridged(100.0, 9.0)}
    assert claims_of(**u)[text.format("loss")] == HOLDS
    assert claims_of(**u | {"b": ridged(0.1, 2.0)})[text.format("loss")] == UNDECIDED
    assert claims_of(**u | {"b": ridged(0.1, 2.1)})[text.format("loss")] == FAILS


def profiled(rho, *h):
    runs = {"1": {"loss": [1.0] * 3, "drift": [1.0] * 3}}
    return {**options(rho=rho, profile=True), "runs": runs, "h": [of if isinstance(of, list) else [of] * 3 for of in h],
            "steepness": [1.0]}  # fmt: skip


@pytest.mark.parametrize(
    ("h", "falls", "turns"),
    [
        ((5.0, 4.0, 3.0, 2.0, 1.0), HOLDS, FAILS),
        ((1.0, 2.0, 3.0, 4.0, 5.0), FAILS, FAILS),
        ((5.0, 1.0, 2.0, 3.0, 4.0), FAILS, HOLDS),
        ((5.0, 1.0, 2.0, 3.0, [4.0, 0.1, 4.0]), FAILS, UNDECIDED),
        ((1.0, 1.0, 1.0, 1.0, 1.0), UNDECIDED, UNDECIDED),
    ],
)
def test_the_profile_falls_without_shift_and_turns_with_it(h, falls, turns):
    texts = "ρ = 0: h_λ of FedAvg falls in each quarter of the rounds.", "ρ = 2: h_λ of FedAvg falls, and then rises."
    assert claims_of(a=profiled(0.0, *h), b=profiled(2.0, *h)) == dict(zip(texts, (falls, turns), strict=True))


@pytest.mark.long
def test_noise_has_no_turn():
    """The least round is not chosen by the seed that is compared at it."""
    draws = np.exp(np.random.default_rng(0).normal(0, 0.1, (100, 26, 5))).tolist()
    verdicts = [claims_of(a=profiled(2.0, *h)) for h in draws]
    assert sum(HOLDS in of.values() for of in verdicts) <= 5


def test_a_claim_cannot_hold_while_trials_are_missing():
    claims = FedFrozenSimulation().results({"a": profiled(0.0, 5.0, 4.0, 3.0, 2.0, 1.0)}).claims
    assert [claim.verdict for claim in claims] == [UNDECIDED]
    assert claims[0].measured.endswith("; other trials: not computed yet")


def test_one_seed_shows_no_claim():
    assert lower("It is lower.", {"": against([1.0], [2.0])}) == []


def test_some_trials_are_enough_for_an_outcome():
    experiment = FedFrozenSimulation()
    nothing = experiment.results({})
    assert not nothing.figures and not nothing.findings and all(not table.rows for table in nothing.tables)
    trial = Trial("profile", options(method="SCAFFOLD", rounds=4, steps=2, profile=True, warmups=(), rate=1e-3))
    found = as_json(experiment.compute(trial, NOWHERE))
    assert np.shape(found["h"]) == (5, 1) and np.shape(found["runs"]["1"]["drift"]) == (1,)
    results = experiment.results({"profile": found})
    assert [figure.key for figure in results.figures] == ["profile-2"]
    assert "SCAFFOLD" in [row[1] for row in results.tables[-1].rows]
