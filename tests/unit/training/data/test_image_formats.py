"""Images in the formats of data sets: files written here byte by byte, and what is said of those in disorder."""

import csv
import errno
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tracemalloc
import unicodedata
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tepal.training import data
from tepal.training.data import DataConfig, DataError, dataset_info, held_out, load_client, sources
from tepal.training.data.formats.images import read_images


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    yield
    sources.load_path.cache_clear()


def own(path: object, **config: object) -> data.ClientData:
    """What a client with a `data-path` of its own gets in a run with dataset="local"."""
    settings = DataConfig.model_validate({"dataset": "local", **config})
    return load_client(settings, {"data-path": str(path)}, client="ward-3")


def read(path: object, **config: object) -> sources.Source:
    """A dataset as it is kept, in the order of its file."""
    return sources.named_source(DataConfig.model_validate({"dataset": str(path), **config}))


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def png(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(array).save(content, "png")
    return content.getvalue()


def paint(path: Path, colour: object, mode: str = "L", size: tuple[int, int] = (4, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)  # type: ignore[arg-type]


# idx


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray, part: str = "train", end: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for what, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        content = idx(array)
        (folder / f"{what}{end}").write_bytes(gzip.compress(content) if end == ".gz" else content)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_mnists_files_are_read_and_t10k_is_the_test_set(tmp_path: Path, end: str) -> None:
    train, test = pixels(12, 5, 4), pixels(3, 5, 4)
    write_idx(tmp_path, train, np.arange(12) % 10, end=end)
    write_idx(tmp_path, test, np.array([9, 0, 1]), "t10k", end)
    source = read(tmp_path)
    assert np.array_equal(source.train.images, train[:, None]) and source.train.labels.tolist() == [*range(10), 0, 1]
    assert source.test is not None and np.array_equal(source.test.images, test[:, None])
    assert (source.train.shape, source.classes) == ((1, 5, 4), 10)
    server = held_out(DataConfig(dataset=str(tmp_path)))
    assert server is not None and server.labels.tolist() == [9, 0, 1]
    client = own(tmp_path)
    np.testing.assert_allclose(client.train.images[:, 0] * 255, train, atol=1e-4)
    assert client.test.labels.tolist() == [9, 0, 1]


def test_without_t10k_a_client_divides_what_it_has(tmp_path: Path) -> None:
    write_idx(tmp_path, pixels(10, 3, 3), np.arange(10))
    client = own(tmp_path)
    assert (len(client.train), len(client.test)) == (8, 2)


def test_folders_with_the_names_of_idx_files_are_no_idx_files(tmp_path: Path) -> None:
    """As in Kaggle's archive of MNIST, which has each file twice: with a dot in its name, and in a folder."""
    images = pixels(4, 3, 3)
    write_idx(tmp_path, images, np.arange(4))
    for what, kind in (("images", "idx3"), ("labels", "idx1")):
        inner = tmp_path / f"train-{what}-{kind}-ubyte"
        inner.rename(tmp_path / f"train-{what}.{kind}-ubyte")
        inner.mkdir()
    assert np.array_equal(read(tmp_path).train.images[:, 0], images)


def test_emnists_images_are_turned_and_its_letters_count_from_0(tmp_path: Path) -> None:
    upright = pixels(4, 6, 6)
    write_idx(tmp_path / "a", upright.transpose(0, 2, 1), np.array([0, 46, 1, 2]), "emnist-balanced-train")
    source = read(tmp_path / "a")
    assert np.array_equal(source.train.images[:, 0], upright) and source.train.labels.tolist() == [0, 46, 1, 2]
    write_idx(tmp_path / "b", upright.transpose(0, 2, 1), np.array([1, 26, 2, 3]), "emnist-letters-train")
    write_idx(tmp_path / "b", upright[:1].transpose(0, 2, 1), np.array([5]), "emnist-letters-test")
    source = read(tmp_path / "b")
    assert source.train.labels.tolist() == [0, 25, 1, 2] and source.test is not None
    assert source.test.labels.tolist() == [4] and np.array_equal(source.test.images[:, 0], upright[:1])
    write_idx(tmp_path / "b", upright, np.array([1, 2, 0, 4]), "emnist-digits-train")
    with pytest.raises(DataError, match=r"several data sets .emnist-digits, emnist-letters.: put the files of each"):
        read(tmp_path / "b")


def test_idx_files_that_are_cut_off_or_missing_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path, pixels(4, 3, 3), np.arange(4))
    images = tmp_path / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for content, message in (
        (whole[:-1], r"51 bytes, but its header gives 52 \(4 x 3 x 3\): it is truncated"),
        (whole + b"\0", "53 bytes, but its header gives 52"),
        (whole[:9], "9 bytes, but its header gives"),
        (b"", "it begins with nothing, expected 00 00 08 03"),
        (
            b"\0\0\x0d\x03" + whole[4:],
            "not an idx file of unsigned bytes with 3 dimensions .it begins with 00 00 0d 03",
        ),
        (idx(np.zeros((4, 3, 3, 3))), "it begins with 00 00 08 04"),
    ):
        images.write_bytes(content)
        with pytest.raises(DataError, match=f"^client ward-3: {images}: .*{message}"):
            own(tmp_path)
    images.write_bytes(idx(np.zeros((3, 3, 3))))
    with pytest.raises(DataError, match="3 images but 4 labels"):
        read(tmp_path)
    images.unlink()
    with pytest.raises(DataError, match="the train images are missing for train-labels-idx1-ubyte: add"):
        read(tmp_path)
    packed = tmp_path / "train-images-idx3-ubyte.gz"
    packed.write_bytes(gzip.compress(whole)[:-10])
    with pytest.raises(DataError, match=f"^{packed}: cannot be decompressed .*truncated or damaged"):
        read(tmp_path)


def test_labels_beyond_the_runs_classes_are_refused_with_the_site_and_the_file(tmp_path: Path) -> None:
    # Each site knows its own labels only; that they disagree with the run's classes is seen at the one that has more.
    write_idx(tmp_path / "fits", pixels(4, 3, 3), np.array([0, 1, 2, 1]))
    write_idx(tmp_path / "more", pixels(4, 3, 3), np.array([0, 1, 2, 3]))
    assert own(tmp_path / "fits", classes=3).classes == 3
    with pytest.raises(
        DataError, match=f"^client ward-3: {tmp_path}/more: train: label 3 .example 3; 1 in all.*0 to 2"
    ):
        own(tmp_path / "more", classes=3)


# CIFAR


def batch(images: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """As Python 2 wrote it: names and pixels are bytes."""
    content = {b"batch_label": b"training", key: labels, b"data": images.reshape(len(images), -1)}
    return pickle.dumps(content, protocol=2)


def test_cifar_10_batches_are_read_in_order(tmp_path: Path) -> None:
    images = pixels(7, 3, 32, 32)
    (tmp_path / "data_batch_2").write_bytes(batch(images[3:5], [3, 4]))
    (tmp_path / "data_batch_1").write_bytes(batch(images[:3], [0, 1, 2]))
    (tmp_path / "test_batch").write_bytes(batch(images[5:], [9, 8]))
    (tmp_path / "batches.meta").write_bytes(b"is not read")
    source = read(tmp_path)
    assert np.array_equal(source.train.images, images[:5]) and source.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert source.test is not None and np.array_equal(source.test.images, images[5:])
    assert (source.test.labels.tolist(), source.classes, source.train.shape) == ([9, 8], 10, (3, 32, 32))


def test_a_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    """Opcode by opcode: all its texts are byte strings (U, T), as in the files that CIFAR's authors hand out."""
    image = pixels(1, 3072)
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R" + b"(K\x03U\x01|NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    state = b"(K\x01" + b"K\x01M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<I", 3072) + image.tobytes() + b"tb"
    content = b"\x80\x02}(U\x04data" + array + state + b"U\x06labels]K\x07au."
    (tmp_path / "data_batch_1").write_bytes(content)
    source = read(tmp_path)
    assert np.array_equal(source.train.images.reshape(1, -1), image) and source.train.labels.tolist() == [7]


def test_cifar_100_gives_the_fine_labels(tmp_path: Path) -> None:
    images = pixels(4, 3, 32, 32)
    (tmp_path / "train").write_bytes(batch(images[:3], [99, 5, 50], b"fine_labels"))
    (tmp_path / "test").write_bytes(batch(images[3:], [7], b"fine_labels"))
    source = read(tmp_path)
    assert (source.train.labels.tolist(), source.classes) == ([99, 5, 50], 100)
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "train.bin").write_bytes(b"".join(bytes([19, 99 - n]) + images[n].tobytes() for n in range(3)))
    (binary / "test.bin").write_bytes(bytes([19, 7]) + images[3].tobytes())
    source = read(binary)
    assert np.array_equal(source.train.images, images[:3]) and source.train.labels.tolist() == [99, 98, 97]
    assert source.test is not None and source.test.labels.tolist() == [7] and source.classes == 100


def test_cifar_10s_binary_batches_and_their_cut_off_ones(tmp_path: Path) -> None:
    images = pixels(3, 3, 32, 32)
    file = tmp_path / "data_batch_1.bin"
    file.write_bytes(b"".join(bytes([n + 1]) + images[n].tobytes() for n in range(3)))
    source = read(tmp_path)
    assert np.array_equal(source.train.images, images) and source.train.labels.tolist() == [1, 2, 3]
    assert source.test is None and source.classes == 10
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"^{file}: 9,218 bytes are not a multiple of a record's 3,073 bytes"):
        read(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(batch(images, [1, 2, 3]))
    with pytest.raises(DataError, match="pickled and binary"):
        read(tmp_path)


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(Path(os.environ["TEPAL_CACHE"]) / "was-here"),)


