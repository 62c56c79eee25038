"""Fed-ensemble on Shakespeare (arXiv 2107.10663): prediction of the next character, roles dealt to clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values, table
from tepal.tools.reproduce.runs import compared, curves, mean_text, seeds_of, slug, trained

METHODS: Mapping[str, tuple[Mapping[str, Any], float | None]] = {
    "FedAvg": ({"strategy": "fedavg"}, 0.6005),
    "FedProx": ({"strategy": "fedprox", "fedprox.mu": 0.01}, 0.6018),
    "FedBE, no distillation": ({"strategy": "fedbe", "fedbe.distil": False}, 0.6152),
    "Fed-ensemble": ({"strategy": "fedensemble"}, 0.6249),
}
"""Method → its keys of the run config, and the paper's accuracy."""

_COMMON: Mapping[str, Any] = {
    "model": "char-lstm", "dataset": "shakespeare", "partitioner": "natural", "optimizer": "adam", "weight-decay": 0.0,
    "schedule": "constant", "fraction-evaluate": 0.0, "score-in-training": False, "batch-size": 32,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "text-length": 10, "fraction-train": 0.1, "num-server-rounds": 80, "evaluate-every": 20, "local-steps": 20,
    "learning-rate": 0.003, "held-out-fraction": 0.004, "test-fraction": 0.005, "fedensemble.modes": 3,
}  # fmt: skip
_FULL: Mapping[str, Any] = {
    "fraction-train": 0.1, "num-server-rounds": 300, "evaluate-every": 20, "local-epochs": 1, "learning-rate": 0.001,
    "held-out-fraction": 0.1, "fedensemble.modes": 5,
}  # fmt: skip


class EnsembleShakespeare(Experiment):
    """Accuracy of the next character."""

    name = "ensemble-shakespeare"
    title = "Fed-ensemble on Shakespeare, prediction of the next character"
    paper = "Fed-ensemble, Table 2 (arXiv 2107.10663)"
    deviations = (
        "Each role is assigned to one of 100 clients; the test passages are from all roles.",
        "Learning rate, local work, batch size and rounds are chosen here, as the paper does not give them.",
    )
    datasets = ("shakespeare",)
    small_scale = "A context of 10 characters (the paper: 80), three modes, 80 rounds of 20 steps; one seed."
    full_scale = (
        "A context of 80 characters, five modes, 300 rounds of one epoch of a tenth of the clients, three seeds."
    )

    def trials(self, full: bool) -> Sequence[Trial]:
        common = {**_COMMON, **(_FULL if full else _SMALL)}
        return [
            Trial(f"{slug(method)}-{seed}", {"config": {**common, **keys, "seed": seed}, "clients": 100})
            for method, (keys, _) in METHODS.items() for seed in ((1, 2, 3) if full else (1,))
        ]  # fmt: skip

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        return trained(trial, inputs)

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        runs = {method: seeds_of(found, slug(method)) for method in METHODS}
        scores = {method: [of["server"] for of in each] for method, each in runs.items()}
        rows = [(method, mean_text(scores[method]), paper) for method, (_, paper) in METHODS.items()]
        findings = []
        if scores["Fed-ensemble"] and scores["FedAvg"]:
            gain = compared(scores["Fed-ensemble"], scores["FedAvg"])
            findings.append(f"Fed-ensemble is {gain} FedAvg (paper: .0244 above).")
        figure = curves(
            runs, "rounds", "The next character", "Accuracy on passages that no client has; mean over the seeds."
        )
        return Reproduction([table("Accuracy by method", ("method", "ours", "paper"), rows)], [figure], findings)
