"""What a run shows in the terminal: the progress over its rounds, read from its file as it grows, and the final table.

Into a pipe or a file the same calls print one plain line per round, without colours or cursor movements. Text of
clients and of run directories is shown with its control characters visible: it cannot forge lines or move the cursor.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from tepal.host.text import LONGEST_NAME, LONGEST_TEXT, visible
from tepal.records.columns import UNKNOWN, bytes_text, score_text, seconds_text
from tepal.records.round_record import Incident, RoundRecord
from tepal.records.run_directory import METRICS, MODEL, REPORT, SUMMARY, add, ending, parse_line, savings, total
from tepal.report.remarks import remarks

_SCORES = ("accuracy", "rmse", "loss")
_MOST_NAMES = 20  # clients that are named, of one kind of incident in a round
_MOST_NOTES = 10  # notes, and reasons, that are shown of a round
_LONGEST_REASON = 300  # characters


def shown(text: object, longest: int = LONGEST_TEXT, style: str = "") -> Text:
    """Text of a run for a cell or a line of the terminal: on one line, every character visible, of bounded length."""
    return Text(visible(text, longest), style=style)


def indented(text: object) -> Text:
    """A text below the line that it belongs to."""
    return Text("  ").append_text(shown(text))


class TimeLeft:
    """The progress of several runs, and an estimate of the time until the last one ends.

    A run's first round is counted as its start, because clients import what they need when they are first asked. The
    rounds that a resumed run had done before are not used for the estimate.

    Args:
        runs: The number of runs.
        rounds: The rounds of each.
        of_each: The rounds of each run in turn, where they differ.
        clock: Seconds from any time on.
    """

    def __init__(
        self, runs: int, rounds: int, *, of_each: Sequence[int] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._each = list(of_each) or [rounds] * runs
        self._clock = clock
        self._begun = 0
        self._starts: list[float] = []  # seconds
        self._others: list[float] = []
        self._since = clock()
        self._started = False
        self._done = 0

    def begin(self, done: int = 0) -> None:
        """Note that the next run begins, or is resumed after `done` rounds."""
        self._begun += 1
        self._since = self._clock()
        self._started, self._done = False, done

    def update(self, line: RoundRecord) -> None:
        """Note that a round of this run has ended."""
        if line.round > self._done:
            now = self._clock()
            (self._others if self._started else self._starts).append(now - self._since)
            self._started, self._done, self._since = True, line.round, now

    @property
    def rounds(self) -> int:
        """The number of rounds of all runs."""
        return sum(self._each)

    @property
    def rounds_done(self) -> int:
        """The number of rounds done of all runs; all rounds of a run that has ended count, however it ended."""
        return sum(self._each[: max(0, self._begun - 1)]) + self._done

    @property
    def seconds(self) -> float | None:
        """Seconds from now to the end of the last run; None while too few rounds are done for an estimate."""
        current = self._each[self._begun - 1] if self._begun else 0
        if not self._starts or (not self._others and current > 1):
            return None
        start = sum(self._starts) / len(self._starts)
        each = sum(self._others) / len(self._others) if self._others else 0.0
        left = current - self._done
        rest = each * left if self._started else start + each * max(0, left - 1)
        rest = max(0.0, rest - (self._clock() - self._since))
        return rest + sum(start + each * max(0, rounds - 1) for rounds in self._each[self._begun :])


class RoundProgress:
    """Progress over the rounds of a run: a bar in a terminal, one plain line per round elsewhere.

        with RoundProgress(num_rounds) as progress:
            for line in follow_metrics(path, stop):
                progress.update(line)

    The time shown is the sum of the rounds' `seconds`, so it is right for a run that is followed from its middle, too.

    Args:
        rounds: The number of rounds of the run.
        name: The run's name, where it is one of several.
        time_left: The progress of several runs; the bar and the remaining time are then those of all of them.
        done: The number of rounds that a resumed run had done before.
        console: Where to write.
    """

    def __init__(
        self,
        rounds: int,
        *,
        name: str = "",
        time_left: TimeLeft | None = None,
        done: int = 0,
        console: Console | None = None,
    ) -> None:
        self._name = f"{visible(name, LONGEST_NAME)}: " if name else ""
        self._time_left = time_left
        self._done_before = done
        self._rounds = rounds
        self._console = console or Console()
        self._bytes: float | None = 0
        self._seconds = 0.0
        self._since = time.monotonic()
        self._said = ""  # the last round's line
        # Asked of the file itself: rich also reports a terminal if FORCE_COLOR is set, as it is on build servers.
        isatty = getattr(self._console.file, "isatty", lambda: False)
        self._progress: Progress | None = None
        if isatty() and not self._console.is_dumb_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}", markup=False),
                _Elapsed(self),
                console=self._console,
                expand=True,
                transient=time_left is not None,  # the next run's bar goes on where this one's ends
            )
            total = rounds if time_left is None else time_left.rounds
            self._task = self._progress.add_task(f"{self._name}round {done}/{rounds}", total=total, figures="")

    def __enter__(self) -> RoundProgress:
        self._since = time.monotonic()
        if self._time_left is not None:
            self._time_left.begin(self._done_before)
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            if self._time_left is not None and self._said:
                self._console.print(self._said, markup=False, highlight=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        """Show what is done before the first round."""
        text = visible(text)
        if self._progress is not None:
            self._progress.update(self._task, description=f"{self._name}{text}")
        else:
            print(f"{self._name}{text}", file=self._console.file, flush=True)

    def note(self, text: str) -> None:
        """Show something that happened, in a line that stays."""
        said = f"{self._name}{visible(text)}"
        if self._progress is not None:
            self._progress.print(Text(said, style="yellow"))
        else:
            print(said, file=self._console.file, flush=True)

    def update(self, line: RoundRecord) -> None:
        """Show one round that has ended."""
        now = time.monotonic()
        self._seconds += now - self._since if line.seconds is None else line.seconds
        self._since = now
        if self._time_left is not None:
            self._time_left.update(line)
        self._bytes = add(self._bytes, total([line], "bytes_down"), total([line], "bytes_up"))

        where = f"{self._name}round {line.round}/{self._rounds}"
        phase = visible(line.phase or ("initial model" if line.round == 0 else ""), LONGEST_NAME)
        scores = [f"{key} {score_text(score)}" for key in _SCORES if (score := line.value(key)) is not None]
        if not scores:
            before = (("accuracy", line.received_accuracy), ("rmse", line.received_rmse))
            scores = [f"{key} before {score_text(score)}" for key, score in before if score is not None]
        transferred = f"{bytes_text(self._bytes)} transferred"
        self._said = "  ".join(filter(None, (where, phase, *scores, transferred, seconds_text(self._seconds))))
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=line.round if self._time_left is None else self._time_left.rounds_done,
                description=f"{where} {phase}".strip(),
                # With the name there is no room for both.
                figures="  ".join([*scores[:1], transferred][: 1 if self._name else 2]),
            )
            for text in _trouble(line):
                self._progress.print(Text(f"{where}: {text}", style="yellow"))
        else:
            said = "  ".join(filter(None, (self._said, self.left, *_trouble(line))))
            print(said, file=self._console.file, flush=True)

    @property
    def elapsed(self) -> float:
        """Seconds of the rounds that have ended and of the current one."""
        return self._seconds + time.monotonic() - self._since

    @property
    def left(self) -> str:
        """The remaining time of all runs, as text; "" for a single run, and while it cannot be estimated."""
        seconds = self._time_left.seconds if self._time_left is not None else None
        return "" if seconds is None else f"{seconds_text(seconds)} left"


class EndProgress(RoundProgress):
    """Progress of one of several runs at the same time: what is done before its first round, and its last round."""

    def __init__(self, rounds: int, *, name: str = "", done: int = 0, console: Console | None = None) -> None:
        super().__init__(rounds, name=name, done=done, console=Console(file=io.StringIO()))
        self._shown = console or Console()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._said:
            self._shown.print(self._said, markup=False, highlight=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        self.note(text)

    def update(self, line: RoundRecord) -> None:
        super().update(line)
        for text in _trouble(line):
            self.note(f"round {line.round}/{self._rounds}: {text}")

    def note(self, text: str) -> None:
        self._shown.print(f"{self._name}{visible(text)}", markup=False, highlight=False, soft_wrap=True)


class _Elapsed(ProgressColumn):
    def __init__(self, progress: RoundProgress) -> None:
        super().__init__()
        self._of = progress

    def render(self, task: Task) -> Text:
        done = task.total is not None and task.completed >= task.total
        elapsed = seconds_text(self._of._seconds if done else self._of.elapsed)
        return Text(elapsed if done else self._of.left or elapsed, style="dim")


def _trouble(line: RoundRecord) -> list[str]:
    found = []
    if line.refused:
        by_reason: dict[str, list[str]] = {}
        for reply in line.refused:
            reason = visible(reply.get("reason") or "no reason given", _LONGEST_REASON)
            by_reason.setdefault(reason, []).append(_client(reply))
        reasons = [f"{_names(clients)}: {reason}" for reason, clients in by_reason.items()]
        found.append(f"refused {len(line.refused)} ({'; '.join(_some(reasons, _MOST_NOTES))})")
    named = (("no reply from", line.lost), ("late and dropped:", line.late), ("left out:", line.left_out))
    found += [f"{what} {_clients(incidents)}" for what, incidents in named if incidents]
    notes = [f"{_client(note)}: {visible(note.get('reason') or '', _LONGEST_REASON)}" for note in line.notes]
    return found + _some(notes, _MOST_NOTES)


def _clients(incidents: Sequence[Incident]) -> str:
    return _names([_client(incident) for incident in incidents])


def _client(incident: Incident) -> str:
    return visible(incident.get("client") or "", LONGEST_NAME)


def _names(clients: Sequence[str]) -> str:
    return ", ".join(_some(clients, _MOST_NAMES))


def _some(texts: Sequence[str], most: int) -> list[str]:
    """The first texts, and how many more there are."""
    more = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
    return [*texts[:most], *more]


def follow_metrics(path: Path, stop: Callable[[], bool], *, poll: float = 0.2) -> Iterator[RoundRecord]:
    """Yield the rounds of a `metrics.jsonl` as they are written, from the first; the file need not exist yet.

    A line that is still being written is waited for.

    Args:
        path: The file.
        stop: Asked before each reading; when it returns True, the lines written until then are the last.
        poll: Seconds between two readings.

    Raises ValueError at a complete line that is not a round.
    """
    path = Path(path)
    read = 0  # bytes up to the end of the last complete line
    known: int | None = None  # the file's inode
    told: set[bytes] = set()
    while True:
        last = stop()
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < read or status.st_ino != known:
                    read, known = 0, status.st_ino  # the file was replaced, as by a run that is resumed
                file.seek(read)
                fresh = file.read()
        except FileNotFoundError:
            fresh = b""
        complete = fresh[: fresh.rfind(b"\n") + 1]
        read += len(complete)
        for line in complete.splitlines():
            if line.strip() and line not in told:
                told.add(line)
                try:
                    parsed = parse_line(line)
                except ValueError as error:
                    raise ValueError(f"{path}: a line cannot be read, {error}: {line[:80]!r}") from error
                yield parsed
        if last:
            return
        time.sleep(poll)


def final_table(summary: Mapping[str, Any], metrics: Sequence[RoundRecord], run: Path | None = None) -> Group:
    """Return a table of this run's bytes compared with FedAvg's, and its scores, for a console.

    Print it with `soft_wrap=True`, so that long paths are not broken.

    Args:
        summary: The content of `summary.json`.
        metrics: The rounds.
        run: The run directory, whose files are then listed below the table.
    """
    down, up, fedavg = summary.get("bytes_down"), summary.get("bytes_up"), total(metrics, "bytes_fedavg")
    fedavg_down = total(metrics, "bytes_fedavg_down")
    fedavg_up = None if fedavg is None or fedavg_down is None else fedavg - fedavg_down

    rounds = summary.get("rounds")
    table = Table(
        title=shown(" · ".join(str(summary[key]) for key in ("strategy", "model") if summary.get(key)), style="bold"),
        caption=shown(f"{rounds} rounds, {seconds_text(summary.get('seconds'))}, payload bytes of all clients"),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("this run", "FedAvg, same rounds", "ratio"):
        table.add_column(heading, justify="right")
    for name, ours, theirs in (
        ("bytes down", down, fedavg_down),
        ("bytes up", up, fedavg_up),
        ("bytes in total", add(down, up), fedavg),
    ):
        ratio = f"{ours / theirs:.4f}" if ours is not None and theirs else "–"
        table.add_row(name, bytes_text(ours), "–" if theirs is None else bytes_text(theirs), ratio)
    saved = savings(add(down, up), summary.get("bytes_plain"), fedavg)
    if saved is not None:
        table.add_row("  by the strategy", "", "", f"{saved[0]:.4f}")
        table.add_row("  by the encoding", "", "", f"{saved[1]:.4f}")
    for key in ("accuracy" if summary.get("rmse") is None else "rmse", "loss"):
        table.add_row(key, score_text(summary.get(key)))
    table.add_row("refused replies", str(summary.get("refused_replies", UNKNOWN)))
    remarked = [shown(f"{said}.")] if (said := ending(summary)) else []
    remarked += [shown(f"Note: {remark}.", style="yellow") for remark in remarks(metrics)]
    if run is None:
        return Group(table, *remarked)
    lines = [*remarked, shown(f"Results in {run}")]
    for name, what in ((REPORT, "  (open it in a browser)"), (SUMMARY, ""), (METRICS, ""), (MODEL, "")):
        if (Path(run) / name).exists():
            lines.append(indented(f"{Path(run) / name}{what}"))
    return Group(table, *lines)
