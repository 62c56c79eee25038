"""The actor on a machine: inputs, a job's files and process, and what is asked of it. Without Ray."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tepal.tools.cluster import machine
from tepal.tools.cluster.machine import Machine, digest_of, files_below, matching, versions

WEEK = 7 * 24 * 3600


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The machine's temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def leave(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def digest(files):
    """The digest of an input, by its description: of lines with each name and the SHA-256 of its content."""
    lines = [name.encode() + b"\0" + hashlib.sha256(files[name]).hexdigest().encode() for name in sorted(files)]
    return hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()[:32]


def send(on, files, size=3):
    """Write an input in parts of this size; its digest."""
    of = digest(files)
    for name, content in files.items():
        for offset in range(0, max(len(content), 1), size):
            on.write_input(of, [(name, offset, content[offset : offset + size])])
    return of


# --- inputs ---------------------------------------------------------------------------------------------------------

SIZE = 3, 14
FILES = {"a/b.bin": b"0123456789", "empty": b"", "a/ü.txt": b"text"}


def test_an_input_is_missing_until_all_of_it_was_written(temporary):
    one, of = Machine(), digest(FILES)
    name, folder, store = one.place()
    assert name and Path(folder).parent == temporary == Path(store).parent
    asked = {of: SIZE, "0" * 32: (1, 1)}
    assert one.missing(asked) == [of, "0" * 32]
    send(one, FILES)
    assert one.missing({of: SIZE}) == [of]
    one.complete_input(of)
    assert one.missing(asked) == ["0" * 32]
    assert {name: (Path(store) / of / name).read_bytes() for name in FILES} == FILES
    other = Machine()
    assert other.missing({of: SIZE}) == [] and other.place()[1] != folder
    other.complete_input(of)  # repeated, or written by both


def test_parts_in_any_order_repeated_and_late(temporary):
    one, of, content = Machine(), digest(FILES), FILES["a/b.bin"]
    send(one, FILES)
    one.write_input(of, [("a/b.bin", 6, content[6:9]), ("a/b.bin", 0, content[:3])])
    one.complete_input(of)
    one.complete_input(of)
    one.write_input(of, [("a/b.bin", 0, content[:3])])  # an early call that was under way for long
    one.complete_input(of)
    store = Path(one.place()[2])
    assert (store / of / "a/b.bin").read_bytes() == content
    one.stop()
    assert [path.name for path in store.iterdir()] == [of]


def test_a_file_has_its_name_once_it_is_whole_and_a_late_part_does_not_harm_it(temporary):
    one = Machine()
    for _ in range(2):  # all calls are repeated
        one.feed([("a/b", 0, b"0123"), ("c", 0, b"")], ["c"], [])
        assert (one.folder / "c").read_bytes() == b"" and not list(one.folder.glob("c/*"))
        one.feed([("a/b", 4, b"45")], ["a/b"], [])
        assert (one.folder / "a/b").read_bytes() == b"012345"
    one.feed([("a/b", 4, b"45")], [], [])
    one.feed([], ["a/b"], [])
    assert (one.folder / "a/b").read_bytes() == b"012345"
    for _ in range(2):
        one.feed([], [], ["a/b", "a/none"])
        assert not (one.folder / "a/b").exists()
    with pytest.raises(FileNotFoundError):
        one.feed([], ["a/none"], [])


def test_a_file_gets_its_name_in_two_calls_at_the_same_time(temporary, monkeypatch):
    """The second one finds the name missing, and then also the file that the first one has renamed."""
    one = Machine()
    one.feed([("a/b", 0, b"01")], [], [])
    exists, looked = Path.exists, []

    def at_first_missing(path):
        looked.append(path)
        if len(looked) == 1:
            one.feed([], ["a/b"], [])
            return False
        return exists(path)

    monkeypatch.setattr(Path, "exists", at_first_missing)
    one.feed([], ["a/b"], [])
    assert (one.folder / "a/b").read_bytes() == b"01"


def test_other_content_than_was_sent_is_refused(temporary):
    one, of = Machine(), digest(FILES)
    send(one, FILES)
    one.write_input(of, [("empty", 0, b"x")])
    with pytest.raises(OSError, match="received other files than were sent"):
        one.complete_input(of)
    with pytest.raises(OSError, match="received other files than were sent"):
        one.complete_input(digest({"nothing": b"of it"}))
    assert one.missing({of: SIZE}) == [of]


def test_completing_twice_at_the_same_time_is_no_failure(temporary, monkeypatch):
    """The second call is made while the first, of which there was no answer, still reads the files."""
    one, of, reading, outcomes = Machine(), digest(FILES), threading.Event(), []
    send(one, FILES)

    def slow(files):
        reading.set()
        time.sleep(0.2)
        return digest_of(files)

    def complete():
        try:
            outcomes.append(one.complete_input(of))
        except OSError as error:
            outcomes.append(error)

    monkeypatch.setattr(machine, "digest_of", slow)
    calls = [threading.Thread(target=complete) for _ in range(2)]
    calls[0].start()
    assert reading.wait(10)
    calls[1].start()
    for call in calls:
        call.join()
    assert outcomes == [None, None] and one.missing({of: SIZE}) == []


def test_inputs_that_no_job_used_for_a_week_are_removed(temporary):
    one = Machine()
    texts = {text: {"file": text.encode()} for text in ("old", "new", "running")}
    found = {text: send(one, files) for text, files in texts.items()}
    for of in found.values():
        one.complete_input(of)
    one.stop()
    store = Path(one.place()[2])
    long_ago = time.time() - WEEK
    running = Machine()
    assert running.missing({found["running"]: (1, 7)}) == []
    for text, age in {"old": -60, "new": 60, "running": -60}.items():
        os.utime(store / found[text], (long_ago + age, long_ago + age))
    running.ask({}, [], 0)  # its job has gone on for more than a week
    other = Machine()
    assert {path.name for path in store.iterdir()} == {found["new"], found["running"]}
    assert other.missing({of: (1, len(text)) for text, of in found.items()}) == [found["old"]]


def test_what_python_writes_beside_the_code_does_not_count(temporary):
    one = Machine()
    of = send(one, FILES)
    one.complete_input(of)
    folder = Path(one.place()[2]) / of / "a" / "__pycache__"
    folder.mkdir()
    (folder / "b.cpython-311.pyc").write_bytes(b"compiled")
    assert one.missing({of: SIZE}) == []


def test_an_input_that_has_lost_a_file_is_missing_and_is_taken_again(temporary):
    one, of = Machine(), digest(FILES)
    send(one, FILES)
    one.complete_input(of)
    whole = Path(one.place()[2]) / of
    (whole / "empty").unlink()  # as what cleans a temporary folder does
    other = Machine()
    assert other.missing({of: SIZE}) == [of]
    send(other, FILES)
    other.complete_input(of)
    assert other.missing({of: SIZE}) == [] and (whole / "empty").exists()


@pytest.mark.parametrize("whose", ["another user's", "open to others", "a link"])
def test_a_store_that_others_can_write_in_is_not_used(temporary, tmp_path, monkeypatch, whose):
    uid = os.getuid() + (whose == "another user's")
    store = temporary / f"{machine.STORE}-{uid}"
    if whose == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        store.symlink_to(tmp_path / "theirs")
    else:
        store.mkdir()
        store.chmod(0o700 if whose == "another user's" else 0o770)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    with pytest.raises(PermissionError, match=f"{socket.gethostname()}: .* not a folder that only this user can open"):
        Machine()


# --- folders that are left ------------------------------------------------------------------------------------------

ACTOR = """
import sys, time, runpy
found = runpy.run_path(sys.argv[1])["Machine"]()
print(found.place()[1], flush=True)
time.sleep(60)
"""


def test_a_part_that_comes_late_leaves_nothing_after_the_end(temporary):
    one = Machine()
    of = send(one, FILES)
    one.stop()
    one.write_input(of, [("a/b.bin", 0, b"late")])
    assert [path.name for path in temporary.rglob("*")] == [Path(one.place()[2]).name]


def test_folders_of_killed_jobs_are_removed_and_those_of_living_ones_not(temporary):
    living = Machine()
    living.write_file("trial/x", 0, b"x")
    command = [sys.executable, "-S", "-c", ACTOR, machine.__file__]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)}
    ) as actor:
        killed = Path(actor.stdout.readline().strip())
        assert killed.is_dir() and killed.parent == temporary
        Machine()
        assert killed.is_dir()
        actor.kill()
    other = Machine()
    assert not killed.exists() and (living.folder / "trial" / "x").exists()
    assert other.folder.is_dir() and other.folder != living.folder


def test_a_folder_whose_actor_is_just_making_it_is_left_alone(temporary, monkeypatch):
    real, others = machine.fcntl.flock, []

    def slow(file, how):
        if not others and not how & machine.fcntl.LOCK_NB:
            others.append(None)  # another actor begins, before the first has its lock
            others[0] = Machine()
        return real(file, how)

    monkeypatch.setattr(machine.fcntl, "flock", slow)
    one = Machine()
    assert one.folder.is_dir() and others[0].folder.is_dir()
    Machine()
    assert (one.folder / ".lock").exists()


# --- the job's files ------------------------------------------------------------------------------------------------


def follow(on, patterns, known=None, here=None, offset=0):
    """Ask until there is no more, and apply the answers; what is here and known then, and what was printed."""
    known, here, printed, more = dict(known or {}), dict(here or {}), b"", True
    while more:
        answer = on.ask(known, patterns, offset + len(printed))
        for name, (version, content) in answer.changed.items():
            known[name], here[name] = version, content
        if not answer.more:
            for name in answer.removed:
                del known[name], here[name]
        printed, more = printed + answer.printed, answer.more
    return known, here, printed


def test_what_has_changed_since_is_answered_and_again_if_the_answer_was_lost(temporary):
    one = Machine()
    size = one.write_file("runs/a/x", 0, b"12")[1], one.write_file("runs/a/x", 2, b"345")[1]
    assert size == (2, 5)
    one.write_file("runs/b/x", 0, b"other")
    first = one.ask({}, ["runs/a/*"], 0)
    assert {name: content for name, (_, content) in first.changed.items()} == {"runs/a/x": b"12345"}
    assert (first.removed, first.more, first.status) == ([], False, None)
    assert one.ask({}, ["runs/a/*"], 0) == first
    known = {"runs/a/x": first.changed["runs/a/x"][0]}
    assert one.ask(known, ["runs/a/*"], 0).changed == {}
    (one.folder / "runs/a/x").unlink()
    leave(one.folder, {"runs/a/deep/y": b"new"})
    second = one.ask(known, ["runs/a/*"], 0)
    assert second.removed == ["runs/a/x"] and list(second.changed) == ["runs/a/deep/y"]
    assert one.ask(known, ["runs/a/*"], 0) == second


def test_the_version_of_a_file_that_was_sent_is_the_one_that_is_known(temporary):
    one = Machine()
    known = {"runs/x": one.write_file("runs/x", 0, b"sent")}
    assert one.ask(known, ["runs/*"], 0).changed == {}


def test_an_answer_waits_for_a_change_and_no_longer_than_it_may(worker):
    one, of = worker
    one.begin(of, 1)
    begun(one)
    known = {name: version for name, (version, _) in one.ask({}, ["*"], 0).changed.items()}
    offset = len(one.ask({}, ["none"], 0).printed)
    before = time.monotonic()
    assert one.ask(known, ["later/*"], offset, 0.2) == one.ask(known, ["later/*"], offset)
    late = threading.Timer(0.1, leave, [one.folder, {"later/x": b"1"}])
    late.start()
    answer = one.ask({}, ["later/*"], offset, 60)
    assert {name: content for name, (_, content) in answer.changed.items()} == {"later/x": b"1"}
    assert time.monotonic() - before < 30
    late.join()


def test_an_answer_has_the_files_in_order_and_no_more_than_its_size(temporary, monkeypatch):
    monkeypatch.setattr(machine, "MOST", 10)
    one = Machine()
    leave(one.folder, {"c/state": b"s" * 30, "r/a": b"a" * 6, "r/b": b"b" * 4, "r/c": b"c"})
    known, answers = {}, []
    while not answers or answers[-1].more:
        answers.append(one.ask(known, ["c/*", "r/*"], 0))
        assert answers[-1] == one.ask(known, ["c/*", "r/*"], 0)
        known |= {name: version for name, (version, _) in answers[-1].changed.items()}
    assert [list(answer.changed) for answer in answers] == [["c/state"], ["r/c", "r/b"], ["r/a"]]


def test_a_checkpoint_comes_last_and_was_looked_for_first(temporary, monkeypatch):
    """A round that ends while the files are looked at may have its metrics in the answer without its checkpoint."""
    one, looked = Machine(), []
    for path in ("r/metrics", "r/checkpoint/round-1/state", "c/own"):
        one.write_file(path, 0, b"1")
    walk = os.walk

    def ending(folder, **options):
        for place in walk(folder, **options):
            yield place
            looked.append(Path(place[0]).name)
            if looked == ["round-1"]:
                for path in ("c/own-2", "r/metrics-2", "r/checkpoint/round-2/state"):
                    one.write_file(path, 0, b"2")

    monkeypatch.setattr(os, "walk", ending)
    paths = list(one.ask({}, ["c/*", "r/*"], 0).changed)
    assert paths.index("c/own-2") < paths.index("r/metrics") < paths.index("r/checkpoint/round-1/state")
    assert "r/checkpoint/round-2/state" not in paths


def test_what_was_printed_is_answered_from_an_offset(temporary, monkeypatch):
    monkeypatch.setattr(machine, "MOST", 4)
    one = Machine()
    assert one.ask({}, [], 0).printed == b""
    (one.folder / machine.OUTPUT).write_bytes(b"0123456789")
    first = one.ask({}, [], 0)
    assert (first.printed, first.more) == (b"0123", True) and one.ask({}, [], 0) == first
    assert follow(one, [], offset=3)[2] == b"3456789"
    assert one.ask({}, [], 10).printed == b""
    assert (one.folder / machine.OUTPUT).read_bytes() == b"0123456789"


def test_links_and_files_that_are_being_written_are_left_out(temporary, tmp_path):
    one = Machine()
    leave(one.folder, {"r/x": b"x", "r/.writing-1/state": b"1", "r/.writing-2": b"2", "r/.hidden": b"h"})
    (one.folder / "r" / "link").symlink_to(one.folder / "r" / "x")
    (one.folder / "r" / "folder").symlink_to(leave(tmp_path / "far", {"y": b"y"}))
    assert set(one.ask({}, ["r/*"], 0).changed) == {"r/x", "r/.hidden"}


NAMES = st.sampled_from(["a", "b", "deep/a", "deep/er/b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), NAMES, st.binary(max_size=9)),
        st.tuples(st.just("remove"), NAMES, st.none()),
        st.tuples(st.just("print"), st.none(), st.binary(max_size=7)),
        st.tuples(st.just("ask"), st.none(), st.booleans()),
    ),
    max_size=25,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_applied_answers_give_the_files_that_are_there_whatever_is_lost(temporary, monkeypatch, steps):
    monkeypatch.setattr(machine, "MOST", 8)
    one = Machine()
    base, clock, output = one.folder / "r", 10**18, b""
    files, known, here, printed = {}, {}, {}, b""
    for kind, name, value in steps:
        if kind == "write":
            leave(base, {name: value})
            os.utime(base / name, ns=(clock, clock))
            files[f"r/{name}"], clock = value, clock + 1
        elif kind == "remove":
            files.pop(f"r/{name}", None)
            (base / name).unlink(missing_ok=True)
        elif kind == "print":
            output += value
            with (one.folder / machine.OUTPUT).open("ab") as file:
                file.write(value)
        else:  # one answer, which may be lost
            answer = one.ask(known, ["r/*"], len(printed))
            if value:
                known |= {name: version for name, (version, _) in answer.changed.items()}
                here |= {name: content for name, (_, content) in answer.changed.items()}
                printed += answer.printed
    known, here, rest = follow(one, ["r/*"], known, here, len(printed))
    assert here == files and printed + rest == output
    assert one.ask(known, ["r/*"], len(output)).changed == {}
    one.stop()


# --- the job's process ----------------------------------------------------------------------------------------------

STUB = """
import itertools, json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
facts = {"pid": os.getpid(), "parent": int(sys.argv[2]), "cwd": os.getcwd(), "path": sys.path,
         "threads": os.environ["OMP_NUM_THREADS"], "ray": "RAY_ADDRESS" in os.environ}
