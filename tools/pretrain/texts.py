"""Texts for pretraining: reading, word pieces, spans with masked words, and what the card says of the result.

A text model starts from word vectors that say which words occur together (`word_vectors`). It is trained to predict
masked word pieces (Devlin et al. 2019) and to recognise which two spans are of one text, by its pooled output (Giorgi
et al. 2021, DeCLUTR). The second task trains the pooler, from which a classifier starts; with the first alone it would
keep its random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from torch import Tensor, nn

from tepal.models.libraries import import_transformers
from tepal.training.data.config import DataConfig, DataError
from tepal.training.data.examples import Texts
from tepal.training.data.sources import named_source

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_FILES = (".jsonl.xz", ".jsonl", ".parquet")
_SHORTEST = 16  # tokens of a span, if the text has as many
_HELD_OUT = 20  # one of so many texts is held out of a data set without a test set
_AT_ONCE = 256  # texts of a pass without gradients


@dataclass(frozen=True)
class Corpus:
    """Texts of a data set for training, and held-out ones; labels (n,) of both for a probe, if it has classes."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    labels: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None


def read_corpus(name: str, folder: Path) -> Corpus:
    """Read a known data set of texts; a question is one text with its choices.

    The data set's test texts are held out, or, if it has none, every twentieth text.

    Raises:
        DataError: The data set is not there, cannot be read, or has no texts.
    """
    places = [folder / f"{name}{suffix}" for suffix in _FILES] + [folder / name]
    place = next((path for path in places if path.exists()), None)
    if place is None:
        raise DataError(f"{folder}: has neither {name}.jsonl.xz nor a folder {name} with the data set's files: add one")
    source = named_source(DataConfig.from_run_config({"dataset": name, "dataset-path": str(place)}))
    train, test = source.train, source.test
    if not isinstance(train, Texts):
        raise DataError(f"{place}: has no texts: give the data set as it is published")
    if test is None:
        numbers = np.arange(len(train))
        train, test = train.take(numbers[numbers % _HELD_OUT > 0]), train.take(numbers[numbers % _HELD_OUT == 0])
    labelled = source.classes > 0 and train.choices is None
    labels = (train.labels, test.labels) if labelled else None  # type: ignore[union-attr]
    return Corpus(tuple(_whole(train)), tuple(_whole(test)), labels)  # type: ignore[arg-type]


def _whole(texts: Texts) -> Iterator[str]:
    for text, choices in zip(texts.texts, texts.choices or ((),) * len(texts), strict=True):
        yield " ".join((text, *choices))


