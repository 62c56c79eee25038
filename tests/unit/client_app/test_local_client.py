"""Sites whose data is not alike, or changes while a process keeps it: what is said, and what is read anew."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from PIL import Image
from torch import nn

from tepal.client_app import local_client
from tepal.client_app.app import app
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training.config import TrainingConfig
from tepal.training.data import DataError, dataset_stamp, load_client, own_stamp, sources, stored
from tepal.training.data.inputs import InputConfig
from tepal.training.loop import Batches, fit
from tepal.training.tasks import IMAGES
from tests.lines import read_lines


def folder(root, names, values=(0, 255)):
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for value in values:
            Image.fromarray(np.full((8, 8), (value + number) % 256, np.uint8)).save(root / name / f"{value}.png")
    return str(root)


def npz(file, classes):
    labels = np.arange(6 * classes) % classes
    np.savez(file, x=np.zeros((len(labels), 8, 8), np.uint8), y=labels)
    return str(file)


def refused(tmp_path, monkeypatch, paths, **config):
    """Client → why it could not take part, of a run over nodes with these data-paths."""
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    given = {**defaults(), "runs": str(tmp_path / "runs"), "strategy": "fedavg", "num-server-rounds": 1}
    given |= {"min-clients": 1, "local-steps": 1, **{key.replace("_", "-"): value for key, value in config.items()}}
    nodes = [Node(app, {"data-path": path, "partition-id": k}) for k, path in enumerate(paths)]
    (line, *_) = read_lines(run(InProcessGrid(nodes, given), given))
    # A node that refuses its introduction has no settled name: "node 2 (client-1)".
    return {one["client"].partition(" (")[2].removesuffix(")"): one["reason"] for one in line["refused"]}


@pytest.mark.parametrize("write", [npz, lambda root, classes: folder(root, "abcdef"[:classes])], ids=["npz", "names"])
def test_a_site_with_more_classes_than_the_run_config_says_is_refused_with_its_file(tmp_path, monkeypatch, write):
    paths = [write(tmp_path / f"site{k}.npz", classes) for k, classes in enumerate((3, 4))]
    named = refused(tmp_path, monkeypatch, paths, dataset="local", image_shape="1x8x8", classes=3)
    assert list(named) == ["client-1"]
    assert named["client-1"].startswith(f"client client-1: {paths[1]}: ") and "3 classes" in named["client-1"]


def test_a_site_with_more_or_fewer_classes_than_the_servers_data_is_refused_with_its_file(tmp_path, monkeypatch):
    paths = [npz(tmp_path / f"site{k}.npz", classes) for k, classes in enumerate((3, 4, 2))]
    said = refused(tmp_path, monkeypatch, paths, dataset=paths[0], held_out_fraction=0.0)
    assert sorted(said) == ["client-1", "client-2"]
    for client, path, classes in (("client-1", paths[1], 4), ("client-2", paths[2], 2)):
        assert said[client].startswith(f"client {client}: {path}: this client's model is not the server's: ")
        assert f"classes={classes}" in said[client] and "set classes, class-names" in said[client]


def test_sites_have_the_classes_that_the_servers_data_has_by_name(tmp_path, monkeypatch):
    """Two of three names are enough, in any number; another name is refused, even where there are three."""
    written = enumerate((("cat", "cow", "dog"), ("cat", "dog"), ("cat", "dog", "gnu"), ("cat", "cow", "dog", "gnu")))
    paths = [folder(tmp_path / str(k), names, values=(0, 9, 255)) for k, names in written]
    said = refused(tmp_path, monkeypatch, paths, dataset=paths[0], held_out_fraction=0.0)
    assert sorted(said) == ["client-2", "client-3"]
    for client in said:
        where = f"client {client}: {paths[int(client[-1])]}"
        assert said[client].startswith(f"{where}: class folders gnu are not in the run's class-names (cat, cow, dog)")


def test_names_that_are_none_of_the_runs_are_refused_with_the_site_and_its_file(tmp_path, monkeypatch):
    paths = [folder(tmp_path / str(k), names) for k, names in enumerate((("cat", "dog"), ("cat", "cow"), ("dog",)))]
    said = refused(tmp_path, monkeypatch, paths, dataset="local", image_shape="1x8x8", class_names="cat,dog", classes=2)
    assert list(said) == ["client-1"]
    assert said["client-1"].startswith(f"client client-1: {paths[1]}: class folders cow are not in the run's")
    rows = [{"text": "a", "label": label} for label in ("cat", "cow")]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = InputConfig.from_run_config({"dataset": "local", "text-column": "text", "class-names": "cat,dog"})
    with pytest.raises(DataError, match=f"^client ward: {tmp_path}/t.jsonl: names in column label cow are not in"):
        local_client.client_inputs(config, {"data-path": str(tmp_path / "t.jsonl")}, client="ward")


def test_a_sites_images_are_converted_to_the_shape_of_the_runs_dataset(tmp_path, monkeypatch):
    """A model that pools its features would train at any size, and then has the same layout."""
    labels = np.arange(12) % 3
    for name, side in (("server", 32), ("site", 96)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((12, side, side, 3), np.uint8), y=labels)
    of, seen = local_client.LocalClient.of, []

    def watched(msg, context):
        client = of(msg, context)
        seen.append((client.sizes["image_shape"], tuple(client.batches.inputs.shape[1:])))
        return client

    monkeypatch.setattr(local_client.LocalClient, "of", watched)
    paths = [str(tmp_path / "site.npz")]
    said = refused(tmp_path, monkeypatch, paths, dataset=str(tmp_path / "server.npz"), model="resnet-20", batch_size=4)
    assert not said and set(seen) == {((3, 32, 32), (3, 32, 32))}


@pytest.mark.parametrize("named", ["", "site-1", "site-1@7", "site-1@7@19"])
def test_a_sites_tests_are_the_same_whatever_its_node_id(tmp_path, monkeypatch, named):
    """`named`: the name that the server has given; without one, nodes 5 and 6 have their ids alone."""
    images = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None], (40, 8, 8))
    np.savez(tmp_path / "a.npz", x=images, y=[0, 1] * 20)
    settings = {"dataset": "local", "image-shape": "1x8x8", "classes": 2, "model": "cnn", "test-fraction": 0.5}

    def tests(node_id, client):
        given = SimpleNamespace(plan=SimpleNamespace(client=client), manifest=SimpleNamespace(experiment="e"))
        monkeypatch.setattr(local_client, "received", lambda msg: given)
        context = Context(1, node_id, {"data-path": str(tmp_path / "a.npz")}, RecordDict(), {**defaults(), **settings})
        found = local_client.LocalClient.of(Message(RecordDict(), node_id, "train"), context)
        assert found.name == (client or f"node-{node_id}")
        return found.test[0][:, 0, 0, 0].tolist()

    before = tests(5, named.partition("@")[0])
    assert tests(6, named) == before and len(set(before)) == 20
    assert tests(6, "site-2") != before


# Files that change


def paint(file, value):
    """Write over a file, which gets another time whatever the disk's clock."""
    before = file.stat().st_mtime_ns
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(file)
    os.utime(file, ns=(before + 10**6, before + 10**6))


