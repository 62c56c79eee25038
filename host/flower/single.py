"""Small messages as one object instead of one for each record and array: each object costs a request at every hop.

Flower writes a message as a tree of objects: its metadata, its records, their arrays, and the arrays' chunks. Its
protobuf of a message has a field for the content too, which Flower leaves out and ignores when it reads a tree. This
project's grid and worker use that field: a message in one object has its content there, and no children. A tree whose
field is empty, but not left out, says that its sender reads messages in one object. Each side sends them only to who
has said so; SuperLinks, SuperNodes and ClientApps of Flower alone get trees.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message
from flwr.app.message import make_message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.common.serde_utils import metadata_from_proto, metadata_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_head_values_from_object_content,
)

from .contents import records_of

LARGEST = 1 << 18
"""Bytes of a message's arrays, up to which it is sent as one object. Those of larger ones are uploaded once for all
receivers, and transferred in parallel."""


@dataclass(frozen=True)
class Written:
    """The object of a message itself, in the form in which it is sent. `children`: by id, as an InflatableObject's."""

    content: bytes
    children: dict[str, InflatableObject]

    @property
    def object_id(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def deflate(self) -> bytes:
        return self.content


def plain(message: Message) -> Written:
    """The object of a message as Flower writes it."""
    return Written(message.deflate(), message.children or {})


def written(message: Message, *, single: bool) -> Written:
    """The object of a message. `single`: the receiver reads messages in one object; it gets one if it is small."""
    if message.has_error():
        return plain(message)
    children = message.children or {}
    content = ProtoRecordDict()  # of a tree: says that this side reads messages in one object
    if single and _array_bytes(message) <= LARGEST:
        content, children = recorddict_to_proto(message.content), {}
    metadata = metadata_to_proto(message.metadata)
    metadata.message_id = ""  # it is the digest of this object
    body = ProtoMessage(metadata=metadata, content=content).SerializeToString(deterministic=True)
    head = HEAD_VALUE_DIVIDER.join((Message.__qualname__, ",".join(children), str(len(body))))
    return Written(head.encode() + HEAD_BODY_DIVIDER + body, children)


def read_single(content: bytes) -> Message | None:
    """The message that is in this object alone; None for one with children or an error.

    Raises ValueError if it is not the object of a message.
    """
    _, children, _ = get_object_head_values_from_object_content(content)
    proto = ProtoMessage.FromString(get_object_body(content, Message))
    if children or proto.HasField("error") or not proto.HasField("content"):
        return None
    return make_message(metadata=metadata_from_proto(proto.metadata), content=recorddict_from_proto(proto.content))


def reads_single(content: bytes) -> bool:
    """Whether the sender of this object of a message reads messages in one object."""
    return bool(ProtoMessage.FromString(get_object_body(content, Message)).HasField("content"))


def _array_bytes(message: Message) -> int:
    records = records_of(message.content, ArrayRecord).values()
    return sum(len(array.data) for record in records for array in record.values())
