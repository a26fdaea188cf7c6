"""Positions in attention: rotation and its scalings, ALiBi and biases, fused into a kernel or composed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
import layerzero.sync
from layerzero.ops import table

ATTENTION = table.get("attention")
WIDTH = 64


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own, with nothing loading behind it."""
    with lz.start(lz.Settings(warm="off")):
        yield


def heads(count: int, length: int, seed: int) -> Tensor:
    """(1, count, length, 64) of normal numbers."""
    return torch.randn(1, count, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain(width: int, base: float = 10000.0) -> list[float]:
    """The frequencies of the rotation's paper."""
    return [base ** (-2 * i / width) for i in range(width // 2)]


def ntk(width: int, factor: float) -> list[float]:
    """A larger base: the slowest pair turns `factor` times slower."""
    return plain(width, 10000.0 * factor ** (width / (width - 2)))


def yarn(width: int, factor: float, trained: int) -> list[float]:
    """From interpolation to extrapolation by how often a pair turns in the trained length (2309.00071)."""

    def pair(turns: float) -> float:
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), width - 1)
    found = []
    for i, frequency in enumerate(plain(width)):
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        found.append(frequency / factor * slow + frequency * (1 - slow))
    return found


def llama3(width: int, factor: float, trained: int) -> list[float]:
    """Waves above the trained length slow down, those below a quarter of it stay, with a ramp between."""
    found = []
    for frequency in plain(width, 500000.0):
        length = 2 * math.pi / frequency
        smooth = (trained / length - 1.0) / (4.0 - 1.0)
        blended = (1 - smooth) * frequency / factor + smooth * frequency
        found.append(
            frequency / factor if length > trained else frequency if length < trained / 4 else blended
        )
    return found


# name: our scaling and base, the frequencies, what the scaling multiplies cosine and sine by
VARIANTS: dict[str, tuple[Any, float, list[float], float]] = {
    "plain": (None, 10000.0, plain(WIDTH), 1.0),
    "NTK": (lz.NTKScaling(4.0), 10000.0, ntk(WIDTH, 4.0), 1.0),
    "YaRN": (
        lz.YarnScaling(4.0, 256), 10000.0, yarn(WIDTH, 4.0, 256), 0.1 * math.log(4.0) + 1.0,
    ),
    "Llama 3": (
        lz.Llama3Scaling(8.0, original_max_position_embeddings=256), 500000.0, llama3(WIDTH, 8.0, 256), 1.0,
    ),
}  # fmt: skip


def rotated(x: Tensor, frequencies: list[float], factor: float, interleaved: bool) -> Tensor:
    """The rotation as complex numbers, in float64, of (1, H, S, D) at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * torch.tensor(frequencies).double()
    turn = torch.polar(torch.full_like(angles, factor), angles)
    wide = x.double()
    first, second = (
        (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    )
    out = torch.complex(first, second) * turn
    return (
        torch.stack([out.real, out.imag], -1).flatten(-2)
        if interleaved
        else torch.cat([out.real, out.imag], -1)
    )


def turned(q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`rope` of (1, H, S, D): the op has tokens before heads."""
    names = ("scaling", "base")
    tables = lz.rope_tables(WIDTH, q.shape[2], **{n: options.pop(n) for n in names})
    positions = torch.arange(q.shape[2])
    found = layerzero.sync.rope(q[0].transpose(0, 1), k[0].transpose(0, 1), positions, *tables, **options)
    return tuple(t.transpose(0, 1)[None].contiguous() for t in found)  # type: ignore[return-value]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_rotation_before_attention_equals_float64(name: str, interleaved: bool) -> None:
    """E6.6, E6.19: NTK, YaRN and Llama 3 beyond the trained length, in both pairings, in every kernel."""
    scaling, base, frequencies, factor = VARIANTS[name]
    q, k, v = heads(4, 512, 1), heads(2, 512, 2), heads(2, 512, 3)
    want = ATTENTION.reference(
        rotated(q, frequencies, factor, interleaved), rotated(k, frequencies, factor, interleaved),
        v.double(), None, True,
    )  # fmt: skip
    mine = turned(q, k, scaling=scaling, base=base, interleaved=interleaved)
    order = lz.select("attention", *mine, v, is_causal=True).order
    for kernel in order:
        out = layerzero.sync.attention(*mine, v, is_causal=True, backend=kernel)
        torch.testing.assert_close(out.double(), want, atol=5e-5, rtol=1e-4)
    other = turned(q, k, scaling=scaling, base=base, interleaved=not interleaved)
    apart = layerzero.sync.attention(*other, v, is_causal=True).double() - want
    assert apart.abs().max() > 0.05, "the two pairings are told apart"


def test_xpos_scores_decay_as_the_paper_says() -> None:
    """E6.19: with XPos a score falls by zeta ** (distance / base) of each pair, in both pairings."""
    q, k = heads(2, 300, 4), heads(2, 300, 5)
    cos, sin = lz.rope_tables(WIDTH, 300)
    scale = lz.xpos_table(WIDTH, 300)
    tokens = (q[0].transpose(0, 1), k[0].transpose(0, 1))
    for interleaved in (False, True):
        grown, shrunk = layerzero.sync.rope(
            *tokens, torch.arange(300), cos, sin, interleaved=interleaved, xpos_scale=scale
        )
        bare_q, bare_k = (rotated(t, plain(WIDTH), 1.0, interleaved)[0].transpose(0, 1) for t in (q, k))
        zeta = scale.double().repeat_interleave(2, -1) if interleaved else scale.double().repeat(1, 2)
        torch.testing.assert_close(grown.double(), bare_q * zeta[:, None], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shrunk.double(), bare_k / zeta[:, None], atol=1e-5, rtol=1e-5)
    ratio = scale[200].double() / scale[100].double()
    torch.testing.assert_close(ratio, scale[250].double() / scale[150].double(), atol=1e-6, rtol=1e-5)
    assert (ratio < 1).all() and ratio[0] < ratio[-1]


def test_what_no_table_can_be_made_for_is_refused() -> None:
    """E6.19: a scaling that is none of ours, and tables wider than a head, are named."""
    with pytest.raises(TypeError, match="scaling needs None, LinearScaling"):
        lz.rope_tables(WIDTH, 8, scaling="longrope")  # type: ignore[arg-type]
    q = torch.zeros(3, 2, 8)
    cos, sin = lz.rope_tables(16, 4)
    with pytest.raises(ValueError, match="cos needs shape"):
        layerzero.sync.rope(q, q, torch.arange(3), cos, sin)


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (1, 256), (40, 300)])
def test_alibi_inside_a_kernel_equals_its_bias(queries: int, keys: int) -> None:
    """E6.6, E6.9: slopes given to attention equal the composed bias, in every kernel that takes either."""
    q, k, v = heads(4, queries, 6), heads(4, keys, 7), heads(4, keys, 8)
    slopes = lz.alibi_slopes(4)
    bias = layerzero.sync.alibi(slopes, queries, keys)
    want = ATTENTION.reference(
        q.double(), k.double(), v.double(), bias.double(), True, combine_mask=True
    ).float()
    fused = lz.select("attention", q, k, v, is_causal=True, alibi_slopes=slopes)
    composed = lz.select("attention", q, k, v, is_causal=True, attn_mask=bias, combine_mask=True)
    assert fused.order and composed.order
    for kernel in fused.order:
        out = layerzero.sync.attention(q, k, v, is_causal=True, alibi_slopes=slopes, backend=kernel)
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    for kernel in composed.order:
        out = layerzero.sync.attention(
            q, k, v, is_causal=True, attn_mask=bias, combine_mask=True, backend=kernel
        )
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)


