"""Arrays on disk: what is read is what was written, or it is known to be damaged."""

import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tepal.exchange import files, parts
from tepal.exchange.files import DamagedFile, map_arrays, read_arrays, write_arrays
from tepal.exchange.parts import Digests, digest

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8"]


def assert_equal(now, was):
    assert set(now) == set(was)
    for name, array in was.items():
        assert (now[name].dtype, now[name].shape) == (array.dtype, array.shape), name
        assert now[name].tobytes() == array.tobytes(), name
        assert not now[name].flags.writeable


def sample():
    """One array of each kind that a file could get wrong."""
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {
        "matrix": square,
        "column-major": np.asfortranarray(square),
        "every second column": square[:, ::2],
        "backwards": square[::-1],
        "repeated": np.broadcast_to(square[0], (2, 4)),
        "number": np.array(7),
        "number within": square[1, 2:3].reshape(()),
        "empty": np.ones((0, 3), np.int16),
        "yes": np.array([True, False]),
        "not a number": np.array([np.nan, -np.nan, np.inf, -0.0]),
    }


@settings(max_examples=60)
@given(
    arrays=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st_numpy.arrays(
            st.sampled_from(DTYPES).map(np.dtype), st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
        ),
        min_size=1,
        max_size=4,
    )
)
@example(arrays={"": np.ones(2), "blake3/": np.ones(2), "sha256/a": np.ones(1), "a": np.ones(1)})
def test_arrays_of_any_name_are_read_as_they_were_written(tmp_path_factory, arrays):
    path = tmp_path_factory.getbasetemp() / "files" / "arrays.safetensors"
    write_arrays(path, arrays, durable=False)
    assert_equal(read_arrays(path), arrays)
    mapped = map_arrays(path)
    assert_equal({name: array for name, (array, _) in mapped.items()}, arrays)
    assert {name: value for name, (_, value) in mapped.items()} == {name: digest(arrays[name]) for name in arrays}


def test_mapped_arrays_stay_when_their_file_goes_or_is_written_anew(tmp_path):
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_arrays(path, {"a": np.arange(5)}, durable=False)
    array, _ = map_arrays(path)["a"]
    write_arrays(path, {"a": np.zeros(50)}, durable=False)
    again, _ = map_arrays(path)["a"]
    os.replace(path, other)
    other.unlink()
    assert array.tolist() == [0, 1, 2, 3, 4] and not again.any()


def test_digests_that_are_known_are_not_computed_again(tmp_path, monkeypatch):
    arrays, digests = {"a": np.arange(5), "b": np.ones(3)}, Digests()
    hashed = []
    monkeypatch.setattr(parts, "digest", lambda array: hashed.append(array) or digest(array))
    assert digests.of_all([arrays["a"]]) == [digest(arrays["a"])]
    write_arrays(tmp_path / "a.safetensors", arrays, digests=digests)
    assert [id(array) for array in hashed] == [id(arrays["a"]), id(arrays["b"])]
    assert_equal(read_arrays(tmp_path / "a.safetensors"), arrays)


def test_a_file_may_hold_no_array_at_all(tmp_path):
    write_arrays(tmp_path / "a", {})
    assert read_arrays(tmp_path / "a") == {}


def test_a_name_that_the_format_has_for_itself_is_read_again_or_refused_when_it_is_written(tmp_path):
    arrays = {"__metadata__": np.ones(2, np.float32)}
    try:
        write_arrays(tmp_path / "a", arrays)
    except ValueError as error:
        assert "__metadata__" in str(error)
        return
    assert_equal(read_arrays(tmp_path / "a"), arrays)


@pytest.mark.parametrize("durable", [True, False])
def test_no_array_is_bent_in_writing(tmp_path, durable):
    write_arrays(tmp_path / "new" / "folder" / "a.safetensors", sample(), durable=durable)
    assert_equal(read_arrays(tmp_path / "new" / "folder" / "a.safetensors"), sample())
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["a.safetensors"]


def test_arrays_of_the_other_byte_order_keep_their_values(tmp_path):
    array = np.arange(6, dtype=">i4")
    write_arrays(tmp_path / "a", {"a": array})
    np.testing.assert_array_equal(read_arrays(tmp_path / "a")["a"], array)


def test_what_was_read_stays_though_the_file_is_rewritten(tmp_path):
    path = tmp_path / "a"
    write_arrays(path, {"a": np.zeros(100_000)})
    first = read_arrays(path)["a"]
    write_arrays(path, {"a": np.ones(100_000)})
    path.write_bytes(b"")
    assert not first.any()


def test_the_reader_may_know_the_digests_better_than_the_file(tmp_path):
    path, arrays = tmp_path / "a", sample()
    write_arrays(path, arrays)
    digests = {name: digest(array) for name, array in arrays.items()}
    assert_equal(read_arrays(path, digests), arrays)
    with pytest.raises(DamagedFile, match="'number' first"):
        read_arrays(path, {**digests, "number": digest(np.array(8))})
    with pytest.raises(DamagedFile):
        read_arrays(path, {**digests, "more": digest(np.array(8))})


