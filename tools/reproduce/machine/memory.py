"""Whether the trials that run at once can fit into this machine's memory, by what they need at least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import psutil
import torch

from tepal import models
from tepal.host.limits import Limits
from tepal.server_app.config import defaults
from tepal.tools.reproduce.experiment import Trial
from tepal.training.data.known import KNOWN

_BYTES = 4  # of a parameter
_STATES = {"sgd": 0, "adam": 2, "adamw": 2}  # arrays of the model's size that an optimizer keeps


class TooLittleMemory(RuntimeError):
    """The trials that would run at once need more memory than is free on this machine."""


@dataclass(frozen=True)
class Needs:
    """What a trial needs at least, in bytes, or several together.

    training: where clients train: weights, gradients and the optimizer's state; not activations and data.
    server: in main memory: the global model, or each mode of an ensemble, and one client's reply.
    """

    training: int = 0
    server: int = 0

    @property
    def total(self) -> int:
        """Of both."""
        return self.training + self.server


def check_memory(trials: Sequence[Trial], at_once: int, device: torch.device) -> None:
    """Raise TooLittleMemory if the largest trials cannot run at once, and ModelError if a model's library is missing.

    Args:
        trials: those that are to be computed.
        at_once: number of trials that run at the same time.
        device: where clients train.
    """
    largest = sorted(map(least_memory, trials), key=lambda needs: needs.total)[-at_once:]
    training, server = sum(needs.training for needs in largest), sum(needs.server for needs in largest)
    on_gpu = device.type == "cuda"
    _require(server + (0 if on_gpu else training), _free(), "main memory", len(largest))
    if on_gpu:
        _require(training, torch.cuda.mem_get_info(device)[0], f"memory of {device}", len(largest))


def least_memory(trial: Trial) -> Needs:
    """What a trial needs at least; nothing if its options tell neither model nor data set, which are then small."""
    config = {**defaults(), "model": "", **trial.options.get("config", {})}
    if not config["model"]:
        return Needs()
    parameters = _parameters(str(config["model"]), _shape(config))
    modes = int(config["fedensemble.modes"]) if config["strategy"] == "fedensemble" else 1
    momentum = config["optimizer"] == "sgd" and config["momentum"] > 0
    arrays = 2 + _STATES[config["optimizer"]] + momentum
    return Needs(_BYTES * parameters * arrays, _BYTES * parameters * (modes + 1))


def _require(least: int, free: int, where: str, trials: int) -> None:
    if least <= free:
        return
    what = "the largest trial needs" if trials == 1 else f"the {trials} largest trials need"
    fewer = "" if trials == 1 else "lower --at-once, "
    raise TooLittleMemory(
        f"{what} at least {least / 1e9:.1f} GB, without activations and data, and {free / 1e9:.1f} GB of {where} are "
        f"free: {fewer}end other programs, choose another --device, or use a larger machine"
    )


def _free() -> int:
    free, limit = int(psutil.virtual_memory().available), Limits().memory
    return min(free, limit) if limit else free


def _shape(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The shape of an image; None if the options do not tell it."""
    if text := str(config["image-shape"]):
        channels, height, width = map(int, text.split("x"))
        return channels, height, width
    known = next(filter(None, (KNOWN.get(str(config[key])) for key in ("dataset", "normalise"))), None)
    return known.shape if known else None


@lru_cache
def _parameters(name: str, shape: tuple[int, int, int] | None) -> int:
    """Number of a model's parameters with a head of two classes, without allocating them; 0 without a needed shape."""
    sizes: dict[str, Any] = {"image_shape": shape, "classes": 2, "vocabulary": 80, "features": 1, "outputs": 1}
    needs = models.NEEDS.get(models.find(name).kind, ("image_shape", "classes"))
    if shape is None and "image_shape" in needs:
        return 0
    with torch.device("meta"):
        model = models.build(name, seed=0, **{key: sizes[key] for key in needs})
    return sum(each.numel() for each in model.parameters())
