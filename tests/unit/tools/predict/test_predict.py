"""What `tepal predict` says of files, against the model called by hand; and what it says of files that do not fit."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.numpy import save_file

from tepal import models
from tepal.records.run_directory import RunDirectory
from tepal.tools.predict import predict as module
from tepal.tools.predict.numbers import NumberPrediction, error_of
from tepal.tools.predict.predict import load_predictor
from tepal.tools.predict.results import Prediction, accuracy, results_table, write_csv

SHAPE = (1, 8, 8)
TOLD = {"model": "tiny-vit", "image-shape": "1x8x8", "classes": "10"}


def tiny_vit(seed=0):
    """Its head is made to tell random images apart, which that of a new model hardly does."""
    model = models.build("tiny-vit", image_shape=SHAPE, classes=10, seed=seed).eval()
    noise = torch.rand(64, *SHAPE, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        model.head.weight.mul_(20)
        model.head.bias.sub_(model(noise).mean(dim=0))
    return model


def arrays(seed=0):
    return {name: tensor.numpy() for name, tensor in tiny_vit(seed).state_dict().items()}


def ensemble(*seeds):
    return {f"mode/{k}/{name}": array for k, seed in enumerate(seeds) for name, array in arrays(seed).items()}


@pytest.fixture
def saved(tmp_path):
    """Write a model file and return its path."""

    def save(tensors, metadata=TOLD, name="some.safetensors"):
        save_file(tensors, tmp_path / name, metadata=metadata)
        return tmp_path / name

    return save


@pytest.fixture
def images():
    return np.random.default_rng(3).integers(0, 256, (30, 8, 8), dtype=np.uint8)


def png(file, pixels):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return file


def npz(file, **contents):
    np.savez(file, **contents)
    return file


def by_hand(pixels, *seeds):
    """Mean probabilities (n, classes) and each member's labels (K, n) for pixels 0..255."""
    inputs = torch.from_numpy(np.asarray(pixels, dtype=np.float32).reshape(-1, *SHAPE) / 255)
    with torch.no_grad():
        logits = np.stack([tiny_vit(seed)(inputs).double().numpy() for seed in seeds])
    powers = np.exp(logits)
    return (powers / powers.sum(axis=-1, keepdims=True)).mean(axis=0), logits.argmax(axis=-1)


