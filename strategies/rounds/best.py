"""The best model of a run by a score, and the end of a run whose score no longer improves.

    Standing      what the scores so far amount to: the best one, and the scored rounds in a row without improvement
    BestModel     the standing of one run; keeps the best model in a file next to the checkpoints

The file, `best-<round>.safetensors`, has the method's whole state, so that the model can be sent to clients, too. It is
written before the checkpoint that names it, and stays as long as a checkpoint on disk names it: whenever the server is
killed, and whichever checkpoint it resumes from, that one's best model is on disk. If the run returns to the model
before the last merge, the scores of the discarded one no longer count, and the best model is that of before the merge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from tepal.exchange.files import DamagedFile, read_arrays, write_arrays
from tepal.exchange.parts import Digests
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.report import RoundReport
from tepal.strategies.rounds.state_json import CheckpointError, from_json, to_json

log = getLogger("flwr")

NAME = "best"
"""Of a run's `BestModel` in the standing of a checkpoint."""
_FACTS = "facts"  # the array with the state's structure, as JSON; those of the state are named by numbers


@dataclass(frozen=True)
class Scores:
    """The scores that a round's report has; None: not measured."""

    own: float | None = None
    """Of the round's result."""
    received: float | None = None
    """Of the model that the round started from."""


@dataclass(frozen=True)
class Standing:
    """What the scores of a run amount to. Of equal scores the first is the best.

    best: the best score, of round `best_round`.
    reference: the score from which an improvement is measured: the last one that was an improvement.
    without: scored rounds since then.
    scored: the last round with a score.
    """

    best: float | None = None
    best_round: int | None = None
    reference: float | None = None
    without: int = 0
    scored: int = -1

    def after(self, round: int, score: float, *, higher: bool, least: float = 0.0) -> Standing:
        """Return the standing after one more score.

        Args:
            round: of the score.
            score: one that is NaN or infinite is no improvement.
            higher: whether a higher score is better.
            least: a score is an improvement if it is better than the reference by more than this.
        """

        def gain(than: float | None) -> float:
            if not math.isfinite(score):
                return -math.inf
            return math.inf if than is None else score - than if higher else than - score

        better, improved = gain(self.best) > 0, gain(self.reference) > least
        return Standing(
            best=score if better else self.best,
            best_round=round if better else self.best_round,
            reference=score if improved else self.reference,
            without=0 if improved else self.without + 1,
            scored=round,
        )


@dataclass(frozen=True)
class EndedEarly:
    """Why a run ended before its planned number of rounds: `without` scored rounds without improvement."""

    round: int
    without: int


