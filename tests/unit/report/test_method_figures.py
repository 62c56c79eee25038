"""What methods tell of their rounds, drawn: every cell against the records, counted here one by one."""

import json
import re

import numpy as np
import pytest

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import BLOCKS, ROUNDS, RunDirectory, read_records, reading
from tepal.report.method_figures import method_figures
from tepal.report.run_page import write_report
from tests.unit.report.test_report import FIGURES, Page

CLIENTS = [f"client-{k}" for k in (0, 1, 2, 10)]


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path, "a-method", {"strategy": "a method", "num-server-rounds": 3})


def report(run, records, lines=None):
    for number, record in records.items():
        run.write_record(number, record)
    for line in lines or [{"round": number, "seconds": 1.0} for number in records]:
        run.append(RoundRecord.from_line(line))
    return Page(write_report(run.path)).figures


def z(figure):
    [trace] = figure["data"]
    return trace["z"], trace["x"], trace["y"]


def names(*which):
    return np.array([CLIENTS[k] for k in which], str)


def test_selected_layers_are_counted_by_round_and_by_client(run):
    rng = np.random.default_rng(0)
    cohorts = {1: (0, 1, 3), 2: (1, 3), 3: (3, 0)}
    masks = {number: rng.random((len(cohort), 4)) < 0.5 for number, cohort in cohorts.items()}
    figures = report(run, {n: {"clients": names(*cohorts[n]), "masks": masks[n]} for n in cohorts})
    assert list(figures)[-2:] == ["layers-rounds", "layers-clients"]
    for key in ("layers-rounds", "layers-clients"):  # a third is not white where there is nothing less
        assert (figures[key]["data"][0]["zmin"], figures[key]["data"][0]["zmax"]) == (0, 1)
    values, rounds, layers = z(figures["layers-rounds"])
    assert rounds == [1, 2, 3] and layers == ["layer 1", "layer 2", "layer 3", "layer 4"]
    for layer in range(4):
        for column, number in enumerate(cohorts):
            trained = sum(bool(mask[layer]) for mask in masks[number])
            assert values[layer][column] == pytest.approx(trained / len(cohorts[number]), abs=1e-3)
    values, layers, clients = z(figures["layers-clients"])
    assert clients == ["client-0", "client-1", "client-10"] and layers == ["1", "2", "3", "4"]
    for row, client in enumerate((0, 1, 3)):
        own = [masks[n][cohorts[n].index(client)] for n in cohorts if client in cohorts[n]]
        for layer in range(4):
            assert values[row][layer] == pytest.approx(sum(bool(m[layer]) for m in own) / len(own), abs=1e-3)


@pytest.mark.parametrize(("read", "said"), [((1, 3, 5), "Counted in 3 of 5 rounds."), ((1, 2, 3, 4, 5), None)])
def test_trained_layers_by_client_say_of_how_many_rounds_they_are(read, said):
    """Of a long run only every second, fourth, … round is read. Round 0, the initial model, has no layers."""
    records = [(number, {"clients": names(0), "masks": np.ones((1, 2), bool)}) for number in read]
    figures = {figure.key: figure for figure in method_figures(records, [RoundRecord(round=n) for n in range(6)])}
    caption = figures["layers-clients"].caption
    assert said in caption if said else "Counted" not in caption


def test_the_drift_of_fedfrozens_blocks_is_drawn(run):
    drifts = {1: (0.5, 0.25), 2: (np.inf, 0.5), 3: (0.0, 0.125)}
    figures = report(
        run, {n: {"query_key_drift": np.array(q), "value_drift": np.array(v)} for n, (q, v) in drifts.items()}
    )
    drawn = {trace["name"]: (trace["x"], trace["y"]) for trace in figures["drift"]["data"]}
    assert drawn == {"query and key": ([1, 3], [0.5, 0.0]), "all else": ([1, 2, 3], [0.25, 0.5, 0.125])}


def test_modes_and_their_diversity_are_drawn(run):
    records = {
        1: {"clients": names(0, 3), "modes": np.array([0, 2]), "strata": np.array([0, 1])},
        2: {"clients": names(3, 1), "modes": np.array([1, 0]), "strata": np.array([1, 2])},
    }
    lines = [
        {"round": n, "seconds": 1.0, "disagreement": 0.1 * n, "lowest_accuracy": 0.5, "highest_accuracy": 0.5 + 0.1 * n}
        for n in (1, 2)
    ]
    figures = report(run, records, lines)
    values, rounds, clients = z(figures["modes"])
    assert rounds == [1, 2] and clients == ["client-0", "client-1", "client-10"]
    assert values == [[1, None], [None, 1], [3, 2]]
    drawn = {trace["name"]: trace["y"] for trace in figures["diversity"]["data"]}
    assert drawn["disagreement of two modes"] == [0.1, 0.2] and drawn["accuracy of the best mode"] == [0.6, 0.7]


