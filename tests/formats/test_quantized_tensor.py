"""Quantized tensors: what does not fit has a reason code; parts, moves and files keep the numbers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.formats import FORMATS, QuantizedTensor
from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason


def weight_of(name: str, rows: int = 6, width: int = 256, **more: Any) -> QuantizedTensor:
    return QuantizedTensor.quantize(
        torch.randn(rows, width, generator=torch.Generator().manual_seed(1)), name, **more
    )


@pytest.mark.parametrize("name", FORMATS)
def test_saved_copied_and_named_parts_hold_the_same_numbers(name: str) -> None:
    """torch.save read with weights_only, pickle, a clone, a move, and a state dict among other names."""
    weight = weight_of(name)
    stream = io.BytesIO()
    torch.save({"layer": weight}, stream)
    stream.seek(0)
    state = {"other": torch.ones(1), **weight.state_dict("layer.")}
    again = (
        torch.load(stream, weights_only=True)["layer"], pickle.loads(pickle.dumps(weight)), weight.clone(),
        weight.to("cpu"), QuantizedTensor.from_state_dict(state, "layer."),
    )  # fmt: skip
    for other in again:
        assert torch.equal(other.dequantize(), weight.dequantize()) and repr(other) == repr(weight)
    assert again[3] is weight
    with pytest.raises(KeyError, match=r"layer2\.codes"):
        QuantizedTensor.from_state_dict(state, "layer2.")


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_holds_the_numbers_of_its_place(name: str) -> None:
    """Rows, whole groups of columns, matrices of a stack: none is copied."""
    weight = weight_of(name)
    if weight.granularity != "block":
        for rows in (slice(2, 4), slice(None, None, 2), slice(4, 4)):
            assert torch.equal(weight[rows].dequantize(), weight.dequantize()[rows])
            assert weight[rows].codes.data_ptr() == weight.codes[rows].data_ptr()
        group = weight.group_size or 2
        part = weight[1:3, group : 2 * group]
        assert torch.equal(part.dequantize(), weight.dequantize()[1:3, group : 2 * group])
    stack = QuantizedTensor.quantize(torch.randn(3, 6, 256), name)
    assert torch.equal(stack[1].dequantize(), stack.dequantize()[1]) and len(stack) == 3


def test_a_part_of_blocks_begins_where_a_block_does() -> None:
    """Edges may be partial, cuts may not."""
    weight = QuantizedTensor.quantize(torch.randn(200, 300), "fp8_e4m3", granularity="block")
    assert weight.scale.shape == (2, 3)
    assert torch.equal(weight[128:200, 128:300].dequantize(), weight.dequantize()[128:200, 128:300])
    for index in ((slice(1, 128),), (slice(0, 128), slice(0, 100)), (3,)):
        with pytest.raises(FormatError) as caught:
            weight[index]
        assert caught.value.reason is Reason.GROUP_DOES_NOT_DIVIDE


GOOD = weight_of("int4", group_size=64)
NV = weight_of("nvfp4")
INT8 = torch.ones(6, 4, dtype=torch.int8)
BAD: list[tuple[dict[str, Any], Reason]] = [
    ({"scale": torch.ones(6, 3)}, Reason.SCALE_SHAPE_MISMATCH),
    ({"scale": torch.ones(5, 4)}, Reason.SCALE_SHAPE_MISMATCH),
    ({"scale": torch.ones(6, 4).double()}, Reason.SCALE_DTYPE_MISMATCH),
    ({"scale": torch.ones(6, 4).int()}, Reason.SCALE_DTYPE_MISMATCH),
    ({"scale": -torch.ones(6, 4)}, Reason.SCALE_NOT_POSITIVE),
    ({"scale": torch.zeros(6, 4)}, Reason.SCALE_NOT_POSITIVE),
    ({"scale": torch.full((6, 4), torch.nan)}, Reason.SCALE_NOT_FINITE),
    ({"scale": torch.full((6, 4), torch.inf)}, Reason.SCALE_NOT_FINITE),
    ({"codes": GOOD.codes.int()}, Reason.PACKED_LAYOUT_MISMATCH),
    ({"codes": GOOD.codes.to(torch.int8)}, Reason.PACKED_LAYOUT_MISMATCH),
    ({"format": "int3"}, Reason.QUANT_FORMAT_UNSUPPORTED),
    ({"format": "mxfp4"}, Reason.SCALE_DTYPE_MISMATCH),
    ({"zero_point": torch.full((6, 4), 8)}, Reason.ZERO_POINT_MISMATCH),
    ({"zero_point": torch.full((6, 1), 8, dtype=torch.uint8)}, Reason.ZERO_POINT_MISMATCH),
    ({"tensor_scale": torch.ones(())}, Reason.SCALE_LAYOUT_MISMATCH),
    ({"block_size": 64}, Reason.SCALE_LAYOUT_MISMATCH),
    ({"codes": INT8, "format": "int8", "block_size": 2.0}, Reason.QUANT_GROUP_UNSUPPORTED),
    ({"codes": INT8, "format": "int8", "block_size": True}, Reason.QUANT_GROUP_UNSUPPORTED),
]


@pytest.mark.parametrize(
    ("change", "reason"), BAD, ids=[f"{next(iter(c))}-{r}-{n}" for n, (c, r) in enumerate(BAD)]
)
def test_what_does_not_fit_is_refused_by_its_reason(change: dict[str, Any], reason: Reason) -> None:
    """The error names the part; a dtype is a TypeError too, everything is a ValueError and ours."""
    parts: dict[str, Any] = {"codes": GOOD.codes, "scale": GOOD.scale, "format": "int4"} | change
    with pytest.raises(FormatError) as caught:
        QuantizedTensor(**parts)
    assert caught.value.reason is reason and isinstance(caught.value, ValueError | lz.LayerZeroError)
    assert str(caught.value).startswith(f"{caught.value.argument} needs ")
    assert pickle.loads(pickle.dumps(caught.value)).reason is reason


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (torch.zeros(()), Reason.SCALE_NOT_POSITIVE), (torch.tensor(torch.nan), Reason.SCALE_NOT_FINITE),
        (torch.ones(6), Reason.SCALE_SHAPE_MISMATCH), (torch.ones(()).half(), Reason.SCALE_DTYPE_MISMATCH),
    ],
)  # fmt: skip
def test_a_second_scale_that_does_not_fit_is_refused(second: Tensor, reason: Reason) -> None:
    """As the first."""
    with pytest.raises(FormatError) as caught:
        QuantizedTensor(NV.codes, NV.scale, "nvfp4", None, second)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: QuantizedTensor.quantize(torch.ones(2, 100), "int4"), Reason.GROUP_DOES_NOT_DIVIDE),
        (lambda: QuantizedTensor.quantize(torch.ones(2, 48), "mxfp4"), Reason.GROUP_DOES_NOT_DIVIDE),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 64), "mxfp4", group_size=64),
            Reason.QUANT_GROUP_UNSUPPORTED,
        ),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 7), "nf4", granularity="row"),
            Reason.PACKED_LAYOUT_MISMATCH,
        ),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 64), "nvfp4", granularity="row"),
            Reason.SCALE_LAYOUT_MISMATCH,
        ),
        (lambda: QuantizedTensor.quantize(torch.full((2, 64), torch.nan), "int8"), Reason.SCALE_NOT_FINITE),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 64), "nf4", symmetric=False),
            Reason.ZERO_POINT_MISMATCH,
        ),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 64), "int8", group_size=32),
            Reason.QUANT_GROUP_UNSUPPORTED,
        ),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 64), "int8", granularity="block", group_size=0),
            Reason.QUANT_GROUP_UNSUPPORTED,
        ),
        (
            lambda: QuantizedTensor.quantize(torch.ones(64), "int8", granularity="block"),
            Reason.SCALE_LAYOUT_MISMATCH,
        ),
        (lambda: QuantizedTensor.quantize(torch.ones(()), "int8"), Reason.PACKED_LAYOUT_MISMATCH),
        (lambda: QuantizedTensor.quantize(torch.ones(2, 0), "int8"), Reason.PACKED_LAYOUT_MISMATCH),
        (lambda: weight_of("mxfp4", width=32)[:, :16], Reason.GROUP_DOES_NOT_DIVIDE),
        (lambda: lz.sync.quantize(torch.ones(2, 100), format="int4"), Reason.GROUP_DOES_NOT_DIVIDE),
        (lambda: lz.sync.dequantize(GOOD.codes, GOOD.scale), Reason.QUANT_FORMAT_UNSUPPORTED),
        (lambda: lz.sync.dequantize(GOOD.codes, GOOD.scale, format="int8"), Reason.PACKED_LAYOUT_MISMATCH),
        (
            lambda: lz.sync.quantized_linear(
                torch.ones(2, 256), GOOD.codes, GOOD.scale[:, :3], format="int4"
            ),
            Reason.SCALE_SHAPE_MISMATCH,
        ),
        (
            lambda: lz.sync.quantized_linear(
                torch.ones(2, 256), GOOD.codes, GOOD.scale, format="int4", inputs="dynamic"
            ),
            Reason.QUANT_FORMAT_UNSUPPORTED,
        ),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_its_reason(call: Any, reason: Reason) -> None:
    """Before anything is computed."""
    with pytest.raises(FormatError) as caught:
        call()
    assert caught.value.reason is reason


@given(st.integers(0, 2**31), st.sampled_from(["int4", "nf4", "int8"]), st.floats(0.1, 10))
def test_numbers_are_linear_in_their_scales(seed: int, name: str, factor: float) -> None:
    """Twice the scale is twice the number, of the tensor and of a product with it."""
    generator = torch.Generator().manual_seed(seed)
    weight = QuantizedTensor.quantize(
        torch.randn(5, 64, generator=generator), name, granularity="group", group_size=32
    )
    power = 2.0 ** round(factor)
    more = QuantizedTensor(weight.codes, weight.scale * power, name)
    assert torch.equal(more.dequantize(), weight.dequantize() * power)
    x = torch.randn(3, 64, generator=generator)
    once, again = (lz.sync.quantized_linear(x, **each.arguments()) for each in (weight, more))
    assert torch.equal(again, once * power)


@given(st.integers(0, 2**31), st.sampled_from(["int4", "nf4", "mxfp4", "nvfp4"]))
def test_groups_may_change_places(seed: int, name: str) -> None:
    """Codes, scales and rows in another order of groups give the same sums but for their order."""
    generator = torch.Generator().manual_seed(seed)
    more: dict[str, Any] = {"group_size": 64} if FORMATS[name].open_groups else {}
    weight = QuantizedTensor.quantize(torch.randn(5, 256, generator=generator), name, **more)
    order, size = torch.randperm(256 // weight.group_size, generator=generator), weight.group_size
    codes = weight.codes.unflatten(-1, (-1, size // 2))[:, order].flatten(-2)
    scale = (
        weight.scale.view(torch.uint8)[:, order].view(weight.scale.dtype)
        if weight.scale.itemsize == 1
        else (weight.scale[:, order])
    )
    moved = QuantizedTensor(codes, scale, name, None, weight.tensor_scale)
    x = torch.randn(3, 256, generator=generator)
    swapped = x.unflatten(-1, (-1, size))[:, order].flatten(-2)
    mine, theirs = (
        lz.sync.quantized_linear(x, **weight.arguments()),
        lz.sync.quantized_linear(swapped, **moved.arguments()),
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_zero_point_is_a_code_and_zero_a_number() -> None:
    """Of numbers that are all positive, or all negative, zero is among the values; a code has four bits."""
    for x in (torch.rand(4, 128) + 3, -torch.rand(4, 128) - 3):
        made = QuantizedTensor.quantize(x, "int4", symmetric=False)
        assert made.zero_point is not None
        assert (made.dequantize() - x).abs().max() <= made.scale.max() / 2 * 1.001
        with pytest.raises(FormatError) as caught:
            QuantizedTensor(made.codes, made.scale, "int4", made.zero_point + 16)
        assert caught.value.reason is Reason.ZERO_POINT_MISMATCH


def test_each_matrix_has_a_second_scale_of_its_own() -> None:
    """Stacked matrices are the numbers that each is alone."""
    parts = [QuantizedTensor.quantize(torch.randn(4, 32) * size, "nvfp4") for size in (1.0, 50.0)]
    second = torch.stack([part.tensor_scale for part in parts if part.tensor_scale is not None])
    codes = torch.stack([part.codes for part in parts])
    scale = torch.stack([part.scale.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    whole = QuantizedTensor(codes, scale, "nvfp4", tensor_scale=second)
    assert torch.equal(whole.dequantize(), torch.stack([part.dequantize() for part in parts]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_parameter_is_rounded_without_its_gradient(name: str) -> None:
    """What comes of a module's weight holds no graph: it multiplies and is copied like any other."""
    made = QuantizedTensor.quantize(torch.nn.Linear(256, 6).weight, name)
    assert not any(part.requires_grad for part in made.state_dict().values() if isinstance(part, Tensor))
    assert lz.sync.quantized_linear(torch.ones(2, 256), **made.arguments()).shape == (2, 6)
    assert torch.equal(copy.deepcopy(made).dequantize(), made.dequantize())


