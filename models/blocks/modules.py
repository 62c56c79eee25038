"""Modules of a model by their path: what lies above and below, configurations, and class names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tepal.exchange.layout import Names


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def below(path: str, top: str) -> bool:
    """Whether `path` is `top` or lies in it."""
    return not top or path == top or path.startswith(top + ".")


def upwards(path: str) -> list[str]:
    """The path and everything above it, the model itself ("") last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def side_of(path: str) -> str:
    """ "encoder" or "decoder", whichever a path names last; "" for neither."""
    return next((part for part in reversed(path.split(".")) if part in ("encoder", "decoder")), "")


def children_of(modules: Mapping[str, nn.Module], path: str) -> Names:
    return tuple(join(path, name) for name in modules[path]._modules)


def nearest(modules: Mapping[str, nn.Module], path: str, attribute: str) -> Any:
    """The attribute of the module at `path`, or of the nearest one above that has it."""
    return next((found for up in upwards(path) if (found := getattr(modules[up], attribute, None)) is not None), None)


def integer(told: Any, *keys: str) -> int:
    """The first of these attributes that is a positive integer; 0 for none."""
    values = (getattr(told, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def is_a(module: nn.Module, name: str) -> bool:
    return name in class_names(module)
