"""The papers' settings of selective layers and FedACS: which examples clients have, and the papers' numbers."""

import json
from collections import Counter
from itertools import product

import numpy as np
import pytest
from PIL import Image

from tepal.server_app.config import defaults
from tepal.tools.reproduce import fedacs
from tepal.tools.reproduce.data import Images, write_images
from tepal.tools.reproduce.experiment import MissingData, TrialInputs
from tepal.tools.reproduce.fedacs import FedAcs
from tepal.tools.reproduce.selective import KINDS, Selective
from tepal.tools.reproduce.selective_data import CLASSES
from tepal.training.data import DataConfig, load_client, load_client_texts
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.partitions import divide
from tepal.training.data.sources import named_source

LANGUAGES = ("de", "en", "es", "fr", "ru")
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def trial_of(experiment, name):
    return {trial.name: trial for trial in experiment.trials(True)}[name]


def config_of(kind, name, folder, data):
    """A full trial's run config with its files."""
    trial, of = trial_of(Selective(kind), name), KINDS[kind]
    (folder / "weights" / of.full_config["model"]).mkdir(parents=True, exist_ok=True)
    inputs = TrialInputs(folder, {of.full_data: data})
    return defaults() | trial.options["config"] | Selective(kind).files(trial.options, inputs)


def of_client(load, config, client):
    """All examples of a client."""
    node = {"partition-id": client, "num-partitions": 100}
    data = load(DataConfig.from_run_config(config), node, client=f"client-{client}")
    assert len(data.test) == 1  # all others are trained on
    return data.train, data.test


@pytest.fixture(scope="module")
def news(tmp_path_factory):
    """XGLUE's files: language and number are in the title."""
    folder = tmp_path_factory.mktemp("xglue")
    for language, (part, count) in product(LANGUAGES, (("train", 7), ("dev", 260), ("test", 12))):
        rows = [f"{language} {part} {k}\tbody\t{('news', 'sports')[k % 2]}" for k in range(count)]
        (folder / f"xglue.nc.{language}.{part}").write_text("\n".join(rows) + "\n")
    return folder


def test_a_client_has_news_in_one_language_and_none_are_shared(tmp_path, news):
    config, seen, languages = config_of("texts", "gradient-2-1", tmp_path, news), Counter(), Counter()
    for client in range(100):
        titles = [title for part in of_client(load_client_texts, config, client) for title in part.texts]
        (language,) = {title.split()[0] for title in titles}
        languages[language] += 1
        seen.update(titles)
    assert languages == dict.fromkeys(LANGUAGES, 20)
    assert seen == Counter(f"{language} dev {k}" for language in LANGUAGES for k in range(260))
    tested = named_source(DataConfig.from_run_config(config)).test.texts
    assert sorted(tested) == sorted(f"{language} test {k}" for language in LANGUAGES for k in range(12))


def test_a_search_of_news_has_no_test_texts_of_the_results(tmp_path, news):
    source = named_source(DataConfig.from_run_config(config_of("texts", "gradient-search-0", tmp_path, news)))
    trained, tested = set(source.train.texts), set(source.test.texts)
    assert trained.isdisjoint(tested) and {title.split()[1] for title in trained | tested} == {"dev"}
    assert len(trained) == 5 * 208 and Counter(title.split()[0] for title in tested) == dict.fromkeys(LANGUAGES, 52)


def test_news_without_categories_to_test_on_are_refused(tmp_path, news):
    folder = tmp_path / "xglue"
    folder.mkdir()
    for file in news.glob("*.dev"):
        (folder / file.name).write_text(file.read_text())
        (folder / file.name.replace(".dev", ".test")).write_text("title\tbody\n")
    with pytest.raises(MissingData, match=r"needs xglue.nc.<language>.dev and .test of every language, with the cate"):
        config_of("texts", "top-1-1", tmp_path, folder)


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """DomainNet's lists and folders: a domain and a number are an image's colour."""
    folder = tmp_path_factory.mktemp("domainnet")
    names = [*CLASSES, "aaa"]  # a class that the paper does not have comes first in the lists' numbers
    for domain, (part, count) in product(DOMAINS, (("train", 210), ("test", 11))):
        rows = []
        for k in range(count):
            path = f"{domain}/{names[k % 11]}/{part}-{k}.png"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            colour = (40 * DOMAINS.index(domain), k, 100 if part == "test" else 0)
            Image.new("RGB", (2, 2), colour).save(folder / path)
            rows.append(f"{path} {1 + k % 11 if k % 11 < 10 else 0}")
        (folder / f"{domain}_{part}.txt").write_text("\n".join(rows) + "\n")
    return folder


