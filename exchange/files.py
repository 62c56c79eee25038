"""Arrays in safetensors files, which are written atomically and verified when they are read."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tepal.exchange.layout import Arrays
from tepal.exchange.parts import DIGEST_BYTES, Digests, digest, digests_of, earlier_digest
from tepal.host.files import ABANDONED, remove_abandoned, replacing

SUFFIX = ".safetensors"
LONGEST_LABEL = 80
"""Characters of a tree or a block in the name of a part's file."""

_DIGEST = "blake3/"  # followed by an array's name: the key of its digest in the file's metadata
_EARLIER = "sha256/"  # the same in files of earlier versions
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_UNFINISHED = ".tmp*"  # names under which the format's library begins to write
_UNREADABLE = "it cannot be read as a safetensors file of this project ({})"
_RESERVED = "__metadata__"  # the key of the metadata in the format's header
_DTYPES = {
    "BOOL": "bool",
    "C64": "complex64",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}  # dtypes: the format's names, and numpy's


def file_name(text: str) -> str:
    """A file name that is unique to `text`, without a dot."""
    return quote(text, safe="").replace(".", "%2E")


def shortened(text: str, longest: int = 255) -> str:
    """The text, or if its `file_name` has more characters a readable part of it with its digest."""
    if len(file_name(text)) <= longest:
        return text
    readable = re.sub(r"[^0-9A-Za-z]+", "-", text)[:40]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class DamagedFile(ValueError):
    """A file whose content is not what was written."""


def write_arrays(
    path: Path, arrays: Arrays, *, durable: bool = True, digests: Digests | None = None, replace: bool = True
) -> None:
    """Write a safetensors file atomically, with the digest of every array in its metadata.

    Args:
        path: the file.
        arrays: name → array.
        durable: wait until the disk has written it.
        digests: known digests, to which those of these arrays are added; for arrays that are never changed.
        replace: replace an existing file; otherwise it stays.

    Raises:
        OSError: the file cannot be written; FileNotFoundError: its folder was removed meanwhile.
        ValueError: the format does not allow the name of an array.
    """
    if _RESERVED in arrays:
        raise ValueError(f"an array in a safetensors file cannot be named {_RESERVED!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: _contiguous(array) for name, array in arrays.items()}
    values = (digests or Digests()).of_all([*map(np.asarray, arrays.values())])
    metadata = {f"{_DIGEST}{name}": value.hex() for name, value in zip(arrays, values, strict=True)}
    metadata["arrays"] = str(len(contiguous))  # a file without arrays cannot be read if it has no metadata
    with replacing(path, durable=durable, overwrite=replace) as partial:
        try:
            save_file(contiguous, partial, metadata=metadata)
        except SafetensorError as error:
            raise _as_os_error(error) from error


def read_arrays(path: Path, digests: Mapping[str, bytes] | None = None) -> dict[str, np.ndarray]:
    """Read a file of `write_arrays`, also of an earlier version; the arrays are read-only.

    Args:
        path: the file.
        digests: the arrays' digests, by name; by default those in the file's metadata.

    Raises:
        DamagedFile: the content is not what was written.
        OSError: the file does not exist or cannot be opened.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays: dict[str, np.ndarray] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            of = digest
            if digests is None:
                metadata = file.metadata() or {}
                digests = _listed(metadata, _DIGEST)
                if not digests and (earlier := _listed(metadata, _EARLIER)):
                    digests, of = earlier, earlier_digest
                if digests.keys() != arrays.keys():
                    raise ValueError("its arrays are not those that it lists")
        found = digests_of({name: arrays[name] for name in digests}, of)
        changed = [name for name, value in digests.items() if found[name] != value]
    except OSError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(_UNREADABLE.format(error)) from error
    if changed:
        raise DamagedFile(f"{len(changed)} entries do not have their digests, {changed[0]!r} first")
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def listed_digests(path: Path) -> dict[str, bytes]:
    """Name → digest that a file of `write_arrays` lists. Raises DamagedFile and OSError."""
    try:
        with safe_open(path, framework="numpy") as file:
            return _listed(file.metadata() or {}, _DIGEST)
    except OSError:
        raise
    except (SafetensorError, TypeError, ValueError) as error:
        raise DamagedFile(_UNREADABLE.format(error)) from error


def map_arrays(path: Path) -> dict[str, tuple[np.ndarray, bytes]]:
    """Name → (array, digest) of a file that was just written. The arrays are not compared with their digests.

    The arrays are read-only views of the memory-mapped file, which the system can drop from memory. They stay valid
    when the file is removed or replaced.

    Raises:
        DamagedFile: the file is not one of `write_arrays`.
        OSError: the file does not exist or cannot be opened.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = 8 + int.from_bytes(mapping[:8], "little")
        header = json.loads(mapping[8:begin])
        metadata = header.pop(_RESERVED)
        found: dict[str, tuple[np.ndarray, bytes]] = {}
        for name, about in header.items():
            kind = np.dtype(_DTYPES[about["dtype"]])
            shape, start = tuple(about["shape"]), begin + about["data_offsets"][0]
            if start < begin or min(shape, default=0) < 0 or start + math.prod(shape) * kind.itemsize > len(mapping):
                raise ValueError(f"{name!r} is not within the file")  # NumPy does not check a negative start
            array = np.ndarray(shape, kind, mapping, start)
            found[name] = array, bytes.fromhex(metadata[f"{_DIGEST}{name}"])
            if len(found[name][1]) != DIGEST_BYTES:
                raise ValueError(f"the digest of {name!r} has the wrong length")
        return found
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise DamagedFile(_UNREADABLE.format(error)) from error


def _listed(metadata: Mapping[str, str], prefix: str) -> dict[str, bytes]:
    return {key.removeprefix(prefix): bytes.fromhex(text) for key, text in metadata.items() if key.startswith(prefix)}


def remove_unfinished(folder: Path, *, after: float = ABANDONED) -> None:
    """Remove what `write_arrays` left in this folder because its process was killed `after` seconds ago or earlier."""
    remove_abandoned(folder, _UNFINISHED, after=after)


def _as_os_error(error: SafetensorError) -> OSError:
    """The error with the system's number, from which Python makes FileNotFoundError, for example."""
    number = _OS_ERROR.search(str(error))
    return OSError(int(number[1]), str(error)) if number else OSError(str(error))


def _contiguous(array: np.ndarray) -> np.ndarray:
    # np.ascontiguousarray would give a 0-d array the shape (1,).
    return np.array(array, order="C", copy=None)
