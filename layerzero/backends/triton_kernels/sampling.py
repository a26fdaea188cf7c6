"""Drawing tokens in Triton: one program a row, no sort, the same tokens as the reference.

The reference orders a row by logit and index and sums integer weights. Here a row's logits become keys of
the same order, of as many bits as their dtype needs, and the place where top-k or top-p cuts is found two
bits at a time, by counting or weighing what lies above. Integers make the sums independent of their
order, so that the token is the one that `layerzero.ops.sampling.draw` draws. Where a library's filter
proposes the place of a cut, two passes over the row prove it; a cut that does not hold is found as without
a proposal.
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.ops.sampling.draw import Count, Number, by_top_k, by_top_p, is_constant, scalar

GOLDEN = tl.constexpr(-0x61C8864680B583EB)
FIRST = tl.constexpr(-0x40A7B892E31B1A47)
SECOND = tl.constexpr(-0x6B2FB644ECCEEE15)
# The leading bits of a float32 that tell the values of a dtype apart; an even number, being found by pairs.
_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}


@triton.jit
def _shift(bits, by: tl.constexpr):
    return (bits >> by) & ((1 << (64 - by)) - 1)


@triton.jit
def _mix(bits):
    bits = (bits ^ _shift(bits, 30)) * FIRST
    bits = (bits ^ _shift(bits, 27)) * SECOND
    return bits ^ _shift(bits, 31)


@triton.jit
def _keys(values, BITS: tl.constexpr):
    """Whole numbers in the order of the values, from 0 to 2**BITS - 1; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648) >> (32 - BITS)


@triton.jit
def _weights(values, largest, heat, unit):
    probs = tl.exp((values.to(tl.float64) - largest.to(tl.float64)) / heat)
    return (probs * unit).to(tl.int64)


@triton.jit
def _load(row_ptr, start, vocab, BLOCK: tl.constexpr):
    token_ids = start + tl.arange(0, BLOCK)
    return token_ids, tl.load(row_ptr + token_ids, mask=token_ids < vocab, other=float("-inf")).to(tl.float32)


# Loops sum column by column and across columns only at their end: a sum across columns is a barrier.


