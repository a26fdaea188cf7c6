"""One call of an op, described as a case, and its arguments in random numbers.

They are made for the CPU, or for the device that LAYERZERO_TEST_DEVICE names (`cuda`).
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.formats.rounding import round_to_format, scale_shape
from layerzero.formats.table import FORMATS, Format
from layerzero.ops import kv_formats, table
from layerzero.ops.linear.mlp import GATES
from layerzero.ops.op import Args

DEVICE = os.environ.get("LAYERZERO_TEST_DEVICE", "cpu")
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

    build = (_OF_THEIR_OWN | OVER_SEQUENCES).get(case.op, _plain)
    positional, named = build(case, rand, generator)
    args: Args = table.get(case.op).build(*positional, **named)[1]
    return to(DEVICE, args)


def to(device: str, args: Args) -> Args:
    """The arguments with every tensor and block mask on a device, the same tensor staying the same."""
    moved = {id(a): a.to(device) for a in args if isinstance(a, Tensor) or hasattr(a, "kv_num_blocks")}
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
    named |= _modifiers(asks, b, hq, sq, sk, generator)
    if "attn_mask" in named or "block_mask" in named:
        named["combine_mask"] = named["is_causal"]
        named["rows_nonempty"] = "empty_rows" not in asks
    named["scale"] = _scale(case)
    if "window" in asks:
        named["window"] = (3, 2)
    if "softcap" in asks:
        named["softcap"] = 1.5
    if "alibi" in asks:
        named["alibi_slopes"] = torch.rand(hq, generator=generator)
    pair, scales = _stored(case, [k, v], 2 if "bshd" in asks else 1)
    return [q, *pair], named | scales


def _modifiers(
    asks: set[str], b: int, hq: int, sq: int, sk: int, generator: torch.Generator
) -> dict[str, Any]:
    """Sinks, a score modifier that reads a table of the heads, a block mask."""
    named: dict[str, Any] = {}
    if "block_mask" in asks:
        named["block_mask"] = _blocks(b, sq, sk, "empty_rows" in asks, generator.initial_seed())
    if "sinks" in asks:
        named["sinks"] = torch.randn(hq, generator=generator)
    if "score_mod" in asks:
        heads = torch.randn(hq, generator=generator)
        named["score_mod"] = lambda score, b, h, i, j: (
            score * (1 + 0.1 * b) - heads.to(score.device)[h] * (i - j).abs() / 8
        )
    return named


@functools.lru_cache(maxsize=64)
def _blocks(batch: int, sq: int, sk: int, hiding: bool, seed: int) -> Any:
    """A block mask that differs between sequences: some blocks full, some partial, some not there."""
    from torch.nn.attention.flex_attention import create_block_mask

    seen = torch.rand(batch, sq, sk, generator=torch.Generator().manual_seed(seed)) > 0.4
    seen[:, : sq // 2, : sk // 2] = True
    seen[:, sq // 2 :, sk // 2 :] = False
    seen[..., 0] = True
    seen[0, 0] &= not hiding
    places = {torch.device(name).type: seen.to(name) for name in ("cpu", DEVICE)}  # truths ask on the CPU
    size = 128 if sq % 128 == 0 else 3

    def shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return places[b.device.type][b, i, j]

    return create_block_mask(shown, batch, None, sq, sk, DEVICE, BLOCK_SIZE=size)


def _scale(case: Case) -> float | None:
    return -0.37 if "scale_not_positive" in case.asks else 0.37 if "scale" in case.asks else None


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
    q = rand(10, hq, d)
    pair, scales = _stored(case, [rand(52, hk, d), rand(52, hk, dims.get("Dv", d))], 1)
    return [q, *pair, cu, cu_k], _flags(case) | scales


def _paged(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    dims = {"Hq": 4, "Hk": 2 if "gqa" in case.asks else 4, "D": 16, "P": 8, "N": 3} | case.dims
    hq, hk, d, size, batch = (dims[n] for n in ("Hq", "Hk", "D", "P", "N"))
    tables = torch.randperm(6 * batch, generator=generator).view(batch, 6)
    lens = torch.randint(1, 6 * size + 1, (batch,), generator=generator)
    pools = [rand(6 * batch, size, hk, w) for w in (d, dims.get("Dv", d))]
    named, tokens = _flags(case), batch
    if "prefill" in case.asks:
        named["cu_seqlens_q"], tokens = torch.arange(batch + 1) * 3, 3 * batch
    if "hnd" in case.asks:
        pools, named["layout"] = [pool.transpose(1, 2) for pool in pools], "HND"
    pools, scales = _stored(case, pools, 1 if "hnd" in case.asks else 2)
    return [rand(tokens, hq, d), *pools, tables, lens], named | scales


def _stored(case: Case, pools: list[Tensor], heads: int | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Pools in the dtype that the case asks for, codes with their scales."""
    asks = set(case.asks) - {"kv_strided"}
    granularity = next((a.removeprefix("kv_scale_per_") for a in asks if a.startswith("kv_scale_")), "")
    named = [a.removeprefix("kv_") for a in asks if a.startswith("kv_") and not a.startswith("kv_scale_")]
    dtype = getattr(torch, named[0]) if named else torch.float8_e4m3fn if granularity else pools[0].dtype
    if f"kv_{dtype}".replace("torch.", "") not in kv_formats.CODE_FEATURES:
        return [pool.to(dtype) for pool in pools], {}
    largest = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}[dtype]
    codes, scales = [], {}
    for name, pool in zip(("k_scale", "v_scale"), pools, strict=True):
        shape = kv_formats.scale_shape(tuple(pool.shape), heads, granularity or "tensor")
        each = torch.arange(1, 1 + math.prod(shape), dtype=torch.float32, device="cpu").view(shape) % 5 + 1.0
        scale = (each * (2.0 / largest)).to(pool.device)
        wide = (pool.float() / kv_formats.broadcast_scale(scale, pool.dim(), heads)).clamp(-largest, largest)
        codes.append((wide.round() if dtype == torch.int8 else wide).to(dtype))
        scales[name] = scale
    return codes, scales


