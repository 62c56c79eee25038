"""Clients that lie as they introduce themselves, or about what they have: in names, numbers, reasons and cached parts.

The run ends as it would without them, and nothing that they say is put down to anybody else.
"""

import json
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange.bounds import MOST_METRIC_NAMES, MOST_METRICS, MOST_PARTS
from tepal.exchange.header import Header
from tepal.exchange.manifest import RECORD
from tepal.exchange.mod import PartialExchange
from tepal.exchange.plan import PROBE, Reply
from tepal.strategies import FedAvg, FedNova, MethodStrategy, RoundFailed
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.ledger import FAILURES, ClientLedger
from tepal.strategies.rounds.nodes import Nodes
from tepal.strategies.rounds.weights import weight_limit, with_limited_weights
from tests.unit.strategies.rounds.restarts import RestartingGrid

START = {"w": np.zeros((2, 3), np.float32)}


def app_of(introduce=None, metrics=lambda k: {}):
    """Clients whose model is 1 more than the one that they are sent."""
    app = ClientApp(mods=[PartialExchange(introduce)])

    @app.train()
    def train(msg, context):
        k = int(context.node_config["partition-id"])
        model = {name: Array(array.numpy() + np.float32(1)) for name, array in msg.content["arrays"].items()}
        figures = {"num-examples": 10, "test-examples": 4, "accumulation": 5.0, **metrics(k)}
        return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": MetricRecord(figures)}), reply_to=msg)

    @app.train(PROBE)
    def probe(msg, context):
        k = int(context.node_config["partition-id"])
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 10, **metrics(k)})}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 4, "accuracy": 0.5})}), reply_to=msg)

    return app


def says(change, clients=(1,), actions=("introduce",)):
    """A `spoil` of the grid: `change(header, content)` returns changed fields of these clients' headers."""

    def spoil(node, message, reply):
        if node.config["partition-id"] not in clients or reply.has_error():
            return reply
        header = Header.from_content(reply.content)
        if header.action in actions:
            header = Header(**{**vars(header), **change(header, reply.content)})
            reply.content[RECORD] = header.with_checksum(reply.content).to_record()
        return reply

    return spoil


def run(spoil=None, *, app=None, clients=4, rounds=2, strategy=FedAvg, grid=None, timeout=60, **options):
    """Reports, and the model's entries (each is the number of rounds if all went well)."""
    history, seen = [], options.pop("on_round", lambda report: None)
    grid = grid or InProcessGrid([Node(app or app_of(), {"partition-id": k}) for k in range(clients)], spoil=spoil)
    made = strategy(on_round=lambda report: (history.append(report), seen(report)), **options)
    initial = ArrayRecord({name: Array(array) for name, array in START.items()})
    result = made.start(grid, initial, num_rounds=rounds, timeout=timeout)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), np.full((2, 3), rounds, np.float32))
    return history


def of_one(k, figures):
    """What client k says of itself, while the others say the truth."""
    truth = {"num-examples": 10, "test-examples": 4}
    return lambda msg, context: {**truth, **figures} if context.node_config["partition-id"] == k else truth


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blank", ["", " ", "\t \n"])
@pytest.mark.parametrize("later", ["nobody", "client-0", ""])
def test_who_has_no_name_does_not_take_part(blank, later):
    spoil = says(lambda header, content: {"client": blank if header.action == "introduce" else later},
                 actions=("introduce", "train"))  # fmt: skip
    first, last = run(spoil)
    ((client, reason),) = first.refused
    assert client == "node 2" and "an empty name" in reason
    for report in (first, last):
        assert report.asked == report.replied == ["client-0", "client-2", "client-3"]


def test_a_reply_under_another_name_is_refused():
    first, last = run(says(lambda header, content: {"client": "client-0"}, actions=("train",)))
    for report in (first, last):
        assert report.refused == [("client-1", "it answers client 'client-0' instead of 'client-1'")]
        assert report.replied == ["client-0", "client-2", "client-3"]


