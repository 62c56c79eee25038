"""Dashboard and report in a real browser: a run on the loopback that is followed, every method's views, small screens,
keyboard, names for screen readers, and no request to anywhere else.

Screenshots are left in `build/screenshots/`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tepal.client_app.app import app
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tests.browser import FLAGS, browser, needs_browser
from tests.comparisons import comparison_in, finish
from tests.lines import read_lines
from tests.packages import ROOT

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.long, pytest.mark.deployment, pytest.mark.browser, needs_browser]

SCREENSHOTS = ROOT / "build" / "screenshots"
SIZES = {"phone": (390, 844), "desk": (1600, 1000)}
METHODS = {
    "fedfrozen": {"drift"},
    "selective": {"layers-rounds", "layers-clients"},
    "fedensemble": {"modes", "diversity"},
    "fedacs": {"alike", "weights", "graph", "mixed"},
}
USUAL = {"accuracy-rounds", "accuracy-bytes", "loss-rounds", "loss-bytes", "bytes-rounds", "bytes-total", "labels",
         "travel-down", "travel-up"}  # fmt: skip


@contextmanager
def dashboard_of(folder: Path) -> Iterator[str]:
    """The address of a real `tepal dashboard`."""
    command = [sys.executable, "-m", "tepal.tools.cli.main", "dashboard", str(folder), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as api:
        program = api.chromium.launch(executable_path=browser(), args=FLAGS)
        yield program
        program.close()


@contextmanager
def opened(chromium, address, size="desk", scheme="light", first=""):
    """A page, and what it asked for; nothing may be asked of another place, and no script may fail.

    `first`: a script that runs before the page's own.
    """
    width, height = SIZES[size]
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, asked, failed = context.new_page(), [], []
    page.add_init_script(first)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("console", lambda message: failed.append(message.text) if message.type == "error" else None)
    page.goto(address)
    yield page
    here = address.split("/run/")[0] if address.startswith("http") else address
    assert all(url.startswith((here, "data:", "blob:")) for url in asked), asked
    assert failed == []
    context.close()


def until(page, holds, seconds=15.0):
    """Wait for an expression of JavaScript; playwright's own way needs `eval`, which the pages forbid."""
    end = time.monotonic() + seconds
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        time.sleep(0.02)


def tab_to(page, text, most=20):
    """Press Tab until what has this text has the focus."""
    passed = []
    while text not in passed:
        assert len(passed) < most, passed
        page.keyboard.press("Tab")
        passed.append(page.evaluate("document.activeElement.textContent"))


def show_everything(page):
    """Scroll through the page, so that every figure is drawn."""
    for _ in range(60):
        page.mouse.wheel(0, 500)
        page.wait_for_timeout(40)
        if page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 2"):
            break
    until(page, "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.main-svg'))")
    page.evaluate("scrollTo(0, 0)")


