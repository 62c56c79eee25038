"""Weights to start from: every format, heads for other classes, tied weights, older names, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import BART, CLIP_TEXT, LLAMA, SMALL_TEXT, T5, VIT
from safetensors.torch import save_file
from torch import nn

from tepal.models import ModelError, build
from tepal.models.blocks import find_blocks
from tepal.models.pretrained import Loaded, load_pretrained, read_weights

SHAPE = (1, 8, 8)


def tiny(seed: int, classes: int = 4, shape: tuple[int, int, int] = SHAPE) -> nn.Module:
    return build("tiny-vit", image_shape=shape, classes=classes, seed=seed)


def load(model: nn.Module, source: Path | str) -> Loaded:
    return load_pretrained(model, find_blocks(model), str(source))


def same(model: nn.Module, other: nn.Module, but: tuple[str, ...] = ()) -> bool:
    state, there = model.state_dict(), other.state_dict()
    return all(torch.equal(state[name], there[name]) != (name in but) for name in state)


def safetensors_file(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "any-name.safetensors")
    return folder / "any-name.safetensors"


def saved_by_torch(name: str) -> Callable[[dict[str, torch.Tensor], Path], Path]:
    def write(state: dict[str, torch.Tensor], folder: Path) -> Path:
        torch.save(state, folder / name)
        return folder / name

    return write


def directory(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")  # older, and not what is read
    return folder


def directory_of_pickle(state: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def sharded(state: dict[str, torch.Tensor], folder: Path) -> Path:
    names = list(state)
    where = {name: f"model-0000{1 + n % 3}-of-00003.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: state[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


FORMATS = {
    ".safetensors": safetensors_file, ".pt": saved_by_torch("w.pt"), ".pth": saved_by_torch("w.pth"),
    "directory": directory, "directory with a pickle": directory_of_pickle, "shards": sharded,
}  # fmt: skip


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_a_state_dict_is_loaded_from_every_format(write, tmp_path):
    there, model = tiny(1), tiny(2)
    before = torch.get_rng_state()
    loaded = load(model, write(there.state_dict(), tmp_path))
    assert same(model, there) and torch.equal(torch.get_rng_state(), before)
    assert loaded.entries == len(model.state_dict()) and loaded.fresh == loaded.unused == ()
    assert str(loaded) == f"{loaded.entries} tensors loaded from {loaded.file}."


@pytest.mark.parametrize("write", [safetensors_file, saved_by_torch("w.pt")])
def test_a_head_for_other_classes_stays_as_the_seed_drew_it_and_is_named(write, tmp_path):
    there, model = tiny(1, classes=9), tiny(2)
    loaded = load(model, write(there.state_dict(), tmp_path))
    assert loaded.fresh == ("head.weight", "head.bias")
    assert torch.equal(model.head.weight, tiny(2).head.weight) and torch.equal(model.norm.weight, there.norm.weight)
    assert torch.equal(model.blocks[1].attention.key.weight, there.blocks[1].attention.key.weight)
    assert "initialised by seed, as the file has none of this shape: head.weight, head.bias" in str(loaded)


def test_a_checkpoint_without_a_head_leaves_it_to_the_seed(tmp_path):
    state = {name: value for name, value in tiny(1).state_dict().items() if not name.startswith("head")}
    model = tiny(2)
    assert load(model, safetensors_file(state, tmp_path)).fresh == ("head.weight", "head.bias")
    assert torch.equal(model.cls_token, state["cls_token"])


def test_weights_of_another_dtype_are_loaded_in_the_models_own(tmp_path):
    there, model = tiny(1), tiny(2)
    load(model, safetensors_file({name: v.bfloat16() for name, v in there.state_dict().items()}, tmp_path))
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, there.head.weight.bfloat16().float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
def test_of_tied_weights_one_name_is_enough(kept, tmp_path):
    there, model = Tied(), Tied()
    state = {name: v for name, v in there.state_dict().items() if name.startswith("body") or name == kept}
    assert load(model, safetensors_file(state, tmp_path)).fresh == ()
    assert same(model, there) and model.head.weight is model.embedding.weight


def test_older_batch_norms_without_a_counter_are_loaded(tmp_path):
    def resnet(seed: int) -> nn.Module:
        return build("resnet-20", image_shape=(3, 8, 8), classes=2, seed=seed)

    there = resnet(1)
    there(torch.randn(4, 3, 8, 8))
    state = {name: v for name, v in there.state_dict().items() if "num_batches_tracked" not in name}
    model = resnet(2)
    load(model, safetensors_file(state, tmp_path))
    assert same(model, there, but=tuple(name for name in there.state_dict() if "num_batches_tracked" in name))


@pytest.mark.parametrize(
    ("name", "head"), [("mobilenet-v2", "classifier.1"), ("shufflenet-v2", "fc"), ("vit-small-16", "heads.head")]
)
def test_torchvisions_weights_of_imagenet_are_loaded_but_for_the_head(name, head, tmp_path):
    pytest.importorskip("torchvision")
    there = build(name, image_shape=(3, 32, 32), classes=1000, seed=1)
    torch.save(there.state_dict(), tmp_path / "weights.pth")
    model = build(name, image_shape=(3, 32, 32), classes=5, seed=2)
    loaded = load(model, tmp_path / "weights.pth")
    assert loaded.fresh == (f"{head}.weight", f"{head}.bias")
    state = there.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items() if key not in loaded.fresh)


# --- transformers --------------------------------------------------------------------------------------------------


def made(name: str, config: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    return getattr(transformers, name)(getattr(transformers, config)(**options))


BERT = {"num_hidden_layers": 2, **SMALL_TEXT}
CLIP = {"projection_dim": 6, "text_config": CLIP_TEXT, "vision_config": {**VIT, "num_hidden_layers": 2}}
TIED = {**LLAMA, "tie_word_embeddings": True}
DISTIL = {"vocab_size": 19, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 16, "max_position_embeddings": 16}
CLASSIFIER = ("classifier.weight", "classifier.bias")
DENSE = ("classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias")
HEAD = tuple(name.replace("classifier", "classification_head") for name in DENSE)

# What a checkpoint was saved from, its configuration; what the model does, and its head that the file has not.
SAVED = {
    "ViT": ("ViTForImageClassification", "ViTConfig", {"num_hidden_layers": 2, "num_labels": 4, **VIT}, "images", ()),
    "ViT without head": ("ViTModel", "ViTConfig", {"num_hidden_layers": 2, **VIT}, "images", CLASSIFIER),
    "CLIP, both towers": ("CLIPModel", "CLIPConfig", CLIP, "images", CLASSIFIER),
    "BERT": ("BertForSequenceClassification", "BertConfig", {"num_labels": 4, **BERT}, "texts", ()),
    "BERT without head": ("BertModel", "BertConfig", BERT, "texts", CLASSIFIER),
    "BERT for other classes": ("BertForSequenceClassification", "BertConfig", {"num_labels": 7, **BERT}, "texts",
                               CLASSIFIER),
    "BERT for masked words": ("BertForPreTraining", "BertConfig", BERT, "texts", CLASSIFIER),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", BERT, "texts", DENSE),
    "ELECTRA": ("ElectraForPreTraining", "ElectraConfig", {"embedding_size": 4, **BERT}, "texts", DENSE),
    "DistilBERT": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, "texts",
                   ("pre_classifier.weight", "pre_classifier.bias", *CLASSIFIER)),
    "T5": ("T5ForConditionalGeneration", "T5Config", {"decoder_start_token_id": 0, **T5}, "texts", HEAD),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART, "texts", HEAD),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA, "choices", ()),
    "Qwen2 with a tied head": ("Qwen2ForCausalLM", "Qwen2Config", TIED, "choices", ()),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "images": {"image_shape": (3, 8, 8), "classes": 4}, "texts": {"classes": 4}, "choices": {},
}  # fmt: skip


@pytest.mark.parametrize("family", SAVED)
def test_what_save_pretrained_writes_is_model_and_weights(family, tmp_path, caplog):
    name, config, settings, kind, head = SAVED[family]
    there = made(name, config, **settings)
    there.save_pretrained(tmp_path)
    model = build(str(tmp_path), seed=2, **OPTIONS[kind])
    drawn = {key: value.clone() for key, value in model.state_dict().items()}
    caplog.clear()
    caplog.set_level(logging.INFO)
    before = torch.get_rng_state()
    loaded = load(model, tmp_path)
    assert set(loaded.fresh) == set(head) and not caplog.records
    assert torch.equal(torch.get_rng_state(), before)
    # The entries of both, whatever prefix they have: all the checkpoint's values are there, and the rest is as drawn.
    values = {key.split(".", 1)[-1] if key.startswith(("bert.", "vit.")) else key: v
              for key, v in there.state_dict().items()}  # fmt: skip
    found = 0
    for key, value in model.state_dict().items():
        if key in head:
            assert torch.equal(value, drawn[key]), key
            continue
        names = (key, key.split(".", 1)[-1])
        kept = next((values[one] for one in names if one in values), None)
        assert kept is not None and torch.equal(value, kept), key
        found += 1
    assert found == loaded.entries


def test_a_tied_head_stays_tied(tmp_path):
    there = made("Qwen2ForCausalLM", "Qwen2Config", **TIED)
    there.save_pretrained(tmp_path)
    model = build(str(tmp_path), seed=2)
    load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, there.lm_head.weight)


def test_the_names_of_older_releases_are_known(tmp_path):
    """bert-base-uncased on the hub still calls a norm's weight gamma and its bias beta."""
    there = made("BertModel", "BertConfig", **BERT)
    there.save_pretrained(tmp_path)
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in there.state_dict().items()
    }
    nn.init.uniform_(old["bert.encoder.layer.1.output.LayerNorm.gamma"])
    save_file(old, tmp_path / "old.safetensors")
    model = build(str(tmp_path), classes=2, seed=2)
    load(model, tmp_path / "old.safetensors")
    norm = model.bert.encoder.layer[1].output.LayerNorm.weight
    assert torch.equal(norm, old["bert.encoder.layer.1.output.LayerNorm.gamma"])


