"""Provisioned credentials on a real SuperLink: who has a site's archive gets in, who was revoked does not."""

import contextlib
import os
import ssl
import subprocess
import time

import pytest
from typer.testing import CliRunner

from tepal.host.processes import flower_environment, free_port, started, wait_for_http
from tepal.host.toml import to_toml
from tepal.tools.cli.provision import app as provision
from tepal.tools.deploy.fleet import open_fleet
from tepal.tools.deploy.provision import SiteCredentials, read_site
from tests.integration.forks import forked
from tests.packages import ROOT

pytestmark = pytest.mark.deployment


def wait_until(condition, what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(0.1)


def test_a_site_gets_in_by_its_archive_until_it_is_revoked_and_again_with_a_new_key(tmp_path):
    folder, control, fleet_port = tmp_path / "fl", f"127.0.0.1:{free_port()}", free_port()
    environment = forked(flower_environment(tmp_path / "home") | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    def tepal(*arguments: str) -> str:
        result = CliRunner().invoke(provision, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    def unpacked(name: str, where: str) -> SiteCredentials:
        (tmp_path / where).mkdir()
        archive = folder / "sites" / f"{name}.tar.gz"
        subprocess.run(["tar", "-xzf", archive, "--no-same-owner", "-C", tmp_path / where], check=True)
        return read_site(tmp_path / where / name)

    def states() -> list[tuple[str, str]]:
        with open_fleet(control, folder / "server" / "ca.crt") as fleet:
            return sorted((node.name, node.status) for node in fleet.node_keys())

    @contextlib.contextmanager
    def supernode(site: SiteCredentials, log: str):
        config = tmp_path / f"{log}.toml"
        config.write_text(to_toml(site.node_config))
        command = ["flower-supernode", "--superlink", site.superlink, "--root-certificates", site.root_certificates]
        command += ["--auth-supernode-private-key", site.key, "--node-config", config]
        command += ["--host", "127.0.0.1", "--port", str(free_port())]
        with started(command, log=tmp_path / f"{log}.log", env=environment, cwd=tmp_path, grace=5) as process:
            yield process

    tepal(
        "make", str(folder), "--host", "localhost", "--port", str(fleet_port), "--site", "north", "--site", "south",
        "--node-config", "data='north and south'",
    )  # fmt: skip
    server = folder / "server"
    command = ["flower-superlink", "--ssl-ca-certfile", server / "ca.crt", "--ssl-certfile", server / "server.crt"]
    command += ["--ssl-keyfile", server / "server.key", "--enable-supernode-auth", "--host", "127.0.0.1"]
    command += ["--port", control.rpartition(":")[2], "--fleet-api-address", f"0.0.0.0:{fleet_port}"]
    with started(command, log=tmp_path / "superlink.log", env=environment, cwd=tmp_path, grace=5) as superlink:
        trust = ssl.create_default_context(cafile=server / "ca.crt")
        wait_for_http(f"https://{control}/health", process=superlink, context=trust, timeout=120)

        said = tepal("register", str(folder), "--superlink", control)
        assert said.splitlines() == ["north: registered", "south: registered"]
        assert states() == [("north", "registered"), ("south", "registered")]

        first = unpacked("north", "first")
        with supernode(first, "first") as node:
            wait_until(lambda: "SuperNode ID:" in node.log.read_text() or not node.running, "the site to come in")
            assert ("north", "online") in states(), node.tail()
            said = tepal("register", str(folder), "--superlink", control)
            assert said.splitlines() == ["north: was registered before, is online", "south: was registered before"]

            said = tepal("revoke", str(folder), "north", "--superlink", control)
            assert "north: its revoked key is unregistered" in said
            assert node.wait(120) == 0, node.tail()  # its SuperNode ends by itself

        # One that was never online is revoked as well.
        said = tepal("revoke", str(folder), "south", "--superlink", control)
        assert "south: its revoked key is unregistered" in said
        assert states() == [("north", "unregistered"), ("south", "unregistered")]
        again = tepal("revoke", str(folder), "south", "--superlink", control)
        assert f"the SuperLink at {control} had its key unregistered before" in again

        with supernode(first, "revoked") as one, supernode(unpacked("south", "south"), "revoked-early") as other:
            for node in (one, other):
                assert node.wait(120) == 1, node.tail()
                assert "[code: 2004] Failed to activate SuperNode." in node.log.read_text()

        tepal("renew", str(folder), "--site", "north")
        assert "north: registered" in tepal("register", str(folder), "--superlink", control)
        second = unpacked("north", "second")
        assert second.key.read_bytes() != first.key.read_bytes()
        assert second.node_config == {"data": "north and south"}
        with supernode(second, "second") as node:
            wait_until(lambda: "SuperNode ID:" in node.log.read_text() or not node.running, "the site to come back")
            assert states() == [("north", "online"), ("north", "unregistered"), ("south", "unregistered")], node.tail()

        # Another deployment's folder is not taken for this SuperLink's.
        tepal("make", str(tmp_path / "other"), "--host", "localhost", "--site", "north")
        result = CliRunner().invoke(provision, ["register", str(tmp_path / "other"), "--superlink", control])
        assert result.exit_code == 1 and "was not issued by this folder's ca.crt" in result.output
    assert not os.path.exists(tmp_path / "home" / "config.toml"), "no connection of Flower's is needed"
