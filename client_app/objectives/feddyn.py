"""FedDyn's local training (Acar et al. 2021, arXiv:2111.04263, algorithm 1): a penalty with the client's gradient."""

from __future__ import annotations

import numpy as np
import torch

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import ALPHA


class FedDynObjective(Objective):
    """Minimises L_k(θ) − ⟨g_k, θ⟩ + (α/2)·‖θ − θ^{t−1}‖² starting from θ^{t−1}; then g_k ← g_k − α·(θ_k − θ^{t−1}).

    At the minimum g_k is ∇L_k(θ_k). It is the personal state, and starts at 0. The penalty's gradient is added to that
    of L_k before every step, so that the reported loss is L_k.
    """

    name = "feddyn"

    def fit(self, work: Work) -> Outcome:
        alpha = work.number(ALPHA)
        anchors = work.of_parameters(work.received)
        names = [entry.name for raw in anchors for entry in work.layout.entries_of[raw]]
        own = work.personal or {name: np.zeros_like(work.received[name]) for name in names}
        of_client = work.of_parameters(own)

        @torch.no_grad()
        def correct() -> None:
            for name, anchor in anchors.items():
                parameter = work.model.get_parameter(name)
                if parameter.grad is not None:  # the loss depends on it
                    parameter.grad += alpha * (parameter - anchor) - of_client[name]

        fitted = work.fit(correct=correct)
        trained = work.read()
        return Outcome(
            fitted, personal={name: own[name] - alpha * (trained[name] - work.received[name]) for name in names}
        )