@pytest.mark.parametrize("name", ["server", "Server", "node 1", "Node 3 (client-0)"])
def test_what_reports_call_the_server_and_its_nodes_is_nobodys_name(name):
    history = run(says(lambda header, content: {"client": name, "notes": ("stop the run",)},
                       actions=("introduce", "train", "evaluate")))  # fmt: skip
    ((client, reason),) = history[0].refused
    assert client == f"node 2 ({name})" and "give it another name" in reason
    assert all(report.replied == ["client-0", "client-2", "client-3"] for report in history)
    assert not any(report.notes for report in history)


@pytest.mark.parametrize("name", ["servers", "node", "node-1", "node 5-a", "my server"])
def test_names_that_are_only_like_those_are_allowed(name):
    app = app_of()
    grid = InProcessGrid([Node(app, {"partition-id": 0}), Node(app, {"partition-id": 1, "name": name})])
    assert sorted(run(grid=grid, rounds=1)[0].replied) == sorted(["client-0", name])


def test_a_refused_introduction_is_not_put_down_to_the_client_whose_name_it_bears(caplog):
    spoil = says(lambda header, content: {"client": "client-0", "refused": "my data is made up"}, clients=(3,))
    history = run(spoil)
    assert history[0].refused == [("node 4 (client-0)", "my data is made up")]
    assert history[0].refused_by_client == {"node 4 (client-0)"}
    assert "node 4 (client-0) returned no result in round 1: my data is made up" in caplog.text
    assert all(report.replied == ["client-0", "client-1", "client-2"] for report in history)


def test_a_node_with_a_registered_key_is_reported_under_its_name():
    def introduce(msg, context):
        if context.node_config["partition-id"] == 1:
            raise ValueError("no images found")
        return {}

    app = app_of(introduce)
    grid = InProcessGrid([Node(app, {"partition-id": k}, name=f"site-{k}") for k in range(3)])
    assert run(grid=grid, rounds=1)[0].refused == [("site-1", "no images found")]


def test_a_node_that_introduces_itself_again_keeps_its_name_and_its_failures(tmp_path, caplog):
    """It claims more examples than its introduction said, so that the server asks for another one in every round."""
    times = []

    def change(header, content):
        if header.action == "introduce":
            times.append(header.round)
            return {"client": f"new-{len(times)}", "secret": f"{len(times):064x}"}
        content["metrics"]["num-examples"] = 11
        return {}

    spoil = says(change, actions=("introduce", "train"))
    history = run(spoil, app=app_of(of_one(-1, {})), rounds=6, checkpoints=tmp_path, fraction_evaluate=0)
    assert len(times) > 1
    for report in history[:FAILURES]:
        assert [client for client, _ in report.refused] == ["new-1"]
    assert all(report.left_out == ["new-1"] and not report.refused for report in history[FAILURES:])
    facts = json.loads((tmp_path / "round-000006" / "checkpoint.json").read_text())["facts"]
    assert set(facts["standing"]["proofs"]) == {"client-0", "client-2", "client-3", "new-1"}
    assert "new-1, node 2, now calls itself 'new-2'; it keeps its name for this run." in caplog.messages


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("abcdef"), st.booleans(), st.sampled_from("pq"))))
def test_no_node_has_more_names_than_there_are_nodes(steps):
    """Whatever they call themselves and prove, each time after a restart."""
    nodes, holders, starts = Nodes(), {}, {}
    for number, (node, name, alone, proof) in enumerate(steps):
        starts[node] = str(number)
        listed = {node: starts[node]} if alone else starts
        nodes.update([NodeInfo(node_id=each, last_activated_at=start) for each, start in listed.items()])
        asked = dict(nodes.take_new(number, silent_too=True))
        nodes.settle(dict.fromkeys(asked, name), {}, asked, number, dict.fromkeys(asked, proof), holders)
    for node in (1, 2, 3):
        own = [name for name in holders if name.endswith(f"@{node}")]
        assert len(own) <= 3
    assert len(holders) <= 3 * 3


# ---- numbers of examples ---------------------------------------------------------------------------------------------

IMPOSSIBLE = [1e100, 1e200, -1e15, -1.0, 0.5, 10**15 + 1, float("nan"), float("inf"), [10.0]]


