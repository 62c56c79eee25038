"""`tepal compare` on a cluster: what is kept for --resume, and what it says about going on. Without Ray."""

import contextlib
import json
import re

import pytest

from tepal.host.superlink import RunError
from tepal.tools.cluster import engine as on_cluster

CLUSTER = ("--ray", "far:1")


@pytest.fixture
def asked(compare, monkeypatch):
    """What engines on a cluster were asked for; they are those of this machine."""
    compare("--strategies", "fedavg")  # this gives `compare.engine` its method
    found = []

    def engine_on(address, _app, **resources):
        found.append((address, resources["memory"]))
        compare.engine.options = f"--ray {address}"
        return contextlib.nullcontext(compare.engine)

    monkeypatch.setattr(on_cluster, "engine_on", engine_on)
    return found


def begun(compare, *options):
    """The folder of a comparison whose second run has failed, and what was said."""
    before = set(compare.runs.glob("*-compare*"))
    compare.failing["fedacs"] = RunError("its machine had too little memory")
    done = compare("--strategies", "fedavg,fedacs", *CLUSTER, *options)
    compare.failing.clear()
    (folder,) = set(compare.runs.glob("*-compare*")) - before
    assert done.exit_code == 1, done.output
    return folder, done.output


def test_the_memory_of_each_run_is_kept_as_its_cores_are(compare, asked):
    folder, _ = begun(compare, "--memory", "4.5")
    assert compare("--resume", str(folder), *CLUSTER, config=None).exit_code == 0
    assert asked == [("far:1", 4.5)] * 2


def test_places_are_made_ready_for_the_runs_that_are_not_finished(compare, asked):
    places = []
    compare.engine.start_ahead = places.append
    folder, _ = begun(compare)
    assert compare("--resume", str(folder), *CLUSTER, config=None).exit_code == 0
    assert places == [2, 1]


@pytest.mark.parametrize(("option", "then"), [("9", 9.0), ("0", 0.0)])
def test_another_memory_may_be_given(compare, asked, option, then):
    folder, _ = begun(compare, "--memory", "4.5")
    assert compare("--resume", str(folder), *CLUSTER, "--memory", option, config=None).exit_code == 0
    assert asked == [("far:1", 4.5), ("far:1", then)]


@pytest.mark.parametrize("options", [(), ("--ray", "none")])
def test_what_began_with_memory_on_a_cluster_goes_on_without_one(compare, asked, options):
    folder, _ = begun(compare, "--memory", "4.5")
    assert compare("--resume", str(folder), *options, config=None).exit_code == 0 and len(asked) == 1
    refused = compare("--resume", str(folder), *options, "--memory", "4", config=None)
    assert refused.exit_code == 1 and "--memory 4 is for the machines of a cluster" in refused.output


def test_a_comparison_without_memory_can_be_read_by_earlier_versions(compare, asked):
    folder, _ = begun(compare)
    assert "memory" not in json.loads((folder / "comparison.json").read_text())


def test_the_hints_name_the_cluster(compare, asked):
    folder, said = begun(compare)
    assert f"Resume the unfinished runs with `tepal compare --resume {folder} --ray far:1`" in said
    assert re.search(r"Resume it with -c 'resume=\S+-fedacs\"' --ray far:1", said)
    compare.failing["fedacs"] = SystemExit(143)
    ended = compare("--resume", str(folder), *CLUSTER, config=None)
    assert ended.exit_code == 143 and f"`tepal compare --resume {folder} --ray far:1`" in ended.output


def test_on_this_machine_the_hints_name_no_cluster(compare):
    compare.failing["fedacs"] = RunError("too few replies")
    assert "--ray" not in compare("--strategies", "fedavg,fedacs").output
