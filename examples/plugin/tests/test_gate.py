"""The plugin's own tests: its kernel against its definition."""

import asyncio

import pytest
import torch

import layerzero as lz
import layerzero.sync

X, G = torch.randn(5, 16), torch.randn(5, 16)


@pytest.mark.parametrize("isolate", [{}, {"acme": "process"}])
def test_the_kernel_computes_what_the_op_means(isolate):
    """Here, and in a process of its own; blocking and awaited, alone and for several callers."""
    with lz.start(lz.Settings(plugins=("acme",), isolate=isolate, warm="off")):
        lz.lock("acme_gate", "acme")
        torch.testing.assert_close(layerzero.sync.acme_gate(X, G), X * torch.sigmoid(G))
        assert lz.last_selection().kernel == "acme.acme_gate.c"

        async def several():
            return await asyncio.gather(*(lz.acme_gate(X[i : i + 1], G[i : i + 1]) for i in range(5)))

        torch.testing.assert_close(torch.cat(asyncio.run(several())), X * torch.sigmoid(G))


def test_wrong_arguments_are_named():
    """By the op's own check."""
    with lz.start(lz.Settings(plugins=("acme",))), pytest.raises(ValueError, match="gate needs x's"):
        layerzero.sync.acme_gate(X, G[:2])
