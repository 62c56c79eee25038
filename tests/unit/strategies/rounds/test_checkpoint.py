"""Checkpoints: what is read is what was written, or an older one that is whole, whatever happened to the files."""

import collections
import ctypes
import enum
import errno
import json
import logging
import math
import mmap
import os
import resource
import shutil
import signal
import sys
import traceback
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tepal.exchange import files, parts
from tepal.exchange.layout import Layout
from tepal.exchange.parts import digest
from tepal.strategies.baselines.scaffold import ScaffoldState
from tepal.strategies.fedavg import FedAvgMethod, ModelState
from tepal.strategies.rounds import checkpoint as module
from tepal.strategies.rounds import state_json
from tepal.strategies.rounds.checkpoint import FACTS, STATE, Checkpoint, Checkpoints
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.resuming import Resuming
from tepal.strategies.rounds.state_json import CheckpointError, from_json, to_json

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="does to files and disks what Linux lets it do")


@dataclass(frozen=True)
class Global:
    entries: Any
    merges: int = 0


@dataclass
class Outer:
    model: Any
    control: Any = None

    @dataclass(frozen=True)
    class Nested:
        rate: Any


def checkpoint_of(number, *state):
    return Checkpoint(
        round=number,
        experiment="e",
        seed=7,
        method={"name": "FedAvgMethod", "ridge": 0.1},
        layout="digest",
        state=state[0] if state else Global({"w": np.full((3, 4), number, np.float32)}, number),
        held={"site 1": ("a", "b"), "ö": ()},
        current={"site 1": f"exchange-{number}"},
        standing={"failures": {"ö": 2}, "until": {}},
        clients=("site 1", "ö"),
        history={"train_metrics_clientapp": {str(r): {"loss": 1 / r, "nan": math.nan} for r in range(1, number + 1)}},
    )


def assert_same(was, now, met=None):
    """Equal in type and bits; and what was one array is one array again, what was two arrays is two."""
    met = {} if met is None else met
    assert type(was) is type(now)
    if isinstance(was, np.ndarray):
        assert met.setdefault(("was", id(was)), now) is now and met.setdefault(("now", id(now)), was) is was
        assert (was.dtype, was.shape) == (now.dtype, now.shape) and was.tobytes() == now.tobytes()
        assert not now.flags.writeable
    elif isinstance(was, float):
        assert (math.isnan(was) and math.isnan(now)) or (was == now and math.copysign(1, was) == math.copysign(1, now))
    elif isinstance(was, dict):
        assert_same(list(was.items()), list(now.items()), met)
    elif isinstance(was, list | tuple):
        assert len(was) == len(now)
        for one, other in zip(was, now, strict=True):
            assert_same(one, other, met)
    elif hasattr(was, "__dataclass_fields__"):
        assert_same(vars(was), vars(now), met)
    else:
        assert was == now


def test_classes_of_methods_and_states_are_found_under_their_earlier_names(tmp_path, monkeypatch):
    state = ScaffoldState({"w": np.ones(2)}, control={"w": np.zeros(2)})
    method = {"name": "Ensembling", "member": "Averaging", "assign": "schedule"}
    monkeypatch.setattr(state_json, "_name_of", lambda kind: f"{kind.__module__}:ControlledState")
    Checkpoints(tmp_path).save(replace(checkpoint_of(1, state), method=method))
    read = Checkpoints(tmp_path).latest()
    assert type(read.state) is ScaffoldState and read.state.control["w"].tolist() == [0, 0]
    assert read.method == {"name": "FedEnsembleMethod", "member": "FedAvgMethod", "assign": "schedule"}


def test_options_that_an_earlier_version_did_not_have_are_what_it_did(tmp_path):
    method = {"name": "Ensembling", "member": "BayesianEnsemble", "modes": 2, "member temperature": 0.5}
    state = ModelState({"w": np.ones(2)})
    Checkpoints(tmp_path).save(replace(checkpoint_of(1, state), method=method))
    assert Checkpoints(tmp_path).latest().method == {
        "name": "FedEnsembleMethod", "member": "FedBEMethod", "modes": 2, "member temperature": 0.5,
        "member variance scale": 1.0,
    }  # fmt: skip
    Checkpoints(tmp_path).save(replace(checkpoint_of(2, state), method={"name": "PFedMeMethod"}))
    assert Checkpoints(tmp_path).latest().method == {"name": "PFedMeMethod", "outer-step": 0.0}


