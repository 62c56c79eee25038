"""Personal state: it goes forward exactly with the replies that the server merged, and back with the server.

The app of these tests counts: it loads its counter, adds one, saves it, and trains nothing.
"""

import errno
import os
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal.exchange import Encoding, partial_exchange, received
from tepal.exchange import personal as personal_module
from tepal.exchange.encodings import Wire
from tepal.exchange.files import SUFFIX
from tepal.exchange.header import Header
from tepal.exchange.manifest import RECORD
from tepal.exchange.personal import PersonalState
from tepal.exchange.plan import Plan
from tepal.exchange.upload import encoded
from tepal.strategies import FedAvg, RoundFailed
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds import ledger, past
from tepal.strategies.rounds.checkpoint import FACTS, STATE, Checkpoints

START = ArrayRecord({"w": Array(np.zeros(2, np.float32))})


def state_of(folder, exchange, *, current="", keep=(), round=1, **options):
    return PersonalState(folder, current=current, keep=keep, exchange=exchange, round=round, **options)


def versions_in(folder):
    return sorted(path.name.removesuffix(SUFFIX).partition("-")[2] for path in folder.glob(f"*{SUFFIX}"))


def no_room(*args, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("simulated", [False, True])
def test_the_disk_is_waited_for_unless_the_client_is_simulated(tmp_path, monkeypatch, simulated):
    waited = []
    monkeypatch.setattr(os, "fsync", lambda handle: waited.append(os.readlink(f"/proc/self/fd/{handle}")))
    made = ClientApp(mods=[partial_exchange])

    @made.train()
    def train(msg, context):
        received(msg).personal.save({"own": np.ones(2)})
        content = {"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    nodes = [Node(made, {"name": f"c{k}", "cache-path": str(tmp_path)}) for k in range(2)]
    grid = InProcessGrid(nodes, spoil=None if simulated else lambda node, message, reply: reply)
    FedAvg(min_available_nodes=2, fraction_evaluate=0).start(grid, START, num_rounds=1)
    folders = [path.parent for path in tmp_path.rglob(f"*{SUFFIX}") if path.parent.parent.name == "personal"]
    assert len(folders) == 2
    assert [any(str(folder) in name for name in waited) for folder in folders] == [not simulated] * 2


def test_what_was_saved_counts_once_the_server_says_so(tmp_path):
    values = {"model": np.arange(6.0).reshape(2, 3).T, "step": np.array(3)}
    first = state_of(tmp_path, "a")
    assert first.load() == {} and not first.lost
    first.save(values)
    assert first.load() == {} and versions_in(tmp_path) == [], "nothing is written while the app may still fail"
    first.commit()
    for current, found in (("", {}), ("a", values)):
        now = state_of(tmp_path, "b", current=current, round=2)
        assert {name: array.tobytes() for name, array in now.load().items()} == {
            name: array.tobytes() for name, array in found.items()
        }
        assert not now.lost
    with pytest.raises(ValueError, match="read-only"):
        now.load()["step"][...] = 4


def test_the_last_of_several_savings_counts_and_without_one_the_version_goes_on(tmp_path):
    state = state_of(tmp_path, "a")
    for number in (1, 2, 3):
        state.save({"n": np.array(number)})
    state.commit()
    state_of(tmp_path, "b", current="a").commit()
    assert versions_in(tmp_path) == ["a", "b"]
    for current in "ab":
        assert state_of(tmp_path, "c", current=current).load()["n"] == 3
    state_of(tmp_path, "d", current="gone").commit()
    state_of(tmp_path, "e", current="a", advances=False).commit()
    assert versions_in(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("links", [True, False])
def test_a_version_that_goes_on_does_not_replace_that_of_an_earlier_answer(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", no_room)
    first = state_of(tmp_path, "a")
    first.save({"n": np.array(1)})
    first.commit()
    state_of(tmp_path, "b", current="a").commit()
    for exchange in "ab":
        assert state_of(tmp_path, "c", current=exchange).load()["n"] == 1
    again = state_of(tmp_path, "b", current="a")
    again.save({"n": np.array(2)})
    again.commit()
    assert state_of(tmp_path, "c", current="a").load()["n"] == 1, "the link is replaced, not what it links to"
    if links:
        state_of(tmp_path, "b", current="a").commit()
        assert state_of(tmp_path, "c", current="b").load()["n"] == 2


def test_without_room_the_own_arrays_stay_and_what_was_left_out_is_not_sent_twice(tmp_path, monkeypatch):
    first = state_of(tmp_path, "a")
    first.save({"n": np.array(1)})
    first.save_left_out({"w": np.array(0.5)})
    first.commit()
    monkeypatch.setattr(personal_module, "write_arrays", no_room)
    for before, exchange in pairwise("abc"):
        state = state_of(tmp_path, exchange, current=before, round=2)
        assert state.load_left_out() == ({"w": 0.5} if before == "a" else {})
        state.save_left_out({"w": np.array(0.25)})
        state.commit()
        (note,) = state.notes
        assert "not added to the next one" in note and "No space left" in note
        assert state_of(tmp_path, "x", current=exchange).load() == {"n": 1}
    assert state_of(tmp_path, "x", current="a").load_left_out() == {"w": 0.5}, "the server may restore it"
    state_of(tmp_path, "d", current="c", round=3).commit()
    assert state_of(tmp_path, "x", current="d").load_left_out() == {}
    state_of(tmp_path, "e", current="d", round=3).prune()
    assert [path.name for path in tmp_path.iterdir()] == [f"000003-sent-d{SUFFIX}"]
    own = state_of(tmp_path, "e", current="d", round=4)
    own.save({"n": np.array(2)})
    with pytest.raises(OSError, match="No space left"):
        own.commit()


@pytest.mark.parametrize("kept", [False, True])
def test_an_upload_that_adds_nothing_writes_its_residual_only_if_there_is_one(tmp_path, kept):
    """With `unbiased` an upload keeps nothing. The version before it goes on, as a link to the same file."""
    first = state_of(tmp_path, "a")
    first.save({"own": np.ones(2)})
    if kept:
        first.save_left_out({"model/w": np.ones((3, 4), np.float32)})
    first.commit()
    state = state_of(tmp_path, "b", current="a")
    values = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    plan = Plan(client="c", round=2, needs={"model": ("w",)}, trains=("w",), returns={"model": ("w",)})
    encoded(plan, Wire("auto", feedback=True, unbiased=True, left_out=0.5), {"model": dict(values)}, {}, state)
    state.commit()
    assert (len({path.stat().st_ino for path in tmp_path.glob(f"*{SUFFIX}")}) == 1) == (not kept)
    after = state_of(tmp_path, "c", current="b")
    assert [*after.load_left_out()] == ["model/w"] * kept and after.load()["own"].tolist() == [1, 1]


def test_uploads_that_keep_nothing_are_not_told_as_a_lost_state(tmp_path):
    """An upload may keep nothing (`unbiased`, or one without arrays), and the server counts each as a version."""
    values = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    notes = []
    for number, (before, exchange) in enumerate(pairwise(["", *"abcde"]), 1):
        state = state_of(tmp_path, exchange, current=before, round=number)
        wire = Wire("auto", feedback=True, unbiased=number < 4, left_out=0.5)
        returned = dict(values) if number > 1 else {}
        plan = Plan(client="c", round=number, needs={}, trains=(*returned,), returns={"model": (*returned,)})
        encoded(plan, wire, {"model": returned} if returned else {}, {}, state)
        state.commit()
        notes += state.notes
        assert [*state_of(tmp_path, "x", current=exchange).load_left_out()] == ["model/w"] * (number >= 4)
    assert notes == []
    scored = state_of(tmp_path / "other", "a", advances=False)
    encoded(plan, wire, {}, {}, scored)
    scored.commit()
    assert versions_in(tmp_path / "other") == []


def test_nothing_may_be_saved_as_well(tmp_path):
    """A codec may have no residual left."""
    state = state_of(tmp_path, "a")
    state.save({})
    state.commit()
    again = state_of(tmp_path, "b", current="a")
    assert again.load() == {} and not again.lost


def test_it_does_not_advance_where_a_model_is_scored(tmp_path):
    state = state_of(tmp_path, "a", advances=False)
    with pytest.raises(RuntimeError, match="not while a model is scored"):
        state.save({"n": np.array(1)})
    state.commit()
    assert versions_in(tmp_path) == []


def test_what_nobody_will_ask_for_is_removed(tmp_path):
    for number, exchange in enumerate("abcdef", 1):
        state = state_of(tmp_path, exchange, round=number)
        state.save({"n": np.array(number)})
        state.commit()
    (tmp_path / "notes.txt").write_text("mine")
    state_of(tmp_path, "x", current="d", keep=("b", "gone"), round=5).prune()
    assert versions_in(tmp_path) == ["b", "d", "f"], "f is of a later round than this message"
    assert (tmp_path / "notes.txt").exists()
    state_of(tmp_path / "no" / "folder", "x").prune()


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped"])
def test_one_that_is_lost_or_damaged_begins_anew_and_says_why(tmp_path, harm, caplog):
    state = state_of(tmp_path, "a")
    state.save({"n": np.arange(5)})
    state.commit()
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if harm == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    now = state_of(tmp_path, "b", current="a", round=2)
    assert now.load() == {}
    assert "starts from the beginning" in now.lost and "cannot be used" in caplog.text


# ---- through the mod and a strategy ----------------------------------------------------------------------------------


@dataclass
class Asked:
    """One training message as an app saw it: what its counter was."""

    client: str
    round: int
    count: int


def counting_app(seen, raises=lambda client: False):
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        mine, client = received(msg).personal, received(msg).plan.client
        count = mine.load().get("count", np.zeros((2, 1), np.int64))
        assert count[0] == count[1]
        seen.append(Asked(client, msg.content["config"]["server-round"], int(count[0, 0])))
        mine.save({"count": count + 1})
        if raises(client):
            raise RuntimeError("out of memory")
        content = {"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    return app


def grid_of(app, names, **options):
    return InProcessGrid([Node(app, {}, name=name) for name in names], **options)


def run(grid, rounds, timeout=60.0, **options):
    history = []
    strategy = FedAvg(**{"fraction_evaluate": 0, "on_round": history.append, **options})
    strategy.start(grid, START, num_rounds=rounds, timeout=timeout)
    return history


def counts(seen, client):
    return [asked.count for asked in seen if asked.client == client]


def harm_of(kind):
    """(message, reply) → what comes in place of the reply."""

    def harm(message, reply):
        if kind == "lost":
            return None
        if kind == "error":
            return Message(Error(4, "the reply has expired"), reply_to=message)
        if kind == "refused":
            header = replace(Header.from_content(reply.content), round=99)
            reply.content[RECORD] = header.with_checksum(reply.content).to_record()
        if kind == "altered":
            reply.content["metrics"]["num-examples"] = 1000
        return reply

    return harm


def spoiling(client, nth, kind):
    """Spoils the `nth` training reply of a client, counted from 1."""
    trained = Counter()

    def spoil(node, message, reply):
        if reply.has_content() and Header.from_content(reply.content).action == "train":
            trained[node.name] += 1
            if (node.name, trained[node.name]) == (client, nth):
                return harm_of(kind)(message, reply)
        return reply

    return spoil


@pytest.mark.parametrize("kind", ["lost", "error", "refused", "altered"])
def test_it_stays_as_it_was_when_the_reply_was_not_merged(kind):
    seen = []
    grid = grid_of(counting_app(seen), ["a", "b"], spoil=spoiling("b", 2, kind))
    history = run(grid, 4, timeout=2 if kind == "lost" else 60)
    assert [report.replied for report in history] == [["a", "b"], ["a"], ["a", "b"], ["a", "b"]]
    assert counts(seen, "a") == [0, 1, 2, 3]
    assert counts(seen, "b") == [0, 1, 1, 2]


def test_it_stays_as_it_was_when_the_app_raised_after_saving_it():
    seen, calls = [], Counter()

    def raises(client):
        calls[client] += 1
        return (client, calls[client]) == ("b", 2)

    history = run(grid_of(counting_app(seen, raises), ["a", "b"]), 4)
    assert [client for client, _ in history[1].lost] == ["b"]
    assert counts(seen, "b") == [0, 1, 1, 2]


def test_a_round_that_is_repeated_counts_once():
    seen = []
    grid = grid_of(counting_app(seen), ["a", "b"], spoil=spoiling("b", 2, "error"))
    history = run(grid, 3, min_replies=2)
    assert [sorted(report.replied) for report in history] == [["a", "b"]] * 3
    for client in "ab":
        assert [(asked.round, asked.count) for asked in seen if asked.client == client] == [
            (1, 0), (2, 1), (2, 1), (3, 2),
        ]  # fmt: skip


def test_a_reply_beyond_those_that_the_round_takes_does_not_count():
    seen = []
    history = run(grid_of(counting_app(seen), ["a", "b", "c"]), 6, max_replies=2)
    merged = Counter()
    for report in history:
        assert len(report.replied) == 2
        for asked in seen:
            if asked.round == report.round:
                assert asked.count == merged[asked.client]
        merged.update(report.replied)


def test_it_follows_a_registered_name_to_the_node_that_has_it_now():
    seen = []
    app = counting_app(seen)
    grid = grid_of(app, ["a", "b"])

    def restart(report):
        if report.round == 2:
            grid.remove(2)
            grid.add(Node(app, {}, name="b"))
        if report.round == 4:
            grid.add(Node(app, {}, name="b"))  # the old node still counts as connected

    run(grid, 6, on_round=restart)
    assert counts(seen, "b") == [0, 1, 2, 3, 4, 5]


def test_two_clients_on_one_machine_do_not_mix():
    seen = []
    names = ["site 1", "site%201", "site/1", "../site 1", "Site 1", "."]
    grid = grid_of(counting_app(seen), names, spoil=spoiling("site 1", 1, "error"))
    run(grid, 3)
    assert counts(seen, "site 1") == [0, 0, 1]
    for name in names[1:]:
        assert counts(seen, name) == [0, 1, 2]


def test_two_experiments_do_not_mix():
    seen = []
    app = counting_app(seen)
    run(grid_of(app, ["a", "b"]), 2)
    run(grid_of(app, ["a", "b"]), 2)
    assert counts(seen, "a") == [0, 1, 0, 1]


def test_that_of_a_run_that_ended_long_ago_is_removed_when_the_client_begins_another(cache_folder):
    app = counting_app([])
    for _ in range(3):
        run(grid_of(app, ["a", "b"]), 1)
    ended, young, mine = cache_folder.glob("*/personal/a")
    (mine / "notes.txt").write_text("mine")
    (stays,) = ended.parent.glob("b")
    for folder, days in ((ended, 31), (mine, 31), (young, 29)):
        for path in (*folder.iterdir(), folder):
            os.utime(path, times=(time.time() - 86_400 * days,) * 2)
    found = list(mine.glob(f"*{SUFFIX}"))
    run(grid_of(app, ["a", "c"]), 1)
    assert not ended.exists() and list(stays.iterdir()), "that of another client stays"
    assert list(young.iterdir())
    assert found and [path.name for path in mine.iterdir()] == ["notes.txt"], "only files of this project are removed"


def test_a_run_that_is_resumed_after_long_keeps_its_own(tmp_path, cache_folder):
    seen = []
    app = counting_app(seen)
    run(grid_of(app, ["a", "b"]), 1, checkpoints=tmp_path / "c")
    for folder in cache_folder.glob("*/personal/a"):
        os.utime(folder, times=(0, 0))
    run(grid_of(app, ["a", "b"]), 2, checkpoints=tmp_path / "c", resume=True)
    assert counts(seen, "a") == [0, 1]


def test_it_may_be_read_and_not_saved_where_a_model_is_scored():
    seen, read = [], []
    app = counting_app(seen)

    @app.evaluate()
    def evaluate(msg, context):
        mine = received(msg).personal
        read.append(int(mine.load()["count"][0, 0]))
        if received(msg).plan.client == "b":
            mine.save({"count": np.zeros((2, 1), np.int64)})
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    history = run(grid_of(app, ["a", "b"]), 2, fraction_evaluate=1.0)
    assert read == [1, 1, 2, 2]
    for report in history:
        ((client, reason),) = report.lost
        assert client == "b" and "RuntimeError: personal state can be saved in training" in reason
    assert counts(seen, "b") == [0, 1]


@pytest.mark.parametrize("harm", ["gone", "damaged", "folder gone"])
def test_one_that_is_lost_begins_anew_and_the_servers_report_says_so(cache_folder, harm):
    seen, history = [], []

    def lose(report):
        history.append(report)
        if report.round == 2:
            for path in cache_folder.glob(f"*/personal/b/*{SUFFIX}"):
                path.write_bytes(path.read_bytes()[:-1] + b"!") if harm == "damaged" else path.unlink()
            if harm == "folder gone":
                (path.parent).rmdir()

    run(grid_of(counting_app(seen), ["a", "b"]), 4, on_round=lose)
    assert counts(seen, "a") == [0, 1, 2, 3] and counts(seen, "b") == [0, 1, 0, 1]
    assert [len(report.notes) for report in history] == [0, 0, 1, 0]
    ((client, note),) = history[2].notes
    assert client == "b" and "personal state is lost and starts from the beginning" in note


def test_a_reply_whose_personal_state_could_not_be_written_is_refused_and_not_merged(cache_folder):
    seen, history = [], []

    def block(report):
        history.append(report)
        folder = next(cache_folder.glob("*/personal")) / "b"
        if report.round == 1:
            folder.rename(folder.with_name("aside"))
            folder.write_text("a file where a folder should be")
        if report.round == 2:
            folder.unlink()
            folder.with_name("aside").rename(folder)

    run(grid_of(counting_app(seen), ["a", "b"]), 4, on_round=block)
    assert [sorted(report.replied) for report in history] == [["a", "b"], ["a"], ["a", "b"], ["a", "b"]]
    ((client, reason),) = history[1].refused
    assert client == "b" and "its personal state could not be written to" in reason and "personal/b" in reason
    assert "b" in history[1].refused_by_client
    assert counts(seen, "b") == [0, 0, 1, 2], "and it goes on from the last one that the server counts"


@pytest.mark.parametrize("up", ["float32", "int8"])
@pytest.mark.parametrize("saved_in", [1, 3])
def test_what_is_saved_once_stays(up, saved_in):
    """Every merged exchange makes the current version, also one in which the app saves nothing."""
    seen, history = [], []
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        content = received(msg)
        seen.append((content.personal.load(), content.personal.lost))
        if content.plan.round == saved_in:
            content.personal.save({"own": np.array(7)})
        return Message(
            RecordDict({"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg
        )

    start = ArrayRecord({"w": Array(np.zeros((2, 2), np.float32))})
    strategy = FedAvg(min_available_nodes=2, fraction_evaluate=0, encoding=Encoding(up=up), on_round=history.append)
    strategy.start(grid_of(app, ["a", "b"]), start, num_rounds=4)
    assert seen == 2 * saved_in * [({}, "")] + 2 * (4 - saved_in) * [({"own": 7}, "")]
    assert not any(report.notes for report in history)


@pytest.mark.parametrize("full_in", [1, 2])
def test_a_client_with_a_full_disk_takes_part_without_error_feedback(monkeypatch, full_in):
    write, history = personal_module.write_arrays, []

    def full(path, *args, **options):
        if path.parent.name == "b" and full_in <= len(history) + 1 <= 3:
            no_room()
        return write(path, *args, **options)

    monkeypatch.setattr(personal_module, "write_arrays", full)
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        moved = msg.content["arrays"].to_numpy_ndarrays()[0] + np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
        content = {"arrays": ArrayRecord({"w": Array(moved)}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    start = ArrayRecord({"w": Array(np.zeros((3, 4), np.float32))})
    strategy = FedAvg(min_available_nodes=2, fraction_evaluate=0, encoding=Encoding(up="int4"), on_round=history.append)
    strategy.start(grid_of(app, ["a", "b"]), start, num_rounds=5)
    assert [sorted(report.replied) for report in history] == 5 * [["a", "b"]]
    noted = [[note for _, note in report.notes] for report in history]
    for number, notes in enumerate(noted, 1):
        if full_in <= number <= 3:
            assert len(notes) == 1 and "No space left on device" in notes[0], "and nothing is told as a loss"
    assert [len(notes) for notes in noted] == [int(full_in <= n <= 4) for n in range(1, 6)]
    assert "starts from the beginning" in noted[3][0], "once, when there is room again"


# ---- a run that is resumed -------------------------------------------------------------------------------------------


def test_it_goes_on_where_a_resumed_run_goes_on(tmp_path):
    seen = []
    app = counting_app(seen)
    run(grid_of(app, ["a", "b"]), 2, checkpoints=tmp_path / "c")
    run(grid_of(app, ["a", "b"]), 5, checkpoints=tmp_path / "c", resume=True)
    assert [(asked.round, asked.count) for asked in seen if asked.client == "b"] == [(k + 1, k) for k in range(5)]


@pytest.mark.parametrize("harm", ["deleted", STATE, FACTS])
@pytest.mark.parametrize("back", [1, 2])
def test_it_goes_back_with_the_server(tmp_path, harm, back):
    seen = []
    app = counting_app(seen)
    folder = tmp_path / "c"
    run(grid_of(app, ["a", "b"]), 4, checkpoints=Checkpoints(folder, keep=3))
    for number in (4, 3)[:back]:
        newest = folder / f"round-{number:06d}"
        if harm == "deleted":
            shutil.rmtree(newest)
        else:
            (newest / harm).write_bytes((newest / harm).read_bytes()[:-2])
    seen.clear()
    history = run(grid_of(app, ["a", "b"]), 6, checkpoints=Checkpoints(folder, keep=3), resume=True)
    expected = [(k + 1, k) for k in range(4 - back, 6)]
    for client in "ab":
        assert [(asked.round, asked.count) for asked in seen if asked.client == client] == expected
    assert not any(report.notes for report in history)


def test_a_resumed_run_may_go_back_further_than_where_it_was_resumed(tmp_path):
    seen = []
    app = counting_app(seen)
    checkpoints = Checkpoints(tmp_path, keep=3)
    run(grid_of(app, ["a", "b"]), 3, checkpoints=checkpoints)
    run(grid_of(app, ["a", "b"]), 4, checkpoints=checkpoints, resume=True)
    for number in (3, 4):
        shutil.rmtree(tmp_path / f"round-{number:06d}")
    seen.clear()
    run(grid_of(app, ["a", "b"]), 3, checkpoints=checkpoints, resume=True)
    assert [(asked.client, asked.round, asked.count) for asked in seen] == [("a", 3, 2), ("b", 3, 2)]


def test_versions_do_not_pile_up(tmp_path, cache_folder):
    seen, most = [], Counter()
    trained = Counter()

    def spoil(node, message, reply):
        if reply.has_content() and Header.from_content(reply.content).action == "train":
            trained[node.name] += 1
            if node.name == "b" and trained[node.name] % 2:
                return harm_of("error")(message, reply)
        return reply

    def count(report):
        for folder in cache_folder.glob("*/personal/*"):
            most[folder.name] = max(most[folder.name], len(list(folder.iterdir())))

    for keep in (1, 3):
        most.clear()
        trained.clear()
        checkpoints = Checkpoints(tmp_path / str(keep), keep=keep)
        run(grid_of(counting_app(seen), ["a", "b"], spoil=spoil), 12, checkpoints=checkpoints, on_round=count)
        assert 2 <= most["a"] <= keep + 2 and 2 <= most["b"] <= keep + 2
        shutil.rmtree(cache_folder)


# ---- any course of events --------------------------------------------------------------------------------------------

CLIENTS, KEEP, ENOUGH = ("a", "b", "c"), 3, 2

replies = st.lists(st.sampled_from(["good", "good", "good", "error", "refused", "altered", "raises"]), max_size=10)
events = st.lists(
    st.one_of(
        st.just("nothing"),
        st.sampled_from(["killed before it is saved", "killed", "newest damaged", "newest deleted", "two deleted"]),
        st.tuples(st.sampled_from(["restarts", "loses all"]), st.sampled_from(CLIENTS)),
    ),
    min_size=1,
    max_size=8,
)
GO_BACK = {"newest damaged": 1, "newest deleted": 1, "two deleted": 2}
"""Event → how many checkpoints it costs; the server dies with them."""


def what_must_hold(script, course):
    """The reference: client → what its counter must be at each message; and who is merged in each finished round.

    A counter is a number that grows by one for a merged reply, and that is as it was when the server goes back.
    """
    script = {client: iter(kinds) for client, kinds in script.items()}
    count, saved = Counter(), []
    seen, merged = {client: [] for client in CLIENTS}, []
    for event in course:
        good = []
        while len(good) < ENOUGH:
            good = []
            for client in CLIENTS:
                seen[client].append(count[client])
                if next(script[client], "good") == "good":
                    good.append(client)
        merged.append(good)
        count.update(good)
        if event != "killed before it is saved":
            saved = [*saved, Counter(count)][-KEEP:]
        saved = saved[: max(0, len(saved) - GO_BACK.get(event, 0))]
        if event in ("killed before it is saved", "killed", *GO_BACK):
            count = Counter(saved[-1]) if saved else Counter()
        if event[0] == "loses all":
            for one in (count, *saved):
                one[event[1]] = 0
    return seen, merged


class Killed(BaseException):
    """The server dies: nothing catches this."""


class Stage:
    """Plays a course of events with a real strategy: one event after each round that is finished."""

    def __init__(self, script, course, folder, cache):
        self.script = {client: iter(kinds) for client, kinds in script.items()}
        self.course = list(course)
        self.checkpoints, self.cache = folder, cache
        self.seen, self.merged = [], []
        self.kind = {}
        self.app = counting_app(self.seen, self.raises)
        self.grid = InProcessGrid([self.node(name) for name in CLIENTS], spoil=self.spoil)

    def node(self, name):
        return Node(self.app, {"cache-path": str(self.cache)}, name=name)

    def raises(self, client):
        self.kind[client] = next(self.script[client], "good")
        return self.kind[client] == "raises"

    def spoil(self, node, message, reply):
        if reply.has_error() or Header.from_content(reply.content).action != "train":
            return reply
        return harm_of(self.kind[node.name])(message, reply)

    def play(self):
        while self.course:
            strategy = FedAvg(
                fraction_evaluate=0,
                min_available_nodes=len(CLIENTS),
                min_replies=ENOUGH,
                checkpoints=Dying(self),
                resume=True,
                on_round=self.after,
            )
            try:
                strategy.start(self.grid, START, num_rounds=1000)
            except (Killed, RoundFailed):
                continue
            raise AssertionError("a run ended before its course of events")

    def after(self, report):
        for folder in self.cache.glob("*/personal/*"):
            assert len(list(folder.iterdir())) <= KEEP + 2
        if len(report.replied) < ENOUGH:
            return  # the round failed; the run ends
        self.merged.append(sorted(report.replied))
        event = self.course[0]
        if event[0] == "restarts":
            (node_id,) = [number for number, node in self.grid.nodes.items() if node.name == event[1]]
            self.grid.remove(node_id)
            self.grid.add(self.node(event[1]))
        if event[0] == "loses all":
            for path in self.cache.glob(f"*/personal/{event[1]}/*"):
                path.unlink()
        if event == "killed before it is saved":
            self.course.pop(0)
            raise Killed


class Dying(Checkpoints):
    """Checkpoints of a server that dies when the course of events says so."""

    def __init__(self, stage):
        super().__init__(stage.checkpoints, keep=KEEP)
        self.stage = stage

    def save(self, checkpoint):
        super().save(checkpoint)
        event = self.stage.course.pop(0)
        for number in self.rounds()[::-1][: GO_BACK.get(event, 0)]:
            newest = self.folder / f"round-{number:06d}"
            if event == "newest damaged":
                (newest / STATE).write_bytes((newest / STATE).read_bytes()[:-1])
            else:
                shutil.rmtree(newest)
        if event == "killed" or event in GO_BACK or not self.stage.course:
            raise Killed


@settings(max_examples=50)
@given(script=st.fixed_dictionaries({client: replies for client in CLIENTS}), course=events)
def test_whatever_happens_it_goes_forward_with_merged_replies_and_back_with_the_server(script, course):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as root:
        patch.setattr(ledger, "FAILURES", 10**9)  # who is left out after three failures is another matter
        patch.setattr(past, "_ROLLBACKS", 0)  # and so is the return to an earlier model when all clients fail
        patch.setattr(os, "fsync", lambda handle: None)  # nobody pulls the plug
        stage = Stage(script, course, Path(root) / "checkpoints", Path(root) / "cache")
        stage.play()
    seen, merged = what_must_hold(script, course)
    assert stage.merged == merged
    assert {client: counts(stage.seen, client) for client in CLIENTS} == seen
