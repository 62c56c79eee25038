"""The CNNs that are trained, for images of 28x28 pixels; this app does not import Tepal."""

from torch import nn


def cnn() -> nn.Module:
    """The CNN of the FedAvg paper (1,663,370 parameters), the same as Tepal's `cnn`."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def small_cnn(image_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """The CNN of Flower's PyTorch quickstart, for one channel (44,426 parameters); Tepal trains it, too."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def pfllib_cnn(image_shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """The CNN of PFLlib for such images (582,026 parameters): the FedAvg paper's without padding."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def pfl_cnn(image_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """The CNN of pfl-research's CIFAR-10 benchmark (1,626,442 parameters), without its dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


MODELS = {"cnn": cnn, "small-cnn": small_cnn, "pfl-cnn": pfl_cnn}
