"""Linear attention on heterogeneous clients: FedFrozen's simulation (arXiv 2605.06446, section 4.1 and appendix B).

    O = φ(H W_Q) φ(H W_K)ᵀ H W_V,    f = 1/K Σ_k F_k,    F_k = mean over k's examples and tokens of ‖O − y‖²

Client k's tokens are N(μ_k, I) with mean μ_k ~ N(0, ρ²I); one teacher labels all of them. With Φ = (W_Q, W_K) fixed,
F_k is quadratic in θ = W_V, so that h_λ(Φ) = min_θ f(Φ, θ) + λ/2‖θ‖² (eq. 7) and a frozen round have closed forms. All
seeds are trained as one model of stacked matrices, which neither gradient steps nor means mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.func import functional_call

from tepal.client_app import apply_plan, objectives
from tepal.client_app.objectives import Work
from tepal.exchange import partial_exchange
from tepal.exchange.mod import received
from tepal.models.linear_attention import LinearAttention
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.strategy import MethodStrategy
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batches, Fitted

CLIENTS, EXAMPLES, TOKENS, WIDTH, SIZE, NOISE = 10, 40, 16, 64, 32, 0.01
"""K, examples per client, n, d, d_k = d_v, and the standard deviation of the labels' noise."""
SHARPNESS = 4.0
"""Factor of the teacher's W_Q and W_K."""
FAR = 1e6
"""A matrix with a larger weight after a client's training is returned as it was received, for this seed alone."""


# --- the problem ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quadratic:
    """F(θ) = ½⟨θ, Gθ⟩ − ⟨θ, C⟩ + c for each seed: G (seeds, d, d), C (seeds, d, d_v), c (seeds,)."""

    hessian: Tensor
    linear: Tensor
    constant: Tensor

    def loss(self, theta: Tensor) -> Tensor:
        """F(θ): (seeds,)."""
        return (theta * (0.5 * self.hessian @ theta - self.linear)).sum((1, 2)) + self.constant

    def ridge_solution(self, ridge: float) -> Tensor:
        """θ*_λ = (G + λI)⁻¹C."""
        return torch.linalg.solve(self.hessian + ridge * torch.eye(WIDTH).to(self.hessian), self.linear)

    def profile(self, ridge: float) -> Tensor:
        """h_λ = min_θ F(θ) + λ/2‖θ‖²: (seeds,), eq. 7."""
        best = self.ridge_solution(ridge)
        return self.loss(best) + ridge / 2 * best.square().sum((1, 2))


