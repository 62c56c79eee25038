"""FedFrozen: query and key projections are frozen after a warm-up (arXiv:2605.06446).

Φ are the query and key projections (weights and biases) of all attention modules. θ are all other entries, which this
project calls the value block.

    rounds 1 … T_warm        FedAvg on (Φ, θ)
    rounds T_warm + 1 … T    Φ̄ = Φ after round T_warm is fixed; clients train θ; only θ is sent, both ways
    all rounds               local loss F_k + (λ/2)·‖W_V‖²_F, W_V: the weights of the value projections

Φ̄ is sent once to every client that does not have it in its cache (`partial.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import numpy as np
from pydantic import Field

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import Plan, Reply, Scalar
from tepal.exchange.threads import in_threads
from tepal.strategies.fedavg import ModelState
from tepal.strategies.method import MethodError, ModelBlocks, Run, ServerModel
from tepal.strategies.options import NonNegative, RoundOptions, listed
from tepal.strategies.partial import PartialAveraging
from tepal.strategies.rounds.strategy import MethodStrategy

if TYPE_CHECKING:
    from torch import nn

RIDGE = "ridge"
"""Option of a plan: λ of (λ/2)·‖W_V‖²_F, where W_V are the entries of the plan's group `value_projection`."""

_WARMUP = "warm-up rounds"  # in the method's description
_PIECE = 1 << 18  # elements of an entry that are processed together: they fit into a processor's cache


class NoAttentionError(MethodError):
    """A model in which no query and key projections are found was given to FedFrozen."""


def usual_warmup(rounds: int) -> int:
    """Return T_warm where none is given: three tenths of the rounds, and at least one of them."""
    return max(1, round(0.3 * rounds))


