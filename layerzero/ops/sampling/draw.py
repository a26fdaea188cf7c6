"""How a token is drawn from logits: the filter rule and the generator of every sampling op.

Temperature -> top-k -> renormalise -> top-p, then one draw by a hash of (seed, offset). Probabilities are
integers from the exponential on, so that their sums do not depend on the order of summation: a row gives
one token alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero._util import foreign

Number = float | Tensor
Count = int | Tensor

# 2**64 divided by the golden ratio, and the multipliers of splitmix64's finaliser, as signed integers.
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def token_weights(logits: Tensor, temperature: Number, top_k: Count, top_p: Number) -> Tensor:
    """How often each token is drawn, as integers (B, V) int64: 0 for what the filters remove.

    A row's largest weight is 2**(52 - ceil(log2 V)), so that its sum is below 2**53 and exact in float64.
    A row whose largest logit is not finite weighs nothing.
    """
    vocab = logits.shape[1]
    wide = logits.double()
    largest = wide.amax(-1, keepdim=True)
    index = torch.arange(vocab, device=logits.device)
    temperatures = column(temperature, torch.float64, logits.device)
    # A temperature of 0 takes the largest logit, of several the first.
    first = torch.where((wide == largest) & largest.isfinite(), index, vocab).amin(-1, keepdim=True)
    unit = float(1 << (52 - (vocab - 1).bit_length()))
    probs = torch.exp((wide - largest) / torch.where(temperatures > 0, temperatures, 1.0))
    weights = torch.where(temperatures > 0, torch.nan_to_num(probs * unit, nan=0.0), index == first).long()
    if is_constant(top_k, 0) and is_constant(top_p, 1):
        return weights
    order = torch.sort(wide, dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(-1, order)
    if not is_constant(top_k, 0):
        count = column(top_k, torch.int64, logits.device)
        ranked = torch.where((index < count) | (count == 0), ranked, 0)
    if not is_constant(top_p, 1):
        before = ranked.cumsum(-1) - ranked
        target_weight = column(top_p, torch.float64, logits.device) * ranked.sum(-1, keepdim=True)
        ranked = torch.where((before < target_weight) | (index == 0), ranked, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked)


def greedy_tokens(logits: Tensor) -> Tensor:
    """What a temperature of 0 draws (B,): the first of each row's largest; -1 where that is not finite."""
    value, token = logits.max(-1)
    return torch.where(value.isfinite(), token, -1)


def sample_from_weights(weights: Tensor, seed: Count, offset: Count) -> Tensor:
    """The token (B,) at the point of each row's weights that (seed, offset) falls on; -1 without weight."""
    upper = weights.cumsum(-1)
    total = upper[:, -1]
    point = (uniform(row_seeds(seed, weights), offset) * total).long()
    point = torch.minimum(point, total - 1).unsqueeze(-1)
    # The first token whose upper end lies above the point: a token of weight 0 ends where it begins.
    token = torch.searchsorted(upper, point, right=True).squeeze(-1)
    return torch.where(total > 0, token, -1)


def row_seeds(seed: Count, rows: Tensor) -> Tensor:
    """One seed a row of `rows`: the given ones, or `seed` crossed with the hash of the row's index."""
    if isinstance(seed, Tensor):
        return seed.long()
    index = torch.arange(rows.shape[0], device=rows.device)
    seeds: Tensor = _mix(index * GOLDEN) ^ as_signed_int64(seed)
    return seeds


def uniform(seeds: Tensor, offset: Count) -> Tensor:
    """53 random bits of each (seed, offset) as float64 in [0, 1).

    Integer operations up to one exact conversion: every device gives the same numbers.
    """
    steps = offset.long() * GOLDEN if isinstance(offset, Tensor) else as_signed_int64(offset * GOLDEN)
    return _shift(_mix(_mix(seeds + GOLDEN) + steps), 11).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    """splitmix64's finaliser: each input bit turns each output bit half of the time."""
    bits = (bits ^ _shift(bits, 30)) * FIRST
    bits = (bits ^ _shift(bits, 27)) * SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """int64 shifted right without its sign, which torch's own shift keeps."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def as_signed_int64(value: Any) -> Any:
    """An int's low 64 bits as a signed number; any other number as it is."""
    return ((value + (1 << 63)) % (1 << 64)) - (1 << 63) if isinstance(value, int) else value


def column(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number or a (B,) tensor as (1, 1) or (B, 1)."""
    if isinstance(value, Tensor):
        return value.to(dtype).unsqueeze(-1)
    return torch.full((1, 1), as_signed_int64(value), dtype=dtype, device=device)


def is_constant(value: Any, number: int) -> bool:
    """Whether a number or a tensor is `number` for every row; a tensor is not looked into."""
    return not isinstance(value, Tensor) and bool(value == number)


def new_seed() -> int | None:
    """Drawn in the caller's thread and order, so that `torch.manual_seed` repeats a program's tokens.

    None in a trace: what is traced draws when it runs.
    """
    if foreign.is_traced():
        return None
    return int(torch.randint(1 << 62, (), device="cpu"))


def by_top_k(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`sample` by the arguments of `sample_topk`, without top-p."""

    def sample_topk(logits: Tensor, k: Count, temperature: Number, *stream: Count) -> Tensor:
        return sample(logits, temperature, k, 1.0, *stream)

    return sample_topk


def by_top_p(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`sample` by the arguments of `sample_topp`, without top-k."""

    def sample_topp(logits: Tensor, p: Number, temperature: Number, *stream: Count) -> Tensor:
        return sample(logits, temperature, 0, p, *stream)

    return sample_topp


def scalar(value: Any, unused: Tensor) -> tuple[Tensor, int]:
    """A count as a kernel takes it: a (B,) tensor and 0, or `unused` and the low 64 bits of a number."""
    return (value.contiguous(), 0) if isinstance(value, Tensor) else (unused, as_signed_int64(value))
