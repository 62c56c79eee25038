"""Random crops and mirror images, and the batches that have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tepal.training.augmentation import Augmentation
from tepal.training.loop import Batches


def test_augmented_images_are_windows_of_the_padded_image_or_of_its_mirror_image():
    inputs = torch.arange(6 * 2 * 4 * 5.0).reshape(6, 2, 4, 5) + 1
    seen = set()
    for draw in range(20):
        changed = Augmentation(crop=1, flip=True)(inputs, np.random.default_rng(draw))
        assert changed.shape == inputs.shape
        for image, result in zip(inputs, changed, strict=True):
            padded = torch.zeros(2, 6, 7)
            padded[:, 1:5, 1:6] = image
            windows = {
                (flip, y, x): window.flip(2) if flip else window
                for y in range(3)
                for x in range(3)
                for flip in (False, True)
                for window in [padded[:, y : y + 4, x : x + 5]]
            }
            found = [key for key, window in windows.items() if torch.equal(window, result)]
            assert found
            seen.update(found)
    assert len(seen) == 18  # every window occurs


@pytest.mark.parametrize("shape", [(6, 2, 4, 5), (6, 3)])
def test_without_crop_and_flip_nothing_is_drawn(shape):
    inputs, rng = torch.randn(shape), np.random.default_rng(0)
    assert Augmentation()(inputs, rng) is inputs and rng.random() == np.random.default_rng(0).random()


def test_batches_have_the_same_order_with_and_without_augmentation_and_other_images_in_each_epoch():
    inputs, labels = torch.randn(20, 1, 6, 6), torch.arange(20)
    plain = Batches(inputs, labels, 20, seed=3)
    changed = Batches(inputs, labels, 20, seed=3, augmentation=Augmentation(crop=2, flip=True))
    seen = []
    for epoch in (0, 1, 0):
        ((_, order),) = plain.epoch(epoch)
        ((images, labels),) = changed.epoch(epoch)
        assert torch.equal(order, labels)
        seen.append(images[labels.argsort()])
    assert torch.equal(seen[0], seen[2])
    assert (seen[0] != seen[1]).flatten(1).any(dim=1).sum() > 10  # nearly all are drawn anew
    assert torch.equal(plain.inputs, inputs)
