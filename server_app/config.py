"""The run config: every key with its default, what is allowed, and what it is for; checked before anything starts.

Keys are flat and kebab-case, as Flower's `[tool.flwr.app.config]` and `--run-config` have them; a method's own keys
begin with its name (`fedfrozen.warmup-rounds`). Keys about data and local training are defined where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from tepal import models
from tepal.exchange.encodings import Encoding
from tepal.records.run_directory import RunDirectory
from tepal.server_app.trackers import TrackerError, missing, names_of, with_password
from tepal.training.config import TrainingConfig
from tepal.training.data import BY_LABEL, LOCAL, DataError
from tepal.training.data.inputs import InputConfig, sizes

log = getLogger("flwr")

StrategyName = Literal[
    "fedavg", "fedfrozen", "selective", "fedensemble", "fedacs",
    "fedprox", "fedavgm", "fedadagrad", "fedyogi", "fedadam", "fednova", "scaffold", "fedbe",
    "local", "ditto", "perfedavg", "pfedme", "apfl", "fedamp",
]  # fmt: skip

WireDtype = Literal["float32", "float16", "bfloat16", "int8"]
_OrSame = Literal["same", "float32", "float16", "bfloat16", "int8"]

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
    model: str = Field(
        "tiny-vit",
        description="what is trained: a name (cnn, tiny-vit, resnet-18, google/vit-base-patch16-224, …: "
        "docs/models.md), a directory with a config.json, or package.module:function of your own",
    )
    pretrained: str = Field(
        "",
        description="weights that the model starts from, on the server: a directory as save_pretrained leaves it, a "
        '.safetensors, .pt or .pth file, or a name on the Hugging Face hub; "": random, by seed',
    )
    num_server_rounds: int = Field(20, ge=1, description="rounds of the run")
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of the available clients that train in a round")
    fraction_evaluate: float = Field(
        1.0, ge=0, le=1, description="share that scores the final model on its own test examples; 0 skips it"
    )
    evaluate_every: int = Field(
        1,
        ge=1,
        description="the server scores the model after every so many rounds, and before the first and after the last",
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
    trackers: str = Field(
        "",
        description='what shows the rounds beside metrics.jsonl: tensorboard, mlflow, or both with a comma between; '
        '"": nothing (docs/runs.md)',
    )
    resume: str = Field("", description="run directory on the server (or a folder of them: the latest) to go on with")


class MLflowConfig(BaseModel):
    """Keys of the tracker MLflow."""

    model_config = _keys("mlflow.")

    tracking_uri: str = Field(
        "",
        description="where MLflow keeps its runs: https://HOST, a database such as sqlite:////srv/mlflow.db; "
        '"": $MLFLOW_TRACKING_URI, else mlflow.db in the folder of runs',
    )
    experiment: str = Field("tepal", min_length=1, description="of MLflow, that runs are entered under")


class EncodingConfig(BaseModel):
    """Keys of how values travel (docs/encodings.md)."""

    model_config = _keys("wire-")

    dtype: WireDtype = Field("float32", description="of matrices as they travel; vectors and counters stay as they are")
    dtype_down: _OrSame = Field("same", description="of those on the way to clients, where it is not wire-dtype")
    dtype_up: _OrSame = Field("same", description="of what was learned, on the way back, where it is not wire-dtype")
    top_k: float = Field(
        0.0, ge=0, lt=1, description="share of each matrix's changes, the largest, that clients send back; 0: all"
    )
    error_feedback: bool = Field(
        True, description="clients keep what int8 and wire-top-k leave out, and add it to what they send next"
    )

    def encoding(self, seed: int) -> Encoding:
        down, up = (self.dtype if own == "same" else own for own in (self.dtype_down, self.dtype_up))
        return Encoding(down, up, self.top_k, self.error_feedback, seed)


class BlocksConfig(BaseModel):
    """Keys that name a model's blocks where they are not found by themselves, or not as they should be."""

    model_config = _keys("blocks.")

    query_key: str = Field(
        "",
        description='query and key projections, as patterns of entry names with commas between ("*.wq.*, *.wk.*"); '
        '"": they are found, as all blocks are',
    )
    value_projection: str = Field("", description="value projections, likewise: what fedfrozen.ridge is about")
    embedding: str = Field("", description="embedding, likewise")
    head: str = Field("", description="head, likewise")
    layers: str = Field("", description='layers, as one pattern whose * stands for the layer\'s number ("encoder.*")')

    @property
    def patterns(self) -> dict[str, Any]:
        """Arguments of `find_blocks`: those that are set."""
        values = {key: value.strip() for key, value in self.model_dump().items() if value.strip()}
        return {key: value if key == "layers" else _listed(value) for key, value in values.items()}


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


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


