"""Fed-ensemble: who gets which mode, what is merged into it, what travels, and what a restart changes (nothing).

A client's training is arithmetic on what it received, and every test writes down what each of them received and
returned: the modes that must come out are computed from these notes.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from tepal import models
from tepal.client_app import apply_plan
from tepal.client_app.app import app as project_app
from tepal.exchange import PartialExchange, partial_exchange, received
from tepal.exchange.manifest import PARTS, RECORD, Manifest
from tepal.models.blocks import canonical_state, find_blocks
from tepal.strategies import (
    Ditto,
    FedACS,
    FedAvg,
    FedEnsemble,
    FedFrozen,
    LocalOnly,
    MethodError,
    MethodStrategy,
    RoundFailed,
    SelectiveLayers,
    join_modes,
    modes_of,
)
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.fedensemble import EnsembleState, FedEnsembleMethod, rounds_of_mode
from tepal.strategies.fedfrozen import FedFrozenMethod
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.method import Run as MethodRun
from tepal.strategies.schedule import mode_schedule, rounds_of
from tepal.training.data import DataConfig, load_client
from tests.apps import quickstart_app
from tests.quiet import quiet  # noqa: F401

NBYTES = 5 * 8 + 3 * 4
"""Of one model."""


# ---- a run of numpy clients ------------------------------------------------------------------------------------------


def starts(modes):
    """The initial arrays: models that have nothing in common but their names."""
    rng = np.random.default_rng(17)
    return join_modes(
        {"w": Array(rng.normal(size=5)), "b": Array(rng.normal(size=3).astype(np.float32))} for _ in range(modes)
    )


def examples_of(client):
    return 1 + 3 * (ord(client[0]) - ord("a"))


def loss_of(client, mode, server_round):
    return float(np.random.default_rng([ord(client[0]), mode, server_round]).uniform(0.1, 1))


@dataclass
class Training:
    """What a client was sent in a round, and what it made of it."""

    client: str
    round: int
    mode: int
    received: dict
    returned: dict
    config: dict


@dataclass
class Run:
    reports: dict = field(default_factory=dict)
    """Round → report."""
    models: dict = field(default_factory=dict)
    """Round → the K models after it; round 0 are the initial ones."""
    trained: list = field(default_factory=list)
    result: object = None

    def modes_of_clients(self):
        """(round, client) → mode that it trained."""
        return {(t.round, t.client): t.mode for t in self.trained}


def numpy_app(run, fails=lambda client, server_round: False, scores=True):
    """`scores`: clients score what they receive, as the project's own do; then nothing is scored between rounds."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        manifest = received(msg).manifest
        client, server_round = manifest.plan.client, manifest.plan.round
        if fails(client, server_round):
            raise RuntimeError("not now")
        mode = int(manifest.plan.model.removeprefix("mode/")) if manifest.plan.model != "model" else 0
        rng = np.random.default_rng([ord(client[0]), server_round])
        came = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        made = {name: (array / 2 + rng.normal(size=array.shape)).astype(array.dtype) for name, array in came.items()}
        run.trained.append(Training(client, server_round, mode, came, made, dict(msg.content["config"])))
        metrics = {"num-examples": examples_of(client), "train-loss": 1.0}
        if scores:
            metrics |= {"received-loss": loss_of(client, mode, server_round), "test-examples": 2}
        record = ArrayRecord({name: Array(array) for name, array in made.items()})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2, "received-loss": 0.5})}), reply_to=msg)

    return app


def nodes_of(app, clients):
    return [Node(app, {}, name=client) for client in clients]


def start(strategy, clients, rounds, *, initial=None, app=None, grid=None, timeout=30.0, between=None, **config):
    """Run a strategy over clients of these names. `app(run)` makes their app; `between(report, grid)` may change it."""
    run = Run()
    grid = grid or InProcessGrid(nodes_of((app or numpy_app)(run), clients))

    def on_round(report):
        if report.round:
            run.reports[report.round] = report
            if between:
                between(report, grid)

    strategy.on_round = on_round
    initial = initial or starts(strategy.method.modes if isinstance(strategy, FedEnsemble) else 1)
    run.result = strategy.start(
        grid,
        initial,
        num_rounds=rounds,
        timeout=timeout,
        train_config=ConfigRecord(config),
        evaluate_fn=lambda number, arrays: run.models.update({number: plain(arrays)}),
    )
    return run


def plain(arrays):
    """The K models of a record as numpy arrays."""
    return [{name: array.numpy().copy() for name, array in mode.items()} for mode in modes_of(arrays)]


def same_bits(one, other):
    return all(one[name].tobytes() == other[name].tobytes() for name in {*one, *other})


def assert_modes_are_merged_from_their_own_replies(run, weight=lambda client: 1):
    """Round by round, from what the clients whose replies were merged returned."""
    for number, report in run.reports.items():
        before, after = run.models[number - 1], run.models[number]
        last = {t.client: t for t in run.trained if t.round == number}  # a round may have been repeated
        merged = [last[client] for client in report.replied]
        assert len(set(report.replied)) == len(merged)
        for mode, model in enumerate(before):
            mine = [t for t in merged if t.mode == mode]
            assert all(same_bits(t.received, model) for t in mine)
            if not mine:
                assert same_bits(after[mode], model), f"round {number}: nobody had mode {mode}"
            for name in model if mine else ():
                total = sum(weight(t.client) for t in mine)
                mean = sum(weight(t.client) / total * t.returned[name].astype(np.float64) for t in mine)
                np.testing.assert_allclose(after[mode][name], mean, rtol=1e-6 if name == "b" else 1e-12)


