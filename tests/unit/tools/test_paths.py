"""Relative paths on the command line, and which app a command runs."""

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tepal
from tepal.host.site import with_absolute_paths
from tepal.host.superlink import RunError
from tepal.server_app.config import defaults
from tepal.server_app.config.client_tables import fold
from tepal.tools.cli.main import main
from tepal.tools.cli.running import run_other, runner_for
from tepal.tools.cluster import engine as on_cluster
from tepal.tools.compare.variants import read_variants
from tepal.tools.own_app import app_folder, is_own_app, own_app
from tepal.tools.paths import absolute_paths, files_in, given_run_config, has_our_keys, usual_run_config, with_paths
from tepal.tools.search.plan import read_plan
from tepal.tools.simulation.engine import Engine
from tests.packages import ROOT

FOREIGN = '[tool.flwr.app]\npublisher = "me"\n[tool.flwr.app.config]\ndata = "x.npz"\n'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A user's folder with data, a model and a folder of settings; it is the current one."""
    for name in ("x.npz", "a,b.pt", "settings/y.npz", "settings/x.npz", "my-bert/config.json", "digits/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dataset", "x.npz", "{}/x.npz"),
        ("dataset", "./x.npz", "{}/x.npz"),
        ("dataset", "digits", "digits"),  # a folder of this name is not meant
        ("dataset", "mnist", "mnist"),
        ("dataset", "hub:me/mine", "hub:me/mine"),
        ("dataset", "none.npz", "none.npz"),
        ("dataset-path", "settings", "{}/settings"),
        ("dataset-path", "", ""),
        ("model", "my-bert", "{}/my-bert"),
        ("model", "tiny-vit", "tiny-vit"),
        ("tokenizer", "my-bert", "{}/my-bert"),
        ("tokenizer", "bert-base-uncased", "bert-base-uncased"),
        ("pretrained", "my-bert, x.npz,tiny-vit-digits", "{0}/my-bert,{0}/x.npz,tiny-vit-digits"),
        ("pretrained", "a,b.pt", "{}/a,b.pt"),
        ("pretrained", "", ""),
        ("strategy", "x.npz", "x.npz"),  # not a key with a path
        ("pretrained", 3, 3),  # refused later, in words
    ],
)
def test_what_exists_here_gets_an_absolute_path(here, key, value, expected):
    expected = expected.format(here) if isinstance(expected, str) else expected
    assert absolute_paths({key: value, "seed": 1}, Path()) == {key: expected, "seed": 1}


def test_the_weights_of_many_modes_are_more_than_a_path_can_be(here):
    modes = [f"mode-{k:02}.safetensors" for k in range(15)]
    (here / modes[3]).write_text("")
    expected = [str(here / name) if name == modes[3] else name for name in modes]
    found = absolute_paths({"pretrained": ",".join(modes)}, Path())
    assert found == {"pretrained": ",".join(expected)}
    assert files_in(found) == [here / modes[3]]


def test_the_users_folder_comes_before_the_one_of_the_file(here):
    (here / "settings" / "c.toml").write_text('dataset = "x.npz"\ndataset-path = "y.npz"\n')
    given = given_run_config(["settings/c.toml", "model='my-bert'"])
    expected = {"dataset": "x.npz", "dataset-path": "settings/y.npz", "model": "my-bert"}
    assert given == {key: f"{here}/{path}" for key, path in expected.items()}


def test_a_file_of_variants_and_one_of_a_search_name_files_beside_them(here):
    variant = 'name = "A"\nstrategy = "fedavg"\npretrained = "../my-bert"\n'
    common = '[common]\ndataset = "y.npz"\n[[variant]]\n'
    (here / "settings" / "v.toml").write_text(common + variant)
    compared = read_variants(here / "settings" / "v.toml")
    search = "[variant.search]\nlearning-rate = { choices = [0.1, 0.2] }\n"
    (here / "settings" / "s.toml").write_text(common + variant + search)
    searched = read_plan(here / "settings" / "s.toml")
    assert compared.common["dataset"] == searched.common["dataset"] == f"{here}/settings/y.npz"
    for config in (compared.sections[0].variants[0].run_config, searched.variants[0].config):
        assert Path(config["pretrained"]).resolve() == here / "my-bert"