# One bit makes an x of the y, which holds nothing: it could vanish unseen.
SMALL = {"w": np.arange(5, dtype=np.float32), "n": np.array(3), "y": np.ones((0, 3)), "x": np.ones((2, 2), bool)}


def test_a_changed_bit_anywhere_never_gives_other_arrays(tmp_path):
    """All bits of a small file, one by one. A bit that changes no value, as one that makes a hex digit a capital,
    may be passed over."""
    path = tmp_path / "a"
    write_arrays(path, SMALL)
    data = path.read_bytes()
    begin_of_values = len(data) - sum(array.nbytes for array in SMALL.values())
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                found = read_arrays(path)
            except DamagedFile:
                continue
            assert place < begin_of_values, (place, bit)
            assert set(found) == set(SMALL), f"byte {place} became {bytes([changed[place]])}"
            assert_equal(found, SMALL)


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_a_changed_value_is_found_in_a_large_file(tmp_path_factory, where, change):
    path = tmp_path_factory.getbasetemp() / "files" / "large.safetensors"
    if not path.exists():
        write_arrays(path, {"a": np.arange(20_000.0), "b": np.arange(7)})
    data = bytearray(path.read_bytes())
    place = -1 - int(where * (8 * 20_007))
    data[place] ^= change
    path.with_name("changed").write_bytes(data)
    with pytest.raises(DamagedFile, match="do not have their digests"):
        read_arrays(path.with_name("changed"))


def test_a_file_that_is_cut_anywhere_is_damaged(tmp_path):
    path = tmp_path / "a"
    write_arrays(path, SMALL)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedFile):
            read_arrays(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(DamagedFile):
        read_arrays(path)


@pytest.mark.parametrize("content", [b"", b"no safetensors", bytes(1000), b"\xff" * 1000, b"\x02" + bytes(7) + b"{}"])
def test_what_is_not_a_file_of_ours_is_damaged_or_empty(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    try:
        assert read_arrays(tmp_path / "a") == {}
    except DamagedFile as error:
        assert "cannot be read" in str(error)


def test_a_file_that_another_program_wrote_has_no_digests(tmp_path):
    from safetensors.numpy import save_file

    save_file({"a": np.ones(3)}, tmp_path / "a")
    with pytest.raises(DamagedFile, match="of this project"):
        read_arrays(tmp_path / "a")


def test_a_file_that_is_not_there_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "a")
    with pytest.raises((OSError, DamagedFile)):
        read_arrays(tmp_path)


def test_a_reader_never_sees_a_part_of_what_is_being_written(tmp_path):
    path = tmp_path / "a"
    size, rewrites = 50_000, 200

    def version(number):
        return {"first": np.full(size, number), "second": np.full((size // 10, 3), -number, np.float32)}

    write_arrays(path, version(0))
    done = threading.Event()

    def rewrite():
        try:
            for number in range(1, rewrites + 1):
                write_arrays(path, version(number), durable=False)
        finally:
            done.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    seen = []
    while not done.is_set() or not seen:
        arrays = read_arrays(path)
        (number,) = set(arrays["first"].tolist())
        assert set(arrays["second"].reshape(-1).tolist()) == {-number}
        seen.append(number)
    writer.join()
    assert seen == sorted(seen) and len(set(seen)) > 5
    assert read_arrays(path)["first"][0] == rewrites
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_several_writers_of_one_file_do_no_harm(tmp_path):
    path = tmp_path / "a"

    def write(number):
        for _ in range(30):
            write_arrays(path, {"a": np.full(5000, number)}, durable=False)

    writers = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert len(set(read_arrays(path)["a"].tolist())) == 1
    for writer in writers:
        writer.join()
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("step", ["write", "sync", "rename"])
def test_a_writing_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch, step):
    path = tmp_path / "a"
    write_arrays(path, SMALL)

    def fail(*args, **options):
        raise OSError("the disk is gone")

    real = files.save_file

    def half(arrays, beside, **options):
        real(arrays, beside, **options)
        os.truncate(beside, 10)
        raise OSError("the disk is gone")

    target, name, harm = {
        "write": (files, "save_file", half),
        "sync": (os, "fsync", fail),
        "rename": (os, "replace", fail),
    }[step]
    with monkeypatch.context() as patch:
        patch.setattr(target, name, harm)
        with pytest.raises(OSError, match="the disk is gone"):
            write_arrays(path, {"other": np.ones(3)})
    assert_equal(read_arrays(path), SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_that_another_process_has_written_may_stay(tmp_path, monkeypatch, hard_links):
    def without(*args, **options):
        raise PermissionError(errno.EPERM, "no hard links here")

    if not hard_links:
        monkeypatch.setattr(os, "link", without)
    path = tmp_path / "a"
    write_arrays(path, SMALL, replace=False)
    first = path.stat().st_ino
    write_arrays(path, SMALL, replace=False)
    assert (path.stat().st_ino == first) == hard_links
    assert_equal(read_arrays(path), SMALL)
    assert path.stat().st_nlink == 1 and [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_file_cannot_be_written_where_a_file_is_in_the_way(tmp_path):
    (tmp_path / "a").write_text("not a folder")
    with pytest.raises(OSError):
        write_arrays(tmp_path / "a" / "b", SMALL)
