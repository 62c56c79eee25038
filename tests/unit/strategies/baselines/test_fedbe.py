"""FedBE over whole rounds: what the ensemble consists of, how it is drawn, and what becomes of it."""

import errno
import gc
import os
import random
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange import partial_exchange
from tepal.strategies import FedAvg, FedBE, FedEnsemble, MethodError, RoundFailed, join_modes
from tepal.strategies.baselines.fedbe import DirichletModels, GaussianModels
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.personal.store import ModelStore
from tepal.strategies.rounds.checkpoint import Checkpoints
from tests.quiet import quiet  # noqa: F401

START = {
    "w": np.array([0.3, -0.2, 0.5], np.float32),
    "n.running_mean": np.array([1.0], np.float32),
    "n.num_batches_tracked": np.array(4),
    "b": np.array(0.25),
}
FLOATS = ("w", "b", "n.running_mean")


def examples_of(partition):
    return 3 + 4 * partition


def trained(model, partition, number):
    """What a client makes of a model in a round."""
    rng = np.random.default_rng([partition, number])
    made = {name: (0.7 * model[name] + rng.normal(size=model[name].shape)).astype(model[name].dtype) for name in FLOATS}
    return {**made, "n.num_batches_tracked": model["n.num_batches_tracked"] + 1 + 2 * partition}


class Distil:
    """Notes what it is given, and returns the mean of the ensemble's parameters and the student."""

    def __init__(self):
        self.ensembles, self.students = [], []

    def __call__(self, models, student):
        members = [{name: np.array(array) for name, array in model.items()} for model in models]
        self.ensembles.append(members)
        self.students.append({name: np.array(array) for name, array in student.items()})
        return self.of(members, student)

    @staticmethod
    def of(members, student):
        made = {n: np.mean([m[n] for m in [*members, student]], 0, dtype=np.float64) for n in student if n in "wb"}
        return {**student, **{name: np.asarray(value, student[name].dtype) for name, value in made.items()}}


