"""What a kernel can take, as data: platforms, versions, dtypes, features, and limits on sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from layerzero.spec.errors import CacheCorruptionError
from layerzero.spec.hardware import MMAFamily
from layerzero.spec.reasons import Reason

ALL_PLATFORMS = frozenset({"cpu", "cuda", "rocm"})
FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})
HALF = frozenset({"float16", "bfloat16"})

# What a call asks where torch's switches rule an implementation of attention out. Each of torch's four has
# what it needs beside itself; a kernel that is none of them has nothing of it.
SDPA_SWITCHED_OFF = ("sdpa_no_flash", "sdpa_no_efficient", "sdpa_no_math", "sdpa_no_cudnn")
SDPA_FLASH, SDPA_EFFICIENT, SDPA_MATH, SDPA_CUDNN = (
    " ".join(feature for feature in SDPA_SWITCHED_OFF if feature != own) for own in SDPA_SWITCHED_OFF
)

# Features whose reasons are named like them.
_NAMESAKES = (
    "causal mask_bool mask_float gqa dropout scale window softcap alibi lse sinks score_mod "
    "block_mask xpos bias interleaved partial_rotary padding_idx label_smoothing class_weights "
    "seed_per_row top_k top_p"
)
# What a call may ask for, and the reason a kernel without it gives.
FEATURE_REASONS: Mapping[str, Reason] = {
    **{name: Reason[f"{name.upper()}_UNSUPPORTED"] for name in _NAMESAKES.split()},
    "mask_and_causal": Reason.MASK_WITH_CAUSAL,
    "empty_rows": Reason.EMPTY_ROWS_UNSAFE,
    "scale_not_positive": Reason.SCALE_UNSUPPORTED,
    "lse_grad": Reason.LSE_GRADIENT_UNSUPPORTED,
    "mask_grad": Reason.MASK_GRADIENT_UNSUPPORTED,
    "mask_wide": Reason.MASK_DTYPE_UNSUPPORTED,
    "sinks_grad": Reason.SINKS_GRADIENT_UNSUPPORTED,
    **dict.fromkeys(SDPA_SWITCHED_OFF, Reason.SDPA_BACKEND_DISABLED),
    "no_weight": Reason.WEIGHT_REQUIRED,
    "top_k_and_top_p": Reason.TOP_K_WITH_TOP_P,
    **dict.fromkeys(
        ("prefill", "kv_strided", "scale_given", "inputs_float", "inputs_quantized", "scores_sigmoid",
         "scores_raw", "gate_second", "weighed_inputs", "local_experts", "shared_experts",
         "weights_plain", "expert_groups"),
        Reason.FEATURE_UNSUPPORTED,
    ),
    **dict.fromkeys(
        ("kv_float64", "kv_float32", "kv_float16", "kv_bfloat16", "kv_float8_e4m3fn", "kv_float8_e5m2",
         "kv_int8"),
        Reason.KV_DTYPE_MISMATCH,
    ),
    **dict.fromkeys(
        ("kv_scale_per_tensor", "kv_scale_per_head", "kv_scale_per_token"), Reason.SCALE_LAYOUT_MISMATCH
    ),
    **dict.fromkeys(
        ("quant_int4", "quant_nf4", "quant_mxfp4", "quant_mxfp8", "quant_nvfp4", "quant_int8",
         "quant_fp8_e4m3", "quant_fp8_e5m2", "inputs_int8", "inputs_fp8_e4m3"),
        Reason.QUANT_FORMAT_UNSUPPORTED,
    ),
    **dict.fromkeys(
        ("scale_per_tensor", "scale_per_row", "scale_per_group", "scale_per_block", "scale_16bit",
         "tensor_scale", "zero_point"),
        Reason.SCALE_LAYOUT_MISMATCH,
    ),
}  # fmt: skip
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "silu", "relu")
INDEX_DTYPES = frozenset({"int32", "int64"})


class Capability(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel's limits, each field one fact; `source` says where they come from.

    `features` lists what the kernel can do of `FEATURE_REASONS` (and `act_<name>` for activations);
    `half_isa` is what bfloat16 and float16 need on a CPU beyond `isa`.
    Where `only_with` lists features, a call must ask for one of them: what else could be done, others do.
    `limits` bound sizes, in the words of `spec.condition`; booleans are promises that tests prove.
    `narrowed` names the fields that a deployment's overlay took something from.
    """

    source: str
    platforms: frozenset[str] = ALL_PLATFORMS
    sm_min: int | None = None
    sm_max: int | None = None
    mma_families: frozenset[MMAFamily] | None = None
    cpu_vendors: frozenset[str] | None = None
    archs: frozenset[str] | None = None
    isa: frozenset[str] = frozenset()
    half_isa: frozenset[str] = frozenset()
    torch_min: str | None = None
    torch_below: str | None = None
    cuda_min: str | None = None
    driver_min: str | None = None
    dtypes: frozenset[str] = FLOATS
    mixed_dtypes: bool = False
    index_dtypes: frozenset[str] = INDEX_DTYPES
    features: frozenset[str] = frozenset()
    only_with: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    contiguous: bool = False
    last_stride1: bool = False
    alignment: int = 1
    limits: tuple[str, ...] = ()
    gradient: bool = True
    deterministic: bool = True
    batch_invariant: bool = False
    graph_safe: bool = False
    autocast: bool = True
    tp_invariant: bool = False
    narrowed: frozenset[str] = frozenset()