@pytest.mark.long
def test_alibi_over_a_long_context() -> None:
    """E6.6: 8,192 keys, prefill rows and decode sampled against float64."""
    length = 8192
    q, k, v = heads(1, length, 9), heads(1, length, 10), heads(1, length, 11)
    slopes = torch.tensor([0.01])
    rows = torch.tensor([0, 1, 4095, 8000, length - 1])
    query, key, value = (t[0, 0].double() for t in (q, k, v))
    distance = rows[:, None] - torch.arange(length)
    scores = query[rows] @ key.T * WIDTH**-0.5 - 0.01 * distance
    want = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value
    out = layerzero.sync.attention(q, k, v, is_causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(out[0, 0, rows].double(), want, atol=2e-5, rtol=1e-4)
    step = layerzero.sync.attention(q[:, :, -1:], k, v, is_causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(step[0, 0].double(), want[-1:], atol=2e-5, rtol=1e-4)


def relative_bias(count: int, queries: int, keys: int) -> Tensor:
    """T5's kind: one learned number a head and bucket of distance."""
    distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    bucket = distance.abs().clamp(max=15) + 16 * (distance > 0)
    weights = torch.randn(32, count, generator=torch.Generator().manual_seed(12))
    return weights[bucket].permute(2, 0, 1)[None]


def test_relative_bias_equals_the_reference_in_every_kernel() -> None:
    """E6.9: a float bias a head goes to kernels that take it; those that do not are refused by reason."""
    q, k, v = heads(4, 40, 13), heads(2, 90, 14), heads(2, 90, 15)
    bias = relative_bias(4, 40, 90)
    record = lz.select("attention", q, k, v, attn_mask=bias)
    assert "mask_float" in record.request.features and len(record.order) >= 3
    want = ATTENTION.reference(q.double(), k.double(), v.double(), bias.double()).float()
    for kernel in record.order:
        out = layerzero.sync.attention(q, k, v, attn_mask=bias, backend=kernel)
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    without = [c for c in record.trace if not c.eligible]
    assert without and all(c.rejected for c in without)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_sparse_mask_equals_the_reference_in_every_kernel(causal: bool) -> None:
    """E6.9: blocks of 128 of which most are hidden, and one query that sees nothing at all."""
    q, k, v = heads(2, 512, 16), heads(2, 512, 17), heads(2, 512, 18)
    blocks = torch.eye(4, dtype=torch.bool) | (torch.arange(4) == 0)
    mask = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    mask[5] = False
    record = lz.select("attention", q, k, v, attn_mask=mask, is_causal=causal, combine_mask=causal)
    want = ATTENTION.reference(q.double(), k.double(), v.double(), mask, causal).float()
    assert not want[:, :, 5].any()
    assert len(record.order) >= 3
    for kernel in record.order:
        out = layerzero.sync.attention(
            q, k, v, attn_mask=mask, is_causal=causal, combine_mask=causal, backend=kernel
        )
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
