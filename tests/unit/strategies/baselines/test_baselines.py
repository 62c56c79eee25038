"""Baselines against their papers' equations, written out with NumPy beside them: two clients, several rounds."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvgM as FlowerFedAvgM
from scipy.optimize import minimize

from tepal.exchange.personal import PersonalState
from tepal.records.round_record import RoundRecord
from tepal.strategies import (
    APFL,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedNova,
    FedProx,
    FedYogi,
    LocalOnly,
    PerFedAvg,
    PFedMe,
    RoundFailed,
    Scaffold,
)
from tepal.training.config import TrainingConfig
from tepal.training.loop import accumulation
from tepal.training.tasks import IMAGES
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.baselines.problem import SETTINGS, START, Problem, descend, gradient, start

N = (4, 6)
EXACT = dict(rtol=0, atol=1e-9)


@pytest.fixture
def problem():
    return Problem(N)


@pytest.fixture
def grid(problem, monkeypatch, tmp_path):
    return problem.grid(monkeypatch, tmp_path)


def mean(models, weights=N):
    return sum(n * w for n, w in zip(weights, models, strict=True)) / sum(weights)


def locally(problem, w, number, extra=lambda k, w: 0.0):
    return [
        descend(w, problem.batches(k, number), problem.steps(k), extra=lambda v, k=k: extra(k, v)) for k in range(2)
    ]


# ---- one global model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fedprox_is_fedavg_with_a_pull_to_what_was_received(problem, grid, mu):
    _, models = start(FedProx(mu=mu), grid, 3)
    w = START
    for number in (1, 2, 3):
        w = mean(locally(problem, w, number, extra=lambda k, v, w=w: mu * (v - w)))
        np.testing.assert_allclose(models[number], w, **EXACT)


def test_fedprox_without_a_pull_is_fedavg_to_the_bit(problem, monkeypatch, tmp_path):
    runs = [
        start(strategy, problem.grid(monkeypatch, tmp_path / name), 2)[1]
        for name, strategy in (("prox", FedProx(mu=0.0)), ("avg", FedAvg()))
    ]
    for number in (1, 2):
        assert runs[0][number].tobytes() == runs[1][number].tobytes()


ETA, B1, B2, TAU = 0.3, 0.8, 0.95, 0.02


def momentum(t, delta, m, v):
    m = B1 * m + delta
    return ETA * m, m, v


def adaptive(second):
    def step(t, delta, m, v):
        m, v = B1 * m + (1 - B1) * delta, second(v, delta**2)
        return ETA * m / (np.sqrt(v) + TAU), m, v

    return step


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        (FedAvgM(learning_rate=ETA, momentum=B1), momentum),
        (FedAdagrad(learning_rate=ETA, beta1=B1, tau=TAU), adaptive(lambda v, d: v + d)),
        (
            FedYogi(learning_rate=ETA, beta1=B1, beta2=B2, tau=TAU),
            adaptive(lambda v, d: v - (1 - B2) * d * np.sign(v - d)),
        ),
        (FedAdam(learning_rate=ETA, beta1=B1, beta2=B2, tau=TAU), adaptive(lambda v, d: B2 * v + (1 - B2) * d)),
    ],
    ids=["fedavgm", "fedadagrad", "fedyogi", "fedadam"],
)
def test_server_optimizers_step_along_the_mean_change(problem, grid, strategy, step):
    _, models = start(strategy, grid, 4)
    w, m, v = START, np.zeros_like(START), np.full_like(START, TAU**2)
    for number in (1, 2, 3, 4):
        change, m, v = step(number, mean(locally(problem, w, number)) - w, m, v)
        w = w + change
        np.testing.assert_allclose(models[number], w, **EXACT)


def test_fedavgm_without_momentum_is_fedavg(problem, monkeypatch, tmp_path):
    runs = [
        start(strategy, problem.grid(monkeypatch, tmp_path / name), 2)[1]
        for name, strategy in (("m", FedAvgM(momentum=0.0)), ("avg", FedAvg()))
    ]
    np.testing.assert_allclose(runs[0][2], runs[1][2], **EXACT)


def test_fedavgm_is_flowers(problem, monkeypatch, tmp_path):
    """Flower's FedAvgM is the paper's; it drives the same app, whose mod has nothing to do then."""
    _, models = start(FedAvgM(learning_rate=ETA, momentum=B1), problem.grid(monkeypatch, tmp_path / "ours"), 3)
    theirs = FlowerFedAvgM(
        fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2, server_learning_rate=ETA, server_momentum=B1
    )
    result = theirs.start(
        Problem(N).grid(monkeypatch, tmp_path / "theirs"),
        ArrayRecord({"weight": Array(START)}),
        num_rounds=3,
        train_config=ConfigRecord(SETTINGS),
    )
    np.testing.assert_allclose(models[3], result.arrays["weight"].numpy(), rtol=0, atol=1e-7)


# ---- FedNova ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_fednova_normalises_by_what_the_steps_come_to(problem, grid, rho):
    """Unequal numbers of steps (4 and 6), with and without momentum; a_i as in the paper's section 4."""
    _, models = start(FedNova(), grid, 3, momentum=rho)
    w, rate, p = START, 0.5, np.array(N) / sum(N)
    for number in (1, 2, 3):
        d, norms = [], []
        for k in range(2):
            steps = problem.steps(k)
            own, velocity, stream = w, 0.0, problem.batches(k, number)
            for _ in range(steps):
                velocity = rho * velocity + gradient(own, next(stream))
                own = own - rate * velocity
            norms.append(sum((1 - rho ** (steps - i)) / (1 - rho) for i in range(steps)))
            d.append((w - own) / norms[-1])
        tau = float(p @ norms)
        w = w - tau * (p[0] * d[0] + p[1] * d[1])
        np.testing.assert_allclose(models[number], w, **EXACT)


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_what_steps_come_to_in_closed_form(steps):
    def of(**settings):
        return TrainingConfig.of({"optimizer": "sgd", "learning-rate": 0.1, **settings})

    rho, rate, mu = 0.9, 0.1, 2.0
    assert accumulation(of(), steps) == steps
    # The paper's ‖a‖₁ with momentum, and with a proximal term.
    with_momentum = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert accumulation(of(momentum=rho), steps) == pytest.approx(with_momentum)
    assert accumulation(of(), steps, mu) == pytest.approx((1 - (1 - rate * mu) ** steps) / (rate * mu))
    assert accumulation(of(optimizer="adamw"), steps, mu) == steps


