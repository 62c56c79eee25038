"""FedAMP over whole rounds, against the paper's equations written down over lists of numbers."""

import math
import statistics
from itertools import combinations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange import partial_exchange, received
from tepal.exchange.plan import PROXIMAL
from tepal.strategies import FedACS, FedAMP, FedAvg, MethodError, join_modes
from tepal.strategies.baselines.fedamp import Attention, FedAMPMethod, attention, attention_weights, squared_distances
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.mixing import weighted_rows
from tepal.strategies.personal.storage import PersonalModels
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.state_json import CheckpointError, current_names, from_json, to_json
from tests.quiet import quiet  # noqa: F401

START = {"w": np.array([0.3, -0.2, 0.5]), "n.running_mean": np.array([1.0]), "n.num_batches_tracked": np.array(4)}
PULLS = ([1.0, 0.2, 0.0], [0.9, 0.4, 0.1], [-2.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.5, -0.5, 0.5])
"""What each client's data draw its model to."""
FIXED = {"unit": "absolute"}


# ---- the equations ---------------------------------------------------------------------------------------------------


def squared(one, other):
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def fitted(models, sigma=1.0, alpha=1.0):
    """σ and α of the unit "median", for these multiples of the median and of σ/n."""
    sigma *= statistics.median(squared(one, other) for one, other in combinations(models.values(), 2))
    return sigma, alpha * sigma / len(models)


def mixtures(models, sigma, alpha):
    """Client → u_i, of client → w_i, both lists of numbers; and client → Σ_j ξ_ij before scaling."""
    u, sums = {}, {}
    for i, own in models.items():
        xi = {
            j: alpha * math.exp(-squared(own, other) / sigma) / sigma
            for j, other in models.items()
            if j != i
        }
        sums[i] = sum(xi.values())
        xi = {j: value / max(sums[i], 1.0) for j, value in xi.items()}
        rest = 1 - sum(xi.values())
        u[i] = [rest * own[k] + sum(xi[j] * models[j][k] for j in xi) for k in range(len(own))]
    return u, sums


def trained(w, partition, number):
    """Half the way to what the client's data say, and a little further every round."""
    return [a + 0.5 * (b - a) + 0.01 * number for a, b in zip(w, PULLS[partition], strict=True)]


# ---- the clients -----------------------------------------------------------------------------------------------------


class Clients:
    """What they received, returned and were asked to score: (partition, round) → model."""

    def __init__(self):
        self.received, self.returned, self.scored, self.options = {}, {}, {}, {}

    def app(self, fails=lambda partition, number: False):
        app = ClientApp(mods=[partial_exchange])

        def came(msg, context):
            at = int(context.node_config["partition-id"]), msg.content["config"]["server-round"]
            return at, {name: array.numpy() for name, array in msg.content["arrays"].items()}

        @app.train()
        def train(msg, context):
            at, model = came(msg, context)
            self.received[at] = model
            self.options[at] = dict(received(msg).plan.options)
            if fails(*at):
                raise RuntimeError("not now")
            made = {
                "w": np.array(trained(model["w"], *at)),
                "n.running_mean": model["n.running_mean"] + at[0],
                "n.num_batches_tracked": model["n.num_batches_tracked"] + 1 + at[0],
            }
            self.returned[at] = made
            arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in made.items()})
            metrics = MetricRecord({"num-examples": 3 + at[0]})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

        @app.evaluate()
        def evaluate(msg, context):
            at, model = came(msg, context)
            self.scored[at] = model
            figures = {"num-examples": 2, f"{received(msg).plan.options['scored']}-loss": float(model["w"].sum())}
            return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=msg)

        return app


