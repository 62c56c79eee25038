"""The initial values of a run, made by a client itself, where `wire-start` is "made" (see `tepal.exchange.initial`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from tepal import models
from tepal.client_app.local_client import LocalClient
from tepal.exchange.layout import Arrays
from tepal.exchange.local import is_local
from tepal.exchange.mod import received
from tepal.exchange.modes import mode_of_tree, of_mode
from tepal.exchange.plan import Tree
from tepal.host.flower.contents import records_of
from tepal.models.blocks import find_blocks
from tepal.models.initial import patterns_of, seed_of_mode, sources_of
from tepal.models.pretrained import load_pretrained

_shared: dict[tuple[object, ...], Arrays] = {}  # those of a simulation's clients
_making = threading.Lock()


def initial_values(msg: Message, context: Context, tree: Tree) -> Arrays:
    """The raw `state_dict` with which a tree begins. Raises ValueError (ModelError, DataError) if it cannot be made.

    The clients of a simulation make it once in each process, and keep it until `forget`.
    """
    client, found = LocalClient.of(msg, context), received(msg)
    settings: dict[str, Any] = {**context.run_config, **records_of(msg.content, ConfigRecord).get("config", {})}
    mode = mode_of_tree(tree) if of_mode(tree) else 0
    if not is_local(msg):
        return _made(settings, client.sizes, mode)
    key = found.manifest.experiment if found else "", tuple(client.sizes.items()), mode
    with _making:
        if (made := _shared.get(key)) is None:
            made = _shared[key] = _made(settings, client.sizes, mode)
        return made


def forget() -> None:
    """Forget what was made: the clients of this process train now."""
    _shared.clear()


def _made(settings: Mapping[str, Any], sizes: Mapping[str, Any], mode: int) -> Arrays:
    model = models.build(str(settings["model"]), **sizes, seed=seed_of_mode(int(settings.get("seed", 0)), mode))
    if sources := sources_of(str(settings.get("pretrained", ""))):
        blocks = find_blocks(model, **patterns_of(settings))
        load_pretrained(model, blocks, sources[mode if len(sources) > 1 else 0], download=False)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}
