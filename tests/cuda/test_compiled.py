"""Compiled models on a GPU: captured graphs hold kernels that are safe under capture; skipped elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import layerzero as lz
from tests.kernels import kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="graph capture needs a CUDA device"),
    # Inductor's own pool begins with a graph of nothing.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]


@pytest.fixture
def runtime() -> Iterator[lz.Runtime]:
    """A runtime that loads nothing behind calls."""
    torch.compiler.reset()
    with lz.start(lz.Settings.load(warm="off", device="cuda", perfdb=None)) as opened:
        yield opened
    torch.compiler.reset()


def test_reduce_overhead_captures_only_kernels_that_are_safe(runtime: lz.Runtime) -> None:
    """A kernel that waits for its stream is the cheapest: a plain graph runs it, a captured one never."""
    called: list[int] = []

    def waits(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        called.append(1)
        torch.cuda.current_stream().synchronize()
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    runtime.add_kernel(kernel("planted.rms_norm", waits, launch_us=0.001, rank=1))
    x, weight = torch.randn(16, 256, device="cuda"), torch.randn(256, device="cuda")
    with torch.no_grad():
        plain = torch.compile(lambda x: lz.sync.rms_norm(x, weight) * 2, fullgraph=True)
        plain(x)
        assert called
        called.clear()
        captured = torch.compile(
            lambda x: lz.sync.rms_norm(x, weight) * 3, fullgraph=True, mode="reduce-overhead"
        )
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(captured(x), functional.rms_norm(x, (256,), weight, 1e-6) * 3)
            x = torch.randn_like(x)
        assert not called


def test_a_compiled_model_has_the_numbers_of_the_eager_one(runtime: lz.Runtime) -> None:
    """Attention in half precision with a causal mask, eager, compiled, frozen and captured."""
    q = torch.randn(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16)

    def run(q: Tensor) -> Tensor:
        return lz.sync.attention(q, q, q, is_causal=True) + 1

    with torch.no_grad():
        wanted = functional.scaled_dot_product_attention(q, q, q, is_causal=True) + 1
        torch.testing.assert_close(run(q), wanted, rtol=2e-2, atol=2e-2)
        for choice, mode in (("runtime", None), ("freeze", None), ("runtime", "reduce-overhead")):
            torch.compiler.reset()
            with lz.compile_choice(choice):
                compiled = torch.compile(run, fullgraph=True, mode=mode)
                for _ in range(3):
                    torch.testing.assert_close(compiled(q), wanted, rtol=2e-2, atol=2e-2)
