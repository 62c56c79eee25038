"""Seconds and bytes by the number of clients: a round, sampling and planning, the server's records, Flower's SuperLink.

    python benchmarks/many_clients.py [--quick] [--json FILE]

Four tables, medians of several runs:

- seconds of rounds of FedAvg with 1,000 simulated clients in this process, 50 of them per round, of which about 10 %
  return no result;
- the server's seconds before a message is sent, by the number of connected clients, all under registered names;
- bytes of the server's record of a client, and seconds and bytes of a checkpoint of it;
- seconds of Flower's SuperLink for a heartbeat, a poll and a list of its nodes, called in process, without a network:
  with its state in memory, the default, and in SQLite (`--database`).

Nothing is trained: a stub app returns the model that it received.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.state.schema.linkstate_models import Node as NodeModel
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from measured import write_figures
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert

from tepal.exchange import partial_exchange, received
from tepal.exchange.layout import Layout
from tepal.exchange.plan import LAYER_SCORES, PROBE, TRAIN, Outgoing, Plan, Reply
from tepal.exchange.sender import Sender
from tepal.models import build
from tepal.strategies import FedACS, FedAvg, FedEnsemble, FedFrozen, SelectiveLayers, join_modes
from tepal.strategies.fedensemble import EnsembleState
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.method import Run
from tepal.strategies.rounds.checkpoint import Checkpoint, Checkpoints
from tepal.strategies.rounds.cohort import Cohorts, Rules
from tepal.strategies.rounds.flower import server_model
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.nodes import Nodes
from tepal.strategies.rounds.report import RoundReport
from tepal.strategies.rounds.strategy import MethodStrategy

COHORT = 50
FAILING = 0.1
ENTRIES, ENTRY = 200, 500  # of the model in the rounds: as many entries as ViT-B/32 has, 100,000 parameters
MODES = 3
REPORTED = 500  # clients whose models FedACS has

logging.getLogger("flwr").setLevel(logging.CRITICAL)


def seconds(work: Callable[[], Any], runs: int = 5) -> float:
    taken = []
    for _ in range(runs):
        before = time.perf_counter()
        work()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)


def names_of(clients: int) -> list[str]:
    return [f"site-{k:07d}" for k in range(clients)]


# ---- rounds ----------------------------------------------------------------------------------------------------------


def stub_app() -> ClientApp:
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        asked = received(message).plan
        if fails(asked.client, asked.round):
            raise RuntimeError("no result today")
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    return app


def fails(client: str, number: int) -> bool:
    return zlib.crc32(f"{client} in round {number}".encode()) < FAILING * 2**32


class TimedGrid(InProcessGrid):
    """Also measures the seconds of the apps and their mods."""

    seconds = 0.0

    def _answer(self, message: Message) -> Message | None:
        before = time.perf_counter()
        reply = super()._answer(message)
        self.seconds += time.perf_counter() - before
        return reply


def rounds(clients: int, number: int) -> dict[str, Any]:
    """Seconds of rounds of FedAvg with a stub app; separately of the first, in which clients introduce themselves."""
    rng = np.random.default_rng(0)
    arrays = {f"layers.{k}.weight": rng.standard_normal(ENTRY).astype(np.float32) for k in range(ENTRIES)}
    grid = TimedGrid([Node(stub_app(), {}, name=name) for name in names_of(clients)])
    reports: list[RoundReport] = []
    at_apps: list[float] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        at_apps.append(grid.seconds)
        grid.seconds = 0.0

    strategy = FedAvg(
        fraction_train=min(1.0, COHORT / clients + 1e-9), fraction_evaluate=0, min_available_nodes=min(clients, COHORT),
        on_round=on_round,
    )  # fmt: skip
    strategy.start(grid, ArrayRecord({k: Array(a) for k, a in arrays.items()}), num_rounds=number + 1, timeout=600)
    asked = sum(len(report.asked) for report in reports[1:])
    without = sum(len(report.lost) + len(report.refused) for report in reports[1:])
    return {
        "clients": clients,
        "rounds": number,
        "asked a round": asked / number,
        "without a result": without / asked,
        "first round s": reports[0].seconds,
        "round s": statistics.median(report.seconds for report in reports[1:]),
        "of it at the apps s": statistics.median(at_apps[1:]),
    }


# ---- sampling and planning -------------------------------------------------------------------------------------------


def connected(clients: int, restarted: float = 0.0) -> list[NodeInfo]:
    again = int(clients * restarted)
    return [
        NodeInfo(node_id=k + 1, name=name, last_activated_at="later" if k < again else "now")
        for k, name in enumerate(names_of(clients))
    ]


def meeting(clients: int) -> tuple[Nodes, dict[str, float]]:
    """Seconds to find the connected clients: the first time, without changes, and after 1 % were restarted."""
    nodes = Nodes()
    first, restarted = connected(clients), connected(clients, 0.01)
    taken = {}

    def introduced() -> None:
        asked = dict(nodes.take_new(1))
        nodes.settle(asked, {}, asked, 1)
        nodes.available()

    taken["first look"] = seconds(lambda: nodes.update(first), 1)
    taken["all introduced"] = seconds(introduced, 1)
    taken["look"] = seconds(lambda: nodes.update(first))

    def one_percent() -> None:
        nodes.update(restarted)
        introduced()

    taken["look, 1 % restarted"] = seconds(one_percent, 1)
    return nodes, taken


def strategies() -> dict[str, MethodStrategy]:
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    return {
        "FedAvg": FedAvg(),
        "FedFrozen": FedFrozen(warmup_rounds=1, model=model),
        "SelectiveLayers": SelectiveLayers(budget=1, model=model),
        "FedEnsemble": FedEnsemble(modes=MODES),
        "FedACS": FedACS(quantile=0.5, model=model),
    }


def reply(client: str, plan: Plan, arrays: Any, layers: int) -> Reply:
    parts = {tree: {name: arrays[name] for name in names} for tree, names in plan.returns.items()}
    scores = {LAYER_SCORES: tuple(np.random.default_rng(zlib.crc32(client.encode())).random(layers) + 0.1)}
    return Reply(client=client, parts=parts, examples=10, metrics={}, vectors=scores)


def planning(clients: int, runs: int) -> dict[str, float]:
    """Seconds from the list of nodes to the plans of a cohort, by strategy, and for the list alone."""
    nodes, taken = meeting(clients)
    until = dict.fromkeys(names_of(clients)[:: int(1 / FAILING)], 10)
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    record = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in model.state_dict().items()})
    for name, strategy in strategies().items():
        start = join_modes([record] * MODES) if name == "FedEnsemble" else record
        begins = server_model(start, strategy.blocks)
        method = strategy.method
        state = method.init(begins, Run())
        layers = len(strategy.blocks.layers) if strategy.blocks else 0
        ledger = ClientLedger()
        ledger.restore(held={}, current={}, standing={"until": until}, versions=[], before={})
        share = min(1.0, COHORT / (clients - len(until)) + 1e-9)
        cohorts = Cohorts(Rules(fraction_train=share), list, ledger)
        cohorts._nodes = nodes
        report = RoundReport(2, "train")
        if name == "FedACS":  # the clients that have replied: no more than participated in a round
            some = names_of(clients)[:REPORTED]
            merger = method.merger(state, 1)
            for plan in method.plan(state, 1, TRAIN, some, {}):
                merger.add(reply(plan.client, plan, begins.entries, 0))
            state = merger.finish()

        def one(
            method: Any = method, state: Any = state, cohorts: Any = cohorts, report: Any = report, share: Any = share,
            layers: int = layers, entries: Any = begins.entries,
        ) -> tuple[Any, list[Plan]]:  # fmt: skip
            drawn = cohorts.draw(share, report, 0, TRAIN)
            state, cohort = method.cohort(state, drawn.names, drawn.size, drawn.rng)
            probe_replies: dict[str, Reply] = {}
            for phase in method.phases:
                plans = method.plan(state, 2, phase, sorted(cohort), probe_replies)
                if phase == PROBE:
                    probe_replies = {plan.client: reply(plan.client, plan, entries, layers) for plan in plans}
            method.record(state, plans)
            return state, plans

        taken[f"{name}, first" if name == "FedEnsemble" else name] = seconds(one, runs)
        if name == "FedEnsemble":  # after every client has its stratum
            state, _ = one()
            taken[name] = seconds(lambda one=one, state=state: one(state=state), runs)  # type: ignore[misc]
        if method.storage:
            method.storage.close()
    return taken


# ---- the server's records --------------------------------------------------------------------------------------------


def bytes_of(make: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    made = make()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return made, taken


def hexadecimal(k: int, kind: str) -> str:
    return f"{zlib.crc32(f'{kind}/{k}'.encode()):08x}" * 4


def kept(clients: int, runs: int, folder: Path) -> dict[str, Any]:
    """Bytes in memory of the server's record of each client, and seconds and bytes of a checkpoint of it."""
    names = names_of(clients)
    nodes, of_nodes = bytes_of(lambda: meeting(clients)[0])
    held, of_held = bytes_of(lambda: {name: frozenset([hexadecimal(k, "part")]) for k, name in enumerate(names)})
    current, of_current = bytes_of(lambda: {name: hexadecimal(k, "exchange") for k, name in enumerate(names)})
    strata, of_strata = bytes_of(lambda: {name: k % COHORT for k, name in enumerate(names)})
    losses, of_losses = bytes_of(lambda: {name: [float(k + n) for n in range(MODES)] for k, name in enumerate(names)})
    checkpoints = Checkpoints(folder / str(clients))
    checkpoint = Checkpoint(
        round=1, experiment="e", seed=0, method={}, layout="", state=EnsembleState((), COHORT, strata, losses),
        held={name: tuple(ids) for name, ids in held.items()}, current=current,
        standing={"failures": dict.fromkeys(names[::10], 1), "until": {}}, clients=tuple(nodes.available()),
    )  # fmt: skip
    result = {
        "bytes a client": {
            "nodes": of_nodes / clients, "parts held": of_held / clients, "exchange": of_current / clients,
            "FedEnsemble's strata": of_strata / clients, "its losses": of_losses / clients,
        },
        "checkpoint write s": seconds(lambda: checkpoints.save(checkpoint), runs),
        "checkpoint read s": seconds(checkpoints.latest, runs),
    }  # fmt: skip
    path = checkpoints.folder / "round-000001"
    return {**result, "checkpoint bytes": sum(file.stat().st_size for file in path.iterdir())}


