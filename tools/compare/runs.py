"""`tepal compare`: runs strategies or variants × seeds in turn, and writes the score and the transferred bytes of each.

`comparison.py` describes the files. A comparison can be stopped or killed at any time and resumed from its folder; runs
that finished are not run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock

from rich.console import Console
from rich.markup import escape

from tepal.host.superlink import RunError
from tepal.host.text import visible, visible_lines
from tepal.records.run_directory import held, make_first_free, point_latest_at, read_metrics, write_whole
from tepal.server_app.config import RunConfig, read_run_config
from tepal.tools.compare.bars import picture_of
from tepal.tools.compare.comparison import (
    CSV,
    HTML,
    LATEX,
    MARKDOWN,
    PLAN,
    RUNS_CSV,
    SVG,
    ComparedRun,
    Comparison,
    measure,
)
from tepal.tools.compare.page import comparison_page
from tepal.tools.compare.text_files import latex, markdown, runs_csv, strategies_csv
from tepal.tools.simulation.engine import RunStopped
from tepal.tools.simulation.running import remove_run
from tepal.tools.terminal import EndProgress, RoundProgress, TimeLeft

Start = Callable[[RunConfig, RoundProgress, Callable[[Path], None]], Path]
"""Runs one config with its progress; passes the run directory to its last argument when it is made, and returns it."""

_SAVING = Lock()  # runs in threads change the comparison while it is saved


def new_folder(runs: Path) -> Path:
    """Make the folder of a comparison that begins now. Raises OSError if it cannot be made."""
    runs.mkdir(parents=True, exist_ok=True)
    return make_first_free(runs, f"{datetime.now(UTC):%Y%m%d-%H%M%S}-compare")


# --- running --------------------------------------------------------------------------------------------------------


def run_all(
    comparison: Comparison,
    start: Start,
    *,
    console: Console,
    errors: Console,
    at_once: int = 1,
    stop: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the unfinished runs, and write the comparison after each (see `_Files`) and at the end.

    A run that has a checkpoint is resumed. The directory of one that has none is removed when it begins anew. If a run
    fails, the others go on; Ctrl-C ends the comparison.

    Args:
        comparison: what is run.
        start: runs one of them.
        console: where progress is shown: of one run its rounds, of several at once where each begins and how it ends.
        errors: where errors are shown.
        at_once: how many are run at the same time, each in a thread.
        stop: ends the runs of threads, which then raise RunStopped.
        clock: seconds from any time on.

    Raises RunInUse if another process runs this comparison.
    """
    with held(comparison.folder):
        comparison.save()
        files = _Files(comparison, clock)
        todo = [run for run in comparison.runs if run.outcome != "finished"]
        try:
            if at_once == 1:
                _in_turn(comparison, todo, start, files, console, errors)
            else:
                one = partial(_run_one, comparison, start=start, time_left=None, console=console, errors=errors)
                _in_threads(todo, one, files, at_once, stop)
        except KeyboardInterrupt:
            comparison.save()
        except (Exception, SystemExit) as error:
            if isinstance(error, Exception):  # after SIGTERM or SIGHUP it can be resumed
                _remove_unused(comparison.folder)
            if comparison.folder.exists():
                with suppress(OSError):  # it would hide the error
                    comparison.save()
                    write_comparison(comparison)
            raise
        write_comparison(comparison)


class _Files:
    """The files that are written after the runs of a comparison.

    All runs so far are read for them, which takes the longer the more there are. So that it takes a small share of the
    time, they are not written after each run of a long comparison.
    """

    def __init__(self, comparison: Comparison, clock: Callable[[], float]) -> None:
        self._comparison, self._clock = comparison, clock
        self._spent = self._last = self._ended = 0.0  # seconds of all writings and of the last one; when that ended

    def write(self) -> None:
        """Write them, unless the last writing took too much of the time until now."""
        begun = self._clock()
        if self._spent > _SHORT and self._last > _SHARE * (begun - self._ended):
            return
        write_comparison(self._comparison)
        self._ended = self._clock()
        self._last = self._ended - begun
        self._spent += self._last


_SHARE = 0.05  # of the time that is spent on writing
_SHORT = 30.0  # seconds of all writings so far, up to which their share may be larger


