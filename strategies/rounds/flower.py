"""Between Flower's records and a method's arrays; and the hooks of Flower's strategies, which these have not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from tepal.exchange.layout import Arrays, Layout
from tepal.exchange.modes import join_modes, modes_of
from tepal.exchange.records import record_of
from tepal.strategies.method import ModelBlocks, ServerModel

if TYPE_CHECKING:
    from torch import nn


def blocks_of(model: nn.Module | ModelBlocks | None) -> ModelBlocks | None:
    """A model's blocks, found in a torch module where it is one."""
    if model is None or (hasattr(model, "query_key") and hasattr(model, "layout")):
        return model  # type: ignore[return-value]
    from tepal.models.blocks import find_blocks

    return find_blocks(model)  # type: ignore[arg-type]


def server_model(initial_arrays: ArrayRecord, blocks: ModelBlocks | None) -> ServerModel:
    """What a run starts from. Raises ValueError for arrays that are not those of the blocks' model."""
    models: list[dict[str, np.ndarray]] = []
    for record in modes_of(initial_arrays):
        models.append({name: array.numpy() for name, array in record.items()})
        for array in models[-1].values():
            array.flags.writeable = False
    name, layout = "the model", Layout.of_arrays(models[0])
    if blocks is not None:
        name, layout = blocks.model, blocks.layout
    for raw in models:
        if different := layout.difference(Layout.of_arrays(raw), mine="model", others="arrays"):
            raise ValueError(f"the initial arrays are not those of {name}: {different}")
    return ServerModel(name, layout, tuple(layout.split(raw) for raw in models), blocks)


def joined(models: Iterable[Arrays], layout: Layout) -> ArrayRecord:
    """What a run delivers, as Flower and apps know it: a raw `state_dict`, or those of an ensemble's modes."""
    return join_modes(record_of(layout.join(entries)) for entries in models)


class WithoutHooks(Strategy):
    """A Flower strategy that is its `start` alone."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise NotImplementedError(_HOOKS)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        raise NotImplementedError(_HOOKS)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise NotImplementedError(_HOOKS)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        raise NotImplementedError(_HOOKS)


_HOOKS = (
    "Tepal's strategies stream replies and talk with one client more than once a round, which Flower's hooks "
    "(configure_train, aggregate_train, …) cannot express: call start(), and override the method's functions "
    "(plan, values, merger) to change what is sent and merged."
)
