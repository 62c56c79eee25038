"""The decoders of bytes from others, each with inputs and a check: a valid value, or the documented exception."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord
from hypothesis import strategies as st

from tepal.exchange.encodings import AUTO, CODECS, PLAIN, RANKS, Mixed, Steps, TopK, Wire
from tepal.exchange.files import DamagedFile, map_arrays, read_arrays, write_arrays
from tepal.exchange.header import Header
from tepal.exchange.manifest import RECORD, Manifest, Parcel, ProtocolError, verified_id, write_id
from tepal.exchange.parts import STYPE, Part, digest, pack, shapes_of, unpack_checked, unpacked
from tepal.exchange.texts import compressed, decompressed
from tepal.host.site import ProvisionError, read_certificate, read_site
from tepal.records.run_directory.reading import (
    find_run,
    read_config,
    read_json,
    read_label_counts,
    read_metrics,
    read_records,
    read_summary,
)
from tepal.strategies.rounds.checkpoint import FACTS, STATE, Checkpoint, Checkpoints
from tepal.strategies.rounds.state_json import CheckpointError
from tepal.tools.deploy.provision.certificates import new_key, public_line
from tepal.tools.deploy.provision.folder import fingerprint, made_in
from tepal.tools.deploy.provision.operations import make
from tepal.tools.deploy.provision.site_files import node_config_of
from tests.unit.exchange.test_manifest import HEADER, MANIFEST
from tests.unit.fuzz.mutations import changed_bytes, inputs, of_bytes, of_json


@dataclass(frozen=True)
class Decoder:
    """`check(data)` raises nothing, whatever the bytes are."""

    inputs: st.SearchStrategy[bytes]
    check: Callable[[bytes], None]
    share: float = 1.0
    """Of the number of inputs; less for a decoder whose inputs take long."""


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tepal-fuzz-") as path:
        yield Path(path)


# Messages -------------------------------------------------------------------------------------------------------------


def _as_written(parcel: Parcel) -> Parcel:
    if 0 < len(parcel.sent) < len(parcel.part.names):
        return parcel
    return replace(parcel, part=replace(parcel.part, digests=(), known_id=parcel.part.id))


def _manifest(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        found = Manifest.from_content({RECORD: {"manifest": data}})
        names = set(found.layout.names)
        assert all(isinstance(text, str) for text in (found.experiment, found.record, found.current, found.plan.client))
        assert type(found.plan.round) is int and all(isinstance(kept, str) for kept in found.kept)
        assert found.upload.codec_of("w", "float32", (2, 3)) is None or not found.upload.plain
        for entry in found.layout.entries:
            assert math.prod(entry.shape) >= 0 and entry.nbytes >= 0
        for parcel in found.parcels:
            assert len(parcel.part.id) == 32 and names >= set(parcel.part.names) >= set(parcel.sent)
            assert parcel.wire.differences == bool(parcel.base) and parcel.keep in (True, False)
            assert parcel.wire.codec_of("w", "float32", (2, 3)) is None or not parcel.wire.plain
        again = Manifest.from_content({RECORD: found.to_record()})
        # Of a part that is sent as a whole the id is written, whatever was read.
        assert again.layout == found.layout and again.parcels == tuple(map(_as_written, found.parcels))


def _id(data: bytes) -> None:
    record = ConfigRecord({"manifest": data[1:], "id": data[:32].decode("latin-1")})
    with contextlib.suppress(ProtocolError):
        verified_id({RECORD: record})
        raise AssertionError("a wrong id was accepted")
    write_id({RECORD: record})
    assert verified_id({RECORD: record}) == record["id"]


def _header(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        found = Header.from_content({RECORD: {"header": data}}, 10)
        again = Header.from_content({RECORD: found.to_record()}, 10)
        assert again == found
        assert found.with_checksum({}).checksum


def _both(data: bytes) -> None:
    _manifest(data)
    _header(data)


_MANIFEST, _HEADER = bytes(MANIFEST.to_record()["manifest"]), bytes(HEADER.to_record()["header"])


def _of_compressed(data: bytes) -> Callable[[Random], bytes]:
    return of_json(json.loads(decompressed(data, 10**6)), compressed)


def _bomb(at_random: Random) -> bytes:
    """Up to 200 MB of one character in a few hundred kilobytes."""
    squeeze = zlib.compressobj(1)
    million = bytes([at_random.choice(b'[{" 1')]) * 1_000_000
    return b"".join(squeeze.compress(million) for _ in range(at_random.choice((2, 70, 200)))) + squeeze.flush()


# Packed parts and encodings -------------------------------------------------------------------------------------------

_DTYPES = ("float32", "float64", "float16", "int64", "int8", "uint8", "bool", "complex64")
_VALUES = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "d": np.ones((2, 5)), "n": np.array(7)}


def _layout_of(at_random: Random) -> bytes:
    """First what `_part` reads as wire and shapes, then the packed bytes."""
    number = at_random.randrange(len(_WIRES))
    data = bytes(pack(_VALUES, _VALUES, _WIRES[number], random=_WIRES[number].random(1)).data)
    shaped = [list(item) for item in shapes_of(_VALUES, _VALUES)]
    if at_random.random() < 0.6:
        item = at_random.choice(shaped)
        if at_random.random() < 0.5:
            item[1] = at_random.choice(_DTYPES)
        else:
            item[2] = [at_random.choice((0, 1, 3, 4, 12, -1, 2**40, 2**62)) for _ in range(at_random.randrange(4))]
    else:
        data = changed_bytes(data, at_random)
    head = json.dumps([number, shaped]).encode()
    return struct.pack("<H", len(head)) + head + data


_WIRES = (
    *(Wire(dtype, share) for share in (0.25, 0.9) for dtype in CODECS if dtype not in RANKS),
    *(Wire(dtype, differences=differences) for differences in (False, True) for dtype in CODECS),
    Wire(AUTO, left_out=0.1), Wire(AUTO, left_out=0.6, differences=True),
)  # fmt: skip


def _part(data: bytes) -> None:
    wire, shaped = PLAIN, [("w", "float32", (3, 4))]
    with contextlib.suppress(ValueError, struct.error, TypeError, KeyError, RecursionError):
        size = struct.unpack_from("<H", data)[0]
        number, items = json.loads(data[2 : 2 + size])
        wire = _WIRES[number % len(_WIRES)]
        shaped = [(str(n), _DTYPES[_DTYPES.index(d)], tuple(map(int, s))) for n, d, s in items]
        data = data[2 + size :]
    if (wire.top_k or wire.dtype == AUTO) and max((math.prod(shape) for _, _, shape in shaped), default=0) > 1 << 26:
        return  # a few bytes may stand for many zeros; the shapes are the reader's own
    array = Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
    try:
        found = dict(unpacked(array, shaped, wire))
    except ValueError:
        return
    for name, dtype, shape in shaped:
        assert found[name].dtype == dtype and found[name].shape == shape
    names = tuple(found)
    part = Part("model", "all", names, tuple(digest(found[name]) for name in names))
    assert unpack_checked(array, shaped, wire, part)[0].keys() == found.keys()
    assert unpack_checked(array, shaped, wire, Part("model", "all", names, known_id=part.id))[0].keys() == found.keys()
    for other in (replace(part, digests=(b"-" * 16,) * len(names)), Part("model", "all", names, known_id="0" * 32)):
        assert unpack_checked(array, shaped, wire, other) == ({}, {})
    starts = {name: np.ones_like(found[name]) for name, _, _ in shaped}
    with np.errstate(all="ignore"):
        sums, _ = unpack_checked(array, shaped, wire, None, "base", lambda: starts)
        for name, value in sums.items():
            np.testing.assert_array_equal(value, found[name] + 1 if wire.encodes(name, value) else found[name])
    other = unpack_checked(array, shaped, wire, part, "other base", dict)
    assert other == ({}, {}), "without the base nothing can be read"


_CODECS = (
    *CODECS.values(), *(TopK(share, of) for share in (0.01, 0.3, 0.9) for of in CODECS.values()),
    Steps(0.05), Steps(0.6), None,
)  # fmt: skip
"""None: a mixed one of a matrix of the shape."""


def _codec(data: bytes) -> None:
    if len(data) < 4:
        return
    shape = (data[1] % 40, data[2] % 40) if data[3] % 8 else (data[1] * 2**40, data[2])
    codec = _CODECS[data[0] % len(_CODECS)] or Mixed((shape,), Steps(0.6))
    with contextlib.suppress(ValueError):
        length = codec.length(shape, memoryview(data)[4:])
        assert length >= 0
        if length <= len(data) - 4:
            values = codec.read(memoryview(data)[4 : 4 + length], shape)
            assert values.shape == shape and values.dtype == np.float32


def _encoded(at_random: Random) -> bytes:
    number, rows, columns = (at_random.randrange(n) for n in (len(_CODECS), 40, 40))
    values = np.random.default_rng(at_random.randrange(100)).normal(size=(rows, columns)).astype(np.float32)
    if (codec := _CODECS[number]) is None:
        values += 5 * np.outer(np.arange(rows), np.arange(columns)).astype(np.float32)  # near a low rank
        codec = Mixed((values.shape,), Steps(0.6).fitted([values.size], lambda _: values))
    data = bytes(codec.write(values, None))
    return bytes([number, rows, columns, 1]) + (changed_bytes(data, at_random) if at_random.random() < 0.8 else data)


# Files ----------------------------------------------------------------------------------------------------------------


def _arrays_file() -> bytes:
    with folder() as path:
        write_arrays(path / "a", _VALUES, durable=False)
        return (path / "a").read_bytes()


def _with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(200)


def _header_of_file() -> Any:
    data = _arrays_file()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _arrays(data: bytes) -> None:
    with folder() as path:
        (path / "a").write_bytes(data)
        with contextlib.suppress(DamagedFile):
            assert all(isinstance(array, np.ndarray) for array in read_arrays(path / "a").values())
        with contextlib.suppress(DamagedFile):
            for array, value in map_arrays(path / "a").values():
                assert len(value) == 16 and array.sum() is not None


_CHECKPOINT = Checkpoint(
    round=3,
    experiment="e",
    seed=1,
    method={"name": "FedAvgMethod", "options": {}},
    layout="a" * 32,
    state={"model": {"w": np.ones((2, 2))}, "t": (1, 2.5, None, [True, "x"]), "of": Wire("int8", 0.5)},
    held={"c": ("1", "2")},
    current={"c": "3"},
    standing={"failures": {"c": 1}, "until": {}},
    clients=("c", "d"),
    history={"train": {"1": {"loss": 0.5}}},
)


def _checkpoint_files() -> tuple[bytes, bytes]:
    with folder() as path:
        Checkpoints(path).save(_CHECKPOINT)
        made = path / "round-000003"
        return (made / FACTS).read_bytes(), (made / STATE).read_bytes()


_FACTS_BYTES, _STATE_BYTES = _checkpoint_files()


def _with_digest(text: bytes) -> bytes:
    """Changed facts with the digest that belongs to them, where one can be computed."""
    value = b"0"
    with contextlib.suppress(ValueError, RecursionError):
        value = hashlib.sha256(json.dumps(json.loads(text)).encode()).hexdigest().encode()
    return b'{"format": 2, "sha256": "%s", "facts": %s}' % (value, text)


def _checkpoint(data: bytes) -> None:
    with folder() as path:
        made = path / "round-000003"
        made.mkdir()
        (made / FACTS).write_bytes(data)
        (made / STATE).write_bytes(_STATE_BYTES)
        with contextlib.suppress(CheckpointError):
            found = Checkpoints(path).latest()
            if found is not None:
                assert type(found.round) is int and type(found.seed) is int and isinstance(found.experiment, str)
                assert isinstance(found.layout, str) and all(isinstance(name, str) for name in found.clients)
                assert all(isinstance(one, dict) for one in (found.method, found.held, found.current, found.standing))
                assert isinstance(found.history, dict) and all(isinstance(of, dict) for of in found.history.values())
        with contextlib.suppress(DamagedFile, CheckpointError):
            Checkpoints(path).saved_state(3)


# Archives and folders of `tepal provision` ----------------------------------------------------------------------------


def _deployment() -> dict[str, bytes]:
    with folder() as path:
        made = make(path / "d", hosts=["localhost"], sites=["s"], node_config={"name": "s", "k": 1})
        site = make(path / "u", hosts=["localhost"], sites=["s"], unpacked=True).unpacked("s")
        return {
            "archive": made.archive("s").read_bytes(),
            **{file.name: file.read_bytes() for file in (*site.iterdir(), made.folder / "deployment.toml")},
        }


_FILES = _deployment()


def _archive_of(toml: bytes, at_random: Random) -> bytes:
    """An archive whose site.toml has this content, or is of another kind, or declares another size."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo(at_random.choice(("s/site.toml", "s/../s/site.toml", "/s/site.toml", "s/site.toml")))
        member.size = len(toml)
        member.type = at_random.choice((tarfile.REGTYPE,) * 5 + (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE))
        member.linkname = "s/site.toml"
        tar.addfile(member, io.BytesIO(toml))
    data = buffer.getvalue()
    return gzip.compress(changed_bytes(data, at_random) if at_random.random() < 0.7 else data, 1)


