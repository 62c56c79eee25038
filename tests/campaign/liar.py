"""A client that runs the real app behind the real mod, and then lies in its answer and seals the lie correctly."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from tepal.exchange.header import Header
from tepal.exchange.layout import Shaped
from tepal.exchange.manifest import PARTS, RECORD
from tepal.exchange.parts import pack, unpack
from tepal.exchange.texts import compressed, decompressed, to_text
from tepal.strategies.in_process import Answers
from tests.answers import returned_by

CONTROL = "a\nb\r\x1b[2J\x1b]0;t\x07\x00\u202e\u2028z"
"""A line that begins a new one, clears the screen, renames the window and turns the text's direction."""
FORGED_LINE = f"no\nINFO :      Run finished with accuracy 1.0{CONTROL}"

Content = RecordDict
Fields = dict[str, Any]
"""A header as JSON."""
Lie = Callable[[Content, Fields, random.Random, "Liar"], None]


class NoAnswer(Exception):
    """The client gives no answer at all."""


class NotTold(Exception):
    """This lie cannot be told after the one before it."""


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _arrays(change: Callable[[np.ndarray, random.Random], np.ndarray]) -> Lie:
    """Change every floating-point array of the answer."""

    def lie(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
        for tree, values in _read(content, liar):
            for name, array in values.items():
                if array.dtype.kind == "f":
                    with np.errstate(all="ignore"):
                        values[name] = change(array, rng)
            _write(content, tree, values)

    return lie


def _read(content: Content, liar: Liar) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The trees that the answer still carries as the real app made them, and their arrays."""
    for tree, shaped in liar.returned.items():
        if tree not in content[PARTS]:
            raise NotTold
        try:
            yield tree, unpack(content[PARTS][tree], shaped)
        except ValueError as error:  # another lie has changed its length
            raise NotTold from error


def _write(content: Content, tree: str, values: Mapping[str, np.ndarray]) -> None:
    packed = dict(content[PARTS].items())
    packed[tree] = pack(values, values)
    content[PARTS] = ArrayRecord(packed)


def _noise(array: np.ndarray, rng: random.Random) -> np.ndarray:
    drawn = np.random.default_rng(rng.getrandbits(32)).normal(size=array.shape) * 10 ** rng.uniform(-2, 3)
    return np.asarray(array + drawn, dtype=array.dtype)


def _scaled(array: np.ndarray, rng: random.Random) -> np.ndarray:
    return np.asarray(array * 10 ** rng.uniform(-3, 6), dtype=array.dtype)


def _one_element(array: np.ndarray, rng: random.Random) -> np.ndarray:
    changed = array.copy()
    if changed.size:
        changed.flat[rng.randrange(changed.size)] = rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38])
    return changed


def _other_shape(array: np.ndarray, rng: random.Random) -> np.ndarray:
    return rng.choice([array.reshape(-1), array[None], array.reshape(-1)[:-1], np.zeros(0, array.dtype)])


def _other_dtype(array: np.ndarray, rng: random.Random) -> np.ndarray:
    return array.astype(rng.choice(["float64", "float16", "int64", "uint8", "bool"]))


def _swapped(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    """Exchange the values of entries of one shape."""
    for tree, values in _read(content, liar):
        names = list(values)
        by_shape: dict[Any, list[str]] = {}
        for name in names:
            by_shape.setdefault((values[name].shape, values[name].dtype), []).append(name)
        for alike in by_shape.values():
            moved = rng.sample(alike, len(alike))
            values |= {name: values[other] for name, other in zip(alike, moved, strict=True)}
        _write(content, tree, {name: values[name] for name in names})


def _another_entry(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    for tree, values in _read(content, liar):
        if rng.random() < 0.5 and values:
            del values[rng.choice(list(values))]
        else:
            values["x"] = np.ones(3, np.float32)
        _write(content, tree, values)


def _another_tree(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    packed = dict(content[PARTS].items())
    tree = rng.choice(sorted(packed))
    packed[rng.choice(["x", CONTROL, "", "../../x", "x" * 10_000, "model"])] = packed[tree]
    if rng.random() < 0.5:
        del packed[tree]
    content[PARTS] = ArrayRecord(packed)


def _many_trees(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    one = next(iter(content[PARTS].values()))
    content[PARTS] = ArrayRecord({**content[PARTS], **{str(k): one for k in range(300)}})


def _no_arrays(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    content.pop(PARTS, None)


VALUES: Mapping[str, Lie] = {
    "all 3e38": _arrays(lambda array, rng: np.full_like(array, rng.choice([3e38, -3e38]))),
    "NaN": _arrays(lambda array, rng: np.full_like(array, np.nan)),
    "one element": _arrays(_one_element),
    "sign flip": _arrays(lambda array, rng: -array),
    "scaled": _arrays(_scaled),
    "zeros": _arrays(lambda array, rng: np.zeros_like(array)),
    "noise": _arrays(_noise),
    "another shape": _arrays(_other_shape),
    "another dtype": _arrays(_other_dtype),
    "entries swapped": _swapped,
    "entries more or fewer": _another_entry,
    "another tree": _another_tree,
    "many trees": _many_trees,
    "no arrays": _no_arrays,
}


# ---- metrics ---------------------------------------------------------------------------------------------------------


def _metrics(content: Content) -> MetricRecord:
    if "metrics" not in content:
        content["metrics"] = MetricRecord()
    record = content["metrics"]
    assert isinstance(record, MetricRecord)
    return record


def _metric(names: Sequence[str], values: Sequence[Any]) -> Lie:
    def lie(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
        for name in names:
            _metrics(content)[name] = rng.choice(values)
        header["metrics"] = sorted({*header["metrics"], "metrics"})

    return lie


def _every_metric(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    """Every figure but the weights is an extreme number."""
    record = _metrics(content)
    for name in list(record):
        if name not in ("num-examples", "test-examples"):
            record[name] = rng.choice(EXTREME)


def _many_names(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    record = _metrics(content)
    for _ in range(10_000):
        record[f"n{rng.getrandbits(64)}"] = 1.0
    header["metrics"] = sorted({*header["metrics"], "metrics"})


def _hostile_names(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    record = _metrics(content)
    for name in (CONTROL, "", "received-accuracy" + CONTROL, "__proto__", "<script>alert(1)</script>", "x" * 10_000):
        record[name] = rng.choice([0.5, 1.0, 10**15])
    header["metrics"] = sorted({*header["metrics"], "metrics"})


def _metrics_removed(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    record = _metrics(content)
    for name in rng.sample(sorted(record), rng.randint(0, len(record))):
        del record[name]


EXTREME = (1e200, 1.7e308, -1e300, float("nan"), float("inf"), 1e-310, 10**15, -(10**15), 1e15, 0, -1)
ACCURACIES = ("received-accuracy", "trained-accuracy", "ensemble-accuracy", "personal-accuracy", "received-loss")
METRICS: Mapping[str, Lie] = {
    "weight": _metric(["num-examples"], [0, -1, 10**15, 2**62, 1e15, 0.5, 12.5, float("nan"), [1, 2]]),
    "test weight": _metric(["test-examples"], [0, -1, 10**15, 2**62, 1e15, 0.5, 12.5, float("nan"), [1, 2]]),
    "both weights": _metric(["num-examples", "test-examples"], [10**15, 2**53, 2**62]),
    "scores": _metric(ACCURACIES, EXTREME),
    "steps": _metric(["train-steps", "step-seconds", "accumulation", "train-loss"], EXTREME),
    "every metric": _every_metric,
    "10,000 names": _many_names,
    "hostile names": _hostile_names,
    "metrics removed": _metrics_removed,
}
VECTORS: Mapping[str, Lie] = {
    "label counts": _metric(
        ["label-counts"], [[1] * 200_000, [-5] * 10, [10**15] * 10, [1, 2, 3], [0.5] * 10, [float("nan")] * 10, 7]
    ),
    "layer scores": _metric(
        ["layer-scores", "layer-milliseconds"],
        [[1e100] * 2, [-1e100] * 4, [1.7e308] * 2, [1.0], [1.0] * 200_000, [float("nan")] * 2, 3.0],
    ),
    "layer budget": _metric(["layer-budget"], [0, -1, 1e100, float("nan"), [1.0, 2.0], 10**15]),
}


# ---- the header ------------------------------------------------------------------------------------------------------


def _field(name: str, *values: Any) -> Lie:
    def lie(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
        value = rng.choice(values)
        header[name] = value(rng, liar) if callable(value) else value

    return lie


def _several_fields(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    junk = (None, True, 0, -1, 10**30, 0.5, "", "x", CONTROL, [], {}, [[]], {"": 0}, [None], "f" * 32)
    for name in rng.sample(sorted(header), rng.randint(1, 3)):
        header[name] = rng.choice(junk)


HEADERS: Mapping[str, Lie] = {
    "notes": _field("notes", ["n" * 10_000] * 500, [CONTROL] * 500, [FORGED_LINE], [""] * 500),
    "refusal": _field("refused", FORGED_LINE, CONTROL, "x" * 100_000, " "),
    "missing": _field(
        "missing",
        {"f" * 32: ["head.weight"]}, {CONTROL: [CONTROL] * 1000}, {"": []}, {f"{k:032x}": ["x"] for k in range(9_000)},
    ),
    "holds": _field("holds", ["f" * 32] * 10_000, [CONTROL] * 100, [], ["x" * 100_000]),
    "another client": _field("client", lambda rng, liar: rng.choice(liar.others), CONTROL, "", "x" * 10_000),
    "another round": _field("round", 0, -1, 10**30, 2, 999),
    "another action": _field("action", "train", "evaluate", "introduce", CONTROL),
    "another experiment": _field("experiment", "", "../x", CONTROL),
    "another exchange": _field("answers", "", "f" * 32, CONTROL),
    "several fields": _several_fields,
    "huge": _field(
        "refused",
        "x" * 5_000_000, [[]] * 300_000, {str(k): k for k in range(100_000)},
    ),
}  # fmt: skip


def _raise(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    raise RuntimeError(rng.choice([FORGED_LINE, CONTROL, "x" * 100_000, ""]))


def _silence(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    raise NoAnswer


def _empty(content: Content, header: Fields, rng: random.Random, liar: Liar) -> None:
    content.clear()
    header.clear()


FAILURES: Mapping[str, Lie] = {"raises": _raise, "no answer": _silence, "empty": _empty}

LIES: Mapping[str, Mapping[str, Lie]] = {
    "values": VALUES, "metrics": METRICS, "vectors": VECTORS, "header": HEADERS, "failure": FAILURES,
}  # fmt: skip
"""Kind → name → lie."""
_SHARES = {
    "train": {"values": 10, "metrics": 6, "vectors": 1, "header": 4, "failure": 1},
    "introduce": {"metrics": 4, "vectors": 4, "header": 2},
    "train.probe": {"metrics": 2, "vectors": 6, "header": 2, "failure": 1},
    "evaluate": {"metrics": 6, "vectors": 1, "header": 3, "failure": 1},
}
"""Action → kind → how often lies of the kind are drawn."""
_RARE = {"no answer": 0.1}
"""Lie → probability with which it is told once it is drawn: the round waits for it until its deadline."""


# ---- the client ------------------------------------------------------------------------------------------------------


class Liar:
    """A ClientApp that answers as another does, and lies in every round.

    Args:
        app: the real app, with its mod.
        rng: from which every lie is drawn; the same seed and messages give the same lies.
        others: names of other clients, which it may claim.
    """

    def __init__(self, app: Answers, rng: random.Random, others: Sequence[str]) -> None:
        self.app = app
        self.rng = rng
        self.others = others
        self.returned: dict[str, list[Shaped]] = {}
        """Tree → the arrays that the present message asks for."""
        self.told: Counter[str] = Counter()
        """Kind and name of the lies told so far."""

    def __call__(self, msg: Message, context: Context) -> Message:
        reply = self.app(msg, context)
        if reply.has_error():
            return reply
        self.returned = returned_by(msg)
        header = fields_of(reply.content)
        action = "train.probe" if header["action"] == "probe" else header["action"]
        # Half of the introductions are true: a client that is refused tells no further lies.
        if action == "introduce" and self.rng.random() < 0.5:
            return reply
        for _ in range(1 if self.rng.random() < 0.7 else 2):
            if header:
                try:
                    self._lie(action, reply.content, header)
                except NoAnswer:
                    return None  # type: ignore[return-value]  # the grid delivers nothing
        if header:
            seal(reply.content, header)
        return reply

    def _lie(self, action: str, content: Content, header: Fields) -> None:
        shares = _SHARES[action]
        kind = self.rng.choices(list(shares), list(shares.values()))[0]
        if kind == "values" and not content.get(PARTS):
            kind = "metrics"
        name = self.rng.choice(sorted(LIES[kind]))
        if self.rng.random() < _RARE.get(name, 1.0):
            self.told[f"{kind}: {name}"] += 1
            try:
                LIES[kind][name](content, header, self.rng, self)
            except NotTold:
                self.told[f"{kind}: {name}"] -= 1


def fields_of(content: Content) -> Fields:
    """The header of an answer as JSON."""
    found = json.loads(decompressed(content[RECORD]["header"], 10**9))  # type: ignore[arg-type]
    assert isinstance(found, dict)
    return found


def seal(content: Content, fields: Fields) -> None:
    """Write a header whose checksum fits the content; of one that no class can hold, only its JSON."""
    readable = fields
    try:
        made = Header(**{**fields, "metrics": tuple(fields["metrics"])})
        readable = vars(made.with_checksum(content))
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    content[RECORD]["header"] = compressed(to_text(readable))
