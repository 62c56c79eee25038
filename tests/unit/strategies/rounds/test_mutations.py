"""Messages that are changed on their way: two of each kind, 1,000 at random, and what chance does not find.

Three clients run FedFrozen's method, with a second tree and with personal state, over two or three rounds, of which
the last is clean. The model that must come out is computed here, from what clients make of a model and from who was
merged.
"""

import base64
import copy
import json
import logging
import os
import random
import resource
import shutil
import traceback
import zlib
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tepal.exchange import MODEL, Entry, Layout, RawTensor, partial_exchange, received
from tepal.exchange.cache import default_root
from tepal.exchange.header import Header
from tepal.exchange.manifest import PARTS, RECORD, Manifest
from tepal.exchange.parts import pack, unpack
from tepal.exchange.texts import compressed, decompressed, to_text
from tepal.strategies import MethodStrategy
from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.fedavg import ModelState
from tepal.strategies.fedfrozen import FedFrozenMethod
from tepal.strategies.in_process import InProcessGrid, Node

CLIENTS = 3
EVERYBODY = ["client-0", "client-1", "client-2"]
QUERY_KEY = ("qkv:q", "qkv:k")
VALUE = ("embed", "qkv:v", "count")
LAYOUT = Layout(
    (
        RawTensor("embed", (2, 2), "float32"),
        RawTensor("qkv", (6, 2), "float32"),
        RawTensor("count", (), "int64"),
    ),
    (
        Entry("embed", "embed", (2, 2), "float32"),
        Entry("qkv:q", "qkv", (2, 2), "float32", 0, 0, 2),
        Entry("qkv:k", "qkv", (2, 2), "float32", 0, 2, 4),
        Entry("qkv:v", "qkv", (2, 2), "float32", 0, 4, 6),
        Entry("count", "count", (), "int64"),
    ),
)
BLOCKS = SimpleNamespace(
    query_key=QUERY_KEY, value=VALUE, value_projection=("qkv:v",), layout=LAYOUT, model="a model of 17 numbers",
    buffers=(),
)
RAW = {
    "embed": np.ones((2, 2), np.float32),
    "qkv": np.arange(12, dtype=np.float32).reshape(6, 2),
    "count": np.array(5),
}
CONTROL = {name: np.zeros(LAYOUT.by_name[name].shape, LAYOUT.by_name[name].dtype) for name in VALUE}


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Controlled(ModelState):
    control: dict | None = None


class FreezingWithControl(FedFrozenMethod):
    """FedFrozen's method, and a tree "control" of the value block that travels both ways beside the model."""

    def init(self, model, run):
        return Controlled(super().init(model, run).entries, control=CONTROL)

    def plan(self, state, round, phase, cohort, probe_replies):
        plans = super().plan(state, round, phase, cohort, probe_replies)
        return [replace(p, needs={**p.needs, "control": VALUE}, returns={**p.returns, "control": VALUE}) for p in plans]

    def values(self, state, client, tree):
        return state.control if tree == "control" else state.entries

    def merger(self, state, round):
        inner, mean = super().merger(state, round), WeightedMean()

        class Merger:
            def add(self, reply):
                inner.add(reply)
                mean.add(reply.parts["control"], reply.examples)

            def finish(self):
                return replace(inner.finish(), control=mean.result())

        return Merger()


def trained(values, names, client, server_round):
    """What a client makes of these entries of a tree in a round."""
    rng = np.random.default_rng([client, server_round])
    made = {}
    for name in names:
        step = rng.normal(size=values[name].shape) if values[name].dtype.kind == "f" else client + server_round
        made[name] = np.asarray(values[name] + step, dtype=values[name].dtype)
    return made


def mean_of(parts, weights):
    """Σ n_k w_k / Σ n, entry by entry; counters are rounded."""
    means = {}
    for name, first in parts[0].items():
        total = sum(part[name].astype(np.float64) * weight for part, weight in zip(parts, weights, strict=True))
        mean = total / sum(weights)
        means[name] = (np.rint(mean) if first.dtype.kind == "i" else mean).astype(first.dtype)
    return means


