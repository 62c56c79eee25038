"""The server's half of the exchange: makes messages of plans, and checked replies of clients' answers.

A message carries the parts that the client's record does not list. In every answer the client reports which parts it
has cached, and whether one is missing that the record lists. The caller updates the records.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from tepal.exchange.bounds import BadReply, examples_of, metrics_of, notes_of, reply_bytes
from tepal.exchange.encodings import (
    AUTO,
    FIXED,
    PLAIN,
    Encoding,
    LeftOut,
    Wire,
    add_difference,
    bits_within,
    share_left_out,
)
from tepal.exchange.header import Header
from tepal.exchange.layout import Arrays, Layout, Names
from tepal.exchange.layouts import remembered
from tepal.exchange.local import is_local
from tepal.exchange.manifest import PARTS, RECORD, Manifest, Parcel, ProtocolError, other_version, write_id
from tepal.exchange.norms import SMALL, estimated_norms, integer_norms, squared_norms
from tepal.exchange.packer import Packer, Wanted
from tepal.exchange.parts import Part, listed, pieces_of, unpacked
from tepal.exchange.plan import EVALUATE, FINAL, INTRODUCE, Outgoing, Reply, Tree
from tepal.exchange.references import References
from tepal.exchange.secret import proof_of
from tepal.host.flower.contents import records_of
from tepal.host.text import LONGEST_NAME, visible

log = getLogger("flwr")


class NoMod(BadReply):
    """An answer of an app without the mod `partial_exchange`."""

    def __init__(self, said: str = "") -> None:
        super().__init__(
            "its ClientApp does not use Tepal's exchange: make it with mods=[partial_exchange] "
            "(from tepal.exchange import partial_exchange)" + (f". (The app reported: {said})" if said else "")
        )


class OtherVersion(BadReply):
    """An answer of a client whose version of Tepal has another protocol."""


class BadIntroduction(BadReply):
    """An introduction that the server cannot use. `client`: the client's own name; "" if it has none."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(reason)
        self.client = client


class ClientRefuses(BadReply):
    """An answer without a result. `client`: its own name; `reason`: in its words; `holds`: ids of its cached parts."""

    def __init__(self, client: str, reason: str, holds: Names = ()) -> None:
        super().__init__(reason)
        self.client = client
        self.holds = holds


@dataclass(frozen=True)
class Missing:
    """The answer of a client that lacks entries, which must be sent to it in the same round."""

    entries: Mapping[str, Names]
    """Part id → the missing entries. Empty: it lacks the layout, and could not read the message."""
    holds: Names = ()
    """Ids of the parts that the client has cached."""
    has_layout: bool = False
    """Whether it has stored the model's layout."""
    notes: Names = ()
    """Why they are missing, in the client's words."""


@dataclass(frozen=True)
class ClientRecord:
    """What the server knows of a client when it makes a message for it."""

    held: frozenset[str] = frozenset()
    """Ids of the parts that the client has cached, as it reported in its last answer."""
    has_layout: bool = False
    """Whether it has stored the model's layout."""
    current: str = ""
    """Id of the exchange whose reply was merged last, and which so made the client's current personal state."""
    restorable: Names = ()
    """The same for each checkpoint that the run may still restore."""


@dataclass(frozen=True)
class Exchange:
    """A message that was made: the data that reading its answer needs."""

    id: str
    outgoing: Outgoing
    upload: Wire
    """Encoding of the answer's entries."""
    sent: tuple[Names, ...]
    """Sent entries of each part of which any are sent."""
    rounded: Mapping[tuple[Tree, str], Part]
    """(tree, block) → the part as the client has it, where its values differ from the server's."""
    keeps: Names = ()
    """Ids of the parts that the client caches as soon as it has read the message."""
    replaces: Names = ()
    """Ids of the parts that it then has no longer."""
    left_out: float | None = None
    """The share of the squared norm that its differences in AUTO leave out; None if it has none."""
    in_budget: int = 0
    """Bytes of its parts that the budget of a round limits."""


