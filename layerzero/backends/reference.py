"""The reference of every op as a kernel: slow, right for all that the op accepts, the last resort."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from layerzero.ops.op import WIDENED, Op
from layerzero.spec.capability import ACTIVATIONS, FEATURE_REASONS, FLOATS
from layerzero.spec.kernel import Kernel

# Its attention is what torch calls math.
EVERY_FEATURE = frozenset(FEATURE_REASONS) - {"sdpa_no_math"} | {f"act_{name}" for name in ACTIVATIONS}
EVERY_FEATURE |= {"lse_grad", "mask_grad", "mask_wide", "xpos"}


# Ops whose reference treats rows one by one in fixed order; products of matrices choose their order of sums
# by their size, and attention takes blocks of queries by the size of the batch.
BATCH_INVARIANT = frozenset(
    {
        "alibi", "append_kv", "cross_entropy", "embedding", "rope", "rope_append_kv", "sample", "sample_topk",
        "sample_topp", "verify_chain", "verify_tree",
    }
)  # fmt: skip


# What attention takes where its queries are codes, too.
CODED = " ".join(sorted({*FLOATS, "int8", "float8_e4m3fn", "float8_e5m2"}))

# Captured and replayed on one H200: benchmarks/results/graphs_h200.json.
# Others synchronise or were not tried.
CAPTURED = frozenset(
    {
        "add_layer_norm", "add_rms_norm", "append_kv", "attention", "embedding", "layer_norm", "linear",
        "mlp", "rms_norm", "rope",
    }
)  # fmt: skip


_EXPERTS = ("moe", "fused_experts")


def without_autocast(run: Callable[..., Any], *, widens: bool = False) -> Callable[..., Any]:
    """`run` as written, whatever the caller's autocast: that rounds products, and refuses some joins.

    With `widens` its first operand becomes float32 there, as autocast has it for losses.
    """
    on = torch._C._is_any_autocast_enabled

    def exact(*args: Any) -> Any:
        if not on():
            return run(*args)
        first, *others = args
        with torch.autocast(first.device.type, enabled=False):
            return run(first.float() if widens and first.dtype.itemsize < 4 else first, *others)

    return exact


@functools.cache
def reference_kernel(op: Op) -> Kernel:
    """`op.reference` as the kernel `reference.<op>`."""
    return Kernel.of(
        f"reference.{op.name}",
        lambda: without_autocast(op.reference, widens=op.name in WIDENED),
        (0.1, 0.2, 1600.0 if op.name in _EXPERTS else 30.0),
        "scripts/measure_efficiency.py, AMD EPYC with AVX-512, 1 thread; middle of all ops; one expert after "
        "another: benchmarks/results/rows_h200.json",
        source="the op's definition: plain torch, float32 in between",
        **({"dtypes": CODED} if op.name in ("attention", "ragged_attention") else {}),
        mixed_dtypes=True,
        features=EVERY_FEATURE,
        gradient=op.differentiable,
        batch_invariant=op.name in BATCH_INVARIANT,
        graph_safe=op.name in CAPTURED,
        tie_break_order=99,
    )
