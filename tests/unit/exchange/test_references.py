"""What the server knows of clients' caches: files and their names, how recent they are, which are forgotten first."""

import logging
import os
import shutil
import tempfile
from collections import Counter
from itertools import permutations, takewhile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal.exchange.encodings import Encoding
from tepal.exchange.parts import Part, digest
from tepal.exchange.references import References
from tepal.strategies import FedAvg
from tepal.strategies.in_process import InProcessGrid, Node
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.rounds.test_encoding import START, moving_app

KILOBYTE = 1e-3
"""Of the limit, which is in megabytes."""
AMPLE = 1.0
FOREIGN = [
    "notes.txt", "model.safetensors", "weights@v2.safetensors", "model.b@XYZ-ab-1.safetensors",
    "model.b@ab-cd-e.safetensors", "model.b@ab-cd-1-rough.safetensors", "a.model.b@ab-cd-1.safetensors",
    "model.b@ab-cd-1.safetensors.bak", "model.b@ab@cd-ef-1.safetensors", ".hidden.safetensors",
]  # fmt: skip
ODD = [
    "", "a", "a.b", "a/b", "..", "../up", "/", "50%", "%2E", "%", "a@b", "@", "a b\n", "größe", "層", ".safetensors",
    "-fine", "\0", "*", "[a]",
]  # fmt: skip
LABELS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(ODD)


def target(number):
    """Id of a part with the server's values."""
    return f"{number:032x}"


def content(seed, kilobytes=1):
    return {"w": np.random.default_rng(seed).normal(size=(2, 125 * kilobytes)).astype(np.float32)}


def enter(references, seed, of=0, *, fine=False, kilobytes=1, tree="model", block="b"):
    """A client is sent the content of this seed, which stands for the target `of`. Returns its part."""
    values = content(seed, kilobytes)
    part = Part(tree, block, tuple(values), tuple(digest(array) for array in values.values()))
    references.sent(part, target(of), values, fine=fine)
    return part


def found(references, parts, tree="model", block="b"):
    """Those of these parts that there are, by id, the newest first."""
    return {one.id: one for one in references.of(tree, block, [part.id for part in parts])}


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- files of others -------------------------------------------------------------------------------------------------


def leave_foreign_files(folder):
    folder.mkdir(exist_ok=True)
    for name in FOREIGN:
        (folder / name).write_bytes(b"of somebody else")
    (folder / "folder").mkdir()


def check_foreign_files(folder):
    assert files(folder) == sorted([*FOREIGN, "folder"])
    assert {(folder / name).read_bytes() for name in FOREIGN} == {b"of somebody else"}


def test_foreign_files_are_no_references_and_stay_when_those_go(tmp_path):
    leave_foreign_files(tmp_path)
    enter(References(tmp_path, AMPLE), 1)
    assert len(files(tmp_path)) == len(FOREIGN) + 2
    again = References(tmp_path, AMPLE)
    assert not again.of("model", "b", ["ab"])
    again.remove()
    check_foreign_files(tmp_path)


def test_what_a_killed_process_left_half_written_goes_when_it_is_old(tmp_path):
    for name in (".writing-0123", ".tmpOld", ".writing-new"):
        (tmp_path / name).write_bytes(b"half")
    for name in (".writing-0123", ".tmpOld"):
        os.utime(tmp_path / name, (0, 0))
    References(tmp_path, AMPLE)
    assert files(tmp_path) == [".writing-new"]


def test_what_a_killed_process_left_half_written_goes_with_the_references(tmp_path):
    references = References(folder := tmp_path / "references", AMPLE)
    enter(references, 1)
    for name in (".writing-0123", ".tmpNew"):  # by a server that was resumed at once
        (folder / name).write_bytes(b"half")
    references.remove()
    assert not folder.exists()


def test_a_folder_with_nothing_else_in_it_goes_with_the_references(tmp_path):
    folder = tmp_path / "references"
    for _ in range(2):  # the second time it does not exist
        References(folder, AMPLE).remove()
        assert not folder.exists()
    references = References(folder, AMPLE)
    parts = [enter(references, seed) for seed in range(3)]
    references.remove()
    assert not folder.exists() and not found(references, parts)


