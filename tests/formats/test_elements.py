"""Every code of every format against a table made from its definition; ties, clamping, subnormal numbers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import layerzero.sync as lz_sync
from layerzero.formats import ELEMENTS, FORMATS, QuantizedTensor, decode_codes, encode_values
from layerzero.formats.elements import _middles, pack_pairs, table_of, unpack_pairs

FLOATS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}


def defined(name: str, code: int) -> float:
    """What a code stands for, from the definition of its format, without torch."""
    if name == "int8":
        return float(code - 256 if code > 127 else code)
    if name == "int4":
        return float(code - 8)
    exponent_bits, mantissa_bits, bias = FLOATS[name]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = Fraction(code & (1 << mantissa_bits) - 1, 1 << mantissa_bits)
    if name == "e4m3" and code & 127 == 127:
        return math.nan
    if name == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    size = (
        mantissa * Fraction(2) ** (1 - bias)
        if exponent == 0
        else (1 + mantissa) * Fraction(2) ** (exponent - bias)
    )
    return sign * float(size)


def all_codes(name: str) -> Tensor:
    """Every code of an element, as it is stored."""
    element = ELEMENTS[name]
    if element.bits == 4:
        return pack_pairs(torch.arange(16, dtype=torch.uint8))
    return torch.arange(256, dtype=torch.uint8).view(element.storage)


@pytest.mark.parametrize("name", [name for name in ELEMENTS if name != "nf4"])
def test_every_code_stands_for_what_its_definition_says(name: str) -> None:
    """All 256 or 16 of them, NaN and infinity included."""
    found = decode_codes(all_codes(name), ELEMENTS[name], torch.float64)
    wanted = torch.tensor([defined(name, code) for code in range(len(found))], dtype=torch.float64)
    assert torch.equal(found.nan_to_num(nan=-1.5e300), wanted.nan_to_num(nan=-1.5e300))


def test_nf4_holds_quantiles_of_the_normal_distribution() -> None:
    """As QLoRA makes them: eight above zero and seven below, each side scaled to 1."""
    offset = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64))[:-1]
    below = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64))[:-1]
    wanted = torch.cat((above, below, torch.zeros(1, dtype=torch.float64))).sort().values
    found = decode_codes(all_codes("nf4"), ELEMENTS["nf4"], torch.float64)
    torch.testing.assert_close(found, wanted / wanted.abs().max(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name, element in ELEMENTS.items() if element.bits == 4])
def test_every_four_bit_code_comes_back(name: str) -> None:
    """What a code stands for is rounded to that code, and bytes hold the earlier code in the low half."""
    codes = torch.arange(16, dtype=torch.uint8)
    values = torch.tensor(ELEMENTS[name].values)
    assert torch.equal(encode_values(values, ELEMENTS[name]), codes)
    assert pack_pairs(codes)[:2].tolist() == [0x10, 0x32]
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)


@pytest.mark.parametrize("name", [name for name, element in ELEMENTS.items() if element.bits == 4])
def test_between_two_codes_the_nearest_is_taken(name: str) -> None:
    """A hair off the middle goes to its side; the middle itself to the even code, of nf4 to the lower one."""
    element = ELEMENTS[name]
    for low, high in itertools.pairwise(sorted(set(element.values))):
        middle = torch.tensor((low + high) / 2)
        sides = torch.stack(
            (middle.nextafter(torch.tensor(low)), middle, middle.nextafter(torch.tensor(high)))
        )
        got = decode_codes(pack_pairs(encode_values(sides[[0, 2]], element)), element).tolist()
        assert got == pytest.approx([low, high])
        code = int(encode_values(middle, element))
        if element.ties_to_even:
            assert code % 2 == 0
        elif torch.tensor((low + high) / 2).double() == (low + high) / 2:
            assert element.values[code] == low


@pytest.mark.parametrize("name", ELEMENTS)
def test_beyond_the_largest_code_is_clamped_and_nan_is_zero(name: str) -> None:
    """Infinity and numbers beyond give the largest code, NaN the code of zero, of any sign."""
    element = ELEMENTS[name]
    wild = torch.tensor([torch.inf, 1e30, -torch.inf, -1e30, torch.nan, 1e-44])
    codes = encode_values(wild, element)
    got = decode_codes(pack_pairs(codes) if element.bits == 4 else codes, element).tolist()
    low = -8.0 if name == "int4" else -element.max_value
    assert got == [element.max_value, element.max_value, low, low, 0.0, 0.0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_come_back_within_half_a_step(name: str, dtype: torch.dtype) -> None:
    """Each of a few thousand numbers is within half the distance of the codes around it, under its scale."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight = QuantizedTensor.quantize(x, name)
    values = decode_codes(all_codes(FORMATS[name].element.name), FORMATS[name].element, torch.float64)
    steps = values[values.isfinite()].unique()
    # Powers of two below the largest number let it be clamped.
    ones = torch.ones_like(x, dtype=torch.float64)
    one = QuantizedTensor(
        _codes_of_one(weight), weight.scale, name, None, weight.tensor_scale, weight.block_size
    )
    scale = one.dequantize(torch.float64) / ones
    bounded = (x.double() / scale).clamp(steps[0], steps[-1])
    above = torch.searchsorted(steps, bounded).clamp(1, len(steps) - 1)
    nearest = torch.minimum((steps[above] - bounded).abs(), (steps[above - 1] - bounded).abs())
    off = (weight.dequantize(torch.float64) / scale - bounded).abs()
    assert (off <= nearest * (1 + 1e-5) + 1e-6).all()


