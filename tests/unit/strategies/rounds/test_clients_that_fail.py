"""Clients that give no result, late, twice or not at all: each of them costs the round nothing but itself.

The method is FedAvg; a client's model is a number that tells who made it, and in which round.
"""

import re
import threading
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.linkstate.utils import (
    create_message_error_unavailable_ins_message,
    create_message_error_unavailable_res_message,
)

from tepal.exchange import partial_exchange, received
from tepal.exchange.manifest import PARTS, Manifest
from tepal.strategies import FedAvg, RoundFailed
from tepal.strategies.fedavg import ModelMerger
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds import messenger
from tepal.strategies.rounds.ledger import FAILURES, LEFT_OUT, ClientLedger
from tests.unit.strategies.rounds.restarts import RestartingGrid

START = ArrayRecord({"w": Array(np.zeros(1))})


def model_of(client, server_round):
    return 100.0 * server_round + 10 ** "abcd".index(client)


def mean_of(clients, server_round):
    return sum(model_of(client, server_round) for client in clients) / len(clients)


class Trained(list):
    """(client, round) of every training message that an app got."""

    def app(self, fails=lambda client, server_round: False):
        app = ClientApp(mods=[partial_exchange])

        @app.train()
        def train(msg, context):
            client, server_round = received(msg).plan.client, received(msg).plan.round
            self.append((client, server_round))
            if fails(client, server_round):
                raise RuntimeError("no result today")
            record = ArrayRecord({"w": Array(np.array([model_of(client, server_round)]))})
            content = {"arrays": record, "metrics": MetricRecord({"num-examples": 1})}
            return Message(RecordDict(content), reply_to=msg)

        @app.evaluate()
        def evaluate(msg, context):
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=msg)

        return app

    def rounds(self, client):
        return [server_round for name, server_round in self if name == client]


@pytest.fixture
def trained():
    return Trained()


def nodes_of(app, clients="abc"):
    return [Node(app, {}, name=client) for client in clients]


def run(grid, rounds, timeout=60.0, **options):
    """Reports by round, and the global model after each round by round."""
    reports, models = {}, {}
    seen = options.pop("on_round", lambda report: None)

    def on_round(report):
        if report.round:
            reports[report.round] = report
            seen(report)

    strategy = FedAvg(**{"fraction_evaluate": 0, "on_round": on_round, **options})
    strategy.start(
        grid,
        START,
        num_rounds=rounds,
        timeout=timeout,
        evaluate_fn=lambda number, arrays: models.update({number: float(arrays["w"].numpy()[0])}),
    )
    return reports, models


def is_training(message, client=None, server_round=None):
    """Whether a message asks for training, and in this round and of this client where they are given."""
    plan = Manifest.from_content(message.content).plan
    return (
        plan.action == "train" and client in (None, plan.client) and server_round in (None, plan.round)
    )


# ---- who fails again and again ---------------------------------------------------------------------------------------


def test_who_gives_no_result_three_times_in_a_row_is_left_out_for_some_rounds_and_then_asked_again(trained):
    again = FAILURES + LEFT_OUT + 1
    failing = {1, 2, 3, again, again + LEFT_OUT + 2}
    grid = InProcessGrid(nodes_of(trained.app(lambda client, number: client == "b" and number in failing)))
    last = again + LEFT_OUT + 4
    reports, models = run(grid, last)
    out = {*range(4, again), *range(again + 1, again + LEFT_OUT + 1)}  # at its next failure it is out again at once
    assert (FAILURES, LEFT_OUT) == (3, 5) and len(out) == 2 * LEFT_OUT
    assert trained.rounds("b") == [number for number in range(1, last + 1) if number not in out]
    for number, report in reports.items():
        asked = ["a", "c"] if number in out else ["a", "b", "c"]
        assert report.asked == asked and report.left_out == (["b"] if number in out else [])
        merged = [client for client in asked if client != "b" or number not in failing]
        assert sorted(report.replied) == merged
        assert models[number] == pytest.approx(mean_of(merged, number))
    assert not reports[last].left_out, "one good reply clears it: the failure after it is the first"


def test_who_is_left_out_is_said_in_the_log(trained, caplog):
    run(InProcessGrid(nodes_of(trained.app(lambda client, number: client == "b"))), 3)
    assert "b has failed 3 times in a row; it is left out until round 9" in caplog.text


def test_failures_that_do_not_come_in_a_row_are_forgiven(trained):
    grid = InProcessGrid(nodes_of(trained.app(lambda client, number: client == "b" and number % 3 != 0)))
    reports, _ = run(grid, 9)
    assert trained.rounds("b") == list(range(1, 10)) and not any(report.left_out for report in reports.values())


