"""Weights that come with Tepal: `pretrained` may name them. Each has a folder here with its card.

`python -m tepal.tools.pretrain NAME` makes such a folder: model.safetensors, card.toml, and for a text model its
config.json and tokenizer. The bundle of the Flower app has no weights; there they are found in the installed package.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from tepal.models.registry import ModelError

WEIGHTS, CARD = "model.safetensors", "card.toml"


def shipped() -> tuple[str, ...]:
    """Return the names of the weights that come with Tepal, sorted."""
    return tuple(sorted(_folders()))


def folder_of(name: str) -> Path | None:
    """Return the folder of shipped weights, or None if the name is not one of them."""
    return _folders().get(name)


def misspelt(name: str) -> str:
    """Return the name of shipped weights that this one resembles; "" if it is one of them, or resembles none."""
    near = get_close_matches(name.lower(), shipped(), n=1, cutoff=0.8)
    return near[0] if near and name not in shipped() else ""


def card(name: str) -> Mapping[str, Any]:
    """Return the card of shipped weights. Raises KeyError for another name."""
    return tomllib.loads((_folders()[name] / CARD).read_text(encoding="utf-8"))


def checked_file(name: str) -> Path:
    """Return the file of shipped weights, after comparing it with the digest on its card.

    Raises:
        KeyError: no such weights come with Tepal.
        ModelError: the file is missing or damaged.
    """
    file, expected = _folders()[name] / WEIGHTS, str(card(name)["sha256"])
    try:
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error}): install Tepal again") from error
    if found != expected:
        raise ModelError(
            f"{file}: its SHA-256 is {found[:12]}…, but its card says {expected[:12]}…: it is damaged; install Tepal "
            "again"
        )
    return file


@cache
def _folders() -> dict[str, Path]:
    for place in _places():
        found = {each.parent.name: each.parent for each in sorted(place.glob(f"*/{CARD}"))}
        if found:
            return found
    return {}


def _places() -> list[Path]:
    """Where the weights may be, the first that has any: here; in a package on Python's path, as a machine of a cluster
    is sent it; in the installed package; in the checkout that is installed in its place."""
    places = [Path(__file__).parent, *(Path(each, "tepal", "models", "weights") for each in sys.path if each)]
    try:
        installed = distribution("tepal")
    except PackageNotFoundError:
        return places
    places.append(Path(str(installed.locate_file("tepal/models/weights"))))
    url = urlparse(json.loads(installed.read_text("direct_url.json") or "{}").get("url", ""))
    if url.scheme == "file":
        places.append(Path(unquote(url.path)) / "models" / "weights")
    return places
