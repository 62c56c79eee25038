"""Containers of examples: in memory, and as callers receive them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import Shape

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """n images with labels, in memory and as callers receive them.

    images: (n, C, H, W), uint8 (a quarter of the memory) or float32 in 0..1. Large ones of a file may be a
        `StoredArray`, of which `take` reads what it returns.
    labels: class numbers (n,), int64.
    groups: group of each example (writer, site, domain); None if the data has none.
    """

    images: NDArray[Any]
    labels: NDArray[np.int64]
    groups: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> Shape:
        _, channels, height, width = self.images.shape
        return channels, height, width

    def take(self, indices: Indices) -> ImageArrays:
        """Return some of the examples, with images in float32. The caller may change the arrays."""
        images = self.images[indices].astype(np.float32, order="C", copy=False)
        if self.images.dtype == np.uint8:
            images /= 255
        return ImageArrays(images, self.labels[indices], _taken(self.groups, indices))


@dataclass(frozen=True, eq=False)
class Texts:
    """n texts, in memory and as callers receive them.

    labels: class numbers (n,), int64, or positions of the right choices; None for running text, whose next characters
        are the targets.
    groups: one group for each text.
    seconds: second texts of pairs.
    choices: choices of questions.
    """

    texts: tuple[str, ...]
    labels: NDArray[np.int64] | None
    groups: NDArray[np.str_] | None = None
    seconds: tuple[str, ...] | None = None
    choices: tuple[tuple[str, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Indices) -> Texts:
        return Texts(*(_taken(values, indices) for values in vars(self).values()))

    def encoded(self, encoder: Encoder) -> NDArray[np.int64]:
        """Return the model's inputs for these texts (and second texts), (n, length)."""
        return encoder.encode(self.texts, self.seconds)


@dataclass(frozen=True, eq=False)
class Numbers:
    """Examples of a regression, float32: inputs (n, features) or (n, length, features), targets (n, outputs)."""

    inputs: NDArray[np.float32]
    targets: NDArray[np.float32]
    groups: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Indices) -> Numbers:
        return Numbers(*(_taken(values, indices) for values in vars(self).values()))

    @property
    def info(self) -> NumberInfo:
        return NumberInfo(self.inputs.shape[-1], self.targets.shape[1])


@dataclass(frozen=True, eq=False)
class LabelledNumbers:
    """Numbers of classes, such as the rows of a table: inputs (n, features), float32, and class numbers (n,), int64."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    groups: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def features(self) -> int:
        """Numbers in an input."""
        return self.inputs.shape[1]

    def take(self, indices: Indices) -> LabelledNumbers:
        return LabelledNumbers(*(_taken(values, indices) for values in vars(self).values()))


class Encoder(Protocol):
    """Converts texts to ids: a tokenizer, or a vocabulary of characters."""

    def encode(self, texts: Sequence[str], seconds: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Return ids (n, length) of n texts, or of n pairs of texts."""
        ...


@dataclass(frozen=True)
class TextInfo:
    """Sizes of a model for texts: the number of classes (0: running text), and their names if they have names."""

    classes: int
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class NumberInfo:
    """Sizes of a regression model: features of an input (or of one position of a sequence), outputs of a target."""

    features: int
    outputs: int


@dataclass(frozen=True)
class TableInfo:
    """Sizes of a model that classifies numbers: features of an input, and the number of classes."""

    features: int
    classes: int


@dataclass(frozen=True)
class DatasetInfo:
    """Sizes of an image model: an image's shape (channels, height, width) and the number of classes."""

    shape: Shape
    classes: int


def _taken(values: Any, indices: Indices) -> Any:
    """Return some of the values of an array or a tuple; None for None."""
    if values is None or isinstance(values, np.ndarray):
        return None if values is None else values[indices]
    return tuple(values[index] for index in indices)


Kind = TypeVar("Kind", ImageArrays, Texts, Numbers, LabelledNumbers)


@dataclass(frozen=True, eq=False)
class ClientData(Generic[Kind]):
    """One client's examples. `name` is the client's; `origin` and `next_characters` are as of `Source`."""

    train: Kind
    test: Kind
    classes: int
    class_names: tuple[str, ...]
    name: str
    origin: str
    next_characters: bool = False


@dataclass(frozen=True, eq=False)
class Source(Generic[Kind]):
    """A dataset after reading and checks. It is hashed by identity, so that partitions can be cached by it.

    classes: number of classes; 0 for running text and numbers.
    origin: description of the source, for messages.
    columns: names of the columns of numbers; empty for arrays, images and texts.
    next_characters: whether labels of texts may be the characters that follow.
    """

    train: Kind
    test: Kind | None
    classes: int
    origin: str
    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    next_characters: bool = False


AnySource = Source[ImageArrays] | Source[Texts] | Source[Numbers] | Source[LabelledNumbers]
