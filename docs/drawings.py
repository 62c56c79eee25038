"""Draw what travels in a round of each of the four methods, for the pages in docs/methods/.

    python docs/drawings.py

The numbers in them are those of the methods' own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from tepal.strategies.layer_selection import select_layers
from tepal.strategies.mixing import cosine, mixing_weights, threshold
from tepal.strategies.schedule import mode_schedule
from tepal.tools.compare.picture import looks

FOLDER = Path(__file__).parent / "methods"

WIDTH = 760
TALL = 22  # a bar
SENT, HELD, IDLE, CHOSEN = "sent", "held", "idle", "chosen"

STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#5f5a66}
.head{font-size:15px;font-weight:600;fill:#1d1b20}.strong{font-weight:600;fill:#1d1b20}
.middle{text-anchor:middle}.end{text-anchor:end}
.ground{fill:#fff}.rule{stroke:#d5cfd9;fill:none}.way{stroke:#5f5a66;fill:none;stroke-width:1.4}.tip{fill:#5f5a66}
.sent{fill:LIGHT;stroke:LIGHT}.held{fill:none;stroke:#8b8492;stroke-dasharray:3 3}.idle{fill:#eceaee;stroke:#d5cfd9}
.chosen{fill:none;stroke:LIGHT;stroke-width:2}
.on{fill:#fff;font-weight:600}.arrow{stroke:LIGHT;stroke-width:2.4}.point{fill:LIGHT}
@media (prefers-color-scheme:dark){
text{fill:#b9b2c2}.head,.strong{fill:#efecf2}.ground{fill:#1f1c24}.rule{stroke:#46404e}
.way{stroke:#b9b2c2}.tip{fill:#b9b2c2}
.sent{fill:DARK;stroke:DARK}.held{stroke:#8b8492}.idle{fill:#2e2a35;stroke:#46404e}.chosen{stroke:DARK}
.on{fill:#16141a}.arrow{stroke:DARK}.point{fill:DARK}
}
"""


