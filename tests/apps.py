"""Small ClientApps for tests: quickstart-style torch apps that know nothing of the server's strategy."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.client_app import apply_plan


def quickstart_app(make_model, mods, *, calls_apply_plan: bool, optimizer=None, clip: float = 0.0, examples=None):
    """A ClientApp in the style of Flower's PyTorch quickstart.

    Its data are drawn from the node's partition id; `optimizer(parameters, lr)` defaults to AdamW with weight decay.
    """
    app = ClientApp(mods=mods)
    optimizer = optimizer or (lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0.1))

    def load(context: Context):
        partition = int(context.node_config["partition-id"])
        generator = torch.Generator().manual_seed(partition)
        count = examples(partition) if examples else 8 + 4 * partition
        return torch.rand(count, 1, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = make_model()
        if calls_apply_plan:
            apply_plan(model, msg)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        images, labels = load(context)
        step = optimizer(model.parameters(), float(msg.content["config"].get("lr", 0.01)))
        loss = torch.zeros(())
        for _ in range(3):
            step.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images.to(_dtype(model))), labels)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            step.step()
        metrics = MetricRecord({"num-examples": len(labels), "train_loss": loss.item()})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg
        )

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model = make_model()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        images, labels = load(context)
        with torch.no_grad():
            right = (model(images.to(_dtype(model))).argmax(1) == labels).float().mean().item()
        metrics = MetricRecord({"num-examples": len(labels), "accuracy": right})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def _dtype(model):
    return next(model.parameters()).dtype
