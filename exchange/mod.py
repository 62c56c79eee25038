"""The client's half of the exchange, a Flower mod: `ClientApp(mods=[partial_exchange])`.

It completes the received entries from the client's cache, checks every digest, and passes the complete model to the app
under the name that the app expects. From the app's answer it sends only what the plan returns. If the plan freezes
entries, the app needs one line more: `apply_plan(model, msg)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from tepal.exchange.cache import DEFAULT_LIMIT, ClientCache, default_root
from tepal.exchange.encodings import EncodingError
from tepal.exchange.header import Header
from tepal.exchange.initial import keep_initial
from tepal.exchange.layout import Arrays, Layout, Names, dtype_name
from tepal.exchange.layouts import Layouts
from tepal.exchange.local import is_local
from tepal.exchange.manifest import (
    ID,
    PARTS,
    RECORD,
    Manifest,
    Parcel,
    ProtocolError,
    UnknownLayout,
    other_version,
    verified_id,
)
from tepal.exchange.parts import Part, digest, digests_of, listed, shapes_of, unpack_checked
from tepal.exchange.personal import PersonalState
from tepal.exchange.plan import INTRODUCE, TRAIN, Plan, Tree
from tepal.exchange.records import record_of, values_of
from tepal.exchange.secret import own_secret
from tepal.exchange.upload import encoded
from tepal.host.flower.contents import records_of
from tepal.host.text import visible

log = getLogger("flwr")

Next = Callable[[Message, Context], Message]
Introduce = Callable[[Message, Context], Mapping[str, int | float | list[int]]]
Start = Callable[[Message, Context, Tree], Arrays | None]

_RECEIVED = "_tepal_received"


@dataclass(frozen=True)
class Received:
    """The content of a message of Tepal: the manifest, and the complete values of every tree (read-only arrays)."""

    manifest: Manifest
    trees: Mapping[Tree, Arrays]
    personal: PersonalState
    """This client's personal state: `load()` it, and `save()` it after training."""
    moving: set[str] = field(default_factory=set)
    """Frozen entries that training changes although nothing trains them, as `apply_plan` found. In the app's answer
    they are replaced by what it received."""

    @property
    def plan(self) -> Plan:
        """What the client must do."""
        return self.manifest.plan

    @property
    def layout(self) -> Layout:
        """The model's entries, which all trees have."""
        return self.manifest.layout

    @property
    def model(self) -> Arrays:
        """The complete values of the model."""
        return self.trees[self.plan.model]

    def record_of(self, tree: Tree, values: Arrays) -> ArrayRecord:
        """A tree as an app's record: a raw `state_dict` for a whole model, otherwise the entries."""
        whole = tree == self.plan.model or len(values) == len(self.layout.entries)
        raw = self.layout.join(values) if whole else values
        return record_of(raw)

    @property
    def frozen(self) -> Names:
        """Entries of the model that the app must not change."""
        trains = set(self.plan.trains)
        return tuple(name for name in self.model if name not in trains)


def received(msg: Message) -> Received | None:
    """What `partial_exchange` read from this message; None if the server's strategy is not one of Tepal's."""
    found = msg.__dict__.get(_RECEIVED)
    return found if isinstance(found, Received) else None


def own_name(context: Context) -> str:
    """A client's own name: `name` in its node config, else `client-<partition-id>`, else `node-<node id>`.

    A name under which its key is registered at the server takes precedence.
    """
    config = context.node_config
    if "name" in config:
        return str(config["name"])
    if "partition-id" in config:
        return f"client-{config['partition-id']}"
    return f"node-{context.node_id}"


class PartialExchange:
    """The client's half of the exchange as a Flower mod; `partial_exchange` has the defaults.

    Args:
        introduce: called with the server's message and the client's context, when the client introduces itself, before
            it takes part in a round. It may check the client's data and settings. The figures that it returns are sent
            to the server as metrics; if it raises, the client cannot take part, and the server receives the reason.
        start: called with the message, the context and a tree ("model"; "mode/3" of an ensemble; "mixture" with FedACS
            and FedAMP), after `introduce`, if the server lets clients make the initial values themselves. It returns
            the raw `state_dict` with which this tree begins, or None. Values that are bit-identical to the server's are
            then not sent to this client.
    """

    def __init__(self, introduce: Introduce | None = None, start: Start | None = None) -> None:
        self.introduce = introduce
        self.start = start

    def __call__(self, msg: Message, context: Context, call_next: Next) -> Message:
        if not msg.has_content() or RECORD not in msg.content:
            return call_next(msg, context)
        other = other_version(msg.content, here="client", there="server")
        try:
            exchange = _ClientExchange(msg, context)
        except ProtocolError as error:
            raise ProtocolError(other or str(error)) from error
        if other:
            return exchange.answer(refused=other)
        if exchange.plan.action == INTRODUCE:
            return exchange.introduction(self.introduce, self.start)
        trees = None if exchange.missing else exchange.complete()
        if trees is None:
            return exchange.answer()
        exchange.hand_over(trees)
        reply = call_next(msg, context)
        return reply if reply.has_error() else exchange.strip(reply, trees)


