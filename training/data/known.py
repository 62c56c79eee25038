"""Data sets known by name: their sizes, files and columns.

A new data set is a new entry of `KNOWN`. Mean and standard deviation are the common statistics of the training images
in 0..1, per channel; for pacs, domainnet and openimage those of ImageNet, for pretrained models. FEMNIST and EMNIST
(whose parts differ) have none: set `normalise` to numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from tepal.training.data.config import COLUMNS, DIGITS, DataConfig, DataError, Reading, Shape
from tepal.training.data.examples import AnySource
from tepal.training.data.formats.articles import is_newsgroups, is_xglue, read_newsgroups, read_xglue
from tepal.training.data.formats.lists import is_domainnet, is_openimage, read_domainnet, read_openimage
from tepal.training.data.formats.named import SUFFIXES, DerivedColumn, Tables, has_tables, read_named
from tepal.training.data.formats.tables import JSON

Channels = tuple[float, ...]

IMAGES: Final = "images"
TEXTS: Final = "texts"
QUESTIONS: Final = "questions"
CHARACTERS: Final = "characters"

_IDX = "train-images-idx3-ubyte and train-labels-idx1-ubyte, with t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PART = "train-….parquet and test-….parquet, or .jsonl"


@dataclass(frozen=True)
class Known:
    """Properties of a known data set.

    of: kind of its examples.
    files: its files, in words.
    shape, classes, class_names: None, 0 and () if the files determine them.
    group: meaning of its groups, in words.
    tables: its columns, if it is published in tables.
    own: check and reader of a file layout that only this data set has.
    within: subfolders of a path that may contain the files.
    hub, subset: name and configuration on the Hugging Face hub; "" if the hub does not have it in a readable format.
    """

    of: Literal["images", "texts", "questions", "characters"]
    files: str
    shape: Shape | None = None
    classes: int = 0
    class_names: tuple[str, ...] = ()
    mean: Channels = ()
    std: Channels = ()
    group: str = ""
    tables: Tables | None = None
    own: tuple[Callable[[Path], bool], Callable[[Path, Reading], AnySource]] | None = None
    within: tuple[str, ...] = ()
    hub: str = ""
    subset: str = ""

    def reader(self, path: Path) -> tuple[Callable[[Path, Reading], AnySource], Path] | None:
        """Return the reader for the files at a path, and their folder; None if they have a general format."""
        for place in (path, *(path / name for name in self.within)):
            if place.exists():
                if self.own and self.own[0](place):
                    return self.own[1], place
                if self.tables and has_tables(place, self.tables):
                    return partial(read_named, tables=self.tables), place
        return None

    def place(self, path: Path) -> Path:
        """Return the subfolder of a path that contains the files, if there is one, else the path."""
        return next((path / name for name in self.within if (path / name).is_dir()), path)


def _one_of_four(question: str, right: str, *wrong: str) -> tuple[str, ...]:
    """Return the choices of a question of SciQ, in an order derived from the question."""
    place = zlib.crc32(question.encode()) % (len(wrong) + 1)
    return (*wrong[:place], right, *wrong[place:])


def _place_of_right(question: str, right: str, *wrong: str) -> int:
    return zlib.crc32(question.encode()) % (len(wrong) + 1)


def _supported(support: str, question: str) -> str:
    return f"{support.strip()}\n{question}" if support.strip() else question


def _category(category: object) -> object:
    if str(category).strip().isdecimal():
        raise DataError(
            f"news_category {category} is a number, which has no defined category: write categories by name "
            f"({', '.join(_CATEGORIES)})"
        )
    return category


_SCIQ = ("question", "correct_answer", "distractor1", "distractor2", "distractor3")
_STEM = {"text_column": "question.stem", "choices_column": "question.choices", "label_column": "answerKey"}
_NEWS = {"text_column": "news_title", "second_text_column": "news_body", "label_column": "category"}
_CATEGORIES = (
    "autos", "entertainment", "finance", "foodanddrink", "health", "lifestyle", "news", "sports", "travel", "video",
)  # fmt: skip
_NEWSGROUPS = (
    "alt.atheism", "comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware", "comp.sys.mac.hardware",
    "comp.windows.x", "misc.forsale", "rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey",
    "sci.crypt", "sci.electronics", "sci.med", "sci.space", "soc.religion.christian", "talk.politics.guns",
    "talk.politics.mideast", "talk.politics.misc", "talk.religion.misc",
)  # fmt: skip


def _images(label: str = "label", group: str = "", image: str = "image") -> dict[str, str]:
    return {"image_column": image, "label_column": label, "group_column": group}


def _arc(subset: str) -> Known:
    columns = {"text_column": "question", "choices_column": "choices", "label_column": "answerKey"}
    files = f"{subset}-Train.jsonl and {subset}-Test.jsonl, or {_PART}"
    return Known(
        QUESTIONS, files, tables=Tables((columns, _STEM)), within=(subset,), hub="allenai/ai2_arc", subset=subset
    )


KNOWN: Mapping[str, Known] = {
    "mnist": Known(
        IMAGES, _IDX, (1, 28, 28), 10, mean=(0.1307,), std=(0.3081,), tables=Tables((_images(),)), hub="ylecun/mnist"
    ),
    "fashion-mnist": Known(
        IMAGES, _IDX, (1, 28, 28), 10, mean=(0.2860,), std=(0.3530,), tables=Tables((_images(),)),
        hub="zalando-datasets/fashion_mnist",
    ),
    "emnist": Known(
        IMAGES, "emnist-<part>-train-images-idx3-ubyte, -labels-idx1-ubyte and the same of test", (1, 28, 28)
    ),
    "femnist": Known(
        IMAGES, "LEAF's json, in the folders train and test", (1, 28, 28), 62, group="writer",
        tables=Tables((_images("character", "writer_id"),)), hub="flwrlabs/femnist",
    ),
    "cifar-10": Known(
        IMAGES, "data_batch_1 to data_batch_5 and test_batch", (3, 32, 32), 10,
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
        tables=Tables((_images(image="img"),)), hub="uoft-cs/cifar10",
    ),
    "cifar-100": Known(
        IMAGES, "train and test", (3, 32, 32), 100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762),
        tables=Tables((_images("fine_label", image="img"),)), hub="uoft-cs/cifar100",
    ),
    "pacs": Known(
        IMAGES, "<domain>/<class>/<file>, also in the folder kfold", classes=7,
        class_names=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        mean=_IMAGENET[0], std=_IMAGENET[1], group="domain",
        tables=Tables((_images(group="domain"),)), within=("kfold",), hub="flwrlabs/pacs",
    ),
    "domainnet": Known(
        IMAGES, "<domain>_train.txt, <domain>_test.txt and the folders <domain>/<class>/<file>", (3, 224, 224), 345,
        mean=_IMAGENET[0], std=_IMAGENET[1], group="domain",
        tables=Tables((_images(group="domain"), _images("y", "domain"))), own=(is_domainnet, read_domainnet),
        hub="wltjr1007/DomainNet",
    ),
    "openimage": Known(
        IMAGES, "FedScale's client_data_mapping/train.csv and test.csv, with images in the folders train and test",
        (3, 256, 256), 596, mean=_IMAGENET[0], std=_IMAGENET[1], group="client", own=(is_openimage, read_openimage),
    ),
    "20newsgroups": Known(
        TEXTS, "20news-bydate-train/<newsgroup>/<file> and 20news-bydate-test/…, or tables train and test",
        classes=20, class_names=_NEWSGROUPS,
        tables=Tables(({"text_column": "text", "label_column": "label", "split_column": "split"},
                       {"text_column": "text", "label_column": "label"})),
        own=(is_newsgroups, read_newsgroups), within=("20news-bydate",), hub="SetFit/20_newsgroups",
    ),
    "xglue-nc": Known(
        TEXTS, "xglue.nc.<language>.train, .dev and .test", classes=10, class_names=_CATEGORIES, group="language",
        tables=Tables((_NEWS | {"group_column": "language"}, _NEWS),
                      {"category": DerivedColumn(("news_category",), _category)}),
        own=(is_xglue, read_xglue), within=("NC", "xglue_full_dataset/NC"),
    ),
    "shakespeare": Known(
        CHARACTERS, "LEAF's json, in the folders train and test, or text by speaker (.txt)", group="role",
        tables=Tables(({"text_column": "text", "label_column": "", "group_column": "play,role"},)),
    ),
    "arc-easy": _arc("ARC-Easy"),
    "arc-challenge": _arc("ARC-Challenge"),
    "openbookqa": Known(
        QUESTIONS, f"train.jsonl and test.jsonl, or {_PART}",
        tables=Tables(({"text_column": "question_stem", "choices_column": "choices", "label_column": "answerKey"},
                       _STEM)),
        within=("main", "Main", "Data/Main"), hub="allenai/openbookqa", subset="main",
    ),
    "piqa": Known(
        QUESTIONS, "train.jsonl with train-labels.lst, and dev.jsonl (or valid.jsonl) with its labels, or tables with "
        "the labels in them",
        tables=Tables(({"text_column": "goal", "choices_column": "sol1,sol2", "label_column": "label"},),
                      test=("dev", "valid", "validation")),
        within=("physicaliqa-train-dev",),
    ),
    "sciq": Known(
        QUESTIONS, f"train.json and test.json, or {_PART}",
        tables=Tables(
            ({"text_column": "supported", "choices_column": "choices", "label_column": "place"},),
            derived={
                "supported": DerivedColumn(("support", "question"), _supported),
                "choices": DerivedColumn(_SCIQ, _one_of_four),
                "place": DerivedColumn(_SCIQ, _place_of_right),
            },
            suffixes=(*SUFFIXES, JSON),
        ),
        within=("data",), hub="allenai/sciq",
    ),
}  # fmt: skip

_DIGITS = Known(IMAGES, "", (1, 8, 8), 10)
_UNKNOWN = Known(IMAGES, "")


def reading_of(config: DataConfig) -> Reading:
    """Return the run's settings for reading, with shape and classes of a known dataset, without reading files."""
    known = _DIGITS if config.dataset == DIGITS else KNOWN.get(config.dataset, _UNKNOWN)
    return Reading(
        shape=config.shape or known.shape,
        classes=config.class_count or known.classes,
        resize=config.shape is not None,
        class_names=config.names if config.class_count else known.class_names,
        unreadable=config.unreadable_images,
        feature_columns=config.feature_columns,
        features=config.feature_count,
        outputs=config.output_count,
        normalised=bool(config.normalise),
        name=config.dataset if config.dataset in KNOWN else "",
        **{name: getattr(config, name) for name in COLUMNS},
    )


def listed_names() -> str:
    """Return the known data sets as a table in Markdown, for docs/data.md."""
    lines = ["| name | contents | groups | files at `dataset-path` | name on the hub |", "|---|---|---|---|---|"]
    for name, known in KNOWN.items():
        shape = f" {'x'.join(map(str, known.shape))}" if known.shape else ""
        classes = f", {known.classes} classes" if known.classes else ""
        hub = " ".join(filter(None, (known.hub, known.subset)))
        lines.append(f"| `{name}` | {known.of}{shape}{classes} | {known.group} | {known.files} | {hub} |")
    return "\n".join(lines)
