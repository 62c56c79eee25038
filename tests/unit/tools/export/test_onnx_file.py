"""ONNX files: what onnxruntime computes with them, against the models of the run."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tepal import models
from tepal.tools.cli.main import main
from tepal.tools.export import graphs, onnx_file
from tepal.tools.export.delivered import ExportError, largest_difference, load_delivered
from tepal.tools.export.example_inputs import example_inputs
from tepal.tools.export.onnx_file import export_onnx
from tepal.tools.predict.predict import load_predictor
from tests.unit.tools.export.runs import BERT, LLAMA, custom_model, delivered, model_folder

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

DIGITS = {"image-shape": "1x8x8", "classes": 10}
DIGIT_SIZES = {"image_shape": (1, 8, 8), "classes": 10}


def session_of(file):
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def outputs(model, inputs):
    with torch.no_grad():
        return model(torch.from_numpy(inputs)).double().numpy()


def images(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def padded(count, length, vocabulary):
    ids = np.random.default_rng(0).integers(1, vocabulary, (count, length))
    ids[0, length // 2 :] = 0
    return ids


def assert_computes(file, name, model, batches):
    session = session_of(file)
    for inputs in batches:
        logits, probabilities = session.run(["logits", "probabilities"], {name: inputs})
        expected = outputs(model, inputs)
        allowed = 1e-5 * max(1, np.abs(expected).max())
        np.testing.assert_allclose(logits, expected, rtol=0, atol=allowed)
        np.testing.assert_allclose(probabilities, softmax(expected), rtol=0, atol=allowed)
        assert expected.std() > 0.1, "this shows nothing"


def test_a_tiny_vit_takes_any_number_of_images_and_says_how_they_were_normalised(tmp_path):
    scores = [{"round": 7, "accuracy": 0.75, "accuracy_of": "clients"}]
    config = {**DIGITS, "normalise": "0.5/0.25", "dataset": "digits", "class-names": ",".join("abcdefghij")}
    run, (model,) = delivered(tmp_path, "tiny-vit", DIGIT_SIZES, scores=scores, **config)
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    assert done.inputs == {"pixel_values": ("batch", 1, 8, 8)} and 0 <= done.difference < 1e-4
    assert done.outputs == {"logits": ("batch", 10), "probabilities": ("batch", 10)}
    assert_computes(done.path, "pixel_values", model, [images(n, 1, 8, 8) for n in (1, 4, 9)])
    found = session_of(done.path).get_modelmeta().custom_metadata_map
    known = {
        "strategy": "FedAvg", "round": "7", "model": "tiny-vit", "data": "digits", "accuracy": "0.7500",
        "measured-on": "the clients' own test examples", "image-shape": "1x8x8", "mean": "[0.5]", "std": "[0.25]",
        "run": run.name, "members": "1",
    }  # fmt: skip
    assert {key: found[key] for key in known} == known
    assert json.loads(found["class-names"]) == [*"abcdefghij"]


def test_a_compact_vit_computes_what_torch_does(tmp_path):
    config = {"image-shape": "3x32x32", "classes": 5}
    run, (model,) = delivered(tmp_path, "compact-vit", {"image_shape": (3, 32, 32), "classes": 5}, **config)
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    assert_computes(done.path, "pixel_values", model, [images(n, 3, 32, 32) for n in (1, 3)])


def test_a_compact_bert_masks_padding_and_takes_texts_of_any_length(tmp_path):
    pytest.importorskip("transformers")
    config = {"classes": 4, "text-length": 32}
    run, (model,) = delivered(tmp_path, "compact-bert-news", {"classes": 4}, **config)
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    assert done.inputs == {"input_ids": ("batch", "tokens")}
    assert_computes(done.path, "input_ids", model, [padded(n, length, 8000) for n, length in ((1, 32), (3, 20))])
    found = session_of(done.path).get_modelmeta().custom_metadata_map
    assert (found["tokenizer"], found["padding"], found["text-length"]) == ("compact-bert-news", "0", "32")


def test_an_ensemble_is_one_model_that_returns_the_mean_of_the_probabilities(tmp_path):
    run, built = delivered(tmp_path, "tiny-vit", DIGIT_SIZES, seeds=(0, 1, 2), **DIGITS)
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    assert done.outputs == {"probabilities": ("batch", 10)}
    inputs = images(6, 1, 8, 8)
    expected = np.mean([softmax(outputs(model, inputs)) for model in built], axis=0)
    (found,) = session_of(done.path).run(None, {"pixel_values": inputs})
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len({*expected.argmax(axis=1)}) > 1, "this shows nothing"


def test_a_regression_returns_outputs_for_sequences_of_any_length(tmp_path):
    sizes = {"features": 4, "outputs": 2}
    run, built = delivered(tmp_path, "linear-attention", sizes, seeds=(0, 1), **sizes)
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    inputs = images(5, 7, 4)
    (found,) = session_of(done.path).run(["outputs"], {"inputs": inputs})
    np.testing.assert_allclose(found, np.mean([outputs(model, inputs) for model in built], axis=0), rtol=1e-4)


FLAT = """
import torch
def build(features, outputs):
    return torch.nn.Linear(features, outputs)
