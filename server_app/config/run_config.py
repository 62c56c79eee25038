"""The run config as one object with a section for each group of keys, and the defaults of all keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tepal.server_app.config.common import BlocksConfig, EncodingConfig, MLflowConfig, RoundConfig, WandBConfig
from tepal.strategies import STRATEGIES
from tepal.training.config import TrainingConfig
from tepal.training.data.inputs import InputConfig
from tepal.training.node_settings import with_own_settings

Value = str | int | float | bool

GENERAL: Mapping[str, tuple[str, type[BaseModel]]] = {
    "rounds": ("Run and rounds", RoundConfig),
    "data": ("Data", InputConfig),
    "training": ("Local training", TrainingConfig),
    "wire": ("Encodings", EncodingConfig),
    "blocks": ("Blocks of the model", BlocksConfig),
    "mlflow": ("MLflow", MLflowConfig),
    "wandb": ("Weights & Biases", WandBConfig),
}
"""Field of `RunConfig` → title and keys."""

SECTIONS: Mapping[str, tuple[str, type[BaseModel]]] = {
    **GENERAL,
    **{name: (one.title, one.options) for name, one in STRATEGIES.items() if one.options.model_fields},
}
"""`GENERAL`, and each strategy that has keys: name → title and keys."""


@dataclass(frozen=True)
class RunConfig:
    """A checked run config, by section."""

    rounds: RoundConfig
    data: InputConfig
    training: TrainingConfig
    wire: EncodingConfig
    blocks: BlocksConfig
    mlflow: MLflowConfig
    wandb: WandBConfig
    options: Mapping[str, Any]
    """Strategy → its own keys; also as an attribute, `config.fedfrozen.warmup_rounds`."""

    @classmethod
    def of(cls, sections: Mapping[str, Any]) -> RunConfig:
        """Return the run config with these sections, all of `SECTIONS` by name."""
        general = {name: sections[name] for name in GENERAL}
        return cls(**general, options={name: sections[name] for name in sections if name not in GENERAL})

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("options", ()):
            return self.options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def flat(self) -> dict[str, Value]:
        """All keys with their values, including defaults."""
        values: dict[str, Value] = {}
        for section in (*(getattr(self, name) for name in GENERAL), *self.options.values()):
            values |= section.model_dump(by_alias=True)
        return values

    @property
    def clients(self) -> dict[str, dict[str, Value]]:
        """Number of a client of a simulation, or range such as "5-9" → its own settings."""
        text = self.rounds.client_settings
        return dict(json.loads(text)) if text else {}

    @property
    def trainings(self) -> dict[str, TrainingConfig]:
        """Number of a client, or range → settings of its local training, for clients with settings of their own."""
        return {key: with_own_settings(self.flat, own) for key, own in self.clients.items()}

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategy, followed by the one that trains the models of an ensemble."""
        name = self.rounds.strategy
        return (name, self.fedensemble.member) if name == "fedensemble" else (name,)


def defaults() -> dict[str, Value]:
    """Return every key with its default."""
    return RunConfig.of({name: section() for name, (_, section) in SECTIONS.items()}).flat