def run(strategy, partitions=range(3), rounds=4, cache=None, **app):
    clients, reports = Clients(), {}
    made = clients.app(**app)
    config = {"cache-path": cache} if cache else {}
    grid = InProcessGrid([Node(made, {"partition-id": k, **config}) for k in partitions])
    strategy.on_round = lambda report: reports.update({report.round: report})
    record = ArrayRecord({name: Array(array) for name, array in START.items()})
    result = strategy.start(grid, record, num_rounds=rounds, timeout=60)
    return clients, reports, {name: array.numpy() for name, array in result.arrays.items()}


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "alpha", "scaled"), [(2.0, 0.5, False), (4.0, 6.0, True), (0.3, 0.1, False), (1e6, 1e4, False)]
)
@pytest.mark.parametrize("partitions", [range(2), range(3), range(5)], ids=len)
def test_every_client_starts_from_its_u_as_the_paper_computes_it(sigma, alpha, scaled, partitions):
    clients, reports, arrays = run(FedAMP(**FIXED, sigma=sigma, alpha=alpha), partitions)
    w = {k: trained(START["w"].tolist(), k, 1) for k in partitions}
    most = 0.0
    for number in (2, 3, 4):
        u, sums = mixtures(w, sigma, alpha)
        most = max(most, *sums.values())
        for k in partitions:
            np.testing.assert_allclose(clients.received[k, number]["w"], u[k], rtol=1e-6, atol=1e-6)
        w = {k: trained(u[k], k, number) for k in partitions}
        for k in partitions:
            np.testing.assert_allclose(clients.returned[k, number]["w"], w[k], rtol=1e-6, atol=1e-6)
    assert (most > 1) == scaled, "both cases are to be seen"
    np.testing.assert_allclose(arrays["w"], np.mean([*w.values()], axis=0), rtol=1e-6)
    assert list(reports[4].record["clients"]) == [f"client-{k}" for k in partitions]


@pytest.mark.parametrize(("sigma", "alpha"), [(1.0, 1.0), (2.0, 0.5), (0.5, 3.0)])
@pytest.mark.parametrize("partitions", [range(2), range(3), range(5)], ids=len)
def test_with_the_median_as_unit_sigma_and_alpha_follow_the_distances_of_each_round(sigma, alpha, partitions):
    clients, reports, _ = run(FedAMP(sigma=sigma, alpha=alpha, lam=0.3), partitions)
    assert not any(clients.options[k, 1] for k in partitions), "there is no model to measure α by"
    for number in (2, 3, 4):
        w = {k: clients.returned[k, number - 1]["w"].tolist() for k in partitions}
        now = fitted(w, sigma, alpha)
        assert [float(reports[number].record[key]) for key in ("sigma", "alpha")] == pytest.approx(now, rel=1e-9)
        u, _ = mixtures(w, *now)
        for k in partitions:
            np.testing.assert_allclose(clients.received[k, number]["w"], u[k], rtol=1e-6, atol=1e-6)
            assert clients.options[k, number] == {PROXIMAL: pytest.approx(0.3 / now[1], rel=1e-9)}


def test_clients_whose_models_are_equal_start_from_them_without_a_proximal_term():
    def alike(msg, context):
        w = Array(np.array([1.0, 2.0]) * msg.content["config"]["server-round"])
        options.append(dict(received(msg).plan.options))
        content = {"arrays": ArrayRecord({"w": w}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    app, options, reports = ClientApp(mods=[partial_exchange]), [], {}
    app.train()(alike)
    strategy = FedAMP(fraction_evaluate=0, lam=1.0, on_round=lambda report: reports.update({report.round: report}))
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(4)])
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(2))}), num_rounds=3, timeout=60)
    assert options == [{}] * 12
    np.testing.assert_allclose(reports[3].record["weights"], np.full((4, 4), 1 / 4))
    assert reports[3].record["sigma"] == 0


def test_the_record_has_the_squared_distances_and_the_weights():
    clients, reports, _ = run(FedAMP(**FIXED, sigma=2.0, alpha=0.5))
    before = [clients.returned[k, 3]["w"] for k in range(3)]
    apart = [[float(((a - b) ** 2).sum()) for b in before] for a in before]
    record = reports[4].record
    np.testing.assert_allclose(record["distances"], apart, rtol=1e-6)
    np.testing.assert_allclose(record["weights"][0, 1], 0.5 / 2.0 * math.exp(-apart[0][1] / 2.0), rtol=1e-6)
    assert (record["sigma"], record["alpha"]) == (2.0, 0.5)
    np.testing.assert_allclose(record["weights"].sum(axis=1), 1, rtol=1e-6)


def test_statistics_are_mixed_with_the_same_weights_and_not_compared_and_counters_are_the_clients_own():
    clients, reports, _ = run(FedAMP(**FIXED, sigma=2.0, alpha=0.5))
    weights = reports[4].record["weights"]
    means = [clients.returned[k, 3]["n.running_mean"][0] for k in range(3)]
    assert max(means) - min(means) > 3, "they would count for much in a distance"
    for k in range(3):
        assert clients.received[k, 4]["n.running_mean"][0] == pytest.approx(weights[k] @ means, rel=1e-6)
        counter = clients.received[k, 4]["n.num_batches_tracked"]
        assert counter == 4 + 3 * (1 + k) and counter.dtype == START["n.num_batches_tracked"].dtype


