"""Weights & Biases: a run on its server, or offline in files that `wandb sync` uploads later."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import as_json, json_line, write_whole
from tepal.server_app.trackers.tracker import TrackerError, scalars

if TYPE_CHECKING:
    from tepal.server_app.config.common import WandBConfig
    from tepal.server_app.config.run_config import RunConfig

log = getLogger("flwr")

WANDB_ROWS = "wandb.jsonl"  # in a run directory: names its run of W&B, and has the rows that were logged there
WANDB_FILES = "wandb"  # folder in a run directory: W&B's own files
REPLACED = "replaced"  # tag of a run of W&B whose rounds were repeated with other values
ROUND = "round"  # metric that is the x axis of all others
ONLINE, OFFLINE = "online", "offline"

_EXIT = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}  # exit codes, from which W&B derives a run's state
_PATIENCE = 10.0  # seconds for which a round waits for the server
_LAST_PATIENCE = 30.0  # seconds in which the rest must be uploaded when the run ends
_SETTINGS: Mapping[str, Any] = {
    "init_timeout": _PATIENCE,
    "finish_timeout": _LAST_PATIENCE,
    "finish_timeout_raises": True,
    # No output, and no data about this process or machine.
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "label_disable": True,
    "symlink": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,
}


def wandb_mode(keys: WandBConfig) -> str:
    """Return the mode that the run config or the environment names. Raises TrackerError for an unsupported one."""
    mode = keys.mode or os.environ.get("WANDB_MODE", "") or ONLINE
    if mode not in (ONLINE, OFFLINE):
        raise TrackerError(
            f"WANDB_MODE={mode!r} is not supported: allowed are {ONLINE} and {OFFLINE}. Change it, set wandb.mode, or "
            "leave wandb out of trackers"
        )
    return mode


def check_wandb(config: RunConfig) -> None:
    """Raise TrackerError if W&B's server is needed, but has no API key or does not accept it."""
    if wandb_mode(config.wandb) == OFFLINE:
        return
    wandb = _start(ONLINE)
    try:
        _require_key(wandb, verify=True)
    finally:
        _stop(wandb)


