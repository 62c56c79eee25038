"""Which replies wait before they are merged, and the weights that they get: compared with all subsets and orders."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange.plan import Plan, Reply
from tepal.strategies.rounds.judging import Judge, Refused
from tepal.strategies.rounds.norms import UpdateNorms

LOST = 30  # clients that are asked and do not answer


def reply_of(client, examples=1, *, values=None, squares=None):
    return Reply(
        client=client,
        parts={"model": values or {"w": np.ones(2, np.float32)}},
        examples=examples,
        metrics={},
        squares={"model": squares or {"w": 1.0}},
    )


def plans_of(names):
    return {name: Plan(client=name, round=1, needs={"model": ("w",)}) for name in names}


def judge_of(share, blocks=("w",), **options):
    """A judge that knows the norms of one earlier round, of the block `w` alone."""
    norms = UpdateNorms({name: (name,) for name in blocks})
    norms.begin()
    for k in range(4):
        norms.enter(f"before-{k}", {"update//w": 1.0})
    norms.begin()
    return Judge(norms, share, **options)


def weights_of(replies, share, lost=LOST):
    """Client → weight, in the order of merging, and the most replies that waited."""
    arrived, found, most = [], {}, 0

    def arriving():
        nonlocal most
        for client, examples in replies:
            most = max(most, len(arrived) - len(found))
            arrived.append(client)
            yield reply_of(client, examples)
        most = max(most, len(arrived) - len(found))

    names = [*(client for client, _ in replies), *(f"lost-{k}" for k in range(lost))]
    for reply in judge_of(share).judged(arriving(), plans_of(names), lambda client, tree: {}):
        found[reply.client] = reply.examples
    return found, most


def expected_limit(weights, share):
    """The largest whole number to which weights can be cut so that none is beyond the share, by trying them all."""
    if len(weights) < 3:
        return max(weights)
    possible = max(Fraction(share), Fraction(1, len(weights)))
    limits = [c for c in range(1, max(weights) + 1)
              if max(min(w, c) for w in weights) <= possible * sum(min(w, c) for w in weights)]  # fmt: skip
    return max(limits)


@given(
    st.lists(st.integers(1, 12) | st.integers(1, 300), min_size=1, max_size=9),
    st.sampled_from([0.05, 0.125, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0]),
    st.randoms(use_true_random=False),
)
def test_weights_are_those_that_all_who_answered_may_have_in_any_order(weights, share, random):
    replies = [(f"c{k}", weight) for k, weight in enumerate(weights)]
    found, most = weights_of(replies, share)
    assert found.keys() == dict(replies).keys()
    assert most < 1 / share
    limit = expected_limit(weights, share)
    for client, weight in replies:
        assert abs(found[client] - min(weight, limit)) <= 1  # a limit that is a whole number may be rounded down
    for _ in range(5):
        random.shuffle(replies)
        again, most = weights_of(replies, share)
        assert again == found and most < 1 / share


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_heavy_client_does_not_gain_by_replies_that_are_lost(order):
    replies = [("a", 100), ("b", 100), ("heavy", 10**15)]
    found, _ = weights_of([replies[k] for k in order], 0.5)
    assert found == {"a": 100, "b": 100, "heavy": 200}


def test_several_heavy_clients_are_limited_together():
    """Of eight with 100 and two with c each, c is a fifth: c = (800 + 2c) / 5."""
    light = [(f"c{k}", 100) for k in range(8)]
    expected = dict(light) | {"h1": 266, "h2": 266}
    for replies in ([*light, ("h1", 10**6), ("h2", 10**6)], [("h1", 10**6), *light, ("h2", 10**9)]):
        found, _ = weights_of(replies, 0.2)
        assert found == expected


def test_of_fewer_than_three_clients_none_waits_and_none_is_limited():
    found, most = weights_of([("a", 1), ("b", 10**15)], 0.1, lost=0)
    assert list(found.items()) == [("a", 1), ("b", 10**15)] and most == 0


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_replies_of_equal_weight_are_merged_in_the_order_in_which_they_came(share):
    replies = [(f"c{k}", 100) for k in (3, 1, 4, 0, 5, 9, 2, 6)]
    found, _ = weights_of(replies, share)
    assert list(found.items()) == replies


def test_what_could_not_be_merged_does_not_raise_the_limit_of_others():
    replies = [("a", 100), ("b", 100), ("broken", 10**14), ("heavy", 10**15)]
    judge, found = judge_of(0.5), {}
    names = [client for client, _ in replies]
    for reply in judge.judged((reply_of(*one) for one in replies), plans_of(names), lambda client, tree: {}):
        if reply.client == "broken":
            judge.not_merged("broken")
        else:
            found[reply.client] = reply.examples
    assert found == {"a": 100, "b": 100, "heavy": 200}


def test_a_reply_that_is_ready_is_judged_again_if_the_one_before_it_could_not_be_merged():
    """x and y fit together, and y does not fit alone."""
    replies = [("x", 1000), ("y", 1000), ("c", 1), ("d", 1), ("e", 1)]
    judge, found = judge_of(0.5), {}
    for reply in judge.judged((reply_of(*one) for one in replies), plans_of("xycde"), lambda client, tree: {}):
        if reply.client == "x":
            judge.not_merged("x")
        else:
            found[reply.client] = reply.examples
    assert found == {"c": 1, "d": 1, "e": 1, "y": 3}


def test_where_all_must_weigh_the_same_none_waits():
    found, most = weights_of([(f"c{k}", 10**k) for k in range(10)], 0.02, lost=30)
    assert set(found.values()) == {1} and most == 0


# ---- blocks whose usual norm is not known ----------------------------------------------------------------------------


@pytest.mark.parametrize("last", [10.0, 40.0])
def test_updates_of_a_new_block_are_clipped_alike_in_any_order(last):
    """Its usual norm is the median of those of the round, also for the replies that came first."""
    norms = {"a": 10.0, "b": 10.0, "c": 10.0, "d": last}
    expected = {client: math.hypot(1, norm) / math.hypot(1, 10) for client, norm in norms.items()}
    for order in permutations(norms):
        judge = judge_of(0.5, ("w", "new"), clip=True)
        replies = [reply_of(client, squares={"w": 1.0, "new": norms[client] ** 2}) for client in order]
        found = list(judge.judged(iter(replies), plans_of(norms), lambda client, tree: {}))
        assert not any(isinstance(reply, Refused) for reply in found)
        assert judge.norms.ratios == pytest.approx(expected)


def test_honest_updates_of_a_new_block_are_not_refused_because_others_hardly_change():
    """Here nine replies are awaited, which then are merged in the order in which they came."""
    judge = judge_of(0.5, ("w", "new"))
    names = [f"c{k}" for k in range(12)]
    replies = (reply_of(name, squares={"w": 1.0, "new": 1e8}) for name in names)
    found = list(judge.judged(replies, plans_of(names), lambda client, tree: {}))
    assert [reply.client for reply in found] == names and not any(isinstance(reply, Refused) for reply in found)


def test_a_reply_of_known_blocks_does_not_wait():
    judge = judge_of(1.0, ("w", "new"), clip=True)
    replies = [reply_of("new", squares={"new": 1.0}), reply_of("known")]
    found = judge.judged(iter(replies), plans_of(["new", "known"]), lambda client, tree: {})
    assert [reply.client for reply in found] == ["known", "new"]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_tree_without_bytes_can_wait_beside_a_large_one(tmp_path):
    values = {"w": np.arange(1 << 19, dtype=np.float32)}
    empty = {"none": np.zeros((0, 3), np.float32)}
    names = ["a", "b", "c"]
    replies = []
    for name in names:
        reply = reply_of(name, 10, values=dict(values))
        replies.append(Reply(**{**vars(reply), "parts": {**reply.parts, "other": dict(empty)}}))
    judge = Judge(UpdateNorms({"w": ("w",)}), 0.5, clip=True, folder=tmp_path)
    found = list(judge.judged(iter(replies), plans_of(names), lambda client, tree: {}))
    assert [reply.client for reply in found] == names
    for reply in found:
        assert isinstance(reply.parts["model"]["w"], np.memmap)
        np.testing.assert_array_equal(reply.parts["model"]["w"], values["w"])
        assert reply.parts["other"]["none"].shape == (0, 3)
