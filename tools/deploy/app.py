"""The app of a server: copied into the state folder, checked, and submitted to the SuperLink."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tepal.host.processes import Process
from tepal.host.superlink import RunError, app_run_config, stage_app, submit
from tepal.host.toml import Value, to_toml
from tepal.tools.deploy.journal import STATE
from tepal.tools.deploy.node_keys import ServerError
from tepal.tools.deploy.recovery import RESUMES, RunOnDisk, read_run
from tepal.tools.deploy.settings import Settings, superlink_environment

COPY = "tepal-served-app"
"""The folder of the app's copy in the state folder. No package can have this name, which has hyphens."""

_MARKER = "made-by-tepal-server"  # the file that tells this folder from one of the user's


class ServedApp:
    """The app of `tepal server`, if it has one, and the folders of its runs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = settings.state.resolve()
        self.home, self.bundle = self.state / "flower", self.state / COPY / "app"
        self.folders = [self.state / "runs"]

    def prepare(self) -> None:
        """Copy the app, and check the run config's keys. Raises ServerError."""
        given, app = self.settings.run_config, self.settings.app
        if app is None:
            if given is not None:
                raise ServerError("--run-config is given without --app: name the folder of the app to run")
            return
        try:
            known = app_run_config(app)
            if given and "runs" in given:
                self.folders.append(self.state / Path(str(given["runs"])).expanduser())
            self._make_room()
            # The state folder may be in the app's folder, or be that folder.
            own = (self.bundle.parent, self.home, self.state / STATE, *self.folders)
            stage_app(app, self.bundle, [self.state, *own])
        except (RunError, OSError) as error:
            raise ServerError(f"--app {app}: {error}") from error
        if unknown := sorted(set(given or ()) - set(known)):
            raise ServerError(
                f"--run-config: {app} has no run config key {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
            )

    def _make_room(self) -> None:
        """Make an empty folder for the copy. Raises ServerError if the place is taken by what no server has made."""
        folder = self.bundle.parent
        if not (folder / _MARKER).is_file():
            if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
                raise ServerError(
                    f"{folder} is not a folder that `tepal server` has made: it has no file {_MARKER}. The server "
                    "keeps its copy of the app there. Move it away, or name another state folder with --state"
                )
            folder.mkdir(exist_ok=True)
            (folder / _MARKER).write_text("A copy of the app, which `tepal server` replaces at each start.\n")
        if self.bundle.exists():
            shutil.rmtree(self.bundle)
        self.bundle.mkdir()

    def cannot_resume(self) -> str:
        """Return why the server cannot resume runs; "" if it can."""
        if self.settings.app is None:
            return "name its app's folder with --app"
        if RESUMES not in app_run_config(self.bundle):
            return f"the app in {self.settings.app} has no run config key {RESUMES!r}"
        return ""

    def own_run_config(self) -> dict[str, Value]:
        """Return the run config of --run-config, with an absolute folder of runs: the ServerApp runs elsewhere."""
        config = dict(self.settings.run_config or {})
        if self.settings.app and "runs" in app_run_config(self.bundle):
            config["runs"] = str(self.state / Path(str(config.get("runs", "runs"))).expanduser())
        return config

    def submit(self, config: Mapping[str, Value], superlink: Process) -> int:
        """Submit the app with this run config, and return the run's id."""
        path = self.home / "run-config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        environment = superlink_environment(self.home, self.settings.host)
        return submit(self.bundle, path, superlink, environment, 120)

    def resume_command(self, directory: Path) -> str:
        """Return the command by which a person resumes a run."""
        app, home, resume = map(shlex.quote, (str(self.settings.app or "APP"), str(self.home), f'resume="{directory}"'))
        return f"FLWR_HOME={home} flwr run {app} tepal --run-config {resume}"

    def runs(self, known: Iterable[str]) -> list[RunOnDisk]:
        """Return the known run directories and those in the folders, without symbolic links, as runs name them."""
        paths = {Path(os.path.realpath(path)) for path in known}
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found = Path(os.path.realpath(folder)).iterdir()
                paths |= {path for path in found if path.is_dir() and not path.is_symlink()}
        return [run for run in map(read_run, sorted(paths)) if run is not None]