def test_fednova_refuses_a_client_that_does_not_say_what_its_steps_come_to(problem, grid, monkeypatch):
    monkeypatch.setattr("tepal.client_app.app.accumulation", lambda *told: float("nan"))
    with pytest.raises(RoundFailed, match="FedNova needs the metric 'accumulation'"):
        start(FedNova(), grid, 1)


def test_fednova_with_one_step_each_is_fedavg(problem, grid, monkeypatch):
    monkeypatch.setattr("tepal.client_app.app.accumulation", lambda *told: 1.0)
    _, models = start(FedNova(), grid, 1)
    np.testing.assert_allclose(models[1], mean(locally(problem, START, 1)), **EXACT)


# ---- SCAFFOLD --------------------------------------------------------------------------------------------------------


def scaffold_round(problem, x, c, own, cohort, number, clients, eta=1.0, rate=0.5):
    """Algorithm 1 with option II; `own` (c_i by client) is changed."""
    ys, changes = [], []
    for k in cohort:
        steps = problem.steps(k)
        y = descend(x, problem.batches(k, number), steps, extra=lambda v, k=k: c - own[k])
        plus = own[k] - c + (x - y) / (steps * rate)
        changes.append(plus - own[k])
        ys.append(y)
        own[k] = plus
    x = x + eta / len(cohort) * sum(y - x for y in ys)
    return x, c + sum(changes) / clients


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_scaffold_corrects_by_control_variates_that_sum_to_the_servers(monkeypatch, tmp_path, eta):
    problem = Problem((4, 6, 5, 8))
    grid = problem.grid(monkeypatch, tmp_path)
    strategy = Scaffold(learning_rate=eta, fraction_train=0.5, fraction_evaluate=0.0, seed=3)
    controls = {}
    finish = strategy.method.merger

    def merger(state, number):
        made = finish(state, number)
        done = made.finish
        made.finish = lambda: controls.setdefault(number, done())
        return made

    strategy.method.merger = merger
    reports, models = start(strategy, grid, 5)
    x, c, own = START, np.zeros_like(START), [np.zeros_like(START) for _ in range(4)]
    for number in range(1, 6):
        cohort = [int(name[1:]) for name in reports[number].asked]
        assert len(cohort) == 2
        x, c = scaffold_round(problem, x, c, own, cohort, number, 4, eta)
        np.testing.assert_allclose(models[number], x, **EXACT)
        np.testing.assert_allclose(controls[number].control["weight"], c, **EXACT)
        np.testing.assert_allclose(c, sum(own) / 4, **EXACT)
    assert len({tuple(reports[number].asked) for number in range(1, 6)}) > 1


