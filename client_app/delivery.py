"""Delivery of a run's result to the file that a node config names (`model-path`)."""

from __future__ import annotations

from collections.abc import Sequence
from logging import getLogger
from pathlib import Path

from flwr.app import ArrayRecord, Context
from safetensors import SafetensorError
from safetensors.torch import save_file

from tepal.client_app.local_client import LocalClient
from tepal.exchange.modes import join_modes
from tepal.host.files import replacing
from tepal.training.data.inputs import written_sizes

log = getLogger("flwr")


def deliver(records: Sequence[ArrayRecord], client: LocalClient, context: Context) -> None:
    """Write the final model, or all models of an ensemble, for `tepal predict`, if there is a `model-path`.

    If it cannot be written, this is an error in the client's log: the server has the result, too.
    """
    wanted = context.node_config.get("model-path")
    if wanted is None:
        return
    path = Path(str(wanted)).expanduser()
    metadata = {"format": "pt", **written_sizes(client.sizes), **client.described}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {name: value.contiguous() for name, value in join_modes(records).to_torch_state_dict().items()}
        with replacing(path) as partial:  # several clients on one machine may have the same path
            save_file(entries, partial, metadata)
        log.info("The final model is in %s.", path)
    except (OSError, SafetensorError, ValueError) as error:
        log.error("The final model cannot be written to model-path=%s: %s", wanted, error)
