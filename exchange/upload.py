"""Encoding of the arrays of a client's answer, with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from flwr.app import Array

from tepal.exchange.encodings import AUTO, LeftOut, Wire, add_difference, share_left_out
from tepal.exchange.layout import Arrays
from tepal.exchange.parts import pack, shapes_of, unpacked
from tepal.exchange.personal import PersonalState
from tepal.exchange.plan import Plan, Tree

_DIGITS = 5  # of the share that is left out, which travels


def encoded(
    plan: Plan,
    wire: Wire,
    parts: Mapping[Tree, dict[str, np.ndarray]],
    trees: Mapping[Tree, Arrays],
    personal: PersonalState,
) -> tuple[dict[Tree, Array], float | None]:
    """The packed part of each tree, and the share of the squared norm that they leave out (`auto` only).

    Args:
        plan: of the message that is answered.
        wire: the encoding.
        parts: the values that the plan returns. Those that the client caches are replaced by decoded ones.
        trees: the values that the client received.
        personal: has what earlier uploads left out, and gets what this one does.

    Raises:
        EncodingError: values that the encoding cannot represent.
        OSError: the personal state cannot be read.
    """
    left_out = personal.load_left_out() if wire.feedback else {}
    feeds, auto = wire.feedback and not wire.unbiased, wire.dtype == AUTO
    packed: dict[Tree, Array] = {}
    found: list[LeftOut] = []
    for tree, values in parts.items():
        starts = trees[tree] if wire.differences and tree == plan.model else {}
        before = {name: left_out[f"{tree}/{name}"] for name in values if feeds and f"{tree}/{name}" in left_out}
        written = partial(_written, wire, values, starts, before)
        random = wire.random(plan.client, plan.round, tree)
        packed[tree] = pack(values, values, wire, written=written, random=random)
        if not (feeds or auto or (tree in plan.remembers and not wire.plain)):
            continue
        measured = LeftOut(scaled=wire.unbiased)
        for name, read in unpacked(packed[tree], shapes_of(values, values), wire):
            if not wire.encodes(name, read):
                continue
            if feeds or auto:
                rest = (value := written(name)) - read
                if feeds:
                    left_out[f"{tree}/{name}"] = rest
                if auto:
                    measured.add(value, rest)
            if tree in plan.remembers:
                add_difference(starts.get(name, np.zeros_like(read)), read)
                values[name] = read
        found.append(measured)
    # Else the present version stays, as a link. Without one, the next upload would tell the server that it is lost.
    if wire.feedback and ((parts and (feeds or left_out)) or personal.begins):
        personal.save_left_out(left_out)
    share = share_left_out(found) if auto else None
    return packed, None if share is None else round(share, _DIGITS)


def _written(wire: Wire, values: Arrays, starts: Arrays, left_out: Arrays, name: str) -> np.ndarray:
    """The array to pack for an entry: an encoded one is a difference from its start, with what was left out before."""
    value = values[name]
    if wire.encodes(name, value):
        if name in starts:
            value = value - starts[name]
        if name in left_out:
            value = value + left_out[name]
    return value