def test_scaffold_sends_its_variates_too_so_bytes_are_doubled(problem, grid):
    reports, _ = start(Scaffold(fraction_evaluate=0.0), grid, 2)
    for number in (1, 2):
        assert reports[number].down.payload == reports[number].up.payload == 2 * 2 * START.nbytes


def test_a_client_that_joins_scaffold_comes_with_a_variate_of_zero(monkeypatch, tmp_path):
    problem = Problem((4, 6, 5))
    grid = problem.grid(monkeypatch, tmp_path)
    third = grid.nodes.pop(3)
    strategy = Scaffold(fraction_evaluate=0.0)
    plan = strategy.method.plan

    def plan_with_a_joiner(state, number, *rest):
        if number == 2:
            grid.add(third)  # it can take part from the next round on
        return plan(state, number, *rest)

    strategy.method.plan = plan_with_a_joiner
    _, models = start(strategy, grid, 4)
    x, c, own = START, np.zeros_like(START), [np.zeros_like(START) for _ in range(3)]
    for number in (1, 2):
        x, c = scaffold_round(problem, x, c, own, (0, 1), number, 2)
    c = c * 2 / 3
    for number in (3, 4):
        x, c = scaffold_round(problem, x, c, own, (0, 1, 2), number, 3)
        np.testing.assert_allclose(models[number], x, **EXACT)


def test_scaffold_refuses_what_is_not_sgd(problem, grid):
    with pytest.raises(RoundFailed, match="SCAFFOLD needs optimizer='sgd'"):
        start(Scaffold(), grid, 1, optimizer="adamw")


# ---- models of one's own ---------------------------------------------------------------------------------------------


def test_local_training_is_alone_and_costs_the_initial_model(problem, grid):
    reports, models = start(LocalOnly(), grid, 3)
    for k in range(2):
        v = START
        for number in (1, 2, 3):
            v = descend(v, problem.batches(k, number), problem.steps(k))
        np.testing.assert_allclose(problem.personal(k, 3)["weight"], v, **EXACT)
    np.testing.assert_array_equal(models[3], START)
    assert [reports[number].down.payload for number in (1, 2, 3)] == [2 * START.nbytes, 0, 0]
    assert all(report.up.payload == 0 for report in reports.values())


def test_ditto_keeps_a_model_near_the_one_that_was_received(problem, grid):
    lam = 0.9
    _, models = start(Ditto(lam=lam), grid, 3)
    w, own = START, [START, START]
    for number in (1, 2, 3):
        for k in range(2):
            pull = lambda v, w=w: lam * (v - w)  # noqa: E731
            own[k] = descend(own[k] if number > 1 else w, problem.batches(k, number), problem.steps(k), extra=pull)
            np.testing.assert_allclose(problem.personal(k, number)["weight"], own[k], **EXACT)
        w = mean(locally(problem, w, number))
        np.testing.assert_allclose(models[number], w, **EXACT)


def test_ditto_without_a_pull_is_local_training(problem, grid):
    start(Ditto(lam=0.0), grid, 2)
    for k in range(2):
        v = START
        for number in (1, 2):
            v = descend(v, problem.batches(k, number), problem.steps(k))
        np.testing.assert_allclose(problem.personal(k, 2)["weight"], v, **EXACT)


def test_one_step_of_ditto(problem, grid):
    start(Ditto(lam=0.4), grid, 2, **{"local-steps": 1})
    for k in range(2):
        w = mean([descend(START, problem.batches(j, 1), 1) for j in range(2)])
        v = descend(START, problem.batches(k, 1), 1)  # from w itself nothing pulls
        g = gradient(v, next(problem.batches(k, 2)))
        np.testing.assert_allclose(problem.personal(k, 2)["weight"], v - 0.5 * (g + 0.4 * (v - w)), **EXACT)


def loss_of(batch):
    inputs, labels = map(torch.from_numpy, batch)
    return lambda w: torch.nn.functional.cross_entropy(inputs @ w.T, labels)


class Clipping:
    """g → g·min(1, norm/‖g‖); it notes which gradients were too long."""

    def __init__(self, norm=None):
        self.norm = norm
        self.clipped = []
        self.settings = {} if norm is None else {"clip-norm": norm}

    def __call__(self, g):
        length = np.sqrt((g**2).sum())
        self.clipped.append(self.norm is not None and length > self.norm)
        return g * self.norm / length if self.clipped[-1] else g


