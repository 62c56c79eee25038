import json
import os
import signal
import time
from dataclasses import replace

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import trained

from tepal.exchange import partial_exchange, received
from tepal.exchange.header import Header
from tepal.exchange.manifest import PARTS, RECORD
from tepal.exchange.parts import listed, pack, shapes_of


def fault_of(context, name, server_round):
    """What this client is told to do wrong in this round: "" or "kind" or "kind:number"."""
    kind, _, number = json.loads(context.run_config["faults"]).get(name, {}).get(str(server_round), "").partition(":")
    return kind, float(number or 0)


def forging(msg, context, call_next):
    """Outside of the exchange: what a client sends that does not mind any rules."""
    reply = call_next(msg, context)
    if reply.has_error() or RECORD not in reply.content:
        return reply
    header = Header.from_content(reply.content)
    kind, _ = fault_of(context, header.client, header.round)
    if header.action != "train" or kind not in ("shape", "foreign"):
        return reply
    found = received(msg)
    entries = [found.layout.by_name[name] for name in found.plan.returns["model"]]
    arrays = {entry.name: np.ones(entry.shape, entry.dtype) for entry in entries}
    if kind == "shape":
        arrays["head"] = np.ones((5, 2), np.float32)
    else:
        arrays["backdoor"] = np.ones(3, np.float32)
    reply.content[PARTS] = ArrayRecord({"model": pack(arrays, arrays)})
    header = replace(header, carries=listed({"model": shapes_of(arrays, arrays)}))
    reply.content[RECORD] = header.with_checksum(reply.content).to_record()
    return reply


app = ClientApp(mods=[forging, partial_exchange])


@app.train()
def train(msg, context):
    manifest = received(msg).manifest
    kind, number = fault_of(context, manifest.plan.client, manifest.plan.round)
    if kind == "raise":
        raise RuntimeError("no memory left on this device")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sleep":
        time.sleep(number)
    arrays = {name: array.numpy() for name, array in msg.content["arrays"].items()}
    arrays, examples = trained(manifest.plan.client, manifest.plan.round, arrays, manifest.plan.trains)
    if kind == "nan":
        arrays["head"] = np.full(10, np.nan, np.float32)
    record = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    metrics = MetricRecord({"num-examples": examples, "train-loss": 1.0})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=msg)
