"""What is checked before a run, what of it stays in memory, and how a run is resumed."""

import contextlib
import shlex
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tepal.tools.cli.main import main
from tepal.tools.simulation.running import forget_data, resume_hint
from tepal.training.data import partitions, sources
from tests.packages import ROOT


@pytest.mark.parametrize("command", ["simulate", "loopback"])
def test_data_that_the_checks_read_is_not_kept_while_a_run_in_another_process_has_it(command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = SimpleNamespace(start_ahead=lambda: None, clients=2, here=True, description="Engine: none")
    for name in ("tools.cli.simulate.engine_for", "tools.deploy.loopback.LoopbackEngine"):
        monkeypatch.setattr(f"tepal.{name}", lambda *_, **__: contextlib.nullcontext(engine))
    kept = []

    def note(*_):
        kept.append([cached.cache_info().currsize > 0 for cached in (sources.load_digits, partitions.divide)])

    monkeypatch.setattr("tepal.tools.cli.simulate.forget_data", lambda: (note(), forget_data()))
    monkeypatch.setattr("tepal.tools.cli.simulate.run_and_show", note)
    done = CliRunner().invoke(main, [command, ".", "--clients", "2", "-c", f'runs="{tmp_path}"'])
    assert done.exit_code == 0, done.output
    assert kept == [[True, True], [False, False]]


def test_a_run_is_resumed_by_what_a_shell_reads_as_one_word(tmp_path):
    run = tmp_path / "it's mine" / "20260101-fedavg"
    assert resume_hint(run) == ""
    (run / "checkpoint" / "round-000001").mkdir(parents=True)
    words = shlex.split(resume_hint(run, "--ray far:1").removeprefix("Resume it with "))
    assert words == ["-c", f'resume="{run}"', "--ray", "far:1"]