@triton.jit
def _cut_by_count(row_ptr, vocab, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The `count`-th largest key, and how many of the keys equal to it belong to the `count` largest."""
    edge = tl.full((), 0, tl.int64)
    for step in range(BITS // 2):
        one = tl.full((), 1, tl.int64) << (BITS - 2 - 2 * step)
        above1, above2 = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        above3 = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab, BLOCK):
            token_ids, values = _load(row_ptr, start, vocab, BLOCK)
            keys = tl.where(token_ids < vocab, _keys(values, BITS), -1)
            above1 += (keys >= edge + one).to(tl.int32)
            above2 += (keys >= edge + 2 * one).to(tl.int32)
            above3 += (keys >= edge + 3 * one).to(tl.int32)
        digit = (tl.sum(above1, 0) >= count).to(tl.int64) + (tl.sum(above2, 0) >= count).to(tl.int64)
        edge += one * (digit + (tl.sum(above3, 0) >= count).to(tl.int64))
    beyond = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token_ids, values = _load(row_ptr, start, vocab, BLOCK)
        beyond += tl.where(token_ids < vocab, _keys(values, BITS) > edge, False).to(tl.int32)
    return edge, count - tl.sum(beyond, 0)


@triton.jit
def _mass(row_ptr, vocab, largest, heat, unit, edge, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of all keys above `edge`, the weight of one key that equals it, and how many do."""
    beyond, each = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token_ids, values = _load(row_ptr, start, vocab, BLOCK)
        keys = tl.where(token_ids < vocab, _keys(values, BITS), -1)
        weights = _weights(values, largest, heat, unit)
        beyond += tl.where(keys > edge, weights, 0)
        each = tl.maximum(each, tl.where(keys == edge, weights, 0))
        equal += ((keys == edge) & (token_ids < vocab)).to(tl.int32)
    return tl.sum(beyond, 0), tl.max(each, 0), tl.sum(equal, 0).to(tl.int64)


@triton.jit
def _cut_by_mass(
    row_ptr, vocab, largest, heat, unit, reach, floor, at_floor, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key such that what is not below it weighs at least `reach`.

    What top-k left counts: keys above `floor`, and `at_floor` for those equal to it.
    """
    edge = tl.full((), 0, tl.int64)
    for step in range(BITS // 2):
        one = tl.full((), 1, tl.int64) << (BITS - 2 - 2 * step)
        mass1, mass2 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
        mass3 = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab, BLOCK):
            token_ids, values = _load(row_ptr, start, vocab, BLOCK)
            keys = tl.where(token_ids < vocab, _keys(values, BITS), -1)
            weights = tl.where(keys > floor, _weights(values, largest, heat, unit), 0)
            mass1 += tl.where(keys >= edge + one, weights, 0)
            mass2 += tl.where(keys >= edge + 2 * one, weights, 0)
            mass3 += tl.where(keys >= edge + 3 * one, weights, 0)
        all1 = tl.sum(mass1, 0) + tl.where(edge + one <= floor, at_floor, 0)
        all2 = tl.sum(mass2, 0) + tl.where(edge + 2 * one <= floor, at_floor, 0)
        all3 = tl.sum(mass3, 0) + tl.where(edge + 3 * one <= floor, at_floor, 0)
        digit = (all1.to(tl.float64) >= reach).to(tl.int64) + (all2.to(tl.float64) >= reach).to(tl.int64)
        edge += one * (digit + (all3.to(tl.float64) >= reach).to(tl.int64))
    return edge


@triton.jit
def _lowest(row_ptr, other_ptr, vocab, none: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key of a row among the tokens that another row has above `none`."""
    lowest = tl.full((BLOCK,), 4294967295, tl.int64)
    for start in range(0, vocab, BLOCK):
        token_ids, values = _load(row_ptr, start, vocab, BLOCK)
        others = tl.load(other_ptr + token_ids, mask=token_ids < vocab, other=none).to(tl.float32)
        lowest = tl.minimum(
            lowest, tl.where((token_ids < vocab) & (others > none), _keys(values, BITS), 4294967295)
        )
    return tl.min(lowest, 0)


@triton.jit
def _beside(row_ptr, vocab, edge, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys lie above `edge`, and how many equal it."""
    beyond, equal = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token_ids, values = _load(row_ptr, start, vocab, BLOCK)
        keys = tl.where(token_ids < vocab, _keys(values, BITS), -1)
        beyond += (keys > edge).to(tl.int32)
        equal += (keys == edge).to(tl.int32)
    return tl.sum(beyond, 0).to(tl.int64), tl.sum(equal, 0).to(tl.int64)


@triton.jit
def _walk(
    row_ptr, vocab, largest, heat, unit, floor, num_at_floor, point, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The first token whose upper end lies above `point`; of the keys equal to `floor`, `left` count."""
    token = tl.full((), 0, tl.int64) + vocab
    ends, ties = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        if token == vocab:
            token_ids, values = _load(row_ptr, start, vocab, BLOCK)
            keys = tl.where(token_ids < vocab, _keys(values, BITS), -1)
            same = ((keys == floor) & (token_ids < vocab)).to(tl.int32)
            many = tl.sum(same, 0).to(tl.int64)
            selected = (keys > floor) | (same > 0)
            if ties + many > num_at_floor:
                selected = (keys > floor) | ((same > 0) & (ties + tl.cumsum(same, 0) <= num_at_floor))
            weights = tl.where(selected & (token_ids < vocab), _weights(values, largest, heat, unit), 0)
            whole = tl.sum(weights, 0)
            if ends + whole > point:
                upper = ends + tl.cumsum(weights, 0)
                token = tl.min(
                    tl.where((upper > point) & (token_ids < vocab), token_ids.to(tl.int64), vocab), 0
                )
            ends += whole
            ties += many
    return token


@triton.jit(
    do_not_specialize=["heat_bits", "count", "share_bits", "seed", "offset"],
)
def _draw(
    logits_ptr, masked_ptr, kept_ptr, out_ptr, stride, vocab, unit,
    heat_ptr, heat_bits, count_ptr, count, share_ptr, share_bits, seed_ptr, seed, offset_ptr, offset,
    HEATS: tl.constexpr, COUNTS: tl.constexpr, SHARES: tl.constexpr, SEEDS: tl.constexpr,
    OFFSETS: tl.constexpr, BY_COUNT: tl.constexpr, BY_SHARE: tl.constexpr, MASKED: tl.constexpr,
    KEPT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    # Scalars are plain numbers in the interpreter; what they are added to makes tensors of them.
    none = tl.full((), 0, tl.int64)
    temperature = (none + heat_bits).to(tl.float64, bitcast=True)
    heat = tl.load(heat_ptr + row).to(tl.float64) if HEATS else temperature
    unit = none.to(tl.float64) + unit

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where, odd = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token_ids, values = _load(row_ptr, start, vocab, BLOCK)
        odd |= (values != values).to(tl.int32)
        where = tl.where(values > best, token_ids, where)
        best = tl.where(values > best, values, best)
    odd, largest = tl.max(odd, 0), tl.max(best, 0)
    argmax = tl.cast(tl.min(tl.where(best == largest, where, vocab), 0), tl.int64)
    usable = (odd == 0) & (largest > float("-inf")) & (largest < float("inf"))
    greedy = heat <= 0.0
    safe = tl.where(greedy, 1.0, heat)

    floor, num_at_floor = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
    if BY_COUNT:
        k = tl.load(count_ptr + row).to(tl.int64) if COUNTS else none + count
        if (k > 0) & (k < vocab):
            proved = tl.full((), 0, tl.int32)
            if MASKED:
                floor = _lowest(row_ptr, masked_ptr + row * vocab, vocab, float("-inf"), BITS, BLOCK)
                above, same = _beside(row_ptr, vocab, floor, BITS, BLOCK)
                num_at_floor = k - above
                proved = tl.where((num_at_floor > 0) & (num_at_floor <= same), 1, 0)
            if proved == 0:
                floor, num_at_floor = _cut_by_count(row_ptr, vocab, k, BITS, BLOCK)
    beyond, each, _ = _mass(row_ptr, vocab, largest, safe, unit, floor, BITS, BLOCK)
    total = beyond + num_at_floor * each
    if BY_SHARE:
        same_share = (none + share_bits).to(tl.float64, bitcast=True)
        share = tl.load(share_ptr + row).to(tl.float64) if SHARES else same_share
        reach = share * total.to(tl.float64)
        top = tl.max(_keys(largest + tl.zeros((1,), tl.float32), BITS), 0)
        edge, at_floor = floor, num_at_floor * each
        proved_edge, equal = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
        if KEPT:
            edge = tl.minimum(_lowest(row_ptr, kept_ptr + row * vocab, vocab, 0.0, BITS, BLOCK), top)
            beyond, each, equal = _mass(row_ptr, vocab, largest, safe, unit, edge, BITS, BLOCK)
            mass = beyond + each * tl.where(edge == floor, num_at_floor, equal)
            enough = (mass.to(tl.float64) >= reach) & (beyond.to(tl.float64) < reach)
            proved_edge = tl.where(enough & (edge >= floor), 1, 0)
        if proved_edge == 0:
            edge = _cut_by_mass(row_ptr, vocab, largest, safe, unit, reach, floor, at_floor, BITS, BLOCK)
            edge = tl.minimum(edge, top)
            beyond, each, equal = _mass(row_ptr, vocab, largest, safe, unit, edge, BITS, BLOCK)
        whole = reach.to(tl.int64)
        whole += (whole.to(tl.float64) < reach).to(tl.int64)
        need = (whole - beyond + each - 1) // tl.maximum(each, 1)
        # The best token stays, however small the share; of equal keys no more than there are.
        need = tl.minimum(tl.maximum(need, (edge == top).to(tl.int64)), equal)
        num_at_floor = tl.where(edge == floor, tl.minimum(need, num_at_floor), need)
        floor = edge
        total = beyond + num_at_floor * each

    row_seed = tl.load(seed_ptr + row).to(tl.int64) if SEEDS else _mix(row * GOLDEN) ^ (none + seed)
    step = tl.load(offset_ptr + row).to(tl.int64) if OFFSETS else none + offset
    bits = _shift(_mix(_mix(row_seed + GOLDEN) + step * GOLDEN), 11)
    point = (bits.to(tl.float64) * 1.1102230246251565e-16 * total.to(tl.float64)).to(tl.int64)
    point = tl.minimum(point, total - 1)

    token = argmax
    if not greedy:
        token = _walk(row_ptr, vocab, largest, safe, unit, floor, num_at_floor, point, BITS, BLOCK)
    tl.store(out_ptr + row, tl.where(usable & (token < vocab), token, -1))


@triton.jit
def _best_of_part(
    logits_ptr, value_ptr, token_ptr, stride, vocab, PART: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest logit of a part of a row and its first token; NaN where the part has one."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where, odd = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, PART, BLOCK):
        token_ids, values = _load(logits_ptr + row * stride, part * PART + start, vocab, BLOCK)
        odd |= (values != values).to(tl.int32)
        where = tl.where(values > best, token_ids, where)
        best = tl.where(values > best, values, best)
    largest = tl.max(best, 0)
    place = row * tl.num_programs(1) + part
    tl.store(value_ptr + place, tl.where(tl.max(odd, 0) > 0, float("nan"), largest))
    tl.store(token_ptr + place, tl.min(tl.where(best == largest, where, vocab), 0))


@triton.jit
def _best_of_row(value_ptr, token_ptr, out_ptr, vocab, parts, PARTS: tl.constexpr):
    """The first token of a row's largest logit; -1 where the row has NaN, +inf or nothing else than -inf."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PARTS)
    inside = columns < parts
    values = tl.load(value_ptr + row * parts + columns, mask=inside, other=float("-inf"))
    token_ids = tl.load(token_ptr + row * parts + columns, mask=inside, other=vocab)
    odd = tl.max((values != values).to(tl.int32), 0)
    largest = tl.max(tl.where(values != values, float("-inf"), values), 0)
    usable = (odd == 0) & (largest > float("-inf")) & (largest < float("inf"))
    token = tl.min(tl.where(values == largest, token_ids, vocab), 0).to(tl.int64)
    tl.store(out_ptr + row, tl.where(usable & (token < vocab), token, -1))


_PART = 8192  # of a vocabulary: enough programs for every multiprocessor from a few rows on


def _greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, in parts that many programs read side by side."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _PART)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _best_of_part[(rows, parts)](
        logits, values, token_ids, logits.stride(0), vocab, PART=_PART, BLOCK=1024, num_warps=4
    )
    _best_of_row[(rows,)](
        values, token_ids, out, vocab, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return out


def _bits(value: Any) -> int:
    """A number's float64 as an int64: Triton would make a float32 of a Python float."""
    return int(struct.unpack("<q", struct.pack("<d", float(value)))[0])


def sample(
    logits: Tensor, temperature: Number, top_k: Count, top_p: Number, seed: Count, offset: Count
) -> Tensor:
    """Filter and draw each row in one launch."""
    return sample_with_proposals(logits, temperature, top_k, top_p, seed, offset, None, None)


def sample_with_proposals(
    logits: Tensor, temperature: Number, top_k: Count, top_p: Number, seed: Count, offset: Count,
    top_k_logits: Tensor | None, top_p_probs: Tensor | None,
) -> Tensor:  # fmt: skip
    """`sample` with its filtered inputs: logits with -inf for the rest, shares with 0 for the rest (B, V).

    Both are dense, and either may be wrong: what they say is proved before it is used.
    """
    if is_constant(temperature, 0):
        return _greedy(logits)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(triton.next_power_of_2(vocab), 2048)

    def fraction(value: Any) -> tuple[Tensor, int]:
        return (value.contiguous(), 0) if isinstance(value, Tensor) else (out, _bits(value))

    _draw[(rows,)](
        logits, out if top_k_logits is None else top_k_logits, out if top_p_probs is None else top_p_probs,
        out,
        logits.stride(0), vocab, float(1 << (52 - (vocab - 1).bit_length())),
        *fraction(temperature), *scalar(top_k, out), *fraction(top_p), *scalar(seed, out),
        *scalar(offset, out),
        HEATS=isinstance(temperature, Tensor), COUNTS=isinstance(top_k, Tensor),
        SHARES=isinstance(top_p, Tensor), SEEDS=isinstance(seed, Tensor), OFFSETS=isinstance(offset, Tensor),
        BY_COUNT=not is_constant(top_k, 0), BY_SHARE=not is_constant(top_p, 1),
        MASKED=top_k_logits is not None,
        KEPT=top_p_probs is not None, BITS=_BITS[logits.dtype], BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out


def sample_topk(*args: Any) -> Tensor:
    """`sample` without top-p."""
    return by_top_k(sample)(*args)


def sample_topp(*args: Any) -> Tensor:
    """`sample` without top-k."""
    return by_top_p(sample)(*args)
