"""A thread that follows the log of a run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from tepal.host.processes import Process, ProcessError
from tepal.host.superlink import Clock, follow, keep_log
from tepal.records.run_directory import KEPT_IN
from tepal.tools.deploy.recovery import Due


class Watch:
    """A run of the SuperLink, followed by a thread."""

    def __init__(
        self, run_id: int, control: str, superlink: Process, log: Path, root_certificates: Path | None, due: Due | None
    ) -> None:
        self.run_id = run_id
        self.log = log
        self.due = due
        self.directory: Path | None = None
        """The run directory without symbolic links, once it is in the log."""
        self.recorded = False
        """Whether the queue has recorded the run directory."""
        self.end: tuple[str, str] | None = None
        """Flower's final status and explanation."""
        self.free_since: float | None = None
        """The time since when no process runs in the run directory."""
        self.pending_since = time.monotonic()
        self._clock = Clock(self._on_event, None)
        self._thread = threading.Thread(
            target=self._follow, args=(control, superlink, root_certificates), name=f"run-{run_id}", daemon=True
        )
        self._thread.start()

    def _follow(self, control: str, superlink: Process, root_certificates: Path | None) -> None:
        # The supervisor notices a lost SuperLink; a run that cannot be followed is still seen on disk.
        with contextlib.suppress(ProcessError, OSError, ValueError, KeyError):
            self.end = follow(self.run_id, control, superlink, self._clock, self.log, root_certificates)

    def _on_event(self, kind: str, text: str) -> None:
        if kind != "log":
            return
        with contextlib.suppress(OSError):
            print(text, flush=True)  # it is not in the SuperLink's log
        if KEPT_IN in text and self.directory is None:
            self.directory = Path(os.path.realpath(text.partition(KEPT_IN)[2].strip()))

    @property
    def lost(self) -> bool:
        """Whether the thread has ended without the end of the run."""
        return self.end is None and not self._thread.is_alive()

    def leave(self) -> None:
        """Stop following, for which the SuperLink would wait at its end, and move the log into the run directory."""
        self._clock.limit = 0.0
        self._thread.join(5)
        with contextlib.suppress(OSError):
            if self.directory is None:
                self.log.unlink(missing_ok=True)
            else:
                keep_log(self.log, self.directory)
