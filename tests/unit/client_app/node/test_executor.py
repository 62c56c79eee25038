"""The executor with real worker processes and Flower's real handlers; only the SuperLink is not one."""

import contextlib
import logging
import os
import queue
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tepal.client_app.node import executor as module
from tepal.client_app.node.executor import Executor, MessageTask, _NoAnswer
from tepal.client_app.node.settings import NodeSettings
from tepal.host.flower.runtime import RuntimeServer
from tests.unit.host.flower.test_supernode import FlowerLoop, bundle, wait_until

SECRET = b"a secret of thirty-two bytes ...."

# An app that does what its message says: "do" is a piece of Python; its reply tells of its process.
APP = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helper import WHO
app = ClientApp()
count = 0
FOLDER = Path(__file__).parents[3]

@app.train()
def train(msg, context):
    global count
    count += 1
    number = int(msg.content["n"]["do"])
    metrics = {"pid": os.getpid(), "count": count, "who": WHO}
    metrics |= TODO[number]() or {}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

def raising(error):
    raise error

def stubborn():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    return {"child": subprocess.Popen([sys.executable, "-c", code]).pid}

def forked():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    return {"child": pid}

def deaf():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)

TODO = {
    0: lambda: None,
    1: lambda: raising(ZeroDivisionError("division by zero")),
    2: lambda: time.sleep(600),
    3: lambda: sys.exit(3),
    4: lambda: os._exit(5),
    5: stubborn,
    6: forked,
    7: lambda: len(bytearray(3_000_000_000)) and None,
    8: lambda: time.sleep(1.0),
    9: deaf,
    10: lambda: raising(RuntimeError("a name that is no text: " + chr(0xdc80))),
    11: lambda: raising(KeyboardInterrupt()),
    12: lambda: (threading.Thread(target=time.sleep, args=(600,)).start(), None)[1],
    13: lambda: {"child": subprocess.Popen(["sleep", "600"], start_new_session=True).pid},
    15: lambda: os.kill(os.getpid(), signal.SIGSEGV),
}
"""
DO = {
    "nothing": 0, "raise": 1, "sleep": 2, "exit": 3, "_exit": 4, "stubborn child": 5, "fork": 6, "3 GB": 7,
    "a second": 8, "deaf": 9, "no text": 10, "interrupt": 11, "thread": 12, "daemon": 13, "segfault": 15,
}  # fmt: skip


def app(who=1, **files):
    return bundle(client_app=APP, helper=f"WHO = {who}\n", **files)


@pytest.fixture(scope="module")
def bundles():
    return {
        1: app(1),
        2: app(2),  # the same package names, with other content
        3: bundle(client_app="import no_such_module\n"),
        4: bundle(client_app="raise SystemExit(4)\n"),
        6: bundle(client_app="something_else = 1\n"),
        5: bundle(client_app=APP.replace("reply_to=msg)\n\ndef", "reply_to=msg) and None\n\ndef"), helper="WHO = 5\n"),
    }


class Running:
    """An executor at work, with the SuperNode that it works for."""

    def __init__(self, loop, executor, folder, address):
        self.loop = loop
        self.executor = executor
        self.folder = folder
        self.address = address
        self.thread = threading.Thread(target=executor.run, daemon=True)

    def ask(self, do="nothing", run=1, timeout=15.0):
        """Have a message answered; return what its metrics are."""
        return self.loop.metrics(self.loop.send(run, do=DO[do]), timeout)

    def error(self, do="nothing", run=1, timeout=15.0):
        """Have a message answered; return its error."""
        reply = self.loop.reply(self.loop.send(run, do=DO[do]), timeout)
        assert reply.has_error()
        return reply.error

    def begin(self, do, run=1):
        """Send a message, and return its id when the app has it."""
        sent = self.loop.send(run, do=DO[do])
        wait_until(lambda: self.executor.task and self.executor.task.began, 15)
        time.sleep(0.1)
        return sent

    def stop(self, **how):
        self.executor.stop(**how)
        self.thread.join(15)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(bundles, folder, *, secret=SECRET, start=True, **options):
    loop = FlowerLoop(bundles)
    address = str(folder.parent / f"{folder.name}.sock")
    server = RuntimeServer(Path(address), loop.state, SECRET)
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_HOME": str(folder)}
    options = {"preload": (), "spare": False, "grace": 0.5, **options}
    executor = Executor(address, secret, folder, environment, NodeSettings("", **options))
    here = Running(loop, executor, folder, address)
    loop.on_task = executor.ring
    try:
        if start:
            here.thread.start()
        yield here
    finally:
        if here.thread.is_alive():
            here.stop(now=True)
        loop.stop()
        server.stop()


@pytest.fixture(scope="module")
def node(bundles, tmp_path_factory):
    """One for all tests that leave it well."""
    with running(bundles, tmp_path_factory.mktemp("node") / "state") as here:
        yield here


def alive(pid):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_messages_of_a_run_are_answered_by_one_process_that_keeps_its_globals(bundles, tmp_path):
    with running(bundles, tmp_path / "state") as node:
        first, second = node.ask(), node.ask()
        assert first["pid"] == second["pid"] != os.getpid()
        assert (first["count"], second["count"]) == (1, 2)
        wait_until(lambda: (node.executor.failed, node.executor.answered) == (0, 2))


def test_another_run_has_a_process_of_its_own_and_its_own_code_under_the_same_names(node):
    one, two, again = node.ask(run=1), node.ask(run=2), node.ask(run=1)
    assert len({one["pid"], two["pid"], again["pid"]}) == 3
    assert (one["who"], two["who"], again["who"]) == (1, 2, 1)
    assert again["count"] == 1, "the globals of a process that was ended are gone"
    assert not alive(one["pid"]) and not alive(two["pid"]) and alive(again["pid"])


def test_an_exception_is_reported_as_flower_does_and_the_process_lives_on(node):
    before = node.ask()
    error = node.error("raise")
    assert (error.code, error.reason) == (2, "<class 'ZeroDivisionError'>:<'division by zero'>")
    after = node.ask()
    assert (after["pid"], after["count"]) == (before["pid"], before["count"] + 2)


def test_sys_exit_in_an_app_is_an_exception_as_any_other(node):
    before = node.ask()
    error = node.error("exit")
    assert (error.code, error.reason) == (2, "<class 'SystemExit'>:<'3'>")
    assert node.ask()["pid"] == before["pid"]


def test_an_app_that_cannot_be_imported_is_reported_each_time_and_other_runs_go_on(node):
    errors = [node.error(run=3) for _ in range(2)]
    assert {(error.code, error.reason) for error in errors} == {
        (2, "<class 'ModuleNotFoundError'>:<'No module named 'no_such_module''>")
    }
    assert node.ask(run=1)["who"] == 1


def test_a_bundle_without_the_app_that_it_names_is_a_load_error(node):
    error = node.error(run=6)
    assert (error.code, error.reason) == (1, "An exception was raised when attempting to load `ClientApp`")


def test_an_app_that_exits_when_it_is_imported_is_answered(node):
    assert node.error(run=4).code in (1, 2)
    assert node.ask(run=1)["who"] == 1


def test_an_app_that_answers_with_nothing_is_told_off(node):
    error = node.error(run=5)
    assert error.code == 8 and "its reply cannot be sent to the SuperNode" in error.reason


def test_an_exception_whose_text_is_no_text_is_answered(node):
    error = node.error("no text")
    assert error.code in (2, 8) and error.reason
    node.ask()


@pytest.mark.parametrize(
    ("do", "words"),
    [("_exit", "ended with status 5"), ("segfault", "ended by SIGSEGV"), ("interrupt", "ended by SIGINT")],
)
def test_an_app_that_ends_its_process_is_answered_for_at_once_and_the_next_message_works(node, do, words):
    died = node.executor.died
    began = time.monotonic()
    error = node.error(do)
    assert (error.code, words in error.reason) == (8, True), error
    assert time.monotonic() - began < 8
    assert node.ask()["count"] == 1
    assert node.executor.died == died + 1


def test_a_process_that_is_killed_in_mid_message_is_answered_for_at_once(node):
    sent = node.begin("sleep")
    (role, worker), *_ = node.executor.workers
    assert role == "executor"
    killed = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    error = node.loop.reply(sent).error
    assert node.loop.sent_at[sent] - killed < 8
    assert error.code == 8 and "was killed (SIGKILL), as the system does if memory runs out" in error.reason
    assert node.ask()["count"] == 1


def test_a_process_that_dies_between_messages_costs_none(node):
    pid = node.ask()["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))
    assert node.ask()["pid"] != pid


@pytest.mark.parametrize("do", ["stubborn child", "fork"])
def test_what_an_app_has_started_ends_with_its_run(node, do):
    """Also what ignores SIGTERM, and copies of the app's own process."""
    child = node.ask(do)["child"]
    assert alive(child)
    node.ask(run=2)
    wait_until(lambda: not alive(child))


