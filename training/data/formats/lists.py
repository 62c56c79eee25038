"""Images listed in files with their labels: DomainNet's lists by domain, and FedScale's OpenImage by client.

DomainNet: <domain>_train.txt and <domain>_test.txt have lines `<domain>/<class>/<file> <label>`. The domain is the
group. Peng et al., Moment Matching for Multi-Source Domain Adaptation (arXiv:1812.01754).

OpenImage: client_data_mapping/train.csv and test.csv have the columns client_id, sample_path, label_name and label_id;
the images are in the folders train and test. The client is the group. Lai et al., FedScale (arXiv:2105.11367).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tepal.training.data.checks import checked_source
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.formats.files import opened_text
from tepal.training.data.formats.images import read_listed
from tepal.training.data.formats.tables import read_columns
from tepal.training.data.labels import name_of, numbers_of

MAPPING = "client_data_mapping"

_PARTS = ("train", "test")


class Listed(NamedTuple):
    """An image: its file, its class by name and number, and its group."""

    file: Path
    name: str
    label: int
    group: str


def is_domainnet(root: Path) -> bool:
    """Return whether a folder has DomainNet's lists."""
    return root.is_dir() and any(root.glob("*_train.txt"))


def read_domainnet(root: Path, reading: Reading) -> Source[ImageArrays]:
    """Read the images of all domains with lists. Raises DataError for a missing folder or an invalid line."""
    parts: dict[str, list[Listed]] = {}
    for part in _PARTS:
        for file in sorted(root.glob(f"*_{part}.txt")):
            domain = file.name.removesuffix(f"_{part}.txt")
            if not (root / domain).is_dir():
                raise DataError(f"{file}: lists images of {domain}, but the folder {root / domain} is missing: add it")
            with opened_text(file) as text:
                lines = [line.rpartition(" ") for line in text.read().splitlines() if line.strip()]
            for number, (path, _, label) in enumerate(lines, 1):
                if path.count("/") < 2 or not label.isdecimal():
                    raise DataError(
                        f"{file}: line {number} is {path} {label}: expected <domain>/<class>/<file> <label>"
                    )
                parts.setdefault(part, []).append(Listed(root / path, name_of(path.split("/")[-2]), int(label), domain))
    return _source(parts, root, reading)


def is_openimage(root: Path) -> bool:
    """Return whether a folder has FedScale's mapping of OpenImage."""
    return (root / MAPPING / "train.csv").is_file()


def read_openimage(root: Path, reading: Reading) -> Source[ImageArrays]:
    """Read the images of all clients, and the test set if it has a mapping. Raises DataError."""
    parts: dict[str, list[Listed]] = {}
    for part in _PARTS:
        mapping = root / MAPPING / f"{part}.csv"
        if not mapping.is_file():
            continue
        if not (root / part).is_dir():
            raise DataError(f"{mapping}: lists images, but their folder {root / part} is missing: add it")
        table = read_columns(mapping, ("client_id", "sample_path", "label_name", "label_id"))
        parts[part] = []
        for row, (client, path, name, label) in enumerate(zip(*table.values(), strict=True), 1):
            if not label.isdecimal():
                raise DataError(f"{mapping}: row {row}: label_id {label!r} is not a whole number from 0 on")
            parts[part].append(Listed(root / part / Path(path).name, name_of(name), int(label), client))
    return _source(parts, root, reading)


def _source(parts: Mapping[str, list[Listed]], root: Path, reading: Reading) -> Source[ImageArrays]:
    """Return the source; labels are the listed numbers, or positions in `class-names`."""
    known = {entry.label: entry.name for entries in parts.values() for entry in entries}
    names: tuple[str, ...] = ()
    if reading.class_names:
        numbers = numbers_of(sorted(set(known.values())), reading, f"{root}", "listed classes")
        parts = {
            part: [entry._replace(label=numbers[entry.name]) for entry in entries] for part, entries in parts.items()
        }
        names = reading.class_names
    elif sorted(known) == list(range(reading.classes)):
        names = tuple(known[label] for label in range(reading.classes))
    read = {
        part: read_listed([(entry.file, entry.label, entry.group) for entry in entries], f"{root}: {part}", reading)
        for part, entries in parts.items()
        if entries
    }
    return checked_source(read, str(root), reading, names=names)
