"""Modules of a model by path: ancestors and descendants, configurations, and class names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tepal.exchange.layout import Names


def join(path: str, name: str) -> str:
    """Return the path of a child."""
    return f"{path}.{name}" if path else name


def below(path: str, top: str) -> bool:
    """Return whether `path` is `top` or one of its descendants."""
    return not top or path == top or path.startswith(top + ".")


def upwards(path: str) -> list[str]:
    """Return the path and its ancestors, with the model itself ("") last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def side_of(path: str) -> str:
    """Return the last of "encoder" and "decoder" in a path; "" for neither."""
    return next((part for part in reversed(path.split(".")) if part in ("encoder", "decoder")), "")


def children_of(modules: Mapping[str, nn.Module], path: str) -> Names:
    """Return the paths of a module's children."""
    return tuple(join(path, name) for name in modules[path]._modules)


def nearest(modules: Mapping[str, nn.Module], path: str, attribute: str) -> Any:
    """Return the attribute of the module at `path`, or of its nearest ancestor that has it; None for none."""
    return next((found for up in upwards(path) if (found := getattr(modules[up], attribute, None)) is not None), None)


def integer(source: Any, *keys: str) -> int:
    """Return the first of these attributes that is a positive integer; 0 for none."""
    values = (getattr(source, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def class_names(module: nn.Module) -> set[str]:
    """Return the names of the module's class and its base classes."""
    return {cls.__name__ for cls in type(module).__mro__}


def is_a(module: nn.Module, name: str) -> bool:
    """Return whether the module's class or a base class has this name."""
    return name in class_names(module)
