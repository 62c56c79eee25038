import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


@pytest.mark.parametrize("module", ["tepal.server_app.commands", "tepal.exchange", "tepal.strategies", "tepal.models"])
def test_torch_is_not_imported_before_it_is_needed(module):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