def make_app(steps):
    """A client that counts, in its personal state, the rounds in which it was merged; `steps` gets to see the count."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        came = received(msg)
        client, server_round = int(context.node_config["partition-id"]), msg.content["config"]["server-round"]
        count = came.personal.load().get("steps", np.array(0))
        came.personal.save({"steps": count + 1})
        steps[client, server_round] = int(count)
        trees = {tree: dict(values) for tree, values in came.trees.items()}
        trees[MODEL] |= trained(trees[MODEL], came.plan.trains, client, server_round)
        trees["control"] = trained(trees["control"], VALUE, client, server_round)
        raw = came.layout.join(trees[MODEL])
        content = {
            "arrays": ArrayRecord({name: Array(np.asarray(array)) for name, array in raw.items()}),
            "control": ArrayRecord({name: Array(array) for name, array in trees["control"].items()}),
            "metrics": MetricRecord({"num-examples": client + 1, "loss": 1.0 / (client + 1)}),
        }
        return Message(RecordDict(content), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=msg)

    return app


class Run:
    """A run in which `on_plan(name, plan, msg)` and `on_reply(name, header, reply)` may change what travels.

    Names are the clients'. `on_plan` changes the message in place; what `on_reply` returns is delivered.
    """

    def __init__(self, on_plan=None, on_reply=None, *, warm_up=1, rounds=2, timeout=60, train_config=None, **options):
        self.warm_up = warm_up
        self.history = []
        self.steps = {}
        app = make_app(self.steps)

        def behind_a_network(msg, context):
            if on_plan is not None:
                on_plan(f"client-{context.node_config['partition-id']}", Manifest.from_content(msg.content).plan, msg)
            return app(msg, context)

        def spoil(node, message, reply):
            if on_reply is None or reply.has_error():
                return reply
            return on_reply(f"client-{node.config['partition-id']}", Header.from_content(reply.content), reply)

        strategy = MethodStrategy(
            FreezingWithControl(warm_up), model=BLOCKS, deterministic=True, on_round=self.history.append,
            **{"fraction_evaluate": 0, **options},
        )  # fmt: skip
        grid = InProcessGrid([Node(behind_a_network, {"partition-id": k}) for k in range(CLIENTS)], spoil=spoil)
        initial = ArrayRecord({name: Array(array) for name, array in RAW.items()})
        try:
            self.result = strategy.start(grid, initial, num_rounds=rounds, timeout=timeout, train_config=train_config)
        finally:  # the cache is looked through at every write: of a thousand runs it must not keep all
            shutil.rmtree(default_root(), ignore_errors=True)

    def check(self):
        """The model is the mean of who was merged; in the last round that is everybody, and nobody's state is lost."""
        model, control = LAYOUT.split(RAW), CONTROL
        merged = dict.fromkeys(range(CLIENTS), 0)
        for report in self.history:
            clients = [int(name.removeprefix("client-")) for name in report.replied]
            weights = [client + 1 for client in clients]
            names = LAYOUT.names if report.round <= self.warm_up else VALUE
            model = {**model, **mean_of([trained(model, names, c, report.round) for c in clients], weights)}
            control = mean_of([trained(control, VALUE, c, report.round) for c in clients], weights)
            assert report.train_metrics == pytest.approx(
                {"num-examples": sum(weights), "loss": len(clients) / sum(weights)}
            )
            for client in clients:
                assert self.steps[client, report.round] == merged[client], f"client-{client}'s personal state"
                merged[client] += 1
        raw = LAYOUT.join(model)
        assert set(self.result.arrays) == set(raw)
        for name, array in self.result.arrays.items():
            np.testing.assert_allclose(array.numpy(), raw[name], rtol=1e-6, atol=1e-6)
        last = self.history[-1]
        assert (last.replied, last.refused, last.lost) == (EVERYBODY, [], [])


def no_result(report, client):
    """Why this client, and it alone, gave no result in a round."""
    ((name, reason),) = report.refused + report.lost
    assert name == client and reason
    assert report.replied == [other for other in EVERYBODY if other != client]
    return reason


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    logging.disable(logging.CRITICAL)  # every mutation is logged, with its reason
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class Mutation:
    """What happens to one client's message or reply in one round."""

    kind: str
    seed: int
    client: str
    round: int
    warm_up: int
    """0: the frozen block goes down in round 1 and is kept after it. 1: it is trained in round 1 and goes down again
    in round 2."""
    again: bool = False
    """Whether what is sent again in the same round is changed too."""

    @property
    def rng(self):
        return random.Random(self.seed)


def mutations(kinds, *, again=False):
    return st.builds(
        Mutation,
        kind=st.sampled_from(sorted(kinds)),
        seed=st.integers(0, 2**32 - 1),
        client=st.sampled_from(EVERYBODY),
        round=st.integers(1, 2),
        warm_up=st.integers(0, 1),
        again=st.booleans() if again else st.just(False),
    )


