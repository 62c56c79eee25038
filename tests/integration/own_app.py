"""This project's app as the deployments of tests run it, and what its runs must have in common with simulated ones."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tepal.models import build
from tepal.models.blocks import find_blocks
from tepal.tools.simulation.process_engine import ProcessEngine
from tests.integration.loopback import ROOT
from tests.lines import read_lines

CONFIG = {
    "strategy": "fedfrozen",
    "model": "tiny-vit",
    "dataset": "digits",
    "optimizer": "sgd",
    "learning-rate": 0.05,
    "local-epochs": 1,
    "schedule": "constant",
    "deterministic": True,
}


def vit():
    """The model of CONFIG as it starts: seed 42 is the run config's default."""
    return build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=42)


def bytes_of_model(clients: int) -> tuple[int, int]:
    """Bytes of the whole model, and of what is trained in frozen rounds, for that many clients."""
    blocks = find_blocks(vit())
    full, theta = clients * blocks.layout.nbytes(), clients * blocks.layout.nbytes(blocks.value)
    assert full - theta == clients * 2 * 2 * (64 * 64 + 64) * 4, "depth x (query and key) x (weight and bias) x float32"
    return full, theta


def simulated_in_process(folder: Path, clients: int, config: dict) -> Path:
    """Run the project's app in one process, without Flower's runtime; its run directory, in `folder`."""
    changes = {**config, "runs": str(folder)}
    with ProcessEngine(ROOT, clients, cache=folder / "cache") as engine:
        engine.run(changes, log=folder / "run.log")
    return (folder / "latest").resolve()


def assert_same_models(run: Path, other: Path) -> None:
    ours, theirs = load_file(run / "model.safetensors"), load_file(other / "model.safetensors")
    start = vit().state_dict()
    assert ours.keys() == theirs.keys() == start.keys()
    differences = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ours}
    print(f"largest difference of an element: {max(differences.values())}")
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6, err_msg=name)
    # A model that did not learn is no evidence. (Softmax does not see a key's bias.)
    learned = {name: float(np.abs(ours[name] - start[name].numpy()).max()) for name in ours if "key.bias" not in name}
    assert min(learned.values()) > 1e-4


def assert_same_measures(run: Path, other: Path) -> None:
    own = {"seconds", "seconds_train", "step_seconds", "bytes_overhead"}  # an experiment's id and times are a run's own
    for mine, theirs in zip(read_lines(run), read_lines(other), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if key not in own:
                assert mine[key] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value), key
