"""A client's part whose update is scaled down, without a copy of its values where they are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from tepal.exchange.threads import CHUNK, PIECE, in_threads


class ScaledPart(Mapping[str, np.ndarray]):
    """The part s + c·(x − s), where x are the values that a client returned, and s those from which it started.

    It can be read as any other part; an entry is computed each time it is read, so that no second model is held. A
    weighted mean does not read it:

        w·(s + c·(x − s)) = w·c·x + w·(1 − c)·s

    so that it needs no more than x, with a smaller weight, and s once for all parts that start from it. Integer and
    bool entries, such as counters, are x itself.

    Args:
        returned: entry name → x.
        starts: entry name → s, in the shape of x; s is zero for entries that are not there. They must not change until
            the mean is computed.
        factor: c, in (0, 1].
    """

    def __init__(self, returned: Mapping[str, np.ndarray], starts: Mapping[str, np.ndarray], factor: float) -> None:
        self.returned, self.starts, self.factor = returned, starts, factor

    def __getitem__(self, name: str) -> np.ndarray:
        x = self.returned[name]
        return _scaled(x, self.starts.get(name), self.factor) if x.dtype.kind == "f" else x

    def __iter__(self) -> Iterator[str]:
        return iter(self.returned)

    def __len__(self) -> int:
        return len(self.returned)


def as_returned(part: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The arrays of a part before they are scaled, which have its names, shapes and dtypes."""
    return part.returned if isinstance(part, ScaledPart) else part


def chosen(part: Mapping[str, np.ndarray], names: Iterable[str]) -> Mapping[str, np.ndarray]:
    """Some entries of a part, scaled as the part is."""
    some = {name: as_returned(part)[name] for name in names}
    return ScaledPart(some, part.starts, part.factor) if isinstance(part, ScaledPart) else some


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
