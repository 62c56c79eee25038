"""Runs that deliver their best model, or end early: which round it is, the file, a resumed run, and the config."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from tepal.client_app.local_client import LocalClient
from tepal.records.run_directory import CHECKPOINTS
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.run import build_model, run
from tepal.strategies import RoundFailed
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.best import BestModel
from tepal.strategies.rounds.checkpoint import STATE, Checkpoints
from tepal.training.data.inputs import held_out_inputs
from tests.lines import read_lines
from tests.packages import ROOT

ROUNDS = 7
COMMON = {
    "model": "cnn", "strategy": "fedavg", "num-server-rounds": ROUNDS, "local-steps": 3, "learning-rate": 0.05,
    "schedule": "constant", "deterministic": True, "checkpoints": 50,
    "seed": 1,
}  # fmt: skip
"""With this learning rate the scores go up and down."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run once for each config: `runs(deliver="best", patience=2)`."""
    done = {}

    def find(**values):
        key = json.dumps(values, sort_keys=True)
        if key not in done:
            done[key] = begin(tmp_path_factory.mktemp("run"), **values)
        return done[key]

    return find


def begin(folder, nodes=None, **values):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("TEPAL_CACHE", str(folder / "cache"))
        patch.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")
        from client_app.app import app

        config = {**defaults(), "runs": str(folder / "runs"), **given(values)}
        places = [{"partition-id": k, "num-partitions": 3, "name": f"client-{k}"} for k in range(3)]
        own = [{**place, **each} for place, each in zip(places, nodes or [{}] * 3, strict=True)]
        return run(InProcessGrid([Node(app, each) for each in own], config), config)


def given(values):
    values = {key.replace("_", "-"): value for key, value in values.items()}
    return values if "resume" in values else {**COMMON, **values}


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def metadata_of(path):
    with safe_open(path / "model.safetensors", framework="numpy") as file:
        return file.metadata()


def state_after(path, round, **values):
    """The models after a round, under the names of the model file; of round 0 the initial one."""
    model, blocks = build_model(read_run_config(given(values)))
    state = next(Checkpoints(path / CHECKPOINTS).states(before=round + 1), None) if round else None
    return dict(blocks.layout.join(state.entries)) if state else {k: v.numpy() for k, v in model.state_dict().items()}


def accuracy(path, round, **values):
    """The share of the held-out images that the model after a round predicts."""
    config = read_run_config(given(values))
    model, _ = build_model(config)
    state = state_after(path, round, **values)
    model.load_state_dict({name: torch.tensor(np.array(array)) for name, array in state.items()})
    held_out = held_out_inputs(config.data)
    with torch.no_grad():
        predicted = model.eval()(torch.from_numpy(held_out.values)).argmax(dim=1).numpy()
    return float(np.mean(predicted == held_out.labels))


def same_model(path, state):
    found = load_file(path / "model.safetensors")
    return found.keys() == state.keys() and all(np.array_equal(found[name], state[name]) for name in state)


def ends_after(scores, patience):
    """The place of the score after which a run ends: the first that ends `patience` scores not above all before."""
    for place in range(patience, len(scores)):
        before, recent = scores[: place - patience + 1], scores[place - patience + 1 : place + 1]
        if max(recent) <= max(before):
            return place
    return None


def test_the_delivered_model_is_that_of_the_round_with_the_best_score_of_all(runs):
    # Processors round differently. A seed with which the last round is the best would show nothing.
    shown = ((seed, [line["accuracy"] for line in read_lines(runs(seed=seed))]) for seed in range(1, 50))
    seed = next(seed for seed, scores in shown if scores.index(max(scores)) != ROUNDS)
    whole, path = runs(seed=seed), runs(deliver="best", seed=seed)
    scores = [accuracy(whole, round, seed=seed) for round in range(ROUNDS + 1)]
    best = scores.index(max(scores))
    summary, metadata = summary_of(path), metadata_of(path)
    assert (summary["delivered_round"], summary["best_round"], summary["rounds"]) == (best, best, ROUNDS)
    assert summary["best_score"] == pytest.approx(scores[best]) and summary["best_by"] == "accuracy"
    assert same_model(path, state_after(whole, best, seed=seed))
    assert not same_model(path, state_after(whole, ROUNDS))
    assert (metadata["round"], metadata["best-by"]) == (str(best), "accuracy")
    assert float(metadata["best-score"]) == summary["best_score"]
    kept = {scores.index(max(scores[: round + 1])) for round in range(ROUNDS + 1)}  # as all checkpoints are
    assert {file.name for file in (path / CHECKPOINTS).glob("best-*")} == {f"best-{k:06d}.safetensors" for k in kept}
    # Its training is that of a run that delivers the last model.
    compared = ("round", "accuracy", "loss", "received_accuracy", "train_loss", "bytes_up")
    assert [[line[key] for key in compared] for line in read_lines(path)] == [
        [line[key] for key in compared] for line in read_lines(whole)
    ]
    assert same_model(whole, state_after(whole, ROUNDS))
    assert metadata_of(whole)["round"] == str(ROUNDS) and summary_of(whole)["delivered_round"] == ROUNDS
    assert "best_by" not in summary_of(whole)


