"""Child processes are never left behind: not by an error or a signal, not when they go into sessions of their own."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from tepal.host.processes import MARK, ProcessError, flower_environment, free_port, marked, started, wait_for_http
from tests.integration.credentials import authority

# A child that starts two more: one in its own session, and one in a session of its own whose parent ends at once.
FAMILY = textwrap.dedent(
    """
    import subprocess, sys, time
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    subprocess.Popen(sleep, start_new_session=True)
    leave = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", leave, *sleep])
    print("ready", flush=True)
    time.sleep(300)
    """
)
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc or prctl")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_until(condition, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(0.02)


def gone(pids) -> bool:
    def dead(pid: int) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    return all(dead(pid) for pid in pids)


def test_a_child_runs_beside_the_block_and_is_stopped_after_it(tmp_path):
    log = tmp_path / "logs" / "child.log"
    with started(python("print('hello', flush=True); import time; time.sleep(300)"), log=log) as child:
        wait_until(lambda: "hello" in child.tail(), "the child's output")
        assert child.running and child.returncode is None
    assert not child.running and child.returncode == -signal.SIGTERM


def test_descendants_in_other_sessions_and_orphans_are_stopped_too(tmp_path):
    with started(python(FAMILY), log=tmp_path / "log") as child:
        wait_until(lambda: "ready" in child.tail(), "the family")
        tree = [process.pid for process in child.tree()]
        assert len(tree) == 3 and child.pid in tree
        sessions = {os.getsid(pid) for pid in tree}
        assert len(sessions) == 3, "the test is worth nothing if they share a session"
    assert gone(tree)
    assert marked(child.token) == []


def test_orphans_of_a_child_that_has_died_are_still_stopped(tmp_path):
    with started(python(FAMILY), log=tmp_path / "log") as child:
        wait_until(lambda: "ready" in child.tail(), "the family")
        tree = [process.pid for process in child.tree()]
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
        assert not gone(tree)
    assert gone(tree)


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    with started(python(STUBBORN), log=tmp_path / "log", grace=0.3) as child:
        wait_until(lambda: "ready" in child.tail(), "the child")
        begun = time.monotonic()
    assert child.returncode == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - begun < 30


def test_a_killed_child_ends_with_all_that_belongs_to_it_and_hears_nothing_before(tmp_path):
    begun = "import signal, sys; signal.signal(15, lambda *_: (print('asked', flush=True), sys.exit(0)))\n"
    with started(python(begun + FAMILY), log=tmp_path / "log") as child:
        wait_until(lambda: "ready" in child.tail(), "the family")
        tree = [process.pid for process in child.tree()]
        child.kill()
        assert len(tree) == 3 and gone(tree)
        assert child.returncode == -signal.SIGKILL
    assert "asked" not in child.tail()


def test_an_exception_in_the_block_stops_the_child_and_goes_on(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        started(python("import time; time.sleep(300)"), log=tmp_path / "log") as child,
    ):
        _ = 1 / 0
    assert not child.running


def test_processes_of_an_outer_block_are_marked_for_it_also_when_an_inner_block_starts_them(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, "outer")
    with started(python("import time; time.sleep(300)"), log=tmp_path / "log") as child:
        wait_until(lambda: marked("outer"), "the mark of the outer block")
        assert [process.pid for process in marked("outer")] == [child.pid]
        assert [process.pid for process in marked(child.token)] == [child.pid]


def test_a_command_that_is_run_for_a_child_belongs_to_it(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, "outer")
    with started(python("import time; time.sleep(300)"), log=tmp_path / "log") as child:
        environment = {"A": "b", "PATH": os.environ["PATH"]}
        show = f"import os; print(os.environ['A'], os.environ['{MARK}'])"
        done = child.run(python(show), env=environment, timeout=60)
        assert done.stdout.split() == ["b", f"outer,{child.token}"] and done.returncode == 0

        lasting = threading.Thread(
            target=lambda: child.run(python("import time; time.sleep(300)"), env=environment, timeout=300)
        )
        lasting.start()
        wait_until(lambda: len(child.tree()) == 2, "the command")
        family = [process.pid for process in child.tree()]
        child.stop()
        lasting.join(60)
        assert gone(family) and not lasting.is_alive()


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    with started(python("import time; time.sleep(300)"), log=tmp_path / "log") as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.run(python("import time; time.sleep(300)"), env=os.environ, timeout=0.1)
        assert [process.pid for process in child.tree()] == [child.pid]


# What `started` is for: the process that holds the block is told to end, while the family runs.
HOLDER = """
import os, sys, time
from pathlib import Path
from tepal.host.processes import started
family, log, pids = sys.argv[1:]
try:
    with started([sys.executable, "-c", family], log=Path(log), folder=Path(log).parent / "temporary") as child:
        while "ready" not in child.tail():
            time.sleep(0.02)
        family = dict.fromkeys([child.pid, *(process.pid for process in child.tree())])
        Path(pids + ".new").write_text(" ".join(map(str, family)))
        os.rename(pids + ".new", pids)
        time.sleep(300)
