"""What all tests share: nothing calls out, and a client's cache never outlives its test."""

import gc
import os
import zlib

import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tepal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tepal")

for name in ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "HF_HUB_OFFLINE"):
    os.environ[name] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def pytest_addoption(parser):
    parser.addoption("--share", metavar="K/N", help="only the K-th of N shares of the tests, drawn by their names")


def pytest_collection_modifyitems(config, items):
    """Leave the tests of the other shares out."""
    if not (share := config.getoption("--share")):
        return
    share, shares = map(int, share.split("/"))
    if not 1 <= share <= shares:
        raise pytest.UsageError(f"--share is {share}/{shares}, expected 1/{shares} to {shares}/{shares}")
    others = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares != share - 1]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection():
    """Imports make objects that stay: to look for garbage among them takes a quarter of the collection."""
    gc.disable()


def pytest_collection_finish():
    """From here on only what the tests make is looked through. All the libraries' objects take half a second a time."""
    gc.collect()
    gc.freeze()
    gc.enable()


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
