"""Seconds that the look at each update adds to reading and merging a reply, on the server.

    python benchmarks/judging.py [--model vit-b-32] [--replies 5] [--repeats 25] [--quick] [--json FILE]

Measured from the chunks that the SuperLink delivers to the mean. All ways are taken in turn, and each is compared with
the first one in the same repeat; medians over the repeats, and quartiles:

- every reply is merged as it is;
- its update is compared with the running median, as in every run: its norm is estimated from a sample;
- its norm is measured;
- with robust="clip": it is measured, and the updates beyond the median (here every second one) are scaled down.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aggregation import Models, answered, at_once
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from latency.entries import shapes
from measured import write_figures
from rich.console import Console
from rich.table import Table

from tepal.exchange.layout import Layout
from tepal.exchange.plan import MODEL, Outgoing, Plan, Reply
from tepal.exchange.sender import Exchange, Sender
from tepal.host.flower.objects import fetch
from tepal.strategies.fedavg import ModelMerger, ModelState
from tepal.strategies.rounds.judging import Judge, Refused
from tepal.strategies.rounds.norms import UpdateNorms

AS_IT_IS = "as it is"

Packed = list[tuple[Exchange, str, dict[str, bytes]]]


class Replies:
    """Replies of clients whose updates have the norms 1, 3, 1, 3, … in units of the first one's, as they arrive."""

    def __init__(self, name: str, count: int) -> None:
        rng = np.random.default_rng(0)
        self.sent = {entry: rng.random(shape, np.float32) for entry, shape in shapes(name).items()}
        self.count = count
        trained: Models = [
            {entry: array + np.float32(1e-3 * (1 + 2 * (k % 2))) for entry, array in self.sent.items()}
            for k in range(count)
        ]
        self.layout = Layout.of_arrays(self.sent)
        self.plans = {f"client-{k}": self._plan(f"client-{k}") for k in range(count)}
        self.sender = Sender(self.layout, {"model": self.layout.names}, experiment="judging", record="arrays")
        self._packed = {measured: self._pack(trained, measured) for measured in (False, True)}

    def _plan(self, client: str) -> Plan:
        names = self.layout.names
        return Plan(client=client, round=1, needs={MODEL: names}, trains=names, returns={MODEL: names})

    def _pack(self, trained: Models, measured: bool) -> Packed:
        packed: Packed = []
        for plan, model in zip(self.plans.values(), trained, strict=True):
            content, exchange = self.sender.content(Outgoing(plan, lambda tree: self.sent, measured=measured))
            answer = answered(Message(content, 1, "train"), model, 1)
            contents = {each: one.deflate() for each, one in get_all_nested_objects(answer).items()}
            packed.append((exchange, answer.object_id, contents))
        return packed

    def read(self, *, measured: bool) -> Iterator[Reply]:
        for exchange, object_id, contents in self._packed[measured]:
            message: Any = fetch(contents[object_id], object_id, contents.__getitem__, at_once)
            message.metadata.__dict__["_message_id"] = object_id
            reply = self.sender.read(exchange, message)
            del message
            assert isinstance(reply, Reply)
            yield reply
            del reply

    def norms(self) -> UpdateNorms:
        """Norms of an earlier round, with the median of this one's."""
        norms = UpdateNorms({"model": self.layout.names})
        norms.begin()
        for measured in (False, True):  # those of values are known from the first
            for reply in self.read(measured=measured):
                norms.enter(reply.client, norms.of(reply, MODEL))
        norms.begin()
        return norms

    def as_it_is(self) -> float:
        merger, begun = ModelMerger(ModelState(self.sent)), time.perf_counter()
        for reply in self.read(measured=False):
            merger.add(reply)
            del reply
        return time.perf_counter() - begun

    def judged(self, norms: UpdateNorms, *, measured: bool, clip: bool) -> float:
        judge = Judge(norms, 0.5, clip=clip)
        merger, begun = ModelMerger(ModelState(self.sent)), time.perf_counter()
        for reply in judge.judged(self.read(measured=measured), self.plans, lambda client, tree: self.sent):
            assert not isinstance(reply, Refused)
            merger.add(reply)
            del reply
        return time.perf_counter() - begun


def measure(name: str, count: int, repeats: int) -> dict[str, list[float]]:
    """Way → seconds for one reply, in each repeat."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    replies = Replies(name, count)
    norms = replies.norms()
    ways = {
        AS_IT_IS: replies.as_it_is,
        "estimated": partial(replies.judged, norms, measured=False, clip=False),
        "measured": partial(replies.judged, norms, measured=True, clip=False),
        "clipped": partial(replies.judged, norms, measured=True, clip=True),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(repeats):
        for way in order:
            seconds[way].append(ways[way]() / count)
        order.append(order.pop(0))  # none always follows the same one
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "vit-b-32"), default="vit-b-32")
    parser.add_argument("--replies", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test that it works")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    model, repeats = ("tiny", 2) if options.quick else (options.model, options.repeats)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TEPAL_CACHE"] = cache
        found = measure(model, options.replies, repeats)
    result = {
        "model": model,
        "seconds of a reply": {way: statistics.median(each) for way, each in found.items()},
        "of merging it as it is": {way: quartiles(each, found[AS_IT_IS]) for way, each in found.items()},
    }
    show(result)
    if options.json:
        write_figures(options.json, result)


def quartiles(seconds: list[float], base: list[float]) -> list[float]:
    """Quartiles of the ratios of the same repeats: what else the machine does slows both."""
    return statistics.quantiles([took / of for took, of in zip(seconds, base, strict=True)], n=4, method="inclusive")


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"a reply of {result['model']}", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "ms", "of merging it as it is", "quartiles"):
        table.add_column(heading, justify="right" if heading else "left")
    for way, took in result["seconds of a reply"].items():
        low, middle, high = result["of merging it as it is"][way]
        table.add_row(way, f"{1e3 * took:.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
