"""A server that is killed, at any point, and resumed ends as if nothing had happened: bit for bit.

Children of this process run a strategy and die in it, without a chance to clean up, at their n-th function call. The
clients die with them, as in a simulation; what is left are the checkpoints and the clients' caches on disk.
"""

import itertools
import os
import pickle
import random
import sys
import threading
import traceback
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import MODEL, Encoding, Layout, RawTensor, partial_exchange, received
from tepal.records.round_record import RoundRecord
from tepal.strategies import FedAvg, FedFrozen
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds import cohort
from tepal.strategies.rounds.checkpoint import FACTS, STATE, Checkpoint, Checkpoints
from tepal.strategies.rounds.state_json import CheckpointError
from tepal.training.tasks import IMAGES
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.rounds.test_mutations import BLOCKS, LAYOUT, RAW

CLIENTS, ROUNDS = 5, 6
BUDGET = 348
"""Bytes of a round, within which the run "budget" leaves out more than it would."""
FAILS = 3
"""This client raises in the rounds 1 to 3, and is left out after them."""

STRATEGIES = {
    "FedFrozen": lambda **options: FedFrozen(
        warmup_rounds=2, model=BLOCKS, fraction_evaluate=0, seed=3, **{"deterministic": True, **options}
    ),
    "FedAvg": lambda **options: FedAvg(
        fraction_train=0.6, fraction_evaluate=0.6, min_replies=2, seed=3, **{"deterministic": True, **options}
    ),
    "differences": lambda **options: FedAvg(
        fraction_train=0.6, fraction_evaluate=0, min_replies=2, seed=3, encoding=Encoding("sign", "ternary"),
        **{"deterministic": True, **options},
    ),
    "auto": lambda **options: FedAvg(
        fraction_train=0.6, fraction_evaluate=0, min_replies=2, seed=3, encoding=Encoding("auto", "auto"),
        **{"deterministic": True, **options},
    ),
    "budget": lambda **options: FedAvg(
        fraction_train=0.6, fraction_evaluate=0, min_replies=2, seed=3,
        encoding=Encoding("auto", "auto", left_out=0.05, budget=BUDGET), **{"deterministic": True, **options},
    ),
}


# ---- a run -----------------------------------------------------------------------------------------------------------


def momentum_app():
    """SGD with a momentum that the client keeps for itself, on gradients that follow from its name and the round."""
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        came = received(msg)
        client, server_round = int(context.node_config["partition-id"]), msg.content["config"]["server-round"]
        if client == FAILS and server_round <= 3:
            raise RuntimeError("not now")
        momentum, model = came.personal.load(), dict(came.model)
        rng = np.random.default_rng([client, server_round])
        for name in came.model:
            gradient = rng.normal(size=model[name].shape)
            momentum[name] = np.asarray(0.9 * momentum.get(name, 0.0) + gradient)
            if name in came.plan.trains:
                model[name] = np.asarray(model[name] - momentum[name], dtype=model[name].dtype)
        came.personal.save(momentum)
        raw = came.layout.join(model)
        arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in raw.items()})
        metrics = {"num-examples": 3 * client + 1, "loss": float(sum(value.sum() for value in model.values()))}
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        score = float(sum(value.sum() for value in received(msg).trees[MODEL].values()))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 2, "score": score})}), reply_to=msg)

    return app


def nodes(folder, partitions=range(CLIENTS)):
    app = momentum_app()
    return [Node(app, {"partition-id": k, "cache-path": str(folder / "cache")}) for k in partitions]


@dataclass
class Outcome:
    arrays: dict
    history: dict
    rounds: dict
    """Round → what its report says that must not depend on where the server was killed."""
    down: dict
    """Round → bytes of the model that were sent."""
    records: dict
    """Round → its line in metrics.jsonl, without times, and without the bytes of manifests, which have random ids."""


