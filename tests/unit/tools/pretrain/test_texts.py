"""Texts for pretraining: reading, word pieces, spans and masks, the loss, and the weights that come of it."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal import models
from tepal.models.blocks import find_blocks
from tepal.models.pretrained import load_pretrained
from tepal.tools.pretrain import __main__ as command
from tepal.tools.pretrain import texts
from tepal.tools.pretrain.loop import Schedule
from tepal.tools.pretrain.recipes import RECIPES
from tepal.training.data.config import DataError
from tepal.training.data.tokens import load_tokenizer

pytest.importorskip("transformers")

WORDS = ("the orbit of a satellite", "a goal in the last period", "the engine of my car", "keys and chips")
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
CONFIG = {
    **RECIPES["compact-bert-news"].config, "vocab_size": 120, "max_position_embeddings": 24, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


def some_news(folder, name="20newsgroups", count=40):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"text": " ".join([WORDS[k % 4]] * (1 + k % 9)), "label": ("sci.space", "rec.autos")[k % 2], "split": split}
        for split in ("train", "test")
        for k in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokens_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return texts.Tokens(rng.integers(5, 120, sum(lengths)).astype(np.int16), np.cumsum([0, *lengths]))


@pytest.fixture(scope="module")
def encoder():
    return texts.build_encoder(CONFIG, seed=0)


def test_test_texts_are_held_out_with_their_labels(tmp_path):
    some_news(tmp_path)
    corpus = texts.read_corpus("20newsgroups", tmp_path)
    assert len(corpus.train) == len(corpus.held_out) == 40 and corpus.train[1] == " ".join([WORDS[1]] * 2)
    train, held_out = corpus.labels
    assert len(set(train[::2])) == 1 and len(set(train)) == 2 and np.array_equal(train, held_out)


def test_without_test_texts_every_twentieth_is_held_out(tmp_path):
    rows = [{"play": "p", "role": "r", "text": f"line {k}"} for k in range(45)]
    (tmp_path / "shakespeare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = texts.read_corpus("shakespeare", tmp_path)
    assert corpus.held_out == ("line 0", "line 20", "line 40") and len(corpus.train) == 42 and corpus.labels is None


def test_a_question_is_one_text_with_its_choices(tmp_path):
    (tmp_path / "arc-easy").mkdir()
    row = {"question": "What is wet?", "choices": ["water", "sand"], "answerKey": 0}
    for part in ("train", "test"):
        (tmp_path / "arc-easy" / f"{part}.jsonl").write_text(json.dumps(row) + "\n")
    corpus = texts.read_corpus("arc-easy", tmp_path)
    assert corpus.train == ("What is wet? water sand",) and corpus.labels is None


def test_missing_data_and_images_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"neither 20newsgroups\.jsonl\.xz nor a folder"):
        texts.read_corpus("20newsgroups", tmp_path)


def test_the_tokenizer_frames_texts_and_its_special_tokens_come_first(tmp_path):
    texts.write_tokenizer(tmp_path, WORDS * 5, 100)
    tokenizer = texts.read_tokenizer(tmp_path)
    assert texts.special_of(tokenizer) == SPECIAL
    ids = tokenizer("The orbit of my CAR")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "the", "orbit", "of", "my", "car", "[SEP]"]
    row = load_tokenizer(str(tmp_path)).texts(["the car"], 6)[0]
    assert tokenizer.convert_ids_to_tokens(row) == ["[CLS]", "the", "car", "[SEP]", "[PAD]", "[PAD]"]
    tokens = texts.Tokens.of(tokenizer, ["the car", "", "goal"])
    assert len(tokens) == 2 and [len(tokens.text(k)) for k in range(2)] == [2, 1]


def test_a_tokenizer_without_its_library_is_refused_with_what_to_install(tmp_path, monkeypatch):
    for library in ("transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(models.ModelError, match=r"needs transformers.*tepal\[text\]"):
        texts.write_tokenizer(tmp_path, WORDS, 100)


def test_word_vectors_factorise_the_positive_mutual_information_of_words_in_a_text():
    vocabulary, width = 24, 6
    rng = np.random.default_rng(1)
    sets = [rng.choice(np.arange(4, vocabulary), rng.integers(1, 8), replace=True) for _ in range(60)]
    tokens = texts.Tokens(np.concatenate(sets).astype(np.int16), np.cumsum([0, *map(len, sets)]))
    count = np.zeros((vocabulary, vocabulary))
    for words in sets:
        for one in set(words):
            for other in set(words) - {one}:
                count[one, other] += 1
    of = count.sum(1)
    expected = np.zeros_like(count)
    for one, other in np.argwhere(count):
        share = of[other] ** 0.75 / sum(each**0.75 for each in of)
        expected[one, other] = max(0.0, math.log(count[one, other] / of[one] / share))
    left, singular, _ = np.linalg.svd(expected)
    best = left[:, :width] * singular[:width] @ left[:, :width].T  # U·Σ·Uᵀ does not depend on the vectors' signs
    found = texts.word_vectors(tokens, vocabulary, width, scale=0.5)
    assert found.dtype == np.float32 and np.sqrt((found**2).mean()) == pytest.approx(0.5, rel=1e-5)
    assert not found[:4].any()  # the special tokens
    np.testing.assert_allclose(found @ found.T * (np.trace(best) / (found**2).sum()), best, atol=1e-3)


def test_an_encoder_starts_from_the_vectors_that_are_not_zero():
    vectors = np.random.default_rng(0).normal(size=(120, 16)).astype(np.float32)
    vectors[[0, 7]] = 0
    plain, given = texts.build_encoder(CONFIG, seed=0), texts.build_encoder(CONFIG, seed=0, vectors=vectors)
    words = given.bert.embeddings.word_embeddings.weight
    expected = torch.from_numpy(vectors)
    expected[[0, 7]] = plain.bert.embeddings.word_embeddings.weight[[0, 7]].detach()
    assert torch.equal(words, expected) and given.cls.predictions.decoder.weight is words
    assert torch.equal(given.bert.pooler.dense.weight, plain.bert.pooler.dense.weight)


@given(st.integers(1, 200), st.integers(4, 64), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_spans_are_pieces_of_their_text(words, length, seed):
    tokens = texts.Tokens(np.arange(words, dtype=np.int16), np.array([0, words]))
    span = texts.MaskedSpans(tokens, SPECIAL, 120, length)._span(0, np.random.default_rng(seed))
    assert np.array_equal(span, np.arange(span[0], span[0] + len(span)))
    assert len(span) == min(words, length - 2, max(16, words // 2))


def test_of_the_tokens_to_predict_eight_in_ten_are_masked_and_one_is_another():
    ids = np.tile(np.arange(120), (400, 1))
    loss = texts.MaskedSpans(tokens_of([3]), SPECIAL, 120, 128)
    shown, targets = loss._masked(ids, np.random.default_rng(0))
    chosen = targets >= 0
    assert np.array_equal(shown[~chosen], ids[~chosen]) and np.array_equal(targets[chosen], ids[chosen])
    assert not chosen[:, :5].any(), "special tokens are never predicted"
    count = chosen.sum()
    assert count / (400 * 115) == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / (400 * 115)))
    masked, kept = (shown[chosen] == 4).sum() / count, (shown[chosen] == ids[chosen]).sum() / count
    spread = 4 * math.sqrt(0.8 * 0.2 / count)
    assert masked == pytest.approx(0.8, abs=spread) and kept == pytest.approx(0.1 + 0.1 / 115, abs=spread)


def test_one_token_at_least_is_predicted():
    loss = texts.MaskedSpans(tokens_of([3]), SPECIAL, 120, 128, masked=0.0)
    _, targets = loss._masked(np.array([[2, 7, 3, 0]]), np.random.default_rng(1))
    assert targets.tolist() == [[-1, 7, -1, -1]]


def test_the_loss_is_that_of_transformers_and_of_the_pairs_by_hand(encoder):
    from transformers import BertConfig, BertForMaskedLM

    tokens, temperature = tokens_of([30, 5, 60]), 0.05
    loss = texts.MaskedSpans(tokens, SPECIAL, 120, 24)
    indices = np.array([2, 0, 1])
    found = loss(encoder, indices, np.random.default_rng(3))

    rng = np.random.default_rng(3)
    spans = [loss._span(k, rng) for _ in range(2) for k in indices]
    shown, targets = map(torch.from_numpy, loss._masked(texts.framed(spans, SPECIAL), rng))
    other = BertForMaskedLM(BertConfig(**CONFIG | {"hidden_dropout_prob": 0.0}))
    other.load_state_dict(encoder.state_dict(), strict=False)
    mask = (shown != 0).long()
    labels = torch.where(targets >= 0, targets, -100)
    words = other(shown, attention_mask=mask, labels=labels).loss
    pooled = encoder.bert(shown, attention_mask=mask).pooler_output.detach().double().numpy()
    total = 0.0
    for own, others in ((range(3), range(3, 6)), (range(3, 6), range(3))):
        for place, one in enumerate(own):
            cosines = [
                pooled[one] @ pooled[each] / np.linalg.norm(pooled[one]) / np.linalg.norm(pooled[each])
                for each in others
            ]
            powers = [math.exp(cosine / temperature) for cosine in cosines]
            total -= math.log(powers[place] / sum(powers)) / 6
    assert found.item() == pytest.approx(words.item() + total, rel=1e-4)


def test_the_masked_accuracy_counts_every_seventh_word(encoder):
    tokens = tokens_of([3, 4, 10, 40])
    found = texts.masked_accuracy(encoder, tokens, SPECIAL, 24)
    right = count = 0
    for k in range(4):
        row = [2, *map(int, tokens.text(k)[:22]), 3]
        places = [place for place in range(4, len(row) - 1, 7)]
        hidden = [4 if place in places else each for place, each in enumerate(row)]
        with torch.no_grad():
            output = encoder.bert(torch.tensor([hidden])).last_hidden_state
            logits = encoder.cls.predictions(output)[0]
        right += sum(int(logits[place].argmax()) == row[place] for place in places)
        count += len(places)
    assert (found.right, found.count) == (right, count) and count == 0 + 1 + 1 + 3
    assert found.accuracy == right / count


@pytest.fixture
def small(monkeypatch):
    recipe = replace(
        RECIPES["compact-bert-news"], data=("20newsgroups",), config=CONFIG, schedule=Schedule(epochs=2, batch_size=8)
    )
    monkeypatch.setattr(command, "RECIPES", {**RECIPES, "compact-bert-news": recipe})
    return recipe


def test_an_encoder_is_made_by_name_and_starts_a_classifier(tmp_path, small):
    some_news(tmp_path)
    path = command.pretrain("compact-bert-news", small, tmp_path, tmp_path / "made", torch.device("cpu"))
    folder, card = path.parent, tomllib.loads(path.read_text())
    assert card["examples"] == 40 and card["epochs"] == 2 and card["data"] == "20newsgroups"
    assert 0 <= card["accuracy"] == card["accuracy-of"]["20newsgroups"] <= 1 and 0 <= card["probe-accuracy"] <= 1
    assert models.find(str(folder)).kind == models.TEXTS
    model = models.build(str(folder), classes=3, seed=1)
    before = model.bert.pooler.dense.weight.clone()
    loaded = load_pretrained(model, find_blocks(model), str(folder))
    assert set(loaded.fresh) == {"classifier.weight", "classifier.bias"}
    assert all(name.startswith("cls.predictions.") for name in loaded.unused)
    assert not torch.equal(before, model.bert.pooler.dense.weight), "the pooler is trained, too"
    rows = load_tokenizer(str(folder)).texts(["the orbit"], 8)
    assert model(torch.from_numpy(rows)).shape == (1, 3)


def test_interrupted_training_with_the_same_tokenizer_ends_alike(tmp_path, small, monkeypatch):
    some_news(tmp_path)
    whole = command.pretrain("whole", small, tmp_path, tmp_path / "made", torch.device("cpu"))
    half = tmp_path / "half"
    shutil.copytree(whole.parent, half / "whole", ignore=shutil.ignore_patterns("model.safetensors", "card.toml"))

    class Stopped(Exception):
        pass

    def stop(line):
        if line.startswith("Epoch 1"):
            raise Stopped

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(command, "_say", stop)
        command.pretrain("whole", small, tmp_path, half, torch.device("cpu"))
    again = command.pretrain("whole", small, tmp_path, half, torch.device("cpu"))
    assert tomllib.loads(again.read_text())["sha256"] == tomllib.loads(whole.read_text())["sha256"]