def test_the_apps_own_paths_are_those_in_its_folder(here):
    app = here / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text('[tool.flwr.app.config]\ndataset = "z.npz"\n')
    (app / "z.npz").write_text("")
    assert usual_run_config(app) == {"dataset": f"{app}/z.npz"}


def test_paths_of_a_node_on_this_machine_are_absolute_also_if_they_do_not_exist_yet(here):
    config = {"data-path": "x.npz", "model-path": "out/model.safetensors", "cache-path": "/cache", "partition-id": 0}
    assert with_absolute_paths(config) == {
        "data-path": f"{here}/x.npz", "model-path": f"{here}/out/model.safetensors", "cache-path": "/cache",
        "partition-id": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected", "named"),
    [
        ({"dataset": "{}/x.npz", "seed": 1}, {"dataset": "<x.npz>", "seed": 1}, ["x.npz"]),
        ({"dataset": "{}/none.npz"}, {"dataset": "{}/none.npz"}, []),
        ({"dataset": "mnist", "model": "tiny-vit"}, {"dataset": "mnist", "model": "tiny-vit"}, []),
        ({"dataset": "x.npz"}, {"dataset": "x.npz"}, []),  # only absolute paths are files
        ({"dataset-path": "", "tokenizer": "{}/my-bert"}, {"dataset-path": "", "tokenizer": "<my-bert>"}, ["my-bert"]),
        ({"pretrained": "{}/a,b.pt"}, {"pretrained": "<a,b.pt>"}, ["a,b.pt"]),
        (
            {"pretrained": "{0}/my-bert, {0}/x.npz,tiny-vit"}, {"pretrained": "<my-bert>,<x.npz>,tiny-vit"},
            ["my-bert", "x.npz"],
        ),
        ({"client.3.data-path": "{}/x.npz"}, {"client.3.data-path": "<x.npz>"}, ["x.npz"]),
        ({"strategy": "{}/x.npz", "runs": "{}/settings"}, {"strategy": "{}/x.npz", "runs": "{}/settings"}, []),
    ],
)  # fmt: skip
def test_the_paths_of_a_config_are_replaced_where_they_are_files_here(here, config, expected, named):
    def full(values):
        return {key: value.format(here) if isinstance(value, str) else value for key, value in values.items()}

    asked = []
    assert with_paths(full(config), lambda path: asked.append(path) or f"<{path.name}>") == full(expected)
    assert asked == files_in(full(config)) == [here / name for name in named]
    if named:
        assert with_paths(absolute_paths(config, here), str) == absolute_paths(config, here)


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_wrong_file_is_named_with_the_folder_in_which_it_was_looked_for(here, command):
    done = CliRunner().invoke(main, [command, "--clients", "2", "-c", 'dataset="none.npz"'])
    assert done.exit_code == 1 and f"{here}/none.npz: no such file" in done.stderr


def test_a_folder_that_is_not_a_model_is_not_called_an_unknown_name(here):
    (here / "empty").mkdir()
    done = CliRunner().invoke(main, ["simulate", "--clients", "2", "-c", 'model="empty"'])
    assert done.exit_code == 1 and f"the folder '{here}/empty' has no config.json" in done.stderr


# Which app -----------------------------------------------------------------------------------------------------------


