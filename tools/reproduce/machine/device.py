"""The device on which the clients of trials train."""

from __future__ import annotations

import torch

from tepal.training.loop import device_of

AUTO = "auto"
"""A GPU if there is one, else the CPU."""


def find_device(name: str) -> torch.device:
    """The device of a name: "auto", "cpu", "cuda", "cuda:1". Raises ValueError if this machine does not have it."""
    try:
        return device_of(None if name == AUTO else name)
    except ValueError as error:
        found = ", ".join([AUTO, "cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))])
        raise ValueError(f"--device {name} is not on this machine: choose one of {found}") from error


def described(device: torch.device, at_once: int) -> str:
    """A device with its model's name, and what trials on it at once share."""
    if device.type != "cuda":
        return str(device)
    shared = f"; {at_once} trials at once share its memory and its time" if at_once > 1 else ""
    return f"{device} ({torch.cuda.get_device_name(device)}){shared}"