def two_of_each(kinds):
    """Two fixed mutations of each kind; the many at random are in the long tests."""
    fixed = [("client-1", 2, 1, True), ("client-2", 1, 0, False)]
    return pytest.mark.parametrize(
        "mutation",
        [
            pytest.param(Mutation(kind, seed, client, round, warm_up, again), id=f"{kind} in round {round}")
            for kind in kinds
            for seed, (client, round, warm_up, again) in enumerate(fixed)
        ],
    )


def copied(content):
    return RecordDict({name: record.copy() for name, record in content.items()})


# ---- bytes, JSON and arrays that are changed -------------------------------------------------------------------------


def flipped(data, rng):
    changed = bytearray(data)
    for bit in rng.sample(range(8 * len(changed)), rng.randint(1, min(8, 8 * len(changed)))):
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def changed_bytes(data, rng):
    cut = rng.randrange(len(data))
    other = rng.randbytes(rng.randint(1, 20))
    return rng.choice([
        flipped(data, rng), flipped(data, rng), data[:cut], data[cut + 1 :], data[:cut] + other + data[cut:],
        other, b"", data[::-1], rng.randbytes(len(data)), zlib.compress(data), decompressed(data, 10**9),
    ])  # fmt: skip


def to_json(data):
    return json.loads(decompressed(data, 10**9))


def to_bytes(value):
    return compressed(to_text(value))


JUNK = (
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "x", "0", "all",
    "model", "control", "embed", "client-0", "client-2", "train", "introduce", "config", "..", "/", "\0", "\ud800", "*",
    "f" * 32, "é" * 300, [], {}, [[]], {"": 0}, {"x": [1]}, [0], [-1], [10**9], ["embed"], [0, 0], [None],
)  # fmt: skip


