"""The files of a run directory, as the report reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepal.records.live import ClientTotals, ModelPart, read_clients, read_parts
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    read_config,
    read_label_counts,
    read_metrics,
    read_records,
    read_summary,
    summarise,
)
from tepal.report.method_figures import Records


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory's files, as far as the run has written them."""

    config: Mapping[str, Any]
    metrics: Sequence[RoundRecord]
    written_summary: Mapping[str, Any] | None
    records: Records
    label_counts: Mapping[str, Sequence[int]]
    parts: Sequence[ModelPart]
    clients: Mapping[str, ClientTotals]

    @staticmethod
    def of(run: Path) -> RunFiles:
        """Read the files of a run directory."""
        return RunFiles(
            read_config(run), read_metrics(run), read_summary(run), read_records(run), read_label_counts(run),
            read_parts(run), read_clients(run),
        )  # fmt: skip

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of `summary.json`; before it is written, those that follow from the rounds so far."""
        return {**summarise(self.metrics, self.config), **(self.written_summary or {})}

    @property
    def title(self) -> str:
        """Strategy, model and dataset."""
        known = (self.summary.get("strategy"), self.summary.get("model"), self.config.get("dataset"))
        return " · ".join(str(each) for each in known if each)
