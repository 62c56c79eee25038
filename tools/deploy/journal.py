"""The journal of a server, server.json: what it does, and what it must remember after a restart."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tepal.host.files import replacing
from tepal.tools.deploy.node_keys import ServerError
from tepal.tools.deploy.recovery import Record

log = logging.getLogger("tepal.server")

STATE = "server.json"
"""Its name in the state folder."""

HEARTBEAT = 5.0
"""Seconds after which it is written again at the latest."""


@dataclass
class Journal:
    """server.json. Read by `tepal server status` and by the next server with this state folder."""

    path: Path
    pid: int = 0
    since: str = ""
    heartbeat: float = 0.0
    """When the server's loop moved, in seconds since 1970."""
    control: str = ""
    fleet: str = ""
    root_certificates: str = ""
    superlink: str = ""
    """What it does: starting, running, waiting, stopped."""
    superlink_starts: int = 0
    nodes: list[str] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    """The run that goes on, or the last one: directory, state, run-id."""
    last_error: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Record] = field(default_factory=dict)
    """By run directory."""
    started: dict[str, Record] = field(default_factory=dict)
    """Runs that --run-config asked for, by `config_digest`."""

    def __post_init__(self) -> None:
        self._written = 0.0

    @classmethod
    def read(cls, path: Path) -> Journal:
        """What the file says; an empty one where there is none. Raises ServerError where it cannot be read."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            known = {item.name for item in fields(cls)} - {"path"}
            journal = cls(path, **{key: value for key, value in kept.items() if key in known})
            for records in (journal.runs, journal.started):
                for key, value in list(dict[str, Any](records).items()):
                    records[key] = Record(**value)
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{path} cannot be read: {error}. It says which runs were stopped and which were tried how often; "
                "without it (move it away) the newest unfinished run goes on"
            ) from error
        return journal

    def write(self) -> None:
        """Write the file so that a reader sees the old one or the new one; only its owner may read it."""
        content = {key: value for key, value in asdict(self).items() if key != "path"}
        with replacing(self.path, durable=True) as partial:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def beat(self, at_once: bool = False) -> None:
        """Write the journal every few seconds: it is the server's heartbeat."""
        if not at_once and time.monotonic() - self._written < HEARTBEAT:
            return
        self.heartbeat = time.time()
        try:
            self.write()
            self._written = time.monotonic()
        except OSError as error:  # a full disk stops no run
            log.error("%s cannot be written: %s", self.path, error.strerror)

    def record(self, run: Path | str) -> Record:
        return self.runs.setdefault(str(run), Record())

    def error(self, text: str) -> None:
        """Log an error, and keep it for `tepal server status`."""
        log.error(text)
        self.last_error = {"at": timestamp(), "text": text}


def timestamp() -> str:
    """The time as the journal has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
