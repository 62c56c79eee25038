"""Partitions are those of flwr-datasets, index by index."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal.training.data import partitions
from tepal.training.data.config import DataConfig
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.partitions import Parts, deal, divide, draw

datasets = pytest.importorskip("datasets")
flower = pytest.importorskip("flwr_datasets.partitioner")


def source_of(labels, groups=None):
    images = np.zeros((len(labels), 1, 1, 1), np.uint8)
    return Source(ImageArrays(images, np.asarray(labels, np.int64), groups), None, 10, "the data")


def by_flower(partitioner, **columns):
    """The positions of each partition, as flwr-datasets has them; None if it cannot divide."""
    count = len(next(iter(columns.values())))
    partitioner.dataset = datasets.Dataset.from_dict({**columns, "position": np.arange(count)})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            numbers = range(partitioner.num_partitions)
            return [list(partitioner.load_partition(number)["position"][:]) for number in numbers]
    except ValueError:
        return None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_each_client_has_what_flwr_datasets_gives_it_in_the_same_order(data):
    classes, clients = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    count, seed = data.draw(st.integers(clients, 300)), data.draw(st.integers(0, 2**32 - 1))
    labels = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, classes, count) * 3
    kind = data.draw(st.sampled_from(["iid", "dirichlet", "pathological"]))
    config = DataConfig(
        partitioner=kind,
        dirichlet_alpha=data.draw(st.floats(0.03, 100)),
        min_partition_size=data.draw(st.integers(1, 5)),
        classes_per_client=data.draw(st.integers(1, len(np.unique(labels)))),
    )
    partitioner = {
        "iid": lambda: flower.IidPartitioner(clients),
        "dirichlet": lambda: flower.DirichletPartitioner(
            clients, "label", config.dirichlet_alpha, config.min_partition_size, self_balancing=False, seed=seed
        ),
        "pathological": lambda: flower.PathologicalPartitioner(
            clients, "label", config.classes_per_client, class_assignment_mode="first-deterministic", seed=seed
        ),
    }[kind]()
    expected = by_flower(partitioner, label=labels)
    parts, failure = draw(labels, config, clients, seed)
    if expected is None:
        assert failure
    else:
        assert [part.tolist() for part in parts] == expected
        whole = sorted(position for part in expected for position in part) == list(range(count))
        assert bool(failure) == (not whole or min(map(len, expected)) < config.min_partition_size)


@given(st.lists(st.sampled_from(["b", "a", "site 10", "site 9", "é"]), min_size=1, max_size=60), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_groups_are_those_of_flwr_datasets_and_are_dealt_in_rotation(groups, clients):
    names = np.array(groups)
    if len(set(groups)) < clients:
        return
    pool = np.random.default_rng(0).permutation(len(names))
    expected = by_flower(flower.NaturalIdPartitioner("group"), group=names[pool])
    found = partitions._groups(source_of(np.zeros(len(names)), names), clients, pool)
    assert [part.tolist() for part in found] == expected
    dealt, _ = deal(found, DataConfig(partitioner="natural"), clients, 5)
    order = np.random.default_rng(5).permutation(len(expected)) if len(expected) > clients else range(len(expected))
    rotation = [list(order)[client::clients] for client in range(clients)]
    in_turn = [[position for group in of_client for position in expected[group]] for of_client in rotation]
    assert [part.tolist() for part in dealt] == in_turn


def test_the_parts_of_a_hundred_thousand_clients_are_views_of_one_array():
    parts = divide(source_of(np.zeros(300_000)), DataConfig(partitioner="iid", min_partition_size=2), 100_000)
    assert len(parts) == 100_000 and parts.indices.nbytes == 8 * 240_000
    assert np.shares_memory(parts[99_999], parts.indices)
    assert set(parts.sizes) == {2, 3}


def test_parts_are_a_sequence():
    parts = Parts.joined([[0], [], range(1, 4), np.array([4, 5])])
    expected = [[0], [], [1, 2, 3], [4, 5]]
    assert [part.tolist() for part in parts] == expected
    assert parts[-1].tolist() == [4, 5] and [part.tolist() for part in parts[1:3]] == expected[1:3]
    assert [part.tolist() for part in parts.of(np.arange(6) * 10)] == [[0], [], [10, 20, 30], [40, 50]]
    with pytest.raises(IndexError):
        _ = parts[4]


def test_a_partition_is_drawn_once_for_all_clients(monkeypatch):
    draws, one = [], source_of(np.arange(1000) % 10)
    monkeypatch.setattr(partitions, "draw", lambda *args: draws.append(1) or draw(*args))
    config = DataConfig(partitioner="dirichlet", min_partition_size=2)
    assert divide(one, config, 7) is divide(one, config, 7)
    assert draws == [1]
