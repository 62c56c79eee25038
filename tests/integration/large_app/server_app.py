import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from tepal.exchange import Sender
from tepal.strategies import FedAvg

app = ServerApp()

ENTRIES = 100


def timed(function, spent):
    def call(*args, **options):
        begun = time.monotonic()
        try:
            return function(*args, **options)
        finally:
            spent[0] += time.monotonic() - begun

    return call


@app.main()
def main(grid, context):
    spent = [0.0]
    Sender.content, Sender.read = timed(Sender.content, spent), timed(Sender.read, spent)

    def note(report):
        line = {
            "round": report.round, "ended": time.monotonic(), "seconds": report.seconds, "server_seconds": spent[0],
            "client_seconds": report.train_metrics["exchange-seconds"],
            "down": report.down.payload, "up": report.up.payload,
        }  # fmt: skip
        spent[0] = 0.0
        with Path(context.run_config["results"]).open("a") as file:
            file.write(json.dumps(line) + "\n")

    rng = np.random.default_rng(0)
    size = context.run_config["size"]
    initial = {f"layer.{k}.weight": rng.normal(size=size).astype(np.float32) for k in range(ENTRIES)}
    strategy = FedAvg(min_available_nodes=1, fraction_evaluate=0.0, on_round=note)
    strategy.start(
        grid, ArrayRecord({name: Array(array) for name, array in initial.items()}),
        num_rounds=context.run_config["rounds"],
    )  # fmt: skip
