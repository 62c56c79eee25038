"""One client that lies, and seals its lies correctly, in a real run in this process: the run ends, the others' learning
is kept, and what it says reaches no log as it is."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange import partial_exchange
from tepal.exchange.bounds import MOST_METRICS, MOST_NOTES
from tepal.exchange.encodings import PLAIN
from tepal.exchange.header import Header
from tepal.exchange.manifest import PARTS, RECORD
from tepal.exchange.mod import PartialExchange
from tepal.exchange.norms import squared_norms
from tepal.exchange.parts import pack, unpacked
from tepal.exchange.plan import Reply
from tepal.strategies import FedACS, FedAvg, FedEnsemble, FedNova, RoundFailed
from tepal.strategies.fedavg import ModelMerger
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds import cohort as cohort_module
from tepal.strategies.rounds.norms import UpdateNorms, largest
from tepal.strategies.rounds.weights import weight_limit
from tests.answers import returned_by

START = {"w": np.zeros((4, 8), np.float32), "b": np.zeros(8, np.float32)}
GOAL = {name: np.full(array.shape, 1.0, np.float32) for name, array in START.items()}


def app_of(raises=lambda model: None, introduce=None, metrics=lambda k: {}):
    """Clients that go half the way from the model to 1, with some noise of their own."""
    app = ClientApp(mods=[PartialExchange(introduce)])

    @app.train()
    def train(msg, context):
        k, number = int(context.node_config["partition-id"]), msg.content["config"]["server-round"]
        model = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        raises(model)
        rng = np.random.default_rng([k, number])
        noise = {name: rng.normal(0, 0.01, array.shape) for name, array in model.items()}
        made = {n: np.asarray(a + 0.5 * (1 - a) + noise[n], np.float32) for n, a in model.items()}
        figures = {"num-examples": 10, "accumulation": 5.0, "received-loss": 0.5, "test-examples": 4, **metrics(k)}
        record = ArrayRecord({name: Array(array) for name, array in made.items()})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord(figures)}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 4, "accuracy": 0.5})}), reply_to=msg)

    return app


def lies(change, clients=(1,), rounds=(1, 2, 3, 4, 5, 6, 7, 8), actions=("train",)):
    """A `spoil` of the grid: `change(content, header)` changes an answer, and returns changed fields of its header."""

    def spoil(node, message, reply):
        if node.config["partition-id"] not in clients or reply.has_error():
            return reply
        header = Header.from_content(reply.content)
        if header.action in actions and header.round in rounds:
            reply.content.returned = returned_by(message)  # for `values`
            fields = change(reply.content, header) or {}
            header = type(header)(**{**vars(header), **fields})
            reply.content[RECORD] = header.with_checksum(reply.content).to_record()
        return reply

    return spoil


def values(make):
    """Send `make(name, what the client made)` in place of what it made."""

    def change(content, header):
        for tree, shaped in content.returned.items():
            made = dict(unpacked(content[PARTS][tree], shaped, PLAIN))
            sent = {name: np.asarray(make(name, array), array.dtype) for name, array in made.items()}
            content[PARTS][tree] = pack(sent, sent)

    return change


def figures(**changed):
    def change(content, header):
        for name, value in changed.items():
            content["metrics"][name.replace("_", "-")] = value

    return change


def run(strategy, change, *, clients=5, rounds=4, app=None, clients_that_lie=(1,), start=START, **options):
    history = []
    strategy.on_round = history.append
    grid = InProcessGrid(
        [Node(app or app_of(), {"partition-id": k}) for k in range(clients)],
        spoil=lies(change, clients_that_lie, **options),
    )
    result = strategy.start(grid, ArrayRecord({n: Array(a) for n, a in start.items()}), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}, history


def assert_learned(arrays, rounds=4, tolerance=0.02):
    """What clients that go half the way in every round must have reached."""
    for array in arrays.values():
        np.testing.assert_allclose(array, 1 - 0.5**rounds, atol=tolerance)


# ---- single numbers --------------------------------------------------------------------------------------------------

NUMBERS = [1e200, -1e200, 1.7e308, -1.7e308, 1e-310, 5e-324, 0.0, -1.0, float("nan"), float("inf"), 10**18]


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("name", ["received-loss", "received-accuracy", "train-loss", "accumulation", "of-my-own"])
@pytest.mark.parametrize("strategy", [FedAvg, FedNova])
def test_no_number_ends_a_run(strategy, name, value):
    arrays, history = run(strategy(), figures(**{name: value}))
    assert len(history) == 4
    assert_learned(arrays, tolerance=0.05)
    for report in history:
        for mean in report.train_metrics.values():
            assert math.isfinite(mean)


def test_steps_that_dwarf_those_of_the_others_are_refused():
    _, history = run(FedNova(), figures(accumulation=1e-310))
    assert all("accumulation" in dict(report.refused)["client-1"] for report in history[:3])


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda name, a: np.full_like(a, 3e38), lambda name, a: a * 1e6, lambda name, a: -1e30 * np.sign(a)],
    ids=["3e38", "scaled", "flipped"],
)
def test_an_update_far_beyond_the_others_is_refused(make):
    arrays, history = run(FedAvg(), values(make), clients=5, rounds=4)
    assert "times as large as usual" in dict(history[0].refused)["client-1"]
    assert_learned(arrays)


def test_what_escapes_the_sample_is_bounded_by_the_norm_of_the_values(monkeypatch):
    """As if no sample contained any of what the hostile client changed."""
    monkeypatch.setattr("tepal.exchange.sender.estimated_norms", lambda x, s: dict.fromkeys(x, 0.5))
    monkeypatch.setattr("tepal.exchange.sender.SMALL", 4)  # so that the entries are large
    arrays, history = run(FedAvg(), values(lambda name, a: a + 1e5), clients=20, rounds=3)
    assert all("client-1" in dict(report.refused) for report in history)
    assert_learned(arrays, 3)


@pytest.mark.parametrize("clients", [1, 2])
def test_where_nothing_can_be_compared_nothing_is_refused(clients):
    _, history = run(FedAvg(min_available_nodes=1), values(lambda name, a: a + 1e5), clients=clients, rounds=1)
    assert not history[0].refused


def test_clipped_updates_have_the_median_norm():
    """With robust="clip": the hostile client's direction counts for no more than another client's."""
    scaled = values(lambda name, a: a * 50)
    plain, _ = run(FedAvg(), scaled, rounds=1)
    arrays, history = run(FedAvg(robust="clip"), scaled, rounds=1)
    assert_learned(arrays, 1)
    assert np.abs(plain["w"]).max() > 5
    ratios = dict(zip(history[0].record["updates"], history[0].record["ratios"], strict=True))
    assert ratios["client-1"] == pytest.approx(50, rel=0.05)
    # In the other direction: a fifth of the clients, clipped to the median, takes two fifths of a round's way.
    flipped, _ = run(FedAvg(robust="clip"), values(lambda name, a: a * -50), rounds=1)
    np.testing.assert_allclose(flipped["w"], 0.5 * (4 - 1) / 5, atol=0.02)


def test_the_result_of_clipping_does_not_depend_on_the_order_of_the_replies():
    results = []
    for order in (range(6), reversed(range(6))):
        grid = InProcessGrid(
            [Node(app_of(), {"partition-id": k}) for k in order], spoil=lies(values(lambda name, a: a * 30))
        )
        result = FedAvg(robust="clip").start(grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=3)
        results.append(result.arrays["w"].numpy())
    np.testing.assert_allclose(*results, rtol=1e-5)


@pytest.mark.parametrize("mean", ["trimmed", "median", "krum", "rfa"])
def test_clipping_first_protects_modes_in_which_hostile_clients_are_the_majority(mean):
    """A third of all clients is hostile, but two of the three that train a mode in some rounds: no mean of the mode's
    clients alone can tell which of them are honest, and the norms of all clients can."""
    starts = {f"mode/{mode}/{name}": array for mode in range(3) for name, array in START.items()}
    away = {}
    for robust in (mean, f"clip+{mean}"):
        arrays, _ = run(
            FedEnsemble(modes=3, robust=robust, hostile_share=0.34), values(lambda name, a: a * -300), clients=9,
            clients_that_lie=(1, 2, 3), rounds=6, start=starts,
        )  # fmt: skip
        away[robust] = max(float(np.abs(array).max()) for array in arrays.values())
    assert away[mean] > 50
    assert away[f"clip+{mean}"] < 2


# ---- weights ---------------------------------------------------------------------------------------------------------


def introduced(msg, context):
    return {"num-examples": 10, "test-examples": 4}


def test_no_client_counts_for_more_examples_than_it_was_introduced_with():
    app = app_of(introduce=introduced)
    both = figures(num_examples=10**15, test_examples=10**15, received_accuracy=0.0)
    arrays, history = run(FedAvg(), both, app=app, rounds=3)
    assert "introduction said 10" in dict(history[0].refused)["client-1"]
    assert history[0].train_metrics["test-examples"] == 16
    assert_learned(arrays, 3)


def test_a_client_whose_data_has_grown_introduces_itself_again():
    said = {"rounds": []}

    def grown(msg, context):
        number = msg.content["config"]["server-round"]
        said["rounds"].append((int(context.node_config["partition-id"]), number))
        return {"num-examples": 10 if number < 2 else 12, "test-examples": 4}

    _, history = run(FedAvg(), figures(num_examples=12), app=app_of(introduce=grown), rounds=3)
    assert [("client-1" in report.replied) for report in history] == [False, True, True]
    assert (1, 2) in said["rounds"] and all(number == 1 for k, number in said["rounds"] if k != 1)


@pytest.mark.parametrize("introduce", [None, lambda msg, context: {"num-examples": 10**15, "test-examples": 10**15}])
def test_no_client_counts_for_more_than_half_of_a_round(introduce):
    """The flipped update of a client with 10^15 examples cancels that of the others, and does no more."""

    def change(content, header):
        figures(num_examples=10**15, test_examples=10**15, received_accuracy=0.0)(content, header)
        values(lambda name, a: -a)(content, header)

    def own(msg, context):
        return introduce(msg, context) if context.node_config["partition-id"] == 1 else introduced(msg, context)

    app = app_of(introduce=own if introduce else None, metrics=lambda k: {"received-accuracy": 1.0})
    arrays, history = run(FedAvg(), change, app=app, rounds=1)
    np.testing.assert_allclose(arrays["w"], 0.0, atol=0.02)
    assert history[0].train_metrics["received-accuracy"] == pytest.approx(0.5)
    arrays, _ = run(FedAvg(max_weight_share=0.25), change, app=app, rounds=1)
    np.testing.assert_allclose(arrays["w"], 0.25, atol=0.02)  # 3/4 of the way of the others less 1/4


@pytest.mark.parametrize("introduce", [None, introduced])
def test_what_a_client_answered_in_an_earlier_round_is_not_taken_for_its_size(introduce):
    """In the first round it has 10 examples as all others; in the next 10^15, with a flipped update."""

    def change(content, header):
        figures(num_examples=10 if header.round == 1 else 10**15)(content, header)
        if header.round > 1:
            values(lambda name, a: 2 - a)(content, header)

    def own(msg, context):
        return {} if context.node_config["partition-id"] == 1 or introduce is None else introduce(msg, context)

    arrays, history = run(FedAvg(), change, app=app_of(introduce=own), rounds=2)
    assert all("client-1" in report.replied for report in history)
    np.testing.assert_allclose(arrays["w"], 1.0, atol=0.05)  # half of 0.75, half of 1.25


@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=12), st.floats(0.05, 1.0))
def test_the_largest_weight_that_keeps_to_the_share(weights, share):
    limit = weight_limit(weights, share)
    if len(weights) < 3:
        assert limit == math.inf
        return
    possible = max(share, 1 / len(weights))
    cut = [min(weight, limit) for weight in weights]
    assert max(cut) <= possible * sum(cut) * (1 + 1e-9)
    if limit < max(weights):  # a larger limit would be too large
        more = [min(weight, limit * 1.01) for weight in weights]
        assert max(more) > possible * sum(more) * (1 - 1e-12) or possible == 1 / len(weights)


# ---- a merge that no client can train from ---------------------------------------------------------------------------


def too_large(model):
    if np.abs(model["w"]).max() > 20:
        raise FloatingPointError("local training diverged: the loss is nan")


@pytest.mark.parametrize("folder", [False, True])
def test_the_run_returns_to_the_state_before_a_merge_that_no_client_can_train_from(folder, tmp_path, caplog):
    """Within the bound of 1,000 times the median, and enough to end the training of everybody."""
    options = {"checkpoints": tmp_path / "checkpoints"} if folder else {}
    scaled = values(lambda name, a: 400 * a)
    arrays, history = run(FedAvg(**options), scaled, rounds=6, app=app_of(too_large), clients=5)
    assert len(history) == 6
    assert "returns to the one before it" in dict(history[1].notes)["server"]
    assert "client-1" not in {name for report in history[1:] for name in report.replied}
    assert_learned(arrays, 5)  # one of the six rounds is lost
    assert any("the one before it, and goes on without client-1." in text for text in caplog.messages)


def test_a_client_that_is_refused_is_not_among_the_first_that_a_round_waits_for():
    """A round ends at three good replies. The first client of all is refused each time, and three others are there."""
    scaled = values(lambda name, a: 1e6 * a)
    strategy = FedAvg(fraction_train=1.0, min_replies=3, max_replies=3)
    arrays, history = run(strategy, scaled, rounds=4, clients=5, clients_that_lie=(0,))
    assert [len(report.replied) for report in history] == [3] * 4
    assert all("client-0" not in report.replied for report in history)
    assert_learned(arrays)


def test_a_resumed_run_returns_as_well(tmp_path):
    folder, scaled = tmp_path / "checkpoints", values(lambda name, a: 400 * a)
    first = lies(scaled, rounds=(3,))

    def start(rounds, resume):
        history = []
        grid = InProcessGrid([Node(app_of(too_large), {"partition-id": k}) for k in range(5)], spoil=first)
        strategy = FedAvg(checkpoints=folder, resume=resume, on_round=history.append)
        result = strategy.start(grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=rounds)
        return result.arrays["w"].numpy(), history

    poisoned, _ = start(3, False)
    assert np.abs(poisoned).max() > 20
    w, history = start(6, True)
    assert "returns to the one before it" in dict(history[0].notes)["server"]
    assert_learned({"w": w}, 5)


def test_a_resumed_run_does_not_return_to_a_state_that_was_undone(tmp_path):
    """Client 1 spoils round 2, which is undone in round 3, and client 2 spoils round 3."""
    scaled = values(lambda name, a: 400 * a)
    spoilers = [lies(scaled, (1,), rounds=(2,)), lies(scaled, (2,), rounds=(3,))]

    def spoil(node, message, reply):
        for each in spoilers:
            reply = each(node, message, reply)
        return reply

    def start(folder, rounds, resume=False):
        history = []
        grid = InProcessGrid([Node(app_of(too_large), {"partition-id": k}) for k in range(6)], spoil=spoil)
        strategy = FedAvg(checkpoints=tmp_path / folder, resume=resume, on_round=history.append)
        result = strategy.start(grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=rounds)
        return result.arrays["w"].numpy(), history

    w, whole = start("whole", 6)
    start("killed", 3)
    resumed, rest = start("killed", 6, resume=True)
    for found, history in ((w, whole), (resumed, [*whole[:3], *rest])):  # who is left out is drawn at random
        assert [report.went_back for report in history] == [False, False, True, True, False, False]
        assert_learned({"w": found}, 4, tolerance=0.05)  # in round 1, and in rounds 4 to 6


def test_a_run_whose_clients_fail_whatever_they_are_sent_ends_with_what_was_merged_last():
    def always(model):
        if always.now:
            raise RuntimeError("no data")

    always.now = False

    def on_round(report):
        always.now = report.round == 2

    strategy = FedAvg()
    grid = InProcessGrid([Node(app_of(always), {"partition-id": k}) for k in range(3)])
    strategy.on_round = on_round
    with pytest.raises(RoundFailed, match="no data") as failed:
        strategy.start(grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=4)
    assert_learned({"w": failed.value.result.arrays["w"].numpy()}, 2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda a: np.full_like(a, np.nan), "it has values that are NaN or infinite"),
        (lambda a: np.where(np.arange(a.size).reshape(a.shape) == 0, np.inf, a).astype(a.dtype), "NaN or infinite"),
        (lambda a: a + np.float32(1e5), "times as much as the last rounds did"),
    ],
    ids=["NaN", "infinite", "jump"],
)
def test_a_merged_state_that_is_damaged_does_not_count(damage, reason, monkeypatch):
    """The merge of the fifth round comes out wrong once; the round is repeated from the state before it."""
    finish, calls = ModelMerger.finish, []

    def damaged(merger):
        state = finish(merger)
        calls.append(1)
        if len(calls) != 5:
            return state
        return replace(state, entries={name: damage(array) for name, array in state.entries.items()})

    monkeypatch.setattr(ModelMerger, "finish", damaged)
    arrays, history = run(FedAvg(), figures(), rounds=6)
    assert reason in dict(history[4].notes)["server"] and len(calls) == 7
    assert len(history[4].left_out) == 3 and not history[4].refused  # who it was cannot be seen: half are set aside
    assert sorted([*history[4].left_out, *history[4].replied]) == [f"client-{k}" for k in range(5)]
    assert_learned(arrays, 6, tolerance=0.05)


def test_the_largest_are_few():
    assert largest({"a": 1.0, "b": 1.1, "c": 40.0, "d": 0.9}) == ["c"]
    assert largest({"a": 1.0, "b": 1.1, "c": 2.9}) == [] == largest({"a": 1.0}) == largest({})
    assert len(largest({str(k): 1.0 + (100 if k < 5 else 0) for k in range(9)})) <= 3


# ---- floods and text -------------------------------------------------------------------------------------------------


def test_metrics_without_end_refuse_the_reply():
    def change(content, header):
        for k in range(100_000):
            content["metrics"][f"made-up-{k}"] = 1.0

    _, history = run(FedAvg(), change, rounds=1)
    assert f"at most {MOST_METRICS}" in dict(history[0].refused)["client-1"]


def test_new_names_in_every_round_do_not_stay(caplog):
    def change(content, header):
        for k in range(150):
            content["metrics"][f"of-round-{header.round}-{k}"] = 1.0

    _, history = run(FedAvg(), change, rounds=8)
    named = {name for report in history for name in report.train_metrics if name.startswith("of-round")}
    assert len(named) <= MOST_METRICS
    assert all("client-1" in report.replied for report in history)
    assert any("new metrics" in text for text in caplog.messages)


HOSTILE = "x\nINFO: Round 9 of 9, train: all is well\x1b[2J\x00\u202e"


def test_text_of_a_client_is_one_line_without_control_characters(caplog):
    def change(content, header):
        content["metrics"][f"loss{HOSTILE}"] = 0.5
        return {"notes": tuple([HOSTILE + "n" * 3000] * 200), "refused": HOSTILE if header.round == 2 else ""}

    def introduce(msg, context):
        if context.node_config["partition-id"] == 2:
            raise ValueError(HOSTILE)
        return {}

    _, history = run(FedAvg(), change, rounds=3, app=app_of(introduce=introduce))
    said = [*caplog.messages, *history[1].reasons().split("; "), *history[0].train_metrics]
    said += [text for report in history for pair in (*report.refused, *report.notes) for text in pair]
    for text in said:
        assert text.isprintable(), text
    assert r"x\nINFO" in dict(history[1].refused)["client-1"]
    assert len([note for note in history[0].notes if note[0] == "client-1"]) == MOST_NOTES + 1
    assert all(len(note) <= 2000 for _, note in history[0].notes)


def test_a_name_of_a_clients_own_is_one_line_too():
    nodes = [Node(app_of(), {"partition-id": k, "name": f"{HOSTILE}{k}{'y' * 5000}"}) for k in range(2)]
    history = []
    FedAvg(on_round=history.append).start(
        InProcessGrid(nodes), ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=2
    )
    assert len(history[1].replied) == 2
    assert all(name.isprintable() and len(name) < 300 for name in history[1].replied)


def test_label_counts_of_another_number_of_classes_are_not_recorded():
    def introduce(msg, context):
        return {"label-counts": [1] * (200_000 if context.node_config["partition-id"] == 1 else 10)}

    _, history = run(FedAvg(classes=10), figures(), app=app_of(introduce=introduce), rounds=1)
    assert "client-1" in dict(history[0].refused) or "client-1" not in history[0].label_counts
    assert history[0].label_counts["client-0"] == (1.0,) * 10

    def fewer(msg, context):
        return {"label-counts": [1] * (11 if context.node_config["partition-id"] == 1 else 10)}

    _, history = run(FedAvg(classes=10), figures(), app=app_of(introduce=fewer), rounds=1)
    assert sorted(history[0].label_counts) == ["client-0", "client-2", "client-3", "client-4"]
    assert "client-1" in history[0].replied


# ---- a merger that raises --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("of its values"), OverflowError("too large"), TypeError("no number")])
def test_a_reply_that_the_merger_cannot_use_is_refused_alone(error, monkeypatch):
    add = ModelMerger.add

    def broken(merger, reply):
        if reply.client == "client-1":
            raise error
        add(merger, reply)

    monkeypatch.setattr(ModelMerger, "add", broken)
    arrays, history = run(FedAvg(), figures())
    assert str(error) in dict(history[0].refused)["client-1"]
    assert_learned(arrays)


# ---- the first start -------------------------------------------------------------------------------------------------


def test_an_app_that_starts_more_slowly_than_a_round_lasts_takes_part(monkeypatch):
    """The first answers come after the timeout of a round: an app's process imports PyTorch first."""
    import time

    begun, timeout = time.monotonic(), 0.4
    monkeypatch.setattr(cohort_module, "_ASK_AGAIN", 0.1)

    def slow(node, message, reply):
        return reply if time.monotonic() > begun + 3 * timeout else None

    grid = InProcessGrid([Node(app_of(), {"partition-id": k}) for k in range(3)], spoil=slow)
    history = []
    FedAvg(on_round=history.append).start(
        grid, ArrayRecord({n: Array(a) for n, a in START.items()}), num_rounds=2, timeout=timeout
    )
    assert [len(report.replied) for report in history] == [3, 3]


