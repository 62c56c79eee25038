"""`tepal server` is killed, and so are the processes below it: what it serves goes on by itself."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tepal.host.processes import flower_environment, free_port, marked, started
from tepal.host.toml import to_toml
from tepal.records.run_directory import KEPT_IN
from tepal.tools.deploy.fleet import open_fleet
from tepal.tools.deploy.provision import make
from tests.integration.forks import forked
from tests.integration.loopback import ROOT, _running, own_data, pairs
from tests.integration.test_resume import (
    CONFIG,
    bits,
    measured,
    uninterrupted,  # noqa: F401  a fixture
    wait_for,
)

pytestmark = pytest.mark.deployment


class Deployment:
    """A server with its state, and what it takes to start it again. `as_forks`: see `forks`."""

    def __init__(self, folder, sites, *, as_forks=True):
        self.folder, self.state, self.as_forks = folder, folder / "state", as_forks
        self.credentials = make(folder / "deployment", hosts=["127.0.0.1"], sites=sites, unpacked=True)
        self.control, self.fleet = free_port(), free_port()
        self.log = folder / "server.log"

    def environment(self, name):
        home = self.folder / name
        home.mkdir(exist_ok=True)
        environment = flower_environment(home) | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TEPAL_CACHE": str(home / "cache"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "TEPAL_NODE_SPARE": "0",
        }  # fmt: skip
        return forked(environment) if self.as_forks else environment

    def command(self, *more):
        return [sys.executable, "-m", "tepal.tools.cli.server", *more]

    def server(self, app, *more):
        command = self.command("--credentials", str(self.credentials.server.folder), "--state", str(self.state))
        command += ["--app", str(app), "--port", str(self.control), "--fleet-api-address", f"127.0.0.1:{self.fleet}"]
        return started([*command, *more], log=self.log, env=self.environment("server"), cwd=self.folder, grace=20)

    def node(self, name, config, *more):
        command = [sys.executable, "-m", "tepal.tools.cli.main", "node", "--site", self.credentials.unpacked(name)]
        command += ["--superlink", f"127.0.0.1:{self.fleet}", "--node-config", config]
        command += ["--control", f"unix:{self.folder / name}.sock"]
        environment, log = self.environment(name), self.folder / f"{name}.log"
        return started([*command, *more], log=log, env=environment, cwd=self.folder / name, name=name, grace=5)

    def status(self):
        done = subprocess.run(
            self.command("status", "--state", str(self.state)),
            env=self.environment("server"), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout

    def flwr(self, *arguments):
        """Flower's command line, with the connection that the server has left in its state folder."""
        environment = self.environment("server") | {"FLWR_HOME": str(self.state / "flower")}
        program = shutil.which("flwr", path=environment["PATH"])
        done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr

    def journal(self):
        return json.loads((self.state / "server.json").read_text())