@pytest.mark.parametrize(
    ("call", "needs"),
    [
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 256).to(torch.complex64), "int8"),
            "x needs a floating point dtype",
        ),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 256).int(), "int8"),
            "x needs a floating point dtype",
        ),
        (lambda: QuantizedTensor.quantize(GOOD.codes, "int8"), "x needs a floating point dtype"),
        (
            lambda: QuantizedTensor.quantize(torch.ones(2, 256).to(torch.float8_e5m2), "int8"),
            "x needs a floating point dtype",
        ),
        (lambda: GOOD.dequantize(torch.int8), "dtype needs a floating point dtype"),
        (lambda: GOOD.dequantize("float32"), "dtype needs a floating point dtype"),  # type: ignore[arg-type]
        (lambda: QuantizedTensor(GOOD.codes, GOOD.scale, None), "format needs one of"),  # type: ignore[arg-type]
        (lambda: QuantizedTensor(INT8, torch.ones(()), None), "format needs one of"),  # type: ignore[arg-type]
        (lambda: QuantizedTensor(INT8, torch.ones(()), ["int8"]), "format needs one of"),  # type: ignore[arg-type]
        (lambda: GOOD[::-1], "index needs a step of at least 1"),
        (lambda: GOOD[::0], "index needs a step of at least 1"),
        (lambda: GOOD[:, 64:64], "index needs at least one number of the last axis"),
        (lambda: NV[:, 32:16], "index needs at least one number of the last axis"),
    ],
)
def test_what_would_be_other_numbers_is_named(call: Any, needs: str) -> None:
    """Parts of no numbers, numbers that a format cannot hold, and dtypes that would cut what comes back."""
    with pytest.raises((ValueError, TypeError), match=needs):
        call()


@pytest.mark.parametrize("part", ["scale", "zero_point"])
def test_parts_on_another_device_are_named(part: str) -> None:
    """Before the values of any are read."""
    made = QuantizedTensor.quantize(torch.randn(4, 128), "int4", symmetric=False)
    parts = made.state_dict() | {part: getattr(made, part).to("meta")}
    with pytest.raises(ValueError, match=f"{part} needs to be on cpu like codes, got meta"):
        QuantizedTensor.from_state_dict(parts)


def test_numbers_of_double_precision_are_products_of_it() -> None:
    """A code times its scale, not rounded to float32 on the way; the tensor says what shares a scale."""
    made = QuantizedTensor.quantize(torch.randn(4, 128), "int8", granularity="group", group_size=32)
    scale = made.scale.double().repeat_interleave(32, 1)
    assert torch.equal(made.dequantize(torch.float64), made.codes.double() * scale)
    assert not torch.equal(made.dequantize(torch.float64), made.dequantize().double())
    assert repr(made) == "QuantizedTensor(int8, (4, 128), scale by group of 32, cpu)"
