"""One run on the server: from run config, model and strategy to a run directory. Called by `app.py`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from tepal import models
from tepal.exchange.modes import join_modes
from tepal.models.blocks import Blocks, BlocksError, find_blocks
from tepal.models.initial import seed_of_mode
from tepal.models.pretrained import Loaded, load_pretrained
from tepal.models.weights import card, shipped
from tepal.records.live import Live
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    ACCURACY,
    CHECKPOINTS,
    KEPT_IN,
    RMSE,
    RunDirectory,
    ending,
    point_latest_at,
    read_metrics,
    total,
)
from tepal.report.run_page import write_report
from tepal.server_app.best import best_model, ending_figures, ending_metadata
from tepal.server_app.config import ConfigError, RunConfig, open_run, sizes_of
from tepal.server_app.distillation import Distiller
from tepal.server_app.evaluation import server_evaluation
from tepal.server_app.grid import prompt
from tepal.server_app.trackers import TrackerError, Trackers, check_trackers, open_trackers
from tepal.strategies import STRATEGIES, MethodError, MethodStrategy, NoAttentionError, RoundFailed, RoundReport
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.state_json import CheckpointError
from tepal.strategies.rounds.travel import segments
from tepal.training.data import DataError
from tepal.training.data.inputs import (
    FOUND_NAMES,
    found_shape,
    settled,
    unlabelled_inputs,
    written_names,
    written_sizes,
)
from tepal.training.data.tokens import TokenizerError
from tepal.training.tasks import TASKS

log = getLogger("flwr")

T = TypeVar("T")

_NAME_THEM = (
    "Name the blocks in the run config, by patterns of entry names in blocks.query-key (and blocks.layers, "
    "blocks.embedding, blocks.head)"
)
# Keys that concern this server only, and are not sent to the clients.
_OWN = (
    "runs", "resume", "resume-with", "pretrained", "foreign-images", "deliver", "best-metric", "patience",
    "min-improvement", "trackers", "mlflow.tracking-uri", "mlflow.experiment", "wandb.project", "wandb.entity",
    "wandb.mode",
)  # fmt: skip
_PATIENCE = 600.0  # seconds for which writing a result is tried again
_TRY_AGAIN = 5.0  # seconds between two attempts


def run(grid: Grid, values: Mapping[str, Any]) -> Path:
    """Run the strategy that the run config names, or resume a run.

    Args:
        grid: Flower's connection to the clients.
        values: key → value of the run config.

    Returns:
        The run directory, with all results.

    Raises:
        ConfigError: the run config is invalid, or cannot be used with this model and data; no client was contacted.
        RoundFailed: a round had too few valid replies. The model of the last finished round is saved, and the run can
            be resumed.
    """
    config, directory = open_run(values)
    model, blocks = build_model(config)
    strategy = build_strategy(config, blocks)
    if directory is None:  # a resumed run continues even if its tracker is not available
        try:
            check_trackers(config)
        except TrackerError as error:
            raise ConfigError(str(error)) from error
    loaded = None
    # A resumed run has its weights in its checkpoint: the file of its initial weights may no longer exist.
    if config.rounds.sources and (directory is None or not Checkpoints(directory.path / CHECKPOINTS).latest()):
        loaded = _load_first(config, model, blocks)
    if directory is None:
        directory = RunDirectory.create(Path(config.rounds.runs).expanduser(), config.rounds.strategy, config.flat)
    with directory.in_use(), open_trackers(config, directory.path) as trackers:
        log.info("%s%s", KEPT_IN, directory.path.resolve())
        if config.clients:
            log.info("Clients with their own settings: %s", config.rounds.client_settings)
        resumed = bool(config.rounds.resume)
        if resumed:
            own = {"runs": directory.config.get("runs"), "resume": "", "resume-with": ""}
            directory.write_config({**config.flat, **own})
            point_latest_at(directory.path)
        strategy.experiment = f"{directory.path.name}-{uuid.uuid4().hex[:8]}"
        strategy.checkpoints = Checkpoints(directory.path / CHECKPOINTS, config.rounds.checkpoints)
        strategy.resume = resumed
        seconds_before = total(read_metrics(directory.path, most=None), "seconds") or 0.0
        begun = time.monotonic()
        starts = _starts(config, model, blocks, loaded)
        result, failure = _start(strategy, grid, config, values, model, starts, directory, trackers)
        arrays = {name: array.numpy() for name, array in result.arrays.items()}
        figures = ending_figures(config, strategy)
        metadata = {
            **written_sizes(sizes_of(config)), **written_names(config.data), **settled(config.data),
            **ending_metadata(figures),
        }  # fmt: skip
        _insist(lambda: directory.write_model(arrays, metadata))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        seconds = round(seconds_before + time.monotonic() - begun, 3)
        stopped_by = None if failure is None else str(failure)
        summary = _insist(
            lambda: directory.write_summary(parameters=parameters, seconds=seconds, stopped_by=stopped_by, **figures)
        )
        by = RMSE if TASKS[config.data.kind].regression else ACCURACY
        log.info("%s %s after %s rounds.", by.title, summary[by.key], summary["rounds"])
        if said := ending(summary):
            log.info("%s.", said)
        try:
            log.info("Report: %s", write_report(directory.path).resolve())
        except (OSError, ValueError) as error:
            log.error("%s. After making space, write the report with `tepal report %s`.", error, directory.path)
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
    """Run all rounds; return the result, and the error of a round with too few replies, if one ended the run."""
    assert strategy.blocks is not None
    model_bytes = strategy.blocks.layout.nbytes()
    live = Live(directory.path, config.rounds.num_server_rounds)
    live.model(segments(strategy.blocks.layout, strategy.blocks))
    strategy.on_progress = live.progress

    def keep(report: RoundReport) -> None:
        try:
            if report.record:
                directory.write_record(report.round, report.record)
        except OSError as error:
            log.error("%s. The run continues without it.", error)
        try:
            directory.add_label_counts(report.label_counts)
        except (OSError, ValueError) as error:
            log.error("%s. The run continues without it.", error)
        line = RoundRecord.of(report, model_bytes, TASKS[config.data.kind])
        directory.add(line)
        trackers.add(line)
        live.end_round(report)

    strategy.on_round = keep
    # Clients have the config of the Flower run, which differs from this run's if it is resumed.
    own = {*_OWN} - ({"pretrained"} if config.wire.made else set())
    changed = {key: value for key, value in config.flat.items() if key not in own and values.get(key, value) != value}
    if not config.data.names and (names := written_names(config.data)):
        changed[FOUND_NAMES] = names["class-names"]
    changed |= {**settled(config.data), **found_shape(config.data)}
    settings = ConfigRecord({**changed, **config.training.model_dump(by_alias=True)})
    evaluate = None if strategy.method.eval_metrics_of == "personal" else server_evaluation(config, model)
    strategy.best = best_model(config, strategy, on_server=evaluate is not None)
    try:
        result = strategy.start(
            prompt(grid),
            join_modes(ArrayRecord(start.state_dict()) for start in starts),
            num_rounds=config.rounds.num_server_rounds,
            timeout=config.rounds.round_timeout,
            train_config=settings,
            evaluate_config=settings,
            evaluate_fn=evaluate,
        )
        return result, None
    except (CheckpointError, MethodError) as error:
        raise ConfigError(str(error)) from error
    except RoundFailed as failure:
        path = json.dumps(str(directory.path.resolve()))
        log.error("To resume the run after the problem is solved, set resume=%s in its run config.", path)
        if failure.result is None:
            raise
        return failure.result, failure
    finally:
        live.close()


def _insist(write: Callable[[], T]) -> T:
    """Write a result of the run; if that fails, log it and try again for some minutes, as there is no other copy."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            return write()
        except OSError as error:
            if time.monotonic() > give_up:
                raise
            log.error("%s. Trying again for up to %d minutes.", error, _PATIENCE / 60)
            time.sleep(_TRY_AGAIN)


