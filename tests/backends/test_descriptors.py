"""Hardware that is not here, through the real engine: who would run, who would not, and what is data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.actors.device.registry import Registry
from layerzero.backends import availability, load_builtin
from layerzero.backends.descriptors import DEVICES, FAMILIES, descriptors_of, imagine_hardware
from layerzero.ops import table as ops_table
from layerzero.selection.context import SelectionContext
from layerzero.selection.decide import DESCRIPTOR_ONLY, decide
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability_overlays import problems
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError, NoKernelFoundError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason

ATTENTION = ops_table.get("attention")
EVERY = (*load_builtin(op="attention"), *descriptors_of("attention"))
BY_ID = {kernel.id: kernel for kernel in (*load_builtin(), *descriptors_of())}


def gpu(sm: int) -> Hardware:
    """An NVIDIA GPU of any compute capability, a future one included."""
    return Hardware(
        platform="cuda", device="cuda:0", name=f"sm {sm}", vendor="nvidia", sm=sm, torch="2.13.0",
        cuda="13.0", driver="580.0", memory_bytes=80 << 30, bandwidth=3e12,
        peak_flops={"bfloat16": 1e15, "float32": 6e13},
    )  # fmt: skip


def call(dtype: str = "bfloat16", size: int = 128, length: int = 8192, *features: str) -> CallSpec:
    dims = {"B": 1, "Hq": 32, "Hk": 8, "G": 4, "Sq": length, "Sk": length, "D": size, "Dv": size}
    return CallSpec(
        op="attention", platform="cuda", device="cuda:0", dtype=dtype, dtypes=(dtype,), dims=dims,
        features=frozenset({"causal", "gqa", *features}), layout="BSHD",
    )  # fmt: skip


def chosen(sm: int, *without: str, request: CallSpec | None = None) -> Selection:
    """The choice among all kernels but those whose id begins with one of `without`."""
    left = [k for k in EVERY if not k.id.startswith(without)] if without else list(EVERY)
    return decide(ATTENTION, request or call(), SelectionContext(tuple(left), gpu(sm)))


def generations(sm: int, request: CallSpec | None = None) -> set[str]:
    """Which generations of FlashAttention take a call there."""
    takes = [k for k in EVERY if not rejections(k, request or call(), gpu(sm))]
    return {k.backend.removeprefix("flash_attn_") for k in takes if k.backend.startswith("flash_attn_")}


@pytest.mark.parametrize(
    ("sm", "generation", "tensor_cores", "family", "flash"),
    [
        (75, "TURING", 2, "wmma", ""), (80, "AMPERE", 3, "wmma", "2"), (86, "AMPERE", 3, "wmma", "2"),
        (87, "AMPERE", 3, "wmma", "2"), (88, "AMPERE", 3, "wmma", "2"), (89, "ADA_LOVELACE", 4, "wmma", "2"),
        (90, "HOPPER", 4, "wgmma", "234"), (100, "BLACKWELL", 5, "tcgen05", "24"),
        (103, "BLACKWELL", 5, "tcgen05", "24"), (110, "BLACKWELL", 5, "tcgen05", "24"),
        (120, "BLACKWELL", 5, "wmma", "2"), (121, "BLACKWELL", 5, "wmma", "2"),
        (999, "UNKNOWN", None, "none", ""),
    ],
)  # fmt: skip
def test_generations_are_routed(
    sm: int, generation: str, tensor_cores: int | None, family: str, flash: str
) -> None:
    """T53, T54, K6: the true tensor core generation stands beside the family that decides."""
    hardware = gpu(sm)
    assert (hardware.generation.name, hardware.tensor_core_generation) == (generation, tensor_cores)
    assert hardware.mma_family.value == family
    assert generations(sm) == set(flash)


def test_blackwell_takes_the_fourth_generation_and_then_the_chain() -> None:
    """K10: FA4; without it cuDNN or SDPA; without those FA2, whose data lists the SM; at last plain torch."""
    assert chosen(100).kernel == "flash_attn_4.attention.blackwell"
    assert Reason.SM_TOO_NEW in {
        r.reason for r in chosen(100).candidate("flash_attn_3.attention.dense").rejected
    }
    assert chosen(100, "flash_attn_4").kernel in ("torch.attention.sdpa", "torch.attention.sdpa_cudnn")
    gone = (
        "flash_attn_4",
        "torch.attention.sdpa_cudnn",
        "torch.attention.sdpa_flash",
        "flashinfer",
        "xformers",
    )
    kept = chosen(100, *gone).order
    assert "flash_attn_2.attention.dense" in kept and "torch.attention.sdpa_math" in kept
    assert chosen(100, "flash_attn", "flashinfer", "xformers", "torch.attention.sdpa").kernel.startswith(
        "ref"
    )


def test_hopper_is_routed_by_cost_and_keeps_the_fourth_without_the_third() -> None:
    """K8: both take it: the third for short calls, where the host counts; the fourth alone where need be."""
    both = chosen(90)
    assert both.candidate("flash_attn_3.attention.dense").eligible
    assert both.candidate("flash_attn_4.attention.dense").eligible
    others = ("torch.attention", "flashinfer", "xformers", "flash_attn_2", "vllm", "reference")
    assert chosen(90, *others).kernel == "flash_attn_4.attention.dense"
    assert chosen(90, *others, request=call("bfloat16", 128, 512)).kernel == "flash_attn_3.attention.dense"
    alone = chosen(90, *others, "flash_attn_3", request=call("bfloat16", 128, 512))
    assert alone.kernel == "flash_attn_4.attention.dense"


def test_old_and_unknown_generations_get_what_makes_no_claim_on_them() -> None:
    """Turing is too old and a future GPU too new for every kernel with bounds; torch's own choice remains."""
    assert chosen(75).kernel.startswith("torch.attention.sdpa")
    future = chosen(999)
    assert future.kernel.startswith("torch.attention.sdpa")
    bounded = [k for k in EVERY if k.capability.sm_max is not None]
    assert bounded and not any(future.candidate(k.id).eligible for k in bounded)


