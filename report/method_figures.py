"""Figures of the arrays that a run records: transferred parts, trained layers and modes, mixing weights, labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tepal.records.live import StoredSegment
from tepal.records.round_record import COLUMNS, RoundRecord
from tepal.report.heatmaps import GAPS, Arrays, ArraysOfRounds, heatmap, placed, round_by_round, shown, some, z
from tepal.report.page import Figure, add_curve, empty_plot, labels

MOST_COLUMNS = 100
"""Classes or layers of a figure: of more classes the most frequent are drawn, and the others together."""

_MOST_NODES, _EDGES = 100, 3  # clients of a graph, and lines from each
_DRIFTS = {"query_key_drift": ("query and key", "main"), "value_drift": ("all else", "second")}
_SHARES = {"disagreement": "main", "lowest_accuracy": "second", "highest_accuracy": "third"}  # column → colour


def travel_figures(records: ArraysOfRounds, segments: Sequence[StoredSegment]) -> list[Figure]:
    """The shares of the clients that were sent and that returned each segment, by round; [] for a model of one segment.

    Sent: of all clients of a round, also of those that only score; returned: of those that train.

    Args:
        records: As `run_directory.read_records` returns them.
        segments: The model's segments.
    """
    known = _with(records, "travel_up")
    known = [(number, record) for number, record in known if len(record["travel_up"]) == len(segments)]
    if len(segments) < 2 or not known:
        return []
    many = len({each["kind"] for each in segments}) > 1
    names = [f"{each['stage']}, {each['kind']}" if many else each["stage"] for each in segments]
    figures = []
    for way, said, clients in (("down", "sent to", "clients"), ("up", "returned by", "training clients")):
        shares = np.stack([record[f"travel_{way}"] for _, record in known], axis=1)
        plot = heatmap(
            shares, [number for number, _ in known], names, "round", "",
            f"%{{y}}, round %{{x}}: {said} %{{z:.0%}} of the {clients}", f"{len(names)} parts in {len(known)} rounds.",
            limits=(0, max(1.0, float(shares.max()))),
        )  # fmt: skip
        caption = f"Share of a round's {clients} that each part was {said}, by round; darker is more, empty is none."
        figures.append(Figure(f"travel-{way}", f"Parts {said} clients", caption, plot))
    return figures


def method_figures(records: ArraysOfRounds, metrics: Sequence[RoundRecord]) -> list[Figure]:
    """The figures of a run's method, from the arrays that it recorded.

    Args:
        records: As `run_directory.read_records` returns them.
        metrics: The rounds.
    """
    figures: list[Figure] = []
    if drifts := _with(records, *_DRIFTS):
        figures.append(_drift(drifts))
    if layers := _with(records, "masks"):
        figures += [_layers_by_round(layers), _layers_by_client(layers, sum(line.round > 0 for line in metrics))]
    if modes := _with(records, "modes"):
        figures.append(_modes(modes))
    if any(line.disagreement is not None for line in metrics):
        figures.append(_diversity(metrics))
    if mixed := _with(records, "weights"):
        figures += [*_alike(mixed), _weights(mixed), _graph(mixed), _mixed(mixed)]
    return figures


# --- FedFrozen ------------------------------------------------------------------------------------------------------


def _drift(records: ArraysOfRounds) -> Figure:
    plot = empty_plot("round", "update norm / norm", rounds=len(records))
    for key, (name, role) in _DRIFTS.items():
        known = [(number, float(record[key])) for number, record in records if np.isfinite(record[key])]
        rounds, drift = [number for number, _ in known], [drift for _, drift in known]
        add_curve(plot, rounds, drift, name=name, role=role, hover="round %{x}: %{y:.3%}")
    plot.update_yaxes(tickformat=".3~%", rangemode="tozero")
    caption = "Norm of a round's update relative to the norm of the values before it, by round. 0: frozen."
    return Figure("drift", "Relative update norm of query and key, and of all else", caption, plot)


# --- SelectiveLayers ------------------------------------------------------------------------------------------------


def _layers_by_round(records: ArraysOfRounds) -> Figure:
    """A heat map (layers, rounds): the share of a round's clients that trained a layer."""
    shares = np.stack([record["masks"].mean(axis=0) for _, record in records], axis=1)
    plot = heatmap(
        shares, [number for number, _ in records], [f"layer {k + 1}" for k in range(len(shares))], "round", "",
        "%{y}, round %{x}: %{z:.0%} of the clients", f"{len(shares)} layers in {len(records)} rounds.",
        limits=(0, 1),
    )  # fmt: skip
    plot.update_yaxes(autorange=True)
    caption = "Share of a round's clients that trained the layer; darker is more. Layer 1 is the nearest to the input."
    return Figure("layers-rounds", "Trained layers by round", caption, plot)


