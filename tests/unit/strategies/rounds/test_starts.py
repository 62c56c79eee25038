"""Initial values that clients make themselves, so that they are not sent."""

import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from tepal.exchange.cache import default_root
from tepal.exchange.encodings import Encoding
from tepal.exchange.manifest import Manifest
from tepal.exchange.mod import PartialExchange
from tepal.exchange.plan import MODEL
from tepal.exchange.sender import Sender
from tepal.models.blocks import find_blocks
from tepal.strategies import FedACS, FedAvg, FedEnsemble, FedFrozen, PartialTraining, join_modes
from tepal.strategies.in_process import InProcessGrid, Node
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.rounds.test_differences import SCALES, Grid, as_sent, rounds_of
from tests.unit.strategies.rounds.test_encoding import MATRIX, REST, START, moving_app, start, vit  # noqa: F401

SIZE = 4 * MATRIX + REST
OTHER = {**START, "w": START["w"] + np.float32(1e-3)}
WIRES = {
    "plain": Encoding(start="made"), "int8": Encoding("int8", "int8", start="made"),
    "auto": Encoding("auto", "auto", start="made"), "signs": Encoding("sign", "sign", start="made"),
}  # fmt: skip


class Killed(Exception):
    pass


def making(values, asked=None):
    """An exchange whose clients make these values: of each tree, or as a function of it."""

    def make(msg, context, tree):
        if asked is not None:
            asked.append((int(context.node_config["partition-id"]), tree))
        return values(tree) if callable(values) else values

    return PartialExchange(start=make)


@pytest.mark.parametrize("spoil", [None, as_sent], ids=["local", "verified"])
@pytest.mark.parametrize("wire", WIRES)
def test_what_clients_make_is_not_sent_and_the_run_is_the_same(wire, spoil):
    sent, seen, asked = {}, {}, []
    strategy = FedAvg(encoding=replace(WIRES[wire], start="sent"), fraction_evaluate=0)
    as_usual, usual = start(strategy, moving_app(sent), clients=3, rounds=3, spoil=spoil)
    strategy = FedAvg(encoding=WIRES[wire], fraction_evaluate=0)
    made, history = start(strategy, moving_app(seen, exchange=making(START, asked)), clients=3, rounds=3, spoil=spoil)
    assert sorted(asked) == [(0, MODEL), (1, MODEL), (2, MODEL)]
    assert history[0].down.payload == 0 < usual[0].down.payload
    assert history[0].down.plain == 0
    for client in range(3):
        for name, value in seen[client, 1, "train"].items():
            np.testing.assert_array_equal(value, START[name])
    if wire == "plain":
        assert [report.down.payload for report in history[1:]] == [report.down.payload for report in usual[1:]]
        for name, value in as_usual.items():
            np.testing.assert_array_equal(made[name], value)
    assert not any(report.resent or report.refused or report.lost for report in history)


@pytest.mark.parametrize(
    "values", [OTHER, {name: START[name] for name in ("bias", "count")}, None], ids=["others", "some", "none"]
)
@pytest.mark.parametrize("wire", WIRES)
def test_what_clients_make_otherwise_is_sent(wire, values, caplog):
    caplog.set_level("INFO", "flwr")
    strategy = FedAvg(encoding=replace(WIRES[wire], start="sent"), fraction_evaluate=0)
    as_usual, usual = start(strategy, moving_app(), clients=2, rounds=2)
    strategy = FedAvg(encoding=WIRES[wire], fraction_evaluate=0)
    made, history = start(strategy, moving_app(exchange=making(values)), clients=2, rounds=2)
    assert [report.down.payload for report in history] == [report.down.payload for report in usual]
    for name, value in as_usual.items():
        np.testing.assert_array_equal(made[name], value)
    assert ("cannot make the initial values" in caplog.text) == (values is not None and "w" not in values)