def places(value):
    """(container, key) of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def nudged(value, rng):
    """Something like this value, and not it."""
    match value:
        case bool():
            return not value
        case int():
            return value + rng.choice((-1, 1))
        case float():
            return value * 1.5
        case str() if value:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice("ab01") + value[at + 1 :]
        case list() if value:
            return rng.choice([value[:-1], value[1:], value[::-1], value + value[:1]])
    return rng.choice(JUNK)


def altered(value, rng, fields=None):
    """A JSON object with something changed in one of its fields, as text that differs."""
    while True:
        new = copy.deepcopy(value)
        field = rng.choice(sorted(fields or new))
        container, key = rng.choice([(new, field), *places(new[field])])
        match rng.choice(["nudge", "nudge", "junk", "delete", "twin", "swap"]):
            case "nudge":
                container[key] = nudged(container[key], rng)
            case "junk":
                container[key] = copy.deepcopy(rng.choice(JUNK))
            case "delete":
                del container[key]
            case "twin" if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case "swap":
                other, where = rng.choice([(new, field), *places(new[field])])
                container[key], other[where] = copy.deepcopy(other[where]), copy.deepcopy(container[key])
        if json.dumps(new) != json.dumps(value):
            return new


def with_data(array, data):
    return Array(dtype="uint8", shape=(len(data),), stype=array.stype, data=data)


def changed_array(array, rng):
    data = array.data
    return rng.choice([
        with_data(array, flipped(data, rng)), with_data(array, flipped(data, rng)), with_data(array, data[::-1]),
        with_data(array, data[: rng.randrange(len(data))]), with_data(array, data + rng.randbytes(rng.randint(1, 9))),
        with_data(array, rng.randbytes(len(data))), with_data(array, b""), with_data(array, bytes(len(data))),
        Array("uint8", array.shape, rng.choice(["numpy.ndarray", "", "x"]), data),
    ])  # fmt: skip


def an_array(content, rng):
    return rng.choice(list(content[PARTS]))


def change_array(content, rng):
    name = an_array(content, rng)
    old = content[PARTS][name]
    new = old
    while (new.data, new.stype) == (old.data, old.stype):
        new = changed_array(old, rng)
    content[PARTS][name] = new


def relabel_array(content, rng):
    name = an_array(content, rng)
    array = content[PARTS][name]
    dtype, shape = rng.choice([("float32", (len(array.data) // 4,)), ("x", array.shape), ("uint8", ()),
                               ("uint8", (2**62, 2**62)), ("uint8", (-1,))])  # fmt: skip
    content[PARTS][name] = Array(dtype, shape, array.stype, array.data)


def swap_arrays(content, rng):
    parts = content[PARTS]
    while len(parts) > 1:
        one, other = rng.sample(list(parts), 2)
        if parts[one].data != parts[other].data:
            parts[one], parts[other] = parts[other], parts[one]
            return
        if len(parts) == 2:
            break
    change_array(content, rng)


def remove_array(content, rng):
    del content[PARTS][an_array(content, rng)]


def rename_array(content, rng):
    name = an_array(content, rng)
    content[PARTS][rng.choice([name + "0", "", "99", "x"])] = content[PARTS].pop(name)


def add_array(content, rng):
    content[PARTS][rng.choice(["99", "x", ""])] = content[PARTS][an_array(content, rng)]


def renamed(name, to):
    def rename(content, rng):
        content[to] = content.pop(name)

    return rename


def removed(name):
    def remove(content, rng):
        del content[name]

    return remove


def replaced(name, *records):
    def replace(content, rng):
        content[name] = rng.choice(records).copy()

    return replace


def any_bytes(key, content, rng):
    old = content[RECORD][key]
    content[RECORD][key] = next(new for _ in range(100) if (new := changed_bytes(old, rng)) != old)


def any_field(key, *fields):
    def change(content, rng):
        value = to_json(content[RECORD][key])
        content[RECORD][key] = to_bytes(altered(value, rng, fields or None))

    return change


# ---- messages on their way to a client -------------------------------------------------------------------------------


manifest_bytes, manifest_field = partial(any_bytes, "manifest"), partial(any_field, "manifest")


def manifest_layout_names(content, rng):
    value = to_json(content[RECORD]["manifest"])
    raw = value["layout"]["raw"]
    one, other = rng.sample(range(len(raw)), 2)
    raw[one][0], raw[other][0] = raw[other][0], raw[one][0]
    content[RECORD]["manifest"] = to_bytes(value)


def manifest_digests(content, rng):
    value = to_json(content[RECORD]["manifest"])
    parcel = rng.choice(value["parcels"])
    parcel["digests"] = base64.b64encode(flipped(base64.b64decode(parcel["digests"]), rng)).decode()
    content[RECORD]["manifest"] = to_bytes(value)


def manifest_type(content, rng):
    content[RECORD] = ConfigRecord({"manifest": rng.choice(["text", 1, 0.5, True, [1, 2], [b"x"], b""])})


PLANS = {
    "manifest: bytes": manifest_bytes,
    "manifest: anything": manifest_field(),
    "manifest: whom it is for": manifest_field("experiment", "plan", "nonce"),
    "manifest: what to do": manifest_field("record", "plan"),
    "manifest: parcels": manifest_field("parcels"),
    "manifest: layout": manifest_field("layout"),
    "manifest: names swapped": manifest_layout_names,
    "manifest: digests": manifest_digests,
    "manifest: personal state": manifest_field("current", "kept"),
    "manifest: type": manifest_type,
    "array: changed": change_array,
    "array: label": relabel_array,
    "array: swapped": swap_arrays,
    "array: removed": remove_array,
    "array: renamed": rename_array,
    "array: added": add_array,
    "record: manifest removed": removed(RECORD),
    "record: manifest renamed": renamed(RECORD, "tepa1"),
    "record: manifest replaced": replaced(RECORD, ConfigRecord(), ArrayRecord(), MetricRecord({"manifest": 1})),
    "record: arrays removed": removed(PARTS),
    "record: arrays renamed": renamed(PARTS, "tepal_parts"),
    "record: arrays replaced": replaced(PARTS, ConfigRecord({"0": b""}), ArrayRecord(), MetricRecord({"0": 1})),
    "record: config removed": removed("config"),
    "record: config renamed": renamed("config", "confjg"),
    "record: config replaced": replaced("config", ConfigRecord(), ArrayRecord(), MetricRecord({"lr": 1})),
    "message: of an earlier round": None,
    "message: of another client": None,
}


def run_with_changed_message(mutation):
    """Checks a run in which a client's message is changed; returns what came of it."""
    rng = mutation.rng
    genuine = {}
    manifests_that_arrived = set()

    def on_plan(name, plan, msg):
        if plan.action != "train":
            return
        first = (name, plan.round) not in genuine
        if first:
            genuine[name, plan.round] = copied(msg.content)
        if (name, plan.round) != (mutation.client, mutation.round) or not (first or mutation.again):
            return
        before = msg.content[RECORD]["manifest"]
        if (change := PLANS[mutation.kind]) is not None:
            change(msg.content, rng)
        elif mutation.kind == "message: of an earlier round" and plan.round > 1:
            msg.content = copied(genuine[name, rng.randint(1, plan.round - 1)])
        else:
            others = [content for (other, r), content in genuine.items() if other != name and r == plan.round]
            if others:
                msg.content = copied(rng.choice(others))
            else:
                manifest_bytes(msg.content, rng)
        record = msg.content.get(RECORD, {})
        manifests_that_arrived.add(record.get("manifest") == before)

    run = Run(on_plan, warm_up=mutation.warm_up, rounds=mutation.round + 1)
    report = run.history[mutation.round - 1]
    if mutation.client in report.replied:
        assert manifests_that_arrived == {True} and not report.refused and not report.lost
        assert report.resent or mutation.kind in ("array: label", "array: added"), "the client had what it needs"
    else:
        no_result(report, mutation.client)
    run.check()
    return "healed" if mutation.client in report.replied else "no result"