partial_exchange = PartialExchange()


class _ClientExchange:
    """One message to a client, and its answer."""

    def __init__(self, msg: Message, context: Context) -> None:
        self.msg = msg
        self.context = context
        self.id = str(msg.content[RECORD][ID]) if is_local(msg) else verified_id(msg.content)
        self.missing: dict[str, Names] = {}
        named = context.node_config.get("cache-path")
        root = Path(str(named)) if named else default_root()
        self.layouts = Layouts(root)
        try:
            self.manifest = Manifest.from_content(msg.content, self.layouts.find)
            self.stored = self.layouts.keep(self.manifest.experiment, self.manifest.layout)
        except UnknownLayout as error:
            self.manifest, self.stored = error.manifest, False
            self.missing[error.id] = ()
        self.plan = self.manifest.plan
        self.client = self.plan.client or own_name(context)
        megabytes = context.node_config.get("cache-megabytes")
        self.cache = ClientCache(
            root,
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
            durable=not is_local(msg),
        )

    def introduction(self, introduce: Introduce | None, start: Start | None) -> Message:
        figures: Mapping[str, int | float | list[int]] = {}
        refused = ""
        self.cache.drop_ended()
        self.msg.__dict__[_RECEIVED] = Received(self.manifest, {}, self.personal)
        if introduce is not None:
            try:
                figures = introduce(self.msg, self.context)
            except Exception as error:  # any problem of the client belongs in the server's log
                refused = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
                log.warning("%s cannot take part: %s", visible(self.client), visible(refused))
        if start is not None and not refused:
            keep_initial(self.manifest, self.cache, partial(start, self.msg, self.context))
        content = {"metrics": MetricRecord(dict(figures))} if figures else None
        return self.answer(refused=refused, content=content, secret="" if self.plan.client else self._secret())

    def _secret(self) -> str:
        """The secret of a client whose key is not registered; "" if it cannot be kept."""
        try:
            return own_secret(self.cache.secret, self.manifest.experiment, self.client)
        except OSError as error:
            note = f"this client cannot keep its name for the run, because its secret cannot be stored: {error}"
            log.warning("%s", note)
            self.cache.notes.append(note)
            return ""

    def complete(self) -> dict[Tree, dict[str, np.ndarray]] | None:
        """Values of all needed entries, from the message and the cache; None if some are `missing`."""
        arrays = records_of(self.msg.content, ArrayRecord).get(PARTS, ArrayRecord())
        trees: dict[Tree, dict[str, np.ndarray]] = {}
        arrived: list[tuple[Parcel, dict[str, bytes], dict[str, np.ndarray]]] = []
        for number, parcel in enumerate(self.manifest.parcels):
            part = parcel.part
            values: dict[str, np.ndarray] = {}
            digests: dict[str, bytes] = {}
            if parcel.sent:
                shaped = self.manifest.layout.shaped(parcel.sent)
                checked = None if is_local(self.msg) and not parcel.keep else part
                starts = partial(self.cache.base, parcel.base, part)
                try:
                    values, digests = unpack_checked(
                        arrays[str(number)], shaped, parcel.wire, checked, parcel.base, starts
                    )
                except (KeyError, ValueError) as error:  # what was damaged on its way is sent again
                    log.warning("Block %r cannot be read: %s", part.block, error)
            if len(values) < len(part.names):
                values = {**self.cache.find(part), **values}
            if lacking := tuple(name for name in part.names if name not in values):
                self.missing[part.id] = lacking
            elif parcel.sent:
                arrived.append((parcel, digests, values))
            # In the part's order, whether from the message or from the cache.
            trees.setdefault(part.tree, {}).update({name: values[name] for name in part.names if name in values})
        for parcel, digests, values in arrived:
            if parcel.keep or self.missing:
                part = parcel.part if parcel.part.digests else parcel.part.with_digests(digests or digests_of(values))
                self.cache.keep(part, values, waiting=not parcel.keep)
        if self.missing:
            return None
        self.cache.drop_waiting()
        self.personal.prune()
        return trees

    def hand_over(self, trees: Mapping[Tree, Arrays]) -> None:
        """Replace the message's parts by the records that the app expects, with a raw `state_dict` as its model."""
        content = self.msg.content
        del content[RECORD]
        content.pop(PARTS, None)
        found = self.msg.__dict__[_RECEIVED] = Received(self.manifest, trees, self.personal)
        for tree, values in trees.items():
            content[self.manifest.record if tree == self.plan.model else tree] = found.record_of(tree, values)

    def strip(self, reply: Message, trees: Mapping[Tree, Arrays]) -> Message:
        """The app's answer with only what the plan returns; a refusal if the plan does not allow the answer."""
        content = reply.content
        try:
            parts = {tree: self._returned(tree, names, content, trees) for tree, names in self.plan.returns.items()}
            packed, left_out = encoded(self.plan, self.manifest.upload, parts, trees, self.personal)
            self.personal.commit()
            for tree, kept_as in self.plan.remembers.items():
                self._remember(tree, parts[tree], kept_as)
        except (_Refusal, EncodingError) as refusal:
            return self.answer(refused=str(refusal))
        except OSError as error:
            return self.answer(refused=f"its personal state could not be written to {self.cache.personal}: {error}")
        for name in records_of(content, ArrayRecord):
            del content[name]
        if packed:
            content[PARTS] = ArrayRecord(packed)
        return self.answer(parts=parts, content=content, left_out=left_out)

    def _remember(self, tree: Tree, returned: Arrays, kept_as: Tree) -> None:
        """Cache the returned values of a tree as parts of the tree `kept_as`, in the blocks of the message."""
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
        records = records_of(content, ArrayRecord)
        if record not in records and not (is_model and len(records) == 1):
            raise _Refusal(f"the app's answer has no ArrayRecord {record!r}; it has {sorted(records) or 'none'}")
        raw = {name: values_of(array) for name, array in records.get(record, next(iter(records.values()))).items()}
        returned: dict[str, np.ndarray] = {}
        wanted = set(names)
        whole = is_model or len(wanted) == len(layout.entries)
        trains = set(self.plan.trains)
        found = received(self.msg)
        moving = found.moving if found and is_model else ()
        changed: list[str] = []
        for entry in layout.entries if whole else [layout.by_name[name] for name in names]:
            source = entry.raw if whole else entry.name
            if source not in raw:
                if entry.name in wanted:
                    raise _Refusal(f"the app's answer lacks the tensor {source!r}")
                continue
            value = entry.of(raw[source]) if whole else raw[source]
            if value.shape != entry.shape or dtype_name(value.dtype) != entry.dtype:
                raise _Refusal(
                    f"in the app's answer {entry.name!r} is {value.dtype.name}{list(value.shape)}; in the model it is "
                    f"{entry.dtype}{list(entry.shape)}"
                )
            if entry.name in moving:
                value = trees[tree][entry.name]
            if entry.name in wanted:
                returned[entry.name] = value
            if is_model and entry.name not in trains and not _equal(value, trees[tree][entry.name]):
                changed.append(entry.name)
        if changed:
            raise _Refusal(_CHANGED.format(count=len(changed), first=changed[0]))
        return {name: returned[name] for name in names}  # in the order in which the server reads them

    def answer(
        self,
        *,
        parts: Mapping[Tree, Arrays] | None = None,
        content: Mapping[str, ArrayRecord | MetricRecord | ConfigRecord] | None = None,
        refused: str = "",
        left_out: float | None = None,
        secret: str = "",
    ) -> Message:
        carried = RecordDict(dict(content or {}))
        header = Header(
            experiment=self.manifest.experiment,
            client=self.client,
            round=self.plan.round,
            action=self.plan.action,
            answers=self.id,
            holds=self.cache.holds(),
            carries=listed({tree: shapes_of(values, values) for tree, values in (parts or {}).items()}),
            missing={} if refused else self.missing,
            refused=refused,
            notes=(*self.layouts.notes, *self.cache.notes, *self.personal.notes),
            layout=self.stored,
            left_out=left_out,
            metrics=tuple(records_of(carried, MetricRecord)),
            secret=secret,
        )
        header = header.unchecked() if is_local(self.msg) else header.with_checksum(carried)
        carried[RECORD] = header.to_record()
        return Message(carried, reply_to=self.msg)


def _equal(value: np.ndarray, before: np.ndarray) -> bool:
    """Whether two arrays have the same values, among which NaN may be."""
    return np.array_equal(value, before) or (value.dtype.kind in "fc" and np.array_equal(value, before, equal_nan=True))


class _Refusal(Exception):
    """The plan does not allow the app's answer."""


_CHANGED = (
    "{count} entries that this round freezes were changed, {first!r} first. The app trained the whole model: call "
    "`apply_plan(model, msg)` (from tepal.client_app import apply_plan) in its training function, after the model is "
    "made and before the first step, so that frozen entries are not trained."
)
