"""The main job as a user starts it, from the command line; and what the command line says when it cannot run."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from safetensors.numpy import load_file
from typer.testing import CliRunner

from tepal.host.processes import MARK, marked
from tepal.host.superlink import RunError
from tepal.records.run_directory import summarise
from tepal.tools.cli.main import main
from tepal.tools.simulation.process_engine import ProcessEngine
from tests.lines import read_lines
from tests.packages import ROOT


@pytest.fixture
def tepal(monkeypatch, tmp_path):
    """Runs `tepal …` in a process of its own, in the project's folder, and sees that nothing of it is left."""
    token = f"main-job-{os.getpid()}"
    monkeypatch.setenv(MARK, token)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a failed run leaves its log there
    monkeypatch.delenv("TEPAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))

    def run(*arguments: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        command = [*within, sys.executable, "-m", "tepal.tools.cli.main", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert marked(token) == []
        assert not (tmp_path / "user-cache" / "tepal").exists(), "what simulated clients hold is not the user's"
        return done

    return run


@pytest.mark.simulation
def test_the_main_job_runs_and_says_what_it_moved(tepal, tmp_path):
    shorter = "num-server-rounds=2 fedfrozen.warmup-rounds=1 local-epochs=1 deterministic=true"
    shorter += " client.1.learning-rate=0.002 client.1-2.batch-size=16"
    command = ["simulate", ".", "-c", shorter, "-c", f'runs="{tmp_path / "runs"}"', "--clients", "3"]
    done = tepal(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    run = (tmp_path / "runs" / "latest").resolve()
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= summarise([], {}).keys()
    assert (summary["strategy"], summary["model"], summary["rounds"]) == ("fedfrozen", "tiny-vit", 2)
    assert summary["refused_replies"] == 0
    lines = read_lines(run)
    assert [(line["phase"], line["clients_replied"]) for line in lines[1:]] == [("warm-up", 3), ("frozen", 3)]
    assert lines[2]["bytes_up"] < lines[1]["bytes_up"] == lines[1]["bytes_down"]

    shown = done.stdout
    for number, line in enumerate(lines):
        assert f"round {number}/2  {line['phase'] if number else ''}" in shown
    for text in ("fedfrozen · tiny-vit", "FedAvg, same rounds", "bytes down", "bytes up", "refused replies"):
        assert text in shown
    assert f"{summary['bytes_vs_fedavg']:.4f}" in shown and f"{summary['accuracy']:.4f}" in shown
    # The paths lie whole in one line each, to be copied.
    for name in ("report.html", "summary.json", "metrics.jsonl", "model.safetensors"):
        assert (run / name).is_file()
        assert str(run / name) in shown.split()
    mean = (0.003 + 0.002 + 0.003) / 3, (0.003 + 0.002 + 0.003) / 6  # the cosine's factors are 1 and 1/2
    assert [line["learning_rate"] for line in lines[1:]] == pytest.approx(mean)
    assert "Accuracy " in (run / "flower.log").read_text(), "Flower's own log lies beside the results"

    assert re.search(r"Engine: one process, .* \(Ray is not needed\)", shown)

    again = tepal(*command, "--engine", "ray")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Engine: Flower's simulation runtime on Ray" in again.stdout
    here = (tmp_path / "runs" / "latest").resolve()
    assert (here / "labels.json").read_text() == (run / "labels.json").read_text() and here != run
    ours, theirs = (load_file(of / "model.safetensors") for of in (here, run))
    assert {name: array.tobytes() for name, array in ours.items()} == {n: a.tobytes() for n, a in theirs.items()}
    own = {"seconds", "seconds_train", "step_seconds", "bytes_overhead"}  # run ids are in messages, and of any length
    for line, other in zip(read_lines(here), lines, strict=True):
        assert {k: v for k, v in line.items() if k not in own} == {k: v for k, v in other.items() if k not in own}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.simulation
def test_strategies_are_compared_by_running_them_in_turn(tepal, tmp_path):
    config = f'num-server-rounds=2 local-epochs=1 runs="{tmp_path / "runs"}"'
    done = tepal("compare", ".", "--strategies", "fedavg,fedacs", "--clients", "3", "-c", config)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").glob("*-compare")
    fedavg, fedacs = rows_of(folder / "runs.csv")
    metrics = {row["strategy"]: read_lines(folder / row["run"]) for row in (fedavg, fedacs)}
    for row in (fedavg, fedacs):
        summary = json.loads((folder / row["run"] / "summary.json").read_text())
        assert (row["outcome"], row["rounds"], summary["strategy"]) == ("finished", "2", row["strategy"])
        assert int(row["bytes_up"]) == summary["bytes_up"] > 0
        last = metrics[row["strategy"]][-1]
        assert float(row["clients_accuracy"]) == last["clients_accuracy"] and last["clients_spread"] is not None
        assert f"{row['strategy']}: round 2/2" in done.stdout
    assert float(fedavg["server_accuracy"]) == metrics["fedavg"][-1]["accuracy"]
    assert fedacs["server_accuracy"] == "", "every client has a model of its own"
    # The same clients trained the same first model on the same data, in the same order.
    assert len({metrics[name][-2]["train_loss"] for name in metrics}) == 1
    assert "left" in done.stdout
    strategies = rows_of(folder / "comparison.csv")
    assert [(row["strategy"], float(row["bytes_total"])) for row in strategies] == [
        (row["strategy"], float(row["bytes_total"])) for row in (fedavg, fedacs)
    ]
    for name in ("comparison.html", "comparison.csv", "comparison.md", "comparison.tex", "comparison.svg"):
        assert str(folder / name) in done.stdout.split()
    assert (tmp_path / "runs" / "latest").resolve() == (folder / fedacs["run"]).resolve()

    again = tepal("compare", ".", "--resume", str(tmp_path / "runs"))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "round 1/2" not in again.stdout and rows_of(folder / "runs.csv") == [fedavg, fedacs], "nothing is run again"


@pytest.mark.simulation
def test_a_grid_is_compared_by_running_every_combination(tepal, tmp_path):
    config = f'num-server-rounds=2 local-epochs=1 runs="{tmp_path / "runs"}"'
    grid = ("--strategies", "fedavg", "--vary", "learning-rate=0.00001,0.003")
    done = tepal("compare", ".", *grid, "--seeds", "1,2", "--clients", "2", "-c", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 runs: 1 strategy × 2 values of learning-rate × 2 seeds" in done.stdout
    (folder,) = (tmp_path / "runs").glob("*-compare")
    runs, rows = rows_of(folder / "runs.csv"), rows_of(folder / "comparison.csv")
    assert [(row["learning-rate"], row["seed"]) for row in runs] == [
        (rate, seed) for seed in "12" for rate in ("1e-05", "0.003")
    ]
    for row in runs:
        assert float(row["server_accuracy"]) == read_lines(folder / row["run"])[-1]["accuracy"]
    for row in rows:
        own = [float(run["server_accuracy"]) for run in runs if run["learning-rate"] == row["learning-rate"]]
        assert float(row["server_accuracy"]) == pytest.approx(sum(own) / 2)
    assert len({row["server_accuracy"] for row in rows}) == 2, "the rates were used"
    low, high = sorted(rows, key=lambda row: float(row["server_accuracy"]))
    assert low["best"] == "" and high["best"] in ("best", "undecided")
    again = tepal("compare", ".", "--resume", str(folder))
    assert again.returncode == 0 and "4 finished before" in again.stdout and "round 1/2" not in again.stdout


# A network namespace of its own, with a loopback interface and nothing else.
OFFLINE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def may_go_offline() -> bool:
    try:
        return subprocess.run([*OFFLINE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.simulation
@pytest.mark.skipif(not may_go_offline(), reason="needs unshare, ip, and the right to make a network namespace")
@pytest.mark.parametrize("engine", ["process", pytest.param("ray", marks=pytest.mark.long)])
def test_the_main_job_needs_no_network(tepal, tmp_path, engine):
    config = f'num-server-rounds=1 local-epochs=1 runs="{tmp_path / "runs"}"'
    done = tepal("simulate", ".", "--clients", "2", "--engine", engine, "-c", config, within=OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["clients_replied"] for line in read_lines(tmp_path / "runs" / "latest")] == [0, 2]


# The main job's three questions with one round each, and two variants.
SHORT = """
clients = 3
[common]
model = "tiny-vit"
pretrained = "tiny-vit-digits"
num-server-rounds = 2
local-epochs = 1
deterministic = true
[[section]]
title = "Fewer bytes"
question = "bytes"
[[section.variant]]
name = "fedavg"
strategy = "fedavg"
[[section.variant]]
name = "selective-int8"
strategy = "selective"
wire-dtype = "int8"
[[section]]
title = "Sites that differ"
question = "own-tests"
[section.common]
partitioner = "pathological"
classes-per-client = 4
[[section.variant]]
name = "two-classes"
strategy = "fedavg"
[[section.variant]]
name = "local"
strategy = "local"
[[section]]
title = "What one does not know"
question = "doubt"
[section.common]
foreign-images = true
[[section.variant]]
name = "one-model"
strategy = "fedavg"
[[section.variant]]
name = "three-models"
strategy = "fedensemble"
pretrained = "tiny-vit-digits, tiny-vit-digits-2, tiny-vit-digits-3"
"""


def short_comparison(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "short.toml").write_text(SHORT)
    return "compare", ".", "--variants", str(tmp_path / "short.toml"), "-c", f'runs="{tmp_path / "runs"}"'


def without_times(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without what differs between two runs of the same seed: durations, folders, and bytes with random ids."""
    own = ("seconds", "overhead")
    return [
        {key: value for key, value in row.items() if key != "run" and not any(each in key for each in own)}
        for row in rows
    ]


@pytest.mark.simulation
@pytest.mark.slow
@pytest.mark.skipif(not may_go_offline(), reason="needs unshare, ip, and the right to make a network namespace")
def test_variants_are_compared_without_a_network_and_go_on_after_they_were_killed(tepal, tmp_path):
    command = short_comparison(tmp_path)
    whole = tepal(*command, within=OFFLINE)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (folder,) = (tmp_path / "runs").glob("*-compare")
    for title in ("Fewer bytes: ", "Sites that differ: ", "What one does not know: "):
        assert title in whole.stdout
    rows = rows_of(folder / "runs.csv")
    assert [row["outcome"] for row in rows] == ["finished"] * 6
    assert all(float(rows[-1][key]) >= 0 for key in ("loss", "calibration_error", "flagged_letters"))

    killed = subprocess.Popen(
        [sys.executable, "-m", "tepal.tools.cli.main", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    for line in killed.stdout:
        if "local: round 1/2" in line:  # the fourth run, after its first round
            os.killpg(killed.pid, signal.SIGKILL)
            break
    killed.wait(timeout=60)
    other = max((tmp_path / "runs").glob("*-compare"))
    assert other != folder
    resumed = tepal("compare", ".", "--resume", str(other))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "two-classes: round" not in resumed.stdout, "what was finished is not run again"
    for name in ("runs.csv", "comparison.csv"):
        ours, theirs = (without_times(rows_of(each / name)) for each in (folder, other))
        assert ours == theirs


ASKED_OF_THE_TOUR = {
    "FedAvg", "selective-1", "selective-1-int8", "FedAvg-two-classes", "FedACS", "one-model", "three-models",
}  # fmt: skip


@pytest.mark.simulation
@pytest.mark.long
def test_the_tour_shows_what_each_method_is_for(tepal, tmp_path):
    """`make run` without the variants of which nothing is asked here; and less is asked than the docs show."""
    tour = tomllib.loads((ROOT / "conf/tour.toml").read_text())
    for section in tour["section"]:
        section["variant"] = [each for each in section["variant"] if each["name"] in ASKED_OF_THE_TOUR]
    (tmp_path / "tour.toml").write_text(tomli_w.dumps(tour))
    done = tepal("compare", ".", "--variants", str(tmp_path / "tour.toml"), "-c", f'runs="{tmp_path / "runs"}"')
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").glob("*-compare")
    found = {row["variant"]: row for row in rows_of(folder / "comparison.csv")}

    def of(variant: str, figure: str) -> float:
        return float(found[variant][figure])

    assert of("selective-1-int8", "bytes_to_target") < of("FedAvg", "bytes_to_target") / 5
    assert of("selective-1", "server_accuracy") > of("FedAvg", "server_accuracy") - 0.02
    assert of("FedACS", "clients_accuracy") > of("FedAvg-two-classes", "clients_accuracy") + 0.05
    assert of("three-models", "loss") < of("one-model", "loss")


@pytest.mark.simulation
@pytest.mark.long
def test_the_main_job_reads_nine_of_ten_held_out_digits(tepal, tmp_path):
    """What `tepal simulate .` does, with nothing changed."""
    done = tepal("simulate", ".", "-c", f'runs="{tmp_path / "runs"}"')
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    assert summary["rounds"] == 20 and summary["accuracy"] >= 0.90
    assert summary["bytes_vs_fedavg"] < 0.9


@pytest.mark.simulation
def test_a_partition_that_cannot_be_drawn_fails_the_run_before_its_first_round(tmp_path):
    """Where nobody looked before it was started: only the clients know how many they are, and find out."""
    config = {"min-partition-size": 1000, "num-server-rounds": 2, "runs": str(tmp_path / "runs")}
    with (
        ProcessEngine(ROOT, 3, cache=tmp_path / "cache") as engine,
        pytest.raises(RunError, match=r"The run failed: .*min-partition-size=1000 need 3,000"),
    ):
        engine.run(config, log=tmp_path / "log")
    assert not any(line["clients_asked"] for line in read_lines(tmp_path / "runs" / "latest")), "nobody trained"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('strategy="fedfrosen"', ["strategy='fedfrosen'", "did you mean 'fedfrozen'?", "allowed are fedavg, "]),
        ('model="tiny-vti"', ["'tiny-vti'", "did you mean 'tiny-vit'?", "cnn"]),
        ('dataset="digit"', ["dataset='digit'", "did you mean 'digits'?"]),
        ("num-server-round=3", ["'num-server-round'", "did you mean 'num-server-rounds'?"]),
        ("warmup-rounds=3", ["'warmup-rounds'", "did you mean 'fedfrozen.warmup-rounds'?"]),
        ("num-server-rounds=0", ["num-server-rounds=0", "greater than or equal to 1"]),
        ("learning-rate=-0.1", ["learning-rate=-0.1", "greater than"]),
        ("fedfrozen.ridge=-1", ["fedfrozen.ridge=-1", "greater than or equal to 0"]),
        ('batch-size="many"', ["batch-size='many'", "valid integer"]),
        ('optimizer="sdg"', ["optimizer='sdg'", "did you mean 'sgd'?"]),
        ('model="cnn"', ["strategy='fedfrozen' with model='cnn'", "CNN", "model with attention"]),
        ('model="linear-attention"', ["model='linear-attention'", "partitioner='dirichlet'", "classes"]),
        ('image-shape="1x9"', ["image-shape='1x9'", 'write "CxHxW"']),
        ("strategy=fedavg", ["strategy=fedavg", "text needs quotes"]),
        ("no-such-file.toml", ["no-such-file.toml", "cannot be read"]),
        ("seed=-1 local-epochs=-1", ["seed=-1", "local-epochs=-1"]),
        ("min-clients=5", ["min-clients=5", "--clients is 3"]),
        ("client.3.batch-size=8 seed=-1", ["client.3.batch-size: there are 3 clients, numbered", "seed=-1"]),
        ('client.1.model="cnn"', ["client.1.model='cnn'", "the same for all clients"]),
        (
            'client.1.data-path="none.npz" client.2.device="cuda:99" min-clients=5',
            ["client.1.data-path='/", "none.npz': there is no such", "client.2.device='cuda:99'", "min-clients=5"],
        ),
        ("min-partition-size=900", ["3 clients with min-partition-size=900 need 2,700 examples"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_config_that_cannot_be_run_is_refused_before_anything_starts(monkeypatch, config, said):
    def never(*_, **__):
        raise AssertionError("a run was started")

    monkeypatch.setattr("tepal.tools.simulation.engine.Engine.run", never)
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, ["simulate", ".", "--clients", "3", "-c", config])
    assert result.exit_code == 1, result.output
    message = result.output.strip()
    assert message.startswith("error: ")
    for text in said:
        assert text in message
    assert "\n\n" not in message and len(message) < 1000, "one paragraph"
    assert "Traceback" not in message and "pydantic" not in message


def test_a_folder_that_is_no_app_is_refused(tmp_path):
    result = CliRunner().invoke(main, ["simulate", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.strip() == f"error: {tmp_path} is not a Flower app: it has no pyproject.toml"


def test_an_error_ends_the_process_with_a_status_and_without_a_traceback(tepal):
    done = tepal("simulate", ".", "-c", 'strategy="fedfrosen"')
    assert done.returncode == 1
    assert "did you mean 'fedfrozen'?" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
