"""The files of a run directory, as the report and the dashboard read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tepal.records.live import ClientTotals, StoredSegment, read_clients, read_segments
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    current_summary,
    read_config,
    read_label_counts,
    read_metrics,
    read_records,
    summarise,
)
from tepal.report.heatmaps import ArraysOfRounds


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory, as far as it is written; each file is read when it is first needed."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_config(self.path)

    @cached_property
    def metrics(self) -> list[RoundRecord]:
        return read_metrics(self.path)

    @property
    def running(self) -> bool:
        """Whether the run goes on; not while the run itself writes its report."""
        return False

    @cached_property
    def written_summary(self) -> dict[str, Any] | None:
        """The content of `summary.json`; None if the run went on after it was written."""
        return current_summary(self.path, self.running)

    @cached_property
    def records(self) -> ArraysOfRounds:
        return read_records(self.path)

    @cached_property
    def label_counts(self) -> Mapping[str, Sequence[int]]:
        return read_label_counts(self.path)

    @cached_property
    def segments(self) -> Sequence[StoredSegment]:
        return read_segments(self.path)

    @cached_property
    def clients(self) -> Mapping[str, ClientTotals]:
        return read_clients(self.path)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of `summary.json`; before it is written, those of the rounds so far."""
        return {**summarise(self.metrics, self.config), **(self.written_summary or {})}
