"""`tepal init`: what it writes, and the names that it refuses. tests/integration/test_own_app.py runs the app."""

import shlex
import tomllib

import pathspec
import pytest
from typer.testing import CliRunner

from tepal.host.superlink import app_components, app_run_config, is_app
from tepal.tools.cli.main import main
from tepal.tools.init import NAME, TEMPLATE


def init(*arguments):
    return CliRunner().invoke(main, ["init", *map(str, arguments)])


def test_the_app_has_the_name_of_its_folder_everywhere(tmp_path):
    done = init(tmp_path / "ward-7")
    assert done.exit_code == 0, done.output
    app = tmp_path / "ward-7"
    assert is_app(app) and app_components(app) == ("ward_7.server_app:app", "ward_7.client_app:app")
    assert tomllib.loads((app / "pyproject.toml").read_text())["project"]["name"] == "ward-7"
    files = sorted(path.relative_to(app).as_posix() for path in app.rglob("*.*"))
    modules = ["__init__", "client_app", "server_app", "task"]
    assert files == [".gitignore", "pyproject.toml", *(f"ward_7/{name}.py" for name in modules)]
    ignored = pathspec.GitIgnoreSpec.from_lines((app / ".gitignore").read_text().splitlines())
    made = ["runs/a/config.toml", "state/server.json", "fleet/server/nodes/a.pub", "k8s/server.yaml"]
    assert all(map(ignored.match_file, [*made, "ward_7/__pycache__/task.pyc"]))
    assert not any(map(ignored.match_file, files))
    for path in app.rglob("*.py"):
        text = path.read_text()
        compile(text, path, "exec")
        assert NAME not in text
    assert f"cd {app}" in done.stdout and "tepal simulate ." in done.stdout


def test_a_folder_with_spaces_is_one_word_of_its_command(tmp_path):
    app = tmp_path / "it's mine" / "ward-7"
    [line] = [line for line in init(app).stdout.splitlines() if line.startswith("  cd ")]
    assert shlex.split(line) == ["cd", str(app)]


def test_its_run_config_has_exactly_the_keys_that_it_reads():
    code = "".join(path.read_text() for path in TEMPLATE.glob("*.py"))
    keys = app_run_config(TEMPLATE)
    assert all(f'config["{key}"]' in code for key in keys) and code.count('config["') == len(keys)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("7wards", "cannot be the name of a Python package"),
        ("my app", "cannot be the name of a Python package"),
        ("class", "cannot be the name of a Python package"),
        ("torch", "there is a Python package 'torch' already"),
        ("tepal", "there is a Python package 'tepal' already"),
        ("json", "there is a Python package 'json' already"),
        ("runs", "is the name of a folder that commands write into an app"),
        ("state", "is the name of a folder that commands write into an app"),
        ("fleet", "is the name of a folder that commands write into an app"),
        ("full", "exists and is not an empty folder"),
        ("file", "exists and is not an empty folder"),
    ],
)
def test_a_name_that_would_not_work_is_refused_and_nothing_is_written(tmp_path, name, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    done = init(tmp_path / name)
    assert done.exit_code == 1 and said in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken_also_where_python_looks_for_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ward").mkdir()
    assert init(tmp_path / "ward").exit_code == 0
