"""Data sets by name, of the hub, and what images are normalised by."""

import io
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from PIL import Image

from tepal.client_app import local_client
from tepal.server_app.config import read_run_config
from tepal.server_app.evaluation import server_evaluation
from tepal.server_app.run import build_model
from tepal.training.data import (
    DataConfig,
    DataError,
    DatasetInfo,
    Texts,
    dataset_info,
    held_out,
    load_client,
    normalise,
    sources,
)
from tepal.training.data.hub import load_hub
from tepal.training.data.inputs import InputConfig, written_names
from tepal.training.data.known import KNOWN, reading_of
from tepal.training.data.labels import labels_of


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    yield
    sources.load_path.cache_clear()
    load_hub.cache_clear()


def config_of(dataset: str, **config: object) -> DataConfig:
    return DataConfig.model_validate({"dataset": dataset, **config})


def write(file: Path, shape: tuple[int, ...], labels: list[int]) -> str:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    np.savez(file, x=images, y=np.array(labels))
    return str(file)


# By name


def test_a_named_dataset_is_read_from_its_path_and_has_all_its_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", (28, 28), [0, 1, 2, 3])
    assert dataset_info(config_of("mnist", **{"dataset-path": path})) == DatasetInfo((1, 28, 28), 10)
    assert dataset_info(config_of("femnist", **{"dataset-path": path})).classes == 62
    assert dataset_info(config_of("emnist", **{"dataset-path": path})).classes == 4  # its parts differ
    large = config_of("mnist", **{"dataset-path": path, "image-shape": "3x32x32"})
    assert dataset_info(large) == DatasetInfo((3, 32, 32), 10)


def test_a_client_of_a_named_dataset_brings_its_own_files(tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", (28, 28), [0, 1])
    client = load_client(config_of("mnist", **{"dataset-path": "elsewhere"}), {"data-path": path}, client="ward-3")
    assert (client.train.shape, client.classes) == ((1, 28, 28), 10)
    wrong = write(tmp_path / "wrong.npz", (28, 28), [0, 10])
    with pytest.raises(DataError, match=f"^client ward-3: {wrong}: .*label 10 .* allowed are 0 to 9"):
        load_client(config_of("mnist"), {"data-path": wrong}, client="ward-3")


@pytest.mark.parametrize("name", KNOWN)
def test_a_named_dataset_without_its_files_says_which_to_put_where(name: str) -> None:
    files = re.escape(KNOWN[name].files)
    with pytest.raises(DataError, match=f"dataset=['\"]{name}['\"].*to a folder with its files .*{files}"):
        dataset_info(config_of(name))


def test_what_does_not_fit_a_named_dataset_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", (32, 32), [0, 1])
    with pytest.raises(DataError, match=r"images are 1x32x32 .CxHxW., but the run's are 1x28x28"):
        dataset_info(config_of("mnist", **{"dataset-path": path}))
    with pytest.raises(
        DataError, match=r"dataset-path is for a dataset that is given by its name .mnist, .*path itself"
    ):
        dataset_info(config_of(path, **{"dataset-path": path}))
    with pytest.raises(DataError, match=r"'mnits' is not known .did you mean 'mnist'.*sciq .with dataset-path"):
        dataset_info(config_of("mnits"))


# Normalisation


def test_images_are_normalised_channel_by_channel_in_place() -> None:
    images = np.random.default_rng(0).random((5, 3, 4, 6), dtype=np.float32)
    before = images.copy()
    assert normalise(images, "0.1,0.2,0.3/0.5,1,2") is images
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 1), (0.3, 2)]):
        np.testing.assert_allclose(images[:, channel], (before[:, channel] - mean) / std, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(normalise(before.copy(), " 0.5 / 0.25 "), (before - 0.5) * 4, rtol=1e-4, atol=1e-6)
    assert np.array_equal(normalise(before.copy(), ""), before)


def test_images_are_normalised_as_clip_was_trained() -> None:
    """An image of CLIP's mean colour is 0, and one that is a standard deviation brighter 1."""
    mean, deviation = np.float32([0.48145466, 0.4578275, 0.40821073]), np.float32([0.26862954, 0.26130258, 0.27577711])
    images = np.stack([mean, mean + deviation])[:, :, None, None].repeat(2, axis=3)
    np.testing.assert_allclose(normalise(images, "clip")[:, :, 0, 1], [[0, 0, 0], [1, 1, 1]], atol=1e-6)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("minst", "one of mnist, fashion-mnist, cifar-10, cifar-100, pacs, domainnet, openimage, clip, or numbers"),
        ("femnist", "or numbers as mean/std"),
        ("0.5", "or numbers as mean/std"),
        ("0.5/0.5/0.5", "or numbers as mean/std"),
        ("0.5/0", "standard deviations above 0"),
        ("0.5/-1", "standard deviations above 0"),
        ("nan/1", "finite"),
        ("0.5,0.5/1", "as many means"),
        ("cifar-10", "has 3 values, but images have 1 channels: give one value for all channels"),
    ],
)
def test_what_cannot_normalise_is_refused_before_the_run(by: str, message: str) -> None:
    with pytest.raises(DataError, match=f"normalise='{by}'.*{message}"):
        dataset_info(config_of("digits", normalise=by))
    with pytest.raises(DataError, match="normalise="):
        dataset_info(config_of("local", **{"image-shape": "1x8x8", "classes": 10, "normalise": by}))