@pytest.mark.parametrize("value", IMPOSSIBLE, ids=repr)
@pytest.mark.parametrize("name", ["num-examples", "test-examples"])
def test_an_introduction_with_an_impossible_number_of_examples_is_refused(name, value):
    first, last = run(app=app_of(of_one(1, {name: value})))
    ((client, reason),) = first.refused
    assert client == "node 2 (client-1)"
    assert f"its metric {name} is" in reason and "a whole number from 0 to 1e+15" in reason
    assert first.replied == last.replied == ["client-0", "client-2", "client-3"]


@pytest.mark.parametrize("value", [0, 0.0, 10**15, 1e15])
def test_the_smallest_and_the_largest_number_of_examples_are_allowed(value):
    assert len(run(app=app_of(of_one(1, {"test-examples": 4, "num-examples": 10, "more": value})))[0].replied) == 4
    history = run(app=app_of(of_one(1, {"num-examples": value})), rounds=1)
    assert not any(client.startswith("node") for client, _ in history[0].refused)


def test_the_limit_of_the_others_is_the_same_whatever_one_claims():
    honest = [1000, 600, 10, 10]
    for share in (0.3, 0.5):
        expected = weight_limit([10**15, *honest], share)
        for lie in (1e30, 1e100, 1e300):
            assert weight_limit([lie, *honest], share) == pytest.approx(expected)
        for lie in (0, -1, -1e15, -1e300, float("nan"), float("inf")):
            assert weight_limit([lie, *honest], share) == pytest.approx(weight_limit(honest, share))


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=8), st.floats(0.1, 0.9), st.integers(20, 250))
def test_the_limit_beside_a_huge_weight_is_that_of_exact_sums(honest, share, exponent):
    weights = sorted([10**exponent, *honest], reverse=True)
    found = weight_limit(map(float, weights), share)
    possible = max(Fraction(share), Fraction(1, len(weights)))
    cut = [min(Fraction(weight), Fraction(found)) for weight in weights]
    assert max(cut) <= possible * sum(cut) * (1 + Fraction(1, 10**9))
    more = [min(Fraction(weight), Fraction(found) * Fraction(101, 100)) for weight in weights]
    assert max(more) > possible * sum(more) or possible * len(weights) <= 1 + Fraction(1, 10**9)


def test_test_examples_beyond_all_measure_do_not_take_the_others_weights_away():
    """Four clients with 1,000 and 10, 10, 10 test examples: with a share of one half the first counts for 30."""
    said = {f"c{k}": ({"test-examples": n}, 10) for k, n in enumerate([1000, 10, 10, 10])}
    for lie in (-1e15, 0):
        limited = with_limited_weights({**said, "liar": ({"test-examples": lie}, 10)}, 0.5)
        assert [limited[f"c{k}"][0]["test-examples"] for k in range(4)] == [30, 10, 10, 10]
        assert limited["liar"][0]["test-examples"] <= 1
    limited = with_limited_weights({**said, "liar": ({"test-examples": 1e100}, 10)}, 0.5)
    assert [limited[c][0]["test-examples"] for c in ("c0", "c1", "liar")] == [1000, 10, 1030]


def test_a_reply_has_no_more_test_examples_than_there_can_be():
    """Where no introduction bounds them."""
    app = app_of(metrics=lambda k: {"test-examples": 1e100} if k == 1 else {})
    for report in run(app=app):
        ((client, reason),) = report.refused
        assert client == "client-1" and "its metric test-examples is 1e+100" in reason


@pytest.mark.parametrize("counts", [[1e60] * 10, [1.5] * 10, [-1] * 10, [10**15 + 1] * 10])
def test_label_counts_that_cannot_be_are_not_recorded(counts, caplog):
    def introduce(msg, context):
        return {"label-counts": counts if context.node_config["partition-id"] == 1 else [5] * 10}

    history = run(app=app_of(introduce), classes=10)
    assert history[0].label_counts == {f"client-{k}": (5.0,) * 10 for k in (0, 2, 3)}
    assert "client-1" in history[0].replied
    assert any("client-1 reports label counts that are not whole numbers from 0" in text for text in caplog.messages)


# ---- names of metrics ------------------------------------------------------------------------------------------------