def assert_rows_are(rows, mean, member_labels):
    labels = mean.argmax(axis=1)
    assert [row.label for row in rows] == labels.tolist()
    np.testing.assert_allclose([row.probability for row in rows], mean.max(axis=1), rtol=1e-4)
    np.testing.assert_allclose([row.entropy for row in rows], -(mean * np.log(mean)).sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose([row.disagreement for row in rows], (member_labels != labels).mean(axis=0))


# Where a model comes from


def test_a_run_directory_the_folder_of_runs_and_the_file_are_one_model(tmp_path, images):
    config = {"strategy": "fedavg", "model": "tiny-vit", "image-shape": "1x8x8", "classes": 10}
    run = RunDirectory.create(tmp_path / "runs", "fedavg", config)
    file = run.write_model(arrays(4))
    data = npz(tmp_path / "a.npz", images=images)
    rows = [load_predictor(path).predict_files([data]) for path in (run.path, tmp_path / "runs", file)]
    assert rows[0] == rows[1] == rows[2]
    assert_rows_are(rows[0], *by_hand(images, 4))


def test_images_are_normalised_as_they_were_in_training(tmp_path, images):
    config = {"strategy": "fedavg", "model": "tiny-vit", "image-shape": "1x8x8", "classes": 10, "normalise": "0.2/0.5"}
    run = RunDirectory.create(tmp_path / "runs", "fedavg", config)
    run.write_model(arrays(4))
    rows = load_predictor(run.path).predict_files([npz(tmp_path / "a.npz", images=images)])
    assert_rows_are(rows, *by_hand((images / 255 - 0.2) / 0.5 * 255, 4))


def test_an_ensemble_in_a_run_directory_predicts_with_the_mean_of_its_modes(tmp_path, images):
    run = RunDirectory.create(tmp_path, "fed-ensemble", {"model": "tiny-vit", "dataset": "digits"})
    run.write_model(ensemble(0, 1, 2), {"image-shape": "1x8x8", "classes": "10"})
    predictor = load_predictor(run.path)
    rows = predictor.predict_files([npz(tmp_path / "a.npz", images=images)])
    assert predictor.members == 3
    assert_rows_are(rows, *by_hand(images, 0, 1, 2))
    assert len({row.disagreement for row in rows}) > 1 and len({row.label for row in rows}) > 4, "this shows nothing"


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_the_csv_has_class_probability_entropy_and_disagreement_of_every_row(tmp_path, images, seeds):
    run = RunDirectory.create(tmp_path, "some", {"model": "tiny-vit", "dataset": "digits"})
    run.write_model(arrays(0) if len(seeds) == 1 else ensemble(*seeds), {"image-shape": "1x8x8", "classes": "10"})
    write_csv(load_predictor(run.path).predict_files([npz(tmp_path / "a.npz", images=images)]), tmp_path / "out.csv")
    mean, member_labels = by_hand(images, *seeds)
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(images)
    for line, probabilities, labels in zip(lines, mean.tolist(), member_labels.T.tolist(), strict=True):
        probability = max(probabilities)
        assert int(line["label"]) == probabilities.index(probability)
        assert float(line["probability"]) == pytest.approx(probability, rel=1e-4)
        assert float(line["entropy"]) == pytest.approx(-sum(p * np.log(p) for p in probabilities), rel=1e-4)
        others = sum(label != int(line["label"]) for label in labels)
        assert float(line["disagreement"]) == pytest.approx(others / len(seeds))
        assert len(seeds) > 1 or others == 0


def test_more_than_ten_modes_are_told_apart(saved, tmp_path, images):
    """mode/1/ is not the beginning of mode/10/."""
    predictor = load_predictor(saved(ensemble(*range(11))))
    assert_rows_are(predictor.predict_files([npz(tmp_path / "a.npz", x=images)]), *by_hand(images, *range(11)))


@pytest.mark.parametrize(
    "metadata",
    [
        TOLD,
        {"config": json.dumps({"model": "tiny-vit", "image-shape": "1x8x8", "classes": 10})},
        {"config": json.dumps({"model": "cnn", "image-shape": "3x32x32", "classes": 5}), **TOLD},
        {"model": "tiny-vit", "dataset": "digits", "config": json.dumps({"image-shape": "", "classes": 0})},
    ],
    ids=["beside the config", "in the config", "beside goes before", "by the dataset"],
)
def test_what_to_build_is_in_the_metadata(saved, metadata):
    predictor = load_predictor(saved(arrays(), metadata))
    assert (predictor.info.shape, predictor.info.classes, predictor.members) == (SHAPE, 10, 1)


def regressors(*seeds):
    """An ensemble's tensors, and its outputs (K, n, 2) for inputs (n, 3, 4)."""
    made = [models.build("linear-attention", features=4, outputs=2, seed=seed) for seed in seeds]
    tensors = {f"mode/{k}/{name}": one for k, model in enumerate(made) for name, one in model.state_dict().items()}
    inputs = np.random.default_rng(5).normal(size=(30, 3, 4))
    with torch.no_grad():
        said = np.stack([model(torch.from_numpy(inputs).float()).double().numpy() for model in made])
    return {name: tensor.numpy() for name, tensor in tensors.items()}, inputs, said


@pytest.mark.parametrize("beside", [True, False])
def test_an_ensembles_regression_is_the_mean_of_its_outputs(saved, tmp_path, beside):
    tensors, inputs, said = regressors(0, 1, 2)
    data = npz(tmp_path / "a.npz", x=inputs, y=said[0])
    sizes = {"features": "4", "outputs": "2"} if beside else {"dataset": str(data)}
    predictor = load_predictor(saved(tensors, {"model": "linear-attention", **sizes}))
    rows = predictor.predict_files([data])
    np.testing.assert_allclose([row.outputs for row in rows], said.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose([row.deviations for row in rows], said.std(axis=0), rtol=1e-4)
    np.testing.assert_allclose([row.targets for row in rows], said[0], rtol=1e-5)
    error = np.sqrt(((said.mean(axis=0) - said[0]) ** 2).mean())
    assert error_of(rows) == pytest.approx(error, rel=1e-5)
    out = io.StringIO()
    Console(file=out, width=120).print(results_table(rows))
    assert f"RMSE {error:.4f} on 30 examples with a target" in out.getvalue() and "… and 10 more" in out.getvalue()
    write_csv(rows, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    columns = [f"{what}_{k}" for what in ("output", "deviation", "target") for k in (0, 1)]
    assert list(last) == ["file", "index", *columns]
    assert (last["index"], float(last["output_1"])) == ("29", pytest.approx(said.mean(axis=0)[-1, 1], rel=1e-5))


def test_numbers_without_targets_are_predicted_and_what_does_not_fit_is_named(saved, tmp_path):
    tensors, inputs, said = regressors(3)
    told = {"model": "linear-attention", "features": "4", "outputs": "2"}
    predictor = load_predictor(saved({name.removeprefix("mode/0/"): array for name, array in tensors.items()}, told))
    rows = predictor.predict_files([npz(tmp_path / "a.npz", x=inputs)])
    np.testing.assert_allclose([row.outputs for row in rows], said[0], rtol=1e-5)
    assert {row.targets for row in rows} == {None} and error_of(rows) is None
    for name, file, message in (
        ("b.npz", {"x": inputs[..., :3]}, "has 3 features, but the run has 4"),
        ("c.npz", {"z": inputs}, "has no array of inputs; it has z"),
    ):
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            predictor.predict_files([npz(tmp_path / name, **file)])
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="was trained without feature-columns"):
        predictor.predict_files([tmp_path / "t.csv"])
    with pytest.raises(ValueError, match=r"p\.png: allowed for this model are \.npz files and tables"):
        predictor.predict_files([png(tmp_path / "p.png", np.zeros((8, 8), np.uint8))])
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        predictor.predict_files([tmp_path / "gone.npz"])


def without(name):
    return {key: array for key, array in ensemble(0, 1, 2).items() if not key.startswith(name)}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        (arrays(), None, "does not name the model.*image-shape and classes"),
        (arrays(), {**TOLD, "model": "tiny-vti"}, "unknown model 'tiny-vti': did you mean 'tiny-vit'"),
        (arrays(), {**TOLD, "model": "char-lstm"}, "has no tensor 'embedding.weight'; the model 'char-lstm' needs it"),
        (arrays(), {**TOLD, "image-shape": "8x8"}, "image-shape='8x8'.*CxHxW"),
        (arrays(), {**TOLD, "config": "{"}, "metadata is not JSON"),
        (arrays(), {**TOLD, "config": "[1]"}, "not a JSON object"),
        (arrays(), {"model": "tiny-vit"}, "no image-shape and classes, and no dataset"),
        (
            arrays(),
            {"model": "tiny-vit", "dataset": "gone.npz"},
            "its dataset cannot be read: .*gone.npz: no such",
        ),
        (arrays(), {**TOLD, "classes": "7"}, r"'head.weight' has shape \(10, 64\); .*'tiny-vit' needs \(7, 64\)"),
        (arrays(), {**TOLD, "model": "cnn"}, "has no tensor '.*'; the model 'cnn' needs it with shape"),
        (arrays() | {"more": np.zeros(1)}, TOLD, "has a tensor 'more' that the model 'tiny-vit' does not have"),
        (without("mode/1/"), TOLD, "it has mode 2, but no mode 1"),
        (without("mode/0/"), TOLD, "it has mode 2, but no mode 0"),
        (without("mode/1/norm.bias"), TOLD, r"no tensor 'mode/1/norm.bias'; .* needs it with shape \(64,\)"),
        (ensemble(0) | {"norm.bias": np.zeros(64)}, TOLD, "'norm.bias' in addition to those of an ensemble"),
    ],
)
def test_a_file_that_is_not_the_model_it_should_be_is_named(saved, tensors, metadata, message):
    with pytest.raises(ValueError, match=rf"(?s)some\.safetensors: .*{message}"):
        load_predictor(saved(tensors, metadata))


