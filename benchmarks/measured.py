"""What benchmarks have in common: samples over time, and the file of `--json`.

The file has the figures, and when, at which commit and where they were measured.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[1]
_LOAD = os.getloadavg()[0]  # of the minute before: a benchmark imports this before it begins


def write_figures(file: Path, figures: Any) -> None:
    file.write_text(json.dumps({"measured": circumstances(), "figures": figures}, indent=1) + "\n")


def read_figures(file: Path) -> tuple[dict[str, Any], Any]:
    """Circumstances and figures. Raises ValueError for a file that no benchmark wrote."""
    found = json.loads(file.read_text())
    if not isinstance(found, Mapping) or set(found) != {"measured", "figures"}:
        raise ValueError(f"{file} is not the file of a benchmark's --json: it lacks `measured` and `figures`")
    return found["measured"], found["figures"]


def circumstances() -> dict[str, Any]:
    """Date, commit, command, and a description of the machine, its load before, and versions of the libraries."""
    program, *arguments = sys.argv
    return {
        "date": datetime.now(UTC).date().isoformat(), "commit": _commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(program).name}", *_without_json(arguments)]),
        "processor": _processor(), "cores": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB", "load": round(_LOAD, 1),
        "system": platform.platform(), "python": platform.python_version(),
        **{name: version(name) for name in ("flwr", "torch", "numpy")},
    }  # fmt: skip


class Sampler:
    """Calls `look` again and again in a thread while the context lasts, with pauses of `pause` seconds."""

    pause = 0.2

    def look(self) -> None:
        """Take one sample."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self.pause):
            self.look()


def _without_json(arguments: list[str]) -> list[str]:
    place = arguments.index("--json") if "--json" in arguments else len(arguments)
    return arguments[:place] + arguments[place + 2 :]


def _commit() -> str:
    """The checked-out commit; "… and changes" if files that git knows differ from it; "" outside a repository."""
    try:
        git = ["git", "-C", str(ROOT)]
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        clean = subprocess.run([*git, "diff", "--quiet", "HEAD"]).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.strip() if clean else f"{name.strip()} and changes"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    named = info.read_text().splitlines() if info.exists() else []
    found = (line.split(":")[1].strip() for line in named if "model name" in line)
    return next(found, platform.processor() or platform.machine())
