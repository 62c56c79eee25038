"""Run the trials of a search in turn, and write its files after each.

    search.json      what is searched, and the app's run config: a search goes on only with the same
    trials.journal   the trials as Optuna keeps them, from which a search is resumed
    trials.csv       one line per trial; this and the following can be written again from the journal
    found.toml       the best values of each variant
    <start>-<strategy>/ the run directory of each trial

A search can be stopped or killed at any time. A trial that was cut off is run again, from its beginning.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path

from tepal.host.superlink import RunError
from tepal.host.text import visible
from tepal.host.toml import Value
from tepal.records.run_directory import held, read_metrics, read_summary, write_whole
from tepal.server_app.config import ConfigError, defaults
from tepal.server_app.config.client_tables import PREFIX
from tepal.tools.cluster.engine import ClusterFailed
from tepal.tools.search.plan import USUAL, SearchPlan
from tepal.tools.search.results import FOUND, TRIALS, Found, found_toml, trials_csv
from tepal.tools.search.study import Trial, VariantStudy
from tepal.tools.simulation.running import remove_run

PLAN, JOURNAL = "search.json", "trials.journal"

Objective = Callable[[str, Mapping[str, Value], Callable[[Path], None]], float]
"""Runs a trial, given its name and run config, and returns its score. It passes the run directory to its last argument
when that is made. Raises RunError, OSError or ConfigError if the run fails."""


def open_search(plan: SearchPlan, usual: Mapping[str, Value], folder: Path) -> None:
    """Make the folder of a search, or check that it has the same search. Raises ConfigError if it has another one.

    `usual`: run config of the app, which the plan's values change.
    """
    file, now = folder / PLAN, plan.to_json(usual)
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, now.encode())
        return
    try:
        before, given = json.loads(file.read_text(encoding="utf-8")), json.loads(now)
        taken = given.pop(USUAL)
        changed = [key for key, value in given.items() if before.get(key) != value]
        # One of an earlier version does not say what it took from the app.
        differing = [] if changed else list(_differing(before.get(USUAL, taken), taken))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({visible(error)}): take it from a copy, or use a new folder") from error
    if changed:
        raise ConfigError(
            f"{folder} has another search: {', '.join(changed)} differ from the file's. A search goes on only as it "
            "began: undo the changes, or start a new one with --folder"
        )
    if differing:
        raise ConfigError(
            f"{folder} has a search with other values of the app's run config: {', '.join(differing)}. A search goes "
            "on only as it began: give the app these values again, or start a new one with --folder"
        )


def _differing(before: Mapping[str, Value], now: Mapping[str, Value]) -> Iterator[str]:
    """Yield the keys that differ, with both values. One that a version does not have counts as its default.

    A key that only the version before knew has no part in it: the app cannot be given it.
    """
    usual = defaults()
    for key in {**before, **now}:
        if key not in now and key not in usual and not key.startswith(PREFIX):
            continue
        had, given = (values.get(key, usual.get(key)) for values in (before, now))
        if had != given:
            yield f"{key}={given!r} (the search has {had!r})"


def run_trials(
    plan: SearchPlan,
    folder: Path,
    trials: int,
    objective: Objective,
    *,
    minimise: bool,
    on_trial: Callable[[Trial], None],
    at_once: int = 1,
    stop: Callable[[], None] = lambda: None,
) -> Found:
    """Run what is missing of `trials` trials of each variant, and return what was found.

    The first trials of all variants are run, then the second ones, and so on. A trial that fails counts as the worst,
    and one whose values a finished trial had gets that one's score and run.

    Args:
        plan: what is searched.
        folder: of the search.
        trials: how many each variant has in the end, including those of an earlier call.
        objective: runs one trial.
        minimise: whether low scores are better.
        on_trial: called with each trial that has ended, also those of an earlier call.
        at_once: how many trials are run at the same time, each of another variant and in a thread.
        stop: ends the runs of threads, which then raise RunStopped.

    Raises:
        RunInUse: another process runs this search.
        KeyboardInterrupt: the user stopped it; the files are written.
    """
    with held(folder):
        studies = [VariantStudy(folder / JOURNAL, variant, plan.seed, minimise=minimise) for variant in plan.searched]
        for number in range(trials):
            due = list[VariantStudy]()
            for study in studies:
                known = study.trials()
                if number < len(known) and known[number].ended:
                    on_trial(known[number])
                else:
                    due.append(study)

            def run_next(study: VariantStudy) -> Trial:
                trial = study.next_trial()
                _run_trial(plan, study, trial, folder, objective)
                return trial

            with closing(_each(run_next, due, at_once, stop)) as ended:
                for trial in ended:
                    _write(plan, studies, folder, minimise)
                    on_trial(trial)
        return _write(plan, studies, folder, minimise)


def _each(
    run_next: Callable[[VariantStudy], Trial], due: Sequence[VariantStudy], at_once: int, stop: Callable[[], None]
) -> Generator[Trial]:
    """Run a trial of each study, and yield those that have ended, as they end."""
    if at_once == 1:
        yield from map(run_next, due)
        return
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for ended in as_completed([pool.submit(run_next, study) for study in due]):
                yield ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # before the others end, so that none begins in their place
            stop()
            raise


def score_of(run: Path, measure: str, rounds: int) -> float:
    """Return the mean over the clients, each counted alike, of the final model's scores on their own test examples.

    Args:
        run: the run directory.
        measure: ACCURACY or RMSE of `plan`.
        rounds: the number of the last round; a run with `patience` may end before it.

    Raises:
        RunError: the clients did not score the model after the last round, or it has diverged.
    """
    metrics = read_metrics(run)
    if metrics and (read_summary(run) or {}).get("ended_early"):
        rounds = metrics[-1].round
    score = metrics[-1].value(measure) if metrics and metrics[-1].round == rounds else None
    if score is None or not math.isfinite(score):
        raise RunError(f"no {measure} after round {rounds}: it diverged, or no client scored the final model")
    return float(score)


def _run_trial(plan: SearchPlan, study: VariantStudy, trial: Trial, folder: Path, objective: Objective) -> None:
    """Run a trial, and note what came of it."""
    same = next((each for each in _finished(study) if each.values == trial.values), None)
    begun = time.monotonic()
    if same is not None:
        trial.score, trial.run, trial.seconds = same.score, same.run, 0.0
        study.end(trial)
        return
    _remove_cut_off(study, trial, folder)
    config = plan.config_of(study.variant, trial.values)
    try:
        trial.score = objective(
            f"{trial.variant} trial {trial.number + 1}", config, lambda run: study.begin(trial, run.name)
        )
    except ClusterFailed:
        raise  # it says nothing of the trial, which is run again
    except (RunError, ConfigError, OSError) as error:
        lines = (error.reason if isinstance(error, RunError) else str(error)).splitlines()
        # The first line of a ConfigError names no key.
        trial.reason = visible(" ".join(line.strip() for line in lines[: 2 if isinstance(error, ConfigError) else 1]))
    trial.seconds = round(time.monotonic() - begun, 3)
    study.end(trial)


def _remove_cut_off(study: VariantStudy, trial: Trial, folder: Path) -> None:
    """Remove what is left of the run of a trial that was cut off, unless it is that of a trial that has ended."""
    name = Path(trial.run).name  # it is from a file: only a folder in this one is removed
    if name not in ("", "..") and all(Path(each.run).name != name for each in study.trials() if each.ended):
        remove_run(folder / name)


def _finished(study: VariantStudy) -> Iterator[Trial]:
    return (trial for trial in study.trials() if trial.score is not None)


def _write(plan: SearchPlan, studies: list[VariantStudy], folder: Path, minimise: bool) -> Found:
    found = Found(
        plan,
        trials=[trial for study in studies for trial in study.trials() if trial.ended],
        best={study.variant.name: best for study in studies if (best := study.best())},
        minimise=minimise,
    )
    write_whole(folder / TRIALS, trials_csv(found).encode())
    write_whole(folder / FOUND, found_toml(found).encode())
    return found
