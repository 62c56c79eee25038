"""Enter measurements into docs/performance.json, and write the tables of docs/performance.md from it.

    python benchmarks/performance.py [FILE or FOLDER ...]

A FILE is what a benchmark wrote with `--json`, and is named after its topic in bench.py: `aggregation.json`. Of a
FOLDER, such as one of runs/bench, the files of all topics that have a place in the page are entered. Without any, the
tables are written anew. They stand in the page between `<!-- measured: TOPIC -->` and `<!-- end -->`; the topic `goals`
is all rows that have one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measured import ROOT, read_figures
from topics import TOPICS, Row, table

PAGE, MEASURED = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.json"
GOALS = "goals"
_PLACE = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def entered(measured: dict[str, Any], file: Path) -> None:
    """Replace a topic's measurements by those of a benchmark's file. Raises ValueError if they cannot be read."""
    if file.suffix != ".json" or file.stem not in TOPICS:
        raise ValueError(f"{file} is not named after a topic, as TOPIC.json; topics are {', '.join(TOPICS)}")
    circumstances, figures = read_figures(file)
    measured[file.stem] = {"measured": circumstances, "rows": [asdict(row) for row in TOPICS[file.stem].rows(figures)]}


def with_tables(page: str, measured: Mapping[str, Any]) -> str:
    """The page with the tables of these measurements. Raises ValueError if it has a topic that was not measured."""

    def place(found: re.Match[str]) -> str:
        if found[2] != GOALS and found[2] not in measured:
            raise ValueError(f"the page has the topic {found[2]!r}; measured are {', '.join(measured)}")
        text = _goals(measured) if found[2] == GOALS else "\n\n".join(_section(measured[found[2]]))
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return _PLACE.sub(place, page)


def _goals(measured: Mapping[str, Any]) -> str:
    rows = [Row.from_json(row) for topic in TOPICS if topic in measured for row in measured[topic]["rows"]]
    return table(GOALS, [row for row in rows if row.goal]).markdown()


def _section(of: Mapping[str, Any]) -> Iterator[str]:
    yield table("", map(Row.from_json, of["rows"])).markdown()
    how = dict(of["measured"])
    command, commit = how.pop("command"), how.pop("commit")
    machine = f"{how.pop('cores')} cores ({how.pop('processor')}), {how.pop('memory')}"
    if "load" in how:
        machine += f", load {how['load']} in the minute before"
    versions = ", ".join(f"{name} {how[name]}" for name in ("python", "flwr", "torch", "numpy") if name in how)
    yield f"`{command}`, {how['date']}, commit {commit}; {machine}{versions and '; '}{versions}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="*", type=Path, metavar="FILE or FOLDER")
    options = parser.parse_args()
    measured, page = json.loads(MEASURED.read_text()), PAGE.read_text()
    places = {found[2] for found in _PLACE.finditer(page)}
    for given in options.given:
        in_folder = (given / f"{topic}.json" for topic in TOPICS if topic in places)
        for file in [each for each in in_folder if each.exists()] if given.is_dir() else [given]:
            entered(measured, file)
    if without := sorted(measured.keys() - places):
        parser.error(f"{PAGE} lacks a place for {', '.join(without)}: <!-- measured: {without[0]} --> <!-- end -->")
    ordered = {topic: measured[topic] for topic in TOPICS if topic in measured}
    MEASURED.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(with_tables(page, ordered))


if __name__ == "__main__":
    main()
