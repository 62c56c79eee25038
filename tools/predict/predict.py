"""`tepal predict`: predict images, texts or numbers with a saved model, or with the ensemble that one file contains.

    predictor = load_predictor(Path("runs/latest"))
    rows = predictor.predict_files([Path("scan.png"), Path("more/"), Path("test.npz")])
    write_csv(rows, Path("predictions.csv"))

A model file is safetensors. The tensors of one model have their state_dict names; those of the k-th model of an
ensemble are named `mode/<k>/<state_dict name>`, k = 0..K-1. The metadata describes what to build: `model`, with
`image-shape` ("1x8x8") and `classes`, or for a table `features` and `classes`, or for a regression `features` and
`outputs`. If these are missing, they are read from the run config in `config`, or from the dataset that it names. The
run config also names the columns of a table, the tokenizer and the length of texts. `class-names`: the names of the
classes, if they have any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tepal import models
from tepal.strategies import STRATEGIES
from tepal.tools.predict.images import image_batches
from tepal.tools.predict.model_file import check_fit, described, model_file, opened, prefixes_of, sizes_of
from tepal.tools.predict.numbers import NumberPrediction, read, table_batches
from tepal.tools.predict.results import Prediction
from tepal.tools.predict.texts import Batch, text_batches
from tepal.training.config import TrainingConfig
from tepal.training.data import CharVocabulary, DatasetInfo, NumberInfo, TableInfo, check_normalise
from tepal.training.data.inputs import InputConfig, tokens_of
from tepal.training.loop import device_of
from tepal.training.prediction import Predictions, predict
from tepal.training.tasks import TASKS

_AT_ONCE = 512  # examples in memory as floats; the weights of each member are read once for each batch


@dataclass(frozen=True, eq=False)
class Predictor:
    """A saved model whose file was checked; its weights are read when they are used."""

    file: Path
    model: nn.Module
    info: DatasetInfo | NumberInfo | TableInfo | None
    """Sizes of a model of images or numbers; None for a model of texts."""
    config: InputConfig
    """The keys of the run config that describe the model's inputs."""
    training: TrainingConfig
    """How many examples fit into a pass of the model, and in which number format."""
    prefixes: tuple[str, ...]
    """Prefix of each member's tensor names in `file`."""
    metadata: Mapping[str, str]
    """The metadata of `file`: run, strategy, model, …"""
    caution: str = ""
    """A warning about the use of its predictions; "" for none."""

    @property
    def members(self) -> int:
        """Number of models in the ensemble; 1 for a single model."""
        return len(self.prefixes)

    def predict_files(
        self, files: Sequence[Path], on_progress: Callable[[int], object] = lambda done: None
    ) -> list[Prediction] | list[NumberPrediction]:
        """Predict images, texts or numbers, whichever the model takes, in the order of `files`.

        Args:
            files: for a model of images, image files, folders (all images below them, sorted by path), and .npz files
                (their test set, or all images if they have none; labels are optional). Image files and arrays are
                converted to the model's channels and size. Texts: see `text_batches`. Numbers: .npz files and
                tables.
            on_progress: called with the number of examples that are done.

        Raises:
            OSError: a file does not exist, or cannot be opened.
            ValueError: a file does not fit the model, or the model's outputs are not finite.
        """
        if isinstance(self.info, NumberInfo):
            return self._numbers(files, self.info, on_progress)
        rows: list[Prediction] = []
        for batch in self._batches(files):
            predicted = self._predicted(batch.values)
            labels = predicted.labels
            probabilities = predicted.outputs.gather(1, labels[:, None])[:, 0]
            numbers = (each.tolist() for each in (labels, probabilities, predicted.entropy, predicted.dissent))
            true_labels = [None] * len(labels) if batch.labels is None else batch.labels.tolist()
            rows += [
                Prediction(file, index, label, probability, entropy, dissent, true_label, batch.name(place, label))
                for place, ((file, index), label, probability, entropy, dissent, true_label) in enumerate(
                    zip(batch.origins, *numbers, true_labels, strict=True)
                )
            ]
            on_progress(len(rows))
        return rows

    def _numbers(
        self, files: Sequence[Path], info: NumberInfo, on_progress: Callable[[int], object]
    ) -> list[NumberPrediction]:
        rows: list[NumberPrediction] = []
        for examples in read(files, info, self.config):
            predicted = self._predicted(examples.inputs)
            outputs, variance = predicted.outputs, predicted.variance
            assert variance is not None
            targets = [None] * len(outputs) if examples.targets is None else map(tuple, examples.targets.tolist())
            numbers = zip(outputs.tolist(), variance.sqrt().tolist(), targets, strict=True)
            rows += [
                NumberPrediction(examples.file, index, tuple(means), tuple(deviations), known)
                for index, (means, deviations, known) in enumerate(numbers)
            ]
            on_progress(len(rows))
        return rows

    def _predicted(self, inputs: NDArray[Any]) -> Predictions:
        """The mean over the members. Raises ValueError if an output is not finite."""
        device, task = next(self.model.parameters()).device, TASKS[self.config.kind]
        predicted = predict(self.model, self.states(), torch.from_numpy(inputs).to(device), self.training, task)
        if not predicted.outputs.isfinite().all():
            raise ValueError(f"{self.file}: the model's outputs are NaN or infinite; its training has diverged")
        return predicted

    def _batches(self, files: Sequence[Path]) -> Iterator[Batch]:
        if isinstance(self.info, DatasetInfo):
            return image_batches(files, self.info, self.config, _AT_ONCE)
        if isinstance(self.info, TableInfo):
            return table_batches(files, self.info, self.config, _AT_ONCE)
        names = CharVocabulary().characters if self.config.kind == models.CHARACTERS else self.config.names
        return text_batches(files, self.config, names, _AT_ONCE)

    def states(self) -> Iterator[dict[str, Tensor]]:
        """The tensors of each member, read when they are needed."""
        with opened(self.file) as content:
            for prefix in self.prefixes:
                yield {name: content.get_tensor(prefix + name) for name in self.model.state_dict()}