def message_cost(runs: int) -> dict[str, float]:
    """Seconds to build one message without values, by the number of the model's entries."""
    taken = {}
    for entries in (20, 200, 1000):
        arrays = {f"layers.{k}.weight": np.zeros(4, np.float32) for k in range(entries)}
        layout = Layout.of_arrays(arrays)
        sender = Sender(layout, {"model": layout.names}, experiment="e", record="arrays")
        asked = Plan(client="site-1", round=1, needs={"model": layout.names}, returns={"model": layout.names})
        introduction = Plan(client="site-1", round=1, action="introduce", needs={})
        sender.content(Outgoing(asked, lambda tree, arrays=arrays: arrays))  # type: ignore[misc]
        taken[f"{entries} entries"] = seconds(
            lambda s=sender, p=asked, a=arrays: s.content(Outgoing(p, lambda tree: a)), 4 * runs  # type: ignore[misc]
        )
        taken[f"{entries} entries, introduction"] = seconds(
            lambda s=sender, p=introduction, a=arrays: s.content(Outgoing(p, lambda tree: a)), 4 * runs  # type: ignore[misc]
        )
    return taken


# ---- Flower's SuperLink ----------------------------------------------------------------------------------------------


def superlink(clients: int, database: str, runs: int) -> dict[str, Any]:
    """Seconds of a SuperLink's state per request of a node, while a round's messages wait for other nodes."""
    state: Any = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
    run = state.create_run(None, None, "fab", {}, NOOP_FEDERATION_ID, None, "account", TaskType.SERVER_APP)
    ids = [2 * k + 3 for k in range(clients)]
    if isinstance(state, SqlLinkState):
        until, now = time.time() + 3600, "2026-01-01T00:00:00+00:00"
        rows = [
            {"node_id": node_id, "owner_aid": "account", "owner_name": "owner", "status": "online", "public_key": key,
             "registered_at": now, "last_activated_at": now, "online_until": until, "heartbeat_interval": 30.0,
             "name": name}
            for node_id, name in zip(ids, names_of(clients), strict=True) for key in [name.encode()]
        ]  # fmt: skip
        with state.session() as session:
            session.execute(insert(NodeModel), rows)
    else:
        ids = [state.create_node("account", "owner", name.encode(), 0, name=name) for name in names_of(clients)]
        for node_id in ids:
            state.activate_node(node_id, 3600)
    TaskIdentity.run_id, TaskIdentity.node_id = run, SUPERLINK_NODE_ID
    for node_id in ids[:COHORT]:
        message = Message(RecordDict({"config": ConfigRecord({"node": node_id})}), node_id, "train", ttl=3600)
        message.metadata.__dict__["_message_id"] = message.object_id
        assert state.store_message_ins(message)
    others = iter(ids[COHORT:] * runs)
    nodes: list[Any] = []

    def look() -> None:
        listed = GetNodesResponse(nodes=state.get_node_info(node_ids=list(state.get_nodes(run)))).SerializeToString()
        nodes[:] = [len(GetNodesResponse.FromString(listed).nodes), len(listed)]

    taken = {
        "heartbeat s": seconds(lambda: state.acknowledge_node_heartbeat(next(others), 30), 20 * runs),
        "poll s": seconds(lambda: state.get_message_ins(next(others), 1), 20 * runs),
        "list of nodes s": seconds(look, runs),
    }
    return {**taken, "list of nodes bytes": nodes[1], "listed": nodes[0]}


