"""The Ray actor of a job, on its machine: it keeps input files, starts the job's process, and reads what that writes.

After a job that ended well it may have another of the same command, and so may its process, which has imported by then
what jobs need.

The class is sent to the machines as it stands here, before there is any code of this project: this module imports
Python's standard library alone. All methods but `renew` can be called again after an answer was lost, with the same
result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

JOB, STORE = "tepal-job-", "tepal-inputs"
"""Folders in a machine's temporary folder: of a job, and of the inputs of all jobs."""
OUTPUT = "output.log"
"""What a job's process prints, in the job's folder."""
RESULT = "result"
RESULT_FILE = f"{RESULT}/result.json"
"""The folder and the file in it that a job's process writes at the end of the job, in the job's folder."""
MOST = 64 * 2**20
"""Bytes of files in one answer, if more than one file has changed."""

MISSING = "missing"
"""In place of the version of a library that a machine does not have."""
_COMPARED = (
    "flwr", "flwr-datasets", "numpy", "pydantic", "ray", "safetensors", "scikit-learn", "torch", "torchvision",
    "transformers",
)  # fmt: skip
_PARTIAL = ".writing-"  # how the names of files and folders begin that are being written, as in `tepal.host.files`
_LOCK = ".lock"
_UNNAMED = f"{_PARTIAL}lock"
_REMOVED = ".removed-"
_KEPT = 7 * 24 * 3600.0  # seconds after which an input that no job used is removed
_OLD = 300.0  # seconds after which an actor does no other job
_PAUSE = 0.01  # seconds between two looks for a change
_BLOCK = 2**20  # bytes that are read at once
_GRACE = 8.0  # seconds between SIGTERM and SIGKILL of a job's process

Size = tuple[int, int]
"""Number and bytes of an input's files."""

Version = tuple[int, int]
"""Time of the last change in nanoseconds, and bytes, of a file."""


@dataclass(frozen=True)
class Answer:
    """What a job's files and its process are since the versions that were known.

    Args:
        changed: path in the job's folder → version and content, of files that are new or have changed.
        removed: known files that are there no more.
        more: whether more files have changed, which did not fit into this answer.
        printed: what the process has printed since the given offset.
        status: exit status of the process; None while it runs.
    """

    changed: Mapping[str, tuple[Version, bytes]] = field(default_factory=dict)
    removed: Sequence[str] = field(default_factory=list)
    more: bool = False
    printed: bytes = b""
    status: int | None = None


