import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def figures(benchmark, *arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / benchmark), "--json", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_fedfrozen_moves_what_the_closed_form_says():
    result = figures("bytes.py", "--rounds", "5", "--warmup", "2")
    assert result["equal to the closed form"]
    uplink, both = result["cost_ratio"]
    assert result["uplink relative to FedAvg"] == pytest.approx(uplink)
    assert result["both ways relative to FedAvg"] == pytest.approx(both)
    stock = result["bytes"]["Flower FedAvg"]["up"]
    assert all(ours < flowers for ours, flowers in zip(result["bytes"]["FedAvg"]["up"], stock, strict=True))


def test_a_client_that_trains_the_top_layer_keeps_less_for_backward():
    steps = figures("train_step.py", "--hidden", "64", "--batch", "1", "--repeats", "1")
    names = ("top layer", "top 2 layers", "layer 6 of 12", "bottom layer", "all")
    kept = [steps[name]["saved bytes"] for name in names]
    assert kept == sorted(kept)
    assert kept[0] < 0.15 * kept[-1]


def test_the_fast_selection_of_layers_finds_the_optimum_where_it_is_proven():
    rows = figures("layer_selection.py", "--quick")["rows"]
    assert all(row["worst gap"]["fast"] < 1e-3 for row in rows if row["proven"])
    assert any(row["worst gap"]["ascent"] > 1e-3 for row in rows), "plain ascent is no rival"


def test_mixing_from_a_file_takes_no_memory_for_the_models():
    result = figures(
        "mixing.py", "--clients", "100", "--parameters", "500000", "--participants", "5", "--rounds", "1"
    )
    taken = {name: result[name]["peak bytes"] - result["peak bytes before"] for name in ("Tepal", "NumPy in memory")}
    assert taken["Tepal"] < result["bytes of all models"] < taken["NumPy in memory"]
