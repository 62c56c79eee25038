"""The objectives of local training that a plan can name."""

import pytest

from tepal.client_app.objectives import OBJECTIVES, find
from tepal.exchange import plan
from tests.packages import ROOT


def test_each_file_is_an_objective_by_its_name():
    files = {path.stem for path in (ROOT / "client_app/objectives").glob("[!_]*.py")} - {"work"}
    assert files == OBJECTIVES.keys() - {""}
    for name in files:
        assert type(OBJECTIVES[name]).__module__ == f"tepal.client_app.objectives.{name}"
    assert {plan.SCAFFOLD, plan.LOCAL, plan.DITTO, plan.PERFEDAVG, plan.PFEDME, plan.APFL} <= files


def test_one_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"the objective 'ditot'; this client's app has apfl, ditto, .*scaffold"):
        find("ditot")
