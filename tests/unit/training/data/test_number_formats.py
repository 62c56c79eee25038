"""Numbers to regress on: .npz files and tables, at a site and as a run's dataset, and what is refused of them."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tepal.training import data
from tepal.training.data import (
    DataConfig,
    DataError,
    NumberInfo,
    held_out,
    load_client,
    load_client_numbers,
    load_client_texts,
    number_info,
    sources,
)

RNG = np.random.default_rng(0)
INPUTS, TARGETS = RNG.normal(size=(40, 5, 3)), RNG.normal(size=(40, 2))


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    yield
    sources.load_path.cache_clear()


def config_of(path: object, **config: object) -> DataConfig:
    return DataConfig.model_validate({"dataset": str(path), **config})


def own(path: object, **config: object) -> data.ClientData[data.Numbers]:
    """What a client with a `data-path` of its own gets in a run with dataset="local"."""
    return load_client_numbers(config_of("local", **config), {"data-path": str(path)}, client="ward-3")


def part(path: object, number: int, count: int, **config: object) -> data.ClientData[data.Numbers]:
    node_config = {"partition-id": number, "num-partitions": count}
    return load_client_numbers(config_of(path, **config), node_config, client=f"client-{number}")


def npz(file: Path, **arrays: object) -> Path:
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file


def table(file: Path, rows: list[dict[str, object]]) -> Path:
    if file.suffix == ".csv":
        with file.open("w", newline="") as text:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sorted_rows(*numbers: data.Numbers) -> np.ndarray:
    """Inputs and targets of examples side by side, in an order of their own."""
    rows = np.concatenate([np.concatenate([n.inputs.reshape(len(n), -1), n.targets], axis=1) for n in numbers])
    return rows[np.lexsort(rows.T)]


# Arrays


def test_arrays_are_inputs_and_targets_of_float32(tmp_path: Path) -> None:
    file = npz(tmp_path / "a.npz", x_train=INPUTS, y_train=TARGETS, x_test=INPUTS[:7] + 1, y_test=TARGETS[:7])
    assert number_info(config_of(file)) == NumberInfo(features=3, outputs=2)
    tests = held_out(config_of(file), data.Numbers)
    assert tests is not None and tests.inputs.dtype == tests.targets.dtype == np.float32
    np.testing.assert_array_equal(tests.inputs, (INPUTS[:7] + 1).astype(np.float32))
    client = own(file, features=3, outputs=2)
    assert (len(client.train), len(client.test), client.train.info) == (40, 7, NumberInfo(3, 2))
    np.testing.assert_array_equal(client.train.targets, TARGETS.astype(np.float32))
    flat = own(npz(tmp_path / "b.npz", x=np.arange(20).reshape(10, 2), y=np.arange(10)), features=2, outputs=1)
    for row, target in zip(*(np.concatenate([getattr(n, of) for n in (flat.train, flat.test)])
                             for of in ("inputs", "targets")), strict=True):  # fmt: skip
        assert row.tolist() == [2 * target[0], 2 * target[0] + 1], "one target is one output"


@pytest.mark.parametrize("partitioner", ["iid", "natural"])
def test_a_dataset_is_divided_and_every_example_is_in_one_place(tmp_path: Path, partitioner: str) -> None:
    groups = np.arange(40) % 4
    file = npz(tmp_path / "a.npz", x=INPUTS, y=TARGETS, group=groups)
    options = {"partitioner": partitioner, "held-out-fraction": 0.2, "min-partition-size": 2}
    clients = [part(file, number, 4, **options) for number in range(4)]
    server = held_out(config_of(file, **options), data.Numbers)
    assert server is not None and len(server) == 8
    found = sorted_rows(server, *(numbers for client in clients for numbers in (client.train, client.test)))
    whole = np.concatenate([INPUTS.reshape(40, -1), TARGETS], axis=1).astype(np.float32)
    np.testing.assert_array_equal(found, whole[np.lexsort(whole.T)])
    if partitioner == "natural":
        of = {row.tobytes(): group for row, group in zip(whole, groups, strict=True)}
        for number, client in enumerate(clients):
            assert {of[row.tobytes()] for row in sorted_rows(client.train, client.test)} == {number}


@pytest.mark.parametrize("partitioner", ["dirichlet", "pathological"])
def test_what_divides_by_classes_is_refused(tmp_path: Path, partitioner: str) -> None:
    file = npz(tmp_path / "a.npz", x=INPUTS, y=TARGETS)
    with pytest.raises(DataError, match=f"the {partitioner} partitioner divides by labels, and targets are numbers"):
        part(file, 0, 2, partitioner=partitioner)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": INPUTS[..., None], "y": TARGETS}, r"x and y: inputs have shape \(40, 5, 3, 1\); allowed are \(n, "),
        ({"x": INPUTS, "y": TARGETS[..., None]}, r"targets have shape \(40, 2, 1\); allowed are \(n,\)"),
        ({"x": INPUTS[:9], "y": TARGETS}, r"9 inputs but 40 targets"),
        ({"x": INPUTS[:0], "y": TARGETS[:0]}, r"no examples"),
        ({"x": INPUTS[:, :0], "y": TARGETS}, r"inputs have shape \(40, 0, 3\)"),
        ({"x": INPUTS[..., :0], "y": TARGETS}, r"inputs have shape \(40, 5, 0\)"),
        ({"x": INPUTS.astype(str), "y": TARGETS}, r"inputs are <U\d+: save numbers"),
        ({"x": INPUTS + 1j, "y": TARGETS}, r"inputs are complex128: save numbers"),
        ({"x": np.where(np.arange(40)[:, None, None] > 37, np.nan, INPUTS), "y": TARGETS},
         r"input 38 \(2 in all\) has .* NaN"),
        ({"x": INPUTS, "y": np.where(np.arange(40)[:, None] == 4, 1e60, TARGETS)},
         r"target 4 \(1 in all\) .* too large"),
        ({"x": INPUTS}, r"has no pair of arrays for inputs and targets; it has x"),
        ({"x_train": INPUTS, "y_train": TARGETS, "x_test": INPUTS[:, :4], "y_test": TARGETS},
         r"train inputs are 5x3, test inputs 4x3: use one shape"),
        ({"x": INPUTS[..., :2], "y": TARGETS}, r"has 2 features, but the run has 3: correct features"),
        ({"x": INPUTS, "y": TARGETS[:, 0]}, r"has 1 outputs, but the run has 2: correct outputs"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_used_are_named(tmp_path: Path, arrays: dict[str, np.ndarray], said: str) -> None:
    file = npz(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=f"client ward-3: {file}: .*{said}"):
        own(file, features=3, outputs=2)


# Tables


ROWS: list[dict[str, object]] = [
    {"age": n, "dose": n / 4, "rise": -n, "fall": 2 * n, "site": f"s{n % 2}", "split": "test" if n > 7 else "train"}
    for n in range(10)
]
COLUMNS = {"feature-columns": "dose, age", "label-column": "rise"}


@pytest.mark.parametrize("form", [".csv", ".jsonl", ".parquet"])
def test_a_tables_columns_are_inputs_and_targets(tmp_path: Path, form: str) -> None:
    file = table(tmp_path / f"t{form}", ROWS)
    source = sources.named_source(config_of(file, **COLUMNS, **{"group-column": "site"}), data.Numbers)
    assert isinstance(source.train, data.Numbers) and source.train.groups is not None
    assert source.train.inputs.tolist() == [[n / 4, n] for n in range(10)]
    assert source.train.targets.tolist() == [[-n] for n in range(10)]
    assert source.train.groups.tolist() == ["s0", "s1"] * 5
    several = config_of(file, **{**COLUMNS, "label-column": "rise,fall", "split-column": "split"})
    assert number_info(several) == NumberInfo(2, 2)
    tests = held_out(several, data.Numbers)
    assert tests is not None and tests.targets.tolist() == [[-8, 16], [-9, 18]]


def test_a_site_may_have_a_table_and_the_run_says_its_sizes_by_the_columns(tmp_path: Path) -> None:
    assert number_info(config_of("local", **COLUMNS)) == NumberInfo(2, 1)
    client = own(table(tmp_path / "t.csv", ROWS), **COLUMNS)
    assert (len(client.train), len(client.test), client.train.info, client.name) == (8, 2, NumberInfo(2, 1), "ward-3")
    assert sorted_rows(client.train, client.test).tolist() == [[n / 4, n, -n] for n in range(9, -1, -1)]


@pytest.mark.parametrize(
    ("changed", "config", "said"),
    [
        ({}, {"feature-columns": "dose,weight"}, "has no column weight; it has age, dose, .*feature-columns"),
        ({}, {"feature-columns": ""}, "feature-columns is empty"),
        ({}, {"label-column": ""}, "label-column is empty"),
        ({}, {"label-column": "age"}, "column age is in feature-columns and in label-column"),
        ({}, {"feature-columns": "dose,site"}, "row 1 has 's0' in column site, which is not a number: repair"),
        ({"dose": "x"}, {}, "row 4 has 'x' in column dose, which is not a number"),
        ({"dose": ""}, {}, "row 4 has nothing in column dose"),
        ({"rise": "nan"}, {}, r"row 4 has nan in column rise \(1 in all\), which is NaN, infinite"),
        ({"rise": "1e39"}, {}, r"row 4 has 1e\+39 in column rise .* too large for float32"),
    ],
)  # fmt: skip
def test_a_cell_that_is_no_number_is_named(
    tmp_path: Path, changed: dict[str, object], config: dict[str, str], said: str
) -> None:
    rows = [*ROWS[:3], {**ROWS[3], **changed}, *ROWS[4:]]
    file = table(tmp_path / "t.csv", rows)
    with pytest.raises(DataError, match=said) as error:
        own(file, **{**COLUMNS, **config})
    assert "ward-3" in str(error.value)


# What is something else


def test_numbers_images_and_texts_are_not_taken_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'dataset="digits": has images, but the model needs numbers'):
        number_info(config_of("digits"))
    play = tmp_path / "play.txt"
    play.write_text("ANNE:\nall is well\n\nBERT:\nall is lost\n")
    with pytest.raises(DataError, match="has texts, but the model needs numbers"):
        number_info(config_of(play))
    file = npz(tmp_path / "a.npz", x=INPUTS, y=TARGETS)
    with pytest.raises(DataError, match="labels are float64"):
        load_client(config_of("local"), {"data-path": str(file)}, client="ward-3")
    with pytest.raises(DataError, match="labels are float64"):
        load_client_texts(config_of("local"), {"data-path": str(file)}, client="ward-3")


def test_a_run_whose_server_sees_no_data_says_what_the_clients_have() -> None:
    assert number_info(config_of("local", features=4, outputs=3)) == NumberInfo(4, 3)
    for said in ({}, {"features": 4}, {"outputs": 3}):
        with pytest.raises(DataError, match="set features and outputs"):
            number_info(config_of("local", **said))


@pytest.mark.parametrize(
    ("targets", "warned"),
    [
        ([0, 1, 2] * 10, True),
        ([0.5, 1, 2] * 10, False),  # measured
        (range(30), False),  # counted: few are equal
        ([3] * 30, False),
    ],
)
def test_targets_that_look_like_classes_are_remarked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, targets: Sequence[float], warned: bool
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("x,y\n" + "".join(f"{row},{value}\n" for row, value in enumerate(targets)))
    sources.named_source(config_of(file, **{"feature-columns": "x", "label-column": "y"}), data.Numbers)
    said = 'If they stand for classes, set model="mlp" or "ft-transformer" and label-column="y"'
    assert (said in caplog.text) == warned