def assert_scheduled(run, seed, modes, strata):
    """Every client that was asked trained what its stratum has in this round of this age. Returns client → stratum."""
    stratum_of = {}
    for number, report in run.reports.items():
        record = report.record
        asked = dict(zip(record["clients"].tolist(), record["strata"].tolist(), strict=True))
        assert set(asked) == set(report.asked)
        column = mode_schedule(strata, modes, (number - 1) // modes, seed)[:, (number - 1) % modes]
        assert record["modes"].tolist() == [column[asked[client]] for client in record["clients"].tolist()]
        for client, stratum in asked.items():
            assert stratum_of.setdefault(client, stratum) == stratum, f"{client} changed its stratum"
    for (number, client), mode in run.modes_of_clients().items():
        age, place = divmod(number - 1, modes)
        assert mode == mode_schedule(strata, modes, age, seed)[stratum_of[client], place]
    return stratum_of


# ---- who gets what, and what is merged -------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize(("modes", "strata"), [(3, 5), (3, 2), (4, 0), (1, 2)])
def test_modes_go_out_by_the_schedule_and_are_merged_from_their_own_replies_alone(modes, strata, weighting):
    run = start(FedEnsemble(modes=modes, strata=strata, seed=5, weighting=weighting), "abcde", rounds=2 * modes + 2)
    stratum_of = assert_scheduled(run, 5, modes, strata or 5)
    assert set(stratum_of.values()) == set(range(strata or 5))
    assert_modes_are_merged_from_their_own_replies(run, examples_of if weighting == "examples" else lambda client: 1)
    assert all(same_bits(*pair) for pair in zip(run.models[2 * modes + 2], plain(run.result.arrays), strict=True))


def test_in_one_age_every_client_of_a_full_cohort_trains_every_mode_once():
    run = start(FedEnsemble(modes=4, fraction_evaluate=0), "abc", rounds=8)
    for client, age in itertools.product("abc", (0, 1)):
        mine = [t.mode for t in run.trained if t.client == client and (t.round - 1) // 4 == age]
        assert sorted(mine) == [0, 1, 2, 3]


def test_a_mode_that_nobody_had_in_a_round_is_bit_identical():
    run = start(FedEnsemble(modes=5), "ab", rounds=5)
    for number in range(1, 6):
        had = {t.mode for t in run.trained if t.round == number}
        same = {k for k in range(5) if same_bits(run.models[number][k], run.models[number - 1][k])}
        assert same == set(range(5)) - had and len(same) >= 3


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_one_mode_is_fedavg_with_the_same_weights(weighting):
    ensemble = start(FedEnsemble(modes=1, weighting=weighting, deterministic=True, seed=3), "abcd", rounds=4)
    if weighting == "examples":
        average = start(FedAvg(deterministic=True, seed=3), "abcd", rounds=4)
        for number in range(1, 5):
            (ours,), (theirs,) = ensemble.models[number], average.models[number]
            assert same_bits(ours, theirs), f"round {number}"
        assert ensemble.result.train_metrics_clientapp == average.result.train_metrics_clientapp
        assert ensemble.result.evaluate_metrics_clientapp == average.result.evaluate_metrics_clientapp
    last = [t.returned["w"] for t in ensemble.trained if t.round == 4]
    weights = None if weighting == "uniform" else [examples_of(client) for client in "abcd"]
    np.testing.assert_allclose(ensemble.models[4][0]["w"], np.average(last, axis=0, weights=weights), rtol=1e-12)


def test_one_mode_of_a_torch_model_is_fedavg_bit_for_bit():
    ends = []
    for strategy in (FedEnsemble(modes=1, weighting="examples", deterministic=True), FedAvg(deterministic=True)):
        app = quickstart_app(make_vit, [partial_exchange], calls_apply_plan=False)
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(3)])
        result = strategy.start(grid, ArrayRecord(make_vit().state_dict()), num_rounds=2)
        ends.append({name: array.numpy() for name, array in result.arrays.items()})
    assert list(ends[0]) == list(ends[1]) and same_bits(*ends)


# ---- failures, joiners, cohorts --------------------------------------------------------------------------------------


def test_a_failing_client_shifts_nobodys_schedule():
    """Its own included: what it would have trained in a round that it missed is not made up for."""

    def failing(run):
        return numpy_app(run, lambda client, number: (client, number) in {("b", 2), ("b", 3), ("d", 3), ("e", 7)})

    options = {"modes": 3, "seed": 8, "weighting": "uniform"}
    whole = start(FedEnsemble(**options), "abcde", rounds=9)
    holed = start(FedEnsemble(**options), "abcde", rounds=9, app=failing)
    missed = {(2, "b"), (3, "b"), (3, "d"), (7, "e")}
    expected = {at: mode for at, mode in whole.modes_of_clients().items() if at not in missed}
    assert holed.modes_of_clients() == expected
    assert_scheduled(holed, 8, 3, 5)
    assert_modes_are_merged_from_their_own_replies(holed)


def test_a_mode_whose_clients_all_fail_stays_as_it_is():
    """Two strata, each of one client."""
    run = start(FedEnsemble(modes=2), "ab", rounds=4, app=lambda run: numpy_app(run, lambda c, n: (c, n) == ("a", 3)))
    assert run.reports[3].replied == ["b"]
    assert_modes_are_merged_from_their_own_replies(run)
    assert_scheduled(run, 0, 2, 2)


def test_a_round_that_is_repeated_with_another_cohort_has_the_same_place_in_the_schedule():
    """In each round the first two that are asked fail; of their strata others are asked, for the same modes."""
    failed = {}

    def app(run):
        def fails(client, number):
            first = failed.setdefault(number, set())
            if len(first) < 2 and number in (2, 5):
                first.add(client)
                return True
            return client in first and number in (2, 5)

        return numpy_app(run, fails)

    run = start(FedEnsemble(modes=3, strata=3, fraction_train=0.34, min_replies=2, seed=2), "abcdefghi", 7, app=app)
    assert len(failed[2]) == len(failed[5]) == 2
    assert all(run.reports[number].lost and len(run.reports[number].replied) >= 2 for number in (2, 5))
    assert_scheduled(run, 2, 3, 3)
    assert_modes_are_merged_from_their_own_replies(run)


