"""What one client is asked in one exchange, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tepal.exchange.layout import Arrays, Names

Tree = str
"""A named set of entries. All trees of a run share one layout: "model", "mode/3", "control"."""

MODEL: Tree = "model"

Scalar = str | int | float | bool

TRAIN, EVALUATE, INTRODUCE, PROBE = "train", "evaluate", "introduce", "probe"

# What a probe asks and what is answered. The layers are the plan's groups `layer/0`, `layer/1`, …, from the input on.
PROBE_SCORE, PROBE_BATCHES, PROBE_TIMED = "probe.score", "probe.batches", "probe.timed"
"""Options: which score of a layer (NO_SCORE: none), over how many batches (0: all), whether the layers are timed."""
NO_SCORE = "none"
LAYER_SCORES, LAYER_MILLISECONDS = "layer-scores", "layer-milliseconds"
"""Vectors of the answer, one number a layer."""
LAYER_BUDGET = "layer-budget"
"""Key of a node config, and the metric with which a client declares its budget in an introduction and a probe."""

LABEL_COUNTS = "label-counts"
"""The metric, a list, with which a client tells in an introduction how many of its examples each class has."""

SCORED_AS = "scored"
"""Option of an evaluation: whose score it is, as in the names of the metrics; "received" where it is not said."""
FINAL = "final"
"""Option of an evaluation: what is scored is the run's result."""


CONTROL: Tree = "control"
"""SCAFFOLD's control variate: of the server on its way down, its change at the client on its way up."""

SCAFFOLD, LOCAL, DITTO, PERFEDAVG, PFEDME, APFL = "scaffold", "local", "ditto", "perfedavg", "pfedme", "apfl"
"""Objectives of local training."""
ACCUMULATION = "accumulation"
"""Metric of local training: ‖a_i‖₁, how many gradients its way comes to (FedNova; `accumulation` in the client)."""
PROXIMAL = "proximal"
"""Option: μ of (μ/2)·‖w − w_received‖² over the trained entries, which is added to the loss."""
LAMBDA, ALPHA, ADAPTIVE, DELTA, HESSIAN_FREE = "lambda", "alpha", "adaptive", "delta", "hessian-free"
INNER_STEPS, INNER_RATE = "inner-steps", "inner-learning-rate"
"""Options of the objectives; see there."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `client` is asked in one exchange of a round.

    The first tree of `needs` is the model that the app gets; further trees are given to it under their own names.
    """

    client: str
    round: int
    action: str = TRAIN
    needs: Mapping[Tree, Names]
    """Entries that the client must have before its app is called, by tree."""
    trains: Names = ()
    """Entries of the model that may change; all others must come back bit-identical, if they come back."""
    returns: Mapping[Tree, Names] = field(default_factory=dict)
    """Entries that the reply carries, by tree."""
    keeps: Mapping[Tree, Names] = field(default_factory=dict)
    """Entries, of those needed, that the client should keep as received: later rounds need the same values."""
    remembers: Mapping[Tree, Tree] = field(default_factory=dict)
    """Tree of `returns` → tree as which the client should keep what it returned: it may be asked to score it."""
    exact: Names = ()
    """Entries that go down as they are, whatever the encoding: they are frozen, so an error in them would stay."""
    groups: Mapping[str, Names] = field(default_factory=dict)
    """Named sets of entries that the app must know: the value projections of FedFrozen's ridge, a model's layers."""
    objective: str = ""
    """What local training minimises, where it is not the app's own loss: a name that the app knows it by."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Scalars for the app: what the objective, `apply_plan` and the app itself read in `received(msg).plan`."""

    @property
    def model(self) -> Tree:
        """The tree that is handed to the app as its model."""
        return next(iter(self.needs))


@dataclass(frozen=True)
class Outgoing:
    """All that goes to one client in one exchange."""

    plan: Plan
    values: Callable[[Tree], Arrays]
    """Tree → the values that this client gets; called when they are packed, and again when they must be resent."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The app's config record."""
    node_id: int = 0
    """Flower's id of the node on which the client runs."""

    @property
    def name(self) -> str:
        """The client, or its node where the client is not known yet."""
        return self.plan.client or f"node {self.node_id}"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a client answered, checked against its plan: right entries, shapes and dtypes, finite, with a weight."""

    client: str
    parts: Mapping[Tree, Mapping[str, np.ndarray]]
    examples: int
    metrics: Mapping[str, float]
    vectors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Metrics that are lists of numbers, all finite: a number for each layer, for example."""
    not_finite: Names = ()
    """Names of metrics that are not in the two above, because they are NaN or infinite."""
    exchange: str = ""
    """Id of the exchange that it answers."""
    holds: Names = ()
    """Ids of the parts that the client now keeps."""
    notes: Names = ()
    """What went wrong on the way to it, in the client's words."""
