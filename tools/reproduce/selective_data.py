"""Data of the experiments on selective layers: files of images, of texts, and of lists by client, by part.

The parts are that of the results (`main`), that of the search (`search`), and that of the texts to pretrain on. They
are written once. At the paper's scale the results have the training and the test examples as published; a search has
four fifths of the training examples, and is scored on the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tepal.records.run_directory import write_whole
from tepal.tools.reproduce.data import Images, shuffled_images, write_images
from tepal.tools.reproduce.experiment import MissingData, TrialInputs
from tepal.tools.reproduce.networks import write_text_model
from tepal.training.data.config import DataConfig
from tepal.training.data.examples import Source, Texts
from tepal.training.data.known import KNOWN
from tepal.training.data.sources import named_source

_TEXT_MODEL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}

# Newsgroups by subject. The first two of each subject are its two domains; the small text model is pretrained on the
# others, each a class.
SUBJECTS = {
    "computers": ("comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware",
                  "comp.sys.mac.hardware", "comp.windows.x"),
    "leisure": ("rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey"),
    "science": ("sci.crypt", "sci.electronics", "sci.med", "sci.space"),
    "politics": ("talk.politics.guns", "talk.politics.mideast", "talk.politics.misc"),
    "religion": ("alt.atheism", "soc.religion.christian", "talk.religion.misc"),
}  # fmt: skip
_DOMAINS, _PARTS = 2, 8
CLASSES = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
"""The classes of DomainNet in FedBN (arXiv 2102.07623), whose division the paper follows."""
SEARCHED_SHARE = 5
"""At the paper's scale a search is scored on one of so many training examples."""


def images(data: str, inputs: TrialInputs, part: str, full: bool) -> Path:
    """A file of the images of the results or of the search, written once. They share none in the small setting, and no
    test images at the paper's scale. For PACS a group is a fifth of a domain."""
    path = inputs.folder / "images" / f"{data}-{part}.npz"
    if path.exists():
        return path
    train, test = shuffled_images(data, inputs.data[data], seed=1)
    if test is None:
        test, train = train.first(1_500), train.first(len(train), after=1_500)
    eighth, last = min(len(train), 8_000) // 8, len(train) // SEARCHED_SHARE
    if full:
        chosen, tested = (train.first(len(train), after=last), train.first(last)) if part == "search" else (train, test)
    elif part == "main":
        chosen, tested = train.first(4 * eighth), test.first(1_500)
    else:
        chosen, tested = train.first(3 * eighth, after=4 * eighth), train.first(eighth, after=7 * eighth)
    if data == "pacs":
        if chosen.groups is None:
            raise MissingData(f"{inputs.data[data]} has no domain for each image")
        fifths = [int(np.sum(chosen.groups[:k] == group)) % 5 for k, group in enumerate(chosen.groups)]
        groups = np.array([f"{group}-{k}" for group, k in zip(chosen.groups, fifths, strict=True)])
        chosen = Images(chosen.images, chosen.labels, groups)
    return write_images(path, chosen, tested)


def newsgroups(folder: Path, path: Path) -> Path:
    """Write tables of texts, once, and the folder of a small model: newsgroups to pretrain on (`pretraining.jsonl`),
    and newsgroups by domain for the results (`main.jsonl`) and for the search (`search.jsonl`), a third of the training
    texts, of which a quarter is its test set.

    Labels are the newsgroups to pretrain on, and the subjects otherwise; a group is an eighth of a domain.

    Returns:
        The folder.
    """
    lines: dict[str, list[str]] = {"pretraining": [], "search": [], "main": []}
    if (folder / "main.jsonl").exists():
        return folder
    source = named_source(DataConfig(dataset="20newsgroups", dataset_path=str(path)))
    assert isinstance(source, Source) and isinstance(source.train, Texts) and isinstance(source.test, Texts)
    subjects = list(SUBJECTS)
    domain_of = {name: (k, subjects.index(subject)) for subject, names in SUBJECTS.items()
                 for k, name in enumerate(names[:_DOMAINS])}  # fmt: skip
    others = [name for names in SUBJECTS.values() for name in names[_DOMAINS:]]
    for split, part in (("train", source.train), ("test", source.test)):
        assert part.labels is not None
        count: dict[int, int] = {}
        for text, label in zip(part.texts, part.labels, strict=True):
            name = source.class_names[label]
            if name in domain_of:
                domain, subject = domain_of[name]
                number = count[domain] = count.get(domain, -1) + 1
                searched = split == "train" and number // _PARTS % 3 == 0
                tested = searched and number // _PARTS // 3 % 4 == 0
                line = {"text": text, "label": subject, "split": "test" if tested else split,
                        "group": f"{domain}-{number % _PARTS}"}  # fmt: skip
                lines["search" if searched else "main"].append(json.dumps(line))
            elif name in others:
                lines["pretraining"].append(
                    json.dumps({"text": text, "label": others.index(name), "split": split})
                )
    write_text_model(folder / "model", source.train.texts, _TEXT_MODEL)
    for name, each in lines.items():
        write_whole(folder / f"{name}.jsonl", ("\n".join(each) + "\n").encode())
    return folder


