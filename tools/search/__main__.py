"""`python -m tepal.tools.search FILE.toml`: search for settings."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tepal.host.superlink import RunError
from tepal.host.toml import Value
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunInUse
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.tools.cli import Ray, commands, reported
from tepal.tools.cli.running import APP, CPUS, MEMORY, Verbose, found_app, runner_for
from tepal.tools.paths import usual_run_config
from tepal.tools.search.plan import RMSE, check_trials, check_values, read_plan
from tepal.tools.search.results import best_table, trial_line
from tepal.tools.search.running import PLAN, open_search, run_trials, score_of
from tepal.tools.simulation.engine import Engine, Runner
from tepal.tools.simulation.engines import AUTO, PROCESS, engine_for
from tepal.tools.simulation.running import cache_in, check_clients, run_once
from tepal.tools.spaces import optuna_is_missing
from tepal.tools.terminal import RoundProgress, shown

app = commands("search")


@app.command()
def search_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="what is searched (docs/simulation.md)")],
    folder: Annotated[Path, typer.Option(help="folder of the search; one that was interrupted goes on")] = Path(
        "runs/search"
    ),
    trials: Annotated[int, typer.Option(min=1, help="trials of each variant in total")] = 12,
    flower_app: Annotated[Path, typer.Option("--app", help=APP, callback=found_app)] = Path("."),
    cpus: Annotated[float | None, typer.Option(min=0.01, help=CPUS, show_default="1")] = None,
    gpus: Annotated[float, typer.Option(min=0, help="on a cluster (--ray): share of a GPU for each run")] = 0,
    memory: Annotated[float, typer.Option(min=0, help=MEMORY)] = 0,
    ray: Ray = None,
    verbose: Verbose = False,
) -> None:
    """Search for settings: run config keys are drawn from ranges, and the best values of each variant kept.

    Each trial is a simulated run. Its score is the mean over the clients of the final model's accuracy (in a
    regression, of its error) on their own test examples. Ctrl-C ends the search; the same command goes on with it.
    """
    console = Console()
    with reported(RunError, RunInUse):
        if missing := optuna_is_missing():
            raise ConfigError(missing)
        plan = read_plan(file)
        usual = {**defaults(), **usual_run_config(flower_app)}
        measure = check_values(plan, usual, file)
        minimise = measure == RMSE
        with _engine(ray, flower_app, plan.clients, cpus, gpus, memory) as engine:
            engine.start_ahead(len(plan.searched))
            folder = folder.expanduser().resolve()
            checked = partial(check_clients, clients=plan.clients, here=engine.here)
            check_trials(plan, usual, file, checked, begun=(folder / PLAN).exists())
            open_search(plan, usual, folder)
            engine.cache = cache_in(folder)
            console.print(engine.description, markup=False, highlight=False, soft_wrap=True)
            try:
                found = run_trials(
                    plan, folder, trials, Simulated(engine, usual, folder, measure, console, verbose),
                    minimise=minimise,
                    on_trial=lambda trial: console.print(trial_line(trial, trials, minimise), soft_wrap=True),
                    at_once=engine.at_once, stop=engine.stop,
                )  # fmt: skip
            except KeyboardInterrupt:
                console.print(shown(f"Stopped. Results so far in {folder}; the same command goes on"), soft_wrap=True)
                raise typer.Exit(130) from None  # as shells do for a command that Ctrl-C ended
        console.print(best_table(found, folder), soft_wrap=True)
    if found.without:
        raise typer.Exit(1)


def _engine(
    ray: str | None, app: Path, clients: int, cpus: float | None, gpus: float, memory: float
) -> AbstractContextManager[Runner]:
    """Return the engine of all trials. Raises ValueError for what only the machines of a cluster can be asked for."""

    def here(_engine: str, app: Path, **resources: Any) -> Engine:
        if gpus:
            raise ValueError(
                f"--gpus {gpus:g} needs a Ray cluster: add --ray ADDRESS, or remove --gpus. On this machine clients "
                "share the GPUs"
            )
        return engine_for(PROCESS, app, **resources)

    return runner_for(ray, AUTO, app, here, clients=clients, cpus=cpus, gpus=gpus, memory=memory)


class Simulated:
    """Runs trials with an engine: an `Objective`."""

    def __init__(
        self, engine: Runner, usual: Mapping[str, Value], folder: Path, measure: str, console: Console, verbose: bool
    ) -> None:
        self._engine, self._usual, self._folder, self._measure = engine, usual, folder, measure
        self._console, self._verbose = console, verbose

    def __call__(self, name: str, config: Mapping[str, Value], on_run: Callable[[Path], None]) -> float:
        values = {**self._usual, **config, "runs": str(self._folder), "resume": ""}
        checked = read_run_config(values, warn=False)
        rounds = checked.rounds.num_server_rounds
        with TrialProgress(rounds, name, self._console, alone=self._engine.at_once == 1) as progress:
            run = run_once(self._engine, checked, progress, self._console, self._verbose, on_run)
        return score_of(run, self._measure, rounds)


class TrialProgress(RoundProgress):
    """Shows in a terminal what a trial is doing, on a line that disappears with it; elsewhere nothing.

    `alone`: no other trial runs at the same time; else nothing is shown but what happens to its machine.
    """

    def __init__(self, rounds: int, name: str, console: Console, *, alone: bool = True) -> None:
        super().__init__(rounds, console=Console(file=io.StringIO()))
        self._trial, self._of, self._shown = name, rounds, console
        self._status = console.status(shown(name)) if console.is_terminal and alone else None

    def __enter__(self) -> TrialProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def stage(self, text: str) -> None:
        if self._status is not None:
            self._status.update(shown(f"{self._trial}: {text}"))

    def note(self, text: str) -> None:
        self._shown.print(shown(f"{self._trial}: {text}"), soft_wrap=True)

    def update(self, line: RoundRecord) -> None:
        self.stage(f"round {line.round}/{self._of}")


if __name__ == "__main__":
    app(prog_name="python -m tepal.tools.search")
