"""Merges that do not count: the run finds who causes them, and goes on, whatever one client sends within all bounds."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange.mod import PartialExchange
from tepal.exchange.norms import SAMPLED, estimated_norms, integer_norms, squared_norms
from tepal.exchange.plan import Reply
from tepal.strategies import FedAvg, RoundFailed
from tepal.strategies.fedavg import ModelMerger
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.norms import LARGEST, UpdateNorms
from tepal.strategies.rounds.suspects import Suspects
from tests.unit.strategies.rounds.test_hostile_clients import app_of, assert_learned, figures, lies, values

LIAR = "client-1"


def typed_app(raises, steps):
    """Clients that go half the way to 1 in each entry, times its share in `steps`; integers stay as they are."""
    app = ClientApp(mods=[PartialExchange()])

    @app.train()
    def train(msg, context):
        model = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        raises(model)
        made = {
            name: a if a.dtype.kind == "i" else (a + 0.5 * steps.get(name, 1) * (1 - a)).astype(a.dtype)
            for name, a in model.items()
        }
        record = ArrayRecord({name: Array(array) for name, array in made.items()})
        return Message(
            RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 10})}), reply_to=msg
        )

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 4})}), reply_to=msg)

    return app


def run(start, change, *, raises=lambda model: None, clients=5, rounds=8, options=None, steps=None, **of_lies):
    """FedAvg from `start` with the liar's `change`: (final arrays, reports)."""
    history = []
    app = app_of(raises) if steps is None else typed_app(raises, steps)
    nodes = [Node(app, {"partition-id": k}) for k in range(clients)]
    strategy = FedAvg(on_round=history.append, **(options or {}))
    grid = InProcessGrid(nodes, spoil=lies(change, **of_lies))
    result = strategy.start(grid, ArrayRecord({n: Array(a) for n, a in start.items()}), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}, history


def start(**more):
    return {"w": np.zeros((4, 8), np.float32), "b": np.zeros(8, np.float32), **more}


# ---- the search ------------------------------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(0, 39), st.integers(0, 2**32))
def test_one_hostile_client_is_set_aside_within_three_merges(clients, hostile, seed):
    """Of attempts in one round, the third at the latest is without the client that spoils all merges it is in."""
    names = [f"client-{k}" for k in range(clients)]
    liar, suspects = names[hostile % clients], Suspects()
    ratios = dict(zip(names, np.random.default_rng(seed).uniform(0.9, 1.1, clients), strict=True))
    for _ in range(3):
        aside = suspects.set_aside(names, 1, 1)
        part = {client: ratios[client] for client in names if client not in aside}
        if liar not in part:
            return
        suspects.suspect(part, 1)
    raise AssertionError("the liar was in three merges")


def test_who_is_by_far_the_largest_is_set_aside_first_and_alone():
    suspects = Suspects()
    assert suspects.suspect({"a": 1.0, "b": 1.2, "c": 400.0, "d": 0.9}, 1) == ["c"]
    assert suspects.set_aside(["a", "b", "c", "d"], 2, 1) == ["c"]
    assert set(suspects.suspect({"a": 1.0, "b": 400.0, "d": 0.9}, 2)) > {"c"}  # it was not c, or not c alone


def test_clients_of_merges_that_count_are_cleared_and_the_others_return_by_halves():
    suspects, names = Suspects(), [f"client-{k}" for k in range(8)]
    aside = suspects.suspect(dict.fromkeys(names, 1.0), 1)
    assert len(aside) == 4 == len(suspects.set_aside(names, 2, 1))
    free = dict.fromkeys(set(names) - set(aside), 1.0)
    suspects.merged(free)
    suspects.merged(free)  # the first of the two merges is confirmed by the second
    back = suspects.set_aside(names, 3, 1)
    assert len(back) == 2 and set(back) < set(aside)
    taking_part = dict.fromkeys(set(names) - set(back), 1.0)
    suspects.merged(taking_part)
    suspects.merged(taking_part)
    assert len(suspects.set_aside(names, 4, 1)) == 1
    assert suspects.set_aside(names, 4, 8) == []  # the round needs all of them


def test_a_checkpoint_has_what_is_needed_to_go_on():
    suspects, names = Suspects(), [f"client-{k}" for k in range(6)]
    suspects.merged(dict.fromkeys(names, 1.0))
    aside = suspects.suspect_last(4)
    resumed = Suspects()
    resumed.restore(suspects.to_facts())
    assert resumed.set_aside(names, 5, 1) == aside == suspects.set_aside(names, 5, 1)
    Suspects().restore({})  # of an earlier version