def assert_usable(page, name):
    """Nothing is wider than the screen, and axe finds nothing serious."""
    from axe_playwright_python.sync_playwright import Axe

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    found = Axe().run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in serious] == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Three rounds of each method, with the project's own app; strategy → its run directory."""
    folder, done = tmp_path_factory.mktemp("browser"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEPAL_CACHE", str(folder / "cache"))
        for strategy in METHODS:
            config = {
                **defaults(), "strategy": strategy, "dataset": "digits", "model": "tiny-vit", "num-server-rounds": 3,
                "min-clients": 4, "local-steps": 2, "fedfrozen.warmup-rounds": 1, "runs": str(folder / "runs"),
            }  # fmt: skip
            nodes = [Node(app, {"partition-id": k, "num-partitions": 4}) for k in range(4)]
            done[strategy] = run(InProcessGrid(nodes, config), config)
    return done


@pytest.fixture(scope="module")
def address(runs):
    with dashboard_of(runs["fedacs"].parent) as address:
        yield address


# --- a run that goes on ---------------------------------------------------------------------------------------------


def test_the_dashboard_follows_a_real_run_without_reload(chromium, tmp_path):
    """`tepal loopback`: the run appears in the list, its rounds and clients come as they end, and it is finished."""
    folder, rounds = tmp_path / "runs", 6
    folder.mkdir()
    config = f'num-server-rounds={rounds} fedfrozen.warmup-rounds=2 local-epochs=1 min-clients=3 runs="{folder}"'
    command = [sys.executable, "-m", "tepal.tools.cli.main", "loopback", str(ROOT), "--clients", "3", "-c", config]
    with dashboard_of(folder) as address, opened(chromium, address) as page:
        assert "has no runs yet" in page.inner_text("main")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEPAL_CACHE": str(tmp_path / "cache")}
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            page.wait_for_selector("tbody a", timeout=180_000)
            page.evaluate("window.sameDocument = true")
            assert "running" in page.inner_text("tbody")
            name = page.inner_text("tbody a")
            page.click("tbody a")
            page.evaluate("window.sameDocument = true")
            [directory] = [path for path in folder.iterdir() if path.name == name]
            seen: dict[str, set] = {"rounds": set(), "states": set(), "diagram": set()}
            delays: list[float] = []
            known = len(read_lines(directory))
            end = time.monotonic() + 180
            while "finished" not in page.inner_text(".state"):
                assert time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
                state = page.inner_text(".state p")
                seen["rounds"].add(int(re.search(r"(\d+) of 6 rounds", state)[1]) if "rounds" in state else -1)
                seen["states"] |= set(page.locator("#client-table .chip").all_inner_texts())
                seen["diagram"] |= {len(page.locator(".diagram td.still").all())}
                lines = read_lines(directory)
                if len(lines) > known:  # a round has ended: how long until the page says so?
                    known, ended = len(lines), time.monotonic()
                    number = lines[-1]["round"]
                    until(page, f"+document.querySelector('.state p').innerText.match(/(\\d+) of/)[1] >= {number}")
                    delays.append(time.monotonic() - ended)
                time.sleep(0.05)
            assert process.wait(120) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 15)
                process.wait(60)
        assert page.evaluate("window.sameDocument"), "the page was never loaded anew"
        assert seen["rounds"] >= {rounds - 1} and len(seen["rounds"]) >= 3, seen
        assert {"training", "replied"} <= seen["states"]
        assert {0, 1} <= seen["diagram"], "at first nothing is frozen, then the cell of both layers' query and key is"
        print(f"a round is on the page {max(delays):.2f} s after its line, at most; seen {seen}")
        lines = read_lines(directory)
        until(page, f"document.querySelectorAll('[data-part=rounds] tbody tr').length === {len(lines)}")
        rows = "[...document.querySelectorAll('[data-part=rounds] tbody tr')]"
        shown = page.evaluate(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))")
        assert [int(row[0]) for row in shown] == [line["round"] for line in lines]
        assert all(f"{line['accuracy']:.4f}" in row for row, line in zip(shown, lines, strict=True))
        show_everything(page)
        curve = page.evaluate("document.querySelector('#figure-accuracy-rounds .plot').data[0].y")
        assert curve == pytest.approx([line["accuracy"] for line in lines])
        assert_usable(page, "after-a-run")


# --- every view -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", METHODS)
def test_every_view_of_a_method_is_drawn_from_its_data(chromium, address, runs, strategy, size):
    scheme = "dark" if size == "phone" else "light"
    with opened(chromium, f"{address}run/{runs[strategy].name}/", size, scheme) as page:
        page.wait_for_selector("#clients tbody tr")
        page.wait_for_selector("#figure-travel-up", state="attached")
        show_everything(page)
        drawn = {each.get_attribute("id").removeprefix("figure-") for each in page.locator("figure").all()}
        assert drawn >= USUAL | METHODS[strategy]
        cells = page.locator(".diagram td:not(:empty)")
        frozen = 1 if strategy == "fedfrozen" else 0  # one cell stands for both layers
        if strategy != "selective":
            assert page.locator(".diagram td.still").count() == frozen
        assert cells.count() >= 5 and page.locator("#client-table tbody tr").count() == 4
        assert_usable(page, f"{strategy}-{size}")


@pytest.mark.parametrize("size", SIZES)
def test_the_list_of_runs_is_usable_by_keyboard_alone(chromium, address, runs, size):
    with opened(chromium, address, size) as page:
        assert_usable(page, f"runs-{size}")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "filter"
        page.keyboard.type("ensemble")
        assert page.locator("tbody tr:visible").count() == 1
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/run/{runs['fedensemble'].name}/")
        page.wait_for_selector("#clients tbody tr")
        tab_to(page, "Clients")  # of the page's sections
        page.keyboard.press("Enter")
        tab_to(page, "examples")
        page.keyboard.press("Enter")
        assert page.get_attribute("th:has(button:focus)", "aria-sort") == "ascending"
        column = page.locator("#client-table tbody tr td:nth-child(3)").all_inner_texts()
        assert column == sorted(column, key=int)


