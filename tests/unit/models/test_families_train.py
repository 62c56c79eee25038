"""Rounds of the four methods over the exchange, every family: fused, transposed and tied tensors, and counters.

The clients are the project's own but for their data: the mod, `apply_plan`, `probe_layers`. What they get and give is
written down, raw tensor by raw tensor, and what must come out is computed from that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from families import FAMILIES, MODELS, built
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from tepal.client_app import apply_plan
from tepal.exchange import PartialExchange, received
from tepal.models.blocks import Blocks, find_blocks
from tepal.strategies import (
    FedACS,
    FedEnsemble,
    FedFrozen,
    MethodStrategy,
    RoundReport,
    SelectiveLayers,
    join_modes,
    modes_of,
)
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training.checkpointing import recomputed_layers
from tepal.training.probing import probe_layers

every_family = pytest.mark.parametrize("family", FAMILIES)
every_model = pytest.mark.parametrize("family", MODELS)

Raw = dict[str, np.ndarray]
"""A `state_dict`."""


def floats(output: object) -> Iterator[Tensor]:
    """All floating-point tensors in a model's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from floats(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from floats(value)


def raw_of(arrays: Mapping[str, Array]) -> Raw:
    return {name: array.numpy() for name, array in arrays.items()}


def examples_of(client: int) -> int:
    return 1 + 2 * client


@dataclass
class Run:
    """A run of a family's model; keys are (client, round), clients are numbers."""

    family: str
    model: nn.Module
    blocks: Blocks
    models: dict[int, list[Raw]] = field(default_factory=dict)
    """Round → the global model after it, or the modes; round 0 are the initial ones."""
    given: dict[tuple[int, int], tuple[str, Raw]] = field(default_factory=dict)
    """What a client trained from: the tree, and its values."""
    made: dict[tuple[int, int], Raw] = field(default_factory=dict)
    """What became of it."""
    trained: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    """Entries that the client was asked to train."""
    squared_norms: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """Of each layer's gradient, as autograd has it without more ado."""
    scored: dict[tuple[int, int], Raw] = field(default_factory=dict)
    """What a client was asked to score."""
    reports: list[RoundReport] = field(default_factory=list)

    def entries(self, raw: Raw) -> Mapping[str, np.ndarray]:
        return self.blocks.layout.split(raw)

    def nbytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes of some entries, or of a model in which what is tied counts once."""
        if names is None:
            tensors = {tensor.data_ptr(): tensor for tensor in self.model.state_dict().values()}
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        initial = self.entries(self.models[0][0])
        return sum(initial[name].nbytes for name in names)

    def payloads(self) -> tuple[list[int], list[int]]:
        """Bytes of model that went down and up in each round. Nothing was refused, and no client failed."""
        rounds = [report for report in self.reports if report.round]
        assert not any(report.refused or report.lost or report.notes for report in rounds)
        return [report.down.payload for report in rounds], [report.up.payload for report in rounds]


def client_app(run: Run) -> ClientApp:
    """Trains the one model object that there is, three steps of AdamW with strong weight decay, and clips."""
    model, plain = run.model, copy.deepcopy(run.model)

    def budget(context: Context) -> dict[str, float]:
        return {"layer-budget": min(1 + int(context.node_config["partition-id"]), len(run.blocks.layers))}

    app = ClientApp(mods=[PartialExchange(introduce=lambda msg, context: budget(context))])

    def loaded(msg: Message, context: Context, model: nn.Module = model) -> tuple[int, int]:
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())  # strict: every raw tensor is there
        return int(context.node_config["partition-id"]), received(msg).plan.round

    def loss(model: nn.Module, client: int) -> Tensor:
        outputs = floats(model(**MODELS[run.family].inputs()))
        return sum((out - client).square().sum() for out in outputs)

    @app.train("probe")
    def probe(msg: Message, context: Context) -> Message:
        client, number = loaded(msg, context)
        batches = [(torch.zeros(2), torch.zeros(2))]
        scores = probe_layers(model, msg, batches, loss=lambda model, *batch: loss(model, client))
        loaded(msg, context, plain)
        torch.manual_seed(0)  # of dropout
        plain.train().zero_grad()
        loss(plain, client).backward()
        gradients = run.entries({name: gradient_of(tensor) for name, tensor in named_tensors(plain).items()})
        run.squared_norms[client, number] = [
            sum(float(np.square(gradients[name], dtype=np.float64).sum()) for name in layer)
            for layer in run.blocks.layers
        ]
        assert scores["layer-scores"] == pytest.approx(run.squared_norms[client, number], rel=1e-4)
        metrics = MetricRecord({"num-examples": examples_of(client), **budget(context), **scores})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        client, number = key = loaded(msg, context)
        manifest = received(msg).manifest
        run.given[key], run.trained[key] = (manifest.plan.model, raw_of(msg.content["arrays"])), manifest.plan.trains
        apply_plan(model, msg)
        torch.manual_seed(10 * client + number)  # of dropout
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, client).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        arrays = ArrayRecord(model.state_dict())
        run.made[key] = raw_of(arrays)
        metrics = MetricRecord({"num-examples": examples_of(client)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        run.scored[loaded(msg, context)] = raw_of(msg.content["arrays"])
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return app


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all the names that a state_dict has for them."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    named = {**dict(parameters), **dict(buffers)}
    return {name: named[name] for name in model.state_dict()}


def gradient_of(tensor: Tensor) -> np.ndarray:
    return np.zeros(tensor.shape, np.float32) if tensor.grad is None else tensor.grad.numpy()


def run(
    family: str, make: type[MethodStrategy], *, clients: int = 2, rounds: int = 2, starts: int = 1, **options: object
) -> Run:
    """A strategy's rounds, from models with random weights and biases."""
    models = [built(family, seed) for seed in range(starts)]
    found = Run(family, models[0], find_blocks(models[0]))
    initial = join_modes(ArrayRecord(model.state_dict()) for model in models)

    def keep(number: int, arrays: ArrayRecord) -> None:
        found.models[number] = [raw_of(mode) for mode in modes_of(arrays)]

    app = client_app(found)
    grid = InProcessGrid([Node(app, {"partition-id": client}) for client in range(clients)])
    strategy = make(model=found.blocks, on_round=found.reports.append, **options)
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=keep)
    return found


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit by bit."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def all_same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def assert_mean(found: np.ndarray, arrays: list[np.ndarray], weights: list[float], name: str) -> None:
    """A weighted mean, in the dtype of what it is of: of counters, the nearest whole number."""
    mean = sum(weight * array.astype(np.float64) for weight, array in zip(weights, arrays, strict=True)) / sum(weights)
    assert found.dtype == arrays[0].dtype, name
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-7, err_msg=name)
    else:
        assert (found == np.rint(mean)).all(), name


