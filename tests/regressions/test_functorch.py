"""Ops under torch.func's transforms, where tensors have no address."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import layerzero as lz

X, W, MATRIX = torch.randn(4, 8, 64), torch.randn(64), torch.randn(32, 64)


def test_vmap_gives_what_torch_gives() -> None:
    """Norms and products mapped over a batch axis equal the whole."""
    torch.testing.assert_close(
        torch.func.vmap(lambda row: lz.sync.rms_norm(row, W))(X), F.rms_norm(X, (64,), W, 1e-6)
    )
    torch.testing.assert_close(
        torch.func.vmap(lambda row: lz.sync.linear(row, MATRIX))(X), F.linear(X, MATRIX), atol=1e-4, rtol=1e-4
    )


def test_grad_gives_what_torch_gives() -> None:
    """The gradient of a norm and of attention through torch.func.grad."""
    ours = torch.func.grad(lambda x: lz.sync.rms_norm(x, W).pow(2).sum())(X)
    theirs = torch.func.grad(lambda x: F.rms_norm(x, (64,), W, 1e-6).pow(2).sum())(X)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    ours = torch.func.grad(lambda x: lz.sync.attention(x, k, k).pow(2).sum())(q)
    theirs = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, k, k).pow(2).sum())(q)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