def _toml(at_random: Random) -> bytes:
    lines = [b'name = "s"', b'superlink = "localhost:9092"', b"[node-config]", b"k = 1"]
    odd = (b"k = nan", b"k = " + b"1" * 5000, b"k = " + b"[" * 50_000, b"a" + b".a" * 50_000 + b" = 1", b"k = 1e999")
    odd += (b'n = "\\ud800"', b"name = 1", b'superlink = "[::1"', b"k = \xff", b"k = 1979-05-27", b"[a]\n[a]")
    odd += (b"k = {a = 1}",)
    lines.insert(at_random.randrange(5), at_random.choice(odd))
    return b"\n".join(lines)


def _toml_bomb(at_random: Random) -> bytes:
    return _archive_of(b"#" * at_random.choice((1000, 100_001, 30_000_000)), Random(1))


def _archive(data: bytes) -> None:
    with folder() as path, contextlib.suppress(ProvisionError):
        (path / "s.tar.gz").write_bytes(data)
        assert isinstance(node_config_of(path / "s.tar.gz", path / "s", "s"), dict)


def _site(name: str) -> Callable[[bytes], None]:
    """A check of one file in a site's folder, of which the others are valid."""

    def check(data: bytes) -> None:
        with folder() as path, contextlib.suppress(ProvisionError):
            for file in ("ca.crt", "node.key", "site.toml"):
                (path / file).write_bytes(data if file == name else _FILES[file])
                (path / file).chmod(0o600)
            read_site(path)

    return check


