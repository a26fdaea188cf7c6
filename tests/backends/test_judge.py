"""Every limit of every kernel speaks for itself: a request that breaks one thing gets that reason, alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

import layerzero
from layerzero.backends import load_builtin
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import ACTIVATIONS, FEATURE_REASONS, INDEX_DTYPES, Capability
from layerzero.spec.condition import Condition, parse_limit
from layerzero.spec.hardware import Hardware, MMAFamily
from layerzero.spec.kernel import Efficiency, Kernel, rejections
from layerzero.spec.reasons import Reason

# A kernel that has every limit there is: what no real kernel claims yet is judged here all the same.
FULL = Kernel(
    id="made_up.attention.full",
    op="attention",
    backend="made_up",
    capability=Capability(
        source="made up",
        platforms=frozenset({"cuda"}),
        sm_min=80,
        sm_max=89,
        mma_families=frozenset({MMAFamily.WMMA, MMAFamily.WGMMA}),
        torch_min="2.11",
        torch_below="2.99",
        cuda_min="12.8",
        driver_min="570.0",
        dtypes=frozenset({"bfloat16"}),
        index_dtypes=frozenset({"int32"}),
        layouts=frozenset({"BSHD"}),
        contiguous=True,
        last_stride1=True,
        alignment=16,
        limits=(
            "D <= 256 else HEAD_DIM_TOO_LARGE",
            "D >= 32 else HEAD_DIM_TOO_SMALL",
            "D % 8 == 0 else HEAD_DIM_ALIGNMENT",
            "D == Dv else HEAD_DIMS_DIFFER",
            "Sk <= 1048576 else SEQ_TOO_LONG",
            "Sk >= 2 else SEQ_TOO_SHORT",
            "B <= 4096 else BATCH_TOO_LARGE",
            "B >= 2 else BATCH_TOO_SMALL",
            "G in [1, 2, 4, 8] else GROUP_SIZE_UNSUPPORTED",
            "P in [16, 32, 64] else PAGE_SIZE_UNSUPPORTED",
            "Hk % 2 == 0 else HEADS_UNSUPPORTED",
            "N <= 1000 else ROWS_UNSUPPORTED",
            "C <= 65536 else WIDTH_TOO_LARGE",
            "C % 4 == 0 else WIDTH_ALIGNMENT",
            "V in [128, 256]",
            "K in [64, 128] else HEAD_DIM_INVALID",
            "B * Hq <= 65535 else CUDA_BLOCK_LIMIT_EXCEEDED",
            "Sq == Sk when causal else SEQ_LENGTHS_DIFFER",
        ),
        features=frozenset({"causal"}),
        gradient=False,
        deterministic=False,
        autocast=False,
    ),
    load=lambda: print,
    efficiency=Efficiency(1.0, 1.0, 1.0, "made up"),
)
CPU_ONLY = Kernel(
    id="made_up.linear.cpu",
    op="linear",
    backend="made_up",
    capability=Capability(
        source="made up",
        platforms=frozenset({"cpu"}),
        cpu_vendors=frozenset({"amd"}),
        isa=frozenset({"avx512f"}),
        half_isa=frozenset({"avx512bw"}),
    ),
    load=lambda: print,
    efficiency=Efficiency(1.0, 1.0, 1.0, "made up"),
)
KERNELS = [*load_builtin(), FULL, CPU_ONLY]
# The capability's promises: what a request calls the mode, and the reason where the promise is missing.
MODES = {
    "gradient": ("grad", Reason.NO_GRADIENT),
    "deterministic": ("deterministic", Reason.NOT_DETERMINISTIC),
    "batch_invariant": ("batch_invariant", Reason.NOT_BATCH_INVARIANT),
    "graph_safe": ("capture", Reason.CUDA_GRAPH_UNSAFE),
    "autocast": ("autocast", Reason.AUTOCAST_UNSUPPORTED),
    "tp_invariant": ("tp_invariant", Reason.TP_INVARIANCE_REQUIRED),
}


@dataclass(frozen=True)
class Violation:
    """One broken thing and the reason it has to give."""

    what: str
    reason: Reason
    request: CallSpec
    hardware: Hardware


def fitting(kernel: Kernel) -> tuple[CallSpec, Hardware]:
    """A request and a device that the kernel accepts, at its most restricted."""
    cap = kernel.capability
    platform = min(cap.platforms)
    dims = dict.fromkeys(("Sq", "Sk", "D", "Dv", "N", "C", "K", "F", "R"), 64)
    dims |= {"B": 2, "Hq": 8, "Hk": 4, "G": 2, "V": 128, "P": 16}
    for condition in (parse_limit(text).condition for text in cap.limits):
        match condition:
            case Condition(dim, "in", tuple(values)) if dim in dims and dims[dim] not in values:
                dims[dim] = int(values[0])
            case Condition(dim, "%", int(value)) if dim in dims:
                dims[dim] = -(-dims[dim] // value) * value
    if any(text.startswith("D == Dv") for text in cap.limits):
        dims["Dv"] = dims["D"]
    dtype = min(cap.dtypes)
    layout = min(cap.layouts) if cap.layouts else ""
    features = frozenset({min(cap.only_with)}) if cap.only_with else frozenset[str]()
    request = CallSpec(
        op=kernel.op, platform=platform, dtype=dtype, dtypes=(dtype,), dims=dims, layout=layout,
        features=features,
    )  # fmt: skip
    hardware = Hardware(
        platform=platform,
        device=platform,
        name="fitting",
        vendor=min(cap.cpu_vendors or {"amd"}),
        sm=max(cap.sm_min or 90, 80),
        isa=cap.isa | cap.half_isa,
        torch=cap.torch_min or "2.13.0",
        cuda=cap.cuda_min or "13.0",
        driver=cap.driver_min or "580.0",
    )
    return request, hardware


def violations(kernel: Kernel) -> Iterator[Violation]:
    """For each field of the capability, a request or a device that breaks it and nothing else."""
    request, hardware = fitting(kernel)
    for what, reason, broken in _hardware_violations(kernel.capability, hardware.platform):
        yield Violation(what, reason, request, msgspec.structs.replace(hardware, **broken))
    for what, reason, changes in (
        *_operand_violations(kernel.capability, request),
        *_feature_violations(kernel.capability),
        *_limit_violations(kernel.capability, request),
    ):
        yield Violation(what, reason, request.replace(**changes), hardware)


Broken = tuple[str, Reason, dict[str, Any]]


def _hardware_violations(cap: Capability, platform: str) -> Iterator[Broken]:
    yield "platform", Reason.PLATFORM_MISMATCH, {"platform": "xpu"}
    if cap.torch_min:
        yield "torch_min", Reason.TORCH_TOO_OLD, {"torch": "2.0.0"}
    if cap.torch_below:
        yield "torch_below", Reason.TORCH_TOO_NEW, {"torch": cap.torch_below}
    if cap.cpu_vendors is not None:
        yield "cpu_vendors", Reason.CPU_VENDOR_UNSUPPORTED, {"vendor": "nobody"}
    if cap.isa:
        yield "isa", Reason.ISA_MISSING, {"isa": cap.half_isa - cap.isa}
    if cap.half_isa:
        yield "half_isa", Reason.ISA_MISSING, {"isa": cap.isa}
    if platform == "cuda":
        if cap.sm_min is not None:
            yield "sm_min", Reason.SM_TOO_OLD, {"sm": cap.sm_min - 1}
        if cap.sm_max is not None:
            yield "sm_max", Reason.SM_TOO_NEW, {"sm": cap.sm_max + 1}
        if cap.cuda_min:
            yield "cuda_min", Reason.CUDA_TOO_OLD, {"cuda": "11.8"}
        if cap.driver_min:
            yield "driver_min", Reason.DRIVER_TOO_OLD, {"driver": "470.1"}


def _operand_violations(cap: Capability, request: CallSpec) -> Iterator[Broken]:
    odd = next(dtype for dtype in ("float8_e5m2", "complex64") if dtype not in cap.dtypes)
    yield "dtypes", Reason.DTYPE_UNSUPPORTED, {"dtype": odd, "dtypes": (odd,)}
    if not cap.mixed_dtypes:
        yield "mixed_dtypes", Reason.DTYPES_MIXED, {"dtypes": (request.dtype, odd)}
    for index in sorted(INDEX_DTYPES - cap.index_dtypes):
        yield "index_dtypes", Reason.INDEX_DTYPE_UNSUPPORTED, {"dtypes": (request.dtype, index)}
    if cap.layouts:
        yield "layouts", Reason.LAYOUT_UNSUPPORTED, {"layout": "THD"}
    if cap.contiguous:
        yield "contiguous", Reason.NOT_CONTIGUOUS, {"contiguous": False}
    if cap.last_stride1:
        yield "last_stride1", Reason.STRIDE_LAST_DIM, {"last_stride1": False}
    if cap.alignment > 1:
        yield "alignment", Reason.MISALIGNED, {"alignment": cap.alignment // 2}


def _feature_violations(cap: Capability) -> Iterator[Broken]:
    reasons = dict(FEATURE_REASONS)
    reasons.update((f"act_{name}", Reason.ACTIVATION_UNSUPPORTED) for name in ACTIVATIONS)
    reasons["unheard_of"] = Reason.FEATURE_UNSUPPORTED
    for feature in sorted(reasons.keys() - cap.features):
        yield feature, reasons[feature], {"features": frozenset({feature, *sorted(cap.only_with)[:1]})}
    for flag, (mode, reason) in MODES.items():
        if not getattr(cap, flag):
            yield flag, reason, {"modes": frozenset({mode})}


def _limit_violations(cap: Capability, request: CallSpec) -> Iterator[Broken]:
    for limit in map(parse_limit, cap.limits):
        features = frozenset({*([limit.when] if limit.when else []), *sorted(cap.only_with)[:1]})
        dims = {**request.dims, **beyond(limit.condition, request, cap)}
        yield f"{limit.dim} {limit.needs()}", limit.code, {"dims": dims, "features": features}


def beyond(bound: Condition, request: CallSpec, cap: Capability) -> dict[str, int]:
    """Sizes one step beyond a limit, all others kept: a step is what the size has to be a multiple of."""
    dim = bound.field
    others = [parse_limit(text).condition for text in cap.limits]
    steps = [int(str(other.value)) for other in others if (other.field, other.operator) == (dim, "%")]
    step = max(steps, default=8 if dim == "D" else 1)
    match bound:
        case Condition(operator="<=", value=int(value)) if len(bound.axes) > 1:
            return {bound.axes[0]: 4096, bound.axes[1]: value // 4096 + 1}
        case Condition(operator="<=", value=int(value)):
            size = value + step
        case Condition(operator=">=", value=int(value)):
            size = (value - 1) // step * step
        case Condition(operator="%"):
            size = request.dim(dim) + 1
            if dim == "Dv":
                return {"Dv": size, "D": size - 1}
        case Condition(operator="in", value=tuple(values)):
            size = max(int(value) for value in values) + step
        case Condition(operator="==", value=str(other)):
            return {other: request.dim(dim) * 2}
        case _:
            raise AssertionError(f"no call is made beyond {bound}")
    return {dim: size, **({"Dv": size} if dim == "D" else {})}


ALL = [(k, v) for k in KERNELS for v in violations(k)]


@pytest.mark.parametrize("kernel", KERNELS, ids=[k.id for k in KERNELS])
def test_the_fitting_request_is_accepted(kernel: Kernel) -> None:
    """Without a violation there is no reason."""
    request, hardware = fitting(kernel)
    assert rejections(kernel, request, hardware) == []


@pytest.mark.parametrize("kernel", KERNELS, ids=[k.id for k in KERNELS])
def test_each_violation_gives_exactly_its_reason(kernel: Kernel) -> None:
    """One broken field, one reason; no field of a capability is decoration."""
    found = list(violations(kernel))
    assert len(found) >= 4  # a promise cannot be broken, and the reference promises most
    for violation in found:
        reasons = rejections(kernel, violation.request, violation.hardware)
        assert {r.reason for r in reasons} == {violation.reason}, (violation.what, reasons)
        assert reasons[0].needs and reasons[0].got


def test_all_violations_together_are_all_reported() -> None:
    """The list holds every reason, not the first."""
    request, hardware = fitting(FULL)
    worst = request.replace(
        dtype="float32", layout="BHSD", contiguous=False, last_stride1=False, alignment=4,
        features=frozenset({"softcap", "lse"}), modes=frozenset({"grad", "deterministic"}),
        dims={**request.dims, "D": 300, "Dv": 300},
    )  # fmt: skip
    got = {r.reason for r in rejections(FULL, worst, msgspec.structs.replace(hardware, sm=75))}
    assert got == {
        Reason.SM_TOO_OLD, Reason.DTYPE_UNSUPPORTED, Reason.LAYOUT_UNSUPPORTED, Reason.NOT_CONTIGUOUS,
        Reason.STRIDE_LAST_DIM, Reason.MISALIGNED, Reason.SOFTCAP_UNSUPPORTED, Reason.LSE_UNSUPPORTED,
        Reason.NO_GRADIENT, Reason.NOT_DETERMINISTIC, Reason.HEAD_DIM_TOO_LARGE, Reason.HEAD_DIM_ALIGNMENT,
    }  # fmt: skip


def test_the_tensor_core_family_is_judged() -> None:
    """A Blackwell that has no tensor core family of the kernel's is refused for it."""
    request, hardware = fitting(FULL)
    newer = msgspec.structs.replace(hardware, sm=100)
    assert {r.reason for r in rejections(FULL, request, newer)} == {
        Reason.SM_TOO_NEW,
        Reason.MMA_FAMILY_UNSUPPORTED,
    }