def test_a_client_that_leaves_and_comes_back_keeps_its_stratum_and_others_keep_theirs():
    clients = "abcdef"
    away = {}

    def between(report, grid):
        if report.round in (2, 5):
            name = {2: "c", 5: "a"}[report.round]
            node_id = next(node_id for node_id, node in grid.nodes.items() if node.name == name)
            away[name] = grid.nodes[node_id]
            grid.remove(node_id)
        if report.round == 4:
            grid.add(away["c"])

    run = start(FedEnsemble(modes=3, strata=3, seed=1), clients, rounds=8, between=between)
    assert set(run.reports[3].asked) == set(run.reports[4].asked) == set("abdef")
    stratum_of = assert_scheduled(run, 1, 3, 3)
    assert {t.round for t in run.trained if t.client == "c"} == {1, 2, 5, 6, 7, 8}
    assert sorted(stratum_of.values()) == [0, 0, 1, 1, 2, 2]


def test_joiners_go_to_the_smallest_stratum():
    clients = list("abcde")
    joined = {1: ["f"], 2: ["g", "h"], 3: ["i", "j", "k", "l"]}

    def between(report, grid):
        app = next(iter(grid.nodes.values())).app
        for name in joined.get(report.round, ()):
            grid.add(Node(app, {}, name=name))

    run = start(FedEnsemble(modes=2, strata=3, seed=4), clients, rounds=5, between=between)
    assert_scheduled(run, 4, 2, 3)
    for number, report in run.reports.items():
        sizes = np.bincount(report.record["strata"], minlength=3)
        assert sizes.sum() == {1: 5, 2: 6, 3: 8}.get(number, 12)
        assert sizes.max() - sizes.min() <= 1, f"round {number}: strata of {sizes} clients"


@pytest.mark.parametrize(("strata", "fraction", "size"), [(3, 0.34, 4), (4, 0.34, 4), (0, 0.5, 6)])
def test_every_stratum_gives_at_least_one_client_a_round(strata, fraction, size):
    names = "abcdefghijkl"
    run = start(FedEnsemble(modes=2, strata=strata, fraction_train=fraction, fraction_evaluate=0), names, rounds=8)
    seen = set()
    for report in run.reports.values():
        assert len(report.asked) == len(set(report.asked)) == size
        assert set(report.record["strata"].tolist()) == set(range(strata or size))
        seen.update(report.asked)
    assert len(seen) > 0.8 * len(names), "over the rounds a stratum's clients take turns by chance"
    assert_scheduled(run, 0, 2, strata or size)


def test_by_default_each_client_of_a_round_is_of_another_stratum_also_when_most_come_after_the_first_round():
    """A run begins as soon as two clients are there: those that connect a moment later count as well."""

    def between(report, grid):
        if report.round == 1:
            for name in "cdefgh":
                grid.add(Node(grid.nodes[1].app, {}, name=name))

    run = start(FedEnsemble(modes=3, fraction_evaluate=0), "ab", rounds=4, between=between)
    for number in (2, 3, 4):
        strata = run.reports[number].record["strata"].tolist()
        assert len(strata) == len(set(strata)) == 8


def test_cohorts_and_strata_follow_from_the_seed_and_the_names_alone():
    def cohorts(seed, clients):
        run = start(FedEnsemble(modes=3, strata=2, fraction_train=0.5, seed=seed), clients, rounds=6)
        return [
            sorted(zip(*(report.record[key].tolist() for key in ("clients", "strata", "modes")), strict=True))
            for report in run.reports.values()
        ]

    once = cohorts(1, "abcdefgh")
    assert once == cohorts(1, "hcgbfaed")
    assert once != cohorts(2, "abcdefgh")


# ---- over-commitment -------------------------------------------------------------------------------------------------


def test_the_first_replies_are_merged_and_the_others_dropped():
    run = start(FedEnsemble(modes=3, max_replies=4, seed=6, fraction_evaluate=0), "abcdefg", rounds=6)
    assert all(len(report.replied) == 4 and not report.lost for report in run.reports.values())
    assert all(len(report.asked) == 7 for report in run.reports.values())
    assert_scheduled(run, 6, 3, 7)
    for number, report in run.reports.items():
        merged = {(t.client, t.mode): t for t in run.trained if t.round == number and t.client in report.replied}
        for mode, before in enumerate(run.models[number - 1]):
            mine = [t.returned["w"] for (_, had), t in merged.items() if had == mode]
            expected = np.mean(mine, axis=0) if mine else before["w"]
            np.testing.assert_allclose(run.models[number][mode]["w"], expected, rtol=1e-12)


def test_no_mode_is_favoured_where_the_last_replies_are_dropped():
    """The clients are equally fast, and answer in the order in which they were asked."""
    run = start(FedEnsemble(modes=3, max_replies=4, seed=6, fraction_evaluate=0), "abcdefg", rounds=12)
    merged = np.zeros(3, int)
    for (number, client), mode in run.modes_of_clients().items():
        merged[mode] += client in run.reports[number].replied
    assert merged.sum() == 12 * 4
    assert merged.min() >= merged.max() / 2, f"replies merged by mode: {merged}"


# ---- a server that is killed -----------------------------------------------------------------------------------------


class Killed(Exception):
    """The server's end, in the middle of a round."""


