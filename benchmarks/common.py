"""Shared by several benchmarks: models by name, and a client app that replaces training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from tepal import models
from tepal.exchange import partial_exchange, received
from tepal.models.libraries import import_transformers


def transformers_model(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = import_transformers(name)
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
        return model

    return build


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny-vit": lambda: models.build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0),
    "electra-small": transformers_model("ElectraModel", "ElectraConfig"),
    "bert-base": transformers_model("BertModel", "BertConfig", **BASE),
    "vit-b-32": transformers_model("ViTModel", "ViTConfig", image_size=224, patch_size=32, **BASE),
}


def nudging_app(step: float = 1e-3) -> ClientApp:
    """A ClientApp that adds `step` to the entries that the plan lets it train."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        plan = received(msg)
        frozen = {plan.layout.by_name[name].raw for name in plan.frozen} if plan else set()
        arrays = ArrayRecord()
        for name, array in msg.content["arrays"].items():
            values = array.numpy()
            unchanged = name in frozen or values.dtype.kind != "f"
            arrays[name] = array if unchanged else Array(values + values.dtype.type(step))
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return app
