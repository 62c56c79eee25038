"""What one client brings to a message: its data, its model, its device and settings, kept between messages."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from tepal import models
from tepal.client_app.config import TrainingConfig
from tepal.client_app.data import ClientData, DataConfig, load_client
from tepal.client_app.training import Batches, device_of
from tepal.exchange.mod import own_name, received
from tepal.exchange.plan import LAYER_BUDGET
from tepal.models.blocks import layout_of


@dataclass(frozen=True)
class Site:
    """One client in one message. `model` is one object per process: its weights are those of whoever loaded it last."""

    name: str
    model: nn.Module
    batches: Batches
    test: tuple[Tensor, Tensor]
    training: TrainingConfig
    node_config: Mapping[str, Any]
    shape: tuple[int, int, int]
    """Of an image: channels, height, width."""
    classes: int

    @staticmethod
    def of(msg: Message, context: Context) -> Site:
        """Load data and model. Settings in the message's config record go before the run config.

        Raises ValueError (DataError, ModelError, …) in words for the client's owner.
        """
        came = received(msg)
        name = came.manifest.client if came else own_name(context)
        settings: dict[str, Any] = {**context.run_config, **msg.content.config_records.get("config", {})}
        training = TrainingConfig.of(settings)
        if training.deterministic:
            torch.set_num_threads(1)
        device = device_of(_text(context.node_config.get("device")))
        # A process may serve many clients, as simulation's actors do, and one client many rounds.
        data = _load(DataConfig.from_run_config(settings), context.node_config, name)
        inputs, labels, test_inputs, test_labels = (tensor.to(device) for tensor in data.tensors)
        round_seed = zlib.crc32(f"{settings.get('seed', 0)}/{settings.get('server-round', 0)}/{name}".encode())
        return Site(
            name=name,
            model=_model(str(settings.get("model")), data.data.shape, data.data.classes).to(device),
            batches=Batches(inputs, labels, training.batch_size, round_seed),
            test=(test_inputs, test_labels),
            training=training,
            node_config=context.node_config,
            shape=data.data.shape,
            classes=data.data.classes,
        )

    @property
    def budget(self) -> dict[str, float]:
        """What this client can train of a model in a round, where its owner says so (`layer-budget`). ValueError."""
        if LAYER_BUDGET not in self.node_config:
            return {}
        budget = self.node_config[LAYER_BUDGET]
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not math.isfinite(budget):
            raise ValueError(f"this node's config says {LAYER_BUDGET}={budget!r}, which is not a finite number")
        return {LAYER_BUDGET: float(budget)}

    def figures(self, msg: Message) -> dict[str, float]:
        """What a client tells of itself when it is introduced. Raises ValueError for one that cannot take part."""
        if (came := received(msg)) is not None:
            here = layout_of(self.model)
            if different := came.manifest.layout.difference(here, mine="the server's", others="this client's"):
                raise ValueError(f"this client's model is not the server's: {different}")
        return {"num-examples": len(self.batches), "test-examples": len(self.test[1]), **self.budget}


@dataclass(frozen=True)
class _Loaded:
    data: ClientData
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]


_loaded: dict[str, _Loaded] = {}
_MOST_LOADED = 64  # clients whose examples one process keeps


def _load(config: DataConfig, node_config: Mapping[str, Any], name: str) -> _Loaded:
    key = json.dumps([config.model_dump(), dict(node_config), name], sort_keys=True, default=str)
    if key not in _loaded:
        data = load_client(config, node_config, client=name)
        tensors = tuple(
            torch.from_numpy(array)
            for array in (data.train.images, data.train.labels, data.test.images, data.test.labels)
        )
        if len(_loaded) >= _MOST_LOADED:
            _loaded.pop(next(iter(_loaded)))
        _loaded[key] = _Loaded(data, tensors)  # type: ignore[arg-type]
    return _loaded[key]


@lru_cache(maxsize=1)
def _model(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    return models.build(name, image_shape=shape, classes=classes, seed=0)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