@pytest.mark.parametrize("kind", ["schedule", "highest-loss", "more clients than train", "FedFrozen"])
@pytest.mark.parametrize("last", [1, 4, 5])
def test_a_run_that_is_resumed_in_mid_age_ends_as_if_nothing_had_happened(kind, last, tmp_path):
    """Ages are of three rounds, and the rounds 5 and 6 have failures too."""
    from tests.unit.strategies.rounds.test_mutations import BLOCKS, RAW

    strategies = {
        "schedule": lambda **o: FedEnsemble(modes=3, **o),
        "highest-loss": lambda **o: FedEnsemble(modes=3, assign="highest-loss", **o),
        "more clients than train": lambda **o: FedEnsemble(modes=3, strata=2, fraction_train=0.5, **o),
        "FedFrozen": lambda **o: FedEnsemble(modes=3, member=FedFrozen(warmup_rounds=1, model=BLOCKS), **o),
    }
    initial = None
    if kind == "FedFrozen":
        moved = [{name: np.asarray(array + k, array.dtype) for name, array in RAW.items()} for k in range(3)]
        initial = join_modes({name: Array(array) for name, array in raw.items()} for raw in moved)

    def app(run):
        if kind == "FedFrozen":
            return obedient_app(run)
        return numpy_app(run, lambda client, number: (client, number) in {("b", 5), ("c", 6)})

    def run(folder, between=None):
        (tmp_path / folder).mkdir(exist_ok=True)
        strategy = strategies[kind](
            deterministic=True, seed=11, schedule="cosine", checkpoints=tmp_path / folder, resume=True,
            experiment=folder,
        )  # fmt: skip
        return start(strategy, "abcde", 8, app=app, initial=initial, between=between, lr=0.5)

    def kill(report, grid):
        if report.round == last + 1:  # its checkpoint is not written any more
            raise Killed

    whole = run("whole")
    with pytest.raises(Killed):
        run("killed", kill)
    resumed = run("killed")
    assert sorted(resumed.reports) == list(range(last + 1, 9))
    for number in resumed.reports:
        then, now = whole.reports[number], resumed.reports[number]
        assert (now.asked, now.replied, now.lost) == (then.asked, then.replied, then.lost)
        assert now.learning_rate == then.learning_rate
        assert all(same_bits(*pair) for pair in zip(resumed.models[number], whole.models[number], strict=True))
    assert resumed.modes_of_clients() == {at: m for at, m in whole.modes_of_clients().items() if at[0] > last}
    assert resumed.result.train_metrics_clientapp == whole.result.train_metrics_clientapp


def obedient_app(run):
    """Adds numbers to the entries that the plan has it train, and to no others."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        came = received(msg)
        manifest = came.manifest
        rng = np.random.default_rng([ord(manifest.plan.client), manifest.plan.round])
        model = dict(came.model)
        for name in manifest.plan.trains:
            model[name] = np.asarray(model[name] + rng.normal(size=model[name].shape)).astype(model[name].dtype)
        mode = int(manifest.plan.model.removeprefix("mode/"))
        run.trained.append(Training(manifest.plan.client, manifest.plan.round, mode, dict(came.model), model, {}))
        raw = manifest.layout.join(model)
        arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in raw.items()})
        metrics = MetricRecord({"num-examples": examples_of(manifest.plan.client), "received-loss": 1.0})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2, "received-loss": 0.5})}), reply_to=msg)

    return app


# ---- what travels ----------------------------------------------------------------------------------------------------


def test_a_round_moves_the_bytes_of_fedavg_and_all_modes_travel_to_be_scored_at_the_end():
    ensemble = start(FedEnsemble(modes=5), "abcd", rounds=6)
    average = start(FedAvg(), "abcd", rounds=6)
    for number in range(1, 7):
        ours, theirs = ensemble.reports[number], average.reports[number]
        assert ours.up.payload == theirs.up.payload == 4 * NBYTES
        assert ours.down.payload == 4 * NBYTES + (4 * 5 * NBYTES if number == 6 else 0)
        assert theirs.down.payload == 4 * NBYTES + (4 * NBYTES if number == 6 else 0)
        assert bool(ours.evaluate_metrics) == (number == 6)


def test_where_nothing_is_scored_at_the_clients_only_single_modes_travel():
    ensemble = start(FedEnsemble(modes=5, fraction_evaluate=0), "abcd", rounds=3)
    assert [(r.down.payload, r.up.payload) for r in ensemble.reports.values()] == [(4 * NBYTES, 4 * NBYTES)] * 3


def test_modes_that_were_scored_between_rounds_are_not_sent_again_until_they_change():
    """By an app that does not score what it trains: all modes travel once, and then those that were merged."""
    run = start(FedEnsemble(modes=4), "ab", rounds=4, app=lambda run: numpy_app(run, scores=False))
    for number, report in run.reports.items():
        merged = len({t.mode for t in run.trained if t.round == number})
        sent = 1 + 4 if number == 1 else merged  # to be trained and then scored; later what is trained is there already
        assert report.down.payload == 2 * sent * NBYTES


# ---- members ---------------------------------------------------------------------------------------------------------


def make_vit(seed=0):
    return models.build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=seed)


def vits(modes):
    return join_modes(ArrayRecord(make_vit(seed).state_dict()) for seed in range(modes))


class Spy:
    """A mod before the exchange's own: what was sent, per message, in entries and bytes."""

    def __init__(self):
        self.sent = []

    def __call__(self, msg, context, call_next):
        if RECORD in msg.content:
            manifest = Manifest.from_content(msg.content)
            if manifest.parcels:
                names = {(parcel.part.tree, name) for parcel in manifest.parcels for name in parcel.sent}
                data = sum(len(array.data) for array in msg.content.get(PARTS, {}).values())
                self.sent.append((manifest.plan.client, manifest.plan.round, manifest.plan.action, names, data))
        return call_next(msg, context)


class Looking(PartialExchange):
    """The exchange's mod that also notes the model that an app returns, before anything is taken out of it."""

    def __init__(self):
        super().__init__()
        self.returned = []

    def __call__(self, msg, context, call_next):
        def look(msg, context):
            reply = call_next(msg, context)
            manifest = received(msg).manifest
            if manifest.plan.action == "train":
                model = make_vit()
                model.load_state_dict(reply.content["arrays"].to_torch_state_dict())
                entries = {name: tensor.numpy().copy() for name, tensor in canonical_state(model).items()}
                self.returned.append((manifest.plan.client, manifest.plan.round, manifest.plan.model, entries))
            return reply

        return super().__call__(msg, context, look)