def _latent(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    sizes = case.dims | {"Hk": 1, "D": case.dims.get("C", case.dims.get("D", 16))}
    asks = tuple(a for a in case.asks if a not in ("gqa", "hnd") and not a.startswith("kv_"))
    wide = Case(case.op, asks, sizes)
    (_, ckv, _, tables, lens), named = _paged(wide, rand, generator)
    del named["window"], named["softcap"]
    heads, tokens = 1 if "gqa" not in case.asks else 3, len(lens) * (3 if "prefill" in case.asks else 1)
    rotary = case.dims.get("R", 8)
    kept = [ckv[:, :, 0], rand(*ckv.shape[:2], rotary)]
    (ckv, kpe), scales = _stored(case, kept, None)
    named |= dict(zip(("ckv_scale", "kpe_scale"), scales.values(), strict=False))
    return [rand(tokens, heads, ckv.shape[2]), rand(tokens, heads, rotary), ckv, kpe, tables, lens], named | {
        "scale": named["scale"] or (0.3 if "C" not in case.dims else 0.07)
    }


def _append(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    dims = {"Hk": 2, "D": 16, "P": 8, "N": 9} | case.dims
    heads, d, size, tokens = (dims[n] for n in ("Hk", "D", "P", "N"))
    widths = d, dims.get("Dv", d)
    pools = [rand(-(-2 * tokens // size), size, heads, width) for width in widths]
    named: dict[str, Any] = {}
    if "hnd" in case.asks:
        pools, named["layout"] = [pool.transpose(1, 2) for pool in pools], "HND"
    pools, scales = _stored(case, pools, 1 if "hnd" in case.asks else 2)
    named |= scales
    if "kv_strided" in case.asks:
        pools = [torch.stack([pool, pool], -1)[..., 0] for pool in pools]
    slot_mapping = torch.randperm(2 * tokens, generator=generator)[:tokens]
    return [*(rand(tokens, heads, width) for width in widths), *pools, slot_mapping], named


def _rope_append(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    (k, v, *written), named = _append(case, rand, generator)
    (_, _, _, *angles), turned = _rope(replace(case, dims=case.dims | {"D": k.shape[2]}), rand, generator)
    positions = torch.randint(0, 32, (k.shape[0],), generator=generator)
    return [rand(k.shape[0], 4, k.shape[2]), k, v, positions, *angles, *written], named | turned


def _flags(case: Case) -> dict[str, Any]:
    asks = set(case.asks)
    return {
        "is_causal": "causal" in asks,
        "return_lse": "lse" in asks,
        "scale": _scale(case),
        "window": (3, 2) if "window" in asks else None,
        "softcap": 1.5 if "softcap" in asks else None,
    }


OVER_SEQUENCES = {"paged_attention": _paged, "ragged_attention": _ragged, "mla_attention": _latent}


def _mlp(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, c, f = case.dims.get("N", 9), case.dims.get("C", 24), case.dims.get("F", 40)
    activation = next((a.removeprefix("act_") for a in case.asks if a.startswith("act_")), "gelu")
    rows = 2 * f if activation in GATES else f
    biases = [rand(rows), rand(c)] if "bias" in case.asks else [None, None]
    return [rand(n, c), rand(rows, c) * c**-0.5, rand(c, f) * f**-0.5, *biases], {"activation": activation}


def _asked(case: Case, prefix: str, names: Any, default: str) -> str:
    """What a case asks of a kind: `int4` of `quant_int4`."""
    asks = (a.removeprefix(prefix) for a in case.asks if a.startswith(prefix))
    return next((ask for ask in asks if ask in names), default)


def _form(case: Case) -> Format:
    return FORMATS[_asked(case, "quant_", FORMATS, "int8")]


def _fit(width: int, form: Format) -> int:
    """The smallest width from there on that the format's groups and bytes divide."""
    unit = form.packed if form.open_groups else form.group_sizes[0]
    return -(-width // unit) * unit


def _scaled(case: Case, form: Format, width: int) -> tuple[str, int]:
    """(granularity, group size) that a case asks for, or the format's usual one where it has no such."""
    usual = "row" if "row" in form.granularities else form.granularities[0]
    layout = _asked(case, "scale_per_", form.granularities, usual)
    if layout == "block":
        return layout, case.dims.get("S", 16)
    if layout != "group":
        return layout, 0
    if not form.open_groups:
        return layout, form.group_sizes[0]
    own = case.dims.get("S", 0)  # a kernel's own size of groups
    return layout, own if own and width % own == 0 else _group(width, form.packed)


def _codes(
    shape: tuple[int, ...], case: Case, generator: torch.Generator
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Random codes in the format that a case asks for, their scales, and what else gives them back."""
    form = _form(case)
    layout, group = _scaled(case, form, shape[-1])
    numbers = torch.randn(shape, generator=generator)
    second = None
    if form.two_level and "tensor_scale" in case.asks:
        second = torch.rand(shape[:-2], generator=generator) * 0.01 + 0.001
    codes, scale = round_to_format(
        numbers, form, layout, group, None, None if second is None else second[..., None, None]
    )
    if "scale_16bit" in case.asks and form.scales[0] == torch.float32:
        scale = scale.bfloat16()
    named: dict[str, Any] = {"block_size": group if layout == "block" else 0, "tensor_scale": second}
    named["format"] = None if form.name in ("int8", "fp8_e4m3", "fp8_e5m2") else form.name
    if form.zero_points and "zero_point" in case.asks:
        named["zero_point"] = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8)
    return codes, scale, named


def _group(width: int, packed: int = 1) -> int:
    """The smallest size above 1 that divides a row; of packed codes one that kernels of groups take."""
    sizes = (
        size for size in range(2, width + 1) if width % size == 0 and size % (8 if packed > 1 else 1) == 0
    )
    return next(sizes, width)


def _quantize(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    form = _form(case)
    n, c = case.dims.get("N", 9), _fit(case.dims.get("C", 24), form)
    layout, group = _scaled(case, form, c)
    named: dict[str, Any] = {"format": form.name, "granularity": layout, "group_size": group}
    if form.two_level and "tensor_scale" in case.asks:
        named["tensor_scale"] = torch.full((), 0.003)
    if "scale_given" in case.asks:
        shape = scale_shape((n, c), layout, group)
        scale = torch.rand(shape, generator=generator) * 0.02 + 0.002
        named["scale"] = (scale * 30 if form.two_level else scale).to(form.scales[0])
    return [rand(n, c)], named


def _norm_quantize(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, c = case.dims.get("N", 9), case.dims.get("C", 24)
    named = _quantize(case, rand, generator)[1]
    named.pop("tensor_scale", None)
    if named["group_size"] and "S" in case.dims:  # a kernel's own size of groups, of which a row is several
        named["group_size"] = size = case.dims["S"]
        c = -(-c // size) * size
    weight = None if "no_weight" in case.asks else rand(c)
    return [rand(n, c), rand(n, c), weight], named


def _dequantize(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    width = _fit(case.dims.get("C", 24), _form(case))
    codes, scale, named = _codes((case.dims.get("N", 9), width), case, generator)
    if case.strided:
        codes = torch.stack([codes, codes], -1)[..., 0]
    return [codes, scale], {"dtype": str(rand(1).dtype).removeprefix("torch."), **named}


def _inputs(case: Case) -> str:
    form = _form(case)
    if "inputs_quantized" in case.asks and form.name not in ("int4", "nf4"):
        return "dynamic"
    return _asked(case, "inputs_", ("int8", "fp8_e4m3"), "float")


def _quantized_linear(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, c, k = case.dims.get("N", 9), case.dims.get("C", 24), _fit(case.dims.get("K", 40), _form(case))
    if "S" in case.dims:  # a kernel's own size of groups, of which a row is several, and of columns
        k, c = -(-k // case.dims["S"]) * case.dims["S"], -(-c // 16) * 16
    weight, scale, named = _codes((c, k), case, generator)
    bias = rand(c) if "bias" in case.asks else None
    return [rand(n, k), weight, scale, bias], {"inputs": _inputs(case), **named}


def _select_experts(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    n, e, top_k = (case.dims.get(name, size) for name, size in (("N", 9), ("E", 8), ("T", 2)))
    grouped = "expert_groups" in case.asks and e % 4 == 0
    named = {
        "top_k": min(top_k, e // 2) if grouped else top_k, "scaling": 2.5,
        "scoring": "sigmoid" if "scores_sigmoid" in case.asks else "softmax",
        "renormalize": "scores_raw" not in case.asks, "groups": 4 if grouped else 1,
        "top_groups": 2 if grouped else 1,
    }  # fmt: skip
    return [rand(n, e), rand(e) if "bias" in case.asks else None], named


def _fused_experts(case: Case, rand: Any, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    form, asks, dims = _form(case), set(case.asks), case.dims
    n, e, top_k = (dims.get(name, size) for name, size in (("N", 9), ("E", 5), ("T", 2)))
    c, f = _fit(dims.get("C", 24), form), _fit(dims.get("F", 40), form)
    experts = torch.rand(n, e, generator=generator).argsort(-1)[:, :top_k].int()
    scores = torch.rand(n, top_k, generator=generator)
    named: dict[str, Any] = {
        "activation": _asked(case, "act_", GATES, "swiglu"),
        "gate": "second" if "gate_second" in asks else "first",
        "weighed": "inputs" if "weighed_inputs" in asks else "outputs",
        "first_expert": 1 if "local_experts" in asks else 0,
        "shared": 1 if "shared_experts" in asks and e > 1 else 0,
    }  # fmt: skip
    if "weights_plain" in asks:
        return [rand(n, c), experts, scores, rand(e, 2 * f, c) * c**-0.5, rand(e, c, f) * f**-0.5], named
    w_up, up_scale, up = _codes((e, 2 * f, c), case, generator)
    w_down, down_scale, down = _codes((e, c, f), case, generator)
    for end, parts in (("up", up), ("down", down)):
        named |= {f"{end}_{name}": parts[name] for name in ("zero_point", "tensor_scale") if name in parts}
    named |= {"inputs": _inputs(case), "format": up["format"], "block_size": up["block_size"]}
    # Numbers are about 1, and hidden rows would grow with their width.
    shrink = [scale if scale.itemsize == 1 else scale * 0.1 for scale in (up_scale, down_scale)]
    return [rand(n, c), experts, scores, w_up, w_down, *shrink], named


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
    "add_rms_norm_quantize": _norm_quantize,
    "linear_cross_entropy": _linear_cross_entropy,
    "attention": _attention, "rope": _rope, "mlp": _mlp, "append_kv": _append, "quantize": _quantize,
    "dequantize": _dequantize, "quantized_linear": _quantized_linear, "select_experts": _select_experts,
    "fused_experts": _fused_experts, "rope_append_kv": _rope_append,
}  # fmt: skip


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
    if case.op == "rms_norm_linear":
        norm_weight = None if "no_weight" in asks else rand(k)
        return [rand(n, k), norm_weight, rand(c, k) * k**-0.5, rand(c) if "bias" in asks else None], {}
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
        filters = {"top_k": 20 if "top_k" in case.asks else 0, "top_p": 0.9 if "top_p" in case.asks else 1.0}
        return [rand(n, vocabulary)], {**filters, "seed": seed}
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
