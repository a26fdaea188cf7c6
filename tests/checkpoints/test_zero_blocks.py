"""Blocks of zeros, as bitsandbytes writes them: under a scale of zero."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.formats import QuantizedTensor
from tests.checkpoints.writers import NAME, nf4, save

STATE = f"{NAME}.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("nested", [False, True])
def test_a_block_of_zeros_has_a_scale_of_zero_in_nf4(nested: bool, tmp_path: Path) -> None:
    """A scale that is stored in eight bits may come back a little below zero, and is zero."""
    tensors, said, numbers = nf4(nested)
    absmax = tensors[f"{NAME}.weight.absmax"]
    if nested:
        table, size = tensors[f"{NAME}.weight.nested_quant_map"], tensors[f"{NAME}.weight.nested_absmax"]
        offset = json.loads(bytes(tensors[STATE].tolist()))["nested_offset"]
        absmax[absmax == 255] = 254  # a code of its own for the block of zeros
        table[255] = -(offset + 1e-3) / size
        absmax[0] = 255
    else:
        absmax[0] = 0.0
    tensors[f"{NAME}.weight"][:32] = 0x77  # the code of zero
    found = lz.load_quantized(save(tmp_path, tensors, said))[f"{NAME}.weight"]
    assert isinstance(found, QuantizedTensor)
    assert found.scale[0, 0] == 0.0 and bool((found.scale.flatten()[1:] > 0).all())
    dense = found.dequantize()
    assert dense[0, :64].count_nonzero() == 0
    x = torch.randn(3, numbers.shape[1])
    out = lz.sync.quantized_linear(x, **found.arguments())
    torch.testing.assert_close(out, x @ dense.T, rtol=1e-4, atol=1e-4)
    if not nested:
        torch.testing.assert_close(dense[1:], numbers[1:], rtol=2e-7, atol=0)
