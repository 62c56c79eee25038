"""The connection between the node's parent and a child process: one JSON object a line, over a socket pair.

The stream ends when the process at the other end dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Runs a file of this folder as a module of the package `tepal_node`: see __init__.py. `die_with_parent` comes first,
# because the imports take seconds, in which the parent may be killed.
_START = """
import importlib, importlib.util, os, signal, sys
folder, module, parent, *sys.argv[1:] = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "tepal_node", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
)
package = sys.modules["tepal_node"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module("tepal_node.link").die_with_parent(int(parent), signal.SIGKILL)
importlib.import_module("tepal_node." + module).main()
"""
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `main` of a module of this folder in a child process, which dies with this one."""
    # -P: do not import modules from the working directory.
    folder, here = str(Path(__file__).resolve().parent), str(os.getpid())
    return [sys.executable, "-P", "-c", _START, folder, module, here, *arguments]


class Link:
    """One end of the connection. Several threads may send; one thread receives, by iterating."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lines = end.makefile("rb")
        self._sending = threading.Lock()

    @staticmethod
    def pair() -> tuple[Link, socket.socket]:
        """Return this process's end, and the socket that a child inherits: close it when the child has started."""
        here, there = socket.socketpair()
        return Link(here), there

    @staticmethod
    def inherited(number: str) -> Link:
        """Return the end that this process has inherited as this file descriptor."""
        end = socket.socket(fileno=int(number))
        end.set_inheritable(False)
        return Link(end)

    def send(self, event: str, **values: Any) -> bool:
        """Send one object; return False if the other end is closed."""
        data = json.dumps({"event": event, **values}).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
            return True
        except OSError:
            return False

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield the objects that the other end sends, until it is closed."""
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                yield json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent, whose pid was `parent`, dies. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)
