"""The app bundle, which every client gets: what the two apps import, and what apps import by a public name."""

import grimp
import pytest

from tepal.host.superlink import stage_app
from tepal.models import MODELS
from tests.packages import ROOT

APPS = {"tepal.client_app.app", "tepal.server_app.app"}
PUBLIC = {"tepal.strategies.in_process"}
FLOWER = {f"tepal.host.flower.{name}" for name in ("link", "refusals", "runtime", "supernode", "worker")}
"""Beside what the server's grid imports of that folder."""
OBJECTIVES = {f"tepal.client_app.objectives.{path.stem}" for path in (ROOT / "client_app/objectives").glob("[!_]*.py")}
"""`client_app/objectives/__init__.py` imports all files next to it."""


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The modules of the bundle, by the name under which they are imported."""
    files = stage_app(ROOT, tmp_path_factory.mktemp("bundle"))
    names = (".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files if path.suffix == ".py")
    return {name if name == "tepal" else f"tepal.{name}" for name in names}


def imported(begin):
    """The modules of this project that these import, directly or not, wherever in a file the import stands.

    Of `tepal` itself nothing: it imports the Python API on demand, which no app asks for.
    """
    graph = grimp.build_graph("tepal", cache_dir=None)
    for module in graph.find_modules_directly_imported_by("tepal"):
        graph.remove_import(importer="tepal", imported=module)
    found, left = set(), set(begin)
    while left:
        module = left.pop()
        found.add(module)
        above = {module.rpartition(".")[0]} - {""}
        left |= (graph.find_modules_directly_imported_by(module) | above) - found
    return found


def test_the_bundle_has_what_the_apps_import_and_no_more(bundled):
    by_name = {model.where.partition(":")[0] for model in MODELS.values() if model.package == "tepal"}
    assert bundled == imported(APPS | PUBLIC | OBJECTIVES | by_name) | FLOWER


def test_the_bundle_has_neither_commands_nor_provisioning_nor_experiments(bundled):
    assert not {name for name in bundled if name.startswith(("tepal.tools", "tepal.client_app.node"))}