def test_an_app_that_does_not_make_them_is_sent_them():
    _, history = start(FedAvg(encoding=WIRES["auto"], fraction_evaluate=0), moving_app(), clients=2)
    assert history[0].down.payload > 0


def test_clients_are_not_asked_unless_the_server_wants_it():
    asked = []
    _, history = start(FedAvg(fraction_evaluate=0), moving_app(exchange=making(START, asked)), clients=2)
    assert (asked, history[0].down.payload) == ([], 2 * SIZE)


def test_a_late_joiner_is_sent_what_differs_from_the_start():
    """In the rounds until then the others' parts have replaced the initial ones, and no client has those any more."""
    seen = {}
    strategy = FedAvg(encoding=WIRES["auto"], fraction_evaluate=0)
    app = moving_app(seen, exchange=making(START))
    grid = Grid(
        [Node(app, {"partition-id": k}) for k in range(3)], here=lambda number, k: k < 2 or number >= 6, spoil=as_sent
    )
    _, history = rounds_of(strategy, grid, 6)
    assert history[0].down.payload == 0 and history[5].asked == ["client-0", "client-1", "client-2"]
    in_int4 = MATRIX // 2 + SCALES + REST
    assert history[5].down.payload < history[4].down.payload + in_int4
    late, first = (seen[client, 6, "train"]["w"] - START["w"] for client in (2, 0))
    assert np.vdot(late, first) > 0.3 * np.linalg.norm(late) * np.linalg.norm(first)


@pytest.mark.parametrize(
    "wire",
    [
        Encoding("sign", start="made"), Encoding("ternary", start="made"), Encoding("int4", start="made"),
        Encoding("rank1", start="made"),
        Encoding("int8", top_k_down=0.05, start="made"), Encoding("auto", start="made"),
        Encoding("auto", "auto", budget=MATRIX, start="made"),
    ],
    ids=["sign", "ternary", "int4", "rank", "top-k", "auto", "budget"],
)  # fmt: skip
def test_a_newcomer_has_what_changed_as_exactly_as_a_whole_model(monkeypatch, wire):
    """Each client takes part in one round only, so that nothing that a message leaves out can come later.

    The one of the second round lacks the changes of one round, as any client does then.
    """
    seen, models, content = {}, {}, Sender.content

    def noted(self, outgoing, *rest):
        if outgoing.plan.action == "train":
            models[outgoing.plan.round] = np.copy(outgoing.values(MODEL)["w"])
        return content(self, outgoing, *rest)

    monkeypatch.setattr(Sender, "content", noted)
    nodes = [Node(moving_app(seen, exchange=making(START)), {"partition-id": k}) for k in range(24)]
    grid = Grid(nodes, here=lambda number, k: k == number - 1, spoil=as_sent)
    rounds_of(FedAvg(encoding=wire, fraction_evaluate=0), grid, 24)
    for number in range(24):
        came, model = seen[number, number + 1, "train"]["w"], models[number + 1]
        change = model - START["w"]
        if wire.down != "auto":
            most = np.abs(change).max(1, keepdims=True) / 254 if number > 1 else np.inf
            assert (np.abs(came - model) <= most * 1.001 + 1e-7).all()
        elif number > 1:
            # Of the squared norm ε / √m is left out. Rounding what is sent to steps has a small error beside it.
            assert np.linalg.norm(came - model) ** 2 <= 1.4 * 0.6 / math.sqrt(number) * np.linalg.norm(change) ** 2


def test_a_client_that_returns_keeps_its_newer_part():
    asked = []
    app = moving_app(exchange=making(START, asked))
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    strategy, history = FedAvg(encoding=WIRES["auto"], fraction_evaluate=0), []

    def restart(report):
        history.append(report)
        if report.round == 2:  # a new node of the same client
            grid.remove(next(id for id, node in grid.nodes.items() if node.config["partition-id"] == 1))
            grid.add(Node(app, {"partition-id": 1}))

    strategy.on_round = restart
    strategy.start(grid, ArrayRecord({name: Array(array) for name, array in START.items()}), num_rounds=4)
    assert asked == [(0, MODEL), (1, MODEL)], "the second time it has a newer part"
    assert not any(report.resent for report in history) and history[2].asked == ["client-0", "client-1"]


