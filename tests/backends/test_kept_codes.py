"""Vendors' products over four-bit codes: they follow a weight, and name what they do not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.torch_kernels import quantized as torch_quantized
from layerzero.formats import QuantizedTensor
from layerzero.ops import table
from layerzero.ops.quantize import kept_codes
from layerzero.spec import tolerances
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends import cases

OP = table.get("quantized_linear")
IDS = ("torch.quantized_linear.int4pack", "zentorch.quantized_linear.weight_only")
BY_ID: dict[str, Kernel] = {k.id: k for k in cases.KERNELS if k.id in IDS}
each_kernel = pytest.mark.parametrize("name", IDS)


def loaded(name: str) -> Callable[..., Any]:
    """The kernel, where it runs here."""
    missing = cases.why_not_here(BY_ID[name])
    if missing:
        pytest.skip(missing)
    return BY_ID[name].load()


def weight_of(rows: int = 48, width: int = 256, **more: Any) -> QuantizedTensor:
    numbers = torch.randn(rows, width, generator=torch.Generator().manual_seed(7)) * width**-0.5
    return QuantizedTensor.quantize(numbers, "int4", **{"group_size": 64, **more})


def args_of(x: Tensor, weight: QuantizedTensor, **more: Any) -> tuple[Any, ...]:
    args: tuple[Any, ...] = OP.build(x, **weight.arguments(), **more)[1]
    return args


def rows_of(*shape: int) -> Tensor:
    return torch.randn(*shape, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


def wrong(out: Tensor, args: tuple[Any, ...]) -> list[str]:
    """How far a result is from float64 of the weight's numbers, beyond what bfloat16 itself errs by."""
    truth = OP.reference(args[0].double(), *args[1:])
    return list(tolerances.mismatches(out, truth, OP.reference(*args)))


@each_kernel
def test_a_weight_is_laid_out_once_and_again_when_it_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales edited in place are seen, through `.data` where a compared byte changes."""
    made: list[int] = []
    keep = kept_codes.keep

    def counted(lay_out: Callable[[Tensor], Tensor], scales: Callable[[Tensor], Tensor]) -> Any:
        return keep(lambda weight: made.append(1) or lay_out(weight), scales)  # type: ignore[func-returns-value]

    monkeypatch.setattr(kept_codes, "keep", counted)
    torch_quantized.torch_layout.cache_clear()
    run, weight = loaded(name), weight_of()
    args = args_of(rows_of(3), weight)
    for _ in range(3):
        assert not wrong(run(*args), args)
    assert len(made) == 1
    for part in (weight.codes, weight.scale):
        part.copy_(part.flip(0).clone())
        assert not wrong(run(*args), args)
    assert len(made) == 2
    weight.codes.data.copy_(weight.codes.flip(1).clone())
    assert not wrong(run(*args), args)
    torch_quantized.torch_layout.cache_clear()


@each_kernel
def test_a_weight_that_is_not_kept_has_the_same_products(name: str) -> None:
    """Made in inference mode; with gaps between its rows; leading axes of rows and a bias."""
    run, outside = loaded(name), weight_of()
    x, bias = rows_of(2, 3), torch.randn(48, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        inside = weight_of()
    args = args_of(x, outside, bias=bias)
    out = run(*args)
    assert out.shape == (2, 3, 48) and not wrong(out, args)
    assert torch.equal(run(*args_of(x, inside, bias=bias)), out)
    wide = torch.stack([outside.codes, outside.codes], -1)[..., 0]
    apart = QuantizedTensor(wide, outside.scale, "int4")
    assert not wide.is_contiguous() and torch.equal(run(*args_of(x, apart, bias=bias)), out)
    none = args_of(x[:0], outside)
    if not rejections(BY_ID[name], OP.check(none), cases.HERE):
        assert run(*none).shape == (0, 3, 48)


REFUSED: list[tuple[str, QuantizedTensor, torch.dtype, Reason]] = [
    (IDS[0], weight_of(group_size=16), torch.bfloat16, Reason.SIZE_UNSUPPORTED),
    (IDS[0], weight_of(rows=17), torch.bfloat16, Reason.WIDTH_ALIGNMENT),
    (IDS[0], weight_of(), torch.float16, Reason.DTYPE_UNSUPPORTED),
    (IDS[0], weight_of(), torch.float32, Reason.DTYPE_UNSUPPORTED),
    (IDS[0], weight_of(symmetric=False), torch.bfloat16, Reason.SCALE_LAYOUT_MISMATCH),
    (IDS[1], weight_of(), torch.float16, Reason.DTYPE_UNSUPPORTED),
    (IDS[1], weight_of(), torch.float32, Reason.DTYPE_UNSUPPORTED),
    (IDS[1], weight_of(symmetric=False), torch.bfloat16, Reason.SCALE_LAYOUT_MISMATCH),
]


@pytest.mark.parametrize(("name", "weight", "dtype", "reason"), REFUSED)
def test_what_a_library_would_refuse_or_answer_wrongly_is_a_reason_before_the_call(
    name: str, weight: QuantizedTensor, dtype: torch.dtype, reason: Reason
) -> None:
    """Groups, columns, dtypes and zero points that it does not have."""
    against = rejections(BY_ID[name], OP.check(args_of(rows_of(2).to(dtype), weight)), cases.HERE)
    assert reason in {rejected.reason for rejected in against}
