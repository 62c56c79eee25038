"""FedAvg in pfl-research: trains the same CNN on the same images as the other ways of `benchmarks/simulation.py`.

    python pfl_fedavg.py CONFIG.json

CONFIG has `images`, an .npz file, in which each of `clients` has the next `samples` images and trains on the first
`train` of them, in a new order in every round; `cohort`, the number of clients in a round, `rounds`, `batch-size`,
`learning-rate` and `model`. `output` is a JSON file for the time at which each round ended, and the accuracy on the
file's test set after the last one. pfl-research (pypi: pfl) trains the clients of a process one after the other, on a
GPU if there is one, otherwise with as many PyTorch threads as OMP_NUM_THREADS says.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from stock_model import MODELS


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    samples, batch = config["samples"], config["batch-size"]
    device = get_default_device()
    with np.load(config["images"]) as data:
        (inputs, labels), tests = (as_tensors(data[f"x_{of}"], data[f"y_{of}"], device) for of in ("train", "test"))

    def of_client(client: int) -> Dataset:
        own = (torch.randperm(config["train"]) + client * samples).to(device)
        return Dataset(raw_data=[inputs[own], labels[own]])

    network = MODELS[config["model"]]().to(device)
    network.loss = lambda x, y: F.cross_entropy(network(x), y)
    network.metrics = lambda x, y: {}
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    population = FederatedDataset(of_client, get_user_sampler("minimize_reuse", list(range(config["clients"]))))
    ends = [time.time()]

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
            ends.append(time.time())
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=config["rounds"], evaluation_frequency=10**9,
            train_cohort_size=config["cohort"], val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=population, val_data=population),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=config["learning-rate"], local_batch_size=batch,
            local_max_grad_norm=None,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=batch),
        callbacks=[Clock()],
    )
    with torch.no_grad():
        passes = zip(*(each.split(500) for each in tests), strict=True)
        correct = sum(int((network(x).argmax(1) == y).sum()) for x, y in passes)
    result = {"ended": ends, "accuracy": correct / len(tests[1])}
    Path(config["output"]).write_text(json.dumps(result))


def as_tensors(images: np.ndarray, labels: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, rows, columns) or (n, rows, columns, channels) as floats in [0, 1], channels second, and labels."""
    pixels = torch.from_numpy(images.astype(np.float32) / 255)
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return pixels.to(device), torch.from_numpy(labels.astype(np.int64)).to(device)


if __name__ == "__main__":
    main()
