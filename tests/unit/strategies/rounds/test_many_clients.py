"""Many clients: a thousand of them take part, a tenth fails in every round, and nothing is asked of all at once.

The method is FedAvg; the model is one number, which a client answers with a number of its own.
"""

import zlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange import partial_exchange, received
from tepal.exchange.manifest import Manifest
from tepal.strategies import FedAvg
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.fedensemble import EnsembleState, FedEnsembleMethod
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds import cohort, messenger
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.ledger import FAILURES
from tepal.strategies.rounds.nodes import Nodes

START = ArrayRecord({"w": Array(np.zeros(1))})
CLIENTS, COHORT, ROUNDS = 1000, 50, 8
WAYS = ("raises", "not finite", "another answer", "silent")


def number_of(client, server_round):
    return float(zlib.crc32(f"{client}/{server_round}".encode()) % 1000)


def way_of_failing(client, server_round):
    """In which way, of the four, a client fails in a round; None for nine of ten."""
    drawn = zlib.crc32(f"{client} fails in {server_round}".encode()) % 40
    return WAYS[drawn] if drawn < len(WAYS) else None


def stub(fails=way_of_failing):
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        asked = received(msg).plan
        way = fails(asked.client, asked.round)
        if way == "raises":
            raise RuntimeError("no result today")
        number = np.nan if way == "not finite" else number_of(asked.client, asked.round)
        metrics = MetricRecord({"num-examples": 1 + asked.round, "way": WAYS.index(way) if way else -1})
        return Message(
            RecordDict({"arrays": ArrayRecord({"w": Array(np.array([number]))}), "metrics": metrics}), reply_to=msg
        )

    return app


def spoil(node, message, reply):
    if reply.has_content() and (found := reply.content.metric_records.get("metrics")):
        way = WAYS[found["way"]] if found["way"] >= 0 else None
        if way == "silent":
            return None
        if way == "another answer":
            reply.content["metrics"] = MetricRecord({**found, "num-examples": 10**6})
    return reply


def rounds_of(clients, last, *, grid=InProcessGrid, spoil=spoil, fails=way_of_failing, **options):
    """Reports, and the global model after each round."""
    reports, models = [], []
    app = stub(fails)
    nodes = grid([Node(app, {}, name=f"site-{k:04d}") for k in range(clients)], spoil=spoil)
    strategy = FedAvg(**{"fraction_evaluate": 0, "on_round": reports.append, **options})
    strategy.start(
        nodes, START, num_rounds=last, timeout=120.0,
        evaluate_fn=lambda number, arrays: models.append(float(arrays["w"].numpy()[0])),
    )  # fmt: skip
    return [report for report in reports if report.round], models[1:], nodes


def test_of_a_thousand_clients_fifty_train_a_round_and_a_tenth_fails_in_every_one_of_them(tmp_path):
    """A round ends with as many good replies as there are clients that can give one: nobody waits for who is silent."""
    good = 38  # of 50: more fail in no round here, and fewer would have the round wait for the silent ones
    options = {"fraction_train": COHORT / CLIENTS, "max_replies": good, "checkpoints": tmp_path}
    reports, models, _ = rounds_of(CLIENTS, ROUNDS, **options)
    failed = 0
    for report, model in zip(reports, models, strict=True):
        assert len(set(report.asked)) == len(report.asked) == COHORT
        assert len(report.replied) == good
        merged = [number_of(client, report.round) for client in report.replied]
        assert model == pytest.approx(sum(merged) / good, rel=1e-12)
        assert not any(way_of_failing(client, report.round) for client in report.replied)
        said = dict(report.refused) | dict(report.lost)
        for client, reason in said.items():
            way = way_of_failing(client, report.round)
            expected = {"raises": "no result today", "not finite": "NaN", "another answer": "checksum"}
            assert expected[way] in reason
        failed += sum(way_of_failing(client, report.round) is not None for client in report.asked)
    assert 0.05 < failed / (COHORT * ROUNDS) < 0.15
    saved = Checkpoints(tmp_path).latest()
    assert len(saved.clients) == CLIENTS
    assert set(saved.current) == {client for report in reports for client in report.replied}
    assert max(saved.standing["failures"].values()) < FAILURES


def test_a_checkpoint_says_of_no_client_that_it_holds_nothing(tmp_path):
    rounds_of(20, 1, fails=lambda *_: None, checkpoints=tmp_path)
    assert Checkpoints(tmp_path).latest().held == {}


