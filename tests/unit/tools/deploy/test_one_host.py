"""The service of docker/compose.yml that makes the credentials: what it makes once, and how it makes all of it anew."""

import shutil
import subprocess
import sys

import pytest
import yaml

from tepal.tools.deploy.provision import ProvisionError, add, find_server, overview, renew_server, revoke
from tests.packages import ROOT


@pytest.fixture
def provisioned(tmp_path):
    """Runs the service's command, with a folder in the place of its volumes; returns that folder."""
    folder, made = tmp_path / "provision", tmp_path / "made"
    for name in ("ca", "server", "sites/site-1", "sites/site-2", "sites/site-3"):
        (folder / name).mkdir(parents=True)
    tepal = tmp_path / "tepal"
    tepal.write_text(f'#!/bin/sh\nexec {sys.executable} -m tepal.tools.cli.main "$@"\n')
    tepal.chmod(0o755)
    *shell, script = yaml.safe_load((ROOT / "docker/compose.yml").read_text())["services"]["provision"]["command"]
    for old, new in (("/app/provision", folder), ("/tmp/made", made), ("tepal ", f"{tepal} "), ("$$", "$")):
        assert old in script
        script = script.replace(old, str(new))

    def run():
        shutil.rmtree(made, ignore_errors=True)  # a container's own
        subprocess.run([*shell, script], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return folder

    return run


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_the_documentation_says_of_the_credentials_on_one_host(provisioned):
    folder = provisioned()
    before = contents(folder)
    assert contents(provisioned()) == before, "a second start changes nothing"
    assert [each.name for each in overview(folder).sites] == ["site-1", "site-2", "site-3"]
    assert overview(folder).server_days == 364
    assert revoke(find_server(folder), "site-3")
    assert [each.name for each in overview(folder).sites if each.revoked] == ["site-3"]
    for change in (lambda: renew_server(folder), lambda: add(folder, sites=["site-4"])):
        with pytest.raises(ProvisionError, match=r"it has no deployment\.toml"):
            change()
    (folder / "ca" / "complete").unlink()
    after = contents(provisioned())
    assert after.keys() == before.keys() and not [each for each in overview(folder).sites if each.revoked]
    kept = {str(path) for path in before if before[path] == after[path]}
    assert kept == {"ca/complete", *(f"sites/site-{number}/site.toml" for number in (1, 2, 3))}
