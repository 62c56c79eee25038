"""The round: cohorts, names, refusals, deadlines. The method is FedAvg over a two-entry model of numpy arrays."""

import re
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from tepal.exchange import partial_exchange
from tepal.exchange.bounds import reply_bytes
from tepal.exchange.encodings import Encoding
from tepal.exchange.header import Header
from tepal.exchange.layout import Layout
from tepal.exchange.manifest import PARTS, RECORD
from tepal.exchange.mod import PartialExchange
from tepal.exchange.parts import listed, pack, shapes_of
from tepal.strategies import FedAvg, MethodStrategy, RoundFailed
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.in_process import InProcessGrid, Node

START = {"w": np.zeros((2, 3), np.float32), "count": np.array(0)}


def reply_of(partition, server_round):
    """What client `partition` makes of any model in a round."""
    rng = np.random.default_rng([partition, server_round])
    return {"w": rng.normal(size=(2, 3)).astype(np.float32), "count": np.array(10 * partition)}, partition + 1


def numpy_app(mods=(partial_exchange,), answer=reply_of, scores=False):
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(msg, context):
        assert set(msg.content["arrays"]) == set(START)
        arrays, examples = answer(int(context.node_config["partition-id"]), msg.content["config"]["server-round"])
        metrics = {"num-examples": examples, "train-loss": 1.0 / examples}
        if scores:
            metrics |= {"received-accuracy": 0.5, "test-examples": 3}
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        assert msg.content["arrays"]["w"].numpy().shape == (2, 3)
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2, "accuracy": 0.25})}), reply_to=msg)

    return app


def grid_of(clients, app=None, **options):
    app = app or numpy_app()
    return InProcessGrid([Node(app, {"partition-id": k}) for k in range(clients)], **options)


def start(strategy, grid, rounds=1, **options):
    history = []
    strategy.on_round = history.append
    initial = ArrayRecord({name: Array(array) for name, array in START.items()})
    result = strategy.start(grid, initial, num_rounds=rounds, **options)
    return {name: array.numpy() for name, array in result.arrays.items()}, history


def mean_of(partitions, server_round):
    replies = [reply_of(p, server_round) for p in partitions]
    total = sum(examples for _, examples in replies)
    return sum(arrays["w"].astype(np.float64) * examples for arrays, examples in replies) / total


def test_an_initial_value_that_no_reply_may_have_is_named_at_the_start(caplog):
    model = {"w": START["w"], "count": np.triu(np.full((3, 3), -np.inf, np.float32), 1)}
    initial = ArrayRecord({name: Array(array) for name, array in model.items()})
    with pytest.raises(RoundFailed, match="'count' has values that are NaN or infinite"):
        FedAvg().start(grid_of(2, numpy_app(answer=lambda *_: (model, 1))), initial, num_rounds=1)
    (said,) = [line for line in caplog.messages if "initial" in line]
    assert "'count'" in said and "persistent=False" in said


def test_the_merge_is_flowers_own_on_the_same_replies():
    ours, _ = start(FedAvg(), grid_of(5), rounds=2)
    initial = ArrayRecord({"w": Array(START["w"]), "count": Array(START["count"])})
    theirs = FlowerFedAvg().start(grid_of(5, numpy_app(mods=())), initial, num_rounds=2)
    np.testing.assert_allclose(ours["w"], theirs.arrays["w"].numpy(), rtol=1e-6)
    np.testing.assert_allclose(ours["w"], mean_of(range(5), 2), rtol=1e-6)
    assert ours["count"].dtype == np.int64, "Flower makes a float of it"


def test_our_app_runs_under_flowers_own_strategy():
    """The mod leaves messages of other strategies alone."""
    initial = ArrayRecord({"w": Array(START["w"]), "count": Array(START["count"])})
    result = FlowerFedAvg().start(grid_of(3), initial, num_rounds=1)
    np.testing.assert_allclose(result.arrays["w"].numpy(), mean_of(range(3), 1), rtol=1e-6)