class WandB:
    """A run of W&B with the name of the run directory, the strategy as its group and the run config as its config.

    A row that is logged cannot be changed. The rows are therefore noted in the run directory, by the numbers of their
    steps: a resumed run continues the same run of W&B after the last of them. If `metrics.jsonl` has other values, a
    new run of W&B replaces the old one, which gets the tag `replaced`.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], keys: WandBConfig, group: str) -> None:
        self._path, self._config, self._keys, self._group = run, config, keys, group
        self._wandb: Any = None
        self._run: Any = None
        self._noted: _Noted | None = None
        self._sure = True  # all rows that are noted were given to W&B

    def match(self, lines: Sequence[RoundRecord]) -> None:
        wanted = {(line.round, key): value for line in lines for key, value in scalars(line).items()}
        if self._run is None or not self._sure:
            with suppress(Exception):  # W&B's process may have been killed
                self._finish("FAILED")
            self._resume()
        shown = self._shown()
        if any(wanted.get(at) != value for at, value in shown.items()):
            self._run.tags = (*(self._run.tags or ()), REPLACED)
            self._finish("FINISHED")
            self._begin()
            shown = {}
        self._note()  # whole: the last line may be incomplete
        news: dict[int, dict[str, float]] = {}
        for (number, key), value in wanted.items():
            if (number, key) not in shown:
                news.setdefault(number, {})[key] = value
        self.write(news)

    def write(self, values: Mapping[int, Mapping[str, float]]) -> None:
        assert self._noted is not None
        rows = self._noted.rows
        for number, named in sorted(values.items()):
            row = {ROUND: number, **named}
            self._append(row)  # first: `_resume` corrects a row that is noted, but was not logged
            self._sure = False
            self._run.log(row, step=len(rows), commit=True)
            self._sure = True
            rows.append(row)

    def close(self, status: str) -> None:
        self._finish(status)

    def _finish(self, status: str) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.finish(exit_code=_EXIT[status])
        except TimeoutError:
            log.warning(
                "wandb: not all rounds were uploaded within %d s. Upload the rest with `wandb sync %s`.",
                _LAST_PATIENCE, Path(run.dir).parent,
            )  # fmt: skip
        finally:
            _stop(self._wandb, run)
        if self._sure:
            self._append({"closed": status})

    def _shown(self) -> dict[tuple[int, str], float]:
        assert self._noted is not None
        return {(int(row[ROUND]), key): value for row in self._noted.rows for key, value in row.items() if key != ROUND}

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self._path / WANDB_ROWS).open("ab") as file:
            file.write(json_line(line))

    def _note(self) -> None:
        assert self._noted is not None
        self._noted.write(self._path / WANDB_ROWS)

    def _begin(self) -> None:
        """Open a new run of W&B."""
        self._open(uuid.uuid4().hex[:12], [])

    def _resume(self) -> None:
        """Open the run of W&B that the run directory names, with the rows that it has for certain; else a new one."""
        noted = _Noted.read(self._path / WANDB_ROWS)
        if noted is None or (noted.project, noted.entity) != (self._keys.project, self._keys.entity):
            self._begin()
            return
        rows = noted.rows
        if not noted.closed and noted.mode == OFFLINE:
            # The process was killed, and W&B writes with a delay: its file is replaced by one with the same rows.
            folder = self._path / WANDB_FILES / noted.folder
            if any(folder.glob("*.sync*")):  # it was uploaded as it is
                self._begin()
                return
            shutil.rmtree(folder, ignore_errors=True)
            rows = rows[: noted.certain]
        elif not noted.closed and wandb_mode(self._keys) == OFFLINE:
            self._begin()  # only the server knows which rows it received
            return
        self._open(noted.run, rows)

    def _open(self, identity: str, rows: list[dict[str, float]]) -> None:
        mode = wandb_mode(self._keys)
        self._wandb = _start(mode)
        files = self._path / WANDB_FILES
        before = set(files.glob("*"))
        try:
            if mode == ONLINE:
                _require_key(self._wandb, verify=False)
            self._run = self._wandb.init(
                project=self._keys.project,
                entity=self._keys.entity or None,
                mode=mode,
                id=identity,
                resume="allow",
                reinit="create_new",
                dir=str(self._path),
                name=self._path.name,
                group=self._group,
                config={key: as_json(value) for key, value in self._config.items()},
                allow_val_change=True,
                settings=_settings(self._wandb),
            )
        except Exception:
            _stop(self._wandb)
            for left in set(files.glob("*")) - before:  # an attempt in each round would leave as many folders
                shutil.rmtree(left, ignore_errors=True)
            raise
        if mode == ONLINE:
            received = self._run.starting_step
            if received > len(rows):  # rows that are not noted
                self._finish("FINISHED")
                self._begin()
                return
            rows = rows[:received]
        self._run.define_metric(ROUND)
        self._run.define_metric("*", step_metric=ROUND)
        folder = Path(self._run.dir).parent.name
        self._noted = _Noted(
            identity, self._keys.project, self._keys.entity, mode, folder, certain=len(rows), rows=list(rows)
        )
        self._sure = True


@dataclass(frozen=True)
class _Noted:
    """What a run directory notes of its run of W&B: in JSON lines the run and its last session, rows, and its end."""

    run: str
    project: str
    entity: str
    mode: str
    folder: str
    certain: int  # rows of earlier sessions
    rows: list[dict[str, float]]
    closed: bool = False

    @classmethod
    def read(cls, path: Path) -> _Noted | None:
        """Read the file; None if there is none, or it cannot be read."""
        try:
            first, *others = path.read_text(encoding="utf-8").splitlines()
            noted = cls(**json.loads(first), rows=[])
        except (OSError, ValueError, TypeError):
            return None
        for text in others:
            try:
                row = json.loads(text)
            except ValueError:  # a process was killed while it wrote
                return noted
            if "closed" in row:
                return cls(**{**vars(noted), "closed": True})
            noted.rows.append(row)
        return noted

    def write(self, path: Path) -> None:
        first = {key: value for key, value in vars(self).items() if key not in ("rows", "closed")}
        write_whole(path, b"".join(map(json_line, [first, *self.rows])))


def _start(mode: str) -> Any:
    """Import W&B, silent from here on, and return it."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # otherwise W&B reports its own errors to its developers
    import wandb

    wandb.setup(_settings(wandb, mode=mode))
    return wandb


def _stop(wandb: Any, run: Any = None) -> None:
    """End W&B's process and threads after this run, unless the app has a run of its own."""
    if wandb.setup().most_recent_active_run in (None, run):
        with suppress(Exception, SystemExit):  # the process may have been killed
            wandb.teardown()


def _settings(wandb: Any, **more: Any) -> Any:
    # Those that begin with x_ may come and go with W&B's versions.
    known = {key: value for key, value in _SETTINGS.items() if key in wandb.Settings.model_fields}
    return wandb.Settings(**known, **more)


def _require_key(wandb: Any, verify: bool) -> None:
    """Raise TrackerError if there is no API key, or, with `verify`, the server does not accept it."""
    if wandb.run is not None:  # the app itself is logged in
        return
    try:
        found = wandb.login(prompt=False, verify=verify)
    except Exception as error:
        raise TrackerError(
            f"Weights & Biases: {error}. Correct the API key or the connection, set wandb.mode={json.dumps(OFFLINE)}, "
            "or leave wandb out of trackers"
        ) from error
    if not found:
        raise TrackerError(
            "Weights & Biases has no API key on this machine: run `wandb login`, set WANDB_API_KEY in the server's "
            f"environment, set wandb.mode={json.dumps(OFFLINE)}, or leave wandb out of trackers"
        )
