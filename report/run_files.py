"""What a run has left in its directory, as its page and the dashboard read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepal.records.run_directory import (
    BLOCKS,
    CLIENTS,
    read_config,
    read_json,
    read_label_counts,
    read_metrics,
    read_records,
    read_summary,
    summarise,
)
from tepal.report.method_figures import Records

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunFiles:
    """What a run has left until now, as it is read from its directory."""

    config: Mapping[str, Any]
    metrics: Lines
    written_summary: Mapping[str, Any] | None
    records: Records
    label_counts: Mapping[str, Sequence[int]]
    cells: Sequence[Mapping[str, Any]]
    clients: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(run: Path) -> RunFiles:
        """Those of a run directory."""
        return RunFiles(
            read_config(run), read_metrics(run), read_summary(run), read_records(run), read_label_counts(run),
            read_json(run / BLOCKS) or [], read_json(run / CLIENTS) or {},
        )  # fmt: skip

    @property
    def summary(self) -> dict[str, Any]:
        """As far as it is known."""
        return {**summarise(self.metrics, self.config), **(self.written_summary or {})}

    @property
    def title(self) -> str:
        """Strategy, model and dataset."""
        known = (self.summary.get("strategy"), self.summary.get("model"), self.config.get("dataset"))
        return " · ".join(str(each) for each in known if each)
