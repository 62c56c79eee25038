"""The run config: every key with its default, what is allowed, and what it is for; checked before anything starts.

Keys are flat and kebab-case, as Flower's `[tool.flwr.app.config]` and `--run-config` have them; a method's own keys
begin with its name (`fedfrozen.warmup-rounds`). Keys about data and local training are defined where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tepal import models
from tepal.client_app.config import TrainingConfig
from tepal.client_app.data import DataConfig, DataError, DatasetInfo, dataset_info
from tepal.server_app.run_directory import RunDirectory

log = getLogger("flwr")

StrategyName = Literal["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]

Value = str | int | float | bool


class ConfigError(ValueError):
    """A run config that cannot be run; the text names every key that is wrong, its value, and what is allowed."""


def _keys(prefix: str = "") -> ConfigDict:
    return ConfigDict(
        alias_generator=lambda name: prefix + name.replace("_", "-"), populate_by_name=True, extra="ignore", frozen=True
    )


class RoundConfig(BaseModel):
    """Keys of the run and its rounds."""

    model_config = _keys()

    strategy: StrategyName = Field("fedfrozen", description="what is sent and merged")
    model: str = Field("tiny-vit", description="what is trained: " + ", ".join(models.names()))
    num_server_rounds: int = Field(20, ge=1, description="rounds of the run")
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of the available clients that train in a round")
    fraction_evaluate: float = Field(
        1.0, ge=0, le=1, description="share that scores the final model on its own test examples; 0 skips it"
    )
    min_clients: int = Field(2, ge=1, description="clients that must be connected before a round starts")
    min_replies: int = Field(1, ge=1, description="fewer good replies than this, and the round is repeated")
    max_replies: int = Field(0, ge=0, description="the round ends with this many good replies; 0: it waits for all")
    round_timeout: float = Field(
        3600.0, gt=0, description="deadline of a round's training, and of an evaluation, in seconds"
    )
    schedule: Literal["cosine", "constant"] = Field("cosine", description="of the learning rate over the rounds")
    seed: int = Field(42, ge=0, lt=2**32, description="of everything that is drawn: model, partition, cohorts, batches")
    runs: str = Field("runs", description="folder for run directories, on the server")
    checkpoints: int = Field(3, ge=1, description="how many of the last rounds' checkpoints a run directory keeps")
    resume: str = Field("", description="run directory on the server (or a folder of them: the latest) to go on with")


class FedFrozenConfig(BaseModel):
    """Keys of FedFrozen."""

    model_config = _keys("fedfrozen.")

    warmup_rounds: int = Field(6, ge=0, description="rounds before query and key projections are frozen")
    ridge: float = Field(0.0, ge=0, allow_inf_nan=False, description="λ of (λ/2)·‖W_V‖² on the value projections")


class SelectiveConfig(BaseModel):
    """Keys of selective layer fine-tuning."""

    model_config = _keys("selective.")

    budget: float = Field(1.0, gt=0, allow_inf_nan=False, description="of every client, in what selective.costs says")
    draw_budgets: bool = Field(False, description="each client has its own budget, 1 to 4 layers, drawn by its name")
    selection: Literal["gradient", "snr", "rgn", "top", "bottom", "both", "full"] = Field(
        "gradient", description="how a client's layers are chosen"
    )
    coupling: float = Field(10.0, ge=0, allow_inf_nan=False, description="λ of (P1): the price of choosing differently")
    distance: Literal["hamming", "squared"] = Field("hamming", description="of two clients' choices in (P1)")
    costs: Literal["layers", "bytes", "milliseconds"] = Field("layers", description="what a layer costs of the budget")
    probe_batches: int = Field(1, ge=0, description="batches of the gradient that a client is asked for; 0: all")


class FedEnsembleConfig(BaseModel):
    """Keys of Fed-ensemble."""

    model_config = _keys("fedensemble.")

    modes: int = Field(3, ge=1, le=1000, description="K, models in the ensemble")
    strata: int = Field(0, ge=0, description="Q, groups of clients; 0: as many as clients train in a round")
    member: Literal["fedavg", "fedfrozen", "selective"] = Field("fedavg", description="what a mode is trained with")
    weighting: Literal["uniform", "examples"] = Field("uniform", description="of the clients that had the same mode")
    assign: Literal["schedule", "highest-loss"] = Field(
        "schedule", description="which mode a client gets: by turns, or that with the highest loss on its tests"
    )


class FedACSConfig(BaseModel):
    """Keys of FedACS."""

    model_config = _keys("fedacs.")

    quantile: float = Field(0.5, gt=0, lt=1, description="p, share of the similarities that are too small to count")
    alpha: float = Field(1.0, gt=0, le=1, description="α, how far a client goes from its own model to the mixture")


SECTIONS: Mapping[str, tuple[str, type[BaseModel]]] = {
    "rounds": ("Run and rounds", RoundConfig),
    "data": ("Data", DataConfig),
    "training": ("Local training", TrainingConfig),
    "fedfrozen": ("FedFrozen", FedFrozenConfig),
    "selective": ("Selective layers", SelectiveConfig),
    "fedensemble": ("Fed-ensemble", FedEnsembleConfig),
    "fedacs": ("FedACS", FedACSConfig),
}
"""Field of `RunConfig` → title and keys."""


@dataclass(frozen=True)
class RunConfig:
    """A run config that was checked, by section; `flat` is the whole of it as key → value, defaults included."""

    rounds: RoundConfig
    data: DataConfig
    training: TrainingConfig
    fedfrozen: FedFrozenConfig
    selective: SelectiveConfig
    fedensemble: FedEnsembleConfig
    fedacs: FedACSConfig

    @property
    def flat(self) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for section in SECTIONS:
            values |= getattr(self, section).model_dump(by_alias=True)
        return values

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategy, and what an ensemble's modes are trained with."""
        name = self.rounds.strategy
        return (name, self.fedensemble.member) if name == "fedensemble" else (name,)


