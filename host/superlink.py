"""Submit an app to a SuperLink, follow its run, and explain its failure; for simulation and deployment.

`flwr run` submits. The log stream and the final status come from Flower's Control API directly: Flower's command line
takes another second for each, and does not end when the SuperLink dies.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import httpx
import pathspec
import tomli_w

from tepal.host.addresses import without_proxy
from tepal.host.flower.patches import SERVER_APP_RAISED
from tepal.host.processes import Process, ProcessError
from tepal.host.toml import Value, flat

Listener = Callable[[str, str], None]
"""Called with ("stage", a description) when a stage begins, and with ("log", one line of the run's log)."""

CONNECTION = "tepal"
"""Name of the SuperLink in the config.toml that `connect` writes."""

# The files that an app bundle may contain (flwr.common.constant.FAB_INCLUDE_PATTERNS), and .gitignore.
_BUNDLED = ("*.py", "*.toml", "*.md", "*.yaml", "*.yml", "*.json", "*.jsonl", "/LICENSE", "/.gitignore")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s")
_MODULE = re.compile(r"^(?:\w+\.)+(\w+: )")  # of an exception; users need only its class
_RAISED = re.compile(rf"(?:Simulation raised an exception|{SERVER_APP_RAISED})\n")
# Exceptions that Flower raises from the app's own, without information.
_WRAPPERS = ("RuntimeError: Simulation Runtime crashed.", "RuntimeError: An error was encountered. Ending simulation.")


class RunError(RuntimeError):
    """The run failed or could not be started. `log` is the file with its whole log, None without one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(f"{message}\nThe whole log: {log}" if log else message)
        self.reason = message
        self.log = log


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended.

    `status` is Flower's: "completed", "failed" or "stopped"; `details` is Flower's explanation.
    """

    run_id: int
    status: str
    log: Path
    details: str = ""


class Clock:
    """Reports the stages and log lines of a run to a listener, and measures its time limit."""

    def __init__(self, tell: Listener, limit: float | None) -> None:
        self.tell = tell
        self.limit = math.inf if limit is None else limit
        self._begun = time.monotonic()

    def stage(self, text: str) -> None:
        """Report that a stage begins."""
        self.tell("stage", text)

    def left(self, at_most: float = math.inf) -> float:
        """Return the seconds until the limit, at most `at_most`."""
        return min(at_most, self._begun + self.limit - time.monotonic())

    @property
    def over(self) -> str:
        """The error message when the limit is exceeded; "" before."""
        return f"The run was stopped: it took longer than {self.limit:g} s" if self.left() <= 0 else ""

    def check(self) -> None:
        """Raise `TimeoutError` when the limit is exceeded."""
        if self.over:
            raise TimeoutError(self.over)


def connect(home: Path, address: str, root_certificates: Path | None = None) -> None:
    """Write the config.toml by which Flower's commands, run with FLWR_HOME=`home`, find the SuperLink at `address`.

    They use TLS and trust the PEM file `root_certificates`; without it they use plain HTTP.
    """
    home.mkdir(parents=True, exist_ok=True)
    connection: dict[str, str | bool] = {"address": address}
    # Flower requires an absolute path.
    connection |= {"root-certificates": str(root_certificates.resolve())} if root_certificates else {"insecure": True}
    config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")


def control_client(address: str, root_certificates: Path | None, *interceptors: Any) -> Any:
    """Return Flower's client of the Control API at `address`, HOST:PORT. It connects at the first request.

    It uses TLS and trusts the PEM file `root_certificates`; without it, it uses plain HTTP. It never uses a proxy: a
    SuperLink is on this machine or its network. The environment of this process is changed for that.
    """
    from flwr.supercore.control import ControlHttpClient

    os.environ.update(without_proxy(address.rpartition(":")[0]))
    return ControlHttpClient.from_server_address(
        server_address=address,
        insecure=root_certificates is None,
        root_certificates=root_certificates.read_bytes() if root_certificates else None,
        interceptors=interceptors,
    )


def stage_app(app: Path, target: Path, without: Iterable[Path] = ()) -> list[Path]:
    """Copy the files of the app's bundle from `app` to `target`; return their relative paths.

    `target` may be in `app`: it is not copied itself, nor are the files and folders `without`.

    Flower makes a bundle by walking the whole folder, with virtual environments and run directories, while files may
    change. The copy has the files that belong to the bundle: of a type that Flower takes, named by `fab-include`, and
    not by `.gitignore`; none of a folder whose own .gitignore is `*`. Flower makes the same bundle from it.
    """
    table = _app_table(app)
    ignored = _ignored(app)
    bundled = pathspec.GitIgnoreSpec.from_lines(_BUNDLED)
    included = pathspec.GitIgnoreSpec.from_lines([*table.get("fab-include", ["*"]), "/pyproject.toml", "/.gitignore"])
    app, left_out = app.resolve(), {path.resolve() for path in (target, *without)}
    copied = []
    for folder, folders, files in os.walk(app):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and here / name not in left_out
            and not (here / name / "pyvenv.cfg").exists()
            and not _hidden(here / name)
            and not ignored.match_file(f"{(here / name).relative_to(app).as_posix()}/")
        )
        for name in sorted(files):
            path = (here / name).relative_to(app)
            if (here / name).is_symlink() or here / name in left_out or ignored.match_file(path):
                continue
            if bundled.match_file(path) and included.match_file(path):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(here / name, target / path)
                copied.append(path)
    return copied


