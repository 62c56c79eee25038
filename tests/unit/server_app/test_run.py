"""The whole of a run, server and clients, in one process: config, data, rounds, run directory."""

import errno
import json
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from PIL import Image
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from tepal.client_app.local_client import LocalClient
from tepal.models import build
from tepal.models.blocks import find_blocks
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory, RunInUse, read_config, read_label_counts
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.config.earlier import as_of_now
from tepal.server_app.run import _load_first, _starts, build_model, build_strategy, run
from tepal.strategies import FedACS, FedAMP, FedBE, FedEnsemble, PFedMe, RoundFailed, RoundReport, SelectiveLayers
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds import checkpoint
from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.data import DataConfig, load_client
from tests.lines import read_lines
from tests.packages import ROOT

SMALL = {"num-server-rounds": 3, "local-steps": 2, "fedfrozen.warmup-rounds": 1}


def client_app() -> ClientApp:
    from client_app.app import app  # as Flower loads it

    return app


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))

    def start(clients=3, nodes=None, report=False, **values):
        given = {**SMALL, "runs": str(tmp_path / "runs"), **{k.replace("_", "-"): v for k, v in values.items()}}
        config = {**defaults(), **given}
        nodes = nodes or [{"partition-id": k, "num-partitions": clients} for k in range(clients)]
        grid = InProcessGrid([Node(client_app(), node) for node in nodes], config)
        with monkeypatch.context() as patched:
            if not report:  # to draw it takes longer than a few rounds
                patched.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")
            return run(grid, config)

    return start


def test_sites_with_data_in_different_formats_train_together(small_run, tmp_path):
    """Digits as arrays, as a folder of images, and as a table of them, in three sizes."""
    digits = load_digits()
    images, labels = (digits.images * 255 / 16).astype(np.uint8), digits.target
    np.savez(tmp_path / "arrays.npz", x=images[:200], y=labels[:200])
    for name in range(10):
        (tmp_path / "folder" / str(name)).mkdir(parents=True)
    rows = []
    for number in range(200, 600):
        picture = Image.fromarray(images[number]).resize((12, 12) if number < 400 else (16, 16)).convert("RGB")
        if number < 400:
            picture.save(tmp_path / "folder" / str(labels[number]) / f"{number}.png")
        else:
            picture.save(tmp_path / f"{number}.png")
            rows.append(f"{number}.png,{labels[number]}\n")
    (tmp_path / "table.csv").write_text("image,label\n" + "".join(rows))
    nodes = [{"data-path": str(tmp_path / name), "name": name} for name in ("arrays.npz", "folder", "table.csv")]
    local = {"dataset": "local", "image_shape": "1x8x8", "classes": 10, "normalise": "0.3/0.4"}
    path = small_run(nodes=nodes, strategy="fedavg", local_steps=0, local_epochs=4, batch_size=16, **local)
    last = read_lines(path)[-1]
    assert last["clients_replied"] == 3 and not last["refused"]
    assert last["accuracy"] > 0.4


def test_a_run_tells_which_labels_its_partition_has_where_and_nothing_of_a_sites_own_data(small_run, tmp_path):
    values = {"partitioner": "dirichlet", "dirichlet_alpha": 0.2, "num_server_rounds": 1}
    told = read_label_counts(small_run(strategy="fedavg", **values))
    config = DataConfig(**values)
    for k in range(3):
        data = load_client(config, {"partition-id": k, "num-partitions": 3}, client=f"client-{k}")
        labels = [*data.train.labels.tolist(), *data.test.labels.tolist()]
        assert told[f"client-{k}"] == [labels.count(label) for label in range(10)]
    digits = load_digits()
    np.savez(tmp_path / "own.npz", x=digits.images[:200].astype(np.uint8), y=digits.target[:200])
    nodes = [{"data-path": str(tmp_path / "own.npz"), "name": name} for name in "ab"]
    local = {"dataset": "local", "image_shape": "1x8x8", "classes": 10}
    assert read_label_counts(small_run(nodes=nodes, strategy="fedavg", num_server_rounds=1, **local)) == {}


def test_a_damaged_file_of_labels_does_not_end_a_run(small_run, monkeypatch, caplog):
    create = RunDirectory.create

    def damaged(*args, **options):
        directory = create(*args, **options)
        (directory.path / "labels.json").write_text('{"client-0": [1e60]}')
        return directory

    monkeypatch.setattr(RunDirectory, "create", damaged)
    path = small_run(strategy="fedavg", num_server_rounds=2, report=True)
    assert [line["clients_replied"] for line in read_lines(path)[1:]] == [3, 3]
    assert f"{path / 'labels.json'} is damaged" in caplog.text


