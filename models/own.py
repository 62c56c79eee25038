"""A model of one's own: `model = "package.module:function"` in the run config.

The function returns an `nn.Module` that takes a batch and returns logits, or (batch, outputs) in a regression. It is
called with those of `image_shape`, `classes`, `vocabulary`, `features` and `outputs` that its signature has; weights
come from torch's global generator, which is seeded for it. Server and clients import it under the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from tepal.models.registry import ModelError


def build_own(where: str, options: Mapping[str, Any]) -> nn.Module:
    """Call the function at `where` ("package.module:function"). Raises ModelError, whatever goes wrong in it."""
    function = _imported(where)
    try:
        built = function(**_taken(where, function, options))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{where} failed: {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        raise ModelError(f"{where} returned {type(built).__name__}; it must return a torch.nn.Module")
    return built


def _imported(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    if not module or not name.isidentifier():
        raise ModelError(f"{where!r} is no place of a model: expected is package.module:function")
    try:
        found = getattr(import_module(module), name, None)
    except Exception as error:  # importing it runs its code
        raise ModelError(
            f"{where}: importing {module} failed: {type(error).__name__}: {error}. It must be installed on the server "
            "and on every client, or lie in the app, whose fab-include must name it"
        ) from error
    if not callable(found):
        raise ModelError(f"{where}: {module} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _taken(where: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(options)
    if missing := [
        name
        for name, parameter in parameters.items()
        if name not in options
        and parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
    ]:
        raise ModelError(
            f"{where} needs {', '.join(missing)}, and is given {', '.join(options) or 'nothing'}: give the others a "
            "default"
        )
    return {name: value for name, value in options.items() if name in parameters}
