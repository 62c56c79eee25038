"""Clients that share labels and no vocabulary: six subjects of 20 Newsgroups, one a client, as texts in six languages.

    python benchmarks/domains.py NEWSGROUPS [--seeds 1,2,3] [--rounds 8] [--runs runs/domains]

NEWSGROUPS is 20 Newsgroups as JSON lines with `text`, `label` and `split`, also compressed. Each client has the texts
of two groups of one subject, and tells the first from the second: a guess is right for one half. All strategies begin
with `compact-bert-news`, whose training has seen texts like these, and no labels. Prints accuracies on a held-out fifth
of all texts, those of the clients on their own tests, and what `tepal show` remarks on a run.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import tepal
from tepal.training.data.formats.files import opened_text

SUBJECTS = (
    ("comp.graphics", "comp.sys.mac.hardware"),
    ("rec.autos", "rec.motorcycles"),
    ("rec.sport.baseball", "rec.sport.hockey"),
    ("sci.med", "sci.space"),
    ("talk.politics.guns", "talk.politics.mideast"),
    ("alt.atheism", "soc.religion.christian"),
)
STRATEGIES = ("fedavg", "fedfrozen", "selective", "fedensemble", "fedacs")
TEXTS = 300
"""Training texts of a group that are used, at most."""


def clients_of(file: Path) -> list[tuple[list[str], list[int]]]:
    """Texts and labels, 0 for the first group of its subject and 1 for the second, of each client."""
    place = {group: (client, label) for client, pair in enumerate(SUBJECTS) for label, group in enumerate(pair)}
    found: list[tuple[list[str], list[int]]] = [([], []) for _ in SUBJECTS]
    with opened_text(file) as lines:
        for row in map(json.loads, lines):
            if row["split"] == "train" and row["label"] in place:
                client, label = place[row["label"]]
                texts, labels = found[client]
                if labels.count(label) < TEXTS:
                    texts.append(row["text"])
                    labels.append(label)
    return found


def table(compared: tepal.Compared) -> str:
    """The result in Markdown."""
    lines = ["| strategy | held-out accuracy | accuracy on own tests | remarks |", "|---|--:|--:|---|"]
    for name, row in compared.table.iterrows():
        runs = [run for run in compared.runs if run.config["strategy"] == name]
        remarks = "; ".join(dict.fromkeys(remark for run in runs for remark in run.remarks)) or "none"
        cells = [_cell(row[key], row[f"{key}_sd"]) for key in ("server_accuracy", "clients_accuracy")]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {remarks} |")
    return "\n".join(lines)


def _cell(mean: float, deviation: float) -> str:
    """A mean, with its standard deviation if there are several seeds; "–" if there is none."""
    if math.isnan(mean):
        return "–"
    return f"{mean:.3f}" if math.isnan(deviation) else f"{mean:.3f} ± {deviation:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("newsgroups", type=Path)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--runs", type=Path, default=Path("runs/domains"))
    given = parser.parse_args()
    compared = tepal.compare(
        STRATEGIES, seeds=[int(seed) for seed in given.seeds.split(",")], model="compact-bert-news",
        pretrained="compact-bert-news", data=clients_of(given.newsgroups), rounds=given.rounds, runs=given.runs,
        text_length=128, local_epochs=2, batch_size=8, learning_rate=0.002, score_in_training=False,
    )  # fmt: skip
    print(table(compared))


if __name__ == "__main__":
    main()
