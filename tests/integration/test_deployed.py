"""A real SuperLink and warm nodes: this project's app against its simulation, a foreign app, sites with own data."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tepal.host.superlink import app_run_config, explain
from tests.integration.foreign_app import MODEL, quickstart, uploads
from tests.integration.loopback import ROOT, loopback, partitions
from tests.integration.own_app import (
    CONFIG,
    assert_same_measures,
    assert_same_models,
    bytes_of_model,
    simulated_in_process,
    vit,
)
from tests.lines import read_lines

pytestmark = pytest.mark.deployment

CLIENTS = 2
CONFIG = {**CONFIG, "num-server-rounds": 4, "fedfrozen.warmup-rounds": 2, "min-clients": CLIENTS}


@pytest.fixture(scope="module")
def deployment():
    with loopback(partitions(CLIENTS)) as running:
        yield running


# This project's app ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deployed(deployment, tmp_path_factory) -> Path:
    """The run directory of CONFIG in deployment."""
    runs = tmp_path_factory.mktemp("deployed")
    outcome = deployment.run(ROOT, {**CONFIG, "runs": str(runs)})
    log = outcome.log.read_text()
    assert outcome.status == "completed", explain(log, outcome.details)
    seconds = [round(line["seconds"], 1) for line in read_lines(runs / "latest")]
    print(f"seconds of each round: {seconds}")
    return (runs / "latest").resolve()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """The run directory of CONFIG in simulation."""
    return simulated_in_process(tmp_path_factory.mktemp("simulated"), CLIENTS, CONFIG)


def test_deployment_and_simulation_end_with_the_same_model(deployed, simulated):
    assert_same_models(deployed, simulated)


def test_deployment_and_simulation_measure_the_same(deployed, simulated):
    assert [line["round"] for line in read_lines(deployed)] == [0, 1, 2, 3, 4]
    assert_same_measures(deployed, simulated)


def test_the_frozen_block_goes_down_once_and_never_up_again(deployed):
    full, theta = bytes_of_model(CLIENTS)
    rounds = read_lines(deployed)[1:]
    assert [line["phase"] for line in rounds] == ["warm-up", "warm-up", "frozen", "frozen"]
    assert [line["bytes_up"] for line in rounds] == [full, full, theta, theta]
    # After the last round the clients score the model: the value block goes down once more.
    assert [line["bytes_down"] for line in rounds] == [full, full, full, 2 * theta]
    assert [line["bytes_fedavg"] for line in rounds] == [2 * full] * 3 + [3 * full]
    assert [line["resent"] for line in rounds] == [0, 0, 0, 0]


def test_clients_make_the_initial_model_and_are_not_sent_it(deployment, deployed, tmp_path):
    outcome = deployment.run(ROOT, {**CONFIG, "wire-start": "made", "runs": str(tmp_path)})
    assert outcome.status == "completed", explain(outcome.log.read_text(), outcome.details)
    made, usual = read_lines(tmp_path / "latest"), read_lines(deployed)
    assert [line["bytes_down"] for line in made[:2]] == [0, 0] and usual[1]["bytes_down"] > 0
    assert [line["bytes_down"] for line in made[2:]] == [line["bytes_down"] for line in usual[2:]]
    assert_same_models((tmp_path / "latest").resolve(), deployed)


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
    rounds = read_lines(deployed)
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
    assert "ConfigError: the run config is invalid:" in said
    assert "strategy='fedfrosen': did you mean 'fedfrozen'? allowed are fedavg, fedfrozen" in said
    assert "local-epochs=-1: " in said
    assert "(server_app/config/reading.py, line " in said, "the code that ran is the bundle's, not the checkout's"
    assert not (tmp_path / "runs").exists()


# An app that knows nothing of this project ----------------------------------------------------------------------------


def test_a_foreign_app_without_apply_plan_is_told_the_line_that_it_lacks(deployment, tmp_path):
    outcome = deployment.run(quickstart(tmp_path / "quickstart"))
    log = outcome.log.read_text()
    assert outcome.status == "failed"
    said = explain(log, outcome.details)
    assert said.startswith("RoundFailed: round 2 ")
    assert "call `apply_plan(model, msg)` (from tepal.client_app import apply_plan)" in said
    assert "'encoder.layers.0.self_attn.in_proj_weight:q' first" in said
    assert uploads(log)[1] == (CLIENTS, CLIENTS * MODEL)


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
    rounds = read_lines(tmp_path / "runs" / "latest")
    assert [(line["round"], line["phase"], line["clients_replied"]) for line in rounds] == [
        (1, "warm-up", 2), (2, "frozen", 2)
    ]  # fmt: skip
    assert {line["accuracy_of"] for line in rounds} == {"clients"}, "the server has no data"
    refused = [reply for line in rounds for reply in line["refused"]]
    ((client, reason),) = [(reply["client"], reply["reason"]) for reply in refused]
    assert re.fullmatch(r"node \d+ \(west\)", client) and str(tmp_path / "nothing") in reason
    assert f"{client} returned no result in round 1" in log
