"""`tepal loopback`: a deployment that comes, runs the app and goes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tepal.host.processes import MARK, marked
from tepal.records.run_directory import read_summary
from tepal.tools.cli.main import main
from tests.integration.forks import forked
from tests.lines import read_lines
from tests.packages import ROOT

pytestmark = pytest.mark.deployment

CONFIG = "num-server-rounds=2 local-epochs=1 fedfrozen.warmup-rounds=1"


def arguments(runs: Path, *options: str) -> list[str]:
    return ["--clients", "2", "-c", f'{CONFIG} runs="{runs}"', *options]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "tepal.tools.cli.main", "loopback", str(ROOT), *options]


@pytest.fixture
def environment():
    """Of the command; in the end none of its processes may be left, nor a temporary file."""
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # a short path, for sockets
        yield forked({
            **os.environ, MARK: token, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TMPDIR": temporary,
            "TEPAL_NODE_SPARE": "0",
        })  # fmt: skip

        def left() -> list:  # the log of a run that was killed stays
            return [*marked(token), *(name for name in os.listdir(temporary) if not name.endswith(".log"))]

        end = time.monotonic() + 30
        while left() and time.monotonic() < end:
            time.sleep(0.1)
        assert left() == []


def test_it_runs_the_app_on_warm_nodes_and_leaves_nothing_but_the_run(tmp_path, environment):
    program = command(*arguments(tmp_path / "runs", "-c", "client.1.learning-rate=0.001"))
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = (tmp_path / "runs" / "latest").resolve()
    summary, rounds = read_summary(run), read_lines(run)
    assert summary["rounds"] == 2 and summary["accuracy"] > 0
    assert [line["clients_replied"] for line in rounds[1:]] == [2, 2]
    # The second client's own rate, 0.001 in place of 0.003, and the cosine's factors.
    assert [line["learning_rate"] for line in rounds[1:]] == pytest.approx([0.002, 0.001])
    assert "Results in" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_nothing_is_left(number, tmp_path, environment):
    program = command(*arguments(tmp_path / "runs", "--verbose"))
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(program, env=environment, text=True, **both) as process:
        for line in process.stdout:
            if "Submitting" in line:  # SuperLink and nodes are up
                break
        else:
            pytest.fail("it ended before it had submitted the app")
        process.send_signal(number)
        process.stdout.read()


def test_what_is_wrong_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)  # whatever is started
    for options, said in (
        (["-c", "num-server-rounds=0"], "num-server-rounds=0"),
        (["--node-config", "a=1"] * 2 + ["-c", "client.1.momentum=0.5"], "--node-config and client.1: "),
        (["--node-config", "a=1"], "there are 1 node configs for 2 clients"),
    ):
        done = CliRunner().invoke(main, ["loopback", str(ROOT), *arguments(tmp_path, *options)])
        assert done.exit_code == 1 and said in done.stderr, done.output
