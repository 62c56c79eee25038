"""The journal of a server, server.json: its present state, and the facts that it needs after a restart."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tepal.host.files import replacing
from tepal.tools.deploy.node_keys import ServerError
from tepal.tools.deploy.recovery import JournalEntry

log = logging.getLogger("tepal.server")

STATE = "server.json"
"""File name of the journal in the state folder."""

HEARTBEAT = 5.0
"""The longest time between two writes, in seconds."""


@dataclass
class Journal:
    """server.json. Read by `tepal server status` and by the next server with this state folder."""

    path: Path
    pid: int = 0
    since: str = ""
    heartbeat: float = 0.0
    """The time of the last iteration of the server's loop, in seconds since 1970."""
    control: str = ""
    fleet: str = ""
    root_certificates: str = ""
    superlink: str = ""
    """The SuperLink's state: starting, running, waiting, stopped."""
    superlink_starts: int = 0
    nodes: list[str] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    """The present run, or the last one: directory, state, run-id."""
    last_error: dict[str, str] = field(default_factory=dict)
    runs: dict[str, JournalEntry] = field(default_factory=dict)
    """By run directory."""
    started: dict[str, JournalEntry] = field(default_factory=dict)
    """Runs started by --run-config, by `config_digest`."""
    folder: str = field(init=False)
    """The state folder, without symbolic links. The next server may find it elsewhere."""

    def __post_init__(self) -> None:
        self.folder = os.path.realpath(self.path.parent)
        self._written = 0.0

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Return the journal in a file; an empty one without a file. Raises ServerError if it cannot be read.

        Run directories in a state folder that was moved or copied are those in the folder of this file, if it has them.
        """
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            known = {item.name for item in fields(cls) if item.init} - {"path"}
            journal = cls(path, **{key: value for key, value in kept.items() if key in known})
            for entries in (journal.runs, journal.started):
                for key, value in list(dict[str, Any](entries).items()):
                    entries[key] = JournalEntry(**value)
            journal.locate(kept.get("folder", ""))
        except FileNotFoundError:
            return cls(path)
        except PermissionError as error:
            user = f"this user (uid {os.geteuid()})"
            raise ServerError(f"{path} cannot be read by {user}: use sudo, or the user that runs the server") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{path} cannot be read: {error}. It records which runs were stopped and how often each was resumed; "
                "move it away, and the newest unfinished run is resumed"
            ) from error
        return journal

    def locate(self, before: str = "") -> None:
        """Name all run directories by where they are now, without symbolic links. `before`: the state folder then."""

        def located(path: str) -> str:
            if before and Path(path).is_relative_to(before):
                moved = os.path.join(self.folder, Path(path).relative_to(before))
                if os.path.isdir(moved) or not os.path.isdir(path):  # not one that stayed where it was
                    path = moved
            return os.path.realpath(path)

        # Of a directory that was recorded twice, through a link and without it, an outcome counts.
        entries = sorted(self.runs.items(), key=lambda item: bool(item[1].outcome))
        self.runs = {located(path): entry for path, entry in entries}
        for entry in self.started.values():
            entry.directory = entry.directory and located(entry.directory)
        if directory := self.run.get("directory"):
            self.run["directory"] = located(directory)

    def write(self) -> None:
        """Write the file, atomically; only its owner may read it."""
        content = {key: value for key, value in asdict(self).items() if key != "path"}
        with replacing(self.path, durable=True) as partial:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def beat(self, at_once: bool = False) -> None:
        """Write the journal, the server's heartbeat, if the last write is some seconds ago or `at_once`.

        If it cannot be written, as on a full disk, the time of the old file is the heartbeat: see `last_beat`.
        """
        if not at_once and time.monotonic() - self._written < HEARTBEAT:
            return
        self.heartbeat, self._written = time.time(), time.monotonic()
        try:
            self.write()
        except OSError as error:  # a full disk must not stop a run
            log.error("%s cannot be written: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):
                os.utime(self.path)

    @property
    def last_beat(self) -> float:
        """The time of the last heartbeat, in seconds since 1970: that in the file or, if later, the file's own."""
        with contextlib.suppress(OSError):
            return max(self.heartbeat, self.path.stat().st_mtime)
        return self.heartbeat

    def entry(self, run: Path | str) -> JournalEntry:
        """Return the entry for a run directory, which may be named through a symbolic link."""
        return self.runs.setdefault(os.path.realpath(run), JournalEntry())

    def error(self, text: str) -> None:
        """Log an error, and keep it for `tepal server status`."""
        log.error(text)
        self.last_error = {"at": timestamp(), "text": text}


def timestamp() -> str:
    """Return the present time in the journal's format."""
    return datetime.now(UTC).isoformat(timespec="seconds")
