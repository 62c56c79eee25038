"""The keys of the run config that every strategy has: of rounds, trackers, encodings and a model's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tepal.exchange.encodings import Encoding
from tepal.strategies import STRATEGIES

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[tuple(STRATEGIES)]

WireDtype = Literal["float32", "float16", "bfloat16", "int8"]
_OrSame = Literal["same", "float32", "float16", "bfloat16", "int8"]


def keys(prefix: str = "") -> ConfigDict:
    """How a section's fields become keys: in kebab-case, behind a prefix."""
    return ConfigDict(
        alias_generator=lambda name: prefix + name.replace("_", "-"), populate_by_name=True, extra="ignore", frozen=True
    )


class RoundConfig(BaseModel):
    """Keys of the run and its rounds."""

    model_config = keys()

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

    model_config = keys("mlflow.")

    tracking_uri: str = Field(
        "",
        description="where MLflow keeps its runs: https://HOST, a database such as sqlite:////srv/mlflow.db; "
        '"": $MLFLOW_TRACKING_URI, else mlflow.db in the folder of runs',
    )
    experiment: str = Field("tepal", min_length=1, description="of MLflow, that runs are entered under")


class EncodingConfig(BaseModel):
    """Keys of how values travel (docs/encodings.md)."""

    model_config = keys("wire-")

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

    model_config = keys("blocks.")

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
