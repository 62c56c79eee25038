"""Splits drawn by (`seed`, purpose, client): held-out set, the server's share, a client's train and test split."""

from __future__ import annotations

import hashlib

import numpy as np

from tepal.training.data.config import DataConfig, DataError
from tepal.training.data.examples import AnySource, Indices


def seed_sequence(*words: object) -> np.random.SeedSequence:
    """Return a seed that depends only on the words, in every process (unlike Python's hash())."""
    text = "\x1f".join(map(str, words))
    return np.random.SeedSequence(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))


def permutation(count: int, *words: object) -> Indices:
    """Return a permutation of 0 … count - 1 that depends only on the words."""
    return np.random.default_rng(seed_sequence(*words)).permutation(count)


def split(indices: Indices, test_fraction: float, seed: int, client: str) -> tuple[Indices, Indices]:
    """Return (train, test), both non-empty, as a function of (indices, fraction, seed, client's name).

    Raises DataError for fewer than two examples.
    """
    count = len(indices)
    if count < 2:
        raise DataError(
            f"{count} example{'s' * (count != 1)} cannot be split into a train and a test part: at least 2 are needed; "
            "add examples, or raise min-partition-size"
        )
    shuffled = indices[permutation(count, seed, "train/test", client)]
    tests = min(max(round(count * test_fraction), 1), count - 1)
    return shuffled[tests:], shuffled[:tests]


def shares(source: AnySource, config: DataConfig) -> tuple[Indices, Indices, Indices]:
    """Divide the training examples into (held out, the server's unlabelled ones, the clients'), each in random order.

    The order matters for training: files are often sorted, and the iid partitioner does not shuffle.
    """
    shuffled = permutation(len(source.train), config.seed, "held out")
    test = config.held_out_fraction if source.test is None else 0
    held_out = max(round(len(shuffled) * test), 1) if test else 0
    training = shuffled[held_out:]
    kept = max(round(len(training) * config.server_share), 1) if config.server_share else 0
    return shuffled[:held_out], training[:kept], training[kept:]