def kill_all(server):
    """As when a container is killed."""
    for process in marked(server.token, server.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait(45)


@contextlib.contextmanager
def suspended(node):
    """Suspend a node's processes during the block: no round that needs this node can end meanwhile."""
    processes = node.tree()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def test_a_run_goes_on_whatever_is_killed(tmp_path, uninterrupted, monkeypatch):  # noqa: F811
    """The server with all that it started; then the ServerApp alone."""
    monkeypatch.delenv("TEPAL_CACHE")
    draw = random.Random(7)
    deployment = Deployment(tmp_path, ["site-0", "site-1"])
    runs = deployment.state / "runs"
    latest = runs / "latest"
    # The evaluation at the end would be one more exchange, of ten seconds.
    config = {**CONFIG, "num-server-rounds": 5, "min-clients": 2, "fraction-evaluate": 0.0}
    (tmp_path / "config.toml").write_text(to_toml(config))
    arguments = (ROOT, "-c", str(tmp_path / "config.toml"))
    begun = time.monotonic()

    def say(what):
        print(f"{time.monotonic() - begun:6.1f} s  {what}", flush=True)

    data = own_data(tmp_path, 2)
    with deployment.node("site-0", pairs(data[0])), deployment.node("site-1", pairs(data[1])) as node:
        with deployment.server(*arguments) as server:
            first = latest / "checkpoint" / "round-000001"
            wait_for(first.exists, "the checkpoint of round 1", lambda: server.running)
            time.sleep(draw.uniform(0, 0.5))
            told = []  # the server looks for the run's directory every few seconds
            with suspended(node):
                wait_for(
                    lambda: str(latest.resolve()) in (told.append(deployment.status()) or told[-1][1]),
                    "the status to name the run's directory", lambda: server.running, 60,
                )  # fmt: skip
                status, said = told[-1]
                assert status == 0 and "2 registered: site-0, site-1" in said
                assert (deployment.state / "server.json").stat().st_mode & 0o777 == 0o600
                say("kill the server and all that it started")
                kill_all(server)
        status, said = deployment.status()
        assert status == 1 and "is no longer running" in said

        logged = deployment.log.stat().st_size
        with deployment.server(*arguments) as server:
            say("started again")
            wait_for(lambda: _running(server, "flwr-serverapp"), "the new ServerApp", lambda: server.running)
            with suspended(node):
                resumed = f"{KEPT_IN}{latest.resolve()}".encode()
                wait_for(
                    lambda: resumed in deployment.log.read_bytes()[logged:],
                    "the new ServerApp to resume the run", lambda: server.running,
                )  # fmt: skip
                time.sleep(draw.uniform(0, 0.5))
                assert not (latest / "summary.json").exists(), "the run ended before the ServerApp could be killed"
                (server_app,) = _running(server, "flwr-serverapp")
                say("kill the ServerApp")
                server_app.kill()
            wait_for((latest / "summary.json").exists, "the end", lambda: server.running)
            say("ended")
            wait_for(lambda: deployment.journal()["run"]["state"] == "ended", "its being noted", lambda: server.running)
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait(60) == 0
            assert marked(server.token) == [], "a server that is stopped leaves nothing behind"
            say("stopped")
        status, said = deployment.status()
        assert status == 1 and "was stopped" in said

    (run,) = runs.glob("*-fedfrozen")
    (record,) = deployment.journal()["started"].values()
    assert record["directory"] == str(run)
    whole = uninterrupted(config, data)
    assert bits(run) == bits(whole)
    assert measured(run) == measured(whole)


# A run that needs no nodes: it looks like ours from outside, and does what the file `what` beside it says.
PRETEND = {
    "pyproject.toml": """
        [project]
        name = "pretend"
        version = "1.0.0"
        description = "A run directory and nothing else"
        license = "Apache-2.0"
        dependencies = ["flwr"]

        [tool.flwr.app]
        publisher = "somebody"

        [tool.flwr.app.components]
        serverapp = "server_app:app"
        clientapp = "client_app:app"

        [tool.flwr.app.config]
        runs = "runs"
        resume = ""
        """,
    "client_app.py": """
        from flwr.clientapp import ClientApp

        app = ClientApp()
        """,
    "server_app.py": """
        import fcntl
        import os
        import time
        from pathlib import Path

        from flwr.serverapp import ServerApp

        app = ServerApp()


        class ConfigError(ValueError):
            pass


        @app.main()
        def main(grid, context):
            runs = Path(context.run_config["runs"])
            run = Path(context.run_config["resume"] or runs / "pretended")
            (run / "checkpoint" / "round-000001").mkdir(parents=True, exist_ok=True)
            (run / "config.toml").write_text("num-server-rounds = 9")
            fcntl.flock(os.open(run, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            print(f"This run is kept in {run}", flush=True)
            with (run / "begun").open("a") as file:
                file.write(".")
            while True:
                what = (run / "what").read_text() if (run / "what").exists() else "wait"
                if what == "die":
                    time.sleep(1)
                    os._exit(1)
                if what == "wrong":
                    raise ConfigError("model='x': known are a, b")
                time.sleep(0.1)
        """,
}


def test_what_is_started_again_and_what_is_not(tmp_path):
    """The SuperLink dies, a key is removed, a person stops the run, it dies again and again, it cannot be run."""
    app = tmp_path / "pretend"
    app.mkdir()
    for name, text in PRETEND.items():
        (app / name).write_text(textwrap.dedent(text).lstrip())
    deployment = Deployment(tmp_path, ["site-0", "site-1"])
    run = deployment.state / "runs" / "pretended"

    def begun():
        return len((run / "begun").read_text()) if (run / "begun").exists() else 0

    def outcome():
        return deployment.journal()["runs"].get(str(run), {}).get("outcome")

    with deployment.server(app, "--attempts", "1", "-c", "resume=''") as server:
        def wait(condition, what):
            wait_for(condition, f"{what}\n{server.tail(40)}", lambda: server.running)

        def resume(what):
            (run / "what").write_text(what)
            deployment.flwr("run", str(app), "tepal", "--run-config", f'resume="{run}"')

        wait(lambda: begun() == 1, "the run")
        (superlink,) = _running(server, "flower-superlink")
        superlink.kill()
        wait(lambda: begun() == 2, "the run that goes on with another SuperLink")
        (deployment.credentials.server.nodes / "site-1.pub").unlink()
        with open_fleet(f"127.0.0.1:{deployment.control}", deployment.credentials.server.root_certificates) as fleet:
            wait(
                lambda: {key.name: key.status for key in fleet.node_keys()}
                == {"site-0": "registered", "site-1": "unregistered"},
                "the key to be unregistered",
            )
        wait(lambda: "run_id" in deployment.journal()["run"], "the run's number")
        deployment.flwr("stop", str(deployment.journal()["run"]["run_id"]), "tepal")
        wait(lambda: outcome() == "stopped", "the stop to be noted")
        wait(lambda: not _running(server, "flwr-serverapp"), "the end of the ServerApp, which holds the run's lock")

        resume("die")
        wait(lambda: outcome() == "given up", "the run to be given up")
        assert begun() == 4, "once by a person, once by the server, not by what a person had stopped"
        assert "was tried 1 times without finishing another round" in deployment.journal()["last_error"]["text"]

        resume("wrong")
        wait(lambda: outcome() == "failed", "the error to be noted")
        assert begun() == 5
        status, said = deployment.status()
        assert status == 0 and "ConfigError: model='x': known are a, b" in said and f"{run}: failed" in said
