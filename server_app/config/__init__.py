"""The keys of the run config: their defaults, allowed values and descriptions, and checks of a whole run config.

Keys are flat and in kebab-case, as in Flower's `[tool.flwr.app.config]` and `--run-config`. A strategy's own keys begin
with its name (`fedfrozen.warmup-rounds`) and are declared in its file, keys of data and local training in `training`.
"""

from tepal.server_app.config.common import (
    BlocksConfig,
    EncodingConfig,
    MLflowConfig,
    RoundConfig,
    StrategyName,
    WireDtype,
)
from tepal.server_app.config.errors import ConfigError
from tepal.server_app.config.key_table import about, reference, strategies
from tepal.server_app.config.reading import CHANGEABLE, open_run, read_run_config, sizes_of
from tepal.server_app.config.run_config import SECTIONS, RunConfig, Value, defaults

__all__ = [
    "CHANGEABLE",
    "SECTIONS",
    "BlocksConfig",
    "ConfigError",
    "EncodingConfig",
    "MLflowConfig",
    "RoundConfig",
    "RunConfig",
    "StrategyName",
    "Value",
    "WireDtype",
    "about",
    "defaults",
    "open_run",
    "read_run_config",
    "reference",
    "sizes_of",
    "strategies",
]
