"""Classification of numbers: tables and arrays with a class for each row, at a site and as a run's dataset."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

from tepal import models
from tepal.client_app.app import app
from tepal.records.run_directory import read_summary
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.cli.main import main
from tepal.tools.predict.predict import load_predictor
from tepal.training.data import DataConfig, DataError, LabelledNumbers, TableInfo, load_client, sources, table_info
from tepal.training.data.inputs import InputConfig, client_inputs, held_out_inputs, settled
from tests.lines import read_lines
from tests.packages import ROOT


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    yield
    sources.load_path.cache_clear()


def write(file: Path, header: list[str], rows: list[list[Any]]) -> Path:
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([dict(zip(header, row, strict=True)) for row in rows]), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    else:
        with file.open("w", newline="") as text:
            csv.writer(text, delimiter="\t" if file.suffix == ".tsv" else ",").writerows([header, *rows])
    return file


def published(bunch: Any, file: Path, **more: list[Any]) -> Path:
    """A data set of scikit-learn as a table: its features, the class by name in the column `kind`, and more columns."""
    rows = [[*row, bunch.target_names[label]] for row, label in zip(bunch.data.tolist(), bunch.target, strict=True)]
    rows = [[*row, *(column[place] for column in more.values())] for place, row in enumerate(rows)]
    return write(file, [*map(str, bunch.feature_names), "kind", *more], rows)


TABLE: dict[str, Any] = {"model": "mlp", "strategy": "fedavg", "feature-columns": "*", "label-column": "kind"}


def in_process(tmp_path: Path, clients: int, own: dict[int, dict[str, Any]] | None = None, **values: Any) -> Path:
    """A run of `clients` partitions; those in `own` have more in their node configs."""
    given = {**defaults(), "runs": str(tmp_path / "runs"), **TABLE}
    given |= {key.replace("_", "-"): value for key, value in values.items()}
    nodes = [
        Node(app, {"partition-id": k, "num-partitions": clients, **(own or {}).get(k, {})}) for k in range(clients)
    ]
    return run(InProcessGrid(nodes, given), given)


def config_of(file: object, **config: object) -> InputConfig:
    return InputConfig.model_validate({"dataset": str(file), **TABLE, **config})


# Runs


@pytest.mark.parametrize("partitioner", ["iid", "dirichlet"])
def test_a_run_on_a_table_is_about_as_accurate_as_a_logistic_regression_on_all_of_it(
    tmp_path: Path, partitioner: str
) -> None:
    bunch = load_breast_cancer()
    file = published(bunch, tmp_path / "tumours.csv")
    left = in_process(
        tmp_path, 5, dataset=str(file), partitioner=partitioner, normalise="dataset", num_server_rounds=8,
        held_out_fraction=0.3,
    )  # fmt: skip
    held = held_out_inputs(config_of(file, **{"held-out-fraction": 0.3}))
    assert held is not None
    rows = {tuple(row): place for place, row in enumerate(bunch.data.astype(np.float32).tolist())}
    tests = [rows[tuple(row)] for row in held.values.tolist()]
    training = np.setdiff1d(np.arange(len(bunch.data)), tests)
    central = make_pipeline(StandardScaler(), LogisticRegression()).fit(bunch.data[training], bunch.target[training])
    expected = central.score(bunch.data[tests], bunch.target[tests])
    lines, summary = read_lines(left), read_summary(left)
    assert not any(line["refused"] or line["lost"] for line in lines)
    assert summary is not None and expected > 0.95
    assert summary["accuracy"] > expected - 0.03
    counts = json.loads((left / "labels.json").read_text())
    assert np.sum([each for each in counts.values()], axis=0).sum() == len(training)

    predictor = load_predictor(left)
    found = predictor.predict_files([file])
    model = models.build("mlp", features=30, classes=2, seed=0).eval()
    model.load_state_dict(load_file(left / "model.safetensors"))
    pooled = bunch.data[training]
    inputs = torch.from_numpy((bunch.data - pooled.mean(axis=0)) / pooled.std(axis=0)).float()
    with torch.no_grad():
        probabilities = model(inputs).softmax(dim=1).numpy()
    names = sorted(bunch.target_names)  # labels are positions among the sorted names
    assert [row.class_name for row in found] == [names[label] for label in probabilities.argmax(axis=1)]
    np.testing.assert_allclose([row.probability for row in found], probabilities.max(axis=1), atol=1e-4)
    true = [names.index(bunch.target_names[label]) for label in bunch.target]
    assert [row.true_label for row in found] == true
    own = [found[place] for place in tests]
    assert np.mean([row.label == row.true_label for row in own]) == pytest.approx(summary["accuracy"])
    f1 = f1_score([row.true_label for row in own], [row.label for row in own], average="macro")
    assert lines[-1]["macro_f1"] == pytest.approx(f1)


@pytest.mark.parametrize("strategy", ["fedfrozen", "selective", "fedensemble", "fedacs"])
def test_the_transformer_for_tables_is_trained_by_every_method(tmp_path: Path, strategy: str) -> None:
    file = published(load_iris(), tmp_path / "iris.csv")
    options = {"fedfrozen.warmup-rounds": 2} if strategy == "fedfrozen" else {}
    left = in_process(
        tmp_path, 3, dataset=str(file), model="ft-transformer", strategy=strategy, normalise="dataset",
        partitioner="iid", num_server_rounds=4, local_epochs=8, **options,
    )  # fmt: skip
    lines = read_lines(left)
    assert not any(line["refused"] or line["lost"] for line in lines)
    if strategy in ("fedfrozen", "fedacs"):
        assert lines[-1]["accuracy"] > 0.85
    if strategy == "fedfrozen":
        of_query_key = 2 * 2 * (32 * 32 + 32) * 4
        assert lines[1]["bytes_up"] - lines[3]["bytes_up"] == 3 * of_query_key


def test_the_documented_commands_classify_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "docs/data.md").read_text().split("### Classification")[1]
    block = re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)[0].replace("\\\n", "")
    simulate, predict = (shlex.split(line)[1:] for line in block.splitlines())
    bunch = load_breast_cancer()
    file = published(bunch, tmp_path / "tumours.csv")
    file.write_text(file.read_text().replace("kind", "diagnosis", 1))
    new = [0, 1, 19, 20]
    write(tmp_path / "new.csv", list(map(str, bunch.feature_names)), bunch.data[new].tolist())
    monkeypatch.chdir(tmp_path)
    simulate[simulate.index(".")] = str(ROOT)
    for command in ([*simulate, "-c", f'num-server-rounds=5 runs="{tmp_path}/runs"'], predict):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    with (tmp_path / "predictions.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["class_name"] for row in found] == [bunch.target_names[n] for n in bunch.target[new]]
    assert all(1 / 2 < float(row["probability"]) <= 1 and not row["true_label"] for row in found)


def test_a_natural_partition_is_by_a_column_which_is_no_feature(tmp_path: Path) -> None:
    bunch = load_iris()
    sites = [f"s{place % 3}" for place in range(150)]
    file = published(bunch, tmp_path / "iris.tsv", site=sites)
    config = config_of(file, **{"group-column": "site", "partitioner": "natural"})
    assert table_info(config) == TableInfo(features=4, classes=3)
    at = {tuple(row): site for row, site in zip(bunch.data.astype(np.float32).tolist(), sites, strict=True)}
    for k in range(3):
        node = {"partition-id": k, "num-partitions": 3}
        client = load_client(config, node, client=f"c{k}", kind=LabelledNumbers)
        assert client.train.groups is not None and set(client.train.groups) == {f"s{k}"}
        # Equal flowers of two sites are one key.
        assert np.mean([at[tuple(row)] == f"s{k}" for row in client.train.inputs.tolist()]) > 0.9


def test_a_site_of_its_own_gets_the_columns_and_the_scale_of_the_runs_dataset(tmp_path: Path) -> None:
    """Its table has the columns in another order, one more, and one class only; all would give another model."""
    rng = np.random.default_rng(3)
    labels = np.arange(240) % 2
    values = np.stack([1000 + 300 * labels + rng.normal(0, 80, 240), rng.normal(5, 1, 240)], axis=1)
    names = np.array(["no", "yes"])[labels].tolist()
    rows = [[a, b, name] for (a, b), name in zip(values.tolist(), names, strict=True)]
    file = write(tmp_path / "all.csv", ["a", "b", "kind"], rows[:200])
    of_one = [[b, "x", name, a] for a, b, name in rows if name == "yes"][:20]
    site = write(tmp_path / "site.csv", ["b", "note", "kind", "a"], of_one)
    written = tmp_path / "delivered.safetensors"
    left = in_process(
        tmp_path, 3, {2: {"data-path": str(site), "model-path": str(written)}}, dataset=str(file), partitioner="iid",
        normalise="dataset", num_server_rounds=4, learning_rate=0.01,
    )  # fmt: skip
    lines = read_lines(left)
    assert not any(line["refused"] or line["lost"] for line in lines) and lines[-1]["accuracy"] > 0.9
    new = write(tmp_path / "new.csv", ["a", "other", "b"], [[1300, "", 5], [1000, "?", 5]])
    for model in (left, written):
        rows_found = load_predictor(model).predict_files([new])
        assert [(row.class_name, row.true_label) for row in rows_found] == [("yes", None), ("no", None)]
    with pytest.raises(ValueError, match=r"short\.csv: has no column b; it has a"):
        load_predictor(left).predict_files([write(tmp_path / "short.csv", ["a"], [[1]])])
    with pytest.raises(ValueError, match=r"names in column kind maybe are not in the run's class-names \(no, yes\)"):
        load_predictor(left).predict_files([write(tmp_path / "odd.csv", ["a", "b", "kind"], [[1, 2, "maybe"]])])


def test_a_site_that_lacks_numbered_classes_builds_the_runs_model(tmp_path: Path) -> None:
    rows = [[float(n % 3), -n / 100, n % 3] for n in range(150)]
    file = write(tmp_path / "all.csv", ["a", "b", "stage"], rows)
    site = write(tmp_path / "site.csv", ["a", "b", "stage"], [row for row in rows if row[2] == 1][:20])
    left = in_process(
        tmp_path, 3, {2: {"data-path": str(site)}}, dataset=str(file), partitioner="iid", label_column="stage",
        num_server_rounds=2,
    )  # fmt: skip
    assert not any(line["refused"] or line["lost"] for line in read_lines(left))
    assert load_predictor(left).model.state_dict()["head.weight"].shape[0] == 3


# Reading


@pytest.mark.parametrize("form", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_classes_are_names_or_whole_numbers(tmp_path: Path, form: str) -> None:
    rows: list[list[Any]] = [[n / 2, -n, "mild" if n % 3 else "grave", float(n % 3), n] for n in range(12)]
    file = write(tmp_path / f"t{form}", ["dose", "age", "degree", "stage", "id"], rows)
    named = sources.named_source(config_of(file, **{"feature-columns": "age, dose", "label-column": "degree"}),
                                 LabelledNumbers)  # fmt: skip
    assert isinstance(named.train, LabelledNumbers) and named.class_names == ("grave", "mild")
    assert named.train.inputs.tolist() == [[-n, n / 2] for n in range(12)]
    assert named.train.labels.tolist() == [1 if n % 3 else 0 for n in range(12)]
    numbered = sources.named_source(config_of(file, **{"feature-columns": "age", "label-column": "stage"}),
                                    LabelledNumbers)  # fmt: skip
    assert numbered.train.labels.tolist() == [n % 3 for n in range(12)]  # type: ignore[union-attr]
    assert (numbered.classes, numbered.class_names) == (3, ())


def test_a_text_that_python_reads_as_a_number_is_a_name(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", ["a", "kind"], [[n / 2, ["1_0", "2_0", "x"][n % 3]] for n in range(12)])
    config = config_of(file, **{"feature-columns": "a", "label-column": "kind"})
    source = sources.named_source(config, LabelledNumbers)
    assert (source.class_names, source.classes) == (("1_0", "2_0", "x"), 3)


def test_with_a_number_among_class_names_another_number_is_no_position(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", ["a", "kind"], [[n / 2, [1.0, 2.0, 3.0][n % 3]] for n in range(12)])
    config = config_of(file, **{"feature-columns": "a", "label-column": "kind", "class-names": "1,2,3"})
    source = sources.named_source(config, LabelledNumbers)
    assert source.train.labels.tolist() == [n % 3 for n in range(12)]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"names in column kind 3 are not in the run's class-names \(1, 2, 4\)"):
        sources.named_source(config.model_copy(update={"class_names": "1,2,4"}), LabelledNumbers)


def test_numbers_among_class_names_are_names_in_a_table_and_in_arrays_of_numbers_and_images(tmp_path: Path) -> None:
    grades = [4, 1, 3, 2, 4, 1]
    names = {"class-names": "1,2,3,4,5"}
    table = write(tmp_path / "t.csv", ["a", "grade"], [[n / 2, grade] for n, grade in enumerate(grades)])
    np.savez(tmp_path / "n.npz", x=np.arange(6.0)[:, None], y=grades)
    np.savez(tmp_path / "i.npz", x_train=np.zeros((6, 4, 4)), y_train=grades, x_test=np.zeros((1, 4, 4)), y_test=[[5]])
    columns = {"feature-columns": "a", "label-column": "grade"}
    found = [
        sources.named_source(config_of(table, **columns, **names), LabelledNumbers),
        sources.named_source(config_of(tmp_path / "n.npz", **names), LabelledNumbers),
        sources.named_source(DataConfig.model_validate({"dataset": str(tmp_path / "i.npz"), **names})),
    ]
    assert [one.train.labels.tolist() for one in found] == [[grade - 1 for grade in grades]] * 3  # type: ignore[union-attr]
    assert found[2].test is not None and found[2].test.labels.tolist() == [4]  # type: ignore[union-attr]
    np.savez(tmp_path / "i.npz", x=np.zeros((6, 4, 4)), y=[0, *grades[1:]])
    with pytest.raises(DataError, match=r"i\.npz: x and y: names in column label 0 are not in the run's class-names"):
        sources.named_source(DataConfig.model_validate({"dataset": str(tmp_path / "i.npz"), **names}))


@pytest.mark.parametrize("classes", [np.arange(40) % 2, np.array(["a", "b"])[np.arange(40) % 2], np.arange(40.0) % 2])
def test_arrays_have_classes_too(tmp_path: Path, classes: np.ndarray) -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "a.npz", x_train=inputs, y_train=classes, x_test=inputs[:5], y_test=classes[:5])
    source = sources.named_source(config_of(tmp_path / "a.npz"), LabelledNumbers)
    assert isinstance(source.train, LabelledNumbers) and isinstance(source.test, LabelledNumbers)
    assert source.train.labels.tolist() == [n % 2 for n in range(40)] and source.test.labels.tolist() == [0, 1, 0, 1, 0]


def test_a_column_without_a_name_is_no_feature(tmp_path: Path) -> None:
    file = write(tmp_path / "pandas.csv", ["", "a", "kind", "b"], [[n, n / 3, "uv"[n % 2], 1] for n in range(20)])
    assert settled(config_of(file)) == {"feature-columns": "a,b"}


@pytest.mark.parametrize("form", [".csv", ".tsv", ".parquet"])
def test_a_column_that_occurs_twice_is_refused_if_it_is_used(tmp_path: Path, form: str) -> None:
    rows = [[n, n / 3, -n, "uv"[n % 2]] for n in range(20)]
    file, header = tmp_path / f"t{form}", ["a", "v", "v", "kind"]
    if form == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_arrays([*map(pyarrow.array, zip(*rows, strict=True))], header), file)
    else:
        write(file, header, rows)
    for columns in ("*", "a,v"):
        with pytest.raises(DataError, match=f"^{file}: column v occurs 2 times: rename or remove one$"):
            sources.named_source(config_of(file, **{"feature-columns": columns}), LabelledNumbers)
    one = sources.named_source(config_of(file, **{"feature-columns": "a"}), LabelledNumbers)
    assert one.train.inputs[:, 0].tolist() == [*range(20)]  # type: ignore[union-attr]


def test_statistics_are_those_of_what_the_clients_have_and_a_constant_stays_finite(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", ["a", "b", "kind"], [[n**2, 7, n % 2] for n in range(50)])
    config = config_of(file, normalise="dataset", partitioner="iid")
    clients = [client_inputs(config, {"partition-id": k, "num-partitions": 2}, client=f"c{k}") for k in range(2)]
    held = held_out_inputs(config)
    assert held is not None
    values = np.concatenate([part.values for each in clients for part in (each.train, each.test)])
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(values.std(axis=0), [1, 0], atol=1e-5)
    assert set(held.values[:, 1]) == {0.0} and abs(held.values[:, 0].mean()) > 1e-3


def test_numbers_are_normalised_by_given_means_also_for_a_regression(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 5, 3))
    np.savez(tmp_path / "a.npz", x=inputs, y=inputs[:, 0, 0])
    config = {"model": "linear-attention", "partitioner": "iid"}
    plain = held_out_inputs(config_of(tmp_path / "a.npz", **config))
    scaled = held_out_inputs(config_of(tmp_path / "a.npz", normalise="1,2,3/4,5,6", **config))
    assert plain is not None and scaled is not None
    np.testing.assert_allclose(scaled.values, (plain.values - [1, 2, 3]) / [4, 5, 6], rtol=1e-5)
    np.testing.assert_array_equal(scaled.labels, plain.labels)


def test_features_of_another_scale_are_remarked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = published(load_breast_cancer(), tmp_path / "t.csv")
    sources.named_source(config_of(file, normalise="dataset"), LabelledNumbers)
    assert not caplog.text
    sources.named_source(config_of(file), LabelledNumbers)
    assert "column worst area has mean 880.6 and standard deviation 568.9" in caplog.text
    assert 'set normalise to "dataset"' in caplog.text


# Errors


ROWS: list[list[Any]] = [[n, n / 4, "lo" if n % 2 else "hi", f"id{n}", n * 1.5, n * 1000] for n in range(60)]
HEADER = ["age", "dose", "kind", "id", "cost", "units"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"feature-columns": ""}, r"feature-columns is empty, and a model for numbers needs it.*\"\*\" for all other"),
        ({"label-column": ""}, r"label-column is empty"),
        ({"label-column": "diagnosis", "feature-columns": "age"}, r"has no column diagnosis; it has age.*label-column"),
        ({"label-column": "kind,cost", "feature-columns": "age"}, "names several columns, and a class"),
        ({"label-column": "age", "feature-columns": "age"}, "remove the class from the inputs"),
        ({}, r"row 1 has 'id0' in column id, which is not a number"),
        ({"label-column": "cost", "feature-columns": "age"},
         r"row 2 has 1\.5 in column cost \(label-column\), which is no class.*for a regression choose model="),
        ({"label-column": "units", "feature-columns": "age"}, "60 different values up to class 59,000 in 60 rows"),
        ({"label-column": "id", "feature-columns": "age"}, "60 different values up to class 59 in 60 rows, .* hardly"),
        ({"feature-columns": "age", "class-names": "hi,mid"}, "names in column kind lo are not in the run's class-nam"),
        ({"feature-columns": "age", "classes": 3}, r"2 names in column kind \(hi, lo\), but the run has 3 classes"),
        ({"feature-columns": "age", "features": 2}, "has 1 features, but the run has 2"),
        ({"feature-columns": "age", "normalise": "1,2/3,4"}, "has 2 values, but inputs have 1 features"),
        ({"feature-columns": "age", "normalise": "own"}, "choose one of mnist"),
        ({"dataset": "local"}, 'set feature-columns .* and class-names'),
        ({"dataset": "local", "features": 3, "classes": 2}, r'feature-columns="\*" and dataset="local".*name them'),
        ({"dataset": "local", "feature-columns": "age", "classes": 2, "normalise": "dataset"},
         "the server has no data: give the features' means"),
        ({"model": "tiny-vit"}, r'is for numbers: leave it empty, or choose .*classifies numbers \(model="mlp"'),
        ({"model": "tiny-vit", "feature-columns": ""}, 'has no column image.*Numbers need a model for numbers'),
        ({"model": "linear-attention", "feature-columns": "age", "partitioner": "iid"},
         r"row 1 has 'hi' in column kind, which is not .* if label-column has classes, choose .*model=\"mlp\""),
    ],
)  # fmt: skip
def test_a_table_or_a_key_that_does_not_fit_is_an_error_before_the_run(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    file = write(tmp_path / "t.csv", HEADER, ROWS)
    with pytest.raises(ConfigError, match=said):
        read_run_config({"dataset": str(file), **TABLE, **config})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (["", 1, "hi"], "row 61 has nothing in column age"),
        (["nan", 1, "hi"], "row 61 has nan in column age"),
        ([1, "?", "hi"], r"row 61 has '\?' in column dose"),
        ([1, 1, ""], r"row 61 has no label \(column kind\)"),
        ([1, 1, "nan"], "row 61 has nan in column kind .*no class"),
    ],
)
def test_a_row_with_something_missing_is_named(tmp_path: Path, row: list[Any], said: str) -> None:
    file = write(tmp_path / "t.csv", HEADER[:3], [*(each[:3] for each in ROWS), row])
    with pytest.raises(DataError, match=f"client ward-3: {file}: {said}"):
        config = DataConfig.model_validate({"dataset": "local", "feature-columns": "age,dose", "label-column": "kind"})
        load_client(config, {"data-path": str(file)}, client="ward-3", kind=LabelledNumbers)


def test_one_class_and_arrays_of_sequences_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", ["a", "kind"], [[n, "all"] for n in range(30)])
    with pytest.raises(DataError, match=r"column kind \(label-column\) has one class in all rows"):
        table_info(config_of(file))
    np.savez(tmp_path / "a.npz", x=np.ones((30, 4, 2)), y=np.arange(30) % 2)
    with pytest.raises(DataError, match=r"inputs have shape \(30, 4, 2\); a classification of numbers takes"):
        table_info(config_of(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", x=np.ones((30, 2)), y=np.ones((30, 2)))
    with pytest.raises(DataError, match=r"classes are float64 of shape \(30, 2\)"):
        table_info(config_of(tmp_path / "b.npz"))
    np.savez(tmp_path / "c.npz", x=np.ones((0, 2)), y=np.ones(0, int))
    with pytest.raises(DataError, match=r"no examples \(inputs have shape \(0, 2\)\)"):
        table_info(config_of(tmp_path / "c.npz"))
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(DataError, match="has no column kind"):
        table_info(config_of(empty))


def test_the_class_and_the_example_go_together(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", ["a", "kind"], [[n, "uv"[n % 2]] for n in range(100)])
    config = config_of(file, partitioner="dirichlet")
    for k in range(3):
        node = {"partition-id": k, "num-partitions": 3}
        client = load_client(config, node, client=f"c{k}", kind=LabelledNumbers)
        for part in (client.train, client.test):
            assert (part.inputs[:, 0] % 2).tolist() == part.labels.tolist()
