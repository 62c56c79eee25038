"""Bias and variance of an ensemble of K models in a toy regression: Fed-ensemble (arXiv 2107.10663), Table 1.

50 clients have two points each of y = a·sin(2πx) + ε; the model is linear in 100 radial basis functions, whose centres
are drawn from U(−1, 1). Of one draw of training data and centres, training is repeated from random weights. With h the
prediction of a repetition, h̄ the mean of all R and E_R the sum over them divided by R − 1,

    variance = E_x E_R (h(x) − h̄(x))²,    bias² = E_x (sin(2πx) − h̄(x))² − variance / R,

so that neither depends on R: what h̄ itself varies by is no bias. Draws are repeated, and have the same data and centres
for every K.

All repetitions are rows of one weight matrix. Neither gradient steps nor means mix rows, so that one run of
Fed-ensemble for each K is the same as training every repetition by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange
from tepal.exchange.modes import join_modes, modes_of
from tepal.report.page import Figure, empty_plot
from tepal.strategies import FedEnsemble
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.compare.answers import Paired, paired
from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values, table
from tepal.tools.reproduce.runs import mean_text, paper_table
from tepal.tools.reproduce.versus import ahead, as_good, by_seed, claimed

PAPER = {
    1: {"bias": 0.109, "variance": 0.0496}, 2: {"bias": 0.117, "variance": 0.0115},
    10: {"bias": 0.112, "variance": 0.0063}, 20: {"bias": 0.113, "variance": 0.0045},
    40: {"bias": 0.112, "variance": 0.0042},
}  # fmt: skip
"""K → the paper's bias and variance."""
CLIENTS, POINTS, BASES, WIDTH, NOISE = 50, 2, 100, 0.08, 0.2
EPOCHS, RATE, ROUNDS = 5, 0.1, 100
DRAWS = (1, 2, 3, 4, 5)
"""Seeds of the training data and the centres."""
_SAME = 0.01  # difference of two biases that counts as none; the paper's differ by up to .008
_FALLS_TO, _LAST = 20, 40
"""The K after which the paper's variance hardly falls, and its largest K."""
_GRID = np.linspace(-1, 1, 401)


def centres_of(seed: int) -> np.ndarray:
    """The centres of the basis functions (bases,)."""
    return np.random.default_rng([seed, BASES]).uniform(-1, 1, BASES)


def features(x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The basis functions at x (points,): (points, bases)."""
    return np.exp(-np.square(x[:, None] - centres) / (2 * WIDTH**2))


def data_of(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The points (x, y) of each client, with amplitude a ~ N(1, .2²) and x ~ U(−1, 1)."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(CLIENTS):
        amplitude, x = rng.normal(1, NOISE), rng.uniform(-1, 1, POINTS)
        clients.append((x, amplitude * np.sin(2 * np.pi * x) + rng.normal(0, NOISE, POINTS)))
    return clients


def trained(weights: np.ndarray, phi: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The weights (repetitions, bases) after E full-batch steps on the mean squared error.

    Args:
        weights: before them.
        phi: the basis functions at the points (points, bases).
        y: the targets (points,).
    """
    for _ in range(EPOCHS):
        weights = weights - RATE * 2 / len(y) * (weights @ phi.T - y) @ phi
    return weights


def client_app(data: Sequence[tuple[np.ndarray, np.ndarray]], centres: np.ndarray) -> ClientApp:
    """A ClientApp that trains on the points of its partition."""
    app = ClientApp(mods=[partial_exchange])
    known = [(features(x, centres), y) for x, y in data]

    @app.train()
    def train(msg: Message, inputs: Context) -> Message:
        phi, y = known[int(inputs.node_config["partition-id"])]
        weights = trained(msg.content["arrays"]["weights"].numpy(), phi, y)
        arrays = ArrayRecord({"weights": Array(weights)})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(y)})}), reply_to=msg)

    return app


