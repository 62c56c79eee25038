"""Images for pretraining: reading, reduction to 8x8 pixels, the loss, accuracy, and a linear probe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tepal.tools.pretrain.probe import probe
from tepal.training.augmentation import NONE, Augmentation
from tepal.training.data.config import DataConfig, DataError
from tepal.training.data.examples import ImageArrays
from tepal.training.data.normalisation import normalise
from tepal.training.data.sources import named_source

_AT_ONCE = 500  # images of a pass without gradients


@dataclass(frozen=True, eq=False)
class Images:
    """n normalised images (n, C, H, W) in float32 and their labels (n,), on one device."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def read_images(
    name: str, folder: Path, *, normalised_by: str, reduced: bool, device: torch.device
) -> tuple[Images, Images]:
    """Read the training and the test images of a known data set.

    Args:
        name: Name of the data set, such as "cifar-100".
        folder: Where <name>.npz or a folder <name> with the files as published is.
        normalised_by: As `normalise` of the run config.
        reduced: Whether images of 28x28 pixels are reduced to 8x8, see `reduce_digits`.
        device: Where the images are put.

    Raises:
        DataError: The data set is not there, cannot be read, or has no test set.
    """
    place = next((path for path in (folder / f"{name}.npz", folder / name) if path.exists()), None)
    if place is None:
        raise DataError(f"{folder}: has neither {name}.npz nor a folder {name} with the data set's files: add one")
    source = named_source(DataConfig.from_run_config({"dataset": name, "dataset-path": str(place)}))
    if source.test is None or not isinstance(source.train, ImageArrays):
        raise DataError(f"{place}: has no images with a test set: give the data set as it is published")
    return tuple(_prepared(each, normalised_by, reduced, device) for each in (source.train, source.test))  # type: ignore[return-value, arg-type]


def _prepared(arrays: ImageArrays, normalised_by: str, reduced: bool, device: torch.device) -> Images:
    images = arrays.take(np.arange(len(arrays))).images
    images = normalise(reduce_digits(images) if reduced else images, normalised_by)
    return Images(torch.from_numpy(images).to(device), torch.from_numpy(arrays.labels).to(device))


def reduce_digits(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reduce images (n, 1, 28, 28) to 8x8 pixels: means over 3x3 pixels of the middle 24x24.

    scikit-learn's digits were made alike, from 32x32 pixels by counts in squares of 4x4 (Alpaydin and Kaynak 1998).
    """
    middle = images[:, :, 2:26, 2:26]
    return np.ascontiguousarray(middle.reshape(len(images), 1, 8, 3, 8, 3).mean(axis=(3, 5), dtype=np.float32))


@dataclass(frozen=True)
class Classification:
    """Cross-entropy on batches of images.

    Args:
        images: The training images.
        augmentation: How they are changed.
        smoothing: Label smoothing (Szegedy et al. 2016).
    """

    images: Images
    augmentation: Augmentation = NONE
    smoothing: float = 0.0

    def __call__(self, model: nn.Module, indices: NDArray[np.int64], rng: np.random.Generator) -> Tensor:
        chosen = torch.from_numpy(indices).to(self.images.labels.device)
        inputs = self.augmentation(self.images.inputs[chosen], rng)
        return F.cross_entropy(model(inputs), self.images.labels[chosen], label_smoothing=self.smoothing)


def accuracy(model: nn.Module, images: Images) -> float:
    """The share of images whose label the model predicts."""
    right = outputs(model, images.inputs).argmax(dim=1) == images.labels
    return int(right.sum()) / len(images)


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs, in evaluation mode."""
    model.eval()
    return torch.cat([model(part) for part in inputs.split(_AT_ONCE)])


def linear_probe(model: nn.Module, train: Images, test: Images) -> float:
    """The accuracy on `test` of a logistic regression that is fitted to the frozen model's features of `train`.

    Features are what the model's head gets.
    """
    head, model.head = model.head, nn.Identity()
    try:
        features, tested = (outputs(model, each.inputs).cpu().numpy() for each in (train, test))
    finally:
        model.head = head
    return probe((features, train.labels.cpu().numpy()), (tested, test.labels.cpu().numpy()))