@pytest.mark.parametrize("kind", ["first-order", "hessian-free"])
@pytest.mark.parametrize("norm", [None, 0.3])
def test_perfedavg_steps_along_the_gradient_of_what_one_step_reaches(problem, grid, kind, norm):
    """The direction of the step is clipped as a whole, and not each gradient that it consists of."""
    alpha, rate, clip = 0.3, 0.5, Clipping(norm)
    _, models = start(PerFedAvg(alpha=alpha, gradient=kind, delta=1e-4), grid, 2, **clip.settings)
    w = START
    for number in (1, 2):
        ends = []
        for k in range(2):
            own, stream = w, problem.batches(k, number)
            for _ in range(problem.steps(k)):
                ahead = own - alpha * gradient(own, next(stream))
                direction = gradient(ahead, next(stream))
                if kind == "hessian-free":
                    at, along = torch.from_numpy(own), torch.from_numpy(direction)
                    _, product = torch.autograd.functional.hvp(loss_of(next(stream)), at, along)
                    direction = direction - alpha * product.numpy()
                own = own - rate * clip(direction)
            ends.append(own)
        w = mean(ends)
        np.testing.assert_allclose(models[number], w, rtol=0, atol=1e-6 if norm is None else 1e-5)
    assert set(clip.clipped) == ({False} if norm is None else {True, False})


