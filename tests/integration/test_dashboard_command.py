"""`tepal dashboard` as a process: addresses, TLS, the token, what it refuses, and how it ends."""

import os
import re
import signal
import ssl
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from tepal.tools.cli.main import main
from tests.comparisons import leave_run
from tests.integration.credentials import authority
from tests.packages import ROOT


def started(*arguments, **environment):
    command = [sys.executable, "-m", "tepal.tools.cli.main", "dashboard", *map(str, arguments)]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, **both)


@pytest.fixture
def runs(tmp_path):
    leave_run(tmp_path / "runs", "fedavg")
    return tmp_path / "runs"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_its_address_answers_there_and_ends_when_it_is_told_to(runs, number):
    with started(runs, "--port", 0) as process:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert "fedavg" in httpx.get(address).text
        with httpx.stream("GET", f"{address}events") as events:  # a reader that stays keeps it from nothing
            assert next(events.iter_lines()).startswith("data: ")
            process.send_signal(number)
            assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_where_others_can_reach_it_it_asks_for_a_token_over_tls(runs, tmp_path):
    ca = authority(tmp_path)
    certificate, key = ca.server(tmp_path)
    with started(runs, "--host", "0.0.0.0", "--port", 0, "--certificate", certificate, "--key", key) as process:
        try:
            address = httpx.URL(process.stdout.readline().strip())
            assert address.scheme == "https" and len(address.params["token"]) >= 32
            with httpx.Client(verify=ssl.create_default_context(cafile=ca.certificate)) as client:
                here = f"https://127.0.0.1:{address.port}/"
                assert client.get(here).status_code == 401
                moved = client.get(here, params=address.params)
                assert moved.status_code == 303 and "Secure" in moved.headers["set-cookie"]
                assert "fedavg" in client.get(here).text
        finally:
            process.terminate()
        assert process.wait(20) == 0 and "warning" not in process.stderr.read()


def test_without_tls_that_is_said_and_a_token_of_ones_own_is_kept_secret(runs):
    with started(runs, "--host", "0.0.0.0", "--port", 0, TEPAL_DASHBOARD_TOKEN="our own long token") as process:
        try:
            address = httpx.URL(process.stdout.readline().strip())
            port = address.port
            assert not address.query
            bearer = {"Authorization": "Bearer our own long token"}
            assert httpx.get(f"http://127.0.0.1:{port}/", headers=bearer).status_code == 200
        finally:
            process.terminate()
        process.wait(20)
        assert "the connection is not encrypted" in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-there"], "there is no folder nothing-there"),
        ([".", "--certificate", "c.pem"], "--certificate and --key belong together"),
        ([".", "--token-file", "short"], "the token has 5 characters, expected at least 12"),
        ([".", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_what_it_cannot_do_is_said_in_a_sentence(tmp_path, monkeypatch, arguments, said):
    (tmp_path / "short").write_text("short\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["dashboard", *arguments])
    assert done.exit_code == 1 and done.stderr.splitlines()[-1].startswith("error: ") and said in done.stderr
