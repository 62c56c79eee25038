"""Layer scores and training times, which a client measures before the server selects its layers.

Selective layer fine-tuning (arXiv:2408.15600) asks every client for the squared norm ‖g_l‖² of each layer's mean
gradient over one or more batches; the paper's baselines use other statistics of the same gradient. The model is not
changed: gradients are computed with respect to stand-ins for its parameters and buffers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast, get_args

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.func import functional_call

from tepal.exchange.layout import Layout, Names
from tepal.exchange.mod import received
from tepal.exchange.plan import (
    LAYER_MILLISECONDS,
    LAYER_SCORES,
    NO_SCORE,
    PROBE,
    PROBE_BATCHES,
    PROBE_SCORE,
    PROBE_TIMED,
)
from tepal.training.checkpointing import recomputed_layers
from tepal.training.freezing import plan_lifted
from tepal.training.loop import Batch, cuts
from tepal.training.tasks import IMAGES

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs, labels) → mean loss of the batch, a scalar."""

Kind = Literal["gradient", "snr", "rgn"]

_SHORTEST = 1e-3  # milliseconds: with a cost of 0 a layer would be free under any budget
_HEAD = -1


@dataclass(frozen=True)
class LayerScores:
    """Scores and durations of L layers, in the order in which the layers were given."""

    scores: list[float]
    milliseconds: list[float]
    """Duration of each layer's backward pass over the last batch, positive and finite."""
    examples: int
    loss: float
    """Mean loss over the examples."""


def layer_scores(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    layers: Sequence[Names],
    layout: Layout,
    *,
    score: Kind = "gradient",
    loss: Loss = IMAGES.loss_of,
    head: Names = (),
    timed: bool = False,
    gradient_checkpointing: bool = False,
) -> LayerScores:
    """Score every layer by g_l, the gradient of the mean loss over all examples of `batches` (arXiv:2408.15600).

    - "gradient": ‖g_l‖², the squared norm over all elements of the layer (its problem P1)
    - "snr": mean² / population variance of the gradient's elements, per tensor, summed over the layer's tensors. A
      tensor whose elements are all equal, such as one with a single element, contributes 0.
    - "rgn": ‖g_l‖ / ‖w_l‖, or 0 for a layer whose weights are all 0.

    The gradient is computed as in local training: in train mode, with batch statistics and with dropout, regardless of
    what an earlier `apply_plan` froze. Dropout uses a fixed seed, so equal models and batches have equal scores.
    Weights, buffers, `.grad`, `requires_grad`, modes and the global random number generators are unchanged afterwards,
    also after an error.

    Args:
        model: on the device of the batches.
        batches: inputs and labels; batches are weighted by their sizes.
        layers: names of entries of each layer, from input to output. Buffers are ignored; a parameter that the loss
            does not depend on has gradient 0. Parameters in neither a layer nor `head` need no gradient, so the
            backward pass ends at the lowest layer.
        layout: the layout of `model`, with all these names.
        score: the statistic; see above.
        loss: the objective of local training; by default the mean cross-entropy of logits.
        head: entries that are always trained. Their part of the backward pass is attributed to no layer.
        timed: whether `milliseconds` will be used. The first batch is then processed once before the measurement,
            because the first pass of a process is slow.
        gradient_checkpointing: whether the activations of layers are recomputed in the backward pass. Durations then
            have the recomputation in them.

    Returns:
        Scores, durations, number of examples and mean loss.

    Raises:
        ValueError: an unknown score, no batch, or a name that the layout or the model does not have; or
            `gradient_checkpointing` of a model without layers.
        FloatingPointError: the loss or a layer's gradient is NaN or infinite.
    """
    if score not in get_args(Kind):
        raise ValueError(f"score={score!r}: choose one of {', '.join(get_args(Kind))}")
    probe = _Probe(model, layers, head, layout, loss)
    examples, mean = 0, 0.0
    recomputed = recomputed_layers(model) if gradient_checkpointing else nullcontext()
    with plan_lifted(model), _in_train_mode(model), random_numbers_apart(model), recomputed:
        for inputs, labels in batches:
            if timed and not examples:
                probe.add(inputs, labels, share=1.0)
                probe.forget()
            examples += len(labels)
            share = len(labels) / examples
            mean += share * (probe.add(inputs, labels, share) - mean)
    if not examples:
        raise ValueError("there are no examples to score the layers with: give at least one batch")
    return LayerScores(probe.scores(score), probe.milliseconds, examples, mean)


