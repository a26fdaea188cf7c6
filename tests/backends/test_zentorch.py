"""What is special about zentorch: what its import changes, and the traps its kernels keep out of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from layerzero.backends import zentorch
from layerzero.ops import table
from layerzero.spec.tolerances import mismatches
from tests import children
from tests.backends import cases

BY_ID = {k.id: k for k in cases.KERNELS}
MISSING = cases.why_not_here(BY_ID["zentorch.linear.native"])
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs here")


SIZES = [(8, 128, 64), (1, 384, 384), (64, 384, 1536), (3, 64, 64), (1, 1024, 2048)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "width"), SIZES)
def test_a_product_follows_its_weight(dtype: torch.dtype, rows: int, inner: int, width: int) -> None:
    """Weights edited in place, or freed and made anew at the same address, are never answered from memory."""
    linear = BY_ID["zentorch.linear.native"].load()
    x = torch.randn(rows, inner).to(dtype)
    for _ in range(5):
        weight = torch.randn(width, inner).to(dtype)
        for _ in range(2):
            truth = functional.linear(x.double(), weight.double())
            problems = mismatches(linear(x, weight, None), truth, functional.linear(x, weight))
            assert not problems
            weight.mul_(-2)
        del weight


def test_a_cache_switched_on_before_us_is_found_out(tmp_path: Path) -> None:
    """Where the process imported zentorch with its cache on, the kernel refuses to load."""
    code = (
        "import warnings; warnings.simplefilter('ignore'); import torch, zentorch\n"
        "torch.ops.zentorch.zentorch_linear_unary(torch.ones(8, 64), torch.ones(64, 64))\n"
        "from layerzero.backends.zentorch import KERNELS\n"
        "linear = next(k for k in KERNELS if k.op == 'linear')\n"
        "try: linear.load()\n"
        "except ImportError as error: print('refused:', error)"
    )
    environment = {k: v for k, v in os.environ.items() if k != zentorch.WEIGHT_CACHE}
    run = children.run(code, folder=tmp_path, variables=environment)
    assert "refused: zentorch" in run.stdout, run.stdout + run.stderr


def test_loading_patches_nothing_of_torchs(tmp_path: Path) -> None:
    """torch's functions, threads, dtype and logging are what they were before the import."""
    code = (
        "import logging, torch, torch.nn.functional as F\n"
        "def state(): return (F.scaled_dot_product_attention, F.linear, torch.get_num_threads(),"
        " torch.get_num_interop_threads(), torch.get_default_dtype(), torch.backends.mkldnn.enabled,"
        " logging.root.level, torch.get_float32_matmul_precision())\n"
        "before = state()\n"
        "from layerzero.backends.zentorch import operators; operators()\n"
        "print('same' if state() == before else 'changed')"
    )
    run = children.run(code, folder=tmp_path)
    assert "same" in run.stdout, run.stdout + run.stderr


def test_norms_take_any_number_of_axes_safely() -> None:
    """Three axes, which the operator itself writes past, go through as two."""
    norm = BY_ID["zentorch.rms_norm.native"].load()
    x, weight = torch.randn(2, 3, 5, 33), torch.randn(33)
    torch.testing.assert_close(norm(x, weight, 1e-6), functional.rms_norm(x, (33,), weight, 1e-6))
    torch.testing.assert_close(norm(x[0, 0, 0], weight, 1e-6), norm(x, weight, 1e-6)[0, 0, 0])


def test_the_in_place_operator_works_on_copies() -> None:
    """The caller's operands stay; the second result is the sum in the operands' dtype."""
    kernel = BY_ID["zentorch.add_rms_norm.native"].load()
    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    kept = x.clone(), residual.clone()
    _, total = kernel(x, residual, weight, 1e-6)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    assert torch.equal(total, x + residual)
    assert total.data_ptr() != residual.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_product_follows_its_weight(dtype: torch.dtype) -> None:
    """Codes edited in place are never answered from memory, and rows are quantized as `quantize` does."""
    kernel = BY_ID["zentorch.quantized_linear.dynamic"].load()
    right = table.get("quantized_linear").reference
    for rows, inner, width in SIZES:
        x, scale = torch.randn(rows, inner).to(dtype), torch.rand(width, 1)
        weight = torch.randint(-127, 128, (width, inner), dtype=torch.int8)
        for _ in range(3):
            truth = right(x.double(), weight, scale.double(), None, "dynamic")
            baseline = right(x, weight, scale, None, "dynamic")
            assert not mismatches(kernel(x, weight, scale, None, "dynamic"), truth, baseline)
            weight.neg_()
