"""Draw accuracy against bytes moved of finished runs, as the README shows it.

    python docs/picture.py runs/<fedavg run> runs/<fedfrozen run> docs/main-job.svg
"""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path

import matplotlib.pyplot as plt

from tepal.server_app.run_directory import read_config, read_metrics

COLOURS = {"fedavg": "#8a8f98", "fedfrozen": "#0b7285"}


def main(runs: list[Path], target: Path) -> None:
    plt.rcParams.update({"svg.hashsalt": "tepal", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for run in runs:
        metrics = [line for line in read_metrics(run) if line["accuracy"] is not None]
        strategy = read_config(run)["strategy"]
        moved = [total / 1e6 for total in accumulate(line["bytes_down"] + line["bytes_up"] for line in metrics)]
        accuracy = [line["accuracy"] for line in metrics]
        axes.plot(moved, accuracy, "o-", markersize=3.5, color=COLOURS[strategy], label=strategy)
        frozen = [k for k, line in enumerate(metrics) if line["phase"] == "frozen"]
        if frozen:
            at = moved[frozen[0] - 1]
            axes.axvline(at, color=COLOURS[strategy], linewidth=1, linestyle=":")
            axes.annotate("query and key frozen", (at, 0.12), (4, 0), textcoords="offset points", fontsize=9)
    axes.set(xlabel="MB moved, all clients, both ways", ylabel="accuracy on held-out digits", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    *runs, target = map(Path, sys.argv[1:])
    main(runs, target)
