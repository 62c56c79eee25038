"""The encodings of a run, and of one direction of its messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tepal.exchange.encodings.codec import Codec
from tepal.exchange.encodings.dense import BFloat16, Float16, Float32, Int8
from tepal.exchange.encodings.few_bits import Int4, Sign, Ternary
from tepal.exchange.encodings.low_rank import LowRank
from tepal.exchange.encodings.sparse import TopK
from tepal.exchange.encodings.steps import FIXED, Steps
from tepal.exchange.layout import dtype_name, is_buffer

CODECS: Mapping[str, Codec] = {
    "float32": Float32(), "float16": Float16(), "bfloat16": BFloat16(), "int8": Int8(), "int4": Int4(),
    "ternary": Ternary(), "sign": Sign(), "rank1": LowRank(1), "rank2": LowRank(2), "rank4": LowRank(4),
    "rank8": LowRank(8),
}  # fmt: skip
AUTO = "auto"
"""In place of a dtype: as many values and bits as a share of the squared norm demands that may be left out."""
DTYPES = (*CODECS, AUTO)
RANKS = tuple(name for name, codec in CODECS.items() if isinstance(codec, LowRank))
FOR_DIFFERENCES = ("int4", "ternary", "sign", *RANKS, AUTO)
"""Those of them that are for differences."""
_OF_VECTORS = (*RANKS, AUTO)  # in which vectors are encoded, too: else they would be half of what a small model sends
_OF_FEEDBACK, _MOST_LEFT_OUT = 1 / 8, 0.999  # see `Wire.averaged`
_LOSSY = ("int8", *FOR_DIFFERENCES)  # whose error is worth keeping
WHOLES = ("float32", "float16", "bfloat16", "int8", "int4")
"""Those that a part may have which is sent to a client with nothing to take a difference from."""


@dataclass(frozen=True)
class Wire:
    """The encoding of matrices in one direction.

    Args:
        dtype: one of DTYPES; those of FOR_DIFFERENCES for differences alone.
        top_k: share of all matrices' values together that are sent, the largest; 0: all.
        differences: send differences from values that the receiver has.
        feedback: clients keep what is left out, and add it to their next upload.
        seed: of rounding at random.
        left_out: of AUTO: share of the squared norm that is left out.
        bits: of AUTO: most bits for a value, in the mean over a part; 0: no limit.
        unbiased: of AUTO: what is sent is scaled up for what is left out (see `Steps`). The client adds nothing to this
            upload, and keeps nothing of it; what it keeps of earlier ones stays.
    """

    dtype: str = "float32"
    top_k: float = 0.0
    differences: bool = False
    feedback: bool = False
    seed: int = 0
    left_out: float = 0.0
    bits: float = 0.0
    unbiased: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"the wire dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not 0 <= self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be between 0 and 1, or 0 for all values")
        if self.top_k and self.dtype in (*RANKS, AUTO):
            raise ValueError(
                f"top_k is {self.top_k}; with {self.dtype} it must be 0, since {self.dtype} says how much is sent"
            )
        if not 0 <= self.left_out < 1:
            raise ValueError(f"left_out is {self.left_out}; it must be at least 0 and less than 1")
        if not self.bits >= 0:
            raise ValueError(f"bits is {self.bits}; it must be positive, or 0 for no limit")

    @property
    def plain(self) -> bool:
        """Whether nothing is encoded."""
        return self.dtype == "float32" and not self.top_k and not self.differences

    @cached_property
    def _codec(self) -> Codec:
        if self.dtype == AUTO:
            return Steps(self.left_out, self.bits, self.unbiased)
        return TopK(self.top_k, CODECS[self.dtype]) if self.top_k else CODECS[self.dtype]

    def codec_of(self, name: str, dtype: str, shape: tuple[int, ...]) -> Codec | None:
        """The codec of an entry; None if it is not encoded.

        Encoded are matrices of float32 and float64; in AUTO and RANKS also vectors of them, but not BatchNorm's
        statistics.
        """
        if self.plain or not shape or dtype not in ("float32", "float64"):
            return None
        if len(shape) < 2 and (self.dtype not in _OF_VECTORS or is_buffer(name)):
            return None
        return self._codec

    def encodes(self, name: str, value: np.ndarray) -> bool:
        """Whether the values of this entry are encoded."""
        return self.codec_of(name, dtype_name(value.dtype), value.shape) is not None

    def after(self, rounds: int) -> Wire:
        """This encoding for downloads to a client that was last sent the model so many rounds ago.

        They have the changes of all these rounds, m. AUTO leaves out 1 / √m of the share that it leaves out of one.
        """
        return self._leaving_out(self.left_out / math.sqrt(rounds)) if rounds > 1 else self

    def _leaving_out(self, share: float) -> Wire:
        return replace(self, left_out=share) if self.left_out else self

    def averaged(self, clients: float, rounds: float) -> Wire:
        """This encoding for uploads of which only the mean over so many clients is needed.

        Args:
            clients: in a round; 0: not only their mean is needed.
            rounds: from one in which a client takes part to its next, m.

        What an upload of AUTO leaves out waits m rounds for the client's next. So it leaves out ε / m, of the share ε
        of one round. If m is 2 or more, and a mean is needed, nothing waits: what is sent is scaled up instead. A
        client's error is then D / (1 − D) times its squared update, if the share D is left out, and that of the mean of
        n clients an n-th of it, as far as their errors are not alike. D is such that this is an eighth of ε / (1 − ε),
        which feedback leaves of a round's squared change if all take part.

        An upload of AUTO that is not scaled up always has feedback: without either, the share would be lost for good.
        """
        if clients and self.left_out and (rounds >= 2 or not self.feedback):
            error = clients * _OF_FEEDBACK * self.left_out / (1 - self.left_out)
            return replace(self, left_out=min(error / (1 + error), _MOST_LEFT_OUT), unbiased=True)
        fed = replace(self, feedback=True) if self.dtype == AUTO else self
        return fed._leaving_out(fed.left_out / rounds) if fed.feedback and rounds > 1 else fed

    def decoded(self, name: str, value: np.ndarray) -> np.ndarray:
        """An entry's value as the receiver decodes it, if it is rounded to the nearest."""
        codec = self.codec_of(name, dtype_name(value.dtype), value.shape)
        if codec is None:
            return value
        written = codec.write(np.asarray(value, np.float32), None)
        return codec.read(memoryview(written), value.shape).astype(value.dtype, copy=False)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from those of `PLAIN`."""
        return {name: value for name, value in vars(self).items() if name in _USUAL and value != _USUAL[name]}

    def random(self, *of: object) -> np.random.Generator | None:
        """A generator from the seed and `of`; None if this encoding does not round at random."""
        if self.dtype != "int8" and (self.dtype not in ("int4", "ternary") or self.feedback):
            return None
        text = repr(of).encode()
        return np.random.default_rng([self.seed, *text])


PLAIN = Wire()
_USUAL = asdict(PLAIN)


def bits_within(nbytes: float, matrices: int, values: int) -> float:
    """Bits for each of so many values of matrices within so many bytes; almost none if what is fixed takes more.

    Rounded down to three digits, so that messages that hardly differ are packed once.
    """
    bits = min(max(8 * (nbytes - FIXED * matrices) / max(values, 1), 1e-6), 1e3)
    unit = 10.0 ** (math.floor(math.log10(bits)) - 2)
    return math.floor(bits / unit) * unit


def add_difference(start: np.ndarray, difference: np.ndarray) -> None:
    """difference ← start + difference: the same operation on both sides gives the same bits."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused, or sent as the whole
        np.add(start, difference, out=difference)
    difference.flags.writeable = False


