"""Codecs, one matrix at a time: against torch, against brute force, and against bytes that nobody wrote."""

import contextlib
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tepal.exchange.encodings import CODECS, DTYPES, FIXED, PLAIN, RANKS, Encoding, EncodingError, Steps, TopK, Wire
from tepal.exchange.encodings.steps import Kept
from tepal.exchange.parts import pack, pieces_of, shapes_of, unpack, unpacked

SHAPES = hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=6)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
MATRICES = SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=FLOATS))
SMALL = SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-100, 100, width=32)))


OF_ALL = (Wire("sign", 0.3), Wire(top_k=0.5), Wire("auto", left_out=0.5))
"""Encodings with one threshold for all matrices."""


def there_and_back(codec, values, random=None):
    written = memoryview(codec.write(values, random))
    assert codec.length(values.shape, written) == len(written)
    read = codec.read(written, values.shape)
    assert (read.shape, read.dtype) == (values.shape, np.float32)
    return read


@given(hnp.arrays(np.uint32, (3, 5)).map(lambda bits: bits.view(np.float32)))
@example(np.array([[3.3961e38, -3e38]], np.float32))
@example(np.array([[3.3961e38, np.inf]], np.float32))
def test_bfloat16_is_torchs_for_any_bits(values):
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    if np.isfinite(values).all() and np.isinf(expected).any():
        with pytest.raises(EncodingError, match=r"bfloat16 represents values up to 3\.39e"):
            CODECS["bfloat16"].write(values, None)
        return
    read = there_and_back(CODECS["bfloat16"], values)
    np.testing.assert_array_equal(np.isnan(read), np.isnan(expected))
    np.testing.assert_array_equal(read[~np.isnan(read)].view(np.uint32), expected[~np.isnan(read)].view(np.uint32))


@given(SMALL)
def test_float16_is_torchs(values):
    np.testing.assert_array_equal(
        there_and_back(CODECS["float16"], values), torch.from_numpy(values).half().float().numpy()
    )


def test_a_value_beyond_float16_is_refused_in_words():
    with pytest.raises(EncodingError, match=r"'w' cannot be sent as float16: it has values up to 7e.04.*bfloat16"):
        pack({"w": np.full((2, 2), 7e4, np.float32)}, ["w"], Wire("float16"))
    read = there_and_back(CODECS["float16"], np.array([[np.inf, np.nan]], np.float32))
    assert not np.isfinite(read).any(), "a client that diverged is refused by the server, and not by this"


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
def test_a_value_beyond_float32_is_refused_in_words(dtype):
    beyond, infinite = np.full((20, 20), 1e39), np.full((20, 20), np.inf)
    wire = Wire(dtype, differences=True, left_out=0.5 if dtype == "auto" else 0.0)
    with pytest.raises(EncodingError, match=r"'w' cannot be sent encoded: .* beyond float32's range"):
        pack({"w": beyond}, ["w"], wire)
    with contextlib.suppress(EncodingError):
        pack({"w": infinite}, ["w"], wire)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_bfloat16_rounds_to_infinity_is_refused_in_words(sign):
    largest = float(torch.finfo(torch.bfloat16).max)
    beyond = np.float32(sign * (largest + 2.0**119))  # half a step further: rounded to even, which is 2¹²⁸
    with pytest.raises(EncodingError, match=r"'w' cannot be sent as bfloat16: it has .* 3\.396e\+38.*: choose float32"):
        pack({"w": np.array([[0, beyond]], np.float32)}, ["w"], Wire("bfloat16"))
    below = np.array([[np.nextafter(beyond, np.float32(0))]])
    assert there_and_back(CODECS["bfloat16"], below) == sign * largest
    read = there_and_back(CODECS["bfloat16"], np.array([[beyond, np.nan]], np.float32))
    assert not np.isfinite(read).any(), "a client that diverged is refused by the server, and not by this"


@given(MATRICES)
@example(np.full((1, 2), np.finfo(np.float32).max))
@example(np.full((1, 2), np.finfo(np.float32).tiny))
def test_int8_is_the_nearest_of_255_steps_of_its_row(values):
    read = there_and_back(CODECS["int8"], values)
    for row, came in zip(values, read, strict=True) if values.size else ():
        step = np.abs(row).max() / 127
        # Half a step; more where the scale itself is so small that float32 has few bits for it.
        assert (np.abs(came.astype(float) - row) <= step * 0.5001 + 127 * 2.0**-149).all()


def test_int8_written_at_random_is_right_in_the_mean():
    values = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    draws = [there_and_back(CODECS["int8"], values, np.random.default_rng([1, k])) for k in range(4000)]
    steps = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(np.asarray(draws) - values) <= steps * 1.0001).all()
    # The deviation of a mean of n is at most half a step / √n.
    assert (np.abs(np.mean(draws, axis=0) - values) < 5 * 0.5 * steps / math.sqrt(4000)).all()
    assert {*np.unique(draws[0] / steps - np.rint(draws[0] / steps)).round(3)} <= {0.0, -0.0}


