import hashlib
import json
import os
import zlib
from dataclasses import replace
from enum import IntEnum, StrEnum

import numpy as np
import pytest
from blake3 import blake3
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange.bounds import MOST_METRICS
from tepal.exchange.encodings import Wire
from tepal.exchange.header import Header
from tepal.exchange.manifest import (
    PARTS,
    PROTOCOL,
    RECORD,
    Manifest,
    Parcel,
    ProtocolError,
    UnknownLayout,
    exchange_id,
)
from tepal.exchange.parts import STYPE, Part, listed
from tepal.exchange.plan import INTRODUCE, Plan
from tepal.exchange.texts import WORDS, compressed, decompressed
from tepal.exchange.traffic import Traffic
from tests.unit.exchange.test_layout import fused_layout

PART = Part("model", "query_key", ("attn.qkv:q", "attn.qkv:k"), (b"a" * 16, b"b" * 16))


MANIFEST = Manifest(
    experiment="e",
    plan=Plan(
        client="site-1",
        round=3,
        action="train",
        needs={"model": (*PART.names, "embed"), "control": PART.names, "mode/1": PART.names},
        trains=("embed", "steps"),
        returns={"model": ("embed",)},
        keeps={"model": PART.names, "mode/1": PART.names},
        remembers={"model": "personal"},
        groups={"value_projection": ("attn.qkv:v",)},
        objective="scaffold",
        options={"ridge": 0.5, "delta": 1e-05, "of": "Zürich"},
    ),
    record="arrays",
    layout=fused_layout(),
    parcels=(
        Parcel(PART, keep=True, sent=("attn.qkv:k",)),
        Parcel(replace(PART, block="value", names=("embed",), digests=(b"c" * 16,)), keep=False, sent=()),
        Parcel(replace(PART, tree="control"), keep=False, sent=PART.names, wire=Wire("int8")),
        Parcel(
            replace(PART, tree="mode/1"), keep=True, sent=PART.names, wire=Wire("sign", differences=True), base="d" * 32
        ),
    ),
    current="2" * 32,
    kept=("3" * 32,),
    upload=Wire("int8", 0.25, differences=True, feedback=True, seed=7),
    nonce="ab",
)

HEADER = Header(
    experiment="e",
    client="site-1",
    round=3,
    action="train",
    answers="0" * 32,
    holds=(PART.id,),
    carries="4" * 16,
    missing={PART.id: PART.names},
    refused="no",
    notes=("its disk in Zürich is full", "\udce9 in a file name is not UTF-8"),
    metrics=("metrics",),
    checksum="1" * 32,
)