@pytest.mark.parametrize("metric", ["loss", "macro-f1"])
def test_another_score_may_decide(runs, metric):
    lines = read_lines(runs())
    scores = [line[metric.replace("-", "_")] for line in lines]
    best = min if metric == "loss" else max
    path = runs(deliver="best", best_metric=metric)
    assert summary_of(path)["delivered_round"] == lines[scores.index(best(scores))]["round"]


def test_a_run_ends_after_as_many_scored_rounds_without_improvement_as_it_has_patience(runs):
    scores = [line["accuracy"] for line in read_lines(runs())]
    found = {patience: ends_after(scores, patience) for patience in (1, 2, 3)}
    assert any(found.values())
    for patience, end in found.items():
        path = runs(patience=patience)
        summary, lines = summary_of(path), read_lines(path)
        last = ROUNDS if end is None or end >= ROUNDS else end
        assert [line["accuracy"] for line in lines] == scores[: last + 1]
        assert summary["rounds"] == summary["delivered_round"] == last and summary["stopped_by"] is None
        counted = "1 evaluation" if patience == 1 else f"{patience} evaluations"
        early = f"{counted} without improvement" if last < ROUNDS else None
        assert summary["ended_early"] == early
        assert same_model(path, state_after(runs(), last))
        assert lines[-1]["clients_accuracy"] is not None, "its last model is scored by the clients, too"


def test_rounds_that_are_not_scored_do_not_count(runs):
    scores = [line["accuracy"] for line in read_lines(runs()) if not line["round"] % 2]
    end = ends_after(scores, 1)
    assert end is not None
    assert summary_of(runs(patience=1, evaluate_every=2))["rounds"] == 2 * end


def test_scores_of_clients_come_a_round_later_and_decide_then(runs):
    """Round r + 1 measures the model of round r; the run's last model is scored by an evaluation."""
    whole = read_lines(runs(held_out_fraction=0.0))
    received = [line["received_accuracy"] for line in whole]  # of the rounds 0, 1, …
    assert ends_after(received, 1) is not None
    for patience in (1, 2):
        end = ends_after(received, patience)
        last = ROUNDS if end is None else end + 1
        path = runs(held_out_fraction=0.0, patience=patience, deliver="best")
        summary, lines = summary_of(path), read_lines(path)
        assert summary["rounds"] == last
        assert [line["received_accuracy"] for line in lines] == received[:last]
        scores = [*received[:last], lines[-1]["accuracy"]]
        best = scores.index(max(scores))
        assert (summary["best_round"], summary["best_score"]) == (best, scores[best])
        assert summary["delivered_round"] == best
        if best:
            assert same_model(path, state_after(runs(held_out_fraction=0.0), best))


def test_clients_that_score_the_new_model_decide_in_the_same_round(runs):
    options = {"held_out_fraction": 0.0, "score_in_training": False}
    scores = [line["accuracy"] for line in read_lines(runs(**options))]  # of the rounds 1, 2, …
    for patience in (1, 2):
        end = ends_after(scores, patience)
        last = ROUNDS if end is None else end + 1
        summary = summary_of(runs(**options, patience=patience, deliver="best"))
        assert summary["rounds"] == last
        assert summary["delivered_round"] == 1 + scores.index(max(scores[:last]))


def test_personal_models_end_a_run_by_the_mean_of_their_scores(runs):
    options = {"strategy": "fedacs", "fedacs.quantile": 0.5}
    whole = read_lines(runs(**options))
    scores = [line["trained_accuracy"] for line in whole]
    found = {patience: ends_after(scores, patience) for patience in (1, 2)}
    assert any(found.values())
    for patience, end in found.items():
        path = runs(**options, patience=patience)
        last = ROUNDS if end is None or end + 1 >= ROUNDS else end + 1  # there is no score of round 0
        assert (summary_of(path)["rounds"], summary_of(path)["delivered_round"]) == (last, last)
        assert [line["trained_accuracy"] for line in read_lines(path)] == scores[:last]


