"""The weights that come with Tepal: their cards, their accuracy on a sample, and damage."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tepal import models
from tepal.models import ModelError, weights
from tepal.models.blocks import find_blocks
from tepal.models.pretrained import load_pretrained
from tepal.models.weights import card, checked_file, folder_of, shipped
from tepal.training.data.normalisation import normalise
from tepal.training.data.tokens import load_tokenizer

HERE = Path(__file__).parent
LARGEST = 1_500_000  # bytes
IMAGES = [name for name in shipped() if "image-shape" in card(name)]
TEXTS = [name for name in shipped() if name not in IMAGES]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The first 500 test images of MNIST reduced to 8x8 pixels, kept as sums over 3x3 pixels, and their labels."""
    with np.load(HERE / "mnist8.npz") as file:
        return (file["sums"][:, None] / (9 * 255)).astype(np.float32), file["labels"]


def hundred_classes() -> tuple[np.ndarray, np.ndarray]:
    """A test image of each class of CIFAR-100 (Krizhevsky 2009), normalised, and their labels."""
    with np.load(HERE / "cifar100.npz") as file:
        images = file["images"].transpose(0, 3, 1, 2).astype(np.float32) / 255
        return normalise(images, "cifar-100"), file["labels"]


SAMPLES = {"mnist, reduced to 8x8 pixels": digits, "cifar-100": hundred_classes}


def loaded(name: str) -> torch.nn.Module:
    told = card(name)
    if name in TEXTS:
        return encoder(name)
    channels, height, width = map(int, told["image-shape"].split("x"))
    model = models.build(told["model"], image_shape=(channels, height, width), classes=told["classes"], seed=9)
    found = load_pretrained(model, find_blocks(model), name)
    assert not found.fresh and not found.unused
    return model.eval()


def encoder(name: str) -> torch.nn.Module:
    """The encoder with the head that predicts masked word pieces, built and loaded by transformers alone."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**json.loads((folder_of(name) / "config.json").read_text()))
    model = transformers.BertForPreTraining(config)
    del model.cls.seq_relationship
    loading = model.load_state_dict(load_file(checked_file(name)), strict=False)
    assert loading.missing_keys == ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]  # tied
    assert not loading.unexpected_keys
    return model.eval()


@pytest.mark.parametrize("name", IMAGES)
def test_weights_have_the_accuracy_of_their_card(name):
    """Within three standard deviations of the share of a sample."""
    images, labels = SAMPLES[card(name)["data"]]()
    with torch.no_grad():
        right = loaded(name)(torch.from_numpy(images)).argmax(1).numpy() == labels
    expected = card(name)["accuracy"]
    assert abs(right.mean() - expected) < 3 * math.sqrt(expected * (1 - expected) / len(labels))


@pytest.mark.parametrize("name", TEXTS)
def test_encoders_predict_masked_words_of_held_out_plays_as_their_card_says(name):
    """Within four standard deviations of the share of a sample, whose words depend on each other."""
    texts = json.loads((HERE / "plays.json").read_text())
    model, tokenizer = encoder(name), pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder_of(name))
    right = count = 0
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=128, return_tensors="pt")["input_ids"]
        places = torch.arange(4, ids.shape[1] - 1, 7)
        places = places[ids[0, places] != tokenizer.unk_token_id]
        hidden = ids.clone()
        hidden[0, places] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model.cls.predictions(model.bert(hidden).last_hidden_state)[0, places]
        right += int((logits.argmax(1) == ids[0, places]).sum())
        count += len(places)
    expected = card(name)["accuracy-of"]["shakespeare"]
    assert abs(right / count - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_classifier_starts_from_an_encoder_by_name(name):
    pytest.importorskip("transformers")
    assert models.find(name).kind == models.TEXTS
    model = models.build(name, classes=20, seed=1)
    found = load_pretrained(model, find_blocks(model), name)
    assert set(found.fresh) == {"classifier.weight", "classifier.bias"}
    stored = load_file(checked_file(name))
    assert torch.equal(model.bert.pooler.dense.weight, stored["bert.pooler.dense.weight"].float())
    rows = load_tokenizer(name).texts(["the orbit of a satellite"], 12)
    assert rows[0, 0] == 2 and model(torch.from_numpy(rows)).shape == (1, 20)


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


def test_weights_of_a_package_that_is_not_installed_are_found_on_the_path(tmp_path, monkeypatch):
    """As on a machine of a cluster, which is sent the package and has the Flower app's bundle before it."""
    sent = tmp_path / "sent" / "tepal" / "models" / "weights"
    shutil.copytree(folder_of("tiny-vit-digits"), sent / "tiny-vit-digits")
    monkeypatch.setattr(weights, "__file__", str(tmp_path / "bundle" / "models" / "weights" / "__init__.py"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "bundle"), str(tmp_path / "sent")])
    weights._folders.cache_clear()
    try:
        assert shipped() == ("tiny-vit-digits",) and sent in checked_file("tiny-vit-digits").parents
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


def test_weights_with_their_own_configuration_and_tokenizer_are_a_model_by_name(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "some-bert"
    folder.mkdir()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertConfig(vocab_size=9, architectures=["BertForMaskedLM"], **sizes).save_pretrained(folder)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nan\norbit\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "card.toml").write_text('model = "some-bert"\n')
    monkeypatch.setattr(weights, "_places", lambda: [tmp_path])
    weights._folders.cache_clear()
    try:
        assert models.find("some-bert").kind == models.TEXTS
        assert models.build("some-bert", classes=3, seed=0).bert.config.hidden_size == 8
        assert load_tokenizer("some-bert").vocabulary == 7
    finally:
        weights._folders.cache_clear()
        load_tokenizer.cache_clear()
