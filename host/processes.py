"""Start child processes, and stop them with everything that they have started.

Flower and Ray start processes in sessions of their own (flower-superexec, flwr-simulation, gcs_server, raylet), so
ending a process group is not enough. `started` puts a token into the child's environment, which every descendant
inherits. At the end it stops the group, all descendants, and every process that has the token or descends from one that
has. It does so after a normal end, an exception, Ctrl-C, and SIGTERM or SIGHUP to this process. If this process itself
is killed, a guard stops them: a small process that waits for the end of a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import ssl

MARK = "TEPAL_RUN_TOKEN"
"""Environment variable that marks the processes of a run: tokens joined by commas, the outermost first."""

_CLEANED_UP = b"cleaned up"  # sent to the guard by a block that has stopped its processes itself
_PR_SET_PDEATHSIG = 1
# Asks the kernel for SIGTERM when the parent dies, then becomes the program. It is a program, not Popen's preexec_fn:
# gRPC's fork handlers sometimes end a child there when its parent has gRPC threads.
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() != int(sys.argv[1]):  # it died before prctl
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ProcessError(RuntimeError):
    """A child process could not be started, or ended when it should not have. The message ends with its log's tail."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port. Another process may take it before the caller does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def flower_environment(home: Path, *hosts: str) -> dict[str, str]:
    """Return this process's environment, changed so that Flower commands use `home` and send no telemetry.

    `home` becomes FLWR_HOME: connections and installed app bundles are kept there and not in the user's `~/.flwr`.
    Servers on this machine and on `hosts` are asked without a proxy.
    """
    from tepal.host.addresses import without_proxy  # not for the guard, which runs this file as a script

    # Flower finds flower-superexec and flwr-simulation by name: they must be those of this interpreter, also when its
    # virtual environment was never activated.
    programs = str(Path(sys.executable).parent)
    return os.environ | {
        **without_proxy(*hosts),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Without this the SuperLink resolves and downloads the app's dependencies for every run.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class Process:
    """A child process and its descendants. Made by `started`."""

    name: str
    pid: int
    log: Path
    token: str
    _marks: str
    _popen: subprocess.Popen[bytes]

    @property
    def returncode(self) -> int | None:
        """The exit status of the child itself, None while it runs."""
        return self._popen.poll()

    @property
    def running(self) -> bool:
        return self.returncode is None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child's end and return its exit status; `TimeoutError` after `timeout` seconds."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout:g} s") from None

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that is stopped together with this child, as if the child had started it.

        `env` is the command's whole environment. Raises `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        return subprocess.run(
            _ending_with_parent(command, env),
            env={**env, MARK: self._marks},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=max(timeout, 0),
        )

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def tree(self) -> list[psutil.Process]:
        """Return the child and its descendants that are alive, also those whose parents have ended."""
        # Once the child has been reaped, its pid may belong to another process.
        return marked(self.token, *([self.pid] if self.running else []))

    def stop(self, grace: float = 10.0) -> None:
        """End the child and its descendants: SIGTERM, then SIGKILL to those that are left after `grace` seconds."""
        end = time.monotonic() + grace
        tree = self.tree()
        _signal(tree, signal.SIGTERM)
        while tree and time.monotonic() < end:
            time.sleep(0.02)
            tree = self._left(tree)
        self._kill(tree)

    def kill(self) -> None:
        """End the child and its descendants by SIGKILL, as a crash of its machine would."""
        self._kill(self.tree())

    def _kill(self, tree: list[psutil.Process]) -> None:
        # A process may fork while it is being killed: repeat until none is found.
        for _ in range(50):
            if not tree:
                break
            # The group's id is the child's pid, which stays reserved only while the child has not been reaped.
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            _signal(tree, signal.SIGKILL)
            time.sleep(0.02)
            tree = self._left(tree)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1)

    def _left(self, tree: list[psutil.Process]) -> list[psutil.Process]:
        """Return the processes of the tree that are alive, and new descendants."""
        self._popen.poll()  # reaps it
        # A known process is ours, even when its parent has ended and its environment cannot be read.
        return list({*filter(_alive, tree), *self.tree()})


