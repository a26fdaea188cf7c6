"""ALiBi: linear biases on attention scores instead of position embeddings (arXiv 2108.12409)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.attention import masks
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, define_op
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec


@op_signature()
def alibi(slopes: Tensor, q_len: int, k_len: int) -> SignedCall:
    """The bias that `slopes` put on the scores of `q_len` queries and `k_len` keys.

    Args: slopes (H,), any float dtype. The last query is at the last key, as in causal attention.
    Returns: (H, q_len, k_len) in slopes' dtype: -slope * |distance to the diagonal|.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """
    raise NotImplementedError


def check_alibi(args: Args) -> CallSpec:
    """Validate a call of `alibi` and describe it."""
    slopes, q_len, k_len = args
    checks.need_tensor("slopes", slopes, rank=1)
    if slopes.shape[0] == 0:
        raise ValueError("slopes needs at least 1 head, got shape (0,)")
    checks.need_int("q_len", q_len, low=0)
    checks.need_int("k_len", k_len, low=0)
    return describe("alibi", [slopes], {"Hq": slopes.shape[0], "Sq": q_len, "Sk": k_len})


def alibi_reference(slopes: Tensor, q_len: int, k_len: int) -> Tensor:
    """-slope * |i + k_len - q_len - j|, in float32 at least."""
    wide = torch.float64 if slopes.dtype == torch.float64 else torch.float32
    return masks.alibi_bias(slopes, q_len, k_len, wide).to(slopes.dtype)


def alibi_slopes(
    heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """One slope a head: 2**(-8/n), 2**(-16/n), ... for n heads.

    Where n is no power of two, the power below it gives the first slopes and every second one of the power
    above it the rest, as the paper's authors do.
    Raises: ValueError, TypeError: heads is no int of at least 1.

    Example:
        >>> import layerzero as lz
        >>> lz.alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    checks.need_int("heads", heads, low=1)
    return torch.tensor(_slopes(heads), dtype=dtype, device=device)


# Numbers, not tensors: what a caller does to its tensor cannot reach the next one. The cache locks itself.
@lru_cache(maxsize=128)
def _slopes(heads: int) -> tuple[float, ...]:
    below = 1 << (heads.bit_length() - 1)
    first = tuple(2.0 ** (-8.0 * (i + 1) / below) for i in range(below))
    if below == heads:
        return first
    between = tuple(2.0 ** (-4.0 * (i + 1) / below) for i in range(0, 2 * below, 2))
    return first + between[: heads - below]


def _outputs(args: Args) -> tuple[OutputSpec, ...]:
    slopes, q_len, k_len = args
    return (OutputSpec((slopes.shape[0], q_len, k_len), checks.dtype_name(slopes.dtype)),)


ALIBI = define_op(
    build=alibi,
    check=check_alibi,
    reference=alibi_reference,
    outputs=_outputs,
    # The bias is written once.
    work=estimate(lambda Hq, Sq, Sk: (2 * Hq * Sq * Sk, Hq * Sq * Sk, 0)),
    operands=(0,),
    exact_dims=frozenset({"Hq"}),
)
