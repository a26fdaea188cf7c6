"""vLLM's Marlin and Machete: how weights are laid out for them, in the recorded schemas of its operators.

The operators of this test compute what theirs do, from operands in their layouts, each layout inverted by a
formula of its own; tests/cuda/test_marlin.py asks a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends import vllm_products
from layerzero.formats import QuantizedTensor, unpack_pairs
from layerzero.ops import table
from layerzero.spec.hardware import hypothetical_gpu
from layerzero.spec.kernel import Kernel, rejections

OP = table.get("quantized_linear")
# Scales, sums and what a bias makes of them are each rounded once, over the largest output.
BOUND = {dtype: 3 * torch.finfo(dtype).eps / 2 for dtype in (torch.bfloat16, torch.float16)}
# As vLLM 0.26.0's extension registers them.
SCHEMAS = {
    "gptq_marlin_repack": "(Tensor b_q_weight, Tensor perm, SymInt size_k, SymInt size_n, int num_bits, bool "
    "is_a_8bit) -> Tensor",
    "marlin_gemm": "(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor "
    "b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, "
    "Tensor? perm_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, "
    "bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor",
    "machete_prepack_B": "(Tensor B, ScalarType a_type, int b_type, ScalarType? group_scales_type) -> Tensor",
    "machete_mm": "(Tensor A, Tensor B, int b_type, ScalarType? out_type, Tensor? group_scales, Tensor? "
    "group_zeros, int? group_size, Tensor? channel_scales, Tensor? token_scales, str? schedule) -> Tensor",
}
# vllm/scalar_type.py: uint4, uint4b8, uint8b128, float8_e4m3fn, float4_e2m1f; bits and what a code means.
HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*HALVES, *(-number for number in HALVES)], dtype=torch.float64)
NUMBERS: dict[int, tuple[int, Callable[[Tensor], Tensor]]] = {
    1125899906843648: (4, lambda code: code.double()),
    1125899907892224: (4, lambda code: code.double() - 8),
    1125899923621888: (8, lambda code: code.double() - 128),
    2814749767172868: (8, lambda code: code.to(torch.uint8).view(torch.float8_e4m3fn).double()),
    562949953487106: (4, lambda code: E2M1[code]),
}


def places(words: Tensor, bits: int) -> Tensor:
    """Codes (K, N) of words (K * bits / 32, N), the first in the low bits."""
    shifts = torch.arange(0, 32, bits).view(1, -1, 1)
    return (words.long()[:, None] >> shifts & (1 << bits) - 1).flatten(0, 1)


def marlin_order(scales: Tensor) -> Tensor:
    """Scales (G, N) in the order of columns again."""
    count, width = scales.shape
    if count > 1:
        return scales.view(count, -1, 8, 8).transpose(2, 3).reshape(count, width)
    return scales.view(-1, 4, 4, 2).permute(0, 2, 1, 3).reshape(1, width)


def repack(words: Tensor, perm: Tensor, inner: int, width: int, bits: int, is_a_8bit: bool) -> Tensor:
    assert words.is_contiguous() and words.shape == (inner * bits // 32, width) and not is_a_8bit
    assert perm.numel() == 0 and perm.dtype == torch.int32
    return words.reshape(inner // 16, width * 16 * bits // 32).clone()


def multiply(x: Tensor, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """x (M, K) times numbers (K, N), each less a zero point and times a scale of (G, N)."""
    times = numbers.shape[0] // scales.shape[0]
    shift = 0.0 if zeros is None else zeros.repeat_interleave(times, 0)
    return (x.double() @ ((numbers - shift) * scales.double().repeat_interleave(times, 0))).to(x.dtype)


def marlin(
    x: Tensor, c: Any, weight: Tensor, bias: Any, scales: Tensor, a_scales: Any, whole: Any,
    zeros: Tensor | None, order: Any, perm: Any, locks: Tensor, kind: int, count: int, width: int, inner: int,
    full: bool, atomic: bool, wide: bool, float_zeros: bool,
) -> Tensor:  # fmt: skip
    assert (c, bias, a_scales, whole, order, perm) == (None,) * 6
    assert (full, atomic, wide, float_zeros) == (True, False, True, False)
    assert locks.dtype == torch.int32 and not locks.any() and x.shape == (count, inner) and x.is_contiguous()
    bits, number = NUMBERS[kind]
    numbers = number(places(weight.reshape(inner * bits // 32, width), bits))
    if scales.dtype == torch.float8_e8m0fnu:
        assert kind == 562949953487106
        bytes_ = scales.view(torch.uint8).view(-1, 2, 2).transpose(1, 2).reshape(scales.shape)
        exponents = marlin_order(bytes_.contiguous())
        return multiply(x, numbers, torch.exp2(exponents.double() - 127))
    assert scales.dtype == x.dtype
    plain = marlin_order(scales).double()
    if kind == 2814749767172868:
        plain *= 2.0 ** (-120 if x.dtype == torch.bfloat16 else -8)
    if zeros is not None:
        codes = places(zeros.t().contiguous(), 4).view(width, -1).t()
        by_eight = codes.view(codes.shape[0], -1, 2, 4).transpose(2, 3).reshape(codes.shape)
        zeros = by_eight.view(codes.shape[0], -1, 8, 8).transpose(2, 3).reshape(codes.shape).double()
    return multiply(x, numbers, plain, zeros)


def prepack(words: Tensor, x_type: torch.dtype, kind: int, scales: torch.dtype | None) -> Tensor:
    assert words.t().is_contiguous() and x_type == scales
    return words.clone(memory_format=torch.contiguous_format)


def machete(
    x: Tensor, weight: Tensor, kind: int, out: Any, scales: Tensor, zeros: Any, size: int, *rest: Any
) -> Tensor:
    assert (out, zeros, *rest) == (None,) * 5 and scales.is_contiguous() and scales.dtype == x.dtype
    assert size == (-1 if scales.shape[0] == 1 else x.shape[1] // scales.shape[0])
    bits, number = NUMBERS[kind]
    return multiply(x, number(places(weight, bits)), scales)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Operators with vLLM's schemas on the CPU; the names of those that laid something out."""
    calls: list[str] = []
    library = torch.library.Library("lz_recorded_vllm", "DEF")
    computing: dict[str, Callable[..., Any]] = {
        "gptq_marlin_repack": repack, "machete_prepack_B": prepack, "machete_mm": machete,
        "marlin_gemm": marlin,
    }  # fmt: skip
    for name, schema in SCHEMAS.items():
        library.define(name + schema)

        def run(*args: Any, name: str = name) -> Tensor:
            calls.extend([name] if "pack" in name else [])
            out: Tensor = computing[name](*args)
            return out

        library.impl(name, run, "CPU")
    monkeypatch.setattr(vllm_products, "operators", lambda: torch.ops.lz_recorded_vllm)
    monkeypatch.setattr(vllm_products, "_processors", lambda device: 132)
    vllm_products._kept.cache_clear()
    yield calls
    vllm_products._kept.cache_clear()
    library._destroy()