def run(kind, folder, *, resume=False, rounds=ROUNDS, grid=None, timeout=60, checkpoints=None, **options):
    reports = {}
    strategy = STRATEGIES[kind](
        checkpoints=checkpoints or folder / "checkpoints", resume=resume,
        on_round=lambda report: reports.update({report.round: report}), **options,
    )  # fmt: skip
    result = strategy.start(
        grid or InProcessGrid(nodes(folder)),
        ArrayRecord({name: Array(array) for name, array in RAW.items()}),
        num_rounds=rounds,
        timeout=timeout,
        evaluate_fn=lambda _, arrays: MetricRecord({"sum": float(sum(a.numpy().sum() for a in arrays.values()))}),
    )
    kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
    return Outcome(
        arrays={name: array.numpy().tobytes() for name, array in result.arrays.items()},
        history={kind: {number: dict(m) for number, m in getattr(result, kind).items()} for kind in kinds},
        rounds={
            number: (r.phase, r.asked, r.replied, r.refused, r.lost, r.left_out, r.notes, r.resent, r.up.payload)
            for number, r in reports.items()
        },
        down={number: report.down.payload for number, report in reports.items()},
        records={number: line_of(report) for number, report in reports.items()},
    )


def line_of(report):
    own = {"seconds", "seconds_train", "bytes_overhead"}
    line = RoundRecord.of(report, 1, IMAGES).to_line()
    return {key: value for key, value in line.items() if key not in own and value is not None}


