"""Data sets that are known by name: what a run may know of them before a file is read, and how they come.

One more is one more entry of `KNOWN`. Mean and standard deviation are those of the training images' values in 0..1,
channel by channel, as they are commonly used; of pacs, domainnet and openimage those of ImageNet, for models that were
trained on it. LEAF's FEMNIST and EMNIST (whose parts differ) have none here: give numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from tepal.training.data.config import DIGITS, DataConfig, DataError, Reading, Shape
from tepal.training.data.examples import AnySource
from tepal.training.data.formats.articles import is_newsgroups, is_xglue, read_newsgroups, read_xglue
from tepal.training.data.formats.lists import is_domainnet, is_openimage, read_domainnet, read_openimage
from tepal.training.data.formats.named import JSON, SUFFIXES, Made, Tables, has_tables, read_named

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
    """What is known of a data set.

    of: what its examples are.
    files: which it comes in, in words.
    shape, classes, class_names: None, 0 and (): as in the files.
    group: what examples are grouped by, in words.
    tables: its columns, where it comes in tables.
    own: a layout of files that no other data set has: whether a path has it, and what reads it.
    within: folders of a path that may have the files in its place.
    hub, subset: what it is called on the Hugging Face hub; "": it is not there in files that can be read.
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
        """What reads the files at a path, and where they are; None where no layout of its own is there."""
        for place in (path, *(path / name for name in self.within)):
            if place.exists():
                if self.own and self.own[0](place):
                    return self.own[1], place
                if self.tables and has_tables(place, self.tables):
                    return partial(read_named, tables=self.tables), place
        return None

    def place(self, path: Path) -> Path:
        """The folder of a path that has the files, where one is known to have them."""
        return next((path / name for name in self.within if (path / name).is_dir()), path)


def _one_of_four(question: str, right: str, *wrong: str) -> tuple[str, ...]:
    """The choices of SciQ, in an order that the question alone decides."""
    place = zlib.crc32(question.encode()) % (len(wrong) + 1)
    return (*wrong[:place], right, *wrong[place:])


def _place_of_right(question: str, right: str, *wrong: str) -> int:
    return zlib.crc32(question.encode()) % (len(wrong) + 1)


def _supported(support: str, question: str) -> str:
    return f"{support.strip()}\n{question}" if support.strip() else question


def _category(category: object) -> object:
    if str(category).strip().isdecimal():
        raise DataError(
            f"news_category {category} is a number, and which category that is no table says: write them by name "
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
        tables=Tables((_NEWS | {"group_column": "language"}, _NEWS), {"category": Made(("news_category",), _category)}),
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
            made={
                "supported": Made(("support", "question"), _supported),
                "choices": Made(_SCIQ, _one_of_four),
                "place": Made(_SCIQ, _place_of_right),
            },
            suffixes=(*SUFFIXES, JSON),
        ),
        within=("data",), hub="allenai/sciq",
    ),
}  # fmt: skip

_DIGITS = Known(IMAGES, "", (1, 8, 8), 10)


def reading_of(config: DataConfig) -> Reading:
    """What is known of a run's shape and classes, by its config or the name of its dataset, before a file is read."""
    known = _DIGITS if config.dataset == DIGITS else KNOWN.get(config.dataset)
    if not known:
        return Reading.of(config)
    reading = Reading.of(config, shape=known.shape, classes=known.classes)
    if not config.class_count:
        reading = replace(reading, class_names=known.class_names)
    return replace(reading, name="" if config.dataset == DIGITS else config.dataset)


def listed_names() -> str:
    """The known data sets as a table in Markdown, for docs/data.md."""
    lines = ["| name | what it has | groups | files at `dataset-path` | on the hub |", "|---|---|---|---|---|"]
    for name, known in KNOWN.items():
        shape = f" {'x'.join(map(str, known.shape))}" if known.shape else ""
        classes = f", {known.classes} classes" if known.classes else ""
        hub = " ".join(filter(None, (known.hub, known.subset)))
        lines.append(f"| `{name}` | {known.of}{shape}{classes} | {known.group} | {known.files} | {hub} |")
    return "\n".join(lines)
