"""`tepal compare` with several runs at the same time, as on a cluster."""

import contextlib
import csv
import io
import signal
import threading
from itertools import count

import pytest
from rich.console import Console

from tepal.host.superlink import RunError
from tepal.records.run_directory import read_config
from tepal.tools.compare import runs
from tepal.tools.compare.comparison import read_comparison
from tepal.tools.simulation.engine import RunStopped
from tests.comparisons import comparison_in, leave_run

THREE = ("--strategies", "fedavg,fedfrozen,fedacs")


def rows_of_runs(folder):
    with (folder / "runs.csv").open() as file:
        return list(csv.DictReader(file))


def outcomes(folder):
    """Of the runs, in the table and in the file that a resumed comparison is read from."""
    found = [run.outcome for run in read_comparison(folder).runs]
    assert [row["outcome"] for row in rows_of_runs(folder)] == found
    return found


def folders(compare):
    return sorted(compare.runs.glob("*-compare*"))  # the second of a second is called -compare-2


def interrupted_at(call):
    """`write_comparison`, with Ctrl-C at this call of it."""
    real, calls = runs.write_comparison, count(1)

    def write(comparison):
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(comparison)

    return write


def together(number):
    """Called in as many runs, it returns in all of them at the same time."""
    barrier = threading.Barrier(number)
    return lambda _strategy, _run: barrier.wait(20)


def test_the_tables_are_those_of_runs_in_turn(compare):
    assert compare(*THREE).exit_code == 0
    in_turn = compare.cells()
    compare.engine.at_once = 3
    compare.during.append(together(3))
    assert compare(*THREE).exit_code == 0 and sorted(compare.cells()) == sorted(in_turn) and len(in_turn) == 3
    first, second = folders(compare)
    for name in ("comparison.csv", "comparison.md", "comparison.tex"):
        assert (first / name).read_text() == (second / name).read_text(), name
    assert outcomes(second) == outcomes(first) == ["finished"] * 3
    # Each run is where it belongs, whichever ended first.
    for run in read_comparison(second).runs:
        assert {key: read_config(run.directory)[key] for key in ("strategy", "seed")} == {
            "strategy": run.strategy, "seed": run.seed,
        }  # fmt: skip
    assert not compare.stopped.is_set()


def test_a_run_that_fails_leaves_the_others_alone(compare):
    compare.engine.at_once = 3
    compare.during.append(together(3))
    compare.failing["fedfrozen"] = RunError("too few replies")
    done = compare(*THREE)
    (folder,) = folders(compare)
    assert done.exit_code == 1 and "fedfrozen: too few replies" in done.stderr
    assert outcomes(folder) == ["finished", "failed", "finished"] and not compare.stopped.is_set()
    compare.failing.clear()
    compare.cells()
    compare.engine.at_once = 2
    compare.during.append(lambda _strategy, _run: None)
    assert compare("--resume", str(folder), config=None).exit_code == 0
    assert [strategy for strategy, _ in compare.cells()] == ["fedfrozen"] and outcomes(folder) == ["finished"] * 3


