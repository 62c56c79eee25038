"""What one client is sent of a block, and what it then has, as the server knows it."""

import math
import os
import shutil
import tempfile
import weakref
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal.exchange.encodings import CODECS, PLAIN, Encoding, EncodingError, Wire
from tepal.exchange.packer import Packer, Wanted
from tepal.exchange.parts import digest, shapes_of, unpack
from tepal.exchange.references import References

AMPLE = 1.0
DIFFERENCES = [
    Encoding("sign"), Encoding("ternary"), Encoding("int4"), Encoding("rank1"), Encoding("auto"),
    Encoding("auto", left_out=0.1), Encoding("sign", whole="float32"), Encoding("float16", top_k_down=0.2),
    Encoding("float32", top_k_down=0.1),
]  # fmt: skip
OF_VECTORS = ("auto", "rank1", "rank4")


def model(seed, scale=1.0):
    """Two matrices, one of which is float64, a vector, which is encoded in `auto` and ranks alone, and a counter."""
    rng = np.random.default_rng(seed)
    return {
        "w": (scale * rng.normal(size=(4, 30))).astype(np.float32),
        "bias": (scale * rng.normal(size=5)).astype(np.float32),
        "v": scale * rng.normal(size=(3, 2, 5)),
        "count": np.array(seed),
    }


def moved(values, seed, scale=0.05):
    """The model after a round."""
    step = model(seed, scale)
    return {name: value if name == "count" else value + step[name] for name, value in values.items()}


def matrix(*rows):
    return {"w": np.array(rows, np.float32)}


def wanted(values, *, tree="model", block="b", **options):
    return Wanted(tree, block, tuple(values), values, **options)


def packer_of(encoding, folder, megabytes=AMPLE):
    references = References(Path(folder), megabytes)
    return Packer(encoding, references), references


def same(first, second):
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype and array.tobytes() == second[name].tobytes(), name


class Client:
    """A client's cache of one block, and what it does with a message."""

    def __init__(self):
        self.parts = {}

    @property
    def held(self):
        return tuple(self.parts)

    @property
    def values(self):
        """Those of the part that it received last."""
        return self.parts[self.held[-1]]

    def asks(self, packer, values, **options):
        """It is sent the part, decodes it, checks its digests, and caches it in place of what it had."""
        packed = packer.parcel(wanted(values, **options), self.held)
        parcel, found = packed.parcel, {}
        if packed.data is None:
            assert parcel.sent == () and parcel.base == ""
            found = self.parts[parcel.part.id]
        else:
            assert parcel.sent == parcel.part.names and bool(parcel.base) == parcel.wire.differences
            for name, array in unpack(packed.data, shapes_of(values, parcel.sent), parcel.wire).items():
                added = parcel.base and array.ndim >= (1 if parcel.wire.dtype in OF_VECTORS else 2)
                found[name] = self.parts[parcel.base][name] + array if added else array
            assert {name: digest(array) for name, array in found.items()} == parcel.part.digest_of
        self.parts = {parcel.part.id: found}
        return packed


def squared(values):
    return sum(float(np.square(value, dtype=np.float64).sum()) for value in values.values() if value.dtype.kind == "f")


def apart(first, second):
    return squared({name: first[name].astype(np.float64) - second[name] for name in first if name != "count"})


# ---- what clients then have ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", DIFFERENCES, ids=str)
@settings(max_examples=4)
@given(st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=5), st.sampled_from([1e-3, 0.05, 10.0]))
def test_server_and_clients_have_the_same_to_the_bit(encoding, rounds, scale):
    """`rounds`: the clients that are there in each."""
    with tempfile.TemporaryDirectory() as folder:
        packer, references = packer_of(encoding, folder)
        clients, x = [Client() for _ in range(3)], model(0)
        for number, there in enumerate(rounds, start=1):
            packer.begin(number, {id: 1 for client in clients for id in client.held})
            for client in (clients[k] for k in sorted(there)):
                had = client.values if client.held else None
                packed = client.asks(packer, x)
                part = packed.parcel.part
                assert packed.parcel.keep and bool(packed.parcel.base) == bool(had)
                if part.id != wanted(x).part({name: digest(array) for name, array in x.items()}).id:
                    same(dict(references.find((part.tree, part.block, part.id)).values), client.values)
                    same(dict(packer.starts(part, x)), client.values)
                exact = ("count",) if had and encoding.down in OF_VECTORS else ("bias", "count")
                same({name: client.values[name] for name in exact}, {name: x[name] for name in exact})
                assert not had or apart(x, client.values) < apart(x, had), "a difference brings it closer"
                assert client.asks(packer, x).data is None, "in the same round it is sent nothing again"
            x = moved(x, number, scale)