def test_what_is_evaluated_when():
    _, history = start(FedAvg(), grid_of(2), rounds=2)
    assert [report.evaluate_metrics for report in history] == [{"num-examples": 4, "accuracy": 0.25}] * 2
    _, history = start(FedAvg(), grid_of(2, numpy_app(scores=True)), rounds=2)
    assert [bool(report.evaluate_metrics) for report in history] == [False, True], "clients score while they train"
    assert history[0].train_metrics["received-accuracy"] == 0.5
    _, history = start(FedAvg(fraction_evaluate=0), grid_of(2), rounds=2)
    assert not any(report.evaluate_metrics for report in history)


def test_a_model_that_was_scored_is_not_sent_again_to_be_trained():
    size = START["w"].nbytes + START["count"].nbytes
    _, history = start(FedAvg(), grid_of(2), rounds=3)
    assert [report.down.payload for report in history] == [4 * size, 2 * size, 2 * size]
    assert [(report.fedavg_down, report.fedavg_up) for report in history] == [(4, 2)] * 3


def test_cohorts_follow_from_seed_round_and_names_alone():
    def cohorts(seed, order):
        app = numpy_app()
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in order])
        _, history = start(FedAvg(fraction_train=0.4, seed=seed), grid, rounds=6)
        return [tuple(report.asked) for report in history]

    once = cohorts(1, range(10))
    assert once == cohorts(1, reversed(range(10)))
    assert once != cohorts(2, range(10))
    assert all(len(cohort) == 4 for cohort in once) and len(set(once)) > 1


def test_registered_names_go_before_what_clients_call_themselves():
    app = numpy_app()
    grid = InProcessGrid([Node(app, {"partition-id": k}, name=f"site-{k}") for k in range(2)])
    _, history = start(FedAvg(), grid)
    assert history[0].asked == ["site-0", "site-1"]


def test_two_nodes_of_one_name_are_told_apart():
    app = numpy_app()
    grid = InProcessGrid([Node(app, {"partition-id": 0, "name": "twin"}) for _ in range(2)])
    _, history = start(FedAvg(), grid)
    assert history[0].replied == ["twin", "twin@2"]


def test_a_registered_name_cannot_be_taken_by_who_calls_itself_so():
    app = numpy_app()
    grid = InProcessGrid([Node(app, {"partition-id": 0}, name="site-1"), Node(app, {"partition-id": 1})])
    history = []

    def join(report):
        history.append(report)
        if report.round == 1:
            grid.add(Node(app, {"partition-id": 2, "name": "site-1"}))

    strategy = FedAvg(on_round=join)
    strategy.start(grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=2)
    assert sorted(history[1].replied) == ["client-1", "site-1", "site-1@3"]


def test_a_restarted_node_takes_over_its_name():
    app = numpy_app()
    grid = grid_of(3, app)

    def restart(report):
        if report.round == 1:
            grid.add(Node(app, {"partition-id": 1}))  # the old one still counts as connected for a while

    strategy = FedAvg()
    history = []
    strategy.start(grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=1)
    strategy = FedAvg(on_round=lambda report: (history.append(report), restart(report)))
    strategy.start(grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=2)
    assert history[1].asked == ["client-0", "client-1", "client-2"] == history[1].replied


def spoil_partition(partition, change, action="train"):
    def spoil(node, message, reply):
        if node.config["partition-id"] != partition or RECORD not in reply.content:
            return reply
        header = Header.from_content(reply.content)
        return reply if header.action != action else change(reply, header)

    return spoil


def with_header(reply, header, **changes):
    reply.content[RECORD] = replace(header, **changes).with_checksum(reply.content).to_record()
    return reply


def with_arrays(reply, header, arrays, **trees):
    reply.content[PARTS] = ArrayRecord({"model": pack(arrays, arrays), **trees})
    return with_header(reply, header, carries=listed({"model": shapes_of(arrays, arrays)}))


def without_metrics(reply, header):
    del reply.content["metrics"]
    return reply


def with_examples(number):
    def change(reply, header):
        reply.content["metrics"]["num-examples"] = number
        return reply

    return change


def without_arrays(reply, header):
    del reply.content[PARTS]
    return reply


