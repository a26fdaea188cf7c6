"""Calls generated from what kernels claim: every feature, pair of features, dtype, layout and size.

They are made for the CPU, or for the device that LAYERZERO_TEST_DEVICE names (`cuda`); truths are computed
on the CPU either way. LAYERZERO_TEST_DTYPES, names with commas between, keeps to some of the dtypes.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends import availability, load_builtin
from layerzero.backends.torch_moe import by_expert
from layerzero.hardware import Hardware, imagined_gpu, probe
from layerzero.kernel import ACTIVATIONS, FLOATS, AtLeast, Kernel, MultipleOf, OneOf, judge
from layerzero.ops import table
from layerzero.ops.cross_entropy import cross_entropy_reference
from layerzero.ops.mlp import is_gated
from layerzero.ops.op import Args, Op
from layerzero.ops.paged_checks import gather, page_axes, query_offsets
from layerzero.ops.quantize import quantize_reference, scale_shape
from layerzero.ops.request import Request

KERNELS: list[Kernel] = load_builtin()
DEVICE = os.environ.get("LAYERZERO_TEST_DEVICE", "cpu")
# Triton's interpreter runs a GPU's kernels on tensors of the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE: Hardware = imagined_gpu(90) if INTERPRETED else probe("cuda:0" if DEVICE == "cuda" else DEVICE)
_DTYPES = frozenset(os.environ.get("LAYERZERO_TEST_DTYPES", ",".join(FLOATS)).split(","))


def why_not_here(kernel: Kernel) -> str:
    """Why the kernel cannot run on this machine's device under test; empty where it can."""
    probe_request = Request(op=kernel.op, dtype=min(kernel.capability.dtypes))
    hardware = {"hardware", "backend"}
    missing = [*availability(kernel), *judge(kernel, probe_request, HERE)]
    return "; ".join(str(m) for m in missing if m.reason.category.value in hardware)


RUNNABLE = [k for k in KERNELS if not why_not_here(k)]


# Gaps between rows that leave addresses of rows multiples of 16 bytes on a device that asks for that.
_GAP = 5 if DEVICE == "cpu" else 8


@dataclass(frozen=True)
class Case:
    """One call of an op: what it asks beyond the plain op, its sizes, how its operands lie in memory."""

    op: str
    asks: tuple[str, ...] = ()
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    strided: bool = False

    def __str__(self) -> str:
        sizes = "x".join(f"{k}{v}" for k, v in self.dims.items())
        return "-".join([self.op, *self.asks, sizes, *(["strided"] if self.strided else [])])