def test_int8_passes_on_that_a_row_is_not_finite():
    values = np.ones((3, 2), np.float32)
    values[1, 1] = np.nan
    values[2, 0] = np.inf
    read = there_and_back(CODECS["int8"], values)
    np.testing.assert_array_equal(np.isnan(read).any(axis=1), [False, True, True])
    np.testing.assert_allclose(read[0], 1, rtol=1e-6)


@given(MATRICES)
@example(np.full((1, 2), np.finfo(np.float32).max))
def test_int4_is_the_nearest_of_15_steps_of_its_row(values):
    read = there_and_back(CODECS["int4"], values)
    for row, came in zip(values, read, strict=True) if values.size else ():
        step = np.abs(row).max() / 7
        assert (np.abs(came.astype(float) - row) <= step * 0.5001 + 7 * 2.0**-149).all()


@pytest.mark.parametrize("dtype", ["int4", "ternary", "sign"])
@given(values=SMALL, heavy=st.booleans())
def test_less_is_left_out_than_there_was(dtype, values, heavy):
    """Rounded to the nearest: error feedback then stays bounded."""
    values = values**3 if heavy else values
    left = np.square(rows_of(values) - rows_of(there_and_back(CODECS[dtype], values))).sum(axis=1)
    whole = np.square(rows_of(values)).sum(axis=1)
    assert (left <= whole * (1 - 1 / (2 * max(values[:1].size, 1))) + 1e-30).all()


@pytest.mark.parametrize("dtype, steps", [("int4", 7), ("ternary", 1)])
def test_what_is_rounded_at_random_is_right_in_the_mean(dtype, steps):
    values = np.random.default_rng(0).normal(size=(3, 41)).astype(np.float32)
    draws = np.asarray([there_and_back(CODECS[dtype], values, np.random.default_rng([1, k])) for k in range(4000)])
    units = np.abs(values).max(axis=1, keepdims=True) / steps
    assert (np.abs(draws - values) <= units * 1.0001).all()
    assert (np.abs(draws.mean(axis=0) - values) < 5 * 0.5 * units / math.sqrt(4000)).all()
    whole = draws / units
    assert np.abs(whole - np.rint(whole)).max() < 1e-4


def rows_of(values):
    return values.reshape(len(values), math.prod(values.shape[1:])).astype(float)


@given(SMALL)
@example(np.zeros((2, 3), np.float32))
@example(np.full((1, 3), np.finfo(np.float32).max))
def test_signs_have_the_mean_magnitude_of_their_row_and_are_a_contraction(values):
    read = rows_of(there_and_back(CODECS["sign"], values))
    for row, came in zip(rows_of(values), read, strict=True) if values.size else ():
        mean = sum(abs(value) for value in row) / len(row)
        np.testing.assert_allclose(came, [mean if value >= 0 else -mean for value in row], rtol=1e-6, atol=1e-40)
        left = np.square(came - row).sum()  # ‖v‖² − ‖v‖₁²/d: Karimireddy et al. 2019, lemma 8
        assert left == pytest.approx(np.square(row).sum() - len(row) * mean**2, rel=1e-4, abs=1e-4)


@given(SMALL)
@example(np.zeros((2, 3), np.float32))
@example(np.full((1, 1), 1e-45, np.float32))
@example(np.array([[1, 1, 1, 0.7, 0.6]], np.float32))
def test_ternary_values_are_the_best_multiples_of_those_above_a_share_of_the_mean(values):
    read = rows_of(there_and_back(CODECS["ternary"], values))
    for row, came in zip(rows_of(values), read, strict=True) if values.size else ():
        mean = np.mean(np.abs(row.astype(np.float32)), dtype=np.float64)
        threshold = np.nextafter(np.float32(0.7 * mean), np.float32(0))
        kept = [value for value in row if abs(value) > threshold]
        scale = sum(abs(value) for value in kept) / max(len(kept), 1)
        expected = [0 if abs(value) <= threshold else math.copysign(scale, value) for value in row]
        np.testing.assert_allclose(came, expected, rtol=1e-6, atol=1e-40)
        # The scale is the best for these signs, so that what is left out is less than all by what was sent.
        left = np.square(row).sum() - len(kept) * scale**2
        assert np.square(came - row).sum() == pytest.approx(left, rel=1e-4, abs=1e-4)
        assert not row.any() or np.square(came - row).sum() <= (1 - 1 / (2 * len(row))) * np.square(row).sum()


@pytest.mark.parametrize("dtype", ["int4", "ternary", "sign"])
@pytest.mark.parametrize("random", [None, 1])
def test_few_bits_pass_on_that_a_row_is_not_finite(dtype, random):
    values = np.ones((3, 2), np.float32)
    values[1, 1], values[2, 0] = np.nan, np.inf
    read = there_and_back(CODECS[dtype], values, None if random is None else np.random.default_rng(random))
    np.testing.assert_array_equal(np.isnan(read).any(axis=1), [False, True, True])
    np.testing.assert_allclose(read[0], 1, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, byte", [("int4", 0x0F), ("int4", 0xF0), ("rank1", 0x0F), ("ternary", 243), ("ternary", 255)]
)
def test_bytes_that_stand_for_no_values_are_refused(dtype, byte):
    written = bytearray(CODECS[dtype].write(np.ones((2, 10), np.float32), None))
    written[-1] = byte
    with pytest.raises(ValueError, match="do not stand for"):
        CODECS[dtype].read(memoryview(written), (2, 10))