if (folder / "deaf").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
(folder / f"begun-{os.getpid()}").write_text(json.dumps(facts))
os.rename(folder / f"begun-{os.getpid()}", folder / f"process-{os.getpid()}")
for job in itertools.chain([0], sys.stdin) if (folder / "many").exists() else []:
    print("job", repr(job), flush=True)
    (folder / "result").mkdir()
    (folder / "result" / ".writing-1").write_text("done")
    os.rename(folder / "result" / ".writing-1", folder / "result" / "result.json")
time.sleep(0 if (folder / "short").exists() else 60)
sys.exit(7)
"""


@pytest.fixture
def worker(temporary, monkeypatch):
    """A machine whose store has a package with a stub of the process; its digest."""
    monkeypatch.setenv("RAY_ADDRESS", "here:1")
    monkeypatch.setenv("PYTHONPATH", "/libraries")
    one, none = Machine(), b""
    folders = ("tepal", "tepal/tools", "tepal/tools/cluster")
    files = {f"{folder}/__init__.py": none for folder in folders}
    of = send(one, {**files, "tepal/tools/cluster/process.py": STUB.encode()}, size=10**4)
    one.complete_input(of)
    yield one, of
    one.stop()


def begun(one):
    """Facts of the one process that was begun."""
    until = time.monotonic() + 20
    while not (found := list(one.folder.glob("process-*"))) and time.monotonic() < until:
        time.sleep(0.02)
    (only,) = found
    return json.loads(only.read_text())


def ended(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_begin_starts_one_process_with_the_code_that_was_sent(worker):
    one, of = worker
    one.begin(of, 3)
    one.begin(of, 3)
    facts = begun(one)
    assert facts["threads"] == "3" and not facts["ray"] and facts["cwd"] == str(one.folder)
    assert facts["path"][:2] == [f"{one.place()[2]}/{of}", "/libraries"] and facts["parent"] == os.getpid()
    answer = one.ask({}, [], 0)
    assert (answer.printed, answer.status) == (b"begun\n", None)
    one.stop()
    assert ended(facts["pid"]) and not one.folder.exists()
    one.stop()


def test_the_exit_status_is_answered_also_again(worker):
    one, of = worker
    (one.folder / "short").touch()
    one.begin(of, 1)
    pid = begun(one)["pid"]
    one._process.wait()
    assert [one.ask({}, [], 0).status for _ in range(2)] == [7, 7]
    one.begin(of, 1)
    assert begun(one)["pid"] == pid, "none is begun again"


def when_done(one, known=(), offset=0):
    """The answer once the process has ended its job, or itself."""
    until = time.monotonic() + 20
    while (answer := one.ask(dict(known), ["runs/*"], offset)).status is None and time.monotonic() < until:
        time.sleep(0.02)
    return answer


def test_a_machine_has_its_next_job_in_the_same_process_and_an_empty_folder(worker):
    one, of = worker
    assert not one.renew(), "there is no process"
    leave(one.folder, {"many": b"", "runs/a/x": b"first"})
    one.begin(of, 1)
    pid = begun(one)["pid"]
    first = when_done(one)
    assert first.status == 0 and first.printed == b"begun\njob 0\n" and list(first.changed) == ["runs/a/x"]
    assert one.ask({}, ["runs/*"], 0) == first
    assert one.renew() and sorted(path.name for path in one.folder.iterdir()) == [".lock", "output.log"]
    assert not one.renew(), "its process waits already"
    known = {"runs/x": one.write_file("runs/x", 0, b"second")}
    assert one.ask(known, ["runs/*"], 0) == machine.Answer(removed=[])
    one.begin(of, 1)
    one.begin(of, 1)  # its answer was lost
    second = when_done(one, known)
    assert second == machine.Answer(removed=[], printed=rb"job '\n'" + b"\n", status=0) and one._process.pid == pid
    one.stop()
    assert ended(pid) and not one.folder.exists()


def test_a_process_that_could_not_be_started_is_started_when_that_is_asked_again(worker, monkeypatch):
    one, of = worker

    def fails(*_arguments, **_options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched, pytest.raises(BlockingIOError):
        patched.setattr(machine.subprocess, "Popen", fails)
        one.begin(of, 1)
    one.begin(of, 1)
    assert begun(one)["pid"] == one._process.pid


@pytest.mark.parametrize("way", ["at work", "ended"])
def test_a_machine_whose_process_cannot_do_another_job_has_none(worker, way):
    one, of = worker
    if way == "ended":
        (one.folder / "short").touch()
    one.begin(of, 1)
    begun(one)
    if way == "ended":
        one._process.wait()
        leave(one.folder, {"result/result.json": b"{}"})
    assert not one.renew() and list(one.folder.glob("process-*"))


@pytest.mark.parametrize("deaf", [False, True])
def test_stop_ends_the_process_also_one_that_ignores_it(worker, monkeypatch, deaf):
    monkeypatch.setattr(machine, "_GRACE", 0.3 if deaf else 30)
    one, of = worker
    if deaf:
        (one.folder / "deaf").touch()
    one.begin(of, 1)
    pid = begun(one)["pid"]
    before = time.monotonic()
    one.stop()
    assert time.monotonic() - before < 10 and ended(pid) and not one.folder.exists()
    assert one._process.returncode == (-signal.SIGKILL if deaf else -signal.SIGTERM)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["x", "a/x", "a/b/x", "a/b/y", "a-1/x"]),
        ("a/*", ["a/x", "a/b/x", "a/b/y"]),
        ("a/b/x", ["a/b/x"]),
        ("a/x", ["a/x"]),
        ("a-*/x", ["a-1/x"]),
        ("*/b/*", ["a/b/x", "a/b/y"]),
        ("none/*", []),
        ("none", []),
    ],
)
def test_files_of_a_pattern(tmp_path, pattern, found):
    base = leave(tmp_path / "base", dict.fromkeys(["x", "a/x", "a/b/x", "a/b/y", "a-1/x"], b""))
    given = dict(matching(base, pattern))
    assert sorted(given) == sorted(found) and all(path == base / name for name, path in given.items())
    assert list(given) == list(dict(matching(base, pattern)))


def test_files_below_a_folder_with_those_behind_links(tmp_path):
    base = leave(tmp_path / "base", {"a/x": b"1", "y": b"2"})
    far = leave(tmp_path / "far", {"z": b"3"})
    (base / "link").symlink_to(far)
    (base / "one").symlink_to(far / "z")
    (base / "broken").symlink_to(far / "none")
    files = {"a/x": b"1", "y": b"2", "link/z": b"3", "one": b"3"}
    found = files_below(base)
    assert {name: path.read_bytes() for name, path in found.items()} == files
    assert digest_of(found) == digest(files) == digest_of(files_below(leave(tmp_path / "same", files)))


@given(st.dictionaries(st.text("ab/.", min_size=1, max_size=3).filter(lambda name: name.strip("./")), st.binary()))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_digests_differ_with_names_and_contents(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("files")
    paths = {}
    for number, (name, content) in enumerate(files.items()):
        (folder / str(number)).write_bytes(content)
        paths[name] = folder / str(number)
    assert digest_of(paths) == digest(files)
    for name in files:
        renamed = {f"{name}+" if each == name else each: path for each, path in paths.items()}
        assert digest_of(renamed) != digest(files)


def test_versions_are_named_and_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(machine, "version", lambda package: "1.0" if package != "ray" else raise_missing(package))
    found = versions()
    assert found.pop("python") == ".".join(map(str, sys.version_info[:3])) and found.pop("ray") == "missing"
    needed = {"flwr", "numpy", "pydantic", "safetensors", "scikit-learn", "torch"}
    some_need = {"flwr-datasets", "torchvision", "transformers"}
    assert found == dict.fromkeys(needed | some_need, "1.0")


def raise_missing(package):
    raise machine.PackageNotFoundError(package)
