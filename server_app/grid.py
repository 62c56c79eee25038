"""Which Grid a strategy gets: one that does not wait, where this project has one for the installed Flower."""

from __future__ import annotations

from importlib.metadata import version
from logging import getLogger

from flwr.serverapp import Grid

from tepal.host.flower.patches import FLOWER

log = getLogger("flwr")


def prompt(grid: Grid) -> Grid:
    """Return a grid over the same connection that pulls replies without waiting, if it knows the installed Flower.

    Use it to start a strategy: `strategy.start(prompt(grid), …)`. The given grid remains usable. In Flower's simulation
    runtime the result is a `SimulatedGrid`, over HTTP a `PromptGrid`; a grid that is not Flower's is returned as it is.
    """
    if version("flwr") != FLOWER:
        log.warning(
            "Rounds take seconds longer, because tepal.server_app.grid supports flwr %s, not %s.",
            FLOWER,
            version("flwr"),
        )
        return grid
    if not type(grid).__module__.startswith("flwr."):
        return grid
    # Flower's own grids import its databases: more than half a second, which a simulation in one process does without.
    from flwr.superlink.grid.http_grid import HttpGrid
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid

    from tepal.server_app.http_grid import PromptGrid
    from tepal.server_app.simulated_grid import SimulatedGrid

    if type(grid) is InMemoryGrid:
        return SimulatedGrid(grid)
    return PromptGrid(grid) if type(grid) is HttpGrid else grid