def test_the_server_scores_as_often_as_it_is_asked_to(small_run):
    each, *others = (read_lines(small_run(strategy="fedavg", evaluate_every=n)) for n in (1, 2, 5))
    assert [line["round"] for line in each if line["accuracy_of"] == "server"] == [0, 1, 2, 3]
    for some, scored in zip(others, ([0, 2, 3], [0, 3]), strict=True):
        assert [line["round"] for line in some if line["accuracy_of"] == "server"] == scored
        for line, other in zip(each, some, strict=True):
            assert line["received_accuracy"] == other["received_accuracy"]
            if line["round"] in scored:
                assert (line["accuracy"], line["loss"]) == (other["accuracy"], other["loss"])


def test_a_run_leaves_everything_in_its_directory(small_run):
    path = small_run(report=True)
    assert {p.name for p in path.iterdir()} == {
        "config.toml", "metrics.jsonl", "model.safetensors", "summary.json", "report.html", "checkpoint", "labels.json",
        "rounds", "blocks.json", "now.json", "clients.json",
    }  # fmt: skip
    assert (path.parent / "latest").resolve() == path
    metrics = read_lines(path)
    assert [(m["round"], m["phase"]) for m in metrics] == [(0, "initial"), (1, "warm-up"), (2, "frozen"), (3, "frozen")]
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=42)
    layout, phi = find_blocks(model).layout, find_blocks(model).query_key
    theta = layout.nbytes() - layout.nbytes(phi)
    assert [m["bytes_up"] for m in metrics] == [0, 3 * layout.nbytes(), 3 * theta, 3 * theta]
    assert [m["bytes_down"] for m in metrics] == [0, 3 * layout.nbytes(), 3 * layout.nbytes(), 2 * 3 * theta]
    summary = json.loads((path / "summary.json").read_text())
    assert list(summary)[:12] == [
        "strategy", "model", "parameters", "rounds", "accuracy", "loss", "bytes_up", "bytes_down", "bytes_vs_fedavg",
        "bytes_plain", "seconds", "refused_replies",
    ]  # fmt: skip
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["accuracy"] == metrics[-1]["accuracy"]
    moved = summary["bytes_up"] + summary["bytes_down"]
    assert summary["bytes_plain"] == moved == sum(m["bytes_plain"] for m in metrics), "nothing is encoded"
    assert summary["bytes_vs_fedavg"] == pytest.approx(moved / (7 * 3 * layout.nbytes()))
    assert set(load_file(path / "model.safetensors")) == set(model.state_dict())


def test_a_run_repeats_bit_for_bit(small_run):
    one, two = (load_file(small_run(deterministic=True, optimizer="sgd") / "model.safetensors") for _ in range(2))
    assert {name: array.tobytes() for name, array in one.items()} == {n: a.tobytes() for n, a in two.items()}


def test_clients_read_their_own_data_in_deployment(small_run, tmp_path):
    rng = np.random.default_rng(0)
    nodes = []
    for k in range(2):
        file = tmp_path / f"site-{k}.npz"
        np.savez(file, images=rng.integers(0, 255, (40, 8, 8), dtype=np.uint8), labels=rng.integers(0, 4, 40))
        nodes.append({"data-path": str(file), "name": f"site-{k}"})
    path = small_run(nodes=nodes, dataset="local", image_shape="1x8x8", classes=4)
    metrics = read_lines(path)
    assert metrics[-1]["accuracy_of"] == "clients" and 0 <= metrics[-1]["accuracy"] <= 1
    assert metrics[0]["round"] == 1 and metrics[0]["received_accuracy"] is not None


