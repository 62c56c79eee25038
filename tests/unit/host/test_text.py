"""Text of clients in logs, terminals and files."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.host.text import MOST_MARKS, name_key, visible

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # surrogates too


@given(ANY_TEXT, st.integers(1, 40))
def test_nothing_that_is_left_controls_a_terminal_or_begins_a_line(text, longest):
    shown = visible(text, longest)
    assert len(shown) <= longest
    assert len(shown.splitlines()) <= 1
    assert not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in shown)
    shown.encode()  # lone surrogates cannot be written to a file


# Letters that show nothing, as Unicode's chart of Hangul Jamo and half-width forms has them.
FILLERS = "\u115f\u1160\u3164\uffa0"


@given(st.text(st.characters(categories=["L", "N", "P"], exclude_characters=FILLERS), max_size=20))
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


# One of each block that Unicode lets a program ignore, and blank symbols.
WITHOUT_INK = "\u00ad\u034f\u061c\u180b\u180f\u17b4\u17b5\u2065\ufe00\ufe0f\ufff0\U000e0100\U000e01ef\u2800\U0001d159"


@pytest.mark.parametrize("character", [*WITHOUT_INK, *FILLERS, "\u00a0", "\u2003", "\u200d", "\ufeff"], ids=ascii)
def test_a_character_that_shows_nothing_is_escaped(character):
    code = ord(character)
    escape = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    assert visible(f"client-0{character}") == f"client-0{escape}"
    assert visible(f"cli{character}ent") == f"cli{escape}ent"


@pytest.mark.parametrize(
    "text",
    ["नमस्ते", "สวัสดีที่นี่", "שָׁלוֹם", "بِسْمِ ٱللَّهِ ٱلرَّحْمَٰنِ", "Tiếng Việt", unicodedata.normalize("NFD", "Tiếng Việt"),
     "한국어", unicodedata.normalize("NFD", "한국어"), "日本語ガ", "Ελλάς", "বাংলা", "தமிழ்",
     "ខ្មែរ", "မြန်မာ", "བོད་སྐད", "🙂"],
)  # fmt: skip
def test_text_of_any_language_stays_readable(text):
    assert visible(text) == text


@pytest.mark.parametrize("before", ["", " ", "a ", "\x00", "\u2800"])
def test_a_mark_without_a_letter_is_escaped(before):
    assert visible(f"{before}\u0301x").endswith("\\u0301x")


def test_marks_that_are_stacked_are_escaped_from_the_fifth_on():
    assert MOST_MARKS == 4
    assert visible("a" + "\u0301" * 6 + "b\u0301") == "a" + "\u0301" * 4 + r"\u0301" * 2 + "b\u0301"
    assert visible("a\u20dd") == r"a\u20dd"  # a circle around the letter


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" client-0", r"\x20client-0"), ("client-0  ", r"client-0\x20\x20"), ("a  b", "a  b"), (" ", r"\x20")],
)  # fmt: skip
def test_spaces_at_the_ends_are_visible(text, shown):
    assert visible(text) == shown


@given(ANY_TEXT)
def test_what_is_visible_stays_as_it_is(text):
    assert visible(visible(text)) == visible(text)


@pytest.mark.parametrize(
    "other",
    ["Client-0", "CLIENT-0", "ｃｌｉｅｎｔ－０", "client\u20110", "client\u20130", "client\u22120", "client-\u2070",
     " client-0 ", "client-0\ufe0f", "cl\u200bient-0", "client-0\u00a0", "client-0\u3164", "\U0001d41cli\u034fent-0"],
)  # fmt: skip
def test_names_that_look_the_same_have_the_same_key(other):
    assert name_key(other) == name_key("client-0")


@pytest.mark.parametrize(
    ("one", "other"),
    [("Straße", "STRASSE"), ("Kl\u00ednik", "Kli\u0301nik"), ("ﬁliale", "Filiale"), ("site 1", "site  1"),
     ("e\u034f\u0301", "É"), ("ΌΣΟΣ", "όσος")],
)  # fmt: skip
def test_the_key_ignores_how_a_name_is_written(one, other):
    assert name_key(one) == name_key(other)


@pytest.mark.parametrize("other", ["client-1", "client0", "cliént-0", "", "client-00", "client 0"])
def test_other_names_have_other_keys(other):
    assert name_key(other) != name_key("client-0")


@given(ANY_TEXT)
def test_a_key_is_its_own_key(text):
    assert name_key(name_key(text)) == name_key(text)
