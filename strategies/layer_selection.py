"""Which layers each client trains: problem (P1) of selective layer fine-tuning (arXiv:2408.15600), and its rivals.

    (P1)  max  Σ_i Σ_l m_il·‖g_il‖² − (λ/2)·Σ_i Σ_{j≠i} dist(m_i, m_j)     such that  Σ_l cost_il·m_il ≤ R_i

n clients, L layers (0 is next to the input), m a 0/1 mask per client, g_il the gradient of client i in layer l, R_i the
client's budget. The paper prints dist = ‖m_i − m_j‖₁² ("squared"), its authors' code has ‖m_i − m_j‖₁ ("hamming").

The penalty rewards agreement, so (P1) has many local optima: clients that agree on a layer do not leave it one by one.
The fast solver therefore starts from many degrees of consensus, improves row by row (a client against all others), and
then layer by layer: every client that may exchange layer b for layer a is free to, and the best group of them does it
at once. The exact solver is a mixed-integer program, the reference that the fast one is tested against.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

DISTANCES = ("hamming", "squared")
SOLVERS = ("auto", "exact", "fast")
SELECTIONS = ("gradient", "snr", "rgn", "top", "bottom", "both", "full")

_EXACT_UP_TO = 160  # variables of the program, clients²·layers/2: there it takes a few milliseconds
_LIKE = 1e4  # largest over smallest client's norm up to which the program's tolerance does no harm
_SECONDS, _CUTS = 2.0, 20  # of one solution of the program, and how often a set that is over budget is forbidden
_STARTS = 9  # degrees of consensus, evenly spread when the budgets allow more
_LEADERS = 12  # clients whose own best layers are tried as everybody's
_OTHER_COUPLINGS = (0.5, 2.0)  # factors of λ under which the best result is moved
_POLISHED = 2  # the best results of the row ascent go on to exchanges of layers
_NODES = 1000  # of one knapsack by branch and bound; mostly it takes some ten
_FRONT = 4096  # states of one knapsack; far more than up to 100 layers with real costs need
_GAIN = 1e-11  # what a step must add, relative to the largest squared norm: rounding alone does not


def objective(masks: ArrayLike, squared_norms: ArrayLike, coupling: float, *, distance: str = "hamming") -> float:
    """The value of (P1), in units of the squared norms.

    Args:
        masks: (n, L) bool, the layers of each client.
        squared_norms: (n, L), ‖g_il‖².
        coupling: λ ≥ 0.
        distance: "hamming" or "squared".

    Raises:
        ValueError: norms or coupling out of range, an unknown distance, masks of another shape than the norms.
    """
    norms = _checked_scores(squared_norms, "squared_norms")
    _check_options(coupling, distance)
    chosen = np.asarray(masks, dtype=bool)
    if chosen.shape != norms.shape:
        raise ValueError(f"masks have shape {chosen.shape}; it must be that of squared_norms, {norms.shape}")
    return float(norms[chosen].sum()) - coupling * _pair_sum(chosen, distance)


def select_layers(
    squared_norms: ArrayLike,
    budgets: ArrayLike,
    coupling: float,
    *,
    distance: str = "hamming",
    costs: ArrayLike | None = None,
    solver: str = "auto",
) -> Mask:
    """Solve (P1) (arXiv:2408.15600): the layers that each client trains.

    λ = 0 is each client's own best layers; λ → ∞ with equal budgets is the best layers of the summed squared norms for
    everybody. Of equally good layers of one client the one nearer the output wins. Masks are not filled up: a layer
    that adds nothing to the objective is left out, except for λ = 0 with unit costs, which is each client's top R_i.
    The result is a function of the clients' values: their order changes the order of the masks only.

    Args:
        squared_norms: (n, L), ‖g_il‖² ≥ 0.
        budgets: (n,), R_i, in layers, or in the unit of `costs`.
        coupling: λ ≥ 0, in units of the squared norms. Without any other client it has no effect.
        distance: "hamming" or "squared".
        costs: of a layer, for all clients (L,) or for each (n, L), in bytes or milliseconds, say; None: 1 per layer.
            No mask costs more than its budget, not even by rounding. A budget below every cost gives an empty mask.
        solver: "exact", a mixed-integer program, for small cases whose clients have norms of like size (it tolerates
            about 1e-6 of the largest); "fast", a local search; "auto", exact where that takes a few milliseconds and
            is exact, and else fast.

    Returns:
        (n, L) bool.

    Raises:
        ValueError: arrays of the wrong shape or out of range, an unknown distance or solver.
        TimeoutError: of "exact", costs and budgets that are too close for it.
    """
    norms = _checked_scores(squared_norms, "squared_norms")
    _check_options(coupling, distance)
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; it must be one of {', '.join(SOLVERS)}")
    limits, prices = _checked_budgets(budgets, costs, norms.shape)
    if coupling == 0 or len(norms) <= 1:
        return _own_best(norms, limits, prices, fill=costs is None)
    # In an order that the values give, every tie is broken the same way however the clients were listed.
    order = np.lexsort(np.column_stack((norms, limits, prices)).T)
    problem = _problem(norms[order], limits[order], prices[order], coupling, distance)
    masks = np.empty(norms.shape, dtype=bool)
    if solver == "exact":
        masks[order] = _exact(problem)[0]
    elif solver == "auto" and _suits_exact(problem):
        try:
            masks[order] = _exact(problem, _SECONDS)[0]
        except TimeoutError:  # costs and budgets that differ by less than the program sees
            masks[order] = _fast(problem)
    else:
        masks[order] = _fast(problem)
    return masks


def choose(
    selection: str,
    scores: ArrayLike,
    budgets: ArrayLike,
    *,
    coupling: float = 0.0,
    distance: str = "hamming",
    costs: ArrayLike | None = None,
) -> Mask:
    """The layers that each client trains, by any of `SELECTIONS`.

    Args:
        selection: "gradient": `select_layers` on the squared norms. "snr", "rgn": each client's own best scores
            within its budget. "top": layers from the output inwards, "bottom": from the input outwards, "both":
            bottom, top, bottom + 1, top − 1, …, each of them until the first layer that the budget does not hold.
            "full": all layers, whatever the budget.
        scores: (n, L), ≥ 0: squared gradient norms, signal-to-noise ratios, or relative gradient norms. Only their
            shape matters to "top", "bottom", "both" and "full".
        budgets, costs: as in `select_layers`; "full" does not look at them.
        coupling, distance: of "gradient".

    Returns:
        (n, L) bool.

    Raises:
        ValueError: an unknown selection, or what `select_layers` raises.
    """
    if selection not in SELECTIONS:
        raise ValueError(f"selection is {selection!r}; it must be one of {', '.join(SELECTIONS)}")
    if selection == "gradient":
        return select_layers(scores, budgets, coupling, distance=distance, costs=costs)
    if selection in ("snr", "rgn"):
        return select_layers(scores, budgets, 0.0, costs=costs)
    shape = _checked_shape(np.asarray(scores), "scores")
    if selection == "full":
        return np.ones(shape, dtype=bool)
    limits, prices = _checked_budgets(budgets, costs, shape)
    layers = range(shape[1])
    inwards = [layer for pair in zip(layers, reversed(layers), strict=True) for layer in pair][: shape[1]]
    order = {"top": layers[::-1], "bottom": layers, "both": inwards}[selection]
    masks = np.zeros(shape, dtype=bool)
    for mask, limit, price in zip(masks, limits, prices, strict=True):
        for layer in order:
            mask[layer] = True
            if not _fits(price[mask], limit):
                mask[layer] = False
                break
    return masks


def drawn_budget(seed: int, client: str) -> int:
    """A client's budget when nobody set one: 1 to 4 layers, the heterogeneous budgets of arXiv:2408.15600.

    A normal variable of mean 1 and deviation 1, conditioned on [1, 4], rounded to the nearest integer: shares of
    .384, .485, .122 and .010. It depends on the seed and the client's name alone, not on the round, the platform or
    the other clients.
    """
    digest = hashlib.sha256(f"layer budget\n{seed}\n{client}".encode()).digest()
    state = np.random.SeedSequence(int.from_bytes(digest)).generate_state(1, np.uint64)
    uniform = int(state[0]) / 2**64
    # P(1 ≤ x ≤ b) = erf((b − 1)/√2)/2; the draw rounds to the first r for which P(1 ≤ x ≤ r + ½) exceeds it.
    within = math.erf(3 / math.sqrt(2))
    return next((r for r in (1, 2, 3) if uniform * within < math.erf((r - 0.5) / math.sqrt(2))), 4)


# What is checked ------------------------------------------------------------------------------------------------------


def _checked_shape(array: NDArray[np.generic], name: str) -> tuple[int, int]:
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} have shape {array.shape}; it must be (clients, layers), at least one of each")
    return array.shape[0], array.shape[1]


def _checked_scores(scores: ArrayLike, name: str) -> Floats:
    array = np.asarray(scores, dtype=np.float64)
    _checked_shape(array, name)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        client, layer = np.argwhere(wrong)[0]
        raise ValueError(
            f"{name}[{client}, {layer}] is {array[client, layer]} (client {client}, layer {layer}); "
            "it must be 0 or a positive, finite number"
        )
    return array


def _check_options(coupling: float, distance: str) -> None:
    if not 0 <= coupling < math.inf:
        raise ValueError(f"coupling is {coupling}; it must be 0 or a positive, finite number")
    if distance not in DISTANCES:
        raise ValueError(f"distance is {distance!r}; it must be one of {', '.join(DISTANCES)}")


def _checked_budgets(budgets: ArrayLike, costs: ArrayLike | None, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Budgets (n,) and costs (n, L)."""
    clients, layers = shape
    limits = np.asarray(budgets, dtype=np.float64)
    if limits.shape != (clients,):
        raise ValueError(f"budgets have shape {limits.shape}; it must be ({clients},), one budget for each client")
    for client, limit in enumerate(limits.tolist()):
        if costs is None and not 1 <= limit <= layers:
            raise ValueError(f"budget {limit:g} of client {client}: it must be between 1 and {layers} layers")
        if not limit > 0:
            raise ValueError(f"budget {limit:g} of client {client}: it must be positive")
    if costs is None:
        return np.floor(limits), np.ones((clients, layers))
    prices = np.asarray(costs, dtype=np.float64)
    if prices.shape not in ((layers,), (clients, layers)):
        raise ValueError(f"costs have shape {prices.shape}; it must be ({layers},) or ({clients}, {layers})")
    wrong = prices[~((prices > 0) & np.isfinite(prices))]
    if wrong.size:
        raise ValueError(f"costs contain {wrong[0]:g}; every cost must be positive and finite")
    return limits, np.array(np.broadcast_to(prices, (clients, layers)))


