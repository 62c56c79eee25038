"""What README and docs say is run, or stands against the code it speaks of."""

import inspect
import re
import shlex
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from PIL import Image
from typer.testing import CliRunner

from tepal.exchange import partial_exchange
from tepal.models import build
from tepal.server_app import catalogue
from tepal.server_app.commands import main
from tepal.server_app.config import SECTIONS, StrategyName, read_run_config, reference
from tepal.server_app.run_directory import RunDirectory
from tepal.strategies.in_process import InProcessGrid, Node
from tests.apps import quickstart_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands():
    return [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines() if line.strip()]


# README's commands, and the test that runs each.
RUN_BY = {
    "make run": "tests/integration/test_main_job.py",
    "make test": "is what runs these tests",
    "tepal simulate": "tests/integration/test_main_job.py",
    "tepal compare": "tests/integration/test_main_job.py",
    "tepal predict": "test_the_predict_command_reads_a_run_and_writes_what_it_predicts",
    "tepal strategies": "test_every_strategy_is_listed_with_its_options",
    "tepal report": "test_the_report_command_says_where_the_report_is",
    "python benchmarks/bytes.py": "tests/unit/test_benchmarks.py",
    "tepal simulate . -c 'resume=": "tests/integration/test_resume.py",
    "flwr run . CONNECTION --stream --run-config 'resume=": "tests/integration/test_resume.py",
    "tepal loopback": "tests/integration/test_loopback_command.py",
    "docker compose -f docker/compose.yml": "tests/containers/test_one_host.py",
    "tepal provision": "tests/integration/test_provision.py",
    "tepal server": "tests/integration/test_server.py",
    "tepal node": "tests/integration/test_node.py",
    "flower-superlink": "tests/integration/test_loopback.py",
    "flower-supernode": "tests/integration/test_loopback.py",
    "flwr run . CONNECTION --stream --run-config conf/": "tests/integration/test_methods.py",
    "flwr run": "tests/integration/test_loopback.py",
}


def test_every_command_of_the_readme_is_run_by_a_test():
    for command in commands():
        assert any(command.startswith(known) for known in RUN_BY), command
    for path in {by for by in RUN_BY.values() if by.endswith(".py")}:
        assert (ROOT / path).exists(), path


def test_the_readmes_run_config_can_be_run():
    from tepal.server_app.flower import parse_run_config

    simulate, resume = [command for command in commands() if command.startswith("tepal simulate")]
    assert "resume=" in resume, "tests/integration/test_resume.py runs it"
    words = shlex.split(simulate)
    config = read_run_config(parse_run_config([words[words.index("-c") + 1]]))
    assert (config.rounds.num_server_rounds, config.fedfrozen.warmup_rounds) == (2, 1)


def test_the_readmes_python_runs():
    """The server's snippet with the client's snippet on its nodes, and the snippet on blocks."""
    server, client, blocks_ = blocks("python")

    def make():
        return build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)

    names = {"ArrayRecord": ArrayRecord, "MetricRecord": MetricRecord, "RecordDict": RecordDict, "Message": Message,
             "ClientApp": ClientApp, "model": make(), "fit": lambda model: None}  # fmt: skip
    exec(client, names)
    grid = InProcessGrid([Node(names["app"], {"partition-id": k}) for k in range(2)])
    server_names = {"ArrayRecord": ArrayRecord, "model": make(), "grid": grid}
    exec(server.replace("warmup_rounds=2", "warmup_rounds=2, fraction_evaluate=0"), server_names)
    assert set(server_names["result"].arrays) == set(make().state_dict())
    block_names = {"model": make()}
    exec(blocks_, block_names)
    assert len(block_names["blocks"].query_key) == 8


def test_the_readmes_files_are_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for folder in re.findall(r"^\| (`[^|]*`) \|", README, flags=re.MULTILINE):
        for name in re.findall(r"`([^`]+)/`", folder):
            assert (ROOT / name).is_dir(), name


def test_the_page_of_run_config_keys_is_that_of_the_code():
    assert (ROOT / "docs/run-config.md").read_text() == reference(), (
        "write it anew: python -m tepal.server_app.config > docs/run-config.md"
    )


def test_the_page_of_strategies_is_that_of_the_code():
    assert (ROOT / "docs/strategies.md").read_text() == catalogue.reference(), (
        "write it anew: python -m tepal.server_app.catalogue > docs/strategies.md"
    )


def test_every_strategy_is_listed_with_its_options():
    assert tuple(catalogue.CATALOGUE) == get_args(StrategyName)
    listed = CliRunner().invoke(main, ["strategies"])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in catalogue.CATALOGUE)
    shown = CliRunner().invoke(main, ["strategies", "fedadam", "scaffold"])
    assert shown.exit_code == 0 and "arXiv:2003.00295" in shown.stdout and "fedadam.tau" in shown.stdout
    assert "P + C down" in shown.stdout
    wrong = CliRunner().invoke(main, ["strategies", "fedadm"])
    assert wrong.exit_code == 1 and "did you mean 'fedadam'?" in wrong.stderr
    of_this_app = {"selective": {"draw_budgets"}, "fedbe": {"epochs", "learning_rate", "batch_size"}}
    for name, one in catalogue.CATALOGUE.items():
        arguments = set(inspect.signature(one.strategy.__init__).parameters)
        keys = set(SECTIONS[name][1].model_fields) if name in SECTIONS else set()
        assert keys - of_this_app.get(name, set()) <= arguments, name
        assert all(option.key.startswith(f"{name}.") for option in catalogue.options_of(name))


def test_the_report_command_says_where_the_report_is(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "fedavg", {"strategy": "fedavg"})
    run.append({"round": 1, "phase": "train", "accuracy": 0.5})
    done = CliRunner().invoke(main, ["report", str(tmp_path / "runs")])
    assert done.exit_code == 0 and Path(done.output.strip()).name == "report.html"
    failed = CliRunner().invoke(main, ["report", str(tmp_path / "nothing")])
    assert failed.exit_code == 1 and "nothing" in failed.output


def test_the_predict_command_reads_a_run_and_writes_what_it_predicts(tmp_path):
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    config = {"strategy": "fedavg", "model": "tiny-vit", "image-shape": "1x8x8", "classes": 10}
    run = RunDirectory.create(tmp_path / "runs", "fedavg", config)
    run.write_model({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "images" / "a.png")
    arguments = ["predict", str(tmp_path / "runs"), str(tmp_path / "images"), "--output", str(tmp_path / "all.csv")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "all.csv").read_text().count("\n") == 2 and "all.csv" in done.output
    failed = CliRunner().invoke(main, ["predict", str(tmp_path / "runs"), str(tmp_path / "nothing")])
    assert failed.exit_code == 1
    away = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "nowhere" / "all.csv")])
    assert away.exit_code == 1


@pytest.mark.parametrize("calls_apply_plan", [True, False])
def test_the_line_that_the_readme_adds_is_the_one_that_is_needed(calls_apply_plan):
    from tepal.strategies import FedFrozen, RoundFailed

    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    app = quickstart_app(lambda: model, [partial_exchange], calls_apply_plan=calls_apply_plan)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    strategy = FedFrozen(warmup_rounds=1, model=model)
    if calls_apply_plan:
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
    else:
        with pytest.raises(RoundFailed, match="apply_plan"):
            strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
