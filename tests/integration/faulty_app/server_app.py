import dataclasses
import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from task import Blocks, initial

from tepal.strategies import FedFrozen

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    results = Path(config["results"])

    def note(report):
        with results.with_suffix(".jsonl").open("a") as file:
            told = dataclasses.asdict(dataclasses.replace(report, record={}, travel=None))  # arrays are no JSON
            file.write(json.dumps(told, default=list) + "\n")

    strategy = FedFrozen(
        warmup_rounds=1,
        model=Blocks(),
        min_available_nodes=config["clients"],
        fraction_evaluate=0.0,
        checkpoints=config["checkpoints"] or None,
        on_round=note,
    )
    result = strategy.start(
        grid,
        ArrayRecord({name: Array(array) for name, array in initial().items()}),
        num_rounds=config["rounds"],
        timeout=config["timeout"],
    )
    np.savez(results.with_suffix(".npz"), **{name: array.numpy() for name, array in result.arrays.items()})