@contextlib.contextmanager
def started(
    command: Sequence[str | os.PathLike[str]],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    name: str | None = None,
    grace: float = 10.0,
    folder: Path | None = None,
    stdin: int = subprocess.DEVNULL,
) -> Iterator[Process]:
    """Run a command during the block; at its end, stop the command and everything that it started.

    The child ends with the thread that started it, so call this from a thread that outlives the block. In the main
    thread, SIGTERM and SIGHUP end the block by `SystemExit`.

    Args:
        command: program and arguments.
        log: file to which both output streams are appended.
        env: the whole environment; None for this process's.
        name: the child's name in error messages; None for the name of the program.
        grace: seconds between SIGTERM and SIGKILL.
        folder: a temporary folder, which the caller removes; if this process is killed, the guard removes it.
        stdin: a file descriptor that the child reads.

    Raises `ProcessError` if the command cannot be started.
    """
    arguments = [os.fspath(part) for part in command]
    name = name or Path(arguments[0]).name
    token = uuid.uuid4().hex
    environment = dict(os.environ if env is None else env)
    environment[MARK] = ",".join(part for part in (os.environ.get(MARK, ""), token) if part)
    log.parent.mkdir(parents=True, exist_ok=True)
    with exit_on_signals(), log.open("ab") as output, _guarded(token, folder):
        try:
            popen = subprocess.Popen(
                _ending_with_parent(arguments, environment),
                env=environment,
                cwd=cwd,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessError(f"Cannot start {name}: {error}. The command was: {shlex.join(arguments)}") from error
        process = Process(name=name, pid=popen.pid, log=log, token=token, _marks=environment[MARK], _popen=popen)
        try:
            yield process
        finally:
            with signals_postponed():
                process.stop(grace)


def _ending_with_parent(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command that runs `command`; on Linux, the kernel sends it SIGTERM when this process dies."""
    # Popen would look for the program on this process's PATH, not on the child's.
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    return [*(wrapper if sys.platform.startswith("linux") else []), os.path.abspath(program), *command[1:]]


@contextlib.contextmanager
def _guarded(token: str, folder: Path | None) -> Iterator[None]:
    """If this process is killed inside the block, end the processes with `token` and remove `folder`."""
    command = [sys.executable, __file__, token, *([] if folder is None else [os.fspath(folder)])]
    environment = {name: value for name, value in os.environ.items() if name != MARK}  # the guard must not be stopped
    guard = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        with signals_postponed():
            guard.communicate(_CLEANED_UP)


def _guard(token: str, folders: Sequence[str]) -> None:
    if sys.stdin.buffer.read() == _CLEANED_UP:  # the pipe ends with the guarded block, or with its process
        return
    for _ in range(200):
        left = marked(token)
        if not left:
            break
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_http(
    url: str, *, timeout: float = 60.0, process: Process | None = None, context: ssl.SSLContext | None = None
) -> None:
    """Wait until one of our servers answers at `url` with a success status.

    Args:
        url: an http or https address, which is never requested through a proxy.
        timeout: seconds.
        process: the server, if this process started it.
        context: the certificates to trust; None for those of the system.

    Raises:
        ProcessError: `process` ended; the text has the end of its log.
        TimeoutError: no answer within `timeout` seconds.
    """
    import httpx  # takes a tenth of a second, and the guard does not need it

    end = time.monotonic() + timeout
    with httpx.Client(verify=context or True, trust_env=False, timeout=2) as client:
        while True:
            if process is not None and not process.running:
                raise ProcessError(
                    f"{process.name} ended with status {process.returncode} before {url} answered.\n"
                    f"The end of {process.log}:\n{process.tail()}"
                )
            try:
                answer = client.get(url)
                if answer.is_success:
                    return
                last = f"status {answer.status_code}"
            except httpx.HTTPError as error:
                last = str(error) or type(error).__name__
            if time.monotonic() > end:
                tail = f"\nThe end of {process.log}:\n{process.tail()}" if process else ""
                raise TimeoutError(f"{url} did not answer within {timeout:g} s ({last}).{tail}")
            time.sleep(0.05)


def wait_for_log(process: Process, text: str, timeout: float) -> None:
    """Wait until a process's log contains `text`.

    Raises `ProcessError` with the log's end when the process ends or `timeout` seconds have passed.
    """
    end = time.monotonic() + timeout
    while text not in process.log.read_text(errors="replace"):
        if not process.running or time.monotonic() > end:
            raise ProcessError(f"{process.name} did not start.\n{process.tail()}")
        time.sleep(0.05)


def marked(token: str, *pids: int) -> list[psutil.Process]:
    """Return the live processes that have `token` in their environment or are named by `pids`, and their descendants.

    Some programs (Ray's workers) overwrite the memory that their environment is read from; they are found through a
    parent.
    """
    processes = {process.pid: process for process in psutil.process_iter()}
    children: dict[int, list[int]] = {}
    found: list[int] = []
    for pid, process in processes.items():
        with contextlib.suppress(psutil.Error, OSError):
            children.setdefault(process.ppid(), []).append(pid)
            if pid in pids or token in process.environ().get(MARK, "").split(","):
                found.append(pid)
    tree: dict[int, psutil.Process] = {}
    while found:
        pid = found.pop()
        if pid not in tree and pid in processes:
            tree[pid] = processes[pid]
            found += children.get(pid, [])
    return [process for process in tree.values() if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


@contextlib.contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals by `handler` during the block. Python allows this in the main thread only."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def exit_on_signals() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP raise `SystemExit` inside the block, so that the block can clean up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # A handler of the application stays.
    defaults = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    return _handled(defaults, leave)


@contextlib.contextmanager
def signals_postponed() -> Iterator[None]:
    """Postpone signals until the end of the block: a second Ctrl-C must not interrupt the stopping of processes."""
    waiting: list[int] = []
    try:
        with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda got, _frame: waiting.append(got)):
            yield
    finally:
        for got in dict.fromkeys(waiting):
            signal.raise_signal(got)


if __name__ == "__main__":
    _guard(sys.argv[1], sys.argv[2:])