def test_modes_of_an_ensemble_begin_with_their_own_values():
    modes = [{name: value + k if value.dtype.kind == "f" else value for name, value in START.items()} for k in range(3)]
    seen, asked = {}, []
    app = moving_app(seen, exchange=making(lambda tree: modes[int(tree.removeprefix("mode/"))], asked))
    strategy = FedEnsemble(modes=3, strata=3, encoding=WIRES["auto"], fraction_evaluate=0)
    initial = join_modes([{name: Array(array) for name, array in mode.items()} for mode in modes])
    history = []
    strategy.on_round = history.append
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(3)])
    strategy.start(grid, initial, num_rounds=1)
    assert sorted(asked) == [(k, f"mode/{mode}") for k in range(3) for mode in range(3)]
    assert history[0].down.payload == 0
    for client in range(3):
        came = seen[client, 1, "train"]
        assert any(all((came[name] == mode[name]).all() for name in mode) for mode in modes)


def test_entries_that_never_change_are_never_sent():
    app = moving_app(scale=0.0, exchange=making(START))
    strategy = PartialTraining(trains=["bias"], encoding=WIRES["plain"], fraction_evaluate=0)
    _, history = start(strategy, app, clients=2, rounds=3)
    assert [report.down.payload for report in history] == [0, 2 * START["bias"].nbytes, 2 * START["bias"].nbytes]


def test_frozen_projections_of_the_start(vit):  # noqa: F811
    model, arrays = vit
    blocks = find_blocks(model)
    strategy = FedFrozen(warmup_rounds=0, model=model, encoding=WIRES["plain"], fraction_evaluate=0)
    strategy.rules = replace(strategy.rules, min_available_nodes=1)
    history = []
    strategy.on_round = history.append
    app = moving_app(scale=0.0, exchange=making(arrays))
    initial = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    strategy.start(InProcessGrid([Node(app, {"partition-id": 0})]), initial, num_rounds=2)
    assert [report.down.payload for report in history] == [0, blocks.layout.nbytes(blocks.value)]


def test_a_personal_model_begins_with_the_same_values():
    def run(start_of):
        wire = Encoding("auto", "auto", start=start_of)
        strategy = FedACS(quantile=0.01, alpha=0.1, encoding=wire, fraction_evaluate=0)  # they mix from round 2 on
        return start(strategy, moving_app(exchange=making(START)), clients=3, rounds=3)[1]

    usual, made = run("sent"), run("made")
    assert made[0].down.payload == 0 < usual[0].down.payload
    for before, after in zip(usual[1:], made[1:], strict=True):
        assert 0 < after.down.payload < 1.5 * before.down.payload, "differences, and no whole part a round later"


@pytest.mark.parametrize("wire", WIRES)
def test_a_start_that_was_lost_is_sent_once(wire):
    """The caches are cleared between the introductions and the first round."""
    strategy, history = FedAvg(encoding=WIRES[wire], fraction_evaluate=0), []
    usual = start(FedAvg(encoding=replace(WIRES[wire], start="sent"), fraction_evaluate=0), moving_app(), rounds=3)[1]
    app, cleared = moving_app(exchange=making(START)), []

    def forgetful(msg, context):
        if not cleared and Manifest.from_content(msg.content).plan.action == "train":
            shutil.rmtree(default_root(), ignore_errors=True)
            cleared.append(1)
        return app(msg, context)

    _, history = start(strategy, forgetful, rounds=3)
    assert cleared and history[0].resent
    assert history[0].down.payload <= max(usual[0].down.payload, SIZE)
    if WIRES[wire].differences_down:
        assert [report.down.payload for report in history] == [report.down.payload for report in usual]


