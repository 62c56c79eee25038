"""A population of simulated clients: each exists while it answers, and introduces itself when it is drawn first."""

import shutil
import zlib
from collections import Counter

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo

from tepal.exchange import PartialExchange, received
from tepal.exchange.cache import default_root
from tepal.exchange.manifest import Manifest
from tepal.exchange.mod import own_name
from tepal.exchange.plan import FINAL
from tepal.strategies import FedACS, FedAvg, FedEnsemble, in_process, join_modes
from tepal.strategies.in_process import InProcessGrid, Node, PopulationGrid
from tepal.strategies.rounds import cohort
from tepal.strategies.rounds.best import BestModel, Scores
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.cohort import Cohorts, Rules
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.report import RoundFailed, RoundReport

START = ArrayRecord({"w": Array(np.zeros(3))})


def app_of(introduced=None, able=lambda number: True):
    """An app that answers with numbers of its own; `introduced` gets the numbers of those that introduce themselves."""

    def introduce(msg, context):
        number = int(context.node_config["partition-id"])
        if introduced is not None:
            introduced.append(number)
        if not able(number):
            raise ValueError("it has no examples")
        return {"num-examples": 1 + number % 7}

    app = ClientApp(mods=[PartialExchange(introduce)])

    @app.train()
    def train(msg, context):
        number = int(context.node_config["partition-id"])
        times = context.state.config_records.setdefault("times", ConfigRecord({"trained": 0}))
        times["trained"] += 1
        drawn = zlib.crc32(f"{own_name(context)}/{received(msg).plan.round}/{times['trained']}".encode())
        arrays = ArrayRecord({"w": Array(np.random.default_rng(drawn).standard_normal(3))})
        metrics = MetricRecord({"num-examples": 1 + number % 7})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "received-loss": 1.0})}), reply_to=msg)

    return app


def population(app, count):
    return PopulationGrid(app, count, {"seed": 0})


def nodes(app, count):
    return InProcessGrid([Node(app, {"partition-id": k, "num-partitions": count}) for k in range(count)], {"seed": 0})


def run(grid, rounds=4, strategy=FedAvg, start=START, **options):
    """The final model's bytes and the reports of the rounds."""
    reports = []
    defaults = {"fraction_evaluate": 0.0, "fraction_train": 0.1, "seed": 3, "on_round": reports.append}
    result = strategy(**{**defaults, **options}).start(grid, start, num_rounds=rounds, timeout=60)
    return b"".join(array.data for array in result.arrays.values()), [r for r in reports if r.round]


def cohorts(reports):
    return [sorted(report.asked) for report in reports]


