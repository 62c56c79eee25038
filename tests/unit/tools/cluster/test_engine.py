"""Runs as jobs: what is sent, what comes back, and how they end. The jobs themselves are fakes."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load

from tepal.host.superlink import RunError
from tepal.records.run_directory import KEPT_IN, RunDirectory, RunInUse, find_run, held, read_config
from tepal.server_app.config import read_run_config
from tepal.tools.cluster import ahead as ahead_module
from tepal.tools.cluster import engine as engine_module
from tepal.tools.cluster import inputs as inputs_module
from tepal.tools.cluster.engine import ClusterEngine, ClusterFailed
from tepal.tools.cluster.inputs import Inputs
from tepal.tools.cluster.job import MEMORY, PROCESS, JobFailed, Place
from tepal.tools.own_app import own_app
from tepal.tools.simulation.engine import RunStopped
from tepal.tools.simulation.running import run_once

QUIET = SimpleNamespace(stage=lambda text: None, note=lambda text: None, update=lambda line: None)
PLACE = Place("far", "/tmp/tepal-job-x", "/tmp/tepal-inputs-7")


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that were done; `jobs.ends` is called with each and what it tells."""
    done = SimpleNamespace(all=[], ends=lambda job, tell: None)

    def one(cluster, job, tell):
        done.all.append(job)
        return done.ends(job, tell)

    monkeypatch.setattr(engine_module, "done", one)
    return done


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(inputs_module, "_code", lambda _copy: {})
    monkeypatch.delenv("TEPAL_CACHE", raising=False)
    with Inputs() as inputs:
        cluster = SimpleNamespace(
            inputs=inputs, cpus=2.0, at_once=5, description="Engine: far", stopped=Event(), address="far:1"
        )  # fmt: skip
        with ClusterEngine(own_app(), 3, cluster) as made:
            yield made


@pytest.fixture
def config(tmp_path):
    """A run config with paths of files here."""
    for name in ("data/x.npz", "models/my-bert/config.json", "models/w.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return {
        "strategy": "fedavg", "runs": str(tmp_path / "runs"), "resume": "", "dataset": str(tmp_path / "data/x.npz"),
        "model": str(tmp_path / "models/my-bert"), "pretrained": f"{tmp_path}/models/w.pt,tiny-vit", "seed": 7,
    }  # fmt: skip


def entry(job, what):
    return next(each for each in job.inputs if each.what == what)


# --- what is sent ---------------------------------------------------------------------------------------------------


def test_a_run_is_a_job_in_a_directory_that_is_made_here(engine, jobs, config, tmp_path):
    log = tmp_path / "a.log"
    ended = engine.run(config, log=log)
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.name.endswith("-fedavg"))
    (job,) = jobs.all
    assert (ended.status, ended.log) == ("completed", log) and read_config(run)["dataset"] == config["dataset"]
    assert {each.what for each in job.inputs} == {"the app", "x.npz", "my-bert", "w.pt"}
    store = {each.what: f"{PLACE.store}/{each.digest}" for each in job.inputs}
    there = {
        **config, "dataset": f"{store['x.npz']}/x.npz", "model": f"{store['my-bert']}/my-bert",
        "pretrained": f"{store['w.pt']}/w.pt,tiny-vit",
    }  # fmt: skip
    files = ["dataset", "model", "pretrained"]
    given = {"app": store["the app"], "config": there, "files": files, "run": run.name, "clients": 3}
    arguments = dict(job.arguments(PLACE))
    assert {**arguments, "app": arguments["app"].rstrip("/")} == given
    assert job.function == "tepal.tools.cluster.there:run_there"
    assert job.folders == {"runs": tmp_path / "runs", "clients": tmp_path / "runs" / ".clients"}
    files = [f"clients/{run.name}-0123abcd/personal/3/1.safetensors", f"runs/{run.name}/checkpoint/round-000001/state"]
    order = [[number for number, pattern in enumerate(job.files) if fnmatchcase(file, pattern)] for file in files]
    assert [len(each) for each in order] == [1, 1] and order == sorted(order), "the state comes before its checkpoint"
    assert not any(fnmatchcase("clients/another-run-0123abcd/personal/3/1", pattern) for pattern in job.files)
    assert "clients/secret" in job.files and (tmp_path / "runs/.clients/secret").stat().st_mode & 0o077 == 0


