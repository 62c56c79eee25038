"""Seconds of a round without its training: Tepal on SuperNodes and on warm nodes, compared with Flower's FedAvg.

    python benchmarks/round_latency.py [--model tiny|vit-b-32] [--clients 2] [--rounds 30] [--runs 1] [--only warm]

Real processes on this machine, one setting after the other: a SuperLink, its clients, TLS, registered keys. The clients
do not train, and return a whole model. Flower's FedAvg has a train and an evaluate exchange in every round, and
Flower's poll interval; Tepal's has the metrics in the train exchange, and the interval of its images. A round is timed
from the end of the previous one; the first is left out (it starts processes and loads the app). Flower's polls keep the
phase in which a run began, so that a few runs give more information than many rounds. Also measured:

- seconds of each step of an exchange on a warm node, from its log;
- memory of all processes of a client, between messages and at its maximum, in bytes of proportional set size (shared
  pages are counted once);
- growth of memory, processes, open files and temporary files of a warm node over the rounds;
- processor seconds a round of each kind of process, of all clients together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from measured import Sampler, write_figures
from rich.console import Console
from rich.table import Table

from tepal.host.processes import Process
from tepal.host.superlink import Clock, follow, stage_app, submit
from tepal.host.toml import to_toml
from tepal.tools.deploy.loopback import Deployment, deployment

APP = Path(__file__).parent / "latency"
WAYS = {"stock": "Flower, flower-supernode", "unchanged": "Tepal, flower-supernode", "warm": "Tepal, tepal node"}
KINDS = {
    "ServerApp": {"flwr-serverapp"}, "SuperLink": {"flower-superlink"}, "node": {"tepal.tools.cli.main"},
    "SuperNode": {"supernode", "flower-supernode"}, "ClientApp": {"worker", "flwr-clientapp"},
    "SuperExec": {"flower-superexec"},
}  # fmt: skip
"""Kind of process → words of its command line, of which it has one."""
STEPS = ("fetch it", "hand it to the app", "in the app", "hand it back", "send it")


@dataclass
class Measured:
    """Figures of one setting: `seconds` of each round from the second on; memory of one client in bytes."""

    seconds: list[float]
    idle: int
    peak: int
    steps: dict[str, float] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)


class Samples(Sampler):
    """Samples the memory of a client's processes, and the processor time of all processes, while the context lasts."""

    pause = 0.25

    def __init__(self, started: Deployment) -> None:
        self._started = started
        self._processes: list[psutil.Process] = []
        self.samples: list[tuple[float, int, int, int, int]] = []
        self.processor: list[tuple[float, dict[str, float]]] = []

    def look(self) -> None:
        if len(self.processor) % 8 == 0:  # finding processes and reading their shared pages take long
            self.samples.append((time.monotonic(), *look(self._started.nodes[0])))
            roots = (self._started.superlink, *self._started.nodes)
            self._processes = [each for root in roots for each in root.tree()]
        self.processor.append((time.monotonic(), processor_seconds(self._processes)))


def look(node: Process) -> tuple[int, int, int, int]:
    """Current (bytes, processes, open files, temporary files) of a client."""
    memory = files = processes = 0
    for process in node.tree():
        with contextlib.suppress(psutil.Error):
            memory += process.memory_full_info().pss
            files += process.num_fds()
            processes += 1
    temporary = sum(1 for path in Path(tempfile.gettempdir()).glob("tepal-node-*/*/**/*") if path.is_file())
    return memory, processes, files, temporary


def processor_seconds(processes: list[psutil.Process]) -> dict[str, float]:
    """Kind of process → processor seconds of all processes of this kind until now."""
    seconds: Counter[str] = Counter()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times, words = process.cpu_times(), set(map(os.path.basename, process.cmdline()))
            kind = next((kind for kind, known in KINDS.items() if words & known), "others")
            seconds[kind] += times.user + times.system
    return dict(seconds)


def processor_a_round(samples: list[tuple[float, dict[str, float]]], ended: list[float]) -> dict[str, float]:
    """Processor seconds of each kind of process, per round, from the end of the first round to that of the last."""
    times = [at for at, _ in samples]
    series = {kind: [used.get(kind, 0.0) for _, used in samples] for kind in samples[-1][1]}
    span = {kind: np.interp([ended[0], ended[-1]], times, each) for kind, each in series.items()}
    return {kind: float(end - begin) / (len(ended) - 1) for kind, (begin, end) in span.items()}


@contextlib.contextmanager
def running(way: str, clients: int, folder: Path) -> Iterator[Deployment]:
    (folder / "work").mkdir(parents=True)
    clock = Clock(lambda kind, text: None, None)
    how = {"warm": way == "warm", "stock": way == "stock"}
    with deployment(folder, [{}] * clients, clock, folder / "cache", **how) as started:
        yield started


def app(way: str, folder: Path) -> Path:
    """Folder of a setting's app, which can be submitted."""
    stage_app(APP, folder)
    if way == "stock":
        project = folder / "pyproject.toml"
        project.write_text(project.read_text().replace("tepal_", "stock_").replace('"latency"', '"latency-stock"'))
    return folder