def test_perfedavg_is_scored_after_its_one_step(problem, grid):
    """From what was received where it is scored in training, and from the new global model after the last round."""
    reports, models = start(PerFedAvg(alpha=2.0), grid, 2)
    for measured, received in ((reports[2].train_metrics, models[1]), (reports[2].evaluate_metrics, models[2])):
        accuracies, losses = [], []
        for k in range(2):
            own = received - 2.0 * gradient(received, next(problem.batches(k, 2)))
            inputs, labels = problem.data(k)
            accuracies.append((inputs @ own.T).argmax(1).__eq__(labels).mean())
            losses.append(float(loss_of((inputs, labels))(torch.from_numpy(own))))
        assert measured["personal-accuracy"] == pytest.approx(sum(accuracies) / 2)
        assert measured["personal-loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)


def test_pfedme_finds_the_models_that_its_equation_says(problem, grid):
    """With many inner steps θ̃ is the minimiser of f(θ) + (λ/2)‖θ − w‖², which SciPy finds, too."""
    lam, rate, beta = 2.0, 0.1, 0.7
    strategy = PFedMe(lam=lam, inner_steps=400, inner_learning_rate=0.1, beta=beta)
    _, models = start(strategy, grid, 2, **{"learning-rate": rate, "local-epochs": 1})
    w = START
    for number in (1, 2):
        ends = []
        for k in range(2):
            own, stream = w, problem.batches(k, number)
            for _ in range(problem.steps(k, epochs=1)):
                batch = next(stream)
                theta = minimiser(batch, lam, own)
                own = own - rate * lam * (own - theta)
            np.testing.assert_allclose(problem.personal(k, number)["weight"], theta, rtol=0, atol=1e-6)
            ends.append(own)
        w = (1 - beta) * w + beta * (ends[0] + ends[1]) / 2
        np.testing.assert_allclose(models[number], w, rtol=0, atol=1e-6)


@pytest.mark.parametrize("outer", [0.3, 1.0])
def test_pfedmes_outer_step_replaces_the_learning_rate_times_lambda(problem, grid, outer):
    """Algorithm 1 with s for ηλ: with a learning rate and a schedule that would change ηλ in the second round."""
    options = {"lam": LAM, "inner_steps": INNER, "inner_learning_rate": INNER_RATE, "outer_step": outer}
    settings = {"learning-rate": 50.0, "local-epochs": 1}
    _, models = start(PFedMe(schedule="cosine", **options), grid, 2, **settings)
    w, thetas = START, [START, START]
    for number in (1, 2):
        ends = []
        for k in range(2):
            own, theta, stream = w, w, problem.batches(k, number)
            for _ in range(problem.steps(k, epochs=1)):
                batch = next(stream)
                for _ in range(INNER):
                    theta = theta - INNER_RATE * (gradient(theta, batch) + LAM * (theta - own))
                own = (1 - outer) * own + outer * theta
            np.testing.assert_allclose(problem.personal(k, number)["weight"], theta, **EXACT)
            ends.append(own)
            thetas[k] = theta
        w = (ends[0] + ends[1]) / 2
        np.testing.assert_allclose(models[number], w, **EXACT)
    if outer == 1:
        np.testing.assert_allclose(w, (thetas[0] + thetas[1]) / 2, **EXACT)


def test_pfedme_with_the_outer_step_that_its_learning_rate_gives_is_the_papers(problem, monkeypatch, tmp_path):
    """0.5 is the learning rate of these runs."""
    options = {"lam": LAM, "inner_steps": INNER, "inner_learning_rate": INNER_RATE}
    ends = [
        start(PFedMe(**options, outer_step=outer), problem.grid(monkeypatch, tmp_path / str(outer)), 2)[1][2]
        for outer in (0.0, 0.5 * LAM)
    ]
    np.testing.assert_allclose(*ends, **EXACT)


def minimiser(batch, lam, w):
    def value(flat):
        theta = flat.reshape(w.shape)
        return float(loss_of(batch)(torch.from_numpy(theta))) + lam / 2 * ((theta - w) ** 2).sum()

    def slope(flat):
        theta = flat.reshape(w.shape)
        return (gradient(theta, batch) + lam * (theta - w)).ravel()

    return minimize(value, w.ravel(), jac=slope, method="BFGS", options={"gtol": 1e-12}).x.reshape(w.shape)


def apfl_round(problem, w, v, alpha, k, number, adaptive, rate=0.5, clip=lambda g: g, bounded=None):
    """(w, v, α) after a client's round; `bounded` gets 0 or 1 wherever α would pass it."""
    stream = problem.batches(k, number)
    for _ in range(problem.steps(k)):
        batch = next(stream)
        g = gradient(alpha * v + (1 - alpha) * w, batch)
        slope = ((v - w) * g).sum()
        w, v = w - rate * clip(gradient(w, batch)), v - rate * clip(alpha * g)
        if adaptive:
            alpha = alpha - rate * slope
            for passed, bound in ((alpha < 0, 0.0), (alpha > 1, 1.0)):
                if passed:
                    alpha = bound
                    bounded.append(bound)
    return w, v, alpha


@pytest.mark.parametrize(("alpha", "adaptive"), [(0.3, False), (0.0, False), (1.0, False), (0.6, True)])
def test_apfl_trains_its_own_model_at_the_mixture(problem, grid, alpha, adaptive):
    _, models = start(APFL(alpha=alpha, adaptive=adaptive), grid, 3)
    w, own = START, [(START, alpha), (START, alpha)]
    for number in (1, 2, 3):
        ends = []
        for k in range(2):
            v, a = own[k] if number > 1 else (w, alpha)
            end, v, a = apfl_round(problem, w, v, a, k, number, adaptive, bounded=[])
            own[k] = v, a
            ends.append(end)
            kept = problem.personal(k, number)
            np.testing.assert_allclose(kept["weight"], v, **EXACT)
            assert kept["apfl.alpha"] == pytest.approx([a], abs=1e-9)
        w = (ends[0] + ends[1]) / 2
        np.testing.assert_allclose(models[number], w, **EXACT)
    if alpha == 0.0:
        assert all(np.array_equal(v, START) for v, _ in own), "nothing is learned of a model that has no part in it"
    if alpha == 1.0:
        alone = START
        for number in (1, 2, 3):
            alone = descend(alone, problem.batches(0, number), problem.steps(0))
        np.testing.assert_allclose(own[0][0], alone, **EXACT)
    if adaptive:
        assert own[0][1] != own[1][1] != alpha


@pytest.mark.parametrize(("bound", "alpha"), [(0.0, 0.02), (1.0, 0.9)])
def test_apfls_alpha_stays_between_0_and_1(problem, grid, bound, alpha):
    start(APFL(alpha=alpha, adaptive=True), grid, 5)
    passed, w, own = [], START, [(START, alpha), (START, alpha)]
    for number in range(1, 6):
        ends = []
        for k in range(2):
            v, a = own[k] if number > 1 else (w, alpha)
            end, v, a = apfl_round(problem, w, v, a, k, number, True, bounded=passed)
            own[k] = v, a
            ends.append(end)
            kept = problem.personal(k, number)
            np.testing.assert_allclose(kept["weight"], v, **EXACT)
            assert kept["apfl.alpha"] == pytest.approx([a], abs=1e-9)
        w = (ends[0] + ends[1]) / 2
    assert bound in passed, "α never came to its bound, so nothing was tested"


def test_apfl_clips_the_gradients_of_both_of_its_models(problem, grid):
    alpha, clip = 0.6, Clipping(0.3)
    _, models = start(APFL(alpha=alpha, adaptive=False), grid, 2, **clip.settings)
    w, own = START, [START, START]
    for number in (1, 2):
        ends = []
        for k in range(2):
            end, own[k], _ = apfl_round(problem, w, own[k], alpha, k, number, False, clip=clip)
            ends.append(end)
            np.testing.assert_allclose(problem.personal(k, number)["weight"], own[k], rtol=0, atol=1e-5)
        w = (ends[0] + ends[1]) / 2
        np.testing.assert_allclose(models[number], w, rtol=0, atol=1e-5)
    of_w, of_v = clip.clipped[::2], clip.clipped[1::2]
    assert set(of_w) == set(of_v) == {True, False}


def test_apfls_alpha_follows_the_slope_of_the_loss_of_the_mixture(problem, grid):
    """One step, against a difference quotient."""
    start(APFL(alpha=0.6, adaptive=True), grid, 2, **{"local-steps": 1})
    w = (descend(START, problem.batches(0, 1), 1) + descend(START, problem.batches(1, 1), 1)) / 2
    for k in range(2):
        g = gradient(START, next(problem.batches(k, 1)))
        v = START - 0.5 * 0.6 * g  # v and w were one, so α had no slope
        f, h = loss_of(next(problem.batches(k, 2))), 1e-6
        at = [float(f(torch.from_numpy(a * v + (1 - a) * w))) for a in (0.6 + h, 0.6 - h)]
        expected = 0.6 - 0.5 * (at[0] - at[1]) / (2 * h)
        assert problem.personal(k, 2)["apfl.alpha"] == pytest.approx([expected], abs=1e-7)


# ---- what is reported of personal models, and of time ----------------------------------------------------------------

LAM, MIX, INNER, INNER_RATE = 0.9, 0.7, 3, 0.3


def ditto_of(problem, w, kept, k, number):
    """(w_i, what the client keeps, its own model, for a global model that is received)."""
    v = descend(
        w if kept is None else kept, problem.batches(k, number), problem.steps(k), extra=lambda v: LAM * (v - w)
    )
    return descend(w, problem.batches(k, number), problem.steps(k)), v, lambda received: v


def apfl_of(problem, w, kept, k, number):
    end, v, _ = apfl_round(problem, w, w if kept is None else kept, MIX, k, number, False)
    return end, v, lambda received: MIX * v + (1 - MIX) * received


def pfedme_of(problem, w, kept, k, number):
    theta, stream, rate = w, problem.batches(k, number), 0.5
    for _ in range(problem.steps(k)):
        batch = next(stream)
        for _ in range(INNER):
            theta = theta - INNER_RATE * (gradient(theta, batch) + LAM * (theta - w))
        w = w - rate * LAM * (w - theta)
    return w, theta, lambda received: theta


@pytest.mark.parametrize(
    ("strategy", "of_client", "weights"),
    [
        (Ditto(lam=LAM), ditto_of, (20, 31)),
        (APFL(alpha=MIX, adaptive=False), apfl_of, (1, 1)),
        (PFedMe(lam=LAM, inner_steps=INNER, inner_learning_rate=INNER_RATE), pfedme_of, (1, 1)),
    ],
    ids=["ditto", "apfl", "pfedme"],
)
def test_what_is_scored_is_each_clients_own_model(monkeypatch, tmp_path, strategy, of_client, weights):
    """In training, on what was received, and after the last round on the new global model; clients count alike."""
    problem = Problem((20, 31))

    def score(models):
        """(accuracy, loss): the mean over the clients."""
        accuracies, losses = [], []
        for k, own in enumerate(models):
            inputs, labels = problem.data(k)
            scores = inputs @ own.T
            p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            accuracies.append((scores.argmax(1) == labels).mean())
            losses.append(-np.log(p[np.arange(len(labels)), labels]).mean())
        return np.mean(accuracies), np.mean(losses)

    reports, models = start(strategy, problem.grid(monkeypatch, tmp_path), 3)
    w, kept = START, [None, None]
    for number in (1, 2, 3):
        done = [of_client(problem, w, kept[k], k, number) for k in range(2)]
        received, w = w, mean([end for end, _, _ in done], weights)
        kept = [each for _, each, _ in done]
        np.testing.assert_allclose(models[number], w, **EXACT)
        in_training, after = (score([own(model) for _, _, own in done]) for model in (received, w))
        others = [score([received] * 2), score([end for end, _, _ in done]), score([w] * 2)]
        report = reports[number]
        measured = report.train_metrics
        assert (measured["personal-accuracy"], measured["personal-loss"]) == pytest.approx(in_training, abs=1e-6)
        assert (measured["received-loss"], measured["trained-loss"]) == pytest.approx(
            (others[0][1], others[1][1]), abs=1e-6
        )
        assert ("personal-accuracy" in report.evaluate_metrics) == (number == 3)
        expected = after if number == 3 else in_training
        line = RoundRecord.of(report, START.nbytes, IMAGES).to_line()
        assert line["accuracy_of"] == "personal"
        assert (line["accuracy"], line["loss"]) == pytest.approx(expected, abs=1e-6)
        assert line["clients_accuracy"] == pytest.approx(expected[0])
    assert all(abs(expected[0] - accuracy) > 1e-3 for accuracy, _ in others), "the accuracies of other models differ"


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        (FedAvg(), 1),
        (APFL(), 2),
        (PerFedAvg(), 2),
        (PerFedAvg(gradient="hessian-free"), 4),
        (PFedMe(lam=1.0, inner_steps=3), 3),
    ],
    ids=["fedavg", "apfl", "perfedavg", "perfedavg hessian-free", "pfedme"],
)
def test_the_time_of_a_step_is_that_of_its_passes_through_the_model(monkeypatch, tmp_path, strategy, passes):
    """A pass takes client k 0.1·(k + 1) s, by a clock that nothing else moves; clients count by their examples."""
    clock = SimpleNamespace(now=1000.0)

    class Slow(Problem):
        def site(self, msg, context):
            made = super().site(msg, context)
            seconds = 0.1 * (1 + int(context.node_config["partition-id"]))

            def pass_time(*_):
                clock.now += seconds

            made.model.register_forward_pre_hook(pass_time)
            return made

    monkeypatch.setattr("tepal.training.loop.time", SimpleNamespace(perf_counter=lambda: clock.now))
    reports, _ = start(strategy, Slow(N).grid(monkeypatch, tmp_path), 2)
    expected = passes * (4 * 0.1 + 6 * 0.2) / 10
    for number in (1, 2):
        assert reports[number].train_metrics["step-seconds"] == pytest.approx(expected)
        assert RoundRecord.of(reports[number], START.nbytes, IMAGES).step_seconds == pytest.approx(expected)


