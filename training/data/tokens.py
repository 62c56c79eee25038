"""Texts as token ids, by the tokenizer that a model was trained with.

A tokenizer is a directory as transformers' `save_pretrained` leaves it (tokenizer.json, tokenizer_config.json, …), or a
name on the hub: then it is looked for among what was downloaded before, and downloaded only where that is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.models import ModelError

PADDING, CONTEXT, CHOICE = 0, 1, 2
"""Parts of a sequence in multiple choice: what is not there, what is the same for all choices, what is the choice."""

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class TokenizerError(ValueError):
    """A tokenizer that is not there, or does not fit: what is wrong, and what to do."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenizer. `padding` is the id that fills up short sequences, `vocabulary` the number of ids there are."""

    name: str
    padding: int
    vocabulary: int
    _tokenizer: Any

    def texts(self, texts: Sequence[str], length: int, seconds: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Token ids (n, length) of texts, or of pairs of them, cut at `length` and filled up on the right.

        What the tokenizer adds to a sequence (its start, its end, what is between a pair) is added.
        """
        encoded = self._tokenizer(
            list(texts),
            None if seconds is None else list(seconds),
            truncation=True,
            max_length=length,
            return_attention_mask=False,
        )["input_ids"]
        return self._filled(encoded, length)

    def choices(self, contexts: Sequence[str], choices: Sequence[Sequence[str]], length: int) -> NDArray[np.int64]:
        """Every context with each of its choices, for scoring by a causal language model.

        Where both do not fit into `length`, the beginning of the context goes, and of a choice that is alone too long
        the end. Questions have as many choices as the one with the most; those that are not there have no tokens.

        Returns:
            (n, choices, 2, length): token ids, and of each whether it is `PADDING`, `CONTEXT` or `CHOICE`.
        """
        most = max(map(len, choices))
        encoded = np.full((len(contexts), most, 2, length), PADDING, np.int64)
        encoded[:, :, 0] = self.padding
        befores = self._plain(contexts)
        start = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        afters = iter(self._plain([f" {choice}" for each in choices for choice in each]))
        for n, (before, each) in enumerate(zip(befores, choices, strict=True)):
            for place in range(len(each)):
                after = next(afters)[: length - 1]
                room = length - len(after) - len(start)
                # Without a place before it a choice's first token could not be foretold.
                kept = [*start, *before[max(len(before) - room, 0) :]] or [self.padding]
                ids = [*kept, *after]
                encoded[n, place, 0, : len(ids)] = ids
                encoded[n, place, 1, : len(ids)] = [CONTEXT] * len(kept) + [CHOICE] * len(after)
        return encoded

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return list(encoded["input_ids"])

    def _filled(self, sequences: Sequence[Sequence[int]], length: int) -> NDArray[np.int64]:
        filled = np.full((len(sequences), length), self.padding, np.int64)
        for row, ids in zip(filled, sequences, strict=True):
            row[: len(ids)] = ids
        return filled


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokens:
    """The tokenizer `name`, a directory or a name on the hub; kept for the process.

    Raises TokenizerError where there is none, or transformers is not installed.
    """
    from tepal.models.libraries import import_transformers

    try:
        library = import_transformers(f"tokenizer={name!r}")
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    path = Path(name).expanduser()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:  # of many types, from several libraries
        reason = str(error).partition("\n")[0]
        if path.is_dir():
            raise TokenizerError(
                f"{path}: no tokenizer that can be read ({reason}); expected are the files that save_pretrained writes"
            ) from error
        offline = f" ({' or '.join(_OFFLINE)} is set)" if any(os.environ.get(key) for key in _OFFLINE) else ""
        raise TokenizerError(
            f"tokenizer={name!r} is no directory here, was not downloaded before, and cannot be now{offline}: "
            f"{reason}. Set tokenizer to a directory that AutoTokenizer.from_pretrained(…).save_pretrained(directory) "
            "wrote on a machine with a connection"
        ) from error
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if padding is None:
        raise TokenizerError(f"tokenizer={name!r} has neither a padding nor an end token: give it a pad_token")
    return Tokens(name, int(padding), len(tokenizer), tokenizer)
