"""A real SuperLink and three real SuperNodes: this project's app against its own simulation, and a foreign app."""

import json
import os
import re
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tepal.models import build
from tepal.models.blocks import find_blocks
from tepal.server_app.flower import app_run_config, explain
from tepal.server_app.processes import MARK, marked
from tepal.server_app.run_directory import read_metrics
from tepal.server_app.simulation import simulate
from tests.integration.loopback import ROOT, loopback, partitions

pytestmark = pytest.mark.deployment

CLIENTS = 3


@pytest.fixture(scope="module")
def deployment():
    with loopback(partitions(CLIENTS), warm=False) as running:
        yield running


def test_a_failing_block_leaves_no_process_and_no_folder(monkeypatch):
    token = f"loopback-failing-{os.getpid()}"
    monkeypatch.setenv(MARK, token)
    with pytest.raises(ZeroDivisionError), loopback(partitions(1), warm=False) as running:
        commands = [" ".join(process.cmdline()) for process in marked(token)]
        for program in ("flower-superlink", "flower-supernode", "flower-superexec"):
            assert any(program in command for command in commands)
        _ = 1 / 0
    assert marked(token) == []
    assert not running.folder.exists()


# This project's app ---------------------------------------------------------------------------------------------------

CONFIG = {
    "strategy": "fedfrozen",
    "model": "tiny-vit",
    "dataset": "digits",
    "num-server-rounds": 4,
    "fedfrozen.warmup-rounds": 2,
    "min-clients": CLIENTS,
    "optimizer": "sgd",
    "learning-rate": 0.05,
    "local-epochs": 1,
    "schedule": "constant",
    "deterministic": True,
}


def vit():
    """The model of CONFIG as it starts: seed 42 is the run config's default."""
    return build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=42)


@pytest.fixture(scope="module")
def deployed(deployment, tmp_path_factory) -> Path:
    """The run directory of CONFIG in deployment."""
    runs = tmp_path_factory.mktemp("deployed")
    outcome = deployment.run(ROOT, {**CONFIG, "runs": str(runs)})
    log = outcome.log.read_text()
    assert outcome.status == "completed", explain(log, outcome.details)
    seconds = [round(line["seconds"], 1) for line in read_metrics(runs / "latest")]
    print(f"deployment: {outcome.seconds}, seconds of each round: {seconds}")
    return (runs / "latest").resolve()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """The run directory of CONFIG in simulation."""
    runs = tmp_path_factory.mktemp("simulated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEPAL_CACHE", str(runs / "cache"))
        outcome = simulate(ROOT, clients=CLIENTS, run_config={**CONFIG, "runs": str(runs)}, log=runs / "run.log")
    print(f"simulation: {outcome.seconds}")
    return (runs / "latest").resolve()


def test_deployment_and_simulation_end_with_the_same_model(deployed, simulated):
    ours, theirs = load_file(deployed / "model.safetensors"), load_file(simulated / "model.safetensors")
    start = vit().state_dict()
    assert ours.keys() == theirs.keys() == start.keys()
    differences = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ours}
    print(f"largest difference of an element: {max(differences.values())}")
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6, err_msg=name)
    # A model that did not learn is no evidence. (Softmax does not see a key's bias.)
    learned = {name: float(np.abs(ours[name] - start[name].numpy()).max()) for name in ours if "key.bias" not in name}
    assert min(learned.values()) > 1e-4


def test_deployment_and_simulation_measure_the_same(deployed, simulated):
    ours, theirs = read_metrics(deployed), read_metrics(simulated)
    assert [line["round"] for line in ours] == [line["round"] for line in theirs] == [0, 1, 2, 3, 4]
    own = {"seconds", "seconds_train", "step_seconds", "bytes_overhead"}  # an experiment's id and times are a run's own
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            if key not in own:
                assert mine[key] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value), key


def test_the_frozen_block_goes_down_once_and_never_up_again(deployed):
    blocks = find_blocks(vit())
    full = CLIENTS * blocks.layout.nbytes()
    theta = CLIENTS * blocks.layout.nbytes(blocks.value)
    assert full - theta == CLIENTS * 2 * 2 * (64 * 64 + 64) * 4, "depth x (query and key) x (weight and bias) x float32"
    rounds = read_metrics(deployed)[1:]
    assert [line["phase"] for line in rounds] == ["warm-up", "warm-up", "frozen", "frozen"]
    assert [line["bytes_up"] for line in rounds] == [full, full, theta, theta]
    # After the last round the clients score the model: the value block goes down once more.
    assert [line["bytes_down"] for line in rounds] == [full, full, full, 2 * theta]
    assert [line["bytes_fedavg"] for line in rounds] == [2 * full] * 3 + [3 * full]
    assert [line["resent"] for line in rounds] == [0, 0, 0, 0]


