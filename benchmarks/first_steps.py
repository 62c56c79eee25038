"""The first steps of a new user, by the commands of the documentation, each in a folder of its own, with its seconds.

    python benchmarks/first_steps.py [--only csv,app] [--folder FOLDER] [--json FILE]

Each step writes what a user would have (a table, an app), runs commands as the pages have them with paths relative to
the current folder, and checks what they leave. Nothing is read from the checkout but the installed `tepal`. Without
--folder a temporary folder is used, and removed.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measured import write_figures

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SMALL = "num-server-rounds=2 local-epochs=1"


class StepFailed(Exception):
    """A step did not leave what the documentation says."""


def sh(command: str, folder: Path, *, fails: bool = False) -> str:
    """Run a command in a folder, and return what it prints."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if (done.returncode != 0) != fails:
        raise StepFailed(f"{command}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def expect(text: str, *parts: str) -> None:
    """Raise StepFailed if a part is missing."""
    flat = " ".join(text.split())
    if missing := [part for part in parts if part not in flat]:
        raise StepFailed(f"expected {missing} in:\n{text}")


def reviews(file: Path, separator: str = ",", rows: int = 240) -> None:
    """Product reviews at four sites."""
    drawn = random.Random(1)
    good, bad = ["great", "lovely", "works", "solid"], ["broken", "awful", "late", "weak"]
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=separator)
        writer.writerow(["review", "liked", "shop"])
        for row in range(rows):
            words = drawn.choices(good if row % 2 else bad, k=4) + drawn.choices(["the", "box", "it", "was"], k=4)
            writer.writerow([" ".join(words), ["no", "yes"][row % 2], f"shop-{row % 4}"])


def own_csv(folder: Path) -> None:
    """Texts of a .csv by relative path, a trained text model, a client for each site."""
    reviews(folder / "reviews.csv")
    config = (
        'dataset="reviews.csv" text-column="review" label-column="liked" group-column="shop" partitioner="natural" '
        f'model="compact-bert-news" pretrained="compact-bert-news" strategy="fedavg" {SMALL}'
    )
    expect(sh(f"tepal simulate --clients 4 -c {shlex.quote(config)}", folder), "bytes in total", "accuracy")
    sh("tepal show", folder)
    reviews(folder / "new.csv", rows=8)
    sh("tepal predict runs new.csv --output predictions.csv", folder)
    if len((folder / "predictions.csv").read_text().splitlines()) != 9:
        raise StepFailed("predictions.csv has not a line for each text")


def own_app(folder: Path) -> None:
    """An app that `tepal init` writes, simulated and deployed as it stands, by a strategy that asks for probes."""
    sh("tepal init quickstart", folder)
    sh("tepal simulate . --clients 3", folder / "quickstart")
    if not list((folder / "quickstart" / "runs").glob("*-quickstart/flower.log")):
        raise StepFailed("the log of the app's run is not kept")
    sh("tepal loopback . --clients 2", folder / "quickstart")


def other_app(folder: Path) -> None:
    """Flower's own strategy in an app that has none of Tepal's keys, with one key of its own."""
    sh("tepal init quickstart", folder)
    app = folder / "quickstart"
    expect(sh("tepal simulate . --clients 2 -c 'num-server-rounds=1'", app), "not Tepal's own")
    expect(sh("tepal simulate . --clients 2 -c 'rounds=1'", app, fails=True), "no run configuration key rounds")
    expect(sh("tepal compare .", app, fails=True), "not Tepal's own app")


def in_process(folder: Path) -> None:
    """The example in one process of docs/own-app.md."""
    sh("tepal init quickstart", folder)
    page = (ROOT / "docs" / "own-app.md").read_text()
    found = re.search(r'```python title="(in_process\.py)"\n(.*?)```', page, flags=re.DOTALL)
    assert found is not None
    (folder / "quickstart" / found[1]).write_text(found[2])
    sh("python in_process.py", folder / "quickstart")


