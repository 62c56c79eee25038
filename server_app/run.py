"""One run on the server: config → model → strategy → run directory. `app.py` calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from torch import nn

from tepal import models
from tepal.client_app.data import held_out
from tepal.client_app.training import score
from tepal.models.blocks import Blocks, BlocksError, find_blocks
from tepal.server_app.config import ConfigError, RunConfig, dataset_of, read_run_config
from tepal.server_app.report import write_report
from tepal.server_app.run_directory import KEPT_IN, RunDirectory
from tepal.strategies import FedAvg, FedFrozen, MethodStrategy, NoAttentionError, RoundFailed, RoundReport

log = getLogger("flwr")


def run(grid: Grid, values: Mapping[str, Any]) -> Path:
    """Run the strategy that the run config names, and leave everything in a new run directory.

    Returns the directory. Raises ConfigError before anything starts, and RoundFailed when clients give too few
    replies; the model of the last finished round is saved even then.
    """
    config = read_run_config(values)
    model, blocks = build_model(config)
    strategy = build_strategy(config, blocks)
    directory = RunDirectory.create(Path(config.rounds.runs).expanduser(), config.rounds.strategy, config.flat)
    log.info("%s%s", KEPT_IN, directory.path.resolve())
    model_bytes = blocks.layout.nbytes()
    strategy.on_round = lambda report: directory.append(metrics_line(report, model_bytes))
    started = time.monotonic()
    failure: RoundFailed | None = None
    try:
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=config.rounds.num_server_rounds,
            timeout=config.rounds.round_timeout,
            train_config=ConfigRecord(config.training.model_dump(by_alias=True)),
            evaluate_config=ConfigRecord(config.training.model_dump(by_alias=True)),
            evaluate_fn=server_evaluation(config, model),
        )
    except RoundFailed as error:
        failure = error
        if error.result is None:
            raise
        result = error.result
    directory.write_model({name: array.numpy() for name, array in result.arrays.items()})
    summary = directory.write_summary(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=round(time.monotonic() - started, 3),
    )
    report = write_report(directory.path)
    log.info("Accuracy %s after %s rounds; report: %s", summary["accuracy"], summary["rounds"], report.resolve())
    if failure is not None:
        raise failure
    return directory.path


def build_model(config: RunConfig) -> tuple[nn.Module, Blocks]:
    """The run's model with its initial weights, and its blocks. Raises ConfigError for what does not fit together."""
    info = dataset_of(config)
    try:
        model = models.build(
            config.rounds.model, image_shape=info.shape, classes=info.classes, seed=config.rounds.seed
        )
        return model, find_blocks(model)
    except (models.ModelError, BlocksError) as error:
        raise ConfigError(f"model={config.rounds.model!r}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model={config.rounds.model!r} with images of {info.shape}: {error}") from error


def build_strategy(config: RunConfig, blocks: Blocks) -> MethodStrategy:
    """The run's strategy. Raises ConfigError where it cannot train the model."""
    rounds = config.rounds
    options: dict[str, Any] = {
        "model": blocks,
        "fraction_train": rounds.fraction_train,
        "fraction_evaluate": rounds.fraction_evaluate,
        "min_available_nodes": rounds.min_clients,
        "min_replies": rounds.min_replies,
        "max_replies": rounds.max_replies or None,
        "schedule": rounds.schedule,
        "seed": rounds.seed,
        "deterministic": config.training.deterministic,
    }
    try:
        if rounds.strategy == "fedfrozen":
            frozen = config.fedfrozen
            return FedFrozen(warmup_rounds=frozen.warmup_rounds, ridge=frozen.ridge, **options)
        return FedAvg(**options)
    except NoAttentionError as error:
        raise ConfigError(f"strategy={rounds.strategy!r} with model={rounds.model!r}: {error}") from error


def server_evaluation(config: RunConfig, model: nn.Module) -> Callable[[int, ArrayRecord], MetricRecord] | None:
    """Scores the global model on the server's held-out examples; None where the server has none."""
    examples = held_out(config.data)
    if examples is None:
        return None
    images, labels = torch.from_numpy(examples.images), torch.from_numpy(examples.labels)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        scored = score(model, images, labels, config.training)
        return MetricRecord({"accuracy": scored.accuracy, "loss": scored.loss, "examples": scored.examples})

    return evaluate


def metrics_line(report: RoundReport, model_bytes: int) -> dict[str, Any]:
    """One round as a line of `metrics.jsonl`.

    `accuracy` and `loss` are of the global model after the round, on the server's held-out examples or, with
    `accuracy_of` "clients", on the clients' own test examples. `received_…` are of the model that the round started
    from, on the clients' test examples.
    """
    train, evaluated, server = report.train_metrics, report.evaluate_metrics, report.server_metrics
    clients = {
        key: evaluated.get(f"received-{key}", evaluated.get(key)) for key in ("accuracy", "loss")
    }
    accuracy_of = "server" if "accuracy" in server else "clients" if clients["accuracy"] is not None else None
    scored: Mapping[str, float | None] = server if accuracy_of == "server" else clients
    return {
        "round": report.round,
        "phase": report.phase,
        "clients_asked": len(report.asked),
        "clients_replied": len(report.replied),
        "refused": [{"client": client, "reason": reason} for client, reason in report.refused],
        "lost": [{"client": client, "reason": reason} for client, reason in report.lost],
        "accuracy": scored.get("accuracy"),
        "loss": scored.get("loss"),
        "accuracy_of": accuracy_of,
        "received_accuracy": train.get("received-accuracy"),
        "received_loss": train.get("received-loss"),
        "trained_accuracy": train.get("trained-accuracy"),
        "train_loss": train.get("train-loss"),
        "learning_rate": report.learning_rate,
        "bytes_down": report.down.payload,
        "bytes_up": report.up.payload,
        "bytes_overhead": report.down.overhead + report.up.overhead,
        "bytes_fedavg": (report.fedavg_down + report.fedavg_up) * model_bytes,
        "bytes_fedavg_down": report.fedavg_down * model_bytes,
        "resent": report.resent,
        "seconds": round(report.seconds, 3),
        "seconds_train": round(report.seconds_train, 3),
    }
