"""Flower strategies that send only the parts of a model that a round needs. A file is one method, named after it."""

from tepal.exchange.modes import join_modes, modes_of
from tepal.strategies.base import MethodStrategy, RoundFailed
from tepal.strategies.fedacs import FedACS
from tepal.strategies.fedavg import FedAvg
from tepal.strategies.fedensemble import FedEnsemble
from tepal.strategies.fedfrozen import FedFrozen, NoAttentionError
from tepal.strategies.messenger import RoundReport
from tepal.strategies.method import MethodError
from tepal.strategies.selective import SelectiveLayers

__all__ = [
    "FedACS",
    "FedAvg",
    "FedEnsemble",
    "FedFrozen",
    "MethodError",
    "MethodStrategy",
    "NoAttentionError",
    "RoundFailed",
    "RoundReport",
    "SelectiveLayers",
    "join_modes",
    "modes_of",
]