class Drawing:
    """An SVG picture with a heading, a text for those who do not see it, and a ground of its own."""

    def __init__(self, strategy: str, heading: str, spoken: str, height: int) -> None:
        self.strategy, self.heading, self.spoken, self.height = strategy, heading, spoken, height
        self.marks: list[str] = []

    def add(self, mark: str) -> None:
        self.marks.append(mark)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.add(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def cell(self, x: float, y: float, wide: float, kind: str, text: str = "", tall: float = TALL) -> None:
        self.add(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="3"/>')
        if text:
            self.text(x + wide / 2, y + tall / 2 + 4.5, text, "middle on" if kind == SENT else "middle")

    def bar(self, x: float, y: float, cells: Sequence[tuple[float, str, str]]) -> None:
        """Cells side by side: (width, kind, text)."""
        for wide, kind, text in cells:
            self.cell(x, y, wide - 3, kind, text)
            x += wide

    def way(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """An arrow."""
        self.add(f'<path class="way" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')
        self._tip(x, y, to_x, to_y, "tip")

    def vector(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        self.add(f'<path class="{kind}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')
        self._tip(x, y, to_x, to_y, "point" if kind == "arrow" else "tip")

    def _tip(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        along = np.array([to_x - x, to_y - y]) / np.hypot(to_x - x, to_y - y)
        across, end = np.array([-along[1], along[0]]), np.array([to_x, to_y])
        corners = (end + 2 * along, end - 7 * along + 4 * across, end - 7 * along - 4 * across)
        self.add(f'<path class="{kind}" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in corners)}Z"/>')

    def legend(self, held: str) -> None:
        y = self.height - 34
        self.cell(24, y, 22, SENT, tall=14)
        self.text(54, y + 12, "travels")
        self.cell(124, y, 22, HELD, tall=14)
        self.text(154, y + 12, held)

    def svg(self) -> str:
        look = looks([self.strategy])[self.strategy]
        style = STYLE.replace("LIGHT", look.light).replace("DARK", look.dark)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(self.heading)}</title>',
            f'<desc id="desc">{escape(self.spoken)}</desc>',
            f"<style>{style}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{self.height}" rx="8"/>',
            f'<text class="head" x="24" y="30">{escape(self.heading)}</text>',
            *self.marks,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def fedfrozen() -> Drawing:
    drawing = Drawing(
        "fedfrozen",
        "FedFrozen: what travels to a client and back",
        "In the warm-up, rounds 1 to T warm, query and key projections and the value block travel both ways. In the "
        "first frozen round both go down, and the value block alone comes back. In every later round only the value "
        "block travels: the client keeps the frozen query and key projections.",
        262,
    )
    left, apart, query_key, value = 130, 155, 40, 96
    names = ("round 1", "round T_warm", "T_warm + 1", "each later")
    rounds = zip(names, (SENT, SENT, SENT, HELD), (SENT, SENT, HELD, HELD), strict=True)
    for (first, last), phase in (((0, 1), "warm-up: as FedAvg"), ((2, 3), "frozen: only the value block trains")):
        start, stop = left + first * apart, left + last * apart + query_key + value - 3
        drawing.add(f'<path class="rule" d="M{start} 72V66H{stop}V72"/>')
        drawing.text((start + stop) / 2, 58, phase, "middle strong")
    drawing.text(24, 132, "down")
    drawing.text(24, 172, "up")
    for number, (name, down, up) in enumerate(rounds):
        x = left + number * apart
        drawing.text(x + (query_key + value) / 2, 94, name, "middle")
        drawing.bar(x, 116, ((query_key, down, "q, k"), (value, SENT, "value block")))
        drawing.bar(x, 156, ((query_key, up, "q, k"), (value, SENT, "value block")))
    drawing.text(left + 2 * apart, 202, "↑ q, k go down this once")
    drawing.legend("does not: the client has it, or it did not change")
    return drawing


NORMS = np.array([[1.0, 2.0, 5.0, 6.0], [1.0, 2.0, 6.0, 5.0], [7.0, 2.0, 4.0, 3.0]])
BUDGETS = (1, 1, 2)


def selective() -> Drawing:
    masks = select_layers(NORMS, BUDGETS, coupling=1.0)
    changed = masks.any(axis=0)  # in a round like this one before it
    chosen = "; ".join(
        f"client {name} with a budget of {budget} trains {' and '.join(f'layer {k + 1}' for k in np.flatnonzero(mask))}"
        for name, budget, mask in zip("ABC", BUDGETS, masks, strict=True)
    )
    drawing = Drawing(
        "selective",
        "Selective layers: the two exchanges of a round",
        "Probe: what changed since a client's last round goes down, and one number a layer, its squared gradient "
        f"norm, comes back. The server selects: {chosen}. Train: the second message carries no model; the chosen "
        "layers and the head come back.",
        336,
    )
    wide, places = 23, (96, 262, 410, 580)
    titles = ("1 probe, down", "probe, up", "2 the server selects", "3 train, up")
    notes = ("what changed", "‖g‖² of each layer", "within budgets, (P1)", "chosen layers, head")
    for x, title, note in zip(places, titles, notes, strict=True):
        drawing.text(x, 62, title, "strong")
        drawing.text(x, 80, note)
    for number, (norms, budget, mask) in enumerate(zip(NORMS, BUDGETS, masks, strict=True)):
        y = 108 + 62 * number
        drawing.text(24, y + 14, f"client {'ABC'[number]}", "strong")
        drawing.text(24, y + 30, f"budget {budget}")
        layers = [(wide, SENT if each else HELD, str(k + 1)) for k, each in enumerate(changed)]
        drawing.bar(places[0], y, ((wide, HELD, "E"), *layers, (wide, SENT, "H")))
        for k, norm in enumerate(norms):
            drawing.cell(places[1] + k * wide, y + TALL - 3.5 * norm, wide - 7, SENT, tall=3.5 * norm)
            drawing.text(places[1] + k * wide + (wide - 7) / 2, y + TALL + 15, str(k + 1), "middle")
        drawing.bar(places[2], y, [(wide, CHOSEN if each else HELD, str(k + 1)) for k, each in enumerate(mask)])
        trained = [(wide, SENT if each else HELD, str(k + 1)) for k, each in enumerate(mask)]
        drawing.bar(places[3], y, ((wide, HELD, "E"), *trained, (wide, SENT, "H")))
        for before, after in pairwise(places):
            start = before + (6 if before in (places[0], places[3]) else 4) * wide
            drawing.way(start + 2, y + TALL / 2, after - 8, y + TALL / 2)
    drawing.legend("does not")
    drawing.text(262, drawing.height - 22, "E embedding, 1 to 4 layers from the input on, H head")
    return drawing


MODES = 3


def fedensemble() -> Drawing:
    schedule = mode_schedule(MODES, MODES, age=0, seed=2)
    spoken = "; ".join(
        f"stratum {q + 1} trains modes {', '.join(str(k + 1) for k in row)}" for q, row in enumerate(schedule)
    )
    drawing = Drawing(
        "fedensemble",
        "Fed-ensemble: one mode to a client and round",
        f"An age of {MODES} rounds with {MODES} modes and {MODES} strata of clients. One mode goes down to a client "
        f"and the same mode comes back. In turn, {spoken}. Each mode is then the mean of what its clients sent. The "
        "prediction is the mean of the three models' probabilities.",
        298,
    )
    left, apart = 120, 112
    for r in range(MODES):
        drawing.text(left + r * apart + 46, 66, f"round {r + 1}", "middle strong")
    for q, row in enumerate(schedule):
        y = 84 + 46 * q
        drawing.text(24, y + 15, f"stratum {q + 1}", "strong")
        for r, mode in enumerate(row):
            drawing.bar(left + r * apart, y, [(33, SENT if k == mode else HELD, str(k + 1)) for k in range(MODES)])
    drawing.text(24, 234, "One mode down, the same mode up: as many bytes as FedAvg.")
    x = 520
    drawing.text(x, 66, "what is delivered", "strong")
    for k in range(MODES):
        y = 84 + 46 * k
        drawing.cell(x, y, 66, IDLE, f"mode {k + 1}")
        drawing.way(x + 70, y + TALL / 2, x + 112, 84 + 46 + TALL / 2)
    drawing.cell(x + 120, 112, 96, IDLE, tall=58)
    for line, y in (("mean of their", 136), ("probabilities", 154)):
        drawing.text(x + 168, y, line, "middle")
    drawing.legend("stays at the server in this round")
    return drawing


ANGLES, LENGTHS, QUANTILE = np.radians([20.0, 45.0, 70.0, 160.0]), np.array([1.0, 0.9, 1.05, 0.85]), 0.5


def fedacs() -> Drawing:
    models = LENGTHS[:, None] * np.column_stack((np.cos(ANGLES), np.sin(ANGLES)))
    similarity = cosine(models @ models.T)
    delta = threshold(similarity, QUANTILE)
    weights = mixing_weights(similarity, delta)
    mixtures = weights @ models
    like = " and ".join(str(k + 1) for k in np.flatnonzero(weights[0]))
    drawing = Drawing(
        "fedacs",
        "FedACS: a model for each client, mixed with those that point the same way",
        f"Four clients' models as vectors. Of their cosine similarities those above the threshold, {delta:.2f}, count: "
        f"client 1 starts from a mixture of models {like}. Its mixture, a whole model, goes down to it; "
        "the model that it trained, a whole model, comes back.",
        298,
    )
    drawing.text(24, 62, "models w₁ … w₄ and mixture u₁", "strong")
    x, y, scale = 128, 226, 118

    def vector(to: np.ndarray, kind: str, name: str) -> None:
        drawing.vector(x, y, x + scale * to[0], y - scale * to[1], kind)
        place = to * (1 + 0.15 / np.hypot(*to))
        style = "middle strong" if kind == "arrow" else "middle"
        drawing.text(x + scale * place[0], y - scale * place[1] + 4, name, style)

    for k, model in enumerate(models):
        vector(model, "way", f"w{'₁₂₃₄'[k]}")
    vector(mixtures[0], "arrow", "u₁")
    left, top, wide = 330, 84, 42
    drawing.text(left, 62, f"cosines, counted above δ = {delta:.2f}", "strong")
    for i in range(4):
        drawing.text(left - 10, top + 34 * i + 16, str(i + 1), "end")
        drawing.text(left + wide * i + 20, top + 4 * 34 + 14, str(i + 1), "middle")
        for j in range(4):
            kind = SENT if weights[i, j] > 0 else IDLE
            drawing.cell(left + wide * j, top + 34 * i, wide - 4, kind, f"{similarity[i, j]:.2f}", 28)
    drawing.text(590, 62, "client 1", "strong")
    drawing.way(602, 84, 602, 126)
    drawing.text(614, 102, "down: all of u₁")
    drawing.cell(614, 108, 116, SENT, tall=14)
    drawing.text(602, 156, "trains", "")
    drawing.way(602, 220, 602, 172)
    drawing.text(614, 192, "up: all of w₁")
    drawing.cell(614, 198, 116, SENT, tall=14)
    y = drawing.height - 34
    drawing.cell(24, y, 22, SENT, tall=14)
    drawing.text(54, y + 12, "travels; in the table: is mixed")
    drawing.cell(270, y, 22, IDLE, tall=14)
    drawing.text(300, y + 12, "not like enough: weight 0")
    return drawing


DRAWINGS: Mapping[str, Callable[[], Drawing]] = {
    "fedfrozen.svg": fedfrozen,
    "selective-layers.svg": selective,
    "fed-ensemble.svg": fedensemble,
    "fedacs.svg": fedacs,
}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
