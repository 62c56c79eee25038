"""The grid whose clients are in this process: the order of replies, slow clients, and messages without checksums."""

import threading
import time

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange.header import Header
from tepal.exchange.local import is_local
from tepal.exchange.manifest import RECORD
from tepal.strategies import FedAvg, in_process
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.inbox import Inbox
from tests.unit.strategies.rounds.test_round import grid_of as rounds_grid
from tests.unit.strategies.rounds.test_round import start


def grid_of(answers, **options):
    """A grid with a client for each function, which is called before the client answers."""

    def node(number, function):
        app = ClientApp()

        @app.train()
        def train(msg, context):
            function()
            return Message(RecordDict({"metrics": MetricRecord({"number": number})}), reply_to=msg)

        return Node(app, {})

    return InProcessGrid([node(k, function) for k, function in enumerate(answers)], **options)


def sent(grid):
    messages = [Message(RecordDict({"config": ConfigRecord({})}), node, "train") for node in grid.get_node_ids()]
    return dict.fromkeys(grid.push_messages(messages))


def number_of(came):
    return came[1].content["metrics"]["number"]


def test_replies_come_in_the_order_of_the_messages():
    second_has_answered = threading.Event()
    with grid_of([lambda: second_has_answered.wait(0.5), second_has_answered.set, lambda: None], at_once=2) as grid:
        waiting, numbers = sent(grid), []
        while waiting:
            came = grid.pull_next(waiting, 5)
            del waiting[came[0]]
            numbers.append(number_of(came))
    assert numbers == [0, 1, 2]


def test_a_client_that_takes_long_keeps_no_other_reply_waiting(monkeypatch):
    monkeypatch.setattr(in_process, "_LONG", 0.05)
    may_answer = threading.Event()
    with grid_of([lambda: may_answer.wait(60), lambda: None, lambda: None], at_once=2) as grid:
        waiting, numbers = sent(grid), []
        for _ in range(2):
            came = grid.pull_next(waiting, 30)
            del waiting[came[0]]
            numbers.append(number_of(came))
        assert numbers == [1, 2]
        begun = time.monotonic()
        assert grid.pull_next(waiting, 0.2) is None and time.monotonic() - begun >= 0.2
        may_answer.set()
        assert number_of(grid.pull_next(waiting, 30)) == 0


def test_a_slow_client_is_waited_for_once_and_not_at_every_reply(monkeypatch):
    monkeypatch.setattr(in_process, "_LONG", 0.3)
    may_answer = threading.Event()
    with grid_of([lambda: may_answer.wait(60), *[lambda: None] * 12], at_once=2) as grid:
        waiting, begun = sent(grid), time.monotonic()
        for _ in range(12):
            del waiting[grid.pull_next(waiting, 30)[0]]
        assert time.monotonic() - begun < 12 * 0.3 / 2
        may_answer.set()


def test_messages_that_nobody_awaits_any_more_are_dropped():
    called = []
    with grid_of([lambda k=k: called.append(k) for k in range(6)], at_once=2) as grid:
        waiting = sent(grid)
        awaited = dict.fromkeys(list(waiting)[4:])
        assert [number_of(grid.pull_next(dict(awaited), 30))] == [4]
        grid.push_messages([])
        assert set(called) <= {4, 5} and not grid._sent


def test_a_grid_that_pulls_in_its_own_way_is_asked_in_that_way():
    class Backwards(InProcessGrid):
        def pull_messages(self, message_ids):
            return super().pull_messages(list(message_ids)[::-1])

    assert Backwards([]).pull_next is None and InProcessGrid([]).pull_next is not None


def test_no_reply_is_awaited_that_does_not_come():
    grid = grid_of([lambda: None, lambda: None], spoil=lambda node, message, reply: None)
    with grid:
        assert grid.pull_next(sent(grid), 60) is None
        assert grid.pull_next({"unknown": None}, 60) is None


def test_an_app_that_raises_answers_with_an_error():
    def fail():
        raise SystemExit("no more")

    with grid_of([fail]) as grid:
        _, reply = grid.pull_next(sent(grid), 30)
    assert reply.has_error() and "no more" in reply.error.reason


def test_an_inbox_of_such_a_grid_has_no_threads():
    with grid_of([lambda: None] * 3) as grid:
        inbox = Inbox(grid)
        inbox.expect(sent(grid))
        came = [inbox.take(30) for _ in range(3)]
        assert [number_of(one) for one in came] == [0, 1, 2]
        assert inbox.take(0.05) is None
        assert not [thread for thread in threading.enumerate() if thread.name == "inbox"]


class TestLocalMessages:
    """No checksum is computed for a message that does not leave this machine; every other one has one."""

    def test_only_a_grid_that_passes_replies_on_unchanged_marks_them(self):
        for spoil, expected in ((None, True), (lambda node, message, reply: reply, False)):
            with grid_of([lambda: None], spoil=spoil) as grid:
                _, reply = grid.pull_next(sent(grid), 30)
            assert is_local(reply) == expected

    def test_a_round_is_the_same_without_checksums(self, monkeypatch):
        computed = []
        checksum_of = Header.checksum_of
        monkeypatch.setattr(Header, "checksum_of", lambda *given: computed.append(1) or checksum_of(*given))
        local, reports = start(FedAvg(), rounds_grid(3), rounds=2)
        assert not computed
        checked, others = start(FedAvg(), rounds_grid(3, spoil=lambda node, message, reply: reply), rounds=2)
        assert computed
        assert all(np.array_equal(local[name], checked[name]) for name in checked)
        for report, other in zip(reports, others, strict=True):
            assert (report.down.payload, report.up.payload) == (other.down.payload, other.up.payload)
            # Random digits of the same number as a checksum's: compressed, they differ by a few bytes.
            assert report.up.overhead == pytest.approx(other.up.overhead, rel=0.05)

    def test_a_reply_without_the_mark_needs_its_checksum(self):
        def random_digits(node, message, reply):
            header = Header.from_content(reply.content)
            if node.config["partition-id"] == 1 and header.action == "train":
                reply.content[RECORD] = header.unchecked().to_record()
            return reply

        _, reports = start(FedAvg(), rounds_grid(3, spoil=random_digits))
        ((client, said),) = reports[0].refused
        assert client == "client-1" and "checksum" in said
