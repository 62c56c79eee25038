"""Flower's ServerApp. Flower loads this file as `server_app.app`; nothing else imports it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import tepal  # noqa: F401  waits for a `tepal` that another thread is importing (see client_app/__init__.py)
from tepal.server_app.run import run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    run(grid, context.run_config)
