"""Products over codes on the CPU: one answer from every level of instructions, changes of a weight seen."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.backends.native import quantized
from layerzero.formats import FORMATS, QuantizedTensor
from layerzero.ops import table
from layerzero.ops.linear.kept_weights import PackedWeights
from layerzero.spec import tolerances
from tests.backends.cases import COMPILED

pytestmark = [*COMPILED]
OP = table.get("quantized_linear")
BY_DTYPE = ("int8", "fp8_e4m3", "fp8_e5m2")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """The kernel; whatever level it was left at, it is left at the highest."""
    kernel = next(k for k in quantized.KERNELS if k.op == "quantized_linear")
    yield kernel.load()
    quantized.library().use_level(quantized.ANY_LEVEL)


def weight_of(name: str, rows: int = 40, width: int = 256, **more: Any) -> QuantizedTensor:
    numbers = torch.randn(rows, width, generator=torch.Generator().manual_seed(7)) * width**-0.5
    return QuantizedTensor.quantize(numbers, name, **more)


def args_of(x: Tensor, weight: QuantizedTensor, **more: Any) -> tuple[Any, ...]:
    named = {**weight.arguments(), **({"format": None} if weight.format in BY_DTYPE else {}), **more}
    args: tuple[Any, ...] = OP.build(x, **named)[1]
    OP.check(args)
    return args


def levels() -> list[int]:
    """Those of AVX2, AVX-VNNI, AVX-512, VNNI and tiles here; the second is a branch of its own."""
    highest = quantized.library().use_level(quantized.ANY_LEVEL)
    has_second = "avx_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return [level for level in range(1, highest + 1) if level != 2 or has_second]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inputs", ["float", "int8"])
def test_every_level_of_instructions_has_the_same_bits(
    run: Callable[..., Any], name: str, inputs: str
) -> None:
    """Rows below and above those of a tile, in every format, near float64 of the dequantized weight."""
    for granularity in FORMATS[name].granularities:
        weight = weight_of(name, granularity=granularity)
        for rows in (1, 3, 5, 33):
            x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
            args, outs = args_of(x, weight, inputs=inputs), []
            for level in levels():
                assert quantized.library().use_level(level) == level
                outs.append(run(*args))
            assert all(torch.equal(out, outs[0]) for out in outs), (granularity, rows)
            wide = tuple(a.double() if isinstance(a, Tensor) and a is x else a for a in args)
            truth = OP.reference(*wide)
            assert not list(tolerances.mismatches(outs[0], truth, OP.reference(*args))), (granularity, rows)


def test_rows_without_digits_are_computed_all_the_same(run: Callable[..., Any]) -> None:
    """Infinity, NaN, the smallest and the largest numbers: as float32 has them, no other row changed."""
    weight = weight_of("int4")
    x = torch.randn(12, 256, generator=torch.Generator().manual_seed(0))
    usual = run(*args_of(x, weight))
    wild = x.clone()
    wild[1, 5], wild[3, 200], wild[4] = torch.nan, torch.inf, x[4] * 1e-34
    wild[6], wild[7] = x[7] * 1e30, 0.0
    wild[8, :128] = x[8, :128] * 1e-38
    out, right = run(*args_of(wild, weight)), OP.reference(*args_of(wild, weight))
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(out[4] * 1e30, right[4] * 1e30, rtol=1e-3, atol=1e-7)
    for row in (0, 2, 5, 9, 10, 11):
        assert torch.equal(out[row], usual[row])


def test_an_outlier_does_not_drown_its_neighbours(run: Callable[..., Any]) -> None:
    """One number a million times the others of its group, met by a zero: the others keep their digits."""
    weight = QuantizedTensor.quantize(
        torch.randn(16, 128, generator=torch.Generator().manual_seed(1)), "int4"
    )
    codes = weight.codes.clone()
    codes[:, 0] = codes[:, 0] & 0xF0 | 8  # number 0
    zeroed = QuantizedTensor(codes, weight.scale, "int4")
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    x[:, 0] = 1e6
    out, truth = run(*args_of(x, zeroed)), x.double() @ zeroed.dequantize(torch.float64).t()
    # 23 bits below the largest of the group, over 127 numbers.
    assert (out - truth).abs().max() < 1e6 * 2.0**-23 * 127**0.5 * 4


def test_a_nan_code_is_nan(run: Callable[..., Any]) -> None:
    """Codes of float8 that are no numbers, and infinity of e5m2."""
    for name, code, what in (("fp8_e4m3", 0x7F, torch.isnan), ("fp8_e4m3", 0xFF, torch.isnan),
                             ("fp8_e5m2", 0x7E, torch.isnan), ("fp8_e5m2", 0x7C, torch.isinf)):  # fmt: skip
        weight = weight_of(name)
        codes = weight.codes.view(torch.uint8).clone()
        codes[3, 17] = code
        out = run(
            *args_of(torch.ones(2, 256), QuantizedTensor(codes.view(weight.codes.dtype), weight.scale, name))
        )
        assert what(out[:, 3]).all() and out[:, :3].isfinite().all() and out[:, 4:].isfinite().all()


@pytest.mark.parametrize("name", ["int4", "int8", "nf4", "fp8_e4m3", "mxfp4"])
def test_a_weight_is_laid_out_once_and_again_when_it_changes(run: Callable[..., Any], name: str) -> None:
    """Codes, scales and zero points changed in place are seen; `.data` where it changes a compared byte."""
    weight = weight_of(name, symmetric=name != "int4") if name == "int4" else weight_of(name)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    args = args_of(x, weight)
    run(*args)
    kept = quantized.kept_weights().codes(weight.codes)
    panels = kept.of(weight.codes)
    run(*args)
    assert kept.of(weight.codes) is panels
    for part in (weight.codes, weight.scale, weight.zero_point):
        if part is None:
            continue
        part.view(torch.uint8)[:] = part.view(torch.uint8).flip(0).clone()
        torch.testing.assert_close(run(*args), OP.reference(*args), rtol=1e-4, atol=1e-5)
    weight.codes.data.view(torch.uint8)[:] = weight.codes.view(torch.uint8).flip(1).clone()
    torch.testing.assert_close(run(*args), OP.reference(*args), rtol=1e-4, atol=1e-5)


@given(st.integers(0, 2**31), st.sampled_from(sorted(FORMATS)), st.integers(1, 20))
def test_a_row_is_its_own_in_every_batch(run: Callable[..., Any], seed: int, name: str, rows: int) -> None:
    """Bits, alone and in company, of rows whose sizes differ by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of(name)
    x = torch.randn(rows, 256, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (rows, 1), generator=generator
    )
    together = run(*args_of(x, weight))
    alone = torch.cat([run(*args_of(row, weight)) for row in x.split(1)])
    assert torch.equal(together, alone)