def test_a_client_with_bad_data_is_refused_alone_before_the_first_round(small_run, tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    good = {"partition-id": 0, "num-partitions": 3}
    nodes = [good, {**good, "partition-id": 1}, {"data-path": str(tmp_path / "empty"), "name": "site-9"}]
    with caplog.at_level("WARNING", logger="flwr"):
        path = small_run(nodes=nodes)
    first = read_lines(path)[1]
    assert first["clients_replied"] == 2
    assert "empty" in first["refused"][0]["reason"] and first["refused"][0]["client"] == "node 3 (site-9)"
    with pytest.raises(RoundFailed, match="only 2 of 3 clients can take part"):
        small_run(nodes=nodes, min_clients=3, round_timeout=2)


def test_an_impossible_partition_stops_the_run_before_it_starts(small_run):
    with pytest.raises(RoundFailed, match="min-partition-size"):
        small_run(min_partition_size=1000)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"model": "cnn"}, "CNN has none. Choose a model with attention"), ({"strategy": "fedavgg"}, "fedavg")],
)
def test_a_run_that_cannot_be_leaves_no_directory(small_run, tmp_path, values, said):
    with pytest.raises(ConfigError, match=said):
        small_run(**values)
    assert not (tmp_path / "runs").exists()


def test_the_cnn_trains_under_fedavg(small_run):
    path = small_run(model="cnn", strategy="fedavg", num_server_rounds=2)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["bytes_vs_fedavg"] == 1.0


def test_every_client_has_a_model_of_its_own_under_fedamp(small_run):
    metrics = read_lines(small_run(strategy="fedamp", model="cnn", num_server_rounds=2))
    assert [line["accuracy_of"] for line in metrics] == ["personal", "personal"]
    assert metrics[-1]["bytes_up"] == metrics[-1]["bytes_fedavg"] - metrics[-1]["bytes_fedavg_down"]


FEDBE = {"strategy": "fedbe", "model": "cnn", "num_server_rounds": 2, "server_share": 0.2, "deterministic": True}


def test_fedbe_distils_on_the_servers_unlabelled_examples(small_run):
    options = {**FEDBE, "fedbe.samples": 2, "fedbe.epochs": 1}
    one, two = (small_run(**options) for _ in range(2))
    assert [line["accuracy_of"] for line in read_lines(one)] == ["server"] * 3
    first, second = (load_file(path / "model.safetensors") for path in (one, two))
    assert {name: array.tobytes() for name, array in first.items()} == {n: a.tobytes() for n, a in second.items()}


def test_the_keys_of_distillation_reach_it(small_run):
    """With a tiny learning rate the student stays the mean of the clients' models, which is FedAvg's."""

    def ended(**options):
        return load_file(small_run(**{**FEDBE, "num_server_rounds": 1, **options}) / "model.safetensors")

    still, taught = ended(**{"fedbe.learning-rate": 1e-9}), ended(**{"fedbe.epochs": 2})
    sharper = ended(**{"fedbe.epochs": 2, "fedbe.temperature": 0.1})
    plain = ended(strategy="fedavg")
    assert all(np.allclose(still[name], array, atol=1e-6) for name, array in plain.items())
    assert not all(np.allclose(taught[name], array, atol=1e-6) for name, array in plain.items())
    assert not all(np.allclose(sharper[name], array, atol=1e-6) for name, array in taught.items())


def test_the_ridge_of_the_run_config_shrinks_the_value_projections(small_run):
    """It acts on the weights of the value projections: they end smaller, and by far the most."""

    def norms(ridge):
        path = small_run(deterministic=True, optimizer="sgd", learning_rate=0.2, **{"fedfrozen.ridge": ridge})
        return {name: float(np.linalg.norm(array)) for name, array in load_file(path / "model.safetensors").items()}

    without, ridged = norms(0.0), norms(1.0)
    shrunk = {name for name in without if ridged[name] < 0.8 * without[name]}
    assert shrunk == {f"blocks.{k}.attention.value.weight" for k in range(2)}


@pytest.fixture
def failing_in_round_3(monkeypatch):
    """Clients that fail in round 3, for whoever calls it; until the test says otherwise."""
    of = LocalClient.of

    def failing(msg, context):
        if msg.content["config"]["server-round"] == 3:
            raise RuntimeError("the disk is gone")
        return of(msg, context)

    monkeypatch.setattr(LocalClient, "of", staticmethod(failing))
    return lambda: monkeypatch.setattr(LocalClient, "of", staticmethod(of))


def test_a_failed_run_saves_the_model_of_its_last_finished_round(small_run, tmp_path, failing_in_round_3):
    with pytest.raises(RoundFailed, match="the disk is gone"):
        small_run(deterministic=True, schedule="constant")
    failing_in_round_3()
    failed = load_file(tmp_path / "runs/latest/model.safetensors")
    assert json.loads((tmp_path / "runs/latest/summary.json").read_text())["rounds"] == 2
    path = small_run(deterministic=True, schedule="constant", num_server_rounds=2)
    for name, array in load_file(path / "model.safetensors").items():
        np.testing.assert_array_equal(failed[name], array)


