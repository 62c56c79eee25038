import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_fedfrozen_moves_what_the_closed_form_says():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/bytes.py"), "--json", "--rounds", "5", "--warmup", "2"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["equal to the closed form"]
    uplink, both = result["cost_ratio"]
    assert result["uplink relative to FedAvg"] == pytest.approx(uplink)
    assert result["both ways relative to FedAvg"] == pytest.approx(both)
    stock = result["bytes"]["Flower FedAvg"]["up"]
    assert all(ours < flowers for ours, flowers in zip(result["bytes"]["FedAvg"]["up"], stock, strict=True))
