"""A Flower app's run in one process: its ServerApp, and its ClientApps by turns. `simulation` starts it."""

from __future__ import annotations

import os
import pkgutil
import sys
from logging import getLogger
from pathlib import Path

from flwr.app import Context, RecordDict

from tepal.client_app.together import Gathering
from tepal.server_app.flower import RAISED, app_components, app_run_config, parse_run_config
from tepal.strategies.in_process import InProcessGrid, Node


def main() -> None:
    """Run an app: `one_process.py FOLDER CLIENTS AT_ONCE CONFIG`.

    FOLDER is the app's, CLIENTS the number of its clients, AT_ONCE how many of them are at work at once, CONFIG a TOML
    file with changes to its run configuration. `train-together` there goes before AT_ONCE.
    """
    folder, clients, at_once, changes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    try:
        config = app_run_config(folder) | parse_run_config([changes])
        sys.path.insert(0, str(folder))
        server_app, client_app = (pkgutil.resolve_name(name) for name in app_components(folder))
        nodes = [Node(client_app, {"partition-id": k, "num-partitions": clients}) for k in range(clients)]
        if (stacked := int(config.get("train-together", 1))) > 1:
            grid = InProcessGrid(nodes, config, at_once=stacked, gathering=Gathering)
        else:
            grid = InProcessGrid(nodes, config, at_once=at_once)
        server_app(grid, Context(1, 0, {}, RecordDict(), config))
    except Exception:
        getLogger("flwr").exception(RAISED)
        sys.stdout.flush()
        os._exit(1)  # whatever threads the app has left


if __name__ == "__main__":
    main()
