"""The whole of a run, server and clients, in one process: config, data, rounds, run directory."""

import errno
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from safetensors.numpy import load_file

from tepal.client_app.config import TrainingConfig
from tepal.client_app.site import Site
from tepal.models import build
from tepal.models.blocks import find_blocks
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.run import build_model, build_strategy, metrics_line, run
from tepal.server_app.run_directory import RunDirectory, read_metrics
from tepal.strategies import FedACS, FedEnsemble, RoundFailed, RoundReport, SelectiveLayers, checkpoint
from tepal.strategies.in_process import InProcessGrid, Node

ROOT = Path(__file__).parents[3]
SMALL = {"num-server-rounds": 3, "local-epochs": 1, "fedfrozen.warmup-rounds": 1}


def client_app() -> ClientApp:
    from client_app.app import app  # as Flower loads it

    return app


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))

    def start(clients=3, nodes=None, **values):
        given = {**SMALL, "runs": str(tmp_path / "runs"), **{k.replace("_", "-"): v for k, v in values.items()}}
        config = {**defaults(), **given}
        nodes = nodes or [{"partition-id": k, "num-partitions": clients} for k in range(clients)]
        grid = InProcessGrid([Node(client_app(), node) for node in nodes], config)
        return run(grid, config)

    return start


def test_a_run_leaves_everything_in_its_directory(small_run):
    path = small_run()
    assert {p.name for p in path.iterdir()} == {
        "config.toml", "metrics.jsonl", "model.safetensors", "summary.json", "report.html", "checkpoint"
    }  # fmt: skip
    assert (path.parent / "latest").resolve() == path
    metrics = read_metrics(path)
    assert [(m["round"], m["phase"]) for m in metrics] == [(0, "initial"), (1, "warm-up"), (2, "frozen"), (3, "frozen")]
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=42)
    layout, phi = find_blocks(model).layout, find_blocks(model).query_key
    theta = layout.nbytes() - layout.nbytes(phi)
    assert [m["bytes_up"] for m in metrics] == [0, 3 * layout.nbytes(), 3 * theta, 3 * theta]
    assert [m["bytes_down"] for m in metrics] == [0, 3 * layout.nbytes(), 3 * layout.nbytes(), 2 * 3 * theta]
    summary = json.loads((path / "summary.json").read_text())
    assert list(summary)[:11] == ["strategy", "model", "parameters", "rounds", "accuracy", "loss", "bytes_up",
                                  "bytes_down", "bytes_vs_fedavg", "seconds", "refused_replies"]  # fmt: skip
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["accuracy"] == metrics[-1]["accuracy"]
    moved = summary["bytes_up"] + summary["bytes_down"]
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
    metrics = read_metrics(path)
    assert metrics[-1]["accuracy_of"] == "clients" and 0 <= metrics[-1]["accuracy"] <= 1
    assert metrics[0]["round"] == 1 and metrics[0]["received_accuracy"] is not None


