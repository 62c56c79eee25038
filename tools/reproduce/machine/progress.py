"""How far an experiment is: the rounds of the trials in progress, and about how long the others take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tepal.records.run_directory import NOW, read_json, read_metrics
from tepal.server_app.config import defaults
from tepal.tools.reproduce.experiment import Trial

SECONDS = 60.0
"""Between two lines on runs in progress, and between two estimates."""
_LOOK = 2.0  # seconds between two looks for the first rounds
_ENOUGH = 2  # rounds of a run from which its duration is estimated
_ROUNDS = "num-server-rounds"


class TimeLeft:
    """An estimate of the time until all trials are computed, by the time per round of those that are.

    A trial is estimated by those of the same strategy, if any is computed, else by all. One that all others need, as a
    pretraining, is like none of them, and is not used.

    Args:
        trials: of the experiment.
        computed: trial → seconds that it took.
        left: names of the trials that are to be computed.
        at_once: number of trials that are computed at the same time.
    """

    def __init__(
        self, trials: Sequence[Trial], computed: Mapping[str, float], left: Sequence[str], at_once: int
    ) -> None:
        self._trials = {trial.name: trial for trial in trials}
        self._computed, self._left, self._at_once = dict(computed), set(left), at_once
        self._begun: dict[str, float] = {}
        self._unlike = set.intersection(*({trial.name, *trial.needs} for trial in trials)) if len(trials) > 1 else set()

    @property
    def started(self) -> bool:
        """Whether a trial is computed, or the duration of one in progress is known."""
        return bool(self._computed or self._begun)

    @property
    def known(self) -> bool:
        """Whether there is anything to estimate by."""
        return bool(self._durations())

    def _durations(self) -> dict[str, float]:
        """Seconds of the trials to estimate by: of those that are computed, else of those in progress."""
        computed, begun = (
            {name: seconds for name, seconds in [*of.items()] if name not in self._unlike}  # another thread adds
            for of in (self._computed, self._begun)
        )
        return computed or begun

    def waits_for(self, name: str) -> bool:
        """Whether a trial is still to be computed."""
        return name in self._left

    def begun(self, name: str, seconds_per_round: float) -> None:
        """Take a trial in progress into account, until one is computed."""
        self._begun[name] = seconds_per_round * _rounds(self._trials[name])

    def ended(self, name: str, seconds: float | None) -> None:
        """Note that a trial was computed, or was left out (None)."""
        self._left.discard(name)
        if seconds is not None:
            self._computed[name] = seconds

    def seconds(self) -> float | None:
        """The estimate, in seconds; None if it is not known."""
        durations = self._durations()
        if not durations or not self._left:
            return None
        by_strategy: dict[str, list[str]] = {}
        for name in durations:
            by_strategy.setdefault(_strategy(self._trials[name]), []).append(name)
        left = [self._trials[name] for name in self._left]
        whole = sum(
            _rounds(trial) * self._per_round(durations, by_strategy.get(_strategy(trial), list(durations)))
            for trial in left
        )
        return whole / min(self._at_once, len(left))

    def _per_round(self, durations: Mapping[str, float], names: Sequence[str]) -> float:
        return sum(durations[name] for name in names) / sum(_rounds(self._trials[name]) for name in names)

    def text(self) -> str:
        """The estimate as text, such as "about 3.4 hours left (212 trials)"; "" if not known, or below a minute."""
        seconds, count = self.seconds(), len(self._left)
        if seconds is None or seconds < 60:
            return ""
        duration = f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
        return f"about {duration} left ({count} trial{'s' if count > 1 else ''})"


def _rounds(trial: Trial) -> int:
    """Rounds of a trial that trains; 1 for others."""
    config: Mapping[str, Any] | None = trial.options.get("config")
    return 1 if config is None else int(config.get(_ROUNDS, defaults()[_ROUNDS]))


def _strategy(trial: Trial) -> str:
    return str(trial.options.get("config", {}).get("strategy", ""))


class Progress:
    """Logs the rounds of runs in progress and the time left, while it is entered.

    Args:
        place: the experiment's folder.
        left: the estimate.
        log: called with each line.
    """

    def __init__(self, place: Path, left: TimeLeft, log: Callable[[str], None]) -> None:
        self._place, self._left, self._log = place, left, log
        self._said = -math.inf
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._say()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def ended(self, name: str, seconds: float | None) -> None:
        """Note that a trial was computed, or was left out (None), and log the time left, at intervals."""
        with self._lock:
            self._left.ended(name, seconds)
            self._say()

    def _say(self) -> None:
        if time.monotonic() - self._said >= SECONDS and (text := self._left.text()):
            self._said = time.monotonic()
            self._log(f"   {text}")

    def _watch(self) -> None:
        while not self._left.started and not self._over.wait(min(_LOOK, SECONDS)):
            self._estimate()
        before: dict[str, str] = {}
        while not self._over.wait(SECONDS):
            if not self._left.known:  # all that is known is how long a pretraining takes
                self._estimate()
            runs = {path.parents[2].name: read_json(path) for path in self._files()}
            now = {name: f"{name} at round {of['round']} of {of['rounds']}" for name, of in runs.items() if of}
            if news := [text for name, text in now.items() if name in before and text != before[name]]:
                self._log(f"   {', '.join(news)}")
            before = now

    def _estimate(self) -> None:
        for file in self._files():
            rounds = [line.seconds for line in read_metrics(file.parent) if line.round and line.seconds]
            if len(rounds) >= _ENOUGH:
                with self._lock:
                    self._left.begun(file.parents[2].name, sum(rounds) / len(rounds))
                    self._say()

    def _files(self) -> list[Path]:
        """Of the newest run of each trial that is still to be computed. What a cluster sends has no link to it."""
        found = (file for file in sorted(self._place.glob(f"runs/*/runs/*/{NOW}")) if not file.parent.is_symlink())
        newest = {file.parents[2].name: file for file in found}
        return [file for name, file in newest.items() if self._left.waits_for(name)]
