"""Data sets by name, from small files as their publishers lay them out: what is trained on, and what is refused."""

import csv
import json
import lzma
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tepal.training.data import (
    CharVocabulary,
    DataConfig,
    DataError,
    DatasetInfo,
    TextInfo,
    Texts,
    dataset_info,
    load_client,
    load_client_texts,
    sources,
    text_info,
)
from tepal.training.data.hub import load_hub
from tepal.training.data.known import KNOWN, listed_names
from tests.packages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    yield
    sources.load_path.cache_clear()
    load_hub.cache_clear()


def config_of(name: str, path: object, **more: object) -> DataConfig:
    return DataConfig.model_validate({"dataset": name, "dataset-path": str(path), **more})


def texts_of(name: str, path: object, **more: object) -> sources.Source[Texts]:
    source = sources.named_source(config_of(name, path, **more))
    assert isinstance(source.train, Texts)
    return source  # type: ignore[return-value]


def lines(file: Path, rows: Iterable[object]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def asked(texts: Texts | None) -> dict[str, tuple[list[str], str]]:
    """Question → its choices, in no order, and the text of the right one."""
    assert texts is not None and texts.choices is not None and texts.labels is not None
    return {
        question: (sorted(choices), choices[label])
        for question, choices, label in zip(texts.texts, texts.choices, texts.labels, strict=True)
    }


# What is known of all


def test_the_documentation_lists_every_name() -> None:
    assert listed_names() in (DOCS / "data.md").read_text(), "write it anew: tepal.training.data.known.listed_names()"
    described = DataConfig.model_fields["dataset"].description or ""
    assert all(re.search(rf"\b{re.escape(name)}\b", described) for name in KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_a_path_without_a_data_sets_files_says_which_belong_there(name: str, tmp_path: Path) -> None:
    expected = re.escape(KNOWN[name].files)
    read = dataset_info if KNOWN[name].of == "images" else text_info
    with pytest.raises(DataError, match=f"^{tmp_path}: has no files of {name}: expected {expected}"):
        read(config_of(name, tmp_path))
    with pytest.raises(DataError, match=f"nowhere: no such file or folder .expected for {name}: {expected}"):
        read(config_of(name, tmp_path / "nowhere"))


# Questions


STEMS = ["What is wet?", "What is dry?", "What is cold?", "What is hot?"]
CHOICES = [["water", "sand", "air", "fire"], ["sea", "dust"], ["ice", "sun", "oven"], ["snow", "steam"]]
RIGHT = [0, 1, 0, 1]
EXPECTED = {q: (sorted(c), c[r]) for q, c, r in zip(STEMS, CHOICES, RIGHT, strict=True)}
LABELS = [list("ABCD"), list("12"), list("ABC"), list("12")]


def of_the_hub(stem: str) -> list[dict[str, object]]:
    return [
        {stem: q, "choices": {"text": c, "label": own[: len(c)]}, "answerKey": own[r], "id": q}
        for q, c, r, own in zip(STEMS, CHOICES, RIGHT, LABELS, strict=True)
    ]


def of_the_publisher() -> list[dict[str, object]]:
    return [
        {"question": {"stem": q, "choices": [{"text": t, "label": label} for t, label in zip(c, own, strict=True)]},
         "answerKey": own[r]}
        for q, c, r, own in zip(STEMS, CHOICES, RIGHT, LABELS, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stem", "folder", "file"),
    [
        ("arc-easy", "question", "ARC-Easy", "ARC-Easy-{}.jsonl"),
        ("arc-challenge", "question", "ARC-Challenge", "ARC-Challenge-{}.jsonl"),
        ("openbookqa", "question_stem", "Data/Main", "{}.jsonl"),
    ],
)
def test_arc_and_openbookqa_as_their_publisher_and_as_the_hub_has_them(
    name: str, stem: str, folder: str, file: str, tmp_path: Path
) -> None:
    rows = of_the_publisher()
    lines(tmp_path / folder / file.format("Train"), rows[1:])
    lines(tmp_path / folder / file.format("Test"), rows[:1])
    lines(tmp_path / folder / file.format("Dev"), [{"not": "read"}])
    (tmp_path / folder / file.format("Train").replace("jsonl", "csv")).write_text("AnswerKey,question\nA,also here\n")
    for path in (tmp_path, tmp_path / folder):
        source = texts_of(name, path)
        assert asked(source.train) == {q: EXPECTED[q] for q in STEMS[1:]}
        assert asked(source.test) == {STEMS[0]: EXPECTED[STEMS[0]]}
    import pyarrow
    from pyarrow import parquet

    inner = tmp_path / "hub" / ("main" if name == "openbookqa" else folder)
    inner.mkdir(parents=True)
    for part, some in (("train", of_the_hub(stem)[1:]), ("test", of_the_hub(stem)[:1]), ("validation", [{"a": 1}])):
        parquet.write_table(pyarrow.Table.from_pylist(some), inner / f"{part}-00000-of-00001.parquet")
    source = texts_of(name, tmp_path / "hub")
    assert asked(source.train) == {q: EXPECTED[q] for q in STEMS[1:]}
    assert asked(source.test) == {STEMS[0]: EXPECTED[STEMS[0]]}
    assert text_info(config_of(name, tmp_path / "hub")) == TextInfo(source.classes)


PIQA = [{"goal": q, "sol1": c[0], "sol2": c[1]} for q, c in zip(STEMS, CHOICES, strict=True)]


def test_piqa_with_labels_beside_its_questions_and_with_labels_in_them(tmp_path: Path) -> None:
    expected = {q: (sorted(c[:2]), c[r]) for q, c, r in zip(STEMS, CHOICES, RIGHT, strict=True)}
    lines(tmp_path / "train.jsonl", PIQA[1:])
    (tmp_path / "train-labels.lst").write_text("".join(f"{r}\n" for r in RIGHT[1:]))
    lines(tmp_path / "dev.jsonl", PIQA[:1])
    (tmp_path / "dev-labels.lst").write_text(f"{RIGHT[0]}\n")
    lines(tmp_path / "tests.jsonl", [{"goal": "unlabelled"}])
    source = texts_of("piqa", tmp_path)
    assert asked(source.train) == {q: expected[q] for q in STEMS[1:]}
    assert asked(source.test) == {STEMS[0]: expected[STEMS[0]]}
    whole = lines(tmp_path / "own.jsonl", [{**row, "label": r} for row, r in zip(PIQA, RIGHT, strict=True)])
    assert asked(texts_of("piqa", whole).train) == expected
    (tmp_path / "train-labels.lst").write_text("0\n")
    sources.load_path.cache_clear()
    with pytest.raises(DataError, match=r"train-labels\.lst: 1 labels, but train\.jsonl has 3 rows"):
        texts_of("piqa", tmp_path)


SCIQ = [
    {"question": f"question {n}?", "correct_answer": str(n % 4), "distractor1": f"a{n}", "distractor2": f"b{n}",
     "distractor3": f"c{n}", "support": f" support {n} " if n % 2 else ""}
    for n in range(40)
]  # fmt: skip


def test_sciq_has_its_right_answers_at_all_places_and_always_at_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps(SCIQ[10:]))
    (tmp_path / "test.json").write_text(json.dumps(SCIQ[:10]))
    (tmp_path / "valid.json").write_text(json.dumps(SCIQ[:10]))
    source = texts_of("sciq", tmp_path)
    for texts, rows in ((source.train, SCIQ[10:]), (source.test, SCIQ[:10])):
        assert asked(texts) == {
            "\n".join(filter(None, (row["support"].strip(), row["question"]))): (
                sorted([row["correct_answer"], row["distractor1"], row["distractor2"], row["distractor3"]]),
                row["correct_answer"],
            )
            for row in rows
        }
    assert source.train.labels is not None and set(source.train.labels.tolist()) == {0, 1, 2, 3}
    table = lines(tmp_path / "whole.jsonl", reversed(SCIQ))
    places = dict(zip(texts_of("sciq", table).train.texts, texts_of("sciq", table).train.labels, strict=True))  # type: ignore[arg-type]
    for text, label in zip(source.train.texts, source.train.labels, strict=True):
        assert places[text] == label


def test_columns_that_the_run_config_names_go_before_those_that_are_known(tmp_path: Path) -> None:
    table = lines(tmp_path / "own.jsonl", SCIQ)
    bare = texts_of("sciq", table, **{"text-column": "question"}).train
    assert list(bare.texts) == [row["question"] for row in SCIQ]
    own = [{"ask": q, "options": c, "answerKey": r} for q, c, r in zip(STEMS, CHOICES, RIGHT, strict=True)]
    columns = {"text-column": "ask", "choices-column": "options"}
    assert asked(texts_of("arc-easy", lines(tmp_path / "a.jsonl", own), **columns).train) == EXPECTED
    with pytest.raises(DataError, match=r"a\.jsonl: line 1: has no column question and no column choices; it has ask"):
        texts_of("arc-easy", tmp_path / "a.jsonl")


# The hub


def test_a_named_data_set_without_a_path_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked_for: list[dict[str, Any]] = []

    class FederatedDataset:
        def __init__(self, **arguments: object) -> None:
            asked_for.append(arguments)

        def load_split(self, split: str) -> object:
            if asked_for[-1]["dataset"] == "allenai/ai2_arc":
                rows = of_the_hub("question")
                return datasets.Dataset.from_list(rows[:1] if split == "test" else rows)
            if split == "test":
                raise ValueError("no such split")
            features = {"image": datasets.Image(), "character": datasets.ClassLabel(num_classes=62)}
            features = datasets.Features({**features, "writer_id": datasets.Value("string")})
            images = [Image.fromarray(np.full((28, 28), n, np.uint8)) for n in (0, 255)]
            rows = {"image": images, "character": [61, 3], "writer_id": ["f01", "f02"]}
            return datasets.Dataset.from_dict(rows, features=features)

    stub = types.ModuleType("flwr_datasets")
    stub.FederatedDataset = FederatedDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr_datasets", stub)
    source = sources.named_source(DataConfig(dataset="arc-easy"))
    assert isinstance(source.train, Texts) and asked(source.train) == EXPECTED
    assert isinstance(source.test, Texts) and len(source.test) == 1
    femnist = sources.named_source(DataConfig(dataset="femnist"))
    assert femnist.train.labels is not None and femnist.train.labels.tolist() == [61, 3] and femnist.classes == 62
    assert femnist.train.groups is not None and femnist.train.groups.tolist() == ["f01", "f02"]
    assert [(one["dataset"], one.get("subset")) for one in asked_for] == [
        ("allenai/ai2_arc", "ARC-Easy"), ("flwrlabs/femnist", None)
    ]  # fmt: skip


# Texts


def test_xglues_news_are_pairs_grouped_by_language(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    news = {
        "en.train": [("Cup final", "They won 2-1.", "sports"), ("A \"quoted\" title", "Body", "autos")],
        "de.dev": [("Börse", "Kurse fallen.", "finance")],
        "fr.test": [("Recette", "Du pain.", "foodanddrink")],
    }  # fmt: skip
    for name, rows in news.items():
        file = tmp_path / "NC" / f"xglue.nc.{name}"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    source = texts_of("xglue-nc", tmp_path)
    names = source.class_names
    assert names == tuple(sorted(names)) and len(names) == source.classes == 10
    trained = [(*row, name[:2]) for name in ("de.dev", "en.train") for row in news[name]]
    train = source.train
    assert train.seconds is not None and train.labels is not None and train.groups is not None
    found = zip(train.texts, train.seconds, [names[n] for n in train.labels], train.groups.tolist(), strict=True)
    assert list(found) == trained
    assert source.test is not None and source.test.texts == ("Recette",)
    natural = config_of("xglue-nc", tmp_path, partitioner="natural", **{"min-partition-size": 1})
    with pytest.raises(DataError, match="3 clients, but the data has only 2 groups"):
        load_client_texts(natural, {"partition-id": 0, "num-partitions": 3}, client="c0")
    own = {"data-path": str(tmp_path / "NC" / "xglue.nc.en.train")}
    site = load_client_texts(natural, own, client="site-en")
    assert {*site.train.texts, *site.test.texts} == {"Cup final", 'A "quoted" title'} and site.classes == 10
    (tmp_path / "NC" / "xglue.nc.es.test").write_text("Título\tSin categoría\n")
    with caplog.at_level("WARNING", "flwr"):
        assert len(texts_of("xglue-nc", tmp_path / "NC").test or ()) == 1
    assert "xglue.nc.es.test has no categories and is skipped" in caplog.text
    for line, said in (("Título\tSin\n", "2 columns, the last one 'Sin'"), ("a\tb\tpolitics\n", "one 'politics'")):
        (tmp_path / "NC" / "xglue.nc.es.dev").write_text(line)
        with pytest.raises(DataError, match=rf"xglue\.nc\.es\.dev: line 1 has .*{said}; expected are title, body and"):
            texts_of("xglue-nc", tmp_path / "NC")


@pytest.mark.parametrize("language", [True, False])
def test_xglues_news_in_a_table_have_their_categories_by_name(tmp_path: Path, language: bool) -> None:
    rows = [
        {"news_title": f"title {n}", "news_body": "body", "news_category": ("video", "autos")[n % 2],
         **({"language": ("en", "de")[n % 2]} if language else {})}
        for n in range(4)
    ]  # fmt: skip
    source = texts_of("xglue-nc", lines(tmp_path / "train.jsonl", rows))
    assert source.train.labels is not None and source.train.labels.tolist() == [9, 0, 9, 0]
    assert (source.train.groups is not None) == language and source.train.seconds == ("body",) * 4
    numbered = lines(tmp_path / "numbers.jsonl", [{**row, "news_category": 3} for row in rows])
    with pytest.raises(DataError, match=r"numbers\.jsonl: news_category 3 is a number.* by name .autos"):
        texts_of("xglue-nc", numbered)


def test_20_newsgroups_by_date_are_messages_without_their_headers(tmp_path: Path) -> None:
    names = KNOWN["20newsgroups"].class_names
    assert list(names) == sorted(names) and len(names) == 20
    messages = {("train", "sci.space"): "Lift-off", ("train", "rec.autos"): "Caf\xe9", ("test", "sci.space"): "Orbit"}
    for (part, group), body in messages.items():
        file = tmp_path / "20news-bydate" / f"20news-bydate-{part}" / group / "60001"
        file.parent.mkdir(parents=True)
        file.write_bytes(f"From: me\nNewsgroups: {group}\n\n{body}\n\nBye\n".encode("latin-1"))
    for path in (tmp_path, tmp_path / "20news-bydate"):
        source = texts_of("20newsgroups", path)
        assert source.train.labels is not None and source.test is not None and source.test.labels is not None
        assert [(names[n], text) for n, text in zip(source.train.labels, source.train.texts, strict=True)] == [
            ("rec.autos", "Caf\xe9\n\nBye"), ("sci.space", "Lift-off\n\nBye")
        ]  # fmt: skip
        assert source.test.texts == ("Orbit\n\nBye",) and source.classes == 20
    strange = tmp_path / "20news-bydate" / "20news-bydate-train" / "alt.tea" / "1"
    strange.parent.mkdir()
    strange.write_text("\n\nNo")
    with pytest.raises(DataError, match=r"newsgroups alt\.tea are not in the run's class-names"):
        texts_of("20newsgroups", tmp_path / "20news-bydate")


def test_shakespeare_is_leafs_json_or_text_by_speaker(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    users = {"HAMLET": {"x": ["a" * 80, "b" * 80], "y": ["t", "o"]}}
    (tmp_path / "train" / "all_data_niid_0_keep_0_train_9.json").write_text(json.dumps({"user_data": users}))
    leaf = texts_of("shakespeare", tmp_path)
    assert leaf.train.labels is not None
    assert [CharVocabulary().characters[label] for label in leaf.train.labels] == ["t", "o"]
    (tmp_path / "plays.txt").write_text("KING:\nSpeak.\n\nFOOL:\nNo.\n")
    spoken = texts_of("shakespeare", tmp_path / "plays.txt").train
    assert spoken.groups is not None and dict(zip(spoken.groups.tolist(), spoken.texts, strict=True)) == {
        "KING": "Speak.", "FOOL": "No."
    }  # fmt: skip


# Images


def png(file: Path, value: int, size: int = 12) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size + 3, 3), value, np.uint8)).save(file)


def test_domainnet_is_read_by_its_lists_with_the_domain_as_group(tmp_path: Path) -> None:
    listed = {
        "clipart_train": [("clipart/zebra/1.png", 344), ("clipart/The_Eiffel_Tower/1.png", 300)],
        "clipart_test": [("clipart/zebra/2.png", 344)],
        "real_train": [("real/aircraft_carrier/1.png", 0)],
    }
    for number, (name, entries) in enumerate(listed.items()):
        (tmp_path / f"{name}.txt").write_text("".join(f"{path} {label}\n" for path, label in entries))
        for path, _ in entries:
            png(tmp_path / path, 50 * (number + 1), size=10 + number)
    png(tmp_path / "real" / "zebra" / "unlisted.png", 9)
    config = config_of("domainnet", tmp_path, **{"image-shape": "3x6x6"})
    assert dataset_info(config_of("domainnet", tmp_path)) == DatasetInfo((3, 224, 224), 345)
    source = sources.named_source(config)
    assert not isinstance(source.train, Texts) and not isinstance(source.test, Texts)
    assert source.train.groups is not None and source.test is not None
    columns = source.train.groups, source.train.labels, source.train.images[:, 0, 0, 0]
    found = zip(*(column.tolist() for column in columns), strict=True)
    assert list(found) == [("clipart", 344, 50), ("clipart", 300, 50), ("real", 0, 150)]
    assert source.test.labels.tolist() == [344] and source.train.shape == (3, 6, 6)
    (tmp_path / "sketch_train.txt").write_text("sketch/zebra/1.png 344\n")
    with pytest.raises(DataError, match=r"sketch_train\.txt: lists images of sketch, but the folder"):
        dataset_info(config)
    (tmp_path / "sketch").mkdir()
    with pytest.raises(DataError, match=r"train: 1 of 4 images cannot be read.*sketch/zebra/1\.png"):
        dataset_info(config_of("domainnet", tmp_path, **{"image-shape": "3x6x6", "unreadable-images": 0.0}))
    (tmp_path / "sketch_train.txt").write_text("zebra.png\n")
    with pytest.raises(DataError, match=r"sketch_train\.txt: line 1 .*expected <domain>/<class>/<file> <label>"):
        dataset_info(config)


def test_openimage_is_read_by_fedscales_mapping_with_the_client_as_group(tmp_path: Path) -> None:
    rows = {"train": [("7", "a.png", "Tree", 595), ("9", "b.png", "Cat", 12), ("7", "c.png", "Cat", 12)],
            "test": [("3", "d.png", "Tree", 595)]}  # fmt: skip
    for part, mapped in rows.items():
        mapping = tmp_path / "client_data_mapping" / f"{part}.csv"
        mapping.parent.mkdir(exist_ok=True)
        with mapping.open("w", newline="") as file:
            csv.writer(file).writerows([("client_id", "sample_path", "label_name", "label_id"), *mapped])
        for number, (_, name, _, _) in enumerate(mapped):
            png(tmp_path / part / name, 10 * number)
    config = config_of("openimage", tmp_path, partitioner="natural", **{"min-partition-size": 1})
    assert dataset_info(config) == DatasetInfo((3, 256, 256), 596)
    small = config_of("openimage", tmp_path, **{"image-shape": "1x5x5"})
    source = sources.named_source(small)
    assert not isinstance(source.train, Texts) and not isinstance(source.test, Texts)
    assert source.train.groups is not None and source.train.groups.tolist() == ["7", "9", "7"]
    assert source.train.labels.tolist() == [595, 12, 12] and source.train.images[:, 0, 0, 0].tolist() == [0, 10, 20]
    assert source.test is not None and source.test.labels.tolist() == [595]
    named = config_of("openimage", tmp_path, **{"image-shape": "1x5x5", "class-names": "Tree,Cat"})
    assert sources.named_source(named).train.labels.tolist() == [0, 1, 1]  # type: ignore[union-attr]
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    sources.load_path.cache_clear()
    with pytest.raises(DataError, match=r"train\.csv: lists images, but their folder .*train is missing"):
        dataset_info(small)


def test_pacs_has_domains_as_groups_and_its_seven_classes(tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        for kind in ("horse", "dog"):
            png(tmp_path / "kfold" / domain / kind / "1.png", 7)
    config = config_of("pacs", tmp_path)
    assert dataset_info(config) == DatasetInfo((3, 12, 15), 7)
    source = sources.named_source(config)
    assert source.train.labels is not None and sorted(source.train.labels.tolist()) == [0, 0, 4, 4]
    assert source.train.groups is not None and set(source.train.groups.tolist()) == {"photo", "sketch"}
    own = {"data-path": str(tmp_path / "kfold" / "photo")}
    site = load_client(config, own, client="photos")
    assert {*site.train.labels.tolist(), *site.test.labels.tolist()} == {0, 4} and site.classes == 7


# Real files


@pytest.fixture
def real() -> Path:
    folder = os.environ.get("TEPAL_TEST_DATA")
    if not folder:
        pytest.skip("TEPAL_TEST_DATA names no folder with data sets")
    return Path(folder)


def test_real_news_and_plays_by_name(real: Path) -> None:
    news = texts_of("20newsgroups", real / "news20.jsonl.xz")
    assert (len(news.train), news.test and len(news.test), news.classes) == (11_314, 7_532, 20)
    roles = texts_of("shakespeare", real / "shakespeare_roles.jsonl.xz")
    assert roles.train.groups is not None and len(set(roles.train.groups.tolist())) == 1330
    assert text_info(config_of("shakespeare", real / "tinyshakespeare.txt")) == TextInfo(0)
    assert dataset_info(config_of("pacs", real / "pacs32.npz")) == DatasetInfo((3, 32, 32), 7)


def test_real_questions_by_name_and_by_columns(real: Path, tmp_path: Path) -> None:
    with lzma.open(real / "qa_arc_obqa_piqa.jsonl.xz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    whole = DataConfig.from_run_config({
        "dataset": str(real / "qa_arc_obqa_piqa.jsonl.xz"), "text-column": "question", "choices-column": "choices",
        "label-column": "answer", "group-column": "set",
    })  # fmt: skip
    source = sources.named_source(whole)
    assert isinstance(source.train, Texts) and source.train.choices is not None and source.train.labels is not None
    assert list(source.train.choices) == [tuple(row["choices"]) for row in rows]
    assert source.train.labels.tolist() == [row["answer"] for row in rows]
    sets = sorted({row["set"] for row in rows})
    for name, written in (("arc-easy", "arc_easy"), ("arc-challenge", "arc_challenge")):
        assert written in sets
        some = [row for row in rows if row["set"] == written]
        letters = [{"question": {"stem": row["question"],
                                 "choices": [{"text": t, "label": "ABCDE"[n]} for n, t in enumerate(row["choices"])]},
                    "answerKey": "ABCDE"[row["answer"]]} for row in some]  # fmt: skip
        train = texts_of(name, lines(tmp_path / f"{name}.jsonl", letters)).train
        assert train.choices is not None and train.labels is not None
        assert [(q, list(c), n) for q, c, n in zip(train.texts, train.choices, train.labels.tolist(), strict=True)] == [
            (row["question"], row["choices"], row["answer"]) for row in some
        ]
