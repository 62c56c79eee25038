"""Seconds to merge replies, compared with Flower's aggregation and with a plain copy of the same bytes.

    python benchmarks/aggregation.py [--model vit-b-32] [--replies 10] [--repeats 5] [--quick] [--json FILE]

Measured, as medians over repeats that are taken in turn:

- the mean alone: replies in memory, as they arrive (packed parts with Tepal, numpy files with Flower), are averaged by
  Tepal's `WeightedMean` and by Flower's `aggregate_arrayrecords`. The copy writes every reply over one allocated array;
  no single pass over the replies on one processor can be faster;
- all steps with Tepal, from the chunks that the SuperLink delivers to the next state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.task_identity import TaskIdentity
from latency.entries import shapes
from measured import write_figures
from rich.console import Console
from rich.table import Table

from tepal.exchange import header, partial_exchange, sender
from tepal.exchange.layout import Layout
from tepal.exchange.parts import pack, unpack
from tepal.exchange.plan import MODEL, Outgoing, Plan, Reply
from tepal.host.flower.objects import fetch
from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.fedavg import ModelMerger, ModelState

STEPS = ("chunks put together", "entries unpacked, looked through for NaN", "checksum verified", "merged", "finished")

Models = list[dict[str, np.ndarray]]


def models(name: str, count: int) -> Models:
    rng = np.random.default_rng(0)
    return [{entry: rng.random(shape, np.float32) for entry, shape in shapes(name).items()} for _ in range(count)]


def means(replies: Models, repeats: int) -> dict[str, list[float]]:
    """Seconds to merge the replies with Tepal and with Flower, and to copy them, for each repeat."""
    shaped = [(name, array.dtype.name, array.shape) for name, array in replies[0].items()]
    packed = [pack(reply, reply) for reply in replies]
    records = [
        RecordDict(
            {
                "arrays": ArrayRecord({name: Array(array) for name, array in reply.items()}),
                "metrics": MetricRecord({"num-examples": k + 1}),
            }
        )
        for k, reply in enumerate(replies)
    ]
    whole = np.zeros(len(packed[0].data), np.uint8)
    found: dict[str, np.ndarray] = {}

    def copy() -> None:
        for each in packed:
            np.copyto(whole, np.frombuffer(each.data, np.uint8))

    def tepal() -> None:
        mean = WeightedMean()
        for k, each in enumerate(packed):
            mean.add(unpack(each, shaped), k + 1)
        found.update(mean.result())

    seconds: dict[str, list[float]] = {"copy": [], "Tepal": [], "Flower": []}
    for _ in range(repeats):
        for way, work in (("copy", copy), ("Tepal", tepal)):
            seconds[way].append(clocked(work))
        begun = time.perf_counter()
        merged = aggregate_arrayrecords(records, "num-examples")
        seconds["Flower"].append(time.perf_counter() - begun)
        for name, array in merged.items():  # the two round differently
            np.testing.assert_allclose(found[name], array.numpy(), rtol=0, atol=1e-6)
    return seconds


def clocked(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def whole_way(replies: Models, repeats: int) -> dict[str, list[float]]:
    """Seconds of each step from the chunks of all replies to the next state, for each repeat."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    layout = Layout.of_arrays(replies[0])
    sends = sender.Sender(layout, {"model": layout.names}, experiment="aggregation", record="arrays")
    names = layout.names
    replied = []
    for k, reply in enumerate(replies):
        plan = Plan(client=f"client-{k}", round=1, needs={MODEL: names}, trains=names, returns={MODEL: names})
        content, exchange = sends.content(Outgoing(plan, lambda tree: replies[0]))
        answer = answered(Message(content, 1, "train"), reply, k + 1)
        contents = {each: one.deflate() for each, one in get_all_nested_objects(answer).items()}
        replied.append((exchange, answer.object_id, contents))
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    with stopwatch(seconds, header.Header, "checksum_of", "checksum verified"):
        for _ in range(repeats):
            for step in STEPS:
                seconds[step].append(0.0)
            merger = ModelMerger(ModelState(replies[0]))
            for exchange, object_id, contents in replied:
                begun = time.perf_counter()
                message: Any = fetch(contents[object_id], object_id, contents.__getitem__, pull_objects)
                message.metadata.__dict__["_message_id"] = object_id
                put_together = time.perf_counter()
                verified = seconds["checksum verified"][-1]
                read = sends.read(exchange, message)
                checked = time.perf_counter()
                assert isinstance(read, Reply)
                merger.add(read)
                merged = time.perf_counter()
                seconds["chunks put together"][-1] += put_together - begun
                seconds[STEPS[1]][-1] += checked - put_together - (seconds["checksum verified"][-1] - verified)
                seconds["merged"][-1] += merged - checked
                del message, read
            seconds["finished"][-1] += clocked(merger.finish)
    return seconds


