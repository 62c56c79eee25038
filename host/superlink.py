"""What one does to any SuperLink, simulation or deployment: submit an app, follow its run, say why it failed.

`flwr run` submits. The log stream and the final status come from Flower's Control API directly: the command line would
take another second for each, and could not be left when the SuperLink dies.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import shutil
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pathspec
import tomli_w

from tepal.host.flower.patches import SERVER_APP_RAISED
from tepal.host.processes import Process, ProcessError
from tepal.host.toml import Value, flat

Listener = Callable[[str, str], None]
"""Called with ("stage", what happens now) and ("log", one line of the run's log)."""

CONNECTION = "tepal"
"""Name under which `connect` enters a SuperLink."""

# What an app bundle may hold (flwr.common.constant.FAB_INCLUDE_PATTERNS), and the ignore rules that decide about it.
_BUNDLED = ("*.py", "*.toml", "*.md", "*.yaml", "*.yml", "*.json", "*.jsonl", "/LICENSE", "/.gitignore")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s")
_MODULE = re.compile(r"^(?:\w+\.)+(\w+: )")  # of an exception: it tells a user nothing
_RAISED = re.compile(rf"(?:Simulation raised an exception|{SERVER_APP_RAISED})\n")
# Flower wraps what went wrong in these; they say nothing.
_WRAPPERS = ("RuntimeError: Simulation Runtime crashed.", "RuntimeError: An error was encountered. Ending simulation.")


class RunError(RuntimeError):
    """The run failed or could not be started. `log` is the file with the whole log, if there is one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(f"{message}\nThe whole log: {log}" if log else message)
        self.reason = message
        self.log = log


@dataclass(frozen=True)
class Outcome:
    """A run that ended. `status` is Flower's word: "completed", "failed" or "stopped".

    `details` is what Flower says about it, `seconds` how long each stage took, by name.
    """

    run_id: int
    status: str
    log: Path
    details: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


class Clock:
    """Stages of the call with their times, the listener, and the time limit."""

    def __init__(self, tell: Listener, limit: float | None) -> None:
        self.tell = tell
        self.limit = math.inf if limit is None else limit
        self.seconds: dict[str, float] = {}
        self._begun = self._stage_begun = time.monotonic()
        self._stage = ""

    def stage(self, name: str, text: str) -> None:
        """Begin a stage and end the one before; the name "" only ends."""
        now = time.monotonic()
        if self._stage:
            self.seconds[self._stage] = now - self._stage_begun
        self._stage, self._stage_begun = name, now
        if text:
            self.tell("stage", text)

    def left(self, at_most: float = math.inf) -> float:
        """Return the seconds left of the limit, but no more than `at_most`."""
        return min(at_most, self._begun + self.limit - time.monotonic())

    @property
    def over(self) -> str:
        """What there is to say when the limit is over; "" while it is not."""
        return f"The run was stopped: it took longer than {self.limit:g} s" if self.left() <= 0 else ""

    def check(self) -> None:
        """Raise `TimeoutError` when the limit is over."""
        if self.over:
            raise TimeoutError(self.over)


def connect(home: Path, address: str, root_certificates: Path | None = None) -> None:
    """Let Flower's commands, run with FLWR_HOME=`home`, find the SuperLink at `address`.

    They speak TLS and trust the PEM file `root_certificates`, or speak plain HTTP if there is none.
    """
    home.mkdir(parents=True, exist_ok=True)
    connection: dict[str, str | bool] = {"address": address}
    # Flower wants the path absolute.
    connection |= {"root-certificates": str(root_certificates.resolve())} if root_certificates else {"insecure": True}
    config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")


def stage_app(app: Path, target: Path) -> list[Path]:
    """Copy what may go into the app's bundle from `app` to `target`; return the copied files, relative.

    Flower bundles a folder by walking all of it, virtual environments and run directories included, and while others
    may be editing it. The copy holds the files of the types that Flower takes, which `fab-include` names and
    `.gitignore` does not, so the bundle made from the copy is the bundle of the app.
    """
    table = _app_table(app)
    ignore = app / ".gitignore"
    ignored = pathspec.GitIgnoreSpec.from_lines(ignore.read_text().splitlines() if ignore.is_file() else [])
    bundled = pathspec.GitIgnoreSpec.from_lines(_BUNDLED)
    included = pathspec.GitIgnoreSpec.from_lines([*table.get("fab-include", ["*"]), "/pyproject.toml", "/.gitignore"])
    copied = []
    for folder, folders, files in os.walk(app):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and not (here / name / "pyvenv.cfg").exists()
            and not ignored.match_file(f"{(here / name).relative_to(app).as_posix()}/")
        )
        for name in sorted(files):
            path = (here / name).relative_to(app)
            if (here / name).is_symlink() or ignored.match_file(path):
                continue
            if bundled.match_file(path) and included.match_file(path):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(here / name, target / path)
                copied.append(path)
    return copied


def app_run_config(app: Path) -> dict[str, Value]:
    """Return the defaults of the app's run configuration, `[tool.flwr.app.config]`, with flat keys."""
    return flat(_app_table(app).get("config", {}))


def app_components(app: Path) -> tuple[str, str]:
    """Return the names of the app's ServerApp and ClientApp, "module:attribute". Raises RunError without them."""
    components = _app_table(app).get("components", {})
    try:
        return components["serverapp"], components["clientapp"]
    except KeyError as error:
        raise RunError(f"{app} has no {error} under [tool.flwr.app.components] in its pyproject.toml") from error


def submit(
    bundle: Path,
    run_config: Path,
    superlink: Process,
    environment: Mapping[str, str],
    timeout: float,
    federation_config: str = "",
) -> int:
    """Submit the app in the folder `bundle` with `flwr run` and return the run's id.

    Args:
        bundle: A folder as `stage_app` makes it, of a name with letters, digits and hyphens alone.
        run_config: A TOML file with changes to the app's run configuration.
        superlink: The process of the SuperLink that `connect` named; what ends it ends this command too.
        environment: As `flower_environment` makes it, for a home that `connect` wrote.
        timeout: Seconds that it may take.
        federation_config: As `flwr run --federation-config` takes it; the SuperLink must be one for simulation.

    Raises:
        RunError: Flower did not accept the app.
        subprocess.TimeoutExpired: it took longer.
    """
    command = ["flwr", "run", str(bundle), CONNECTION, "--format", "json", "--run-config", str(run_config)]
    command += ["--federation-config", federation_config] if federation_config else []
    done = superlink.run(command, env={**environment, "NO_COLOR": "1"}, timeout=timeout)
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        answer = {}
    if not answer.get("success"):
        reason = answer.get("error-message") or f"{done.stdout}\n{done.stderr}".strip()
        raise RunError(f"Flower did not accept the app: {without_colour(reason)}")
    return int(answer["run-id"])


def follow(
    run_id: int, address: str, superlink: Process, clock: Clock, log: Path, root_certificates: Path | None = None
) -> tuple[str, str]:
    """Write the run's log to `log` as it comes; return its final status and Flower's words on it.

    The SuperLink speaks TLS if there are `root_certificates` to trust, a PEM file.

    Raises:
        ProcessError: the SuperLink, which runs in the process `superlink`, ended or does not answer.
        TimeoutError: the clock's limit was over before the run was.
    """
    from flwr.proto.control_pb2 import ListRunsRequest, StreamLogsRequest
    from flwr.supercore.control import ControlHttpClient

    streams: list[httpx.Response] = []

    class Keep:
        """Keeps the stream's response, which the client hides."""

        def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
            streams.append(call_next(context))
            return streams[-1]

    def client(*interceptors: Keep) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=root_certificates.read_bytes() if root_certificates else None,
            interceptors=interceptors,
        )

    # The stream blocks while the app says nothing, so it is read beside the loop that watches clock and SuperLink.
    chunks: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(Exception):  # a lost SuperLink is the loop's to report
            for response in streaming.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0)):
                chunks.put(response.log_output)
        chunks.put(None)

    streaming, asking = client(Keep()), client()
    threading.Thread(target=read, name="run-log", daemon=True).start()
    rest = ""
    try:
        with log.open("w", encoding="utf-8") as file:
            while True:
                clock.check()
                try:
                    chunk = chunks.get(timeout=0.2)
                except queue.Empty:
                    if not superlink.running:
                        raise ProcessError(f"The SuperLink ended during the run.\n{superlink.tail()}") from None
                    continue
                text = rest + without_colour(chunk or "")
                whole, newline, rest = text.rpartition("\n")
                if chunk is None and rest:
                    whole, newline, rest = text, "\n", ""
                file.write(whole + newline)
                file.flush()
                for line in whole.splitlines():
                    clock.tell("log", line)
                if chunk is None:
                    break
        # The stream ends with the run; its status is there at once, unless the stream broke.
        while True:
            status = asking.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
            if status.status == "finished":
                return status.sub_status, status.details
            clock.check()
            time.sleep(0.2)
    except TimeoutError:  # the clock's; it is an OSError, too
        raise
    except (OSError, httpx.HTTPError) as error:
        raise ProcessError(f"The SuperLink does not answer: {error}\n{superlink.tail()}") from error
    finally:
        # The SuperLink waits for open streams before it ends. Closing ours does nothing while the thread reads from it.
        for response in streams:
            with contextlib.suppress(OSError, KeyError):
                response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        streaming.close()
        asking.close()


