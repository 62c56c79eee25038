"""Layouts that clients store, and messages that name them."""

import json
import shutil
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from tepal.exchange import layouts, partial_exchange
from tepal.exchange.cache import forget_parts
from tepal.exchange.encodings import Encoding
from tepal.exchange.layout import Layout
from tepal.exchange.layouts import Layouts, remembered
from tepal.exchange.manifest import RECORD
from tepal.exchange.texts import decompressed
from tepal.strategies import FedACS, FedAvg
from tepal.strategies.in_process import InProcessGrid, Node
from tests.quiet import quiet  # noqa: F401
from tests.unit.exchange.test_layout import fused_layout
from tests.unit.strategies.rounds.test_encoding import START, moving_app

OTHER = Layout.of_arrays({"w": np.zeros((2, 3), np.float32)})


@pytest.fixture
def forget(monkeypatch):
    """Let this process forget the layouts that it has read, as a new one would begin."""
    monkeypatch.setattr(layouts, "_read", OrderedDict())
    return layouts._read.clear


def test_a_stored_layout_is_found_by_another_process(tmp_path, forget):
    of = Layouts(tmp_path)
    assert of.find("e", OTHER.id) is None
    for layout in (OTHER, fused_layout()):
        assert of.keep("e", layout) and of.keep("e", layout)
        forget()
        assert Layouts(tmp_path).find("e", layout.id) == layout
        assert Layouts(tmp_path).find("e", layout.id) is layouts.in_memory("e", layout.id)
        assert Layouts(tmp_path).find("another", layout.id) is None
        (file,) = (tmp_path / "e").iterdir()
        assert file.name == f"layout-{layout.id}.json", "an experiment has one"


def test_an_id_tells_every_difference():
    base = fused_layout()
    raw, entry = base.raw[0], base.entries[0]
    others = [
        replace(base, raw=(replace(raw, name="other"), *base.raw[1:])),
        replace(base, raw=(replace(raw, shape=(4, 5)), *base.raw[1:])),
        replace(base, raw=(replace(raw, dtype="float16"), *base.raw[1:])),
        replace(base, raw=base.raw[::-1]),
        replace(base, entries=tuple(replace(of, start=1) if not of.whole else of for of in base.entries)),
    ]
    assert entry.whole and base.id == fused_layout().id
    assert len({base.id, *(other.id for other in others)}) == 6


def no_permission(*_, **__):
    raise PermissionError(13, "Permission denied")


DAMAGED = [b"", b"{", b"[]", b'{"raw": 1}', b"[" * 100_000, json.dumps(OTHER.to_json()).encode()]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_layout_is_not_known(tmp_path, forget, content):
    of, wanted = Layouts(tmp_path), fused_layout()
    of.keep("e", wanted)
    (file,) = (tmp_path / "e").iterdir()
    file.write_bytes(content)
    assert of.find("e", wanted.id) is None
    (note,) = of.notes
    assert "is damaged and will be sent again" in note and str(file) in note
    assert of.keep("e", wanted), "it is sent again, and stored"
    forget()
    assert Layouts(tmp_path).find("e", wanted.id) == wanted


def test_a_damaged_layout_that_cannot_be_removed_is_replaced_or_not_stored(tmp_path, forget, monkeypatch):
    wanted = fused_layout()
    Layouts(tmp_path).keep("e", wanted)
    (file,) = (tmp_path / "e").iterdir()
    file.write_bytes(b"damaged")
    monkeypatch.setattr(Path, "unlink", no_permission)
    of = Layouts(tmp_path)
    assert of.find("e", wanted.id) is None and file.read_bytes() == b"damaged"
    with monkeypatch.context() as full:
        full.setattr(layouts, "replacing", no_permission)
        assert not of.keep("e", wanted), "what is there is not what was sent"
    monkeypatch.undo()
    assert of.keep("e", wanted) and Layouts(tmp_path).find("e", wanted.id) == wanted


