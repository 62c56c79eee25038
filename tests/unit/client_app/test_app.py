"""What this project's ClientApp tells and leaves behind, beside training: introduction, probe, delivery."""

import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from safetensors.numpy import load_file

from client_app.app import app
from tepal.client_app import local_client as module
from tepal.models import build
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies import FedACS, FedAvg, FedEnsemble, RoundFailed, SelectiveLayers, join_modes
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.predict.predict import load_predictor
from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.data.inputs import InputConfig
from tepal.training.data.inputs import client_inputs as inputs
from tepal.training.loop import Batches

CONFIG = {**defaults(), "local-steps": 1, "batch-size": 16, "optimizer": "sgd", "learning-rate": 0.05}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))


def vit(seed=42):
    return build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=seed)


def start(strategy, models, configs, run_config=CONFIG, **options):
    nodes = [Node(app, {"partition-id": k, "num-partitions": 2, **config}) for k, config in enumerate(configs)]
    initial = join_modes(ArrayRecord(model.state_dict()) for model in models)
    return strategy.start(InProcessGrid(nodes, run_config), initial, num_rounds=1, **options)


def test_the_final_model_is_put_where_the_client_wants_it_and_predicts(tmp_path):
    path = tmp_path / "models" / "final.safetensors"
    result = start(FedAvg(model=vit()), [vit()], [{"model-path": str(path)}, {}])
    kept = load_file(path)
    assert {name: array.tobytes() for name, array in kept.items()} == {
        name: array.numpy().tobytes() for name, array in result.arrays.items()
    }
    predictor = load_predictor(path)
    np.savez(tmp_path / "images.npz", images=np.zeros((3, 8, 8), np.float32))
    assert len(predictor.predict_files([tmp_path / "images.npz"])) == 3
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_after_a_resume_alone_the_final_model_is_described_by_the_runs_config(tmp_path):
    """The config of the Flower run that resumes has the defaults: model and strategy come with the messages."""
    path = tmp_path / "final.safetensors"
    nodes = [Node(app, {"partition-id": 0, "num-partitions": 1, "model-path": str(path)})]
    first = {**CONFIG, "runs": str(tmp_path / "runs"), "num-server-rounds": 1, "min-clients": 1}
    first |= {"model": "cnn", "strategy": "fedprox", "fedprox.mu": 0.25, "normalise": "0.2/0.5"}
    directory = run(InProcessGrid(nodes, first), first)
    path.unlink()
    again = {**defaults(), "resume": str(directory), "num-server-rounds": 2}
    run(InProcessGrid(nodes, again), again)
    predictor = load_predictor(path)
    config = json.loads(predictor.metadata["config"])
    assert predictor.metadata["model"] == config["model"] == "cnn" and predictor.config.normalise == "0.2/0.5"
    assert (config["strategy"], config["fedprox.mu"]) == ("fedprox", 0.25)


@pytest.mark.parametrize(("fraction", "asked"), [(0.0, 0), (1.0, 2)])
def test_clients_that_do_not_score_as_they_train_score_where_it_is_asked(fraction, asked):
    reports = []
    strategy = FedAvg(model=vit(), fraction_evaluate=fraction, on_round=reports.append)
    start(strategy, [vit()], [{}, {}], {**CONFIG, "score-in-training": False})
    (report,) = reports
    assert "train-loss" in report.train_metrics and not any("accuracy" in name for name in report.train_metrics)
    assert ("received-accuracy" in report.evaluate_metrics) == bool(asked)
    assert report.fedavg_down == 2 + asked


def test_examples_of_many_clients_are_read_once_and_of_too_many_the_oldest_are_dropped(monkeypatch):
    read = []
    monkeypatch.setattr(module, "_loaded", module._Examples())
    counted = lambda *args, **how: read.append(how["client"]) or inputs(*args, **how)  # noqa: E731
    monkeypatch.setattr(module, "client_inputs", counted)
    config = InputConfig(partitioner="iid")

    def load(clients):
        for k in clients:
            node_config = {"partition-id": k, "num-partitions": 100}
            assert len(module._load(config, node_config, f"client-{k}").tensors[1]) > 0

    load([*range(100), *range(100)])
    assert read == [f"client-{k}" for k in range(100)]
    monkeypatch.setattr(module, "_MOST_LOADED", 3 * module._loaded[next(iter(module._loaded))].nbytes + 2000)
    monkeypatch.setattr(module, "_loaded", module._Examples())
    load([0, 1, 2, 3, 3])
    assert read[100:] == ["client-0", "client-1", "client-2", "client-3"] and len(module._loaded) == 3
    load([0])
    assert read[-1] == "client-0"