def run(encoding, folder, rounds=1, **options):
    strategy = FedAvg(encoding=encoding, fraction_evaluate=0, checkpoints=folder, min_available_nodes=1, **options)
    grid = InProcessGrid([Node(moving_app(), {"partition-id": 0})])
    return strategy.start(grid, ArrayRecord({name: Array(array) for name, array in START.items()}), num_rounds=rounds)


@pytest.mark.parametrize("encoding", [None, Encoding("int8"), Encoding("sign")])
@pytest.mark.parametrize("foreign", [True, False])
def test_a_resumed_run_removes_the_references_of_the_run_before_and_no_other_files(tmp_path, encoding, foreign):
    """At its start, if its encoding has no differences; otherwise at its end."""
    run(encoding, tmp_path)
    folder = tmp_path / "references"
    for seed in range(3):
        enter(References(folder, AMPLE), seed)
    if foreign:
        leave_foreign_files(folder)
    run(encoding, tmp_path, rounds=2, resume=True)
    if foreign:
        check_foreign_files(folder)
    else:
        assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_no_harm_to_a_run_without_differences(tmp_path):
    (tmp_path / "references").write_text("of somebody else")
    run(Encoding("int8"), tmp_path)
    assert (tmp_path / "references").read_text() == "of somebody else"


# ---- how recent they are ---------------------------------------------------------------------------------------------

SENDS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans())  # seed, target, fine
LATEST = 2, 3, 5, 9


@settings(max_examples=10)
@given(st.lists(st.lists(SENDS, max_size=3), min_size=1, max_size=5), st.sampled_from(LATEST))
def test_since_is_the_first_round_of_the_target_for_which_a_part_was_sent_last(rounds, later):
    with tempfile.TemporaryDirectory() as name:
        references = References(Path(name), AMPLE)
        log = {}
        parts = {}
        for number, sends in enumerate(rounds, start=1):
            references.begin(number, {part.id: 1 for part in parts.values()})
            for seed, of, fine in sends:
                parts[seed] = enter(references, seed, of, fine=fine)
                log.setdefault(seed, []).append((number, of, fine))
        last = len(rounds) + later - 1
        references.begin(last, {part.id: 1 for part in parts.values()})
        for seed, entries in log.items():
            (one,) = references.of("model", "b", [parts[seed].id])
            of = entries[-1][1]
            streak = [*takewhile(lambda entry, of=of: entry[1] == of, reversed(entries))]
            first, fine = streak[-1][0], any(entry[2] for entry in streak)
            assert (one.target, one.since, one.fine) == (target(of), first, fine)
            assert references.age(one) == max(last - first, 1)
            for asked in (0, 1):
                for final in (False, True):
                    recent = last - first in (0, 1) and not final
                    expected = asked == of and (fine or recent)
                    assert references.is_current(one, target(asked), final=final) == expected


EVENTS = {
    "another part": lambda references, mine: enter(references, 7, 1),
    "another for my target": lambda references, mine: enter(references, 8, 0, fine=True),
    "mine again": lambda references, mine: enter(references, 0, 0),
    "mine in another block": lambda references, mine: enter(references, 0, 1, fine=True, block="c"),
    "nothing": lambda references, mine: references.used(mine),
    "a difference from mine": lambda references, mine: references.replaced(mine),
}


