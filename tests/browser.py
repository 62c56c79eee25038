"""The browser for tests: Chrome or Chromium of this machine, if it starts."""

import functools
import shutil
import subprocess

import pytest

FLAGS = ("--no-sandbox", "--disable-dev-shm-usage")  # tests run as root, and in containers with little shared memory


@functools.cache
def browser() -> str | None:
    """Its program; None where there is none, or it draws nothing."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if program := shutil.which(name):
            command = [program, "--headless", *FLAGS, "--disable-gpu", "--dump-dom", "data:text/html,<p>drawn</p>"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            except subprocess.TimeoutExpired:
                continue
            if "drawn" in done.stdout:
                return program
    return None


needs_browser = pytest.mark.skipif(browser() is None, reason="needs Chrome or Chromium")
