"""What the unit tests share: fork beside threads of gRPC, and garbage collection that is quick."""

import gc
import os

import pytest

# With its handlers of fork, gRPC ends such a child now and then ("Check failed: next_worker->state == KICKED").
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


@pytest.fixture
def quick_gc():
    """Let `gc.collect()` look only at what the test makes: all the objects of imported libraries take half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
