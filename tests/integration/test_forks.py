"""A program that runs as a fork is the program that it would be."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.integration.forks import forked
from tests.integration.test_resume import wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are forks on Linux")

TELLS = """
import json, os, sys
loaded = "torch" in sys.modules
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "TOLD": os.environ["TOLD"], "parent": os.getppid(),
    "name": __name__, "loaded": loaded, "tepal": "tepal" in sys.modules, "in": sys.stdin.read(),
}))
print("an error", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def environment():
    return forked({**os.environ, "TOLD": "so"})


@pytest.mark.parametrize("how", ["script", "module", "code"])
def test_it_has_its_arguments_environment_folder_and_streams(how, tmp_path, environment):
    (tmp_path / "tells.py").write_text(TELLS)
    program = {"script": ["tells.py"], "module": ["-m", "tells"], "code": ["-P", "-c", TELLS]}[how]
    command = [sys.executable, *program, "-x", "a b"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, input="heard", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "an error\n")
    assert json.loads(done.stdout) == {
        "arguments": ["-x", "a b"], "folder": str(tmp_path), "TOLD": "so", "parent": os.getpid(), "name": "__main__",
        "loaded": True, "tepal": False, "in": "heard",
    }  # fmt: skip


def test_files_that_are_left_open_for_it_have_their_numbers(environment):
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, b'through'); print(os.path.exists('/proc/self/fd/{reading}'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, pass_fds=[writing], capture_output=True, text=True)
    os.close(writing)
    assert done.stdout == "False\n", done.stderr
    assert os.read(reading, 100) == b"through" and os.read(reading, 100) == b"", "nobody has it any more"
    os.close(reading)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import sys; sys.exit('goodbye')", 1, "goodbye"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os._exit(7)", 7, ""),
    ],
)
def test_it_ends_as_it_would(code, status, said, environment):
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == status and said in done.stderr


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("heard", flush=True), sys.exit(5)))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 5), (signal.SIGKILL, -9)])
def test_a_signal_to_what_was_started_reaches_it(number, status, environment):
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(60) == status
        assert process.stdout.read() == ("heard\n" if number == signal.SIGTERM else "")

    def gone():
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    wait_for(gone, "the end of the fork", seconds=30)