def test_a_client_trains_and_scores_on_normalised_images() -> None:
    node = {"partition-id": 1, "num-partitions": 4}
    config = InputConfig(dataset="digits", normalise="0.25/0.5")
    inputs, _, test_inputs, _ = local_client._load(config, node, "client-1").tensors
    data = load_client(DataConfig(), node, client="client-1")
    assert torch.allclose(inputs, (torch.from_numpy(data.train.images) - 0.25) * 2)
    assert torch.allclose(test_inputs, (torch.from_numpy(data.test.images) - 0.25) * 2)


def test_the_server_scores_on_normalised_images() -> None:
    config = read_run_config({"model": "tiny-vit", "dataset": "digits", "normalise": "0.25/0.5"})
    model, _ = build_model(config)
    evaluate = server_evaluation(config, model)
    examples = held_out(DataConfig())
    assert evaluate is not None and examples is not None
    with torch.no_grad():
        outputs = model.eval()((torch.from_numpy(examples.images) - 0.25) * 2)
        loss = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(examples.labels))
    assert evaluate(1, ArrayRecord(model.state_dict()))["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_data_comes_as_it_is_and_once_more_after_it_was_normalised() -> None:
    first = held_out(DataConfig())
    assert first is not None
    whole = first.images.copy()
    normalise(first.images, "0.5/0.5")
    again = held_out(DataConfig())
    assert again is not None and np.array_equal(again.images, whole)


# The hub


def png(value: int) -> Image.Image:
    return Image.fromarray(np.full((5, 4), value, np.uint8))


def hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, object]) -> list[str]:
    """A stand-in for flwr-datasets' FederatedDataset: what it was asked for is kept."""
    asked: list[str] = []

    class FederatedDataset:
        def __init__(self, *, dataset: str, partitioners: object, shuffle: bool) -> None:
            assert not shuffle
            asked.append(dataset)

        def load_split(self, split: str) -> object:
            if split not in splits:
                raise ValueError(f"The given split: '{split}' is not present")
            if isinstance(splits[split], Exception):
                raise splits[split]
            return splits[split]

    stub = types.ModuleType("flwr_datasets")
    stub.FederatedDataset = FederatedDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr_datasets", stub)
    return asked


def test_images_of_the_hub_are_read_once_with_its_classes_and_its_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b", "c"])})
    train = datasets.Dataset.from_dict({"img": [png(0), png(51), png(255)], "kind": [1, 0, 1]}, features=features)
    test = datasets.Dataset.from_dict({"img": [png(102)], "kind": [0]}, features=features)
    asked = hub(monkeypatch, {"train": train, "test": test})
    config = config_of("hub:someone/pictures", **{"image-column": "img", "label-column": "kind"})
    assert dataset_info(config) == DatasetInfo((1, 5, 4), 3)
    server = held_out(config)
    assert server is not None and server.labels.tolist() == [0]
    np.testing.assert_allclose(server.images, 0.4, rtol=1e-6)
    source = sources.named_source(config)
    assert source.train.images[:, 0, 0, 0].tolist() == [0, 51, 255] and source.train.labels.tolist() == [1, 0, 1]
    assert asked == ["someone/pictures"]
    with pytest.raises(DataError, match=r'dataset="hub:someone/pictures": has no column image; it has img, kind'):
        dataset_info(config_of("hub:someone/pictures", **{"label-column": "kind"}))


