"""A model's state goes into records and out of them as by PyTorch's and Flower's own ways."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from tepal.client_app.state import load_record, record_of_model
from tepal.models import build

MODELS = ("cnn", "tiny-vit", "resnet-20")


def made(name, seed):
    return build(name, image_shape=(3, 32, 32), classes=10, seed=seed)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_model_is_what_it_would_be_by_load_state_dict(name, layout):
    one, other, expected = made(name, 1), made(name, 2).to(memory_format=layout), made(name, 3)
    strides = {key: tensor.stride() for key, tensor in other.state_dict().items()}
    for record in (ArrayRecord(one.state_dict()), record_of_model(one)):
        expected.load_state_dict(record.to_torch_state_dict())
        load_record(other, record)
        for (key, tensor), wanted in zip(other.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(tensor, wanted) and torch.equal(tensor, one.state_dict()[key])
            assert tensor.stride() == strides[key]


def test_a_record_of_a_model_shares_its_memory_until_somebody_asks_for_a_copy():
    model = made("cnn", 1)
    record = record_of_model(model)
    name, parameter = next(iter(model.named_parameters()))
    copied = record[name].numpy()
    with torch.no_grad():
        parameter += 1
    np.testing.assert_array_equal(record[name].numpy(), parameter.detach().numpy())
    np.testing.assert_allclose(copied + 1, parameter.detach().numpy(), rtol=1e-6)


def test_what_is_not_the_models_state_is_refused_in_pytorchs_words():
    model = made("cnn", 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record = record_of_model(made("cnn", 2))
    name = next(iter(record))
    del record[name]
    with pytest.raises(RuntimeError, match="Missing key"):
        load_record(model, record)
    wide = build("cnn", image_shape=(3, 28, 28), classes=10, seed=0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_record(model, record_of_model(wide))
    assert before.keys() == model.state_dict().keys()


def test_another_dtype_is_converted():
    model = made("cnn", 1).to(torch.bfloat16)
    source = made("cnn", 2)
    load_record(model, record_of_model(source))
    for tensor, wanted in zip(model.state_dict().values(), source.state_dict().values(), strict=True):
        assert torch.equal(tensor, wanted.to(torch.bfloat16))
