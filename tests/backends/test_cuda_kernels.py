"""Which calls our CUDA C++ and Triton kernels over codes take, and how they are cut; tests/cuda runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.backends import cuda_kernels, load_builtin
from layerzero.backends.cuda_kernels import decode, products
from layerzero.formats import QuantizedTensor
from layerzero.ops import kv_formats, table
from layerzero.ops.paged import splitting
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import hypothetical_gpu
from layerzero.spec.kernel import rejections
from layerzero.spec.reasons import Reason

HOPPER, ADA = hypothetical_gpu(90), hypothetical_gpu(89)


def takers(request: CallSpec, gpu: Any = HOPPER) -> set[str]:
    """The kernels of ours that take a request on a GPU."""
    there = request.replace(platform="cuda", device="cuda:0")
    return {
        kernel.id
        for kernel in load_builtin(op=request.op)
        if kernel.backend in ("cuda", "triton") and not rejections(kernel, there, gpu)
    }


def product(form: str, dtype: torch.dtype, **how: Any) -> CallSpec:
    """The request of a product with a weight of 128 x 256."""
    weight = QuantizedTensor.quantize(torch.randn(128, 256), form, **how)
    op = table.get("quantized_linear")
    return op.check(op.build(torch.randn(4, 256).to(dtype), **weight.arguments())[1])


@pytest.mark.parametrize(
    ("form", "dtype", "how", "taken"),
    [
        ("int4", torch.bfloat16, {"group_size": 128}, {"cuda four_bits", "triton codes"}),
        ("int4", torch.float16, {"group_size": 128, "symmetric": False}, {"cuda four_bits", "triton codes"}),
        ("int4", torch.bfloat16, {"group_size": 64}, {"triton codes"}),
        ("int4", torch.bfloat16, {"group_size": 16}, set()),
        ("nvfp4", torch.float16, {}, {"cuda four_bits", "triton codes"}),
        ("mxfp4", torch.bfloat16, {}, {"cuda mxfp4", "triton powers_of_two"}),
        ("mxfp4", torch.float16, {}, set()),
        ("nf4", torch.bfloat16, {}, {"triton codes"}),
        ("fp8_e4m3", torch.bfloat16, {}, {"triton codes"}),
        ("int4", torch.float32, {"group_size": 128}, set()),
    ],
)  # fmt: skip
def test_products_are_taken_where_their_tiles_fit(
    form: str, dtype: torch.dtype, how: dict[str, Any], taken: set[str]
) -> None:
    """Groups of 128 for the words of CUDA C++, of 32 for Triton's; powers of two not beside float16."""
    found = {f"{name.split('.')[0]} {name.split('.')[2]}" for name in takers(product(form, dtype, **how))}
    assert found == taken
    assert not any(name.startswith("cuda") for name in takers(product(form, dtype, **how), ADA))


@pytest.mark.parametrize("name", ["triton.quantized_linear.codes", "torch.quantized_linear.scaled_mm"])
def test_float8_on_a_card_without_it_is_a_reason_before_the_call(name: str) -> None:
    """An Ampere card has no such numbers; the kernel's verdict says what it needs and what is there."""
    (kernel,) = (kernel for kernel in load_builtin(op="quantized_linear") if kernel.id == name)
    request = product("fp8_e4m3", torch.bfloat16).replace(platform="cuda", device="cuda:0")
    reasons = rejections(kernel, request, hypothetical_gpu(86))
    (verdict,) = (each for each in reasons if each.reason is Reason.SM_TOO_OLD)
    assert verdict.field == "sm" and verdict.needs.startswith(">= ") and verdict.got == "86"


def attended(codes: torch.dtype | None, heads: int = 8, width: int = 128) -> CallSpec:
    """The request of one token over pages of codes, or of numbers."""
    op = table.get("paged_attention")
    pool = torch.zeros(4, 16, 2, width).to(codes or torch.bfloat16)
    scale = None if codes is None else torch.ones(kv_formats.scale_shape(tuple(pool.shape), 2, "head"))
    q = torch.randn(1, heads, width).bfloat16()
    tables, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    return op.check(op.build(q, pool, pool, tables, lengths, k_scale=scale, v_scale=scale)[1])


def test_pages_of_codes_go_to_the_kernels_that_are_made_for_them() -> None:
    """And to no other; pages of numbers go to none of these, by a reason that says so."""
    triton = {"triton.paged_attention.decode_codes", "triton.paged_attention.rows_codes"}
    assert takers(attended(torch.float8_e4m3fn)) == {
        "cuda.paged_attention.codes", *triton,
    }  # fmt: skip
    assert takers(attended(torch.int8, heads=32)) == {
        "triton.paged_attention.decode_codes",
        "triton.paged_attention.rows_codes",
    }  # groups of 16
    assert takers(attended(torch.int8, width=64)) == {
        "triton.paged_attention.decode_codes",
        "triton.paged_attention.rows_codes",
    }
    assert takers(attended(None)) == {"triton.paged_attention.decode", "triton.paged_attention.rows"}
    (kernel,) = (kernel for kernel in cuda_kernels.KERNELS if kernel.op == "paged_attention")
    reasons = {refusal.reason for refusal in rejections(kernel, attended(None), HOPPER)}
    assert Reason.FEATURE_REQUIRED in reasons


