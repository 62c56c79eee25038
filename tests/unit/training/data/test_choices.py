"""Multiple choice: tables of questions as data sets have them, and a whole run."""

import csv
import json

import numpy as np
import pytest

from tepal.client_app.app import app
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training.data import DataConfig, DataError, held_out, load_client_texts
from tepal.training.data.examples import Texts
from tepal.training.data.formats.choices import choices_of
from tepal.training.data.inputs import InputConfig, client_inputs, held_out_inputs, sizes
from tepal.training.data.tokens import CHOICE, CONTEXT
from tests.lines import read_lines
from tests.unit.training.data.word_tokenizer import ID, WORDS, ids, written

QUESTIONS = ["the sky is ?", "what is green ?", "very blue is ?"]
CHOICES = [["green", "blue"], ["the sky", "what", "very blue"], ["the sky", "what"]]
RIGHT = [1, 1, 0]

LLAMA = {"model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 16, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 1, "pad_token_id": 0}
LLAMA |= {"max_position_embeddings": 32, "architectures": ["LlamaForCausalLM"]}


def lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"dataset": str(path), "text-column": "question", "choices-column": "choices", "label-column": "answer"}


def read(config, **more):
    values = {**config, "held-out-fraction": 0.0, "partitioner": "iid", "min-partition-size": 1, **more}
    client = load_client_texts(
        DataConfig.from_run_config(values), {"partition-id": 0, "num-partitions": 1}, client="c0"
    )
    return {
        question: (choices, int(label))
        for part in (client.train, client.test)
        for question, choices, label in zip(part.texts, part.choices, part.labels, strict=True)
    }


EXPECTED = {q: (tuple(c), r) for q, c, r in zip(QUESTIONS, CHOICES, RIGHT, strict=True)}
LETTERS = "ABC"


@pytest.mark.parametrize(
    "answers",
    [RIGHT, [str(r) for r in RIGHT], [LETTERS[r] for r in RIGHT], [c[r] for c, r in zip(CHOICES, RIGHT, strict=True)]],
    ids=["place", "place as text", "letter", "text"],
)
def test_the_right_choice_may_be_told_in_several_ways(tmp_path, answers):
    rows = [
        {"question": q, "choices": c, "answer": a} for q, c, a in zip(QUESTIONS, CHOICES, answers, strict=True)
    ]
    assert read(lines(tmp_path / "qa.jsonl", rows)) == EXPECTED


def test_texts_that_are_numbers_are_no_positions():
    def right(choices, answers):
        return choices_of({"": ([choices], answers)}, "t")[""][1].tolist()

    choices = [["2", "3", "4", "5"], ["10", "20", "1", "0"]]
    assert right(choices, ["3", "20"]) == [1, 1]
    assert right(choices, [3, 1]) == [3, 1], "numbers are positions"
    assert right(choices, ["3", "2"]) == [3, 2], "2 is no choice of the second row"
    assert right([["0", "1"]], ["1"]) == [1], "both are the same"
    with pytest.raises(DataError, match=r"^t: row 2: the answer '0' is a position .*: write .* as letters"):
        right([["2", "1"], ["1", "0"]], ["1", "0"])
    own = [{"text": ["3", "1", "2"], "label": ["1", "2", "3"]}, ["7", "8"]]
    assert right(own, ["1", "8"]) == [0, 1], "the choices' own labels come first"


def test_the_parts_of_a_data_set_are_decided_together(tmp_path):
    """The test rows alone could be positions: 1 is the second choice. The training rows show that they are texts."""
    parts = {"train": [(["2", "3", "4"], "4"), (["10", "20", "1"], "20")], "test": [(["1", "0"], "1")]}
    for part, rows in parts.items():
        lines(
            tmp_path / f"{part}.jsonl",
            [{"question": f"{part} {row}", "choices": c, "answer": a} for row, (c, a) in enumerate(rows)],
        )
    config = {"dataset": str(tmp_path), "text-column": "question", "choices-column": "choices"}
    found = read({**config, "label-column": "answer"})
    held = held_out(DataConfig.from_run_config({**config, "label-column": "answer"}), Texts)
    assert found == {"train 0": (("2", "3", "4"), 2), "train 1": (("10", "20", "1"), 1)}
    assert (held.choices, held.labels.tolist()) == ((("1", "0"),), [0])


def test_choices_may_have_labels_of_their_own(tmp_path):
    """As ARC has them: some questions by letters, others by numbers from 1 on."""
    rows = [
        {"question": q, "choices": {"text": c, "label": own[: len(c)]}, "answer": own[r]}
        for q, c, r, own in zip(QUESTIONS, CHOICES, RIGHT, (list("ABCD"), list("1234"), list("1234")), strict=True)
    ]
    assert read(lines(tmp_path / "arc.jsonl", rows)) == EXPECTED


