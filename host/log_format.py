"""`--log-format json`: everything that a server or a node and its processes print, as one JSON object a line.

Flower, uvicorn and what an app prints have formats of their own, and processes of their own. So it is not loggers that
are changed: the output of this process and of those that it starts goes through a pipe, and its lines are put into one
form:

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
_DRAIN = 2.0  # seconds that what was printed last has to come through, where other processes have the pipe as well


def parsed(line: str, now: datetime) -> dict[str, str] | None:
    """A printed line as an object; None for an empty one. What has no level of its own is "info"."""
    text = _COLOURS.sub("", line).rstrip()
    if not text.strip():
        return None
    time = now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    for form in _FORMS:
        if match := form.fullmatch(text):
            groups = match.groupdict()
            if not groups["message"]:
                return None  # Flower sets its lines apart so
            source = groups.get("source") or groups.get("own") or ""
            return {"time": time, "level": groups["level"].lower(), "source": source, "message": groups["message"]}
    return {"time": time, "level": "info", "source": "", "message": text}


@contextlib.contextmanager
def log_format(name: str) -> Iterator[None]:
    """Have all that is printed in this block, by this process or one that it starts, written in this format.

    Raises ValueError for a format that is unknown.
    """
    if name == TEXT:
        yield
        return
    if name != JSON:
        raise ValueError(f"--log-format {name}: known are {TEXT} and {JSON}")
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = os.dup(1), os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    thread = threading.Thread(target=_pass_on, args=(reading, out), name="log-format", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(err)
        # It ends when nobody has the pipe any more; a process that stays behind must not keep this one.
        thread.join(_DRAIN)


def _pass_on(reading: int, out: int) -> None:
    with open(reading, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            # A progress bar writes over its line.
            if (told := parsed(line.rstrip("\r\n").rpartition("\r")[2], datetime.now(UTC))) is not None:
                content = json.dumps(told, ensure_ascii=False).encode() + b"\n"
                with contextlib.suppress(OSError):  # nobody reads: the processes behind the pipe work on
                    while content:
                        content = content[os.write(out, content) :]
