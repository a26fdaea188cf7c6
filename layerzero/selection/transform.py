"""Transforms: what would make a rejected request acceptable, at what price, and how it is done.

Only changes that keep the meaning are considered: another layout (a transposed view), a dense copy, a
cast to a wider dtype and back, codes as the numbers that they stand for, and a batch above what a kernel
launches at once run in parts. A cast never narrows, and what an op writes is never a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero._util.foreign import has_memory
from layerzero.native import is_product
from layerzero.ops import kv_formats
from layerzero.ops.batching import concat_copy
from layerzero.ops.checks import address_of
from layerzero.ops.op import Decoding, Op, Split
from layerzero.selection.record import Transform
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import Capability
from layerzero.spec.condition import parse_limit
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason, Rejected

COPY_LAUNCH_US = 2.0
VIEW_US = 0.5
_DECODE_LAUNCHES = 6  # of two operands: gathered, widened, multiplied

_LAYOUT = {Reason.LAYOUT_UNSUPPORTED}
_DENSE = {Reason.NOT_CONTIGUOUS, Reason.STRIDE_LAST_DIM, Reason.MISALIGNED}
_CAST = {Reason.DTYPES_MIXED, Reason.DTYPE_UNSUPPORTED}
# How much a grid holds says nothing of what the kernel can compute. Other bounds on a batch are stated by who
# knows why; a call beyond one of those goes elsewhere.
_SPLIT = {Reason.CUDA_BLOCK_LIMIT_EXCEEDED}
TRANSFORMABLE = _LAYOUT | _DENSE | _CAST | _SPLIT
_WIDER = {"float16": ("float32",), "bfloat16": ("float32",), "float32": ()}
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def adapt(
    op: Op,
    kernel: Kernel,
    request: CallSpec,
    rejected: list[Rejected],
    hardware: Hardware,
    bucketed: CallSpec,
) -> tuple[CallSpec, tuple[Transform, ...]] | None:
    """The request after the fewest transforms with which `kernel` accepts it; None if none would do.

    Copies are priced for the sizes of `bucketed`.
    """
    decoding = op.decoding
    is_coded = decoding is not None and (
        request.dtype in kv_formats.CODE_NAMES or any(r.field in decoding.features for r in rejected)
    )
    if decoding is not None and is_coded:
        return _adapt_decoded(op, kernel, request, hardware, bucketed, decoding)
    transforms: list[Transform] = []
    reasons = {r.reason for r in rejected}
    if not reasons <= TRANSFORMABLE:
        return None
    capability = kernel.capability
    adapted = request
    if reasons & _CAST:
        if not op.castable or op.writes:
            return None
        target = _cast_target(capability, request)
        if target is None:
            return None
        price = _copy_us(op, bucketed, hardware)
        transforms.append(Transform("cast", "/".join(dict.fromkeys(request.dtypes)), target, price))
        dtypes = tuple(target if d in _BYTES else d for d in request.dtypes)
        adapted = adapted.replace(dtype=target, dtypes=dtypes)
    if Reason.MISALIGNED in reasons and op.uncopied_operands:
        return None
    if reasons & _LAYOUT:
        by_token = "kv_scale_per_token" in request.features  # such scales lie as the operands do
        if op.layouts is None or request.layout not in op.layouts.names or by_token:
            return None
        other = op.layouts.names[1 - op.layouts.names.index(request.layout)]
        transforms.append(Transform("layout", request.layout, other, VIEW_US * len(op.layouts.operands)))
        adapted = adapted.replace(layout=other, contiguous=False)
    if _needs_dense(capability, adapted):
        transforms.append(Transform("contiguous", "strided", "contiguous", _copy_us(op, bucketed, hardware)))
        adapted = adapted.replace(contiguous=True, last_stride1=True, alignment=64)
    if reasons & _SPLIT:
        size = _largest_part(op, capability, request)
        if op.split is None or size == 0:
            return None
        dim = op.split.dim
        parts = -(-bucketed.dim(dim) // size)
        # The launches beyond the first, and a copy of all that the op touches: at least what joining reads.
        price = (parts - 1) * kernel.efficiency.launch_us + _copy_us(op, bucketed, hardware)
        transforms.append(Transform("split", dim, f"parts of at most {size}", price, size))
        adapted = adapted.replace(dims={**adapted.dims, dim: size})
    return (adapted, tuple(transforms)) if not rejections(kernel, adapted, hardware) else None


def _adapt_decoded(
    op: Op, kernel: Kernel, request: CallSpec, hardware: Hardware, bucketed: CallSpec, decoding: Decoding
) -> tuple[CallSpec, tuple[Transform, ...]] | None:
    """`adapt` of a call over codes as one over numbers."""
    first = _dequantized(decoding, request, bucketed, hardware)
    request, bucketed = _of_numbers(decoding, request), _of_numbers(decoding, bucketed)
    refusals = rejections(kernel, request, hardware)
    if not refusals:
        return request, (first,)
    adapted = adapt(op, kernel, request, refusals, hardware, bucketed)
    return None if adapted is None else (adapted[0], (first, *adapted[1]))


def _dequantized(decoding: Decoding, request: CallSpec, bucketed: CallSpec, hardware: Hardware) -> Transform:
    """Codes read and numbers written, in some launches; the format and its result by name."""
    after = _number_dtype(request.dtype)
    written = decoding.written(bucketed) * _BYTES.get(after, 4)
    moved = decoding.written(bucketed) + written
    price = COPY_LAUNCH_US * _DECODE_LAUNCHES + moved / hardware.bandwidth * 1e6
    named = (f.partition("_")[2] for f in sorted(request.features & decoding.features) if "scale" not in f)
    return Transform("dequantize", next(named, request.dtype), after, price, written)


def _of_numbers(decoding: Decoding, request: CallSpec) -> CallSpec:
    return request.replace(
        dtype=_number_dtype(request.dtype),
        dtypes=tuple(map(_number_dtype, request.dtypes)),
        features=request.features - decoding.features,
        dims={**request.dims, **decoding.sizes(request)},
    )


def _number_dtype(dtype: str) -> str:
    """What numbers are made in: the queries' dtype, bfloat16 where they are codes."""
    return "bfloat16" if dtype in kv_formats.CODE_NAMES else dtype


