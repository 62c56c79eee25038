"""Text that others wrote, such as a client's name or reason, made safe for logs, terminals, pages and files."""

from __future__ import annotations

LONGEST_NAME = 200
LONGEST_TEXT = 2000
"""Characters of a name, and of a reason or note, that are kept."""

_HIDDEN = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: object, longest: int = LONGEST_TEXT) -> str:
    """`text` on one line, with every character visible, and not longer than `longest` characters.

    Control characters, line separators, direction marks and lone surrogates become escapes, as in a Python literal
    ("\\n", "\\x1b"): in a log they would begin a line of their own, and in a terminal they would be commands to it. A
    longer text is cut, and ends with "…".
    """
    whole = str(text)
    cut = whole[: longest + 1]
    if not cut.isprintable():
        cut = "".join(character if character.isprintable() else _escaped(character) for character in cut)
    return cut if len(cut) <= longest and len(whole) <= longest else cut[: max(longest - 1, 0)] + "…"


def _escaped(character: str) -> str:
    return _HIDDEN.get(character) or character.encode("unicode_escape").decode("ascii")
