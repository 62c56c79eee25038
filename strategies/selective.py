"""Selective layer fine-tuning: each client trains the layers with the largest gradient norms (arXiv:2408.15600).

One round has two exchanges:

    probe   client i receives the parts of θ^t that are not in its cache, and returns one number a layer, ‖g_{i,l}‖²
    select  masks m_i ∈ {0,1}^L with cost·m_i ≤ R_i, by problem (P1) or one of the simpler rules
    train   client i trains its layers and the head, and returns only these; no entries are sent down
    merge   per layer, with the weights w_{i,l} = n_i / Σ_{j selected l} n_j   (eq. 7)

Layers are the transformer blocks, or the stages of a network without any. The head is always trained, in addition to
the budget. Embeddings, and entries that are neither in a layer nor in the head, are never trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, Unpack

import numpy as np
from pydantic import Field

from tepal.exchange.layout import Names
from tepal.exchange.plan import (
    INTRODUCE,
    LAYER_BUDGET,
    LAYER_MILLISECONDS,
    LAYER_SCORES,
    MODEL,
    NO_SCORE,
    PROBE,
    PROBE_BATCHES,
    PROBE_SCORE,
    PROBE_TIMED,
    TRAIN,
    Plan,
    Reply,
    Scalar,
)
from tepal.strategies.fedavg import ModelState
from tepal.strategies.layer_selection import choose, drawn_budget, relative_coupling
from tepal.strategies.method import MethodError, ModelBlocks, Run, ServerModel
from tepal.strategies.options import NonNegative, Positive, RoundOptions, listed
from tepal.strategies.partial import PartialAveraging
from tepal.strategies.rounds.strategy import MethodStrategy

LAYERS, BYTES, MILLISECONDS = "layers", "bytes", "milliseconds"
DRAWN = "drawn"

_BY_SCORE = ("gradient", "snr", "rgn")  # the other selections need no gradients


class SelectiveLayersMethod(PartialAveraging):
    """The method of selective layer fine-tuning. Arguments are those of `SelectiveLayers`."""

    phases = (PROBE, TRAIN)

    def __init__(
        self,
        budget: float | str = 1,
        *,
        coupling: float = 0.2,
        absolute_coupling: float = 0.0,
        fill: bool = False,
        distance: str = "hamming",
        selection: str = "gradient",
        costs: str = LAYERS,
        probe_batches: int = 1,
    ) -> None:
        if budget == DRAWN and costs != LAYERS:
            raise ValueError(f"drawn budgets are numbers of layers, and costs is {costs!r}; give one budget for all")
        self.budget = budget
        self.coupling = coupling
        self.absolute_coupling = absolute_coupling
        self.fill = fill
        self.distance = distance
        self.selection = selection
        self.costs = costs
        self.probe_batches = probe_batches
        self._blocks: ModelBlocks
        self._costs: np.ndarray | None
        self._run: Run

    def init(self, model: ServerModel, run: Run) -> ModelState:
        if model.blocks is None:
            raise MethodError(
                "SelectiveLayers must know the model's layers, and names alone do not tell: give it the model, "
                "SelectiveLayers(budget=..., model=model)."
            )
        self.check(model.blocks)
        self._blocks, self._run = model.blocks, run
        entries = model.layout.by_name
        sizes = [sum(entries[name].nbytes for name in layer) for layer in model.blocks.layers]
        self._costs = np.array(sizes, float) if self.costs == BYTES else None
        return super().init(model, run)

    def check(self, blocks: ModelBlocks) -> None:
        """Raise MethodError for a model without layers, or with which the budget is not possible."""
        if not blocks.layers:
            raise MethodError(f"SelectiveLayers chooses among a model's layers, and {blocks.model} has none")
        if not isinstance(self.budget, str):
            self._check_budget(self.budget, blocks)

    def _check_budget(self, budget: float, blocks: ModelBlocks) -> None:
        if self.costs == LAYERS:
            if not 1 <= budget <= len(blocks.layers) or budget != int(budget):
                raise MethodError(
                    f"a budget of {budget:g} layers: it must be a whole number from 1 to {len(blocks.layers)}, the "
                    f"layers of {blocks.model}"
                )
        elif not 0 < budget < float("inf"):
            raise MethodError(f"a budget of {budget:g} {self.costs}: it must be a positive number")

    def transfer_blocks(self, model: ServerModel) -> Mapping[str, Names]:
        assert model.blocks is not None
        blocks = {"embedding": model.blocks.embedding, **_layer_groups(model.blocks), "head": model.blocks.head}
        return {label: names for label, names in {**blocks, "rest": model.blocks.rest}.items() if names}

    def plan(
        self, state: ModelState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        groups = {**_layer_groups(self._blocks), "head": self._blocks.head}
        if phase == PROBE:
            options: dict[str, Scalar] = {
                PROBE_SCORE: self.selection if self.selection in _BY_SCORE else NO_SCORE,
                PROBE_BATCHES: self.probe_batches,
                PROBE_TIMED: self.costs == MILLISECONDS,
            }
            # The client keeps the model, so that the second message does not need to contain it.
            return [
                replace(p, action=PROBE, trains=(), returns={}, keeps=p.needs, groups=groups, options=options)
                for p in plans
            ]
        if not plans:
            return []
        trained = map(self._trained, self._choose([probe_replies[plan.client] for plan in plans]))
        return [
            replace(plan, trains=names, returns={MODEL: names}, keeps=plan.needs)
            for plan, names in zip(plans, trained, strict=True)
        ]

    def trained(self, state: ModelState) -> Names:
        return self._trained(np.ones(len(self._blocks.layers), bool))

    def _choose(self, probes: Sequence[Reply]) -> np.ndarray:
        """Masks of these clients, (n, L) bool."""
        scores = np.zeros((len(probes), len(self._blocks.layers)))
        if self.selection in _BY_SCORE:
            scores[:] = [probe.vectors[LAYER_SCORES] for probe in probes]
        costs = self._costs
        if self.costs == MILLISECONDS:
            costs = np.array([probe.vectors[LAYER_MILLISECONDS] for probe in probes])
        budgets = np.array([self._budget(probe) for probe in probes])
        coupling = self.absolute_coupling or relative_coupling(scores, self.coupling)
        return choose(
            self.selection, scores, budgets, coupling=coupling, distance=self.distance, costs=costs, fill=self.fill
        )

    def _budget(self, probe: Reply) -> float:
        """R_i: the budget that the client declares, otherwise the one for all, otherwise drawn by its name."""
        if LAYER_BUDGET in probe.metrics:
            return probe.metrics[LAYER_BUDGET]
        if isinstance(self.budget, str):
            return min(drawn_budget(self._run.seed, probe.client), len(self._blocks.layers))
        return self.budget

    def _trained(self, mask: np.ndarray) -> Names:
        """Entries of the layers of a mask (L,), and of the head."""
        layers = (layer for layer, chosen in zip(self._blocks.layers, mask, strict=True) if chosen)
        names = {name for layer in layers for name in layer}.union(self._blocks.head)
        return tuple(name for name in self._blocks.layout.names if name in names)

    def accept(self, plan: Plan, reply: Reply) -> None:
        if LAYER_BUDGET in reply.not_finite:
            raise ValueError(f"its node config declares, as {LAYER_BUDGET}, a number that is not finite")
        if plan.action in (INTRODUCE, PROBE) and LAYER_BUDGET in reply.metrics:
            try:
                self._check_budget(reply.metrics[LAYER_BUDGET], self._blocks)
            except MethodError as error:
                raise ValueError(f"its node config declares, as {LAYER_BUDGET}, {error}") from error
        if plan.action != PROBE:
            return
        layers = len(self._blocks.layers)
        allowed = {}
        if self.selection in _BY_SCORE:
            allowed[LAYER_SCORES] = 0.0, 1e100
        if self.costs == MILLISECONDS:
            allowed[LAYER_MILLISECONDS] = 1e-9, 1e12
        for name, (least, most) in allowed.items():
            values = reply.vectors.get(name, ())
            if len(values) != layers or not least <= min(values) <= max(values) <= most:
                found = "one that is not finite" if name in reply.not_finite else values or "none"
                raise ValueError(
                    f"its probe must have {layers} finite positive numbers as {name!r}, up to {most:g}, and has {found}"
                )

    def record(self, state: ModelState, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """`clients` (n,), and the `masks` (n, L) of the layers that they train."""
        masks = np.zeros((len(plans), len(self._blocks.layers)), bool)
        for mask, plan in zip(masks, plans, strict=True):
            trained = set(plan.trains)
            mask[:] = [trained.issuperset(layer) for layer in self._blocks.layers]
        return {"clients": np.array([plan.client for plan in plans], str), "masks": masks}

    def describe(self) -> Mapping[str, str | int | float]:
        by_lambda = self.absolute_coupling or not self.coupling
        return {
            "selection": self.selection,
            "budget": self.budget,
            "costs": self.costs,
            # In checkpoints of earlier versions the coupling is λ.
            **({"coupling": self.absolute_coupling} if by_lambda else {"relative coupling": self.coupling}),
            "fill": self.fill,
            "distance": self.distance,
            "probe batches": self.probe_batches or "all",
        }


@listed(
    "selective",
    title="Selective layers",
    does="each client trains the layers with the largest gradient norms",
    paper="arXiv:2408.15600",
    transfers="P down; one number a layer, then the selected layers and the head up",
)
class SelectiveLayers(MethodStrategy):
    """Selective layer fine-tuning over Tepal's exchange.

    A client can declare its own budget R_i in its node config, as `layer-budget`, which takes precedence over `budget`.
    The app replies to the probe in a function `@app.train("probe")` (`tepal.training.probing` computes the scores).

    Args:
        budget: R of every client: a number of layers, bytes or milliseconds (see `costs`).
        draw_budgets: each client has its own budget, from 1 to 4 layers, drawn by its name (in Python also:
            `budget="drawn"`).
        selection: rule by which a client's layers are selected: "gradient" (P1); each client's own scores "snr" or
            "rgn"; the position "top" (nearest the output), "bottom" or "both"; or "full", which trains every layer.
        coupling: the penalty for clients that select different layers, as a share (λ itself: `absolute_coupling`). A
            client trains a layer alone if its squared gradient norm is above this share of the largest one that is
            usual among the clients of the round. 0: each its own best layers. If budgets differ, a large share leaves
            some of them unused.
        absolute_coupling: above 0: λ of (P1) itself, in place of `coupling`. Its unit is that of the squared norms,
            which depend on the model, the data and the number of batches; the paper has 5 to 1000.
        fill: whether each client also trains, of what (P1) leaves of its budget, its layers with the next largest
            norms, as in the authors' code.
        distance: of two masks in (P1): "hamming", as in the authors' code, or "squared", as in the paper's text.
        costs: cost of a layer: 1 ("layers"), its "bytes", or the "milliseconds" that its client measured.
        probe_batches: batches over which a client's gradient is averaged; 0: all of them.
        round_options: see `MethodStrategy`. `model` is required: the names of entries do not show what a layer is.

    Raises:
        ValueError: an option out of range.
        MethodError: a budget that is not possible with the model, or a model without layers.
    """

    def __init__(
        self,
        *,
        budget: Positive | Literal["drawn"] = 1.0,
        draw_budgets: bool = False,
        selection: Literal["gradient", "snr", "rgn", "top", "bottom", "both", "full"] = "gradient",
        coupling: Annotated[float, Field(ge=0, le=5)] = 0.2,
        absolute_coupling: NonNegative = 0.0,
        fill: bool = False,
        distance: Literal["hamming", "squared"] = "hamming",
        costs: Literal["layers", "bytes", "milliseconds"] = "layers",
        probe_batches: Annotated[int, Field(ge=0)] = 1,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        method = SelectiveLayersMethod(
            DRAWN if draw_budgets else budget,
            coupling=coupling,
            absolute_coupling=absolute_coupling,
            fill=fill,
            distance=distance,
            selection=selection,
            costs=costs,
            probe_batches=probe_batches,
        )
        super().__init__(method, **round_options)
        if self.blocks is not None:
            method.check(self.blocks)


def _layer_groups(blocks: ModelBlocks) -> dict[str, Names]:
    """Groups "layer/0", "layer/1", … from the input to the output."""
    return {f"layer/{number}": layer for number, layer in enumerate(blocks.layers)}
