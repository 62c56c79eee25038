"""What a run shows in the terminal: its progress round by round, a run in progress followed from its file, the final
table.

Piped into a file the same calls print plain lines, one a round, without colours or cursor movements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from tepal.records.run_directory import METRICS, MODEL, REPORT, SUMMARY, add, parse_line, total

UNKNOWN = "unknown"


def bytes_text(n: float | None) -> str:
    """Bytes for people, decimal units, three figures: 999 B, 1.00 kB, 41.2 MB, 1.05 GB. None is unknown."""
    if n is None:
        return UNKNOWN
    if abs(n) < 999.5:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        n /= 1000
        # Rounded first: 999,999 bytes are 1.00 MB, not 1000 kB.
        for decimals in (2, 1, 0):
            text = f"{n:.{decimals}f}"
            if abs(float(text)) < 10 ** (3 - decimals):
                return f"{text} {unit}"
    return f"{n:,.0f} PB"


def seconds_text(seconds: float | None) -> str:
    """A duration: 1.7 s below a minute, then 2:05 min, then 1:02:05 h. None is unknown."""
    if seconds is None:
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def step_text(seconds: float | None) -> str:
    """The duration of a local step, three figures below a second: 12.3 ms, 1.7 s. None is unknown."""
    return f"{1000 * seconds:.3g} ms" if seconds is not None and seconds < 0.9995 else seconds_text(seconds)


def score_text(value: float | None) -> str:
    """An accuracy, an error or a loss with four decimals."""
    return UNKNOWN if value is None else f"{value:.4f}"


_SCORES = ("accuracy", "rmse", "loss")


class TimeLeft:
    """How far several runs of equally many rounds are, and an estimate of when the last ends, from the rounds so far.

    A run's first round counts as its start: clients only import what they need when they are first asked. Rounds that
    a run which goes on had done before tell nothing of the time.
    """

    def __init__(self, runs: int, rounds: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._rounds, self._clock = runs, rounds, clock
        self._begun = 0
        self._starts: list[float] = []  # seconds
        self._others: list[float] = []
        self._since = clock()
        self._started = False
        self._done = 0

    def begin(self, done: int = 0) -> None:
        """The next run begins, or goes on after `done` rounds."""
        self._begun += 1
        self._since = self._clock()
        self._started, self._done = False, done

    def update(self, line: Mapping[str, Any]) -> None:
        """A round of this run has ended: a line of metrics.jsonl."""
        if line["round"] > self._done:
            now = self._clock()
            (self._others if self._started else self._starts).append(now - self._since)
            self._started, self._done, self._since = True, line["round"], now

    @property
    def rounds(self) -> int:
        """Of all runs."""
        return self._runs * self._rounds

    @property
    def rounds_done(self) -> int:
        """Of all runs; one that has ended counts whole, however it ended."""
        return max(0, self._begun - 1) * self._rounds + self._done

    @property
    def seconds(self) -> float | None:
        """From now to the end of the last run; None while too few rounds are done to tell."""
        if not self._starts or (not self._others and self._rounds > 1):
            return None
        start = sum(self._starts) / len(self._starts)
        each = sum(self._others) / len(self._others) if self._others else 0.0
        left = self._rounds - self._done
        rest = each * left if self._started else start + each * max(0, left - 1)
        rest = max(0.0, rest - (self._clock() - self._since))
        return rest + (self._runs - self._begun) * (start + each * (self._rounds - 1))


class RoundProgress:
    """Progress over the rounds of a run: a bar in a terminal, one plain line a round elsewhere.

        with RoundProgress(num_rounds) as progress:
            for line in ...:
                progress.update(line)       # a line of metrics.jsonl

    Time counts the `seconds` of the rounds, so that a run that is followed from its middle shows its own age. Of
    several runs, each has its `name`, the bar is that of all of them, and the time that is left of all is shown. `done`
    rounds of a run that goes on were there before.
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
        self._name = f"{name}: " if name else ""
        self._time_left = time_left
        self._done_before = done
        self._rounds = rounds
        self._console = console or Console()
        self._bytes: float | None = 0
        self._seconds = 0.0
        self._since = time.monotonic()
        self._said = ""  # of the last round
        # Asked of the file itself: rich also says "terminal" when FORCE_COLOR is set, as build servers do.
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
        """Say what goes on before the first round."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"{self._name}{text}")
        else:
            print(f"{self._name}{text}", file=self._console.file, flush=True)

    def update(self, line: Mapping[str, Any]) -> None:
        """Show one round that has ended."""
        now = time.monotonic()
        seconds = line.get("seconds")
        self._seconds += now - self._since if seconds is None else seconds
        self._since = now
        if self._time_left is not None:
            self._time_left.update(line)
        self._bytes = add(self._bytes, total([line], "bytes_down"), total([line], "bytes_up"))

        where = f"{self._name}round {line['round']}/{self._rounds}"
        phase = line.get("phase") or ("initial model" if line["round"] == 0 else "")
        scores = [f"{key} {score_text(line[key])}" for key in _SCORES if line.get(key) is not None]
        if not scores:
            before = ((key, line.get(f"received_{key}")) for key in ("accuracy", "rmse"))
            scores = [f"{key} before {score_text(score)}" for key, score in before if score is not None]
        transferred = f"{bytes_text(self._bytes)} transferred"
        self._said = "  ".join(filter(None, (where, phase, *scores, transferred, seconds_text(self._seconds))))
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=line["round"] if self._time_left is None else self._time_left.rounds_done,
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
        """Seconds of the rounds that have ended, and of the one that is under way."""
        return self._seconds + time.monotonic() - self._since

    @property
    def left(self) -> str:
        """What is left of all runs, in words; "" for a run alone, and while there is no telling."""
        seconds = self._time_left.seconds if self._time_left is not None else None
        return "" if seconds is None else f"{seconds_text(seconds)} left"


class _Elapsed(ProgressColumn):
    def __init__(self, progress: RoundProgress) -> None:
        super().__init__()
        self._of = progress

    def render(self, task: Task) -> Text:
        done = task.total is not None and task.completed >= task.total
        elapsed = seconds_text(self._of._seconds if done else self._of.elapsed)
        return Text(elapsed if done else self._of.left or elapsed, style="dim")


def _trouble(line: Mapping[str, Any]) -> list[str]:
    found = []
    if refused := line.get("refused"):
        by_reason: dict[str, list[str]] = {}
        for reply in refused:
            by_reason.setdefault(str(reply.get("reason")), []).append(str(reply.get("client")))
        reasons = "; ".join(f"{', '.join(clients)}: {reason}" for reason, clients in by_reason.items())
        found.append(f"refused {len(refused)} ({reasons})")
    if lost := line.get("lost"):
        found.append(f"no reply from {_clients(lost)}")
    if late := line.get("late"):
        found.append(f"late and dropped: {_clients(late)}")
    if left_out := line.get("left_out"):
        found.append(f"left out: {_clients(left_out)}")
    found += [f"{note.get('client')}: {note.get('reason')}" for note in line.get("notes") or ()]
    return found


def _clients(replies: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(reply.get("client")) for reply in replies)


def follow_metrics(path: Path, stop: Callable[[], bool], *, poll: float = 0.2) -> Iterator[dict[str, Any]]:
    """Yield the rounds of a `metrics.jsonl` as they are written, from the first; the file need not exist yet.

    Ends once `stop()` is true, after the lines that were written until then. A line that is still being written is
    waited for. Looks every `poll` seconds. Raises ValueError at a complete line that is not a round.
    """
    path = Path(path)
    read = 0  # bytes up to the end of the last complete line
    while True:
        # Asked before reading: what was written before the run said that it had ended is still read.
        last = stop()
        try:
            with path.open("rb") as file:
                file.seek(0, 2)
                if file.tell() < read:
                    read = 0  # another file under the same name
                file.seek(read)
                fresh = file.read()
        except FileNotFoundError:
            fresh = b""
        complete = fresh[: fresh.rfind(b"\n") + 1]
        read += len(complete)
        for line in complete.splitlines():
            if line.strip():
                try:
                    parsed = parse_line(line)
                except ValueError as error:
                    raise ValueError(f"{path}: a line is {error}: {line[:80]!r}") from error
                yield parsed
        if last:
            return
        time.sleep(poll)


def final_table(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], run: Path | None = None) -> Group:
    """This run's bytes beside "FedAvg, same rounds", its scores, and where the results in directory `run` lie.

    For `console.print(…, soft_wrap=True)`: long paths then stay in one piece. Without it they are folded, not cut.
    """
    down, up, fedavg = summary.get("bytes_down"), summary.get("bytes_up"), total(metrics, "bytes_fedavg")
    fedavg_down = total(metrics, "bytes_fedavg_down")
    fedavg_up = None if fedavg is None or fedavg_down is None else fedavg - fedavg_down

    rounds = summary.get("rounds")
    table = Table(
        title=Text(" · ".join(str(summary[key]) for key in ("strategy", "model") if summary.get(key)), style="bold"),
        caption=Text(f"{rounds} rounds, {seconds_text(summary.get('seconds'))}, payload bytes of all clients"),
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
    for key in ("accuracy" if summary.get("rmse") is None else "rmse", "loss"):
        table.add_row(key, score_text(summary.get(key)))
    table.add_row("refused replies", str(summary.get("refused_replies", UNKNOWN)))
    if run is None:
        return Group(table)
    lines = [f"Results in {run}"]
    for name, what in ((REPORT, "  (open it in a browser)"), (SUMMARY, ""), (METRICS, ""), (MODEL, "")):
        if (Path(run) / name).exists():
            lines.append(f"  {Path(run) / name}{what}")
    return Group(table, *(Text(line) for line in lines))