@pytest.mark.parametrize(
    ("kernel_id", "op", "features", "least"),
    [
        ("torch.quantized_linear.scaled_mm_tensorwise", "quantized_linear",
         {"quant_fp8_e4m3", "scale_per_tensor", "inputs_quantized"}, 89),
        ("torch.quantized_linear.scaled_mm", "quantized_linear",
         {"quant_fp8_e4m3", "scale_per_row", "inputs_quantized"}, 90),
        ("torch.quantized_linear.scaled_mm_block", "quantized_linear",
         {"quant_nvfp4", "scale_per_group", "inputs_quantized"}, 100),
        ("torch.quantized_linear.scaled_mm_block", "quantized_linear",
         {"quant_mxfp4", "scale_per_group", "inputs_quantized"}, 100),
        ("flash_attn_3.attention.fp8", "attention",
         {"causal", "gqa", "kv_scale_per_head"}, 90),
    ],
)  # fmt: skip
def test_narrow_formats_are_a_matter_of_the_op(
    kernel_id: str, op: str, features: set[str], least: int
) -> None:
    """K7: float8 products from 8.9, float8 attention from 9.0, four-bit formats from 10.0, as data."""
    dtype = "float8_e4m3fn" if op == "attention" else "bfloat16"
    request = CallSpec(
        op=op, platform="cuda", dtype=dtype, dtypes=(dtype,), features=frozenset(features), layout="BSHD",
        dims={"N": 64, "C": 1024, "K": 1024, "S": 32, "D": 128, "Dv": 128},
    )  # fmt: skip
    verdicts = {sm: rejections(BY_ID[kernel_id], request, gpu(sm)) for sm in (75, 80, 86, 89, 90, 100)}
    assert next(sm for sm, reasons in verdicts.items() if not reasons) == least
    for sm, reasons in verdicts.items():
        if sm < least:
            assert Reason.SM_TOO_OLD in {r.reason for r in reasons}
    if op == "attention":  # who takes such codes without making them numbers
        takes = {k.id for k in EVERY if not rejections(k, request, gpu(90))}
        assert takes == {kernel_id, "triton.attention.codes", "reference.attention"}


