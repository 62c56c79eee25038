"""The pages that answer a reader's questions: how they are arranged, the first run's commands, and what Tepal lacks."""

import re
import shlex

import flwr.client.mod
import flwr.server.workflow
import flwr.serverapp.strategy
import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from PIL import Image
from typer.testing import CliRunner

from tepal.exchange import partial_exchange
from tepal.models import build
from tepal.records.run_directory import read_summary
from tepal.strategies import FedAvg, FedFrozen, RoundFailed
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.cli.main import main
from tests.apps import quickstart_app
from tests.packages import ROOT
from tests.unit.test_docs import commands

DOCS = ROOT / "docs"


# --- the arrangement ------------------------------------------------------------------------------------------------


def sections():
    """Title → pages, of the navigation in mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    found, title = {}, ""
    for indent, name, page in re.findall(r"^( +)- (.+?):(?: (\S+\.md))?$", text, flags=re.MULTILINE):
        title = name if len(indent) == 2 else title
        found.setdefault(title, []).extend([page] if page else [])
    return found


def test_the_navigation_and_the_first_page_ask_the_same_questions():
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", (DOCS / "index.md").read_text(), flags=re.MULTILINE))
    found = sections()
    assert list(rows) == list(found)[1:], "in this order, after the first page itself"
    for title, answers in rows.items():
        assert set(found[title]) <= set(re.findall(r"\]\(([^)#]+)", answers)), title


def test_every_page_is_in_the_navigation_once():
    pages = [page for each in sections().values() for page in each]
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


# --- commands in a folder of one's own ------------------------------------------------------------------------------

SHORT = "num-server-rounds=1 local-steps=1 min-clients=2"


def call(command):
    words = shlex.split(command)[1:]
    words += ["-c", SHORT, "--clients", "2"] if words[0] in ("simulate", "compare") else []
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, (command, done.output)
    return done.output


@pytest.mark.slow
def test_the_commands_of_a_first_run_work_in_an_empty_folder(tmp_path, monkeypatch):
    """Each `tepal` command of the page outside of a checkout, in the page's order, with short runs."""
    monkeypatch.chdir(tmp_path)
    given = [each for each in commands((DOCS / "first-run.md").read_text()) if each.startswith("tepal ")]
    given = [each for each in given if "conf/" not in each and "--seeds" not in each]  # a clone's; the same, for longer
    names = ["simulate", "show", "runs", "report", "compare", "strategies", "predict"]
    assert [each.split()[1] for each in given] == names
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "images" / "a.png")
    for command in given[:4]:
        output = call(command)
    (run,) = (tmp_path / "runs").glob("*-fedfrozen")
    assert read_summary(run)["rounds"] == 1 and str(run / "report.html") in output.split()
    for command in given[4:]:
        call(command)
    assert len([*(tmp_path / "runs").glob("*-compare/*-fed*")]) == 2
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 2
    assert "quickstart/pyproject.toml" in call("tepal init quickstart")
    assert {each.name for each in tmp_path.iterdir()} <= {"images", "runs", "predictions.csv", "quickstart", "cache"}


# --- what Tepal does not do -----------------------------------------------------------------------------------------


def model():
    return build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)


def grid(*mods):
    app = quickstart_app(model, [partial_exchange, *mods], calls_apply_plan=True)
    return InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])


def test_flowers_differential_privacy_refuses_tepals_strategies():
    around = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 2)
    with pytest.raises(NotImplementedError, match="configure_train"):
        around.start(grid(), ArrayRecord(model().state_dict()), num_rounds=1)
    strategy = FedFrozen(warmup_rounds=0, model=model())
    with pytest.raises(RoundFailed):
        noise = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=10.0, delta=1e-3)
        strategy.start(grid(noise), ArrayRecord(model().state_dict()), num_rounds=1)


def test_flower_has_what_the_page_names():
    page = (DOCS / "what-not.md").read_text()
    for module, names in (
        (flwr.server.workflow, ["SecAggPlusWorkflow"]),
        (flwr.client.mod, ["secaggplus_mod", "LocalDpMod"]),
        (flwr.serverapp.strategy, ["DifferentialPrivacyServerSideFixedClipping", "FedXgbBagging", "FedXgbCyclic"]),
    ):
        for name in names:
            assert f"`{name}`" in page and hasattr(module, name)
