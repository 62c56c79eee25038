"""`tepal server` stops on signals, but for one that it was started to ignore."""

import signal

import pytest

from tepal.tools.cli import server

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _as_before():
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("hang_up", [signal.SIG_DFL, signal.SIG_IGN])
def test_under_nohup_the_end_of_the_terminal_is_not_that_of_the_server(hang_up):
    signal.signal(signal.SIGHUP, hang_up)
    server._stop_on_signals()
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is server._stop
    assert signal.getsignal(signal.SIGHUP) is (hang_up if hang_up is signal.SIG_IGN else server._stop)