def largest(flat, share):
    """Places of the share of the largest values, none of which is 0; of equal ones the first."""
    count = min(math.ceil(share * flat.size), flat.size)
    order = np.argsort(-np.abs(flat), kind="stable")[:count]
    return np.sort(order[flat[order] != 0])


@given(MATRICES, st.sampled_from([0.001, 0.01, 0.3, 0.5, 0.99]), st.sampled_from(["float32", "bfloat16"]))
@example(np.array([[2] + [1] * 29 + [0] * 330], np.float32), 0.01, "float32")  # of 29 equal ones 3
def test_top_k_is_the_largest_and_nothing_else(values, share, dtype):
    largest_kept = float(torch.finfo(getattr(torch, dtype)).max)  # beyond bfloat16's it is an error
    values = values.clip(-largest_kept, largest_kept)
    codec = TopK(share, CODECS[dtype])
    read = there_and_back(codec, values).reshape(-1)
    flat = values.reshape(-1)
    order = largest(flat, share)
    expected = np.zeros(values.size, np.float32)
    if len(order):
        expected[order] = Wire(dtype).decoded("w", flat[order].reshape(1, -1)).reshape(-1)
    np.testing.assert_array_equal(read, expected)


def in_few_bits(dtype, kept):
    """The values of one row, not 0, in a dtype, by its definition: value by value."""
    magnitudes = [abs(value) for value in kept]
    if dtype == "int4":
        unit = max(magnitudes) / 7
        return [round(value / unit) * unit for value in kept]
    mean = math.fsum(magnitudes) / len(kept)
    among = [value for value in magnitudes if dtype == "sign" or value > 0.7 * mean]
    level = math.fsum(among) / len(among)
    return [math.copysign(level, value) if dtype == "sign" or abs(value) > 0.7 * mean else 0.0 for value in kept]


@given(
    SHAPES.flatmap(lambda shape: hnp.arrays(np.int16, shape, elements=st.integers(-997, 997))),
    st.sampled_from([0.01, 0.1, 0.3, 0.9]),
    st.sampled_from(["int4", "ternary", "sign"]),
)
def test_top_k_in_few_bits_is_the_largest_in_one_row_of_few_bits(whole, share, dtype):
    values = whole.astype(np.float32) / 8
    read = there_and_back(TopK(share, CODECS[dtype]), values).reshape(-1)
    flat = values.reshape(-1).astype(float)
    places = largest(flat, share)
    expected = np.zeros(flat.size)
    if len(places):
        kept = flat[places].tolist()
        expected[places] = in_few_bits(dtype, kept)
        # Halfway between two levels either is right.
        limit = 0.7 * np.abs(kept).mean()
        between = [abs(v) / max(map(abs, kept)) * 7 % 1 - 0.5 if dtype == "int4" else abs(v) / limit - 1 for v in kept]
        assume(dtype == "sign" or min(map(abs, between)) > 1e-5)
    np.testing.assert_allclose(read, expected, rtol=1e-5)
    left_out, squared = np.square(read - flat).sum(), np.square(flat).sum()
    assert left_out < squared or not squared, "a contraction, so that error feedback stays bounded"
    if dtype == "sign" and len(places):
        # What arrives of the squared norm is that of the kept values' mean magnitude, once for each of them.
        assert squared - left_out == pytest.approx(np.abs(flat[places]).sum() ** 2 / len(places), rel=1e-4)


@given(
    st.lists(hnp.arrays(np.float32, (3, 4), elements=st.floats(-9, 9, width=32)), min_size=1, max_size=4),
    st.sampled_from([0.1, 0.25, 0.6]),
)
def test_the_largest_are_those_of_all_matrices_together(matrices, share):
    values = {str(number): matrix for number, matrix in enumerate(matrices)} | {"bias": np.ones(3, np.float32)}
    wire = Wire(top_k=share)
    found = unpack(pack(values, values, wire), shapes_of(values, values), wire)
    flat, together = (
        np.concatenate([of[str(number)].reshape(-1) for number in range(len(matrices))]) for of in (values, found)
    )
    assert set(together[together != 0]) <= set(flat)
    kept, expected = np.abs(together[together != 0]), np.abs(flat[largest(flat, share)])
    least = expected.min(initial=np.inf)
    np.testing.assert_array_equal(np.sort(kept[kept > least]), np.sort(expected[expected > least]))
    # Of those that are just as large as the least, each matrix sends its share, rounded up.
    assert len(expected) <= len(kept) < len(expected) + len(matrices) and kept.min(initial=np.inf) >= least
    np.testing.assert_array_equal(found["bias"], 1)


def test_of_many_values_about_the_share_is_kept_and_of_a_matrix_that_changed_little_less():
    rng = np.random.default_rng(0)
    values = {
        "much": rng.normal(size=(1024, 1500)).astype(np.float32),
        "little": rng.normal(scale=0.1, size=(1024, 3000)).astype(np.float32),
    }
    wire = Wire("sign", 0.1)
    found = unpack(pack(values, values, wire), shapes_of(values, values), wire)
    kept = {name: np.count_nonzero(array) / array.size for name, array in found.items()}
    assert kept["little"] == 0 and kept["much"] == pytest.approx(0.3, rel=0.01)


