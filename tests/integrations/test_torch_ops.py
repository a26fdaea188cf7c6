"""Ops registered in torch's library: torch's own checks of an operator, and torch's embedding beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.integrations import torch_ops


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(11, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_torch_finds_nothing_wrong_with_the_operator(
    weight: Tensor, dtype: torch.dtype, padding_idx: int | None
) -> None:
    """Schema, fake tensors, autograd and ahead-of-time dispatch."""
    indices = torch.tensor([[0, 3], [10, 3]], dtype=dtype)
    checked = torch.library.opcheck(torch_ops.embedding_lookup, (weight, indices, padding_idx))
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_rows_and_gradients_are_those_of_torch(weight: Tensor, padding_idx: int | None) -> None:
    """The padding row gets no gradient, a row asked for twice gets both."""
    indices = torch.tensor([3, 10, 0, 10])
    other = weight.detach().clone().requires_grad_()
    ours = torch.ops.layerzero.embedding_lookup(weight, indices, padding_idx)
    theirs = F.embedding(indices, other, padding_idx)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    assert weight.grad is not None and other.grad is not None
    assert torch.equal(weight.grad, other.grad)


def test_an_id_out_of_range_is_named(weight: Tensor) -> None:
    """As the op itself names it."""
    with pytest.raises(ValueError, match="ids needs"):
        torch.ops.layerzero.embedding_lookup(weight, torch.tensor([0, 11]))
