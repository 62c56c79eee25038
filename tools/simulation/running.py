"""One run with an engine, followed to its end: checks before it, its progress, its log and the clients' caches."""

from __future__ import annotations

import glob
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tepal.host.files import new_log
from tepal.host.superlink import RunError, keep_log
from tepal.records.run_directory import CHECKPOINTS, KEPT_IN, METRICS, SIMULATION, find_run, read_json, write_whole
from tepal.tools.terminal import RoundProgress, follow_metrics

if TYPE_CHECKING:
    from tepal.server_app.config import RunConfig
    from tepal.tools.simulation.engine import Runner
    from tepal.tools.simulation.this_process import ThisProcess

_CLIENTS = ".clients"  # in the folder of runs: the caches of simulated clients, by experiment


def check_clients(config: RunConfig, clients: int, *, parts: bool = True, here: bool = True) -> None:
    """Check the settings before a run. Raises ConfigError.

    Args:
        config: of the run.
        clients: number of clients.
        parts: whether each client has a partition of the dataset.
        here: whether they train on this machine, which must then have their devices.
    """
    # Imported here: torch takes seconds.
    from tepal.server_app.config import ConfigError
    from tepal.server_app.run import build_model, build_strategy

    _, blocks = build_model(config)
    needed = build_strategy(config, blocks).rules.needed
    problems = [*_weights_problems(config), *_own_problems(config, here)]
    if parts and (problem := _other_number(config, clients)):
        problems.append(problem)
    elif needed > clients:
        rounds, said = config.rounds, ""
        if rounds.strategy == "fedensemble":
            said = f" and fedensemble.strata={config.fedensemble.strata} of fraction-train={rounds.fraction_train:g}"
        problems.append(
            f"--clients is {clients}, expected at least {needed} because of min-clients={rounds.min_clients}, "
            f"min-replies={rounds.min_replies}{said}"
        )
    elif parts and (problem := _no_partition(config, clients)):
        problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))


def check_parts(config: RunConfig, clients: int) -> None:
    """Check of `check_clients` what differs between runs with different seeds. Raises ConfigError."""
    from tepal.server_app.config import ConfigError  # torch takes seconds

    if problem := _other_number(config, clients) or _no_partition(config, clients):
        raise ConfigError(problem)


def _other_number(config: RunConfig, clients: int) -> str:
    """Return what is wrong with the number of clients of a run that is resumed; "" if nothing is."""
    kept = clients_of(config.rounds.resume)
    if kept in (None, clients):
        return ""
    return (
        f"--clients is {clients}, and the run in {config.rounds.resume} has {kept} clients, among which its data "
        f"is divided: give --clients {kept}, or leave it out"
    )


def _no_partition(config: RunConfig, clients: int) -> str:
    """Return why the data cannot be divided among the clients; "" if it can."""
    from tepal.training.data import DataError, check_partition  # torch takes seconds
    from tepal.training.data.inputs import examples_of

    try:
        check_partition(config.data, clients, examples_of(config.data))
    except DataError as error:
        return str(error)
    return ""


def forget_data() -> None:
    """Forget the data that checks have read in this process: a run in another process reads it there."""
    from tepal.training.data import hub, partitions, sources

    for cached in (sources.load_path, sources.load_digits, hub.load_hub, partitions.divide):
        cached.cache_clear()


def clients_of(run: str) -> int | None:
    """Return how many clients the simulated run has that `resume` names; None if that is not known."""
    if not run:
        return None
    try:
        kept = read_json(find_run(Path(run).expanduser()) / SIMULATION)
    except FileNotFoundError:
        return None  # reading the run config tells it
    count = kept.get("clients") if isinstance(kept, dict) else None
    return count if type(count) is int and count > 0 else None


def _weights_problems(config: RunConfig) -> Iterator[str]:
    """Yield which initial weights cannot be had. Those on the hub are downloaded here: a run is offline."""
    from tepal.models import ModelError  # torch takes seconds
    from tepal.models.pretrained import find_weights

    for source in () if config.rounds.resume else config.rounds.sources:
        try:
            find_weights(source)
        except ModelError as error:
            yield f"pretrained={source!r}: {error}"


def _own_problems(config: RunConfig, here: bool) -> Iterator[str]:
    """Yield what single clients' own settings name and this machine does not have: data and devices."""
    from tepal.training.loop import device_of  # torch takes seconds

    for client, own in config.clients.items():
        path = own.get("data-path")
        if path and not Path(str(path)).exists():
            yield f"client.{client}.data-path={path!r}: there is no such file or folder"
        if not here:
            continue
        try:
            device_of(str(own["device"]) if "device" in own else None)
        except ValueError:
            yield f"client.{client}.device={own['device']!r}: this machine does not have it"


