"""Characters as numbers: LEAF's 80 characters of Shakespeare, windows of 80 of them, and the character that follows.

Caldas et al., LEAF: A Benchmark for Federated Settings (arXiv:1812.01097).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

SHAKESPEARE = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"


@dataclass(frozen=True)
class CharVocabulary:
    """A character's number is its position in `characters`; one that is not there counts as a space.

    `length` is how many characters a model sees at once. Where fewer come before, spaces stand for the others.
    """

    characters: str = SHAKESPEARE
    length: int = 80

    def __len__(self) -> int:
        return len(self.characters)

    def numbers(self, text: str) -> NDArray[np.int64]:
        """The characters of a text as numbers, (characters,)."""
        space = self.characters.index(" ")
        places = {character: place for place, character in enumerate(self.characters)}
        return np.array([places.get(character, space) for character in text], dtype=np.int64)

    def encode(self, texts: Sequence[str], seconds: Sequence[str] | None = None) -> NDArray[np.int64]:
        """The last `length` characters of each text, (n, length); of a pair, those of both together."""
        whole = texts if seconds is None else [text + second for text, second in zip(texts, seconds, strict=True)]
        last = "".join(text[-self.length :].rjust(self.length) for text in whole)
        return self.numbers(last).reshape(len(texts), self.length)

    def windows(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each character of the texts but the first of each: the `length` before it in its text, and itself.

        Returns (n, length) and (n,).
        """
        before, after = [np.empty((0, self.length), np.int64)], [np.empty(0, np.int64)]
        for text in texts:
            padded = self.numbers(" " * (self.length - 1) + text)
            if len(text) > 1:
                before.append(sliding_window_view(padded[:-1], self.length))
                after.append(padded[self.length :])
        return np.concatenate(before), np.concatenate(after)
