"""Eight-bit codes: code points, clamping, scales in each layout, errors, batching, quantized products."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, Literal, cast

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.formats import QuantizedTensor
from layerzero.formats.errors import FormatError
from layerzero.formats.table import Format
from layerzero.ops.quantize import operands
from layerzero.ops.quantize.quantize import FORMATS, scale_shape
from layerzero.ops.quantize.quantize import quantize_reference as reference
from layerzero.spec.reasons import Reason

FormatName = Literal["int8", "fp8_e4m3", "fp8_e5m2"]
Granularity = Literal["tensor", "row", "group"]
FORMAT_NAMES = cast(tuple[FormatName, ...], tuple(FORMATS))


def code_points(form: Format) -> Tensor:
    """Every finite code of a format that `quantize` may give, as float32; zero once."""
    every = torch.arange(256, dtype=torch.uint8).view(form.element.storage).float()
    usable: Tensor = every.isfinite() & (every.abs() <= form.element.max_value)
    codes: Tensor = every[usable].unique()
    return codes


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_code_point_survives(name: FormatName) -> None:
    """What a code stands for comes back as that code."""
    points = code_points(FORMATS[name])
    assert len(points) == {"int8": 255, "fp8_e4m3": 253, "fp8_e5m2": 247}[name]
    codes, scale = lz.sync.quantize(points, format=name, scale=torch.ones(1))
    assert torch.equal(codes.float(), points)
    assert torch.equal(lz.sync.dequantize(codes, scale), points)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_numbers_between_codes_go_to_the_nearest(name: FormatName) -> None:
    """No code is nearer than the one given, and halves go to the even one."""
    points = code_points(FORMATS[name])
    between = (points[1:] + points[:-1]) / 2
    codes = lz.sync.quantize(between, format=name, scale=torch.ones(1))[0].float()
    nearest = (between.unsqueeze(-1) - points).abs().amin(-1)
    assert torch.equal((codes - between).abs(), nearest)
    index = torch.searchsorted(points, codes)
    bits = codes.to(FORMATS[name].element.storage).view(torch.int8)
    assert ((bits & 1) == 0).all() and index.max() < len(points)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_beyond_the_format_is_clamped_and_never_nan(name: FormatName) -> None:
    """A given scale that is too small gives the largest code, where a plain cast may give NaN."""
    largest = FORMATS[name].element.max_value
    x = torch.tensor([largest * 1.2, -largest * 40, 1e30, -1e38])
    codes, _ = lz.sync.quantize(x, format=name, scale=torch.ones(1))
    assert codes.float().tolist() == [largest, -largest, largest, -largest]


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("granularity", ["tensor", "row", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_errors_stay_within_half_a_step(
    name: FormatName, granularity: Granularity, dtype: torch.dtype
) -> None:
    """Each number comes back within half the distance of the codes around it."""
    x = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    size = 8 if granularity == "group" else 0
    codes, scale = lz.sync.quantize(x, format=name, granularity=granularity, group_size=size)
    assert tuple(scale.shape) == scale_shape((5, 3, 24), granularity, size)
    back = lz.sync.dequantize(codes, scale, dtype="float64")
    spread = scale.double().repeat_interleave(size, -1) if size else scale.double()
    mantissa = {"int8": None, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[name]
    least = {"int8": 0.5, "fp8_e4m3": 2.0**-10, "fp8_e5m2": 2.0**-17}[name]
    step = spread * least if mantissa is None else torch.maximum(x.double().abs() * mantissa, spread * least)
    assert ((back - x.double()).abs() <= step * (1 + 1e-5)).all()


def test_a_row_of_zeros_and_a_row_of_nan() -> None:
    """Zeros come back as zeros; NaN and infinity make their own row NaN and leave the others alone."""
    x = torch.zeros(4, 8)
    x[1, 3], x[2, 0], x[3] = torch.nan, torch.inf, 1.0
    for name in FORMAT_NAMES:
        back = lz.sync.dequantize(*lz.sync.quantize(x, format=name))
        assert torch.equal(back[0], x[0]) and torch.equal(back[3], x[3])
        assert back[1:3].isnan().all()


def test_the_tiniest_numbers_do_not_overflow_their_scale() -> None:
    """A row of subnormal numbers gets a normal scale."""
    codes, scale = lz.sync.quantize(torch.full((1, 4), 1e-44))
    assert scale.item() == torch.finfo(torch.float32).tiny and codes.abs().max() == 0


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 40), st.sampled_from(FORMAT_NAMES))
def test_quantizing_twice_changes_nothing(seed: int, rows: int, width: int, name: str) -> None:
    """What came back has the same codes under the same scales."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    codes, scale = reference(x, name, "row", 0, None)
    again, _ = reference(codes.float() * scale, name, "row", 0, scale)
    assert torch.equal(again.view(torch.int8), codes.view(torch.int8))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"format": "int3"}, ValueError, "format needs one of int8, fp8_e4m3, fp8_e5m2, int4, .* got 'int3'"),
        ({"granularity": "column"}, ValueError, "granularity needs one of"),
        (
            {"granularity": "group", "group_size": 5},
            ValueError,
            "group_size needs to divide x.s last axis",
        ),
        ({"granularity": "group"}, ValueError, "group_size needs an int >= 1"),
        ({"group_size": 4}, ValueError, "group_size needs 0 for granularity='row'"),
        ({"scale": torch.ones(4, 2)}, ValueError, r"scale needs shape \(4, 1\), got \(4, 2\)"),
        (
            {"scale": torch.ones(4, 1).double()},
            TypeError,
            "scale needs dtype float32, bfloat16, float16, got float64",
        ),
        ({"x": torch.ones(4, 8).int()}, TypeError, "x needs a floating point dtype"),
        ({"x": torch.ones(4, 8).to(torch.float8_e5m2)}, TypeError, "x needs float32, float16"),
        ({"x": torch.ones(4, 0)}, ValueError, "x needs a last axis of at least 1"),
        ({"x": 3}, TypeError, "x needs a torch.Tensor"),
    ],
)
def test_a_wrong_argument_of_quantize_is_named(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    """The message says which argument, what it needs and what it got."""
    with pytest.raises(error, match=words):
        lz.sync.quantize(**({"x": torch.ones(4, 8), **arguments}))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"codes": torch.ones(4, 8)}, TypeError, "codes needs dtype int8, float8_e4m3fn, float8_e5m2"),
        ({"scale": torch.ones(4, 3)}, ValueError, r"scale needs shape \(\) or \(4, 1\), got \(4, 3\)"),
        ({"scale": torch.ones(3, 1)}, ValueError, r"scale needs shape \(\) or \(4, 1\), got \(3, 1\)"),
        ({"dtype": "int32"}, ValueError, "dtype needs one of float32"),
    ],
)
def test_a_wrong_argument_of_dequantize_is_named(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    """As above."""
    plain: dict[str, Any] = {"codes": torch.ones(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1)}
    with pytest.raises(error, match=words):
        lz.sync.dequantize(**(plain | arguments))


def test_no_gradient_is_a_clear_error() -> None:
    """Rounding has none."""
    with pytest.raises(ValueError, match="quantize has no gradient"):
        lz.sync.quantize(torch.ones(2, 8, requires_grad=True))


def test_nothing_is_quantized_to_nothing() -> None:
    """No row: empty codes and empty scales, without a kernel."""
    codes, scale = lz.sync.quantize(torch.ones(0, 8))
    assert codes.shape == (0, 8) and codes.dtype == torch.int8 and scale.shape == (0, 1)
    assert lz.sync.dequantize(codes, scale).shape == (0, 8)
    out = lz.sync.quantized_linear(torch.ones(0, 8), torch.ones(3, 8, dtype=torch.int8), torch.ones(()))
    assert out.shape == (0, 3)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
def test_callers_meet_only_where_rows_have_scales_of_their_own(granularity: str) -> None:
    """One scale of a tensor, or of a block's rows, is that of one caller."""
    grouped: dict[str, Any] = {"granularity": granularity}
    grouped |= {"group_size": 4} if granularity in ("group", "block") else {}
    block: dict[str, Any] = {"block_size": 4} if granularity == "block" else {}

    async def one(at: int) -> bool:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(at)) * 4.0**at
        alone = lz.sync.quantize(x, **grouped)
        codes, scale = await lz.quantize(x, **grouped)
        wide = await lz.dequantize(codes, scale, **block)
        return (
            torch.equal(codes, alone[0])
            and torch.equal(scale, alone[1])
            and torch.equal(wide, lz.sync.dequantize(*alone, **block))
        )

    async def go() -> list[bool]:
        return await asyncio.gather(*(one(at) for at in range(6)))

    assert all(asyncio.run(go()))