def test_each_mode_of_fedfrozen_freezes_after_its_own_warm_up_and_its_phi_goes_down_once_to_each_client():
    """Four clients in two strata, three modes: a mode that nobody had in a round is a round behind the others."""
    modes, warmup, rounds, clients = 3, 2, 10, 4
    spy, looking = Spy(), Looking()
    quick = quickstart_app(make_vit, [spy, looking, scored], calls_apply_plan=True)
    grid = InProcessGrid([Node(quick, {"partition-id": k}) for k in range(clients)])
    model = make_vit()
    member = FedFrozen(warmup_rounds=warmup, model=model)
    run = start(FedEnsemble(modes=modes, strata=2, member=member, seed=1), "", rounds, grid=grid, initial=vits(modes))

    blocks = find_blocks(model)
    full, phi = blocks.layout.nbytes(), blocks.layout.nbytes(blocks.query_key)
    merges, has_phi = [0] * modes, set()
    frozen_at = {}
    for number, report in run.reports.items():
        had = dict(zip(report.record["clients"].tolist(), report.record["modes"].tolist(), strict=True))
        phases = {k: "frozen" if merges[k] >= warmup else "warm-up" for k in range(modes)}
        assert all((phase in report.phase) == (phase in phases.values()) for phase in ("warm-up", "frozen"))
        down, up = {}, 0
        for client, mode in had.items():
            frozen = merges[mode] >= warmup
            down[client] = full - (phi if (client, mode) in has_phi else 0)
            up += full - (phi if frozen else 0)
            if frozen:
                has_phi.add((client, mode))
        got = {client: data for client, r, action, _, data in spy.sent if r == number and action == "train"}
        assert got == down
        assert report.up.payload == up
        for mode in set(had.values()):
            merges[mode] += 1
            if merges[mode] == warmup:
                frozen_at[mode] = number
        if number == rounds:
            for client in had:
                down[client] += modes * full - sum(phi for k in range(modes) if (client, k) in has_phi)
        assert report.down.payload == sum(down.values())
    assert min(merges) > warmup and len(set(merges)) > 1, "the modes are not in step"

    server = {number: [entries_of(mode) for mode in after] for number, after in run.models.items()}
    softmax_sees = [name for name in blocks.query_key if not name.endswith("key.bias")]
    for mode, at in frozen_at.items():
        fixed = server[at][mode]
        assert all(not np.array_equal(fixed[name], server[0][mode][name]) for name in softmax_sees)
        for number in range(at, rounds + 1):
            assert all(server[number][mode][name].tobytes() == fixed[name].tobytes() for name in blocks.query_key)
        after = [entries for _, number, tree, entries in looking.returned if tree == f"mode/{mode}" and number > at]
        assert after
        for entries in after:
            assert all(entries[name].tobytes() == fixed[name].tobytes() for name in blocks.query_key)
            assert any(entries[name].tobytes() != fixed[name].tobytes() for name in blocks.value)


def scored(msg, context, call_next):
    """A mod: the client scores what it received, so that nothing is scored between rounds."""
    reply = call_next(msg, context)
    if msg.metadata.message_type == "train" and "metrics" in reply.content:
        reply.content["metrics"]["received-accuracy"] = 0.5
    return reply


def entries_of(raw):
    model = make_vit()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in raw.items()})
    return {name: tensor.numpy().copy() for name, tensor in canonical_state(model).items()}


def test_a_run_without_any_warm_up_is_frozen_in_every_mode_and_each_mode_has_its_own_query_and_key():
    model = make_vit()
    app = quickstart_app(make_vit, [partial_exchange, scored], calls_apply_plan=True)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    strategy = FedEnsemble(modes=2, member=FedFrozen(warmup_rounds=0, model=model))
    run = start(strategy, "", 2, grid=grid, initial=vits(2))
    for before, after in zip(run.models[0], run.models[2], strict=True):
        before, after = entries_of(before), entries_of(after)
        assert all(before[name].tobytes() == after[name].tobytes() for name in find_blocks(model).query_key)
        assert not same_bits(before, after)
    assert {report.phase for report in run.reports.values()} == {"frozen"}


def test_a_warm_up_longer_than_the_run_is_the_ensemble_of_fedavg():
    ends = []
    for member in (FedFrozen(warmup_rounds=9, model=make_vit()), None):
        app = quickstart_app(make_vit, [partial_exchange, scored], calls_apply_plan=True)
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(3)])
        strategy = FedEnsemble(modes=2, member=member, deterministic=True)
        ends.append(start(strategy, "", 3, grid=grid, initial=vits(2)).models[3])
    assert all(same_bits(*pair) for pair in zip(*ends, strict=True))


def test_the_ridge_of_the_member_reaches_the_clients():
    found = []
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        model = make_vit()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        penalty = apply_plan(model, msg).penalty().item()
        weights = [w for name, w in model.state_dict().items() if name.endswith("attention.value.weight")]
        found.append((penalty, 0.5 * 0.3 * sum(w.square().sum().item() for w in weights), len(weights)))
        raise ValueError("enough")

    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    strategy = FedEnsemble(modes=2, member=FedFrozen(warmup_rounds=1, ridge=0.3, model=make_vit()))
    with pytest.raises(RoundFailed, match="enough"):
        start(strategy, "", 1, grid=grid, initial=vits(2))
    assert found
    for got, expected, count in found:
        assert count == 2 and got == pytest.approx(expected, rel=1e-5)


