"""What the unit tests share: fork beside threads of gRPC, and fixtures that save time."""

import gc
import os

import pytest

# With its handlers of fork, gRPC ends such a child now and then ("Check failed: next_worker->state == KICKED").
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


@pytest.fixture
def no_report(monkeypatch):
    """Runs leave no report.html: to draw it takes longer than a few rounds of a small model."""
    monkeypatch.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")


@pytest.fixture
def quick_gc():
    """Let `gc.collect()` look only at what the test makes, and not at what those before it have imported."""
    gc.collect()
    gc.freeze()
