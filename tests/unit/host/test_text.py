"""Text of clients in logs, terminals and files."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.host.text import visible

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # surrogates too


@given(ANY_TEXT, st.integers(1, 40))
def test_nothing_that_is_left_controls_a_terminal_or_begins_a_line(text, longest):
    shown = visible(text, longest)
    assert len(shown) <= longest
    assert len(shown.splitlines()) <= 1
    assert not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in shown)
    shown.encode()  # lone surrogates cannot be written to a file


@given(st.text(st.characters(categories=["L", "N", "P"]), max_size=20))
def test_an_ordinary_name_is_unchanged(text):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nINFO: all is well", r"a\nINFO: all is well"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\x00b", r"a\x00b"),
        ("\u202eetirw", r"\u202eetirw"),
        ("a\u2028b", r"a\u2028b"),
        ("Klinik Köln", "Klinik Köln"),
        ("x" * 9, "x" * 7 + "…"),
        (ValueError("a\tb"), r"a\tb"),
    ],
)
def test_examples(text, shown):
    assert visible(text, 8 if text == "x" * 9 else 100) == shown
