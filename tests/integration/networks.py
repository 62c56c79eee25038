"""Machines with Linux namespaces of their own (network, processes, mounts), whose cables to a switch can be cut.

The networks exist in these namespaces only, and end with the processes that hold them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tepal.host.processes import started

_SUBNET = "10.213.57"
_CABLE = "cable"  # the name of a machine's network interface
_NEEDED = "ip link add switch type bridge && ip link add one type veth peer name other"


@dataclass(frozen=True)
class Machine:
    """A machine. `address`: its own in the network. `folder`: its temporary files, which the others leave alone."""

    address: str
    folder: Path
    _holder: int

    def command(self, *command: str, cwd: Path) -> list[str]:
        """A command line that does this there, in a folder."""
        return [*_enter(self._holder, "--pid", "--mount"), "env", f"--chdir={cwd}", *command]

    def environment(self, **more: str) -> dict[str, str]:
        left_out = ("PYTHONPATH", "RAY_ADDRESS", "TEPAL_CACHE")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        return kept | {"TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", **more}

    def set_cable(self, state: str) -> None:
        """Cut the cable ("down") or mend it ("up"). Connections stay open: both ends wait for answers."""
        _run(*_enter(self._holder), "ip", "link", "set", _CABLE, state)

    def kill(self) -> None:
        """Kill all that runs there at once, as a power cut does; nobody is told."""
        self.set_cable("down")
        os.kill(self._holder, signal.SIGKILL)


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Hold machines in one network during the block; its end kills all that runs on them.

    Skips the test where such namespaces are not permitted.
    """
    try:
        _run("unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", _NEEDED)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"network namespaces are not permitted here, or unshare or ip is missing: {said.strip()}")
    with ExitStack() as opened:
        log = folder / "namespaces.log"
        unshare, wait = ("unshare", "--net", "--fork", "--kill-child"), ("sh", "-c", "sleep infinity & wait")
        switch = _child(opened.enter_context(started([*unshare, *wait], log=log, grace=0)).pid)
        _run(*_enter(switch), "sh", "-c", "ip link add switch type bridge && ip link set switch up")
        made = []
        for number in range(1, count + 1):
            command = [*unshare, "--pid", "--mount", "--mount-proc", *wait]
            holder = _child(opened.enter_context(started(command, log=log, grace=0)).pid)
            address, port = f"{_SUBNET}.{number}", f"port{number}"
            cable = f"ip link add {port} type veth peer name {_CABLE} netns {holder}"
            _run(*_enter(switch), "sh", "-c", f"{cable} && ip link set {port} master switch up")
            _run(*_enter(holder), "ip", "address", "add", f"{address}/24", "dev", _CABLE)
            for interface in ("lo", _CABLE):
                _run(*_enter(holder), "ip", "link", "set", interface, "up")
            (folder / f"m{number}").mkdir()
            made.append(Machine(address, folder / f"m{number}", holder))
        yield made


def _enter(holder: int, *namespaces: str) -> list[str]:
    return ["nsenter", f"--target={holder}", "--net", *namespaces, "--"]


def _run(*command: str) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=True)


def _child(pid: int) -> int:
    """The process that `unshare` starts in the new namespaces, once it does what it shall do."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for child in psutil.Process(pid).children():
            if child.name() == "sh":
                return child.pid
        time.sleep(0.02)
    raise TimeoutError("unshare has started nothing")
