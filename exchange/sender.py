"""The server's half of the exchange: what to send to a client that holds some parts, and what its answer says.

The server keeps one record per client: the ids of the parts it holds, one for a block of a tree, as the client itself
said in its last answer. A part that is not in the record travels; a client that has lost one says so and gets it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from tepal.exchange.layout import Arrays, Layout, Names
from tepal.exchange.manifest import PARTS, RECORD, Header, Manifest, Parcel, ProtocolError, sign
from tepal.exchange.parts import Part, digest, pack, unpack
from tepal.exchange.plan import INTRODUCE, Plan, Reply, Tree

NO_MOD = (
    "it does not speak Tepal's exchange: its ClientApp must be made with mods=[partial_exchange] "
    "(from tepal.exchange import partial_exchange)"
)


class BadReply(ValueError):
    """A client's answer that must not be merged; the text says why."""


class NoMod(BadReply):
    """An answer of an app that knows nothing of this project."""

    def __init__(self, said: str = "") -> None:
        super().__init__(NO_MOD + (f". (The app said: {said})" if said else ""))


class ClientRefuses(BadReply):
    """The client itself, which calls itself `client`, gave no result, and said why."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(reason)
        self.client = client


@dataclass(frozen=True)
class Missing:
    """Part id → entries that the client lacks: send them in the same round. `notes`: why, in the client's words."""

    entries: Mapping[str, Names]
    notes: Names = ()


@dataclass
class Traffic:
    """Measured bytes of messages: `payload` of the entries' values, `overhead` of manifests and headers."""

    payload: int = 0
    overhead: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.payload + other.payload, self.overhead + other.overhead)

    @staticmethod
    def of(content: Mapping[str, object]) -> Traffic:
        """Bytes of what this project put into a message; an app's own records are not counted."""
        traffic = Traffic()
        parts = content.get(PARTS)
        if isinstance(parts, ArrayRecord):
            traffic.payload = sum(len(array.data) for array in parts.values())
        record = content.get(RECORD)
        if isinstance(record, Mapping):
            traffic.overhead = sum(len(value) for value in record.values() if isinstance(value, bytes))
        return traffic


