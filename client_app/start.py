"""The initial values of a run, made by a client itself, where `wire-start` is "made" (see `tepal.exchange.starts`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from tepal import models
from tepal.client_app.local_client import LocalClient, loading
from tepal.exchange.layout import Arrays
from tepal.exchange.local import is_local
from tepal.exchange.modes import mode_of_tree
from tepal.exchange.plan import MODEL, Tree
from tepal.models.blocks import find_blocks
from tepal.models.initial import seed_of_mode, sources_of
from tepal.models.pretrained import load_pretrained
from tepal.models.registry import ModelError
from tepal.models.weights import shipped


def initial_values(msg: Message, context: Context, tree: Tree) -> Arrays:
    """The raw `state_dict` with which a tree begins. Raises ValueError (ModelError, DataError) if it cannot be made."""
    mode = 0 if tree == MODEL else mode_of_tree(tree)
    client = LocalClient.of(msg, context)
    settings: dict[str, Any] = {**context.run_config, **msg.content.config_records.get("config", {})}
    make = _of_run if is_local(msg) else _of_run.__wrapped__  # the clients of a simulation share it
    return make(
        str(settings["model"]), tuple(client.sizes.items()), int(settings.get("seed", 0)), mode,
        str(settings.get("pretrained", "")),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _of_run(name: str, sizes: tuple[tuple[str, Any], ...], seed: int, mode: int, pretrained: str) -> Arrays:
    with loading:  # building seeds torch's generator, which all threads share
        model = models.build(name, **dict(sizes), seed=seed_of_mode(seed, mode))
    if sources := sources_of(pretrained):
        source = sources[mode if len(sources) > 1 else 0]
        if not Path(source).expanduser().exists() and source not in shipped():
            raise ModelError(f"pretrained={source!r} is not on this machine")  # nothing is downloaded for it
        load_pretrained(model, find_blocks(model), source)
    return {key: tensor.numpy() for key, tensor in model.state_dict().items()}