# Recorded texts. Digests and caches of other versions depend on every character of them.
# fmt: off
MANIFEST_TEXT = (
    r'{"experiment":"e","plan":{"client":"site-1","round":3,"action":"train","trains":[0,1,7,1],'
    r'"returns":{"model":[0,1]},"remembers":{"model":"personal"},"groups":{"value_projection":[3,1]},'
    r'"objective":"scaffold","options":{"ridge":0.5,"delta":1e-05,"of":"Z\u00fcrich"}},"record":"arrays",'
    r'"layout":{"raw":[["embed",[5,4],"float32",""],["attn.qkv",[12,4],"float32",""],["conv.c_attn",[4,12],'
    r'"float32",""],["steps",[],"int64",""],["head",[5,4],"float32","embed"]],"split":[["attn.qkv:q","attn.qkv",'
    r'[4,4],0,0,4],["attn.qkv:k","attn.qkv",[4,4],0,4,8],["attn.qkv:v","attn.qkv",[4,4],0,8,12],["conv.c_attn:q",'
    r'"conv.c_attn",[4,4],1,0,4],["conv.c_attn:k","conv.c_attn",[4,4],1,4,8],["conv.c_attn:v","conv.c_attn",[4,4],'
    r'1,8,12]]},"parcels":[{"tree":"model","block":"query_key","names":[1,2],'
    r'"digests":"YWFhYWFhYWFhYWFhYWFhYWJiYmJiYmJiYmJiYmJiYmI=","id":"","keep":true,"wire":{},"base":"",'
    r'"sent":[2,1]},{"tree":"model","block":"value","names":[0,1],"digests":"","id":"5bea7517f224b7d6a191ed6e02fdc4c1",'
    r'"keep":false,"wire":{},"base":"","sent":[]},{"tree":"control","block":"query_key","names":[1,2],"digests":"",'
    r'"id":"ccd24d59ab373b8f908bbd1d0fb51bb6","keep":false,"wire":{"dtype":"int8"},"base":"","sent":"all"},'
    r'{"tree":"mode/1","block":"query_key","names":[1,2],"digests":"","id":"ccd24d59ab373b8f908bbd1d0fb51bb6",'
    r'"keep":true,"wire":{"dtype":"sign","differences":true},"base":"dddddddddddddddddddddddddddddddd","sent":"all"}],'
    r'"current":"22222222222222222222222222222222","kept":["33333333333333333333333333333333"],'
    r'"upload":{"dtype":"int8","top_k":0.25,"differences":true,"feedback":true,"seed":7},"nonce":"ab"}'
)
HEADER_TEXT = (
    r'{"experiment":"e","client":"site-1","round":3,"action":"train","answers":"00000000000000000000000000000000",'
    r'"holds":["ccd24d59ab373b8f908bbd1d0fb51bb6"],"carries":"4444444444444444",'
    r'"missing":{"ccd24d59ab373b8f908bbd1d0fb51bb6":["attn.qkv:q","attn.qkv:k"]},"refused":"no",'
    r'"notes":["its disk in Z\u00fcrich is full","\udce9 in a file name is not UTF-8"],"layout":false,"left_out":null,'
    r'"metrics":["metrics"],"checksum":"11111111111111111111111111111111"}'
)
# fmt: on
HEADER_CHECKSUM = "9f859419a6b64f23f8a39e9e9d4f4017"


def test_the_text_of_a_manifest_and_a_header_never_changes():
    assert decompressed(MANIFEST.to_record()["manifest"], 10_000) == MANIFEST_TEXT.encode()
    assert decompressed(HEADER.to_record()["header"], 10_000) == HEADER_TEXT.encode()
    assert HEADER.checksum_of({}) == HEADER_CHECKSUM


def test_the_dictionary_of_words_never_changes_within_a_protocol():
    """Another dictionary cannot read what was compressed with this one."""
    assert (PROTOCOL, hashlib.sha256(WORDS).hexdigest()[:16]) == (9, "49ef2864b042d40a")


def test_known_words_take_few_bytes():
    for text in (MANIFEST_TEXT, HEADER_TEXT):
        data = text.encode()
        assert decompressed(compressed(data), len(data)) == data
        assert len(compressed(data)) < len(zlib.compress(data)) - 40
    with pytest.raises(zlib.error):
        zlib.decompress(compressed(HEADER_TEXT.encode()))


def test_manifest_survives_its_record():
    read = Manifest.from_content({RECORD: MANIFEST.to_record()})
    some, *others = MANIFEST.parcels
    assert 0 < len(some.sent) < len(some.part.names), "of the others the ids say all"
    by_id = [replace(of, part=replace(of.part, digests=(), known_id=of.part.id)) for of in others]
    assert read == replace(MANIFEST, parcels=(some, *by_id))
    assert [of.part.id for of in read.parcels] == [of.part.id for of in MANIFEST.parcels]


def named():
    """The record of a manifest whose layout the client knows, and the layout's id."""
    listed = json.dumps(MANIFEST.layout.to_json(), separators=(",", ":")).encode()
    return MANIFEST.to_record(layout_known=True), blake3(listed).hexdigest()[:8], listed.decode()


def test_a_layout_that_the_client_knows_is_named():
    record, id, listed = named()
    assert decompressed(record["manifest"], 10_000).decode() == MANIFEST_TEXT.replace(listed, f'"{id}"')
    asked = []
    read = Manifest.from_content({RECORD: record}, lambda *of: asked.append(of) or MANIFEST.layout)
    assert read == Manifest.from_content({RECORD: MANIFEST.to_record()}) and asked == [("e", id)]
    introduction = replace(MANIFEST, plan=replace(MANIFEST.plan, action=INTRODUCE))
    assert introduction.to_record(layout_known=True) == introduction.to_record(), "other versions read these"


