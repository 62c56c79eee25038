"""The recipes of the weights that come with Tepal."""

from __future__ import annotations

from dataclasses import dataclass

from tepal.tools.pretrain.loop import Schedule


@dataclass(frozen=True)
class Recipe:
    """How an image model's weights are made.

    Args:
        model: Name of the model.
        data: Known data set on which it is trained: <data>.npz or a folder <data>.
        schedule: Epochs and learning rates.
        seed: Seed of the initial weights and of training.
        terms: Terms of the data set.
        normalised_by: `normalise` of the run config; runs that start from the weights set the same.
        reduced: Whether images of 28x28 pixels are reduced to 8x8.
        crop, flip, smoothing: See `images.Classification`.
        probe: Data set of a linear probe of the features; "" for none.
    """

    model: str
    data: str
    schedule: Schedule
    seed: int
    terms: str
    normalised_by: str = ""
    reduced: bool = False
    crop: int = 0
    flip: bool = False
    smoothing: float = 0.0
    probe: str = ""

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The data sets that it reads."""
        return (self.data, self.probe) if self.probe else (self.data,)


def _digits(seed: int) -> Recipe:
    return Recipe(
        model="tiny-vit",
        data="mnist",
        schedule=Schedule(epochs=15, learning_rate=2e-3),
        seed=seed,
        terms="MNIST: CC BY-SA 3.0, cite LeCun et al. 1998",
        reduced=True,
        crop=1,
    )


RECIPES = {
    "compact-vit-c100": Recipe(
        model="compact-vit",
        data="cifar-100",
        schedule=Schedule(epochs=24),
        seed=0,
        terms="CIFAR-100: no formal licence; cite Krizhevsky 2009",
        normalised_by="cifar-100",
        crop=4,
        flip=True,
        smoothing=0.1,
        probe="cifar-10",
    ),
    "tiny-vit-digits": _digits(0),
    "tiny-vit-digits-2": _digits(1),
    "tiny-vit-digits-3": _digits(2),
}
"""Name of the weights → how they are made."""