def _layers_by_client(records: ArraysOfRounds, rounds_done: int) -> Figure:
    """A heat map (clients, layers): the share of a client's rounds in which it trained a layer.

    `rounds_done`: all rounds, of which many are not read.
    """
    trained: dict[str, np.ndarray] = {}
    rounds: dict[str, int] = {}
    for _, record in records:
        for client, mask in zip(record["clients"].tolist(), record["masks"], strict=True):
            trained[client] = trained.get(client, 0) + mask.astype(int)
            rounds[client] = rounds.get(client, 0) + 1
    clients, more = shown(trained)
    shares = np.stack([trained[client] / rounds[client] for client in clients])
    plot = heatmap(
        shares, [str(k + 1) for k in range(shares.shape[1])], clients, "layer", "client",
        "%{y}, layer %{x}: in %{z:.0%} of its rounds", f"{len(clients)} clients, {shares.shape[1]} layers.",
        limits=(0, 1),
    )  # fmt: skip
    if len(records) < rounds_done:
        more = f" Counted in {len(records):,} of {rounds_done:,} rounds.{more}"
    caption = f"Share of a client's rounds in which it trained the layer; darker is more.{more}"
    return Figure("layers-clients", "Trained layers by client", caption, plot)


# --- Fed-ensemble ---------------------------------------------------------------------------------------------------


def _modes(records: ArraysOfRounds) -> Figure:
    """A heat map (clients, rounds): the number, from 1, of the mode that a client trained; empty if not asked."""
    of_client: dict[str, dict[int, int]] = {}
    for column, (_, record) in enumerate(records):
        for client, mode in zip(record["clients"].tolist(), record["modes"].tolist(), strict=True):
            of_client.setdefault(client, {})[column] = mode + 1
    clients, more = shown(of_client)
    numbers = [[of_client[client].get(column) for column in range(len(records))] for client in clients]
    most = max(mode for of in of_client.values() for mode in of.values())
    plot = heatmap(
        numbers, [number for number, _ in records], clients, "round", "client",
        "%{y}, round %{x}: mode %{z}", f"{len(clients)} clients, {most} modes.", limits=(0, most),
    )  # fmt: skip
    caption = f"Number of the mode, by client and round; darker is higher, empty where the client was not asked.{more}"
    return Figure("modes", "Mode trained by each client", caption, plot)


def _diversity(metrics: Sequence[RoundRecord]) -> Figure:
    plot = empty_plot("round", "share", rounds=len(metrics))
    for key, role in _SHARES.items():
        known = [(line.round, share) for line in metrics if (share := line.value(key)) is not None]
        rounds, shares = [number for number, _ in known], [share for _, share in known]
        add_curve(plot, rounds, shares, name=COLUMNS[key].heading, role=role, hover="round %{x}: %{y:.2%}")
    plot.update_yaxes(tickformat=".4~%", rangemode="tozero")
    caption = (
        "On the server's held-out data: the share of examples that two modes label differently, mean over all pairs, "
        "and the accuracy of the worst and of the best mode alone."
    )
    return Figure("diversity", "Diversity of the ensemble", caption, plot)


# --- FedACS and FedAMP ----------------------------------------------------------------------------------------------


def _alike(records: ArraysOfRounds) -> list[Figure]:
    """A heat map (clients, clients) per round: cosine similarity or squared distance of two clients' models."""
    number, record = records[-1]
    known = next((key for key in ("similarity", "distances") if key in record), None)
    if known is None:
        return []
    title = {"similarity": "Similarity of clients' models", "distances": "Distances between clients' models"}[known]
    said = {"similarity": "cosine similarity", "distances": "squared distance"}[known]
    clients, more = shown(record["clients"].tolist())

    def matrix(record: Arrays) -> Any:
        names = record["clients"].tolist()
        return placed(record[known], names, names, clients, clients)

    plot = heatmap(
        matrix(record), clients, clients, "", "", f"%{{y}} and %{{x}}: {said} %{{z:.4g}}", f"{len(clients)} clients."
    )  # fmt: skip
    alike = [each for each in _with(records, known) if set(clients) <= set(each[1]["clients"].tolist())]
    round_by_round(plot, [(number, [z(matrix(record))]) for number, record in some(alike, len(clients) ** 2)])
    caption = f"{said.capitalize()} of two clients' models at the start of round {number}; darker is larger.{more}"
    if "threshold" in record:
        caption += f" In round {number}, models of a similarity above δ = {float(record['threshold']):.4g} are mixed."
    return [Figure("alike", title, caption, plot)]


def _weights(records: ArraysOfRounds) -> Figure:
    """A heat map (cohort, clients) per round: the weight of a client's model in the mixture of another client."""
    number, record = records[-1]
    clients, more = shown(record["clients"].tolist())
    cohort, _ = shown({client for _, each in records for client in each["cohort"].tolist()} & set(clients))

    def matrix(record: Arrays) -> Any:
        return placed(record["weights"], record["cohort"].tolist(), record["clients"].tolist(), cohort, clients)

    largest = max(float(each["weights"].max(initial=0.0)) for _, each in records)
    plot = heatmap(
        matrix(record), clients, cohort, "client whose model is mixed", "client of the mixture",
        "%{x}'s model in the mixture of %{y}: %{z:.2%}",
        f"{len(cohort)} mixtures of {len(clients)} models.", limits=(0, largest or 1.0),
    )  # fmt: skip
    round_by_round(plot, [(number, [z(matrix(each))]) for number, each in some(records, len(clients) * len(cohort))])
    caption = f"Weight of a client's model in the mixture for a client of round {number}; darker is larger.{more}"
    return Figure("weights", "Mixing weights", caption, plot)


