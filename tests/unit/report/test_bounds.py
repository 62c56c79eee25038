"""A report of a run that is made to harm its reader: it ends, in bounded time, and shows every name as text."""

import json
import math
import re
import time

import numpy as np
import plotly.graph_objects as go
import pytest

from tepal.records.round_record import BINS, COLUMNS, INCIDENTS, RoundRecord
from tepal.records.run_directory import BLOCKS, CLIENTS, LABELS, RunDirectory
from tepal.report.clients import natural
from tepal.report.method_figures import MOST_COLUMNS, label_figures
from tepal.report.page import labels, thin
from tepal.report.run_page import write_report
from tests.unit.report.test_report import CONFIG, Page

HOSTILE = ["line\nbreak", "\x1b[2J\x1b[31m", "nul\0", "\u202egnp.exe", "<script>alert(1)</script>", "=cmd()",
           "\\input{/etc/passwd}", "a|b", "x" * 5000, "\ud800\udfff", '<a href="https://evil.example">x</a>', "\u00b2",
           "9" * 5000, "", "{{ 7 * 7 }}", "</style></script><script>alert(2)</script>"]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "fedavg", CONFIG)


def seconds_of(run):
    begun = time.process_time()
    page = write_report(run.path)
    return time.process_time() - begun, page


def test_two_hundred_thousand_classes_are_drawn_as_few_and_the_others():
    rng = np.random.default_rng(1)
    counts = {f"site-{k}": rng.integers(0, 100, 200_000).tolist() for k in range(4)}
    begun = time.process_time()
    [figure] = label_figures(counts)
    assert time.process_time() - begun < 5
    [drawn] = figure.plot.data
    totals = np.array(list(counts.values())).sum(axis=0)
    shown = [int(name) for name in drawn.x[:-1]]
    assert len(shown) == MOST_COLUMNS and drawn.x[-1] == "others" and shown == sorted(shown)
    assert min(totals[shown]) >= np.sort(totals)[-MOST_COLUMNS]
    assert [sum(row) for row in drawn.customdata] == [sum(each) for each in counts.values()]
    assert f"{MOST_COLUMNS} most frequent of 200,000 classes" in figure.caption
    assert f"{totals.sum():,} examples" in figure.caption


def test_a_report_ends_whatever_the_label_counts_are(run):
    (run.path / LABELS).write_text(json.dumps({f"c{k}": [1] * 200_000 for k in range(3)} | {"none": [], "one": [5]}))
    seconds, page = seconds_of(run)
    assert seconds < 10 and page.stat().st_size < 8_000_000


def test_few_classes_are_drawn_as_they_are():
    [figure] = label_figures({"a": [1, 3], "b": [2]})
    assert [list(row) for row in figure.plot.data[0].z] == [[0.25, 0.75], [1, 0]]


def test_a_report_ends_whatever_clients_parts_and_layers_there_are(run):
    many = 10_000
    (run.path / BLOCKS).write_text(
        json.dumps([{"stage": f"s{k}", "kind": f"k{k % 500}", "bytes": k} for k in range(many)])
    )
    (run.path / CLIENTS).write_text(json.dumps({f"site-{k}": {"rounds": k} for k in range(50_000)}))
    travel = {f"travel_{way}": np.linspace(0, 1, many) for way in ("up", "down", "trains")}
    names = np.array([f"site-{k}" for k in range(500)])
    masks = np.ones((500, 2000), bool)
    for number in range(1, 4):
        weights = np.full((500, 500), 1 / 500)
        run.write_record(number, {"clients": names, "cohort": names, "masks": masks, "weights": weights, **travel})
        run.append(RoundRecord(round=number, refused=[{"client": f"c{k}", "reason": "x"} for k in range(3000)]))
    seconds, page = seconds_of(run)
    assert seconds < 30 and page.stat().st_size < 20_000_000
    text = page.read_text()
    assert "The first 300 of 10,000 parts" in text and "The last 2,000 of 9,000." in text
    assert "the first 300 of 2,000" in text


