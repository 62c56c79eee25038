"""Folders for transformers: what `from_pretrained` loads from them, against the model of the run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tepal.tools.cli.main import main
from tepal.tools.export.delivered import ExportError, load_delivered
from tepal.tools.export.hugging_face import export_folder
from tepal.training.data import read_image
from tests.unit.tools.export.runs import BERT, LLAMA, VIT, custom_model, delivered, model_folder
from tests.unit.training.data.word_tokenizer import ids

transformers = pytest.importorskip("transformers")
TEXTS = ["the sky is blue", "very green ?", "what"]
COLOURS = {"image-shape": "3x8x8", "classes": 3}


def loaded(auto, folder):
    model, report = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture
def bert(tmp_path):
    config = {"classes": 3, "class-names": "cold,warm,hot", "dataset": "/data/reviews.csv", "text-length": 8}
    scores = [{"round": 1, "accuracy": 0.5, "accuracy_of": "server"}, {"round": 2}]
    return delivered(tmp_path, model_folder(tmp_path, BERT), {"classes": 3}, scores=scores, **config)


def test_a_text_classifier_is_loaded_with_its_tokenizer_and_class_names(tmp_path, bert):
    run, (model,) = bert
    done = export_folder(load_delivered(run), tmp_path / "out")
    found = loaded("AutoModelForSequenceClassification", done.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.path)
    batch = tokenizer([*TEXTS, "the " * 30], truncation=True, padding=True, return_tensors="pt")
    by_hand = [[1, *ids(text), 2] for text in TEXTS] + [[1, *ids("the " * 6), 2]]
    with torch.no_grad():
        logits = found(**batch).logits
        expected = model(torch.tensor([one + [0] * (8 - len(one)) for one in by_hand]))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert expected.std() > 0.1, "this shows nothing"
    assert type(found).__name__ == "BertForSequenceClassification" and done.difference < 1e-6
    assert found.config.id2label == {0: "cold", 1: "warm", 2: "hot"} and found.config.label2id["hot"] == 2
    assert str(tmp_path) not in (done.path / "config.json").read_text()


@pytest.mark.parametrize(("names", "expected"), [("", ["LABEL_0", "LABEL_1"]), ("ham,spam", ["ham", "spam"])])
def test_the_classes_of_the_initial_weights_are_not_those_of_the_run(tmp_path, names, expected):
    known = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    folder = model_folder(tmp_path, {**BERT, **known})
    run, _ = delivered(tmp_path, folder, {"classes": 2}, classes=2, **{"class-names": names, "text-length": 8})
    export_folder(load_delivered(run), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == dict(enumerate(expected))
    assert config.label2id == {name: number for number, name in enumerate(expected)}


def test_the_command_writes_a_folder_next_to_the_model_and_says_what_loads_it(bert):
    run, _ = bert
    done = CliRunner().invoke(main, ["export", str(run), "--to", "hugging-face"])
    assert done.exit_code == 0, done.output
    assert f"{run / 'hugging-face'}: loaded by AutoModelForSequenceClassification" in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        file.name for file in (run / "hugging-face").iterdir()
    }
    again = CliRunner().invoke(main, ["export", str(run.parent), "--to", "hugging-face"])
    assert again.exit_code == 1 and "not an empty folder" in again.stderr


def test_pairs_of_texts_get_no_token_types_as_in_training(tmp_path, bert):
    export_folder(load_delivered(bert[0]), tmp_path / "out")
    encoded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the sky", "is blue")
    assert set(encoded) == {"input_ids", "attention_mask"}


def test_the_model_card_has_strategy_rounds_data_and_how_the_accuracy_was_measured(tmp_path, bert):
    export_folder(load_delivered(bert[0]), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for row in (
        "| strategy | FedAvg |", "| round | 2 |", "| data | reviews.csv |", "| accuracy | 0.5000 |",
        "| measured on | the server's held-out examples |", "| measured after round | 1 |",
        "| classes | cold, warm, hot |",
    ):  # fmt: skip
        assert row in card
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    assert str(tmp_path) not in card


def test_the_code_of_the_model_card_runs(tmp_path, bert, monkeypatch, capsys):
    export_folder(load_delivered(bert[0]), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    exec((tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.strip() in ("cold", "warm", "hot")


def test_an_image_classifier_is_loaded_with_a_processor_that_makes_the_inputs_of_training(tmp_path):
    config = {**COLOURS, "normalise": "0.5,0.4,0.3/0.2,0.3,0.4"}
    run, (model,) = delivered(tmp_path, model_folder(tmp_path, VIT), {"image_shape": (3, 8, 8), "classes": 3}, **config)
    export_folder(load_delivered(run), tmp_path / "out")
    found = loaded("AutoModelForImageClassification", tmp_path / "out")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    values = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")(image, return_tensors="pt")
    pixels = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR)) / 255
    expected = ((pixels - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]).transpose(2, 0, 1)[None]
    np.testing.assert_allclose(values["pixel_values"], expected, atol=0.03)  # torchvision's filter rounds differently
    with torch.no_grad():
        torch.testing.assert_close(found(values["pixel_values"]).logits, model(values["pixel_values"]))


def test_the_code_of_the_model_card_makes_the_inputs_of_training_from_a_transparent_image(tmp_path, monkeypatch):
    config = {**COLOURS, "normalise": "0.5/0.5"}
    run, _ = delivered(tmp_path, model_folder(tmp_path, VIT), {"image_shape": (3, 8, 8), "classes": 3}, **config)
    export_folder(load_delivered(run), tmp_path / "out")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    card, names = (tmp_path / "out" / "README.md").read_text(), {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    expected = (read_image(tmp_path / "image.png", (3, 8, 8)) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(names["batch"]["pixel_values"][0], expected, atol=1e-5)
    assert "converted to RGB, which drops transparency" in card


def test_the_code_of_the_model_card_turns_images_upright_as_training_does(tmp_path, monkeypatch):
    run, _ = delivered(tmp_path, model_folder(tmp_path, VIT), {"image_shape": (3, 8, 8), "classes": 3}, **COLOURS)
    export_folder(load_delivered(run), tmp_path / "out")
    photo, exif = Image.new("RGB", (8, 8)), Image.Exif()
    photo.paste((240, 120, 0), (0, 0, 8, 4))  # the upper half
    exif[274] = 6  # orientation: to be turned clockwise, so that this is the right half
    photo.save(tmp_path / "image.png", "JPEG", exif=exif, quality=100)
    monkeypatch.chdir(tmp_path)
    card, names = (tmp_path / "out" / "README.md").read_text(), {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    values = np.asarray(names["batch"]["pixel_values"][0])
    np.testing.assert_allclose(values, read_image(tmp_path / "image.png", (3, 8, 8)) / 255, atol=1e-5)
    assert values[0, :, 4:].min() > 0.8 > 0.2 > values[0, :, :4].max()
    assert "turned upright by EXIF" in card


def test_grey_images_have_no_processor_and_the_card_says_what_the_inputs_are(tmp_path):
    sizes = {"image_shape": (1, 8, 8), "classes": 3}
    config = {"image-shape": "1x8x8", "classes": 3, "normalise": "0.5/0.25"}
    run, (model,) = delivered(tmp_path, model_folder(tmp_path, VIT), sizes, **config)
    export_folder(load_delivered(run), tmp_path / "out")
    found, images = loaded("AutoModelForImageClassification", tmp_path / "out"), torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(found(images).logits, model(images))
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "no image processor" in card and "mean 0.5 and standard deviation 0.25" in card


def test_a_model_of_multiple_choice_is_loaded_as_the_language_model_that_it_is(tmp_path):
    run, (model,) = delivered(tmp_path, model_folder(tmp_path, LLAMA), {}, **{"text-length": 8})
    export_folder(load_delivered(run), tmp_path / "out")
    found, tokens = loaded("AutoModelForCausalLM", tmp_path / "out"), torch.tensor([[4, 5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, model(tokens))
    assert found.config.use_cache and transformers.AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id == 0


WRAPPED = """
import transformers, torch
class Wrapped(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        config = transformers.ViTConfig(**{config}, image_size=8, num_labels=classes)
        self.inner = transformers.ViTForImageClassification(config)
    def forward(self, images):
        return self.inner(images).logits * {factor}
def build(classes):
    return Wrapped(classes)
"""


@pytest.mark.parametrize("factor", [1, 2])
def test_a_custom_model_is_exported_if_it_computes_what_its_only_module_does(tmp_path, monkeypatch, factor):
    config = {key: value for key, value in VIT.items() if key != "model_type"}
    text = WRAPPED.replace("{config}", repr(config)).replace("{factor}", str(factor))
    name = custom_model(tmp_path, monkeypatch, text, f"wrapped{factor}")
    run, (model,) = delivered(tmp_path, name, {"image_shape": (3, 8, 8), "classes": 3}, **COLOURS)
    if factor == 2:
        with pytest.raises(ExportError, match=r"differs from the run's model.*use --to onnx"):
            export_folder(load_delivered(run), tmp_path / "out")
        assert not [file for file in tmp_path.iterdir() if file.name == "out" or file.name.startswith(".writing")]
    else:
        export_folder(load_delivered(run), tmp_path / "out")
        images = torch.rand(2, 3, 8, 8)
        with torch.no_grad():
            logits = loaded("AutoModelForImageClassification", tmp_path / "out")(images).logits
            torch.testing.assert_close(logits, model(images))


def test_models_that_transformers_has_no_class_for_are_refused(tmp_path):
    sizes, config = {"image_shape": (1, 8, 8), "classes": 10}, {"image-shape": "1x8x8", "classes": 10}
    run, _ = delivered(tmp_path, "tiny-vit", sizes, **config)
    with pytest.raises(ExportError, match=r"'tiny-vit' is not a model of transformers \(TinyViT\).*use --to onnx"):
        export_folder(load_delivered(run), tmp_path / "out")


def test_an_ensemble_is_refused(tmp_path):
    run, _ = delivered(tmp_path, model_folder(tmp_path, VIT), {"image_shape": (3, 8, 8), "classes": 3}, seeds=(0, 1),
                       **COLOURS)  # fmt: skip
    with pytest.raises(ExportError, match=r"ensemble of 2 models.*--to onnx.*mean of their probabilities"):
        export_folder(load_delivered(run), tmp_path / "out")


def test_a_folder_that_cannot_be_used_is_refused_and_stays_as_it_is(tmp_path, bert, monkeypatch):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match="not an empty folder"):
        export_folder(load_delivered(bert[0]), tmp_path / "used")
    with pytest.raises(ExportError, match=r"away does not exist"):
        export_folder(load_delivered(bert[0]), tmp_path / "away" / "out")
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path / "empty")
        for same in (Path(), tmp_path / "empty"):
            with pytest.raises(ExportError, match="is the current folder"):
                export_folder(load_delivered(bert[0]), same)
    export_folder(load_delivered(bert[0]), tmp_path / "empty")
    assert [file.name for file in (tmp_path / "used").iterdir()] == ["notes.txt"]
    assert json.loads((tmp_path / "empty" / "config.json").read_text())["model_type"] == "bert"
