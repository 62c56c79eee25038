"""Texts as token ids, by a tokenizer of whole words that the test writes: ids are places in its vocabulary."""

import sys

import numpy as np
import pytest

from tepal.training.data.tokens import CHOICE, CONTEXT, PADDING, TokenizerError, load_tokenizer
from tests.unit.training.data.word_tokenizer import ID, WORDS, ids, written


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return load_tokenizer(written(tmp_path_factory.mktemp("tokenizer"), pad_token="[PAD]"))


def test_texts_are_cut_and_filled_up(tokens):
    encoded = tokens.texts(["the sky", "the sky is very very blue", ""], 6)
    assert encoded.dtype == np.int64 and (tokens.padding, tokens.vocabulary) == (0, len(WORDS))
    assert encoded.tolist() == [
        [*ids("[CLS] the sky [SEP]"), 0, 0],
        ids("[CLS] the sky is very [SEP]"),
        [*ids("[CLS] [SEP]"), 0, 0, 0, 0],
    ]


def test_pairs_are_one_sequence(tokens):
    (encoded,) = tokens.texts(["the sky"], 8, ["is purple"])
    assert encoded.tolist() == [*ids("[CLS] the sky [SEP] is [UNK] [SEP]"), 0]


def test_choices_stand_after_their_context(tokens):
    encoded = tokens.choices(["the sky is", "what is blue ?"], [["blue", "very green"], ["the sky"]], 7)
    assert encoded.shape == (2, 2, 2, 7)
    first, second = encoded[0]
    assert first[0].tolist() == [*ids("the sky is blue"), 0, 0, 0]
    assert first[1].tolist() == [CONTEXT] * 3 + [CHOICE] + [PADDING] * 3
    assert second[0].tolist() == [*ids("the sky is very green"), 0, 0]
    assert second[1].tolist() == [CONTEXT] * 3 + [CHOICE] * 2 + [PADDING] * 2
    assert encoded[1, 0, 0].tolist() == [*ids("what is blue ? the sky"), 0]
    assert not encoded[1, 1].any(), "there is no second choice"


def test_of_what_is_too_long_the_context_goes_first(tokens):
    encoded = tokens.choices(["what is the sky ?"], [["very very blue", "the sky is very very very blue"]], 5)
    assert encoded[0, 0, 0].tolist() == ids("sky ? very very blue")
    assert encoded[0, 0, 1].tolist() == [CONTEXT, CONTEXT, CHOICE, CHOICE, CHOICE]
    assert encoded[0, 1, 0].tolist() == ids("? the sky is very")
    assert encoded[0, 1, 1].tolist() == [CONTEXT, CHOICE, CHOICE, CHOICE, CHOICE]


def test_a_choice_without_a_context_has_a_place_before_it(tokens):
    encoded = tokens.choices([""], [["blue"]], 4)
    assert encoded[0, 0].tolist() == [[0, ID["blue"], 0, 0], [CONTEXT, CHOICE, PADDING, PADDING]]


def test_a_start_token_comes_first_and_an_end_token_can_be_padding(tmp_path):
    tokens = load_tokenizer(written(tmp_path, bos_token="[CLS]", eos_token="[SEP]"))
    assert tokens.padding == ID["[SEP]"]
    assert tokens.choices(["is"], [["blue"]], 4)[0, 0, 0].tolist() == ids("[CLS] is blue [SEP]")
    assert tokens.choices(["the sky is"], [["blue"]], 3)[0, 0, 0].tolist() == ids("[CLS] is blue"), "it stays"


@pytest.mark.parametrize("empty", [False, True])
def test_one_that_is_not_there_is_said_with_what_to_do(tmp_path, monkeypatch, empty):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = str(tmp_path) if empty else "nobody/has-this-tokenizer"
    expected = "no readable tokenizer" if empty else "cannot be downloaded.*save_pretrained"
    with pytest.raises(TokenizerError, match=expected):
        load_tokenizer(name)


def test_one_that_cannot_fill_up_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="neither a padding nor an end token"):
        load_tokenizer(written(tmp_path))


def test_without_the_library_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'tepal\[text\]'"):
        load_tokenizer("any")
