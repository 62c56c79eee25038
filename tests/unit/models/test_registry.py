"""Models by name, and the models themselves."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from tepal.models import IMAGES, MODELS, NEEDS, SEQUENCES, ModelError, build, find, names
from tepal.models.blocks import find_blocks
from tepal.models.linear_attention import LinearAttention
from tepal.models.tiny_vit import TinyViT, default_patch
from tests.packages import ROOT

OWN = [name for name in names() if MODELS[name].package == "tepal"]
IMAGE_MODELS = [name for name in OWN if MODELS[name].kind == IMAGES]


def test_importing_the_registry_imports_no_torch():
    code = "import sys, tepal.models; tepal.models.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}).returncode == 0


def test_building_a_model_and_its_blocks_imports_no_transformers():
    code = (
        "import sys; from tepal.models import build; from tepal.models.blocks import find_blocks\n"
        "find_blocks(build('tiny-vit', image_shape=(1, 8, 8), classes=2, seed=1))\n"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'timm', 'torchvision')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}).returncode == 0


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 16, 12)])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models_give_one_logit_a_class_at_every_size(name, shape):
    model = build(name, image_shape=shape, classes=7, seed=0)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    blocks = find_blocks(model)
    assert blocks.head == ("head.weight", "head.bias") and len(blocks.layers) >= 2


@pytest.mark.parametrize("name", OWN)
def test_the_seed_alone_decides_the_weights_and_the_global_state_is_untouched(name):
    known = {"image_shape": (1, 8, 8), "classes": 3, "vocabulary": 9, "features": 4, "outputs": 2}
    shape = {key: known[key] for key in NEEDS[MODELS[name].kind]}
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(name, seed=5, **shape).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second, other = build(name, seed=5, **shape).state_dict(), build(name, seed=6, **shape).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_an_unknown_model_is_refused_with_the_nearest_and_all_known():
    with pytest.raises(
        ModelError, match=r"'tiny-vti': did you mean 'tiny-vit'\? allowed are Qwen.*cnn, .*linear-att.*tiny-vit"
    ):
        build("tiny-vti", image_shape=(1, 8, 8), classes=2, seed=0)
    with pytest.raises(ModelError, match="unknown model 'zzz': allowed are"):
        find("zzz")


def test_a_model_and_data_of_different_kinds_are_refused():
    assert find("linear-attention").kind == SEQUENCES
    with pytest.raises(ModelError, match="sequence-regression: give features and outputs"):
        build("linear-attention", image_shape=(1, 8, 8), classes=2, seed=0)
    with pytest.raises(ModelError, match="cnn is a model for image-classification: give image_shape and classes"):
        build("cnn", seed=0)


def test_the_cnn_on_mnist_has_the_papers_number_of_parameters():
    cnn = build("cnn", image_shape=(1, 28, 28), classes=10, seed=0)
    assert sum(parameter.numel() for parameter in cnn.parameters()) == 1_663_370
    blocks = find_blocks(cnn)
    assert blocks.query_key == ()
    assert [{name.rsplit(".", 1)[0] for name in layer} for layer in blocks.layers] == [
        {"stages.0.0"}, {"stages.1.0"}, {"stages.2.1"}
    ]  # fmt: skip


def test_resnet_20_has_the_papers_size_and_takes_every_second_pixel_past_a_halving():
    model = build("resnet-20", image_shape=(3, 32, 32), classes=10, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722
    # 6n + 2 weighted layers, n = 3, without parameters in the shortcuts.
    assert sum(parameter.ndim > 1 for parameter in model.parameters()) == 6 * 3 + 2
    assert [len(layer) for layer in find_blocks(model).layers] == [3 * 2 * (1 + 5)] * 3
    block = model.stages[1][0].eval()
    torch.nn.init.zeros_(block.norm2.weight)  # what remains is the shortcut
    maps = torch.rand(2, 16, 4, 6)
    out = block(maps)
    assert out.shape == (2, 32, 2, 3) and not out[:, 16:].any()
    for y in range(2):
        for x in range(3):
            assert torch.equal(out[:, :16, y, x], maps[:, :, 2 * y, 2 * x])


def test_the_character_model_is_leafs_and_reads_the_whole_text():
    model = build("char-lstm", vocabulary=80, seed=0)
    # LEAF's embedding, LSTMs and projection; torch has a second bias of 4 x 256 in each LSTM, which adds nothing.
    leaf = 80 * 8 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1) + 256 * 80 + 80
    assert sum(parameter.numel() for parameter in model.parameters()) == leaf + 2 * 4 * 256
    texts = torch.arange(2 * 7).reshape(2, 7)
    logits = model(texts)
    assert logits.shape == (2, 80)
    # One step after the other with torch's cells, the states carried by hand.
    expected = model.embedding(texts)
    for stage in model.stages:
        cell = torch.nn.LSTMCell(stage.input_size, 256)
        cell.load_state_dict({name.removesuffix("_l0"): value for name, value in stage.state_dict().items()})
        state, steps = (torch.zeros(2, 256), torch.zeros(2, 256)), []
        for step in range(7):
            state = cell(expected[:, step], state)
            steps.append(state[0])
        expected = torch.stack(steps, 1)
    torch.testing.assert_close(logits, expected[:, -1] @ model.head.weight.T + model.head.bias)
    blocks = find_blocks(model)
    assert len(blocks.layers) == 2 and blocks.embedding == ("embedding.weight",) and len(blocks.head) == 2


def test_the_character_transformer_knows_where_each_character_stands_counted_from_the_end():
    model = build("char-transformer", vocabulary=30, seed=0).double()
    texts = torch.randint(0, 30, (3, 9))
    states = model.embedding(texts)
    for place in range(9):
        for pair in range(32):
            angle = (8 - place) / 10_000 ** (2 * pair / 64)
            states[:, place, 2 * pair] += 0.02 * math.sin(angle)
            states[:, place, 2 * pair + 1] += 0.02 * math.cos(angle)
    for block in model.blocks:
        states = block(states)
    expected = model.head(model.norm(states))[:, -1]
    torch.testing.assert_close(model(texts), expected, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(model(texts), model(texts[:, [1, 0, *range(2, 9)]]))
    blocks = find_blocks(model)
    assert len(blocks.layers) == 2 and blocks.embedding == ("embedding.weight",)
    assert len(blocks.query_key) == 2 * 4 and len(blocks.head) == 2


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


def test_a_regressor_is_the_mean_of_linear_attention_over_the_tokens():
    model = build("linear-attention", features=5, outputs=2, seed=0)
    attention = LinearAttention(width=5, value_size=2)
    attention.load_state_dict(model.state_dict())
    h = torch.randn(3, 4, 5)
    torch.testing.assert_close(model(h), torch.stack([attention(one[None])[0].sum(0) / 4 for one in h]))
    # Without a length each example is of one token, and has nothing to do with the others.
    torch.testing.assert_close(model(h[:, 0]), torch.cat([attention(one[None, :1])[0] for one in h]))


def test_linear_attention_is_one_layer_of_three_matrices():
    blocks = find_blocks(build("linear-attention", features=64, outputs=32, seed=0))
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