def test_a_run_that_goes_on_has_its_own_directory_and_the_cache_of_its_folder(engine, jobs, config, tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "fedavg", config).path
    engine.cache = tmp_path / "cache"
    (tmp_path / "runs/latest").unlink()
    engine.run({**config, "resume": str(run)}, log=tmp_path / "a.log")
    assert find_run(tmp_path / "runs") == run.resolve(), "it is the latest again"
    engine.run({**config, "resume": str(run)}, log=tmp_path / "a.log")
    first, second = jobs.all
    assert first.arguments(PLACE) == second.arguments(PLACE) and first.arguments(PLACE)["run"] == run.name
    assert first.folders == {"runs": run.parent, "clients": tmp_path / "cache"}
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.is_symlink()] == [run.name]


def test_a_run_to_resume_that_is_not_there_is_refused(engine, jobs, config, tmp_path):
    with pytest.raises(FileNotFoundError):
        engine.run({**config, "resume": str(tmp_path / "none")})
    assert jobs.all == [] and not (tmp_path / "runs").exists()


def test_as_many_runs_at_once_as_the_cluster_has_room_for(engine):
    assert (engine.at_once, engine.description, engine.options) == (5, "Engine: far", "--ray far:1")


@pytest.mark.parametrize(("runs", "places"), [(2, 2), (9, 5), (0, 0)])
def test_places_are_made_ready_for_the_runs_that_there_are(engine, jobs, monkeypatch, runs, places):
    begun = []
    monkeypatch.setattr(ahead_module, "done", lambda _cluster, job, _tell: begun.append(job))
    engine.start_ahead(runs)
    engine.__exit__()
    assert engine._cluster.stopped.is_set() and len(begun) == places and jobs.all == []
    for job in begun:
        assert job.ahead and job.renewed and [each.what for each in job.inputs] == ["the app"]
        arguments = dict(job.arguments(PLACE))
        assert arguments["clients"] == 3 and arguments["app"].startswith(f"{PLACE.store}/{job.inputs[0].digest}")


def test_a_run_waits_for_a_place_that_is_being_made_ready(engine, jobs, config, tmp_path, monkeypatch):
    made, begun, told = Event(), Event(), []

    def ready(_cluster, _job, tell):
        tell("stage", "waits for a machine with room")
        begun.set()
        assert made.wait(20) and jobs.all == []

    monkeypatch.setattr(ahead_module, "done", ready)
    engine.start_ahead()
    assert begun.wait(20)
    run = Thread(target=engine.run, args=[config], kwargs={"on_event": lambda *event: told.append(event)})
    run.start()
    run.join(0.2)
    assert run.is_alive() and told[1:] == [("note", "waits for a machine with room")]
    made.set()
    run.join(20)
    assert len(jobs.all) == 1 and not jobs.all[0].ahead


def test_a_run_whose_place_no_machine_has_room_for_has_failed(engine, jobs, config, tmp_path, monkeypatch):
    def fails(*_):
        raise JobFailed("no machine of the cluster has room for it any more: see `ray status`")

    monkeypatch.setattr(ahead_module, "done", fails)
    engine.start_ahead()
    with pytest.raises(ClusterFailed, match="has room for it any more"):
        engine.run(config, log=tmp_path / "a.log")
    engine.run(config, log=tmp_path / "a.log")
    assert len(jobs.all) == 1


def test_a_run_that_another_process_has_is_refused(engine, jobs, config, tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "fedavg", config).path
    with held(run), pytest.raises(RunError) as refused:
        engine.run({**config, "resume": str(run)}, log=tmp_path / "a.log")
    assert isinstance(refused.value.__cause__, RunInUse) and jobs.all == []


# --- how it ends ----------------------------------------------------------------------------------------------------


def test_what_a_run_tells_is_passed_on_and_logged(engine, jobs, config, tmp_path):
    told, events = [], [("stage", "on far"), ("log", "INFO : one"), ("note", "far was lost"), ("log", "two")]
    jobs.ends = lambda job, tell: [tell(*event) for event in events]
    log = tmp_path / "a.log"
    engine.run(config, on_event=lambda *event: told.append(event), log=log)
    (kept, *others) = told
    assert others == [("note", "on far"), *events[1:]]
    assert log.read_text().splitlines() == [
        "INFO : Ray cluster: on far", "INFO : one", "INFO : Ray cluster: far was lost", "two",
    ]  # fmt: skip
    assert kept[0] == "log" and Path(kept[1].partition(KEPT_IN)[2]).parent == tmp_path / "runs"


@pytest.mark.parametrize(
    ("error", "printed", "reason"),
    [
        (JobFailed("min-clients is 5", "RunError"), "a line", "min-clients is 5"),
        (JobFailed("its process was killed by signal 9", PROCESS), "a line", "its process was killed by signal 9"),
        (JobFailed("far had too little memory for it", MEMORY), "", "far had too little memory for it"),
        (JobFailed("its machine was lost 3 times in a row: far"), "", "its machine was lost 3 times in a row: far"),
    ],
)
def test_a_job_that_failed_is_a_run_that_failed(engine, jobs, config, tmp_path, error, printed, reason):
    def ends(_job, tell):
        tell("log", printed)
        raise error

    jobs.ends = ends
    with pytest.raises(RunError) as failed:
        engine.run(config, log=tmp_path / "a.log")
    assert failed.value.reason == reason and failed.value.log == tmp_path / "a.log"
    assert isinstance(failed.value, ClusterFailed) == ("lost" in reason), "it says nothing of the run"


