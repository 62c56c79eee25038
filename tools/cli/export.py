"""`tepal export`: export the model of a finished run, for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepal.tools.cli import commands, reported

if TYPE_CHECKING:
    from tepal.tools.export.onnx_file import OnnxFile

app = commands("export")


class Form(StrEnum):
    """What a model is exported to."""

    HUGGING_FACE = "hugging-face"
    ONNX = "onnx"


@app.command("export")
def export_command(
    to: Annotated[Form, typer.Option(help="a folder that transformers loads, or an ONNX file")],
    model: Annotated[
        Path, typer.Argument(help="a run directory, a folder of runs (the latest), or a .safetensors file")
    ] = Path("runs"),
    output: Annotated[
        Path | None,
        typer.Option(
            help="hugging-face: folder, new or empty; onnx: file, replaced if it exists",
            show_default="hugging-face or model.onnx, next to the model",
        ),
    ] = None,
) -> None:
    """Export the model of a finished run for other programs, and check that it computes the same.

    hugging-face: a folder for from_pretrained of transformers, with tokenizer or image processor and a model card, for
    models of transformers. onnx: one file, for any model; an ensemble becomes one model that returns the mean of the
    probabilities.
    """
    # Imported here: torch takes seconds.
    from tepal.tools.export.delivered import load_delivered
    from tepal.tools.export.onnx_file import export_onnx, require_onnx

    with reported():
        if to is Form.ONNX:
            require_onnx()
        delivered = load_delivered(model)
        beside = delivered.predictor.file
        if delivered.predictor.caution:
            typer.secho(delivered.predictor.caution, fg="yellow", err=True)
        if to is Form.HUGGING_FACE:
            from tepal.tools.export.hugging_face import export_folder

            folder = export_folder(delivered, output or beside.with_name(Form.HUGGING_FACE.value))
            typer.echo(
                f"{folder.path}: loaded by {folder.loads_with}; its outputs for random inputs differ from the run's "
                f"model by at most {folder.difference:.1e}"
            )
            return
        file = export_onnx(delivered, output or beside.with_suffix(".onnx"))
    typer.echo(f"{file.path}: {_shapes(file.inputs)} → {_shapes(file.outputs)}")
    typer.echo(_check(file))


def _shapes(shapes: Mapping[str, tuple[int | str, ...]]) -> str:
    return ", ".join(f"{name} ({', '.join(map(str, sizes))})" for name, sizes in shapes.items())


def _check(file: OnnxFile) -> str:
    if file.difference is None:
        return "Not compared with torch: onnxruntime is not installed (pip install 'tepal[onnx]')"
    return (
        f"Its outputs for {file.examples} random inputs differ from torch's by at most {file.difference:.1e} "
        f"({file.allowed:.1e} is allowed)"
    )
