"""FedFrozen over the exchange, every family: fused, transposed and tied tensors are frozen, stripped, completed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families import FAMILIES
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from tepal.client_app import apply_plan
from tepal.exchange import partial_exchange
from tepal.models.blocks import canonical_state, find_blocks
from tepal.strategies import FedFrozen
from tepal.strategies.in_process import InProcessGrid, Node


def floats(output: object) -> Iterator[Tensor]:
    """All floating-point tensors in a model's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from floats(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from floats(value)


def client_app(model: nn.Module, family: str) -> ClientApp:
    """Trains the one model object that it has, three steps of AdamW with strong weight decay, and clips."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        apply_plan(model, msg)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            outputs = floats(model(**FAMILIES[family].inputs()))
            sum((1 + int(context.node_config["partition-id"])) * out.square().sum() for out in outputs).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    return app


@pytest.mark.parametrize("family", FAMILIES)
def test_a_federated_run_freezes_query_and_key_and_trains_the_rest(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family].build()
    blocks = find_blocks(model)
    states: dict[int, dict[str, Tensor]] = {}

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        model.load_state_dict(arrays.to_torch_state_dict())  # strict: every raw tensor is there
        states[server_round] = {name: tensor.clone() for name, tensor in canonical_state(model).items()}

    history = []
    app = client_app(model, family)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    strategy = FedFrozen(warmup_rounds=1, model=model, fraction_evaluate=0, on_round=history.append)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3, evaluate_fn=keep)

    for name in blocks.query_key:
        assert states[3][name].numpy().tobytes() == states[1][name].numpy().tobytes(), name
    assert any(not torch.equal(states[1][name], states[0][name]) for name in blocks.query_key)
    assert any(not torch.equal(states[3][name], states[1][name]) for name in blocks.value_projection)
    layout = blocks.layout
    full, theta = layout.nbytes(), layout.nbytes(blocks.value)
    assert [report.up.payload for report in history[1:]] == [2 * full, 2 * theta, 2 * theta]
    assert [report.down.payload for report in history[1:]] == [2 * full, 2 * full, 2 * theta]
    assert not any(report.refused or report.lost for report in history)