def test_what_is_not_finite_is_among_the_largest():
    values = np.arange(20, dtype=np.float32).reshape(4, 5)
    values[0, 0] = np.nan
    read = there_and_back(TopK(0.05, CODECS["float32"]), values)
    assert np.isnan(read[0, 0]) and np.count_nonzero(read) == 1


@pytest.mark.parametrize(
    "places", [[0], [254], [255], [256], [509], [510], [511, 512], [99_999], [0, 99_999], range(0, 100_000, 255)]
)
def test_gaps_of_any_length_are_found_again(places):
    values = np.zeros((100, 1000), np.float32)
    values.reshape(-1)[list(places)] = 1
    codec = TopK(len(places) / values.size, CODECS["float32"])
    np.testing.assert_array_equal(there_and_back(codec, values), values)


def test_gaps_that_are_short_for_what_they_stand_for_are_not_read():
    """A few coded bytes may stand for gigabytes."""
    coder = zlib.compressobj(wbits=-15)
    bomb = coder.compress(bytes(10_000_000)) + coder.flush()
    codec = TopK(0.9, CODECS["sign"])
    numbers = (18_000).to_bytes(4, "little") + len(bomb).to_bytes(4, "little")
    data = numbers + codec.of.write(np.ones((1, 18_000), np.float32), None) + bomb
    assert codec.length((200, 100), memoryview(data)) == len(data)
    with pytest.raises(ValueError, match="stand for too many"):
        codec.read(memoryview(data), (200, 100))


def in_steps(values, left_out):
    """What `auto` makes of these values, one by one, and whether one is so near a bound that it may differ."""
    below, threshold = 0.0, 0.0
    for value in sorted(abs(float(value)) for value in values):
        below += value**2
        threshold = value
        if value and below > left_out * sum(float(value) ** 2 for value in values):
            break
    step = max(threshold, max(map(abs, values), default=0) * 0.66 / 127) / 0.66
    counts = [abs(float(value)) / step if step else 0.0 for value in values]
    levels = [min(math.floor(count + 0.34 + 1e-6), 127) for count in counts]
    above = [count - level for count, level in zip(counts, levels, strict=True) if level]
    mean = sum(above) / max(len(above), 1)
    signed = zip(levels, values, strict=True)
    found = [math.copysign((level + mean) * step, value) if level else 0.0 for level, value in signed]
    return found, any(abs(count + 0.34 - round(count + 0.34)) < 1e-4 for count in counts if count)


@given(
    st.lists(
        hnp.arrays(np.float32, (3, 9), elements=st.floats(-9, 9, width=32), fill=st.just(0.0)), min_size=1, max_size=3
    ),
    st.sampled_from([0.0, 0.02, 0.2, 0.6, 0.95]),
)
@example([np.zeros((2, 3), np.float32)], 0.6)
@example([np.full((1, 1), 1e-45, np.float32)], 0.6)
@example([np.array([[1e38, -3e38, 1e30]], np.float32)], 0.2)
@example([np.arange(-100, 100, dtype=np.float32).reshape(10, 20)], 0.02)
def test_auto_is_whole_steps_of_a_size_that_leaves_out_the_share(matrices, left_out):
    values = {str(number): matrix for number, matrix in enumerate(matrices)} | {"bias": np.ones(2, np.float32)}
    wire = Wire("auto", left_out=left_out)
    found = unpack(pack(values, values, wire), shapes_of(values, values), wire)
    came, flat = (np.concatenate([of[name].reshape(-1) for name in values]) for of in (found, values))
    expected, close = in_steps(flat, left_out)
    unit = np.abs(flat).max()
    if not close:
        np.testing.assert_allclose(came, expected, rtol=1e-4, atol=1e-6 * unit)
    left, whole = (np.square(of / unit, dtype=np.float64).sum() for of in (came.astype(float) - flat, flat))
    assert left < whole, "a contraction, so that error feedback stays bounded, and something arrives"


