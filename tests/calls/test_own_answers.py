"""Callers that differ in one operand: each gets its own answer, for every op and every operand."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import layerzero as lz
import layerzero.sync
from layerzero.ops import table
from layerzero.runtime import Runtime
from tests.native.twins import both_paths as both_paths

Call = dict[str, Any]
DRAW = torch.Generator().manual_seed(11)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW)


def shares(*shape: int) -> Tensor:
    return torch.softmax(draw(*shape), -1)


def codes(*shape: int) -> Tensor:
    return torch.randint(-99, 99, shape, generator=DRAW, dtype=torch.int8)


def nibbles(*shape: int) -> Tensor:
    """Codes of four bits: two a byte, or a zero point each."""
    return torch.randint(0, 16, shape, generator=DRAW, dtype=torch.uint8)


def ids(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=DRAW)


def column(*values: float) -> Tensor:
    return torch.tensor(values)


SLOPES = column(0.5, 0.25)
BLOCKS = create_block_mask(lambda b, h, i, j: i >= j - 3, None, None, 3, 5, "cpu", BLOCK_SIZE=2)
HEADS: Call = {"q": draw(1, 2, 3, 8), "k": draw(1, 2, 5, 8), "v": draw(1, 2, 5, 8)}
CUBE: Call = {name: draw(1, 2, 2, 8) for name in "qkv"}  # heads and tokens in either order
LOSS: Call = {"target": ids(7, 4), "reduction": "none"}
LOST: Call = {
    "target": (LOSS["target"] + 1) % 7, "ignore_index": int(LOSS["target"][0]), "label_smoothing": 0.3,
    "reduction": "mean",
}  # fmt: skip
PAGED: Call = {
    "block_tables": torch.tensor([[0, 1], [2, 3]]), "seq_lens": torch.tensor([5, 7]),
    "cu_seqlens_q": torch.tensor([0, 1, 4]),
}  # fmt: skip
REPAGED: Call = {
    "block_tables": torch.tensor([[3, 0], [1, 2]]), "seq_lens": torch.tensor([6, 4]),
    "cu_seqlens_q": torch.tensor([0, 2, 4]), "is_causal": False, "return_lse": True,
}  # fmt: skip
LOGITS = draw(32, 9) / 4
DRAFT: Call = {"draft_probs": shares(32, 2, 6), "draft_tokens": ids(6, 32, 2), "seed": 3, "offset": 0}
TREE: Call = {"draft_probs": shares(32, 4, 6), "draft_tokens": ids(6, 32, 4), "seed": 3, "offset": 0}
ROUNDED: Call = {"format": "int8", "granularity": "group", "group_size": 4}

E4M3 = torch.tensor([[0.5, 2.0]] * 3).to(torch.float8_e4m3fn)
EXPERTS: Call = {
    "x": draw(3, 8), "experts": torch.tensor([[0, 1], [2, 3], [3, 0]]), "scores": draw(3, 2).abs(),
    "w_up": codes(4, 12, 8), "w_down": codes(4, 8, 6), "up_scale": draw(4, 12, 1).abs() / 100,
    "down_scale": draw(4, 8, 1).abs() / 100, "activation": "swiglu", "gate": "first", "weighed": "outputs",
    "first_expert": 0, "shared": 0, "inputs": "float",
}  # fmt: skip

# (op, a call, what else its arguments may be); a floating point tensor without another value is drawn anew.
# An argument that cannot change the answer of this call alone is an ellipsis.
CALLS: list[tuple[str, Call, Call]] = [
    ("rms_norm", {"x": draw(3, 8), "weight": draw(8), "eps": 1e-6}, {"eps": 1.0}),
    ("layer_norm", {"x": draw(3, 8), "weight": draw(8), "bias": draw(8), "eps": 1e-6}, {"eps": 1.0}),
    (
        "add_rms_norm", {"x": draw(3, 8), "residual": draw(3, 8), "weight": draw(8), "eps": 1e-6},
        {"eps": 1.0},
    ),
    (
        "add_layer_norm",
        {"x": draw(3, 8), "residual": draw(3, 8), "weight": draw(8), "bias": draw(8), "eps": 1e-6},
        {"eps": 1.0},
    ),
    (
        "add_rms_norm_quantize",
        {"x": draw(3, 8), "residual": draw(3, 8), "weight": draw(8), "eps": 1e-6, **ROUNDED},
        {"eps": 9.0, "format": "fp8_e5m2", "group_size": 2, "granularity": ...},
    ),
    ("linear", {"x": draw(3, 8), "weight": draw(5, 8), "bias": draw(5)}, {}),
    (
        "rms_norm_linear",
        {"x": draw(3, 8), "norm_weight": draw(8), "weight": draw(5, 8), "bias": draw(5), "eps": 1e-6},
        {"eps": 1.0},
    ),
    (
        "mlp",
        {
            "x": draw(3, 8), "w_up": draw(12, 8), "w_down": draw(8, 6), "b_up": draw(12), "b_down": draw(8),
            "activation": "swiglu",
        },
        {"activation": "reglu"},
    ),
    (
        "moe",
        {
            "x": draw(3, 8), "router_logits": draw(3, 4), "w_up": draw(4, 12, 8), "w_down": draw(4, 8, 6),
            "top_k": 2, "scoring": "softmax", "renormalize": True, "activation": "swiglu",
        },
        {"top_k": 3, "scoring": "sigmoid", "renormalize": False, "activation": "geglu"},
    ),
    (
        "quantize", {"x": draw(3, 8), "scale": draw(3, 2).abs(), **ROUNDED},
        {"format": "fp8_e5m2", "scale": draw(3, 2).abs(), "granularity": ..., "group_size": ...},
    ),
    (
        "quantize", {"x": draw(3, 8), "scale": None, **ROUNDED},
        {"scale": draw(3, 2).abs(), "granularity": ..., "group_size": 2, "format": "fp8_e4m3"},
    ),
    (
        "dequantize", {"codes": codes(3, 8), "scale": draw(3, 2).abs(), "dtype": "float32"},
        {"codes": codes(3, 8), "dtype": "bfloat16"},
    ),
    (
        "quantized_linear",
        {
            "x": draw(3, 8), "weight": codes(5, 8), "scale": draw(5, 1).abs(), "bias": draw(5),
            "inputs": "float",
        },
        {"weight": codes(5, 8), "inputs": "dynamic"},
    ),
    (
        "quantize", {"x": draw(3, 32), "format": "nvfp4", "tensor_scale": torch.tensor(0.01)},
        {"tensor_scale": torch.tensor(0.03), "format": ...},
    ),
    (
        "dequantize",
        {"codes": nibbles(3, 8), "scale": draw(3, 2).abs(), "format": "int4", "zero_point": nibbles(3, 2)},
        {"codes": nibbles(3, 8), "format": ..., "zero_point": nibbles(3, 2)},
    ),
    (
        "dequantize",
        {"codes": nibbles(3, 16), "scale": E4M3, "format": "nvfp4", "tensor_scale": torch.tensor(0.01)},
        {"codes": ..., "scale": ..., "format": ..., "tensor_scale": torch.tensor(0.03)},
    ),
    (
        "dequantize", {"codes": codes(3, 8), "scale": draw(2, 4).abs(), "block_size": 2, "format": None},
        {"codes": codes(3, 8), "block_size": ..., "format": ...},
    ),
    ("dequantize", {"codes": nibbles(3, 8), "scale": draw(3, 2).abs(), "format": "int4"}, {"format": "nf4"}),
    (
        "quantized_linear",
        {
            "x": draw(3, 16), "weight": nibbles(5, 8), "scale": draw(5, 2).abs(), "bias": draw(5), "format":
            "int4", "zero_point": nibbles(5, 2), "inputs": "float",
        },
        {"weight": nibbles(5, 8), "format": ..., "zero_point": nibbles(5, 2), "inputs": "int8"},
    ),
    (
        "quantized_linear", {"x": draw(3, 16), "weight": nibbles(5, 8), "scale": draw(5, 2).abs(), "format":
        "int4"}, {"format": "nf4", "weight": ...},
    ),
    (
        "quantized_linear",
        {
            "x": draw(3, 32), "weight": nibbles(5, 16), "scale": E4M3[:1].expand(5, 2), "format": "nvfp4",
            "tensor_scale": torch.tensor(0.01),
        },
        {"weight": ..., "scale": ..., "format": ..., "tensor_scale": torch.tensor(0.03)},
    ),
    (
        "quantized_linear",
        {"x": draw(3, 16), "weight": codes(4, 16), "scale": draw(2, 8).abs(), "block_size": 2},
        {"weight": ..., "block_size": ...},
    ),
    (
        "select_experts",
        {
            "router_logits": draw(3, 8), "bias": draw(8), "top_k": 2, "scoring": "softmax", "renormalize":
            True, "groups": 4, "top_groups": 2, "scaling": 1.0,
        },
        {"top_k": 3, "scoring": "sigmoid", "renormalize": False, "groups": 2, "top_groups": 4, "scaling":
        2.5},
    ),
    (
        "fused_experts", EXPERTS,
        {
            "experts": ids(4, 3, 2), "w_up": codes(4, 12, 8), "w_down": codes(4, 8, 6), "activation": "reglu",
            "gate": "second", "weighed": "inputs", "first_expert": 1, "shared": 1, "inputs": "dynamic",
        },
    ),
    (
        "fused_experts",
        {
            **EXPERTS, "w_up": nibbles(4, 12, 4), "w_down": nibbles(4, 8, 3), "format": "int4",
            "up_zero_point": nibbles(4, 12, 1), "down_zero_point": nibbles(4, 8, 1),
        },
        {"up_zero_point": nibbles(4, 12, 1), "down_zero_point": nibbles(4, 8, 1)},
    ),
    (
        "fused_experts",
        {**EXPERTS, "w_up": nibbles(4, 12, 4), "w_down": nibbles(4, 8, 3), "format": "int4"}, {"format":
        "nf4"},
    ),
    (
        "fused_experts",
        {
            "x": draw(3, 16), "experts": EXPERTS["experts"], "scores": EXPERTS["scores"], "format": "nvfp4",
            "w_up": nibbles(4, 32, 8), "w_down": nibbles(4, 16, 8), "up_scale": E4M3[:1, :1].expand(4, 32, 1),
            "down_scale": E4M3[:1, :1].expand(4, 16, 1), "up_tensor_scale": draw(4).abs(),
            "down_tensor_scale": draw(4).abs(),
        },
        {"up_scale": ..., "down_scale": ...},
    ),
    (
        "fused_experts",
        {
            **EXPERTS, "w_up": codes(4, 12, 8), "w_down": codes(4, 8, 6),
            "up_scale": draw(4, 6, 4).abs() / 100, "down_scale": draw(4, 4, 3).abs() / 100, "block_size": 2,
        },
        {"block_size": ...},
    ),
    (
        "embedding", {"ids": ids(7, 4), "weight": draw(7, 8), "padding_idx": None},
        {"ids": ids(7, 4), "padding_idx": ...},
    ),
    ("cross_entropy", {"logits": draw(4, 7), "weight": draw(7).abs(), **LOSS}, LOST),
    ("linear_cross_entropy", {"x": draw(4, 8), "weight": draw(7, 8), "bias": draw(7), **LOSS}, LOST),
    (
        "rope",
        {
            "q": draw(4, 2, 8), "k": draw(4, 1, 8), "positions": torch.arange(4), "cos": draw(9, 4),
            "sin": draw(9, 4), "interleaved": False, "xpos_scale": None,
        },
        {"positions": torch.arange(4) + 2, "interleaved": True, "xpos_scale": draw(9, 4)},
    ),
    (
        "rope",
        {
            "q": draw(4, 2, 8), "k": draw(4, 1, 8), "positions": torch.arange(4), "cos": draw(9, 4),
            "sin": draw(9, 4), "interleaved": False, "xpos_scale": draw(9, 4),
        },
        {"positions": torch.arange(4) + 2, "interleaved": True},
    ),
    ("alibi", {"slopes": SLOPES, "q_len": 3, "k_len": 4}, {"q_len": 2, "k_len": 5}),
    (
        "attention",
        {
            **HEADS, "attn_mask": None, "is_causal": True, "scale": None, "dropout_p": 0.0, "window": (1, -1),
            "softcap": 2.0, "alibi_slopes": SLOPES, "layout": "BHSD", "return_lse": False,
            "combine_mask": False, "rows_nonempty": False,
        },
        {
            "attn_mask": ..., "is_causal": False, "scale": 2.0, "dropout_p": ..., "window": (2, -1),
            "softcap": 0.5, "layout": ..., "return_lse": True, "combine_mask": ..., "rows_nonempty": ...,
        },
    ),
    ("attention", HEADS, {"alibi_slopes": SLOPES, "attn_mask": draw(3, 5), "window": (1, 1)}),
    ("attention", {**HEADS, "alibi_slopes": draw(1, 2)}, {}),
    ("attention", {**HEADS, "attn_mask": draw(3, 5), "combine_mask": True}, {"is_causal": True}),
    ("attention", {**HEADS, "sinks": column(0.3, -0.7)}, {}),
    ("attention", HEADS, {"score_mod": lambda score, b, h, i, j: score * 2, "block_mask": BLOCKS}),
    ("attention", {**CUBE, "alibi_slopes": SLOPES, "layout": "BHSD"}, {"layout": "BSHD"}),
    (
        "ragged_attention",
        {
            "q": draw(6, 2, 8), "k": draw(6, 2, 8), "v": draw(6, 2, 8),
            "cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.tensor([0, 3, 6]),
            "is_causal": True, "scale": None, "window": None, "softcap": None, "return_lse": False,
        },
        {
            "cu_seqlens_q": torch.tensor([0, 1, 6]), "cu_seqlens_k": torch.tensor([0, 5, 6]),
            "is_causal": False, "scale": 2.0, "window": (1, -1), "softcap": 0.5, "return_lse": True,
        },
    ),
    (
        "paged_attention",
        {
            "q": draw(4, 2, 8), "k_cache": draw(4, 4, 2, 8), "v_cache": draw(4, 4, 2, 8), **PAGED,
            "is_causal": True, "scale": None, "window": None, "softcap": None, "layout": "NHD",
            "return_lse": False,
        },
        {**REPAGED, "scale": 2.0, "window": (1, -1), "softcap": 0.5, "layout": ...},
    ),
    (
        "paged_attention",
        {"q": draw(4, 2, 8), "k_cache": draw(4, 2, 2, 8), "v_cache": draw(4, 2, 2, 8), **PAGED,
         "seq_lens": torch.tensor([3, 4])},
        {"layout": "HND", "seq_lens": torch.tensor([4, 2])},
    ),
    (
        "mla_attention",
        {
            "q_nope": draw(4, 2, 8), "q_pe": draw(4, 2, 4), "ckv_cache": draw(4, 4, 8),
            "kpe_cache": draw(4, 4, 4), **PAGED, "scale": 0.5, "is_causal": True, "return_lse": False,
        },
        {**REPAGED, "scale": 1.5},
    ),
    (
        "paged_attention",
        {
            "q": draw(4, 2, 8), "k_cache": codes(4, 4, 2, 8), "v_cache": codes(4, 4, 2, 8), **PAGED,
            "is_causal": True, "return_lse": False, "k_scale": draw(2).abs() / 64,
            "v_scale": draw(2).abs() / 64,
        },
        {**REPAGED, "k_cache": codes(4, 4, 2, 8), "v_cache": codes(4, 4, 2, 8), "k_scale": draw(2).abs() / 16,
         "v_scale": draw(2).abs() / 16},
    ),
    (
        "ragged_attention",
        {
            "q": codes(6, 2, 8), "k": codes(6, 2, 8), "v": codes(6, 2, 8),
            "cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.tensor([0, 3, 6]),
            "q_scale": draw(2).abs() / 64, "k_scale": draw(2).abs() / 64, "v_scale": draw(2).abs() / 64,
        },
        {
            "q": codes(6, 2, 8), "k": codes(6, 2, 8), "v": codes(6, 2, 8),
            "cu_seqlens_q": torch.tensor([0, 1, 6]), "cu_seqlens_k": torch.tensor([0, 5, 6]),
            "q_scale": draw(2).abs() / 16, "k_scale": draw(2).abs() / 16, "v_scale": draw(2).abs() / 16,
        },
    ),
    (
        "attention",
        {
            "q": codes(1, 2, 3, 8), "k": codes(1, 2, 3, 8), "v": codes(1, 2, 3, 8),
            "q_scale": draw(2).abs() / 64, "k_scale": draw(2).abs() / 64, "v_scale": draw(2).abs() / 64,
        },
        {
            "q": codes(1, 2, 3, 8), "k": codes(1, 2, 3, 8), "v": codes(1, 2, 3, 8),
            "q_scale": draw(2).abs() / 16, "k_scale": draw(2).abs() / 16, "v_scale": draw(2).abs() / 16,
        },
    ),
    (
        "mla_attention",
        {
            "q_nope": draw(4, 2, 8), "q_pe": draw(4, 2, 4), "ckv_cache": codes(4, 4, 8),
            "kpe_cache": codes(4, 4, 4), **PAGED, "scale": 0.5, "is_causal": True, "return_lse": False,
            "ckv_scale": draw(4, 4).abs() / 64, "kpe_scale": draw(4, 4).abs() / 64,
        },
        {**REPAGED, "scale": 1.5, "ckv_cache": codes(4, 4, 8), "kpe_cache": codes(4, 4, 4),
         "ckv_scale": draw(4, 4).abs() / 16, "kpe_scale": draw(4, 4).abs() / 16},
    ),
    (
        "sample",
        {"logits": LOGITS, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 5, "offset": 0},
        {"temperature": 9.0, "top_k": 2, "top_p": 0.3, "seed": 6, "offset": 1},
    ),
    (
        "sample",
        {
            "logits": LOGITS, "temperature": torch.ones(32), "top_k": torch.full((32,), 4),
            "top_p": torch.full((32,), 0.9), "seed": torch.arange(32), "offset": torch.zeros(32).long(),
        },
        {
            "temperature": torch.full((32,), 0.01), "top_k": torch.full((32,), 1),
            "top_p": torch.full((32,), 0.1), "seed": torch.arange(32) + 9, "offset": torch.ones(32).long(),
        },
    ),
    (
        "sample_topk", {"logits": LOGITS, "k": 5, "temperature": 1.0, "seed": 5, "offset": 0},
        {"k": 2, "temperature": 9.0, "seed": 6, "offset": 1},
    ),
    (
        "sample_topp", {"logits": LOGITS, "p": 0.9, "temperature": 1.0, "seed": 5, "offset": 0},
        {"p": 0.3, "temperature": 9.0, "seed": 6, "offset": 1},
    ),
    (
        "verify_chain", {**DRAFT, "target_probs": shares(32, 3, 6)},
        {
            "draft_probs": shares(32, 2, 6), "draft_tokens": ids(6, 32, 2), "target_probs": shares(32, 3, 6),
            "seed": 4, "offset": 1,
        },
    ),
    (
        "verify_tree", {**TREE, "target_probs": shares(32, 4, 6), "parents": (-1, 0, 0, 1)},
        {
            "draft_probs": shares(32, 4, 6), "draft_tokens": ids(6, 32, 4), "target_probs": shares(32, 4, 6),
            "seed": 4, "offset": 1, "parents": (-1, 0, 0, 2),
        },
    ),
]  # fmt: skip
SQUARE, BYTES = draw(8, 8), codes(5, 8)
# Weights of one address that are not one weight: by their strides, their shape and their dtype.
CALLS += [
    ("linear", {"x": draw(3, 8), "weight": SQUARE}, {"x": ..., "weight": SQUARE.T}),
    ("linear", {"x": draw(3, 8), "weight": SQUARE}, {"x": ..., "weight": SQUARE[:5]}),
    (
        "quantized_linear", {"x": draw(3, 8), "weight": BYTES, "scale": draw(5, 1).abs()},
        {"x": ..., "weight": BYTES.view(torch.float8_e4m3fn), "scale": ...},
    ),
    (
        "paged_attention",  # queries of two dtypes over one pool of codes
        {
            "q": draw(4, 2, 8), "k_cache": codes(4, 4, 2, 8), "v_cache": codes(4, 4, 2, 8), **PAGED,
            "k_scale": draw(2).abs() / 64, "v_scale": draw(2).abs() / 64,
        },
        {"q": draw(4, 2, 8).bfloat16(), "k_scale": ..., "v_scale": ...},
    ),
]  # fmt: skip


def pairs() -> Iterator[Any]:
    """(op, call, the call with one other argument) for all that `CALLS` names."""
    for number, (op, call, others) in enumerate(CALLS):
        for name in {**call, **others}:
            if name in others:
                other = others[name]
            elif isinstance(call[name], Tensor) and call[name].dtype.is_floating_point:
                other = draw(*call[name].shape).abs() if name.endswith("scale") else draw(*call[name].shape)
            else:
                continue
            if other is not ...:
                yield pytest.param(op, call, {**call, name: other}, id=f"{op}{number}-{name}")


PAIRS = list(pairs())
# What only says how a call may be answered, or is another op's own affair below.
NOTHING_TO_SEE = {
    ("embedding", "padding_idx"), ("attention", "dropout_p"), ("attention", "rows_nonempty"),
    ("attention", "combine_mask"), ("quantize", "granularity"), ("add_rms_norm_quantize", "granularity"),
    ("dequantize", "block_size"), ("quantized_linear", "block_size"), ("fused_experts", "block_size"),
}  # fmt: skip


def test_every_argument_of_every_op_is_changed_once() -> None:
    """An op or an argument that is added later has to be added here."""
    changed = {tuple(str(case.id).rsplit("-", 1)) for case in PAIRS}
    seen = {(name.rstrip("0123456789"), argument) for name, argument in changed} | NOTHING_TO_SEE
    every = {
        (op, argument)
        for op in table.names()
        if op in table.FILES and op not in ("append_kv", "rope_append_kv")
        for argument in inspect.signature(table.get(op).build).parameters
    }
    assert every == seen


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A runtime that joins whatever may be joined."""
    with lz.start(lz.Settings(batching="all", inline_limit_us=0.0, warm="off")) as opened:
        yield opened


def parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def same(left: Any, right: Any) -> bool:
    ones, others = parts(left), parts(right)
    return len(ones) == len(others) and all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-4, equal_nan=True)
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize(("op", "call", "other"), PAIRS)
def test_callers_that_differ_in_one_argument_get_their_own(
    runtime: Runtime, op: str, call: Call, other: Call
) -> None:
    """What each gets is what it gets blocking; also from a memo, in either order, and beside its like."""
    blocking, awaited = getattr(lz.sync, op), getattr(lz, op)
    alone = {id(one): blocking(**one) for one in (call, other)}
    assert not same(*alone.values()), "these two answers would not tell the callers apart"

    async def crowd(*calls: Call) -> list[Any]:
        return await asyncio.gather(*[awaited(**one) for one in calls])

    async def rounds() -> None:
        with torch.no_grad():
            for calls in ((call, other), (other, call), (call, other, call, other)):
                for one, result in zip(calls, await crowd(*calls), strict=True):
                    assert same(result, alone[id(one)])

    asyncio.run(rounds())
    definition = table.get(op)
    rule = definition.batching
    if rule is not None and rule.batch_key(definition.build(**call)[1]) is not None:
        shared = runtime.device("cpu").loop_drivers.stats().sizes
        assert max(shared) > 1, "nobody shared a batch: nothing is shown"