def load_predictor(path: Path) -> Predictor:
    """Read and check a saved model.

    Args:
        path: a run directory, a folder of runs (of which the latest is used), or a safetensors file.

    Raises:
        OSError: `path` has no model.
        ValueError: the file is not a model, does not name it, or has other tensors than that model.
    """
    file = model_file(Path(path).expanduser())
    with opened(file) as content:
        metadata = content.metadata() or {}
        names = content.keys()
        shapes = {name: tuple(content.get_slice(name).get_shape()) for name in names}
    try:
        name, run_config = described(metadata)
        config, training = InputConfig.from_run_config(run_config), TrainingConfig.of({**run_config, "autocast": "no"})
        info, sizes = sizes_of(run_config, config)
        model = models.build(name, **sizes, seed=0)
        prefixes = prefixes_of(shapes)
        strategy = str(run_config.get("strategy"))
        expected = run_config.get("fedensemble.modes") if strategy == "fedensemble" else len(prefixes)
        if len(prefixes) != expected:
            raise ValueError(f"part of the ensemble is missing: it has {len(prefixes)} of its {expected} modes")
        check_fit(shapes, prefixes, model, name)
        if isinstance(info, DatasetInfo):
            check_normalise(config.normalise, info.shape[0])
        elif isinstance(info, NumberInfo | TableInfo):
            check_normalise(config.normalise, info.features, "features")
        elif config.kind in (models.TEXTS, models.CHOICES):
            tokens_of(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    result = STRATEGIES[strategy].result if strategy in STRATEGIES else ""
    caution = ""
    if result and "run" in metadata:
        caution = f"this is {result}; each client's own model is at its node's model-path"
    return Predictor(file, model.to(device_of(None)), info, config, training, prefixes, metadata, caution)
