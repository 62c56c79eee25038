"""What a run of a comparison measured: its curve, and its figures after the last round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tepal.host.toml import Value
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    ACCURACY,
    Measure,
    current_summary,
    read_config,
    read_metrics,
    summarise,
    total,
)
from tepal.report.round_figures import TEST_DATA, transferred
from tepal.tools.compare.doubt import doubt_figures
from tepal.tools.compare.plan import ComparedRun
from tepal.tools.compare.sections import value_text

TO_TARGET = (
    "bytes_to_target", "bytes_down_to_target", "bytes_up_to_target", "overhead_to_target", "rounds_to_target",
    "seconds_to_target",
)  # fmt: skip
"""The figures up to the first round that reached the target: payload bytes of all clients, both ways and each way, the
bytes of their manifests and headers, rounds, and the seconds of these rounds."""

CHANGEABLE = (
    "num-server-rounds", "min-clients", "min-replies", "max-replies", "round-timeout", "fraction-evaluate",
    "evaluate-every", "patience", "min-improvement", "foreign-images",
)  # fmt: skip
"""Keys on which results depend, of those that a run may change when it is resumed without its comparison. All of those
are in `tepal.server_app.config.reading`, which takes a second to import."""


@dataclass(frozen=True)
class Point:
    """A point of a curve: the bytes transferred up to the end of a round, and the score; means over several seeds.

    `deviation` is the standard deviation of the score over the seeds.
    """

    round: int
    transferred: float | None
    score: float
    deviation: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The score minus and plus its standard deviation; None for a single seed."""
        return None if self.deviation is None else (self.score - self.deviation, self.score + self.deviation)


@dataclass(frozen=True)
class Curve:
    """The score round by round; `of` names its test data, as `accuracy_of` in metrics.jsonl does."""

    of: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Measured:
    """A run of a comparison with its rounds and its summary so far.

    `by`: the measure of all runs; `changed`: of `CHANGEABLE`, those in which it differs from its comparison.
    """

    run: ComparedRun
    metrics: Sequence[RoundRecord]
    summary: Mapping[str, Any]
    by: Measure = ACCURACY
    changed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def server_score(self) -> float | None:
        """The last score on the server's held-out data; None if the clients have personal models."""
        if any(line.accuracy_of == "personal" for line in self.metrics):
            return None
        of_server = [line.value(self.by.key) for line in self.metrics if line.accuracy_of == "server"]
        return of_server[-1] if of_server else None

    @property
    def personal(self) -> bool:
        """Whether its models are personal: by its curve or, before it has one, by its strategy."""
        if self.curve is not None:
            return self.curve.of == "personal"
        from tepal.strategies import STRATEGIES  # Flower: a second

        listed = STRATEGIES.get(self.run.strategy)  # None: a strategy of another version
        return listed is not None and bool(listed.result)

    @cached_property
    def transferred(self) -> list[float | None]:
        """Payload bytes of all clients, both ways, up to and including each round."""
        return transferred(self.metrics)

    @cached_property
    def curve(self) -> Curve | None:
        """The scores of the personal models if there are such, else on the server's data, else on the clients'."""
        for of in ("personal", *TEST_DATA):
            if points := self._points(self.by.key, of):
                return Curve(of, points)
        return None

    def _points(self, key: str, of: str = "") -> tuple[Point, ...]:
        """The rounds with this score; `of`: only those whose result was scored on this test data."""
        return tuple(
            Point(line.round, transferred, score)
            for line, transferred in zip(self.metrics, self.transferred, strict=True)
            if (score := line.value(key)) is not None and line.accuracy_of == (of or line.accuracy_of)
        )

    @property
    def own_score(self) -> float | None:
        """The score of the last round on the clients' own tests: an earlier model is not the result."""
        return self.metrics[-1].value(f"clients_{self.by.key}") if self.metrics else None

    def reached(self, target: float | None, own_tests: bool = False) -> Point | None:
        """The first point with at least the target score on the server's held-out data; None if there is none.

        `own_tests`: the score is the mean over the clients' own tests, of personal models.
        """
        if target is None:
            return None
        return next((point for point in self.scores_on(own_tests) if self.by.good(point.score, target)), None)

    def scores_on(self, own_tests: bool) -> tuple[Point, ...]:
        """The scores of the rounds on the clients' own tests, else on the server's held-out data; () for none."""
        if own_tests:
            return self._points(f"clients_{self.by.key}")
        return self.curve.points if self.curve is not None and self.curve.of == "server" else ()

    def figures(self, target: float | None, own_tests: bool = False) -> dict[str, float | None]:
        """All figures of the run; None for one that is unknown or does not exist. Arguments as of `reached`."""
        reached = self.reached(target, own_tests)
        summed = {key: self.summary.get(key) for key in ("bytes_down", "bytes_up", "bytes_vs_fedavg", "seconds")}
        return {
            f"server_{self.by.key}": self.server_score,
            f"clients_{self.by.key}": self.own_score,
            "clients_spread": self.metrics[-1].clients_spread if self.metrics else None,
            **self._to_target(reached),
            **(summed if self.metrics else dict.fromkeys(summed)),
            "plain_vs_fedavg": self._plain_vs_fedavg,
            "bytes_total": self.transferred[-1] if self.metrics else None,
            "round_seconds": self.round_seconds,
            "step_seconds": self.summary.get("step_seconds"),
        }

    def _to_target(self, reached: Point | None) -> dict[str, float | None]:
        """What it took until the end of the round that reached the target; a sum with an unknown round is unknown."""
        if reached is None:
            return dict.fromkeys(TO_TARGET)
        lines = [line for line in self.metrics if line.round <= reached.round]
        return {
            "bytes_to_target": reached.transferred,
            "bytes_down_to_target": total(lines, "bytes_down"),
            "bytes_up_to_target": total(lines, "bytes_up"),
            "overhead_to_target": total(lines, "bytes_overhead"),
            "rounds_to_target": reached.round,
            "seconds_to_target": total(lines, "seconds"),
        }

    @property
    def _plain_vs_fedavg(self) -> float | None:
        """The share of FedAvg's bytes if nothing were encoded."""
        plain, fedavg = total(self.metrics, "bytes_plain"), total(self.metrics, "bytes_fedavg")
        return plain / fedavg if plain is not None and fedavg else None

    @cached_property
    def doubt(self) -> dict[str, float | None]:
        """The figures of `doubt_figures`."""
        return doubt_figures(self.metrics)

    @property
    def round_seconds(self) -> float | None:
        """The median over the rounds, because the first round includes the start of the clients."""
        known = [line.seconds for line in self.metrics if line.round > 0 and line.seconds is not None]
        return statistics.median(known) if known else None


def measured(run: ComparedRun, config: Mapping[str, Value]) -> Measured:
    """Read the rounds and the summary of a run, as far as they are written. `config`: as its comparison has it."""
    metrics = read_metrics(run.directory) if run.directory else []
    written = current_summary(run.directory) if run.directory else None
    summary = {**summarise(metrics, config), **(written or {})}
    return Measured(run, metrics, summary, changed=_changed(run, config))


def _changed(run: ComparedRun, config: Mapping[str, Value]) -> dict[str, Any]:
    own: Mapping[str, Any] = {}
    if run.directory is not None:
        with suppress(OSError, ValueError):  # its figures can be read all the same
            own = read_config(run.directory)
    both = (key for key in CHANGEABLE if key in own and key in config)
    # The comparison may have "5", as it was given, and the run 5.
    return {
        key: own[key] for key in both if own[key] != config[key] and value_text(own[key]) != value_text(config[key])
    }