def explain(log: str, details: str = "") -> str:
    """Return what went wrong, out of the log of a failed run: the app's exception, and the line that raised it."""
    *before, report = _RAISED.split(log)
    chain = report.split("Traceback (most recent call last):\n")[1:] if before else []
    for traceback in reversed(chain):
        lines = traceback.splitlines()
        start = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), None)
        if start is None:
            continue
        message = [_MODULE.sub(r"\1", lines[start])]
        for line in lines[start + 1 :]:
            if not line.strip() or _LOG_LINE.match(line) or len(message) == 20:
                break
            message.append(line)
        if message[0] in _WRAPPERS:
            continue
        frames = re.findall(r'^  File ".*/apps/[^/"]+/([^"]+)", line (\d+), in (.+)$', "\n".join(lines[:start]), re.M)
        where = f" ({frames[-1][0]}, line {frames[-1][1]}, in {frames[-1][2]})" if frames else ""
        return "\n".join(message) + where
    return details or "no reason is given in its log"


def without_colour(text: str) -> str:
    """As Flower's log reads without what makes it coloured on a terminal."""
    return _COLOUR.sub("", text)


def app_settings(app: Path) -> dict[str, Any]:
    """What an app's pyproject.toml says to Tepal, `[tool.tepal]`; {} where that is nothing. Raises RunError."""
    return dict(_tools_table(app).get("tepal", {}))


def _app_table(app: Path) -> dict[str, Any]:
    try:
        return dict(_tools_table(app)["flwr"]["app"])
    except KeyError as error:
        raise RunError(f"{app} is not a Flower app: its pyproject.toml has no [tool.flwr.app]") from error


def _tools_table(app: Path) -> dict[str, Any]:
    if not (app / "pyproject.toml").is_file():
        raise RunError(f"{app} is not a Flower app: it has no pyproject.toml")
    try:
        return dict(tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8")).get("tool", {}))
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{app / 'pyproject.toml'} is not valid TOML: {error}") from error