# ---- personal state and the server's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Scaffold, Ditto, APFL, LocalOnly, FedDyn], ids=lambda make: make.__name__)
def test_a_refused_reply_leaves_no_client_ahead_of_the_server(problem, monkeypatch, tmp_path, make):
    """What c1 did in round 2 is refused: in round 3 it begins where its round 1 ended."""
    spoiled = []

    def spoil(node, message, reply):
        if message.metadata.group_id == "2" and node.config["partition-id"] == 1 and reply.has_content():
            spoiled.append(reply)
            reply.content["metrics"]["num-examples"] = 7  # not what the checksum is of
        return reply

    grid = problem.grid(monkeypatch, tmp_path, spoil=spoil)
    began = {}
    load = PersonalState.load

    def loaded(self):
        values = load(self)
        began[self._folder.name, self._round] = values
        return values

    monkeypatch.setattr(PersonalState, "load", loaded)
    reports, _ = start(make(fraction_evaluate=0.0), grid, 3)
    assert spoiled and [name for name, _ in reports[2].refused] == ["c1"]
    for number, counts in ((2, 1), (3, 1)):
        assert {n: v.tobytes() for n, v in began["c1", number].items()} == {
            n: np.asarray(v).tobytes() for n, v in problem.personal(1, counts).items()
        }
    assert {n: v.tobytes() for n, v in began["c0", 3].items()} == {
        n: np.asarray(v).tobytes() for n, v in problem.personal(0, 2).items()
    }