@pytest.mark.parametrize(
    ("feature", "words", "cure"),
    [
        ("gqa", "GQA_UNSUPPORTED: needs calls without gqa, got gqa", "no gqa"),
        ("no_weight", "WEIGHT_REQUIRED: weight needs one, got none", "a weight"),
    ],
)
def test_a_missing_feature_reads_as_a_sentence(feature: str, words: str, cure: str) -> None:
    """What the kernel needs, what the call has, and a cure that stands behind "would take it with"."""
    request, hardware = fitting(CPU_ONLY)
    (rejected,) = rejections(CPU_ONLY, request.replace(features=frozenset({feature})), hardware)
    assert str(rejected) == words
    assert rejected.counterfactual == cure


def test_every_reason_has_a_producer() -> None:
    """No code is a word alone: the library's own code names it, a feature, or a limit."""
    produced = {reason.value for reason in FEATURE_REASONS.values()}
    root = Path(layerzero.__file__).parent
    for folder in (root, root.parent / "actors", root.parent / "scheduler"):
        for path in (*folder.rglob("*.py"), *folder.rglob("*.toml")):
            if path.name == "reasons.py":
                continue
            text = path.read_text()
            produced |= set(re.findall(r"else ([A-Z][A-Z0-9_]+)", text))
            if path.suffix == ".py" and "Reason" in text:
                produced |= _reasons_in(path)
    assert {reason.value for reason in Reason} - produced == set()


def _reasons_in(path: Path) -> set[str]:
    """The codes that a module makes; to compare with one makes none."""
    tree = ast.parse(path.read_text())
    read = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"
        if id(node) not in read
    }