def test_what_can_be_read_without_the_layout_is_enough_for_an_answer():
    record, id, _ = named()
    with pytest.raises(UnknownLayout) as found:
        Manifest.from_content({RECORD: record}, lambda *of: None)
    read, plan = found.value.manifest, MANIFEST.plan
    assert found.value.id == id and read.layout.names == () == read.parcels
    assert (read.experiment, read.current, read.kept) == (MANIFEST.experiment, MANIFEST.current, MANIFEST.kept)
    assert (read.plan.client, read.plan.round, read.plan.action) == (plan.client, plan.round, plan.action)


@pytest.mark.parametrize("id", ["../../mine", "C4979EA9", "c4979ea9c4979ea9", ""])
def test_a_layouts_name_that_is_no_id_is_refused(id):
    text = decompressed(named()[0]["manifest"], 10_000).replace(b'"c4979ea9"', json.dumps(id).encode())
    with pytest.raises(ProtocolError, match="the layout's id is"):
        Manifest.from_content({RECORD: ConfigRecord({"manifest": compressed(text)})}, lambda *of: pytest.fail("asked"))


def test_what_a_plan_names_twice_in_a_set_is_sent_once():
    plan = Plan(client="c", round=1, needs={}, trains=("embed", "attn.qkv:q", "embed"), groups={"g": ("embed",) * 3})
    read = Manifest.from_content({RECORD: replace(MANIFEST, plan=plan).to_record()}).plan
    assert (read.trains, read.groups) == (("embed", "attn.qkv:q"), {"g": ("embed",)})


def test_header_survives_its_record():
    read = Header.from_content({RECORD: HEADER.to_record()})
    assert read == HEADER and read.to_record() == HEADER.to_record()
    assert read.checksum_of({}) == HEADER.checksum_of({})


class Number(IntEnum):
    THREE = 3


class Kind(StrEnum):
    SMALL = "small"


NUMBERS = [0.25, np.float64(0.25), 3, Number.THREE, -0.0, 1e300, float("nan"), float("inf"), 2**62]


@pytest.mark.parametrize("value", [*NUMBERS, NUMBERS[:2], []], ids=repr)
def test_a_checksum_is_that_of_the_metrics_that_arrive(value):
    """Flower takes numbers of NumPy and enumerations, and delivers Python's."""
    content = RecordDict({"metrics": MetricRecord({"num-examples": 3, "figure": value})})
    header = replace(HEADER, metrics=("metrics",))
    arrived = recorddict_from_proto(recorddict_to_proto(content))
    assert header.checksum_of(content) == header.checksum_of(arrived)
    other = RecordDict({"metrics": MetricRecord({"num-examples": 4, "figure": value})})
    assert header.checksum_of(content) != header.checksum_of(other)


SETTINGS = [*NUMBERS, True, "a", np.str_("a"), Kind.SMALL, b"a", ["a", Kind.SMALL], [True]]


@pytest.mark.parametrize("value", SETTINGS, ids=repr)
def test_the_id_of_an_exchange_is_that_of_the_settings_that_arrive(value):
    record = MANIFEST.to_record()
    content = RecordDict({RECORD: record, "config": ConfigRecord({"setting": value})})
    assert exchange_id(content) == exchange_id(recorddict_from_proto(recorddict_to_proto(content)))
    other = RecordDict({RECORD: record, "config": ConfigRecord({"setting": "other"})})
    assert exchange_id(content) != exchange_id(other)


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
    assert size < 300
    header = Header(experiment="0" * 12, client="site-1", round=12, action="train", answers=os.urandom(16).hex(),
                    holds=(os.urandom(16).hex(),), carries=os.urandom(8).hex(), metrics=("metrics",),
                    checksum=os.urandom(16).hex())  # fmt: skip
    assert len(header.to_record()["header"]) < 145, "of which 56 are random"


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
FIELDS = ("experiment", "client", "round", "action", "holds", "carries", "missing", "refused")


@given(st.binary(max_size=40) | st.fixed_dictionaries({field: JSON for field in FIELDS}).map(json.dumps))
def test_whatever_a_client_sends_is_read_or_is_a_protocol_error(data):
    sent = data if isinstance(data, bytes) else compressed(data.encode())
    try:
        header = Header.from_content({RECORD: ConfigRecord({"header": sent})})
    except ProtocolError:
        return
    assert isinstance(header.round, int) and all(isinstance(held, str) for held in header.holds)


