"""Random inputs of a model, as its task has them: to trace a model for its export, and to compare outputs with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tepal import models
from tepal.tools.export.delivered import Delivered, ExportError
from tepal.training.data import CharVocabulary, DatasetInfo, NumberInfo, TableInfo, normalise
from tepal.training.data.inputs import TOKENS, InputConfig, tokens_of
from tepal.training.data.tokens import CHOICE, CONTEXT

CHOICES = 4
_POSITIONS = (3, *range(1, 513))
"""Lengths of a sequence of numbers that are tried: the metadata has none, and most models take any."""
_WORDS = ("a", "model", "of", "texts", "reads", "words", "and", "every", "text", "has", "another", "number", "them")


def length_of(config: InputConfig) -> int:
    """Return the number of tokens or characters of a model's input."""
    return config.text_length or (CharVocabulary.length if config.kind == models.CHARACTERS else TOKENS)


def example_inputs(delivered: Delivered, count: int, *, seed: int, length: int | None = None) -> Tensor:
    """Return random inputs as `Task.outputs` takes them.

    Args:
        delivered: the model.
        count: number of examples.
        seed: seed of the random numbers.
        length: tokens of a text, by default those of training; or positions of a sequence of numbers, by default the
            first of `_POSITIONS` that the model takes.

    Raises:
        ExportError: a regression's model takes neither (n, features) nor (n, length, features) of any of these lengths.
    """
    rng, predictor = np.random.default_rng(seed), delivered.predictor
    config = predictor.config
    if isinstance(predictor.info, DatasetInfo):
        images = rng.random((count, *predictor.info.shape), dtype=np.float32)
        return torch.from_numpy(normalise(images, config.normalise))
    if isinstance(predictor.info, TableInfo):
        return torch.from_numpy(rng.standard_normal((count, predictor.info.features), dtype=np.float32))
    if isinstance(predictor.info, NumberInfo):
        return _numbers(delivered, predictor.info, count, (length,) if length else _POSITIONS, rng)
    length = length or length_of(config)
    if config.kind == models.CHARACTERS:
        return torch.from_numpy(rng.integers(0, len(CharVocabulary()), (count, length)))
    return torch.from_numpy(_texts(config, count, length, rng))


def _numbers(
    delivered: Delivered, info: NumberInfo, count: int, lengths: Sequence[int], rng: np.random.Generator
) -> Tensor:
    values = torch.from_numpy(rng.standard_normal((count, max(lengths), info.features), dtype=np.float32))
    model = delivered.predictor.model.cpu().eval()
    # The metadata does not say whether an input is a sequence either.
    candidates = [values[:, : lengths[0]], values[:, 0], *(values[:, :length] for length in lengths[1:])]
    reasons: list[object] = []
    for inputs in candidates:
        try:
            with torch.no_grad():
                if delivered.task.outputs(model, inputs.contiguous()).shape == (count, info.outputs):
                    return inputs.contiguous()
            reasons.append("its outputs have another shape")
        except (RuntimeError, ValueError, IndexError) as error:
            reasons.append(error)
    raise ExportError(
        f"{delivered.predictor.file}: the model takes neither (n, {info.features}) nor (n, length, {info.features}) of "
        f"{min(lengths)} to {max(lengths)} positions to return (n, {info.outputs}) ({reasons[0]}): correct the model's "
        "forward"
    )


def _texts(config: InputConfig, count: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    tokens = tokens_of(config)
    special = tokens.texts([""], length)  # start and end, of which some models need one in each text
    known = np.setdiff1d(np.arange(tokens.vocabulary), [tokens.padding, *special.flat])
    texts = [" ".join(rng.choice(_WORDS, int(number))) for number in rng.integers(2, max(length, 3), count)]
    if config.kind == models.CHOICES:
        choices = [[" ".join(rng.choice(_WORDS, 2)) for _ in range(CHOICES - n % 2)] for n in range(count)]
        encoded = tokens.choices(texts, choices, length)
        ids, roles = encoded[:, :, 0], encoded[:, :, 1]
        inner = (roles == CONTEXT) | (roles == CHOICE)
        inner[:, :, 0] = False  # the start of a text stays
    else:
        encoded = ids = tokens.texts(texts, length)
        inner = np.zeros(ids.shape, bool)
        inner[:, 1:-1] = (ids != tokens.padding)[:, 2:] & (ids != tokens.padding)[:, 1:-1]  # start and end stay
    ids[inner] = rng.choice(known, int(inner.sum()))
    return encoded