def test_a_lone_client_trains_on_from_its_own_model():
    clients, _, _ = run(FedAMP(**FIXED, sigma=2.0, alpha=50.0, min_available_nodes=1), [2])
    for number in (2, 3, 4):
        assert clients.received[2, number]["w"].tobytes() == clients.returned[2, number - 1]["w"].tobytes()


def test_the_client_is_asked_for_the_proximal_term_of_half_lambda_over_alpha():
    clients, _, _ = run(FedAMP(**FIXED, sigma=2.0, alpha=0.5, lam=0.2), rounds=2)
    assert {tuple(options.items()) for options in clients.options.values()} == {((PROXIMAL, 0.4),)}
    clients, _, _ = run(FedAMP(**FIXED, sigma=2.0, alpha=0.5, lam=0.0), rounds=1)
    assert not any(clients.options.values())


def test_what_is_scored_is_w_and_not_u():
    clients, reports, _ = run(FedAMP(**FIXED, sigma=4.0, alpha=6.0))
    for k in range(3):
        assert clients.scored[k, 4]["w"].tobytes() == clients.returned[k, 4]["w"].tobytes()
    mean = np.mean([clients.returned[k, 4]["w"].sum() for k in range(3)])
    assert reports[4].evaluate_metrics["personal-loss"] == pytest.approx(mean)
    assert (reports[4].train_metrics_of, reports[4].eval_metrics_of) == ("trained", "personal")


@pytest.mark.parametrize("newcomers", ["mean", "initial"])
def test_with_some_of_the_clients_a_round_late_ones_start_as_newcomers_do(newcomers):
    strategy = FedAMP(
        **FIXED, sigma=2.0, alpha=1.5, newcomers=newcomers, fraction_train=0.6, min_replies=2, seed=3
    )  # fmt: skip
    clients, reports, _ = run(strategy, range(5), rounds=6, fails=lambda k, number: (k, number) == (1, 4))
    held, late = {}, 0
    for number, report in reports.items():
        u, _ = mixtures(held, 2.0, 1.5)
        for client in report.asked:
            k = int(client[-1])
            late += number > 1 and k not in held
            start = np.mean([*held.values()], axis=0) if held and newcomers == "mean" else START["w"]
            np.testing.assert_allclose(clients.received[k, number]["w"], u.get(k, start), rtol=1e-6, atol=1e-6)
        held |= {int(c[-1]): clients.returned[int(c[-1]), number]["w"].tolist() for c in report.replied}
    assert late and len(held) == 5 and any(len(report.asked) < 5 for report in reports.values())


def test_a_participant_costs_what_it_costs_fedavg_both_ways():
    options = {"fraction_train": 0.6, "fraction_evaluate": 0, "min_replies": 2}
    _, ours, _ = run(FedAMP(**FIXED, sigma=2.0, alpha=0.5, **options), range(5))
    _, theirs, _ = run(FedAvg(**options), range(5))
    for number, report in theirs.items():
        assert (ours[number].down.payload, ours[number].up.payload) == (report.down.payload, report.up.payload)
        assert ours[number].asked == report.asked


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("unit", ["median", "absolute"])
def test_a_run_that_was_stopped_and_goes_on_equals_one_that_was_not(tmp_path, stop, unit):
    def made(folder, **options):
        return FedAMP(sigma=2.0, alpha=1.0, unit=unit, fraction_train=0.6, min_replies=2, deterministic=True,
                      checkpoints=Checkpoints(folder / "checkpoints", 2), **options)  # fmt: skip

    whole, _, expected = run(made(tmp_path / "a"), range(5), rounds=6, cache=str(tmp_path / "a" / "cache"))
    cache = str(tmp_path / "b" / "cache")
    run(made(tmp_path / "b"), range(5), rounds=stop, cache=cache)
    resumed, reports, arrays = run(made(tmp_path / "b", resume=True), range(5), rounds=6, cache=cache)
    assert min(reports) == stop + 1
    assert {name: array.tobytes() for name, array in arrays.items()} == {n: a.tobytes() for n, a in expected.items()}
    for at, model in resumed.received.items():
        assert model["w"].tobytes() == whole.received[at]["w"].tobytes()


def test_a_run_with_another_sigma_is_not_resumed(tmp_path):
    run(FedAMP(**FIXED, sigma=2.0, alpha=1.0, checkpoints=tmp_path / "c"), rounds=1)
    with pytest.raises(CheckpointError, match="another strategy"):
        run(FedAMP(**FIXED, sigma=2.5, alpha=1.0, checkpoints=tmp_path / "c", resume=True))
    with pytest.raises(CheckpointError, match=r"another strategy .*'unit': 'absolute'.*'unit': 'median'"):
        run(FedAMP(sigma=2.0, alpha=1.0, checkpoints=tmp_path / "c", resume=True))
    with pytest.raises(CheckpointError, match="another strategy"):
        run(FedACS(quantile=0.5, checkpoints=tmp_path / "c", resume=True))