@two_of_each(PLANS)
def test_a_message_that_is_changed_on_its_way_to_a_client_is_healed_or_costs_only_its_reply(mutation):
    run_with_changed_message(mutation)


@pytest.mark.long
@settings(max_examples=450)
@given(mutations(PLANS, again=True))
def test_messages_that_are_changed_at_random_are_healed_or_cost_only_their_reply(mutation):
    event(run_with_changed_message(mutation))


# ---- answers on their way back ---------------------------------------------------------------------------------------


header_bytes, header_field = partial(any_bytes, "header"), partial(any_field, "header")


def header_type(content, rng):
    content[RECORD] = ConfigRecord({"header": rng.choice(["text", 1, 0.5, True, [1, 2], [b"x"], b""])})


def forged(change):
    """As `change` does, by one who knows how a checksum is made."""

    def forge(content, rng):
        change(content, rng)
        value = to_json(content[RECORD]["header"])
        content[RECORD]["header"] = to_bytes({**value, "checksum": checksum_of(value, content)})

    return forge


def checksum_of(value, content):
    """The checksum of an answer whose header is this JSON."""
    readable = {**value, "checksum": ""}
    header = Header.from_content({RECORD: ConfigRecord({"header": to_bytes(readable)})})
    return header.checksum_of(content)


def header_value(field, *values):
    def change(content, rng):
        value = to_json(content[RECORD]["header"])
        others = [other for other in values if other != value[field]]
        content[RECORD]["header"] = to_bytes({**value, field: rng.choice(others)})

    return change


def another_length(content, rng):
    tree = an_array(content, rng)
    array = content[PARTS][tree]
    data = array.data
    others = data[: rng.randrange(len(data))], data + rng.randbytes(rng.randint(1, 9)), b"", 2 * data
    content[PARTS][tree] = with_data(array, rng.choice(others))


def another_tree(content, rng):
    rng.choice([add_array, remove_array, rename_array])(content, rng)


def not_finite(content, rng):
    tree = rng.choice(["model", "control"])
    data = content[PARTS][tree].data
    names = next(names for names in (VALUE, LAYOUT.names) if len(data) == LAYOUT.nbytes(names))
    values = unpack(content[PARTS][tree], LAYOUT.shaped(names))
    name = rng.choice([name for name, array in values.items() if array.dtype.kind == "f"])
    values[name] = values[name].copy()
    values[name].flat[rng.randrange(values[name].size)] = rng.choice([np.nan, np.inf, -np.inf])
    content[PARTS][tree] = pack(values, names)


def metric(name, *values):
    def change(content, rng):
        content["metrics"][name] = rng.choice([value for value in values if value != content["metrics"][name]])

    return change


def metric_removed(content, rng):
    del content["metrics"][rng.choice(["num-examples", "loss"])]


def metric_added(content, rng):
    content["metrics"][rng.choice(["", "test-examples", "received-accuracy", "x"])] = rng.choice([0, 0.5, -1, 10**9])


WEIGHTS = (0, -1, 1.5, -(2.0**60), 2.0**60, 10**16, 1e300, float("nan"), float("inf"), [1], [], [1.0, 2.0])

