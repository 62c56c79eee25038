"""Run a Flower app by simulation on this machine: one call that starts all it needs and leaves nothing behind.

`flwr run` against a SuperLink of our own, in simulation mode. Flower's managed `:local:` SuperLink stays alive
afterwards, keeps a database in the user's home, and client actors import from the folder it was started in before they
import from the app bundle; ours runs in an empty temporary folder and ends with the run. Only the log stream and the
final status use Flower's Control client directly: the command line would take another second for each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import queue
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pathspec

from tepal.server_app.processes import (
    Process,
    ProcessError,
    flower_environment,
    free_port,
    started,
    wait_for_http,
)

Value = bool | int | float | str
Listener = Callable[[str, str], None]
"""Called with ("stage", what happens now) and ("log", one line of the run's log)."""

# What an app bundle may hold (flwr.common.constant.FAB_INCLUDE_PATTERNS), and the ignore rules that decide about it.
_BUNDLED = ("*.py", "*.toml", "*.md", "*.yaml", "*.yml", "*.json", "*.jsonl", "/LICENSE", "/.gitignore")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s")
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")  # as `flwr run --run-config` splits its argument
# Flower wraps what went wrong in these; they say nothing.
_WRAPPERS = ("RuntimeError: Simulation Runtime crashed.", "RuntimeError: An error was encountered. Ending simulation.")
# A Unix socket's path has 107 bytes on Linux and 103 on macOS; Ray puts its sockets 69 bytes below its folder.
_LONGEST_RAY_FOLDER = 34


class SimulationError(RuntimeError):
    """The run failed or could not be started. `log` is the file with the whole log, if there is one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(f"{message}\nThe whole log: {log}" if log else message)
        self.log = log


@dataclass(frozen=True)
class Outcome:
    """A run that completed. `seconds` has how long each stage took, by name."""

    run_id: int
    status: str
    log: Path
    seconds: Mapping[str, float] = field(default_factory=dict)


def simulate(
    app: Path,
    *,
    clients: int,
    run_config: Mapping[str, Value] | Sequence[str] = (),
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    on_event: Listener | None = None,
    timeout: float | None = None,
    log: Path | None = None,
) -> Outcome:
    """Run the Flower app in the folder `app` with simulated clients, and wait for its end.

    The app runs from a bundle in an empty temporary folder: outputs belong at absolute paths, given in `run_config`.

    Args:
        clients: Number of simulated clients (Flower's SuperNodes).
        run_config: Changes to the app's `[tool.flwr.app.config]`: a mapping with the flat keys, or strings as
            `flwr run --run-config` takes them (`'lr=0.1 name="x"'`, or the path of a TOML file); later ones win.
        cpus_per_client: CPU cores for each client at work; less than 1 runs more clients at once than there are cores.
        gpus_per_client: Share of a GPU for each client at work.
        on_event: Hears stages and log lines.
        timeout: Seconds after which the run is stopped, from the call on. None: no limit.
        log: File for the run's log (default: a new one in the system's temporary folder).

    Raises:
        SimulationError: with the app's own error where the app failed.
        ValueError: an argument out of range.
    """
    if clients < 1:
        raise ValueError(f"clients is {clients}, expected at least 1")
    resources = _resources(clients, cpus_per_client, gpus_per_client)
    config = parse_run_config(run_config) if not isinstance(run_config, Mapping) else dict(run_config)
    if shlex.quote(sys.executable) != sys.executable:
        # Its workers never start, and Flower waits six minutes before it says so.
        raise SimulationError(
            f"Ray cannot start its workers with {sys.executable}: the path has a space or another character that a "
            "shell reads. Make the virtual environment elsewhere (with make: VENV=/a/path/without/spaces)."
        )
    app = app.resolve()
    known = app_run_config(app)
    if unknown := sorted(set(config) - set(known)):
        raise SimulationError(
            f"{app.name} has no run configuration key {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
        )
    if log is None:
        handle, name = tempfile.mkstemp(prefix="tepal-simulation-", suffix=".log")
        os.close(handle)
        log = Path(name)
    log.parent.mkdir(parents=True, exist_ok=True)

    clock = _Clock(on_event or (lambda _kind, _text: None), timeout)
    folder = Path(tempfile.mkdtemp(prefix="tepal-", dir=_short_temporary_folder()))
    try:
        return _run(app, folder, clients, resources, config, clock, log.resolve())
    except (ProcessError, TimeoutError, subprocess.TimeoutExpired) as error:
        raise SimulationError(str(error), log) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    app: Path, folder: Path, clients: int, resources: str, config: Mapping[str, Value], clock: _Clock, log: Path
) -> Outcome:
    """Start the SuperLink, submit the app, follow the run. Everything this writes, except the log, is in `folder`."""
    home, work, bundle = folder / "home", folder / "work", folder / "app"
    for each in (home, work, bundle):
        each.mkdir()
    environment = flower_environment(home) | {
        "RAY_TMPDIR": str(folder),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # how long a submitted run lies there (default 1 s)
    }
    clock.stage("start SuperLink", "Starting a SuperLink ...")
    with _superlink(folder, work, environment, clock) as (superlink, address):
        clock.stage("submit", "Submitting the app ...")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "tepal"\n\n[superlink.tepal]\naddress = "{address}"\ninsecure = true\n'
        )
        stage_app(app, bundle)
        (folder / "run-config.toml").write_text(to_toml(config))
        run_id = _submit(
            bundle, folder / "run-config.toml", f"num-supernodes={clients} {resources}", environment, clock
        )
        clock.stage("run", f"Run {run_id} with {clients} clients; starting Ray takes some seconds ...")
        status, details = _follow(run_id, address, superlink, clock, log)
        clock.stage("stop", f"Run {run_id}: {status}")
    clock.stage("", "")
    if status != "completed":
        raise SimulationError(f"The run {status}: {explain(log.read_text(), details)}", log)
    return Outcome(run_id=run_id, status=status, log=log, seconds=clock.seconds)


@contextlib.contextmanager
def _superlink(
    folder: Path, work: Path, environment: Mapping[str, str], clock: _Clock
) -> Iterator[tuple[Process, str]]:
    """A SuperLink in simulation mode, and its address, once it answers."""
    for attempts_left in (2, 1, 0):
        port = free_port()
        command = ["flower-superlink", "--simulation", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
        with started(command, log=folder / "superlink.log", env=environment, cwd=work, grace=2) as process:
            # Imports for following the run, while the SuperLink does its own.
            importlib.import_module("flwr.supercore.control")
            try:
                wait_for_http(f"http://127.0.0.1:{port}/health", timeout=clock.left(60), process=process)
            except ProcessError:
                # Between our look and its start another program may have taken the port.
                if attempts_left and "address already in use" in process.tail(50):
                    continue
                raise
            yield process, f"127.0.0.1:{port}"
            return


def _submit(
    bundle: Path, run_config: Path, federation_config: str, environment: Mapping[str, str], clock: _Clock
) -> int:
    """Submit the app with `flwr run` and return the run's id."""
    command = ["flwr", "run", str(bundle), "tepal", "--format", "json", "--federation-config", federation_config]
    command += ["--run-config", str(run_config)]
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    done = subprocess.run(
        [program, *command[1:]],
        env={**environment, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=max(clock.left(120), 0),
    )
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        answer = {}
    if not answer.get("success"):
        reason = answer.get("error-message") or f"{done.stdout}\n{done.stderr}".strip()
        raise SimulationError(f"Flower did not accept the app: {_COLOUR.sub('', reason)}")
    return int(answer["run-id"])


def _follow(run_id: int, address: str, superlink: Process, clock: _Clock, log: Path) -> tuple[str, str]:
    """Write the run's log to `log` as it comes; return its final status and Flower's words on it."""
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
            server_address=address, insecure=True, root_certificates=None, interceptors=interceptors
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
                try:
                    chunk = chunks.get(timeout=0.2)
                except queue.Empty:
                    if not superlink.running:
                        raise ProcessError(f"The SuperLink ended during the run.\n{superlink.tail()}") from None
                    clock.check()
                    continue
                text = rest + _COLOUR.sub("", chunk or "")
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
    except (OSError, httpx.HTTPError) as error:
        raise ProcessError(f"The SuperLink does not answer: {error}\n{superlink.tail()}") from error
    finally:
        # The SuperLink waits for open streams before it ends. Closing ours does nothing while the thread reads from it.
        for response in streams:
            with contextlib.suppress(OSError, KeyError):
                response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        streaming.close()
        asking.close()


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
    return _flat(_app_table(app).get("config", {}))


def parse_run_config(arguments: Iterable[str]) -> dict[str, Value]:
    """Read run configuration as `flwr run --run-config` takes it: `'lr=0.1 name="x"'` or the path of a TOML file.

    Unlike there, pairs and files mix, and two arguments may set keys of one table (`a.x=1`, then `a.y=2`; Flower keeps
    only the last). Raises `ValueError` for what is not TOML.
    """
    config: dict[str, Value] = {}
    for argument in arguments:
        if argument.endswith(".toml"):
            config |= _flat(tomllib.loads(Path(argument).expanduser().read_text(encoding="utf-8")))
            continue
        pairs = _PAIR.findall(argument)
        if not pairs or _PAIR.sub("", argument).strip():
            raise ValueError(f"run configuration {argument!r} is not of the form 'key=1 other=\"text\"'")
        for key, value in pairs:
            try:
                config |= _flat(tomllib.loads(f"{key} = {value}"))
            except tomllib.TOMLDecodeError as error:
                raise ValueError(
                    f"run configuration {key}={value}: {value} is not a TOML value; text needs quotes: {key}='...'"
                ) from error
    return config


def to_toml(config: Mapping[str, Value]) -> str:
    """Write flat keys and values as TOML, so that Flower reads back the same values with the same types."""
    lines = []
    for key, value in config.items():
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, int | float):
            text = repr(value)
        elif isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        else:
            raise ValueError(f"run configuration {key} is {value!r}, expected a bool, int, float or str")
        lines.append(f"{key} = {text}\n")
    return "".join(lines)


def explain(log: str, details: str = "") -> str:
    """Return what went wrong, out of the log of a failed run: the app's exception, and the line that raised it."""
    _, found, report = log.rpartition("Simulation raised an exception\n")
    chain = report.split("Traceback (most recent call last):\n")[1:] if found else []
    for traceback in reversed(chain):
        lines = traceback.splitlines()
        start = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), None)
        if start is None:
            continue
        message = [lines[start]]
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


