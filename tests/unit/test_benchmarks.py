import json
import os
import runpy
import subprocess
import sys

import pytest

from tests.figures import figures  # noqa: F401
from tests.packages import ROOT

pytestmark = pytest.mark.long


def test_fedfrozen_moves_what_the_closed_form_says(figures):  # noqa: F811
    result = figures("bytes.py", "--rounds", "5", "--warmup", "2")
    assert result["equal to the closed form"]
    uplink, both = result["cost_ratio"]
    assert result["uplink relative to FedAvg"] == pytest.approx(uplink)
    assert result["both ways relative to FedAvg"] == pytest.approx(both)
    stock = result["bytes"]["Flower FedAvg"]["up"]
    assert all(ours < flowers for ours, flowers in zip(result["bytes"]["FedAvg"]["up"], stock, strict=True))


def test_a_client_that_trains_the_top_layer_keeps_less_for_backward(figures):  # noqa: F811
    steps = figures("train_step.py", "--hidden", "64", "--batch", "1", "--repeats", "1")
    names = ("top layer", "top 2 layers", "layer 6 of 12", "bottom layer", "all")
    kept = [steps[name]["saved bytes"] for name in names]
    assert kept == sorted(kept)
    assert kept[0] < 0.15 * kept[-1]


def test_the_fast_selection_of_layers_finds_the_optimum_where_it_is_proven(figures):  # noqa: F811
    rows = figures("layer_selection.py", "--quick")["rows"]
    assert all(row["worst gap"]["fast"] < 1e-3 for row in rows if row["proven"])
    assert any(row["worst gap"]["ascent"] > 1e-3 for row in rows), "plain ascent is no rival"


def test_mixing_from_a_file_takes_no_memory_for_the_models(figures):  # noqa: F811
    result = figures(
        "mixing.py", "--clients", "100", "--parameters", "500000", "--participants", "5", "--rounds", "1"
    )
    taken = {name: result[name]["peak bytes"] - result["peak bytes before"] for name in ("Tepal", "NumPy in memory")}
    assert taken["Tepal"] < result["bytes of all models"] < taken["NumPy in memory"]


def test_the_input_path_is_measured_beside_steps_and_a_loader(figures):  # noqa: F811
    rates = figures("input_path.py", "--images", "500", "--repeats", "1")["examples a second"]
    assert set(rates) == {"Tepal's batches", "DataLoader, image by image", "tiny-vit", "cnn", "resnet-20"}
    assert all(rate > 0 for rate in rates.values())


def test_encodings_save_what_they_say(figures):  # noqa: F811
    result = figures("encodings.py", "--quick", "--only", "bytes")["bytes"]
    theta = result["float32"]["up"]
    assert theta == result["float32"]["value block"]
    shares = {name: row["up"] / theta for name, row in result.items()}
    assert shares["bfloat16"] == shares["float16"] < 0.52 and shares["int8"] < 0.29 and shares["top 1 % up"] < 0.05


