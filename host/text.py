"""Text that others wrote, such as a client's name or reason, made safe for logs, terminals, pages and files."""

from __future__ import annotations

LONGEST_NAME = 200
LONGEST_TEXT = 2000
"""Characters of a name, and of a reason or note, that are kept."""

MOST_LINES = 200
"""Lines of a message that are kept."""
MOST_MARKS = 4
"""Combining marks after a letter that are kept: pointed Hebrew with an accent, and Vietnamese, need three."""

_HIDDEN = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

# Source: Default_Ignorable_Code_Point in DerivedCoreProperties.txt of Unicode 16, inclusive.
_RANGES = (
    (0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
    (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip
_NO_INK = frozenset(
    {chr(code) for first, last in _RANGES for code in range(first, last + 1)}
    | {"\u2800", "\U0001d159"}  # Braille without dots, a note without a head
)


def visible(text: object, longest: int = LONGEST_TEXT) -> str:
    """`text` on one line, with every character visible, and not longer than `longest` characters.

    These become escapes, as in a Python literal ("\\n", "\\x1b"):

    - control characters, line separators, direction marks and lone surrogates: in a log they would begin a line of
      their own, and in a terminal they would be commands to it;
    - characters that show nothing: those that Unicode lets a program ignore (also those that choose how an emoji is
      drawn), blank symbols, spaces other than " ", and " " itself at the beginning and at the end;
    - combining marks without a letter before them, or after the first `MOST_MARKS` of one, and those that enclose it.

    A longer text is cut, and ends with "…". Letters of different scripts that look alike are unchanged.
    """
    whole = str(text)
    cut = whole[: longest + 1]
    if not cut.isascii() or not cut.isprintable():
        cut = _shown(cut)
    if whole.startswith(" "):
        cut = _edge(len(cut) - len(cut.lstrip(" "))) + cut.lstrip(" ")
    if whole.endswith(" ") and len(whole) <= longest:
        cut = cut.rstrip(" ") + _edge(len(cut) - len(cut.rstrip(" ")))
    return cut if len(cut) <= longest and len(whole) <= longest else cut[: max(longest - 1, 0)] + "…"


def visible_lines(text: object) -> str:
    """A message of several lines, of which each is as of `visible`, but for its indentation; at most `MOST_LINES`."""
    lines = str(text).split("\n")
    more = [f"… and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    kept = [(line, line.lstrip(" ")) for line in lines[:MOST_LINES]]
    return "\n".join([*(" " * (len(line) - len(words)) + visible(words) for line, words in kept), *more])


def name_key(text: str) -> str:
    """What two names share that a reader takes for the same one.

    They do if they differ by upper and lower case, by compatible forms of a character (such as full-width or ligatures;
    NFKC), by kinds of hyphens, by spaces at the ends or by how many there are, or by characters that show nothing. Two
    names that differ in letters of other scripts that look alike (Cyrillic "а") have different keys.
    """
    from unicodedata import normalize

    # What shows nothing is left out first: it would keep an accent apart from its letter. Case folding may make
    # characters that NFKC changes again.
    shown = "".join(each for each in text if each not in _NO_INK)
    folded = normalize("NFKC", normalize("NFKC", shown).casefold())
    return " ".join("".join("-" if _is_hyphen(each) else each for each in folded if each not in _NO_INK).split())


def _shown(text: str) -> str:
    from unicodedata import category as category_of  # most text is ASCII, and commands start with few modules

    shown: list[str] = []
    room = 0  # for further marks on the letter before
    for character in text:
        category = category_of(character)
        if category[0] == "M":
            keeps = room > 0 and category != "Me" and character not in _NO_INK
            room -= 1
        else:
            keeps = character.isprintable() and character not in _NO_INK
            room = MOST_MARKS if keeps and character != " " else 0
        shown.append(character if keeps else _escaped(character))
        if not keeps:
            room = 0  # a mark would be drawn on the escape
    return "".join(shown)


def _is_hyphen(character: str) -> bool:
    from unicodedata import category

    return category(character) == "Pd" or character == "\u2212"  # the minus sign


def _edge(spaces: int) -> str:
    return "\\x20" * spaces


def _escaped(character: str) -> str:
    return _HIDDEN.get(character) or character.encode("unicode_escape").decode("ascii")
