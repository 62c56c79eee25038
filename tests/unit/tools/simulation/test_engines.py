"""Which engine a simulation gets, and what is refused before anything is started."""

from pathlib import Path

import pytest

from tepal.host.superlink import RunError
from tepal.tools.simulation import ray_engine
from tepal.tools.simulation.engine import _free
from tepal.tools.simulation.engines import engine_for
from tepal.tools.simulation.process_engine import ProcessEngine, given_threads
from tepal.tools.simulation.ray_engine import RayEngine


@pytest.fixture(autouse=True)
def four_cores_and_a_gpu(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.fixture
def app(tmp_path):
    """An app; called with the engine that its pyproject.toml asks for."""

    def write(engine: str = "") -> Path:
        own = f'[tool.tepal]\nengine = "{engine}"\n' if engine else ""
        (tmp_path / "pyproject.toml").write_text(f"[tool.flwr.app]\npublisher = 'x'\n{own}")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("asked", "of_app", "gpus", "kind", "why"),
    [
        ("auto", "", 0, ProcessEngine, "Ray is not needed"),
        ("auto", "", 0.5, RayEngine, "--gpus 0.5 gives each client a share of a GPU"),
        ("auto", "ray", 0, RayEngine, "set in the app's pyproject.toml"),
        ("auto", "process", 0, ProcessEngine, "set in the app's pyproject.toml"),
        ("auto", "auto", 0, ProcessEngine, "Ray is not needed"),
        ("process", "ray", 0, ProcessEngine, "--engine process"),
        ("ray", "", 0, RayEngine, "--engine ray"),
    ],
)
def test_one_process_unless_something_asks_for_ray(app, asked, of_app, gpus, kind, why):
    engine = engine_for(asked, app(of_app), clients=10, gpus=gpus)
    assert type(engine) is kind
    assert engine.description.startswith("Engine: ") and engine.description.endswith(f"({why})")


@pytest.mark.parametrize(
    ("cpus", "clients", "said"),
    [
        (None, 10, "4 clients at once"),
        (1, 3, "3 clients at once"),
        (2, 10, "2 clients at once"),
        (0.5, 10, "8 clients at once"),
        (4, 10, "client after client"),
    ],
)
def test_as_many_clients_are_at_work_as_there_are_cores_for(app, cpus, clients, said):
    assert said in engine_for("process", app(), clients=clients, cpus=cpus).description


def test_in_turn_unless_cores_are_named(app):
    assert "client after client" in ProcessEngine(app(), 10).description


def test_shares_of_a_gpu_need_ray(app):
    with pytest.raises(ValueError, match=r"--gpus 0.5 with --engine process: .* use --engine ray"):
        engine_for("process", app(), clients=2, gpus=0.5)
    with pytest.raises(ValueError, match="gpus_per_client is -1"):
        engine_for("ray", app(), clients=2, gpus=-1)


def test_a_share_of_a_gpu_that_is_not_there_is_refused(app, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for asked in ("auto", "ray"):
        with pytest.raises(ValueError, match=r"--gpus 1: this machine has no GPU that PyTorch can use"):
            engine_for(asked, app(), clients=2, gpus=1)


def test_a_name_that_is_no_engine_is_refused_with_where_it_stands(app):
    with pytest.raises(ValueError, match=r"--engine is 'rey', expected auto, process or ray"):
        engine_for("rey", app(), clients=2)
    with pytest.raises(ValueError, match=r"engine in \[tool.tepal\] of pyproject.toml is 'Ray', expected auto"):
        engine_for("auto", app("Ray"), clients=2)


def test_more_cores_than_there_are_is_refused(app):
    with pytest.raises(ValueError, match="cpus_per_client is 99, but this machine has 4 cores"):
        engine_for("auto", app(), clients=2, cpus=99)


def test_ray_that_is_not_installed_is_named_before_anything_starts(app, monkeypatch):
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"Ray is not installed.*pip install 'tepal\[ray\]'.*--engine process"):
        engine_for("ray", app(), clients=2).__enter__()
    engine_for("process", app(), clients=2).__enter__()


@pytest.mark.parametrize(
    ("given", "threads"), [({}, 0), ("", 0), ("4", 4), ("4,2", 4), (" 3 , 1", 3), ("many", 0)], ids=str
)
def test_threads_are_the_first_number_that_openmp_is_given(given, threads):
    assert given_threads({"OMP_NUM_THREADS": given} if isinstance(given, str) else {}) == threads


def test_a_file_of_the_app_has_its_name_unless_that_is_taken(tmp_path):
    assert _free(tmp_path / "flower.log") == tmp_path / "flower.log"
    (tmp_path / "flower.log").touch()
    assert _free(tmp_path / "flower.log") == tmp_path / "flower-2.log"
    (tmp_path / "flower-2.log").mkdir()
    assert _free(tmp_path / "flower.log") == tmp_path / "flower-3.log"
