"""Several clients' local training as one computation with `torch.func`, on their stacked parameters.

Most of the time of a small model's step is the overhead of calling operations. One call for many clients has it once.
Each client has the batches that it has alone, in the same order, and its own optimizer state; the result agrees with
separate training to 1e-4.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from tepal.client_app.objectives import Work
from tepal.training.config import TrainingConfig
from tepal.training.freezing import frozen_rows
from tepal.training.loop import Batch, Fitted, endless, fitted, optimizer_for, steps_of, trained_parameters
from tepal.training.tasks import Task, check_shapes

log = getLogger("flwr")

T = TypeVar("T")


class Gathering:
    """Clients that are answered at once, each in its own thread and with its own model.

    Each is answered by a call of the gathering. Local training waits until all clients train or have answered; then
    those of equal shape train together.
    """

    def __init__(self, clients: int) -> None:
        self._due = clients
        self._waiting: list[_Place] = []
        self._changed = threading.Condition()

    def __call__(self, answer: Callable[..., T], *arguments: Any) -> T:
        _here.gathering, _here.arrived = self, False
        try:
            return answer(*arguments)
        finally:
            self.arrive()
            _here.gathering = None

    def arrive(self, place: _Place | None = None) -> None:
        """Count this thread's client, once: with its work, or without."""
        if _here.arrived:
            return
        _here.arrived = True
        with self._changed:
            self._waiting += [place] if place else []
            self._due -= 1
            if not self._due:
                try:
                    _train(self._waiting)
                finally:  # after any error, no thread waits for ever
                    for each in self._waiting:
                        each.settled = True
                    self._changed.notify_all()
            elif place:
                self._changed.wait_for(lambda: place.settled)


@dataclass
class _Place:
    """A client's work, and its outcome; None if it must train alone."""

    work: Work
    settled: bool = False
    outcome: Fitted | FloatingPointError | None = None


_here = threading.local()


def fit(work: Work, *, plain: bool) -> Fitted | None:
    """Train a client's model in place, together with the others of its gathering.

    Args:
        work: the client's local training.
        plain: whether its loss is that of the task alone.

    Returns:
        The result; None if the client must train alone, because there is no gathering or the work cannot be stacked.

    Raises:
        FloatingPointError: this client's training diverged, as in `tepal.training.loop.fit`.
    """
    gathering: Gathering | None = getattr(_here, "gathering", None)
    if gathering is None or _here.arrived:
        return None
    if not trained_parameters(work.model):  # its plan freezes all, and the others do not wait for it
        gathering.arrive()
        return None
    if reason := _hindrance(work.model, work.config) if plain else "their objective is not the task's loss alone":
        _say(reason)
        gathering.arrive()
        return None
    place = _Place(work)
    gathering.arrive(place)
    if isinstance(place.outcome, FloatingPointError):
        raise place.outcome
    return place.outcome


_said: set[str] = set()
_saying = threading.Lock()


def _say(reason: str) -> None:
    """Log once in a process why clients do not train together."""
    with _saying:
        if reason not in _said:
            _said.add(reason)
            log.info("Clients train one by one, and not together: %s.", reason)


def _hindrance(model: nn.Module, config: TrainingConfig) -> str:
    """Why a model cannot be stacked with others; "" if no reason is known."""
    if config.deterministic:
        return "deterministic=true requires the same bits"
    if config.autocast != "no" or config.gradient_checkpointing or config.micro_batch_size:
        return "autocast, gradient-checkpointing or micro-batch-size is set"
    if draws_numbers(model):
        return "the model draws random numbers (dropout)"
    if any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules()):
        return "the model's normalisation layers keep running statistics"
    if any(map(frozen_rows, model.parameters())):
        return "a part of a tensor is frozen (a fused projection)"
    return ""


def draws_numbers(model: nn.Module) -> bool:
    """Whether training draws random numbers, by the names of layers and of their settings, as they are first seen."""
    if (known := _drawing.get(model)) is None:
        known = _drawing[model] = _draws(model)
    return known


_drawing: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _draws(model: nn.Module) -> bool:
    for module in model.modules():
        kind = type(module).__name__.lower()
        if ("drop" in kind or "stochastic" in kind) and vars(module).get("p", 1.0):
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False


def _train(places: Sequence[_Place]) -> None:
    """Train clients of equal shape together. The others get no outcome, and train alone."""
    groups: dict[Any, list[_Place]] = {}
    for place in places:
        groups.setdefault(_kind(place.work), []).append(place)
    for group in groups.values():
        if len(group) > 1:
            try:
                outcomes = fit_stacked([place.work for place in group])
                for place, outcome in zip(group, outcomes, strict=True):
                    place.outcome = outcome
            except Exception as error:  # what cannot be stacked: each trains alone, and reports an error of its own
                _say((str(error).strip().splitlines() or [type(error).__name__])[0])