def test_the_runner_leaves_a_table_figures_and_a_page(tmp_path):
    options = ["--quick", "--only", "bytes", "--folder", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks/bench.py"), *options]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "bench.json").read_text())["bytes"]
    (row,) = result["rows"]
    assert row["ratio"] == pytest.approx(row["ours"]["median"] / row["theirs"]["median"]) and 0 < row["ratio"] < 1
    assert result["measured"]["cores"] == os.cpu_count() and "Bytes of FedFrozen" in done.stdout
    assert "Bytes of FedFrozen" in (folder / "index.html").read_text()


def test_replies_are_merged_beside_flowers_aggregation_and_a_copy(figures):  # noqa: F811
    result = figures("aggregation.py", "--quick")
    assert set(result["seconds of the mean"]) == {"copy", "Tepal", "Flower"}
    assert len(result["seconds of the whole way"]) == 5


def test_robust_means_are_measured_beside_the_weighted_mean(figures):  # noqa: F811
    result = figures("robust.py", "--quick")
    assert set(result["means"]) == {"none", "trimmed", "median", "krum", "rfa"}
    assert all(each["memory"] > 0 and each["times the mean"] > 0 for each in result["means"].values())


def test_a_loop_over_pairs_mixes_alike(figures):  # noqa: F811
    result = figures("mixing.py", "--quick")
    assert set(result["loop over pairs"]["seconds"]) == set(result["Tepal"]["seconds"])
    assert 0 < result["loop over pairs"]["largest difference"] < 1e-4


def test_what_grows_with_the_number_of_clients_is_measured(figures):  # noqa: F811
    result = figures("many_clients.py", "--quick")
    assert set(result["planning s"]) == set(result["kept"]) == set(result["superlink"]["SQLite"]) == {"200", "1000"}
    assert all(of["listed"] == int(clients) for clients, of in result["superlink"]["in memory"].items())
    assert result["rounds"][0]["asked a round"] == result["cohort"]
    assert 0 < result["rounds"][0]["without a result"] < 0.3


def test_clients_that_train_together_are_timed_beside_the_same_by_turns(figures):  # noqa: F811
    rows = figures("train_together.py", "--quick")
    assert len(rows) == 2 and all(row["alone"] > 0 and row["together"] > 0 for row in rows.values())


# As PFLlib's main.py is started and what it prints; it reads the clients' files as PFLlib does.
PFLLIB = """
import argparse
import numpy as np
parser = argparse.ArgumentParser()
for name in ("data", "m", "algo", "gr", "nc", "jr", "ls", "lbs", "lr", "eg", "dev", "go"):
    parser.add_argument(f"-{name}", required=True)
options = parser.parse_args()
assert (options.data, options.m, options.dev) == ("MNIST", "CNN", "cpu")
for client in range(int(options.nc)):
    for kind, count in (("train", 40), ("test", 10)):
        with open(f"../dataset/{options.data}/{kind}/{client}.npz", "rb") as file:
            data = np.load(file, allow_pickle=True)["data"].tolist()
        assert data["x"].shape == (count, 1, 28, 28) and data["y"].shape == (count,)
        assert -1 <= data["x"].min() < 0 < data["x"].max() <= 1
for turn in range(int(options.gr) + 1):
    print("-" * 25, "time cost", "-" * 25, 9.0 if turn == 0 else 2.5)
"""


def test_the_same_cohort_is_drawn_from_few_clients_and_from_many(figures):  # noqa: F811
    found = figures("population.py", "--quick")
    assert (found["of"], found["clients"]) == (40, 1500)
    for row in found["populations"].values():
        assert len(row["whole"]) == len(row["bytes"]) == 1 and len(row["rounds"]) == 2
        assert row["bytes"][0] > 10**8 and row["whole"][0] > sum(row["rounds"])


def test_pfllib_is_given_its_data_and_timed_by_its_own_words(figures, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "checkout" / "system").mkdir(parents=True)
    (tmp_path / "checkout" / "system" / "main.py").write_text(PFLLIB)
    monkeypatch.setenv("PFLLIB", str(tmp_path / "checkout"))
    seconds = figures("pfllib.py", "--quick")["seconds"]
    assert set(seconds) == {"FedAvg", "FedAMP", "Ditto"}
    assert all(row["PFLlib"] == [2.5, 2.5] and row["Tepal"][0] > 0 for row in seconds.values())
    assert sorted(path.name for path in (tmp_path / "checkout").rglob("*")) == ["main.py", "system"]


def test_a_gpus_measurements_can_be_tried_out_without_one(figures):  # noqa: F811
    result = figures("gpu.py", "--device", "cpu", "--quick")
    assert set(result["at once"]) == {"1", "2", "4"} and len(result["training"]) == 6
    together, by_core = (result["simulation"][f"Tepal, {way}"] for way in ("the cohort together", "one for each core"))
    assert together["accuracy"] == pytest.approx(by_core["accuracy"], abs=0.01), "the same rounds, stacked or not"
    assert len(together["round"]) == len(by_core["round"]) == 2


@pytest.mark.parametrize("what", ["comparison", "run"])
def test_two_nodes_of_a_cluster_are_timed_beside_one_core(figures, what):  # noqa: F811
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("it needs two cores")
    found = figures("cluster.py", what, "--quick")  # it checks that the results are the same
    assert found["ratios"] == {"one core": pytest.approx(found["one core"][0] / found["two nodes"][0])}


def test_curves_of_growth_are_drawn_from_what_was_measured(figures, tmp_path):  # noqa: F811
    found = figures("growth.py", "--quick", "--svg", str(tmp_path / "growth.svg"))
    one, two = found["parameters"].values()
    assert two["checkpoint"] == pytest.approx(2 * one["checkpoint"], rel=0.01)
    one, two = found["modes"].values()
    assert two["checkpoint"] == pytest.approx(2 * one["checkpoint"], rel=0.01)
    assert all(seconds > 0 for seconds in found["reported"].values())
    assert (tmp_path / "growth.svg").read_text().count('id="axes_') == 4


def test_subjects_are_clients_that_every_strategy_trains(tmp_path):
    subjects = runpy.run_path(str(ROOT / "benchmarks/domains.py"))["SUBJECTS"]
    rows = [
        {"text": f"{group} {word} {number}", "label": group, "split": "train"}
        for pair in subjects for group, word in zip(pair, ("one", "two"), strict=True) for number in range(15)
    ]  # fmt: skip
    (tmp_path / "news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [tmp_path / "news.jsonl", "--seeds", "1", "--rounds", "1", "--runs", tmp_path / "runs"]
    out = printed("domains.py", *options)
    table = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert table == ["strategy", "fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]


def test_the_start_is_timed_to_the_first_step_of_a_client(figures):  # noqa: F811
    seconds = figures("start.py", "--quick")
    assert set(seconds) == {"tepal simulate", "tepal.simulate in Python"}
    assert all(0.5 < taken < 120 for (taken,) in seconds.values())


def test_the_first_steps_are_taken_by_the_commands_of_the_pages(tmp_path):
    out = printed("first_steps.py", "--only", "interruptions,savings,notebook", "--json", tmp_path / "seconds.json")
    assert out.count("| SIGTERM") == 1 and len(json.loads((tmp_path / "seconds.json").read_text())["figures"]) == 3


def printed(benchmark, *options):
    command = [sys.executable, ROOT / "benchmarks" / benchmark, *options]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
