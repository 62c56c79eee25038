"""Flower's FedAvg without evaluation. Writes the time at which the rounds began and at which each ended."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from stock_model import MODELS

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, ended = context.run_config, []

    def at_end(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        ended.append(time.monotonic())
        return MetricRecord({})

    FedAvg(fraction_evaluate=0.0, min_available_nodes=config["clients"]).start(
        grid, ArrayRecord(MODELS[config["model"]]().state_dict()), num_rounds=config["rounds"], evaluate_fn=at_end
    )
    Path(config["output"]).write_text(json.dumps(ended))
