"""`tepal report RUN --figures svg|png|pdf`: the figures of a report or of a comparison, each as a file for a paper.

plotly draws them in Chrome or Chromium, with kaleido: on white, in the light colours and the size in which the pages
save figures (`script.PAPER`). The network is not used.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tepal.records.run_directory import find_run, write_whole
from tepal.report.page import Figure
from tepal.report.run_files import RunFiles
from tepal.report.run_page import drawn_of
from tepal.report.script import PAPER
from tepal.report.style import light_colours
from tepal.tools.compare.comparison import Results
from tepal.tools.compare.page import figures as comparison_figures
from tepal.tools.compare.page import style as comparison_style

if TYPE_CHECKING:
    import plotly.graph_objects as go

FORMATS = ("svg", "png", "pdf")
FOLDER = "figures"
"""The default folder, in the directory of the run or comparison."""

_WITHOUT = "Without it: report.html and comparison.html save each figure as SVG or PNG, when the pointer is on it"
_SECONDS = 120.0  # that a browser may take for one figure


class FiguresError(ValueError):
    """Figures cannot be written as files. The message has the reason, a remedy and an alternative."""


def write_run_figures(run: Path, kind: str, folder: Path | None = None) -> list[Path]:
    """Write the figures of a run's report as files, and return their paths.

    Args:
        run: A run directory, or the `latest` link.
        kind: One of FORMATS.
        folder: Where to write them, by default "figures" in the run directory; it is made if needed.

    Raises FiguresError if they cannot be drawn, FileNotFoundError if there is no run, OSError naming a file that
    cannot be written.
    """
    run = find_run(run)
    drawn = [figure for of in drawn_of(RunFiles(run)).values() for figure in of]
    return _write(drawn, light_colours(), kind, folder or run / FOLDER)


def write_comparison_figures(results: Results, kind: str, folder: Path | None = None) -> list[Path]:
    """Write the figures of a comparison as files; arguments and errors as of `write_run_figures`."""
    colours = light_colours(comparison_style(results.comparison.coloured))
    return _write(comparison_figures(results), colours, kind, folder or results.comparison.folder / FOLDER)


def painted(plot: go.Figure, colours: Mapping[str, str]) -> go.Figure:
    """A copy of a figure for paper, with these colours by role; `tepalSave` in `report/script.py` does the same."""
    plot = type(plot)(plot)
    plot.frames = []  # the figure shows the last round
    ink = colours["ink"]
    for trace in plot.data:
        own = colours[trace.meta["role"]]
        if trace.type == "heatmap":
            trace.update(colorscale=[[0, colours["card"]], [1, own]], **PAPER["heatmap"])
        elif trace.meta.get("band"):
            trace.fillcolor = own
        elif trace.type == "bar":
            trace.marker.color = own
            trace.error_y.color = ink
        elif trace.meta.get("edges"):
            trace.line.color = own
        else:
            size = 6 if trace.marker.size is None else trace.marker.size
            trace.update(marker={"color": own, "size": size}, line={"color": own, "width": 2}, cliponaxis=False)
    for update in (plot.update_xaxes, plot.update_yaxes):
        update(gridcolor=colours["grid"], linecolor=colours["rule"], tickcolor=colours["rule"], layer="below traces")
    plot.update_shapes(line_color=colours["freeze"])
    plot.update_annotations(font_color=colours["freeze"])
    plot.update_layout(PAPER["layout"], font={"family": PAPER["font"], "size": PAPER["text"], "color": ink})
    named = sum(trace.showlegend is not False for trace in plot.data) if plot.layout.showlegend else 0
    if named > PAPER["many"]:
        plot.update_layout(legend=PAPER["legend"], height=plot.layout.height + PAPER["row"] * math.ceil(named / 2))
    return plot


def _write(drawn: Iterable[Figure], colours: Mapping[str, str], kind: str, folder: Path) -> list[Path]:
    if kind not in FORMATS:
        raise FiguresError(f"--figures {kind}: allowed are {', '.join(FORMATS)}")
    if importlib.util.find_spec("kaleido") is None:
        raise FiguresError(
            "--figures needs kaleido, which this Python does not have: pip install 'tepal[figures]'. " + _WITHOUT
        )
    plots = {figure.key: painted(figure.plot, colours) for figure in drawn if figure.plot is not None}
    if not plots:
        raise FiguresError("--figures: there are no figures yet, because no round has reported a score or bytes")
    images = asyncio.run(_images(list(plots.values()), kind))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for key, image in zip(plots, images, strict=True):
        written.append(folder / f"{key}.{kind}")
        write_whole(written[-1], image)
    return written


async def _images(plots: list[go.Figure], kind: str) -> list[bytes]:
    import kaleido
    from kaleido.errors import BrowserClosedError, BrowserFailedError, ChromeNotFoundError

    options = {"format": kind, "scale": PAPER["scale"] if kind == "png" else 1}
    try:
        # MathJax would be loaded from the network.
        async with kaleido.Kaleido(n=1, timeout=_SECONDS, mathjax=False) as browser:
            return [
                await browser.calc_fig(plot, opts={**options, "width": plot.layout.width, "height": plot.layout.height})
                for plot in plots
            ]
    except ChromeNotFoundError as error:
        raise FiguresError(
            "--figures needs Chrome or Chromium, which was not found on this machine: install one (apt-get install "
            "chromium), or name its program with BROWSER_PATH. " + _WITHOUT
        ) from error
    except (BrowserClosedError, BrowserFailedError, TimeoutError) as error:
        raise FiguresError(
            f"--figures: Chrome or Chromium failed ({type(error).__name__}): check that it starts, for instance with "
            f"`chromium --headless --version`. {_WITHOUT}"
        ) from error
