"""Custom models: `model = "package.module:function"` in the run config.

The function returns an `nn.Module` that takes a batch and returns logits, or (batch, outputs) in a regression. It is
called with those of `image_shape`, `classes`, `vocabulary`, `features` and `outputs` that its signature has. Weights
are drawn from torch's global generator, which is seeded before the call. Server and clients import it by the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from tepal.models.registry import ModelError


def build_own(where: str, options: Mapping[str, Any]) -> nn.Module:
    """Build a custom model.

    Args:
        where: "package.module:function".
        options: sizes that are known; those in the function's signature are passed.

    Raises:
        ModelError: the function cannot be imported or called, fails, or returns something else than a module.
    """
    function = _import_function(where)
    try:
        built = function(**_arguments(where, function, options))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{where} raised {type(error).__name__}: {error}: correct the function") from error
    if not isinstance(built, nn.Module):
        raise ModelError(f"{where} returned {type(built).__name__}; it must return a torch.nn.Module")
    return built


def _import_function(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    if not module or not name.isidentifier():
        raise ModelError(f"model={where!r} is not a valid name: write package.module:function")
    try:
        found = getattr(import_module(module), name, None)
    except Exception as error:  # importing it runs its code
        raise ModelError(
            f"{where}: importing {module} failed: {type(error).__name__}: {error}. Install it on the server and on "
            "every client, or put it into the app and add it to fab-include"
        ) from error
    if not callable(found):
        raise ModelError(f"{where}: {module} has no function {name!r}: correct the name")
    return found  # type: ignore[no-any-return]


def _arguments(where: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
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
            f"{where} requires {', '.join(missing)}, but is called with {', '.join(options) or 'no arguments'}: give "
            "the other parameters a default"
        )
    return {name: value for name, value in options.items() if name in parameters}
