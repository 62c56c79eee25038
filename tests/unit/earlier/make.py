"""Runs of every strategy, as the version that is checked out leaves them: two rounds, and what a third one measures.

    python -m tests.unit.earlier.make ARCHIVE.tar.xz

`test_earlier.py` resumes the runs of such an archive.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch import nn

CLIENTS, ROUNDS = 3, 2
CONFIG = {
    "dataset": "digits", "model": "tests.unit.earlier.make:small_model", "min-clients": CLIENTS, "local-steps": 2,
    "optimizer": "sgd", "learning-rate": 0.05, "weight-decay": 0.0, "schedule": "constant", "deterministic": True,
    "fedfrozen.warmup-rounds": 1, "fedensemble.modes": 2, "pfedme.lambda": 1.0, "server-share": 0.05,
    "fedacs.quantile": 0.1, "checkpoints": 1,
}  # fmt: skip
FIGURES = ("bytes_down", "bytes_up", "loss", "train_loss", "received_loss")


class SmallModel(nn.Module):
    """Attention over the rows of an 8 × 8 image: 322 parameters."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1, 2)
        weights = (self.query(rows) @ self.key(rows).transpose(1, 2) / 8**0.5).softmax(-1)
        logits: torch.Tensor = self.head(self.norm((rows + weights @ self.value(rows)).mean(1)))
        return logits


def small_model(classes: int, image_shape: object = None) -> nn.Module:
    return SmallModel(classes)


def run_rounds(folder: Path, config: dict) -> Path:
    """A run of this config with three clients in this process, or one that goes on; its run directory."""
    from tepal.client_app.app import app
    from tepal.server_app.config import defaults
    from tepal.server_app.run import run
    from tepal.strategies.in_process import InProcessGrid, Node

    with (
        mock.patch.dict(os.environ, TEPAL_CACHE=str(folder / "cache")),
        mock.patch("tepal.server_app.run.write_report", lambda run: run / "report.html"),
    ):
        values = {**defaults(), **CONFIG, "runs": str(folder / "runs"), **config}
        nodes = [Node(app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
        return run(InProcessGrid(nodes, values), values)


def figures_of(run: Path, number: int) -> dict:
    """What a round measured."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    line = next(line for line in lines if line["round"] == number)
    return {key: line[key] for key in FIGURES}


def main(archive: Path) -> None:
    from tepal.strategies import STRATEGIES

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name in STRATEGIES:
            run = run_rounds(root / name, {"strategy": name, "num-server-rounds": ROUNDS, "fraction-evaluate": 0.0})
            copy = root / "copies" / name
            shutil.copytree(root / name, copy, symlinks=True)
            resumed = run_rounds(copy, {"resume": str(copy / "runs" / run.name), "num-server-rounds": ROUNDS + 1})
            (root / name / "third.json").write_text(json.dumps(figures_of(resumed, ROUNDS + 1)))
        shutil.rmtree(root / "copies")
        for unneeded in (*root.rglob("model.safetensors"), *root.rglob("records")):
            unneeded.unlink() if unneeded.is_file() else shutil.rmtree(unneeded)
        shutil.make_archive(str(archive).removesuffix(".tar.xz"), "xztar", root)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