class _Probe:
    """Stand-ins for a model's parameters and buffers, in which gradients accumulate.

    Stand-ins of parameters share their memory, but have their own `.grad`, `requires_grad` and hooks. Stand-ins of
    buffers are copies, because batch norms write into their buffers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Names], head: Names, layout: Layout, loss: Loss) -> None:
        self.loss = loss
        self.objective = CalledModel(model, self._descend)  # functional_call requires a module
        self.names = layers
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.stand_ins = {f"model.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        # A tied parameter has several names and one stand-in.
        unique = {id(parameter): parameters[name] for name, parameter in model.named_parameters()}
        self.by_name = {name: unique[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.layers = [self._slices(layer, layout) for layer in layers]
        self.events: list[tuple[int, float]] = []
        self.milliseconds = [_SHORTEST] * len(layers)
        for owner, slices in [(_HEAD, self._slices(head, layout)), *enumerate(self.layers)]:
            for tensor in {id(tensor): tensor for tensor, _ in slices}.values():
                tensor.requires_grad_(True)
                tensor.register_post_accumulate_grad_hook(self._clock(owner))

    def _slices(self, names: Names, layout: Layout) -> list[tuple[Tensor, tuple[slice, ...]]]:
        """Return the stand-in, and the entry's index in it, for the entries that can have a gradient."""
        found = []
        for name in names:
            if name not in layout.by_name:
                raise ValueError(
                    f"a layer names the entry {name!r}, which the layout does not have: give the model's own layout"
                )
            entry = layout.by_name[name]
            if entry.raw in self.buffers:
                continue
            if entry.raw not in self.by_name:
                raise ValueError(
                    f"a layer names {entry.raw!r}, but the model has no such parameter: give the model that the "
                    "layout was made from, not a wrapper of it"
                )
            if self.by_name[entry.raw].is_floating_point():
                found.append((self.by_name[entry.raw], entry.index))
        return found

    def add(self, inputs: Tensor, labels: Tensor, share: float) -> float:
        """Add a batch with weight `share` to the mean gradient, and scale the earlier ones.

        Returns the batch's loss.
        """
        for tensor in self.stand_ins.values():
            if tensor.grad is not None:
                tensor.grad.mul_(1 - share)
        return float(functional_call(self.objective, self.stand_ins, (inputs, labels, share)))

    def _descend(self, model: nn.Module, inputs: Tensor, labels: Tensor, share: float) -> Tensor:
        """Take the backward pass while the model has the stand-ins: recomputed layers must have them, too."""
        loss = self.loss(model, inputs, labels)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the layers cannot be scored: the loss of a batch of {len(labels)} is {value}. The model has "
                "diverged: lower learning-rate or set clip-norm"
            )
        self.events.clear()
        start = _now(inputs.device)
        (loss * share).backward()
        self.milliseconds = self._durations(start)
        return loss.detach()

    def forget(self) -> None:
        for tensor in self.stand_ins.values():
            tensor.grad = None

    def scores(self, kind: Kind) -> list[float]:
        scores = []
        for number, slices in enumerate(self.layers):
            gradients = [None if t.grad is None else t.grad[index].double() for t, index in slices]
            squared = sum(float(g.square().sum()) for g in gradients if g is not None)
            if not math.isfinite(squared):
                raise FloatingPointError(
                    f"layer {number + 1} of {len(self.layers)} ({self.names[number][0]}, …) cannot be scored: its "
                    "gradient is NaN or infinite. The model has diverged, or its dtype is too narrow: lower "
                    "learning-rate, set clip-norm, or let the model and its autocast have bfloat16 or float32"
                )
            if kind == "gradient":
                scores.append(squared)
            elif kind == "snr":
                eps = [torch.finfo(t.dtype).eps for t, _ in slices]
                scores.append(sum(_snr(g, e) for g, e in zip(gradients, eps, strict=True) if g is not None))
            else:
                weight = sum(float(t.detach()[index].double().square().sum()) for t, index in slices)
                scores.append(math.sqrt(squared / weight) if weight else 0.0)
        return scores

    def _clock(self, owner: int) -> Callable[[Tensor], None]:
        return lambda tensor: self.events.append((owner, _now(tensor.device)))

    def _durations(self, start: float) -> list[float]:
        """Return each layer's time since the previous layer finished, which allows layers to interleave."""
        last = dict(self.events)  # the time of the last gradient of each
        milliseconds = [_SHORTEST] * len(self.layers)
        before = start
        for owner, moment in sorted(last.items(), key=lambda item: item[1]):
            if owner != _HEAD:
                milliseconds[owner] = max(1e3 * (moment - before), _SHORTEST)
            before = moment
        return milliseconds