def test_a_checkpoint_that_names_no_unit_is_of_absolute_distances():
    earlier = {"name": "AttentiveMixing", "sigma": 100.0, "alpha": 10.0, "lambda": 1.0}
    now = {**FedAMPMethod(100.0, 10.0, 1.0, "absolute", "initial").describe(), "name": "FedAMPMethod"}
    assert current_names(earlier) == current_names({**earlier, "name": "FedAMPMethod"}) == now
    assert current_names({**now, "unit": "median"})["unit"] == "median"
    assert "unit" not in current_names({"name": "FedACSMethod", "quantile": 0.5})


# ---- the weights -----------------------------------------------------------------------------------------------------

POSITIVE = st.floats(1e-6, 1e6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.floats(1e-3, 1e3), POSITIVE, POSITIVE)
def test_no_client_gives_away_more_than_all(seed, n, spread, sigma, alpha):
    models = spread * np.random.default_rng(seed).normal(size=(n, 5))
    distances = squared_distances(models @ models.T)
    np.testing.assert_allclose(distances, ((models[:, None] - models) ** 2).sum(-1), rtol=1e-6, atol=1e-9 * spread**2)
    fixed = Attention(sigma, alpha / sigma)
    weights = attention_weights(distances, fixed)
    others = weights - np.diag(np.diagonal(weights))
    assert (weights >= 0).all() and (others.sum(axis=1) <= 1 + 1e-12).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(attention_weights(distances, fixed, [n - 1]), weights[[n - 1]])


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.floats(1e-2, 1e2), st.floats(1e-2, 1.0))
def test_with_the_median_as_unit_the_weights_do_not_depend_on_the_scale_and_the_own_model_keeps_its_share(
    seed, n, sigma, alpha
):
    models = np.random.default_rng(seed).normal(size=(n, 5))
    distances = ((models[:, None] - models) ** 2).sum(-1)
    weights, scaled = (
        attention_weights(each, attention(each, sigma, alpha, "median")) for each in (distances, 1000 * distances)
    )
    np.testing.assert_allclose(scaled, weights, rtol=1e-9, atol=1e-300)
    assert (np.diagonal(weights) >= 1 / n - 1e-12).all()


DISTANCES = st.one_of(st.just(0.0), st.just(math.inf), st.floats(1e-6, 1e6))


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(DISTANCES, min_size=15, max_size=15))),
       st.floats(0.1, 10.0), st.floats(0.1, 10.0))  # fmt: skip
def test_the_median_is_that_of_the_pairs_with_a_finite_distance(drawn, sigma, alpha):
    n, values = drawn
    pairs = dict(zip(combinations(range(n), 2), values, strict=False))
    distances = np.array([[pairs.get((min(i, j), max(i, j)), 0.0) for j in range(n)] for i in range(n)])
    now = attention(distances, sigma, alpha, "median")
    finite = [x for x in pairs.values() if x < math.inf]
    assert now.sigma == pytest.approx(sigma * statistics.median(finite) if finite else 0.0)
    assert now.alpha == pytest.approx(alpha * now.sigma / n)
    weights = attention_weights(distances, now)
    for i in range(n):
        xi = {j: alpha / n * _decay(distances[i, j], now.sigma) for j in range(n) if j != i}
        total = max(sum(xi.values()), 1.0)
        for j, value in xi.items():
            assert weights[i, j] == pytest.approx(value / total, rel=1e-9, abs=1e-300)
        assert weights[i, i] == pytest.approx(1 - sum(xi.values()) / total, abs=1e-12)


def _decay(x, sigma):
    """e^(−x/σ), and its limit for σ → 0."""
    if x == 0:
        return 1.0
    return math.exp(-x / sigma) if sigma else 0.0


def test_absolute_sigma_and_alpha_are_taken_as_they_are():
    distances = np.array([[0.0, 1e6], [1e6, 0.0]])
    assert attention(distances, 8.0, 2.0, "absolute") == Attention(8.0, 0.25)
    for sigma, alpha in [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)]:
        with pytest.raises(ValueError, match="it must be a positive number"):
            attention(distances, sigma, alpha, "median")


def test_the_distance_is_squared():
    """Two models 3 apart, σ = 9: e^(−9/9) and not e^(−3/9)."""
    weights = attention_weights(np.array([[0.0, 9.0], [9.0, 0.0]]), Attention(9.0, 0.5))
    assert weights[0, 1] == pytest.approx(0.5 * math.exp(-1))


