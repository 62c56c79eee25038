"""Personal state, which a client keeps from round to round: its own model, a control variate, an encoding's residual.

    <root>/<experiment>/personal/<name>/<round>-<exchange id>.safetensors

It is never sent. It belongs to the client's name, and survives restarts of the process, of the node and of the run.
Server and client must agree on its version: when a reply is lost or refused, or the server restores a checkpoint, the
client must go back as well. Every version therefore has the id of the exchange that made it, and the server's next
message names the current one. A merged exchange that stores nothing is one, too: its version is a hard link to the
one before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from logging import getLogger
from pathlib import Path

import numpy as np

from tepal.exchange.files import SUFFIX, DamagedFile, read_arrays, remove_unfinished, write_arrays
from tepal.exchange.layout import Arrays, Names
from tepal.host.files import replacing, sync_folder

log = getLogger("flwr")

_LEFT_OUT = "left out/"  # prefix of the names of arrays that encodings keep
_SENT = "sent-"  # before the exchange's id: what the encodings left out in this file has been sent meanwhile


class PersonalState:
    """The personal state of one client in one exchange: `received(msg).personal` in an app.

    Args:
        folder: of this client's versions.
        current: id of the exchange that made the current version; "" if there is none yet.
        keep: ids of the versions that the server may still restore.
        exchange: id of this exchange.
        round: number of this round.
        advances: whether this exchange may make a new version: training may, scoring may not.
        durable: whether `commit` waits until the disk has the new version.
    """

    def __init__(
        self,
        folder: Path,
        *,
        current: str,
        keep: Names,
        exchange: str,
        round: int,
        advances: bool = True,
        durable: bool = True,
    ) -> None:
        self._folder = folder
        self._current = current
        self._keep = frozenset((*keep, current, exchange))
        self._exchange = exchange
        self._round = round
        self._advances = advances
        self._durable = durable
        self._staged: Arrays | None = None
        self._left_out: Arrays | None = None
        self._own: Arrays = {}  # the app's own arrays, set by `load_left_out`
        self._asked = False  # whether the app has loaded its state
        self.lost = ""
        """Why the current version could not be loaded; "" if it could."""
        self.unwritten = ""
        """Why `commit` could not store what the encodings left out; "" if it could."""

    @property
    def begins(self) -> bool:
        """Whether this exchange may make a version, and this client's folder has none before it."""
        return self._advances and self._file() is None

    @property
    def notes(self) -> Names:
        """`lost` and `unwritten`, for the server's log."""
        return tuple(filter(None, (self.lost, self.unwritten)))

    def load(self) -> dict[str, np.ndarray]:
        """The current version (read-only arrays); {} for a client that has none yet, or has lost it."""
        self._asked = True
        return {name: array for name, array in self._load().items() if not name.startswith(_LEFT_OUT)}

    def load_left_out(self) -> dict[str, np.ndarray]:
        """The values that encodings have left out of this client's uploads."""
        found = self._load()
        self._own = {name: array for name, array in found.items() if not name.startswith(_LEFT_OUT)}
        return {name.removeprefix(_LEFT_OUT): found[name] for name in found.keys() - self._own.keys()}

    def save_left_out(self, values: Arrays) -> None:
        """Store new values of `load_left_out` at `commit`. The app's own arrays stay, unless it saves new ones."""
        self._left_out = values

    def _load(self) -> dict[str, np.ndarray]:
        if not self._current:
            return {}
        try:
            if (path := self._file()) is None:
                raise DamagedFile("its file is not in this client's folder")
            found = read_arrays(path)
            return {n: array for n, array in found.items() if not (_is_sent(path) and n.startswith(_LEFT_OUT))}
        except (OSError, DamagedFile) as error:
            self.lost = f"the personal state is lost and starts from the beginning: {error}"
            log.warning("Personal state in %s cannot be used: %s.", self._folder, error)
            return {}

    def save(self, values: Arrays) -> None:
        """Store new values when the app has returned. They are current once the server has merged the reply."""
        if not self._advances:
            raise RuntimeError("personal state can be saved in training, and not while a model is scored")
        self._staged = values

    def commit(self) -> None:
        """Write the stored values. If there are none, the current version becomes that of this exchange.

        What the encodings left out is no reason to refuse the reply: if only that cannot be written, it is dropped, and
        `unwritten` says so. The app's own arrays stay.

        Raises:
            OSError: the app's own values cannot be written: the reply must not be merged.
        """
        if self._staged is None and self._left_out is None:
            if self._advances:
                self._continue()
            return
        values = dict(self._own if self._staged is None else self._staged)
        values |= {_LEFT_OUT + name: array for name, array in (self._left_out or {}).items()}
        try:
            write_arrays(self._version(), values, durable=self._durable)
        except OSError as error:
            if self._staged is not None:
                raise
            if self._own:
                self._link(sent=True)
            self.lost = ""  # there may be no version because of an earlier error of this kind
            self.unwritten = (
                f"what the encoding left out of this upload is not added to the next one, because it cannot be "
                f"written to {self._folder}: {error}"
            )
            log.warning("%s", self.unwritten)

    def _continue(self) -> None:
        if self._file() is not None and not self.lost:
            self._link()
        elif self._asked:  # else the same state would be told as lost in every round
            with contextlib.suppress(OSError):
                write_arrays(self._version(), {}, durable=self._durable)

    def _link(self, *, sent: bool = False) -> None:
        """Make the current version that of this exchange. `sent`: but what the encodings left out was used up."""
        if (current := self._file()) is None:
            raise FileNotFoundError("the current version was removed")
        path = self._version(sent=sent or _is_sent(current))
        try:
            os.link(current, path)
        except FileExistsError:  # of an earlier answer to the same message
            return
        except OSError:  # a file system without hard links
            with replacing(path, durable=self._durable) as partial:
                shutil.copyfile(current, partial)
        if self._durable:
            sync_folder(self._folder)

    def _version(self, *, sent: bool = False) -> Path:
        return self._folder / f"{self._round:06d}-{_SENT * sent}{self._exchange}{SUFFIX}"

    def _file(self) -> Path | None:
        """The file of the current version."""
        return next(iter(self._folder.glob(f"*-{self._current}{SUFFIX}")), None) if self._current else None

    def prune(self) -> None:
        """Remove versions that the server will not restore. Those of later rounds stay: the message may be late."""
        remove_unfinished(self._folder)
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"*-*{SUFFIX}"):
                made_in, _, exchange = path.name.removesuffix(SUFFIX).replace(f"-{_SENT}", "-").partition("-")
                if exchange not in self._keep and made_in.isdigit() and int(made_in) <= self._round:
                    path.unlink(missing_ok=True)


def _is_sent(path: Path) -> bool:
    return f"-{_SENT}" in path.name