def test_a_pickle_with_objects_is_refused_before_they_are_made(tmp_path: Path, cache_folder: Path) -> None:
    cache_folder.mkdir()
    file = tmp_path / "data_batch_1"
    for content in (
        {b"data": Hostile(), b"labels": [0]},
        {b"data": np.array([Hostile()], dtype=object), b"labels": [0]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0], b"extra": Path("x")},
        {b"data": eval, b"labels": [0]},
    ):
        file.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(DataError, match=f"^{file}: has .* in its pickle: only numpy arrays, bytes and plain"):
            read(tmp_path)
    assert not (cache_folder / "was-here").exists()


def test_cifar_batches_in_disorder_are_named(tmp_path: Path) -> None:
    images = pixels(3, 3, 32, 32)
    file = tmp_path / "data_batch_1"
    whole = batch(images, [0, 1, 2])
    for content, message in (
        (whole[:-100], "not a readable pickle .*truncated or damaged"),
        (whole[:1000], "not a readable pickle"),
        (b"", "not a readable pickle"),
        (b"PK\x03\x04", "not a readable pickle"),
        (pickle.dumps([1, 2]), "has no data and labels .or fine_labels.; it has no names"),
        (pickle.dumps({b"images": 1}), "it has images"),
        (batch(images, [0, 1]), r"data is uint8 of shape \(3, 3072\) with 2 labels"),
        (batch(images[:, :1], [0, 1, 2]), r"shape \(3, 1024\)"),
        (batch(images / 255, [0, 1, 2]), "data is float64"),
        (batch(images, [0, None, 2]), "its labels are not all whole numbers"),  # type: ignore[list-item]
        (batch(images, 3), "has no data and labels"),  # type: ignore[arg-type]
        (batch(images, [0, 1, 10]), "label 10 .* is out of range: allowed are 0 to 9"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path)


# Folders


def test_folders_by_domain_give_each_image_its_group(tmp_path: Path) -> None:
    for domain, classes in {"photo": ("cat", "dog"), "sketch": ("dog", "eel")}.items():
        for name in classes:
            for number in range(2):
                paint(tmp_path / domain / name / f"{number}.png", 10 * number)
    source = read(tmp_path)
    assert source.class_names == ("cat", "dog", "eel") and source.classes == 3
    assert source.train.labels.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert source.train.groups is not None and source.train.groups.tolist() == ["photo"] * 4 + ["sketch"] * 4
    (tmp_path / "photo" / "ant").mkdir()  # an empty class counts
    assert read(tmp_path).class_names == ("ant", "cat", "dog", "eel")


def test_folders_train_and_test_are_no_groups(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            paint(tmp_path / part / name / "0.png", 100 if part == "test" else 0)
    source = read(tmp_path)
    assert source.train.labels.tolist() == [0, 1] and source.train.groups is None and not source.train.images.any()
    assert source.test is not None and (source.test.images == 100).all()


@pytest.mark.parametrize("validation", ["", "val", "Valid", "validation"])
def test_upper_case_is_the_same_and_a_validation_set_is_training_data(
    tmp_path: Path, validation: str, caplog: pytest.LogCaptureFixture
) -> None:
    for part, colour in {"Train": 0, "TEST": 100, **({validation: 50} if validation else {})}.items():
        for name in ("cat", "dog"):
            paint(tmp_path / part / name / "0.png", colour)
    with caplog.at_level("WARNING", "flwr"):
        source = read(tmp_path)
    assert source.train.images[:, 0, 0, 0].tolist() == [0, 0, *([50] * 2 if validation else [])]
    assert source.train.groups is None and source.test is not None and (source.test.images == 100).all()
    said = f"the images in {validation} are used for training, like those in Train"
    assert [said in one.getMessage() for one in caplog.records] == [True] * bool(validation)


@pytest.mark.parametrize(("training", "testing"), [("Training", "Testing"), ("training", "TEST"), ("train", "testing")])
def test_folders_training_and_testing_are_sets_too(tmp_path: Path, training: str, testing: str) -> None:
    for part, colour in {training: 0, testing: 100, "Validation": 50}.items():
        for name in ("cat", "dog"):
            paint(tmp_path / part / name / "0.png", colour)
    source = read(tmp_path)
    assert sorted(source.train.images[:, 0, 0, 0].tolist()) == [0, 0, 50, 50]
    assert source.train.groups is None and source.test is not None and (source.test.images == 100).all()


def test_a_folder_training_beside_train_is_another_one(tmp_path: Path) -> None:
    for part in ("train", "test", "training"):
        paint(tmp_path / part / "cat" / "0.png", 1)
    with pytest.raises(DataError, match=f"{tmp_path}: has the folder training beside train and test.*move it away"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("files", "deeper"),
    [
        (("benign/0.png", "malignant/patient0/0.png", "malignant/patient1/0.png"), "malignant/patient0/0.png"),
        (("a/0.png", "b/0.png", "b/old/1.png"), "b/old/1.png"),
        (("a/0.png", "b/x/y/0.png"), "b/x/y/0.png"),
        (("train/overview.png", "train/cat/0.png", "test/cat/1.png"), "test/cat/1.png"),
        (("test/benign/0.png", "train/benign/0.png", "train/malignant/p0/0.png"), "train/malignant/p0/0.png"),
    ],
)
def test_images_at_another_depth_are_refused_and_not_left_out(
    tmp_path: Path, files: tuple[str, ...], deeper: str
) -> None:
    for file in files:
        paint(tmp_path / file, 1)
    said = f"{tmp_path}: the image {deeper} is at another depth than {files[0]}, but all must be at the same depth"
    with pytest.raises(DataError, match=f"^{said}, .*: move it, or the other one$"):
        read(tmp_path)


def test_folders_without_images_below_a_class_and_hidden_ones_do_not_matter(tmp_path: Path) -> None:
    paint(tmp_path / "a" / "0.png", 1)
    for folder in ("a/notes", "b/notes"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "of.txt").write_text("no image")
    paint(tmp_path / "a" / ".thumbnails" / "0.png", 1)
    source = read(tmp_path)
    assert (len(source.train), source.class_names) == (1, ("a", "b"))


def test_a_training_and_a_validation_set_are_no_groups(tmp_path: Path) -> None:
    for part in ("train", "val"):
        paint(tmp_path / part / "cat" / "0.png", 1)
    source = read(tmp_path)
    assert len(source.train) == 2 and source.train.groups is None and source.test is None


def test_without_train_other_folders_are_groups_and_beside_train_and_test_refused(tmp_path: Path) -> None:
    for part in ("val", "test", "photo"):
        paint(tmp_path / part / "cat" / "0.png", 1)
    source = read(tmp_path)
    assert source.train.groups is not None and source.train.groups.tolist() == ["photo", "test", "val"]
    paint(tmp_path / "train" / "cat" / "0.png", 1)
    with pytest.raises(DataError, match=f"{tmp_path}: has the folder photo beside train and test.*move it away"):
        read(tmp_path)


def test_numbered_folders_have_the_labels_of_a_table_with_these_numbers(tmp_path: Path) -> None:
    for label in range(12):
        paint(tmp_path / "f" / str(label) / "0.png", label)
    table = [{"image": f"f/{n}/0.png", "label": form} for n in range(12) for form in (n, float(n))]
    for form in (".csv", ".jsonl"):  # in a .csv file "0", "0.0", …, as pandas writes them
        write_table(tmp_path / f"t{form}", table)
        by_row = read(tmp_path / f"t{form}", classes=12).train
        assert np.array_equal(by_row.images[:, 0, 0, 0], by_row.labels) and len(by_row) == 24
    source = read(tmp_path / "f")
    assert np.array_equal(source.train.images[:, 0, 0, 0], source.train.labels)
    assert source.class_names == tuple(map(str, range(12)))
    for label in (0, 3):
        (tmp_path / "f" / str(label) / "0.png").unlink()
        (tmp_path / "f" / str(label)).rmdir()
    assert read(tmp_path / "f").class_names == ("1", "2", *map(str, range(4, 12)))


def test_a_class_is_the_same_however_its_letters_are_composed(tmp_path: Path) -> None:
    names = ("Zitrone", "Äpfel", "Birne")
    for form in ("NFC", "NFD"):  # macOS writes the latter
        for colour, name in enumerate(names):
            paint(tmp_path / form / unicodedata.normalize(form, name) / "0.png", colour)
        source = read(tmp_path / form)
        assert source.class_names == ("Birne", "Zitrone", "Äpfel")
        assert sorted(zip(source.train.labels.tolist(), source.train.images[:, 0, 0, 0], strict=True)) == [
            (0, 2), (1, 0), (2, 1)
        ]  # fmt: skip
        asked = {"class-names": unicodedata.normalize("NFD" if form == "NFC" else "NFC", ",".join(names))}
        assert np.array_equal((named := read(tmp_path / form, **asked)).train.images[:, 0, 0, 0], named.train.labels)
    rows = [{"image": f"NFC/{name}/0.png", "label": unicodedata.normalize("NFD", name)} for name in names]
    write_table(tmp_path / "t.csv", rows)
    assert read(tmp_path / "t.csv").class_names == ("Birne", "Zitrone", "Äpfel")


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), OSError(errno.EMFILE, "Too many files")])
def test_an_image_that_the_system_cannot_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError
) -> None:
    for number in range(4):
        paint(tmp_path / "cat" / f"{number}.png", number)
    whole = Image.open
    failing: list[Exception] = [fault]

    def opened(file: Path) -> Image.Image:
        if file.name == "2.png":
            raise failing[0]
        return whole(file)

    monkeypatch.setattr(Image, "open", opened)
    with pytest.raises(DataError, match=r"cat/2\.png: cannot be read: .*: check path, permissions and disk$"):
        read(tmp_path)
    failing[0] = MemoryError()
    with pytest.raises(MemoryError):
        read(tmp_path)
    failing[0] = OSError("image file is truncated")  # Pillow's own
    assert len(read(tmp_path).train) == 3


