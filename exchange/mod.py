"""The client's half of the exchange, as a Flower mod: `ClientApp(mods=[partial_exchange])`.

It completes what the server sent with what this client keeps, checks every digest, and hands the app a full model under
the name it expects. Of the app's answer it sends back only what the plan asks for. An app needs to know nothing of it
but one line, where the plan freezes something: `apply_plan(model, msg)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from tepal.exchange.cache import DEFAULT_LIMIT, ClientCache, default_root
from tepal.exchange.encodings import EncodingError, Wire, add_difference
from tepal.exchange.layout import Arrays, Layout, Names
from tepal.exchange.manifest import PARTS, RECORD, Header, Manifest, verified_id
from tepal.exchange.parts import Part, digest, pack, shapes_of, unpack_checked, unpacked
from tepal.exchange.personal import PersonalState
from tepal.exchange.plan import INTRODUCE, TRAIN, Plan, Tree
from tepal.exchange.records import record_of, values_of

log = getLogger("flwr")

Next = Callable[[Message, Context], Message]
Introduce = Callable[[Message, Context], Mapping[str, int | float | list[int]]]

_RECEIVED = "_tepal_received"


@dataclass(frozen=True)
class Received:
    """What a message of Tepal brought: its manifest, and the complete values of every tree (read-only arrays)."""

    manifest: Manifest
    trees: Mapping[Tree, Arrays]
    personal: PersonalState
    """What this client keeps for itself: `load()` it, and `save()` it after training."""

    @property
    def plan(self) -> Plan:
        """What the client is asked."""
        return self.manifest.plan

    @property
    def layout(self) -> Layout:
        """The model's entries; all trees have them."""
        return self.manifest.layout

    @property
    def model(self) -> Arrays:
        """The complete values of the model."""
        return self.trees[self.plan.model]

    def record_of(self, tree: Tree, values: Arrays) -> ArrayRecord:
        """A tree as the app has it in a message: a whole model is a raw `state_dict`, a part of one its entries."""
        whole = tree == self.plan.model or len(values) == len(self.layout.entries)
        raw = self.layout.join(values) if whole else values
        return record_of(raw)

    @property
    def frozen(self) -> Names:
        """Entries of the model that the app must leave as they are."""
        trains = set(self.plan.trains)
        return tuple(name for name in self.model if name not in trains)


def received(msg: Message) -> Received | None:
    """What `partial_exchange` found in this message; None when the server's strategy is not one of Tepal's."""
    found = msg.__dict__.get(_RECEIVED)
    return found if isinstance(found, Received) else None


def own_name(context: Context) -> str:
    """What a client calls itself: `name` in its node config, else `client-<partition-id>`, else `node-<node id>`.

    A name under which its key is registered at the server goes before it.
    """
    config = context.node_config
    if "name" in config:
        return str(config["name"])
    if "partition-id" in config:
        return f"client-{config['partition-id']}"
    return f"node-{context.node_id}"


class PartialExchange:
    """A Flower mod (see the module's text). `partial_exchange` is one with the defaults.

    Args:
        introduce: called when the server first meets this client, before any round, with the server's message and the
            client's context. It may look at the client's data and settings; what it raises is told to the server as
            this client's refusal, and the figures it returns are told to it as metrics.
    """

    def __init__(self, introduce: Introduce | None = None) -> None:
        self.introduce = introduce

    def __call__(self, msg: Message, context: Context, call_next: Next) -> Message:
        if not msg.has_content() or RECORD not in msg.content:
            return call_next(msg, context)
        exchange = _Exchange(msg, context)
        if exchange.plan.action == INTRODUCE:
            return exchange.introduction(self.introduce)
        trees = exchange.complete()
        if trees is None:
            return exchange.answer(missing=exchange.missing)
        exchange.hand_over(trees)
        reply = call_next(msg, context)
        return reply if reply.has_error() else exchange.strip(reply, trees)


partial_exchange = PartialExchange()


