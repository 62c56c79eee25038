"""What a method told of its rounds, as figures: who trained which layers or which mode, whose models were mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tepal.server_app.page import Figure, empty_plot

Record = Mapping[str, np.ndarray]
Records = Sequence[tuple[int, Record]]
Lines = Sequence[Mapping[str, Any]]

_MOST_CLIENTS = 300  # rows of a figure that can still be told apart
_GAPS = 40  # rows or columns up to which cells have a gap between them
_DRIFTS = {"query_key_drift": ("query and key", "main"), "value_drift": ("all else", "second")}
_SHARES = {
    "disagreement": ("disagreement of two modes", "main"),
    "lowest_accuracy": ("accuracy of the worst mode", "second"),
    "highest_accuracy": ("accuracy of the best mode", "third"),
}


def method_figures(records: Records, metrics: Lines, order: Callable[[str], Any]) -> list[Figure]:
    """The figures that there are for a run.

    Args:
        records: of rounds in their order, as `run_directory.read_records` gives them.
        metrics: lines of `metrics.jsonl`.
        order: key by which clients' names are sorted.
    """
    figures: list[Figure] = []
    if drifts := [(number, record) for number, record in records if _DRIFTS.keys() <= record.keys()]:
        figures.append(_drift(drifts))
    if layers := [(number, record) for number, record in records if "masks" in record]:
        figures += [_layers_by_round(layers), _layers_by_client(layers, order)]
    if modes := [(number, record) for number, record in records if "modes" in record]:
        figures.append(_modes(modes, order))
    if any(line.get("disagreement") is not None for line in metrics):
        figures.append(_diversity(metrics))
    if mixed := [(number, record) for number, record in records if "weights" in record]:
        figures += [*_alike(mixed[-1], order), _weights(mixed[-1], order), _mixed(mixed)]
    return figures


# --- FedFrozen ------------------------------------------------------------------------------------------------------


def _drift(records: Records) -> Figure:
    plot = empty_plot("round", "of its norm", rounds=len(records))
    for key, (name, role) in _DRIFTS.items():
        known = [(number, float(record[key])) for number, record in records if np.isfinite(record[key])]
        plot.add_scatter(
            x=[number for number, _ in known], y=[drift for _, drift in known], name=name, mode="lines+markers",
            meta={"role": role}, hovertemplate="round %{x}: %{y:.3%}",
        )  # fmt: skip
    plot.update_yaxes(tickformat=".3~%", rangemode="tozero")
    caption = "How far a round moved a block: the norm of the step over the norm of what was there. 0: frozen."
    return Figure("drift", "Drift of query and key, and of the rest", caption, plot)


# --- SelectiveLayers ------------------------------------------------------------------------------------------------


def _layers_by_round(records: Records) -> Figure:
    """z (layers, rounds): share of a round's clients that trained a layer."""
    shares = np.stack([record["masks"].mean(axis=0) for _, record in records], axis=1)
    plot = _heatmap(
        shares, [number for number, _ in records], _names("layer", len(shares)), "round", "",
        "layer %{y}, round %{x}: %{z:.0%} of the clients", f"{len(shares)} layers in {len(records)} rounds.",
        range=(0, 1),
    )  # fmt: skip
    caption = "The darker, the more of a round's clients trained the layer. Layer 1 is the nearest to the input."
    return Figure("layers-rounds", "Layers that were trained", caption, plot)


