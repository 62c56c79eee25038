"""The round, in one place: who takes part, what is sent, what comes back, what is refused, what is merged and scored.

`MethodStrategy` is a Flower `Strategy` that drives any `Method`. It streams: replies are merged as they arrive and
dropped, so that its memory does not grow with the number of clients.
"""

from __future__ import annotations

import math
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from tepal.exchange.layout import Layout, Names
from tepal.exchange.plan import EVALUATE, INTRODUCE, TRAIN, Plan, Reply
from tepal.exchange.sender import NO_MOD, BadReply, ClientRefuses, Missing, Sender, Traffic
from tepal.strategies.aggregate import mean_metrics
from tepal.strategies.method import Method, ModelBlocks, ServerModel
from tepal.strategies.nodes import Nodes

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

RESENDS = 2
"""How often a client may say in one exchange that it lacks something."""

_INTRODUCTION = 300.0  # seconds that a new node is given to introduce itself
_SAY_AGAIN = 15.0  # seconds
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks for replies

_SCORED = ("received-", "trained-", "personal-")


class RoundFailed(RuntimeError):
    """Too few clients. Nothing that was learned before is lost: `result` has the model of the last finished round."""

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass
class RoundReport:
    """What happened in one round; every figure in it was measured."""

    round: int
    phase: str
    asked: list[str] = field(default_factory=list)
    replied: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(client, reason): its answer came and was not merged."""
    refused_by_client: list[str] = field(default_factory=list)
    """Clients, of those refused, that themselves said why they give no result."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """(client, reason): no answer came."""
    down: Traffic = field(default_factory=Traffic)
    up: Traffic = field(default_factory=Traffic)
    fedavg_down: int = 0
    """How often the full model would have gone down, had the same exchanges been FedAvg's."""
    fedavg_up: int = 0
    resent: int = 0
    learning_rate: float | None = None
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    evaluate_metrics: Mapping[str, float] = field(default_factory=dict)
    server_metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_train: float = 0.0


