"""`Table`: written as CSV, Markdown, LaTeX or HTML.

Cells contain text of clients and of others' runs. In each format it is text: on one line, with every character visible
(`visible`), and no formula, link or command.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from markupsafe import Markup

from tepal.host.text import visible
from tepal.records.columns import Column
from tepal.report.templates import render

MISSING = "–"
"""Shown for None or "" in all formats but CSV."""


@dataclass(frozen=True)
class Table:
    """A title, columns, and rows of values; None is an unknown value."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, title: str, columns: Iterable[Column], records: Iterable[Mapping[str, Any]]) -> Table:
        """The table whose rows are the records' values under the columns' keys."""
        columns = tuple(columns)
        return cls(title, columns, [[record.get(column.key) for column in columns] for record in records])

    def csv(self) -> str:
        """All values unrounded under the columns' keys, or titles where a column has no key; None is empty.

        A text that a spreadsheet would calculate as a formula begins with an apostrophe, by which it shows the text.
        """
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([_csv_cell(column.key or column.title) for column in self.columns])
        writer.writerows(map(_csv_cell, row) for row in self.rows)
        return text.getvalue()

    def markdown(self) -> str:
        """A table of GitHub's Markdown."""
        rule = ["---" if column.left else "---:" for column in self.columns]
        head, *rows = [[markdown_text(cell) for cell in row] for row in self._lines()]
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))

    def latex(self) -> str:
        """A tabular for the package booktabs."""
        head, *rows = [rf"{' & '.join(_words(cell).translate(_LATEX) for cell in row)} \\" for row in self._lines()]
        kinds = "".join("l" if column.left else "r" for column in self.columns)
        begin, end = rf"\begin{{tabular}}{{{kinds}}}", r"\end{tabular}"
        return "\n".join((begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", end))

    def html(self) -> Markup:
        """A table that scrolls inside its frame, by keyboard too."""
        return render("table.html", title=self.title, columns=self.columns, rows=islice(self._lines(), 1, None))

    def _lines(self) -> Iterator[list[str]]:
        """The titles of the columns, then each row as text."""
        texts = [column.text for column in self.columns]
        yield [column.title for column in self.columns]
        for row in self.rows:
            yield [MISSING if value in (None, "") else text(value) for text, value in zip(texts, row, strict=True)]


def markdown_text(text: str) -> str:
    """Text as Markdown that shows it; no part is markup, or becomes a link to a page, address, user or issue."""
    escaped = _words(text).translate(_MARKDOWN)
    escaped = _LINKS.sub(lambda match: f"{match[1]}\\{match[2]}", escaped)
    return _MENTIONS.sub("<span>\\g<0></span>", escaped)


def _words(text: str) -> str:
    """A text with every character visible, and one space between words."""
    return " ".join(visible(text).split())


def _csv_cell(value: Any) -> Any:
    """A cell of a CSV file: a number as it is, a text with every character visible, and never as a formula."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(FORMULA) else text


FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""What a formula begins with in a spreadsheet; some take the full-width ones, too."""
_LINKS = re.compile(r"((?:https?|ftp|mailto|xmpp|www))([:.])", re.IGNORECASE)  # what GitHub makes a link of
# GitHub makes links of @user, me@example.org, #1 and GH-1. It searches the text of the page that it has made, in which
# an escaped character is one as any other; so the character gets an element of its own.
_MENTIONS = re.compile(r"@|#(?=[0-9])|(?<=\bGH)-(?=[0-9])", re.IGNORECASE)
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>&|~$"})
_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        # After the end of a row a star or a bracket would be its argument.
        **{character: f"{{{character}}}" for character in "*["},
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
        ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "’": "'", "–": "--", "—": "---",
    }
)  # fmt: skip
