"""Flower strategies that send only the parts of a model that a round needs. A file is one method, named after it."""

from tepal.exchange.modes import join_modes, modes_of
from tepal.strategies.apfl import APFL
from tepal.strategies.base import MethodStrategy, RoundFailed
from tepal.strategies.ditto import Ditto
from tepal.strategies.fedacs import FedACS
from tepal.strategies.fedamp import FedAMP
from tepal.strategies.fedavg import FedAvg
from tepal.strategies.fedbe import FedBE
from tepal.strategies.fedensemble import FedEnsemble
from tepal.strategies.fedfrozen import FedFrozen, NoAttentionError
from tepal.strategies.fednova import FedNova
from tepal.strategies.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from tepal.strategies.fedprox import FedProx
from tepal.strategies.local import LocalOnly
from tepal.strategies.messenger import RoundReport
from tepal.strategies.method import MethodError
from tepal.strategies.perfedavg import PerFedAvg
from tepal.strategies.pfedme import PFedMe
from tepal.strategies.scaffold import Scaffold
from tepal.strategies.selective import SelectiveLayers

__all__ = [
    "APFL",
    "Ditto",
    "FedACS",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedEnsemble",
    "FedFrozen",
    "FedNova",
    "FedProx",
    "FedYogi",
    "LocalOnly",
    "MethodError",
    "MethodStrategy",
    "NoAttentionError",
    "PFedMe",
    "PerFedAvg",
    "RoundFailed",
    "RoundReport",
    "Scaffold",
    "SelectiveLayers",
    "join_modes",
    "modes_of",
]
