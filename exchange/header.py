"""The header, with which a client describes its answer. See `manifest.py` for what it has in common with a manifest."""

from __future__ import annotations

import hashlib
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any

from blake3 import blake3
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from pydantic import FailFast, Field, StrictBool, StrictInt, TypeAdapter, ValidationError

from tepal.exchange.bounds import HEADER_BYTES, HEADER_BYTES_PER_ENTRY, MOST_KEYS, MOST_METRICS
from tepal.exchange.layout import Names
from tepal.exchange.manifest import PARTS, PROTOCOL, PROTOCOL_KEY, ProtocolError, json_of, plain_items
from tepal.exchange.parts import DIGEST_BYTES
from tepal.exchange.plan import INTRODUCE
from tepal.exchange.secret import LENGTH as SECRET
from tepal.exchange.texts import compressed, to_text
from tepal.exchange.threads import in_threads

_KNOWN = "_tepal_digests"
_PIECE = 1 << 22  # bytes of a packed part that are hashed at a time

_Texts = Annotated[Names, FailFast()]
_Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a client reports in its answer, in addition to arrays and metrics."""

    experiment: str
    client: str
    round: StrictInt
    action: str
    answers: str
    """Id of the exchange, from the manifest as it arrived."""
    holds: _Texts = ()
    """Ids of the parts in the client's cache."""
    carries: str = ""
    """Of the packed parts: see `listed`."""
    missing: Mapping[str, _Texts] = field(default_factory=dict)
    """Part id → entries that were neither sent nor cached: the server sends them in the same round."""
    refused: str = ""
    """Why the client has no result; "" if it has one."""
    notes: _Texts = ()
    """Problems that did not prevent a result, for the server's log."""
    layout: StrictBool = False
    """Whether the client has stored the layout of the message."""
    left_out: _Share | None = None
    """The share of the squared norm that the packed parts leave out in `auto`; None if they are encoded otherwise."""
    metrics: _Texts = ()
    """Names of the MetricRecords that the checksum covers. A mod before the exchange's may add others."""
    checksum: str = ""
    """See `checksum_of`."""
    secret: Annotated[str, Field(max_length=SECRET)] = field(default="", repr=False)
    """Of an introduction: see `tepal.exchange.secret`. It is not sent if it is empty, and not in the checksum, because
    servers of an earlier version do not know it."""

    def with_checksum(self, content: Mapping[str, Any]) -> Header:
        """This header with the checksum of an answer's content."""
        return replace(self, checksum=self.checksum_of(content))

    def unchecked(self) -> Header:
        """This header of a message that stays on this machine: with random digits, as many as a checksum has."""
        return replace(self, checksum=os.urandom(DIGEST_BYTES).hex())

    def checksum_of(self, content: Mapping[str, Any]) -> str:
        """Digest of an answer: of this header without its checksum, the metrics that it names, and the packed parts."""
        known = hashlib.sha256(to_text(_without_secret(vars(self)) | {"checksum": ""}))
        for name in self.metrics:
            record = content.get(name)
            known.update(repr(plain_items(record) if isinstance(record, MetricRecord) else None).encode())
        parts = content.get(PARTS)
        if isinstance(parts, ArrayRecord):
            for name, array in parts.items():
                known.update(repr((name, array.dtype, array.shape, array.stype, len(array.data))).encode())
                known.update(_digests(array))
        return known.hexdigest()[: 2 * DIGEST_BYTES]

    def to_record(self) -> ConfigRecord:
        text = to_text(vars(self) if self.secret else _without_secret(vars(self)))
        return ConfigRecord({"header": compressed(text, words=self.action != INTRODUCE), PROTOCOL_KEY: PROTOCOL})

    @classmethod
    def from_content(cls, content: Mapping[str, Any], entries: int = 10_000) -> Header:
        """Read the header of an answer. Raises ProtocolError: nothing that a client sends is trusted.

        `entries`: number of entries of the model, from which the longest header that is read follows.
        """
        data = json_of(content, "header", HEADER_BYTES + HEADER_BYTES_PER_ENTRY * entries)
        if absent := [of.name for of in fields(cls) if of.name not in data and of.name != "secret"]:
            raise ProtocolError(f"its header cannot be read (it has no {absent[0]!r})")
        missing = data["missing"]
        if isinstance(missing, dict) and len(missing) > MOST_KEYS:  # pydantic would make an error for each wrong value
            raise ProtocolError(
                f"its header cannot be read ('missing' has {len(missing)} keys; at most {MOST_KEYS} are allowed)"
            )
        try:
            header = _headers().validate_python(data)
        except ValidationError as error:
            raise ProtocolError(f"its header cannot be read ({_first(error)})") from None
        # The checksum reads the record of each name.
        if (count := len(header.metrics)) > MOST_METRICS:
            raise ProtocolError(f"its header names {count} records of metrics; at most {MOST_METRICS} are allowed")
        if len(set(header.metrics)) < count:
            raise ProtocolError("its header names a record of metrics twice")
        return header


def _without_secret(header: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in header.items() if name != "secret"}


@cache
def _headers() -> TypeAdapter[Header]:
    """Reads headers. It is made on demand, because only the server reads them."""
    return TypeAdapter(Header)


def _first(error: ValidationError) -> str:
    """The first of the errors in words; many are only counted, because a list of them would take much memory."""
    if error.error_count() > 100:
        return f"{error.error_count()} of its values have the wrong type"
    first = error.errors(include_url=False)[0]
    return f"{reprlib.repr('.'.join(map(str, first['loc'])))} is {reprlib.repr(first['input'])}: {first['msg']}"


def _digests(array: Array) -> bytes:
    """The BLAKE3 digests of the pieces of a packed part, joined; kept with the Array, which may be checked again."""
    data, known = array.data, array.__dict__.get(_KNOWN)
    if known is None or known[0] is not data:
        pieces = [memoryview(data)[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        digests = in_threads(lambda piece: blake3(piece).digest(), pieces, len(data))
        known = array.__dict__[_KNOWN] = data, b"".join(digests)
    return known[1]