@pytest.mark.parametrize("encoding", DIFFERENCES, ids=str)
def test_what_a_client_is_sent_does_not_depend_on_the_others_or_their_order(tmp_path, encoding):
    """Clients that were last there in rounds 3, 2 and 1, one with the last of them, and a newcomer."""
    rounds = [(0, 1, 2, 3), (0, 1, 3), (0, 3)]

    def sent(number, order):
        packer, _ = packer_of(encoding, tmp_path / str(number))
        clients, x = [Client() for _ in range(5)], model(0)
        for round, there in enumerate(rounds, start=1):
            packer.begin(round, {id: 1 for client in clients for id in client.held})
            for k in there:
                clients[k].asks(packer, x)
            x = moved(x, round)
        packer.begin(4, {id: 1 for client in clients for id in client.held})
        found = {k: clients[k].asks(packer, x) for k in order}
        return {k: (packed.parcel, packed.data.data) for k, packed in found.items()}

    orders = [*[*permutations(range(5))][::41], (4,), (3,), (1,)]
    first = sent("first", range(5))
    assert first[0] == first[3] and len({parcel.base for parcel, _ in first.values()}) == 4
    for number, order in enumerate(orders):
        assert sent(number, order) == {k: first[k] for k in order}


# ---- nothing is sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [Encoding(), Encoding("int8"), Encoding("sign"), Encoding("auto")], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_a_client_that_has_the_part_is_sent_nothing(tmp_path, encoding, exact):
    packer, _ = packer_of(encoding, tmp_path)
    client, x = Client(), model(0)
    for number in (1, 2):
        packer.begin(number, {id: 1 for id in client.held})
        packed = client.asks(packer, x, exact=exact, keep=True)
        assert (packed.data is None) == (number == 2)
        assert packed.parcel.sent == (tuple(x) if number == 1 else ())
        assert packed.rounded == (not exact and encoding != Encoding())
        assert not exact or (packed.parcel.wire == PLAIN and client.values.keys() == x.keys())
    if exact or encoding == Encoding():
        same(client.values, x)


def test_a_client_that_has_the_servers_own_values_is_sent_nothing_however_it_came_to_them(tmp_path):
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    x, client = model(0), Client()
    packer.begin(1, {})
    client.asks(packer, x, exact=True)
    for number in (2, 9):
        packer.begin(number, {client.held[0]: 1})
        assert client.asks(packer, x).data is None
        assert not packer.parcel(wanted(x), client.held).rounded


def test_what_does_not_need_to_be_sent_is_in_use_and_is_not_forgotten(tmp_path):
    packer, references = packer_of(Encoding("sign"), tmp_path, megabytes=1e-6)
    x, clients = model(0), [Client(), Client()]
    packer.begin(1, {})
    first, _ = (client.asks(packer, x).parcel.part for client in clients)
    packer.begin(2, {first.id: 2})
    assert clients[0].asks(packer, x).data is None
    packer.parcel(wanted(model(1), block="c"), ())
    assert references.find(("model", "b", first.id)) is not None
    assert clients[1].asks(packer, x).data is None


def test_a_difference_that_is_nothing_is_not_sent(tmp_path):
    """The least float32 is nothing in int4."""
    packer, references = packer_of(Encoding("int4"), tmp_path)
    zeros, least = matrix([0, 0, 0]), matrix([1e-45, 0, 0])
    client = Client()
    packer.begin(1, {})
    client.asks(packer, zeros)
    for number in (2, 3, 7):
        packer.begin(number, {client.held[0]: 1})
        packed = client.asks(packer, least)
        assert packed.data is None and packed.rounded
        (one,) = references.of("model", "b", client.held)
        assert one.fine and one.since == 2
    same(client.values, zeros)


# ---- bases -----------------------------------------------------------------------------------------------------------


def several_bases(packer):
    """Three parts of a block, one of each of three rounds, from which the first message of round 4 may be made."""
    parts, x = {}, model(0)
    for number in (1, 2, 3):
        packer.begin(number, {id: 1 for id in parts})
        client = Client()
        client.asks(packer, x)
        parts.update(client.parts)
        x = moved(x, number)
    packer.begin(4, {id: 1 for id in parts})
    return parts, x


