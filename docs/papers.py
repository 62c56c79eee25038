"""Keep computed trials with the documentation, and write the tables of docs/papers/ and docs/reproduce.md from them.

    python docs/papers.py [--continue] [FOLDER ...]

A FOLDER is one of an experiment that `tepal reproduce` computed, such as runs/reproduce/fedacs-cifar-10. Its trials are
kept in docs/papers/<experiment>.json.xz: options, values (the score of each client among them), date and seconds.
Kept trials that the FOLDER lacks stay, as long as they fit the others. Without a FOLDER, the tables are written anew.
With `--continue` the kept trials are written into each FOLDER instead, so that `tepal reproduce` computes only those
that are missing. Weights that an experiment trains first are kept with it, in docs/papers/<experiment>.weights/, until
all its trials are there.

On the pages the tables stand between `<!-- reproduced: EXPERIMENT -->` and `<!-- end -->`; the verdicts on all claims
stand in docs/reproduce.md, between `<!-- verdicts -->` and `<!-- end -->`. An experiment has neither before all its
trials are kept; its row there says so. Claims that nothing was computed for are read from the tables under "## Not
tested here".
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tepal.records.run_directory import read_json, write_whole
from tepal.tools.reproduce.experiment import WEIGHTS, Reproduction, Trial
from tepal.tools.reproduce.runner import EXPERIMENTS, TRIALS, about, fits

PAPERS = Path(__file__).parent / "papers"
INDEX = Path(__file__).parent / "reproduce.md"
_PLACE = re.compile(r"(<!-- reproduced: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VERDICTS = re.compile(r"(<!-- verdicts -->\n).*?(<!-- end -->)", re.DOTALL)
_UNTESTED = re.compile(r"^## Not tested here\n.*?\n\| --- \| --- \|\n(.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)

Trials = Mapping[str, Mapping[str, Any]]
"""Trial → what was kept of it."""


class FewerTrials(ValueError):
    """What would be kept of an experiment are fewer trials than are kept already."""


def kept(file: Path) -> dict[str, Any]:
    """The trials of an experiment, by name; none without the file."""
    found: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes())) if file.exists() else {}
    return found


def all_kept() -> dict[str, Trials]:
    """Experiment → its trials, of all that are kept."""
    files = {file.name.removesuffix(".json.xz"): file for file in sorted(PAPERS.glob("*.json.xz"))}
    return {name: joined(name, kept(file)) for name, file in files.items()}


def trials_of(name: str) -> Sequence[Trial]:
    """All trials of an experiment, each after those that it needs."""
    return EXPERIMENTS[name.removesuffix("-full")].trials(name.endswith("-full"))


def joined(name: str, *sources: Trials) -> dict[str, Any]:
    """An experiment's trials by name, each from the first source whose trial fits its options and those it needs."""
    found = dict[str, Any]()
    for trial in trials_of(name):
        if found.keys() >= set(trial.needs):
            dates = {needed: found[needed].get("computed") for needed in trial.needs}
            of = [source[trial.name] for source in sources if trial.name in source]
            if fitting := [each for each in of if fits(trial, each, dates)]:
                found[trial.name] = fitting[0]
    return dict(sorted(found.items()))


def in_folder(folder: Path) -> dict[str, Any]:
    """The trials in an experiment's folder, whether or not they fit."""
    files = {trial.name: folder / TRIALS / f"{trial.name}.json" for trial in trials_of(folder.name)}
    return {name: of for name, file in files.items() if (of := read_json(file))}


def keep(folder: Path) -> Path:
    """Keep the trials that were computed in a folder, and those kept before that it lacks; returns the file.

    Raises FewerTrials, and leaves the file, if too many of those kept before do not fit the folder's.
    """
    file = PAPERS / f"{folder.name}.json.xz"
    trials, before = joined(folder.name, in_folder(folder), kept(file)), joined(folder.name, kept(file))
    if len(trials) < len(before):
        raise FewerTrials(
            f"{file} has {len(before)} trials, and would have {len(trials)} with those of {folder}, because the folder "
            "has others that they need. Compute more trials in the folder first, or remove the file"
        )
    write_whole(file, lzma.compress(json.dumps(trials, sort_keys=True).encode(), preset=9))
    if is_whole(folder.name, trials):
        shutil.rmtree(kept_weights(folder.name), ignore_errors=True)
    elif any(trials.get(name) == in_folder(folder).get(name, ...) for name in pretrainings(folder.name)):
        shutil.copytree(folder / WEIGHTS, kept_weights(folder.name), dirs_exist_ok=True)
    return file