def test_auto_encodes_small_arrays_together_and_large_ones_alone():
    rng = np.random.default_rng(0)
    shapes = {f"layer{k}": (64, 64) for k in range(6)} | {f"bias{k}": (64,) for k in range(6)} | {"large": (512, 600)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    wire = Wire("auto", left_out=0.6)
    packed = pack(values, values, wire)
    small = np.concatenate([values[name].reshape(-1) for name in values if name != "large"])
    fitted = Steps(0.6).fitted([512 * 600, small.size], lambda number: [values["large"], small][number])
    expected = fitted.write(values["large"], None), fitted.write(small, None)
    assert bytes(packed.data) == b"".join([b"\0", expected[0], b"\0", expected[1]]), "none of them is a product"
    apart = sum(len(fitted.write(values[name], None)) for name in values if name != "large")
    assert len(expected[1]) < 0.8 * apart
    found = unpack(packed, shapes_of(values, values), wire)
    assert {name: array.shape for name, array in found.items()} == shapes
    joined = np.concatenate([found[name].reshape(-1) for name in values if name != "large"])
    np.testing.assert_array_equal(joined, fitted.read(memoryview(expected[1]), (small.size,)))


def test_what_is_encoded_together_has_a_limit():
    """So that little memory is needed to encode a model of many small arrays."""
    shaped = [(f"w{k}", "float32", (100, 300)) for k in range(50)]
    pieces = pieces_of(shaped, Wire("auto", left_out=0.6))
    assert [item for piece in pieces for item in piece.items] == shaped
    assert [len(piece.items) for piece in pieces] == [9, 9, 9, 9, 9, 5]  # 9 x 30,000 values are 2^18 or more


@pytest.mark.parametrize("left_out", [0.01, 0.1, 0.3, 0.6, 0.8])
@pytest.mark.parametrize("heavy", [False, True])
def test_auto_leaves_out_about_the_share_in_no_more_bytes_than_it_must(left_out, heavy):
    rng = np.random.default_rng(0)
    values = {"w": rng.normal(size=(700, 1000)).astype(np.float32)}
    values["w"] = values["w"] ** 3 if heavy else values["w"]
    packed = pack(values, ["w"], wire := Wire("auto", left_out=left_out))
    found = unpack(packed, shapes_of(values, ["w"]), wire)["w"]
    left = np.square(found - values["w"], dtype=np.float64).sum() / np.square(values["w"], dtype=np.float64).sum()
    assert left_out * 0.95 < left < left_out * 1.25 + 0.03
    _, counts = np.unique(found, return_counts=True)
    entropy = -np.sum(counts / found.size * np.log2(counts / found.size))
    bits = 8 * len(packed.data) / found.size
    assert entropy <= bits < 1.1 * entropy + 0.01, "these values are random: no code has fewer bits"


def test_auto_sends_little_of_a_matrix_that_changed_little():
    rng = np.random.default_rng(0)
    values = {"much": rng.normal(size=(400, 500)), "little": rng.normal(scale=0.1, size=(400, 500))}
    found = unpack(pack(values, values, wire := Wire("auto", left_out=0.6)), shapes_of(values, values), wire)
    assert not found["little"].any() and 0.05 < np.count_nonzero(found["much"]) / found["much"].size < 0.2


def within(packed, bits, matrices, values):
    """Whether a part is within its limit, beyond what matrices have in any case."""
    return len(packed.data) - FIXED * matrices <= bits * values / 8


@given(
    SMALL | MATRICES,
    st.sampled_from([1e-6, 0.05, 0.4, 1.0, 3.0]),
    st.sampled_from([0.0, 0.1, 0.6]),
    st.sampled_from(["normal", "equal", "nearly equal", "heavy"]),
)
@settings(max_examples=300)
def test_auto_stays_within_its_bits_and_sends_something(values, bits, left_out, kind):
    normal = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    other = {
        "normal": normal, "equal": np.sign(normal), "nearly equal": np.sign(normal) + 0.005 * normal,
        "heavy": np.exp(8 * normal),
    }[kind]  # fmt: skip
    values = {"w": values, "v": other}
    packed = pack(values, values, wire := Wire("auto", left_out=left_out, bits=bits))
    found = unpack(packed, shapes_of(values, values), wire)
    assert found["v"].any() or found["w"].any()
    one_each = sum(np.count_nonzero(value) for value in found.values()) <= 1
    assert one_each or within(packed, bits, 1, sum(value.size for value in values.values()))


@pytest.mark.parametrize("bits", [0.05, 0.2, 0.9, 2.0])
@pytest.mark.parametrize("size", [(4, 160), (40, 500), (400, 1000)])
@pytest.mark.parametrize("kind", ["equal", "nearly equal", "random signs", "heavy"])
def test_under_a_limit_all_arrives_in_the_end(kind, size, bits):
    rng = np.random.default_rng(0)
    left = np.zeros(size, np.float32)
    same = np.sign(rng.normal(size=size)).astype(np.float32)
    norms, written = [], []
    write = Steps.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "write", lambda self, *of: written.append(1) or write(self, *of))
        for _ in range(15):
            update = {
                "equal": same, "nearly equal": same * (1 + 0.005 * rng.random(size)),
                "random signs": np.sign(rng.normal(size=size)), "heavy": np.exp(4 * rng.normal(size=size)),
            }[kind].astype(np.float32)  # fmt: skip
            value = {"w": left + update}
            packed = pack(value, value, wire := Wire("auto", left_out=0.6, bits=bits))
            read = unpack(packed, shapes_of(value, value), wire)["w"]
            assert read.any() and within(packed, bits, 1, left.size)
            left = value["w"] - read
            norms.append(float(np.square(left / np.abs(update).mean(), dtype=np.float64).sum()))
    assert len(written) <= 4 * len(norms)
    everything = np.square(np.arange(1, 16)) * norms[0] if kind in ("equal", "nearly equal") else None
    if everything is not None and bits >= 0.2:
        assert norms[-1] <= 0.9 * everything[-1], "what is left out would grow so if nothing arrived"