UNUSUAL = {"deterministic": True, "partitioner": "iid", "batch-size": 16, "seed": 7, "learning-rate": 0.01}


def test_a_run_goes_on_from_its_directory_alone(small_run, tmp_path, failing_in_round_3, caplog):
    """`resume` is all that is given: the Flower run, and so its clients, have the defaults of all other keys."""
    whole = small_run(**UNUSUAL, num_server_rounds=2)  # the rounds that succeed with and without the fault
    with pytest.raises(RoundFailed, match="the disk is gone"), caplog.at_level("ERROR", "flwr"):
        small_run(**UNUSUAL)
    stopped = (tmp_path / "runs/latest").resolve()
    assert f'resume="{stopped}"' in caplog.text
    failing_in_round_3()
    values = {**defaults(), "resume": str(tmp_path / "runs"), "runs": str(tmp_path / "elsewhere")}
    nodes = [Node(client_app(), {"partition-id": k, "num-partitions": 3}) for k in range(3)]
    assert run(InProcessGrid(nodes, values), values) == stopped
    assert not (tmp_path / "elsewhere").exists()
    uninterrupted = small_run(**UNUSUAL)
    ours, theirs = (load_file(path / "model.safetensors") for path in (stopped, uninterrupted))
    assert {name: array.tobytes() for name, array in ours.items()} == {n: a.tobytes() for n, a in theirs.items()}
    assert read_lines(whole)[1]["train_loss"] == read_lines(stopped)[1]["train_loss"]
    mine, other = read_lines(stopped), read_lines(uninterrupted)
    own = {"seconds", "seconds_train", "step_seconds", "bytes_overhead"}
    assert [{k: v for k, v in line.items() if k not in own} for line in mine] == [
        {k: v for k, v in line.items() if k not in own} for line in other
    ]
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["rounds"] == 3 and summary["seconds"] >= sum(line["seconds"] for line in mine[:3])


def test_a_finished_run_can_be_prolonged(small_run, tmp_path):
    options = {"deterministic": True, "schedule": "constant"}
    path = small_run(**options, num_server_rounds=2)
    assert small_run(**options, num_server_rounds=4, resume=str(path)) == path
    longer = small_run(**options, num_server_rounds=4)
    ours, theirs = (load_file(run / "model.safetensors") for run in (path, longer))
    assert {name: array.tobytes() for name, array in ours.items()} == {n: a.tobytes() for n, a in theirs.items()}
    assert tomllib.loads((path / "config.toml").read_text())["num-server-rounds"] == 4


