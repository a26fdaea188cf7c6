"""What a call must give: the truth in float64, and plain torch's own rounding in the operands' dtype.

Truths are computed on the CPU, whatever device is under test.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch_kernels.moe import by_expert
from layerzero.ops import table
from layerzero.ops.linear.cross_entropy import cross_entropy_reference
from layerzero.ops.op import Args, Op
from layerzero.ops.paged.checks import gather_pages, page_axes, query_offsets
from tests.backends.calls import DEVICE, OVER_SEQUENCES, Case, call, to


def expected(case: Case, args: Args) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(truth, baseline) of a case's call; the truth from the CPU, the baseline from the device under test."""
    return _expected(case, getattr(torch, table.get(case.op).check(args).dtype))


@functools.cache  # kernels of one op are asked the same calls
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
    own = tuple(_placed_alike(a) if at in op.written(args) else a for at, a in enumerate(args))
    return (*as_tuple(run(*own)), *(own[at] for at in op.written(args)))


def _placed_alike(written: Tensor) -> Tensor:
    """A copy with the same strides: `clone` makes rows with gaps dense."""
    return torch.empty_strided(
        written.shape, written.stride(), dtype=written.dtype, device=written.device
    ).copy_(written)


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
    if op.name in OVER_SEQUENCES and DEVICE != "cpu":
        found = as_tuple(op.reference(*args))
        return (found[0], _naive_lse(op.name, args)) if len(found) > 1 else found
    modified = op.name == "attention" and any(a is not None for a in args[14:])
    if op.name != "attention" or modified or args[0].dtype in (torch.float64,):
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
        (q, k, _, cu, cu_k, causal, scale, window, softcap, *_) = args
        starts, keys = cu.tolist(), cu_k.tolist()
        for b in range(len(starts) - 1):
            yield q[starts[b] : starts[b + 1]], k[keys[b] : keys[b + 1]], causal, scale, window, softcap
        return
    if op == "paged_attention":
        (q, pool, _, tables, lens, cu, causal, scale, window, softcap, layout, *_) = args
    else:
        (nope, rotary, ckv, kpe, tables, lens, cu, scale, causal, *_) = args
        q, pool = torch.cat([nope, rotary], -1), torch.cat([ckv, kpe], -1).unsqueeze(2)
        layout, window, softcap = "NHD", None, None
    starts = query_offsets(q.shape[0], cu)
    size = pool.shape[page_axes(layout)[0]]
    for row, length in enumerate(lens.tolist()):
        k = gather_pages(pool, tables[row, : -(-length // size)], length, layout)
        yield q[starts[row] : starts[row + 1]], k, causal, scale, window, softcap


def _naive_bias(q: Tensor, k: Tensor, mask: Any, causal: bool, window: Any, slopes: Any) -> Tensor:
    sq, sk = q.shape[2], k.shape[2]
    left, right = window or (-1, -1)
    right = 0 if causal else right
    ahead = torch.tensor([[j - (i + sk - sq) for j in range(sk)] for i in range(sq)])
    bias = torch.zeros(q.shape[0], q.shape[1], sq, sk, device="cpu")
    if slopes is not None:
        bias -= slopes.view(-1, 1, 1) * ahead.abs()
    if right >= 0:
        bias[:, :, ahead > right] = -torch.inf
    if left >= 0:
        bias[:, :, -ahead > left] = -torch.inf
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask.float()
    return bias