def test_a_client_with_bad_data_is_refused_alone_before_the_first_round(small_run, tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    good = {"partition-id": 0, "num-partitions": 3}
    nodes = [good, {**good, "partition-id": 1}, {"data-path": str(tmp_path / "empty"), "name": "site-9"}]
    with caplog.at_level("WARNING", logger="flwr"):
        path = small_run(nodes=nodes)
    first = read_metrics(path)[1]
    assert first["clients_replied"] == 2
    assert "empty" in first["refused"][0]["reason"] and first["refused"][0]["client"] == "site-9"
    with pytest.raises(RoundFailed, match="only 2 of 3 clients can take part"):
        small_run(nodes=nodes, min_clients=3)


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


def test_the_ridge_of_the_run_config_shrinks_the_value_projections(small_run):
    """It acts on the weights of the value projections: they end smaller, and by far the most."""

    def norms(ridge):
        path = small_run(deterministic=True, optimizer="sgd", learning_rate=0.05, **{"fedfrozen.ridge": ridge})
        return {name: float(np.linalg.norm(array)) for name, array in load_file(path / "model.safetensors").items()}

    without, ridged = norms(0.0), norms(1.0)
    shrunk = {name for name in without if ridged[name] < 0.8 * without[name]}
    assert shrunk == {f"blocks.{k}.attention.value.weight" for k in range(2)}


@pytest.fixture
def failing_in_round_3(monkeypatch):
    """Clients that fail in round 3, for whoever calls it; until the test says otherwise."""
    of = Site.of

    def failing(msg, context):
        if msg.content["config"]["server-round"] == 3:
            raise RuntimeError("the disk is gone")
        return of(msg, context)

    monkeypatch.setattr(Site, "of", staticmethod(failing))
    return lambda: monkeypatch.setattr(Site, "of", staticmethod(of))


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
    assert read_metrics(whole)[1]["train_loss"] == read_metrics(stopped)[1]["train_loss"]
    mine, other = read_metrics(stopped), read_metrics(uninterrupted)
    own = {"seconds", "seconds_train", "bytes_overhead"}
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


def test_what_cannot_change_is_refused_on_resume(small_run, tmp_path):
    path = small_run(num_server_rounds=1)
    with pytest.raises(ConfigError, match=r"leave out what cannot change: batch-size=7 \(it has 32\)"):
        small_run(resume=str(path), batch_size=7)
    with pytest.raises(ConfigError, match="no run directory"):
        small_run(resume=str(tmp_path / "nowhere"))


def test_a_full_disk_at_checkpoint_time_is_said_and_the_run_goes_on(small_run, monkeypatch, caplog):
    write = checkpoint.write_arrays

    def full(path, arrays):
        if not calls:
            calls.append(path)
            raise OSError(errno.ENOSPC, "no space left on device")
        write(path, arrays)

    calls: list[Path] = []
    monkeypatch.setattr(checkpoint, "write_arrays", full)
    path = small_run(num_server_rounds=3)
    assert "no checkpoint of round 1 could be written: [Errno 28] no space left" in caplog.text
    assert [note["client"] for note in read_metrics(path)[2]["notes"]] == ["server"]
    assert read_metrics(path)[-1]["round"] == 3


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
    assert caplog.text.count("It is tried again") == 2


@pytest.mark.parametrize("strategy", [FlowerFedAvg(), FedAdam(eta=1e-3)], ids=["FedAvg", "FedAdam"])
def test_our_client_app_runs_under_flowers_own_strategies(strategy, small_run):
    config = {**defaults(), **SMALL}
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
    line = metrics_line(report, 1)
    assert (line["accuracy"], line["clients_accuracy"], line["clients_spread"]) == (0.5, 0.4, 0.1)
    ensemble = metrics_line(RoundReport(1, "train", judged="ensemble", evaluate_metrics={"accuracy": 0.9}), 1)
    assert ensemble["accuracy"] is None, "it is of one mode, from an app that knows no ensembles"


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        (
            {"strategy": "selective", "selective.budget": 2.0, "selective.selection": "both"},
            SelectiveLayers,
            {"budget": 2.0, "selection": "both", "costs": "layers", "coupling": 10.0, "probe batches": 1},
        ),
        ({"strategy": "selective", "selective.draw-budgets": True}, SelectiveLayers, {"budget": "drawn"}),
        (
            {"strategy": "fedensemble", "fedensemble.modes": 4, "fedensemble.strata": 2},
            FedEnsemble,
            {"modes": 4, "strata": 2, "member": "Averaging", "assign": "schedule", "weighting": "uniform"},
        ),
        (
            {"strategy": "fedensemble", "fedensemble.member": "fedfrozen", "fedfrozen.warmup-rounds": 3},
            FedEnsemble,
            {"modes": 3, "member": "Freezing", "member warm-up rounds": 3},
        ),
        (
            {"strategy": "fedensemble", "fedensemble.assign": "highest-loss", "fedensemble.weighting": "examples"},
            FedEnsemble,
            {"assign": "highest-loss", "weighting": "examples"},
        ),
        ({"strategy": "fedacs", "fedacs.quantile": 0.2, "fedacs.alpha": 0.5}, FedACS, {"quantile": 0.2, "alpha": 0.5}),
    ],
)
def test_the_keys_of_a_method_reach_it(given, kind, told):
    config = read_run_config(given)
    strategy = build_strategy(config, build_model(config)[1])
    assert type(strategy) is kind
    assert told.items() <= dict(strategy.method.describe()).items()