# ---- through runs ----------------------------------------------------------------------------------------------------


def only(name, value):
    return values(lambda each, array: np.full_like(array, value) if each == name else array)


def test_a_poisonous_entry_within_all_bounds_does_not_end_a_run():
    """A variance below zero in one small entry: no client can train from the mean. No norm shows whose it is."""

    def negative(model):
        if model["variance"].min() < 0:
            raise FloatingPointError("the square root of a negative variance")

    initial = start(variance=np.full(1, 0.5, np.float32))
    arrays, history = run(initial, only("variance", -40.0), raises=negative, rounds=16)
    assert len(history) == 16 and arrays["variance"].min() > 0
    assert_learned({"w": arrays["w"]}, 16, tolerance=0.05)
    returned = [report.round for report in history if "the run returns" in dict(report.notes).get("server", "")]
    assert 1 <= len(returned) <= 6
    honest = [client for report in history[8:] for client in report.left_out if client != LIAR]
    assert len(honest) <= 8  # of 32 places of honest clients: who was set aside with the liar returns


def test_the_only_client_that_can_train_from_a_poisoned_model_does_not_train_alone():
    """The liar's own app accepts its model, so that a round after the poison has one good reply."""

    def raises(model):
        if np.abs(model["w"]).max() > 20 and not raises.of_liar:
            raise FloatingPointError("local training diverged")

    raises.of_liar = False
    poison = values(lambda name, a: 400 * a)

    def change(content, header):
        poison(content, header)

    history = []
    liar = app_of()
    nodes = [Node(liar if k == 1 else app_of(raises), {"partition-id": k}) for k in range(5)]
    grid = InProcessGrid(nodes, spoil=lies(change))
    result = FedAvg(on_round=history.append).start(
        grid, ArrayRecord({n: Array(a) for n, a in start().items()}), num_rounds=6
    )
    assert "the run returns to the one before it, and goes on without client-1" in dict(history[1].notes)["server"]
    assert_learned({"w": result.arrays["w"].numpy()}, 5, tolerance=0.05)


@pytest.mark.parametrize("robust", ["none", "clip", "krum", "rfa"])
def test_integers_are_bounded(robust):
    """An index far beyond what the others return: the mean of it would be an index out of range."""

    def in_range(model):
        if model["positions"].max() > 7:
            raise IndexError("index out of range in self")

    initial = start(positions=np.arange(8))
    change = values(lambda name, a: a + 10**12 if name == "positions" else a)
    arrays, history = run(initial, change, raises=in_range, steps={}, options={"robust": robust})
    assert len(history) == 8 and arrays["positions"].max() <= 7
    assert all("client-1" in dict(report.refused) for report in history[:3])
    assert_learned({"w": arrays["w"]}, 8)


def test_values_that_keep_their_norm_are_seen_as_well():
    """−w in place of w, when updates have become small beside the values: the norm of the values says nothing."""
    initial = {"w": np.full((600, 600), 1.1, np.float32)}
    arrays, history = run(initial, values(lambda name, a: -a), clients=12, rounds=4, steps={"w": 0.001})
    assert all(LIAR in dict(report.refused) for report in history[:3])
    np.testing.assert_allclose(arrays["w"], 1.1, atol=0.01)


def test_the_first_replies_of_a_run_are_not_judged_among_themselves():
    """Two of twenty clients answer first, and say the same."""
    history = []
    order = [1, 2, 0, *range(3, 20)]
    grid = InProcessGrid(
        [Node(app_of(), {"partition-id": k}) for k in order], spoil=lies(values(lambda n, a: a + 1e30), clients=(1, 2))
    )
    initial = ArrayRecord({n: Array(a) for n, a in start().items()})
    result = FedAvg(on_round=history.append).start(grid, initial, num_rounds=2)
    assert set(dict(history[0].refused)) == {"client-1", "client-2"}
    assert_learned({"w": result.arrays["w"].numpy()}, 2)


