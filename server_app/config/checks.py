"""Checks of a run config, as messages: unknown keys, wrong values, and contradictions between keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from tepal import models
from tepal.models.weights import misspelt
from tepal.server_app.config.ending import ending_problems, ending_warnings, scoring_problems
from tepal.server_app.config.run_config import RunConfig, defaults
from tepal.server_app.config.wire import wire_problems, wire_warnings
from tepal.server_app.trackers import TrackerError, missing, names_of, with_password
from tepal.training.data import BY_LABEL, LOCAL, DataError
from tepal.training.data.inputs import held_out_inputs, sizes
from tepal.training.foreign_images import LETTERS
from tepal.training.node_settings import with_own_settings


def unknown(keys: Iterable[str]) -> Iterator[str]:
    """Yield the messages for keys that do not exist: one for each that resembles others, and one for the rest."""
    known = defaults()
    unlike: list[str] = []
    for key in keys:
        near = [name for name in known if name.rpartition(".")[2] == key] or get_close_matches(key, known, n=1)
        if near:
            yield f"{key!r} is not a key of the run config: did you mean {' or '.join(map(repr, near))}?"
        else:
            unlike.append(key)
    if unlike:
        what = "is not a key" if len(unlike) == 1 else "are not keys"
        general = ", ".join(sorted(name for name in known if "." not in name))
        yield (
            f"{', '.join(map(repr, unlike))} {what} of the run config: allowed are {general}; and <strategy>.<option>"
        )


def explain(section: type[BaseModel], error: dict[str, Any]) -> str:
    """Return the message for a wrong value.

    Args:
        section: the class with the key.
        error: one of pydantic's errors.
    """
    key = str(error["loc"][0])
    field = next(
        (f for f in section.model_fields.values() if f.alias == key), section.model_fields.get(key.replace("-", "_"))
    )
    value = error["input"]
    reason = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "literal_error":
        allowed = [str(option) or '""' for option in get_args(field.annotation)] if field else []
        near = get_close_matches(str(value), allowed, n=1)
        reason = (f"did you mean {near[0]!r}? " if near else "") + f"allowed are {', '.join(allowed)}"
    about = f" ({field.description.partition('. ')[0]})" if field and field.description else ""
    return f"{key}={value!r}: {reason}{about}"


def contradictions(config: RunConfig) -> list[str]:
    """Return a message for each combination of allowed values that cannot be run together."""
    rounds = config.rounds
    found: list[str] = []
    try:
        regression = config.data.kind == models.SEQUENCES
    except models.ModelError as error:
        regression = False
        found.append(f"model: {error}")
    if rounds.max_replies and rounds.max_replies < rounds.min_replies:
        found.append(f"max-replies={rounds.max_replies} is less than min-replies={rounds.min_replies}")
    if config.training.deterministic and rounds.max_replies:
        found.append(
            f"deterministic=true and max-replies={rounds.max_replies}: the order of replies differs between runs, and "
            "so do the first ones; set max-replies=0"
        )
    if not config.training.local_steps and not config.training.local_epochs:
        found.append("local-epochs=0 and local-steps=0: clients would not train; set one of them")
    found += wire_problems(config)
    found += _start_problems(config)
    found += _training_contradictions(config)
    found += _client_problems(config)
    found += _tracker_problems(config)
    if config.fedfrozen.ridge and config.blocks.query_key and not config.blocks.value_projection:
        found.append(
            f"fedfrozen.ridge={config.fedfrozen.ridge:g} applies to the value projections, but blocks.query-key is set "
            "without blocks.value-projection: set it, too"
        )
    if "selective" in config.strategies and config.selective.draw_budgets and config.selective.costs != "layers":
        found.append(
            f"selective.draw-budgets=true and selective.costs={config.selective.costs!r}: drawn budgets are numbers of "
            "layers; set selective.costs='layers'"
        )
    found += _only_for_classes(config) if regression else _nothing_to_distil_on(config)
    found += _foreign_problems(config)
    found += _augmentation_problems(config)
    found += ending_problems(config)
    if not found:
        try:
            sizes(config.data)
            if config.rounds.foreign_images and held_out_inputs(config.data) is None:
                found.append(
                    f"foreign-images=true and held-out-fraction={config.data.held_out_fraction:g}: the server has no "
                    "held-out images, from which they are made: set held-out-fraction above 0"
                )
            found += scoring_problems(config)
        except DataError as error:
            found.append(str(error))
    return found


def _start_problems(config: RunConfig) -> Iterator[str]:
    given, sources = config.rounds.pretrained, config.rounds.sources
    if not all(sources):
        yield f"pretrained={given!r} has nothing before or after a comma: name weights there, or remove the comma"
    elif len(sources) > 1 and config.rounds.strategy != "fedensemble":
        yield (
            f"pretrained={given!r} names {len(sources)} sources, but strategy={config.rounds.strategy!r} starts from "
            "one model: name one (fedensemble takes one for each of its modes)"
        )
    elif len(sources) > 1 and len(sources) != config.fedensemble.modes:
        yield (
            f"pretrained={given!r} names {len(sources)} sources, but fedensemble.modes={config.fedensemble.modes}: "
            "name one for all modes, or one for each"
        )
    for source in sources:
        if (near := misspelt(source)) and not Path(source).expanduser().exists():
            yield f"pretrained={given!r}: no weights are named {source!r}: did you mean {near!r}?"


_PLAIN_STEPS = ("perfedavg", "pfedme", "apfl")  # strategies whose clients take steps without an optimizer


def _training_contradictions(config: RunConfig) -> Iterator[str]:
    strategy, training = config.rounds.strategy, config.training
    if strategy == "scaffold" and training.optimizer != "sgd":
        yield (
            f"strategy='scaffold' and optimizer={training.optimizer!r}: a control variate is a mean gradient "
            "under plain SGD only; set optimizer='sgd' and a learning-rate for it"
        )
    if strategy in _PLAIN_STEPS and training.autocast == "fp16":
        yield f"strategy={strategy!r} and autocast='fp16': its gradients are not scaled; choose 'bf16' or 'no'"
    if strategy == "apfl" and training.gradient_checkpointing:
        yield (
            "strategy='apfl' and gradient-checkpointing=true: its mixture of models no longer exists when activations "
            "are recomputed; set gradient-checkpointing=false (micro-batch-size saves memory, too)"
        )
    if strategy == "pfedme" and _outer_step(config) >= 2:
        yield (
            f"pfedme.lambda={config.pfedme.lam:g} and learning-rate={training.learning_rate:g}: w ← w − ηλ(w − θ) "
            "diverges if their product is 2 or more; lower one of them, or set pfedme.outer-step"
        )


def _outer_step(config: RunConfig) -> float:
    """Return s of pFedMe's w ← w − s(w − θ) at the highest learning rate."""
    return config.pfedme.outer_step or config.training.learning_rate * config.pfedme.lam


