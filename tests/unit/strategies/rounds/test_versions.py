"""Servers and clients of different versions, and runs that an earlier version began."""

import hashlib
import json
import zlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from safetensors import safe_open
from safetensors.numpy import save_file

from tepal.exchange import partial_exchange
from tepal.exchange.cache import ClientCache
from tepal.exchange.files import DamagedFile, read_arrays
from tepal.exchange.layout import Layout
from tepal.exchange.manifest import PROTOCOL, RECORD, ProtocolError
from tepal.exchange.parts import Part, digest, earlier_digest
from tepal.exchange.plan import INTRODUCE, MODEL, Outgoing, Plan
from tepal.exchange.sender import ClientRefuses, OtherVersion, Sender
from tepal.strategies import FedACS, FedAvg
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.personal.store import ModelStore
from tepal.strategies.rounds.checkpoint import FACTS, STATE
from tepal.strategies.rounds.report import RoundFailed

START = {"w": np.zeros(3, np.float32)}


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch):
    """Messages that are made outside of a grid belong to a task, too."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def app():
    made = ClientApp(mods=[partial_exchange])

    @made.train()
    def train(msg, context):
        record = msg.content["arrays"]
        trained = ArrayRecord({"w": Array(record["w"].numpy() + np.float32(context.node_config["step"]))})
        return Message(RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return made


def nodes(folder):
    return [Node(app(), {"name": f"c{k}", "step": k, "cache-path": str(folder)}) for k in (1, 2)]


def introduction():
    """A server's sender, the content of its request to introduce oneself, and the exchange."""
    layout = Layout.of_arrays(START)
    sender = Sender(layout, {"all": layout.names}, experiment="e", record="arrays")
    plan = Plan(client="", round=1, action=INTRODUCE, needs={})
    return sender, *sender.content(Outgoing(plan, lambda tree: START))


def states_protocol(number, message):
    """Make a message one of another version's: protocol 1 is not stated."""
    if number == 1:
        del message.content[RECORD]["protocol"]
    else:
        message.content[RECORD]["protocol"] = number


# ---- server and clients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "client's version of Tepal has protocol 1, and the server's has 9: install the newer one on the client"),
        (10, "client's version of Tepal has protocol 10, and the server's has 9: install the newer one on the server"),
    ],
)
def test_a_client_of_another_version_is_refused_and_the_log_says_which_side_to_update(tmp_path, caplog, number, words):
    asked = []

    def other(node, message, reply):
        asked.append(message.metadata.message_type)
        states_protocol(number, reply)
        return reply

    grid = InProcessGrid(nodes(tmp_path), spoil=other)
    strategy = FedAvg(min_available_nodes=2, fraction_evaluate=0)
    with pytest.raises(RoundFailed, match=words):
        strategy.start(grid, ArrayRecord({"w": Array(START["w"])}), num_rounds=1, timeout=1)
    assert words in caplog.text and len(asked) == 2, "each is asked once: it stays as it is until it is restarted"


@pytest.mark.parametrize("number", [2, 8, 10])
def test_a_server_of_another_version_reads_why_its_client_refuses(tmp_path, number):
    sender, content, exchange = introduction()
    message = Message(content, 1, "train")
    states_protocol(number, message)
    context = Context(1, 1, {"name": "c1", "cache-path": str(tmp_path)}, RecordDict(), {})
    reply = partial_exchange(message, context, lambda message, context: pytest.fail("the app is not called"))

    # Other versions may not know the dictionary of words. The checksum is SHA-256 of the header's text: there are no
    # packed parts.
    assert json.loads(zlib.decompress(content[RECORD]["manifest"]))["plan"]["action"] == INTRODUCE
    header = json.loads(zlib.decompress(reply.content[RECORD]["header"]))
    text = json.dumps({**header, "checksum": ""}, separators=(",", ":")).encode()
    assert header["checksum"] == hashlib.sha256(text).hexdigest()[:32]
    assert header["answers"] == exchange.id and header["client"] == "c1"
    where = "server" if number < PROTOCOL else "client"
    words = f"the server's version of Tepal has protocol {number}, and the client's has {PROTOCOL}"
    assert header["refused"] == f"{words}: install the newer one on the {where} as well"
    with pytest.raises(ClientRefuses, match=words):
        sender.read(exchange, reply)


@pytest.mark.parametrize("key", ["manifest", "id"])
def test_a_client_that_cannot_read_a_later_servers_message_says_which_side_to_update(tmp_path, key):
    """Later versions may write ids and manifests in other ways."""
    _, content, _ = introduction()
    content[RECORD][key] = b"other" if key == "manifest" else "other"
    states_protocol(PROTOCOL + 1, message := Message(content, 1, "train"))
    context = Context(1, 1, {"name": "c1", "cache-path": str(tmp_path)}, RecordDict(), {})
    with pytest.raises(ProtocolError, match="install the newer one on the client as well"):
        partial_exchange(message, context, None)