def _kind(work: Work) -> tuple[Any, ...]:
    """The properties that clients must share to train together."""
    tensors = tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in _tensors(work.model))
    inputs, labels = work.batches.inputs, work.batches.labels
    return work.config, work.task.name, tensors, inputs.shape[1:], inputs.dtype, labels.shape[1:], inputs.device


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def fit_stacked(works: Sequence[Work]) -> list[Fitted | FloatingPointError]:
    """Train the models of clients of equal shape in place; return the result of each, or its error if it diverged.

    The first dimension of stacked tensors is the clients, those with the most steps first.
    """
    config, task, model = works[0].config, works[0].task, works[0].model.train()
    order = sorted(range(len(works)), key=lambda k: -steps_of(works[k].batches, config))
    batches = [works[k].batches for k in order]
    steps = [steps_of(each, config) for each in batches]
    states = [dict(_tensors(works[k].model)) for k in order]
    # Fused optimizers read the memory of parameters and gradients in its order, whatever their strides are.
    stacked = {name: torch.stack([state[name].detach() for state in states]).contiguous() for name in states[0]}
    names = list(trained_parameters(model))
    trained, held = {name: stacked[name] for name in names}, {n: t for n, t in stacked.items() if n not in names}
    gradients_and_losses = vmap(grad_and_value(_loss_of(model, task)))
    optimizer = optimizer_for(trained.values(), config)
    streams = [endless(each) for each in batches]
    totals = torch.zeros(len(works), device=batches[0].labels.device)
    begun = time.perf_counter()
    # The other kernels of attention have no rule for stacked tensors.
    with sdpa_kernel(SDPBackend.MATH):
        for number in range(steps[0]):
            active = sum(number < most for most in steps)
            if active < len(next(iter(trained.values()))):
                trained, optimizer = _of_the_first(active, trained, optimizer, config)
                held = {name: tensor[:active] for name, tensor in held.items()}
            inputs, labels, weights = _side_by_side([next(stream) for stream in streams[:active]])
            gradients, losses = gradients_and_losses(trained, held, inputs, labels, weights)
            totals[:active] += losses
            _clip(list(gradients.values()), config)
            for name, tensor in trained.items():
                tensor.grad = gradients[name].contiguous()
            optimizer.step()
    seconds = time.perf_counter() - begun
    outcomes: dict[int, Fitted | FloatingPointError] = {}
    for row, k in enumerate(order):
        try:
            outcomes[k] = fitted(steps[row], totals[row], seconds * steps[row] / max(sum(steps), 1), config)
        except FloatingPointError as error:
            outcomes[k] = error
        with torch.no_grad():
            for name in names:
                states[row][name].copy_(stacked[name][row])
    return [outcomes[k] for k in range(len(works))]


def _loss_of(model: nn.Module, task: Task) -> Callable[..., Tensor]:
    """The loss of one client: (trained, held, inputs, labels, weights) → Σ_i weight_i·loss_i, a scalar."""

    def loss(
        trained: Mapping[str, Tensor], held: Mapping[str, Tensor], inputs: Tensor, labels: Tensor, weights: Tensor
    ) -> Tensor:
        tensors = {**trained, **held}
        outputs = task.outputs(lambda *args, **how: functional_call(model, tensors, args, how), inputs)
        if task.regression:
            check_shapes(outputs, labels)
            each = F.mse_loss(outputs, labels, reduction="none").flatten(1).mean(1)
        else:
            each = F.cross_entropy(outputs, labels, reduction="none")
        return (each * weights).sum()

    return loss


def _side_by_side(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of each client: inputs (clients, n, …), labels, and each example's weight in its client's mean loss.

    If a client has fewer examples than the others, its last one is repeated, with weight 0.
    """
    most = max(len(labels) for _, labels in batches)
    places = torch.arange(most, device=batches[0][1].device)
    inputs = torch.stack([x if len(x) == most else x[places.clamp(max=len(x) - 1)] for x, _ in batches])
    labels = torch.stack([y if len(y) == most else y[places.clamp(max=len(y) - 1)] for _, y in batches])
    return inputs, labels, torch.stack([(places < len(y)) / len(y) for _, y in batches])


def _clip(gradients: Sequence[Tensor], config: TrainingConfig) -> None:
    """As `tepal.training.loop.clip`, separately for each client's gradients (clients, …)."""
    if config.clip_norm:
        norms = torch.stack([gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factor = (config.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))


def _of_the_first(
    count: int, trained: Mapping[str, Tensor], optimizer: Optimizer, config: TrainingConfig
) -> tuple[dict[str, Tensor], Optimizer]:
    """Views of the first `count` clients' tensors, and an optimizer with its state of them."""
    fewer = {name: tensor[:count] for name, tensor in trained.items()}
    following = optimizer_for(fewer.values(), config)
    for name, tensor in trained.items():
        known = optimizer.state[tensor].items()
        following.state[fewer[name]] = {
            key: value[:count] if isinstance(value, Tensor) and value.dim() else value for key, value in known
        }
    return fewer, following