class _Exchange:
    """One message and its answer."""

    def __init__(self, msg: Message, context: Context) -> None:
        self.msg = msg
        self.context = context
        self.id = verified_id(msg.content)
        self.manifest = Manifest.from_content(msg.content)
        self.plan = self.manifest.plan
        self.client = self.plan.client or own_name(context)
        root = context.node_config.get("cache-path")
        megabytes = context.node_config.get("cache-megabytes")
        self.cache = ClientCache(
            Path(str(root)) if root else default_root(),
            self.manifest.experiment,
            self.client,
            int(float(megabytes) * 1e6) if megabytes is not None else DEFAULT_LIMIT,
        )
        self.personal = PersonalState(
            self.cache.personal,
            current=self.manifest.current,
            keep=self.manifest.kept,
            exchange=self.id,
            round=self.plan.round,
            advances=self.plan.action == TRAIN,
        )
        self.missing: dict[str, Names] = {}

    def introduction(self, introduce: Introduce | None) -> Message:
        figures: Mapping[str, int | float | list[int]] = {}
        refused = ""
        if introduce is not None:
            self.msg.__dict__[_RECEIVED] = Received(self.manifest, {}, self.personal)
            try:
                figures = introduce(self.msg, self.context)
            except Exception as error:  # the client's own trouble, whatever it is, belongs into the server's log
                refused = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
                log.warning("%s cannot take part: %s", self.client, refused)
        return self.answer(refused=refused, content={"metrics": MetricRecord(dict(figures))} if figures else None)

    def complete(self) -> dict[Tree, dict[str, np.ndarray]] | None:
        """Values of all needed entries, from the message and the cache; None when `missing` had to be filled."""
        entries = self.manifest.layout.by_name
        arrays = self.msg.content.array_records.get(PARTS, ArrayRecord())
        trees: dict[Tree, dict[str, np.ndarray]] = {}
        arrived: list[tuple[Any, dict[str, np.ndarray]]] = []
        for number, parcel in enumerate(self.manifest.parcels):
            part = parcel.part
            values: dict[str, np.ndarray] = {}
            if parcel.sent:
                shaped = [(name, entries[name].dtype, entries[name].shape) for name in parcel.sent]
                digests = [part.digest_of[name] for name in parcel.sent]
                values = unpack_checked(arrays[str(number)], shaped, Wire(parcel.dtype), digests)
            if len(values) < len(part.names):
                values = {**self.cache.find(part), **values}
            if lacking := tuple(name for name in part.names if name not in values):
                self.missing[part.id] = lacking
            elif parcel.sent:
                arrived.append((parcel, values))
            # In one order, wherever they came from.
            trees.setdefault(part.tree, {}).update({name: values[name] for name in part.names if name in values})
        for parcel, values in arrived:
            if parcel.keep:
                self.cache.keep(parcel.part, values)
            elif self.missing:
                self.cache.keep_waiting(parcel.part, values)
        if self.missing:
            return None
        self.cache.drop_waiting()
        self.personal.prune()
        return trees

    def hand_over(self, trees: Mapping[Tree, Arrays]) -> None:
        """Replace what travelled by what the app expects: the raw `state_dict`, in its order, under its name."""
        content = self.msg.content
        del content[RECORD]
        content.pop(PARTS, None)
        came = self.msg.__dict__[_RECEIVED] = Received(self.manifest, trees, self.personal)
        for tree, values in trees.items():
            content[self.manifest.record if tree == self.plan.model else tree] = came.record_of(tree, values)

    def strip(self, reply: Message, trees: Mapping[Tree, Arrays]) -> Message:
        """The app's answer with only what the plan asks for; a refusal when it is not what the plan allows."""
        content = reply.content
        try:
            parts = {tree: self._returned(tree, names, content, trees) for tree, names in self.plan.returns.items()}
            packed = self._encoded(parts, trees)
            self.personal.commit()
            for tree, kept_as in self.plan.remembers.items():
                self._remember(tree, parts[tree], kept_as)
        except (_Refusal, EncodingError) as refusal:
            return self.answer(refused=str(refusal))
        except OSError as error:
            return self.answer(refused=f"its personal state could not be written to {self.cache.personal}: {error}")
        for name in list(content.array_records):
            del content[name]
        if packed:
            content[PARTS] = ArrayRecord(packed)
        return self.answer(parts=parts, content=content)

    def _encoded(self, parts: Mapping[Tree, dict[str, np.ndarray]], trees: Mapping[Tree, Arrays]) -> dict[Tree, Array]:
        """What travels of each tree. Values in `parts` that are remembered become what the server decodes."""
        wire, plan = self.manifest.upload, self.plan
        left_out = self.personal.load_left_out() if wire.feedback else {}
        packed: dict[Tree, Array] = {}
        for tree, values in parts.items():
            starts = trees[tree] if wire.differences and tree == plan.model else {}
            before = {name: left_out[f"{tree}/{name}"] for name in values if f"{tree}/{name}" in left_out}
            written = partial(_written, wire, values, starts, before)
            random = wire.random(plan.client, plan.round, tree)
            packed[tree] = pack(values, values, wire, written=written, random=random)
            if not (wire.feedback or (tree in plan.remembers and not wire.plain)):
                continue
            for name, read in unpacked(packed[tree], shapes_of(values, values), wire):
                if not wire.codec(read.dtype.name, read.shape):
                    continue
                if wire.feedback:
                    left_out[f"{tree}/{name}"] = written(name) - read
                if tree in plan.remembers:
                    add_difference(starts.get(name, np.zeros_like(read)), read)
                    values[name] = read
        if wire.feedback and parts:
            self.personal.save_left_out(left_out)
        return packed

    def _remember(self, tree: Tree, returned: Arrays, kept_as: Tree) -> None:
        """Keep what is returned of a tree as parts of another, in the blocks in which it came."""
        for parcel in self.manifest.parcels:
            part = parcel.part
            if part.tree == tree and returned.keys() >= set(part.names):
                digests = tuple(digest(returned[name]) for name in part.names)
                self.cache.keep(Part(kept_as, part.block, part.names, digests), returned)

    def _returned(
        self, tree: Tree, names: Names, content: RecordDict, trees: Mapping[Tree, Arrays]
    ) -> dict[str, np.ndarray]:
        layout = self.manifest.layout
        is_model = tree == self.plan.model
        record = self.manifest.record if is_model else tree
        records = content.array_records
        if record not in records and not (is_model and len(records) == 1):
            raise _Refusal(f"the app's answer has no ArrayRecord {record!r}; it has {sorted(records) or 'none'}")
        answer = records[record] if record in records else _only(records)
        raw = {name: values_of(array) for name, array in answer.items()}
        returned: dict[str, np.ndarray] = {}
        wanted = set(names)
        whole = is_model or len(wanted) == len(layout.entries)
        trains = set(self.plan.trains)
        changed: list[str] = []
        for entry in layout.entries if whole else [layout.by_name[name] for name in names]:
            source = entry.raw if whole else entry.name
            if source not in raw:
                if entry.name in wanted:
                    raise _Refusal(f"the app's answer lacks the tensor {source!r}")
                continue
            value = entry.of(raw[source]) if whole else raw[source]
            if value.shape != entry.shape or value.dtype.name != entry.dtype:
                raise _Refusal(
                    f"the app's answer has {entry.name!r} as {value.dtype.name}{list(value.shape)}, "
                    f"and the model has it as {entry.dtype}{list(entry.shape)}"
                )
            if entry.name in wanted:
                returned[entry.name] = value
            if is_model and entry.name not in trains and not np.array_equal(value, trees[tree][entry.name]):
                changed.append(entry.name)
        if changed:
            raise _Refusal(_CHANGED.format(count=len(changed), first=changed[0]))
        return returned

    def answer(
        self,
        *,
        parts: Mapping[Tree, Arrays] | None = None,
        content: Mapping[str, ArrayRecord | MetricRecord | ConfigRecord] | None = None,
        missing: Mapping[str, Names] | None = None,
        refused: str = "",
    ) -> Message:
        carried = RecordDict(dict(content or {}))
        header = Header(
            experiment=self.manifest.experiment,
            client=self.client,
            round=self.plan.round,
            action=self.plan.action,
            answers=self.id,
            holds=self.cache.holds(),
            parts={
                tree: tuple((name, array.dtype.name, array.shape) for name, array in values.items())
                for tree, values in (parts or {}).items()
            },
            missing=missing or {},
            refused=refused,
            notes=(*self.cache.notes, *filter(None, [self.personal.lost])),
            metrics=tuple(carried.metric_records),
        )
        carried[RECORD] = header.with_checksum(carried).to_record()
        return Message(carried, reply_to=self.msg)


def _written(wire: Wire, values: Arrays, starts: Arrays, left_out: Arrays, name: str) -> np.ndarray:
    """What is written of a value: where it is encoded, its difference from a start, and what was left out before."""
    value = values[name]
    if wire.codec(value.dtype.name, value.shape):
        if name in starts:
            value = value - starts[name]
        if name in left_out:
            value = value + left_out[name]
    return value


class _Refusal(Exception):
    """The app's answer is not one that the plan allows."""


_CHANGED = (
    "{count} entries that this round keeps frozen came back changed, {first!r} first. The app trained the whole model: "
    "call `apply_plan(model, msg)` (from tepal.client_app import apply_plan) in its training function, after the model "
    "is made and before the first step, so that frozen entries stay as they were received."
)


def _only(records: Mapping[str, ArrayRecord]) -> ArrayRecord:
    return next(iter(records.values()))
