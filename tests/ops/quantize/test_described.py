"""What a call of the quantizing ops asks of a kernel, which calls share a launch, how rows meet a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.ops.quantize.quantize import DEQUANTIZE, QUANTIZE
from layerzero.ops.quantize.quantized_linear import QUANTIZED_LINEAR
from tests import kernels


def spec_of(**given: Any) -> Any:
    """The request of a call of `quantize`, over rows of 64."""
    return QUANTIZE.check(QUANTIZE.build(torch.ones(4, 64), **given)[1])


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({"scale": torch.ones(4, 1)}, "scale_given"),
        ({"format": "nvfp4", "tensor_scale": torch.ones(())}, "tensor_scale"),
    ],
)
def test_what_a_caller_gives_is_asked_of_the_kernel(given: dict[str, Any], feature: str) -> None:
    """A kernel that makes every scale itself would pass over one that is given."""
    assert feature in spec_of(**given).features
    assert feature not in spec_of(format=given.get("format", "int8")).features


def test_numbers_are_asked_for_in_their_own_dtype() -> None:
    """What a kernel of `dequantize` writes is the result's dtype, not that of codes."""
    args = DEQUANTIZE.build(torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1), dtype="bfloat16")[1]
    request = DEQUANTIZE.check(args)
    assert (request.dtype, request.dtypes) == ("bfloat16", ("bfloat16",))


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
def test_one_scale_for_all_is_for_one_caller(granularity: str) -> None:
    """Calls share a launch only where each row has scales of its own."""
    sizes = {"group_size": 4} if granularity in ("group", "block") else {}
    args = QUANTIZE.build(torch.ones(4, 8), granularity=granularity, **sizes)[1]
    assert QUANTIZE.batching is not None
    assert (QUANTIZE.batching.batch_key(args) is None) is (granularity in ("tensor", "block"))


def test_eight_bits_by_block_have_a_usual_size() -> None:
    """Without a size they are blocks of 128 by 128, as weights of that kind are published."""
    x = torch.randn(129, 256, generator=torch.Generator().manual_seed(0))
    codes, scale = lz.sync.quantize(x, format="fp8_e4m3", granularity="block")
    again, same = lz.sync.quantize(x, format="fp8_e4m3", granularity="block", group_size=128)
    assert scale.shape == (2, 2)
    assert torch.equal(scale, same) and torch.equal(codes.view(torch.int8), again.view(torch.int8))


def test_nothing_keeps_the_scale_that_is_given() -> None:
    """A tensor without rows has a caller's scale, as every other has."""
    codes, scale = lz.sync.quantize(torch.ones(0, 8), granularity="tensor", scale=torch.tensor(3.0))
    assert codes.shape == (0, 8) and float(scale) == 3.0


@pytest.mark.parametrize(
    ("format", "of_weight", "of_rows", "block_size"),
    [
        ("mxfp4", {}, {}, 0),
        (
            "fp8_e4m3",
            {"granularity": "block", "group_size": 16},
            {"granularity": "group", "group_size": 16},
            16,
        ),
    ],
)
def test_rows_are_rounded_as_their_weight_is(
    format: Any, of_weight: dict[str, Any], of_rows: dict[str, Any], block_size: int
) -> None:
    """Neighbours of a row share a scale where those of the weight do: small columns keep their digits."""
    generator = torch.Generator().manual_seed(0)
    size = 4.0 ** -torch.arange(64).div(16, rounding_mode="floor")
    x = torch.randn(3, 64, generator=generator) * size
    weight, scale = lz.sync.quantize(
        torch.randn(32, 64, generator=generator) / size, format=format, **of_weight
    )
    named: dict[str, Any] = {"format": None if of_weight else format, "block_size": block_size}
    out = lz.sync.quantized_linear(x, weight, scale, inputs="dynamic", **named)
    codes, spread = lz.sync.quantize(x, format=format, **of_rows)
    rows = lz.sync.dequantize(codes, spread, format=named["format"], dtype="float64")
    wide = lz.sync.dequantize(weight, scale, dtype="float64", **named)
    torch.testing.assert_close(out.double(), rows @ wide.t(), rtol=1e-5, atol=1e-5)


def test_a_cast_takes_rows_and_bias_and_leaves_codes() -> None:
    """A kernel of float32 alone gets both in float32, where the caller has them in bfloat16."""
    op, seen = QUANTIZED_LINEAR, list[torch.dtype]()

    def run(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, *rest: object) -> Any:
        seen.extend(t.dtype for t in (x, weight, scale, bias))
        return op.reference(x, weight, scale, bias, *rest)

    features = frozenset({"quant_int8", "scale_per_row", "inputs_float", "bias"})
    limits: dict[str, Any] = {"features": features, "dtypes": frozenset({"float32"}), "mixed_dtypes": False}
    own = kernels.device([kernels.kernel("wide.quantized_linear", run, **limits)])
    x, bias = torch.ones(2, 8).bfloat16(), torch.ones(3).bfloat16()
    args = op.build(x, torch.ones(3, 8, dtype=torch.int8), torch.ones(3, 1), bias)[1]
    assert own.launch(op, args).tolist() == [[9.0] * 3] * 2
    assert seen == [torch.float32, torch.int8, torch.float32, torch.float32]