def defaults() -> dict[str, Value]:
    """Every key with its default."""
    sections: dict[str, Any] = {name: section() for name, (_, section) in SECTIONS.items()}
    return RunConfig(**sections).flat


def read_run_config(values: Mapping[str, Any]) -> RunConfig:
    """Check a run config: known keys, types, ranges, and what must hold between keys.

    Args:
        values: key → value; keys that are left out have their defaults.

    Raises:
        ConfigError: naming all keys that are wrong at once.
    """
    problems = [_unknown(key) for key in values if key not in defaults()]
    sections: dict[str, Any] = {}
    explained: set[str] = set()  # `seed` is a key of two sections
    for name, (_, section) in SECTIONS.items():
        try:
            sections[name] = section.model_validate(dict(values))
        except ValidationError as error:
            wrong = {str(one["loc"][0]): dict(one) for one in error.errors()}
            problems += [_explain(section, one) for key, one in wrong.items() if key not in explained]
            explained |= set(wrong)
    if not problems:
        config = RunConfig(**sections)
        problems = list(_contradictions(config))
    if problems:
        unique = list(dict.fromkeys(problems))
        raise ConfigError("\n".join(["the run config cannot be run:", *(f"  {problem}" for problem in unique)]))
    for warning in _warnings(config):
        log.warning(warning)
    return config


CHANGEABLE = (
    "num-server-rounds", "min-clients", "min-replies", "max-replies", "round-timeout", "fraction-evaluate",
    "checkpoints",
)  # fmt: skip
"""Keys that a resumed run may have other than it was started with."""


def open_run(values: Mapping[str, Any]) -> tuple[RunConfig, RunDirectory | None]:
    """The checked config of a run, and its directory where it is one that is resumed. Raises ConfigError."""
    if not values.get("resume"):
        return read_run_config(values), None
    try:
        directory = RunDirectory.resume(Path(str(values["resume"])).expanduser())
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume={values['resume']!r}: {error}") from error
    return read_run_config(_resumed(values, directory.config)), directory


