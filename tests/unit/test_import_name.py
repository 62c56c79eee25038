import importlib
import os
import re
import subprocess
import sys

import pytest

from tests.packages import PACKAGES, ROOT

# Thread 1 is held inside tepal/__init__.py, before it has added the folder above to its path.
RACE = """
import os, threading, time
isdir, inside = os.path.isdir, threading.Event()

def slow(path):
    if str(path).endswith("exchange"):
        inside.set()
        time.sleep(0.5)
    return isdir(path)

os.path.isdir = slow
first = threading.Thread(target=__import__, args=("tepal",))
first.start()
inside.wait()
import {component}
first.join()
print("imported")
"""


@pytest.mark.parametrize("component", ["client_app.app", "server_app.app"])
def test_two_threads_may_import_server_and_client_at_once(component):
    done = subprocess.run(
        [sys.executable, "-c", RACE.format(component=component)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert done.stdout.strip() == "imported", done.stderr[-500:]


@pytest.mark.parametrize("module", ["tepal.tools.cli.main", "tepal.exchange", "tepal.strategies", "tepal.models"])
def test_torch_is_not_imported_before_it_is_needed(module):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


WITH_ALL = [
    ".".join(("tepal", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if re.search(r"^__all__\b", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", WITH_ALL)
def test_every_exported_name_exists_once(name):
    module = importlib.import_module(name)
    assert [export for export in module.__all__ if not hasattr(module, export)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def test_the_packages_say_what_they_export():
    assert {"tepal.models", "tepal.exchange", "tepal.strategies", "tepal.client_app"} <= set(WITH_ALL)