def selective_app(*mods):
    app = quickstart_app(make_vit, [*mods, partial_exchange, scored], calls_apply_plan=True)

    @app.train("probe")
    def probe(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return app


def test_selective_layers_compose_and_the_second_message_carries_no_model():
    spy = Spy()
    app = selective_app(spy)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(4)])
    member = SelectiveLayers(selection="top", model=make_vit())
    run = start(FedEnsemble(modes=3, member=member, fraction_evaluate=0), "", 4, grid=grid, initial=vits(3))
    blocks = find_blocks(make_vit())
    trained = {*blocks.layers[-1], *blocks.head}
    for before, after in zip(run.models[0], run.models[4], strict=True):
        before, after = entries_of(before), entries_of(after)
        assert {name for name in before if before[name].tobytes() != after[name].tobytes()} <= trained
        assert not same_bits(before, after)
    assert {data for *_, action, _, data in spy.sent if action == "train"} == {0}
    assert all(report.up.payload == 4 * blocks.layout.nbytes(trained) for report in run.reports.values())


def test_one_mode_of_selective_layers_is_selective_layers():
    ends = []
    for ensemble in (True, False):
        grid = InProcessGrid([Node(selective_app(), {"partition-id": k}) for k in range(3)])
        strategy = SelectiveLayers(selection="both", budget=1, model=make_vit(), deterministic=True)
        if ensemble:
            strategy = FedEnsemble(modes=1, member=strategy, weighting="examples", deterministic=True)
        ends.append(start(strategy, "", 2, grid=grid, initial=vits(1)).models[2])
    assert same_bits(*(only for (only,) in ends))


