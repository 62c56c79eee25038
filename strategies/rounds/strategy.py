"""The round, in one place: who takes part, what is sent, what comes back, what is refused, what is merged and scored.

`MethodStrategy` is a Flower `Strategy` that drives any `Method`. It streams: replies are merged as they arrive and
dropped, so that its memory does not grow with the number of clients.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from tepal.exchange.encodings import Encoding, EncodingError
from tepal.exchange.files import DamagedFile
from tepal.exchange.layout import Layout
from tepal.exchange.modes import join_modes, modes_of
from tepal.exchange.plan import EVALUATE, FINAL, INTRODUCE, LABEL_COUNTS, TRAIN, Plan, Reply
from tepal.exchange.records import record_of
from tepal.exchange.sender import Sender
from tepal.strategies.aggregate import ON_TESTS, mean_metrics, over_clients
from tepal.strategies.method import Method, ModelBlocks, ServerModel
from tepal.strategies.rounds.checkpoint import Checkpoint, CheckpointError, Checkpoints, layout_digest
from tepal.strategies.rounds.messenger import SERVER, Messenger, RoundReport
from tepal.strategies.rounds.nodes import Nodes, Standing
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

_INTRODUCTION = 300.0  # seconds that a new node is given to introduce itself
_INTRODUCED = 1000, 4  # nodes at a time, and times a round's cohort, whichever is more: many thousands take rounds
_SAY_AGAIN, _ASK_AGAIN = 15.0, 3.0  # seconds
_RETURN = 300.0  # seconds that a deterministic run which is resumed waits for the clients that it had


class RoundFailed(RuntimeError):
    """Too few clients. Nothing that was learned before is lost: `result` has the model of the last finished round."""

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass
class _Round:
    """What all exchanges of one round share."""

    number: int
    rounds: int
    config: ConfigRecord
    timeout: float
    report: RoundReport
    started: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    """Of the attempt's exchanges that are left; each gets its share of the time until then."""
    phases_left: int = 0

    def share(self) -> float:
        """Seconds for the next exchange: a silent client in an early phase must not take the time of the others."""
        if not self.phases_left:  # an evaluation
            return self.timeout
        seconds = max(self.deadline - time.monotonic(), 0.0) / self.phases_left
        self.phases_left -= 1
        return seconds