@pytest.mark.parametrize("argument", ["k", "v", "slot_mapping", "k_cache", "v_cache", "layout"])
def test_appends_that_differ_in_one_argument_write_their_own(runtime: Runtime, argument: str) -> None:
    """Rows for one pool go to their places, and those for another pool or layout beside them."""
    base: Call = {"k": draw(2, 2, 4), "v": draw(2, 2, 4), "layout": "NHD"}
    other = {**base, argument: "HND" if argument == "layout" else draw(2, 2, 4)} if argument in base else base
    pools = [draw(4, 2, 2, 4) for _ in range(4)]
    apart = argument in ("k_cache", "v_cache", "layout")
    slot_mapping = torch.tensor([1, 6]), torch.tensor([1, 6] if apart else [4, 0])

    def calls(pools: list[Tensor]) -> list[Call]:
        first = {**base, "k_cache": pools[0], "v_cache": pools[1], "slot_mapping": slot_mapping[0]}
        second = {**other, "k_cache": pools[0], "v_cache": pools[1], "slot_mapping": slot_mapping[1]}
        if argument in ("k_cache", "layout"):
            second["k_cache"] = pools[2]
        if argument in ("v_cache", "layout"):
            second["v_cache"] = pools[3]
        if argument in ("k_cache", "v_cache"):  # the pool that both write takes other places of each
            second["slot_mapping"] = torch.tensor([4, 0])
        return [first, second]

    for _ in range(2):
        alone, crowd = [pool.clone() for pool in pools], [pool.clone() for pool in pools]
        for one in calls(alone):
            lz.sync.append_kv(**one)

        async def together(mine: list[Call]) -> list[Tensor]:
            return await asyncio.gather(*[lz.append_kv(**one) for one in mine])

        results = asyncio.run(together(calls(crowd)))
        assert all(
            torch.equal(got, one["slot_mapping"]) for got, one in zip(results, calls(crowd), strict=True)
        )
        assert all(torch.equal(got, wanted) for got, wanted in zip(crowd, alone, strict=True))