# ---- the learning rate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["lr", "learning-rate"])
def test_the_learning_rate_follows_a_modes_own_rounds(key):
    """Two strata and five modes: a mode is trained in some rounds only, and its cosine goes over these."""
    modes, rounds, seed = 5, 13, 2
    strategy = FedEnsemble(modes=modes, strata=2, schedule="cosine", seed=seed)
    run = start(strategy, "abcd", rounds, **{key: 0.5})
    of_round = [
        mode_schedule(2, modes, number // modes, seed)[:, number % modes].tolist() for number in range(rounds)
    ]
    total = [sum(mode in had for had in of_round) for mode in range(modes)]
    assert max(total) < rounds and len(set(total)) > 1
    for t in run.trained:
        turn = sum(t.mode in had for had in of_round[: t.round])  # this round included
        assert t.config[key] == pytest.approx(0.25 * (1 + math.cos(math.pi * (turn - 1) / total[t.mode])))
    for number, report in run.reports.items():
        told = [t.config[key] for t in run.trained if t.round == number]
        assert report.learning_rate == pytest.approx(np.mean(told))


def test_the_learning_rate_of_a_mode_counts_its_merges_and_not_the_rounds_in_which_it_failed():
    def app(run):
        return numpy_app(run, lambda client, number: number in (2, 3) and client == "a")

    run = start(FedEnsemble(modes=2, schedule="cosine"), "ab", 6, app=app, lr=1.0)
    had = {t.round: {} for t in run.trained}
    for t in run.trained:
        had[t.round][t.mode] = t
    merges, failed = [0, 0], 0
    of_round = [set(mode_schedule(2, 2, number // 2, 0)[:, number % 2].tolist()) for number in range(6)]
    for number in range(1, 7):
        for mode, t in had[number].items():
            total = sum(mode in scheduled for scheduled in of_round)
            assert t.config["lr"] == pytest.approx(0.5 * (1 + math.cos(math.pi * merges[mode] / total)))
            merges[mode] += 1
        failed += len(of_round[number - 1] - set(had[number]))
    assert failed, "some mode was not merged in a round in which the schedule has it"


# ---- the mode with the highest loss ----------------------------------------------------------------------------------


def test_a_client_gets_what_it_has_not_had_and_then_the_mode_with_the_highest_loss_on_it():
    modes = 3
    run = start(FedEnsemble(modes=modes, assign="highest-loss", seed=9), "abcd", rounds=12)
    seen = {client: {} for client in "abcd"}
    for t in sorted(run.trained, key=lambda t: t.round):
        losses = seen[t.client]
        if len(losses) < modes:
            assert t.mode not in losses, "first those that it has not had"
        else:
            assert t.mode == max(losses, key=losses.get)
        losses[t.mode] = loss_of(t.client, t.mode, t.round)
    assert_modes_are_merged_from_their_own_replies(run)
    first = [next(t.mode for t in run.trained if t.client == client) for client in "abcd"]
    stratum_of = dict(zip(*(run.reports[1].record[key].tolist() for key in ("clients", "strata")), strict=True))
    assert first == [mode_schedule(4, modes, 0, 9)[stratum_of[client], 0] for client in "abcd"]


def test_a_loss_counts_only_when_the_reply_was_merged():
    """A client whose reply is dropped has not had the mode, as far as the server knows."""
    run = start(FedEnsemble(modes=2, assign="highest-loss", max_replies=2), "abc", rounds=8)
    seen = {client: {} for client in "abc"}
    for number, report in run.reports.items():
        for t in (t for t in run.trained if t.round == number):
            losses = seen[t.client]
            if t.client in report.record["clients"].tolist():
                unseen = set(range(2)) - set(losses)
                assert t.mode in unseen if unseen else t.mode == max(losses, key=losses.get)
            if t.client in report.replied:
                losses[t.mode] = loss_of(t.client, t.mode, number)


def test_without_losses_the_schedule_decides():
    """An app that does not score what it receives."""
    run = start(
        FedEnsemble(modes=3, assign="highest-loss", seed=2, fraction_evaluate=0), "abc", 6,
        app=lambda run: numpy_app(run, scores=False),
    )  # fmt: skip
    assert_scheduled(run, 2, 3, 3)


# ---- initial arrays and result ---------------------------------------------------------------------------------------


NAMES = st.one_of(st.sampled_from(["w", "mode/1/w", "x/mode/0/w", "mode/", "mode", "mode.0.w", "mode/10/w"]), st.text())


@given(st.integers(1, 12), st.sets(NAMES.filter(lambda name: not name.startswith("mode/0/")), min_size=1, max_size=5))
def test_models_that_are_joined_come_apart_as_they_were(count, names):
    rng = np.random.default_rng(0)
    given = [{name: rng.normal(size=2) for name in sorted(names)} for _ in range(count)]
    record = join_modes({name: Array(array) for name, array in model.items()} for model in given)
    found = plain(record)
    assert [list(model) for model in found] == [list(model) for model in given]
    assert all(same_bits(*pair) for pair in zip(found, given, strict=True))
    if count == 1 and "w" in names:
        assert list(record) == sorted(names), "one model keeps its names, unless all look like an ensemble's"


@pytest.mark.parametrize(
    "count",
    [1, 2],
)
def test_a_model_whose_own_names_look_like_those_of_a_mode_stays_whole(count):
    given = [{"mode/0/w": np.full(2, k), "b": np.full(3, k)} for k in range(count)]
    found = plain(join_modes({name: Array(array) for name, array in model.items()} for model in given))
    assert [list(model) for model in found] == [["mode/0/w", "b"]] * count


def test_the_result_has_all_modes_as_the_initial_arrays_have_them():
    run = start(FedEnsemble(modes=3), "ab", rounds=2)
    assert list(run.result.arrays) == list(starts(3)) == [f"mode/{k}/{name}" for k in range(3) for name in "wb"]
    again = start(FedEnsemble(modes=3), "ab", rounds=1, initial=run.result.arrays)
    assert all(same_bits(*pair) for pair in zip(again.models[0], run.models[2], strict=True))
    assert list(start(FedEnsemble(modes=1), "ab", rounds=1).result.arrays) == ["w", "b"]


@pytest.mark.parametrize(("modes", "given"), [(3, 1), (3, 2), (2, 3), (1, 2)])
def test_another_number_of_models_than_modes_is_an_error_that_says_what_to_do(modes, given):
    text = rf"{modes} modes start from {modes} models.*initial arrays are of {given}: join_modes\(\[\.\.\.\]\)"
    with pytest.raises(MethodError, match=text):
        start(FedEnsemble(modes=modes), "ab", rounds=1, initial=starts(given))


def test_a_method_of_one_model_refuses_several():
    for strategy in (FedAvg(), FedFrozen(warmup_rounds=1, model=make_vit())):
        initial = vits(3) if isinstance(strategy, FedFrozen) else starts(3)
        with pytest.raises(MethodError, match="the initial arrays are of 3 models, and this method trains one"):
            start(strategy, "ab", rounds=1, initial=initial)


def test_modes_must_be_of_one_architecture():
    other = join_modes([{"w": Array(np.zeros(5))}, {"w": Array(np.zeros(6))}])
    with pytest.raises(ValueError, match=r"'w' first \(model: float64\[5\], arrays: float64\[6\]\)"):
        start(FedEnsemble(modes=2), "ab", rounds=1, initial=other)


# ---- FedFrozen as the member -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("modes", "strata"), [(2, 1), (3, 1), (3, 2), (3, 10), (5, 20), (4, 4)])
def test_the_rounds_of_a_mode_are_the_mean_over_schedules(modes, strata):
    counts = [rounds_of(k, strata, modes, 60, seed) for seed in range(100) for k in range(modes)]
    assert rounds_of_mode(60, modes, strata) == pytest.approx(np.mean(counts), abs=1)


@pytest.mark.parametrize("strata", [1, 2, 3, 9])
def test_the_usual_warm_up_is_a_part_of_the_rounds_of_each_mode(strata):
    member = FedFrozenMethod(-1)
    FedEnsembleMethod(3, strata, member=member).begin(30)
    rounds = [rounds_of(k, strata, 3, 30, seed=0) for k in range(3)]
    assert all(0.2 * each < member.warmup_rounds < 0.45 * each for each in rounds)


def test_a_run_that_is_prolonged_keeps_the_warm_up_of_its_members(tmp_path):
    phases = {}
    for resume, rounds in ((False, 4), (True, 8)):
        member = FedFrozen(model=make_vit())
        strategy = FedEnsemble(
            modes=2, member=member, fraction_evaluate=0, checkpoints=tmp_path / "checkpoints", resume=resume,
            on_round=lambda report: phases.update({report.round: report.phase}),
        )  # fmt: skip
        app = quickstart_app(make_vit, [partial_exchange], calls_apply_plan=True)
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(4)])
        strategy.start(grid, vits(2), num_rounds=rounds, train_config=ConfigRecord({"lr": 0.02}))
        assert strategy.method.member.warmup_rounds == 1
    assert len(phases) == 8 and {phases[number] for number in range(5, 9)} == {"frozen"}


@pytest.mark.parametrize(("rounds", "says"), [(6, True), (20, False)])
def test_a_run_in_which_no_mode_is_ever_frozen_says_so(rounds, says, caplog):
    """Two clients, each of another stratum, train two of five modes in a round."""
    method = FedEnsembleMethod(5, member=FedFrozenMethod(3))
    method._run = MethodRun()
    method.begin(rounds)
    fewest = min(rounds_of(k, 2, 5, rounds, seed=0) for k in range(5))
    assert (fewest <= 3) == says
    method.cohort(EnsembleState(()), ["a", "b"], 2, np.random.default_rng(0))
    assert ("it is never frozen" in caplog.text) == says


# ---- bad input -------------------------------------------------------------------------------------------------------


BAD_OPTIONS = {
    "no mode": ({"modes": 0}, "modes is 0; it must be a whole number, at least 1 and at most 1000"),
    "negative modes": ({"modes": -2}, "modes is -2; it must be a whole number, at least 1"),
    "negative strata": ({"strata": -1}, "strata is -1; it must be a whole number, at least 0"),
    "weighting": ({"weighting": "size"}, "weighting is 'size'; it must be one of uniform, examples"),
    "assign": ({"assign": "lowest-loss"}, "assign is 'lowest-loss'; it must be one of schedule, highest-loss"),
    "fraction": ({"fraction_train": 0}, "fraction_train is 0; it must be"),
    "schedule": ({"schedule": "linear"}, "schedule is 'linear'; it must be one of"),
    "FedACS": ({"member": FedACS(quantile=0.5)}, "member is FedACS, but a mode must be one global model"),
    "Ditto": ({"member": Ditto()}, "member is Ditto, but a mode must be one global model"),
    "local": ({"member": LocalOnly()}, "member is LocalOnly, but a mode must be one global model"),
    "itself": ({"member": FedEnsemble(modes=2)}, "member is FedEnsemble, but a mode must be one global model"),
}


@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_options_out_of_range_are_errors(kind):
    options, text = BAD_OPTIONS[kind]
    with pytest.raises(ValueError, match=text):
        FedEnsemble(**{"modes": 2, **options})


def test_a_member_that_cannot_train_the_model_says_so():
    with pytest.raises(MethodError, match="FedFrozen must know which entries"):
        start(FedEnsemble(modes=2, member=FedFrozen(warmup_rounds=1)), "ab", rounds=1)


def test_more_strata_than_clients_train_in_a_round_is_an_error_that_says_both_numbers():
    method = FedEnsembleMethod(2, strata=5, member=FedAvgMethod())
    strategy = MethodStrategy(method, fraction_train=0.5)
    with pytest.raises(MethodError, match=r"strata=5: .* 3 of 6 clients.* fewer strata, or a larger fraction_train"):
        start(strategy, "abcdef", rounds=1, initial=starts(2))


@pytest.mark.parametrize(("fraction", "needed"), [(1.0, 5), (0.5, 10), (0.34, 15)])
def test_strata_that_wait_for_clients_which_never_come_end_with_what_is_needed(fraction, needed):
    with pytest.raises(RoundFailed, match=f"4 clients are connected after 0.3 s; {needed} are needed"):
        start(FedEnsemble(modes=2, strata=5, fraction_train=fraction), "abcd", rounds=1, timeout=0.3)


def test_who_waits_for_the_clients_of_many_strata_is_told_to_have_fewer():
    with pytest.raises(RoundFailed, match=r"fewer strata|strata=5"):
        start(FedEnsemble(modes=2, strata=5, min_available_nodes=1), "abcd", rounds=1, timeout=0.3)


@pytest.mark.parametrize(
    ("strata", "fraction"),
    [
        (3, 0.3),
        (7, 0.7),
        (29, 0.58),
    ],
)
def test_the_clients_that_are_waited_for_are_enough_for_the_strata(strata, fraction):
    strategy = FedEnsemble(modes=2, strata=strata, fraction_train=fraction, fraction_evaluate=0)
    names = [f"{chr(ord('a') + k % 26)}{k}" for k in range(strategy.rules.needed)]
    run = start(strategy, names, rounds=1)
    assert set(run.reports[1].record["strata"].tolist()) == set(range(strata))


def test_where_min_replies_makes_a_round_large_enough_for_the_strata_no_more_clients_are_waited_for():
    start(FedEnsemble(modes=2, strata=3, fraction_train=0.1, min_replies=3), "abc", rounds=1, timeout=0.3)


# ---- what clients score ----------------------------------------------------------------------------------------------


def test_the_app_gets_k_complete_models_to_score_the_first_one_under_its_usual_name():
    got = []

    def app(run):
        app = ClientApp(mods=[partial_exchange])
        app._registered_funcs["train.default"] = numpy_app(run)._registered_funcs["train.default"]

        @app.evaluate()
        def evaluate(msg, context):
            records = msg.content.array_records
            got.append((list(records), [plain(record)[0] for record in records.values()]))
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2, "accuracy": 0.5})}), reply_to=msg)

        return app

    run = start(FedEnsemble(modes=12), "ab", rounds=2, app=app)
    assert len(got) == 2
    for names, scored_models in got:
        assert names == ["arrays", *(f"mode/{k}" for k in range(1, 12))]
        assert all(same_bits(*pair) for pair in zip(scored_models, run.models[2], strict=True))
        assert all(list(model) == ["w", "b"] for model in scored_models)