def test_the_rounds_of_a_mixture_can_be_stepped_through(chromium, address, runs):
    with opened(chromium, f"{address}run/{runs['fedacs'].name}/") as page:
        page.wait_for_selector("#figure-weights", state="attached")
        show_everything(page)
        chosen = page.locator("#figure-weights input[type=range]")
        assert page.locator("#figure-weights output").inner_text() == "3"
        before = page.evaluate("JSON.stringify(document.querySelector('#figure-weights .plot').data[0].z)")
        chosen.focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#figure-weights output").inner_text() == "2"
        until(page, f"JSON.stringify(document.querySelector('#figure-weights .plot').data[0].z) !== {before!r}")
        assert chosen.get_attribute("aria-valuetext") == "round 2"


DRAWN = "[...document.querySelectorAll('.plot')].filter(plot => plot.querySelector('.main-svg')).length"


def test_a_copy_of_the_whole_page_has_every_figure(chromium, address, runs, tmp_path):
    """In the dashboard without scrolling, and in a report: as a picture of the page and as a PDF."""
    below = "[...document.querySelectorAll('.plot')].some(plot => plot.getBoundingClientRect().top > 2 * innerHeight)"
    for url in (f"{address}run/{runs['fedacs'].name}/", (runs["fedacs"] / "report.html").as_uri()):
        with opened(chromium, url) as page:
            page.wait_for_selector("#figure-weights .plot, .plot#weights", state="attached")
            assert page.evaluate(below)
            until(page, f"{DRAWN} === document.querySelectorAll('.plot').length")
            assert page.evaluate("scrollY") == 0
            page.screenshot(path=tmp_path / "whole.png", full_page=True)
            page.pdf(path=tmp_path / "whole.pdf")
            assert page.evaluate(f"{DRAWN} === document.querySelectorAll('.plot').length")


def test_printing_draws_what_is_out_of_sight_at_once(chromium, address, runs):
    """Also in a browser that has always something else to do."""
    url, never_idle = f"{address}run/{runs['fedacs'].name}/", "window.requestIdleCallback = () => {}"
    with opened(chromium, url, first=never_idle) as page:
        page.wait_for_selector("#figure-travel-up .plot", state="attached")
        until(page, f"{DRAWN} > 0 && document.querySelectorAll('#figure-accuracy-rounds .main-svg').length > 0")
        count, before, after = page.evaluate(
            f"[document.querySelectorAll('.plot').length, {DRAWN}, (dispatchEvent(new Event('beforeprint')), {DRAWN})]"
        )
        assert before < after == count


# --- files that open from disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", METHODS)
def test_a_report_opens_from_disk(chromium, runs, strategy, size):
    with opened(chromium, (runs[strategy] / "report.html").as_uri(), size) as page:
        show_everything(page)
        drawn = {each.get_attribute("id") for each in page.locator(".plot").all()}
        assert drawn >= (USUAL | METHODS[strategy]) - {"loss-rounds", "loss-bytes"}
        assert_usable(page, f"report-{strategy}-{size}")


@pytest.mark.parametrize("size", SIZES)
def test_a_comparison_opens_from_disk_and_in_the_dashboard(chromium, address, runs, size):
    folder = runs["fedacs"].parent / "20260101-000000-comparison"
    if not folder.exists():
        folder.mkdir()
        finish(comparison_in(folder, ["fedavg", "fedfrozen", "selective", "fedensemble", "fedacs"]))
    for where, url in (("disk", (folder / "comparison.html").as_uri()), ("dashboard", f"{address}run/{folder.name}/")):
        with opened(chromium, url, size) as page:
            show_everything(page)
            assert_usable(page, f"comparison-{where}-{size}")


def test_the_benchmark_of_the_dashboard_can_be_run(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/dashboard.py"), "--quick", "--json", str(tmp_path / "figures")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures").read_text())["figures"]
    assert figures["list"]["first paint"][0] > 0 and figures["list"]["all runs"][0] > 0
    assert figures["large run"]["everything"][0] > 0 and all(seconds > 0 for seconds in figures["update"])
