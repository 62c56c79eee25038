"""Schedule of Fed-ensemble: the mode that each stratum of clients trains in each round (arXiv:2107.10663, section 3).

An age is K rounds. At its start every stratum q draws its own permutation P[q, ·] of the K modes; in the age's r-th
round its clients train mode P[q, r]. In one age every stratum therefore trains every mode exactly once. The schedule
is a function of (seed, age, stratum) alone, whatever fails in a round.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def mode_schedule(strata: int, modes: int, age: int, seed: int) -> np.ndarray:
    """The schedule P of one age.

    Args:
        strata: Q, number of strata, at least 1.
        modes: K, number of modes, at least 1; also the number of rounds in an age.
        age: counts from 0.
        seed: of the run.

    Returns:
        (Q, K) integers. Row q is a permutation of 0 … K − 1, drawn for this stratum and age alone: it does not depend
        on Q.

    Raises:
        ValueError: a number out of range.
    """
    if strata < 1 or modes < 1 or age < 0 or seed < 0:
        raise ValueError(
            f"strata={strata} and modes={modes} must be at least 1; age={age} and seed={seed} must be at least 0"
        )
    return np.array([_permutation(stratum, modes, age, seed) for stratum in range(strata)])


def mode_of(stratum: int, modes: int, round: int, seed: int) -> int:
    """The mode that a stratum trains in a round (counted from 1)."""
    age, position = divmod(round - 1, modes)
    return int(_permutation(stratum, modes, age, seed)[position])


def rounds_of(mode: int, strata: int, modes: int, rounds: int, seed: int) -> int:
    """Number of rounds, of the first `rounds`, in which at least one stratum trains this mode."""
    return _rounds_of_all(strata, modes, rounds, seed)[mode]


@lru_cache(maxsize=8)
def _rounds_of_all(strata: int, modes: int, rounds: int, seed: int) -> tuple[int, ...]:
    counts = np.zeros(modes, int)
    places = np.arange(modes)
    for first in range(0, rounds, modes):
        trained = np.zeros((modes, modes), bool)  # [r, k]: mode k is trained in the age's r-th round
        for stratum in range(strata):
            trained[places, _permutation(stratum, modes, first // modes, seed)] = True
            if trained.all():  # after a small multiple of K strata, also if there are many more
                break
        counts += trained[: rounds - first].sum(axis=0)
    return tuple(counts.tolist())


def _permutation(stratum: int, modes: int, age: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, age, stratum]).permutation(modes)
