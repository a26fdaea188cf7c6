"""Calls generated from what kernels claim: every feature, pair of features, dtype, layout and size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends import availability, load_builtin
from layerzero.hardware import Hardware, probe
from layerzero.kernel import ACTIVATIONS, FLOATS, Kernel, judge
from layerzero.ops import table
from layerzero.ops.op import Args, Op
from layerzero.ops.request import Request

KERNELS: list[Kernel] = load_builtin()
CPU: Hardware = probe("cpu")


def why_not_here(kernel: Kernel) -> str:
    """Why the kernel cannot run on this machine's CPU; empty where it can."""
    probe_request = Request(op=kernel.op, dtype=min(kernel.capability.dtypes))
    hardware = {"hardware", "backend"}
    missing = [*availability(kernel), *judge(kernel, probe_request, CPU)]
    return "; ".join(str(m) for m in missing if m.reason.category.value in hardware)


RUNNABLE = [k for k in KERNELS if not why_not_here(k)]


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
            wide = torch.randn(*shape[:-1], shape[-1] + 5, generator=generator)
            return wide.to(kind)[..., : shape[-1]]
        return torch.randn(shape, generator=generator).to(kind)

    build = ({"attention": _attention, "rope": _rope, "mlp": _mlp} | _OVER_SEQUENCES).get(case.op, _plain)
    positional, named = build(case, rand, generator)
    args: Args = table.get(case.op).build(*positional, **named)[1]
    return args


def _attention(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    asks = set(case.asks)
    dims = {"B": 2, "Hq": 4, "Hk": 2 if "gqa" in asks else 4, "Sq": 7, "Sk": 11, "D": 16} | case.dims
    b, hq, hk, sq, sk, d = (dims[n] for n in ("B", "Hq", "Hk", "Sq", "Sk", "D"))
    dv = dims.get("Dv", d)
    q, k, v = rand(b, hq, sq, d), rand(b, hk, sk, d), rand(b, hk, sk, dv)
    named: dict[str, Any] = {"is_causal": "causal" in asks, "return_lse": "lse" in asks}
    if "bshd" in asks:
        q, k, v, named["layout"] = *(t.transpose(1, 2) for t in (q, k, v)), "BSHD"
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
    wide = Case(case.op, tuple(a for a in case.asks if a not in ("gqa", "hnd")), {**case.dims, "Hk": 1})
    (_, ckv, _, tables, lens), named = _paged(wide, rand, generator)
    del named["scale"], named["window"], named["softcap"]
    heads, tokens = 1 if "gqa" not in case.asks else 3, len(lens) * (3 if "prefill" in case.asks else 1)
    ckv, kpe = ckv[:, :, 0], rand(*ckv.shape[:2], 8).to(ckv.dtype)
    return [rand(tokens, heads, ckv.shape[2]), rand(tokens, heads, 8), ckv, kpe, tables, lens], named | {
        "scale": 0.3
    }


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
    rows = 2 * f if activation in ("swiglu", "geglu", "reglu") else f
    biases = [rand(rows), rand(c)] if "bias" in case.asks else [None, None]
    return [rand(n, c), rand(rows, c) * c**-0.5, rand(c, f) * f**-0.5, *biases], {"activation": activation}


def _plain(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    asks, dims = set(case.asks), case.dims
    n, c, k, vocabulary = dims.get("N", 9), dims.get("C", 24), dims.get("K", 40), dims.get("V", 50)
    weight = None if "no_weight" in asks else rand(c)
    ids = torch.randint(0, vocabulary, (n,), generator=generator)
    seed: Any = torch.arange(n) if "seed_per_row" in asks else 7
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
    if case.op == "sample":
        return [rand(n, vocabulary)], {"top_k": 20, "top_p": 0.9, "seed": seed}
    if case.op == "sample_topk":
        return [rand(n, vocabulary), 10], {"seed": seed}
    if case.op == "sample_topp":
        return [rand(n, vocabulary), 0.8], {"seed": seed}
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
    "rope": ("interleaved", "partial_rotary", "xpos"),
    "sample": ("seed_per_row",),
    "sample_topk": ("seed_per_row",),
    "sample_topp": ("seed_per_row",),
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
}
_ROW_SIZES: tuple[dict[str, int], ...] = (
    {"N": 1, "C": 1}, {"N": 1, "C": 2}, {"N": 1, "C": 384}, {"N": 33, "C": 31}, {"N": 64, "C": 128, "K": 128},
)  # fmt: skip


def cases(op: str) -> Iterator[Case]:
    """The plain call, each thing asked alone, each pair, each size, and operands with gaps between rows."""
    asks = _ASKS.get(op, ())
    yield Case(op)
    yield Case(op, strided=True)
    for ask in asks:
        yield Case(op, (ask,))
    for pair in itertools.combinations(asks, 2):
        if not (pair[0][:4] == pair[1][:4] in ("mask", "act_")):
            yield Case(op, pair)
    for dims in _SIZES.get(op, _ROW_SIZES):
        if op == "layer_norm" and dims.get("C") == 1:
            continue  # the truth is zero: any rounding is an error of 100 %
        yield Case(op, dims=dims)
        if op == "attention" and "Dv" not in dims:
            yield Case(op, ("causal",), dims)


def dtypes(kernel: Kernel) -> list[torch.dtype]:
    """The floating dtypes that the kernel claims."""
    return [getattr(torch, name) for name in sorted(kernel.capability.dtypes & FLOATS)]


def widened(args: Args) -> Args:
    """The arguments with floating tensors in float64."""
    return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    """A kernel's result as a tuple of tensors."""
    return out if isinstance(out, tuple) else (out,)


def truth(op: Op, args: Args) -> tuple[Tensor, ...]:
    """The op's result in float64."""
    return as_tuple(op.reference(*widened(args)))


def baseline(op: Op, args: Args) -> tuple[Tensor, ...]:
    """Plain torch in the operands' own dtype, every step rounded; the reference for ops of few steps."""
    if op.name != "attention" or args[0].dtype in (torch.float64,):
        return as_tuple(op.reference(*args))
    (q, k, v, mask, causal, scale, _, window, softcap, slopes, layout, *_rest) = args
    if layout == "BSHD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    bias = _naive_bias(q, k, mask, causal, window, slopes)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias.to(scores.dtype)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    out = (functional.softmax(scores, -1).masked_fill(hidden, 0.0)) @ v
    lse = torch.logsumexp(scores.float(), -1)
    return (out.transpose(1, 2) if layout == "BSHD" else out), lse


def _naive_bias(q: Tensor, k: Tensor, mask: Any, causal: bool, window: Any, slopes: Any) -> Tensor:
    sq, sk = q.shape[2], k.shape[2]
    bias = torch.zeros(q.shape[0], q.shape[1], sq, sk)
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
