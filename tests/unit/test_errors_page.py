"""docs/errors.md against the code: it has every error that is raised, and says nothing that the code does not say.

On the page … stands for any text. In the source it stands for what is put into a message as it is made: the fields of
an f-string, of `str.format`, of a log line. A message that has nothing of its own but such fields, as where an error is
passed on under another class, is no message of its own.
"""

import ast
import functools
import importlib
import re
from collections import Counter
from difflib import SequenceMatcher
from typing import NamedTuple

import pytest

from tests.packages import PACKAGES, ROOT

PAGE = ROOT / "docs/errors.md"
ANY = "…"
OWN = 10
"""Letters of its own that a raised message must have to be looked for."""
FEW = 6
"""Letters of its own that a line of the page must have."""
SHORTEST = 5
"""Letters of a run that two texts share, from which on it is no chance."""
MOST = 4
"""Messages that a line of the page may speak of: one that fits more says nothing."""

FIELD = re.compile(r"%(?:\.\d+)?[sdgrf]|\{[a-z_]*[^{} ]*\}")


class Line(NamedTuple):
    """A row of the page: what is said, and whose errors (or logs) say it."""

    said: str
    by: frozenset[str]

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self.said.split(ANY))), re.DOTALL)


class Raised(NamedTuple):
    """A place in the source where an error of this project is raised."""

    where: str
    error: str
    said: str


@functools.cache
def lines():
    table = re.compile(r"\| (`+)( ?)(?P<said>.+?)\2\1 \| (?P<by>log|`.+?`) \| .+ \|")
    rows = map(table.fullmatch, PAGE.read_text().partition("\n## Classes\n")[0].splitlines())
    return [Line(row["said"], frozenset(re.findall(r"\w+", row["by"]))) for row in rows if row]


@functools.cache
def trees():
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files}


def text_of(node):
    """The first line of a message as the source has it; … where something is put in."""
    return _text_of(node).partition("\n")[0].rstrip()


def _text_of(node):
    match node:
        case ast.Constant(value=str() as text):
            return FIELD.sub(ANY, text)
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else ANY for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _text_of(left) + _text_of(right)
    return ANY


@functools.cache
def texts():
    """Everything that the packages could say: each string, with those that are added to it."""
    return {text_of(node) for tree in trees().values() for node in ast.walk(tree)
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)}  # fmt: skip


@functools.cache
def error_classes():
    """The public exceptions that the packages define."""
    defined = {node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
               for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}  # fmt: skip
    errors = {name for name, bases in defined.items() if any(base.endswith(("Error", "Exception")) for base in bases)}
    while more := {name for name, bases in defined.items() if name not in errors and bases & errors}:
        errors |= more
    return {name for name in errors if not name.startswith("_")}


@functools.cache
def raised():
    found = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                said = [text_of(argument) for argument in node.exc.args]
                if name in error_classes() and said and own(max(said, key=own)) >= OWN:
                    found.append(Raised(f"{path}:{node.lineno}", name, max(said, key=own)))
    return found


def own(said):
    return sum(letter.isalpha() for letter in said.replace(ANY, ""))


def test_every_class_of_errors_is_on_the_page():
    assert len(error_classes()) > 25
    page = PAGE.read_text()
    assert [name for name in sorted(error_classes()) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("line", lines(), ids=lambda line: line.said[:40])
def test_what_the_page_says_is_said_by_the_code(line):
    assert own(line.said) >= FEW
    longest = max(line.said.split(ANY), key=len)
    assert any(line.pattern.fullmatch(text) for text in texts() if longest in text)
    fitting = {each.said for each in raised() if each.error in line.by and line.pattern.fullmatch(each.said)}
    assert len(fitting) <= MOST, fitting


def test_every_error_that_is_raised_is_on_the_page_under_its_class():
    assert len(raised()) > 300
    missing = [each for each in raised()
               if not any(each.error in line.by and line.pattern.fullmatch(each.said) for line in lines())]  # fmt: skip
    assert not missing, "\n".join(f"{each.where} {each.error}: {each.said}" for each in missing)


def test_no_line_of_the_page_says_what_another_says():
    assert len(lines()) > 300
    twice = [line for line, times in Counter(lines()).items() if times > 1]
    assert twice == []


# What tests look for in an error, which is not this project's to say: a part that is put in, or another's own words.
PUT_IN = {
    "CNN", "the disk is gone", "No space left", "gone", "not now", "2 tensors differ", "enough", "low and across",
    "qkv", "another strategy", "Use --days", "set features", "set classes",
}  # fmt: skip


def expected_by_tests():
    """(test, pattern) of `pytest.raises(class, match="…")`, for this project's classes and literal patterns."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises" and node.args:
                names = set(re.findall(r"\w+", ast.unparse(node.args[0]))) & error_classes()
                for keyword in node.keywords:
                    if names and keyword.arg == "match" and isinstance(keyword.value, ast.Constant):
                        yield f"{file.relative_to(ROOT)}:{node.lineno}", keyword.value.value


def pieces(pattern):
    """What a regular expression has of plain text: no operators, nothing that is put in (numbers, what is quoted)."""
    plain = re.sub(r"\(\?[a-z]*\)|\.\*|\[[^\]]*\][+*]?|\\d\+?", ANY, pattern)
    plain = re.sub(r"'[^' ]*'|[0-9]+|(?<!\\)[.|()^$+?*]", ANY, plain).replace("\\", "")
    return [piece for piece in plain.split(ANY) if len(piece) >= SHORTEST]


def shared(piece, said):
    """Length of the longest run that two texts have in common; 0 for one that is too short to tell anything."""
    size = SequenceMatcher(None, piece, said, autojunk=False).find_longest_match().size
    return size if size >= SHORTEST else 0


def test_every_error_that_a_test_names_is_on_the_page():
    """What a test looks for shares ten letters and more with a message of the page, or all that it has."""
    expectations = [(where, pattern) for where, pattern in expected_by_tests()
                    if not any(word in pattern for word in PUT_IN)]  # fmt: skip
    assert len(expectations) > 150
    missing = []
    for where, pattern in expectations:
        parts = pieces(pattern)
        needed = min(OWN, sum(map(len, parts)))
        if not any(sum(shared(part, line.said) for part in parts) >= needed for line in lines()):
            missing.append(f"{where} {pattern}")
    assert not missing, "\n".join(missing)


def test_the_classes_on_the_page_can_be_imported_from_where_it_says():
    rows = re.findall(r"^\| (`.+?) \| `([a-z_.]+)` \|", PAGE.read_text().partition("\n## Classes\n")[2], re.MULTILINE)
    assert len(rows) >= 30
    for classes, module in rows:
        for name in re.findall(r"`(\w+)`", classes):
            assert issubclass(getattr(importlib.import_module(f"tepal.{module}"), name), Exception)