def colours(images):
    return [tuple(np.round(image[:, 0, 0] * 255).astype(int).tolist()) for image in images]


def test_a_client_has_images_of_one_domain_and_ten_classes(tmp_path, lists):
    config = config_of("domains", "gradient-1-4-1", tmp_path, lists) | {"image-shape": "3x2x2"}
    seen, domains = Counter(), Counter()
    for client in range(100):
        parts = of_client(load_client, config, client)
        found = [colour for part in parts for colour in colours(part.images)]
        (red,) = {colour[0] for colour in found}
        domains[DOMAINS[red // 40]] += 1
        seen.update(found)
        assert all(label == colour[1] % 11 for part in parts
                   for label, colour in zip(part.labels, colours(part.images), strict=True))  # fmt: skip
    assert domains == {**dict.fromkeys(DOMAINS[:4], 17), **dict.fromkeys(DOMAINS[4:], 16)}
    assert seen == Counter((40 * d, k, 0) for d in range(6) for k in range(210) if k % 11 < 10)
    test = named_source(DataConfig.from_run_config(config)).test
    assert sorted(colours(test.images / 255)) == [(40 * d, k, 100) for d in range(6) for k in range(10)]


def test_a_search_of_images_by_domain_has_no_test_images_of_the_results(tmp_path, lists):
    config = config_of("domains", "top-search-1", tmp_path, lists) | {"image-shape": "3x2x2"}
    source = named_source(DataConfig.from_run_config(config))
    trained, tested = (set(colours(part.images / 255)) for part in (source.train, source.test))
    assert trained.isdisjoint(tested) and {colour[2] for colour in trained | tested} == {0}
    assert (len(trained), len(tested)) == (6 * (191 - 38), 6 * 38)  # 210 images a domain, 19 of "aaa"
    with pytest.raises(MissingData, match=r"needs the lists <domain>_train.txt"):
        config_of("domains", "top-search-1", tmp_path / "none", tmp_path)


def squares(count, shape, after=0):
    """Images that are told apart by their first pixels."""
    pixels = np.zeros((count, *shape), np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = np.divmod(np.arange(after, after + count), 256)
    return Images(pixels, np.arange(count) % 10)


def numbers(pixels):
    return set((pixels[:, 0, 0, 0].astype(int) * 256 + pixels[:, 0, 0, 1]).tolist())


def test_images_by_label_are_searched_without_the_test_images(tmp_path):
    data = write_images(tmp_path / "cifar-10.npz", squares(500, (3, 32, 32)), squares(100, (3, 32, 32), after=500))
    config = {name: config_of("labels", f"gradient-{name}", tmp_path, data) for name in ("1-1", "search-0")}
    with np.load(config["1-1"]["dataset"]) as main, np.load(config["search-0"]["dataset"]) as search:
        assert numbers(main["x_train"]) == set(range(500)) and numbers(main["x_test"]) == set(range(500, 600))
        trained, tested = numbers(search["x_train"]), numbers(search["x_test"])
    assert len(tested) == 100 and trained | tested == set(range(500)) and trained.isdisjoint(tested)


def parts_of(config, clients, examples):
    """The clients' examples of a data set with ten classes of the same size."""
    arrays = ImageArrays(np.zeros((examples, 1, 1, 1), np.uint8), np.arange(examples) % 10)
    source = Source(arrays, None, 10, "here")
    return divide(source, DataConfig.from_run_config({**config, "dataset": "digits"}), clients)


@pytest.mark.parametrize("examples", [40_000, 50_000])
def test_images_by_label_can_be_divided_among_a_hundred_clients(examples):
    options = trial_of(Selective("labels"), "full-1-1").options
    sizes = [len(part) for part in parts_of(options["config"], options["clients"], examples)]
    assert len(sizes) == 100 and sum(sizes) == examples and min(sizes) >= 10


PAPER = {  # Table 4 of the paper, and its section 5.1: batch size, local steps, local epochs, rounds
    "labels": (64, 5, None, 50), "domains": (64, 1, None, 30), "texts": (32, None, 1, 20),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAPER)
def test_full_trials_of_selective_layers_have_the_papers_numbers(kind):
    for trial in Selective(kind).trials(True):
        config = defaults() | trial.options["config"]
        batch, steps, epochs, rounds = PAPER[kind]
        assert (config["batch-size"], config["local-steps"], config["num-server-rounds"]) == (batch, steps or 0, rounds)
        assert epochs is None or config["local-epochs"] == epochs
        assert trial.options["clients"] == 100 and 100 * config["fraction-train"] == 20
        assert (config["optimizer"], config["schedule"], config["held-out-fraction"]) == ("sgd", "constant", 0.0)
        assert kind == "texts" or config["normalise"] == "clip"
    assert kind != "labels" or (config["partitioner"], config["dirichlet-alpha"]) == ("dirichlet", 0.1)


# --- FedACS -----------------------------------------------------------------------------------------------------------

FASHION = FedAcs("fashion-mnist", "Fashion-MNIST")


@pytest.mark.parametrize("examples", [60_000, 70_000])
def test_five_hundred_clients_share_all_images_by_dirichlet(tmp_path, examples):
    options = trial_of(FASHION, "many-fedacs-1").options
    parts = parts_of(options["config"], options["clients"], examples)
    assert len(parts) == 500 and sum(map(len, parts)) == examples
    trained = np.mean([len(part) - round(len(part) / 6) for part in parts])
    assert 99 < trained < 120 and options["config"]["fraction-train"] == 0.1
    kinds = [np.unique(part % 10).size for part in parts]
    assert min(kinds) < 8 and max(kinds) == 10  # of Dirichlet .5: some have few classes
    data = write_images(tmp_path / "fashion-mnist.npz", squares(70, (1, 28, 28)), squares(20, (1, 28, 28), after=70))
    file = fedacs.images_file(options, TrialInputs(tmp_path, {"fashion-mnist": data}))
    with np.load(file) as arrays:
        assert numbers(arrays["x_train"]) == set(range(90)) and "group" not in arrays and "x_test" not in arrays


def test_a_hundred_clients_keep_fifty_training_examples(tmp_path):
    options = trial_of(FASHION, "scarce-fedacs-alpha10.0-3").options
    data = write_images(tmp_path / "fashion-mnist.npz", squares(20_000, (1, 28, 28)))
    file = fedacs.images_file(options, TrialInputs(tmp_path, {"fashion-mnist": data}))
    with np.load(file) as arrays:
        assert set(Counter(arrays["group"].tolist()).values()) == {80} and len(np.unique(arrays["group"])) == 100
    config = DataConfig.from_run_config(options["config"] | {"dataset": str(file)})
    for client in (0, 99):
        node = {"partition-id": client, "num-partitions": 100}
        assert len(load_client(config, node, client=f"client-{client}").train) == 50


def test_full_trials_of_fedacs_have_the_papers_settings():
    trials = FASHION.trials(True)
    results = {trial.name.rpartition("-")[0]: trial.options for trial in trials if "search" not in trial.name}
    assert Counter(of["clients"] for of in results.values()) == {100: 3 * 8 + 2 * 4, 500: 8}
    assert {of["alpha"] for of in results.values()} == {0.1, 0.5, 1.0, 5.0, 10.0}
    assert results["two-classes-ditto"]["config"]["classes-per-client"] == 2
    assert results["dirichlet-apfl"]["config"]["dirichlet-alpha"] == 0.5
    assert all(of["config"].get("image-shape", "") == "" for of in results.values())
    assert json.dumps([of["config"]["schedule"] for of in results.values()]).count("constant") == len(results)
