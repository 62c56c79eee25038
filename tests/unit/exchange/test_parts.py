from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tepal.exchange.encodings import PLAIN
from tepal.exchange.parts import STYPE, Part, digest, pack, unpack, unpack_checked

DTYPES = st.sampled_from(["float32", "float64", "float16", "int64", "int32", "uint8", "bool"])
ARRAYS = st.dictionaries(
    st.text(min_size=1, max_size=8),
    DTYPES.flatmap(lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))),
    max_size=6,
)


@given(ARRAYS)
def test_unpack_undoes_pack_bit_for_bit(values):
    packed = pack(values, values)
    assert packed.stype == STYPE
    assert len(packed.data) == sum(array.nbytes for array in values.values())
    found = unpack(packed, [(name, array.dtype.name, array.shape) for name, array in values.items()])
    assert found.keys() == values.keys()
    for name, array in values.items():
        assert found[name].tobytes() == array.tobytes()
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].flags.aligned and not found[name].flags.writeable


def test_unpack_copies_nothing():
    packed = pack({"a": np.ones(3, np.float32)}, ["a"])
    assert np.shares_memory(unpack(packed, [("a", "float32", (3,))])["a"], np.frombuffer(packed.data, np.uint8))


def test_arrays_of_another_digest_are_left_out_unless_digests_are_not_verified():
    values = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}
    packed, shaped = pack(values, values), [("a", "float32", (3,)), ("b", "float32", (2,))]
    digests = {name: digest(array) for name, array in values.items()}
    part = Part("model", "all", ("a", "b"), (digests["a"], digests["a"]))
    for asked, expected in ((None, "ab"), (part, "a"), (None, "ab"), (part, "a")):
        found, of_found = unpack_checked(packed, shaped, PLAIN, asked)
        assert {name: array.tolist() for name, array in found.items()} == {
            name: values[name].tolist() for name in expected
        }
        assert of_found == ({name: digests[name] for name in expected} if asked else {})


def test_of_a_part_whose_id_alone_is_known_all_arrays_are_right_or_none():
    values = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}
    packed, shaped = pack(values, values), [("a", "float32", (3,)), ("b", "float32", (2,))]
    whole = Part("model", "all", ("a", "b"), tuple(map(digest, values.values())))
    known = Part("model", "all", ("a", "b"), known_id=whole.id)
    assert known.id == whole.id and known.with_digests(whole.digest_of) == whole
    found, digests = unpack_checked(packed, shaped, PLAIN, known)
    assert found.keys() == {"a", "b"} and digests == whole.digest_of
    for other in (replace(known, known_id="0" * 32), replace(known, names=("b", "a")), replace(known, names=("a",))):
        assert unpack_checked(packed, shaped, PLAIN, other) == ({}, {})


@pytest.mark.parametrize("shape", [(2,), (4,), ()])
def test_unpack_refuses_a_part_of_another_length(shape):
    packed = pack({"a": np.ones(3, np.float32)}, ["a"])
    with pytest.raises(ValueError, match="12 bytes"):
        unpack(packed, [("a", "float32", shape)])


def test_a_slice_of_a_transposed_tensor_has_the_digest_of_its_copy():
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert digest(whole[:, 2:4]) == digest(whole[:, 2:4].copy())


def test_a_digest_is_the_same_in_every_version_and_on_every_machine():
    """BLAKE3's published test vector of an empty input, and recorded digests: caches and checkpoints have them."""
    assert blake3(b"").hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digest(array) == blake3(b"float32(2, 3)" + array.tobytes()).digest()[:16]
    assert digest(array).hex() == "c4efeb98de93ce62fc86719e577713f6"


@given(ARRAYS)
def test_digest_tells_values_dtypes_and_shapes_apart(values):
    seen: dict[bytes, tuple] = {}
    for array in values.values():
        key = (array.dtype.name, array.shape, array.tobytes())
        assert seen.setdefault(digest(array), key) == key


def test_parts_of_equal_values_have_equal_ids_whatever_their_tree():
    one = Part("model", "value", ("a",), (b"x" * 16,))
    assert one.id == Part("mode/3", "other", ("a",), (b"x" * 16,)).id
    assert one.id != Part("model", "value", ("b",), (b"x" * 16,)).id
    assert len(one.id) == 32
