"""The command that makes weights: the folder it writes, its card, and what is refused before training."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from tepal.models import build
from tepal.models.blocks import find_blocks
from tepal.models.pretrained import load_pretrained
from tepal.tools.pretrain import __main__ as command
from tepal.tools.pretrain.card import write_weights
from tepal.tools.pretrain.recipes import RECIPES


def some_mnist(folder):
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 10
    images = np.zeros((80, 28, 28), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 + 2 * label : 6 + 2 * label, 4:24] = rng.integers(200, 256, (4, 20))
    np.savez(folder / "mnist.npz", images_train=images, labels_train=labels, images_test=images, labels_test=labels)


def run(*arguments):
    return CliRunner().invoke(command.app, list(map(str, arguments)))


def test_weights_are_made_by_name_and_can_be_loaded(tmp_path):
    some_mnist(tmp_path)
    done = run("tiny-vit-digits", "--data", tmp_path, "--output", tmp_path / "made", "--epochs", 3, "--device", "cpu")
    folder = tmp_path / "made" / "tiny-vit-digits"
    assert done.exit_code == 0 and done.output.splitlines()[-1] == str(folder / "card.toml")
    card = tomllib.loads((folder / "card.toml").read_text())
    content = (folder / "model.safetensors").read_bytes()
    assert card["sha256"] == hashlib.sha256(content).hexdigest() and card["bytes"] == len(content)
    assert card["epochs"] == 3 and card["examples"] == 80 and card["model"] == "tiny-vit"
    assert card["image-shape"] == "1x8x8" and card["classes"] == 10
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=7)
    assert not load_pretrained(model, find_blocks(model), str(folder)).fresh
    assert card["parameters"] == sum(each.numel() for each in model.parameters())
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_an_unknown_name_and_missing_data_are_refused(tmp_path):
    unknown = run("resnet", "--data", tmp_path, "--output", tmp_path)
    assert unknown.exit_code == 2 and "tiny-vit-digits" in unknown.output
    missing = run("tiny-vit-digits", "--data", tmp_path, "--output", tmp_path / "made")
    assert missing.exit_code == 1 and "has neither mnist.npz nor" in missing.output


def test_data_of_the_probe_is_looked_for_before_training(tmp_path, monkeypatch):
    some_mnist(tmp_path)
    monkeypatch.setattr(command, "train", lambda *_, **__: pytest.fail("trained without the data of its probe"))
    probed = replace(RECIPES["tiny-vit-digits"], probe="cifar-10")
    with pytest.raises(ValueError, match=r"neither cifar-10\.npz"):
        command.pretrain("probed", probed, tmp_path, tmp_path / "made", torch.device("cpu"))


def test_a_card_counts_shared_weights_once_and_keeps_integers(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(3)

    model = Tied()
    card = tomllib.loads(write_weights(tmp_path, model, {"seed": 3}).read_text())
    kept = load_file(tmp_path / "model.safetensors")
    assert "second.weight" not in kept and {"first.weight", "second.bias", "norm.running_mean"} <= set(kept)
    assert kept["first.weight"].dtype == torch.float16 and kept["norm.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(kept["first.weight"], model.first.weight.half())
    assert card["parameters"] == 9 + 3 + 3 + 6 and card["seed"] == 3
