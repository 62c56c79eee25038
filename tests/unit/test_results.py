"""The experiments of docs/results.md: configs that can be run, and a page that says what the runs left."""

import csv
import json
import lzma
import re
import runpy
import sys

import numpy as np
import pytest

from tepal import models
from tepal.host.toml import parse_run_config
from tepal.server_app.config import read_run_config
from tepal.tools.compare.runs import new_folder
from tepal.training.data import check_partition
from tests.comparisons import comparison_in, finish
from tests.packages import ROOT

RESULTS = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))
EXPERIMENTS = RESULTS["EXPERIMENTS"]


def test_every_config_is_an_experiments():
    assert {path.stem for path in (ROOT / "conf" / "results").glob("*.toml")} == set(EXPERIMENTS)


def images(path, channels, side, **more):
    shape = (20, side, side) if channels == 1 else (20, side, side, channels)
    np.savez(path, x_train=np.zeros(shape, np.uint8), y_train=np.arange(20) % 10, x_test=np.zeros(shape, np.uint8),
             y_test=np.arange(20) % 10, **more)  # fmt: skip


def lines(path, *rows):
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# Small files of the same format as the experiments'.
FILES = {
    "mnist": lambda path: images(path, 1, 28, writer_train=np.arange(20) % 3, writer_test=np.arange(20) % 3),
    "fashion-mnist": lambda path: images(path, 1, 28),
    "cifar-10": lambda path: images(path, 3, 32),
    "pacs": lambda path: np.savez(path, x=np.zeros((20, 32, 32, 3), np.uint8), y=np.arange(20) % 7,
                                  domain=np.arange(20) % 4),
    "shakespeare": lambda path: lines(path, *({"play": "a", "role": r, "text": "To be, or not. " * 9} for r in "xyz")),
    "20-newsgroups": lambda path: lines(path, *({"split": split, "label": label, "text": "Hello there"}
                                                for split in ("train", "test") for label in ("sci.med", "sci.space"))),
    "qa": lambda path: lines(path, *({"question": "Why?", "choices": ["so", "no"], "answer": n % 2} for n in range(9))),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_run(name, tmp_path):
    experiment, file = EXPERIMENTS[name], tmp_path / EXPERIMENTS[name].file
    FILES[name](file)
    given = {experiment.key: str(file)}
    if experiment.model:
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(json.dumps(experiment.model))
        given["model"] = str(tmp_path)
    config = read_run_config(parse_run_config([str(RESULTS["config_file"](name))]) | given)
    assert config.data.kind == {"20-newsgroups": models.TEXTS, "qa": models.CHOICES,
                                "shakespeare": models.CHARACTERS}.get(name, models.IMAGES)  # fmt: skip
    if config.data.partitioner == "natural":
        check_partition(config.data.model_copy(update={"min_partition_size": 1}), 2)


def test_the_page_has_the_comparisons_own_figures(tmp_path):
    added = {1: 0.0, 2: 0.02, 3: 0.07}
    comparison = comparison_in(new_folder(tmp_path / "pacs"), ["fedavg", "fedfrozen", "fedacs"], added)
    finish(comparison, added.get)
    text = "\n".join(RESULTS["page"](tmp_path))
    assert re.findall("^## (.*)$", text, re.M) == ["PACS"]
    assert f"tepal compare . --clients {EXPERIMENTS['pacs'].clients} --seeds 1,2,3" in text
    with (comparison.folder / "comparison.csv").open(newline="") as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    for strategy in ("fedavg", "fedfrozen"):
        mean, deviation = (float(rows[strategy][f"server_accuracy{of}"]) for of in ("", "_sd"))
        assert f"| {strategy} | {mean:.4f} ± {deviation:.4f} |" in text
    assert "| fedacs | – |" in text


def test_docs_results_shows_every_experiment():
    written = (ROOT / "docs" / "results.md").read_text()
    assert written.startswith(RESULTS["INTRODUCTION"])
    assert re.findall("^## (.*)$", written, re.M) == [one.title for one in EXPERIMENTS.values()]


def test_the_page_of_reproduced_experiments_is_what_the_command_wrote(tmp_path, capsys, monkeypatch):
    script = runpy.run_path(str(ROOT / "benchmarks" / "reproduced.py"))
    for name, scale in (("ensemble-toy", "-full"), ("fedacs", "")):
        (tmp_path / f"{name}{scale}").mkdir()
        (tmp_path / f"{name}{scale}" / "results.md").write_text(f"## {name}\n")
    monkeypatch.setattr(sys, "argv", ["reproduced.py", str(tmp_path)])
    script["main"]()
    assert capsys.readouterr().out == f"{script['INTRODUCTION']}\n## ensemble-toy\n\n## fedacs\n"
    assert (ROOT / "docs" / "reproduced.md").read_text().startswith(script["INTRODUCTION"])
