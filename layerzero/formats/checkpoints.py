"""How checkpoints keep quantized weights: each convention as data, read into a QuantizedTensor.

A convention names the parts of a weight as they stand in a checkpoint and how codes are packed there; `read`
lays them out as `QuantizedTensor` has them and `write` is its inverse, for those that are written here. Names
are of the model's module: `model.layers.0.mlp.up_proj` + `.` + part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.formats.checks import need_tensor
from layerzero.formats.elements import pack_pairs, unpack_pairs
from layerzero.formats.errors import FormatError
from layerzero.formats.quantized_tensor import QuantizedTensor
from layerzero.spec.reasons import Reason

# The half byte of an int32, from the lowest, in which AWQ keeps each of eight codes.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
Parts = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Convention:
    """A way to keep weights: `parts` by their names in a checkpoint, those of `optional` where they are.

    `packing` says in words where codes stand, `zero_point` how zero points do; `source` is who defined it.
    """

    name: str
    format: str
    parts: tuple[str, ...]
    packing: str
    source: str
    read: Callable[[Parts], QuantizedTensor] = field(repr=False)
    write: Callable[[QuantizedTensor], dict[str, Tensor]] | None = field(default=None, repr=False)
    optional: tuple[str, ...] = ()
    zero_point: str = "none"


def read(convention: str, parts: Parts) -> QuantizedTensor:
    """The weight (C, K) that parts of a checkpoint hold, by the names that its convention gives them.

    Raises: FormatError: no such convention, a part is missing or of another dtype or shape than the
    convention
        packs, or what they say does not fit the format.
    """
    if convention not in CONVENTIONS:
        needs = f"one of {', '.join(CONVENTIONS)}"
        raise FormatError("convention", needs, repr(convention), Reason.QUANT_FORMAT_UNSUPPORTED)
    rules = CONVENTIONS[convention]
    missing = [name for name in rules.parts if name not in parts]
    unknown = [name for name in parts if name not in (*rules.parts, *rules.optional)]
    if missing or unknown:
        needs = f"{', '.join(rules.parts)} of {convention}"
        raise FormatError("parts", needs, ", ".join(parts) or "none", Reason.PACKED_LAYOUT_MISMATCH)
    for name, part in parts.items():
        need_tensor(name, part)
    return rules.read(parts)


def write(convention: str, weight: QuantizedTensor) -> dict[str, Tensor]:
    """A weight's parts as a convention keeps them, by name; the inverse of `read`.

    Raises: FormatError: no such convention, none that is written here, or a weight of another format.
    """
    rules = CONVENTIONS.get(convention)
    if rules is None or rules.write is None:
        needs = f"one of {', '.join(name for name, each in CONVENTIONS.items() if each.write)}"
        raise FormatError("convention", needs, repr(convention), Reason.QUANT_FORMAT_UNSUPPORTED)
    if weight.format != rules.format:
        raise FormatError("weight", f"format {rules.format}", weight.format, Reason.QUANT_FORMAT_UNSUPPORTED)
    return rules.write(weight)


def _need(name: str, part: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
    if part.dtype != dtype or part.dim() != rank:
        needs = f"{str(dtype).removeprefix('torch.')} of {rank} dimensions"
        got = f"{str(part.dtype).removeprefix('torch.')} of shape {tuple(part.shape)}"
        raise FormatError(name, needs, got, Reason.PACKED_LAYOUT_MISMATCH)
    return part


def _nibbles(words: Tensor) -> Tensor:
    """Eight codes (..., 8 n) of each int32 (..., n), the lowest half byte first."""
    return unpack_pairs(words.contiguous().view(torch.uint8))


def _words(codes: Tensor) -> Tensor:
    return pack_pairs(codes).contiguous().view(torch.int32)


def _same(wanted: tuple[int, ...], name: str, part: Tensor) -> None:
    if tuple(part.shape) != wanted:
        raise FormatError(name, f"shape {wanted}", tuple(part.shape), Reason.PACKED_LAYOUT_MISMATCH)


def _read_awq(parts: Parts) -> QuantizedTensor:
    """qweight (K, C / 8), qzeros (G, C / 8), scales (G, C): along the columns of the weight's transpose."""
    packed, zeros = (_need(name, parts[name], torch.int32, 2) for name in ("qweight", "qzeros"))
    scales = parts["scales"]
    groups, columns = zeros.shape[0], packed.shape[1] * 8
    _same((groups, columns), "scales", scales)
    _same((groups, packed.shape[1]), "qzeros", zeros)

    def unwound(words: Tensor) -> Tensor:
        in_order = _nibbles(words).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)]
        return in_order.flatten(-2).t().contiguous()

    return QuantizedTensor(pack_pairs(unwound(packed)), scales.t().contiguous(), "int4", unwound(zeros))