def test_what_an_app_has_started_in_a_session_of_its_own_ends_with_its_run(node):
    child = node.ask("daemon")["child"]
    try:
        node.ask(run=2)
        wait_until(lambda: not alive(child), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_thread_that_an_app_leaves_behind_does_not_keep_its_process(node):
    pid = node.ask("thread")["pid"]
    began = time.monotonic()
    node.ask(run=2)
    assert not alive(pid) and time.monotonic() - began < 8


def test_many_messages_leave_no_process_file_or_folder(node):
    def held():
        here = psutil.Process()
        return here.num_fds(), len(here.children(recursive=True)), sum(1 for _ in node.folder.rglob("*"))

    def drained():
        while not node.executor.finished.empty():  # as the node does
            node.executor.finished.get()

    node.ask()
    drained()
    before = held()
    worker = psutil.Process(node.executor.workers[0][1].pid)
    files = worker.num_fds()
    for _ in range(20):
        node.ask()
    drained()
    wait_until(lambda: node.executor.task is None)
    fds, processes, left = held()
    assert (processes, left) == before[1:] and fds <= before[0] + 2
    assert worker.num_fds() <= files + 2


# Others are their own -------------------------------------------------------------------------------------------------


def test_memory_beyond_the_limit_is_an_error_of_the_app_and_the_node_lives(bundles, tmp_path):
    with running(bundles, tmp_path / "node", memory_limit=1_500_000_000) as node:
        error = node.error("3 GB")
        assert error.code == 2 and "MemoryError" in error.reason
        assert node.ask()["count"] == 2


def test_a_message_in_hand_is_finished_when_the_node_is_stopped(bundles, tmp_path):
    with running(bundles, tmp_path / "node", grace=20) as node:
        sent = node.begin("a second")
        node.stop()
        assert node.loop.metrics(sent)["count"] == 1
        assert not list(node.folder.iterdir()), "nothing of a worker stays"


@pytest.mark.parametrize(("do", "now"), [("sleep", False), ("deaf", True)])
def test_a_message_that_takes_too_long_is_handed_back_when_the_node_is_stopped(bundles, tmp_path, do, now):
    with running(bundles, tmp_path / "node", grace=100 if now else 0.5) as node:
        sent = node.begin(do)
        pid = node.executor.workers[0][1].pid
        began = time.monotonic()
        node.stop(now=now)
        assert time.monotonic() - began < 10
        error = node.loop.reply(sent).error
        assert error.code == 8 and "this node is being stopped" in error.reason
        assert not alive(pid)


def test_an_idle_runs_process_is_ended(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.1)
    with running(bundles, tmp_path / "node", idle=0.5) as node:
        pid = node.ask()["pid"]
        wait_until(lambda: not node.executor.workers, 8)
        assert not alive(pid)
        assert node.ask()["pid"] != pid


def test_who_does_not_know_the_secret_gets_no_task(bundles, tmp_path):
    with running(bundles, tmp_path / "node", secret=b"another secret of thirty-two byte") as node:
        sent = node.loop.send(1, do=0)
        time.sleep(1)
        assert sent not in node.loop.replies and node.executor.task is None
        assert node.thread.is_alive()


def test_a_message_that_no_process_can_be_started_for_is_handed_back_with_words(bundles, tmp_path):
    with running(bundles, tmp_path / "node") as node:
        shutil.rmtree(node.folder)
        sent = node.loop.send(1, do=0)
        error = node.loop.reply(sent).error
        assert error.code == 8 and "cannot start a process for the ClientApp" in error.reason
        assert "No such file or directory" in error.reason
        node.folder.mkdir()
        assert node.ask()["count"] == 1


def test_a_spare_process_takes_over_a_new_run(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.1)
    with running(bundles, tmp_path / "node", spare=True) as node:
        wait_until(lambda: [role for role, worker in node.executor.workers if worker.ready] == ["spare"], 15)
        spare = node.executor.workers[0][1].pid
        assert node.ask()["pid"] == spare
        os.kill(spare, signal.SIGKILL)


def test_spare_processes_that_die_at_once_are_a_problem_that_is_said_and_no_busy_loop(tmp_path, bundles, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(module, "_PAUSES", (0.0, 0.1, 0.2, 30.0))
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.05)
    with running(bundles, tmp_path / "node", spare=True, preload=("broken_module",)) as node:
        wait_until(lambda: node.executor.problem, 20)
        assert node.executor.problem == "the last 3 processes for ClientApps died before they were ready"
        time.sleep(0.5)
        assert node.executor.died == 3, "it is not tried again before its pause is over"
        error = node.error()
        assert error.code == 8 and "ended with status 7" in error.reason


def test_processes_that_die_at_once_are_a_problem_without_spare_ones_too(tmp_path, bundles, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with running(bundles, tmp_path / "node", spare=False, preload=("broken_module",)) as node:
        assert [node.error().code for _ in range(3)] == [8, 8, 8]
        assert "died before they were ready" in node.executor.problem


def test_a_supernode_that_does_not_answer_does_not_end_it(tmp_path):
    address = str(tmp_path / "there")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    executor = Executor(address, SECRET, tmp_path, os.environ, NodeSettings("", preload=(), spare=False))
    thread = threading.Thread(target=executor.run, daemon=True)
    thread.start()
    executor.ring()
    listening.accept()[0].close()  # it has asked, and gets no answer
    listening.close()
    executor.ring()
    time.sleep(0.5)
    assert thread.is_alive()
    executor.stop()
    thread.join(5)
    assert not thread.is_alive()


def test_words_for_a_process_that_the_system_killed_name_the_limit(tmp_path):
    class Killed:
        memory, killed = 512 * 2**20, 0

    class Dead:
        def wait(self, seconds):
            return -signal.SIGKILL

    executor = Executor("127.0.0.1:1", SECRET, tmp_path, {}, NodeSettings(""))
    executor._limits = Killed()
    assert "(SIGKILL), as the system does" in executor._why(Dead())
    executor._limits.killed = 1
    assert executor._why(Dead()) == "the ClientApp's process was killed: the 512 MB of this node ran out"
    assert "(SIGKILL), as the system does" in executor._why(Dead()), "one death is counted once"


def test_words_for_a_process_that_the_system_killed_where_there_is_no_limit_name_none(tmp_path):
    class Killed:
        memory, killed = 0, 0

    class Dead:
        def wait(self, seconds):
            return -signal.SIGKILL

    executor = Executor("127.0.0.1:1", SECRET, tmp_path, {}, NodeSettings(""))
    executor._limits = Killed()
    executor._limits.killed = 1
    assert " 0 MB" not in executor._why(Dead())


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.WARNING, logger="flwr")


@pytest.mark.parametrize("status", [0, 5])
def test_words_for_a_process_that_ended_by_itself_name_its_status(tmp_path, status):
    class Ended:
        def wait(self, seconds):
            return status

    executor = Executor("127.0.0.1:1", SECRET, tmp_path, {}, NodeSettings(""))
    assert executor._why(Ended()) == f"the ClientApp's process ended with status {status}"


def test_a_message_that_takes_longer_than_some_heartbeats_is_answered(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_HEARTBEAT", 0.3)
    with running(bundles, tmp_path / "node") as node:
        assert node.ask("a second")["count"] == 1


def test_spare_processes_that_cannot_be_started_are_a_problem_that_is_said(bundles, tmp_path, monkeypatch):
    def start(self):
        raise OSError("no more processes")

    monkeypatch.setattr(Executor, "_start", start)
    monkeypatch.setattr(module, "_PAUSES", (0.0, 0.1, 0.1, 30.0))
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.05)
    with running(bundles, tmp_path / "node", spare=True) as node:
        wait_until(lambda: node.executor.problem, 10)
        assert node.executor.problem.startswith("the last 3 processes for ClientApps died")


# A heartbeat that the SuperNode refuses -------------------------------------------------------------------------------


class Refused:
    """An executor that waits for a worker, without processes; the SuperNode refuses its heartbeat.

    Args:
        events: what comes from the worker just when the heartbeat is refused.
    """

    def __init__(self, monkeypatch, folder, *events):
        self.beats = 0
        self.executor = Executor("", SECRET, folder, {}, NodeSettings(""))
        self.worker = SimpleNamespace(events=queue.SimpleQueue(), ready=True, wait=lambda seconds: 5)
        self._events = events
        monkeypatch.setattr(module, "_HEARTBEAT", -1)
        monkeypatch.setattr(self.executor, "_beat", self._beat)

    def watch(self):
        return self.executor._watch(MessageTask(1, self.worker), None)

    def _beat(self, client):
        self.beats += 1
        for event in self._events:
            self.worker.events.put(event)
        return False


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("stopping", [2.0, -1.0])
def test_a_worker_that_has_answered_just_before_its_heartbeat_lives_on(monkeypatch, tmp_path, ok, stopping):
    """Its answer ends its task at the SuperNode, and only then it says that it is done."""
    monkeypatch.setattr(module, "_STOPPING", stopping)
    refused = Refused(monkeypatch, tmp_path, {"event": "answered"}, {"event": "done", "ok": ok})
    assert refused.watch() is ok
    assert refused.beats == 1, "a task that is over has no more heartbeats"


def test_a_worker_has_some_time_to_say_that_it_is_done(monkeypatch, tmp_path):
    refused = Refused(monkeypatch, tmp_path)
    soon = threading.Timer(0.05, refused.worker.events.put, [{"event": "done", "ok": True}])
    soon.start()
    assert refused.watch() is True
    soon.join()


def test_a_task_that_the_supernode_has_given_up_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_STOPPING", -1)
    with pytest.raises(_NoAnswer, match="the SuperNode has given up the task"):
        Refused(monkeypatch, tmp_path).watch()


def test_a_worker_that_dies_after_a_refused_heartbeat_is_told_as_that(monkeypatch, tmp_path):
    refused = Refused(monkeypatch, tmp_path, None)
    with pytest.raises(_NoAnswer, match="ended with status 5"):
        refused.watch()
    assert refused.executor.died == 1


def test_a_supernode_that_ends_after_it_refused_a_heartbeat_is_told_as_that(monkeypatch, tmp_path):
    refused = Refused(monkeypatch, tmp_path, {"event": "answered"})
    put = refused.worker.events.put
    refused.worker.events = SimpleNamespace(
        put=put, get=lambda timeout, get=refused.worker.events.get: setattr(refused.executor, "_broken", True) or get()
    )
    with pytest.raises(_NoAnswer, match="the SuperNode ended"):
        refused.watch()