def measure(way: str, model: str, clients: int, rounds: int, console: Console) -> Measured:
    folder = Path(tempfile.mkdtemp(prefix="tepal-latency-"))
    try:
        with running(way, clients, folder) as started, console.status(f"{WAYS[way]}: {rounds} rounds of {model} …"):
            time.sleep(8)  # until a warm node has started its spare process
            idle = look(started.nodes[0])[0]
            bundle = folder / "app"
            bundle.mkdir()
            output = folder / "ended.json"
            config = folder / "run-config.toml"
            config.write_text(to_toml({"clients": clients, "rounds": rounds, "model": model, "output": str(output)}))
            run = submit(app(way, bundle), config, started.superlink, started.environment, 120)
            clock = Clock(lambda kind, text: None, None)
            with Samples(started) as samples:
                log = folder / "run.log"
                status, details = follow(
                    run, started.address, started.superlink, clock, log, started.root_certificates
                )
            if status != "completed":
                raise SystemExit(f"{WAYS[way]}: the run {status}: {details}\n{log.read_text()}")
            ended = json.loads(output.read_text())
            seconds = list(np.diff(ended)[1:])
            measured = Measured(seconds, idle, max(sample[1] for sample in samples.samples))
            measured.processor = processor_a_round(samples.processor, ended)
            if way == "warm":
                measured.steps = steps(started.nodes[0].log.read_text())
                measured.growth = growth(samples.samples, ended)
            return measured
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def steps(log: str) -> dict[str, float]:
    """Median seconds of each step of an exchange, from a warm node's log."""
    number = r"(\d+\.\d+)"
    pattern = "Answered train .*?: " + ", ".join(f"{number} (?:to )?{step}" for step in STEPS)
    found = [tuple(map(float, match)) for match in re.findall(pattern, log)]
    warm = found[2:] or found  # of a short run the log may have these only
    return {step: statistics.median(each) for step, each in zip(STEPS, zip(*warm, strict=True), strict=True)}


def growth(samples: list[tuple[float, int, int, int, int]], ended: list[float]) -> dict[str, float]:
    """Growth per hundred rounds: slope of a line through the samples, without the first tenth of the run."""
    begin = ended[len(ended) // 10]
    table = np.array([sample for sample in samples if begin <= sample[0] <= ended[-1]], float)
    if len(table) < 4:
        return {}
    rounds = np.interp(table[:, 0], ended, np.arange(len(ended)))
    names = ("memory", "processes", "files", "temporary")
    return {name: 100 * float(np.polyfit(rounds, table[:, k + 1], 1)[0]) for k, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "vit-b-32"), default="tiny")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=0, help="on warm nodes; a tenth of that, at least 3, elsewhere")
    parser.add_argument("--runs", type=int, default=1, help="deployments of each way, in turn")
    parser.add_argument("--only", default=",".join(WAYS), help="which of stock, unchanged, warm")
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it works at all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    rounds = 4 if arguments.quick else arguments.rounds or (30 if arguments.model == "tiny" else 8)
    measured: dict[str, Measured] = {}
    for way in arguments.only.split(",") * arguments.runs:
        number = rounds if way == "warm" else max(3, rounds // 10)
        run = measure(way, arguments.model, arguments.clients, number, console)
        if way in measured:
            run.seconds, run.peak = measured[way].seconds + run.seconds, max(measured[way].peak, run.peak)
        measured[way] = run
    console.print(results(measured))
    warm = measured.get("warm")
    if warm is not None:
        spent = "  ".join(f"{step} {seconds:.3f}" for step, seconds in warm.steps.items())
        console.print(f"an exchange on a warm node, median seconds: {spent}", soft_wrap=True)
    for way, each in measured.items():
        used = "  ".join(f"{kind} {seconds:.3f}" for kind, seconds in each.processor.items())
        total = sum(each.processor.values())
        console.print(f"processor seconds a round, {WAYS[way]}: {total:.3f}  ({used})", soft_wrap=True)
    if warm is not None and warm.growth:
        grown = warm.growth
        console.print(
            f"in 100 rounds a warm node grew by {grown['memory'] / 2**20:+.2f} MB, {grown['processes']:+.2f} "
            f"processes, {grown['files']:+.2f} open files, {grown['temporary']:+.2f} temporary files", soft_wrap=True,
        )  # fmt: skip
    if arguments.json:
        write_figures(arguments.json, {way: vars(each) for way, each in measured.items()})


def results(measured: dict[str, Measured]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("FedAvg of, on", "rounds", "s a round", "fastest", "slowest", "faster", "idle MB", "peak MB"):
        table.add_column(heading, justify="left" if heading == "FedAvg of, on" else "right", no_wrap=True)
    first = next(iter(measured.values()))
    for way, each in measured.items():
        median = statistics.median(each.seconds)
        table.add_row(
            WAYS[way], str(len(each.seconds)), f"{median:.2f}", f"{min(each.seconds):.2f}", f"{max(each.seconds):.2f}",
            f"{statistics.median(first.seconds) / median:.1f} x",
            f"{each.idle / 2**20:,.0f}", f"{each.peak / 2**20:,.0f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