def _resumed(values: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """The run config of a run that is resumed: as it was kept, but for what may change and is given anew.

    Flower fills in the defaults of all keys that a user leaves out, so a key that has its default counts as left out.

    Args:
        values: of the Flower run that resumes.
        kept: the run directory's `config.toml`.

    Raises:
        ConfigError: a key is given that cannot change any more.
    """
    usual = defaults()
    given = {
        key: value
        for key, value in values.items()
        if key not in ("runs", "resume") and value != usual.get(key) and value != kept.get(key)
    }
    if fixed := [key for key in given if key not in CHANGEABLE]:
        raise ConfigError(
            f"resume={values['resume']!r}: the run goes on as it was started, so leave out what cannot change: "
            + ", ".join(f"{key}={given[key]!r} (it has {kept.get(key)!r})" for key in fixed)
            + f". What may change: {', '.join(CHANGEABLE)}"
        )
    for key, value in given.items():
        log.info("%s is now %r (it was %r).", key, value, kept.get(key))
    return {**kept, **given, "resume": values["resume"]}


def dataset_of(config: RunConfig) -> DatasetInfo:
    """Image shape and classes of the run's dataset. Raises ConfigError when it cannot be read."""
    try:
        return dataset_info(config.data)
    except DataError as error:
        raise ConfigError(str(error)) from error


def reference() -> str:
    """All keys as a page of the documentation, docs/run-config.md: `python -m tepal.server_app.config` prints it."""
    lines = ["# The run config", "", "Set keys with `--run-config 'key=value …'` or in a TOML file. Text needs quotes."]
    seen: set[str] = set()
    for title, section in SECTIONS.values():
        lines += ["", f"## {title}", "", "| key | default | what it is |", "|---|---|---|"]
        for field in section.model_fields.values():
            if str(field.alias) in seen:
                continue
            seen.add(str(field.alias))
            allowed = get_args(field.annotation)
            about = (f"one of {', '.join(map(str, allowed))}: " if allowed else "") + (field.description or "")
            lines.append(f"| `{field.alias}` | `{json.dumps(field.default)}` | {about.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _unknown(key: str) -> str:
    known = defaults()
    near = get_close_matches(key, known, n=1) or [name for name in known if name.rpartition(".")[2] == key]
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"{key!r} is no key of the run config: {hint}"


def _explain(section: type[BaseModel], error: dict[str, Any]) -> str:
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
    about = f" ({field.description})" if field and field.description else ""
    return f"{key}={value!r}: {said}{about}"


def _contradictions(config: RunConfig) -> list[str]:
    rounds, found = config.rounds, []
    try:
        if models.find(rounds.model).kind != models.IMAGES:
            fitting = [name for name in models.names() if models.find(name).kind == models.IMAGES]
            found.append(
                f"model={rounds.model!r} does {models.find(rounds.model).kind}, and dataset={config.data.dataset!r} is "
                f"images with classes: choose one of {', '.join(fitting)}"
            )
    except models.ModelError as error:
        found.append(f"model: {error}")
    if rounds.max_replies and rounds.max_replies < rounds.min_replies:
        found.append(f"max-replies={rounds.max_replies} is less than min-replies={rounds.min_replies}")
    if config.training.deterministic and rounds.max_replies:
        found.append("deterministic=true and max-replies do not go together: which replies are first is not determined")
    if not config.training.local_steps and not config.training.local_epochs:
        found.append("local-epochs=0 and local-steps=0: clients would not train; set one of them")
    if "selective" in config.strategies and config.selective.draw_budgets and config.selective.costs != "layers":
        found.append(
            f"selective.draw-budgets=true and selective.costs={config.selective.costs!r}: drawn budgets are numbers of "
            "layers"
        )
    if not found:
        try:
            dataset_info(config.data)
        except DataError as error:
            found.append(str(error))
    return found


def _warnings(config: RunConfig) -> list[str]:
    rounds = config.rounds
    if "fedfrozen" in config.strategies and config.fedfrozen.warmup_rounds >= rounds.num_server_rounds:
        return [
            f"fedfrozen.warmup-rounds={config.fedfrozen.warmup_rounds} and num-server-rounds="
            f"{rounds.num_server_rounds}: nothing will ever be frozen, so this run is FedAvg."
        ]
    return []


if __name__ == "__main__":
    print(reference(), end="")
