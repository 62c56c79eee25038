"""Resuming a run from its newest checkpoint, and saving a checkpoint after each round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any, Protocol

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from tepal.exchange.files import DamagedFile
from tepal.exchange.layout import Layout
from tepal.strategies.method import Method
from tepal.strategies.rounds.checkpoint import Checkpoint, Checkpoints, layout_digest
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.state_json import CheckpointError, current_names

log = getLogger("flwr")

_FACTOR = "factor"  # in `standing`: of the learning rate in the checkpoint's round
_HISTORY = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class Memory(Protocol):
    """What a run remembers of its rounds, beside its ledger."""

    def to_facts(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        ...

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's facts, which are empty in one of an earlier version."""
        ...


@dataclass(frozen=True)
class Resuming:
    """Saves and resumes one run of a method on a model."""

    checkpoints: Checkpoints
    method: Method[Any]
    seed: int
    layout: Layout
    factor: Callable[[int], float] = lambda _round: 1.0
    """The factor of the learning rate in a round, as in `Run`."""

    def latest(self, *, resume: bool) -> Checkpoint | None:
        """The checkpoint from which the run is resumed; None if it starts at round 1.

        Raises:
            CheckpointError: it is of another method, seed or model, or would be overwritten by a new run.
        """
        folder = self.checkpoints.folder
        if not resume:
            if rounds := self.checkpoints.rounds():
                raise CheckpointError(
                    f"{folder} has a checkpoint of round {rounds[-1]}: resume that run with resume=True, or choose "
                    "another folder"
                )
            return None
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            log.info("%s has no checkpoint: the run starts at round 1.", folder)
            return None
        self.method.resumed(checkpoint.method)
        for what, then, now in (
            ("strategy", checkpoint.method, self._identity()),
            ("seed", checkpoint.seed, self.seed),
            ("model", checkpoint.layout, layout_digest(self.layout)),
        ):
            if then != now:
                raise CheckpointError(
                    f"the checkpoint of round {checkpoint.round} in {folder} is of another {what} "
                    f"({then}; this run has {now}): resume with the settings that the run was started with"
                )
        return checkpoint

    def restore(
        self, checkpoint: Checkpoint, ledger: ClientLedger, memories: Mapping[str, Memory], result: Result
    ) -> Any:
        """Return the method's state of a checkpoint, and restore the ledger, the memories and the result from it."""
        log.info("Resumed after round %d, from %s.", checkpoint.round, self.checkpoints.folder)
        standing, versions = checkpoint.standing, self.checkpoints.versions()
        if "past" not in standing:  # of an earlier version, which took the round before for the state before
            standing = {**standing, "past": {"round": checkpoint.round, "before": checkpoint.round - 1}}
        before = versions.get(standing["past"]["before"], {})
        # Where the learning rate rises, as it does if a run with a cosine schedule is prolonged after its last round,
        # what was usual before says nothing: all clients would be refused. So it is forgotten, and the next round is
        # judged as a first one. Scaled with the learning rate, it would be wrong for statistics, and for apps that have
        # a learning rate of their own. Checkpoints of earlier versions do not have their round's factor.
        if self.factor(checkpoint.round + 1) > standing.get(_FACTOR, 0.0):
            standing = {**standing, "norms": {}, "past": {**standing["past"], "changes": []}}
        ledger.restore(checkpoint.held, checkpoint.current, standing, list(versions.values()), before)
        for name, memory in memories.items():
            memory.restore(standing.get(name, {}))
        for kind, rounds in checkpoint.history.items():
            getattr(result, kind).update({int(number): MetricRecord(dict(m)) for number, m in rounds.items()})
        storage, state = self.method.storage, checkpoint.state
        return storage.restore(state, self.checkpoints.states(before=checkpoint.round)) if storage else state

    def saved(self, round: int) -> Callable[[], Any] | None:
        """What loads the state after a round; None if it has no checkpoint."""
        return partial(self.checkpoints.state, round) if round in self.checkpoints.rounds() else None

    def on_disk(self, state: Any) -> Any:
        """The first state with its arrays in a file, so that the first round has the memory to itself."""
        with contextlib.suppress(OSError):  # the state then stays in memory
            return self.checkpoints.on_disk(state)
        return state

    def save(
        self,
        state: Any,
        round: int,
        experiment: str,
        ledger: ClientLedger,
        memories: Mapping[str, Memory],
        clients: Collection[str],
        result: Result,
    ) -> tuple[Any, str]:
        """Write a checkpoint. The run continues if it cannot be written.

        Returns the state, with its arrays mapped from the checkpoint's file, and the error's text or "".
        """
        known = ledger.to_facts()
        remembered = {name: memory.to_facts() for name, memory in memories.items()}
        checkpoint = Checkpoint(
            round=round,
            experiment=experiment,
            seed=self.seed,
            method=self._identity(),
            layout=layout_digest(self.layout),
            state=state,
            clients=tuple(clients),
            history={
                kind: {str(number): dict(metrics) for number, metrics in getattr(result, kind).items()}
                for kind in _HISTORY
            },
            **{**known, "standing": {**known["standing"], **remembered, _FACTOR: self.factor(round)}},
        )
        trouble = ""
        try:
            if self.method.storage:
                self.method.storage.flush()
            self.checkpoints.save(checkpoint)
        except OSError as error:
            trouble = f"no checkpoint of round {round} could be written: {error}"
            log.error("%s. The run continues; if it is killed now, it is resumed after an earlier round.", trouble)
            if round not in self.checkpoints.rounds():
                return state, trouble
            # The checkpoint was written and may be the only one, although the disk has not confirmed it.
        if self.method.storage:
            self.method.storage.saved(state)
        ledger.saved()
        try:
            state = self.checkpoints.saved_state(round)
        except (OSError, DamagedFile) as error:
            log.warning("The state of round %d stays in memory: %s", round, error)
        return state, trouble

    def _identity(self) -> Mapping[str, str | int | float]:
        options = {key: np.asarray(value).item() for key, value in self.method.describe().items()}
        return current_names({"name": type(self.method).__name__, **options})  # as it is read from a checkpoint
