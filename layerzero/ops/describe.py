"""A checked call as a `CallSpec`, what every op's `check` ends with, and the work of one by a formula."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from layerzero.ops import checks
from layerzero.spec.call_spec import CallSpec, WorkEstimate


def describe(
    op: str,
    operands: Iterable[Tensor | None],
    dims: Mapping[str, int],
    features: Iterable[str] | Mapping[str, bool] = (),
    *,
    layout: str = "",
    dtype: str = "",
    typed: Sequence[Tensor] = (),
    aligned: Iterable[Tensor] = (),
) -> CallSpec:
    """The spec of a call whose arguments have been checked.

    Args: operands are the tensors that contiguity, strides and alignment speak of, absent ones as None; the
        first says platform and device. features are names, or names with whether the call needs them.
        dtype is the first operand's where it is not given; typed are the tensors whose dtypes the spec
        holds, the operands where there are none; aligned are more tensors that alignment speaks of.
    """
    tensors = [operand for operand in operands if operand is not None]
    first = tensors[0]
    if isinstance(features, Mapping):
        features = (name for name, is_set in features.items() if is_set)
    return CallSpec(
        op=op,
        platform=first.device.type,
        device=str(first.device),
        dtype=dtype or checks.dtype_name(first.dtype),
        dtypes=tuple(checks.dtype_name(tensor.dtype) for tensor in typed or tensors),
        dims=dims,
        features=frozenset(features),
        layout=layout,
        contiguous=all(tensor.is_contiguous() for tensor in tensors),
        last_stride1=checks.last_stride_is_one(tensors),
        alignment=checks.alignment_of([*tensors, *aligned]),
    )


def estimate(formula: Callable[..., tuple[int, int, int]]) -> Callable[[CallSpec], WorkEstimate]:
    """The work of an op by a formula whose parameters are names of sizes.

    It gives operations, elements of the call's dtype that move, and other bytes that do.
    """
    names = tuple(inspect.signature(formula).parameters)

    def work(spec: CallSpec) -> WorkEstimate:
        flops, elements, others = formula(*[spec.dim(name) for name in names])
        return WorkEstimate(float(flops), float(elements * checks.dtype_bytes(spec.dtype) + others))

    return work
