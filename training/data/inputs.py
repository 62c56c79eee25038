"""Model inputs from a data set's examples: images and numbers as they are or normalised, texts as ids.

    InputConfig  --->  sizes(config)              arguments of `models.build`
                 --->  held_out_inputs(config)    the server's test set
                 --->  client_inputs(config, …)   one client's training and test set

Texts become token ids by the model's own tokenizer, or contexts and next characters. Ids are stored in the smallest
dtype and widened when a model is called (`tasks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from logging import getLogger
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tepal import models
from tepal.models import CHARACTERS, CHOICES, IMAGES, SEQUENCES, TABLES, TEXTS
from tepal.training.data import (
    LOCAL,
    CharVocabulary,
    DataConfig,
    DataError,
    ImageArrays,
    LabelledNumbers,
    Numbers,
    Texts,
    by_dataset,
    class_names,
    dataset_info,
    held_out,
    load_client,
    normalise,
    normalised_numbers,
    number_info,
    table_info,
    text_info,
    unlabelled,
)
from tepal.training.data.loading import holds_out
from tepal.training.data.sources import named_source
from tepal.training.data.tokens import TokenizerError, Tokens, load_tokenizer

log = getLogger("flwr")

AUTO = "auto"
TOKENS = 128
"""Default for `text-length` of token models."""


class InputConfig(DataConfig):
    """The run config's keys about data, and those about its conversion to model inputs."""

    model: str = "tiny-vit"
    task: Literal[
        "auto",
        "image-classification",
        "table-classification",
        "sequence-classification",
        "next-character",
        "multiple-choice",
        "sequence-regression",
    ] = Field(
        default="auto",
        description='task of a custom model (package.module:function); "auto": image classification, or the task of a '
        "model with a name",
    )
    tokenizer: str = Field(
        default="",
        description='tokenizer of texts: a directory written by save_pretrained, or a name on the hub; "": the '
        "model's own, by the model's name or directory",
    )
    text_length: int = Field(
        default=0,
        ge=0,
        description="tokens of a text, longer texts are cut (0: 128); characters before the target character (0: 80)",
    )

    @property
    def kind(self) -> str:
        """Kind of the model. Raises ModelError for an unknown model, or one for another task than `task`."""
        found = models.find(self.model).kind
        if found == models.ANYTHING:
            return models.IMAGES if self.task == AUTO else self.task
        if self.task not in (AUTO, found):
            raise models.ModelError(f"{self.model} is a model for {found}, but task={self.task!r}: set it to {AUTO!r}")
        return found


@dataclass(frozen=True, eq=False)
class Inputs:
    """Model inputs (n, …) with labels (n,), int64, or targets of a regression (n, outputs), float32."""

    values: NDArray[Any]
    labels: NDArray[np.int64] | NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ClientInputs:
    """One client's inputs; `origin` describes their source, `sizes` are the arguments of `models.build`."""

    train: Inputs
    test: Inputs
    sizes: Mapping[str, Any]
    origin: str


def sizes(config: InputConfig) -> dict[str, Any]:
    """Return the arguments of `models.build` that the data determines. Raises DataError if it cannot."""
    if config.kind == SEQUENCES:
        return vars(number_info(config))
    if config.kind == TABLES:
        return vars(table_info(config))
    if config.feature_columns:
        raise DataError(
            f"model={config.model!r} is for {config.kind}, but feature-columns={config.feature_columns!r} is for "
            f'numbers: leave it empty, or choose a model that classifies numbers (model="mlp", "ft-transformer", or a '
            f'custom one with task="{TABLES}") or a regression model ("linear-attention", or task="{SEQUENCES}")'
        )
    if config.kind == IMAGES:
        info = dataset_info(config)
        return {"image_shape": info.shape, "classes": info.classes}
    if config.kind == CHARACTERS and config.dataset != LOCAL:
        source = named_source(config, Texts)
        _check_characters(source.train, source.next_characters, source.origin, config)
    return _sizes_of_texts(text_info(config).classes, config)


def written_sizes(sizes: Mapping[str, Any]) -> dict[str, str]:
    """Return the sizes as text for a model file's metadata: image-shape="1x8x8", classes="10"."""
    return {
        name.replace("_", "-"): "x".join(map(str, size)) if isinstance(size, tuple) else str(size)
        for name, size in sizes.items()
    }


FOUND_NAMES = "class-names-found"
"""Key under which the server sends the class names of the run's dataset: a client's own data may have a subset."""


