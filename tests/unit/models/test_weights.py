"""The weights that come with Tepal: their cards, their accuracy on a sample, and damage."""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tepal import models
from tepal.models import ModelError, weights
from tepal.models.blocks import find_blocks
from tepal.models.pretrained import load_pretrained
from tepal.models.weights import card, checked_file, folder_of, shipped

SAMPLE = Path(__file__).parent / "mnist8.npz"
LARGEST = 1_500_000  # bytes


def sample() -> tuple[np.ndarray, np.ndarray]:
    """The first 500 test images of MNIST reduced to 8x8 pixels, kept as sums over 3x3 pixels, and their labels."""
    with np.load(SAMPLE) as file:
        return (file["sums"][:, None] / (9 * 255)).astype(np.float32), file["labels"]


def loaded(name: str) -> torch.nn.Module:
    told = card(name)
    channels, height, width = map(int, told["image-shape"].split("x"))
    model = models.build(told["model"], image_shape=(channels, height, width), classes=told["classes"], seed=9)
    found = load_pretrained(model, find_blocks(model), name)
    assert not found.fresh and not found.unused
    return model.eval()


@pytest.mark.parametrize("name", shipped())
def test_weights_have_the_accuracy_of_their_card(name):
    """Within three standard deviations of the share of a sample."""
    images, labels = sample()
    with torch.no_grad():
        right = loaded(name)(torch.from_numpy(images)).argmax(1).numpy() == labels
    expected = card(name)["accuracy"]
    assert abs(right.mean() - expected) < 3 * math.sqrt(expected * (1 - expected) / len(labels))


@pytest.mark.parametrize("name", shipped())
def test_cards_say_what_the_files_are(name):
    told, file = card(name), folder_of(name) / weights.WEIGHTS
    content = file.read_bytes()
    assert told["sha256"] == hashlib.sha256(content).hexdigest() and told["bytes"] == len(content) <= LARGEST
    assert told["parameters"] == sum(each.numel() for each in loaded(name).parameters())
    needed = {"data", "epochs", "seed", "seconds", "accuracy", "terms", "trained-on", "date"}
    assert needed <= told.keys()
    assert checked_file(name) == file


def test_there_are_weights_for_digits_of_three_seeds():
    names = [name for name in shipped() if name.startswith("tiny-vit-digits")]
    assert len(names) == 3 and len({card(name)["seed"] for name in names}) == 3


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A folder with a copy of one of the weights, in place of the package's."""
    shutil.copytree(folder_of("tiny-vit-digits"), tmp_path / "tiny-vit-digits")
    monkeypatch.setattr(weights, "_places", lambda: [tmp_path])
    weights._folders.cache_clear()
    yield tmp_path / "tiny-vit-digits"
    weights._folders.cache_clear()


def test_damaged_weights_are_refused(copied):
    file = copied / weights.WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    model = models.build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match="is damaged; install Tepal again"):
        load_pretrained(model, find_blocks(model), "tiny-vit-digits")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_missing_weights_are_refused(copied):
    (copied / weights.WEIGHTS).unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        checked_file("tiny-vit-digits")


def test_weights_of_the_installed_package_are_found_from_a_bundle_without_them(tmp_path, monkeypatch):
    """As from the Flower app's bundle, which has the module and no weights beside it."""
    monkeypatch.setattr(weights, "__file__", str(tmp_path / "models" / "weights" / "__init__.py"))
    weights._folders.cache_clear()
    try:
        found = weights.folder_of("tiny-vit-digits")
        assert found is not None and tmp_path not in found.parents
    finally:
        weights._folders.cache_clear()


def test_a_file_in_the_users_folder_comes_before_the_weights_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = models.build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=9)
    torch.save(model.state_dict(), tmp_path / "own.pt")
    (tmp_path / "tiny-vit-digits").mkdir()
    shutil.move(tmp_path / "own.pt", tmp_path / "tiny-vit-digits" / "pytorch_model.bin")
    assert load_pretrained(model, find_blocks(model), "tiny-vit-digits").file.name == "pytorch_model.bin"


def test_an_unknown_name_is_told_what_comes_with_tepal():
    model = models.build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=9)
    with pytest.raises(ModelError, match="did you mean 'tiny-vit-digits'"):
        load_pretrained(model, find_blocks(model), "tiny-vit-digit")
    with pytest.raises(ModelError, match=r"tiny-vit-digits, .*which come with Tepal"):
        load_pretrained(model, find_blocks(model), "nothing/alike")