def test_what_is_compiled_together_differs_where_the_source_does() -> None:
    """Another dtype, format, group or number of rows is another function."""
    units = [
        products.unit(product(form, dtype, **how))
        for form, dtype, how in (
            ("int4", torch.bfloat16, {"group_size": 128}), ("int4", torch.float16, {"group_size": 128}),
            ("int4", torch.bfloat16, {"granularity": "row"}), ("nvfp4", torch.bfloat16, {}),
        )
    ]  # fmt: skip
    assert len(set(units)) == len(units)
    codes = [attended(torch.float8_e4m3fn), attended(torch.int8), attended(torch.int8, heads=4)]
    assert len({decode.unit(request) for request in codes}) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 16])
def test_a_block_for_few_rows_holds_them(rows: int, dtype: torch.dtype) -> None:
    """All of them at once, whatever the sizes."""
    for width, inner in ((4096, 4096), (14336, 4096), (4096, 14336)):
        plan = products.plan_of("int4", rows, width, inner, dtype)
        assert plan.rows >= rows


@pytest.mark.parametrize(
    ("dtype", "rows", "tile"),
    [
        (torch.bfloat16, 17, 32), (torch.bfloat16, 33, 64), (torch.bfloat16, 65, 128),
        (torch.bfloat16, 300, 256), (torch.float16, 17, 32), (torch.float16, 300, 64),
    ],
)  # fmt: skip
def test_a_tile_holds_the_rows_where_one_can(dtype: torch.dtype, rows: int, tile: int) -> None:
    """The smallest that does; what is on its way fits a multiprocessor; an odd K has turns of one chunk."""
    chosen = products.plan_of("int4", rows, 4096, 4096, dtype)
    assert isinstance(chosen, products.Tile)
    assert chosen.rows == tile
    assert chosen.shared <= 232_448
    assert chosen.chunks * tile * (128 + 4) * 4 <= chosen.shared
    assert 2 * chosen.row_stages * 8 <= 128
    assert 4096 // 128 % chosen.chunks == 0
    assert products.tile_of(rows, 1280 + 128, dtype).chunks == 1


def test_parts_fill_the_device_and_no_more() -> None:
    """K is cut where blocks are fewer than multiprocessors, and sequences where they are few."""
    assert products.parts_of(224, 32, 132, is_few=True) == 1
    assert products.parts_of(128, 112, 132, is_few=True) == 2
    assert products.parts_of(32, 32, 132, is_few=False) == 4
    assert products.parts_of(224, 32, 132, is_few=False) == 1
    assert splitting.parts_of(512, 4096, 132) == 1
    assert splitting.parts_of(8, 8192, 132) == 64
    assert splitting.parts_of(8, 128, 132) == 1


def test_the_sources_are_in_the_package() -> None:
    """What Python names is there."""
    folder = Path(cuda_kernels.__file__).parent
    names = (
        "arrange.cu",
        "codes.cuh",
        "common.cuh",
        "decode.cu",
        "join.cu",
        "products.cu",
        "wide_products.cu",
    )
    for name in names:
        assert (folder / name).stat().st_size


@pytest.mark.parametrize("op", ["attention", "ragged_attention"])
@pytest.mark.parametrize("coded_queries", [True, False])
def test_operands_of_codes_go_to_the_kernel_that_reads_them(op: str, coded_queries: bool) -> None:
    """Keys and values of codes, beside queries of codes or numbers; numbers alone and other widths do not."""
    named = table.get(op)

    def taken(width: int, codes: torch.dtype | None) -> set[str]:
        k = torch.zeros(2, 4, 5, width).to(codes or torch.bfloat16)
        q = k if coded_queries else k.to(torch.bfloat16)
        scales = {f"{name}_scale": torch.ones(()) for name in ("qkv" if coded_queries else "kv")}
        rest = [torch.tensor([0, 4])] if op == "ragged_attention" else []
        operands = [t[0] if rest else t for t in (q, k, k)]
        request = named.check(named.build(*operands, *rest, **(scales if codes else {}))[1])
        return takers(request)

    for codes in kv_formats.CODE_DTYPES:
        assert taken(128, codes) == {f"triton.{op}.codes"}
        assert taken(40, codes) == set()
    assert taken(128, None) == set()


@pytest.mark.parametrize(
    ("form", "dtype", "width", "taken"),
    [
        ("int4", torch.float16, 128, {"codes"}), ("mxfp4", torch.bfloat16, 128, {"powers_of_two"}),
        ("mxfp4", torch.float16, 128, set()), ("fp8_e4m3", torch.bfloat16, 64, {"codes"}),
        ("fp8_e4m3", torch.bfloat16, 48, set()), ("int8", torch.float32, 64, set()),
    ],
)  # fmt: skip
def test_experts_are_taken_where_their_tiles_fit(
    form: str, dtype: torch.dtype, width: int, taken: set[str]
) -> None:
    """As products of one weight are, on Hopper alone: what tiles hold is more than older cards have."""
    op = table.get("fused_experts")
    parts: dict[str, Any] = {}
    for end, shape in (("up", (3, 256, width)), ("down", (3, width, 128))):
        made = QuantizedTensor.quantize(torch.randn(shape), form).arguments()
        parts |= {f"{end}_scale": made["scale"], f"w_{end}": made["weight"], "format": made.get("format")}
    x, chosen = torch.randn(4, width).to(dtype), torch.zeros(4, 1, dtype=torch.int32)
    request = op.check(op.build(x, chosen, torch.ones(4, 1), **parts)[1])
    assert takers(request) == {f"triton.fused_experts.{name}" for name in taken}
    assert takers(request, ADA) == set()
