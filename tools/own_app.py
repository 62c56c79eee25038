"""The folder of the app that a command runs: the one that the user gave, or Tepal's own."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import tomli_w

import tepal
from tepal.host.superlink import is_app


def app_folder(given: Path) -> Path:
    """Return the folder of the app to run: `given`, or Tepal's own app for a current folder that is not an app."""
    return own_app() if given == Path() and not is_app(given) else given


def own_app() -> Path:
    """Return the folder of Tepal's own app: the checkout, or for an installed wheel a temporary one that names it."""
    checkout = Path(tepal.__file__).resolve().parents[1]
    return checkout if is_app(checkout) else _installed()


def is_own_app(app: Path) -> bool:
    """Whether this is the folder of Tepal's own app."""
    return app.resolve() == own_app().resolve()


@cache
def _installed() -> Path:
    """A temporary folder that names the installed app, one for this process."""
    from tepal.server_app.config import defaults  # torch: a second

    folder = Path(tempfile.mkdtemp(prefix="tepal-app-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    components = {"serverapp": "tepal.server_app.app:app", "clientapp": "tepal.client_app.app:app"}
    app = {"publisher": "tepal", "components": components, "config": defaults()}
    project = {"name": "tepal-app", "version": tepal.__version__, "license": "Apache-2.0", "dependencies": []}
    text = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder
