"""The round: choose a cohort, plan, send, merge the replies, score, record.

`MethodStrategy` is a Flower `Strategy` that runs any `Method`. Replies are merged as they arrive and then dropped, so
that the server's memory does not grow with the number of clients.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from tepal.exchange.encodings import Encoding, EncodingError
from tepal.exchange.layout import Layout
from tepal.exchange.plan import EVALUATE, FINAL, INTRODUCE, TRAIN, Outgoing, Plan, Reply
from tepal.exchange.sender import Sender
from tepal.host.text import visible
from tepal.strategies.aggregate import ON_TESTS
from tepal.strategies.method import Method, ModelBlocks, Run, ServerModel
from tepal.strategies.robust import mean_factory
from tepal.strategies.rounds.checkpoint import Checkpoint, Checkpoints
from tepal.strategies.rounds.cohort import Cohorts, Rules, check
from tepal.strategies.rounds.flower import WithoutHooks, blocks_of, joined, server_model
from tepal.strategies.rounds.judging import Judge, Refused
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.messenger import Messenger
from tepal.strategies.rounds.norms import UpdateNorms, largest, sample
from tepal.strategies.rounds.past import Past
from tepal.strategies.rounds.report import LEFT_BEHIND, SERVER, Answered, Failure, RoundFailed, RoundReport
from tepal.strategies.rounds.resuming import Resuming
from tepal.strategies.rounds.round import Round
from tepal.strategies.rounds.travel import Segment, Travel, segments
from tepal.strategies.rounds.weights import exceeds

if TYPE_CHECKING:
    from torch import nn

log = getLogger("flwr")

SCHEDULES: Mapping[str, Callable[[int, int], float]] = {
    "constant": lambda round, rounds: 1.0,
    "cosine": lambda round, rounds: 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds)),
}
"""Name → factor of the learning rate in round t of T, counted from 1."""

ATTEMPTS = 3
"""How often a round with too few replies is attempted, each time with a new cohort."""


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
        max_weight_share: the largest share that one client has in the weights of a round with three or more, in (0, 1];
            the weight of a heavier one is reduced to it.
        classes: number of classes of the task, if it has any: clients' label counts of another number are not recorded.
        deterministic: merge in the order of client names, so that the same replies give the same bits.
        robust: how the clients' parts are averaged: "none" (weighted mean), "clip", "trimmed" (coordinate-wise trimmed
            mean), "median" (coordinate-wise), "krum" (multi-Krum) or "rfa" (geometric median); see
            `tepal.strategies.robust`. It applies to every method that averages over clients.
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
        # Parts of one run, made by `start`.
        self._layout: Layout
        self._segments: tuple[Segment, ...]
        self._ledger: ClientLedger
        self._sender: Sender
        self._messenger: Messenger
        self._cohorts: Cohorts
        self._norms: UpdateNorms
        self._judge: Judge
        self._past: Past
        self._trouble: str  # an error of the server itself, for the next report

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
        model, saved = server_model(initial_arrays, self.blocks), self.checkpoints
        resuming = Resuming(saved, self.method, self.rules.seed, model.layout) if saved else None
        checkpoint = resuming.latest(resume=self.resume) if resuming else None
        folder = saved.folder if saved else None
        mean = mean_factory(self.robust, self.hostile_share, self.krum_keep, folder)
        run = Run(self.rules.seed, folder, saved.keep if saved else 0, mean)
        result = Result()
        first = 1
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        with contextlib.ExitStack() as ends:
            state = self.method.init(model, run)
            if self.method.storage:
                ends.callback(self.method.storage.close)
            self._prepare_run(grid, model, run, checkpoint)
            ends.callback(self._messenger.close)
            self.summary()
            if resuming and checkpoint is not None:
                first = checkpoint.round + 1
                state, checkpoint = resuming.restore(checkpoint, self._ledger, self._norms, result), None
            elif evaluate_fn is not None:
                report = RoundReport(0, "initial", server_metrics=_scalars(evaluate_fn(0, initial_arrays)))
                result.evaluate_metrics_serverapp[0] = MetricRecord(dict(report.server_metrics))
                self.on_round(report)
            del initial_arrays, model  # their memory is released, unless the caller has kept them
            if resuming:
                state = resuming.on_disk(state)
            self._past = Past(partial(resuming.before, first - 1) if resuming and first > 2 else None)
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
                        state, number, self.experiment, self._ledger, self._norms, self._cohorts.available(), result
                    )
            result.arrays = joined(self.method.models(state), self._layout)
            return result

    def _prepare_run(self, grid: Grid, model: ServerModel, run: Run, checkpoint: Checkpoint | None) -> None:
        self._layout, self._segments, self._trouble = model.layout, segments(model.layout, self.blocks), ""
        self.experiment = checkpoint.experiment if checkpoint else self.experiment
        self._ledger = ClientLedger(run.keep)
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
            grid, self._sender, self._ledger, weighted_by_key=self.weighted_by_key, accept=self._accept
        )
        awaited = checkpoint.clients if checkpoint and self.rules.deterministic else ()
        self._cohorts = Cohorts(self.rules, self._messenger.nodes, self._ledger, awaited, self.classes)
        self._norms = UpdateNorms(self.method.transfer_blocks(model))
        self._judge = Judge(self._norms, self.rules.max_weight_share, clip=self.robust == "clip", folder=run.folder)

    # ---- one round -----------------------------------------------------------------------------------------------

    def _begin(self, state: Any, number: int, rounds: int, train_config: ConfigRecord, timeout: float) -> Round:
        method = self.method
        report = RoundReport(
            number, method.phase_name(state), train_metrics_of=method.train_metrics_of,
            eval_metrics_of=method.eval_metrics_of, travel=Travel(self._layout, self._segments),
        )  # fmt: skip
        if self._trouble:
            report.notes.append((SERVER, self._trouble))
        self._sender.forget_packed()
        self._norms.begin()
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
        """Train from this state, or from the one before it if no client can train from this one.

        If none can train from that one either, the model is not the reason, and this state stands.
        """
        try:
            return self._attempts(state, this)
        except RoundFailed:
            if not this.report.all_failed() or (earlier := self._past.roll_back()) is None:
                raise
            suspects = largest(self._norms.merged_ratios)
            self._ledger.undo_merge()
            for client in this.report.asked:
                self._ledger.good(client)
            self._ledger.leave_out(suspects, this.number)
            note = (
                "no client can train from the model that was merged last: the run returns to the one before it, and "
                f"leaves out the clients whose updates were largest ({', '.join(suspects) or 'none'})"
            )
            log.error("Round %d: %s.", this.number, note)
            this.report.notes.append((SERVER, note))
            return self._attempts(earlier, this)

    def _attempts(self, state: Any, this: Round) -> Any:
        """Draw a cohort, run all phases and merge. Returns the next state; a failure leaves the old one unchanged."""
        report, rules, attempt = this.report, self.rules, 0
        for attempt in range(ATTEMPTS):
            send = partial(self._exchange, report)
            self._cohorts.wait(report, this.config, this.timeout, send)
            drawn = self._cohorts.draw(rules.fraction_train, report, attempt, TRAIN)
            report.left_out = drawn.left_out
            state, cohort = self.method.cohort(state, drawn.names, drawn.size, drawn.rng)
            plans = self._prepare(state, this, sorted(cohort))
            merged = self._merge(state, this, plans)
            if merged is not None:
                return merged
            log.warning(
                "Round %d has %d good replies of %d asked, and needs %d (attempt %d of %d).",
                this.number, len(report.replied), len(plans), rules.min_replies, attempt + 1, ATTEMPTS,
            )  # fmt: skip
            report.replied.clear()
            if report.refused_by_client.issuperset(report.asked):
                break  # not transient: these clients would refuse again
        raise RoundFailed(
            f"round {this.number} got fewer than min_replies={rules.min_replies} good replies in {attempt + 1} attempts"
            + report.reasons()
        )

    def _prepare(self, state: Any, this: Round, cohort: Sequence[str]) -> list[Plan]:
        """Run all phases but the last, and return the plans of the last one."""
        report = this.report
        probe_replies: dict[str, Reply] = {}
        this.phases_left = len(self.method.phases)
        this.deadline = time.monotonic() + this.timeout
        for phase in self.method.phases[:-1]:
            plans = self._plans(state, this, phase, cohort, probe_replies)
            report.asked = [plan.client for plan in plans]
            replies = self._ask(self._outgoing(state, plans, this), this)
            probe_replies = {reply.client: reply for reply in replies}
            # With too few replies the last phase has no plans, and the next attempt follows at once.
            cohort = sorted(probe_replies) if len(probe_replies) >= self.rules.min_replies else []
        plans = self._plans(state, this, self.method.phases[-1], cohort, probe_replies)
        report.asked = [plan.client for plan in plans] or report.asked
        report.record = self.method.record(state, plans)
        return plans

    def _merge(self, state: Any, this: Round, plans: list[Plan]) -> Any | None:
        """Send the last phase and merge the replies as they arrive. Returns the next state; None for too few replies.
        """
        report, ledger, key = this.report, self._ledger, self.weighted_by_key
        clients = [plan.client for plan in plans]
        all_of_them = self._norms.first or self._judge.clip
        messages = self._outgoing(state, plans, this, measured=clients if all_of_them else sample(clients))
        report.learning_rate = _mean_rate(messages)
        replies = self._ask(messages, this, self.rules.max_replies)
        merger = self.method.merger(state, this.number)
        metrics: dict[str, tuple[Mapping[str, float], int]] = {}
        exchanges: dict[str, str] = {}
        in_order = sorted(replies, key=lambda reply: reply.client) if self.rules.deterministic else replies
        for reply in self._judge.judged(
            in_order,
            {plan.client: plan for plan in plans},
            {client: ledger.size(client, key) for client in clients},
            partial(self.method.values, state),
        ):
            if isinstance(reply, Refused):
                self._refuse(reply.client, reply.reason, this)
                continue
            try:
                merger.add(reply)
            except OSError as error:  # of a method that stores models on disk
                report.notes.append((SERVER, f"the reply of {reply.client} cannot be stored: {error}"))
                log.error("The reply of %s in round %d cannot be stored: %s", reply.client, this.number, error)
                continue
            except Exception as error:  # of one client's values: a merger is as if this reply had not come
                log.debug("The reply of %s cannot be merged.", reply.client, exc_info=True)
                self._refuse(reply.client, f"it cannot be merged ({type(error).__name__}: {error})", this)
                continue
            self._ledger.good(reply.client)
            metrics[reply.client] = reply.metrics, reply.examples
            exchanges[reply.client] = reply.exchange
            report.replied.append(reply.client)
            del reply  # see `_ask`
        report.fedavg_down += len(plans)
        report.fedavg_up += len(report.replied)
        if len(metrics) < self.rules.min_replies:
            return None
        try:
            merged = merger.finish()
        except OSError as error:  # of replies that are stored on disk
            raise RoundFailed(f"round {this.number} cannot be merged: {error}") from error
        if not self.method.storage and (problem := self._past.problem(state, merged)):
            suspects = largest(self._norms.ratios)
            log.error("The merged model of round %d does not count: %s.", this.number, problem)
            report.notes.append((SERVER, f"the merged model does not count: {problem}"))
            for client in suspects:
                self._refuse(client, "its update was among the largest of a merge that does not count", this)
            ledger.leave_out(suspects, this.number)
            return None
        report.train_metrics = report.mean_of(
            metrics, report.train_metrics_of, key, share=self.rules.max_weight_share
        )
        report.record = {**report.record, **self._norms.record(), **self.method.change(state, merged)}
        ledger.merged(exchanges, {client: examples for client, (_, examples) in metrics.items()})
        self._norms.merged()
        self._past.merged(state)
        return merged

    def _accept(self, plan: Plan, reply: Reply) -> None:
        """Raise ValueError for a reply that claims more examples than its introduction did, or that the method refuses.
        """
        if plan.action != INTRODUCE:
            introduced, tests = self._ledger.introduction(plan.client), plan.action == EVALUATE
            if reason := exceeds(reply, introduced, self.weighted_by_key, tests=tests):
                self._cohorts.introduce_again(plan.client)
                raise ValueError(reason)
        self.method.accept(plan, reply)

    def _refuse(self, client: str, reason: str, this: Round) -> None:
        """Enter that the reply of a client is not merged."""
        reason = visible(reason)
        log.warning("%s is refused in round %d: %s", client, this.number, reason)
        this.report.refuse(client, reason)
        self._ledger.failed(client, this.number)

    def _plans(
        self, state: Any, this: Round, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        try:
            return self.method.plan(state, this.number, phase, cohort, probe_replies)
        except OSError as error:  # of a method that stores models on disk
            raise RoundFailed(f"round {this.number} cannot be planned: {error}") from error

    def _score(
        self,
        state: Any,
        this: Round,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        *,
        last: bool,
    ) -> None:
        """Score the model: by a cohort on its test examples, unless clients do so as they train, and by `evaluate_fn`.
        """
        report, fraction = this.report, self.rules.fraction_evaluate
        report.seconds_train = time.monotonic() - this.started
        if fraction and (last or not any(key.startswith(ON_TESTS) for key in report.train_metrics)):
            cohort = self._cohorts.draw(fraction, report, 0, EVALUATE).at_random()
            plans = self.method.evaluation(state, this.number, cohort, more_rounds=not last)
            if last:
                plans = [replace(plan, options={**plan.options, FINAL: True}) for plan in plans]
            replies = self._ask(self._outgoing(state, plans, this), this)
            metrics = {reply.client: (reply.metrics, reply.examples) for reply in replies}
            report.fedavg_down += len(plans)
            report.evaluate_metrics = report.mean_of(
                metrics, report.eval_metrics_of, self.weighted_by_key, share=self.rules.max_weight_share
            )
        if evaluate_fn is not None:
            report.server_metrics = _scalars(evaluate_fn(this.number, joined(self.method.models(state), self._layout)))

    def _outgoing(
        self, state: Any, plans: list[Plan], this: Round, measured: Collection[str] = ()
    ) -> list[Outgoing]:
        """Each plan with its client's values, the app's settings and the client's node."""
        return [
            Outgoing(
                plan,
                partial(self.method.values, state, plan.client),
                self._settings(state, plan, this),
                self._cohorts.node_of(plan.client),
                plan.client in measured,
            )
            for plan in plans
        ]

    def _ask(self, messages: list[Outgoing], this: Round, limit: int | None = None) -> Iterator[Reply]:
        """Send these messages, and yield the good replies as they arrive."""
        try:
            for answer in self._exchange(this.report, messages, this.share(), limit):
                if isinstance(answer, Answered):
                    reply = answer.reply
                    del answer  # it may be as large as the model, and the next one arrives now
                    yield reply
                    del reply
                elif answer.state != LEFT_BEHIND:
                    self._ledger.failed(answer.client, this.number)
        except EncodingError as error:
            raise RoundFailed(f"round {this.number} cannot be sent: {error}") from error

    def _exchange(
        self, report: RoundReport, messages: Iterable[Outgoing], timeout: float, limit: int | None = None
    ) -> Iterator[Answered | Failure]:
        """Send these messages, enter all events into the report, and yield each client's answer or failure."""
        messages = list(messages)
        for outgoing in messages:
            report.ask(outgoing.plan)
        for event in self._messenger.exchange(messages, timeout=timeout, limit=limit):
            report.add(event)
            self.on_progress(report)
            if isinstance(event, Answered | Failure):
                yield event
            del event

    def _settings(self, state: Any, plan: Plan, this: Round) -> Mapping[str, Any]:
        """The app's settings for a plan: its config, the round's number, and the scheduled learning rate."""
        settings = {**this.config, "server-round": plan.round}
        if plan.action != TRAIN:
            return settings
        factor = SCHEDULES[self.schedule](*self.method.progress(state, plan, this.rounds))
        rates = {key: this.config[key] for key in ("learning-rate", "lr") if key in this.config}
        scaled = {key: rate * factor for key, rate in rates.items() if isinstance(rate, int | float)}
        return {**settings, **scaled}


def _mean_rate(messages: list[Outgoing]) -> float | None:
    """The mean learning rate of a round's messages; None if the app has another setting for it."""
    rates = [outgoing.settings.get("lr", outgoing.settings.get("learning-rate")) for outgoing in messages]
    known = [rate for rate in rates if isinstance(rate, int | float)]
    return sum(known) / len(known) if known else None


def _scalars(record: MetricRecord | None) -> dict[str, float]:
    return {name: value for name, value in (record or {}).items() if isinstance(value, int | float)}
