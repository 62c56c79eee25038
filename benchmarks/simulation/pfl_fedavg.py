"""FedAvg in pfl-research: trains the same CNN on the same images as the other ways of `benchmarks/simulation.py`.

python pfl_fedavg.py IMAGES.npz CLIENTS SAMPLES ROUNDS BATCH RATE MODEL OUTPUT

IMAGES has SAMPLES images of each client, of which the first four fifths are trained on, in a new order in every round.
OUTPUT is a JSON file with the time at which each round ended. No client is scored. pfl-research (pypi: pfl) trains the
clients of a process one after the other, here with as many PyTorch threads as OMP_NUM_THREADS says.
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
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from stock_model import MODELS


def main() -> None:
    images, clients, samples, rounds, batch = sys.argv[1], *map(int, sys.argv[2:6])
    rate, name, output = float(sys.argv[6]), sys.argv[7], Path(sys.argv[8])
    train = samples * 4 // 5
    with np.load(images) as data:
        inputs = torch.from_numpy(data["x_train"].astype(np.float32) / 255).unsqueeze(1)
        labels = torch.from_numpy(data["y_train"])

    def of_client(client: int) -> Dataset:
        own = torch.randperm(train) + client * samples
        return Dataset(raw_data=[inputs[own], labels[own]])

    network = MODELS[name]()
    network.loss = lambda x, y: F.cross_entropy(network(x), y)
    network.metrics = lambda x, y: {}
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    population = FederatedDataset(of_client, get_user_sampler("minimize_reuse", list(range(clients))))
    ends = [time.time()]

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
            ends.append(time.time())
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=clients, val_cohort_size=None
        ),
        backend=SimulatedBackend(training_data=population, val_data=population),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=rate, local_batch_size=batch, local_max_grad_norm=None
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=batch),
        callbacks=[Clock()],
    )
    output.write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
