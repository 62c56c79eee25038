"""Images for pretraining: reduction, the loss, accuracy and the linear probe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tepal.tools.pretrain.images import Classification, Images, accuracy, linear_probe, read_images, reduce_digits
from tepal.training.data.config import DataError

CPU = torch.device("cpu")


def test_reduced_digits_are_means_of_squares_of_the_middle():
    images = np.random.default_rng(0).random((3, 1, 28, 28), np.float32)
    reduced = reduce_digits(images)
    assert reduced.shape == (3, 1, 8, 8) and reduced.dtype == np.float32
    for n in range(3):
        for y in range(8):
            for x in range(8):
                square = [images[n, 0, 2 + 3 * y + i, 2 + 3 * x + j] for i in range(3) for j in range(3)]
                assert reduced[n, 0, y, x] == pytest.approx(sum(square) / 9, abs=1e-6)


def test_without_augmentation_the_loss_is_plain_cross_entropy():
    inputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    model = nn.Linear(3, 2)
    images = Images(inputs[:, None, None, :], labels)
    flat = nn.Sequential(nn.Flatten(), model)
    found = Classification(images)(flat, np.array([4, 0]), np.random.default_rng(0))
    by_hand = -model(inputs[[4, 0]]).log_softmax(1)[[0, 1], [1, 0]].mean()
    assert found.item() == pytest.approx(by_hand.item())


class Passing(nn.Module):
    """The images' first two pixels are the features."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, images):
        return self.head(images.flatten(1)[:, :2])


def some_images(count: int, seed: int) -> Images:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    inputs = rng.normal(0, 0.1, (count, 1, 2, 2)) + (2 * labels - 1)[:, None, None, None]
    return Images(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels))


def test_a_linear_probe_separates_what_can_be_separated_and_leaves_the_model_as_it_is():
    model = Passing()
    head = model.head
    assert linear_probe(model, some_images(60, 1), some_images(40, 2)) == 1.0
    assert model.head is head


def test_accuracy_is_the_share_of_right_labels():
    model = Passing()
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
        model.head.bias.zero_()
    images = some_images(50, 3)
    assert accuracy(model, images) == 1.0
    assert accuracy(model, Images(images.inputs, 1 - images.labels)) == 0.0


def test_a_data_set_is_read_from_its_file_and_normalised(tmp_path):
    rng = np.random.default_rng(0)
    names = ("images_train", "images_test")
    arrays = {name: rng.integers(0, 256, (12, 28, 28), dtype=np.uint8) for name in names}
    labels = {name.replace("images", "labels"): np.arange(12) % 10 for name in names}
    np.savez(tmp_path / "mnist.npz", **arrays, **labels)
    train, test = read_images("mnist", tmp_path, normalised_by="0.5/0.25", reduced=True, device=CPU)
    assert train.inputs.shape == (12, 1, 8, 8) and len(test) == 12
    expected = (reduce_digits(arrays["images_test"][:, None].astype(np.float32) / 255) - 0.5) / 0.25
    assert np.allclose(test.inputs.numpy(), expected, atol=1e-6)


def test_missing_data_is_named(tmp_path):
    with pytest.raises(DataError, match=r"has neither mnist\.npz nor a folder mnist"):
        read_images("mnist", tmp_path, normalised_by="", reduced=True, device=CPU)
