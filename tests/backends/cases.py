"""Calls generated from what kernels claim: every feature, pair of features, dtype, layout and size.

What a case is and how its arguments come about stands in `calls.py`, what it must give in `truths.py`; tests
find both here. LAYERZERO_TEST_DTYPES, names with commas between, keeps to some of the dtypes.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import msgspec
import pytest
import torch

from layerzero.backends import availability, load_builtin
from layerzero.formats.table import FORMATS
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import ACTIVATIONS, FLOATS
from layerzero.spec.condition import Condition, parse_limit
from layerzero.spec.hardware import Hardware, hypothetical_gpu, probe
from layerzero.spec.kernel import Kernel, rejections
from tests.backends.calls import DEVICE as DEVICE
from tests.backends.calls import OVER_SEQUENCES
from tests.backends.calls import Case as Case
from tests.backends.calls import call as call
from tests.backends.calls import to as to
from tests.backends.truths import as_tuple as as_tuple
from tests.backends.truths import baseline as baseline
from tests.backends.truths import expected as expected
from tests.backends.truths import results as results
from tests.backends.truths import truth as truth
from tests.backends.truths import widened as widened


def of_any_vendor(kernel: Kernel) -> Kernel:
    """A kernel of this project without the CPU's vendor: that says where it was seen faster, not right."""
    if kernel.backend != "native" or kernel.capability.cpu_vendors is None:
        return kernel
    capability = msgspec.structs.replace(kernel.capability, cpu_vendors=None)
    return replace(kernel, capability=capability)


KERNELS: list[Kernel] = [of_any_vendor(kernel) for kernel in load_builtin()]
# Triton's interpreter runs a GPU's kernels on tensors of the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE: Hardware = hypothetical_gpu(90) if INTERPRETED else probe("cuda:0" if DEVICE == "cuda" else DEVICE)
_DTYPES = frozenset(os.environ.get("LAYERZERO_TEST_DTYPES", ",".join(FLOATS)).split(","))


def why_not_here(kernel: Kernel, device: Hardware | None = None) -> str:
    """Why the kernel cannot run on a device of this machine, the one under test if none; empty if it can."""
    hardware = {"hardware", "backend"}
    against = []
    for dtype in sorted(kernel.capability.dtypes):
        request = CallSpec(op=kernel.op, dtype=dtype)
        missing = [*availability(kernel), *rejections(kernel, request, device or HERE)]
        against.append("; ".join(str(m) for m in missing if m.reason.category.value in hardware))
    return min(against, key=len)  # one dtype that runs is enough


