"""Clients of a simulation with settings of their own: they train as nodes with these settings in their node configs."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from safetensors.numpy import load_file

from client_app.app import app
from tepal.client_app import stacked as together
from tepal.client_app.simulated import simulated_node_config
from tepal.client_app.stacked import Gathering
from tepal.models import build
from tepal.server_app.config import defaults, read_run_config
from tepal.server_app.run import run
from tepal.strategies import FedAvg, SelectiveLayers
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training.data.inputs import InputConfig, client_inputs
from tepal.training.node_settings import settings_of, with_own_settings
from tests.lines import read_lines

CLIENTS = 4
CONFIG = {
    **defaults(), "model": "cnn", "local-steps": 2, "batch-size": 16, "optimizer": "sgd", "learning-rate": 0.05,
    "weight-decay": 0.0, "deterministic": True, "score-in-training": False,
}  # fmt: skip
OWN = {
    1: {"learning-rate": 0.02, "momentum": 0.5},
    2: {"local-epochs": 1, "batch-size": 8, "augment-flip": True},
    3: {"optimizer": "adam", "clip-norm": 1.0},
}
TEXT = json.dumps({str(client): own for client, own in OWN.items()})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))


def cnn():
    return build("cnn", image_shape=(1, 8, 8), classes=10, seed=7)


def rounds(config, node_configs=(), *, number=2, strategy=FedAvg, model=None, **how):
    """Arrays after some rounds, and the rounds' reports."""
    nodes = [
        Node(app, {"partition-id": k, "num-partitions": CLIENTS, **(node_configs[k] if node_configs else {})})
        for k in range(CLIENTS)
    ]
    model, reports = model or cnn(), []
    started = strategy(
        model=model, fraction_evaluate=0, min_available_nodes=CLIENTS, deterministic=True, on_round=reports.append,
        schedule="cosine",
    )  # fmt: skip
    train = ConfigRecord({"learning-rate": config["learning-rate"]})
    grid, initial = InProcessGrid(nodes, config, **how), ArrayRecord(model.state_dict())
    result = started.start(grid, initial, num_rounds=number, train_config=train, timeout=60)
    assert not any(report.refused + report.lost for report in reports), reports
    return {name: array.numpy() for name, array in result.arrays.items()}, reports