def test_a_start_is_listed_as_long_as_it_is_useful():
    """Without differences it is of no use after the first rounds, but for entries that never change."""
    asked = []
    for strategy, expected in (
        (FedAvg(encoding=WIRES["plain"], fraction_evaluate=0), [0, 1]),
        (PartialTraining(trains=["bias"], encoding=WIRES["plain"], fraction_evaluate=0), [0, 1, 2]),
    ):
        asked.clear()
        app = moving_app(scale=0.0, exchange=making(START, asked))
        grid = Grid([Node(app, {"partition-id": k}) for k in range(3)], here=lambda number, k: k < 2 or number >= 5)
        rounds_of(strategy, grid, 5)
        assert sorted(client for client, _ in asked) == expected


@pytest.mark.parametrize("wire", ["plain", "auto"])
def test_a_run_that_is_resumed_goes_on_to_the_bit(wire, tmp_path):
    def run(folder, killed_in=0, *, resume=False):
        strategy = FedAvg(
            encoding=WIRES[wire], fraction_evaluate=0, deterministic=True, checkpoints=tmp_path / folder, resume=resume,
            min_available_nodes=2,
        )  # fmt: skip
        history = []

        def on_round(report):
            history.append(report)
            if report.round == killed_in:
                raise Killed

        strategy.on_round = on_round
        grid = InProcessGrid([Node(moving_app(exchange=making(START)), {"partition-id": k}) for k in range(2)])
        initial = ArrayRecord({name: Array(array) for name, array in START.items()})
        result = strategy.start(grid, initial, num_rounds=4)
        return {name: array.numpy() for name, array in result.arrays.items()}, history

    whole, history = run("whole")
    with pytest.raises(Killed):
        run("parts", killed_in=3)
    made, rest = run("parts", resume=True)
    assert [report.round for report in rest] == [3, 4]
    assert rest[1].down.payload == history[3].down.payload
    for name, value in whole.items():
        np.testing.assert_array_equal(made[name], value)


def test_a_resumed_server_may_have_other_initial_values(tmp_path):
    """As one that does not load pretrained weights again. A client that joins late still begins with the run's own."""
    others = {name: value + 3 if value.dtype.kind == "f" else value for name, value in START.items()}

    def run(folder, initial, values, killed_in=0, *, resume=False):
        seen = {}
        app = moving_app(seen, exchange=making(values))
        strategy = FedAvg(
            encoding=WIRES["auto"], fraction_evaluate=0, deterministic=True, checkpoints=tmp_path / folder,
            resume=resume, min_available_nodes=1,
        )  # fmt: skip
        grid = Grid([Node(app, {"partition-id": k}) for k in range(3)], here=lambda number, k: k < 2 or number >= 5)
        grid.number = 3 if resume else 1

        def on_round(report):
            grid.number = report.round + 1
            if report.round == killed_in:
                raise Killed

        strategy.on_round = on_round
        strategy.start(grid, ArrayRecord({name: Array(array) for name, array in initial.items()}), num_rounds=5)
        return seen

    whole = run("whole", START, START)
    for folder, values in (("same", START), ("others", others), ("none", None)):
        shutil.rmtree(default_root())
        with pytest.raises(Killed):
            run(folder, START, START, killed_in=3)
        seen = run(folder, others, values, resume=True)
        far = np.linalg.norm(seen[2, 5, "train"]["w"] - seen[0, 5, "train"]["w"])
        assert far < 2, "no further than an encoding of what changed, or of the whole"
        if values is START:
            for name, value in whole[2, 5, "train"].items():
                np.testing.assert_array_equal(seen[2, 5, "train"][name], value)


def test_a_cache_that_cannot_be_written_costs_bytes_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TEPAL_CACHE", os.fspath(tmp_path / "file" / "cache"))
    app = moving_app(exchange=making(START))
    _, history = start(FedAvg(encoding=WIRES["plain"], fraction_evaluate=0), app, clients=2)
    assert history[0].down.payload == 2 * SIZE and len(history[0].replied) == 2
