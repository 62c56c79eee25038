"""The client's store of model layouts: a message can then name its layout by its id instead of listing it.

    <root>/<experiment>/layout-<id>.json    the layout of a run, for all clients on this machine

In a message with few values the layout would be most of the manifest. A client stores it when it introduces itself, and
reports this in its answers (`Header.layout`). If it cannot find the layout that a message names, the message is sent
again with the layout, and so are all later ones to this client.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from pathlib import Path

from tepal.exchange.files import file_name, shortened
from tepal.exchange.layout import Layout
from tepal.exchange.texts import to_text
from tepal.host.files import remove_abandoned, replacing

LAYOUT = "layout-*.json"
"""Name of the files, with the layout's id in place of the star."""

_MOST = 8  # layouts in memory
_read: OrderedDict[tuple[str, str], Layout] = OrderedDict()  # by experiment and id, the last used one last
_reading = threading.Lock()


def remembered(experiment: str, layout: Layout) -> Layout:
    """Keep an experiment's layout in memory, where `in_memory` finds it by its id, and return it."""
    with _reading:
        _read[experiment, layout.id] = layout
        _read.move_to_end((experiment, layout.id))
        while len(_read) > _MOST:
            _read.popitem(last=False)
    return layout


def in_memory(experiment: str, id: str) -> Layout | None:
    """The layout of this id, if this process has read or sent it lately."""
    with _reading:
        if (found := _read.get((experiment, id))) is not None:
            _read.move_to_end((experiment, id))
    return found


class Layouts:
    """The layouts in a client's cache folder, for one message.

    Args:
        root: the cache folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes: list[str] = []
        """Problems, for the server's log."""
        self._found = False

    def find(self, experiment: str, id: str) -> Layout | None:
        """The layout of this id; None if it is not stored, or its file is damaged, which is then removed."""
        layout = in_memory(experiment, id)
        if layout is None:
            layout = self._read(experiment, id)
        self._found = layout is not None
        return layout

    def _read(self, experiment: str, id: str) -> Layout | None:
        file = self._file(experiment, id)
        try:
            layout = Layout.from_json(json.loads(file.read_bytes()))
            if layout.id != id:
                raise ValueError("its content is not what its name says")
        except FileNotFoundError:
            return None
        except OSError as error:
            self.notes.append(f"the model's layout cannot be read: {file}: {error}")
            return None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.notes.append(f"the model's layout is damaged and will be sent again: {file}: {error}")
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        return remembered(experiment, layout)

    def keep(self, experiment: str, layout: Layout) -> bool:
        """Store the message's layout, the only one of its experiment. Returns whether it is now stored."""
        file = self._file(experiment, layout.id)
        with contextlib.suppress(OSError):
            if self._found and file.exists():
                return True
            text = to_text(layout.to_json())
            if not file.exists() or file.read_bytes() != text:
                file.parent.mkdir(parents=True, exist_ok=True)
                remove_abandoned(file.parent)
                with replacing(file) as partial:
                    partial.write_bytes(text)
            for other in file.parent.glob(LAYOUT):
                if other != file:
                    other.unlink(missing_ok=True)
            return True
        return False

    def _file(self, experiment: str, id: str) -> Path:
        return folder_of(self.root, experiment) / LAYOUT.replace("*", file_name(id))


def folder_of(root: Path, experiment: str) -> Path:
    """The folder of an experiment in a cache folder."""
    return root / file_name(shortened(experiment))
