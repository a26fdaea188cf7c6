"""Our Triton kernels on a GPU, where random calls are cheap: the tokens and codes of the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="there is no CUDA device")]

ROWS = 5
SETTINGS: tuple[tuple[Any, Any, Any], ...] = (
    (1.0, 0, 1.0),
    (0.7, 20, 0.9),
    (0.7, 0, 0.5),
    (1.3, 3, 1.0),
    (0.0, 0, 1.0),
    (0.0, 5, 0.4),
    (1.0, 0, 0.0),
    (1.0, 1, 1.0),
    (1.0, 10**9, 0.999),
    ([0.0, 0.5, 1.0, 2.0, 1.0], [0, 1, 2, 7, 10**9], [1.0, 0.3, 0.9, 0.0, 1.0]),
)


def logits_of(vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows with ties, with both zeros, with hidden tokens, with NaN."""
    rows = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    rows[1, : vocab // 2] = 1.5
    rows[2] = 0.0
    rows[2, ::2] = -0.0
    rows[3, vocab // 3 + 1 :] = -torch.inf
    if seed % 2:
        rows[4, vocab // 2] = torch.nan
    return rows.to(dtype).cuda()


@pytest.mark.parametrize("vocab", [1, 50, 2049, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_tokens_as_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Temperatures, top-k, top-p, seeds and offsets as numbers and by row."""
    from layerzero.backends.triton_kernels.sampling import sample
    from layerzero.ops.sampling.sampling import sample_reference

    seeds = torch.arange(ROWS, device="cuda") * 10**15 - 3
    # Each is compiled anew for a vocabulary that is a multiple of 16.
    settings = SETTINGS if vocab < 100_000 else (SETTINGS[1], SETTINGS[-1])
    for at, (setting, seed) in enumerate(itertools.product(settings, (-5, seeds))):
        logits = logits_of(vocab, dtype, at)
        heat, count, share = (torch.tensor(s, device="cuda") if isinstance(s, list) else s for s in setting)
        call = (logits, heat, count, share, seed, 2**40 if at % 2 else torch.arange(ROWS, device="cuda"))
        assert torch.equal(sample(*call), sample_reference(*call)), (setting, seed)


@pytest.mark.parametrize("form", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_codes_as_the_reference(form: str, dtype: torch.dtype) -> None:
    """Rows and groups, scales found and given, numbers over the whole range of the dtype."""
    from layerzero.backends.triton_kernels.rows import quantize
    from layerzero.ops.quantize.quantize import quantize_reference

    source = torch.Generator().manual_seed(0)
    spread = torch.exp(torch.randn(257, 1, generator=source) * 4)
    x = torch.randn(257, 768, generator=source) * spread * torch.exp(torch.randn(257, 768, generator=source))
    x[3], x[4, 5], x[5, 7] = 0.0, torch.nan, torch.inf
    x = x.to(dtype).cuda()
    for granularity, group in (("row", 0), ("group", 128), ("group", 6)):
        ours = quantize(x, form, granularity, group, None)
        right = quantize_reference(x, form, granularity, group, None)
        assert torch.equal(ours[1].nan_to_num(-1.0), right[1].nan_to_num(-1.0))
        assert torch.equal(ours[0].view(torch.int8), right[0].view(torch.int8))
        given = torch.full_like(right[1], 0.01)
        codes = [f(x, form, granularity, group, given)[0] for f in (quantize, quantize_reference)]
        assert torch.equal(codes[0].view(torch.int8), codes[1].view(torch.int8))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sequences", [1, 5, 64])
def test_pages_decode_as_the_reference(sequences: int, dtype: torch.dtype, layout: str) -> None:
    """Whole and cut sequences of lengths from none to the whole table, grouped and plain heads."""
    from layerzero.backends.triton_kernels.paged import paged_attention
    from layerzero.ops.paged.attention import paged_attention_reference

    pages = 6400 // sequences if sequences < 64 else 14
    for heads, key_heads, width in ((32, 8, 128), (8, 8, 64), (7, 1, 256)):
        shape = (6400, 16, key_heads, width) if layout == "NHD" else (6400, key_heads, 16, width)
        k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        q = torch.randn(sequences, heads + 2, width, device="cuda", dtype=dtype)[:, 1:-1]
        tables = torch.randperm(6400, device="cuda")[: sequences * pages].view(sequences, pages).int()
        lens = torch.randint(0, pages * 16 + 1, (sequences,), device="cuda", dtype=torch.int32)
        call = (q, k, v, tables, lens, None, True, None, None, None, layout, False, None, None)
        wide = [t.double() if t.is_floating_point() else t for t in call[:5]]
        right = paged_attention_reference(*wide, *call[5:])
        ours = paged_attention(*call)
        assert isinstance(right, Tensor) and isinstance(ours, Tensor)
        distance = float((ours.double() - right).norm() / right.norm().clamp_min(1e-30))
        assert distance < 4 * torch.finfo(dtype).eps, (heads, key_heads, distance)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "counts", [(1,) * 64, (512, 1, 1, 1000, 37, 0, 1), (2048,)], ids=["ones", "mixed", "one"]
)
def test_prompts_and_decoding_attend_together_as_the_reference(
    counts: tuple[int, ...], dtype: torch.dtype, layout: str
) -> None:
    """Prompts behind none or many tokens beside single ones, grouped and plain heads, causal and not."""
    from layerzero.backends.triton_kernels.paged_rows import paged_attention
    from layerzero.ops.paged.attention import paged_attention_reference

    starts = torch.tensor([0, *itertools.accumulate(counts)], device="cuda", dtype=torch.int32)
    total, sequences = sum(counts), len(counts)
    before = torch.randint(0, 900, (sequences,))
    lens = (torch.tensor(counts) + before).int().cuda()
    pages = -(-int(lens.max()) // 16)
    for heads, key_heads, width, causal in ((32, 8, 128, True), (8, 8, 64, False), (7, 1, 256, True)):
        shape = (6400, 16, key_heads, width) if layout == "NHD" else (6400, key_heads, 16, width)
        k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        q = torch.randn(total, heads + 2, width, device="cuda", dtype=dtype)[:, 1:-1]
        tables = torch.randperm(6400, device="cuda")[: sequences * pages].view(sequences, pages).int()
        call = (q, k, v, tables, lens, starts, causal, None, None, None, layout, False, None, None)
        wide = [t.float() if t.is_floating_point() else t for t in call[:6]]
        right = paged_attention_reference(*wide, *call[6:])
        ours = paged_attention(*call)
        assert isinstance(right, Tensor) and isinstance(ours, Tensor)
        distance = float((ours.double() - right).norm() / right.norm().clamp_min(1e-30))
        assert distance < 4 * torch.finfo(dtype).eps, (heads, key_heads, distance)
