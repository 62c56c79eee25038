"""A figure of the dashboard and of a report is saved by its buttons: what a browser's folder of downloads gets.

What the files look like, tests/unit/tools/compare/test_figure_files.py sees.
"""

from xml.etree import ElementTree

import pytest
from PIL import Image

from tepal.report.run_page import write_report
from tests.browser import needs_browser
from tests.comparisons import leave_run
from tests.integration.test_browser import chromium, dashboard_of, opened, show_everything  # noqa: F401

pytestmark = [pytest.mark.long, pytest.mark.deployment, pytest.mark.browser, needs_browser]


def saved(page, key, kind, folder):
    """What is downloaded after a click on the figure's button, as a reader does it: first the pointer on the figure."""
    figure = page.locator(f".plot#{key}, #figure-{key} .plot")
    figure.scroll_into_view_if_needed()
    figure.hover()
    with page.expect_download() as download:
        figure.locator(f'[data-title^="Save as {kind.upper()}"]').click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


@pytest.mark.parametrize("where", ["dashboard", "report"])
def test_both_buttons_save_a_figure_on_white_where_colours_are_dark(where, tmp_path, chromium):  # noqa: F811
    run = leave_run(tmp_path / "runs", "fedfrozen")
    with dashboard_of(tmp_path / "runs") as address:
        file = write_report(run).as_uri()
        live = f"{address}run/{run.name}/"
        with opened(chromium, live if where == "dashboard" else file, scheme="dark") as page:
            show_everything(page)
            svg = saved(page, "accuracy-rounds", "svg", tmp_path)
            png = saved(page, "bytes-total", "png", tmp_path)
    assert (svg.name, png.name) == (f"{run.name}-accuracy-rounds.svg", f"{run.name}-bytes-total.png")
    root = ElementTree.parse(svg).getroot()
    assert (root.get("width"), root.get("height")) == ("504", "340")
    assert "fill: rgb(255, 255, 255)" in root[0].get("style")
    with Image.open(png) as image:
        assert image.size == (4 * 504, 4 * 340) and image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