def bias_and_variance(predicted: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """The bias and the variance of predictions.

    Args:
        predicted: of R repetitions (R, points).
        expected: what they predict (points,).
    """
    variance = float(predicted.var(axis=0, ddof=1).mean())
    squared = float(np.square(expected - predicted.mean(axis=0)).mean()) - variance / len(predicted)
    return {"bias": max(squared, 0.0) ** 0.5, "variance": variance}


class EnsembleToy(Experiment):
    """Bias and variance by the number of modes."""

    name = "ensemble-toy"
    title = "Bias and variance of an ensemble, toy regression"
    paper = "Fed-ensemble, Table 1 (arXiv 2107.10663)"
    deviations = (
        "The initial weights, N(0, 1), the learning rate, .1, five local steps and 100 rounds are chosen here: the "
        "paper does not give them.",
        "The paper has one draw of training data and centres; here all is repeated for five draws, and differences are "
        "paired by draw; intervals are Student's at 95 %.",
        "The bias is the square root of bias², which is of the same magnitude as the paper's numbers. The variance of "
        "the mean over the repetitions is subtracted from bias²; the paper's contains it.",
        "All repetitions have the same schedule of modes; the paper does not say whether its repetitions do.",
    )
    small_scale = f"20 repetitions of the paper's 100, five draws; {CLIENTS} clients, {ROUNDS} rounds."
    full_scale = f"100 repetitions, as in the paper, five draws; {CLIENTS} clients, {ROUNDS} rounds."

    def trials(self, full: bool) -> Sequence[Trial]:
        repetitions = 100 if full else 20
        return [
            Trial(f"modes-{k}-{seed}", {"modes": k, "repetitions": repetitions, "seed": seed})
            for k in PAPER for seed in DRAWS
        ]  # fmt: skip

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        modes, repetitions, seed = (int(trial.options[key]) for key in ("modes", "repetitions", "seed"))
        rng = np.random.default_rng([seed, modes])
        initial = [{"weights": Array(rng.normal(size=(repetitions, BASES)))} for _ in range(modes)]
        centres = centres_of(seed)
        app = client_app(data_of(seed), centres)
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(CLIENTS)])
        strategy = FedEnsemble(modes=modes, fraction_evaluate=0, min_available_nodes=CLIENTS, seed=seed)
        result = strategy.start(grid, join_modes(initial), num_rounds=ROUNDS)
        weights = np.mean([mode["weights"].numpy() for mode in modes_of(result.arrays)], axis=0)
        return bias_and_variance(weights @ features(_GRID, centres).T, np.sin(2 * np.pi * _GRID))

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        runs = {k: of for k in PAPER if (of := by_seed(found, f"modes-{k}"))}
        ours = {key: {k: {seed: float(of[key]) for seed, of in each.items()} for k, each in runs.items()}
                for key in ("bias", "variance")}  # fmt: skip
        title = f"Bias and variance by modes, {max(map(len, runs.values()), default=0)} draws"
        shown = paper_table(
            title, "K", {"bias": "bias", "variance": "variance"}, runs,
            lambda k, key: mean_text([*ours[key][k].values()]), lambda k, key: PAPER[k][key],
        )  # fmt: skip
        falls = {(before, k): gain for before, k in pairwise(runs) if (gain := _gain(ours["variance"], k, before))}
        bias = {k: gain for k in runs if k != 1 and 1 in runs and (gain := _gain(ours["bias"], k, 1))}
        rows = [(f"variance, K = {k} less K = {before}", gain.text) for (before, k), gain in falls.items()]
        rows += [(f"bias, K = {k} less K = 1", gain.text) for k, gain in bias.items()]
        of_pairs = [table("Differences by modes", ("difference", "ours"), rows)] if rows else []
        variance = ours["variance"]
        smaller = {f"K = {k}": gain for before, k in pairwise(k for k in runs if k <= _FALLS_TO)
                   if (gain := _gain(variance, before, k))}  # fmt: skip
        slower = further = None
        if {1, _LAST} <= variance.keys():
            times = {draw: _LAST * of for draw, of in variance[_LAST].items()}
            slower = _gain({1: variance[1], _LAST: times}, _LAST, 1)
        if {_FALLS_TO, _LAST} <= variance.keys():
            further = _gain(variance, _LAST, _FALLS_TO)
        claims = claimed(
            ahead(f"The variance falls from each K to the next up to {_FALLS_TO} (.0496 to .0045).", smaller),
            ahead(f"The variance falls more slowly than 1/K from K = 1 to {_LAST} (measured: {_LAST} times that at K = "
                  f"{_LAST}, less that at K = 1).",
                  {f"K = {_LAST}": slower} if slower else {}),
            ahead(f"The variance at K = {_LAST} is at most .0003 below that at K = {_FALLS_TO} (.0042, .0045).",
                  {f"K = {_LAST}": further} if further else {}, -0.0003),
            as_good(f"The bias stays that of K = 1 (.109 to .117), here within {_SAME}.",
                    {f"K = {k}": gain for k, gain in bias.items()}, _SAME),
        )  # fmt: skip
        return Reproduction(
            [shown, *of_pairs], [*_figures(ours, self.paper)], [*_findings(ours, falls, bias)],
            claims,
        )  # fmt: skip


Draws = Mapping[int, Mapping[int, float]]
"""K → draw → a value."""


def _gain(of: Draws, k: int, other: int) -> Paired | None:
    return paired(of[k], of[other], len({*of[k], *of[other]}))


def _findings(
    ours: Mapping[str, Draws], falls: Mapping[tuple[int, int], Paired], bias: Mapping[int, Paired]
) -> Iterable[str]:
    words = {"lower": "falls", "higher": "rises", "undecided": "is not shown to fall or rise"}
    for verdict, word in words.items():
        if named := [f"from K = {before} to {k}" for (before, k), gain in falls.items() if gain.verdict == verdict]:
            yield f"The variance {word} {', '.join(named)}."
    if {1, _LAST} <= ours["variance"].keys():
        one, most = (float(np.mean([*ours["variance"][k].values()])) for k in (1, _LAST))
        yield f"From K = 1 to {_LAST} it falls by a factor of {one / most:.0f} (paper: {_PAPERS_FACTOR:.0f})."
    for verdict in ("lower", "higher", "undecided"):
        if named := [f"{k} ({gain.mean:+.4f})" for k, gain in bias.items() if gain.verdict == verdict]:
            word = "not shown to differ from" if verdict == "undecided" else f"{verdict} than"
            yield f"The bias is {word} that at K = 1 for K = {', '.join(named)}."
    if len(ours["variance"]) == len(PAPER):
        yield (
            "The paper's variance at K = 2 is less than half of that at K = 1; the mean of two independent models "
            "would have exactly half."
        )


_PAPERS_FACTOR = PAPER[1]["variance"] / PAPER[_LAST]["variance"]


def _figures(ours: Mapping[str, Draws], caption: str) -> Iterable[Figure]:
    for key, of in ours.items():
        plot = empty_plot("modes K", key)
        means = {k: float(np.mean([*each.values()])) for k, each in of.items()}
        papers = {k: PAPER[k][key] for k in of}
        for label, role, values in (("ours", "main", means), ("paper", "fedavg", papers)):
            plot.add_scatter(
                x=[*values], y=[*values.values()], name=label, mode="lines+markers", meta={"role": role}
            )  # fmt: skip
        plot.update_yaxes(rangemode="tozero")
        yield Figure(key, f"{key.capitalize()} by modes", caption, plot)
