"""One job of a command: sent to a machine of the cluster, followed, and sent to another if that machine is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tepal.host.files import replacing
from tepal.host.flower.patches import KILLED
from tepal.host.superlink import without_colour
from tepal.host.text import visible
from tepal.records.run_directory import CHECKPOINTS, NOW
from tepal.tools.cluster.actors import end
from tepal.tools.cluster.connection import Cluster
from tepal.tools.cluster.inputs import Input, calls_of, parts_of
from tepal.tools.cluster.machine import RESULT, RESULT_FILE, Machine, Version, matching
from tepal.tools.cluster.process import JOB
from tepal.tools.simulation.engine import RunStopped

Tell = Callable[[str, str], None]
"""Called with ("stage", what is done before the job begins), with ("note", what happened to its machine), and with
("log", a line that the job's process has printed)."""

_REPEATED = 30.0  # seconds without an answer after which a machine is asked again
_LOOK = 10.0  # seconds between two looks at the cluster while a job waits
_ROOMLESS = 12  # looks without any machine that has room, after which a job fails
_LOSSES = 3  # machines lost in a row, without a new file between, after which a job fails
_PATIENCE = 0.1  # seconds that a machine waits for a change while an answer is awaited
_GLANCE = 0.02  # seconds between two looks at files here that are to be sent
_RAREST = 2.0  # seconds between two questions to a job that has been at work for long
_SHARE = 0.02  # of the time that a job has been at work: each question takes time of the job's own cores


PROCESS, MEMORY = "process", "memory"
"""Kinds of failures: the job's process ended; its machine had too little memory for it."""


def noted(text: str) -> str:
    """A line for a run's log on the machine of a job, as Flower's own lines are."""
    return f"INFO : Ray cluster: {text}"


class JobFailed(RuntimeError):
    """A job failed. `kind`: class of the exception there, `PROCESS`, `MEMORY`, or "" if machines failed."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class _Lost(RuntimeError):
    """The machine of a job, or the actor on it, has ended. `told`: whether a new file had come from it before."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.told = False


@dataclass(frozen=True)
class Place:
    """Where a job is: the machine's name, and the folders of the job and of the inputs there."""

    machine: str
    folder: str
    store: str


@dataclass(frozen=True)
class Job:
    """What is to be done on a machine.

    Args:
        function: "module:function", called there with the job's folder and the arguments.
        arguments: given where the job is, the function's arguments, in JSON's types.
        inputs: files that it reads.
        folders: folder in the job's → folder here.
        files: patterns (see `matching`) of the job's own files in these folders, in order. Those that are here are sent
            before the job begins; what it writes there is written here.
        made: more patterns, of files that are not sent, each new one of which is progress: they come before the others.
        fed: patterns of files that are sent while the job goes on, whole, in this order of patterns, and are removed
            there when they are removed here.
        answers: folder of files that are fed → folder of what it makes, where a file of the same name is the answer.
        pause: least seconds between two questions on what has changed, while no answer is awaited. The longer a job
            has been at work, the more rarely it is asked.
        renewed: whether the process can do another job afterwards: what this one leaves in its memory does no harm.
        ahead: whether it only prepares its place: its actor is kept for the next job.
        sent: place, name and content of a file → the content that is sent.
        returned: the same of what comes back; the name is "" for a line that was printed.
    """

    function: str
    arguments: Callable[[Place], Mapping[str, Any]]
    inputs: Sequence[Input] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)
    files: Sequence[str] = ()
    made: Sequence[str] = ()
    fed: Sequence[str] = ()
    answers: Mapping[str, str] = field(default_factory=dict)
    pause: float = 0.3
    renewed: bool = False
    ahead: bool = False
    sent: Callable[[Place, str, bytes], bytes] | None = None
    returned: Callable[[Place, str, bytes], bytes] = lambda _place, _name, content: content