def test_outside_of_an_app_it_is_tepals_own(here, monkeypatch):
    assert app_folder(Path()) == ROOT == own_app() and has_our_keys(ROOT)
    (here / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert app_folder(Path()) == ROOT
    (here / "pyproject.toml").write_text(FOREIGN)
    assert app_folder(Path()) == Path() and not has_our_keys(Path())
    assert app_folder(ROOT) == ROOT and app_folder(here / "settings") == here / "settings"


def test_of_a_wheel_tepals_own_app_is_a_folder_that_names_the_installed_one(here, monkeypatch):
    monkeypatch.setattr(tepal, "__file__", str(here / "site-packages" / "tepal" / "__init__.py"))
    app = own_app()
    table = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert table["config"] == defaults() and has_our_keys(app) and is_own_app(app) and not is_own_app(ROOT)
    assert table["components"] == {key: f"tepal.{value}" for key, value in ours["components"].items()}


def test_an_app_that_is_not_tepals_is_not_compared(here):
    (here / "pyproject.toml").write_text(FOREIGN)
    done = CliRunner().invoke(main, ["compare", "--clients", "2"])
    assert done.exit_code == 1 and "is not Tepal's own app" in done.stderr and "tepal simulate" in done.stderr


class Idle(Engine):
    kind = "nothing"

    def start_ahead(self, runs=1):
        pass

    def _run(self, run):
        raise AssertionError("nothing is to be run")


@pytest.mark.parametrize("command", ["simulate", "loopback"])
def test_another_app_gets_its_values_as_they_are_given(here, monkeypatch, command):
    """Its keys may have the names of Tepal's, and be no paths, although there is such a folder."""
    (here / "pyproject.toml").write_text(FOREIGN)
    given = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("tools.cli.simulate.engine_for", "tools.deploy.loopback.LoopbackEngine"):
        monkeypatch.setattr(f"tepal.{name}", lambda *_, **__: Idle(here, 2))
    monkeypatch.setattr("tepal.tools.cli.simulate.run_other", lambda _engine, config, _console: given.append(config))
    (here / "run.toml").write_text('dataset = "x.npz"\n')
    done = CliRunner().invoke(main, [command, "--clients", "2", "-c", "model='my-bert' data='x.npz'", "-c", "run.toml"])
    assert done.exit_code == 0, done.output
    assert given == [{"model": "my-bert", "data": "x.npz", "dataset": "x.npz"}]


# On a cluster ---------------------------------------------------------------------------------------------------------


def engine_of(ray, engine="auto", app=ROOT):
    def here(name, app, **resources):
        return name, app, resources

    return runner_for(ray, engine, app, here, clients=3, cpus=2.0, asked=engine)


def test_the_clients_own_data_is_found_in_their_settings(here):
    """A checked run config has the tables of clients as one text."""
    config, problems = fold({
        "client.3.data-path": f"{here}/x.npz", "client.5-9.learning-rate": 0.5, "client.4.data-path": f"{here}/none",
        "client.3.model-path": f"{here}/x.npz",
    }, 10)  # fmt: skip
    assert not problems and files_in(config) == [here / "x.npz"]
    there = json.loads(with_paths(config, lambda path: f"<{path.name}>")["client-settings"])
    assert there == {
        "3": {"data-path": "<x.npz>", "model-path": f"{here}/x.npz"}, "4": {"data-path": f"{here}/none"},
        "5-9": {"learning-rate": 0.5},
    }  # fmt: skip
    assert with_paths(config, str) == config and with_paths({"client-settings": ""}, str) == {"client-settings": ""}


def test_without_an_address_runs_are_on_this_machine(here, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "far:1")
    assert engine_of("none", "process") == ("process", ROOT, {"clients": 3, "cpus": 2.0, "gpus": 0})
    monkeypatch.delenv("RAY_ADDRESS")
    assert engine_of(None) == ("auto", ROOT, {"clients": 3, "cpus": 2.0, "gpus": 0})


def test_without_an_address_the_engine_does_not_wait_for_torch(here):
    """It is imported while the engine starts."""
    code = (
        "import sys, tepal.tools.cli.simulate\n"
        "from tepal.tools.cli.running import runner_for\n"
        "runner_for('none', 'auto', None, lambda *_, **__: None, clients=2, cpus=1)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_with_an_address_they_are_on_the_cluster(here, monkeypatch):
    asked = []
    monkeypatch.setattr(on_cluster, "engine_on", lambda *address, **resources: asked.append((address, resources)))
    engine_of("far:1")
    monkeypatch.setenv("RAY_ADDRESS", "near:2")
    engine_of(None)
    resources = {"clients": 3, "cpus": 2.0, "gpus": 0, "memory": 0, "spread": False}
    assert asked == [((to, ROOT), resources) for to in ("far:1", "near:2")]


def test_the_memory_that_a_comparison_had_is_for_a_cluster_alone(here, monkeypatch):
    """And an option comes before it."""
    monkeypatch.setattr(on_cluster, "engine_on", lambda *_, memory, **__: memory)
    given = {"clients": 3, "cpus": 1, "kept_memory": 4.5}
    assert runner_for("far:1", "auto", ROOT, pytest.fail, **given) == 4.5
    assert runner_for("far:1", "auto", ROOT, pytest.fail, **given, memory=2) == 2
    assert runner_for("none", "auto", ROOT, lambda *_, **resources: "memory" in resources, **given) is False
    monkeypatch.setenv("RAY_ADDRESS", "near:2")
    assert runner_for(None, "ray", ROOT, lambda *_, **__: "here", **given, asked="ray") == "here"


def test_options_that_contradict_a_cluster_are_refused(here):
    with pytest.raises(ValueError, match=r"--engine ray is for this machine, and --ray far:1 for others"):
        engine_of("far:1", "ray")
    (here / "pyproject.toml").write_text(FOREIGN)
    with pytest.raises(ValueError, match=r"is not Tepal's own app.*--ray none"):
        engine_of("far:1", app=here)


def test_what_cannot_be_on_a_cluster_is_here_if_only_the_environment_names_one(here, monkeypatch):
    """RAY_ADDRESS may be there for other programs."""
    resources = {"clients": 3, "cpus": 2.0, "gpus": 0}
    monkeypatch.setenv("RAY_ADDRESS", "far:1")
    assert engine_of(None, "ray") == ("ray", ROOT, resources)
    (here / "pyproject.toml").write_text(FOREIGN)
    assert engine_of(None, app=here) == ("auto", here, resources)


def test_a_comparison_that_began_with_an_engine_of_this_machine_goes_on_on_a_cluster(here, monkeypatch):
    monkeypatch.setattr(on_cluster, "engine_on", lambda address, app, **resources: address)
    assert runner_for("far:1", "process", ROOT, pytest.fail, clients=3, cpus=2.0) == "far:1"


def test_clients_go_to_the_machines_of_a_cluster_if_there_is_one(here, monkeypatch):
    asked = []
    monkeypatch.setattr(on_cluster, "engine_on", lambda *_, spread, **__: asked.append(spread))
    runner_for("far:1", "auto", ROOT, pytest.fail, clients=3, cpus=1, spread=True)
    monkeypatch.setenv("RAY_ADDRESS", "near:2")
    runner_for(None, "auto", ROOT, pytest.fail, clients=3, cpus=1, spread=True)
    assert asked == [True, True]
    for option, text in (({"spread": True}, "--spread"), ({"memory": 2.5}, r"--memory 2\.5")):
        with pytest.raises(ValueError, match=f"{text} is for the machines of a cluster: --ray ADDRESS"):
            runner_for("none", "auto", ROOT, pytest.fail, clients=3, cpus=1, **option)
    (here / "pyproject.toml").write_text(FOREIGN)
    with pytest.raises(ValueError, match="is not Tepal's own app"):
        runner_for(None, "auto", here, pytest.fail, clients=3, cpus=1, spread=True)


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_command_says_so(here, command):
    done = CliRunner().invoke(main, [command, "--clients", "2", "--engine", "ray", "--ray", "far:1"])
    assert done.exit_code == 1 and "--engine ray is for this machine" in done.stderr
    done = CliRunner().invoke(main, [command, "--clients", "2", "--ray", "ray://far:1"])
    assert done.exit_code == 1 and "expected HOST:PORT" in done.stderr


class Ran:
    """An engine whose run logs a line and writes a file; `error`: then it fails; `starts`: whether it begins at all."""

    def __init__(self, here, error=None, starts=True):
        self.app, self.error, self.starts = here / "an app", error, starts

    def run(self, given, *, on_event, log, written):
        self.given = given
        if self.starts:
            on_event("log", "round [1] of 2")
            log.write_text("round [1] of 2\n")
            (written / "final.pt").write_text("weights")
        if self.error:
            raise self.error


def test_another_app_gets_what_was_given_and_what_it_wrote_is_kept(here):
    engine, shown = Ran(here), io.StringIO()
    kept = run_other(engine, {"lr": 0.1}, Console(file=shown))
    assert engine.given == {"lr": 0.1}
    assert kept.parent == here / "runs" and kept.name.endswith("-an-app")
    assert (kept / "final.pt").read_text() == "weights" and (kept / "flower.log").read_text() == "round [1] of 2\n"
    assert "not Tepal's own" in shown.getvalue() and "round [1] of 2" in shown.getvalue()


@pytest.mark.parametrize(("starts", "files"), [(True, ["final.pt", "flower.log"]), (False, [])])
def test_what_another_app_wrote_before_it_failed_is_kept_too(here, starts, files):
    with pytest.raises(RunError, match="no luck"):
        run_other(Ran(here, RunError("no luck"), starts), {}, Console(file=io.StringIO()))
    assert sorted(path.name for path in here.glob("runs/*/*")) == files
    assert len(list(here.glob("runs/*"))) == starts
