"""FedAvg of Flower or Tepal with a large model. Writes the process's memory before the model is loaded (bytes), and for
Tepal the bytes down and up of each round.
"""

import json
from pathlib import Path

from entries import model
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from tepal.exchange import Encoding
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
    moved: list[tuple[int, int]] = []
    if config["way"] == "flower":
        strategy = FlowerFedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy.start(grid, initial(config["megabytes"]), num_rounds=rounds)
    else:
        encoding = Encoding("auto", "auto") if config["way"] == "auto" else None
        ours = FedAvg(
            fraction_evaluate=0.0, min_available_nodes=clients, checkpoints=config["checkpoints"] or None,
            encoding=encoding, on_round=lambda report: moved.append((report.down.payload, report.up.payload)),
        )  # fmt: skip
        ours.start(prompt(grid), initial(config["megabytes"]), num_rounds=rounds)
    Path(config["output"]).write_text(json.dumps({"before": before, "moved": moved}))
