"""One round of a run: draw a cohort, plan, send, merge the replies as they arrive, score."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from numpy.random import Generator

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import EVALUATE, FINAL, INTRODUCE, TRAIN, Plan, Reply, Tree
from tepal.exchange.sender import Sender
from tepal.host.text import visible
from tepal.strategies.aggregate import ON_TESTS
from tepal.strategies.method import Method, Run, ServerModel, parameters_of
from tepal.strategies.robust import averages, clips
from tepal.strategies.rounds.asking import Asker, mean_rate
from tepal.strategies.rounds.cohort import Cohorts, Rules, check_able
from tepal.strategies.rounds.flower import joined
from tepal.strategies.rounds.judging import Judge, Refused
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.messenger import Messenger
from tepal.strategies.rounds.norms import UpdateNorms
from tepal.strategies.rounds.past import Past
from tepal.strategies.rounds.report import SERVER, RoundFailed, RoundReport
from tepal.strategies.rounds.resuming import Memory
from tepal.strategies.rounds.round import Round
from tepal.strategies.rounds.suspects import Suspects
from tepal.strategies.rounds.travel import Travel, segments
from tepal.strategies.rounds.weights import exceeds

log = getLogger("flwr")

ATTEMPTS = 3
"""How often a round with too few replies is attempted, each time with a new cohort."""
SEARCHES = 4
"""Merges that do not count in one round, after which it ends without any."""

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
"""Scores the model of a round on the server."""


class _DoesNotCount(Exception):
    """The merged state of a round must not count. The text has the reason."""


class RoundRunner:
    """Runs the rounds of one run of a method. Its parts remember what a run knows of its clients and its merges.

    Args:
        grid: Flower's grid.
        sender: makes messages of plans.
        method: plans the rounds, and merges the replies.
        model: from which the run starts.
        run: what the run lends to its method.
        rules: how many clients take part in a round.
        weighted_by_key: the metric that is a reply's weight.
        schedule: name of the learning rate schedule.
        classes: number of classes of the task, if it has any.
        robust: how the clients' parts are averaged, one of ROBUST.
        memories: name → what a checkpoint has in addition to what the runner remembers.
        past: of the run's merges.
        awaited: clients for which the first round waits.
        on_progress: called with the round's report after every event of an exchange.
    """

    def __init__(
        self,
        grid: Grid,
        sender: Sender,
        method: Method[Any],
        model: ServerModel,
        run: Run,
        rules: Rules,
        *,
        weighted_by_key: str,
        schedule: str,
        classes: int | None,
        robust: str,
        memories: Mapping[str, Memory],
        past: Past,
        awaited: Collection[str],
        on_progress: Callable[[RoundReport], None],
    ) -> None:
        self.method, self.rules, self.weighted_by_key = method, rules, weighted_by_key
        self.ledger = ClientLedger(run.keep)
        statistics = set(model.layout.names).difference(parameters_of(model))
        self.norms = UpdateNorms(method.transfer_blocks(model), statistics)
        self.suspects = Suspects()
        self.past = past
        self.memories: Mapping[str, Memory] = {
            "norms": self.norms, "suspects": self.suspects, "past": past, **memories
        }  # fmt: skip
        """Name → what a checkpoint has beside the ledger."""
        self.trouble = ""
        """An error of the server itself, for the next report."""
        self._layout, self._segments, self._sender = model.layout, segments(model.layout, model.blocks), sender
        self._limit_replies = getattr(grid, "limit_replies", lambda most: None)  # of a grid that pulls over a network
        self._limit_replies(sender.most_reply_bytes)
        self._messenger = Messenger(grid, sender, self.ledger, weighted_by_key=weighted_by_key, accept=self._accept)
        expected: Mapping[str, int] | None = getattr(grid, "expected_names", None)
        self.cohorts = Cohorts(rules, self._messenger.nodes, self.ledger, awaited, classes, expected)
        self._asker = Asker(
            method, self._messenger, self.cohorts, self.ledger, weighted_by=weighted_by_key,
            share=rules.max_weight_share, averages=method.averages and averages(robust), schedule=schedule,
            on_progress=on_progress,
        )  # fmt: skip
        self._judge = Judge(self.norms, rules.max_weight_share, clip=clips(robust), folder=run.folder)

    def close(self) -> None:
        """Receive no further replies."""
        self._messenger.close()
        self._limit_replies(None)  # the grid is the app's

    def add_initial(self, starts: Mapping[Tree, Arrays]) -> None:
        """Let clients make these initial values, by tree."""
        for tree, values in starts.items():
            self._sender.add_initial(tree, values)

    def begin(self, state: Any, number: int, rounds: int, config: ConfigRecord, timeout: float) -> Round:
        """Begin round `number` of `rounds`, with the app's settings and the seconds for its exchanges."""
        method = self.method
        report = RoundReport(
            number, method.phase_name(state), train_metrics_of=method.train_metrics_of,
            eval_metrics_of=method.eval_metrics_of, travel=Travel(self._layout, self._segments),
            wire_budget=self._sender.encoding.budget,
        )  # fmt: skip
        if self.trouble:
            report.notes.append((SERVER, self.trouble))
        self._sender.packer.begin(number, self.ledger.held())
        self.norms.begin()
        return Round(number, rounds, config, timeout, report)

    def train(self, state: Any, this: Round) -> Any:
        """Train from this state, or from the one before it if most clients cannot train from this one.

        If none can train from that one either, the model is not the reason, and this state stands.
        """
        try:
            return self._attempts(state, this)
        except RoundFailed:
            if not this.report.most_failed() or (earlier := self.past.roll_back()) is None:
                raise
            self.ledger.undo_merge()
            this.report.went_back = True
            for client in this.report.drawn:
                self.ledger.good(client)
            aside = self.suspects.suspect_last(this.number)
            self._note(
                "most clients cannot train from the model that was merged last: the run returns to the one before it, "
                f"and goes on without {_names(aside)}",
                this,
            )
            return self._attempts(earlier, this)

    def score_on_server(self, state: Any, this: Round, evaluate_fn: Evaluate | None) -> None:
        """Score the model by `evaluate_fn`."""
        report = this.report
        report.seconds_train = time.monotonic() - this.started
        if evaluate_fn is not None:
            report.add_server_metrics(evaluate_fn(this.number, joined(self.method.models(state), self._layout)))

    def score_by_clients(self, state: Any, this: Round, *, last: bool, final: bool) -> None:
        """Score the model by a cohort on its test examples, unless clients do so as they train.

        Args:
            state: of the model.
            this: the round.
            last: whether this is the run's last round, in which the model is scored in any case.
            final: whether the model is the run's result, which the clients of the cohort keep.
        """
        report = this.report
        if last or not any(key.startswith(ON_TESTS) for key in report.train_metrics):
            metrics = self._evaluate(state, this, final=final)
            report.evaluate_metrics = report.mean_of(
                metrics, report.eval_metrics_of, self.weighted_by_key, share=self.rules.max_weight_share
            )

    def deliver(self, state: Any, this: Round) -> None:
        """Send the run's result to the cohort that scored the last model, if it was not sent with that."""
        self._evaluate(state, this, final=True)

    def _evaluate(self, state: Any, this: Round, *, final: bool) -> dict[str, tuple[Mapping[str, float], int]]:
        """Return the metrics and the weight of each client of a cohort that scores the model."""
        report, fraction = this.report, self.rules.fraction_evaluate
        if not fraction:
            return {}
        if this.scorers is None:
            this.scorers = self.cohorts.draw(fraction, report, 0, EVALUATE).at_random()
        plans = self.method.evaluation(state, this.number, this.scorers, more_rounds=not final)
        self._introduced([plan.client for plan in plans], this)  # of personal models: only who has one
        plans = [plan for plan in plans if not self.cohorts.unknown([plan.client])]
        if final:
            plans = [replace(plan, options={**plan.options, FINAL: True}) for plan in plans]
        replies = self._asker.ask(self._asker.outgoing(state, plans, this), this)
        report.fedavg_down += len(plans)
        return {reply.client: (reply.metrics, reply.examples) for reply in replies}

    def _attempts(self, state: Any, this: Round) -> Any:
        """Draw a cohort, run all phases and merge. Returns the next state; a failure leaves the old one unchanged."""
        report, rules = this.report, self.rules
        attempts = searches = failing = 0
        while attempts < ATTEMPTS:
            self.cohorts.wait(report, this.config, this.timeout, partial(self._asker.exchange, report))
            candidates = self.cohorts.count()
            drawn = self.cohorts.draw(rules.fraction_train, report, attempts + searches, TRAIN)
            aside = self.suspects.set_aside(drawn.names, this.number, rules.min_replies)
            names: Sequence[str] = [name for name in drawn.names if name not in aside] if aside else drawn.names
            names = report.without_refused(names, rules.min_replies)
            report.left_out = sorted([*drawn.left_out, *aside])
            state, cohort = self._draw(state, this, names, min(drawn.size, len(names)), drawn.rng)
            if len(cohort) < rules.min_replies and self.cohorts.count() < candidates:
                continue  # the others turned out to be unable, and are not drawn from any more
            plans = self._prepare(state, this, sorted(cohort))
            try:
                merged = self._merge(state, this, plans)
            except _DoesNotCount as problem:
                searches += 1
                ratios = {client: self.norms.ratios.get(client, 0.0) for client in report.replied}
                report.replied.clear()
                aside = self.suspects.suspect(ratios, this.number)
                self._note(f"the merged model does not count: {problem}. The suspects are {_names(aside)}", this)
                if searches < SEARCHES:
                    continue
                if self.past.skip(this.number):
                    self._note("no merge of this round counts, and the model stays as it is", this)
                    return state
                break
            if merged is not None:
                return merged
            attempts += 1
            failing = failing + 1 if self._model_fails(this) else 0
            log.warning(
                "Round %d has %d good replies of %d asked, and needs %s (attempt %d of %d).", this.number,
                len(report.replied), len(plans), "half of them" if failing else rules.min_replies, attempts, ATTEMPTS,
            )  # fmt: skip
            report.replied.clear()
            if failing > 1 or report.refused_by_client.issuperset(report.asked):
                break  # not transient: these clients would fail or refuse again
        few = f"fewer than min_replies={rules.min_replies} good replies"
        lacks = "no merge that counts" if searches == SEARCHES else few
        raise RoundFailed(f"round {this.number} got {lacks} in {attempts + searches} attempts" + report.reasons())

    def _draw(self, state: Any, this: Round, names: Sequence[str], size: int, rng: Generator) -> tuple[Any, list[str]]:
        """Draw a cohort. Clients that cannot take part are replaced by others as long as there are any."""
        cohort, asked, unable = list[str](), 0, 0
        while len(cohort) < size and names:
            state, drawn = self.method.cohort(state, names, min(size - len(cohort), len(names)), rng)
            asked += self.cohorts.unknown(drawn)
            able = self._introduced(drawn, this)
            cohort += able
            if len(able) == len(drawn):
                break
            unable += len(drawn) - len(able)
            check_able(unable, asked, this.report)
            out = {*cohort, *drawn}
            names = tuple(name for name in names if name not in out)
        return state, cohort

    def _introduced(self, clients: Sequence[str], this: Round) -> Sequence[str]:
        """Those of these clients that can take part. Who has not introduced itself does so."""
        send = partial(self._asker.exchange, this.report)
        return self.cohorts.introduce(clients, this.report, this.config, this.timeout, send)

    def _model_fails(self, this: Round) -> bool:
        """Whether most clients fail now, and did not in the round before: the model that was merged last may be why."""
        return self.past.can_return and this.report.most_failed() and not self.past.most_failed

    def _prepare(self, state: Any, this: Round, cohort: Sequence[str]) -> list[Plan]:
        """Run all phases but the last, and return the plans of the last one."""
        report = this.report
        report.cohort = list(cohort)
        probe_replies: dict[str, Reply] = {}
        this.phases_left = len(self.method.phases)
        this.deadline = time.monotonic() + this.timeout
        for phase in self.method.phases[:-1]:
            plans = self._plans(state, this, phase, cohort, probe_replies)
            report.asked = [plan.client for plan in plans]
            replies = self._asker.ask(self._asker.outgoing(state, plans, this), this)
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
        report = this.report
        self.norms.ratios.clear()
        measured = self._judge.clip or self.rules.deterministic  # estimates differ from run to run
        messages = self._asker.outgoing(state, plans, this, measured=measured, limit=self.rules.max_replies)
        report.learning_rate = mean_rate(messages, {})
        most, unmerged = self.rules.max_replies, list[str]()
        replies = self._asker.ask(messages, this, (lambda: most + len(unmerged)) if most else None)
        merger = self.method.merger(state, this.number)
        metrics: dict[str, tuple[Mapping[str, float], int]] = {}
        exchanges: dict[str, str] = {}
        in_order = sorted(replies, key=lambda reply: reply.client) if self.rules.deterministic else replies
        by_client = {plan.client: plan for plan in plans}
        for reply in self._judge.judged(in_order, by_client, partial(self.method.values, state)):
            if isinstance(reply, Refused):
                unmerged.append(reply.client)
                self._refuse(reply.client, reply.reason, this)
                continue
            try:
                merger.add(reply)
            except OSError as error:  # of a method that stores models on disk
                unmerged.append(reply.client)
                self._judge.not_merged(reply.client)
                report.notes.append((SERVER, f"the reply of {reply.client} cannot be stored: {error}"))
                log.error("The reply of %s in round %d cannot be stored: %s", reply.client, this.number, error)
                continue
            except Exception as error:  # of one client's values: a merger is as if this reply had not come
                log.debug("The reply of %s cannot be merged.", reply.client, exc_info=True)
                unmerged.append(reply.client)
                self._judge.not_merged(reply.client)
                self._refuse(reply.client, f"it cannot be merged ({type(error).__name__}: {error})", this)
                continue
            self.ledger.good(reply.client)
            metrics[reply.client] = reply.metrics, reply.examples
            exchanges[reply.client] = reply.exchange
            report.replied.append(reply.client)
            del reply  # see `Asker.ask`
        report.learning_rate = mean_rate(messages, {client: own for client, (own, _) in metrics.items()})
        report.fedavg_down += len(plans)
        report.fedavg_up += len(report.replied)
        if len(metrics) < self.rules.min_replies or self._model_fails(this):
            return None
        try:
            merged = merger.finish()
        except OSError as error:  # of replies that are stored on disk
            raise RoundFailed(f"round {this.number} cannot be merged: {error}") from error
        except Exception as error:  # of values that one of the clients sent
            log.debug("Round %d cannot be merged.", this.number, exc_info=True)
            raise _DoesNotCount(f"it cannot be computed ({type(error).__name__}: {error})") from error
        if not self.method.storage and (problem := self.past.problem(state, merged)):
            raise _DoesNotCount(problem)
        report.train_metrics = report.mean_of(
            metrics, report.train_metrics_of, self.weighted_by_key, share=self.rules.max_weight_share
        )
        report.record = {**report.record, **self.norms.record(metrics), **self.method.change(state, merged)}
        self.ledger.merged(exchanges, {client: examples for client, (_, examples) in metrics.items()})
        self.suspects.merged({client: self.norms.ratios.get(client, 0.0) for client in metrics})
        self.past.merged(state, this.number)
        self.past.most_failed = report.most_failed()
        return merged

    def _accept(self, plan: Plan, reply: Reply) -> None:
        """Raise ValueError for a reply that claims more examples than its introduction did, or that the method refuses.
        """
        if plan.action != INTRODUCE:
            introduced, tests = self.ledger.introduction(plan.client), plan.action == EVALUATE
            if reason := exceeds(reply, introduced, self.weighted_by_key, tests=tests):
                self.cohorts.introduce_again(plan.client)
                raise ValueError(reason)
        self.method.accept(plan, reply)

    def _refuse(self, client: str, reason: str, this: Round) -> None:
        """Enter that the reply of a client is not merged."""
        reason = visible(reason)
        log.warning("%s is refused in round %d: %s", client, this.number, reason)
        this.report.refuse(client, reason)
        self.ledger.failed(client, this.number)

    def _note(self, text: str, this: Round) -> None:
        """Log an incident of the server's own, and enter it into the report."""
        text = visible(text)
        log.error("Round %d: %s.", this.number, text)
        this.report.notes.append((SERVER, text))

    def _plans(
        self, state: Any, this: Round, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        try:
            return self.method.plan(state, this.number, phase, cohort, probe_replies)
        except OSError as error:  # of a method that stores models on disk
            raise RoundFailed(f"round {this.number} cannot be planned: {error}") from error


def _names(clients: Sequence[str]) -> str:
    """The first names of a list, for a sentence."""
    return ", ".join(clients[:10]) + f" and {len(clients) - 10} more" * (len(clients) > 10)
