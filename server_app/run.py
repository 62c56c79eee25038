"""One run on the server: config → model → strategy → run directory. `app.py` calls it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
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
from tepal.exchange.modes import join_modes, modes_of
from tepal.models.blocks import Blocks, BlocksError, find_blocks
from tepal.models.pretrained import Loaded, load_pretrained
from tepal.records.live import Live
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import ACCURACY, CHECKPOINTS, KEPT_IN, RMSE, RunDirectory, read_metrics, total
from tepal.report.run_page import write_report
from tepal.server_app.config import ConfigError, RunConfig, open_run, sizes_of
from tepal.server_app.distillation import Distiller
from tepal.server_app.grid import prompt
from tepal.server_app.trackers import TrackerError, Trackers, check_trackers, open_trackers
from tepal.strategies import STRATEGIES, MethodError, MethodStrategy, NoAttentionError, RoundFailed, RoundReport
from tepal.strategies.rounds.checkpoint import CheckpointError, Checkpoints
from tepal.strategies.rounds.travel import segments
from tepal.training.data import DataError
from tepal.training.data.inputs import FOUND_NAMES, held_out_inputs, unlabelled_inputs, written_names, written_sizes
from tepal.training.data.tokens import TokenizerError
from tepal.training.prediction import score_ensemble
from tepal.training.tasks import TASKS, Task

log = getLogger("flwr")

T = TypeVar("T")

GO_ON = "The run can go on, after what stopped it is mended, with "
"""How a run's log says what to give to `flwr run` to resume it."""

_NAME_THEM = (
    "In the run config, patterns of entry names in blocks.query-key (and blocks.layers, blocks.embedding, blocks.head) "
    "say what is what"
)
# Keys that are about this server, and no business of the clients.
_OWN = ("runs", "resume", "pretrained", "trackers", "mlflow.tracking-uri", "mlflow.experiment")
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
    if directory is None:  # a run that goes on does so without its tracker, too
        try:
            check_trackers(config)
        except TrackerError as error:
            raise ConfigError(str(error)) from error
    loaded = None
    # A run that is resumed has its weights in its checkpoint: the file that it began with may be gone.
    if config.rounds.pretrained and (directory is None or not Checkpoints(directory.path / CHECKPOINTS).latest()):
        loaded = load_weights(config, model, blocks)
        log.info("%s", loaded)
    if directory is None:
        directory = RunDirectory.create(Path(config.rounds.runs).expanduser(), config.rounds.strategy, config.flat)
    with directory.in_use(), open_trackers(config, directory.path) as trackers:
        log.info("%s%s", KEPT_IN, directory.path.resolve())
        resumed = bool(config.rounds.resume)
        if resumed:
            directory.write_config({**config.flat, "runs": directory.config.get("runs"), "resume": ""})
        strategy.experiment = f"{directory.path.name}-{uuid.uuid4().hex[:8]}"
        strategy.checkpoints = Checkpoints(directory.path / CHECKPOINTS, config.rounds.checkpoints)
        strategy.resume = resumed
        seconds_before = total(read_metrics(directory.path), "seconds") or 0.0
        begun = time.monotonic()
        starts = _starts(config, model, loaded)
        result, failure = _start(strategy, grid, config, values, model, starts, directory, trackers)
        arrays = {name: array.numpy() for name, array in result.arrays.items()}
        metadata = {**written_sizes(sizes_of(config)), **written_names(config.data)}
        _insist(lambda: directory.write_model(arrays, metadata))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        seconds = round(seconds_before + time.monotonic() - begun, 3)
        stopped_by = None if failure is None else str(failure)
        summary = _insist(
            lambda: directory.write_summary(parameters=parameters, seconds=seconds, stopped_by=stopped_by)
        )
        by = RMSE if TASKS[config.data.kind].regression else ACCURACY
        log.info("%s %s after %s rounds.", by.title, summary[by.key], summary["rounds"])
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
    starts: Iterator[nn.Module],
    directory: RunDirectory,
    trackers: Trackers,
) -> tuple[Result, RoundFailed | None]:
    """All rounds; the result, and why there is no more of it, where the clients failed."""
    assert strategy.blocks is not None
    model_bytes = strategy.blocks.layout.nbytes()
    task = TASKS[config.data.kind]
    live = Live(directory.path, config.rounds.num_server_rounds)
    live.model(segments(strategy.blocks.layout, strategy.blocks))
    strategy.on_progress = live.progress

    def keep(report: RoundReport) -> None:
        _keep(report, model_bytes, directory, trackers, task)
        live.end_round(report)

    strategy.on_round = keep
    # Clients have the config of the Flower run. Where that is not this run's, because it is resumed, they are told.
    told = {key: value for key, value in config.flat.items() if key not in _OWN and values.get(key, value) != value}
    if not config.data.names and (names := written_names(config.data)):
        told[FOUND_NAMES] = names["class-names"]
    settings = ConfigRecord({**told, **config.training.model_dump(by_alias=True)})
    try:
        result = strategy.start(
            prompt(grid),
            join_modes(ArrayRecord(start.state_dict()) for start in starts),
            num_rounds=config.rounds.num_server_rounds,
            timeout=config.rounds.round_timeout,
            train_config=settings,
            evaluate_config=settings,
            evaluate_fn=None if strategy.method.eval_metrics_of == "personal" else server_evaluation(config, model),
        )
        return result, None
    except (CheckpointError, MethodError) as error:
        raise ConfigError(str(error)) from error
    except RoundFailed as failure:
        log.error("%sresume=%s", GO_ON, json.dumps(str(directory.path.resolve())))
        if failure.result is None:
            raise
        return failure.result, failure
    finally:
        live.close()


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
    sizes = sizes_of(config)
    try:
        model = models.build(config.rounds.model, **sizes, seed=config.rounds.seed if seed is None else seed)
        blocks = find_blocks(model, **config.blocks.patterns)
    except BlocksError as error:
        raise ConfigError(f"model={config.rounds.model!r}: {error}. {_NAME_THEM}") from error
    except models.ModelError as error:
        raise ConfigError(f"model={config.rounds.model!r}: {error}") from error
    except ValueError as error:
        said = ", ".join(f"{name}={size}" for name, size in written_sizes(sizes).items())
        raise ConfigError(f"model={config.rounds.model!r} with {said}: {error}") from error
    return model, blocks


