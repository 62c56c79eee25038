"""Objects as a run config names them: what is written, read by what reads users' files."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from pyarrow.parquet import read_table
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tepal import models
from tepal.tools.api.given import data_settings, model_name, takes_seed
from tepal.training.data.inputs import InputConfig, client_inputs, held_out_inputs

IMAGES = np.random.default_rng(0).random((40, 8, 8)).astype(np.float32)
LABELS = np.arange(40) % 4


def read(settings):
    """All examples of the data that these keys name."""
    config = InputConfig.from_run_config({"model": "tiny-vit", **settings, "held-out-fraction": 0.95})
    return held_out_inputs(config)


def rows(inputs, labels):
    sums = [round(float(np.asarray(one).sum()), 4) for one in inputs]
    return sorted(zip(sums, map(int, labels), strict=True))


class Items(Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, number):
        return torch.from_numpy(IMAGES[number : number + 1]), int(LABELS[number])


@pytest.mark.parametrize(
    "data", [(IMAGES, LABELS), (torch.from_numpy(IMAGES), torch.from_numpy(LABELS)), Items()],
    ids=["arrays", "tensors", "dataset"],
)  # fmt: skip
def test_images_and_labels_are_read_as_they_were_given(data, tmp_path):
    settings, clients = data_settings(data, tmp_path)
    found = read(settings)
    assert clients is None
    assert set(rows(found.values, found.labels)) <= set(rows(IMAGES, LABELS)) and len(found) >= 36


def test_names_and_paths_stay(tmp_path):
    assert data_settings("mnist", tmp_path) == ({"dataset": "mnist"}, None)
    assert data_settings(tmp_path / "x.csv", tmp_path) == ({"dataset": str(tmp_path / "x.csv")}, None)
    assert list(tmp_path.iterdir()) == []


def test_the_same_content_is_written_once(tmp_path):
    first, second = (data_settings((IMAGES.copy(), LABELS), tmp_path)[0] for _ in range(2))
    other = data_settings((IMAGES, LABELS[::-1]), tmp_path)[0]
    assert first == second != other and len(list(tmp_path.iterdir())) == 2


def test_the_kth_client_has_the_kth_data_also_of_more_than_ten(tmp_path):
    data = [(np.full((20, 4, 4), number, np.uint8), np.arange(20) % 2) for number in range(11)]
    settings, clients = data_settings(data, tmp_path)
    config = InputConfig.from_run_config({"model": "tiny-vit", **settings, "held-out-fraction": 0.0})
    assert clients == 11
    for number in range(11):
        node = {"partition-id": number, "num-partitions": 11}
        train = client_inputs(config, node, client=str(number)).train
        assert np.unique(np.round(train.values * 255)).tolist() == [number]


def test_texts_and_their_labels(tmp_path):
    texts, labels = ["a good film", 'with "quotes"\nand lines', "ünïcode"], [1, 0, 1]
    settings, _ = data_settings((texts, labels), tmp_path)
    written = [json.loads(line) for line in Path(settings["dataset"]).read_text(encoding="utf-8").split("\n")[:-1]]
    assert [(row["text"], row["label"]) for row in written] == list(zip(texts, labels, strict=True))
    assert settings["text-column"] == "text"


def test_columns_of_pandas_and_booleans(tmp_path):
    names = np.array(["cat", "dog"], dtype=object)[LABELS % 2]
    settings, _ = data_settings((IMAGES, names), tmp_path)
    assert np.load(settings["dataset"])["y"].tolist() == names.tolist()
    settings, _ = data_settings((IMAGES, LABELS > 1), tmp_path)
    assert np.load(settings["dataset"])["y"].tolist() == (LABELS > 1).astype(int).tolist()


def test_boolean_inputs_are_zeros_and_ones(tmp_path):
    inked, odd = IMAGES - IMAGES.mean() > 0, LABELS % 2 > 0
    for data in ((inked, LABELS), TensorDataset(torch.from_numpy(inked), torch.from_numpy(odd))):
        settings, _ = data_settings(data, tmp_path)
        stored = np.load(settings["dataset"])
        assert stored["y"].dtype.kind == "i" and stored["x"].dtype == np.float32
        np.testing.assert_array_equal(stored["x"], inked.astype(float))
        assert np.unique(read(settings).values).tolist() == [0.0, 1.0]


def test_columns_of_a_dataset_of_hugging_face_are_found_by_their_usual_names(tmp_path):
    texts = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [0, 1], "idx": [0, 1]})
    settings, _ = data_settings(texts, tmp_path)
    assert {key: settings[key] for key in settings if key != "dataset"} == {
        "text-column": "sentence", "label-column": "label"
    }  # fmt: skip
    assert datasets.Dataset.from_parquet(settings["dataset"])[:] == texts[:]


def test_a_stream_of_hugging_face_is_written_once_for_the_same_content(tmp_path):
    def stream(labels):
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": labels}).to_iterable_dataset()

    first, same, other = (data_settings(stream(labels), tmp_path)[0] for labels in ([0, 1], [0, 1], [1, 0]))
    assert first == same != other and len(list(tmp_path.iterdir())) == 2
    assert read_table(other["dataset"]).to_pydict() == {"text": ["a", "b"], "label": [1, 0]}
    assert (other["text-column"], other["label-column"]) == ("text", "label")


def test_a_stream_whose_columns_are_not_known_is_refused(tmp_path):
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a", "label": 0}]))
    with pytest.raises(ValueError, match=r"columns of this IterableDataset are not known.*Dataset\.from_list"):
        data_settings(stream, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (5, TypeError, "data is int, expected a name"),
        ({"x": 1}, TypeError, "data is dict"),
        ([], ValueError, "empty list"),
        ((IMAGES, LABELS[:5]), ValueError, "40 inputs and 5 labels"),
        ((IMAGES, 5), ValueError, "40 inputs and no list of labels"),
        ([(IMAGES, LABELS), (IMAGES[:, :4], LABELS)], ValueError, "shapes (4, 8) and (8, 8)"),
        ([(IMAGES, LABELS), 3], TypeError, "data is int"),
        (nn.ModuleList([nn.Linear(1, 1)]), TypeError, "an item of ModuleList is Linear"),
    ],
    ids=str,
)
def test_what_is_no_data_is_refused(data, error, said, tmp_path):
    with pytest.raises(error) as refused:
        data_settings(data, tmp_path)
    assert said in str(refused.value) and list(tmp_path.iterdir()) == []


def test_a_module_is_built_with_its_weights_and_is_not_shared():
    module = nn.Linear(3, 2)
    name = model_name(module)
    before = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.zero_()
    first, second = (models.build(name, image_shape=(1, 8, 8), classes=2, seed=seed) for seed in (1, 2))
    assert torch.equal(first.weight, before) and torch.equal(second.weight, before)
    assert first.weight.data_ptr() != second.weight.data_ptr()
    assert not takes_seed(module)


def test_a_function_is_called_with_the_sizes_it_takes_and_a_seed():
    def net(classes):
        return nn.Linear(3, classes)

    name = model_name(net)
    one, same, other = (models.build(name, image_shape=(1, 8, 8), classes=7, seed=seed) for seed in (1, 1, 2))
    assert one.out_features == 7
    assert torch.equal(one.weight, same.weight) and not torch.equal(one.weight, other.weight)
    assert takes_seed(net)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model is int, expected a name"):
        model_name(3)
