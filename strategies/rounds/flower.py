"""Conversions between Flower's records and a method's arrays, and a Flower strategy without hooks."""

from __future__ import annotations

from collections.abc import Iterable
from logging import getLogger
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

log = getLogger("flwr")


def blocks_of(model: nn.Module | ModelBlocks | None) -> ModelBlocks | None:
    """The blocks of a torch module, or the given blocks."""
    if model is None or (hasattr(model, "query_key") and hasattr(model, "layout")):
        return model  # type: ignore[return-value]
    from tepal.models.blocks import find_blocks

    return find_blocks(model)  # type: ignore[arg-type]


def server_model(initial_arrays: ArrayRecord, blocks: ModelBlocks | None) -> ServerModel:
    """The model that a run starts from. Raises ValueError for arrays of another model than the blocks'."""
    models: list[dict[str, np.ndarray]] = []
    for record in modes_of(initial_arrays):
        models.append({name: array.numpy() for name, array in record.items()})
        for array in models[-1].values():
            array.flags.writeable = False
        _warn_of(models[-1])
    name, layout = "the model", Layout.of_arrays(models[0])
    if blocks is not None:
        name, layout = blocks.model, blocks.layout
    for raw in models:
        if different := layout.difference(Layout.of_arrays(raw), mine="model", others="arrays"):
            raise ValueError(f"the initial arrays are not those of {name}: {different}")
    return ServerModel(name, layout, tuple(layout.split(raw) for raw in models), blocks)


def _warn_of(model: Arrays) -> None:
    for name, array in model.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            log.warning(
                "The initial %r has values that are NaN or infinite. Replies with this entry are refused. If it is a "
                "constant, such as a mask, register its buffer with persistent=False, so that it is not sent.", name
            )  # fmt: skip


def joined(models: Iterable[Arrays], layout: Layout) -> ArrayRecord:
    """The result of a run as an ArrayRecord: a raw `state_dict`, or those of an ensemble's modes."""
    return join_modes(record_of(layout.join(entries)) for entries in models)


class WithoutHooks(Strategy):
    """A Flower strategy that overrides `start` and has no hooks."""

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
    "Tepal's strategies merge replies as they arrive and may send a client several messages in a round, which Flower's "
    "hooks (configure_train, aggregate_train, …) do not allow: call start(), and override the method's functions "
    "(plan, values, merger) to change what is sent and merged."
)