def load_weights(config: RunConfig, model: nn.Module, blocks: Blocks) -> Loaded:
    """Load the weights that the run config names. Raises ConfigError where they are missing or do not fit."""
    try:
        return load_pretrained(model, blocks, config.rounds.pretrained)
    except models.ModelError as error:
        raise ConfigError(f"pretrained={config.rounds.pretrained!r}: {error}") from error


def build_strategy(config: RunConfig, blocks: Blocks) -> MethodStrategy:
    """The run's strategy. Raises ConfigError where it cannot train the model."""
    rounds = config.rounds
    if config.training.gradient_checkpointing and not blocks.layers:
        raise ConfigError(f"gradient-checkpointing=true: model={rounds.model!r} has no layers; leave it off")
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
        "encoding": config.wire.encoding(rounds.seed),
    }
    try:
        return _strategy(rounds.strategy, config, options)
    except NoAttentionError as error:
        raise ConfigError(
            f"strategy={rounds.strategy!r} with model={rounds.model!r}: {error} Its entries are "
            f"{', '.join(blocks.layout.names[:12])}{', …' if len(blocks.layout.names) > 12 else ''}. {_NAME_THEM}."
        ) from error
    except MethodError as error:
        raise ConfigError(f"strategy={rounds.strategy!r} with model={rounds.model!r}: {error}") from error


def _strategy(name: str, config: RunConfig, options: Mapping[str, Any]) -> MethodStrategy:
    own = config.options[name].model_dump() if name in config.options else {}
    if name == "fedbe":
        own = _with_distiller(config)
    if name == "fedensemble":
        own["member"] = _strategy(own["member"], config, options)
    return STRATEGIES[name].strategy(**own, **options)


def _with_distiller(config: RunConfig) -> dict[str, Any]:
    """FedBE's own options, with what distils in the place of `distil`."""
    own = config.fedbe.model_dump()
    training = {key: own.pop(key) for key in ("epochs", "learning_rate", "batch_size")}
    if own["distil"]:
        try:
            inputs = unlabelled_inputs(config.data)
        except (DataError, TokenizerError) as error:
            raise ConfigError(str(error)) from error
        assert inputs is not None, "read_run_config checks that there are some"
        model, blocks = build_model(config)
        seed, deterministic = config.rounds.seed, config.training.deterministic
        task = TASKS[config.data.kind]
        own["distil"] = Distiller(
            model,
            blocks.layout,
            inputs,
            seed=seed,
            deterministic=deterministic,
            task=task,
            micro_batch_size=config.training.micro_batch_size,
            **training,
        )
    return own


def _starts(config: RunConfig, model: nn.Module, loaded: Loaded | None) -> Iterator[nn.Module]:
    """The model, or the modes of an ensemble: the first is the model, the others are initialised independently.

    Of a model whose weights were loaded, they have them too, and differ in what is left to the seed: a new head.
    """
    yield model
    if config.rounds.strategy == "fedensemble":
        for mode in range(1, config.fedensemble.modes):
            seed = int(np.random.SeedSequence([config.rounds.seed, mode]).generate_state(1)[0])
            other = build_model(config, seed)[0]
            if loaded:
                drawn = other.state_dict()
                other.load_state_dict(model.state_dict() | {name: drawn[name].clone() for name in loaded.fresh})
            yield other


def _keep(
    report: RoundReport, model_bytes: int, directory: RunDirectory, trackers: Trackers, task: Task
) -> None:
    if report.record:
        try:
            directory.write_record(report.round, report.record)
        except OSError as error:
            log.error("%s. The run goes on without.", error)
    try:
        directory.add_label_counts(report.label_counts)
    except OSError as error:
        log.error("%s. The run goes on without.", error)
    line = RoundRecord.of(report, model_bytes, task)
    directory.add(line)
    trackers.add(line)


def server_evaluation(
    config: RunConfig, model: nn.Module
) -> Callable[[int, ArrayRecord], MetricRecord | None] | None:
    """Scores the global model, or an ensemble, on held-out examples, after those rounds that are asked for.

    None where the server has none.
    """
    examples = held_out_inputs(config.data)
    if examples is None:
        return None
    images, labels = torch.from_numpy(examples.values), torch.from_numpy(examples.labels)
    task = TASKS[config.data.kind]
    every, last = config.rounds.evaluate_every, config.rounds.num_server_rounds

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every and server_round != last:
            return None
        modes = modes_of(arrays)
        states = (ArrayRecord(mode).to_torch_state_dict() for mode in modes)
        scored = score_ensemble(model, states, images, labels, config.training, task)
        figures: dict[str, Any] = {"loss": scored.loss, "examples": scored.examples, **scored.figures}
        if scored.accuracy is not None:
            figures["accuracy"] = scored.accuracy
        return MetricRecord(figures | (scored.apart if len(modes) > 1 else {}))

    return evaluate
