"""The encodings of a run, and of one direction of its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tepal.exchange.encodings.codec import Codec
from tepal.exchange.encodings.dense import BFloat16, Float16, Float32, Int8
from tepal.exchange.encodings.few_bits import Int4, Sign, Ternary
from tepal.exchange.encodings.sparse import TopK

CODECS: Mapping[str, Codec] = {
    "float32": Float32(), "float16": Float16(), "bfloat16": BFloat16(), "int8": Int8(), "int4": Int4(),
    "ternary": Ternary(), "sign": Sign(),
}  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16", "int8")
"""Encodings of the model itself, which is sent down."""
UPLOADS = tuple(CODECS)
"""Encodings of differences, which are sent up."""
_LOSSY = ("int8", "int4", "ternary", "sign")  # whose error is worth keeping


@dataclass(frozen=True)
class Wire:
    """The encoding of matrices in one direction.

    Args:
        dtype: one of UPLOADS; without `differences` one of DTYPES.
        top_k: share of the values that are sent; 0: all.
        differences: send the difference of trained values from the received ones.
        feedback: add what is left out to the next upload.
        seed: of rounding at random.
    """

    dtype: str = "float32"
    top_k: float = 0.0
    differences: bool = False
    feedback: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in UPLOADS:
            raise ValueError(f"the wire dtype is {self.dtype!r}; it must be one of {', '.join(UPLOADS)}")
        if not 0 <= self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be between 0 and 1, or 0 for all values")

    @property
    def plain(self) -> bool:
        """Whether nothing is encoded."""
        return self.dtype == "float32" and not self.top_k and not self.differences

    @cached_property
    def _codec(self) -> Codec:
        return TopK(self.top_k, CODECS[self.dtype]) if self.top_k else CODECS[self.dtype]

    def codec(self, dtype: str, shape: tuple[int, ...]) -> Codec | None:
        """The codec of an entry of this dtype and shape; None if it is not encoded."""
        if self.plain or len(shape) < 2 or dtype not in ("float32", "float64"):
            return None
        return self._codec

    def decoded(self, value: np.ndarray) -> np.ndarray:
        """The value as the receiver decodes it, if it is rounded to the nearest."""
        codec = self.codec(value.dtype.name, value.shape)
        if codec is None:
            return value
        written = codec.write(np.asarray(value, np.float32), None)
        return codec.read(memoryview(written), value.shape).astype(value.dtype, copy=False)

    def to_json(self) -> dict[str, Any]:
        return {} if self == PLAIN else asdict(self)

    def random(self, *of: object) -> np.random.Generator | None:
        """A generator from the seed and `of`; None if this encoding does not round at random."""
        if self.dtype != "int8" and (self.dtype not in ("int4", "ternary") or self.feedback):
            return None
        text = repr(of).encode()
        return np.random.default_rng([self.seed, *text])


PLAIN = Wire()


def add_difference(start: np.ndarray, difference: np.ndarray) -> None:
    """difference ← start + difference: the same operation on both sides gives the same bits."""
    np.add(start, difference, out=difference)
    difference.flags.writeable = False


@dataclass(frozen=True)
class Encoding:
    """The encodings of a run.

    Args:
        down: dtype of matrices in downloads, one of DTYPES.
        up: dtype of their differences in uploads, one of UPLOADS.
        top_k: share of each matrix's differences, the largest, that are uploaded; 0: all.
        error_feedback: clients keep what `int8`, fewer bits and top k leave out, and add it to their next upload.
        seed: of rounding at random.

    Raises:
        ValueError: an option is out of range.
    """

    down: str = "float32"
    up: str = "float32"
    top_k: float = 0.0
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.down not in DTYPES:
            raise ValueError(
                f"down is {self.down!r}; it must be one of {', '.join(DTYPES)}: what is sent down is the model itself, "
                "and fewer bits are for changes"
            )
        Wire(self.up, self.top_k)  # which checks them

    @property
    def download(self) -> Wire:
        return Wire(self.down)

    @property
    def upload(self) -> Wire:
        if (self.down, self.up, self.top_k) == ("float32", "float32", 0):
            return PLAIN
        lossy = self.up in _LOSSY or self.top_k > 0
        return Wire(self.up, self.top_k, differences=True, feedback=lossy and self.error_feedback, seed=self.seed)

    def __str__(self) -> str:
        if self.upload.plain:
            return "none"
        up = self.up if not self.top_k else f"the largest {100 * self.top_k:g} % of values in {self.up}"
        return f"{self.down} down, {up} up" + ", with error feedback" * self.upload.feedback
