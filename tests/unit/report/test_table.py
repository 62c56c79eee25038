"""A table in its four formats, each read back by another program than the one that wrote it, where there is one."""

import csv
import io
import re
from html import escape
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tepal.records.columns import Column
from tepal.report.table import Table
from tepal.report.templates import render

NASTY = "a|b & c < d > 5 % of x_y \\ {$#~^} *[1] `q` \"it's\""
# Marks and characters that show nothing may become escapes: they have tests of their own, of `visible`.
SHOWN = st.characters(
    codec="utf-8", exclude_categories=("C", "M", "Zl", "Zp", "Zs"),
    exclude_characters="\u115f\u1160\u2800\u3164\uffa0\U0001d159",
)  # fmt: skip
TEXT = st.text(SHOWN | st.just(" "))
# What a reader of a page sees: without space around it, and no space twice. The first letter makes it a value.
WORDS = TEXT.map(lambda text: " ".join(f"v{text}".split()))


@st.composite
def tables(draw, cells=WORDS):
    width = draw(st.integers(1, 4))
    titles = draw(st.lists(cells, min_size=width, max_size=width))
    rows = draw(st.lists(st.lists(cells, min_size=width, max_size=width), max_size=4))
    return Table(draw(WORDS), [Column(title, left=draw(st.booleans())) for title in titles], rows)


def content(table):
    return [[column.heading for column in table.columns], *table.rows]


ONE = Table(NASTY, [Column(NASTY), Column("n", left=True)], [[NASTY, "1"], ["v", NASTY]])


@given(tables())
@example(ONE)
@example(Table("", [Column("a"), Column("b")], [['",', ""], ["", "1-2=3"]]))
def test_csv_is_read_back_as_it_was(table):
    assert list(csv.reader(io.StringIO(table.csv(), newline=""))) == content(table)


@given(tables(st.text()))
@example(Table("", [Column("a")], [["a\nb"], ["\r"], ["\x1b[2J"], ["\0"], ["\u202e"], ["\ud800"], ["x" * 10_000]]))
def test_in_every_format_a_row_is_one_line_of_visible_characters(table):
    around = {"csv": 1, "markdown": 2, "latex": 6}  # lines that are no rows
    for form, lines in around.items():
        text = getattr(table, form)().removesuffix("\n")
        assert text.count("\n") == len(table.rows) + lines - 1 and text.replace("\n", "").isprintable()
        text.encode()
    page = str(table.html())
    page.encode()
    assert page.replace("\n", "").isprintable() and page.count("<tr>") == len(table.rows) + 1


