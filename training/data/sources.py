"""Reading a dataset by its name, or by the files at a path. Results are cached."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

from tepal.training.data.checks import checked_source
from tepal.training.data.config import DIGITS, LOCAL, DataConfig, DataError, Reading
from tepal.training.data.examples import AnySource, ImageArrays, LabelledNumbers, Numbers, Source
from tepal.training.data.formats.cifar import is_cifar, read_cifar
from tepal.training.data.formats.files import suffix_of
from tepal.training.data.formats.folders import class_folders, read_folder
from tepal.training.data.formats.idx import is_idx, read_idx
from tepal.training.data.formats.leaf import is_leaf, read_leaf
from tepal.training.data.formats.named import PLAIN
from tepal.training.data.formats.npz import read_npz
from tepal.training.data.formats.tables import TABLE_SUFFIXES, is_tables, read_tables
from tepal.training.data.formats.texts import read_speakers
from tepal.training.data.hub import HUB, load_hub
from tepal.training.data.known import IMAGES, KNOWN, reading_of

EXPECTED = (
    "a .npz file, a table (.csv, .tsv, .jsonl, .parquet), text by speaker (.txt), LEAF's json, or a folder: of images "
    "as root/<class name>/<file>, of idx files (MNIST), of CIFAR's batches, of LEAF's json, or of tables train and test"
)
"""Formats that can be read at a path, in words."""

_DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"  # path in scikit-learn
_MOST_FILES = 20_000  # files whose times are read one by one
_DEEPEST = 4  # levels of folders that are read, because links may be circular

Reader = Callable[[Path, Reading], AnySource]


def reading_for(config: DataConfig, kind: type) -> Reading:
    """Return the run's settings for reading examples of a kind; images and texts are told apart by the data."""
    labelled = kind is LabelledNumbers
    return replace(reading_of(config), numbers=labelled or kind is Numbers, labelled=labelled)


def named_source(config: DataConfig, kind: type = ImageArrays, stamped: str = "") -> AnySource:
    """Read the run's dataset, a known name or a path, for examples of a kind. Raises DataError.

    `stamped` is as of `path_source`.
    """
    reading = reading_for(config, kind)
    if config.dataset_path and config.dataset not in KNOWN:
        raise DataError(
            f"dataset-path={config.dataset_path!r} and dataset={config.dataset!r}: dataset-path is for a dataset "
            f"that is given by its name ({', '.join(KNOWN)}): set dataset to the path itself"
        )
    if config.dataset in KNOWN:
        return path_source(config.dataset_path, reading, stamped) if config.dataset_path else _download(reading)
    if config.dataset.startswith(HUB):
        return load_hub(config.dataset.removeprefix(HUB), reading)
    if config.dataset == DIGITS:
        return load_digits(reading)
    if not Path(config.dataset).expanduser().exists() and not re.search(r"[/\\]|\.\w+$", config.dataset):
        near = difflib.get_close_matches(config.dataset.lower(), (DIGITS, LOCAL, *KNOWN), n=1)
        raise DataError(
            f"dataset={config.dataset!r} is not known{f' (did you mean {near[0]!r}?)' if near else ''}: allowed are "
            f'"{DIGITS}", "{LOCAL}" (every client reads its own data-path), {", ".join(KNOWN)} (with dataset-path), '
            f'"{HUB}<name>", a path to a .npz file, an image folder, or another path: {EXPECTED}'
        )
    return path_source(config.dataset, reading, stamped)


def _download(reading: Reading) -> AnySource:
    """Read a known data set from the hub. The DataError says which files to put where."""
    known = KNOWN[reading.name]
    files = (
        f"set dataset-path to a folder with its files as published ({known.files}), or to a "
        f"{'.npz file or a ' if known.of == IMAGES else ''}table of them"
    )
    if not known.hub:
        raise DataError(f"dataset={reading.name!r} is not on the hub: {files}")
    try:
        return load_hub(known.hub, reading, known.subset, known.tables or PLAIN, named=known.own is None)
    except DataError as error:
        raise DataError(f"{error}; or {files}") from error


def path_source(text: str, reading: Reading, stamped: str = "") -> AnySource:
    """Read a file or folder in any of the formats, as its files were when they had this `stamp`; "": as they are now.

    Raises DataError, also if the files have been changed since and this process has not read them before.
    """
    path = Path(text).expanduser().absolute()
    try:
        return load_path(path, reading).at(stamped or stamp(path))
    except _Changed as changed:
        if stamped:
            raise
        return changed.source  # other files may have been added while these were read
    except FileNotFoundError as error:
        known = KNOWN.get(reading.name)
        expected = f"for {reading.name}: {known.files}" if known else f"is {EXPECTED}"
        raise DataError(f"{path}: no such file or folder (expected {expected}): correct the path") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}: check permissions and disk") from error