def header_record(**changes):
    """A header's record with other values of some fields, or without them (None)."""
    data = json.loads(HEADER_TEXT) | changes
    text = json.dumps({field: value for field, value in data.items() if value is not None or field not in changes})
    return {RECORD: ConfigRecord({"header": compressed(text.encode())})}


@pytest.mark.parametrize("field", json.loads(HEADER_TEXT))
def test_a_header_has_all_its_fields(field):
    with pytest.raises(ProtocolError, match=f"its header cannot be read.*{field}"):
        Header.from_content(header_record(**{field: None}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"round": value} for value in ("3", True, 3.0, [3], {})),
        *({field: value} for field in ("experiment", "client", "action", "carries") for value in (3, False, ["x"])),
        *({"checksum": value} for value in (3, False, ["x"])),
        *({field: value} for field in ("holds", "notes", "metrics") for value in (3, [3], [["x"]], [True])),
        *({"missing": value} for value in ([], "x", {"a": 3}, {"a": [3]})),
        *({"layout": value} for value in (1, "true", [True])),
        *({"left_out": value} for value in (-0.1, 1.1, float("nan"), "0.5", True, [0.5])),
    ],
)
def test_a_header_of_other_types_is_refused_in_a_sentence(changes):
    with pytest.raises(ProtocolError) as refused:
        Header.from_content(header_record(**changes))
    assert str(refused.value).startswith("its header cannot be read (") and "\n" not in str(refused.value)


def test_very_many_wrong_values_are_refused_before_an_error_is_made_for_each():
    content = header_record(missing={f"{k:x}": 1 for k in range(100_000)})
    with pytest.raises(ProtocolError, match="'missing' has 100000 keys; at most 10000 are allowed"):
        Header.from_content(content)


def test_a_header_names_few_records_of_metrics_and_each_once():
    """The checksum reads the record of each name."""
    names = [f"metrics-{k}" for k in range(MOST_METRICS + 1)]
    assert Header.from_content(header_record(metrics=names[:-1])).metrics == tuple(names[:-1])
    with pytest.raises(ProtocolError, match="names 201 records of metrics; at most 200 are allowed"):
        Header.from_content(header_record(metrics=names))
    with pytest.raises(ProtocolError, match="names 249996 records"):
        Header.from_content(header_record(metrics=["m"] * 249_996), 10_000)
    with pytest.raises(ProtocolError, match="names a record of metrics twice"):
        Header.from_content(header_record(metrics=["m", "n", "m"]))


def test_the_digest_of_what_an_answer_carries_tells_names_shapes_dtypes_order_and_trees_apart():
    base = {"model": [("a", "float32", (2, 3)), ("b", "float32", (2, 3))]}
    first, second = base["model"]
    others = [
        {"model": [second, first]}, {"model": [first]}, {"model": [first, second, first]}, {"mode/1": base["model"]},
        {"model": [("a", "float32", (3, 2)), second]}, {"model": [("a", "int32", (2, 3)), second]},
        {"model": [("a", "float32", (6,)), second]}, {**base, "control": []}, {},
    ]  # fmt: skip
    assert len({listed(parts) for parts in [base, *others]}) == 1 + len(others)
    assert listed({"model": tuple(base["model"]), "control": ()}) == listed({"control": [], "model": base["model"]})


def test_fields_that_a_later_version_adds_are_ignored():
    assert Header.from_content(header_record(added=[1, {"x": 2}])) == HEADER


def test_a_decompression_bomb_is_a_protocol_error():
    for bomb in (zlib.compress(b" " * 200_000_000), compressed(b" " * 200_000_000)):
        with pytest.raises(ProtocolError, match="more than"):
            Header.from_content({RECORD: ConfigRecord({"header": bomb})})


def test_a_message_of_an_app_alone_has_none_of_our_bytes():
    assert Traffic.of({"metrics": "of the app"}) == Traffic(payload=0, overhead=0)
    assert Traffic() + Traffic(3, 4) == Traffic(3, 4)
