"""Texts: tables, running text by speaker, LEAF's json, and characters as numbers."""

import csv
import gzip
import io
import json
import lzma
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tepal.training import data
from tepal.training.data import (
    CharVocabulary,
    DataConfig,
    DataError,
    TextInfo,
    dataset_info,
    held_out,
    load_client,
    load_client_texts,
    sources,
    text_info,
)
from tepal.training.data.formats.texts import LONGEST_PASSAGE, passages
from tests.packages import ROOT


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    yield
    sources.load_path.cache_clear()


def config_of(path: object, **config: object) -> DataConfig:
    return DataConfig.model_validate({"dataset": str(path), **config})


def read(path: object, **config: object) -> sources.AnySource:
    """A dataset as it is kept, in the order of its file."""
    return sources.named_source(config_of(path, **config))


def own(path: object, **config: object) -> data.ClientData[data.Texts]:
    """What a client with a `data-path` of its own gets in a run with dataset="local"."""
    return load_client_texts(config_of("local", **config), {"data-path": str(path)}, client="ward-3")


def json_lines(file: Path, rows: list[dict[str, object]]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, bytes)
    file.write_bytes(pack(content))
    return file


# Tables


ROWS: list[dict[str, object]] = [
    {"subject": "tides", "body": "The sea,\nagain", "kind": "sea", "by": "ann", "split": "train"},
    {"subject": "a \"dune\"", "body": "sand", "kind": "land", "by": "bo", "split": "test"},
    {"subject": "gulls", "body": "", "kind": "air", "by": "ann", "split": "train"},
]  # fmt: skip
COLUMNS = {"text-column": "body", "label-column": "kind", "group-column": "by"}