def _settings(data: bytes) -> None:
    with folder() as path, contextlib.suppress(ProvisionError):
        (path / "server" / "nodes").mkdir(parents=True)
        (path / "sites").mkdir()
        (path / "server" / "ca.crt").write_bytes(_FILES["ca.crt"])
        (path / "deployment.toml").write_bytes(data)
        assert isinstance(made_in(path)[1], str)


def _keys(data: bytes) -> None:
    with folder() as path:
        (path / "s.pub").write_bytes(data)
        with contextlib.suppress(ProvisionError):
            assert fingerprint(path / "s.pub").startswith("SHA256:")
        with contextlib.suppress(ProvisionError):
            read_certificate(path / "s.pub")


# Run directories ------------------------------------------------------------------------------------------------------

_ROUND = {"round": 1, "train": {"loss": 0.5}, "clients": ["a", "b"], "seconds": 1.5, "evaluate": {"accuracy": 0.5}}


def _records_file() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones((2, 2)), b=np.arange(3))
    return buffer.getvalue()


def _run(data: bytes) -> None:
    with folder() as path:
        for name in ("metrics.jsonl", "config.toml", "summary.json", "labels.json", "label_counts.json"):
            (path / name).write_bytes(data)
        (path / "rounds").mkdir()
        (path / "rounds" / "000001.npz").write_bytes(data)
        assert find_run(path) == path.resolve()
        for read in (read_metrics, read_config, read_label_counts, read_summary):
            with contextlib.suppress(ValueError):
                read(path)
        read_json(path / "summary.json")
        assert all(isinstance(arrays, dict) for _, arrays in read_records(path))


