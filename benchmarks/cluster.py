"""Seconds on one core of this machine, and on a Ray cluster of two nodes with one core each.

    python benchmarks/cluster.py [comparison | run] [--seeds 4] [--rounds 30] [--config "…"] [--runs 3] [--quick]
        [--one-node]

Either a comparison, `tepal compare` with FedAvg and FedFrozen and `--seeds` seeds, of which each run is on one node; or
one run, `tepal simulate --spread` with FedAvg, whose clients are on both. Digits, ten clients. The nodes are processes
on this machine, each held to a core of its own, with temporary files of their own; the head has no core. On one core
the command and all its processes are held to it. Neither has a lower priority (the nodes have `RAY_worker_niceness=0`).
They are taken in turn, and the results must be the same. Starting Ray is not counted; sending code to the nodes is,
each time, because their stores are emptied. With two nodes, the command, the head and Ray's own processes are on the
nodes' cores. `--one-node` measures a cluster of one node too, where these have the other core.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from measured import ROOT, write_figures
from rich.console import Console
from rich.table import Table

from tepal.host.processes import free_port, started, wait_for_log
from tepal.records.run_directory import read_metrics

_HOST = "127.0.0.1"
_COMPARISON, _RUN = "comparison", "run"
_SAME = ("strategy", "seed", "rounds", "server_accuracy", "clients_accuracy", "bytes_to_target")


@contextlib.contextmanager
def cluster(folder: Path, cores: Sequence[int]) -> Iterator[str]:
    """Start a head and a node on each of these cores; yield the address."""
    address = f"{_HOST}:{free_port()}"
    programs = sysconfig.get_path("scripts")
    common = [
        f"{programs}/ray", "start", "--block", f"--node-ip-address={_HOST}", "--disable-usage-stats",
        "--object-store-memory=200000000", "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=0", "--include-dashboard=false"]
    worker = [f"--address={address}", "--num-cpus=1"]
    with contextlib.ExitStack() as nodes:
        for number, core in enumerate([None, *cores]):
            files = folder / f"t{number}"
            files.mkdir()
            command = common + (head if core is None else worker) + [f"--temp-dir={folder / f'r{number}'}"]
            held = command if core is None else ["taskset", "-c", str(core), *command]
            environment = {
                **os.environ, "TMPDIR": str(files), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0",
            }  # fmt: skip
            process = nodes.enter_context(
                started(held, log=folder / f"{number}.log", env=environment, cwd=files, name="Ray", grace=3)
            )
            wait_for_log(process, "Ray runtime started", 90)
        yield address


def seconds_of(what: str, runs: Path, options: argparse.Namespace, address: str, core: int | None) -> float:
    """Seconds of a comparison or a run in the folder `runs`. `core`: the command's; None: any."""
    command = [sys.executable, "-c", "from tepal.tools.cli.main import main; main()"]
    config = ["-c", f'num-server-rounds={options.rounds} runs="{runs}"', "--clients", "10", "--ray", address]
    if what == _COMPARISON:
        seeds = ",".join(map(str, range(1, options.seeds + 1)))
        command += ["compare", str(ROOT), "--strategies", "fedavg,fedfrozen", "--seeds", seeds, *config]
    else:
        # Replies are merged in the order of the clients, so that all digits are the same.
        command += ["simulate", str(ROOT), *config, "-c", f'strategy="fedavg" deterministic=true {options.config}']
        command += [] if address == "none" else ["--spread"]
    held = command if core is None else ["taskset", "-c", str(core), *command]
    begun = time.perf_counter()
    subprocess.run(held, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.perf_counter() - begun


def results(what: str, runs: Path) -> list[str]:
    """What must be the same wherever it is computed."""
    if what == _RUN:
        rounds = read_metrics(runs / "latest")
        return [str((line.round, line.accuracy, line.bytes_down, line.bytes_up)) for line in rounds]
    (table,) = runs.glob("*-compare/runs.csv")
    with table.open(newline="") as file:
        return sorted(str([line[key] for key in _SAME]) for line in csv.DictReader(file))


def measure(what: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds each time: on one core, on one node if that was asked for, and on two nodes."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    clusters = {"one node": (first,)} if options.one_node else {}
    clusters["two nodes"] = (first, second)
    found: dict[str, list[float]] = {"one core": [], **{name: [] for name in clusters}}
    for _ in range(options.runs):
        # A short name: Ray's sockets are below it.
        with tempfile.TemporaryDirectory(prefix="tb", ignore_cleanup_errors=True) as name:
            one = Path(name) / "one"
            found["one core"].append(seconds_of(what, one, options, "none", first))
            for number, (nodes, cores) in enumerate(clusters.items()):
                folder = Path(name) / str(number)
                folder.mkdir()
                with cluster(folder, cores) as address:
                    found[nodes].append(seconds_of(what, folder / "runs", options, address, None))
                assert results(what, one) == results(what, folder / "runs"), "the results differ"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=[_COMPARISON, _RUN], default=_COMPARISON)
    parser.add_argument("--seeds", type=int, default=4, help="of a comparison")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--config", default="", help="more of the run config of one run")
    parser.add_argument("--runs", type=int, default=3, help="times that each is computed")
    parser.add_argument("--one-node", action="store_true", help="measure a cluster of one node too")
    parser.add_argument("--quick", action="store_true", help="once, with one seed and two rounds")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rounds, options.runs = 1, 2, 1
    found = measure(options.what, options)
    runs = f"{2 * options.seeds} runs" if options.what == _COMPARISON else "one run"
    table = Table("", "seconds", "two nodes are faster", box=None, title=f"{runs} of {options.rounds} rounds")
    ratios = dict[str, float]()
    for name, seconds in found.items():
        ratio = statistics.median(one / two for one, two in zip(seconds, found["two nodes"], strict=True))
        ratios |= {name: ratio} if name != "two nodes" else {}
        table.add_row(name, ", ".join(f"{one:.1f}" for one in seconds), f"{ratio:.2f}" if name in ratios else "")
    Console().print(table)
    if options.json:
        write_figures(options.json, {**found, "ratios": ratios})


if __name__ == "__main__":
    main()
