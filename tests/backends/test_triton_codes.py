"""Triton kernels over codes that a CPU has others for, run by Triton's interpreter: attention, experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.test_triton_kernels import interpreted, needs_triton

pytestmark = [needs_triton, pytest.mark.timeout(900)]

ATTENDED = """
import json, sys, torch
from layerzero.backends.triton_kernels.dense import attention, ragged_attention
from layerzero.formats.elements import encode_values
from layerzero.ops import kv_formats, table

torch.manual_seed(0)

def coded(shape, codes, granularity, heads):
    element = kv_formats.ELEMENT_OF[codes]
    scale = torch.rand(kv_formats.scale_shape(shape, heads, granularity)) * 0.01 + 2.0 / element.max_value
    numbers = torch.randn(shape) / kv_formats.broadcast_scale(scale, len(shape), heads)
    return encode_values(numbers, element), scale

def error(op, run, *operands, **named):
    args = table.get(op).build(*operands, **named)[1]
    found, wanted = run(*args), table.get(op).reference(*args)
    if not named.get("return_lse"):
        found, wanted = (found,), (wanted,)
    assert [(f.dtype, f.shape) for f in found] == [(w.dtype, w.shape) for w in wanted]
    assert all(torch.equal(f.isinf(), w.isinf()) for f, w in zip(found, wanted))
    pairs = [(f.float().nan_to_num(neginf=0), w.float().nan_to_num(neginf=0)) for f, w in zip(found, wanted)]
    return max(float((f - w).abs().max() / w.abs().max()) for f, w in pairs)

def errors(layout, codes, granularity, coded_queries, how):
    heads = 2 if layout == "BSHD" else 1
    def shape(tokens, many):
        axes = {"BHSD": (2, many, tokens, 64), "BSHD": (2, tokens, many, 64)}
        return axes.get(layout, (2 * tokens, many, 64))
    k, k_scale = coded(shape(37, 2), codes, granularity, heads)
    v, v_scale = coded(shape(37, 2), codes, granularity, heads)
    q, q_scale = torch.randn(shape(35, 4)).half(), None
    if coded_queries:
        q, q_scale = coded(shape(35, 4), codes, granularity, heads)
    named = how | {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if layout == "ragged":
        offsets = torch.tensor([0, 3, 3, 40, 70]), torch.tensor([0, 70, 71, 73, 74])
        return error("ragged_attention", ragged_attention, q, k, v, *offsets, **named)
    return error("attention", attention, q, k, v, layout=layout, **named)

causal, window = {"is_causal": True, "return_lse": True}, {"window": (9, 3), "scale": -0.2}
capped = {"softcap": 1.5, "return_lse": True}
"""
SOME = """
print(json.dumps([
    errors("BHSD", torch.int8, "token", True, causal),
    errors("ragged", torch.float8_e5m2, "tensor", True, capped),
    errors("BSHD", torch.float8_e4m3fn, "token", False, window),
    errors("ragged", torch.int8, "head", False, causal),
]))
"""
ALL = """
print(json.dumps([
    errors(layout, codes, granularity, coded_queries, how)
    for layout in ("BHSD", "BSHD", "ragged") for codes in kv_formats.CODE_DTYPES
    for granularity in kv_formats.GRANULARITIES for coded_queries in (True, False)
    for how in (causal, window, capped)
]))
"""


@pytest.mark.parametrize("calls", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_ragged_and_dense_codes_are_attended_to_as_the_reference_does(tmp_path: Path, calls: str) -> None:
    """Formats, scales, layouts, empty sequences, hidden rows, windows; queries of codes are rounded once."""
    found = interpreted(ATTENDED + calls, tmp_path)
    assert max(found) < 8e-3, found
    if calls == SOME:
        assert max(found[2:]) < 1e-3, found  # queries of numbers in float16


MIXED = """
import json, torch
from layerzero.backends.triton_kernels.experts import fused_experts
from layerzero.formats import QuantizedTensor
from layerzero.ops import table

torch.manual_seed(0)

def weight(end, count, form, sizes, *shape):
    numbers = [torch.randn(shape) * shape[-1] ** -0.5 for _ in range(count)]
    each = [QuantizedTensor.quantize(n, form, **sizes).arguments() for n in numbers]
    tensors = {name for name, part in each[0].items() if isinstance(part, torch.Tensor)}
    parts = {name: torch.stack([part[name] for part in each]) for name in tensors}
    if parts["scale"].dim() == 1:  # of a tensor: one for all experts
        parts["scale"] = parts["scale"][0]
    kept = {name: each[0][name] for name in ("format", "block_size") if name in each[0]}
    return parts.pop("weight"), {f"{end}_{name}": part for name, part in parts.items()}, kept

def error(form, sizes, rows=9, count=5, **named):
    w_up, up, kept = weight("up", count, form, sizes, 192, 64)
    w_down, down, _ = weight("down", count, form, sizes, 64, 96)
    experts = torch.stack([torch.randperm(count)[:2] for _ in range(rows)]).int()
    experts[experts == 2] = 1  # nobody chooses the third
    experts[0, 0] = -1
    x, scores = torch.randn(rows, 64).half(), torch.rand(rows, 2)
    op, named = table.get("fused_experts"), up | down | kept | named
    args = op.build(x, experts, scores, w_up, w_down, **named)[1]
    found = fused_experts(*args)
    wanted = op.reference(*(a.double() if a is x else a for a in args))
    assert found.dtype == x.dtype and found.shape == x.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())

