"""Weights, keys and values in codes on a GPU: every kernel that takes them; skipped elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.formats import QuantizedTensor
from layerzero.ops import kv_formats, table
from layerzero.ops.quantize.quantized_linear import quantized_linear_reference
from tests.cuda.captures import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALVES = (torch.bfloat16, torch.float16)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Format, granularity, group, whether without a zero point; the kernels that take it in bfloat16 and float16.
WEIGHTS: list[tuple[str, str, int, bool, tuple[str, ...], tuple[str, ...]]] = [
    ("int4", "group", 128, True, ("cuda", "triton"), ("cuda", "triton")),
    ("int4", "group", 256, False, ("cuda", "triton"), ("cuda", "triton")),
    ("int4", "group", 64, False, ("triton",), ("triton",)),
    ("int4", "row", 0, True, ("cuda", "triton"), ("cuda", "triton")),
    ("nf4", "group", 64, True, ("triton",), ("triton",)),
    ("mxfp4", "group", 0, True, ("cuda", "triton"), ()),
    ("nvfp4", "group", 0, True, ("cuda", "triton"), ("cuda", "triton")),
    ("int8", "row", 0, True, ("triton",), ("triton",)),
    ("int8", "tensor", 0, True, ("triton",), ("triton",)),
    ("fp8_e4m3", "block", 128, True, ("triton",), ("triton",)),
    ("fp8_e5m2", "group", 128, True, ("triton",), ("triton",)),
    ("mxfp8", "group", 0, True, ("triton",), ()),
]


@pytest.fixture(autouse=True, scope="module")
def runtime() -> Iterator[lz.Runtime]:
    """A runtime that loads nothing behind calls."""
    with lz.start(lz.Settings.load(warm="off", device="cuda", perfdb=None)) as opened:
        yield opened


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: "-".join(map(str, case[:4])))
def test_products_with_codes_are_those_of_the_dequantized_weight(dtype: torch.dtype, case: Any) -> None:
    """One row to more than a tile, columns that fill no tile, a bias, rows out of a wider tensor."""
    form, granularity, group, symmetric, in_bfloat16, in_float16 = case
    kernels = in_bfloat16 if dtype == torch.bfloat16 else in_float16
    torch.manual_seed(0)
    sizes = {"group_size": group} if group else {}
    weight = QuantizedTensor.quantize(
        torch.randn(200, 1280, device="cuda"), form, granularity=granularity, symmetric=symmetric, **sizes
    )
    given = weight.arguments()
    for rows in (1, 3, 6, 16, 20, 40, 100, 130):
        x = torch.randn(rows, 1288, device="cuda").to(dtype)[:, :1280]
        bias = torch.randn(200, device="cuda").to(dtype)
        truth = quantized_linear_reference(
            x.double(), given["weight"], given["scale"], bias.double(), "float", given.get("format"),
            given.get("zero_point"), given.get("tensor_scale"), given.get("block_size", 0),
        )  # fmt: skip
        for backend in kernels:
            got = lz.sync.quantized_linear(x, bias=bias, backend=backend, **given)
            error = float((got.double() - truth).abs().max() / truth.abs().max())
            assert error < (5e-3 if dtype == torch.bfloat16 else 7e-4), (backend, rows, error)


def pools(codes: torch.dtype, granularity: str, layout: str, page: int) -> tuple[Tensor, ...]:
    """Codes and scales of a pool."""
    count = -(-1280 // page)
    shape = (count, page, 8, 128) if layout == "NHD" else (count, 8, page, 128)
    scales = kv_formats.scale_shape(shape, 2 if layout == "NHD" else 1, granularity)
    k, v = ((torch.randn(shape, device="cuda") * 30).clamp(-100, 100).to(codes) for _ in range(2))
    ks, vs = (torch.rand(scales, device="cuda") * 0.02 + 0.01 for _ in range(2))
    return k, v, ks, vs


@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_pages_of_codes_decode_as_the_reference(codes: torch.dtype, granularity: str) -> None:
    """Both layouts, pages of 16 and of 5, groups of 1 to 8, empty and long sequences, parts of one."""
    torch.manual_seed(0)
    layouts: tuple[tuple[Literal["NHD", "HND"], int], ...] = (("NHD", 16), ("HND", 5))
    for layout, page in layouts:
        k, v, ks, vs = pools(codes, granularity, layout, page)
        width = -(-600 // page)
        tables = torch.randperm(k.shape[0], device="cuda")[: 2 * width].view(2, width).int()
        for heads, lengths in ((32, [600, 6]), (8, [0, 77]), (64, [200, 1])):
            q = (
                torch.randn(2, heads, 128, device="cuda").to(torch.bfloat16 if heads > 8 else torch.float16)
                * 3
            )
            lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
            host = [t.cpu() for t in (q, k, v, tables, lens)]
            call = table.get("paged_attention").build(
                *host, layout=layout, k_scale=ks.cpu(), v_scale=vs.cpu()
            )[1]
            wanted = table.get("paged_attention").reference(*call).float()
            for backend in ("cuda", "triton"):
                got = lz.sync.paged_attention(
                    q, k, v, tables, lens, layout=layout, k_scale=ks, v_scale=vs, backend=backend
                )
                error = float((got.cpu().float() - wanted).abs().max() / wanted.abs().max())
                assert error < 1e-2, (layout, heads, backend, error)


@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_appended_codes_are_the_reference_bit_by_bit(codes: torch.dtype, granularity: str) -> None:
    """Rounding, what lies beyond the format, NaN, and the scales that are written by token."""
    torch.manual_seed(0)
    layouts: tuple[Literal["NHD", "HND"], ...] = ("NHD", "HND")
    for layout in layouts:
        k_cache, v_cache, ks, vs = pools(codes, granularity, layout, 16)
        rows = torch.randn(9, 2, 8, 128, device="cuda").to(torch.bfloat16)
        k, v = rows[:, 0] * 50, rows[:, 1]
        k[0, 0, 3], v[1, 2, 5] = float("nan"), float("inf")
        slots = torch.randperm(1280, device="cuda")[:9]
        wanted = [t.cpu().clone() for t in (k_cache, v_cache, ks, vs)]
        lz.sync.append_kv(
            k, v, k_cache, v_cache, slots, layout=layout, k_scale=ks, v_scale=vs, backend="triton"
        )
        table.get("append_kv").reference(
            k.cpu(), v.cpu(), wanted[0], wanted[1], slots.cpu(), layout, wanted[2], wanted[3]
        )
        for got, want in zip((k_cache, v_cache, ks, vs), wanted, strict=True):
            plain, other = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (got.cpu(), want))
            torch.testing.assert_close(plain, other, rtol=0, atol=0, equal_nan=True)


def test_a_captured_step_over_codes_replays_with_other_lengths() -> None:
    """Nothing is read by the host: a graph of append and attention follows what its tensors hold."""
    torch.manual_seed(0)
    k_cache, v_cache, ks, vs = pools(torch.float8_e4m3fn, "token", "NHD", 16)
    tables = torch.arange(80, device="cuda").view(2, 40).int()
    lens = torch.tensor([40, 7], device="cuda", dtype=torch.int32)
    slots = torch.tensor([39, 646], device="cuda")
    k, v = (torch.randn(2, 8, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    q = torch.randn(2, 32, 128, device="cuda").to(torch.bfloat16)

    def step() -> Tensor:
        lz.sync.append_kv(k, v, k_cache, v_cache, slots, k_scale=ks, v_scale=vs)
        out: Tensor = lz.sync.paged_attention(q, k_cache, v_cache, tables, lens, k_scale=ks, v_scale=vs)
        return out

    graph, out = captured(step)
    for longer in (0, 100, 500):
        lens += longer
        slots += longer
        k.normal_()
        graph.replay()
        torch.testing.assert_close(out, step(), rtol=1e-2, atol=1e-2)


def test_a_thread_that_has_not_used_the_card_compiles_and_loads() -> None:
    """As the thread that loads kernels behind calls does; the call then runs on another one."""
    from layerzero.backends.cuda_kernels import compiled

    source = ("join.cu",)
    with ThreadPoolExecutor(1) as threads:
        loaded = threads.submit(compiled.function, torch.device("cuda"), source, "add_parts", HALF=1).result()
    parts = torch.ones(3, 64, device="cuda")
    out = torch.empty(64, dtype=torch.bfloat16, device="cuda")
    loaded(grid=(1, 1, 1), block=(256, 1, 1), args=[parts, parts, out, 64, 64, 0, 3])
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize("form", ["int4", "nvfp4"])
@pytest.mark.parametrize("rows", [4, 40, 256])
def test_a_product_waits_for_what_its_operands_are_written_by(form: str, rows: int) -> None:
    """A launch may begin while the one before it ends; what it reads is what that wrote, captured too."""
    torch.manual_seed(0)
    weights = [QuantizedTensor.quantize(torch.randn(4096, 4096, device="cuda"), form) for _ in range(2)]
    given = weights[0].clone().arguments()
    given["format"] = form
    inputs = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(2)]
    x, other = torch.empty_like(inputs[0]), torch.randn(4096, 4096, device="cuda")

    def call(turn: int) -> Tensor:
        other.copy_(other @ other * 1e-2)  # long enough for the launches behind it to queue up
        given["weight"].copy_(weights[turn].codes)
        given["scale"].copy_(weights[turn].scale)
        x.copy_(inputs[turn])
        out: Tensor = lz.sync.quantized_linear(x, backend="cuda", **given)
        return out

    alone = []
    for turn in range(2):
        call(turn)
        torch.cuda.synchronize()
        alone.append(lz.sync.quantized_linear(x, backend="cuda", **given).clone())
        torch.cuda.synchronize()
    assert not torch.equal(alone[0], alone[1])
    for turn in range(20):
        assert torch.equal(call(turn % 2), alone[turn % 2]), turn
    with lz.rehearse_capture():
        call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call(turn) for turn in range(2)]
    for turn in range(5):
        graph.replay()
        assert all(torch.equal(out, truth) for out, truth in zip(captured, alone, strict=True)), turn


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_scales_may_be_very_small_and_very_large(rows: int, size: float) -> None:
    """Codes become numbers by way of subnormal ones; nothing of that is seen in a result."""
    torch.manual_seed(0)
    weight = QuantizedTensor.quantize(torch.randn(256, 1024, device="cuda") * size, "int4")
    given = weight.arguments()
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    truth = x.double() @ weight.dequantize(torch.float64).t()
    got = lz.sync.quantized_linear(x, backend="cuda", **{**given, "format": "int4"})
    assert float((got.double() - truth).abs().max() / truth.abs().max()) < 5e-3
