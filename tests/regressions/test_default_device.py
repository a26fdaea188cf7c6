"""A default device other than the tensors' changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import layerzero as lz


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """New tensors go to the meta device, where reading one is an error."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_seed_is_drawn_where_it_can_be_read() -> None:
    """Sampling without a seed draws one, whatever the default device."""
    assert lz.sync.sample_topk(torch.randn(3, 50, device="cpu"), 5).device.type == "cpu"


def test_ragged_attention_stays_on_its_tensors() -> None:
    """Every kernel that takes sequences of several lengths gives CPU results for CPU tensors."""
    q = torch.randn(5, 2, 32, device="cpu")
    cuts = torch.tensor([0, 2, 5], dtype=torch.int32, device="cpu")
    call = (q, q, q, cuts)
    kernels = [c.kernel for c in lz.select("ragged_attention", *call, is_causal=True).trace if c.accepted]
    assert kernels
    for kernel in kernels:
        out = lz.sync.ragged_attention(*call, is_causal=True, backend=kernel)
        ran = lz.last_selection()
        assert ran is not None
        assert (out.device.type, ran.kernel) == ("cpu", kernel)
