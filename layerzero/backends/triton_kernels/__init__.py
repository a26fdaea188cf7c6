"""Triton kernels of this project, where no library has a good one, and the way for users to bring theirs.

`rows` has the residual sum with its norm and rounding to eight bits, `paged` decodes over pages and
`paged_rows` takes prompts beside that, `latent` has multi-head latent attention, `dense` keys of codes
without pages; `products` multiplies codes, `experts` those of a mixture; `append` and `rope_append` write
pages, `sampling` draws with a seed for each row, which libraries draw in other ways, `verify` has chains of
drafted tokens; `user_kernel` makes a kernel of a user's Triton function.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from layerzero.ops.linear.mlp import gated_bytes
from layerzero.spec.kernel import Kernel


def _from(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    """The load function of one kernel; Triton is imported when it is called."""
    return lambda: getattr(importlib.import_module(f"layerzero.backends.triton_kernels.{module}"), name)


_kernel = functools.partial(
    Kernel.of,
    source="our own source; run on one H200, torch 2.11, Triton 3.6",
    platforms="cuda",
    sm_min=80,
    dtypes="float32 float16 bfloat16",
    gradient=False,
    batch_invariant=True,
    graph_safe=True,
    tie_break_order=35,
    slow_import=True,
    distributions=("triton>=3.6",),
)
# One program holds a whole row in registers.
_MAX_WIDTH = "C <= 16384 else WIDTH_TOO_LARGE"
_rows = functools.partial(_kernel, limits=(_MAX_WIDTH,), contiguous=True)
# Not its speed: with these it is taken before the reference, which is faster only for one row of a large
# vocabulary with top-p; tuning tells them apart.
_draws = functools.partial(
    _kernel, efficiency=(0.5, 1.0, 28.0), measured="benchmarks/results/sampling_h200.json", last_stride1=True
)
_H200 = "benchmarks/results/rows_h200.json"
# Of a slower host than the record above: scaled by torch's norm, which is in both.
_STEP = "an estimate: benchmarks/results/rows_step_h200.json, beside torch.rms_norm.cuda; an older launch"
_ESTIMATE = "an estimate, beside add_rms_norm's"
_FORMATS = "quant_int8 quant_fp8_e4m3 quant_fp8_e5m2"

_PRODUCTS = "an estimate: ordered by benchmarks/results/quantized_h200.json"
_PREFILLS = "an estimate: beside FlashInfer's prefill in benchmarks/results/regret_h200.json"
_HEADS = ("D in [64, 128, 256]", "D == Dv else HEAD_DIMS_DIFFER", "G <= 64")
_CODES = "kv_float8_e4m3fn kv_float8_e5m2 kv_int8"
_KV_SCALES = "kv_scale_per_tensor kv_scale_per_head kv_scale_per_token"
_SCALES = (
    "scale_per_tensor scale_per_row scale_per_group scale_per_block scale_16bit zero_point tensor_scale "
    "inputs_float"
)
_INTEGERS_AND_FLOATS = "quant_int8 quant_fp8_e4m3 quant_fp8_e5m2 quant_int4 quant_nf4 quant_nvfp4"
_WHOLE_GROUPS = ("S % 32 == 0 when quant_int4", "S % 32 == 0 when quant_nf4", "S % 16 == 0")
_ROUTES = (
    "gate_second weighed_inputs local_experts shared_experts act_swiglu act_geglu act_geglu_tanh act_reglu"
)
_over_codes = functools.partial(
    _kernel,
    measured="an estimate: made from benchmarks/results/codes_h200.json",
    last_stride1=True,
    alignment=16,
)
_attends = functools.partial(
    _over_codes,
    efficiency=(0.1, 0.1, 70.0),
    dtypes="float16 bfloat16 float8_e4m3fn float8_e5m2 int8",
    sm_min=89,
    only_with=f"{_CODES} {_KV_SCALES}",
    limits=_HEADS,
)
_SCORES = f"causal gqa scale scale_not_positive window softcap lse {_CODES} {_KV_SCALES}"
# A tile of K is a group, or lies in one; halves of a tile of packed codes are 16 of K at least.
_product = functools.partial(
    _kernel,
    load=_from("products", "quantized_linear"),
    efficiency=(0.2, 0.3, 35.0),
    measured=_PRODUCTS,
    sm_min=89,
    last_stride1=True,
    alignment=16,
    batch_invariant=False,
    limits=("K % 32 == 0", *_WHOLE_GROUPS),
)
_experts = functools.partial(
    _over_codes,
    load=_from("experts", "fused_experts"),
    efficiency=(0.09, 0.25, 60.0),
    sm_min=90,
    batch_invariant=False,
)
_LATENT, _LATENT_SCALES = "causal prefill scale_not_positive lse", "kv_scale_per_tensor kv_scale_per_token"


def _latent(
    values: str, of_batch: tuple[float, float, float], in_order: tuple[float, float, float], **fields: Any
) -> tuple[Kernel, ...]:
    """Parts that follow from the batch, and parts that do not, with what each reaches."""
    split = functools.partial(
        _over_codes, sm_min=90, limits=("C in [64, 128, 256, 512]", "R in [32, 64, 128]"), **fields
    )
    return (
        split(
            f"triton.mla_attention.{values}", _from("latent", "mla_attention"), of_batch,
            batch_invariant=False,
        ),
        split(
            f"triton.mla_attention.{values}_in_order", _from("latent", "mla_attention_in_order"), in_order,
            tie_break_order=36,
        ),
    )  # fmt: skip


KERNELS: tuple[Kernel, ...] = (
    _rows(
        "triton.add_rms_norm.fused", _from("rows", "add_rms_norm"), (0.1, 0.89, 17.0), _H200,
        features="no_weight",
    ),
    _rows(
        "triton.add_rms_norm_quantize.row", _from("rows", "add_rms_norm_quantize"), (0.1, 0.8, 20.0),
        _ESTIMATE, features=f"{_FORMATS} scale_per_row no_weight", sm_min=89,
    ),
    # Groups are rows of a block of registers: their size is a power of two, and so is what it divides.
    _rows(
        "triton.add_rms_norm_quantize.group", _from("rows", "add_rms_norm_quantize"),
        (0.1, 0.8, 20.0), _ESTIMATE, features=f"{_FORMATS} scale_per_group no_weight", sm_min=89,
        limits=(_MAX_WIDTH, "S in [16, 32, 64, 128, 256]"),
    ),
    # How many parts a sequence is cut into follows from the batch: a row's last bits may, too.
    _kernel(
        "triton.paged_attention.decode", _from("paged", "paged_attention"), (0.1, 0.98, 29.0),
        "benchmarks/results/decode_h200.json", features="causal gqa scale", layouts="NHD HND",
        dtypes="float16 bfloat16", last_stride1=True, alignment=16, batch_invariant=False,
        limits=_HEADS,
    ),
    _kernel(
        "triton.paged_attention.rows", _from("paged_rows", "paged_attention"), (0.3, 0.5, 35.0),
        _PREFILLS, features="causal gqa scale prefill", layouts="NHD HND",
        dtypes="float16 bfloat16", last_stride1=True, alignment=16, limits=_HEADS,
    ),
    _rows(
        "triton.quantize.rows", _from("rows", "quantize"), (0.1, 0.43, 22.0), _H200,
        features=f"{_FORMATS} scale_per_row scale_per_group scale_given", sm_min=89,
    ),
    # The numbers of other formats than four-bit integers are exact in sixteen bits beside their scales.
    _product(
        "triton.quantized_linear.codes", dtypes="float16 bfloat16",
        features=f"{_INTEGERS_AND_FLOATS} {_SCALES} bias",
    ),
    _product(
        "triton.quantized_linear.powers_of_two", dtypes="bfloat16",
        features="quant_mxfp4 quant_mxfp8 scale_per_group bias inputs_float", limits=("K % 32 == 0",),
    ),
    _experts(
        "triton.fused_experts.codes", dtypes="float16 bfloat16",
        features=f"{_INTEGERS_AND_FLOATS} {_SCALES} {_ROUTES}",
        limits=("C % 32 == 0", "F % 32 == 0", *_WHOLE_GROUPS),
    ),
    _experts(
        "triton.fused_experts.powers_of_two", dtypes="bfloat16",
        features=f"quant_mxfp4 quant_mxfp8 scale_per_group inputs_float {_ROUTES}",
        limits=("C % 32 == 0", "F % 32 == 0"),
    ),
    _kernel(
        "triton.append_kv.rows", _from("append", "append_kv"), (0.1, 0.4, 21.0), _STEP,
        layouts="NHD HND", last_stride1=True,
    ),
    _kernel(
        "triton.append_kv.codes", _from("append", "append_kv"), (0.05, 0.3, 22.0),
        "an estimate: one launch, as many bytes as rows have", layouts="NHD HND", sm_min=89,
        features=f"{_CODES} {_KV_SCALES}",
        only_with=_CODES, last_stride1=True,
    ),
    _kernel(
        "triton.rope.heads", _from("rope_append", "rope"), (0.1, 0.4, 40.0), _STEP,
        features="interleaved partial_rotary", last_stride1=True,
    ),
    _kernel(
        "triton.mlp.gate", _from("rows", "mlp"), (0.8, 0.7, 25.0),
        "an estimate: as flashinfer.mlp.act_and_mul, which has the same products",
        features="bias act_swiglu act_geglu act_geglu_tanh act_reglu", batch_invariant=False,
        workspace_bytes=gated_bytes,
    ),
    _kernel(
        "triton.rope_append_kv.heads", _from("rope_append", "rope_append_kv"), (0.1, 0.4, 29.0), _STEP,
        layouts="NHD HND", features="interleaved partial_rotary", last_stride1=True,
    ),
    _kernel(
        "triton.paged_attention.decode_codes", _from("paged", "paged_attention"), (0.1, 0.38, 29.0),
        _PRODUCTS, layouts="NHD HND", dtypes="float16 bfloat16", last_stride1=True, alignment=16,
        features=f"causal gqa scale {_CODES} {_KV_SCALES}",
        only_with=_CODES, sm_min=89, batch_invariant=False,
        limits=_HEADS,
    ),
    _kernel(
        "triton.paged_attention.rows_codes", _from("paged_rows", "paged_attention"), (0.25, 0.3, 35.0),
        _PREFILLS, layouts="NHD HND", dtypes="float16 bfloat16", last_stride1=True, alignment=16,
        features=f"causal gqa scale prefill {_CODES} {_KV_SCALES}",
        only_with=_CODES, sm_min=89, limits=_HEADS,
    ),
    # float16 has not the range of a weight times a token's scale.
    *_latent(
        "codes", (0.11, 0.1, 30.0), (0.1, 0.1, 70.0), dtypes="bfloat16", only_with=_CODES,
        features=f"{_LATENT} {_CODES} {_LATENT_SCALES}",
    ),
    *_latent(
        "numbers", (0.15, 0.3, 20.0), (0.13, 0.25, 45.0), dtypes="float16 bfloat16", features=_LATENT
    ),
    _attends("triton.ragged_attention.codes", _from("dense", "ragged_attention"), features=_SCORES),
    _attends(
        "triton.attention.codes", _from("dense", "attention"), features=f"{_SCORES} empty_rows",
        layouts="BHSD BSHD",
    ),
    _draws(
        "triton.sample.rows", _from("sampling", "sample"),
        features="seed_per_row top_k top_p top_k_and_top_p",
    ),
    _draws("triton.sample_topk.rows", _from("sampling", "sample_topk"), features="seed_per_row"),
    _draws("triton.sample_topp.rows", _from("sampling", "sample_topp"), features="seed_per_row"),
    _kernel(
        "triton.verify_chain.rows", _from("verify", "verify_chain"), (0.5, 0.8, 40.0),
        "an estimate: three passes over two rows", features="seed_per_row", contiguous=True,
    ),
)  # fmt: skip
