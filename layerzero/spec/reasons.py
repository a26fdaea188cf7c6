"""Why a kernel was not taken: stable codes, one line each, rendered once as `needs X, got Y`.

A code is about the request, never about a library's wording, so that counts and rules survive
upgrades. `Rejected` is what a verdict carries; every place that shows a reason renders it from there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Category(StrEnum):
    """The side of the call a reason speaks about."""

    HARDWARE = "hardware"
    DTYPE = "dtype"
    SHAPE = "shape"
    MEMORY_LAYOUT = "memory_layout"
    FEATURE = "feature"
    MODE = "mode"
    BACKEND = "backend"
    HEALTH = "health"
    POLICY = "policy"
    RESOURCE = "resource"
    DISPATCH_TABLE = "dispatch_table"
    BUNDLE = "bundle"
    BLOCK = "block"
    PLAN = "plan"
    REPORT = "report"
    GATE = "gate"
    TOKENIZER = "tokenizer"


class Reason(StrEnum):
    """One cause for a rejection; the value is written to logs, files and metrics."""

    category: Category
    summary: str

    def __new__(cls, value: str, category: str, summary: str) -> Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.category = Category(category)
        member.summary = summary
        return member

    PLATFORM_MISMATCH = "PLATFORM_MISMATCH", "hardware", "runs on another kind of device"
    SM_TOO_OLD = "SM_TOO_OLD", "hardware", "needs a newer compute capability"
    SM_TOO_NEW = "SM_TOO_NEW", "hardware", "is not built for so new a compute capability"
    MMA_FAMILY_UNSUPPORTED = "MMA_FAMILY_UNSUPPORTED", "hardware", "needs another tensor core family"
    ARCH_UNSUPPORTED = "ARCH_UNSUPPORTED", "hardware", "is built for other architectures"
    CPU_VENDOR_UNSUPPORTED = "CPU_VENDOR_UNSUPPORTED", "hardware", "is for another CPU vendor"
    ISA_MISSING = "ISA_MISSING", "hardware", "needs CPU instructions that are missing"
    CUDA_TOO_OLD = "CUDA_TOO_OLD", "hardware", "needs a newer CUDA"
    DRIVER_TOO_OLD = "DRIVER_TOO_OLD", "hardware", "needs a newer driver"
    TORCH_TOO_OLD = "TORCH_TOO_OLD", "hardware", "needs a newer torch"
    TORCH_TOO_NEW = "TORCH_TOO_NEW", "hardware", "is not known to work with so new a torch"

    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED", "dtype", "does not take this dtype"
    DTYPES_MIXED = "DTYPES_MIXED", "dtype", "needs one dtype for all operands"
    INDEX_DTYPE_UNSUPPORTED = "INDEX_DTYPE_UNSUPPORTED", "dtype", "does not take this index dtype"
    QUANT_FORMAT_UNSUPPORTED = "QUANT_FORMAT_UNSUPPORTED", "dtype", "does not take this quantized format"
    SCALE_LAYOUT_MISMATCH = "SCALE_LAYOUT_MISMATCH", "dtype", "needs scales laid out differently"
    SCALE_SHAPE_MISMATCH = "SCALE_SHAPE_MISMATCH", "dtype", "its scale has another shape"
    SCALE_DTYPE_MISMATCH = "SCALE_DTYPE_MISMATCH", "dtype", "its scale has another dtype"
    SCALE_NOT_POSITIVE = "SCALE_NOT_POSITIVE", "dtype", "its scale is zero or negative"
    SCALE_NOT_FINITE = "SCALE_NOT_FINITE", "dtype", "its scale is NaN or infinite"
    ZERO_POINT_MISMATCH = "ZERO_POINT_MISMATCH", "dtype", "its zero point does not fit"
    QUANT_GROUP_UNSUPPORTED = "QUANT_GROUP_UNSUPPORTED", "dtype", "its format has no such group"
    GROUP_DOES_NOT_DIVIDE = "GROUP_DOES_NOT_DIVIDE", "dtype", "its group does not divide the axis"
    PACKED_LAYOUT_MISMATCH = "PACKED_LAYOUT_MISMATCH", "dtype", "its codes are packed differently"
    CHECKPOINT_FORMAT_MISMATCH = "CHECKPOINT_FORMAT_MISMATCH", "dtype", "claims one format and holds another"
    KV_DTYPE_MISMATCH = "KV_DTYPE_MISMATCH", "dtype", "needs a KV cache of another dtype"

    HEAD_DIM_TOO_LARGE = "HEAD_DIM_TOO_LARGE", "shape", "head size above its limit"
    HEAD_DIM_TOO_SMALL = "HEAD_DIM_TOO_SMALL", "shape", "head size below its limit"
    HEAD_DIM_ALIGNMENT = "HEAD_DIM_ALIGNMENT", "shape", "head size is not a multiple it needs"
    HEAD_DIM_INVALID = "HEAD_DIM_INVALID", "shape", "head size is not one it was built for"
    HEAD_DIMS_DIFFER = "HEAD_DIMS_DIFFER", "shape", "needs equal head sizes of keys and values"
    SEQ_TOO_LONG = "SEQ_TOO_LONG", "shape", "sequence above its limit"
    SEQ_TOO_SHORT = "SEQ_TOO_SHORT", "shape", "sequence below its limit"
    SEQ_LENGTHS_DIFFER = "SEQ_LENGTHS_DIFFER", "shape", "needs as many queries as keys"
    BATCH_TOO_LARGE = "BATCH_TOO_LARGE", "shape", "batch above its limit"
    BATCH_TOO_SMALL = "BATCH_TOO_SMALL", "shape", "batch below its limit"
    HEADS_UNSUPPORTED = "HEADS_UNSUPPORTED", "shape", "number of heads is not one it takes"
    CUDA_BLOCK_LIMIT_EXCEEDED = "CUDA_BLOCK_LIMIT_EXCEEDED", "shape", "grid above what the device launches"
    GROUP_SIZE_UNSUPPORTED = "GROUP_SIZE_UNSUPPORTED", "shape", "query heads per key head not supported"
    PAGE_SIZE_UNSUPPORTED = "PAGE_SIZE_UNSUPPORTED", "shape", "page size is not one it takes"
    ROWS_UNSUPPORTED = "ROWS_UNSUPPORTED", "shape", "number of rows is not one it takes"
    WIDTH_TOO_LARGE = "WIDTH_TOO_LARGE", "shape", "row width above its limit"
    WIDTH_ALIGNMENT = "WIDTH_ALIGNMENT", "shape", "row width is not a multiple it needs"
    SIZE_UNSUPPORTED = "SIZE_UNSUPPORTED", "shape", "a size is not one it takes"

    LAYOUT_UNSUPPORTED = "LAYOUT_UNSUPPORTED", "memory_layout", "needs another layout"
    NOT_CONTIGUOUS = "NOT_CONTIGUOUS", "memory_layout", "needs contiguous tensors"
    STRIDE_LAST_DIM = "STRIDE_LAST_DIM", "memory_layout", "needs a last stride of 1 and rows that lie apart"
    MISALIGNED = "MISALIGNED", "memory_layout", "needs aligned data pointers"

    CAUSAL_UNSUPPORTED = "CAUSAL_UNSUPPORTED", "feature", "has no causal masking"
    MASK_BOOL_UNSUPPORTED = "MASK_BOOL_UNSUPPORTED", "feature", "takes no boolean mask"
    MASK_FLOAT_UNSUPPORTED = "MASK_FLOAT_UNSUPPORTED", "feature", "takes no additive mask"
    MASK_WITH_CAUSAL = "MASK_WITH_CAUSAL", "feature", "takes a mask or causal, not both"
    EMPTY_ROWS_UNSAFE = "EMPTY_ROWS_UNSAFE", "feature", "is wrong for rows that see no key"
    GQA_UNSUPPORTED = "GQA_UNSUPPORTED", "feature", "needs as many key heads as query heads"
    DROPOUT_UNSUPPORTED = "DROPOUT_UNSUPPORTED", "feature", "has no dropout"
    SCALE_UNSUPPORTED = "SCALE_UNSUPPORTED", "feature", "takes no scale of the caller's"
    WINDOW_UNSUPPORTED = "WINDOW_UNSUPPORTED", "feature", "has no sliding window"
    SOFTCAP_UNSUPPORTED = "SOFTCAP_UNSUPPORTED", "feature", "has no soft cap"
    ALIBI_UNSUPPORTED = "ALIBI_UNSUPPORTED", "feature", "has no ALiBi"
    LSE_UNSUPPORTED = "LSE_UNSUPPORTED", "feature", "returns no log-sum-exp"
    LSE_GRADIENT_UNSUPPORTED = "LSE_GRADIENT_UNSUPPORTED", "feature", "has no gradient through log-sum-exp"
    MASK_GRADIENT_UNSUPPORTED = "MASK_GRADIENT_UNSUPPORTED", "feature", "has no gradient for its mask"
    MASK_DTYPE_UNSUPPORTED = "MASK_DTYPE_UNSUPPORTED", "feature", "takes no mask wider than its operands"
    SINKS_UNSUPPORTED = "SINKS_UNSUPPORTED", "feature", "has no attention sinks"
    SINKS_GRADIENT_UNSUPPORTED = (
        "SINKS_GRADIENT_UNSUPPORTED",
        "feature",
        "has no gradient beside attention sinks",
    )
    SCORE_MOD_UNSUPPORTED = "SCORE_MOD_UNSUPPORTED", "feature", "takes no score modifier"
    BLOCK_MASK_UNSUPPORTED = "BLOCK_MASK_UNSUPPORTED", "feature", "takes no block mask"
    XPOS_UNSUPPORTED = "XPOS_UNSUPPORTED", "feature", "has no XPos scale"
    BIAS_UNSUPPORTED = "BIAS_UNSUPPORTED", "feature", "takes no bias"
    FEATURE_REQUIRED = "FEATURE_REQUIRED", "feature", "takes only calls that ask for what it is made for"
    WEIGHT_REQUIRED = "WEIGHT_REQUIRED", "feature", "needs a weight"
    ACTIVATION_UNSUPPORTED = "ACTIVATION_UNSUPPORTED", "feature", "has not this activation"
    INTERLEAVED_UNSUPPORTED = "INTERLEAVED_UNSUPPORTED", "feature", "has no interleaved rotation"
    PARTIAL_ROTARY_UNSUPPORTED = "PARTIAL_ROTARY_UNSUPPORTED", "feature", "rotates whole heads only"
    PADDING_IDX_UNSUPPORTED = "PADDING_IDX_UNSUPPORTED", "feature", "has no padding index"
    LABEL_SMOOTHING_UNSUPPORTED = "LABEL_SMOOTHING_UNSUPPORTED", "feature", "has no label smoothing"
    CLASS_WEIGHTS_UNSUPPORTED = "CLASS_WEIGHTS_UNSUPPORTED", "feature", "takes no class weights"
    SEED_PER_ROW_UNSUPPORTED = "SEED_PER_ROW_UNSUPPORTED", "feature", "has no seed for each row"
    TOP_K_UNSUPPORTED = "TOP_K_UNSUPPORTED", "feature", "does not filter by top-k"
    TOP_P_UNSUPPORTED = "TOP_P_UNSUPPORTED", "feature", "does not filter by top-p"
    TOP_K_WITH_TOP_P = "TOP_K_WITH_TOP_P", "feature", "filters by top-k or by top-p, not by both"
    FEATURE_UNSUPPORTED = "FEATURE_UNSUPPORTED", "feature", "lacks something the call asks for"

    NO_GRADIENT = "NO_GRADIENT", "mode", "has no backward"
    NOT_DETERMINISTIC = "NOT_DETERMINISTIC", "mode", "is not deterministic"
    NOT_BATCH_INVARIANT = "NOT_BATCH_INVARIANT", "mode", "gives a row other bits in another batch"
    CUDA_GRAPH_UNSAFE = "CUDA_GRAPH_UNSAFE", "mode", "is not proved safe under graph capture"
    AUTOCAST_UNSUPPORTED = "AUTOCAST_UNSUPPORTED", "mode", "does not follow autocast"
    SDPA_BACKEND_DISABLED = (
        "SDPA_BACKEND_DISABLED",
        "mode",
        "is none of the implementations that torch's sdpa_kernel leaves switched on",
    )
    RANKS_DIFFER = "RANKS_DIFFER", "mode", "is not on every rank what it is on rank 0"
    TP_INVARIANCE_REQUIRED = "TP_INVARIANCE_REQUIRED", "mode", "is not invariant to the group's size"

    BACKEND_MISSING = "BACKEND_MISSING", "backend", "its library is not installed"
    BACKEND_IMPORT_FAILED = "BACKEND_IMPORT_FAILED", "backend", "its library does not import"
    BACKEND_VERSION_MISMATCH = "BACKEND_VERSION_MISMATCH", "backend", "its library has another version"
    BACKEND_PLATFORM_BUILD = "BACKEND_PLATFORM_BUILD", "backend", "its library was built for something else"
    DESCRIPTOR_ONLY = "DESCRIPTOR_ONLY", "backend", "is described, and no code here calls it"
    KERNEL_LOAD_FAILED = "KERNEL_LOAD_FAILED", "backend", "could not be loaded"
    JIT_FAILED = "JIT_FAILED", "backend", "did not compile"
    PYTHON_FREE_THREADED = "PYTHON_FREE_THREADED", "backend", "needs a Python with its global lock"

    WORKER_FAILED = "WORKER_FAILED", "backend", "its process did not start, or refused it"
    WORKER_VERSION = "WORKER_VERSION", "backend", "its environment has another version of this library"
    ISOLATION_UNSUPPORTED = "ISOLATION_UNSUPPORTED", "backend", "cannot run in a process of its own"

    WORKER_CRASHED = "WORKER_CRASHED", "health", "ended the process that it ran in"
    WORKER_HUNG = "WORKER_HUNG", "health", "did not answer within the time limit of a call"
    CIRCUIT_OPEN = "CIRCUIT_OPEN", "health", "failed too often and rests"
    QUARANTINED = "QUARANTINED", "health", "is quarantined"
    DEVICE_LOST = "DEVICE_LOST", "health", "its device is gone"

    POLICY_DENIED = "POLICY_DENIED", "policy", "is denied by policy"
    POLICY_NOT_ALLOWED = "POLICY_NOT_ALLOWED", "policy", "is not on the policy's allow list"
    LOCKED_TO_ANOTHER = "LOCKED_TO_ANOTHER", "policy", "another kernel is locked"
    STRICT_NEEDS_TRANSFORM = "STRICT_NEEDS_TRANSFORM", "policy", "strict mode refuses the transforms it needs"

    GPU_TAKEN = "GPU_TAKEN", "resource", "belongs to another device of a cluster"
    MEMORY_HEADROOM_EXCEEDED = "MEMORY_HEADROOM_EXCEEDED", "resource", "needs more memory than is free"
    DISPATCH_TABLE_MISS = "DISPATCH_TABLE_MISS", "dispatch_table", "no solved bucket covers the request"
    DISPATCH_TABLE_POLICY_DIFFERS = (
        "DISPATCH_TABLE_POLICY_DIFFERS",
        "dispatch_table",
        "it was solved under another policy",
    )

    BUNDLE_ENVIRONMENT_DIFFERS = "BUNDLE_ENVIRONMENT_DIFFERS", "bundle", "was made in another environment"
    BUNDLE_DAMAGED = "BUNDLE_DAMAGED", "bundle", "is cut off or was altered"
    BUNDLE_FORMAT = "BUNDLE_FORMAT", "bundle", "is no bundle, or one of another format"
    BUNDLE_UNSAFE = "BUNDLE_UNSAFE", "bundle", "holds what a bundle must not hold"
    BUNDLE_UNTRUSTED = "BUNDLE_UNTRUSTED", "bundle", "is not known to be the one that is wanted"

    BLOCK_CYCLIC = "BLOCK_CYCLIC", "block", "its ops wait for each other"
    BLOCK_EDGE_MISSING = "BLOCK_EDGE_MISSING", "block", "an edge comes from nowhere"
    BLOCK_NAME_TAKEN = "BLOCK_NAME_TAKEN", "block", "two of its ops or inputs have one name"
    BLOCK_OP_UNKNOWN = "BLOCK_OP_UNKNOWN", "block", "it holds an op that does not exist"
    BLOCK_OP_WRITES = "BLOCK_OP_WRITES", "block", "it holds an op of torch that changes its operands"
    BLOCK_NOT_TRACEABLE = "BLOCK_NOT_TRACEABLE", "block", "the function cannot be traced into ops"
    BLOCK_EMPTY = "BLOCK_EMPTY", "block", "it has no op or no output"

    PLAN_DAMAGED = "PLAN_DAMAGED", "plan", "is a file of plans that is cut off or was altered"
    PLAN_FORMAT = "PLAN_FORMAT", "plan", "is no file of plans, or one of another format"
    PLAN_ENVIRONMENT_DIFFERS = (
        "PLAN_ENVIRONMENT_DIFFERS",
        "plan",
        "was made for another machine or other kernels",
    )
    PLAN_POLICY_DIFFERS = "PLAN_POLICY_DIFFERS", "plan", "was planned under another policy"
    PLAN_BLOCK_DIFFERS = "PLAN_BLOCK_DIFFERS", "plan", "was made for another block or other sizes"
    PLAN_KERNEL_REFUSED = "PLAN_KERNEL_REFUSED", "plan", "names a kernel that does not take its call now"
    REPORT_FORMAT = "REPORT_FORMAT", "report", "is no report, or one of another format"
    REPORT_DAMAGED = "REPORT_DAMAGED", "report", "is a report that is cut off or was altered"

    BASELINE_DAMAGED = "BASELINE_DAMAGED", "gate", "is missing, cut off or was altered"
    BASELINE_FORMAT = "BASELINE_FORMAT", "gate", "is of another format"
    BASELINE_UNTRUSTED = "BASELINE_UNTRUSTED", "gate", "is not known to be the baseline that is wanted"
    BASELINE_ENVIRONMENT_DIFFERS = "BASELINE_ENVIRONMENT_DIFFERS", "gate", "was measured on another machine"
    BASELINE_STALE = "BASELINE_STALE", "gate", "is too old"
    BASELINE_UNSTEADY = "BASELINE_UNSTEADY", "gate", "was measured on a machine that was busy"
    GATE_TREE = "GATE_TREE", "gate", "is no other tree of this library"
    GATE_CHECKS_NOTHING = "GATE_CHECKS_NOTHING", "gate", "has nothing that it could find wrong"
    RELEASE_INVALID = "RELEASE_INVALID", "gate", "is no release file, or has a part that is unknown or wrong"
    WAIVER_EXPIRED = "WAIVER_EXPIRED", "gate", "has passed its last day"
    PACE_SLOWER = "PACE_SLOWER", "gate", "is slower than what it is compared with"
    PACE_UNDECIDED = "PACE_UNDECIDED", "gate", "cannot be separated from the noise of its rounds"

    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH", "tokenizer", "is another tokenizer than the one meant"
    TOKENIZER_CHANGED = "TOKENIZER_CHANGED", "tokenizer", "is not the tokenizer that a cache was filled by"
    TOKENIZER_VOCABULARY = "TOKENIZER_VOCABULARY", "tokenizer", "gives ids that the model has no row for"


class Rejected(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One reason against one kernel: `field` of the request, what it `needs`, what it `got`.

    `counterfactual` names the one value with which this reason would vanish, where there is one.
    """

    reason: Reason
    field: str = ""
    needs: str = ""
    got: str = ""
    counterfactual: str | None = None

    def __str__(self) -> str:
        where = f"{self.field} " if self.field not in ("", self.got) else ""
        detail = f": {where}needs {self.needs}, got {self.got}" if self.needs or self.got else ""
        return f"{self.reason.value}{detail or ': ' + self.reason.summary}"


def as_plain(rejected: Rejected) -> dict[str, Any]:
    """The rejection as JSON-ready values, category included."""
    return {
        "reason": rejected.reason.value,
        "category": rejected.reason.category.value,
        "field": rejected.field,
        "needs": rejected.needs,
        "got": rejected.got,
        "counterfactual": rejected.counterfactual,
    }
