"""Character ids: LEAF's 80 characters of Shakespeare, windows of 80 characters, and the next character.

Caldas et al., LEAF: A Benchmark for Federated Settings (arXiv:1812.01097).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

SHAKESPEARE = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"


@dataclass(frozen=True)
class CharVocabulary:
    """A character's id is its position in `characters`; unknown characters count as spaces.

    `length` is the number of characters in a model's input; shorter contexts are padded with spaces on the left.
    """

    characters: str = SHAKESPEARE
    length: int = 80

    def __len__(self) -> int:
        return len(self.characters)

    def numbers(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text's characters, (characters,)."""
        space = self.characters.index(" ")
        places = {character: place for place, character in enumerate(self.characters)}
        return np.array([places.get(character, space) for character in text], dtype=np.int64)

    def encode(self, texts: Sequence[str], seconds: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Return the ids of each text's last `length` characters, (n, length); pairs are concatenated."""
        whole = texts if seconds is None else [text + second for text, second in zip(texts, seconds, strict=True)]
        last = "".join(text[-self.length :].rjust(self.length) for text in whole)
        return self.numbers(last).reshape(len(texts), self.length)

    def windows(
        self, texts: Sequence[str], dtype: type[np.integer[Any]] = np.int64
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return contexts (n, length) and next characters (n,), for every character after the first of each text.

        Contexts take `length` times the memory of a text: with fewer than 257 characters np.uint8 is enough for them.
        """
        before, after = [np.empty((0, self.length), dtype)], [np.empty(0, np.int64)]
        for text in texts:
            padded = self.numbers(" " * (self.length - 1) + text)
            if len(text) > 1:
                before.append(sliding_window_view(padded[:-1].astype(dtype), self.length))
                after.append(padded[self.length :])
        return np.concatenate(before), np.concatenate(after)
