import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.strategies.mixing import cosine, gram_rows, mix, mix_rows, mixing_weights, threshold, update_gram
from tepal.strategies.personal.store import ModelStore

SEEDS = st.integers(0, 2**32 - 1)


def random_models(seed, n=6, width=40, dtype=np.float32):
    """Some alike, some opposed."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(1, width)) * rng.choice([-1, 1, 2], (n, 1)) + rng.normal(size=(n, width))).astype(dtype)


def by_hand(models, p, alpha=1.0, counted=None):
    """FedACS as it is written down, number by number."""
    models = [[float(x) for x in model] for model in models]
    n = len(models)
    compared = [model[:counted] for model in models]

    def cos(a, b):
        norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
        return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0

    s = [[1.0 if i == j else cos(compared[i], compared[j]) for j in range(n)] for i in range(n)]
    ordered = sorted(value for row in s for value in row)
    at = p * (n * n - 1)
    low = math.floor(at)
    delta = ordered[low] + (at - low) * (ordered[min(low + 1, n * n - 1)] - ordered[low])
    mixed = []
    for i in range(n):
        weights = [1.0 if i == j else max(s[i][j], 0.0) * (s[i][j] > delta) for j in range(n)]
        mean = [math.fsum(w * m[k] for w, m in zip(weights, models, strict=True)) / sum(weights)
                for k in range(len(models[0]))]  # fmt: skip
        mixed.append([(1 - alpha) * own + alpha * u for own, u in zip(models[i], mean, strict=True)])
    return mixed, s, delta


def collect(chunks, rows):
    """What `mix_rows` yields, as (len(rows), P)."""
    parts = {row: [] for row in rows}
    for row, chunk in chunks:
        parts[row].append(chunk)
    return np.array([np.concatenate(parts[row]) for row in rows])


def in_store(models, path=None):
    store = ModelStore(path, models.shape[1], models.dtype)
    slots = [store.write([model]) for model in models[::-1]]
    return store.rows(slots[::-1])


@given(SEEDS, st.integers(1, 7), st.floats(0.05, 0.95), st.sampled_from([1.0, 0.3]), st.sampled_from([None, 7]))
def test_mixed_models_are_what_the_formulas_say(seed, n, p, alpha, counted):
    models = random_models(seed, n, 12, np.float64)
    mixed, similarity, delta = mix(models, p, alpha=alpha, counted=counted)
    expected, s, expected_delta = by_hand(models, p, alpha, counted)
    np.testing.assert_allclose(similarity, s, atol=1e-12)
    assert delta == pytest.approx(expected_delta, abs=1e-12)
    gaps = np.abs(similarity - delta)
    if np.any((gaps < 1e-9) & (similarity < 1)):
        return  # > may then go either way by rounding
    np.testing.assert_allclose(mixed, expected, rtol=1e-9, atol=1e-12)


def test_three_models_of_which_none_is_more_alike_than_the_threshold():
    models = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    mixed, similarity, delta = mix(models, 0.5)
    assert delta == pytest.approx(0.70711, abs=1e-5)
    assert similarity[0, 1] == 0 and similarity[0, 2] == similarity[2, 1]
    np.testing.assert_array_equal(mixed, models)


def test_a_lower_quantile_lets_them_take_part():
    models = np.array([[1, 0], [0, 1], [1, 1]], np.float64)
    mixed, _, delta = mix(models, 0.2)  # between the two zeros, 1.6 of 8 steps up, and .70711: .6 of the way
    half = math.sqrt(0.5)
    assert delta == pytest.approx(0.6 * half)
    np.testing.assert_allclose(mixed[0], [1, half / (1 + half)])
    np.testing.assert_allclose(mixed[2], [(1 + half) / (1 + 2 * half)] * 2)


@given(SEEDS, st.floats(1e-6, 1e6), st.sampled_from([np.float32, np.float64]))
def test_the_scale_of_all_models_does_not_matter(seed, factor, dtype):
    models = random_models(seed, dtype=dtype)
    scaled = models * dtype(2.0 ** round(math.log2(factor)))  # exact, so that no comparison goes the other way
    mixed, similarity, delta = mix(models, 0.4)
    mixed_scaled, similarity_scaled, delta_scaled = mix(scaled, 0.4)
    np.testing.assert_allclose(similarity_scaled, similarity, atol=1e-12)
    np.testing.assert_allclose(
        mixing_weights(similarity_scaled, delta_scaled), mixing_weights(similarity, delta), atol=1e-12
    )
    np.testing.assert_allclose(mixed_scaled / (scaled[0, 0] / models[0, 0]), mixed, rtol=1e-5, atol=1e-5)


@given(SEEDS, st.permutations(range(6)), st.floats(0.05, 0.9))
def test_clients_may_come_in_any_order(seed, order, p):
    models = random_models(seed, 6, 20, np.float64)
    _, similarity, delta = mix(models, p)
    if np.any((np.abs(similarity - delta) < 1e-9) & (similarity < 1)):
        return
    mixed, _, _ = mix(models, p)
    permuted, permuted_similarity, permuted_delta = mix(models[order], p)
    np.testing.assert_allclose(permuted, mixed[order], atol=1e-12)
    np.testing.assert_allclose(permuted_similarity, similarity[np.ix_(order, order)], atol=1e-12)
    assert permuted_delta == pytest.approx(delta, abs=1e-12)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("value", [0.0, 1e-3, -5.0])
def test_equal_models_give_that_model(p, value):
    models = np.full((5, 300), value, np.float32) * np.linspace(0.5, 1, 300, dtype=np.float32)
    mixed, similarity, delta = mix(models, p)
    np.testing.assert_allclose(mixed, models, rtol=1e-6)
    assert np.isfinite(similarity).all() and 0 <= delta <= 1


@pytest.mark.parametrize("sizes", [(3, 3), (2, 5)])
def test_two_groups_with_nothing_in_common_do_not_mix(sizes):
    rng = np.random.default_rng(0)
    models = np.zeros((sum(sizes), 8), np.float32)
    models[: sizes[0], :4] = 1 + 0.1 * rng.random((sizes[0], 4))
    models[sizes[0] :, 4:] = 1 + 0.1 * rng.random((sizes[1], 4))
    mixed, _, _ = mix(models, 0.5)
    assert not mixed[: sizes[0], 4:].any() and not mixed[sizes[0] :, :4].any()
    assert not np.array_equal(mixed, models)


def test_opposed_models_weigh_nothing_even_below_the_threshold_of_all():
    similarity = np.array([[1, -0.5, 0.5], [-0.5, 1, -0.9], [0.5, -0.9, 1]])
    assert mixing_weights(similarity, -0.7) == pytest.approx(np.array([[2, 0, 1], [0, 3, 0], [1, 0, 2]]) / 3)
    assert threshold(similarity, 1e-9) == pytest.approx(-0.9)


def test_alpha_goes_part_of_the_way_from_the_own_model():
    models = random_models(3, dtype=np.float64)
    whole, _, _ = mix(models, 0.3)
    part, _, _ = mix(models, 0.3, alpha=0.25)
    np.testing.assert_allclose(part, models + 0.25 * (whole - models), atol=1e-12)
    assert not np.allclose(whole, models)


@given(SEEDS, st.integers(1, 8))
def test_from_one_minus_one_nth_on_every_client_keeps_its_own_model(seed, n):
    models = random_models(seed, n)
    mixed, _, _ = mix(models, max(1 - 1 / n, 1e-3))
    assert mixed.tobytes() == models.tobytes()


@given(SEEDS, st.integers(1, 8), st.floats(-1, 1), st.floats(0.01, 1))
def test_weights_are_a_mean_in_which_the_own_model_is_the_heaviest(seed, n, delta, alpha):
    weights = mixing_weights(cosine(gram_rows(random_models(seed, n), range(n))), delta, alpha=alpha)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    assert (weights >= 0).all() and (weights.argmax(axis=1) == np.arange(n)).all()
    assert (np.diagonal(weights) > 0).all()


def test_weights_of_some_clients_are_their_rows():
    similarity = cosine(gram_rows(random_models(1), range(6)))
    np.testing.assert_array_equal(
        mixing_weights(similarity, 0.1, [4, 0], alpha=0.5), mixing_weights(similarity, 0.1, alpha=0.5)[[4, 0]]
    )


@given(SEEDS, st.sampled_from([np.float16, np.float32, np.float64]))
def test_similarity_is_symmetric_with_ones_on_the_diagonal(seed, dtype):
    similarity = cosine(gram_rows(random_models(seed, dtype=dtype), range(6)))
    assert (similarity == similarity.T).all() and (np.diagonal(similarity) == 1).all()
    assert (np.abs(similarity) <= 1).all()


def test_rounding_in_the_products_is_evened_out():
    similarity = cosine(np.array([[1.0, 1.0000001], [1.0000003, 1.0]]))
    assert similarity.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf, 3e30])
def test_a_model_without_a_direction_is_left_to_its_client(bad):
    models = random_models(5)
    models[2] = bad
    others = [0, 1, 3, 4, 5]
    mixed, similarity, _ = mix(models, 0.3)
    assert similarity[2].tolist() == [0, 0, 1, 0, 0, 0] == similarity[:, 2].tolist()
    assert mixed[2].tobytes() == models[2].tobytes()
    assert np.isfinite(mixed[others]).all() and not np.array_equal(mixed[others], models[others])


@pytest.mark.parametrize("chunk", [1, 7, 40, 1000, None])
@pytest.mark.parametrize("stored", [False, True])
def test_rows_by_chunks_are_the_models_mixed_at_once(chunk, stored):
    models = random_models(8)
    mixed, similarity, _ = mix(models, 0.4, alpha=0.8, counted=30)
    source = in_store(models) if stored else models
    rows = [4, 0, 3]
    got = collect(mix_rows(source, rows, 0.4, alpha=0.8, counted=30, chunk=chunk), rows)
    assert got.dtype == models.dtype
    np.testing.assert_allclose(got, mixed[rows], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        collect(mix_rows(source, rows, 0.4, similarity=similarity, alpha=0.8), rows),
        collect(mix_rows(models, rows, 0.4, similarity=similarity, alpha=0.8), rows),
    )


def test_chunks_come_in_order_and_within_a_chunk_the_rows_as_given():
    models = np.arange(12, dtype=np.float32).reshape(3, 4)
    chunks = [(row, part.tolist()) for row, part in mix_rows(models, [2, 0], 0.9, chunk=3)]
    assert chunks == [(2, [8, 9, 10]), (0, [0, 1, 2]), (2, [11]), (0, [3])]
    assert list(mix_rows(models, [], 0.5)) == []


def test_what_is_mixed_with_nothing_is_copied_bit_by_bit():
    models = np.array([[-0.0, 1e-45, 1.1], [3.0, -4.0, 0.1], [3.1, -4.0, 0.1]], np.float32)
    rows = [0, 1]
    got = collect(mix_rows(models, rows, 0.4, alpha=0.1), rows)
    assert got[0].tobytes() == models[0].tobytes() and got[1].tobytes() != models[1].tobytes()


def test_a_similarity_that_is_given_is_the_one_that_is_used():
    models = random_models(2)
    assert collect(mix_rows(models, [0], 0.5, similarity=np.eye(6)), [0]).tobytes() == models[:1].tobytes()


def test_mixed_chunks_may_be_written_over_the_models():
    models = random_models(4)
    mixed, similarity, _ = mix(models, 0.3)
    done = [0] * 6
    for row, part in mix_rows(models, range(6), 0.3, similarity=similarity, chunk=9):
        models[row, done[row] : done[row] + part.size] = part
        done[row] += part.size
    np.testing.assert_allclose(models, mixed, rtol=1e-5, atol=1e-6)


def test_buffers_are_mixed_but_not_compared():
    models = random_models(6, dtype=np.float64)
    rng = np.random.default_rng(0)
    buffers = 1e6 * rng.random((6, 5))
    mixed, similarity, delta = mix(np.hstack([models, buffers]), 0.4, counted=40)
    alone, similarity_alone, delta_alone = mix(models, 0.4)
    np.testing.assert_allclose(similarity, similarity_alone, atol=1e-12)
    np.testing.assert_allclose(mixed[:, :40], alone, atol=1e-9)
    np.testing.assert_allclose(mixed[:, 40:], mixing_weights(similarity, delta) @ buffers)
    assert delta == pytest.approx(delta_alone)


@given(SEEDS, st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 20))), min_size=1, max_size=5))
def test_a_gram_kept_up_to_date_is_the_gram_computed_anew(seed, rounds):
    rng = np.random.default_rng(seed)
    models, gram = np.empty((0, 15)), np.zeros((0, 0))
    for joining, changing in [(1, set()), *rounds]:
        m = len(models)
        models = np.vstack([models, rng.normal(size=(joining, 15))])
        changed = {row for row in changing if row < m} | set(range(m, m + joining))
        models[sorted(changed)] = rng.normal(size=(len(changed), 15))
        before, kept = gram, gram.copy()
        gram = update_gram(gram, models, changed, chunk=4)
        np.testing.assert_array_equal(before, kept)
        np.testing.assert_allclose(gram, [[math.fsum(a * b) for b in models] for a in models], atol=1e-12)
        assert (gram == gram.T).all()


def test_float32_products_are_added_up_in_float64():
    models = np.array([[4096, 1, 1, 1]], np.float32)  # 2²⁴ + 1 is no float32
    assert gram_rows(models, [0], chunk=1) == 2**24 + 3


def test_half_precision_does_not_overflow():
    models = np.full((4, 100), 200, np.float16)
    models[0] = -200
    mixed, similarity, _ = mix(models, 0.2)
    assert mixed.dtype == np.float16 and (mixed == models).all()
    assert similarity[0].tolist() == pytest.approx([1, -1, -1, -1])


MODELS = np.eye(3, dtype=np.float32)


@pytest.mark.parametrize("call, words", [
    *[(lambda p=p: mix(MODELS, p), f"quantile is {p}.*above 0 and below 1") for p in (0, 1, -0.5, float("nan"))],
    *[(lambda a=a: mix(MODELS, 0.5, alpha=a), f"alpha is {a}.*above 0 and at most 1") for a in (0, 1.5, -1)],
    (lambda: mix_rows(MODELS, [0], 2.0), "quantile is 2.0"),
    (lambda: mix_rows(MODELS, [0], 0.5, alpha=2.0), "alpha is 2.0"),
    (lambda: mix_rows(MODELS, [0], 0.5, similarity=np.eye(2)), r"\(2, 2\).*\(3, 3\)"),
    (lambda: mix_rows(MODELS, [0], 0.5, chunk=0), "chunk is 0.*at least 1"),
    (lambda: mix_rows(MODELS, [0, 3], 0.5), "row 3 is out of range.*0 … 2"),
    (lambda: gram_rows(MODELS, [-1]), "row -1 is out of range"),
    (lambda: gram_rows(MODELS, [0], counted=4), "counted is 4.*0 … 3"),
    (lambda: mixing_weights(np.eye(2), 0.5, [2]), "row 2 is out of range"),
    (lambda: mixing_weights(np.full((2, 2), np.nan), 0.5), "not finite"),
    (lambda: mix(np.ones(3), 0.5), r"\(3,\).*2-D"),
    (lambda: mix(np.ones((0, 3)), 0.5), "0 models"),
    (lambda: mix(np.eye(2, dtype=int), 0.5), "int64.*floating-point"),
    (lambda: cosine(np.zeros((0, 0))), "at least one row"),
    (lambda: threshold(np.ones((2, 3)), 0.5), r"\(2, 3\).*square"),
    (lambda: update_gram(np.eye(2), MODELS, [0]), "row 2 is new.*must be among the changed"),
    (lambda: update_gram(np.eye(4), MODELS, []), "at most 3 rows"),
])  # fmt: skip
def test_errors_name_the_value_and_what_is_allowed(call, words):
    with pytest.raises(ValueError, match=words):
        call()