@dataclass(frozen=True)
class _Asked:
    """A plan on its way: to which node, and how often what it lacked was sent again."""

    node_id: int
    plan: Plan
    resends: int = 0

    @property
    def name(self) -> str:
        return self.plan.client or f"node {self.node_id}"


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
        experiment: id under which clients keep what they hold; a new one by default.
        weighted_by_key, arrayrecord_key, configrecord_key: as in Flower's FedAvg.
        on_round: called with a `RoundReport` after the initial evaluation (round 0) and after every round.
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
        experiment: str | None = None,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        on_round: Callable[[RoundReport], None] | None = None,
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
        self.min_replies = min_replies
        self.max_replies = max_replies
        self.schedule = schedule
        self.seed = seed
        self.deterministic = deterministic
        self.experiment = experiment or uuid.uuid4().hex[:12]
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.on_round = on_round or (lambda report: None)
        self._sender: Sender
        self._nodes = Nodes()
        self._late: set[str] = set()

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

        `timeout` is the deadline of one exchange, in seconds, and the longest wait for `min_available_nodes`.

        Raises:
            RoundFailed: fewer good replies than `min_replies` in several attempts at a round, or too few clients that
                can take part. The exception carries the result so far.
            ValueError: initial arrays that are not those of the model, or a model that the method cannot train.
        """
        _check("num_rounds", num_rounds, num_rounds >= 1, "at least 1")
        _check("timeout", timeout, timeout > 0, "positive")
        model = self._server_model(initial_arrays)
        state = self.method.init(model, self.seed)
        self._sender = Sender(
            model.layout, self.method.grain(model), experiment=self.experiment, record=self.arrayrecord_key
        )
        self.summary()
        result = Result()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        if evaluate_fn is not None:
            report = RoundReport(0, "initial")
            report.server_metrics = _scalars(evaluate_fn(0, initial_arrays))
            result.evaluate_metrics_serverapp[0] = MetricRecord(dict(report.server_metrics))
            self.on_round(report)

        for server_round in range(1, num_rounds + 1):
            started = time.monotonic()
            report = RoundReport(server_round, self.method.phase_name(state))
            config, report.learning_rate = self._scheduled(train_config, server_round, num_rounds)
            self._sender.new_round()
            try:
                state = self._train_round(grid, state, server_round, config, timeout, report)
            except RoundFailed as failure:
                report.seconds = time.monotonic() - started
                self.on_round(report)
                result.arrays = self._arrays(state)
                failure.result = result
                raise
            report.seconds_train = time.monotonic() - started
            result.train_metrics_clientapp[server_round] = MetricRecord(dict(report.train_metrics))
            last = server_round == num_rounds
            if self.fraction_evaluate and (last or not any(key.startswith(_SCORED) for key in report.train_metrics)):
                self._evaluate(grid, state, server_round, evaluate_config, timeout, report, more_rounds=not last)
                result.evaluate_metrics_clientapp[server_round] = MetricRecord(dict(report.evaluate_metrics))
            if evaluate_fn is not None:
                report.server_metrics = _scalars(evaluate_fn(server_round, self._arrays(state)))
                result.evaluate_metrics_serverapp[server_round] = MetricRecord(dict(report.server_metrics))
            report.seconds = time.monotonic() - started
            self.on_round(report)
        result.arrays = self._arrays(state)
        return result

    # ---- one round -----------------------------------------------------------------------------------------------

    def _train_round(
        self, grid: Grid, state: Any, server_round: int, config: ConfigRecord, timeout: float, report: RoundReport
    ) -> Any:
        """Sampling, all phases, merge. Returns the next state; the old one is untouched when it fails."""
        for attempt in range(ATTEMPTS):
            self._meet(grid, server_round, timeout, report)
            cohort = self._sample(self.fraction_train, server_round, attempt, TRAIN)
            heard: dict[str, Reply] = {}
            for phase in self.method.phases[:-1]:
                plans = self.method.plan(state, server_round, phase, cohort, heard)
                heard = {r.client: r for r in self._exchange(grid, state, plans, config, timeout, report)}
            plans = self.method.plan(state, server_round, self.method.phases[-1], cohort, heard)
            merger = self.method.merger(state, server_round)
            metrics: list[tuple[Mapping[str, float], int]] = []
            report.asked = [plan.client for plan in plans]
            replies = self._exchange(grid, state, plans, config, timeout, report, self.max_replies)
            for reply in sorted(replies, key=lambda reply: reply.client) if self.deterministic else replies:
                merger.add(reply)
                metrics.append((reply.metrics, reply.examples))
                report.replied.append(reply.client)
            report.fedavg_down += len(plans)
            report.fedavg_up += len(report.replied)
            if len(metrics) >= self.min_replies:
                report.train_metrics = mean_metrics(metrics, self.weighted_by_key)
                return merger.finish()
            log.warning(
                "Round %d has %d good replies of %d asked, and needs %d (attempt %d of %d).",
                server_round, len(metrics), len(plans), self.min_replies, attempt + 1, ATTEMPTS,
            )  # fmt: skip
            report.replied.clear()
            if len(report.refused_by_client) >= len(plans):
                break  # they would refuse again: it is the app, not the weather
        raise RoundFailed(
            f"round {server_round} got fewer than min_replies={self.min_replies} good replies in {attempt + 1} attempts"
            + _reasons(report)
        )

    def _evaluate(
        self,
        grid: Grid,
        state: Any,
        server_round: int,
        config: ConfigRecord,
        timeout: float,
        report: RoundReport,
        *,
        more_rounds: bool,
    ) -> None:
        """Let a cohort score the global model on its own test examples."""
        cohort = self._sample(self.fraction_evaluate, server_round, 0, EVALUATE)
        plans = self.method.evaluation(state, server_round, cohort, more_rounds=more_rounds)
        config = ConfigRecord({**config, "server-round": server_round})
        metrics = [(r.metrics, r.examples) for r in self._exchange(grid, state, plans, config, timeout, report)]
        report.fedavg_down += len(plans)
        report.evaluate_metrics = mean_metrics(metrics, self.weighted_by_key)

    def _exchange(
        self,
        grid: Grid,
        state: Any,
        plans: Iterable[Plan],
        config: ConfigRecord,
        timeout: float,
        report: RoundReport,
        limit: int | None = None,
    ) -> Iterator[Reply]:
        """Send every plan to its client, and yield good replies as they come (see `_answers`)."""
        node_of = self._nodes.node_of()
        addressed = [(node_of[plan.client], plan) for plan in plans]
        for _, reply in self._answers(grid, state, addressed, config, timeout, report, limit):
            yield reply

    def _answers(
        self,
        grid: Grid,
        state: Any,
        plans: Sequence[tuple[int, Plan]],
        config: ConfigRecord,
        timeout: float,
        report: RoundReport,
        limit: int | None = None,
        refused: dict[int, str] | None = None,
    ) -> Iterator[tuple[int, Reply]]:
        """Send plans to nodes; yield (node id, good reply) until all came, `limit` came, or the deadline.

        A client that lacks something gets it here, in the same exchange. Bad replies go into the report, and into
        `refused` by node id.
        """
        deadline = time.monotonic() + timeout
        waiting: dict[str, _Asked] = {}

        def send(asked: _Asked, missing: Mapping[str, Names] | None = None) -> None:
            plan = asked.plan
            content = self._sender.content(plan, lambda tree: self.method.values(state, plan.client, tree), missing)
            report.down += Traffic.of(content)
            content[self.configrecord_key] = ConfigRecord({**config, **plan.options, "server-round": plan.round})
            left = max(deadline - time.monotonic(), 1.0)
            message = Message(content, asked.node_id, _message_type(plan), ttl=left, group_id=str(plan.round))
            # One at a time: a push that fails is then known to be this client's.
            if ids := [message_id for message_id in grid.push_messages([message]) if message_id]:
                waiting[ids[0]] = asked
            else:
                self._lose(report, asked, "its message could not be sent")

        for node_id, plan in plans:
            send(_Asked(node_id, plan))
        self._drop_late(grid)
        good, pause = 0, _SHORTEST_PAUSE
        while waiting and (limit is None or good < limit) and time.monotonic() < deadline:
            came = False
            for message_id in list(waiting):
                for message in grid.pull_messages([message_id]):
                    came = True
                    asked = waiting.pop(message_id)
                    answer = self._read(asked, message, report, refused)
                    if isinstance(answer, Missing) and asked.resends == RESENDS:
                        self._refuse(report, asked, "it lacks entries again after they were sent")
                    elif isinstance(answer, Missing):
                        report.resent += 1
                        log.info("%s lacks entries in round %d; they are sent.", asked.plan.client, asked.plan.round)
                        send(replace(asked, resends=asked.resends + 1), answer.entries)
                    elif answer is not None:
                        good += 1
                        yield asked.node_id, answer
                if limit is not None and good >= limit:
                    break
            pause = _SHORTEST_PAUSE if came else min(2 * pause, _LONGEST_PAUSE)
            if waiting and not came:
                time.sleep(max(min(pause, deadline - time.monotonic()), 0))
        if limit is None or good < limit:
            for asked in waiting.values():
                self._lose(report, asked, f"it did not answer within {timeout:g} s")
        self._late.update(waiting)

    def _read(
        self, asked: _Asked, message: Message, report: RoundReport, refused: dict[int, str] | None
    ) -> Reply | Missing | None:
        if message.has_error():
            reason = (message.error.reason or "").strip() or "no reason given"
            if asked.plan.action == INTRODUCE and message.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                # The mod answers an introduction itself; only an app without it gets to see one, and fails on it.
                self._refuse(report, asked, f"{NO_MOD}. (The app said: {reason.splitlines()[-1]})")
                if refused is not None:
                    refused[asked.node_id] = NO_MOD
                return None
            self._lose(report, asked, f"error {message.error.code}: {reason}")
            return None
        report.up += Traffic.of(message.content)
        try:
            return self._sender.read(asked.plan, message, self.weighted_by_key)
        except BadReply as refusal:
            self._refuse(report, asked, str(refusal), refusal.client if isinstance(refusal, ClientRefuses) else "")
            if refused is not None:
                refused[asked.node_id] = str(refusal)
            return None

    def _refuse(self, report: RoundReport, asked: _Asked, reason: str, by_client: str = "") -> None:
        report.refused.append((by_client or asked.name, reason))
        if by_client:
            report.refused_by_client.append(by_client)
        said = "gives no result" if by_client else "is refused"
        log.warning("%s %s in round %d: %s", by_client or asked.name, said, report.round, reason)

    def _lose(self, report: RoundReport, asked: _Asked, reason: str) -> None:
        report.lost.append((asked.name, reason))
        log.warning("%s is lost in round %d: %s", asked.name, report.round, reason)

    def _drop_late(self, grid: Grid) -> None:
        """Replies that come after their round are pulled and dropped: else they stay in the SuperLink's memory."""
        for message_id in list(self._late):
            if list(grid.pull_messages([message_id])):
                self._late.discard(message_id)

    # ---- clients -------------------------------------------------------------------------------------------------

    def _meet(self, grid: Grid, server_round: int, timeout: float, report: RoundReport) -> None:
        """Wait until enough clients are there, and let new nodes introduce themselves."""
        deadline = time.monotonic() + timeout
        again = time.monotonic()  # when nodes that did not answer are asked again, and what is waited for is said
        while True:
            self._nodes.update(grid)
            too_few = len(self._nodes.available()) < self.min_available_nodes
            asked = dict(self._nodes.take_new(silent_too=too_few and time.monotonic() >= again))
            if asked:
                plans = [
                    (node_id, Plan(client=name, round=server_round, action=INTRODUCE, needs={}))
                    for node_id, name in asked.items()
                ]
                refused: dict[int, str] = {}
                answers = self._answers(
                    grid, None, plans, ConfigRecord(), min(timeout, _INTRODUCTION), report, refused=refused
                )
                introduced = {node_id: reply.client for node_id, reply in answers}
                self._nodes.settle(introduced, refused, asked)
            available = len(self._nodes.available())
            if available >= self.min_available_nodes:
                return
            refusals = self._nodes.refusals()
            if available + len(refusals) >= self.min_available_nodes:
                raise RoundFailed(
                    f"only {available} of {available + len(refusals)} clients can take part, and min_available_nodes "
                    f"is {self.min_available_nodes}. The others say: " + "; ".join(sorted(set(refusals)))
                )
            if time.monotonic() > deadline:
                raise RoundFailed(
                    f"{available} clients are there after {timeout:g} s, and {self.min_available_nodes} are needed: "
                    "start more SuperNodes, or set min_available_nodes lower" + _reasons(report)
                )
            if time.monotonic() >= again:
                again = time.monotonic() + _SAY_AGAIN
                log.info("Waiting for clients: %d are there, %d are needed.", available, self.min_available_nodes)
            time.sleep(0.5)

    def _sample(self, fraction: float, server_round: int, attempt: int, what: str) -> list[str]:
        """A cohort, drawn from the names of the available clients by (seed, round, attempt) alone; sorted."""
        names = self._nodes.available()
        size = min(len(names), max(int(len(names) * fraction), self.min_replies))
        rng = np.random.default_rng([self.seed, server_round, attempt, zlib.crc32(what.encode())])
        return sorted(names[k] for k in rng.choice(len(names), size, replace=False))

    # ---- arrays and settings -------------------------------------------------------------------------------------

    def _server_model(self, initial_arrays: ArrayRecord) -> ServerModel:
        raw = {name: array.numpy() for name, array in initial_arrays.items()}
        for array in raw.values():
            array.flags.writeable = False
        if self.blocks is None:
            layout = Layout.of_arrays(raw)
            return ServerModel("the model", layout, layout.split(raw), None)
        layout = self.blocks.layout
        expected = {t.name: (t.shape, t.dtype) for t in layout.raw}
        given = {name: (array.shape, array.dtype.name) for name, array in raw.items()}
        if different := sorted(name for name in {*expected, *given} if expected.get(name) != given.get(name)):
            name = different[0]
            raise ValueError(
                f"the initial arrays are not those of {self.blocks.model}: {len(different)} tensors differ, {name!r} "
                f"first (model: {expected.get(name, 'absent')}, arrays: {given.get(name, 'absent')})"
            )
        return ServerModel(self.blocks.model, layout, layout.split(raw), self.blocks)

    def _arrays(self, state: Any) -> ArrayRecord:
        """The global model as Flower and apps know it: the raw `state_dict`."""
        raw = self._sender.layout.join(self.method.model(state))
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in raw.items()})

    def _scheduled(self, config: ConfigRecord, server_round: int, rounds: int) -> tuple[ConfigRecord, float | None]:
        factor = SCHEDULES[self.schedule](server_round, rounds)
        scheduled = ConfigRecord(dict(config))
        rate = None
        for key in ("learning-rate", "lr"):
            value = config.get(key)
            if isinstance(value, int | float):
                scheduled[key] = rate = value * factor
        return scheduled, rate

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


def _message_type(plan: Plan) -> str:
    """Flower's name of an action: an app has its functions by these. Further phases are `@app.train("<action>")`."""
    if plan.action in (TRAIN, EVALUATE):
        return plan.action
    # The mod answers an introduction, and sees only messages that the app has a function for: every app can train.
    return TRAIN if plan.action == INTRODUCE else f"{TRAIN}.{plan.action}"


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


def _reasons(report: RoundReport) -> str:
    """Every reason once, with the clients that gave it."""
    by_reason: dict[str, list[str]] = {}
    for client, reason in [*report.refused, *report.lost]:
        clients = by_reason.setdefault(reason, [])
        if client not in clients:
            clients.append(client)
    said = [f"{', '.join(clients[:5])}{' …' * (len(clients) > 5)}: {reason}" for reason, clients in by_reason.items()]
    return ". " + "; ".join(said[-3:]) if said else ""
