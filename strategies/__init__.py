"""Flower strategies that send only the parts of a model that a round needs. A file is one method, named after it."""

from tepal.strategies.base import MethodStrategy, RoundFailed
from tepal.strategies.fedavg import FedAvg
from tepal.strategies.fedfrozen import FedFrozen, NoAttentionError
from tepal.strategies.messenger import RoundReport

__all__ = ["FedAvg", "FedFrozen", "MethodStrategy", "NoAttentionError", "RoundFailed", "RoundReport"]
