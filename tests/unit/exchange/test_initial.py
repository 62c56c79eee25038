"""Which initial parts a server lists, in a run that goes on and in one that is resumed."""

import pytest

from tepal.exchange.initial import InitialParts
from tepal.exchange.parts import Part

BLOCKS = {"head": ("w",), "body": ("v",)}
PARTS = [Part("model", "head", ("w",), (b"a" * 16,)), Part("model", "body", ("v",), (b"b" * 16,))]


def begun(rounds, found):
    initial = InitialParts()
    for part in PARTS:
        initial.add(part)
    for _ in range(rounds):
        initial.begin()
        for part in found:
            initial.found(part.id)
    return initial


@pytest.mark.parametrize("found", [[], PARTS[:1], PARTS], ids=len)
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_resumed_run_lists_what_it_would_have_listed(rounds, found):
    initial, resumed = begun(rounds, found), InitialParts()
    resumed.restore(initial.to_facts())
    for each in (initial, resumed):
        each.begin()
        assert [part.id for part in each.listed(BLOCKS, None)] == [part.id for part in found]


def test_trees_that_begin_with_equal_values_are_all_listed():
    """As the modes of an ensemble that begin with one file of weights: a client keeps each mode's part by itself."""
    parts = [Part(f"mode/{mode}", "head", ("w",), (b"a" * 16,)) for mode in range(3)]
    initial, resumed = InitialParts(), InitialParts()
    for part in parts:
        initial.add(part)
    resumed.restore(initial.to_facts())
    for each in (initial, resumed):
        each.begin()
        assert [(part.tree, part.id) for part in each.listed(BLOCKS, None)] == [(part.tree, part.id) for part in parts]
        assert parts[0].id in each and "other" not in each


def test_before_the_first_round_and_from_an_earlier_checkpoint_all_are_listed():
    facts = begun(0, []).to_facts()
    for resumed_from in (facts, {"parts": begun(3, []).to_facts()["parts"]}):
        resumed = InitialParts()
        resumed.restore(resumed_from)
        resumed.begin()
        assert [part.id for part in resumed.listed(BLOCKS, None)] == [part.id for part in PARTS]