def test_each_choice_may_have_a_column(tmp_path):
    """As PIQA has them, and SciQ, whose right answer is a column of choices, too."""
    with (tmp_path / "qa.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["goal", "sol1", "sol2", "label"], ["the sky is ?", "green", "blue", 1],
                                    ["very blue is ?", "the sky", "what", 0]])  # fmt: skip
    piqa = {"dataset": str(tmp_path / "qa.csv"), "text-column": "goal", "choices-column": "sol1,sol2"}
    assert read({**piqa, "label-column": "label"}) == {q: EXPECTED[q] for q in (QUESTIONS[0], QUESTIONS[2])}
    sciq = {**piqa, "choices-column": "sol2,sol1", "label-column": "sol2"}
    assert read(sciq) == {"the sky is ?": (("blue", "green"), 0), "very blue is ?": (("what", "the sky"), 0)}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"answer": 2}, r"row 2: the answer 2 is not among its 2 choices"),
        ({"answer": "C"}, r"row 2: the answer 'C' is not among its 2 choices: allowed are positions from 0 to 1"),
        ({"choices": ["one"]}, r"row 2: has the choices .*\['one'\]"),
        ({"choices": ["one", 2]}, r"row 2: has the choices .*: give at least two texts"),
        ({"choices": "one"}, r"row 2: has the choices"),
        ({"question": 7}, r"row 2: int in column question is not text"),
    ],
)
def test_a_question_that_cannot_be_used_is_named(tmp_path, row, expected):
    good = {"question": "the sky is ?", "choices": ["green", "blue"], "answer": 1}
    with pytest.raises(DataError, match=expected):
        read(lines(tmp_path / "qa.jsonl", [good, {**good, **row}]))


def test_questions_say_which_choice_is_right(tmp_path):
    good = {"question": "the sky is ?", "choices": ["green", "blue"], "answer": 1}
    with pytest.raises(DataError, match="questions need a column with the right choice: set label-column"):
        read(lines(tmp_path / "qa.jsonl", [good] * 3), **{"label-column": ""})


@pytest.fixture
def questions(tmp_path):
    """60 questions whose right choice is the word that the question has, and a small LLaMA with its tokenizer."""
    rng, folder = np.random.default_rng(0), tmp_path / "llama"
    written(folder, pad_token="[PAD]")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    rows = []
    for _ in range(60):
        said, other = rng.permutation(["blue", "green"])
        choices = [str(said), str(other)] if rng.integers(2) else [str(other), str(said)]
        rows.append({"question": f"what is {said} ?", "choices": choices, "answer": choices.index(str(said))})
    return {**lines(tmp_path / "qa.jsonl", rows), "model": str(folder), "partitioner": "iid", "text-length": 8}


def test_a_causal_model_takes_every_question_with_each_choice(questions):
    config = InputConfig.from_run_config(questions)
    assert config.kind == "multiple-choice" and sizes(config) == {}
    given = client_inputs(config, {"partition-id": 0, "num-partitions": 3}, client="c0").train
    assert given.values.shape == (len(given), 2, 2, 8) and given.values.dtype == np.uint8
    for example, label in zip(given.values, given.labels, strict=True):
        asked = example[label, 0, 2]
        assert example[label, 0].tolist() == [*ids("what is"), asked, ID["?"], asked, 0, 0, 0]
        assert example[label, 1].tolist() == [CONTEXT] * 4 + [CHOICE] + [0] * 3
    assert len(held_out_inputs(config)) == 12


def test_questions_and_other_texts_are_not_mixed_up(questions):
    with pytest.raises(DataError, match="is for multiple-choice, but these texts have no choices: set choices-column"):
        held_out_inputs(InputConfig.from_run_config({**questions, "choices-column": ""}))


@pytest.mark.parametrize("strategy", ["fedfrozen", "selective", "fedensemble", "fedacs"])
def test_a_run_on_questions(strategy, questions, tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    given = {**defaults(), "runs": str(tmp_path / "runs"), "num-server-rounds": 3, "fedfrozen.warmup-rounds": 1}
    given |= {**questions, "strategy": strategy, "local-epochs": 12, "learning-rate": 0.02}
    nodes = [Node(app, {"partition-id": k, "num-partitions": 3}) for k in range(3)]
    told = read_lines(run(InProcessGrid(nodes, given), given))
    assert not any(line["refused"] or line["lost"] for line in told)
    assert all(0 <= line["accuracy"] <= 1 and line["macro_f1"] is line["perplexity"] is None for line in told)
    if strategy in ("fedfrozen", "fedacs"):
        assert told[-1]["accuracy"] > 0.8, "the choice is a word of the question"
