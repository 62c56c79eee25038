"""The app of a server: copied into the state folder, checked, and submitted to the SuperLink."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tepal.host.processes import Process
from tepal.host.superlink import RunError, app_run_config, stage_app, submit
from tepal.host.toml import Value, to_toml
from tepal.tools.deploy.node_keys import ServerError
from tepal.tools.deploy.recovery import RESUMES, RunOnDisk, read_run
from tepal.tools.deploy.settings import Settings, superlink_environment


class ServedApp:
    """The app of `tepal server`, if it has one, and the folders of its runs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = settings.state.resolve()
        self.home, self.bundle = self.state / "flower", self.state / "app"
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
            shutil.rmtree(self.bundle, ignore_errors=True)
            self.bundle.mkdir()
            stage_app(app, self.bundle)
        except (RunError, OSError) as error:
            raise ServerError(f"--app {app}: {error}") from error
        if unknown := sorted(set(given or ()) - set(known)):
            raise ServerError(
                f"--run-config: {app} has no run config key {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
            )
        if given and "runs" in given:
            self.folders.append(self.state / Path(str(given["runs"])).expanduser())

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
        path = self.state / "run-config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        return submit(self.bundle, path, superlink, superlink_environment(self.home), 120)

    def resume_command(self, directory: Path) -> str:
        """Return the command by which a person resumes a run."""
        app = self.settings.app or "APP"
        return f"FLWR_HOME={self.home} flwr run {app} tepal --run-config 'resume=\"{directory}\"'"

    def runs(self, known: Iterable[str]) -> list[RunOnDisk]:
        """Return the known run directories and those in the folders."""
        paths = {Path(path) for path in known}
        for folder in self.folders:
            with contextlib.suppress(OSError):
                paths |= {path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()}
        return [run for run in map(read_run, sorted(paths)) if run is not None]
