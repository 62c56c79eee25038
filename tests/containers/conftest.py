"""Both images are built once for all container tests; without an engine these tests are skipped, and say why."""

import pytest

from tests.containers.engine import CLIENT, SERVER, build, why_no_engine


@pytest.fixture(scope="session")
def engine():
    """A Docker engine answers."""
    if reason := why_no_engine():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def images(engine):
    """Names of the server's and the client's image."""
    build("server", SERVER)
    build("client", CLIENT)
    return SERVER, CLIENT