def test_an_ensemble_without_its_last_modes_is_no_ensemble(saved):
    config = json.dumps({"strategy": "fedensemble", "fedensemble.modes": 3})
    with pytest.raises(ValueError, match="part of the ensemble is missing: it has 2 of its 3 modes"):
        load_predictor(saved(ensemble(1, 2), {**TOLD, "config": config}))


def test_the_mean_of_personal_models_comes_with_a_caution_and_a_clients_own_without(tmp_path, saved):
    config = {"strategy": "fedacs", "model": "tiny-vit", "image-shape": "1x8x8", "classes": 10}
    run = RunDirectory.create(tmp_path / "runs", "fedacs", config)
    run.write_model({name: array.numpy() for name, array in tiny_vit().state_dict().items()})
    assert "mean of the clients' personal models" in load_predictor(run.path).caution
    assert load_predictor(saved(arrays(), {**TOLD, "config": json.dumps(config)})).caution == ""


def test_a_file_of_another_kind_is_no_model(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ValueError, match=r"model\.pt: not a readable safetensors file"):
        load_predictor(tmp_path / "model.pt")


def test_a_model_that_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder; expected is a run directory"):
        load_predictor(tmp_path / "nowhere")
    run = RunDirectory.create(tmp_path / "runs", "fedavg", TOLD)
    with pytest.raises(FileNotFoundError, match="writes its model when it ends"):
        load_predictor(run.path)
    with pytest.raises(FileNotFoundError, match="not a run directory"):
        load_predictor(tmp_path)


