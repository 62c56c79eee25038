"""What the server remembers of its clients, and how much of it."""

import gc

import numpy as np
import pytest

from tepal.exchange.encodings import Encoding
from tepal.exchange.personal import PersonalState
from tepal.strategies import FedAvg
from tepal.strategies.fedavg import ModelState
from tepal.strategies.in_process import Node
from tepal.strategies.rounds.ledger import ClientLedger
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.rounds.test_differences import Grid, rounds_of
from tests.unit.strategies.rounds.test_encoding import moving_app


def test_a_client_still_has_the_state_to_which_a_run_returns(tmp_path):
    """Without checkpoints, when a merge is undone: the message before that was of the undone state."""
    ledger = ClientLedger(keep=0)

    def trains(exchange, number):
        """A message of this exchange comes; what the client has, and keeps its round."""
        record = ledger.record("a")
        state = PersonalState(
            tmp_path, current=record.current, keep=record.restorable, exchange=exchange, round=number
        )
        state.prune()
        had = {name: int(value[0]) for name, value in state.load().items()}
        state.save({"round": np.array([number])})
        state.commit()
        return had

    assert trains("e1", 1) == {}
    ledger.merged({"a": "e1"}, {})
    assert trains("e2", 2) == {"round": 1}
    ledger.merged({"a": "e2"}, {})
    assert trains("e3", 3) == {"round": 2}
    ledger.undo_merge()
    assert trains("e4", 3) == {"round": 1}


def test_a_resumed_run_undoes_the_last_merge_to_the_states_that_were_before_it():
    """e2 was undone before e3 was merged."""
    again, versions = ClientLedger(keep=3), [{"a": exchange} for exchange in ("e1", "e2", "e3")]
    again.restore({}, versions[-1], {}, versions, before=versions[0])
    assert (again.record("a").current, again.record("a").restorable) == ("e3", ("e1", "e2", "e3"))
    again.undo_merge()
    assert again.record("a").current == "e1"


def test_of_very_many_parts_those_of_clients_that_reported_longest_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr("tepal.strategies.rounds.ledger.MOST_HELD", 10)
    ledger = ClientLedger()
    ids = [f"{number:032x}" for number in range(20)]
    ledger.cached("a", ids[:4])
    ledger.cached("b", ids[:4])
    ledger.cached("a", ids[4:8])
    ledger.cached("c", ids[8:12])
    assert [len(ledger.record(name).held) for name in "abc"] == [4, 0, 4]
    again = ClientLedger()
    again.restore(ledger.to_facts()["held"], {}, ledger.to_facts()["standing"], [], {})
    again.cached("c", ids[:7])
    assert [len(again.record(name).held) for name in "ac"] == [0, 7]
    again.cached("d", ids[:12])
    assert len(again.record("d").held) == 12, "one client's parts are within MOST_PARTS"


@pytest.mark.parametrize("encoding", [Encoding(), Encoding("sign", "sign")])
def test_a_silent_client_does_not_keep_the_models_of_earlier_rounds(encoding):
    alive = []

    def silent(node, message, reply):
        return None if node.config["partition-id"] == 1 and "arrays" in message.content else reply

    strategy = FedAvg(encoding=encoding, fraction_evaluate=0, max_replies=1)
    grid = Grid([Node(moving_app(), {"partition-id": k}) for k in (0, 1)], spoil=silent)

    def count(report):
        if report.round in (1, 8) and report.replied:
            alive.append(sum(type(one) is ModelState for one in gc.get_objects()))

    strategy.on_progress = count
    rounds_of(strategy, grid, 8, timeout=600)
    assert alive[-1] <= alive[0] + 2
