"""Encoded parts that are changed on their way, in each round those of one client: 1,000 up and 500 down."""

import random
from collections import Counter

import numpy as np
import pytest
from flwr.app import Error, Message

from tepal.exchange.encodings import Encoding
from tepal.exchange.header import Header
from tepal.exchange.manifest import Manifest
from tepal.strategies import FedAvg
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.rounds.test_encoding import moving_app, start
from tests.unit.strategies.rounds.test_mutations import change_array, forged

CLIENTS, ROUNDS = 3, 50  # of each encoding
ENCODINGS = {
    **{name: Encoding(name, name) for name in ("bfloat16", "int8", "int4", "ternary", "sign", "rank1", "auto")},
    "a tenth in int8": Encoding("int8", "int8", top_k=0.1, top_k_down=0.1),
    "a tenth in signs": Encoding("sign", "sign", top_k=0.1, top_k_down=0.1),
    "auto within a budget": Encoding("auto", "auto", budget=900),
}


OTHERS = ("bfloat16", "int4", "sign", "a tenth in int8", "auto within a budget")
"""They take part in `make test-long`."""


@pytest.fixture(params=[pytest.param(k, marks=pytest.mark.long if k in OTHERS else ()) for k in ENCODINGS])
def encoding(request):
    return ENCODINGS[request.param]


def run(encoding, app, **options):
    """The model after all rounds, and their reports."""
    strategy = FedAvg(encoding=encoding, fraction_evaluate=0, deterministic=True)
    return start(strategy, app, clients=CLIENTS, rounds=ROUNDS, **options)


def changed(server_round):
    """The client whose parts are changed in this round."""
    return server_round % CLIENTS


def spoiled(change):
    """What `InProcessGrid` does to the replies: `change(reply, at_random)` where one is to be changed."""

    def spoil(node, message, reply):
        if reply.has_error() or (header := Header.from_content(reply.content)).action != "train":
            return reply
        client = int(node.config["partition-id"])
        return change(reply, random.Random(header.round)) if client == changed(header.round) else reply

    return spoil


def parts_changed(reply, at_random):
    change_array(reply.content, at_random)
    return reply


def failed(reply, at_random):
    return Message(Error(0, "the client failed"), reply_to=reply)


def test_uploads_that_are_changed_are_refused_as_if_their_clients_had_failed(encoding):
    made, history = run(encoding, moving_app(), spoil=spoiled(parts_changed))
    expected, _ = run(encoding, moving_app(), spoil=spoiled(failed))
    for report in history:
        ((name, _),) = report.refused
        assert not report.lost and len(report.replied) == CLIENTS - 1 and name not in report.replied
    for name, values in expected.items():
        np.testing.assert_array_equal(made[name], values)


def test_uploads_that_are_changed_and_sealed_again_are_refused_alone_or_are_updates_like_any(encoding):
    change = forged(change_array)

    def sealed(reply, at_random):
        change(reply.content, at_random)
        return reply

    made, history = run(encoding, moving_app(), spoil=spoiled(sealed))
    outcomes = Counter(len(report.refused) for report in history)
    assert set(outcomes) <= {0, 1} and outcomes[1] > ROUNDS / 4, "other lengths are refused"
    assert not any(report.lost for report in history)
    assert all(np.isfinite(values).all() for values in made.values())


def test_downloads_that_are_changed_are_sent_again(encoding):
    app, seen = moving_app(), set()

    def behind_a_network(message, context):
        plan, client = Manifest.from_content(message.content).plan, int(context.node_config["partition-id"])
        first = (client, plan.round) not in seen
        if plan.action == "train" and client == changed(plan.round) and first:
            seen.add((client, plan.round))
            change_array(message.content, random.Random(plan.round))
        return app(message, context)

    made, history = run(encoding, behind_a_network, spoil=lambda node, message, reply: reply)  # digests are verified
    expected, _ = run(encoding, moving_app())
    assert len(seen) == ROUNDS and all(report.resent for report in history)
    assert not any(report.refused or report.lost for report in history)
    exact = encoding.down in ("bfloat16", "int8") and not encoding.top_k_down
    for name, values in expected.items():  # in place of a difference the client is sent the values, in int8
        tolerance = 0 if exact else 0.01 * np.abs(values).max()
        np.testing.assert_allclose(made[name], values, rtol=0, atol=tolerance)
