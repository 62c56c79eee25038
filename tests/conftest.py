"""What all tests share: nothing calls out, and a client's cache never outlives its test."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tepal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tepal")

for name in ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "HF_HUB_OFFLINE"):
    os.environ[name] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session", autouse=True)
def _cache_folder_of_nobody(tmp_path_factory):
    """A client's app may still be at work in its thread when its test has ended."""
    os.environ["TEPAL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """The folder in which clients of this test keep what they hold."""
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    import torch

    torch.set_num_threads(1)  # small tensors: more threads only wait for each other


def pytest_terminal_summary(terminalreporter, config):
    """Name the tests that failed in the run before this one, which had others beside it, and have passed alone."""
    if not config.getoption("lf", False):
        return
    stats = terminalreporter.stats
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())}
    passed = [report.nodeid for report in stats.get("passed", ()) if report.when == "call"]
    if recovered := [name for name in passed if name not in failed]:
        terminalreporter.section("failed once")
        terminalreporter.write_line("Failed once and passed when run alone:")
        for name in recovered:
            terminalreporter.write_line(f"  {name}")