def test_a_layout_that_cannot_be_stored_is_not_kept(tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert not Layouts(tmp_path / "file").keep("e", OTHER)


def test_what_is_forgotten_of_an_experiment_are_its_layouts_too(tmp_path):
    Layouts(tmp_path).keep("e", OTHER)
    with pytest.MonkeyPatch.context() as readonly:
        readonly.setattr(Path, "unlink", no_permission)
        forget_parts(tmp_path / "e")
    forget_parts(tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_few_layouts_stay_in_memory(forget):
    made = [Layout.of_arrays({"w": np.zeros(size, np.float32)}) for size in range(20)]
    for layout in made:
        assert remembered("e", layout) is layout
        assert layouts.in_memory("e", made[0].id) is made[0]
    known = [layout for layout in made if layouts.in_memory("e", layout.id)]
    assert known == [made[0], *made[13:]], "those that were used last"


def trained(strategy, nodes, befall=lambda number: None, rounds=5):
    """The model's values, the rounds' reports, and of messages to train (round, client, whether the layout is named).

    `nodes`: the clients' settings. `befall` is called with the number of each round that has ended.
    """
    reports, messages = [], []

    def watched(msg, context, call_next):
        text = json.loads(decompressed(msg.content[RECORD]["manifest"], 100_000))
        if (plan := text["plan"])["action"] == "train":
            messages.append((plan["round"], plan["client"], isinstance(text["layout"], str)))
        return partial_exchange(msg, context, call_next)

    def on_round(report):
        reports.append(report)
        befall(report.round)

    strategy.on_round = on_round
    strategy.rules = replace(strategy.rules, min_available_nodes=len(nodes))
    app = moving_app(exchange=watched)
    grid = InProcessGrid([Node(app, node) for node in nodes], spoil=lambda node, message, reply: reply)
    result = strategy.start(grid, ArrayRecord({name: Array(array) for name, array in START.items()}), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}, reports, messages


def settings(*folders):
    return [{"partition-id": k, "cache-path": str(folder)} for k, folder in enumerate(folders)]


@pytest.mark.parametrize("make", [FedAvg, partial(FedAvg, encoding=Encoding("auto", "auto")), FedACS])
@pytest.mark.parametrize("all_lost", [False, True])
def test_a_client_that_has_lost_the_layout_is_sent_it_in_the_same_round(tmp_path, forget, make, all_lost):
    """With its cached parts, too, or without them; and nothing comes out otherwise."""
    here, there = tmp_path / "here", tmp_path / "there"

    def lose(number):
        if number == 2:
            forget()
            (file,) = here.glob("*/layout-*.json")
            file.unlink()
            if all_lost:
                for folder in ("content", "clients"):
                    shutil.rmtree(file.parent / folder, ignore_errors=True)

    whole, *_ = trained(make(), settings(tmp_path / "a", tmp_path / "b"))
    values, reports, messages = trained(make(), settings(here, there), lose)
    for name, value in whole.items():
        np.testing.assert_array_equal(values[name], value)
    assert [report.resent for report in reports] == [0, 0, 1, 0, 0]
    assert not any(report.refused or report.lost for report in reports)
    listed = sorted(of[:2] for of in messages if not of[2])
    assert listed == [(number, "client-0") for number in (3, 4, 5)], "before, the introduction had it"
    assert len(messages) == 5 * 2 + 1


def test_a_client_that_loses_the_layout_again_and_again_is_sent_one_message_twice(tmp_path, forget):
    """As one whose folder does not outlast a message."""
    here = tmp_path / "here"

    def lose(number):
        forget()
        shutil.rmtree(here)

    _, reports, messages = trained(FedAvg(), settings(here, tmp_path / "there"), lose)
    assert [report.resent for report in reports] == [0, 1, 0, 0, 0]
    named = {client: [by_id for number, of, by_id in sorted(messages) if of == client] for _, client, _ in messages}
    assert named["client-0"] == [True, False, True, False, False, False], "named, and lost; then in each message"
    assert named["client-1"] == [True] * 5


def test_a_client_that_cannot_store_it_is_sent_the_layout_in_each_message(tmp_path):
    (tmp_path / "file").write_text("no folder")
    _, reports, messages = trained(FedAvg(), settings(tmp_path / "file", tmp_path / "b"), rounds=3)
    assert messages and all(named == (client == "client-1") for _, client, named in messages)
    assert sum(report.resent for report in reports) == 0

