"""oneDNN's fused linear reads a bias wherever it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from layerzero.backends import onednn
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec.kernel import Kernel, rejections
from tests.backends import cases

LINEAR, MLP = onednn.KERNELS
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def strided(size: int) -> Tensor:
    """A vector with a neighbour's number behind each of its own."""
    return torch.randn(size, 2)[:, 0]


def expanded(size: int) -> Tensor:
    """A vector that is one number in memory."""
    return torch.randn(1).expand(size)


@pytest.mark.parametrize("bias", [strided, expanded])
@pytest.mark.parametrize("kernel", [LINEAR, MLP], ids=lambda kernel: kernel.op)
def test_a_bias_that_is_a_view_is_added_as_it_reads(kernel: Kernel, bias: Callable[[int], Tensor]) -> None:
    """torch's operator takes a bias for dense; the kernels give it one."""
    args: Args
    if kernel is LINEAR:
        args = torch.randn(3, 8), torch.randn(16, 8), bias(16)
    else:
        args = torch.randn(3, 8), torch.randn(16, 8), torch.randn(8, 16), bias(16), bias(8), "gelu"
    op = table.get(kernel.op)
    assert rejections(kernel, op.check(args), cases.HERE) == []
    torch.testing.assert_close(kernel.load()(*args), op.reference(*args), atol=1e-4, rtol=1e-4)
