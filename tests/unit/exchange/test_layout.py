import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange import Entry, Layout, RawTensor
from tepal.exchange.layout import numbers_of, runs_of


def fused_layout() -> Layout:
    raw = (
        RawTensor("embed", (5, 4), "float32"),
        RawTensor("attn.qkv", (12, 4), "float32"),
        RawTensor("conv.c_attn", (4, 12), "float32"),
        RawTensor("steps", (), "int64"),
        RawTensor("head", (5, 4), "float32", same_as="embed"),
    )
    entries = (
        Entry("embed", "embed", (5, 4), "float32"),
        *(Entry(f"attn.qkv:{p}", "attn.qkv", (4, 4), "float32", 0, 4 * k, 4 * k + 4) for k, p in enumerate("qkv")),
        *(Entry(f"conv.c_attn:{p}", "conv.c_attn", (4, 4), "float32", 1, 4 * k, 4 * k + 4)
          for k, p in enumerate("qkv")),
        Entry("steps", "steps", (), "int64"),
    )  # fmt: skip
    return Layout(raw, entries)


def raw_state(seed=0):
    rng = np.random.default_rng(seed)
    embed = rng.normal(size=(5, 4)).astype(np.float32)
    return {
        "embed": embed,
        "attn.qkv": rng.normal(size=(12, 4)).astype(np.float32),
        "conv.c_attn": rng.normal(size=(4, 12)).astype(np.float32),
        "steps": np.array(7),
        "head": embed,
    }


def test_split_gives_views_of_fused_rows_and_columns():
    raw = raw_state()
    entries = fused_layout().split(raw)
    np.testing.assert_array_equal(entries["attn.qkv:k"], raw["attn.qkv"][4:8])
    np.testing.assert_array_equal(entries["conv.c_attn:v"], raw["conv.c_attn"][:, 8:])
    assert np.shares_memory(entries["conv.c_attn:v"], raw["conv.c_attn"])
    assert "head" not in entries


def test_join_undoes_split_in_the_order_of_the_state_dict():
    raw = raw_state()
    joined = fused_layout().join(fused_layout().split(raw))
    assert list(joined) == list(raw)
    for name, array in raw.items():
        np.testing.assert_array_equal(joined[name], array)
        assert joined[name].shape == array.shape and joined[name].dtype == array.dtype
    assert joined["head"] is joined["embed"]


def test_bytes_count_shared_tensors_once():
    layout = fused_layout()
    assert layout.nbytes() == 4 * (20 + 48 + 48) + 8
    assert layout.nbytes(["attn.qkv:q", "steps"]) == 64 + 8


def test_a_dtype_that_numpy_does_not_have_is_an_error_that_names_entry_and_cure():
    layout = Layout((RawTensor("w", (2,), "bfloat16"),), (Entry("w", "w", (2,), "bfloat16"),))
    with pytest.raises(ValueError, match=r"the entry 'w' is bfloat16, which cannot be sent: .*autocast=\"bf16\""):
        layout.nbytes()


def test_layout_survives_json():
    layout = fused_layout()
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_of_arrays_takes_every_tensor_as_one_entry():
    layout = Layout.of_arrays(raw_state())
    assert layout.names == ("embed", "attn.qkv", "conv.c_attn", "steps", "head")
    assert layout.by_name["steps"].shape == ()


@given(st.lists(st.integers(0, 30), unique=True))
def test_numbers_are_those_of_their_runs(numbers):
    runs = runs_of(numbers)
    assert numbers_of(runs, 31) == numbers and len(runs) <= 2 * len(numbers)
    if numbers:
        with pytest.raises(ValueError, match=r"entries are not listed|too large"):
            numbers_of(runs, max(numbers))


def test_a_whole_model_is_one_run():
    assert runs_of(range(200)) == [0, 200] and numbers_of([0, 200], 200) == [*range(200)]


@pytest.mark.parametrize(
    "runs", [[0], [0, 1, 2], [-1, 1], [0, -1], [0, 5], [4, 1], [0, 2, 1, 1], [0, 10**12], [0.0, 1], [True, 1], ["0", 1]]
)
def test_runs_that_are_none_are_refused(runs):
    with pytest.raises(ValueError, match=r"entries are not listed|too large, or occurs twice"):
        numbers_of(runs, 4)