def test_concurrent_callers_get_what_they_get_alone() -> None:
    """Rows of many callers are quantized in one launch; their codes are those of a lone call."""
    rows = [torch.randn(2, 16, generator=torch.Generator().manual_seed(i)) for i in range(8)]

    async def go() -> list[tuple[Tensor, Tensor, Tensor]]:
        results: list[Any] = [None] * len(rows)

        async def one(at: int) -> None:
            codes, scale = await lz.quantize(rows[at], granularity="group", group_size=4)
            results[at] = codes, scale, await lz.dequantize(codes, scale)

        async with anyio.create_task_group() as group:
            for at in range(len(rows)):
                group.start_soon(one, at)
        return results

    for row, (codes, scale, back) in zip(rows, anyio.run(go), strict=True):
        right = reference(row, "int8", "group", 4, None)
        assert torch.equal(codes, right[0]) and torch.equal(scale, right[1])
        assert (back - row).abs().max() < 0.03


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("inputs", ["float", "dynamic"])
@pytest.mark.parametrize("granularity", ["tensor", "row", "group"])
def test_a_quantized_product_is_near_the_plain_one(
    name: FormatName, inputs: Literal["float", "dynamic"], granularity: Granularity
) -> None:
    """The error is what the format's last bit costs on both sides, and no more."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 64, generator=generator), torch.randn(32, 64, generator=generator)
    size = 16 if granularity == "group" else 0
    codes, scale = lz.sync.quantize(weight, format=name, granularity=granularity, group_size=size)
    out = lz.sync.quantized_linear(x, codes, scale, inputs=inputs)
    plain = x @ weight.t()
    assert (out - plain).norm() / plain.norm() < {"int8": 0.02, "fp8_e4m3": 0.04, "fp8_e5m2": 0.08}[name]


def test_exact_products_are_exact() -> None:
    """Small whole numbers go through eight bits without any error, whatever the kernel."""
    x = torch.arange(-4.0, 4.0).repeat(3, 8) * torch.tensor([[1.0], [2.0], [0.5]])
    weight = (torch.arange(5 * 64).view(5, 64) % 9 - 4).to(torch.int8)
    right = x @ weight.float().t()
    for kernel in ("torch.quantized_linear.int_mm", "torch.quantized_linear.widened"):
        with lz.prefer(kernel):
            assert torch.equal(lz.sync.quantized_linear(x, weight, torch.ones(())), right)
    half = lz.sync.quantized_linear(x.bfloat16(), weight, torch.ones(()), torch.ones(5).bfloat16())
    assert torch.equal(half.float(), right + 1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weight": torch.ones(3, 8)}, TypeError, "weight needs dtype int8"),
        ({"weight": torch.ones(3, 7, dtype=torch.int8)}, ValueError, "x needs a last axis of 7"),
        ({"scale": torch.ones(8, 1)}, ValueError, r"scale needs shape \(\) or \(3, 1\)"),
        ({"inputs": "int3"}, ValueError, "inputs needs one of float, dynamic"),
        ({"bias": torch.ones(4)}, ValueError, "bias needs 3 elements like weight's rows"),
    ],
)
def test_a_wrong_argument_of_quantized_linear_is_named(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    """As above."""
    weight = torch.ones(3, 8, dtype=torch.int8)
    plain: dict[str, Any] = {"x": torch.ones(2, 8), "weight": weight, "scale": torch.ones(())}
    with pytest.raises(error, match=words):
        lz.sync.quantized_linear(**(plain | arguments))


@pytest.mark.parametrize(
    "given", [{"scale": torch.zeros(2, 1)}, {"scale": torch.tensor([[1.0], [-1.0]])}], ids=["zero", "less"]
)
def test_a_scale_without_codes_is_refused(given: dict[str, Any]) -> None:
    """A row under a scale of zero would come back as zeros; a NaN of a row that holds one may be given."""
    x = torch.ones(2, 8)
    with pytest.raises(FormatError, match="scale needs positive numbers") as caught:
        lz.sync.quantize(x, **given)
    assert caught.value.reason is Reason.SCALE_NOT_POSITIVE
    with pytest.raises(FormatError, match="tensor_scale needs positive numbers"):
        lz.sync.quantize(torch.ones(2, 16), format="nvfp4", tensor_scale=torch.zeros(()))
    x[1, 3] = torch.nan
    scale = lz.sync.quantize(x)[1]
    assert lz.sync.dequantize(*lz.sync.quantize(x, scale=scale))[1].isnan().all()


@pytest.mark.parametrize("form", ["int8", "int4", "nf4", "mxfp4", "nvfp4"])
def test_dequantize_takes_the_scales_that_a_format_has(form: Any) -> None:
    """Zero in those whose blocks of zeros have it, NaN as `quantize` gives it, nothing below zero."""
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    codes, scale = lz.sync.quantize(x, format=form)
    given: dict[str, Any] = {"format": form}
    if form.startswith("mx"):  # its scales are powers of two
        with pytest.raises(ValueError, match="scale needs"):
            lz.sync.dequantize(codes, -scale.float(), **given)
        return
    zeros = scale.float().index_fill(0, torch.tensor([1]), 0.0).to(scale.dtype)
    if form.startswith("n"):
        assert lz.sync.dequantize(codes, zeros, **given)[1].count_nonzero() == 0
        weight = QuantizedTensor(codes, zeros, form)
        out = lz.sync.quantized_linear(x, **weight.arguments())
        torch.testing.assert_close(out, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)
        assert out[:, 1].count_nonzero() == 0
    else:
        with pytest.raises(FormatError, match=r"scale needs positive numbers, got 0\.0 at") as caught:
            lz.sync.dequantize(codes, zeros, **given)
        assert caught.value.reason is Reason.SCALE_NOT_POSITIVE
    with pytest.raises(FormatError, match="scale needs positive numbers") as caught:
        lz.sync.dequantize(codes, (-scale.float()).to(scale.dtype), **given)
    assert caught.value.reason is Reason.SCALE_NOT_POSITIVE
    unfinished = scale.float().index_fill(0, torch.tensor([1]), torch.nan).to(scale.dtype)
    out = lz.sync.dequantize(codes, unfinished, **given)
    assert out[1].isnan().all() and out[::2].isfinite().all()


def test_a_kernel_says_which_format_and_scales_it_needs() -> None:
    """Reasons name the quantized format and the layout of the scales."""
    weight = torch.ones(3, 8).to(torch.float8_e4m3fn)
    told = lz.explain("quantized_linear", torch.ones(2, 8), weight, torch.ones(3, 2), inputs="dynamic")
    rejected = {c.kernel: {r.reason.value for r in c.rejected} for c in told.selection.trace}
    assert {"QUANT_FORMAT_UNSUPPORTED", "SCALE_LAYOUT_MISMATCH"} <= rejected["torch.quantized_linear.int_mm"]


def _weights() -> dict[str, QuantizedTensor]:
    numbers = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    return {
        "int8": QuantizedTensor.quantize(numbers, "int8"),
        "int4": QuantizedTensor.quantize(numbers, "int4", group_size=32, symmetric=False),
        "nvfp4": QuantizedTensor.quantize(numbers, "nvfp4"),
    }


WRONG: list[tuple[str, str, Any, Reason]] = [
    ("int8", "scale", lambda t: -t, Reason.SCALE_NOT_POSITIVE),
    ("int8", "scale", lambda t: t * 0, Reason.SCALE_NOT_POSITIVE),
    ("int4", "scale", lambda t: t.index_fill(0, torch.tensor([3]), 0.0), Reason.SCALE_NOT_POSITIVE),
    ("int4", "scale", lambda t: t.index_fill(0, torch.tensor([3]), torch.nan), Reason.SCALE_NOT_FINITE),
    ("int4", "scale", lambda t: t.index_fill(0, torch.tensor([3]), torch.inf), Reason.SCALE_NOT_FINITE),
    ("int4", "zero_point", lambda t: t + 16, Reason.ZERO_POINT_MISMATCH),
    ("nvfp4", "tensor_scale", lambda t: -t, Reason.SCALE_NOT_POSITIVE),
    ("nvfp4", "tensor_scale", lambda t: t * torch.nan, Reason.SCALE_NOT_FINITE),
]


@pytest.mark.parametrize(("form", "part", "change", "reason"), WRONG)
def test_values_of_scales_that_are_none_are_refused_by_every_way_in(
    form: str, part: str, change: Any, reason: Reason
) -> None:
    """A product, the experts' products and the tensor itself: by name, with a code."""
    weight, x = _weights()[form], torch.randn(2, 128)
    wrong = {**weight.arguments(), part: change(weight.arguments()[part])}
    kept: dict[str, Any] = {name: wrong.get(name) for name in ("zero_point", "tensor_scale")}
    calls: list[Any] = [
        lambda: lz.sync.quantized_linear(x, **wrong),
        lambda: QuantizedTensor(weight.codes, wrong["scale"], form, **kept),
    ]
    if form == "int8":
        up, down = (QuantizedTensor.quantize(torch.randn(2, 128, wide), "int8") for wide in (128, 64))
        experts = (torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), up.codes, down.codes)
        calls.append(lambda: lz.sync.fused_experts(x, *experts, up.scale, change(down.scale)))
    for call in calls:
        with pytest.raises(FormatError, match=f"{part} needs") as caught:
            call()
        assert caught.value.reason is reason


def test_a_part_of_a_weight_is_read_again_when_it_was_written() -> None:
    """Once while it stays, again after a change; one that is freed leaves nothing behind."""
    weight, x = _weights()["int8"], torch.randn(2, 128)
    for _ in range(2):
        lz.sync.quantized_linear(x, **weight.arguments())
    place = id(weight.scale)
    assert place in operands._READ
    weight.scale[5] = -1.0
    with pytest.raises(FormatError, match=r"scale needs positive numbers, got -1\.0 at \(5, 0\)"):
        lz.sync.quantized_linear(x, **weight.arguments())
    del weight
    gc.collect()
    entry = operands._READ.get(place)
    assert entry is None or entry[0]() is not None
