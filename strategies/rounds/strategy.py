"""`MethodStrategy`: a Flower `Strategy` that runs any `Method`, round by round, and resumes it.

Replies are merged as they arrive and then dropped, so that the server's memory does not grow with the number of
clients.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from tepal.exchange.encodings import Encoding
from tepal.exchange.layout import Layout
from tepal.exchange.references import References
from tepal.exchange.sender import Sender
from tepal.strategies.method import Method, ModelBlocks, Run, ServerModel
from tepal.strategies.robust import mean_factory
from tepal.strategies.rounds.asking import SCHEDULES
from tepal.strategies.rounds.best import NAME, BestModel
from tepal.strategies.rounds.checkpoint import Checkpoint, Checkpoints
from tepal.strategies.rounds.cohort import Rules, check
from tepal.strategies.rounds.flower import WithoutHooks, blocks_of, joined, server_model
from tepal.strategies.rounds.past import Past
from tepal.strategies.rounds.report import RoundFailed, RoundReport
from tepal.strategies.rounds.resuming import Resuming
from tepal.strategies.rounds.round import Round
from tepal.strategies.rounds.runner import Evaluate, RoundRunner

if TYPE_CHECKING:
    from torch import nn

log = getLogger("flwr")

_REFERENCES = "references"  # folder beside the checkpoints


class MethodStrategy(WithoutHooks):
    """A Flower strategy that runs a method over Tepal's exchange.

    Args:
        method: the method that plans the rounds and merges the replies.
        model: torch module, or its blocks from `find_blocks`. Without it every tensor of the initial arrays is one
            entry, which suffices for methods that use no blocks.
        fraction_train: share of the available clients that train in a round, in (0, 1]; at least `min_replies` clients.
        fraction_evaluate: share of the available clients that score the model in rounds in which clients do not score
            it as they train, and after the last round, in [0, 1]; 0: none.
        min_available_nodes: clients that must be available before a round starts.
        min_replies: a round with fewer good replies is repeated with another cohort.
        max_replies: a round ends as soon as this many good replies are merged; later replies are dropped.
        schedule: learning rate schedule over the rounds, "constant" or "cosine"; it scales `learning-rate` and `lr` of
            the train config, if they are set.
        seed: seed of all random numbers of the server.
        max_weight_share: the largest share of one client in the total weight of a round's merged replies, if at least
            three are merged, in (0, 1]; the weight of a heavier one is reduced to it.
        classes: number of classes of the task, if it has any: clients' label counts of another number are not recorded.
        deterministic: merge in the order of client names, so that the same replies give the same bits.
        robust: how the clients' parts are averaged: "none" (weighted mean), "clip", "trimmed" (coordinate-wise trimmed
            mean), "median" (coordinate-wise), "krum" (multi-Krum) or "rfa" (geometric median); or one of
            the last four after "clip+", which scales large updates down first. See `tepal.strategies.robust`. It
            applies to every method that averages over clients.
        hostile_share: largest share of hostile clients in a round that is assumed, in [0, 0.5): what "trimmed" drops on
            either side, and f of "krum".
        krum_keep: clients that "krum" averages; 0: all that are not assumed to be hostile; 1: Krum itself.
        encoding: how values are encoded on their way down and up; by default they are not.
        experiment: id under which clients cache parts; a new one by default, and the checkpoint's own if a run is
            resumed.
        checkpoints: folder, or Checkpoints, where the run is saved after every round; None: it cannot be resumed.
        resume: resume from the newest checkpoint there; start at round 1 if there is none.
        weighted_by_key: the metric by which replies are weighted, as in Flower's FedAvg.
        arrayrecord_key: name of the record with the model in messages, as in Flower's FedAvg.
        configrecord_key: name of the record with the settings in messages, as in Flower's FedAvg.
        on_round: called with a `RoundReport` after the initial evaluation (round 0) and after every round.
        on_progress: called with the current round's report whenever a message was sent to a client or answered.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        method: Method[Any],
        *,
        model: nn.Module | ModelBlocks | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_available_nodes: int = 2,
        min_replies: int = 1,
        max_replies: int | None = None,
        schedule: str = "constant",
        seed: int = 0,
        deterministic: bool = False,
        robust: str = "none",
        max_weight_share: float = 0.5,
        classes: int | None = None,
        hostile_share: float = 0.2,
        krum_keep: int = 0,
        encoding: Encoding | None = None,
        experiment: str | None = None,
        checkpoints: Checkpoints | Path | str | None = None,
        resume: bool = False,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        on_round: Callable[[RoundReport], None] | None = None,
        on_progress: Callable[[RoundReport], None] | None = None,
    ) -> None:
        check("schedule", schedule, schedule in SCHEDULES, f"one of {sorted(SCHEDULES)}")
        self.rules = Rules(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_available_nodes=min_available_nodes,
            min_replies=min_replies,
            max_replies=max_replies,
            seed=seed,
            deterministic=deterministic,
            max_weight_share=max_weight_share,
        )
        self.classes = classes
        mean_factory(robust, hostile_share, krum_keep, None)  # checks the options
        self.robust, self.hostile_share, self.krum_keep = robust, hostile_share, krum_keep
        self.method = method
        self.blocks = blocks_of(model)
        self.schedule = schedule
        self.encoding = encoding or Encoding(seed=seed)
        self.experiment = experiment or uuid.uuid4().hex[:12]
        self.checkpoints = Checkpoints(checkpoints) if isinstance(checkpoints, Path | str) else checkpoints
        self.resume = resume
        if resume and checkpoints is None:
            raise ValueError("resume=True needs the folder with the run's checkpoints: checkpoints=...")
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.on_round = on_round or (lambda report: None)
        self.on_progress = on_progress or (lambda report: None)
        self.best = BestModel()
        """Which round's model is the result, and whether the run ends early; by default the last one, and never."""
        self.result_round = 0
        """The round of the model that the last run returned."""

    def summary(self) -> None:
        """Log the options of the strategy and its method."""
        rules = {**asdict(self.rules), "min_available_nodes": self.rules.needed}
        del rules["needed_by"]
        options = {**self.method.describe(), **rules, "schedule": self.schedule, "encoding": str(self.encoding)}
        log.info("%s: %s", type(self).__name__, ", ".join(f"{name} {value}" for name, value in options.items()))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds. Arguments and result are those of Flower's `Strategy.start`.

        `timeout`, in seconds, is the deadline for all training exchanges of a round together, for an evaluation, and
        for the wait for `min_available_nodes`.

        Raises:
            RoundFailed: fewer good replies than `min_replies` in several attempts at a round, or too few available
                clients. The exception has the result so far.
            CheckpointError: the checkpoint is of another model, method or seed, or would be overwritten by a new run.
            ValueError: initial arrays of another model, or a model that the method cannot train.
        """
        check("num_rounds", num_rounds, num_rounds >= 1, "at least 1")
        check("timeout", timeout, timeout > 0, "positive")
        self.method.begin(num_rounds)
        model, saved = server_model(initial_arrays, self.blocks), self.checkpoints
        factor = partial(SCHEDULES[self.schedule], rounds=num_rounds)
        resuming = Resuming(saved, self.method, self.rules.seed, model.layout, factor) if saved else None
        checkpoint = resuming.latest(resume=self.resume) if resuming else None
        folder = saved.folder if saved else None
        mean = mean_factory(self.robust, self.hostile_share, self.krum_keep, folder)
        run = Run(self.rules.seed, folder, saved.keep if saved else 0, mean, factor)
        result = Result()
        first = 1
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        with contextlib.ExitStack() as ends:
            state = self.method.init(model, run)
            if self.method.storage:
                ends.callback(self.method.storage.close)
            references = self._references(folder, ends)
            past = Past(resuming.saved) if resuming else Past()
            rounds = self._runner(grid, model, run, past, checkpoint, references)
            ends.callback(rounds.close)
            if self.encoding.start == "made" and checkpoint is None:  # otherwise the checkpoint has their ids
                rounds.add_initial(self.method.initial_values(model, state))
            self.summary()
            best = self.best
            best.begin(folder, saved.digests if saved else None)
            if resuming and checkpoint is not None:
                first = checkpoint.round + 1
                state, checkpoint = resuming.restore(checkpoint, rounds.ledger, rounds.memories, result), None
            elif evaluate_fn is not None:
                report = RoundReport(0, "initial")
                report.add_server_metrics(evaluate_fn(0, initial_arrays))
                result.evaluate_metrics_serverapp[0] = MetricRecord(dict(report.server_metrics))
                best.enter(report, state)
                self.on_round(report)
            layout = model.layout
            del initial_arrays, model  # their memory is released, unless the caller has kept them
            if resuming:
                state = resuming.on_disk(state)
            merged = first - 1
            for number in range(first, num_rounds + 1):
                if best.ended_early:
                    break
                this = rounds.begin(state, number, num_rounds, train_config, timeout)
                try:
                    start, state = state, rounds.train(state, this)
                    merged = number
                    best.received(this.report, start)
                    del start
                    self._score(state, replace(this, config=evaluate_config), evaluate_fn, rounds)
                except RoundFailed as failure:
                    this.report.seconds = time.monotonic() - this.started
                    self.on_round(this.report)
                    result.arrays = self._models(state, merged, layout)
                    failure.result = result
                    raise
                self._end(this, result)
                if resuming:
                    known, clients = rounds.ledger, rounds.cohorts.available()
                    state, rounds.trouble = resuming.save(
                        state, number, self.experiment, known, rounds.memories, clients, result
                    )
                    best.clean(resuming.checkpoints, number)
            if saved:
                saved.prune(merged)
                best.clean(saved, merged)
            if references:
                references.remove()
            result.arrays = self._models(state, merged, layout)
            return result

    def _score(self, state: Any, this: Round, evaluate_fn: Evaluate | None, rounds: RoundRunner) -> None:
        """Score a round's model on the server and by clients. In the last round, send the run's result to clients."""
        best, report, planned = self.best, this.report, this.number == this.rounds

        def last() -> bool:
            if best.exhausted and not planned and not best.ended_early:
                best.end_early(this.number)
            return planned or best.ended_early is not None

        rounds.score_on_server(state, this, evaluate_fn)
        best.enter(report, state)
        known = last()
        sent = known and best.delivers(this.number)
        rounds.score_by_clients(state, this, last=known, final=sent)
        best.enter(report, state)
        if last() and not sent:
            rounds.deliver(best.result(state, this.number)[0], this)

    def _models(self, last: Any, round: int, layout: Layout) -> ArrayRecord:
        """The models that are the result of a run whose last round was `round`."""
        state, self.result_round = self.best.result(last, round)
        return joined(self.method.models(state), layout)

    def _references(self, folder: Path | None, ends: contextlib.ExitStack) -> References | None:
        """What clients have, for downloads as differences: in the checkpoints' folder, or in one that goes at the end.
        """
        if not self.encoding.differences_down:
            if folder is not None and (earlier := folder / _REFERENCES).is_dir():  # of this run, with another encoding
                References(earlier, math.inf).remove()
            return None
        if folder is None:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="tepal-references-")))
        return References(folder / _REFERENCES, self.encoding.reference_megabytes)

    def _runner(
        self,
        grid: Grid,
        model: ServerModel,
        run: Run,
        past: Past,
        checkpoint: Checkpoint | None,
        references: References | None,
    ) -> RoundRunner:
        self.experiment = checkpoint.experiment if checkpoint else self.experiment
        sender = Sender(
            model.layout,
            self.method.transfer_blocks(model),
            experiment=self.experiment,
            record=self.arrayrecord_key,
            settings_record=self.configrecord_key,
            encoding=self.encoding,
            references=references,
        )
        if self.checkpoints is not None:
            sender.packer.digests = self.checkpoints.digests
        return RoundRunner(
            grid,
            sender,
            self.method,
            model,
            run,
            self.rules,
            weighted_by_key=self.weighted_by_key,
            schedule=self.schedule,
            classes=self.classes,
            robust=self.robust,
            memories={NAME: self.best, **({"initial": sender.packer.initial} if self.encoding.start == "made" else {})},
            past=past,
            awaited=checkpoint.clients if checkpoint and self.rules.deterministic else (),
            on_progress=self.on_progress,
        )

    def _end(self, this: Round, result: Result) -> None:
        report, number = this.report, this.number
        report.record = {**report.record, **report.shares()}
        report.seconds = time.monotonic() - this.started
        for metrics, of_rounds in (
            (report.train_metrics, result.train_metrics_clientapp),
            (report.evaluate_metrics, result.evaluate_metrics_clientapp),
            (report.server_metrics, result.evaluate_metrics_serverapp),
        ):
            if metrics:
                of_rounds[number] = MetricRecord(dict(metrics))
        log.info("%s", report.in_a_line(this.rounds))
        self.on_round(report)
