"""`lz quantize`: a model's folder with its matrices rounded, and what that costs layer by layer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from layerzero.cli.common import output
from layerzero.cli.common.options import json_option
from layerzero.spec.errors import LayerZeroError
from layerzero.spec.reasons import Reason

_COLUMNS = ("weight", "bits", "error of the weight", "error of its outputs")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--format", "form", required=True, help="int4, int8, fp8_e4m3, nvfp4 or mxfp4.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The new folder; FOLDER's name and the format where left out.",
)
@click.option(
    "--method",
    default="nearest",
    show_default=True,
    help="nearest; gptq, by the text of --calibrate; or hqq (int4, int8), torchao's half-quadratic scales.",
)
@click.option(
    "--calibrate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text that runs through the model: errors are those of what it computes, gptq makes them small.",
)
@click.option("--group-size", type=click.IntRange(min=1), help="Numbers that share a scale, of int4.")
@click.option("--ignore", multiple=True, help="Leave weights with such names, as *down_proj*; repeatable.")
@json_option
@click.pass_context
def quantize(
    ctx: click.Context, folder: Path, form: str, out: Path | None, method: str, calibrate: Path | None,
    group_size: int | None, ignore: tuple[str, ...], json_: bool,
) -> None:  # fmt: skip
    """Round the matrices of the model in FOLDER to a number format and write them into a new folder.

    The new folder is one of compressed-tensors, which `lz.load_quantized`, transformers and vLLM read.
    Embeddings, norms, routers and the last projection stay as they are. Exit status 1 where the model or the
    text does not fit; nothing is written then.
    """
    from layerzero.checkpoints.calibration import run_text
    from layerzero.checkpoints.writing import LEFT_ALONE, open_plain, quantize_folder, weights_to_round

    model = Path(os.path.abspath(folder))  # a link's own name, where `.` is none
    target = out or model.parent / f"{model.name}-{form}"
    ignored = (*LEFT_ALONE, *ignore)
    grams: dict[str, Any] = {}
    tokens = 0
    try:
        with output.progress("quantize", json_, str) as progress:
            if calibrate is not None:
                _, tensors = open_plain(folder, target, form, method, True)  # before minutes of calibration
                names = weights_to_round(tensors, ignored)
                text = _text_of(calibrate)
                grams, tokens = run_text(folder, text, names, progress)
            report = quantize_folder(
                folder, target, form, method=method, group_size=group_size, ignore=ignored, grams=grams,
                tokens=tokens, progress=progress,
            )  # fmt: skip
    except (LayerZeroError, ValueError, FileExistsError, FileNotFoundError) as error:
        reason: Any = getattr(error, "reason", None)
        raise click.ClickException(
            f"{error}" + (f" ({reason.value})" if isinstance(reason, Reason) else "")
        ) from error
    rows = [
        (each.name, f"{each.bits:g}", f"{each.weight:.4f}", _error_text(each.output))
        for each in report.layers
    ]
    worst = max(report.layers, key=lambda layer: (layer.output or 0.0, layer.weight), default=None)
    output.show(
        json_,
        msgspec.structs.asdict(report),
        output.Table(f"{form} by {method}", _COLUMNS, rows, mark=worst.name if worst is not None else ""),
        f"wrote {report.folder}: {report.bytes_before:,} bytes of weights became {report.bytes_after:,}",
        *([f"errors of outputs are over {tokens:,} tokens of {calibrate}"] if tokens else []),
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--calibrate needs a text in UTF-8, {path}: {error.reason} at {error.start}"
        ) from error


def _error_text(error: float | None) -> str:
    return "" if error is None else f"{error:.4f}"
