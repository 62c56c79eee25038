"""Pretrained weights: read from a file, compared with the model's entries, and copied into the model.

Sources are the name of weights that come with Tepal, a directory as transformers' `save_pretrained` writes it, a
`.safetensors` file, a `state_dict` saved by torch, or a repository on the Hugging Face hub. Models of transformers load
a checkpoint by transformers' own rules, which know the names of older releases, the prefix of a base model (`bert.`)
and tied weights; all others load it by the names of their `state_dict`.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tepal.exchange.layout import Names
from tepal.models import DRAWING
from tepal.models.blocks import Blocks
from tepal.models.blocks.errors import few
from tepal.models.registry import ModelError
from tepal.models.weights import checked_file, misspelt, shipped

SAFETENSORS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
FILES = (SAFETENSORS, INDEX, PICKLE)
"""Files of weights in a directory, in the order in which they are tried."""

_TORCH = (".pt", ".pth", ".bin")
_EXPECTED = "a directory with model.safetensors or pytorch_model.bin, a .safetensors file, or a .pt or .pth file"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_POSITIONS = re.compile(r"(^|[._])(pos|positions?)(_emb|_embed|_embeddings?)?([._]|$)|embed_positions")


@dataclass(frozen=True)
class Loaded:
    """The result of `load_pretrained`; `str()` is one line for a log.

    file: the file of the weights.
    entries: number of tensors of the state_dict that were loaded.
    fresh: names that keep their random values: a head for other classes, or one that the file does not have.
    unused: names in the file that the model does not need: heads for other tasks, CLIP's text tower.
    """

    file: Path
    entries: int
    fresh: Names
    unused: Names

    def __str__(self) -> str:
        fresh = f"; initialised by seed, as the file has none of this shape: {few(self.fresh)}" if self.fresh else ""
        unused = f"; not used: {few(self.unused)}" if self.unused else ""
        return f"{self.entries} tensors loaded from {self.file}{fresh}{unused}."


@dataclass
class _Match:
    """A checkpoint's tensors by the model's names, and the names that do not match.

    missing: names that the file does not have. misshapen: name → shape in the file, shape in the model. unknown: names
    that the model should have. unused: names that the model does not need.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def load_pretrained(model: nn.Module, blocks: Blocks, source: str, *, download: bool = True) -> Loaded:
    """Copy weights into a model, in place; the head keeps its values if the checkpoint has none for these classes.

    Args:
        model: a model with random weights, on the CPU; its dtypes do not change.
        blocks: its blocks, which determine the head.
        source: the name of weights that come with Tepal, a directory, a file, or a name on the hub.
        download: whether weights may be downloaded from the hub.

    Raises:
        ModelError: there is nothing readable at the source; a pickle has more than tensors; an entry outside the head
            is missing or has another shape; the file has an entry that the model lacks, other than heads of other
            tasks; weights are NaN or infinite. The model is then unchanged.
    """
    file = find_weights(source, download=download)
    tensors = read_weights(file)
    if hasattr(model, "from_pretrained") and hasattr(model, "config"):
        match = _by_transformers(model, tensors, file)
    else:
        match = _by_name(model, blocks, tensors)
    _require_match(file, blocks, match)
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if broken := [name for name, value in match.values.items() if name in weights and not value.isfinite().all()]:
        raise ModelError(f"{file}: {few(broken)} have NaN or infinite values: use another checkpoint")
    state = model.state_dict()
    with torch.no_grad():
        for name, value in match.values.items():
            state[name].copy_(value)
    fresh = tuple(name for name in state if name in match.misshapen or name in match.missing)
    return Loaded(file, len(match.values), fresh, tuple(match.unused))


# --- the file ------------------------------------------------------------------------------------------------------


def find_weights(source: str, *, download: bool = True) -> Path:
    """Return the weights file (or the index of split files) of a source; see `load_pretrained`.

    Local files and directories come first, then the weights that come with Tepal, then the hub. Raises ModelError.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if file := next((path / name for name in FILES if (path / name).is_file()), None):
            return file
        raise ModelError(f"{path}: contains none of {', '.join(FILES)}: give another directory")
    if source in shipped():
        return checked_file(source)
    if near := misspelt(source):
        raise ModelError(f"no weights are named {source!r}: did you mean {near!r}?")
    if not download:
        raise ModelError(f"{source!r} is not on this machine")
    if _HUB_NAME.fullmatch(source) and path.suffix not in (".safetensors", *_TORCH):
        return _download(source)
    raise ModelError(f"{path}: no such file or directory: give {_EXPECTED}")


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read name → tensor on the CPU; of an index, from all its files. Raises ModelError."""
    if file.suffix == ".safetensors":
        return _safetensors(file)
    if file.name.endswith(".safetensors.index.json"):
        tensors: dict[str, Tensor] = {}
        for shard in _shards(file):
            if not shard.is_file():
                raise ModelError(f"{shard}: missing, although {file.name} lists it: copy all files")
            tensors |= _safetensors(shard)
        return tensors
    if file.suffix in _TORCH:
        return _torch(file)
    raise ModelError(f"{file}: not a file of weights: give {_EXPECTED}")


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({error}): copy it again") from error


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index}: not an index of safetensors files ({type(error).__name__}: {error}): copy it again"
        ) from error
    return [index.parent / name for name in sorted(names)]


