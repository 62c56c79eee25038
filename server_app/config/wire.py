"""Checks of the keys `wire-…`, which say in which encodings values are sent."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tepal.exchange.encodings import AUTO, RANKS
from tepal.server_app.config.common import EncodingConfig
from tepal.server_app.config.run_config import RunConfig
from tepal.strategies.robust import averages

_MORE_THAN_MEANS = ("scaffold", "fedbe", "feddyn", "fedacs", "fedamp")  # strategies that need more of the replies


def wire_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each key of an encoding that cannot be used with the others."""
    wire = config.wire
    for way, dtype, top_k in (("down", wire.down, wire.top_k_down), ("up", wire.up, wire.top_k)):
        if dtype in (*RANKS, AUTO) and top_k:
            key = "wire-top-k-down" if way == "down" else "wire-top-k"
            yield f"{key}={top_k:g}, and wire-dtype-{way} is {dtype!r}, which says how much is sent: set {key}=0"
    fixed = [f"wire-dtype-{way} is {d!r}" for way, d in (("down", wire.down), ("up", wire.up)) if d != AUTO]
    if wire.budget and fixed:
        yield (
            f"wire-budget={wire.budget!r} applies to both directions, and only {AUTO!r} can stay within it, but "
            f"{' and '.join(fixed)}: set wire-dtype={AUTO!r}, with wire-dtype-down and wire-dtype-up at 'same'"
        )


def wire_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a message for each key of an encoding that has no effect with the others."""
    wire, usual = config.wire, EncodingConfig()
    if wire.left_out != usual.left_out and AUTO not in (wire.down, wire.up):
        yield (
            f"wire-left-out={wire.left_out:g} has no effect: it is the share that {AUTO!r} leaves out, but "
            f"wire-dtype-down is {wire.down!r} and wire-dtype-up is {wire.up!r}. Set wire-dtype={AUTO!r}, or remove "
            "wire-left-out."
        )
    if not wire.encoding(config.rounds.seed).differences_down:
        for key in ("dtype_whole", "reference_megabytes"):
            if (value := getattr(wire, key)) != getattr(usual, key):
                yield (
                    f"wire-{key.replace('_', '-')}={json.dumps(value)} has no effect: it applies to differences sent "
                    f"to clients, but wire-dtype-down={wire.down!r} sends values. Set wire-dtype-down to int4, "
                    f"ternary, sign, a rank or {AUTO}, or set wire-top-k-down; otherwise remove this key."
                )
    if wire.up == AUTO and not wire.error_feedback and (why := _always_fed_back(config)):
        yield (
            f"wire-error-feedback=false has no effect with {why}: uploads in {AUTO!r} are not scaled up there, so that "
            "what they leave out would be lost for good. Clients keep it, and add it to their next upload."
        )


def _always_fed_back(config: RunConfig) -> str:
    """Return the key that makes clients keep what `auto` leaves out, and its value; "" if none does."""
    if not config.wire.left_out:
        return "wire-left-out=0"
    if config.wire.budget:
        return f"wire-budget={config.wire.budget!r}"
    if not averages(config.rounds.robust):
        return f"robust={config.rounds.robust!r}"
    return f"strategy={config.rounds.strategy!r}" if config.rounds.strategy in _MORE_THAN_MEANS else ""