@pytest.mark.parametrize("group", ["", "photo"])
def test_an_image_that_is_written_over_is_read_anew(tmp_path, group):
    root = tmp_path / "images"
    folder(root / group, ("a", "b"), values=(10, 20, 30))
    config = InputConfig(dataset="local", image_shape="1x8x8", classes=2)
    node = {"data-path": str(root)}

    def greys():
        parts = local_client._load(config, node, "site").tensors
        return sorted({round(float(value) * 255) for inputs in (parts[0], parts[2]) for value in inputs[:, 0, 0, 0]})

    assert greys() == [10, 11, 20, 21, 30, 31]
    kept = local_client._load(config, node, "site")
    assert local_client._load(config, node, "site") is kept, "nothing has changed"
    paint(root / group / "a" / "20.png", 99)
    assert greys() == [10, 11, 21, 30, 31, 99]
    held = load_client(config, node, client="site")
    assert 99 in {round(float(value) * 255) for part in (held.train, held.test) for value in part.images[:, 0, 0, 0]}


def test_data_that_cannot_be_looked_at_for_a_while_is_kept(tmp_path):
    file = npz(tmp_path / "a.npz", 2)
    config, node = InputConfig(dataset="local", image_shape="1x8x8", classes=2), {"data-path": file}
    kept = local_client._load(config, node, "site")
    (tmp_path / "a.npz").rename(tmp_path / "away.npz")
    assert own_stamp(node) == "" and local_client._load(config, node, "site") is kept


def test_another_run_reads_the_dataset_again_if_its_files_changed(tmp_path):
    """Two runs of one process with another file at the same path."""
    node = {"partition-id": 0, "num-partitions": 1}

    def loaded(path, run):
        config = InputConfig(dataset=str(path), test_fraction=0.25, held_out_fraction=0.25, min_partition_size=2)
        return local_client._load(config, node, "0", run)

    def labels(path, run):
        return set(torch.cat([loaded(path, run).tensors[1], loaded(path, run).tensors[3]]).tolist())

    file = tmp_path / "a.npz"
    assert labels(npz(file, 2), "first") == {0, 1}
    first = loaded(file, "first")
    assert loaded(file, "second") is first, "nothing has changed"
    npz(file, 4)
    assert loaded(file, "first") is first, "all clients of a run have the same examples"
    assert labels(file, "third") == {0, 1, 2, 3}
    root = folder(tmp_path / "images", ("a", "b"), values=range(0, 40, 2))
    before = loaded(root, "first")
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(Path(root) / "a" / "0.png")
    assert loaded(root, "second") is not before


