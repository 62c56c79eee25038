"""Edge devices: whatever a client needs without extras is there as a wheel for 64-bit ARM, so nothing is compiled."""

import json
import subprocess
import sys
import tomllib

import pytest

from tests.packages import ROOT

PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)] + ["manylinux2014_aarch64"]  # Debian 12's


@pytest.mark.long
@pytest.mark.slow
def test_every_dependency_of_a_client_has_a_wheel_for_aarch64(tmp_path):
    """By the resolver, for another machine than this: nothing is downloaded but metadata, and nothing is installed."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--only-binary", ":all:", "--target", str(tmp_path)]
    command += ["--implementation", "cp", "--python-version", "3.11"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["-c", str(ROOT / "constraints.txt"), *needed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode and "No matching distribution" not in done.stderr:
        pytest.skip(f"no package index answers: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr
    files = [each["download_info"]["url"].rsplit("/", 1)[1] for each in json.loads(done.stdout)["install"]]
    assert any(file.startswith("torch-") and file.endswith("aarch64.whl") for file in files)
    other = [file for file in files if not file.endswith(("none-any.whl", "aarch64.whl"))]
    assert len(files) > 50 and other == []
