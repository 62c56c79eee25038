"""Peak anonymous memory of the ServerApp, by the number of clients, compared with Flower's FedAvg and the model's size.

    python benchmarks/server_memory.py [--megabytes 350] [--clients 2,10,50] [--ways flower,tepal,auto] [--quick]

A real SuperLink and ServerApp, and stub nodes: threads of this process that talk to the Fleet API as SuperNodes do,
and answer every message with the same values, with the way `auto` encoded as the message asks. Anonymous memory
(`RssAnon`, in bytes) is memory that the system cannot reclaim; it does not include files on disk. Its maximum over
the run is shown, also for the SuperLink, and the memory of the ServerApp before the model is loaded. Flower's FedAvg
has all replies of a round in memory: choose --clients and --megabytes accordingly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client.grpc_rere_client.connection import grpc_request_response
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.task_identity import TaskIdentity
from grpc import RpcError
from measured import Sampler, write_figures
from memory.entries import model
from rich.console import Console
from rich.table import Table

from tepal.exchange.encodings import Wire
from tepal.exchange.header import Header
from tepal.exchange.manifest import PARTS, RECORD, Manifest
from tepal.exchange.parts import listed, pack
from tepal.host.flower.objects import Pull, hash_chunks, push, tree_of
from tepal.host.flower.patches import quick
from tepal.host.processes import Process, flower_environment, free_port, started, wait_for_http
from tepal.host.superlink import Clock, connect, follow, stage_app, submit
from tepal.host.toml import to_toml

APP = Path(__file__).parent / "memory"
WAYS = {
    "flower": "Flower's FedAvg",
    "tepal": "Tepal's FedAvg",
    "tepal-memory": "Tepal's FedAvg without checkpoints",
    "auto": "Tepal's FedAvg, auto both ways",
}


class Stub:
    """Answers every message with the same values.

    Args:
        arrays: the reply's arrays, if replies are not encoded.
        changes: values that are encoded as each message asks; None: replies are not encoded.
    """

    def __init__(self, arrays: ArrayRecord, changes: dict[str, np.ndarray] | None = None) -> None:
        self._arrays, self._changes = arrays, changes
        self._encoded: dict[Wire, Array] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def nodes(self, address: str, count: int) -> Iterator[None]:
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._node, args=(address,), daemon=True))
            self._threads[-1].start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(30)

    def _node(self, address: str) -> None:
        retries = RetryInvoker(lambda: exponential(max_delay=5), RpcError, max_tries=None, max_time=None)
        with grpc_request_response(address, True, retries) as (_, receive, send, _, _, pull, put, confirm):
            while not self._over.wait(0.2):
                if (received := receive()) is None:
                    continue
                message, tree = received
                run = message.metadata.run_id
                content = self._answer(message, self._settings(tree, partial(pull, run)))
                # Confirmed objects are deleted; therefore only after the ServerApp has pushed all of them.
                for each in identifiers(tree):
                    quick(pull_objects)([each], partial(pull, run))
                confirm(run, message.metadata.message_id)
                reply = Message(content, reply_to=message)
                reply.metadata.__dict__["_message_id"] = reply.object_id
                its_tree, objects = tree_of(reply, reply.object_id)
                wanted, session = send(reply, its_tree, 0.0)
                push(objects, wanted, partial(put, run, session))

    def _settings(self, tree: ObjectTree, pull: Pull) -> dict[str, ConfigRecord]:
        """The ConfigRecords of a message; its arrays are not pulled."""
        records = [node.object_id for content in tree.children for node in content.children if not node.children]
        found = {}
        for content in quick(pull_objects)(records, pull).values():
            if get_object_head_values_from_object_content(content)[0] == ConfigRecord.__qualname__:
                record = ConfigRecord.inflate(content)
                found["manifest" if "manifest" in record else "config"] = record
        return found

    def _answer(self, message: Message, settings: dict[str, ConfigRecord]) -> RecordDict:
        metrics = MetricRecord({"num-examples": 1})
        if "manifest" not in settings:
            return RecordDict({"arrays": self._arrays, "metrics": metrics})
        manifest = Manifest.from_content({RECORD: settings["manifest"]})
        content = RecordDict({"metrics": metrics})
        carried = {}
        for wanted in manifest.plan.returns:
            content[PARTS] = record = ArrayRecord()
            record[wanted] = self._packed(manifest)
            carried[wanted] = manifest.layout.shaped(manifest.layout.names)
        header = Header(
            experiment=manifest.experiment,
            client=manifest.plan.client or f"node-{message.metadata.dst_node_id}",
            round=manifest.plan.round,
            action=manifest.plan.action,
            answers=str(settings["manifest"]["id"]),
            carries=listed(carried),
            holds=tuple(parcel.part.id for parcel in manifest.parcels if parcel.keep and self._changes),
            metrics=("metrics",),
        )
        content[RECORD] = header.with_checksum(content).to_record()
        return content

    def _packed(self, manifest: Manifest) -> Array:
        if self._changes is None:
            return next(iter(self._arrays.values()))
        with self._lock:
            if manifest.upload not in self._encoded:
                self._encoded[manifest.upload] = pack(self._changes, manifest.layout.names, manifest.upload)
            return self._encoded[manifest.upload]


def identifiers(tree: ObjectTree) -> set[str]:
    """The ids of a message's objects."""
    return {tree.object_id}.union(*map(identifiers, tree.children))


