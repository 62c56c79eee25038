"""A saved model as an ONNX file, and the comparison of its outputs with torch's by onnxruntime."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tepal import __version__, models
from tepal.host.files import replacing
from tepal.tools.export.delivered import TOLERANCE, Delivered, ExportError, largest_difference
from tepal.tools.export.example_inputs import example_inputs, length_of
from tepal.tools.export.graphs import Graph, graph_of
from tepal.training.data import CharVocabulary, DatasetInfo, NumberInfo, TableInfo
from tepal.training.data.inputs import tokens_of
from tepal.training.data.normalisation import statistics

_NEEDED = ("onnx", "onnxscript")
_LARGEST = 2**31 - 2**24  # bytes of weights: an ONNX file is one message of Protocol Buffers, which has at most 2 GiB
_BATCHES = (1, 2, 5)
Sizes = tuple[int | str, ...]


@dataclass(frozen=True)
class OnnxFile:
    """An exported file.

    inputs, outputs: name → shape, in which a name stands for a size that may vary.
    difference, allowed: largest difference of its outputs from torch's, and what is allowed for outputs of this size;
        None if onnxruntime is not installed.
    examples: random inputs that were compared.
    """

    path: Path
    inputs: Mapping[str, Sizes]
    outputs: Mapping[str, Sizes]
    difference: float | None
    allowed: float | None
    examples: int = sum(_BATCHES)


def require_onnx() -> None:
    """Raise ExportError if a package that writes ONNX files is not installed."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ExportError(f"--to onnx needs {' and '.join(missing)}, not installed here: pip install 'tepal[onnx]'")


def export_onnx(delivered: Delivered, file: Path) -> OnnxFile:
    """Write a model, or an ensemble as one model, to an ONNX file; an existing file is replaced.

    Args:
        delivered: the model.
        file: in an existing folder.

    Raises:
        ExportError: a package is missing; the model is too large or torch cannot export it; the outputs of the file
            differ from torch's.
        OSError: the file cannot be written.
    """
    require_onnx()
    if not file.absolute().parent.is_dir():
        raise ExportError(f"--output {file}: the folder {file.absolute().parent} does not exist")
    if file.is_dir():
        raise ExportError(f"--output {file}: is a folder: name a file, such as {file / 'model.onnx'}")
    predictor = delivered.predictor
    size = predictor.file.stat().st_size
    if size > _LARGEST:
        raise ExportError(f"{predictor.file}: {size:,} bytes of weights, and an ONNX file has at most {_LARGEST:,}")
    graph = graph_of(delivered)
    program = _exported(delivered, graph)
    inputs, outputs = _shapes(program.model.graph.inputs), _shapes(program.model.graph.outputs)
    if any(isinstance(shape[0], int) for shape in inputs.values()):
        raise ExportError(
            f"model={delivered.facts['model']!r}: its forward fixes the number of examples in a batch, so that the "
            "file would take no other number: in forward use inputs.shape[0] instead of len(inputs) or a constant"
        )
    program.model.metadata_props.update(_metadata(delivered))
    program.model.producer_name, program.model.producer_version = "tepal", __version__
    with replacing(file) as partial:
        program.save(str(partial), external_data=False)
        difference, allowed = _compared(delivered, graph, partial, inputs)
    return OnnxFile(file, inputs, outputs, difference, allowed)


def _shapes(values: Iterable[Any]) -> dict[str, Sizes]:
    return {each.name: tuple(size if isinstance(size, int) else str(size) for size in each.shape) for each in values}


def _exported(delivered: Delivered, graph: Graph) -> Any:
    inputs = graph.split(example_inputs(delivered, 3, seed=0))
    reason: BaseException | None = None
    for varying in _varying(delivered, inputs):
        try:
            # The exporter decomposes attention. The outputs of other kernels have another order in memory, for which
            # the views that follow are traced.
            with _silent(), sdpa_kernel(SDPBackend.MATH):
                return torch.onnx.export(
                    graph,
                    inputs,
                    dynamo=True,
                    dynamic_shapes=(tuple(varying for _ in inputs),),
                    input_names=graph.input_names,
                    output_names=graph.output_names,
                    verbose=False,
                    external_data=False,
                )
        except Exception as error:  # of many types, from the exporter and from the model's forward
            reason = error
    reason = _first_cause(reason)
    cause = next((line.strip() for line in str(reason).splitlines() if line.strip()), "")
    raise ExportError(
        f"model={delivered.facts['model']!r}: torch {torch.__version__} cannot export it to ONNX "
        f"({type(reason).__name__}: {cause}): use --to hugging-face if it is a model of transformers"
    ) from reason


