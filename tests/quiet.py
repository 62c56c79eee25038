"""For test files that start hundreds of runs: the log of what goes well would bury the failure's."""

import logging

import pytest


@pytest.fixture(autouse=True, scope="module")
def quiet():
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(level)
