"""What a client learns from: data sets, how they are divided among clients, and each client's own train/test split.

    DataConfig  --->  dataset_info(config)            the server builds its model from it   text_info
                --->  held_out(config)                the server scores the global model    held_out_texts
                --->  unlabelled(config)              what it trains on unlabelled (FedBE)  unlabelled_texts
                --->  load_client(config, node, ...)  one client's examples                 load_client_texts

A client's examples come from its own `data-path` (a deployment), or are one partition of a named dataset (a
simulation). Partitions are made by flwr-datasets. Everything is numpy, images are float32 in 0..1 and channel-first;
training normalises them (`normalise`) and turns them into tensors. All randomness derives from (`seed`, purpose,
client), so that every process computes the same partition and the same split.

What can be read at a `data-path`, and as the run's `dataset` (each format's file here says more):

    data.npz                          arrays: images, labels and groups            npz.py
    root/<class>/<file>               images, also root/<group>/<class>/<file>     folders.py
    root/train-images-idx3-ubyte, …   MNIST's family, also .gz                     idx.py
    root/data_batch_1, …              CIFAR-10 and CIFAR-100, python and binary    cifar.py
    table.csv, .jsonl, .parquet       images or texts, in columns by the config    tables.py
    plays.txt                         running text by speaker                      texts.py
    data.json, train/*.json, …        LEAF's FEMNIST and Shakespeare               leaf.py

Numbers to regress on are read from .npz files and tables, by functions of their own again (`number_info`,
`held_out_numbers`, `load_client_numbers`; numbers.py).

Data sets that are known by name (known.py) have layouts and columns of their own:

    <domain>_train.txt, …             DomainNet, and FedScale's OpenImage          lists.py
    xglue.nc.<language>.train, …      XGLUE's news, and 20 Newsgroups              articles.py
    ARC-Easy-Train.jsonl, …           tables of questions and others               named.py

Text files may be compressed (.gz, .xz). Of texts, callers get `Texts`, by functions of their own; numbers are made of
them by an `Encoder` (a tokenizer; `CharVocabulary` for characters).

A `.npz` file holds images and labels under one of these pairs of names (the first pair found is read):

    images, labels            all examples
    x, y                      all examples
    images_train, labels_train  (and images_test, labels_test)
    x_train, y_train            (and x_test, y_test)
    train_images, train_labels  (and test_images, test_labels)

Its images are N x H x W, N x C x H x W or N x H x W x C, either integers 0..255 (scaled to 0..1) or floats 0..1; labels
are N integers from 0 on. Where data brings a test set, that is the test set: the server's if it is the run's `dataset`
(`held-out-fraction` does not apply), the client's own if it is a client's `data-path` (`test-fraction` does not apply).
Where classes have names, a class's label is the position of its name in `class-names`, else among the sorted names.
Images of all formats are brought to `image-shape`, where it is given. Groups (writer, domain, site) are kept with the
examples.
"""

from tepal.training.data.checks import checked_arrays
from tepal.training.data.config import LOCAL, DataConfig, DataError
from tepal.training.data.examples import (
    ClientData,
    ClientNumbers,
    ClientTexts,
    DatasetInfo,
    Encoder,
    Examples,
    ImageArrays,
    NumberInfo,
    Numbers,
    TextInfo,
    Texts,
)
from tepal.training.data.formats.files import opened_text, suffix_of
from tepal.training.data.formats.images import IMAGE_SUFFIXES, read_image
from tepal.training.data.formats.npz import npz_examples
from tepal.training.data.loading import (
    asked_texts,
    check_partition,
    class_names,
    dataset_info,
    held_out,
    held_out_numbers,
    held_out_texts,
    load_client,
    load_client_numbers,
    load_client_texts,
    number_info,
    own_stamp,
    text_info,
    unlabelled,
    unlabelled_texts,
)
from tepal.training.data.normalisation import check_normalise, normalise
from tepal.training.data.partitions import BY_LABEL
from tepal.training.data.vocabulary import CharVocabulary

__all__ = [
    "BY_LABEL",
    "IMAGE_SUFFIXES",
    "LOCAL",
    "CharVocabulary",
    "ClientData",
    "ClientNumbers",
    "ClientTexts",
    "DataConfig",
    "DataError",
    "DatasetInfo",
    "Encoder",
    "Examples",
    "ImageArrays",
    "NumberInfo",
    "Numbers",
    "TextInfo",
    "Texts",
    "asked_texts",
    "check_normalise",
    "check_partition",
    "checked_arrays",
    "class_names",
    "dataset_info",
    "held_out",
    "held_out_numbers",
    "held_out_texts",
    "load_client",
    "load_client_numbers",
    "load_client_texts",
    "normalise",
    "npz_examples",
    "number_info",
    "opened_text",
    "own_stamp",
    "read_image",
    "suffix_of",
    "text_info",
    "unlabelled",
    "unlabelled_texts",
]