def _write_awq(weight: QuantizedTensor) -> dict[str, Tensor]:
    def wound(codes: Tensor) -> Tensor:
        order = torch.tensor(_AWQ_ORDER).argsort()
        return _words(codes.t().contiguous().unflatten(-1, (-1, 8))[..., order].flatten(-2))

    zeros = _zero_points(weight)
    return {
        "qweight": wound(unpack_pairs(weight.codes)),
        "qzeros": wound(zeros),
        "scales": weight.scale.t().half(),
    }


def _zero_points(weight: QuantizedTensor) -> Tensor:
    given = weight.zero_point
    return torch.full(weight.scale.shape, 8, dtype=torch.uint8) if given is None else given


def _read_gptq(parts: Parts) -> QuantizedTensor:
    """qweight (K / 8, C), eight k in an int32; qzeros (G, C / 8), one less than they are; scales (G, C)."""
    packed, zeros = (_need(name, parts[name], torch.int32, 2) for name in ("qweight", "qzeros"))
    scales, inner = parts["scales"], packed.shape[0] * 8
    groups, columns = zeros.shape[0], packed.shape[1]
    _same((groups, columns), "scales", scales)
    if inner % groups:
        raise FormatError("qzeros", f"rows that divide {inner}", groups, Reason.GROUP_DOES_NOT_DIVIDE)
    order = parts.get("g_idx")
    straight = torch.arange(inner, device=packed.device) // (inner // groups)
    if order is not None and not torch.equal(order.to(straight.dtype), straight):
        needs = "groups of neighbours, as desc_act=False writes them"
        raise FormatError("g_idx", needs, "another order", Reason.PACKED_LAYOUT_MISMATCH)
    zero = (_nibbles(zeros) + 1).t()
    if bool((zero > 15).any()):
        raise FormatError("qzeros", "zero points of at most 15", "16", Reason.ZERO_POINT_MISMATCH)
    codes = pack_pairs(_nibbles(packed.t()))
    return QuantizedTensor(codes, scales.t().contiguous(), "int4", zero.contiguous())