# ---- all -------------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes, runs = ((200, 1000), 2) if options.quick else ((1000, 10_000, 100_000), 5)
    result: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "cohort": COHORT,
        "rounds": [rounds(200 if options.quick else 1000, 2 if options.quick else 20)],
        "message s": message_cost(runs),
        "planning s": {},
        "kept": {},
        "superlink": {"in memory": {}, "SQLite": {}},
    }
    for clients in sizes:
        result["planning s"][clients] = {**meeting(clients)[1], **planning(clients, runs)}
        result["kept"][clients] = kept(clients, runs, folder)
        for name, database in (("in memory", FLWR_IN_MEMORY_DB_NAME), ("SQLite", str(folder / f"{clients}.db"))):
            result["superlink"][name][clients] = superlink(clients, database, runs)
    return result


def show(result: dict[str, Any]) -> None:
    console = Console()
    for row in result["rounds"]:
        console.print(
            f"{row['clients']} clients, {row['asked a round']:g} a round, {row['without a result']:.0%} without a "
            f"result: {row['round s']:.3f} s a round, {row['of it at the apps s']:.3f} s of it in apps and their mods. "
            f"The first, in which all introduce themselves, {row['first round s']:.2f} s. {row['rounds']} rounds."
        )
    sizes = list(result["planning s"])
    in_memory = {n: result["kept"][n]["bytes a client"] for n in sizes}
    on_disk = {n: {k: v for k, v in result["kept"][n].items() if k != "bytes a client"} for n in sizes}
    for title, rows, form in (
        ("Sampling and planning, milliseconds", result["planning s"], lambda value: f"{1e3 * value:,.1f}"),
        ("Kept of a client, bytes", in_memory, lambda value: f"{value:,.0f}"),
        ("Checkpoint", on_disk, figure),
        *((f"SuperLink, state {name}", of_sizes, figure) for name, of_sizes in result["superlink"].items()),
    ):
        table = Table(title=title, title_justify="left")
        table.add_column("clients")
        for clients in sizes:
            table.add_column(f"{int(clients):,}", justify="right")
        for what in rows[sizes[0]]:
            table.add_row(what, *(form(rows[clients][what]) for clients in sizes))
        console.print(table)
    of_entries = ", ".join(f"{what} {1e3 * taken:.2f}" for what, taken in result["message s"].items())
    console.print(f"A message without values, milliseconds: {of_entries}.")


def figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2g}" if value < 0.01 else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 1,000 clients, two runs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tepal-many-clients-") as folder:
        os.environ["TEPAL_CACHE"] = f"{folder}/cache"
        result = measure(options, Path(folder))
    if options.json:
        write_figures(options.json, result)
    show(result)


if __name__ == "__main__":
    main()
