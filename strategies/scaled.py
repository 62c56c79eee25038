"""A client's part whose update is scaled down, without a copy of its values where they are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tepal.exchange.threads import CHUNK, PIECE, in_threads


class ScaledPart(Mapping[str, np.ndarray]):
    """The part s + c·(x − s), where x are the values that a client returned, and s those from which it started.

    It can be read as any other part: an entry is computed when it is read, and kept. A weighted mean does not read it:

        w·(s + c·(x − s)) = w·c·x + w·(1 − c)·s

    so that it needs no more than x, with a smaller weight, and once for all clients s. Integer and bool entries, such
    as counters, are x itself.

    Args:
        returned: entry name → x.
        starts: entry name → s, in the shape and dtype of x; s is zero for entries that are not there.
        factor: c, in (0, 1].
    """

    def __init__(self, returned: Mapping[str, np.ndarray], starts: Mapping[str, np.ndarray], factor: float) -> None:
        self.returned, self.starts, self.factor = returned, starts, factor
        self._computed: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        x = self.returned[name]
        if x.dtype.kind != "f":
            return x
        if name not in self._computed:
            self._computed[name] = _scaled(x, self.starts.get(name), self.factor)
        return self._computed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.returned)

    def __len__(self) -> int:
        return len(self.returned)


def _scaled(x: np.ndarray, s: np.ndarray | None, c: float) -> np.ndarray:
    """s + c·(x − s), in threads; s is zero if it is None."""
    scaled = np.empty_like(x)
    flat, out, start = x.reshape(-1), scaled.reshape(-1), None if s is None else s.reshape(-1)

    def scale(first: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(first, min(first + PIECE, x.size), CHUNK):
                at = slice(k, min(k + CHUNK, first + PIECE))
                change = flat[at] if start is None else np.subtract(flat[at], start[at], out=out[at])
                np.multiply(change, c, out=out[at])
                if start is not None:
                    np.add(out[at], start[at], out=out[at])

    in_threads(scale, range(0, x.size, PIECE), x.nbytes)
    return scaled