def done(cluster: Cluster, job: Job, tell: Tell) -> Any:
    """Do a job on a machine of the cluster, and return what its function returned there.

    If the machine is lost, the job begins again on another, with the files that it has written here.

    Raises:
        JobFailed: the function raised, its process ended, or machines are lost again and again.
        RunStopped: `cluster.stopped` was set.
    """
    lost, seen = 0, set[str]()
    while True:
        try:
            return _Attempt(cluster, job, tell, seen).result()
        except _Lost as error:
            lost = 1 if error.told else lost + 1
            if lost == _LOSSES:
                raise JobFailed(f"its machine was lost {lost} times in a row: {error}") from error
            tell("note", f"{error}; it goes on elsewhere")


class _Attempt:
    """A job on one machine. `seen`: names of its files on this and on earlier ones."""

    def __init__(self, cluster: Cluster, job: Job, tell: Tell, seen: set[str]) -> None:
        self._cluster, self._job, self._tell, self._seen = cluster, job, tell, seen
        self._known: dict[str, Version] = {}
        self._fed = set[str]()  # names of files that were fed
        self._printed, self._line = 0, b""
        self._told = False
        self._repeated = False  # whether a call was made twice: the second may still be under way, and write a file
        self._place = Place("", "", "")
        self._result = b"{}"
        self._status = 0

    def result(self) -> Any:
        actors, ended_well = self._cluster.actors, False
        known = None if self._job.ahead else actors.take()  # those that are there were made ahead for others
        self._actor = known or self._new_actor()
        try:
            with nullcontext() if known else actors.waiting():
                self._place = self._taken()
            self._repeated = False  # a place that is asked for again changes nothing
            if not self._job.ahead:
                self._tell("stage", f"on {self._place.machine}")
            self._send()
            self._follow()
            result = self._read_result()
            ended_well = True
            return result
        except _Lost as error:
            error.told = self._told
            raise
        finally:
            may = ended_well and self._job.renewed and not self._repeated
            if not (may and actors.give(self._actor, ahead=self._job.ahead)):
                end(self._actor, known=bool(known or self._place.folder))

    def _new_actor(self) -> Any:
        import ray

        of = self._cluster.job
        options = {"num_cpus": of.cpus, "num_gpus": of.gpus, "memory": int(of.memory * 1e9), "max_concurrency": 4}
        # A job's process is a child of its actor, which therefore never begins again by itself.
        remote: Any = ray.remote(Machine)
        return remote.options(**options, max_restarts=0).remote()

    # --- calls ------------------------------------------------------------------------------------------------------

    def _taken(self) -> Place:
        """Wait until a machine has room for the job. Raises as `_wait`, and if none can have room any more."""
        said, roomless = False, 0
        while True:
            for answer in self._answers(self._actor.place.remote, repeat=_ROOMLESS * _LOOK):
                if answer is not None:
                    return Place(*answer)
                if not said:
                    self._tell("stage", "waits for a machine with room")
                    said = True
                room = self._cluster.has_room()
                if room is not None:
                    roomless = 0 if room else roomless + 1
                if roomless == _ROOMLESS:
                    raise JobFailed("no machine of the cluster has room for it any more: see `ray status`")

    def _wait(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the actor until there is an answer. Raises _Lost, JobFailed, RunStopped or ClusterLost."""
        for answer in self._answers(method, *arguments):
            if answer is not None:
                return None if answer == () else answer
            self._cluster.check()
        raise AssertionError("it ends with an answer")

    def _answers(self, method: Callable[..., Any], *arguments: Any, repeat: float = 0.0) -> Iterator[Any]:
        """Call a method of the actor, again after each `repeat` seconds (0: `_REPEATED`) without an answer.

        Yields None every `_LOOK` seconds, and then the answer; () for None. Raises as `_wait`.
        """
        import ray
        from ray import exceptions

        asked, again, look = list[Any](), 0.0, time.monotonic() + _LOOK
        while True:
            if self._cluster.stopped.is_set():
                raise RunStopped
            if time.monotonic() > look:
                yield None
                look = time.monotonic() + _LOOK
            ready = list[Any]()
            try:
                if time.monotonic() >= again:
                    self._repeated = self._repeated or again > 0
                    asked.append(method(*arguments))
                    again = time.monotonic() + (repeat or _REPEATED)
                if ready := ray.wait(asked, timeout=1)[0]:
                    asked.remove(ready[0])
                    answer = ray.get(ready[0])
            except (exceptions.ActorUnavailableError, exceptions.RaySystemError, exceptions.ObjectLostError):
                time.sleep(1)  # the network is cut: it may come back
                again = time.monotonic() if not asked else again
                continue
            except exceptions.OutOfMemoryError as error:
                raise JobFailed(f"{self._place.machine} had too little memory for it", MEMORY) from error
            except exceptions.RayActorError as error:
                if getattr(error, "actor_init_failed", False):  # Machine() raised
                    raise JobFailed(f"a machine cannot begin it: {_last_line(error)}") from error
                raise _Lost(f"{self._place.machine or 'a machine'} was lost ({_reason(error)})") from error
            except (exceptions.NodeDiedError, exceptions.WorkerCrashedError) as error:
                raise _Lost(f"{self._place.machine or 'a machine'} was lost ({_reason(error)})") from error
            except exceptions.RayTaskError as error:
                raise JobFailed(f"on {self._place.machine}: {_reason(error.cause or error)}") from error
            except exceptions.RayError as error:
                raise JobFailed(f"{self._place.machine}: {_reason(error)}") from error
            except OSError as error:  # of the connection to Ray on this machine
                raise self._cluster.lost() from error
            if ready:
                yield () if answer is None else answer
                return

    # --- there ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        inputs = {each.digest: each for each in (self._cluster.inputs.code, *self._job.inputs)}
        with self._cluster.inputs.sending((self._place.machine, self._place.store)):
            self._send_inputs(inputs)
        for pattern in self._job.files:
            for name, path in self._files_of(pattern):
                with suppress(FileNotFoundError):  # removed since
                    self._send_file(name, path)
        job = {"function": self._job.function, "arguments": self._job.arguments(self._place)}
        self._wait(self._actor.write_file.remote, JOB, 0, json.dumps(job).encode())
        threads = max(1, int(self._cluster.job.cpus))
        self._wait(self._actor.begin.remote, self._cluster.inputs.code.digest, threads)

    def _send_inputs(self, inputs: Mapping[str, Input]) -> None:
        for digest in self._wait(self._actor.missing.remote, {digest: each.size for digest, each in inputs.items()}):
            one = inputs[digest]
            self._tell("stage", f"sending {one.what} to {self._place.machine} ({one.size[1] / 1e6:,.0f} MB)")
            for parts, _ in calls_of(one.files):
                self._wait(self._actor.write_input.remote, digest, parts)
            self._wait(self._actor.complete_input.remote, digest)

    def _send_file(self, name: str, path: Path) -> None:
        for offset, content in parts_of(path):
            if self._job.sent is not None:  # it changes small files only, which are one part
                content = self._job.sent(self._place, name, content)
            self._known[name] = tuple(self._wait(self._actor.write_file.remote, name, offset, content))
        self._seen.add(name)

    def _feed(self) -> bool:
        """Send the files of the job's `fed` that are new here, and remove there those that are here no more.

        Returns whether an answer is awaited.
        """
        # In reverse: those that a later one needs are there when it is listed.
        listed = [pair for pattern in reversed(self._job.fed) for pair in reversed([*self._files_of(pattern)])]
        found = dict(reversed(listed))
        gone = sorted(self._fed - found.keys())
        with suppress(FileNotFoundError):  # removed since: the next look finds the others
            for parts, whole in calls_of({name: path for name, path in found.items() if name not in self._fed}):
                self._wait(self._actor.feed.remote, parts, whole, gone)
                self._fed = self._fed.union(whole).difference(gone)
                gone = []
        if gone:
            self._wait(self._actor.feed.remote, [], [], gone)
            self._fed.difference_update(gone)
        fed = ((folder, last) for folder, _, last in (name.rpartition("/") for name in self._fed))
        answers = self._job.answers
        return any(folder in answers and f"{answers[folder]}/{last}" not in self._known for folder, last in fed)

    def _files_of(self, pattern: str) -> Iterator[tuple[str, Path]]:
        """Names and paths of the files here."""
        folder, _, rest = pattern.partition("/")
        for name, path in matching(self._job.folders[folder], rest):
            yield f"{folder}/{name}", path

    # --- back -------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Write here what the job writes there, until its process has ended."""
        files = [*self._job.made, *self._job.files, f"{RESULT}/*"]
        start = time.monotonic()
        while True:
            awaited = self._feed()
            begun = time.monotonic()
            patience = _PATIENCE if awaited else 0.0
            answer = self._wait(self._actor.ask.remote, self._known, files, self._printed, patience)
            for name, (version, content) in answer.changed.items():
                self._write(name, content)
                self._known[name] = tuple(version)
            if not answer.more:  # what was removed there was replaced by something that is here now
                for name in answer.removed:
                    del self._known[name]
                    self._remove(name)
            self._print(answer.printed)
            if answer.more:
                continue
            if answer.status is not None:
                self._print(b"\n" if self._line else b"")  # a line that was cut off
                self._status = answer.status
                return
            if not awaited:
                now = time.monotonic()
                seldom = min(_RAREST, _SHARE * (now - start))
                self._rest(max(self._job.pause, seldom, 3 * (now - begun)))  # large files take most of the time

    def _rest(self, seconds: float) -> None:
        """Wait, or until something was sent whose answer is awaited. Raises RunStopped."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._cluster.stopped.wait(min(left, _GLANCE) if self._job.fed else left):
                raise RunStopped
            if self._job.fed and self._feed():
                return

    def _write(self, name: str, content: bytes) -> None:
        if name == RESULT_FILE:
            self._result = content
            return
        path = self._here(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_bytes(self._job.returned(self._place, name, content))
        # Files that each attempt writes anew, such as its settings, are no progress.
        self._told = self._told or name not in self._seen
        if not any(fnmatchcase(name, pattern) for pattern in self._job.made):  # these have new names for ever
            self._seen.add(name)

    def _remove(self, name: str) -> None:
        """Remove what the run itself removes in time; whatever else is missing there stays here."""
        if any(f"/{each}/" in name for each in (CHECKPOINTS, "personal")) or name.endswith(f"/{NOW}"):
            path = self._here(name)
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()  # if it is empty

    def _here(self, name: str) -> Path:
        folder, _, rest = name.partition("/")
        return self._job.folders[folder] / rest

    def _print(self, printed: bytes) -> None:
        self._printed += len(printed)
        *lines, self._line = (self._line + printed).split(b"\n")
        for line in lines:
            self._tell("log", self._job.returned(self._place, "", line).decode(errors="replace"))

    def _read_result(self) -> Any:
        result = json.loads(self._result)
        if "value" in result:
            return result["value"]
        if "error" in result:
            where = f" (on {self._place.machine})" if KILLED in result["error"] else ""
            raise JobFailed(result["error"] + where, result["kind"])
        ended = f"was killed by signal {-self._status}" if self._status < 0 else f"ended with status {self._status}"
        raise JobFailed(f"its process on {self._place.machine} {ended}", PROCESS)


def _last_line(error: BaseException) -> str:
    """The last line of an error that has a traceback of another machine."""
    lines = [line for line in without_colour(str(error)).splitlines() if line.strip()]
    return visible(lines[-1].strip()) if lines else type(error).__name__


def _reason(error: BaseException) -> str:
    return visible(str(error).strip().partition("\n")[0]) or type(error).__name__
