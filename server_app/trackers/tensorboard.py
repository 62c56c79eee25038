"""TensorBoard: event files in the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import as_json
from tepal.server_app.trackers.tracker import scalars

EVENTS = "tensorboard"  # folder in a run directory: TensorBoard's event files


class TensorBoard:
    """Event files in the run directory: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._folder = run / EVENTS
        self._config = config
        self._writer: Any = None

    def match(self, lines: Sequence[RoundRecord]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            with suppress(Exception):  # it may have failed before
                self._writer.close()
        # An event file with a purge step of 0: readers then ignore all earlier values.
        again = self._folder.is_dir() and any(self._folder.iterdir())
        self._writer = SummaryWriter(str(self._folder), purge_step=0 if again else None)
        rows = "\n".join(f"| {key} | {json.dumps(as_json(value))} |" for key, value in self._config.items())
        self._writer.add_text("run config", f"| key | value |\n|---|---|\n{rows}", 0)
        self.write({line.round: scalars(line) for line in lines})

    def write(self, values: Mapping[int, Mapping[str, float]]) -> None:
        for number, named in values.items():
            for key, value in named.items():
                self._writer.add_scalar(key, value, number)
        self._writer.flush()

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