# The fields that are sets of names.
NAME_SETS = frozenset({
    "archs", "cpu_vendors", "dtypes", "features", "half_isa", "index_dtypes", "isa", "layouts",
    "only_with", "platforms",
})  # fmt: skip


# Capability files of then: limits of format 1 were records, and some fields came later.
_SPELLING: Mapping[str, str] = {
    "AtLeast": "{dim} >= {value}",
    "AtMost": "{dim} <= {value}",
    "MultipleOf": "{dim} % {value} == 0",
    "OneOf": "{dim} in {values}",
    "SameAs": "{dim} == {other}",
    "ProductAtMost": "{dims} <= {value}",
}
_SAID_BY_DEFAULT = ("SIZE_UNSUPPORTED",)


def changed_error(path: str | os.PathLike[str]) -> CacheCorruptionError:
    """The error of a document that is not as it was written."""
    return CacheCorruptionError(f"{path}: its kernels do not match its content hash", path=str(path))


# Fields that came while the format stayed, and what a file from before them means.
_LATER: Mapping[str, Any] = {"only_with": []}


def fill_later_fields(
    path: str | os.PathLike[str],
    kernels: dict[str, dict[str, Any]],
    content: object,
    digest: Callable[[Mapping[str, Any]], str],
) -> bool:
    """Give a document's kernels the fields that it was written before; whether one lacked any.

    Raises: CacheCorruptionError: one did, and the `digest` as it was written is not `content`, where given.
    """
    written, lacked = digest(kernels), False
    for entry in kernels.values():
        for name, meant in _LATER.items():
            lacked = lacked or name not in entry["capability"]
            entry["capability"].setdefault(name, list(meant))
    if lacked and content is not None and written != content:
        raise changed_error(path)
    return lacked


def respell(capability: dict[str, Any]) -> None:
    """Spell the limits of one kernel as conditions, in place.

    Raises: KeyError, TypeError, AttributeError: one is no limit of format 1.
    """
    if isinstance(limits := capability.get("limits"), list):
        capability["limits"] = [_spelled(limit) for limit in limits]


def _spelled(limit: Mapping[str, Any]) -> str:
    """A limit of format 1 as a condition.

    Raises: KeyError, TypeError, AttributeError: it is none.
    """
    values = {**limit, "dims": " * ".join(limit.get("dims", ()))}
    text = _SPELLING[limit["type"]].format_map(values)
    when, reason = limit.get("when", ""), limit.get("reason", "SIZE_UNSUPPORTED")
    text += f" when {when}" if when else ""
    return text + (f" else {reason}" if reason not in _SAID_BY_DEFAULT else "")
