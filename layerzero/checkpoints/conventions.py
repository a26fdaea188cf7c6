"""What a folder claims of its weights: the library's name for it, as data, and the reader that follows.

Sources: compressed-tensors 0.20 (compressors/*), AutoAWQ 0.2 (utils/packing_utils.py), AutoGPTQ and GPTQModel
(nn_modules/qlinear), bitsandbytes 0.50 (functional.py: QuantState), gpt-oss in transformers
(integrations/mxfp4.py), ModelOpt's hf_quant_config.json, and DeepSeek-V3's inference/kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layerzero.checkpoints import readers
from layerzero.checkpoints.folder import mismatch, read_json


@dataclass(frozen=True)
class CheckpointFormat:
    """How one library stores quantized weights.

    `mark` is the end of the name of the tensor that every quantized weight has, `parts` the ends of all that
    it may have; `read` makes the weight out of them; `name` is the end of the weight's own name.
    """

    method: str
    mark: str
    parts: tuple[str, ...]
    read: Callable[[readers.WeightTensors], Any]
    name: str = ".weight"


@dataclass(frozen=True)
class QuantizationConfig:
    """What the configuration of a folder says: its convention, the format by the library's name, options."""

    convention: CheckpointFormat
    says: str
    options: Mapping[str, Any] = field(default_factory=dict)


_PACKED = (".qweight", ".qzeros", ".scales", ".g_idx", ".bias_packed")
_STATE = ".weight.quant_state.bitsandbytes__nf4"
_BITSANDBYTES = (
    _STATE, ".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax",
    ".weight.nested_quant_map",
)  # fmt: skip
_MODELOPT = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")
_COMPRESSED = (
    ".weight", ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point",
    ".weight_global_scale", ".weight_g_idx", ".input_scale", ".input_global_scale", ".input_zero_point",
)  # fmt: skip
_CONVENTIONS = (
    CheckpointFormat("awq", ".qweight", _PACKED, readers.awq),
    CheckpointFormat("gptq", ".qweight", _PACKED, readers.gptq),
    CheckpointFormat("bitsandbytes", _STATE, _BITSANDBYTES, readers.nf4),
    CheckpointFormat("mxfp4", "_blocks", ("_blocks", "_scales"), readers.mxfp4, name=""),
    CheckpointFormat("fp8", ".weight_scale_inv", (".weight", ".weight_scale_inv"), readers.fp8_block),
    CheckpointFormat("modelopt", ".weight_scale", _MODELOPT, readers.modelopt),
    CheckpointFormat("compressed-tensors", ".weight_scale", _COMPRESSED, readers.compressed_tensors),
)
CONVENTIONS: Mapping[str, CheckpointFormat] = MappingProxyType({each.method: each for each in _CONVENTIONS})


def claim_of(folder: Path) -> QuantizationConfig:
    """What `config.json`, or ModelOpt's own file beside it, says of the folder's weights.

    Raises: FileNotFoundError: there is no config.json. FormatError: it says nothing, or names a method or a
        format that is not read here.
    """
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"folder needs config.json, got none in {folder}")
    config = read_json(folder / "config.json").get("quantization_config")
    if config is None:
        own = read_json(folder / "hf_quant_config.json").get("quantization")
        config = {"quant_method": "modelopt", **own} if isinstance(own, dict) else None
    if not isinstance(config, dict):
        raise mismatch("config.json", "a quantization_config", "none")
    method = str(config.get("quant_method", ""))
    convention = CONVENTIONS.get(method)
    if convention is None:
        raise mismatch("config.json", f"a quant_method of {', '.join(CONVENTIONS)}", repr(method))
    return QuantizationConfig(convention, _says(method, config), config)


def _says(method: str, config: Mapping[str, Any]) -> str:
    """The library's name for the format; what is not read here is refused."""
    if method in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise _unknown(f"bits of 4 for {method}", bits)
        version = str(config.get("version", "gemm")).lower()
        if method == "awq" and version != "gemm":
            raise _unknown("awq's version gemm", repr(version))
        return "int4"
    if method == "bitsandbytes":
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if not config.get("load_in_4bit", config.get("_load_in_4bit")) or kind != "nf4":
            raise _unknown("bitsandbytes' load_in_4bit with bnb_4bit_quant_type nf4", repr(kind))
        return "nf4"
    if method == "modelopt":
        algorithm = str(config.get("quant_algo", ""))
        if algorithm not in ("FP8", "NVFP4"):
            raise _unknown("modelopt's quant_algo FP8 or NVFP4", repr(algorithm))
        return algorithm
    if method == "fp8":
        sides = config.get("weight_block_size")
        side = sides[0] if isinstance(sides, list) and len(sides) == 2 else 0
        if not isinstance(side, int) or side < 1 or sides != [side, side]:
            raise _unknown("fp8's weight_block_size of two equal sides", sides)
        return "fp8 by block"
    if method == "compressed-tensors":
        layout = str(config.get("format", ""))
        if layout not in readers.COMPRESSED:
            raise _unknown(f"compressed-tensors' format {', '.join(readers.COMPRESSED)}", repr(layout))
        return layout
    return method


_unknown = partial(mismatch, "config.json")
