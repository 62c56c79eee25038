"""From a checkpoint to a run that goes on, and from a round to its checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from tepal.exchange.files import DamagedFile
from tepal.exchange.layout import Layout
from tepal.strategies.method import Method
from tepal.strategies.rounds.checkpoint import Checkpoint, CheckpointError, Checkpoints, layout_digest
from tepal.strategies.rounds.ledger import ClientLedger

log = getLogger("flwr")

_HISTORY = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


@dataclass(frozen=True)
class Resuming:
    """The checkpoints of one run of a method on a model."""

    checkpoints: Checkpoints
    method: Method[Any]
    seed: int
    layout: Layout

    def latest(self, *, resume: bool) -> Checkpoint | None:
        """The checkpoint to go on from; None for a run from the beginning.

        Raises:
            CheckpointError: of another method, seed or model; or one that is in the way of a new run.
        """
        folder = self.checkpoints.folder
        if not resume:
            if rounds := self.checkpoints.rounds():
                raise CheckpointError(
                    f"{folder} has a checkpoint of round {rounds[-1]}: go on from it with resume=True, or choose "
                    "another folder"
                )
            return None
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            log.info("%s has no checkpoint: the run begins at round 1.", folder)
            return None
        for what, then, now in (
            ("strategy", checkpoint.method, self._identity()),
            ("seed", checkpoint.seed, self.seed),
            ("model", checkpoint.layout, layout_digest(self.layout)),
        ):
            if then != now:
                raise CheckpointError(
                    f"the checkpoint of round {checkpoint.round} in {folder} is of another {what} "
                    f"({then}; this run has {now}): resume with what the run was started with"
                )
        return checkpoint

    def go_on(self, checkpoint: Checkpoint, ledger: ClientLedger, result: Result) -> Any:
        """The method's state of a checkpoint; what else it remembers goes into the ledger and the result."""
        log.info("Resumed after round %d, from %s.", checkpoint.round, self.checkpoints.folder)
        ledger.restore(checkpoint.held, checkpoint.current, checkpoint.standing, self.checkpoints.versions())
        for kind, rounds in checkpoint.history.items():
            getattr(result, kind).update({int(number): MetricRecord(dict(m)) for number, m in rounds.items()})
        return self.method.resume(checkpoint.state, self.checkpoints.states(before=checkpoint.round))

    def on_disk(self, state: Any) -> Any:
        """The state that a run begins with, out of the way of what its first round needs memory for."""
        with contextlib.suppress(OSError):  # it then stays in memory
            return self.checkpoints.on_disk(state)
        return state

    def save(
        self, state: Any, round: int, experiment: str, ledger: ClientLedger, clients: Collection[str], result: Result
    ) -> tuple[Any, str]:
        """Write a checkpoint. Where it cannot be written, the run goes on.

        Returns the state, its arrays in that file, where the system can drop them; and what went wrong, "" for nothing.
        """
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
            **ledger.to_facts(),
        )
        trouble = ""
        try:
            self.method.settle(state)
            self.checkpoints.save(checkpoint)
        except OSError as error:
            trouble = f"no checkpoint of round {round} could be written: {error}"
            log.error("%s. The run goes on; should it be killed, it resumes after an earlier round.", trouble)
            if round not in self.checkpoints.rounds():
                return state, trouble
            # It is there and may be all that there is, though the disk did not say that it will outlive a power cut.
        self.method.saved(state)
        ledger.saved()
        try:
            state = self.checkpoints.saved_state(round)
        except (OSError, DamagedFile) as error:
            log.warning("The state of round %d stays in memory: %s", round, error)
        return state, trouble

    def _identity(self) -> Mapping[str, str | int | float]:
        options = {key: np.asarray(value).item() for key, value in self.method.describe().items()}
        return {"name": type(self.method).__name__, **options}