def test_a_block_does_not_hide_behind_a_larger_one():
    """The updates of `b` are a ten thousandth of those of `w`; the liar's `b` is large, but not beside `w`."""
    norms = UpdateNorms({"w": ("w",), "b": ("b",)})

    def squares(**of):
        return norms.of(Reply(client="", parts={}, examples=1, metrics={}, squares={"model": of}), "model")

    for k in range(5):
        norms.enter(f"client-{k}", squares(w=1.0, b=1e-8))
    norms.begin()
    assert norms.ratio(squares(w=1.0, b=20.0**2)) < 30 and norms.excess(squares(w=1.0, b=20.0**2)) > LARGEST
    assert norms.excess(squares(w=1.0, b=0.01**2)) <= 1.01  # a block that hardly changes may change for once


def test_a_round_without_a_merge_that_counts_leaves_the_model_as_it_is(monkeypatch):
    """All merges of the third round come out damaged: the run goes on with the fourth from the same state."""
    finish, seen = ModelMerger.finish, []

    def damaged(merger):
        state = finish(merger)
        seen.append(1)
        if 3 <= len(seen) <= 6:
            raise ArithmeticError("a merge that cannot be computed")
        return state

    monkeypatch.setattr(ModelMerger, "finish", damaged)
    arrays, history = run(start(), figures(), rounds=5)
    notes = [note for _, note in history[2].notes]
    assert notes[-1] == "no merge of this round counts, and the model stays as it is" and len(notes) == 5
    assert "ArithmeticError: a merge that cannot be computed" in notes[0]
    assert not history[2].replied and len(history) == 5
    assert_learned(arrays, 4, tolerance=0.05)


def test_a_run_without_merges_that_count_ends_with_what_was_learned(monkeypatch):
    finish, seen = ModelMerger.finish, []

    def damaged(merger):
        seen.append(1)
        if len(seen) > 2:
            raise ArithmeticError("a merge that cannot be computed")
        return finish(merger)

    monkeypatch.setattr(ModelMerger, "finish", damaged)
    with pytest.raises(RoundFailed, match=r"round 5 got no merge that counts .* cannot be computed") as failed:
        run(start(), figures(), rounds=9)
    assert_learned({"w": failed.value.result.arrays["w"].numpy()}, 2)


def test_norms_that_float64_cannot_sum_do_not_end_a_run():
    initial = {"w": np.zeros((4, 8)), "b": np.zeros(8)}
    change = values(lambda name, a: np.full_like(a, 1.2e154))
    _, history = run(initial, change, clients=2, rounds=3, steps={})
    assert len(history) == 3


# ---- norms -----------------------------------------------------------------------------------------------------------


def test_estimated_norms_are_those_of_a_sample():
    rng = np.random.default_rng(0)
    x = {"large": rng.normal(size=(1000, 2000)).astype(np.float32), "small": rng.normal(size=9), "n": np.arange(4)}
    s = {name: array + rng.normal(0, 0.1, array.shape).astype(array.dtype) for name, array in x.items() if name != "n"}
    s["n"] = np.arange(4) + 2
    exact = {name: float(((x[name].astype(float) - s[name]) ** 2).sum()) for name in ("large", "small")}
    found = estimated_norms(x, s)
    assert found["small"] == pytest.approx(exact["small"], rel=1e-6)
    assert found["large"] == pytest.approx(exact["large"], rel=0.05) and found["large"] != exact["large"]
    assert squared_norms(x, s)["large"] == pytest.approx(exact["large"], rel=1e-4)
    assert integer_norms(x, s) == {"n": 4 * 2.0**2} and integer_norms(x, {}) == {"n": 0.0 + 1 + 4 + 9}


def test_the_mean_of_many_estimates_is_the_norm():
    """Also of an update in one place, which most samples do not see: it is found in a share `SAMPLED` of the rounds."""
    s = {"w": np.zeros(128 << 13, np.float32)}
    x = {"w": s["w"].copy()}
    x["w"][3] = 2.0
    found = np.array([estimated_norms(x, s)["w"] for _ in range(600)])
    assert set(found) == {0.0, 4 / SAMPLED}
    assert abs(found.mean() - 4) < 4 * 5 * np.sqrt((1 / SAMPLED - 1) / 600)


def test_an_empty_entry_and_one_without_floats_have_no_estimate():
    assert estimated_norms({"e": np.zeros((0, 3), np.float32)}, {"e": np.zeros((0, 3), np.float32)}) == {"e": 0.0}
    assert estimated_norms({"n": np.arange(3)}, {"n": np.arange(3)}) == {}