@dataclass(frozen=True)
class Encoding:
    """The encodings of a run.

    Args:
        down: dtype of matrices (in AUTO and RANKS, of vectors as well) in downloads, one of DTYPES. With one of
            FOR_DIFFERENCES, or with `top_k_down`, what is sent down is the difference from what the client has.
        up: dtype of matrices' differences in uploads, one of DTYPES.
        top_k: share of the matrices' differences, the largest of all, that are uploaded; 0: all.
        error_feedback: clients keep what `int8`, fewer bits and top k leave out, and add it to their next upload. With
            AUTO: off if at most half of them take part in a round and only the mean of their updates is needed; always
            on with a budget, a `left_out` of 0, or where more than the mean is needed (`Wire.averaged`).
        seed: of rounding at random.
        top_k_down: share of the matrices' differences, the largest of a block, that are sent down; 0: all.
        whole: with differences down, dtype of matrices for a client that has nothing to take a difference from, and of
            the last differences, to the run's result; one of WHOLES. "same": `down`, or int8 if that is
            one of FOR_DIFFERENCES; int4 if that is AUTO.
        reference_megabytes: limit on the server's disk for what clients have, from which differences are sent down; at
            least twice what one client is sent.
        left_out: share of the squared norm of matrices' differences that AUTO leaves out.
        budget: bytes of all clients' messages and answers of a round's training, within which AUTO leaves out more if
            it must; 0: no limit. Both directions must then be AUTO. Newcomers' first messages, the run's result, and
            what is sent again are not counted.
        start: "sent": the initial values are sent to every client. "made": clients that can make them do so, and are
            sent changes only (see `tepal.exchange.initial`).

    Raises:
        ValueError: an option is out of range.
    """

    down: str = "float32"
    up: str = "float32"
    top_k: float = 0.0
    error_feedback: bool = True
    seed: int = 0
    top_k_down: float = 0.0
    whole: str = "same"
    reference_megabytes: float = 8000.0
    left_out: float = 0.6
    budget: int = 0
    start: str = "sent"

    def __post_init__(self) -> None:
        Wire(self.up, self.top_k, left_out=self.left_out)  # which checks them
        Wire(self.down, self.top_k_down)
        if self.whole not in (*WHOLES, "same"):
            raise ValueError(f"whole is {self.whole!r}; it must be same, or one of {', '.join(WHOLES)}")
        if type(self.budget) is not int or self.budget < 0:
            raise ValueError(f"budget is {self.budget!r}; it must be 0, or a number of bytes")
        if self.budget and (self.down, self.up) != (AUTO, AUTO):
            raise ValueError(
                f"budget is {self.budget} with down={self.down!r} and up={self.up!r}; it applies to both directions, "
                f"and both must be {AUTO!r}"
            )
        if self.start not in ("sent", "made"):
            raise ValueError(f"start is {self.start!r}; it must be sent or made")
        if not self.reference_megabytes > 0:
            raise ValueError(f"reference_megabytes is {self.reference_megabytes}; it must be positive")

    @property
    def differences_down(self) -> bool:
        """Whether clients are sent differences from what they have."""
        return self.down in FOR_DIFFERENCES or self.top_k_down > 0

    @property
    def download(self) -> Wire:
        """Of differences, if the downloads are such."""
        left_out = self.left_out if self.down == AUTO else 0.0
        return Wire(self.down, self.top_k_down, differences=self.differences_down, left_out=left_out)

    @property
    def download_whole(self) -> Wire:
        """Of what is sent down to a client that has nothing to take a difference from."""
        if not self.differences_down:
            return self.download
        same = "int4" if self.down == AUTO else "int8" if self.down in FOR_DIFFERENCES else self.down
        return Wire(self.whole if self.whole != "same" else same)

    @property
    def upload(self) -> Wire:
        if self.download.plain and (self.up, self.top_k) == ("float32", 0):
            return PLAIN
        lossy = self.up in _LOSSY or self.top_k > 0
        feedback = lossy and self.error_feedback
        left_out = self.left_out if self.up == AUTO else 0.0
        return Wire(self.up, self.top_k, differences=True, feedback=feedback, seed=self.seed, left_out=left_out)

    def __str__(self) -> str:
        made = ", the initial values made by the clients" * (self.start == "made")
        if self.upload.plain:
            return "none" + made
        down = _sent("changes", self.down, self.top_k_down) if self.differences_down else self.down
        up = _sent("values", self.up, self.top_k) if self.top_k else self.up
        fed = ", with error feedback" * (self.upload.feedback or bool(self.budget))
        if self.up == AUTO and not self.budget:
            fed = f", with error feedback {'if most clients take part' if self.error_feedback else 'where it must be'}"
        return f"{down} down, {up} up{fed}{made}"


def _sent(what: str, dtype: str, top_k: float) -> str:
    return f"the largest {100 * top_k:g} % of {what} in {dtype}" if top_k else f"{what} in {dtype}"
