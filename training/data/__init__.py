"""Data sets, their partitions among clients, and each client's train/test split.

    DataConfig  --->  dataset_info(config)            sizes for the server's model; text_info, table_info, …
                --->  held_out(config, kind)          the server's test set
                --->  unlabelled(config, kind)        the server's unlabelled set (FedBE)
                --->  load_client(config, node, ...)  one client's examples

The kind of examples is `ImageArrays`, `Texts`, `Numbers` or `LabelledNumbers`. A client's examples come from its own
`data-path` (deployment), or are one partition of a named dataset (simulation). Partitions are made by flwr-datasets.
Everything is numpy; images are float32 in 0..1 and channel-first, and are normalised (`normalise`) and converted to
tensors for training. All randomness derives from (`seed`, purpose, client), so that every process computes the same
partition and the same split.

Formats of a `data-path` and of the run's `dataset` (each module has the details):

    data.npz                          arrays: images, labels and groups            npz.py
    root/<class>/<file>               images, also root/<group>/<class>/<file>     folders.py
    root/train-images-idx3-ubyte, …   MNIST's family, also .gz                     idx.py
    root/data_batch_1, …              CIFAR-10 and CIFAR-100, python and binary    cifar.py
    table.csv, .tsv, .jsonl, .parquet images or texts, columns named by the config  tables.py
    plays.txt                         running text by speaker                      texts.py
    data.json, train/*.json, …        LEAF's FEMNIST and Shakespeare               leaf.py

Numbers with classes, and those for regression, are read from .npz files and tables (numbers.py).

Data sets known by name (known.py) may have their own layouts and columns:

    <domain>_train.txt, …             DomainNet, and FedScale's OpenImage          lists.py
    xglue.nc.<language>.train, …      XGLUE's news, and 20 Newsgroups              articles.py
    ARC-Easy-Train.jsonl, …           tables of questions and others               named.py

Text files may be compressed (.gz, .xz). An `Encoder` (a tokenizer, or `CharVocabulary` for characters) converts `Texts`
to ids. If the data has a test set, it is the server's for the run's `dataset` (`held-out-fraction` does not apply), and
the client's own for its `data-path` (`test-fraction` does not apply). Groups (writer, domain, site) are kept with the
examples.
"""

from tepal.training.data.checks import checked_arrays
from tepal.training.data.config import LOCAL, DataConfig, DataError
from tepal.training.data.examples import (
    ClientData,
    DatasetInfo,
    Encoder,
    ImageArrays,
    LabelledNumbers,
    NumberInfo,
    Numbers,
    TableInfo,
    TextInfo,
    Texts,
)
from tepal.training.data.formats.files import opened_text, suffix_of
from tepal.training.data.formats.images import IMAGE_SUFFIXES, read_image
from tepal.training.data.formats.npz import npz_examples
from tepal.training.data.loading import (
    by_dataset,
    check_partition,
    class_names,
    dataset_info,
    dataset_stamp,
    held_out,
    load_client,
    load_client_numbers,
    load_client_texts,
    number_info,
    own_stamp,
    table_info,
    text_info,
    texts_to_predict,
    unlabelled,
)
from tepal.training.data.normalisation import check_normalise, normalise, normalised_numbers
from tepal.training.data.partitions import BY_LABEL
from tepal.training.data.vocabulary import CharVocabulary

__all__ = [
    "BY_LABEL",
    "IMAGE_SUFFIXES",
    "LOCAL",
    "CharVocabulary",
    "ClientData",
    "DataConfig",
    "DataError",
    "DatasetInfo",
    "Encoder",
    "ImageArrays",
    "LabelledNumbers",
    "NumberInfo",
    "Numbers",
    "TableInfo",
    "TextInfo",
    "Texts",
    "by_dataset",
    "check_normalise",
    "check_partition",
    "checked_arrays",
    "class_names",
    "dataset_info",
    "dataset_stamp",
    "held_out",
    "load_client",
    "load_client_numbers",
    "load_client_texts",
    "normalise",
    "normalised_numbers",
    "npz_examples",
    "number_info",
    "opened_text",
    "own_stamp",
    "read_image",
    "suffix_of",
    "table_info",
    "text_info",
    "texts_to_predict",
    "unlabelled",
]
