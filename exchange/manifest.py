"""The manifest: what a message is about, beside the arrays that travel with it; and the header of its answer.

Both are one compressed JSON value in a Flower `ConfigRecord` of the message. They are small (about 30 bytes for an
entry), so they carry everything that is needed to complete and to strip an app's raw `state_dict`: no state must be
shared between server and client but the values themselves.

An **exchange** is one message and its answer. Its id is the digest of the manifest and the app's settings, which no two
messages share. It goes down with the message, so that a client detects damage, and comes back with the answer, which
was then made from this very message and from none of another round or attempt. The answer carries a **checksum** of its
content. Both only detect damage: TLS and the nodes' keys authenticate.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

from tepal.exchange.encodings import PLAIN, Wire
from tepal.exchange.layout import Layout, Names
from tepal.exchange.parts import DIGEST_BYTES, Part, Shaped
from tepal.exchange.plan import Plan, Tree
from tepal.exchange.threads import in_threads

RECORD = "tepal"
"""Name of the ConfigRecord that carries manifest or header."""
PARTS = "tepal.parts"
"""Name of the ArrayRecord that carries the packed parts."""

_ID = "id"

_LIMIT = 64_000_000  # bytes of decompressed JSON
_KNOWN = "_tepal_digests"
_PIECE = 1 << 22  # bytes of a packed part that are hashed at a time: a step of a checksum
_HEADER, _HEADER_PER_ENTRY = 1_000_000, 1000  # of a header: a client must not be able to fill the server's memory


class ProtocolError(ValueError):
    """A manifest or header that cannot be read, or that contradicts itself."""


def _to_text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _to_bytes(value: Any) -> bytes:
    return zlib.compress(_to_text(value))


def _from_record(content: Mapping[str, Any], key: str, limit: int = _LIMIT) -> dict[str, Any]:
    try:
        record = content[RECORD]
        inflate = zlib.decompressobj()
        text = inflate.decompress(record[key], limit)
        if inflate.unconsumed_tail:
            raise ValueError(f"more than {limit} bytes")
        value = json.loads(text)
        if not isinstance(value, dict):
            raise TypeError("not an object")
        return value
    except (KeyError, TypeError, ValueError, zlib.error, RecursionError) as error:
        raise ProtocolError(f"its {key} cannot be read ({error})") from error


def _digests(array: Array) -> bytes:
    """SHA-256 of each piece of a packed part, one after the other. An Array knows its own, for who checks it here."""
    data, known = array.data, array.__dict__.get(_KNOWN)
    if known is None or known[0] is not data:
        pieces = [memoryview(data)[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        digests = in_threads(lambda piece: hashlib.sha256(piece).digest(), pieces, len(data))
        known = array.__dict__[_KNOWN] = data, b"".join(digests)
    return known[1]


def exchange_id(content: Mapping[str, Any]) -> str:
    """Id of the exchange that a message with this content begins, 32 hexadecimal digits. Raises ProtocolError."""
    try:
        known = hashlib.sha256(content[RECORD]["manifest"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"it has no manifest ({error!r})") from error
    for name, record in sorted(content.items()):
        if name != RECORD and isinstance(record, ConfigRecord):
            known.update(repr((name, sorted(record.items()))).encode())
    return known.hexdigest()[: 2 * DIGEST_BYTES]


def write_id(content: Mapping[str, Any]) -> str:
    """Write the exchange's id into a message's complete content, and return it."""
    content[RECORD][_ID] = exchange_id(content)
    return str(content[RECORD][_ID])


def verified_id(content: Mapping[str, Any]) -> str:
    """The id of the exchange that a message which has arrived begins. Raises ProtocolError for one that was altered."""
    found = exchange_id(content)
    if content[RECORD].get(_ID) != found:
        raise ProtocolError("the server's message was altered on its way: its manifest or settings do not fit its id")
    return found


@dataclass(frozen=True)
class Parcel:
    """A part as one message treats it: which of its entries travel with it, and whether the client keeps the part."""

    part: Part
    keep: bool
    sent: Names
    dtype: str = "float32"
    """What those that travel are encoded as."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the server says to one client in one exchange."""

    experiment: str
    plan: Plan
    """What the client is asked. On its way to the client it loses `exact`, and `needs` and `keeps` are the parcels'."""
    record: str
    """Name of the ArrayRecord under which the app expects its model."""
    layout: Layout
    parcels: tuple[Parcel, ...] = ()
    current: str = ""
    """Id of the exchange whose personal state of this client counts; "" when none does."""
    kept: Names = ()
    """Ids of exchanges to whose personal state the server may go back, because a checkpoint of it says so."""
    upload: Wire = PLAIN
    """How the answer's entries are to be encoded."""
    nonce: str = ""
    """Makes manifests that say the same two exchanges."""

    def to_record(self) -> ConfigRecord:
        number = {name: k for k, name in enumerate(self.layout.names)}

        def numbers(names: Names) -> list[int]:
            return [number[name] for name in names]

        return ConfigRecord(
            {
                "manifest": _to_bytes(
                    {
                        "experiment": self.experiment,
                        "plan": {
                            "client": self.plan.client,
                            "round": self.plan.round,
                            "action": self.plan.action,
                            "trains": numbers(self.plan.trains),
                            "returns": {tree: numbers(names) for tree, names in self.plan.returns.items()},
                            "remembers": dict(self.plan.remembers),
                            "groups": {group: numbers(names) for group, names in self.plan.groups.items()},
                            "objective": self.plan.objective,
                            "options": dict(self.plan.options),
                        },
                        "record": self.record,
                        "layout": self.layout.to_json(),
                        "parcels": [
                            {
                                "tree": parcel.part.tree,
                                "block": parcel.part.block,
                                "names": numbers(parcel.part.names),
                                "digests": base64.b64encode(b"".join(parcel.part.digests)).decode(),
                                "keep": parcel.keep,
                                "dtype": parcel.dtype,
                                "sent": numbers(parcel.sent) if len(parcel.sent) < len(parcel.part.names) else "all",
                            }
                            for parcel in self.parcels
                        ],
                        "current": self.current,
                        "kept": list(self.kept),
                        "upload": self.upload.to_json(),
                        "nonce": self.nonce,
                    }
                )
            }
        )

    @staticmethod
    def from_content(content: Mapping[str, Any]) -> Manifest:
        """Read the manifest of a message. Raises ProtocolError."""
        data = _from_record(content, "manifest")
        try:
            layout = Layout.from_json(data["layout"])

            def names(numbers: list[int]) -> Names:
                return tuple(layout.names[k] for k in numbers)

            def of_trees(numbers: Mapping[str, list[int]]) -> dict[str, Names]:
                return {tree: names(of) for tree, of in numbers.items()}

            parcels: list[Parcel] = []
            needs: dict[Tree, Names] = {}
            keeps: dict[Tree, Names] = {}
            for item in data["parcels"]:
                joined = base64.b64decode(item["digests"])
                digests = tuple(joined[k : k + DIGEST_BYTES] for k in range(0, len(joined), DIGEST_BYTES))
                part = Part(item["tree"], item["block"], names(item["names"]), digests)
                sent = part.names if item["sent"] == "all" else names(item["sent"])
                parcels.append(Parcel(part, item["keep"], sent, item["dtype"]))
                for of_tree in (needs, keeps) if item["keep"] else (needs,):
                    of_tree[part.tree] = of_tree.get(part.tree, ()) + part.names
            plan = data["plan"]
            return Manifest(
                experiment=data["experiment"],
                plan=Plan(
                    client=plan["client"],
                    round=plan["round"],
                    action=plan["action"],
                    needs=needs,
                    trains=names(plan["trains"]),
                    returns=of_trees(plan["returns"]),
                    keeps=keeps,
                    remembers=dict(plan["remembers"]),
                    groups=of_trees(plan["groups"]),
                    objective=plan["objective"],
                    options=dict(plan["options"]),
                ),
                record=data["record"],
                layout=layout,
                parcels=tuple(parcels),
                current=data["current"],
                kept=tuple(data["kept"]),
                upload=Wire(**data["upload"]),
                nonce=data["nonce"],
            )
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"its manifest cannot be read ({error!r})") from error


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a client says in its answer, beside its arrays and metrics."""

    experiment: str
    client: str
    round: int
    action: str
    answers: str
    """Id of the exchange, from the manifest as it arrived."""
    holds: Names = ()
    """Ids of the parts that the client now keeps."""
    parts: Mapping[Tree, tuple[Shaped, ...]] = field(default_factory=dict)
    """What lies in each packed part of the answer."""
    missing: Mapping[str, Names] = field(default_factory=dict)
    """Part id → entries that were neither sent nor kept: the server sends them, in the same round."""
    refused: str = ""
    """Why the client gives no result; "" when it does."""
    notes: Names = ()
    """What went wrong on the way to a result, for the server's log."""
    metrics: Names = ()
    """The MetricRecords that the checksum covers. A mod outside of the exchange may add others."""
    checksum: str = ""
    """See `checksum_of`."""

    def with_checksum(self, content: Mapping[str, Any]) -> Header:
        """This header with the checksum of an answer's content."""
        return replace(self, checksum=self.checksum_of(content))

    def checksum_of(self, content: Mapping[str, Any]) -> str:
        """Digest of an answer: this header without its checksum, the metrics that it names, and the digests of the
        packed parts' pieces, several of which are hashed at once."""
        known = hashlib.sha256(_to_text(replace(self, checksum="")._to_json()))
        for name in self.metrics:
            record = content.get(name)
            known.update(repr(sorted(record.items()) if isinstance(record, MetricRecord) else None).encode())
        parts = content.get(PARTS)
        if isinstance(parts, ArrayRecord):
            for name, array in parts.items():
                known.update(repr((name, array.dtype, array.shape, array.stype, len(array.data))).encode())
                known.update(_digests(array))
        return known.hexdigest()[: 2 * DIGEST_BYTES]

    def to_record(self) -> ConfigRecord:
        return ConfigRecord({"header": _to_bytes(self._to_json())})

    def _to_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "client": self.client,
            "round": self.round,
            "action": self.action,
            "answers": self.answers,
            "holds": list(self.holds),
            "parts": {tree: [list(item) for item in shaped] for tree, shaped in self.parts.items()},
            "missing": {part: list(names) for part, names in self.missing.items()},
            "refused": self.refused,
            "notes": list(self.notes),
            "metrics": list(self.metrics),
            "checksum": self.checksum,
        }

    @staticmethod
    def from_content(content: Mapping[str, Any], entries: int = 10_000) -> Header:
        """Read the header of an answer. Raises ProtocolError: nothing that a client sends is trusted.

        `entries`: of the model, after which it is known how long a header may be.
        """
        data = _from_record(content, "header", _HEADER + _HEADER_PER_ENTRY * entries)
        try:
            parts: dict[Tree, tuple[Shaped, ...]] = {}
            for tree, shaped in data["parts"].items():
                items = []
                for name, dtype, shape in shaped:
                    if not (isinstance(name, str) and isinstance(dtype, str)):
                        raise TypeError("an entry's name or dtype is not text")
                    if not all(type(n) is int and 0 <= n < 2**48 for n in shape):
                        raise ValueError(f"entry {name!r} has a shape of {shape!r}")
                    items.append((name, dtype, tuple(shape)))
                parts[tree] = tuple(items)
            texts = [data[key] for key in ("experiment", "client", "action", "answers", "refused", "checksum")]
            texts += [text for key in ("holds", "notes", "metrics") for text in data[key]]
            texts += [name for names in data["missing"].values() for name in names]
            if not all(isinstance(text, str) for text in texts) or type(data["round"]) is not int:
                raise TypeError("a field has the wrong type")
            return Header(
                experiment=data["experiment"],
                client=data["client"],
                round=data["round"],
                action=data["action"],
                answers=data["answers"],
                holds=tuple(data["holds"]),
                parts=parts,
                missing={part: tuple(names) for part, names in data["missing"].items()},
                refused=data["refused"],
                notes=tuple(data["notes"]),
                metrics=tuple(data["metrics"]),
                checksum=data["checksum"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"its header cannot be read ({error})") from error