"""


@pytest.mark.parametrize("model", ["mlp", "ft-transformer"])
def test_a_table_is_classified_in_batches_of_any_size(tmp_path, model):
    sizes = {"features": 5, "classes": 3}
    run, (built,) = delivered(tmp_path, model, sizes, metadata={"features": "5", "classes": "3"})
    done = export_onnx(load_delivered(run), tmp_path / "table.onnx")
    assert_computes(done.path, "inputs", built, [images(count, 5) for count in (1, 4)])


def scaled_as_the_metadata_say(tmp_path, model, sizes, output, **config):
    """Raw numbers by `tepal predict`, and an output of the ONNX file for these numbers scaled by its mean and std."""
    known = {**{name: str(size) for name, size in sizes.items()}, "normalise": "10,-200,3,0.5/2,50,1,0.25"}
    run, _ = delivered(tmp_path, model, sizes, metadata=known, normalise="dataset", **config)
    session = session_of(export_onnx(load_delivered(run), tmp_path / "a.onnx").path)
    found = session.get_modelmeta().custom_metadata_map
    mean, std = (json.loads(found[key]) for key in ("mean", "std"))
    assert (mean, std) == ([10, -200, 3, 0.5], [2, 50, 1, 0.25])
    assert {name: found[name] for name in sizes} == {name: str(size) for name, size in sizes.items()}
    raw = (images(6, 4) * std + mean).astype(np.float32)
    np.savez(tmp_path / "raw.npz", x_test=raw)
    (values,) = session.run([output], {"inputs": ((raw - mean) / std).astype(np.float32)})
    return load_predictor(run).predict_files([tmp_path / "raw.npz"]), values


def test_the_metadata_have_the_mean_and_std_of_a_table(tmp_path):
    rows, values = scaled_as_the_metadata_say(tmp_path, "mlp", {"features": 4, "classes": 3}, "probabilities")
    assert [*values.argmax(axis=1)] == [row.label for row in rows] and len({row.label for row in rows}) > 1
    np.testing.assert_allclose(values.max(axis=1), [row.probability for row in rows], atol=1e-4)


def test_the_metadata_have_the_mean_and_std_of_a_regression(tmp_path, monkeypatch):
    name = custom_model(tmp_path, monkeypatch, FLAT, "flat_scaled")
    sizes = {"features": 4, "outputs": 2}
    rows, values = scaled_as_the_metadata_say(tmp_path, name, sizes, "outputs", task="sequence-regression")
    np.testing.assert_allclose(values, [row.outputs for row in rows], rtol=1e-4, atol=1e-4)


def test_numbers_that_are_not_normalised_have_no_mean(tmp_path):
    known = {"features": "5", "classes": "3"}
    run, _ = delivered(tmp_path, "mlp", {"features": 5, "classes": 3}, metadata=known)
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    found = session_of(done.path).get_modelmeta().custom_metadata_map
    assert (found["features"], found["classes"]) == ("5", "3") and not {"mean", "std"} & found.keys()


def test_a_best_model_has_its_own_round_and_score(tmp_path):
    found = {1: 0.5, 2: 0.9, 3: 0.8}
    scores = [{"round": number, "accuracy": score, "accuracy_of": "server"} for number, score in found.items()]
    run, _ = delivered(tmp_path, "tiny-vit", DIGIT_SIZES, scores=scores, metadata={"round": "2"}, **DIGITS)
    facts = load_delivered(run).facts
    assert (facts["round"], facts["accuracy"], facts["measured-after-round"]) == ("2", "0.9000", "2")


def test_a_regression_without_sequences_has_two_axes(tmp_path, monkeypatch):
    name = custom_model(tmp_path, monkeypatch, FLAT, "flat")
    sizes = {"features": 4, "outputs": 2}
    run, _ = delivered(tmp_path, name, sizes, task="sequence-regression", **sizes)
    assert export_onnx(load_delivered(run), tmp_path / "a.onnx").inputs == {"inputs": ("batch", 4)}


WINDOW = """
import torch
def build(features, outputs):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24 * features, outputs))
"""


def test_a_regression_of_windows_of_a_fixed_length_has_that_length(tmp_path, monkeypatch):
    name = custom_model(tmp_path, monkeypatch, WINDOW, "window")
    sizes = {"features": 4, "outputs": 2}
    run, (built,) = delivered(tmp_path, name, sizes, task="sequence-regression", **sizes)
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    assert done.inputs == {"inputs": ("batch", 24, 4)}
    values = images(5, 24, 4)
    (found,) = session_of(done.path).run(None, {"inputs": values})
    np.testing.assert_allclose(found, outputs(built, values), atol=1e-5)


@pytest.mark.long
def test_characters_are_predicted_as_by_torch(tmp_path):
    run, (model,) = delivered(tmp_path, "char-lstm", {"vocabulary": 80}, **{"text-length": 12})
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    assert_computes(done.path, "input_ids", model, [padded(n, 12, 80) for n in (1, 3)])


def questions(rng, count, length=8):
    """Token ids and roles of questions with 2 choices; the second question has one choice."""
    ids, roles = np.zeros((2, count, 2, length), np.int64)
    for n, choice in np.ndindex(count, 2):
        if (n, choice) != (1, 1):
            before, after = rng.integers(1, 4, 2)
            roles[n, choice, :before], roles[n, choice, before : before + after] = 1, 2
            ids[n, choice, : before + after] = rng.integers(4, 12, before + after)
    return ids, roles


@pytest.mark.long
def test_choices_are_scored_by_the_mean_log_probability_of_their_tokens(tmp_path):
    pytest.importorskip("transformers")
    run, (model,) = delivered(tmp_path, model_folder(tmp_path, LLAMA), {}, **{"text-length": 8})
    done = export_onnx(load_delivered(run), tmp_path / "a.onnx")
    ids, roles = questions(np.random.default_rng(0), 3)
    scores, probabilities = session_of(done.path).run(None, {"input_ids": ids, "roles": roles})
    for n, choice in np.ndindex(3, 2):
        kept = ids[n, choice][roles[n, choice] > 0]
        if not len(kept):
            assert scores[n, choice] == -np.inf and probabilities[n, choice] == 0
            continue
        log = np.log(softmax(outputs(model, kept[None])[0]))
        first = int((roles[n, choice] == 1).sum())
        expected = np.mean([log[place - 1, kept[place]] for place in range(first, len(kept))])
        assert scores[n, choice] == pytest.approx(expected, abs=1e-4)


# What is refused


FIXED = """
import torch
class Fixed(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.start, self.head = torch.nn.Parameter(torch.zeros(1, 64)), torch.nn.Linear(128, classes)
    def forward(self, images):
        return self.head(torch.cat([images.flatten(1), self.start.expand(len(images), -1)], 1))
def build(classes):
    return Fixed(classes)
"""


def test_a_model_that_fixes_the_size_of_a_batch_is_refused(tmp_path, monkeypatch):
    name = custom_model(tmp_path, monkeypatch, FIXED, "fixed")
    run, _ = delivered(tmp_path, name, DIGIT_SIZES, **DIGITS)
    with pytest.raises(ExportError, match=r"fixes the number of examples.*inputs\.shape\[0\] instead of len"):
        export_onnx(load_delivered(run), tmp_path / "a.onnx")


UNTRACEABLE = """
import torch
class Untraceable(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.Linear(64, classes)
    def forward(self, images):
        return self.head(torch.linalg.eigvals(images[:, 0]).real.repeat(1, 8))
def build(classes):
    return Untraceable(classes)
"""


def test_a_model_that_torch_cannot_trace_is_refused_with_the_reason(tmp_path, monkeypatch):
    name = custom_model(tmp_path, monkeypatch, UNTRACEABLE, "untraceable")
    run, _ = delivered(tmp_path, name, DIGIT_SIZES, **DIGITS)
    with pytest.raises(ExportError, match=r"'untraceable:build': torch .* cannot export it to ONNX \(.+: .+\)"):
        export_onnx(load_delivered(run), tmp_path / "a.onnx")


def test_a_file_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    run, _ = delivered(tmp_path, "tiny-vit", DIGIT_SIZES, **DIGITS)
    (tmp_path / "a.onnx").write_text("the file of before")
    right = graphs.Graph.expected
    monkeypatch.setattr(graphs.Graph, "expected", lambda self, x: tuple(each + 1 for each in right(self, x)))
    with pytest.raises(ExportError, match=r"differ from torch's by up to 1\.0e\+00, and .* is allowed"):
        export_onnx(load_delivered(run), tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_text() == "the file of before"
    assert not [*tmp_path.glob(".writing-*")]


def test_without_the_packages_the_error_has_the_command_that_installs_them(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file.importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["export", str(tmp_path), "--to", "onnx"])
    assert done.exit_code == 1 and "pip install 'tepal[onnx]'" in done.stderr


@pytest.mark.parametrize(("output", "message"), [("away/a.onnx", "away does not exist"), ("", "is a folder")])
def test_a_path_that_cannot_be_written_is_refused(tmp_path, output, message):
    run, _ = delivered(tmp_path, "tiny-vit", DIGIT_SIZES, **DIGITS)
    with pytest.raises(ExportError, match=message):
        export_onnx(load_delivered(run), tmp_path / output)


def test_weights_that_no_onnx_file_can_hold_are_refused(tmp_path, monkeypatch):
    run, _ = delivered(tmp_path, "tiny-vit", DIGIT_SIZES, **DIGITS)
    monkeypatch.setattr(onnx_file, "_LARGEST", 1000)
    with pytest.raises(ExportError, match=r"[\d,]+ bytes of weights, and an ONNX file has at most 1,000"):
        export_onnx(load_delivered(run), tmp_path / "a.onnx")


# The measure of a difference, and the inputs that are compared


def test_a_difference_is_the_largest_and_what_is_allowed_grows_with_the_outputs():
    zeros, inf = torch.zeros(2, 2), float("inf")
    assert largest_difference(torch.tensor([1.0, -inf]), torch.tensor([0.5, -inf])) == (0.5, 1e-5)
    assert largest_difference(torch.tensor([100.0, 0.0]), torch.tensor([100.0, 1.0])) == (1.0, pytest.approx(1e-3))
    assert largest_difference(zeros, torch.full((2, 2), torch.nan))[0] > 1e30
    assert largest_difference(zeros, torch.zeros(2, 3))[0] == inf


def test_random_texts_keep_start_end_and_padding(tmp_path):
    pytest.importorskip("transformers")
    run, _ = delivered(tmp_path, model_folder(tmp_path, BERT), {"classes": 3}, classes=3, **{"text-length": 10})
    texts = example_inputs(load_delivered(run), 20, seed=0)
    assert texts.shape == (20, 10) and (texts[:, 0] == 1).all()
    assert ((texts == 2).sum(dim=1) == 1).all() and (texts == 0).any() and len(texts.unique()) > 8
    for row in texts.tolist():
        assert not any(row[row.index(2) + 1 :]), "padding follows the end"


def test_the_command_writes_next_to_the_model_and_warns_of_a_model_that_no_client_uses(tmp_path):
    run, _ = delivered(tmp_path, "tiny-vit", DIGIT_SIZES, strategy="fedacs", **DIGITS)
    done = CliRunner().invoke(main, ["export", str(tmp_path / "runs"), "--to", "onnx"])
    assert done.exit_code == 0, done.output
    assert (run / "model.onnx").exists() and "differ from torch's by at most" in done.stdout
    assert "the mean of the clients' personal models" in done.stderr
    refused = CliRunner().invoke(main, ["export", str(tmp_path / "runs"), "--to", "hugging-face"])
    assert refused.exit_code == 1 and "--to onnx" in refused.stderr and not (run / "hugging-face").exists()


def test_every_kind_of_model_has_inputs_in_the_graph():
    kinds = {getattr(models, name) for name in ("IMAGES", "TABLES", "TEXTS", "CHARACTERS", "SEQUENCES", "CHOICES")}
    assert graphs._INPUTS.keys() == kinds
