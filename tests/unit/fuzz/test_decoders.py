"""Random and damaged bytes for every decoder of what others send: a valid value, or the documented exception.

`corpus/<decoder>/` has inputs for which a decoder once failed. They are tested in every run.
"""

import contextlib
import io
import json
import os
import resource
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tepal.exchange.files import DamagedFile, map_arrays
from tepal.host.site import ProvisionError
from tepal.tools.deploy.provision.site_files import node_config_of
from tests.unit.fuzz.decoders import DECODERS

CORPUS = Path(__file__).parent / "corpus"
FEW, MANY = 40, 4000
SECONDS, BYTES = 5.0, 2_000_000_000  # for one input


@contextlib.contextmanager
def bounded_memory():
    """Memory that is allocated beyond the limit raises MemoryError, which no decoder documents."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(name, number, derandomize):
    decoder = DECODERS[name]

    @settings(
        max_examples=max(round(number * decoder.share), 5),
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=decoder.inputs)
    def every_input_is_read_or_refused(data):
        check(name, data)

    every_input_is_read_or_refused()


def check(name, data):
    started = time.perf_counter()
    with bounded_memory():
        DECODERS[name].check(data)
    assert time.perf_counter() - started < SECONDS


@pytest.mark.parametrize("name", DECODERS)
def test_few_inputs_are_read_or_refused(name):
    run(name, FEW, derandomize=True)


@pytest.mark.long
@pytest.mark.parametrize("name", DECODERS)
def test_many_inputs_are_read_or_refused(name):
    """The same inputs in every run; others with TEPAL_FUZZ_AT_RANDOM=1."""
    run(name, MANY, derandomize=not os.environ.get("TEPAL_FUZZ_AT_RANDOM"))


@pytest.mark.parametrize("file", sorted(CORPUS.rglob("*.bin")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_inputs_that_once_failed_are_read_or_refused(file):
    check(file.parent.name, file.read_bytes())


def test_an_archive_that_grows_when_it_is_unpacked_is_refused_unread(tmp_path):
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("s/site.toml")
        member.size = 50_000_000
        tar.addfile(member, io.BytesIO(b"#" * member.size))
    tracemalloc.start()
    with pytest.raises(ProvisionError, match="can be read neither"):
        node_config_of(tmp_path / "s.tar.gz", tmp_path / "s", "s")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20_000_000


@pytest.mark.parametrize("start", [-(2**40), -8, 2**40])
def test_an_array_outside_its_file_is_not_mapped(tmp_path, start):
    """NumPy makes a view that begins before its buffer; to read it would end the process."""
    about = {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}
    header = json.dumps({"__metadata__": {"blake3/a": "00" * 16}, "a": about}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DamagedFile, match="not within the file"):
        map_arrays(tmp_path / "a")
