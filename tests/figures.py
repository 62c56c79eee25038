"""The figures of a benchmark, as its `--json` has them."""

import json
import os
import subprocess
import sys

import pytest

from tests.packages import ROOT


@pytest.fixture
def figures(tmp_path):
    def run(benchmark, *arguments):
        file = tmp_path / "figures.json"
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / benchmark), "--json", str(file), *arguments],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        written = json.loads(file.read_text())
        assert {"date", "commit", "command", "processor", "torch"} <= written["measured"].keys()
        return written["figures"]

    return run
