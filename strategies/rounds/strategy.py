"""The round, in one place: who takes part, what is sent, what comes back, what is merged and scored.

`MethodStrategy` is a Flower `Strategy` that drives any `Method`. It streams: replies are merged as they arrive and
dropped, so that its memory does not grow with the number of clients.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from tepal.exchange.encodings import Encoding, EncodingError
from tepal.exchange.layout import Layout
from tepal.exchange.plan import EVALUATE, FINAL, TRAIN, Outgoing, Plan, Reply
from tepal.exchange.sender import Sender
from tepal.strategies.aggregate import ON_TESTS
from tepal.strategies.method import Method, ModelBlocks, ServerModel
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.cohort import Cohorts, Rules
from tepal.strategies.rounds.flower import WithoutHooks, blocks_of, joined, server_model
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.messenger import Messenger
from tepal.strategies.rounds.report import LEFT_BEHIND, SERVER, Answered, Failure, RoundFailed, RoundReport
from tepal.strategies.rounds.resuming import Resuming
from tepal.strategies.rounds.round import Round
from tepal.strategies.rounds.travel import Cell, Travel, cells

if TYPE_CHECKING:
    from torch import nn

log = getLogger("flwr")

SCHEDULES: Mapping[str, Callable[[int, int], float]] = {
    "constant": lambda round, rounds: 1.0,
    "cosine": lambda round, rounds: 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds)),
}
"""Factor of the learning rate in round t of T, counted from 1."""

ATTEMPTS = 3
"""How often a round with too few replies is tried, each time with a new cohort."""


class MethodStrategy(WithoutHooks):
    """A Flower strategy that drives a method over Tepal's exchange.

    Args:
        method: what is planned, sent and merged.
        model: torch module, or its blocks from `find_blocks`. Without it every tensor of the initial arrays is one
            entry, which is enough for methods that know no blocks.
        fraction_train: share of the available clients that train in a round, in (0, 1]; at least `min_replies` clients.
        fraction_evaluate: share that scores the global model where clients do not score it while they train, and after
            the last round; 0 skips it.
        min_available_nodes: nodes that must be connected before a round starts.
        min_replies: fewer good replies than this, and the round is repeated with another cohort.
        max_replies: as soon as this many good replies are merged the round ends; later ones are dropped.
        schedule: of the learning rate over the rounds, "constant" or "cosine"; it scales `learning-rate` and `lr` of
            the train config, where that has them.
        seed: of everything the server draws.
        deterministic: merge in the order of client names, so that the same replies give the same bits.
        encoding: how values travel: in fewer bytes than they have, or as they are.
        experiment: id under which clients keep what they hold; a new one by default, and the checkpoint's own where a
            run is resumed.
        checkpoints: folder, or Checkpoints, where the run is saved after every round; None: it cannot be resumed.
        resume: go on from the newest checkpoint there; from the beginning when there is none.
        weighted_by_key: the metric by which replies are weighted, as in Flower's FedAvg.
        arrayrecord_key: name of the record with the model in messages, as in Flower's FedAvg.
        configrecord_key: name of the record with the settings in messages, as in Flower's FedAvg.
        on_round: called with a `RoundReport` after the initial evaluation (round 0) and after every round.
        on_progress: called with the report of the round that goes on, whenever a client was sent something or answered.
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
        _check("fraction_train", fraction_train, 0 < fraction_train <= 1, "in (0, 1]")
        _check("fraction_evaluate", fraction_evaluate, 0 <= fraction_evaluate <= 1, "in [0, 1]")
        _check("min_available_nodes", min_available_nodes, min_available_nodes >= 1, "at least 1")
        _check("min_replies", min_replies, min_replies >= 1, "at least 1")
        _check("max_replies", max_replies, max_replies is None or max_replies >= min_replies, "at least min_replies")
        _check("schedule", schedule, schedule in SCHEDULES, f"one of {sorted(SCHEDULES)}")
        self.method = method
        self.blocks = blocks_of(model)
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_available_nodes = max(min_available_nodes, min_replies)
        self.needed_by = "min_available_nodes"
        """The option that `min_available_nodes` comes from."""
        self.min_replies = min_replies
        self.max_replies = max_replies
        self.schedule = schedule
        self.seed = seed
        self.deterministic = deterministic
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
        # Of one run; `start` makes them.
        self._layout: Layout
        self._cells: tuple[Cell, ...]
        self._ledger: ClientLedger
        self._sender: Sender
        self._messenger: Messenger
        self._cohorts: Cohorts
        self._trouble: str  # the server's own, for the next report

    def summary(self) -> None:
        """Log what is in force."""
        options = {
            **self.method.describe(),
            "fraction_train": self.fraction_train,
            "fraction_evaluate": self.fraction_evaluate,
            "min_available_nodes": self.min_available_nodes,
            "min_replies": self.min_replies,
            "max_replies": self.max_replies,
            "schedule": self.schedule,
            "seed": self.seed,
            "deterministic": self.deterministic,
            "encoding": str(self.encoding),
        }
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

        `timeout` is the deadline of a round's training exchanges, which share it, and of an evaluation, in seconds; and
        the longest wait for `min_available_nodes`.

        Raises:
            RoundFailed: fewer good replies than `min_replies` in several attempts at a round, or too few clients that
                can take part. The exception carries the result so far.
            CheckpointError: a checkpoint of another model, method or seed; or one that is in the way of a new run.
            ValueError: initial arrays that are not those of the model, or a model that the method cannot train.
        """
        _check("num_rounds", num_rounds, num_rounds >= 1, "at least 1")
        _check("timeout", timeout, timeout > 0, "positive")
        model = server_model(initial_arrays, self.blocks)
        state = self.method.init(model, self.seed)
        resuming = Resuming(self.checkpoints, self.method, self.seed, model.layout) if self.checkpoints else None
        checkpoint = resuming.latest(resume=self.resume) if resuming else None
        if checkpoint is not None:
            self.experiment = checkpoint.experiment
        self._prepare_run(grid, model)
        self.summary()
        result = Result()
        first = 1
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        folder, keep = (self.checkpoints.folder, self.checkpoints.keep) if self.checkpoints else (None, 0)
        self.method.open(folder, keep)
        try:
            if resuming and checkpoint is not None:
                first = checkpoint.round + 1
                self._cohorts.awaited = set(checkpoint.clients) if self.deterministic else set()
                state, checkpoint = resuming.go_on(checkpoint, self._ledger, result), None
            elif evaluate_fn is not None:
                report = RoundReport(0, "initial", server_metrics=_scalars(evaluate_fn(0, initial_arrays)))
                result.evaluate_metrics_serverapp[0] = MetricRecord(dict(report.server_metrics))
                self.on_round(report)
            del initial_arrays, model  # what they hold goes with them, where the caller has not kept it
            if resuming:
                state = resuming.on_disk(state)
            for number in range(first, num_rounds + 1):
                this = self._begin(state, number, num_rounds, train_config, timeout)
                try:
                    state = self._train(state, this)
                    self._score(state, replace(this, config=evaluate_config), evaluate_fn, last=number == num_rounds)
                except RoundFailed as failure:
                    this.report.seconds = time.monotonic() - this.started
                    self.on_round(this.report)
                    result.arrays = joined(self.method.models(state), self._layout)
                    failure.result = result
                    raise
                self._end(this, result)
                if resuming:
                    state, self._trouble = resuming.save(
                        state, number, self.experiment, self._ledger, self._cohorts.available(), result
                    )
            result.arrays = joined(self.method.models(state), self._layout)
            return result
        finally:
            self._messenger.close()
            self.method.close()

    def _prepare_run(self, grid: Grid, model: ServerModel) -> None:
        self._layout, self._cells, self._trouble = model.layout, cells(model.layout, self.blocks), ""
        self._ledger = ClientLedger(self.checkpoints.keep if self.checkpoints else 0)
        self._sender = Sender(
            model.layout,
            self.method.transfer_blocks(model),
            experiment=self.experiment,
            record=self.arrayrecord_key,
            settings_record=self.configrecord_key,
            encoding=self.encoding,
        )
        if self.checkpoints is not None:
            self._sender.digests = self.checkpoints.digests
        self._messenger = Messenger(
            grid, self._sender, self._ledger, weighted_by_key=self.weighted_by_key, accept=self.method.accept
        )
        rules = Rules(
            self.fraction_train, self.min_available_nodes, self.needed_by, self.min_replies, self.seed,
            self.deterministic,
        )  # fmt: skip
        self._cohorts = Cohorts(rules, self._messenger.nodes, self._ledger)

    # ---- one round -----------------------------------------------------------------------------------------------

    def _begin(self, state: Any, number: int, rounds: int, train_config: ConfigRecord, timeout: float) -> Round:
        method = self.method
        report = RoundReport(
            number, method.phase_name(state), train_metrics_of=method.train_metrics_of,
            eval_metrics_of=method.eval_metrics_of, travel=Travel(self._layout, self._cells),
        )  # fmt: skip
        if self._trouble:
            report.notes.append((SERVER, self._trouble))
        self._sender.new_round()
        return Round(number, rounds, train_config, timeout, report)

    def _end(self, this: Round, result: Result) -> None:
        report, number = this.report, this.number
        if report.travel is not None:
            report.record = {**report.record, **report.travel.shares(len(report.asked))}
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

    def _train(self, state: Any, this: Round) -> Any:
        """Sampling, all phases, merge. Returns the next state; the old one is untouched when it fails."""
        report, attempt = this.report, 0
        for attempt in range(ATTEMPTS):
            send = partial(self._exchange, report)
            self._cohorts.wait(report, this.config, this.timeout, send)
            drawn = self._cohorts.draw(self.fraction_train, report, attempt, TRAIN)
            report.left_out = drawn.left_out
            state, cohort = self.method.cohort(state, drawn.names, drawn.size, drawn.rng)
            plans = self._prepare(state, this, sorted(cohort))
            merged = self._merge(state, this, plans)
            if merged is not None:
                return merged
            log.warning(
                "Round %d has %d good replies of %d asked, and needs %d (attempt %d of %d).",
                this.number, len(report.replied), len(plans), self.min_replies, attempt + 1, ATTEMPTS,
            )  # fmt: skip
            report.replied.clear()
            if report.refused_by_client.issuperset(report.asked):
                break  # not transient: they would refuse again
        raise RoundFailed(
            f"round {this.number} got fewer than min_replies={self.min_replies} good replies in {attempt + 1} attempts"
            + report.reasons()
        )

    def _prepare(self, state: Any, this: Round, cohort: Sequence[str]) -> list[Plan]:
        """All phases but the last, and the plans of the last one."""
        report = this.report
        probe_replies: dict[str, Reply] = {}
        this.phases_left = len(self.method.phases)
        this.deadline = time.monotonic() + this.timeout
        for phase in self.method.phases[:-1]:
            plans = self._plans(state, this, phase, cohort, probe_replies)
            report.asked = [plan.client for plan in plans]
            probe_replies = {reply.client: reply for reply in self._ask(state, plans, this)}
            # A cohort that has become too small has its next attempt at once.
            cohort = sorted(probe_replies) if len(probe_replies) >= self.min_replies else []
        plans = self._plans(state, this, self.method.phases[-1], cohort, probe_replies)
        report.asked = [plan.client for plan in plans] or report.asked
        report.record = self.method.record(state, plans)
        report.learning_rate = self._mean_rate(state, plans, this)
        return plans

    def _merge(self, state: Any, this: Round, plans: list[Plan]) -> Any | None:
        """The next state, merged of the replies as they come; None for too few."""
        report = this.report
        replies = self._ask(state, plans, this, self.max_replies)
        merger = self.method.merger(state, this.number)
        metrics: dict[str, tuple[Mapping[str, float], int]] = {}
        exchanges: dict[str, str] = {}
        for reply in sorted(replies, key=lambda reply: reply.client) if self.deterministic else replies:
            try:
                merger.add(reply)
            except OSError as error:  # of a method that keeps models on disk
                report.notes.append((SERVER, f"the reply of {reply.client} cannot be kept: {error}"))
                log.error("The reply of %s in round %d cannot be kept: %s", reply.client, this.number, error)
                continue
            self._ledger.standing.good(reply.client)
            metrics[reply.client] = reply.metrics, reply.examples
            exchanges[reply.client] = reply.exchange
            report.replied.append(reply.client)
            del reply  # see `_ask`
        report.fedavg_down += len(plans)
        report.fedavg_up += len(report.replied)
        if len(metrics) < self.min_replies:
            return None
        report.train_metrics = report.mean_of(metrics, report.train_metrics_of, self.weighted_by_key)
        merged = merger.finish()
        report.record = {**report.record, **self.method.change(state, merged)}
        self._ledger.merged(exchanges)
        return merged

    def _plans(
        self, state: Any, this: Round, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        try:
            return self.method.plan(state, this.number, phase, cohort, probe_replies)
        except OSError as error:  # of a method that keeps models on disk
            raise RoundFailed(f"round {this.number} cannot be planned: {error}") from error

    def _score(
        self,
        state: Any,
        this: Round,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        *,
        last: bool,
    ) -> None:
        """Score the global model: by a cohort on its own test examples, unless clients do it as they train; here."""
        report = this.report
        report.seconds_train = time.monotonic() - this.started
        if self.fraction_evaluate and (last or not any(key.startswith(ON_TESTS) for key in report.train_metrics)):
            cohort = self._cohorts.draw(self.fraction_evaluate, report, 0, EVALUATE).at_random()
            plans = self.method.evaluation(state, this.number, cohort, more_rounds=not last)
            if last:
                plans = [replace(plan, options={**plan.options, FINAL: True}) for plan in plans]
            metrics = {reply.client: (reply.metrics, reply.examples) for reply in self._ask(state, plans, this)}
            report.fedavg_down += len(plans)
            report.evaluate_metrics = report.mean_of(metrics, report.eval_metrics_of, self.weighted_by_key)
        if evaluate_fn is not None:
            report.server_metrics = _scalars(evaluate_fn(this.number, joined(self.method.models(state), self._layout)))

    def _ask(self, state: Any, plans: list[Plan], this: Round, limit: int | None = None) -> Iterator[Reply]:
        """Send every plan to its client, and yield the good replies as they come."""
        messages = [
            Outgoing(
                plan,
                partial(self.method.values, state, plan.client),
                self._settings(state, plan, this),
                self._cohorts.node_of(plan.client),
            )
            for plan in plans
        ]
        try:
            for answer in self._exchange(this.report, messages, this.share(), limit):
                if isinstance(answer, Answered):
                    reply = answer.reply
                    del answer  # it may be as large as the model, and the next one comes now
                    yield reply
                    del reply
                elif answer.state != LEFT_BEHIND:
                    self._ledger.standing.failed(answer.client, this.number)
        except EncodingError as error:
            raise RoundFailed(f"round {this.number} cannot be sent: {error}") from error

    def _exchange(
        self, report: RoundReport, messages: Iterable[Outgoing], timeout: float, limit: int | None = None
    ) -> Iterator[Answered | Failure]:
        """Send these messages; what happens is entered in the report, and what came of each is yielded."""
        messages = list(messages)
        for outgoing in messages:
            report.ask(outgoing.plan)
        for event in self._messenger.exchange(messages, timeout=timeout, limit=limit):
            report.add(event)
            self.on_progress(report)
            if isinstance(event, Answered | Failure):
                yield event
            del event

    # ---- settings --------------------------------------------------------------------------------------------------

    def _settings(self, state: Any, plan: Plan, this: Round) -> Mapping[str, Any]:
        """The app's settings for a plan: the round's number, and the learning rate scheduled."""
        settings = {**this.config, "server-round": plan.round}
        if plan.action != TRAIN:
            return settings
        factor = SCHEDULES[self.schedule](*self.method.progress(state, plan, this.rounds))
        rates = {key: this.config[key] for key in ("learning-rate", "lr") if key in this.config}
        scaled = {key: rate * factor for key, rate in rates.items() if isinstance(rate, int | float)}
        return {**settings, **scaled}

    def _mean_rate(self, state: Any, plans: list[Plan], this: Round) -> float | None:
        """The learning rate of a round, for its report; None where the app has another setting for it."""
        told = (self._settings(state, plan, this) for plan in plans)
        rates = [rate for of in told if isinstance(rate := of.get("lr", of.get("learning-rate")), int | float)]
        return sum(rates) / len(rates) if rates else None


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def _scalars(record: MetricRecord | None) -> dict[str, float]:
    return {name: value for name, value in (record or {}).items() if isinstance(value, int | float)}
