"""The plan of a comparison: its runs and their state, as `comparison.json` has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from tepal.host.text import visible
from tepal.host.toml import Value
from tepal.records.run_directory import CHECKPOINTS, MOST_CONFIG, is_held, read_file, read_summary, write_whole
from tepal.tools.compare.sections import MOST_SECTIONS, NAME, Section, Variant, section_of
from tepal.tools.compare.target import BASELINE, FinalScore, final_score, target_value
from tepal.tools.simulation.engines import AUTO, PROCESS

PLAN = "comparison.json"
CSV, RUNS_CSV, MARKDOWN, LATEX = "comparison.csv", "runs.csv", "comparison.md", "comparison.tex"
HTML, SVG = "comparison.html", "comparison.svg"

FEDAVG = "fedavg"
"""The strategy that others are compared with, unless a section names a baseline."""

OWN_KEYS = ("strategy", "seed", "runs", "resume")
"""Keys of the run config that differ between the runs of a comparison."""


@dataclass
class ComparedRun:
    """One run of a comparison: a strategy or a variant with a seed, its run directory once it has begun, its state."""

    strategy: str
    seed: int
    directory: Path | None = None
    outcome: str = "not run"  # or "running", "finished", "failed", "stopped"
    reason: str = ""  # why it failed
    variant: str = ""  # of a variants file; "": what is compared are strategies

    @property
    def compared(self) -> str:
        """The name of what is compared: its variant or its strategy."""
        return self.variant or self.strategy

    @property
    def checkpointed(self) -> bool:
        """Whether it can be resumed."""
        return self.directory is not None and any((self.directory / CHECKPOINTS).glob("round-*"))

    def to_dict(self) -> dict[str, Any]:
        """Return its values under the keys of `comparison.json`."""
        values = {"run" if key == "directory" else key: value for key, value in vars(self).items()}
        return values if self.variant else {key: value for key, value in values.items() if key != "variant"}


@dataclass
class Comparison:
    """The runs that are compared, in the order in which they are run, and their common settings.

    Args:
        folder: The folder of the comparison.
        runs: Every strategy or variant with every seed.
        run_config: The run config of all runs, without `OWN_KEYS`; a variant's own keys are in its section.
        clients: The number of simulated clients.
        cpus, gpus: Resources of each client, as of `tepal compare`; on a cluster, of each run.
        memory: Gigabytes of each run on a cluster.
        engine: What simulates the clients.
        app: The absolute path of the app's folder; "" for Tepal's own, and of a comparison from an earlier version.
        target: The score until which bytes, rounds and time are counted, or the text of a `FinalScore`; None:
            `target_of`.
        sections: The variants, in sections; empty if strategies are compared without varied keys.
    """

    folder: Path
    runs: list[ComparedRun]
    run_config: Mapping[str, Value]
    clients: int
    cpus: float | None = None
    gpus: float = 0
    memory: float = 0
    engine: str = AUTO
    app: str = ""
    target: float | str | None = None
    sections: Sequence[Section] = ()

    @property
    def names(self) -> list[str]:
        """The names of what is compared: variants or strategies."""
        return list(dict.fromkeys(run.compared for run in self.runs))

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(run.strategy for run in self.runs))

    @property
    def groups(self) -> Sequence[Section]:
        """The sections; strategies that are compared are the variants of one without a title."""
        if self.sections:
            return self.sections
        return (Section("", tuple(Variant(name, {"strategy": name}) for name in self.names)),)

    @property
    def asks(self) -> bool:
        """Whether a section asks a question."""
        return any(section.question for section in self.sections)

    @property
    def of_strategies(self) -> bool:
        """Whether strategies are compared, and not the variants of a file."""
        return not any(variant.of or not variant.values for variant in self._variants.values())

    @property
    def relative_target(self) -> FinalScore | None:
        """The final score that the target is relative to, if it is."""
        return final_score(self.target)

    def reference(self, section: Section, name: str) -> str:
        """The strategy or variant of a section that a target names, without varied values; "" if it has none."""
        bases = [variant.base for variant in section.variants]
        if name == BASELINE:
            usual = FEDAVG if self.of_strategies else bases[0]
            name = next((each.base for each in section.variants if each.name == section.baseline), usual)
        return name if name in bases else ""

    @property
    def grid(self) -> dict[str, tuple[Value, ...]]:
        """The varied keys with all their values, in their order; empty if no key is varied."""
        values = [variant.values for variant in self._variants.values()]
        keys = values[0] if values else ()
        return {key: tuple(dict.fromkeys(each[key] for each in values)) for key in keys}

    @property
    def bases(self) -> list[str]:
        """The strategies or variants, without the varied values."""
        return list(dict.fromkeys(variant.base for section in self.groups for variant in section.variants))

    @property
    def coloured(self) -> list[str]:
        """The names that have a look of their own in figures: what is compared and, of a grid, the bases."""
        return list(dict.fromkeys([*self.names, *(self.bases if self.grid else ())]))

    @cached_property
    def _variants(self) -> Mapping[str, Variant]:
        return {variant.name: variant for section in self.sections for variant in section.variants}

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    @property
    def task(self) -> str:
        """Model and dataset; if variants differ in them, the number of such pairs."""
        return self.task_of(self.groups)

    def task_of(self, sections: Sequence[Section]) -> str:
        """`task` of some of the sections."""
        configs = [{**self.run_config, **each.run_config} for section in sections for each in section.variants]
        found = [" on ".join(str(one[key]) for key in ("model", "dataset") if key in one) for one in configs]
        tasks = list(dict.fromkeys(found))
        if len(tasks) > _MOST_TASKS:
            return f"{len(tasks)} models and datasets"
        return ", ".join(filter(None, tasks)) or f"{'strategies' if self.of_strategies else 'variants'} compared"

    def name(self, run: ComparedRun) -> str:
        """The name of a run: its variant or strategy with the varied values, and the seed if there are several."""
        name = self._variants[run.variant].label if run.variant else run.strategy
        return name if len(self.seeds) == 1 else f"{name} seed {run.seed}"

    def place(self, run: ComparedRun) -> str:
        """Where a message finds what a run is of: its strategy, or its variant and section."""
        if not run.variant:
            return run.strategy
        variant = self._variants[run.variant]
        if self.of_strategies:
            return variant.label
        section = next(one for one in self.sections if run.variant in one.names)
        values = variant.label.removeprefix(variant.base)
        return f"{section.place}variant {variant.base!r}{values}"

    def settings_of(self, run: ComparedRun) -> dict[str, Value]:
        """The run config of a run without `seed`, `runs` and `resume`."""
        own = self._variants[run.variant].run_config if run.variant else {}
        return {**self.run_config, **own, "strategy": run.strategy}

    def config_of(self, run: ComparedRun) -> dict[str, Value]:
        """The run config with which a run is begun or, if it has a checkpoint, resumed."""
        resume = str(run.directory) if run.checkpointed else ""
        values = (run.strategy, run.seed, str(self.folder), resume)
        from tepal.server_app.config.earlier import as_of_now  # torch: a second

        # A comparison that an earlier version began goes on with the settings that its keys had then.
        return as_of_now({**self.settings_of(run), **dict(zip(OWN_KEYS, values, strict=True))})

    def save(self) -> None:
        """Write `comparison.json`. Raises OSError, naming the file, where it cannot be written."""
        names = [each.name for each in fields(self) if each.name not in ("folder", "runs", "sections")]
        plan = {name: getattr(self, name) for name in names}
        # Earlier versions know neither sections, memory nor app, and read what has none.
        for name in ("memory", "app"):
            if not plan[name]:
                del plan[name]
        if self.sections:
            plan["sections"] = [section.to_dict() for section in self.sections]
        cells = [{**run.to_dict(), "run": run.directory.name if run.directory else None} for run in self.runs]
        write_whole(self.folder / PLAN, (json.dumps({**plan, "cells": cells}, indent=2) + "\n").encode())


def planned_runs(strategies: Sequence[str], seeds: Sequence[int]) -> list[ComparedRun]:
    """All runs in their order: every strategy with the first seed, then with the next."""
    return [ComparedRun(strategy, seed) for seed in seeds for strategy in strategies]


def planned_variants(sections: Sequence[Section], seeds: Sequence[int]) -> list[ComparedRun]:
    """All runs in their order: every variant with the first seed, then with the next."""
    variants = [variant for section in sections for variant in section.variants]
    return [ComparedRun(each.strategy, seed, variant=each.name) for seed in seeds for each in variants]


def is_comparison(folder: Path) -> bool:
    """Whether a folder is that of a comparison."""
    return (folder / PLAN).is_file() or (folder / CSV).is_file()


def find_comparison(path: Path) -> Path:
    """The folder of a comparison: `path` itself, or the folder in it whose `comparison.json` is the newest.

    Raises FileNotFoundError if there is none.
    """
    if is_comparison(path):
        return path
    inside = list(path.glob(f"*/{PLAN}"))
    if not inside:
        raise FileNotFoundError(
            f"no comparison at {path}: expected runs/<start>-compare, as `tepal compare` makes it, or a folder of those"
        )
    return max(inside, key=lambda plan: plan.stat().st_mtime_ns).parent


def read_comparison(folder: Path) -> Comparison:
    """Read the comparison in a folder. Raises OSError or ValueError if it is not one."""
    folder = folder.resolve()
    plan = folder / PLAN
    if not plan.is_file():
        raise FileNotFoundError(
            f"{folder} has no {PLAN}, which names what is compared: it is not a comparison, or an older version made it"
        )
    try:
        values = json.loads(read_file(plan, MOST_CONFIG))
        if values.pop("in_process", False):  # the key's name in earlier versions
            values["engine"] = PROCESS
        runs = [_compared_run(cell, folder) for cell in values.pop("cells")]
        sections = tuple(map(section_of, values.pop("sections", ())))
        comparison = Comparison(folder, runs, **values, sections=sections)
        _check(comparison)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{plan} is damaged ({visible(error, _LONGEST_ERROR)}): take it from a copy") from error
    for run in comparison.runs:
        _update_state(run, folder)
    return comparison


_LONGEST_ERROR = 300  # characters
_MOST_TASKS = 2  # that are named in a heading
_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
MOST_RUNS = 10_000
_OUTCOMES = ("not run", "running", "finished", "failed", "stopped")


def _compared_run(cell: dict[str, Any], folder: Path) -> ComparedRun:
    """A run as `comparison.json` has it. Raises ValueError, KeyError or TypeError where it is not one."""
    name = cell.pop("run")
    run = ComparedRun(**cell, directory=folder / name if name else None)
    # A strategy's name is also the name of its colour in style sheets.
    if not isinstance(run.strategy, str) or not NAME.fullmatch(run.strategy):
        raise ValueError("the name of a strategy is not of letters, digits, - and _")
    if name and not (isinstance(name, str) and _FOLDER.fullmatch(name)):  # pages have links to it
        raise ValueError("a run is not the name of a run directory next to it")
    if type(run.seed) is not int or run.outcome not in _OUTCOMES or not isinstance(run.reason, str):
        raise ValueError("the seed, the outcome or the reason of a run is of another type")
    if run.directory is not None and run.directory.is_symlink():
        raise ValueError("a run is a link")
    return run


def _check(comparison: Comparison) -> None:
    """Raise ValueError for a comparison without runs or with very many, or settings of another type."""
    if not 0 < len(comparison.runs) <= MOST_RUNS:
        raise ValueError(f"it has {len(comparison.runs)} runs, expected 1 to {MOST_RUNS:,}")
    if not isinstance(comparison.run_config, dict) or type(comparison.clients) is not int:
        raise ValueError("the run config or the number of clients is of another type")
    if not isinstance(comparison.app, str) or not (comparison.app == "" or Path(comparison.app).is_absolute()):
        raise ValueError("the folder of the app is not an absolute path")
    if comparison.target is not None:
        comparison.target = target_value(comparison.target)
    for value in comparison.run_config.values():
        if not isinstance(value, str | int | float | bool | list | None):
            raise ValueError("a value of the run config is of another type")
    if len(comparison.sections) > MOST_SECTIONS:
        raise ValueError(f"it has {len(comparison.sections)} sections, at most {MOST_SECTIONS} are allowed")
    variants = [variant for section in comparison.sections for variant in section.variants]
    if len({variant.name for variant in variants}) < len(variants):
        raise ValueError("two variants have one name")
    if len({tuple(variant.values) for variant in variants}) > 1:
        raise ValueError("its variants differ in the keys that are varied")
    # Each variant once with each seed: otherwise a section would be without results, or have some twice.
    planned = [(variant.name, variant.strategy, seed) for variant in variants for seed in comparison.seeds]
    if variants and sorted((run.variant, run.strategy, run.seed) for run in comparison.runs) != sorted(planned):
        raise ValueError("its runs are not each variant with each seed")
    if not variants and any(run.variant for run in comparison.runs):
        raise ValueError("a run is of a variant that no section has")


def _update_state(run: ComparedRun, folder: Path) -> None:
    """Correct the state of a run whose comparison was killed, or that was resumed without it."""
    if run.directory is not None and not run.directory.is_dir():
        run.directory, run.outcome, run.reason = None, "not run", ""
    summary = read_summary(run.directory) if run.directory else None
    if summary is not None and summary.get("stopped_by") is None:
        run.outcome, run.reason = "finished", ""
    elif run.outcome == "running" and not is_held(folder):
        run.outcome = "stopped"