# What is predicted


@pytest.fixture
def predictor(saved):
    return load_predictor(saved(ensemble(0, 1)))


def test_image_files_and_folders_are_predicted_in_order(tmp_path, predictor, images):
    single = png(tmp_path / "single.PNG", images[0])
    folder = tmp_path / "folder"
    inside = [png(folder / name, images[i + 1]) for i, name in enumerate(["a.png", "b/1.bmp", "b/2.png", "c.tiff"])]
    for passed_over in (".hidden.png", ".thumbnails/x.png"):
        png(folder / passed_over, images[9])
    (folder / "notes.txt").write_text("no image")
    rows = predictor.predict_files([folder, single])
    assert [(row.file, row.index) for row in rows] == [(file, None) for file in [*inside, single]]
    assert_rows_are(rows, *by_hand(images[[1, 2, 3, 4, 0]], 0, 1))
    assert all(row.true_label is None for row in rows) and accuracy(rows) is None


def test_image_files_are_made_what_the_model_needs(tmp_path, predictor):
    """A colour image of twice the size in one colour is that colour's grey everywhere."""
    file = png(tmp_path / "large.png", np.full((16, 16, 3), (200, 200, 200), np.uint8))
    assert_rows_are(predictor.predict_files([file]), *by_hand(np.full((8, 8), 200), 0, 1))


@pytest.mark.parametrize(
    "contents",
    [
        lambda images, labels: {"images": images, "labels": labels},
        lambda images, labels: {"x": images[..., None], "y": labels[:, None]},
        lambda images, labels: {"x": (images[:, None] / 255).astype(np.float32), "y": labels},
        lambda images, labels: {"x_train": images[:1] * 0, "y_train": labels[:1], "x_test": images, "y_test": labels},
        lambda images, labels: {"test_images": images, "test_labels": labels},
    ],
    ids=["images", "x, channels last", "floats", "the test set", "only a test set"],
)
def test_arrays_with_labels_give_an_accuracy(tmp_path, predictor, images, contents):
    mean, member_labels = by_hand(images, 0, 1)
    labels = mean.argmax(axis=1)
    labels[:6] = (labels[:6] + 1) % 10
    rows = predictor.predict_files([npz(tmp_path / "a.npz", **contents(images, labels))])
    assert_rows_are(rows, mean, member_labels)
    assert [row.index for row in rows] == list(range(30))
    assert [row.true_label for row in rows] == labels.tolist()
    assert accuracy(rows) == 24 / 30


