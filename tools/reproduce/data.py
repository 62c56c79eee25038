"""Data of experiments: where it is read from, and the subsets that the settings use."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tepal.records.run_directory import write_whole
from tepal.tools.reproduce.experiment import MissingData
from tepal.training.data.config import DataConfig
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.known import IMAGES, KNOWN
from tepal.training.data.sources import named_source

_SOURCES = {"shakespeare": "LEAF, data/shakespeare", "xglue-nc": "XGLUE, news classification"}  # not on the hub


def find_data(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Path of each data set, `folder/<name>` or `folder/<name>.<suffix>`. Raises MissingData that names all missing."""
    paths = {name: [folder / name, *sorted(folder.glob(f"{name}.*"))] for name in names}
    found = {name: path for name, each in paths.items() if (path := next(filter(Path.exists, each), None))}
    if missing := [name for name in names if name not in found]:
        wanted = "".join(f"\n{_wanted(folder, name)}" for name in missing)
        raise MissingData(f"missing data; put it there, or name its folder by --data FOLDER:{wanted}")
    return found


def sizes(found: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """Number of files and their bytes for each data set, by which a replaced data set is recognised."""
    sizes_of = {}
    for name, path in found.items():
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        sizes_of[name] = {"files": len(files), "bytes": sum(each.stat().st_size for each in files)}
    return sizes_of


def _wanted(folder: Path, name: str) -> str:
    """Where the files of a missing data set belong, their format and their origin."""
    known = KNOWN[name]
    array = f"{folder / name}.npz with the arrays x_train, y_train, x_test, y_test, or " if known.of == IMAGES else ""
    source = f"{known.hub} on the Hugging Face hub" if known.hub else _SOURCES[name]
    return (
        f"  {name}: the folder {folder / name} with {known.files}; or {array}a table ({folder / name}.parquet, "
        f".jsonl, .csv). From {source}."
    )


@dataclass(frozen=True)
class Images:
    """Images (n, channels, height, width), their labels (n,), and the group, such as a client, of each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    groups: NDArray[np.str_] | None = None

    def take(self, chosen: NDArray[np.int64]) -> Images:
        """The images at these indices."""
        return Images(self.images[chosen], self.labels[chosen], None if self.groups is None else self.groups[chosen])

    def first(self, count: int, after: int = 0) -> Images:
        """Up to `count` images, without the first `after`."""
        return self.take(np.arange(after, min(after + count, len(self.labels))))

    def __len__(self) -> int:
        return len(self.labels)


def shuffled_images(
    name: str, path: Path, *, seed: int = 0, grouped: bool = True
) -> tuple[Images, Images | None]:
    """The training and test images of a data set, each shuffled by the seed; None without a test set.

    `grouped`: whether a .npz file must have the data set's groups; other formats of it contain them.
    """
    groups = KNOWN[name].group if grouped and path.suffix == ".npz" else ""
    source = named_source(DataConfig(dataset=name, dataset_path=str(path), group_column=groups))
    assert isinstance(source, Source) and isinstance(source.train, ImageArrays)
    test = source.test
    assert test is None or isinstance(test, ImageArrays)
    return _shuffled(source.train, seed), None if test is None else _shuffled(test, seed + 1)


def _shuffled(kept: ImageArrays, seed: int) -> Images:
    order = np.random.default_rng(seed).permutation(len(kept))
    return Images(kept.images, kept.labels, kept.groups).take(order)


def write_images(path: Path, train: Images, test: Images | None = None) -> Path:
    """Write a .npz file that a run config can name as its `dataset`; returns its path."""
    arrays: dict[str, NDArray[np.generic]] = {"x_train": train.images, "y_train": train.labels}
    if train.groups is not None:
        arrays["group"] = train.groups
    if test is not None:
        arrays |= {"x_test": test.images, "y_test": test.labels}
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())
    return path


def by_distribution(
    labels: NDArray[np.int64], clients: int, each: int, alpha: float, seed: int
) -> list[NDArray[np.int64]]:
    """Draw examples for each client by a label distribution of its own from Dir(alpha), none of them twice.

    Args:
        labels: (n,).
        clients: number of clients.
        each: examples per client.
        alpha: of the Dirichlet distribution. When a class is used up, the others take its share.
        seed: of the draws.

    Returns:
        Indices (each,) of every client's examples.
    """
    rng = np.random.default_rng(seed)
    classes = np.unique(labels)
    left = {int(label): list(rng.permutation(np.flatnonzero(labels == label))) for label in classes}
    drawn = []
    for _ in range(clients):
        shares, chosen = rng.dirichlet(np.full(len(classes), alpha)), list[int]()
        while len(chosen) < each:
            available = np.array([bool(left[int(label)]) for label in classes])
            if not available.any():
                raise ValueError(f"{len(labels)} examples are too few for {clients} clients of {each}")
            weights = np.where(available, np.maximum(shares, 1e-12), 0)
            for label in rng.choice(classes, each - len(chosen), p=weights / weights.sum()):
                if left[int(label)]:
                    chosen.append(left[int(label)].pop())
        drawn.append(np.array(chosen, np.int64))
    return drawn


def grouped(images: Images, parts: Sequence[NDArray[np.int64]]) -> Images:
    """The images at the indices of all parts, each part a group."""
    names = np.concatenate([np.full(len(part), f"client-{k:03d}") for k, part in enumerate(parts)])
    taken = images.take(np.concatenate(list(parts)))
    return Images(taken.images, taken.labels, names)
