"""Weights of each convention as `QuantizedTensor`s: bits are moved, no number is rounded again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.checkpoints.folder import mismatch
from layerzero.formats import ELEMENTS, QuantizedTensor, pack_pairs
from layerzero.formats.elements import dtype_name, table_of
from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason

# Where AWQ puts the columns of each group of eight into an int32, from the lowest four bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class WeightTensors:
    """The tensors of one weight: `get(end)` reads one, `has(end)` says whether there is one."""

    weight: str
    says: str
    options: Mapping[str, Any]
    get: Callable[[str], Tensor]
    has: Callable[[str], bool]

    def need(self, end: str, *dtypes: torch.dtype) -> Tensor:
        """A tensor of one of these dtypes.

        Raises: FormatError: there is none, or of another dtype: the folder holds what it does not claim.
        """
        if not self.has(end):
            raise self.mismatch(f"{self.weight}{end}", "none")
        tensor = self.get(end)
        if dtypes and tensor.dtype not in dtypes:
            allowed, got = " or ".join(map(dtype_name, dtypes)), dtype_name(tensor.dtype)
            raise self.mismatch(f"{self.weight}{end} of {allowed}", got)
        return tensor

    def need_shape(self, end: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than its convention gives it.

        Raises: FormatError.
        """
        if tuple(tensor.shape) != shape:
            raise self.mismatch(f"{self.weight}{end} of shape {shape}", tuple(tensor.shape))

    def mismatch(self, needs: str, got: object) -> FormatError:
        """The error of a folder that claims one format and holds another."""
        method = self.options.get("quant_method", "")
        return mismatch("folder", f"{needs}, as {method} stores {self.says}", got)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32, device="cpu")


def _nibbles(packed: Tensor) -> Tensor:
    """The eight four-bit numbers of each int32, lowest first, in a last axis of their own: uint8."""
    return ((packed.unsqueeze(-1) >> _SHIFTS) & 15).to(torch.uint8)


def _int4_by_column(parts: WeightTensors, codes: Tensor, zeros: Tensor, scales: Tensor) -> QuantizedTensor:
    """Codes (K, C), zero points and scales (G, C) of a library whose weights are columns, as rows."""
    shift = int(zeros.max()) if zeros.numel() else 0
    if shift > 15:
        raise FormatError(
            f"{parts.weight}.qzeros", "zero points of 0 to 15", shift, Reason.ZERO_POINT_MISMATCH
        )
    symmetric = bool((zeros == 8).all())
    return QuantizedTensor(
        pack_pairs(codes.T.contiguous()), scales.T.contiguous(), "int4",
        None if symmetric else zeros.T.to(torch.uint8).contiguous(),
    )  # fmt: skip


def _need_order(parts: WeightTensors, end: str, holds: bool, needs: str = "groups of neighbours") -> None:
    if not holds:
        name = f"{parts.weight}{end}"
        raise FormatError(name, needs, "another order", Reason.PACKED_LAYOUT_MISMATCH)