BY_ID: dict[str, Kernel] = {kernel.id: kernel for kernel in vllm_products.KERNELS}
INTEGERS, FP8, MXFP4 = (f"vllm_marlin.quantized_linear.{name}" for name in ("integers", "fp8", "mxfp4"))
MACHETE = "vllm_machete.quantized_linear.integers"
# Format, how scales are shared, whether without zero points; who takes it beside bfloat16 on a Hopper.
WEIGHTS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("int4", {"group_size": 128}, {INTEGERS, MACHETE}),
    ("int4", {"group_size": 64}, {INTEGERS, MACHETE}),
    ("int4", {"group_size": 32}, {INTEGERS}),
    ("int4", {"granularity": "row"}, {INTEGERS, MACHETE}),
    ("int4", {"group_size": 128, "symmetric": False}, {INTEGERS}),
    ("int4", {"granularity": "row", "symmetric": False}, {INTEGERS}),
    ("int4", {"group_size": 16}, set()),
    ("int8", {}, {INTEGERS, MACHETE}),
    ("int8", {"granularity": "group", "group_size": 128}, {INTEGERS, MACHETE}),
    ("fp8_e4m3", {}, {FP8}),
    ("fp8_e4m3", {"granularity": "tensor"}, {FP8}),
    ("fp8_e4m3", {"granularity": "block", "group_size": 128}, {FP8}),
    ("fp8_e4m3", {"granularity": "group", "group_size": 128}, {FP8}),
    ("fp8_e4m3", {"granularity": "group", "group_size": 64}, set()),
    ("mxfp4", {}, {MXFP4}),
    ("nvfp4", {}, set()),
    ("nf4", {}, set()),
    ("fp8_e5m2", {}, set()),
]
by_weight = pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: f"{case[0]}-{case[1]}")


def weight_of(form: str, how: dict[str, Any], columns: int = 192, inner: int = 256) -> QuantizedTensor:
    numbers = torch.randn(columns, inner, generator=torch.Generator().manual_seed(3)) * 0.05
    return QuantizedTensor.quantize(numbers, form, **how)


