"""The rule by which a run ends early, and the file with its best model."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from hypothesis import given
from hypothesis import strategies as st

from tepal.strategies import FedAvg
from tepal.strategies.fedavg import ModelState
from tepal.strategies.fedensemble import EnsembleState
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.best import BestModel, Scores, Standing
from tepal.strategies.rounds.checkpoint import FACTS, Checkpoint, Checkpoints
from tepal.strategies.rounds.report import RoundReport
from tests.unit.strategies.rounds.test_hostile_clients import START, app_of, lies, too_large, values

SCORES = st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=20)  # exact, with many equal ones
LEAST = st.sampled_from([0.0, 0.125, 0.25])


def stood(scores, *, higher=True, least=0.0):
    standing = Standing()
    for round, score in enumerate(scores):
        standing = standing.after(round, score, higher=higher, least=least)
    return standing


def improvements(scores, least):
    """The rounds that improve by more than `least` on the last such round, the first of them being the first."""
    found = [0]
    while later := [k for k in range(found[-1] + 1, len(scores)) if scores[k] > scores[found[-1]] + least]:
        found.append(later[0])
    return found


@given(SCORES, LEAST)
def test_the_standing_is_what_a_look_at_all_scores_at_once_finds(scores, least):
    standing = stood(scores, least=least)
    assert (standing.best, standing.best_round) == (max(scores), scores.index(max(scores)))
    assert standing.without == len(scores) - 1 - improvements(scores, least)[-1]
    assert standing.scored == len(scores) - 1


@given(SCORES, LEAST)
def test_an_error_is_an_accuracy_with_the_other_sign(scores, least):
    errors, accuracies = stood(scores, higher=False, least=least), stood([-score for score in scores], least=least)
    assert (errors.best_round, errors.without) == (accuracies.best_round, accuracies.without)
    assert errors.best == min(scores)


@given(SCORES, st.integers(0, 19), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_score_that_is_no_number_is_an_evaluation_without_improvement(scores, place, bad):
    spoilt = [*scores[:place], bad, *scores[place:]]
    assert stood(spoilt) == stood([*scores[:place], -1.0, *scores[place:]]), "as the worst score of all"


def test_slow_gains_add_up_until_they_are_an_improvement():
    scores = [0.5, 0.505, 0.509, 0.512, 0.513]
    assert stood(scores, least=0.01).without == 1, "0.512 is more than 0.01 above 0.5"
    assert stood(scores, least=0.01).best_round == 4, "the best model is the best one, by however little"
    assert stood([0.5, 0.51], least=0.01 + 1e-9).without == 1


# ---- a run's rounds --------------------------------------------------------------------------------------------------


def state_of(number):
    return ModelState({"w": np.full(3, number, np.float32)})


def following(scores, **options):
    """A BestModel of a run with these scores of its rounds."""
    return BestModel(lambda report: scores[report.round], **options)


def test_what_clients_received_is_the_round_before_but_not_if_the_run_returned_to_an_earlier_one(tmp_path):
    best = following([Scores(), *(Scores(received=score) for score in (0.1, 0.9, 0.5))], delivered=True)
    best.begin(tmp_path, None)
    best.received(RoundReport(1, ""), state_of(0))
    best.enter(RoundReport(1, ""), state_of(1))
    assert (best.standing.best, best.standing.best_round, best.standing.scored) == (0.1, 0, 0)
    best.received(RoundReport(2, "", went_back=True), state_of(1))
    assert (best.standing.best, best.standing.scored) == (0.1, 0), "0.9 is of the model before it"
    best.received(RoundReport(3, ""), state_of(2))
    assert (best.standing.best, best.standing.best_round) == (0.5, 2)
    state, round = best.result(state_of(3), 3)
    assert round == 2 and np.array_equal(state.entries["w"], [2, 2, 2])


def test_a_later_score_of_the_same_round_replaces_the_first():
    given = [Scores(0.5), Scores(0.7), Scores(0.4)]
    best = BestModel(lambda report: given.pop(0), patience=1)
    best.begin(None, None)
    best.enter(RoundReport(1, ""), state_of(1))
    best.received(RoundReport(2, ""), state_of(1))
    best.enter(RoundReport(2, ""), state_of(2))
    assert (best.standing.best_round, best.exhausted) == (1, True)


def test_a_model_of_several_modes_comes_back_from_its_file(tmp_path):
    state = EnsembleState(tuple(state_of(number) for number in (1, 2)), 2, {"a": 1}, {"a": [0.5, math.inf]})
    best = following([Scores(1.0)], delivered=True)
    best.begin(tmp_path, None)
    best.enter(RoundReport(0, ""), state)
    found, round = best.result(None, 5)
    assert round == 0 and [mode.entries["w"].tolist() for mode in found.modes] == [[1.0] * 3, [2.0] * 3]
    assert (found.count, found.strata, found.losses) == (2, {"a": 1}, {"a": [0.5, math.inf]})


def test_a_model_that_a_killed_server_needs_is_there_before_the_checkpoint_of_the_next_best(tmp_path):
    best, checkpoints = following([Scores(k / 10) for k in range(4)], delivered=True), Checkpoints(tmp_path)
    best.begin(tmp_path, None)
    best.enter(RoundReport(0, ""), state_of(0))
    best.clean(checkpoints, 0)
    earlier = best.to_facts()
    best.received(RoundReport(1, ""), state_of(0))
    best.enter(RoundReport(1, ""), state_of(1))
    assert files(tmp_path) == [0, 1]
    killed = following([Scores()], delivered=True)  # before the checkpoint of round 1
    killed.begin(tmp_path, None)
    killed.restore(earlier)
    assert killed.result(state_of(9), 9)[0].entries["w"].tolist() == [0.0] * 3
    best.clean(checkpoints, 1)
    assert files(tmp_path) == [1]


def files(folder):
    """The rounds of the files with models, ascending."""
    return sorted(int(path.stem.removeprefix("best-")) for path in folder.glob("best-*"))


def run_round(best, checkpoints, number, *, saved=True, **report):
    """Merge and score a round, and write its checkpoint or not."""
    report = RoundReport(number, "", replied=["client-0"], **report)
    best.received(report, state_of(number - 1))
    best.enter(report, state_of(number))
    if saved:
        checkpoints.save(
            Checkpoint(
                round=number, experiment="e", seed=1, method={}, layout="", state=state_of(number),
                standing={"best": best.to_facts()},
            )
        )  # fmt: skip
    best.clean(checkpoints, number)


def begun(folder, scores):
    """Of a run with these scores of the rounds 1, 2, …: the BestModel and the checkpoints, of which two are kept."""
    best, checkpoints = following([Scores(), *map(Scores, scores)], delivered=True), Checkpoints(folder, keep=2)
    best.begin(folder, None)
    return best, checkpoints


def test_the_files_that_a_checkpoint_on_disk_names_stay(tmp_path):
    scores = [0.1, 0.2, 0.3, 0.2, 0.2, 0.2]
    best, checkpoints = begun(tmp_path, scores)
    found = []
    for number in range(1, 7):
        run_round(best, checkpoints, number)
        found.append(files(tmp_path))
        for saved in checkpoints.rounds():  # any of them may be the newest whole one
            resumed, _ = begun(tmp_path, scores)
            resumed.restore(checkpoints.standing(saved)["best"])
            state, round = resumed.result(state_of(9), 9)
            assert round == 1 + scores.index(max(scores[:saved])) and state.entries["w"].tolist() == [round] * 3
    # A checkpoint of round r names the best model, and the best before the merge of r.
    assert found == [[1], [1, 2], [1, 2, 3], [2, 3], [3], [3]]


def test_a_checkpoint_that_cannot_be_read_names_no_file(tmp_path):
    best, checkpoints = begun(tmp_path, [0.1, 0.2])
    for number in (1, 2):
        run_round(best, checkpoints, number)
    for number in (1, 2):
        (tmp_path / f"round-{number:06d}" / FACTS).write_bytes(b"damaged")
    again, _ = begun(tmp_path, [0.1, 0.2, 0.3])
    again.restore(best.to_facts())
    run_round(again, checkpoints, 3, saved=False)
    assert files(tmp_path) == [2, 3], "what the run itself may return to"


def test_models_do_not_pile_up_while_no_checkpoint_can_be_written(tmp_path):
    best, checkpoints = begun(tmp_path, [k / 10 for k in range(1, 9)])
    run_round(best, checkpoints, 1)
    for number in range(2, 7):
        run_round(best, checkpoints, number, saved=False)
        assert files(tmp_path) == sorted({1, number - 1, number}), "of the checkpoint, before the merge, and the best"
    for number in (7, 8):
        run_round(best, checkpoints, number)
    assert files(tmp_path) == [6, 7, 8]


# ---- a run that returns to an earlier model --------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
def test_the_score_of_a_model_that_the_run_returns_from_does_not_count(tmp_path, resumed):
    best, checkpoints = begun(tmp_path, [0.5, 0.4, 0.9, 0.3, 0.4])
    for number in (1, 2, 3):
        run_round(best, checkpoints, number)
    assert (best.standing.best_round, best.standing.without, best.kept) == (3, 0, 3)
    if resumed:
        facts = checkpoints.latest().standing["best"]
        best, _ = begun(tmp_path, [0.5, 0.4, 0.9, 0.3, 0.4])
        best.restore(facts)
    run_round(best, checkpoints, 4, went_back=True)
    assert best.standing == Standing(0.5, 1, 0.5, without=2, scored=4), "rounds 2 and 4"
    state, round = best.result(state_of(4), 4)
    assert round == 1 and state.entries["w"].tolist() == [1.0] * 3
    assert files(tmp_path) == [1, 3], "the checkpoint of round 3 is still there"
    run_round(best, checkpoints, 5)
    assert files(tmp_path) == [1] and best.result(state_of(5), 5)[1] == 1


def test_a_round_without_a_merge_does_not_make_the_model_before_it_one_to_return_to(tmp_path):
    best, checkpoints = begun(tmp_path, [0.5, 0.8, 0.9, 0.3])
    for number in (1, 2):
        run_round(best, checkpoints, number)
    unmerged = RoundReport(3, "")  # scored again, by others: the model is still that of round 2
    best.received(unmerged, state_of(2))
    best.enter(unmerged, state_of(2))
    assert best.kept == 3
    run_round(best, checkpoints, 4, went_back=True)
    assert (best.standing.best, best.standing.best_round, best.kept) == (0.5, 1, 1)


@pytest.mark.parametrize("stops", [None, 3])
def test_a_run_does_not_deliver_a_model_that_its_clients_could_not_train_from(tmp_path, stops):
    """The poisoned model of round 3 has the best score of all; of the others, that of round 2 has the best one."""

    def score(number, arrays):
        w = arrays["w"].numpy()
        scored[number] = 1.0 if w.max() > 20 else -abs(float(w.mean()) - 0.75)
        return MetricRecord({"accuracy": scored[number]})

    def start(rounds, *, resume=False):
        nodes = [Node(app_of(too_large), {"partition-id": k}) for k in range(5)]
        grid = InProcessGrid(nodes, spoil=lies(values(lambda name, a: 400 * a), rounds=(3,)))
        strategy = FedAvg(checkpoints=tmp_path, resume=resume, on_round=history.append)
        strategy.best = BestModel(lambda report: Scores(report.server_metrics.get("accuracy")), delivered=True)
        initial = ArrayRecord({name: Array(array) for name, array in START.items()})
        result = strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=score)
        return strategy, result.arrays["w"].numpy()

    scored, history = {}, []
    if stops:
        assert start(stops)[0].result_round == 3, "as far as is known then"
    strategy, w = start(7, resume=bool(stops))
    assert [report.round for report in history if report.went_back] == [4]
    assert max(scored, key=scored.get) == 3 and scored[2] == max(scored[k] for k in scored if k != 3)
    assert (strategy.result_round, strategy.best.standing.best) == (2, scored[2])
    np.testing.assert_allclose(w, 0.75, atol=0.05)
    assert files(tmp_path) == [2]


def test_a_damaged_file_costs_the_best_model_and_not_the_run(tmp_path, caplog):
    best = following([Scores(1.0)], delivered=True)
    best.begin(tmp_path, None)
    best.enter(RoundReport(0, ""), state_of(0))
    [file] = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    last = state_of(7)
    assert best.result(last, 7) == (last, 7) and "cannot be read" in caplog.text
    file.unlink()
    again = following([Scores()], delivered=True)
    again.begin(tmp_path, None)
    again.restore(best.to_facts())
    assert again.result(last, 7) == (last, 7) and again.standing.best is None, "any later score is the best again"


def test_a_model_that_cannot_be_written_is_not_delivered(tmp_path, caplog, monkeypatch):
    best = following([Scores(0.1), Scores(0.2)], delivered=True)
    best.begin(tmp_path, None)
    best.enter(RoundReport(0, ""), state_of(0))

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tepal.strategies.rounds.best.write_arrays", full)
    best.received(RoundReport(1, ""), state_of(0))
    best.enter(RoundReport(1, ""), state_of(1))
    assert "The model of round 1, the best so far, cannot be kept" in caplog.text
    assert best.standing.best_round == 1 and best.result(state_of(2), 2)[1] == 0


def test_a_run_that_ended_early_goes_on_with_more_patience_only():
    scores = [Scores(0.5), Scores(0.4), Scores(0.4)]
    best = following(scores, patience=2)
    best.begin(None, None)
    for number in range(3):
        best.received(RoundReport(number, ""), None)
        best.enter(RoundReport(number, ""), None)
    assert best.exhausted
    best.end_early(2)
    for patience, ended in ((1, True), (2, True), (3, False), (0, False)):
        resumed = following(scores, patience=patience)
        resumed.begin(None, None)
        resumed.restore(best.to_facts())
        assert (resumed.ended_early is not None) == ended


def test_without_a_folder_there_is_no_best_model():
    with pytest.raises(ValueError, match="set checkpoints to a folder"):
        BestModel(delivered=True).begin(None, None)
