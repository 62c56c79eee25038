"""Figures as files for papers: those that `tepal report --figures` writes, and those that a page saves."""

import base64
import html
import importlib.util
import re
import shutil
import subprocess
import urllib.parse
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest
from PIL import Image
from typer.testing import CliRunner

from tepal.records.run_directory import RunDirectory
from tepal.report.page import Figure, empty_plot, figure_html, page
from tepal.report.run_page import write_report
from tepal.report.script import PAPER
from tepal.report.style import light_colours
from tepal.tools.cli.main import main
from tepal.tools.compare import figure_files
from tepal.tools.compare.figure_files import FiguresError, painted, write_run_figures
from tests.browser import browser, needs_browser
from tests.comparisons import comparison_in, finish, leave_run

KALEIDO = importlib.util.find_spec("kaleido") is not None
SVG = "{http://www.w3.org/2000/svg}"

needs_kaleido = pytest.mark.skipif(not KALEIDO, reason="pip install 'tepal[figures]'")


@pytest.fixture
def run(tmp_path):
    run = leave_run(tmp_path / "runs", "fedfrozen")
    RunDirectory.resume(run).add_label_counts({"client-1": (3.0, 1.0), "client-2": (0.0, 8.0)})
    return run


KEYS = ["accuracy-rounds", "accuracy-bytes", "bytes-rounds", "bytes-total", "labels"]


