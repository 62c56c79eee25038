"""The limits of what an answer may contain."""

import numpy as np
import pytest
from flwr.app import MetricRecord

from tepal.exchange.bounds import MOST_METRICS, REPLY_BYTES, BadReply, metrics_of, reply_bytes
from tepal.exchange.encodings import TopK, Wire
from tepal.exchange.encodings.dense import Float32
from tepal.exchange.layout import Layout
from tepal.exchange.parts import pack
from tepal.exchange.plan import Outgoing, Plan
from tepal.exchange.sender import Sender

VALUES = {"w": np.random.default_rng(0).standard_normal((3000, 1000)).astype(np.float32), "b": np.zeros(5, np.float32)}
LAYOUT = Layout.of_arrays(VALUES)


def test_records_of_metrics_are_counted_even_if_they_are_empty():
    records = {str(k): MetricRecord() for k in range(MOST_METRICS + 1)}
    with pytest.raises(BadReply, match="it has 201 records of metrics; at most 200 are allowed"):
        metrics_of(records, ())
    del records["0"]
    assert metrics_of(records, ()) == ({}, {}, ())


def test_the_names_that_are_covered_are_not_searched_again_for_every_record():
    class Listed(tuple):
        def __contains__(self, name):
            raise AssertionError("a long list was searched")

    records = {str(k): MetricRecord({"loss": float(k)}) for k in range(MOST_METRICS)}
    assert metrics_of(records, Listed(["of no record", "7"]))[0] == {"loss": 7.0}


def test_a_reply_may_have_more_than_its_trees_in_every_encoding():
    assert reply_bytes(LAYOUT, 3) - reply_bytes(LAYOUT, 2) == 2 * LAYOUT.nbytes()
    assert reply_bytes(LAYOUT, 1) == reply_bytes(LAYOUT, 0) > LAYOUT.nbytes() + REPLY_BYTES
    for wire in (Wire(), Wire("auto"), Wire("float32", 0.999), Wire("bfloat16", 0.999), Wire("int8")):
        assert len(pack(VALUES, VALUES, wire).data) < 1.5 * LAYOUT.nbytes()
    coded = TopK(1.0, Float32()).write(VALUES["w"], None)
    assert len(coded) < 1.5 * VALUES["w"].nbytes


def test_the_limit_of_a_reply_follows_from_the_plans():
    sender = Sender(LAYOUT, {"all": LAYOUT.names}, experiment="e", record="arrays")
    assert sender.most_reply_bytes() == reply_bytes(LAYOUT, 0)
    for trees, most in ((2, 2), (1, 2), (0, 2), (4, 4)):
        returns = {f"tree-{k}": LAYOUT.names for k in range(trees)}
        sender.content(Outgoing(Plan(client="c", round=1, needs={}, returns=returns), lambda tree: VALUES))
        assert sender.most_reply_bytes() == reply_bytes(LAYOUT, most)
