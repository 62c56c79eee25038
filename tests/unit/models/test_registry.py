"""Models by name, and the models themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tepal.models import IMAGES, MODELS, SEQUENCES, ModelError, build, find, names
from tepal.models.blocks import find_blocks
from tepal.models.linear_attention import LinearAttention
from tepal.models.tiny_vit import TinyViT, default_patch

IMAGE_MODELS = [name for name in names() if MODELS[name].kind == IMAGES]


def test_importing_the_registry_imports_no_torch():
    root = Path(__file__).parents[3]
    code = "import sys, tepal.models; tepal.models.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": str(root)}).returncode == 0


def test_building_a_model_and_its_blocks_imports_no_transformers():
    root = Path(__file__).parents[3]
    code = (
        "import sys; from tepal.models import build; from tepal.models.blocks import find_blocks\n"
        "find_blocks(build('tiny-vit', image_shape=(1, 8, 8), classes=2, seed=1))\n"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'timm', 'torchvision')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": str(root)}).returncode == 0


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 16, 12)])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models_give_one_logit_a_class_at_every_size(name, shape):
    model = build(name, image_shape=shape, classes=7, seed=0)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    blocks = find_blocks(model)
    assert blocks.head == ("head.weight", "head.bias") and len(blocks.layers) >= 2


@pytest.mark.parametrize("name", names())
def test_the_seed_alone_decides_the_weights_and_the_global_state_is_untouched(name):
    shape = {"image_shape": (1, 8, 8), "classes": 3} if MODELS[name].kind == IMAGES else {}
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(name, seed=5, **shape).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second, other = build(name, seed=5, **shape).state_dict(), build(name, seed=6, **shape).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_an_unknown_model_is_refused_with_the_nearest_and_all_known():
    with pytest.raises(ModelError, match=r"'tiny-vti': did you mean 'tiny-vit'\? known are cnn, linear-att.*tiny-vit"):
        build("tiny-vti", image_shape=(1, 8, 8), classes=2, seed=0)
    with pytest.raises(ModelError, match="unknown model 'zzz': known are"):
        find("zzz")


def test_a_model_and_data_of_different_kinds_are_refused():
    assert find("linear-attention").kind == SEQUENCES
    with pytest.raises(ModelError, match="sequence-regression: it takes no images"):
        build("linear-attention", image_shape=(1, 8, 8), classes=2, seed=0)
    with pytest.raises(ModelError, match="cnn classifies images: it needs image_shape"):
        build("cnn", seed=0)


def test_the_cnn_on_mnist_has_the_papers_number_of_parameters():
    cnn = build("cnn", image_shape=(1, 28, 28), classes=10, seed=0)
    assert sum(parameter.numel() for parameter in cnn.parameters()) == 1_663_370
    blocks = find_blocks(cnn)
    assert blocks.query_key == ()
    assert [{name.rsplit(".", 1)[0] for name in layer} for layer in blocks.layers] == [
        {"stages.0.0"}, {"stages.1.0"}, {"stages.2.1"}
    ]  # fmt: skip


def test_linear_attention_is_the_papers_formula_token_by_token():
    model = LinearAttention(width=5, key_size=3, value_size=2).double()
    h = torch.randn(2, 4, 5, dtype=torch.float64)
    expected = torch.zeros(2, 4, 2, dtype=torch.float64)
    for b in range(2):
        for i in range(4):
            for j in range(4):
                q = torch.sigmoid(h[b, i] @ model.query) / 3**0.5
                k = torch.sigmoid(h[b, j] @ model.key) / 3**0.5
                expected[b, i] += (q @ k) * (h[b, j] @ model.value)
    torch.testing.assert_close(model(h), expected)


def test_linear_attention_is_one_layer_of_three_matrices():
    blocks = find_blocks(build("linear-attention", seed=0))
    assert blocks.query_key == ("query", "key") and blocks.value == blocks.value_projection == ("value",)
    assert blocks.layers == (("query", "key", "value"),)
    assert [entry.shape for entry in blocks.layout.entries] == [(64, 32)] * 3


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (16, 4), (28, 4), (32, 4), (10, 2), (7, 1)])
def test_patches_are_the_largest_that_still_give_sixteen(side, patch):
    assert default_patch(side, side) == patch


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="does not divide into patches of 3"):
        TinyViT((1, 8, 8), patch=3)
    with pytest.raises(ValueError, match="width=10 does not divide into 4 heads"):
        TinyViT((1, 8, 8), width=10)


def test_tiny_vit_learns():
    torch.manual_seed(0)
    images, labels = torch.randn(32, 1, 8, 8), torch.arange(32) % 4
    images[torch.arange(32), 0, labels] += 2  # class c is a bright row c
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=4, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3  # from ln 4 = 1.39