def test_a_models_own_state_dict_is_loaded_as_a_run_saves_it(tmp_path):
    there = made("ViTForImageClassification", "ViTConfig", num_hidden_layers=2, num_labels=4, **VIT)
    there.config.save_pretrained(tmp_path)
    model = build(str(tmp_path), image_shape=(3, 8, 8), classes=4, seed=2)
    load(model, safetensors_file(there.state_dict(), tmp_path))
    assert same(model, there)


@pytest.mark.parametrize("name", ["ViTModel", "ViTForImageClassification"])
@pytest.mark.parametrize(("layers", "said"), [(3, "the model has no "), (1, "the file has no ")])
def test_a_model_of_another_depth_is_refused(name, layers, said, tmp_path):
    there = made(name, "ViTConfig", num_hidden_layers=2, **VIT)
    there.config.save_pretrained(tmp_path)
    made(name, "ViTConfig", num_hidden_layers=layers, **VIT).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=rf"other.model\.safetensors does not fit ViT.*{said}.* and \d+ more"):
        load(build(str(tmp_path), image_shape=(3, 8, 8), classes=4, seed=2), tmp_path / "other")


def test_positions_of_images_of_another_size_are_refused(tmp_path):
    made("ViTModel", "ViTConfig", num_hidden_layers=2, **VIT).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"position_embeddings has shape \(1, 5, 12\).* \(1, 17, 12\).*image-shape"):
        load(build(str(tmp_path), image_shape=(3, 16, 16), classes=4, seed=2), tmp_path)
    with pytest.raises(ModelError, match=r"position_embedding has shape .*set image-shape"):
        load(tiny(1, shape=(1, 12, 12)), safetensors_file(tiny(1).state_dict(), tmp_path))
    torchvision = pytest.importorskip("torchvision")
    small, large = (torchvision.models.VisionTransformer(size, 4, 1, 1, 8, 8, num_classes=2) for size in (8, 16))
    with pytest.raises(ModelError, match=r"encoder\.pos_embedding has shape .*set image-shape"):
        load(small, safetensors_file(large.state_dict(), tmp_path))


