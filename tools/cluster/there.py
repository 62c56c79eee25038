"""What the process of a job does on its machine: a run, or the clients of one.

This module imports no deep learning library, and so the process begins at once: the app is imported by a process of its
own, that of the engine.
"""

from __future__ import annotations

import atexit
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from tepal.host.toml import Value
from tepal.records.run_directory import RunDirectory, read_config
from tepal.tools.simulation.process_engine import ProcessEngine

RUNS, CACHE, WORKER = "runs", "clients", "worker"
"""Folders in a job's: of runs, of the clients' caches, of the messages to clients and their replies."""


def start_there(folder: Path, *, app: str, clients: int) -> None:
    """Start the process that imports the app, for the job that comes next. Raises RunError."""
    _engine_there(Path(app), clients, folder / CACHE).start_ahead()


def run_there(
    folder: Path, *, app: str, config: Mapping[str, Value], files: Collection[str], run: str, clients: int
) -> None:
    """Do a run on the machine that its job is on, in the job's folder. Raises RunError.

    Args:
        folder: of the job.
        app: folder of the app.
        config: the run config, with paths on this machine.
        files: its keys that name files.
        run: name of the run directory.
        clients: number of clients.
    """
    directory = folder / RUNS / run
    paths = {key: config[key] for key in files}
    RunDirectory(directory, {}).write_config({**read_config(directory), **paths, "runs": str(directory.parent)})
    asked = {**config, "runs": str(directory.parent), "resume": str(directory)}
    _engine_there(Path(app), clients, folder / CACHE).run(asked, on_event=_show, log=folder / "run.log")


def answer_there(
    folder: Path, *, app: str, config: Mapping[str, Value], clients: int, paths: Mapping[str, str]
) -> None:
    """Train clients on the machine that a job is on, in the job's folder, until they are to end. Raises RunError.

    Args:
        folder: of the job.
        app: folder of the app.
        config: the run config, with paths on this machine.
        clients: number of clients of the run.
        paths: path on the server's machine → path on this one, of files that messages name.
    """
    engine = _engine_there(Path(app), clients, folder / CACHE)
    engine.others = {"answers": str(folder / WORKER), "paths": dict(paths)}
    engine.run(config, on_event=_show, log=folder / "run.log")


def _show(kind: str, text: str) -> None:
    if kind == "log":
        print(text, flush=True)


@cache
def _engine_there(app: Path, clients: int, kept: Path) -> ProcessEngine:
    """The engine of all jobs of this process, which imports the app once. It ends with the process."""
    opened = ExitStack()
    atexit.register(opened.close)
    return opened.enter_context(ProcessEngine(app, clients, None, cache=kept))