FOUND_SHAPE = "image-shape-found"
"""Key under which the server sends the shape of the run's images: a client's own are converted to it."""


def found_shape(config: InputConfig) -> dict[str, str]:
    """Return the shape of the run's images for clients with their own; {} with `image-shape`, or for other data.

    Raises DataError.
    """
    if config.kind != IMAGES or config.dataset == LOCAL or config.image_shape:
        return {}
    return {FOUND_SHAPE: written_sizes(sizes(config))["image-shape"]}


def written_names(config: InputConfig) -> dict[str, str]:
    """Return the class names for a model file's metadata; an empty dict if there are none, or one has a comma.

    Raises DataError.
    """
    names = class_names(config, examples_of(config)) if config.kind in (IMAGES, TABLES, TEXTS) else ()
    if wrong := [name for name in names if "," in name]:
        _warn_of_comma(config.dataset, wrong[0])
        return {}
    return {"class-names": ",".join(names)} if names else {}


@cache
def _warn_of_comma(dataset: str, name: str) -> None:
    log.warning(
        "dataset=%r: class name %r has a comma, which separates names in class-names. Clients with data of their own "
        "and model files do not get the names; a client's own data must then have all classes. Rename it.",
        dataset, name,
    )  # fmt: skip


def settled(config: InputConfig) -> dict[str, str]:
    """Return the keys that the run config leaves to the run's dataset, with their values, for clients and metadata.

    They are `feature-columns` for "*", `normalise` of numbers for "dataset", and `classes` of a table whose classes are
    numbered: a client's own table may lack some. Raises DataError.
    """
    kind = examples_of(config)
    if kind not in (Numbers, LabelledNumbers):
        return {}
    found = by_dataset(config, kind)
    if kind is LabelledNumbers and not config.classes and not written_names(config):
        found["classes"] = str(sizes(config)["classes"])
    return found


def held_out_inputs(config: InputConfig) -> Inputs | None:
    """Return the server's test set; None if it has none. Raises DataError, TokenizerError."""
    examples = held_out(config, examples_of(config))
    return None if examples is None else _inputs(examples, config)


def has_held_out(config: InputConfig) -> bool:
    """Return whether the server has a test set. Raises DataError."""
    return holds_out(config, examples_of(config))


def unlabelled_inputs(config: InputConfig) -> NDArray[Any] | None:
    """Return the server's unlabelled inputs (n, …), `server-share` of the training examples; None if it has none.

    Raises DataError, TokenizerError.
    """
    examples = unlabelled(config, examples_of(config))
    return None if examples is None else _inputs(examples, config).values


def client_inputs(
    config: InputConfig, node_config: Mapping[str, Any], *, client: str, stamped: str = ""
) -> ClientInputs:
    """Return one client's inputs; see `data.load_client`. Raises DataError, TokenizerError."""
    found = load_client(config, node_config, client=client, kind=examples_of(config), stamped=stamped)
    _check_characters(found.train, found.next_characters, f"client {client}: {found.origin}", config)
    train, test = _inputs(found.train, config), _inputs(found.test, config)
    if isinstance(found.train, Numbers):
        known = vars(found.train.info)
    elif isinstance(found.train, LabelledNumbers):
        known = {"features": found.train.features, "classes": found.classes}
    elif isinstance(found.train, ImageArrays):
        known = {"image_shape": found.train.shape, "classes": found.classes}
    else:
        known = _sizes_of_texts(found.classes, config)
    return ClientInputs(train, test, known, found.origin)


def _check_characters(examples: object, next_characters: bool, origin: str, config: InputConfig) -> None:
    """Raise DataError for texts with classes, which a model of the next character would take for characters."""
    labelled = isinstance(examples, Texts) and examples.labels is not None
    if config.kind == CHARACTERS and labelled and not next_characters:
        raise DataError(
            f'{origin}: has labels, but model="{config.model}" predicts the next character: set label-column=""'
        )


def examples_of(config: InputConfig) -> type[Any]:
    """Return the kind of examples that the model needs. Raises ModelError for an unknown model."""
    return {IMAGES: ImageArrays, SEQUENCES: Numbers, TABLES: LabelledNumbers}.get(config.kind, Texts)


