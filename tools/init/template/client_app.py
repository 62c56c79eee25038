from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import RowReader, accuracy, fit, load_data
from tepal.client_app import apply_plan, reply_to_probes
from tepal.exchange import partial_exchange

app = ClientApp(mods=[partial_exchange])


def model_and_data(msg: Message, context: Context, test=False):
    model = RowReader()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node = context.node_config
    return model, *load_data(node.get("partition-id", 0), node.get("num-partitions", 1), test)


reply_to_probes(app, model_and_data)


@app.train()
def train(msg: Message, context: Context) -> Message:
    model, images, labels = model_and_data(msg, context)
    plan = apply_plan(model, msg)
    config = context.run_config
    loss = fit(model, images, labels, config["local-epochs"], config["learning-rate"], plan.penalty)
    metrics = MetricRecord({"num-examples": len(labels), "train-loss": loss})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model, images, labels = model_and_data(msg, context, test=True)
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": accuracy(model, images, labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