def _torch(file: Path) -> dict[str, Tensor]:
    save = "save only its weights: torch.save(model.state_dict(), file), or safetensors.torch.save_model(model, file)"
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file}: contains Python objects in addition to tensors, or is damaged. Objects are not read, because "
            f"reading them can run code; {save}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # of a damaged file: KeyError, IndexError, AssertionError and others
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{file}: not a readable file of torch.save ({reason}): copy it again") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        content = few([str(key) for key in found]) if isinstance(found, Mapping) else type(found).__name__
        raise ModelError(f"{file}: contains {content}, expected a state_dict of names and tensors: {save}")
    return dict(found)


def _download(name: str) -> Path:
    instead = (
        f"give a local directory, which `hf download {name} --local-dir DIR` makes on a machine with a network; "
        f"pretrained may be {_EXPECTED}, or {', '.join(shipped())}, which come with Tepal"
    )
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError as error:
        raise ModelError(f"{name!r} is not a local file, and downloading needs huggingface_hub: {instead}") from error
    reason: Exception | None = None
    for file in FILES:
        try:
            path = Path(hf_hub_download(name, file))
            for shard in _shards(path) if file == INDEX else ():
                hf_hub_download(name, shard.name)
            return path
        except EntryNotFoundError as error:  # also when offline and not in the hub's cache
            reason = error
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
            reason = error
            break
    message = str(reason).strip().splitlines()[0]
    raise ModelError(
        f"{name!r} is not a local file, and cannot be downloaded from the hub ({message}): {instead}"
    ) from reason


# --- names ---------------------------------------------------------------------------------------------------------


def _by_name(model: nn.Module, blocks: Blocks, tensors: Mapping[str, Tensor]) -> _Match:
    """Match by the names of the state_dict; of tied tensors one is enough."""
    state = model.state_dict()
    match = _Match(unknown=[name for name in tensors if name not in state])
    owners = {tensor.name: tensor.same_as or tensor.name for tensor in blocks.layout.raw}
    given = {owners[name] for name in tensors if name in owners}
    for name, own in state.items():
        if name not in tensors:
            if owners[name] not in given and not name.endswith("num_batches_tracked"):  # missing in older checkpoints
                match.missing.append(name)
        elif tensors[name].shape != own.shape:
            match.misshapen[name] = tuple(tensors[name].shape), tuple(own.shape)
        else:
            match.values[name] = tensors[name]
    return match


def _by_transformers(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> _Match:
    load: Callable[..., Any] = type(model).from_pretrained  # type: ignore[attr-defined]
    try:
        # It initialises missing entries.
        with DRAWING, quiet(), torch.random.fork_rng(devices=[]):
            loaded, info = load(
                None,
                config=deepcopy(model.config),
                state_dict=tensors,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(f"{file}: transformers cannot load it ({error}): use weights of this architecture") from error
    match = _Match(missing=sorted(info["missing_keys"]))
    match.misshapen = {name: (tuple(there), tuple(here)) for name, there, here in sorted(info["mismatched_keys"])}
    without = {*match.missing, *match.misshapen}
    match.values = {name: value for name, value in loaded.state_dict().items() if name not in without}
    for name in sorted(info["unexpected_keys"]):
        (match.unused if _belongs_to_another_task(model, name) else match.unknown).append(name)
    return match


def _belongs_to_another_task(model: nn.Module, name: str) -> bool:
    """Return whether an unexpected entry is another task's head, a pooler or another tower.

    It is if its first name is not a top-level module of the model, or of its base model, whose checkpoints have no
    prefix.
    """
    base = getattr(model, getattr(model, "base_model_prefix", "") or "_", None)
    modules = {child for one in (model, base) if isinstance(one, nn.Module) for child in one._modules}
    parts = name.split(".")
    return "pooler" in parts or parts[0] not in {*modules, "encoder", "decoder", "embeddings"}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and tables: `Loaded` and `ModelError` have the same information."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# --- mismatches ----------------------------------------------------------------------------------------------------


def _require_match(file: Path, blocks: Blocks, match: _Match) -> None:
    """Raise ModelError for entries that do not match, except in the head and the pooler, which is trained with it."""
    head = {blocks.layout.by_name[name].raw for name in blocks.head}
    misshapen = {name: shapes for name, shapes in match.misshapen.items() if name not in head}
    for name, (there, here) in misshapen.items():
        if _POSITIONS.search(name):
            raise ModelError(
                f"{file}: {name} has shape {there}, and {blocks.model} has {here}: the weights were trained with "
                "images of another size (or texts of another length). Position embeddings are not resized: set "
                "image-shape to the size that the weights were trained with"
            )
    missing = [name for name in match.missing if name not in head and "pooler" not in name.split(".")]
    problems = []
    if missing:
        problems.append(f"the file has no {few(missing)}")
    if match.unknown:
        problems.append(f"the model has no {few(match.unknown)}")
    if misshapen:
        shapes = [f"{name} ({there} in the file, {here} in the model)" for name, (there, here) in misshapen.items()]
        problems.append(f"shapes differ in {few(shapes)}")
    if problems:
        raise ModelError(f"{file} does not fit {blocks.model}: {'; '.join(problems)}. Use weights of this architecture")
