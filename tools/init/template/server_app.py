import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from quickstart.task import RowReader
from tepal.strategies import FedFrozen

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    model, rounds = RowReader(), config["num-server-rounds"]
    strategy = FedFrozen(warmup_rounds=config["warmup-rounds"], model=model)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=rounds)
    print("accuracy", result.evaluate_metrics_clientapp[rounds]["accuracy"])
    torch.save(result.arrays.to_torch_state_dict(), "final.pt")