class BestModel:
    """Follows the scores of one run, and keeps its best model if that is to be its result.

    Args:
        scores: returns the scores of a round's report, all measured on the same kind of data. It may be called several
            times in a round, as more is measured.
        higher: whether a higher score is better.
        patience: the run ends after so many scored rounds in a row without improvement; 0: never.
        least: a score is an improvement if it is better than the last improvement by more than this.
        delivered: whether the best model is the run's result, and kept in a file. Otherwise it is the last one.
    """

    def __init__(
        self,
        scores: Callable[[RoundReport], Scores] = lambda report: Scores(),
        *,
        higher: bool = True,
        patience: int = 0,
        least: float = 0.0,
        delivered: bool = False,
    ) -> None:
        self.higher, self.patience, self.least, self.delivered = higher, patience, least, delivered
        self.standing = Standing()
        self.kept: int | None = None
        """The round of the model in the file."""
        self.ended_early: EndedEarly | None = None
        self._scores = scores
        self._before = Standing()  # of the current round's own score
        self._earlier: tuple[Standing, int | None] | None = None  # it and `kept`, before the last merge
        self._named: dict[int, frozenset[int]] = {}  # round of a checkpoint on disk → files that it names
        self._folder: Path | None = None
        self._digests = Digests()

    def begin(self, folder: Path | None, digests: Digests | None) -> None:
        """Begin a run.

        Args:
            folder: of the checkpoints.
            digests: of the arrays in the checkpoints.

        Raises ValueError if the best model is to be kept, and there is no folder.
        """
        if self.delivered and folder is None:
            raise ValueError("the best model of a run is kept next to its checkpoints: set checkpoints to a folder")
        self._folder, self._digests = folder, digests or Digests()
        self.standing, self._before, self.kept, self.ended_early = Standing(), Standing(), None, None
        self._earlier, self._named = None, {}

    @property
    def exhausted(self) -> bool:
        """Whether so many scored rounds in a row were without improvement that the run ends."""
        return 0 < self.patience <= self.standing.without

    # ---- scores ----------------------------------------------------------------------------------------------------

    def received(self, report: RoundReport, start: Any) -> None:
        """Enter the score of the round before, which this round's clients have measured.

        Args:
            report: of the current round, once it has trained.
            start: the state after the round before. If the run returned to an earlier one in this round, that one was
                scored, `start` has no score, and all that was entered since the merge of `start` is undone.
        """
        score, round = self._scores(report).received, report.round - 1
        if report.went_back and self._earlier is not None:
            self._continue_from(*self._earlier)
        elif score is not None and round > self.standing.scored and not report.went_back:
            self.standing = self._after(self.standing, round, score, start)
        self._before = self.standing
        if report.replied:  # else nothing was merged
            self._earlier = self.standing, self.kept

    def enter(self, report: RoundReport, state: Any) -> None:
        """Enter the score of the current round's result, `state`. A later call in the round replaces the score."""
        if self._before.scored < report.round and (score := self._scores(report).own) is not None:
            self.standing = self._after(self._before, report.round, score, state)

    def end_early(self, round: int) -> None:
        """Enter that the run ends after this round, for lack of improvement."""
        self.ended_early = EndedEarly(round, self.standing.without)
        log.info("The run ends with round %d: no improvement in %d evaluations.", round, self.standing.without)

    def _after(self, before: Standing, round: int, score: float, state: Any) -> Standing:
        after = before.after(round, score, higher=self.higher, least=self.least)
        if self.delivered and after.best_round == round != self.kept:
            self._keep(state, round)
        return after

    # ---- the model -------------------------------------------------------------------------------------------------

    def delivers(self, round: int) -> bool:
        """Whether the model of this round, the last one, is the run's result as far as is known."""
        return not self.delivered or self.kept == round

    def result(self, last: Any, round: int) -> tuple[Any, int]:
        """Return the state whose models are the run's result, and its round.

        Args:
            last: the state after the last round.
            round: the last round.
        """
        if self.delivers(round) or self.kept is None:
            return last, round
        try:
            return self._read(self.kept), self.kept
        except (OSError, DamagedFile, CheckpointError) as error:
            log.error("The best model, of round %d, cannot be read: %s. The last one is the result.", self.kept, error)
            return last, round

    def clean(self, checkpoints: Checkpoints, round: int) -> None:
        """Remove the files of models that neither this run nor a checkpoint on disk may return to.

        Args:
            checkpoints: of the run.
            round: whose checkpoint was written last, or could not be written.
        """
        if self._folder is None or not self.delivered:
            return
        self._named.pop(round, None)
        on_disk = checkpoints.rounds()
        self._named = {
            number: self._named[number] if number in self._named else _named_by(checkpoints, number)
            for number in on_disk
        }
        needed = {self._path(number) for number in _files(self.to_facts()).union(*self._named.values())}
        for path in self._folder.glob("best-*.safetensors"):
            if path not in needed:
                path.unlink(missing_ok=True)

    def _keep(self, state: Any, round: int) -> None:
        arrays: dict[str, np.ndarray] = {}
        facts = {"round": round, "state": to_json(state, arrays)}
        arrays[_FACTS] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        try:
            write_arrays(self._path(round), arrays, digests=self._digests)
        except OSError as error:
            log.error("The model of round %d, the best so far, cannot be kept: %s. The run continues.", round, error)
        else:
            self.kept = round

    def _read(self, round: int) -> Any:
        arrays = read_arrays(self._path(round))
        try:
            facts = json.loads(arrays.pop(_FACTS).tobytes())
            if facts["round"] != round:
                raise DamagedFile(f"it is of round {facts['round']}")
            return from_json(facts["state"], arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise error if isinstance(error, DamagedFile | CheckpointError) else DamagedFile(str(error)) from error

    def _path(self, round: int) -> Path:
        assert self._folder is not None
        return self._folder / f"best-{round:06d}.safetensors"

    # ---- in a checkpoint -------------------------------------------------------------------------------------------

    def to_facts(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        ended, earlier = self.ended_early, self._earlier
        return {
            **asdict(self.standing),
            "kept": self.kept,
            "ended_early": asdict(ended) if ended else None,
            "earlier": {**asdict(earlier[0]), "kept": earlier[1]} if earlier else None,
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's facts, which are empty if that run did not follow its scores.

        A run that ended early goes on if `patience` is larger now than the scored rounds without improvement were.
        """
        known = dict(facts)
        kept, ended, earlier = (known.pop(name, None) for name in ("kept", "ended_early", "earlier"))
        self._continue_from(Standing(**known), kept)
        self.ended_early = EndedEarly(**ended) if ended and 0 < self.patience <= ended["without"] else None
        if earlier is not None:
            before = dict(earlier)
            kept = before.pop("kept")
            self._earlier = Standing(**before), kept

    def _continue_from(self, standing: Standing, kept: int | None) -> None:
        if self.delivered and kept is not None and not self._path(kept).exists():
            log.error("The best model so far, of round %d, is no longer in %s.", kept, self._folder)
            standing, kept = replace(standing, best=None, best_round=None), None
        self.standing = self._before = standing
        self.kept = kept


def _files(facts: Mapping[str, Any]) -> frozenset[int]:
    """The rounds of the files that a checkpoint with these facts needs."""
    kept = (facts.get("kept"), (facts.get("earlier") or {}).get("kept"))
    return frozenset(round for round in kept if round is not None)


def _named_by(checkpoints: Checkpoints, round: int) -> frozenset[int]:
    """The rounds of the files that a checkpoint on disk needs; none if it cannot be read."""
    try:
        return _files(checkpoints.standing(round).get(NAME, {}))
    except (OSError, DamagedFile):
        return frozenset()