class Machine:
    """The files and the process of one job. The actor's process holds a lock on them while it lives."""

    def __init__(self) -> None:
        try:
            self._take_folders()
        except OSError as error:  # Ray does not say where
            raise type(error)(f"{socket.gethostname()}: {error}") from error
        self._used: Collection[str] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._begun, self._made = False, time.monotonic()
        self._starting, self._completing = threading.Lock(), threading.Lock()
        self._writing, self._stopped = threading.Lock(), False

    def _take_folders(self) -> None:
        base = Path(tempfile.gettempdir())
        self._store = base / f"{STORE}-{os.getuid()}"
        self._store.mkdir(mode=0o700, exist_ok=True)
        # Others may write in the same temporary folder: no link that they have made is followed.
        facts = self._store.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise PermissionError(f"{self._store} is not a folder that only this user can open: remove it")
        _remove_left(base, self._store)
        self.folder = Path(tempfile.mkdtemp(prefix=JOB))
        # Held before it has its name: else another actor that begins now could take the folder for one that was left.
        self._lock = (self.folder / _UNNAMED).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.folder / _UNNAMED).rename(self.folder / _LOCK)
        self._partial = self._store / f"{_PARTIAL}{self.folder.name}"

    def place(self) -> tuple[str, str, str]:
        """The machine's name, and the folders of the job and of the inputs."""
        return socket.gethostname(), str(self.folder), str(self._store)

    def missing(self, wanted: Mapping[str, Size]) -> list[str]:
        """The inputs of this job that its machine does not have whole, of those with these sizes."""
        self._used, absent = wanted.keys(), []
        for digest, size in wanted.items():
            whole = self._store / digest
            if size_of(files_below(whole)) != size:
                absent.append(digest)
                with contextlib.suppress(OSError):  # something has removed old files one by one
                    whole.rename(self._store / f"{_REMOVED}{uuid.uuid4().hex}")
            else:
                os.utime(whole)  # so that nobody removes it as unused
        return absent

    def write_input(self, digest: str, parts: Sequence[tuple[str, int, bytes]]) -> None:
        """Write parts of an input's files: path, offset and content of each."""
        for path, offset, content in parts:
            self._written(self._partial / digest / path, content, offset)

    def complete_input(self, digest: str) -> None:
        """Take an input whose files are written into the store."""
        partial, whole = self._partial / digest, self._store / digest
        with self._completing:  # a call that is repeated waits for the first one
            if whole.is_dir():  # or another job has written the same
                return
            if digest_of(files_below(partial)) != digest:
                raise OSError(
                    f"{socket.gethostname()} has received other files than were sent: its disk is full, or a file was "
                    "changed while the command ran"
                )
            with contextlib.suppress(OSError):  # another job has written it by now
                partial.rename(whole)

    def write_file(self, path: str, offset: int, content: bytes) -> Version:
        """Write a part of a file of the job; returns the version that the file has then."""
        return self._written(self.folder / path, content, offset)

    def _written(self, path: Path, content: bytes, offset: int) -> Version:
        with self._writing:  # a call may be late, or repeated, when the job is stopped
            return (0, 0) if self._stopped else _write(path, content, offset)

    def feed(self, parts: Sequence[tuple[str, int, bytes]], whole: Sequence[str], gone: Sequence[str]) -> None:
        """Write parts of files of the job (path, offset and content), which have their names when they are whole.

        `whole`: those of which no part is missing any more. `gone`: files to remove.
        """
        for path, offset, content in parts:
            self._written(self._unfinished(path), content, offset)
        for path in whole:
            self._place(path)
        for path in gone:
            (self.folder / path).unlink(missing_ok=True)

    def _unfinished(self, path: str) -> Path:
        return (self.folder / path).with_name(f"{_PARTIAL}{Path(path).name}")

    def _place(self, path: str) -> None:
        named = self.folder / path
        if named.exists():  # the call is repeated, and a late part may have the other name
            return
        try:
            self._unfinished(path).rename(named)
        except FileNotFoundError:  # it may be repeated while the first one is under way
            if not named.exists():
                raise

    def begin(self, code: str, threads: int) -> None:
        """Start the job's process, `python -m tepal.tools.cluster.process FOLDER PARENT`, or let it begin its next job.

        `code`: the input with the package. `threads`: of numerical libraries. Both are those of the jobs before.
        """
        with self._starting:
            if self._begun:
                return
            if self._process is not None and self._process.poll() is None:
                self._begun = True
                assert self._process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has just ended, as its status will tell
                    self._process.stdin.write(b"\n")
                    self._process.stdin.flush()
                return
            found = os.environ.get("PYTHONPATH", "")  # where a cluster's modules may have put libraries
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, (str(self._store / code), found))),
                "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            environment.pop("RAY_ADDRESS", None)
            module = "tepal.tools.cluster.process"
            command = [sys.executable, "-P", "-m", module, str(self.folder), str(os.getpid())]
            with (self.folder / OUTPUT).open("ab") as output:
                self._process = subprocess.Popen(
                    command, env=environment, cwd=self.folder, stdin=subprocess.PIPE, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self._begun = True

    def ask(
        self, known: Mapping[str, Version], patterns: Sequence[str], offset: int, patience: float = 0.0
    ) -> Answer:
        """What has changed since the known versions of the job's files, and what was printed.

        If that is nothing, the answer comes when something has changed, or after `patience` seconds.

        Files of an earlier pattern (see `matching`) are answered before those of a later one, and are at least as new,
        and so are the files of a folder before those in its subfolders: a checkpoint comes after the personal state and
        the metrics that belong to it. Each file is read whole; one that is being written has its present content.
        """
        for digest in self._used:
            with contextlib.suppress(OSError):
                os.utime(self._store / digest)
        end = time.monotonic() + patience
        while True:
            answer = self._answer(known, patterns, offset)
            if answer != Answer() or time.monotonic() >= end:
                return answer
            time.sleep(_PAUSE)

    def _answer(self, known: Mapping[str, Version], patterns: Sequence[str], offset: int) -> Answer:
        status = self._status()  # before the files, so that none is missed
        listed = [pair for pattern in reversed(patterns) for pair in _versions(matching(self.folder, pattern))]
        found = dict(reversed(listed))
        changed, size, more = dict[str, tuple[Version, bytes]](), 0, False
        for path, now in found.items():
            if known.get(path) == now:
                continue
            if changed and size + now[1] > MOST:
                more = True
                break
            with contextlib.suppress(FileNotFoundError):  # removed since
                changed[path] = now, (self.folder / path).read_bytes()
                size += now[1]
        removed = [path for path in known if path not in found]
        with (self.folder / OUTPUT).open("ab+") as output:
            output.seek(offset)
            printed = output.read(MOST)
        more = more or len(printed) == MOST
        return Answer(changed, removed, more, printed, status)

    def _status(self) -> int | None:
        """Exit status of the process, 0 if it has ended its job and waits; None while it is at work."""
        status = self._process.poll() if self._process else None
        return 0 if status is None and self._begun and (self.folder / RESULT_FILE).exists() else status

    def renew(self) -> bool:
        """Remove the files of a job that has ended, for another job. Called once, with no other call under way.

        False if the process cannot do another one, or if it is so old that others should have its cores.
        """
        if self._process is None or self._process.poll() is not None or self._status() is None:
            return False
        if time.monotonic() - self._made > _OLD:
            return False
        shutil.rmtree(self._partial, ignore_errors=True)
        for path in self.folder.iterdir():
            if path.name == OUTPUT:
                os.truncate(path, 0)  # the process has it open, and writes at its end
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
        self._used, self._begun = (), False
        return True

    def stop(self) -> None:
        """End the process, and remove the job's files."""
        with self._writing:
            self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._partial, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def versions() -> dict[str, str]:
    """Versions of Python and of what runs need or may need, on this machine; MISSING for what it does not have."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return MISSING

    return {"python": python_version(), **{package: of(package) for package in _COMPARED}}


def digest_of(files: Mapping[str, Path], look: Callable[[], object] = lambda: None) -> str:
    """Digest of an input: of the names and contents of its files, relative path → file.

    `look` is called before each block is hashed; an exception from it stops the reading.
    """
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                look()
                content.update(block)
        whole.update(f"{name}\0{content.hexdigest()}\n".encode())
    return whole.hexdigest()[:32]


def size_of(files: Mapping[str, Path]) -> Size:
    """Number and bytes of an input's files, without what Python writes beside those of the code."""
    own = [path for name, path in files.items() if "__pycache__" not in name]
    return len(own), sum(path.stat().st_size for path in own)


def files_below(folder: Path) -> dict[str, Path]:
    """The files below a folder by their relative paths; links are followed."""
    walked = os.walk(folder, followlinks=True)
    paths = (Path(here) / name for here, _, names in walked for name in names)
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def _versions(files: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, Version]]:
    for path, file in files:
        with contextlib.suppress(FileNotFoundError):  # removed since
            facts = file.stat()
            yield path, (facts.st_mtime_ns, facts.st_size)