# ---- norms -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from(["float16", "float32", "float64"]))
def test_squared_norms_are_sums_of_squares(seed, dtype):
    rng = np.random.default_rng(seed)
    x = {"a": rng.normal(size=(7, 3)).astype(dtype), "n": np.array(3), "z": np.zeros((0, 2), dtype)}
    s = {"a": rng.normal(size=(7, 3)).astype(dtype), "n": np.array(4), "z": np.zeros((0, 2), dtype)}
    expected = sum((float(p) - float(q)) ** 2 for p, q in zip(x["a"].flat, s["a"].flat, strict=True))
    assert squared_norms(x, s)["a"] == pytest.approx(expected, rel=1e-2 if dtype == "float16" else 1e-5)
    assert squared_norms(x, None)["a"] == pytest.approx(sum(float(p) ** 2 for p in x["a"].flat), rel=1e-3)
    assert "n" not in squared_norms(x, s)


def test_unequal_parts_are_compared_by_their_own_blocks():
    norms = UpdateNorms({"small": ("a",), "large": ("b",)})

    def reply(client, **squares):
        return Reply(client=client, parts={}, examples=1, metrics={}, squares={"model": squares})

    norms.begin()
    for k in range(4):
        norms.enter(f"both-{k}", norms.of(reply(f"both-{k}", a=1.0, b=100.0**2), "model"))
    norms.begin()
    for squares, ratio in (({"a": 4.0}, 2), ({"b": 200.0**2}, 2), ({"a": 1.0, "b": 100.0**2}, 1)):
        assert norms.ratio(norms.of(reply("one", **squares), "model")) == pytest.approx(ratio)
    # For the bound each block counts on its own, where a usual norm is at least a hundredth of the whole.
    assert norms.excess(norms.of(reply("one", a=50.0**2, b=100.0**2), "model")) == pytest.approx(50, rel=1e-3)
    assert norms.excess(norms.of(reply("one", b=300.0**2), "model")) == pytest.approx(3, rel=1e-3)


