"""Numbers to codes and scales, and back: what every kernel of these formats is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.formats.elements import decode_codes, encode_values, pack_pairs
from layerzero.formats.table import Format

# Below this a scale would be subnormal, and dividing by it could overflow.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_SMALLEST_E4M3 = 2.0**-9
# Exponent bits of float8_e8m0fnu: 127 is 1, 255 is NaN.
_E8M0_BIAS, _E8M0_NAN = 127, 255


def scale_shape(shape: tuple[int, ...], granularity: str, group_size: int) -> tuple[int, ...]:
    """The shape of the scales of a tensor of numbers (..., R, C); `group_size` is a block's side, too."""
    if granularity == "tensor":
        return ()
    if granularity == "block":
        rows, columns = shape[-2:]
        return (*shape[:-2], -(-rows // group_size), -(-columns // group_size))
    return (*shape[:-1], 1 if granularity == "row" else shape[-1] // group_size)


def round_to_format(
    x: Tensor,
    form: Format,
    granularity: str,
    group_size: int,
    scale: Tensor | None = None,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes, packed where the format packs, and scales: in float32 for every dtype of x.

    A NaN or infinity makes the scale that it shares NaN or infinite (the largest of a format whose scales
    have no NaN), so that what comes back is not finite.
    """
    wide = x.float()
    if scale is None:
        scale = _scales(_largest(wide, granularity, group_size), form, tensor_scale)
    per_element = spread_scale(scale, granularity, group_size, tuple(x.shape), tensor_scale)
    codes = encode_values((wide / per_element).view(x.shape), form.element)
    return (pack_pairs(codes) if form.packed > 1 else codes), scale


def _largest(wide: Tensor, granularity: str, group_size: int) -> Tensor:
    """The largest magnitude of what shares each scale, in the scales' shape."""
    size = wide.abs()
    if granularity == "tensor":
        return size.amax() if size.numel() else size.new_zeros(())
    if granularity == "row":
        return size.amax(-1, keepdim=True)
    if granularity == "group":
        by_group: Tensor = size.unflatten(-1, (-1, group_size)).amax(-1)
        return by_group
    rows, columns = wide.shape[-2:]
    padded = functional.pad(size, (0, -columns % group_size, 0, -rows % group_size))
    blocks: Tensor = padded.unflatten(-2, (-1, group_size)).unflatten(-1, (-1, group_size)).amax((-1, -3))
    return blocks


def _scales(largest: Tensor, form: Format, tensor_scale: Tensor | None) -> Tensor:
    element, dtype = form.element, form.scales[0]
    if dtype == torch.float8_e8m0fnu:
        # The largest power of two below the largest number, over the element's own.
        exponent = torch.frexp(largest)[1] - 1 - element.exponent + _E8M0_BIAS
        exponent = torch.where(largest == 0, 0, exponent.clamp(0, _E8M0_NAN - 1))
        return torch.where(largest.isfinite(), exponent, _E8M0_NAN).to(torch.uint8).view(dtype)
    # By a tensor: a GPU multiplies by the reciprocal of a number, and the scales would be others.
    scales = largest / torch.full((), element.max_value, device=largest.device)
    if dtype == torch.float32:
        return scales.clamp_min(SMALLEST_SCALE)
    if tensor_scale is not None:
        scales = scales / tensor_scale
    top = torch.finfo(dtype).max
    bounded = scales.clamp(_SMALLEST_E4M3, top)
    # NaN passes through the clamp; infinity becomes NaN like it, as the format has none.
    return torch.where(scales.isinf(), torch.nan, bounded).to(dtype)


def spread_scale(
    scale: Tensor,
    granularity: str,
    group_size: int,
    shape: tuple[int, ...],
    tensor_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Scales as a tensor that multiplies numbers of `shape`, both levels in one."""
    wide = scale.to(dtype)
    if tensor_scale is not None:
        wide = wide * tensor_scale.to(dtype)
    if granularity == "group":
        return wide.unsqueeze(-1).expand(*wide.shape, group_size).reshape(shape)
    if granularity == "block":
        tall = wide.repeat_interleave(group_size, -2)[..., : shape[-2], :]
        return tall.repeat_interleave(group_size, -1)[..., : shape[-1]]
    return wide


def restore(
    codes: Tensor,
    scale: Tensor,
    form: Format,
    granularity: str,
    group_size: int,
    zero_point: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The numbers that codes stand for, computed in `dtype`, which is float32 or float64."""
    values = decode_codes(codes, form.element, dtype)
    shape = tuple(values.shape)
    if zero_point is not None:
        # A code of the element without its own shift: int4 has 8.
        shift = zero_point.to(dtype) - 8
        values = values - spread_scale(shift, granularity, group_size, shape, None, dtype)
    return values * spread_scale(scale, granularity, group_size, shape, tensor_scale, dtype)


def layout_of_scale(scale: Tensor, width: int, block_size: int, form: Format) -> tuple[str, int]:
    """(granularity, group size) that scales of a checked shape say, beside `width` numbers a row."""
    if block_size:
        return "block", block_size
    if scale.dim() == 0:
        return "tensor", 0
    groups = max(1, scale.shape[-1])
    # One group as long as the row is a group where the format has no rows.
    return ("row", 0) if groups == 1 and "row" in form.granularities else ("group", width // groups)