@pytest.mark.parametrize("restarted", [False, True])
def test_the_newest_of_several_bases_is_used_that_the_client_does_not_lack(tmp_path, restarted):
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    parts, x = several_bases(packer)
    if restarted:
        for number, id in enumerate(parts):
            (path,) = tmp_path.glob(f"*@{id}-*")
            os.utime(path, (number, number))
        packer, _ = packer_of(Encoding("sign"), tmp_path)
        packer.begin(4, {id: 1 for id in parts})
    first, second, third = parts
    for held in permutations(parts):
        assert packer.parcel(wanted(x), held).parcel.base == third
    assert packer.parcel(wanted(x), (second, first)).parcel.base == second
    lacks = {third: ("w",)}
    assert packer.parcel(wanted(x), tuple(parts), lacks).parcel.base == second
    assert packer.parcel(wanted(x), tuple(parts), lacks | {second: ("v",)}).parcel.base == first
    whole = packer.parcel(wanted(x), tuple(parts), dict.fromkeys(parts, ("w",))).parcel
    assert (whole.base, whole.wire, whole.sent) == ("", Wire("int8"), tuple(x))


def test_a_client_that_could_not_read_a_difference_is_sent_one_from_another_base_or_the_whole(tmp_path):
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    parts, x = several_bases(packer)
    first, second, third = parts
    missing = {}
    for base in (third, second, first, ""):
        parcel = packer.parcel(wanted(x), tuple(parts), missing).parcel
        assert parcel.base == base and parcel.sent == tuple(x)
        missing[parcel.part.id] = tuple(x)
    again = packer.parcel(wanted(x), tuple(parts), missing).parcel
    assert again == parcel, "there is no other way to send the whole"


def test_what_is_not_missing_and_is_held_meanwhile_is_not_sent_again(tmp_path):
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    clients, x = {"b": Client(), "c": Client()}, model(0)
    for number in (1, 2):
        packer.begin(number, {id: 1 for client in clients.values() for id in client.held})
        sent = {block: client.asks(packer, x, block=block) for block, client in clients.items()}
        x = x if number == 2 else moved(x, 1)
    held = [id for client in clients.values() for id in client.held]
    lacking = sent["c"].parcel.part
    assert lacking.id == sent["b"].parcel.part.id  # the same values, in two blocks
    other = moved(x, 5)
    packed = packer.parcel(wanted(other, block="c"), held, {})
    missing = {packed.parcel.part.id: tuple(x)}
    assert packer.parcel(wanted(x, block="b"), held, missing).data is None
    assert packer.parcel(wanted(other, block="c"), held, missing).parcel.base == ""


def test_a_base_with_other_entries_is_none(tmp_path):
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    x = model(0)
    packer.begin(1, {})
    fewer = Wanted("model", "b", ("w", "bias"), x)
    id = packer.parcel(fewer, ()).parcel.part.id
    packer.begin(2, {id: 1})
    y = moved(x, 1)
    assert packer.parcel(wanted(y), [id]).parcel.base == ""
    packed = packer.parcel(Wanted("model", "b", ("w", "bias"), y), [id]).parcel
    assert (packed.base, packed.sent) == (id, ("w", "bias"))


def test_a_part_of_another_tree_or_block_is_no_base(tmp_path):
    packer, _ = packer_of(Encoding("int4"), tmp_path)
    x, y = model(0), model(1)
    packer.begin(1, {})
    id = packer.parcel(wanted(x, tree="mode/0"), ()).parcel.part.id
    packer.begin(2, {id: 1})
    for tree, block, base in (("mode/1", "b", ""), ("mode/0", "c", ""), ("mode/0", "b", id)):
        assert packer.parcel(wanted(y, tree=tree, block=block), [id]).parcel.base == base


@pytest.mark.parametrize("block", ["b", "a/b.c@d%", "b" * 250])
def test_a_base_whose_file_is_damaged_is_none_and_its_clients_are_sent_the_whole(tmp_path, block):
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    client, x = Client(), model(0)
    bases = []
    for number in range(1, 6):
        packer.begin(number, {id: 1 for id in client.held})
        bases.append(client.asks(packer, x, block=block).parcel.base != "")
        x = moved(x, number)
        if number == 3:
            for path in tmp_path.iterdir():
                data = path.read_bytes()
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            packer, _ = packer_of(Encoding("sign"), tmp_path)  # another process
    assert bases == [False, True, True, False, True]