class Sender:
    """Makes messages from plans, and reads their answers. What it knows of clients is in the packer's references.

    Args:
        layout: of the model; all trees share it.
        blocks: label → entries, a partition of the model's entries: the units of sending and caching.
        experiment: id of the experiment, which a resumed run keeps.
        record: name of the ArrayRecord in which the app expects its model.
        settings_record: name of the ConfigRecord in which it expects its settings.
        encoding: of downloads and uploads.
        references: what clients have, for an encoding of downloads as differences.

    Raises:
        ValueError: the blocks are not a partition of the entries.
    """

    def __init__(
        self,
        layout: Layout,
        blocks: Mapping[str, Names],
        *,
        experiment: str,
        record: str,
        settings_record: str = "config",
        encoding: Encoding | None = None,
        references: References | None = None,
    ) -> None:
        if sorted(name for names in blocks.values() for name in names) != sorted(layout.names):
            raise ValueError("the blocks are not a partition of the model's entries")
        self.layout = remembered(experiment, layout)
        self.blocks = blocks
        self.experiment = experiment
        self.record = record
        self.settings_record = settings_record
        self.encoding = encoding or Encoding()
        self.packer = Packer(self.encoding, references)
        self._warned = False  # of a budget that is too small
        self._trees = 0  # that the reply to one of its messages has, at most

    def add_initial(self, tree: Tree, values: Arrays) -> None:
        """Let clients that introduce themselves make the initial values of a tree, see `tepal.exchange.initial`."""
        for block, names in self.blocks.items():
            if names:
                self.packer.add_initial(Wanted(tree, block, names, values))

    def content(
        self,
        outgoing: Outgoing,
        client: ClientRecord = ClientRecord(),
        missing: Mapping[str, Names] | None = None,
    ) -> tuple[RecordDict, Exchange]:
        """The content of a message (manifest, arrays and settings), and the data for reading its answer.

        Args:
            outgoing: plan, values and settings.
            client: record of the plan's client.
            missing: `Missing.entries` of the answer to the same plan; only these entries are then sent. None or empty:
                all that the client does not hold, as in the first message.
        """
        plan, missing = outgoing.plan, missing or None
        self._trees = max(self._trees, len(plan.returns))
        parcels: list[Parcel] = []
        arrays: dict[str, Array] = {}
        rounded: dict[tuple[Tree, str], Part] = {}
        left_out: list[LeftOut] = []
        in_budget = 0
        exact = set(plan.exact)
        needed = {tree: self._by_block(names) for tree, names in plan.needs.items()}
        inexact = [names for parts in needed.values() for names in parts.values() if not exact.issuperset(names)]
        bits = self._bits(self.encoding.download, inexact, outgoing.clients)
        upload = self.encoding.upload if plan.returns else PLAIN
        upload = upload.averaged(0 if self.encoding.budget else outgoing.averaged, outgoing.rounds_apart)
        upload = replace(upload, bits=self._bits(upload, [*plan.returns.values()], outgoing.clients))
        for tree, parts in needed.items():
            values, kept = outgoing.values(tree), set(plan.keeps.get(tree, ()))
            for block, names in parts.items():
                wanted = Wanted(
                    tree, block, names, values, keep=kept.issuperset(names),
                    exact=exact.issuperset(names), final=bool(plan.options.get(FINAL)), bits=bits,
                )  # fmt: skip
                packed = self.packer.parcel(wanted, client.held, missing)
                if packed.data is not None:
                    arrays[str(len(parcels))] = packed.data
                    in_budget += len(packed.data.data) if packed.parcel.wire.bits and plan.action != EVALUATE else 0
                if packed.left_out:
                    left_out.append(packed.left_out)
                if packed.rounded:
                    rounded[tree, block] = packed.parcel.part
                parcels.append(packed.parcel)
        if plan.action == INTRODUCE:
            parcels += [Parcel(part, keep=True, sent=()) for part in self.packer.listed(self.blocks)]
        manifest = Manifest(
            experiment=self.experiment,
            plan=plan,
            record=self.record,
            layout=self.layout,
            parcels=tuple(parcels),
            current=client.current,
            kept=client.restorable,
            upload=upload,
            nonce=os.urandom(8).hex(),
        )
        content = RecordDict({RECORD: manifest.to_record(layout_known=client.has_layout)})
        if arrays:
            record = ArrayRecord()
            for number, array in arrays.items():  # ArrayRecord(arrays) would make new Arrays, to be hashed again
                record[number] = array
            content[PARTS] = record
        content[self.settings_record] = ConfigRecord(dict(outgoing.settings))
        sent = tuple(parcel.sent for parcel in parcels if parcel.sent)
        keeps = tuple(parcel.part.id for parcel in parcels if parcel.keep and plan.action != INTRODUCE)
        replaces = tuple(parcel.base for parcel in parcels if parcel.base)
        share = share_left_out(left_out)
        return content, Exchange(write_id(content), outgoing, upload, sent, rounded, keeps, replaces, share, in_budget)

    def most_reply_bytes(self) -> int:
        """The most bytes of a reply to one of the messages that were made."""
        return reply_bytes(self.layout, self._trees)

    def _by_block(self, names: Names) -> dict[str, Names]:
        """The entries by the block that they are in; only blocks that have any."""
        wanted = set(names)
        found = {block: tuple(name for name in of_block if name in wanted) for block, of_block in self.blocks.items()}
        return {block: chosen for block, chosen in found.items() if chosen}

    def _bits(self, wire: Wire, parts: Sequence[Names], clients: int) -> float:
        """Most bits for an encoded value in one direction of one client's exchange, which has these parts.

        Half of the round's budget is for each direction, and of that an equal share for each client. 0: no limit.
        """
        if not self.encoding.budget or wire.dtype != AUTO:
            return 0.0
        pieces = [piece for names in parts for piece in pieces_of(self.layout.shaped(names), wire)]
        encoded = [piece for piece in pieces if piece.codec]
        others = sum(piece.size * piece.width for piece in pieces if piece.codec is None)
        fixed = others + FIXED * len(encoded)
        if 2 * clients * fixed > self.encoding.budget and not self._warned:
            self._warned = True
            log.warning(
                "A budget of %s bytes a round is too small for %d clients: what is not encoded, and what each code has "
                "in any case, are %s bytes. One value for each code is sent. Raise wire-budget well above that.",
                f"{self.encoding.budget:,}", clients, f"{2 * clients * fixed:,}",
            )  # fmt: skip
        values = sum(piece.size for piece in encoded)
        return bits_within(self.encoding.budget / (2 * clients) - others, len(encoded), values)

    def read(self, exchange: Exchange, message: Message, weighted_by: str = "num-examples") -> Reply | Missing:
        """Check an answer against the plan, entry by entry.

        Args:
            exchange: that of the message which is answered.
            message: the answer.
            weighted_by: name of the metric with the reply's weight.

        Raises:
            BadReply: the answer must not be merged.
        """
        plan = exchange.outgoing.plan
        introduces_itself = plan.action == INTRODUCE and not plan.client
        if not message.has_content():
            raise BadReply("it is empty")
        content = message.content
        if RECORD not in content:
            raise NoMod
        if problem := other_version(content, here="server", there="client"):
            raise OtherVersion(problem)
        try:
            header = Header.from_content(content, len(self.layout.entries))
        except ProtocolError as error:
            raise BadReply(str(error)) from error
        for what, got, expected in (
            ("experiment", header.experiment, self.experiment),
            ("client", header.client, header.client if introduces_itself else plan.client),
            ("round", header.round, plan.round),
            ("action", header.action, plan.action),
        ):
            if got != expected:
                raise BadReply(f"it answers {what} {got!r} instead of {expected!r}")
        if header.answers != exchange.id:
            raise BadReply("it answers another message, or the message to it was altered on its way")
        no_result = bool(header.missing or header.refused)
        metrics, vectors, not_finite = metrics_of(records_of(content, MetricRecord), header.metrics)
        starts = {} if no_result or not plan.returns else self._starts(exchange)
        parts = {} if no_result else self._parts(exchange, header, content, starts)
        squares, value_squares = self._squares(exchange.outgoing, parts, starts)
        examples = 0 if no_result or plan.action == INTRODUCE else examples_of(metrics, weighted_by)
        if not is_local(message) and header.checksum != header.checksum_of(content):
            raise BadReply("its checksum does not match its content: it was damaged or altered on its way")
        if introduces_itself and not header.client.strip():
            raise BadIntroduction("", "it introduces itself with an empty name: set `name` in its node config")
        client = visible(header.client, LONGEST_NAME) if introduces_itself else plan.client
        if header.missing:
            unread = self.layout.id in header.missing
            return Missing({} if unread else header.missing, header.holds, header.layout, notes_of(header.notes))
        if header.refused:
            raise ClientRefuses(client, header.refused, header.holds)
        return Reply(
            client=client,
            parts=parts,
            examples=examples,
            metrics=metrics,
            vectors=vectors,
            not_finite=not_finite,
            exchange=exchange.id,
            holds=header.holds,
            has_layout=header.layout,
            notes=notes_of(header.notes),
            squares=squares,
            value_squares=value_squares,
            left_out=header.left_out if exchange.upload.dtype == AUTO else None,
            proof=proof_of(header.secret) if plan.action == INTRODUCE else "",
        )

    def _parts(
        self, exchange: Exchange, header: Header, content: Mapping[str, object], starts: Arrays
    ) -> dict[Tree, dict[str, np.ndarray]]:
        """The arrays of each tree. Raises BadReply."""
        plan, wire = exchange.outgoing.plan, exchange.upload
        arrays = content.get(PARTS, ArrayRecord())
        if not isinstance(arrays, ArrayRecord):
            raise BadReply(f"its {PARTS!r} is not an ArrayRecord")
        if foreign := sorted(set(arrays) - set(plan.returns)):
            raise BadReply(f"it carries {foreign[0]!r}, which was not requested")
        if lacking := [tree for tree in plan.returns if tree not in arrays]:
            raise BadReply(f"it has no arrays for {lacking[0]!r}")
        requested = {tree: self.layout.shaped(names) for tree, names in plan.returns.items()}
        if header.carries != listed(requested):
            raise BadReply("its arrays are not the requested entries, with their shapes and dtypes, in their order")
        parts: dict[Tree, dict[str, np.ndarray]] = {}
        for tree, shaped in requested.items():
            try:
                parts[tree] = dict(unpacked(arrays[tree], shaped, wire))
            except (TypeError, ValueError) as error:
                raise BadReply(str(error)) from error
            if wire.differences and tree == plan.model:
                for name, array in parts[tree].items():
                    if wire.encodes(name, array):
                        add_difference(starts[name], array)
        return parts

    def _squares(
        self, outgoing: Outgoing, parts: Mapping[Tree, Arrays], model: Arrays
    ) -> tuple[dict[Tree, dict[str, float]], dict[str, float]]:
        """`Reply.squares` and `Reply.value_squares`. Raises BadReply for values that are NaN or infinite."""
        squares: dict[Tree, dict[str, float]] = {}
        values: dict[str, float] = {}
        for tree, arrays in parts.items():
            starts = model if tree == outgoing.plan.model else {}
            if outgoing.measured or not starts:
                found = squared_norms(arrays, starts)
            else:
                norms = squared_norms(arrays, None)
                values = {name: norm for name, norm in norms.items() if arrays[name].size > SMALL}
                found = estimated_norms(arrays, starts)
            squares[tree] = {**found, **integer_norms(arrays, starts)}
        return squares, values

    def _starts(self, exchange: Exchange) -> Arrays:
        """The values of the model to which a reply's differences are added.

        They are those that the client decoded if it caches its sum, which server and client must know exactly;
        otherwise the server's own. Raises BadReply.
        """
        plan = exchange.outgoing.plan
        values = exchange.outgoing.values(plan.model)
        if plan.model not in plan.remembers:
            return values
        starts = dict(values)
        for (tree, _), part in exchange.rounded.items():
            if tree == plan.model:
                try:
                    starts.update(self.packer.starts(part, values))
                except KeyError as error:
                    raise BadReply("the server no longer knows what it started from") from error
        return starts