@pytest.fixture
def ctrl_c():
    """Python's own handler: in a shell's background SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_all_that_are_under_way_and_shows_what_is_there(compare, ctrl_c):
    compare.engine.at_once = 2
    begun = threading.Barrier(2)

    def wait(strategy, _run):
        if strategy == "fedavg":
            return
        if begun.wait(20) == 0:  # both have begun, as a run before them has ended
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert compare.stopped.wait(20)
        raise RunStopped

    compare.during.append(wait)
    done = compare("--strategies", "fedavg,fedfrozen,fedacs,local")
    (folder,) = folders(compare)
    assert done.exit_code == 130 and outcomes(folder) == ["finished", "stopped", "stopped", "not run"]
    assert sorted(strategy for strategy, _ in compare.cells()) == ["fedacs", "fedavg", "fedfrozen"]
    assert f"`tepal compare --resume {folder}`" in done.output and (folder / "comparison.html").is_file()
    compare.during.append(lambda _strategy, _run: None)
    assert compare("--resume", str(folder), config=None).exit_code == 0 and outcomes(folder) == ["finished"] * 4
    assert sorted(strategy for strategy, _ in compare.cells()) == ["fedacs", "fedfrozen", "local"]


def test_ctrl_c_after_the_last_run_leaves_it_finished(compare, monkeypatch):
    compare.engine.at_once = 2
    monkeypatch.setattr(runs, "write_comparison", interrupted_at(2))  # after the second of two runs
    assert compare("--strategies", "fedavg,fedacs").exit_code == 0 and outcomes(folders(compare)[0]) == ["finished"] * 2


@pytest.mark.parametrize("at_once", [1, 2])
def test_ctrl_c_leaves_a_failed_run_failed_with_its_reason(compare, monkeypatch, at_once):
    """Both runs have ended when it comes, or failed in an earlier session."""
    compare.engine.at_once = at_once
    compare.failing |= {"fedavg": RunError("no memory"), "fedacs": RunError("no data")}
    compare("--strategies", "fedavg,fedacs")
    (folder,) = folders(compare)
    del compare.failing["fedavg"]
    monkeypatch.setattr(runs, "write_comparison", interrupted_at(1))
    compare("--resume", str(folder), config=None)
    assert [(run.outcome, run.reason) for run in read_comparison(folder).runs] == [
        ("finished", ""), ("failed", "no data"),
    ]  # fmt: skip


@pytest.mark.parametrize("first", ["finished", "failed"])
def test_ctrl_c_between_two_runs_in_turn_stops_the_next(compare, monkeypatch, first):
    monkeypatch.setattr(runs, "write_comparison", interrupted_at(1))
    if first == "failed":
        compare.failing["fedavg"] = RunError("no memory")
    done = compare(*THREE)
    (folder,) = folders(compare)
    assert done.exit_code == 130 and outcomes(folder) == [first, "stopped", "not run"]
    assert [run.reason for run in read_comparison(folder).runs] == ["no memory" if first == "failed" else "", "", ""]
    compare.failing.clear()
    assert compare("--resume", str(folder), config=None).exit_code == 0 and outcomes(folder) == ["finished"] * 3


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Run 25 times 10 s, or until a run raises an error, and return when the files were written: each time for 8 s."""
    comparison, now, written, real = comparison_in(tmp_path, ["fedavg"], range(25)), [0], [], runs.write_comparison

    def write(comparison):
        written.append(now[0])
        now[0] += 8
        real(comparison)

    def run(at_once=1, error=None):
        def start(config, _progress, begun):
            now[0] += 10
            if error and config.rounds.seed == 22:
                raise error
            begun(run := leave_run(tmp_path, "fedavg", seed=config.rounds.seed))
            return run

        console = Console(file=io.StringIO())
        runs.run_all(comparison, start, console=console, errors=console, at_once=at_once, clock=lambda: now[0])
        return written

    monkeypatch.setattr(runs, "write_comparison", write)
    run.written = written
    return run


def test_the_files_of_many_runs_are_not_written_after_each(many, tmp_path):
    # After four times they have taken 32 s. Then 160 s, of which 8 s are 5 %, are to pass.
    assert many() == [10, 28, 46, 64, 232, 290] and outcomes(tmp_path) == ["finished"] * 25


def test_the_files_of_many_runs_at_once_have_all_in_the_end(many, tmp_path):
    assert len(many(at_once=2)) < 12 and outcomes(tmp_path) == ["finished"] * 25


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_the_files_of_many_runs_are_written_when_one_ends_all(many, tmp_path, error):
    with contextlib.nullcontext() if error is KeyboardInterrupt else pytest.raises(error):
        many(error=error)
    assert many.written[-2:] == [232, 270] and outcomes(tmp_path) == ["finished"] * 22 + ["stopped"] + ["not run"] * 2


def test_an_error_of_the_settings_stops_the_others_and_is_said(compare):
    compare.engine.at_once = 2

    def wait(_strategy, _run):
        assert compare.stopped.wait(20)
        raise RunStopped

    compare.during.append(wait)
    compare.failing["fedacs"] = ValueError("cpus_per_client is 99")
    done = compare("--strategies", "fedavg,fedacs")
    assert done.exit_code == 1 and "cpus_per_client is 99" in done.output


def test_where_each_begins_and_its_last_round_are_shown(compare):
    compare.engine.at_once = 2
    done = compare("--strategies", "fedavg,fedacs")
    for name in ("1/2 fedavg", "2/2 fedacs"):
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(name))
        assert "round 3/3" in line
