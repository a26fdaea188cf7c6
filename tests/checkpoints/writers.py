"""Small folders of quantized weights, as each library lays them out, beside the numbers they stand for.

compressed-tensors writes its own. The layouts of AWQ, GPTQ, bitsandbytes, gpt-oss, ModelOpt and DeepSeek are
written here from what their sources say: those libraries need a GPU, or more than a test may load. Where
bitsandbytes is installed its own quantization is compared with (`test_readers.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from layerzero.formats import QuantizedTensor, unpack_pairs

Written = tuple[dict[str, Tensor], dict[str, Any], Tensor]
NAME = "model.layers.0.self_attn.q_proj"
ROWS, WIDTH, GROUP = 16, 128, 32


def weight(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    """The same numbers in every test."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3)) * 0.1


def save(folder: Path, tensors: dict[str, Tensor], said: dict[str, Any]) -> Path:
    """A folder with these tensors and this quantization_config."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def int32_of(nibbles: Tensor) -> Tensor:
    """Eight four-bit numbers in the last axis as one int32, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    words = (nibbles.long() << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _columns(symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (K, C), zero points and scales (G, C) of four-bit columns, and their numbers (C, K)."""
    made = QuantizedTensor.quantize(weight(), "int4", group_size=GROUP, symmetric=symmetric)
    scale = made.scale.half()
    zero = torch.full_like(made.scale, 8) if made.zero_point is None else made.zero_point
    codes = unpack_pairs(made.codes)
    shared = scale.float().repeat_interleave(GROUP, 1)
    numbers = (codes.float() - zero.float().repeat_interleave(GROUP, 1)) * shared
    return codes.T, zero.T.to(torch.uint8), scale.T, numbers


def awq() -> Written:
    """AutoAWQ, gemm: utils/packing_utils.py."""
    codes, zero, scale, numbers = _columns(symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        f"{NAME}.qweight": int32_of(codes.unflatten(1, (-1, 8))[..., order]),
        f"{NAME}.qzeros": int32_of(zero.unflatten(1, (-1, 8))[..., order]),
        f"{NAME}.scales": scale,
    }
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return tensors, said, numbers


def gptq(version: str = "gptq") -> Written:
    """AutoGPTQ: nn_modules/qlinear/qlinear_cuda.py; zero points less one but for gptq_v2."""
    codes, zero, scale, numbers = _columns(symmetric=True)
    stored = zero if version == "gptq_v2" else zero - 1
    tensors = {
        f"{NAME}.qweight": int32_of(codes.unflatten(0, (-1, 8)).transpose(1, 2)),
        f"{NAME}.qzeros": int32_of(stored.unflatten(1, (-1, 8))),
        f"{NAME}.scales": scale,
        f"{NAME}.g_idx": (torch.arange(WIDTH) // GROUP).to(torch.int32),
    }
    said = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": version, "sym": True}
    return tensors, said, numbers


def nf4(nested: bool = True) -> Written:
    """bitsandbytes: functional.py, QuantState.as_dict(packed=True)."""
    made = QuantizedTensor.quantize(weight(), "nf4", group_size=64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [ROWS, WIDTH]}
    absmax = made.scale.flatten()
    tensors: dict[str, Tensor] = {}
    if nested:
        table = torch.linspace(-1, 1, 256)
        offset = absmax.mean()
        size = (absmax - offset).abs().max()
        codes = ((absmax - offset) / size - table[:, None]).abs().argmin(0)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        tensors |= {
            f"{NAME}.weight.nested_absmax": size.view(1), f"{NAME}.weight.nested_quant_map": table,
        }  # fmt: skip
        absmax, stored = table[codes] * size + offset, codes.to(torch.uint8)
    else:
        stored = absmax
    values = torch.tensor(made.form.element.values)
    numbers = values[unpack_pairs(made.codes).long()] * absmax.view(ROWS, -1).repeat_interleave(64, 1)
    tensors |= {
        f"{NAME}.weight": (made.codes >> 4 | made.codes << 4).view(-1, 1),
        f"{NAME}.weight.absmax": stored,
        f"{NAME}.weight.quant_map": values,
        f"{NAME}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return tensors, said, numbers


def mxfp4() -> Written:
    """gpt-oss: blocks of 16 bytes and their exponents, for all experts."""
    made = QuantizedTensor.quantize(weight(2 * ROWS).view(2, ROWS, WIDTH), "mxfp4")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": made.codes.unflatten(-1, (-1, 16)), f"{name}_scales": made.scale.view(torch.uint8)
    }  # fmt: skip
    return tensors, {"quant_method": "mxfp4"}, made.dequantize()


def nvfp4() -> Written:
    """ModelOpt: hf_quant_config.json's quant_algo NVFP4."""
    made = QuantizedTensor.quantize(weight(), "nvfp4")
    assert made.tensor_scale is not None
    tensors = {
        f"{NAME}.weight": made.codes, f"{NAME}.weight_scale": made.scale,
        f"{NAME}.weight_scale_2": made.tensor_scale, f"{NAME}.input_scale": torch.ones(()),
    }  # fmt: skip
    return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, made.dequantize()


def modelopt_fp8() -> Written:
    """ModelOpt: one scale a weight."""
    made = QuantizedTensor.quantize(weight(), "fp8_e4m3", granularity="tensor")
    tensors = {f"{NAME}.weight": made.codes, f"{NAME}.weight_scale": made.scale}
    return tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}, made.dequantize()


def fp8_block() -> Written:
    """DeepSeek-V3: inference/kernel.py; blocks at the edges are smaller."""
    made = QuantizedTensor.quantize(weight(40, 72), "fp8_e4m3", granularity="block", group_size=32)
    tensors = {f"{NAME}.weight": made.codes, f"{NAME}.weight_scale_inv": made.scale}
    return tensors, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}, made.dequantize()


WRITERS: dict[str, Callable[[], Written]] = {
    "awq": awq, "gptq": gptq, "gptq_v2": lambda: gptq("gptq_v2"), "nf4": nf4,
    "nf4 in one level": lambda: nf4(nested=False), "mxfp4": mxfp4, "nvfp4": nvfp4,
    "modelopt fp8": modelopt_fp8, "fp8 by block": fp8_block,
}  # fmt: skip