finally:
    print("left in order", flush=True)
"""


def hear_signals():
    """What runs in the background, or under nohup, hands ignored signals on to its children."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def holder(tmp_path: Path):
    """Another Python that is inside a `started` block; gives it and the pids of the family it started."""
    pids = tmp_path / "pids"
    command = [*python(HOLDER), FAMILY, str(tmp_path / "log"), str(pids)]
    environment = os.environ | {"PYTHONPATH": ROOT}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=hear_signals
    ) as process:
        try:
            wait_until(lambda: (pids.exists() and pids.read_text()) or process.poll() is not None, "the holder")
            assert process.poll() is None
            yield process, [int(pid) for pid in pids.read_text().split()]
        finally:
            process.kill()


ROOT = str(Path(__file__).resolve().parents[3])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_holder_stops_the_whole_family(tmp_path, number):
    with holder(tmp_path) as (process, family):
        assert len(family) == 3 and not gone(family)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert output == "left in order\n"
        assert gone(family)


def test_two_ctrl_c_in_a_row_do_not_leave_half_of_the_family(tmp_path):
    with holder(tmp_path) as (process, family):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert gone(family)


def test_the_whole_family_ends_and_the_folder_goes_when_the_holder_is_killed(tmp_path):
    (tmp_path / "temporary").mkdir()
    with holder(tmp_path) as (process, family):
        assert len(family) == 3 and not gone(family)
        process.kill()
        process.wait(10)
        wait_until(lambda: gone(family), "the end of the family")
        wait_until(lambda: not (tmp_path / "temporary").exists(), "the end of the folder")


def test_a_command_that_does_not_exist_is_named(tmp_path):
    begin = started(["no-such-program", "--now"], log=tmp_path / "log")
    with pytest.raises(ProcessError, match="Cannot start no-such-program"), begin:
        pass


def test_commands_are_found_on_the_path_of_their_own_environment(tmp_path):
    program = tmp_path / "bin" / "tepal-test-program"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho from there\n")
    program.chmod(0o755)
    with started([program.name], log=tmp_path / "log", env={"PATH": f"{program.parent}:/bin:/usr/bin"}) as child:
        assert child.wait(10) == 0
    assert child.tail() == "from there"


def test_waiting_for_a_server_returns_once_it_answers(tmp_path):
    port = free_port()
    with started(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], log=tmp_path / "log"
    ) as server:
        wait_for_http(f"http://127.0.0.1:{port}/", timeout=20, process=server)


def test_waiting_for_a_server_that_has_died_fails_at_once_with_its_last_words(tmp_path):
    with started(python("import sys; sys.exit('no such option: --wings')"), log=tmp_path / "log") as server:
        begun = time.monotonic()
        with pytest.raises(ProcessError, match=r"status 1 before .*(?s:.*)no such option: --wings"):
            wait_for_http(f"http://127.0.0.1:{free_port()}/", timeout=60, process=server)
        assert time.monotonic() - begun < 50


def test_an_error_status_is_no_answer():
    class Unwell(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Unwell) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(TimeoutError, match=r"did not answer within .* \(status 503\)"):
            wait_for_http(f"http://127.0.0.1:{server.server_port}/health", timeout=0.3)
        server.shutdown()


def test_a_server_with_tls_answers_to_those_who_trust_its_authority(tmp_path):
    class Well(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    ours, other = authority(tmp_path, "ours"), authority(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ours.server(tmp_path))
    with HTTPServer(("127.0.0.1", 0), Well) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}/health"
        wait_for_http(url, timeout=20, context=ssl.create_default_context(cafile=ours.certificate))
        for context in (ssl.create_default_context(cafile=other.certificate), None):
            with pytest.raises(TimeoutError, match="CERTIFICATE_VERIFY_FAILED"):
                wait_for_http(url, timeout=0.3, context=context)
        server.shutdown()


def test_a_free_port_can_be_bound():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", free_port()))


def test_flower_runs_privately_and_calls_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("KEPT", "yes")
    environment = flower_environment(tmp_path)
    assert environment["FLWR_HOME"] == str(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["KEPT"] == "yes"
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    assert os.environ["PATH"] == "/usr/bin", "the caller's own environment stays as it is"
