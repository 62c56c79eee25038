"""The command line as a whole: what it lists, and that a command imports what it needs and no more."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
import yaml
from typer.testing import CliRunner

from tepal.client_app.node import node as parent
from tepal.tools.cli import main as module
from tepal.tools.cli.main import COMMANDS, main
from tepal.tools.deploy.supervisor import Supervisor
from tests.packages import ROOT

# A process of its own; what it prints last are the modules that it has imported.
MODULES = """
import json, sys
sys.argv = ["tepal", *sys.argv[1:]]
from tepal.tools.cli.main import main
try:
    main()
except SystemExit:
    pass
print()
print(json.dumps(sorted(sys.modules)))
"""
HELP = [[name, "--help"] for name in COMMANDS if name not in ("simulate", "loopback", "compare")]


def imported(*arguments, folder):
    done = subprocess.run(
        [sys.executable, "-P", "-c", MODULES, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments", [["--help"], *HELP, ["node", "status"], ["server", "status"]], ids=lambda words: " ".join(words)
)
def test_help_and_status_import_neither_torch_nor_flower(arguments, tmp_path):
    assert not imported(*arguments, folder=tmp_path) & {"torch", "flwr", "ray"}


@pytest.mark.parametrize(
    ("arguments", "most"),
    [("--help", 152), ("report --help", 152), ("server status", 225), ("node status", 274)],  # gRPC alone: 166
)
def test_help_and_status_import_few_modules(tmp_path, arguments, most):
    found = imported(*arguments.split(), folder=tmp_path)
    assert len(found) <= most and "rich" not in found, sorted(found)


def test_help_imports_no_command(tmp_path):
    found = imported("--help", folder=tmp_path)
    assert {name for name in found if name.startswith("tepal.tools.cli.")} == {"tepal.tools.cli.main"}


def test_the_status_of_a_node_imports_of_tepal_what_asks_for_it(tmp_path):
    found = {name for name in imported("node", "status", folder=tmp_path) if name.startswith("tepal.client_app")}
    assert found <= {
        "tepal.client_app", "tepal.client_app.node", "tepal.client_app.node.service", "tepal.client_app.node.node_pb2",
    }  # fmt: skip


def test_every_module_of_the_folder_is_a_command_and_every_command_is_in_its_module():
    files = {path.stem for path in Path(module.__file__).parent.glob("*.py")} - {"__init__", "main", "running"}
    assert {name for name, _ in COMMANDS.values()} == files
    group = typer.main.get_command(main)
    assert list(group.commands) == list(COMMANDS)
    for name in COMMANDS:
        assert isinstance(group.commands[name], click.Command) and group.commands[name].name == name


def test_help_lists_all_commands_with_their_lines():
    said = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for name, (_, line) in COMMANDS.items():
        assert f"{name} {line}" in said


def test_a_command_that_is_not_known_is_refused_with_the_nearest():
    refused = CliRunner().invoke(main, ["simulat"])
    assert refused.exit_code == 2 and refused.output.count("Did you mean 'simulate'?") == 1


@pytest.mark.parametrize(("command", "service"), [("server", "server"), ("node", "client")])
def test_compose_passes_on_the_variables_of_logs_and_metrics_which_change_nothing_while_they_are_empty(
    command, service, monkeypatch
):
    options = typer.main.get_command(main).commands[command].params
    names = {option.envvar for option in options if re.search("METRICS|LOG_FORMAT", option.envvar or "")}
    names |= {name.removesuffix("_FILE") for name in names}  # the token itself
    assert len(names) == 7
    composed = yaml.safe_load((ROOT / "docker/common.yml").read_text())["services"][service]["environment"]
    assert {name: composed.get(name) for name in names} == {name: f"${{{name}:-}}" for name in names}

    settings = []
    monkeypatch.setattr(parent, "run_node", settings.append)
    monkeypatch.setattr(Supervisor, "run", lambda self: settings.append(self.settings))
    monkeypatch.setattr("tepal.tools.cli.server._stop_on_signals", lambda: None)
    monkeypatch.setattr("tepal.tools.cli.server._log_to_stdout", lambda: None)
    for value in ("", None):
        done = CliRunner().invoke(main, [command, "--insecure"], env=dict.fromkeys(names, value))
        assert done.exit_code == 0, done.output
    assert settings[0] == settings[1] and settings[0].metrics.address == ""
