"""Runs and comparisons as they are left behind, with figures that can be checked by hand."""

from pathlib import Path

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory
from tepal.tools.compare.comparison import Comparison, planned_runs, planned_variants
from tepal.tools.compare.runs import write_comparison
from tepal.tools.compare.sections import Section, Variant

# Accuracy after each round, the initial model first, and MB down and up in each. Three rounds.
RUNS = {
    "fedavg": ([0.1, 0.5, 0.7, 0.8], (10, 10)),
    "fedfrozen": ([0.1, 0.4, 0.73, 0.71], (8, 6)),
    "selective": ([0.1, 0.3, 0.6, 0.7], (6, 4)),
    "fedensemble": ([0.1, 0.3, 0.5, 0.6], (10, 10)),
    "fedacs": ([None, 0.85, 0.9, 0.95], (5, 5)),
}
CONFIG = {"model": "tiny-vit", "dataset": "digits", "num-server-rounds": 3}


class Killed(BaseException):
    """In the place of SIGKILL: nothing that the command would do at its end is done."""


def leave_run(
    folder: Path,
    strategy: str,
    *,
    seed: int = 7,
    rounds: int = 3,
    summary: bool = True,
    add: float = 0.0,
    config=None,
    regression: bool = False,
) -> Path:
    """A run directory as a run of this strategy leaves it, or one that got only so far; `add`: to all accuracies.

    `regression`: it has errors, what the accuracies lack of 1.
    """
    run = RunDirectory.create(folder, strategy, config or {**CONFIG, "strategy": strategy, "seed": seed})
    continue_run(run.path, strategy, range(rounds + 1), add=add, regression=regression)
    if summary:
        run.write_summary()
    return run.path


def continue_run(path: Path, strategy: str, rounds, *, add: float = 0.0, regression: bool = False) -> None:
    """Add rounds to a run."""
    accuracies, (down, up) = RUNS.get(strategy, RUNS["fedavg"])
    personal = strategy == "fedacs"
    for number in rounds:
        if number == 0 and personal:
            continue
        key, accuracy = "rmse" if regression else "accuracy", accuracies[number] + add
        score = 1 - accuracy if regression else accuracy
        scored = personal or number == 3
        RunDirectory(path, {}).append(
            RoundRecord.from_line(
                {
                    "round": number,
                    key: score,
                    "accuracy_of": "personal" if personal else "server",
                    f"clients_{key}": score - 0.05 if scored else None,
                    "clients_spread": 0.02 if scored else None,
                    "bytes_down": down * 1_000_000 if number else 0,
                    "bytes_up": up * 1_000_000 if number else 0,
                    "bytes_overhead": 3_000 * number,
                    "bytes_fedavg": 20_000_000 if number else 0,
                    "seconds": (0.0, 3.0, 1.0, 1.0)[number],
                    "step_seconds": 0.01 * number if number else None,
                }
            )
        )


def comparison_in(folder: Path, strategies, seeds=(7,), **values) -> Comparison:
    """A comparison that nothing was run of."""
    return Comparison(folder.resolve(), planned_runs(strategies, seeds), dict(CONFIG), 10, **values)


def finish(comparison: Comparison, add=lambda _seed: 0.0, *, regression: bool = False) -> Comparison:
    """Leave every run that was not begun as one that finished, and write it all; `add`: to a seed's accuracies."""
    for run in comparison.runs:
        if run.outcome == "not run":
            run.directory = leave_run(
                comparison.folder, run.strategy, seed=run.seed, add=add(run.seed), regression=regression
            )
            run.outcome = "finished"
    comparison.save()
    write_comparison(comparison)
    return comparison


def variants_in(folder: Path, sections, seeds=(7,), **values) -> Comparison:
    """A comparison of variants that nothing was run of.

    `sections`: (title, question, name → strategy, further values of the section).
    """
    made = tuple(
        Section(title, tuple(Variant(name, {"strategy": of}) for name, of in names.items()), question=question, **more)
        for title, question, names, more in sections
    )
    return Comparison(folder.resolve(), planned_variants(made, seeds), dict(CONFIG), 10, sections=made, **values)