def matching(base: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    """The files of a pattern below a folder, with their relative paths; those in subfolders come first.

    `*` stands for any characters, also for several folders. Links are left out, and files that are being written.
    Raises OSError for a folder that cannot be read: its files are not known to be removed.
    """
    if not re.search(r"[*?\[]", pattern):
        if (base / pattern).is_file() and not (base / pattern).is_symlink():
            yield pattern, base / pattern
        return
    fixed = [part for part in re.split(r"[*?\[]", pattern)[0].split("/")[:-1] if part]
    for here, _, names in os.walk(base.joinpath(*fixed), topdown=False, onerror=_unless_removed):
        for name in sorted(names):
            file = Path(here) / name
            path = file.relative_to(base).as_posix()
            written = not any(part.startswith(_PARTIAL) for part in path.split("/"))
            if written and fnmatchcase(path, pattern) and not file.is_symlink():
                yield path, file


def _write(path: Path, content: bytes, offset: int) -> Version:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A call that is repeated may still be under way: it writes the same at the same place, and nothing is cut off.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        file.seek(offset)
        file.write(content)
        file.flush()  # a full disk raises here at the latest
        status = os.fstat(file.fileno())
    return status.st_mtime_ns, status.st_size


def _unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _remove_left(base: Path, store: Path) -> None:
    """Remove jobs whose actors were killed, and inputs that no job has used for a week."""
    for folder in base.glob(f"{JOB}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(store / f"{_PARTIAL}{folder.name}", ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
    for each in store.iterdir():
        with contextlib.suppress(OSError):
            if each.stat().st_mtime < time.time() - _KEPT:
                gone = each.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
                each.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
