"""Data, model, device and settings of one client; data and model are kept between messages."""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import Tensor, nn

from tepal import models
from tepal.exchange.layout import Layout
from tepal.exchange.mod import own_name, received
from tepal.exchange.plan import LABEL_COUNTS, LAYER_BUDGET, RATE, RATE_FACTOR
from tepal.host.flower.contents import records_of
from tepal.models.blocks import layout_of
from tepal.models.initial import PATTERNS, patterns_of
from tepal.training.augmentation import Augmentation
from tepal.training.config import TrainingConfig
from tepal.training.data import dataset_stamp, own_stamp
from tepal.training.data.inputs import FOUND_NAMES, FOUND_SHAPE, ClientInputs, InputConfig, client_inputs, written_sizes
from tepal.training.loop import Batches, device_of, norm_without_variance
from tepal.training.node_settings import with_own_settings
from tepal.training.tasks import TASKS, Task


@dataclass(frozen=True)
class LocalClient:
    """One client in one message. Each thread has one `model`, with the weights that were loaded last."""

    name: str
    model: nn.Module
    batches: Batches
    test: tuple[Tensor, Tensor]
    training: TrainingConfig
    task: Task
    node_config: Mapping[str, Any]
    sizes: Mapping[str, Any]
    """Arguments with which the model is built."""
    origin: str = ""
    """The examples' source, in words."""
    described: Mapping[str, str] = field(default_factory=dict)
    """Metadata of a file of the model: the run config that this client has, and its keys that say what to build."""

    @staticmethod
    def of(msg: Message, context: Context) -> LocalClient:
        """Load data and model. The message's config record takes precedence over the run config, and the settings of
        local training in the node config over both. The schedule's factor also multiplies a node's own learning rate.

        Raises:
            ValueError: data or model cannot be used (DataError, ModelError, …); the text is for the client's owner.
        """
        found = received(msg)
        # In an introduction the plan has no name yet.
        name = (found.plan.client if found else "") or own_name(context)
        settings: dict[str, Any] = {**context.run_config, **records_of(msg.content, ConfigRecord).get("config", {})}
        if context.node_config.get("data-path"):
            for key, found_key in (("class-names", FOUND_NAMES), ("image-shape", FOUND_SHAPE)):
                settings[key] = settings.get(key) or settings.get(found_key, "")
        training = with_own_settings(settings, context.node_config, factor=float(settings.get(RATE_FACTOR, 1.0)))
        if training.deterministic:
            torch.set_num_threads(1)
        device = device_of(str(context.node_config["device"]) if "device" in context.node_config else None)
        config = InputConfig.from_run_config(settings)
        run = f"{found.manifest.experiment if found else ''}/{context.run_id}"
        data = _load(config, context.node_config, name, run)
        inputs, labels, test_inputs, test_labels = (tensor.to(device) for tensor in data.tensors)
        round_seed = zlib.crc32(f"{settings.get('seed', 0)}/{settings.get('server-round', 0)}/{name}".encode())
        augmentation = Augmentation(training.augment_crop, training.augment_flip)
        model = _model(config.model, tuple(data.inputs.sizes.items()), device)
        setattr(model, PATTERNS, patterns_of(settings))
        return LocalClient(
            name=name,
            model=model,
            batches=Batches(inputs, labels, training.batch_size, round_seed, augmentation),
            test=(test_inputs, test_labels),
            training=training,
            task=TASKS[config.kind],
            node_config=context.node_config,
            sizes=data.inputs.sizes,
            origin=data.inputs.origin,
            described=_described(settings),
        )

    @property
    def budget(self) -> dict[str, float]:
        """The client's `layer-budget` as a metric; {} if its node config has none. Raises ValueError."""
        if LAYER_BUDGET not in self.node_config:
            return {}
        budget = self.node_config[LAYER_BUDGET]
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not math.isfinite(budget):
            raise ValueError(f"this node's config has {LAYER_BUDGET}={budget!r}, which is not a finite number")
        return {LAYER_BUDGET: float(budget)}

    @property
    def own_rate(self) -> dict[str, float]:
        """This round's learning rate as a metric, if it is the client's own; otherwise {}: the server knows it."""
        return {RATE: self.training.learning_rate} if RATE in self.node_config else {}

    def figures(self, msg: Message) -> dict[str, int | float | list[int]]:
        """The metrics of an introduction. Raises ValueError if the client cannot take part.

        The number of examples in each class is sent for partitions of the run's dataset, never for a site's own data.
        """
        if (found := received(msg)) is not None:
            here = _layout(self.model)
            if different := found.layout.difference(here, mine="the server's", others="this client's"):
                built = ", ".join(f"{key}={size}" for key, size in written_sizes(self.sizes).items())
                raise ValueError(
                    f"client {self.name}: {self.origin}: this client's model is not the server's: {different}. It is "
                    f"built for this client's data ({built}): correct the data, or set classes, class-names or "
                    "image-shape in the run config"
                )
        if norm := norm_without_variance(self.model, self.batches, self.training, self.task):
            few, cure = "it has one training example", "add examples"
            if len(self.batches) > 1:
                few, cure = "a batch or micro-batch has one example", "raise its size"
            raise ValueError(
                f"client {self.name}: {self.origin}: {few}, and the model's BatchNorm {norm!r} needs two in a batch: "
                f"{cure}, or use a model without BatchNorm"
            )
        figures: dict[str, int | float | list[int]] = {
            "num-examples": len(self.batches), "test-examples": len(self.test[1]), **self.budget
        }  # fmt: skip
        if "data-path" not in self.node_config and self.task.macro_f1:
            labels = torch.cat([self.batches.labels, self.test[1]])
            figures[LABEL_COUNTS] = torch.bincount(labels, minlength=int(self.sizes["classes"])).tolist()
        return figures


