"""Random budgets for clients that have none."""

from __future__ import annotations

import hashlib
import math

import numpy as np


def drawn_budget(seed: int, client: str) -> int:
    """Draw a client's budget, 1 to 4 layers: the heterogeneous budgets of arXiv:2408.15600.

    A normal variable of mean 1 and standard deviation 1, conditioned on [1, 4] and rounded to the nearest integer, with
    the probabilities .384, .485, .122 and .010. It is a function of the seed and the client's name alone, and the same
    on every platform.
    """
    digest = hashlib.sha256(f"layer budget\n{seed}\n{client}".encode()).digest()
    state = np.random.SeedSequence(int.from_bytes(digest)).generate_state(1, np.uint64)
    uniform = int(state[0]) / 2**64
    # P(1 ≤ x ≤ b) = erf((b − 1)/√2)/2; the budget is the first r for which P(1 ≤ x ≤ r + ½) exceeds the uniform draw.
    within = math.erf(3 / math.sqrt(2))
    return next((r for r in (1, 2, 3) if uniform * within < math.erf((r - 0.5) / math.sqrt(2))), 4)