def test_examples_are_kept_whatever_one_of_the_clients_has(monkeypatch):
    """One client with far more than its share evicts the others only if all are more than the limit."""
    kept = module._Examples()
    parts = {f"client-{k}": SimpleNamespace(nbytes=30_000_000 if k == 0 else 1_000_000) for k in range(100)}
    for name, part in parts.items():
        kept.keep(name, part)
    assert list(kept) == list(parts) and kept._nbytes == 129_000_000
    monkeypatch.setattr(module, "_MOST_LOADED", 40_000_000)
    kept.keep("client-0", parts["client-0"])
    assert list(kept) == [*(f"client-{k}" for k in range(90, 100)), "client-0"]


def test_of_an_ensemble_a_client_keeps_every_mode(tmp_path):
    path = tmp_path / "final.safetensors"
    result = start(FedEnsemble(modes=2, model=vit()), [vit(1), vit(2)], [{"model-path": str(path)}, {}])
    assert load_predictor(path).members == 2
    assert load_file(path).keys() == result.arrays.keys()


def test_of_personal_models_each_client_keeps_its_own(tmp_path):
    paths = [tmp_path / f"{k}.safetensors" for k in range(2)]
    result = start(FedACS(quantile=0.5, model=vit()), [vit()], [{"model-path": str(path)} for path in paths])
    ours, theirs = map(load_file, paths)
    assert not np.array_equal(ours["head.weight"], theirs["head.weight"])
    mean = (ours["head.weight"].astype(np.float64) + theirs["head.weight"]) / 2
    np.testing.assert_allclose(result.arrays["head.weight"].numpy(), mean, rtol=1e-6)


@pytest.mark.parametrize("place", ["file/final.safetensors", "folder", ""])
def test_a_place_that_cannot_be_written_is_said_and_costs_nothing(tmp_path, caplog, place):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    reports = []
    with caplog.at_level(logging.ERROR, "flwr"):
        strategy = FedAvg(model=vit(), on_round=reports.append)
        start(strategy, [vit()], [{"model-path": place and str(tmp_path / place)}, {}])
    assert "model-path=" in caplog.text
    assert not reports[-1].refused + reports[-1].lost and "received-accuracy" in reports[-1].evaluate_metrics
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"file", "folder"}


def test_clients_whose_model_is_another_are_refused_before_the_first_round():
    other = build("tiny-vit", image_shape=(1, 8, 8), classes=12, seed=42)
    with pytest.raises(RoundFailed, match=r"not the server's: 2 tensors differ, 'head.bias' first .*float32\[12\]"):
        start(FedAvg(model=other), [other], [{}, {}])


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (0, "budget of 0 layers: it must be a whole number from 1 to 2"),
        (3, "budget of 3 layers"),
        (1.5, "budget of 1.5 layers"),
        ("one", "layer-budget='one', which is not a finite number"),
    ],
)
def test_a_budget_that_does_not_fit_is_refused_alone(budget, said):
    reports = []
    strategy = SelectiveLayers(model=vit(), min_available_nodes=1, on_round=reports.append)
    start(strategy, [vit()], [{"layer-budget": budget}, {"layer-budget": 2}])
    assert reports[-1].replied == ["client-1"]
    ((client, reason),) = reports[-1].refused
    assert client == "node 1 (client-0)" and said in reason
    assert reports[-1].record["masks"].tolist() == [[True, True]]


@pytest.mark.parametrize(("autocast", "dtype"), [("no", None), ("bf16", torch.bfloat16), ("fp16", None)])
def test_a_probe_takes_the_passes_of_training(monkeypatch, autocast, dtype):
    """In float16 it has the model's own dtype: gradients would have to be scaled."""
    training = TrainingConfig(autocast=autocast, micro_batch_size=3, gradient_checkpointing=True)
    batches = Batches(torch.zeros(6, 1, 8, 8), torch.arange(6), 6, 0)
    client = SimpleNamespace(model=vit(), batches=batches, training=training, task=tasks.IMAGES, budget={})
    of_app, seen = sys.modules["client_app.app"], []

    def called(images):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return client.model(images)

    def probed(model, msg, batches, *, loss, **how):
        assert model is client.model and how == {"micro_batch_size": 3, "gradient_checkpointing": True}
        for batch in batches:
            assert loss(called, *batch).isfinite()
        return {}

    replaced = {
        "LocalClient": SimpleNamespace(of=lambda msg, context: client),
        "load_record": lambda model, record: None,
        "records_of": lambda content, kind: {"arrays": None},
        "probe_layers": probed,
        "Message": lambda content, reply_to: content,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(of_app, name, value)
    reply = of_app.probe(SimpleNamespace(content=None), None)
    assert seen == [dtype] and reply["metrics"]["num-examples"] == 6