@pytest.mark.parametrize("form", [".csv", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet"])
def test_a_table_of_texts(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"t{form}"
    if form.startswith((".csv", ".tsv")):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(ROWS[0]), delimiter="," if form == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(ROWS)
        written = text.getvalue().encode()
        file.write_bytes(gzip.compress(written) if form.endswith(".gz") else written)
    elif form == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    else:
        json_lines(file, ROWS)
    source = read(file, **COLUMNS)
    assert isinstance(source.train, data.Texts) and source.train.texts == ("The sea,\nagain", "sand", "")
    assert source.train.labels is not None and source.train.labels.tolist() == [2, 1, 0]
    assert source.train.groups is not None and source.train.groups.tolist() == ["ann", "bo", "ann"]
    assert (source.class_names, source.train.seconds) == (("air", "land", "sea"), None)
    assert text_info(config_of(file, **COLUMNS)) == TextInfo(3, ("air", "land", "sea"))
    pairs = read(file, **COLUMNS, **{"second-text-column": "subject", "split-column": "split"})
    assert isinstance(pairs.train, data.Texts) and pairs.train.seconds == ("tides", "gulls")
    assert pairs.test is not None and pairs.test.labels is not None and pairs.test.labels.tolist() == [1]
    server = held_out(config_of(file, **COLUMNS, **{"split-column": "split"}), data.Texts)
    assert server is not None and server.texts == ("sand",)
    ordered = read(file, **COLUMNS, **{"class-names": "sea,fire,air,land"})
    assert ordered.train.labels is not None and ordered.train.labels.tolist() == [0, 3, 2] and ordered.classes == 4


def labels_in(file: Path, values: list[object], **config: object) -> tuple[list[int], tuple[str, ...]]:
    source = read(json_lines(file, [{"text": "a", "label": value} for value in values]), **{"text-column": "text"},
                  **config)  # fmt: skip
    assert source.train.labels is not None  # type: ignore[union-attr]
    return source.train.labels.tolist(), source.class_names  # type: ignore[union-attr]


def test_whole_numbers_are_labels_in_each_form_and_other_texts_are_names(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    assert labels_in(file, ["0.0", "1.0", "10.0", "2.0"]) == ([0, 1, 10, 2], ())
    assert labels_in(file, ["01", " 1", 1.0, "1"]) == ([1, 1, 1, 1], ())
    assert labels_in(file, ["4.5", "nan", "007"]) == ([1, 2, 0], ("007", "4.5", "nan"))
    assert labels_in(file, [True, False]) == ([1, 0], ("False", "True"))
    ids = ["1234567890123456781", "1234567890123456782"]
    assert labels_in(file, list(ids)) == ([0, 1], tuple(ids))


@pytest.mark.parametrize("missing", ["", "  ", "\t", None, float("nan")])
def test_a_label_of_spaces_and_a_missing_number_are_no_labels(tmp_path: Path, missing: object) -> None:
    for present in ("sea", 1.0):
        with pytest.raises(DataError, match=r"row 2 has no label .column label.: add it or remove the row"):
            labels_in(tmp_path / "t.jsonl", [present, missing, present])


def test_with_a_number_among_class_names_all_values_are_names(tmp_path: Path) -> None:
    file, names = tmp_path / "t.jsonl", {"class-names": "1,2,3"}
    assert labels_in(file, [1, "2", 3.0], **names) == ([0, 1, 2], ("1", "2", "3"))
    with pytest.raises(DataError, match=r"names in column label 0 are not in the run's class-names \(1, 2, 3\)"):
        labels_in(file, [1, 2, 0], **names)
    with pytest.raises(DataError, match=r"names in column label 0, 2 are not in the run's class-names \(1.0, other\)"):
        labels_in(file, [2, 0], **{"class-names": "1.0,other"})
    assert labels_in(file, [1, 0], **{"class-names": "no,yes"}) == ([1, 0], ())


def test_a_compressed_copy_beside_a_file_is_not_read(tmp_path: Path) -> None:
    def both(file: Path, content: bytes, older: bytes) -> None:
        file.write_bytes(content)
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(older))
        file.with_name(f"{file.name}.xz").write_bytes(lzma.compress(older))

    (tmp_path / "t").mkdir()
    both(tmp_path / "t" / "train.csv", b"text,label\nnew,0\n", b"text,label\nold,0\n")
    for config in ({}, {"dataset": "20newsgroups", "dataset-path": str(tmp_path / "t")}):
        source = read(tmp_path / "t", **{"text-column": "text", **config})
        assert isinstance(source.train, data.Texts) and source.train.texts == ("new",)
    (tmp_path / "t" / "train.csv").unlink()
    assert len(read(tmp_path / "t", **{"text-column": "text"}).train) == 1  # .gz before .xz
    (tmp_path / "leaf").mkdir()
    file = leaf(tmp_path / "leaf" / "a.json", {"u": (["new"], [1])})
    both(file, file.read_bytes(), file.read_bytes().replace(b"new", b"old"))
    source = read(tmp_path / "leaf")
    assert isinstance(source.train, data.Texts) and source.train.texts == ("new",)


def test_tables_in_a_folder_have_one_format(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,0\n")
    json_lines(tmp_path / "train.jsonl", [{"text": "a", "label": 0}])
    with pytest.raises(DataError, match=r"several formats, train.csv and train.jsonl: keep those of one format"):
        read(tmp_path, **{"text-column": "text"})


def test_a_split_column_divides_a_folder_of_training_tables(tmp_path: Path) -> None:
    for number in range(2):
        lines = [f"{part}{number},{label},{part}" for label, part in enumerate(("test", "train"))]
        (tmp_path / f"train-{number}.csv").write_text("\n".join(["text,label,part", *lines]))
    source = read(tmp_path, **{"text-column": "text", "split-column": "part"})
    assert isinstance(source.train, data.Texts) and isinstance(source.test, data.Texts)
    assert (source.train.texts, source.test.texts) == (("train0", "train1"), ("test0", "test1"))
    assert source.train.labels is not None and source.train.labels.tolist() == [1, 1]
    assert read(tmp_path, **{"text-column": "text"}).test is None
    with pytest.raises(DataError, match=r"column label .split-column. has 0, 1; allowed are train and test"):
        read(tmp_path, **{"text-column": "text", "split-column": "label"})


def test_a_row_with_more_values_than_the_header_is_refused(tmp_path: Path) -> None:
    for form, comma, what in ((".csv", ",", "commas"), (".tsv", "\t", "tabs")):
        file = tmp_path / f"t{form}"
        lines = ["text,label", "good,1,,", "well, not bad,1"]
        file.write_text("\n".join(lines[:2]).replace(",", comma))
        assert len(read(file, **{"text-column": "text"}).train) == 1  # empty cells at the end
        file.write_text("\n".join(lines).replace(",", comma))
        with pytest.raises(DataError, match=f"line 3 has more values than the header: quote cells that have {what}"):
            read(file, **{"text-column": "text"})


def test_a_quotation_mark_that_is_not_closed_swallows_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "t.tsv"
    file.write_text('text\tlabel\na\t0\n"Oh no, he said\t1\nb\t0\nhe left."\t1\n')
    with pytest.raises(DataError, match=f"^{file}: the row that ends in line 5 has a cell with tabs and line ends"):
        read(file, **{"text-column": "text"})
    file.write_text('text\tlabel\na\t0\n"two\nlines"\t1\n')
    assert read(file, **{"text-column": "text"}).train.texts == ("a", "two\nlines")
    (tmp_path / "t.csv").write_text('text,label\na,0\n"two,\nlines",1\n')
    assert read(tmp_path / "t.csv", **{"text-column": "text"}).train.texts == ("a", "two,\nlines")


def test_a_client_divides_its_own_texts_and_keeps_what_belongs_together(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"a": f"text {n}", "b": f"second {n}", "label": n % 3} for n in range(20)]
    client = own(
        json_lines(tmp_path / "t.jsonl", rows), **{"text-column": "a", "second-text-column": "b", "classes": 3}
    )
    assert (len(client.train), len(client.test), client.classes, client.name) == (16, 4, 3, "ward-3")
    for part in (client.train, client.test):
        assert part.seconds is not None and part.labels is not None
        numbers = [int(text.removeprefix("text ")) for text in part.texts]
        assert part.seconds == tuple(f"second {n}" for n in numbers) and part.labels.tolist() == [
            n % 3 for n in numbers
        ]
    both = {*client.train.texts, *client.test.texts}
    assert both == {f"text {n}" for n in range(20)}


def test_texts_are_divided_among_clients_by_label_and_by_group(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": str(n), "label": n % 2, "by": f"writer {n % 5}"} for n in range(100)]
    file = json_lines(tmp_path / "t.jsonl", rows)
    config = config_of(file, **{"text-column": "text", "held-out-fraction": 0.2, "dirichlet-alpha": 5})
    found = [
        text
        for one in range(3)
        for client in [load_client_texts(config, {"partition-id": one, "num-partitions": 3}, client=f"client-{one}")]
        for text in (*client.train.texts, *client.test.texts)
    ]
    server = held_out(config, data.Texts)
    assert server is not None and sorted([*found, *server.texts], key=int) == [str(n) for n in range(100)]
    natural = config_of(file, **{"text-column": "text", "partitioner": "natural", "group-column": "by"})
    client = load_client_texts(natural, {"partition-id": 3, "num-partitions": 5}, client="client-3")
    assert {int(text) % 5 for text in (*client.train.texts, *client.test.texts)} == {3}


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([{"body": "a", "label": 0}], {}, "line 1: has no column text; it has body, label: set .*text-column"),
        ([{"text": "a", "label": 0}], {"second-text-column": "b"}, "has no column b"),
        ([{"text": 3, "label": 0}], {}, "row 1: int in column text is not text"),
        ([{"text": "a", "label": 0}, {"text": "b", "label": 2}], {}, r"label 2 \(example 1; 1 in all\).*0 to 1"),
        ([{"text": "a", "label": "x"}], {}, r"1 names in column label \(x\), but the run has 2 classes.*class-names"),
        ([{"text": "a", "label": 0}], {}, "1 example cannot be split"),
        ([], {}, "has no row"),
    ],
)
def test_texts_in_disorder_are_refused_with_the_site_and_the_file(
    tmp_path: Path, rows: list[dict[str, object]], config: dict[str, object], message: str
) -> None:
    file = json_lines(tmp_path / "t.jsonl", rows)
    with pytest.raises(DataError, match=f"^client ward-3: {file}: (.*: )?{message}"):
        own(file, **{"text-column": "text", "classes": 2, **config})


def test_a_column_of_ids_is_not_taken_for_classes(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    rows = [{"image": "a.png", "text": "a", "label": 7 + n * 100_000} for n in range(40)]
    file = json_lines(tmp_path / "t.jsonl", rows)
    last = 3_900_007
    for columns in ({}, {"text-column": "text"}):
        with pytest.raises(DataError, match=f"40 different values up to class {last:,} in 40 rows, .* hardly"):
            read(file, **columns)
        assert read(file, **columns, classes=last + 1).classes == last + 1
    for count, classes in ((2, 256), (40, 400)):
        some = json_lines(tmp_path / "some.jsonl", [{**row, "label": 0} for row in rows[1:count]])
        with some.open("a") as file:
            file.write(json.dumps({**rows[0], "label": classes - 1}) + "\n")
        assert read(some).classes == read(some, **{"text-column": "text"}).classes == classes


def test_texts_where_images_are_wanted_and_the_reverse(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "t.jsonl", [{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    config = config_of(file, **{"text-column": "text"})
    with pytest.raises(DataError, match=f"{file}: has texts, but the model needs images"):
        dataset_info(config)
    with pytest.raises(DataError, match="has texts, but the model needs images"):
        load_client(config_of("local", **{"text-column": "text"}), {"data-path": str(file)}, client="ward-3")
    with pytest.raises(DataError, match='dataset="digits": has images, but the model needs texts'):
        text_info(DataConfig())


def test_local_texts_need_classes_from_the_run_config() -> None:
    assert text_info(config_of("local", **{"class-names": "a,b"})) == TextInfo(2, ("a", "b"))
    assert text_info(config_of("local", **{"label-column": ""})) == TextInfo(0)
    with pytest.raises(DataError, match=r"set classes or class-names, or label-column=\"\" for running text"):
        text_info(config_of("local"))


# Running text


PLAY = """First Citizen:
Before we proceed any further,
hear me speak.

All:
Speak, speak.

First Citizen:
You said:
what?

MARIANA:
"""


@pytest.mark.parametrize("form", [".txt", ".txt.gz", ".txt.xz"])
def test_what_a_speaker_says_is_one_text_and_the_speaker_its_group(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"play{form}"
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, bytes)
    file.write_bytes(pack(PLAY.replace("\n", "\r\n").encode()))
    source = read(file)
    assert isinstance(source.train, data.Texts) and source.train.groups is not None
    assert dict(zip(source.train.groups.tolist(), source.train.texts, strict=True)) == {
        "First Citizen": "Before we proceed any further,\nhear me speak.\nYou said:\nwhat?",
        "All": "Speak, speak.",
    }
    assert source.train.labels is None and text_info(config_of(file)) == TextInfo(0)


def test_text_without_speakers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "play.txt"
    for content, message in (
        ("Once upon\na time.", "no speaker found: write"),
        ("A play\n\n" + PLAY, "begins with 'A play'"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=f"^{file}: {message}"):
            read(file)


@given(text=st.text(alphabet="ab\n ", max_size=60), longest=st.integers(1, 9))
def test_passages_are_the_whole_text_and_end_with_lines(text: str, longest: int) -> None:
    found = passages(text, longest)
    assert "".join(found) == text and all(1 <= len(one) <= longest for one in found)
    short = all(len(line) <= longest for line in text.splitlines(keepends=True))
    assert not short or all(one.endswith("\n") for one in found[:-1])


def test_a_text_of_one_long_line_is_cut_in_time() -> None:
    """A copy of the rest for each passage would take seconds."""
    text, begun = "abc" * 10**6, time.process_time()
    found = passages(text + "\nend\n")
    assert time.process_time() - begun < 1
    assert found == [text[at : at + 400] for at in range(0, len(text), 400)] + ["\nend\n"]


def test_roles_of_several_plays_are_groups_by_two_columns(tmp_path: Path) -> None:
    speech = "To be, or not to be\n" * 60
    rows: list[dict[str, object]] = [
        {"play": play, "role": role, "text": speech} for play in ("hamlet", "lear") for role in ("FOOL", "KING")
    ]
    columns = {"text-column": "text", "label-column": "", "group-column": "play, role"}
    source = read(json_lines(tmp_path / "t.jsonl", rows), **columns)
    assert isinstance(source.train, data.Texts) and source.train.groups is not None
    assert sorted(set(source.train.groups.tolist())) == ["hamlet/FOOL", "hamlet/KING", "lear/FOOL", "lear/KING"]
    assert max(map(len, source.train.texts)) <= LONGEST_PASSAGE and "".join(source.train.texts) == speech * 4
    config = config_of(tmp_path / "t.jsonl", **columns, **{"partitioner": "natural", "min-partition-size": 2})
    client = load_client_texts(config, {"partition-id": 2, "num-partitions": 4}, client="client-2")
    assert client.train.groups is not None and set(client.train.groups.tolist()) == {"lear/FOOL"}
    with pytest.raises(DataError, match="the dirichlet partitioner divides by labels, and running text has none"):
        load_client_texts(
            config_of(tmp_path / "t.jsonl", **columns), {"partition-id": 0, "num-partitions": 2}, client="a"
        )


def test_the_documentations_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    speech = "Speak, speak.\n" * 200
    (tmp_path / "plays.txt").write_text("\n\n".join(f"NAME {n}:\n{speech}" for n in range(12)))
    monkeypatch.chdir(tmp_path)
    names: dict[str, np.ndarray] = {}
    exec(code, names)
    assert names["inputs"].shape == (len(names["following"]), 80)


# LEAF


def leaf(file: Path, users: dict[str, tuple[list[object], list[object]]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        json.dumps({
            "users": list(users),
            "num_samples": [len(x) for x, _ in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        })
    )  # fmt: skip
    return file


def test_leafs_femnist_gives_images_by_writer(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((5, 784)).round(4)
    train = {"f0001": (images[:2].tolist(), [0, 61]), "f0002": (images[2:4].tolist(), [7, 7])}
    leaf(tmp_path / "data" / "train" / "all_0.json", {"f0001": train["f0001"]})
    leaf(tmp_path / "data" / "train" / "all_1.json", {"f0002": train["f0002"]})
    leaf(tmp_path / "data" / "test" / "all.json", {"f0001": (images[4:].tolist(), [3])})
    source = read(tmp_path / "data")
    assert isinstance(source.train, data.ImageArrays) and source.classes == 62
    np.testing.assert_allclose(source.train.images[:, 0], images[:4].reshape(4, 28, 28), rtol=1e-6)
    assert source.train.groups is not None and source.train.groups.tolist() == ["f0001", "f0001", "f0002", "f0002"]
    assert source.train.labels.tolist() == [0, 61, 7, 7]
    assert source.test is not None and source.test.labels.tolist() == [3]
    assert dataset_info(config_of(tmp_path / "data", **{"image-shape": "3x32x32"})).shape == (3, 32, 32)


def test_leafs_shakespeare_gives_80_characters_and_the_next_ones_number(tmp_path: Path) -> None:
    line = "".join(chr(ord("a") + n % 26) for n in range(82))
    file = leaf(
        tmp_path / "all.json", {"KING": ([line[:80], line[1:81]], [line[80], line[81]]), "FOOL": ([line[2:82]], ["!"])}
    )
    source = read(file)
    assert isinstance(source.train, data.Texts) and source.train.texts == (line[:80], line[1:81], line[2:82])
    assert source.train.labels is not None and source.classes == 80
    assert [CharVocabulary().characters[label] for label in source.train.labels] == [line[80], line[81], "!"]
    assert source.train.groups is not None and source.train.groups.tolist() == ["KING", "KING", "FOOL"]
    encoded = source.train.encoded(CharVocabulary())
    assert encoded.shape == (3, 80) and encoded.dtype == np.int64
    assert ["".join(CharVocabulary().characters[n] for n in row) for row in encoded] == list(source.train.texts)


def test_leafs_files_must_have_one_kind_of_example(tmp_path: Path) -> None:
    leaf(tmp_path / "train" / "a.json", {"a": ([[0.5] * 4], [0]), "nobody": ([], [])})
    assert read(tmp_path).train.groups is not None and read(tmp_path).train.groups.tolist() == ["a"]
    leaf(tmp_path / "train" / "b.json", {"b": ([[0.5] * 9], [0])})
    with pytest.raises(DataError, match=r"images of several sizes, \(2, 2\), \(3, 3\)"):
        read(tmp_path)
    leaf(tmp_path / "train" / "b.json", {"b": (["text"], [0])})
    sources.load_path.cache_clear()
    with pytest.raises(DataError, match="has both images and texts"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": [', "not JSON"),
        ('{"a": 1}\n{"a": 2}', "not JSON .*or JSON lines"),
        ('{"users": []}', "expected LEAF's"),
        ('{"user_data": {"a": {"x": [1]}}}', "expected LEAF's .*'y'"),
        ('{"user_data": {}}', "has no examples"),
        ('{"user_data": {"a": {"x": ["a", "b"], "y": [1]}}}', "user a has 2 x and 1 y"),
        ('{"user_data": {"a": {"x": ["a"], "y": ["ab"]}}}', "user a: y='ab' is neither a class number"),
        ('{"user_data": {"a": {"x": ["a", 5], "y": [1, 1]}}}', "user a: an x is int, but others are text"),
        ('{"user_data": {"a": {"x": [[0.1, 0.2, 0.3]], "y": [1]}}}', "x have 3 numbers, expected the pixels"),
        ('{"user_data": {"a": {"x": [[0.1], [0.2, 0.3]], "y": [1, 1]}}}', "user a: x must be lists of equal length"),
        ('{"user_data": {"a": {"x": [[]], "y": [1]}}}', "x have 0 numbers"),
        ('{"user_data": {"a": {"x": [5], "y": [1]}}}', "user a: x must be lists"),
        ('{"user_data": {"a": {"x": [["b"]], "y": [1]}}}', "x are not lists of numbers"),
        ('{"user_data": {"a": {"x": [[0.5]], "y": [62]}}}', r"label 62 .* 0 to 61"),
    ],
)
def test_json_that_is_not_leafs_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "all.json"
    file.write_text(content)
    with pytest.raises(DataError, match=f"^{file}: (.*: )?{message}"):
        read(file)


# Characters


def test_the_vocabulary_has_leafs_80_characters() -> None:
    characters = CharVocabulary().characters
    assert len(CharVocabulary()) == len(set(characters)) == 80
    assert characters == "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


@given(texts=st.lists(st.text(alphabet="ab c\n$é", max_size=12), max_size=4), length=st.integers(1, 6))
def test_windows_are_what_comes_before_each_character(texts: list[str], length: int) -> None:
    vocabulary = CharVocabulary(length=length)
    inputs, labels = vocabulary.windows(texts)
    known = [text.replace("$", " ").replace("é", " ") for text in texts]
    expected = [
        ((" " * length + text[:place])[-length:], text[place]) for text in known for place in range(1, len(text))
    ]
    assert inputs.shape == (len(expected), length) and inputs.dtype == labels.dtype == np.int64
    small, following = vocabulary.windows(texts, np.uint8)
    assert small.dtype == np.uint8 and following.dtype == np.int64 and np.array_equal(small, inputs)
    for row, label, (before, character) in zip(inputs, labels, expected, strict=True):
        assert "".join(vocabulary.characters[n] for n in row) == before and vocabulary.characters[label] == character


def test_texts_are_cut_or_filled_to_one_length() -> None:
    vocabulary = CharVocabulary("ab ", length=4)
    assert vocabulary.encode(["ab", "aabbab", ""]).tolist() == [[2, 2, 0, 1], [1, 1, 0, 1], [2, 2, 2, 2]]
    assert vocabulary.encode(["ab"], ["ba"]).tolist() == [[0, 1, 1, 0]]
    assert vocabulary.encode([]).shape == (0, 4)


# Real files


@pytest.fixture
def real() -> Path:
    folder = os.environ.get("TEPAL_TEST_DATA")
    if not folder:
        pytest.skip("TEPAL_TEST_DATA names no folder with data sets")
    return Path(folder)


def test_real_plays(real: Path) -> None:
    whole = (real / "tinyshakespeare.txt").read_text()
    config = config_of(real / "tinyshakespeare.txt", partitioner="natural", **{"held-out-fraction": 0.0})
    clients = [
        load_client_texts(config, {"partition-id": one, "num-partitions": 10}, client=f"client-{one}")
        for one in range(10)
    ]
    said = [text for client in clients for part in (client.train, client.test) for text in part.texts]
    letters = lambda text: sum(map(str.isalpha, text))  # noqa: E731
    names = sum(letters(block.split(":")[0]) for block in whole.split("\n\n"))
    assert sum(map(letters, said)) == letters(whole) - names
    inputs, labels = CharVocabulary().windows(clients[0].train.texts)
    assert inputs.shape == (sum(len(text) - 1 for text in clients[0].train.texts), 80) and len(labels) == len(inputs)


def test_real_roles(real: Path) -> None:
    columns = {"text-column": "text", "label-column": "", "group-column": "play,role"}
    source = read(real / "shakespeare_roles.jsonl.xz", **columns)
    assert source.train.groups is not None and len(set(source.train.groups.tolist())) == 1330


def test_real_news(real: Path) -> None:
    columns = {"text-column": "text", "second-text-column": "subject", "split-column": "split"}
    source = read(real / "news20.jsonl.xz", **columns)
    assert (len(source.train), source.test and len(source.test), source.classes) == (11_314, 7_532, 20)
    assert source.class_names[0] == "alt.atheism" and isinstance(source.train, data.Texts)


def test_a_cell_of_a_table_may_be_a_long_text(tmp_path: Path) -> None:
    text, before = "word " * 40_000, csv.field_size_limit(131_072)  # the csv module's own limit, as in a new process
    try:
        (tmp_path / "t.csv").write_text(f"text,label\n{text},0\nshort,1\n")
        source = read(tmp_path / "t.csv", **{"text-column": "text"})
    finally:
        csv.field_size_limit(before)
    assert isinstance(source.train, data.Texts) and source.train.texts[0].strip() == text.strip()
