"""Flower's ClientApp: unpack, call, pack. Flower loads this file as `client_app.app`; nothing else imports it."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.client_app import apply_plan
from tepal.client_app.delivery import deliver
from tepal.client_app.prediction import score_ensemble
from tepal.client_app.probing import probe_layers
from tepal.client_app.site import Site
from tepal.client_app.training import fit, score
from tepal.exchange import PartialExchange
from tepal.exchange.plan import FINAL, SCORED_AS

app = ClientApp(mods=[PartialExchange(introduce=lambda msg, context: Site.of(msg, context).figures(msg))])


@app.train()
def train(msg: Message, context: Context) -> Message:
    site = Site.of(msg, context)
    site.model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    plan = apply_plan(site.model, msg)
    received = score(site.model, *site.test, site.training)
    fitted = fit(site.model, site.batches, site.training, plan.penalty)
    trained = score(site.model, *site.test, site.training)
    metrics = MetricRecord(
        {
            "num-examples": len(site.batches),
            "train-loss": fitted.loss,
            "train-steps": fitted.steps,
            "test-examples": received.examples,
            "received-accuracy": received.accuracy,
            "received-loss": received.loss,
            "trained-accuracy": trained.accuracy,
            "trained-loss": trained.loss,
        }
    )
    arrays = ArrayRecord(site.model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.train("probe")
def probe(msg: Message, context: Context) -> Message:
    """What the server chooses this client's layers by: no step is taken, and no entry is returned."""
    site = Site.of(msg, context)
    site.model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    found = probe_layers(site.model, msg, site.batches.epoch(0))
    metrics = MetricRecord({"num-examples": len(site.batches), **site.budget, **found})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Score what came: one model, or the mean prediction of the models of an ensemble."""
    site = Site.of(msg, context)
    settings = msg.content["config"]
    records = list(msg.content.array_records.values())
    states = (record.to_torch_state_dict() for record in records)  # one at a time is in memory
    scored = score_ensemble(site.model, states, *site.test, site.training)
    of = str(settings.get(SCORED_AS, "received"))
    figures: dict[str, Any] = {
        "num-examples": scored.examples,
        f"{of}-accuracy": scored.accuracy,
        f"{of}-loss": scored.loss,
    }
    if len(records) > 1:
        figures |= {f"{of}-{name.replace('_', '-')}": value for name, value in vars(scored.diversity).items()}
    if settings.get(FINAL):
        deliver(records, site, context)
    return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=msg)