GOOD = {"w": np.ones((2, 3), np.float32), "count": np.array(1)}
BAD_REPLIES = {
    "NaN": (lambda r, h: with_arrays(r, h, {**GOOD, "w": np.full((2, 3), np.nan, np.float32)}), "'w'.*NaN"),
    "infinite": (lambda r, h: with_arrays(r, h, {**GOOD, "w": np.full((2, 3), -np.inf, np.float32)}), "infinite"),
    "shape": (lambda r, h: with_arrays(r, h, {**GOOD, "w": np.ones((3, 2), np.float32)}), "not the requested entries"),
    "dtype": (lambda r, h: with_arrays(r, h, {**GOOD, "w": np.ones((2, 3))}), "not the requested entries"),
    "same bytes": (lambda r, h: with_arrays(r, h, {**GOOD, "w": np.ones((2, 3), np.int32)}), "not the requested"),
    "missing": (lambda r, h: with_arrays(r, h, {"w": GOOD["w"]}), "not the requested entries"),
    "foreign": (lambda r, h: with_arrays(r, h, {**GOOD, "x": np.ones(1)}), "not the requested entries"),
    "other tree": (
        lambda r, h: with_arrays(r, h, GOOD, control=pack(GOOD, GOOD)),
        "'control', which was not requested",
    ),
    "other stype": (lambda r, h: (r.content[PARTS].__setitem__("model", Array(np.ones(8))), r)[1], "stype"),
    "not arrays": (lambda r, h: (r.content.__setitem__(PARTS, ConfigRecord()), r)[1], "not an ArrayRecord"),
    "cut": (lambda r, h: (r.content[PARTS].__setitem__("model", pack({"w": GOOD["w"]}, ["w"])), r)[1], "24 bytes"),
    "no arrays": (without_arrays, "no arrays"),
    "round": (lambda r, h: with_header(r, h, round=99), "round 99"),
    "client": (lambda r, h: with_header(r, h, client="client-0"), "'client-0'"),
    "experiment": (lambda r, h: with_header(r, h, experiment="x"), "experiment"),
    "no weight": (without_metrics, "num-examples"),
    "zero weight": (with_examples(0), "num-examples=0"),
    "endless weight": (with_examples(1e80), r"num-examples=1e\+80"),
    "half weight": (with_examples(0.5), "num-examples=0.5"),
    "unreadable": (lambda r, h: (r.content[RECORD].__setitem__("header", b"junk"), r)[1], "cannot be read"),
    "no header": (lambda r, h: (r.content.__delitem__(RECORD), r)[1], "mods="),
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_reply_is_refused_alone_with_its_reason(kind):
    change, reason = BAD_REPLIES[kind]
    ours, history = start(FedAvg(), grid_of(3, numpy_app(scores=True), spoil=spoil_partition(1, change)))
    ((client, said),) = history[0].refused
    assert client == "client-1"
    import re

    assert re.search(reason, said), said
    assert history[0].replied == ["client-0", "client-2"]
    np.testing.assert_allclose(ours["w"], mean_of([0, 2], 1), rtol=1e-6)


@pytest.mark.parametrize("wire", [Encoding(), Encoding("int8", "int8"), Encoding("auto", "auto", left_out=0.0)])
def test_a_plan_may_return_entries_in_any_order(wire):
    """Two entries of one shape, of which the second comes first in the plan and in the answer."""

    class Backwards(FedAvgMethod):
        def plan(self, state, round, phase, cohort, probe_replies):
            plans = super().plan(state, round, phase, cohort, probe_replies)
            return [replace(p, returns={tree: names[::-1] for tree, names in p.returns.items()}) for p in plans]

    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        arrays = ArrayRecord({"a": Array(np.full((2, 3), 1, np.float32)), "b": Array(np.full((2, 3), 5, np.float32))})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    initial = ArrayRecord({name: Array(np.zeros((2, 3), np.float32)) for name in ("a", "b")})
    strategy = MethodStrategy(Backwards(), encoding=wire, fraction_evaluate=0)
    result = strategy.start(grid_of(2, app), initial, num_rounds=1)
    found = [float(result.arrays[name].numpy().mean()) for name in ("a", "b")]
    np.testing.assert_allclose(found, [1, 5], atol=0.6 if wire.up == "auto" else 0.05)


def test_huge_finite_values_are_not_taken_for_infinite():
    huge = {"w": np.full((2, 3), 3e38, np.float32), "count": np.array(1)}
    ours, history = start(FedAvg(), grid_of(2, numpy_app(answer=lambda p, r: (huge, 1))))
    assert not history[0].refused
    np.testing.assert_array_equal(ours["w"], huge["w"])


def test_a_diverged_loss_does_not_refuse_finite_weights():
    def change(reply, header):
        reply.content["metrics"]["train-loss"] = float("nan")
        return with_header(reply, header)

    _, history = start(FedAvg(), grid_of(2, spoil=spoil_partition(0, change)))
    assert len(history[0].replied) == 2 and history[0].train_metrics["train-loss"] == 0.5


def test_each_round_is_a_line_of_the_log(caplog):
    caplog.set_level("INFO", "flwr")

    def answer(partition, server_round):
        assert partition != 1 or server_round != 2, "no memory left"
        return reply_of(partition, server_round)

    # Both entries: 6 float32 and a 64-bit counter are 32 bytes; the losses of clients k with k + 1 examples, 1/(k + 1).
    start(FedAvg(fraction_evaluate=0), grid_of(2, numpy_app(answer=answer)), rounds=2)
    told = [text for text in caplog.messages if text.startswith("Round ")]
    assert [re.sub(r"[\d.]+ s,", "… s,", text) for text in told] == [
        "Round 1 of 2, train: 2 of 2 clients, 6.4e-05 MB down, 6.4e-05 MB up, … s, train-loss 0.6667.",
        "Round 2 of 2, train: 1 of 2 clients, 6.4e-05 MB down, 3.2e-05 MB up, … s, train-loss 1.0000.",
    ]


def test_a_client_that_raises_is_lost_alone():
    def answer(partition, server_round):
        if partition == 1:
            raise RuntimeError("no memory left")
        return reply_of(partition, server_round)

    ours, history = start(FedAvg(), grid_of(3, numpy_app(answer=answer)))
    assert history[0].lost == [("client-1", "error 2: RuntimeError: no memory left")]
    np.testing.assert_allclose(ours["w"], mean_of([0, 2], 1), rtol=1e-6)


def test_the_round_ends_at_its_deadline_without_the_silent_client():
    def silent(node, message, reply):
        return None if node.config["partition-id"] == 2 and "metrics" in reply.content else reply

    ours, history = start(FedAvg(fraction_evaluate=0), grid_of(3, spoil=silent), timeout=2)
    assert [client for client, _ in history[0].lost] == ["client-2"]
    assert "within 2 s" in history[0].lost[0][1]
    np.testing.assert_allclose(ours["w"], mean_of([0, 1], 1), rtol=1e-6)


def test_the_round_ends_with_enough_replies_and_drops_the_rest():
    ours, history = start(FedAvg(max_replies=2, fraction_evaluate=0), grid_of(5))
    assert len(history[0].replied) == 2 and not history[0].lost
    partitions = [int(name.removeprefix("client-")) for name in history[0].replied]
    np.testing.assert_allclose(ours["w"], mean_of(partitions, 1), rtol=1e-6)


def test_too_few_replies_repeat_the_round_with_another_cohort():
    failing = {"left": 2}

    def answer(partition, server_round):
        if failing["left"]:
            failing["left"] -= 1
            raise RuntimeError("not now")
        return reply_of(partition, server_round)

    strategy = FedAvg(fraction_train=0.2, min_replies=2, seed=3, fraction_evaluate=0)
    ours, history = start(strategy, grid_of(10, numpy_app(answer=answer)))
    lost, replied = {client for client, _ in history[0].lost}, history[0].replied
    assert len(lost) == 2 and len(replied) == 2 and lost != set(replied)
    np.testing.assert_allclose(ours["w"], mean_of([int(c.removeprefix("client-")) for c in replied], 1), rtol=1e-6)


def test_a_run_that_cannot_go_on_keeps_what_was_learned():
    def answer(partition, server_round):
        if server_round == 3:
            raise RuntimeError("gone")
        return reply_of(partition, server_round)

    with pytest.raises(RoundFailed, match="gone") as failure:
        start(FedAvg(), grid_of(3, numpy_app(answer=answer)), rounds=4)
    kept = failure.value.result.arrays["w"].numpy()
    np.testing.assert_allclose(kept, mean_of(range(3), 2), rtol=1e-6)
    assert set(failure.value.result.train_metrics_clientapp) == {1, 2}


def test_a_client_that_cannot_take_part_says_why_before_the_first_round():
    def introduce(msg, context):
        if context.node_config["partition-id"] == 1:
            raise ValueError("data-path /data/scans: no images found")
        return {"num-examples": 3}

    app = numpy_app(mods=[PartialExchange(introduce)])
    _, history = start(FedAvg(), grid_of(3, app))
    assert history[0].refused == [("node 2 (client-1)", "data-path /data/scans: no images found")]
    assert history[0].asked == ["client-0", "client-2"]
    with pytest.raises(RoundFailed, match=r"only 2 of 3 clients can take part.*no images found"):
        start(FedAvg(min_available_nodes=3), grid_of(3, app), timeout=0.3)


def test_waiting_for_clients_ends_with_advice():
    with pytest.raises(RoundFailed, match=r"1 clients are connected after 0\.3 s; 2 are needed: start more SuperNodes"):
        start(FedAvg(), grid_of(1), timeout=0.3)


def test_deterministic_runs_merge_in_the_order_of_names():
    def merged(order):
        base = 10.0 ** (np.arange(6).reshape(2, 3) - 3)
        app = numpy_app(answer=lambda p, r: ({**GOOD, "w": (base * (p + 1) / 3).astype(np.float32)}, 7 * p + 1))
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in order])
        return start(FedAvg(deterministic=True), grid)[0]["w"].tobytes()

    assert merged([0, 1, 2, 3, 4]) == merged([4, 2, 0, 3, 1])


