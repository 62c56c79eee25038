"""Writing a folder of weights: model.safetensors in half precision, and its card."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save
from torch import nn

from tepal.host.files import replacing
from tepal.models.weights import CARD, WEIGHTS


def write_weights(folder: Path, model: nn.Module, facts: Mapping[str, Any]) -> Path:
    """Write the weights of a model and their card; return the card's path.

    Floating-point tensors are written as float16, others as they are; a tensor that several names share is written
    under the first of them.

    Args:
        folder: The folder, made if there is none.
        model: The model.
        facts: What the card says of it; parameters, bytes, digest and machine are added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    state = model.state_dict()
    kept = {name: _halved(state[name]) for name in names if name in state}
    content = save(kept)
    _write(folder / WEIGHTS, content)
    written = {
        **facts,
        "parameters": sum(each.numel() for each in model.parameters()),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "trained-on": f"{_machine()}, torch {torch.__version__}",
    }
    _write(folder / CARD, tomli_w.dumps(written).encode())
    return folder / CARD


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.half() if tensor.is_floating_point() else tensor


def _write(file: Path, content: bytes) -> None:
    with replacing(file) as partial:
        partial.write_bytes(content)


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, {platform.machine()}"
