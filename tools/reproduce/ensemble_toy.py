"""Table 1 of Fed-ensemble (arXiv 2107.10663): what an ensemble of K models does to bias and variance, on a toy.

50 clients with two points each of y = a·sin(2πx) + ε, a linear model of 100 radial basis functions. The training data
is fixed, and training is repeated from random weights. With h a repetition's prediction and h̄ the mean over all,

    bias² = E_x (sin(2πx) − h̄(x))²,    variance = E_x E_θ (h(x) − h̄(x))².

The repetitions share one model, a row of weights each: rows do not touch each other in gradient steps nor in means, so
this is the same as training each by itself, with the project's own Fed-ensemble and in one run for each K.
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
from tepal.tools.reproduce.experiment import Cell, Outcome, Place, Table, Values

PAPER = {1: (0.109, 0.0496), 2: (0.117, 0.0115), 10: (0.112, 0.0063), 20: (0.113, 0.0045), 40: (0.112, 0.0042)}
"""K → (bias, variance)."""
CLIENTS, POINTS, BASES, WIDTH, NOISE = 50, 2, 100, 0.08, 0.2
EPOCHS, RATE, ROUNDS = 5, 0.1, 100
_CENTRES = np.linspace(-1, 1, BASES)
_GRID = np.linspace(-1, 1, 401)


def features(x: np.ndarray) -> np.ndarray:
    """φ(x): (points, bases)."""
    return np.exp(-np.square(x[:, None] - _CENTRES) / (2 * WIDTH**2))


def data_of(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each client's (x, y): its amplitude a ~ N(1, .2²), its points x ~ U(−1, 1)."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(CLIENTS):
        amplitude, x = rng.normal(1, NOISE), rng.uniform(-1, 1, POINTS)
        clients.append((x, amplitude * np.sin(2 * np.pi * x) + rng.normal(0, NOISE, POINTS)))
    return clients


def trained(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """E full-batch steps on the mean squared error: weights (repetitions, bases) → the same."""
    phi = features(x)
    for _ in range(EPOCHS):
        weights = weights - RATE * 2 / len(x) * (weights @ phi.T - y) @ phi
    return weights


def client_app(data: Sequence[tuple[np.ndarray, np.ndarray]]) -> ClientApp:
    """Trains on the points of its partition."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        x, y = data[int(context.node_config["partition-id"])]
        weights = trained(msg.content["arrays"]["weights"].numpy(), x, y)
        arrays = ArrayRecord({"weights": Array(weights)})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(x)})}), reply_to=msg)

    return app


class EnsembleToy:
    """Bias and variance by the number of modes."""

    name = "ensemble-toy"
    title = "Bias and variance of an ensemble, toy regression"
    paper = "Fed-ensemble, Table 1 (arXiv 2107.10663)"
    deviations = (
        "The initial weights, N(0, 1), the learning rate, .1, five local steps and 100 rounds are chosen here: the "
        "paper does not give them.",
        "The bias is the root of its mean square, which is of the size of the paper's numbers.",
        "All repetitions meet the same schedule of modes; the paper does not say whether its do.",
    )

    def data(self, full: bool) -> Sequence[str]:
        return ()

    def scale(self, full: bool) -> str:
        of = "100 repetitions, as in the paper" if full else "20 repetitions of the paper's 100"
        return f"{of}; {CLIENTS} clients, {ROUNDS} rounds."

    def cells(self, full: bool) -> Sequence[Cell]:
        repetitions = 100 if full else 20
        return [Cell(f"modes-{k}", {"modes": k, "repetitions": repetitions, "seed": 1}) for k in PAPER]

    def compute(self, cell: Cell, place: Place) -> Values:
        modes, repetitions, seed = (int(cell.options[key]) for key in ("modes", "repetitions", "seed"))
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

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        ours = {k: found[f"modes-{k}"] for k in PAPER if f"modes-{k}" in found}
        rows = [(k, of["bias"], PAPER[k][0], of["variance"], PAPER[k][1]) for k, of in ours.items()]
        table = Table("Bias and variance by modes", ("K", "bias", "paper", "variance", "paper"), rows)
        figures = []
        for index, key in enumerate(("bias", "variance")):
            plot = empty_plot("modes K", key)
            for label, role, values in (
                ("ours", "main", [of[key] for of in ours.values()]),
                ("paper", "fedavg", [PAPER[k][index] for k in ours]),
            ):  # fmt: skip
                plot.add_scatter(x=[*ours], y=values, name=label, mode="lines+markers", meta={"role": role})
            plot.update_yaxes(rangemode="tozero")
            figures.append(Figure(key, f"{key.capitalize()} by modes", self.paper, plot))
        findings = []
        if len(ours) == len(PAPER):
            biases, variances = ([of[key] for of in ours.values()] for key in ("bias", "variance"))
            falls = all(after < before for before, after in pairwise(variances))
            findings = [
                f"The variance {'falls' if falls else 'does not fall everywhere'} with K: {variances[0]:.4f} to "
                f"{variances[-1]:.4f} (paper: {PAPER[1][1]} to {PAPER[40][1]}).",
                f"The bias is {min(biases):.3f} to {max(biases):.3f} for every K (paper: .109 to .117).",
                "The paper's variance at K = 2 is less than half of that at K = 1; the mean of two independent models "
                "has half.",
            ]
        return Outcome([table], figures, findings)