class Sender:
    """Builds messages from plans, and reads their answers.

    Args:
        layout: of the model; all trees share it.
        blocks: label → entries, disjoint and complete: the grain in which parts are sent and kept.
        experiment: id of the experiment, which outlives a run that is resumed.
        record: name of the ArrayRecord under which the app expects its model.
        settings_record: name of the ConfigRecord under which it expects its settings.
    """

    def __init__(
        self,
        layout: Layout,
        blocks: Mapping[str, Names],
        *,
        experiment: str,
        record: str,
        settings_record: str = "config",
    ) -> None:
        if sorted(name for names in blocks.values() for name in names) != sorted(layout.names):
            raise ValueError("the blocks are not a partition of the model's entries")
        self.layout = layout
        self.blocks = blocks
        self.experiment = experiment
        self.record = record
        self.settings_record = settings_record
        self.held: dict[str, frozenset[str]] = {}
        """Client → ids of the parts that it holds."""
        self.current: dict[str, str] = {}
        """Client → id of the exchange whose reply was merged last: its personal state is as that exchange left it."""
        self.restorable: tuple[Mapping[str, str], ...] = ()
        """`current` as it was at each checkpoint that a run may still go back to."""
        # Arrays of a method's state are never changed in place, so identity stands for value: id → array and digest.
        # Weakly, so that what was made for one client is gone when it has been sent.
        self._digests: dict[int, tuple[weakref.ref[np.ndarray], bytes]] = {}
        # The part of each tree and block that was packed last: one that many clients get is packed once, and of a
        # tree that differs from client to client there is never more than one in memory.
        self._packed: dict[tuple[Tree, str], tuple[tuple[str, Names], Array]] = {}

    def new_round(self) -> None:
        """Forget packed parts, and digests of arrays that are gone."""
        self._digests = {number: found for number, found in self._digests.items() if found[0]() is not None}
        self._packed.clear()

    def content(
        self,
        plan: Plan,
        values: Callable[[Tree], Arrays],
        settings: Mapping[str, Any] | None = None,
        missing: Mapping[str, Names] | None = None,
    ) -> tuple[RecordDict, str]:
        """Manifest, arrays and settings for one plan, and the id of the exchange that they begin.

        Args:
            plan: what the client is asked.
            values: tree → the values that this client gets.
            settings: of the app.
            missing: of an answer to the same plan (`Missing.entries`): then only these entries travel.
        """
        held = self.held.get(plan.client, frozenset())
        parcels: list[Parcel] = []
        arrays: dict[str, Array] = {}
        for tree, names in plan.needs.items():
            tree_values = values(tree)
            wanted, kept = set(names), set(plan.keeps.get(tree, ()))
            for block, block_names in self.blocks.items():
                chosen = tuple(name for name in block_names if name in wanted)
                if not chosen:
                    continue
                part = Part(tree, block, chosen, tuple(self._digest(tree_values[name]) for name in chosen))
                if missing is not None:
                    sent = tuple(name for name in chosen if name in missing.get(part.id, ()))
                else:
                    sent = () if part.id in held else chosen
                if sent:
                    key, packed = self._packed.get((tree, block), (None, None))
                    if packed is None or key != (part.id, sent):
                        packed = pack(tree_values, sent)
                        self._packed[tree, block] = (part.id, sent), packed
                    arrays[str(len(parcels))] = packed
                parcels.append(Parcel(part, keep=wanted.issuperset(chosen) and kept.issuperset(chosen), sent=sent))
        manifest = Manifest(
            experiment=self.experiment,
            client=plan.client,
            round=plan.round,
            action=plan.action,
            record=self.record,
            layout=self.layout,
            parcels=tuple(parcels),
            trains=plan.trains,
            returns=plan.returns,
            remembers=plan.remembers,
            groups=plan.groups,
            options=plan.options,
            current=self.current.get(plan.client, ""),
            kept=tuple(sorted({then[plan.client] for then in self.restorable if plan.client in then})),
            nonce=os.urandom(8).hex(),
        )
        content = RecordDict({RECORD: manifest.to_record()})
        if arrays:
            record = ArrayRecord()
            for number, packed in arrays.items():  # not ArrayRecord(arrays): it makes new Arrays, to be hashed again
                record[number] = packed
            content[PARTS] = record
        content[self.settings_record] = ConfigRecord(dict(settings or {}))
        return content, sign(content)

    def read(self, plan: Plan, sent: str, message: Message, weighted_by: str = "num-examples") -> Reply | Missing:
        """Check an answer against its plan, entry by entry, and believe what it says the client holds.

        Args:
            plan: what the client was asked.
            sent: id of the exchange in which it was asked.
            message: the answer.
            weighted_by: metric that the reply's weight is taken from.

        Raises:
            BadReply: an answer that must not be merged. The record of what the client holds stays as it was.
        """
        if not message.has_content():
            raise BadReply("it is empty")
        content = message.content
        if RECORD not in content:
            raise NoMod
        try:
            header = Header.from_content(content, len(self.layout.entries))
        except ProtocolError as error:
            raise BadReply(str(error)) from error
        for what, got, expected in (
            ("experiment", header.experiment, self.experiment),
            ("client", header.client, plan.client or header.client),  # "": a node that has not introduced itself yet
            ("round", header.round, plan.round),
            ("action", header.action, plan.action),
        ):
            if got != expected:
                raise BadReply(f"it answers {what} {got!r}, and was asked for {expected!r}")
        if header.answers != sent:
            raise BadReply("it answers another message than the one it was sent, or that one was altered on its way")
        no_result = bool(header.missing or header.refused)
        metrics, vectors, not_finite = _metrics(content, header.metrics)
        parts = {} if no_result else self._parts(plan, header, content)
        examples = 0 if no_result or plan.action == INTRODUCE else _examples(metrics, weighted_by)
        if header.seal != header.seal_of(content):
            raise BadReply("it was altered on its way: its seal does not fit what it carries")
        if plan.client:
            self.held[plan.client] = frozenset(header.holds)
        if header.missing:
            return Missing(header.missing, header.notes)
        if header.refused:
            raise ClientRefuses(header.client, header.refused)
        return Reply(
            client=header.client,
            parts=parts,
            examples=examples,
            metrics=metrics,
            vectors=vectors,
            not_finite=not_finite,
            exchange=sent,
            holds=header.holds,
            notes=header.notes,
        )

    def _parts(self, plan: Plan, header: Header, content: Mapping[str, object]) -> dict[Tree, dict[str, np.ndarray]]:
        if foreign := sorted(set(header.parts) - set(plan.returns)):
            raise BadReply(f"it carries {foreign[0]!r}, which was not asked for")
        arrays = content.get(PARTS)
        parts: dict[Tree, dict[str, np.ndarray]] = {}
        for tree, names in plan.returns.items():
            shaped = header.parts.get(tree, ())
            got = [name for name, _, _ in shaped]
            if lacking := sorted(set(names) - set(got)):
                raise BadReply(f"{len(lacking)} entries of {tree!r} are missing, {lacking[0]!r} first")
            if foreign := sorted(set(got) - set(names)):
                raise BadReply(f"{len(foreign)} entries of {tree!r} were not asked for, {foreign[0]!r} first")
            if len(got) != len(names):
                raise BadReply(f"an entry of {tree!r} comes twice")
            for name, dtype, shape in shaped:
                entry = self.layout.by_name[name]
                if (dtype, shape) != (entry.dtype, entry.shape):
                    raise BadReply(
                        f"entry {name!r} is {dtype}{list(shape)}, and the model has it as "
                        f"{entry.dtype}{list(entry.shape)}"
                    )
            if not isinstance(arrays, ArrayRecord) or tree not in arrays:
                raise BadReply(f"it has no arrays for {tree!r}")
            try:
                parts[tree] = unpack(arrays[tree], shaped)
            except (TypeError, ValueError) as error:
                raise BadReply(str(error)) from error
            for name, array in parts[tree].items():
                if not _finite(array):
                    raise BadReply(f"entry {name!r} has values that are NaN or infinite")
        return parts

    def _digest(self, array: np.ndarray) -> bytes:
        found = self._digests.get(id(array))
        if found is None or found[0]() is not array:  # another array may have the id of one that is gone
            found = self._digests[id(array)] = weakref.ref(array), digest(array)
        return found[1]


