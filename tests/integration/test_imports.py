"""The import names work from a checkout, an editable install, a wheel and an app bundle, and nothing else is in those.

The repository has `models/`, `exchange/`, ... as top-level folders; what is imported is `tepal.models`, ..., which in a
checkout are links to them.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tepal.host.superlink import stage_app
from tepal.models.weights import CARD, WEIGHTS, shipped
from tests.packages import BUNDLED, PACKAGES, ROOT

MODULES = ("tepal", "tepal.exchange.layout", "tepal.models", "tepal.strategies")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what is under version control or about to be, in a folder whose name Flower takes for an app."""
    folder = tmp_path_factory.mktemp("checkout") / "tepal-checkout"
    folder.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "tepal", "tests", "benchmarks", "conf", "docs", "docker"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "LICENSE", "README.md", ".gitignore"):
        if (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, folder / name)
    # Whatever lies beside the packages must stay out of the wheel and the bundle.
    for name in ("tests/data.py", "benchmarks/table.py", "conf/a.toml", "models/notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    return folder


def places(path: Path, cwd: Path) -> dict[str, Path]:
    """Where a fresh Python, with `path` in front of the installed packages, finds each module."""
    code = (
        "import importlib, json, sys\n"
        "print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))"
    )
    cwd.mkdir(parents=True, exist_ok=True)
    # An editable install of Tepal among the installed packages must not answer: -S leaves out site-packages' .pth
    # files, so the packages that Tepal itself needs are named as plain folders.
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(path), *libraries])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *MODULES], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: Path(file) for name, file in json.loads(done.stdout).items()}


def assert_top_level_folders(found: dict[str, Path], root: Path) -> None:
    """The modules come from the top-level folders of `root`, the layout of the repository."""
    assert {name: path.resolve() for name, path in found.items()} == {
        "tepal": root / "tepal" / "__init__.py",
        "tepal.exchange.layout": root / "exchange" / "layout.py",
        "tepal.models": root / "models" / "__init__.py",
        "tepal.strategies": root / "strategies" / "__init__.py",
    }


def test_imports_from_a_checkout(checkout, tmp_path):
    assert_top_level_folders(places(checkout, tmp_path / "elsewhere"), checkout)


@pytest.mark.long
def test_imports_from_an_editable_install(checkout, tmp_path):
    site = tmp_path / "site"
    pip("install", "--editable", str(checkout), "--target", str(site), cwd=tmp_path)
    # A --target folder is no site folder: what its .pth file says is put on the path as `site` would.
    [link] = site.glob("*.pth")
    assert_top_level_folders(places(Path(link.read_text().strip()), tmp_path / "elsewhere"), checkout)
    assert sorted(entry.name for entry in site.iterdir() if not entry.name.endswith(".dist-info")) == sorted(
        [link.name, "bin"]
    )


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(checkout)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = folder.glob("*.whl")
    return file


@pytest.mark.long
def test_imports_from_a_wheel(wheel, tmp_path):
    site = tmp_path / "site"
    pip("install", str(wheel), "--target", str(site), cwd=tmp_path)
    found = places(site, tmp_path / "elsewhere")
    assert found == {
        "tepal": site / "tepal" / "__init__.py",
        "tepal.exchange.layout": site / "tepal" / "exchange" / "layout.py",
        "tepal.models": site / "tepal" / "models" / "__init__.py",
        "tepal.strategies": site / "tepal" / "strategies" / "__init__.py",
    }


@pytest.mark.long
def test_a_wheel_has_the_weights_that_come_with_tepal(wheel):
    inside = zipfile.ZipFile(wheel).namelist()
    for name in shipped():
        assert {f"tepal/models/weights/{name}/{file}" for file in (CARD, WEIGHTS)} <= set(inside)


@pytest.mark.long
def test_a_wheel_brings_only_tepal_into_site_packages(wheel, checkout):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"tepal"}
    assert {name.split("/")[1] for name in names} == {"__init__.py", "py.typed", *PACKAGES}
    assert not [name for name in names if "test_" in name or "benchmarks" in name or "__pycache__" in name]
    assert {f"tepal/{module}" for module in modules(checkout)} <= set(names)


@pytest.mark.long
def test_the_wheel_has_the_version_that_the_package_tells(wheel):
    import tepal

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name.startswith(f"tepal-{version}-")
    assert tepal.__version__ == version


@pytest.fixture(scope="module")
def bundle(checkout, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    environment = os.environ | {
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    flwr = Path(sys.executable).parent / "flwr"
    done = subprocess.run(
        [flwr, "build", "--app", checkout], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = folder.glob("tepal.tepal.*.fab")
    return file


def test_imports_from_an_app_bundle(bundle, tmp_path):
    zipfile.ZipFile(bundle).extractall(tmp_path / "app")
    assert_top_level_folders(places(tmp_path / "app", tmp_path / "elsewhere"), tmp_path / "app")


def test_an_app_bundle_has_the_packages_and_nothing_beside_them(bundle, checkout, tmp_path):
    names = {name for name in zipfile.ZipFile(bundle).namelist() if not name.startswith(".info/")}
    assert {name.split("/")[0] for name in names} == {"pyproject.toml", "LICENSE", "tepal", *BUNDLED}
    staged = {path.as_posix() for path in stage_app(checkout, tmp_path)} - {".gitignore"}
    assert names - {"LICENSE"} == staged - {"LICENSE"}, "Flower leaves out what is named like a test: rename it"


def modules(checkout: Path) -> set[str]:
    return {path.relative_to(checkout).as_posix() for each in PACKAGES for path in (checkout / each).rglob("*.py")}


def pip(*arguments: str, cwd: Path) -> None:
    """Run pip without network: everything that is needed for building is installed."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", arguments[0], *options, *arguments[1:]]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