def args_of(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    args: tuple[Any, ...] = OP.build(x, **weight.arguments(), bias=bias)[1]
    return args


def takers(args: tuple[Any, ...], sm: int = 90) -> set[str]:
    request = OP.check(args)
    return {name for name, each in BY_ID.items() if not rejections(each, request, hypothetical_gpu(sm))}


@by_weight
def test_what_they_take_is_said_before_the_call(case: Any) -> None:
    """Formats, groups and sizes; Machete on Hopper alone; powers of two not beside float16."""
    form, how, wanted = case
    x = torch.randn(3, 256).bfloat16()
    weight = weight_of(form, how, 256)
    assert takers(args_of(x, weight)) == wanted
    assert takers(args_of(x, weight), 89) == wanted - {MACHETE}
    assert takers(args_of(x.half(), weight)) == wanted - {MXFP4}
    assert not takers(args_of(x.float(), weight)) and not takers(args_of(x[:0], weight))
    assert takers(args_of(x, weight_of(form, how, 192))) == wanted - {MACHETE}
    assert not takers(args_of(x, weight_of(form, how, 96)))


@by_weight
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_the_weights_numbers(case: Any, dtype: torch.dtype, packed: list[str]) -> None:
    """Through the layouts and the schemas, with a bias and leading axes; laid out once for many calls."""
    form, how, wanted = case
    weight = weight_of(form, how, 256)
    x, bias = torch.randn(2, 3, 256).to(dtype), torch.randn(256).to(dtype)
    args = args_of(x, weight, bias)
    truth = OP.reference(x.double(), *args[1:])
    for name in wanted - ({MXFP4} if dtype == torch.float16 else set()):
        product = vllm_products.machete_linear if name == MACHETE else vllm_products.marlin_linear
        packed.clear()
        for _ in range(3):
            out = product(*args)
            assert out.shape == (2, 3, 256) and out.dtype == dtype
            error = float((out.double() - truth).abs().max() / truth.abs().max())
            assert error < BOUND[dtype], (name, error)
        assert len(packed) == 1
        weight.codes.copy_(weight.codes.flip(0).clone())
        changed = OP.reference(x.double(), *args[1:])
        assert float((product(*args).double() - changed).abs().max() / changed.abs().max()) < BOUND[dtype]
        assert len(packed) == 2
        truth = changed


def test_a_weight_of_inference_mode_is_laid_out_for_each_call(packed: list[str]) -> None:
    """torch never counts its changes."""
    with torch.inference_mode():
        weight, x = weight_of("int4", {"group_size": 128}), torch.randn(2, 256).bfloat16()
        args = args_of(x, weight)
        outs = [vllm_products.marlin_linear(*args) for _ in range(2)]
    assert torch.equal(*outs) and len(packed) == 2


def test_a_capture_takes_what_is_ready_and_keeps_nothing(
    packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph lays out is in its own memory: no later call finds it."""
    weight, x = weight_of("int4", {"group_size": 128}), torch.randn(2, 256).bfloat16()
    args = args_of(x, weight)
    monkeypatch.setattr(vllm_products, "is_capturing", lambda: True)
    first = vllm_products.marlin_linear(*args)
    vllm_products.marlin_linear(*args)
    assert len(packed) == 2
    monkeypatch.setattr(vllm_products, "is_capturing", lambda: False)
    vllm_products.marlin_linear(*args)
    assert len(packed) == 3
    monkeypatch.setattr(vllm_products, "is_capturing", lambda: True)
    assert torch.equal(vllm_products.marlin_linear(*args), first) and len(packed) == 3


@pytest.mark.parametrize("product", [vllm_products.marlin_linear, vllm_products.machete_linear])
def test_scales_that_the_rows_dtype_does_not_hold_are_refused(product: Any, packed: list[str]) -> None:
    """float16 has none below 6e-5 to the last bit; the next kernel takes the call."""
    numbers = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * 1e-5
    args = args_of(torch.randn(2, 256).half(), QuantizedTensor.quantize(numbers, "int8"))
    with pytest.raises(ValueError, match=r"scale needs numbers from 6.1e-05 to 6.6e\+04 beside rows of"):
        product(*args)
    args = args_of(torch.randn(2, 256).bfloat16(), QuantizedTensor.quantize(numbers, "int8"))
    product(*args)


def test_operators_whose_arguments_have_changed_are_refused_by_name() -> None:
    """The recorded ones are taken; one argument more is not."""
    for name, schema in SCHEMAS.items():
        vllm_products.need_arguments(name, torch._C.parse_schema(f"_C::{name}{schema}"))
    more = SCHEMAS["machete_mm"].replace("str? schedule", "str? schedule, bool fast")
    with pytest.raises(ImportError, match=r"vllm's machete_mm needs A, B, .*, schedule, got .*, fast"):
        vllm_products.need_arguments("machete_mm", torch._C.parse_schema(f"_C::machete_mm{more}"))


def test_without_vllm_nothing_is_loaded() -> None:
    """The error says what is missing."""
    if hasattr(torch.ops._C, "marlin_gemm"):
        pytest.skip("vllm is loaded in this process")
    with pytest.raises(ImportError, match=r"no _C_stable_libtorch\*.so in vllm"):
        BY_ID[INTEGERS].load()


def test_zero_points_lie_in_words_of_eight_columns() -> None:
    """Every nibble comes back at its column."""
    zeros = torch.randint(0, 16, (128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = vllm_products.marlin_zero_points(zeros)
    assert words.shape == (3, 16) and words.dtype == torch.int32
    nibbles = unpack_pairs(words.view(torch.uint8)).view(3, -1, 2, 4).transpose(2, 3).reshape(3, -1, 8, 8)
    assert torch.equal(nibbles.transpose(2, 3).reshape(3, 128), zeros.t())