REPLIES = {
    "header: bytes": header_bytes,
    "header: anything": header_field(),
    "header: who and when": header_field("experiment", "client", "round", "action", "answers", "checksum"),
    "header: claims": header_field("holds", "missing", "refused", "notes", "metrics"),
    "header: type": header_type,
    "array: changed": change_array,
    "array: label": relabel_array,
    "array: swapped": swap_arrays,
    "array: removed": remove_array,
    "array: renamed": rename_array,
    "array: added": add_array,
    "metrics: weight": metric("num-examples", *WEIGHTS, 4, 100, 10**15, 1.0, 2.0, 3.0),
    "metrics: loss": metric("loss", 0.0, 1, -1.0, 1e300, float("nan"), float("inf"), [0.5], 10**9),
    "metrics: one removed": metric_removed,
    "metrics: one added": metric_added,
    "record: header removed": removed(RECORD),
    "record: header renamed": renamed(RECORD, "tepa1"),
    "record: header replaced": replaced(RECORD, ConfigRecord(), ArrayRecord(), MetricRecord({"header": 1})),
    "record: arrays removed": removed(PARTS),
    "record: arrays renamed": renamed(PARTS, "tepal_parts"),
    "record: arrays replaced": replaced(PARTS, ConfigRecord({"model": b""}), ArrayRecord(), MetricRecord({"x": 1})),
    "record: metrics removed": removed("metrics"),
    "record: metrics renamed": renamed("metrics", "metr1cs"),
    "record: metrics replaced": replaced("metrics", ConfigRecord({"num-examples": 2}), ArrayRecord(), MetricRecord()),
    "forged: round": forged(header_value("round", 0, 1, 2, 3, 10**30, -1)),
    "forged: client": forged(header_value("client", *EVERYBODY, "", "x", "client-1 ", "\ud800")),
    "forged: experiment": forged(header_value("experiment", "", "x", "../x")),
    "forged: action": forged(header_value("action", "", "evaluate", "introduce", "x")),
    "forged: exchange": forged(header_value("answers", "", "0" * 32, "x")),
    "forged: refusal": forged(header_value("refused", "no", " ", "\n", "\ud800", "x" * 10**5)),
    "forged: lengths": forged(another_length),
    "forged: trees": forged(another_tree),
    "forged: not finite": forged(not_finite),
    "forged: arrays removed": forged(remove_array),
    "forged: arrays replaced": forged(replaced(PARTS, ConfigRecord({"model": b""}), ArrayRecord())),
    "forged: weight": forged(metric("num-examples", *WEIGHTS)),
    "forged: no weight": forged(lambda content, rng: content["metrics"].pop("num-examples")),
    "content: empty": lambda content, rng: [content.pop(name) for name in list(content)],
    "content: other": None,
    "content: of an earlier round": None,
    "content: of another client": None,
    "error": None,
}
OTHER_CONTENTS = (
    {"arrays": ArrayRecord({"embed": Array(np.ones(3))}), "metrics": MetricRecord({"num-examples": 3})},
    {RECORD: ConfigRecord({"manifest": to_bytes({})})},
    {RECORD: ConfigRecord({"header": to_bytes([])})},
    {PARTS: ArrayRecord(), "metrics": MetricRecord()},
)
REASONS = (None, "", " \n", "no", "\ud800" * 99)
ERRORS = tuple(Error(code, reason) for code in (0, 1, 2, 3, 99, -1) for reason in REASONS)


def says_the_same(content, other):
    """Whether what counts of two answers is the same: then nothing was changed."""
    try:
        if Header.from_content(content) != Header.from_content(other):
            return False
    except ValueError:
        return False
    records = [{n: r for n, r in c.items() if n == PARTS or isinstance(r, MetricRecord)} for c in (content, other)]
    return [repr(items) for items in records[0].items()] == [repr(items) for items in records[1].items()]


def run_with_changed_answer(mutation):
    """Checks a run in which a client's answer is changed; returns what came of it."""
    rng = mutation.rng
    genuine = {}
    unchanged = []

    def on_reply(name, header, reply):
        if header.action != "train":
            return reply
        genuine[name, header.round] = before = copied(reply.content)
        if (name, header.round) != (mutation.client, mutation.round):
            return reply
        if (change := REPLIES[mutation.kind]) is not None:
            change(reply.content, rng)
        elif mutation.kind == "error":
            return Message(rng.choice(ERRORS), reply_to=reply)
        elif mutation.kind == "content: of an earlier round" and header.round > 1:
            reply.content = copied(genuine[name, rng.randint(1, header.round - 1)])
        elif mutation.kind == "content: of another client" and len(genuine) % CLIENTS != 1:
            reply.content = copied(next(c for (n, r), c in genuine.items() if n != name and r == header.round))
        else:
            reply.content = copied(rng.choice(OTHER_CONTENTS))
        if says_the_same(reply.content, before):
            unchanged.append(reply)
        return reply

    run = Run(on_reply=on_reply, warm_up=mutation.warm_up, rounds=mutation.round + 1)
    report = run.history[mutation.round - 1]
    if unchanged:
        assert report.replied == EVERYBODY
    else:
        no_result(report, mutation.client)
    run.check()
    return "says the same" if unchanged else "no result"


