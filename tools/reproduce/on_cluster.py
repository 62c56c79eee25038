"""Trials as jobs on the machines of a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tepal.records.run_directory import CONFIG, as_json
from tepal.strategies import RoundFailed
from tepal.tools.cluster.connection import Cluster
from tepal.tools.cluster.job import MEMORY, PROCESS, Job, JobFailed, Place, done
from tepal.tools.cluster.texts import in_json, in_toml, replaced
from tepal.tools.reproduce.experiment import WEIGHTS, Experiment, MissingData, Trial, TrialInputs, Values
from tepal.tools.reproduce.runs import run_folder

_FOLDER = "trial"
_LEFT_OUT = {error.__name__: error for error in (MissingData, RoundFailed)}
"""Exceptions for which a trial is left out, and the others go on."""


def compute_on(
    cluster: Cluster, experiment: Experiment, full: bool, log: Callable[[str], None], trial: Trial, inputs: TrialInputs
) -> Values:
    """As `Experiment.compute`, on a machine of the cluster. A run that was interrupted goes on there.

    `log` is called with a line on a machine that was lost.

    Raises MissingData; RoundFailed, also if the trial's process ended or its machines are lost; JobFailed.
    """
    data = {name: cluster.inputs.of(path) for name, path in inputs.data.items()}

    def paths(place: Place) -> dict[str, str]:
        """Paths there → paths here."""
        of_data = {each.on(place.store): str(inputs.data[name]) for name, each in data.items()}
        return {**of_data, f"{place.folder}/{_FOLDER}": str(inputs.folder)}

    def arguments(place: Place) -> Mapping[str, Any]:
        there = {name: each.on(place.store) for name, each in data.items()}
        return {"experiment": experiment.name, "full": full, "trial": trial.name, "data": there,
                "needed": as_json(inputs.needed), "device": inputs.device}  # fmt: skip

    def tell(kind: str, text: str) -> None:
        if kind == "note":
            log(f"{trial.name}: {text}")

    run = f"{_FOLDER}/runs/{trial.name}"  # as `run_folder` names it, and what is in it
    job = Job(
        function="tepal.tools.reproduce.on_cluster:compute_there", arguments=arguments, inputs=tuple(data.values()),
        folders={_FOLDER: inputs.folder}, files=(
            f"{_FOLDER}/{WEIGHTS}/*", f"{run}/*clients/secret", f"{run}/*clients/*/personal/*", f"{run}/*runs/*",
            f"{run}/*config.json",
        ),
        sent=lambda place, name, content: _with(name, content, {ours: there for there, ours in paths(place).items()}),
        returned=lambda place, name, content: _with(name, content, paths(place)),
    )  # fmt: skip
    try:
        values: Values = done(cluster, job, tell)
    except JobFailed as error:
        if error.kind not in ("", PROCESS, MEMORY, *_LEFT_OUT):
            raise
        raise _LEFT_OUT.get(error.kind, RoundFailed)(str(error)) from error
    shutil.rmtree(run_folder(trial, inputs), ignore_errors=True)  # as there
    return values


def _with(name: str, content: bytes, others: Mapping[str, str]) -> bytes:
    """The settings of a run with other paths, so that it is known as the same run; other files as they are."""
    written = {CONFIG: in_toml, "config.json": in_json}.get(Path(name).name)
    return replaced(content, others, written) if written else content


def compute_there(
    folder: Path, *, experiment: str, full: bool, trial: str, data: Mapping[str, str], needed: Mapping[str, Values],
    device: str,
) -> Values:  # fmt: skip
    """Compute a trial on the machine that its job is on, in the job's folder."""
    from tepal.tools.reproduce.runner import EXPERIMENTS  # it imports this module

    place = folder / _FOLDER
    place.mkdir(exist_ok=True)
    found = EXPERIMENTS[experiment]
    one = next(each for each in found.trials(full) if each.name == trial)
    inputs = TrialInputs(place, {name: Path(path) for name, path in data.items()}, needed, device)
    values: Values = as_json(found.compute(one, inputs))
    return values
