"""Clients that train together against the same clients alone, over whole rounds of this project's app."""

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from client_app.app import app
from tepal import models
from tepal.client_app import stacked as together
from tepal.client_app.objectives import Work
from tepal.client_app.stacked import Gathering, draws_numbers
from tepal.models import build
from tepal.server_app.config import defaults
from tepal.strategies import Ditto, FedAvg, FedFrozen, FedProx, SelectiveLayers
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training import probing
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batches

CLIENTS = 4
# A Dirichlet partition: clients have unequal numbers of examples, and so of steps and of examples in the last one.
CONFIG = {
    **defaults(), "batch-size": 16, "local-epochs": 1, "optimizer": "sgd", "learning-rate": 0.05, "dirichlet-alpha": 0.3
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    together._said.clear()


@pytest.fixture
def stacks(monkeypatch):
    """How many clients each stack had."""
    sizes = []
    fit = together.fit_stacked

    def counted(works):
        outcomes = fit(works)
        sizes.append(len(works))
        return outcomes

    monkeypatch.setattr(together, "fit_stacked", counted)
    return sizes


def small(name):
    return build(name, image_shape=(1, 8, 8), classes=10, seed=7)


def run(strategy, name, *, stacked, initial=None, at_once=1, **settings):
    """Arrays after two rounds, and the rounds' reports; `stacked`: clients may train together.

    The strategy merges in the order of the clients' names: the order in which replies come shows in the last bit, and
    where training is in bfloat16, that bit in the next round's model.
    """
    config = {**CONFIG, **settings, "model": name}
    nodes = [Node(app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
    how = {"at_once": CLIENTS, "gathering": Gathering} if stacked else {"at_once": at_once}
    reports, model = [], initial or small(name)
    started = strategy(
        model=model,
        fraction_evaluate=0,
        min_available_nodes=CLIENTS,
        on_round=reports.append,
        deterministic=True,
    )
    grid = InProcessGrid(nodes, config, **how)
    result = started.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
    assert not any(report.refused + report.lost for report in reports), reports
    return {name: array.numpy() for name, array in result.arrays.items()}, reports


def assert_alike(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", ["cnn", "tiny-vit"])
def test_clients_end_together_where_they_end_alone(name, stacks):
    alone, before = run(FedAvg, name, stacked=False, **{"momentum": 0.9, "learning-rate": 0.005})
    assert not stacks
    stacked, after = run(FedAvg, name, stacked=True, **{"momentum": 0.9, "learning-rate": 0.005})
    assert stacks == [CLIENTS, CLIENTS]
    assert_alike(stacked, alone)
    moved = max(np.abs(alone[entry] - value.numpy()).max() for entry, value in small(name).state_dict().items())
    assert moved > 1e-2, "nothing was learned, so nothing was compared"
    for one, other in zip(before, after, strict=True):
        assert one.train_metrics.keys() == other.train_metrics.keys()
        same = {key: value for key, value in one.train_metrics.items() if key != "step-seconds"}
        assert {key: other.train_metrics[key] for key in same} == pytest.approx(same, abs=1e-3)


def test_in_threads_of_their_own_clients_end_bit_for_bit_where_they_end_by_turns():
    name = f"{__name__}:own_model"

    def initial():
        return build(name, image_shape=(1, 8, 8), classes=10, seed=7)

    one, other = (
        run(FedAvg, name, stacked=False, initial=initial(), deterministic=True, at_once=at_once)[0]
        for at_once in (1, 3)
    )
    assert {entry: value.tobytes() for entry, value in one.items()} == {
        entry: value.tobytes() for entry, value in other.items()
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "weight_decay": 0.0},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.5},
        {"optimizer": "adam", "weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1, "local_steps": 5},
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
@pytest.mark.parametrize("name", ["cnn", "tiny-vit"])
def test_every_optimizer_takes_the_steps_that_it_takes_alone(name, settings):
    """In double precision: Adam makes whole steps of what is rounded in a gradient that is 0."""
    config = TrainingConfig(local_epochs=2, batch_size=8, learning_rate=0.02, **settings)

    def works():
        generator = torch.Generator().manual_seed(1)
        for client, examples in enumerate((9, 21, 5, 16)):  # 9: one batch, as none is of a single example
            images = torch.rand(examples, 1, 8, 8, generator=generator, dtype=torch.float64)
            labels = torch.randint(0, 10, (examples,), generator=generator)
            yield Work(small(name).double(), Batches(images, labels, config.batch_size, client), config)

    alone, stacked = list(works()), list(works())
    expected = [work.fit() for work in alone]
    found = together.fit_stacked(stacked)
    for one, fitted, place, work in zip(found, expected, stacked, alone, strict=True):
        assert one.steps == fitted.steps and one.loss == pytest.approx(fitted.loss, rel=1e-5)
        ends = work.model.state_dict()
        for entry, value in place.model.state_dict().items():
            torch.testing.assert_close(value, ends[entry], rtol=0, atol=1e-6, msg=entry)


def test_the_time_of_training_together_is_shared_by_the_numbers_of_steps(monkeypatch):
    """Of 9, 21, 5 and 16 examples in batches of 8, two epochs are 2, 6, 2 and 4 steps: 6 together, of 0.25 s each."""
    clock, config = SimpleNamespace(now=1000.0), TrainingConfig(local_epochs=2, batch_size=8)

    def pass_time(*_):
        clock.now += 0.25

    works = []
    for client, examples in enumerate((9, 21, 5, 16)):
        model = small("cnn")
        model.register_forward_pre_hook(pass_time)
        batches = Batches(torch.rand(examples, 1, 8, 8), torch.zeros(examples, dtype=torch.long), 8, client)
        works.append(Work(model, batches, config))
    monkeypatch.setattr(together, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    found = together.fit_stacked(works)
    assert [one.steps for one in found] == [2, 6, 2, 4]
    assert [one.seconds for one in found] == pytest.approx([1.5 * steps / 14 for steps in (2, 6, 2, 4)])
    assert [one.step_seconds for one in found] == pytest.approx([1.5 / 14] * 4)


def test_what_fedfrozen_freezes_stays_bit_for_bit_and_the_rest_goes_where_it_goes_alone(stacks):
    def frozen_from_the_first(**options):
        return FedFrozen(warmup_rounds=0, **options)

    alone, _ = run(frozen_from_the_first, "tiny-vit", stacked=False)
    stacked, _ = run(frozen_from_the_first, "tiny-vit", stacked=True)
    assert stacks == [CLIENTS, CLIENTS]
    assert_alike(stacked, alone)
    initial = {name: tensor.numpy() for name, tensor in small("tiny-vit").state_dict().items()}
    for name, value in initial.items():
        frozen = ".query." in name or ".key." in name
        assert (stacked[name].tobytes() == value.tobytes()) == frozen, name


def test_only_clients_that_train_the_same_layers_train_together(stacks):
    def selective(**options):
        return SelectiveLayers(budget=1, coupling=0.0, **options)

    alone, _ = run(selective, "tiny-vit", stacked=False)
    stacked, after = run(selective, "tiny-vit", stacked=True)
    assert_alike(stacked, alone)
    alike = [np.unique(report.record["masks"], axis=0, return_counts=True)[1] for report in after]
    assert sorted(stacks) == sorted(int(n) for counts in alike for n in counts if n > 1)


def own_model(image_shape, classes):
    """A model with dropout."""
    pixels = int(np.prod(image_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, classes))


def plain_model(image_shape, classes):
    pixels = int(np.prod(image_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.ReLU(), nn.Linear(16, classes))


def normed_model(image_shape, classes):
    pixels = int(np.prod(image_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.BatchNorm1d(16), nn.Linear(16, classes))


class Sorted(nn.Module):
    """Its way depends on its data, which no stack can follow."""

    def __init__(self, image_shape, classes):
        super().__init__()
        self.linear = nn.Linear(int(np.prod(image_shape)), classes)

    def forward(self, images):
        flat = images.flatten(1)
        return self.linear(flat if float(flat.detach().sum()) > 0 else -flat)


@pytest.mark.parametrize(
    ("model", "strategy", "settings", "said"),
    [
        (own_model, FedAvg, {}, "dropout"),
        (normed_model, FedAvg, {}, "keep running statistics"),
        (Sorted, FedAvg, {}, "vmap"),
        (plain_model, FedProx, {}, "not the task's loss alone"),
        (plain_model, Ditto, {}, "not the task's loss alone"),
        (plain_model, FedAvg, {"deterministic": True}, "deterministic=true"),
        (plain_model, FedAvg, {"autocast": "bf16"}, "autocast"),
    ],
    ids=["dropout", "batch norm", "data-dependent", "fedprox", "ditto", "deterministic", "autocast"],
)
def test_who_cannot_trains_alone_with_the_same_result_and_it_is_said_once(
    model, strategy, settings, said, stacks, caplog
):
    name = f"{__name__}:{model.__name__}"

    def initial():
        return build(name, image_shape=(1, 8, 8), classes=10, seed=7)

    with caplog.at_level(logging.INFO, "flwr"):
        stacked, _ = run(strategy, name, stacked=True, initial=initial(), **settings)
    assert not stacks
    told = [record.getMessage() for record in caplog.records if "not together" in record.getMessage()]
    assert len(told) == 1 and said in told[0], told
    alone, _ = run(strategy, name, stacked=False, initial=initial(), **settings)
    for entry, value in alone.items():
        np.testing.assert_allclose(stacked[entry], value, rtol=0, atol=1e-6, err_msg=entry)


def test_no_model_is_built_while_another_client_draws_random_numbers():
    """A model that is built seeds torch's generator and puts it back: who draws meanwhile would draw other numbers."""
    built = threading.Event()
    builder = threading.Thread(target=lambda: (small("cnn"), built.set()))
    with models.DRAWING:
        builder.start()
        assert not built.wait(0.5)
    assert built.wait(60)
    builder.join()


def test_a_client_that_diverges_is_refused_alone(stacks):
    reports = []
    config = {**CONFIG, "model": "cnn", "learning-rate": 0.05}
    nodes = [Node(app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
    grid = InProcessGrid(nodes, config, at_once=CLIENTS, gathering=Gathering)
    strategy = FedAvg(model=small("cnn"), fraction_evaluate=0, min_available_nodes=CLIENTS, on_round=reports.append)
    side_by_side = together._side_by_side

    def spoilt(batches):
        inputs, labels, weights = side_by_side(batches)
        inputs[0] = torch.inf  # of the client with most steps
        return inputs, labels, weights

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(together, "_side_by_side", spoilt)
        strategy.start(grid, ArrayRecord(small("cnn").state_dict()), num_rounds=1)
    assert stacks == [CLIENTS]
    assert len(reports[-1].replied) == CLIENTS - 1
    ((_, reason),) = reports[-1].lost + reports[-1].refused
    assert "local training diverged" in reason


class Einsum(nn.Module):
    """Its stacked gradient has the strides of the transposed weight; and it has a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first, self.second = (nn.Parameter(torch.randn(*shape) / 4) for shape in ((16, 64), (10, 16)))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, images):
        inner = torch.einsum("bi,oi->bo", images.flatten(1), self.first).tanh()
        return torch.einsum("bi,oi->bo", inner, self.second) * self.temperature


@pytest.mark.parametrize("settings", [{"optimizer": "sgd"}, {"optimizer": "adamw"}, {"clip_norm": 0.1}])
def test_gradients_of_any_strides_and_parameters_without_dimensions_are_applied_where_they_belong(settings):
    config = TrainingConfig(local_steps=3, batch_size=8, **{"optimizer": "sgd", "learning_rate": 0.1, **settings})

    def works():
        generator = torch.Generator().manual_seed(1)
        for client in range(2):
            images = torch.rand(24, 1, 8, 8, generator=generator)
            labels = torch.randint(0, 10, (24,), generator=generator)
            yield Work(Einsum(), Batches(images, labels, config.batch_size, client), config)

    alone, stacked = list(works()), list(works())
    for work in alone:
        work.fit()
    together.fit_stacked(stacked)
    for one, other in zip(stacked, alone, strict=True):
        for entry, value in one.model.state_dict().items():
            torch.testing.assert_close(value, other.model.state_dict()[entry], rtol=0, atol=1e-5, msg=entry)


@pytest.mark.parametrize("error", [IndexError(""), ValueError("labels have shape (4, 1)")])
def test_whatever_cannot_be_stacked_trains_alone(monkeypatch, caplog, error):
    def fails(works):
        raise error

    monkeypatch.setattr(together, "fit_stacked", fails)
    with caplog.at_level(logging.INFO, "flwr"):
        alone, _ = run(FedAvg, "cnn", stacked=False)
        stacked, _ = run(FedAvg, "cnn", stacked=True)
    assert_alike(stacked, alone)
    assert f"not together: {str(error) or 'IndexError'}." in caplog.text


class Dropping(nn.Module):
    def __init__(self, image_shape, classes):
        super().__init__()
        self.embed = nn.Linear(int(np.prod(image_shape)), 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4))
        self.head = nn.Linear(16, classes)

    def forward(self, images):
        hidden = self.embed(images.flatten(1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def test_probes_in_threads_draw_the_numbers_that_they_draw_by_turns(monkeypatch):
    """Dropout has a part in the scores by which layers are selected."""
    found, probe = [], probing.layer_scores

    def noted(*args, **options):
        scores = probe(*args, **options)
        found.append(scores.scores)
        return scores

    monkeypatch.setattr(probing, "layer_scores", noted)

    def scores(at_once):
        name = f"{__name__}:Dropping"
        initial = build(name, image_shape=(1, 8, 8), classes=10, seed=7)
        found.clear()
        run(SelectiveLayers, name, stacked=False, initial=initial, deterministic=True, at_once=at_once)
        assert len(found) == 2 * CLIENTS and len(set(map(tuple, found))) == len(found)
        return sorted(found)

    assert scores(1) == scores(CLIENTS)


def test_layers_that_draw_random_numbers_are_known():
    assert draws_numbers(nn.Sequential(nn.Dropout(0.1)))
    assert not draws_numbers(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2)))
    assert draws_numbers(nn.MultiheadAttention(4, 2, dropout=0.1)) and not draws_numbers(nn.MultiheadAttention(4, 2))
    assert draws_numbers(nn.LSTM(4, 4, 2, dropout=0.5)) and not draws_numbers(nn.LSTM(4, 4, 2))
    assert not any(draws_numbers(small(name)) for name in ("cnn", "tiny-vit", "resnet-20"))
