"""Triton kernels of this project, where no library has a good one, and the way for users to bring theirs.

`rows` has the residual sum with its norm and rounding to eight bits, `paged` decodes over short contexts,
`sampling` draws with a seed for each
row, which libraries draw in other ways, `verify` has chains of drafted tokens; `user_kernel` makes a kernel
out of a user's Triton function.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from layerzero.spec.capability import AtMost, Capability, Limit, OneOf, SameAs
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason

_DISTRIBUTIONS = ("triton>=3.6",)
_HERE = "our own source; run on one H200, torch 2.11, Triton 3.6"
# One program holds a whole row in registers.
_MAX_WIDTH = AtMost("C", 16384, Reason.WIDTH_TOO_LARGE)
# Not its speed: with these it is taken before the reference, which is faster only for one row of a large
# vocabulary with top-p; tuning tells them apart.
_DRAWS = (0.5, 1.0, 28.0)
_DRAWN = "benchmarks/results/sampling_h200.json"
_FORMATS = frozenset({"quant_int8", "quant_fp8_e4m3", "quant_fp8_e5m2"})


def _from(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    """The load function of one kernel; Triton is imported when it is called."""

    def load() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(
            importlib.import_module(f"layerzero.backends.triton_kernels.{module}"), name
        )
        return function

    return load


def _kernel(
    op: str,
    variant: str,
    module: str,
    features: frozenset[str],
    efficiency: tuple[float, float, float],
    limits: tuple[Limit, ...] = (),
    sm_min: int = 80,
    source: str = "benchmarks/results/rows_h200.json",
    dtypes: frozenset[str] = frozenset({"float32", "float16", "bfloat16"}),
    **more: Any,
) -> Kernel:
    return Kernel.of(
        f"triton.{op}.{variant}",
        _from(module, op),
        Capability(
            source=_HERE,
            platforms=frozenset({"cuda"}),
            sm_min=sm_min,
            dtypes=dtypes,
            features=features,
            limits=limits,
            gradient=False,
            graph_safe=True,
            **more,
        ),
        Efficiency(*efficiency, source),
        tie_break_order=35,
        slow_import=True,
        distributions=_DISTRIBUTIONS,
    )


KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "add_rms_norm", "fused", "rows", frozenset({"no_weight"}), (0.1, 0.89, 17.0), (_MAX_WIDTH,),
        contiguous=True, batch_invariant=True,
    ),
    # Groups are rows of a block of registers: their size is a power of two, and so is what it divides.
    _kernel(
        "add_rms_norm_quantize", "row", "rows", _FORMATS | {"scale_per_row", "no_weight"},
        (0.1, 0.8, 20.0), (_MAX_WIDTH,), sm_min=89, source="an estimate, beside add_rms_norm's",
        contiguous=True, batch_invariant=True,
    ),
    _kernel(
        "add_rms_norm_quantize", "group", "rows", _FORMATS | {"scale_per_group", "no_weight"},
        (0.1, 0.8, 20.0), (_MAX_WIDTH, OneOf("S", (16, 32, 64, 128, 256))), sm_min=89,
        source="an estimate, beside add_rms_norm's", contiguous=True, batch_invariant=True,
    ),
    # Programs do not share a sequence: beyond these lengths libraries that split it are faster.
    _kernel(
        "paged_attention", "decode", "paged", frozenset({"causal", "gqa", "scale"}), (0.1, 0.55, 12.0),
        (OneOf("D", (64, 128)), SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER), AtMost("M", 32), AtMost("P", 16)),
        source="an estimate, until it is measured", dtypes=frozenset({"float16", "bfloat16"}),
        layouts=frozenset({"NHD", "HND"}), last_stride1=True, batch_invariant=True, alignment=16,
    ),
    _kernel(
        "quantize", "rows", "rows",
        _FORMATS | {"scale_per_row", "scale_per_group", "scale_given"}, (0.1, 0.43, 22.0),
        (_MAX_WIDTH,), sm_min=89, contiguous=True, batch_invariant=True,
    ),
    _kernel(
        "sample", "rows", "sampling",
        frozenset({"seed_per_row", "top_k", "top_p", "top_k_and_top_p"}), _DRAWS, source=_DRAWN,
        last_stride1=True, batch_invariant=True,
    ),
    _kernel(
        "sample_topk", "rows", "sampling", frozenset({"seed_per_row"}), _DRAWS, source=_DRAWN,
        last_stride1=True, batch_invariant=True,
    ),
    _kernel(
        "sample_topp", "rows", "sampling", frozenset({"seed_per_row"}), _DRAWS, source=_DRAWN,
        last_stride1=True, batch_invariant=True,
    ),
    _kernel(
        "verify_chain", "rows", "verify", frozenset({"seed_per_row"}), (0.5, 0.8, 40.0),
        source="an estimate: three passes over two rows", contiguous=True, batch_invariant=True,
    ),
)  # fmt: skip
