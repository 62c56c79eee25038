"""Run directories with new models, and models of transformers in sizes that tests can have."""

import json

import torch

from tepal import models
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory
from tests.unit.training.data.word_tokenizer import WORDS, written

_SIZES = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "num_hidden_layers": 2}
BERT = {"model_type": "bert", "vocab_size": len(WORDS), "pad_token_id": 0, "max_position_embeddings": 16, **_SIZES}
VIT = {"model_type": "vit", "patch_size": 4, **_SIZES}
LLAMA = {"model_type": "llama", "vocab_size": len(WORDS), "pad_token_id": 0, "num_key_value_heads": 1, **_SIZES}
LLAMA |= {"hidden_size": 24, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}


def model_folder(tmp_path, config):
    """The folder of a model of transformers with a tokenizer of whole words."""
    folder = tmp_path / config["model_type"]
    written(folder, pad_token="[PAD]")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def delivered(tmp_path, model, sizes, *, seeds=(0,), scores=(), metadata=None, **config):
    """A run directory whose model, or ensemble, is new; and these models, in evaluation mode.

    Matrices are large, so that a part of the model that is lost or exchanged shows in its outputs.
    """
    built = [models.build(model, **sizes, seed=seed).eval() for seed in seeds]
    with torch.no_grad():
        for one in built:
            for parameter in one.parameters():
                parameter.mul_(8 if parameter.dim() > 1 else 1)
    strategy = config.pop("strategy", "fedavg")
    run = RunDirectory.create(tmp_path / "runs", strategy, {"strategy": strategy, "model": model, **config})
    for score in scores:
        run.append(RoundRecord(**score))
    prefix = (lambda k: f"mode/{k}/") if len(seeds) > 1 else (lambda k: "")
    run.write_model(
        {f"{prefix(k)}{name}": each.numpy() for k, one in enumerate(built) for name, each in one.state_dict().items()},
        metadata,
    )
    return run.path, built


def custom_model(tmp_path, monkeypatch, text, name):
    """Write a module with a custom model, and return the value of `model` for it."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:build"
