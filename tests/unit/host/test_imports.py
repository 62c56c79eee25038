"""A module whose import is put off until something of it is used."""

import gc
import importlib
import importlib.util
import inspect
import sys

import pytest

from tepal.host.imports import import_when_used, uncollected


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package that counts its imports in the module `imports_of_it`."""
    (tmp_path / "put_off").mkdir()
    (tmp_path / "imports_of_it.py").write_text("count = 0")
    (tmp_path / "put_off" / "__init__.py").write_text("import imports_of_it\nimports_of_it.count += 1\nanswer = 42\n")
    (tmp_path / "put_off" / "part.py").write_text("whole = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "put_off"
    for name in ("put_off", "put_off.part", "imports_of_it"):
        sys.modules.pop(name, None)


def imports():
    return importlib.import_module("imports_of_it").count


def test_it_is_imported_once_and_only_when_something_of_it_is_used(package):
    import_when_used(package)
    import put_off as first

    assert imports() == 0
    assert (first.answer, first.answer, imports()) == (42, 42, 1)
    import put_off as second

    assert second.answer == 42 and second.__file__ and first.__file__ == second.__file__ and imports() == 1
    with pytest.raises(AttributeError):
        _ = first.question


def test_names_and_parts_of_it_can_be_imported(package):
    import_when_used(package)
    from put_off import answer
    from put_off.part import whole

    assert (answer, whole, imports()) == (42, 7, 1)


def test_a_part_is_put_off_without_importing_the_whole(package):
    import_when_used(f"{package}.part")
    assert package not in sys.modules
    import put_off
    from put_off import part

    assert (imports(), vars(put_off).get("part"), part.whole) == (1, None, 7)
    assert sys.modules[f"{package}.part"].__file__.endswith("part.py") and put_off.part.whole == 7


def test_a_part_of_what_is_not_installed_is_missed_at_once():
    import_when_used("no_such_module.part")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module.part")


def test_looking_at_all_modules_does_not_import_it(package):
    import_when_used(package)
    assert inspect.getmodule(inspect.currentframe()) is sys.modules[__name__]
    assert importlib.util.find_spec(package).name == package
    assert imports() == 0


def test_a_module_that_was_imported_stays(package):
    before = importlib.import_module(package)
    import_when_used(package)
    assert sys.modules[package] is before


def test_a_module_that_is_not_installed_is_missed_at_once():
    import_when_used("no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")


@pytest.mark.parametrize("before", [True, False])
def test_no_garbage_is_collected_meanwhile_and_afterwards_as_before(before):
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError), uncollected():
            inside = gc.isenabled()
            raise KeyError
        assert (inside, gc.isenabled()) == (False, before)
    finally:
        (gc.enable if was else gc.disable)()