STRATEGIES = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedyogi": FedYogi,
    "fedadam": FedAdam,
    "fednova": FedNova,
    "scaffold": Scaffold,
    "local": LocalOnly,
    "ditto": Ditto,
    "perfedavg": PerFedAvg,
    "pfedme": lambda **options: PFedMe(lam=1.0, **options),
    "apfl": APFL,
    "feddyn": lambda **options: FedDyn(alpha=0.3, **options),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_that_is_resumed_ends_as_if_it_had_not_stopped(name, monkeypatch, tmp_path):
    """With half of the clients in each round; bit-identical, since replies are merged in one order."""
    options = {"fraction_train": 0.5, "deterministic": True, "seed": 5}
    ends = []
    for kind, parts in (("whole", (4,)), ("stopped", (2, 4))):
        problem = Problem((4, 6, 5, 8))
        grid = problem.grid(monkeypatch, tmp_path / kind)
        for rounds in parts:
            resumed = rounds != parts[0]
            strategy = STRATEGIES[name](**options, checkpoints=tmp_path / kind / "checkpoints", resume=resumed)
            reports, models = start(strategy, grid, rounds)
        metrics = {key: value for key, value in reports[4].evaluate_metrics.items()}
        personal = {key: work.personal for key, work in problem.works.items() if key[1] == 4}
        ends.append((models[4].tobytes(), metrics, personal))
    (model, metrics, personal), (other, others, their) = ends
    assert model == other and metrics == others
    assert personal.keys() == their.keys()
    for key, values in personal.items():
        assert {n: v.tobytes() for n, v in values.items()} == {n: v.tobytes() for n, v in their[key].items()}