def measure(way: str, clients: int, megabytes: float, rounds: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="tepal-memory-"))
    try:
        entries, changes = model(megabytes), None
        if way == "flower":
            arrays = ArrayRecord({name: Array(array) for name, array in entries.items()})
        elif way == "auto":  # with mean 0, as model updates have
            arrays, changes = ArrayRecord(), {name: array - np.float32(0.5) for name, array in entries.items()}
        else:
            arrays = ArrayRecord({"packed": pack(entries, entries)})
        size = sum(array.nbytes for array in entries.values())
        del entries
        hash_chunks(Message(RecordDict({"arrays": arrays}), 1, "train"))
        with superlink(folder) as (process, address, fleet, environment), Stub(arrays, changes).nodes(
            fleet, clients
        ):
            output, config, bundle = folder / "output.json", folder / "run-config.toml", folder / "app"
            settings = {
                "way": way.partition("-")[0], "rounds": rounds, "clients": clients, "megabytes": megabytes,
                "checkpoints": str(folder / "checkpoints") if way in ("tepal", "auto") else "", "output": str(output),
            }  # fmt: skip
            config.write_text(to_toml(settings))
            bundle.mkdir()
            stage_app(APP, bundle)
            with Watch(process) as watch:
                run = submit(bundle, config, process, environment, 120)
                begun = time.monotonic()
                status, details = follow(run, address, process, Clock(lambda *_: None, None), folder / "run.log", None)
            if status != "completed":
                raise SystemExit(f"{WAYS[way]}: the run {status}: {details}\n{(folder / 'run.log').read_text()}")
            found = json.loads(output.read_text())
        return {
            "way": way, "clients": clients, "model": size, **found, "server": watch.most["flwr-serverapp"],
            "superlink": watch.most["flower-superlink"], "seconds": time.monotonic() - begun,
        }  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def superlink(folder: Path) -> Iterator[tuple[Process, str, str, dict[str, str]]]:
    """Start a SuperLink without TLS: (process, address, Fleet API's address, environment of Flower's commands)."""
    address, fleet = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    (folder / "work").mkdir()
    environment = flower_environment(folder / "home")
    connect(folder / "home", address)
    host, _, port = address.partition(":")
    command = ["flower-superlink", "--insecure", "--host", host, "--port", port, "--fleet-api-address", fleet]
    with started(
        command, log=folder / "superlink.log", env=environment, cwd=folder / "work", grace=5.0, folder=folder
    ) as process:
        wait_for_http(f"http://{address}/health", timeout=60, process=process)
        yield process, address, fleet, environment


class Watch(Sampler):
    """Peak anonymous memory in bytes of each kind of process of a SuperLink, while the context lasts."""

    pause = 0.02

    def __init__(self, process: Process) -> None:
        self._process = process
        self._kinds: dict[int, str] = {}
        self._found = 0.0  # when they were found
        self.most = {"flower-superlink": 0, "flwr-serverapp": 0}

    def look(self) -> None:
        if time.monotonic() - self._found > 0.5:
            self._found = time.monotonic()
            with contextlib.suppress(psutil.Error, OSError):
                self._find()
        for pid, kind in list(self._kinds.items()):
            try:
                status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
                self.most[kind] = max(self.most[kind], 1024 * int(status.split("RssAnon:")[1].split()[0]))
            except (OSError, IndexError):
                del self._kinds[pid]

    def _find(self) -> None:
        for each in self._process.tree():
            with contextlib.suppress(psutil.Error):
                program = " ".join(each.cmdline()[:2])
                self._kinds.update((each.pid, kind) for kind in self.most if kind in program)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=350.0)
    parser.add_argument("--clients", default="2,10,50")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--quick", action="store_true", help="a small model and few clients: whether it works at all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    megabytes, counts = (20.0, "2") if options.quick else (options.megabytes, options.clients)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    console = Console() if sys.stdout.isatty() else Console(width=120)
    measured = []
    for clients in map(int, counts.split(",")):
        for way in options.ways.split(","):
            with console.status(f"{WAYS[way]}, {clients} clients …"):
                measured.append(measure(way, clients, megabytes, options.rounds))
    console.print(results(measured))
    if options.json:
        figures = {"megabytes": megabytes, "rounds": options.rounds, "runs": measured}
        write_figures(options.json, figures)


def results(measured: list[dict[str, Any]]) -> Table:
    title = f"Most anonymous memory; a model of {measured[0]['model'] / 1e6:,.0f} MB"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("", "clients", "ServerApp MB", "over the model", "before the model MB", "SuperLink MB", "s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for each in measured:
        table.add_row(
            WAYS[each["way"]], str(each["clients"]), f"{each['server'] / 1e6:,.0f}",
            f"{each['server'] / each['model']:.2f} x", f"{each['before'] / 1e6:,.0f}",
            f"{each['superlink'] / 1e6:,.0f}", f"{each['seconds']:.0f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