def _graph(records: ArraysOfRounds) -> Figure:
    """The clients on a circle, with lines from each to the others whose models weigh most in its mixture."""
    import plotly.graph_objects as go

    number, record = records[-1]
    clients = shown(record["clients"].tolist())[0][:_MOST_NODES]
    more = len(record["clients"]) - len(clients)
    angle = 2 * np.pi * np.arange(len(clients)) / max(len(clients), 1)
    place = {name: (float(np.sin(a)), float(np.cos(a))) for name, a in zip(clients, angle, strict=True)}

    def lines(record: Arrays) -> list[Any]:
        """Data of scatter traces: thin, medium and thick lines by weight; then the nodes, sized by their weights."""
        weights = record["weights"].astype(float)
        names = [(k, name) for k, name in enumerate(record["clients"].tolist()) if name in place]
        given = dict.fromkeys(clients, 0.0)
        drawn: list[tuple[list[float | None], list[float | None]]] = [([], []) for _ in _WIDTHS]
        largest = float(weights.max(initial=0.0))
        for client, row in zip(record["cohort"].tolist(), weights, strict=True):
            if client not in place:
                continue
            others = [(float(row[k]), name) for k, name in names if name != client]
            for weight, name in sorted(others, reverse=True)[:_EDGES]:
                if weight > 1e-3:
                    given[name] += weight
                    xs, ys = drawn[min(int(len(_WIDTHS) * weight / largest), len(_WIDTHS) - 1)]
                    xs += [place[client][0], place[name][0], None]
                    ys += [place[client][1], place[name][1], None]
        most = max(given.values(), default=0.0) or 1.0
        sizes = [round(6 + 12 * given[name] / most, 2) for name in clients]
        return [*({"x": xs, "y": ys} for xs, ys in drawn), {"marker": {"size": sizes}}]

    plot = empty_plot("", "")
    first = lines(record)
    for data, width in zip(first[:-1], _WIDTHS, strict=True):
        plot.add_scatter(
            **data, mode="lines", line={"width": width}, opacity=0.55, hoverinfo="skip", showlegend=False,
            meta={"role": "second", "edges": True},
        )  # fmt: skip
    plot.add_scatter(
        x=[place[name][0] for name in clients], y=[place[name][1] for name in clients], text=labels(clients),
        **first[-1],
        mode="markers+text" if len(clients) <= GAPS else "markers", textposition="top center", showlegend=False,
        meta={"role": "main", "spoken": f"{len(clients)} clients."}, hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    plot.update_xaxes(visible=False, range=[-1.25, 1.25], rangemode="normal")
    plot.update_yaxes(visible=False, range=[-1.25, 1.25], rangemode="normal", scaleanchor="x")
    frames = [
        (number, [go.Scatter(each) for each in lines(record)]) for number, record in some(records, 10 * len(clients))
    ]
    round_by_round(plot, frames)
    caption = (
        f"From each client lines to the {_EDGES} others whose models weigh most in its mixture: the thicker, the more. "
        f"The larger a dot, the larger its weights in the mixtures of others. Round {number}."
    )
    return Figure("graph", "Mixing graph", caption + (f" {more} more clients." if more else ""), plot)


_WIDTHS = (0.6, 1.6, 3.5)  # of lines, pixels


def _mixed(records: ArraysOfRounds) -> Figure:
    """The effective number of models of a mixture, (Σw)²/Σw²: m for m equal weights; mean, least, most per round."""
    rounds, counts = [], []
    for number, record in records:
        weights = record["weights"].astype(float)
        if weights.size and (squares := np.square(weights).sum(axis=1)).all():
            rounds.append(number)
            counts.append(weights.sum(axis=1) ** 2 / squares)
    plot = empty_plot("round", "models", rounds=len(records))
    for name, role, of in (("most", "third", np.max), ("mean", "main", np.mean), ("least", "second", np.min)):
        models = [float(of(each)) for each in counts]
        add_curve(plot, rounds, models, name=name, role=role, hover="round %{x}: %{y:.3g}")
    plot.update_yaxes(rangemode="tozero")
    caption = "(Σw)²/Σw² of the weights w in a client's mixture, by round: 1 for a single model, m for m equal ones."
    return Figure("mixed", "Effective number of models per mixture", caption, plot)


# --- labels ---------------------------------------------------------------------------------------------------------


def label_figures(counts: Mapping[str, Sequence[int]]) -> list[Figure]:
    """A heat map (clients, classes): the share of a client's examples, from `labels.json`; [] if that is empty."""
    if not counts:
        return []
    clients, more = shown(counts)
    classes = max(map(len, counts.values()))
    drawn = _most_frequent(counts, classes)
    rows = [_of_classes(counts[client], drawn) for client in clients]
    names: Sequence[Any] = drawn
    if len(drawn) < classes:
        names = [*map(str, drawn), "others"]
        rows = [[*row, sum(counts[client]) - sum(row)] for client, row in zip(clients, rows, strict=True)]
        more += f" The {len(drawn)} most frequent of {classes:,} classes, and the others together."
    plot = heatmap(
        [[count / (sum(row) or 1) for count in row] for row in rows], names, clients, "class", "client",
        "%{y}, class %{x}: %{customdata} examples, %{z:.0%} of its own", f"{len(clients)} clients, {classes} classes.",
    )  # fmt: skip
    plot.update_traces(customdata=rows)
    total = sum(map(sum, counts.values()))
    caption = f"Share of each class in a client's own examples; darker is larger. {total:,} examples.{more}"
    return [Figure("labels", "Class distribution per client", caption, plot)]


def _most_frequent(counts: Mapping[str, Sequence[int]], classes: int) -> list[int]:
    """The classes that are drawn, in their order: all, or the MOST_COLUMNS with most examples."""
    if classes <= MOST_COLUMNS:
        return list(range(classes))
    examples = [0] * classes
    for each in counts.values():
        for place, count in enumerate(each):
            examples[place] += count
    return sorted(sorted(range(classes), key=lambda place: -examples[place])[:MOST_COLUMNS])


def _of_classes(counts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    return [counts[place] if place < len(counts) else 0 for place in drawn]


# --- used by several figures ----------------------------------------------------------------------------------------


def _with(records: ArraysOfRounds, *names: str) -> ArraysOfRounds:
    """The rounds that have these arrays."""
    return [(number, record) for number, record in records if record.keys() >= set(names)]