class AskingMethod(FedAvgMethod):
    """Clients are asked for a number that is of this method alone, and then trained."""

    phases = (PROBE, "train")
    seen: list

    def accept(self, plan, reply):
        if plan.action == PROBE and "of-the-method" not in reply.metrics:
            raise ValueError("it has no number")

    def plan(self, state, round, phase, cohort, probe_replies):
        plans = super().plan(state, round, phase, cohort, probe_replies)
        if phase == PROBE:
            return [type(plan)(client=plan.client, round=round, action=PROBE, needs=plan.needs) for plan in plans]
        self.seen.append([probe_replies[plan.client].metrics["of-the-method"] for plan in plans])
        return plans


@pytest.mark.parametrize("where", ["introduce", "probe", "train"])
def test_names_without_end_take_nothing_from_the_method(where):
    """All names of a run are brought by six clients, before the seventh answers for the first time."""

    def junk(k, action):
        return {f"{action}-{k}-{i}": 1.0 for i in range(190)} if k < 6 and action == where else {}

    def introduce(msg, context):
        return {"num-examples": 10, **junk(int(context.node_config["partition-id"]), "introduce")}

    def metrics(k):
        return {"of-the-method": float(k), **junk(k, "probe"), **junk(k, "train")}

    method = AskingMethod()
    method.seen = []

    def strategy(**options):
        return MethodStrategy(method, **options)

    assert MOST_METRIC_NAMES < 6 * 190
    history = run(app=app_of(introduce, metrics), clients=7, strategy=strategy)
    assert method.seen == [[float(k) for k in range(7)]] * 2
    assert all(len(report.replied) == 7 for report in history)
    assert len({name for report in history for name in report.train_metrics}) <= MOST_METRIC_NAMES + 10


def test_names_without_end_do_not_take_the_steps_from_fednova():
    def introduce(msg, context):
        return {f"mine-{context.node_config['partition-id']}-{i}": 1.0 for i in range(199)}

    history = run(app=app_of(introduce), clients=8, strategy=FedNova, fraction_evaluate=0)
    assert all(len(report.replied) == 8 for report in history)


def test_a_node_does_not_get_new_names_by_another_name_of_its_own():
    """It introduces itself as client-0; what it reports is not counted against client-0."""

    def introduce(msg, context):
        return {f"said-{i}": 1.0 for i in range(199)} if context.node_config["partition-id"] == 3 else {}

    def metrics(k):
        return {0: {"of-client-0": 0.5}, 3: {f"mine-{i}": 1.0 for i in range(190)}}.get(k, {})

    app = app_of(introduce, metrics)
    nodes = [Node(app, {"partition-id": k, **({"name": "client-0"} if k == 3 else {})}) for k in range(4)]
    for report in run(grid=InProcessGrid(nodes)):
        assert report.train_metrics["of-client-0"] == 0.5
        assert len(report.train_metrics) <= MOST_METRICS + 10


@pytest.mark.parametrize("error", [KeyError("of-mine"), TypeError("no number"), AttributeError("x"), MemoryError()])
@pytest.mark.parametrize("action", ["introduce", "train"])
def test_whatever_the_check_of_a_reply_raises_refuses_that_reply_alone(error, action, monkeypatch):
    def accept(self, plan, reply):
        if plan.action == action and reply.client == "client-1":
            raise error

    monkeypatch.setattr(FedAvgMethod, "accept", accept)
    history = run()
    ((client, reason),) = history[0].refused
    assert client == ("node 2 (client-1)" if action == "introduce" else "client-1")
    assert type(error).__name__ in reason
    assert all(report.replied == ["client-0", "client-2", "client-3"] for report in history)


# ---- refusals, restarts and cached parts -----------------------------------------------------------------------------


def test_one_node_that_refuses_does_not_end_the_wait_for_the_others(caplog):
    caplog.set_level("INFO", "flwr")
    app = app_of()
    spoil = says(lambda header, content: {"refused": "no data today"}, clients=(9,))
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in (0, 1, 9)], spoil=spoil)
    later = threading.Timer(1.0, lambda: grid.add(Node(app, {"partition-id": 2})))
    later.start()
    try:
        history = run(grid=grid, min_available_nodes=3)
    finally:
        later.join()
    assert history[0].replied == ["client-0", "client-1", "client-2"]
    said = "Waiting for clients: 2 are connected, 3 are needed. 1 others cannot take part: no data today"
    assert said in caplog.messages


