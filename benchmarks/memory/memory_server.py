"""FedAvg of Flower or Tepal with a large model. Reports the memory of the process before the model is loaded."""

import json
from pathlib import Path

from entries import model
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from tepal.server_app.grid import prompt
from tepal.strategies import FedAvg

app = ServerApp()


def initial(megabytes: float) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in model(megabytes).items()})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    status = Path("/proc/self/status").read_text(encoding="ascii")
    before = 1024 * int(status.split("RssAnon:")[1].split()[0])
    rounds, clients = config["rounds"], config["clients"]
    if config["way"] == "flower":
        strategy = FlowerFedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy.start(grid, initial(config["megabytes"]), num_rounds=rounds)
    else:
        ours = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients, checkpoints=config["checkpoints"] or None)
        ours.start(prompt(grid), initial(config["megabytes"]), num_rounds=rounds)
    Path(config["output"]).write_text(json.dumps({"before": before}))