def _fits(prices: Floats, limit: float) -> bool:
    # fsum rounds the exact sum once, and rounding keeps its sign: no cost over the budget is rounded away.
    return limit == math.inf or math.fsum((*prices.tolist(), -limit)) <= 0


# The problem in the solvers' units ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """(P1) with squared norms of at most 1 and whole-number costs, so that sums of costs are exact."""

    gains: Floats  # (n, L)
    costs: Ints  # (n, L)
    budgets: Ints  # (n,)
    unit: Mask  # (n,): all costs of this client are 1
    coupling: float
    distance: str

    @property
    def clients(self) -> int:
        return len(self.gains)

    @property
    def layers(self) -> int:
        return int(self.gains.shape[1])

    def value(self, masks: Mask) -> float:
        return float(self.gains[masks].sum()) - self.coupling * _pair_sum(masks, self.distance)

    def slack(self, masks: Mask) -> Ints:
        left: Ints = self.budgets - (self.costs * masks).sum(axis=1)
        return left


def _problem(norms: Floats, limits: Floats, prices: Floats, coupling: float, distance: str) -> _Problem:
    scale = float(norms.max()) or 1.0
    gains = norms / scale
    costs = np.ones(norms.shape, dtype=np.int64)
    budgets = np.empty(len(norms), dtype=np.int64)
    for i, (price, limit) in enumerate(zip(prices, limits.tolist(), strict=True)):
        costs[i], budgets[i] = _whole_costs(price, limit)
    # One pair that differs in one layer then costs more than all norms together, so that nobody differs. A larger λ
    # changes nothing but the rounding errors.
    strongest = 2.0 * gains.size
    return _Problem(gains, costs, budgets, (costs == 1).all(axis=1), min(coupling / scale, strongest), distance)