def test_refused_replies_are_failures_too(trained):
    def spoil(node, message, reply):
        if node.name == "b" and is_reply_to_training(reply):
            reply.content["metrics"]["num-examples"] = 10
        return reply

    reports, _ = run(InProcessGrid(nodes_of(trained.app()), spoil=spoil), 5)
    assert [bool(report.refused) for report in reports.values()] == [True, True, True, False, False]
    assert [report.left_out for report in reports.values()] == [[], [], [], ["b"], ["b"]]


def is_reply_to_training(reply):
    return reply.has_content() and "metrics" in reply.content and PARTS in reply.content


@pytest.mark.parametrize("same_node", [True, False], ids=["the same node", "another node"])
def test_a_restart_of_its_node_clears_it(trained, same_node):
    app = trained.app(lambda client, number: client == "b" and number <= 3)

    grid = RestartingGrid(nodes_of(app), of="b")

    def restart(report):
        if report.round == 5 and same_node:
            grid.started = "now"
        elif report.round == 5:
            grid.remove(2)
            grid.add(Node(app, {}, name="b"))

    reports, _ = run(grid, 7, on_round=restart)
    assert trained.rounds("b") == [1, 2, 3, 6, 7]
    assert [number for number, report in reports.items() if report.left_out] == [4, 5]


def test_when_too_few_others_are_there_they_are_asked_all_the_same(trained):
    grid = InProcessGrid(nodes_of(trained.app(lambda client, number: client == "b" and number <= 3)))

    def leave(report):
        if report.round == 4:
            grid.remove(3)

    reports, models = run(grid, 5, on_round=leave, min_replies=2)
    assert reports[4].asked == ["a", "c"] and reports[4].left_out == ["b"]
    assert reports[5].asked == ["a", "b"] and reports[5].left_out == []
    assert models[5] == pytest.approx(mean_of("ab", 5))


def test_a_resumed_run_knows_who_is_left_out(trained, tmp_path):
    app = trained.app(lambda client, number: client == "b" and number <= 3)
    run(InProcessGrid(nodes_of(app)), 3, checkpoints=tmp_path)
    reports, _ = run(InProcessGrid(nodes_of(app)), 10, checkpoints=tmp_path, resume=True)
    assert list(reports) == list(range(4, 11))
    assert [number for number, report in reports.items() if report.left_out == ["b"]] == [4, 5, 6, 7, 8]
    assert trained.rounds("b") == [1, 2, 3, 9, 10]


def test_a_resumed_run_counts_on_from_the_failures_before(trained, tmp_path):
    app = trained.app(lambda client, number: client == "b" and number <= 3)
    run(InProcessGrid(nodes_of(app)), 2, checkpoints=tmp_path)
    reports, _ = run(InProcessGrid(nodes_of(app)), 4, checkpoints=tmp_path, resume=True)
    assert reports[4].left_out == ["b"] and trained.rounds("b") == [1, 2, 3]


def test_a_report_does_not_call_left_out_whom_it_asked(trained):
    """Training fails for the third time; then the round's model is scored without that client."""

    def spoil(node, message, reply):
        if node.name == "b" and "arrays" in message.content:  # as its app had it: no introduction
            return Message(Error(8, "killed"), reply_to=message)
        return reply

    reports, _ = run(InProcessGrid(nodes_of(trained.app()), spoil=spoil), 4, fraction_evaluate=1.0)
    assert any(report.left_out for report in reports.values())
    for report in reports.values():
        assert not set(report.left_out) & set(report.asked), f"round {report.round}"


def test_a_good_score_does_not_make_up_for_training_that_fails(trained):
    app = trained.app(lambda client, number: client == "b")
    reports, _ = run(InProcessGrid(nodes_of(app)), 5, fraction_evaluate=1.0)
    assert trained.rounds("b") == [1, 2, 3]
    assert [reports[number].left_out for number in (3, 4, 5)] == [[], ["b"], ["b"]]


def test_standing_counts_each_client_alone():
    ledger = ClientLedger()
    for number in (1, 2, 3):
        ledger.failed("a", number)
        ledger.failed("b", number)
        ledger.good("c")
        if number == 2:
            ledger.good("b")
    assert ledger.left_out(["a", "b", "c"], 4) == ["a"]
    assert ledger.left_out(["b", "c"], 4) == []
    again = ClientLedger()
    again.restore(**ledger.to_facts(), versions=[], before={})
    assert [again.left_out(["a"], number) for number in range(3, 11)] == [["a"]] * 6 + [[]] * 2
    again.failed("a", 9)
    assert again.left_out(["a"], 10) == ["a"] and again.left_out(["a"], 15) == []
    again.good("a")
    assert again.left_out(["a"], 10) == []


