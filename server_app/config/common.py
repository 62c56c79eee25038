"""Keys of the run config that are common to all strategies: rounds, trackers, encodings and blocks of the model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ByteSize, Field, TypeAdapter, ValidationError, field_validator

from tepal.exchange.encodings import AUTO, DTYPES, WHOLES, Encoding
from tepal.models.initial import patterns_of, sources_of
from tepal.strategies import STRATEGIES
from tepal.training.config import keys

if TYPE_CHECKING:
    StrategyName = str
    _Dtype = str
    _DtypeOrSame = str
    _Whole = str
else:
    StrategyName = Literal[tuple(STRATEGIES)]
    _Dtype = Literal[DTYPES]
    _DtypeOrSame = Literal[("same", *DTYPES)]
    _Whole = Literal[("same", *WHOLES)]

_BYTES = TypeAdapter(ByteSize)


def _nbytes(text: str) -> int:
    """The number of bytes in a text such as "2MB"; 0 if it is none."""
    if not re.fullmatch(r"\s*(\d+(\.\d+)?|\.\d+)\s*[A-Za-z]*\s*", text, re.ASCII):  # pydantic reads the beginning alone
        return 0
    try:
        return int(_BYTES.validate_python(text.strip()))
    except ValidationError:
        return 0


class RoundConfig(BaseModel):
    """Keys of the run and its rounds."""

    model_config = keys()

    strategy: StrategyName = Field("fedfrozen", description="method that decides what is sent, trained and merged")
    model: str = Field(
        "tiny-vit",
        description="model to train: a name (cnn, tiny-vit, resnet-18, google/vit-base-patch16-224, …: "
        "docs/models.md), a directory with a config.json, or package.module:function for a custom model",
    )
    pretrained: str = Field(
        "",
        description="initial weights, on the server: the name of weights that come with Tepal (docs/models.md), a "
        "directory written by save_pretrained, a .safetensors, .pt or .pth file, or a name on the Hugging Face hub; "
        'fedensemble also takes one for each mode, separated by commas; "": random, by seed',
    )
    num_server_rounds: int = Field(20, ge=1, description="rounds of the run")
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of the available clients that train in a round")
    fraction_evaluate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the clients that score a model on their test examples in a separate evaluation: after "
        "the last round, and with score-in-training=false after every round; 0: none",
    )
    evaluate_every: int = Field(
        1,
        ge=1,
        description="the server scores the model every so many rounds, and before the first and after the last round",
    )
    deliver: Literal["last", "best"] = Field(
        "last",
        description="which round's model is the result of the run, in model.safetensors and on the clients: that of "
        "the last round, or the one with the best score (docs/runs.md)",
    )
    best_metric: Literal["auto", "accuracy", "loss", "macro-f1", "rmse"] = Field(
        "auto",
        description="score by which deliver and patience compare rounds; auto: the accuracy, or in a regression the "
        "root mean squared error",
    )
    patience: int = Field(
        0,
        ge=0,
        description="the run ends after this many scored rounds in a row without improvement; 0: never before "
        "num-server-rounds",
    )
    min_improvement: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="a score counts as an improvement, for patience, if it is better than the last improvement by more "
        "than this",
    )
    foreign_images: bool = Field(
        False,
        description="whether the server also predicts images of no class (letters, noise, half-covered images), and "
        "records how many of them have an uncertain prediction; for image classification (docs/runs.md)",
    )
    min_clients: int = Field(2, ge=1, description="clients that must be connected before a round starts")
    min_replies: int = Field(1, ge=1, description="with fewer valid replies a round is repeated")
    max_replies: int = Field(0, ge=0, description="a round ends after this many valid replies; 0: it waits for all")
    round_timeout: float = Field(
        3600.0, gt=0, description="deadline of a round's training, and of an evaluation, in seconds"
    )
    max_weight_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="largest share of one client in the total weight of the merged replies, if at least three are "
        "merged",
    )
    schedule: Literal["cosine", "constant"] = Field("cosine", description="course of the learning rate over the rounds")
    client_settings: str = Field(
        "",
        description="settings of single clients of a simulation, as JSON: client's number or range → keys of a node "
        'config. Commands of Tepal also take tables such as [client.3] and [client."5-9"] (docs/simulation.md)',
    )
    seed: int = Field(42, ge=0, lt=2**32, description="seed of all random numbers: model, partition, cohorts, batches")
    robust: Literal[
        "none", "clip", "trimmed", "median", "krum", "rfa", "clip+trimmed", "clip+median", "clip+krum", "clip+rfa"
    ] = Field(
        "none",
        description="how the clients' parts are averaged, against hostile clients: none is the weighted mean; clip+ "
        "scales large updates down before another mean (docs/robust.md)",
    )
    hostile_share: float = Field(
        0.2,
        ge=0,
        lt=0.5,
        description="largest share of hostile clients in a round that trimmed and krum assume",
    )
    krum_keep: int = Field(
        0, ge=0, description="clients that krum averages; 0: all that are not assumed to be hostile; 1: the best one"
    )
    runs: str = Field("runs", description="folder for run directories, on the server")
    checkpoints: int = Field(3, ge=1, description="latest checkpoints that a run directory keeps, at least two")
    trackers: str = Field(
        "",
        description="where rounds are recorded in addition to metrics.jsonl: tensorboard, mlflow, wandb, or several "
        'with commas in between; "": nowhere (docs/runs.md)',
    )
    resume: str = Field("", description="run directory on the server (or a folder of them: the latest) to resume")
    resume_with: str = Field(
        "",
        description="keys that the resumed run takes from this run config although they have their defaults, with "
        "commas in between, such as num-server-rounds; Tepal's own commands set it (docs/faults.md)",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """`pretrained` as a tuple: of one source, of one for each mode of an ensemble, or empty."""
        return sources_of(self.pretrained)


class MLflowConfig(BaseModel):
    """Keys of the MLflow tracker."""

    model_config = keys("mlflow.")

    tracking_uri: str = Field(
        "",
        description="where MLflow stores its runs: https://HOST, or a database such as sqlite:////srv/mlflow.db; "
        '"": $MLFLOW_TRACKING_URI, or else mlflow.db in the folder of runs',
    )
    experiment: str = Field("tepal", min_length=1, description="MLflow experiment to which runs belong")


class WandBConfig(BaseModel):
    """Keys of the tracker Weights & Biases."""

    model_config = keys("wandb.")

    project: str = Field("tepal", min_length=1, description="project of W&B to which runs belong")
    entity: str = Field("", description='user or team of W&B to which the project belongs; "": that of the API key')
    mode: Literal["", "online", "offline"] = Field(
        "",
        description="whether rounds are sent to W&B, or only written to the run directory, for `wandb sync`; "
        '"": $WANDB_MODE, or else online',
    )


class EncodingConfig(BaseModel):
    """Keys of the encodings in which values are sent (docs/encodings.md)."""

    model_config = keys("wire-")

    dtype: _Dtype = Field(
        "float32",
        description="dtype of matrices when sent, with ranks and auto of vectors, too; counters keep theirs "
        "(docs/encodings.md)",
    )
    dtype_down: _DtypeOrSame = Field(
        "same",
        description="dtype of what is sent to clients, or of its changes with int4, ternary, sign, ranks and auto; "
        "same: wire-dtype",
    )
    dtype_up: _DtypeOrSame = Field("same", description="dtype of changes sent by clients; same: wire-dtype")
    top_k: float = Field(
        0.0, ge=0, lt=1, description="share of all matrices' changes that clients send, the largest ones; 0: all"
    )
    top_k_down: float = Field(
        0.0, ge=0, lt=1, description="share of a block's changes that clients are sent, the largest ones; 0: all"
    )
    dtype_whole: _Whole = Field(
        "same",
        description="where changes are sent to clients: dtype of matrices for a client that has none yet, and of the "
        "changes to the result; same: wire-dtype-down, or int8 in place of int4, ternary, sign and ranks, and int4 in "
        "place of auto",
    )
    reference_megabytes: float = Field(
        8000.0, gt=0, description="what the server keeps on disk of what clients have, to send them changes, at most; "
        "what a round sends is kept in any case",
    )
    left_out: float = Field(
        0.6, ge=0, lt=1, description="share of the squared norm of a round's changes that auto leaves out (sends as 0)"
    )
    budget: str = Field(
        "",
        description='bytes that all clients send and are sent in a round of training, such as "2MB", within which auto '
        'leaves out more; both directions must be auto; "": no limit',
    )
    start: Literal["auto", "sent", "made"] = Field(
        "auto",
        description="the initial model; sent: the server sends it to each client; made: each client makes it from "
        "seed, or from pretrained weights that it has, and is sent only what has changed; auto: made where "
        "wire-dtype-down is auto, otherwise sent",
    )
    error_feedback: bool = Field(
        True,
        description="clients keep what int8, fewer bits and wire-top-k leave out, and add it to their next upload; "
        "with auto off if at most half of the clients take part in a round and only the mean of their updates is "
        "needed, and always on with wire-budget, a robust mean, or a strategy that needs more than the mean",
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _of_bytes(cls, value: object) -> object:
        text = str(value) if type(value) is int else value
        if not isinstance(text, str) or (text and not _nbytes(text)):
            raise ValueError('expected a number of bytes above 0, such as "2MB", "500 kB" or "1.5MiB", or ""')
        return text

    @property
    def down(self) -> str:
        """The dtype of what is sent to clients."""
        return self.dtype if self.dtype_down == "same" else self.dtype_down

    @property
    def up(self) -> str:
        """The dtype of what clients send."""
        return self.dtype if self.dtype_up == "same" else self.dtype_up

    @property
    def made(self) -> bool:
        """Whether clients make the initial model themselves."""
        return self.start == "made" or (self.start == "auto" and self.down == AUTO)

    def encoding(self, seed: int) -> Encoding:
        return Encoding(
            self.down, self.up, self.top_k, self.error_feedback, seed, self.top_k_down, self.dtype_whole,
            self.reference_megabytes, self.left_out, _nbytes(self.budget), "made" if self.made else "sent",
        )


class BlocksConfig(BaseModel):
    """Keys that name the blocks of a model for which the automatic search fails or is not wanted."""

    model_config = keys("blocks.")

    query_key: str = Field(
        "",
        description='query and key projections, as patterns of entry names separated by commas ("*.wq.*, *.wk.*"); '
        '"": found automatically',
    )
    value_projection: str = Field("", description="value projections, likewise; fedfrozen.ridge applies to them")
    embedding: str = Field("", description="embedding, likewise")
    head: str = Field("", description="head, likewise")
    layers: str = Field("", description='layers, as one pattern with * in place of the layer\'s number ("encoder.*")')

    @property
    def patterns(self) -> dict[str, Any]:
        """The arguments of `find_blocks` that are set."""
        return patterns_of(self.model_dump(by_alias=True))
