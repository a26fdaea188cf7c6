"""What is wrong in a kernel's numbers although each of them is near the reference's."""

from __future__ import annotations

import pytest
import torch

from layerzero.measure.correctness import find_mismatch
from layerzero.ops import table


@pytest.mark.parametrize(
    ("factor", "words"),
    [(1.0, "None"), (1.004, "output 0: scaled by 1+0.00"), (0.996, "output 0: scaled by 1-0.00")],
)
def test_a_small_factor_is_found_within_the_error_of_rounding(factor: float, words: str) -> None:
    """Rounding to bfloat16 errs as far as a wrong factor does, but in both directions."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    _, args = table.get("rms_norm").build(x.bfloat16())
    assert str(find_mismatch(table.get("rms_norm"), args, (x * factor).bfloat16(), x)).startswith(words)
