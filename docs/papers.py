"""Keep computed trials with the documentation, and write the tables of docs/papers/ from them.

    python docs/papers.py [FOLDER ...]

A FOLDER is one of an experiment that `tepal reproduce` computed, such as runs/reproduce/fedacs-cifar-10. Its trials are
kept in docs/papers/<experiment>.json.xz: options, values (the score of each client among them), date and seconds.
Without any, the tables are written anew. They stand in the pages between `<!-- reproduced: EXPERIMENT -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepal.tools.reproduce.runner import EXPERIMENTS, about

PAPERS = Path(__file__).parent / "papers"
_PLACE = re.compile(r"(<!-- reproduced: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def kept(file: Path) -> dict[str, Any]:
    """The trials of an experiment, by name."""
    found: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    return found


def keep(folder: Path) -> Path:
    """Keep the trials that were computed in a folder; returns the file."""
    trials = {path.stem: json.loads(path.read_text()) for path in sorted((folder / "cells").glob("*.json"))}
    file = PAPERS / f"{folder.name}.json.xz"
    file.write_bytes(lzma.compress(json.dumps(trials, sort_keys=True).encode(), preset=9))
    return file


def with_tables(page: str, trials: Mapping[str, Mapping[str, Any]]) -> str:
    """A page with the tables of these experiments: experiment → trial → what was kept of it."""

    def place(found: re.Match[str]) -> str:
        return f"{found[1]}\n{section(found[2], trials[found[2]])}\n\n{found[3]}"

    return _PLACE.sub(place, page)


def section(name: str, trials: Mapping[str, Any]) -> str:
    """The tables and findings of an experiment, and how they were computed."""
    experiment = EXPERIMENTS[name.removesuffix("-full")]
    results = experiment.results({trial: of["values"] for trial, of in trials.items()})
    parts = [f"**{table.title}**\n\n{table.markdown()}" for table in results.tables]
    points = [*results.findings, *about(experiment, name.endswith("-full"), trials)]
    return "\n\n".join([*parts, "\n".join(f"- {point}" for point in points)])


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        print(keep(folder))
    trials = {file.name.removesuffix(".json.xz"): kept(file) for file in sorted(PAPERS.glob("*.json.xz"))}
    for page in sorted(PAPERS.glob("*.md")):
        page.write_text(with_tables(page.read_text(), trials))


if __name__ == "__main__":
    main()