DECODERS = {
    "manifest": Decoder(inputs(of_bytes(_MANIFEST), *[_of_compressed(_MANIFEST)] * 4), _manifest),
    "id": Decoder(inputs(of_bytes(b"0" * 33 + _MANIFEST)), _id, 0.3),
    "header": Decoder(inputs(of_bytes(_HEADER), *[_of_compressed(_HEADER)] * 4), _header),
    "bombs": Decoder(inputs(_bomb), _both, 0.01),
    "part": Decoder(inputs(_layout_of), _part, 1.5),
    "codec": Decoder(inputs(_encoded), _codec, 1.5),
    "arrays": Decoder(
        inputs(of_bytes(_arrays_file()), of_json(_header_of_file(), _with_header)),
        _arrays,
    ),
    "checkpoint": Decoder(
        inputs(of_bytes(_FACTS_BYTES), *[of_json(json.loads(_FACTS_BYTES)["facts"], _with_digest)] * 4), _checkpoint
    ),
    "archive": Decoder(
        inputs(
            of_bytes(_FILES["archive"]),
            lambda at_random: gzip.compress(changed_bytes(gzip.decompress(_FILES["archive"]), at_random), 1),
            lambda at_random: _archive_of(_toml(at_random), at_random),
        ),
        _archive,
    ),
    "archive bombs": Decoder(inputs(_toml_bomb), _archive, 0.005),
    "site.toml": Decoder(inputs(of_bytes(_FILES["site.toml"]), _toml), _site("site.toml"), 0.5),
    "node.key": Decoder(inputs(of_bytes(_FILES["node.key"])), _site("node.key"), 0.5),
    "ca.crt": Decoder(inputs(of_bytes(_FILES["ca.crt"])), _site("ca.crt"), 0.5),
    "deployment.toml": Decoder(inputs(of_bytes(_FILES["deployment.toml"]), _toml), _settings, 0.5),
    "keys": Decoder(inputs(of_bytes(public_line(new_key(), "s")), of_bytes(_FILES["ca.crt"])), _keys, 0.5),
    "run directory": Decoder(
        inputs(of_json(_ROUND, lambda text: text + b"\n"), of_json(_ROUND), of_bytes(_records_file())).filter(
            lambda data: data.count(b"[") < 1000
        ),
        _run,
        0.5,
    ),
}