def in_bundle(app: Path, path: Path) -> bool:
    """Return whether Flower, which reads no .gitignore but the app's, takes a YAML file at `path`, relative to it.

    `fab-exclude` does not count: a pattern there that matches nothing in the copy of `stage_app` is an error in Flower.
    """
    included = pathspec.GitIgnoreSpec.from_lines(_app_table(app).get("fab-include", ["*"]))
    return included.match_file(path) and not _ignored(app).match_file(path)


def _ignored(app: Path) -> pathspec.GitIgnoreSpec:
    ignore = app / ".gitignore"
    return pathspec.GitIgnoreSpec.from_lines(ignore.read_text().splitlines() if ignore.is_file() else [])


def _hidden(folder: Path) -> bool:
    try:
        return (folder / ".gitignore").read_bytes().strip() == b"*"
    except OSError:
        return False


def app_run_config(app: Path) -> dict[str, Value]:
    """Return the defaults of the app's run configuration, `[tool.flwr.app.config]`, with flat keys."""
    return flat(_app_table(app).get("config", {}))


def is_app(folder: Path) -> bool:
    """Return whether a folder is that of a Flower app. Raises RunError if its pyproject.toml is not valid TOML."""
    return (folder / "pyproject.toml").is_file() and "app" in _tools_table(folder).get("flwr", {})


def app_components(app: Path) -> tuple[str, str]:
    """Return the references to the app's ServerApp and ClientApp, "module:attribute". Raises RunError without them."""
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
        bundle: A folder made by `stage_app`, whose name has only letters, digits and hyphens.
        run_config: A TOML file with changes to the app's run configuration.
        superlink: The process of the SuperLink that `connect` named; stopping it stops this command, too.
        environment: Made by `flower_environment`, for a home that `connect` wrote.
        timeout: Seconds.
        federation_config: As for `flwr run --federation-config`, for a SuperLink in simulation mode.

    Raises:
        RunError: Flower did not accept the app.
        subprocess.TimeoutExpired: after `timeout` seconds.
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
    """Write the run's log to `log` until the run ends; return its final status and Flower's explanation.

    Args:
        run_id: The run.
        address: HOST:PORT of the SuperLink's Control API.
        superlink: The process of the SuperLink.
        clock: Its listener is called with each line of the log.
        log: The file to write.
        root_certificates: PEM file to trust; None for a SuperLink without TLS.

    Raises:
        ProcessError: the SuperLink ended or does not answer.
        TimeoutError: the clock's limit was exceeded.
    """
    from flwr.proto.control_pb2 import ListRunsRequest, StreamLogsRequest

    streams: list[httpx.Response] = []

    class Keep:
        """Keeps the response of the stream, to which the client gives no access."""

        def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
            streams.append(call_next(context))
            return streams[-1]

    # The stream blocks while the app logs nothing, so a thread reads it and this one watches the clock and the
    # SuperLink.
    chunks: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(Exception):  # the loop reports a lost SuperLink
            for response in streaming.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0)):
                chunks.put(response.log_output)
        chunks.put(None)

    streaming = control_client(address, root_certificates, Keep())
    asking = control_client(address, root_certificates)
    threading.Thread(target=read, name="run-log", daemon=True).start()
    rest = ""
    try:
        with _opened(log) as file:
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
                with contextlib.suppress(OSError):  # a full disk must not end the following of a run
                    file.write((whole + newline).encode())
                for line in whole.splitlines():
                    clock.tell("log", line)
                if chunk is None:
                    break
        # The stream ends with the run, whose status is then final, unless the connection was lost.
        while True:
            status = asking.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
            if status.status == "finished":
                return status.sub_status, status.details
            clock.check()
            time.sleep(0.2)
    except TimeoutError:  # the clock's; an OSError as well
        raise
    except (OSError, httpx.HTTPError) as error:
        raise ProcessError(f"The SuperLink does not answer: {error}\n{superlink.tail()}") from error
    finally:
        # The SuperLink waits for open streams before it ends. Closing the client has no effect while the thread reads.
        for response in streams:
            with contextlib.suppress(OSError, KeyError):
                response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        streaming.close()
        asking.close()


def _opened(log: Path) -> FileIO:
    """Open a log for writing; /dev/null in its place if that is impossible, as on a read-only disk."""
    try:
        return log.open("wb", buffering=0)
    except OSError:
        return open(os.devnull, "wb", buffering=0)


def keep_log(log: Path, run: Path) -> Path:
    """Append the log of a run to flower.log in its directory, and remove it; return the path of flower.log."""
    kept = run / "flower.log"
    with kept.open("ab") as file, log.open("rb") as new:
        shutil.copyfileobj(new, file)
    log.unlink()
    return kept


def explain(log: str, details: str = "") -> str:
    """Return the app's exception, and the line that raised it, from the log of a failed run."""
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
    """Return Flower's log without the escape sequences of colours."""
    return _COLOUR.sub("", text)


def app_settings(app: Path) -> dict[str, Any]:
    """Return the table `[tool.tepal]` of an app's pyproject.toml, {} without one. Raises RunError."""
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