def test_a_part_that_is_not_known_any_more_has_no_start(tmp_path):
    packer, references = packer_of(Encoding("sign"), tmp_path)
    packer.begin(1, {})
    part = packer.parcel(wanted(model(0)), ()).parcel.part
    references.remove()
    with pytest.raises(KeyError, match=part.id):
        packer.starts(part, model(0))


# ---- values that no difference can have ------------------------------------------------------------------------------

LARGEST = float(np.finfo(np.float32).max)
NAN, INF = np.nan, np.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "encoding",
    [
        *(Encoding(dtype, whole="float32") for dtype in ("sign", "ternary", "int4", "rank4", "auto")),
        Encoding("float16", top_k_down=0.5, whole="float32"), Encoding("int8", top_k_down=0.5, whole="float32"),
        Encoding(top_k_down=0.5),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "had, have",
    [
        ([1, 2, 3], [1, NAN, 3]), ([1, 2, 3], [1, INF, 3]), ([1, NAN, 3], [1, 2, 3]), ([1, -INF, 3], [1, 2, 3]),
        ([1, INF, 3], [2, INF, 3]), ([-LARGEST, 0, 0], [LARGEST, 0, 0]),
        ([LARGEST / 2, -LARGEST, -LARGEST], [LARGEST, LARGEST / 2, LARGEST / 2]),
    ],
)  # fmt: skip
def test_of_what_is_not_finite_the_whole_is_sent(tmp_path, encoding, had, have):
    """Values, their difference, or their sum."""
    packer, _ = packer_of(encoding, tmp_path)
    client, other = Client(), Client()
    packer.begin(1, {})
    for one in (client, other):
        one.asks(packer, matrix(had, [0, 0, 0]))
    packer.begin(2, {client.held[0]: 2})
    for one in (client, other):
        parcel = one.asks(packer, now := matrix(have, [0, 1, 2])).parcel
        assert (parcel.base, parcel.wire) == ("", encoding.download_whole)
        same(one.values, now)
    if not np.isfinite(have).all():
        for number, expected in ((3, False), (4, True)):  # from values that are not finite, and from those that are
            packer.begin(number, {client.held[0]: 1})
            parcel = client.asks(packer, matrix([1, 2, number], [0, 1, 1])).parcel
            assert bool(parcel.base) == expected


def test_a_sum_may_overflow_where_values_and_differences_do_not(tmp_path):
    packer, _ = packer_of(Encoding("sign", whole="float32"), tmp_path)
    client = Client()
    packer.begin(1, {})
    client.asks(packer, matrix([LARGEST, 0, 0, 0]))
    packer.begin(2, {client.held[0]: 1})
    with np.errstate(all="ignore"):
        far = matrix([LARGEST, *[LARGEST / 2] * 3])
        assert client.asks(packer, far).parcel.base == ""
    same(client.values, far)


def test_a_difference_beyond_the_encoding_makes_the_whole_be_sent_if_that_can_be(tmp_path):
    packer, _ = packer_of(Encoding("float16", top_k_down=0.5), tmp_path)
    client, low, high = Client(), matrix([-4e4, 1]), matrix([4e4, 1])
    packer.begin(1, {})
    client.asks(packer, low)
    packer.begin(2, {client.held[0]: 1})
    assert client.asks(packer, high).parcel.base == "", "80000 is not a float16"
    same(client.values, matrix(np.array([4e4, 1], np.float16)))
    packer.begin(3, {client.held[0]: 1})
    with pytest.raises(EncodingError, match=r"'w' cannot be sent as float16.*choose bfloat16"):
        packer.parcel(wanted(matrix([7e4, 1])), ())
    assert packer.parcel(wanted(matrix([7e4, 1])), client.held).parcel.base, "30000 is one"
    assert client.asks(packer, matrix([5e4, 1])).parcel.base


@pytest.mark.parametrize("encoding", [Encoding("sign"), Encoding("auto"), Encoding("float16", top_k_down=0.5)], ids=str)
def test_of_a_vector_that_is_not_finite_the_whole_is_sent(tmp_path, encoding):
    packer, _ = packer_of(encoding, tmp_path)
    client, x = Client(), model(0)
    packer.begin(1, {})
    client.asks(packer, x)
    packer.begin(2, {client.held[0]: 1})
    x = {**moved(x, 1), "bias": np.array([1, NAN, 2, 3, INF], np.float32)}
    assert client.asks(packer, x).parcel.base == ""
    same({"bias": client.values["bias"]}, {"bias": x["bias"]})