# --- refusals ------------------------------------------------------------------------------------------------------


def changed(state: dict[str, torch.Tensor], **changes: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in {**state, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm.weight": None}, "the file has no norm.weight\\."),
        ({"norm.weight": None, "norm.scale": torch.ones(64)}, r"no norm\.weight; the model has no norm\.scale\."),
        ({"norm.weight": torch.ones(3)}, r"shapes differ in norm\.weight \(\(3,\) in the file, \(64,\) in the model\)"),
        ({"head.extra": torch.ones(3)}, "the model has no head.extra"),
    ],
)  # fmt: skip
def test_whatever_else_does_not_fit_is_refused_and_nothing_is_loaded(changes, said, tmp_path):
    model = tiny(2)
    file = safetensors_file(changed(tiny(1).state_dict(), **changes), tmp_path)
    with pytest.raises(ModelError, match=rf"any-name\.safetensors does not fit TinyViT: .*{said}"):
        load(model, file)
    assert same(model, tiny(2))


def test_weights_that_diverged_are_refused(tmp_path):
    state = tiny(1).state_dict()
    state["norm.bias"][3] = float("nan")
    with pytest.raises(ModelError, match=r"norm\.bias have NaN or infinite values"):
        load(tiny(2), safetensors_file(state, tmp_path))