def test_strict_determinism_takes_products_over_codes() -> None:
    """A row's bits are its own, so that strict determinism has a kernel for packed weights."""
    weight, x = weight_of("int4"), torch.randn(2, 256)
    with lz.start(lz.Settings(warm="off", determinism="strict"), scoped=True):
        with lz.prefer("native.quantized_linear.codes"):
            out = lz.sync.quantized_linear(x, **weight.arguments())
        selection = lz.last_selection()
        assert selection is not None and selection.kernel == "native.quantized_linear.codes"
    torch.testing.assert_close(out, x @ weight.dequantize().t(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def run_experts(run: Callable[..., Any]) -> Callable[..., Any]:
    return next(k for k in quantized.KERNELS if k.op == "fused_experts").load()


def expert_args(count: int, choices: list[list[int]], **more: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    up = QuantizedTensor.quantize(torch.randn(count, 64, 64, generator=generator) / 8, "int8")
    down = QuantizedTensor.quantize(torch.randn(count, 64, 32, generator=generator) / 8, "int8")
    experts = torch.tensor(choices, dtype=torch.int32)
    x = torch.randn(len(choices), 64, generator=generator)
    op = table.get("fused_experts")
    args: tuple[Any, ...] = op.build(
        x, experts, torch.ones(experts.shape), up.codes, down.codes, up.scale, down.scale, **more
    )[1]
    op.check(args)
    return args


def test_a_change_of_any_expert_is_seen(run_experts: Callable[..., Any]) -> None:
    """Through `.data`, of experts that are no first ones."""
    args = expert_args(4, [[0, 2], [3, 2]])
    for weight, expert in ((args[3], 2), (args[4], 3), (args[3], 0)):
        run_experts(*args)
        weight.data[expert] = weight[expert].flip(0).clone()
        torch.testing.assert_close(run_experts(*args), table.get("fused_experts").reference(*args))


def test_a_rank_without_experts_adds_nothing(run_experts: Callable[..., Any]) -> None:
    """No weights at all."""
    x = torch.randn(2, 64)
    empty = [torch.empty(0, 64, width, dtype=torch.int8) for width in (64, 32)]
    scales = [torch.empty(0, 64, 1) for _ in empty]
    args = table.get("fused_experts").build(
        x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), *empty, *scales
    )[1]
    table.get("fused_experts").check(args)
    assert torch.equal(run_experts(*args), torch.zeros(2, 64))


def test_a_weight_that_is_not_kept_gives_the_same_bits(
    run: Callable[..., Any], run_experts: Callable[..., Any]
) -> None:
    """Made in inference mode, and laid out at each call: a row is its own in every batch all the same."""
    with torch.inference_mode():
        inside = weight_of("int4", symmetric=False)
        inside_experts = expert_args(4, [[0, 2], [3, 2], [1, 0]])
    outside = weight_of("int4", symmetric=False)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    assert quantized.kept_weights().codes(inside.codes).of(inside.codes) is None
    out = run(*args_of(x, outside))
    assert torch.equal(run(*args_of(x, inside)), out)
    assert torch.equal(torch.cat([run(*args_of(row, inside)) for row in x.split(1)]), out)
    outside_experts = expert_args(4, [[0, 2], [3, 2], [1, 0]])
    assert torch.equal(run_experts(*inside_experts), run_experts(*outside_experts))


def test_all_that_is_kept_has_one_limit() -> None:
    """Codes of every kind and scales are counted together."""
    sharing: list[PackedWeights] = []
    first, second = (PackedWeights(torch.clone, 100, 1, sharing, torch.equal) for _ in range(2))
    weights = [torch.ones(60, dtype=torch.uint8) for _ in range(2)]
    assert first.of(weights[0]) is not None
    assert second.of(weights[1]) is None
    del weights[0]
    gc.collect()
    assert second.repack(weights[0]) is not None


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rows_rounded_to_whole_numbers_are_summed_exactly(run: Callable[..., Any], name: str) -> None:
    """One rounding a group, after the sum: bits of the product of whole numbers under both scales."""
    weight = weight_of(name, width=128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    codes, step = lz.sync.quantize(x, format="int8")
    whole = (weight.dequantize(torch.float64) / weight.scale.double()).round()
    sums = (codes.double() @ whole.t()).float()
    out = run(*args_of(x, weight, inputs="int8"))
    assert torch.equal(out, sums * (weight.scale.view(1, -1) * step))
