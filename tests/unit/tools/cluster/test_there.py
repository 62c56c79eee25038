"""What a job's process does on its machine."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tepal.records.run_directory import RunDirectory, read_config
from tepal.tools.cluster import there
from tests.packages import ROOT


@pytest.fixture
def engines(monkeypatch):
    """What ends the engine of the jobs, and this engine, which does nothing."""
    made = []

    class Engine:
        def __init__(self, app, clients, cpus, *, cache):
            self.asked, self.begun, self.ended = [], 0, False
            self.app, self.clients, self.cpus, self.cache = app, clients, cpus, cache
            made.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.ended = True

        def start_ahead(self):
            self.begun += 1

        def run(self, config, *, on_event, log):
            self.asked.append(SimpleNamespace(config=config, log=log, others=getattr(self, "others", None)))
            on_event("stage", "is not printed")
            on_event("log", "a line")

    monkeypatch.setattr(there, "ProcessEngine", Engine)
    monkeypatch.setattr(there.atexit, "register", lambda end: made.append(end))
    there._engine_there.cache_clear()
    yield made
    there._engine_there.cache_clear()


def test_the_process_of_a_job_begins_without_what_the_app_imports():
    """Seconds of a core in each place, while nothing is computed there yet."""
    heavy = {"torch", "flwr", "pandas", "sklearn", "transformers", "ray"}
    program = f"import sys, tepal.tools.cluster.process, {there.__name__}\nprint([*{heavy} & sys.modules.keys()])"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_run_has_the_engine_that_was_started_ahead_of_it(engines, tmp_path, capsys):
    there.start_there(tmp_path, app="/app", clients=3)
    end, engine = engines
    assert engine.begun == 1 and (str(engine.app), engine.clients, engine.cpus) == ("/app", 3, None)
    config = {"dataset": "/here/x.npz", "seed": 7, "runs": "/home/runs", "resume": ""}
    run = RunDirectory.create(tmp_path / "runs", "fedavg", config).path
    asked = {**config, "dataset": "/there/x.npz", "seed": 8}
    there.run_there(tmp_path, app="/app", config=asked, files=["dataset"], run=run.name, clients=3)
    assert len(engines) == 2 and engine.cache == tmp_path / "clients"
    own = {"runs": str(tmp_path / "runs"), "resume": str(run)}
    assert [(each.config, each.log) for each in engine.asked] == [({**asked, **own}, tmp_path / "run.log")]
    assert read_config(run) == {**config, "dataset": "/there/x.npz", "runs": str(tmp_path / "runs")}, "with files there"
    assert capsys.readouterr().out == "a line\n"
    end()
    assert engine.ended


def test_clients_are_answered_by_the_engine_that_was_started_ahead_of_them(engines, tmp_path):
    there.start_there(tmp_path, app="/app", clients=3)
    there.answer_there(tmp_path, app="/app", config={"seed": 7}, clients=3, paths={"/here": "/there"})
    _, engine = engines
    (asked,) = engine.asked
    assert asked.config == {"seed": 7}
    assert asked.others == {"answers": str(tmp_path / "worker"), "paths": {"/here": "/there"}}
