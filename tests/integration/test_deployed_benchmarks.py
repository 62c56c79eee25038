"""Benchmarks that start a SuperLink or a simulation: what they measure is there, on a small scale."""

import pytest

from tests.figures import figures  # noqa: F401

pytestmark = [pytest.mark.long, pytest.mark.deployment]


def test_the_servers_memory_is_measured_beside_flowers(figures):  # noqa: F811
    runs = figures("server_memory.py", "--quick")["runs"]
    assert [run["way"] for run in runs] == ["flower", "tepal", "tepal-memory", "auto"]
    assert all(run["server"] > run["before"] > 0 and run["superlink"] > 0 for run in runs)
    up = {run["way"]: run["moved"][-1][1] for run in runs if run["way"] != "flower"}
    assert up["tepal"] == up["tepal-memory"] > 5 * up["auto"] > 0


def test_a_simulation_is_timed_beside_flowers_own_and_beside_its_steps(figures):  # noqa: F811
    result = figures("simulation.py", "--quick", "--only", "in process,stock,inside,population")
    assert set(result["many"]) == {"in process", "stock"}
    for times in result["many"].values():
        assert 0 < times["round"][0] <= times["rounds"][0] < times["all"][0]
    for times in result["inside"].values():
        assert 0 < times["steps"][0] < times["round"][0] and times["loop"][0] > 0
    (shares,) = result["population"].values()
    assert len(shares["some"]) == len(shares["all"]) == 2 and min(*shares["some"], *shares["all"]) > 0
