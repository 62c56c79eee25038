"""One run on the server: config → model → strategy → run directory. `app.py` calls it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from tepal import models
from tepal.client_app.data import held_out
from tepal.client_app.prediction import score_ensemble
from tepal.exchange.modes import join_modes, modes_of
from tepal.models.blocks import Blocks, BlocksError, find_blocks
from tepal.server_app.config import ConfigError, RunConfig, dataset_of, open_run
from tepal.server_app.report import write_report
from tepal.server_app.run_directory import CHECKPOINTS, KEPT_IN, RunDirectory, read_metrics, total
from tepal.strategies import (
    FedACS,
    FedAvg,
    FedEnsemble,
    FedFrozen,
    MethodError,
    MethodStrategy,
    RoundFailed,
    RoundReport,
    SelectiveLayers,
)
from tepal.strategies.checkpoint import CheckpointError, Checkpoints

log = getLogger("flwr")

T = TypeVar("T")

GO_ON = "The run can go on, after what stopped it is mended, with "
"""How a run's log says what to give to `flwr run` to resume it."""

_OWN = ("runs", "resume")  # keys that are about this server, and no business of the clients
_PATIENCE = 600.0  # seconds during which a result that cannot be written is tried again
_TRY_AGAIN = 5.0


def run(grid: Grid, values: Mapping[str, Any]) -> Path:
    """Run the strategy that the run config names, or go on with the run that it resumes.

    Everything is left in a run directory, which is returned. Raises ConfigError before anything starts, and RoundFailed
    when clients give too few replies; the model of the last finished round is saved even then, and the run can be
    resumed.
    """
    config, directory = open_run(values)
    model, blocks = build_model(config)
    strategy = build_strategy(config, blocks)
    if directory is None:
        directory = RunDirectory.create(Path(config.rounds.runs).expanduser(), config.rounds.strategy, config.flat)
    with directory.in_use():
        log.info("%s%s", KEPT_IN, directory.path.resolve())
        resumed = bool(config.rounds.resume)
        if resumed:
            directory.write_config({**config.flat, "runs": directory.config.get("runs"), "resume": ""})
        strategy.experiment = f"{directory.path.name}-{uuid.uuid4().hex[:8]}"
        strategy.checkpoints = Checkpoints(directory.path / CHECKPOINTS, config.rounds.checkpoints)
        strategy.resume = resumed
        seconds_before = total(read_metrics(directory.path), "seconds") or 0.0
        begun = time.monotonic()
        result, failure = _start(strategy, grid, config, values, model, directory)
        arrays = {name: array.numpy() for name, array in result.arrays.items()}
        info = dataset_of(config)
        of_images = {"image-shape": "x".join(map(str, info.shape)), "classes": str(info.classes)}
        _insist(lambda: directory.write_model(arrays, of_images))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        seconds = round(seconds_before + time.monotonic() - begun, 3)
        stopped_by = None if failure is None else str(failure)
        summary = _insist(
            lambda: directory.write_summary(parameters=parameters, seconds=seconds, stopped_by=stopped_by)
        )
        log.info("Accuracy %s after %s rounds.", summary["accuracy"], summary["rounds"])
        try:
            log.info("Report: %s", write_report(directory.path).resolve())
        except OSError as error:
            log.error("%s. `tepal report %s` writes it, when there is room.", error, directory.path)
        if failure is not None:
            raise failure
    return directory.path


def _start(
    strategy: MethodStrategy,
    grid: Grid,
    config: RunConfig,
    values: Mapping[str, Any],
    model: nn.Module,
    directory: RunDirectory,
) -> tuple[Result, RoundFailed | None]:
    """All rounds; the result, and why there is no more of it, where the clients failed."""
    assert strategy.blocks is not None
    model_bytes = strategy.blocks.layout.nbytes()
    strategy.on_round = lambda report: _keep(report, model_bytes, directory)
    # Clients have the config of the Flower run. Where that is not this run's, because it is resumed, they are told.
    told = {key: value for key, value in config.flat.items() if key not in _OWN and values.get(key, value) != value}
    settings = ConfigRecord({**told, **config.training.model_dump(by_alias=True)})
    try:
        result = strategy.start(
            grid,
            join_modes(ArrayRecord(start.state_dict()) for start in _starts(config, model)),
            num_rounds=config.rounds.num_server_rounds,
            timeout=config.rounds.round_timeout,
            train_config=settings,
            evaluate_config=settings,
            evaluate_fn=server_evaluation(config, model),
        )
        return result, None
    except (CheckpointError, MethodError) as error:
        raise ConfigError(str(error)) from error
    except RoundFailed as failure:
        log.error("%sresume=%s", GO_ON, json.dumps(str(directory.path.resolve())))
        if failure.result is None:
            raise
        return failure.result, failure


