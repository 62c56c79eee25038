"""Where the Python API shows its progress: a terminal, a notebook, a file, or nowhere."""

from __future__ import annotations

import io
import os
import warnings
from typing import IO, Any, cast

from rich.console import Console

# A library that reads data sets warns about its own progress bars, which are not used.
warnings.filterwarnings("ignore", "IProgress not found")


def console_of(progress: bool) -> Console:
    """Return the console for progress; in a notebook each line replaces the one before."""
    if not progress:
        return Console(file=open(os.devnull, "w", encoding="utf-8"))
    console = Console()
    if console.is_jupyter:
        return Console(file=cast(IO[str], _LastLine()), force_jupyter=False, force_terminal=False, width=160)
    return console


class _LastLine(io.TextIOBase):
    """Shows the last line that is written, in the output of a notebook's cell."""

    def __init__(self) -> None:
        self._shown: Any = None

    def write(self, text: str) -> int:
        from IPython.display import display

        if line := text.strip():
            content = {"text/plain": line}
            if self._shown is None:
                self._shown = display(content, raw=True, display_id=True)
            else:
                self._shown.update(content, raw=True)
        return len(text)