def _first_cause(error: BaseException | None) -> BaseException | None:
    """Return the error that a chain begins with: the exporter's own says to whom to report it."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return error


def _varying(delivered: Delivered, inputs: Sequence[Tensor]) -> Iterator[dict[int, Any]]:
    """Yield position → size that may vary: first also the number of tokens, which not every model allows."""
    size, kind = torch.export.Dim, delivered.predictor.config.kind
    batch, last = size("batch"), inputs[0].ndim - 1
    if kind in (models.TEXTS, models.CHOICES) and length_of(delivered.predictor.config) > 2:
        tokens = size("tokens", min=2, max=length_of(delivered.predictor.config))
        yield {0: batch, 1: size("choices"), 2: tokens} if kind == models.CHOICES else {0: batch, 1: tokens}
    if kind == models.SEQUENCES and last == 2:
        yield {0: batch, 1: size("length")}
    yield {0: batch}


def _another_length(delivered: Delivered) -> int:
    """Another number of tokens than in training, or of positions than a sequence of numbers was exported with."""
    config = delivered.predictor.config
    if config.kind == models.SEQUENCES:
        return example_inputs(delivered, 1, seed=0).shape[1] + 1
    return max(2, length_of(config) // 2)


def _compared(
    delivered: Delivered, graph: Graph, file: Path, shapes: Mapping[str, Sizes]
) -> tuple[float, float] | tuple[None, None]:
    """Return the largest difference from torch's outputs and what is allowed; None without onnxruntime.

    Raises ExportError if onnxruntime cannot run the file, or more differs than is allowed.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return None, None
    import onnxruntime

    largest, kind = (0.0, TOLERANCE), delivered.predictor.config.kind
    varies = kind in (models.TEXTS, models.SEQUENCES, models.CHOICES) and any(
        isinstance(size, str) for shape in shapes.values() for size in shape[1:]
    )
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        for number, count in enumerate(_BATCHES):
            length = _another_length(delivered) if varies and number == 1 else None
            inputs = example_inputs(delivered, count, seed=number + 1, length=length)
            found = session.run(
                None, {name: each.numpy() for name, each in zip(shapes, graph.split(inputs), strict=True)}
            )
            for expected, values in zip(graph.expected(inputs), found, strict=True):
                difference, allowed = largest_difference(expected, torch.from_numpy(values))
                if difference > allowed:
                    raise ExportError(
                        f"the ONNX file's outputs for random inputs differ from torch's by up to {difference:.1e}, and "
                        f"{allowed:.1e} is allowed: the file is not kept"
                    )
                largest = max(largest, (difference, allowed))
    except ExportError:
        raise
    except Exception as error:  # onnxruntime's errors share no type
        raise ExportError(f"onnxruntime cannot run the ONNX file ({error}): the file is not kept") from error
    return largest


def _metadata(delivered: Delivered) -> dict[str, str]:
    predictor = delivered.predictor
    config, info = predictor.config, predictor.info
    found = {"tepal": __version__, "task": config.kind, "members": str(predictor.members), **delivered.facts}
    if config.names:
        found["class-names"] = json.dumps(config.names, ensure_ascii=False)
    if isinstance(info, DatasetInfo):
        found |= {"image-shape": "x".join(map(str, info.shape)), "classes": str(info.classes), "pixels": "0 to 1"}
    elif isinstance(info, NumberInfo | TableInfo):
        found |= {name: str(count) for name, count in asdict(info).items()}
    elif config.kind == models.CHARACTERS:
        found |= {"text-length": str(length_of(config)), "characters": CharVocabulary().characters}
    elif config.kind in (models.TEXTS, models.CHOICES):
        tokens = tokens_of(config)
        name = Path(tokens.name).expanduser()
        found |= {
            "text-length": str(length_of(config)),
            "tokenizer": name.name if name.is_dir() else tokens.name,
            "padding": str(tokens.padding),
        }
        if config.kind == models.CHOICES:
            found["roles"] = json.dumps({"padding": 0, "context": 1, "choice": 2})
    if info is not None and config.normalise:
        mean, std = statistics(config.normalise)
        found |= {"mean": json.dumps(mean), "std": json.dumps(std)}
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Hide what the exporter warns of: packages that it does not need, and its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
