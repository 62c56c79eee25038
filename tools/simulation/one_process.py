"""The process of a `ProcessEngine`: it imports an app once, and forks what each run needs.

    this process     the app's imports, and the data that `prepare` reads; it waits, and has no threads
      the run        the ServerApp, and the clients if they train in turn
      a worker …     the ClientApp, one for each client that trains at the same time; messages come through a pipe

If the clients train on several machines, each has such a process: one has a run whose messages are files, the others
have a worker each, which answers them (see `tepal.host.request_files`).

Forked processes share the memory of this one. Arrays of messages go through shared memory, and a part of the model that
all clients receive goes to each process once (see `tepal.host.shared_pipe`). Every run starts from the same state, and
a run that fails or is killed does not affect the next one. Where forking is not safe, as on macOS, a run is in this
process, with its clients in threads.

This file is started by its path: if the app has its own `tepal`, that one is imported, which has no `tepal.tools`.
"""

from __future__ import annotations

import gc

gc.disable()  # until a run is forked: what is imported is not garbage, and to look through it takes a second

# ruff: noqa: E402
import json
import os
import pkgutil
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from logging import getLogger
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

import tepal.client_app
import tepal.host
from tepal.client_app.stacked import Gathering
from tepal.host.files import replacing
from tepal.host.flower.patches import KILLED, SERVER_APP_RAISED
from tepal.strategies.in_process import Answers, PopulationGrid

for package in (tepal.host, tepal.client_app):  # an app's own `tepal` does not have these modules:
    package.__path__.append(str(Path(__file__).parents[2] / package.__name__.rpartition(".")[2]))
from tepal.client_app.elsewhere import FarClients, answered, reply_of, with_paths
from tepal.host.allocator import keep_freed_memory
from tepal.host.request_files import Workers, answer_all
from tepal.host.shared_pipe import SharedPipe, shared_pipe

FORKS = sys.platform.startswith("linux")

_WAITING = 2  # messages for each worker on another machine, so that most have a next one when they have answered


def main() -> None:
    """Serve runs of an app: `one_process.py FOLDER SERVERAPP CLIENTAPP CLIENTS AT_ONCE THREADS`.

    FOLDER is the app's, SERVERAPP and CLIENTAPP are its components ("module:attribute"), CLIENTS is the number of its
    clients, AT_ONCE the number of clients that train at the same time. Each line of the standard input requests a run,
    as JSON: `config` is the run configuration, `cache` the folder of the clients' caches, `ended` the path of a file
    for the run's status. `train-together` in the run configuration replaces AT_ONCE; such clients have THREADS threads
    of PyTorch, others OMP_NUM_THREADS. What runs need is imported before the first one is requested.

    With `asks`, a folder, the clients are asked through files in it, on `workers` machines. With `answers` it is no run
    but such a worker, and the folder is its own; in what it is asked, the keys of `paths` are replaced by their values.
    """
    keep_freed_memory()
    folder, *components = sys.argv[1:4]
    clients, at_once, threads = map(int, sys.argv[4:])
    sys.path.insert(0, folder)
    requests = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")  # an app may close sys.stdin
    app: LoadedApp | None = None
    failed: Exception | None = None
    try:
        app = LoadedApp.load(*components)
    except Exception as error:
        failed = error
    for asked in requests:
        request = json.loads(asked)
        try:
            if failed is not None:
                raise failed
            app = app or LoadedApp.load(*components)
            config = request["config"]
            os.environ["TEPAL_CACHE"] = request["cache"]
            if FORKS:
                if "asks" not in request:  # here are no clients
                    app.prepare(config, clients)
                gc.freeze()  # a collection in a forked process would look at all that it shares, and so copy it
            gc.enable()
            if "answers" in request:
                there = lru_cache(64)(partial(with_paths, request["paths"]))
                answer = partial(answered, app.client_app, config, there)
                status = _done(partial(answer_all, Path(request["answers"]), answer), "a place of clients failed")
            elif "asks" in request:
                count = request["workers"]
                far = FarClients(Workers(Path(request["asks"]), count).ask)
                status = _done(partial(_run, app, config, clients, _WAITING * count, far), SERVER_APP_RAISED)
            elif FORKS:
                status = _status_of(_forked_run(app, config, clients, at_once, threads))
            else:
                _run(app, config, clients, at_once, app.client_app)
                status = ""
        except Exception:
            _log_exception()
            status, failed = "its app raised an exception", None
        with replacing(Path(request["ended"])) as written:
            written.write_text(status, encoding="utf-8")