def test_options_of_start_are_checked():
    for options in ({"rounds": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match="must be"):
            start(FedAvg(), grid_of(2), **options)


def test_the_initial_model_is_scored_before_the_first_round():
    scored = []

    def evaluate(server_round, arrays):
        scored.append((server_round, float(arrays["w"].numpy().sum())))
        return MetricRecord({"accuracy": 0.1})

    _, history = start(FedAvg(), grid_of(2), rounds=1, evaluate_fn=evaluate)
    assert scored[0] == (0, 0.0) and scored[1][0] == 1
    assert [report.round for report in history] == [0, 1] and history[0].server_metrics == {"accuracy": 0.1}


def test_the_train_config_reaches_the_app():
    seen = []
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        seen.append(dict(msg.content["config"]))
        raise ValueError("enough")

    with pytest.raises(RoundFailed):
        start(FedAvg(), grid_of(2, app), train_config=ConfigRecord({"lr": 0.5, "epochs": 3}))
    assert seen[0] == {"lr": 0.5, "epochs": 3, "server-round": 1}


def test_a_node_is_known_by_the_id_that_it_was_given_until_it_is_removed():
    app = numpy_app()
    grid = grid_of(2, app)
    before = grid.get_node_ids()
    added = grid.add(Node(app, {"partition-id": 2}))
    assert grid.get_node_ids() == [*before, added]
    grid.remove(added)
    assert grid.get_node_ids() == before


def test_a_grid_that_limits_replies_is_told_how_large_one_may_be():
    class Limiting(InProcessGrid):
        def limit_replies(self, most):
            told.append(most)

    told = []
    grid = Limiting([Node(numpy_app(), {"partition-id": k}) for k in range(2)])
    start(FedAvg(), grid)
    most, none = told
    assert most() == reply_bytes(Layout.of_arrays(START), 1)
    assert none is None, "the grid is the app's after the run"
