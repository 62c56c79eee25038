"""Write docs/models.md, the page of all models by name.

    python docs/model_table.py > docs/models.md

Models are built on the meta device: no weights, no downloads. torchvision and transformers must be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    models.TABLES: "Table classification",
    models.SEQUENCES: "Regression",
}

_INTRODUCTION = f"""# Models by name

The key `model` of the run config takes one of the names below; each model is built from its own configuration, without
a download. It also takes

- a directory with a config.json, as written by transformers' `save_pretrained`, at the same path on the server and on
  every client;
- `package.module:function`, a custom model, which the server and every client can import (models/own.py). Its blocks
  are found automatically, or named in the run config: `blocks.query-key`, `blocks.layers`, ….

The key `pretrained` names the initial weights: [weights that come with Tepal](#weights-that-come-with-tepal), such a
directory, a .safetensors, .pt or .pth file, or a repository on the hub. `tepal simulate`, `compare` and `loopback`
download it before the run; a deployment's server does so with `HF_HUB_OFFLINE=0`. The server sends the weights to the
clients. A head or a pooler that the file of the weights lacks, and a head for other classes than the run's, keep random
weights in the model, which is logged; any other mismatch is an error before the run starts.

Models of torchvision (mobilenet, resnet except resnet-20, shufflenet, vit) need the extra `vision`. Models named as on
the Hugging Face hub, folders with a config.json and `compact-bert-news` need the extra `text`.

The numbers are for images of 3x224x224 in 1000 classes and texts in 2 (cnn: 1x28x28 in 10, tiny-vit: 1x8x8 in 10,
compact-vit and resnet-20: 3x32x32 in 10, char-lstm and char-transformer: 80 characters, linear-attention: 64 features
and 32 outputs, ft-transformer and mlp: 64 features in 10 classes), in float32. **Query/key** is the share of the
parameters that FedFrozen freezes, the **value block** all other entries, and **cost** FedFrozen's upload relative to
FedAvg's with {WARMUP} warm-up rounds of {ROUNDS}. A **layer** is a transformer block, or a stage of a model without
transformer blocks; its bytes are given for the smallest and the largest."""


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
loaded. Set `image-shape` and `normalise` as here: a run with another value of `normalise` logs a warning. **Accuracy**
is that on the test images of the data set that the weights were trained on (of CIFAR-100 5,000 images, 50 of each
class, that are not its published test set), **probe** that of a logistic regression on the features of the frozen model
for another data set (CIFAR-10: 10,000 training images, 2,000 test images)."""

_MAKING = """This makes them anew, on a GPU if there is one, and continues if it was interrupted:

```sh
python -m tepal.tools.pretrain tiny-vit-digits --data DATA --output FOLDER
```

DATA is a folder with the data sets by their names, such as `mnist.npz` (the formats of [data](data.md)), or a folder
`mnist` of the files as published; texts may be `20newsgroups.jsonl.xz`. `pretrained` takes the folder that the command
writes. A folder that has a tokenizer keeps it: a new one differs a little each time, because the library chooses at
random between word pieces that are equally frequent."""

_ENCODERS = """Text encoders have a config.json and a tokenizer, so that `model` takes their names, too:
`-c 'model="compact-bert-news" pretrained="compact-bert-news"'`. Word embeddings start from the mutual information of
words in a text; then the encoder is trained to predict masked words, and to recognise which two pieces are of one text.
**Accuracy** is the share of masked word pieces of held-out texts that it predicts, **probe** that of a logistic
regression on its pooled outputs for the classes of a data set, on the data set's test texts. A model of this size
predicts few words; what matters is what it is worth to a classifier ([results](results.md))."""


def weights_section() -> str:
    """Return the section on the weights that come with Tepal, from their cards."""
    of_images = [name for name in weights.shipped() if "image-shape" in weights.card(name)]
    of_texts = [name for name in weights.shipped() if name not in of_images]
    images = _weights_table(["`pretrained`", "`model`", "`image-shape`", "`normalise`"], map(_image_cells, of_images))
    texts = _weights_table(["`pretrained`, `model`", "parameters"], map(_text_cells, of_texts))
    return "\n\n".join([_WEIGHTS, images, _ENCODERS, texts, _MAKING])


def _weights_table(first: list[str], rows: Iterable[list[str]]) -> str:
    head = [*first, "trained on", "epochs, time", "accuracy", "probe"]
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _image_cells(name: str) -> list[str]:
    card = weights.card(name)
    cells = [name, card["model"], card["image-shape"], card["normalise"] or '""']
    return [*(f"`{cell}`" for cell in cells), *_training_cells(card)]


def _text_cells(name: str) -> list[str]:
    card = weights.card(name)
    return [f"`{name}`", f"{card['parameters']:,}", *_training_cells(card)]


def _training_cells(card: Mapping[str, Any]) -> list[str]:
    time = f"{card['epochs']}, {card['seconds'] / 60:.0f} min"
    probe = f"{card['probe-accuracy']:.4f} ({card['probe']})" if "probe" in card else ""
    return [card["data"], time, f"{card['accuracy']:.4f}", probe]


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