def test_class_names_fix_the_labels_of_sites_with_different_folders(tmp_path: Path) -> None:
    for name in ("dog", "ant"):
        paint(tmp_path / name / "0.png", 7)
    names = {"class-names": "eel, dog, cat, ant", "image-shape": "1x4x4"}
    assert sorted(
        np.concatenate([part.labels for part in (own(tmp_path, **names).train, own(tmp_path, **names).test)])
    ) == [1, 3]
    assert own(tmp_path, **names).classes == 4
    assert dataset_info(DataConfig.model_validate({"dataset": "local", **names})).classes == 4
    with pytest.raises(DataError, match=r"class folders dog are not in the run's class-names .ant, cat.: rename"):
        own(tmp_path, **{"class-names": "ant,cat"})
    with pytest.raises(DataError, match="class-names='a,b': 2 names, but classes=3"):
        DataConfig.from_run_config({"classes": 3, "class-names": "a,b"})
    with pytest.raises(DataError, match="twice"):
        DataConfig.from_run_config({"class-names": "a,b,a"})


def test_a_few_unreadable_images_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(200):
        paint(tmp_path / ("cat" if number % 2 else "dog") / f"{number:03}.png", number)
    broken = [tmp_path / "cat" / "007.png", tmp_path / "dog" / "010.png", tmp_path / "dog" / "012.png"]
    for file in broken[:2]:
        file.write_bytes(b"no image")
    with caplog.at_level("WARNING", "flwr"):
        client = own(tmp_path)
    assert len(client.train) + len(client.test) == 198
    assert [str(file) in caplog.text for file in broken] == [True, True, False]
    kept = np.concatenate([client.train.images, client.test.images])[:, 0, 0, 0]
    labels = np.concatenate([client.train.labels, client.test.labels])
    assert sorted(np.rint(kept * 255).astype(int)) == sorted({*range(200)} - {7, 10})
    assert all(label == (0 if round(value * 255) % 2 else 1) for value, label in zip(kept, labels, strict=True))
    broken[2].write_bytes(b"")
    sources.load_path.cache_clear()
    with pytest.raises(DataError, match="3 of 200 images cannot be read, and 2 may be left out") as refused:
        own(tmp_path)
    assert all(str(file) in str(refused.value) for file in broken)
    assert len(own(tmp_path, **{"unreadable-images": 0.02}).train) > 150
    sources.load_path.cache_clear()
    for number in range(20, 120):
        (tmp_path / ("cat" if number % 2 else "dog") / f"{number:03}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"at least [0-9]+ of 200 images") as refused:
        own(tmp_path)
    assert str(refused.value).count("not a readable image") == 5


def test_one_unreadable_image_of_few_may_be_left_out_but_not_the_only_one(tmp_path: Path) -> None:
    for number in range(3):
        paint(tmp_path / "cat" / f"{number}.png", 1)
    (tmp_path / "cat" / "0.png").write_bytes(b"")
    assert len(own(tmp_path).train) == 1
    with pytest.raises(DataError, match=r"1 of 3 images cannot be read, and 0 may be left out .unreadable-images=0."):
        own(tmp_path, **{"unreadable-images": 0})
    for number in (1, 2):
        (tmp_path / "cat" / f"{number}.png").unlink()
    with pytest.raises(DataError, match="1 of 1 images cannot be read"):
        own(tmp_path)


def test_a_site_with_one_image_is_told_so_with_its_name_and_file(tmp_path: Path) -> None:
    paint(tmp_path / "cat" / "0.png", 1)
    with pytest.raises(DataError, match=f"^client ward-3: {tmp_path}: 1 example cannot be split.*at least 2"):
        own(tmp_path)


# Orientation

UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda seen: seen,
    2: np.fliplr,
    3: lambda seen: np.rot90(seen, 2),
    4: np.flipud,
    5: lambda seen: np.swapaxes(seen, 0, 1),
    6: lambda seen: np.rot90(seen, -1),
    7: lambda seen: np.swapaxes(np.rot90(seen, 2), 0, 1),
    8: np.rot90,
}
"""An orientation in EXIF → what makes an image (H, W, C) upright that was stored as the camera saw it."""