# ---- packed once -----------------------------------------------------------------------------------------------------


def test_clients_with_the_same_base_are_sent_the_same_bytes_which_are_packed_once(tmp_path, monkeypatch):
    written = []
    write = CODECS["sign"].write
    monkeypatch.setattr(type(CODECS["sign"]), "write", lambda self, *of: written.append(1) or write(*of))
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    parts, x = several_bases(packer)
    written.clear()
    first, second, _ = parts
    sent = {id: packer.parcel(wanted(x), [id]) for id in parts}
    assert len(written) == 2 * 3, "of each base two matrices"
    newcomer = packer.parcel(wanted(x), ())
    for held, expected in ([first], sent[first]), ([second, "of another"], sent[second]), ((), newcomer):
        again = packer.parcel(wanted(x), held)
        assert again == expected and again.data is expected.data
    assert len(written) == 6
    packer.forget()
    again = packer.parcel(wanted(x), [first])
    assert again.parcel == sent[first].parcel and again.data.data == sent[first].data.data
    assert again.data is not sent[first].data
    assert packer.parcel(wanted(x), ["of another"]).data.data == newcomer.data.data


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_packed_differences_stay_within_their_limit_in_memory(tmp_path, monkeypatch, most):
    """One is kept in any case."""
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    clients = [Client() for _ in range(8)]
    packer.begin(1, {})
    for seed, client in enumerate(clients):
        client.asks(packer, model(seed))
    packer.begin(2, {client.held[0]: 1 for client in clients})
    x = model(99)
    size = len(packer.parcel(wanted(x), clients[0].held).data.data)
    monkeypatch.setattr("tepal.exchange.packer._MOST_PACKED", most * size + 1)
    packer.forget()
    kept, parcels = [], []
    for client in clients:
        packed = packer.parcel(wanted(x), client.held)
        kept.append(weakref.ref(packed.data))
        parcels.append(packed.parcel)
        again = packer.parcel(wanted(x), clients[0].held)  # which so is not the one that was used longest ago
        assert packer.parcel(wanted(x), clients[0].held).data is again.data
        del packed, again
        assert sum(one() is not None for one in kept) <= max(most, 1)
    alive = [number for number, one in enumerate(kept) if one() is not None]
    if most > 1:
        assert alive == [0, *range(9 - most, 8)]
    packed = [packer.parcel(wanted(x), client.held).parcel for client in clients]
    assert packed == parcels, "what is packed again is the same"


@pytest.mark.parametrize("encoding", [Encoding("int8"), Encoding("bfloat16"), Encoding()], ids=str)
def test_without_differences_values_are_packed_once_and_no_references_are_kept(tmp_path, encoding):
    packer, _ = packer_of(encoding, tmp_path)
    x = model(0)
    packer.begin(1, {})
    first, second = (packer.parcel(wanted(x), ()) for _ in range(2))
    assert first == second and first.data is second.data
    found = unpack(first.data, shapes_of(x, x), encoding.download)
    same(found, dict(packer.starts(first.parcel.part, x)))
    assert packer.parcel(wanted(x), [first.parcel.part.id]).data is None
    lacks = {first.parcel.part.id: ("v", "w"), "of another": ("bias",)}
    resent = packer.parcel(wanted(x), (), lacks)
    assert resent.parcel.sent == ("w", "v") and resent.parcel.part == first.parcel.part
    same(unpack(resent.data, shapes_of(x, ("w", "v")), encoding.download), {n: found[n] for n in ("w", "v")})
    assert packer.parcel(wanted(x), (), {"of another": ("w",)}).data is None
    assert not list(tmp_path.iterdir())
    last = weakref.ref(resent.data)
    del resent
    assert last() is not None
    packer.forget()
    assert last() is None, "no memory is taken when all messages have been sent"


def test_differences_need_references():
    with pytest.raises(ValueError, match="downloads as sign are differences, which need references"):
        Packer(Encoding("sign"))


