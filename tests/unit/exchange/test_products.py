"""Matrices as products of two thin ones: of a given rank, and in `auto` where they take fewer bytes than steps."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tepal.exchange.encodings import CODECS, RANKS, Mixed, Steps, Wire
from tepal.exchange.parts import pack, shapes_of, unpack
from tests.unit.exchange.test_encodings import SMALL, there_and_back


def with_values(singular, rows, others, seed=0):
    """A matrix with these singular values."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(side, len(singular))))[0] for side in (rows, others))
    return (left * singular @ right.T).astype(np.float32)


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_a_matrix_of_a_low_rank_is_its_product_but_for_rounding(rank):
    values = with_values(np.arange(rank, 0, -1.0), 60, 90)
    read = there_and_back(CODECS[f"rank{rank}"], values.reshape(60, 9, 10)).reshape(60, 90)
    assert np.linalg.norm(read - values) < 0.2 * np.linalg.norm(values)
    assert np.linalg.matrix_rank(read, tol=1e-4) <= rank


@pytest.mark.parametrize("dtype", RANKS)
@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
def test_of_other_matrices_nearly_the_best_of_this_rank_is_sent(dtype, decay):
    """Eckart and Young: nothing of rank r leaves out less than the squares of the other singular values."""
    rank = int(dtype.removeprefix("rank"))
    singular = np.arange(1, 81.0) ** -decay
    values = with_values(singular, 80, 300)
    left = np.square(there_and_back(CODECS[dtype], values).astype(float) - values).sum()
    squares = np.square(singular)
    assert squares[rank:].sum() * (1 - 1e-5) <= left <= squares[rank:].sum() + 0.05 * squares.sum()


@pytest.mark.parametrize("dtype", RANKS)
@given(values=SMALL, heavy=st.booleans())
@example(values=np.zeros((9, 7), np.float32), heavy=False)
@example(values=np.full((20, 30), 1e-45, np.float32), heavy=False)
@example(values=np.eye(60, dtype=np.float32), heavy=False)
def test_of_a_product_less_is_left_out_than_there_was(dtype, values, heavy):
    values = values**3 if heavy else values
    left = np.square(values.astype(float) - there_and_back(CODECS[dtype], values)).sum()
    assert left <= np.square(values.astype(float)).sum() * (1 + 1e-6)


def test_where_directions_are_rounded_to_nearly_the_same_no_more_is_left_out_than_there_was():
    """All columns of P have one large value, beside which the others are rounded to 0 or to the same."""
    choices = np.array([[k in chosen for k in range(8)] for chosen in itertools.combinations(range(8), 4)])
    right = np.tile(np.where(choices, 0.52, -0.495), (20, 1))
    inner = right.T @ right
    right = np.vstack([right, np.full((1, 8), np.sqrt(-(inner.sum() - np.trace(inner)) / 56))])  # orthogonal columns
    signs = np.array([[(-1) ** (n >> k & 1) for n in range(2**13)] for k in range(8)])
    t = 0.32
    squares, turns = np.linalg.eigh(np.eye(8) * (1 - t**2 / 49) - t**2 * np.ones((8, 8)))
    even = signs.T @ (turns * np.sqrt(squares) @ turns.T) / 2**6.5
    left = np.vstack([np.full((1, 8), t), np.eye(8) * t / 7, even])
    values = ((left * np.linspace(1, 0.8, 8)) @ (right / np.linalg.norm(right, axis=0)).T).astype(np.float32)
    read = there_and_back(CODECS["rank8"], values)
    assert np.square(read.astype(float) - values).sum() <= np.square(values, dtype=float).sum()


@pytest.mark.parametrize("dtype", RANKS)
@pytest.mark.parametrize(
    "shape", [(10, 128), (64, 32, 3, 3), (300, 1), (1, 300), (3, 3), (0, 5), (5, 0), (2, 400), (90,)]
)
def test_a_product_is_sent_where_it_has_fewer_bytes_than_int4(dtype, shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows, others = shape[0], math.prod(shape[1:])
    rank = min(int(dtype.removeprefix("rank")), rows, others)
    product, otherwise = 8 * rank + math.ceil(rank * (rows + others) / 2), CODECS["int4"].write(values, None)
    written = CODECS[dtype].write(values, None)
    if rank and product < len(otherwise):
        assert len(written) == product
    else:
        assert written == otherwise
    there_and_back(CODECS[dtype], values)


@pytest.mark.parametrize("dtype", RANKS)
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20, 1e37])
def test_a_product_of_very_small_and_very_large_values(dtype, size):
    values = with_values(np.arange(1, 41.0) ** -2, 40, 50)
    values = (values.astype(float) * (size / float(np.abs(values).max()))).astype(np.float32)
    read = there_and_back(CODECS[dtype], values)
    assert np.isfinite(read).all()
    scaled, came = values / np.float64(size), read / np.float64(size)
    assert np.square(came - scaled).sum() < 0.2 * np.square(scaled).sum()