def domainnet(folder: Path, path: Path, part: str, clients: int) -> Path:
    """Write lists of DomainNet's images of `CLASSES` for each client, `<domain>_<number>_train.txt`, and of the test
    images of each domain; returns their folder. Raises MissingData."""
    train, test = (
        {file.name.removesuffix(f"_{each}.txt"): _of_classes(file) for file in sorted(path.glob(f"*_{each}.txt"))}
        for each in ("train", "test")
    )
    if not train or train.keys() != test.keys():
        raise MissingData(f"{path} needs the lists <domain>_train.txt and <domain>_test.txt of every domain")
    parts, tests = by_client(train, test, part, clients)
    for domain in train:
        for name in CLASSES:
            _link(folder / domain / name, path / domain / name)
    for name, lines in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)  # the reader expects a folder for each list
        _write(folder / f"{name}_train.txt", lines)
    for name, lines in tests.items():
        _write(folder / f"{name}_test.txt", lines)
    return folder


def _of_classes(file: Path) -> list[str]:
    """The lines of a list of DomainNet whose images are of `CLASSES`, with the label's place in it."""
    images = [line.rpartition(" ")[0] for line in file.read_text().splitlines()]
    names = [image.split("/")[-2] if "/" in image else "" for image in images]
    return [f"{image} {CLASSES.index(name)}" for image, name in zip(images, names, strict=True) if name in CLASSES]


def xglue(folder: Path, path: Path, part: str, clients: int) -> Path:
    """Write XGLUE's news of each client, `xglue.nc.<language>_<number>.dev`, from the validation files, of which every
    language has one of the same size, and the test files; returns their folder. Raises MissingData."""
    place = KNOWN["xglue-nc"].place(path)
    train, test = _news(place, "dev"), _news(place, "test")
    labelled = all(line.count("\t") == 2 for of in test.values() for line in of[:1])
    if not train or train.keys() != test.keys() or not labelled:
        raise MissingData(
            f"{path} needs xglue.nc.<language>.dev and .test of every language, with the category in the last column"
        )
    parts, tests = by_client(train, test, part, clients)
    for suffix, of in (("dev", parts), ("test", tests)):
        for name, lines in of.items():
            _write(folder / f"xglue.nc.{name}.{suffix}", lines)
    return folder


def _news(path: Path, part: str) -> dict[str, list[str]]:
    """Language → the lines of its file."""
    texts = {file.name.split(".")[2]: file.read_text("utf-8") for file in sorted(path.glob(f"xglue.nc.*.{part}"))}
    return {language: [line for line in text.split("\n") if line] for language, text in texts.items()}


def by_client(
    train: Mapping[str, Sequence[str]], test: Mapping[str, Sequence[str]], part: str, clients: int
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Divide the training examples of groups among clients, each of which gets random ones of one group.

    Args:
        train, test: group → its examples.
        part: "main", or "search".
        clients: at least as many as groups; client k has a part of group k modulo their number, so that the numbers
            of clients of two groups differ by at most one.

    Returns:
        Client, named `<group>_<number>`, → its training examples; and group → its test examples.
    """
    rng, groups = np.random.default_rng(1), [*train]
    shuffled = {group: [lines[k] for k in rng.permutation(len(lines))] for group, lines in train.items()}
    tests = {group: [*lines] for group, lines in test.items()}
    if part == "search":
        tests = {group: lines[: len(lines) // SEARCHED_SHARE] for group, lines in shuffled.items()}
        shuffled = {group: lines[len(lines) // SEARCHED_SHARE :] for group, lines in shuffled.items()}
    parts = dict[str, list[str]]()
    for k, group in enumerate(groups):
        count = len(range(k, clients, len(groups)))
        parts |= {f"{group}_{number:02d}": shuffled[group][number::count] for number in range(count)}
    return parts, tests


def _write(path: Path, lines: Sequence[str]) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def _link(path: Path, to: Path) -> None:
    if to.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.symlink_to(to.absolute())
