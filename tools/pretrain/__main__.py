"""`python -m tepal.tools.pretrain NAME`: make one of the weights that come with Tepal."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from tepal import models
from tepal.tools.pretrain import texts
from tepal.tools.pretrain.card import write_weights
from tepal.tools.pretrain.images import Classification, Images, accuracy, linear_probe, read_images
from tepal.tools.pretrain.loop import Trained, train
from tepal.tools.pretrain.probe import probe
from tepal.tools.pretrain.recipes import RECIPES, ImageRecipe, Recipe, TextRecipe
from tepal.training.augmentation import Augmentation
from tepal.training.data.config import DataError
from tepal.training.loop import device_of

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(RECIPES)}")],
    data: Annotated[Path, typer.Option(help="folder with the data sets: <name>.npz, or a folder <name>")],
    output: Annotated[Path, typer.Option(help="folder in which the folder of the weights is made")],
    epochs: Annotated[int, typer.Option(min=0, help="epochs instead of the recipe's; 0: the recipe's")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="a GPU if there is one")
    ] = None,
) -> None:
    """Train a model by its recipe, and write its weights and their card.

    An interrupted training continues from NAME.state in the output folder when the command is given again.
    """
    if name not in RECIPES:
        raise typer.BadParameter(f"{name!r} is unknown: allowed are {', '.join(RECIPES)}", param_hint="NAME")
    recipe = RECIPES[name]
    if epochs:
        recipe = replace(recipe, schedule=replace(recipe.schedule, epochs=epochs))
    try:
        print(pretrain(name, recipe, data.expanduser(), output.expanduser(), device_of(device)))
    except (DataError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def pretrain(name: str, recipe: Recipe, data: Path, output: Path, device: torch.device) -> Path:
    """Make the weights of a recipe; return the path of their card.

    Args:
        name: Name of the weights, and of their folder.
        recipe: How they are made.
        data: Folder with the data sets.
        output: Folder in which the folder of the weights is made.
        device: Where the model is trained.

    Raises:
        DataError: a data set is missing or cannot be read; found before the training begins.
        ModelError: texts, and transformers is not installed.
        ValueError: see `loop.train`.
    """
    begun = datetime.now(UTC)
    output.mkdir(parents=True, exist_ok=True)
    state = output / f"{name}.state"
    if isinstance(recipe, TextRecipe):
        done, facts = _encoder(recipe, data, output / name, state, device)
    else:
        done, facts = _classifier(recipe, data, state, device)
    made = {
        "epochs": recipe.schedule.epochs,
        "seed": recipe.seed,
        "seconds": round(done.seconds),
        "date": begun.date(),
        "terms": recipe.terms,
    }
    return write_weights(output / name, done.model, facts | made)


def _classifier(recipe: ImageRecipe, data: Path, state: Path, device: torch.device) -> tuple[Trained, dict[str, Any]]:
    # The probe's data, too, before hours of training.
    read: dict[str, tuple[Images, Images]] = {
        each: read_images(each, data, normalised_by=recipe.normalised_by, reduced=recipe.reduced, device=device)
        for each in recipe.data_sets
    }
    images, tests = read[recipe.data]
    _, *shape = images.inputs.shape
    size = (shape[0], shape[1], shape[2])
    classes = int(images.labels.max()) + 1
    model = models.build(recipe.model, image_shape=size, classes=classes, seed=recipe.seed).to(device)
    loss = Classification(images, Augmentation(recipe.crop, recipe.flip), recipe.smoothing)
    done = train(model, loss, len(images), recipe.schedule, seed=recipe.seed, state=state, log=_say)
    facts = {
        "model": recipe.model,
        "image-shape": "x".join(map(str, size)),
        "normalise": recipe.normalised_by,
        "data": recipe.data + (", reduced to 8x8 pixels" if recipe.reduced else ""),
        "classes": classes,
        "examples": len(images),
        # Of the weights as they are written, in half precision.
        "accuracy": round(accuracy(done.model.half().float(), tests), 4),
        "test-examples": len(tests),
    }
    if recipe.probe:
        facts |= {"probe": recipe.probe, "probe-accuracy": round(linear_probe(done.model, *read[recipe.probe]), 4)}
    return done, facts


def _encoder(
    recipe: TextRecipe, data: Path, folder: Path, state: Path, device: torch.device
) -> tuple[Trained, dict[str, Any]]:
    read = {each: texts.read_corpus(each, data) for each in recipe.data}
    trained_on = [text for corpus in read.values() for text in corpus.train]
    if not texts.has_tokenizer(folder):  # else the same seed gives the same weights
        texts.write_tokenizer(folder, trained_on, recipe.vocabulary)
    texts.write_config(folder, recipe.config)
    tokenizer = texts.read_tokenizer(folder)
    tokens, special = texts.Tokens.of(tokenizer, trained_on), texts.special_of(tokenizer)
    vectors = texts.word_vectors(tokens, recipe.vocabulary, int(recipe.config["hidden_size"]))
    model = texts.build_encoder(recipe.config, recipe.seed, vectors).to(device)
    loss = texts.MaskedSpans(tokens, special, recipe.vocabulary, recipe.length)
    done = train(model, loss, len(tokens), recipe.schedule, seed=recipe.seed, state=state, log=_say)
    done.model.half().float()  # as it is written
    of = {
        name: texts.masked_accuracy(done.model, texts.Tokens.of(tokenizer, corpus.held_out), special, recipe.length)
        for name, corpus in read.items()
    }
    facts = {
        "model": folder.name,
        "data": ", ".join(recipe.data),
        "examples": len(tokens),
        "task": "masked word pieces, and which spans are of one text",
        "accuracy": round(sum(each.right for each in of.values()) / sum(each.count for each in of.values()), 4),
        "test-examples": sum(each.count for each in of.values()),
        "accuracy-of": {name: round(each.accuracy, 4) for name, each in of.items()},
        "probe": recipe.probe,
        "probe-accuracy": round(_probed(recipe, read[recipe.probe], done.model, tokenizer), 4),
    }
    return done, facts


def _probed(recipe: TextRecipe, corpus: texts.Corpus, model: nn.Module, tokenizer: Any) -> float:
    train_features, test_features = (
        texts.features(model, tokenizer, each, recipe.length) for each in (corpus.train, corpus.held_out)
    )
    assert corpus.labels is not None
    return probe((train_features, corpus.labels[0]), (test_features, corpus.labels[1]))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    app()