# What kernels that are compiled here need.
COMPILED = (
    pytest.mark.skipif(sys.platform != "linux", reason="the kernels are compiled on Linux only"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"),
)
RUNNABLE = [k for k in KERNELS if not why_not_here(k)]


# Formats of codes, and what shares a scale where it is not the whole pool.
CODED = ("kv_float8_e4m3fn", "kv_float8_e5m2", "kv_int8", "kv_scale_per_token")
_QUANTS = tuple(f"quant_{name}" for name in FORMATS if name != "int8")
_SCALES = ("scale_per_tensor", "scale_per_group", "scale_per_block")
_PARTS = ("scale_16bit", "zero_point", "tensor_scale")
_INPUTS = ("inputs_quantized", "inputs_int8", "inputs_fp8_e4m3")
ASKS: dict[str, tuple[str, ...]] = {
    "attention": (
        "causal", "mask_bool", "mask_float", "mask_wide", "empty_rows", "gqa", "scale", "scale_not_positive",
        "window", "softcap", "alibi", "lse", "bshd", "sinks", "score_mod", "block_mask",
        *CODED, "kv_scale_per_head",
    ),
    "paged_attention": (
        "causal", "prefill", "gqa", "scale", "scale_not_positive", "window", "softcap", "lse", "hnd",
        "kv_float32", "kv_bfloat16", "kv_float16", *CODED, "kv_scale_per_head",
    ),
    "append_kv": (
        "hnd", "kv_strided", "kv_float32", "kv_bfloat16", "kv_float16", "kv_float64", *CODED,
        "kv_scale_per_head",
    ),
    "ragged_attention": (
        "causal", "gqa", "scale", "scale_not_positive", "window", "softcap", "lse", *CODED,
        "kv_scale_per_head",
    ),
    "mla_attention": (
        "causal", "prefill", "gqa", "scale_not_positive", "lse", "kv_float32", "kv_bfloat16", "kv_float16",
        *CODED,
    ),
    "rms_norm": ("no_weight",),
    "add_rms_norm": ("no_weight",),
    "add_rms_norm_quantize": ("quant_fp8_e4m3", "quant_fp8_e5m2", "scale_per_group", "no_weight"),
    "layer_norm": ("no_weight", "bias"),
    "add_layer_norm": ("no_weight", "bias"),
    "linear": ("bias",),
    "rms_norm_linear": ("bias", "no_weight"),
    "mlp": ("bias", *(f"act_{name}" for name in ACTIVATIONS)),
    "embedding": ("padding_idx",),
    "cross_entropy": ("mean", "label_smoothing", "class_weights"),
    "quantize": (*_QUANTS, *_SCALES, "scale_given", "tensor_scale"),
    "dequantize": (*_QUANTS, *_SCALES, *_PARTS),
    "quantized_linear": (*_QUANTS, *_SCALES, *_PARTS, "bias", *_INPUTS),
    "select_experts": ("bias", "scores_sigmoid", "scores_raw", "expert_groups"),
    "fused_experts": (
        *_QUANTS, *_SCALES, *_PARTS, *_INPUTS, "weights_plain", "gate_second", "weighed_inputs",
        "local_experts", "shared_experts", "act_geglu", "act_geglu_tanh", "act_reglu",
    ),
    "linear_cross_entropy": ("mean", "label_smoothing", "bias"),
    "moe": ("act_geglu", "act_geglu_tanh", "act_reglu", "scores_sigmoid", "scores_raw"),
    "rope": ("interleaved", "partial_rotary", "xpos"),
    "rope_append_kv": (
        "interleaved", "partial_rotary", "hnd", "kv_strided", "kv_float32", "kv_bfloat16", "kv_float16",
        "kv_float64",
    ),
    "sample": ("seed_per_row", "top_k", "top_p"),
    "sample_topk": ("seed_per_row",),
    "sample_topp": ("seed_per_row",),
    "verify_chain": ("seed_per_row",),
    "verify_tree": ("seed_per_row",),
}  # fmt: skip

_SIZES: dict[str, tuple[dict[str, int], ...]] = {
    "attention": (
        {"Sq": 8, "Sk": 8},
        {"Sq": 2, "Sk": 5},
        {"Sq": 13, "Sk": 5},
        {"Sq": 1, "Sk": 1, "D": 1},
        {"B": 1, "Sq": 1, "Sk": 131, "D": 64},
        {"B": 1, "Hq": 2, "Hk": 2, "Sq": 67, "Sk": 130, "D": 40},
        {"D": 16, "Dv": 8},
    ),
    "rope": ({"N": 1}, {"N": 17, "D": 64}),
    "rope_append_kv": ({"P": 1}, {"P": 64, "D": 40, "Dv": 24}, {"N": 1, "D": 2, "Hk": 1}, {"N": 130}),
    "paged_attention": ({"P": 1}, {"P": 64, "D": 40}, {"N": 1, "D": 1}, {"D": 128, "Dv": 24}),
    "ragged_attention": ({"D": 1}, {"D": 128, "Dv": 24}, {"Hq": 6, "Hk": 1}),
    "mla_attention": ({"P": 1}, {"P": 64, "D": 40}, {"N": 1, "D": 1}),
    "moe": ({"N": 1, "T": 1}, {"N": 33, "C": 31, "E": 8, "T": 8}, {"N": 3, "E": 1, "T": 1}, {"C": 128}),
    "select_experts": ({"N": 1, "E": 1, "T": 1}, {"N": 33, "E": 128, "T": 8}, {"E": 12, "T": 5}),
    "fused_experts": (
        {"N": 1, "T": 1},
        {"N": 33, "C": 31, "E": 8, "T": 8},
        {"N": 3, "E": 1, "T": 1},
        {"C": 128},
    ),
    "append_kv": ({"P": 1}, {"P": 64, "D": 40, "Dv": 24}, {"N": 1, "D": 1, "Hk": 1}, {"N": 130, "P": 16}),
}
# What GPU kernels have tiles and limits around, too slow for the references of a test on two cores.
_GPU_SIZES: dict[str, tuple[dict[str, int], ...]] = {
    "attention": ({"Sq": 200, "Sk": 333, "D": 128}, {"B": 1, "Sq": 1, "Sk": 700, "D": 64, "Hq": 8, "Hk": 2}),
    "paged_attention": ({"P": 16, "D": 128, "N": 5}, {"P": 64, "D": 64, "N": 4}, {"P": 1, "D": 64}),
    "ragged_attention": ({"D": 128}, {"D": 64, "Hq": 8, "Hk": 1}),
}
_ROW_SIZES: tuple[dict[str, int], ...] = (
    {"N": 1, "C": 1}, {"N": 1, "C": 2}, {"N": 1, "C": 384}, {"N": 33, "C": 31}, {"N": 64, "C": 128, "K": 128},
)  # fmt: skip


# Asks of which a call can have one.
_ONE_OF = ("mask", "act_", "quant_", "scale_per_", "inputs_")
# Parts that do not meet inside a kernel; pairs of them are hundreds.
_NOT_IN_PAIRS = frozenset({"fused_experts"})
# What some kernels take only all together, beyond pairs.
_TOGETHER = {
    "quantized_linear": (
        ("quant_fp8_e4m3", "inputs_quantized", "bias"), ("quant_int4", "scale_per_group", "zero_point"),
        ("quant_fp8_e4m3", "scale_per_block", "inputs_quantized"), ("quant_nf4", "scale_per_group",
        "scale_16bit"),
    ),
    "fused_experts": (
        ("quant_int4", "scale_per_group", "zero_point", "shared_experts", "local_experts"),
        ("quant_fp8_e4m3", "scale_per_block", "inputs_quantized", "gate_second"), ("quant_nvfp4",
        "tensor_scale"), ("quant_mxfp4", "inputs_int8", "weighed_inputs"), ("quant_nf4", "scale_per_group",
        "shared_experts"),
    ),
}  # fmt: skip


# Triton's interpreter runs programs one by one, and a row is its own: a few rows, at most more than a page.
_INTERPRETED_ROWS, _INTERPRETED_MOST = 5, 18
# Below these the sizes that cases have anyhow are enough.
_SMALL = {"%": 16, ">=": 9}


def base_of(kernel: Kernel) -> dict[str, int]:
    """The sizes that every call needs for the kernel to take it, where it does not take any."""
    base: dict[str, int] = {}
    for condition in (parse_limit(text).condition for text in kernel.capability.limits):
        match condition:
            case Condition(dim, "in", tuple(values)):
                base[dim] = int(values[0])
            case Condition(dim, "%" | ">=", int(value)) if value > _SMALL[condition.operator]:
                base[dim] = value
    if INTERPRETED and kernel.op not in OVER_SEQUENCES:
        base.setdefault("N", _INTERPRETED_ROWS)
    if "S" in base and "K" in base:
        base["K"] = max(base["K"], 2 * base["S"])  # one group of all columns is a scale a row
    return base


def needed(kernel: Kernel) -> tuple[str, ...]:
    """What every call asks of a kernel that takes no plain one: of each kind of asks the first that it takes.

    The formats of codes, the ways of sharing scales that are its only ones, what it says it is for.
    """
    capability, first = kernel.capability, list[str]()
    taken = [ask for ask in ASKS.get(kernel.op, ()) if ask in capability.features]
    shared = [name for name in capability.features if name.startswith("scale_per_")]
    if capability.only_with:
        first.append(next(ask for ask in taken if ask in capability.only_with))
    if kernel.op in ("quantized_linear", "fused_experts"):
        formats = [ask for ask in taken if ask.startswith("quant_")]
        first += [] if "quant_int8" in capability.features else formats[:1]
        first += shared if len(shared) == 1 and shared[0] in taken else []
    return tuple(first)


def asking(kernel: Kernel, *asks: str) -> tuple[str, ...]:
    """These asks, and those that the kernel needs of the kinds that they have none of."""
    kinds = [frozenset(kernel.capability.only_with), *(_of_kind(kind) for kind in ("quant_", "scale_per_"))]
    open_kinds = [kind for kind in kinds if not kind.intersection(asks)]
    return (*(ask for ask in needed(kernel) if any(ask in kind for kind in open_kinds)), *asks)


@functools.cache
def _of_kind(kind: str) -> frozenset[str]:
    return frozenset(ask for asks in ASKS.values() for ask in asks if ask.startswith(kind))


def cases_of(kernel: Kernel) -> Iterator[Case]:
    """The calls of a kernel's op, in the sizes, the layout and the format that it takes."""
    first = ("bshd",) if kernel.capability.layouts == {"BSHD"} else ()
    for case in cases(kernel.op, base_of(kernel)):
        yield replace(case, asks=(*first, *asking(kernel, *(a for a in case.asks if a not in first))))


def cases(op: str, base: Mapping[str, int] = MappingProxyType({})) -> Iterator[Case]:
    """The plain call, each thing asked alone, each pair, each size, and operands with gaps between rows.

    `base` are sizes of every call, unless a size of its own says otherwise.
    """
    asks = ASKS.get(op, ())
    always = dict(base)
    yield Case(op, dims=always)
    yield Case(op, dims=always, strided=True)
    for ask in asks:
        yield Case(op, (ask,), always)
    for pair in itertools.combinations(asks, 2) if op not in _NOT_IN_PAIRS else ():
        if _pairs_codes(pair) and not any(all(ask.startswith(kind) for ask in pair) for kind in _ONE_OF):
            yield Case(op, pair, always)
    for asked in _TOGETHER.get(op, ()):
        yield Case(op, asked, always)
    for own in (*_SIZES.get(op, _ROW_SIZES), *(_GPU_SIZES.get(op, ()) if DEVICE != "cpu" else ())):
        dims = always | own
        if INTERPRETED and "N" in dims:
            dims["N"] = min(dims["N"], _INTERPRETED_MOST)
        if op == "layer_norm" and dims.get("C") == 1:
            continue  # the truth is zero: any rounding is an error of 100 %
        yield Case(op, dims=dims)
        if op == "attention" and "Dv" not in dims:
            yield Case(op, ("causal",), dims)


def _pairs_codes(pair: tuple[str, ...]) -> bool:
    """Whether a pair with codes in it is worth a case: what says where they and their scales lie is."""
    coded = [ask for ask in pair if ask in CODED or ask.startswith("kv_scale_")]
    if len(coded) == 2:
        return coded[0].startswith("kv_scale_") != coded[1].startswith("kv_scale_")
    others = [ask for ask in pair if ask not in coded]
    return not coded or others[0] in ("hnd", "prefill", "gqa", "kv_strided")


def dtypes(kernel: Kernel) -> list[torch.dtype]:
    """The floating dtypes that the kernel claims."""
    return [getattr(torch, name) for name in sorted(kernel.capability.dtypes & FLOATS & _DTYPES)]
