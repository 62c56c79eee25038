"""`tepal predict`: what a saved model, or the ensemble of all models in one file, says of images, texts or numbers.

    predictor = load_predictor(Path("runs/latest"))
    rows = predictor.predict_files([Path("scan.png"), Path("more/"), Path("test.npz")])
    write_csv(rows, Path("predictions.csv"))

A model file is safetensors. One model's tensors have their state_dict names there; of an ensemble, the tensors of its
k-th model are named `mode/<k>/<state_dict name>`, k = 0..K-1. The metadata tells what to build: `model`, and
`image-shape` ("1x8x8") and `classes`, or of a regression `features` and `outputs`; where these are missing, the run
config in `config` tells them, else the dataset that it names. The run config also says which columns of a table have
the texts or numbers, and by which tokenizer and at which length texts become tokens. `class-names` are the classes'
names, where they have names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tepal import models
from tepal.strategies import STRATEGIES
from tepal.tools.predict.images import expanded_images, image_arrays
from tepal.tools.predict.model_file import built_for, check_fit, described, model_file, opened, prefixes_of
from tepal.tools.predict.numbers import NumberPrediction, read
from tepal.tools.predict.results import Prediction
from tepal.tools.predict.texts import Batch, expanded_texts, text_batches
from tepal.training.config import TrainingConfig
from tepal.training.data import CharVocabulary, DatasetInfo, NumberInfo, check_normalise, normalise
from tepal.training.data.inputs import InputConfig, tokens_of
from tepal.training.loop import device_of
from tepal.training.prediction import Predictions, predict
from tepal.training.tasks import TASKS

_AT_ONCE = 512  # examples in memory as floats; each member's weights are read once for as many


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model that was read and checked. `prefixes` come before the tensor names of its members in `file`."""

    file: Path
    model: nn.Module
    info: DatasetInfo | NumberInfo | None
    """Of images or numbers; None for a model of texts."""
    config: InputConfig
    """What the run config says of what the model takes."""
    training: TrainingConfig
    """What fits in a pass of the model."""
    prefixes: tuple[str, ...]
    caution: str = ""
    """What to know before its predictions are used; "" for nothing."""

    @property
    def members(self) -> int:
        return len(self.prefixes)

    def predict_files(
        self, files: Sequence[Path], on_progress: Callable[[int], object] = lambda done: None
    ) -> list[Prediction] | list[NumberPrediction]:
        """Predict images, texts or numbers, as the model takes them, in the order of `files`.

        Args:
            files: image files, folders (all images below them, sorted by path), and .npz files: their test images
                where they have a test set, else all, with labels or without. Image files are made grey or coloured
                and resized to what the model needs; arrays must have its shape. Texts: see `text_batches`. Numbers:
                .npz files and tables.
            on_progress: called with the number of examples that are done.

        Raises:
            OSError: a file is not there, or cannot be opened.
            ValueError: a file is not what the model takes; the text names it, and what the model needs. Also where the
                model's outputs are not finite.
        """
        if isinstance(self.info, NumberInfo):
            return self._numbers(files, self.info, on_progress)
        rows: list[Prediction] = []
        for batch in self._batches(files):
            said = self._said(batch.values)
            labels = said.labels
            probabilities = said.outputs.gather(1, labels[:, None])[:, 0]
            numbers = (column.tolist() for column in (labels, probabilities, said.entropy, said.dissent))
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
            said = self._said(examples.inputs)
            assert said.variance is not None
            targets = [None] * len(said.outputs) if examples.targets is None else map(tuple, examples.targets.tolist())
            numbers = zip(said.outputs.tolist(), said.variance.sqrt().tolist(), targets, strict=True)
            rows += [
                NumberPrediction(examples.file, index, tuple(outputs), tuple(deviations), known)
                for index, (outputs, deviations, known) in enumerate(numbers)
            ]
            on_progress(len(rows))
        return rows

    def _said(self, inputs: NDArray[Any]) -> Predictions:
        """Raises ValueError for what is no number."""
        device, task = next(self.model.parameters()).device, TASKS[self.config.kind]
        said = predict(self.model, self._states(), torch.from_numpy(inputs).to(device), self.training, task)
        if not said.outputs.isfinite().all():
            raise ValueError(f"{self.file}: the model's outputs are NaN or infinite; its training has diverged")
        return said

    def _batches(self, files: Sequence[Path]) -> Iterator[Batch]:
        if not isinstance(self.info, DatasetInfo):
            names = CharVocabulary().characters if self.config.kind == models.CHARACTERS else self.config.names
            yield from text_batches(expanded_texts(files), self.config, names, _AT_ONCE)
            return
        for batch in image_arrays(expanded_images(files), self.info, _AT_ONCE):
            examples = batch.arrays.take(np.arange(len(batch.origins)))
            values = normalise(examples.images, self.config.normalise)
            yield Batch(batch.origins, values, examples.labels if batch.labelled else None, self.config.names)

    def _states(self) -> Iterator[dict[str, Tensor]]:
        """One member's tensors after the other's, read when they are wanted."""
        with opened(self.file) as content:
            for prefix in self.prefixes:
                yield {name: content.get_tensor(prefix + name) for name in self.model.state_dict()}


def load_predictor(path: Path) -> Predictor:
    """Read and check a saved model.

    Args:
        path: a run directory, a folder of runs (then the latest), or a safetensors file.

    Raises:
        OSError: there is no model at `path`.
        ValueError: the file is not a model, does not tell which, or its tensors are not those of that model; the text
            names the file and what is wrong.
    """
    file = model_file(Path(path).expanduser())
    with opened(file) as content:
        metadata = content.metadata() or {}
        names = content.keys()
        shapes = {name: tuple(content.get_slice(name).get_shape()) for name in names}
    try:
        name, told = described(metadata)
        config, training = InputConfig.from_run_config(told), TrainingConfig.of({**told, "autocast": "no"})
        info, sizes = built_for(told, config)
        model = models.build(name, **sizes, seed=0)
        prefixes = prefixes_of(shapes)
        expected = told.get("fedensemble.modes") if told.get("strategy") == "fedensemble" else len(prefixes)
        if len(prefixes) != expected:
            raise ValueError(f"part of the ensemble is missing: it has {len(prefixes)} of its {expected} modes")
        check_fit(shapes, prefixes, model, name)
        if isinstance(info, DatasetInfo):
            check_normalise(config.normalise, info.shape[0])
        elif config.kind in (models.TEXTS, models.CHOICES):
            tokens_of(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    strategy = STRATEGIES.get(str(told.get("strategy")))
    caution = ""
    if strategy and strategy.result and "run" in metadata:
        caution = f"this is {strategy.result}; each client's own is where its node's model-path says"
    return Predictor(file, model.to(device_of(None)), info, config, training, prefixes, caution)