@pytest.mark.parametrize(
    "arrays",
    [{"masks": np.ones((2, 2), bool)}, {"masks": np.ones(3), "clients": np.array(["a"])},
     {"modes": np.array([1.5, np.nan]), "clients": np.array(["a", "b"])}, {"weights": np.zeros(())},
     {"weights": np.full((2, 2), np.nan), "clients": np.array(["a", "b"]), "cohort": np.array(["a", "b"])},
     {"weights": np.full((2, 2), 1e300), "clients": np.array(["a", "b"]), "cohort": np.array(["a", "b"])},
     {"weights": np.ones((0, 0)), "clients": np.array([], str), "cohort": np.array([], str)},
     {"query_key_drift": np.array("x"), "value_drift": np.array([1, 2])}, {"travel_up": np.array(["a", "b"])},
     {"masks": np.ones((0, 0)), "clients": np.array([], str)}, {"clients": np.array(HOSTILE[:5])}],
)  # fmt: skip
def test_arrays_that_no_figure_can_be_made_of_cost_only_these_figures(run, arrays):
    (run.path / BLOCKS).write_text(json.dumps([{"stage": s, "kind": "k", "bytes": 1} for s in "ab"]))
    run.append(RoundRecord(round=1, accuracy=0.5))
    run.write_record(1, arrays)
    assert "accuracy-rounds" in Page(write_report(run.path)).figures


@pytest.mark.parametrize("value", [-1.0, 1e300, -1e300, math.nan, math.inf, None, 10**300, 0])
def test_any_figure_that_a_client_reports_is_shown(run, value):
    figures = [name for name, column in COLUMNS.items() if not column.left and name not in ("round", *INCIDENTS)]
    for number in (1, 2):
        run.append(RoundRecord(round=number, **{**dict.fromkeys(figures, value), **dict.fromkeys(BINS, [value] * 15)}))
    run.write_summary()
    Page(write_report(run.path))


def test_hostile_names_are_text_wherever_a_report_has_them(run):
    incidents = [{"client": name, "reason": name} for name in HOSTILE]
    evil = HOSTILE[4]
    run.append(RoundRecord(round=1, phase=evil, loss=1, accuracy=0.5, accuracy_of=evil, refused=incidents))
    (run.path / CLIENTS).write_text(json.dumps({name: {"rounds": 1, "reason": name} for name in HOSTILE}))
    (run.path / LABELS).write_text(json.dumps({name: [1, 2] for name in HOSTILE}))
    (run.path / BLOCKS).write_text(json.dumps([{"stage": name, "kind": name, "bytes": 1} for name in HOSTILE]))
    run.write_config({**CONFIG, "strategy": evil, "model": evil, "text": HOSTILE[0] + HOSTILE[1] + HOSTILE[3]})
    page = Page(write_report(run.path))
    content = (run.path / "report.html").read_text(encoding="utf-8")
    body = content[: content.index("</main>")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", body)
    assert "alert(1)" not in "".join(text for attributes, text in page.scripts if "type" not in attributes)
    assert not [attributes for tag, attributes in page.tags if tag == "a"]
    assert len(max(re.findall("[x9]+", body), key=len)) <= 2000
    names = page.figures["labels"]["data"][0]["y"]
    assert len(set(names)) == len(HOSTILE)
    legends = [trace.get("name", "") for figure in page.figures.values() for trace in figure["data"]]
    assert "<" not in "".join([*names, *legends]) and any("&lt;script&gt;" in each for each in legends)


def test_labels_of_a_figure_are_different_short_and_text():
    shown = labels(["a", "<b>", "x" * 500, "x" * 501, "a\n", "a\\n"])
    assert shown[:2] == ["a", "&lt;b&gt;"] and len(set(shown)) == 6 and max(map(len, shown)) < 80


def test_a_label_may_be_what_a_repeated_one_would_be_called():
    """As nobody but who writes a `labels.json` by hand would have them."""
    shown = labels(["\x01", "\x01 (3)", "\\x01"])
    assert len(set(shown)) == 3 and shown[2].startswith("\\x01 (")


def test_of_each_round_that_is_drawn_all_bars_are():
    plot, rng = go.Figure(), np.random.default_rng(0)
    for name in ("down", "up"):
        plot.add_bar(x=list(range(5000)), y=list(rng.random(5000)), name=name, meta={})
    plot.add_scatter(x=list(range(5000)), y=list(rng.random(5000)), meta={})
    down, up, curve = thin(plot).data
    assert list(down.x) == list(up.x) and 600 <= len(down.x) <= 1300 and len(curve.x) <= 700
    for trace in (down, up):
        assert len(trace.y) == len(trace.x)


def test_names_are_ordered_whatever_is_in_them():
    names = [f"client-{k}" for k in (1, 2, 10, 100)]
    assert sorted(reversed(names), key=natural) == names
    sorted([*HOSTILE, "0", "00", "1", "a1", "1a"], key=natural)