def test_weights_are_not_hidden_beside_statistics_that_change_much_more():
    """Those of a ResNet's BatchNorm are 99.9 % of an update's squared norm."""
    norms = UpdateNorms({"layer": ("weight", "running_mean")}, ["running_mean"])

    def reply(weight, statistic):
        squares = {"weight": weight**2, "running_mean": statistic**2}
        return Reply(client="", parts={}, examples=1, metrics={}, squares={"model": squares})

    norms.begin()
    for k in range(4):
        norms.enter(f"client-{k}", norms.of(reply(1.0, 30.0), "model"))
    norms.begin()
    for (weight, statistic), ratio in (((10.0, 30.0), 10), ((1.0, 60.0), 2), ((0.5, 15.0), 0.5)):
        of_reply = norms.of(reply(weight, statistic), "model")
        assert norms.ratio(of_reply) == pytest.approx(ratio) and norms.excess(of_reply) == pytest.approx(ratio)


@pytest.mark.parametrize("mask", [-1e9 * 128, -math.inf])
def test_weights_are_not_hidden_beside_a_constant_of_huge_values(mask):
    """Such as a causal mask of 128 x 128. Its squares are beyond float32 for the least value of float32: inf."""
    norms = UpdateNorms({"layer": ("weight", "mask")}, ["mask"])

    def reply(value):
        squares, values = {"weight": 1.0, "mask": 0.0}, {"weight": value**2, "mask": mask**2}
        return Reply(client="", parts={}, examples=1, metrics={}, squares={"model": squares}, value_squares=values)

    norms.begin()
    for k in range(4):
        norms.enter(f"client-{k}", norms.of(reply(30.0), "model"))
    norms.begin()
    assert norms.excess(norms.of(reply(30.5), "model")) == 1
    assert norms.excess(norms.of(reply(1e6), "model")) == pytest.approx(1e6 - 30)


