"""The keys of the run config: their defaults, allowed values and descriptions, and checks of a whole run config.

Keys are flat and in kebab-case, as in Flower's `[tool.flwr.app.config]` and `--run-config`. A strategy's own keys begin
with its name (`fedfrozen.warmup-rounds`) and are declared in its file, keys of data and local training in `training`.
"""

from tepal.server_app.config.common import StrategyName
from tepal.server_app.config.errors import ConfigError
from tepal.server_app.config.key_table import about, reference, strategies
from tepal.server_app.config.reading import open_run, read_run_config, sizes_of
from tepal.server_app.config.run_config import RunConfig, defaults

__all__ = [
    "ConfigError",
    "RunConfig",
    "StrategyName",
    "about",
    "defaults",
    "open_run",
    "read_run_config",
    "reference",
    "sizes_of",
    "strategies",
]
