"""Arrays on disk: safetensors files that appear whole, and that are known to be what was written when they are read."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tepal.exchange.layout import Arrays
from tepal.exchange.parts import Digests, digest
from tepal.host.files import replacing

SUFFIX = ".safetensors"

_DIGEST = "sha256/"  # and an array's name: its digest, in the file's metadata
_RESERVED = "__metadata__"  # the format's own name among those of arrays
_DTYPES = {
    "BOOL": "bool",
    "C64": "complex64",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}  # dtypes: the format's names, and numpy's


class DamagedFile(ValueError):
    """A file that does not hold what was written into it."""


def write_arrays(
    path: Path, arrays: Arrays, *, durable: bool = True, digests: Digests | None = None, replace: bool = True
) -> None:
    """Write a safetensors file, so that readers see all of it or none of it.

    The digest of every array goes into the metadata; `read_arrays` checks it. `durable`: wait until the disk has it.
    `digests`: of arrays that are never changed, where they are known already or wanted again.
    `replace`: whether the new file takes the place of one that exists; otherwise that one stays.
    Raises OSError, and ValueError for a name that the format does not allow.
    """
    if _RESERVED in arrays:
        raise ValueError(f"no array in a safetensors file can be named {_RESERVED!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: _contiguous(array) for name, array in arrays.items()}
    values = (digests or Digests()).of_all([*map(np.asarray, arrays.values())])
    metadata = {f"{_DIGEST}{name}": value.hex() for name, value in zip(arrays, values, strict=True)}
    metadata["arrays"] = str(len(contiguous))  # a file without any must have metadata to be read again
    with replacing(path, durable=durable, overwrite=replace) as partial:
        try:
            save_file(contiguous, partial, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_arrays(path: Path, digests: Mapping[str, bytes] | None = None) -> dict[str, np.ndarray]:
    """Read a file of `write_arrays`; the arrays are read-only.

    Args:
        path: the file.
        digests: what the arrays must be, by name; by default what the file says of itself.

    Raises:
        DamagedFile: another content than was written.
        OSError: no such file, or one that cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays: dict[str, np.ndarray] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if digests is None:
                metadata = file.metadata() or {}
                digests = {
                    key.removeprefix(_DIGEST): bytes.fromhex(value)
                    for key, value in metadata.items()
                    if key.startswith(_DIGEST)
                }
                if digests.keys() != arrays.keys():
                    raise ValueError("its arrays are not those that it lists")
        changed = [name for name, value in digests.items() if digest(arrays[name]) != value]
    except OSError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"it cannot be read as a safetensors file of this project ({error})") from error
    if changed:
        raise DamagedFile(f"its entries do not have the digests they were kept under, {changed[0]!r} first")
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def map_arrays(path: Path) -> dict[str, tuple[np.ndarray, bytes]]:
    """Name → (array, digest) of a file that was just written: read-only views of the file as it is mapped into memory,
    from which the system drops what it needs room for, and the digests that the file says. Nothing is checked.

    The views stay what they are when the file is removed or another is renamed to its place.
    """
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(mapping[:8], "little")
    header = json.loads(mapping[8:begin])
    metadata = header.pop(_RESERVED)
    found: dict[str, tuple[np.ndarray, bytes]] = {}
    for name, says in header.items():
        kind = np.dtype(_DTYPES[says["dtype"]])
        array = np.ndarray(tuple(says["shape"]), kind, mapping, begin + says["data_offsets"][0])
        found[name] = array, bytes.fromhex(metadata[f"{_DIGEST}{name}"])
    return found


def _contiguous(array: np.ndarray) -> np.ndarray:
    # Not np.ascontiguousarray: that turns a 0-d array into one of shape (1,).
    return np.array(array, order="C", copy=None)