def awq(parts: WeightTensors) -> QuantizedTensor:
    """AutoAWQ's gemm: columns of eight interleaved in an int32, unsigned, with zero points."""
    weight = parts.need(".qweight", torch.int32)
    scales = parts.need(".scales", *_FLOATS)
    wide, groups = weight.shape[-1] * 8, scales.shape[0]
    parts.need_shape(".scales", scales, (groups, wide))
    _need_groups(parts, weight.shape[0], groups)
    order = torch.tensor(_AWQ_ORDER, device="cpu").argsort()
    codes = _nibbles(weight)[..., order].flatten(-2)
    zeros = weight.new_full((groups, wide), 8, dtype=torch.uint8)
    if parts.options.get("zero_point", True) or parts.has(".qzeros"):
        packed = parts.need(".qzeros", torch.int32)
        parts.need_shape(".qzeros", packed, (groups, wide // 8))
        zeros = _nibbles(packed)[..., order].flatten(-2)
    return _int4_by_column(parts, codes, zeros, scales)


def gptq(parts: WeightTensors) -> QuantizedTensor:
    """AutoGPTQ's: eight rows of a column in an int32; zero points are stored less one, but for gptq_v2."""
    weight = parts.need(".qweight", torch.int32)
    scales = parts.need(".scales", *_FLOATS)
    width, wide, groups = weight.shape[0] * 8, weight.shape[1], scales.shape[0]
    parts.need_shape(".scales", scales, (groups, wide))
    size = _need_groups(parts, width, groups)
    if parts.has(".g_idx"):
        order = parts.need(".g_idx", torch.int32, torch.int64)
        holds = torch.equal(order.long(), torch.arange(width, device="cpu") // size)
        _need_order(parts, ".g_idx", holds, "groups of neighbours: weights quantized without desc_act")
    elif parts.options.get("desc_act") and groups > 1:
        parts.need(".g_idx")
    codes = _nibbles(weight).transpose(1, 2).reshape(width, wide)
    packed = parts.need(".qzeros", torch.int32)
    parts.need_shape(".qzeros", packed, (groups, wide // 8))
    stored = _nibbles(packed).flatten(-2).int()
    layout = parts.options.get("checkpoint_format")
    if layout not in (None, "gptq", "gptq_v2"):
        raise parts.mismatch("checkpoint_format gptq or gptq_v2", layout)
    zeros = stored if layout == "gptq_v2" else stored + 1
    return _int4_by_column(parts, codes, zeros, scales)


def _need_groups(parts: WeightTensors, width: int, groups: int) -> int:
    """Numbers of a group, as the scales say it and as the configuration does."""
    claimed = parts.options.get("group_size", parts.options.get("q_group_size", -1))
    size = width if claimed in (-1, None) else int(claimed)
    if size < 1 or width % size or width // size != groups:
        raise parts.mismatch(
            f"{parts.weight}.scales with groups of {size} of {width} numbers", f"{groups} groups"
        )
    return size


def nf4(parts: WeightTensors) -> QuantizedTensor:
    """bitsandbytes' NF4: the earlier number in the high half of a byte, scales maybe quantized themselves."""
    state = json.loads(bytes(parts.need(".weight.quant_state.bitsandbytes__nf4", torch.uint8).tolist()))
    shape, block = tuple(state["shape"]), int(state["blocksize"])
    if state.get("quant_type") != "nf4" or len(shape) != 2 or shape[1] % block:
        raise parts.mismatch(
            f"{parts.weight} of nf4 in blocks that divide its rows",
            f"{state.get('quant_type')} {shape} by {block}",
        )
    table = parts.need(".weight.quant_map", torch.float32)
    if not torch.allclose(table, table_of(ELEMENTS["nf4"], torch.float32, table.device), atol=1e-6):
        raise parts.mismatch(f"{parts.weight}.quant_map of NF4's sixteen values", "others")
    packed = parts.need(".weight", torch.uint8).flatten()
    if packed.numel() * 2 != shape[0] * shape[1]:
        raise parts.mismatch(f"{parts.weight} of {shape[0] * shape[1] // 2} bytes", packed.numel())
    codes = (packed >> 4 | packed << 4).view(shape[0], shape[1] // 2)
    is_nested = "nested_blocksize" in state
    scale = parts.need(".weight.absmax", *((torch.uint8,) if is_nested else _FLOATS))
    parts.need_shape(".weight.absmax", scale, (shape[0] * shape[1] // block,))
    if is_nested:
        size, nested = int(state["nested_blocksize"]), parts.need(".weight.nested_absmax", torch.float32)
        values = parts.need(".weight.nested_quant_map", torch.float32)[scale.long()]
        parts.need_shape(".weight.nested_absmax", nested, (-(-values.numel() // size),))
        blocks = torch.arange(values.numel(), device="cpu") // size
        # That of a block of zeros may come back below zero, by the rounding of its own eight bits.
        scale = (values * nested[blocks] + float(state["nested_offset"])).clamp_min(0)
    return QuantizedTensor(codes, scale.float().view(shape[0], -1), "nf4")


def mxfp4(parts: WeightTensors) -> QuantizedTensor:
    """gpt-oss's experts: blocks (E, R, G, 16) and exponents (E, R, G)."""
    blocks, scales = parts.need("_blocks", torch.uint8), parts.need("_scales", torch.uint8)
    if blocks.dim() != 4 or blocks.shape[-1] != 16:
        raise parts.mismatch(f"{parts.weight}_blocks of shape (E, R, G, 16)", tuple(blocks.shape))
    parts.need_shape("_scales", scales, tuple(blocks.shape[:-1]))
    return QuantizedTensor(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu), "mxfp4")


def fp8_block(parts: WeightTensors) -> QuantizedTensor:
    """DeepSeek's: float8 with a scale for each block to multiply it by; ue8m0 stores powers of two."""
    weight = parts.need(".weight", torch.float8_e4m3fn)
    scale = parts.need(".weight_scale_inv", torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
    scale = scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
    side = int(parts.options["weight_block_size"][0])
    parts.need_shape(".weight_scale_inv", scale, (-(-weight.shape[0] // side), -(-weight.shape[1] // side)))
    return QuantizedTensor(weight, scale, "fp8_e4m3", block_size=side)


def modelopt(parts: WeightTensors) -> QuantizedTensor:
    """ModelOpt's FP8 with one scale, and its NVFP4 with two levels."""
    if parts.says == "FP8":
        scale = parts.need(".weight_scale", torch.float32)
        return QuantizedTensor(parts.need(".weight", torch.float8_e4m3fn), _one_level(scale), "fp8_e4m3")
    return _nvfp4(parts, ".weight", parts.need(".weight_scale_2", torch.float32))


def _one_level(scale: Tensor) -> Tensor:
    return scale.reshape(()) if scale.numel() == 1 else scale


def compressed_tensors(parts: WeightTensors) -> QuantizedTensor:
    """compressed-tensors': the claimed format's reader, in a mixed folder the one that the tensors show."""
    read = COMPRESSED[parts.says]
    if read is None:
        packed = _mxfp4_pack if parts.has(".weight_packed") else _plain_codes
        whole = _int_pack if parts.has(".weight_shape") else packed
        read = _nvfp4_pack if parts.has(".weight_global_scale") else whole
    weight = read(parts)
    _need_claimed(parts, weight)
    return weight


def _claims(parts: WeightTensors) -> list[Mapping[str, Any]]:
    """How the configuration describes the weights of each of its groups."""
    groups = (parts.options.get("config_groups") or {}).values()
    return [group["weights"] for group in groups if group.get("weights")]


def _need_claimed(parts: WeightTensors, weight: QuantizedTensor) -> None:
    """Refuse bits, zero points, orders and groups that no claim has: codes would be read as other numbers."""
    claims = _claims(parts)
    if not claims:
        return
    bits, sizes = {each.get("num_bits", 8) for each in claims}, {each.get("group_size") for each in claims}
    code_bits = weight.form.element.bits
    if code_bits not in bits:
        raise parts.mismatch(f"{parts.weight} in codes of {' or '.join(map(str, bits))} bits", code_bits)
    if all(each.get("symmetric") is False for each in claims):
        parts.need(".weight_zero_point")
    if all(each.get("actorder") in ("group", "dynamic", True) for each in claims):
        parts.need(".weight_g_idx")
    if weight.granularity == "group" and weight.form.open_groups and weight.group_size not in sizes:
        needs = f"{parts.weight}.weight_scale of groups of {' or '.join(map(str, sizes))}"
        raise parts.mismatch(needs, weight.group_size)


def _int_pack(parts: WeightTensors) -> QuantizedTensor:
    """Four- or eight-bit integers, unsigned by half their range, from the lowest bits of an int32 on."""
    packed = parts.need(".weight_packed", torch.int32)
    rows, width = (int(size) for size in parts.need(".weight_shape").tolist())
    scale = parts.need(".weight_scale", *_FLOATS)
    if parts.has(".weight_g_idx"):
        order = parts.get(".weight_g_idx").long()
        parts.need_shape(".weight_g_idx", order, (width,))  # before as many numbers are made
        groups = torch.arange(width, device="cpu") // max(1, width // max(1, scale.shape[-1]))
        holds = torch.equal(order, groups) or bool((order == -1).all())  # -1: no order was stored
        _need_order(parts, ".weight_g_idx", holds)
    numbers = packed.shape[-1] * 4
    if packed.shape[0] == rows and -(-width // 4) == packed.shape[-1]:
        unsigned = packed.contiguous().view(torch.uint8).view(rows, numbers)[:, :width]
        if parts.has(".weight_zero_point"):
            stored = parts.need(".weight_zero_point", torch.int32).contiguous().view(torch.uint8)
            _need_symmetric(parts, bool((stored != 128).any()))
        return QuantizedTensor((unsigned.int() - 128).to(torch.int8), _one_level(scale), "int8")
    parts.need_shape(".weight_packed", packed, (rows, -(-width // 8)))
    if width % 2:
        raise parts.mismatch(f"{parts.weight}.weight_shape of an even number of columns", width)
    codes = packed.contiguous().view(torch.uint8)[:, : width // 2]
    zero_point = None
    if parts.has(".weight_zero_point"):
        stored = parts.need(".weight_zero_point", torch.int32)  # packed along the rows
        zero_point = _nibbles(stored).transpose(1, 2).reshape(-1, stored.shape[1])[:rows].contiguous()
    return QuantizedTensor(codes.contiguous(), scale, "int4", zero_point)


def _need_symmetric(parts: WeightTensors, shifted: bool) -> None:
    if shifted:
        name, needs = f"{parts.weight}.weight_zero_point", "zeros: symmetric codes"
        raise FormatError(name, needs, "others", Reason.ZERO_POINT_MISMATCH)


def _nvfp4(parts: WeightTensors, codes_end: str, tensor_scale: Tensor) -> QuantizedTensor:
    codes = parts.need(codes_end, torch.uint8)
    scale = parts.need(".weight_scale", torch.float8_e4m3fn)
    parts.need_shape(".weight_scale", scale, (codes.shape[0], codes.shape[1] // 8))
    return QuantizedTensor(codes, scale, "nvfp4", tensor_scale=tensor_scale.reshape(()))


def _nvfp4_pack(parts: WeightTensors) -> QuantizedTensor:
    return _nvfp4(parts, ".weight_packed", 1.0 / parts.need(".weight_global_scale", torch.float32))


def _mxfp4_pack(parts: WeightTensors) -> QuantizedTensor:
    codes = parts.need(".weight_packed", torch.uint8)
    scale = parts.need(".weight_scale", torch.uint8, torch.float8_e8m0fnu)
    parts.need_shape(".weight_scale", scale, (codes.shape[0], codes.shape[1] // 16))
    return QuantizedTensor(codes, scale.view(torch.float8_e8m0fnu), "mxfp4")


def _plain_codes(parts: WeightTensors) -> QuantizedTensor:
    """int8 or float8 codes under the weight's own name."""
    dtypes_of = {"int-quantized": (torch.int8,), "float-quantized": (torch.float8_e4m3fn,)}
    codes = parts.need(".weight", *dtypes_of.get(parts.says, (torch.int8, torch.float8_e4m3fn)))
    scale = parts.need(".weight_scale", *_FLOATS)
    if parts.has(".weight_zero_point"):
        _need_symmetric(parts, bool(parts.get(".weight_zero_point").any()))
    name = "int8" if codes.dtype == torch.int8 else "fp8_e4m3"
    if scale.numel() > 1:
        for side in _block_sides(parts):
            if tuple(scale.shape) == (-(-codes.shape[0] // side), -(-codes.shape[1] // side)):
                return QuantizedTensor(codes, scale.float(), name, block_size=side)
        if scale.dim() == 2 and len(scale) != len(codes):
            needs = "one block_structure of two equal sides beside scales by block"
            raise parts.mismatch(needs, tuple(scale.shape))
    return QuantizedTensor(codes, _one_level(scale), name)


def _block_sides(parts: WeightTensors) -> list[int]:
    sides = {tuple(each.get("block_structure") or ()) for each in _claims(parts)}
    return [int(side[0]) for side in sides if len(side) == 2 and side[0] == side[1]]


COMPRESSED: Mapping[str, Callable[[WeightTensors], QuantizedTensor] | None] = MappingProxyType(
    {
        "pack-quantized": _int_pack, "int-quantized": _plain_codes, "float-quantized": _plain_codes,
        "naive-quantized": _plain_codes, "nvfp4-pack-quantized": _nvfp4_pack,
        "mxfp4-pack-quantized": _mxfp4_pack, "mixed-precision": None,
    }
)  # fmt: skip
