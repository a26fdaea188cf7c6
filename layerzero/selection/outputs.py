"""Whether a kernel returned what its op promises: number, shape, dtype and device of its outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.ops.op import Args, Op


def check_outputs(op: Op, args: Args, result: Any, *, dtypes: bool) -> None:
    """Compare a kernel's result with `op.outputs(args)`, without reading data; `dtypes` are optional because
    autocast chooses its own.

    Raises: RuntimeError: they differ; a kernel that does this has failed, like one that raises.
    """
    specs = op.outputs(args)
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) != len(specs):
        raise RuntimeError(f"{op.name} needs {len(specs)} outputs, the kernel returned {len(parts)}")
    if isinstance(result, tuple) and len(specs) == 1:
        raise RuntimeError(f"{op.name} needs a tensor, the kernel returned a tuple of one")
    device = args[0].device
    for position, (part, spec) in enumerate(zip(parts, specs, strict=True)):
        name = f"output {position} of {op.name}"
        if not isinstance(part, Tensor):
            raise RuntimeError(f"{name} needs to be a tensor, the kernel returned {type(part).__name__}")
        if tuple(part.shape) != tuple(spec.shape):
            raise RuntimeError(
                f"{name} needs shape {tuple(spec.shape)}, the kernel returned {tuple(part.shape)}"
            )
        dtype = str(part.dtype).removeprefix("torch.")
        if dtypes and dtype != spec.dtype:
            raise RuntimeError(f"{name} needs dtype {spec.dtype}, the kernel returned {dtype}")
        if part.device != device:
            raise RuntimeError(f"{name} needs device {device}, the kernel returned {part.device}")
