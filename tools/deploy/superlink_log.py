"""Copy a SuperLink's log file to standard output, without its routine lines, and limit its size."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_LARGEST_LOG = 10_000_000  # bytes
# The SuperLink logs every request, ten lines a second.
_ROUTINE = re.compile(r"ControlServicer\.List(Runs|Nodes)\s*$|\[uvicorn\.access\] .* 200\s*$")


@contextlib.contextmanager
def tailed(path: Path) -> Iterator[None]:
    """Copy what is added to a log file during the block to this process's output, and limit the file's size."""
    stop = threading.Event()
    position = path.stat().st_size if path.exists() else 0

    def tail() -> None:
        nonlocal position
        while not stop.wait(0.3):
            with contextlib.suppress(OSError):
                position = pass_on(path, position, _LARGEST_LOG)

    thread = threading.Thread(target=tail, name="superlink-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)
        with contextlib.suppress(OSError):
            pass_on(path, position, _LARGEST_LOG)


def pass_on(path: Path, position: int, largest: int) -> int:
    """Write the complete lines of `path` after `position` to stdout, without routine ones; return their end.

    A file of more than `largest` bytes is copied to `path`.1 and truncated, on a full disk without the copy. The
    SuperLink keeps appending to the same file, so lines that it writes between these two steps may be lost.
    """
    with path.open("rb") as file:
        file.seek(position)
        whole, newline, _ = file.read().rpartition(b"\n")
    for line in whole.decode(errors="replace").splitlines():
        if line.strip() and not _ROUTINE.search(line):
            print(line)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    position += len(whole) + len(newline)
    if position > largest:
        with contextlib.suppress(OSError):
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
        position = 0
    return position
