"""All sections of the run config together, as one checked object, and the defaults of all keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tepal.server_app.config.common import BlocksConfig, EncodingConfig, MLflowConfig, RoundConfig
from tepal.server_app.config.methods import (
    APFLConfig,
    DittoConfig,
    FedACSConfig,
    FedAdagradConfig,
    FedAdamConfig,
    FedAMPConfig,
    FedAvgMConfig,
    FedBEConfig,
    FedEnsembleConfig,
    FedFrozenConfig,
    FedProxConfig,
    FedYogiConfig,
    PerFedAvgConfig,
    PFedMeConfig,
    ScaffoldConfig,
    SelectiveConfig,
)
from tepal.training.config import TrainingConfig
from tepal.training.data.inputs import InputConfig

Value = str | int | float | bool

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
