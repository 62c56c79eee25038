"""The trackers of a run as one: they are given its rounds, and none of their errors ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import getLogger
from pathlib import Path
from types import TracebackType

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import as_json, read_metrics, scored
from tepal.server_app.trackers.tracker import Tracker, scalars

log = getLogger("flwr")


class Trackers:
    """The trackers of a run, which are given its rounds. Made by `open_trackers`; a context manager."""

    def __init__(self, run: Path, trackers: Mapping[str, Tracker]) -> None:
        self._run = run
        self._trackers = dict(trackers)
        self._last: RoundRecord | None = None
        self._behind: set[str] = set()  # trackers that do not show what the file contains
        self._away: set[str] = set()  # those of them whose failure was logged

    def __enter__(self) -> Trackers:
        if self._trackers:
            lines = read_metrics(self._run, most=None)
            self._last = lines[-1] if lines else None
            self._each(lambda tracker: tracker.match(lines), self._trackers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED"
        if self._behind:
            self._match_behind()
        self._each(lambda tracker: tracker.close(status), self._trackers)

    def add(self, record: RoundRecord) -> None:
        """Show a round that was written to `metrics.jsonl`."""
        if not self._trackers:
            return
        line = RoundRecord.from_line(as_json(record.to_line()))  # without NaN and infinity, as the file has it
        before, self._last = self._last, line
        if before is not None and before.round >= line.round:
            self._behind = set(self._trackers)  # a repeated round may have other values
        news = _news(before, line)
        self._each(lambda tracker: tracker.write(news), self._trackers.keys() - self._behind)
        if self._behind:
            self._match_behind(line.round)

    def _match_behind(self, last: int | None = None) -> None:
        """Show the trackers that are behind what the file contains, up to a round. They stay behind if it cannot."""
        try:
            lines = read_metrics(self._run, most=None)
        except (OSError, ValueError) as error:
            log.error("%s. The run continues, and its trackers are updated later.", error)
            return
        lines = [each for each in lines if last is None or each.round <= last]
        self._each(lambda tracker: tracker.match(lines), self._behind)
        if last is not None and (not lines or lines[-1].round < last):
            self._behind = set(self._trackers)  # the disk is full; the line is written later

    def _each(self, do: Callable[[Tracker], None], names: Iterable[str]) -> None:
        for name in sorted(names):
            try:
                do(self._trackers[name])
                self._behind.discard(name)
                self._away.discard(name)
            except Exception as error:  # no error of a tracker's package may end the run
                if name not in self._away:
                    reason = str(error) or type(error).__name__
                    log.error("%s could not be updated: %s. The run continues, and it is updated later.", name, reason)
                self._behind.add(name)
                self._away.add(name)


def _news(before: RoundRecord | None, line: RoundRecord) -> dict[int, dict[str, float]]:
    """The values of a new line, and scores of the round before that the clients reported in this one."""
    news: dict[int, dict[str, float]] = {}
    if before is not None:
        known = scalars(before)
        filled, _ = scored([before, line])
        if later := {key: value for key, value in scalars(filled).items() if key not in known}:
            news[before.round] = later
    news[line.round] = scalars(line)
    return news