def _client_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems that single clients of a simulation have with their own settings, and the others do not."""
    known = {*_training_contradictions(config), *_augmentation_problems(config)}
    for client, own in config.clients.items():
        place = f"client.{client}: "
        for key in ("data-path", "model-path"):
            if key in own and not Path(str(own[key])).is_absolute():
                yield f"{place}{key}={own[key]!r}: expected an absolute path: a ClientApp has a folder of its own"
        try:
            merged = replace(config, training=with_own_settings(config.flat, own))
        except ValueError as error:
            yield f"{place}{error}"
            continue
        for problem in (*_training_contradictions(merged), *_augmentation_problems(merged)):
            if problem not in known:
                yield place + problem


def _tracker_problems(config: RunConfig) -> Iterator[str]:
    given = config.rounds.trackers
    try:
        names = names_of(given)
    except TrackerError as error:
        yield f"trackers={given!r}: {error}"
        return
    yield from (f"trackers={given!r}: {problem}" for problem in missing(names))
    if with_password(config.mlflow.tracking_uri):
        yield (
            "mlflow.tracking-uri contains a password, but a run config is saved in files and sent to the clients: set "
            "$MLFLOW_TRACKING_URI on the server, or $MLFLOW_TRACKING_USERNAME and $MLFLOW_TRACKING_PASSWORD"
        )


def _only_for_classes(config: RunConfig) -> Iterator[str]:
    """Yield a message for each value that needs classes, which a regression does not have."""
    does = f"model={config.rounds.model!r} is for {config.data.kind}, whose targets are numbers"
    if config.data.dataset != LOCAL and config.data.partitioner in BY_LABEL:
        yield (
            f"partitioner={config.data.partitioner!r} divides examples by their classes, but {does}: set partitioner "
            "to iid or natural (by groups)"
        )
    if config.rounds.strategy == "fedbe" and config.fedbe.distil:
        yield (
            f"strategy='fedbe' distils probabilities of classes, but {does}: set fedbe.distil=false (the next "
            "model is then a random draw)"
        )


def _kind(config: RunConfig) -> str:
    """Return the model's task; "" for a model that does not exist, which is a message of its own."""
    try:
        return config.data.kind
    except models.ModelError:
        return ""


