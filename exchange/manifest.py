"""The manifest, which describes a message and its arrays.

It and the header, which describes the answer (`header.py`), are each one compressed JSON value (`texts.py`) in a Flower
`ConfigRecord` of the message. They carry everything that is needed to complete and to strip an app's raw `state_dict`:
server and client share no state but the values themselves, and the model's layout, which a manifest names by its id if
the client has reported that it stored it (`layouts.py`). With the layout a manifest has about three bytes for an entry.
Fields are written in the order in which the classes declare them.

An **exchange** is one message and its answer. Its id is the digest of the manifest and the app's settings, which no two
messages share. The message carries it, so that the client detects damage. The answer repeats it, which shows that it
answers this message and not one of another round or attempt. The answer carries a **checksum** of its content. Both
only detect damage: TLS and the nodes' keys authenticate.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from flwr.app import ConfigRecord

from tepal.exchange.encodings import PLAIN, Wire
from tepal.exchange.layout import LAYOUT_ID, Layout, Names, numbers_of, runs_of
from tepal.exchange.layouts import in_memory, remembered
from tepal.exchange.parts import DIGEST_BYTES, Part
from tepal.exchange.plan import INTRODUCE, Plan, Scalar, Tree
from tepal.exchange.texts import compressed, decompressed, to_text

RECORD = "tepal"
"""Name of the ConfigRecord that carries manifest or header."""
PARTS = "tepal.parts"
"""Name of the ArrayRecord that carries the packed parts."""

ID = "id"
"""Key of the exchange's id in this record of a message."""
PROTOCOL = 9
"""Version of what server and clients send each other. It rises with every change that the other side must know.

    1   digests of entries and of packed parts are SHA-256; messages do not state a version
    2   they are BLAKE3
    3   a part may be sent as its difference from one in the client's cache; the gaps of top k are coded
    4   matrices may be in whole steps; of an encoding only what is not usual is sent
    5   a part that is sent as a whole, or not at all, has its id, and no digests; entries are listed as runs; of
        an answer's entries, which are those that the plan returns, in its order, only a digest is sent
    6   in auto vectors are encoded, too, and small arrays together; uploads may be scaled up
    7   in auto matrices may be products of two thin ones
    8   manifests and headers are compressed with a dictionary of their words, but for those of introductions
    9   a layout that the client knows is named by its id
"""

PROTOCOL_KEY = "protocol"
"""Key of the version in a manifest's or header's record."""

_ID = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")

_LIMIT = 64_000_000  # bytes of decompressed JSON
_MOST_BITS = 1e4  # of a value


class ProtocolError(ValueError):
    """A manifest or header that cannot be read, or that contradicts itself."""


class UnknownLayout(ProtocolError):
    """A manifest that names a layout which is not known here.

    `id`: of the layout; `manifest`: what can be read without it, so with no entry and no parcel.
    """

    def __init__(self, id: str, manifest: Manifest) -> None:
        super().__init__(f"it names the model's layout {id!r}, which is not known here")
        self.id = id
        self.manifest = manifest


def other_version(content: Mapping[str, Any], *, here: str, there: str) -> str:
    """Why a message of another version of the protocol cannot be used; "" if it is of this version.

    Args:
        content: of the message.
        here: who received it, "server" or "client".
        there: who sent it.
    """
    found = content[RECORD].get(PROTOCOL_KEY, 1)
    if type(found) is not int or found == PROTOCOL:
        return "" if found == PROTOCOL else f"the {there} states the protocol {reprlib.repr(found)}, which is no number"
    return (
        f"the {there}'s version of Tepal has protocol {found}, and the {here}'s has {PROTOCOL}: install the newer "
        f"one on the {there if found < PROTOCOL else here} as well"
    )


def json_of(content: Mapping[str, Any], key: str, limit: int = _LIMIT) -> dict[str, Any]:
    """The manifest or header (`key`) of a message's content as JSON. Raises ProtocolError."""
    try:
        value = json.loads(decompressed(content[RECORD][key], limit))
        if not isinstance(value, dict):
            raise TypeError("not an object")
        return value
    except (KeyError, TypeError, ValueError, zlib.error, RecursionError) as error:
        raise ProtocolError(f"its {key} cannot be read ({error})") from error


