"""Conventions of checkpoints: every packing against the loop that its authors wrote, there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.formats import FORMATS, QuantizedTensor
from layerzero.formats.checkpoints import CONVENTIONS, read, write
from layerzero.formats.elements import unpack_pairs
from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason

ROWS, WIDTH = 16, 256


def weight_of(convention: str) -> QuantizedTensor:
    form = CONVENTIONS[convention].format
    numbers = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    if convention == "deepseek fp8":
        return QuantizedTensor.quantize(numbers, form, granularity="block")
    weight = QuantizedTensor.quantize(numbers, form, symmetric=form != "int4")
    if form != "int4":
        return weight
    zero = weight.zero_point
    assert zero is not None
    return QuantizedTensor(weight.codes, weight.scale.half(), form, zero.clamp(1, 15))


WRITTEN = [name for name, rules in CONVENTIONS.items() if rules.write is not None]


@pytest.mark.parametrize("convention", WRITTEN)
def test_what_is_written_is_read(convention: str) -> None:
    """The same codes, scales, zero points, and so the same numbers."""
    weight = weight_of(convention)
    parts = write(convention, weight)
    assert set(CONVENTIONS[convention].parts) <= set(parts)
    again = read(convention, parts)
    assert again.format == weight.format and again.shape == weight.shape
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_awq_packs_columns_in_its_own_order() -> None:
    """AutoAWQ's loop: half byte i of a word holds column order_map[i] of eight."""
    weight = weight_of("awq")
    codes, zeros = unpack_pairs(weight.codes).t(), weight.zero_point
    assert zeros is not None
    packed = torch.zeros(WIDTH, ROWS // 8, dtype=torch.int64)
    packed_zeros = torch.zeros(WIDTH // 128, ROWS // 8, dtype=torch.int64)
    for word in range(ROWS // 8):
        for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed[:, word] |= codes[:, word * 8 + place].long() << (i * 4)
            packed_zeros[:, word] |= zeros.t()[:, word * 8 + place].long() << (i * 4)
    parts = {"qweight": packed.int(), "qzeros": packed_zeros.int(), "scales": weight.scale.t().contiguous()}
    assert torch.equal(read("awq", parts).dequantize(), weight.dequantize())
    assert torch.equal(write("awq", weight)["qweight"], packed.int())


def test_gptq_packs_inputs_in_order_and_zero_points_less_one() -> None:
    """AutoGPTQ's loop, with the groups of neighbours that desc_act=False gives; another order is refused."""
    weight = weight_of("gptq")
    codes, zeros = unpack_pairs(weight.codes).t().long(), weight.zero_point
    assert zeros is not None
    packed, packed_zeros = torch.zeros(WIDTH // 8, ROWS).long(), torch.zeros(WIDTH // 128, ROWS // 8).long()
    for i in range(8):
        packed |= codes[i::8] << (i * 4)
        packed_zeros |= (zeros.t()[:, i::8].long() - 1) << (i * 4)
    parts = {
        "qweight": packed.int(), "qzeros": packed_zeros.int(), "scales": weight.scale.t().contiguous(),
        "g_idx": torch.arange(WIDTH) // 128,
    }  # fmt: skip
    assert torch.equal(read("gptq", parts).dequantize(), weight.dequantize())
    with pytest.raises(FormatError, match="g_idx needs groups of neighbours"):
        read("gptq", {**parts, "g_idx": parts["g_idx"].flip(0)})


def test_bitsandbytes_has_the_earlier_code_in_the_high_half() -> None:
    """Its kernel: `qvals[j] = quantized(2 j) << 4 | quantized(2 j + 1)`."""
    weight = weight_of("bitsandbytes nf4")
    codes = unpack_pairs(weight.codes).flatten()
    packed = (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)
    parts = {"weight": packed, "absmax": weight.scale.flatten(), "shape": torch.tensor([ROWS, WIDTH])}
    assert torch.equal(read("bitsandbytes nf4", parts).dequantize(), weight.dequantize())


def test_gpt_oss_blocks_are_read_as_its_loader_does() -> None:
    """`out[0::2] = table[blocks & 15]; out[1::2] = table[blocks >> 4]; ldexp(out, scales - 127)`."""
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (4, 8, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (4, 8), generator=generator, dtype=torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    wanted = torch.empty(4, 8, 32)
    wanted[..., 0::2], wanted[..., 1::2] = table[(blocks & 15).int()], table[(blocks >> 4).int()]
    wanted = torch.ldexp(wanted, scales.int().unsqueeze(-1) - 127).flatten(-2)
    assert torch.equal(read("gpt-oss mxfp4", {"blocks": blocks, "scales": scales}).dequantize(), wanted)


def test_compressed_nvfp4_divides_by_its_global_scale() -> None:
    """ModelOpt's second scale multiplies, compressed-tensors' divides: one weight in both."""
    weight = weight_of("modelopt nvfp4")
    assert weight.tensor_scale is not None
    parts = {
        "weight_packed": weight.codes, "weight_scale": weight.scale,
        "weight_global_scale": 1 / weight.tensor_scale.reshape(1),
    }  # fmt: skip
    torch.testing.assert_close(read("compressed-tensors nvfp4", parts).dequantize(), weight.dequantize())


@pytest.mark.stress  # the library imports transformers
def test_compressed_tensors_own_packing_is_read() -> None:
    """What the library packs, with zero points along the rows, has the library's numbers."""
    helpers = pytest.importorskip("compressed_tensors.compressors")
    pack: Any = getattr(helpers, "pack_to_int32", None)
    if pack is None:
        from compressed_tensors.compressors.pack_quantized import base as packing

        pack = packing.pack_to_int32
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(-8, 8, (ROWS, WIDTH), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (ROWS, 2), generator=generator, dtype=torch.int8)
    scale = torch.rand(ROWS, 2, generator=generator) + 0.1
    parts = {
        "weight_packed": pack(codes, 4),
        "weight_scale": scale,
        "weight_zero_point": pack(zeros, 4, packed_dim=0),
        "weight_shape": torch.tensor([ROWS, WIDTH]),
    }
    wanted = (codes.float() - zeros.float().repeat_interleave(128, 1)) * scale.repeat_interleave(128, 1)
    assert torch.equal(read("compressed-tensors int4", parts).dequantize(), wanted)


def broken(convention: str) -> list[tuple[dict[str, Tensor], Reason]]:
    parts = write(convention, weight_of(convention))
    first, second = list(parts)[:2]
    return [
        ({name: part for name, part in parts.items() if name != second}, Reason.PACKED_LAYOUT_MISMATCH),
        ({**parts, "extra": torch.ones(1)}, Reason.PACKED_LAYOUT_MISMATCH),
        ({**parts, first: parts[first].double()}, Reason.PACKED_LAYOUT_MISMATCH),
    ]


@pytest.mark.parametrize("convention", WRITTEN)
def test_parts_of_another_layout_are_refused(convention: str) -> None:
    """A part is missing, unknown, or of a dtype that the convention does not pack."""
    for parts, reason in broken(convention):
        with pytest.raises(FormatError) as caught:
            read(convention, parts)
        assert caught.value.reason is reason, convention


def test_conventions_and_formats_are_named() -> None:
    """Every convention has a format of the table and says who defined it; others are refused by name."""
    assert all(rules.format in FORMATS and rules.source and rules.packing for rules in CONVENTIONS.values())
    for call in (lambda: read("exl2", {}), lambda: write("exl2", weight_of("awq"))):
        with pytest.raises(FormatError, match="convention needs one of"):
            call()
    with pytest.raises(FormatError, match="weight needs format int4, got mxfp4"):
        write("awq", weight_of("gpt-oss mxfp4"))
