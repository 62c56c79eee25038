"""A model of one's own: package.module:function."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tepal.models import ANYTHING, ModelError, build, find

MODULE = """
from torch import nn

def shaped(image_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(image_shape[0] * image_shape[1] * image_shape[2], classes))

def fixed():
    return nn.Linear(2, 3)

def anything(**options):
    return nn.ModuleDict({key: nn.Identity() for key in options})

def wants(classes, depth):
    return nn.Linear(depth, classes)

def fails(classes):
    raise RuntimeError("no luck")

def no_module(classes):
    return classes

number = 3
"""
SHAPE = {"image_shape": (1, 4, 4), "classes": 3}


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").write_text("")
    (tmp_path / "ours" / "net.py").write_text(MODULE)
    (tmp_path / "ours" / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_function_is_called_with_what_its_signature_takes_and_its_seed():
    model = build("ours.net:shaped", **SHAPE, seed=4)
    assert model(torch.zeros(2, 1, 4, 4)).shape == (2, 3)
    torch.manual_seed(4)  # the global generator, as for all others
    assert torch.equal(model[1].weight, nn.Linear(16, 3).weight)
    assert isinstance(build("ours.net:fixed", **SHAPE, seed=0), nn.Linear)
    assert set(build("ours.net:anything", **SHAPE, seed=0)) == {"image_shape", "classes"}


def test_it_may_be_for_any_data_and_is_not_imported_to_be_found():
    assert find("ours.nowhere:shaped").kind == ANYTHING


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "ours.nowhere:shaped",
            r"importing ours\.nowhere failed: ModuleNotFoundError.* on the server and on every client",
        ),
        ("ours.broken:shaped", "importing ours.broken failed: .*nothing_of_this_name"),
        ("ours.net:shapd", "ours.net has no function 'shapd'"),
        ("ours.net:number", "has no function 'number'"),
        ("ours.net:", "write package.module:function"),
        ("ours.net:wants", "requires depth, but is called with image_shape, classes"),
        ("ours.net:fails", "ours.net:fails raised RuntimeError: no luck"),
        ("ours.net:no_module", "returned int; it must return a torch.nn.Module"),
    ],
)
def test_what_goes_wrong_is_said_in_words(name, said):
    with pytest.raises(ModelError, match=said):
        build(name, **SHAPE, seed=0)
