"""The run config: every key with its default, what is allowed, and what it is for; checked before anything starts.

Keys are flat and kebab-case, as Flower's `[tool.flwr.app.config]` and `--run-config` have them; a method's own keys
begin with its name (`fedfrozen.warmup-rounds`) and are declared in its file. Keys about data and local training are
defined where they are used.
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
