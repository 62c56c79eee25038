"""Personal state, which a client keeps from round to round: its own model, a control variate, an encoding's residual.

    <root>/<experiment>/personal/<name>/<round>-<exchange id>.safetensors

It is never sent. It belongs to the client's name, and survives restarts of the process, of the node and of the run.
Server and client must agree on its version: when a reply is lost or refused, or the server restores a checkpoint, the
client must go back as well. Every version therefore has the id of the exchange that made it, and the server's next
message names the current one.
"""

from __future__ import annotations

import contextlib
from logging import getLogger
from pathlib import Path

import numpy as np

from tepal.exchange.files import SUFFIX, DamagedFile, read_arrays, remove_unfinished, write_arrays
from tepal.exchange.layout import Arrays, Names

log = getLogger("flwr")

_LEFT_OUT = "left out/"  # prefix of the names of arrays that encodings keep


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
        self.lost = ""
        """Why the current version could not be loaded; "" if it could."""

    def load(self) -> dict[str, np.ndarray]:
        """The current version (read-only arrays); {} for a client that has none yet, or has lost it."""
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
        path = next(iter(self._folder.glob(f"*-{self._current}{SUFFIX}")), None)
        try:
            if path is None:
                raise DamagedFile("its file is not in this client's folder")
            return read_arrays(path)
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
        """Write the stored values. Raises OSError: the reply must then not be merged."""
        if self._staged is None and self._left_out is None:
            return
        values = dict(self._own if self._staged is None else self._staged)
        values |= {_LEFT_OUT + name: array for name, array in (self._left_out or {}).items()}
        path = self._folder / f"{self._round:06d}-{self._exchange}{SUFFIX}"
        write_arrays(path, values, durable=self._durable)

    def prune(self) -> None:
        """Remove versions that the server will not restore. Those of later rounds stay: the message may be late."""
        remove_unfinished(self._folder)
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"*-*{SUFFIX}"):
                made_in, _, exchange = path.name.removesuffix(SUFFIX).partition("-")
                if exchange not in self._keep and made_in.isdigit() and int(made_in) <= self._round:
                    path.unlink(missing_ok=True)
