"""Who has a name: the first holder for the run, by its secret, or the node whose key is registered under it."""

import os

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange, received
from tepal.exchange.header import Header
from tepal.exchange.manifest import RECORD
from tepal.exchange.secret import own_secret, proof_of
from tepal.strategies import FedAvg
from tepal.strategies.in_process import InProcessGrid, Node

START = {"w": np.zeros(3, np.float32)}


def app():
    made = ClientApp(mods=[partial_exchange])

    @made.train()
    def train(msg, context):
        came = received(msg)
        before = came.personal.load()
        came.personal.save({"rounds": before.get("rounds", np.zeros(1)) + 1})
        metrics = {"num-examples": 1, f"rounds-of-{context.node_config['who']}": float(before.get("rounds", [0])[0])}
        record = ArrayRecord({"w": Array(came.model["w"] + np.float32(1))})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=msg)

    @made.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return made


class Site:
    """A machine of its own: a cache folder, and the name under which it introduces itself."""

    def __init__(self, folder, who, name, registered=""):
        config = {"name": name, "who": who, "cache-path": str(folder / who)}
        self.node = Node(app(), config, registered)


def run(grid, at=None, rounds=4, **options):
    history = []

    def on_round(report):
        history.append(report)
        if at and report.round in at:
            at[report.round]()

    strategy = FedAvg(on_round=on_round, min_available_nodes=1, fraction_evaluate=0, **options)
    strategy.start(grid, ArrayRecord({"w": Array(START["w"])}), num_rounds=rounds)
    return history


@pytest.mark.parametrize("name", ["Client-0", "client\u20110", "\uff43lient-0"])
def test_a_name_that_looks_like_another_clients_is_marked(tmp_path, name):
    grid = InProcessGrid([Site(tmp_path, "first", "client-0").node, Site(tmp_path, "second", name).node])
    history = run(grid, rounds=2)
    assert "client-0" in history[1].replied
    (other,) = set(history[1].replied) - {"client-0"}
    assert other.endswith("@2")


@pytest.mark.parametrize("gone", [False, True])
def test_an_impostor_does_not_get_the_name(tmp_path, gone, caplog):
    """Neither while its holder is connected nor after it has left."""
    grid = InProcessGrid([])
    holder = grid.add(Site(tmp_path, "holder", "client-0").node)
    grid.add(Site(tmp_path, "other", "client-1").node)

    def come():
        if gone:
            grid.remove(holder)
        grid.add(Site(tmp_path, "impostor", "client-0").node)

    history = run(grid, {2: come})
    assert sorted(history[0].replied) == ["client-0", "client-1"]
    assert sorted(history[3].replied) == [*["client-0"][: not gone], "client-0@3", "client-1"]
    assert "the name 'client-0', or one that looks the same; node 3 is now called 'client-0@3'" in caplog.text


@pytest.mark.parametrize("listed", [False, True])
def test_the_holder_gets_its_name_back_as_another_node(tmp_path, listed, caplog):
    """Also while its killed process is still listed; and with the name its personal state."""
    grid = InProcessGrid([])
    holder = grid.add(Site(tmp_path, "holder", "client-0").node)
    grid.add(Site(tmp_path, "other", "client-1").node)

    caplog.set_level("INFO", logger="flwr")

    def restart():
        if not listed:
            grid.remove(holder)
        grid.add(Site(tmp_path, "holder", "client-0").node)

    history = run(grid, {2: restart})
    assert sorted(history[3].replied) == ["client-0", "client-1"]
    assert history[3].train_metrics["rounds-of-holder"] == 3
    assert "client-0 is back, as node 3." in caplog.text
    assert ("Node 1, which had the name, still counts as connected" in caplog.text) == listed


