"""add_rms_norm_quantize: the three ops that it stands for, one after the other; errors by name."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

import layerzero as lz
from layerzero.ops import table
from layerzero.ops.quantize.norm_quantize import add_rms_norm_quantize_reference


@pytest.mark.parametrize("form", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("granularity", "group"), [("row", 0), ("group", 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_ops_one_after_the_other(
    form: Literal["int8", "fp8_e4m3", "fp8_e5m2"],
    granularity: Literal["row", "group"],
    group: int,
    dtype: torch.dtype,
) -> None:
    """The sum in its own dtype, the norm in float32, then the codes and scales of that."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype), torch.randn(64)
    codes, scale, total = add_rms_norm_quantize_reference(x, residual, weight, 1e-6, form, granularity, group)
    assert torch.equal(total, x + residual)
    normed = lz.sync.rms_norm(total.float(), weight, eps=1e-6)
    right = lz.sync.quantize(normed, format=form, granularity=granularity, group_size=group)
    torch.testing.assert_close(scale, right[1])
    apart = codes.view(torch.int8).short() - right[0].view(torch.int8).short()
    assert int(apart.abs().max()) <= 1
    back = lz.sync.dequantize(codes, scale)
    assert (back - normed).abs().max() <= normed.abs().max() * (2**-2 if form == "fp8_e5m2" else 2**-4)


def test_rows_of_nothing_give_nothing() -> None:
    """No row, no scale, in the shapes that rows would have."""
    x = torch.zeros(0, 64)
    codes, scale, total = lz.sync.add_rms_norm_quantize(x, x, granularity="group", group_size=16)
    assert (tuple(codes.shape), tuple(scale.shape), tuple(total.shape)) == ((0, 64), (0, 4), (0, 64))
    assert codes.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ({"format": "int4"}, "format needs"),
        ({"granularity": "tensor"}, "granularity needs"),
        ({"granularity": "group", "group_size": 7}, "group_size needs to divide x's last axis of 64, got 7"),
        ({"group_size": 8}, "group_size needs 0 for granularity='row', got 8"),
        ({"eps": -1.0}, "eps needs"),
    ],
)
def test_what_does_not_fit_is_named(named: dict[str, Any], wrong: str) -> None:
    """The argument, what it needs, what it got."""
    op, x = table.get("add_rms_norm_quantize"), torch.zeros(2, 64)
    with pytest.raises(ValueError, match=wrong):
        op.check(op.build(x, x, **named)[1])


def test_a_residual_of_another_shape_is_named() -> None:
    """As in the op without codes."""
    op = table.get("add_rms_norm_quantize")
    with pytest.raises(ValueError, match=r"residual needs shape \(2, 64\) like x, got \(3, 64\)"):
        op.check(op.build(torch.zeros(2, 64), torch.zeros(3, 64))[1])
