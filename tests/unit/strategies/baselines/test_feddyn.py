"""FedDyn against its paper's equations in NumPy, and its limit against the minimiser in closed form."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tepal.client_app.local_client import LocalClient
from tepal.exchange.personal import PersonalState
from tepal.strategies import FedAvg, FedDyn
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batches
from tepal.training.tasks import REGRESSION
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.baselines.problem import SETTINGS, START, Problem, descend, start

ALPHA = 0.3
EXACT = dict(rtol=0, atol=1e-9)


def feddyn_round(problem, theta, h, own, cohort, number, clients):
    """Algorithm 1; `own` (g_k by client) is changed."""
    found = {}
    for k in cohort:
        pulled = lambda v, k=k: ALPHA * (v - theta) - own[k]  # noqa: E731
        found[k] = descend(theta, problem.batches(k, number), problem.steps(k), extra=pulled)
        own[k] = own[k] - ALPHA * (found[k] - theta)
    h = h - ALPHA / clients * sum(each - theta for each in found.values())
    return sum(found.values()) / len(found) - h / ALPHA, h


def states_of(strategy):
    """Round → the method's state after it, filled as the strategy runs."""
    states, make = {}, strategy.method.merger

    def merger(state, number):
        made = make(state, number)
        finish = made.finish
        made.finish = lambda: states.setdefault(number, finish())
        return made

    strategy.method.merger = merger
    return states


def test_it_is_the_papers_algorithm_with_a_part_of_the_clients_in_each_round(monkeypatch, tmp_path):
    problem = Problem((4, 6, 5, 8))
    strategy = FedDyn(alpha=ALPHA, fraction_train=0.5, fraction_evaluate=0.0, seed=3)
    states = states_of(strategy)
    reports, models = start(strategy, problem.grid(monkeypatch, tmp_path), 5)
    theta, h, own = START, np.zeros_like(START), [np.zeros_like(START) for _ in range(4)]
    for number in range(1, 6):
        cohort = [int(name[1:]) for name in reports[number].asked]
        assert len(cohort) == 2
        theta, h = feddyn_round(problem, theta, h, own, cohort, number, 4)
        np.testing.assert_allclose(models[number], theta, **EXACT)
        np.testing.assert_allclose(states[number].h["weight"], h, **EXACT)
        np.testing.assert_allclose(h, sum(own) / 4, **EXACT)
        for k in cohort:
            np.testing.assert_allclose(problem.personal(k, number)["weight"], own[k], **EXACT)
        assert reports[number].down.payload == reports[number].up.payload == 2 * START.nbytes
    assert len({tuple(reports[number].asked) for number in range(1, 6)}) > 1


def test_a_client_that_joins_comes_with_zero_and_all_count(monkeypatch, tmp_path):
    problem = Problem((4, 6, 5))
    grid = problem.grid(monkeypatch, tmp_path)
    third = grid.nodes.pop(3)
    strategy = FedDyn(alpha=ALPHA, fraction_evaluate=0.0)
    states = states_of(strategy)
    merger = strategy.method.merger

    def joins(state, number):
        if number == 2:
            grid.add(third)
        return merger(state, number)

    strategy.method.merger = joins
    _, models = start(strategy, grid, 4)
    theta, h, own = START, np.zeros_like(START), [np.zeros_like(START) for _ in range(3)]
    for number in (1, 2):
        theta, h = feddyn_round(problem, theta, h, own, (0, 1), number, 2)
    h = sum(own) / 3
    for number in (3, 4):
        theta, h = feddyn_round(problem, theta, h, own, (0, 1, 2), number, 3)
        np.testing.assert_allclose(models[number], theta, **EXACT)
        np.testing.assert_allclose(states[number].h["weight"], sum(own) / 3, **EXACT)


def test_a_client_that_lost_its_gradient_begins_with_zero_and_says_so(monkeypatch, tmp_path):
    problem = Problem((4, 6))
    load = PersonalState.load

    def loses(self):
        if self._folder.name == "c1" and self._round == 2:
            for file in self._folder.iterdir():
                file.unlink()
        return load(self)

    monkeypatch.setattr(PersonalState, "load", loses)
    reports, models = start(FedDyn(alpha=ALPHA, fraction_evaluate=0.0), problem.grid(monkeypatch, tmp_path), 2)
    own = [np.zeros_like(START) for _ in range(2)]
    theta, h = feddyn_round(problem, START, np.zeros_like(START), own, (0, 1), 1, 2)
    own[1] = np.zeros_like(START)
    theta, h = feddyn_round(problem, theta, h, own, (0, 1), 2, 2)
    np.testing.assert_allclose(models[2], theta, **EXACT)
    assert any(client == "c1" and "lost" in note for client, note in reports[2].notes)


class Quadratic(Problem):
    """Linear regressions that disagree: each client has inputs and a solution of its own."""

    def data(self, k):
        rng = np.random.default_rng([11, k])
        inputs = rng.normal(size=(self.sizes[k], 3)) * (1, 0.5 + k, 1)
        return inputs, inputs @ rng.normal(size=(3, 1)) + k

    def site(self, msg, context):
        k = int(context.node_config["partition-id"])
        training = TrainingConfig.of({**SETTINGS, **msg.content.config_records.get("config", {})})
        inputs, labels = map(torch.from_numpy, self.data(k))
        model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        return LocalClient(
            f"c{k}", model, task=REGRESSION, training=training, node_config=context.node_config,
            batches=Batches(inputs, labels, training.batch_size, 0), test=(inputs, labels), sizes={"outputs": 1},
        )  # fmt: skip

    def minimiser(self):
        """Of the mean over the clients, each counted alike, of their mean squared errors."""
        pairs = [self.data(k) for k in range(len(self.sizes))]
        a = sum(x.T @ x / len(x) for x, _ in pairs)
        b = sum(x.T @ y / len(x) for x, y in pairs)
        return np.linalg.solve(a, b).T


@pytest.mark.parametrize("fraction", [1.0, 0.67])
def test_the_limit_is_the_minimiser_of_the_mean_loss_where_fedavg_ends_elsewhere(monkeypatch, tmp_path, fraction):
    sizes = (8, 14, 20)
    whole = {"batch-size": 32, "local-epochs": 30, "learning-rate": 0.05, "score-in-training": False}
    ends = {}
    for name, strategy in (("feddyn", FedDyn(alpha=3.0, fraction_train=fraction)), ("fedavg", FedAvg())):
        grid = Quadratic(sizes).grid(monkeypatch, tmp_path / name)
        strategy.rules = replace(strategy.rules, fraction_evaluate=0.0)
        _, models = start(strategy, grid, 60, first=np.zeros((1, 3)), **whole)
        ends[name] = np.abs(models[60] - Quadratic(sizes).minimiser()).max()
    assert ends["feddyn"] < 1e-8 and ends["fedavg"] > 0.05, ends