def _inputs(examples: ImageArrays | Texts | Numbers | LabelledNumbers, config: InputConfig) -> Inputs:
    if isinstance(examples, Numbers | LabelledNumbers):
        by = settled(config).get("normalise", config.normalise)
        values = normalised_numbers(examples.inputs, by)
        return Inputs(values, examples.targets if isinstance(examples, Numbers) else examples.labels)
    if isinstance(examples, ImageArrays):
        return Inputs(normalise(examples.images, config.normalise), examples.labels)
    if config.kind == CHARACTERS and examples.labels is None:  # else they are windows already, as in LEAF
        return Inputs(*_vocabulary(config).windows(examples.texts, np.uint8))
    values = encoded(examples, config)
    assert examples.labels is not None, "running text has no classes"
    return Inputs(values, examples.labels)


def encoded(texts: Texts, config: InputConfig) -> NDArray[Any]:
    """Return the model's inputs for texts with or without labels (n, …). Raises DataError, TokenizerError."""
    if config.kind == CHARACTERS:
        return _smallest_dtype(texts.encoded(_vocabulary(config)))
    if (texts.choices is not None) != (config.kind == CHOICES):
        raise DataError(
            f"model={config.model!r} is for {config.kind}, but these texts have "
            f"{'no choices: set choices-column' if texts.choices is None else 'choices: leave choices-column empty'}"
        )
    tokens, length = tokens_of(config), config.text_length or TOKENS
    if texts.choices is not None:
        return _smallest_dtype(tokens.choices(texts.texts, texts.choices, length))
    return _smallest_dtype(tokens.texts(texts.texts, length, texts.seconds))


def _vocabulary(config: InputConfig) -> CharVocabulary:
    return CharVocabulary(length=config.text_length or CharVocabulary.length)


def tokens_of(config: InputConfig) -> Tokens:
    """Return the tokenizer. Raises TokenizerError if it, or `text-length`, does not fit the model's configuration."""
    tokens, model = load_tokenizer(config.tokenizer or config.model), models.find(config.model).config
    if (known := model.get("vocab_size")) is not None and tokens.vocabulary > known:
        raise TokenizerError(
            f"tokenizer={tokens.name!r} has {tokens.vocabulary:,} tokens, but model={config.model!r} has {known:,}: "
            "set tokenizer to the model's own"
        )
    if (padding := model.get("pad_token_id")) is not None and tokens.padding != padding:
        raise TokenizerError(
            f"tokenizer={tokens.name!r} pads with token {tokens.padding}, but model={config.model!r} uses "
            f"{padding} for padding: set tokenizer to the model's own"
        )
    most, length = _positions(model), config.text_length or TOKENS
    if most and length > most:
        raise TokenizerError(
            f"text-length={config.text_length}{'' if config.text_length else f', which is {length},'} is more than the "
            f"{most:,} tokens for which model={config.model!r} has positions: set text-length to {most} or less"
        )
    return tokens


_FROM_PADDING = (
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Families of transformers whose first position has the number after that of the padding token."""


def _positions(model: Mapping[str, Any]) -> int:
    """Return the most tokens of a text, by the configuration of a model of transformers; 0 if it sets no limit."""
    family = model.get("model_type")
    if not model.get("position_biased_input", True) or _is_rotary(model):
        return 0  # DeBERTa with relative positions alone, and models that compute a position's rotation
    most = model.get("n_positions" if family == "gpt2" else "max_position_embeddings")
    if not isinstance(most, int) or most < 1:
        return 0
    return most - ((model.get("pad_token_id", 1) or 0) + 1 if family in _FROM_PADDING else 0)


def _is_rotary(model: Mapping[str, Any]) -> bool:
    """Return whether positions are rotations. They have no table, so `max_position_embeddings` is no limit."""
    named = any("rope_" in key or "rotary_emb" in key for key in model)
    # The first LLaMA's configuration does not say it.
    return named or model.get("model_type") == "llama" or model.get("position_embedding_type") == "rotary"


def _sizes_of_texts(classes: int, config: InputConfig) -> dict[str, Any]:
    """Return the sizes of a text model; 0 classes: running text. Raises DataError."""
    if config.kind == CHARACTERS:
        return {"vocabulary": len(CharVocabulary())}
    if not classes:
        raise DataError(
            f"model={config.model!r} is for {config.kind}, but these texts are running text, without labels: set "
            "label-column, or choose a next-character model, such as char-lstm"
        )
    return {"classes": classes} if config.kind == TEXTS else {}


def _smallest_dtype(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Return the ids in the smallest dtype that fits them."""
    most = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if most < 2**8 else np.int16 if most < 2**15 else np.int32)