def test_a_method_of_ones_own_that_has_an_earlier_name_of_ours_is_resumed(tmp_path):
    class Mixture(FedAvgMethod):
        """Called as APFL's method was."""

    layout = Layout.of_arrays({"w": np.zeros(2)})
    resuming = Resuming(Checkpoints(tmp_path), Mixture(), 0, layout)
    resuming.save(ModelState({"w": np.ones(2)}), 1, "experiment", ClientLedger(), {}, [], Result())
    assert resuming.latest(resume=True).round == 1


def there_and_back(state, folder):
    Checkpoints(folder).save(checkpoint_of(1, state))
    return Checkpoints(folder).latest().state


@contextmanager
def log_lines():
    """What goes to Flower's log. (Not caplog: hypothesis runs many examples in one test.)"""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def in_child(act, report):
    """Exit status of `act` in a process of its own; a child that fails leaves its traceback in `report`."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            act()
            os._exit(0)
        except BaseException:
            report.write_text(traceback.format_exc())
            os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != 99, report.read_text()
    return status


def content_of(folder):
    """Every file below a folder, but those of a writing that was broken off."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".writing-" not in str(path)
    }


# ---- states ----------------------------------------------------------------------------------------------------------

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8"]
LAYOUTS = {
    "row-major": np.asarray,
    "column-major": np.asfortranarray,
    "transposed": np.transpose,
    "every second": lambda array: array[::2] if array.ndim else array,
    "backwards": lambda array: array[::-1] if array.ndim else array,
    "repeated": lambda array: np.broadcast_to(array, (3, *array.shape)),
}

array_values = st.builds(
    lambda array, layout: LAYOUTS[layout](array),
    st_numpy.arrays(
        st.sampled_from(DTYPES).map(np.dtype), st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    ),
    st.sampled_from(sorted(LAYOUTS)),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.text(max_size=3))


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
            | st.builds(Global, inner, st.integers())
            | st.builds(Outer, inner, inner)
            | st.builds(Outer.Nested, inner)
        ),
        max_leaves=12,
    )


# Arrays are drawn first, and the state's leaves from them: so one stands in many places.
states = st.lists(array_values, min_size=1, max_size=4).flatmap(lambda pool: nested(scalars | st.sampled_from(pool)))


@settings(max_examples=60)
@given(states)
def test_a_state_comes_back_from_json_as_it_was(state):
    arrays = {}
    text = json.dumps(to_json(state, arrays))
    read_only = {name: array.copy() for name, array in arrays.items()}
    for array in read_only.values():
        array.flags.writeable = False
    assert_same(state, from_json(json.loads(text), read_only))


@settings(max_examples=25)
@given(state=states)
def test_a_state_comes_back_from_disk_as_it_was(tmp_path_factory, state):
    # An array goes along: a state without any is a test of its own.
    there = [state, np.arange(3)]
    folder = tmp_path_factory.mktemp("run")
    assert_same(there, there_and_back(there, folder))
    shutil.rmtree(folder)


@pytest.mark.parametrize("state", [None, {}, Global({}, 3), {"step": 4, "names": ["a", "b"]}], ids=repr)
def test_a_state_without_arrays_comes_back_from_disk(tmp_path, state):
    assert_same(state, there_and_back(state, tmp_path))


def test_an_array_that_stands_twice_is_written_once_and_comes_back_as_one(tmp_path):
    array = np.random.default_rng(0).normal(size=10_000)
    same = Global({"w": array, "again": array}, 1)
    other = {"start": array, "copy": array.copy(), "states": (same, same)}
    came = there_and_back(other, tmp_path)
    assert came["start"] is came["states"][0].entries["w"] is came["states"][1].entries["again"]
    assert came["copy"] is not came["start"]
    assert 2 * array.nbytes < (tmp_path / "round-000001" / STATE).stat().st_size < 2.1 * array.nbytes


