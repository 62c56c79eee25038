"""Send and receive the objects of a message with fewer hashes and copies of array chunks than Flower.

Flower hashes a chunk when it is cut and again for every message that contains it, keeps copies of all chunks that wait
to be sent, and assembles an array from its chunks by two more copies. Here a chunk is hashed once, few chunks are
copied at a time, and a chunk that arrives is written to its place in the array.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES, HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents

from .contents import records_of
from .single import Written, read_single

_HUGE = 1 << 22  # bytes: larger arrays are put into huge pages

Pull = Callable[[str], bytes]
"""Flower's function from object id to content."""
PullAll = Callable[[list[str], Pull], dict[str, bytes]]
"""Flower's `pull_objects`."""


class ReleaseResponses:
    """An interceptor of Flower's HTTP client that frees the memory of responses.

    A response and its stream refer to each other, so the megabytes of the response and its request would stay until
    Python's garbage collector runs. The stream of a response that was read is therefore replaced.
    """

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        response = call_next(context)
        if response.is_stream_consumed:
            response.stream = httpx.ByteStream(b"")
        return response


class _Bytes:
    """Counts the bytes of a message's objects and arrays. `most`: the limit; None if there is none."""

    def __init__(self, object_id: str, most: int | None) -> None:
        self._object_id, self._most = object_id, most
        self._count = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Raise ObjectPullError if the message has more bytes than the limit with these ones."""
        with self._lock:
            self._count += count
            if self._most is not None and self._count > self._most:
                reason = f"the message has at least {self._count:,} bytes; at most {self._most:,} are allowed"
                raise ObjectPullError(self._object_id, reason)


def fetch(root: bytes, object_id: str, pull: Pull, pull_all: PullAll, most: int | None = None) -> Message:
    """Pull all objects below the message's own object, which has this content and id, and assemble the message.

    `most` limits the bytes of the message: of its records' objects, and of its arrays. The size of an array is counted
    before memory is allocated for it.

    Raises what `pull` raises, ValueError if it is not a message, and ObjectPullError for an array whose chunks do not
    fit together, or for a message with more bytes than `most`.
    """
    counted = _Bytes(object_id, most)
    counted.add(len(root))

    def pull_counted(each: str) -> bytes:
        content = pull(each)
        counted.add(len(content))
        return content

    if (message := read_single(root)) is not None:
        return message
    contents = {object_id: root}
    arrays: list[str] = []
    level = list(dict.fromkeys(get_object_head_values_from_object_content(root)[1]))
    while level:
        received = pull_all(level, pull_counted)
        contents |= received
        below: dict[str, None] = {}
        for each in level:
            kind, children, _ = get_object_head_values_from_object_content(received[each])
            if kind == Array.__qualname__:
                arrays.append(each)
            else:
                below |= dict.fromkeys(children)
        level = [each for each in below if each not in contents]
    objects: dict[str, InflatableObject] = {
        each: _array(contents[each], pull, pull_all, counted) for each in arrays
    }
    return cast(Message, inflate_object_from_contents(object_id, contents, objects=objects))


def _array(content: bytes, pull: Pull, pull_all: PullAll, counted: _Bytes) -> Array:
    described = json.loads(get_object_body(content, Array))
    _, ids, _ = get_object_head_values_from_object_content(content)
    chunks = [ids[number] for number in described["arraychunk_ids"]]
    data = _assemble(chunks, pull, pull_all, counted) if chunks else b""
    return Array(dtype=described["dtype"], shape=tuple(described["shape"]), stype=described["stype"], data=data)


def _assemble(chunks: list[str], pull: Pull, pull_all: PullAll, counted: _Bytes) -> bytes:
    """Return the bytes of these chunks in their order. All but the last have the same size; an id may occur twice."""
    first, last = chunks[0], chunks[-1]
    ends = pull_all(list({first: None, last: None}), pull)
    size = len(_body(ends[first]))
    length = size * (len(chunks) - 1) + len(_body(ends[last]))
    counted.add(max(length, len(chunks)))  # chunks may be empty, or one chunk in many places
    whole, buffer = new_bytes(length)
    places: dict[str, list[int]] = {}
    for number, chunk in enumerate(chunks):
        places.setdefault(chunk, []).append(number * size)

    def put(chunk: str, content: bytes, _alive: bytes = whole) -> None:
        # When a pull fails, others still run in their threads: the bytes that they write to must stay allocated.
        body = _body(content)
        for start in places[chunk]:
            if len(body) != min(size, len(buffer) - start):
                raise ObjectPullError(chunk, "an array's chunks are not of one size")
            # Unlike a memoryview's, NumPy's copy lets other threads run.
            np.copyto(np.frombuffer(buffer[start : start + size], np.uint8), np.frombuffer(body, np.uint8))

    for chunk, content in ends.items():
        put(chunk, content)
    del ends

    def pull_in(chunk: str) -> bytes:
        put(chunk, pull(chunk))
        return b""

    pull_all([chunk for chunk in places if chunk not in (first, last)], pull_in)
    return whole


def _body(content: bytes) -> memoryview:
    kind, _, size = get_object_head_values_from_object_content(content[:200])
    body = memoryview(content)[content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :]
    if kind != ArrayChunk.__qualname__ or len(body) != size:
        raise ValueError(f"received a {kind} of {len(body)} bytes, expected a chunk of an array of {size} bytes")
    return body


def new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Return uninitialised `bytes`, and a view to fill them. An Array's data are `bytes`; any other way copies them."""
    new, address = ctypes.pythonapi.PyBytes_FromStringAndSize, ctypes.pythonapi.PyBytes_AsString
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    made = new(None, size)
    begin = address(made)
    with contextlib.suppress(OSError, AttributeError):  # huge pages are faster, on systems that have them
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > _HUGE:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + size - first), mmap.MADV_HUGEPAGE)
    return made, memoryview((ctypes.c_char * size).from_address(begin)).cast("B")


