"""FedBE in whole runs on texts: what the server distils on, and that no client has it."""

import json
from pathlib import Path

import numpy as np
import pytest

from tepal.client_app.app import app
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.run import build_model, build_strategy, run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training.data import CharVocabulary, load_client_texts
from tepal.training.data.inputs import InputConfig, unlabelled_inputs
from tests.lines import read_lines
from tests.unit.training.data.word_tokenizer import WORDS, ids, written

BERT = {"model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 12, "num_attention_heads": 3, "pad_token_id": 0}
BERT |= {"intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 16}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {"model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 16, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 24, "num_hidden_layers": 1, "num_key_value_heads": 1, "pad_token_id": 0}
LLAMA |= {"max_position_embeddings": 32, "architectures": ["LlamaForCausalLM"]}


def folder_of(tmp_path, config):
    folder = tmp_path / config["model_type"]
    written(folder, pad_token="[PAD]")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(params=["sequence-classification", "next-character", "multiple-choice"])
def texts(request, tmp_path):
    """A run config on texts of a kind."""
    rng, path = np.random.default_rng(0), tmp_path / "texts.jsonl"
    if request.param == "next-character":
        (tmp_path / "play.txt").write_text("\n\n".join(f"{name}:\n" + "aaab\n" * 240 for name in "ABCD"))
        return {"dataset": str(tmp_path / "play.txt"), "model": "char-lstm", "text-length": 5,
                "min-partition-size": 2}  # fmt: skip
    rows = []
    for number in range(80):
        said, other = (str(word) for word in rng.permutation(["blue", "green"]))
        between = " ".join(rng.choice(WORDS[4:], 3))
        rows.append({"text": f"{between} {said}", "label": said, "options": [said, other][:: 1 if number % 2 else -1]})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = {"dataset": str(path), "text-column": "text", "text-length": 8}
    if request.param == "multiple-choice":
        return given | {"model": folder_of(tmp_path, LLAMA), "choices-column": "options"}
    return given | {"model": folder_of(tmp_path, BERT)}


def test_the_server_distils_on_texts_that_no_client_has(texts):
    values = {**texts, "server-share": 0.25, "held-out-fraction": 0.2, "partitioner": "iid"}
    config = InputConfig.from_run_config(values)
    found = unlabelled_inputs(config)
    clients = [load_client_texts(config, {"partition-id": k, "num-partitions": 2}, client=f"c{k}") for k in range(2)]
    theirs = {text for client in clients for part in (client.train, client.test) for text in part.texts}
    if config.kind == "next-character":
        said = {"".join(CharVocabulary().characters[n] for n in row) for row in found}
        assert set("".join(said)) <= set("ab\n ") and found.shape[1] == 5
        return
    rows = [json.loads(line)["text"] for line in Path(texts["dataset"]).read_text().splitlines()]
    missing = [text for text in rows if text not in theirs]
    assert found.shape[0] == round(round(len(rows) * 0.8) * 0.25) and found.dtype == np.uint8
    words = found[:, 0, 0] if config.kind == "multiple-choice" else found
    for row in words:
        assert any(ids(text)[:2] == [n for n in row.tolist() if n not in (1, 2)][:2] for text in missing)


def test_a_run_of_fedbe_on_texts_learns(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    given = {**defaults(), **texts, "runs": str(tmp_path / "runs"), "num-server-rounds": 3, "strategy": "fedbe"}
    given |= {"partitioner": "iid", "server-share": 0.2, "fedbe.samples": 2, "fedbe.learning-rate": 0.01}
    given |= {"fedbe.epochs": 5, "local-epochs": 20, "learning-rate": 0.02}
    if texts["model"] == "char-lstm":
        given |= {"local-steps": 8, "learning-rate": 0.05, "fedbe.epochs": 1}
    nodes = [Node(app, {"partition-id": k, "num-partitions": 2}) for k in range(2)]
    told = read_lines(run(InProcessGrid(nodes, given), given))
    assert not any(line["refused"] or line["lost"] for line in told)
    assert told[-1]["accuracy"] > (0.55 if texts["model"] == "char-lstm" else 0.7)


def test_without_texts_of_the_servers_own_the_run_is_refused(texts):
    with pytest.raises(ConfigError, match=r"server-share=0\.0 the server has none: set server-share"):
        read_run_config({**texts, "strategy": "fedbe"})


def test_a_tokenizer_that_is_not_there_is_said_before_the_run(texts, tmp_path):
    if texts["model"] == "char-lstm":
        pytest.skip("characters need no tokenizer")
    values = {**texts, "strategy": "fedbe", "server-share": 0.2, "tokenizer": str(tmp_path / "nowhere")}
    config = read_run_config(values)
    _, blocks = build_model(config)
    with pytest.raises(ConfigError, match="nowhere' is not a local directory"):
        build_strategy(config, blocks)
