"""The models of torchvision and transformers by name, and a directory's model: real sizes, logits, refusals."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import BART, GPT2, LLAMA, SMALL_TEXT, T5, VIT

from tepal import models
from tepal.models import CHOICES, IMAGES, MODELS, TEXTS, ModelError, build, find
from tepal.models.blocks import find_blocks
from tests.packages import ROOT

# Trainable parameters as published, and transformer blocks (or stages): torchvision's pages of its weights, and the
# model cards; with 1000 classes of images or 2 of texts. CLIP's is that of its image tower and a matrix with bias.
PUBLISHED = {
    "vit-b-32": (88_224_232, 12), "vit-b-16": (86_567_656, 12), "resnet-18": (11_689_512, 4),
    "resnet-50": (25_557_032, 4), "mobilenet-v2": (3_504_872, 19), "shufflenet-v2": (2_278_604, 3),
    "vit-small-16": (22_050_664, 12), "google/vit-base-patch16-224": (86_567_656, 12),
    "facebook/deit-small-patch16-224": (22_050_664, 12), "microsoft/swin-tiny-patch4-window7-224": (28_288_354, 12),
    "openai/clip-vit-base-patch32": (87_456_000 + 769_000, 12), "bert-base-uncased": (109_483_778, 12),
    "google/electra-small-discriminator": (13_549_314, 12), "roberta-base": (124_647_170, 12),
    "xlm-roberta-base": (278_045_186, 12), "distilbert-base-uncased": (66_955_010, 6),
    "t5-small": (60_506_624 + 513 * (512 + 2), 12), "facebook/bart-base": (139_420_416 + 769 * (768 + 2), 12),
    "Qwen/Qwen2.5-0.5B": (494_032_768, 24), "meta-llama/Llama-3.2-1B": (1_235_814_400, 16),
}  # fmt: skip


def on_meta(name: str) -> torch.nn.Module:
    model = find(name)
    pytest.importorskip(model.package)
    known = {"image_shape": (3, 224, 224), "classes": 2 if model.kind == TEXTS else 1000}
    with torch.device("meta"):
        return build(name, seed=0, **{key: known[key] for key in models.NEEDS[model.kind]})


def test_all_models_of_libraries_are_listed_here():
    assert set(PUBLISHED) == {name for name in models.names() if MODELS[name].package != "tepal"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_by_name_has_its_published_size_and_all_its_blocks(name):
    parameters, layers = PUBLISHED[name]
    model = on_meta(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    blocks = find_blocks(model)
    assert len(blocks.layers) == layers
    assert bool(blocks.query_key) == bool(blocks.attentions) == ("net" not in name)
    assert bool(blocks.head) == (MODELS[name].kind != CHOICES)  # there it is tied to the embedding


def test_swin_has_its_blocks_in_stages_of_its_depths():
    layers = find_blocks(on_meta("microsoft/swin-tiny-patch4-window7-224")).layers
    stages = [next(name for name in layer).split(".")[3] for layer in layers]
    assert [stages.count(str(stage)) for stage in range(4)] == [2, 2, 6, 2]


def test_the_rope_of_a_language_model_is_that_of_its_configuration():
    pytest.importorskip("transformers")
    rope = on_meta("meta-llama/Llama-3.2-1B").config.to_dict()
    told = {**rope, **(rope.get("rope_scaling") or {}), **(rope.get("rope_parameters") or {})}
    assert (told["rope_theta"], told["factor"], told["rope_type"]) == (500_000.0, 32.0, "llama3")


SMALL_IMAGES = ["resnet-18", "mobilenet-v2", "shufflenet-v2", "vit-small-16", "facebook/deit-small-patch16-224"]


@pytest.mark.parametrize("name", SMALL_IMAGES)
def test_image_models_of_libraries_take_cifars_size_and_give_one_logit_a_class(name):
    pytest.importorskip(find(name).package)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model = build(name, image_shape=(3, 32, 32), classes=7, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    again = build(name, image_shape=(3, 32, 32), classes=7, seed=3).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())
    assert model.training
    logits = model(torch.randn(2, 3, 32, 32))
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 7)


# A config.json each, as save_pretrained leaves it.
DIRECTORIES = {
    "vit": (IMAGES, {"architectures": ["ViTForImageClassification"], "num_hidden_layers": 2, **VIT}),
    "clip": (IMAGES, {"architectures": ["CLIPModel"], "vision_config": {**VIT, "num_hidden_layers": 2}}),
    "swin": (IMAGES, {"embed_dim": 12, "depths": [1, 2], "num_heads": [3, 3], "window_size": 2, "patch_size": 2,
                      "image_size": 8}),
    "bert": (TEXTS, {"architectures": ["BertForMaskedLM"], "num_hidden_layers": 2, **SMALL_TEXT}),
    "roberta": (TEXTS, {"architectures": None, "num_hidden_layers": 2, "dtype": "bfloat16", **SMALL_TEXT}),
    "electra": (TEXTS, {"num_hidden_layers": 2, "embedding_size": 4, **SMALL_TEXT}),
    "distilbert": (TEXTS, {"vocab_size": 19, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 16,
                           "max_position_embeddings": 16}),
    "t5": (TEXTS, {"architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0, **T5}),
    "bart": (TEXTS, {**BART, "num_labels": 9}),
    "gpt2": (CHOICES, {"architectures": ["GPT2LMHeadModel"], **GPT2}),
    "qwen2": (CHOICES, {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", **LLAMA}),
    "llama": (CHOICES, {**LLAMA}),
}  # fmt: skip


def directory(folder: Path, model_type: str, **config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return str(folder)


@pytest.mark.parametrize("family", DIRECTORIES)
def test_a_directory_with_a_configuration_is_a_model(family, tmp_path):
    pytest.importorskip("transformers")
    kind, config = DIRECTORIES[family]
    name = directory(tmp_path, family, **config)
    assert find(name).kind == kind
    if kind == IMAGES:
        model = build(name, image_shape=(1, 8, 8), classes=5, seed=0)
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 5)
    else:
        model = build(name, seed=0, **({"classes": 5} if kind == TEXTS else {}))
        tokens = torch.tensor([[3, 4, 5, 2, 1], [3, 6, 7, 2, 1]])  # T5 ends at 1, BART at 2
        assert model(tokens).shape == ((2, 5) if kind == TEXTS else (2, 5, 19))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(find_blocks(model).layers) == {"swin": 3, "t5": 5, "bart": 5}.get(family, 2)


@pytest.mark.parametrize("family", ["bert", "electra", "distilbert"])
def test_padding_changes_nothing_about_a_text(family, tmp_path):
    pytest.importorskip("transformers")
    model = build(directory(tmp_path, family, **DIRECTORIES[family][1]), classes=3, seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as they are drawn, attention hardly matters
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    text = torch.tensor([[3, 4, 5]])
    padded = torch.tensor([[3, 4, 5, 0, 0]])
    torch.testing.assert_close(model(padded), model(text))
    torch.testing.assert_close(model(input_ids=padded), model(text))
    seen = model(padded, attention_mask=torch.ones_like(padded))  # a mask that is given is the one that counts
    assert (seen - model(text)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("family", "architecture"), [("gpt2", "GPT2ForSequenceClassification"), ("llama", "LlamaForSequenceClassification")]
)
def test_a_text_classifier_that_does_not_name_its_padding_is_refused(family, architecture, tmp_path):
    pytest.importorskip("transformers")
    config = {**DIRECTORIES[family][1], "architectures": [architecture]}
    name = directory(tmp_path, family, **{**config, "pad_token_id": None})
    with pytest.raises(ModelError, match=r"config\.json has no pad_token_id, .* of the tokenizer's padding token"):
        build(name, classes=3, seed=0)
    model = build(directory(tmp_path, family, **{**config, "pad_token_id": 0}), classes=3, seed=0).eval()
    text, padded = torch.tensor([[3, 4, 5]]), torch.tensor([[3, 4, 5, 0, 0]])
    torch.testing.assert_close(model(padded), model(text))


def test_images_that_a_model_cannot_take_are_refused():
    for name, shape, said in [
        ("vit-b-32", (3, 40, 40), "patches of 32 x 32 pixels, and these have 40 x 40: choose an image-shape.* 3x32x32"),
        ("vit-b-16", (3, 32, 48), "takes square images"),
        ("resnet-18", (1, 28, 28), "3 channels, and these have 1"),
        ("microsoft/swin-tiny-patch4-window7-224", (3, 32, 32), "at least 224 x 224 pixels.* these have 32 x 32"),
        ("openai/clip-vit-base-patch32", (3, 100, 100), "these have 100 x 100.* 3x96x96"),
    ]:
        if find(name).package == "transformers":
            pytest.importorskip("transformers")
        with pytest.raises(ModelError, match=said):
            build(name, image_shape=shape, classes=2, seed=0)


def test_directories_that_say_nothing_of_use_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"model_type='whisper' do not determine the kind of model"):
        find(directory(tmp_path, "whisper", architectures=["WhisperModel"]))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="has no model_type"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        find(str(tmp_path))
    with pytest.raises(ModelError, match="unknown model"):
        find(str(tmp_path / "nothing"))
    if importlib.util.find_spec("transformers"):
        with pytest.raises(ModelError, match=r"transformers .* cannot build it"):
            build(directory(tmp_path, "nonsense", architectures=["XForImageClassification"]),
                  image_shape=(3, 8, 8), classes=2, seed=0)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hidden", "said"),
    [
        ("resnet-18", "torchvision", r"tepal\[vision\]|does not load with"),
        ("t5-small", "transformers", r"tepal\[text\]"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(name, hidden, said):
    options = "image_shape=(3, 32, 32), classes=2" if find(name).kind == IMAGES else "classes=2"
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\nfrom tepal import models\n"
        f"try: models.build({name!r}, {options}, seed=0)\n"
        "except models.ModelError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert re.search(said, done.stdout.decode()), done


@pytest.mark.parametrize("before", ["", "import transformers; transformers.utils.is_torchvision_available(); "])
def test_a_torchvision_whose_operators_do_not_load_does_not_stop_transformers(before, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    name = directory(tmp_path / "vit", "vit", **DIRECTORIES["vit"][1])
    code = f"{before}from tepal import models; print(models.build({name!r}, image_shape=(3, 8, 8), classes=2, seed=0))"
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=path, capture_output=True)
    assert b"ViTForImageClassification" in done.stdout, done.stderr


def test_the_page_of_models_is_that_of_the_code():
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    page = runpy.run_path(str(ROOT / "docs/model_table.py"))["page"]
    assert (ROOT / "docs/models.md").read_text() == page(), "write it anew: python docs/model_table.py > docs/models.md"