def _layers_by_client(records: Records, order: Callable[[str], Any]) -> Figure:
    """z (clients, layers): share of the rounds that a client took part in, in which it trained a layer."""
    trained: dict[str, np.ndarray] = {}
    rounds: dict[str, int] = {}
    for _, record in records:
        for client, mask in zip(record["clients"].tolist(), record["masks"], strict=True):
            trained[client] = trained.get(client, 0) + mask.astype(int)
            rounds[client] = rounds.get(client, 0) + 1
    clients, more = _shown(trained, order)
    shares = np.stack([trained[client] / rounds[client] for client in clients])
    plot = _heatmap(
        shares, _names("", shares.shape[1]), clients, "layer", "client",
        "%{y}, layer %{x}: in %{z:.0%} of its rounds", f"{len(clients)} clients, {shares.shape[1]} layers.",
        range=(0, 1),
    )  # fmt: skip
    plot.update_yaxes(autorange="reversed")
    caption = f"The darker, the larger the share of a client's rounds in which it trained the layer.{more}"
    return Figure("layers-clients", "Layers of each client", caption, plot)


# --- Fed-ensemble ---------------------------------------------------------------------------------------------------


def _modes(records: Records, order: Callable[[str], Any]) -> Figure:
    """z (clients, rounds): the number of the mode that a client trained, from 1; none where it was not asked."""
    of_client: dict[str, dict[int, int]] = {}
    for column, (_, record) in enumerate(records):
        for client, mode in zip(record["clients"].tolist(), record["modes"].tolist(), strict=True):
            of_client.setdefault(client, {})[column] = mode + 1
    clients, more = _shown(of_client, order)
    numbers = [[of_client[client].get(column) for column in range(len(records))] for client in clients]
    most = max(mode for of in of_client.values() for mode in of.values())
    plot = _heatmap(
        numbers, [number for number, _ in records], clients, "round", "client",
        "%{y}, round %{x}: mode %{z}", f"{len(clients)} clients, {most} modes.", range=(0, most),
    )  # fmt: skip
    plot.update_yaxes(autorange="reversed")
    caption = f"The darker, the higher the number of the mode; nothing where the client was not asked.{more}"
    return Figure("modes", "Mode that each client trained", caption, plot)


def _diversity(metrics: Lines) -> Figure:
    plot = empty_plot("round", "share", rounds=len(metrics))
    for key, (name, role) in _SHARES.items():
        known = [line for line in metrics if line.get(key) is not None]
        plot.add_scatter(
            x=[line["round"] for line in known], y=[line[key] for line in known], name=name, mode="lines+markers",
            meta={"role": role}, hovertemplate="round %{x}: %{y:.2%}",
        )  # fmt: skip
    plot.update_yaxes(tickformat=".4~%", rangemode="tozero")
    caption = (
        "On the server's held-out data: the share of examples that two modes label differently, mean over all pairs, "
        "and the accuracy of the worst and of the best mode alone."
    )
    return Figure("diversity", "Diversity of the ensemble", caption, plot)


# --- FedACS and FedAMP ----------------------------------------------------------------------------------------------


def _alike(last: tuple[int, Record], order: Callable[[str], Any]) -> list[Figure]:
    """z (clients, clients): cosine similarity of two clients' models, or their squared distance."""
    number, record = last
    known = next((key for key in ("similarity", "distances") if key in record), None)
    if known is None:
        return []
    title = {"similarity": "Similarity of the clients' models", "distances": "Distances of the clients' models"}[known]
    said = {"similarity": "cosine similarity", "distances": "squared distance"}[known]
    clients, more = _shown(record["clients"].tolist(), order)
    values = _rows(record[known], record["clients"], clients, clients)
    plot = _heatmap(
        values, clients, clients, "", "", f"%{{y}} and %{{x}}: {said} %{{z:.4g}}", f"{len(clients)} clients."
    )  # fmt: skip
    plot.update_yaxes(autorange="reversed")
    caption = f"As round {number} began. The darker, the larger the {said}.{more}"
    if "threshold" in record:
        caption += f" Models of a similarity above δ = {float(record['threshold']):.4g} are mixed."
    return [Figure("alike", title, caption, plot)]


