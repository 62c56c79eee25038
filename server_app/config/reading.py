"""Reading and checking of a run config, also of a run that is resumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tepal import models
from tepal.host.toml import parts_of
from tepal.records.run_directory import RunDirectory
from tepal.server_app.config.checks import contradictions, explain, unknown, warnings
from tepal.server_app.config.client_tables import fold
from tepal.server_app.config.earlier import as_of_now
from tepal.server_app.config.errors import ConfigError
from tepal.server_app.config.run_config import SECTIONS, RunConfig, defaults
from tepal.strategies.fedensemble import rounds_of_mode
from tepal.strategies.fedfrozen import usual_warmup
from tepal.training.data import DataError
from tepal.training.data.inputs import sizes

log = getLogger("flwr")


def read_run_config(values: Mapping[str, Any], clients: int | None = None, *, warn: bool = True) -> RunConfig:
    """Check a run config: its keys, their types and ranges, and combinations of keys.

    Args:
        values: key → value; keys that are left out have their defaults. `client.<number>.<key>` is a setting of one
            client of a simulation.
        clients: how many a simulation has; None: not known.
        warn: whether to log settings that are probably not intended; False if they are read more than once.

    Raises:
        ConfigError: keys are wrong; the message names all of them.
    """
    values, problems = fold(values, clients)
    problems = [*unknown(key for key in values if key not in defaults()), *problems]
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
        config = _with_warmup(RunConfig.of(sections), sections)
        problems = list(contradictions(config))
    if problems:
        raise _invalid(problems)
    for warning in warnings(config) if warn else ():
        log.warning(warning)
    return config


def _invalid(problems: Sequence[str]) -> ConfigError:
    return ConfigError("\n".join(["the run config is invalid:", *(f"  {each}" for each in dict.fromkeys(problems))]))


def _with_warmup(config: RunConfig, sections: Mapping[str, Any]) -> RunConfig:
    """Return the config with a number of warm-up rounds: a run that is resumed with more rounds must keep it."""
    if "fedfrozen" not in config.strategies or config.fedfrozen.warmup_rounds >= 0:
        return config
    rounds, ensemble = config.rounds.num_server_rounds, config.fedensemble
    if config.rounds.strategy == "fedensemble":
        rounds = rounds_of_mode(rounds, ensemble.modes, ensemble.strata)
    fedfrozen = config.fedfrozen.model_copy(update={"warmup_rounds": usual_warmup(rounds)})
    return RunConfig.of({**sections, "fedfrozen": fedfrozen})


CHANGEABLE = (
    "num-server-rounds", "min-clients", "min-replies", "max-replies", "round-timeout", "fraction-evaluate",
    "evaluate-every", "patience", "min-improvement", "foreign-images",
    "checkpoints",
    "trackers", "mlflow.tracking-uri", "mlflow.experiment", "wandb.project", "wandb.entity", "wandb.mode",
)  # fmt: skip
"""Keys that may be changed when a run is resumed."""


def open_run(
    values: Mapping[str, Any], clients: int | None = None, *, given: Collection[str] = (), warn: bool = True
) -> tuple[RunConfig, RunDirectory | None]:
    """Return the checked config of a run, and its directory if it is resumed, else None. Raises ConfigError.

    Args:
        values: as of `read_run_config`, like `clients` and `warn`.
        given: keys that the user gave, as far as that is known: a resumed run takes also those with their defaults.
            They are noted in `resume-with`, for the ServerApp, which reads the config again.
    """
    if not values.get("resume"):
        return read_run_config(values, clients, warn=warn), None
    try:
        directory = RunDirectory.resume(Path(str(values["resume"])).expanduser())
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume={values['resume']!r}: {error}") from error
    folded, problems = fold(values, clients)
    named = parts_of(str(values.get("resume-with", "")))
    problems += unknown(key for key in named if key not in defaults())
    if problems:
        raise _invalid(problems)
    news = {key: value for key, value in folded.items() if value != directory.config.get(key)}
    return read_run_config(_resumed(news, as_of_now(directory.config), {*given, *named}), clients, warn=warn), directory


_WARMUP = "fedfrozen.warmup-rounds"  # its default is replaced by a number of rounds, which a run keeps


def _resumed(values: Mapping[str, Any], kept: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return the run config of a resumed run: the saved one, with new values of keys in `CHANGEABLE`.

    Flower adds the defaults of all keys that the user leaves out, so a key with its default counts as left out, unless
    it is named. That of `_WARMUP` always does: it stands for what the run has.

    Args:
        values: run config of the Flower run that resumes.
        kept: the run directory's `config.toml`.
        named: keys that the user is known to have given.

    Raises:
        ConfigError: a key that must not change has a new value.
    """
    usual = defaults()
    given = {
        key: value
        for key, value in values.items()
        if key not in ("runs", "resume", "resume-with")
        and (value != usual.get(key) or (key in named and key != _WARMUP))
        and value != kept.get(key, usual.get(key))
    }
    if fixed := [key for key in given if key not in CHANGEABLE]:
        raise ConfigError(
            f"resume={values['resume']!r}: these keys cannot change in a resumed run, leave them out: "
            + ", ".join(f"{key}={given[key]!r} (the run has {kept.get(key)!r})" for key in fixed)
            + f". Keys that may change: {', '.join(CHANGEABLE)}"
        )
    for key, value in given.items():
        log.info("%s is now %r (it was %r).", key, value, kept.get(key))
    again = ",".join(key for key in CHANGEABLE if key in given and given[key] == usual[key])
    return {**kept, **given, "resume": values["resume"], "resume-with": again}


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `models.build` that the data determines. Raises ConfigError if it cannot be read."""
    try:
        return sizes(config.data)
    except (DataError, models.ModelError) as error:
        raise ConfigError(str(error)) from error
