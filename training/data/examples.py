"""Examples: what callers get, and how they are kept in memory before that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import Shape

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Examples:
    """Images (n, C, H, W), float32 in 0..1, and their labels (n,), int64. Arrays are the caller's own to change."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts (n), and what belongs to each: as they are kept in memory, and as callers get them.

    `labels` are class numbers (n,), int64; None for running text, whose next characters are what is learned.
    `seconds` are second texts (n), where examples are pairs; `choices` those of questions, and labels their right ones.
    """

    texts: tuple[str, ...]
    labels: NDArray[np.int64] | None
    groups: NDArray[np.str_] | None = None
    seconds: tuple[str, ...] | None = None
    choices: tuple[tuple[str, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Indices) -> Texts:
        return Texts(
            tuple(self.texts[index] for index in indices),
            None if self.labels is None else self.labels[indices],
            None if self.groups is None else self.groups[indices],
            None if self.seconds is None else tuple(self.seconds[index] for index in indices),
            None if self.choices is None else tuple(self.choices[index] for index in indices),
        )

    def encoded(self, encoder: Encoder) -> NDArray[np.int64]:
        """What a model takes for these texts (and second texts), (n, length)."""
        return encoder.encode(self.texts, self.seconds)


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers, float32, as they are kept in memory, and as callers get them: what a regression learns from.

    `inputs` are (n, features) or (n, length, features), `targets` (n, outputs).
    """

    inputs: NDArray[np.float32]
    targets: NDArray[np.float32]
    groups: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Indices) -> Numbers:
        return Numbers(
            self.inputs[indices], self.targets[indices], None if self.groups is None else self.groups[indices]
        )

    @property
    def info(self) -> NumberInfo:
        return NumberInfo(self.inputs.shape[-1], self.targets.shape[1])


class Encoder(Protocol):
    """Makes numbers of texts: a tokenizer, or a vocabulary of characters."""

    def encode(self, texts: Sequence[str], seconds: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Numbers (n, length) of n texts, or of n pairs of texts; all rows have one length."""
        ...


@dataclass(frozen=True)
class TextInfo:
    """What a model must know about texts: the number of classes, and their names where they have names.

    0 classes: running text, whose next characters are what is learned.
    """

    classes: int
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class NumberInfo:
    """What a model must know about numbers: of an input (of one place in a sequence), and of a target."""

    features: int
    outputs: int


@dataclass(frozen=True)
class DatasetInfo:
    """What a model must know about the data: an image's shape (channels, height, width) and the number of classes."""

    shape: Shape
    classes: int


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's examples. `name` is the client's, `origin` says in words where its examples come from."""

    train: Examples
    test: Examples
    shape: Shape
    classes: int
    name: str
    origin: str


@dataclass(frozen=True, eq=False)
class ClientTexts:
    """One client's texts; the rest as in `ClientData`."""

    train: Texts
    test: Texts
    classes: int
    class_names: tuple[str, ...]
    name: str
    origin: str


@dataclass(frozen=True, eq=False)
class ClientNumbers:
    """One client's numbers; the rest as in `ClientData`."""

    train: Numbers
    test: Numbers
    info: NumberInfo
    name: str
    origin: str


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Examples as they are kept in memory: images (n, C, H, W), uint8 (a quarter of the size) or float32 in 0..1."""

    images: NDArray[Any]
    labels: NDArray[np.int64]
    groups: NDArray[np.str_] | None = None
    """To whom or what each example belongs (writer, site, domain), where the data says so."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices) -> Examples:
        images = self.images[indices].astype(np.float32, order="C", copy=False)
        if self.images.dtype == np.uint8:
            images /= 255
        return Examples(images, self.labels[indices])


Kind = TypeVar("Kind", ImageArrays, Texts, Numbers)


@dataclass(frozen=True, eq=False)
class Source(Generic[Kind]):
    """A dataset that was read and checked. Hashed by identity, so that partitions can be cached by it."""

    train: Kind
    test: Kind | None
    classes: int
    origin: str
    class_names: tuple[str, ...] = ()

    @property
    def shape(self: Source[ImageArrays]) -> Shape:
        _, channels, height, width = self.train.images.shape
        return channels, height, width


AnySource = Source[ImageArrays] | Source[Texts] | Source[Numbers]
