"""Clients of a simulation that train on other machines than the server is on.

    the server's machine   `FarClients` takes the place of the ClientApp, and asks a process there
    the client's machine   `answered` calls the ClientApp

What a client keeps from round to round is on its machine: cached parts, and personal state. The latter is also on the
server's, in the folder of caches, and goes with the client if that trains on another machine. The layout that a
message names is sent along in the same case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from tepal.exchange.cache import ClientCache, default_root
from tepal.exchange.files import SUFFIX
from tepal.exchange.layout import Layout
from tepal.exchange.layouts import Layouts, remembered
from tepal.exchange.manifest import ID, RECORD, Manifest, ProtocolError, UnknownLayout
from tepal.exchange.personal import PersonalState
from tepal.exchange.plan import INTRODUCE
from tepal.host.files import replacing
from tepal.host.flower.contents import records_of
from tepal.strategies.in_process import NodeConfig


@dataclass(frozen=True)
class Asked:
    """What the process of a client's machine is asked.

    `files`: of its personal state; `layout`: that the message names. Both are None in the first request, because the
    machine usually has them.
    """

    message: Message
    node_id: int
    node_config: NodeConfig
    state: RecordDict
    files: Mapping[str, bytes] | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class Answered:
    """Its reply. `files`: what is new of the client's personal state."""

    reply: Message
    state: RecordDict
    files: Mapping[str, bytes]


class Lacking:
    """A reply instead: the personal state or the layout is missing on the client's machine."""


class FarClients:
    """Answers each message on one of several machines, always the same one for a client as long as that is there.

    Args:
        ask: of the processes there: function of the client's number and of what to ask
            (`tepal.host.request_files.Workers.ask`).
    """

    def __init__(self, ask: Callable[[int, Asked], Answered | Lacking]) -> None:
        self._ask = ask

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply. Raises what `ask` raises."""
        client = context.node_id - 1  # the nodes' numbers begin with 1
        asked = Asked(message, context.node_id, context.node_config, context.state)
        found = self._ask(client, asked)
        if isinstance(found, Lacking):  # it has another machine than before
            manifest = _manifest(message)
            personal = _personal_state(message, manifest)
            layout = manifest.layout if manifest and not _lacks_layout(manifest) else None
            found = self._ask(client, replace(asked, files=personal.current() if personal else {}, layout=layout))
        assert isinstance(found, Answered)
        context.state = found.state
        if found.files and (personal := _personal_state(message, _manifest(message))):
            personal.add(found.files)
            personal.prune()
        return found.reply


def answered(
    client_app: ClientApp, config: Mapping[str, Any], there: Callable[[str], str], asked: Asked
) -> Answered | Lacking:
    """A client's reply, on its machine.

    Args:
        client_app: what the client runs.
        config: of the run, with the paths of this machine.
        there: function of a setting of the message, which makes its paths those of this machine (`with_paths`).
        asked: what came.
    """
    message, manifest = asked.message, _manifest(asked.message)
    if manifest is not None and asked.layout is not None:
        remembered(manifest.experiment, asked.layout)
    personal = _personal_state(message, manifest)
    if personal:
        personal.add(asked.files or {})
    if asked.files is None and (_lacks_layout(manifest) or (personal and not personal.is_here())):
        return Lacking()
    before = personal.written() if personal else {}
    if message.has_content():
        for record in records_of(message.content, ConfigRecord).values():
            record.update({key: there(value) for key, value in record.items() if isinstance(value, str)})
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a Message outside a task needs them
    context = Context(1, asked.node_id, dict(asked.node_config), asked.state, dict(config))
    reply = reply_of(client_app, message, context)
    after = personal.written() if personal else {}
    new = [name for name, time in after.items() if before.get(name) != time]
    return Answered(reply, context.state, personal.read(new) if personal else {})


def reply_of(client_app: ClientApp, message: Message, context: Context) -> Message:
    """The app's reply; an error with code 2 if it raises, as with Flower."""
    try:
        return client_app(message, context)
    except Exception as error:
        return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)


@dataclass(frozen=True)
class _PersonalState:
    """The files of a client's personal state on a machine, for the exchange of a message."""

    folder: Path
    manifest: Manifest
    exchange: str

    def written(self) -> dict[str, int]:
        """Name → time at which it was written, of all versions."""
        return {path.name: path.stat().st_mtime_ns for path in self.folder.glob(f"*{SUFFIX}")}

    def is_here(self) -> bool:
        """Whether the current version is, if there is one."""
        return not self.manifest.current or bool(self._names())

    def current(self) -> dict[str, bytes]:
        """The file that the client's answer needs; {} if it is not here."""
        return self.read(self._names())

    def _names(self) -> list[str]:
        return [path.name for path in self.folder.glob(f"*-{self.manifest.current}{SUFFIX}")]

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in names}

    def add(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.folder / name) as written:
                written.write_bytes(content)

    def prune(self) -> None:
        """Remove what the client removes on its machine."""
        of = self.manifest
        PersonalState(
            self.folder, current=of.current, keep=of.kept, exchange=self.exchange, round=of.plan.round
        ).prune()


def _manifest(message: Message) -> Manifest | None:
    """A message's manifest, with an empty layout if that is not on this machine; None of another app's message."""
    try:
        return Manifest.from_content(message.content, Layouts(default_root()).find)
    except UnknownLayout as error:
        return error.manifest
    except ProtocolError:
        return None


def _lacks_layout(manifest: Manifest | None) -> bool:
    return manifest is not None and not manifest.layout.names


def _personal_state(message: Message, manifest: Manifest | None) -> _PersonalState | None:
    """Where a message with this manifest finds the client's personal state; None if it does not use it."""
    if manifest is None or manifest.plan.action == INTRODUCE:
        return None
    folder = ClientCache(default_root(), manifest.experiment, manifest.plan.client).personal
    return _PersonalState(folder, manifest, str(message.content[RECORD][ID]))


def with_paths(paths: Mapping[str, str], text: str) -> str:
    """A setting with other paths, path → the other. It may have several, separated by commas, or be JSON."""
    if text.startswith("{"):
        with suppress(ValueError, AttributeError):  # it is no table of tables: the client says what is wrong with it
            tables = json.loads(text)
            for table in tables.values():
                table.update({key: with_paths(paths, value) for key, value in table.items() if isinstance(value, str)})
            return json.dumps(tables)
    each = [text] if os.path.normpath(text) in paths else text.split(",")
    return ",".join(paths.get(os.path.normpath(one), one) for one in each)