def test_the_run_directory_is_complete(deployed):
    assert sorted(path.name for path in deployed.iterdir()) == [
        "blocks.json", "checkpoint", "clients.json", "config.toml", "labels.json", "metrics.jsonl", "model.safetensors",
        "now.json", "report.html", "rounds", "summary.json",
    ]  # fmt: skip
    latest = deployed.parent / "latest"
    assert latest.is_symlink() and latest.resolve() == deployed
    config = tomllib.loads((deployed / "config.toml").read_text())
    assert config.items() >= CONFIG.items()
    assert config.keys() == app_run_config(ROOT).keys(), "defaults are written down too"
    summary = json.loads((deployed / "summary.json").read_text())
    rounds = read_metrics(deployed)
    parameters = sum(parameter.numel() for parameter in vit().parameters())
    moved = {key: sum(line[key] for line in rounds) for key in ("bytes_up", "bytes_down", "bytes_fedavg")}
    assert {key: summary[key] for key in ("strategy", "model", "parameters", "rounds", "bytes_up", "bytes_down")} == {
        "strategy": "fedfrozen",
        "model": "tiny-vit",
        "parameters": parameters,
        "rounds": 4,
        "bytes_up": moved["bytes_up"],
        "bytes_down": moved["bytes_down"],
    }
    assert summary["bytes_vs_fedavg"] == (moved["bytes_up"] + moved["bytes_down"]) / moved["bytes_fedavg"]
    assert (summary["accuracy"], summary["loss"]) == (rounds[-1]["accuracy"], rounds[-1]["loss"])
    assert summary["refused_replies"] == 0
    assert sum(line["seconds"] for line in rounds) <= summary["seconds"]
    report = (deployed / "report.html").read_text()
    assert report.lstrip().lower().startswith("<!doctype html>") and "fedfrozen" in report


def test_a_bad_run_config_fails_the_run_in_the_words_of_the_server_app(deployment, tmp_path):
    """Plain `flwr run` checks nothing but the names of keys, so it is the ServerApp that must say what is wrong."""
    outcome = deployment.run(ROOT, {"strategy": "fedfrosen", "local-epochs": -1, "runs": str(tmp_path / "runs")})
    assert outcome.status == "failed"
    said = explain(outcome.log.read_text(), outcome.details)
    assert "ConfigError: the run config cannot be run:" in said
    assert "strategy='fedfrosen': did you mean 'fedfrozen'? known are fedavg, fedfrozen" in said
    assert "local-epochs=-1: " in said
    assert "(server_app/config.py, line " in said, "the code that ran is the bundle's, not the checkout's"
    assert not (tmp_path / "runs").exists()


# An app that knows nothing of this project but the import and use of its mod and its strategy -------------------------

QUICKSTART = {
    "pyproject.toml": """
        [project]
        name = "quickstart"
        version = "1.0.0"
        description = "A small transformer on digits"
        license = "Apache-2.0"
        dependencies = ["flwr", "scikit-learn", "torch"]

        [tool.flwr.app]
        publisher = "somebody"

        [tool.flwr.app.components]
        serverapp = "server_app:app"
        clientapp = "client_app:app"

        [tool.flwr.app.config]
        num-server-rounds = 2
        learning-rate = 0.01
        """,
    "task.py": '''
        """What there is to learn. Nothing here knows of federated learning."""

        import torch
        from sklearn.datasets import load_digits
        from torch import nn


        class Net(nn.Module):
            """The rows of an image are the tokens of a small transformer."""

            def __init__(self):
                super().__init__()
                self.embedding = nn.Linear(8, 32)
                layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
                self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
                self.classifier = nn.Linear(32, 10)

            def forward(self, images):
                return self.classifier(self.encoder(self.embedding(images)).mean(1))


        def load_data(partition, partitions):
            digits = load_digits()
            images = torch.tensor(digits.images[partition::partitions] / 16, dtype=torch.float32)
            return images.split(32), torch.tensor(digits.target[partition::partitions]).split(32)


        def train(model, images, labels, lr):
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
            for batch, target in zip(images, labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch), target)
                loss.backward()
                optimizer.step()
            return loss.item()
        ''',
    "client_app.py": '''
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from task import Net, load_data
        from task import train as train_fn
        from tepal.exchange import partial_exchange

        app = ClientApp(mods=[partial_exchange])


        @app.train()
        def train(msg, context):
            model = Net()
            model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            # the line
            images, labels = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
            loss = train_fn(model, images, labels, msg.content["config"]["lr"])
            metrics = {"train_loss": loss, "num-examples": sum(map(len, labels))}
            content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
            return Message(RecordDict(content), reply_to=msg)
        ''',
    "server_app.py": '''
        import torch
        from flwr.app import ArrayRecord, ConfigRecord
        from flwr.serverapp import ServerApp
        from task import Net
        from tepal.strategies import FedFrozen

        app = ServerApp()


        @app.main()
        def main(grid, context):
            torch.manual_seed(0)
            model = Net()
            strategy = FedFrozen(warmup_rounds=1, model=model, min_available_nodes=3, fraction_evaluate=0.0)
            strategy.on_round = lambda r: print(f"round {r.round}: {len(r.replied)} replies, {r.up.payload} bytes up")
            strategy.start(
                grid=grid,
                initial_arrays=ArrayRecord(model.state_dict()),
                train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
                num_rounds=context.run_config["num-server-rounds"],
            )
        ''',
}


