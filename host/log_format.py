"""`--log-format json`: one JSON object for each line that a server or a node and its child processes print.

Flower, uvicorn and apps print in different formats, and in several processes. No logger is changed: the output of this
process and of its children goes through a pipe, and each line is converted:

    {"time": "2026-11-20T10:15:00.123Z", "level": "warning", "source": "tepal server", "message": "…"}
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

TEXT, JSON = "text", "json"

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LEVELS = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_FORMS = (
    # Tepal's server, uvicorn under the SuperLink; and Flower, uvicorn elsewhere.
    re.compile(rf"\S+T\S+ (?P<level>{_LEVELS}) (?:\[(?P<source>[^\]]+)\]|(?P<own>tepal server):) ?(?P<message>.*)"),
    re.compile(rf"(?P<level>{_LEVELS})\s*:(?:\s+(?P<message>.*))?"),
    # MLflow.
    re.compile(rf"\d+/\d+/\d+ [\d:]+ (?P<level>{_LEVELS}) (?P<source>\S+): (?P<message>.*)"),
    re.compile(r"(?P<level>error): (?P<message>.*)"),
)
_DRAIN = 2.0  # seconds to wait for the last lines while child processes still have the pipe open


def parsed(line: str, now: datetime) -> dict[str, str] | None:
    """Return a printed line as an object, None for an empty line. The level of a line without one is "info"."""
    text = _COLOURS.sub("", line).rstrip()
    if not text.strip():
        return None
    time = now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    for form in _FORMS:
        if match := form.fullmatch(text):
            groups = match.groupdict()
            if not groups["message"]:
                return None  # Flower logs empty lines as separators
            source = groups.get("source") or groups.get("own") or ""
            return {"time": time, "level": groups["level"].lower(), "source": source, "message": groups["message"]}
    return {"time": time, "level": "info", "source": "", "message": text}


@contextlib.contextmanager
def log_format(name: str) -> Iterator[None]:
    """Write what this process and its children print during the block in this format, text or json.

    Raises ValueError for another format.
    """
    if name == TEXT:
        yield
        return
    if name != JSON:
        raise ValueError(f"--log-format is {name!r}, expected {TEXT} or {JSON}")
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = os.dup(1), os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    thread = threading.Thread(target=_convert, args=(reading, out), name="log-format", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(err)
        # The thread ends when no process has the pipe open; do not wait longer for a process that stays.
        thread.join(_DRAIN)


def _convert(reading: int, out: int) -> None:
    with open(reading, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            # A progress bar overwrites its line: only its last state is kept.
            if (entry := parsed(line.rstrip("\r\n").rpartition("\r")[2], datetime.now(UTC))) is not None:
                content = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
                with contextlib.suppress(OSError):  # the processes continue when nobody reads their output
                    while content:
                        content = content[os.write(out, content) :]
