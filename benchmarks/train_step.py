"""Milliseconds and bytes of a training step of a few layers, compared with a step of all layers.

    python benchmarks/train_step.py [--quick] [--batch 8] [--repeats 5] [--hidden 384] [--device cpu] [--json FILE]

A vision transformer of 12 blocks for images of 224x224 pixels (patches of 32, random weights and data) is trained by a
client's steps: forward, backward, SGD. The trained layers are set by `apply_plan` from a plan, as in a run; the head
always trains. Times are medians over steps taken in turn, so that load on the machine affects all alike. Bytes are what
autograd saves in the forward pass for the backward pass, without parameters, gradients and the optimizer's state.

The last line is the probe that precedes the selection of layers: one batch, forward and backward, for all layers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import Context, Message, RecordDict
from measured import write_figures
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD

from tepal.client_app import apply_plan
from tepal.exchange import MODEL, Names, Outgoing, Plan, Sender, partial_exchange
from tepal.models.blocks import Blocks, canonical_state, find_blocks
from tepal.models.libraries import import_transformers
from tepal.strategies.in_process import InProcessGrid
from tepal.training.probing import layer_scores

DEPTH = 12
CLASSES = 100
ALL, PROBE = "all", "probe (all layers)"


class Logits(nn.Module):
    """A classifier of transformers that returns its logits."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.vit(pixel_values=images).logits
        return logits


def build(hidden: int) -> nn.Module:
    transformers = import_transformers("a ViT")
    config = transformers.ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=DEPTH,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        image_size=224,
        patch_size=32,
        num_labels=CLASSES,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Logits(transformers.ViTForImageClassification(config))


def message_that_trains(model: nn.Module, blocks: Blocks, trains: Names) -> Message:
    """A server's message with a plan that trains these entries, as the client's app receives it."""
    plan = Plan(client="c", round=1, needs={MODEL: blocks.layout.names}, trains=trains, returns={MODEL: trains})
    sender = Sender(blocks.layout, {"all": blocks.layout.names}, experiment="benchmark", record="arrays")
    entries = {name: tensor.numpy() for name, tensor in canonical_state(model).items()}
    seen: list[Message] = []

    def app(msg: Message, context: Context) -> Message:
        seen.append(msg)
        return Message(RecordDict({"arrays": msg.content["arrays"]}), reply_to=msg)

    sent = Message(sender.content(Outgoing(plan, lambda tree: entries))[0], 1, "train")
    partial_exchange(sent, Context(1, 1, {}, RecordDict(), {}), app)
    return seen[0]


def choices(blocks: Blocks) -> dict[str, Names]:
    """The trained entries of each row of the table."""
    layers, middle = blocks.layers, len(blocks.layers) // 2
    return {
        ALL: blocks.layout.names,
        "top layer": (*layers[-1], *blocks.head),
        "top 2 layers": (*layers[-2], *layers[-1], *blocks.head),
        f"layer {middle} of {len(layers)}": (*layers[middle - 1], *blocks.head),
        "bottom layer": (*layers[0], *blocks.head),
    }


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd saves for the backward pass of `forward`: each storage once, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()  # kept to the end: the address of a freed storage could be used again
    del loss
    return sum(kept.values())


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    model = build(options.hidden).to(options.device).train()
    blocks = find_blocks(model)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(options.batch, 3, 224, 224, generator=generator).to(options.device)
    labels = torch.randint(0, CLASSES, (options.batch,), generator=generator).to(options.device)
    InProcessGrid([])  # sets the identity that a Message needs
    host = build(options.hidden)
    messages = {name: message_that_trains(host, blocks, trains) for name, trains in choices(blocks).items()}

    def now() -> float:
        if images.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def loss() -> Tensor:
        return F.cross_entropy(model(images), labels)

    def step(name: str) -> float:
        apply_plan(model, messages[name])
        optimizer = SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-4)
        optimizer.zero_grad()
        start = now()
        loss().backward()
        optimizer.step()
        return 1e3 * (now() - start)

    def probe(name: str) -> float:
        start = now()
        layer_scores(model, [(images, labels)], blocks.layers, blocks.layout, head=blocks.head)
        return 1e3 * (now() - start)

    rows: dict[str, Callable[[str], float]] = {**{name: step for name in messages}, PROBE: probe}
    times: dict[str, list[float]] = {name: [] for name in rows}
    for repeat in range(-1, options.repeats):
        for name, take in rows.items():
            milliseconds = take(name)
            if repeat >= 0:  # the first turn warms up
                times[name].append(milliseconds)
    figures = {name: {"milliseconds": statistics.median(taken)} for name, taken in times.items()}
    for name, message in messages.items():
        apply_plan(model, message)
        figures[name]["saved bytes"] = saved_bytes(model, loss)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="width 192, batch 4, three turns: rough times")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--hidden", type=int, default=384, help="width, a multiple of 64")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.batch, options.repeats = 192, 4, 3
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TEPAL_CACHE"] = cache
        figures = measure(options)
    if options.json:
        write_figures(options.json, figures)
    show(figures, options)


def show(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    title = f"One step, ViT of width {options.hidden}, batch {options.batch}, {options.device}"
    table = Table(title=title, title_justify="left")
    table.add_column("trains, with the head")
    for column in ("ms", "of all", "kept, MB", "of all"):
        table.add_column(column, justify="right")
    for name, row in figures.items():
        cells = [f"{row['milliseconds']:,.1f}", f"{row['milliseconds'] / figures[ALL]['milliseconds']:.1%}"]
        if "saved bytes" in row:
            cells += [f"{row['saved bytes'] / 1e6:,.1f}", f"{row['saved bytes'] / figures[ALL]['saved bytes']:.1%}"]
        table.add_row(name, *cells, end_section=name == ALL)
    Console().print(table)


if __name__ == "__main__":
    main()