def test_a_product_of_the_largest_values_stays_finite():
    read = there_and_back(CODECS["rank2"], np.full((40, 50), np.finfo(np.float32).max))
    assert np.isfinite(read).all() and (read > 1e37).all()


@pytest.mark.parametrize("dtype", RANKS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_product_passes_on_that_a_matrix_is_not_finite(dtype, value):
    values = np.ones((40, 50), np.float32)
    values[3, 4] = value
    assert np.isnan(there_and_back(CODECS[dtype], values)).all()


def test_a_product_is_read_to_the_same_bits_whatever_multiplies_matrices():
    """Both sides have digests of what they read, on machines with other libraries: one value at a time, in float32."""
    values = with_values(np.ones(4), 30, 40)
    written = CODECS["rank4"].write(values, None)
    read = CODECS["rank4"].read(memoryview(written), values.shape)
    scales = np.frombuffer(written[:32], "<f4")
    whole = np.array([half - 7 for byte in written[32:] for half in (byte & 15, byte >> 4)], np.int8)
    left, right = whole[:120].reshape(4, 30), whole[120:].reshape(4, 40)
    for row in range(30):
        for other in range(40):
            total = np.float32(0)
            for k in range(4):
                total += (np.float32(left[k, row]) * scales[k]) * (np.float32(right[k, other]) * scales[4 + k])
            assert read[row, other] == total


# ---- arrays in steps, and matrices as products -----------------------------------------------------------------------


def parts_with(*values, left_out=0.6):
    """The arrays by name, and their mixed codec with the threshold of all of them."""
    found = {f"v{number}": np.asarray(value, np.float32) for number, value in enumerate(values)}
    steps = Steps(left_out).fitted([value.size for value in found.values()], lambda number: found[f"v{number}"])
    return found, Mixed(tuple(value.shape for value in found.values()), steps)


def joined(values):
    return np.concatenate([value.reshape(-1) for value in values.values()])


def low(rank, rows, others, noise=0.05, seed=0):
    """A matrix of a low rank with some noise, in which nothing is sparse."""
    rng = np.random.default_rng(seed)
    near = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, others)) / math.sqrt(rank)
    return (near + noise * rng.normal(size=(rows, others))).astype(np.float32)


@pytest.mark.parametrize("left_out", [0.05, 0.3, 0.6, 0.9])
def test_a_matrix_near_a_low_rank_is_a_product_that_leaves_out_no_more_than_steps_would(left_out):
    values, codec = parts_with(low(3, 90, 140), left_out=left_out)
    read = there_and_back(codec, values["v0"])
    in_steps = codec.steps.write(values["v0"], None)
    assert len(codec.write(values["v0"], None)) < 0.7 * len(in_steps)
    below = np.abs(values["v0"]) < codec.steps.threshold.least
    error = np.square(read.astype(float) - values["v0"]).sum()
    assert error <= np.square(values["v0"][below], dtype=float).sum() * (1 + 1e-4)
    assert np.linalg.matrix_rank(read, tol=1e-3) <= 6


@pytest.mark.parametrize("kind", ["random", "sparse", "small", "vector", "columns", "rows"])
def test_what_takes_fewer_bytes_in_steps_is_in_steps(kind):
    rng = np.random.default_rng(0)
    value = {
        "random": rng.normal(size=(80, 120)), "sparse": np.eye(100) * rng.normal(size=100), "small": low(1, 3, 4),
        "vector": rng.normal(size=300), "columns": rng.normal(size=(3000, 60)) * (np.arange(60) < 3),
        "rows": rng.normal(size=(300, 800)) * (np.arange(300) % 40 == 7)[:, None],
    }[kind]  # fmt: skip
    values, codec = parts_with(value)
    assert codec.write(values["v0"], None) == b"\0" + codec.steps.write(values["v0"], None)
    there_and_back(codec, values["v0"])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1), (1, 0), (1,), (0, 2), (1, 3)])
def test_products_and_steps_of_several_arrays_are_found_in_their_order(order):
    rng = np.random.default_rng(0)
    every = [rng.normal(size=50), low(1, 60, 70), rng.normal(size=(20, 30)), low(2, 50, 80, seed=1).reshape(50, 8, 10)]
    values, codec = parts_with(*(every[k] for k in order))
    read = there_and_back(codec, joined(values))
    start = 0
    for value in values.values():
        came = read[start : start + value.size].astype(float)
        start += value.size
        error = np.square(came - value.reshape(-1)).sum()
        # A vector or random values beside others may have nothing that reaches the threshold.
        assert error <= 1.01 * np.square(value, dtype=float).sum()
    error = np.square(read.astype(float) - joined(values)).sum() / np.square(joined(values), dtype=float).sum()
    assert error < 0.62
    assert codec.write(joined(values), None)[0] == any(k in order for k in (1, 3))