def test_names_are_held_when_the_run_is_resumed(tmp_path):
    folder = tmp_path / "checkpoints"
    run(InProcessGrid([Site(tmp_path, "a", "client-0").node, Site(tmp_path, "b", "client-1").node]), rounds=2,
        checkpoints=folder)  # fmt: skip
    sites = [Site(tmp_path, who, name).node for who, name in (("impostor", "client-0"), ("b", "client-1"))]
    history = run(InProcessGrid(sites), checkpoints=folder, resume=True)
    assert sorted(history[0].replied) == ["client-0@1", "client-1"]
    sites = [Site(tmp_path, who, name).node for who, name in (("b", "client-1"), ("a", "client-0"))]
    history = run(InProcessGrid(sites), rounds=6, checkpoints=folder, resume=True)
    assert sorted(history[0].replied) == ["client-0", "client-1"]


def test_of_two_that_come_together_the_holder_is_told_by_its_secret(tmp_path):
    grid = InProcessGrid([])
    first = grid.add(Site(tmp_path, "holder", "client-0").node)
    grid.add(Site(tmp_path, "other", "client-1").node)

    def both():
        grid.remove(first)
        grid.add(Site(tmp_path, "impostor", "client-0").node)
        grid.add(Site(tmp_path, "holder", "client-0").node)

    history = run(grid, {1: both})
    assert "rounds-of-holder" in history[1].train_metrics
    assert history[3].train_metrics["rounds-of-holder"] == 3 and "client-0@3" in history[3].replied


def test_a_registered_key_has_precedence(tmp_path):
    grid = InProcessGrid([])
    grid.add(Site(tmp_path, "self-named", "site-1").node)
    history = run(grid, {1: lambda: grid.add(Site(tmp_path, "real", "", "site-1").node)})
    assert "site-1" in history[3].replied and history[3].train_metrics["rounds-of-real"] == 2


def test_a_client_without_a_secret_gets_its_name_back_once_its_node_is_gone(tmp_path, monkeypatch):
    """Its folder cannot be written, or it is of an earlier version."""

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("tepal.exchange.mod.own_secret", full)
    grid = InProcessGrid([])
    first = grid.add(Site(tmp_path, "plain", "client-0").node)
    grid.add(Site(tmp_path, "other", "client-1").node)

    def again():
        grid.remove(first)
        grid.add(Site(tmp_path, "plain", "client-0").node)

    history = run(grid, {2: again})
    assert sorted(history[3].replied) == ["client-0", "client-1"]
    assert any("its secret cannot be stored" in note for _, note in history[0].notes)


def test_the_secret_is_sent_in_introductions_alone_and_stays_out_of_every_text(tmp_path, caplog):
    seen = {}

    def look(node, message, reply):
        seen.setdefault(Header.from_content(reply.content).action, []).append(reply.content[RECORD]["header"])
        return reply

    sites = [Site(tmp_path, "a", "client-0").node, Site(tmp_path, "b", "client-1", "client-1").node]
    caplog.set_level("DEBUG", "flwr")
    run(InProcessGrid(sites, spoil=look), checkpoints=tmp_path / "checkpoints", rounds=2)
    secrets = {}
    for action, headers in seen.items():
        for header in headers:
            found = Header.from_content({RECORD: {"header": header}})
            assert "secret" not in repr(found)
            secrets.setdefault(action, set()).add(found.secret)
    (secret,) = secrets.pop("introduce") - {""}
    assert secrets == {"train": {""}}, "and a node with a registered key needs none"
    assert secret not in caplog.text
    checkpoint = (tmp_path / "checkpoints" / "round-000002" / "checkpoint.json").read_text()
    assert secret not in checkpoint and proof_of(secret) in checkpoint


def test_a_secret_is_made_once_for_a_folder_and_differs_between_runs_and_names(tmp_path):
    path = tmp_path / "cache" / "secret"
    one = own_secret(path, "run", "client-0")
    assert one == own_secret(path, "run", "client-0")
    others = {own_secret(path, "run", "client-1"), own_secret(path, "run-2", "client-0"),
              own_secret(tmp_path / "other" / "secret", "run", "client-0")}  # fmt: skip
    assert one not in others and len(others) == 3
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert len(one) == 64 and one not in path.read_text()
    path.write_text("cut")
    with pytest.raises(OSError, match="is damaged"):
        own_secret(path, "run", "client-0")
