"""Write docs/models.md, the page of all models by name.

    python docs/model_table.py > docs/models.md

Models are built on the meta device: no weights, no downloads. torchvision and transformers must be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tepal import models
from tepal.models import weights
from tepal.models.blocks import find_blocks
from tepal.strategies.fedfrozen import cost_ratio
from tepal.tools.reproduce.fedfrozen_costs import ROUNDS, WARMUP, on_meta

_KINDS = {
    models.IMAGES: "Image classification",
    models.TEXTS: "Text classification",
    models.CHARACTERS: "Next-character prediction",
    models.CHOICES: "Multiple choice",
    models.SEQUENCES: "Regression",
}

_INTRODUCTION = f"""# Models by name

The key `model` of the run config takes one of the names below; each model is built from its own configuration, without
a download. It also takes

- a directory with a config.json, as written by transformers' `save_pretrained`, at the same path on the server and on
  every client;
- the name of [weights that come with Tepal](#weights-that-come-with-tepal) and have their own config.json and
  tokenizer: `compact-bert-news`;
- `package.module:function`, a custom model, which the server and every client can import (models/own.py). Its blocks
  are found automatically, or named in the run config: `blocks.query-key`, `blocks.layers`, ….

The key `pretrained` names the initial weights: [weights that come with Tepal](#weights-that-come-with-tepal), such a
directory, a .safetensors, .pt or .pth file, or a repository on the hub, which the server downloads. The server sends
them to the clients. If the head of the weights is for other classes than the run's, the model's head keeps random
weights, which is logged; any other mismatch is an error before the run starts.

Models of torchvision (mobilenet, resnet except resnet-20, shufflenet, vit) need the extra `vision`, and models named as
on the Hugging Face hub the extra `text`.

The numbers are for images of 3x224x224 in 1000 classes and texts in 2 (cnn: 1x28x28 in 10, tiny-vit: 1x8x8 in 10,
compact-vit and resnet-20: 3x32x32 in 10, char-lstm and char-transformer: 80 characters, linear-attention: 64 features
and 32 outputs), in float32. **Query/key** is the share of the parameters that FedFrozen freezes, the **value block**
all other entries, and **cost** FedFrozen's upload relative to FedAvg's with {WARMUP} warm-up rounds of {ROUNDS}. A
**layer** is a transformer block, or a stage of a model without transformer blocks; its bytes are given for the smallest
and the largest."""


def page() -> str:
    """Return the page. Raises ModelError if a library is missing."""
    sections = [_INTRODUCTION, weights_section()]
    for kind, title in _KINDS.items():
        rows = [_row(name) for name in models.names() if models.MODELS[name].kind == kind]
        head = ["model", "parameters", "query/key", "value block, bytes", "layers", "bytes of a layer", "cost"]
        lines = [_line(head), "|---" + "|---:" * (len(head) - 1) + "|", *(_line(row) for row in rows)]
        sections.append("\n".join([f"## {title}", "", *lines]))
    return "\n\n".join(sections) + "\n"


_WEIGHTS = """## Weights that come with Tepal

`pretrained` takes these names; no file and no network is needed. Each folder in models/weights has a card.toml with
data, epochs, seed, duration, machine, accuracy, terms and the SHA-256 digest that is checked when the weights are
loaded.

**Images.** Set `image-shape` and `normalise` as here: a run with another value of `normalise` logs a warning.
**Accuracy** is that on the test images of the data set that the weights were trained on, **probe** that of a logistic
regression on their features for another data set."""

_TEXTS = """**Texts.** `model` takes the same name, and the tokenizer is the model's own: set
`model="compact-bert-news" pretrained="compact-bert-news"`. **Accuracy** is the share of masked word pieces of held-out
texts that the encoder predicts, **probe** that of the newsgroups' test texts that a logistic regression on its features
predicts."""

_MAKING = """This makes them anew, on a GPU if there is one, and continues if it was interrupted:

```sh
python -m tepal.tools.pretrain tiny-vit-digits --data DATA --output FOLDER
```

DATA is a folder with the data sets by their names, such as `mnist.npz` (the formats of [data](data.md)), or a folder
`mnist` of the files as published; texts may be `20newsgroups.jsonl.xz`. `pretrained` takes the folder that the command
writes. A folder that has a tokenizer keeps it: a new one differs a little each time, because the library chooses at
random between word pieces that are equally frequent."""


def weights_section() -> str:
    """Return the section on the weights that come with Tepal, from their cards."""
    cards = {name: weights.card(name) for name in weights.shipped()}
    images = {name: card for name, card in cards.items() if "image-shape" in card}
    texts = {name: card for name, card in cards.items() if name not in images}
    keys = ["`pretrained`", "`model`", "`image-shape`", "`normalise`"]
    shown = [
        _WEIGHTS,
        _table(
            [*keys, "trained on", "epochs, time", "accuracy", "probe"], [_of_images(*each) for each in images.items()]
        ),
        _TEXTS,
        _table(
            ["`pretrained`", "trained on", "epochs, time", "accuracy", "probe"],
            [_of_texts(*each) for each in texts.items()],
        ),
        _MAKING,
    ]
    return "\n\n".join(shown)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _of_images(name: str, card: Mapping[str, Any]) -> list[str]:
    cells = [name, card["model"], card["image-shape"], card["normalise"] or '""']
    probe = f"{card['probe-accuracy']:.4f} ({card['probe']})" if "probe" in card else ""
    return [*(f"`{cell}`" for cell in cells), card["data"], _time(card), f"{card['accuracy']:.4f}", probe]


def _of_texts(name: str, card: Mapping[str, Any]) -> list[str]:
    probe = f"{card['probe-accuracy']:.4f} ({card['probe']})"
    return [f"`{name}`", card["data"], _time(card), f"{card['accuracy']:.4f}", probe]


def _time(card: Mapping[str, Any]) -> str:
    return f"{card['epochs']}, {card['seconds'] / 60:.0f} min"


def _row(name: str) -> list[str]:
    model = on_meta(name)
    blocks = find_blocks(model)
    layout, parameters = blocks.layout, sum(parameter.numel() for parameter in model.parameters())
    frozen = sum(layout.by_name[entry].size for entry in blocks.query_key)
    layers = [layout.nbytes(layer) for layer in blocks.layers]
    least, most = min(layers), max(layers)
    return [
        f"`{name}`",
        f"{parameters:,}",
        f"{frozen / parameters:.2%}" if frozen else "none",
        f"{layout.nbytes(blocks.value):,}",
        str(len(layers)),
        f"{least:,}" + (f" – {most:,}" if most > least else ""),
        f"{cost_ratio(model, WARMUP, ROUNDS):.4f}" if frozen else "1",
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