def test_files_that_hold_no_weights_are_refused(tmp_path):
    for name, content, said in [
        ("objects.pt", tiny(1), "contains Python objects in addition to tensors.* can run code.* torch.save"),
        ("nested.pt", {"model": tiny(1).state_dict(), "epoch": 3}, "contains model, epoch, expected a state_dict"),
        ("list.pth", [torch.ones(2)], "contains list, expected a state_dict"),
    ]:
        torch.save(content, tmp_path / name)
        with pytest.raises(ModelError, match=said):
            load(tiny(1), tmp_path / name)
    for name, said in [("a.safetensors", "not a readable safetensors"), ("a.pt", "damaged|not a readable"),
                       ("a.txt", "not a file of weights: give a directory")]:  # fmt: skip
        (tmp_path / name).write_text("nothing of the kind")
        with pytest.raises(ModelError, match=said):
            load(tiny(1), tmp_path / name)
    with pytest.raises(ModelError, match=r"none\.pt: no such file or directory: give a directory with"):
        load(tiny(1), tmp_path / "none.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: contains none of model\.safetensors, .*pytorch_model\.bin"):
        load(tiny(1), tmp_path / "empty")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_file_of_torch_is_refused_whatever_torch_raises(tmp_path):
    file, rng = tmp_path / "a.pt", np.random.default_rng(0)
    torch.save({"head.weight": torch.ones(2, 3)}, file, _use_new_zipfile_serialization=False)
    whole = file.read_bytes()
    contents = [b"", b"hello world\n", *(rng.bytes(size) for size in (1, 10, 100, 1000) for _ in range(20))]
    for place in range(len(whole) - 24):  # other than the values, at the end
        contents.append(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
    refused = 0
    for content in contents:
        file.write_bytes(content)
        try:
            read_weights(file)
        except ModelError as error:
            assert str(error).startswith(f"{file}: ")
            refused += 1
        except MemoryError:  # the length of an entry is damaged
            refused += 1
    assert refused > len(contents) / 2


def test_an_index_whose_shards_are_not_there_is_refused(tmp_path):
    sharded(tiny(1).state_dict(), tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"model-00002-of-00003\.safetensors: missing, although model\.safetensors\.index"
    ):
        load(tiny(1), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not an index of safetensors files"):
        load(tiny(1), tmp_path)


# --- the hub -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [directory, sharded, directory_of_pickle])
def test_a_name_on_the_hub_is_downloaded_file_by_file(write, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    there, asked = tiny(1), []
    (tmp_path / "hub").mkdir()
    (tmp_path / "cache").mkdir(exist_ok=True)
    write(there.state_dict(), tmp_path / "hub")

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        if not (tmp_path / "hub" / file).exists():
            raise hub.errors.LocalEntryNotFoundError(file)
        return shutil.copy(tmp_path / "hub" / file, tmp_path / "cache" / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    model = tiny(2)
    load(model, "someone/tiny-vit")
    assert same(model, there) and {name for name, _ in asked} == {"someone/tiny-vit"}
    assert (("someone/tiny-vit", "pytorch_model.bin") in asked) == (write is directory_of_pickle)


def test_without_a_network_a_name_is_refused_with_what_to_do():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(
        ModelError, match=r"is not a local file, and cannot be downloaded.* `hf download no/model --local-dir DIR`"
    ):
        load(tiny(1), "no/model")