_WITH_LETTERS = ("emnist", "femnist")


def _foreign_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message if images of no class are to be predicted and the server cannot make or predict them."""
    if not config.rounds.foreign_images:
        return
    key, off = "foreign-images=true", "set foreign-images=false"
    kind = _kind(config)
    if not kind:
        return
    if kind != models.IMAGES:
        yield f"{key} is for image classification, but model={config.rounds.model!r} is for {kind}: {off}"
    elif config.data.dataset == LOCAL:
        yield (
            f"{key}: with dataset={LOCAL!r} the server has no held-out images, from which they are made: set dataset "
            f"to one that the server can read, or {off}"
        )
    elif config.data.dataset in _WITH_LETTERS or any(name.upper() in {*LETTERS} for name in config.data.names):
        yield f"{key}: letters are among the classes of dataset={config.data.dataset!r}: {off}"


def _augmentation_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message if what is only for images is set for other data."""
    training = config.training
    given = {"augment-crop": training.augment_crop, "augment-flip": training.augment_flip}
    named = [f"{key}={json.dumps(value)}" for key, value in given.items() if value]
    kind = _kind(config)
    if named and kind not in ("", models.IMAGES):
        yield (
            f"{' and '.join(named)}: only images are augmented, but model={config.rounds.model!r} is for {kind}: "
            f"remove {'it' if len(named) == 1 else 'them'}"
        )


def _nothing_to_distil_on(config: RunConfig) -> Iterator[str]:
    """Yield a message if FedBE is to distil and the server has no unlabelled examples."""
    if config.rounds.strategy != "fedbe" or not config.fedbe.distil:
        return
    without = "or fedbe.distil=false (the next model is then a random draw)"
    if config.data.dataset == LOCAL:
        yield (
            f"strategy='fedbe' distils on unlabelled examples, but with dataset={LOCAL!r} the server has none: set "
            f"dataset to one that the server can read, and server-share above 0, {without}"
        )
    elif not config.data.server_share:
        yield (
            "strategy='fedbe' distils on unlabelled examples, but with server-share=0.0 the server has none: set "
            f"server-share, for example to 0.2, {without}"
        )


def warnings(config: RunConfig) -> list[str]:
    """Return messages about settings that can be run but are probably not intended."""
    return [*ending_warnings(config), *wire_warnings(config), *_method_warnings(config)]


def _method_warnings(config: RunConfig) -> Iterator[str]:
    rounds = config.rounds
    if "fedfrozen" in config.strategies and config.fedfrozen.warmup_rounds >= rounds.num_server_rounds:
        yield (
            f"fedfrozen.warmup-rounds={config.fedfrozen.warmup_rounds} and num-server-rounds="
            f"{rounds.num_server_rounds}: nothing is ever frozen, so this run is FedAvg."
        )
    if "selective" in config.strategies and not rounds.sources:
        yield (
            "selective layers with pretrained='': this method is for fine-tuning. From random weights, layers that are "
            "seldom chosen learn little, and the accuracy may stay at a guess; start from trained weights."
        )
    if rounds.strategy in ("scaffold", "feddyn") and rounds.robust != "none":
        yield (
            f"strategy='{rounds.strategy}' with robust='{rounds.robust}': a client keeps all of its correction, "
            "and the server merges a part of it, so the server's is an estimate, whose error lasts."
        )
    if rounds.strategy == "scaffold" and config.training.momentum:
        yield (
            f"strategy='scaffold' with momentum={config.training.momentum:g}: the control variates are weighted "
            "means of the steps' gradients, so this is not the paper's method."
        )
    by_loss = rounds.strategy == "fedensemble" and config.fedensemble.assign == "highest-loss"
    if by_loss and not config.training.score_in_training:
        yield (
            "fedensemble.assign='highest-loss' with score-in-training=false: the modes' losses are measured as clients "
            "train, so no client has any, and all train the modes by the schedule."
        )
    if rounds.strategy == "pfedme" and config.training.momentum:
        yield (
            f"strategy='pfedme' with momentum={config.training.momentum:g}: its steps are of plain gradient descent, "
            "which has none."
        )
    if rounds.strategy == "pfedme" and (step := _outer_step(config)) > 1:
        yield (
            f"learning-rate={config.training.learning_rate:g} times pfedme.lambda={config.pfedme.lam:g} is {step:g}: "
            "above 1, each step w ← w − ηλ(w − θ) goes beyond θ. Lower learning-rate, lower pfedme.lambda, or set "
            "pfedme.outer-step."
        )