@pytest.mark.parametrize("few", ["two", "an outlier"])
def test_what_a_sample_lacks_is_sent_all_the_same(few):
    """The threshold is computed from a part of the values, at the same places in each round."""
    update = np.zeros((400, 1000), np.float32)
    if few == "an outlier":
        update += np.random.default_rng(0).normal(scale=1e-3, size=update.shape).astype(np.float32)
    update[17, 333], update[301, 5] = 2, 1.5 if few == "two" else 1e-3
    left, ratios = np.zeros_like(update), []
    for _ in range(20):
        value = {"w": left + update}
        read = unpack(pack(value, value, wire := Wire("auto", left_out=0.6)), shapes_of(value, value), wire)["w"]
        left = value["w"] - read
        ratios.append(float(np.square(left).sum() / np.square(update).sum()))
    assert max(ratios) < 3 and (few == "an outlier" or max(ratios) < 0.7)


def test_places_of_many_values_are_refused():
    """They are written without, and would take much memory."""
    written = memoryview(Steps(0.6, threshold=Kept(1.0, 1.0)).write(np.eye(10, dtype=np.float32), None))
    with pytest.raises(ValueError, match="it declares 10 values"):
        Steps(0.6).length((4, 5), written)


@given(st.floats(1e-30, 1e30), st.integers(1, 40), st.sampled_from([0.0, 0.3, 0.6, 0.9]))
def test_of_equal_values_all_are_sent(value, size, left_out):
    values = np.full((1, size), value, np.float32)
    np.testing.assert_allclose(there_and_back(Steps(left_out), values), values, rtol=1e-5)


def test_values_near_the_largest_stay_finite():
    values = np.array([[3.3e38, 3.2e38, 3.4e38, 1.1e38]], np.float32)
    for left_out in (0.0, 0.1, 0.5, 0.9):
        assert np.isfinite(there_and_back(Steps(left_out), values)).all()