def write_tokenizer(folder: Path, texts: Sequence[str], vocabulary: int) -> None:
    """Train a tokenizer of lower-case word pieces, which frames every text with [CLS] and [SEP]; write it.

    Of word pieces that are equally frequent the library chooses at random, so that each call's result is another one.
    """
    library = import_transformers(folder.name)
    import tokenizers  # comes with transformers

    trained = tokenizers.BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
    first, last = ((token, trained.token_to_id(token)) for token in (SPECIAL["cls"], SPECIAL["sep"]))
    trained.post_processor = tokenizers.processors.BertProcessing(last, first)
    names = {f"{role}_token": token for role, token in SPECIAL.items()}
    made = library.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **names)
    made.save_pretrained(folder)


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was written to the folder."""
    return (folder / "tokenizer.json").is_file()


def read_tokenizer(folder: Path) -> Any:
    """Read what `write_tokenizer` wrote."""
    return import_transformers(folder.name).PreTrainedTokenizerFast.from_pretrained(folder)


def special_of(tokenizer: Any) -> dict[str, int]:
    """The numbers of the special tokens, by the keys of `SPECIAL`."""
    return {role: int(tokenizer.convert_tokens_to_ids(token)) for role, token in SPECIAL.items()}


@dataclass(frozen=True, eq=False)
class Tokens:
    """The word pieces of n texts without [CLS] and [SEP], in one array: text k is ids[starts[k] : starts[k + 1]]."""

    ids: NDArray[np.int16]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: Any, texts: Sequence[str]) -> Tokens:
        """Encode texts; those without a word piece are left out."""
        encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
        kept = [each for each in encoded if each]
        ids = np.fromiter(chain.from_iterable(kept), np.int16)
        return cls(ids, np.cumsum([0, *map(len, kept)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def text(self, k: int) -> NDArray[np.int16]:
        """The word pieces of text k."""
        return self.ids[self.starts[k] : self.starts[k + 1]]


def word_vectors(tokens: Tokens, vocabulary: int, width: int, scale: float = 0.25) -> NDArray[np.float32]:
    """Vectors (vocabulary, width) of the word pieces, near one another for pieces that occur in the same texts.

    They factorise the positive pointwise mutual information of two word pieces in one text (Levy and Goldberg 2014, as
    U·√Σ), with the counts of the second to the power of 0.75 (Levy et al. 2015, context distribution smoothing). These
    seconds are worth more to a small encoder than half an hour of masked words.

    Args:
        tokens: The texts.
        vocabulary: Number of tokens.
        width: Number of values of a vector, less than `vocabulary`.
        scale: The root mean square of all values.

    Returns:
        The vectors; 0 for word pieces that never occur with another one.
    """
    rows = np.repeat(np.arange(len(tokens)), np.diff(tokens.starts))
    ones = np.ones(len(rows), np.float32)
    occurs = (sparse.csr_matrix((ones, (rows, tokens.ids)), (len(tokens), vocabulary)) > 0).astype(np.float32)
    together = (occurs.T @ occurs).tocoo()
    apart = together.row != together.col
    row, column, count = (each[apart] for each in (together.row, together.col, together.data.astype(np.float64)))
    first = np.bincount(row, count, vocabulary)
    second = first**0.75 / (first**0.75).sum()
    information = np.log(count / (first[row] * second[column]))
    positive = sparse.csr_matrix((np.maximum(information, 0), (row, column)), (vocabulary, vocabulary))
    left, singular, _ = randomized_svd(positive, width, n_iter=7, random_state=0)
    vectors = np.where(first[:, None] > 0, left * np.sqrt(singular), 0)
    return (vectors * (scale / np.sqrt((vectors**2).mean()))).astype(np.float32)


@dataclass(frozen=True)
class MaskedSpans:
    """Cross-entropy of masked word pieces, and of which spans belong together.

    A batch has two spans of each text, of half its length, at most `length` tokens with [CLS] and [SEP].

    Args:
        tokens: The texts.
        special: The numbers of the special tokens, by the keys of `SPECIAL`.
        vocabulary: Number of tokens; the special ones come first.
        length: The largest number of tokens.
        masked: Share of the tokens to predict; of ten, eight are replaced by [MASK] and one by another.
        temperature: By which the cosine similarities of spans are divided.
    """

    tokens: Tokens
    special: Mapping[str, int]
    vocabulary: int
    length: int
    masked: float = 0.15
    temperature: float = 0.05

    def __call__(self, model: nn.Module, indices: NDArray[np.int64], rng: np.random.Generator) -> Tensor:
        device = next(model.parameters()).device
        ids = framed([self._span(k, rng) for _ in range(2) for k in indices], self.special)
        shown, targets = (torch.from_numpy(each).to(device) for each in self._masked(ids, rng))
        words, pooled = predicted(model, shown, targets >= 0, self.special["pad"])
        first, second = F.normalize(pooled, dim=1).chunk(2)
        similar, own = first @ second.T / self.temperature, torch.arange(len(indices), device=device)
        together = (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2
        return F.cross_entropy(words, targets[targets >= 0]) + together

    def _span(self, k: int, rng: np.random.Generator) -> NDArray[np.int16]:
        text = self.tokens.text(k)
        length = min(len(text), self.length - 2, max(_SHORTEST, len(text) // 2))
        start = int(rng.integers(len(text) - length + 1))
        return text[start : start + length]

    def _masked(self, ids: NDArray[np.int64], rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens as the model sees them, and those to predict, −1 elsewhere; one at least is predicted."""
        lowest = max(self.special.values()) + 1
        drawn = np.where(ids >= lowest, rng.random(ids.shape), 1.0)
        chosen = drawn < max(self.masked, float(np.nextafter(drawn.min(), 1)))
        how, other = rng.random(ids.shape), rng.integers(lowest, self.vocabulary, ids.shape)
        shown = np.where(chosen & (how < 0.8), self.special["mask"], ids)
        return np.where(chosen & (how >= 0.9), other, shown), np.where(chosen, ids, -1)


