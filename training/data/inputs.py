"""What a model takes, made of a data set's examples: images and numbers as they are, texts as numbers.

    InputConfig  --->  sizes(config)              what the model is built with
                 --->  held_out_inputs(config)    what the server scores it on
                 --->  client_inputs(config, …)   what one client trains and scores it on

Texts become token ids by the model's own tokenizer, or characters and the one that follows. Numbers are kept small, and
widened where a model is called (`tasks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tepal import models
from tepal.models import CHARACTERS, CHOICES, IMAGES, SEQUENCES, TEXTS
from tepal.training.data import (
    CharVocabulary,
    DataConfig,
    DataError,
    Examples,
    Numbers,
    Texts,
    class_names,
    dataset_info,
    held_out,
    held_out_numbers,
    held_out_texts,
    load_client,
    load_client_numbers,
    load_client_texts,
    normalise,
    number_info,
    text_info,
    unlabelled,
    unlabelled_texts,
)
from tepal.training.data.tokens import TokenizerError, Tokens, load_tokenizer

AUTO = "auto"
TOKENS = 128
"""Of a text, where the run config does not say."""


class InputConfig(DataConfig):
    """The run config's keys about data, and those that say what is made of it for the model."""

    model: str = "tiny-vit"
    task: Literal[
        "auto", "image-classification", "sequence-classification", "next-character", "multiple-choice",
        "sequence-regression",
    ] = Field(
        default="auto",
        description='what a model of one\'s own (package.module:function) is for; "auto": images, and of a model that '
        "has a name what it is known to be for",
    )
    tokenizer: str = Field(
        default="",
        description='tokenizer of texts: a directory as save_pretrained leaves it, or a name on the hub; "": the '
        "model's own, by the model's name or directory",
    )
    text_length: int = Field(
        default=0,
        ge=0,
        description="tokens of a text, longer ones are cut (0: 128); characters before the one to foretell (0: 80)",
    )

    @property
    def kind(self) -> str:
        """What the model is for. Raises ModelError for one that is unknown, or for something else than `task` says."""
        found = models.find(self.model).kind
        if found == models.ANYTHING:
            return models.IMAGES if self.task == AUTO else self.task
        if self.task not in (AUTO, found):
            raise models.ModelError(f"{self.model} does {found}, and task={self.task!r}: leave it at {AUTO!r}")
        return found


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model takes (n, …), and the labels (n,) int64, which in a regression are targets (n, outputs) float32."""

    values: NDArray[Any]
    labels: NDArray[np.int64] | NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ClientInputs:
    """One client's inputs; `origin` says in words where they come from, `sizes` what its model is built with."""

    train: Inputs
    test: Inputs
    sizes: Mapping[str, Any]
    origin: str


def sizes(config: InputConfig) -> dict[str, Any]:
    """Arguments of `models.build` that the data decides. Raises DataError where it cannot be read, or does not say."""
    if config.kind == SEQUENCES:
        return vars(number_info(config))
    if config.feature_columns:
        raise DataError(
            f"model={config.model!r} does {config.kind}, and feature-columns={config.feature_columns!r} are for a "
            f'regression: leave it empty, or choose a model for one (of your own with task="{SEQUENCES}")'
        )
    if config.kind == IMAGES:
        info = dataset_info(config)
        return {"image_shape": info.shape, "classes": info.classes}
    return _sizes_of_texts(text_info(config).classes, config)


def written_sizes(sizes: Mapping[str, Any]) -> dict[str, str]:
    """The same as text, as it stands in a model file's metadata: image-shape="1x8x8", classes="10"."""
    return {
        name.replace("_", "-"): "x".join(map(str, size)) if isinstance(size, tuple) else str(size)
        for name, size in sizes.items()
    }


FOUND_NAMES = "class-names-found"
"""Key with which the server tells the clients what the classes are called in the run's dataset: a site with data of its
own may have some of them, and no other."""


def written_names(config: InputConfig) -> dict[str, str]:
    """The classes' names as they stand in a model file's metadata; nothing where there are none. Raises DataError."""
    names = class_names(config) if config.kind in (IMAGES, TEXTS) else ()
    return {"class-names": ",".join(names)} if names and not any("," in name for name in names) else {}


def held_out_inputs(config: InputConfig) -> Inputs | None:
    """The server's test set; None where it has none. Raises DataError, TokenizerError."""
    if config.kind == IMAGES:
        images = held_out(config)
        return None if images is None else _of_images(images, config)
    if config.kind == SEQUENCES:
        numbers = held_out_numbers(config)
        return None if numbers is None else _of_numbers(numbers)
    texts = held_out_texts(config)
    return None if texts is None else _of(texts, config)