def _codes_of_one(weight: QuantizedTensor) -> Tensor:
    element = weight.form.element
    codes = encode_values(torch.ones(weight.shape), element)
    return pack_pairs(codes) if element.bits == 4 else codes


def test_power_of_two_scales_are_those_of_the_specification() -> None:
    """The exponent of the largest number less that of the element's largest power, of zeros too."""
    x = torch.zeros(6, 32)
    x[0, 3], x[1, 0], x[2, 1], x[3, 5] = 6.0, -7.9, 1e-44, 3e38
    x[5, 0] = torch.nan
    codes, scale = lz_sync.quantize(x, format="mxfp4")
    assert scale.view(torch.uint8).flatten().tolist() == [127, 127, 0, 127 + 127 - 2, 0, 255]
    back = lz_sync.dequantize(codes, scale, format="mxfp4")
    assert back[0, 3] == 6.0 and back[1, 0] == -6.0 and torch.equal(back[4], x[4]) and back[5].isnan().all()


def test_a_second_scale_lets_small_blocks_keep_their_digits() -> None:
    """NVFP4 as it is shipped: blocks of e4m3 under one number for the tensor; blocks alone lose them."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1e-4
    weight = QuantizedTensor.quantize(x, "nvfp4")
    assert weight.tensor_scale is not None
    top = weight.scale.float().max() * weight.tensor_scale * 6
    torch.testing.assert_close(top, x.abs().max(), rtol=0.07, atol=0)
    assert (weight.dequantize() - x).norm() < 0.12 * x.norm()
    alone = QuantizedTensor(*lz_sync.quantize(x, format="nvfp4"), "nvfp4")
    assert (alone.dequantize() - x).norm() > 0.5 * x.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_no_rows_and_nothing_but_zeros(name: str) -> None:
    """Empty tensors keep their shape; groups of zeros come back as zeros under a scale that divides."""
    empty = QuantizedTensor.quantize(torch.ones(0, 256), name)
    assert empty.shape == (0, 256) and empty.dequantize().shape == (0, 256)
    zeros = QuantizedTensor.quantize(torch.zeros(3, 256), name)
    assert torch.equal(zeros.dequantize(), torch.zeros(3, 256))


def test_tables_are_where_the_numbers_are() -> None:
    """Whatever device torch would make tensors on."""
    x, element = torch.tensor([[0.1, -0.7]]), ELEMENTS["nf4"]
    for cached in (table_of, _middles):
        cached.cache_clear()
    with torch.device("meta"):
        back = decode_codes(pack_pairs(encode_values(x, element)), element)
    assert back.is_cpu and back.isfinite().all()


@pytest.mark.filterwarnings("error")
def test_numbers_of_any_strides_are_rounded_without_a_warning() -> None:
    """torch warns, once a process, where it copies before a search."""
    x, always = torch.randn(64, 4).T, torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        codes, _ = lz_sync.quantize(x, format="nf4")
    finally:
        torch.set_warn_always(always)
    assert torch.equal(codes, lz_sync.quantize(x.contiguous(), format="nf4")[0])