def test_what_a_run_did_after_the_checkpoint_that_it_is_resumed_from_does_not_count(
    small_run, tmp_path, failing_in_round_3
):
    failing_in_round_3()
    path = small_run(num_server_rounds=5, checkpoints=5)
    other = small_run(num_server_rounds=1)
    for number in (3, 4, 5):
        shutil.rmtree(path / f"checkpoint/round-{number:06d}")
    assert small_run(resume=str(path), num_server_rounds=4) == path
    lines = [json.loads(line)["round"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2, 3, 4] and json.loads((path / "summary.json").read_text())["rounds"] == 4
    assert (tmp_path / "runs/latest").resolve() == path.resolve() != other.resolve()


def test_a_run_starts_from_the_weights_that_it_is_given(small_run, tmp_path, caplog):
    first = small_run(num_server_rounds=2)
    with caplog.at_level("INFO", "flwr"):
        second = small_run(pretrained=str(first), num_server_rounds=1)
    assert f"tensors loaded from {first}/model.safetensors." in caplog.text
    before, after = read_lines(first)[-1], read_lines(second)[0]
    assert (after["round"], after["accuracy"], after["loss"]) == (0, before["accuracy"], before["loss"])
    # What a run is resumed from is its checkpoint: the weights that it began with may be gone.
    first.rename(tmp_path / "away")
    resumed = small_run(pretrained=str(first), num_server_rounds=2, resume=str(second))
    assert resumed == second and read_lines(second)[-1]["round"] == 2
    shutil.rmtree(second / "checkpoint")
    with pytest.raises(ConfigError, match="no such file"):
        small_run(pretrained=str(first), num_server_rounds=2, resume=str(second))


def test_weights_that_do_not_fit_stop_a_run_before_it_starts(small_run, tmp_path):
    first = small_run(num_server_rounds=1, model="cnn", strategy="fedavg")
    (first / "model.safetensors").rename(tmp_path / "cnn.safetensors")
    for given, said in [
        (tmp_path / "cnn.safetensors", r"cnn\.safetensors does not fit TinyViT: the file has no cls_token, .* more"),
        (tmp_path / "nothing.pt", r"pretrained='.*nothing\.pt': .*no such file or directory"),
    ]:
        with pytest.raises(ConfigError, match=said):
            small_run(pretrained=str(given))
    assert len(list((tmp_path / "runs").glob("*-*"))) == 1


def test_all_modes_of_an_ensemble_start_from_the_weights_but_for_a_new_head(small_run):
    first = small_run(num_server_rounds=1)
    options = {"strategy": "fedensemble", "fedensemble.modes": 2, "num_server_rounds": 1}
    drawn, given = (read_lines(small_run(**options, **more))[0] for more in ({}, {"pretrained": str(first)}))
    assert drawn["disagreement"] > 0 and given["disagreement"] == 0
    assert 0 < drawn["mode_entropy"] < drawn["entropy"] and given["mode_entropy"] == pytest.approx(given["entropy"])
    assert given["accuracy"] == read_lines(first)[-1]["accuracy"]


def test_each_mode_of_an_ensemble_may_start_from_weights_of_its_own(small_run, tmp_path):
    sources = []
    for seed in (1, 2, 3):
        sources.append(tmp_path / f"{seed}.pt")
        torch.save(build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=seed).state_dict(), sources[-1])
    values = {"strategy": "fedensemble", "fedensemble.modes": 3, "pretrained": ", ".join(map(str, sources))}
    config = read_run_config(values)
    model, blocks = build_model(config)
    starts = [
        {name: value.clone() for name, value in start.state_dict().items()}
        for start in _starts(config, model, blocks, _load_first(config, model, blocks))
    ]
    for source, start in zip(sources, starts, strict=True):
        assert all(torch.equal(value, start[name]) for name, value in torch.load(source).items())
    line = read_lines(small_run(num_server_rounds=1, **values))[0]
    assert line["disagreement"] > 0


def test_weights_of_all_modes_are_checked_before_the_run_begins(small_run, tmp_path):
    good = tmp_path / "good.pt"
    torch.save(build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=1).state_dict(), good)
    with pytest.raises(ConfigError, match=r"pretrained='.*missing\.pt': .*no such file"):
        small_run(strategy="fedensemble", pretrained=f"{good},{tmp_path}/missing.pt", **{"fedensemble.modes": 2})
    assert not list((tmp_path / "runs").glob("*-*"))


def test_another_normalisation_than_that_of_the_weights_is_logged(small_run, caplog):
    with caplog.at_level("WARNING", "flwr"):
        small_run(num_server_rounds=1, pretrained="tiny-vit-digits")
        assert "was trained with normalise" not in caplog.text
        small_run(num_server_rounds=1, pretrained="tiny-vit-digits", normalise="0.5/0.5")
    assert "pretrained='tiny-vit-digits' was trained with normalise='', but normalise='0.5/0.5' here" in caplog.text


@pytest.mark.parametrize("strategy", ["fedfrozen", "selective"])
def test_a_directory_of_transformers_gives_model_and_weights(small_run, tmp_path, strategy, caplog):
    pytest.importorskip("transformers")
    size = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": 8, "patch_size": 4, **size}))
    saved = str(tmp_path / "vit")
    build(str(tmp_path), image_shape=(1, 8, 8), classes=3, seed=1).save_pretrained(saved)
    with caplog.at_level("INFO", "flwr"):
        path = small_run(strategy=strategy, model=saved, pretrained=saved)
    assert f"tensors loaded from {saved}/model.safetensors; initialised by seed" in caplog.text
    assert "none of this shape: classifier.weight, classifier.bias." in caplog.text
    lines = read_lines(path)
    assert not any(line["refused"] or line["lost"] for line in lines) and len(lines) == 4
    layer = 4 * (12 * 12 + 12) + 2 * 24 + 2 * 12 * 16 + 12 + 16
    head = 12 * 10 + 10
    everything = 2 * layer + head + 24 + 12 * (1 + 5) + 16 * 12 + 12  # final norm, class token, positions, patches
    frozen = 2 * 2 * (12 * 12 + 12)
    each = [everything, everything - frozen] if strategy == "fedfrozen" else [layer + head] * 2
    assert [line["bytes_up"] for line in lines[1:3]] == [3 * 4 * number for number in each]