@pytest.mark.parametrize("empty", [[(0, 4)], [(0,)], [(5, 0), (0, 3, 2)], [(0, 4), (30,)]])
def test_empty_arrays_beside_products(empty):
    rng = np.random.default_rng(0)
    values = {"w": low(1, 60, 70)} | {str(k): rng.normal(size=shape).astype("f4") for k, shape in enumerate(empty)}
    packed = pack(values, values, wire := Wire("auto", left_out=0.6))
    found = unpack(packed, shapes_of(values, values), wire)
    assert {name: array.shape for name, array in found.items()} == {n: array.shape for n, array in values.items()}
    assert len(packed.data) < 120 + 40 * (empty[-1] == (30,))


def test_a_product_says_what_steps_do_where_both_have_the_same_threshold():
    """The joint threshold leaves a matrix that changed little out: no rank of it is sent either."""
    values, codec = parts_with(low(1, 60, 70), 1e-4 * low(1, 60, 70, seed=1))
    read = there_and_back(codec, joined(values))
    assert read[: 60 * 70].any() and not read[60 * 70 :].any()


NUMBERS = st.floats(-9, 9, width=32)


FACTORS = st.tuples(hnp.arrays(float, (15, 1), elements=NUMBERS), hnp.arrays(float, 20, elements=NUMBERS))


@given(st.lists(FACTORS, min_size=1, max_size=2), st.sampled_from([0.0, 0.3]), st.sampled_from([0.1, 0.6]))
def test_less_is_left_out_of_products_than_there_was(factors, noise, left_out):
    """Then error feedback stays bounded."""
    more = noise * np.random.default_rng(0).normal(size=(15, 20))
    values, codec = parts_with(*(left * right + more for left, right in factors), left_out=left_out)
    event(f"a product: {codec.write(joined(values), None)[0]}")
    left = np.square(joined(values).astype(float) - there_and_back(codec, joined(values))).sum()
    assert left <= np.square(joined(values), dtype=float).sum() * (1 + 1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_products_pass_on_that_a_matrix_is_not_finite(value):
    matrix = low(1, 60, 70)
    matrix[3, 4] = value
    values, codec = parts_with(matrix, low(1, 50, 60))
    assert not np.isfinite(there_and_back(codec, joined(values))).all()


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20, 1e36])
def test_products_of_very_small_and_very_large_values(size):
    values, codec = parts_with(low(1, 60, 70).astype(float) * size)
    assert codec.write(values["v0"], None)[0] == 1
    read = there_and_back(codec, values["v0"]).astype(float) / size
    assert np.square(read - values["v0"] / size).sum() < 0.62 * np.square(values["v0"].astype(float) / size).sum()


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda data: b"", "first byte"), (lambda data: b"\2" + data[1:], "first byte"),
        (lambda data: data[:4], "4 bytes, but 7 say which"),
        (lambda data: data[:1] + b"\x40\0" + data[3:], "ranks"), (lambda data: data[:1] + b"\0\0" + data[3:], "ranks"),
        (lambda data: data[:3] + b"\xff\xff\0\0" + data[7:], "ranks"),
        (lambda data: data[:1] + bytes([data[1] + 1]) + data[2:], "numbers|code|coded"),
    ],
)  # fmt: skip
def test_products_that_nobody_wrote_are_refused(change, said):
    values, codec = parts_with(low(1, 60, 70), np.random.default_rng(0).normal(size=(9, 9)))
    data = codec.write(joined(values), None)
    assert data[0] == 1 and data[1] > 0 == data[2]
    with pytest.raises(ValueError, match=said):
        changed = memoryview(change(data))
        codec.read(changed[: codec.length((joined(values).size,), changed)], (joined(values).size,))


@pytest.mark.parametrize("options", [{"bits": 1.0}, {"unbiased": True}])
def test_there_are_no_products_where_nothing_is_fed_back_or_a_limit_holds(options):
    wire = Wire("auto", left_out=0.6, **options)
    values = {"w": low(1, 60, 70)}
    packed = pack(values, values, wire)
    assert packed.data != pack(values, values, Wire("auto", left_out=0.6)).data
    assert len(packed.data) > 2 * len(pack(values, values, Wire("auto", left_out=0.6)).data)