def call(case: Case, dtype: torch.dtype, seed: int = 0) -> Args:
    """The op's argument tuple for a case."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        if case.strided and len(shape) > 1:
            wide = torch.randn(*shape[:-1], shape[-1] + _GAP, generator=generator)
            return wide.to(DEVICE, kind)[..., : shape[-1]]
        return torch.randn(shape, generator=generator).to(DEVICE, kind)

    build = (_OF_THEIR_OWN | _OVER_SEQUENCES).get(case.op, _plain)
    positional, named = build(case, rand, generator)
    args: Args = table.get(case.op).build(*positional, **named)[1]
    return to(DEVICE, args)


def to(device: str, args: Args) -> Args:
    """The arguments with every tensor on a device, the same tensor staying the same."""
    moved = {id(a): a.to(device) for a in args if isinstance(a, Tensor)}
    return tuple(moved.get(id(a), a) for a in args)


def _attention(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    asks = set(case.asks)
    dims = {"B": 2, "Hq": 4, "Hk": 2 if "gqa" in asks else 4, "Sq": 7, "Sk": 11, "D": 16} | case.dims
    b, hq, hk, sq, sk, d = (dims[n] for n in ("B", "Hq", "Hk", "Sq", "Sk", "D"))
    dv = dims.get("Dv", d)
    named: dict[str, Any] = {"is_causal": "causal" in asks, "return_lse": "lse" in asks}
    if "bshd" in asks:
        q, k, v, named["layout"] = rand(b, sq, hq, d), rand(b, sk, hk, d), rand(b, sk, hk, dv), "BSHD"
    else:
        q, k, v = rand(b, hq, sq, d), rand(b, hk, sk, d), rand(b, hk, sk, dv)
    if "mask_bool" in asks:
        mask = torch.rand(b, 1, sq, sk, generator=generator) > 0.4
        mask[..., 0] |= "empty_rows" not in asks
        mask[0, 0, 0] &= "empty_rows" not in asks
        named["attn_mask"] = mask
    if "mask_float" in asks:
        named["attn_mask"] = rand(hq, sq, sk)
    if "mask_wide" in asks:
        named["attn_mask"] = rand(sq, sk, kind=torch.float32)
    if "attn_mask" in named:
        named["combine_mask"] = named["is_causal"]
        named["rows_nonempty"] = "empty_rows" not in asks
    if "scale" in asks:
        named["scale"] = 0.37
    if "window" in asks:
        named["window"] = (3, 2)
    if "softcap" in asks:
        named["softcap"] = 1.5
    if "alibi" in asks:
        named["alibi_slopes"] = torch.rand(hq, generator=generator)
    return [q, k, v], named


def _rope(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, d = case.dims.get("N", 9), case.dims.get("D", 16)
    half = d // 4 if "partial_rotary" in case.asks else d // 2
    angles = torch.rand(32, half, generator=generator) * 6
    named: dict[str, Any] = {"interleaved": "interleaved" in case.asks}
    if "xpos" in case.asks:
        named["xpos_scale"] = torch.rand(32, half, generator=generator) + 0.5
    positions = torch.randint(0, 32, (n,), generator=generator)
    return [rand(n, 4, d), rand(n, 2, d), positions, angles.cos(), angles.sin()], named


def _ragged(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    dims = {"Hq": 4, "Hk": 2 if "gqa" in case.asks else 4, "D": 16} | case.dims
    hq, hk, d = dims["Hq"], dims["Hk"], dims["D"]
    cu, cu_k = torch.tensor([0, 3, 3, 10]), torch.tensor([0, 40, 45, 52])
    return [rand(10, hq, d), rand(52, hk, d), rand(52, hk, dims.get("Dv", d)), cu, cu_k], _flags(case)


def _paged(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    dims = {"Hq": 4, "Hk": 2 if "gqa" in case.asks else 4, "D": 16, "P": 8, "N": 3} | case.dims
    hq, hk, d, size, batch = (dims[n] for n in ("Hq", "Hk", "D", "P", "N"))
    tables = torch.randperm(6 * batch, generator=generator).view(batch, 6)
    lens = torch.randint(1, 6 * size + 1, (batch,), generator=generator)
    pools = [rand(6 * batch, size, hk, w) for w in (d, dims.get("Dv", d))]
    named, tokens = _flags(case), batch
    if "prefill" in case.asks:
        named["cu_seqlens"], tokens = torch.arange(batch + 1) * 3, 3 * batch
    if "hnd" in case.asks:
        pools, named["layout"] = [pool.transpose(1, 2) for pool in pools], "HND"
    for ask in case.asks:
        if ask.startswith("kv_"):
            pools = [pool.to(getattr(torch, ask.removeprefix("kv_"))) for pool in pools]
    return [rand(tokens, hq, d), *pools, tables, lens], named


def _latent(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    sizes = case.dims | {"Hk": 1, "D": case.dims.get("C", case.dims.get("D", 16))}
    wide = Case(case.op, tuple(a for a in case.asks if a not in ("gqa", "hnd")), sizes)
    (_, ckv, _, tables, lens), named = _paged(wide, rand, generator)
    del named["scale"], named["window"], named["softcap"]
    heads, tokens = 1 if "gqa" not in case.asks else 3, len(lens) * (3 if "prefill" in case.asks else 1)
    rotary = case.dims.get("R", 8)
    ckv, kpe = ckv[:, :, 0], rand(*ckv.shape[:2], rotary).to(ckv.dtype)
    return [rand(tokens, heads, ckv.shape[2]), rand(tokens, heads, rotary), ckv, kpe, tables, lens], named | {
        "scale": 0.3 if "C" not in case.dims else 0.07
    }


def _append(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    dims = {"Hk": 2, "D": 16, "P": 8, "N": 9} | case.dims
    heads, d, size, tokens = (dims[n] for n in ("Hk", "D", "P", "N"))
    widths = d, dims.get("Dv", d)
    pools = [rand(-(-2 * tokens // size), size, heads, width) for width in widths]
    named: dict[str, Any] = {}
    if "hnd" in case.asks:
        pools, named["layout"] = [pool.transpose(1, 2) for pool in pools], "HND"
    for ask in set(case.asks) - {"kv_strided"}:
        if ask.startswith("kv_"):
            pools = [pool.to(getattr(torch, ask.removeprefix("kv_"))) for pool in pools]
    if "kv_strided" in case.asks:
        pools = [torch.stack([pool, pool], -1)[..., 0] for pool in pools]
    slots = torch.randperm(2 * tokens, generator=generator)[:tokens]
    return [*(rand(tokens, heads, width) for width in widths), *pools, slots], named


def _flags(case: Case) -> dict[str, Any]:
    asks = set(case.asks)
    return {
        "is_causal": "causal" in asks,
        "return_lse": "lse" in asks,
        "scale": 0.37 if "scale" in asks else None,
        "window": (3, 2) if "window" in asks else None,
        "softcap": 1.5 if "softcap" in asks else None,
    }


_OVER_SEQUENCES = {"paged_attention": _paged, "ragged_attention": _ragged, "mla_attention": _latent}


def _mlp(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, c, f = case.dims.get("N", 9), case.dims.get("C", 24), case.dims.get("F", 40)
    activation = next((a.removeprefix("act_") for a in case.asks if a.startswith("act_")), "gelu")
    rows = 2 * f if is_gated(activation) else f
    biases = [rand(rows), rand(c)] if "bias" in case.asks else [None, None]
    return [rand(n, c), rand(rows, c) * c**-0.5, rand(c, f) * f**-0.5, *biases], {"activation": activation}


def _codes(shape: tuple[int, int], case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes of the format that a case asks for, and their scales in the layout that it asks for."""
    form = next((a.removeprefix("quant_") for a in case.asks if a.startswith("quant_")), "int8")
    layout = next((a.removeprefix("scale_per_") for a in case.asks if a.startswith("scale_per_")), "row")
    group = _group(shape[1]) if layout == "group" else 0
    numbers = torch.randn(shape, generator=generator)
    codes, scale = quantize_reference(numbers, form, layout, group, None)
    return codes, scale