def test_arrays_of_the_other_byte_order_keep_their_values(tmp_path):
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    came = there_and_back({"w": array}, tmp_path)["w"]
    np.testing.assert_array_equal(came, array)
    assert came.dtype == np.float32


class Thing:
    pass


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", 1j, np.int64(3), np.float32(3), np.bool_(True), Thing(), Global, len, object(), range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_a_state_must_not_hold_is_refused_with_its_type(value):
    for state in (value, {"a": [1, (value,)]}, Global({"w": value}), {("key", 2): Outer(value)}):
        with pytest.raises(TypeError, match=f"has a {type(value).__name__},"):
            to_json(state, {})


Point = collections.namedtuple("Point", "x y")


class Bag(list):
    pass


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Counted:
    names: tuple
    count: int = field(init=False)

    def __post_init__(self):
        self.count = len(self.names)


def local_class():
    @dataclass
    class Local:
        merges: int

    return Local(3)


@pytest.mark.parametrize(
    "value",
    [
        Point(1, 2),
        Bag([1, 2]),
        Counted(("a", "b")),
        local_class(),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.float64(2.5),
        Level.HIGH,
        collections.OrderedDict(b=1, a=2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_come_back_is_refused_when_it_is_saved(tmp_path, value):
    """Else a run saves after every round, and nobody knows before it dies that none of it can be read."""
    checkpoints = Checkpoints(tmp_path)
    try:
        checkpoints.save(checkpoint_of(1, {"v": value, "w": np.zeros(1)}))
    except TypeError as error:
        assert type(value).__name__ in str(error)
        return
    came = checkpoints.latest()
    assert came is not None, "it was saved and cannot be read"
    assert type(came.state["v"]) is type(value) and repr(came.state["v"]) == repr(value)


@pytest.mark.parametrize(
    "array",
    [np.array(["site 1", "ö"]), np.zeros(2, "M8[s]"), np.zeros(2, "c16"), np.array([{}, None]), np.zeros(2, "i4,f4")],
    ids=lambda array: str(array.dtype),
)
def test_arrays_that_no_file_can_hold_are_refused_with_their_dtype_and_not_taken_for_a_full_disk(tmp_path, array):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for number in (1, 2, 3):
        checkpoints.save(checkpoint_of(number))
    before = content_of(tmp_path)
    with pytest.raises((TypeError, OSError)) as failure:
        checkpoints.save(checkpoint_of(4, {"w": array}))
    assert failure.type is TypeError and str(array.dtype) in str(failure.value)
    assert content_of(tmp_path) == before


def test_a_class_that_is_not_known_is_said_and_nothing_is_imported(tmp_path, monkeypatch):
    (tmp_path / "bait.py").write_text(
        f"from dataclasses import dataclass\nopen({str(tmp_path / 'ran')!r}, 'w')\n@dataclass\nclass State: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("bait:State", "no.such.module:State", f"{__name__}:NoSuchClass", f"{__name__}:Outer.Nothing", ":", ""):
        with pytest.raises(CheckpointError, match="this version of Tepal does not have"):
            from_json({"type": name, "fields": {}}, {})
    assert "bait" not in sys.modules and not (tmp_path / "ran").exists()
    import bait

    assert isinstance(from_json({"type": "bait:State", "fields": {}}, {}), bait.State)


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "pathlib:Path", f"{__name__}:Thing"])
def test_only_dataclasses_are_made(name):
    with pytest.raises(CheckpointError, match="this version of Tepal does not have"):
        from_json({"type": name, "fields": {}}, {})


def test_a_state_whose_dataclass_has_other_fields_now_is_passed_over(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint_of(1))

    @dataclass
    class Renamed:
        weights: Any

    monkeypatch.setattr(sys.modules[__name__], "Global", Renamed)
    with log_lines() as lines:
        assert checkpoints.latest() is None
    assert any("checkpoint of round 1" in line for line in lines)


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def test_a_new_process_reads_the_newest_bit_for_bit(tmp_path):
    for number in (9, 10, 11):
        Checkpoints(tmp_path / "not" / "yet", keep=2).save(checkpoint_of(number))
    again = Checkpoints(tmp_path / "not" / "yet", keep=2)
    assert_same(checkpoint_of(11), again.latest())
    assert again.rounds() == [10, 11]
    assert again.versions() == {10: {"site 1": "exchange-10"}, 11: {"site 1": "exchange-11"}}


def test_one_checkpoint_at_a_time_is_in_memory_when_all_are_looked_at(tmp_path, monkeypatch):
    for number in range(1, 6):
        Checkpoints(tmp_path, keep=9).save(checkpoint_of(number))
    read, alive, most = module._read, [], []

    def counting(path):
        most.append(sum(checkpoint() is not None for checkpoint in alive))
        alive.append(weakref.ref(found := read(path)))
        return found

    monkeypatch.setattr(module, "_read", counting)
    assert list(Checkpoints(tmp_path, keep=9).versions()) == [1, 2, 3, 4, 5]
    assert max(most) == 0


def test_what_a_killed_server_left_half_written_is_removed_by_the_next_checkpoint(tmp_path):
    (tmp_path / ".writing-folder").mkdir()
    (tmp_path / ".writing-folder" / STATE).write_bytes(b"half a checkpoint")
    for name in (".writing-file", ".tmp0123"):
        (tmp_path / name).write_bytes(b"half a model beside the checkpoints")
    Checkpoints(tmp_path, keep=2).save(checkpoint_of(1))
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001"]


def test_there_may_be_none(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        assert Checkpoints(folder).latest() is None and Checkpoints(folder).rounds() == []
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_only_the_last_ones_stay(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for number in range(1, 8):
        checkpoints.save(checkpoint_of(number))
        assert checkpoints.rounds() == list(range(max(1, number - keep + 1), number + 1))
    assert len(list(tmp_path.iterdir())) == keep


def test_what_a_server_that_was_killed_could_not_remove_is_removed_at_the_end(tmp_path):
    for number in range(1, 6):
        Checkpoints(tmp_path, keep=9).save(checkpoint_of(number))
    (tmp_path / "round-000005" / FACTS).write_bytes(b"damaged")
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.prune(checkpoints.latest().round)
    assert checkpoints.rounds() == [3, 4, 5]  # what is newer than the one it is resumed from is replaced later
    checkpoints.prune(4)
    assert checkpoints.rounds() == [3, 4, 5] and checkpoints.latest().round == 4


def test_what_else_lies_in_the_folder_is_left_alone(tmp_path):
    for name in ("round-x", "notes.txt", "round-000001.old"):
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text("mine")
    checkpoints = Checkpoints(tmp_path, keep=1)
    for number in (1, 2, 3):
        checkpoints.save(checkpoint_of(number))
    assert checkpoints.rounds() == [2, 3], "the run may have to return to the one before the newest"
    assert {"round-x", "notes.txt", "round-000001.old"} < {path.name for path in tmp_path.iterdir()}


def test_a_round_that_is_repeated_takes_the_place_of_its_damaged_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (1, 2):
        checkpoints.save(checkpoint_of(number))
    (tmp_path / "round-000002" / FACTS).write_text("{")
    assert checkpoints.latest().round == 1
    checkpoints.save(checkpoint_of(2))
    assert_same(checkpoint_of(2), checkpoints.latest())


def test_a_checkpoint_that_was_just_written_stays_beside_damaged_ones_of_later_rounds(tmp_path):
    """The run began anew, because all of its checkpoints were damaged: what it writes now must count."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (4, 5):
        checkpoints.save(checkpoint_of(number))
        (tmp_path / f"round-{number:06d}" / STATE).write_bytes(b"")
    assert checkpoints.latest() is None
    checkpoints.save(checkpoint_of(1))
    assert checkpoints.latest() is not None and checkpoints.latest().round == 1
    checkpoints.save(checkpoint_of(2))
    assert checkpoints.latest().round == 2


def test_no_room_is_made_at_the_cost_of_the_only_checkpoint_that_is_whole(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for number in (5, 6, 7):
        checkpoints.save(checkpoint_of(number))
    (tmp_path / "round-000007" / STATE).write_bytes(b"")
    assert checkpoints.latest().round == 6

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_arrays", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(checkpoint_of(7))
    assert checkpoints.latest() is not None and checkpoints.latest().round == 6


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints of rounds 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    for number in (1, 2):
        entries = {"w": np.arange(12.0).reshape(3, 4) + number, "n": np.array(number)}
        state = {"model": Global(entries, number), "é": [0.1, -0.0]}
        Checkpoints(folder).save(checkpoint_of(number, state))
    return folder


@contextmanager
def damaged(path, data):
    whole = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(whole)


@settings(max_examples=150)
@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), file=st.sampled_from([STATE, FACTS]))
def test_one_changed_byte_never_gives_another_value(two, where, change, file):
    whole = [Checkpoints(two).latest()]
    path = two / "round-000002" / file
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= change
    with damaged(path, data), log_lines() as lines:
        found = Checkpoints(two).latest()
        if not lines:  # a space more, or a digest in capitals: another byte that says the same
            assert_same(found, whole[0])
            return
    assert "checkpoint of round 2" in lines[0]
    assert found.round == 1
    with damaged(two / "round-000002" / STATE, b""):
        assert_same(found, Checkpoints(two).latest())


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), file=st.sampled_from([STATE, FACTS]))
def test_a_torn_checkpoint_is_passed_over(two, where, file):
    path = two / "round-000002" / file
    data = path.read_bytes()
    with damaged(path, data[: int(where * len(data))]), log_lines() as lines:
        assert Checkpoints(two).latest().round == 1
    assert "checkpoint of round 2" in lines[0]


@pytest.mark.parametrize("file", [STATE, FACTS])
@pytest.mark.parametrize("harm", ["gone", "a folder", "zeros"])
def test_a_checkpoint_that_lacks_a_file_is_passed_over(two, tmp_path, file, harm):
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    path = folder / "round-000002" / file
    size = path.stat().st_size
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm == "zeros":
        path.write_bytes(bytes(size))
    with log_lines() as lines:
        assert Checkpoints(folder).latest().round == 1
    assert "checkpoint of round 2" in lines[0]
    assert {"site 1": "exchange-1"} in Checkpoints(folder).versions().values()


def test_when_all_are_damaged_there_is_none(two, tmp_path):
    shutil.copytree(two, tmp_path / "copy")
    for path in (tmp_path / "copy").rglob(STATE):
        path.write_bytes(path.read_bytes()[:-1])
    with log_lines() as lines:
        assert Checkpoints(tmp_path / "copy").latest() is None
    assert len(lines) == 2


def with_format(number, two, folder):
    """A copy of two checkpoints, the second of which has another format."""
    shutil.copytree(two, folder)
    path = folder / "round-000002" / FACTS
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))
    return Checkpoints(folder)


@pytest.mark.parametrize("number", [0, -1, 2.5, "2", None])
def test_a_checkpoint_of_no_known_format_is_passed_over(number, two, tmp_path):
    with log_lines() as lines:
        assert with_format(number, two, tmp_path / "copy").latest().round == 1
    assert "format" in lines[0]


def test_a_checkpoint_of_a_later_version_is_not_passed_over_because_the_next_one_would_replace_it(two, tmp_path):
    saved = with_format(99, two, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"round-000002 was written by a later version .*format 99"):
        saved.latest()
    assert saved.rounds() == [1, 2]


# ---- a process that dies while it writes -----------------------------------------------------------------------------


def assert_whole_after_a_death(folder, before):
    """Older checkpoints as they were; the newest is one of two; and the next writing leaves no rubbish."""
    left = Checkpoints(folder, keep=2)
    found = left.latest()
    assert found.round in (2, 3)
    assert_same(checkpoint_of(found.round), found)
    now = content_of(folder)
    if found.round == 2:
        assert now == before
    left.save(checkpoint_of(4))
    assert_same(checkpoint_of(4), left.latest())
    assert left.rounds() == [found.round, 4]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == sorted(
        f"round-{number:06d}{file}" for number in (found.round, 4) for file in ("", f"/{STATE}", f"/{FACTS}")
    )
    return found.round


@pytest.fixture
def dying(tmp_path):
    """dying(set_the_trap) → the round of the newest checkpoint after a process died in writing that of round 3."""
    base = tmp_path / "base"
    for number in (1, 2):
        Checkpoints(base, keep=2).save(checkpoint_of(number))

    def die(set_the_trap):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)

        def write():
            set_the_trap()
            Checkpoints(folder, keep=2).save(checkpoint_of(3))

        status = in_child(write, tmp_path / "traceback")
        return status, assert_whole_after_a_death(folder, content_of(base))

    return die


def test_a_process_killed_at_any_step_of_writing_leaves_whole_checkpoints(dying):
    """Every file that it opens, makes, renames or removes is one step: the process dies before each in turn."""
    steps = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "tempfile.mkstemp"}
    newest = []
    for step in range(1, 200):

        def trap(step=step):
            seen = []

            def hook(event, arguments):
                if event in steps:
                    seen.append(event)
                    if len(seen) == step:
                        os._exit(9)

            sys.addaudithook(hook)

        status, found = dying(trap)
        newest.append(found)
        if status == 0:
            break
    assert status == 0 and len(newest) > 10
    assert newest == sorted(newest), "once the new one is there, it stays"


@linux
@pytest.mark.parametrize("file", [1, 2, 3, 4])
def test_a_process_killed_with_a_file_half_written_leaves_whole_checkpoints(dying, file):
    """It dies when it asks for the disk to have its 1st, 2nd, … file or folder; of a file the disk has half."""

    def trap():
        real, calls = os.fsync, []

        def fsync(handle):
            calls.append(handle)
            if len(calls) < file:
                return real(handle)
            size = os.fstat(handle).st_size
            try:
                os.truncate(f"/proc/self/fd/{handle}", size // 2)
            except OSError:
                assert file in (2, 4), "only a folder cannot be cut"
            os._exit(9)

        os.fsync = fsync

    status, found = dying(trap)
    assert status == 9 and found == (2 if file < 4 else 3)


def test_a_process_killed_within_the_arrays_leaves_whole_checkpoints(dying):
    def trap():
        real = files.save_file

        def save_file(arrays, path, **options):
            real(arrays, path, **options)
            os.truncate(path, os.path.getsize(path) // 2)
            os._exit(9)

        files.save_file = save_file

    assert dying(trap) == (9, 2)


# ---- a disk that is full ---------------------------------------------------------------------------------------------


def state_of_bytes(size, number):
    return {"w": np.full(size, number % 256, np.uint8)}


def mount_small_disk(folder, size):
    """A disk of so many bytes, which only this process sees; False where that is not allowed."""
    new_mounts, new_user = 0x00020000, 0x10000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts) != 0:
        user, group = os.getuid(), os.getgid()
        if libc.unshare(new_mounts | new_user) != 0:
            return False
        try:
            for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                with open(f"/proc/self/{file}", "w") as handle:
                    handle.write(text)
        except OSError:
            return False
    private = 0x00040000 | 0x4000  # MS_PRIVATE | MS_REC: nothing of it is seen outside
    if libc.mount(b"none", b"/", None, private, None) != 0:
        return False
    return libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()) == 0


@linux
def test_on_a_full_disk_older_checkpoints_make_room_and_the_newest_stays(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()

    def fill():
        if not mount_small_disk(folder, 1_000_000):
            os._exit(77)
        checkpoints = Checkpoints(folder / "run", keep=10)
        for number in range(1, 9):  # four of them fill the disk
            checkpoints.save(checkpoint_of(number, state_of_bytes(200_000, number)))
            assert_same(checkpoint_of(number, state_of_bytes(200_000, number)), checkpoints.latest())
        assert len(checkpoints.rounds()) < 8
        before = content_of(folder / "run" / "round-000008")
        try:
            checkpoints.save(checkpoint_of(9, state_of_bytes(2_000_000, 9)))
        except OSError as error:
            assert "No space" in str(error), error
        else:
            raise AssertionError("a checkpoint larger than the disk was written")
        assert checkpoints.rounds() == [8] and content_of(folder / "run" / "round-000008") == before
        assert [path.name for path in (folder / "run").iterdir()] == ["round-000008"], "and no rubbish fills the disk"
        checkpoints.save(checkpoint_of(9, state_of_bytes(200_000, 9)))
        assert checkpoints.latest().round == 9

    status = in_child(fill, tmp_path / "traceback")
    if status == 77:
        pytest.skip("this process may not mount a disk")
    assert status == 0


@linux
def test_a_checkpoint_that_cannot_be_written_is_an_error_and_the_newest_is_still_there(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    for number in (1, 2):
        checkpoints.save(checkpoint_of(number))
    before = content_of(tmp_path / "run" / "round-000002")

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            checkpoints.save(checkpoint_of(3, state_of_bytes(200_000, 3)))
        except OSError:
            os._exit(5)

    assert in_child(write, tmp_path / "traceback") == 5
    assert content_of(tmp_path / "run" / "round-000002") == before
    assert checkpoints.latest().round == 2
    assert all(path.name.startswith("round-") for path in (tmp_path / "run").iterdir())


def test_room_is_made_once_and_not_where_the_disk_has_room(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for number in (1, 2, 3):
        checkpoints.save(checkpoint_of(number))
    real, calls = module.write_arrays, []

    def full_once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args, **options)

    monkeypatch.setattr(module, "write_arrays", full_once)
    checkpoints.save(checkpoint_of(4))
    assert checkpoints.rounds() == [3, 4]
    checkpoints.save(checkpoint_of(5))
    assert checkpoints.rounds() == [3, 4, 5]


def test_a_saved_state_is_the_same_in_its_file_and_outlives_the_checkpoint(tmp_path):
    state = {"w": np.arange(6.0).reshape(2, 3), "n": np.array(3), "told": ("a", None, 1.5)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(checkpoint_of(1, state))
    saved = checkpoints.saved_state(1)
    for number in (2, 3):
        checkpoints.save(checkpoint_of(number, [{"w": np.zeros((2, 3))}]))
    assert checkpoints.rounds() == [2, 3]
    for again in (saved, checkpoints.on_disk(state)):
        assert_same(state, again)
        assert isinstance(again["w"].base, mmap.mmap) and not again["w"].flags.writeable
    assert sorted(os.listdir(tmp_path)) == ["round-000002", "round-000003"], "what has no name is in nobody's way"


def test_the_arrays_of_a_saved_state_are_not_hashed_again(tmp_path, monkeypatch):
    checkpoints, state = Checkpoints(tmp_path), {"w": np.arange(6.0)}
    checkpoints.save(checkpoint_of(1, state))
    expected = digest(state["w"])
    monkeypatch.setattr(parts, "digest", lambda array: pytest.fail("hashed again"))
    saved = checkpoints.saved_state(1)
    assert checkpoints.digests.of(saved["w"]) == expected == checkpoints.digests.of(state["w"])
    checkpoints.save(checkpoint_of(2, saved))


def test_what_was_just_written_is_not_parsed_again(tmp_path, monkeypatch):
    checkpoints, state = Checkpoints(tmp_path), {"w": np.arange(6.0), "told": ("a", None, 1.5)}
    checkpoints.save(checkpoint_of(1, state))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_read_facts", lambda path: pytest.fail("parsed again"))
        saved = checkpoints.saved_state(1)
    assert_same(state, saved)
    assert_same(saved, Checkpoints(tmp_path).saved_state(1))
