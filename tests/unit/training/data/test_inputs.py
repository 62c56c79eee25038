"""What models take, made of small files that the tests write; and whole runs on texts and characters."""

import csv
import json
import string
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tepal.client_app.app import app
from tepal.models import ModelError, build
from tepal.records.run_directory import read_summary
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.predict.numbers import error_of
from tepal.tools.predict.predict import load_predictor
from tepal.training.data import CharVocabulary, DataError, held_out, load_client
from tepal.training.data.inputs import (
    InputConfig,
    client_inputs,
    has_held_out,
    held_out_inputs,
    settled,
    sizes,
    written_names,
    written_sizes,
)
from tepal.training.data.tokens import TokenizerError
from tests.lines import read_lines
from tests.unit.training.data.word_tokenizer import ID, WORDS, ids, written

BERT = {"model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 12, "num_attention_heads": 3, "pad_token_id": 0}
BERT |= {"intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 16}
PLAY = "\n\n".join(f"{name}:\n" + f"{name} says what {name} says.\n" * 60 for name in ("ANNE", "BERT", "CARL", "DORA"))


@pytest.fixture
def bert(tmp_path):
    """A directory with a small BERT's configuration and its tokenizer."""
    folder = tmp_path / "bert"
    written(folder, pad_token="[PAD]")
    (folder / "config.json").write_text(json.dumps(BERT))
    return str(folder)


@pytest.fixture
def table(tmp_path):
    """60 texts: their last word is the label, the first says who wrote them."""
    rng, path = np.random.default_rng(0), tmp_path / "texts.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["said", "colour", "site"])
        for number in range(60):
            colour = ("blue", "green")[number % 2]
            between = " ".join(rng.choice(["very", "what"], 2))
            rows.writerow([f"the sky is {between} {colour}", colour, f"s{number % 3}"])
    return str(path)


@pytest.fixture
def sequences(tmp_path):
    """90 sequences of three places with four numbers, and two that follow from their mean."""
    rng, path = np.random.default_rng(0), tmp_path / "sequences.npz"
    inputs = rng.normal(size=(90, 3, 4))
    np.savez(path, x=inputs, y=inputs.mean(axis=1) @ rng.normal(size=(4, 2)))
    return str(path)


def config(**values):
    return InputConfig.from_run_config({key.replace("_", "-"): value for key, value in values.items()})


def of_texts(table, bert, **values):
    columns = {"text_column": "said", "label_column": "colour", "group_column": "site", "partitioner": "iid"}
    return config(dataset=table, model=bert, text_length=8, **columns, **values)


def node(k, clients=3):
    return {"partition-id": k, "num-partitions": clients}


def test_images_are_what_the_data_has():
    images = config()
    assert sizes(images) == {"image_shape": (1, 8, 8), "classes": 10}
    assert written_sizes(sizes(images)) == {"image-shape": "1x8x8", "classes": "10"}
    client, expected = client_inputs(images, node(1), client="c"), load_client(images, node(1), client="c")
    np.testing.assert_array_equal(client.train.values, expected.train.images)
    np.testing.assert_array_equal(client.test.labels, expected.test.labels)
    np.testing.assert_array_equal(held_out_inputs(images).values, held_out(images).images)
    assert client.sizes == sizes(images) and held_out_inputs(config(held_out_fraction=0.0)) is None


def test_whether_there_is_a_test_set_is_known_without_a_copy_of_it(tmp_path):
    images, labels = np.zeros((2000, 1, 28, 28), np.uint8), np.arange(2000) % 2
    np.savez(tmp_path / "a.npz", x_train=images[:20], y_train=labels[:20], x_test=images, y_test=labels)
    np.savez(tmp_path / "b.npz", x=images, y=labels)
    own, drawn, none, local = (
        config(dataset=str(tmp_path / name) if name else "local", held_out_fraction=share)
        for name, share in (("a.npz", 0.0), ("b.npz", 0.5), ("b.npz", 0.0), ("", 0.5))
    )
    for one in (own, drawn):
        held_out(one)  # reads the file
    tracemalloc.start()
    try:
        assert [has_held_out(one) for one in (own, drawn, none, local)] == [True, True, False, False]
        assert tracemalloc.get_traced_memory()[1] < images.nbytes / 4
    finally:
        tracemalloc.stop()
    with pytest.raises(DataError, match="has images, but the model needs texts"):
        has_held_out(drawn.model_copy(update={"model": "char-lstm"}))


def test_texts_are_tokens_of_the_models_own_tokenizer(table, bert):
    texts = of_texts(table, bert)
    assert texts.kind == "sequence-classification" and sizes(texts) == {"classes": 2}
    clients = [client_inputs(texts, node(k), client=f"c{k}") for k in range(3)]
    parts = [held_out_inputs(texts), *(part for each in clients for part in (each.train, each.test))]
    rows = np.concatenate([part.values for part in parts])
    assert rows.shape == (60, 8) and rows.dtype == np.uint8
    for values, labels in ((c.train.values, c.train.labels) for c in clients):
        for row, label in zip(values, labels, strict=True):
            assert [*row[:4]] == ids("[CLS] the sky is") and row[6] == ID[("blue", "green")[label]], "sorted names"
            assert row[7] == ID["[SEP]"]
    longer = client_inputs(texts.model_copy(update={"text_length": 10}), node(0), client="c0").train.values
    np.testing.assert_array_equal(longer[:, 8:], 0)


def test_running_text_is_windows_and_the_character_that_follows(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(PLAY)
    play = config(dataset=str(path), model="char-lstm", text_length=10, partitioner="natural", min_partition_size=1,
                  held_out_fraction=0.0)  # fmt: skip
    vocabulary = CharVocabulary(length=10)
    assert sizes(play) == {"vocabulary": len(vocabulary)} and play.kind == "next-character"
    said = client_inputs(play, node(0, 4), client="c0")
    values, labels = said.train.values, said.train.labels
    assert values.dtype == np.uint8 and values.shape == (len(labels), 10)
    text = {"".join(vocabulary.characters[n] for n in [*row, label]) for row, label in zip(values, labels, strict=True)}
    whole = {name: " " * 9 + f"{name} says what {name} says.\n" * 60 for name in ("ANNE", "BERT", "CARL", "DORA")}
    (speaker,) = {name for name, spoken in whole.items() if all(part.strip() in spoken for part in text)}
    assert any(speaker in part for part in text)


def test_classes_of_texts_are_not_taken_for_next_characters(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "".join(f"what he says,{number % 2}\n" for number in range(20)))
    labelled = config(dataset=str(path), model="char-lstm", text_column="text", classes=2)
    expected = f'{path}: has labels, but model="char-lstm" predicts the next character: set label-column=""'
    with pytest.raises(DataError) as refused:
        sizes(labelled)
    assert str(refused.value) == expected
    at_sites = labelled.model_copy(update={"dataset": "local"})
    with pytest.raises(DataError) as refused:
        client_inputs(at_sites, {"data-path": str(path)}, client="ward")
    assert str(refused.value) == f"client ward: {expected}"
    running = at_sites.model_copy(update={"label_column": ""})
    assert len(client_inputs(running, {"data-path": str(path)}, client="ward").train)
    users = {"KING": {"x": ["to be or", "not to b"] * 5, "y": [" ", "e"] * 5}}
    (tmp_path / "leaf.json").write_text(json.dumps({"users": ["KING"], "user_data": users}))
    windows = config(dataset=str(tmp_path / "leaf.json"), model="char-lstm", text_length=8)
    assert sizes(windows) == {"vocabulary": 80} and len(held_out_inputs(windows))


def test_numbers_are_what_the_data_has(sequences):
    numbers = config(dataset=sequences, model="linear-attention", partitioner="iid")
    assert numbers.kind == "sequence-regression" and sizes(numbers) == {"features": 4, "outputs": 2}
    assert written_sizes(sizes(numbers)) == {"features": "4", "outputs": "2"}
    clients = [client_inputs(numbers, node(k), client=f"c{k}") for k in range(3)]
    parts = [held_out_inputs(numbers), *(part for each in clients for part in (each.train, each.test))]
    assert clients[0].sizes == sizes(numbers)
    with np.load(sequences) as arrays:
        expected = dict(zip(arrays["x"].astype(np.float32)[:, 0, 0].tolist(), arrays["y"].tolist(), strict=True))
    found = {row[0, 0].item(): label for part in parts for row, label in zip(part.values, part.labels, strict=True)}
    assert found.keys() == expected.keys()
    for first, label in found.items():
        np.testing.assert_allclose(label, expected[first], rtol=1e-6)


def test_a_text_model_tells_what_data_it_cannot_take(table, bert, tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(PLAY)
    with pytest.raises(DataError, match="these texts are running text"):
        sizes(config(dataset=str(path), model=bert))
    with pytest.raises(DataError, match="has images, but the model needs texts"):
        sizes(config(model=bert))
    with pytest.raises(DataError, match="has texts, but the model needs images"):
        sizes(config(dataset=table, text_column="said", label_column="colour"))


def test_class_names_are_not_sent_if_one_has_a_comma(tmp_path, caplog):
    """A client's own data must then have all classes, whose number it is told; a table's rows may lack some."""
    numbers, classes = tmp_path / "numbers.jsonl", ("Adenocarcinoma, NOS", "benign", "naevus")
    numbers.write_text("".join(json.dumps({"a": n, "label": classes[n % 3]}) + "\n" for n in range(30)))
    site = tmp_path / "site.csv"
    site.write_text("a,label\n" + '1,benign\n2,"Adenocarcinoma, NOS"\n3,naevus\n' * 5)
    asked = config(dataset=str(numbers), model="mlp", feature_columns="a")
    assert written_names(asked) == {} and written_names(asked) == {}
    (said,) = [line for line in caplog.messages if "comma" in line]
    assert f"dataset={str(numbers)!r}: class name 'Adenocarcinoma, NOS' has a comma" in said
    assert settled(asked)["classes"] == "3"
    sent = asked.model_copy(update={"dataset": "only-on-the-server.csv", "classes": 3})
    assert client_inputs(sent, {"data-path": str(site)}, client="site").sizes == sizes(asked)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"vocab_size": 5}, "has 12 tokens, but model=.* has 5"),
        ({"pad_token_id": 3}, "pads with token 0, but model=.* uses 3"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(table, bert, changed, expected):
    with open(f"{bert}/config.json", "w") as file:
        json.dump({**BERT, **changed}, file)
    with pytest.raises(TokenizerError, match=expected):
        held_out_inputs(of_texts(table, bert))


@pytest.mark.parametrize(
    ("changed", "longest"),
    [
        ({}, 16),
        ({"model_type": "roberta"}, 15),
        ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"], "n_positions": 9}, 9),
    ],
)
def test_texts_longer_than_the_models_positions_are_refused(table, bert, changed, longest):
    with open(f"{bert}/config.json", "w") as file:
        json.dump({**BERT, **changed}, file)
    texts = of_texts(table, bert)
    values = held_out_inputs(texts.model_copy(update={"text_length": longest})).values
    with torch.no_grad():
        build(bert, classes=2, seed=0)(torch.from_numpy(values).long())
    for given, said in ((longest + 1, f"={longest + 1} "), (0, "=0, which is 128, ")):
        with pytest.raises(TokenizerError, match=f"text-length{said}is more than the {longest} .*or less"):
            held_out_inputs(texts.model_copy(update={"text_length": given}))


@pytest.mark.parametrize(
    "rotary",
    [
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_key_value_heads": 1},
        {"model_type": "mistral", "architectures": ["MistralForSequenceClassification"], "num_key_value_heads": 1,
         "rope_theta": 10000.0, "sliding_window": None},
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForSequenceClassification"], "rotary_emb_base": 10000},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_rotary_positions_take_longer_texts(table, bert, rotary):
    with open(f"{bert}/config.json", "w") as file:
        json.dump({**BERT, **rotary}, file)
    most = BERT["max_position_embeddings"]
    values = held_out_inputs(of_texts(table, bert).model_copy(update={"text_length": 2 * most})).values
    values = np.concatenate([values] * 4, -1)[:, : 2 * most]  # no padding, also where texts are short
    with torch.no_grad():
        logits = build(bert, classes=2, seed=0)(torch.from_numpy(values).long())
    assert values.shape[1] == 2 * most and torch.isfinite(logits).all()


def test_a_tokenizer_that_is_not_there_is_refused_at_the_site(table, bert, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TokenizerError, match=r"tokenizer='nobody/none' is not a local directory"):
        client_inputs(of_texts(table, bert, tokenizer="nobody/none"), node(0), client="c0")


def test_what_a_model_is_for_is_its_own_or_said():
    own = config(model="mine:net", task="next-character")
    assert own.kind == "next-character" and config(model="mine:net").kind == "image-classification"
    with pytest.raises(ModelError, match="tiny-vit is a model for image-classification, but task='next-character'"):
        _ = config(task="next-character").kind
    for model in ("Qwen/Qwen2.5-0.5B", "char-lstm", "bert-base-uncased"):
        with pytest.raises(ConfigError, match="has images, but the model needs texts"):
            read_run_config({"model": model})


def in_process(tmp_path, clients=3, **values):
    given = {**defaults(), "runs": str(tmp_path / "runs"), "num-server-rounds": 3, "fedfrozen.warmup-rounds": 1}
    given |= {key.replace("_", "-"): value for key, value in values.items()}
    return run(InProcessGrid([Node(app, node(k, clients)) for k in range(clients)], given), given)


@pytest.mark.parametrize("strategy", ["fedfrozen", "selective", "fedensemble", "fedacs"])
def test_a_run_on_texts(strategy, table, bert, tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    columns = {"text_column": "said", "label_column": "colour", "partitioner": "iid", "text_length": 8}
    training = {"local_epochs": 12, "learning_rate": 0.02}
    path = in_process(tmp_path, dataset=table, model=bert, strategy=strategy, **training, **columns)
    lines = read_lines(path)
    assert not any(line["refused"] or line["lost"] for line in lines)
    assert len(lines) == (3 if strategy == "fedacs" else 4), "of own models the initial one is not scored"
    assert all(0 <= line["macro_f1"] <= 1 and line["perplexity"] is None for line in lines)
    if strategy in ("fedfrozen", "fedacs"):
        assert lines[-1]["accuracy"] > 0.8, "the label is a word of the text"
    if strategy == "fedfrozen":
        of_query_key = 2 * 2 * (12 * 12 + 12) * 4
        assert lines[1]["bytes_up"] - lines[2]["bytes_up"] == 3 * of_query_key


@pytest.mark.parametrize("strategy", ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs", "ditto"])
def test_a_run_on_numbers(strategy, sequences, tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    data = {"dataset": sequences, "model": "linear-attention", "partitioner": "iid"}
    training = {"local_epochs": 10, "learning_rate": 0.03, "schedule": "constant"}
    path = in_process(tmp_path, strategy=strategy, **training, **data)
    lines, personal = read_lines(path), strategy in ("fedacs", "ditto")
    assert not any(line["refused"] or line["lost"] for line in lines) and len(lines) == (3 if personal else 4)
    assert [line["rmse"] ** 2 for line in lines] == pytest.approx([line["loss"] for line in lines])
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"] and lines[-1]["clients_rmse"] > 0
    assert lines[-1]["clients_spread"] > 0 and {line["accuracy_of"] for line in lines} == (
        {"personal"} if personal else {"server"}
    )
    assert not any(line[key] for line in lines for key in ("accuracy", "clients_accuracy", "macro_f1", "perplexity"))
    assert read_summary(path)["rmse"] == lines[-1]["rmse"] and "Final RMSE" in (path / "report.html").read_text()
    if personal:
        with np.load(path / "rounds" / "000003.npz") as record:
            assert sorted(record["scored"]) == ["client-0", "client-1", "client-2"]
            assert record["rmse"].mean() == pytest.approx(lines[-1]["clients_rmse"])
    if strategy == "fedfrozen":
        assert [line["bytes_up"] for line in lines[1:]] == [3 * 4 * n for n in (4 * (32 + 32 + 2), 4 * 2, 4 * 2)]
    if strategy == "fedensemble":
        assert lines[-1]["variance_over_members"] > 0
    rows = load_predictor(path).predict_files([Path(sequences)])
    assert len(rows) == 90 and (error_of(rows) < lines[0]["rmse"] or personal)


def small(features, outputs):
    """A model of one's own, for tables."""
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, outputs))


def test_a_run_on_a_tables_numbers_with_a_model_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    path, rng = tmp_path / "t.csv", np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "site", "target"])
        rows.writerows([a, b, f"s{n % 3}", a - b] for n, (a, b) in enumerate(rng.normal(size=(90, 2))))
    data = {"dataset": str(path), "model": f"{__name__}:small", "task": "sequence-regression", "label-column": "target"}
    data |= {"feature-columns": "a,b", "group-column": "site", "partitioner": "natural"}
    left = in_process(tmp_path, strategy="selective", local_epochs=10, learning_rate=0.05, **data)
    lines = read_lines(left)
    assert lines[-1]["rmse"] < 0.6 * lines[0]["rmse"] and not any(line["refused"] for line in lines)
    new = tmp_path / "new.csv"
    new.write_text("b,a\n0.5,1\n-1,0\n")
    first, second = load_predictor(left).predict_files([new])
    assert first.targets is None and (first.outputs[0], second.outputs[0]) == pytest.approx((0.5, 1), abs=0.5)


def test_a_run_on_characters(tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "play.txt"
    path.write_text(PLAY)
    data = {"dataset": str(path), "partitioner": "iid", "min_partition_size": 1, "text_length": 8}
    left = in_process(tmp_path, 2, model="char-lstm", strategy="fedavg", local_steps=8, learning_rate=0.03, **data)
    lines = read_lines(left)
    assert not any(line["refused"] or line["lost"] for line in lines)
    perplexities = [line["perplexity"] for line in lines]
    assert perplexities[0] == pytest.approx(80, rel=0.2), "a guess among 80 characters"
    assert perplexities[-1] < 25 < len(string.ascii_lowercase)
    assert perplexities == pytest.approx([np.exp(line["loss"]) for line in lines])
