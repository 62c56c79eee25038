"""Tepal's FedAvg, whose clients return their metrics with the model. Writes the time at which each round ended."""

import json
import time
from pathlib import Path

from entries import state
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from tepal.server_app.grid import prompt
from tepal.strategies import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, ended = context.run_config, []

    def at_end(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        ended.append(time.monotonic())
        return MetricRecord({})

    FedAvg(min_available_nodes=config["clients"], fraction_evaluate=0.0).start(
        prompt(grid), ArrayRecord(state(config["model"])), num_rounds=config["rounds"], evaluate_fn=at_end
    )
    Path(config["output"]).write_text(json.dumps(ended))
