"""Reading a run config: it is checked, and joined with that of a run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tepal import models
from tepal.records.run_directory import RunDirectory
from tepal.server_app.config.checks import contradictions, explain, unknown, warnings
from tepal.server_app.config.errors import ConfigError
from tepal.server_app.config.run_config import SECTIONS, RunConfig, defaults
from tepal.training.data import DataError
from tepal.training.data.inputs import sizes

log = getLogger("flwr")


def read_run_config(values: Mapping[str, Any]) -> RunConfig:
    """Check a run config: known keys, types, ranges, and what must hold between keys.

    Args:
        values: key → value; keys that are left out have their defaults.

    Raises:
        ConfigError: naming all keys that are wrong at once.
    """
    problems = [unknown(key) for key in values if key not in defaults()]
    sections: dict[str, Any] = {}
    explained: set[str] = set()  # `seed` is a key of two sections
    for name, (_, section) in SECTIONS.items():
        try:
            sections[name] = section.model_validate(dict(values))
        except ValidationError as error:
            wrong = {str(one["loc"][0]): dict(one) for one in error.errors()}
            problems += [explain(section, one) for key, one in wrong.items() if key not in explained]
            explained |= set(wrong)
    if not problems:
        config = RunConfig.of(sections)
        problems = list(contradictions(config))
    if problems:
        unique = list(dict.fromkeys(problems))
        raise ConfigError("\n".join(["the run config cannot be run:", *(f"  {problem}" for problem in unique)]))
    for warning in warnings(config):
        log.warning(warning)
    return config


CHANGEABLE = (
    "num-server-rounds", "min-clients", "min-replies", "max-replies", "round-timeout", "fraction-evaluate",
    "evaluate-every",
    "checkpoints",
    "trackers", "mlflow.tracking-uri", "mlflow.experiment",
)  # fmt: skip
"""Keys that a resumed run may have other than it was started with."""


def open_run(values: Mapping[str, Any]) -> tuple[RunConfig, RunDirectory | None]:
    """The checked config of a run, and its directory where it is one that is resumed. Raises ConfigError."""
    if not values.get("resume"):
        return read_run_config(values), None
    try:
        directory = RunDirectory.resume(Path(str(values["resume"])).expanduser())
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume={values['resume']!r}: {error}") from error
    return read_run_config(_resumed(values, directory.config)), directory


def _resumed(values: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """The run config of a run that is resumed: as it was kept, but for what may change and is given anew.

    Flower fills in the defaults of all keys that a user leaves out, so a key that has its default counts as left out.

    Args:
        values: of the Flower run that resumes.
        kept: the run directory's `config.toml`.

    Raises:
        ConfigError: a key is given that cannot change any more.
    """
    usual = defaults()
    given = {
        key: value
        for key, value in values.items()
        if key not in ("runs", "resume") and value != usual.get(key) and value != kept.get(key)
    }
    if fixed := [key for key in given if key not in CHANGEABLE]:
        raise ConfigError(
            f"resume={values['resume']!r}: the run goes on as it was started, so leave out what cannot change: "
            + ", ".join(f"{key}={given[key]!r} (it has {kept.get(key)!r})" for key in fixed)
            + f". What may change: {', '.join(CHANGEABLE)}"
        )
    for key, value in given.items():
        log.info("%s is now %r (it was %r).", key, value, kept.get(key))
    return {**kept, **given, "resume": values["resume"]}


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """What the model is built with, as the run's data has it. Raises ConfigError when it cannot be read."""
    try:
        return sizes(config.data)
    except (DataError, models.ModelError) as error:
        raise ConfigError(str(error)) from error
