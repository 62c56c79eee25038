"""A model's state from and to the ArrayRecords of messages; the only copy is the one into the model."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from tepal.exchange.records import record_of, values_of


def load_record(model: nn.Module, record: ArrayRecord) -> None:
    """As `model.load_state_dict(record.to_torch_state_dict())`. Raises RuntimeError for another model's state."""
    state = model.state_dict()
    values = {name: values_of(array) for name, array in record.items()}
    if values.keys() != state.keys() or any(array.shape != state[name].shape for name, array in values.items()):
        model.load_state_dict(record.to_torch_state_dict())
        return
    for name, tensor in state.items():
        set_values(tensor, values[name])


def set_values(tensor: Tensor, values: np.ndarray) -> None:
    """Copy values, which may be read-only, into a tensor without a gradient and of their shape, on any device."""
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
        np.copyto(tensor.numpy(), values, casting="unsafe")
    else:
        tensor.copy_(torch.from_numpy(np.array(values)))


def record_of_model(model: nn.Module) -> ArrayRecord:
    """The model's state; valid until the model is trained or loaded again."""
    return record_of({name: tensor.cpu().numpy() for name, tensor in model.state_dict().items()})