def pretrainings(name: str) -> list[str]:
    """The trials in which an experiment trains weights, from which its other trials begin."""
    return [trial.name for trial in trials_of(name) if trial.options.get("part") == "pretraining"]


def kept_weights(name: str) -> Path:
    """The folder of the weights that an experiment trains, if it is kept in part."""
    return PAPERS / f"{name}.{WEIGHTS}"


def write_kept(folder: Path) -> int:
    """Write the kept trials of an experiment into its folder, without those that are there; returns how many.

    Nothing is written of an experiment that first trains weights which are not kept.
    """
    weights = pretrainings(folder.name)
    if weights and not kept_weights(folder.name).exists():
        return 0
    there = in_folder(folder)
    trials = joined(folder.name, there, kept(PAPERS / f"{folder.name}.json.xz"))
    missing = {name: of for name, of in trials.items() if there.get(name) != of}
    if not missing.keys().isdisjoint(weights):  # before the trial that says that they are there
        shutil.copytree(kept_weights(folder.name), folder / WEIGHTS, dirs_exist_ok=True)
    (folder / TRIALS).mkdir(parents=True, exist_ok=True)
    for name, of in missing.items():
        write_whole(folder / TRIALS / f"{name}.json", json.dumps(of).encode())
    return len(missing)


def with_tables(page: str, trials: Mapping[str, Trials]) -> str:
    """A page with the tables of its experiments, and a note in place of those that are not, or not all, computed."""

    def place(found: re.Match[str]) -> str:
        name = found[2]
        return f"{found[1]}\n{section(name, trials[name]) if name in trials else _NOT_YET}\n\n{found[3]}"

    return _PLACE.sub(place, page)


_NOT_YET = "*Not computed yet.*"


def is_whole(name: str, trials: Trials) -> bool:
    """Whether these are all trials of an experiment; the tables of a part would mislead."""
    return all(trial.optional or trial.name in trials for trial in trials_of(name))


def section(name: str, trials: Trials) -> str:
    """The claims, tables and findings of an experiment, and how they were computed; of a part, how many trials."""
    if not is_whole(name, trials):
        return f"*Computed in part: {len(trials)} of {len(trials_of(name))} trials are kept.*"
    experiment, found = EXPERIMENTS[name.removesuffix("-full")], reproduced(name, trials)
    parts = [f"**{table.title}**\n\n{table.markdown()}" for table in found.shown_tables]
    full = name.endswith("-full")
    points = [*found.findings, *about(experiment, full, trials)]
    if not full and experiment.scale(True) != experiment.scale(False):
        points.append(f"`--full`: {experiment.scale(True)}")
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
            whole = name in trials and is_whole(name, trials[name])
            claims = reproduced(name, trials[name]).claims if whole else ()
            rows += [f"| {title} | `{name}` | {claim.text} | **{claim.verdict}** |" for claim in claims]
            if not whole:
                rows.append(f"| {title} | `{name}` | {EXPERIMENTS[name.removesuffix('-full')].title} | not computed |")
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
        if not options.back:
            try:
                print(keep(folder))
            except FewerTrials as error:
                sys.exit(f"error: {error}")
        elif pretrainings(folder.name) and not kept_weights(folder.name).exists():
            print(f"{folder}: nothing written: its trials need weights that it trains first, and these are not kept")
        else:
            print(f"{folder}: {write_kept(folder)} trials written")
    if options.back:
        return
    trials = all_kept()
    pages = {path: with_tables(path.read_text(), trials) for path in sorted(PAPERS.glob("*.md"))}
    for path, page in pages.items():
        path.write_text(page)
    INDEX.write_text(with_verdicts(INDEX.read_text(), pages, trials))


if __name__ == "__main__":
    main()