@pytest.mark.parametrize("large", [2**29, 1], ids=["in memory", "on disk"])
@pytest.mark.parametrize("how", ["replaced", "written over", "removed"])
def test_all_clients_of_a_run_have_the_examples_that_the_file_had_when_it_began(tmp_path, monkeypatch, large, how):
    monkeypatch.setattr(stored, "LARGE", large)
    file, other = tmp_path / "a.npz", tmp_path / "b.npz"
    config = InputConfig(dataset=str(file), min_partition_size=2)

    def images(run, number):
        node = {"partition-id": number, "num-partitions": 3}
        return local_client._load(config, node, f"client-{number}", run).inputs.train.values

    def written(path, value):
        np.savez(path, images=np.full((200, 8, 8), value, np.uint8), labels=np.arange(200) % 4)

    written(file, 10)
    before = images("first", 0)
    stamped = dataset_stamp(config)
    written(other, 200)
    if how == "replaced":
        other.replace(file)
    elif how == "removed":
        file.unlink()
    else:
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(1, 999))
    node = {"partition-id": 2, "num-partitions": 3}
    if large == 1:
        with pytest.raises(DataError, match=r"a\.npz: the file was changed, replaced or removed while it is in use"):
            images("first", 1)
    else:
        assert images("first", 1).min() == images("first", 1).max() == before.max(), "it has been read before"
        sources.load_path.cache_clear()
        with pytest.raises(DataError, match=r"a\.npz: (the files were changed after the run began|not a readable)"):
            load_client(config, node, client="client-2", stamped=stamped)
    if how != "removed":
        assert images("second", 2).max() > before.max(), "another run has what the file has now"


def test_what_readers_pass_over_changes_nothing(tmp_path):
    root = folder(tmp_path / "images", ("a", "b"))
    before = sources.stamp(Path(root))
    (tmp_path / "images" / "a" / ".part").write_text("hidden")
    os.utime(tmp_path / "images" / "a", ns=(0, 0))
    times = sources.stamp(Path(root))
    (tmp_path / "images" / "a" / ".part").write_text("hidden, and longer")
    assert sources.stamp(Path(root)) == times != before
    (tmp_path / "images" / "b" / "round").symlink_to(tmp_path / "images")
    (tmp_path / "images" / "b" / "nowhere.png").symlink_to(tmp_path / "nowhere")
    assert sources.stamp(Path(root)) == sources.stamp(Path(root)) != times


def test_of_very_many_files_those_count_that_come_and_go(tmp_path, monkeypatch):
    root = Path(folder(tmp_path / "images", ("a", "b"), values=range(5)))
    monkeypatch.setattr(sources, "_MOST_FILES", 4)
    before = sources.stamp(root)
    paint(root / "a" / "1.png", 99)
    assert sources.stamp(root) == before
    (root / "a" / "2.png").unlink()
    os.utime(root / "a", ns=(0, 0))
    assert sources.stamp(root) != before


class Volumes(nn.Module):
    """A model with a convolution over three dimensions, and one over two."""

    def __init__(self):
        super().__init__()
        self.deep, self.flat = nn.Conv3d(1, 2, 3, padding=1), nn.Conv2d(1, 3, 3)

    def forward(self, images):
        return self.flat(self.deep(images[:, None]).mean((1, 2))[:, None]).mean((2, 3))


def volumes(**sizes):
    return Volumes()


def test_a_model_with_tensors_of_five_dimensions_is_built():
    sizes = (("image_shape", (1, 8, 8)), ("classes", 3))
    model = local_client._model("tests.unit.client_app.test_local_client:volumes", sizes, torch.device("cpu"))
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 3)
    flat = local_client._model("cnn", sizes, torch.device("cpu"))
    convolutions = [m.weight for m in flat.modules() if isinstance(m, nn.Conv2d) and m.in_channels > 1]
    assert convolutions and all(w.is_contiguous(memory_format=torch.channels_last) for w in convolutions)


@pytest.mark.parametrize(
    ("model", "count", "settings", "said"),
    [
        ("mlp", 1, {}, "has one training example, and the model's BatchNorm '2' needs two in a batch: add examples"),
        ("mlp", 9, {"batch_size": 8}, ""),
        ("mlp", 9, {"batch_size": 1}, "a batch or micro-batch has one example, .* raise its size"),
        ("mlp", 9, {"batch_size": 8, "micro_batch_size": 1}, "a batch or micro-batch has one example"),
        ("cnn", 1, {"batch_size": 1}, ""),  # one image has several values per channel
        ("none", 1, {"batch_size": 1}, ""),
    ],
)
def test_a_client_without_variance_for_batch_norm_is_refused_when_it_introduces_itself(model, count, settings, said):
    mlp = [nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)]
    cnn = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)]
    net = nn.Sequential(*{"mlp": mlp, "cnn": cnn, "none": mlp[:2] + mlp[3:]}[model])
    training = TrainingConfig(local_epochs=1, **settings)
    batches = Batches(torch.rand(count, 1, 8, 8), torch.arange(count) % 3, training.batch_size, 0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    test = torch.rand(2, 1, 8, 8), torch.arange(2)
    client = local_client.LocalClient("c", net, batches, test, training, IMAGES, {}, {"classes": 3}, "mine.npz")
    if said:
        with pytest.raises(ValueError, match=f"client c: mine.npz: .*{said}"):
            client.figures(SimpleNamespace())
    else:
        assert client.figures(SimpleNamespace())["num-examples"] == count
        fit(net, batches, training)
    assert said == "" or all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
