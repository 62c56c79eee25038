"""Flower strategies that send only the parts of a model that a round needs. A file is one method, named after it."""

from collections.abc import Mapping

from tepal.exchange.modes import join_modes, modes_of
from tepal.strategies.baselines.apfl import APFL
from tepal.strategies.baselines.ditto import Ditto
from tepal.strategies.baselines.fedamp import FedAMP
from tepal.strategies.baselines.fedbe import FedBE
from tepal.strategies.baselines.feddyn import FedDyn
from tepal.strategies.baselines.fednova import FedNova
from tepal.strategies.baselines.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from tepal.strategies.baselines.fedprox import FedProx
from tepal.strategies.baselines.local import LocalOnly
from tepal.strategies.baselines.perfedavg import PerFedAvg
from tepal.strategies.baselines.pfedme import PFedMe
from tepal.strategies.baselines.scaffold import Scaffold
from tepal.strategies.fedacs import FedACS
from tepal.strategies.fedavg import FedAvg
from tepal.strategies.fedensemble import FedEnsemble
from tepal.strategies.fedfrozen import FedFrozen, NoAttentionError
from tepal.strategies.method import MethodError
from tepal.strategies.options import LISTED, Listing
from tepal.strategies.partial import PartialTraining
from tepal.strategies.rounds.report import RoundFailed, RoundReport
from tepal.strategies.rounds.strategy import MethodStrategy
from tepal.strategies.selective import SelectiveLayers

__all__ = [  # noqa: RUF022  the strategies first, in the order of the catalogue; a new one goes behind the others
    "FedAvg",
    "FedFrozen",
    "SelectiveLayers",
    "FedEnsemble",
    "FedACS",
    "FedProx",
    "FedAvgM",
    "FedAdagrad",
    "FedYogi",
    "FedAdam",
    "FedNova",
    "Scaffold",
    "FedBE",
    "LocalOnly",
    "Ditto",
    "PerFedAvg",
    "PFedMe",
    "APFL",
    "FedAMP",
    "FedDyn",
    "MethodError",
    "MethodStrategy",
    "NoAttentionError",
    "PartialTraining",
    "RoundFailed",
    "RoundReport",
    "join_modes",
    "modes_of",
]

STRATEGIES: Mapping[str, Listing] = {
    LISTED[one].name: LISTED[one] for one in map(globals().get, __all__) if isinstance(one, type) and one in LISTED
}
"""By the name in the run config, in the order of `__all__`."""