uneven = {"group_size": 32, "symmetric": False}
"""
FEW = """
print(json.dumps([
    error("int4", uneven, first_expert=1, shared=1, activation="geglu"),
    error("fp8_e4m3", {"granularity": "block", "group_size": 32}, gate="second", weighed="inputs"),
]))
"""
EVERY = """
print(json.dumps([
    error("int4", uneven, rows=300, count=3), error("nf4", {"group_size": 32}, rows=40), error("nvfp4", {}),
    error("int8", {"granularity": "row"}, activation="geglu_tanh"),
    error("int8", {"granularity": "tensor"}, activation="reglu", weighed="inputs"),
    error("fp8_e5m2", {"granularity": "group", "group_size": 32}, shared=2, first_expert=2),
]))
"""


@pytest.mark.parametrize("calls", [FEW, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["few", "every"])
def test_experts_of_codes_answer_as_the_reference_does(tmp_path: Path, calls: str) -> None:
    """Formats, scales, gates, scores before and after, choices without a weight, an expert of nobody's."""
    found = interpreted(MIXED + calls, tmp_path)
    assert max(found) < 2e-3, found


LATENT = """
import json, torch
from layerzero.backends.triton_kernels import latent
from layerzero.formats.elements import encode_values
from layerzero.ops import kv_formats, table

torch.manual_seed(0)
op, latent._PART, latent._JOINED = table.get("mla_attention"), 64, 1
launches, run = [], latent._run
latent._run = lambda call, *how: launches.append(how[0]) or run(call, *how)

def pool(codes, granularity, width):
    shape = (36, 8, width)
    if codes is None:
        return torch.randn(shape).half(), None
    element = kv_formats.ELEMENT_OF[codes]
    scale = torch.rand(kv_formats.scale_shape(shape, None, granularity)) * 0.01 + 2.0 / element.max_value
    return encode_values(torch.randn(shape) / kv_formats.broadcast_scale(scale, 3, None), element), scale

def call_of(codes, granularity, heads, lens, **named):
    (ckv, ckv_scale), (kpe, kpe_scale) = pool(codes, granularity, 64), pool(codes, granularity, 32)
    tables = torch.stack([torch.randperm(36) for _ in lens])
    count = int(named["cu_seqlens_q"][-1]) if "cu_seqlens_q" in named else len(lens)
    q, q_pe = torch.randn(count, heads, 64).half(), torch.randn(count, heads, 32).half()
    named = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale, "scale": 0.1, "return_lse": True} | named
    return op.build(q, q_pe, ckv, kpe, tables, torch.tensor(lens), **named)[1]

def error(run, *how, **named):
    args = call_of(*how, **named)
    found, wanted = run(*args), op.reference(*args)
    assert torch.equal(found[1].isinf(), wanted[1].isinf())
    pairs = [(f.float().nan_to_num(neginf=0), w.float().nan_to_num(neginf=0)) for f, w in zip(found, wanted)]
    return max(float((f - w).abs().max() / w.abs().max()) for f, w in pairs)
"""
AGREE = """
split, in_order = latent.mla_attention, latent.mla_attention_in_order
errors = [
    error(split, torch.float8_e4m3fn, "token", 3, [285, 3]), error(split, None, "", 3, [260, 0]),
    error(in_order, torch.int8, "token", 4, [100, 0, 65], cu_seqlens_q=torch.tensor([0, 2, 4, 7])),
    error(split, torch.int8, "tensor", 80, [45, 3], is_causal=False, scale=-0.1),
]
latent._MOST_BYTES = 3 * 4 * 5 * 64 * 4  # three queries at a time
more = torch.tensor([0, 2, 7])
errors.append(error(in_order, None, "", 4, [130, 3], cu_seqlens_q=more))
errors.append(error(split, torch.int8, "token", 4, [45, 3], cu_seqlens_q=more))
assert launches == [2, 2, 5, 2, 5, 1], launches
print(json.dumps(errors))
"""
ALONE = """
equal = []
args = call_of(torch.int8, "token", 3, [200, 64, 1, 129])
together = latent.mla_attention_in_order(*args)
for row, length in enumerate(args[5].tolist()):
    latent._MOST_BYTES = 1 << (26 * (row % 2))  # one query at a time, or all
    each = [args[0][row : row + 1], args[1][row : row + 1], *args[2:4]]
    each += [args[4][row : row + 1, : -(-length // 8)], args[5][row : row + 1]]
    alone = latent.mla_attention_in_order(*each, *args[6:])
    equal += [torch.equal(a, t[row : row + 1]) for a, t in zip(alone, together)]
assert launches == [5, 4, 1, 1, 3], launches
print(json.dumps(equal))
"""


def test_latent_pages_are_attended_to_as_the_reference_does(tmp_path: Path) -> None:
    """Codes and numbers, one query a sequence and more, in one part and more, a few queries at a time.

    Among them rows that see no key, parts without keys, and more heads than a program has.
    """
    found = interpreted(LATENT + AGREE, tmp_path)
    assert max(found) < 2e-3, found


def test_parts_in_order_give_a_row_its_own_bits(tmp_path: Path) -> None:
    """Whatever the batch, the width of its tables and the queries that are attended at a time."""
    assert all(interpreted(LATENT + ALONE, tmp_path))