class FedProxConfig(BaseModel):
    """Keys of FedProx."""

    model_config = _keys("fedprox.")

    mu: float = Field(0.01, ge=0, allow_inf_nan=False, description="μ of (μ/2)·‖w − w_received‖² on what trains")


class FedAvgMConfig(BaseModel):
    """Keys of FedAvgM."""

    model_config = _keys("fedavgm.")

    learning_rate: float = Field(1.0, gt=0, allow_inf_nan=False, description="η of the server; 1 as in FedAvg")
    momentum: float = Field(0.9, ge=0, lt=1, description="β of the server")


class FedAdagradConfig(BaseModel):
    """Keys of FedAdagrad."""

    model_config = _keys("fedadagrad.")

    learning_rate: float = Field(0.1, gt=0, allow_inf_nan=False, description="η of the server")
    beta1: float = Field(0.0, ge=0, lt=1, description="β₁, of the first moment")
    tau: float = Field(1e-3, gt=0, allow_inf_nan=False, description="τ, how adaptive: the smaller, the more")


class FedYogiConfig(BaseModel):
    """Keys of FedYogi."""

    model_config = _keys("fedyogi.")

    learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="η of the server")
    beta1: float = Field(0.9, ge=0, lt=1, description="β₁, of the first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="β₂, of the second")
    tau: float = Field(1e-3, gt=0, allow_inf_nan=False, description="τ, how adaptive: the smaller, the more")


class FedAdamConfig(FedYogiConfig):
    """Keys of FedAdam."""

    model_config = _keys("fedadam.")


class ScaffoldConfig(BaseModel):
    """Keys of SCAFFOLD."""

    model_config = _keys("scaffold.")

    learning_rate: float = Field(1.0, gt=0, allow_inf_nan=False, description="η_g of the server")


class DittoConfig(BaseModel):
    """Keys of Ditto."""

    model_config = _keys("ditto.")

    lam: float = Field(
        1.0, ge=0, allow_inf_nan=False, alias="ditto.lambda", description="λ, how near own models stay to the global"
    )


class PerFedAvgConfig(BaseModel):
    """Keys of Per-FedAvg."""

    model_config = _keys("perfedavg.")

    alpha: float = Field(0.01, ge=0, allow_inf_nan=False, description="α, size of a client's own step")
    gradient: Literal["first-order", "hessian-free"] = Field(
        "first-order", description="whether the second derivative is left out, or taken from a difference of gradients"
    )
    delta: float = Field(1e-3, gt=0, allow_inf_nan=False, description="δ, step of that difference")


class PFedMeConfig(BaseModel):
    """Keys of pFedMe."""

    model_config = _keys("pfedme.")

    lam: float = Field(
        15.0, gt=0, allow_inf_nan=False, alias="pfedme.lambda", description="λ, how near own models stay to the global"
    )
    inner_steps: int = Field(5, ge=1, description="K, steps that find a client's own model for one batch")
    inner_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of these steps")
    beta: float = Field(1.0, gt=0, allow_inf_nan=False, description="β, how far the server goes to the clients' mean")


class APFLConfig(BaseModel):
    """Keys of APFL."""

    model_config = _keys("apfl.")

    alpha: float = Field(0.5, ge=0, le=1, description="α at the start: share of a client's own model in its mixture")
    adaptive: bool = Field(True, description="each client's α follows its gradient")


class FedAMPConfig(BaseModel):
    """Keys of FedAMP."""

    model_config = _keys("fedamp.")

    sigma: float = Field(
        100.0,
        gt=0,
        allow_inf_nan=False,
        description="σ, squared distance of two models at which their attention has fallen to 1/e; distances grow with "
        "parameters, learning rate and steps: see distances in rounds/*.npz",
    )
    alpha: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="α: equal models weigh α/σ in each other's mixture"
    )
    lam: float = Field(
        1.0, ge=0, allow_inf_nan=False, alias="fedamp.lambda", description="λ of the proximal term λ/(2α)·‖w − u‖²"
    )