@two_of_each(REPLIES)
def test_an_answer_that_is_changed_on_its_way_is_never_merged(mutation):
    run_with_changed_answer(mutation)


@pytest.mark.long
@settings(max_examples=450)
@given(mutations(REPLIES))
def test_answers_that_are_changed_at_random_are_never_merged(mutation):
    event(run_with_changed_answer(mutation))


CLAIMS = {
    "holds": header_value("holds", [], ["0" * 32], ["", "x"] * 1000, [LAYOUT.names[0]], ["é\ud800"], ["ab" * 16] * 10),
    "missing": header_value(
        "missing", {"0" * 32: ["embed"]}, {"": []}, {"x": []}, {"x": ["abc"]}, {"\ud800": ["\ud800"] * 1000}
    ),
    "notes": header_value("notes", ["x" * 10**6], ["\ud800"], ["\x1b[2J"], [""] * 100),
}


def run_with_claims(mutation):
    """Sealed by one who knows how: what a client says it holds and lacks is believed, and put right when it shows."""
    rng = mutation.rng
    forgeries = []

    def on_reply(name, header, reply):
        if (name, header.round, header.action) == (mutation.client, mutation.round, "train") and not forgeries:
            forgeries.append(forged(CLAIMS[mutation.kind]))
            forgeries[0](reply.content, rng)
        return reply

    run = Run(on_reply=on_reply, warm_up=mutation.warm_up, rounds=mutation.round + 1)
    assert forgeries
    assert all(report.replied == EVERYBODY for report in run.history)
    run.check()


@two_of_each(CLAIMS)
def test_what_a_client_claims_of_itself_costs_bytes_and_never_the_model(mutation):
    run_with_claims(mutation)


@pytest.mark.long
@settings(max_examples=100)
@given(mutations(CLAIMS))
def test_claims_at_random_cost_bytes_and_never_the_model(mutation):
    run_with_claims(mutation)


# ---- what chance does not find ---------------------------------------------------------------------------------------


def first_of(client, server_round, action, change, seed=0):
    """`on_plan` or `on_reply` that changes the first message of this action to a client, or its answer, in a round."""
    seen = []

    def spoil(name, about, message):
        if (name, about.round, about.action) == (client, server_round, action) and not seen:
            seen.append(name)
            change(message.content, random.Random(seed))
        return message

    return spoil


def test_an_answer_that_never_comes_is_lost_at_the_deadline():
    def on_reply(name, header, reply):
        return None if (name, header.round, header.action) == ("client-1", 1, "train") else reply

    run = Run(on_reply=on_reply, timeout=3)
    assert "did not answer" in no_result(run.history[0], "client-1")
    run.check()


def test_an_answer_with_neither_content_nor_error_is_refused():
    def on_reply(name, header, reply):
        if (name, header.round, header.action) == ("client-1", 1, "train"):
            reply.__dict__["_content"] = None
        return reply

    run = Run(on_reply=on_reply)
    no_result(run.history[0], "client-1")
    run.check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["manifest: bytes", "manifest: parcels", "manifest: digests", "array: changed",
                                  "record: manifest removed", "record: arrays removed"])  # fmt: skip
def test_a_changed_message_that_asks_for_a_score_costs_at_most_that_score(kind, seed):
    run = Run(on_plan=first_of("client-2", 1, "evaluate", PLANS[kind], seed), fraction_evaluate=1)
    report = run.history[0]
    lost = report.refused + report.lost
    healed = kind in ("array: changed", "record: arrays removed") and report.resent
    assert len(lost) == (0 if healed else 1)
    assert all(name == "client-2" and reason for name, reason in lost)
    assert report.evaluate_metrics == {"num-examples": CLIENTS - len(lost), "accuracy": 0.5}
    run.check()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["header: bytes", "header: who and when", "header: claims", "metrics: weight",
                                  "record: header removed", "record: metrics removed", "content: empty",
                                  "forged: round", "forged: client", "forged: weight", "forged: refusal"])  # fmt: skip
