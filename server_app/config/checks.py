"""What is wrong with a run config: unknown keys, wrong values, and contradictions between keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

from tepal import models
from tepal.server_app.config.run_config import RunConfig, defaults
from tepal.server_app.trackers import TrackerError, missing, names_of, with_password
from tepal.training.data import BY_LABEL, LOCAL, DataError
from tepal.training.data.inputs import sizes


def unknown(key: str) -> str:
    """That a key does not exist, and which one may be meant."""
    known = defaults()
    near = [name for name in known if name.rpartition(".")[2] == key] or get_close_matches(key, known, n=1)
    general = ", ".join(sorted(name for name in known if "." not in name))
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {general}; and <strategy>.<option>"
    return f"{key!r} is no key of the run config: {hint}"


def explain(section: type[BaseModel], error: dict[str, Any]) -> str:
    """What is wrong with one value, as pydantic found it, with what its key is for."""
    key = str(error["loc"][0])
    field = next(
        (f for f in section.model_fields.values() if f.alias == key), section.model_fields.get(key.replace("-", "_"))
    )
    value = error["input"]
    said = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "literal_error":
        allowed = [str(option) for option in get_args(field.annotation)] if field else []
        near = get_close_matches(str(value), allowed, n=1)
        said = (f"did you mean {near[0]!r}? " if near else "") + f"known are {', '.join(allowed)}"
    about = f" ({field.description.partition('. ')[0]})" if field and field.description else ""
    return f"{key}={value!r}: {said}{about}"


def contradictions(config: RunConfig) -> list[str]:
    """Why values that are allowed each by itself cannot be run together; [] where they can."""
    rounds = config.rounds
    found: list[str] = []
    try:
        if config.data.kind == models.SEQUENCES:
            found += _only_for_classes(config)
    except models.ModelError as error:
        found.append(f"model: {error}")
    if rounds.max_replies and rounds.max_replies < rounds.min_replies:
        found.append(f"max-replies={rounds.max_replies} is less than min-replies={rounds.min_replies}")
    if config.training.deterministic and rounds.max_replies:
        found.append("deterministic=true and max-replies do not go together: which replies are first is not determined")
    if not config.training.local_steps and not config.training.local_epochs:
        found.append("local-epochs=0 and local-steps=0: clients would not train; set one of them")
    found += _training_contradictions(config)
    found += _tracker_problems(config)
    if config.fedfrozen.ridge and config.blocks.query_key and not config.blocks.value_projection:
        found.append(
            f"fedfrozen.ridge={config.fedfrozen.ridge:g} is about the value projections, and blocks.query-key is set "
            "without blocks.value-projection: name them there"
        )
    if "selective" in config.strategies and config.selective.draw_budgets and config.selective.costs != "layers":
        found.append(
            f"selective.draw-budgets=true and selective.costs={config.selective.costs!r}: drawn budgets are numbers of "
            "layers"
        )
    found += _nothing_to_distil_on(config)
    if not found:
        try:
            sizes(config.data)
        except DataError as error:
            found.append(str(error))
    return found


_PLAIN_STEPS = ("perfedavg", "pfedme", "apfl")  # strategies whose clients take gradients otherwise than an optimizer


def _training_contradictions(config: RunConfig) -> Iterator[str]:
    strategy, training = config.rounds.strategy, config.training
    if strategy == "scaffold" and training.optimizer != "sgd":
        yield (
            f"strategy='scaffold' and optimizer={training.optimizer!r}: a control variate is a mean gradient under "
            "plain SGD alone; set optimizer='sgd' and a learning-rate for it"
        )
    if strategy in _PLAIN_STEPS and training.autocast == "fp16":
        yield f"strategy={strategy!r} and autocast='fp16': its gradients are not scaled; choose 'bf16' or 'no'"
    if strategy == "apfl" and training.gradient_checkpointing:
        yield (
            "strategy='apfl' and gradient-checkpointing=true: its mixture is not there any more when activations are "
            "computed again; leave gradient-checkpointing off (micro-batch-size saves memory, too)"
        )
    if strategy == "pfedme" and training.learning_rate * config.pfedme.lam >= 2:
        yield (
            f"pfedme.lambda={config.pfedme.lam:g} and learning-rate={training.learning_rate:g}: w ← w − ηλ(w − θ) "
            "diverges where their product is 2 or more"
        )


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
            "mlflow.tracking-uri has a password in it, and a run config is kept in files and told to the clients: give "
            "the server $MLFLOW_TRACKING_URI, or $MLFLOW_TRACKING_USERNAME and $MLFLOW_TRACKING_PASSWORD"
        )


def _only_for_classes(config: RunConfig) -> Iterator[str]:
    """What a regression has no use for."""
    does = f"model={config.rounds.model!r} does {config.data.kind}, whose targets are numbers"
    if config.data.dataset != LOCAL and config.data.partitioner in BY_LABEL:
        yield (
            f"partitioner={config.data.partitioner!r} divides examples by their classes, and {does}: set partitioner "
            "to iid or natural (by groups)"
        )
    if config.rounds.strategy == "fedbe" and config.fedbe.distil:
        yield (
            f"strategy='fedbe' distils probabilities of classes, and {does}: set fedbe.distil=false, and the next "
            "model is a random draw"
        )


def _nothing_to_distil_on(config: RunConfig) -> list[str]:
    if config.rounds.strategy != "fedbe" or not config.fedbe.distil:
        return []
    without = "or fedbe.distil=false, and the next model is a random draw"
    with suppress(models.ModelError):  # which is told elsewhere
        if (kind := config.data.kind) not in (models.IMAGES, models.TEXTS, models.CHARACTERS, models.CHOICES):
            return [
                f"strategy='fedbe' distils probabilities of classes, and model={config.rounds.model!r} does {kind}: "
                f"choose another strategy, {without}"
            ]
    if config.data.dataset == LOCAL:
        return [
            f"strategy='fedbe' distils on unlabelled examples, and dataset={LOCAL!r} gives the server none: name a "
            f"dataset that the server can read, with server-share above 0, {without}"
        ]
    if not config.data.server_share:
        return [
            "strategy='fedbe' distils on unlabelled examples, and server-share=0.0 gives the server none: set "
            f"server-share, for example to 0.2, {without}"
        ]
    return []


def warnings(config: RunConfig) -> list[str]:
    """What a run will do that is hardly meant."""
    rounds = config.rounds
    if "fedfrozen" in config.strategies and config.fedfrozen.warmup_rounds >= rounds.num_server_rounds:
        return [
            f"fedfrozen.warmup-rounds={config.fedfrozen.warmup_rounds} and num-server-rounds="
            f"{rounds.num_server_rounds}: nothing will ever be frozen, so this run is FedAvg."
        ]
    if rounds.strategy == "scaffold" and config.training.momentum:
        return [
            f"strategy='scaffold' with momentum={config.training.momentum:g}: the control variates are mean gradients "
            "under plain SGD alone, so this is not the paper's method."
        ]
    return []
