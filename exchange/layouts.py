"""Layouts that clients know, so that a message names one by its id and does not list it.

    <root>/<experiment>/layout-<id>.json    the layout of a run, for all clients on this machine

In a message with few values the layout would be most of the manifest. A client stores it when it introduces itself, and
says so in its answers. If it cannot find the layout that a message names, the message is sent again with it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from logging import getLogger
from pathlib import Path

from tepal.exchange.files import file_name, shortened
from tepal.exchange.layout import Layout
from tepal.exchange.texts import to_text
from tepal.host.files import replacing

log = getLogger("flwr")

LAYOUT = "layout-*.json"
"""Name of the files, with the layout's id in place of the star."""

_MOST = 8  # layouts in memory
_read: dict[str, Layout] = {}
_reading = threading.Lock()


def remembered(layout: Layout) -> Layout:
    """The layout, which this process finds by its id from now on."""
    with _reading:
        _read.pop(layout.id, None)
        _read[layout.id] = layout
        while len(_read) > _MOST:
            del _read[next(iter(_read))]
    return layout


def in_memory(id: str) -> Layout | None:
    """The layout of this id, if this process has read or sent it lately."""
    return _read.get(id)


class Layouts:
    """The layouts in a client's cache folder.

    Args:
        root: the cache folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, experiment: str, id: str) -> Layout | None:
        """The layout of this id; None if it is not there, or if its file is damaged, which is then removed."""
        if (known := in_memory(id)) is not None:
            return known
        file = self._file(experiment, id)
        try:
            layout = Layout.from_json(json.loads(file.read_bytes()))
            if layout.id != id:
                raise ValueError("its content is not what its name says")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("The model's layout is removed from the cache and will be sent again: %s: %s", file, error)
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        return remembered(layout)

    def keep(self, experiment: str, layout: Layout) -> bool:
        """Store a layout, unless it is there. Returns whether it is."""
        file = self._file(experiment, layout.id)
        with contextlib.suppress(OSError):
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                with replacing(file) as partial:
                    partial.write_bytes(to_text(layout.to_json()))
            return True
        return False

    def _file(self, experiment: str, id: str) -> Path:
        return folder_of(self.root, experiment) / LAYOUT.replace("*", file_name(id))


def folder_of(root: Path, experiment: str) -> Path:
    """The folder of an experiment in a cache folder."""
    return root / file_name(shortened(experiment))
