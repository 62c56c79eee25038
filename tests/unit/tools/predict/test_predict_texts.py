"""What `tepal predict` says of texts, against the model called by hand on numbers of words and characters."""

import csv
import gzip
import json
import string

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tepal import models
from tepal.client_app.app import app
from tepal.records.run_directory import RunDirectory
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.cli.main import main
from tepal.tools.predict import predict
from tepal.tools.predict.predict import load_predictor
from tepal.tools.predict.results import accuracy
from tests.unit.training.data.word_tokenizer import WORDS, ids, written

BERT = {"model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 12, "num_attention_heads": 3, "pad_token_id": 0}
BERT |= {"intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 16}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {"model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 16, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 1, "pad_token_id": 0}
LLAMA |= {"max_position_embeddings": 32, "architectures": ["LlamaForCausalLM"]}
TEXTS = ["the sky is blue", "what is very green ?", "very very", "green", "the the the sky"]
LEAF = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"


def model_folder(tmp_path, config):
    folder = tmp_path / config["model_type"]
    written(folder, pad_token="[PAD]")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def saved(tmp_path, model, seeds, sizes, **config):
    """A run directory whose model is an ensemble of new ones; and these models. Their weights are large, so that they
    differ in what they say."""
    built = [models.build(model, **sizes, seed=seed).eval() for seed in seeds]
    with torch.no_grad():
        for one in built:
            for parameter in one.parameters():
                parameter.mul_(1 if model == "char-lstm" or parameter.dim() == 1 else 40)
    run = RunDirectory.create(tmp_path / "runs", "fedavg", {"strategy": "fedavg", "model": model, **config})
    prefix = (lambda k: f"mode/{k}/") if len(seeds) > 1 else (lambda k: "")
    run.write_model({
        f"{prefix(k)}{name}": tensor.detach().numpy()
        for k, one in enumerate(built) for name, tensor in one.state_dict().items()
    })  # fmt: skip
    return run.path, built


def mean_of(built, inputs):
    with torch.no_grad():
        logits = [model(torch.tensor(inputs)).double().numpy() for model in built]
    odds = [np.exp(one - one.max(1, keepdims=True)) for one in logits]
    return sum(one / one.sum(1, keepdims=True) for one in odds) / len(odds)


def classified(texts, length=8):
    return [([1, *ids(text)][: length - 1] + [2] + [0] * length)[:length] for text in texts]


def table(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def bert(tmp_path):
    """Two models of three classes in one run directory, and the models."""
    columns = {"text-column": "said", "label-column": "kind", "group-column": "who", "text-length": 8}
    more = {"classes": 3, "class-names": "cold,warm,hot", "dataset": "gone.csv"}
    return saved(tmp_path, model_folder(tmp_path, BERT), (0, 1), {"classes": 3}, **columns, **more)


@pytest.mark.parametrize("form", ["t.csv", "t.jsonl", "t.jsonl.gz", "t.parquet", "t.txt"])
def test_texts_are_predicted_by_the_mean_of_the_models_on_the_runs_own_tokens(tmp_path, bert, form):
    path, built = bert
    file = tmp_path / form
    if form == "t.txt":
        file.write_text("\n".join(TEXTS) + "\n")
    else:
        table(file, [{"said": text, "id": n} for n, text in enumerate(TEXTS)])
    rows = load_predictor(path).predict_files([file])
    mean = mean_of(built, classified(TEXTS))
    assert [row.label for row in rows] == mean.argmax(1).tolist() and len(set(mean.argmax(1))) > 1
    np.testing.assert_allclose([row.probability for row in rows], mean.max(1), rtol=1e-4)
    assert [row.class_name for row in rows] == [("cold", "warm", "hot")[label] for label in mean.argmax(1)]
    assert [(row.file, row.index, row.true_label) for row in rows] == [(file, n, None) for n in range(5)]


def test_a_tables_labels_give_an_accuracy_whether_they_are_names_or_numbers(tmp_path, bert):
    path, built = bert
    found = mean_of(built, classified(TEXTS)).argmax(1)
    for file, kinds in (("a.csv", ("cold", "warm", "hot")), ("b.csv", (0, 1, 2))):
        rows = [{"said": text, "kind": kinds[label]} for text, label in zip(TEXTS, found, strict=True)]
        rows[0]["kind"] = kinds[(found[0] + 1) % 3]
        assert accuracy(load_predictor(path).predict_files([table(tmp_path / file, rows)])) == 4 / 5


def test_lines_without_text_are_passed_over_and_a_folder_is_all_its_files(tmp_path, bert):
    path, _ = bert
    folder = tmp_path / "asked"
    folder.mkdir()
    (folder / "b.txt").write_text("the sky\n\n  \ngreen\n")
    (folder / "notes.md").write_text("no text of these")
    table(folder / "a.csv", [{"said": "what"}])
    rows = load_predictor(path).predict_files([folder])
    assert [(row.file.name, row.index) for row in rows] == [("a.csv", 0), ("b.txt", 0), ("b.txt", 3)]


def test_lines_end_at_newlines_alone(tmp_path, bert):
    (tmp_path / "t.txt").write_bytes("\ufeffthe\fsky\u2028is\x85blue\r\nwhat ?\rgreen\nvery".encode())
    rows = load_predictor(bert[0]).predict_files([tmp_path / "t.txt"])
    mean = mean_of(bert[1], classified(["the sky is blue", "what ?", "green", "very"]))
    assert [row.index for row in rows] == [0, 1, 2, 3]
    np.testing.assert_allclose([row.probability for row in rows], mean.max(1), rtol=1e-4)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda to: table(to / "t.csv", [{"text": "a"}]), r"t\.csv: has no column said; it has text: set the right"),
        (lambda to: table(to / "t.jsonl", [{"said": 3}]), r"t\.jsonl: row 1: int in column said is not text"),
        (lambda to: table(to / "t.csv", [{"said": "a", "kind": "icy"}]), r"t\.csv: names in column kind icy are not"),
        (lambda to: table(to / "t.csv", [{"said": "a", "kind": 3}]), r"t\.csv: label 3 .*allowed are 0 to 2"),
        (lambda to: (to / "t.txt").write_text("\n") and to / "t.txt", r"t\.txt: no text"),
        (
            lambda to: (to / "t.png").write_text("a") and to / "t.png",
            r"t\.png: .* takes texts; allowed are \.csv",
        ),
        (lambda to: to / "t.csv", r"t\.csv: no such file"),
        (lambda to: (to / "t").mkdir() or to / "t", r"no texts in this folder; allowed are \.csv"),
    ],
)
def test_files_without_what_the_model_takes_are_named(tmp_path, bert, write, message):
    file = write(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        load_predictor(bert[0]).predict_files([file])


def test_a_tokenizer_that_is_not_there_is_said_before_a_file_is_read(tmp_path):
    folder = model_folder(tmp_path, BERT)
    path, _ = saved(tmp_path, folder, (0,), {"classes": 2}, classes=2, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"model\.safetensors: tokenizer='.*nowhere' is not a local directory"):
        load_predictor(path)


def test_pairs_of_texts_come_in_tables_alone(tmp_path):
    columns = {"text-column": "a", "second-text-column": "b", "text-length": 12, "classes": 2}
    path, built = saved(tmp_path, model_folder(tmp_path, BERT), (0,), {"classes": 2}, **columns)
    rows = load_predictor(path).predict_files([table(tmp_path / "t.csv", [{"a": "the sky", "b": "is blue"}])])
    mean = mean_of(built, [[1, *ids("the sky"), 2, *ids("is blue"), 2, *[0] * 5]])
    assert rows[0].label == mean.argmax() and rows[0].probability == pytest.approx(mean.max(), rel=1e-4)
    (tmp_path / "t.txt").write_text("the sky\n")
    with pytest.raises(ValueError, match=r"t\.txt: the model takes pairs of texts, and plain text has none"):
        load_predictor(path).predict_files([tmp_path / "t.txt"])


def test_the_next_character_of_each_line_is_predicted(tmp_path):
    path, built = saved(tmp_path, "char-lstm", (0, 3), {"vocabulary": 80}, **{"text-length": 6, "label-column": ""})
    lines = ["To be, or", "a", "What is"]
    (tmp_path / "t.txt").write_text("\n".join(lines))
    rows = load_predictor(path).predict_files([tmp_path / "t.txt"])
    mean = mean_of(built, [[LEAF.index(c) for c in line[-6:].rjust(6)] for line in lines])
    assert [row.label for row in rows] == mean.argmax(1).tolist()
    assert [row.class_name for row in rows] == [LEAF[label] for label in mean.argmax(1)]


@pytest.mark.parametrize("told", [True, False])
def test_the_choice_of_each_question_is_predicted_with_its_text(tmp_path, told):
    columns = {"text-column": "ask", "choices-column": "options", "label-column": "right", "text-length": 8}
    path, (model,) = saved(tmp_path, model_folder(tmp_path, LLAMA), (0,), {}, **columns)
    asked = [("what is ?", ["blue", "very green", "the sky"]), ("the sky is", ["green", "blue"])]
    scores = np.full((2, 3), -np.inf)
    with torch.no_grad():
        for n, (question, options) in enumerate(asked):
            for k, option in enumerate(options):
                tokens = [*ids(question), *ids(option)]
                logits = model(torch.tensor([tokens]))[0].log_softmax(-1)
                chosen = range(len(ids(question)), len(tokens))
                scores[n, k] = np.mean([float(logits[at - 1, tokens[at]]) for at in chosen])
    odds = np.exp(scores)
    expected = odds / odds.sum(1, keepdims=True)
    best = expected.argmax(1)
    right = [int(best[0]), 1 - int(best[1])]
    rows = [{"ask": q, "options": o, **({"right": r} if told else {})} for (q, o), r in zip(asked, right, strict=True)]
    found = load_predictor(path).predict_files([table(tmp_path / "t.jsonl", rows)])
    assert [row.label for row in found] == best.tolist()
    np.testing.assert_allclose([row.probability for row in found], expected.max(1), rtol=1e-4)
    assert [row.class_name for row in found] == [asked[n][1][best[n]] for n in range(2)]
    assert accuracy(found) == (0.5 if told else None)
    (tmp_path / "t.txt").write_text("what is ?\n")
    with pytest.raises(ValueError, match=r"t\.txt: the model takes questions and their choices.*give a table"):
        load_predictor(path).predict_files([tmp_path / "t.txt"])


def test_a_runs_model_knows_its_classes_by_the_names_in_its_data(tmp_path, monkeypatch):
    """From the run to what the command writes: no key says how the classes are called."""
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    rows = [{"said": f"the sky {('blue', 'green')[n % 2]}", "kind": ("up", "down")[n % 2]} for n in range(40)]
    file = table(tmp_path / "t.csv", rows)
    given = {**defaults(), "runs": str(tmp_path / "runs"), "strategy": "fedavg", "dataset": str(file)}
    given |= {"model": model_folder(tmp_path, BERT), "text-column": "said", "label-column": "kind", "text-length": 6}
    given |= {"num-server-rounds": 3, "local-epochs": 20, "partitioner": "iid", "learning-rate": 0.02}
    run(InProcessGrid([Node(app, {"partition-id": k, "num-partitions": 2}) for k in range(2)], given), given)
    done = CliRunner().invoke(
        main, ["predict", str(tmp_path / "runs"), str(file), "--output", str(tmp_path / "said.csv")]
    )
    assert done.exit_code == 0, done.output
    with (tmp_path / "said.csv").open(newline="") as content:
        said = list(csv.DictReader(content))
    assert [line["class_name"] for line in said] == [row["kind"] for row in rows]
    assert [line["label"] for line in said] == ["1", "0"] * 20 == [line["true_label"] for line in said]


def test_a_folder_is_no_place_for_predictions_and_is_refused_before_there_are_any(tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(predict, "load_predictor", loaded.append)
    for output, said in ((tmp_path, "is a folder: name a file"), (tmp_path / "no" / "a.csv", "does not exist")):
        done = CliRunner().invoke(main, ["predict", "runs", "a.txt", "--output", str(output)])
        assert done.exit_code == 1 and f"--output {output}: " in done.stderr and said in done.stderr
    assert not loaded
