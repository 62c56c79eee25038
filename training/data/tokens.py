"""Texts as token ids, by the tokenizer that a model was trained with.

A tokenizer is a directory as transformers' `save_pretrained` writes it (tokenizer.json, tokenizer_config.json, …), that
of weights that come with Tepal, by their name, or a name on the hub, which is read from the local cache of the hub, or
downloaded if that is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.models import ModelError, weights

PADDING, CONTEXT, CHOICE = 0, 1, 2
"""Roles of tokens in multiple choice: padding, the context that all choices share, and the choice."""

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class TokenizerError(ValueError):
    """Raised for a tokenizer that is missing, unreadable, or not the model's own."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenizer. `padding` is the id of padding tokens, `vocabulary` the number of ids."""

    name: str
    padding: int
    vocabulary: int
    _tokenizer: Any

    def texts(self, texts: Sequence[str], length: int, seconds: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Return token ids (n, length) of texts, or of pairs, truncated to `length` and padded on the right.

        They include the tokenizer's special tokens (start, end, separator of a pair).
        """
        encoded = self._tokenizer(
            list(texts),
            None if seconds is None else list(seconds),
            truncation=True,
            max_length=length,
            return_attention_mask=False,
        )["input_ids"]
        padded = np.full((len(encoded), length), self.padding, np.int64)
        for row, ids in zip(padded, encoded, strict=True):
            row[: len(ids)] = ids
        return padded

    def choices(self, contexts: Sequence[str], choices: Sequence[Sequence[str]], length: int) -> NDArray[np.int64]:
        """Encode every context with each of its choices, for scoring by a causal language model.

        If both do not fit into `length`, the beginning of the context is cut, and the end of a choice that is too long
        alone. Questions are padded to the largest number of choices with choices that have no tokens.

        Returns:
            (n, choices, 2, length): token ids and their roles, `PADDING`, `CONTEXT` or `CHOICE`.
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
                # A choice's first token needs a token before it, at whose position it is predicted.
                kept = [*start, *before[max(len(before) - room, 0) :]] or [self.padding]
                ids = [*kept, *after]
                encoded[n, place, 0, : len(ids)] = ids
                encoded[n, place, 1, : len(ids)] = [CONTEXT] * len(kept) + [CHOICE] * len(after)
        return encoded

    def save(self, folder: Path, length: int) -> None:
        """Write the tokenizer as `save_pretrained` does, so that a call of it returns what `texts` encodes.

        Args:
            folder: an existing folder.
            length: tokens at which a text is truncated, where truncation is asked for.
        """
        saved = deepcopy(self._tokenizer)
        # Models here get no token types, also for pairs of texts: a tokenizer that returned them would change outputs.
        saved.model_input_names = saved.init_kwargs["model_input_names"] = ["input_ids", "attention_mask"]
        saved.model_max_length, saved.padding_side = length, "right"
        if saved.pad_token is None:
            saved.pad_token = saved.eos_token
        saved.save_pretrained(folder)

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return list(encoded["input_ids"])


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokens:
    """Load the tokenizer `name`, a directory or a name on the hub; it is cached for the process.

    Raises TokenizerError if it cannot be loaded, or transformers is not installed.
    """
    from tepal.models.libraries import import_transformers

    try:
        library = import_transformers(f"tokenizer={name!r}")
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    path = Path(name).expanduser()
    if not path.is_dir():
        path = weights.folder_of(name) or path
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:  # of many types, from several libraries
        reason = str(error).partition("\n")[0]
        if path.is_dir():
            raise TokenizerError(
                f"{path}: no readable tokenizer ({reason}): give a directory written by save_pretrained"
            ) from error
        offline = f" ({' or '.join(_OFFLINE)} is set)" if any(os.environ.get(key) for key in _OFFLINE) else ""
        raise TokenizerError(
            f"tokenizer={name!r} is not a local directory, is not in the hub's cache, and cannot be "
            f"downloaded{offline}: {reason}. Set tokenizer to a directory that "
            "AutoTokenizer.from_pretrained(…).save_pretrained(directory) wrote on a machine with a network"
        ) from error
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if padding is None:
        raise TokenizerError(f"tokenizer={name!r} has neither a padding nor an end token: set its pad_token")
    return Tokens(name, int(padding), len(tokenizer), tokenizer)