# ---- who answers late ------------------------------------------------------------------------------------------------


class HoldsBack(InProcessGrid):
    """The reply of b to round 1 comes when `release` is set; and c's to round 2 only after it was pulled."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.release = threading.Event()
        self.pulled = threading.Event()

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        message = self._sent.get(message_id)
        if message is not None and is_training(message, "b", 1):
            if not self.release.is_set():
                return []
            self.pulled.set()
        if message is not None and is_training(message, "c", 2) and not self.pulled.is_set():
            return []
        return super().pull_messages(message_ids)


def test_a_late_reply_is_dropped_and_said_and_never_merged(trained, caplog):
    grid = HoldsBack(nodes_of(trained.app()))
    reports, models = run(grid, 3, timeout=3, on_round=lambda report: grid.release.set())
    assert reports[1].lost == [("b", "it did not answer within 3 s")] and sorted(reports[1].replied) == ["a", "c"]
    assert [report.late for report in reports.values()] == [[], [("b", 1)], []]
    assert "b answered round 1 too late; its reply is dropped" in caplog.text
    assert sorted(reports[2].replied) == sorted(reports[3].replied) == ["a", "b", "c"]
    for number, clients in ((1, "ac"), (2, "abc"), (3, "abc")):
        assert models[number] == pytest.approx(mean_of(clients, number))
    assert reports[2].up.payload == reports[3].up.payload, "what is dropped is no traffic of the round"
    assert not reports[2].lost and not any(report.refused for report in reports.values())


# ---- who is restarted in mid-round -----------------------------------------------------------------------------------


class Restarts(InProcessGrid):
    """The node of b dies with its first training messages of round 2, and is back at once.

    `comes_back`: the reply to the message that it died with comes all the same, later.
    """

    def __init__(self, nodes, times=1, comes_back=False):
        super().__init__(nodes)
        self.times = times
        self.comes_back = comes_back
        self.starts = 0
        self.died_with = []
        self.asked_again = False

    def get_nodes(self):
        return [
            NodeInfo(node_id=number, name=node.name, last_activated_at=str(self.starts) if node.name == "b" else "")
            for number, node in self.nodes.items()
        ]

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        message = self._sent.get(message_id)
        if message_id in self.died_with:
            return super().pull_messages(message_ids) if self.comes_back and self.asked_again else []
        if message is not None and is_training(message, "b", 2):
            if self.starts < self.times:
                self.starts += 1
                self.died_with.append(message_id)
                return []
            self.asked_again = True
            if self.comes_back and set(self.died_with) & set(self._sent):
                return []
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("comes_back", [False, True], ids=["", "the first answer comes after all"])
def test_a_node_that_is_restarted_is_asked_again_in_the_same_round_and_merged_once(
    trained, monkeypatch, caplog, times, comes_back
):
    monkeypatch.setattr(messenger, "_LOOK_AROUND", 0.1)
    grid = Restarts(nodes_of(trained.app()), times, comes_back)
    reports, models = run(grid, 3)
    assert [sorted(report.replied) for report in reports.values()] == [["a", "b", "c"]] * 3
    assert [report.resent for report in reports.values()] == [0, times, 0]
    assert not any(report.lost or report.refused or report.left_out for report in reports.values())
    assert "b was restarted in round 2; its message is sent again" in caplog.text
    for number in (1, 2, 3):
        assert models[number] == pytest.approx(mean_of("abc", number))
    assert trained.rounds("a") == [1, 2, 3]
    assert trained.rounds("b").count(2) == (1 + times if comes_back else 1)
    late = [one for report in reports.values() for one in report.late]
    assert late == [("b", 2)] * (times if comes_back else 0)


def test_a_node_that_is_restarted_all_the_time_is_lost_at_the_deadline(trained, monkeypatch):
    monkeypatch.setattr(messenger, "_LOOK_AROUND", 0.1)
    grid = Restarts(nodes_of(trained.app()), times=100)
    reports, models = run(grid, 2, timeout=2)
    assert reports[2].resent == messenger.RESENDS
    assert reports[2].lost == [("b", "it did not answer within 2 s")]
    assert models[2] == pytest.approx(mean_of("ac", 2))


def test_a_superlink_that_does_not_say_who_is_there_costs_nobody(trained, monkeypatch, caplog):
    monkeypatch.setattr(messenger, "_LOOK_AROUND", 0.1)

    class Silent(Restarts):
        def get_nodes(self):
            if self.starts == 1 and not self.asked:
                self.asked = True
                raise ConnectionError("busy")
            return super().get_nodes()

        asked = False

    grid = Silent(nodes_of(trained.app()))
    reports, _ = run(grid, 2)
    assert sorted(reports[2].replied) == ["a", "b", "c"] and reports[2].resent == 1
    assert "does not list its nodes: busy" in caplog.text


class Leaves(Restarts):
    """A SuperLink that answers for b at once that its node is unavailable. c answers when `waits_for(self)` is true."""

    def __init__(self, nodes, waits_for, back=True):
        super().__init__(nodes)
        self.waits_for, self.back, self.looks = waits_for, back, 0

    def get_nodes(self):
        self.looks += bool(self.died_with)
        nodes = super().get_nodes()
        return nodes if self.back or not self.died_with else [node for node in nodes if node.name != "b"]

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        message = self._sent.get(message_id)
        if message is not None and is_training(message, "b", 2) and not self.died_with:
            self.starts += 1
            self.died_with.append(message_id)
            del self._sent[message_id]  # as the SuperLink does
            return [create_message_error_unavailable_res_message(message.metadata, "node_unavail")]
        if message is not None and is_training(message, "c", 2) and not self.waits_for(self):
            return []
        return InProcessGrid.pull_messages(self, message_ids)


def test_a_node_that_leaves_and_comes_back_while_others_train_is_asked_again(trained, monkeypatch, caplog):
    monkeypatch.setattr(messenger, "_LOOK_AROUND", 0.05)
    grid = Leaves(nodes_of(trained.app()), lambda grid: trained.rounds("b").count(2))
    reports, models = run(grid, 3)
    assert [report.resent for report in reports.values()] == [0, 1, 0]
    assert not any(report.lost for report in reports.values())
    assert models[2] == pytest.approx(mean_of("abc", 2))
    assert "b was restarted in round 2; its message is sent again" in caplog.text


def test_a_node_that_leaves_is_lost_when_the_others_have_answered(trained, monkeypatch):
    monkeypatch.setattr(messenger, "_LOOK_AROUND", 0.05)
    grid = Leaves(nodes_of(trained.app()), lambda grid: grid.looks > 2, back=False)
    reports, models = run(grid, 2)
    (name, reason), = reports[2].lost
    assert name == "b" and reason.startswith("error 5: ")
    assert models[2] == pytest.approx(mean_of("ac", 2)) and reports[2].resent == 0


# ---- what Flower's grid raises and says ------------------------------------------------------------------------------


def test_a_push_that_raises_loses_that_client_alone(trained):
    class Grid(InProcessGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if any(is_training(message, "b", 1) for message in messages):
                raise ConnectionError("no route to b")
            return super().push_messages(messages)

    reports, models = run(Grid(nodes_of(trained.app())), 2)
    assert reports[1].lost == [("b", "its message could not be sent: ConnectionError: no route to b")]
    assert models == {0: 0, 1: pytest.approx(mean_of("ac", 1)), 2: pytest.approx(mean_of("abc", 2))}
    assert reports[1].down.payload == 2 * 8


def test_a_push_that_the_superlink_does_not_take_loses_that_client_alone(trained):
    class Grid(InProcessGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if any(is_training(message, "b", 1) for message in messages):
                return [""]
            return super().push_messages(messages)

    reports, models = run(Grid(nodes_of(trained.app())), 1)
    assert reports[1].lost == [("b", "its message could not be sent")]
    assert models[1] == pytest.approx(mean_of("ac", 1))


class PullsFail(InProcessGrid):
    """Pulling the reply of b to round 1 does what `says`, called with the seconds since its first pull, says."""

    def __init__(self, nodes, says):
        super().__init__(nodes)
        self.says = says
        self.first = None

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        message = self._sent.get(message_id)
        if message is not None and is_training(message, "b", 1):
            self.first = self.first or time.monotonic()
            says = self.says(time.monotonic() - self.first)
            if isinstance(says, Exception):
                raise says
            if says == "nothing yet":
                return []
        return super().pull_messages(message_ids)


def test_a_pull_that_raises_once_loses_nobody(trained, caplog):
    failures = [ConnectionError("try again")]
    grid = PullsFail(nodes_of(trained.app()), lambda seconds: failures.pop() if failures else "")
    reports, models = run(grid, 1)
    assert not reports[1].lost and sorted(reports[1].replied) == ["a", "b", "c"]
    assert models[1] == pytest.approx(mean_of("abc", 1))
    assert "The reply of b cannot be pulled now: try again" in caplog.text


def test_a_pull_that_raises_for_ever_loses_that_client_alone(trained, monkeypatch):
    monkeypatch.setattr(messenger, "_GIVE_UP", 0.8)
    grid = PullsFail(nodes_of(trained.app()), lambda seconds: ConnectionError("it is gone"))
    reports, models = run(grid, 2)
    assert reports[1].lost == [("b", "its reply cannot be pulled: ConnectionError: it is gone")]
    assert sorted(reports[1].replied) == ["a", "c"] and sorted(reports[2].replied) == ["a", "b", "c"]
    assert models[1] == pytest.approx(mean_of("ac", 1))


def test_pulls_that_fail_now_and_then_while_a_client_trains_for_long_lose_nobody(trained, monkeypatch):
    """Twice in a long training a pull fails at once and the next one works: that is no minute of failing."""
    monkeypatch.setattr(messenger, "_GIVE_UP", 1.0)
    failures = [(2.5, ConnectionError("second glitch")), (0.0, ConnectionError("first glitch"))]

    def says(seconds):
        if failures and seconds >= failures[-1][0]:
            return failures.pop()[1]
        return "nothing yet" if failures else ""

    reports, _ = run(PullsFail(nodes_of(trained.app()), says), 1)
    assert not failures
    assert not reports[1].lost and sorted(reports[1].replied) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["node_unavail", "msg_unavail", "expired"])
def test_an_error_that_the_superlink_itself_answers_is_entered_for_the_right_client(trained, kind):
    """Flower makes such answers for nodes that are dead: they come from the SuperLink, not from the client."""

    def spoil(node, message, reply):
        if node.name != "b" or not is_reply_to_training(reply):
            return reply
        if kind == "expired":
            return create_message_error_unavailable_ins_message(message.metadata.message_id, 1)
        error = create_message_error_unavailable_res_message(message.metadata, kind)
        assert error.metadata.src_node_id == error.metadata.dst_node_id == 1
        return error

    reports, models = run(InProcessGrid(nodes_of(trained.app()), spoil=spoil), 2)
    code = {"node_unavail": 5, "msg_unavail": 4, "expired": 3}[kind]
    for number in (1, 2):
        ((client, reason),) = reports[number].lost
        assert client == "b" and reason.startswith(f"error {code}: Error: ")
        assert sorted(reports[number].replied) == ["a", "c"]
        assert models[number] == pytest.approx(mean_of("ac", number))


def test_an_error_without_a_reason_is_said_as_such(trained):
    def spoil(node, message, reply):
        if node.name == "b" and is_reply_to_training(reply):
            return Message(Error(0), reply_to=message)
        return reply

    reports, _ = run(InProcessGrid(nodes_of(trained.app()), spoil=spoil), 1)
    assert reports[1].lost == [("b", "error 0: no reason given")]


def test_a_node_that_leaves_in_mid_round_is_lost_alone(trained):
    class Grid(InProcessGrid):
        def pull_messages(self, message_ids):
            (message_id,) = message_ids
            message = self._sent.get(message_id)
            if message is not None and is_training(message, "b", 2):
                self.nodes.pop(2, None)
                del self._sent[message_id]
                return [create_message_error_unavailable_res_message(message.metadata, "node_unavail")]
            return super().pull_messages(message_ids)

    reports, models = run(Grid(nodes_of(trained.app())), 3)
    assert [client for client, _ in reports[2].lost] == ["b"]
    assert reports[3].asked == ["a", "c"] and not reports[3].lost
    assert models[2] == pytest.approx(mean_of("ac", 2))


def test_all_reasons_are_in_what_a_failed_round_says(trained):
    grid = InProcessGrid(nodes_of(trained.app(lambda client, number: True)))
    with pytest.raises(RoundFailed) as failure:
        run(grid, 1)
    assert re.search(r"in 3 attempts\. a, b, c: error 2: RuntimeError: no result today", str(failure.value))


def test_a_run_that_is_over_leaves_no_thread_behind(trained, monkeypatch):
    """Though it ended with replies on their way, which nobody will take."""
    before = {thread for thread in threading.enumerate() if thread.name == "inbox"}
    add = ModelMerger.add
    monkeypatch.setattr(ModelMerger, "add", lambda merger, reply: (time.sleep(0.3), add(merger, reply)))
    run(InProcessGrid(nodes_of(trained.app(), "abcd")), 2, max_replies=1)
    deadline = time.monotonic() + 5
    while (left := {t for t in threading.enumerate() if t.name == "inbox"} - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
