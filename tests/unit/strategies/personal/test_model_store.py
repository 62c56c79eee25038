"""Models on disk: what is read is what was written, and a full disk is an error like any other."""

import errno
import gc
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tepal.strategies.personal import store as module
from tepal.strategies.personal.store import ModelStore

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks for what Linux tells and limits")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "of" / "models"


def numbers(width, seed=0):
    return np.random.default_rng(seed).normal(size=width).astype(np.float32)


def test_a_model_comes_in_pieces_and_is_read_as_a_row(path):
    store = ModelStore(path, 5)
    slot = store.write(iter([np.array([1, 2], np.float32), np.array([]), np.array([3, 4, 5], np.float16)]))
    row = store.row(slot)
    assert isinstance(row, np.memmap) and row.dtype == np.float32 and row.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1


def test_pieces_with_any_strides_are_written():
    store = ModelStore(None, 4)
    assert store.row(store.write([np.arange(8, dtype=np.float32)[::-2]])).tolist() == [7, 5, 3, 1]


@given(st.lists(st.one_of(st.none(), st.sets(st.integers(0, 30))), max_size=30))
def test_a_store_behaves_like_a_dictionary_of_its_slots(steps):
    """None: write a model. A set: the writes whose models are kept, by their number."""
    module_growth, module._GROWTH = module._GROWTH, (1 << 28, 3)
    try:
        store, held = ModelStore(None, 4), {}
        for number, step in enumerate(steps):
            if step is None:
                slot = store.write([np.full(4, number)])
                assert slot not in held
                held[slot] = number
            else:
                held = {slot: written for slot, written in held.items() if written in step}
                store.keep(held)
            assert {slot: store.row(slot).tolist() for slot in held} == {s: [n] * 4 for s, n in held.items()}
        store.close()
    finally:
        module._GROWTH = module_growth


def test_slots_that_are_not_kept_are_written_again_and_the_file_does_not_grow(path, monkeypatch):
    monkeypatch.setattr(module, "_GROWTH", (1 << 28, 4))
    store = ModelStore(path, 3)
    slots = [store.write([np.full(3, k)]) for k in range(4)]
    size = path.stat().st_size
    store.keep([slots[0], slots[3]])
    assert {store.write([np.full(3, 10)]), store.write([np.full(3, 11)])} == {slots[1], slots[2]}
    assert path.stat().st_size == size == 4 * 3 * 4
    assert store.write([np.full(3, 12)]) not in slots
    assert [store.row(slots[k])[0] for k in (0, 3)] == [0, 3]


def test_views_outlive_growth_and_the_store(monkeypatch):
    monkeypatch.setattr(module, "_GROWTH", (1 << 28, 2))
    store = ModelStore(None, 3)
    first = store.row(store.write([np.full(3, 1)]))
    pair = store.rows([0, 0])
    for k in range(7):
        store.write([np.full(3, k)])
    store.close()
    del store
    gc.collect()
    assert first.tolist() == [1, 1, 1] and pair.block(0, 3).tolist() == [[1, 1, 1]] * 2


def test_blocks_are_the_columns_of_the_slots_asked_for():
    models = np.random.default_rng(0).normal(size=(6, 10))
    store = ModelStore(None, 10, "float64")
    slots = [store.write([model]) for model in models]
    some = store.rows([slots[4], slots[1], slots[1]])
    block = some.block(3, 8)
    assert some.shape == (3, 10) and block.flags.c_contiguous
    np.testing.assert_array_equal(block, models[[4, 1, 1], 3:8])


def test_a_file_that_is_opened_again_has_its_rows_and_none_is_free_until_the_caller_says(path):
    store = ModelStore(path, 3)
    slot = store.write([numbers(3)])
    store.flush()
    store.close()
    again = ModelStore(path, 3)
    assert again.row(slot).tobytes() == numbers(3).tobytes() == path.read_bytes()[:12]
    assert again.write([np.zeros(3)]) == 64  # behind all that the file had
    again.keep([slot])
    assert again.write([np.zeros(3)]) == 1


def test_a_growth_that_was_interrupted_costs_no_row(path):
    path.parent.mkdir()
    path.write_bytes(np.arange(6, dtype=np.float32).tobytes() + b"torn")
    store = ModelStore(path, 3)
    assert path.stat().st_size == 28
    slot = store.write([np.full(3, 7)])
    assert slot == 2 and path.stat().st_size % 12 == 0
    assert [store.row(k).tolist() for k in range(3)] == [[0, 1, 2], [3, 4, 5], [7, 7, 7]]


def test_a_digest_is_that_of_the_bytes():
    store = ModelStore(None, 5)
    slot = store.write([numbers(5)])
    assert store.digest(slot) == f"blake3:{blake3(numbers(5).tobytes()).hexdigest()[:32]}"


