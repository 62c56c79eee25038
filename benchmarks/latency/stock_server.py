"""Flower's FedAvg, unchanged: train and evaluate in every round. Writes the time at which each round ended."""

import json
import time
from pathlib import Path

from entries import state
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, ended = context.run_config, []

    def at_end(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        ended.append(time.monotonic())
        return MetricRecord({})

    FedAvg(**dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), config["clients"])).start(
        grid, ArrayRecord(state(config["model"])), num_rounds=config["rounds"], evaluate_fn=at_end
    )
    Path(config["output"]).write_text(json.dumps(ended))
