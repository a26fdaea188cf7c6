"""`q=1x32x2048x128:bf16 is_causal=true`: the arguments of an op, written in a shell.

Tensors become meta tensors, which have shapes and dtypes and no memory: any size can be asked about.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
import torch

from layerzero.ops.op import Args, Op, Signature

GRAMMAR = "SHAPE[:DTYPE][:grad], such as 1x32x2048x128:bf16 or 4096:f32:grad, or `scalar` for no axis"
DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "fp32": torch.float32,
    "f16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
_SHAPE = re.compile(r"scalar|\d+(x\d+)*")
_MAX_AXIS = 2**40


def build_call(op: Op, arguments: Sequence[str], shape: str | None = None) -> tuple[Signature, Args]:
    """The op's signature and full arguments out of `NAME=VALUE` words.

    `shape` is the tensor that every required argument gets which takes a tensor and was not named.
    Raises: click.UsageError: a word does not parse, a name is unknown, or the op refuses the arguments.
    """
    parameters = inspect.signature(op.build).parameters
    values: dict[str, Any] = {}
    for word in arguments:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{word!r} needs NAME=VALUE; {usage(op)}")
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, n=2)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise click.UsageError(f"{op.name} has no argument {name!r}; {hint}{usage(op)}")
        if name in values:
            raise click.UsageError(f"{name} is given twice")
        values[name] = _value(name, text, str(parameters[name].annotation))
    if shape is not None:
        for name, parameter in parameters.items():
            required = parameter.default is inspect.Parameter.empty
            if required and name not in values and "Tensor" in str(parameter.annotation):
                values[name] = _tensor("--shape", shape)
    missing = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in values]
    if missing:
        raise click.UsageError(f"{op.name} also needs {' and '.join(missing)}; {usage(op)}")
    return op.build(**values)


def usage(op: Op) -> str:
    """The op's arguments with their types, the required ones first."""
    parts = []
    for name, parameter in inspect.signature(op.build).parameters.items():
        text = f"{name}: {parameter.annotation}"
        parts.append(text if parameter.default is inspect.Parameter.empty else f"[{text}]")
    return f"{op.name} takes {', '.join(parts)}; a tensor is {GRAMMAR}"


def _value(name: str, text: str, annotation: str) -> Any:
    """The value of one word; `annotation` says whether digits are a shape or a number."""
    if text == "none":
        return None
    aliases = ("Number", "Count")
    may_be_number = any(kind in annotation for kind in (*aliases, "int", "float"))
    if "Tensor" in annotation and not may_be_number:
        return _tensor(name, text)
    if any(kind in annotation for kind in (*aliases, "Tensor")) and ("x" in text or ":" in text):
        return _tensor(name, text)
    return _plain(text)


def _plain(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if "," in text:
        return tuple(_plain(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _tensor(name: str, text: str) -> torch.Tensor:
    shape, *rest = text.split(":")
    if not _SHAPE.fullmatch(shape):
        raise click.UsageError(f"{name} needs {GRAMMAR}, got {text!r}")
    sizes = [] if shape == "scalar" else [int(size) for size in shape.split("x")]
    if any(size > _MAX_AXIS for size in sizes):
        raise click.UsageError(f"{name} needs sizes of at most 2**40, got {text!r}")
    grad = "grad" in rest
    names = [word for word in rest if word != "grad"]
    if len(names) > 1:
        raise click.UsageError(f"{name} needs at most one dtype, got {text!r}")
    dtype = _dtype(name, names[0]) if names else torch.float32
    if grad and not dtype.is_floating_point:
        raise click.UsageError(f"{name} needs a float dtype to require grad, got {text!r}")
    try:
        return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=grad)
    except RuntimeError as error:
        raise click.UsageError(f"{name} needs a shape that torch can hold, got {text!r}: {error}") from error


def _dtype(name: str, word: str) -> torch.dtype:
    dtype = DTYPES.get(word, getattr(torch, word, None))
    if not isinstance(dtype, torch.dtype):
        raise click.UsageError(
            f"{name} needs a dtype among {', '.join(DTYPES)}, or torch's name, got {word!r}"
        )
    return dtype