def _needs_dense(capability: Capability, request: CallSpec) -> bool:
    return (
        (capability.contiguous and not request.contiguous)
        or (capability.last_stride1 and not request.last_stride1)
        or request.alignment < capability.alignment
    )


def _cast_target(capability: Capability, request: CallSpec) -> str | None:
    floats = [d for d in dict.fromkeys(request.dtypes or (request.dtype,)) if d in _BYTES]
    if len(floats) > 1:
        target = floats[0]
        for dtype in floats[1:]:
            promoted = torch.promote_types(getattr(torch, target), getattr(torch, dtype))
            target = str(promoted).removeprefix("torch.")
        if target in capability.dtypes:
            return target
        floats = [target]
    for wider in _WIDER.get(floats[0], ()) if floats else ():
        if wider in capability.dtypes:
            return wider
    return None


def _largest_part(op: Op, capability: Capability, request: CallSpec) -> int:
    """The most of the split axis that every bound on it lets through; 0 where no part would do.

    The other sizes of a product have to be exact in keys: one plan serves every call of a key.
    """
    if op.split is None:
        return 0
    dim, size = op.split.dim, request.dim(op.split.dim)
    for condition in (parse_limit(text).condition for text in capability.limits):
        if condition.operator == "<=" and isinstance(condition.value, int) and dim in condition.axes:
            others = [name for name in condition.axes if name != dim]
            if not op.exact_dims.issuperset(others):
                return 0
            size = min(size, condition.value // math.prod(request.dim(name, 1) for name in others))
    return size


def _copy_us(op: Op, request: CallSpec, hardware: Hardware) -> float:
    """One read and one write of everything the op touches, plus one launch an operand."""
    moved = op.work(request).bytes
    return COPY_LAUNCH_US * len(op.operands) + 2 * moved / hardware.bandwidth * 1e6


def compile_transforms(
    op: Op, transforms: tuple[Transform, ...], run: Callable[..., Any]
) -> Callable[..., Any]:
    """`run` with the transforms before it and their inverse on its outputs after it."""
    if not transforms:
        return run
    cast = next((t.after for t in transforms if t.kind == "cast"), None)
    layout = next((t.after for t in transforms if t.kind == "layout"), None)
    dense = any(t.kind == "contiguous" for t in transforms)
    size = next((t.size for t in transforms if t.kind == "split"), 0)
    if size and op.split is not None:
        run = _in_parts(op.split, size, run)
    dtype: torch.dtype | None = getattr(torch, cast) if cast else None
    decodes = any(t.kind == "dequantize" for t in transforms)
    decode = op.decoding.decode if decodes and op.decoding is not None else None

    def transformed(*args: Any) -> Any:
        if decode is not None:
            args = decode(args)
        original: torch.dtype = args[op.operands[0]].dtype
        changed = list(args)
        if dtype is not None:
            for position, value in enumerate(changed):
                # A float8 operand is a code: its scale is beside it, a wider one would be no code.
                if isinstance(value, Tensor) and value.dtype.is_floating_point and value.itemsize > 1:
                    changed[position] = value.to(dtype)
        if layout is not None and op.layouts is not None:
            for position in op.layouts.operands:
                changed[position] = changed[position].transpose(*op.layouts.swap)
            changed[op.layouts.argument] = layout
        if dense:
            for position in op.operands:
                changed[position] = _dense(changed[position])
        out = run(*changed)
        return _restore(op, out, original if dtype is not None else None, layout is not None)

    return transformed


def _in_parts(split: Split, size: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` on equal parts of at most `size`, their outputs joined in front."""

    def parted(*args: Any) -> Any:
        whole: int = args[0].shape[0]
        each = -(-whole // -(-whole // size))
        outs = [run(*split.cut(args, start, min(start + each, whole))) for start in range(0, whole, each)]
        if isinstance(outs[0], tuple):
            return tuple(concat_copy(pieces) for pieces in zip(*outs, strict=True))
        return concat_copy(outs)

    return parted


def without_graph(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with gradients off, whatever the caller's mode: how an inference runtime runs every plan."""
    enabled, switch = torch.is_grad_enabled, torch._C._set_grad_enabled

    def ungraphed(*args: Any) -> Any:
        if not enabled():
            return run(*args)
        switch(False)
        try:
            return run(*args)
        finally:
            switch(True)

    grouped = getattr(run, "is_product", None)
    return ungraphed if grouped is None else is_product(ungraphed, grouped)


def with_memory(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` for operands that have memory: a vendor's kernel would read at the null pointer of others.

    Raises: TypeError: an operand is fake, or of a class that keeps its values elsewhere.
    """
    operands = op.operands

    def reading(*args: Any) -> Any:
        for position in operands:
            value = args[position]
            if value.__class__ is not Tensor and isinstance(value, Tensor) and not has_memory(value):
                raise TypeError(f"{op.name} needs operands with memory, got {type(value).__name__}")
        return run(*args)

    return reading


def keep_aligned(op: Op, alignment: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with tensors copied where the address of an operand is not a multiple of `alignment` bytes.

    A signature does not hold addresses, so a plan made for aligned operands may meet others. A tensor that a
    functorch transform wraps has no address; torch's own operators see to the memory under it.
    """
    if alignment <= 1:
        return run

    operands = (*op.operands, *op.uncopied_operands)

    def aligned(*args: Any) -> Any:
        misaligned = False
        try:
            for position in operands:
                value = args[position]
                if value is not None and value.data_ptr() % alignment:
                    misaligned = True
                    break
        except (AttributeError, RuntimeError):  # an operand that has no address
            tensors = [args[position] for position in operands if isinstance(args[position], Tensor)]
            misaligned = any(address_of(tensor) % alignment for tensor in tensors)
        if misaligned:
            args = tuple(
                a.clone() if isinstance(a, Tensor) and i not in op.writes and address_of(a) % alignment else a
                for i, a in enumerate(args)
            )
        return run(*args)

    return aligned


def _dense(value: Any) -> Any:
    if not isinstance(value, Tensor) or (value.is_contiguous() and address_of(value) % 64 == 0):
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _restore(op: Op, out: Any, dtype: torch.dtype | None, swapped: bool) -> Any:
    parts = list(out) if isinstance(out, tuple) else [out]
    for position, part in enumerate(parts):
        if swapped and op.layouts is not None and position in op.layouts.outputs:
            part = part.transpose(*op.layouts.swap)
        if dtype is not None and op.casts_back(position) and isinstance(part, Tensor):
            part = part.to(dtype)
        parts[position] = part
    return tuple(parts) if isinstance(out, tuple) else parts[0]
