"""Flower's ClientApp: unpack, call, pack. Flower loads this file as `client_app.app`; nothing else imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import Tensor, nn

from tepal import models
from tepal.client_app import apply_plan, objectives, start
from tepal.client_app import stacked as together
from tepal.client_app.delivery import deliver
from tepal.client_app.local_client import LocalClient
from tepal.client_app.objectives import Outcome, Work
from tepal.client_app.simulated import simulated_node_config
from tepal.client_app.state import load_record, record_of_model
from tepal.exchange import PartialExchange
from tepal.exchange.mod import Received, received
from tepal.exchange.plan import ACCUMULATION, FINAL, PROXIMAL, SCORED_AS
from tepal.host.flower.contents import records_of
from tepal.host.imports import uncollected
from tepal.training.data import check_partition
from tepal.training.data.inputs import InputConfig, examples_of
from tepal.training.data.partitions import import_partitioners
from tepal.training.loop import Fitted, Score, accumulation, autocast, score
from tepal.training.prediction import EnsembleScore, score_ensemble
from tepal.training.probing import probe_layers, random_numbers_apart

OWN = "personal"
"""Prefix of the names of metrics of a personal model."""

exchange = PartialExchange(
    introduce=lambda msg, context: LocalClient.of(msg, context).figures(msg), start=start.initial_values
)
"""The mod of this app, and of apps that do the same with other functions."""

MODS: list[Mod] = [simulated_node_config, exchange]

app = ClientApp(mods=MODS)


def import_ahead() -> None:
    """Import what clients import when they first train, while a simulation's settings are still being checked."""
    with uncollected(), suppress(Exception):  # whoever needs it reports it
        torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports PyTorch's compiler
        import_partitioners()


def prepare(run_config: Mapping[str, Any], clients: int) -> None:
    """Read and partition the dataset before the processes of a simulation are forked, which then share it.

    Errors are left to the run, which reports them.
    """
    import_ahead()
    with suppress(ValueError, OSError):
        config = InputConfig.from_run_config(run_config)
        check_partition(config, clients, examples_of(config))


@app.train()
def train(msg: Message, context: Context) -> Message:
    return train_client(LocalClient.of(msg, context), msg)


def train_client(client: LocalClient, msg: Message, fit: Callable[[Work], Fitted] | None = None) -> Message:
    """Train the message's model on this client's examples; the reply has the model and its metrics.

    `fit` replaces the local training of strategies without an objective of their own.
    """
    start.forget()
    model = client.model
    load_record(model, records_of(msg.content, ArrayRecord)["arrays"])
    plan, found = apply_plan(model, msg), received(msg)
    objective, work = objectives.find(found.plan.objective if found else ""), _work(client, found, plan.penalty)
    before = _scored(client, "received")
    plain = not (found and found.plan.objective) and not plan.ridge and not plan.proximal
    if fit is None and (fitted := together.fit(work, plain=plain)) is not None:
        outcome = Outcome(fitted)
    else:
        with _random_numbers(client):
            outcome = objective.fit(work) if fit is None else Outcome(fit(work))
    after = _scored(client, "trained")
    steps = outcome.fitted.steps
    metrics = MetricRecord(
        {
            "num-examples": len(client.batches),
            "train-loss": outcome.fitted.loss,
            "train-steps": steps,
            **({"step-seconds": outcome.fitted.step_seconds} if steps else {}),
            ACCUMULATION: accumulation(client.training, steps, float(work.options.get(PROXIMAL, 0.0))),
            "test-examples": len(client.test[1]),
            **client.own_rate,
            **before,
            **after,
        }
    )
    own = objective.personal and client.training.score_in_training
    # The exchange packs the arrays at once. Without it, or if the model is loaded again below, they are copied.
    arrays = record_of_model(model) if found is not None and not own else ArrayRecord(model.state_dict())
    content = RecordDict({"arrays": arrays, "metrics": metrics})
    if found is not None:
        for tree, values in outcome.trees.items():
            content[tree] = found.record_of(tree, values)
        if outcome.personal is not None:
            found.personal.save(outcome.personal)
            work.personal = outcome.personal
    if own:
        work.load(work.received)
        with _random_numbers(client):
            objective.personalise(work)
        metrics.update(_scored(client, OWN))
    return Message(content, reply_to=msg)


@app.train("probe")
def probe(msg: Message, context: Context) -> Message:
    """Measure the scores by which the server chooses this client's layers, without training."""
    client = LocalClient.of(msg, context)
    load_record(client.model, records_of(msg.content, ArrayRecord)["arrays"])
    training = client.training

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        # Gradients in float16 would have to be scaled: they are computed in the model's own dtype.
        with nullcontext() if training.autocast == "fp16" else autocast(training, inputs.device):
            return client.task.loss_of(model, inputs, labels)

    with _turn(client):
        scores = probe_layers(
            client.model,
            msg,
            client.batches.epoch(0),
            loss=loss,
            micro_batch_size=training.micro_batch_size,
            gradient_checkpointing=training.gradient_checkpointing,
        )
    metrics = MetricRecord({"num-examples": len(client.batches), **client.budget, **scores})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Score the received model, an ensemble's mean prediction, or the personal model made of the received one."""
    client = LocalClient.of(msg, context)
    records = list(records_of(msg.content, ArrayRecord).values())
    found = received(msg)
    options = found.plan.options if found else {}
    if (objective := objectives.find(found.plan.objective if found else "")).personal:
        load_record(client.model, records[0])
        with _random_numbers(client):
            objective.personalise(_work(client, found))
        records = [ArrayRecord(client.model.state_dict())]
    states = (record.to_torch_state_dict() for record in records)  # only one at a time is in memory
    scored = score_ensemble(client.model, states, *client.test, client.training, client.task)
    of = str(options.get(SCORED_AS, "received"))
    figures: dict[str, Any] = {"num-examples": scored.examples, **_named(of, scored)}
    if len(records) > 1:
        figures |= {f"{of}-{name}": value for name, value in scored.apart.items()}
    if options.get(FINAL):
        deliver(records, client, context)
    return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=msg)


def _work(client: LocalClient, found: Received | None, penalty: Callable[[], Tensor | float] = lambda: 0.0) -> Work:
    """Local training of the loaded model; `found` is None with a strategy of Flower."""
    work = Work(client.model, client.batches, client.training, client.task, penalty=penalty)
    if found is not None:
        work.layout, work.received, work.trees = found.layout, found.model, found.trees
        work.options, work.load_personal = found.plan.options, found.personal.load
    return work


def _scored(client: LocalClient, of: str) -> dict[str, float]:
    """Scores of the model on this client's test examples, as metrics; {} with score-in-training=false."""
    if not client.training.score_in_training:
        return {}
    return _named(of, score(client.model, *client.test, client.training, client.task))


@contextmanager
def _random_numbers(client: LocalClient) -> Iterator[None]:
    """Seed random numbers (dropout) with the client's seed, so that a round can be repeated."""
    with _turn(client), random_numbers_apart(client.model, client.batches.seed):
        yield


def _turn(client: LocalClient) -> AbstractContextManager[Any]:
    """All threads share torch's generator: only one client at a time trains a model that draws random numbers."""
    return models.DRAWING if together.draws_numbers(client.model) else nullcontext()


def _named(of: str, scored: Score | EnsembleScore) -> dict[str, float]:
    """A score as metrics. `of`: prefix of their names."""
    figures = {"loss": scored.loss, **scored.figures}
    if scored.accuracy is not None:
        figures["accuracy"] = scored.accuracy
    return {f"{of}-{name}": value for name, value in figures.items()}
