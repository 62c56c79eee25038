"""The table of error classes in docs/errors.md against the classes that the code defines."""

import ast
import builtins
import importlib
import re

from tests.packages import PACKAGES, ROOT

PAGE = (ROOT / "docs/errors.md").read_text()
TABLE = re.findall(r"^\| `(\w+)`(?: \(a `(\w+)`\))? \| `([a-z_.]+)` \| .+ \| .+ \|$", PAGE, re.MULTILINE)


def error_classes():
    """The public exceptions that the packages define, by name."""
    trees = [ast.parse(file.read_text()) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    defined = {node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
               for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}  # fmt: skip
    errors = {name for name, bases in defined.items() if any(base.endswith(("Error", "Exception")) for base in bases)}
    while more := {name for name, bases in defined.items() if name not in errors and bases & errors}:
        errors |= more
    return {name for name in errors if not name.startswith("_")}


def test_the_table_has_every_public_error_class_once_and_no_other():
    assert len(error_classes()) > 25
    assert sorted(name for name, _, _ in TABLE) == sorted(error_classes())


def test_every_class_of_the_table_is_imported_from_its_module_and_has_the_base_it_names():
    for name, base, module in TABLE:
        error = getattr(importlib.import_module(f"tepal.{module}"), name)
        assert issubclass(error, Exception)
        assert not base or base in {parent.__name__ for parent in error.__mro__[1:]}, name


def test_the_classes_said_to_be_a_runtime_error_are_those_that_are():
    said = re.search(r"Most are a `ValueError`\.(.*?)\sare a\s`RuntimeError`", PAGE, re.DOTALL)[1]
    found = {getattr(importlib.import_module(f"tepal.{module}"), name) for name, base, module in TABLE if not base}
    assert set(re.findall(r"`(\w+)`", said)) == {error.__name__ for error in found if issubclass(error, RuntimeError)}


def test_every_class_that_a_cause_names_exists():
    """The second column of the tables of causes, below the table of classes."""
    rows = PAGE.partition("\n## Errors before")[2]
    causes = re.findall(r"^\| .+? \| (`\w+`(?:, `\w+`)*|logged) \| .+ \|$", rows, re.MULTILINE)
    assert len(causes) > 50
    named = {name for cause in causes for name in re.findall(r"`(\w+)`", cause)}
    assert [name for name in named - error_classes() if not hasattr(builtins, name)] == []
