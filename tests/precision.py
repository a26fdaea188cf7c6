"""What comparisons of numbers need beside the bounds of `tests.bounds`."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.bounds import SOURCES


def need_full_float32() -> None:
    """Refuse to compare numbers while torch may round the factors of float32 products to TF32 or bfloat16.

    Raises: RuntimeError: a switch of torch's allows it, by name and value.
    """
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise RuntimeError(
            "comparing numbers needs full float32 products, got "
            f"torch.get_float32_matmul_precision() == {precision!r}"
        )
    if torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError(
            "comparing numbers needs full float32 products, got torch.backends.cuda.matmul.allow_tf32 == True"
        )


def beyond_sources(kind: str, out: Tensor, truth: Tensor) -> str:
    """Why `out` is not within `SOURCES` of `truth`, float64 and rounded as `out` is; empty where it is."""
    rounded, allowed = truth.to(out.dtype).double(), SOURCES[kind][out.dtype]
    unit = 2 * torch.finfo(out.dtype).eps
    bound = torch.maximum(allowed * (1 + rounded.abs()), unit * rounded.abs())
    over = (out.double() - rounded).abs() - bound
    if not bool((over > 0).any()):
        return ""
    worst = int(over.argmax())
    got, right = out.flatten()[worst].item(), rounded.flatten()[worst].item()
    return f"{int((over > 0).sum())} of {out.numel()} beyond {allowed:g}, as {got:.6g} for {right:.6g}"
