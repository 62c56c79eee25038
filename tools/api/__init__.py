"""Tepal in Python and in notebooks: `tepal.simulate`, `tepal.compare` and `tepal.load`.

Runs are in the calling process, one client after another, by the same ServerApp and ClientApp as everywhere else. With
`deterministic=True` the result is that of `tepal simulate`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tepal.host.superlink import RunError
from tepal.host.toml import Value
from tepal.server_app.config import ConfigError, RunConfig, defaults, open_run
from tepal.tools.api.comparing import NOT_OF_RUNS, Compared, compared
from tepal.tools.api.given import data_settings, model_name, takes_seed
from tepal.tools.api.own_training import Train, check_own_training, client_app
from tepal.tools.api.run import Run, load
from tepal.tools.api.shown import console_of
from tepal.tools.paths import absolute_paths
from tepal.tools.simulation.running import cache_of, check_clients, clients_of, run_once
from tepal.tools.simulation.this_process import ThisProcess
from tepal.tools.terminal import RoundProgress

__all__ = ["Compared", "ConfigError", "Run", "RunError", "Train", "compare", "load", "simulate"]

Model = str | Path | nn.Module | Callable[..., nn.Module]
_CLIENTS, _ROUNDS = 10, 20
_NOT_OF_COMPARISONS = {
    **NOT_OF_RUNS,
    "strategy": "a comparison has strategies, its first argument",
    "train": "own training is for `simulate` alone",
}


def simulate(
    *,
    strategy: str = "fedfrozen",
    model: Model = "tiny-vit",
    data: Any = "digits",
    clients: int | None = None,
    rounds: int | None = None,
    seed: int = 42,
    train: Train | None = None,
    runs: str | Path = "runs",
    progress: bool = True,
    **options: Any,
) -> Run:
    """Run a strategy with simulated clients in this process, and return the run.

    Args:
        strategy: its name, such as "fedavg", "selective" or "fedacs" (`tepal strategies` lists all).
        model: a model's name; a folder with a config.json; a torch module, with whose weights the run begins; or a
            function that returns a module, which is called with those of `image_shape`, `classes`, `features`,
            `outputs` and `vocabulary` that it takes.
        data: a data set's name; a file or folder (docs/data.md); (inputs, labels) as arrays or tensors, or as texts
            and whole numbers; a torch Dataset of such pairs; a dataset of Hugging Face; or a list with the data of
            each client. Images are whole numbers 0…255 or floats 0…1.
        clients: number of clients among which the data is divided; by default 10, or as many as the list or a run that
            is resumed has.
        rounds: number of rounds; by default 20, or in a run that is resumed as many as it has.
        seed: of weights, partitions and batches.
        train: function of (model, batches, penalty) that trains the model in place and returns the mean loss. Each
            iteration over `batches` is an epoch of (inputs, labels); `penalty()` belongs to the loss.
        runs: folder for the run directory.
        progress: whether rounds are shown as they end.
        options: other keys of the run config (docs/run-config.md), with underscores: `local_epochs=2`,
            `wire_dtype="int8"`. Those of a strategy are in a dictionary: `fedfrozen={"warmup_rounds": 3}`.

    Raises:
        ConfigError: a setting is wrong; the message has all that are. Nothing was run.
        RunError: the run failed; the message has its folder, with the results so far.
        TypeError: model or data is an object of another type.
    """
    asked = _ROUNDS if rounds is None else rounds
    values, count = _settings(model, data, clients, runs, {**options, "strategy": strategy}, asked, seed)
    _check_modes([strategy], model)
    given = {*_keys(options), *(() if rounds is None else ("num-server-rounds",))}
    config, _ = open_run(values, count, given=given, warn=False)  # the run shows them
    check_clients(config, count)
    if train is not None:
        _check_own(config, train)
    errors: list[Exception] = []
    engine = ThisProcess(count, None if train is None else client_app(train, errors))
    engine.cache = cache_of(config)
    console = console_of(progress)
    with RoundProgress(config.rounds.num_server_rounds, console=console) as shown:
        try:
            return Run(run_once(engine, config, shown, console, False, lambda _run: None))
        except RunError as error:
            if errors:
                raise error from errors[0]  # its traceback leads into the user's function
            raise


def compare(
    strategies: Sequence[str | Mapping[str, Any]] = ("fedavg", "fedfrozen", "selective"),
    *,
    seeds: int | Sequence[int] = (42,),
    vary: Mapping[str, Any] | None = None,
    target: float | str | None = None,
    model: Model = "tiny-vit",
    data: Any = "digits",
    clients: int | None = None,
    rounds: int = _ROUNDS,
    runs: str | Path = "runs",
    progress: bool = True,
    **options: Any,
) -> Compared:
    """Run several strategies, or variants of one, with otherwise equal settings, and return the comparison.

    Args:
        strategies: names; or dictionaries with `strategy`, `name` and further options, such as
            `{"name": "slow", "strategy": "fedavg", "learning_rate": 0.001}`.
        seeds: each is run with each of them.
        vary: lists of values by keyword, such as `{"learning_rate": [0.001, 0.01]}`: each is run with every
            combination.
        target: score until which bytes, rounds and time are counted, such as 0.9; or a final score with a margin,
            such as "fedavg-0.005", each seed its own. By default 90 % of the final accuracy of FedAvg, or of the first
            variant if FedAvg is not compared.
        model: as in `simulate`, like all that follow; the same for all.
        data: the data of all.
        clients: number of clients.
        rounds: number of rounds.
        runs: folder for the comparison's folder.
        progress: whether rounds are shown as they end.
        options: other keys of the run config.

    A run that fails is shown, and the others continue.

    Raises:
        ConfigError: a setting is wrong; the message has all that are. Nothing was run.
        KeyboardInterrupt: it was stopped by Ctrl-C; the message has its folder, with the results so far.
        TypeError: model or data is an object of another type.
    """
    if isinstance(strategies, str | Mapping) or not strategies:
        raise ConfigError(f"strategies is {strategies!r}, expected a list of names or dictionaries")
    for key, remedy in _NOT_OF_COMPARISONS.items():
        if key in options:
            raise ConfigError(f"{key}={options[key]!r}: {remedy}")
    _check_modes([each if isinstance(each, str) else each.get("strategy") for each in strategies], model)
    values, count = _settings(model, data, clients, runs, options, rounds, 42)
    numbers, varied = [int(seeds)] if isinstance(seeds, int | np.integer) else seeds, _keys(vary or {})
    config, shown = {**defaults(), **values}, console_of(progress)
    return compared(strategies, numbers, config, count, varied, _plain(target), _keys, shown)


def _settings(
    model: Model, data: Any, clients: int | None, runs: str | Path, options: Mapping[str, Any], rounds: int, seed: int
) -> tuple[dict[str, Value], int]:
    """Return the run config, without defaults, and the number of clients."""
    if clients is not None and (type(clients) is not int or clients < 2):
        raise ConfigError(f"clients is {clients!r}, expected a whole number of at least 2")
    folder = Path(runs).expanduser().resolve()
    of_data, count = data_settings(data, folder / ".data")
    if clients is not None and count not in (None, clients):
        raise ConfigError(f"clients is {clients}, but data is a list of {count}: leave out clients")
    if isinstance(model, str | Path):
        of_data.pop("task", None)  # such a model has its own
    values: dict[str, Value] = {
        "model": model_name(model), "num-server-rounds": rounds, "seed": seed, "runs": str(folder), **of_data,
        **_keys(options),
    }  # fmt: skip
    return absolute_paths(values, Path()), clients or count or clients_of(str(values.get("resume", ""))) or _CLIENTS


def _keys(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return options as keys of the run config."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        key = prefix + str(name).replace("_", "-")
        found |= _keys(value, f"{key}.") if isinstance(value, Mapping) else {key: _plain(value)}
    return found


def _plain(value: Any) -> Any:
    """Return a path as text, and a number of NumPy as one of Python."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _check_modes(strategies: Sequence[Any], model: Model) -> None:
    if "fedensemble" in strategies and not takes_seed(model):
        raise ConfigError(
            "strategy='fedensemble' with a module: all modes would begin with the same weights; give a function that "
            "returns a new module"
        )


def _check_own(config: RunConfig, train: Train) -> None:
    from tepal.server_app.run import build_model, build_strategy

    if not callable(train):
        raise TypeError(f"train is {type(train).__name__}, expected a function of (model, batches, penalty)")
    _, blocks = build_model(config)
    check_own_training(config.rounds.strategy, build_strategy(config, blocks))
