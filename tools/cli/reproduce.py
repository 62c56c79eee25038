"""`tepal reproduce`: run a named experiment of a paper."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tepal.records.run_directory import RunInUse
from tepal.tools.cli import Ray, commands, reported

app = commands("reproduce")


@app.command("reproduce")
def reproduce_command(
    name: Annotated[str, typer.Argument(help="the experiment; without a name, all are listed")] = "",
    full: Annotated[bool, typer.Option("--full", help="at the paper's scale, not at that of a small machine")] = False,
    folder: Annotated[Path, typer.Option(help="for the results; existing results are not computed again")] = Path(
        "runs/reproduce"
    ),
    data: Annotated[Path, typer.Option(help="folder with the data sets, each under its name: cifar-10, mnist.npz")] = (
        Path("data")
    ),
    at_once: Annotated[
        int,
        typer.Option(
            min=1, help="without --ray: runs at the same time, each in a process with one thread; 1: with all threads"
        ),
    ] = 1,
    device: Annotated[
        str, typer.Option(help="where clients train: cpu, cuda, cuda:1; auto: on a GPU if there is one")
    ] = "auto",
    ray: Ray = None,
    cpus: Annotated[float, typer.Option(min=0.01, help="on a cluster: CPU cores of each run")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="on a cluster: share of a GPU of each run")] = 0,
    memory: Annotated[float, typer.Option(min=0, help="on a cluster: gigabytes of memory of each run")] = 0,
) -> None:
    """Run a named experiment of a paper, and show its results next to the paper's."""
    from tepal.host.processes import ProcessError
    from tepal.host.superlink import RunError
    from tepal.tools.cluster.connection import address_of, connected
    from tepal.tools.cluster.job import JobFailed
    from tepal.tools.reproduce.experiment import MissingData
    from tepal.tools.reproduce.machine.device import described, find_device
    from tepal.tools.reproduce.machine.memory import TooLittleMemory
    from tepal.tools.reproduce.runner import EXPERIMENTS, find_experiment, reproduce

    if not name:
        for each in EXPERIMENTS.values():
            typer.echo(f"{each.name:20} {each.title}. {each.paper}. {each.scale(full=False)}")
        return
    with reported(MissingData, RunInUse, TooLittleMemory, RunError, JobFailed, ProcessError), ExitStack() as opened:
        experiment = find_experiment(name)
        cluster = opened.enter_context(connected(at, cpus, gpus, memory)) if (at := address_of(ray)) else None
        if cluster is None:
            how = "one process" if at_once == 1 else f"{at_once} processes (--at-once {at_once})"
            typer.echo(f"Engine: {how}\nDevice: {described(find_device(device), at_once)}")
        else:
            typer.echo(cluster.description)
        page = reproduce(
            experiment, folder, full=full, log=typer.echo, data=data.expanduser(), at_once=at_once, device=device,
            cluster=cluster,
        )  # fmt: skip
        typer.echo((page.parent / "results.md").read_text(encoding="utf-8"))
        typer.echo(f"Results in {page.parent}\n  {page}  (open it in a browser)")