# ---- how much is left out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", [0.6, 0.2])
@pytest.mark.parametrize("missed", [1, 2, 3, 6])
def test_of_a_base_that_is_rounds_old_the_share_of_one_round_is_left_out(tmp_path, left_out, missed):
    """The least values of all matrices become 0, as many as hold the share of the squared norm."""
    packer, _ = packer_of(Encoding("auto", left_out=left_out), tmp_path)
    rng = np.random.default_rng(0)

    def matrices(scale):
        return {
            "w": (scale * rng.normal(size=(20, 50))).astype(np.float32),
            "v": (scale * rng.standard_t(3, size=(10, 90))).astype(np.float32),
        }

    client, x = Client(), matrices(1.0)
    packer.begin(1, {})
    client.asks(packer, x)
    had = client.values
    x = {name: value + step for (name, value), step in zip(x.items(), matrices(0.5).values(), strict=True)}
    packer.begin(1 + missed, {client.held[0]: 1})
    parcel = client.asks(packer, x).parcel
    share = left_out / math.sqrt(missed)
    assert parcel.base and parcel.wire.left_out == pytest.approx(share)
    difference, sent = (
        np.concatenate([(after[name] - had[name]).ravel() for name in ("w", "v")]) for after in (x, client.values)
    )
    squares = np.sort(np.square(difference, dtype=np.float64))
    total, count = squares.sum(), 0
    while squares[: count + 1].sum() <= share * total:
        count += 1
    zeros = np.flatnonzero(sent == 0)
    np.testing.assert_array_equal(zeros, np.sort(np.argsort(np.abs(difference), kind="stable")[:count]))
    left = np.square(difference - sent, dtype=np.float64).sum() / total
    assert share - squares[count] / total <= left < 1.15 * share + 0.02
    assert apart(x, client.values) == pytest.approx(left * total, rel=1e-3)


def test_the_less_often_a_client_is_there_the_more_it_is_sent_at_a_time(tmp_path):
    sent = []
    for missed in (1, 2, 4, 8):
        packer, _ = packer_of(Encoding("auto"), tmp_path / str(missed))
        client = Client()
        packer.begin(1, {})
        client.asks(packer, model(0))
        packer.begin(1 + missed, {client.held[0]: 1})
        sent.append(len(client.asks(packer, moved(model(0), 1)).data.data))
    assert sent == sorted(sent) and sent[0] < sent[-1]


@pytest.mark.parametrize("encoding", DIFFERENCES, ids=str)
def test_the_result_is_sent_as_exactly_as_a_whole_part(tmp_path, encoding):
    packer, _ = packer_of(encoding, tmp_path)
    client, x = Client(), model(0)
    packer.begin(1, {})
    client.asks(packer, x)
    packer.begin(2, {client.held[0]: 1})
    x = moved(x, 1)
    client.asks(packer, x)
    before = apart(x, client.values)
    packed = client.asks(packer, x, final=True)
    if encoding.download_whole.plain:
        assert packed.parcel.wire == PLAIN and not packed.rounded
        same(client.values, x)
    else:
        assert packed.parcel.wire == Wire(encoding.download_whole.dtype, differences=True)
        assert apart(x, client.values) < 0.05 * before


# ---- files that somebody copied, and clients that are sent two messages ----------------------------------------------


def test_a_reference_whose_file_has_other_values_than_its_name_says_is_no_base(tmp_path):
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    client, x = Client(), model(0)
    packer.begin(1, {})
    client.asks(packer, x)
    packer.parcel(wanted(model(1)), ())
    (mine,) = client.held
    paths = {path.name.split("@")[1][:32]: path for path in tmp_path.iterdir()}
    (other,) = paths.keys() - {mine}
    shutil.copy(paths[other], paths[mine])
    packer, _ = packer_of(Encoding("sign"), tmp_path)
    packer.begin(2, {mine: 1})
    parcel = packer.parcel(wanted(x), client.held).parcel
    assert (parcel.sent, parcel.base) == (tuple(x), "")


def test_a_client_that_is_sent_two_messages_has_its_base_once(tmp_path):
    packer, references = packer_of(Encoding("sign"), tmp_path)
    clients, x = [Client(), Client()], model(0)
    packer.begin(1, {})
    for client in clients:
        client.asks(packer, x)
    packer.begin(2, {clients[0].held[0]: 2})
    y = moved(x, 1)
    part = packer.parcel(wanted(y), clients[0].held).parcel.part
    packer.parcel(wanted(y), clients[0].held, {part.id: part.names})
    (one,) = references.of("model", "b", clients[0].held)
    assert one.holders == 1


def test_what_is_missing_is_not_searched_again_for_every_entry():
    class Listed(tuple):
        def __contains__(self, name):
            raise AssertionError("a long list was searched")

    packer, x = Packer(Encoding(), None), model(0)
    part = packer.parcel(wanted(x), ()).parcel.part
    first, *_ = part.names
    assert packer.parcel(wanted(x), (), {part.id: Listed([first, "of no part"])}).parcel.sent == (first,)
