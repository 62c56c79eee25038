"""A cluster of which each call is done at once, with real actors and processes, and jobs for it."""

import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import tepal
from tepal.tools.cluster import job as job_module
from tepal.tools.cluster.connection import Cluster, Resources
from tepal.tools.cluster.inputs import Input
from tepal.tools.cluster.machine import digest_of, files_below

JOBS = '''
import os, signal, sys, time

def told(folder, **arguments):
    """Return the arguments and what is in the folder."""
    found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    print("two\\nlines, and a torn one", end="", flush=True)
    return {**arguments, "files": [name for name in found if name != "output.log"]}

def who(folder, **arguments):
    """Return this process, what can be read from it, and how many files the folder has; leave one more."""
    print(f"job {arguments}", flush=True)
    (folder / "left").mkdir()
    (folder / "left" / "a").touch()
    (folder / "link").symlink_to(folder / "left")
    return [os.getpid(), sys.stdin.read(), len(list(folder.rglob("*")))]

def fails(folder):
    from tepal.host.superlink import RunError
    raise RunError("no luck", folder / "log")

def wrong(folder):
    return {}["a key"]

def killed(folder):
    print("about to end", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def exits(folder):
    os._exit(3)

def counts(folder, to):
    """Count to a number in a file, from where it is, and wait after each until a file allows one more."""
    file = folder / "trial" / "state" / "count"
    file.parent.mkdir(parents=True, exist_ok=True)
    (checkpoints := folder / "trial" / "checkpoint").mkdir(exist_ok=True)
    begun = int(file.read_text()) if file.exists() else 0
    (folder / "trial" / "settings").write_text("the same")
    for number in range(begun + 1, to + 1):
        file.with_name(".writing-new").write_text(str(number))
        os.replace(file.with_name(".writing-new"), file)
        (checkpoints / f"round-{number}").write_text(f"from {begun}")
        (checkpoints / f"round-{number - 1}").unlink(missing_ok=True)
        while not (folder / f"allow-{number}").exists():
            time.sleep(0.01)
    return begun

def echoes(folder):
    """Answer each file in `asked` by one in `said`, and remove that with it, until there is `end`."""
    asked, said = folder / "trial" / "asked", folder / "trial" / "said"
    for each in (asked, said):
        each.mkdir(parents=True, exist_ok=True)
    while not (folder / "trial" / "end").exists():
        for path in said.iterdir():
            if not (asked / path.name).exists():
                path.unlink()
        for path in asked.iterdir():
            if path.name[0] != "." and not (said / path.name).exists():
                path.with_name(".writing-x").write_text(path.read_text().upper())
                os.replace(path.with_name(".writing-x"), said / path.name)
        time.sleep(0.01)
    return sorted(os.listdir(said))

def waits(folder):
    (folder / "trial").mkdir(exist_ok=True)
    (folder / "trial" / ".writing-begun").write_text(str(os.getpid()))
    os.replace(folder / "trial" / ".writing-begun", folder / "trial" / "begun")
    time.sleep(60)
'''


@pytest.fixture(scope="session")
def code(tmp_path_factory):
    """What is sent as the code: of this package what a job's process needs, and the functions above."""
    package = Path(tepal.__file__).parent
    tools = ("__init__.py", "cluster/__init__.py", "cluster/machine.py", "cluster/process.py")
    names = ["__init__.py", *(f"tools/{name}" for name in tools)]
    files = {f"tepal/{name}": package / name for name in names}
    files |= {f"tepal/host/{name}": path for name, path in files_below(package / "host").items() if "py" in path.suffix}
    (folder := tmp_path_factory.mktemp("jobs")).joinpath("jobs.py").write_text(JOBS)
    files["jobs.py"] = folder / "jobs.py"
    return Input(digest_of(files), files, "the code")


@pytest.fixture
def cluster(tmp_path, monkeypatch, code):
    """A cluster of which each call is done at once; answers are not waited for longer than a moment."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setitem(job_module._Attempt._answers.__kwdefaults__, "repeat", 0.02)
    clock = SimpleNamespace(sleep=lambda _seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr(job_module, "time", clock)
    inputs = SimpleNamespace(code=code, sending=lambda _place: threading.Lock())
    found = Cluster("here:1", Resources(memory=0.5), (Resources(4.0, memory=8.0),), inputs)
    yield found
    found.actors.close()
