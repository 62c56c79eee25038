"""What a client keeps for itself from round to round: its own model, a control variate, a codec's residual.

    <root>/<experiment>/personal/<name>/<round>-<exchange id>.safetensors

It never travels, and follows the client's name: over restarts of its process, of its node, and of a run that is
resumed. Server and client must agree how far it is. A reply may be lost or refused, or the server may go back to a
checkpoint; then the client must not be ahead of it. So every version carries the id of the exchange that made it, and
the server's next message says which one counts. The client decides nothing.
"""

from __future__ import annotations

import contextlib
from logging import getLogger
from pathlib import Path

import numpy as np

from tepal.exchange.files import SUFFIX, DamagedFile, read_arrays, write_arrays
from tepal.exchange.layout import Arrays, Names
from tepal.host.files import remove_abandoned

log = getLogger("flwr")

_LEFT_OUT = "left out/"  # how the names begin of what encodings keep


class PersonalState:
    """The personal state of one client in one exchange. An app gets it from `received(msg).personal`.

    Args:
        folder: of this client's versions.
        current: id of the exchange whose version counts; "" when none does yet.
        keep: ids of versions that the server may still go back to.
        exchange: id of this exchange.
        round: number of this round.
        advances: whether this exchange may make a new version: training does, scoring does not.
    """

    def __init__(
        self, folder: Path, *, current: str, keep: Names, exchange: str, round: int, advances: bool = True
    ) -> None:
        self._folder = folder
        self._current = current
        self._keep = frozenset((*keep, current, exchange))
        self._exchange = exchange
        self._round = round
        self._advances = advances
        self._staged: Arrays | None = None
        self._left_out: Arrays | None = None
        self._own: Arrays = {}  # as `load` returns them, after `load_left_out`
        self.lost = ""
        """Why the version that counts is not here, after `load` found so; "" when all is well."""

    def load(self) -> dict[str, np.ndarray]:
        """The values as the server counts them (read-only arrays); {} for a client that has none yet, or lost them."""
        return {name: array for name, array in self._load().items() if not name.startswith(_LEFT_OUT)}

    def load_left_out(self) -> dict[str, np.ndarray]:
        """What encodings have left out of this client's uploads."""
        found = self._load()
        self._own = {name: array for name, array in found.items() if not name.startswith(_LEFT_OUT)}
        return {name.removeprefix(_LEFT_OUT): found[name] for name in found.keys() - self._own.keys()}

    def save_left_out(self, values: Arrays) -> None:
        """As `save`, of what `load_left_out` has returned; what is an app's own stays, where it saves nothing new."""
        self._left_out = values

    def _load(self) -> dict[str, np.ndarray]:
        if not self._current:
            return {}
        path = next(iter(self._folder.glob(f"*-{self._current}{SUFFIX}")), None)
        try:
            if path is None:
                raise DamagedFile("it is not in this client's folder")
            return read_arrays(path)
        except (OSError, DamagedFile) as error:
            self.lost = f"the personal state is lost, and begins anew: {error}"
            log.warning("Personal state in %s cannot be used: %s.", self._folder, error)
            return {}

    def save(self, values: Arrays) -> None:
        """Hand in new values. They are written when the app has returned, and count once the server says so."""
        if not self._advances:
            raise RuntimeError("personal state advances where a client trains, not where it scores a model")
        self._staged = values

    def commit(self) -> None:
        """Write what was handed in. Raises OSError: then the reply must not be merged."""
        if self._staged is None and self._left_out is None:
            return
        values = dict(self._own if self._staged is None else self._staged)
        values |= {_LEFT_OUT + name: array for name, array in (self._left_out or {}).items()}
        write_arrays(self._folder / f"{self._round:06d}-{self._exchange}{SUFFIX}", values)

    def prune(self) -> None:
        """Remove versions that nobody will ask for.

        A message that waited long may be older than what is here; so versions of later rounds stay.
        """
        remove_abandoned(self._folder)
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"*-*{SUFFIX}"):
                made_in, _, exchange = path.name.removesuffix(SUFFIX).partition("-")
                if exchange not in self._keep and made_in.isdigit() and int(made_in) <= self._round:
                    path.unlink(missing_ok=True)