def test_large_rows_do_not_grow_the_file_by_many(path):
    store = ModelStore(path, 1 << 20)
    store.write([np.zeros(1 << 20, np.float32)])
    assert path.stat().st_size == 64 << 22
    store.close()
    path.unlink()


@pytest.mark.parametrize("pieces, words", [
    ([np.zeros(4)], "4 numbers.*has 3"),
    ([np.zeros(2), np.zeros(2)], "4 numbers.*has 3"),
    ([np.zeros(2)], "2 numbers.*has 3"),
    ([], "0 numbers.*has 3"),
    ([np.zeros((1, 3))], r"\(1, 3\).*1-D"),
    ([np.zeros(1), np.array([1, 0.1])], "number 2 .*0.1.*float32 cannot represent"),
    ([np.array([2**24, 2**24 + 1, 0])], "number 1 .*16777217"),
    ([np.array([1e300, 0, 0])], "number 0 "),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_an_error_and_takes_no_slot(pieces, words):
    store = ModelStore(None, 3)
    with pytest.raises(ValueError, match=words):
        store.write(pieces)
    assert store.write([np.array([1.5, np.nan, -np.inf])]) == 0
    np.testing.assert_array_equal(store.row(0), [1.5, np.nan, -np.inf])


def test_errors_of_arguments_name_them():
    with pytest.raises(ValueError, match="width is 0"):
        ModelStore(None, 0)
    with pytest.raises(ValueError, match="dtype is object"):
        ModelStore(None, 1, "object")
    store = ModelStore(None, 1)
    for wrong in (lambda: store.row(0), lambda: store.rows([-1]), lambda: store.keep([64]), lambda: store.digest(0)):
        with pytest.raises(ValueError, match=r"slot -?[0-9]+ is out of range; the store has 0"):
            wrong()
    with pytest.raises(OSError):
        ModelStore(Path("/dev/null/models"), 1)


def test_no_room_to_grow_is_an_error_and_the_store_goes_on(path, monkeypatch):
    monkeypatch.setattr(module, "_GROWTH", (1 << 28, 1))
    store = ModelStore(path, 3)
    store.write([np.full(3, 1)])

    def full(handle, offset, length):
        os.ftruncate(handle, offset + length // 2)  # what a real one may leave behind
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(OSError) as caught:
            store.write([np.full(3, 2)])
    assert caught.value.errno == errno.ENOSPC and path.stat().st_size == 12
    assert store.row(0).tolist() == [1, 1, 1]
    assert store.write([np.full(3, 2)]) == 1


def test_no_room_at_the_write_is_an_error_and_the_slot_stays_free(monkeypatch):
    store = ModelStore(None, 3)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError):
            store.write([np.zeros(3)])
    assert store.write([np.zeros(3)]) == 0


@linux
def test_a_limit_on_the_size_of_files_is_an_error_and_no_signal(path):
    store = ModelStore(path, 1 << 16)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            store.write([np.zeros(1 << 16)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG and path.stat().st_size == 0
    assert store.write([np.ones(1 << 16)]) == 0


@pytest.mark.parametrize("missing", ["function", "support"])
def test_where_room_cannot_be_reserved_the_file_grows_all_the_same(missing, path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if missing == "function":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    store = ModelStore(path, 3)
    assert store.row(store.write([np.full(3, 2)])).tolist() == [2, 2, 2]
    assert path.stat().st_size == 64 * 12


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_a_write_that_the_system_cuts_short_is_gone_on_with(piece, monkeypatch):
    store = ModelStore(None, 100)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: write(handle, data[:piece], offset))
    assert store.row(store.write([numbers(100)])).tobytes() == numbers(100).tobytes()


def test_flush_waits_for_the_file(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    store = ModelStore(path, 2)
    store.write([np.zeros(2)])
    store.flush()
    assert path.stat().st_ino in synced and path.parent.stat().st_ino in synced


def test_a_store_that_was_closed_takes_no_more():
    store = ModelStore(None, 2)
    store.write([np.zeros(2)])
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.write([np.zeros(2)])


@linux
def test_anonymous_memory_does_not_grow_with_the_rows():
    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

    width, n = 1 << 18, 48
    store, model = ModelStore(None, width), numbers(1 << 18)
    before = anonymous()
    slots = [store.write([model]) for _ in range(n)]
    sums = [float(store.row(slot).sum()) for slot in slots]
    blocks = sum(store.rows(slots).block(start, start + 1024).sum() for start in range(0, width, 1024))
    assert anonymous() - before < 16  # MB, of 48
    assert blocks == pytest.approx(sum(sums), rel=1e-3)