def test_a_run_ends_at_once_when_nobody_can_take_part():
    begun = time.monotonic()
    with pytest.raises(RoundFailed, match=r"only 0 of 3 clients can take part; 2 are needed .* no data today"):
        run(says(lambda header, content: {"refused": "no data today"}, clients=range(3)), clients=3)
    assert time.monotonic() - begun < 20


def test_refusals_are_said_when_the_time_is_over():
    begun = time.monotonic()
    with pytest.raises(RoundFailed, match=r"only 2 of 3 clients can take part; 3 are needed .* no data today"):
        run(says(lambda header, content: {"refused": "no data today"}), clients=3, min_available_nodes=3, timeout=1)
    assert time.monotonic() - begun >= 1


def test_a_restart_in_every_round_does_not_keep_a_silent_client_in_the_cohort():
    def spoil(node, message, reply):
        silent = node.name == "client-1" and Header.from_content(reply.content).action == "train"
        return None if silent else reply

    nodes = [Node(app_of(), {"partition-id": k}, name=f"client-{k}") for k in range(3)]
    grid = RestartingGrid(nodes, spoil=spoil, of="client-1")
    history = run(grid=grid, rounds=8, timeout=1, fraction_evaluate=0,
                  on_round=lambda report: setattr(grid, "started", str(report.round)))  # fmt: skip
    assert sum(bool(report.lost) for report in history) <= FAILURES + 1
    assert all(report.left_out == ["client-1"] for report in history[FAILURES + 1 :])


def test_a_restart_clears_failures_once_until_the_next_merged_reply():
    ledger = ClientLedger()

    def fail(times):
        for _ in range(times):
            ledger.failed("a", 1)
        return ledger.left_out(["a"], 2)

    assert fail(FAILURES) == ["a"]
    ledger.restarted("a")
    assert ledger.left_out(["a"], 2) == []
    assert fail(FAILURES) == ["a"]
    ledger.restarted("a")
    assert ledger.left_out(["a"], 2) == ["a"], "it has had no merged reply since then"
    ledger.good("a")
    assert fail(FAILURES) == ["a"]
    ledger.restarted("a")
    assert ledger.left_out(["a"], 2) == []
    ledger.restarted("b")
    for _ in range(FAILURES):
        ledger.failed("b", 1)
    ledger.restarted("b")
    assert ledger.left_out(["b"], 2) == [], "its first restart had nothing to clear"


def test_of_a_cache_only_ids_of_parts_are_remembered_and_not_without_end():
    ledger = ClientLedger()
    good = [f"{k:032x}" for k in range(3)]
    ledger.cached("a", [*good, "", "x", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 31 + "\n", "e" * 31 + "é"])
    assert ledger.record("a").held == set(good)
    ledger.cached("a", [f"{k:032x}" for k in range(100_000)])
    assert len(ledger.record("a").held) == MOST_PARTS
    assert len(json.dumps(ledger.to_facts())) < 250_000


def test_made_up_parts_do_not_grow_the_checkpoint(tmp_path):
    def change(header, content):
        return {"holds": tuple(f"{header.round}-{k:x}" for k in range(50_000))}

    run(says(change, actions=("introduce", "train")), rounds=3, checkpoints=tmp_path,
        fraction_evaluate=0)  # fmt: skip
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("round-*/checkpoint.json"))]
    assert max(sizes) < 5000


def test_a_reply_keeps_the_name_of_its_plan():
    """No field of a header but the name of an introduction names a client."""
    seen = []

    class Looking(FedAvgMethod):
        def accept(self, plan, reply):
            assert isinstance(reply, Reply)
            seen.append((plan.action, plan.client, reply.client))

    run(strategy=lambda **options: MethodStrategy(Looking(), **options))
    assert all(of_plan == of_reply for action, of_plan, of_reply in seen if action != "introduce")
    assert {of_reply for action, _, of_reply in seen if action == "introduce"} == {f"client-{k}" for k in range(4)}
