"""A process that has imported the large libraries, and forks the Python programs of deployments from itself.

A ServerApp or ClientApp imports torch, its optimizers' compiler, gRPC and more before it does anything: five seconds of
processor time. A fork of a process that has them is there at once. `fork_server/sitecustomize.py` is how a program
comes to be one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "fork_server"
# Nothing of Flower or of Tepal: what they do when they are imported depends on the environment.
LIBRARIES = (
    "torch", "torch._dynamo", "torch.utils.data", "numpy", "scipy.optimize", "safetensors.numpy", "joblib", "PIL.Image",
    "grpc", "grpc_health.v1.health", "google.protobuf.json_format", "cryptography.x509", "Crypto.PublicKey.ECC",
    "fastapi", "uvicorn", "httpx", "requests", "sqlalchemy.orm", "alembic.command", "pydantic", "typer", "rich.console",
    "psutil", "yaml", "tomli_w", "tomlkit", "pathspec", "plotly.graph_objects", "narwhals",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1


def forked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Python programs, changed so that they run as forks. Those they start do as well.

    On Linux; elsewhere they run as they would.
    """
    if not sys.platform.startswith("linux"):
        return dict(environment)
    path = os.pathsep.join(filter(None, [str(FOLDER), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path, "TEPAL_TEST_FORKS": str(_address())}


@functools.cache
def _address() -> Path:
    """Start the server of forks, which ends with this process; return the socket where it is asked."""
    from tepal.host.processes import MARK  # not in the server, whose forks import Tepal themselves

    folder = Path(tempfile.mkdtemp(prefix="tepal-forks-"))
    address = folder / "socket"
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}  # it belongs to no test
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())],
            env=unmarked | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )

    owner = os.getpid()

    def end() -> None:
        if os.getpid() != owner:  # a fork of it
            return
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return address


class _Server:
    """Forks for whoever asks, and tells each when its fork has ended, and how."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._parent_gone)
        self._selector.register(listening, selectors.EVENT_READ, self._fork)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _parent_gone(self) -> None:
        os._exit(0)  # the forks are told by the kernel

    def _fork(self) -> None:
        asked, _ = self._listening.accept()
        asked.settimeout(10)
        try:
            program, files = _received(asked)
        except (OSError, ValueError):
            asked.close()
            return
        parent = os.getpid()
        if not (pid := os.fork()):
            asked.close()
            self._selector.close()
            self._listening.close()
            _become(program, files, parent)
        for number in files:
            os.close(number)
        ended = os.pidfd_open(pid)
        self._selector.register(asked, selectors.EVENT_READ, functools.partial(self._hear, asked, pid))
        self._selector.register(ended, selectors.EVENT_READ, functools.partial(self._ended, asked, pid, ended))

    def _hear(self, asked: socket.socket, pid: int) -> None:
        numbers = b""
        with contextlib.suppress(OSError):
            numbers = asked.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            self._selector.unregister(asked)

    def _ended(self, asked: socket.socket, pid: int, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            asked.sendall(os.waitstatus_to_exitcode(status).to_bytes(2, "big", signed=True))
        with contextlib.suppress(KeyError):
            self._selector.unregister(asked)
        asked.close()


def _received(asked: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what the program is, and its open files under the numbers that they have here."""
    data, files, _, _ = socket.recv_fds(asked, 4, 64)
    said = b""
    length = int.from_bytes(data, "big")
    while len(said) < length:
        part = asked.recv(length - len(said))
        if not part:
            raise OSError("it ended")
        said += part
    return json.loads(said), files


def _become(program: Mapping[str, Any], files: list[int], server: int) -> None:
    """Be the program, and end as it ends."""
    status = 1
    try:
        _take_over(program, files, server)
        _run(program)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if not isinstance(leaving.code, int | None):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _take_over(program: Mapping[str, Any], files: list[int], server: int) -> None:
    """Take over the open files, environment, folder and paths of the program. `server` is this process's parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    high = max([*program["files"], *map(int, os.listdir("/proc/self/fd"))]) + 1
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, high) for number in files]
    os.closerange(0, high)
    for copy, number in zip(copies, program["files"], strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.environ.clear()
    os.environ.update(program["environment"])
    os.chdir(program["folder"])
    os.getppid = lambda: int(program["parent"])
    sys.path[:] = program["path"]
    sys.argv[:] = ["-c", *program["arguments"]]
    tempfile.tempdir = None
    np.random.seed()  # Python's own generators are seeded anew at each fork


def _run(program: Mapping[str, Any]) -> None:
    for folder in sys.path:  # another of its name, which Python has not found because of ours
        path = Path(folder, "sitecustomize.py")
        if path.is_file() and path.parent != FOLDER:
            runpy.run_path(str(path))
    kind, what = program["kind"], program["what"]
    before = [] if program["safe_path"] else [{"-c": "", "-m": os.getcwd()}.get(kind, str(Path(what).parent.resolve()))]
    sys.path[:0] = before
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(what, main.__dict__)
    else:
        sys.argv[0] = what
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    server = _Server(socket.socket(fileno=int(sys.argv[1])))
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    server.serve()
