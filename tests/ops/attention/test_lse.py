"""The log-sum-exp is natural, and turns into base 2 and back."""

from __future__ import annotations

import math

import pytest
import torch

from layerzero.ops.attention.attention import attention_reference
from layerzero.ops.attention.lse import LN_2, from_base_2


def test_our_log_sum_exp_is_natural() -> None:
    """K31: e to the power of it is the softmax's denominator; 2 to the power of its base-2 form is, too."""
    q, k = (torch.randn(1, 1, n, 8, dtype=torch.float64) for n in (3, 5))
    result = attention_reference(q, k, k, return_lse=True)
    assert isinstance(result, tuple)
    lse = result[1].double()
    denominator = torch.exp(q @ k.transpose(-1, -2) * 8**-0.5).sum(-1)
    torch.testing.assert_close(lse.exp(), denominator, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.exp2(lse / LN_2), denominator, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bases_turn_into_each_other(dtype: torch.dtype) -> None:
    """log2(8) is 3, ln(8) its natural form; rows that saw nothing stay -inf."""
    of_base_2 = torch.tensor([3.0, 0.0, -math.inf], dtype=dtype)
    natural = from_base_2(of_base_2)
    assert natural.dtype == dtype
    torch.testing.assert_close(natural, torch.tensor([math.log(8.0), 0.0, -math.inf], dtype=dtype))