def unlabelled_inputs(config: InputConfig) -> NDArray[Any] | None:
    """What the server trains on without labels (n, …), `server-share` of the training examples; None where it has none.

    Raises DataError, TokenizerError.
    """
    if config.kind == IMAGES:
        images = unlabelled(config)
        return None if images is None else normalise(images, config.normalise)
    texts = unlabelled_texts(config)
    return None if texts is None else _of(texts, config).values


def client_inputs(config: InputConfig, node_config: Mapping[str, Any], *, client: str) -> ClientInputs:
    """One client's inputs; see `data.load_client`. Raises DataError, TokenizerError."""
    if config.kind == IMAGES:
        images = load_client(config, node_config, client=client)
        of_images = {"image_shape": images.shape, "classes": images.classes}
        return ClientInputs(_of_images(images.train, config), _of_images(images.test, config), of_images, images.origin)
    if config.kind == SEQUENCES:
        numbers = load_client_numbers(config, node_config, client=client)
        return ClientInputs(_of_numbers(numbers.train), _of_numbers(numbers.test), vars(numbers.info), numbers.origin)
    texts = load_client_texts(config, node_config, client=client)
    of_texts = _sizes_of_texts(texts.classes, config)
    return ClientInputs(_of(texts.train, config), _of(texts.test, config), of_texts, texts.origin)


def _of_images(examples: Examples, config: InputConfig) -> Inputs:
    return Inputs(normalise(examples.images, config.normalise), examples.labels)


def _of_numbers(numbers: Numbers) -> Inputs:
    return Inputs(numbers.inputs, numbers.targets)


def _of(texts: Texts, config: InputConfig) -> Inputs:
    if config.kind == CHARACTERS and texts.labels is None:  # else they are windows already, as in LEAF
        windows, following = _vocabulary(config).windows(texts.texts)
        return Inputs(_small(windows), following)
    values = encoded(texts, config)
    assert texts.labels is not None, "running text has no classes"
    return Inputs(values, texts.labels)


def encoded(texts: Texts, config: InputConfig) -> NDArray[Any]:
    """What a model takes for each text (n, …), whether they have labels or not. Raises DataError, TokenizerError."""
    if config.kind == CHARACTERS:
        return _small(texts.encoded(_vocabulary(config)))
    if (texts.choices is not None) != (config.kind == CHOICES):
        raise DataError(
            f"model={config.model!r} does {config.kind}, and these texts have "
            f"{'no choices: set choices-column' if texts.choices is None else 'choices: leave choices-column empty'}"
        )
    tokens, length = tokens_of(config), config.text_length or TOKENS
    if texts.choices is not None:
        return _small(tokens.choices(texts.texts, texts.choices, length))
    return _small(tokens.texts(texts.texts, length, texts.seconds))


def _vocabulary(config: InputConfig) -> CharVocabulary:
    return CharVocabulary(length=config.text_length or CharVocabulary.length)


def tokens_of(config: InputConfig) -> Tokens:
    """The tokenizer. Raises TokenizerError where it is not the model's, as far as the model's configuration tells."""
    tokens, told = load_tokenizer(config.tokenizer or config.model), models.find(config.model).config
    if (known := told.get("vocab_size")) is not None and tokens.vocabulary > known:
        raise TokenizerError(
            f"tokenizer={tokens.name!r} has {tokens.vocabulary:,} tokens, and model={config.model!r} knows {known:,}: "
            "set tokenizer to the model's own"
        )
    if (padding := told.get("pad_token_id")) is not None and tokens.padding != padding:
        raise TokenizerError(
            f"tokenizer={tokens.name!r} fills up with token {tokens.padding}, and model={config.model!r} takes "
            f"{padding} for what is filled up: set tokenizer to the model's own"
        )
    return tokens


def _sizes_of_texts(classes: int, config: InputConfig) -> dict[str, Any]:
    """0 classes are running text."""
    if config.kind == CHARACTERS:
        return {"vocabulary": len(CharVocabulary())}
    if not classes:
        raise DataError(
            f"model={config.model!r} does {config.kind}, and these texts are running text, without labels: set "
            "label-column, or choose a model of the next character, such as char-lstm"
        )
    return {"classes": classes} if config.kind == TEXTS else {}


def _small(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """The same numbers in the smallest type: a text's eight bytes a token are mostly zeros."""
    most = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if most < 2**8 else np.int16 if most < 2**15 else np.int32)