def _whole_costs(price: Floats, limit: float) -> tuple[Ints, int]:
    """Costs and budget of one client as whole numbers: costs rounded up, the budget down, by less than 1 in 2^50."""
    layers = len(price)
    if _fits(price, limit):
        return np.ones(layers, dtype=np.int64), layers
    if (price == price[0]).all():
        return np.ones(layers, dtype=np.int64), int(Fraction(limit) // Fraction(float(price[0])))
    # A power of two scales without rounding, and L + 1 times the budget stays below 2^63.
    exponent = 62 - (layers + 1).bit_length() - math.frexp(limit)[1]
    budget = math.floor(Fraction(limit) * Fraction(2) ** exponent)
    whole = [min(math.ceil(Fraction(cost) * Fraction(2) ** exponent), budget + 1) for cost in price.tolist()]
    return np.array(whole, dtype=np.int64), budget


def _distances(masks: Mask) -> Floats:
    """(n, n): in how many layers two clients differ."""
    signs = 1.0 - 2.0 * masks
    # Products of whole numbers are exact in float64, and much faster there than in integers.
    different: Floats = (masks.shape[1] - signs @ signs.T) / 2
    return different


def _pair_sum(masks: Mask, distance: str) -> float:
    """Σ_{i<j} dist(m_i, m_j)."""
    if distance == "hamming":
        having = masks.sum(axis=0)
        return float((having * (len(masks) - having)).sum())
    return float((_distances(masks) ** 2).sum()) / 2


# One client -----------------------------------------------------------------------------------------------------------


def _own_best(norms: Floats, limits: Floats, prices: Floats, *, fill: bool) -> Mask:
    problem = _problem(norms, limits, prices, 0.0, "hamming")
    # `fill` makes a norm of 0 worth taking, after all others.
    gains = np.maximum(problem.gains, np.finfo(np.float64).tiny) if fill else problem.gains
    return _rows(problem, gains, problem.budgets)


def _best_row(gains: Floats, costs: Ints, budget: int, unit: bool) -> Mask:
    """(L,) bool: the layers of the largest sum of gains within the budget; ties go to the layer nearer the output."""
    row = gains > 0
    if unit:
        if np.count_nonzero(row) > budget:
            last_first = np.argsort(-gains[::-1], kind="stable")[:budget]
            row = np.zeros(len(gains), dtype=bool)
            row[len(gains) - 1 - last_first] = True
        return row
    row &= costs <= budget
    return row if costs[row].sum() <= budget else _knapsack(gains, costs, budget, row)


def _knapsack(gains: Floats, costs: Ints, budget: int, among: Mask) -> Mask:
    """(L,) bool: the best of the layers `among`, which do not all fit: branch and bound over gain per cost."""
    layers = np.flatnonzero(among)[::-1]
    layers = layers[np.argsort(-gains[layers] / costs[layers], kind="stable")]
    sizes, worths = costs[layers].tolist(), gains[layers].tolist()
    row = np.zeros(len(gains), dtype=bool)
    best, best_taken = -1.0, 0
    open_nodes = [(0, budget, 0.0, 0)]  # decided layers, what is left of the budget, gain, bits of the layers taken
    for _ in range(_NODES):
        if not open_nodes:
            row[[layer for k, layer in enumerate(layers.tolist()) if best_taken >> k & 1]] = True
            return row
        k, left, gain, taken = open_nodes.pop()
        without = []
        while k < len(sizes) and sizes[k] <= left:
            without.append((k + 1, left, gain, taken))
            left, gain, taken, k = left - sizes[k], gain + worths[k], taken | 1 << k, k + 1
        if gain > best:
            best, best_taken = gain, taken
        # All others leave out one of these layers, or the first that does not fit: at best, a cut of it would.
        if k < len(sizes) and gain + left * (worths[k] / sizes[k]) > best * (1 + 1e-13):
            open_nodes += [*without, (k + 1, left, gain, taken)]
    row[layers[_front(costs[layers], gains[layers], budget)]] = True
    return row


def _front(sizes: Ints, worths: Floats, budget: int) -> Mask:
    """The knapsack where layers of nearly equal gain or cost make branches hard to tell apart; sorted as there.

    The front of (cost, gain) that no other choice beats in both grows layer by layer; what cannot reach the best
    complete choice any more, even if the rest could be cut to fill the budget, is dropped.
    """
    layers = range(len(sizes))
    total_cost, total_gain = np.append(0, np.cumsum(sizes)), np.append(0.0, np.cumsum(worths))
    spent, gained = np.zeros(1, dtype=np.int64), np.zeros(1)
    taken = np.zeros((1, len(layers)), dtype=bool)
    for k in range(len(layers)):
        fits = np.flatnonzero(spent + sizes[k] <= budget)
        more = taken[fits]
        more[:, k] = True
        spent = np.concatenate((spent[fits] + sizes[k], spent))
        gained = np.concatenate((gained[fits] + worths[k], gained))
        taken = np.concatenate((more, taken))
        # The rest comes in the order of gain per cost: a cut filling of what is left is an upper bound, and the
        # layers before the cut are a choice that is feasible.
        reach = total_cost[k + 1] + budget - spent
        cut = np.searchsorted(total_cost, reach, side="right") - 1
        full = gained + total_gain[cut] - total_gain[k + 1]
        over = np.minimum(cut, len(layers) - 1)
        bound = full + np.where(cut < len(layers), (reach - total_cost[cut]) * (worths[over] / sizes[over]), 0.0)
        alive = np.flatnonzero(bound >= full.max() * (1 - 1e-13))
        order = alive[np.lexsort((-gained[alive], spent[alive]))]
        best_before = np.maximum.accumulate(np.append(-1.0, gained[order][:-1]))
        order = order[gained[order] > best_before]
        if len(order) > _FRONT:
            order = order[np.sort(np.argsort(-bound[order], kind="stable")[:_FRONT])]
        spent, gained, taken = spent[order], gained[order], taken[order]
    best: Mask = taken[np.argmax(gained)]
    return best


# The fast solver ------------------------------------------------------------------------------------------------------


def _fast(problem: _Problem) -> Mask:
    ascend = _ascend_squared if problem.distance == "squared" else _ascend_hamming
    found: dict[bytes, tuple[float, Mask]] = {}
    for start in {masks.tobytes(): masks for masks in _starts(problem)}.values():
        ascend(problem, start)
        found.setdefault(start.tobytes(), (problem.value(start), start))
    best = sorted(found.values(), key=lambda item: -item[0])[:_POLISHED]
    top = max((_polished(problem, masks) for _, masks in best), key=problem.value)
    for factor in _OTHER_COUPLINGS:
        # The optimum of a somewhat different problem is a start, too, and often from another valley.
        moved = _polished(replace(problem, coupling=factor * problem.coupling), top)
        top = max(top, _polished(problem, moved), key=problem.value)
    return top


def _polished(problem: _Problem, masks: Mask) -> Mask:
    """A copy of the masks that neither a row nor an exchange of two layers improves."""
    ascend = _ascend_squared if problem.distance == "squared" else _ascend_hamming
    masks = masks.copy()
    ascend(problem, masks)
    while _exchange_layers(problem, masks) and ascend(problem, masks):
        pass
    return masks


def _starts(problem: _Problem) -> Iterator[Mask]:
    """Consensus on t layers, with and without each client's own best of the rest, and on one client's best layers."""
    summed = problem.gains.sum(axis=0)
    consensus = (problem.layers - 1 - np.argsort(-summed[::-1], kind="stable")).tolist()
    # How many layers the largest budget holds, which for unit costs is that budget.
    cumulated = np.cumsum(np.sort(problem.costs, axis=1), axis=1)
    most = int((cumulated <= problem.budgets[:, None]).sum(axis=1).max())
    for t in _spread(most + 1, _STARTS):
        alone = np.zeros(problem.gains.shape, dtype=bool)
        left = problem.budgets.copy()
        for layer in consensus[:t]:
            alone[:, layer] = problem.costs[:, layer] <= left
            left -= problem.costs[:, layer] * alone[:, layer]
        yield alone | _rows(problem, np.where(alone, 0.0, problem.gains), left)
        yield alone
    everybody = np.broadcast_to(summed, problem.gains.shape)
    leaders = _rows(problem, problem.gains, problem.budgets)
    if not problem.unit.all():  # else these are among the consensus on t layers
        leaders = np.concatenate((leaders, _rows(problem, everybody, problem.budgets)))
    leaders = np.unique(leaders, axis=0)
    for k in _spread(len(leaders), _LEADERS):
        yield _rows(problem, everybody * leaders[k], problem.budgets)


def _spread(count: int, at_most: int) -> list[int]:
    """0 … count − 1, or as many of these numbers as are wanted, evenly spread."""
    return sorted({round(k) for k in np.linspace(0, count - 1, min(count, at_most)).tolist()})


def _rows(problem: _Problem, gains: Floats, budgets: Ints) -> Mask:
    """(n, L) bool: for each client by itself, the layers of the largest sum of gains (n, L) within the budget."""
    limits, units = budgets.tolist(), problem.unit.tolist()
    rows = zip(gains, problem.costs, limits, units, strict=True)
    return np.array([_best_row(*row) for row in rows])


def _ascend_hamming(problem: _Problem, masks: Mask) -> bool:
    """Each client's best row given the others, in place, until nobody gains. Returns whether anything changed."""
    others = problem.clients - 1
    having = masks.sum(axis=0)
    changed, still, i = False, 0, 0
    while still < problem.clients:
        # A layer that k of the n − 1 others have agrees with k and differs from n − 1 − k.
        row = masks[i]
        gains = problem.gains[i] + problem.coupling * (2 * (having - row) - others)
        best = _best_row(gains, problem.costs[i], int(problem.budgets[i]), bool(problem.unit[i]))
        still += 1
        if (best != row).any() and gains[best].sum() - gains[row].sum() > _GAIN:
            having += best.astype(np.int64) - row
            masks[i] = best
            changed, still = True, 1
        i = (i + 1) % problem.clients
    return changed


def _ascend_squared(problem: _Problem, masks: Mask) -> bool:
    """As `_ascend_hamming`, but a row is improved by changing one or two layers at a time: it is not separable."""
    signs = 1.0 - 2.0 * masks
    gram = signs.T @ signs
    clients, layers = masks.shape
    slack = problem.slack(masks)
    changed, still, i = False, 0, 0
    while still < clients:
        sign = signs[i]
        # Changing layer a moves the distance to client j by s_ja = ±1. The square then grows by 2·d_j·s_ja + 1, and
        # with layer b, too, by 2·s_ja·s_jb more.
        apart = (layers - signs @ sign) / 2
        one = problem.gains[i] * sign - problem.coupling * (2 * sign * (apart @ signs) + clients - 1)
        two = one[:, None] + one - 2 * problem.coupling * (sign[:, None] * gram * sign - 1)
        two.flat[:: layers + 1] = one
        price = problem.costs[i] * sign.astype(np.int64)
        prices = price[:, None] + price
        prices.flat[:: layers + 1] = price
        two[prices > slack[i]] = -np.inf
        flat = int(two.argmax())
        still += 1
        if two.flat[flat] > _GAIN:
            gram -= np.outer(sign, sign)
            a, b = divmod(flat, layers)
            slack[i] -= prices[a, b]
            for layer in {a, b}:
                masks[i, layer] ^= True
                sign[layer] *= -1
            gram += np.outer(sign, sign)
            changed, still = True, 0
            continue  # the same client again, until nothing more is to be gained from it
        i = (i + 1) % clients
    return changed


def _exchange_layers(problem: _Problem, masks: Mask) -> bool:
    """Many clients exchange one layer for another at once, in place. Returns whether anything changed."""
    apart = _distances(masks)
    slack = problem.slack(masks)
    changed = False
    for a in range(problem.layers - 1, -1, -1):
        for b in range(a, -1, -1):  # a == b: no other layer, take a or leave it
            price = problem.costs[:, a] - (0 if a == b else problem.costs[:, b])
            who = _free_to_exchange(masks, price, slack, a, b)
            takes = _best_group(problem, masks, apart, who, a, b)
            if takes is None:
                continue
            slack[who] -= price[who] * (takes.astype(np.int64) - masks[who, a])
            masks[who, a] = takes
            if a != b:
                masks[who, b] = ~takes
            apart = _distances(masks)
            changed = True
    return changed


def _free_to_exchange(masks: Mask, price: Ints, slack: Ints, a: int, b: int) -> Ints:
    """Clients that have exactly one of the layers a and b, and the budget for the other; a == b: a, or room for it."""
    has_a = masks[:, a]
    free = np.where(has_a, True if a == b else -price <= slack, price <= slack)
    if a != b:
        free &= has_a != masks[:, b]
    return np.flatnonzero(free)


def _best_group(problem: _Problem, masks: Mask, apart: Floats, who: Ints, a: int, b: int) -> Mask | None:
    """Which of the free clients `who` take layer a (the others b, or nothing); None where nothing better is found.

    Whether client i takes a is x_i; with D the distances in the other layers, (P1) is then
    Σ x_i·h_i − λ·Σ_{i<j} W_ij·|x_i − x_j|. The clients are ranked by h_i, and the best head of that ranking takes a.
    For the Hamming distance W is constant and this is the optimum over all groups.
    """
    if not who.size:
        return None
    distance: Callable[[Floats], Floats] = np.square if problem.distance == "squared" else np.positive
    alone = a == b
    has_a, has_b = masks[:, a].astype(np.float64), masks[:, b].astype(np.float64)
    # Distance, in a and b, of each client from one that takes a, and from one that does not.
    to_a, to_b = 1 - has_a, has_a
    in_these = np.abs(has_a[who][:, None] - has_a)
    if not alone:
        to_a, to_b = to_a + has_b, to_b + 1 - has_b
        in_these = in_these + np.abs(has_b[who][:, None] - has_b)
    rest = apart[who] - in_these

    mine = problem.gains[who, a] - (0.0 if alone else problem.gains[who, b])  # h
    fixed = np.ones(problem.clients, dtype=bool)
    fixed[who] = False
    if fixed.any():
        held = rest[:, fixed]
        pull = distance(held + to_b[fixed]) - distance(held + to_a[fixed])
        mine = mine + problem.coupling * pull.sum(axis=1)
    among = rest[:, who]
    weights = distance(among + (1.0 if alone else 2.0)) - distance(among)  # W
    np.fill_diagonal(weights, 0.0)

    with_a = masks[who, a]
    rank = np.lexsort((~with_a, -mine))
    weights = weights[np.ix_(rank, rank)]
    cut = np.cumsum(weights.sum(axis=1) - 2 * np.tril(weights).sum(axis=1))
    values = np.append(0.0, np.cumsum(mine[rank]) - problem.coupling * cut)
    now_cut = weights[with_a[rank]][:, ~with_a[rank]].sum()
    now = mine[with_a].sum() - problem.coupling * now_cut
    head = int(values.argmax())
    if values[head] - now <= _GAIN:
        return None
    takes = np.zeros(len(who), dtype=bool)
    takes[rank[:head]] = True
    return takes


# The exact solver -----------------------------------------------------------------------------------------------------


def _suits_exact(problem: _Problem) -> bool:
    """Whether the program is quick, and its tolerance small beside every client's norms."""
    highest = problem.gains.max(axis=1)
    highest = highest[highest > 0]
    small = problem.clients**2 * problem.layers // 2 <= _EXACT_UP_TO
    return small and bool(highest.size == 0 or highest.max() <= _LIKE * highest.min())


def _exact(problem: _Problem, time_limit: float = math.inf) -> tuple[Mask, float]:
    """The optimum of (P1) as a linear mixed-integer program, and an upper bound on its value (that value, in time).

    Variables: the masks m; z_ijl ≥ |m_il − m_jl| for i < j, which is tight because λ > 0 pushes it down; for the
    squared distance d = Σ_l z_ijl, and q_ij ≥ (2k + 1)·d − k·(k + 1) for every k, the lines through (k, k²) and
    (k + 1, (k + 1)²): tight at whole numbers.

    Raises:
        TimeoutError: no masks within `time_limit` seconds.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    n, layers = problem.clients, problem.layers
    first, second = np.triu_indices(n, 1)
    pairs = len(first)
    each = sparse.identity(layers, format="csr")

    def of_pairs(columns: Ints) -> sparse.csr_matrix:
        picks = sparse.csr_matrix((np.ones(pairs), (np.arange(pairs), columns)), shape=(pairs, n))
        return sparse.kron(picks, each, format="csr")

    differ = of_pairs(first) - of_pairs(second)
    z = sparse.identity(pairs * layers, format="csr")
    within = sparse.block_diag([row[None, :] for row in problem.costs / np.maximum(problem.budgets, 1)[:, None]])
    blocks = [[within, None], [differ, -z], [-differ, -z]]
    upper = [np.minimum(problem.budgets, 1.0), np.zeros(2 * pairs * layers)]
    penalty = np.full(pairs * layers, problem.coupling)
    if problem.distance == "squared":
        blocks = [[*row, None] for row in blocks]
        apart = sparse.kron(sparse.identity(pairs), np.ones((1, layers)))
        for k in range(layers):
            blocks.append([None, (2 * k + 1) * apart, -sparse.identity(pairs)])
            upper.append(np.full(pairs, float(k * (k + 1))))
        penalty = np.concatenate((np.zeros(pairs * layers), np.full(pairs, problem.coupling)))
    matrix, limits = sparse.bmat(blocks, format="csr"), np.concatenate(upper)
    weights = np.concatenate((-problem.gains.ravel(), penalty))
    whole = np.zeros(len(weights))
    whole[: n * layers] = 1
    highest = np.full(len(weights), np.inf)
    highest[: n * layers] = (problem.costs <= problem.budgets[:, None]).ravel()
    highest[n * layers : (n + pairs) * layers] = 1
    options = {"mip_rel_gap": 0.0} | ({"time_limit": time_limit} if time_limit < math.inf else {})
    for _ in range(_CUTS):
        constraint = LinearConstraint(matrix, -np.inf, limits)
        result = milp(weights, integrality=whole, bounds=Bounds(0, highest), constraints=constraint, options=options)
        if result.x is None:
            raise TimeoutError(f"no solution of {n} clients × {layers} layers in {time_limit:g} s: {result.message}")
        masks: Mask = result.x[: n * layers].reshape(n, layers) > 0.5
        over = np.flatnonzero(problem.slack(masks) < 0)
        if not over.size:
            return masks, -float(result.mip_dual_bound)
        # The program tolerates a budget exceeded by 1e-6 or so: forbid these sets of layers, and solve again.
        sets = np.zeros((len(over), len(weights)))
        for row, i in zip(sets, over, strict=True):
            row[i * layers : (i + 1) * layers] = masks[i]
        matrix = sparse.vstack((matrix, sparse.csr_matrix(sets)), format="csr")
        limits = np.append(limits, masks[over].sum(axis=1) - 1.0)
    raise TimeoutError(f"{_CUTS} solutions of {n} clients × {layers} layers were over a budget by a hair")