@pytest.fixture(scope="module", params=STRATEGIES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def reference(kind, tmp_path_factory):
    """The run that nothing happened to."""
    outcome = run(kind, tmp_path_factory.mktemp("reference"))
    assert len(outcome.history["train_metrics_clientapp"]) == ROUNDS
    assert any(lost for _, _, _, _, lost, *_ in outcome.rounds.values()), "failures are part of what is resumed"
    return outcome


def assert_same_result(kind, resumed, reference):
    """After an earlier checkpoint than the newest, or a run that had ended, clients are sent other differences."""
    if kind not in ("differences", "auto", "budget"):
        assert (resumed.arrays, resumed.history) == (reference.arrays, reference.history)
        return
    for name, data in reference.arrays.items():
        dtype = RAW[name].dtype
        np.testing.assert_allclose(
            np.frombuffer(resumed.arrays[name], dtype), np.frombuffer(data, dtype), rtol=1e-5, atol=1e-5
        )


OF_DOWNLOADS = ("bytes_down", "bytes_plain", "wire_left_out_down", "wire_budget_down")


def assert_same(resumed, reference, first):
    """That a run which was resumed in round `first` ended as the reference did."""
    assert (resumed.arrays, resumed.history) == (reference.arrays, reference.history)
    for number in range(first, ROUNDS + 1):
        assert resumed.rounds[number] == reference.rounds[number]
        # What the clients had already been sent in the round that was broken off is not sent to them again.
        again = {**reference.records[number]}
        if resumed.down[number] != reference.down[number]:
            assert number == first and resumed.down[number] < reference.down[number]
            again |= {key: resumed.records[number].get(key) for key in OF_DOWNLOADS}
        assert resumed.records[number] == {key: value for key, value in again.items() if value is not None}


def test_the_records_of_a_run_within_a_budget_say_what_it_did(tmp_path):
    """That what is compared after a resume is there, and that the budget, and not the share, decides."""
    lines = [line for number, line in run("budget", tmp_path).records.items() if number]
    assert all(line["wire_budget"] == BUDGET for line in lines)
    assert all(line["wire_budget_up"] == line["bytes_up"] <= BUDGET / 2 for line in lines)
    assert all(line["wire_budget_down"] <= min(line["bytes_down"], BUDGET / 2) for line in lines)
    assert any(line["wire_budget_down"] for line in lines) and any("wire_left_out_down" in line for line in lines)
    assert all(0.1 < line["wire_left_out_up"] < 1 for line in lines), "far more than the share that would be"


# ---- children that die -----------------------------------------------------------------------------------------------


CHANGES = {"close", "fsync", "link", "mkdir", "open", "replace", "rmdir", "serialize_file", "unlink"}
"""C functions that change a disk."""

WHERE = ("anywhere", "while saving", "at files")


class Killer:
    """Counts the calls and returns of functions, Python's and C's, in all threads; ends the process at the n-th.

    Counted are all; those while a checkpoint is saved; and those of functions that change a disk.
    """

    def __init__(self, n=None, where="anywhere", say=print):
        self.n = n
        self.where = where
        self.say = say
        self.calls = dict.fromkeys(WHERE, 0)
        self._saves = 0

    def __call__(self, frame, event, argument):
        if frame.f_code is Checkpoints.save.__code__ and event in ("call", "return"):
            self._saves += 1 if event == "call" else -1
        self.calls["anywhere"] += 1
        self.calls["while saving"] += self._saves
        self.calls["at files"] += event.startswith("c_") and argument.__qualname__ in CHANGES
        if self.n is not None and self.calls[self.where] >= self.n:
            self.say(f"{frame.f_code.co_qualname} at the {event} of {getattr(argument, '__name__', 'itself')}")
            os._exit(9)


def in_child(action, n=None, where="anywhere"):
    """Do this in a child that dies at its n-th call there: (whether it was killed, where; or how many calls it had)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1

        def say(what):
            os.write(writing, pickle.dumps(what))

        try:
            killer = Killer(n, where, say)
            threading.setprofile(killer)
            sys.setprofile(killer)
            action()
            sys.setprofile(None)
            threading.setprofile(None)
            say(killer.calls)
            code = 0
        except BaseException:
            sys.setprofile(None)
            say(traceback.format_exc())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pickle.loads(pipe.read() or pickle.dumps(""))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), said
    return code == 9, said


@pytest.fixture(scope="module")
def calls(kind, tmp_path_factory):
    """How many calls a whole run has, by where."""
    folder = tmp_path_factory.mktemp("counted")
    killed, counts = in_child(lambda: run(kind, folder))
    assert not killed and all(counts.values())
    return counts


def last_saved(folder):
    return max(Checkpoints(folder / "checkpoints").rounds(), default=0)


def torn(folder):
    return list((folder / "checkpoints").glob(".writing-*"))


@pytest.mark.parametrize("where", WHERE)
def test_a_run_that_is_killed_and_resumed_is_bit_identical(kind, reference, calls, tmp_path, where):
    """At one point in the middle; many points are in the long test."""
    killed, _ = in_child(lambda: run(kind, tmp_path), calls[where] // 2, where)
    done = last_saved(tmp_path)
    assert killed and 0 < done < ROUNDS
    assert_same(run(kind, tmp_path, resume=True), reference, done + 1)
    assert last_saved(tmp_path) == ROUNDS and not torn(tmp_path)


@pytest.mark.long
def test_a_run_that_is_killed_at_any_point_and_resumed_is_bit_identical(kind, reference, calls, tmp_path):
    rng = random.Random(7)
    killed_after, torn_ones = [], 0
    for point in range(40):
        if point >= 12 and torn_ones:
            break
        folder = tmp_path / str(point)
        where = WHERE[max(point - 5, 0) % 3]
        n = rng.randint(1, calls[where])
        killed, said = in_child(lambda folder=folder: run(kind, folder), n, where)
        done = last_saved(folder)
        print(f"{kind}: killed after round {done} in {said}" if killed else f"{kind}: it has fewer than {n} calls now")
        killed_after.append(done)
        torn_ones += bool(torn(folder))
        assert_same(run(kind, folder, resume=True), reference, done + 1)
        assert last_saved(folder) == ROUNDS and not torn(folder)
    assert len(set(killed_after)) >= 4, killed_after
    assert torn_ones, "no point lay in the middle of a checkpoint"


@pytest.mark.parametrize("keep", [2, 3])
def test_a_run_that_is_killed_again_and_again_is_bit_identical(kind, reference, calls, tmp_path, keep):
    """Also while it resumes: the third and fourth child die before they have finished a round."""
    rng = random.Random(keep)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep)
    a_round = calls["anywhere"] // ROUNDS
    kills = [rng.randint(2 * a_round, 3 * a_round), rng.randint(a_round // 2, a_round), rng.randint(1, 300),
             rng.randint(300, a_round // 3)]  # fmt: skip
    saved = []
    for n in kills:
        killed, _ = in_child(lambda: run(kind, tmp_path, resume=True, checkpoints=checkpoints), n)
        assert killed
        saved.append(last_saved(tmp_path))
    assert 0 < saved[0] <= saved[1] == saved[2] == saved[3] < ROUNDS
    resumed = run(kind, tmp_path, resume=True, checkpoints=checkpoints)
    assert (resumed.arrays, resumed.history) == (reference.arrays, reference.history)
    assert len(checkpoints.rounds()) == keep


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_anew(kind, reference, calls, tmp_path):
    killed, _ = in_child(lambda: run(kind, tmp_path), calls["anywhere"] // (3 * ROUNDS))
    assert killed and last_saved(tmp_path) == 0
    assert_same(run(kind, tmp_path, resume=True), reference, 1)


def checkpoint_of(number):
    state = {"entries": {"w": np.full(3, number, np.float32)}}
    return Checkpoint(round=number, experiment="e", seed=0, method={}, layout="l", state=state)


@pytest.mark.parametrize("again", [False, True], ids=["a new round", "a round that is repeated"])
def test_a_save_that_is_killed_at_any_change_to_the_disk_leaves_the_checkpoint_before_or_the_new_one(tmp_path, again):
    """A round is repeated where its checkpoint was damaged."""
    outcomes = set()
    for n in itertools.count(1):
        checkpoints = Checkpoints(tmp_path / str(n))
        for number in (1, 2, 3):
            checkpoints.save(checkpoint_of(number))
        if again:
            flip(checkpoints.folder / "round-000003" / STATE)
        new = 3 if again else 4
        killed, _ = in_child(lambda c=checkpoints, new=new: c.save(checkpoint_of(new)), n, "at files")
        latest = checkpoints.latest()
        assert latest.state["entries"]["w"].tolist() == [latest.round] * 3
        outcomes.add(latest.round)
        checkpoints.save(checkpoint_of(new))
        assert checkpoints.latest().round == new
        assert [path.name for path in sorted(checkpoints.folder.iterdir())] == [
            f"round-{number:06d}" for number in (range(1, 4) if again else range(2, 5))
        ]
        if not killed:
            break
    assert n > 20 and outcomes == {new - 1, new}


# ---- checkpoints that cannot be used ---------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "state flipped": lambda folder: flip(folder / STATE),
    "state cut": lambda folder: os.truncate(folder / STATE, 40),
    "state removed": lambda folder: (folder / STATE).unlink(),
    "facts flipped": lambda folder: flip(folder / FACTS),
    "facts empty": lambda folder: (folder / FACTS).write_text(""),
    "facts removed": lambda folder: (folder / FACTS).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(kind, reference, tmp_path, damage, caplog):
    run(kind, tmp_path, rounds=4)
    DAMAGES[damage](tmp_path / "checkpoints" / "round-000004")
    resumed = run(kind, tmp_path, resume=True)
    assert "checkpoint of round 4" in caplog.text and "cannot be used" in caplog.text
    assert sorted(resumed.rounds) == [4, 5, 6]
    assert_same_result(kind, resumed, reference)


def test_where_two_checkpoints_are_damaged_the_run_goes_back_two_rounds(kind, reference, tmp_path):
    """The clients still have their personal state of that time."""
    run(kind, tmp_path, rounds=4)
    for number in (3, 4):
        flip(tmp_path / "checkpoints" / f"round-{number:06d}" / STATE)
    resumed = run(kind, tmp_path, resume=True)
    assert sorted(resumed.rounds) == [3, 4, 5, 6]
    assert_same_result(kind, resumed, reference)


class Dying(Checkpoints):
    """Ends the process where the checkpoint of round 5 would be written."""

    def save(self, checkpoint):
        if checkpoint.round == 5:
            os._exit(9)
        super().save(checkpoint)


def test_a_damaged_checkpoint_does_not_count_among_those_that_clients_can_go_back_to(reference, kind, tmp_path):
    """Three checkpoints are kept, and clients keep their personal state for each: not for one that was passed over."""
    run(kind, tmp_path, rounds=4)
    flip(tmp_path / "checkpoints" / "round-000004" / STATE)
    killed, _ = in_child(lambda: run(kind, tmp_path, resume=True, checkpoints=Dying(tmp_path / "checkpoints")))
    assert killed and Checkpoints(tmp_path / "checkpoints").rounds() == [2, 3, 4]
    for number in (3, 4):
        flip(tmp_path / "checkpoints" / f"round-{number:06d}" / STATE)
    resumed = run(kind, tmp_path, resume=True)
    assert_same_result(kind, resumed, reference)


def test_without_a_checkpoint_that_is_whole_the_run_begins_anew(kind, reference, tmp_path):
    run(kind, tmp_path, rounds=3)
    for folder in (tmp_path / "checkpoints").iterdir():
        flip(folder / STATE)
    resumed = run(kind, tmp_path, resume=True)
    assert_same(resumed, reference, 1)


@pytest.fixture
def half_done(tmp_path):
    """The folder of a run of FedFrozen that has two of its rounds behind it."""
    run("FedFrozen", tmp_path, rounds=2)
    return tmp_path


def smaller_model():
    raw = (RawTensor("embed", (2, 2), "float32"), RawTensor("qkv", (6, 2), "float32"))
    layout = Layout(raw, tuple(entry for entry in LAYOUT.entries if entry.raw != "count"))
    value = tuple(name for name in BLOCKS.value if name != "count")
    return SimpleNamespace(**{**vars(BLOCKS), "layout": layout, "value": value})


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        (lambda **o: FedFrozen(warmup_rounds=2, model=BLOCKS, seed=4, **o), "another seed .3; this run has 4."),
        (lambda **o: FedFrozen(warmup_rounds=3, model=BLOCKS, seed=3, **o), "another strategy .*warm-up rounds': 2"),
        (lambda **o: FedFrozen(warmup_rounds=2, ridge=0.1, model=BLOCKS, seed=3, **o), "another strategy .*ridge"),
        (lambda **o: FedAvg(seed=3, **o), "another strategy .*FedFrozenMethod.*FedAvgMethod"),
        (lambda **o: FedFrozen(warmup_rounds=2, model=smaller_model(), seed=3, **o), "another model"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(half_done, strategy, what):
    made = strategy(checkpoints=half_done / "checkpoints", resume=True)
    names = [tensor.name for tensor in made.blocks.layout.raw] if made.blocks else RAW
    initial = ArrayRecord({name: Array(RAW[name]) for name in names})
    with pytest.raises(CheckpointError, match=rf"checkpoint of round 2 .* is of {what}.*resume with the settings"):
        made.start(InProcessGrid(nodes(half_done)), initial, num_rounds=ROUNDS)
    assert last_saved(half_done) == 2, "and it is still there"


def test_a_new_run_does_not_take_the_place_of_one_that_can_be_resumed(half_done):
    with pytest.raises(CheckpointError, match=r"has a checkpoint of round 2: resume that run with resume=True"):
        run("FedFrozen", half_done)
    assert last_saved(half_done) == 2
    with pytest.raises(ValueError, match="needs the folder"):
        FedAvg(resume=True)


def test_a_run_that_had_ended_is_not_run_again(kind, reference, tmp_path):
    run(kind, tmp_path)
    grid = InProcessGrid([])  # nobody is there, and nobody is needed
    resumed = run(kind, tmp_path, resume=True, grid=grid)
    assert not resumed.rounds
    assert_same_result(kind, resumed, reference)


# ---- clients that come back late, or not at all ----------------------------------------------------------------------


class Filling(InProcessGrid):
    """A grid whose last node connects only when it was looked for a few times."""

    def __init__(self, first, last):
        super().__init__(first)
        self.last = last
        self.looks = 0

    def get_nodes(self):
        self.looks += 1
        if self.looks == 4:
            self.add(self.last)
        return super().get_nodes()


def test_a_deterministic_run_that_is_resumed_waits_for_the_clients_that_it_had(kind, reference, tmp_path):
    run(kind, tmp_path, rounds=3)
    *first, last = nodes(tmp_path)
    resumed = run(kind, tmp_path, resume=True, grid=Filling(first, last))
    assert_same_result(kind, resumed, reference)
    assert all(resumed.rounds[number] == reference.rounds[number] for number in (4, 5, 6))


@pytest.mark.parametrize(("patience", "timeout"), [(1, 60), (3, 2)], ids=["before", "after"])
def test_a_deterministic_run_goes_on_without_a_client_that_does_not_come_back(
    tmp_path, caplog, monkeypatch, patience, timeout
):
    """Whether the deadline of the round's exchanges, which is another matter, is before the end of that wait or not."""
    run("FedFrozen", tmp_path, rounds=4)
    monkeypatch.setattr(cohort, "_RETURN", patience)
    grid = InProcessGrid(nodes(tmp_path, [0, 2, 3, 4]))
    resumed = run("FedFrozen", tmp_path, resume=True, grid=grid, timeout=timeout)
    assert "client-1 took part before the run was resumed and did not reconnect" in caplog.text
    assert resumed.rounds[5][1] == resumed.rounds[6][1] == ["client-0", "client-2", "client-4"]


def test_a_run_that_need_not_be_deterministic_does_not_wait(tmp_path, caplog):
    run("FedFrozen", tmp_path, rounds=4, deterministic=False)
    grid = InProcessGrid(nodes(tmp_path, [0, 2, 3, 4]))
    resumed = run("FedFrozen", tmp_path, resume=True, grid=grid, deterministic=False)
    assert resumed.rounds[5][1] == ["client-0", "client-2", "client-4"]
    assert "did not reconnect" not in caplog.text