class FedBEConfig(BaseModel):
    """Keys of FedBE."""

    model_config = _keys("fedbe.")

    distribution: Literal["gaussian", "dirichlet"] = Field(
        "gaussian", description="what is fitted over the clients' models of a round"
    )
    samples: int = Field(10, ge=0, le=1000, description="M, models drawn from it for the ensemble")
    concentration: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="of dirichlet: the smaller, the nearer to single clients' models"
    )
    distil: bool = Field(
        True,
        description="the ensemble is distilled into the next model, on the server's unlabelled examples "
        "(server-share); false: the next model is one draw",
    )
    epochs: int = Field(20, ge=1, le=10_000, description="passes over these examples in one distillation")
    learning_rate: float = Field(
        1e-3, gt=0, le=100, description="of the distillation's SGD; it falls to 0.4 of it in cycles of 25 steps"
    )
    batch_size: int = Field(128, ge=1, description="examples in a step of the distillation")


SECTIONS: Mapping[str, tuple[str, type[BaseModel]]] = {
    "rounds": ("Run and rounds", RoundConfig),
    "data": ("Data", InputConfig),
    "training": ("Local training", TrainingConfig),
    "wire": ("How values travel", EncodingConfig),
    "blocks": ("A model's blocks", BlocksConfig),
    "mlflow": ("MLflow", MLflowConfig),
    "fedfrozen": ("FedFrozen", FedFrozenConfig),
    "selective": ("Selective layers", SelectiveConfig),
    "fedensemble": ("Fed-ensemble", FedEnsembleConfig),
    "fedacs": ("FedACS", FedACSConfig),
    "fedprox": ("FedProx", FedProxConfig),
    "fedavgm": ("FedAvgM", FedAvgMConfig),
    "fedadagrad": ("FedAdagrad", FedAdagradConfig),
    "fedyogi": ("FedYogi", FedYogiConfig),
    "fedadam": ("FedAdam", FedAdamConfig),
    "scaffold": ("SCAFFOLD", ScaffoldConfig),
    "ditto": ("Ditto", DittoConfig),
    "perfedavg": ("Per-FedAvg", PerFedAvgConfig),
    "pfedme": ("pFedMe", PFedMeConfig),
    "apfl": ("APFL", APFLConfig),
    "fedamp": ("FedAMP", FedAMPConfig),
    "fedbe": ("FedBE", FedBEConfig),
}
"""Field of `RunConfig` → title and keys."""


@dataclass(frozen=True)
class RunConfig:
    """A run config that was checked, by section; `flat` is the whole of it as key → value, defaults included."""

    rounds: RoundConfig
    data: InputConfig
    training: TrainingConfig
    wire: EncodingConfig
    blocks: BlocksConfig
    mlflow: MLflowConfig
    fedfrozen: FedFrozenConfig
    selective: SelectiveConfig
    fedensemble: FedEnsembleConfig
    fedacs: FedACSConfig
    fedprox: FedProxConfig
    fedavgm: FedAvgMConfig
    fedadagrad: FedAdagradConfig
    fedyogi: FedYogiConfig
    fedadam: FedAdamConfig
    scaffold: ScaffoldConfig
    ditto: DittoConfig
    perfedavg: PerFedAvgConfig
    pfedme: PFedMeConfig
    apfl: APFLConfig
    fedamp: FedAMPConfig
    fedbe: FedBEConfig

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
    "evaluate-every",
    "checkpoints",
    "trackers", "mlflow.tracking-uri", "mlflow.experiment",
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


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """What the model is built with, as the run's data has it. Raises ConfigError when it cannot be read."""
    try:
        return sizes(config.data)
    except (DataError, models.ModelError) as error:
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
            lines.append(f"| `{field.alias}` | `{json.dumps(field.default)}` | {escaped(about(field))} |")
    return "\n".join(lines) + "\n"


def about(field: FieldInfo) -> str:
    """What a key is, and which values are allowed where they can be listed."""
    allowed = get_args(field.annotation)
    return (f"one of {', '.join(map(str, allowed))}: " if allowed else "") + (field.description or "")


def escaped(text: str) -> str:
    """For a cell of a Markdown table."""
    return text.replace("|", "\\|")


def _unknown(key: str) -> str:
    known = defaults()
    near = [name for name in known if name.rpartition(".")[2] == key] or get_close_matches(key, known, n=1)
    general = ", ".join(sorted(name for name in known if "." not in name))
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {general}; and <strategy>.<option>"
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


def _warnings(config: RunConfig) -> list[str]:
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


if __name__ == "__main__":
    print(reference(), end="")
