"""Settings that the config of a single node may have, and those of a run config for single clients of a simulation.

Imports no torch: the server and the command line check them before a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationError

from tepal.training.config import LocalSettings, TrainingConfig

CLIENT_SETTINGS = "client-settings"
"""Key of the run config: JSON, client's number or range "5-9" → its settings."""

_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")

Value = str | int | float | bool


class NodeSettings(LocalSettings):
    """Keys of a node config that one client of a simulation may have as well."""

    device: str = Field("", min_length=1, description="where it trains, such as cuda:1 or cpu")
    layer_budget: float = Field(0.0, allow_inf_nan=False, description="its budget under selective layers")
    data_path: str = Field("", min_length=1, description="a file or folder with its own data")
    model_path: str = Field("", min_length=1, description="a file to which the final model is written")
    cache_megabytes: float = Field(0.0, ge=0, allow_inf_nan=False, description="limit of its cache")


NODE_KEYS = tuple(str(field.alias) for field in NodeSettings.model_fields.values())
"""Keys of `NodeSettings`."""


_LOCAL_KEYS = {field.alias for field in LocalSettings.model_fields.values()}


def numbers_in(text: str) -> tuple[int, int]:
    """Return the first and last client of "3" or "5-9". Raises ValueError for other texts."""
    found = _RANGE.fullmatch(text)
    first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
    if int(first) > int(last):
        raise ValueError('expected a client\'s number from 0 on, such as 3, or a range, such as "5-9"')
    return int(first), int(last)


def settings_of(text: str, number: int) -> dict[str, Value]:
    """Return the settings of one client in the value of `client-settings`; {} if it has none.

    Keys that the server's check refuses are left out. Raises ValueError.
    """
    found: dict[str, Value] = {}
    for first, last, settings in _tables(text):
        if first <= number <= last:
            found |= {key: value for key, value in settings.items() if key in NODE_KEYS}
    return found


@lru_cache(maxsize=4)
def _tables(text: str) -> list[tuple[int, int, Mapping[str, Value]]]:
    tables: Mapping[str, Mapping[str, Value]] = json.loads(text) if text else {}
    return [(*numbers_in(key), settings) for key, settings in tables.items()]


def with_own_settings(
    settings: Mapping[str, Any], node_config: Mapping[str, Any], *, factor: float = 1.0
) -> TrainingConfig:
    """Return a client's settings of local training: the run's, and in their place those that the node config has.

    Args:
        settings: of the run, with this round's learning rate.
        node_config: the node's; keys other than those of `LocalSettings` are ignored. Its `local-epochs` also replace
            `local-steps` of the run.
        factor: of the schedule in this round; it multiplies the node's own learning rate.

    Raises:
        ValueError: a value of the node config is out of range; the text is for the node's owner.
    """
    own = {key: value for key, value in node_config.items() if key in _LOCAL_KEYS}
    try:
        checked = LocalSettings.model_validate(own).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        wrong = "; ".join(f"{one['loc'][0]}={one['input']!r}: {one['msg']}" for one in error.errors())
        raise ValueError(f"this node's config has {wrong}") from error
    if "learning-rate" in checked:
        checked["learning-rate"] *= factor
    if "local-epochs" in checked:
        checked.setdefault("local-steps", 0)  # the run's local-steps would replace them
    training = TrainingConfig.of({**settings, **checked})
    if checked and not training.local_steps and not training.local_epochs:
        raise ValueError("local-epochs=0 and local-steps=0: the client would not train; set one of them")
    return training
