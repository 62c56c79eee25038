"""docs/performance.md: its tables are what docs/performance.json makes, and benchmarks' files can be entered."""

import json
import runpy
import statistics
import sys

import pytest

from tests.packages import ROOT

PAGE, MEASURED = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.json"
CIRCUMSTANCES = {"date": "2026-01-02", "commit": "abc1234", "command": "python benchmarks/pfllib.py", "processor": "P",
                 "cores": 2, "memory": "23 GiB", "torch": "2.0"}  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield runpy.run_path(str(ROOT / "benchmarks" / "performance.py"))
    for name in ("measured", "topics"):
        sys.modules.pop(name, None)


@pytest.fixture
def copies(script, tmp_path, monkeypatch):
    """Runs the command on copies of page and measurements; returns the page."""
    for name, file in (("PAGE", PAGE), ("MEASURED", MEASURED)):
        (tmp_path / file.name).write_text(file.read_text())
        monkeypatch.setitem(script["main"].__globals__, name, tmp_path / file.name)

    def run(*given):
        monkeypatch.setattr(sys, "argv", ["performance.py", *map(str, given)])
        script["main"]()
        return (tmp_path / PAGE.name).read_text()

    return run


def test_the_page_is_what_the_measurements_make(copies):
    assert copies() == PAGE.read_text()


def test_every_measurement_has_its_circumstances_and_a_place(script):
    measured = json.loads(MEASURED.read_text())
    for topic, of in measured.items():
        assert of["rows"] and of["measured"]["date"] and of["measured"]["commit"], topic
        assert f"<!-- measured: {topic} -->" in PAGE.read_text()
    assert measured.keys() <= script["TOPICS"].keys()


def test_a_benchmarks_file_replaces_its_rows(copies, tmp_path):
    seconds = {"Tepal": [1.0, 2.0, 3.0, 5.0, 9.0], "PFLlib": [6.0, 6.0, 6.0]}
    figures = {"clients": 7, "seconds": {"FedAvg": seconds, "Ditto": {"Tepal": [2.0], "PFLlib": [1.0]}}}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "pfllib.json").write_text(json.dumps({"measured": CIRCUMSTANCES, "figures": figures}))
    (folder / "bench.json").write_text("{}")  # what the runner leaves next to the files
    (folder / "robust.json").write_text("{}")  # a topic without a place in the page
    page = copies(folder)
    low, middle, high = statistics.quantiles(seconds["Tepal"], n=4, method="inclusive")
    assert f"| {middle:.3g} s ({low:.3g} to {high:.3g}) | PFLlib | 6 s | 2.00 x | ≥ 1.2 |" in page
    assert page.count("| a round of 7 clients, Ditto | 2 s | PFLlib | 1 s | 0.50 x | ≥ 1.2: not met |") == 2
    assert "`python benchmarks/pfllib.py`, 2026-01-02, commit abc1234; 2 cores (P), 23 GiB; torch 2.0." in page


def test_other_files_are_refused(copies, tmp_path):
    (tmp_path / "pfllib.json").write_text("[1]")
    with pytest.raises(ValueError, match="lacks `measured`"):
        copies(tmp_path / "pfllib.json")
    (tmp_path / "pfllib.txt").write_text("{}")
    with pytest.raises(ValueError, match=r"as TOPIC\.json"):
        copies(tmp_path / "pfllib.txt")
    (tmp_path / "another.json").write_text("{}")
    with pytest.raises(ValueError, match="not named after a topic"):
        copies(tmp_path / "another.json")
