"""An app that knows nothing of this project but the import and use of its mod and its strategy. Two rounds: one
of warm-up, and one in which query and key are frozen."""

import re
import textwrap
from pathlib import Path

QUICKSTART = {
    "pyproject.toml": """
        [project]
        name = "quickstart"
        version = "1.0.0"
        description = "A small transformer"
        license = "Apache-2.0"
        dependencies = ["flwr", "torch"]

        [tool.flwr.app]
        publisher = "somebody"

        [tool.flwr.app.components]
        serverapp = "server_app:app"
        clientapp = "client_app:app"

        [tool.flwr.app.config]
        num-server-rounds = 2
        learning-rate = 0.01
        """,
    "task.py": '''
        """What there is to learn. Nothing here knows of federated learning."""

        import torch
        from torch import nn


        class Net(nn.Module):
            """The rows of an image are the tokens of a small transformer."""

            def __init__(self):
                super().__init__()
                self.embedding = nn.Linear(8, 32)
                layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
                self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
                self.classifier = nn.Linear(32, 10)

            def forward(self, images):
                return self.classifier(self.encoder(self.embedding(images)).mean(1))


        def load_data(partition, partitions):
            """How bright images of noise are, in ten steps."""
            bright = torch.rand(800, generator=torch.Generator().manual_seed(0))
            images = torch.rand(800, 8, 8, generator=torch.Generator().manual_seed(1)) * bright[:, None, None]
            labels = (10 * bright).long()
            return images[partition::partitions].split(32), labels[partition::partitions].split(32)


        def train(model, images, labels, lr):
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
            for batch, target in zip(images, labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch), target)
                loss.backward()
                optimizer.step()
            return loss.item()
        ''',
    "client_app.py": '''
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from task import Net, load_data
        from task import train as train_fn
        from tepal.exchange import partial_exchange

        app = ClientApp(mods=[partial_exchange])


        @app.train()
        def train(msg, context):
            model = Net()
            model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            # the line
            images, labels = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
            loss = train_fn(model, images, labels, msg.content["config"]["lr"])
            metrics = {"train_loss": loss, "num-examples": sum(map(len, labels))}
            content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
            return Message(RecordDict(content), reply_to=msg)
        ''',
    "server_app.py": '''
        import torch
        from flwr.app import ArrayRecord, ConfigRecord
        from flwr.serverapp import ServerApp
        from task import Net
        from tepal.strategies import FedFrozen

        app = ServerApp()


        @app.main()
        def main(grid, context):
            torch.manual_seed(0)
            model = Net()
            strategy = FedFrozen(warmup_rounds=1, model=model, min_available_nodes=2, fraction_evaluate=0.0)
            strategy.on_round = lambda r: print(f"round {r.round}: {len(r.replied)} replies, {r.up.payload} bytes up")
            strategy.start(
                grid=grid,
                initial_arrays=ArrayRecord(model.state_dict()),
                train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
                num_rounds=context.run_config["num-server-rounds"],
            )
        ''',
}


LINE = "from tepal.client_app import apply_plan; apply_plan(model, msg)"
"""What its training function lacks."""


def quickstart(folder: Path, call: str = "") -> Path:
    """Write the app into `folder`; `call` is a line of its training function."""
    folder.mkdir()
    for name, text in QUICKSTART.items():
        (folder / name).write_text(textwrap.dedent(text).lstrip().replace("# the line", call))
    return folder


def uploads(log: str) -> dict[int, tuple[int, int]]:
    """Round → (replies, bytes up), as the ServerApp printed them."""
    return {int(r): (int(n), int(b)) for r, n, b in re.findall(r"round (\d+): (\d+) replies, (\d+) bytes up", log)}


# Bytes of the app's model: embedding, attention's four projections, two norms, the feed-forward layers, classifier.
QUERY_AND_KEY = 4 * 2 * (32 * 32 + 32)
MODEL = 4 * ((8 * 32 + 32) + 4 * (32 * 32 + 32) + 2 * 2 * 32 + (32 * 64 + 64) + (64 * 32 + 32) + (32 * 10 + 10))
