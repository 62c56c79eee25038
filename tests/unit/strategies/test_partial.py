"""Partial training: what clients got, trained and returned, looked at in every message."""

import re

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from tepal.exchange import Encoding, PartialExchange
from tepal.exchange.manifest import RECORD, Manifest
from tepal.models.blocks import canonical_state, find_blocks
from tepal.strategies import FedAvg, FedEnsemble, MethodError, PartialTraining, join_modes
from tepal.strategies.in_process import InProcessGrid, Node
from tests.apps import quickstart_app
from tests.unit.strategies.test_fedfrozen import entries, make_fused, make_split

ROUNDS, CLIENTS = 3, 3
# Patterns, and the same as a regular expression over names of entries.
CASES = {
    "head": ("head.*", r"head\..*"),
    "heads of attention": ("head.*, *.value.weight", r"head\..*|.*\.value\.weight"),
    "rows of a fused tensor": (["*.qkv.weight:v", "head.bias"], r".*\.qkv\.weight:v|head\.bias"),
}


class Watch(PartialExchange):
    """The exchange, with what went over the wire, and the models that the app was given and handed in."""

    def __init__(self, make):
        super().__init__()
        self.make, self.trained, self.sent, self.returned = make, [], [], []

    def __call__(self, msg, context, call_next):
        client = int(context.node_config["partition-id"])

        def app(msg, context):
            reply = call_next(msg, context)
            if "arrays" in reply.content:
                came, went = (entries(each.content["arrays"], self.make) for each in (msg, reply))
                examples = reply.content["metrics"]["num-examples"]
                self.trained.append((int(msg.metadata.group_id), client, came, went, examples))
            return reply

        if RECORD in msg.content:
            manifest = Manifest.from_content(msg.content)
            names = {name for parcel in manifest.parcels for name in parcel.sent}
            self.sent.append((manifest.plan.round, client, manifest.plan.action, names))
            if manifest.plan.action == "train":
                self.returned.append({name for names in manifest.plan.returns.values() for name in names})
        return super().__call__(msg, context, app)


def run(strategy, make, *, rounds=ROUNDS, on_round=None, initial=None):
    """(start, the server's entries after each round, what was watched)."""
    watch, states = Watch(make), {}
    app = quickstart_app(make, [watch], calls_apply_plan=True)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(CLIENTS)])
    strategy.on_round = on_round(grid, app) if on_round else strategy.on_round
    model = make()
    strategy.start(
        grid,
        initial or ArrayRecord(model.state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.02}),
        evaluate_fn=None if initial else lambda number, arrays: states.update({number: entries(arrays, make)}),
    )
    return {name: tensor.numpy() for name, tensor in canonical_state(model).items()}, states, watch


@pytest.mark.parametrize("case", CASES)
def test_what_matches_trains_and_travels_and_the_rest_goes_once_and_stays(case):
    patterns, expression = CASES[case]
    make = make_fused if "fused" in case else make_split
    start, states, watch = run(PartialTraining(trains=patterns, model=make()), make)
    trains = {name for name in start if re.fullmatch(expression, name)}
    frozen = start.keys() - trains
    assert trains and frozen
    for client in range(CLIENTS):
        first, *later = [names for _, who, action, names in watch.sent if who == client and names]
        assert first == start.keys()
        assert later and all(names == trains for names in later)
    assert len(watch.returned) == ROUNDS * CLIENTS and all(names == trains for names in watch.returned)
    assert len(watch.trained) == ROUNDS * CLIENTS
    for number, _, came, went, _ in watch.trained:
        for name in start:
            assert came[name].tobytes() == states[number - 1][name].tobytes()
            assert (went[name].tobytes() == came[name].tobytes()) == (name in frozen), name
    for number in range(1, ROUNDS + 1):
        replies = [(went, examples) for of, _, _, went, examples in watch.trained if of == number]
        total = sum(examples for _, examples in replies)
        for name in start:
            if name in frozen:
                assert states[number][name].tobytes() == start[name].tobytes()
            else:
                mean = sum(went[name].astype(float) * examples / total for went, examples in replies)
                np.testing.assert_allclose(states[number][name], mean, rtol=1e-5, atol=1e-7)


def test_the_frozen_part_is_exact_whatever_the_encoding():
    strategy = PartialTraining(trains="head.*", model=make_split(), encoding=Encoding(down="int8"))
    start, _, watch = run(strategy, make_split)
    inexact = set()
    for _, _, came, _, _ in watch.trained:
        inexact |= {name for name in start if name.startswith("head.") and (came[name] != start[name]).any()}
        assert all(came[name].tobytes() == start[name].tobytes() for name in start if not name.startswith("head."))
    assert "head.weight" in inexact


def test_a_client_that_joins_late_gets_the_frozen_part_then():
    def join(grid, app):
        return lambda report: report.round == 1 and grid.add(Node(app, {"partition-id": CLIENTS}))

    start, _, watch = run(PartialTraining(trains="head.*", model=make_split()), make_split, on_round=join)
    got = [(number, names == start.keys()) for number, who, _, names in watch.sent if who == CLIENTS and names]
    assert got[0] == (2, True) and len(got) > 1 and not any(whole for _, whole in got[1:])


def test_all_entries_are_fedavg_to_the_bit():
    ends = [run(strategy, make_split)[1] for strategy in (PartialTraining(trains="*"), FedAvg())]
    for number in range(ROUNDS + 1):
        for name, array in ends[0][number].items():
            assert array.tobytes() == ends[1][number][name].tobytes()


def test_the_names_of_a_block_are_patterns():
    model = make_split()
    strategy = PartialTraining(trains=find_blocks(model).head, model=model)
    _, _, watch = run(strategy, make_split, rounds=1)
    assert all(names == {"head.weight", "head.bias"} for names in watch.returned)


def test_the_modes_of_an_ensemble_may_train_in_part():
    member = PartialTraining(trains="head.*", model=make_split())
    modes = join_modes(ArrayRecord(make_split().state_dict()) for _ in range(2))
    _, _, watch = run(FedEnsemble(modes=2, member=member), make_split, rounds=2, initial=modes)
    assert watch.returned and all(names == {"head.weight", "head.bias"} for names in watch.returned)


@pytest.mark.parametrize("nothing", ["", " , ", []])
def test_no_pattern_is_refused(nothing):
    with pytest.raises(ValueError, match=r"trains is .*; it must be one or more patterns of entry names"):
        PartialTraining(trains=nothing)


def test_a_pattern_without_a_match_is_refused_with_the_names_that_there_are():
    with pytest.raises(MethodError, match=r"no entry of TinyViT matches 'haed\.\*'; its entries are .*, …"):
        run(PartialTraining(trains="head.*, haed.*", model=make_split()), make_split)
