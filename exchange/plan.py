"""The plan that one client receives in one exchange, and its reply."""

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

# Options and metrics of a probe. The layers are the plan's groups `layer/0`, `layer/1`, …, from the input on.
PROBE_SCORE, PROBE_BATCHES, PROBE_TIMED = "probe.score", "probe.batches", "probe.timed"
"""Options: score of a layer (NO_SCORE: none), number of batches (0: all), whether the layers are timed."""
NO_SCORE = "none"
LAYER_SCORES, LAYER_MILLISECONDS = "layer-scores", "layer-milliseconds"
"""Vectors of the answer, one number for each layer."""
LAYER_BUDGET = "layer-budget"
"""Key of a node config, and the metric that reports it in an introduction and a probe."""

TEST_EXAMPLES = "test-examples"
"""Metric: the number of test examples, which is the weight of the scores on them."""
LABEL_COUNTS = "label-counts"
"""Metric of an introduction, a list: the number of the client's examples in each class."""

RATE = "learning-rate"
"""Key of the app's settings, which a node config may replace; the metric that reports the rate of such a client."""
RATE_FACTOR = "learning-rate-factor"
"""Key of the app's settings: the schedule's factor, by which their learning rate was multiplied; without it 1."""

SCORED_AS = "scored"
"""Option of an evaluation: prefix of the metrics' names, which says whose score it is; by default "received"."""
FINAL = "final"
"""Option of an evaluation: the scored model is the run's result."""

CONTROL: Tree = "control"
"""SCAFFOLD's control variate: down, that of the server; up, the change of the client's."""

SCAFFOLD, LOCAL, DITTO, PERFEDAVG, PFEDME, APFL = "scaffold", "local", "ditto", "perfedavg", "pfedme", "apfl"
"""Objectives of local training."""
ACCUMULATION = "accumulation"
"""Metric of local training: ‖a_i‖₁, the number of gradients that its steps amount to (FedNova)."""
KNOWN_METRICS = frozenset(
    {LAYER_SCORES, LAYER_MILLISECONDS, LAYER_BUDGET, TEST_EXAMPLES, LABEL_COUNTS, ACCUMULATION, RATE}
)
"""Metrics that the server computes with. A reply keeps them, however many other names a run has."""
PROXIMAL = "proximal"
"""Option: μ of (μ/2)·‖w − w_received‖² over the trained entries, which is added to the loss."""
LAMBDA, ALPHA, ADAPTIVE, DELTA, HESSIAN_FREE = "lambda", "alpha", "adaptive", "delta", "hessian-free"
INNER_STEPS, INNER_RATE, OUTER_STEP = "inner-steps", "inner-learning-rate", "outer-step"
"""Options of the objectives (`tepal.client_app.objectives`)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `client` must do in one exchange of a round.

    The first tree of `needs` is the app's model; the app receives further trees under their own names.
    """

    client: str
    round: int
    action: str = TRAIN
    needs: Mapping[Tree, Names]
    """Entries that the client must have before its app is called, by tree."""
    trains: Names = ()
    """Entries of the model that may change; all others must stay bit-identical in the app's answer."""
    returns: Mapping[Tree, Names] = field(default_factory=dict)
    """Entries that the reply carries, by tree."""
    keeps: Mapping[Tree, Names] = field(default_factory=dict)
    """Entries, of those needed, that the client should cache as received: later rounds need the same values."""
    remembers: Mapping[Tree, Tree] = field(default_factory=dict)
    """Tree of `returns` → tree as which the client should cache what it returned, which it may have to score."""
    exact: Names = ()
    """Entries that are sent down without encoding: they are frozen, so an error in them would stay."""
    groups: Mapping[str, Names] = field(default_factory=dict)
    """Named sets of entries for the app: the value projections of FedFrozen's ridge, or a model's layers."""
    objective: str = ""
    """Name of the objective of local training; "" for the app's own loss."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Scalars that the objective, `apply_plan` and the app itself read from `received(msg).plan`."""

    @property
    def model(self) -> Tree:
        """The tree that the app receives as its model."""
        return next(iter(self.needs))


@dataclass(frozen=True)
class Outgoing:
    """Everything that is sent to one client in one exchange."""

    plan: Plan
    values: Callable[[Tree], Arrays]
    """Tree → this client's values; called when they are packed, and again if they must be resent."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The app's config record."""
    node_id: int = 0
    """Flower's id of the client's node."""
    measured: bool = False
    """Whether the norm of the client's update is measured as its reply is read, and not estimated."""
    clients: int = 1
    """The number of clients of this exchange, which share a round's budget."""
    rounds_apart: float = 1.0
    """Rounds from one in which a client takes part to its next, in the mean."""
    averaged: float = 0.0
    """The fewest clients over which the server takes the mean of an entry that this one returns, weighted as so many
    with equal weights; 0: not only their mean is needed."""

    @property
    def name(self) -> str:
        """The client's name, or its node while the name is not known."""
        return self.plan.client or f"node {self.node_id}"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A client's answer, checked against its plan: right entries, shapes and dtypes, finite values, and a weight."""

    client: str
    parts: Mapping[Tree, Mapping[str, np.ndarray]]
    examples: int
    metrics: Mapping[str, float]
    vectors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Metrics that are lists of finite numbers: a number for each layer, for example."""
    not_finite: Names = ()
    """Names of the metrics that are left out of the two above, because they are NaN or infinite."""
    exchange: str = ""
    """Id of the answered exchange."""
    holds: Names = ()
    """Ids of the parts in the client's cache."""
    has_layout: bool = False
    """Whether the client has stored the model's layout."""
    notes: Names = ()
    """Problems that did not prevent the reply, in the client's words."""
    squares: Mapping[Tree, Mapping[str, float]] = field(default_factory=dict)
    """Squared norms of the client's update, by tree and entry: ‖x − s‖², where s is the value that was sent in the
    model, and 0 in other trees. Unless `Outgoing.measured`, those of large entries of the model are estimated."""
    value_squares: Mapping[str, float] = field(default_factory=dict)
    """‖x‖² of those floating-point entries of the model whose updates are estimated."""
    left_out: float | None = None
    """The share of the squared norm that an answer in `auto` leaves out, as its client measured it; None: unknown."""
    proof: str = ""
    """Of an introduction: digest of the client's secret; "" if it has none."""