def _resources(clients: int, cpus_per_client: float, gpus_per_client: float) -> str:
    """Say to Flower how many clients work at once, as its federation configuration.

    Flower takes whole cores per client only, and derives the number of workers from Ray's number of cores. So a share
    of a core becomes one core of a larger number, and workers that no client would use are not started.
    """
    if not cpus_per_client > 0:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, expected more than 0")
    if not 0 <= gpus_per_client < math.inf:
        raise ValueError(f"gpus_per_client is {gpus_per_client}, expected 0 or more")
    from joblib import cpu_count  # minds affinity and a container's quota

    cores = cpu_count()
    if cpus_per_client > cores:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, but there are {cores} cores here")
    at_once = min(clients, int(cores / cpus_per_client))
    each = max(1, math.ceil(cpus_per_client))
    return (
        f"client-resources-num-cpus={each} client-resources-num-gpus={float(gpus_per_client)} "
        f"init-args-num-cpus={at_once * each}"
    )


class _Clock:
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

    def check(self) -> None:
        """Raise `TimeoutError` when the limit is over."""
        if self.left() <= 0:
            raise TimeoutError(f"The run was stopped: it took longer than {self.limit:g} s")


def _short_temporary_folder() -> str:
    """Return the folder for temporary folders whose path is short enough for the sockets Ray puts there."""
    usual = tempfile.gettempdir()
    fits = len(usual.encode()) + len("/tepal-12345678") <= _LONGEST_RAY_FOLDER
    return usual if fits or not os.path.isdir("/tmp") else "/tmp"


def _app_table(app: Path) -> dict[str, Any]:
    if not (app / "pyproject.toml").is_file():
        raise SimulationError(f"{app} is not a Flower app: it has no pyproject.toml")
    try:
        table = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        return dict(table["tool"]["flwr"]["app"])
    except tomllib.TOMLDecodeError as error:
        raise SimulationError(f"{app / 'pyproject.toml'} is not valid TOML: {error}") from error
    except KeyError as error:
        raise SimulationError(f"{app} is not a Flower app: its pyproject.toml has no [tool.flwr.app]") from error


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Join nested keys with dots, as Flower does with run configuration."""
    flat: dict[str, Value] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
