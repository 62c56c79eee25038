"""SCAFFOLD's local training (Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1, option II)."""

from __future__ import annotations

import numpy as np

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import CONTROL, SCAFFOLD
from tepal.training.loop import accumulation


class ScaffoldObjective(Objective):
    """K steps y ← y − η_l(g_i(y) − c_i + c); then c_i⁺ = c_i − c + (x − y)/(K·η_l), of which c_i⁺ − c_i is returned.

    (x − y)/(K·η_l) is the mean gradient of the steps, less c_i − c. With momentum K is ‖a‖₁ of FedNova
    (`accumulation`), and the mean is weighted: divided by the number of steps, variates would grow from round to round.
    Other optimizers have no such mean, and are refused.
    """

    name = SCAFFOLD

    def fit(self, work: Work) -> Outcome:
        if work.config.optimizer != "sgd":
            raise ValueError(f"SCAFFOLD needs optimizer='sgd'; this client's is {work.config.optimizer!r}")
        c = work.trees[CONTROL]
        own = work.personal or {name: np.zeros_like(value) for name, value in c.items()}
        corrections = work.of_parameters({name: c[name] - own[name] for name in c})

        def correct() -> None:
            for name, correction in corrections.items():
                parameter = work.model.get_parameter(name)
                if parameter.grad is None:  # the loss does not depend on it: g_i = 0
                    parameter.grad = correction.clone()
                else:
                    parameter.grad += correction

        fitted = work.fit(correct=correct)
        y, moved = work.read(), accumulation(work.config, fitted.steps) * work.config.learning_rate
        change = {name: ((work.received[name] - y[name]) / moved - c[name]).astype(c[name].dtype) for name in c}
        return Outcome(fitted, trees={CONTROL: change}, personal={name: own[name] + change[name] for name in c})
