"""The line between the node's parent and a child process: JSON, one object a line, over a socket pair.

Either end learns of the other's death by the end of the stream.
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

# Starts a file of this folder as the package `tepal_node`: see __init__.py. What it imports takes seconds, and the
# parent may be killed meanwhile.
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
    # -P: the folder that it is started in is nobody's source of modules.
    folder, here = str(Path(__file__).resolve().parent), str(os.getpid())
    return [sys.executable, "-P", "-c", _START, folder, module, here, *arguments]


class Link:
    """One end. Several threads may send; one reads, by iterating."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lines = end.makefile("rb")
        self._sending = threading.Lock()

    @staticmethod
    def pair() -> tuple[Link, socket.socket]:
        """Return this process's end, and the one whose number a child inherits: close it when the child is started."""
        here, there = socket.socketpair()
        return Link(here), there

    @staticmethod
    def inherited(number: str) -> Link:
        """The end that the parent left open for this process under that file number."""
        end = socket.socket(fileno=int(number))
        end.set_inheritable(False)
        return Link(end)

    def send(self, event: str, **values: Any) -> bool:
        """Send one object; return False if nobody is there any more."""
        data = json.dumps({"event": event, **values}).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
            return True
        except OSError:
            return False

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield what the other end sends, until it is gone."""
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
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)
