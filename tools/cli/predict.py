"""`tepal predict`: predict with a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tepal.tools.cli import commands, reported

app = commands("predict")


@app.command("predict")
def predict_command(
    model: Annotated[
        Path, typer.Argument(help="a run directory, a folder of runs (the latest), or a .safetensors file")
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            help="images, folders of images, .npz files (their test set if any); for texts or numbers, tables "
            "(.csv, .jsonl, .parquet) with the run's columns; .txt with a text on each line"
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="CSV file for all predictions; an existing file is replaced")
    ] = None,
) -> None:
    """Predict images, texts or numbers with a saved model, or with the mean over the models of an ensemble.

    Of every image or text: the class, its probability, the entropy of the probabilities in nats (0: certain), and the
    disagreement, the share of an ensemble's models that predict another class.
    """
    # Imported here: torch takes seconds.
    from tepal.tools.predict.predict import load_predictor
    from tepal.tools.predict.results import results_table, write_csv

    console, errors = Console(), Console(stderr=True)
    with reported():
        if output is not None and not output.absolute().parent.is_dir():
            raise ValueError(f"--output {output}: the folder {output.absolute().parent} does not exist")
        if output is not None and output.is_dir():
            raise ValueError(f"--output {output}: is a folder: name a file")
        predictor = load_predictor(model)
        if predictor.caution:
            errors.print(f"[yellow]{escape(predictor.caution)}[/]", highlight=False, soft_wrap=True)
        with errors.status("predicting …") as status:
            rows = predictor.predict_files(files, lambda done: status.update(f"predicting … {done:,} examples"))
        console.print(results_table(rows), soft_wrap=True)
        if output is not None:
            write_csv(rows, output)
            console.print(f"All {len(rows):,} predictions: {output}", markup=False, highlight=False, soft_wrap=True)
