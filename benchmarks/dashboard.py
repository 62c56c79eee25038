"""Seconds until the dashboard shows runs in a headless Chromium, compared with TensorBoard for the same runs.

    python benchmarks/dashboard.py [--runs 200] [--rounds 1000] [--clients 500] [--repeats 5] [--quick] [--json FILE]

- A list of many finished runs: until the first contentful paint, and until every run is listed. TensorBoard reads the
  same rounds from its own files; its page lists as many runs as fit, therefore until the first one is listed.
- A run with many rounds and clients: until the visible figures are drawn, and until the last part is loaded. The server
  has not read it before.
- A running run: from the line of a round in `metrics.jsonl` until the page shows it.

The runs are written with the project's own run directory, and their numbers are invented. Needs the `dev` extra and
Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from measured import write_figures
from playwright.sync_api import Browser, Page, sync_playwright

from tepal.host.processes import free_port
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import BLOCKS, CLIENTS, METRICS, NOW, RunDirectory, as_json, held

HERE = Path(__file__).resolve().parent
PAINT = "(performance.getEntriesByName('first-contentful-paint')[0] ?? {}).startTime"
LAYERS = 12


def line(number: int, rng: np.random.Generator) -> dict[str, Any]:
    moved = {"bytes_down": 10_000_000, "bytes_up": 8_000_000, "bytes_fedavg": 20_000_000}
    return {
        "round": number, "phase": "train", "clients_asked": 50, "clients_replied": 49, "accuracy_of": "server",
        "accuracy": 1 - float(np.exp(-number / 300)) * 0.9 + float(rng.normal(0, 0.005)),
        "loss": float(np.exp(-number / 300)) + 0.1, "train_loss": float(np.exp(-number / 250)),
        "lost": [{"client": f"client-{number % 7}", "reason": "it did not answer within 60 s"}], "refused": [],
        "seconds": 2.0, "seconds_train": 1.5, "step_seconds": 0.01, **moved,
    }  # fmt: skip


def write_run(folder: Path, rounds: int, seed: int, *, ended: bool = True) -> Path:
    """Write a run directory with a number of rounds."""
    rng = np.random.default_rng(seed)
    config = {"strategy": "selective", "model": "vit-b-32", "dataset": "digits", "num-server-rounds": rounds}
    run = RunDirectory.create(folder, "selective", config)
    with (run.path / METRICS).open("w") as file:  # not `append`, which waits for the disk every time
        for number in range(1, rounds + 1 if ended else rounds):
            file.write(json.dumps(as_json(line(number, rng))) + "\n")
    if ended:
        run.write_summary()
    return run.path


def write_large_run(folder: Path, rounds: int, clients: int) -> Path:
    """Write a run with everything that a strategy records of every round and every client."""
    path, rng = write_run(folder, rounds, 0), np.random.default_rng(0)
    names = np.array([f"client-{k}" for k in range(clients)], str)
    kinds = ("query and key", "other")
    cells = [{"stage": f"layer {k + 1}", "kind": kind, "bytes": 10**6} for k in range(LAYERS) for kind in kinds]
    (path / BLOCKS).write_text(json.dumps(cells))
    for number in range(1, rounds + 1):
        shares = rng.random(len(cells)).astype(np.float32)
        record = {"clients": names, "masks": rng.random((clients, LAYERS)) < 0.3}
        RunDirectory(path, {}).write_record(
            number, record | {f"travel_{way}": shares for way in ("down", "trains", "up")}
        )
    total = {"rounds": rounds, "replied": rounds - 1, "refused": 0, "lost": 1, "examples": 600, "budget": 2,
             "bytes_down": 10**9, "bytes_up": 10**9, "seconds": 1500.0, "reason": "round 7: no answer"}  # fmt: skip
    (path / CLIENTS).write_text(json.dumps(dict.fromkeys(names.tolist(), total)))
    part = {"state": "replied", "examples": 600, "bytes_down": 10**6, "bytes_up": 10**6, "seconds": 1.5}
    here = dict.fromkeys(names.tolist(), part)
    now = {"round": rounds, "rounds": rounds, "phase": "train", "ended": True, "clients": here}
    (path / NOW).write_text(json.dumps(now | {f"travel_{way}": [1.0] * len(cells) for way in ("down", "trains", "up")}))
    return path


@contextmanager
def serving(command: list[str], address: str) -> Iterator[str]:
    """Start a server in a process of its own, and wait until it answers."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                httpx.get(address)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tepal.tools.cli.main", "dashboard", str(folder), "--port", str(port)]
    with serving(command, f"http://127.0.0.1:{port}/") as address:
        time.sleep(1)  # it prepares what it serves
        yield address