@pytest.mark.parametrize("strategy", ["fedfrozen", "fedensemble", "fedadam"])
def test_the_models_of_other_strategies_are_delivered_as_they_were_scored(runs, strategy, monkeypatch, tmp_path):
    scored = {}
    from tepal.server_app import run as module

    evaluation = module.server_evaluation

    def spied(config, model):
        evaluate = evaluation(config, model)

        def scoring(round, arrays):
            metrics = evaluate(round, arrays)
            scored[round] = metrics["accuracy"], {name: array.numpy().copy() for name, array in arrays.items()}
            return metrics

        return scoring

    monkeypatch.setattr(module, "server_evaluation", spied)
    options = {"fedensemble.modes": 2} if strategy == "fedensemble" else {}
    if strategy == "fedfrozen":
        options = {"model": "tiny-vit", "fedfrozen.warmup-rounds": 2}
    path = begin(tmp_path, strategy=strategy, num_server_rounds=6, deliver="best", **options)
    best = max(scored, key=lambda round: (scored[round][0], -round))
    assert summary_of(path)["delivered_round"] == best
    assert same_model(path, scored[best][1])
    if strategy == "fedensemble":
        assert all(name.startswith("mode/") for name in scored[best][1])


# ---- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_out", "patience", "fails_in"),
    [(0.2, 2, 2), (0.2, 3, 4), (0.2, 3, 6), (0.2, 3, 7), (0.0, 1, 3), (0.0, 1, 4)],
)
def test_a_resumed_run_delivers_the_same_model_of_the_same_round(
    runs, monkeypatch, tmp_path, held_out, patience, fails_in
):
    options = {"deliver": "best", "patience": patience, "held_out_fraction": held_out}
    whole = runs(**options)
    assert summary_of(whole)["rounds"] >= fails_in
    save = Checkpoints.save

    def killed(self, checkpoint):
        if checkpoint.round == fails_in:
            raise KeyboardInterrupt
        save(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "save", killed)  # when the best model may have been written already
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, **options)
    monkeypatch.undo()
    path = begin(tmp_path, resume=str(tmp_path / "runs"))
    assert_same_result(path, whole)
    assert {file.name for file in (path / CHECKPOINTS).glob("best-*")} == {
        file.name for file in (whole / CHECKPOINTS).glob("best-*")
    }


def assert_same_result(path, whole):
    """Of a run that was resumed with new clients, and one that was not interrupted."""
    own = ("seconds", "step_seconds", "bytes_down", "bytes_vs_fedavg", "bytes_plain")  # the new clients'
    assert [(k, v) for k, v in summary_of(path).items() if k not in own] == [
        (k, v) for k, v in summary_of(whole).items() if k not in own
    ]
    assert same_model(path, load_file(whole / "model.safetensors"))


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_run_whose_newest_checkpoints_are_damaged_has_the_best_model_of_the_one_before(
    runs, monkeypatch, tmp_path, damaged
):
    """The first damaged one is of a round with a new best model."""
    whole, options = runs(deliver="best"), {"deliver": "best", "checkpoints": damaged + 1}
    scores = [line["accuracy"] for line in read_lines(whole)]
    last = max(k for k in range(3, ROUNDS - 1) if scores[k] > max(scores[:k]))
    before = scores.index(max(scores[:last]))
    save = Checkpoints.save

    def killed(self, checkpoint):
        if checkpoint.round == last + damaged:
            raise KeyboardInterrupt
        save(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, **options)
    monkeypatch.undo()
    folder = (tmp_path / "runs/latest").resolve() / CHECKPOINTS
    assert Checkpoints(folder).rounds() == [*range(last - 1, last + damaged)]
    for number in range(last, last + damaged):
        with (folder / f"round-{number:06d}" / STATE).open("r+b") as file:
            file.truncate(100)
    restored, restore = [], BestModel.restore

    def spied(self, facts):
        restore(self, facts)
        restored.append((self.kept, self.standing.best_round, self.result(None, last)[1]))

    monkeypatch.setattr(BestModel, "restore", spied)
    path = begin(tmp_path, resume=str(tmp_path / "runs"))
    assert restored == [(before, before, before)]
    assert [line["accuracy"] for line in read_lines(path)] == scores
    assert_same_result(path, whole)


