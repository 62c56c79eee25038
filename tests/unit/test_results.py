"""The experiments of docs/results.md: configs that can be run, and a page that says what the runs left."""

import csv
import json
import lzma
import re
import runpy
from dataclasses import replace

import numpy as np
import pytest

from tepal import models
from tepal.host.toml import parse_run_config
from tepal.server_app.config import defaults, read_run_config
from tepal.tools.compare.comparison import Comparison, planned_variants
from tepal.tools.compare.runs import new_folder
from tepal.tools.compare.variants import read_variants
from tepal.tools.search.plan import check_values, read_plan
from tepal.training.data import check_partition
from tests.comparisons import CONFIG, comparison_in, finish
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


NEWS = [{"split": split, "label": label, "text": "Hello there"}
        for split in ("train", "test") for label in ("sci.med", "sci.space")]  # fmt: skip

# Small files of the same format as the experiments'.
FILES = {
    "mnist.npz": lambda path: images(path, 1, 28, writer_train=np.arange(20) % 3, writer_test=np.arange(20) % 3),
    "fashion_mnist.npz": lambda path: images(path, 1, 28),
    "cifar10_subset.npz": lambda path: images(path, 3, 32),
    "pacs32.npz": lambda path: np.savez(path, x=np.zeros((20, 32, 32, 3), np.uint8), y=np.arange(20) % 7,
                                        domain=np.arange(20) % 4),
    "shakespeare_roles.jsonl.xz": lambda path: lines(path, *({"play": "a", "role": role, "text": "To be, or not. " * 9}
                                                             for role in "xyz")),
    "news20.jsonl.xz": lambda path: lines(path, *NEWS),
    "qa_arc_obqa_piqa.jsonl.xz": lambda path: lines(path, *({"question": "Why?", "choices": ["so", "no"],
                                                             "answer": n % 2} for n in range(9))),
}  # fmt: skip


FROM_TRAINED = [name for name, one in EXPERIMENTS.items() if one.clients is None]
KINDS = {"news20.jsonl.xz": models.TEXTS, "qa_arc_obqa_piqa.jsonl.xz": models.CHOICES,
         "shakespeare_roles.jsonl.xz": models.CHARACTERS}  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_run(name, tmp_path):
    experiment, file = EXPERIMENTS[name], tmp_path / EXPERIMENTS[name].file
    FILES[experiment.file](file)
    given = {experiment.key: str(file)}
    if experiment.model:
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(json.dumps(experiment.model))
        given["model"] = str(tmp_path)
    for values in run_configs(name):
        config = read_run_config(values | given)
        assert config.data.kind == KINDS.get(experiment.file, models.IMAGES)
        if config.data.partitioner == "natural":
            check_partition(config.data.model_copy(update={"min_partition_size": 1}), 2)


def run_configs(name):
    """The run config of an experiment, or those of its variants."""
    file = RESULTS["config_file"](name)
    if name not in FROM_TRAINED:
        return [parse_run_config([str(file)])]
    read = read_variants(file)
    return [{**read.common, **variant.run_config} for section in read.sections for variant in section.variants]


@pytest.mark.parametrize("name", FROM_TRAINED)
def test_searched_settings_are_those_that_are_compared(name, tmp_path):
    """A search has the same variants, and the compared values of what it searches are among its choices."""
    file = ROOT / "conf" / "search" / f"{name}.toml"
    plan = read_plan(file)
    data = {EXPERIMENTS[name].key: str(tmp_path / EXPERIMENTS[name].file)}
    FILES[EXPERIMENTS[name].file](tmp_path / EXPERIMENTS[name].file)
    check_values(replace(plan, common={**plan.common, **data}), defaults(), file)
    read = read_variants(RESULTS["config_file"](name))
    compared = {one.name: {**read.common, **one.run_config} for section in read.sections for one in section.variants}
    assert {one.name for one in plan.searched} <= compared.keys() and plan.clients == read.clients
    for variant in plan.searched:
        assert variant.config["strategy"] == compared[variant.name]["strategy"]
        for key, space in variant.search.items():
            assert compared[variant.name][key] in space.samples


def test_every_search_is_an_experiments():
    assert {path.stem for path in (ROOT / "conf" / "search").glob("*.toml")} == set(FROM_TRAINED)


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


def test_the_page_of_variants_has_their_sections_with_answers(tmp_path):
    name = FROM_TRAINED[0]
    read = read_variants(RESULTS["config_file"](name))
    folder = new_folder(tmp_path / name)
    runs = planned_variants(read.sections, (1, 2, 3))
    finish(Comparison(folder.resolve(), runs, dict(CONFIG), 10, sections=read.sections), {1: 0.0, 2: 0.02, 3: 0.07}.get)
    text = "\n".join(RESULTS["page"](tmp_path))
    assert re.findall("^## (.*)$", text, re.M) == [EXPERIMENTS[name].title]
    assert re.findall("^### (.*)$", text, re.M) == [section.title for section in read.sections]
    assert f"tepal compare . --variants conf/results/{name}.toml --seeds 1,2,3" in text
    for section in read.sections:
        assert section.about in text and all(f"| {each} |" in text for each in section.names)


def test_docs_results_shows_every_experiment():
    written = (ROOT / "docs" / "results.md").read_text()
    assert written.startswith(RESULTS["INTRODUCTION"])
    assert re.findall("^## (.*)$", written, re.M) == [one.title for one in EXPERIMENTS.values()]