def test_a_changed_score_is_refused(kind, seed):
    run = Run(on_reply=first_of("client-2", 1, "evaluate", REPLIES[kind], seed), fraction_evaluate=1)
    ((name, reason),) = run.history[0].refused
    assert name == "client-2" and reason
    assert run.history[0].evaluate_metrics == {"num-examples": 2, "accuracy": 0.5}
    run.check()


@pytest.mark.parametrize(
    ("kind", "needed"),
    [("header: bytes", 2), ("header: who and when", 2), ("header: claims", 2), ("header: bytes", 3)],
)
def test_a_client_whose_introduction_was_changed_on_its_way_is_asked_again(kind, needed):
    """It did not say that it cannot take part; what came said nothing."""
    run = Run(on_reply=first_of("client-1", 1, "introduce", REPLIES[kind]), min_available_nodes=needed)
    run.check()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_introduction_that_fails_leaves_the_others_to_train(error):
    def on_reply(name, header, reply):
        return Message(error, reply_to=reply) if (name, header.action) == ("client-1", "introduce") else reply

    run = Run(on_reply=on_reply)
    assert "client-1" not in run.history[0].asked
    assert len(run.history[0].refused + run.history[0].lost) == 1
    assert [report.replied for report in run.history] == [["client-0", "client-2"]] * 2


def test_metrics_outside_of_the_checksum_do_not_outweigh_those_in_it():
    """A mod may add a record of its own to an answer; neither weight nor metrics of the app may change by it."""

    def more(content, rng):
        content["timing"] = MetricRecord({"num-examples": 10**6, "loss": 99.0})

    run = Run(on_reply=first_of("client-1", 1, "train", more))
    assert run.history[0].replied == EVERYBODY
    run.check()


@pytest.mark.parametrize("change", [{"server-round": 2}, {"lr": 9.0}, {"more": 1}])
def test_an_answer_to_changed_settings_is_not_merged(change):
    """What a client makes with another learning rate than it was sent is not what it was asked for."""
    spoil = first_of("client-1", 1, "train", lambda content, rng: content["config"].update(change))
    run = Run(on_plan=spoil, train_config=ConfigRecord({"lr": 0.1}))
    no_result(run.history[0], "client-1")
    run.check()


KIB, MIB = 1 << 10, 1 << 20
HOSTILE = {
    "deep": ("missing", [("[", MIB), ("]", MIB)]),
    "many entries": ("missing", [('{"model":[["x"]', 1), (',["x"]', 100 * KIB), ("]}", 1)]),
    "many objects": ("missing", [("[{}", 1), (",{}", 15 * MIB), ("]", 1)]),
    "many lists": ("holds", [("[[]", 1), (",[]", 15 * MIB), ("]", 1)]),
    "many texts": ("notes", [('["a"', 1), (',"a"', 12 * MIB), ("]", 1)]),
    "more than the limit": ("refused", [('"', 1), ("x", 200 * MIB), ('"', 1)]),
    "long numbers": ("round", [("1", MIB)]),
}
"""Field of a header, and what is said there: JSON as pieces of text, each so many times."""


def hostile_header(kind):
    """The header's bytes are made without ever having them as text: that would need the memory that is measured."""
    field, pieces = HOSTILE[kind]

    def change(content, rng):
        others = {name: value for name, value in to_json(content[RECORD]["header"]).items() if name != field}
        squeeze = zlib.compressobj()
        small = []
        for text, times in [(json.dumps(others)[:-1], 1), (f',"{field}":', 1), *pieces, ("}", 1)]:
            at_once = min(times, KIB)
            small += [squeeze.compress((text * at_once).encode()) for _ in range(times // at_once)]
        content[RECORD]["header"] = b"".join([*small, squeeze.flush()])

    return change


def memory_of(action):
    """Bytes by which a process grows while it does this; in a child, whose peak is its own. Raises what it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            action()
            os.write(writing, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode())
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-2000:])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.isdigit(), said
    return 1024 * int(said)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_and_does_not_fill_the_memory(kind):
    def run():
        run = Run(on_reply=first_of("client-1", 1, "train", hostile_header(kind)))
        no_result(run.history[0], "client-1")
        run.check()

    assert memory_of(run) < 256 * MIB
