"""Encodings of values in messages, unchanged or in fewer bytes.

Matrices (floating-point entries with two axes or more) may be encoded, in `auto` and ranks vectors as well. Counters
and all others are never encoded, nor BatchNorm's statistics: a variance must not become negative.

    float32     unchanged
    float16     half the bytes; values beyond 65504 are refused
    bfloat16    half the bytes: the range of float32, 8 significant bits; values that it rounds to infinity are refused
    int8        a quarter: each row (first axis) has a float32 scale, max|row| / 127, and integers from -127 to 127
    int4        an eighth: the same with max|row| / 7 and integers from -7 to 7
    ternary     a twentieth: -1, 0 or 1 in units of the row's scale
    sign        a thirty-second: the sign of each value, in units of the row's mean magnitude
    rank1 …     the product of two thin matrices of this rank (1, 2, 4 or 8), which are in int4
    auto        whole steps: values become 0 that hold a share of the squared norm; how many others there are, and in
                how many bits, follows from it
    top k       the share k of all matrices' values together that are largest in magnitude, in one of the dtypes above,
                and their positions: the gaps between them, in Huffman's code

Uploads are **differences** from the values that the client received, so that errors are relative to the update and not
to the weights. The server adds them to its own exact values. Rounding of downloads therefore never enters the model: an
update that is smaller than a step of the encoding is not lost. Uploads in `int8` are rounded at random (unbiased). A
client adds what `int8`, `int4`, `ternary`, `sign`, ranks, `auto` and top k leave out to its next upload of the same
entries: **error feedback** (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847, algorithm 1). Without it
`int4` and `ternary` are rounded at random, too, and `auto` is scaled up for what it leaves out (see `Wire.averaged`).

Downloads are the values themselves, rounded to the nearest; with `int4`, `ternary`, `sign`, ranks, `auto` or top k they
are differences from what the client has (see `tepal.exchange.packer`). Nothing in them depends on chance, so all
clients with the same values receive the same bytes, and digests are those of the decoded values.
"""

from tepal.exchange.encodings.codec import Codec, EncodingError
from tepal.exchange.encodings.left_out import LeftOut, share_left_out
from tepal.exchange.encodings.mixed import Mixed
from tepal.exchange.encodings.sparse import TopK
from tepal.exchange.encodings.steps import FIXED, Steps
from tepal.exchange.encodings.wire import (
    AUTO,
    CODECS,
    DTYPES,
    FOR_DIFFERENCES,
    PLAIN,
    RANKS,
    WHOLES,
    Encoding,
    Wire,
    add_difference,
    bits_within,
)

__all__ = [
    "AUTO",
    "CODECS",
    "DTYPES",
    "FIXED",
    "FOR_DIFFERENCES",
    "PLAIN",
    "RANKS",
    "WHOLES",
    "Codec",
    "Encoding",
    "EncodingError",
    "LeftOut",
    "Mixed",
    "Steps",
    "TopK",
    "Wire",
    "add_difference",
    "bits_within",
    "share_left_out",
]