class CalledModel(nn.Module):
    """A function of a model and other arguments, as a module of these arguments."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Tensor:
        return self.function(self.model, *args)


def _snr(gradient: Tensor, eps: float) -> float:
    if not gradient.numel():
        return 0.0
    mean, variance = float(gradient.mean()), float(gradient.var(correction=0))
    # Elements that differ only by rounding count as equal: the ratio to their variance would be arbitrary.
    return mean**2 / variance if variance > (eps * mean) ** 2 else 0.0


def _now(device: torch.device) -> float:
    """Return the time in seconds, on a GPU after the queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _in_train_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def random_numbers_apart(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Return a context with random numbers from `seed`; the global generators are restored afterwards."""
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices):
        # torch.manual_seed would also seed GPUs whose state is not saved here.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def reply_to_probes(
    app: ClientApp,
    load: Callable[[Message, Context], tuple[nn.Module, Tensor, Tensor]],
    *,
    batch_size: int = 32,
    loss: Loss = IMAGES.loss_of,
) -> None:
    """Register `app`'s function for probes, `@app.train("probe")`.

    Args:
        app: a ClientApp with the mod `partial_exchange`.
        load: function of a message and its context that returns the model, with the message's `state_dict` loaded, and
            this client's inputs and labels, both with one row for each example.
        batch_size: examples in a batch. The batches are in the order of the examples. A last one of a single example is
            merged with the one before it.
        loss: the objective of local training; by default the mean cross-entropy of logits.
    """

    @app.train(PROBE)
    def probe(msg: Message, context: Context) -> Message:
        model, inputs, labels = load(msg, context)
        batches = ((inputs[part], labels[part]) for part in cuts(len(labels), batch_size))
        metrics = MetricRecord({"num-examples": len(labels), **probe_layers(model, msg, batches, loss=loss)})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def probe_layers(
    model: nn.Module,
    msg: Message,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    loss: Loss = IMAGES.loss_of,
    micro_batch_size: int = 0,
    gradient_checkpointing: bool = False,
) -> dict[str, list[float]]:
    """Return the metrics with which an app replies to a probe: one number per layer, as requested by the server.

    Args:
        model: the torch module, with the message's `state_dict` loaded.
        msg: the message that the function `@app.train("probe")` received.
        batches: inputs and labels of this client, on the model's device; as many are read as the server requests.
        loss: the objective of local training; by default the mean cross-entropy of logits.
        micro_batch_size: examples per forward and backward pass, as in local training; 0: a whole batch.
        gradient_checkpointing: whether the activations of layers are recomputed, as in local training.

    Returns:
        Name of a metric → one number per layer.

    Raises:
        ValueError: the message is not a probe, or the model lacks entries that it names.
        FloatingPointError: the loss or a layer's gradient is NaN or infinite.
    """
    content = received(msg)
    if content is None or content.plan.action != PROBE:
        raise ValueError("this message is not a probe: call `probe_layers` in a function with `@app.train('probe')`")
    groups, options = content.plan.groups, content.plan.options
    score, timed = options.get(PROBE_SCORE, NO_SCORE), bool(options.get(PROBE_TIMED))
    if score == NO_SCORE and not timed:
        return {}
    times = 1.0  # the time of the last piece → that of its batch

    def pieces() -> Iterator[Batch]:
        nonlocal times
        for inputs, labels in islice(batches, int(options.get(PROBE_BATCHES, 1)) or None):
            found = cuts(len(labels), micro_batch_size or len(labels))
            times = len(labels) / len(labels[found[0]])
            for piece in reversed(found):  # a whole one last
                yield inputs[piece], labels[piece]

    found = layer_scores(
        model,
        pieces(),
        [groups[f"layer/{number}"] for number in range(sum(name.startswith("layer/") for name in groups))],
        content.layout,
        score="gradient" if score == NO_SCORE else cast(Kind, score),
        loss=loss,
        head=groups.get("head", ()),
        timed=timed,
        gradient_checkpointing=gradient_checkpointing,
    )
    scores = {} if score == NO_SCORE else {LAYER_SCORES: found.scores}
    return scores | ({LAYER_MILLISECONDS: [times * each for each in found.milliseconds]} if timed else {})