def build_model(config: RunConfig, seed: int | None = None) -> tuple[nn.Module, Blocks]:
    """Build the run's model with random weights, and find its blocks.

    Args:
        config: the run config.
        seed: seed of the weights; by default the run's.

    Raises:
        ConfigError: the data cannot be read, the model cannot be built for it, or its blocks cannot be found.
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
        written = ", ".join(f"{name}={size}" for name, size in written_sizes(sizes).items())
        raise ConfigError(f"model={config.rounds.model!r} with {written}: {error}") from error
    return model, blocks


def build_strategy(config: RunConfig, blocks: Blocks) -> MethodStrategy:
    """Return the run's strategy for a model with these blocks. Raises ConfigError if it cannot train the model."""
    rounds = config.rounds
    trainings = {"": config.training, **{f"client.{key}: ": own for key, own in config.trainings.items()}}
    for whose, training in trainings.items():
        if training.gradient_checkpointing and not blocks.layers:
            raise ConfigError(
                f"{whose}gradient-checkpointing=true: model={rounds.model!r} has no layers: set it to false"
            )
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
        "max_weight_share": rounds.max_weight_share,
        "classes": sizes_of(config).get("classes") if TASKS[config.data.kind].macro_f1 else None,
        "robust": rounds.robust,
        "hostile_share": rounds.hostile_share,
        "krum_keep": rounds.krum_keep,
        "encoding": config.wire.encoding(rounds.seed),
    }
    try:
        strategy = _strategy(rounds.strategy, config, options)
    except NoAttentionError as error:
        raise ConfigError(
            f"strategy={rounds.strategy!r} with model={rounds.model!r}: {error} Its entries are "
            f"{', '.join(blocks.layout.names[:12])}{', …' if len(blocks.layout.names) > 12 else ''}. {_NAME_THEM}."
        ) from error
    except MethodError as error:
        raise ConfigError(f"strategy={rounds.strategy!r} with model={rounds.model!r}: {error}") from error
    if rounds.foreign_images and strategy.method.eval_metrics_of == "personal":
        raise ConfigError(
            f"foreign-images=true: the server predicts with a global model or an ensemble, but strategy="
            f"{rounds.strategy!r} trains a personal model for each client: set foreign-images=false"
        )
    return strategy