def _write_gptq(weight: QuantizedTensor) -> dict[str, Tensor]:
    zeros = _zero_points(weight)
    if bool((zeros == 0).any()):
        raise FormatError("zero_point", "at least 1 for gptq", 0, Reason.ZERO_POINT_MISMATCH)
    inner = weight.shape[-1]
    group = weight.group_size or inner
    return {
        "qweight": weight.codes.contiguous().view(torch.int32).t().contiguous(),
        "qzeros": _words((zeros - 1).t().contiguous()), "scales": weight.scale.t().half(),
        "g_idx": (torch.arange(inner) // group).int(),
    }  # fmt: skip


def _read_compressed_int4(parts: Parts) -> QuantizedTensor:
    """weight_packed (C, K / 8) in order; weight_scale (C, G); weight_zero_point (C / 8, G), down the rows."""
    packed = _need("weight_packed", parts["weight_packed"], torch.int32, 2)
    zeros, scale = parts.get("weight_zero_point"), parts["weight_scale"]
    shape = parts.get("weight_shape")
    if shape is not None and shape.tolist() != [packed.shape[0], packed.shape[1] * 8]:
        needs = f"{[packed.shape[0], packed.shape[1] * 8]} for weight_packed"
        raise FormatError("weight_shape", needs, shape.tolist(), Reason.PACKED_LAYOUT_MISMATCH)
    if zeros is not None:
        along_rows = _nibbles(_need("weight_zero_point", zeros, torch.int32, 2).t())
        zeros = along_rows.t()[: packed.shape[0]].contiguous()
    return QuantizedTensor(packed.contiguous().view(torch.uint8), scale, "int4", zeros)


def _write_compressed_int4(weight: QuantizedTensor) -> dict[str, Tensor]:
    found = {
        "weight_packed": weight.codes.contiguous().view(torch.int32),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zero_point is not None:
        padded = functional.pad(weight.zero_point.t(), (0, -weight.shape[0] % 8))
        found["weight_zero_point"] = _words(padded).t().contiguous()
    return found


def _read_bytes(form: str, dtype: torch.dtype, parts: Parts) -> QuantizedTensor:
    """weight (C, K), weight_scale of one number, (C,), (C, 1) or (C, G)."""
    weight, scale = _need("weight", parts["weight"], dtype, 2), parts["weight_scale"]
    one = scale.numel() == 1 and weight.shape[0] != 1
    return QuantizedTensor(weight, scale.reshape(()) if one else scale.reshape(weight.shape[0], -1), form)


def _write_bytes(weight: QuantizedTensor) -> dict[str, Tensor]:
    return {"weight": weight.codes, "weight_scale": weight.scale}


def _read_fp8_blocks(parts: Parts) -> QuantizedTensor:
    """weight (C, K) and weight_scale_inv (C / 128, K / 128), which multiplies, whatever its name says."""
    weight = _need("weight", parts["weight"], torch.float8_e4m3fn, 2)
    return QuantizedTensor(weight, parts["weight_scale_inv"], "fp8_e4m3", block_size=128)


def _read_nf4(parts: Parts) -> QuantizedTensor:
    """weight (C K / 2, 1), the earlier code in the high half; absmax of 64 neighbours; shape (C, K)."""
    packed, shape = parts["weight"], parts["shape"].tolist()
    absmax = _need("absmax", parts["absmax"], torch.float32, 1)
    _same((shape[0] * shape[1] // 2, 1), "weight", _need("weight", packed, torch.uint8, 2))
    size = shape[0] * shape[1] // max(1, absmax.numel())
    if size == 0 or shape[1] % size:
        raise FormatError(
            "absmax", "blocks that divide a row", f"{size} of {shape[1]}", Reason.GROUP_DOES_NOT_DIVIDE
        )
    swapped = (packed >> 4 | packed << 4).view(shape[0], shape[1] // 2)
    return QuantizedTensor(swapped, absmax.view(shape[0], -1), "nf4")


def _write_nf4(weight: QuantizedTensor) -> dict[str, Tensor]:
    codes = weight.codes
    return {
        "weight": (codes >> 4 | codes << 4).reshape(-1, 1), "absmax": weight.scale.reshape(-1).float(),
        "shape": torch.tensor(weight.shape),
    }  # fmt: skip


def _read_mxfp4(parts: Parts) -> QuantizedTensor:
    """blocks (..., C, G, 16) of 32 codes, the earlier in the low half; scales (..., C, G), exponent + 127."""
    blocks, scales = parts["blocks"], parts["scales"]
    if blocks.dtype != torch.uint8 or blocks.shape[-1:] != (16,) or scales.dtype != torch.uint8:
        got = f"{blocks.dtype} {tuple(blocks.shape)} and {scales.dtype}"
        raise FormatError(
            "blocks", "uint8 (..., C, G, 16) and scales of uint8", got, Reason.PACKED_LAYOUT_MISMATCH
        )
    _same(tuple(blocks.shape[:-1]), "scales", scales)
    return QuantizedTensor(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu), "mxfp4")


def _write_mxfp4(weight: QuantizedTensor) -> dict[str, Tensor]:
    return {"blocks": weight.codes.unflatten(-1, (-1, 16)), "scales": weight.scale.view(torch.uint8)}


def _read_nvfp4(parts: Parts) -> QuantizedTensor:
    """weight (C, K / 2), weight_scale (C, K / 16) e4m3, weight_scale_2 one number that multiplies."""
    second = parts["weight_scale_2"].float().reshape(())
    return QuantizedTensor(parts["weight"], parts["weight_scale"], "nvfp4", None, second)


def _write_nvfp4(weight: QuantizedTensor) -> dict[str, Tensor]:
    second = torch.ones(()) if weight.tensor_scale is None else weight.tensor_scale
    return {"weight": weight.codes, "weight_scale": weight.scale, "weight_scale_2": second}


def _read_compressed_nvfp4(parts: Parts) -> QuantizedTensor:
    """weight_packed and weight_scale as ModelOpt's; weight_global_scale is one number that divides."""
    second = 1.0 / parts["weight_global_scale"].float().reshape(())
    return QuantizedTensor(parts["weight_packed"], parts["weight_scale"], "nvfp4", None, second)


CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        rules.name: rules
        for rules in (
            Convention(
                "awq",
                "int4",
                ("qweight", "qzeros", "scales"),
                "int32 along C, places 0 2 4 6 1 3 5 7",
                "arXiv 2306.00978; AutoAWQ, version gemm",
                _read_awq,
                _write_awq,
                zero_point="as the codes",
            ),
            Convention(
                "gptq",
                "int4",
                ("qweight", "qzeros", "scales"),
                "int32 along K, in order",
                "arXiv 2210.17323; AutoGPTQ, checkpoint_format gptq",
                _read_gptq,
                _write_gptq,
                ("g_idx",),
                "int32 along C, less 1",
            ),
            Convention(
                "compressed-tensors int4",
                "int4",
                ("weight_packed", "weight_scale"),
                "int32 along K, in order",
                "compressed-tensors, pack-quantized",
                _read_compressed_int4,
                _write_compressed_int4,
                ("weight_zero_point", "weight_shape"),
                "int32 along C, in order",
            ),
            Convention(
                "compressed-tensors int8",
                "int8",
                ("weight", "weight_scale"),
                "a code each",
                "compressed-tensors, int-quantized",
                functools.partial(_read_bytes, "int8", torch.int8),
                _write_bytes,
            ),
            Convention(
                "compressed-tensors fp8",
                "fp8_e4m3",
                ("weight", "weight_scale"),
                "a code each",
                "compressed-tensors, float-quantized",
                functools.partial(_read_bytes, "fp8_e4m3", torch.float8_e4m3fn),
                _write_bytes,
            ),
            Convention(
                "compressed-tensors nvfp4",
                "nvfp4",
                ("weight_packed", "weight_scale", "weight_global_scale"),
                "two codes a byte, low half first",
                "compressed-tensors, nvfp4-pack-quantized",
                _read_compressed_nvfp4,
            ),
            Convention(
                "bitsandbytes nf4",
                "nf4",
                ("weight", "absmax", "shape"),
                "two codes a byte, high half first",
                "bitsandbytes, quant_type nf4 without nested absmax",
                _read_nf4,
                _write_nf4,
            ),
            Convention(
                "gpt-oss mxfp4",
                "mxfp4",
                ("blocks", "scales"),
                "two codes a byte, low half first",
                "github.com/openai/gpt-oss",
                _read_mxfp4,
                _write_mxfp4,
            ),
            Convention(
                "modelopt nvfp4",
                "nvfp4",
                ("weight", "weight_scale", "weight_scale_2"),
                "two codes a byte, low half first",
                "NVIDIA ModelOpt, hf_quant_config NVFP4",
                _read_nvfp4,
                _write_nvfp4,
            ),
            Convention(
                "deepseek fp8",
                "fp8_e4m3",
                ("weight", "weight_scale_inv"),
                "a code each, scales of blocks of 128 x 128",
                "arXiv 2412.19437, section 3.3",
                _read_fp8_blocks,
                lambda weight: {"weight": weight.codes, "weight_scale_inv": weight.scale},
            ),
        )
    }
)
