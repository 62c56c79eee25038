"""The line between the processes of a node."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal.host.flower.link import Link, command

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def link():
    here, there = Link.pair()
    yield here, Link(there)
    here.close()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from(["run", "reason", "rss"]), VALUES), max_size=5))
def test_what_is_sent_arrives_in_order(events):
    here, there = Link.pair()
    other = Link(there)
    for values in events:
        assert here.send("said", **values)
    here.close()
    assert list(other) == [{"event": "said", **values} for values in events]
    other.close()


def test_a_line_arrives_when_it_is_whole(link):
    here, there = link
    got = []
    reader = threading.Thread(target=lambda: got.extend(there), daemon=True)
    reader.start()
    line = json.dumps({"event": "ready"}).encode() + b"\n"
    for byte in line[:-1]:
        here._socket.sendall(bytes([byte]))
    time.sleep(0.1)
    assert got == []
    here._socket.sendall(b"\n")
    here.close()
    reader.join(5)
    assert got == [{"event": "ready"}]


def test_half_a_line_at_the_end_is_nothing(link):
    here, there = link
    here.send("first")
    here._socket.sendall(b'{"event": "sec')
    here.close()
    assert [event["event"] for event in there] == ["first"]


def test_megabytes_in_one_line_pass(link):
    here, there = link
    reason = "x" * 5_000_000
    sender = threading.Thread(target=here.send, args=("done",), kwargs={"reason": reason}, daemon=True)
    sender.start()
    assert next(iter(there))["reason"] == reason
    sender.join(5)
    assert not sender.is_alive()


def test_threads_do_not_mix_their_lines(link):
    here, there = link
    threads = [
        threading.Thread(target=lambda k=k: [here.send("said", k=k, n=n, fill="y" * 3000) for n in range(50)])
        for k in range(4)
    ]
    got = []
    reader = threading.Thread(target=lambda: got.extend(there), daemon=True)
    reader.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    here.close()
    reader.join(10)
    for k in range(4):
        assert [event["n"] for event in got if event["k"] == k] == list(range(50))


def test_sending_to_nobody_says_so_and_does_not_raise(link):
    here, there = link
    there.close()
    assert [here.send("said") for _ in range(3)][-1] is False


def test_a_closed_end_leaves_no_open_file():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        here, there = Link.pair()
        other = Link(there)
        here.close()
        assert list(other) == []
        other.close()
        del here, other, there
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_child_inherits_its_end_and_hears_when_the_parent_is_gone():
    here, there = Link.pair()
    program = (
        "import sys; from tepal.host.flower.link import Link\n"
        "link = Link.inherited(sys.argv[1])\n"
        "for event in link: link.send('echo', of=event['event'])\n"
        "print('the other end is gone')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(there.fileno())], pass_fds=[there.fileno()], stdout=subprocess.PIPE,
    )  # fmt: skip
    there.close()
    here.send("hello")
    assert next(iter(here)) == {"event": "echo", "of": "hello"}
    here.close()
    assert child.communicate(timeout=10)[0] == b"the other end is gone\n"


def test_what_the_child_starts_does_not_inherit_its_end():
    here, there = socket.socketpair()
    end = Link.inherited(str(os.dup(there.fileno())))
    assert not os.get_inheritable(end._socket.fileno())
    end.close()
    here.close()
    there.close()


def test_a_process_dies_with_its_parent():
    """Not when its own parent lives, and at once when that is killed."""
    child = (
        "import os, sys, signal, time\n"
        "from tepal.host.flower.link import die_with_parent\n"
        "die_with_parent(os.getppid(), signal.SIGKILL); print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
    dies_with([sys.executable, "-c", parent, child])


def test_a_process_that_has_not_imported_everything_yet_dies_with_its_parent(tmp_path):
    """It takes seconds until its `main` begins, on a busy machine ten or more."""
    (tmp_path / "httpx.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    parent = (
        "import subprocess, time\n"
        "from tepal.host.flower.link import command\n"
        "subprocess.Popen(command('worker')); time.sleep(60)"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    dies_with([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": path})


def test_a_second_signal_does_not_cut_the_goodbye_of_a_supernode_off(tmp_path):
    """Linux sends the signal of a parent's death again for every thread of it that ends."""
    program = (
        "import pathlib, time\n"
        "from flwr.supercore.exit import register_signal_handlers\n"
        "from flwr.supercore.telemetry import EventType\n"
        "from tepal.host.flower import supernode\n"
        "def loop():\n"
        "    supernode._without_sigterm(register_signal_handlers, event_type=EventType.RUN_SUPERNODE_LEAVE)\n"
        "    try:\n"
        "        print('ready', flush=True); time.sleep(60)\n"
        "    finally:\n"
        "        print('leaving', flush=True); time.sleep(1); pathlib.Path('goodbye').touch()\n"
        "supernode.flower_supernode, supernode.change_flower = loop, lambda *_: None\n"
        "supernode.main()"
    )
    here, there = Link.pair()
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(there.fileno()), "1.0", "runtime"],
        pass_fds=[there.fileno()], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    there.close()
    for said in ("ready", "leaving"):
        assert child.stdout.readline() == f"{said}\n"
        child.send_signal(signal.SIGINT)
    assert child.wait(30) == 0 and (tmp_path / "goodbye").exists()
    child.stdout.close()
    here.close()


def dies_with(parent: list[str], **settings) -> None:
    """Start a parent whose child prints its pid, kill it, and see that the child is gone too."""
    process = subprocess.Popen(parent, stdout=subprocess.PIPE, **settings)
    pid = int(process.stdout.readline())
    os.kill(pid, 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    break
        except FileNotFoundError:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the child has outlived its parent")
    process.stdout.close()


def test_a_process_of_another_parent_ends_at_once():
    program = (
        "from tepal.host.flower.link import die_with_parent; import signal\n"
        "die_with_parent(1, signal.SIGKILL); print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_command_imports_no_tepal_and_nothing_of_the_folder_it_is_started_in(tmp_path):
    """It fails for want of arguments, in the module that it names; a `json.py` beside it is not its business."""
    (tmp_path / "json.py").write_text("raise RuntimeError('imported from the working directory')")
    program = command("worker")
    program[program.index("-c") + 1] += "\n"
    spy = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('TEPAL', [m for m in sys.modules if m.split('.')[0] == 'tepal']))\n"
    )
    program[program.index("-c") + 1] = spy + program[program.index("-c") + 1]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert "not enough values to unpack" in done.stderr and "working directory" not in done.stderr
    assert "TEPAL []" in done.stdout
