"""A Docker engine for tests: images, compose projects that go with their volumes, and the runs in them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.packages import ROOT

SERVER, CLIENT = "tepal-server:tests", "tepal-client:tests"
UID = 49999
VERSION, REVISION = "0.1.0+tests", "0123456789abcdef"
BUILD_ARGUMENTS = (
    "PYTHON_IMAGE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX_URL", "TORCH_SPEC", "EXTRAS",
)  # fmt: skip
"""Taken from the environment, as the compose files do."""


class EngineError(AssertionError):
    """A command failed that should not have."""


def docker(
    *arguments: str, check: bool = True, timeout: float = 600, environment: Mapping[str, str] | None = None
) -> str:
    """Run a docker command and return what it prints; `check=False`: also when it fails."""
    done = subprocess.run(
        ["docker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        env={**os.environ, **(environment or {})},
    )
    if check and done.returncode:
        raise EngineError(f"docker {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def why_no_engine() -> str:
    """Why these tests cannot run here; "" if they can."""
    for question in (["version"], ["compose", "version"]):
        try:
            docker(*question, timeout=60)
        except FileNotFoundError:
            return "there is no docker command"
        except subprocess.TimeoutExpired:
            return f"`docker {' '.join(question)}` does not answer"
        except EngineError as error:
            return f"`docker {' '.join(question)}` fails: {str(error).splitlines()[-1]}"
    return ""


def build(name: str, tag: str) -> None:
    """Build an image from the checkout, with what the environment says about indices."""
    given = {key: os.environ[key] for key in BUILD_ARGUMENTS if os.environ.get(key)}
    given |= {"VERSION": VERSION, "REVISION": REVISION}
    arguments = [text for key, value in given.items() for text in ("--build-arg", f"{key}={value}")]
    docker("build", "-f", str(ROOT / "docker" / f"{name}.Dockerfile"), "-t", tag, *arguments, str(ROOT), timeout=1800)


def inspect(what: str) -> dict[str, Any]:
    """What the engine knows of a container or an image."""
    (found,) = json.loads(docker("inspect", what))
    return dict(found)


def free_port() -> int:
    """A port that nobody listens on at any of this machine's addresses."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 120, pause: float = 0.3) -> Any:
    """Wait until the condition holds, and return what it gives."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s for: {what}"
        time.sleep(pause)
    return found


class Project:
    """A compose project of a name of its own. Made by `project`."""

    def __init__(self, *files: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name = f"tepal-tests-{uuid.uuid4().hex[:8]}"
        self._files = [text for file in files for text in ("-f", str(file))]
        # An .env file beside the compose files is somebody's own.
        own = {"TEPAL_SERVER_IMAGE": SERVER, "TEPAL_CLIENT_IMAGE": CLIENT, "COMPOSE_ENV_FILES": os.devnull}
        self._environment = {**own, **(environment or {})}

    def compose(self, *arguments: str, check: bool = True, timeout: float = 600) -> str:
        command = ("compose", "-p", self.name, *self._files, *arguments)
        return docker(*command, check=check, timeout=timeout, environment=self._environment)

    def up(self, *services: str) -> None:
        """Start all of it, and wait until it is healthy."""
        try:
            self.compose("up", "--wait", "--no-build", "--quiet-pull", *services)
        except EngineError as error:
            raise EngineError(f"{error}\n{self.compose('logs', '--tail', '40', check=False)}") from None

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "1")

    def container(self, service: str) -> str:
        """The container's id."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        return inspect(self.container(service))

    def healthy(self, service: str) -> bool:
        state = self.inspect(service)["State"]
        return bool(state["Running"]) and state["Health"]["Status"] == "healthy"

    def exec(self, service: str, *command: str, check: bool = True, timeout: float = 120) -> str:
        """Run a command inside, as the container's own user."""
        return docker("exec", self.container(service), *command, check=check, timeout=timeout)

    def python(self, service: str, code: str) -> str:
        return self.exec(service, "python", "-c", code)

    def logs(self, service: str) -> str:
        return docker("logs", self.container(service), check=False)

    def kill_inside(self, service: str) -> None:
        """SIGKILL to what the container's init has started: a crash, after which the restart policy has its say.

        `docker kill` would count as a person's wish to have it stopped.
        """
        self.exec(service, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)", check=False)

    # Runs on the server of this project ------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        """Names of the run directories, oldest first."""
        return sorted(name for name in self.exec("server", "ls", "state/runs").split() if name != "latest")

    def submit(self, run_config: str) -> str:
        """Start a run of the app in the image, as one would by hand; return the name of its directory."""
        before = set(self.runs())
        self.exec("server", "flwr", "run", "/opt/tepal", "tepal", "--run-config", run_config)
        (name,) = wait_until(lambda: set(self.runs()) - before, "the new run's directory")
        return str(name)

    def rounds(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics so far."""
        written = self.exec("server", "cat", f"state/runs/{run}/metrics.jsonl", check=False)
        return [json.loads(line) for line in written.splitlines() if line.startswith("{") and line.endswith("}")]

    def wait_for_round(self, run: str, number: int, seconds: float = 120) -> None:
        wait_until(lambda: any(line["round"] >= number for line in self.rounds(run)), f"round {number}", seconds)

    def summary(self, run: str, seconds: float = 180) -> dict[str, Any]:
        """The figures of a run, when it has ended."""
        file = f"state/runs/{run}/summary.json"
        try:
            wait_until(lambda: "accuracy" in self.exec("server", "cat", file, check=False), "the run's end", seconds)
        except AssertionError as error:
            log = [line for line in self.logs("server").splitlines() if "uvicorn.access" not in line]
            raise AssertionError("\n".join([str(error), *log[-40:], str(self.rounds(run)[-2:])])) from None
        return dict(json.loads(self.exec("server", "cat", file)))


@contextlib.contextmanager
def project(*files: str | Path, environment: Mapping[str, str] | None = None) -> Iterator[Project]:
    """A compose project from files of docker/ (or elsewhere); containers, networks and volumes go with the block."""
    made = Project(*(ROOT / "docker" / file for file in files), environment=environment)
    try:
        yield made
    finally:
        made.down()


def connect(project: Project, service: str, host: str, port: int) -> str:
    """How a TCP connection from inside a container goes: open, refused, no route, or silence (for 3 s)."""
    code = f"""
import errno, socket
try:
    socket.create_connection(({host!r}, {port}), timeout=3).close()
    print("open")
except ConnectionRefusedError:
    print("refused")
except TimeoutError:
    print("silence")
except OSError as error:
    print("no route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else error)
"""
    return project.python(service, code).strip()
