"""Arrays without copies are, to all others, those that Flower makes."""

import copy
import pickle
from io import BytesIO

import flwr.app
import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from tepal.exchange.records import Array, record_of, values_of

ARRAYS = of_numpy.arrays(
    st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool", ">f4"]),
    of_numpy.array_shapes(min_dims=0, max_dims=4, max_side=5, min_side=0),
    elements=st.integers(0, 1),
)


@given(ARRAYS, st.sampled_from(["as it is", "transposed", "every other"]))
def test_an_array_without_a_copy_is_what_flower_makes_of_its_values(values, how):
    other = values[..., ::2] if values.ndim else values
    values = {"as it is": values, "transposed": values.T, "every other": other}[how]
    theirs, ours = flwr.app.Array(np.array(values, order="A")), Array(values)
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    for array in (ours, theirs, flwr.app.Array(values), pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        for found in (values_of(array), array.numpy(), np.load(BytesIO(array.data))):
            assert found.dtype == values.dtype and found.shape == values.shape
            np.testing.assert_array_equal(found, values)
    assert type(pickle.loads(pickle.dumps(ours))) is type(copy.deepcopy(ours)) is flwr.app.Array


def test_what_is_read_is_a_view_and_what_flower_reads_a_copy():
    values = np.arange(6.0).reshape(2, 3)
    array = Array(values)
    assert np.shares_memory(values_of(array), values)
    read = array.numpy()
    read += 1
    np.testing.assert_array_equal(values, np.arange(6.0).reshape(2, 3))
    written = flwr.app.Array(values)
    assert np.shares_memory(values_of(written), np.frombuffer(written.data, np.uint8))


def test_flower_sends_it_as_its_own():
    values = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "steps": np.array(3)}
    ours, theirs = record_of(values), ArrayRecord({name: flwr.app.Array(value) for name, value in values.items()})
    assert ours.object_id == theirs.object_id
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    message = Message(RecordDict({"arrays": ours}), 1, "train")
    contents = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
    assert set(contents) >= {get_object_tree(message).object_id}
    came = inflate_object_from_contents(message.object_id, contents).content["arrays"]
    assert {type(array) for array in came.values()} == {flwr.app.Array}
    for name, value in values.items():
        np.testing.assert_array_equal(came[name].numpy(), value)


def test_other_serialisations_are_refused_as_flower_does():
    with pytest.raises(TypeError, match="Unsupported serialization"):
        values_of(flwr.app.Array(dtype="uint8", shape=(1,), stype="mine", data=b"1"))
    with pytest.raises(ValueError):
        values_of(flwr.app.Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=b"no numbers"))
    cut = flwr.app.Array(np.arange(8))
    with pytest.raises(ValueError):
        values_of(flwr.app.Array(dtype="int64", shape=(8,), stype=cut.stype, data=cut.data[:-8]))
