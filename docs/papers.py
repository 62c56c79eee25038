"""Keep computed trials with the documentation, and write the tables of docs/papers/ and docs/reproduce.md from them.

    python docs/papers.py [--continue] [FOLDER ...]

A FOLDER is one of an experiment that `tepal reproduce` computed, such as runs/reproduce/fedacs-cifar-10. Its trials are
kept in docs/papers/<experiment>.json.xz: options, values (the score of each client among them), date and seconds.
Without any, the tables are written anew. With `--continue` the kept trials are written into each FOLDER instead, so
that `tepal reproduce` computes only those that are missing.

On the pages the tables stand between `<!-- reproduced: EXPERIMENT -->` and `<!-- end -->`; the verdicts on all claims
stand in docs/reproduce.md, between `<!-- verdicts -->` and `<!-- end -->`. Claims that nothing was computed for are
read from the tables under "## Not tested here".
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepal.records.run_directory import write_whole
from tepal.tools.reproduce.experiment import Reproduction
from tepal.tools.reproduce.runner import EXPERIMENTS, TRIALS, about, computed

PAPERS = Path(__file__).parent / "papers"
INDEX = Path(__file__).parent / "reproduce.md"
_PLACE = re.compile(r"(<!-- reproduced: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VERDICTS = re.compile(r"(<!-- verdicts -->\n).*?(<!-- end -->)", re.DOTALL)
_UNTESTED = re.compile(r"^## Not tested here\n.*?\n\| --- \| --- \|\n(.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)

Trials = Mapping[str, Mapping[str, Any]]
"""Trial → what was kept of it."""


def kept(file: Path) -> dict[str, Any]:
    """The trials of an experiment, by name."""
    found: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    return found


def all_kept() -> dict[str, Trials]:
    """Experiment → its trials, of all that are kept."""
    return {file.name.removesuffix(".json.xz"): kept(file) for file in sorted(PAPERS.glob("*.json.xz"))}


def keep(folder: Path) -> Path:
    """Keep the trials that were computed in a folder; returns the file."""
    full, experiment = folder.name.endswith("-full"), EXPERIMENTS[folder.name.removesuffix("-full")]
    found = {trial.name: computed(folder, trial) for trial in experiment.trials(full)}
    trials = {name: of for name, of in sorted(found.items()) if of is not None}
    file = PAPERS / f"{folder.name}.json.xz"
    file.write_bytes(lzma.compress(json.dumps(trials, sort_keys=True).encode(), preset=9))
    return file


def write_kept(folder: Path) -> int:
    """Write the kept trials of an experiment into its folder, without those that are there; returns how many.

    Nothing is written of an experiment that first trains weights: these are not kept, and its trials need them.
    """
    full, experiment = folder.name.endswith("-full"), EXPERIMENTS[folder.name.removesuffix("-full")]
    trials, of_name = experiment.trials(full), kept(PAPERS / f"{folder.name}.json.xz")
    if any(trial.options.get("part") == "pretraining" for trial in trials):
        return 0
    missing = [trial.name for trial in trials if trial.name in of_name and computed(folder, trial) is None]
    (folder / TRIALS).mkdir(parents=True, exist_ok=True)
    for name in missing:
        write_whole(folder / TRIALS / f"{name}.json", json.dumps(of_name[name]).encode())
    return len(missing)


def with_tables(page: str, trials: Mapping[str, Trials]) -> str:
    """A page with the tables of its experiments, and a note in place of those that nothing was computed of."""

    def place(found: re.Match[str]) -> str:
        name = found[2]
        return f"{found[1]}\n{section(name, trials[name]) if name in trials else _NOT_YET}\n\n{found[3]}"

    return _PLACE.sub(place, page)


_NOT_YET = "*Not computed yet.*"


def section(name: str, trials: Trials) -> str:
    """The claims, tables and findings of an experiment, and how they were computed."""
    experiment, found = EXPERIMENTS[name.removesuffix("-full")], reproduced(name, trials)
    parts = [f"**{table.title}**\n\n{table.markdown()}" for table in found.shown_tables]
    points = [*found.findings, *about(experiment, name.endswith("-full"), trials)]
    return "\n\n".join([*parts, "\n".join(f"- {point}" for point in points)])


def reproduced(name: str, trials: Trials) -> Reproduction:
    """The results of an experiment's trials."""
    return EXPERIMENTS[name.removesuffix("-full")].results({trial: of["values"] for trial, of in trials.items()})


def with_verdicts(index: str, pages: Mapping[Path, str], trials: Mapping[str, Trials]) -> str:
    """The index with a table of all claims: those of the experiments on each page, and those that were not tested."""
    rows = ["| paper | experiment | claim | verdict |", "|---|---|---|---|"]
    for path, page in pages.items():
        title = f"[{page.splitlines()[0].removeprefix('# ')}](papers/{path.name})"
        for name in (found[2] for found in _PLACE.finditer(page)):
            claims = reproduced(name, trials[name]).claims if name in trials else ()
            rows += [f"| {title} | `{name}` | {claim.text} | **{claim.verdict}** |" for claim in claims]
        for line in (line for found in _UNTESTED.finditer(page) for line in found[1].splitlines()):
            rows.append(f"| {title} | | {line.split('|')[1].strip()} | not tested |")
    return _VERDICTS.sub(lambda found: "\n".join([found[1], *rows, "", found[2]]), index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--continue", action="store_true", dest="back", help="write the kept trials into each FOLDER")
    options = parser.parse_args()
    if options.back and not options.folders:
        parser.error("--continue needs a FOLDER")
    for folder in options.folders:
        print(f"{folder}: {write_kept(folder)} trials written" if options.back else keep(folder))
    if options.back:
        return
    trials = all_kept()
    pages = {path: with_tables(path.read_text(), trials) for path in sorted(PAPERS.glob("*.md"))}
    for path, page in pages.items():
        path.write_text(page)
    INDEX.write_text(with_verdicts(INDEX.read_text(), pages, trials))


if __name__ == "__main__":
    main()