@pytest.mark.parametrize("given_model", [False, True])
def test_the_weights_of_a_model_with_batch_norm_are_clipped_to_what_is_usual(given_model):
    """Two of seven clients return the honest statistics, and ten times the honest change of the weights, backwards."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    start = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    app, merged = ClientApp(mods=[partial_exchange]), []

    @app.train()
    def train(msg, context):
        client = int(context.node_config["partition-id"])
        arrays = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        times = -10.0 if client < 2 else 1.0
        steps = {"num_batches_tracked": 1, "running_mean": 50.0, "running_var": 50.0}
        made = {
            name: np.asarray(array + steps.get(name.partition(".")[2], 0.1 * times), array.dtype)
            for name, array in arrays.items()
        }
        record = ArrayRecord({name: Array(array) for name, array in made.items()})
        content = {"arrays": record, "metrics": MetricRecord({"num-examples": 5})}
        return Message(RecordDict(content), reply_to=msg)

    strategy = FedAvg(
        robust="clip", model=model if given_model else None, fraction_evaluate=0, on_round=merged.append,
        deterministic=True,
    )  # fmt: skip
    grid = InProcessGrid([Node(app, {"partition-id": client}) for client in range(7)])
    result = strategy.start(grid, ArrayRecord({name: Array(array) for name, array in start.items()}), num_rounds=1)
    ratios = dict(zip(merged[0].record["updates"], merged[0].record["ratios"], strict=True))
    assert sorted(ratios.values()) == pytest.approx([1] * 5 + [10] * 2)
    moved = result.arrays["0.weight"].numpy() - start["0.weight"]
    np.testing.assert_allclose(moved, 0.1 * (5 - 2) / 7, rtol=1e-4, err_msg="clipped to the usual length")


def test_personal_models_are_bounded_too(tmp_path):
    arrays, history = run(FedACS(quantile=0.3), values(lambda name, a: np.full_like(a, 3e38)), rounds=3)
    assert all("client-1" in dict(report.refused) for report in history)
    assert_learned(arrays, 3, tolerance=0.1)