def stamp(path: Path) -> str:
    """Return a digest of names, times and sizes at and below a path, which changes with the files. Raises OSError.

    The images that a single table names are elsewhere, and are not part of it.
    With more than 20,000 files only the folders' times are used, which change when a file is added or removed but not
    when one is overwritten: reading all times would take more than a second.
    """
    seen, files = [_file_state(path)], 0
    folders = [(path, 1)] if path.is_dir() else []
    while folders:
        folder, depth = folders.pop()
        for entry in os.scandir(folder):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                seen.append(_file_state(entry))
                folders += [(Path(entry.path), depth + 1)] if depth < _DEEPEST else []
            else:
                files += 1
                if files <= _MOST_FILES:
                    seen.append(_file_state(entry))
    if files > _MOST_FILES:
        seen = [one for one in seen if one[0]]
    return hashlib.blake2b(repr(sorted(seen)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _file_state(entry: Path | os.DirEntry[str]) -> tuple[bool, str, int, int]:
    """Return whether it is a folder, its path, time of modification and size."""
    try:
        now = entry.stat()
    except OSError:
        now = entry.stat(follow_symlinks=False)  # a broken link
    return stat.S_ISDIR(now.st_mode), os.fspath(entry), now.st_mtime_ns, now.st_size


class _Changed(DataError):
    """Files have another stamp after they were read."""

    def __init__(self, path: Path, source: AnySource) -> None:
        super().__init__(f"{path}: the files were changed after the run began, or while they were read: start it again")
        self.source = source


class _LastRead:
    """The files at a path, of which it keeps those that were read last: earlier ones would fill the memory."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._reading = path, reading
        self._kept: tuple[str, AnySource] | None = None  # `stamp` and source

    def at(self, stamped: str) -> AnySource:
        """Read the files if it does not keep them with this `stamp`, so that changed files are read again.

        Raises DataError if the files have another stamp after they were read.
        """
        kept = self._kept
        if kept and kept[0] == stamped:
            return kept[1]
        self._kept = kept = None  # both at once may be too much for the memory
        source = _read_path(self._path, self._reading)
        if stamp(self._path) != stamped:
            raise _Changed(self._path, source)
        self._kept = stamped, source
        return source


@lru_cache(maxsize=16)
def load_path(path: Path, reading: Reading) -> _LastRead:
    """Return what reads a path and keeps it for the process; nothing is read yet."""
    return _LastRead(path, reading)


def _read_path(path: Path, reading: Reading) -> AnySource:
    if (known := KNOWN.get(reading.name)) is None:
        return _reader(path)(path, reading)
    if found := known.reader(path):
        reader, place = found
        return reader(place, reading)
    place = known.place(path)
    reader = _reader(place)
    if reader is read_folder and (known.of != IMAGES or not class_folders(place)):
        raise DataError(f"{path}: has no files of {reading.name}: expected {known.files}")
    return reader(place, reading)


def _reader(path: Path) -> Reader:
    if not path.is_dir():
        if suffix_of(path) in TABLE_SUFFIXES:
            return read_tables
        if reader := _BY_SUFFIX.get(suffix_of(path)):
            return reader
        raise DataError(f"{path}: this kind of file is not supported: give {EXPECTED}")
    names = {file.name for file in path.iterdir() if file.is_file()}
    by_names: tuple[tuple[Callable[[set[str]], bool], Reader], ...] = (
        (is_idx, read_idx),
        (is_cifar, read_cifar),
        (is_tables, read_tables),
        (lambda names: is_leaf(path), read_leaf),
    )
    return next((reader for fits, reader in by_names if fits(names)), read_folder)


_BY_SUFFIX: Mapping[str, Reader] = {".npz": read_npz, ".npy": read_npz, ".json": read_leaf, ".txt": read_speakers}


@lru_cache(maxsize=16)
def load_digits(reading: Reading) -> Source[ImageArrays]:
    """Read the file of `sklearn.datasets.load_digits`: 64 pixels of 0..16 and a label on each line.

    The file is read directly, because importing scikit-learn takes seconds in each process.
    """
    try:
        table = np.loadtxt(str(distribution("scikit-learn").locate_file(_DIGITS_FILE)), delimiter=",")
    except (PackageNotFoundError, OSError) as error:
        raise DataError(
            f'dataset="{DIGITS}" comes with scikit-learn, which is missing ({error}): pip install scikit-learn'
        ) from error
    images = (table[:, :64].reshape(-1, 8, 8) / 16).astype(np.float32)
    return checked_source({"": (images, table[:, 64].astype(np.int64), None)}, f'dataset="{DIGITS}"', reading)
