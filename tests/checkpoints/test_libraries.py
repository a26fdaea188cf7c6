"""Folders that the libraries made which define the conventions: numbers as those libraries read them back.

compressed-tensors and bitsandbytes: `test_readers.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.formats import QuantizedTensor
from tests.checkpoints.writers import NAME, WRITERS, save, weight


def read(folder: Path) -> QuantizedTensor:
    """The only weight of a folder."""
    checkpoint = lz.load_quantized(folder)
    (name,) = checkpoint.quantized
    found = checkpoint[name]
    assert isinstance(found, QuantizedTensor)
    return found


def test_experts_of_gpt_oss_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """To the bit: its numbers lie with rows and columns exchanged."""
    library = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    tensors, said, _ = WRITERS["mxfp4"]()
    blocks, scales = (next(t for name, t in tensors.items() if name.endswith(end)) for end in ("ks", "es"))
    theirs = library.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(read(save(tmp_path, tensors, said)).dequantize(), theirs.transpose(1, 2))


@pytest.mark.parametrize("scales", [None, "ue8m0"])
def test_blocks_of_float8_are_read_as_transformers_reads_them(scales: str | None, tmp_path: Path) -> None:
    """What its quantizer stores, with scales of float32 or of powers of two alone."""
    library = pytest.importorskip(
        "transformers.integrations.finegrained_fp8", reason="transformers is not installed"
    )
    said: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": scales}
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(**said))
    tensors = library.Fp8Quantize(quantizer).convert({f"{NAME}.weight": weight(64, 128)})
    codes, scale = tensors[f"{NAME}.weight"], tensors[f"{NAME}.weight_scale_inv"]
    assert scale.dtype == (torch.float32 if scales is None else torch.float8_e8m0fnu)
    theirs = library.Fp8Dequantize(quantizer)._dequantize_one(codes, scale, torch.float32)
    found = read(save(tmp_path, tensors, said))
    torch.testing.assert_close(found.dequantize(), theirs, rtol=1e-6, atol=0)
    x = torch.randn(3, 128)
    out = lz.sync.quantized_linear(x, **found.arguments())
    torch.testing.assert_close(out, x @ theirs.T, rtol=1e-4, atol=1e-4)


def test_nvfp4_of_modelopt_is_read_as_it_reads_it(tmp_path: Path) -> None:
    """Its own rounding, both levels of scales, on the CPU."""
    library = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="modelopt is not installed")
    made, scale, second = library.NVFP4QTensor.quantize(weight(), 16)
    tensors = {
        f"{NAME}.weight": made._quantized_data, f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_scale_2": second,
    }  # fmt: skip
    found = read(save(tmp_path, tensors, WRITERS["nvfp4"]()[1]))
    theirs = made.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    torch.testing.assert_close(found.dequantize(), theirs, rtol=1e-6, atol=0)