def exchange_id(content: Mapping[str, Any]) -> str:
    """The id (32 hexadecimal digits) of the exchange that a message with this content begins. Raises ProtocolError."""
    try:
        known = hashlib.sha256(content[RECORD]["manifest"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"it has no manifest ({error!r})") from error
    for name, record in sorted(content.items()):
        if name != RECORD and isinstance(record, ConfigRecord):
            known.update(repr((name, plain_items(record))).encode())
    return known.hexdigest()[: 2 * DIGEST_BYTES]


def plain_items(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The items of a record of scalars, sorted, with values of the types that they have after a transfer.

    Flower takes what is a number, such as `np.float64`, and delivers Python's own, which have another `repr`.
    """
    return [(str.__str__(name), _plain(value)) for name, value in sorted(record.items())]


def _plain(value: Any) -> Any:
    if type(value) in (float, int, str, bool, bytes):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration, `str` may be its name
    if isinstance(value, bytes):
        return bytes(value)
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), value)


def write_id(content: Mapping[str, Any]) -> str:
    """Write the exchange's id into the complete content of a message, and return it."""
    content[RECORD][ID] = exchange_id(content)
    return str(content[RECORD][ID])


def verified_id(content: Mapping[str, Any]) -> str:
    """The id of the exchange that a received message begins. Raises ProtocolError if the message was altered."""
    found = exchange_id(content)
    if content[RECORD].get(ID) != found:
        raise ProtocolError(
            "the server's message was altered on its way: its id does not match its manifest and settings"
        )
    return found


@dataclass(frozen=True)
class Parcel:
    """A part in one message: which of its entries the message carries, and whether the client caches the part."""

    part: Part
    keep: bool
    sent: Names
    wire: Wire = PLAIN
    """Encoding of the entries that the message carries."""
    base: str = ""
    """Id of the part in the client's cache from which they are differences; "" if they are values."""

    @property
    def in_part(self) -> bool:
        """Whether the message carries some of the entries, and not all."""
        return 0 < len(self.sent) < len(self.part.names)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the server sends to one client in one exchange, without the arrays."""

    experiment: str
    plan: Plan
    """What the client must do. `exact` is not sent; the client derives `needs` and `keeps` from the parcels."""
    record: str
    """Name of the ArrayRecord under which the app expects its model."""
    layout: Layout
    parcels: tuple[Parcel, ...] = ()
    current: str = ""
    """Id of the exchange that made the current version of this client's personal state; "" if there is none."""
    kept: Names = ()
    """Ids of exchanges whose personal state a checkpoint of the server refers to, and may restore."""
    upload: Wire = PLAIN
    """Encoding of the answer's entries."""
    nonce: str = ""
    """Random, so that equal manifests begin different exchanges."""

    def to_record(self, *, layout_known: bool = False) -> ConfigRecord:
        """The manifest as it is sent. `layout_known`: the client has reported that it stored the layout."""
        introduces = self.plan.action == INTRODUCE  # of which other versions must be able to read the refusal
        number = {name: k for k, name in enumerate(self.layout.names)}

        def numbers(names: Names) -> list[int]:
            return runs_of([number[name] for name in dict.fromkeys(names)])

        parcels = [
            {
                "tree": parcel.part.tree,
                "block": parcel.part.block,
                "names": numbers(parcel.part.names),
                **_digests_or_id(parcel),
                "keep": parcel.keep,
                "wire": parcel.wire.to_json(),
                "base": parcel.base,
                "sent": numbers(parcel.sent) if len(parcel.sent) < len(parcel.part.names) else "all",
            }
            for parcel in self.parcels
        ]
        converted = {
            "plan": _plan_fields(vars(self.plan), numbers),
            "layout": self.layout.id if layout_known and not introduces else self.layout.to_json(),
            "parcels": parcels,
            "upload": self.upload.to_json(),
        }
        data = compressed(to_text(vars(self) | converted), words=not introduces)
        return ConfigRecord({"manifest": data, PROTOCOL_KEY: PROTOCOL})

    @classmethod
    def from_content(
        cls, content: Mapping[str, Any], known: Callable[[str, str], Layout | None] = in_memory
    ) -> Manifest:
        """Read the manifest of a message.

        Args:
            content: of the message.
            known: gives the layout that the manifest names; called with the experiment's id and the layout's.

        Raises:
            UnknownLayout: this layout is not known.
            ProtocolError: the manifest cannot be read.
        """
        data = json_of(content, "manifest")
        try:
            layout = _layout_of(data, known)

            def names(runs: list[int]) -> Names:
                return tuple(layout.names[k] for k in numbers_of(runs, len(layout.names)))

            parcels: list[Parcel] = []
            needs: dict[Tree, Names] = {}
            keeps: dict[Tree, Names] = {}
            for item in data["parcels"]:
                joined = base64.b64decode(item["digests"])
                if len(joined) % DIGEST_BYTES:
                    raise ValueError(f"digests have {len(joined)} bytes")
                digests = tuple(joined[k : k + DIGEST_BYTES] for k in range(0, len(joined), DIGEST_BYTES))
                part = Part(item["tree"], item["block"], names(item["names"]), digests, item["id"])
                sent = part.names if item["sent"] == "all" else names(item["sent"])
                parcels.append(Parcel(part, item["keep"], sent, Wire(**item["wire"]), item["base"]))
                for of_tree in (needs, keeps) if item["keep"] else (needs,):
                    of_tree[part.tree] = of_tree.get(part.tree, ()) + part.names
            converted = {
                "plan": Plan(needs=needs, keeps=keeps, **_plan_fields(data["plan"], names)),
                "layout": layout,
                "parcels": tuple(parcels),
                "kept": tuple(data["kept"]),
                "upload": Wire(**data["upload"]),
            }
            return _checked(cls(**{of.name: data[of.name] for of in fields(cls)} | converted))
        except UnknownLayout:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"its manifest cannot be read ({error!r})") from error


def _layout_of(data: Mapping[str, Any], known: Callable[[str, str], Layout | None]) -> Layout:
    """The layout that a manifest lists or names. Raises UnknownLayout, or another error for other data."""
    experiment = data["experiment"]
    if type(experiment) is not str:
        raise ValueError(f"{reprlib.repr(experiment)} is not text")
    if not isinstance(id := data["layout"], str):
        return remembered(experiment, Layout.from_json(id))
    if not LAYOUT_ID.fullmatch(id):
        raise ValueError(f"the layout's id is {reprlib.repr(id)}")
    if (layout := known(experiment, id)) is not None:
        return layout
    without = Manifest(
        experiment=experiment,
        plan=Plan(needs={}, **_plan_fields(data["plan"], lambda _: ())),
        record=data["record"],
        layout=Layout((), ()),
        current=data["current"],
        kept=tuple(data["kept"]),
    )
    raise UnknownLayout(id, _checked(without))


def _checked(manifest: Manifest) -> Manifest:
    """The same manifest. Raises ValueError if one of its values has the wrong type, or contradicts another."""
    plan = manifest.plan
    wires = [manifest.upload, *(parcel.wire for parcel in manifest.parcels)]
    texts: list[Any] = [manifest.experiment, manifest.record, manifest.current, manifest.nonce, *manifest.kept]
    texts += [plan.client, plan.action, plan.objective, *plan.returns, *plan.groups, *plan.options]
    texts += [*(text for pair in plan.remembers.items() for text in pair), *(wire.dtype for wire in wires)]
    for parcel in manifest.parcels:
        part = parcel.part
        texts += [part.tree, part.block, part.known_id, parcel.base]
        if len(part.names) != len(set(part.names)) or bool(part.digests) == bool(part.known_id):
            raise ValueError(f"a part of block {reprlib.repr(part.block)} has an entry twice, or no digests and no id")
        if part.digests and len(part.names) != len(part.digests):
            raise ValueError(f"a part of block {reprlib.repr(part.block)} has {len(part.digests)} digests")
        sent = set(parcel.sent)
        if part.known_id and (parcel.in_part or not _ID.fullmatch(part.known_id)):
            raise ValueError(f"a part of block {reprlib.repr(part.block)} has no id, or no digests of what is sent")
        if not set(part.names) >= sent or len(sent) < len(parcel.sent):
            raise ValueError(f"a parcel of block {reprlib.repr(part.block)} sends entries that its part does not have")
        if bool(parcel.base) != parcel.wire.differences or type(parcel.keep) is not bool:
            raise ValueError(f"a parcel of block {reprlib.repr(part.block)} has no base, or no true or false")
    if wrong := [text for text in texts if type(text) is not str]:
        raise ValueError(f"{reprlib.repr(wrong[0])} is not text")
    if wrong := [value for value in (plan.round, *(wire.seed for wire in wires)) if type(value) is not int]:
        raise ValueError(f"{reprlib.repr(wrong[0])} is not a whole number")
    bools = [value for wire in wires for value in (wire.differences, wire.feedback, wire.unbiased)]
    if wrong := [value for value in bools if type(value) is not bool]:
        raise ValueError(f"{reprlib.repr(wrong[0])} is not a bool")
    shares = [value for wire in wires for value in (wire.top_k, wire.left_out, wire.bits)]
    if wrong := [value for value in shares if type(value) not in (int, float) or not value < _MOST_BITS]:
        raise ValueError(f"{reprlib.repr(wrong[0])} is not a share, or a number of bits")
    if wrong := [value for value in plan.options.values() if not isinstance(value, Scalar)]:
        raise ValueError(f"{reprlib.repr(wrong[0])} is not an option's value")
    return manifest


def _digests_or_id(parcel: Parcel) -> dict[str, str]:
    """Of a part of which some entries are sent the digests of all, and of others the id, from which they follow."""
    if parcel.in_part:
        return {"digests": base64.b64encode(b"".join(parcel.part.digests)).decode(), "id": ""}
    return {"digests": "", "id": parcel.part.id}


def _plan_fields(plan: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """The fields of a plan that are sent. `convert`: from entries' names to their numbers, or back."""
    return {
        "client": plan["client"],
        "round": plan["round"],
        "action": plan["action"],
        "trains": convert(plan["trains"]),
        "returns": {tree: convert(entries) for tree, entries in plan["returns"].items()},
        "remembers": dict(plan["remembers"]),
        "groups": {group: convert(entries) for group, entries in plan["groups"].items()},
        "objective": plan["objective"],
        "options": dict(plan["options"]),
    }
