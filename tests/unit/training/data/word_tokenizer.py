"""A tokenizer of whole words, in the files of a real one: ids are places in its vocabulary."""

import pytest

from tepal.models.libraries import import_transformers

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "sky", "is", "blue", "green", "very", "what", "?"]
ID = {word: number for number, word in enumerate(WORDS)}


def ids(text):
    return [ID.get(word, ID["[UNK]"]) for word in text.split()]


def written(folder, **special):
    """A tokenizer of whole words, as `save_pretrained` leaves it."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = import_transformers("a test")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ID, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", ID["[CLS]"]), ("[SEP]", ID["[SEP]"])],
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)
    fast.save_pretrained(folder)
    return str(folder)