def test_a_model_that_is_drawn_wholly_to_another_one_becomes_that_one():
    """Σξ = 1 of one neighbour alone: nothing is left of the client's own."""
    weights = attention_weights(np.zeros((2, 2)), Attention(1.0, 5.0))
    np.testing.assert_array_equal(weights, [[0, 1], [1, 0]])
    models = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    assert [part.tolist() for _, part in weighted_rows(models, weights)] == [[3, 4], [1, 2]]


def test_a_model_that_diverged_is_mixed_with_no_other():
    gram = np.array([[1.0, 0.9, np.inf], [0.9, 1.0, np.nan], [np.inf, np.nan, np.inf]])
    weights = attention_weights(squared_distances(gram), Attention(1.0, 0.4))
    np.testing.assert_array_equal(weights[2], [0, 0, 1])
    np.testing.assert_array_equal(weights[:, 2], [0, 0, 1])
    assert weights[0, 1] == pytest.approx(0.4 * math.exp(-0.2))


def test_models_that_are_as_far_away_as_numbers_can_say_do_not_stop_the_run():
    distances = np.array([[0.0, 1e308, np.inf], [1e308, 0.0, np.inf], [np.inf, np.inf, 0.0]])
    weights = attention_weights(distances, attention(distances, 100.0, 1.0, "median"))
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    np.testing.assert_array_equal(weights[2], [0, 0, 1])


def test_small_distances_of_large_models_are_not_lost_by_rounding():
    """‖w‖² is 1e8 and the distances are 0.01 or so, which float32 products alone would not show."""
    start = {"w": np.full(10_000, 100, np.float32)}
    steps = np.random.default_rng(0).normal(size=(3, 10_000), scale=1e-3).astype(np.float32)
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        w = msg.content["arrays"]["w"].numpy() + steps[int(context.node_config["partition-id"])]
        content = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    reports = {}
    strategy = FedAMP(fraction_evaluate=0, on_round=lambda report: reports.update({report.round: report}))
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(3)])
    strategy.start(grid, ArrayRecord({"w": Array(start["w"])}), num_rounds=2, timeout=60)
    models = (start["w"] + steps).astype(np.float64)
    apart = ((models[:, None] - models) ** 2).sum(-1)
    np.testing.assert_allclose(reports[2].record["distances"], apart, rtol=1e-4)


def test_weights_that_are_no_mean_are_refused():
    models = np.eye(2)
    for weights, words in [
        (np.ones((1, 3)) / 3, r"\(1, 3\)"),
        (np.array([[2.0, -1.0]]), "at least 0"),
        (np.array([[0.5, 0.4]]), "sum to 1"),
        (np.array([[np.nan, 1.0]]), "at least 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            weighted_rows(models, weights)
    assert list(weighted_rows(models, np.zeros((0, 2)))) == []


# ---- what is said before the first round -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_options_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=r"sigma is .*; it must be a number, above 0"):
        FedAMP(sigma=value, alpha=1.0)
    with pytest.raises(ValueError, match=r"alpha is .*; it must be a number, above 0"):
        FedAMP(sigma=1.0, alpha=value)
    if value:
        with pytest.raises(ValueError, match=r"lam is .*; it must be a number, at least 0"):
            FedAMP(lam=value)
    with pytest.raises(ValueError, match="unit is 'mean'; it must be one of median, absolute"):
        FedAMP(unit="mean")


def test_errors_name_fedamp():
    start = ArrayRecord({"ids": Array(np.arange(3))})
    with pytest.raises(MethodError, match="no floating-point parameters, but FedAMP compares them"):
        FedAMP().start(InProcessGrid([]), start)
    with pytest.raises(MethodError, match="of 2 models; FedAMP starts from one"):
        FedAMP().start(InProcessGrid([]), join_modes([start, start]))


# ---- what it shares with FedACS --------------------------------------------------------------------------------------


def test_a_checkpoint_of_fedacs_from_before_there_was_a_common_base_can_be_read():
    """Its state is of a dataclass that was FedACS's own."""
    state = PersonalModels({"w": np.ones(2)}, ("w",), 2, clients=("a",), slots={"a": 0}, gram=np.eye(1))
    arrays = {}
    kept = to_json(state, arrays)
    assert kept["type"] == "tepal.strategies.personal.storage:PersonalModels"
    kept["type"] = "tepal.strategies.fedacs:PersonalModels"
    assert from_json(kept, arrays) == state
