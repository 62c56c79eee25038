"""The engine of the Python API: the ServerApp and its clients in the calling process, where the user's objects are."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from flwr.clientapp import ClientApp

from tepal.client_app import app as own
from tepal.host.files import new_log
from tepal.host.superlink import EndedRun, Listener, RunError
from tepal.host.toml import Value
from tepal.records.run_directory import KEPT_IN
from tepal.server_app.config import ConfigError
from tepal.server_app.run import run
from tepal.strategies import RoundFailed
from tepal.strategies.in_process import PopulationGrid

_log = logging.getLogger("flwr")
_FORMAT = "%(levelname)s : %(message)s"


class ThisProcess:
    """Runs Tepal's own app in this process, one client after another, each with all cores that PyTorch has.

    Args:
        clients: number of clients.
        client_app: what the clients run; by default Tepal's own ClientApp.
    """

    options = ""
    """As `Runner.options`."""

    def __init__(self, clients: int, client_app: ClientApp | None = None) -> None:
        self.clients = clients
        self._app = client_app or own.app
        self.cache: Path | None = None
        """Folder of the clients' caches."""

    def run(
        self, run_config: Mapping[str, Value], *, on_event: Listener | None = None, log: Path | None = None
    ) -> EndedRun:
        """Run once, and wait for its end.

        Args:
            run_config: the whole run config, flat.
            on_event: called with stages and log lines.
            log: file for the run's log (default: a new one in the system's temporary folder).

        Raises:
            ConfigError: the run config is invalid.
            RunError: the run failed after its directory was made, such as by a round with too few valid replies.
        """
        tell = on_event or (lambda _kind, _text: None)
        log = log or new_log("run")
        begun = False

        def follow(line: str) -> None:
            nonlocal begun
            begun = begun or KEPT_IN in line
            tell("log", line)

        tell("stage", f"Running with {self.clients} clients in this process ...")
        own.prepare(run_config, self.clients)
        with (
            _logged(log, follow),
            _surroundings(self.cache),
            PopulationGrid(self._app, self.clients, run_config) as grid,
        ):
            try:
                run(grid, run_config)
            except Exception as error:  # as in a process of its own: no other run is to end
                if not begun:
                    raise
                _log.info("The run failed.", exc_info=error)
                expected = isinstance(error, RoundFailed | ConfigError | OSError)
                raise RunError(str(error) if expected else f"{type(error).__name__}: {error}", log) from error
        return EndedRun(1, "completed", log)


@contextmanager
def _surroundings(cache: Path | None) -> Iterator[None]:
    """Set what a run needs of its process, and restore it: the folder of caches, PyTorch's threads."""
    threads, before = torch.get_num_threads(), os.environ.get("TEPAL_CACHE")
    if cache is not None:
        os.environ["TEPAL_CACHE"] = str(cache)
    try:
        yield
    finally:
        torch.set_num_threads(threads)  # deterministic=true sets one
        if before is None:
            os.environ.pop("TEPAL_CACHE", None)
        else:
            os.environ["TEPAL_CACHE"] = before


@contextmanager
def _logged(file: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Write Flower's log of this thread and the run's clients to a file; only warnings are shown, too."""
    shown = [handler for handler in _log.handlers if isinstance(handler, logging.StreamHandler)]
    levels = [handler.level for handler in shown]
    level, disabled = _log.level, logging.root.manager.disable
    kept = _Kept(file, tell)
    for handler in shown:
        handler.setLevel(max(handler.level, logging.WARNING))
    _log.addHandler(kept)
    # The run directory is found by a line of the log, which a notebook may have silenced.
    _log.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        logging.disable(disabled)
        _log.setLevel(level)
        _log.removeHandler(kept)
        kept.close()
        for handler, level in zip(shown, levels, strict=True):
            handler.setLevel(level)


class _Kept(logging.FileHandler):
    """Writes records to a file, and passes their texts on."""

    def __init__(self, file: Path, tell: Callable[[str], None]) -> None:
        super().__init__(file, mode="w", encoding="utf-8")
        self.setFormatter(logging.Formatter(_FORMAT))
        self._tell = tell
        self._telling = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        with self._telling:
            self._tell(record.getMessage())
