"""Bias and variance of an ensemble of K models in a toy regression: Fed-ensemble (arXiv 2107.10663), Table 1.

50 clients have two points each of y = a·sin(2πx) + ε; the model is linear in 100 radial basis functions. The training
data is fixed, and training is repeated from random weights. With h the prediction of a repetition and h̄ the mean of
all,

    bias² = E_x (sin(2πx) − h̄(x))²,    variance = E_x E_θ (h(x) − h̄(x))².

All repetitions are rows of one weight matrix. Neither gradient steps nor means mix rows, so that one run of
Fed-ensemble for each K is the same as training every repetition by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange
from tepal.exchange.modes import join_modes, modes_of
from tepal.report.page import Figure, empty_plot
from tepal.strategies import FedEnsemble
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values
from tepal.tools.reproduce.runs import paper_table

PAPER = {
    1: {"bias": 0.109, "variance": 0.0496}, 2: {"bias": 0.117, "variance": 0.0115},
    10: {"bias": 0.112, "variance": 0.0063}, 20: {"bias": 0.113, "variance": 0.0045},
    40: {"bias": 0.112, "variance": 0.0042},
}  # fmt: skip
"""K → the paper's bias and variance."""
CLIENTS, POINTS, BASES, WIDTH, NOISE = 50, 2, 100, 0.08, 0.2
EPOCHS, RATE, ROUNDS = 5, 0.1, 100
_CENTRES = np.linspace(-1, 1, BASES)
_GRID = np.linspace(-1, 1, 401)


def features(x: np.ndarray) -> np.ndarray:
    """The basis functions φ at x (points,): (points, bases)."""
    return np.exp(-np.square(x[:, None] - _CENTRES) / (2 * WIDTH**2))


def data_of(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The points (x, y) of each client, with amplitude a ~ N(1, .2²) and x ~ U(−1, 1)."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(CLIENTS):
        amplitude, x = rng.normal(1, NOISE), rng.uniform(-1, 1, POINTS)
        clients.append((x, amplitude * np.sin(2 * np.pi * x) + rng.normal(0, NOISE, POINTS)))
    return clients


def trained(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The weights (repetitions, bases) after E full-batch steps on the mean squared error."""
    phi = features(x)
    for _ in range(EPOCHS):
        weights = weights - RATE * 2 / len(x) * (weights @ phi.T - y) @ phi
    return weights


def client_app(data: Sequence[tuple[np.ndarray, np.ndarray]]) -> ClientApp:
    """A ClientApp that trains on the points of its partition."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg: Message, inputs: Context) -> Message:
        x, y = data[int(inputs.node_config["partition-id"])]
        weights = trained(msg.content["arrays"]["weights"].numpy(), x, y)
        arrays = ArrayRecord({"weights": Array(weights)})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(x)})}), reply_to=msg)

    return app


class EnsembleToy(Experiment):
    """Bias and variance by the number of modes."""

    name = "ensemble-toy"
    title = "Bias and variance of an ensemble, toy regression"
    paper = "Fed-ensemble, Table 1 (arXiv 2107.10663)"
    deviations = (
        "The initial weights, N(0, 1), the learning rate, .1, five local steps and 100 rounds are chosen here: the "
        "paper does not give them.",
        "The bias is the square root of bias², which is of the same magnitude as the paper's numbers.",
        "All repetitions have the same schedule of modes; the paper does not say whether its repetitions do.",
    )
    small_scale = f"20 repetitions of the paper's 100; {CLIENTS} clients, {ROUNDS} rounds."
    full_scale = f"100 repetitions, as in the paper; {CLIENTS} clients, {ROUNDS} rounds."

    def trials(self, full: bool) -> Sequence[Trial]:
        repetitions = 100 if full else 20
        return [Trial(f"modes-{k}", {"modes": k, "repetitions": repetitions, "seed": 1}) for k in PAPER]

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        modes, repetitions, seed = (int(trial.options[key]) for key in ("modes", "repetitions", "seed"))
        rng = np.random.default_rng([seed, modes])
        initial = [{"weights": Array(rng.normal(size=(repetitions, BASES)))} for _ in range(modes)]
        app = client_app(data_of(seed))
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(CLIENTS)])
        strategy = FedEnsemble(modes=modes, fraction_evaluate=0, min_available_nodes=CLIENTS, seed=seed)
        result = strategy.start(grid, join_modes(initial), num_rounds=ROUNDS)
        weights = np.mean([mode["weights"].numpy() for mode in modes_of(result.arrays)], axis=0)
        predicted = weights @ features(_GRID).T  # (repetitions, points)
        mean = predicted.mean(axis=0)
        return {
            "bias": float(np.sqrt(np.mean(np.square(np.sin(2 * np.pi * _GRID) - mean)))),
            "variance": float(np.mean(np.square(predicted - mean))),
        }

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        ours = {k: found[f"modes-{k}"] for k in PAPER if f"modes-{k}" in found}
        table = paper_table(
            "Bias and variance by modes", "K", {"bias": "bias", "variance": "variance"}, ours,
            lambda k, key: ours[k][key], lambda k, key: PAPER[k][key],
        )  # fmt: skip
        figures = []
        for key in ("bias", "variance"):
            plot = empty_plot("modes K", key)
            for label, role, numbers in (("ours", "main", ours), ("paper", "fedavg", PAPER)):
                values = [numbers[k][key] for k in ours]
                plot.add_scatter(x=[*ours], y=values, name=label, mode="lines+markers", meta={"role": role})
            plot.update_yaxes(rangemode="tozero")
            figures.append(Figure(key, f"{key.capitalize()} by modes", self.paper, plot))
        findings = []
        if len(ours) == len(PAPER):
            biases, variances = ([of[key] for of in ours.values()] for key in ("bias", "variance"))
            falls = all(after < before for before, after in pairwise(variances))
            findings = [
                f"The variance {'falls' if falls else 'does not fall everywhere'} with K: {variances[0]:.4f} to "
                f"{variances[-1]:.4f} (paper: {PAPER[1]['variance']} to {PAPER[40]['variance']}).",
                f"The bias is {min(biases):.3f} to {max(biases):.3f} for every K (paper: .109 to .117).",
                "The paper's variance at K = 2 is less than half of that at K = 1; the mean of two independent models "
                "would have exactly half.",
            ]
        return Reproduction([table], figures, findings)
