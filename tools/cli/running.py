"""Runs started from the command line: their checks, progress, log and table."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tepal import models
from tepal.host.files import new_log
from tepal.host.superlink import Outcome, RunError
from tepal.records.run_directory import CHECKPOINTS, KEPT_IN, METRICS, find_run, read_metrics, read_summary
from tepal.report.terminal import RoundProgress, final_table, follow_metrics
from tepal.server_app.config import ConfigError, RunConfig

ENGINE = (
    "process: all clients in one process; ray: in Flower's simulation runtime; auto: in one process, unless --gpus or "
    "the app asks for Ray"
)
CPUS = "CPU cores for each client at work"

_CLIENTS = ".clients"  # in the folder of runs: what simulated clients keep, by experiment


def check_clients(config: RunConfig, clients: int, *, parts: bool = True) -> None:
    """What can be known before anything is started. `parts`: each client has one of the dataset. Raises ConfigError."""
    # Here and not at the top: torch takes seconds to import, and `tepal report` needs none of it.
    from tepal.server_app.run import build_model, build_strategy
    from tepal.training.data import DataError, check_partition

    _, blocks = build_model(config)
    needed = build_strategy(config, blocks).min_available_nodes
    if needed > clients:
        rounds, said = config.rounds, ""
        if rounds.strategy == "fedensemble":
            said = f" and fedensemble.strata={config.fedensemble.strata} of fraction-train={rounds.fraction_train:g}"
        raise ConfigError(
            f"min-clients={rounds.min_clients}, min-replies={rounds.min_replies}{said}: at least {needed} clients are "
            f"needed, and --clients is {clients}"
        )
    if parts:
        try:
            check_partition(config.data, clients, numbers=config.data.kind == models.SEQUENCES)
        except DataError as error:
            raise ConfigError(str(error)) from error


def run_and_show(start: Callable[..., Outcome], config: RunConfig, console: Console, verbose: bool) -> None:
    """One run with its progress, and its table at the end."""
    begun: list[Path] = []
    try:
        with RoundProgress(config.rounds.num_server_rounds, console=console) as progress:
            run = run_once(start, config, progress, console, verbose, begun.append)
    except KeyboardInterrupt:
        console.print(_go_on(begun[0]) if begun else "", markup=False, highlight=False, soft_wrap=True)
        raise
    summary = read_summary(run)
    if summary is not None:
        console.print(final_table(summary, read_metrics(run), run), soft_wrap=True)


def run_once(
    start: Callable[..., Outcome],
    config: RunConfig,
    progress: RoundProgress,
    console: Console,
    verbose: bool,
    on_run: Callable[[Path], None],
) -> Path:
    """One run by an engine or `loopback`; returns its directory, which `on_run` hears of as soon as there is one."""
    resumed, runs = places(config)
    done = threading.Event()
    found: list[Path] = []
    followers: list[threading.Thread] = []

    def follow(run: Path) -> None:
        for line in follow_metrics(run / METRICS, done.is_set):
            progress.update(line)

    def hear(kind: str, text: str) -> None:
        if verbose:
            console.print(text, markup=False, highlight=False)
        if kind == "stage" and not found and text:
            progress.stage(text)
        if kind == "log" and KEPT_IN in text and not found:
            # The ServerApp runs in a process of Flower's; the metrics that it writes are what is seen of it here.
            found.append(Path(text.partition(KEPT_IN)[2].strip()))
            on_run(found[0])
            followers.append(threading.Thread(target=follow, args=found, daemon=True))
            followers[0].start()

    log = new_log("run")
    try:
        start(
            run_config={**config.flat, "runs": str(runs), "resume": str(resumed or "")},
            on_event=hear,
            log=log,
        )
    except RunError as error:
        if not found:
            raise  # its text says where the log is
        kept = _keep_log(log, found[0])
        said = [error.reason, f"What there is of it: {found[0]}", _go_on(found[0])]
        raise RunError("\n".join(filter(None, said)), kept) from error
    finally:
        done.set()
        for follower in followers:
            follower.join(timeout=5)
        if found and log.exists():
            _keep_log(log, found[0])
        elif not isinstance(sys.exception(), RunError):
            log.unlink(missing_ok=True)
    if not found:
        raise RunError("the run ended without a run directory")
    # Here and not at the top: `tepal node status` is asked every few seconds, and needs nothing of Flower.
    from tepal.exchange.cache import forget_parts

    for experiment in cache_in(runs).glob(f"{found[0].name}-{'[0-9a-f]' * 8}"):  # as `run` names it
        forget_parts(experiment)
    return found[0]


def places(config: RunConfig) -> tuple[Path | None, Path]:
    """The run that a run resumes, if it does, and the folder of runs that its own directory is in."""
    resumed = find_run(Path(config.rounds.resume).expanduser()) if config.rounds.resume else None
    return resumed, resumed.parent if resumed else Path(config.rounds.runs).expanduser().resolve()


def cache_of(config: RunConfig) -> Path:
    """Where the clients of a run keep what they hold."""
    return cache_in(places(config)[1])


def cache_in(runs: Path) -> Path:
    # In the folder of runs, so that it outlives a run that is stopped, for it to go on.
    return Path(os.environ.get("TEPAL_CACHE") or runs / _CLIENTS)


def _go_on(run: Path) -> str:
    """How to resume a run that was stopped; "" for one that has no checkpoint."""
    return f"It goes on with -c 'resume=\"{run}\"'" if any((run / CHECKPOINTS).glob("round-*")) else ""


def _keep_log(log: Path, run: Path) -> Path:
    """Move Flower's own log of a run to its results, behind that of the run which this one resumed."""
    kept = run / "flower.log"
    with kept.open("ab") as file, log.open("rb") as new:
        shutil.copyfileobj(new, file)
    log.unlink()
    return kept