@pytest.mark.parametrize("bits", [0.02, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("heavy", [False, True])
def test_auto_makes_use_of_its_bits_and_leaves_out_no_more_than_it_must(bits, heavy):
    rng = np.random.default_rng(0)
    values = {"w": rng.normal(size=(700, 1000)).astype(np.float32) ** (3 if heavy else 1)}
    sent = {
        limit: 8 * len(pack(values, ["w"], Wire("auto", left_out=0.1, bits=limit)).data) / values["w"].size
        for limit in (0.0, bits)
    }
    assert 0.8 * min(bits, sent[0.0]) < sent[bits] <= min(bits + 8 * FIXED / values["w"].size, sent[0.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("many", [False, True])
def test_auto_passes_on_that_a_matrix_is_not_finite(bad, many):
    values = np.random.default_rng(0).normal(size=(20, 20)).astype(np.float32)
    values[3, 4] = bad
    read = there_and_back(Steps(0.6, threshold=Kept(0.1 if many else 2.0, 1.0)), values)
    assert np.isnan(read[3, 4])


def test_differences_over_several_rounds_are_sent_more_exactly():
    wire = Wire("auto", left_out=0.6)
    assert wire.after(1) is wire and wire.after(4) == Wire("auto", left_out=0.3)
    assert Wire("sign").after(4) == Wire("sign")


@pytest.mark.parametrize("clients, rounds, left_out", [
    (20, 10, 3.75 / 4.75), (2.5, 40, 0.46875 / 1.46875), (1, 2, 0.1875 / 1.1875), (1, 1, 0.6), (50, 1.5, 0.4),
    (0, 10, 0.06),
])  # fmt: skip
def test_uploads_to_a_mean_leave_out_more_the_more_clients_there_are(clients, rounds, left_out):
    wire = Encoding(up="auto").upload.averaged(clients, rounds)
    assert wire.left_out == pytest.approx(left_out)
    assert wire.feedback and wire.unbiased == (clients > 0 and rounds >= 2)
    if wire.unbiased:  # D / (1 − D) / n is an eighth of .6 / .4
        assert wire.left_out / (1 - wire.left_out) / clients == pytest.approx(1.5 / 8)
    exact = Encoding(up="auto", left_out=0.0)
    for other in (Encoding(up="sign"), Encoding(up="int8"), Encoding(top_k=0.1), Encoding(), exact):
        assert other.upload.averaged(20, 10) == other.upload
    assert Encoding(up="auto", left_out=1 - 1e-12).upload.averaged(10**6, 2).left_out < 1


@pytest.mark.parametrize("left_out", [0.0, 0.1, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("heavy", [False, True])
def test_unbiased_what_is_decoded_has_the_length_of_the_values_along_them(left_out, heavy):
    rng = np.random.default_rng(0)
    values = {"w": rng.normal(size=(300, 1000)), "v": 0.1 * rng.normal(size=(40, 50)), "none": np.zeros((3, 4))}
    values = {name: (value ** (3 if heavy else 1)).astype(np.float32) for name, value in values.items()}
    biased, unbiased = (
        unpack(pack(values, values, wire), shapes_of(values, values), wire)
        for wire in (Wire("auto", left_out=left_out), Wire("auto", left_out=left_out, unbiased=True))
    )
    flat, short, along = (np.concatenate([of[n].reshape(-1) for n in values]).astype(float)
                          for of in (values, biased, unbiased))  # fmt: skip
    assert along @ flat == pytest.approx(flat @ flat, rel=1e-3)
    assert not unbiased["none"].any()
    np.testing.assert_allclose(along, short * (flat @ flat) / (short @ flat), rtol=1e-3)
    share = np.square(short - flat).sum() / (flat @ flat)
    assert np.square(along - flat).sum() / (flat @ flat) == pytest.approx(share / (1 - share), rel=0.02, abs=1e-4)


@pytest.mark.parametrize("clients", [4, 16, 64])
def test_the_mean_of_unbiased_uploads_is_closer_the_more_there_are(clients):
    rng = np.random.default_rng(0)
    wire = Wire("auto", left_out=0.6, unbiased=True)
    updates = [{"w": rng.normal(size=(100, 200)).astype(np.float32)} for _ in range(clients)]
    decoded = [unpack(pack(of, of, wire), shapes_of(of, of), wire)["w"] for of in updates]
    off = np.mean(decoded, axis=0) - np.mean([of["w"] for of in updates], axis=0)
    assert np.square(off).mean() == pytest.approx(1.55 / clients, rel=0.05)  # .61 / .39 of what each has


@pytest.mark.parametrize("clients, arrives", [(10, 0.0), (0, 1.0)], ids=["scaled up", "fed back"])
def test_a_small_change_that_all_have_in_common_arrives_only_by_feedback(clients, arrives):
    """Docs say so. Ten of 40 clients a round: half of the values differ much among them, the others are small."""
    wire = Encoding(up="auto").upload.averaged(clients, 4)
    rng = np.random.default_rng(0)
    aims = [{"own": rng.normal(size=(20, 20)), "common": np.full((20, 20), 0.2)} for _ in range(40)]
    model = {name: np.zeros((20, 20)) for name in ("own", "common")}
    left = [model] * 40
    for _ in range(150):
        taken = dict(model)
        for client in rng.choice(40, 10, replace=False):
            update = {
                name: (0.3 * (aims[client][name] - model[name]) + left[client][name]).astype(np.float32)
                for name in model
            }
            decoded = unpack(pack(update, update, wire), shapes_of(update, update), wire)
            if not clients:
                left[client] = {name: update[name] - decoded[name] for name in update}
            taken = {name: taken[name] + decoded[name] / 10 for name in taken}
        model = taken
    assert model["common"].mean() / 0.2 == pytest.approx(arrives, abs=0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_unbiased_what_is_not_finite_arrives_and_what_is_nearly_so_stays_finite(value):
    values = {"w": np.full((20, 20), value, np.float32)}
    values["w"][5:] = 1.0
    wire = Wire("auto", left_out=0.6, unbiased=True)
    read = unpack(pack(values, ["w"], wire), shapes_of(values, ["w"]), wire)
    assert np.isfinite(read["w"]).all() == np.isfinite(value)


def test_how_long_what_is_written_is():
    values = {"w": np.random.default_rng(0).normal(size=(768, 3072)).astype(np.float32)}
    size = values["w"].size
    lengths = {dtype: len(pack(values, ["w"], Wire(dtype)).data) for dtype in CODECS}
    assert lengths == {
        "float32": 4 * size, "float16": 2 * size, "bfloat16": 2 * size, "int8": size + 4 * 768,
        "int4": size / 2 + 4 * 768, "ternary": math.ceil(size / 5) + 4 * 768, "sign": size / 8 + 4 * 768,
        **{f"rank{rank}": rank * ((768 + 3072) // 2 + 8) for rank in (1, 2, 4, 8)},
    }  # fmt: skip
    for share in (0.3, 0.1, 0.05, 0.02, 0.01):
        packed = pack(values, ["w"], wire := Wire(top_k=share))
        kept = np.count_nonzero(unpack(packed, shapes_of(values, ["w"]), wire)["w"])
        p = kept / size
        assert p == pytest.approx(share, rel=0.02)
        entropy = -size * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8
        gaps = len(packed.data) - 4 * kept
        assert 0.99 * entropy < gaps < 1.03 * entropy, "these places are random: no code has fewer bytes"


@pytest.mark.parametrize("wire", [PLAIN, *(Wire(dtype) for dtype in CODECS if dtype != "float32"), *OF_ALL])
def test_only_matrices_and_in_auto_and_ranks_vectors_of_float32_and_float64_are_encoded(wire):
    rng = np.random.default_rng(0)
    values = {
        "flag": np.array([True]), "bytes": np.arange(3, dtype=np.uint8), "count": np.array(3),
        "half": np.ones((2, 2), np.float16), "bias": rng.normal(size=7).astype(np.float32),
        "norm.running_var": rng.random(size=7).astype(np.float32), "scale": np.array(0.3, np.float32),
        "w": rng.normal(size=(5, 7)).astype(np.float32),
        "other": rng.normal(size=(3, 3, 3)), "none": np.zeros((0, 4), np.float32),
    }  # fmt: skip
    packed = pack(values, values, wire)
    found = unpack(packed, shapes_of(values, values), wire)
    assert {name: (a.dtype, a.shape) for name, a in found.items()} == {n: (a.dtype, a.shape) for n, a in values.items()}
    for name, array in found.items():
        assert not array.flags.writeable
        if name == "bias" and wire.dtype in ("auto", *RANKS):
            assert array.tobytes() != values[name].tobytes()
        elif name in ("w", "other") and wire in OF_ALL:
            assert array.any() and not array.all()
        elif name in ("w", "other"):
            np.testing.assert_array_equal(array, wire.decoded(name, values[name]))
        else:
            assert array.tobytes() == values[name].tobytes()


@given(
    st.binary(max_size=80),
    st.sampled_from([*(Wire(dtype) for dtype in DTYPES[1:]), Wire(top_k=0.2), Wire("int8", 0.2), *OF_ALL]),
)
def test_bytes_that_nobody_wrote_are_refused_or_read_and_do_no_harm(data, wire):
    shaped = [("w", "float32", (4, 5))]
    packed = pack({"w": np.ones((4, 5), np.float32)}, ["w"], wire)
    packed.data = data
    try:
        found = unpack(packed, shaped, wire)
    except ValueError:
        return
    assert found["w"].shape == (4, 5)


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"\xff" * 4 + d[4:], lambda d: d[:8], lambda d: b""]
)
def test_another_length_is_refused(change):
    packed = pack({"w": np.arange(20, dtype=np.float32).reshape(4, 5)}, ["w"], Wire(top_k=0.5))
    packed.data = change(packed.data)
    with pytest.raises(ValueError, match=r"bytes|gaps"):
        dict(unpacked(packed, [("w", "float32", (4, 5))], Wire(top_k=0.5)))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"down": "int5"}, "'int5'; it must be one of float32, float16, bfloat16, int8, int4, ternary, sign, rank1, "),
        ({"up": "auto", "top_k": 0.1}, "with auto it must be 0"),
        ({"down": "rank2", "top_k_down": 0.1}, "with rank2 it must be 0, since rank2 says how much is sent"),
        ({"budget": 10, "down": "sign"}, "budget is 10 with down='sign' and up='float32'; .* both must be 'auto'"),
        ({"budget": 10, "down": "auto"}, "budget is 10 with down='auto' and up='float32'; .* both must be 'auto'"),
        ({"budget": 10, "up": "auto"}, "budget is 10 with down='float32' and up='auto'; .* both must be 'auto'"),
        ({"budget": -1, "up": "auto"}, "budget is -1"),
        ({"budget": math.nan, "up": "auto"}, "budget is nan"),
        ({"left_out": 1.0}, "left_out is 1.0; it must be at least 0 and less than 1"),
        ({"top_k_down": -0.1}, "top_k is -0.1"),
        ({"whole": "sign"}, "whole is 'sign'; it must be same, or one of float32, float16, bfloat16, int8, int4"),
        ({"up": "bf16"}, "'bf16'"),
        ({"top_k": 1.0}, "top_k is 1.0"),
    ],
)
def test_an_encoding_that_is_none(options, said):
    with pytest.raises(ValueError, match=said):
        Encoding(**options)


def test_what_an_encoding_asks_of_clients():
    assert Encoding().upload is PLAIN and str(Encoding()) == "none"
    assert Encoding(up="bfloat16").upload == Wire("bfloat16", differences=True), "no error that is worth keeping"
    assert Encoding(down="bfloat16").upload == Wire(differences=True)
    for dtype in ("int4", "ternary", "sign", *RANKS):
        assert Encoding(up=dtype).upload == Wire(dtype, differences=True, feedback=True)
        fed, alone = Encoding(up=dtype).upload, Encoding(up=dtype, error_feedback=False).upload
        assert [wire.random(1) is not None for wire in (fed, alone)] == [False, dtype in ("int4", "ternary")]
    assert Encoding(up="int8", seed=3).upload == Wire("int8", differences=True, feedback=True, seed=3)
    assert Encoding(top_k=0.01, error_feedback=False).upload == Wire(top_k=0.01, differences=True)
    for fewer in (Encoding("sign"), Encoding("rank2"), Encoding("int8", top_k_down=0.1)):
        assert fewer.differences_down and fewer.download.differences and fewer.download_whole == Wire("int8")
        assert fewer.upload == Wire(differences=True)
    assert not Encoding("int8").differences_down and Encoding("int8").download_whole == Wire("int8")
    assert Encoding("sign", whole="int4").download_whole == Wire("int4")
    both = Encoding("auto", "auto", left_out=0.5)
    assert both.upload == Wire("auto", differences=True, feedback=True, left_out=0.5)
    alone = Encoding("auto", "auto", left_out=0.5, error_feedback=False)
    assert alone.upload == Wire("auto", differences=True, left_out=0.5) and alone.download == both.download
    assert (both.download, both.download_whole) == (Wire("auto", differences=True, left_out=0.5), Wire("int4"))
    assert Encoding("bfloat16", top_k_down=0.1).download_whole == Wire("bfloat16")
    described = "changes in sign down, ternary up, with error feedback"
    assert str(Encoding("sign", "ternary")) == described
    described = "bfloat16 down, the largest 1 % of values in int8 up, with error feedback"
    assert str(Encoding("bfloat16", "int8", 0.01)) == described