def ask(hardware: str, size: int = 128, heads: int = 32) -> Selection:
    q = torch.empty(1, 2048, 32, size, dtype=torch.bfloat16)
    k = torch.empty(1, 2048, heads, size, dtype=torch.bfloat16)
    return lz.dry_run("attention", q, k, k, is_causal=True, layout="BSHD", hardware=hardware)


@pytest.mark.parametrize(
    ("hardware", "kernel"),
    [
        ("mi300x", "aiter.attention.fmha_v3"), ("mi355x", "aiter.attention.fmha_v3"),
        ("gaudi2", "gaudi.attention.fused_sdpa"), ("gaudi3", "gaudi.attention.fused_sdpa"),
        ("m3_max", "mps.attention.sdpa"),
    ],
)  # fmt: skip
def test_a_choice_that_is_data_alone_says_so(hardware: str, kernel: str) -> None:
    """`dry_run` names the kernel of hardware that nobody here has, and that no code here calls it."""
    selection = ask(hardware)
    assert selection.kernel == kernel and selection.why.startswith(DESCRIPTOR_ONLY)
    accepted = selection.candidate(kernel).accepted
    assert accepted is not None and accepted.note == DESCRIPTOR_ONLY


def test_what_is_missing_has_a_name() -> None:
    """Other architectures, other vendors, sizes and platforms are reasons, as for kernels that exist."""
    older = ask("mi250x")
    (reason,) = older.candidate("aiter.attention.fmha_v3").rejected
    assert reason.reason is Reason.ARCH_UNSUPPORTED and "gfx942 or gfx950, got gfx90a" in str(reason)
    assert (
        older.candidate("ck.attention.fmha").eligible and older.candidate("aotriton.attention.flash").eligible
    )
    wide = ask("mi300x", size=192)
    codes = {r.reason for r in wide.candidate("aiter.attention.fmha_v3").rejected}
    assert codes == {Reason.HEAD_DIM_INVALID}
    desktop = ask("rx7900xtx")
    assert desktop.candidate("aotriton.attention.flash_rdna").eligible
    assert desktop.candidate("mps.attention.sdpa").rejected[0].reason is Reason.PLATFORM_MISMATCH
    with pytest.raises(NoKernelFoundError, match=r"mps.attention.sdpa: .*GQA_UNSUPPORTED"):
        ask("m3_max", heads=8)
    arm = lz.dry_run("linear", torch.empty(64, 512), torch.empty(256, 512), hardware="graviton3")
    assert arm.candidate("acl.linear.onednn").eligible
    with pytest.raises(ConfigurationError, match="did you mean 'mi300x'"):
        ask("mi300")


def test_a_descriptor_is_never_run() -> None:
    """Registered all the same, it is refused by name with its reason, and nothing of it is imported."""
    for kernel in descriptors_of():
        with pytest.raises(BackendNotAvailableError, match="descriptor only"):
            kernel.load()
    registry = Registry(descriptors_of("attention"), lambda _: [])
    name = "mps.attention.sdpa"
    with pytest.raises(BackendNotAvailableError):
        registry.callable_of(name)
    assert registry.blocked()[name].reason is Reason.DESCRIPTOR_ONLY


def test_descriptors_are_sound_and_apart() -> None:
    """Each has limits that can be judged, a source, an id of its own; none is in a device's registry."""
    every = descriptors_of()
    assert {k.id: problems(k.capability) for k in every if problems(k.capability)} == {}
    assert len({k.id for k in every}) == len(every) == sum(map(len, FAMILIES.values()))
    assert all(k.descriptor and k.op in ops_table.FILES for k in every)
    real = load_builtin()
    assert not {k.id for k in every} & {k.id for k in real} and not any(k.descriptor for k in real)
    assert all(imagine_hardware(name) is hardware for name, hardware in DEVICES.items())


def test_on_hardware_that_is_here_nothing_is_described() -> None:
    """Choices and explanations on this machine hold no descriptor, and `dry_run` without hardware neither."""
    x: Any = torch.randn(4, 32)
    for selection in (lz.explain("rms_norm", x).selection, lz.dry_run("rms_norm", x, strict=False)):
        assert not any(c.kernel in {k.id for k in descriptors_of()} for c in selection.trace)
    absent: list[Kernel] = [k for k in descriptors_of("attention") if availability(k)]
    assert absent, "their libraries are not installed here"
