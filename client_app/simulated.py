"""The node config of a simulated client, whose own settings are in the run config."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from tepal.host.flower.contents import records_of
from tepal.training.node_settings import CLIENT_SETTINGS, settings_of

_PARTITION, _OWN_DATA = "partition-id", "data-path"


def simulated_node_config(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Add the settings that the run config has for this client's number to its node config; a Flower mod.

    A simulation's nodes have no node config but their number, `partition-id`. What a node config has takes precedence,
    and that of a site with data of its own (`data-path`) is never changed.

    Args:
        msg: the server's message, whose config record takes precedence over the run config.
        context: of the client.
        call_next: the next mod, or the app.

    Returns:
        The app's answer.

    Raises:
        ValueError: the value of `client-settings` cannot be read.
    """
    config = context.node_config
    if _PARTITION not in config or _OWN_DATA in config:
        return call_next(msg, context)
    sent: Any = records_of(msg.content, ConfigRecord).get("config", {}) if msg.has_content() else {}
    text = str(sent.get(CLIENT_SETTINGS, context.run_config.get(CLIENT_SETTINGS, "")))
    if not (own := settings_of(text, int(config[_PARTITION]))):
        return call_next(msg, context)
    ours = Context(context.run_id, context.node_id, {**own, **config}, context.state, context.run_config)
    reply = call_next(msg, ours)
    context.state = ours.state
    return reply
