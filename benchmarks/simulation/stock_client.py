"""A client as in Flower's examples: load the model, train, return it. Its data is read once per process."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from stock_model import MODELS
from torch.utils.data import DataLoader, TensorDataset

app = ClientApp()


@cache
def examples(path: str) -> TensorDataset:
    with np.load(path) as data:
        images = torch.from_numpy(data["x_train"].astype(np.float32) / 255).unsqueeze(1)
        return TensorDataset(images, torch.from_numpy(data["y_train"]))


@app.train()
def train(msg: Message, context: Context) -> Message:
    config, first = context.run_config, context.node_config["partition-id"] * context.run_config["samples"]
    images, labels = examples(config["data"])[first : first + config["samples"] * 4 // 5]
    loader = DataLoader(TensorDataset(images, labels), config["batch-size"], shuffle=True)
    model = MODELS[config["model"]]()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), config["learning-rate"])
    for _ in range(config["local-epochs"]):
        for batch, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), targets).backward()
            optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(labels)}),
    }
    return Message(RecordDict(content), reply_to=msg)