def numbered(monkeypatch: pytest.MonkeyPatch, **label: object) -> None:
    """Images of the hub whose labels are numbers 2, 0 and 1, with what `label` tells of these."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(**label)})
    rows = {"image": [png(0), png(51), png(255)], "label": [2, 0, 1]}
    hub(monkeypatch, {"train": datasets.Dataset.from_dict(rows, features=features)})


def test_a_sites_own_data_is_numbered_by_the_names_that_the_hub_has_of_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not be sorted, and the site has a subset of them."""
    numbered(monkeypatch, names=["horse", "ant", " bee"])
    config = InputConfig.from_run_config({"dataset": "hub:someone/pictures"})
    source = sources.named_source(config)
    assert source.train.labels is not None and source.train.labels.tolist() == [2, 0, 1]
    assert (source.classes, source.class_names) == (3, ("horse", "ant", "bee"))
    sent = written_names(config)
    assert sent == {"class-names": "horse,ant,bee"}
    for name, value in (("bee", 20), ("horse", 10)):
        (tmp_path / name).mkdir()
        png(value).save(tmp_path / name / "a.png")
    site = sources.path_source(str(tmp_path), reading_of(config_of("local", **sent)))
    assert site.train.labels is not None
    assert dict(zip(site.train.images[:, 0, 0, 0].tolist(), site.train.labels.tolist(), strict=True)) == {20: 2, 10: 0}


@pytest.mark.parametrize(
    ("label", "settings"),
    [
        ({"num_classes": 3}, {}),
        ({"names": ["7", "2", "1"]}, {}),
        ({"names": ["a", "1.0", "c"]}, {}),
        ({"names": ["a", " a", "c"]}, {}),
        ({"names": ["a", "b", " "]}, {}),
        ({"names": ["a", "b, c", "d"]}, {}),
        ({"names": ["a", "b", "c"]}, {"classes": 4}),
        ({"names": ["a", "b", "c"]}, {"class-names": "x,y,z"}),
    ],
)
def test_names_of_the_hub_that_name_no_classes_are_left_out(
    monkeypatch: pytest.MonkeyPatch, label: dict[str, object], settings: dict[str, object]
) -> None:
    numbered(monkeypatch, **label)
    source = sources.named_source(config_of("hub:someone/pictures", **settings))
    assert source.train.labels is not None and source.train.labels.tolist() == [2, 0, 1]
    assert (source.class_names, source.classes) == ((), settings.get("classes", 3))


def test_a_site_with_numbered_classes_needs_no_names_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class folders are labels, as numbers in its table are, whatever the hub calls the classes."""
    numbered(monkeypatch, names=["T - shirt / top", "trouser", "pullover"])
    sent = written_names(InputConfig.from_run_config({"dataset": "hub:someone/pictures"}))
    reading = reading_of(config_of("local", classes=3, **sent))
    for name, value in (("2", 20), ("0", 10)):
        (tmp_path / "folders" / name).mkdir(parents=True)
        png(value).save(tmp_path / "folders" / name / "a.png")
    site = sources.path_source(str(tmp_path / "folders"), reading)
    assert site.train.labels is not None and site.classes == 3
    assert site.class_names == ("T - shirt / top", "trouser", "pullover")
    assert dict(zip(site.train.images[:, 0, 0, 0].tolist(), site.train.labels.tolist(), strict=True)) == {20: 2, 10: 0}
    assert labels_of(["2", 0], reading, "table.csv")[0].tolist() == [2, 0]
    (tmp_path / "folders" / "2").rename(tmp_path / "folders" / "3")
    with pytest.raises(DataError, match=r"folders: label 3 .* out of range: allowed are 0 to 2"):
        sources.path_source(str(tmp_path / "folders"), reading)


def test_the_hubs_names_are_left_where_the_published_files_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site with the published lists of DomainNet is numbered by these."""
    seen: list[bool] = []
    monkeypatch.setattr(sources, "load_hub", lambda *args, named: seen.append(named))
    for name in ("domainnet", "cifar-10"):
        sources.named_source(config_of(name))
    numbered(monkeypatch, names=["horse", "ant", "bee"])
    assert seen == [False, True]
    reading = reading_of(config_of("hub:someone/pictures"))
    assert [load_hub("someone/pictures", reading, named=named).class_names for named in (False, True)] == [
        (), ("horse", "ant", "bee"),
    ]  # fmt: skip