OWN = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, rows):
        return torch.softmax(self.wq(rows) @ self.wk(rows).mT, -1) @ self.wv(rows)

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.step0, self.step1 = Attention(), Attention()
        self.out = nn.Linear(8, classes)

    def forward(self, images):
        rows = images[:, 0]
        for step in (self.step0, self.step1):
            rows = rows + step(rows)
        return self.out(rows.mean(1))

def net(classes):
    return Net(classes)

def plain(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

def dropping(classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))
"""


@pytest.mark.parametrize("strategy", ["fedavg", "perfedavg"])
def test_dropout_is_drawn_by_the_runs_seed(small_run, tmp_path, monkeypatch, strategy):
    (tmp_path / "our_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    runs = []
    for number in (1, 2):
        torch.manual_seed(number)  # what else has drawn numbers before
        path = small_run(model="our_nets:dropping", strategy=strategy, deterministic=True)
        told = read_lines(path)
        lines = [{k: v for k, v in line.items() if "seconds" not in k and k != "bytes_overhead"} for line in told]
        runs.append((lines, {name: array.tobytes() for name, array in load_file(path / "model.safetensors").items()}))
    assert runs[0] == runs[1]


def test_a_model_of_ones_own_is_trained_with_the_blocks_that_the_config_names(small_run, tmp_path, monkeypatch):
    (tmp_path / "our_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"our_nets:net.*step0\.wq\.weight.* look like .*blocks\.query-key"):
        small_run(model="our_nets:net")
    with pytest.raises(ConfigError, match=r"has none.* Its entries are 1\.weight, 1\.bias\. .*blocks\.query-key"):
        small_run(model="our_nets:plain")
    with pytest.raises(ConfigError, match=r"fedfrozen\.ridge=0\.1 applies to .* set it, too"):
        small_run(model="our_nets:net", **{"blocks.query-key": "*.wq.*", "fedfrozen.ridge": 0.1})
    named = {"model": "our_nets:net", "blocks.query-key": "*.wq.*, *.wk.*", "blocks.layers": "step*"}
    lines = read_lines(small_run(**named))
    everything, frozen = 2 * 3 * (64 + 8) + 8 * 10 + 10, 2 * 2 * (64 + 8)
    assert [line["bytes_up"] for line in lines[1:]] == [
        3 * 4 * everything, 3 * 4 * (everything - frozen), 3 * 4 * (everything - frozen)
    ]  # fmt: skip
    assert not any(line["refused"] or line["lost"] for line in lines)
    recomputed = read_lines(small_run(**named, gradient_checkpointing=True))
    assert [line["bytes_up"] for line in recomputed] == [line["bytes_up"] for line in lines]
    assert not any(line["refused"] or line["lost"] for line in recomputed)
    path = small_run(**named, strategy="selective", num_server_rounds=1)
    assert read_lines(path)[-1]["bytes_up"] == 3 * 4 * (3 * 72 + 90)  # each client: a layer of two, and the head


def test_what_cannot_change_is_refused_on_resume(small_run, tmp_path):
    path = small_run(num_server_rounds=1)
    later = small_run(num_server_rounds=1)
    with pytest.raises(ConfigError, match=r"leave them out: batch-size=7 \(the run has 32\)"):
        small_run(resume=str(path), batch_size=7)
    with RunDirectory(path, {}).in_use(), pytest.raises(RunInUse):
        small_run(resume=str(path))
    assert (path.parent / "latest").resolve() == later.resolve()
    with pytest.raises(ConfigError, match="no run directory"):
        small_run(resume=str(tmp_path / "nowhere"))


def test_a_run_of_an_earlier_version_goes_on_with_its_own_settings():
    then = as_of_now({**defaults(), "selective.coupling": 10.0})
    assert then == {**defaults(), "selective.coupling": 10.0}, "of this version: nothing is changed"
    added = ("selective.absolute-coupling", "fedacs.follow-rate", "fedacs.newcomers", "fedamp.newcomers", "fedamp.unit")
    then = as_of_now({key: value for key, value in {**defaults(), "seed": 1}.items() if key not in added})
    assert [then[key] for key in added] == [defaults()["selective.coupling"], False, "initial", "initial", "absolute"]
    assert (then["selective.coupling"], then["seed"]) == (0.0, 1)


@pytest.mark.parametrize("coupling", [7.5, 0.0])
def test_an_earlier_runs_config_is_read_as_it_was_meant_when_it_is_resumed(small_run, coupling):
    as_then = {"selective.coupling": 0.0, "selective.absolute-coupling": coupling}
    path = small_run(num_server_rounds=1, strategy="selective", **as_then)
    written = (path / "config.toml").read_text()
    before, removed = re.subn(r'"selective.absolute-coupling" = .*\n', "", written)
    before, replaced = re.subn(r'(?<="selective.coupling" = ).*', str(coupling), before)
    assert (removed, replaced) == (1, 1)
    (path / "config.toml").write_text(before)
    small_run(resume=str(path), num_server_rounds=2, **{"selective.coupling": coupling})  # as the run was started with
    kept = read_config(path)
    assert (kept["selective.absolute-coupling"], kept["selective.coupling"]) == (coupling, 0.0)


def test_a_full_disk_at_checkpoint_time_is_said_and_the_run_goes_on(small_run, monkeypatch, caplog):
    write = checkpoint.write_arrays

    def full(path, arrays, **options):
        calls.append(path)
        if len(calls) == 2:  # the first is of the state that the run begins with
            raise OSError(errno.ENOSPC, "no space left on device")
        write(path, arrays, **options)

    calls: list[Path] = []
    monkeypatch.setattr(checkpoint, "write_arrays", full)
    path = small_run(num_server_rounds=3)
    assert "no checkpoint of round 1 could be written: [Errno 28] no space left" in caplog.text
    assert [note["client"] for note in read_lines(path)[2]["notes"]] == ["server"]
    assert read_lines(path)[-1]["round"] == 3


def test_a_final_model_that_cannot_be_written_is_tried_again(small_run, monkeypatch, caplog):
    left = [OSError(errno.ENOSPC, "no space left on device")] * 2
    write = RunDirectory.write_model

    def write_model(self, arrays, metadata):
        if left:
            raise left.pop()
        return write(self, arrays, metadata)

    monkeypatch.setattr(RunDirectory, "write_model", write_model)
    monkeypatch.setattr("tepal.server_app.run._TRY_AGAIN", 0)
    assert (small_run(num_server_rounds=1) / "model.safetensors").exists()
    assert caplog.text.count("Trying again for up to") == 2


@pytest.mark.parametrize("strategy", [FlowerFedAvg(), FedAdam(eta=1e-3)], ids=["FedAvg", "FedAdam"])
def test_our_client_app_runs_under_flowers_own_strategies(strategy, small_run):
    config = {**defaults(), "local-epochs": 1}
    nodes = [Node(client_app(), {"partition-id": k, "num-partitions": 3}) for k in range(3)]
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=42)
    result = strategy.start(
        InProcessGrid(nodes, config),
        ArrayRecord(model.state_dict()),
        num_rounds=2,
        train_config=ConfigRecord(TrainingConfig.of(config).model_dump(by_alias=True)),
    )
    assert set(result.arrays) == set(model.state_dict())
    start = model.state_dict()
    assert all(not np.array_equal(array.numpy(), start[name].numpy()) for name, array in result.arrays.items())
    assert 0 < result.train_metrics_clientapp[2]["train-loss"] < 2.3
    assert "received-accuracy" in result.evaluate_metrics_clientapp[2]


def test_a_metric_that_nobody_asked_for_does_not_become_the_runs_accuracy():
    """One of ten clients says of itself that it has a perfect model of its own."""
    measured = {"received-accuracy": 0.5, "received-loss": 1.0, "personal-accuracy": 1.0, "ensemble-accuracy": 1.0}
    over_clients = {"received-accuracy": (0.4, 0.1), "personal-accuracy": (1.0, 0.0)}
    report = RoundReport(1, "train", evaluate_metrics=measured, over_clients=over_clients)
    line = RoundRecord.of(report, 1, tasks.IMAGES).to_line()
    assert (line["accuracy"], line["clients_accuracy"], line["clients_spread"]) == (0.5, 0.4, 0.1)
    of_ensemble = RoundReport(1, "train", eval_metrics_of="ensemble", evaluate_metrics={"accuracy": 0.9})
    line = RoundRecord.of(of_ensemble, 1, tasks.IMAGES)
    assert line.accuracy is None, "it is of one mode, from an app that knows no ensembles"


@pytest.mark.parametrize("where", ["server", "clients"])
def test_a_rounds_line_has_what_its_task_is_measured_by(where):
    if where == "server":
        report = RoundReport(1, "train", server_metrics={"loss": 0.7, "macro-f1": 0.6, "accuracy": 0.8})
    else:
        report = RoundReport(1, "train", evaluate_metrics={"received-loss": 0.7, "received-macro-f1": 0.6})
    line = RoundRecord.of(report, 1, tasks.NEXT_CHARACTER).to_line()
    assert (line["accuracy"], line["accuracy_of"]) == ({"server": 0.8, "clients": None}[where], where)
    assert (line["loss"], line["macro_f1"], line["perplexity"]) == (0.7, 0.6, pytest.approx(2.0137527))
    of_images = RoundRecord.of(report, 1, tasks.IMAGES)
    assert of_images.perplexity is of_images.rmse is line["rmse"] is None


def test_a_regressions_line_has_root_mean_squared_errors():
    of_clients = {"received-rmse": (0.6, 0.1), "received-loss": (0.37, 0.12)}
    report = RoundReport(
        1, "train", train_metrics={"received-loss": 0.49, "received-rmse": 0.68}, server_metrics={"loss": 0.25},
        evaluate_metrics={"received-loss": 0.36}, over_clients=of_clients,
    )  # fmt: skip
    line = RoundRecord.of(report, 1, tasks.REGRESSION).to_line()
    assert (line["loss"], line["rmse"], line["received_rmse"]) == (0.25, 0.5, pytest.approx(0.7))
    assert (line["clients_rmse"], line["clients_spread"]) == (0.6, 0.1)
    assert line["accuracy"] is line["clients_accuracy"] is line["perplexity"] is None


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        (
            {"strategy": "selective", "selective.budget": 2.0, "selective.selection": "both"},
            SelectiveLayers,
            {"budget": 2.0, "selection": "both", "relative coupling": 0.2, "fill": False, "probe batches": 1},
        ),
        ({"strategy": "selective", "selective.coupling": 0.0}, SelectiveLayers, {"coupling": 0.0}),
        ({"strategy": "selective", "selective.draw-budgets": True}, SelectiveLayers, {"budget": "drawn"}),
        (
            {"strategy": "fedensemble", "fedensemble.modes": 4, "fedensemble.strata": 2},
            FedEnsemble,
            {"modes": 4, "strata": 2, "member": "FedAvgMethod", "assign": "schedule", "weighting": "uniform"},
        ),
        (
            {"strategy": "fedensemble", "fedensemble.member": "fedfrozen", "fedfrozen.warmup-rounds": 3},
            FedEnsemble,
            {"modes": 3, "member": "FedFrozenMethod", "member warm-up rounds": 3},
        ),
        (
            {"strategy": "fedensemble", "fedensemble.assign": "highest-loss", "fedensemble.weighting": "examples"},
            FedEnsemble,
            {"assign": "highest-loss", "weighting": "examples"},
        ),
        ({"strategy": "fedacs", "fedacs.quantile": 0.2, "fedacs.alpha": 0.5}, FedACS, {"quantile": 0.2, "alpha": 0.5}),
        (
            {"strategy": "fedamp", "fedamp.sigma": 5.0, "fedamp.alpha": 2.0, "fedamp.lambda": 0.5},
            FedAMP,
            {"sigma": 5.0, "alpha": 2.0, "lambda": 0.5, "unit": "median"},
        ),
        ({"strategy": "fedamp", "fedamp.unit": "absolute"}, FedAMP, {"unit": "absolute"}),
        (
            {"strategy": "fedbe", "fedbe.distribution": "dirichlet", "fedbe.samples": 4, "server-share": 0.1},
            FedBE,
            {"distribution": "dirichlet", "samples": 4, "concentration": 1.0, "distil": True},
        ),
        ({"strategy": "fedbe", "fedbe.distil": False, "fedbe.concentration": 3.0}, FedBE, {"distil": False}),
        (
            {"strategy": "fedbe", "fedbe.variance-scale": 0.01, "fedbe.temperature": 0.5, "server-share": 0.1},
            FedBE,
            {"variance scale": 0.01, "temperature": 0.5},
        ),
        ({"strategy": "pfedme", "pfedme.outer-step": 0.25}, PFedMe, {"outer-step": 0.25}),
    ],
)
def test_the_keys_of_a_method_reach_it(given, kind, told):
    config = read_run_config(given)
    strategy = build_strategy(config, build_model(config)[1])
    assert type(strategy) is kind
    assert told.items() <= dict(strategy.method.describe()).items()