def test_arrays_of_another_size_are_resized_as_image_files_are(tmp_path, predictor):
    pixels = np.random.default_rng(1).integers(0, 256, (3, 20, 12), dtype=np.uint8)
    files = [png(tmp_path / f"{number}.png", one) for number, one in enumerate(pixels)]
    expected = predictor.predict_files(files)
    found = predictor.predict_files([npz(tmp_path / "a.npz", x=pixels)])
    assert [(row.label, row.probability) for row in found] == [(row.label, row.probability) for row in expected]
    coloured = predictor.predict_files([npz(tmp_path / "b.npz", x=np.full((1, 16, 16, 3), 200, np.uint8))])
    assert_rows_are(coloured, *by_hand(np.full((8, 8), 200), 0, 1))


def test_how_many_are_in_memory_at_once_does_not_matter(tmp_path, predictor, images, monkeypatch):
    files = [npz(tmp_path / "a.npz", x=images), *(png(tmp_path / f"{i:02}.png", images[i]) for i in range(9))]
    done = []
    whole = predictor.predict_files(files)
    monkeypatch.setattr(module, "_AT_ONCE", 4)
    parts = predictor.predict_files(files, done.append)
    assert [(row.file, row.index, row.label) for row in parts] == [(row.file, row.index, row.label) for row in whole]
    assert_rows_are(parts, *by_hand(np.concatenate([images, images[:9]]), 0, 1))
    assert done == [4, 8, 12, 16, 20, 24, 28, 30, 34, 38, 39]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda to: to / "gone.png", "gone.png: no such file"),
        (lambda to: (to / "a.txt").write_bytes(b"text") and to / "a.txt", "a.txt: not an image or .npz file"),
        (lambda to: (to / "b.png").write_bytes(b"text") and to / "b.png", "b.png: not a readable image"),
        (lambda to: (to / "b.npz").write_bytes(b"text") and to / "b.npz", "b.npz: not a readable .npz file"),
        (lambda to: (to / "empty").mkdir() or to / "empty", "empty: no image in this folder or below it"),
        (lambda to: npz(to / "c.npz", x=np.zeros((0, 8, 8))), "c.npz: x: no examples"),
        (lambda to: npz(to / "c.npz", x=np.float32(1)), r"c.npz: x: images have shape \(\)"),
        (lambda to: npz(to / "c.npz", x=np.full((1, 8, 8), 7.0)), "c.npz: x: .*floats must lie in 0..1"),
        (lambda to: npz(to / "c.npz", x=np.zeros((2, 8, 8)), y=[0, 12]), "c.npz: x and y: label 12"),
        (lambda to: npz(to / "c.npz", z=np.zeros((2, 8, 8))), "c.npz: has no array of images; it has z.*images_test"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_predicted_are_named(tmp_path, predictor, write, message):
    file = write(tmp_path)
    with pytest.raises((ValueError, OSError), match=f"(?s){message}"):
        predictor.predict_files([file])


def test_image_files_are_not_for_a_model_of_two_channels(saved, tmp_path, images):
    model = models.build("tiny-vit", image_shape=(2, 8, 8), classes=10, seed=0)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    predictor = load_predictor(saved(tensors, {**TOLD, "image-shape": "2x8x8"}))
    with pytest.raises(ValueError, match=r"a.png: .*the model needs 2: give it arrays in a \.npz file"):
        predictor.predict_files([png(tmp_path / "a.png", images[0])])


def test_a_model_that_diverged_is_no_source_of_predictions(saved, tmp_path, images):
    tensors = arrays()
    tensors["head.bias"] = np.full(10, np.nan, np.float32)
    with pytest.raises(ValueError, match=r"some\.safetensors: .*NaN"):
        load_predictor(saved(tensors)).predict_files([png(tmp_path / "a.png", images[0])])


# What is shown of it


def rows_of(file, count, true_label=None):
    return [Prediction(file, i, i % 10, 0.5 + i / 1000, 0.25, 1 / 3, true_label) for i in range(count)]


def shown(rows):
    console = Console(file=io.StringIO(), width=100)
    console.print(results_table(rows), soft_wrap=True)
    return console.file.getvalue()


def test_the_csv_has_every_row_in_full(tmp_path):
    rows = [*rows_of(tmp_path / "a.npz", 25, 4), Prediction(tmp_path / 'b, "c".png', None, 3, 0.1, 2.0, 0.0)]
    write_csv(rows, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [
        "file", "index", "label", "class_name", "probability", "entropy", "disagreement", "true_label"
    ]  # fmt: skip
    assert [line["file"] for line in read] == [str(row.file) for row in rows]
    assert [float(line["disagreement"]) for line in read] == [row.disagreement for row in rows]
    assert (read[24]["index"], read[24]["true_label"]) == ("24", "4")
    assert (read[25]["index"], read[25]["true_label"]) == ("", "")


def test_names_of_classes_and_files_are_neither_formulas_nor_commands_to_a_terminal(tmp_path):
    names = ["=HYPERLINK(0)", "a\x1b[2Jb", "-", "cat"]
    rows = [Prediction(Path("a\x1b]0;b.png"), None, 3, 0.1, 2.0, 0.0, class_name=name) for name in names]
    write_csv(rows, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["class_name"] for line in read] == ["'=HYPERLINK(0)", *names[1:]]
    assert [line["file"] for line in read] == [str(row.file) for row in rows], "to be opened by their names"
    text = shown(rows)
    assert "\x1b" not in text and r"a\x1b[2Jb" in text and r"a\x1b]0;b.png" in text


def test_names_of_files_are_no_formulas_and_still_open_them(tmp_path):
    names = ["=cmd|'x'!A0.npz", "-1.npz", "@a/b.npz", "a=b.npz", str(tmp_path / "=a.npz")]
    expected = ["./=cmd|'x'!A0.npz", "./-1.npz", "./@a/b.npz", *names[3:]]
    of_classes = [Prediction(Path(name), 0, 3, 0.1, 2.0, 0.0) for name in names]
    of_numbers = [NumberPrediction(Path(name), 0, (1.0,), (0.0,), None) for name in names]
    for rows in (of_classes, of_numbers):
        write_csv(rows, tmp_path / "out.csv")
        with (tmp_path / "out.csv").open(newline="") as file:
            assert [line["file"] for line in csv.DictReader(file)] == expected


def test_the_csv_takes_names_that_are_not_text(tmp_path):
    name = b"caf\xe9.png"
    write_csv([Prediction(tmp_path / name.decode("utf-8", "surrogateescape"), None, 3, 0.1, 2.0, 0.0)], tmp_path / "o")
    assert name in (tmp_path / "o").read_bytes()


def test_a_csv_that_cannot_be_written_names_its_place(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        write_csv(rows_of(tmp_path / "a.npz", 1), tmp_path / "nowhere" / "out.csv")


def test_the_terminal_has_the_first_rows_and_how_many_more():
    text = shown(rows_of(Path("a.npz"), 1234))
    assert "a.npz[19]" in text and "a.npz[20]" not in text
    assert "… and 1,214 more" in text
    assert "Accuracy" not in text and "true" not in text
    assert "more" not in shown(rows_of(Path("a.npz"), 20))


def test_the_terminal_has_the_accuracy_of_what_has_labels():
    rows = [*rows_of(Path("a.npz"), 10, 4), Prediction(Path("b.png"), None, 3, 0.1, 2.0, 0.0)]
    assert "Accuracy 0.1000 on 10 examples with a label" in shown(rows)


def test_file_names_are_shown_as_they_are():
    odd = Path(b"[red]\xff.png".decode("utf-8", "surrogateescape"))
    assert "[red]\N{REPLACEMENT CHARACTER}.png" in shown(rows_of(odd, 1))