FORMULAS = ["=cmd()|' /C calc'!A0", "+1", "-2+3", "@SUM(1)", "＝1", "=HYPERLINK(\"https://evil.example\")"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_text_of_csv_is_no_formula_and_a_number_is_a_number(text):
    table = Table("", [Column(text), Column("n")], [[text, -2.5], ["a=b", -3]])
    head, first, second = csv.reader(io.StringIO(table.csv(), newline=""))
    assert head[0] == first[0] == f"'{text}" and first[1] == "-2.5" and second == ["a=b", "-3"]


@pytest.mark.parametrize("text", [" =1", "   =cmd()", "\t=1", "\u3164=1"])
def test_nothing_that_a_spreadsheet_skips_comes_before_a_formula(text):
    [[cell]] = list(csv.reader(io.StringIO(Table("", [Column("a")], [[text]]).csv(), newline="")))[1:]
    assert cell.startswith("\\") and cell.endswith(text[-2:])


@pytest.mark.parametrize(
    "text", ["https://evil.example/x", "HTTP://evil.example", "see www.evil.example", "[a](http://b)", "![a](b)",
             "a | b", "ftp://evil.example", "<https://evil.example>"],
)  # fmt: skip
def test_markdown_makes_no_link_of_a_text(text):
    written = Table("", [Column("a")], [[text]]).markdown()
    assert not re.search(r"(?i)(https?|ftp)://|www\.", written)  # which GitHub makes a link of
    rendered = MarkdownIt().enable("table").render(written)
    assert "<a" not in rendered and "<img" not in rendered and f">{escape(text)}</td>" in rendered


class Texts(HTMLParser):
    """The texts of a page between its tags, in which GitHub looks for users, addresses and issues."""

    def __init__(self, page):
        super().__init__()
        self.texts = []
        self.feed(page)
        self.close()

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize(
    "text", ["@torvalds", "by @a/b.", "#1", "see (#123)", "torvalds/linux#1", "GH-1", "gh-22", "me@evil.example",
             "a.b@c.d", "mailto:me@evil.example", "torvalds/linux@0123456", "site-1@42"],
)  # fmt: skip
def test_markdown_names_no_user_address_or_issue(text):
    texts = Texts(MarkdownIt().enable("table").render(Table("", [Column("a")], [[text]]).markdown())).texts
    assert text in "".join(texts)
    assert not any(re.search(r"(?i)\w@|@\w|#[0-9]|\bgh-[0-9]", each) for each in texts)


def test_markdown_shows_other_uses_of_these_characters_as_they_are():
    lines = Table("", [Column("# of clients")], [["C#, -1"]]).markdown().splitlines()
    assert lines[::2] == ["| # of clients |", "| C#, -1 |"]


@pytest.mark.parametrize(
    "text", ["\\input{/etc/passwd}", "\\write18{id}", "^^5cinput{x}", "a \\\\ b & c", "%", "$x$", "~", "#1"]
)
def test_a_text_of_latex_is_no_command(text):
    row = Table("", [Column("a")], [[text]]).latex().split("\n")[4]
    left = re.sub(r"\\(text\w+\{\}|[&%$#_{}])", "", row.removesuffix(r" \\"))
    assert not set("\\%$&#~^_") & set(left)


def test_a_long_text_is_cut_in_every_format():
    table = Table("", [Column("a")], [["x" * 100_000]])
    for form in ("csv", "markdown", "latex", "html"):
        assert len(str(getattr(table, form)())) < 3000


def test_csv_has_keys_and_unrounded_values_and_nothing_for_what_is_not_known():
    columns = [Column("accuracy", "server_accuracy", text="{:.2f}".format), Column("time", unit="s")]
    table = Table.of("", columns, [{"server_accuracy": 1 / 3}, {"": 2, "server_accuracy": None}])
    assert table.csv() == f"server_accuracy,time (s)\n{1 / 3},\n,2\n"
    assert table.markdown().splitlines()[2:] == ["| 0.33 | – |", "| – | 2 |"]


class Cells(HTMLParser):
    """A page's cells as a browser reads them."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.aligned, self.tags, self.label = [], [], set(), None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attributes = dict(attrs)
        self.label = attributes.get("aria-label", self.label)
        if tag == "tr":
            self.rows.append([])
            self.aligned.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.aligned[-1].append("left" if attributes.get("class") is None else attributes["class"])

    def handle_data(self, data):
        if self.rows and self.rows[-1] and data.strip("\n"):
            self.rows[-1][-1] += data


@given(tables())
@example(ONE)
def test_html_shows_every_cell_as_text(table):
    page = Cells(str(table.html()))
    assert page.rows == content(table) and page.label == table.title
    assert page.tags == {"div", "table", "thead", "tbody", "tr", "th"} | ({"td"} if table.rows else set())
    aligned = ["left" if column.left else "number" for column in table.columns]
    assert page.aligned == [aligned] * len(page.rows)


@given(tables())
@example(ONE)
def test_markdown_is_one_table_whose_cells_are_text(table):
    tokens = MarkdownIt().enable("table").parse(table.markdown())
    cells = [token for token in tokens if token.type == "inline"]
    assert tokens[0].type == "table_open" and tokens[-1].type == "table_close"
    assert {child.type for cell in cells for child in cell.children} <= {"text", "text_special", "html_inline"}
    elements = [child.content for cell in cells for child in cell.children if child.type == "html_inline"]
    assert set(elements) <= {"<span>", "</span>"}
    for cell in cells:
        cell.children = [child for child in cell.children if child.type != "html_inline"]
    read = ["".join(child.content for child in cell.children) for cell in cells]
    assert read == [cell for row in content(table) for cell in row]


LATEX = {
    r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"\textless{}": "<",
    r"\textgreater{}": ">", r"\textbar{}": "|", r"$\pm$": "±", "{*}": "*", "{[}": "[",
    **{f"\\{character}": character for character in "&%$#_{}"},
}  # fmt: skip
TOKEN = re.compile("|".join(map(re.escape, sorted(LATEX, key=len, reverse=True))) + "|.", re.DOTALL)


@given(tables())
@example(ONE)
def test_latex_has_nothing_that_tex_reads_as_a_command(table):
    begin, top, head, middle, *rows, bottom, end = table.latex().split("\n")
    kinds = "".join("l" if column.left else "r" for column in table.columns)
    assert (begin, end) == (rf"\begin{{tabular}}{{{kinds}}}", r"\end{tabular}")
    assert (top, middle, bottom) == (r"\toprule", r"\midrule", r"\bottomrule")
    read = []
    for row in (head, *rows):
        assert row.endswith(r" \\")
        tokens = TOKEN.findall(row.removesuffix(r" \\"))
        assert not {"\\", "%", "$", "#", "_", "{", "}", "~", "^", "<", ">", "|", "*", "["} & set(tokens)
        read.append("".join("\0" if token == "&" else LATEX.get(token, token) for token in tokens).split(" \0 "))
    dashes = str.maketrans({"–": "--", "—": "---", "’": "'"})
    assert read == [[cell.translate(dashes) for cell in row] for row in content(table)]


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_spaces_in_a_cell_are_one(form):
    wide, narrow = (Table("", [Column("a")], [[f"one{space}two"]]) for space in ("   ", " "))
    assert getattr(wide, form)() == getattr(narrow, form)()


def test_a_row_of_another_length_than_the_columns_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Table("", [Column("a"), Column("b")], [[1]]).markdown()


def test_a_template_keeps_a_space_between_two_values_and_shows_those_of_a_text(tmp_path):
    (tmp_path / "two.j2").write_text('{{ one }}{{ " " if two else "" }}{{ two }}')
    assert render("two.j2", tmp_path, one=" a", two="b ") == r"\x20a b\x20"
