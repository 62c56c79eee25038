"""Data sets, partitions and splits: what clients and the server get, and what they are told if they cannot."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tepal.training import data
from tepal.training.data import (
    DataConfig,
    DataError,
    DatasetInfo,
    dataset_info,
    held_out,
    load_client,
    partitions,
    sources,
    unlabelled,
)
from tests.packages import ROOT

WriteNpz = Callable[..., str]


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    yield
    for cached in (sources.load_digits, sources.load_path, partitions.divide):
        cached.cache_clear()


@pytest.fixture
def npz(tmp_path: Path) -> WriteNpz:
    """Write arrays to a .npz file and return its path."""

    def write(name: str = "own.npz", **arrays: object) -> str:
        np.savez(tmp_path / name, **arrays)  # type: ignore[arg-type]
        return str(tmp_path / name)

    return write


def numbered(count: int, classes: int) -> dict[str, np.ndarray]:
    """Images whose pixel is their own number (exact in float32), so that a test can tell which examples it got."""
    images = np.broadcast_to(np.arange(count, dtype=np.float32)[:, None, None] / 1024, (count, 2, 2))
    return {"images": images, "labels": np.arange(count) % classes}


def numbers(examples: data.ImageArrays | None) -> list[int]:
    return [] if examples is None else (examples.images[:, 0, 0, 0] * 1024).astype(int).tolist()


def all_clients(config: DataConfig, clients: int) -> list[data.ClientData]:
    return [
        load_client(config, {"partition-id": one, "num-partitions": clients}, client=f"client-{one}")
        for one in range(clients)
    ]


def own(path: object, **config: object) -> data.ClientData:
    """What a client with a `data-path` of its own gets in a run with dataset="local"."""
    settings = DataConfig.model_validate({"dataset": "local", **config})
    return load_client(settings, {"data-path": str(path)}, client="ward-3")


def paint(path: Path, colour: object, *, mode: str = "L", size: tuple[int, int] = (4, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)  # type: ignore[arg-type]


# The run config


def test_run_config_keys_are_read_by_their_hyphenated_names_and_others_left_alone() -> None:
    config = DataConfig.from_run_config(
        {"dirichlet-alpha": 1, "classes-per-client": 3, "image-shape": "3X32x16", "seed": 7, "learning-rate": 0.1}
    )
    assert (config.dirichlet_alpha, config.classes_per_client, config.seed) == (1.0, 3, 7)
    assert config.shape == (3, 32, 16)
    assert DataConfig.from_run_config({}) == DataConfig()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("partitioner", "random", "'iid', 'dirichlet', 'pathological' or 'natural'"),
        ("dirichlet-alpha", 0, "greater than 0"),
        ("dirichlet-alpha", float("nan"), "finite"),
        ("dirichlet-alpha", float("inf"), "finite"),
        ("min-partition-size", 0, "greater than or equal to 1"),
        ("classes-per-client", 0, "greater than or equal to 1"),
        ("test-fraction", 1.0, "less than 1"),
        ("test-fraction", 0.0, "greater than 0"),
        ("held-out-fraction", -0.1, "greater than or equal to 0"),
        ("server-share", -0.1, "greater than or equal to 0"),
        ("server-share", 0.51, "less than or equal to 0.5"),
        ("image-shape", "8x8", 'write "CxHxW"'),
        ("image-shape", "0x8x8", 'write "CxHxW"'),
        ("classes", -1, "greater than or equal to 0"),
        ("seed", "abc", "valid integer"),
        ("feature-columns", "age,", "a name between commas is empty: remove the comma"),
        ("group-column", "play,,role", "a name between commas is empty"),
        ("label-column", ", a", "a name between commas is empty"),
        ("choices-column", "a,b,", "a name between commas is empty"),
        ("class-names", "cat,dog,", "a name between commas is empty"),
    ],
)
def test_a_value_out_of_range_is_refused_with_key_value_and_what_is_allowed(
    key: str, value: object, allowed: str
) -> None:
    with pytest.raises(DataError) as refused:
        DataConfig.from_run_config({key: value})
    assert f"{key}={value!r}" in str(refused.value)
    assert allowed in str(refused.value)


def test_every_key_has_a_description() -> None:
    assert all(field.description for field in DataConfig.model_fields.values())


# Digits and partitions


def test_digits_are_divided_between_the_server_and_the_clients() -> None:
    from sklearn.datasets import load_digits

    config = DataConfig()
    server, clients = held_out(config), all_clients(config, 10)
    assert dataset_info(config) == DatasetInfo((1, 8, 8), 10)
    assert server is not None and len(server) == round(0.2 * 1797)
    parts = [server, *(part for client in clients for part in (client.train, client.test))]
    for part in parts:
        assert part.images.dtype == np.float32 and part.labels.dtype == np.int64
        assert part.images.shape == (len(part), 1, 8, 8)
    # The bag of (image, label) is scikit-learn's, whatever the order.
    got = sorted(
        (image.tobytes(), label) for part in parts for image, label in zip(part.images, part.labels, strict=True)
    )
    pixels, labels = load_digits(return_X_y=True)
    assert got == sorted(
        ((row / 16).astype(np.float32).tobytes(), label) for row, label in zip(pixels, labels, strict=True)
    )
    assert clients[3].name == "client-3" and clients[3].origin == 'dataset="digits", partition 3 of 10'
    assert (clients[3].train.shape, clients[3].classes) == ((1, 8, 8), 10)


SCHEMES = st.fixed_dictionaries(
    {
        "partitioner": st.sampled_from(["iid", "dirichlet", "pathological"]),
        "dirichlet-alpha": st.sampled_from([1.0, 5.0, 100.0]),
        "min-partition-size": st.integers(2, 4),
        "held-out-fraction": st.sampled_from([0.0, 0.1, 0.5]),
        "server-share": st.sampled_from([0.0, 0.2, 0.5]),
        "test-fraction": st.sampled_from([0.01, 0.3, 0.99]),
        "seed": st.integers(0, 2**40),
    }
)


EXAMPLES = 480  # so many that a quarter of them has enough of every class for all clients


@settings(max_examples=30, deadline=None)
@given(run_config=SCHEMES, clients=st.integers(1, 6), classes=st.integers(1, 4))
def test_every_example_is_at_exactly_one_place(run_config: dict[str, object], clients: int, classes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/d.npz", **numbered(EXAMPLES, classes))  # type: ignore[arg-type]
        config = DataConfig.from_run_config({**run_config, "dataset": f"{folder}/d.npz", "classes-per-client": classes})
        loaded = all_clients(config, clients)
        places = [
            numbers(held_out(config)),
            numbers(unlabelled(config)),
            *(numbers(part) for client in loaded for part in (client.train, client.test)),
        ]
        assert sorted(number for place in places for number in place) == list(range(EXAMPLES))
        for client in loaded:
            assert len(client.train) >= 1 and len(client.test) >= 1
            assert len(client.train) + len(client.test) >= config.min_partition_size
            for part in (client.train, client.test):
                assert [number % classes for number in numbers(part)] == part.labels.tolist()


def test_the_server_keeps_its_share_of_the_training_examples_without_labels(npz: WriteNpz) -> None:
    config = DataConfig(dataset=npz(**numbered(200, 4)), partitioner="iid", held_out_fraction=0.25, server_share=0.2)
    kept = unlabelled(config)
    assert kept is not None
    images = kept.images
    assert images.dtype == np.float32 and images.shape == (0.2 * 150, 1, 2, 2)
    assert numbers(held_out(config)) == numbers(held_out(config.model_copy(update={"server_share": 0.0})))
    again = unlabelled(config)
    assert again is not None and again.images.tobytes() == images.tobytes()
    other = unlabelled(config.model_copy(update={"seed": 43}))
    assert other is not None and other.images.tobytes() != images.tobytes()
    images[:] = 0
    fresh = unlabelled(config)
    assert fresh is not None and fresh.images.any()


def test_where_the_dataset_has_a_test_set_the_server_keeps_training_examples_alone(npz: WriteNpz) -> None:
    train, test = numbered(100, 4), numbered(40, 4)
    arrays = {"x_train": train["images"], "y_train": train["labels"], "x_test": test["images"] + 0.5}
    config = DataConfig(
        dataset=npz(**arrays, y_test=test["labels"]), partitioner="iid", min_partition_size=2, server_share=0.1
    )
    kept = numbers(unlabelled(config))
    with_clients = [n for one in all_clients(config, 3) for part in (one.train, one.test) for n in numbers(part)]
    assert len(kept) == 10 and sorted([*kept, *with_clients]) == list(range(100))


def test_without_a_share_the_server_has_nothing_and_every_partition_is_what_it_was() -> None:
    assert unlabelled(DataConfig()) is None
    assert unlabelled(DataConfig(dataset="local", image_shape="1x8x8", classes=10, server_share=0.2)) is None
    digest = hashlib.sha256()
    for one in all_clients(DataConfig(), 4):
        for part in (one.train, one.test):
            digest.update(part.images.tobytes() + part.labels.tobytes())
    assert digest.hexdigest()[:16] == "9165d55a0fcf9811"


def test_iid_sizes_differ_by_one_at_most_and_a_sorted_file_is_shuffled(npz: WriteNpz) -> None:
    arrays = numbered(103, 1) | {"labels": np.sort(np.arange(103) % 4)}
    config = DataConfig(dataset=npz(**arrays), partitioner="iid", held_out_fraction=0)
    clients = all_clients(config, 4)
    assert sorted(len(client.train) + len(client.test) for client in clients) == [25, 26, 26, 26]
    assert all(set(client.train.labels) == {0, 1, 2, 3} for client in clients)


def test_a_smaller_alpha_makes_clients_differ_more() -> None:
    def skew(alpha: float) -> float:
        config = DataConfig(dirichlet_alpha=alpha, min_partition_size=5)
        shares = [
            np.bincount(np.concatenate([client.train.labels, client.test.labels]), minlength=10)
            for client in all_clients(config, 5)
        ]
        return float(np.mean([share.max() / share.sum() for share in shares]))

    assert skew(0.1) > 0.25 > 0.15 > skew(1000.0)


def test_dirichlet_sizes_are_drawn_not_balanced(npz: WriteNpz) -> None:
    # With a small alpha each of the 10 classes goes to one of the 2 clients almost whole, like 10 tosses of a coin: one
    # gets 7 or more in a third of the draws. If full clients were passed over, none would get more than 6 (120 images).
    path = npz(**numbered(200, 10))
    largest = []
    for seed in range(12):
        config = DataConfig(dataset=path, dirichlet_alpha=0.05, min_partition_size=2, held_out_fraction=0, seed=seed)
        largest.append(max(len(client.train) + len(client.test) for client in all_clients(config, 2)))
    assert max(largest) > 130


@pytest.mark.parametrize(("clients", "classes"), [(8, 2), (10, 1), (13, 3), (2, 10)])
def test_pathological_clients_have_their_number_of_classes_and_none_is_left_out(clients: int, classes: int) -> None:
    # With 8 clients for 10 classes the first draws leave classes out; they are drawn again.
    config = DataConfig(partitioner="pathological", classes_per_client=classes)
    held = [{*client.train.labels, *client.test.labels} for client in all_clients(config, clients)]
    assert {len(one) for one in held} == {classes}
    assert set().union(*held) == set(range(10))


def test_a_draw_that_fails_is_repeated_with_other_seeds_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, seeds = partitions.draw, []

    def unlucky_twice(
        labels: np.ndarray, config: DataConfig, clients: int, seed: int
    ) -> tuple[partitions.Parts, str]:
        seeds.append(seed)
        parts, failure = draw(labels, config, clients, seed)
        return parts, failure if len(seeds) > 2 else "a client had too few examples"

    monkeypatch.setattr(partitions, "draw", unlucky_twice)
    config = DataConfig(min_partition_size=40)
    assert min(len(client.train) + len(client.test) for client in all_clients(config, 10)) >= 40
    assert len(set(seeds)) == len(seeds) >= 3

    seeds.clear()
    partitions.divide.cache_clear()
    monkeypatch.setitem(partitions.ATTEMPTS, "dirichlet", 2)
    with pytest.raises(DataError, match="was found with 2 seeds; with the last one, a client had too few examples"):
        all_clients(config, 10)


def grouped(npz: WriteNpz, sizes: dict[str, int]) -> str:
    """A file of numbered images in which each group has its size, mixed."""
    groups = np.random.default_rng(0).permutation(np.repeat(list(sizes), list(sizes.values())))
    return npz(**numbered(len(groups), 3), site=groups)


def groups_at(config: DataConfig, clients: int) -> list[set[str]]:
    groups = np.load(config.dataset)["site"]
    return [
        {groups[number] for part in (client.train, client.test) for number in numbers(part)}
        for client in all_clients(config, clients)
    ]


def natural(path: str, **config: object) -> DataConfig:
    return DataConfig.model_validate(
        {"dataset": path, "partitioner": "natural", "group-column": "site", "held-out-fraction": 0, **config}
    )


def test_a_natural_partition_gives_each_client_a_group(npz: WriteNpz) -> None:
    path = grouped(npz, {"b": 12, "a": 10, "c": 30})
    assert groups_at(natural(path), 3) == [{"a"}, {"b"}, {"c"}]
    assert sorted(len(client.train) + len(client.test) for client in all_clients(natural(path), 3)) == [10, 12, 30]


def test_more_groups_than_clients_are_dealt_whole_and_evenly_by_the_seed(npz: WriteNpz) -> None:
    path = grouped(npz, {f"writer-{n}": 3 + n for n in range(11)})
    dealt = groups_at(natural(path, **{"min-partition-size": 2}), 4)
    assert sorted(map(len, dealt)) == [2, 3, 3, 3] and len(set().union(*dealt)) == 11
    assert groups_at(natural(path, **{"min-partition-size": 2}), 4) == dealt
    assert groups_at(natural(path, **{"min-partition-size": 2, "seed": 43}), 4) != dealt


def test_groups_are_dealt_again_until_every_client_has_the_minimum(npz: WriteNpz) -> None:
    # Two groups are large enough for a client, two are not: a third of the deals leave both small ones to one client.
    path = grouped(npz, {"a": 20, "b": 20, "c": 4, "d": 4})
    for seed in range(8):
        dealt = groups_at(natural(path, **{"min-partition-size": 20, "seed": seed}), 2)
        assert all(one & {"a", "b"} and one & {"c", "d"} for one in dealt)


def test_a_natural_partition_that_cannot_be_is_refused(npz: WriteNpz) -> None:
    path = grouped(npz, {"a": 20, "b": 20, "c": 4})
    with pytest.raises(DataError, match="4 clients, but the data has only 3 groups"):
        all_clients(natural(path), 4)
    with pytest.raises(
        DataError,
        match=r"no natural partition of 44 examples over 3 clients .min-partition-size=10. was found with 1 seed; "
        "with the last one, a client had 4 examples: lower min-partition-size, or use fewer clients",
    ):
        all_clients(natural(path), 3)
    with pytest.raises(DataError, match="was found with 20 seeds; with the last one, a client had 20 examples"):
        all_clients(natural(path, **{"min-partition-size": 21}), 2)
    with pytest.raises(DataError, match=r"divides by groups .writers, sites, domains., but this data has none"):
        all_clients(DataConfig(partitioner="natural"), 2)


def test_a_natural_partition_says_nothing_on_the_terminal(npz: WriteNpz, capfd: pytest.CaptureFixture[str]) -> None:
    all_clients(natural(grouped(npz, {"a": 20, "b": 20})), 2)
    assert capfd.readouterr() == ("", "")


def test_the_seed_and_the_client_name_decide() -> None:
    node = {"partition-id": 0, "num-partitions": 10}
    one = load_client(DataConfig(), node, client="a")
    assert np.array_equal(load_client(DataConfig(), node, client="a").train.images, one.train.images)
    renamed = load_client(DataConfig(), node, client="b")
    assert sorted([*renamed.train.labels, *renamed.test.labels]) == sorted([*one.train.labels, *one.test.labels])
    assert not np.array_equal(renamed.test.images, one.test.images)
    reseeded = load_client(DataConfig(seed=43), node, client="a")
    assert not np.array_equal(reseeded.train.images, one.train.images)


def test_what_a_client_changes_stays_with_it() -> None:
    node = {"partition-id": 0, "num-partitions": 10}
    before = load_client(DataConfig(), node, client="a")
    copy = before.train.images.copy()
    before.train.images[:] = 0
    server = held_out(DataConfig())
    assert server is not None
    server.images[:] = 0
    assert np.array_equal(load_client(DataConfig(), node, client="a").train.images, copy)
    again = held_out(DataConfig())
    assert again is not None and again.images.any()


SUMMARY = """
import hashlib, json, sys
from tepal.training.data import DataConfig, held_out, load_client
early = [name for name in ("torch", "datasets", "flwr_datasets", "sklearn", "PIL") if name in sys.modules]
config = DataConfig(dirichlet_alpha=0.3)
parts = [held_out(config)]
for one in range(4):
    client = load_client(config, {"partition-id": one, "num-partitions": 4}, client=f"client-{one}")
    parts += [client.train, client.test]
