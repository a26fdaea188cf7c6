"""Ragged, dense and latent attention over codes on a GPU, beside the reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.formats.elements import encode_values
from layerzero.ops import kv_formats, table
from tests.cuda.captures import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SYNC: Any = lz.sync


@pytest.fixture(autouse=True, scope="module")
def runtime() -> Iterator[lz.Runtime]:
    """A runtime that loads nothing behind calls."""
    with lz.start(lz.Settings.load(warm="off", device="cuda", perfdb=None)) as opened:
        yield opened


def coded(shape: tuple[int, ...], codes: torch.dtype, granularity: str, heads: int) -> tuple[Tensor, Tensor]:
    """Random numbers as codes, and scales of the wanted granularity."""
    element = kv_formats.ELEMENT_OF[codes]
    shared = kv_formats.scale_shape(shape, heads, granularity)
    scale = torch.rand(shared, device="cuda") * 0.01 + 2.0 / element.max_value
    numbers = torch.randn(shape, device="cuda") / kv_formats.broadcast_scale(scale, len(shape), heads)
    return encode_values(numbers, element), scale


def error(op: str, *operands: Any, backend: str = "triton", **named: Any) -> float:
    """The largest distance from the reference over the largest number, of the result and of the LSE."""
    found = getattr(SYNC, op)(*operands, backend=backend, **named)
    wide = [t.cpu() if isinstance(t, Tensor) else t for t in operands]
    wide[0] = wide[0] if kv_formats.is_coded(wide[0]) else wide[0].double()
    host = {name: t.cpu() if isinstance(t, Tensor) else t for name, t in named.items()}
    wanted = table.get(op).reference(*table.get(op).build(*wide, **host)[1])
    if not named.get("return_lse"):
        found, wanted = (found,), (wanted,)
    largest = 0.0
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        got, want = got.cpu().double(), want.double()
        assert torch.equal(got.isinf(), want.isinf())
        got, want = got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0)
        largest = max(largest, float((got - want).abs().max() / want.abs().max()))
    return largest


HOW: tuple[dict[str, Any], ...] = (
    {"is_causal": True, "return_lse": True}, {"window": (100, 30), "scale": -0.1},
    {"softcap": 1.5, "return_lse": True}, {"is_causal": True, "window": (70, -1)},
)  # fmt: skip


@pytest.mark.parametrize("coded_queries", [True, False])
@pytest.mark.parametrize("granularity", kv_formats.GRANULARITIES)
@pytest.mark.parametrize("codes", kv_formats.CODE_DTYPES, ids=str)
def test_codes_are_attended_to_as_the_reference_does(
    codes: torch.dtype, granularity: str, coded_queries: bool
) -> None:
    """Both layouts and sequences of any length, of none too; three widths, groups of 1 to 8, all options."""
    torch.manual_seed(0)
    for turn, (width, group) in enumerate(((64, 4), (128, 8), (128, 1), (256, 2))):
        for layout, heads in (("BHSD", 1), ("BSHD", 2), ("ragged", 1)):

            def shape(tokens: int, count: int, layout: str = layout, width: int = width) -> tuple[int, ...]:
                axes = {"BHSD": (2, count, tokens, width), "BSHD": (2, tokens, count, width)}
                return axes.get(layout, (2 * tokens, count, width))

            k, k_scale = coded(shape(333, 2), codes, granularity, heads)
            v, v_scale = coded(shape(333, 2), codes, granularity, heads)
            dtype = torch.float16 if group == 1 else torch.bfloat16
            q, q_scale = torch.randn(shape(200, 2 * group), device="cuda").to(dtype), None
            if coded_queries:
                q, q_scale = coded(shape(200, 2 * group), codes, granularity, heads)
            scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            for how in (HOW[turn], HOW[(turn + 1) % 4]):
                if layout == "ragged":
                    cu = torch.tensor([0, 1, 1, 150, 400], device="cuda")
                    cu_k = torch.tensor([0, 500, 510, 660, 666], device="cuda")
                    off = error("ragged_attention", q, k, v, cu, cu_k, **how, **scales)
                else:
                    off = error("attention", q, k, v, layout=layout, **how, **scales)
                assert off < 1e-2, (layout, width, group, how, off)


def test_a_captured_call_replays_with_other_offsets() -> None:
    """Nothing is read by the host, nothing is copied from it."""
    torch.manual_seed(0)
    k, k_scale = coded((400, 2, 128), torch.float8_e4m3fn, "token", 1)
    v, v_scale = coded((400, 2, 128), torch.float8_e4m3fn, "token", 1)
    q = torch.randn(300, 8, 128, device="cuda").bfloat16()
    cu = torch.tensor([0, 100, 300], device="cuda")
    cu_k = torch.tensor([0, 100, 400], device="cuda")

    def step() -> Tensor:
        out: Tensor = SYNC.ragged_attention(
            q, k, v, cu, cu_k, is_causal=True, k_scale=k_scale, v_scale=v_scale, backend="triton"
        )
        return out

    graph, out = captured(step)
    for middle in (100, 30, 0, 250):
        cu[1] = middle
        q.normal_()
        graph.replay()
        assert torch.equal(out, step())


def test_rows_of_a_batch_are_those_of_each_alone() -> None:
    """The kernel says that it is batch-invariant: bit by bit."""
    torch.manual_seed(0)
    k, k_scale = coded((4, 2, 300, 128), torch.int8, "head", 1)
    v, v_scale = coded((4, 2, 300, 128), torch.int8, "head", 1)
    q, q_scale = coded((4, 8, 70, 128), torch.int8, "head", 1)
    scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    together = SYNC.attention(q, k, v, is_causal=True, backend="triton", **scales)
    for one in range(4):
        each = (t[one : one + 1] for t in (q, k, v))
        alone = SYNC.attention(*each, is_causal=True, backend="triton", **scales)
        assert torch.equal(alone, together[one : one + 1])


LATENT = ("triton.mla_attention.{}", "triton.mla_attention.{}_in_order")
Pools = tuple[list[Tensor], dict[str, Tensor]]


def latent_pools(codes: torch.dtype, granularity: str) -> Pools:
    """80 pages of 16 tokens, of DeepSeek's widths: their pools, and the scales of codes."""
    if codes == torch.bfloat16:
        return [torch.randn(80, 16, width, device="cuda").bfloat16() for width in (512, 64)], {}
    (ckv, ckv_scale), (kpe, kpe_scale) = (
        coded((80, 16, width), codes, granularity, 0) for width in (512, 64)
    )
    return [ckv, kpe], {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}


