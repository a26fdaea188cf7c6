"""FlashInfer's filters before our draw: the tokens of the reference, wherever their own cut would lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
from tests.cuda.test_triton_kernels import ROWS, logits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer's filters need a CUDA device"),
]
SETTINGS: tuple[tuple[Any, Any, Any], ...] = (
    (0.7, 20, 0.9),
    (0.7, 0, 0.999),
    (1.3, 3, 1.0),
    ([0.0, 0.5, 1.0, 2.0, 1.0], [0, 1, 50, 7, 10**9], [1.0, 0.3, 0.9, 0.0, 0.99]),
)


@pytest.mark.parametrize("vocab", [50, 2049, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_tokens_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Top-k, top-p and both, as numbers and by row, over rows with ties, zeros, hidden tokens and NaN."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    from layerzero.backends.flashinfer.sampling import KERNELS
    from layerzero.ops.sampling.sampling import sample_reference

    sample = KERNELS[0].load()
    seeds = torch.arange(ROWS, device="cuda") * 10**15 - 3
    for at, setting in enumerate(SETTINGS):
        heat, count, share = (torch.tensor(s, device="cuda") if isinstance(s, list) else s for s in setting)
        for again in range(4):
            call = (logits_of(vocab, dtype, 4 * at + again), heat, count, share, seeds, again)
            assert torch.equal(sample(*call), sample_reference(*call)), (setting, again)


def test_a_graph_may_hold_them() -> None:
    """A capture with every filter is replayed with other logits, and nothing is allocated outside of it."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    logits = torch.randn(4, 128_256, device="cuda").bfloat16()
    seeds = torch.arange(4, device="cuda")
    with lz.start(lz.Settings(device="cuda", warm="off", perfdb=None), scoped=True):
        asked: tuple[dict[str, Any], ...] = ({"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9})
        for filters in asked:
            (proof,) = lz.validate_graph_capture(
                "sample", logits, seed=seeds, kernel="flashinfer.sample.filtered", **filters
            )
            assert proof.safe, str(proof)