def run(strategy, partitions=range(3), rounds=3, *, start=START, make=trained, cache=None, grid=InProcessGrid,
        fails=lambda partition, number: False):  # fmt: skip
    """(what clients received: (partition, round) → model; reports; the result's arrays)"""
    received, reports, app = {}, {}, ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        at = int(context.node_config["partition-id"]), msg.content["config"]["server-round"]
        received[at] = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        if fails(*at):
            raise RuntimeError("not now")
        arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in make(received[at], *at).items()})
        metrics = MetricRecord({"num-examples": examples_of(at[0]), "received-accuracy": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        metrics = MetricRecord({"num-examples": 2, "received-accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    strategy.on_round = lambda report: reports.update({report.round: report})
    nodes = [Node(app, {"partition-id": k, **({"cache-path": cache} if cache else {})}) for k in partitions]
    record = ArrayRecord({name: Array(array) for name, array in start.items()})
    result = strategy.start(grid(nodes), record, num_rounds=rounds, timeout=60)
    return received, reports, {name: array.numpy() for name, array in result.arrays.items()}


def assert_alike(model, expected, tolerance=1e-6):
    assert model.keys() == expected.keys()
    for name, value in expected.items():
        assert model[name].dtype == value.dtype and model[name].shape == value.shape
        np.testing.assert_allclose(model[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def bits(model):
    return {name: array.tobytes() for name, array in model.items()}


def weighted_mean(models, weights):
    """Entry by entry; that of counters is rounded."""
    made = {}
    for name, value in models[0].items():
        mean = sum(weight * model[name].astype(np.float64) for model, weight in zip(models, weights, strict=True))
        mean = mean / sum(weights)
        made[name] = np.asarray(np.rint(mean) if value.dtype.kind == "i" else mean, value.dtype)
    return made


# ---- the distributions -----------------------------------------------------------------------------------------------

MODELS = np.array([[1.0, -2.0, 0.5, 9.0], [3.0, -2.0, 0.7, 9.0], [2.0, 4.0, 0.1, 9.0]])
SHARES = np.array([0.5, 0.2, 0.3])


def stored(models):
    store = ModelStore(None, models.shape[1], models.dtype)
    return store.rows([store.write([model]) for model in models])


def test_a_gaussian_has_the_weighted_mean_and_variance_of_each_entry():
    gaussian = GaussianModels.fit(stored(MODELS), SHARES, 3)
    mean = [0.5 + 0.6 + 0.6, -1.0 - 0.4 + 1.2, 0.25 + 0.14 + 0.03]
    variance = [sum(p * (w[k] - mean[k]) ** 2 for p, w in zip(SHARES, MODELS, strict=True)) for k in range(3)]
    np.testing.assert_allclose(gaussian.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(gaussian.deviation**2, variance, rtol=1e-12)


@pytest.mark.parametrize("scale", [0.01, 0.1, 4.0])
def test_the_variance_scale_multiplies_the_variance_and_leaves_the_mean(scale):
    gaussian = GaussianModels.fit(stored(MODELS), SHARES, 3, scale)
    rng = np.random.default_rng(0)
    draws = np.array([gaussian.draw(rng) for _ in range(20_000)])
    mean = np.average(MODELS[:, :3], 0, SHARES)
    variance = np.average(np.square(MODELS[:, :3] - mean), 0, SHARES)
    np.testing.assert_allclose(draws.mean(0), mean, atol=0.04 * np.sqrt(scale * variance.max()))
    np.testing.assert_allclose(draws.var(0), scale * variance, rtol=0.05)


def test_draws_of_a_gaussian_have_its_moments_and_no_correlation():
    gaussian = GaussianModels.fit(stored(MODELS), SHARES, 3)
    rng = np.random.default_rng(0)
    draws = np.array([gaussian.draw(rng) for _ in range(20_000)])
    np.testing.assert_allclose(draws.mean(0), gaussian.mean, atol=0.08)
    np.testing.assert_allclose(draws.std(0), gaussian.deviation, rtol=0.03)
    np.testing.assert_allclose(np.corrcoef(draws.T), np.eye(3), atol=0.03)


@pytest.mark.parametrize("block", [1, 3 * 1024, 1 << 23])
def test_a_gaussian_is_fitted_block_by_block(block, monkeypatch):
    monkeypatch.setattr("tepal.strategies.baselines.fedbe._BLOCK", block)
    models = np.random.default_rng(1).normal(size=(3, 5000)).astype(np.float32)
    gaussian = GaussianModels.fit(stored(models), SHARES, 4999)
    np.testing.assert_allclose(gaussian.mean, np.average(models, 0, SHARES)[:-1], rtol=1e-5, atol=1e-6)
    variance = np.average((models - np.average(models, 0, SHARES)) ** 2, 0, SHARES)
    np.testing.assert_allclose(gaussian.deviation**2, variance[:-1], rtol=1e-4, atol=1e-6)


def test_small_differences_of_large_weights_have_their_variance():
    models = 1e3 + np.array([[0.0], [1e-4]])
    gaussian = GaussianModels.fit(stored(models), np.array([0.5, 0.5]), 1)
    assert gaussian.deviation[0] == pytest.approx(5e-5, rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([0.01, 0.3, 1.0, 50.0]))
def test_gamma_lies_on_the_simplex(seed, clients, concentration):
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(clients))
    gamma = DirichletModels(stored(np.eye(clients)), shares, concentration).gamma(rng)
    assert (gamma >= 0).all() and gamma.sum() == pytest.approx(1)


@pytest.mark.parametrize("concentration", [0.2, 1.0, 30.0])
def test_gamma_has_the_clients_shares_as_its_mean_and_the_variance_of_its_concentration(concentration):
    dirichlet = DirichletModels(stored(MODELS), SHARES, concentration)
    rng = np.random.default_rng(0)
    gammas = np.array([dirichlet.gamma(rng) for _ in range(20_000)])
    np.testing.assert_allclose(gammas.mean(0), SHARES, atol=0.015)
    np.testing.assert_allclose(gammas.var(0), SHARES * (1 - SHARES) / (3 * concentration + 1), rtol=0.06)


def test_with_equal_clients_the_default_dirichlet_is_uniform():
    """Dir(1, 1): the first of two shares is uniform on 0 … 1."""
    dirichlet = DirichletModels(stored(MODELS[:2]), np.array([0.5, 0.5]), 1.0)
    rng = np.random.default_rng(0)
    first = np.sort([dirichlet.gamma(rng)[0] for _ in range(4000)])
    assert np.abs(first - np.linspace(0, 1, 4000)).max() < 0.03


def test_a_dirichlet_model_is_the_combination_of_the_clients_models():
    dirichlet = DirichletModels(stored(MODELS), SHARES, 1.0)
    gamma = dirichlet.gamma(np.random.default_rng(5))
    np.testing.assert_allclose(dirichlet.draw(np.random.default_rng(5)), gamma @ MODELS, rtol=1e-12)


# ---- the ensemble ----------------------------------------------------------------------------------------------------


def test_rounds_without_draws_are_what_the_equations_say():
    """M = 0: the ensemble is the mean and the clients' models, and the next model is what is made of them."""
    distil = Distil()
    received, _, arrays = run(FedBE(samples=0, distil=distil, max_weight_share=1), rounds=4)
    model, weights = START, [examples_of(k) for k in range(3)]
    for number in range(1, 5):
        clients = [trained(received[k, number], k, number) for k in range(3)]
        for k in range(3):
            assert_alike(received[k, number], model)
        mean = weighted_mean(clients, weights)
        assert_alike(distil.students[number - 1], mean)
        members = [mean, *clients]
        for member, expected in zip(distil.ensembles[number - 1], members, strict=True):
            assert_alike(member, expected)
        model = Distil.of(members, mean)
    assert_alike(arrays, model)


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_the_ensemble_is_the_draws_the_mean_and_the_clients(distribution):
    distil = Distil()
    received, _, _ = run(FedBE(distribution=distribution, samples=4, distil=distil), rounds=2)
    for number, (members, student) in enumerate(zip(distil.ensembles, distil.students, strict=True), start=1):
        assert len(members) == 4 + 1 + 3
        assert bits(members[4]) == bits(student)
        for k, member in enumerate(members[5:]):
            assert bits(member) == bits(trained(received[k, number], k, number))
        assert len({member["w"].tobytes() for member in members}) == 8, "all differ"


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_parameters_are_drawn_and_buffers_are_the_means(distribution):
    distil = Distil()
    _, _, arrays = run(FedBE(distribution=distribution, samples=5, distil=distil), rounds=1)
    mean = distil.students[0]
    for member in distil.ensembles[0][:5]:
        assert list(member) == list(START)
        for name, value in START.items():
            assert member[name].dtype == value.dtype and member[name].shape == value.shape
            assert (member[name].tobytes() == mean[name].tobytes()) == name.startswith("n.")
    assert arrays["n.num_batches_tracked"].dtype == START["n.num_batches_tracked"].dtype
    # 5, 7 and 9 batches, of 3, 7 and 11 examples
    assert arrays["n.num_batches_tracked"] == round((3 * 5 + 7 * 7 + 11 * 9) / 21)


WIDE = {"w": np.zeros(4000, np.float32)}


def wide(model, partition, number):
    return {"w": (model["w"] + np.random.default_rng([partition, number]).normal(size=4000)).astype(np.float32)}


@pytest.mark.parametrize("distil", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.09])
def test_a_round_draws_from_the_gaussian_of_the_clients_models(distil, scale):
    """Its draws, in standard deviations from the mean, are normal with the variance scale as variance."""
    note = Distil()
    note.of = lambda members, student: members[0]
    strategy = FedBE(samples=1, variance_scale=scale, distil=note if distil else False)
    received, _, arrays = run(strategy, start=WIDE, make=wide, rounds=2)
    clients = np.array([wide(received[k, 2], k, 2)["w"] for k in range(3)], np.float64)
    weights = [examples_of(k) for k in range(3)]
    mean = np.average(clients, 0, weights)
    deviation = np.sqrt(np.average((clients - mean) ** 2, 0, weights))
    z = (arrays["w"] - mean) / deviation
    assert abs(z.mean()) < 0.06 and z.std() == pytest.approx(np.sqrt(scale), rel=0.04)


def test_without_distillation_the_next_model_is_one_draw_of_the_dirichlet():
    strategy = FedBE(distribution="dirichlet", distil=False)
    received, _, arrays = run(strategy, start=WIDE, make=wide, rounds=2)
    clients = np.array([wide(received[k, 2], k, 2)["w"] for k in range(3)], np.float64)
    gamma, *_ = np.linalg.lstsq(clients.T, arrays["w"].astype(np.float64), rcond=None)
    assert (gamma > 0).all() and gamma.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(gamma @ clients, arrays["w"], atol=1e-5)
    assert np.abs(gamma - np.array([3, 7, 11]) / 21).max() > 0.01, "and it is not the mean"


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_a_lone_clients_model_is_the_next_one(distribution):
    strategy = FedBE(distribution=distribution, distil=False, min_available_nodes=1)
    received, _, arrays = run(strategy, [1], rounds=2)
    assert bits(arrays) == bits(trained(received[1, 2], 1, 2))


# ---- randomness ------------------------------------------------------------------------------------------------------


class AnyOrder(InProcessGrid):
    """Replies come in an order of their own."""

    def __init__(self, nodes, **options):
        super().__init__(nodes, **options)
        self.random, self.put_off = random.Random(3), {}

    def pull_messages(self, message_ids):
        ready = []
        for message_id in message_ids:
            self.put_off.setdefault(message_id, self.random.randint(0, 2))
            self.put_off[message_id] -= 1
            if self.put_off[message_id] < 0:
                ready.append(message_id)
        return super().pull_messages(ready)


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
@pytest.mark.parametrize("distil", [True, False])
def test_the_same_seed_gives_the_same_result_in_whatever_order_clients_reply(distribution, distil):
    def ended(seed, grid=InProcessGrid):
        options = {"distribution": distribution, "samples": 3, "distil": Distil() if distil else False}
        return run(FedBE(**options, seed=seed), range(4), grid=grid)

    (_, in_order, first), (_, out_of_order, second), (_, _, other) = ended(1), ended(1, AnyOrder), ended(2)
    assert [r.replied for r in in_order.values()] != [r.replied for r in out_of_order.values()]
    assert_alike(second, first)
    assert not np.allclose(first["w"], other["w"], atol=1e-3)


def test_every_round_draws_anew():
    distil = Distil()
    run(FedBE(samples=2, distil=distil), start=WIDE, make=lambda m, k, number: {"w": WIDE["w"] + k})
    draws = [member["w"] for members in distil.ensembles for member in members[:2]]
    pairs = np.corrcoef(draws) - np.eye(6)
    assert np.abs(pairs).max() < 0.1


# ---- rounds in which not all goes well -------------------------------------------------------------------------------


def test_a_reply_that_is_refused_is_not_in_the_ensemble():
    def make(model, partition, number):
        made = trained(model, partition, number)
        return {**made, "b": np.array(np.nan)} if (partition, number) == (1, 2) else made

    distil = Distil()
    received, reports, _ = run(FedBE(samples=2, distil=distil), make=make)
    assert [client for client, _ in reports[2].refused] == ["client-1"]
    assert [len(members) for members in distil.ensembles] == [6, 5, 6]
    expected = [trained(received[k, 2], k, 2) for k in (0, 2)]
    assert [bits(member) for member in distil.ensembles[1][3:]] == [bits(model) for model in expected]
    assert_alike(distil.students[1], weighted_mean(expected, [3, 11]))


def test_what_came_in_an_attempt_that_failed_is_not_in_the_ensemble():
    tries = []

    def fails(partition, number):
        tries.append(number)
        return number == 2 and tries.count(2) <= 2

    distil = Distil()
    strategy = FedBE(samples=0, distil=distil, min_replies=2)
    _, reports, _ = run(strategy, rounds=2, fails=fails)
    assert tries.count(2) == 6 and len(reports[2].replied) == 3
    assert len(distil.ensembles) == 2 and len(distil.ensembles[1]) == 4


def test_only_those_that_took_part_in_a_round_are_in_its_ensemble():
    distil = Distil()
    strategy = FedBE(samples=0, distil=distil, fraction_train=0.4, min_replies=2)
    received, reports, _ = run(strategy, range(5))
    for number, report in reports.items():
        assert len(report.replied) == 2
        expected = [bits(trained(received[k, number], k, number)) for k in sorted(int(c[-1]) for c in report.replied)]
        assert [bits(member) for member in distil.ensembles[number - 1][1:]] == expected


def test_a_reply_for_which_the_disk_has_no_room_is_left_out(monkeypatch):
    write, calls = ModelStore.write, []

    def full(store, values):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(store, values)

    monkeypatch.setattr(ModelStore, "write", full)
    distil = Distil()
    _, reports, _ = run(FedBE(samples=0, distil=distil))
    assert [len(report.replied) for report in reports.values()] == [3, 2, 3]
    assert [len(members) for members in distil.ensembles] == [4, 3, 4]
    assert "No space left" in reports[2].notes[0][1]


def test_a_participant_costs_what_it_costs_fedavg_both_ways():
    options = {"fraction_train": 0.6, "min_replies": 2}
    _, ours, _ = run(FedBE(distil=False, **options), range(5))
    _, theirs, _ = run(FedAvg(**options), range(5))
    for number, report in theirs.items():
        assert (ours[number].down.payload, ours[number].up.payload) == (report.down.payload, report.up.payload)
        assert ours[number].asked == report.asked


@pytest.mark.parametrize("distil", [True, False])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_stopped_and_goes_on_equals_one_that_was_not(tmp_path, stop, distil):
    def made(folder, **options):
        return FedBE(distribution="dirichlet", samples=2, distil=Distil() if distil else False, fraction_train=0.6,
                     min_replies=2, deterministic=True, seed=4, checkpoints=Checkpoints(folder / "checkpoints", 2),
                     **options)  # fmt: skip

    whole, _, expected = run(made(tmp_path / "a"), range(5), rounds=5, cache=str(tmp_path / "a" / "cache"))
    cache = str(tmp_path / "b" / "cache")
    run(made(tmp_path / "b"), range(5), rounds=stop, cache=cache)
    resumed, reports, arrays = run(made(tmp_path / "b", resume=True), range(5), rounds=5, cache=cache)
    assert min(reports) == stop + 1
    assert bits(arrays) == bits(expected)
    assert {at: bits(model) for at, model in resumed.items()} == {at: bits(whole[at]) for at in resumed}
    folder = tmp_path / "b" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["round-000004", "round-000005"]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_one_model_of_the_ensemble_at_a_time_is_in_memory(quick_gc):
    left = []

    def distil(models, student):
        drawn = []
        for number, model in enumerate(models):
            gc.collect()
            left.append(sum(array() is not None for array in drawn))
            if number < 5:
                drawn.append(weakref.ref(model["w"]))
        return student

    run(FedBE(samples=5, distil=distil), range(4), start=WIDE, make=wide, rounds=2)
    assert len(left) == 2 * (5 + 1 + 4)
    assert max(left) <= 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux says which files are open")
def test_the_file_of_a_rounds_models_goes_with_the_round(tmp_path):
    def files():
        names = []
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that of the folder itself
                names.append(os.readlink(link))
        return names

    open_in = []

    def distil(models, student):
        list(models)
        open_in.append(any(str(tmp_path / "checkpoints") in name for name in files()))
        return student

    strategy = FedBE(distil=distil, checkpoints=tmp_path / "checkpoints")
    run(strategy)
    assert all(open_in) and len(open_in) == 3
    assert not any(".tepal-" in name for name in files())


# ---- with other methods, and what is said before the first round -----------------------------------------------------


def test_the_modes_of_an_ensemble_can_be_trained_with_it():
    initial = join_modes(ArrayRecord({"w": Array(np.full(3, k, np.float32))}) for k in (0, 10))
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        w = msg.content["arrays"]["w"].numpy() + int(context.node_config["partition-id"])
        content = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    member = FedBE(distribution="dirichlet", distil=False)
    strategy = FedEnsemble(modes=2, strata=1, member=member, fraction_evaluate=0)
    result = strategy.start(InProcessGrid([Node(app, {"partition-id": k}) for k in range(3)]), initial, num_rounds=2)
    first, second = (array.numpy() for array in result.arrays.values())
    assert np.ptp(first) < 1e-6 and 0 < first[0] < 2 and 10 < second[0] < 12


@pytest.mark.parametrize("distil", [None, True])
def test_without_anything_to_distil_with_it_is_refused_with_what_to_do(distil):
    with pytest.raises(MethodError, match=r"unlabelled examples.*Distiller.*distil=False"):
        FedBE(distil=distil)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distribution": "normal"}, "distribution is 'normal'; it must be one of gaussian, dirichlet"),
        ({"samples": -1}, "samples is -1; it must be a whole number, at least 0 and at most 1000"),
        ({"concentration": 0.0}, r"concentration is 0\.0; it must be a number, above 0"),
        ({"concentration": float("nan")}, "concentration is nan"),
        ({"variance_scale": 0.0}, r"variance_scale is 0\.0; it must be a number, above 0"),
        ({"variance_scale": float("inf")}, "variance_scale is inf"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        FedBE(distil=False, **options)


def test_what_is_described_has_the_variance_scale_and_the_distillers_temperature():
    described = FedBE(variance_scale=0.01, distil=Distil()).method.describe()
    assert (described["variance scale"], described["temperature"]) == (0.01, 1.0)
    sharp = Distil()
    sharp.temperature = 0.5
    assert FedBE(distil=sharp).method.describe()["temperature"] == 0.5


def test_a_model_without_parameters_is_refused():
    start = ArrayRecord({"ids": Array(np.arange(3))})
    with pytest.raises(MethodError, match="no floating-point parameters, but FedBE draws them"):
        FedBE(distil=False).start(InProcessGrid([]), start)


def test_a_round_without_replies_draws_nothing():
    with pytest.raises(RoundFailed, match="not now"):
        run(FedBE(distil=Distil()), fails=lambda partition, number: True)
