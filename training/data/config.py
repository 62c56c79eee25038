"""The run config's keys about data, and `DataError`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from tepal.host.toml import separated
from tepal.training.config import keys

Shape = tuple[int, int, int]
"""Shape of an image: channels, height, width."""

DIGITS = "digits"
LOCAL = "local"
EVERY = "*"
"""Value of `feature-columns`: every column of a table that has no other use."""
DATASET = "dataset"
"""Value of `normalise`: the statistics of the run's own dataset."""


class DataError(ValueError):
    """Raised for data that cannot be found, read or used; the message names client, file or key, and what to do."""


def _without_gaps(text: str) -> str:
    """Return names between commas as they are. Raises ValueError if one is empty."""
    if "" in separated(text):
        raise ValueError("a name between commas is empty: remove the comma")
    return text


class DataConfig(BaseModel):
    """The run config's keys about data. In the run config they are written with hyphens (`dirichlet-alpha`)."""

    model_config = keys()

    dataset: str = Field(
        default=DIGITS,
        min_length=1,
        description='"digits" (ships with scikit-learn: 1,797 images of 8x8), a path to a .npz file, to a folder of '
        "images (root/<class name>/*.png), of idx files (MNIST) or of CIFAR's batches, to a table (.csv, .tsv, .jsonl, "
        ".parquet), to text by speaker (.txt) or to LEAF's json; a name: mnist, fashion-mnist, emnist, femnist, "
        "cifar-10, cifar-100, pacs, domainnet, openimage, 20newsgroups, xglue-nc, shakespeare, arc-easy, "
        "arc-challenge, openbookqa, piqa or sciq (its files at dataset-path, else from the Hugging Face hub: "
        'docs/data.md); "hub:<name>" (downloaded from the hub); or "local": every client reads its own data-path (from '
        "its node config)",
    )
    dataset_path: str = Field(
        default="",
        description="file or folder of a dataset that is given by its name, such as mnist; "
        '"": downloaded from the Hugging Face hub, if the hub has it',
    )
    partitioner: Literal["iid", "dirichlet", "pathological", "natural"] = Field(
        default="dirichlet",
        description='how a named dataset is divided among clients: "iid" (at random, equal sizes), "dirichlet" (each '
        'class divided by a draw from a Dirichlet distribution), "pathological" (few classes per client), '
        '"natural" (by groups, such as writers: one group per client, or several whole groups with fewer clients)',
    )
    dirichlet_alpha: float = Field(
        default=0.5,
        gt=0,
        allow_inf_nan=False,
        description="concentration of the dirichlet partitioner: with smaller values clients differ more",
    )
    min_partition_size: int = Field(
        default=10, ge=1, description="fewest examples of a client; partitions are drawn again until it is reached"
    )
    classes_per_client: int = Field(
        default=2, ge=1, description="classes of each client under the pathological partitioner"
    )
    test_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="share of each client's examples that is its own test split"
    )
    held_out_fraction: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="share of a named dataset that no client gets and on which the server scores the global model "
        "(0: none; not used if the data has a test set)",
    )
    server_share: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="share of the training examples of a named dataset that no client gets and that the server keeps, "
        "without their labels, for a strategy that trains on them (fedbe)",
    )
    image_shape: str = Field(
        default="",
        description='shape of an image as "CxHxW" (channels, height, width), such as "1x8x8"; images of other '
        'sizes are resized, and converted to grey or colour; "": as in the dataset (required for dataset="local")',
    )
    classes: int = Field(
        default=0, ge=0, description='number of classes; 0: as in the dataset (required for dataset="local")'
    )
    features: int = Field(
        default=0,
        ge=0,
        description="numbers in an input of a table's classification or a regression, or in a position of a sequence; "
        '0: as in the dataset, or the number of feature-columns (one of them is required for dataset="local")',
    )
    outputs: int = Field(
        default=0,
        ge=0,
        description='size of a regression\'s target; 0: as in the dataset (required for dataset="local", unless '
        "feature-columns is set: then the number of columns in label-column)",
    )
    class_names: str = Field(
        default="",
        description='names of the classes, separated by commas, in the order of their labels; "": the names found, '
        "sorted (clients with their own data-path then need the same names)",
    )
    image_column: str = Field(
        default="image",
        min_length=1,
        description="column of a table with the images: encoded bytes, or paths relative to the table's file",
    )
    text_column: str = Field(
        default="", description='column of a table with texts; "": the table has images (image-column)'
    )
    second_text_column: str = Field(default="", description='column of a table with the second text of pairs; "": none')
    choices_column: str = Field(
        default="",
        description="column of a table with the choices of a question (text-column), or several columns with one each, "
        "separated by commas; label-column gives the right one: its position from 0 on, letter, label or text",
    )
    feature_columns: str = Field(
        default="",
        description="columns of a table with numbers, the inputs of a classification or a regression, separated by "
        'commas; "*": every column with a name, except label-column, group-column and split-column',
    )
    label_column: str = Field(
        default="label",
        description='column of a table with the labels: class names, or whole numbers; "": running text without '
        "labels, whose next characters are the targets; in a regression the column with the targets, which are "
        "numbers, or several, separated by commas",
    )
    group_column: str = Field(
        default="",
        description="column of a table (or several, separated by commas), or array of a .npz file, with the group of "
        'each example (writer, site, domain); "": in a .npz file the array group, groups or writer, if there is one',
    )
    split_column: str = Field(
        default="", description='column of a table with "train" or "test"; "": the table has no test set'
    )
    normalise: str = Field(
        default="",
        description="scale images to mean 0 and standard deviation 1 by the statistics of this data set (mnist, "
        "fashion-mnist, cifar-10, cifar-100; pacs, domainnet, openimage: by ImageNet's; clip: by those of CLIP's "
        "pretrained models) or by numbers as "
        '"mean/std", such as "0.5/0.25", with commas between channels; scale the features of a table or of a '
        'regression by numbers, with commas between features, or by the statistics of the run\'s dataset ("dataset"); '
        '"": none',
    )
    unreadable_images: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="share of the images that may be unreadable (at least one image, unless it is 0); they are logged "
        "and left out, and with more of them the data is an error",
    )
    seed: int = Field(default=42, ge=0, description="seed of the held-out set, the partition and the train/test splits")

    @field_validator("image_shape")
    @classmethod
    def _is_shape(cls, text: str) -> str:
        text = text.strip().lower()
        if text and not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*){2}", text):
            raise ValueError('write "CxHxW" with three whole numbers from 1 on, e.g. "1x8x8", or ""')
        return text

    @field_validator("class_names")
    @classmethod
    def _are_names(cls, text: str, info: ValidationInfo) -> str:
        text = unicodedata.normalize("NFC", text)  # as `name_of` the names in files
        names = separated(_without_gaps(text))
        if len(set(names)) < len(names):
            raise ValueError("a name occurs twice: leave one out")
        if names and info.data.get("classes") not in (0, None, len(names)):
            raise ValueError(f"{len(names)} names, but classes={info.data['classes']}: give as many names as classes")
        return text

    @field_validator("feature_columns", "group_column", "label_column", "choices_column")
    @classmethod
    def _are_columns(cls, text: str) -> str:
        return _without_gaps(text)

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Self:
        """Read the data keys of a run config; other keys are ignored.

        Raises:
            DataError: a value is out of range; the message has the key, the value and what is allowed.
        """
        try:
            return cls.model_validate(dict(run_config))
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg'].removeprefix('Value error, ')}"
                for one in error.errors()
            ]
            raise DataError("run config: " + "; ".join(lines)) from error

    @property
    def shape(self) -> Shape | None:
        """`image_shape` as (channels, height, width); None if the dataset determines it."""
        if not self.image_shape:
            return None
        channels, height, width = (int(size) for size in self.image_shape.split("x"))
        return channels, height, width

    @property
    def names(self) -> tuple[str, ...]:
        """`class_names` as a tuple; empty if the dataset determines them."""
        return separated(self.class_names)

    @property
    def feature_count(self) -> int:
        """Features of an input by `features` or `feature_columns`; 0 if the dataset determines them."""
        return self.features or (0 if self.feature_columns == EVERY else len(separated(self.feature_columns)))

    @property
    def output_count(self) -> int:
        """Outputs of a target by `outputs` or `label_column`; 0 if the dataset determines them."""
        return self.outputs or (len(separated(self.label_column)) if self.feature_columns else 0)

    @property
    def class_count(self) -> int:
        """Number of classes by `classes` or `class_names`; 0 if the dataset determines it."""
        return self.classes or len(self.names)


COLUMNS = (
    "image_column", "text_column", "second_text_column", "choices_column", "label_column", "group_column",
    "split_column",
)  # fmt: skip
"""Settings of `DataConfig` and of `Reading` that name columns of a table, except those of a regression's inputs."""


@dataclass(frozen=True)
class Reading:
    """Settings of a run for reading files. `shape` None and `classes` 0: as in the file."""

    shape: Shape | None = None
    classes: int = 0
    resize: bool = False
    """Whether images of other sizes are resized to `shape`: if it comes from `image-shape`, not from the dataset."""
    class_names: tuple[str, ...] = ()
    image_column: str = "image"
    text_column: str = ""
    second_text_column: str = ""
    choices_column: str = ""
    label_column: str = "label"
    group_column: str = ""
    split_column: str = ""
    unreadable: float = 0.01
    feature_columns: str = ""
    features: int = 0
    outputs: int = 0
    numbers: bool = False
    """Whether numbers are read instead of images or texts."""
    labelled: bool = False
    """Whether the numbers have classes instead of targets."""
    normalised: bool = False
    """Whether numbers are scaled after they were read, so that no warning of their scale is needed."""
    name: str = ""
    """Name of a known data set; "" for others."""
