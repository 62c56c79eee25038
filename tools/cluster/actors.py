"""The actors of a command that have no job at the moment: the next job needs no new actor and no new process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import Any, NamedTuple

from tepal.host.processes import signals_postponed

_IDLE = 10.0  # seconds after which an actor that has no job is ended, so that others can have its cores
_CHECKING = 60.0  # the same of one that was made ahead of its job: the command still checks its settings
_ANSWER = 5.0  # seconds until an actor without a job must answer
_ENDING = 10.0  # seconds until an actor has ended its job's process
_STARTING = 1.0  # the same of one that may not have begun, and has no process yet


class _Idle(NamedTuple):
    actor: Any
    timer: Timer
    """Ends it."""
    ahead: bool
    """It was made ahead of its job."""


class Actors:
    """Actors whose jobs have ended well, and their processes, which wait for another job."""

    def __init__(self) -> None:
        self._idle, self._timers = list[_Idle](), list[Timer]()
        self._waiting, self._closed, self._changing = 0, False, Lock()

    def take(self) -> Any:
        """One that answers, for a job; None if there is none."""
        import ray

        while (actor := self._taken()) is not None:
            with suppress(Exception):  # Ray's are of many kinds: its machine is lost, or the network is cut
                ray.get(actor.place.remote(), timeout=_ANSWER)
                return actor
            end(actor)
        return None

    def give(self, actor: Any, *, ahead: bool = False) -> bool:
        """Keep one for the next job, for a short time. False if it cannot do one, or a new actor waits for cores.

        `ahead`: the job that will use it has not begun. It is kept for longer, and also while a new actor waits.
        """
        import ray

        try:
            able = ray.get(actor.renew.remote(), timeout=_ENDING)
        except Exception:  # as above
            return False
        with self._changing:
            if not able or self._closed or (self._waiting and not ahead):
                return False
            timer = Timer(_CHECKING if ahead else _IDLE, self._release, [actor])
            timer.daemon = True
            self._idle.append(_Idle(actor, timer, ahead))
            self._timers = [timer, *(each for each in self._timers if each.is_alive())]
            timer.start()
        return True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which a new actor waits for cores: none are kept by those that have no job, and had one."""
        with self._changing:
            self._waiting += 1
            over = [idle for idle in self._idle if not idle.ahead]
            self._idle = [idle for idle in self._idle if idle.ahead]
        try:
            for idle in over:
                idle.timer.cancel()
                end(idle.actor)
            yield
        finally:
            with self._changing:
                self._waiting -= 1

    def close(self) -> None:
        """End all that have no job, and keep no others."""
        with self._changing:
            self._closed, idle, self._idle = True, self._idle, []
        for timer in self._timers:
            timer.cancel()
        if idle:
            import ray

            with suppress(Exception):
                ray.wait([each.actor.stop.remote() for each in idle], num_returns=len(idle), timeout=_ENDING)
            for each in idle:
                with suppress(Exception):
                    ray.kill(each.actor)
        for timer in self._timers:  # one may just be ending its actor
            timer.join(2 * _ENDING)

    def _taken(self) -> Any:
        with self._changing:
            idle = self._idle.pop() if self._idle else None
        if idle is None:
            return None
        idle.timer.cancel()
        return idle.actor

    def _release(self, actor: Any) -> None:
        """End one that has had no job for too long."""
        with self._changing:
            before = len(self._idle)
            self._idle = [idle for idle in self._idle if idle.actor is not actor]
            if len(self._idle) == before:
                return
        end(actor)


@signals_postponed()  # a second Ctrl-C would leave the files
def end(actor: Any, *, known: bool = True) -> None:
    """End an actor, and first its job's process and files.

    `known`: it has answered. One that has not may be waiting for a machine with room, or have made its folder just now.
    """
    import ray

    with suppress(Exception):
        ray.get(actor.stop.remote(), timeout=_ENDING if known else _STARTING)
    with suppress(Exception):
        ray.kill(actor)