def _weights(last: tuple[int, Record], order: Callable[[str], Any]) -> Figure:
    """z (cohort, clients): the weight of a client's model in another's mixture."""
    number, record = last
    cohort, more = _shown(record["cohort"].tolist(), order)
    clients, _ = _shown(record["clients"].tolist(), order)
    values = _rows(record["weights"], record["clients"], clients, cohort, record["cohort"])
    plot = _heatmap(
        values, clients, cohort, "whose model", "in whose mixture", "%{x}'s model in the mixture of %{y}: %{z:.2%}",
        f"{len(cohort)} mixtures of {len(clients)} models.", range=(0, float(values.max(initial=0.0)) or 1.0),
    )  # fmt: skip
    plot.update_yaxes(autorange="reversed")
    caption = f"The weights with which models were mixed for the clients of round {number}.{more}"
    return Figure("weights", "Whose models are mixed for whom", caption, plot)


def _mixed(records: Records) -> Figure:
    """Of how many models a mixture is: 1/Σw², which is m for m equal weights; mean, least and most of a round."""
    rounds, counts = [], []
    for number, record in records:
        weights = record["weights"].astype(float)
        if weights.size and (squares := np.square(weights).sum(axis=1)).all():
            rounds.append(number)
            counts.append(weights.sum(axis=1) ** 2 / squares)
    plot = empty_plot("round", "models", rounds=len(records))
    for name, role, of in (("most", "third", np.max), ("mean", "main", np.mean), ("least", "second", np.min)):
        plot.add_scatter(
            x=rounds, y=[float(of(each)) for each in counts], name=name, mode="lines+markers", meta={"role": role},
            hovertemplate="round %{x}: %{y:.3g}",
        )  # fmt: skip
    plot.update_yaxes(rangemode="tozero")
    caption = "How many models of equal weight a client's mixture is worth: 1/Σw². 1: its own model alone."
    return Figure("mixed", "Models in a mixture", caption, plot)


# --- what they share ------------------------------------------------------------------------------------------------


def _heatmap(
    values: Any, x: Sequence[Any], y: Sequence[str], x_title: str, y_title: str, hover: str, spoken: str, *,
    range: tuple[float, float] | None = None,
) -> Any:  # fmt: skip
    """`range`: of the values, from the lightest to the darkest; None: those that there are."""
    plot = empty_plot(x_title, y_title)
    written = [[None if value is None else float(f"{value:.4g}") for value in row] for row in values]
    plot.add_heatmap(
        z=written, x=list(x), y=list(y), showscale=False,
        xgap=int(len(x) <= _GAPS), ygap=int(len(y) <= _GAPS), meta={"role": "second", "spoken": spoken},
        hovertemplate=f"{hover}<extra></extra>",
    )  # fmt: skip
    if range is not None:
        plot.update_traces(zmin=range[0], zmax=range[1])
    plot.update_yaxes(type="category")
    plot.update_xaxes(rangemode="normal", type="category" if x and isinstance(x[0], str) else "-")
    return plot


def _names(word: str, count: int) -> list[str]:
    return [f"{word} {number}".strip() for number in range(1, count + 1)]


def _shown(clients: Any, order: Callable[[str], Any]) -> tuple[list[str], str]:
    """The clients that a figure shows, in their order, and the sentence on those that it leaves out."""
    everybody = sorted(clients, key=order)
    shown = everybody[:_MOST_CLIENTS]
    return shown, f" The first {len(shown)} of {len(everybody)} clients." if len(shown) < len(everybody) else ""


def _rows(
    matrix: np.ndarray, columns: np.ndarray, wanted: Sequence[str], of: Sequence[str], rows: np.ndarray | None = None
) -> np.ndarray:
    """The part of a matrix that has these rows and columns, by the clients' names."""
    column = {name: k for k, name in enumerate(columns.tolist())}
    row = column if rows is None else {name: k for k, name in enumerate(rows.tolist())}
    found: np.ndarray = matrix[np.ix_([row[name] for name in of], [column[name] for name in wanted])]
    return found