def _insist(write: Callable[[], T]) -> T:
    """Write a result of the run: where that fails, say so and try again for some minutes; it is nowhere else."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            return write()
        except OSError as error:
            if time.monotonic() > give_up:
                raise
            log.error("%s. It is tried again for %d minutes.", error, _PATIENCE / 60)
            time.sleep(_TRY_AGAIN)


def build_model(config: RunConfig, seed: int | None = None) -> tuple[nn.Module, Blocks]:
    """The run's model with its initial weights, and its blocks. Raises ConfigError for what does not fit together.

    `seed`: of the weights, by default the run's.
    """
    info = dataset_of(config)
    try:
        model = models.build(
            config.rounds.model,
            image_shape=info.shape,
            classes=info.classes,
            seed=config.rounds.seed if seed is None else seed,
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
        return _strategy(rounds.strategy, config, options)
    except MethodError as error:
        raise ConfigError(f"strategy={rounds.strategy!r} with model={rounds.model!r}: {error}") from error


def _strategy(name: str, config: RunConfig, options: Mapping[str, Any]) -> MethodStrategy:
    match name:
        case "fedfrozen":
            return FedFrozen(**config.fedfrozen.model_dump(), **options)
        case "selective":
            own = config.selective.model_dump()
            if own.pop("draw_budgets"):
                own["budget"] = "drawn"
            return SelectiveLayers(**own, **options)
        case "fedensemble":
            own = config.fedensemble.model_dump()
            return FedEnsemble(**{**own, "member": _strategy(own["member"], config, options)}, **options)
        case "fedacs":
            return FedACS(**config.fedacs.model_dump(), **options)
        case _:
            return FedAvg(**options)


def _starts(config: RunConfig, model: nn.Module) -> Iterator[nn.Module]:
    """The model, or the modes of an ensemble: the first is the model, the others are initialised independently."""
    yield model
    if config.rounds.strategy == "fedensemble":
        for mode in range(1, config.fedensemble.modes):
            seed = int(np.random.SeedSequence([config.rounds.seed, mode]).generate_state(1)[0])
            yield build_model(config, seed)[0]


def _keep(report: RoundReport, model_bytes: int, directory: RunDirectory) -> None:
    if report.record:
        try:
            directory.write_record(report.round, report.record)
        except OSError as error:
            log.error("%s. The run goes on without.", error)
    directory.add(metrics_line(report, model_bytes))


def server_evaluation(config: RunConfig, model: nn.Module) -> Callable[[int, ArrayRecord], MetricRecord] | None:
    """Scores the global model, or an ensemble, on the server's held-out examples.

    None where the server has none, and where every client has a model of its own.
    """
    examples = held_out(config.data)
    if examples is None or config.rounds.strategy == "fedacs":
        return None
    images, labels = torch.from_numpy(examples.images), torch.from_numpy(examples.labels)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        modes = modes_of(arrays)
        states = (ArrayRecord(mode).to_torch_state_dict() for mode in modes)
        scored = score_ensemble(model, states, images, labels, config.training)
        figures = {"accuracy": scored.accuracy, "loss": scored.loss, "examples": scored.examples}
        diversity = {name.replace("_", "-"): value for name, value in vars(scored.diversity).items()}
        return MetricRecord(figures | (diversity if len(modes) > 1 else {}))

    return evaluate


def metrics_line(report: RoundReport, model_bytes: int) -> dict[str, Any]:
    """One round as a line of `metrics.jsonl`.

    `accuracy` and `loss` are of the global model (or ensemble) after the round, on the server's held-out examples or,
    with `accuracy_of` "clients", on the clients' own test examples. "personal": every client has a model of its own,
    and it is the mean over the clients of each one's on its own test examples. `received_…` are of the model that the
    round started from, on the clients' test examples, and `clients_…` of the result of the round: mean and standard
    deviation over the clients, each counted alike.
    """
    train, server = report.train_metrics, report.server_metrics
    clients = _of_result(report)
    accuracy_of = None
    if "accuracy" in server:
        accuracy_of = "server"
    elif clients["accuracy"] is not None:
        accuracy_of = "clients" if report.scored == "received" else "personal"
    scored: Mapping[str, float | None] = server if accuracy_of == "server" else clients
    return {
        "round": report.round,
        "phase": report.phase,
        "clients_asked": len(report.asked),
        "clients_replied": len(report.replied),
        "refused": _said(report.refused),
        "lost": _said(report.lost),
        "late": _said((client, f"it is an answer to round {number}") for client, number in report.late),
        "left_out": _said((client, "it failed several times in a row") for client in report.left_out),
        "notes": _said(report.notes),
        "accuracy": scored.get("accuracy"),
        "loss": scored.get("loss"),
        "accuracy_of": accuracy_of,
        "clients_accuracy": clients["mean"],
        "clients_spread": clients["spread"],
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
        **{name.replace("-", "_"): server[name] for name in _DIVERSITY if name in server},
    }


def _of_result(report: RoundReport) -> dict[str, float | None]:
    """What clients measured of the round's result on their own test examples.

    `accuracy` and `loss` as they are averaged (by test examples, but for personal models); `mean` and `spread` of the
    accuracy over the clients, each counted alike.
    """
    measured, of = report.evaluate_metrics, f"{report.judged}-"
    if f"{of}accuracy" not in measured:
        # Without an evaluation, what was measured in training; an app of one's own may say "accuracy" and no more.
        trains, plain = report.scored == "trained", report.judged == "received"
        measured, of = (report.train_metrics, "trained-") if trains else (measured if plain else {}, "")
    mean, spread = report.over_clients.get(f"{of}accuracy", (measured.get("accuracy"), None))
    return {
        "accuracy": measured.get(f"{of}accuracy"),
        "loss": measured.get(f"{of}loss"),
        "mean": mean,
        "spread": spread,
    }


_DIVERSITY = ("lowest-accuracy", "highest-accuracy", "entropy", "disagreement")  # of an ensemble's modes


def _said(reasons: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"client": client, "reason": reason} for client, reason in reasons]