class Introductions(InProcessGrid):
    """Counts by round who was asked to introduce itself."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked = {}

    def push_messages(self, messages):
        for message in messages:
            manifest = Manifest.from_content(message.content)
            if manifest.plan.action == "introduce":
                self.asked.setdefault(manifest.plan.round, []).append(message.metadata.dst_node_id)
        return super().push_messages(messages)


def test_of_very_many_nodes_some_introduce_themselves_before_each_round_and_all_have_their_turn(monkeypatch):
    monkeypatch.setattr(cohort, "_INTRODUCED", (15, 2))
    options = {"grid": Introductions, "fails": lambda *_: None, "fraction_train": 0.1}
    reports, _, grid = rounds_of(100, 7, **options)
    turns = [grid.asked.get(number, []) for number in range(1, 8)]
    assert [len(turn) for turn in turns] == [20] * 5 + [0] * 2, "twice a cohort of ten"
    assert sorted(node for turn in turns for node in turn) == sorted(grid.nodes)
    assert sorted(turns[0]) != list(range(1, 21)), "not the first in the list"
    assert [len(report.asked) for report in reports] == [10] * 7, "a share of all that there are, from the first round"


def test_all_introduce_themselves_at_once_where_a_run_must_be_repeatable_or_needs_so_many(monkeypatch):
    monkeypatch.setattr(cohort, "_INTRODUCED", (5, 2))
    for options in ({"deterministic": True}, {"min_available_nodes": 30}, {"fraction_train": 1.0}):
        _, _, grid = rounds_of(
            30, 1, **{"grid": Introductions, "fails": lambda *_: None, "fraction_train": 0.1, **options}
        )
        assert len(grid.asked[1]) == 30, options


def test_a_reply_that_can_come_no_more_is_not_looked_for_any_more(monkeypatch):
    monkeypatch.setattr(messenger, "_LATE", 0.0)
    pulled = {}

    class Counting(InProcessGrid):
        def push_messages(self, messages):
            ids = super().push_messages(messages)
            rounds.update((i, int(message.metadata.group_id)) for i, message in zip(ids, messages, strict=True))
            return ids

        def pull_messages(self, message_ids):
            (message_id,) = message_ids
            pulled.setdefault(rounds[message_id], set()).add(now[0])
            return super().pull_messages(message_ids)

    rounds, now = {}, [1]
    app = stub(lambda client, number: "silent" if client == "b" and number == 1 else None)
    strategy = FedAvg(fraction_evaluate=0, on_round=lambda report: now.__setitem__(0, report.round + 1))
    grid = Counting([Node(app, {}, name=name) for name in "abc"], spoil=spoil)
    strategy.start(grid, START, num_rounds=5, timeout=1.5)
    assert pulled[1] <= {1, 2}, "the round after it may still look, and nobody after that"


# ---- who is there ----------------------------------------------------------------------------------------------------


@given(st.data())
def test_every_node_that_introduced_itself_is_there_under_one_name_of_its_own(data):
    """Nodes come, go, are restarted, and call themselves what they like; some keys are registered under names."""
    names = st.sampled_from(["a", "b", "c", "a@2", "c@1"])
    registered = {node: data.draw(st.sampled_from(["", f"key-{node}"])) for node in range(1, 6)}
    nodes, sessions, here = Nodes(), {}, {}
    for step in range(data.draw(st.integers(1, 8))):
        before = dict(sessions)
        for node in data.draw(st.sets(st.integers(1, 5))):
            sessions[node] = f"start {step}"
        for node in data.draw(st.sets(st.sampled_from(sorted(sessions)))) if sessions else ():
            del sessions[node]
        nodes.update([NodeInfo(node_id=n, last_activated_at=s, name=registered[n]) for n, s in sessions.items()])
        here = {node: name for node, name in here.items() if before.get(node) == sessions.get(node) is not None}
        most = data.draw(st.sampled_from([None, 1, 2]))
        asked = dict(nodes.take_new(step, most=most))
        assert most is None or len(asked) <= most
        assert not set(asked) & set(here)
        introduced = {node: registered[node] or data.draw(names) for node in asked}
        settled = nodes.settle(introduced, {}, asked, step)
        assert set(settled) == set(asked)
        # Who is new takes a name over from a node that has it; a registered one is taken from nobody.
        here = {node: name for node, name in here.items() if name not in settled.values()} | settled
        assert nodes.available() == sorted(set(here.values()))
        assert nodes.node_of().keys() == set(nodes.available())
        assert all(here[node] == name for name, node in nodes.node_of().items())
        assert all(here.get(node, name) == name for node, name in registered.items() if name and node in here)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 5))
def test_everybody_has_a_turn_whatever_the_size_of_the_turns(count, most, round):
    nodes = Nodes()
    nodes.update([NodeInfo(node_id=7 * k + 1, name=f"site-{k}") for k in range(count)])
    turns = []
    while nodes.waiting():
        turns.append(nodes.take_new(round, most=most))
        assert len(turns[-1]) == min(most, count - sum(map(len, turns[:-1])))
    assert sorted(name for turn in turns for _, name in turn) == sorted(f"site-{k}" for k in range(count))


# ---- strata ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 20), st.integers(0, 99))
def test_joiners_and_cohorts_are_those_of_a_plain_search(count, strata, known, seed):
    """Each joiner to the smallest stratum, of several the first; a cohort takes from the strata by turns."""
    available = [f"site-{k:02d}" for k in range(count)]
    of_before = {client: zlib.crc32(client.encode()) % strata for client in available[:known]}
    size = max(strata, count // 2)
    if size > count:
        return
    method = FedEnsembleMethod(2, strata, member=FedAvgMethod())
    state = EnsembleState((), strata, of_before)
    after, cohort = method.cohort(state, available, size, np.random.default_rng(seed))

    rng, expected = np.random.default_rng(seed), dict(of_before)
    joiners = [client for client in available if client not in expected]
    for k in rng.permutation(len(joiners)):
        sizes = [sum(q == stratum for q in expected.values()) for stratum in range(strata)]
        expected[joiners[k]] = sizes.index(min(sizes))
    assert after.strata == expected
    order = [available[k] for k in rng.permutation(count)]
    turn = {int(q): place for place, q in enumerate(rng.permutation(strata))}
    left = {q: [client for client in order if expected[client] == q] for q in range(strata)}
    ranked = sorted((len(left[q]) - left[q].index(client) - 1, turn[q], client) for q in left for client in left[q])
    assert list(cohort) == [client for _, _, client in ranked[:size]]
