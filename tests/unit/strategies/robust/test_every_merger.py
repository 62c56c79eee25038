"""Mergers of every strategy, with every robust mean: refused replies leave no trace, extreme numbers do no harm."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tepal.exchange.plan import ACCUMULATION, LAYER_BUDGET, LAYER_MILLISECONDS, LAYER_SCORES, Reply
from tepal.server_app.config import defaults, read_run_config
from tepal.server_app.run import build_model, build_strategy
from tepal.strategies import STRATEGIES
from tepal.strategies.method import Run, ServerModel
from tepal.strategies.robust import ROBUST, clips, mean_factory

CONFIG = {
    "dataset": "digits", "model": "tiny-vit", "fedbe.distil": False, "fedensemble.modes": 2, "server-share": 0.05,
    "fedensemble.assign": "highest-loss", "fedensemble.strata": 2,
    "optimizer": "sgd", "learning-rate": 0.05, "weight-decay": 0.0,
}  # fmt: skip
CLIENTS = [f"c{k}" for k in range(6)]
EXTREME = (1e100, -1e100, 1e-310, 0.0, 1.0)
METRICS = (ACCUMULATION, LAYER_BUDGET, "received-loss", "trained-loss", "test-examples", "num-examples")


@cache
def built():
    return build_model(read_run_config({**defaults(), **CONFIG}))


def method_of(name, robust="none", **changes):
    model, blocks = built()
    method = build_strategy(read_run_config({**defaults(), **CONFIG, "strategy": name, **changes}), blocks).method
    entries = {key: tensor.numpy().copy() for key, tensor in model.state_dict().items()}
    assert set(entries) == set(blocks.layout.names)
    starts = (entries,) * (2 if name == "fedensemble" else 1)
    run = Run(mean=mean_factory(robust, 0.2, 0, None))
    state = method.init(ServerModel("model", blocks.layout, starts, blocks), run)
    return method, state


def reply_to(plan, state, method, k, **changes):
    rng = np.random.default_rng(k)
    parts = {
        tree: {
            name: np.asarray(array + 0.1 * rng.normal(size=array.shape), array.dtype)
            for name, array in method.values(state, plan.client, tree).items()
            if name in names
        }
        for tree, names in plan.returns.items()
    }
    layers = len(built()[1].layers)
    metrics = {ACCUMULATION: 3.0 + k, "received-loss": 1.0, "num-examples": 5.0}
    vectors = {LAYER_SCORES: (1.0,) * layers, LAYER_MILLISECONDS: (2.0,) * layers}
    made = Reply(client=plan.client, parts=parts, examples=5 + k, metrics=metrics, vectors=vectors)
    return replace(made, **changes)


def plans_of(method, state, change=lambda reply: reply):
    """The state with a cohort, the plans of the last phase, and how many probes were refused."""
    state, cohort = method.cohort(state, CLIENTS, len(CLIENTS), np.random.default_rng(0))
    cohort, probes, refused = sorted(cohort), {}, 0
    for phase in method.phases[:-1]:
        for k, plan in enumerate(method.plan(state, 1, phase, cohort, probes)):
            reply = reply_to(plan, state, method, k)
            reply = change(reply) if k == 1 else reply
            try:
                method.accept(plan, reply)
            except ValueError:
                refused += 1
                continue
            probes[plan.client] = reply
        cohort = sorted(probes)
    plans = method.plan(state, 1, method.phases[-1], cohort, probes)
    method.record(state, plans)
    return state, plans, refused


def spoiled(reply, seen):
    """Replies that a merger must refuse, each of whose parts begins well. `seen`: (tree, entry) of earlier replies."""
    for tree, part in reply.parts.items():
        *_, last = part
        yield replace(reply, parts={**reply.parts, tree: {**part, last: np.full(part[last].shape, "x")}})
        if (tree, last) in seen:  # the first part defines the shapes
            yield replace(reply, parts={**reply.parts, tree: {**part, last: np.ones((3, *part[last].shape))}})


def finite(state, method):
    return all(np.isfinite(array).all() for model in method.models(state) for array in model.values())


@pytest.mark.parametrize("robust", [each for each in ROBUST if not clips(each)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_refused_replies_leave_the_merger_as_if_they_had_not_arrived(name, robust):
    merged = []
    for hostile in (False, True):
        method, state = method_of(name, robust)
        state, plans, _ = plans_of(method, state)
        merger, seen = method.merger(state, 1), set()
        for k, plan in enumerate(plans):
            good = reply_to(plan, state, method, k)
            method.accept(plan, good)
            for bad in spoiled(good, seen) if hostile else ():
                with pytest.raises((ValueError, TypeError)):
                    merger.add(replace(bad, client="hostile"))
            merger.add(good)
            seen |= {(tree, entry) for tree, part in good.parts.items() for entry in part}
        after = merger.finish()
        method.change(state, after)
        merged.append((after, method.models(after)))
        if method.storage:
            assert "hostile" not in after.clients
    for before, now in zip(merged[0][1], merged[1][1], strict=True):
        for entry, array in before.items():
            np.testing.assert_allclose(now[entry], array, rtol=1e-6, atol=1e-7)
        assert all(np.isfinite(array).all() for array in now.values())


def test_a_mode_whose_only_reply_is_refused_stays_as_it_is():
    method, state = method_of("fedensemble")
    state, plans, _ = plans_of(method, state)
    merger = method.merger(state, 1)
    with pytest.raises(ValueError, match="must be"):
        merger.add(next(spoiled(reply_to(plans[0], state, method, 0), ())))
    assert [mode.merges for mode in merger.finish().modes] == [0, 0]


@pytest.mark.parametrize("value", EXTREME)
@pytest.mark.parametrize("name", STRATEGIES)
def test_extreme_metrics_are_refused_or_do_no_harm(name, value):
    method, state = method_of(name)
    hostile = {"metrics": dict.fromkeys(METRICS, value), "examples": 10**15}
    state, plans, _ = plans_of(method, state, lambda reply: replace(reply, **hostile))
    merger = method.merger(state, 1)
    for k, plan in enumerate(plans):
        reply = reply_to(plan, state, method, k, **(hostile if k == 1 else {}))
        try:
            method.accept(plan, reply)
        except ValueError:
            continue
        merger.add(reply)
    after = merger.finish()
    method.change(state, after)
    assert finite(after, method)
    plans_of(method, after)


@pytest.mark.parametrize("costs", ["layers", "bytes", "milliseconds"])
@pytest.mark.parametrize("selection", ["gradient", "snr", "top"])
def test_extreme_probes_are_refused_or_do_no_harm(selection, costs):
    layers = len(built()[1].layers)
    for value in (*EXTREME, 1e-9, 1e12, 5e-324):
        method, state = method_of(
            "selective", **{"selective.selection": selection, "selective.costs": costs, "selective.budget": 1.0}
        )
        for vectors in ((value,) * layers, (value, *(1.0,) * (layers - 1)), (value,), ()):
            for budget in (1.0, value):
                hostile = {
                    "vectors": {LAYER_SCORES: vectors, LAYER_MILLISECONDS: vectors}, "metrics": {LAYER_BUDGET: budget}
                }  # fmt: skip
                _, plans, refused = plans_of(method, state, lambda reply, to=hostile: replace(reply, **to))
                assert len(plans) == len(CLIENTS) - refused


@pytest.mark.parametrize("value", [None, 0.0, 0.999, 1e-310, -1.0, 1.01e9, 1e100])
def test_fednova_refuses_an_accumulation_out_of_range(value):
    method, state = method_of("fednova")
    state, plans, _ = plans_of(method, state)
    metrics = {} if value is None else {ACCUMULATION: value}
    with pytest.raises(ValueError, match="must be a number from 1 to 1e\\+09"):
        method.accept(plans[0], reply_to(plans[0], state, method, 0, metrics=metrics))


def test_no_accumulation_counts_for_more_than_ten_times_the_median():
    entry = built()[1].head[0]
    steps = []
    for largest in (30.0, 1e9):
        method, state = method_of("fednova")
        state, plans, _ = plans_of(method, state)
        merger = method.merger(state, 1)
        a = [3.0] * 5 + [largest]
        for k, plan in enumerate(plans):
            merger.add(reply_to(plan, state, method, k, metrics={ACCUMULATION: a[k]}, examples=1))
        steps.append((a, merger.finish().entries[entry].astype(float)))
        w = state.entries[entry].astype(float)
    d = [reply_to(plan, state, method, k).parts["model"][entry].astype(float) - w for k, plan in enumerate(plans)]
    for a, found in steps:
        tau = np.mean(np.minimum(a, 30.0))
        normalised = [difference / of for difference, of in zip(d, a, strict=True)]
        np.testing.assert_allclose(found, w + tau * np.mean(normalised, axis=0), atol=1e-5)