@pytest.mark.parametrize("age", [0, 1, 2, 5])
def test_how_recent_a_reference_is_does_not_depend_on_what_others_are_sent_or_when(tmp_path, age):
    def asked(mine, references):
        current = [references.is_current(mine, target(of), final=final) for of in (0, 1) for final in (False, True)]
        return current, references.age(mine)

    orders = [*permutations(EVENTS)][:: 719 // 7]
    for number, order in enumerate(orders):
        references = References(tmp_path / str(number), AMPLE)
        references.begin(3, {})
        part = enter(references, 0, 0)
        references.begin(3 + age, {part.id: 2})
        mine = found(references, [part])[part.id]
        before = asked(mine, references)
        assert before == ([age <= 1, False, False, False], max(age, 1))
        for event in order:
            EVENTS[event](references, mine)
            assert asked(mine, references) == before
    assert {order[0] for order in orders} == set(EVENTS)


# ---- which are forgotten ---------------------------------------------------------------------------------------------


def test_what_no_client_has_is_forgotten_a_round_after_it_was_used(tmp_path):
    references = References(tmp_path, AMPLE)
    references.begin(1, {})
    held, used, left = parts = [enter(references, seed) for seed in range(3)]
    references.begin(2, {held.id: 1})
    assert found(references, parts).keys() == {part.id for part in parts}
    references.used(found(references, [used])[used.id])
    references.begin(3, {held.id: 1})
    assert found(references, parts).keys() == {held.id, used.id} and len(files(tmp_path)) == 2
    assert references.find(("model", "b", left.id)) is None
    references.begin(4, {held.id: 1})
    references.begin(9, {held.id: 1, "of somebody": 3})
    assert found(references, parts).keys() == {held.id} and len(files(tmp_path)) == 1
    references.begin(10, {})
    assert not found(references, parts) and not files(tmp_path)


HELD = [1, 0, 2, 0, 1]  # the number of clients with each


@pytest.mark.parametrize(
    "replaced, order",
    [
        ([], [3, 1, 4, 2, 0]),
        ([0], [3, 1, 0, 4, 2]),
        ([2], [3, 1, 4, 2, 0]),
        ([2, 2], [3, 2, 1, 4, 0]),
        ([0, 2, 4, 2], [4, 3, 2, 1, 0]),
    ],
)
def test_those_that_no_client_has_any_longer_are_forgotten_first_and_then_the_newest(tmp_path, replaced, order):
    references = References(tmp_path, 5 * KILOBYTE)
    references.begin(1, {})
    parts = [enter(references, seed) for seed in range(5)]
    references.begin(2, {part.id: count for part, count in zip(parts, HELD, strict=True) if count})
    for number in replaced:
        references.replaced(found(references, parts)[parts[number].id])
    forgotten, new = [], []
    for seed in range(5, 12):
        new.append(enter(references, seed))
        there = found(references, parts)
        forgotten += [k for k in range(5) if parts[k].id not in there and k not in forgotten]
        assert len(found(references, new)) == len(new), "those of this round stay, whatever the limit"
    assert forgotten == order
    assert len(files(tmp_path)) == 7


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_no_more_is_forgotten_than_must_be(kept, kilobytes):
    """Of each: kilobytes, the number of clients with it, and whether a client is in need of nothing else."""
    with tempfile.TemporaryDirectory() as name:
        limit = sum(size for size, _, _ in kept)
        references = References(Path(name), limit * KILOBYTE)
        references.begin(1, {})
        parts = [enter(references, seed, kilobytes=size) for seed, (size, _, _) in enumerate(kept)]
        references.begin(2, {part.id: count for part, (_, count, _) in zip(parts, kept, strict=True)})
        before = found(references, parts)
        for part, (_, _, used) in zip(parts, kept, strict=True):
            if used:
                references.used(before[part.id])
        enter(references, 99, kilobytes=kilobytes)
        there = found(references, parts)
        gone = [k for k, part in enumerate(parts) if part.id not in there]
        stay = [k for k, part in enumerate(parts) if part.id in there and not kept[k][2]]
        freed = [kept[k][0] for k in gone]
        assert not any(kept[k][2] for k in gone)
        assert sum(freed) >= kilobytes or not stay
        for k in gone:
            assert all((kept[k][1] == 0, k) > (kept[other][1] == 0, other) for other in stay)
        if gone:  # without the last of them there was too little room
            last = min(gone, key=lambda k: (kept[k][1] == 0, k))
            assert sum(freed) - kept[last][0] < kilobytes
        assert len(files(Path(name))) == len(there) + 1


# ---- another process -------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=6),
    st.permutations(range(6)),
)
def test_a_resumed_run_finds_the_same_in_the_same_order(sends, written):
    """Of each: its target, the round, and whether it is fine. `written`: when each file was."""
    with tempfile.TemporaryDirectory() as name:
        first = References(Path(name), AMPLE)
        parts = {}
        for seed, (of, number, fine) in enumerate(sends):
            first.begin(number, {part.id: 1 for part in parts.values()})
            parts[seed] = enter(first, seed, of, fine=fine)
            (path,) = Path(name).glob(f"*@{parts[seed].id}-*")
            os.utime(path, ns=(0, 10**9 * (1 + written[seed])))
        again = References(Path(name), AMPLE)
        there = found(again, parts.values())
        newest_first = sorted(parts, key=lambda seed: -written[seed])
        assert [*there] == [parts[seed].id for seed in newest_first]
        for seed, (of, number, fine) in enumerate(sends):
            one = there[parts[seed].id]
            assert (one.slot, one.target, one.since, one.fine) == (
                ("model", "b", parts[seed].id), target(of), number, fine
            )  # fmt: skip
            known = again.find(one.slot)
            np.testing.assert_array_equal(known.values["w"], content(seed)["w"])
            assert known.digests == parts[seed].digest_of
        again.begin(7, {parts[0].id: 1})
        assert [one.id for one in again.of("model", "b", [part.id for part in parts.values()])] == [parts[0].id]
        again.begin(8, {})
        assert not list(Path(name).iterdir())


