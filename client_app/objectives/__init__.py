"""What local training minimises, by the name that the server's plan gives: one file an objective.

An objective leaves in the work's model what the server is to get, and hands in what the client keeps for itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from tepal.client_app.objectives.apfl import Mixture
from tepal.client_app.objectives.ditto import Regularised
from tepal.client_app.objectives.local import Alone
from tepal.client_app.objectives.perfedavg import MetaLearning
from tepal.client_app.objectives.pfedme import MoreauEnvelope
from tepal.client_app.objectives.scaffold import Corrected
from tepal.client_app.objectives.work import Empirical, Objective, Outcome, Work
from tepal.exchange.plan import APFL, DITTO, LOCAL, PERFEDAVG, PFEDME, SCAFFOLD

OBJECTIVES: Mapping[str, Objective] = {
    "": Empirical(),
    SCAFFOLD: Corrected(),
    LOCAL: Alone(),
    DITTO: Regularised(),
    PERFEDAVG: MetaLearning(),
    PFEDME: MoreauEnvelope(),
    APFL: Mixture(),
}


def find(name: str) -> Objective:
    """The objective that a plan names. Raises ValueError for one that this app does not know."""
    if name not in OBJECTIVES:
        known = ", ".join(sorted(filter(None, OBJECTIVES)))
        raise ValueError(f"the server asks for local training by {name!r}, and this client's app knows {known}")
    return OBJECTIVES[name]


__all__ = ["OBJECTIVES", "Objective", "Outcome", "Work", "find"]
