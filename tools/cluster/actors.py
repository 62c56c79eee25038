"""The actors of a command that have no job at the moment: the next job needs no new actor and no new process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import Any

_IDLE = 10.0  # seconds after which an actor that has no job is ended, so that others can have its cores
_ANSWER = 5.0  # seconds until an actor without a job must answer
_ENDING = 10.0  # seconds until an actor has ended its job's process


class Actors:
    """Actors whose jobs have ended well, and their processes, which wait for another job."""

    def __init__(self) -> None:
        self._idle, self._timers = list[tuple[Any, Timer | None]](), list[Timer]()  # no timer: made ahead of its job
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

        `ahead`: its own job comes later, so it is kept until then, also while a new actor waits.
        """
        import ray

        try:
            able = ray.get(actor.renew.remote(), timeout=_ENDING)
        except Exception:  # as above
            return False
        with self._changing:
            if not able or self._closed or (self._waiting and not ahead):
                return False
            if ahead:
                self._idle.append((actor, None))
                return True
            timer = Timer(_IDLE, self._release, [actor])
            timer.daemon = True
            self._idle.append((actor, timer))
            self._timers = [timer, *(each for each in self._timers if each.is_alive())]
            timer.start()
        return True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which a new actor waits for cores: none are kept by those that have no job."""
        with self._changing:
            self._waiting += 1
            idle = [(actor, timer) for actor, timer in self._idle if timer is not None]
            self._idle = [pair for pair in self._idle if pair[1] is None]
        try:
            for actor, timer in idle:
                timer.cancel()
                end(actor)
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
                ray.wait([actor.stop.remote() for actor, _ in idle], num_returns=len(idle), timeout=_ENDING)
            for actor, _ in idle:
                with suppress(Exception):
                    ray.kill(actor)
        for timer in self._timers:  # one may just be ending its actor
            timer.join(2 * _ENDING)

    def _taken(self) -> Any:
        with self._changing:
            actor, timer = self._idle.pop() if self._idle else (None, None)
        if timer is not None:
            timer.cancel()
        return actor

    def _release(self, actor: Any) -> None:
        """End one that has had no job for too long."""
        with self._changing:
            before = len(self._idle)
            self._idle = [pair for pair in self._idle if pair[0] is not actor]
            if len(self._idle) == before:
                return
        end(actor)


def end(actor: Any, *, stop: bool = True) -> None:
    """End an actor, and with `stop` first its job's process and files."""
    import ray

    if stop:
        with suppress(Exception):
            ray.get(actor.stop.remote(), timeout=_ENDING)
    with suppress(Exception):
        ray.kill(actor)
