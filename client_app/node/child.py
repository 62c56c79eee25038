"""A child process of the node's parent process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping

from tepal.host.flower.link import Link, command


class Child:
    """A process that runs a module of `tepal.host.flower`, connected by a `Link`, in its own session.

    `_listen` of a subclass reads the link, in a thread of its own.

    Args:
        module: of `tepal.host.flower`.
        arguments: of the module, after the number of the link's file descriptor.
        environment: variables of the process.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        self.link, there = Link.pair()
        try:
            with there:
                self._process = subprocess.Popen(
                    command(module, str(there.fileno()), *arguments),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    start_new_session=True,
                )
        except OSError:
            self.link.close()
            raise
        try:
            threading.Thread(target=self._listen, name=module, daemon=True).start()
        except RuntimeError as error:  # no more threads, which count as processes
            self.kill()
            self.link.close()
            raise OSError(f"{error} for the process {module}") from error

    def _listen(self) -> None:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the process, but no longer than `seconds`; return `status`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.status

    def interrupt(self) -> None:
        """Send SIGINT."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process and all others in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