def framed(spans: Sequence[NDArray[np.int16]], special: Mapping[str, int]) -> NDArray[np.int64]:
    """Spans as rows of token numbers with [CLS] before and [SEP] behind, padded on the right."""
    rows = np.full((len(spans), max(map(len, spans)) + 2), special["pad"], np.int64)
    rows[:, 0] = special["cls"]
    for row, span in zip(rows, spans, strict=True):
        row[1 : 1 + len(span)], row[1 + len(span)] = span, special["sep"]
    return rows


def predicted(model: nn.Module, shown: Tensor, chosen: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The logits (chosen, vocabulary) of the chosen tokens, and the pooled outputs (batch, width)."""
    given: Any = model
    output = given.bert(shown, attention_mask=(shown != padding).long())
    return given.cls.predictions(output.last_hidden_state[chosen]), output.pooler_output


@dataclass(frozen=True)
class Accuracy:
    """How many of how many predictions are right."""

    right: int
    count: int

    @property
    def accuracy(self) -> float:
        return self.right / self.count if self.count else 0.0


@torch.no_grad()
def masked_accuracy(model: nn.Module, tokens: Tokens, special: Mapping[str, int], length: int) -> Accuracy:
    """How many masked word pieces the model predicts.

    Of the first `length` − 2 word pieces of every text the 4th, 11th, 18th, … are masked, one in seven.
    """
    model.eval()
    device, right, count = next(model.parameters()).device, 0, 0
    for begin in range(0, len(tokens), _AT_ONCE):
        spans = [tokens.text(k)[: length - 2] for k in range(begin, min(begin + _AT_ONCE, len(tokens)))]
        ids = framed(spans, special)
        chosen = np.zeros(ids.shape, bool)
        chosen[:, 4::7] = True
        chosen &= ids > max(special.values())
        shown = torch.from_numpy(np.where(chosen, special["mask"], ids)).to(device)
        if chosen.any():
            words, _ = predicted(model, shown, torch.from_numpy(chosen).to(device), special["pad"])
            right += int((words.argmax(dim=1).cpu().numpy() == ids[chosen]).sum())
        count += int(chosen.sum())
    return Accuracy(right, count)


@torch.no_grad()
def features(model: nn.Module, tokenizer: Any, texts: Sequence[str], length: int) -> NDArray[np.float32]:
    """The pooled outputs (n, width) of texts, cut to `length` tokens."""
    model.eval()
    given: Any = model
    device, found = next(model.parameters()).device, []
    for begin in range(0, len(texts), _AT_ONCE):
        batch = tokenizer(
            list(texts[begin : begin + _AT_ONCE]), truncation=True, max_length=length, padding=True, return_tensors="pt"
        ).to(device)
        found.append(given.bert(batch["input_ids"], attention_mask=batch["attention_mask"]).pooler_output.cpu().numpy())
    return np.concatenate(found)


def build_encoder(config: Mapping[str, Any], seed: int, vectors: NDArray[np.float32] | None = None) -> nn.Module:
    """A BERT of this configuration with the heads of pretraining, without the one for the next sentence.

    Its word embeddings are those of `vectors` (vocabulary, width) that are not 0, if given. Dropout is off: these
    models are too small to fit their texts by heart. Raises ModelError without transformers.
    """
    library = import_transformers("pretraining of texts")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = library.BertForPreTraining(
            library.BertConfig(**{**config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        )
    del model.cls.seq_relationship
    if vectors is not None:
        words, given = model.bert.embeddings.word_embeddings.weight, torch.from_numpy(vectors)
        words.data = torch.where(given.any(dim=1, keepdim=True), given, words.data)
    built: nn.Module = model
    return built


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config.json of a text classifier that starts from the encoder."""
    written = {"architectures": ["BertForSequenceClassification"], **config}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