@dataclass(frozen=True)
class LoadedApp:
    """An imported Flower app. What its clients import later is imported by the function `import_ahead` of the
    ClientApp's module, if it has one."""

    server_app: ServerApp
    client_app: ClientApp
    prepare: Callable[[Mapping[str, Any], int], None]
    """Called with the run config and the number of clients before a run's processes are forked, to read the data that
    they share: the function `prepare` of the ClientApp's module, if it has one."""

    @staticmethod
    def load(server_app: str, client_app: str) -> LoadedApp:
        apps = pkgutil.resolve_name(server_app), pkgutil.resolve_name(client_app)
        module = sys.modules[client_app.partition(":")[0]]
        getattr(module, "import_ahead", lambda: None)()
        return LoadedApp(*apps, getattr(module, "prepare", lambda _config, _clients: None))


def _run(app: LoadedApp, config: Mapping[str, Any], clients: int, at_once: int, answer: Answers) -> None:
    """Run the ServerApp in this process; `answer` runs the clients."""
    stacked = _stacked(config)
    how: dict[str, Any] = {"at_once": stacked, "gathering": Gathering} if stacked > 1 else {"at_once": at_once}
    with PopulationGrid(answer, clients, config, **how) as grid:
        app.server_app(grid, Context(1, 0, {}, RecordDict(), dict(config)))


def _stacked(config: Mapping[str, Any]) -> int:
    return int(config.get("train-together", 1))


def _log_exception(said: str = SERVER_APP_RAISED) -> None:
    getLogger("flwr").exception(said)
    sys.stdout.flush()


# --- processes ------------------------------------------------------------------------------------------------------


def _forked_run(app: LoadedApp, config: Mapping[str, Any], clients: int, at_once: int, threads: int) -> int:
    """Run the app in forked processes; return the exit status of the run's process, as `os.waitpid` does."""
    # Clients that train in turn or together are in the server's process: nothing goes through a pipe.
    count = 0 if at_once == 1 or _stacked(config) > 1 else at_once
    pipes: list[SharedPipe] = []
    workers = []
    for _ in range(count):
        ours, theirs = shared_pipe()
        pipes.append(ours)
        workers.append(os.fork())
        if workers[-1] == 0:
            for pipe in pipes:
                pipe.close()
            _work(app.client_app, theirs)
        theirs.close()
    if (run := os.fork()) == 0:
        if _stacked(config) > 1:
            torch.set_num_threads(threads)
        answer = ClientProcesses(pipes) if pipes else app.client_app
        try:
            _run(app, config, clients, at_once, answer)
        except Exception:
            _log_exception()
            os._exit(1)
        _leave()
    for pipe in pipes:
        pipe.close()
    _, status = os.waitpid(run, 0)
    for worker in workers:  # one may still be training, after the run has ended
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    return status


def _done(work: Callable[[], None], failed: str) -> str:
    """Do something in a forked process, or in this one; return why it failed, "" if it did not.

    `failed`: what the log says then.
    """
    if not FORKS:
        work()
        return ""
    if (process := os.fork()) == 0:
        try:
            work()
        except BaseException:  # it must not return: its caller is the parent's code
            _log_exception(failed)
            os._exit(1)
        _leave()
    return _status_of(os.waitpid(process, 0)[1])


def _status_of(status: int) -> str:
    """Return why a run failed, "" if it completed."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"{KILLED} {-code}"
    return f"its process ended with status {code}" if code else ""


def _work(client_app: ClientApp, pipe: SharedPipe) -> NoReturn:
    """Answer messages until the other end of the pipe is closed."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a Message outside a task needs them
    try:
        while True:
            message, context = pipe.recv()
            pipe.send((reply_of(client_app, message, context), context.state))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _leave()
    except BaseException:  # it must not return: its caller is the parent's code
        _log_exception()
        os._exit(1)


def _leave() -> NoReturn:
    """End a forked process without the interpreter's exit handlers, which belong to the parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class ClientProcesses:
    """Answers each message in the next free one of several processes.

    Args:
        pipes: one to each process.
    """

    def __init__(self, pipes: Iterable[SharedPipe]) -> None:
        self._free: queue.SimpleQueue[SharedPipe | None] = queue.SimpleQueue()
        self._left = 0
        self._lock = threading.Lock()
        for pipe in pipes:
            self._free.put(pipe)
            self._left += 1

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply. Raises RuntimeError if the process ends meanwhile, for instance for lack of memory."""
        pipe = self._free.get()
        if pipe is None:
            self._free.put(None)
            raise RuntimeError("all processes that clients run in have ended")
        try:
            pipe.send((message, context))
            reply, context.state = pipe.recv()
        except BaseException as error:  # whatever it is, the two ends may no longer agree
            pipe.close()
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._free.put(None)
            if not isinstance(error, EOFError | OSError):
                raise
            raise RuntimeError("the process that the client ran in has ended") from error
        self._free.put(pipe)
        return reply


if __name__ == "__main__":
    main()
