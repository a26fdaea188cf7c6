"""The tolerances pass plain torch and fail kernels that cheat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerzero.ops import table
from layerzero.spec import tolerances
from tests.backends import cases
from tests.parity.__main__ import main as ladder
from tests.precision import need_full_float32

ATTENTION = table.get("attention")


def attended(dtype: torch.dtype, asks: tuple[str, ...] = ("causal",)) -> tuple[Tensor, Tensor, Tensor]:
    """(torch's answer, the truth, the baseline) of one causal call."""
    args = cases.call(cases.Case("attention", asks, {"B": 1, "Sq": 150, "Sk": 150, "D": 32}), dtype)
    out = torch.nn.functional.scaled_dot_product_attention(args[0], args[1], args[2], is_causal=True)
    return out, cases.truth(ATTENTION, args)[0], cases.baseline(ATTENTION, args)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_torch_passes(dtype: torch.dtype) -> None:
    """A correct kernel has no disagreement in any dtype."""
    assert tolerances.mismatches(*attended(dtype)) == []


def cheats(out: Tensor) -> dict[str, Tensor]:
    """Answers that are wrong in the ways kernels are wrong."""
    leaking, broken, missing = out.clone(), out.clone(), out.clone()
    leaking[:, :, 1:] = out[:, :, 1:] * 0.9 + out[:, :, :-1] * 0.1
    broken[0, 3, 130:] = broken[0, 3, 130:].roll(1, 0)
    missing[0, 0, 7] = torch.nan
    return {
        "zeros": torch.zeros_like(out),
        "scaled": out * 1.02,
        "a neighbour leaks in": leaking,
        "one broken tile": broken,
        "one NaN": missing,
        "another shape": out[:, :, 1:],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cheat", list(cheats(torch.zeros(1, 4, 150, 1))))
def test_cheats_fail(cheat: str, dtype: torch.dtype) -> None:
    """Each wrong answer is found out, however small its share of the output."""
    out, truth, baseline = attended(dtype)
    assert tolerances.mismatches(cheats(out)[cheat], truth, baseline)


def test_small_outputs_get_no_free_pass() -> None:
    """Zeros for outputs of 1e-3 are wrong: nothing is measured on an absolute scale."""
    out, truth, baseline = attended(torch.float32)
    assert tolerances.mismatches(out * 1e-3, truth * 1e-3, baseline * 1e-3) == []
    assert tolerances.mismatches(torch.zeros_like(out), truth * 1e-3, baseline * 1e-3)


def test_numbers_are_not_compared_while_products_are_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    """K43: with TF32 (or bfloat16) let in, comparing is an error that names the switch; the ladder too."""
    before = torch.get_float32_matmul_precision()
    try:
        for loose in ("high", "medium"):
            torch.set_float32_matmul_precision(loose)
            with pytest.raises(RuntimeError, match=f"get_float32_matmul_precision.* == '{loose}'"):
                need_full_float32()
            with pytest.raises(RuntimeError, match="full float32"):
                ladder(["--level", "1", "--config", "tiny"])
    finally:
        torch.set_float32_matmul_precision(before)
    need_full_float32()
