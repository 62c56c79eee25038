"""Flower's ClientApp: unpack, call, pack. Flower loads this file as `client_app.app`; nothing else imports it."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.client_app import apply_plan
from tepal.client_app.site import Site
from tepal.client_app.training import fit, score
from tepal.exchange import PartialExchange

app = ClientApp(mods=[PartialExchange(introduce=lambda msg, context: Site.of(msg, context).figures())])


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


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    site = Site.of(msg, context)
    site.model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    scored = score(site.model, *site.test, site.training)
    metrics = MetricRecord(
        {
            "num-examples": scored.examples,
            "received-accuracy": scored.accuracy,
            "received-loss": scored.loss,
        }
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
