"""`tepal compare` with simulations that leave a run at once."""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tepal.records.run_directory import KEPT_IN, RunDirectory, read_config
from tepal.tools.cli.main import main
from tests.comparisons import continue_run, leave_run
from tests.packages import ROOT


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """`tepal compare` with simulations that leave a run at once.

    `failing` says what instead happens to a strategy, or to one with a seed, after the first round; `during` is called
    with each run's strategy and directory then. `engine.at_once` runs are done at the same time.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started, asked, failing, during = [], [], {}, [lambda strategy, run: None]
    stopped = threading.Event()
    engine = SimpleNamespace(
        start_ahead=lambda runs: None, stop=stopped.set, at_once=1, here=True, description="Engine: none", options=""
    )  # fmt: skip

    def simulate(run_config, *, on_event, log):
        config = dict(run_config)
        strategy, seed = config["strategy"], config["seed"]
        started.append((config, asked[-1]))
        error = failing.get(strategy) or failing.get((strategy, seed))
        if isinstance(error, ValueError):
            raise error  # as before anything is started
        if config["resume"]:
            run = Path(config["resume"])
            continue_run(run, strategy, range(2, 2 if error else 4))
        else:
            run = leave_run(Path(config["runs"]), strategy, rounds=1 if error else 3, summary=False, config=config)
        (run / "checkpoint" / "round-000001").mkdir(parents=True, exist_ok=True)
        on_event("log", f"INFO : {KEPT_IN}{run}")
        log.write_text("Flower's log")
        during[-1](strategy, run)
        if error:
            raise error
        RunDirectory(run, read_config(run)).write_summary()

    def engine_for(name, app, **resources):
        asked.append({"engine": name, "app": app, **resources})
        engine.run, engine.clients = simulate, resources["clients"]
        return contextlib.nullcontext(engine)

    monkeypatch.setattr("tepal.tools.cli.compare.engine_for", engine_for)

    def run(*arguments, config=f'num-server-rounds=3 runs="{tmp_path / "runs"}"'):
        given = ["-c", config, "--clients", "3"] if config else []
        return CliRunner().invoke(main, ["compare", ".", *given, *arguments])

    def cells():
        """(strategy, seed) of every simulation that was started since this was asked last."""
        found = [(config["strategy"], config["seed"]) for config, *_ in started]
        started.clear()
        return found

    run.asked, run.engine, run.during, run.stopped = asked, engine, during, stopped
    run.started, run.failing, run.runs, run.cells = started, failing, tmp_path / "runs", cells
    return run