@contextmanager
def page_of(browser: Browser) -> Iterator[Page]:
    """A page of a browser with an empty cache."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    yield context.new_page()
    context.close()


def until(page: Page, holds: str, begun: float, most: float = 60) -> float:
    """Seconds until an expression of JavaScript is true."""
    while not page.evaluate(holds):
        if time.monotonic() - begun > most:
            raise TimeoutError(holds)
        time.sleep(0.005)
    return time.monotonic() - begun


def opening(browser: Browser, address: str, *there: str) -> list[float]:
    """Seconds until the first contentful paint, and until each expression is true."""
    with page_of(browser) as page:
        begun = time.monotonic()
        page.goto(address, wait_until="commit")
        times = [until(page, each, begun) for each in there]
        until(page, f"{PAINT} > 0", begun)
        return [page.evaluate(PAINT) / 1000, *times]


def repeated(times: int, measure: Callable[[], list[float]], names: tuple[str, ...]) -> dict[str, list[float]]:
    found = [measure() for _ in range(times)]
    return {name: [each[k] for each in found] for k, name in enumerate(names)}


def list_of_runs(browser: Browser, folder: Path, runs: int, repeats: int) -> dict[str, Any]:
    for seed in range(runs):
        write_run(folder, 20, seed)
    shown = f"document.querySelectorAll('tbody tr').length >= {runs}"
    with dashboard(folder) as address:
        return repeated(repeats, lambda: opening(browser, address, shown), ("first paint", "all runs"))


def tensorboard(browser: Browser, folder: Path, logs: Path, repeats: int) -> dict[str, Any] | None:
    """The same for TensorBoard; None if it is not installed."""
    program = Path(sys.executable).with_name("tensorboard")
    if not program.exists():
        return None
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for path in folder.iterdir():
        if path.is_symlink():
            continue
        writer = EventFileWriter(str(logs / path.name))
        for text in (path / METRICS).read_text().splitlines():
            line = json.loads(text)
            values = [Summary.Value(tag=key, simple_value=line[key]) for key in ("accuracy", "loss", "bytes_up")]
            writer.add_event(Event(step=line["round"], summary=Summary(value=values), wall_time=time.time()))
        writer.close()
    port = free_port()
    command = [str(program), "--logdir", str(logs), "--port", str(port), "--host", "127.0.0.1"]
    with serving(command, f"http://127.0.0.1:{port}/") as address:
        time.sleep(10)  # it reads its files in the background
        listed = "document.body.innerText.includes('-selective')"
        return repeated(repeats, lambda: opening(browser, address, listed), ("first paint", "a run"))


def large_run(browser: Browser, folder: Path, rounds: int, clients: int, repeats: int) -> dict[str, Any]:
    path = write_large_run(folder, rounds, clients)
    sight = "[...document.querySelectorAll('.plot')].filter(each => each.getBoundingClientRect().top < innerHeight)"
    in_sight = f"{sight}.length > 0 && {sight}.every(each => each.querySelector('.main-svg'))"
    everything = "document.getElementById('figure-layers-clients') !== null && document.querySelector('#clients td')"
    found: list[list[float]] = []
    for _ in range(repeats):
        with dashboard(folder) as address:  # a new server each time: it caches what it has read
            found.append(opening(browser, f"{address}run/{path.name}/", in_sight, everything))
    names = ("first paint", "figures in sight", "everything")
    return {name: [each[k] for each in found] for k, name in enumerate(names)}


def updates(browser: Browser, folder: Path, repeats: int) -> list[float]:
    path, rng = write_run(folder, 1000, 1, ended=False), np.random.default_rng(2)
    path = path.rename(path.with_name("a-run-that-goes-on"))
    (path / METRICS).write_text("".join((path / METRICS).read_text().splitlines(keepends=True)[:20]))
    found = []
    with held(path), dashboard(folder) as address, page_of(browser) as page:
        page.goto(f"{address}run/{path.name}/")
        until(page, "document.querySelector('.state')?.innerText.includes('20 of')", time.monotonic())
        for number in range(21, 21 + repeats):
            time.sleep(1.0 + float(rng.random()))
            RunDirectory(path, {}).append(RoundRecord.from_line(line(number, rng)))
            shown = f"document.querySelector('.state').innerText.includes('{number} of')"
            found.append(until(page, shown, time.monotonic()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="3 runs, 20 rounds of 10 clients, once")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.runs, options.rounds, options.clients, options.repeats = 3, 20, 10, 1
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory(prefix="tepal-") as temporary, sync_playwright() as api:
        place = Path(temporary)
        browser = api.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        figures = {
            "runs": options.runs, "rounds": options.rounds, "clients": options.clients,
            "list": list_of_runs(browser, place / "runs", options.runs, options.repeats),
            "TensorBoard": tensorboard(browser, place / "runs", place / "logs", options.repeats),
            "large run": large_run(browser, place / "large", options.rounds, options.clients, options.repeats),
            "update": updates(browser, place / "live", 2 * options.repeats),
        }  # fmt: skip
        browser.close()
    for what in ("list", "TensorBoard", "large run"):
        for name, seconds in (figures[what] or {}).items():
            print(f"{what}, {name}: {statistics.median(seconds):.2f} s (up to {max(seconds):.2f})")
    print(f"update: {statistics.median(figures['update']):.2f} s (up to {max(figures['update']):.2f})")
    if options.json:
        write_figures(options.json, figures)


if __name__ == "__main__":
    main()
