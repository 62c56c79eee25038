"""Large images of a .npz file stay on disk, and clients get the same examples as from memory."""

import copy
import gc
import os
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tepal.training.data import DataConfig, DataError, dataset_stamp, load_client, partitions, sources, stored
from tepal.training.data.config import Reading
from tepal.training.data.formats.npz import read_npz
from tepal.training.data.stored import StoredArray


@pytest.fixture(autouse=True)
def _fresh_caches():
    yield
    for cached in (sources.load_path, partitions.divide):
        cached.cache_clear()


@pytest.fixture
def on_disk(monkeypatch):
    """Let all images stay on disk that can."""
    monkeypatch.setattr(stored, "LARGE", 1)


def images_of(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def written(path, images, write=np.savez, **more):
    write(path, images=images, labels=np.arange(len(images)) % 4, **more)
    return path


@pytest.mark.parametrize(
    ("shape", "as_read"), [((90, 5, 4), (1, 5, 4)), ((90, 5, 4, 3), (3, 5, 4)), ((90, 3, 5, 4), (3, 5, 4))]
)
def test_rows_are_those_of_the_array_in_memory(tmp_path, monkeypatch, shape, as_read):
    path = written(tmp_path / "a.npz", images_of(*shape))
    before = read_npz(path, Reading()).train
    monkeypatch.setattr(stored, "LARGE", 1)
    after = read_npz(path, Reading()).train
    assert isinstance(after.images, StoredArray) and isinstance(before.images, np.ndarray)
    assert after.shape == before.shape == as_read and len(after.images) == 90
    assert after.images.ndim == before.images.ndim and after.images.size == before.images.size
    for rows in ([3, 4, 5, 88, 0, 0, -1], [], range(90), np.random.default_rng(1).permutation(90)):
        rows = np.array(rows, np.int64)
        np.testing.assert_array_equal(after.take(rows).images, before.take(rows).images)
        assert after.take(rows).images.dtype == np.float32
    np.testing.assert_array_equal(after.images[:], before.images)
    np.testing.assert_array_equal(np.asarray(after.images)[7:9], before.images[7:9])
    with pytest.raises(IndexError):
        after.images[np.array([90])]


def test_only_the_rows_that_are_asked_for_are_read_and_those_in_a_row_at_once(tmp_path, monkeypatch, on_disk):
    source = read_npz(written(tmp_path / "a.npz", images_of(90, 5, 4)), Reading())
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    source.train.take(np.array([10, 11, 12, 50, 7]))
    assert read == [60, 20, 20]
    read.clear()
    monkeypatch.setattr(stored, "_MOST", 700)
    source.train.take(np.arange(90))
    assert read == [700, 700, 400]


def test_a_client_has_the_same_examples_and_partitions_are_the_same(tmp_path, monkeypatch):
    path = written(tmp_path / "a.npz", images_of(200, 8, 8))
    node = {"partition-id": 2, "num-partitions": 5}
    config = DataConfig(dataset=str(path), min_partition_size=2)
    before = load_client(config, node, client="a")
    monkeypatch.setattr(stored, "LARGE", 1)
    sources.load_path.cache_clear()
    after = load_client(config, node, client="a")
    for part in ("train", "test"):
        ours, theirs = getattr(before, part), getattr(after, part)
        assert ours.images.tobytes() == theirs.images.tobytes() and ours.labels.tobytes() == theirs.labels.tobytes()


def test_images_of_another_size_are_converted_in_memory(tmp_path, on_disk):
    path = written(tmp_path / "a.npz", images_of(20, 6, 6))
    assert isinstance(read_npz(path, Reading()).train.images, StoredArray)
    converted = read_npz(path, Reading(shape=(1, 3, 3), resize=True)).train
    assert isinstance(converted.images, np.ndarray) and converted.images.shape == (20, 1, 3, 3)


def test_what_cannot_stay_there_is_read(tmp_path, on_disk):
    images = images_of(20, 6, 6)
    for name, path in {
        "compressed": written(tmp_path / "c.npz", images, np.savez_compressed),
        "floats": written(tmp_path / "f.npz", (images / 255).astype(np.float32)),
        "of more bytes": written(tmp_path / "i.npz", images.astype(np.int32)),
        "by columns": written(tmp_path / "o.npz", np.asfortranarray(images)),
    }.items():
        assert isinstance(read_npz(path, Reading()).train.images, np.ndarray), name


def test_small_images_are_read(tmp_path):
    assert stored.LARGE > 10**8
    assert isinstance(read_npz(written(tmp_path / "a.npz", images_of(20, 6, 6)), Reading()).train.images, np.ndarray)


def test_numbers_are_read(tmp_path, on_disk):
    np.savez(tmp_path / "n.npz", x=images_of(20, 6), y=np.arange(20) / 20)
    assert isinstance(read_npz(tmp_path / "n.npz", Reading(numbers=True)).train.inputs, np.ndarray)


@pytest.mark.parametrize("how", ["longer", "shorter", "newer"])
def test_a_file_that_is_changed_while_it_is_in_use_is_refused(tmp_path, on_disk, how):
    path = written(tmp_path / "a.npz", images_of(90, 5, 4))
    source = read_npz(path, Reading())
    source.train.take(np.arange(3))
    if how == "longer":
        written(path, images_of(100, 5, 4))
    elif how == "shorter":
        os.truncate(path, 200)
    else:
        os.utime(path, ns=(0, 12345))
    with pytest.raises(DataError, match=r"a\.npz: the file was changed.* while it is in use.*start the run again"):
        source.train.take(np.arange(50, 90))


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_another_file_at_the_same_path_is_not_read(tmp_path, on_disk, how):
    path, other = written(tmp_path / "a.npz", images_of(90, 5, 4)), written(tmp_path / "b.npz", images_of(90, 5, 4))
    source = read_npz(path, Reading())
    time = path.stat().st_mtime_ns
    os.utime(other, ns=(time, time))
    other.replace(path) if how == "replaced" else path.unlink()
    with pytest.raises(DataError, match=r"a\.npz: the file was changed, replaced or removed"):
        source.train.take(np.arange(3))


def test_an_index_that_would_choose_other_rows_is_refused(tmp_path, on_disk):
    images = read_npz(written(tmp_path / "a.npz", images_of(90, 5, 4)), Reading()).train.images
    for rows in (np.arange(90) % 2 == 0, 3, np.arange(4).reshape(2, 2), [0.5], ...):
        with pytest.raises(TypeError, match="give a slice, or whole numbers"):
            images[rows]


def test_no_rows(tmp_path, on_disk):
    images = read_npz(written(tmp_path / "a.npz", images_of(90, 5, 4)), Reading()).train.images
    assert images[[]].shape == images[3:3].shape == (0, 1, 5, 4)


@pytest.fixture
def changed_while_read(tmp_path, monkeypatch):
    """A folder of images to which a file is added whenever it is read."""
    for number in range(20):
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(images_of(1, 8, 8)[0] + number).save(tmp_path / name / f"{number}.png")
    read = sources._read_path

    def reading(path, of):
        source = read(path, of)
        (path / "a" / "scanner.log").write_text("a line")
        os.utime(path / "a", ns=(0, 12345))
        return source

    monkeypatch.setattr(sources, "_read_path", reading)
    return tmp_path


def test_a_site_may_write_other_files_beside_its_data(changed_while_read):
    found = load_client(DataConfig(dataset="local"), {"data-path": str(changed_while_read)}, client="a")
    assert len(found.train) + len(found.test) == 40


def test_the_run_s_dataset_must_not_change_while_it_is_read(changed_while_read):
    config = DataConfig(dataset=str(changed_while_read), min_partition_size=2)
    node = {"partition-id": 0, "num-partitions": 2}
    with pytest.raises(DataError, match="the files were changed after the run began, or while they were read"):
        load_client(config, node, client="a", stamped=dataset_stamp(config))


def test_of_files_that_change_the_last_version_alone_is_kept(tmp_path):
    file, versions = tmp_path / "a.npz", []
    for count in (20, 30, 40):
        written(file, images_of(count, 5, 4))
        source = sources.path_source(str(file), Reading())
        assert len(source.train) == count and sources.path_source(str(file), Reading()) is source
        versions.append(weakref.ref(source))
        del source
    gc.collect()
    assert [version() is None for version in versions] == [True, True, False]


def test_a_folder_of_tables_counts_its_images_and_a_single_table_does_not(tmp_path):
    (tmp_path / "train.csv").write_text("image,label\n0.png,0\n1.png,1\n")
    for name in ("0.png", "1.png"):
        Image.fromarray(images_of(1, 8, 8)[0]).save(tmp_path / name)
    folder, table = sources.stamp(tmp_path), sources.stamp(tmp_path / "train.csv")
    Image.fromarray(images_of(1, 9, 9)[0]).save(tmp_path / "1.png")
    assert sources.stamp(tmp_path) != folder and sources.stamp(tmp_path / "train.csv") == table


def test_a_copy_reads_the_same_and_no_file_stays_open(tmp_path, on_disk):
    before = len(os.listdir("/proc/self/fd"))
    images = read_npz(written(tmp_path / "a.npz", images_of(90, 5, 4)), Reading()).train.images
    for copied in (copy.deepcopy(images), pickle.loads(pickle.dumps(images))):
        np.testing.assert_array_equal(copied[5:9], images_of(90, 5, 4)[5:9, None])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_file_is_refused_as_before(tmp_path, on_disk):
    path = written(tmp_path / "a.npz", images_of(90, 5, 4))
    content = bytearray(path.read_bytes())
    content[content.index(b"\x93NUMPY")] ^= 255
    Path(path).write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz: array images cannot be read"):
        read_npz(path, Reading())
