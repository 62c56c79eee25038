"""What only a GPU shows: `python -m pytest tests/gpu`, on a machine with one. Skipped elsewhere."""

import numpy as np
import pytest
import torch

from tepal.client_app.app import app
from tepal.models.blocks import find_blocks
from tepal.server_app.config import defaults, read_run_config
from tepal.server_app.run import build_model, run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.reproduce.runs import measured
from tepal.tools.reproduce.scores import unpacked
from tepal.training.probing import layer_scores
from tests.lines import read_lines
from tests.quiet import quiet  # noqa: F401

CLIENTS = 2
CONFIG = {
    "dataset": "digits", "num-server-rounds": 3, "min-clients": CLIENTS, "local-steps": 2, "batch-size": 16,
    "fedfrozen.warmup-rounds": 1, "min-partition-size": 50, "evaluate-every": 3,
}  # fmt: skip


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    torch.cuda.reset_peak_memory_stats()

    return "cuda"


def ran(folder, device, clients=CLIENTS, **changes):
    config = {**defaults(), **CONFIG, **changes, "runs": str(folder / "runs")}
    nodes = [Node(app, {"partition-id": k, "num-partitions": clients, "device": device}) for k in range(clients)]
    directory = run(InProcessGrid(nodes, config), config)
    return read_lines(directory), config


@pytest.mark.parametrize("strategy", ["fedfrozen", "selective"])
def test_a_vision_transformer_of_real_size_in_bfloat16(tmp_path, device, strategy):
    """ViT-B/32 on images of 224 x 224, two clients on one GPU: what is frozen stays, bytes are as planned."""
    pytest.importorskip("transformers")
    lines, config = ran(
        tmp_path, device, strategy=strategy, model="openai/clip-vit-base-patch32", autocast="bf16",
        **{"image-shape": "3x224x224", "num-server-rounds": 2},
    )  # fmt: skip
    _, blocks = build_model(read_run_config({key: value for key, value in config.items() if key != "runs"}))
    last = lines[-1]
    assert last["clients_replied"] == CLIENTS and not last["refused"] and not last["lost"]
    assert np.isfinite(last["loss"])
    if strategy == "fedfrozen":
        assert last["bytes_up"] == CLIENTS * blocks.layout.nbytes(blocks.value)
    else:
        ways = [blocks.layout.nbytes((*layer, *blocks.head)) for layer in blocks.layers]
        assert CLIENTS * min(ways) <= last["bytes_up"] <= CLIENTS * max(ways)
    assert torch.cuda.max_memory_allocated() > 0


@pytest.mark.parametrize("strategy", ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs", "scaffold"])
def test_a_gpu_learns_what_a_cpu_learns(tmp_path, device, strategy):
    options = {"strategy": strategy, "optimizer": "sgd", "learning-rate": 0.05, "fedacs.quantile": 0.1}
    there, _ = ran(tmp_path / "gpu", device, **options)
    here, _ = ran(tmp_path / "cpu", "cpu", **options)
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.get("bytes_up") == cpu.get("bytes_up") or strategy == "selective"
    assert there[-1]["accuracy"] == pytest.approx(here[-1]["accuracy"], abs=0.05)


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_autocast_learns_as_well(tmp_path, device, autocast):
    exact, _ = ran(tmp_path / "exact", device, strategy="fedavg")
    less, _ = ran(tmp_path / "less", device, strategy="fedavg", autocast=autocast)
    assert less[-1]["train_loss"] == pytest.approx(exact[-1]["train_loss"], rel=0.1)


def test_layers_are_timed_on_the_gpu(tmp_path, device):
    lines, _ = ran(
        tmp_path, device, strategy="selective", **{"selective.costs": "milliseconds", "selective.budget": 1000.0}
    )
    assert lines[-1]["clients_replied"] == CLIENTS and not lines[-1]["refused"]


def test_gradients_are_the_cpus(device):
    config = read_run_config({**CONFIG, "model": "tiny-vit"})
    model, _ = build_model(config)
    blocks = find_blocks(model)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(16, 1, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)
    scores = []
    for where in ("cpu", device):
        batches = [(images.to(where), labels.to(where))]
        scores.append(layer_scores(model.to(where), batches, blocks.layers, blocks.layout, head=blocks.head))
    np.testing.assert_allclose(scores[1].scores, scores[0].scores, rtol=1e-2)


def test_several_clients_share_one_gpu(tmp_path, device):
    lines, _ = ran(tmp_path, device, clients=8, strategy="fedavg", **{"min-clients": 8})
    assert lines[-1]["clients_replied"] == 8


def test_a_trial_of_a_reproduction_is_scored_example_by_example(tmp_path, device):
    values = measured({**CONFIG, "strategy": "fedavg"}, CLIENTS, tmp_path, device=device)
    assert unpacked(values["correct"]).mean() == pytest.approx(values["server"], abs=0.01)
    assert torch.cuda.max_memory_allocated() > 0