def _in_turn(
    comparison: Comparison, todo: list[ComparedRun], start: Start, files: _Files, console: Console, errors: Console
) -> None:
    rounds = [int(comparison.settings_of(run)["num-server-rounds"]) for run in todo]
    time_left = TimeLeft(len(todo), max(rounds, default=0), of_each=rounds)
    for number, run in enumerate(todo):
        ended = False
        try:
            _run_one(comparison, run, start, time_left, console, errors)
            ended = True
            files.write()
        except BaseException as error:
            later = [each for each in todo[number + 1 :] if each.outcome != "failed"]
            if not ended and run.outcome != "finished":
                run.outcome, run.reason = "stopped", ""
            elif later and not isinstance(error, Exception):  # Ctrl-C or SIGTERM between two runs
                later[0].outcome = "stopped"
            raise


def _in_threads(
    todo: list[ComparedRun],
    one: Callable[[ComparedRun], None],
    files: _Files,
    at_once: int,
    stop: Callable[[], None],
) -> None:
    pool = ThreadPoolExecutor(at_once)
    try:
        for ended in as_completed([pool.submit(one, run) for run in todo]):
            ended.result()
            files.write()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # before the others end, so that none begins in their place
        stop()
        pool.shutdown()
        unfinished = [run for run in todo if run.outcome not in ("finished", "failed")]
        if unfinished and not any(run.outcome == "stopped" for run in unfinished):
            unfinished[0].outcome, unfinished[0].reason = "stopped", ""
        raise
    finally:
        pool.shutdown()


def _run_one(
    comparison: Comparison,
    run: ComparedRun,
    start: Start,
    time_left: TimeLeft | None,
    console: Console,
    errors: Console,
) -> None:
    """Run one. `time_left`: of all runs, which are run in turn; None: they are run at the same time."""
    resumed = run.directory if run.checkpointed else None
    cut_off = None if resumed else run.directory

    def begun(directory: Path) -> None:
        run.directory, run.outcome, run.reason = directory, "running", ""
        with _SAVING:
            comparison.save()
        # comparison.json may have been changed by hand: what is removed is no other run's.
        if cut_off is not None and all(each.directory != cut_off for each in comparison.runs):
            remove_run(cut_off)
        # As for a run without a comparison: for `tepal report runs`, or to resume it.
        point_latest_at(directory, comparison.folder.parent)

    config = read_run_config(comparison.config_of(run), warn=False)  # `check` has warned
    name = f"{comparison.runs.index(run) + 1}/{len(comparison.runs)} {comparison.name(run)}"
    metrics = read_metrics(resumed) if resumed else []
    done = max((line.round for line in metrics), default=0)
    rounds = config.rounds.num_server_rounds
    if time_left is None:
        progress: RoundProgress = EndProgress(rounds, name=name, done=done, console=console)
    else:
        progress = RoundProgress(rounds, name=name, time_left=time_left, done=done, console=console)
    try:
        with progress:
            run.directory = start(config, progress, begun)
        run.outcome, run.reason = "finished", ""
    except RunStopped:
        run.outcome, run.reason = "stopped", ""
    except (RunError, OSError) as error:
        run.outcome = "failed"
        run.reason = visible((error.reason if isinstance(error, RunError) else str(error)).partition("\n")[0])
        text = f"[bold red]error:[/] {escape(visible_lines(f'{comparison.name(run)}: {error}'))}"
        errors.print(text, highlight=False, soft_wrap=True)
    with _SAVING:
        comparison.save()


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a comparison in which no run has begun."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [PLAN]:
            (folder / PLAN).unlink()
            folder.rmdir()


def write_comparison(comparison: Comparison) -> Path:
    """Write tables, picture and page; return the page's path. Raises OSError naming a file that cannot be written."""
    results = measure(comparison)
    files = (
        (CSV, strategies_csv), (RUNS_CSV, runs_csv), (MARKDOWN, markdown), (LATEX, latex), (SVG, picture_of),
        (HTML, comparison_page),
    )  # fmt: skip
    for name, text_of in files:
        write_whole(comparison.folder / name, text_of(results).encode())
    return comparison.folder / HTML