@pytest.mark.parametrize("stated", ["2", 2.5, True, b"2", [2]])
def test_a_protocol_that_is_no_number_is_refused(tmp_path, stated):
    sender, content, exchange = introduction()
    context = Context(1, 1, {"name": "c1", "cache-path": str(tmp_path)}, RecordDict(), {})
    reply = partial_exchange(Message(content, 1, "train"), context, None)
    reply.content[RECORD]["protocol"] = stated
    with pytest.raises(OtherVersion, match="is no number"):
        sender.read(exchange, reply)


# ---- files ---------------------------------------------------------------------------------------------------------


def as_earlier_version_wrote(path):
    """Rewrite a file of arrays with the digests of earlier versions: SHA-256 of dtype, shape and elements."""
    with safe_open(path, "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = {"arrays": str(len(arrays))}
    for name, array in arrays.items():
        text = f"{array.dtype.name}{array.shape}".encode()
        metadata[f"sha256/{name}"] = hashlib.sha256(text + array.tobytes()).hexdigest()[:32]
    save_file(arrays, path, metadata=metadata)


def checkpoint_as_earlier_version_wrote(folder):
    as_earlier_version_wrote(folder / STATE)
    facts = json.loads((folder / FACTS).read_text())
    assert facts["format"] == 2
    (folder / FACTS).write_text(json.dumps({**facts, "format": 1}))


def test_arrays_of_an_earlier_version_are_read_and_verified(tmp_path):
    path, array = tmp_path / "a.safetensors", np.arange(6, dtype=np.int16).reshape(2, 3)
    save_file({"a": array, "b": np.float64([0.5])}, path)
    as_earlier_version_wrote(path)
    assert earlier_digest(array).hex() == safe_open(path, "np").metadata()["sha256/a"] != digest(array).hex()
    found = read_arrays(path)
    assert found["a"].tolist() == array.tolist() and found["b"].tolist() == [0.5]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match="1 entries do not have their digests"):
        read_arrays(path)


def run(method, folder, rounds, *, resume=False):
    strategy = method(min_available_nodes=2, fraction_evaluate=0, checkpoints=folder / "run", resume=resume)
    grid = InProcessGrid(nodes(folder / "cache"))
    return strategy.start(grid, ArrayRecord({"w": Array(START["w"])}), num_rounds=rounds).arrays["w"].numpy().tolist()


def test_a_run_that_an_earlier_version_began_is_resumed_bit_for_bit(tmp_path, caplog):
    whole = run(FedAvg, tmp_path / "whole", 3)
    run(FedAvg, tmp_path / "part", 2)
    checkpoint_as_earlier_version_wrote(tmp_path / "part" / "run" / "round-000002")
    assert run(FedAvg, tmp_path / "part", 3, resume=True) == whole == [4.5, 4.5, 4.5]
    assert "Resumed after round 2" in caplog.text


def test_rows_of_personal_models_have_the_digest_of_either_version(tmp_path):
    values = np.linspace(0, 1, 5, dtype=np.float32)
    store = ModelStore(tmp_path / "models.bin", 5)
    slot, other = store.write([values]), store.write([values + 1])
    earlier = hashlib.sha256(values.tobytes()).hexdigest()[:32]
    for name in (earlier, store.digest(slot)):
        assert store.has_digest(slot, name) and not store.has_digest(other, name)


def test_personal_models_of_an_earlier_version_are_resumed(tmp_path, monkeypatch, caplog):
    whole = run(FedACS, tmp_path / "whole", 3)
    with monkeypatch.context() as earlier:
        earlier.setattr(ModelStore, "digest", lambda store, slot: hashlib.sha256(store.row(slot)).hexdigest()[:32])
        run(FedACS, tmp_path / "part", 2)
    checkpoint_as_earlier_version_wrote(tmp_path / "part" / "run" / "round-000002")
    assert run(FedACS, tmp_path / "part", 3, resume=True) == whole
    assert "Resumed after round 2" in caplog.text and "damaged" not in caplog.text


def test_a_part_that_an_earlier_version_cached_is_not_used_and_is_replaced(tmp_path):
    values = {"a": np.arange(4, dtype=np.float32)}
    before = Part(MODEL, "all", ("a",), (earlier_digest(values["a"]),))
    now = Part(MODEL, "all", ("a",), (digest(values["a"]),))
    cache = ClientCache(tmp_path, "e", "c1")
    cache.keep(before, values)
    (file,) = tmp_path.glob("*/content/*.safetensors")
    as_earlier_version_wrote(file)
    assert cache.find(now) == {}
    cache.keep(now, values)
    assert cache.holds() == (now.id,) and cache.find(now)["a"].tolist() == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.glob("*/content/*.safetensors")] == [f"{now.id}.safetensors"]