def _strategy(name: str, config: RunConfig, options: Mapping[str, Any]) -> MethodStrategy:
    own = config.options[name].model_dump() if name in config.options else {}
    if name == "fedbe":
        own = _with_distiller(config)
    if name == "fedensemble":
        own["member"] = _strategy(own["member"], config, options)
    return STRATEGIES[name].strategy(**own, **options)


def _with_distiller(config: RunConfig) -> dict[str, Any]:
    """Return FedBE's options, with a `Distiller` as `distil`. Raises ConfigError if its data cannot be read."""
    own = config.fedbe.model_dump()
    training = {key: own.pop(key) for key in ("epochs", "learning_rate", "batch_size", "temperature")}
    if own["distil"]:
        try:
            inputs = unlabelled_inputs(config.data)
        except (DataError, TokenizerError) as error:
            raise ConfigError(str(error)) from error
        assert inputs is not None, "read_run_config requires server-share above 0"
        model, blocks = build_model(config)
        own["distil"] = Distiller(
            model,
            blocks.layout,
            inputs,
            seed=config.rounds.seed,
            deterministic=config.training.deterministic,
            task=TASKS[config.data.kind],
            micro_batch_size=config.training.micro_batch_size,
            **training,
        )
    return own


def _load_first(config: RunConfig, model: nn.Module, blocks: Blocks) -> Loaded:
    """Load the initial weights into the model; of several, those of the first mode, after checking the others.

    Raises ConfigError if one of them cannot be loaded.
    """
    for source in config.rounds.sources[1:]:
        _load(build_model(config)[0], blocks, source)
    loaded = _load(model, blocks, config.rounds.sources[0])
    for source in config.rounds.sources:
        if warning := _other_normalisation(source, config):
            log.warning("%s", warning)
    return loaded


def _load(model: nn.Module, blocks: Blocks, source: str) -> Loaded:
    try:
        loaded = load_pretrained(model, blocks, source)
    except models.ModelError as error:
        raise ConfigError(f"pretrained={source!r}: {error}") from error
    log.info("%s", loaded)
    return loaded


def _other_normalisation(source: str, config: RunConfig) -> str:
    """Return a warning if shipped weights were trained on images that were normalised in another way, else ""."""
    if source not in shipped() or (trained := card(source).get("normalise")) in (None, config.data.normalise):
        return ""
    return (
        f"pretrained={source!r} was trained with normalise={trained!r}, but normalise={config.data.normalise!r} here, "
        f"where its features are worth less: set normalise={trained!r}"
    )


def _starts(config: RunConfig, model: nn.Module, blocks: Blocks, loaded: Loaded | None) -> Iterator[nn.Module]:
    """Yield the initial model, or those of an ensemble's modes: the first is `model`, the others have other seeds.

    If weights were loaded, each mode has its own, or all modes have the same and differ only in the entries that the
    file does not have.
    """
    yield model
    if config.rounds.strategy == "fedensemble":
        for mode in range(1, config.fedensemble.modes):
            other = build_model(config, seed_of_mode(config.rounds.seed, mode))[0]
            if loaded and len(config.rounds.sources) > 1:
                load_pretrained(other, blocks, config.rounds.sources[mode])
            elif loaded:
                drawn = other.state_dict()
                other.load_state_dict(model.state_dict() | {name: drawn[name].clone() for name in loaded.fresh})
            yield other