def test_a_search_can_tell_machines_that_failed_from_a_run_that_did(engine, jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ends(_job, _tell):
        raise JobFailed("its machine was lost 3 times in a row: far")

    jobs.ends = ends
    options = {"num-server-rounds": 1, "runs": str(tmp_path / "runs")}
    with pytest.raises(ClusterFailed, match=r"far\nResults so far: "):
        run_once(engine, read_run_config(options), QUIET, QUIET, False, lambda run: None)


def test_stopping_ends_the_runs(engine, jobs, config, tmp_path):
    def ends(_job, _tell):
        engine.stop()
        assert engine._cluster.stopped.is_set()
        raise RunStopped

    jobs.ends = ends
    with pytest.raises(RunStopped):
        engine.run(config, log=tmp_path / "a.log")


# --- what comes back ------------------------------------------------------------------------------------------------


def test_texts_of_the_run_name_paths_here_and_other_files_stay(engine, jobs, config, tmp_path):
    (tmp_path / 'an "odd" folder').mkdir()
    odd = str(tmp_path / 'an "odd" folder' / "runs")
    engine.run({**config, "runs": odd}, log=tmp_path / "a.log")
    (job,) = jobs.all
    run, data = job.arguments(PLACE)["run"], entry(job, "x.npz")
    there = f"{PLACE.store}/{data.digest}/x.npz"

    def back(name, text):
        return job.returned(PLACE, name, text.encode()).decode()

    written = back(f"runs/{run}/config.toml", f'dataset = "{there}"\nruns = "{PLACE.folder}/runs"\n')
    assert tomllib.loads(written) == {"dataset": config["dataset"], "runs": odd}
    line = f"INFO : kept in {PLACE.folder}/runs/{run} of {there}"
    assert back("", line) == f"INFO : kept in {odd}/{run} of {config['dataset']}"
    html = back(f"runs/{run}/report.html", f"<p>{PLACE.folder}/runs/{run}</p>")
    assert html == f"<p>{odd.replace(chr(34), '&quot;')}/{run}</p>"
    for name in (f"runs/{run}/metrics.jsonl", f"runs/{run}/checkpoint/round-000001/config.toml", "clients/secret"):
        assert back(name, line) == line


ARRAYS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(5), "é": np.zeros((0, 2))}
PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map("/{}".format)


def header(file):
    with safe_open(file, "np") as opened:
        return opened.metadata()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(there=PATHS, here=PATHS, other=st.text(max_size=5))
@example(there="/tmp/inputs/x.npz", here='/home/rené/"x"\\y.npz', other="")
def test_a_returned_models_metadata_have_paths_here(tmp_path, there, here, other):
    there = f"/store/{there}"  # no part of anything else
    folder = tmp_path / "a"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").touch()

    def model(path, of):
        config = {"dataset": path, "model": "cnn", "note": "as it is", "seed": 7}
        return RunDirectory(folder, config).write_model(ARRAYS, {"preprocessing": f'{{"is": "{len(of)}"}}'})

    file = model(there, other)
    sent, before = file.read_bytes(), header(file)
    expected = header(model(here, other))
    file.write_bytes(engine_module._with_header(sent, {there: here}))
    assert header(file) == expected and header(file) != before
    found = load(file.read_bytes())
    assert found.keys() == ARRAYS.keys()
    assert all(found[name].dtype == ARRAYS[name].dtype and np.array_equal(found[name], ARRAYS[name]) for name in found)
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0, "the arrays begin at a multiple of 8"


def test_the_runs_own_model_comes_back_so(engine, jobs, config, tmp_path):
    engine.run(config, log=tmp_path / "a.log")
    (job,) = jobs.all
    run = job.arguments(PLACE)["run"]
    far = tmp_path / "far"
    far.mkdir()
    (far / "config.toml").touch()
    sent = RunDirectory(far, dict(job.arguments(PLACE)["config"])).write_model(ARRAYS).read_bytes()
    (far / "here").write_bytes(job.returned(PLACE, f"runs/{run}/model.safetensors", sent))
    found = header(far / "here")
    assert config["dataset"] in found["config"] and PLACE.store not in str(found)
    assert job.returned(PLACE, f"runs/{run}/rounds/model.safetensors", sent) == sent
