"""How the next token of each sequence is drawn, where every request has a rule of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import layerzero as lz
from layerzero.ops.host_copies import to_device_with_host_copy

N = TypeVar("N", int, float)


@dataclass(slots=True)
class LogitRules:
    """What a request asks of its logits before the draw, and what it wants to know about the token after it.

    `history` (L,) int64 on the host has the tokens so far, of which the first `prompt_len` are the prompt;
    `allowed` are the tokens that may come next, a bit each, as `lz.adjust_logits` takes them. With
    `top_logprobs`, the token's logarithm and the likeliest tokens with theirs are left in `logprobs`
    (1 + 2 K,), of the logits before any rule.
    """

    history: Tensor
    prompt_len: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    allowed: Tensor | None = None
    top_logprobs: int | None = None
    logprobs: Tensor | None = None


@dataclass(slots=True)
class SampleArgs:
    """How one sequence's next token is drawn; `offset` counts its draws, so that each has its own."""

    temperature: float
    top_p: float
    seed: int
    offset: int
    top_k: int = 0
    rules: LogitRules | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken as it is."""
        return self.temperature == 0 and self.rules is None


# For pieces of a prompt, whose next token is known already.
NO_DRAW = SampleArgs(temperature=0.0, top_p=1.0, seed=0, offset=0)


def _one_or_per_row(values: list[N], device: torch.device) -> N | Tensor:
    """The number that all callers give, or one a row."""
    if values.count(values[0]) == len(values):
        return values[0]
    dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float64
    return to_device_with_host_copy(torch.tensor(values, dtype=dtype), device)


def sample_tokens(logits: Tensor, sample_args: Sequence[SampleArgs]) -> Tensor:
    """The tokens (B,) for the rows of `logits`, each drawn as its caller wants it.

    Rows with rules are drawn beside the others, so that no request's rules touch another's row.
    """
    ruled = [row for row, draw in enumerate(sample_args) if draw.rules is not None]
    if not ruled:
        return _draw(logits, sample_args)
    draws = [sample_args[row] for row in ruled]
    if len(ruled) == len(sample_args):
        tokens = _draw(adjusted_rows(logits, draws), draws)
        note_logprobs(logits, tokens, draws)
        return tokens
    plain = [row for row, draw in enumerate(sample_args) if draw.rules is None]
    order = to_device_with_host_copy(torch.tensor([*ruled, *plain]), logits.device)
    rows = logits[order[: len(ruled)]]
    tokens = _draw(adjusted_rows(rows, draws), draws)
    note_logprobs(rows, tokens, draws)
    others = _draw(logits[order[len(ruled) :]], [sample_args[row] for row in plain])
    return torch.empty_like(order).scatter_(0, order, torch.cat([tokens, others]))


def _draw(logits: Tensor, sample_args: Sequence[SampleArgs]) -> Tensor:
    temperature = _one_or_per_row([draw.temperature for draw in sample_args], logits.device)
    if not isinstance(temperature, Tensor) and temperature == 0:  # the likeliest: nothing is drawn
        greedy: Tensor = lz.sync.sample(logits, temperature=0.0, seed=0)
        return greedy
    seeds = to_device_with_host_copy(
        torch.tensor([(draw.seed, draw.offset) for draw in sample_args]), logits.device
    )
    sampled: Tensor = lz.sync.sample(
        logits,
        temperature=temperature,
        top_k=_one_or_per_row([draw.top_k for draw in sample_args], logits.device),
        top_p=_one_or_per_row([draw.top_p for draw in sample_args], logits.device),
        seed=seeds[:, 0],
        offset=seeds[:, 1],
    )
    return sampled


def adjusted_rows(logits: Tensor, sample_args: Sequence[SampleArgs]) -> Tensor:
    """The rows of `logits` by their callers' rules; rows without rules stay what they are."""
    rules = [draw.rules or LogitRules(torch.empty(0, dtype=torch.int64)) for draw in sample_args]
    device = logits.device

    def numbers(name: str) -> Any:
        return _one_or_per_row([getattr(rule, name) for rule in rules], device)

    asked: dict[str, Any] = {}
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    if any(
        (rule.repetition_penalty, rule.presence_penalty, rule.frequency_penalty) != (1.0, 0.0, 0.0)
        for rule in rules
    ):
        asked = {name: numbers(name) for name in penalties}
        asked["history"] = _padded([rule.history for rule in rules], -1, device)
        asked["prompt_lens"] = numbers("prompt_len")
    if any(rule.bias for rule in rules):
        asked["bias_tokens"] = _padded(
            [torch.tensor([t for t, _ in rule.bias]).long() for rule in rules], -1, device
        )
        asked["bias"] = _padded(
            [torch.tensor([b for _, b in rule.bias]).float() for rule in rules], 0, device
        )
    if any(rule.allowed is not None for rule in rules):
        free = torch.full((-(-logits.shape[1] // 32),), -1, dtype=torch.int32)
        masks = [free if rule.allowed is None else rule.allowed for rule in rules]
        asked["allowed"] = to_device_with_host_copy(torch.stack(masks), device)
    if any(rule.min_p for rule in rules):
        heats = [draw.temperature for draw in sample_args]
        asked |= {"min_p": numbers("min_p"), "temperature": _one_or_per_row(heats, device)}
    return lz.adjust_logits(logits, **asked) if asked else logits


def _padded(rows: list[Tensor], filler: float, device: torch.device) -> Tensor:
    return to_device_with_host_copy(pad_sequence(rows, batch_first=True, padding_value=filler), device)


def note_logprobs(logits: Tensor, tokens: Tensor, sample_args: Sequence[SampleArgs]) -> None:
    """Leave with every caller that asks how likely its token was, by the logits (B, V) before any rule."""
    tops = [draw.rules.top_logprobs if draw.rules is not None else None for draw in sample_args]
    asked = [top for top in tops if top is not None]
    if not asked:
        return
    chosen, likeliest, values = lz.token_logprobs(logits.double(), tokens, max(asked))
    for row, (draw, top) in enumerate(zip(sample_args, tops, strict=True)):
        if draw.rules is not None and top is not None:
            parts = (chosen[row : row + 1], likeliest[row, :top].double(), values[row, :top])
            draw.rules.logprobs = torch.cat(parts)