def interruptions(folder: Path) -> None:
    """SIGTERM, which says how to go on; then `--resume latest` from the same folder; keys that there are not."""
    command = f"tepal compare --strategies fedavg,fedfrozen --clients 3 -c '{SMALL}'"
    log = folder / "log.txt"
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as stream:
        running = subprocess.Popen(
            shlex.split(command), cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
        while "round 1/2" not in log.read_text() and running.poll() is None:
            time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=60)
    expect(log.read_text(), "Resume it with `tepal compare --resume")
    expect(sh("tepal compare --resume latest", folder), "fedfrozen")
    said = sh("tepal simulate -c 'lokal-epochs=1 momentun=0.1'", folder, fails=True)
    expect(said, "lokal-epochs", "momentun", "local-epochs", "momentum")
    expect(sh("tepal node --control 127.0.0.1:9 status", folder, fails=True), "127.0.0.1:9")


def numbers(folder: Path) -> None:
    """A .tsv of numbers with classes, and the same as a regression, which warns."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    with (folder / "patients.tsv").open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t")
        writer.writerow([*(f"f{number}" for number in range(data.data.shape[1])), "diagnosis"])
        for row, label in zip(data.data, data.target, strict=True):
            writer.writerow([*row, label])
    table = 'dataset="patients.tsv" feature-columns="*" label-column="diagnosis" normalise="dataset" strategy="fedavg"'
    classes = f'{table} model="mlp" num-server-rounds=6'
    out = sh(f"tepal simulate --clients 5 -c {shlex.quote(classes)}", folder)
    found = re.search(r"accuracy\s*│\s*([\d.]+)", out)
    if found is None or float(found[1]) < 0.9:
        raise StepFailed(f"an accuracy of at least 0.9 was expected:\n{out}")
    regression = f'{table} partitioner="iid" model="linear-attention" {SMALL}'
    expect(sh(f"tepal simulate --verbose --clients 5 -c {shlex.quote(regression)}", folder), "classes")


def warnings(folder: Path) -> None:
    """Settings whose figures would hide something."""
    selective = sh(f"tepal simulate --verbose --clients 3 -c 'strategy=\"selective\" {SMALL}'", folder)
    expect(selective, "pretrained")
    frozen = sh("tepal simulate --clients 3 -c 'num-server-rounds=3 local-epochs=1'", folder)
    expect(frozen, "frozen")  # the default warm-up leaves rounds that are frozen


def savings(folder: Path) -> None:
    """What the strategy saves, told from what the encoding saves."""
    out = sh(f"tepal simulate --clients 3 -c 'wire-dtype=\"bfloat16\" {SMALL}'", folder)
    expect(out, "by the strategy", "by the encoding")


def notebook(folder: Path) -> None:
    """The first lines of the Python API; prints the seconds of the import, and from there to the first round."""
    (folder / "first.py").write_text(
        "import time\nbegun = time.perf_counter()\nimport tepal\n"
        "run = tepal.simulate(strategy='fedfrozen', model='tiny-vit', data='digits', clients=10, rounds=1)\n"
        "print('seconds:', round(time.perf_counter() - begun, 1))\n"
    )
    expect(sh("python first.py", folder), "round 1/1", "seconds:")


STEPS: dict[str, Callable[[Path], None]] = {
    "csv": own_csv, "app": own_app, "other-app": other_app, "in-process": in_process, "interruptions": interruptions,
    "numbers": numbers, "warnings": warnings, "savings": savings, "notebook": notebook,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help=f"steps, separated by commas: {', '.join(STEPS)}")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path, help="file for the seconds")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(STEPS)
    with tempfile.TemporaryDirectory(prefix="first-steps-") as temporary:
        base = given.folder or Path(temporary)
        seconds: dict[str, float] = {}
        print("| step | seconds |\n|---|--:|")
        for name in names:
            folder = base / name
            folder.mkdir(parents=True)
            begun = time.perf_counter()
            STEPS[name](folder)
            what = (STEPS[name].__doc__ or name).strip().rstrip(".")
            seconds[what] = round(time.perf_counter() - begun, 1)
            print(f"| {what} | {seconds[what]} |", flush=True)
    if given.json:
        write_figures(given.json, seconds)


if __name__ == "__main__":
    main()
