"""How many names of metrics the clients of a run may bring."""

from tepal.exchange.plan import Outgoing, Plan, Reply
from tepal.strategies.aggregate import ON_TESTS, RECORDED
from tepal.strategies.rounds.metric_names import MetricNames


def test_nodes_that_invent_names_do_not_displace_the_scores_that_are_recorded():
    names = MetricNames("num-examples")

    def kept(node, metrics):
        outgoing = Outgoing(Plan(client=f"c{node}", round=1, needs={"model": ()}), None, {}, node)
        reply = Reply(client=f"c{node}", parts={}, examples=1, metrics=dict.fromkeys(metrics, 1.0))
        return set(names.limited(outgoing, reply).metrics)

    for node in range(5):
        assert len(kept(node, [f"x{node}-{number}" for number in range(200)])) == 200
    honest = {*RECORDED, *(f"{on}accuracy" for on in ON_TESTS), "num-examples", "test-examples"}
    assert kept(9, {*honest, "mine"}) == honest
