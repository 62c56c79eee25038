"""The model card of an exported folder: its README.md, with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

from tepal import models
from tepal.tools.export.delivered import Delivered
from tepal.tools.export.example_inputs import length_of
from tepal.training.data import DatasetInfo
from tepal.training.data.normalisation import statistics

_PIPELINES = {
    models.IMAGES: "image-classification",
    models.TEXTS: "text-classification",
    models.CHOICES: "text-generation",
}
_ROWS = {
    "strategy": "strategy",
    "round": "round",
    "data": "data",
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "measured-on": "measured on",
    "measured-after-round": "measured after round",
    "run": "run",
}
_TEXTS = """from transformers import {loads_with}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = {loads_with}.from_pretrained("{folder}").eval()
batch = tokenizer(["a text"], truncation=True, padding=True, return_tensors="pt")
print(model.config.id2label[int(model(**batch).logits.argmax())])"""
_IMAGES = """from PIL import Image, ImageOps
from transformers import {loads_with}, AutoImageProcessor

processor = AutoImageProcessor.from_pretrained("{folder}")
model = {loads_with}.from_pretrained("{folder}").eval()
image = ImageOps.exif_transpose(Image.open("image.png")).convert("RGB")
batch = processor(image, return_tensors="pt")
print(model.config.id2label[int(model(**batch).logits.argmax())])"""
_ONLY_MODEL = """from transformers import {loads_with}

model = {loads_with}.from_pretrained("{folder}").eval()"""


def model_card(delivered: Delivered, architecture: str, loads_with: str, folder: str, *, has_processor: bool) -> str:
    """Return the text of a README.md.

    Args:
        delivered: the model and the facts about it.
        architecture: the class of the model.
        loads_with: the class of transformers that loads it.
        folder: the name of its folder.
        has_processor: whether the folder has an image processor.
    """
    config, facts = delivered.predictor.config, delivered.facts
    rows = [f"| {title} | {_cell(facts[key])} |" for key, title in _ROWS.items() if key in facts]
    if config.names:
        rows.append(f"| classes | {_cell(', '.join(config.names))} |")
    code = _TEXTS if config.kind == models.TEXTS else _IMAGES if has_processor else _ONLY_MODEL
    note = [f"Note: {facts['note']}.", ""] if "note" in facts else []
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            f"pipeline_tag: {_PIPELINES[config.kind]}",
            "tags: [federated-learning, flower, tepal]",
            "---",
            "",
            f"# {_cell(facts['model'])}, trained by federated learning",
            "",
            f"`{architecture}`, trained with Tepal, a project built on Flower.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            *note,
            "## Use",
            "",
            "```python",
            code.format(loads_with=loads_with, folder=folder),
            "```",
            "",
            _inputs(delivered, has_processor),
            "",
        ]
    )


def _inputs(delivered: Delivered, has_processor: bool) -> str:
    info, config = delivered.predictor.info, delivered.predictor.config
    if isinstance(info, DatasetInfo):
        channels, height, width = info.shape
        scaled = f"{height} x {width} pixels, divided by 255"
        if config.normalise:
            mean, std = statistics(config.normalise)
            scaled += f", then normalised with mean {_numbers(mean)} and standard deviation {_numbers(std)}"
        if has_processor:
            return (
                f"The image processor makes the inputs of training: {scaled}. Before, as above, images must be turned "
                "upright by EXIF, which the processor does not do, and converted to RGB, which drops transparency as "
                "in training; the processor may put a colour behind it."
            )
        images = "grey" if channels == 1 else "colour" if channels == 3 else f"of {channels} channels"
        return (
            f"The folder has no image processor, because none of transformers makes the inputs of training: images "
            f"that are {images}, turned upright by EXIF, of {scaled}."
        )
    length = f"{length_of(config)} tokens"
    if config.kind == models.CHOICES:
        return (
            f"The model was trained for multiple choice, with at most {length} for a question and a choice. The score "
            "of a choice is the mean log probability of its tokens after the question, to which it is joined by a "
            "space; the choice with the highest score is the answer."
        )
    return f"The model was trained with at most {length} of a text, and without token types (`token_type_ids`)."


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _cell(text: str) -> str:
    """Return text that neither ends a cell of a Markdown table nor a line."""
    return " ".join(text.replace("|", "\\|").split())
