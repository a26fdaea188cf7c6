"""Rotary position embedding: rotate-half (the default) and interleaved, whole or partial heads, XPos.

Angles come as tables from `rope_tables`, where context extension lives: see `scaling`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, define_op, output_like
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec


@op_signature()
def rope(
    q: Tensor,
    k: Tensor,
    positions: IndexTensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    xpos_scale: Tensor | None = None,
) -> SignedCall:
    """Turn the first R features of each head by the angles of the token's position.

    Args: q (..., Hq, D), k (..., Hk, D), positions (...) int32 or int64, cos and sin (max_positions, R / 2)
        in float32 or float64, R <= D; what follows R passes unchanged. Feature i turns with i + R / 2
        (rotate-half, as in LLaMA), or 2i with 2i + 1 where `interleaved` (as in GPT-J).
        xpos_scale (max_positions, R / 2) multiplies the turned q and divides the turned k.
    Returns: (q', k') in their shapes and dtypes; turned in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2104.09864; XPos 2212.10554.
    """
    raise NotImplementedError


def check_rope(args: Args) -> CallSpec:
    """Validate a call of `rope` and describe it."""
    q, k, positions, cos, sin, interleaved, xpos_scale = args
    _check_heads(q, k)
    _check_tables(cos, sin, xpos_scale, q.shape[-1])
    checks.need_index("positions", positions)
    checks.need_shape("positions", positions, q.shape[:-2], f", one for each token of q {tuple(q.shape)}")
    checks.need_bool("interleaved", interleaved)
    checks.need_same_device("q", q, k=k, positions=positions, cos=cos, sin=sin, xpos_scale=xpos_scale)
    width, rotated = q.shape[-1], 2 * cos.shape[1]
    dims = {"N": positions.numel(), "Hq": q.shape[-2], "Hk": k.shape[-2], "D": width, "R": rotated}
    xpos, partial = xpos_scale is not None, rotated < width
    features = {"interleaved": interleaved, "partial_rotary": partial, "xpos": xpos}
    return describe("rope", (q, k), dims, features, typed=(q, k, positions))


def _check_heads(q: Any, k: Any) -> None:
    for name, tensor in (("q", q), ("k", k)):
        checks.need_tensor(name, tensor)
        if tensor.dim() < 2 or tensor.shape[-2] == 0:
            raise ValueError(f"{name} needs shape (..., heads, head size), got {tuple(tensor.shape)}")
    width = q.shape[-1]
    if width == 0 or width % 2:
        raise ValueError(f"q needs an even head size of at least 2, got {width}")
    checks.need_like("k", "head size {}", k.shape[-1], width, "q")
    checks.need_like("k", "tokens {}", tuple(k.shape[:-2]), tuple(q.shape[:-2]), "q")


def _check_tables(cos: Any, sin: Any, xpos_scale: Any, width: int) -> None:
    for name, table in (("cos", cos), ("sin", sin), ("xpos_scale", xpos_scale)):
        if name == "xpos_scale" and table is None:
            continue
        checks.need_tensor(name, table, rank=2)
        if table.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} needs dtype float32 or float64, got {checks.dtype_name(table.dtype)}")
        if not 1 <= table.shape[1] <= width // 2 or table.shape[0] == 0:
            raise ValueError(
                f"{name} needs shape (positions, R / 2) with R / 2 in [1, {width // 2}], "
                f"got {tuple(table.shape)}"
            )
        checks.need_shape(name, table, cos.shape, " like cos")


def validate_rope_values(args: Args) -> Args:
    """Positions that have a row in the tables, as a copy."""
    q, k, positions, cos, *rest = args
    return q, k, checks.ids_in_range("positions", positions, cos.shape[0], "the tables' rows"), cos, *rest


def rope_reference(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    xpos_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rotation in plain torch, in float32 at least."""
    index = positions.long()
    # Rows of the tables, with an axis for the heads: (..., 1, R / 2).
    angles = cos[index].unsqueeze(-2), sin[index].unsqueeze(-2)
    grown = None if xpos_scale is None else xpos_scale[index].unsqueeze(-2)
    shrunk = None if grown is None else grown.reciprocal()
    return _rotate(q, *angles, interleaved, grown), _rotate(k, *angles, interleaved, shrunk)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: Tensor | None) -> Tensor:
    half = cos.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rotated, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    first, second = (
        (rotated[..., 0::2], rotated[..., 1::2])
        if interleaved
        else (rotated[..., :half], rotated[..., half:])
    )
    cos, sin = cos.to(wide), sin.to(wide)
    parts = first * cos - second * sin, second * cos + first * sin
    if scale is not None:
        parts = parts[0] * scale.to(wide), parts[1] * scale.to(wide)
    out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    out = out.to(x.dtype)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


ROPE = define_op(
    build=rope,
    check=check_rope,
    reference=rope_reference,
    outputs=output_like(0, 1),
    # Heads are read and written once.
    work=estimate(lambda N, Hq, Hk, D, R: (3 * N * (Hq + Hk) * R, 2 * N * (Hq + Hk) * D, 0)),
    operands=(0, 1),
    exact_dims=frozenset({"Hq", "Hk", "D", "R"}),
    validate_values=validate_rope_values,
    batching=RowBatching(row_operands=(0, 1, 2), trailing_axes=(2, 2, 0), output_trailing_axes=2),
)