def report(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def colours_in(svg):
    return set(re.findall(r"(?:fill|stroke): ?(rgba?\([^)]*\))", svg))


def words_in(svg):
    return sorted("".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text"))


def saved_by_the_page(file, folder):
    """Format → (file name, content) of all that a page's buttons save, in a browser whose colours are dark.

    Where there are rounds to choose from, the first is chosen.
    """
    probe = """<script>
      Plotly.downloadImage = (figure, options) => Plotly.toImage(figure, options).then(url => {
        const told = document.createElement('p');
        Object.assign(told.dataset, {saved: options.filename, format: options.format, url,
                                     dark: matchMedia('(prefers-color-scheme: dark)').matches});
        document.body.append(told);
      });
      for (const input of document.querySelectorAll('label.rounds input')) input.value = 0;
      for (const button of document.querySelectorAll('[data-title^="Save as"]'))
        button.dispatchEvent(new MouseEvent('click', {bubbles: true}));
    </script></body>"""
    (folder / "probe.html").write_text(file.read_text().replace("</body>", probe))
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--blink-settings=preferredColorScheme=0",
               f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=20000",
               "--dump-dom", (folder / "probe.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    saved = {}
    for tag in re.findall(r"<p data-saved=[^>]*>", done.stdout):
        told = {name: html.unescape(value) for name, value in re.findall(r'data-(\w+)="([^"]*)"', tag)}
        assert told["dark"] == "true"
        head, _, content = told["url"].partition(",")
        read = base64.b64decode(content) if "base64" in head else urllib.parse.unquote(content).encode()
        saved.setdefault(told["format"], []).append((told["saved"], read))
    return saved


# By kaleido ---------------------------------------------------------------------------------------------------------


@needs_kaleido
@needs_browser
@pytest.mark.browser
@pytest.mark.long
def test_the_figures_of_a_run_are_files_of_the_size_and_colours_for_a_paper(run, tmp_path):
    done = report(run, "--figures", "png", "--output", tmp_path / "for" / "paper")
    assert done.exit_code == 0, done.output
    written = [tmp_path / "for" / "paper" / f"{key}.png" for key in KEYS]
    assert done.output.split() == list(map(str, written)) and sorted(written) == sorted(written[0].parent.iterdir())
    for path in written:
        with Image.open(path) as image:
            assert image.format == "PNG" and image.size == (4 * 504, 4 * 340)
            pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
        assert (pixels == 255).all(axis=1).mean() > 0.3 and pixels.min(axis=0).max() < 0x30, "dark text on white"
    done = report(run, "--figures", "pdf")
    assert [line.rpartition("/")[2] for line in done.output.split()] == [f"{key}.pdf" for key in KEYS]
    assert all((run / "figures" / f"{key}.pdf").read_bytes().startswith(b"%PDF-") for key in KEYS)


@needs_kaleido
@needs_browser
@pytest.mark.browser
@pytest.mark.long
def test_what_a_page_saves_is_what_the_command_writes(tmp_path):
    """Of a comparison, whose page has colours of its own and a legend of many; the reader's colours are dark."""
    folder = tmp_path / "20261122-101500-compare"
    folder.mkdir()
    comparison = finish(comparison_in(folder, ["fedavg", "fedfrozen", "selective", "fedacs"], [1, 2]))
    done = report(comparison.folder, "--figures", "svg")
    assert done.exit_code == 0, done.output
    written = {path.stem: path.read_text() for path in (folder / "figures").iterdir()}
    assert set(written) == {"accuracy-rounds", "accuracy-bytes", "own-tests"}
    saved = saved_by_the_page(folder / "comparison.html", tmp_path)
    assert {kind: [name for name, _ in each] for kind, each in saved.items()} == {
        kind: [f"{folder.name}-{key}" for key in ("accuracy-rounds", "accuracy-bytes", "own-tests")]
        for kind in ("svg", "png")
    }
    for name, content in saved["svg"]:
        ours, theirs = written[name.removeprefix(f"{folder.name}-")], content.decode()
        root = ElementTree.fromstring(ours)
        high = 340 if "own" in name else 340 + 2 * PAPER["row"]
        assert root.tag == f"{SVG}svg" and (root.get("width"), root.get("height")) == ("504", str(high))
        assert re.match(r"<svg[^>]*><rect[^>]*fill: rgb\(255, 255, 255\)", theirs)
        assert colours_in(ours) == colours_in(theirs) and words_in(ours) == words_in(theirs)
    for name, content in saved["png"]:
        (tmp_path / "saved.png").write_bytes(content)
        with Image.open(tmp_path / "saved.png") as image:
            assert image.size[0] == 4 * 504, name


@needs_browser
@pytest.mark.browser
@pytest.mark.long
def test_a_report_saves_all_its_figures(run, tmp_path):
    saved = saved_by_the_page(write_report(run), tmp_path)
    assert {kind: [name for name, _ in each] for kind, each in saved.items()} == {
        kind: [f"{run.name}-{key}" for key in KEYS] for kind in ("svg", "png")
    }


@needs_browser
@pytest.mark.browser
@pytest.mark.long
def test_of_a_figure_with_rounds_the_one_that_the_reader_chose_is_saved(tmp_path):
    plot = empty_plot("of the last round", "")
    plot.add_scatter(x=[1], y=[1], text=["last"], mode="markers+text", meta={"role": "main"})
    plot.frames = [go.Frame(data=[go.Scatter(text=[text])], name=str(k)) for k, text in enumerate(["first", "last"])]
    figure = Figure("chosen", "Chosen", "", plot)
    (tmp_path / "page.html").write_text(page("A page", f"<h1>a run</h1>{figure_html(figure)}", [figure]))
    [(name, content)] = saved_by_the_page(tmp_path / "page.html", tmp_path)["svg"]
    assert name == "a run-chosen" and "first" in words_in(content) and "last" not in words_in(content)


# What is painted ----------------------------------------------------------------------------------------------------


def test_the_colours_are_those_of_the_pages_style_sheet_for_a_light_background():
    dark = "@media (prefers-color-scheme: dark) { :root { --s-own: #fff; } }"
    colours = light_colours(f":root {{ --s-own: #010203; }}\n{dark}")
    assert colours["s-own"] == "#010203" and colours["ink"] == "#1d1b20" and colours["card"] == "#ffffff"
    plot = empty_plot("x", "y")
    plot.add_scatter(x=[1], y=[1], meta={"role": "s-own"})
    plot.add_bar(x=[1], y=[1], meta={"role": "main"}, error_y={"array": [1]})
    plot.add_heatmap(z=[[1]], meta={"role": "second"})
    before = plot.to_json()
    paper = painted(plot, colours)
    assert plot.to_json() == before, "the report's own is left as it is"
    line, bar, heat = paper.data
    assert line.line.color == line.marker.color == "#010203" and bar.marker.color == colours["main"]
    assert bar.error_y.color == paper.layout.font.color == colours["ink"]
    assert heat.colorscale[1] == (1, colours["second"]) and heat.showscale
    assert paper.layout.paper_bgcolor == "white"
    assert isinstance(paper, go.Figure) and (paper.layout.width, paper.layout.height) == (504, 340)


# What is wrong ------------------------------------------------------------------------------------------------------


def test_without_kaleido_it_is_said_what_to_install_and_what_works_without(run, monkeypatch):
    monkeypatch.setattr(figure_files.importlib.util, "find_spec", lambda name: None)
    done = report(run, "--figures", "svg")
    assert done.exit_code == 1 and not (run / "figures").exists()
    assert "pip install 'tepal[figures]'" in done.output and "report.html and comparison.html save" in done.output


@needs_kaleido
def test_without_a_browser_it_is_said_what_to_install_and_what_works_without(run, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    with pytest.raises(FiguresError, match=r"needs Chrome or Chromium, .*apt-get install chromium.*report\.html"):
        write_run_figures(run, "svg")
    assert not (run / "figures").exists()


@needs_kaleido
def test_a_browser_that_does_not_start_is_said(run, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", shutil.which("false"))
    with pytest.raises(FiguresError, match=r"Chromium failed .BrowserFailedError.: check that it starts"):
        write_run_figures(run, "svg")


@needs_kaleido
def test_a_run_without_a_round_has_nothing_to_draw(tmp_path):
    run = RunDirectory.create(tmp_path, "fedavg", {"strategy": "fedavg"})
    with pytest.raises(FiguresError, match="there are no figures yet"):
        write_run_figures(run.path, "svg")


def test_another_format_and_a_folder_without_one_are_refused(run, tmp_path):
    with pytest.raises(FiguresError, match="--figures gif: allowed are svg, png, pdf"):
        write_run_figures(run, "gif")
    done = report(run, "--output", tmp_path / "elsewhere")
    assert done.exit_code == 1 and "give their format with --figures" in done.output
    assert not (run / "report.html").exists()