def at_once(object_ids: list[str], pull: Callable[[str], bytes]) -> dict[str, bytes]:
    return {each: pull(each) for each in object_ids}


def answered(message: Message, trained: dict[str, np.ndarray], examples: int) -> Message:
    """The reply of a client's mod to a message, whose app returns these arrays."""
    arrays = ArrayRecord({name: Array(array) for name, array in trained.items()})

    def app(message: Message, context: Context) -> Message:
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": examples})})
        return Message(content, reply_to=message)

    return partial_exchange(message, Context(1, 1, {}, RecordDict(), {}), app)


@contextmanager
def stopwatch(seconds: dict[str, list[float]], of: Any, name: str, step: str) -> Iterator[None]:
    """Add the seconds spent in `of.name` to the step's last figure, while the context lasts."""
    before = getattr(of, name)

    def watched(*args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return before(*args)
        finally:
            if seconds[step]:
                seconds[step][-1] += time.perf_counter() - begun

    setattr(of, name, watched)
    try:
        yield
    finally:
        setattr(of, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "vit-b-32"), default="vit-b-32")
    parser.add_argument("--replies", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test that it works")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    model, repeats = ("tiny", 2) if options.quick else (options.model, options.repeats)
    replies = models(model, options.replies)
    nbytes = sum(array.nbytes for reply in replies for array in reply.values())
    seconds = means(replies, repeats)
    of_means = {way: statistics.median(each) for way, each in seconds.items()}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TEPAL_CACHE"] = cache
        steps = whole_way(replies, repeats)
    result = {
        "model": model,
        "replies": options.replies,
        "bytes": nbytes,
        "repeats": repeats,
        "seconds of the mean": seconds,
        "faster than Flower": of_means["Flower"] / of_means["Tepal"],
        "of the copy's rate": of_means["copy"] / of_means["Tepal"],
        "seconds of the whole way": steps,
    }
    show(result)
    if options.json:
        write_figures(options.json, result)


def show(result: dict[str, Any]) -> None:
    console, nbytes = Console(), result["bytes"]
    means, steps = (
        {name: statistics.median(seconds) for name, seconds in result[what].items()}
        for what in ("seconds of the mean", "seconds of the whole way")
    )
    title = f"{result['replies']} replies of {result['model']}, {nbytes / 1e6:,.1f} MB; medians of {result['repeats']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("", "s", "GB/s", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    for way, seconds in means.items():
        share = f"{means['copy'] / seconds:.0%} of the copy's rate"
        table.add_row(way, f"{seconds:.3f}", f"{nbytes / 1e9 / seconds:.2f}", share)
    table.add_section()
    total = sum(steps.values())
    for step, seconds in steps.items():
        table.add_row(step, f"{seconds:.3f}", f"{nbytes / 1e9 / seconds:.2f}", f"{seconds / total:.0%}")
    table.add_row("from the chunks to the state", f"{total:.3f}", f"{nbytes / 1e9 / total:.2f}", "")
    console.print(table)
    console.print(f"Tepal's mean is {result['faster than Flower']:.1f} x faster than Flower's.")


if __name__ == "__main__":
    main()
