"""A process that keeps freed memory asks the system for fewer pages."""

import platform
import subprocess
import sys

import pytest

from tests.packages import ROOT

PROGRAM = """
import resource, sys
import numpy as np
from tepal.host.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):
    np.ones(6_000_000, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    first, second = np.ones(6_000_000, np.uint8), np.ones(20_000_000, np.uint8)
    del first, second
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_freed_arrays_are_used_again():
    faults = {}
    for way in ("keep", "default"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, way], cwd=ROOT, capture_output=True, text=True, check=True
        )
        faults[way] = int(done.stdout)
    assert faults["keep"] < 20_000, faults  # about once the pages of both arrays, and not 50 times