def latent_queries(count: int, heads: int) -> list[Tensor]:
    """Absorbed queries and their turned part."""
    return [torch.randn(count, heads, width, device="cuda").bfloat16() for width in (512, 64)]


@pytest.mark.parametrize("kernel", LATENT)
@pytest.mark.parametrize(
    ("codes", "granularity"),
    [(codes, shared) for codes in kv_formats.CODE_DTYPES for shared in ("tensor", "token")]
    + [(torch.bfloat16, "")],
    ids=str,
)
def test_latent_pages_are_attended_to_as_the_reference_does(
    kernel: str, codes: torch.dtype, granularity: str
) -> None:
    """Decoding and pieces of prompts, few heads and many, an empty sequence; one request in many parts."""
    torch.manual_seed(0)
    pools, scales = latent_pools(codes, granularity)
    backend = kernel.format("codes" if scales else "numbers")
    tables = torch.randperm(80, device="cuda")[:78].view(3, 26).int()
    lens = torch.tensor([410, 0, 37], device="cuda", dtype=torch.int32)
    whole = torch.randperm(80, device="cuda").view(1, 80).int()
    for heads, cu in ((5, None), (16, [0, 1, 1, 9]), (128, None)):
        count = 3 if cu is None else cu[-1]
        offsets = None if cu is None else torch.tensor(cu, device="cuda")
        named: dict[str, Any] = {"scale": 0.05, "return_lse": True, "backend": backend} | scales
        queries = latent_queries(count, heads)
        off = error("mla_attention", *queries, *pools, tables, lens, cu_seqlens_q=offsets, **named)
        assert off < 1e-2, (heads, off)
        alone = [each[:1] for each in queries]
        off = error("mla_attention", *alone, *pools, whole, lens[:1] + 800, **named)
        assert off < 1e-2, (heads, off)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_latent_rows_in_order_have_their_own_bits(codes: torch.dtype) -> None:
    """Alone, in a batch, with wider tables; a captured call replays with other lengths."""
    torch.manual_seed(0)
    pools, scales = latent_pools(codes, "token")
    backend = LATENT[1].format("codes" if scales else "numbers")
    named: dict[str, Any] = {"scale": 0.05, "return_lse": True, "backend": backend} | scales
    tables = torch.stack([torch.randperm(80, device="cuda") for _ in range(5)]).int()
    lens = torch.tensor([1280, 512, 513, 1, 37], device="cuda", dtype=torch.int32)
    queries = latent_queries(5, 128)
    together = SYNC.mla_attention(*queries, *pools, tables, lens, **named)
    for row, length in enumerate(lens.tolist()):
        one = slice(row, row + 1)
        short = tables[one, : -(-length // 16)].contiguous()
        each = [t[one] for t in queries]
        alone = SYNC.mla_attention(*each, *pools, short, lens[one], **named)
        for found, wanted in zip(alone, together, strict=True):
            assert torch.equal(found, wanted[one]), (row, length)

    def step() -> Tensor:
        out: Tensor = SYNC.mla_attention(*queries, *pools, tables, lens, **named)[0]
        return out

    graph, out = captured(step)
    for length in (3, 700, 1280):
        lens[0] = length
        graph.replay()
        assert torch.equal(out, step())