def quickstart(folder: Path, call: str = "") -> Path:
    """Write the app into `folder`; `call` is a line of its training function."""
    folder.mkdir()
    for name, text in QUICKSTART.items():
        (folder / name).write_text(textwrap.dedent(text).lstrip().replace("# the line", call))
    return folder


def uploads(log: str) -> dict[int, tuple[int, int]]:
    """Round → (replies, bytes up), as the ServerApp printed them."""
    return {int(r): (int(n), int(b)) for r, n, b in re.findall(r"round (\d+): (\d+) replies, (\d+) bytes up", log)}


# Bytes of the app's model: embedding, attention's four projections, two norms, the feed-forward layers, classifier.
QUERY_AND_KEY = 4 * 2 * (32 * 32 + 32)
MODEL = 4 * ((8 * 32 + 32) + 4 * (32 * 32 + 32) + 2 * 2 * 32 + (32 * 64 + 64) + (64 * 32 + 32) + (32 * 10 + 10))


def test_a_foreign_app_without_apply_plan_is_told_the_line_that_it_lacks(deployment, tmp_path):
    outcome = deployment.run(quickstart(tmp_path / "quickstart"))
    log = outcome.log.read_text()
    assert outcome.status == "failed"
    said = explain(log, outcome.details)
    assert said.startswith("RoundFailed: round 2 ")
    assert "call `apply_plan(model, msg)` (from tepal.client_app import apply_plan)" in said
    assert "'encoder.layers.0.self_attn.in_proj_weight:q' first" in said
    assert uploads(log)[1] == (CLIENTS, CLIENTS * MODEL)
    print(f"foreign app, refused: {outcome.seconds}")


def test_with_that_line_the_foreign_app_completes_and_its_frozen_round_uploads_less(deployment, tmp_path):
    line = "from tepal.client_app import apply_plan; apply_plan(model, msg)"
    outcome = deployment.run(quickstart(tmp_path / "quickstart", line))
    log = outcome.log.read_text()
    assert outcome.status == "completed", explain(log, outcome.details)
    assert uploads(log) == {1: (CLIENTS, CLIENTS * MODEL), 2: (CLIENTS, CLIENTS * (MODEL - QUERY_AND_KEY))}
    print(f"foreign app: {outcome.seconds}")


# Sites with data of their own ---------------------------------------------------------------------------------------


def test_sites_train_on_their_own_data_under_their_own_names(tmp_path):
    """One has a .npz file, one an image folder, and a third nothing that can be read: it alone is left out."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "scans.npz", images=images, labels=labels)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "scans" / f"class-{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "scans" / f"class-{label}" / f"{number}.png")
    (tmp_path / "nothing").mkdir()
    sites = {"north": "scans.npz", "south": "scans", "west": "nothing"}
    config = {
        **CONFIG, "dataset": "local", "image-shape": "1x8x8", "classes": 3, "num-server-rounds": 2,
        "fedfrozen.warmup-rounds": 1, "min-clients": 2, "runs": str(tmp_path / "runs"),
    }  # fmt: skip
    with loopback([f'name="{name}" data-path="{tmp_path / data}"' for name, data in sites.items()]) as running:
        outcome = running.run(ROOT, config)
        log = outcome.log.read_text()
    assert outcome.status == "completed", explain(log, outcome.details)
    rounds = read_metrics(tmp_path / "runs" / "latest")
    assert [(line["round"], line["phase"], line["clients_replied"]) for line in rounds] == [
        (1, "warm-up", 2), (2, "frozen", 2)
    ]  # fmt: skip
    assert {line["accuracy_of"] for line in rounds} == {"clients"}, "the server has no data"
    refused = [reply for line in rounds for reply in line["refused"]]
    assert [reply["client"] for reply in refused] == ["west"] and str(tmp_path / "nothing") in refused[0]["reason"]
    assert "west gives no result in round 1" in log