def test_a_failed_run_delivers_the_best_model_so_far_and_says_so(runs, monkeypatch, tmp_path):
    of, whole = LocalClient.of, runs()

    def failing(msg, context):
        if msg.content["config"]["server-round"] == 6:
            raise RuntimeError("the disk is gone")
        return of(msg, context)

    monkeypatch.setattr(LocalClient, "of", staticmethod(failing))
    with pytest.raises(RoundFailed, match="the disk is gone"):
        begin(tmp_path, deliver="best")
    path = (tmp_path / "runs/latest").resolve()
    scores = [line["accuracy"] for line in read_lines(whole)][:6]
    best = scores.index(max(scores))
    summary = summary_of(path)
    assert "the disk is gone" in summary["stopped_by"] and summary["ended_early"] is None
    assert (summary["delivered_round"], metadata_of(path)["round"]) == (best, str(best))
    assert same_model(path, state_after(whole, best))


def test_a_run_that_ended_early_goes_on_only_if_it_gets_more_patience(runs, tmp_path):
    scores = [line["accuracy"] for line in read_lines(runs())]
    end = ends_after(scores, 1)
    assert end is not None and end < ROUNDS
    path = begin(tmp_path, patience=1, deliver="best")
    summary = summary_of(path)
    assert summary["rounds"] == end
    assert begin(tmp_path, resume=str(path)) == path
    again = summary_of(path)
    assert [again[key] for key in ("rounds", "delivered_round", "ended_early")] == [
        summary[key] for key in ("rounds", "delivered_round", "ended_early")
    ]
    begin(tmp_path, resume=str(path), patience=100)
    assert [line["accuracy"] for line in read_lines(path)] == scores
    assert (summary_of(path)["rounds"], summary_of(path)["ended_early"]) == (ROUNDS, None)
    assert same_model(path, load_file(runs(deliver="best") / "model.safetensors"))


def test_clients_keep_the_model_that_is_delivered(runs, tmp_path):
    for held_out in (0.2, 0.0):
        folder = tmp_path / str(held_out)
        nodes = [{"model-path": str(folder / "own.safetensors")}, {}, {}]
        path = begin(folder, nodes, deliver="best", patience=2, held_out_fraction=held_out)
        own, server = load_file(folder / "own.safetensors"), load_file(path / "model.safetensors")
        assert own.keys() == server.keys() and all(np.array_equal(own[name], server[name]) for name in own)


# ---- the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"best-metric": "f1"}, "best-metric='f1': .*allowed are auto, accuracy, loss, macro-f1, rmse"),
        ({"best-metric": "rmse"}, r"best-metric='rmse': .* scored by accuracy, loss, macro-f1: set it to one of them"),
        ({"deliver": "first"}, "deliver='first': .*allowed are last, best"),
        ({"patience": -1}, "patience=-1"),
        ({"min-improvement": -0.1}, "min-improvement=-0.1"),
        ({"patience": 2, "evaluate-every": 20}, "patience=2 and evaluate-every=20: .* cannot end early"),
        (
            {"patience": 2, "held-out-fraction": 0.0, "score-in-training": False, "fraction-evaluate": 0.0},
            "patience=2 with score-in-training=false and fraction-evaluate=0: no round is scored",
        ),
        (
            {"deliver": "best", "patience": 1, "strategy": "fedensemble", "dataset": "local"} | {
                "image-shape": "1x8x8", "classes": 10,
            },
            "patience=1 and deliver='best': .* do not score the ensemble: set score-in-training=false",
        ),
        *(
            ({"deliver": "best", "strategy": name}, f"strategy='{name}' scores the clients' personal models, .*"
             r"Set deliver='last' \(patience can be set\)")
            for name in ("fedacs", "fedamp", "ditto", "apfl", "pfedme", "perfedavg", "local")
        ),
    ],
)  # fmt: skip
def test_what_cannot_decide_is_refused_before_work(values, said):
    with pytest.raises(ConfigError, match=said):
        read_run_config(values)


@pytest.mark.parametrize(
    "values",
    [
        {"deliver": "best"}, {"patience": 5, "strategy": "fedacs"}, {"patience": 2, "held-out-fraction": 0.0},
        {"deliver": "best", "strategy": "fedensemble", "held-out-fraction": 0.0, "score-in-training": False},
        {
            "deliver": "best", "best-metric": "rmse", "model": "linear-attention", "dataset": "local", "features": 3,
            "outputs": 1,
        },
    ],
)  # fmt: skip
def test_what_can_decide_is_accepted(values):
    assert values.items() <= read_run_config(values).flat.items()


def test_patience_that_is_not_less_than_the_rounds_is_remarked(caplog):
    read_run_config({"patience": 20})
    assert "patience=20 and num-server-rounds=20: the run cannot end early." in caplog.text