def run_once(
    engine: Runner | ThisProcess,
    config: RunConfig,
    progress: RoundProgress,
    console: Console,
    verbose: bool,
    on_run: Callable[[Path], None],
) -> Path:
    """Run once with an engine; return the run directory.

    Args:
        engine: computes it.
        config: of the run.
        progress: shows it.
        console: where Flower's log is shown if `verbose`.
        on_run: called with the run directory when it is made.
    """
    resumed, runs = places(config)
    done = threading.Event()
    found: list[Path] = []
    followers: list[threading.Thread] = []

    def follow(run: Path) -> None:
        for line in follow_metrics(run / METRICS, done.is_set):
            progress.update(line)

    def on_event(kind: str, text: str) -> None:
        if verbose and kind != "note":
            console.print(text, markup=False, highlight=False)
        if kind == "stage" and not found:
            progress.stage(text)
        if kind == "note":
            progress.note(text)
        if kind == "log" and KEPT_IN in text and not found:
            # The ServerApp runs in another process: its progress is read from the metrics that it writes.
            found.append(Path(text.partition(KEPT_IN)[2].strip()))
            if resumed is None:  # of one from an earlier version the number is only assumed
                with suppress(OSError):  # a full disk: the run goes on
                    write_whole(found[0] / SIMULATION, (json.dumps({"clients": engine.clients}) + "\n").encode())
            on_run(found[0])
            followers.append(threading.Thread(target=follow, args=found, daemon=True))
            followers[0].start()

    log = new_log("run")
    try:
        engine.run(
            run_config={**config.flat, "runs": str(runs), "resume": str(resumed or "")},
            on_event=on_event,
            log=log,
        )
    except RunError as error:
        if not found:
            raise  # the message has the path of the log
        kept = keep_log(log, found[0])
        said = [error.reason, f"Results so far: {found[0]}", resume_hint(found[0], engine.options)]
        raise type(error)("\n".join(filter(None, said)), kept) from error  # a search tells some from others
    finally:
        done.set()
        for follower in followers:
            follower.join(timeout=5)
        if found and log.exists():
            keep_log(log, found[0])
        elif not isinstance(sys.exception(), RunError):
            log.unlink(missing_ok=True)
    if not found:
        raise RunError("the run ended without a run directory")
    # Imported here: it imports Flower.
    from tepal.exchange.cache import forget_parts

    for experiment in _experiments(cache_in(runs), found[0].name):
        forget_parts(experiment)
    return found[0]


def remove_run(run: Path) -> None:
    """Remove the directory of a run that was cut off, and its clients' caches next to it.

    Those in TEPAL_CACHE stay: other folders of runs may share it, and have a run of this name.
    """
    from tepal.exchange.cache import forget_parts  # it imports Flower

    shutil.rmtree(run, ignore_errors=True)
    for experiment in _experiments(run.parent / _CLIENTS, run.name):
        forget_parts(experiment)
        shutil.rmtree(experiment, ignore_errors=True)


def _experiments(cache: Path, run: str) -> Iterator[Path]:
    """The folders of a run in a cache, as `tepal.server_app.run` names them."""
    return cache.glob(f"{glob.escape(run)}-{'[0-9a-f]' * 8}")


def places(config: RunConfig) -> tuple[Path | None, Path]:
    """Return the run to resume, if any, and the folder of the run directories."""
    resumed = find_run(Path(config.rounds.resume).expanduser()) if config.rounds.resume else None
    return resumed, resumed.parent if resumed else Path(config.rounds.runs).expanduser().resolve()


def cache_of(config: RunConfig) -> Path:
    """Return the folder of the clients' caches of a run."""
    return cache_in(places(config)[1])


def cache_in(runs: Path) -> Path:
    # In the folder of runs, so that a run that is resumed finds it.
    return Path(os.environ.get("TEPAL_CACHE") or runs / _CLIENTS)


def resume_hint(run: Path, options: str = "") -> str:
    """Return how to resume a run with an engine's options; "" without a checkpoint."""
    resume = shlex.quote(f'resume="{run}"')
    said = " ".join(filter(None, (f"Resume it with -c {resume}", options)))
    return said if any((run / CHECKPOINTS).glob("round-*")) else ""