class FedFrozenMethod(PartialAveraging):
    """The method of FedFrozen: FedAvg until `warmup_rounds` merges, then FedAvg on the value block."""

    def __init__(self, warmup_rounds: int, ridge: float = 0.0) -> None:
        self.warmup_rounds = warmup_rounds
        self.ridge = ridge
        self._follows_rounds = warmup_rounds < 0
        self._blocks: ModelBlocks

    def begin(self, rounds: int) -> None:
        if self._follows_rounds:
            self.warmup_rounds = usual_warmup(rounds)

    def resumed(self, options: Mapping[str, Any]) -> None:
        """Keep the warm-up of the run that is resumed: what was frozen stays frozen if the run is prolonged."""
        if self._follows_rounds:
            self.warmup_rounds = options.get(_WARMUP, self.warmup_rounds)

    def init(self, model: ServerModel, run: Run) -> ModelState:
        self._blocks = attention_blocks(model, self.ridge)
        return super().init(model, run)

    def transfer_blocks(self, model: ServerModel) -> Mapping[str, Names]:
        blocks = attention_blocks(model, self.ridge)
        return {"query_key": blocks.query_key, "value": blocks.value}

    def frozen(self, state: ModelState) -> bool:
        """Whether the warm-up is over."""
        return state.merges >= self.warmup_rounds

    def trained(self, state: ModelState) -> Names:
        return self._blocks.value if self.frozen(state) else tuple(state.entries)

    def options(self) -> Mapping[str, Scalar]:
        return {RIDGE: self.ridge} if self.ridge else {}

    def plan(
        self, state: ModelState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        groups = {"value_projection": self._blocks.value_projection} if self.ridge else {}
        return [replace(plan, groups=groups) for plan in plans]

    def change(self, before: ModelState, after: ModelState) -> Mapping[str, np.ndarray]:
        """Relative change of the blocks in a round, `query_key_drift` and `value_drift`: ‖w^{t+1} − w^t‖ / ‖w^t‖."""
        blocks = {"query_key_drift": self._blocks.query_key, "value_drift": self._blocks.value}
        return {key: np.array(_drift(before.entries, after.entries, names)) for key, names in blocks.items()}

    def phase_name(self, state: ModelState) -> str:
        return "frozen" if self.frozen(state) else "warm-up"

    def describe(self) -> Mapping[str, str | int | float]:
        return {_WARMUP: self.warmup_rounds, "ridge": self.ridge}


@listed(
    "fedfrozen",
    title="FedFrozen",
    does="query and key projections are frozen after a warm-up",
    paper="arXiv:2605.06446",
    transfers="P each way in the warm-up; then P − Φ each way, and Φ down once (Φ: query and key projections)",
)
class FedFrozen(MethodStrategy):
    """FedFrozen over Tepal's exchange.

    Args:
        warmup_rounds: T_warm, rounds before query and key projections are frozen. 0: they are never trained. The
            number of rounds or more: FedAvg. -1: three tenths of the rounds; a run that is resumed keeps its number.
        ridge: λ of (λ/2)·‖W_V‖²_F on the weights of the value projections, added by the clients' training function.
        round_options: see `MethodStrategy`. `model` is required: the names of entries do not show which are query and
            key projections.

    Raises:
        ValueError: an option out of range.
        NoAttentionError: no query and key projections are found in the model.
    """

    def __init__(
        self,
        *,
        warmup_rounds: Annotated[int, Field(ge=-1)] = -1,
        ridge: NonNegative = 0.0,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(FedFrozenMethod(warmup_rounds, ridge), **round_options)
        if self.blocks is not None:
            _require_attention(self.blocks, ridge)


def _drift(before: Arrays, after: Arrays, names: Names) -> float:
    """‖after − before‖ / ‖before‖ over these entries; 0 if they are equal, infinite if only ‖before‖ is 0."""

    def squares(name: str) -> tuple[float, float]:
        old, new = before[name].reshape(-1), after[name].reshape(-1)
        change = norm = 0.0
        for start in range(0, old.size, _PIECE):
            piece = old[start : start + _PIECE].astype(np.float32, copy=False)
            norm += float(np.dot(piece, piece))
            if after[name] is not before[name]:
                step = new[start : start + _PIECE].astype(np.float32, copy=False) - piece
                change += float(np.dot(step, step))
        return change, norm

    floating = [name for name in names if before[name].dtype.kind == "f"]  # not a counter
    found = in_threads(squares, floating, sum(before[name].nbytes for name in floating))
    change, norm = (math.sqrt(sum(each)) for each in zip(*found, strict=True)) if found else (0.0, 0.0)
    return change / norm if norm else math.inf if change else 0.0


def attention_blocks(model: ServerModel, ridge: float) -> ModelBlocks:
    """Blocks of a model with query and key projections, and with a ridge value projections.

    Raises NoAttentionError for any other model.
    """
    if model.blocks is None:
        raise NoAttentionError(
            "FedFrozen must know which entries are query and key projections, and their names alone do not show it: "
            "give it the model, FedFrozen(warmup_rounds=..., model=model)."
        )
    _require_attention(model.blocks, ridge)
    return model.blocks


def _require_attention(blocks: ModelBlocks, ridge: float = 0.0) -> None:
    if not blocks.query_key:
        raise NoAttentionError(
            f"FedFrozen freezes query and key projections, and {blocks.model} has none. "
            "Choose a model with attention, or the strategy FedAvg."
        )
    if ridge and not blocks.value_projection:
        raise NoAttentionError(
            f"ridge is {ridge:g}, which applies to value projections, and {blocks.model} has none that are known: name "
            "them with find_blocks(model, query_key=[...], value_projection=[...]), or leave ridge out."
        )


def cost_ratio(model: nn.Module, warmup_rounds: int, rounds: int, *, downlink: bool = False) -> float:
    """Communication of FedFrozen relative to FedAvg, from numbers of parameters (the paper's cost table).

    With φ = |Φ| / |unique parameters|, one round of FedAvg costs 1 up and 1 down, a frozen round 1 − φ each, and Φ̄
    is sent down once more.

    Args:
        model: torch module, which may be on the meta device.
        warmup_rounds: T_warm, 0 … rounds.
        rounds: T, at least 1.
        downlink: count both directions instead of the uplink alone.

    Raises:
        NoAttentionError: the model has no query and key projections.
        ValueError: round numbers out of range.
    """
    from tepal.models.blocks import find_blocks

    if not (rounds >= 1 and 0 <= warmup_rounds <= rounds):
        raise ValueError(
            f"warmup_rounds is {warmup_rounds} and rounds is {rounds}; there must be at least one round, and 0 to "
            f"{rounds} of them may be warm-up rounds"
        )
    blocks = find_blocks(model)
    _require_attention(blocks)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    phi = sum(blocks.layout.by_name[name].size for name in blocks.query_key) / parameters
    uplink = rounds - (rounds - warmup_rounds) * phi
    if not downlink:
        return uplink / rounds
    once = phi if warmup_rounds < rounds else 0.0
    return (2 * uplink + once) / (2 * rounds)
