"""Simulate a Flower app on this machine. An engine starts the processes and removes them afterwards.

    ProcessEngine   a process that imports the app, and forks the ServerApp and a worker for each client that trains
    RayEngine       Flower's simulation runtime: a SuperLink, Ray, and an actor for each client that trains

An engine runs one app any number of times, one run after another, with the same processes: they keep their imports and
data. `simulate` and `simulate_in_process` run an app once.

Flower's managed `:local:` SuperLink keeps running, has a database in the user's home, and its client actors import from
its working directory before the app bundle. This SuperLink runs in an empty temporary folder and ends with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tepal.host.superlink import EndedRun, Listener, app_settings
from tepal.host.toml import Value
from tepal.tools.simulation.engine import Engine
from tepal.tools.simulation.process_engine import ProcessEngine
from tepal.tools.simulation.ray_engine import RayEngine

AUTO, PROCESS, RAY = "auto", "process", "ray"
ENGINES = (AUTO, PROCESS, RAY)
"""Names of engines; `AUTO` chooses one of the other two."""


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
) -> EndedRun:
    """Run the Flower app in the folder `app` in Flower's simulation runtime, and wait for its end.

    The app runs from a bundle in an empty temporary folder: outputs belong at absolute paths, given in `run_config`.

    Args:
        clients: Number of simulated clients (Flower's SuperNodes).
        run_config: Changes to the app's `[tool.flwr.app.config]`: a mapping with the flat keys, or strings as
            `flwr run --run-config` takes them (`'lr=0.1 name="x"'`, or the path of a TOML file); later ones win.
        cpus_per_client: CPU cores for each client that trains; with less than 1, more clients than cores train at once.
        gpus_per_client: Share of a GPU for each client that trains.
        on_event: Called with stages and log lines.
        timeout: Seconds from the call on, after which the run is stopped. None: no limit.
        log: File for the run's log (default: a new one in the system's temporary folder).
        cache: Folder of the clients' caches (default: $TEPAL_CACHE, else a temporary one, removed after the run).

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
) -> EndedRun:
    """As `simulate`, but without SuperLink and Ray.

    By default clients train in turn, each with all cores. With `cpus_per_client` several train at the same time, as in
    `simulate`. OMP_NUM_THREADS, if set, is the number of PyTorch's threads for each.
    """
    with ProcessEngine(app, clients, cpus_per_client, cache=cache) as engine:
        return engine.run(run_config, on_event=on_event, timeout=timeout, log=log)


def engine_for(
    asked: str, app: Path, *, clients: int, cpus: float | None = None, gpus: float = 0, cache: Path | None = None
) -> Engine:
    """Return the engine `asked`; for `AUTO`, a ProcessEngine unless Ray is needed.

    Ray is needed to give clients shares of GPUs (`gpus` > 0), and for an app whose clients cannot share a process. Such
    an app has `engine = "ray"` under `[tool.tepal]` in its pyproject.toml.

    Args:
        asked: one of `ENGINES`.
        cpus: CPU cores for each client that trains.
        gpus: share of a GPU for each client that trains.

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