def _group(width: int) -> int:
    """The smallest size above 1 that divides a row."""
    return next((size for size in range(2, width + 1) if width % size == 0), 1)


def _quantize(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, c = case.dims.get("N", 9), case.dims.get("C", 24)
    form = next((a.removeprefix("quant_") for a in case.asks if a.startswith("quant_")), "int8")
    layout = next((a.removeprefix("scale_per_") for a in case.asks if a.startswith("scale_per_")), "row")
    named: dict[str, Any] = {"format": form, "granularity": layout}
    if layout == "group":
        named["group_size"] = _group(c)
    if "scale_given" in case.asks:
        shape = scale_shape((n, c), layout, named.get("group_size", 0))
        named["scale"] = torch.rand(shape, generator=generator) * 0.02 + 0.001
    return [rand(n, c)], named


def _dequantize(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    codes, scale = _codes((case.dims.get("N", 9), case.dims.get("C", 24)), case, generator)
    if case.strided:
        codes = torch.stack([codes, codes], -1)[..., 0]
    return [codes, scale], {"dtype": str(rand(1).dtype).removeprefix("torch.")}


def _quantized_linear(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, c, k = case.dims.get("N", 9), case.dims.get("C", 24), case.dims.get("K", 40)
    weight, scale = _codes((c, k), case, generator)
    inputs = "dynamic" if "inputs_quantized" in case.asks else "float"
    return [rand(n, k), weight, scale, rand(c) if "bias" in case.asks else None], {"inputs": inputs}


def _linear_cross_entropy(
    case: Case, rand: Any, generator: torch.Generator
) -> tuple[list[Any], dict[str, Any]]:
    n, k, v = (case.dims.get(name, size) for name, size in (("N", 9), ("K", 40), ("V", 50)))
    target = torch.randint(0, v, (n,), generator=generator)
    named = {
        "label_smoothing": 0.1 if "label_smoothing" in case.asks else 0.0,
        "reduction": "mean" if "mean" in case.asks else "none",
    }
    bias = rand(v) if "bias" in case.asks else None
    return [rand(n, k), rand(v, k) * k**-0.5, target, bias], named


def _moe(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, c, f, e = (case.dims.get(name, size) for name, size in (("N", 9), ("C", 24), ("F", 40), ("E", 5)))
    activation = next((a.removeprefix("act_") for a in case.asks if a.startswith("act_")), "swiglu")
    named = {
        "top_k": case.dims.get("T", 2),
        "activation": activation,
        "scoring": "sigmoid" if "scores_sigmoid" in case.asks else "softmax",
        "renormalize": "scores_raw" not in case.asks,
    }
    weights = rand(e, 2 * f, c) * c**-0.5, rand(e, c, f) * f**-0.5
    return [rand(n, c), torch.randn(n, e, generator=generator), *weights], named


_OF_THEIR_OWN = {
    "moe": _moe,
    "linear_cross_entropy": _linear_cross_entropy,
    "attention": _attention, "rope": _rope, "mlp": _mlp, "append_kv": _append, "quantize": _quantize,
    "dequantize": _dequantize, "quantized_linear": _quantized_linear,
}  # fmt: skip
# Asks of which a call can have one.
_ONE_OF = ("mask", "act_", "quant_", "scale_per_")


def _plain(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    asks, dims = set(case.asks), case.dims
    n, c, k, vocabulary = dims.get("N", 9), dims.get("C", 24), dims.get("K", 40), dims.get("V", 50)
    weight = None if "no_weight" in asks else rand(c)
    ids = torch.randint(0, vocabulary, (n,), generator=generator)
    if case.op == "rms_norm":
        return [rand(n, c), weight], {}
    if case.op == "add_rms_norm":
        return [rand(n, c), rand(n, c), weight], {}
    if case.op == "add_layer_norm":
        return [rand(n, c), rand(n, c), weight, rand(c) if "bias" in asks else None], {}
    if case.op == "layer_norm":
        return [rand(n, c), weight, rand(c) if "bias" in asks else None], {}
    if case.op == "linear":
        return [rand(n, k), rand(c, k), rand(c) if "bias" in asks else None], {}
    if case.op == "embedding":
        return [ids, rand(vocabulary, c)], {"padding_idx": 3 if "padding_idx" in asks else None}
    if case.op == "cross_entropy":
        weights = rand(vocabulary).abs() if "class_weights" in asks else None
        smoothing = 0.1 if "label_smoothing" in asks else 0.0
        reduction = "mean" if "mean" in asks else "none"
        named = {"weight": weights, "label_smoothing": smoothing, "reduction": reduction}
        return [rand(n, vocabulary), ids], named
    if case.op == "alibi":
        return [rand(dims.get("Hq", 4)), 5, 9], {}
    return _drawn(case, rand, generator)


def _drawn(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, vocabulary = case.dims.get("N", 9), case.dims.get("V", 50)
    seed: Any = torch.arange(n) if "seed_per_row" in case.asks else 7
    if case.op == "sample":
        return [rand(n, vocabulary)], {"top_k": 20, "top_p": 0.9, "seed": seed}
    if case.op == "sample_topk":
        return [rand(n, vocabulary), 10], {"seed": seed}
    if case.op == "sample_topp":
        return [rand(n, vocabulary), 0.8], {"seed": seed}
    if case.op in ("verify_chain", "verify_tree"):
        places = case.dims.get("S", 4)
        after = places + (case.op == "verify_chain")
        draft, target = (rand(n, size, vocabulary).softmax(-1) for size in (places, after))
        drafted = torch.randint(0, vocabulary, (n, places), generator=generator)
        tree = [] if case.op == "verify_chain" else [tuple((node - 1) // 2 for node in range(places))]
        return [draft, drafted, target, *tree], {"seed": seed}
    raise NotImplementedError(f"no calls for op {case.op!r}: add them here")


_ASKS: dict[str, tuple[str, ...]] = {
    "attention": (
        "causal", "mask_bool", "mask_float", "mask_wide", "empty_rows", "gqa", "scale", "window", "softcap",
        "alibi", "lse", "bshd",
    ),
    "paged_attention": (
        "causal", "prefill", "gqa", "scale", "window", "softcap", "lse", "hnd", "kv_float32", "kv_bfloat16",
        "kv_float16",
    ),
    "append_kv": ("hnd", "kv_strided", "kv_float32", "kv_bfloat16", "kv_float16", "kv_float64"),
    "ragged_attention": ("causal", "gqa", "scale", "window", "softcap", "lse"),
    "mla_attention": ("causal", "prefill", "gqa", "lse", "kv_float32", "kv_bfloat16", "kv_float16"),
    "rms_norm": ("no_weight",),
    "add_rms_norm": ("no_weight",),
    "layer_norm": ("no_weight", "bias"),
    "add_layer_norm": ("no_weight", "bias"),
    "linear": ("bias",),
    "mlp": ("bias", *(f"act_{name}" for name in ACTIVATIONS)),
    "embedding": ("padding_idx",),
    "cross_entropy": ("mean", "label_smoothing", "class_weights"),
    "quantize": (
        "quant_fp8_e4m3", "quant_fp8_e5m2", "scale_per_tensor", "scale_per_group", "scale_given",
    ),
    "dequantize": ("quant_fp8_e4m3", "quant_fp8_e5m2", "scale_per_tensor", "scale_per_group"),
    "quantized_linear": (
        "quant_fp8_e4m3", "quant_fp8_e5m2", "scale_per_tensor", "scale_per_group", "bias", "inputs_quantized",
    ),
    "linear_cross_entropy": ("mean", "label_smoothing", "bias"),
    "moe": ("act_geglu", "act_geglu_tanh", "act_reglu", "scores_sigmoid", "scores_raw"),
    "rope": ("interleaved", "partial_rotary", "xpos"),
    "sample": ("seed_per_row",),
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
    "paged_attention": ({"P": 1}, {"P": 64, "D": 40}, {"N": 1, "D": 1}, {"D": 128, "Dv": 24}),
    "ragged_attention": ({"D": 1}, {"D": 128, "Dv": 24}, {"Hq": 6, "Hk": 1}),
    "mla_attention": ({"P": 1}, {"P": 64, "D": 40}, {"N": 1, "D": 1}),
    "moe": ({"N": 1, "T": 1}, {"N": 33, "C": 31, "E": 8, "T": 8}, {"N": 3, "E": 1, "T": 1}, {"C": 128}),
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


# What some kernels take only all together, beyond pairs.
_TOGETHER = {"quantized_linear": (("quant_fp8_e4m3", "inputs_quantized", "bias"),)}


# Below these the sizes that cases have anyhow are enough.
_SMALL: dict[type, int] = {MultipleOf: 16, AtLeast: 9}


def base_of(kernel: Kernel) -> dict[str, int]:
    """The sizes that every call needs for the kernel to take it, where it does not take any."""
    base: dict[str, int] = {}
    for limit in kernel.capability.limits:
        if isinstance(limit, OneOf):
            base[limit.dim] = limit.values[0]
        elif isinstance(limit, MultipleOf | AtLeast) and limit.value > _SMALL[type(limit)]:
            base[limit.dim] = limit.value
    return base


def cases_of(kernel: Kernel) -> Iterator[Case]:
    """The calls of a kernel's op, in the sizes and the layout that it takes."""
    layout = ("bshd",) if kernel.capability.layouts == {"BSHD"} else ()
    for case in cases(kernel.op, base_of(kernel)):
        yield replace(case, asks=(*layout, *(a for a in case.asks if a not in layout)))


def cases(op: str, base: Mapping[str, int] = MappingProxyType({})) -> Iterator[Case]:
    """The plain call, each thing asked alone, each pair, each size, and operands with gaps between rows.

    `base` are sizes of every call, unless a size of its own says otherwise.
    """
    asks = _ASKS.get(op, ())
    always = dict(base)
    yield Case(op, dims=always)
    yield Case(op, dims=always, strided=True)
    for ask in asks:
        yield Case(op, (ask,), always)
    for pair in itertools.combinations(asks, 2):
        if not any(pair[0].startswith(kind) and pair[1].startswith(kind) for kind in _ONE_OF):
            yield Case(op, pair, always)
    for asked in _TOGETHER.get(op, ()):
        yield Case(op, asked, always)
    for own in (*_SIZES.get(op, _ROW_SIZES), *(_GPU_SIZES.get(op, ()) if DEVICE != "cpu" else ())):
        dims = always | own
        if op == "layer_norm" and dims.get("C") == 1:
            continue  # the truth is zero: any rounding is an error of 100 %
        yield Case(op, dims=dims)
        if op == "attention" and "Dv" not in dims:
            yield Case(op, ("causal",), dims)


def dtypes(kernel: Kernel) -> list[torch.dtype]:
    """The floating dtypes that the kernel claims."""
    return [getattr(torch, name) for name in sorted(kernel.capability.dtypes & FLOATS & _DTYPES)]


def expected(case: Case, args: Args) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(truth, baseline) of a case's call; the truth from the CPU, the baseline from the device under test."""
    return _expected(case, getattr(torch, table.get(case.op).check(args).dtype))


@functools.lru_cache(maxsize=1 if DEVICE == "cpu" else None)
def _expected(case: Case, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    op, args = table.get(case.op), call(case, dtype)
    return truth(op, to("cpu", args)), tuple(base.cpu() for base in baseline(op, args))


def widened(args: Args) -> Args:
    """The arguments with floating tensors in float64; codes in eight bits stay what they are."""
    return tuple(
        a.double() if isinstance(a, Tensor) and a.is_floating_point() and a.itemsize > 1 else a for a in args
    )


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    """A kernel's result as a tuple of tensors."""
    return out if isinstance(out, tuple) else (out,)


def results(op: Op, run: Any, args: Args) -> tuple[Tensor, ...]:
    """The outputs of `run` for a call, then the operands that it writes, as copies of the given ones."""
    own = tuple(a.clone() if at in op.writes else a for at, a in enumerate(args))
    return (*as_tuple(run(*own)), *(own[at] for at in op.writes))


def truth(op: Op, args: Args) -> tuple[Tensor, ...]:
    """The op's result in float64."""
    return results(op, op.reference, widened(args))


def baseline(op: Op, args: Args) -> tuple[Tensor, ...]:
    """Plain torch in the operands' own dtype, every step rounded; the reference for ops of few steps."""
    if not op.pure:
        return results(op, op.reference, args)
    if op.name == "moe":  # hidden rows are rounded too
        return as_tuple(by_expert(*args))
    if op.name == "linear_cross_entropy":  # logits are rounded wherever they are written at all
        x, weight, target, bias, *rest = args
        rounded = functional.linear(x, weight, bias)
        return as_tuple(cross_entropy_reference(rounded, target, None, *rest))
    if op.name in _OVER_SEQUENCES and DEVICE != "cpu":
        found = as_tuple(op.reference(*args))
        return (found[0], _naive_lse(op.name, args)) if len(found) > 1 else found
    if op.name != "attention" or args[0].dtype in (torch.float64,):
        return as_tuple(op.reference(*args))
    (q, k, v, mask, causal, scale, _, window, softcap, slopes, layout, *_rest) = args
    if layout == "BSHD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask, slopes = (None if t is None else t.cpu() for t in (mask, slopes))
    bias = _naive_bias(q, k, mask, causal, window, slopes).to(q.device)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias.to(scores.dtype)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    out = (functional.softmax(scores, -1).masked_fill(hidden, 0.0)) @ v
    lse = torch.logsumexp(scores.float(), -1)
    return (out.transpose(1, 2) if layout == "BSHD" else out), lse


def _naive_lse(op: str, args: Args) -> Tensor:
    """The log-sum-exp of scores that are rounded at every step, (T, H), of an op over sequences.

    Only on GPUs, whose kernels sum rounded weights; the CPU's are held to the reference's float32.
    """
    found = []
    for q, k, causal, scale, window, softcap in _sequences(op, args):
        query, key = q.transpose(0, 1)[None], k.transpose(0, 1)[None].to(q.dtype)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query @ key.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        bias = _naive_bias(query, key, None, causal, window, None).to(scores)
        found.append(torch.logsumexp((scores + bias).float(), -1)[0].transpose(0, 1))
    return torch.cat(found)


def _sequences(op: str, args: Args) -> Iterator[tuple[Tensor, Tensor, bool, Any, Any, Any]]:
    """(q, k, causal, scale, window, softcap) of each sequence, tokens before heads."""
    if op == "ragged_attention":
        (q, k, _, cu, cu_k, causal, scale, window, softcap, _) = args
        starts, keys = cu.tolist(), cu_k.tolist()
        for b in range(len(starts) - 1):
            yield q[starts[b] : starts[b + 1]], k[keys[b] : keys[b + 1]], causal, scale, window, softcap
        return
    if op == "paged_attention":
        (q, pool, _, tables, lens, cu, causal, scale, window, softcap, layout, _) = args
    else:
        (nope, rotary, ckv, kpe, tables, lens, cu, scale, causal, _) = args
        q, pool = torch.cat([nope, rotary], -1), torch.cat([ckv, kpe], -1).unsqueeze(2)
        layout, window, softcap = "NHD", None, None
    starts = query_offsets(q.shape[0], cu)
    size = pool.shape[page_axes(layout)[0]]
    for row, length in enumerate(lens.tolist()):
        k = gather(pool, tables[row, : -(-length // size)], length, layout)
        yield q[starts[row] : starts[row + 1]], k, causal, scale, window, softcap


def _naive_bias(q: Tensor, k: Tensor, mask: Any, causal: bool, window: Any, slopes: Any) -> Tensor:
    sq, sk = q.shape[2], k.shape[2]
    bias = torch.zeros(q.shape[0], q.shape[1], sq, sk, device="cpu")
    left, right = window or (-1, -1)
    right = 0 if causal else right
    for i, j in itertools.product(range(sq), range(sk)):
        ahead = j - (i + sk - sq)
        if (right >= 0 and ahead > right) or (left >= 0 and -ahead > left):
            bias[:, :, i, j] = -torch.inf
        elif slopes is not None:
            bias[:, :, i, j] -= slopes * abs(ahead)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask.float()
    return bias