MOST_EXAMPLES = 10**15
"""Largest weight of a reply: float64 sums of float32 values with larger ones could overflow."""

def _metrics(content: RecordDict, sealed: Names) -> tuple[dict[str, float], dict[str, tuple[float, ...]], Names]:
    """An answer's metrics: numbers, lists, names of those not finite. A NaN loss is no reason to refuse weights.

    A metric in one of the sealed records goes before one of the same name in another.
    """
    numbers: dict[str, float] = {}
    lists: dict[str, tuple[float, ...]] = {}
    not_finite: list[str] = []
    for _, record in sorted(content.metric_records.items(), key=lambda item: item[0] in sealed):
        for name, value in record.items():
            if isinstance(value, int | float) and np.isfinite(value):
                numbers[name] = value
            elif isinstance(value, list) and np.isfinite(value).all():
                lists[name] = tuple(float(one) for one in value)
            else:
                not_finite.append(name)
    return numbers, lists, tuple(not_finite)


def _examples(metrics: Mapping[str, float], weighted_by: str) -> int:
    examples = metrics.get(weighted_by)
    if examples is None:
        raise BadReply(f"its metrics have no finite number under {weighted_by!r}, which its weight is taken from")
    if not 1 <= examples <= MOST_EXAMPLES or examples != int(examples):
        raise BadReply(
            f"its metrics have {weighted_by}={examples:g}, and a weight is a whole number from 1 to {MOST_EXAMPLES:.0e}"
        )
    return int(examples)


def _finite(array: np.ndarray) -> bool:
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        # One pass without a temporary: a sum is finite only if every element is. An overflowing sum of finite
        # elements is rare, and then the elements are looked at one by one.
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
