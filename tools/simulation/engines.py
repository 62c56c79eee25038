"""Simulate a Flower app on this machine. An engine starts the processes and removes them afterwards.

    ProcessEngine   a process that imports the app, and forks the ServerApp and a worker for each client that trains
    RayEngine       Flower's simulation runtime: a SuperLink, Ray, and an actor for each client that trains

An engine runs one app any number of times, one run after another, with the same processes: they keep their imports and
data.

Flower's managed `:local:` SuperLink keeps running, has a database in the user's home, and its client actors import from
its working directory before the app bundle. This SuperLink runs in an empty temporary folder and ends with the engine.
"""

from __future__ import annotations

from pathlib import Path

from tepal.host.superlink import app_settings
from tepal.tools.simulation.engine import Engine
from tepal.tools.simulation.process_engine import ProcessEngine
from tepal.tools.simulation.ray_engine import RayEngine

AUTO, PROCESS, RAY = "auto", "process", "ray"
ENGINES = (AUTO, PROCESS, RAY)
"""Names of engines; `AUTO` chooses one of the other two."""


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
        ValueError: an argument is out of range, or the app's engine is not one of `ENGINES`.
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
        chosen, why = of_app, "set in the app's pyproject.toml"
    else:
        chosen, why = PROCESS, "Ray is not needed"
    if chosen == RAY and gpus > 0 and not _has_gpu():
        raise ValueError(
            f"--gpus {gpus:g}: this machine has no GPU that PyTorch can use; leave out --gpus, or see `tepal doctor`"
        )
    if chosen == RAY:
        return RayEngine(app, clients, cpus or 1, gpus, cache=cache, why=why)
    if gpus:
        raise ValueError(
            f"--gpus {gpus:g} with --engine process: in one process clients share a GPU without limits; leave out "
            "--gpus, or use --engine ray"
        )
    return ProcessEngine(app, clients, cpus or 1, cache=cache, why=why)


def _has_gpu() -> bool:
    import torch  # seconds

    return bool(torch.cuda.is_available())
