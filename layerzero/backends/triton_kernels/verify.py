"""A Triton kernel that verifies chains of drafted tokens: one program a row, each with the seed of its row.

Libraries draw from generators of their own; this gives the tokens of the reference, bit for bit, since points
are hashes and weights integers (`layerzero/ops/sampling/draw.py`).
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.backends.triton_kernels.sampling import GOLDEN, _mix, _shift
from layerzero.ops.sampling.draw import Count, scalar

# What parts the places of a row; `layerzero/ops/sampling/verify.py` keeps its product below 2**63.
PLACE = tl.constexpr(0x2545F4914F6CDD1D)
BELOW = tl.constexpr((1 << 63) - 1)


@triton.jit
def _point(row_seed, place, step):
    """A number in [0, 1) of a row's seed, a place and an offset."""
    mixed = (row_seed ^ (((place + 1) * PLACE) & BELOW)) * GOLDEN
    bits = _shift(_mix(_mix(mixed + GOLDEN) + step * GOLDEN), 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _residual(over_ptr, draft_ptr, start, vocab, reach, BLOCK: tl.constexpr):
    """What the target has more than the draft, and all that it has, of a block of tokens."""
    token_ids = start + tl.arange(0, BLOCK)
    over = tl.load(over_ptr + token_ids, mask=token_ids < vocab, other=0.0).to(tl.float64)
    draft = tl.load(draft_ptr + token_ids, mask=token_ids < reach, other=0.0).to(tl.float64)
    return token_ids, tl.maximum(over - draft, 0.0), over


@triton.jit(do_not_specialize=["seed", "offset"])
def _verify(
    draft_ptr, tokens_ptr, target_ptr, out_ptr, accepted_ptr, places, vocab, unit,
    seed_ptr, seed, offset_ptr, offset, SEEDS: tl.constexpr, OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    none = tl.full((), 0, tl.int64)
    row_seed = tl.load(seed_ptr + row).to(tl.int64) if SEEDS else _mix(row * GOLDEN) ^ (none + seed)
    step = tl.load(offset_ptr + row).to(tl.int64) if OFFSETS else none + offset
    unit = none.to(tl.float64) + unit

    count, going = tl.full((), 0, tl.int64), tl.full((), 1, tl.int64)
    for place in range(0, places):
        token = tl.load(tokens_ptr + row * places + place).to(tl.int64)
        q = tl.load(draft_ptr + (row * places + place) * vocab + token).to(tl.float64)
        p = tl.load(target_ptr + (row * (places + 1) + place) * vocab + token).to(tl.float64)
        going = going * (_point(row_seed, none + place, step) * q < p).to(tl.int64)
        count += going
        tl.store(out_ptr + row * (places + 1) + place, tl.where(going > 0, token, -1))
    tl.store(out_ptr + row * (places + 1) + places, none - 1)

    over_ptr = target_ptr + (row * (places + 1) + count) * vocab
    behind_ptr = draft_ptr + (row * places + tl.minimum(count, places - 1)) * vocab
    reach = tl.where(count < places, none + vocab, 0)  # behind the last place nothing was drafted
    residual_max, whole = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab, BLOCK):
        _, residual, over = _residual(over_ptr, behind_ptr, start, vocab, reach, BLOCK)
        residual_max, whole = tl.maximum(residual_max, residual), tl.maximum(whole, over)
    some = tl.max(residual_max, 0) > 0.0
    scale = tl.where(some, tl.max(residual_max, 0), tl.max(whole, 0))
    safe = tl.where(scale > 0.0, scale, 1.0)

    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        _, residual, over = _residual(over_ptr, behind_ptr, start, vocab, reach, BLOCK)
        total += (tl.where(some, residual, over) / safe * unit).to(tl.int64)
    total = tl.sum(total, 0)
    point = (_point(row_seed, none + places, step) * total.to(tl.float64)).to(tl.int64)
    point = tl.minimum(point, total - 1)

    token, ends = tl.full((), 0, tl.int64) + vocab, tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        if token == vocab:
            token_ids, residual, over = _residual(over_ptr, behind_ptr, start, vocab, reach, BLOCK)
            weights = (tl.where(some, residual, over) / safe * unit).to(tl.int64)
            whole_block = tl.sum(weights, 0)
            if ends + whole_block > point:
                upper = ends + tl.cumsum(weights, 0)
                token = tl.min(
                    tl.where((upper > point) & (token_ids < vocab), token_ids.to(tl.int64), vocab), 0
                )
            ends += whole_block
    tl.store(out_ptr + row * (places + 1) + count, tl.where((total > 0) & (token < vocab), token, -1))
    tl.store(accepted_ptr + row, count)


def verify_chain(
    draft_probs: Tensor, draft_tokens: Tensor, target_probs: Tensor, seed: Count, offset: Count
) -> tuple[Tensor, Tensor]:
    """Compare, count and draw each row in one launch."""
    rows, places, vocab = draft_probs.shape
    out = torch.empty((rows, places + 1), dtype=torch.int64, device=draft_probs.device)
    accepted = torch.empty(rows, dtype=torch.int64, device=draft_probs.device)

    _verify[(rows,)](
        draft_probs, draft_tokens.contiguous(), target_probs, out, accepted, places, vocab,
        float(1 << (52 - (vocab - 1).bit_length())), *scalar(seed, out), *scalar(offset, out),
        SEEDS=isinstance(seed, Tensor), OFFSETS=isinstance(offset, Tensor),
        BLOCK=min(triton.next_power_of_2(vocab), 2048), num_warps=8,
    )  # fmt: skip
    return out, accepted