def test_the_projects_own_app_scores_the_mean_probability_of_the_modes():
    """On the digits, against a softmax that is taken and averaged here."""
    config = {"model": "tiny-vit", "dataset": "digits", "partitioner": "iid", "local-steps": 3, "seed": 4}
    sites = [{"partition-id": k, "num-partitions": 8} for k in range(2)]
    grid = InProcessGrid([Node(project_app, site) for site in sites], run_config=config)
    run = start(FedEnsemble(modes=3), "", 2, grid=grid, initial=vits(3))
    assert not run.reports[1].evaluate_metrics, "clients score the mode that they train"
    negative_logs, right, modes_right = [], [], []
    for site in sites:
        test = load_client(DataConfig.from_run_config(config), site, client=f"client-{site['partition-id']}").test
        probabilities = []
        for state in run.models[2]:
            model = make_vit()
            model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
            with torch.no_grad():
                probabilities.append(model.eval()(torch.from_numpy(test.images)).double().softmax(1).numpy())
        mean = np.mean(probabilities, axis=0)
        negative_logs += (-np.log(mean[np.arange(len(test.labels)), test.labels])).tolist()
        right += (mean.argmax(1) == test.labels).tolist()
        modes_right.append(len(test.labels) * max((p.argmax(1) == test.labels).mean() for p in probabilities))
    scores = run.reports[2].evaluate_metrics
    assert scores["ensemble-loss"] == pytest.approx(np.mean(negative_logs), rel=1e-5)
    assert scores["ensemble-accuracy"] == pytest.approx(np.mean(right))
    assert scores["ensemble-highest-accuracy"] == pytest.approx(sum(modes_right) / len(right))
