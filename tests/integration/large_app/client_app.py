import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange

spent = {"app": 0.0}


def timing(msg, context, call_next):
    """Seconds that the exchange takes on this side, without the app's own."""
    begun = time.monotonic()
    reply = call_next(msg, context)
    if reply.has_content() and "metrics" in reply.content:
        seconds = time.monotonic() - begun - spent["app"]
        reply.content["timing"] = MetricRecord({"exchange-seconds": seconds})
    return reply


app = ClientApp(mods=[timing, partial_exchange])


@app.train()
def train(msg, context):
    begun = time.monotonic()
    rng = np.random.default_rng()
    arrays = {name: rng.normal(size=array.shape).astype(np.float32) for name, array in msg.content["arrays"].items()}
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    reply = Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)
    spent["app"] = time.monotonic() - begun
    return reply
