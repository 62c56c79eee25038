"""Inputs of jobs: files, folders, the app and the code, each read once."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tepal
from tepal.tools.cluster import inputs as inputs_module
from tepal.tools.cluster.inputs import Inputs, calls_of
from tepal.tools.own_app import own_app
from tepal.tools.simulation.engine import RunStopped


@pytest.fixture(scope="module")
def inputs():
    with Inputs() as opened:
        yield opened


def test_a_file_has_its_own_name(inputs, tmp_path):
    path = tmp_path / "a, b.npz"
    path.write_bytes(b"12345")
    found = inputs.of(path)
    assert found.files == {"a, b.npz": path} and found.size == (1, 5) and found.entry == found.what == "a, b.npz"
    assert found.on("/store") == f"/store/{found.digest}/a, b.npz"


def test_a_folder_has_all_its_files_under_its_name(inputs, tmp_path):
    for name, content in {"x": b"1", "a/y": b"22"}.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    found = inputs.of(tmp_path / "data")
    assert {name: path.read_bytes() for name, path in found.files.items()} == {"data/x": b"1", "data/a/y": b"22"}
    assert (found.entry, found.size) == ("data", (2, 3)) and found.on("/store") == f"/store/{found.digest}/data"
    linked = inputs.of(tmp_path / "link")
    assert set(linked.files) == {"link/x", "link/a/y"} and linked.digest != found.digest


@pytest.mark.parametrize("name", ["none", "empty"])
def test_what_cannot_be_read_is_refused(inputs, tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=name):
        inputs.of(tmp_path / name)


def test_each_is_read_once(inputs, tmp_path, monkeypatch):
    (tmp_path / "x").write_text("once")
    read, real = [], inputs_module.digest_of
    monkeypatch.setattr(inputs_module, "digest_of", lambda files, _: read.append(sorted(files)) or real(files))
    assert inputs.of(tmp_path / "x") is inputs.of(tmp_path / "x") and read == [["x"]]
    assert inputs.of_app(own_app()) is inputs.of_app(own_app()) and len(read) == 2


def test_a_large_file_is_read_no_further_once_the_command_is_stopped(tmp_path):
    path, read = tmp_path / "large.npz", []
    path.write_bytes(bytes(10 * 2**20))
    with Inputs() as inputs:
        whole, inputs._look = inputs._look, lambda: (read.append(1), len(read) == 3 and inputs.stopped.set(), whole())
        with pytest.raises(RunStopped):
            inputs.of(path)
    assert len(read) == 3, "of ten parts"


def test_the_code_is_the_package_without_what_python_compiles(inputs):
    package = Path(tepal.__file__).parent
    found = inputs.code.files
    assert not [name for name in found if "__pycache__" in name or name.endswith(".pyc")]
    assert all(name.startswith("tepal/") for name in found)
    ours = {"tepal/__init__.py", "tepal/py.typed", "tepal/host/files.py", "tepal/tools/cluster/process.py"}
    assert ours <= set(found) and found["tepal/host/files.py"].read_bytes() == (package / "host/files.py").read_bytes()
    assert inputs.code.on("/store") == f"/store/{inputs.code.digest}", "the folder that Python looks in"


def test_an_app_is_sent_as_its_bundle_and_the_copy_is_removed():
    with Inputs() as opened:
        found = opened.of_app(own_app())
        copy = found.files["pyproject.toml"].parent
        assert found.entry == "" and not any("__pycache__" in name for name in found.files)
        assert {"pyproject.toml", "client_app/app.py", "server_app/app.py"} <= set(found.files) and copy.is_dir()
    assert not copy.exists()


@given(st.lists(st.integers(0, 11), max_size=8))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_are_sent_in_as_few_calls_as_hold_them_in_order(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(inputs_module, "_PART", 5)
    files, expected = {}, []
    for number, size in enumerate(sizes):
        files[f"{number}"] = tmp_path / f"{number}"
        files[f"{number}"].write_bytes(content := os.urandom(size))
        expected += [(f"{number}", at, content[at : at + 5]) for at in range(0, max(size, 1), 5)]
    calls, ended = zip(*calls_of(files), strict=True) if files else ([], [])
    assert [part for call in calls for part in call] == expected
    last = {name: number for number, call in enumerate(calls) for name, *_ in call}
    assert [[name for name in files if last[name] == number] for number in range(len(calls))] == [*ended]
    bytes_of = [sum(len(content) for *_, content in call) for call in calls]
    assert all(calls) and max(bytes_of, default=0) <= 5
    assert all(size + len(after[0][2]) > 5 for size, after in zip(bytes_of, calls[1:], strict=False))
