"""The picture of sections that ask questions: bars whose lengths are their values, and texts that fit."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from PIL import ImageFont

from tepal.tools.compare.bars import BESIDE, FULL, WIDTH, draw_bars, length, picture_of
from tepal.tools.compare.comparison import measure
from tepal.tools.compare.page import figures
from tests.comparisons import comparison_in, finish, variants_in

SVG = "{http://www.w3.org/2000/svg}"
SECTIONS = [
    ("Fewer bytes, one model", "bytes", {"FedAvg": "fedavg", "frozen": "fedfrozen", "modes": "fedensemble"},
     {"within": 0.1, "baseline": "FedAvg"}),
    ("Own <models> & more", "own-tests", {"one-for-all": "fedavg", "own": "fedacs", "n" * 64: "selective"}, {}),
    ("Doubt", "doubt", {"single": "fedavg", "several": "fedensemble"}, {}),
    ("No question", "", {"a": "fedavg", "b": "selective"}, {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def svg(tmp_path_factory):
    comparison = finish(variants_in(tmp_path_factory.mktemp("bars"), SECTIONS))
    return ET.parse(comparison.folder / "comparison.svg").getroot()


def bars_of(svg):
    """(name, value, length or None) from top to bottom, as a reader puts them together by their places."""
    texts = [(float(text.get("y")), text.get("class"), text.text) for text in svg.iter(f"{SVG}text")]
    names, values = ([(y, text) for y, kind, text in texts if kind == wanted] for wanted in ("name", "value"))
    lengths = {rect.get("y"): float(rect.get("width")) for rect in svg.iter(f"{SVG}rect") if "bar" in rect.get("class")}
    tracks = [rect.get("y") for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "track"]
    return [(name, value, lengths.get(y)) for (_, name), (_, value), y in zip(names, values, tracks, strict=True)]


def test_a_bar_is_as_long_as_its_value(svg):
    found = bars_of(svg)
    # FedAvg's 0.8 less 0.1 is reached by itself after two rounds of 20 MB, by FedFrozen after two of 14, and never by
    # Fed-ensemble.
    assert found[:3] == [
        ("FedAvg", "40.0 MB", pytest.approx(FULL)),
        ("frozen", "28.0 MB", pytest.approx(FULL * 28 / 40)),
        ("modes", "does not reach it", None),
    ]
    assert found[3:6] == [
        ("one-for-all", "0.7500", pytest.approx(0.75 * FULL)),
        ("own", "0.9000", pytest.approx(0.9 * FULL)),
        ("n" * 64, "0.6500", pytest.approx(0.65 * FULL)),
    ]
    # Short names and values stand beside their bars.
    assert found[6:] == [("a", "0.8000", pytest.approx(0.8 * BESIDE)), ("b", "0.7000", pytest.approx(0.7 * BESIDE))]


def test_the_baselines_bars_are_of_another_colour(svg):
    kinds = [rect.get("class") for rect in svg.iter(f"{SVG}rect") if "bar" in rect.get("class")]
    assert kinds == ["bar base", "bar other", "bar base", "bar other", "bar other", "bar other", "bar other"]


def test_each_panel_has_its_title_above_and_its_answer_below(svg):
    texts = [("".join(text.itertext()), text.get("class")) for text in svg.iter(f"{SVG}text")]
    heads = [text for text, kind in texts if kind == "head"]
    assert heads == [title for title, *_ in SECTIONS]
    whole = " ".join(text for text, kind in texts if kind == "answer")
    assert "FedAvg's final accuracy less 10 points (0.7000) is reached with 28.0 MB by frozen; FedAvg needs" in whole
    assert "The highest accuracy on the clients' own tests is that of own: 0.9000" in whole
    assert "flagged images were not measured" in whole
    spoken = svg.find(f"{SVG}desc").text
    assert "frozen 28.0 MB" in spoken and "is reached with 28.0 MB by frozen" in spoken


def test_no_text_leaves_the_picture_or_covers_another(svg):
    font = {size: ImageFont.load_default(size) for size in (16, 19)}
    lines = [
        (float(text.get("x")), float(text.get("y")), text.text, text.get("class"), text.get("text-anchor") == "end")
        for text in svg.iter(f"{SVG}text")
    ]
    spans = {}
    for x, y, text, kind, end in lines:
        width = font[19 if kind == "head" else 16].getlength(text)
        left, right = (x - width, x) if end else (x, x + width)
        if text != "n" * 64:
            assert left >= 0 and right <= WIDTH, text
        spans.setdefault(y, []).append((left, right))
    for rect in svg.iter(f"{SVG}rect"):
        left, bottom = float(rect.get("x") or 0), float(rect.get("y") or 0) + float(rect.get("height"))
        if rect.get("class") == "track" and bottom in spans:  # beside its name and its value
            spans[bottom].append((left, left + float(rect.get("width"))))
    for on_line in spans.values():
        assert all(before[1] < after[0] for before, after in pairwise(sorted(on_line)))
    assert min(after - before for before, after in pairwise(sorted(spans))) >= 18
    assert max(spans) < float(svg.get("height"))
    # Letters on a phone of 390 pixels, where the picture is as wide as the screen.
    assert 16 * 390 / WIDTH >= 11


def test_the_picture_follows_light_and_dark_and_loads_nothing(tmp_path):
    comparison = finish(variants_in(tmp_path, SECTIONS[:1]))
    text = (comparison.folder / "comparison.svg").read_text()
    assert "prefers-color-scheme:dark" in text and not re.search(r"url\(|@import|<script|<image", text)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_several_seeds_have_their_deviation_and_what_is_undecided(tmp_path):
    results = measure(finish(variants_in(tmp_path, SECTIONS[1:2], (1, 2, 3)), {1: 0.0, 2: 0.02, 3: 0.04}.get))
    found = bars_of(ET.fromstring(draw_bars(results)))
    assert found[0][1] == "0.7700 ± 0.0200" and "undecided" not in found[1][1]
    results = measure(finish(variants_in(tmp_path, [("x", "own-tests", {"a": "fedavg", "b": "ditto"}, {})], (1, 2, 3))))
    found = bars_of(ET.fromstring(draw_bars(results)))
    assert found[1][1] == "0.7500 ± 0.0000, undecided"


def test_a_picture_without_results_has_no_bars(tmp_path):
    svg = ET.fromstring(draw_bars(measure(variants_in(tmp_path, SECTIONS))))
    assert {(value, pixels) for _, value, pixels in bars_of(svg)} == {("no result yet", None)}


def test_the_page_of_a_question_leaves_out_figures_without_data(tmp_path):
    asked, plain = (figures(measure(variants_in(tmp_path, sections))) for sections in (SECTIONS[:1], SECTIONS[3:]))
    assert asked == [] and [figure.plot for figure in plain] == [None] * 3
    drawn = figures(measure(finish(variants_in(tmp_path, SECTIONS[:2]))))
    assert all(figure.plot is not None for figure in drawn) and len(drawn) == 6


def test_without_a_question_the_picture_has_curves(tmp_path):
    plain = measure(variants_in(tmp_path, SECTIONS[3:]))
    assert "transferred, down and up" in picture_of(plain)
    assert "transferred, down and up" in picture_of(measure(comparison_in(tmp_path, ["fedavg"])))


@pytest.mark.parametrize(
    ("value", "end", "expected"),
    [(0, 1, 0), (1, 2, FULL / 2), (3, 2, FULL), (-1, 2, 0), (1, 0, 0), (1e300, 1e300, FULL)],
)
def test_a_length_is_linear_and_within_its_scale(value, end, expected):
    assert length(value, end) == pytest.approx(expected)