class Normalised(Problem):
    """With a BatchNorm, whose statistics are buffers and whose counter is an integer."""

    def model(self):
        torch.manual_seed(1)
        norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)
        return torch.nn.Sequential(norm, torch.nn.Linear(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("name", STRATEGIES)
def test_buffers_are_averaged_and_keep_their_dtype(name, monkeypatch, tmp_path):
    problem = Normalised(N)
    replies, merged = [], []

    strategy = STRATEGIES[name](fraction_evaluate=0.0)
    make = strategy.method.merger

    def merger(state, number):
        made = make(state, number)
        add = made.add
        made.add = lambda reply: (replies.append((number, reply)), add(reply))[1]
        return made

    strategy.method.merger = merger
    first = problem.model().state_dict()
    strategy.start(
        problem.grid(monkeypatch, tmp_path),
        ArrayRecord(first),
        num_rounds=2,
        train_config=ConfigRecord(SETTINGS),
        evaluate_fn=lambda number, arrays: merged.append({n: a.numpy() for n, a in arrays.items()}),
    )
    assert len(merged) == 3 and {reply.client for _, reply in replies} == {"c0", "c1"}
    for number, arrays in enumerate(merged):
        assert {n: a.dtype.name for n, a in arrays.items()} == {n: str(t.dtype)[6:] for n, t in first.items()}
        came = {r.client: r for k, r in replies if k == number and r.parts}
        if not came:
            continue
        alike = name in ("scaffold", "pfedme", "apfl", "feddyn")
        weights = [1, 1] if alike else [came[c].examples for c in ("c0", "c1")]
        for buffer in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
            values = [came[c].parts["model"][buffer] for c in ("c0", "c1")]
            expected = mean(values, weights)
            if arrays[buffer].dtype.kind == "i":
                expected = np.rint(expected)
            np.testing.assert_allclose(arrays[buffer], expected, rtol=1e-12)


def test_options_out_of_range_are_refused():
    wrong = [
        lambda: FedProx(mu=-1),
        lambda: FedAvgM(momentum=1.0),
        lambda: FedAdam(tau=0),
        lambda: FedAdam(learning_rate=float("nan")),
        lambda: FedYogi(beta2=1.0),
        lambda: Scaffold(learning_rate=0),
        lambda: Ditto(lam=-0.1),
        lambda: PerFedAvg(gradient="second"),
        lambda: PerFedAvg(delta=0),
        lambda: PFedMe(beta=0),
        lambda: PFedMe(inner_steps=0),
        lambda: PFedMe(outer_step=-0.1),
        lambda: PFedMe(outer_step=1.1),
        lambda: APFL(alpha=1.1),
        lambda: FedDyn(alpha=0),
    ]
    for make in wrong:
        with pytest.raises(ValueError, match="it must be"):
            make()


def test_methods_do_what_fedavg_does_not(problem, monkeypatch, tmp_path):
    """After two rounds no two methods with a global model of their own have the same."""
    ends = {}
    for name in ("fedavg", "fedprox", "fedavgm", "fedadagrad", "fedyogi", "fedadam", "fednova", "scaffold", "perfedavg",
                 "pfedme", "feddyn"):  # fmt: skip
        _, models = start(STRATEGIES[name](), problem.grid(monkeypatch, tmp_path / name), 2)
        ends[name] = models[2]
    for one, other in itertools.combinations(ends, 2):
        assert not np.allclose(ends[one], ends[other], rtol=0, atol=1e-7), (one, other)
