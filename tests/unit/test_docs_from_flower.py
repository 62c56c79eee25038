"""The app of docs/from-flower.md runs before and after the page's diffs, and sends the bytes that the page says."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.common.serde import recorddict_to_proto
from typer.testing import CliRunner

from tepal.host.superlink import app_run_config
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.cli.main import main
from tests.packages import ROOT

PAGE = (ROOT / "docs/from-flower.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)
ROWS = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\.\d+) \|$", PAGE, flags=re.MULTILINE)
CLIENTS = 3
SEEDS = (1, 2, 3)


def files_before():
    return dict(re.findall(r'```(?:python|toml) title="([^"]+)"\n(.*?)```', PAGE, flags=re.DOTALL))


def patched(files, diff):
    """The files after a unified diff, every line of which must be where the diff says."""
    files = dict(files)
    for name, body in re.findall(
        r"^--- a/(\S+)\n\+\+\+ b/\1\n(.*?)(?=^--- a/|\Z)", diff, flags=re.DOTALL | re.MULTILINE
    ):
        old, new, done = files[name].splitlines(), [], 0
        for start, old_count, new_count, hunk in re.findall(
            r"^@@ -(\d+),(\d+) \+\d+,(\d+) @@\n((?:[ +-].*\n)+)", body, flags=re.MULTILINE
        ):
            lines = [(line[0], line[1:]) for line in hunk.splitlines()]
            first, before = int(start) - 1, [text for kind, text in lines if kind != "+"]
            after = [text for kind, text in lines if kind != "-"]
            assert old[first : first + len(before)] == before, (name, start)
            assert (len(before), len(after)) == (int(old_count), int(new_count)), (name, start)
            new += [*old[done:first], *after]
            done = first + len(before)
        files[name] = "\n".join([*new, *old[done:]]) + "\n"
    return files


STAGES = {"before": 0, "FedFrozen": 1, "int8": 2}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes the app after the first so many diffs into the current folder, from which it can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(diffs):
        files = files_before()
        for diff in DIFFS[:diffs]:
            files = patched(files, diff)
        for name, text in files.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "digitsapp"]:
        del sys.modules[name]


class CountingGrid(InProcessGrid):
    """Counts the serialised contents of all messages, before the server's leave it and as the replies arrive."""

    def __init__(self, nodes, run_config):
        super().__init__(nodes, run_config, self._count_reply)
        self.down = self.up = 0

    def push_messages(self, messages):
        messages = list(messages)
        self.down += sum(recorddict_to_proto(message.content).ByteSize() for message in messages)
        return super().push_messages(messages)

    def _count_reply(self, node, message, reply):
        assert reply.has_content(), reply.error
        self.up += recorddict_to_proto(reply.content).ByteSize()
        return reply


def run(capsys, seed=1, **changes):
    """MB down, MB up, and the accuracy that the app prints."""
    from digitsapp.client_app import app as client_app
    from digitsapp.server_app import app as server_app

    torch.manual_seed(seed)
    config = {**app_run_config(Path()), **changes}
    nodes = [Node(client_app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
    grid = CountingGrid(nodes, config)
    capsys.readouterr()
    server_app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    accuracy = float(re.search(r"^accuracy (\S+)$", capsys.readouterr().out, flags=re.MULTILINE)[1])
    return grid.down / 1e6, grid.up / 1e6, accuracy


@pytest.mark.parametrize("stage", STAGES)
def test_the_app_runs_and_sends_the_bytes_of_the_page(written, capsys, stage):
    written(STAGES[stage])
    down, up, accuracy = run(capsys, **{"local-epochs": 1})  # bytes do not depend on it
    row = [float(text) for text in ROWS[STAGES[stage]]]
    assert (down, up) == (pytest.approx(row[0], rel=0.005), pytest.approx(row[1], rel=0.005))
    total = float(ROWS[0][2])
    assert row[2] == pytest.approx(row[0] + row[1], abs=0.011) and row[3] == pytest.approx(row[2] / total, abs=0.006)
    assert accuracy > 0.5, "ten classes, and it has learned"
    assert Path("final.pt").exists()


def test_each_change_sends_less():
    totals = [float(row[2]) for row in ROWS]
    assert len(ROWS) == len(STAGES) == len(DIFFS) + 1 and totals == sorted(totals, reverse=True)
    signs = [line[:1] for line in DIFFS[0].splitlines() if not line.startswith(("---", "+++", "@@"))]
    assert (signs.count("+"), signs.count("-")) == (4 + 2, 2 + 1), "four added, two changed, one removed"


def test_the_app_before_knows_nothing_of_tepal():
    assert not any("tepal" in text for text in files_before().values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["before", pytest.param("int8", marks=pytest.mark.long)])
def test_the_command_of_the_page_runs_it(written, stage):
    written(STAGES[stage])
    (command,) = re.findall(r"^tepal (simulate .*)$", PAGE, flags=re.MULTILINE)
    done = CliRunner().invoke(main, [*shlex.split(command), "-c", "num-server-rounds=1 local-epochs=1"])
    assert done.exit_code == 0 and re.search(r"^accuracy ", done.output, flags=re.MULTILINE), done.output
    assert [*Path("runs").glob("*/final.pt")]


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_the_accuracy_is_that_of_the_page(written, capsys, stage):
    written(STAGES[stage])
    accuracies = [run(capsys, seed)[2] for seed in SEEDS]
    assert sum(accuracies) / len(SEEDS) == pytest.approx(float(ROWS[STAGES[stage]][4]), abs=0.03)