class MethodStrategy(Strategy):
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
        method: Method,
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
        self.blocks = _blocks(model)
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
        self._sender: Sender
        self._messenger: Messenger
        self._nodes: Nodes
        self._standing: Standing
        self._cells: tuple[Cell, ...]
        self._awaited: set[str]  # clients for which a resumed run waits
        self._note: str  # the server's own trouble, for the next report

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
        model = self._server_model(initial_arrays)
        state = self.method.init(model, self.seed)
        checkpoint = self._checkpoint(model)
        if checkpoint is not None:
            self.experiment = checkpoint.experiment
        self._sender = Sender(
            model.layout,
            self.method.grain(model),
            experiment=self.experiment,
            record=self.arrayrecord_key,
            settings_record=self.configrecord_key,
            encoding=self.encoding,
        )
        if self.checkpoints is not None:
            self._sender.digests = self.checkpoints.digests
        self._messenger = Messenger(
            grid, self._sender, weighted_by_key=self.weighted_by_key, accept=self.method.accept,
            noticed=self.on_progress,
        )  # fmt: skip
        self._cells = cells(model.layout, self.blocks)
        self._nodes, self._standing, self._awaited, self._note = Nodes(), Standing(), set(), ""
        self.summary()
        result = Result()
        first = 1
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        folder, keep = (self.checkpoints.folder, self.checkpoints.keep) if self.checkpoints else (None, 0)
        self.method.open(folder, keep)
        try:
            if checkpoint is not None:
                first = checkpoint.round + 1
                state, checkpoint = self._go_on(checkpoint, result), None
            if evaluate_fn is not None and first == 1:
                report = RoundReport(0, "initial")
                report.server_metrics = _scalars(evaluate_fn(0, initial_arrays))
                result.evaluate_metrics_serverapp[0] = MetricRecord(dict(report.server_metrics))
                self.on_round(report)
            del initial_arrays, model  # what they hold goes with them, where the caller has not kept it
            state = self._on_disk(state)
            for number in range(first, num_rounds + 1):
                this = self._begin(state, number, num_rounds, train_config, timeout)
                state = self._train(state, this)
                self._score(state, replace(this, config=evaluate_config), evaluate_fn, last=number == num_rounds)
                self._end(this, result)
                state = self._save(state, number, result)
            result.arrays = self._arrays(state)
            return result
        except RoundFailed as failure:
            this.report.seconds = time.monotonic() - this.started
            self.on_round(this.report)
            result.arrays = self._arrays(state)
            failure.result = result
            raise
        finally:
            self._messenger.close()
            self.method.close()

    # ---- one round -----------------------------------------------------------------------------------------------

    def _begin(self, state: Any, number: int, rounds: int, train_config: ConfigRecord, timeout: float) -> _Round:
        report = RoundReport(
            number, self.method.phase_name(state), scored=self.method.scored, judged=self.method.judged,
            travel=Travel(self._sender.layout, self._cells),
        )  # fmt: skip
        if self._note:
            report.notes.append((SERVER, self._note))
            self._note = ""
        self._sender.new_round()
        return _Round(number, rounds, train_config, timeout, report)

    def _end(self, this: _Round, result: Result) -> None:
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
        log.info("%s", _in_a_line(report, this.rounds))
        self.on_round(report)

    def _train(self, state: Any, this: _Round) -> Any:
        """Sampling, all phases, merge. Returns the next state; the old one is untouched when it fails."""
        report = this.report
        for attempt in range(ATTEMPTS):
            self._meet(this)
            state, cohort = self.method.cohort(state, *self._draw(self.fraction_train, this, attempt, TRAIN))
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
                break  # they would refuse again: it is the app, not the weather
        raise RoundFailed(
            f"round {this.number} got fewer than min_replies={self.min_replies} good replies in {attempt + 1} attempts"
            + report.reasons()
        )

    def _prepare(self, state: Any, this: _Round, cohort: Sequence[str]) -> list[Plan]:
        """All phases but the last, and the plans of the last one."""
        report = this.report
        heard: dict[str, Reply] = {}
        this.phases_left = len(self.method.phases)
        this.deadline = time.monotonic() + this.timeout
        for phase in self.method.phases[:-1]:
            plans = self._plans(state, this, phase, cohort, heard)
            report.asked = [plan.client for plan in plans]
            heard = {reply.client: reply for reply in self._ask(state, plans, this)}
            # A cohort that has become too small has its next attempt at once.
            cohort = sorted(heard) if len(heard) >= self.min_replies else []
        plans = self._plans(state, this, self.method.phases[-1], cohort, heard)
        report.asked = [plan.client for plan in plans] or report.asked
        report.record = self.method.record(state, plans)
        report.learning_rate = self._mean_rate(state, plans, this)
        return plans

    def _merge(self, state: Any, this: _Round, plans: list[Plan]) -> Any | None:
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
            self._standing.good(reply.client)
            metrics[reply.client] = reply.metrics, reply.examples
            exchanges[reply.client] = reply.exchange
            report.replied.append(reply.client)
            del reply  # see `_ask`
        report.fedavg_down += len(plans)
        report.fedavg_up += len(report.replied)
        if len(metrics) < self.min_replies:
            return None
        report.train_metrics = self._measured(report, metrics, report.scored)
        merged = merger.finish()
        report.record = {**report.record, **self.method.change(state, merged)}
        self._sender.current.update(exchanges)
        return merged

    def _measured(
        self, report: RoundReport, metrics: Mapping[str, tuple[Mapping[str, float], int]], of: str
    ) -> dict[str, float]:
        """The mean of clients' metrics (client → metrics, weight); what the mean does not tell goes into the report."""
        report.over_clients = {**report.over_clients, **over_clients(metrics.values())}
        personal = report.scored != "received"
        for name in ("accuracy", "rmse") if personal else ():
            # `scored` clients, and the `accuracy` (or `rmse`) of each one's own model on its own test examples.
            found = {c: own[f"{of}-{name}"] for c, (own, _) in sorted(metrics.items()) if f"{of}-{name}" in own}
            names, scores = np.array([*found], str), np.array([*found.values()], float)
            report.record = {**report.record, **({"scored": names, name: scores} if found else {})}
        return mean_metrics(metrics.values(), self.weighted_by_key, alike=personal)

    def _plans(
        self, state: Any, this: _Round, phase: str, cohort: Sequence[str], heard: Mapping[str, Reply]
    ) -> list[Plan]:
        try:
            return self.method.plan(state, this.number, phase, cohort, heard)
        except OSError as error:  # of a method that keeps models on disk
            raise RoundFailed(f"round {this.number} cannot be planned: {error}") from error

    def _score(
        self,
        state: Any,
        this: _Round,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        *,
        last: bool,
    ) -> None:
        """Score the global model: by a cohort on its own test examples, unless clients do it as they train; here."""
        report = this.report
        report.seconds_train = time.monotonic() - this.started
        if self.fraction_evaluate and (last or not any(key.startswith(ON_TESTS) for key in report.train_metrics)):
            names, size, rng = self._draw(self.fraction_evaluate, this, 0, EVALUATE)
            cohort = sorted(names[k] for k in rng.choice(len(names), size, replace=False))
            plans = self.method.evaluation(state, this.number, cohort, more_rounds=not last)
            if last:
                plans = [replace(plan, options={**plan.options, FINAL: True}) for plan in plans]
            metrics = {reply.client: (reply.metrics, reply.examples) for reply in self._ask(state, plans, this)}
            report.fedavg_down += len(plans)
            report.evaluate_metrics = self._measured(report, metrics, report.judged)
        if evaluate_fn is not None:
            report.server_metrics = _scalars(evaluate_fn(this.number, self._arrays(state)))

    def _ask(self, state: Any, plans: list[Plan], this: _Round, limit: int | None = None) -> Iterator[Reply]:
        """Send every plan to its client, and yield the good replies as they come."""
        node_of = self._nodes.node_of()
        without_result = len(this.report.refused), len(this.report.lost)
        answers = self._messenger.ask(
            [(node_of[plan.client], plan) for plan in plans],
            this.report,
            values=lambda plan, tree: self.method.values(state, plan.client, tree),
            settings=lambda plan: self._settings(state, plan, this),
            timeout=this.share(),
            limit=limit,
        )
        try:
            for _, reply in answers:
                yield reply
                del reply  # it may be as large as the model, and the next one comes now
        except EncodingError as error:
            raise RoundFailed(f"round {this.number} cannot be sent: {error}") from error
        for client, _ in this.report.refused[without_result[0] :] + this.report.lost[without_result[1] :]:
            self._standing.failed(client, this.number)

    # ---- clients -------------------------------------------------------------------------------------------------

    def _meet(self, this: _Round) -> None:
        """Wait until enough clients are there, and let new nodes introduce themselves."""
        begun = time.monotonic()
        deadline = begun + this.timeout
        say_again = ask_again = begun  # when it is said what is waited for; when silent nodes are asked again
        while True:
            looked = time.monotonic()
            try:
                self._nodes.update(self._messenger.nodes())
            except Exception as error:  # a SuperLink that is busy or starting; it is asked again until the deadline
                log.warning("The SuperLink does not say which nodes are there: %s", error)
            too_few = len(self._nodes.available()) < self.min_available_nodes
            silent_too = too_few and time.monotonic() >= ask_again
            if asked := dict(self._nodes.take_new(this.number, silent_too=silent_too, most=self._introduced_at_once())):
                self._introduce(asked, this)
                ask_again = time.monotonic() + _ASK_AGAIN
            available, refusals = len(self._nodes.available()), self._nodes.refusals()
            self._awaited -= {*self._nodes.available()}
            if self._awaited and time.monotonic() > min(begun + _RETURN, deadline):
                log.warning(
                    "%s took part before the run was resumed and did not come back: the run goes on without them, and "
                    "will not end as it would have.", ", ".join(sorted(self._awaited)),
                )  # fmt: skip
                self._awaited.clear()
            if available >= self.min_available_nodes and not self._awaited:
                return
            if available < self.min_available_nodes <= available + len(refusals) and not self._nodes.waiting():
                raise RoundFailed(
                    f"only {available} of {available + len(refusals)} clients can take part, and "
                    f"{self.min_available_nodes} are needed ({self.needed_by}). The others say: "
                    + "; ".join(sorted(set(refusals)))
                )
            if time.monotonic() > deadline:
                raise RoundFailed(
                    f"{available} clients are there after {this.timeout:g} s, and {self.min_available_nodes} are "
                    f"needed: start more SuperNodes, or set {self.needed_by} lower" + this.report.reasons()
                )
            if time.monotonic() >= say_again:
                say_again = time.monotonic() + _SAY_AGAIN
                if available < self.min_available_nodes:
                    log.info("Waiting for clients: %d are there, %d are needed.", available, self.min_available_nodes)
                else:
                    log.info("Waiting for %s, as the run was resumed.", ", ".join(sorted(self._awaited)))
            # A list of many thousands of nodes must not keep the SuperLink busy.
            time.sleep(max(0.5, time.monotonic() - looked))

    def _introduced_at_once(self) -> int | None:
        """How many new nodes introduce themselves before a round; None for all that there are."""
        if self.deterministic:  # which of them come first is not the same in another run
            return None
        least, times = _INTRODUCED
        return max(least, times * self.cohort_size(self._connected(), self.fraction_train), self.min_available_nodes)

    def _connected(self) -> int:
        """Clients that can take part, and nodes that have had no turn yet to say whether they can."""
        return len(self._nodes.available()) + self._nodes.waiting()

    def _introduce(self, asked: Mapping[int, str], this: _Round) -> None:
        """Ask new nodes (node id → registered name or "") who they are, what they hold, and whether they can train."""
        plans = [
            (node_id, Plan(client=name, round=this.number, action=INTRODUCE, needs={}))
            for node_id, name in asked.items()
        ]
        refused: dict[int, str] = {}
        answers = self._messenger.ask(
            plans,
            this.report,
            values=lambda plan, tree: {},
            settings=lambda plan: this.config,
            timeout=min(this.timeout, _INTRODUCTION),
            refused=refused,
        )
        introduced = dict(answers)
        names = self._nodes.settle(
            {node_id: reply.client for node_id, reply in introduced.items()}, refused, asked, this.number
        )
        for node_id, name in names.items():
            reply = introduced[node_id]
            self._sender.held[name] = frozenset(reply.holds if reply.client == name else ())
            if (counts := reply.vectors.get(LABEL_COUNTS)) and min(counts) >= 0:
                this.report.label_counts[name] = counts
        for name in self._nodes.returned(names.values()):
            self._standing.good(name)

    def cohort_size(self, available: int, fraction: float) -> int:
        """How many of the available clients a round takes."""
        return min(available, max(int(available * fraction), self.min_replies))

    def _draw(
        self, fraction: float, this: _Round, attempt: int, what: str
    ) -> tuple[list[str], int, np.random.Generator]:
        """What a cohort is drawn from: the available clients, sorted, its size, and a generator of this draw alone."""
        out = self._standing.out(self._nodes.node_of(), this.number)
        if len(self._nodes.available()) - len(out) < self.min_replies:
            out = []  # better those than none
        if what == TRAIN:
            this.report.left_out = out
        left_out = set(out)
        names = [name for name in self._nodes.available() if name not in left_out]
        # A share of all that there are, also while most of them have not introduced themselves yet.
        size = min(len(names), self.cohort_size(len(names) + self._nodes.waiting(), fraction))
        return names, size, np.random.default_rng([self.seed, this.number, attempt, zlib.crc32(what.encode())])

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _checkpoint(self, model: ServerModel) -> Checkpoint | None:
        """The checkpoint to go on from; None for a run from the beginning. Raises CheckpointError."""
        if self.checkpoints is None:
            return None
        if not self.resume:
            if rounds := self.checkpoints.rounds():
                raise CheckpointError(
                    f"{self.checkpoints.folder} has a checkpoint of round {rounds[-1]}: go on from it with "
                    "resume=True, or choose another folder"
                )
            return None
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            log.info("%s has no checkpoint: the run begins at round 1.", self.checkpoints.folder)
            return None
        for what, then, now in (
            ("strategy", checkpoint.method, self._identity()),
            ("seed", checkpoint.seed, self.seed),
            ("model", checkpoint.layout, layout_digest(model.layout)),
        ):
            if then != now:
                raise CheckpointError(
                    f"the checkpoint of round {checkpoint.round} in {self.checkpoints.folder} is of another {what} "
                    f"({then}; this run has {now}): resume with what the run was started with"
                )
        return checkpoint

    def _go_on(self, checkpoint: Checkpoint, result: Result) -> Any:
        """Take over what a checkpoint remembers. Returns the method's state."""
        assert self.checkpoints is not None
        log.info("Resumed after round %d, from %s.", checkpoint.round, self.checkpoints.folder)
        self._sender.held = {client: frozenset(ids) for client, ids in checkpoint.held.items()}
        self._sender.current = dict(checkpoint.current)
        self._sender.restorable = tuple(self.checkpoints.versions())
        self._standing = Standing(**checkpoint.standing)
        self._awaited = set(checkpoint.clients) if self.deterministic else set()
        for kind, rounds in checkpoint.history.items():
            getattr(result, kind).update({int(number): MetricRecord(dict(m)) for number, m in rounds.items()})
        return self.method.resume(checkpoint.state, self.checkpoints.states(before=checkpoint.round))

    def _on_disk(self, state: Any) -> Any:
        """The state that a run begins with, out of the way of what its first round needs memory for."""
        if self.checkpoints is not None:
            with contextlib.suppress(OSError):  # it then stays in memory
                return self.checkpoints.on_disk(state)
        return state

    def _save(self, state: Any, server_round: int, result: Result) -> Any:
        """Write a checkpoint, and return the state with its arrays in that file, where the system can drop them.

        One that cannot be written is said, and the run goes on.
        """
        if self.checkpoints is None:
            return state
        history = {
            kind: {str(number): dict(metrics) for number, metrics in getattr(result, kind).items()}
            for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
        }
        checkpoint = Checkpoint(
            round=server_round,
            experiment=self.experiment,
            seed=self.seed,
            method=self._identity(),
            layout=layout_digest(self._sender.layout),
            state=state,
            held={client: tuple(sorted(ids)) for client, ids in sorted(self._sender.held.items()) if ids},
            current=dict(self._sender.current),
            standing=self._standing.to_json(),
            clients=tuple(self._nodes.available()),
            history=history,
        )
        try:
            self.method.settle(state)
            self.checkpoints.save(checkpoint)
        except OSError as error:
            self._note = f"no checkpoint of round {server_round} could be written: {error}"
            log.error("%s. The run goes on; should it be killed, it resumes after an earlier round.", self._note)
            if server_round not in self.checkpoints.rounds():
                return state
            # It is there and may be all that there is, though the disk did not say that it will outlive a power cut.
        self.method.saved(state)
        kept = (*self._sender.restorable, checkpoint.current)
        self._sender.restorable = kept[-self.checkpoints.keep :]
        try:
            return self.checkpoints.saved_state(server_round)
        except (OSError, DamagedFile) as error:
            log.warning("The state of round %d stays in memory: %s", server_round, error)
            return state

    def _identity(self) -> dict[str, str | int | float]:
        options = {key: np.asarray(value).item() for key, value in self.method.describe().items()}
        return {"name": type(self.method).__name__, **options}

    # ---- arrays and settings -------------------------------------------------------------------------------------

    def _server_model(self, initial_arrays: ArrayRecord) -> ServerModel:
        models: list[dict[str, np.ndarray]] = []
        for record in modes_of(initial_arrays):
            models.append({name: array.numpy() for name, array in record.items()})
            for array in models[-1].values():
                array.flags.writeable = False
        name, layout = "the model", Layout.of_arrays(models[0])
        if self.blocks is not None:
            name, layout = self.blocks.model, self.blocks.layout
        for raw in models:
            if different := layout.difference(Layout.of_arrays(raw), mine="model", others="arrays"):
                raise ValueError(f"the initial arrays are not those of {name}: {different}")
        return ServerModel(name, layout, tuple(layout.split(raw) for raw in models), self.blocks)

    def _arrays(self, state: Any) -> ArrayRecord:
        """What the run delivers, as Flower and apps know it: a raw `state_dict`, or those of an ensemble's modes."""
        models = [self._sender.layout.join(entries) for entries in self.method.models(state)]
        return join_modes(record_of(raw) for raw in models)

    def _settings(self, state: Any, plan: Plan, this: _Round) -> Mapping[str, Any]:
        """The app's settings for a plan, the learning rate scheduled."""
        if plan.action != TRAIN:
            return this.config
        factor = SCHEDULES[self.schedule](*self.method.progress(state, plan, this.rounds))
        rates = {key: this.config[key] for key in ("learning-rate", "lr") if key in this.config}
        scaled = {key: rate * factor for key, rate in rates.items() if isinstance(rate, int | float)}
        return {**this.config, **scaled}

    def _mean_rate(self, state: Any, plans: list[Plan], this: _Round) -> float | None:
        """The learning rate of a round, for its report; None where the app has another setting for it."""
        told = (self._settings(state, plan, this) for plan in plans)
        rates = [rate for of in told if isinstance(rate := of.get("lr", of.get("learning-rate")), int | float)]
        return sum(rates) / len(rates) if rates else None

    # ---- Flower's hooks ------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise NotImplementedError(_HOOKS)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        raise NotImplementedError(_HOOKS)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise NotImplementedError(_HOOKS)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        raise NotImplementedError(_HOOKS)


_HOOKS = (
    "Tepal's strategies stream replies and talk with one client more than once a round, which Flower's hooks "
    "(configure_train, aggregate_train, …) cannot express: call start(), and override the method's functions "
    "(plan, values, merger) to change what is sent and merged."
)


def _in_a_line(report: RoundReport, rounds: int) -> str:
    """A round for those who follow the log: `flwr run --stream`, or a file of it."""
    figures = [
        f"{len(report.replied)} of {len(report.asked)} clients", f"{report.down.payload / 1e6:.3g} MB down",
        f"{report.up.payload / 1e6:.3g} MB up", f"{report.seconds:.1f} s",
    ]  # fmt: skip
    scores = {**report.train_metrics, **report.evaluate_metrics, **report.server_metrics}
    figures += [f"{name} {scores[name]:.4f}" for name in sorted(scores) if name.endswith(("accuracy", "loss"))]
    return f"Round {report.round} of {rounds}, {report.phase}: {', '.join(figures)}."


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def _blocks(model: nn.Module | ModelBlocks | None) -> ModelBlocks | None:
    if model is None or (hasattr(model, "query_key") and hasattr(model, "layout")):
        return model  # type: ignore[return-value]
    from tepal.models.blocks import find_blocks

    return find_blocks(model)  # type: ignore[arg-type]


def _scalars(record: MetricRecord | None) -> dict[str, float]:
    return {name: value for name, value in (record or {}).items() if isinstance(value, int | float)}
