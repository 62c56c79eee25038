import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange.manifest import PARTS, RECORD, Header, Manifest, Parcel, ProtocolError
from tepal.exchange.parts import STYPE, Part
from tepal.exchange.plan import Plan
from tepal.exchange.sender import Traffic
from tests.unit.exchange.test_layout import fused_layout

PART = Part("model", "query_key", ("attn.qkv:q", "attn.qkv:k"), (b"a" * 16, b"b" * 16))


def test_manifest_survives_its_record():
    manifest = Manifest(
        experiment="e",
        plan=Plan(
            client="site-1",
            round=3,
            action="train",
            needs={"model": (*PART.names, "embed"), "control": PART.names},
            trains=("embed", "steps"),
            returns={"model": ("embed",)},
            keeps={"model": PART.names},
            remembers={"model": "personal"},
            groups={"value_projection": ("attn.qkv:v",)},
            objective="scaffold",
            options={"ridge": 0.5},
        ),
        record="arrays",
        layout=fused_layout(),
        parcels=(
            Parcel(PART, keep=True, sent=("attn.qkv:k",)),
            Parcel(replace(PART, block="value", names=("embed",), digests=(b"c" * 16,)), keep=False, sent=()),
            Parcel(replace(PART, tree="control"), keep=False, sent=PART.names),
        ),
    )
    assert Manifest.from_content({RECORD: manifest.to_record()}) == manifest


def test_header_survives_its_record():
    header = Header(
        experiment="e",
        client="site-1",
        round=3,
        action="train",
        answers="0" * 32,
        holds=(PART.id,),
        parts={"model": (("embed", "float32", (5, 4)), ("steps", "int64", ()))},
        missing={PART.id: PART.names},
        refused="no",
        notes=("its disk is full",),
        metrics=("metrics",),
        checksum="1" * 32,
    )
    assert Header.from_content({RECORD: header.to_record()}) == header


def test_a_checksum_is_of_every_byte_of_what_is_hashed_in_pieces():
    rng = np.random.default_rng(0)
    data = rng.bytes(3 * 2**22 + 5)  # three pieces and a rest, in threads

    def checksum(**parts):
        packed = {
            name: Array(dtype="uint8", shape=(len(value),), stype=STYPE, data=value) for name, value in parts.items()
        }
        header = Header(experiment="e", client="site-1", round=1, action="train", answers="0" * 32)
        return header.checksum_of({PARTS: ArrayRecord(packed)})

    assert checksum(model=data) == checksum(model=bytes(bytearray(data)))
    others = [data[: 2**22], data[2**22 : 2**23] + data[: 2**22] + data[2**23 :], data + b"\0", data[:-1]]
    for place in [0, 2**22 - 1, 2**22, 3 * 2**22, len(data) - 1]:
        changed = bytearray(data)
        changed[place] ^= 1
        others.append(bytes(changed))
    checksums = {checksum(model=data), checksum(other=data), *(checksum(model=other) for other in others)}
    checksums |= {checksum(model=data[:7], other=data[7:]), checksum(model=data[:8], other=data[8:])}
    assert len(checksums) == len(others) + 4


def test_a_manifest_of_many_entries_is_small():
    layout = fused_layout()
    plan = Plan(client="c", round=1, needs={})
    size = len(Manifest(experiment="e", plan=plan, record="arrays", layout=layout).to_record()["manifest"])
    assert size < 400


@pytest.mark.parametrize("kind", [Manifest, Header])
@pytest.mark.parametrize("record", [None, {}, {"manifest": 3, "header": "x"}])
def test_what_is_not_there_is_a_protocol_error(kind, record):
    content = {} if record is None else {RECORD: ConfigRecord(record)}
    with pytest.raises(ProtocolError):
        kind.from_content(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
FIELDS = ("experiment", "client", "round", "action", "holds", "parts", "missing", "refused")


@given(st.binary(max_size=40) | st.fixed_dictionaries({field: JSON for field in FIELDS}).map(json.dumps))
def test_whatever_a_client_sends_is_read_or_is_a_protocol_error(data):
    sent = data if isinstance(data, bytes) else zlib.compress(data.encode())
    try:
        header = Header.from_content({RECORD: ConfigRecord({"header": sent})})
    except ProtocolError:
        return
    assert isinstance(header.round, int) and all(isinstance(held, str) for held in header.holds)


def test_a_decompression_bomb_is_a_protocol_error():
    bomb = zlib.compress(b" " * 200_000_000)
    with pytest.raises(ProtocolError, match="more than"):
        Header.from_content({RECORD: ConfigRecord({"header": bomb})})


def test_a_message_of_an_app_alone_has_none_of_our_bytes():
    assert Traffic.of({"metrics": "of the app"}) == Traffic(payload=0, overhead=0)
    assert Traffic() + Traffic(3, 4) == Traffic(3, 4)
