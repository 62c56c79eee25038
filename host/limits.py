"""Memory limits of this process's container or service (control group version 2), and sizes written with units.

psutil reports the machine's memory, not these limits.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOUNT = Path("/sys/fs/cgroup")


class Limits:
    """The limits of this process's control group and of those above it.

    Args:
        mount: where control groups are mounted.
        membership: the file that names the group of this process.
    """

    def __init__(self, mount: Path = _MOUNT, membership: Path = Path("/proc/self/cgroup")) -> None:
        self._groups: list[Path] = []
        with contextlib.suppress(OSError):
            for line in membership.read_text(encoding="ascii").splitlines():
                if line.startswith("0::"):
                    here = mount / line[3:].strip("/")
                    above = [here, *here.parents]
                    self._groups = [group for group in above if group == mount or mount in group.parents]

    @property
    def memory(self) -> int:
        """Bytes of memory that this process and its children may use together; 0 for no limit."""
        found = [int(text) for text in self._read("memory.max") if text.strip() != "max"]
        return min(found, default=0)

    @property
    def killed(self) -> int:
        """Number of processes of this group that the system has killed because memory ran out."""
        for text in self._read("memory.events"):
            if match := re.search(r"^oom_kill (\d+)$", text, re.M):
                return int(match[1])
        return 0

    def _read(self, name: str) -> list[str]:
        texts = []
        for group in self._groups:
            with contextlib.suppress(OSError):
                texts.append((group / name).read_text(encoding="ascii"))
        return texts


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "900MB", "1.5G" or "2GiB"; units are powers of 1024.

    Raises `ValueError` for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.I)
    if match is None or len(match[1]) > 20:
        raise ValueError(f"{text!r} is not a size: expected a number with KB, MB, GB or TB, such as 900MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
