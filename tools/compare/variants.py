"""The variants file of `tepal compare --variants`: what it compares, and everything that is wrong with it.

    seeds = [1, 2, 3]           # these three are optional, as are common, vary and section.common
    clients = 10
    target = 0.95               # or a final score with a margin, such as "baseline-0.005"
    [common]                    # keys of the run config of all variants
    model = "tiny-vit"
    [vary]                      # every variant runs with every combination of these values
    learning-rate = [0.001, 0.01]
    [[section]]                 # or [[variant]] at once, without sections
    title = "Fewer bytes, one model"
    about = "One sentence: what is compared, and why."
    question = "bytes"          # or "own-tests", "doubt", or none
    baseline = "FedAvg"         # what the others are compared with; by default the section's first variant
    within = 0.005              # how much less than the baseline's final accuracy is enough
    [section.common]            # keys of all variants of this section
    partitioner = "dirichlet"
    [[section.variant]]
    name = "FedAvg"
    strategy = "fedavg"

A key has the value of the most specific place that sets it: variant, section.common, common, the app's pyproject.toml.
Relative paths are looked for in the current folder, then in the file's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tepal.host.toml import Value, flat, parse_untrusted
from tepal.server_app.config import ConfigError, defaults
from tepal.server_app.config.checks import unknown
from tepal.server_app.config.client_tables import PREFIX
from tepal.tools.compare.grid.values import Grid, read_vary_table
from tepal.tools.compare.plan import MOST_RUNS, OWN_KEYS
from tepal.tools.compare.sections import BYTES, MOST_SECTIONS, NAME, Section, Variant, near, problems
from tepal.tools.compare.target import target_value
from tepal.tools.paths import absolute_paths

_TOP_KEYS = ("seeds", "clients", "target", "common", "vary", "variant", "section")
_SECTION_KEYS = ("title", "about", "question", "baseline", "within", "common", "variant")
_NOT_HERE = {
    "seed": "leave it out, and give seeds = [1, 2, 3] at the top of the file",
    "runs": "leave it out, and name the folder with -c 'runs=\"FOLDER\"'",
    "resume": "leave it out: all runs start from the beginning; a comparison is resumed with `tepal compare --resume`",
}
assert {*_NOT_HERE, "strategy"} == set(OWN_KEYS)


@dataclass(frozen=True)
class VariantsFile:
    """What a variants file compares: the common part of the run config, sections, and optional settings.

    `vary` has the values of its table `[vary]`; the sections are those without them.
    """

    sections: tuple[Section, ...]
    common: Mapping[str, Value] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    clients: int | None = None
    target: float | str | None = None
    vary: Grid = field(default_factory=dict)


def read_variants(path: Path) -> VariantsFile:
    """Read a variants file.

    Raises ConfigError with all its problems, each with the file and where in it: unknown keys, values of a wrong type,
    missing or repeated names. The values of the run configs are checked later, with those of the app.
    """
    try:
        table = parse_untrusted(path.expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--variants {path} cannot be read: {error}") from error
    reader = _Reader(path.expanduser().parent)
    found = reader.read(table)
    if reader.problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in reader.problems))
    return found


class _Reader:
    """Reads the tables of a file, and keeps what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._names: set[str] = set()
        self._titles: set[str] = set()

    def read(self, table: Mapping[str, Any]) -> VariantsFile:
        self._unknown(table, _TOP_KEYS, "")
        common = self._config(table.get("common", {}), "[common]: ")
        if "variant" in table and "section" in table:
            self.problems.append("it has [[variant]] and [[section]]: move the variants into a [[section.variant]]")
        elif "variant" not in table and "section" not in table:
            self.problems.append("it has no variants: expected [[variant]], or [[section]] with [[section.variant]]")
        sections = [
            self._section(section, number, common)
            for number, section in enumerate(self._tables(table, "section", "[[section]]", ""), start=1)
        ]
        if "variant" in table and not sections:
            tables = self._tables(table, "variant", "[[variant]]", "")
            sections = [Section("", tuple(self._variants(tables, "", common)))]
        if len(sections) > MOST_SECTIONS:
            self.problems.append(f"it has {len(sections)} sections: at most {MOST_SECTIONS} are allowed")
        seeds = self._seeds(table.get("seeds", []))
        runs = max(1, len(seeds)) * sum(len(section.variants) for section in sections)
        if runs > MOST_RUNS:
            self.problems.append(f"it has {runs} runs, variants × seeds: at most {MOST_RUNS:,} are allowed")
        clients, target = table.get("clients"), table.get("target")
        if clients is not None and (type(clients) is not int or clients < 2):
            self.problems.append(f"clients={clients!r}: expected a whole number of at least 2")
        try:
            target = target if target is None else target_value(target)
        except ValueError as error:
            self.problems.append(f"target={target!r}: {error}")
        vary = read_vary_table(table.get("vary", {}), self._folder, self.problems)
        return VariantsFile(tuple(sections), common, tuple(seeds), clients, target, vary)

    def _seeds(self, seeds: Any) -> list[int]:
        whole = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
        if not whole or len(set(seeds)) < len(seeds):
            expected = f"different whole numbers of 0 to {2**32 - 1}, such as [1, 2, 3]"
            self.problems.append(f"seeds={seeds!r}: expected {expected}")
            return []
        return seeds

    def _section(self, table: Mapping[str, Any], number: int, common: Mapping[str, Value]) -> Section:
        title = table.get("title", "")
        place = f"section {title!r}" if title and isinstance(title, str) else f"section {number}"
        self._unknown(table, _SECTION_KEYS, f"{place}: ")
        own = self._config(table.get("common", {}), f"{place}, [section.common]: ")
        tables = self._tables(table, "variant", "[[section.variant]]", f"{place}: ")
        variants = [
            replace(variant, run_config={**own, **variant.run_config})
            for variant in self._variants(tables, f"{place}, ", {**common, **own})
        ]
        if isinstance(title, str) and title in self._titles:
            self.problems.append(f"{place}: a second section has this title: give each its own")
        self._titles.add(str(title))
        values = {key: table[key] for key in ("about", "question", "baseline", "within") if key in table}
        if values.get("question") == "":
            self.problems.append(f"{place}: question='': leave the key out if there is none")
        section = Section(title, tuple(variants), **values)
        if variants or not tables:  # without variants because they are wrong, its baseline is no problem of its own
            self.problems += [f"{place}: {problem}" for problem in problems(section)]
        if "within" in values and section.question != BYTES:
            self.problems.append(f"{place}: within is for question = {BYTES!r} only: leave it out")
        return section if section.baseline or not variants else replace(section, baseline=variants[0].name)

    def _variants(self, tables: Sequence[Any], place: str, common: Mapping[str, Value]) -> Iterator[Variant]:
        """The variants that have a name and a strategy; `common`: keys that are set for all of them."""
        for number, table in enumerate(tables, start=1):
            name = table.get("name")
            where = f"{place}variant {name!r}: " if name and isinstance(name, str) else f"{place}variant {number}: "
            config = self._config({key: value for key, value in table.items() if key != "name"}, where)
            if not isinstance(name, str) or not NAME.fullmatch(name):
                said = "no name" if name is None else f"name={name!r}"
                self.problems.append(f"{where}{said}: expected 1 to 64 letters, digits, - and _")
                continue
            if name in self._names:
                self.problems.append(f"{where}a second variant has this name: give each its own, in all sections")
            self._names.add(name)
            strategy = {**common, **config}.get("strategy")
            if strategy is None:
                self.problems.append(f'{where}no strategy: expected strategy = "fedavg" or another one')
            elif not isinstance(strategy, str):
                self.problems.append(f'{where}strategy={strategy!r}: expected a text, such as "fedavg"')
            else:
                yield Variant(name, {"strategy": strategy, **config})

    def _config(self, table: Any, place: str) -> dict[str, Value]:
        """Keys of the run config, flat."""
        if not isinstance(table, Mapping):
            self.problems.append(f"{place}{table!r} is not a table of run config keys")
            return {}
        config = flat(table)
        known = defaults()
        for key, value in config.items():
            if key in _NOT_HERE:
                self.problems.append(f"{place}{key}={value!r}: {_NOT_HERE[key]}")
            elif key in known and not isinstance(value, bool | int | float | str):
                self.problems.append(f"{place}{key}={value!r}: expected a text, a number, true or false")
        other = (key for key in config if not key.startswith(PREFIX))  # settings of clients are checked with the rest
        wrong = unknown(key for key in other if key not in known and key not in _NOT_HERE)
        self.problems += [f"{place}{problem}" for problem in wrong]
        return absolute_paths(config, Path(), self._folder)

    def _tables(self, table: Mapping[str, Any], key: str, written: str, place: str) -> list[Mapping[str, Any]]:
        found = table.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
            self.problems.append(f"{place}{key} is not an array of tables: write {written} above each")
            return []
        return found

    def _unknown(self, table: Mapping[str, Any], known: Sequence[str], place: str) -> None:
        for key in table:
            if key not in known:
                self.problems.append(f"{place}unknown key {key!r}: {near(key, known)}")