print(json.dumps({
    "early": early,
    "parts": [hashlib.sha256(part.images.tobytes() + part.labels.tobytes()).hexdigest() for part in parts],
}))
"""


def test_every_process_computes_the_same_and_says_nothing_on_the_terminal() -> None:
    import hashlib

    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SUMMARY], env=environment, capture_output=True, text=True, check=True)
    other = json.loads(done.stdout)
    config = DataConfig(dirichlet_alpha=0.3)
    server = held_out(config)
    assert server is not None
    parts = [server, *(part for client in all_clients(config, 4) for part in (client.train, client.test))]
    assert other["parts"] == [
        hashlib.sha256(part.images.tobytes() + part.labels.tobytes()).hexdigest() for part in parts
    ]
    assert done.stderr == ""  # no progress bar, no warning
    assert not {"datasets", "flwr_datasets", "sklearn", "PIL"} & set(other["early"])


def test_ten_clients_in_one_process_load_and_divide_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, draws = [], []
    load, draw = np.loadtxt, partitions.draw
    monkeypatch.setattr(np, "loadtxt", lambda *args, **how: loads.append(1) or load(*args, **how))
    monkeypatch.setattr(partitions, "draw", lambda *args: draws.append(1) or draw(*args))
    all_clients(DataConfig(), 10)
    held_out(DataConfig())
    assert (len(loads), len(draws)) == (1, 1)


def test_digits_without_scikit_learn_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sources, "distribution", missing)
    with pytest.raises(DataError, match=r'dataset="digits" comes with scikit-learn.*pip install scikit-learn'):
        held_out(DataConfig())


def test_dividing_without_flwr_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(DataError, match=r'pip install "tepal\[simulation\]"'):
        all_clients(DataConfig(), 2)
    assert held_out(DataConfig()) is not None  # the server does not need it


@pytest.mark.parametrize(
    ("config", "clients", "message"),
    [
        (
            {"dirichlet-alpha": 0.02, "min-partition-size": 20},
            50,
            r"no dirichlet partition of 1,438 examples over 50 clients \(dirichlet-alpha=0.02, min-partition-size=20\)"
            ".*raise dirichlet-alpha, lower min-partition-size",
        ),
        ({}, 144, r"144 clients with min-partition-size=10 need 1,440 examples, but 1,438 are available"),
        ({"partitioner": "iid", "min-partition-size": 720}, 2, r"need 1,440 examples.*lower min-partition-size"),
        (
            {"partitioner": "pathological", "classes-per-client": 11},
            10,
            "classes-per-client=11, but there are 10 classes: set 1 to 10",
        ),
        (
            {"partitioner": "pathological"},
            4,
            "4 clients with classes-per-client=2 cannot hold all 10 classes: set classes-per-client to at least 3, or "
            "use at least 5 clients",
        ),
        ({"partitioner": "pathological"}, 5, "no client had class [0-9].*or use more clients"),
        (
            {"partitioner": "pathological", "min-partition-size": 130},
            11,
            "no pathological partition.*classes-per-client=2, min-partition-size=130.*a client had [0-9]+ examples",
        ),
    ],
)
def test_a_partition_that_cannot_be_is_refused_with_numbers_and_cures(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    config: dict[str, object],
    clients: int,
    message: str,
) -> None:
    monkeypatch.setattr(partitions, "ATTEMPTS", {"iid": 1, "dirichlet": 2, "pathological": 3})
    node = {"partition-id": 1, "num-partitions": clients}
    with pytest.raises(DataError, match=message) as refused:
        load_client(DataConfig.from_run_config(config), node, client="client-1")
    assert str(refused.value).startswith('dataset="digits"')
    assert not [str(one.message) for one in recwarn]  # nothing beside the error, whatever was drawn again


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, "no partition-id and no num-partitions, and no data-path: start the node with --node-config"),
        ({"partition-id": 0}, "no num-partitions, and no data-path"),
        ({"data-path": ""}, "no partition-id and no num-partitions"),
        ({"partition-id": 3, "num-partitions": 3}, "partition-id=3 with num-partitions=3: partition-id counts from 0"),
        ({"partition-id": -1, "num-partitions": 3}, "partition-id=-1"),
        ({"partition-id": "0", "num-partitions": 3}, "partition-id='0' is not a whole number"),
        ({"partition-id": 0, "num-partitions": True}, "num-partitions=True is not a whole number"),
    ],
)
def test_a_node_config_without_data_is_refused(node: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_client(DataConfig(), node, client="ward-3")


# Which dataset


@pytest.mark.parametrize(("name", "near"), [("digit", "digits"), ("Digits", "digits"), ("locale", "local")])
def test_an_unknown_dataset_name_gets_the_nearest_and_what_is_allowed(name: str, near: str) -> None:
    with pytest.raises(DataError, match=f"dataset='{name}' is not known .did you mean '{near}'.*path to a .npz file"):
        dataset_info(DataConfig(dataset=name))


def test_a_name_like_no_other_gets_what_is_allowed() -> None:
    with pytest.raises(DataError, match=r"'svhn' is not known: allowed are \"digits\", \"local\".*image folder"):
        held_out(DataConfig(dataset="svhn"))


def test_a_missing_file_is_named_with_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"^{tmp_path}/none.npz: no such file or folder"):
        dataset_info(DataConfig(dataset="none.npz"))
    with pytest.raises(DataError, match=f"^client ward-3: {tmp_path}/none: no such file or folder"):
        own("none")


def test_local_data_needs_shape_and_classes_from_the_run_config() -> None:
    full = DataConfig(dataset="local", image_shape="1x2x2", classes=3)
    assert dataset_info(full) == DatasetInfo((1, 2, 2), 3)
    assert held_out(full) is None
    with pytest.raises(DataError, match="set image-shape and classes "):
        dataset_info(DataConfig(dataset="local"))
    with pytest.raises(DataError, match="set classes "):
        dataset_info(DataConfig(dataset="local", image_shape="1x2x2"))
    with pytest.raises(DataError, match=r"dataset=\"local\" needs data-path in the node config"):
        load_client(full, {"partition-id": 0, "num-partitions": 2}, client="ward-3")


def test_a_data_path_wins_over_partition_keys_and_must_fit_the_run(npz: WriteNpz) -> None:
    node = {"partition-id": 0, "num-partitions": 2}
    fitting = npz("fits.npz", images=np.full((5, 8, 8), 255, np.uint8), labels=np.array([0, 1, 2, 3, 9]))
    client = load_client(DataConfig(), {**node, "data-path": fitting}, client="ward-3")
    assert (client.train.shape, client.classes, client.origin, client.name) == ((1, 8, 8), 10, fitting, "ward-3")
    assert sorted([*client.train.labels, *client.test.labels]) == [0, 1, 2, 3, 9]
    assert (len(client.train), len(client.test)) == (4, 1)
    assert (client.train.images == 1).all()
    with pytest.raises(DataError, match=r"images are 1x2x2 .CxHxW., but the run's are 1x8x8"):
        load_client(DataConfig(), {**node, "data-path": npz("small.npz", **numbered(5, 2))}, client="ward-3")


# .npz files


@pytest.mark.parametrize(
    "pair",
    [
        ("images", "labels"),
        ("x", "y"),
        ("x_train", "y_train"),
        ("images_train", "labels_train"),
        ("train_images", "train_labels"),
    ],
)
def test_npz_array_names(npz: WriteNpz, pair: tuple[str, str]) -> None:
    arrays = numbered(6, 3)
    client = own(npz(**{pair[0]: arrays["images"], pair[1]: arrays["labels"]}), **{"test-fraction": 0.34})
    assert sorted(numbers(client.train) + numbers(client.test)) == [0, 1, 2, 3, 4, 5]
    assert (len(client.test), client.classes, client.train.shape) == (2, 3, (1, 2, 2))


@pytest.mark.parametrize(
    ("test", "pair"),
    [
        (("images_test", "labels_test"), ("images", "labels")),
        (("test_images", "test_labels"), ("images", "labels")),
        (("x_test", "y_test"), ("x", "y")),
        (("test_x", "test_y"), ("x", "y")),
    ],
)
def test_a_test_set_beside_arrays_without_train_in_their_names(
    npz: WriteNpz, test: tuple[str, str], pair: tuple[str, str]
) -> None:
    images, labels = numbered(25, 5).values()
    arrays = {pair[0]: images[:20], pair[1]: labels[:20], test[0]: images[20:], test[1]: labels[20:]}
    client = own(npz(**arrays))
    assert (numbers(client.train), numbers(client.test)) == (list(range(20)), list(range(20, 25)))
    chosen, chosen_labels, names = data.npz_examples(Path(npz(**arrays)), "images")
    np.testing.assert_array_equal(chosen, images[20:])
    assert chosen_labels is not None and chosen_labels.tolist() == [0, 1, 2, 3, 4] and names == " and ".join(test)
    with pytest.raises(DataError, match=f"has {test[0]} but no {test[1]}: add or remove one"):
        own(npz(**{name: array for name, array in arrays.items() if name != test[1]}))


def test_arrays_of_all_images_beside_a_training_set_have_no_test_set(npz: WriteNpz) -> None:
    images, labels = numbered(10, 2).values()
    parts = {"x_train": images[:8], "y_train": labels[:8], "x_test": images[8:], "y_test": labels[8:]}
    client = own(npz(x=images, y=labels, **parts))
    assert len(client.test) == 2 and sorted(numbers(client.train) + numbers(client.test)) == list(range(10))


def test_a_files_test_set_is_the_servers_or_the_clients_own(npz: WriteNpz) -> None:
    train, test = numbered(40, 2), numbered(50, 5)
    path = npz(
        x_train=train["images"], y_train=train["labels"], x_test=test["images"][40:], y_test=test["labels"][40:, None]
    )
    config = DataConfig(dataset=path, partitioner="iid", held_out_fraction=0.5)
    assert numbers(held_out(config)) == list(range(40, 50))
    assert dataset_info(config).classes == 5  # the test set counts too
    clients = all_clients(config, 2)
    assert sorted(n for client in clients for part in (client.train, client.test) for n in numbers(part)) == list(
        range(40)
    )
    client = own(path)
    assert (numbers(client.train), numbers(client.test)) == (list(range(40)), list(range(40, 50)))


@pytest.mark.parametrize(
    ("shape", "image_shape", "expected"),
    [
        ((5, 6), "", (1, 5, 6)),
        ((3, 5, 6), "", (3, 5, 6)),
        ((5, 6, 3), "", (3, 5, 6)),
        ((5, 6, 1), "", (1, 5, 6)),
        ((5, 6, 4), "4x5x6", (4, 5, 6)),
        ((3, 6, 3), "3x3x6", (3, 3, 6)),
        ((3, 6, 3), "3x6x3", (3, 6, 3)),
    ],
)
def test_image_layouts_become_channel_first(
    npz: WriteNpz, shape: tuple[int, ...], image_shape: str, expected: tuple[int, int, int]
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8)
    config = DataConfig(dataset=npz(x=images, y=np.arange(4)), image_shape=image_shape, held_out_fraction=0.99)
    assert dataset_info(config) == DatasetInfo(expected, 4)
    server = held_out(config)
    assert server is not None and server.images.flags.c_contiguous
    channel_last = shape != expected[-len(shape) :]
    for image, label in zip(server.images, server.labels, strict=True):
        for channel in range(expected[0]):
            plane = (
                images[label]
                if len(shape) == 2
                else images[label][..., channel]
                if channel_last
                else images[label][channel]
            )
            np.testing.assert_allclose(image[channel] * 255, plane, atol=1e-4)


def test_channels_that_are_not_clear_are_asked_for(npz: WriteNpz) -> None:
    for shape in ((4, 5, 6), (3, 6, 3)):
        first, last = "x".join(map(str, shape)), f"{shape[2]}x{shape[0]}x{shape[1]}"
        with pytest.raises(DataError, match=f"channel axis is ambiguous, {first} or {last}.*set image-shape"):
            own(npz(x=np.zeros((2, *shape)), y=np.zeros(2, int)))


def test_integers_of_any_size_and_doubles_are_read(npz: WriteNpz) -> None:
    wide = own(npz(x=np.array([[[0, 51]], [[102, 255]]], dtype=np.int64), y=np.array([0, 1], dtype=np.uint8)))
    values = np.sort(np.concatenate([wide.train.images, wide.test.images]).ravel())
    np.testing.assert_allclose(values, [0, 0.2, 0.4, 1], rtol=1e-6)
    double = own(npz("double.npz", x=np.full((2, 1, 1), 0.1), y=np.array([0, 1])))
    assert double.train.images.dtype == np.float32 and double.train.images.item() == np.float32(0.1)


IMAGES, LABELS = np.zeros((4, 2, 2), np.uint8), np.arange(4)
NAN = np.zeros((4, 2, 2))
NAN[2, 1, 1] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixels": IMAGES, "labels": LABELS}, "no pair of arrays.*it has labels, pixels.*images and labels; x and y"),
        ({}, "it has no array"),
        ({"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES}, "has x_test but no y_test"),
        ({"x": IMAGES.astype(object), "y": LABELS}, "array x cannot be read.*Python objects.*save numbers"),
        ({"x": IMAGES, "y": LABELS.astype(object)}, "array y cannot be read"),
        ({"x": IMAGES, "y": LABELS[:3]}, "x and y: 4 images but 3 labels"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, r"no examples \(images have shape \(0, 2, 2\)\)"),
        ({"x": IMAGES[:, :0], "y": LABELS}, "no examples"),
        ({"x": IMAGES, "y": LABELS - 1}, r"label -1 \(example 0; 1 in all\) is out of range: allowed are 0 to 3"),
        ({"x": IMAGES, "y": LABELS + 2}, r"label 4 \(example 2; 2 in all\) is out of range: allowed are 0 to 3"),
        ({"x": IMAGES, "y": LABELS.astype(np.uint64) + np.uint64(2**63)}, "label 9223372036854775808"),
        ({"x": IMAGES, "y": LABELS / 2}, r"labels are float64 of shape \(4,\); give one whole number"),
        ({"x": IMAGES, "y": np.eye(4, dtype=int)}, r"labels are int64 of shape \(4, 4\)"),
        ({"x": IMAGES, "y": np.array(list("abcd"))}, "labels are <U1"),
        ({"x": NAN, "y": LABELS}, "image 2 has a value that is NaN or infinite"),
        ({"x": NAN - np.inf, "y": LABELS}, "image 0 has a value that is NaN or infinite"),
        ({"x": IMAGES + 255.0, "y": LABELS}, "floats from 255 to 255; floats must lie in 0..1: rescale"),
        ({"x": IMAGES.astype(int) - 1, "y": LABELS}, "integers from -1 to -1; integers must lie in 0..255"),
        ({"x": IMAGES.astype(int) + 256 * np.eye(2, dtype=int), "y": LABELS}, "integers from 0 to 256; integers must"),
        ({"x": IMAGES.astype(bool), "y": LABELS}, "images are bool; allowed are integers 0..255 and floats 0..1"),
        ({"x": IMAGES.reshape(4, 4), "y": LABELS}, r"images have shape \(4, 4\); allowed are \(n, H, W\)"),
        ({"x": np.zeros((4, 4, 5, 6), np.uint8), "y": LABELS}, "the channel axis is ambiguous, 4x5x6 or 6x4x5"),
        ({"x": IMAGES[:1], "y": LABELS[:1]}, "1 example cannot be split.*at least 2"),
    ],
)
def test_an_npz_file_that_cannot_be_used_is_refused(npz: WriteNpz, arrays: dict[str, object], message: str) -> None:
    path = npz(**arrays)
    with pytest.raises(DataError, match=message) as refused:
        own(path, **{"image-shape": "1x2x2", "classes": 4})
    assert path in str(refused.value) or "at least 2" in message


def test_train_and_test_images_must_have_one_shape(npz: WriteNpz) -> None:
    path = npz(x_train=IMAGES, y_train=LABELS, x_test=np.zeros((4, 3, 3), np.uint8), y_test=LABELS)
    with pytest.raises(DataError, match="train images are 1x2x2, test images 1x3x3"):
        dataset_info(DataConfig(dataset=path))


def test_files_that_are_not_npz_are_refused(npz: WriteNpz, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    for content in (b"", b"label,pixel\n0,255\n", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"^{path}: not a readable .npz file"):
            dataset_info(DataConfig(dataset=str(path)))
    np.save(tmp_path / "one.npy", IMAGES)
    with pytest.raises(DataError, match=r"one.npy: one array, not a .npz file"):
        dataset_info(DataConfig(dataset=str(tmp_path / "one.npy")))


def test_a_damaged_array_is_named(npz: WriteNpz) -> None:
    path = Path(npz(x=np.full((4, 20, 20), 77, np.uint8), y=LABELS))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x4d" * 100, b"\x4e" * 100, 1))
    with pytest.raises(DataError, match=r"array x cannot be read.*damaged"):
        dataset_info(DataConfig(dataset=str(path)))


def test_a_changed_file_is_read_anew(npz: WriteNpz) -> None:
    assert dataset_info(DataConfig(dataset=npz(x=IMAGES, y=LABELS))).classes == 4
    assert dataset_info(DataConfig(dataset=npz(x=np.zeros((9, 2, 2), np.uint8), y=np.arange(9)))).classes == 9


# Image folders


def test_an_image_folder_labels_by_sorted_class_name(tmp_path: Path) -> None:
    for name, grey in (("dog", 51), ("ant", 0), ("cat", 102)):
        for number, suffix in enumerate((".png", ".bmp", ".PNG")):
            paint(tmp_path / name / f"{number}{suffix}", grey)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "ant" / "labels.csv").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "ant" / "._0.png").write_bytes(b"what a file manager leaves behind")
    client = own(tmp_path)
    assert (client.train.shape, client.classes, len(client.train) + len(client.test)) == ((1, 4, 4), 3, 9)
    for part in (client.train, client.test):
        for image, label in zip(part.images, part.labels, strict=True):
            np.testing.assert_allclose(image, {0: 0.0, 1: 0.4, 2: 0.2}[int(label)], rtol=1e-6)


def test_grey_and_colour_images_together_become_colour(tmp_path: Path) -> None:
    paint(tmp_path / "a" / "0.png", 51)
    paint(tmp_path / "b" / "0.png", (255, 0, 102), mode="RGB")
    client = own(tmp_path)
    images = {int(part.labels[0]): part.images[0] for part in (client.train, client.test)}
    np.testing.assert_allclose(images[0][:, 0, 0], [0.2, 0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(images[1][:, 3, 2], [1, 0, 0.4], rtol=1e-6)


def test_images_of_several_sizes_are_resized_to_image_shape_or_refused(tmp_path: Path) -> None:
    paint(tmp_path / "a" / "0.png", (255, 0, 0), mode="RGB", size=(6, 3))
    paint(tmp_path / "b" / "0.png", 102, size=(9, 7))
    client = own(tmp_path, **{"image-shape": "3x2x5"})
    assert client.train.images.shape == client.test.images.shape == (1, 3, 2, 5)
    means = {int(part.labels[0]): part.images[0].mean(axis=(1, 2)) for part in (client.train, client.test)}
    np.testing.assert_allclose([means[0], means[1]], [[1, 0, 0], [0.4, 0.4, 0.4]], atol=1e-6)
    with pytest.raises(DataError, match=r"b/0.png: 9x7 pixels, but .*a/0.png has 6x3: set image-shape"):
        own(tmp_path)
    with pytest.raises(DataError, match=r"1 .grey. or 3 .colour. channels, but image-shape has 2"):
        own(tmp_path, **{"image-shape": "2x4x4"})


def test_a_class_without_images_keeps_its_label_if_its_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paint(tmp_path / "b" / "0.png", 1)
    paint(tmp_path / "b" / "1.png", 1)
    client = own(tmp_path, classes=2)
    assert (client.train.labels.tolist(), client.test.labels.tolist(), client.classes) == ([1], [1], 2)
    (tmp_path / "a").rmdir()
    with pytest.raises(DataError, match=r"1 class folders \(b\), but the run has 2 classes.*empty folder"):
        own(tmp_path, classes=2)


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no class folder; expected are images as root/<class name>/"):
        own(tmp_path)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"no image in its class folders \(1\); expected are images as root/<class name>/"
    ):
        own(tmp_path)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    paint(tmp_path / "a" / "good.png", 1)
    bad = tmp_path / "a" / "bad.png"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    Image.fromarray(noise).save(bad)
    for content in (b"", b"not a picture", bad.read_bytes()[:600]):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=f"{bad}: not a readable image.*remove or replace"):
            own(tmp_path, **{"unreadable-images": 0})
    Image.fromarray(np.full((4, 4), 60_000, np.uint16)).save(bad)
    with pytest.raises(DataError, match=f"{bad}: more than 8 bits per channel"):
        own(tmp_path, **{"unreadable-images": 0})


def test_a_site_whose_names_are_not_the_runs_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("named/cat", "named/dog", "numbered/0", "numbered/1"):
        for number in range(2):
            paint(tmp_path / name / f"{number}.png", number)
    own(tmp_path / "named", **{"class-names": "cat,dog"})
    own(tmp_path / "numbered")
    assert not caplog.records
    for seed in (1, 2):
        own(tmp_path / "named", seed=seed)
    (said,) = (one.getMessage() for one in caplog.records)
    assert said == (
        f"{tmp_path}/named: its classes are named (cat, dog), and the run has no class-names: labels are positions in "
        "the sorted names, so every site must have the same names. Set class-names in the run config."
    )


def test_a_site_whose_images_grow_is_told_once_that_its_tests_are_drawn_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def greys(part: data.ImageArrays) -> set[int]:
        return set(np.rint(part.images[:, 0, 0, 0] * 255).astype(int).tolist())

    for number in range(10):
        paint(tmp_path / "site" / "a" / f"{number:02}.png", number)
        paint(tmp_path / "divided" / ("test" if number > 7 else "train") / "a" / f"{number:02}.png", number)
    named = {"class-names": "a"}
    before = greys(own(tmp_path / "site", **named).test)
    for path in ("site", "divided"):
        own(tmp_path / path, **named)
    assert not caplog.records
    for number in (10, 11):
        paint(tmp_path / "site" / "a" / f"{number}.png", number)
        paint(tmp_path / "divided" / "train" / "a" / f"{number}.png", number)
        now = own(tmp_path / "site", **named)
        assert before & greys(now.train), "otherwise there is nothing to be told"
        assert greys(own(tmp_path / "divided", **named).test) == {8, 9}
    (said,) = (one.getMessage() for one in caplog.records)
    assert said.startswith(f"Client ward-3: {tmp_path}/site has 11 examples, and had 10 before, so that its test exam")


def test_a_folder_with_a_new_image_is_read_anew(tmp_path: Path) -> None:
    for number in range(2):
        paint(tmp_path / "a" / f"{number}.png", 1)
    assert len(own(tmp_path).train) == 1
    paint(tmp_path / "a" / "2.png", 1)
    assert len(own(tmp_path).train) == 2
