"""`tepal init`: write a Flower app of one's own that uses Tepal, as a start.

`template/` has its files, under the name `quickstart`; docs/own-app.md explains them.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
from pathlib import Path

NAME = "quickstart"
"""The app's name in the template."""

TEMPLATE = Path(__file__).with_name("template")


def write_app(folder: Path) -> list[Path]:
    """Write a Flower app into a new or empty folder, under the folder's name; return the paths of its files.

    Raises ValueError if an app cannot have this name, or if there are files in the folder; OSError.
    """
    name = folder.absolute().name
    package = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or keyword.iskeyword(package):
        raise ValueError(f"{name!r} cannot be the name of a Python package: use letters, digits, - and _")
    ignored = (TEMPLATE / "gitignore").read_text(encoding="utf-8").splitlines()
    if f"/{package}/" in ignored:
        raise ValueError(f"{name!r} is the name of a folder that commands write into an app: choose another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: choose another name")
    if package in sys.stdlib_module_names or _is_elsewhere(package, folder):
        raise ValueError(f"{name!r}: there is a Python package {package!r} already: choose another name")
    written = []
    for template in sorted(path for path in TEMPLATE.iterdir() if path.suffix in (".py", ".toml")):
        target = folder / (package if template.suffix == ".py" else "") / template.name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = template.read_text(encoding="utf-8").replace(f'name = "{NAME}"', f'name = "{name}"')
        target.write_text(text.replace(f"{NAME}.", f"{package}."), encoding="utf-8")
        written.append(target)
    (folder / package / "__init__.py").touch()
    # Under another name in the template, where it would be that folder's own.
    shutil.copyfile(TEMPLATE / "gitignore", folder / ".gitignore")
    return written


def _is_elsewhere(package: str, folder: Path) -> bool:
    """Return whether a package is found that is not `folder`: in the working directory an empty one is a package."""
    found = importlib.util.find_spec(package)
    return found is not None and [*map(Path, found.submodule_search_locations or ())] != [folder.absolute()]