@pytest.fixture
def few(monkeypatch):
    """Let twenty clients be very many."""
    monkeypatch.setattr(cohort, "_INTRODUCED", (20, 1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_of_few_is_that_of_nodes_which_all_exist(deterministic):
    introduced, others = [], []
    ours, reports = run(population(app_of(introduced), 60), deterministic=deterministic)
    theirs, expected = run(nodes(app_of(others), 60), deterministic=deterministic)
    assert ours == theirs and cohorts(reports) == cohorts(expected)
    assert sorted(introduced) == sorted(others) == list(range(60))
    assert [(r.down.payload, r.up.payload) for r in reports] == [(r.down.payload, r.up.payload) for r in expected]
    assert [r.label_counts for r in reports] == [r.label_counts for r in expected]


def test_of_very_many_only_those_that_are_drawn_introduce_themselves_and_the_run_is_the_same(few):
    introduced, others = [], []
    ours, reports = run(population(app_of(introduced), 200), rounds=12)
    theirs, expected = run(nodes(app_of(others), 200), rounds=12, deterministic=True)  # all before the first round
    assert ours == theirs and cohorts(reports) == cohorts(expected)
    drawn = {int(name.removeprefix("client-")) for report in reports for name in report.asked}
    assert sorted(introduced) == sorted(drawn), "each once"
    assert len(drawn) < 200 == len(others)


def test_cohorts_are_drawn_from_all_from_the_first_round_on(few):
    """Each of 400 clients is as likely as any other to be in the first cohort, of a tenth."""
    times, grid = Counter(), population(app_of(), 400)
    for seed in range(60):
        rules = Rules(fraction_train=0.1, seed=seed)
        cohorts = Cohorts(rules, grid.get_nodes, ClientLedger(), expected=grid.expected_names)
        report = RoundReport(1, "train")
        cohorts.wait(report, {}, 10.0, None)  # nobody is asked, and so nothing sent
        drawn = cohorts.draw(rules.fraction_train, report, 0, "train")
        assert drawn.size == 40 and len(drawn.names) == cohorts.count() == 400
        times.update(drawn.at_random())
    counts = np.array([times[f"client-{number}"] for number in range(400)])
    # Counts of 60 draws with probability 1/10: the variance of a binomial distribution, and not that of a few groups.
    assert 0.75 < counts.var() / (60 * 0.1 * 0.9) < 1.25


def test_a_node_exists_while_it_answers_or_has_a_state(few, monkeypatch):
    made = []

    class Counted(Node):
        def __init__(self, *args, **options):
            made.append(args)
            super().__init__(*args, **options)

    monkeypatch.setattr(in_process, "Node", Counted)
    grid = population(app_of(), 5000)
    assert not made
    _, reports = run(grid, rounds=3, fraction_train=0.004)
    drawn = {name for report in reports for name in report.asked}
    assert len(made) == 2 * len(drawn), "one for the introduction, which leaves no state, and one to train"
    assert len(grid.nodes) == len(drawn), "their app counts in its state how often it trained"


def test_the_nodes_are_listed_and_compared_once(few, monkeypatch):
    made = []
    monkeypatch.setattr(in_process, "NodeInfo", lambda **fields: made.append(fields) or NodeInfo(**fields))
    run(population(app_of(), 300), rounds=5)
    assert len(made) == 300


def test_a_client_that_cannot_take_part_is_left_out_from_then_on(few):
    introduced = []
    able = lambda number: number % 4 != 0  # noqa: E731
    _, reports = run(population(app_of(introduced, able), 100), rounds=15)
    assert len(introduced) == len(set(introduced)), "nobody is asked twice"
    assert any(number % 4 == 0 for number in introduced)
    assert all(able(int(name.removeprefix("client-"))) for report in reports for name in report.asked)
    refused = [reason for report in reports for _, reason in report.refused]
    assert refused and set(refused) == {"it has no examples"}
    known = np.cumsum([0, *(len(report.refused) for report in reports)])
    assert [len(report.replied) for report in reports] == [int(0.1 * (100 - n)) for n in known[:-1]]


def test_clients_that_cannot_take_part_are_replaced_in_the_same_round(few):
    app = app_of(able=lambda number: number % 10 != 0)
    _, reports = run(population(app, 400), fraction_train=0.05, min_replies=20)
    assert [len(report.replied) for report in reports] == [20] * 4
    assert [len(report.refused) for report in reports] == [0, 3, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_a_few_that_can_take_part_are_found_among_very_many(few, seed):
    _, reports = run(population(app_of(able=lambda number: number % 10 == 0), 100), fraction_train=0.05, seed=seed)
    assert all(report.replied for report in reports)
    introduced = []
    app = app_of(introduced, lambda number: number in (7, 70, 90))
    _, reports = run(population(app, 100), rounds=2, fraction_train=0.05, min_replies=3, seed=seed)
    assert [sorted(report.replied) for report in reports] == [["client-7", "client-70", "client-90"]] * 2
    assert len(introduced) == len(set(introduced)) <= 100


def test_replacements_are_drawn_uniformly(few):
    """Each of 90 clients that can take part is as likely as any other to be in the first cohort of ten."""
    times = Counter()
    for seed in range(60):
        _, reports = run(population(app_of(able=lambda number: number % 10 != 0), 100), rounds=1, seed=seed)
        times.update(reports[0].replied)
    counts = np.array([times[f"client-{number}"] for number in range(100) if number % 10])
    assert counts.sum() == 600
    assert 0.7 < counts.var() / (60 * 1 / 9 * 8 / 9) < 1.3


def test_if_too_few_can_take_part_the_run_ends_at_once_and_says_why(few):
    introduced = []
    with pytest.raises(RoundFailed, match=r"only 0 of 100 clients can take part; 2 are needed.*it has no examples"):
        run(population(app_of(introduced, lambda number: False), 100))
    assert sorted(introduced) == list(range(100))
    with pytest.raises(RoundFailed, match=r"only 3 of 100 clients can take part; 5 are needed"):
        run(population(app_of(able=lambda number: number < 3), 100), min_replies=5)


@pytest.mark.parametrize("raised", [False, True], ids=["their data was changed", "their processes have ended"])
def test_a_fault_of_all_new_clients_ends_the_run_and_it_can_go_on_when_it_is_mended(few, tmp_path, raised):
    options = {"fraction_train": 0.01, "deterministic": True}
    fault, introduced = [], []
    healthy = app_of(introduced, able=lambda number: not fault)

    def app(message, context):
        if raised and fault:
            introduced.append(context.node_config["partition-id"])
            raise RuntimeError("its process has ended")
        return healthy(message, context)

    whole, expected = run(population(app, 2000), **options, checkpoints=tmp_path / "whole")
    introduced.clear()
    with pytest.raises(RoundFailed, match=r"\d+ of \d+ clients that were asked for the first time in round 2 cannot"):
        run(population(app, 2000), **options, checkpoints=tmp_path / "run", on_round=fault.append)
    assert len(introduced) < 200, "not all of them"
    fault.clear()
    assert not Checkpoints(tmp_path / "run").latest().standing["refused"]
    resumed, reports = run(population(app, 2000), **options, checkpoints=tmp_path / "run", resume=True)
    assert resumed == whole and cohorts(reports) == cohorts(expected)[1:]


def test_a_client_whose_process_ends_is_asked_again_when_the_run_is_resumed(few, tmp_path):
    app = app_of()
    ended = []

    def ends_once(message, context):
        if not ended:
            ended.append(context.node_config["partition-id"])
            raise RuntimeError("its process has ended")
        return app(message, context)

    run(population(ends_once, 200), rounds=2, checkpoints=tmp_path)
    assert ended and not Checkpoints(tmp_path).latest().standing["refused"]


def test_the_result_is_sent_to_the_clients_that_scored_the_model(few, tmp_path):
    """Also if others of their cohort could not take part."""
    sent = {True: [], False: []}
    app = app_of(able=lambda number: number % 10 != 0)

    def watched(message, context):
        plan = Manifest.from_content(message.content).plan
        if plan.action == "evaluate" and plan.round == 3:
            sent[bool(plan.options.get(FINAL))].append(context.node_config["partition-id"])
        return app(message, context)

    strategy = FedAvg(fraction_evaluate=0.2, fraction_train=0.05, seed=3, deterministic=True, checkpoints=tmp_path)
    strategy.best = BestModel(lambda report: Scores(own=-float(report.round)), delivered=True)
    strategy.start(population(watched, 200), START, num_rounds=3, timeout=60)
    assert len(sent[True]) > 30 and sorted(sent[True]) == sorted(sent[False])


def test_clients_that_score_introduce_themselves_too(few):
    introduced = []
    _, reports = run(population(app_of(introduced), 200), rounds=2, fraction_evaluate=0.05)
    assert len(introduced) == len(set(introduced)) and 40 < len(introduced) <= 60
    assert "received-loss" in reports[-1].evaluate_metrics


def test_only_clients_that_have_a_model_to_score_introduce_themselves(few):
    introduced = []
    _, reports = run(population(app_of(introduced), 300), strategy=FedACS, fraction_train=0.02, fraction_evaluate=0.5)
    assert set(introduced) == {int(name.removeprefix("client-")) for report in reports for name in report.clients}
    assert len(introduced) == len(set(introduced)) <= 4 * 6, "only those that were drawn to train"


def test_a_method_that_gives_each_client_a_stratum_has_all_of_them(few):
    options = {"strategy": FedEnsemble, "modes": 2, "start": join_modes([START, START]), "deterministic": True}
    ours, reports = run(population(app_of(), 120), **options)
    theirs, expected = run(nodes(app_of(), 120), **options)
    assert ours == theirs and cohorts(reports) == cohorts(expected)


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(few, tmp_path):
    whole, _ = run(population(app_of(), 150), rounds=4, checkpoints=tmp_path / "a", deterministic=True)
    introduced = []
    grid = population(app_of(introduced), 150)
    run(grid, rounds=2, checkpoints=tmp_path / "b", deterministic=True)
    assert len(Checkpoints(tmp_path / "b").latest().clients) == len(introduced) < 50, "not all names"
    resumed, reports = run(grid, rounds=4, checkpoints=tmp_path / "b", resume=True, deterministic=True)
    assert resumed == whole and [report.round for report in reports] == [3, 4]


def failing_app(number_fails):
    app = ClientApp(mods=[PartialExchange(lambda msg, context: {"num-examples": 3})])

    @app.train()
    def train(msg, context):
        number = int(context.node_config["partition-id"])
        if number_fails(number):
            raise RuntimeError("out of memory")
        arrays = ArrayRecord({"w": Array(np.full(3, float(number)))})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 3})}), reply_to=msg)

    return app


@pytest.mark.parametrize(
    ("make", "rounds", "fraction"),
    [
        (lambda introduced: app_of(introduced, lambda number: number % 4 != 0), (3, 6), 0.1),
        (lambda introduced: failing_app(lambda number: number % 3 == 0), (8, 11), 0.5),
    ],
    ids=["some cannot take part", "some fail again and again"],
)
def test_a_resumed_run_draws_the_same_cohorts(few, tmp_path, make, rounds, fraction):
    options = {"deterministic": True, "fraction_train": fraction}
    whole, expected = run(population(make(None), 60), rounds[1], checkpoints=tmp_path / "a", **options)
    run(population(make(None), 60), rounds[0], checkpoints=tmp_path / "b", **options)
    refused = Checkpoints(tmp_path / "b").latest().standing["refused"]
    introduced = []
    grid = population(make(introduced), 60)
    resumed, reports = run(grid, rounds[1], checkpoints=tmp_path / "b", resume=True, **options)
    assert cohorts(reports) == cohorts(expected)[rounds[0] :] and resumed == whole
    assert [report.left_out for report in reports] == [report.left_out for report in expected[rounds[0] :]]
    assert not {f"client-{number}" for number in introduced} & set(refused), "nobody is asked again"


def test_clients_keep_their_names_if_their_caches_are_lost(few, tmp_path):
    options = {"deterministic": True, "fraction_train": 0.2}
    _, expected = run(population(app_of(), 50), 22, checkpoints=tmp_path / "a", **options)
    run(population(app_of(), 50), 20, checkpoints=tmp_path / "b", **options)
    shutil.rmtree(default_root())
    grid = population(app_of(), 50)
    _, reports = run(grid, 22, checkpoints=tmp_path / "b", resume=True, **options)
    assert cohorts(reports) == cohorts(expected)[20:]
    assert [len(report.replied) for report in reports] == [10, 10]
    assert not Checkpoints(tmp_path / "b").latest().standing["proofs"], "they need no proof of who they are"


def test_an_introduction_is_sent_to_nobody_that_is_known(few):
    class Watched(PopulationGrid):
        def push_messages(self, messages):
            messages = list(messages)
            plans = [Manifest.from_content(message.content).plan for message in messages]
            asked.extend(plan.round for plan in plans if plan.action == "introduce")
            return super().push_messages(messages)

    asked = []
    run(Watched(app_of(), 40, {}), rounds=30, fraction_train=0.25)
    assert len(asked) <= 40 and max(asked) < 30


def test_all_nodes_exist_from_the_start():
    grid = population(app_of(), 3)
    assert grid.get_node_ids() == [1, 2, 3] and len(grid.get_nodes()) == 3
    assert dict(grid.expected_names) == {"client-0": 1, "client-1": 2, "client-2": 3}
    with pytest.raises(NotImplementedError, match="use InProcessGrid"):
        grid.add(Node(app_of(), {}))
