"""The trials of a variant, as an Optuna study keeps them in the search's journal.

Values are drawn by Optuna's TPE sampler. Trial number t has a sampler of its own, seeded by the search's seed, the
variant's name and t, which draws from the scores of the trials before it: a search that is interrupted and resumed has
the same trials as one that is not. A trial is written to the journal, with its values, before it is run; so one that
was cut off is run again with the same values.

Optuna is an optional dependency, imported when a study is opened: `pip install 'tepal[search]'`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepal.host.toml import Value
from tepal.tools.search.plan import SearchedVariant
from tepal.tools.spaces import distribution, draw

if TYPE_CHECKING:
    import optuna

_KEPT = ("run", "seconds", "reason")  # attributes of our trials that Optuna keeps as a user's


@dataclass
class Trial:
    """One trial of a variant: its values, and what came of it.

    `score` is None for a trial that has not ended, and for one that failed, whose `reason` is then not empty. `run` is
    the name of its run directory, "" before there is one.
    """

    variant: str
    number: int
    values: Mapping[str, Value]
    score: float | None = None
    run: str = ""
    seconds: float | None = None
    reason: str = ""
    ended: bool = field(default=False)

    @property
    def outcome(self) -> str:
        if not self.ended:
            return "running"
        return "failed" if self.score is None else "finished"


class VariantStudy:
    """The study of one variant in a journal.

    Args:
        journal: the file, which several variants share; it is made if needed.
        variant: what is searched.
        seed: of the search.
        minimise: whether low scores are better.
    """

    def __init__(self, journal: Path, variant: SearchedVariant, seed: int, *, minimise: bool) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it logs every trial
        _cut_partial_line(journal)
        self.variant, self.minimise = variant, minimise
        self._seed = seed
        self._spaces = {key: distribution(space) for key, space in variant.search.items()}
        self._study = optuna.create_study(
            study_name=variant.name,
            direction="minimize" if minimise else "maximize",
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
            load_if_exists=True,
        )

    def trials(self) -> list[Trial]:
        """Return all trials so far, in order; the last one may not have ended."""
        return [self._read(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def next_trial(self) -> Trial:
        """Return the trial to run: the one that was cut off if there is one, else a new one."""
        known = self.trials()
        if known and not known[-1].ended:
            return known[-1]
        import optuna

        name, number = self.variant.name, len(known)
        drawn = draw(
            self._spaces, self._study.get_trials(deepcopy=False), minimise=self.minimise,
            seed=lambda again: _seed_of(self._seed, name, number, again),
        )  # fmt: skip
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING, params=drawn, distributions=dict(self._spaces)
            )
        )
        return self.trials()[-1]

    def begin(self, trial: Trial, run: str) -> None:
        """Note the name of the run directory of a trial that has begun."""
        trial.run = run
        self._keep(trial, run=run)

    def end(self, trial: Trial) -> None:
        """Note that a trial has ended, with its score, seconds and reason. One without a score counts as the worst."""
        trial.ended = True
        self._keep(trial, **{name: getattr(trial, name) for name in _KEPT})
        worst = math.inf if self.minimise else -math.inf
        self._study.tell(trial.number, worst if trial.score is None else trial.score)

    def best(self) -> Trial | None:
        """Return the trial with the best score, of equal ones the first; None if none has a score."""
        scored = [trial for trial in self.trials() if trial.score is not None]
        sign = 1 if self.minimise else -1
        return min(scored, key=lambda trial: sign * (trial.score or 0.0), default=None)

    def _keep(self, trial: Trial, **values: Any) -> None:
        import optuna

        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        kept = optuna.trial.Trial(self._study, frozen._trial_id)
        for name, value in values.items():
            kept.set_user_attr(name, value)

    def _read(self, frozen: optuna.trial.FrozenTrial) -> Trial:
        ended = frozen.state.is_finished()
        score = frozen.value if ended and frozen.value is not None and math.isfinite(frozen.value) else None
        values = {key: space.exact(frozen.params[key]) for key, space in self.variant.search.items()}
        kept = {name: frozen.user_attrs[name] for name in _KEPT if name in frozen.user_attrs}
        return Trial(self.variant.name, frozen.number, values, score=score, ended=ended, **kept)


def _seed_of(seed: int, variant: str, number: int, draw: int) -> int:
    again = f"/{draw}" if draw else ""
    digest = hashlib.sha256(f"{seed}/{variant}/{number}{again}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _cut_partial_line(journal: Path) -> None:
    """Remove what follows the last complete line: Optuna cannot read on after a line that was cut off."""
    if journal.exists():
        content = journal.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            with journal.open("r+b") as file:
                file.truncate(complete)