def bits(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


def test_it_is_as_with_these_settings_in_the_node_configs():
    simulated, reports = rounds({**CONFIG, "client-settings": TEXT})
    deployed, others = rounds(CONFIG, [OWN.get(k, {}) for k in range(CLIENTS)])
    assert bits(simulated) == bits(deployed) != bits(rounds(CONFIG)[0])
    steps = [report.train_metrics["train-steps"] for report in reports]
    assert steps == [report.train_metrics["train-steps"] for report in others]


def test_the_result_is_that_of_plain_pytorch_with_each_clients_settings():
    """One round of SGD: the mean, weighted by examples, of models that a loop of this test trains."""
    own = {1: 0.02, 3: 0.1}
    text = json.dumps({str(client): {"learning-rate": rate} for client, rate in own.items()})
    config = {**CONFIG, "local-steps": 1, "batch-size": 10_000, "client-settings": text}
    result, _ = rounds(config, number=1)
    models, sizes = [], []
    for k in range(CLIENTS):
        node = {"partition-id": k, "num-partitions": CLIENTS}
        data = client_inputs(InputConfig.from_run_config(config), node, client=f"client-{k}").train
        model = cnn().train()
        loss = torch.nn.functional.cross_entropy(
            model(torch.from_numpy(data.values)), torch.from_numpy(data.labels)
        )
        loss.backward()
        rate = own.get(k, 0.05)
        models.append({name: (p - rate * p.grad).detach().numpy() for name, p in model.named_parameters()})
        sizes.append(len(data.labels))
    shares = np.minimum(np.array(sizes) / sum(sizes), 0.5)
    for name in models[0]:
        mean = sum(share * each[name] for share, each in zip(shares / shares.sum(), models, strict=True))
        np.testing.assert_allclose(result[name], mean, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_schedule_multiplies_a_clients_own_rate_and_the_mean_rate_is_what_they_trained_with():
    """A cosine over three rounds: 1, 3/4 and 1/4 of the rates, of which one in four is 0.02 and not 0.05."""
    text = json.dumps({"1": {"learning-rate": 0.02}})
    _, reports = rounds({**CONFIG, "client-settings": text}, number=3)
    mean = (3 * 0.05 + 0.02) / 4
    assert [report.learning_rate for report in reports] == pytest.approx([mean, 0.75 * mean, 0.25 * mean])
    _, reports = rounds(CONFIG, number=3)
    assert [report.learning_rate for report in reports] == pytest.approx([0.05, 0.0375, 0.0125])


def seen(node_config, text, sent=None):
    """The node config that the app sees."""
    found = []
    content = RecordDict({"config": ConfigRecord(sent)} if sent else {})
    message = Message(content, 1, "train")
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(1, 1, node_config, RecordDict(), {"client-settings": text})

    def app(msg, context):
        found.append(dict(context.node_config))
        context.state = RecordDict({"new": ConfigRecord({"a": 1})})
        return msg

    simulated_node_config(message, context, app)
    assert context.node_config == node_config and "new" in context.state
    return found[0]


def test_a_nodes_own_config_takes_precedence():
    text = '{"0-4": {"batch-size": 8, "momentum": 0.5}}'
    assert seen({"partition-id": 4, "batch-size": 2}, text) == {"partition-id": 4, "batch-size": 2, "momentum": 0.5}
    assert seen({"partition-id": 5}, text) == {"partition-id": 5}


@pytest.mark.parametrize("site", [{"data-path": "/d.npz"}, {"data-path": "/d.npz", "partition-id": 0}, {"name": "a"}])
def test_a_site_with_its_own_data_keeps_its_settings(site):
    assert seen(site, '{"0-9": {"batch-size": 8, "device": "cpu", "model-path": "/m"}}') == site


def test_a_resumed_run_has_the_settings_that_its_messages_have():
    """Its Flower run has the defaults of all keys that the command leaves out."""
    node, text = {"partition-id": 1}, '{"1": {"batch-size": 8}}'
    assert seen(node, "", {"client-settings": text}) == {"partition-id": 1, "batch-size": 8}


def test_clients_train_together_with_those_of_equal_settings(monkeypatch):
    """Two and two: each group is one computation, and all end where they end alone."""
    stacks, fit = [], together.fit_stacked

    def counted(works):
        stacks.append(sorted(work.config.learning_rate for work in works))
        return fit(works)

    monkeypatch.setattr(together, "fit_stacked", counted)
    text = json.dumps({"2-3": {"learning-rate": 0.02}})
    config = {**CONFIG, "deterministic": False, "client-settings": text}
    alone, _ = rounds(config, number=1)
    assert not stacks
    stacked, _ = rounds(config, number=1, at_once=CLIENTS, gathering=Gathering)
    assert sorted(stacks) == [[0.02, 0.02], [0.05, 0.05]]
    for name, array in alone.items():
        np.testing.assert_allclose(stacked[name], array, atol=1e-4, err_msg=name)


def test_a_simulated_client_may_have_a_layer_budget():
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=7)
    config = {**CONFIG, "model": "tiny-vit", "client-settings": '{"0": {"layer-budget": 2}}'}
    _, reports = rounds(config, number=1, strategy=partial(SelectiveLayers, coupling=0.0), model=model)
    up = {client: of.bytes_up for client, of in reports[0].clients.items()}
    assert up["client-0"] > max(up[f"client-{k}"] for k in (1, 2, 3)), "two layers, and the others one"


def test_a_run_of_the_server_app_has_them_and_so_has_the_run_that_resumes_it(tmp_path, monkeypatch):
    """Stopped after one round and resumed without them on the command line, it ends as the run that was not stopped."""
    monkeypatch.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")
    given = {**CONFIG, "strategy": "fedavg", "schedule": "constant", "client-settings": TEXT, "min-clients": CLIENTS}

    def ran(name, rounds, more):
        monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / name))
        config = {**defaults(), **more, "num-server-rounds": rounds}
        nodes = [Node(app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
        directory = run(InProcessGrid(nodes, config), config)
        return directory, bits(load_file(directory / "model.safetensors")), read_lines(directory)

    _, whole, lines = ran("whole", 2, {**given, "runs": str(tmp_path / "whole")})
    directory, _, _ = ran("parts", 1, {**given, "runs": str(tmp_path / "parts")})
    _, resumed, again = ran("parts", 2, {"resume": str(directory)})
    assert resumed == whole
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in again]
    assert lines[1]["learning_rate"] == pytest.approx((3 * 0.05 + 0.02) / 4)


def test_what_a_node_config_may_not_have_is_said_with_its_key():
    with pytest.raises(ValueError, match="this node's config has batch-size=0: Input should be greater than or equal"):
        with_own_settings(CONFIG, {"batch-size": 0, "partition-id": 3})
    with pytest.raises(ValueError, match="local-epochs=0 and local-steps=0"):
        with_own_settings(CONFIG, {"local-epochs": 0})
    training = with_own_settings(CONFIG, {"local-epochs": 3, "learning-rate": 1, "name": "a"}, factor=0.25)
    assert (training.local_epochs, training.local_steps, training.learning_rate) == (3, 0, 0.25)
    assert training.batch_size == 16 and math.isclose(training.momentum, 0.0)


def test_the_run_config_of_all_clients_is_as_before():
    assert read_run_config(CONFIG).clients == {} and read_run_config(CONFIG).trainings == {}


def test_a_key_that_no_node_config_may_have_is_left_out():
    text = json.dumps({"0-9": {"cache-path": "/etc", "name": "other", "partition-id": 3, "batch-size": 2}})
    assert settings_of(text, 4) == {"batch-size": 2}
