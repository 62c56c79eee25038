"""Settings of local training, without torch: the server and the command line check them before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class TrainingConfig(BaseModel):
    """Settings of local training: keys of the run config, sent to the clients with every train message."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True, extra="ignore", frozen=True
    )

    local_epochs: int = Field(5, ge=0, le=10_000, description="passes over a client's examples in one round")
    local_steps: int = Field(0, ge=0, description="steps in one round; when not 0, it goes before local-epochs")
    batch_size: int = Field(32, ge=1, description="examples in a step")
    micro_batch_size: int = Field(
        0,
        ge=0,
        description="examples in one pass, of which a step gathers the gradients, and the most that are scored at "
        "once; 0: all of a step at once",
    )
    gradient_checkpointing: bool = Field(
        False, description="compute activations of layers twice instead of keeping them: less memory, a third more time"
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field("adamw", description="made anew every round")
    learning_rate: float = Field(3e-3, gt=0, le=100, description="of the first round; see schedule")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.01, ge=0, description="decoupled for adamw, added to the gradient otherwise")
    clip_norm: float = Field(0.0, ge=0, description="largest norm of the gradient of all trained entries; 0: no limit")
    autocast: Literal["no", "bf16", "fp16"] = Field("no", description="dtype of the forward pass's matrix products")
    score_in_training: bool = Field(
        True,
        description="clients score the model that they receive, and the one that they trained, on their own test "
        "examples; false: only those that fraction-evaluate asks score it, in every round",
    )
    train_together: int = Field(
        1,
        ge=1,
        description="in one process, so many clients train as one computation, their parameters stacked, where "
        "model and settings allow it: for small models; 1: each by itself",
    )
    deterministic: bool = Field(False, description="one thread and a fixed order of replies: the same bits every time")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        return cls.model_validate(dict(config))
