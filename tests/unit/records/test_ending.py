"""What people read of a run's end: in a sentence, in its report, and in what `tepal runs` and `tepal show` print."""

import json
from html import unescape

import pytest
from typer.testing import CliRunner

from tepal.records.run_directory import RunDirectory, ending
from tepal.report.run_page import write_report
from tepal.tools.cli.main import main
from tepal.tools.dashboard.views import RunView
from tepal.tools.deploy.recovery import outcome_of, read_run, unfinished
from tests.comparisons import CONFIG, leave_run

BEST = {"rounds": 22, "deliver": "best", "best_by": "accuracy", "best_round": 17, "best_score": 0.93}
EARLY = {"ended_early": "5 evaluations without improvement"}


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({"rounds": 22, "delivered_round": 22}, ""),
        (
            {**BEST, **EARLY, "delivered_round": 17},
            "Model of round 17, the best by accuracy (0.9300); the run ended at round 22 after 5 evaluations without "
            "improvement",
        ),
        (
            {**BEST, "delivered_round": 17},
            "Model of round 17, the best by accuracy (0.9300); the run ended at round 22",
        ),
        (
            {**BEST, **EARLY, "deliver": "last", "delivered_round": 22},
            "Model of round 22, the last; the best by accuracy (0.9300) is that of round 17; the run ended at round 22 "
            "after 5 evaluations without improvement",
        ),
        (
            {**BEST, "delivered_round": 12},
            "Model of round 12, the best that could be kept; the best by accuracy (0.9300) is that of round 17; the "
            "run ended at round 22",
        ),
        (
            {**BEST, "best_round": None, "best_score": None, "delivered_round": 22},
            "Model of round 22, the last; no round was scored; the run ended at round 22",
        ),
    ],
)
def test_the_sentence_has_the_models_round_and_why_the_run_ended(summary, said):
    assert ending(summary) == said


@pytest.fixture
def early(tmp_path):
    """A run that ended after two of four rounds, and delivered the model of the first."""
    run = leave_run(tmp_path / "runs", "fedavg", rounds=2, summary=False, config={**CONFIG, "num-server-rounds": 4})
    figures = {"deliver": "best", "best_by": "accuracy", "best_round": 1, "best_score": 0.5, "delivered_round": 1}
    RunDirectory(run, {}).write_summary(**figures, ended_early="1 evaluation without improvement")
    return run


SAID = "Model of round 1, the best by accuracy (0.5000); the run ended at round 2 after 1 evaluation without"


def test_a_run_that_ended_early_is_finished_wherever_runs_are_shown(early):
    [facts] = json.loads(CliRunner().invoke(main, ["runs", str(early.parent), "--json"]).stdout)
    assert (facts["state"], facts["reason"], facts["rounds"], facts["rounds_asked"]) == ("finished", "", 2, 4)
    assert facts["ending"].startswith(SAID)
    shown = CliRunner().invoke(main, ["show", str(early)])
    assert shown.exit_code == 0 and SAID in shown.stdout and "failed" not in shown.stdout
    page = unescape(write_report(early).read_text())
    assert f"{SAID} improvement; 4 rounds were planned." in page and "This run ended after round" not in page
    assert RunView(early).state == "finished"


def test_a_server_does_not_go_on_with_a_run_that_ended_early(early):
    (early / "checkpoint/round-000002").mkdir(parents=True)
    run = read_run(early)
    assert run.ended and outcome_of("completed", run, "") == "ended" and unfinished([run], {}) == []


def test_a_run_that_delivers_its_best_model_says_so_in_its_report_also_if_it_had_all_rounds(tmp_path):
    run = leave_run(tmp_path, "fedavg", summary=False)
    RunDirectory(run, {}).write_summary(**{**BEST, "rounds": 3, "best_round": 2, "delivered_round": 2})
    assert "Model of round 2, the best by accuracy (0.9300); the run ended at round 3." in unescape(
        write_report(run).read_text()
    )