def hash_chunks(message: Message) -> None:
    """Cut the message's arrays into chunks and hash them in two threads; Flower then uses these chunks."""
    records = records_of(message.content, ArrayRecord).values() if message.has_content() else ()
    for array in {id(array): array for record in records for array in record.values()}.values():
        if "_chunks" not in array.__dict__:
            views = _cut(array)
            with ThreadPoolExecutor(2) as pool:
                array.__dict__["_chunks"] = list(zip(pool.map(_id_of, views), views, strict=True))


def _cut(array: Array) -> list[ArrayChunk]:
    size, data = sys.modules[Array.__module__].FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, memoryview(array.data)
    return [ArrayChunk(data[start : start + size]) for start in range(0, len(data), size)]


def _head(chunk: ArrayChunk) -> bytes:
    values = (ArrayChunk.__qualname__, "", str(len(chunk.data)))
    return HEAD_VALUE_DIVIDER.join(values).encode() + HEAD_BODY_DIVIDER


def _id_of(chunk: ArrayChunk) -> str:
    digest = hashlib.sha256(_head(chunk))
    digest.update(chunk.data)
    return digest.hexdigest()


def tree_of(message: Written, object_id: str) -> tuple[ObjectTree, dict[str, InflatableObject | Written]]:
    """Return a message's tree, and the objects in it by id, children first."""
    objects: dict[str, InflatableObject | Written] = {}
    return _enter(message, object_id, objects), objects


def _enter(
    each: InflatableObject | Written, its_id: str, objects: dict[str, InflatableObject | Written]
) -> ObjectTree:
    # Not a function within `tree_of`: one that calls itself keeps the message until the garbage collector runs.
    children = [_enter(child, child_id, objects) for child_id, child in (each.children or {}).items()]
    objects[its_id] = each
    return ObjectTree(object_id=its_id, children=children)


def push(
    objects: Mapping[str, InflatableObject | Written], wanted: Iterable[str], push_one: Callable[[str, bytes], None]
) -> None:
    """Push the wanted objects, children first, a few at a time; only these few are copied."""
    wanted = set(wanted)

    def push_it(item: tuple[str, InflatableObject | Written]) -> None:
        object_id, each = item
        content = b"".join((_head(each), each.data)) if isinstance(each, ArrayChunk) else each.deflate()
        push_one(object_id, content)

    items = [item for item in objects.items() if item[0] in wanted]
    if len(items) == 1:
        push_it(items[0])
        return
    pool = ThreadPoolExecutor(FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES)
    try:
        for _ in pool.map(push_it, items):
            pass
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
