"""Simulate a Flower app on this machine: engines that start what its runs need, and leave nothing behind.

    ProcessEngine   a process that imports the app, and forks the ServerApp and a worker for each client at work
    RayEngine       Flower's simulation runtime: a SuperLink, Ray, and an actor for each client at work

An engine runs one app any number of times, one run after another. What it starts serves all of them: the process keeps
its imports and the data it has read, the SuperLink and Ray stay up. `simulate` and `simulate_in_process` are one run
each.

Flower's managed `:local:` SuperLink stays alive afterwards, keeps a database in the user's home, and client actors
import from the folder it was started in before they import from the app bundle; ours runs in an empty temporary folder
and ends with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tepal.host.superlink import Listener, Outcome, app_settings
from tepal.host.toml import Value
from tepal.tools.simulation.engine import Engine
from tepal.tools.simulation.process_engine import ProcessEngine
from tepal.tools.simulation.ray_engine import RayEngine

AUTO, PROCESS, RAY = "auto", "process", "ray"
ENGINES = (AUTO, PROCESS, RAY)
"""What an engine is called; `AUTO` is the choice between the other two."""


def simulate(
    app: Path,
    *,
    clients: int,
    run_config: Mapping[str, Value] | Sequence[str] = (),
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    on_event: Listener | None = None,
    timeout: float | None = None,
    log: Path | None = None,
    cache: Path | None = None,
) -> Outcome:
    """Run the Flower app in the folder `app` in Flower's simulation runtime, and wait for its end.

    The app runs from a bundle in an empty temporary folder: outputs belong at absolute paths, given in `run_config`.

    Args:
        clients: Number of simulated clients (Flower's SuperNodes).
        run_config: Changes to the app's `[tool.flwr.app.config]`: a mapping with the flat keys, or strings as
            `flwr run --run-config` takes them (`'lr=0.1 name="x"'`, or the path of a TOML file); later ones win.
        cpus_per_client: CPU cores for each client at work; less than 1 runs more clients at once than there are cores.
        gpus_per_client: Share of a GPU for each client at work.
        on_event: Hears stages and log lines.
        timeout: Seconds after which the run is stopped, from the call on. None: no limit.
        log: File for the run's log (default: a new one in the system's temporary folder).
        cache: Folder for what clients keep (default: $TEPAL_CACHE, else a temporary one that ends with the run).

    Raises:
        RunError: with the app's own error where the app failed.
        ValueError: an argument out of range.
    """
    with RayEngine(app, clients, cpus_per_client, gpus_per_client, cache=cache) as engine:
        return engine.run(run_config, on_event=on_event, timeout=timeout, log=log)


def simulate_in_process(
    app: Path,
    *,
    clients: int,
    run_config: Mapping[str, Value] | Sequence[str] = (),
    cpus_per_client: float | None = None,
    on_event: Listener | None = None,
    timeout: float | None = None,
    log: Path | None = None,
    cache: Path | None = None,
) -> Outcome:
    """As `simulate`, but without SuperLink and Ray.

    `cpus_per_client` says how many are at work at once, as in `simulate`; by default clients take turns, and PyTorch
    has all cores for the one at work. OMP_NUM_THREADS, where it is set, says how many threads PyTorch has for each.
    """
    with ProcessEngine(app, clients, cpus_per_client, cache=cache) as engine:
        return engine.run(run_config, on_event=on_event, timeout=timeout, log=log)


def engine_for(
    asked: str, app: Path, *, clients: int, cpus: float | None = None, gpus: float = 0, cache: Path | None = None
) -> Engine:
    """The engine that is asked for or, of `AUTO`, one process unless something asks for Ray.

    Ray is for what one process cannot do: to give clients shares of GPUs (`gpus` > 0), and to run an app whose clients
    cannot share a process, which says so in its pyproject.toml: `engine = "ray"` under `[tool.tepal]`.

    Args:
        asked: one of `ENGINES`.
        cpus: CPU cores for each client at work.
        gpus: share of a GPU for each client at work.

    Raises:
        RunError: Ray is needed and not installed, or what the app says is not one of `ENGINES`.
        ValueError: an argument out of range.
    """
    of_app = str(app_settings(app).get("engine", AUTO))
    for where, name in (("--engine", asked), (f"{app}: engine in [tool.tepal] of pyproject.toml", of_app)):
        if name not in ENGINES:
            raise ValueError(f"{where} is {name!r}, expected auto, process or ray")
    if asked != AUTO:
        chosen, why = asked, f"--engine {asked}"
    elif gpus:
        chosen, why = RAY, f"--gpus {gpus:g} gives each client a share of a GPU"
    elif of_app != AUTO:
        chosen, why = of_app, "the app's pyproject.toml asks for it"
    else:
        chosen, why = PROCESS, "nothing asks for Ray"
    if chosen == RAY:
        return RayEngine(app, clients, cpus or 1, gpus, cache=cache, why=why)
    if gpus:
        raise ValueError(
            f"--gpus {gpus:g} with --engine process: in one process clients share a GPU without limits; leave out "
            "--gpus, or take --engine ray"
        )
    return ProcessEngine(app, clients, cpus or 1, cache=cache, why=why)