def test_texts_of_the_hub_without_a_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = {"text": [f"text {n}" for n in range(10)], "label": ["yes", "no"] * 5}
    hub(monkeypatch, {"train": datasets.Dataset.from_dict(rows)})
    server = held_out(config_of("hub:someone/words", **{"text-column": "text", "held-out-fraction": 0.3}), Texts)
    assert server is not None and len(server) == 3 and server.labels is not None
    assert all(
        (int(text[-1]) % 2 == 0) == (label == 1) for text, label in zip(server.texts, server.labels, strict=True)
    )


def test_without_a_network_the_hubs_error_says_which_files_to_put_where(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, {"train": ConnectionError("Couldn't reach the Hub")})
    with pytest.raises(
        DataError,
        match=r'dataset="hub:someone/pictures": cannot be downloaded .Couldn\'t reach the Hub.*hf download --repo-type '
        r"dataset someone/pictures.*train-….parquet and test-….parquet into one folder, and set dataset to that folder",
    ):
        dataset_info(config_of("hub:someone/pictures"))


def test_flwr_datasets_offline_is_told_in_the_same_words() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(DataError, match=r"cannot be downloaded .*put its files train-….parquet"):
        dataset_info(config_of("hub:tepal-nobody/no-such-dataset"))


def test_the_folder_that_the_hubs_error_asks_for_can_be_read(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [png(0), png(51)], "label": [1, 0]}
    for part in ("train", "test"):
        content = io.BytesIO()
        datasets.Dataset.from_dict(rows, features=features).to_parquet(content)
        (tmp_path / f"{part}-00000-of-00001.parquet").write_bytes(content.getvalue())
    source = sources.named_source(config_of(str(tmp_path)))
    assert source.train.images[:, 0, 0, 0].tolist() == [0, 51] and source.test is not None
    assert source.train.labels.tolist() == [1, 0]


@pytest.mark.parametrize("name", [name for name, known in KNOWN.items() if known.mean])
def test_known_statistics_are_possible_ones_of_pixels_between_0_and_1(name: str) -> None:
    known = KNOWN[name]
    assert len(known.mean) == len(known.std) == (known.shape[0] if known.shape else 3)
    assert all(0 < mean < 1 and 0 < std <= 0.5 for mean, std in zip(known.mean, known.std, strict=True))


# Real files


@pytest.mark.parametrize(
    ("name", "file", "tolerance"),
    [
        ("mnist", "mnist.npz", 1e-4),
        ("fashion-mnist", "fashion_mnist.npz", 1e-4),
        ("cifar-10", "cifar10_subset.npz", 5e-3),  # a fifth of its images
    ],
)
def test_known_statistics_are_those_of_the_real_images(name: str, file: str, tolerance: float) -> None:
    folder = os.environ.get("TEPAL_TEST_DATA")
    if not folder:
        pytest.skip("TEPAL_TEST_DATA names no folder with data sets")
    source = sources.named_source(config_of(name, **{"dataset-path": f"{folder}/{file}"}))
    pixels = source.train.images.astype(np.float64) / 255
    np.testing.assert_allclose(pixels.mean(axis=(0, 2, 3)), KNOWN[name].mean, atol=tolerance)
    np.testing.assert_allclose(pixels.std(axis=(0, 2, 3)), KNOWN[name].std, atol=tolerance)