@every_family
def test_fedfrozen_freezes_query_and_key_and_trains_the_rest(family: str) -> None:
    found = run(family, FedFrozen, rounds=3, warmup_rounds=1, fraction_evaluate=0)
    blocks = found.blocks
    states = {number: found.entries(models[0]) for number, models in found.models.items()}
    for name in blocks.query_key:
        assert same(states[3][name], states[1][name]), name
    assert any(not same(states[1][name], states[0][name]) for name in blocks.query_key)
    assert any(not same(states[3][name], states[1][name]) for name in blocks.value_projection)
    full, theta = found.nbytes(), found.nbytes(blocks.value)
    assert found.payloads() == ([2 * full, 2 * full, 2 * theta], [2 * full, 2 * theta, 2 * theta])


@every_model
def test_selective_layers_trains_what_each_client_chose_and_the_head(family: str) -> None:
    found = run(family, SelectiveLayers, budget=1, coupling=0, fraction_evaluate=0)
    blocks = found.blocks
    down, up = [], []
    every_block = [*blocks.layers, blocks.embedding, blocks.head, blocks.rest]
    changed = every_block  # what is new to a client
    for number in (1, 2):
        chosen = {}
        for client in (0, 1):
            norms = found.squared_norms[client, number]
            budget = min(1 + client, len(norms))  # of the client's own
            best = sorted(range(len(norms)), key=lambda layer: -norms[layer])[:budget]
            chosen[client] = {name for layer in best for name in blocks.layers[layer]} | set(blocks.head)
            assert set(found.trained[client, number]) == chosen[client]
            given, made = found.entries(found.given[client, number][1]), found.entries(found.made[client, number])
            for layer in (blocks.layers[k] for k in best):
                assert any(not same(given[name], made[name]) for name in layer), layer
            for name in set(blocks.layout.names) - chosen[client]:
                assert same(given[name], made[name]), name
        before, after = found.entries(found.models[number - 1][0]), found.entries(found.models[number][0])
        for name in blocks.layout.names:
            having = [client for client in (0, 1) if name in chosen[client]]
            if having:
                arrays = [found.entries(found.made[client, number])[name] for client in having]
                assert_mean(after[name], arrays, [examples_of(client) for client in having], name)
            else:
                assert same(before[name], after[name]), name
        down.append(2 * sum(found.nbytes(block) for block in changed))
        up.append(sum(found.nbytes(names) for names in chosen.values()))
        changed = [block for block in every_block if any(not same(before[name], after[name]) for name in block)]
    assert found.payloads() == (down, up)