def test_what_is_known_after_a_restart_is_what_was_known_before_it(tmp_path):
    first = References(tmp_path, AMPLE)
    first.begin(1, {})
    part = enter(first, 0, of=1)
    for number, of, fine in ((2, 1, False), (3, 2, False), (4, 2, True), (5, 2, False), (6, 3, False)):
        first.begin(number, {part.id: 1})
        enter(first, 0, of=of, fine=fine)
        again = References(tmp_path, AMPLE)
        for references in (first, again):
            one = found(references, [part])[part.id]
            assert (one.target, one.since, one.fine) == (
                target(of), {1: 1, 2: 3, 3: 6}[of], number in (4, 5)
            )  # fmt: skip
        assert len(files(tmp_path)) == 1, "its file is renamed"


def check_slots_are_apart(slots):
    """Equal values, each of another tree or block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "references"
        first = References(folder, AMPLE)
        parts = [enter(first, 0, of, tree=tree, block=block) for of, (tree, block) in enumerate(slots)]
        assert len({part.id for part in parts}) == 1
        assert len(files(folder)) == len(slots) and files(Path(name)) == ["references"]
        for references in (first, References(folder, AMPLE)):
            for of, (tree, block) in enumerate(slots):
                (one,) = references.of(tree, block, [parts[0].id])
                assert (one.slot, one.target) == ((tree, block, parts[0].id), target(of))
                assert references.find(one.slot) is not None
            assert not references.of("another tree", "b", [parts[0].id])
        references.remove()
        assert not folder.exists()


def test_trees_and_blocks_with_odd_names_are_told_apart_and_found_again():
    check_slots_are_apart([*((odd, "b") for odd in ODD), *(("b", odd) for odd in ODD), *((odd, odd) for odd in ODD)])


@settings(max_examples=8)
@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=4, unique=True))
def test_trees_and_blocks_with_any_names_are_told_apart_and_found_again(slots):
    check_slots_are_apart(slots)


@pytest.mark.parametrize("tree, block", [("model", "b" * 250), ("mode/" + "1" * 300, "b"), ("層" * 40, "é" * 40)])
def test_in_the_same_run_a_very_long_label_is_as_good_as_another(tmp_path, tree, block):
    references = References(tmp_path, 3 * KILOBYTE)
    references.begin(1, {})
    part = enter(references, 0, of=1, tree=tree, block=block)
    enter(references, 0, of=2, fine=True, tree=tree, block=block)
    (one,) = references.of(tree, block, [part.id])
    assert (one.target, one.fine) == (target(2), True)
    np.testing.assert_array_equal(references.find(one.slot).values["w"], content(0)["w"])
    references.begin(2, {part.id: 1})
    enter(references, 1, kilobytes=3)
    assert not references.of(tree, block, [part.id]), "it counts towards the limit"
    references.remove()
    assert not tmp_path.exists()


def other_digests(path):
    path.write_bytes(path.read_bytes().replace(b'"blake3/w":"', b'"blake3/w":"00', 1)[:-2])


def folder_instead(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "only a header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "other values": lambda path: path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4"),
    "other digests": other_digests,
    "text": lambda path: path.write_text("not a safetensors file" * 20),
    "gone": lambda path: path.unlink(),
    "a folder": folder_instead,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_was_damaged_is_forgotten_when_it_is_needed(tmp_path, caplog, damage):
    first = References(tmp_path, AMPLE)
    whole, damaged = parts = [enter(first, seed) for seed in range(2)]
    again = References(tmp_path, AMPLE)
    (path,) = tmp_path.glob(f"*@{damaged.id}-*")
    DAMAGE[damage](path)
    assert found(again, parts).keys() == {whole.id, damaged.id}
    with caplog.at_level(logging.WARNING, "flwr"):
        for _ in range(2):
            assert again.find(("model", "b", damaged.id)) is None
    assert caplog.text.count("What clients have of block 'b' is sent as a whole") == 1
    assert found(again, parts).keys() == {whole.id}
    assert again.find(("model", "b", whole.id)) is not None
    enter(again, 1, of=4)
    if damage != "a folder":
        assert sorted(name.split("@")[1][:32] for name in files(tmp_path)) == sorted(part.id for part in parts)
    assert found(again, [damaged])[damaged.id].target == target(4)
    np.testing.assert_array_equal(again.find(("model", "b", damaged.id)).values["w"], content(1)["w"])


def test_what_was_damaged_is_written_again_when_a_client_is_sent_it_before_it_is_needed(tmp_path):
    part = enter(References(tmp_path, AMPLE), 0, of=1, fine=True)
    (path,) = tmp_path.iterdir()
    again = References(tmp_path, AMPLE)
    DAMAGE["other values"](path)
    again.begin(5, {part.id: 1})
    enter(again, 0, of=1)
    one = found(again, [part])[part.id]
    assert (one.since, one.fine) == (5, False), "nothing is known of the file that was damaged"
    np.testing.assert_array_equal(again.find(one.slot).values["w"], content(0)["w"])
    assert len(files(tmp_path)) == 1


def test_a_file_that_was_renamed_is_not_found(tmp_path):
    part = enter(References(tmp_path, AMPLE), 0)
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "kept.safetensors")
    again = References(tmp_path, AMPLE)
    assert not found(again, [part]) and again.find(("model", "b", part.id)) is None
    again.remove()
    assert files(tmp_path) == ["kept.safetensors"]


def no_room(path, values, **options):
    raise OSError(28, "No space left on device")


def test_what_cannot_be_written_stays_in_memory_until_it_is_forgotten(tmp_path, monkeypatch, caplog):
    references = References(tmp_path, AMPLE)
    references.begin(1, {})
    monkeypatch.setattr("tepal.exchange.references.write_arrays", no_room)
    with caplog.at_level(logging.WARNING, "flwr"):
        part = enter(references, 0)
        enter(references, 0, of=3)
    assert caplog.text.count("stays in memory") == 1 and not files(tmp_path)
    monkeypatch.undo()
    for number in (1, 2, 3):
        references.begin(number, {part.id: 1})
        (one,) = references.of("model", "b", [part.id])
        known = references.find(one.slot)
        np.testing.assert_array_equal(known.values["w"], content(0)["w"])
        assert known.digests == part.digest_of and one.target == target(3)
    references.begin(4, {})
    assert references.find(one.slot) is None and not references.of("model", "b", [part.id])


def test_of_many_references_few_are_mapped_and_all_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tepal.exchange.references._MOST_MAPPED", 3)
    references = References(tmp_path, AMPLE)
    before = len(os.listdir("/proc/self/fd"))
    parts = [enter(references, seed) for seed in range(8)]
    for seed in (*range(8), *range(8)):
        known = references.find(("model", "b", parts[seed].id))
        np.testing.assert_array_equal(known.values["w"], content(seed)["w"])
        assert not known.values["w"].flags.writeable
        assert references.find(("model", "b", parts[seed].id)) is known
        del known
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    kept = references.find(("model", "b", parts[0].id))
    references.remove()
    np.testing.assert_array_equal(kept.values["w"], content(0)["w"])  # what is in use stays valid


def test_of_two_files_of_one_reference_none_stays(tmp_path):
    folder = tmp_path / "r"
    enter(References(folder, 1.0), 0, of=1)
    (path,) = folder.iterdir()
    shutil.copy(path, path.with_name(path.name.replace("-1.s", "-7.s")))
    References(folder, 1.0).remove()
    assert not folder.exists()


@pytest.mark.parametrize("tree, block", [("model", "b" * 250), ("mode/" + "1" * 300, "b"), ("層" * 40, "é" * 40)])
def test_a_very_long_label_is_in_a_file_and_found_after_a_restart(tmp_path, tree, block, caplog):
    references = References(tmp_path, AMPLE)
    references.begin(123_456_789, {})
    part = enter(references, 0, of=1, tree=tree, block=block)
    assert len(files(tmp_path)) == 1 and not caplog.records
    again = References(tmp_path, AMPLE)
    (one,) = again.of(tree, block, [part.id])
    np.testing.assert_array_equal(again.find(one.slot).values["w"], content(0)["w"])
    assert not again.of(tree, block + "x", [part.id]) and not again.of(tree + "x", block, [part.id])


@pytest.mark.parametrize("departed", [0, 20])
def test_clients_that_have_left_do_not_displace_the_references_of_those_that_are_there(tmp_path, departed):
    """20 clients, two of them in a round, and room for 30 references; in the first rounds others come once."""
    references, rng = References(tmp_path, 30 * 100 / 1e6), np.random.default_rng(0)
    held, lacking = {}, 0

    def give(client):
        values = {"w": rng.standard_normal(25).astype(np.float32)}
        part = Part("model", "b", ("w",), (digest(values["w"]),))
        references.sent(part, "target", values, fine=False)
        held[client] = part.id

    for number in range(1, 251):
        references.begin(number, Counter(held.values()))
        for client in rng.choice(20, 2, replace=False):
            found = references.of("model", "b", [held[client]]) if client in held else []
            lacking += number > 150 and not found
            if found:
                references.replaced(found[0])
            give(client)
        if number <= 5 * departed and number % 5 == 0:
            give(f"left in {number}")
    assert lacking <= 5, "of 200 messages; before, 69 had the whole part"


@pytest.mark.parametrize("resumed", [False, True])
def test_what_all_clients_have_is_not_forgotten_for_want_of_room_after_a_run_is_resumed(tmp_path, resumed):
    """A frozen block that was sent long ago, and room for one more reference."""
    references, rng = References(tmp_path, 0.033), np.random.default_rng(0)
    parts = {}

    def give(block, fine):
        values = {block: rng.standard_normal(2500).astype(np.float32)}
        part = Part("model", block, (block,), (digest(values[block]),))
        references.sent(part, target(1), values, fine=fine)
        parts[block] = part.id

    references.begin(1, {})
    give("frozen", fine=True)
    for number in range(2, 101):
        references.begin(number, dict.fromkeys(parts.values(), 20))
        give("rest", fine=False)
        for one in references.of("model", "frozen", parts.values()):
            references.used(one)
    if resumed:
        references = References(tmp_path, 0.033)
    references.begin(101, dict.fromkeys(parts.values(), 20))
    give("rest", fine=False)
    give("other", fine=False)
    assert references.has("model", "frozen", parts["frozen"])
