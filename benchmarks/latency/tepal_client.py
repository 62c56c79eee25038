"""A Tepal client that does not train, for measuring the time of a round without training."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange

app = ClientApp(mods=[partial_exchange])


@app.train()
def train(msg: Message, context: Context) -> Message:
    state = msg.content["arrays"].to_torch_state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor += 0.001
    content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    msg.content["arrays"].to_torch_state_dict()
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=msg)
