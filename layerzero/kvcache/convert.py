"""A pool of pages in another layout or dtype: said out loud, with its price, never on the way to a kernel."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from layerzero.formats.errors import FormatError
from layerzero.ops import checks, kv_formats
from layerzero.ops.paged.checks import LAYOUTS
from layerzero.spec.hardware import Hardware
from layerzero.spec.reasons import Reason


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """What a conversion does and costs: bytes read and written, microseconds, whether it loses digits."""

    layout: tuple[str, str]
    dtype: tuple[str, str]
    bytes: int
    expected_us: float
    exact: bool

    @property
    def needed(self) -> bool:
        """Whether anything changes."""
        return self.layout[0] != self.layout[1] or self.dtype[0] != self.dtype[1]


def conversion(
    pool: Tensor,
    layout: str,
    *,
    to_layout: str | None = None,
    to_dtype: torch.dtype | None = None,
    hardware: Hardware,
) -> Conversion:
    """The price of `convert` with the same arguments, without doing it.

    Args: pool (N, P, H, D) for layout NHD, (N, H, P, D) for HND. hardware gives the bandwidth to count with.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """
    target, dtype = _targets(pool, layout, to_layout, to_dtype)
    same = dtype == pool.dtype and target == layout
    moved = 0 if same else pool.numel() * (pool.dtype.itemsize + dtype.itemsize)
    return Conversion(
        layout=(layout, target),
        dtype=(checks.dtype_name(pool.dtype), checks.dtype_name(dtype)),
        bytes=moved,
        expected_us=moved / hardware.bandwidth * 1e6,
        exact=torch.promote_types(pool.dtype, dtype) == dtype,
    )


def convert(
    pool: Tensor, layout: str, *, to_layout: str | None = None, to_dtype: torch.dtype | None = None
) -> Tensor:
    """The pool in another layout and dtype: a new dense tensor, or the pool itself where nothing changes.

    Raises: see `conversion`.
    """
    target, dtype = _targets(pool, layout, to_layout, to_dtype)
    turned = pool if target == layout else pool.transpose(1, 2)
    return turned.to(dtype).contiguous()


def _targets(
    pool: Tensor, layout: str, to_layout: str | None, to_dtype: torch.dtype | None
) -> tuple[str, torch.dtype]:
    checks.need_tensor("pool", pool, rank=4)
    checks.need_choice("layout", layout, LAYOUTS)
    target = checks.need_choice("to_layout", to_layout or layout, LAYOUTS)
    dtype = to_dtype or pool.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"to_dtype needs a floating point dtype, got {checks.dtype_name(dtype)}")
    if dtype != pool.dtype and not {dtype, pool.dtype}.isdisjoint(kv_formats.CODE_DTYPES):
        needs = f"{checks.dtype_name(pool.dtype)} like pool, for codes need a scale"
        raise FormatError("to_dtype", needs, checks.dtype_name(dtype), Reason.KV_DTYPE_MISMATCH)
    return target, dtype