def photo(array: np.ndarray, orientation: int = 0, form: str = "jpeg", *, damaged: bool = False) -> bytes:
    exif = Image.Exif()
    if orientation:
        exif[0x112], exif[0x11A] = orientation, 72.0  # the latter is the resolution
    tags = exif.tobytes()
    if damaged:
        tags = tags.replace(b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x07")  # no longer of the type of a resolution
    content = io.BytesIO()
    Image.fromarray(array).save(content, form, **({"exif": tags} if orientation else {}))
    return content.getvalue()


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_photo_is_turned_upright_as_the_camera_was_held(orientation: int) -> None:
    array = pixels(24, 16, 3)
    seen = data.read_image(io.BytesIO(photo(array)), None).transpose(1, 2, 0)
    upright = np.ascontiguousarray(UPRIGHT[orientation](seen))
    found = data.read_image(io.BytesIO(photo(array, orientation)), None)
    assert np.array_equal(found.transpose(1, 2, 0), upright)
    resized = np.asarray(Image.fromarray(upright).resize((7, 5), Image.Resampling.BILINEAR))
    found = data.read_image(io.BytesIO(photo(array, orientation)), (3, 5, 7))
    assert np.array_equal(found.transpose(1, 2, 0), resized)


@pytest.mark.parametrize("form", ["png", "tiff"])
def test_images_of_other_formats_are_turned_once(form: str) -> None:
    array = pixels(9, 6, 3)
    found = data.read_image(io.BytesIO(photo(array, 6, form)), None)
    assert np.array_equal(found.transpose(1, 2, 0), np.rot90(array, -1))


def test_damaged_tags_are_no_reason_to_leave_an_image_out_and_damaged_pixels_are() -> None:
    array = pixels(24, 16, 3)
    seen = data.read_image(io.BytesIO(photo(array)), None).transpose(1, 2, 0)
    found = data.read_image(io.BytesIO(photo(array, 6, damaged=True)), None)
    assert np.array_equal(found.transpose(1, 2, 0), np.rot90(seen, -1))
    with pytest.raises(DataError, match=r"^a\.jpg: not a readable image \(.*truncated.*\): remove or replace it$"):
        data.read_image(io.BytesIO(photo(array, 6)[:-100]), None, "a.jpg")


def deep_png(colour: int, channels: int, bits: int = 16) -> bytes:
    """A PNG of 2 x 2 zeros, by its specification: signature, header, pixels (0 before each line: no filter), end."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pixels = (b"\0" + bytes(2 * channels * bits // 8)) * 2
    header = struct.pack(">IIBBBBB", 2, 2, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)], ids=["L", "RGB", "LA", "RGBA"])
def test_16_bits_per_channel_are_refused_and_8_read(colour: int, channels: int) -> None:
    assert not data.read_image(io.BytesIO(deep_png(colour, channels, 8)), None).any()
    with pytest.raises(DataError, match=r"^a\.png: more than 8 bits per channel"):
        data.read_image(io.BytesIO(deep_png(colour, channels)), None, "a.png")


def test_a_tiff_of_16_bits_per_channel_is_refused() -> None:
    tags = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 128)]
    tags += [(277, 3, 1, 3), (278, 3, 1, 1), (279, 4, 1, 6)]  # width, height, bits, …: one pixel of red, green, blue
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    content = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0)
    content += struct.pack("<3H", 16, 16, 16)  # at 122
    with pytest.raises(DataError, match="more than 8 bits per channel"):
        data.read_image(io.BytesIO(content + struct.pack("<3H", 500, 600, 700)), None)


@pytest.mark.parametrize("form", ["png", "tiff", "jpeg", "bmp", "webp", "gif"])
def test_8_bits_per_channel_are_read(form: str) -> None:
    assert data.read_image(io.BytesIO(photo(np.full((4, 6, 3), 255, np.uint8), 0, form)), None).min() == 255


# Memory


def test_images_of_one_shape_are_in_memory_once() -> None:
    def read_one(number: int) -> np.ndarray:
        if number == 5:
            raise DataError("5.png: not a readable image")
        return np.full((3, 64, 64), number, np.uint8)

    tracemalloc.start()
    images, positions = read_images(range(80), read_one, "here", (3, 64, 64), 0.02)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert positions == [number for number in range(80) if number != 5]
    assert np.array_equal(images, np.broadcast_to(np.array(positions)[:, None, None, None], (79, 3, 64, 64)))
    assert images.dtype == np.uint8 and images.flags.c_contiguous and most < 1.2 * images.nbytes


def test_the_files_that_were_read_before_are_given_up_before_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "a" / "0.png", 1)
    before = weakref.ref(read(tmp_path))
    assert before() is read(tmp_path)
    paint(tmp_path / "a" / "1.png", 1)
    whole, kept = sources._read_path, []

    def fails(*given: object) -> sources.AnySource:
        kept.append(before())
        raise DataError("the disk is away")

    monkeypatch.setattr(sources, "_read_path", fails)
    with pytest.raises(DataError, match="the disk is away"):
        read(tmp_path)
    assert kept == [None]
    monkeypatch.setattr(sources, "_read_path", whole)
    assert len(read(tmp_path).train) == 2


# npz


def test_an_npz_files_groups_are_found_by_their_usual_names_or_the_one_given(tmp_path: Path) -> None:
    arrays = {"x_train": pixels(4, 2, 2), "y_train": np.arange(4), "x_test": pixels(2, 2, 2), "y_test": np.arange(2)}
    file = tmp_path / "a.npz"
    np.savez(file, **arrays, writer_train=np.array([7, 7, 8, 9]), site=np.array(list("abcd")))  # type: ignore[arg-type]
    groups = read(file).train.groups
    assert groups is not None and groups.tolist() == ["7", "7", "8", "9"]
    groups = read(file, **{"group-column": "site"}).train.groups
    assert groups is not None and groups.tolist() == ["a", "b", "c", "d"]
    with pytest.raises(
        DataError, match=r"no array ward_train or train_ward or ward .group-column='ward'.; it has site"
    ):
        read(file, **{"group-column": "ward"})
    np.savez(file, x=pixels(4, 2, 2), y=np.arange(4), groups=np.arange(3))
    with pytest.raises(DataError, match=r"groups are int64 of shape \(3,\); give one number or name for each of 4"):
        read(file)


# Shapes


def test_arrays_are_resized_to_image_shape_as_pillow_does(tmp_path: Path) -> None:
    grey, colour = pixels(3, 8, 6), pixels(3, 8, 6, 3)
    np.savez(tmp_path / "grey.npz", x=grey, y=np.arange(3))
    np.savez(tmp_path / "colour.npz", x=colour, y=np.arange(3))
    np.savez(tmp_path / "float.npz", x=grey / 255, y=np.arange(3))
    source = read(tmp_path / "grey.npz", **{"image-shape": "3x5x7"})
    for image, array in zip(source.train.images, grey, strict=True):
        expected = np.asarray(Image.fromarray(array).convert("RGB").resize((7, 5), Image.Resampling.BILINEAR))
        assert np.array_equal(image, expected.transpose(2, 0, 1))
    floats = read(tmp_path / "float.npz", **{"image-shape": "1x5x7"}).train.images
    assert floats.dtype == np.float32 and floats.min() >= 0 and floats.max() <= 1
    np.testing.assert_allclose(floats[:, 0] * 255, source.train.images[:, 0], atol=1.01)
    made_grey = read(tmp_path / "colour.npz", **{"image-shape": "1x8x6"}).train.images
    for image, array in zip(made_grey, colour, strict=True):
        np.testing.assert_allclose(image[0].astype(int), np.asarray(Image.fromarray(array).convert("L")), atol=1)
    # What is of the right shape stays as it is, bit for bit.
    assert np.array_equal(
        read(tmp_path / "colour.npz", **{"image-shape": "3x8x6"}).train.images.transpose(0, 2, 3, 1), colour
    )


def test_every_format_comes_in_the_shape_asked_for(tmp_path: Path) -> None:
    write_idx(tmp_path / "idx", pixels(4, 9, 9), np.arange(4))
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "data_batch_1").write_bytes(batch(pixels(4, 3, 32, 32), [0, 1, 2, 3]))
    paint(tmp_path / "folder" / "a" / "0.png", 9, size=(11, 12))
    for path in ("idx", "cifar", "folder"):
        for shape, expected in (("3x6x5", (3, 6, 5)), ("1x6x5", (1, 6, 5))):
            images = read(tmp_path / path, **{"image-shape": shape}).train.images
            assert images.shape[1:] == expected and images.dtype == np.uint8
    client = own(tmp_path / "idx", **{"image-shape": "3x6x5"})
    assert client.train.images.flags.c_contiguous and client.train.images.flags.writeable


# Tables


@pytest.mark.parametrize("form", [".csv", ".csv.gz", ".jsonl", ".jsonl.xz", ".parquet"])
def test_a_table_of_paths_labels_and_groups(tmp_path: Path, form: str) -> None:
    rows = [
        {"file": f"pictures/{number}.png", "kind": kind, "site": site}
        for number, (kind, site) in enumerate([("dog", "a"), ("cat", "a"), ("dog", "b"), ("cat", "a")])
    ]
    for number, row in enumerate(rows):
        paint(tmp_path / str(row["file"]), 50 * number)
    write_table(tmp_path / f"t{form}", rows)
    columns = {"image-column": "file", "label-column": "kind", "group-column": "site"}
    source = read(tmp_path / f"t{form}", **columns)
    assert source.train.images[:, 0, 0, 0].tolist() == [0, 50, 100, 150]
    assert source.train.labels.tolist() == [1, 0, 1, 0] and source.class_names == ("cat", "dog")
    assert source.train.groups is not None and source.train.groups.tolist() == ["a", "a", "b", "a"]
    named = read(tmp_path / f"t{form}", **columns, **{"class-names": "dog,eel,cat"})
    assert named.train.labels.tolist() == [0, 2, 0, 2] and named.classes == 3


def write_table(file: Path, rows: list[dict[str, object]]) -> None:
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return
    text = io.StringIO()
    if ".csv" in file.name:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.write("".join(json.dumps(row) + "\n" for row in rows))
    content = text.getvalue().encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, bytes)
    file.write_bytes(pack(content))


def test_a_parquet_file_of_encoded_images_as_hubs_have_them(tmp_path: Path) -> None:
    images = pixels(4, 5, 5)
    cells = [{"bytes": png(images[0]), "path": None}, {"bytes": png(images[1]), "path": "x.png"}]
    write_table(tmp_path / "train-00000-of-00002.parquet", [{"image": c, "label": n} for n, c in enumerate(cells)])
    write_table(
        tmp_path / "train-00001-of-00002.parquet", [{"image": {"bytes": png(images[2]), "path": None}, "label": 2}]
    )
    write_table(
        tmp_path / "test-00000-of-00001.parquet", [{"image": {"bytes": png(images[3]), "path": None}, "label": 1}]
    )
    source = read(tmp_path)
    assert np.array_equal(source.train.images[:, 0], images[:3]) and source.train.labels.tolist() == [0, 1, 2]
    assert source.test is not None and np.array_equal(source.test.images[:, 0], images[3:])
    assert source.test.labels.tolist() == [1]
    write_table(tmp_path / "plain.parquet", [{"img": png(images[n]), "label": n} for n in range(4)])
    plain = read(tmp_path / "plain.parquet", **{"image-column": "img"})
    assert np.array_equal(plain.train.images[:, 0], images)


def test_a_split_column_makes_the_test_set(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for number, split in enumerate(["test", "train", "train", "test", "train"]):
        paint(tmp_path / f"{number}.png", number)
        rows.append({"image": f"{number}.png", "label": str(number % 3), "split": split, "group": number})
    write_table(tmp_path / "t.csv", rows)
    source = read(tmp_path / "t.csv", **{"split-column": "split", "group-column": "group"})
    assert source.train.images[:, 0, 0, 0].tolist() == [1, 2, 4] and source.train.labels.tolist() == [1, 2, 1]
    assert source.test is not None and source.test.images[:, 0, 0, 0].tolist() == [0, 3]
    assert source.test.labels.tolist() == [0, 0]
    assert source.train.groups is not None and source.train.groups.tolist() == ["1", "2", "4"]
    assert read(tmp_path / "t.csv").test is None
    with pytest.raises(DataError, match=r"column label .split-column. has 0, 1, 2; allowed are train and test"):
        read(tmp_path / "t.csv", **{"split-column": "label"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("picture,label\na.png,1\n", "has no column image; it has picture, label: set the right names.*image-column"),
        ("image,kind\na.png,1\n", "has no column label"),
        ("", "has no column image and no column label; it has none"),
        ("image,label\n", "has no row: give at least one"),
        ("image,label,label\n0.png,1,2\n0.png,1,2\n", "column label occurs 2 times: rename or remove one"),
        ("image,label\n0.png,1\n0.png\n", "line 3 has no value for column label: it is too short"),
        ('image,label\n0.png,"1\n', "line [0-9] is not CSV"),
        ("image,label\n0.png,1\n0.png,\n", "row 2 has no label .column label."),
        ("image,label\n0.png,1\n0.png,7\n", "label 7 .example 1; 1 in all. is out of range: allowed are 0 to 2"),
        ("image,label\n0.png,1\n0.png,-1\n", "label -1"),
        ("image,label\n0.png,cat\n0.png,dog\n", "2 names in column label .cat, dog., but the run has 3 classes"),
        (
            "image,label\nnone.png,1\nnone.png,1\n",
            "2 of 2 images cannot be read, and 1 may be.*row 1 .none.png.: not a",
        ),
        (b"image,label\n\xff\xfe,1\n", "not UTF-8 text"),
    ],
)
def test_a_csv_table_in_disorder_is_refused_with_site_file_and_place(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    paint(tmp_path / "0.png", 3)
    file = tmp_path / "t.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=f"^client ward-3: {file}: .*{message}|^client ward-3: {file}: {message}"):
        own(file, classes=3)


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", [{"image": "a.png", "label": 0}])
    with pytest.raises(DataError, match="images need labels: set label-column"):
        read(tmp_path / "t.csv", **{"label-column": ""})


def test_json_lines_and_parquet_in_disorder_are_refused(tmp_path: Path) -> None:
    lines = tmp_path / "t.jsonl"
    for content, message in (
        ('{"image": "a", "label": 1}\n{"image": "a"', "line 2 is not JSON"),
        ('{"image": "a", "label": 1}\n\n{"image": "a"}', "line 3: has no column label; it has image"),
        ("[1, 2]", "line 1 is not a JSON object"),
        ('{"image": 5, "label": 1}', "1 of 1 images.*row 1: int in column image is neither"),
        ('{"image": "a", "label": 0.5}', "row 1: label 0.5"),
    ):
        lines.write_text(content)
        with pytest.raises(DataError, match=f"{lines}: .*{message}|{lines}: {message}"):
            read(lines)
    parquet = tmp_path / "t.parquet"
    write_table(parquet, [{"image": b"x" * 5000, "label": 0}])
    parquet.write_bytes(parquet.read_bytes()[:-40])
    with pytest.raises(DataError, match=f"^{parquet}: not a readable parquet file"):
        read(parquet)
    packed = tmp_path / "t.jsonl.xz"
    packed.write_bytes(lzma.compress(b'{"image": "a", "label": 1}\n' * 1000)[:-20])
    with pytest.raises(DataError, match=f"^{packed}: cannot be decompressed"):
        read(packed)


def test_what_is_no_format_gets_the_list_of_formats(tmp_path: Path) -> None:
    (tmp_path / "a.doc").write_text("no data")
    with pytest.raises(DataError, match=r"a.doc: this kind of file is not supported: give a .npz file, a table"):
        read(tmp_path / "a.doc")
    with pytest.raises(DataError, match=r"no such file or folder .expected is a .npz file, a table"):
        read("none.parquet")


def test_a_changed_folder_of_files_is_read_anew(tmp_path: Path) -> None:
    write_idx(tmp_path, pixels(4, 3, 3), np.arange(4))
    assert read(tmp_path).classes == 4
    write_idx(tmp_path, pixels(5, 3, 3), np.arange(5))
    assert read(tmp_path).classes == 5
    paint(tmp_path / "f" / "photo" / "cat" / "0.png", 1)
    assert len(read(tmp_path / "f").train.labels) == 1
    paint(tmp_path / "f" / "photo" / "cat" / "1.png", 1)
    assert len(read(tmp_path / "f").train.labels) == 2


# Real files


@pytest.fixture
def real() -> Path:
    folder = os.environ.get("TEPAL_TEST_DATA")
    if not folder:
        pytest.skip("TEPAL_TEST_DATA names no folder with data sets")
    return Path(folder)


@pytest.mark.parametrize(
    ("name", "config", "shape", "classes", "counts", "groups"),
    [
        ("mnist", {}, (1, 28, 28), 10, (60_000, 10_000), 539),
        ("fashion_mnist", {}, (1, 28, 28), 10, (60_000, 10_000), 0),
        ("cifar10_subset", {}, (3, 32, 32), 10, (10_000, 2_000), 0),
        ("pacs32", {"group-column": "domain"}, (3, 32, 32), 7, (9_991, 0), 4),
    ],
)
def test_real_images(
    real: Path, name: str, config: dict[str, object], shape: data.DatasetInfo, classes: int, counts: object, groups: int
) -> None:
    source = read(real / f"{name}.npz", **config)
    assert (source.train.shape, source.classes) == (shape, classes)
    assert (len(source.train.labels), len(source.test.labels) if source.test else 0) == counts
    assert len(set(source.train.groups.tolist()) if source.train.groups is not None else ()) == groups


def test_real_writers_are_clients(real: Path) -> None:
    """MNIST by the person who wrote the digits, as its file says: counted here without the partitioner."""
    config = DataConfig.model_validate({"dataset": str(real / "mnist.npz"), "partitioner": "natural"})
    with np.load(real / "mnist.npz") as mnist:
        writers, counts = np.unique(mnist["writer_train"].astype(str), return_counts=True)
    for client in (0, 17, 538):
        part = load_client(config, {"partition-id": client, "num-partitions": len(writers)}, client=writers[client])
        assert len(part.train) + len(part.test) == counts[client]


def test_real_images_are_the_same_as_idx_files_and_cifar_batches(real: Path, tmp_path: Path) -> None:
    with np.load(real / "mnist.npz") as mnist:
        test, labels = mnist["x_test"], mnist["y_test"]
    write_idx(tmp_path / "mnist", test, labels, end=".gz")
    source = read(tmp_path / "mnist")
    assert np.array_equal(source.train.images[:, 0], test) and np.array_equal(source.train.labels, labels)
    with np.load(real / "cifar10_subset.npz") as cifar:
        test, labels = cifar["x_test"], cifar["y_test"]
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "data_batch_1").write_bytes(batch(test.transpose(0, 3, 1, 2), labels.tolist()))
    source = read(tmp_path / "cifar")
    assert np.array_equal(source.train.images.transpose(0, 2, 3, 1), test)
    assert np.array_equal(source.train.labels, labels)
