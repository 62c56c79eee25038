"""A module in the place of `ray`: actors are objects of this process, and a machine or the network can be lost."""

import itertools
import sys
import types
from types import SimpleNamespace

from tepal.tools.cluster.job import Job


class RayError(Exception):
    """As Ray's exceptions."""


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class NodeDiedError(RayError):
    pass


class WorkerCrashedError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


class RaySystemError(RayError):
    pass


class ObjectLostError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__("in a traceback of many lines")
        self.cause = cause


class Ref:
    """A call's answer; `lost`: it never comes."""

    def __init__(self, call, lost=False):
        self.value, self.error, self.lost = None, None, lost
        try:
            self.value = call()
        except RayError as error:
            self.error = error
        except Exception as error:
            self.error = RayTaskError(error)


class Actor:
    """Calls an object in this process; `fate` is asked before each call, and may raise or return "lost"."""

    def __init__(self, made, fate, number):
        self.made, self.number, self.killed, self.calls = made, number, False, []
        self._fate = fate

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)

            def done():
                if self.killed:
                    raise RayActorError("The actor died.\nMore on it.")
                if self.made is None:
                    raise RayActorError("The actor died.\nMore on it.")
                fate = self._fate(self, name, arguments)
                if fate == "unavailable":
                    raise ActorUnavailableError("The actor is unavailable")
                value = getattr(self.made, name)(*arguments)
                if fate == "died":
                    self.die()
                    raise RayActorError("The actor died.\nMore on it.")
                if fate == "lost after":
                    lost.append(True)
                if isinstance(fate, Exception):
                    raise fate
                return value

            lost = []
            ref = Ref(done)
            ref.lost = bool(lost)
            return ref

        return SimpleNamespace(remote=call)

    def die(self):
        """As if the machine was lost, with the actor and the job's process."""
        if not self.killed:
            self.killed = True
            self.made.stop()


def fake(monkeypatch, fate=lambda actor, name, arguments: None):
    """Put the module in the place of `ray`; it has the list `actors`, and `options` of each."""
    ray, exceptions = types.ModuleType("ray"), types.ModuleType("ray.exceptions")
    for kind in (RayError, *RayError.__subclasses__(), *RayActorError.__subclasses__()):
        setattr(exceptions, kind.__name__, kind)
    ray.exceptions, ray.actors, ray.options, ray.nodes = exceptions, [], [], list
    numbers = itertools.count()

    def remote(made):
        def options(**given):
            ray.options.append(given)
            return SimpleNamespace(remote=start)

        def start():
            ray.actors.append(Actor(made(), fate, next(numbers)))
            return ray.actors[-1]

        return SimpleNamespace(options=options)

    def wait(refs, timeout):
        lost = [ref for ref in refs if ref.lost]
        return [ref for ref in refs if not ref.lost], lost

    def get(ref, timeout=None):
        if ref.error is not None:
            raise ref.error
        return ref.value

    def kill(actor):
        actor.calls.append("kill")
        actor.killed = True

    ray.remote, ray.wait, ray.get, ray.kill = remote, wait, get, kill
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    return ray


def a_job(function, *, tmp_path=None, inputs=(), **arguments):
    """A job of a function that the fixture `code` sends."""
    folders = {"trial": tmp_path / "trial"} if tmp_path else {}
    return Job(
        function=f"jobs:{function}", arguments=lambda place: arguments, inputs=inputs, folders=folders,
        files=("trial/*",) if tmp_path else (), renewed=True, pause=0.01,
    )  # fmt: skip
