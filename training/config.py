"""Settings of local training. Imports no torch: the server and the command line check them before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


def keys(prefix: str = "") -> ConfigDict:
    """Return the configuration of a class whose keys in the run config are its fields in kebab-case, after a prefix."""
    return ConfigDict(
        alias_generator=lambda name: prefix + name.replace("_", "-"), populate_by_name=True, extra="ignore", frozen=True
    )


class LocalSettings(BaseModel):
    """Settings of local training that concern one client only: a node's config may have its own."""

    model_config = keys()

    local_epochs: int = Field(5, ge=0, le=10_000, description="passes over a client's examples per round")
    local_steps: int = Field(0, ge=0, description="steps per round; if not 0, it replaces local-epochs")
    batch_size: int = Field(32, ge=1, description="examples per step")
    micro_batch_size: int = Field(
        0,
        ge=0,
        description="examples per forward and backward pass, over which a step accumulates gradients, and the "
        "most that are scored at once; 0: the whole batch",
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute the activations of layers in the backward pass: less memory, a third more time"
    )
    augment_crop: int = Field(
        0, ge=0, le=1024, description="pixels by which training images are shifted at most, down and across; 0: none"
    )
    augment_flip: bool = Field(False, description="mirror half of the training images, left to right")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "adamw", description="local optimizer; its state is reset every round"
    )
    learning_rate: float = Field(3e-3, gt=0, le=100, description="learning rate of the first round; see schedule")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(0.01, ge=0, description="decoupled for adamw, added to the gradient otherwise")
    clip_norm: float = Field(0.0, ge=0, description="largest norm of the whole gradient; 0: no limit")
    autocast: Literal["no", "bf16", "fp16"] = Field("no", description="dtype of matrix products in the forward pass")


class TrainingConfig(LocalSettings):
    """Settings of local training: keys of the run config, sent to the clients with every train message."""

    score_in_training: bool = Field(
        True,
        description="clients score the received and the trained model on their own test examples in every round; "
        "false: only the clients that fraction-evaluate selects score, in every round",
    )
    train_together: int = Field(
        1,
        ge=1,
        description="number of clients that train as one computation with stacked parameters, if model and settings "
        "allow it; for small models, in one process; 1: one client at a time",
    )
    deterministic: bool = Field(False, description="one thread and a fixed order of replies: equal runs, bit for bit")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the settings from a run config; other keys are ignored."""
        return cls.model_validate(dict(config))