def _described(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {key: str(settings.get(key, "")) for key in ("model", "feature-columns", "normalise")}
    found["class-names"] = str(settings.get("class-names") or settings.get(FOUND_NAMES, ""))
    of_messages = (FOUND_NAMES, FOUND_SHAPE, "server-round")
    found["config"] = json.dumps({k: v for k, v in settings.items() if k not in of_messages}, default=str)
    return {key: value for key, value in found.items() if value}


@dataclass(frozen=True)
class _Loaded:
    inputs: ClientInputs
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    stamp: str

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


_MOST_LOADED = 2 * 2**30  # bytes of clients' examples that a process keeps: it may serve many clients


class _Examples(dict[str, _Loaded]):
    """The examples that a process keeps, by what they were loaded with; the oldest are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._nbytes = 0

    def keep(self, key: str, found: _Loaded) -> None:
        """Keep these in place of earlier ones."""
        self._drop(key)
        while self and self._nbytes + found.nbytes > _MOST_LOADED:
            self._drop(next(iter(self)))
        self[key] = found
        self._nbytes += found.nbytes

    def _drop(self, key: str) -> None:
        if (dropped := self.pop(key, None)) is not None:
            self._nbytes -= dropped.nbytes


_loaded = _Examples()
_loading = threading.Lock()  # the threads share loaded data and do not load it twice
_of_thread = threading.local()


@lru_cache(maxsize=16)
def _dataset_stamp(run: str, config: InputConfig) -> str:
    """The digest of a dataset's files as they are when the run begins: all its clients have the same examples."""
    return dataset_stamp(config)


def _load(config: InputConfig, node_config: Mapping[str, Any], name: str, run: str = "") -> _Loaded:
    key = json.dumps([config.model_dump(), dict(node_config), name], sort_keys=True, default=str)
    stamp = own_stamp(node_config) if "data-path" in node_config else _dataset_stamp(run, config)
    with _loading:
        if key not in _loaded or (stamp and stamp != _loaded[key].stamp):
            data = client_inputs(config, node_config, client=name, stamped=stamp)
            tensors = tuple(
                torch.from_numpy(array)
                for array in (data.train.values, data.train.labels, data.test.values, data.test.labels)
            )
            found = _Loaded(data, tensors, stamp)  # type: ignore[arg-type]
            _loaded.keep(key, found)
        return _loaded[key]


def _model(name: str, sizes: tuple[tuple[str, Any], ...], device: torch.device) -> nn.Module:
    if getattr(_of_thread, "built", None) != (name, sizes, device):
        with _loading:  # building seeds torch's generator, which all threads share
            model: Any = models.build(name, **dict(sizes), seed=0)
        _of_thread.model = model.to(device, memory_format=_format(model))
        _of_thread.built = name, sizes, device
    found: nn.Module = _of_thread.model
    return found


def _format(model: nn.Module) -> torch.memory_format:
    """The format in which convolutions are 20 % faster on a CPU; it does not affect other layers.

    PyTorch refuses it for a model with tensors of five dimensions, as a Conv3d has.
    """
    flat = all(tensor.dim() != 5 for tensor in (*model.parameters(), *model.buffers()))
    return torch.channels_last if flat else torch.preserve_format


def _layout(model: nn.Module) -> Layout:
    """The layout of a model, found once for all clients of a thread that introduce themselves with it."""
    if getattr(_of_thread, "laid_out", None) is not model:
        _of_thread.layout, _of_thread.laid_out = layout_of(model), model
    found: Layout = _of_thread.layout
    return found