class Client:
    """The examples of one client for all seeds: H (seeds, examples, n, d), y (seeds, examples, n, d_v)."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self._rows = inputs.flatten(1, 2)
        self._columns = self._rows.mT.contiguous()
        self._frozen: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.trained: tuple[Tensor, ...] = ()
        """The matrices that it trained in its latest round."""

    def gradient(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """∇F_k at (W_Q, W_K, W_V), each (seeds, d, size). Seed by seed, as one fits into the processor's cache."""
        each = zip(self._rows, self._columns, self.labels, query, key, value, strict=True)
        return tuple(map(torch.stack, zip(*(_gradient(*of) for of in each), strict=True)))

    def quadratic(self, query: Tensor, key: Tensor) -> Quadratic:
        """F_k as a function of θ = W_V at this Φ, in double precision: G = 2XᵀX/(Nn), C = 2Xᵀy/(Nn), X = φ_Q φ_Kᵀ H."""
        model, value = _shapeless(), torch.eye(WIDTH, dtype=torch.double)
        features = torch.stack([
            functional_call(model, {"query": q.double(), "key": k.double(), "value": value}, (tokens.double(),))
            for q, k, tokens in zip(query, key, self.inputs, strict=True)
        ]).flatten(1, 2)  # fmt: skip
        labels, count = self.labels.double().flatten(1, 2), features.shape[1]
        return Quadratic(
            2 / count * features.mT @ features, 2 / count * features.mT @ labels,
            labels.square().sum((1, 2)) / count,
        )  # fmt: skip

    def frozen_gradient(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """∇_θ F_k at a frozen Φ, whose attention map is computed once."""
        kept = self._frozen
        if kept is None or not (torch.equal(kept[0], query) and torch.equal(kept[1], key)):
            of = self.quadratic(query, key)
            kept = self._frozen = (query.clone(), key.clone(), of.hessian.to(query), of.linear.to(query))
        return torch.baddbmm(kept[3], kept[2], value, beta=-1)


def _gradient(
    rows: Tensor, columns: Tensor, labels: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """∇F_k of one seed; `rows` is H (examples · n, d), `columns` its transpose, labels (examples, n, d_v)."""
    shape, scale = labels.shape[:2], 1 / query.shape[1]  # φφᵀ has 1/d_k
    q, k, v = ((rows @ w).unflatten(0, shape) for w in (query, key, value))
    q.sigmoid_(), k.sigmoid_()
    attention = (q @ k.mT).mul_(scale)
    residual = torch.baddbmm(labels, attention, v, beta=-1).mul_(2 / len(rows))
    by_attention = (residual @ v.mT).mul_(scale)
    by_query = (by_attention @ k).mul_(q).mul_(1 - q)
    by_key = (by_attention.mT @ q).mul_(k).mul_(1 - k)
    by_value = attention.mT @ residual
    return columns @ by_query.flatten(0, 1), columns @ by_key.flatten(0, 1), columns @ by_value.flatten(0, 1)


def _shapeless() -> LinearAttention:
    with torch.device("meta"):
        return LinearAttention(WIDTH, SIZE, SIZE)


class Student(nn.Module):
    """The trained matrices W_Q, W_K and W_V of all seeds, each (seeds, d, size)."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(each.clone()) for each in (query, key, value))


def problem(seeds: Sequence[int], rho: float) -> tuple[list[Client], Student]:
    """Clients and initial weights; for another ρ, the same draws with only the clients' means scaled."""
    drawn = [_drawn(seed, rho) for seed in seeds]
    inputs, labels, student = (torch.stack(each) for each in zip(*drawn, strict=True))
    return [Client(inputs[:, k], labels[:, k]) for k in range(CLIENTS)], Student(*student.unbind(1))


def _drawn(seed: int, rho: float) -> tuple[Tensor, Tensor, Tensor]:
    """H (K, examples, n, d), labels (K, examples, n, d_v), and the student (3, d, size)."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    teacher, student = normal(3, WIDTH, SIZE) / math.sqrt(WIDTH), normal(3, WIDTH, SIZE) / math.sqrt(WIDTH)
    teacher[:2] *= SHARPNESS
    inputs = rho * normal(CLIENTS, 1, 1, WIDTH) + normal(CLIENTS, EXAMPLES, TOKENS, WIDTH)
    matrices = dict(zip(("query", "key", "value"), teacher, strict=True))
    labels: Tensor = functional_call(_shapeless(), matrices, (inputs,))
    return inputs, labels + NOISE * normal(*labels.shape), student


def mean_quadratic(clients: Sequence[Client], query: Tensor, key: Tensor) -> Quadratic:
    """f, the mean over the clients, as a function of θ at this Φ."""
    found = [client.quadratic(query, key) for client in clients]
    return Quadratic(*(torch.stack([getattr(of, name) for of in found]).mean(0)
                       for name in ("hessian", "linear", "constant")))  # fmt: skip


def steepness(clients: Sequence[Client], query: Tensor, key: Tensor) -> Tensor:
    """Largest eigenvalue of all G_k at this Φ: (seeds,). Above 2/η, steps on θ alone diverge at a client."""
    return torch.stack([torch.linalg.eigvalsh(of.quadratic(query, key).hessian)[:, -1] for of in clients]).amax(0)


def affine_round(
    clients: Sequence[Client], query: Tensor, key: Tensor, *, rate: float, ridge: float, steps: int
) -> tuple[Tensor, Tensor]:
    """P and b of a frozen round, θ⁺ = Pθ + b, with P = 1/K Σ_k (I − η(G_k + λI))^E: (seeds, d, d), (seeds, d, d_v)."""
    maps = []
    for client in clients:
        of = client.quadratic(query, key)
        step = torch.eye(WIDTH).double() - rate * (of.hessian + ridge * torch.eye(WIDTH).double())
        b = torch.zeros_like(of.linear)
        for _ in range(steps):
            b = step @ b + rate * of.linear
        maps.append((torch.linalg.matrix_power(step, steps), b))
    powers, offsets = (torch.stack(each).mean(0) for each in zip(*maps, strict=True))
    return powers, offsets


# --- training -------------------------------------------------------------------------------------------------------


@dataclass
class FullBatch(Work):
    """Local training by E steps with the exact gradient."""

    gradients: Callable[[], None] = lambda: None
    """Sets the gradient of the client's loss at the model, with the terms that the plan adds."""

    def fit(self, penalty: Callable[[], Tensor | float] | None = None, **how: Callable[[], None]) -> Fitted:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for _ in range(self.config.local_steps):
            self.gradients()
            if "correct" in how:
                how["correct"]()
            with torch.no_grad():
                for p in parameters:
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=self.config.learning_rate)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                far = ~(p.abs().amax((1, 2)) < FAR)
                if far.any():
                    p[far] = torch.from_numpy(self.received[name].copy())[far]
        return Fitted(self.config.local_steps, math.nan)


def client_app(clients: Sequence[Client], *, rate: float, steps: int, ridge: float) -> ClientApp:
    """A ClientApp that trains on the client of its partition; `ridge`: λ of its loss if the server's plan has none."""
    app = ClientApp(mods=[partial_exchange])
    config = TrainingConfig(optimizer="sgd", learning_rate=rate, local_steps=steps)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        client, message = clients[int(context.node_config["partition-id"])], received(msg)
        assert message is not None
        model = Student(*(torch.from_numpy(np.array(message.model[name])) for name in ("query", "key", "value")))
        plan = apply_plan(model, msg)
        matrices = (model.query, model.key, model.value)
        trained = [matrix for matrix in matrices if matrix.requires_grad]
        before = [matrix.detach().clone() for matrix in trained]

        def gradients() -> None:
            at = [matrix.detach() for matrix in matrices]
            found = client.gradient(*at) if len(trained) == len(at) else (client.frozen_gradient(*at),)
            found[-1].add_(at[-1], alpha=ridge + plan.ridge)
            for matrix, gradient, start in zip(trained, found, before, strict=True):
                if plan.proximal:
                    gradient.add_(matrix.detach() - start, alpha=plan.proximal)
                matrix.grad = gradient

        work = FullBatch(
            model, Batches(client.inputs, client.labels, EXAMPLES, 0), config, layout=message.layout,
            received=message.model, options=message.plan.options, trees=message.trees,
            load_personal=message.personal.load, gradients=gradients,
        )  # fmt: skip
        outcome = objectives.find(message.plan.objective).fit(work)
        if outcome.personal is not None:
            message.personal.save(outcome.personal)
        client.trained = tuple(matrix.detach() for matrix in trained)
        metrics = MetricRecord({"num-examples": EXAMPLES})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        for tree, values in outcome.trees.items():
            content[tree] = message.record_of(tree, values)
        return Message(content, reply_to=msg)

    return app


def matrices_of(arrays: ArrayRecord) -> tuple[Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V from Flower's arrays."""
    query, key, value = (torch.from_numpy(arrays[name].numpy().copy()) for name in ("query", "key", "value"))
    return query, key, value


def drift(clients: Sequence[Client]) -> Tensor:
    """Client drift 1/K Σ_k ‖w_k − w̄‖ of the matrices trained in the latest round: (seeds,)."""
    squares = torch.zeros(len(clients), len(clients[0].inputs))
    for matrices in zip(*(client.trained for client in clients), strict=True):
        stacked = torch.stack(matrices)
        squares += (stacked - stacked.mean(0)).square().sum((2, 3))
    return squares.sqrt().mean(0)


Watch = Callable[[int, ArrayRecord], None]
"""Called with the number and model of each round from 0, the initial model."""


def train(
    strategy: MethodStrategy, clients: Sequence[Client], start: ArrayRecord, rounds: int, watch: Watch, **local: Any
) -> ArrayRecord:
    """The model after all rounds. `local`: keyword arguments of `client_app`."""
    if not rounds:
        return start
    app = client_app(clients, **local)
    with TemporaryDirectory() as cache:
        nodes = [Node(app, {"partition-id": k, "cache-path": cache}) for k in range(len(clients))]
        return strategy.start(InProcessGrid(nodes), start, num_rounds=rounds, evaluate_fn=watch).arrays