@pytest.mark.parametrize("key", ["similarity", "distances"])
def test_whose_models_are_mixed_for_whom(run, key):
    alike = np.arange(16, dtype=np.float32).reshape(4, 4) / 100
    order = [3, 0, 2, 1]  # as the clients came
    equal = np.array([[0.5, 0.5, 0, 0], [0.25] * 4])
    records = {
        1: {"clients": np.array([], str), "cohort": np.array([], str)},
        2: {"clients": names(*order), key: alike, "cohort": names(3, 0), "weights": equal, "threshold": np.array(0.07)},
        3: {"clients": names(*order), key: alike + 1, "cohort": names(2), "weights": np.array([[0, 0, 1.0, 0]])},
    }
    figures = report(run, records)
    assert list(figures)[-4:] == ["alike", "weights", "graph", "mixed"]
    values, columns, rows = z(figures["alike"])
    assert columns == rows == CLIENTS
    for i, one in enumerate(CLIENTS):
        for j, other in enumerate(CLIENTS):
            expected = alike[order.index(CLIENTS.index(one)), order.index(CLIENTS.index(other))] + 1
            assert values[i][j] == pytest.approx(expected, rel=1e-3)
    values, columns, rows = z(figures["weights"])
    assert (rows, columns) == (["client-0", "client-2", "client-10"], CLIENTS)
    assert values == [[None] * 4, [0, 0, 1, 0], [None] * 4]
    assert [frame["name"] for frame in figures["weights"]["frames"]] == ["2", "3"]
    by_round = {frame["name"]: frame["data"][0]["z"] for frame in figures["weights"]["frames"]}
    assert by_round == {"2": [[0.25] * 4, [None] * 4, [0.5, 0, 0, 0.5]], "3": values}
    assert [frame["name"] for frame in figures["alike"]["frames"]] == ["2", "3"]
    # In round 2 client-10 and client-0 had mixtures, of four others at most; in round 3 client-2 had its own model.
    lines = {f["name"]: [len(d.get("x") or ()) // 3 for d in f["data"][:-1]] for f in figures["graph"]["frames"]}
    assert {number: sum(counts) for number, counts in lines.items()} == {"2": 1 + 3, "3": 0}
    assert figures["graph"]["data"][-1]["text"] == CLIENTS
    counts = {trace["name"]: (trace["x"], trace["y"]) for trace in figures["mixed"]["data"]}
    assert counts["most"] == ([2, 3], [4, 1]) and counts["mean"] == ([2, 3], [3, 1]) and counts["least"][1] == [2, 1]


def test_what_travelled_of_each_part_is_drawn_by_round(run):
    kinds = ("query and key", "other")
    cells = [{"stage": stage, "kind": kind, "bytes": 8} for stage in ("layer 1", "head") for kind in kinds]
    (run.path / BLOCKS).write_text(json.dumps(cells))
    shares = {1: [1, 1, 1, 1], 2: [0, 1, 0.5, 2]}
    records = {n: {f"travel_{way}": np.array(each) for way in ("down", "trains", "up")} for n, each in shares.items()}
    figures = report(run, records)
    for way in ("down", "up"):
        values, columns, rows = z(figures[f"travel-{way}"])
        assert values == [[1, 0], [1, 1], [1, 0.5], [1, 2]] and columns == [1, 2]
        assert rows == ["layer 1, query and key", "layer 1, other", "head, query and key", "head, other"]
    drawn = (run.path / "report.html").read_text().split('class="scroll diagram"')[1].split("</table>")[0]
    first, last = (re.sub("<[^>]+>", " ", row).split() for row in re.findall("<tr>(.*?)</tr>", drawn)[1:])
    assert " ".join(first) == (
        "layer 1 8 B not trained ↓ sent to none ↑ returned by none 8 B trained by all ↓ sent to all ↑ returned by all"
    )
    assert " ".join(last) == (
        "head 8 B trained by 50% ↓ sent to 50% ↑ returned by 50% "
        "8 B trained by all, × 2 ↓ sent to all, × 2 ↑ returned by all, × 2"
    )
    of_one_part = [{"stage": "model", "kind": "other", "bytes": 8}]
    (run.path / BLOCKS).write_text(json.dumps(of_one_part))
    assert not any(key.startswith("travel") for key in Page(write_report(run.path)).figures)


def test_a_run_without_records_has_no_such_figures_and_a_torn_record_is_passed_over(run):
    assert set(report(run, {}, [{"round": 1, "seconds": 1.0}])) <= set(FIGURES)
    run.write_record(1, {"clients": names(0), "masks": np.ones((1, 2), bool)})
    whole = (run.path / ROUNDS / "000001.npz").read_bytes()
    for cut in range(0, len(whole), 37):
        (run.path / ROUNDS / "000002.npz").write_bytes(whole[:cut])
        assert [number for number, _ in read_records(run.path)] == [1]
    assert set(Page(write_report(run.path)).figures) >= {"layers-rounds", "layers-clients"}


def test_of_many_rounds_some_are_read_with_the_first_and_the_last(run):
    seen = set()
    for number in range(1, 31):
        run.write_record(number, {"masks": np.ones((1, 2), bool), "clients": names(0)})
        read = [number for number, _ in read_records(run.path, most=7)]
        assert min(number, 4) <= len(read) <= 7 and read[0] == 1 and read[-1] == number and read == sorted(set(read))
        seen |= set(read[:-1])
    assert read == [1, 9, 17, 25, 30] and set(read[:-1]) <= seen, "those that were read before are read again"


def test_what_was_read_before_is_read_again_only_where_it_changed(run, monkeypatch):
    loads, load = [], reading._arrays
    monkeypatch.setattr(reading, "_arrays", lambda file: loads.append(file.name) or load(file))
    known = {}
    for number in (1, 2):
        run.write_record(number, {"masks": np.full((1, 1), number)})
    read_records(run.path, known=known)
    run.write_record(2, {"masks": np.full((1, 1), 7)})
    run.write_record(3, {"masks": np.full((1, 1), 3)})
    assert [int(record["masks"][0, 0]) for _, record in read_records(run.path, known=known)] == [1, 7, 3]
    assert loads == ["000002.npz", "000001.npz", "000003.npz", "000002.npz"]


def test_of_very_many_clients_the_first_are_shown_and_that_is_said(run):
    clients = np.array([f"client-{k}" for k in range(400)], str)
    figures = report(run, {1: {"clients": clients, "masks": np.ones((400, 2), bool)}})
    assert len(z(figures["layers-clients"])[2]) == 300
    assert "The first 300 of 400 clients" in Page(run.path / "report.html").text