ENSEMBLE_SEED = 2
"""Of its first two rounds: in the one both strata have the same of three modes, in the other each its own."""


@every_model
def test_fed_ensemble_trains_each_mode_where_it_was_scheduled(family: str) -> None:
    found = run(family, FedEnsemble, modes=3, starts=3, seed=ENSEMBLE_SEED, fraction_evaluate=0)
    schedule = [np.random.default_rng([ENSEMBLE_SEED, 0, stratum]).permutation(3) for stratum in (0, 1)]
    for report in found.reports[1:]:
        number, record = report.round, report.record
        assert sorted(record["strata"]) == [0, 1]
        had: dict[int, list[int]] = {}
        for name, stratum in zip(record["clients"], record["strata"], strict=True):
            client, mode = int(name.removeprefix("client-")), int(schedule[stratum][number - 1])
            had.setdefault(mode, []).append(client)
            tree, given = found.given[client, number]
            assert tree == f"mode/{mode}"
            assert all_same(given, found.models[number - 1][mode])
        for mode, after in enumerate(found.models[number]):
            if mode not in had:
                assert all_same(after, found.models[number - 1][mode])
            for name in after if mode in had else ():
                arrays = [found.made[client, number][name] for client in had[mode]]
                assert_mean(after[name], arrays, [1] * len(arrays), name)
    assert len({b"".join(array.tobytes() for array in mode.values()) for mode in found.models[2]}) == 3
    full = found.nbytes()
    assert found.payloads() == ([2 * full, 2 * full], [2 * full, 2 * full])


@every_model
def test_fedacs_mixes_the_clients_models_and_each_has_its_own(family: str) -> None:
    found = run(family, FedACS, clients=3, quantile=0.2)
    parameters = [name for name, _ in found.model.named_parameters()]  # one that is tied once
    models = [found.made[client, 1] for client in range(3)]
    vectors = [np.concatenate([model[name].ravel() for name in parameters]).astype(np.float64) for model in models]
    lengths = np.linalg.norm(vectors, axis=1)
    similarity = np.stack(vectors) @ np.stack(vectors).T / np.outer(lengths, lengths)
    threshold = np.quantile(similarity, 0.2)
    assert (similarity > threshold).sum() == 3 + 2 * 2  # two pairs of the three are alike
    for client in range(3):
        assert found.given[client, 1][0] == found.given[client, 2][0] == "mixture"
        assert all_same(found.given[client, 1][1], found.models[0][0])
        like = [other for other in range(3) if other == client or similarity[client, other] > threshold]
        mixture = found.given[client, 2][1]
        for name, array in models[client].items():
            if array.dtype.kind == "f":
                assert_mean(mixture[name], [models[k][name] for k in like], [similarity[client, k] for k in like], name)
            else:
                assert same(mixture[name], array), name  # counters are the client's own
        assert all_same(found.scored[client, 2], found.made[client, 2])
    assert len({b"".join(array.tobytes() for array in found.scored[client, 2].values()) for client in range(3)}) == 3
    full = found.nbytes()
    # What is scored in the end is still with the client, and does not travel.
    assert found.payloads() == ([3 * full, 3 * full], [3 * full, 3 * full])


@every_family
def test_gradient_checkpointing_leaves_gradients_as_they_are(family: str) -> None:
    def gradients(checkpointing: bool) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model, inputs = FAMILIES[family].build().train(), FAMILIES[family].inputs()
        torch.manual_seed(1)  # of dropout
        with recomputed_layers(model) if checkpointing else nullcontext():
            sum(out.square().sum() for out in floats(model(**inputs))).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    if not find_blocks(FAMILIES[family].build()).layers:
        pytest.skip("it has no layers")
    plain, again = gradients(False), gradients(True)
    for name, expected in plain.items():
        torch.testing.assert_close(again[name], expected, rtol=1e-4, atol=1e-5)
