"""What a request asks of its logits before a token is drawn, and what is reported about the token after it.

Plain functions over the rows of many requests: each parameter is a number for all rows, or a tensor with one
value a row, so that rows of different requests are in one call. Nothing here waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.sampling.draw import Count, Number, column, is_constant

MASK_BITS = 32


def adjust_logits(
    logits: Tensor,
    *,
    history: Tensor | None = None,
    prompt_lens: Count = 0,
    repetition_penalty: Number = 1.0,
    presence_penalty: Number = 0.0,
    frequency_penalty: Number = 0.0,
    bias_tokens: Tensor | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    min_p: Number = 0.0,
    temperature: Number = 1.0,
) -> Tensor:
    """The logits (B, V) that `sample` shall draw from: bias, penalties, mask and min-p, in this order.

    Args: logits (B, V); a penalty, min_p and temperature are numbers or (B,) floats. history (B, L) integers
        are the tokens of each row so far, -1 where there is none; the first prompt_lens of a row, an int or
        (B,) integers, are its prompt. repetition_penalty r above 0 divides a positive logit of any token of
        the history by r and multiplies another; presence_penalty is subtracted once from each token behind
        the prompt, frequency_penalty as often as it is there. bias (B, K) floats are added to bias_tokens
        (B, K), -1 where there is none. allowed (B, ceil(V / 32)) int32: bit i of word w lets token 32 w + i
        pass, as grammar libraries fill it. min_p in [0, 1] masks what is less likely at `temperature` than
        so much of the likeliest token.
    Returns: (B, V) float32, or float64 for such logits: a new tensor, or `logits` where nothing is asked.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also ids out of range.
    Source: presence and frequency: OpenAI's API reference; repetition: Keskar et al., arXiv 1909.05858;
        min-p: Nguyen et al., arXiv 2407.01082.

    Example:
        >>> import layerzero as lz
        >>> logits, history = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[1, 0, 0]])
        >>> lz.adjust_logits(logits, history=history, prompt_lens=1, frequency_penalty=0.5)
        tensor([[1., 1., 0.]])
    """
    checks.need_rows("logits", logits, rank=2)
    checks.need_each_row("repetition_penalty", repetition_penalty, logits, low=1e-3)
    checks.need_each_row("presence_penalty", presence_penalty, logits)
    checks.need_each_row("frequency_penalty", frequency_penalty, logits)
    checks.need_each_row("min_p", min_p, logits, low=0.0, high=1.0)
    checks.need_each_row("temperature", temperature, logits, low=0.0)
    values = (repetition_penalty, presence_penalty, frequency_penalty)
    penalised = any(not is_constant(value, neutral) for value, neutral in zip(values, (1, 0, 0), strict=True))
    if penalised and history is None:
        raise ValueError("history needs the tokens so far where a penalty is given, got None")
    if (bias is None) != (bias_tokens is None):
        raise ValueError("bias and bias_tokens need each other, got one of them")
    adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None and bias_tokens is not None:
        adjusted = _biased(adjusted, _ids("bias_tokens", bias_tokens, logits), bias)
    if penalised and history is not None:
        tokens = _ids("history", history, logits)
        if tokens.shape[1]:
            checks.need_count("prompt_lens", prompt_lens, logits, (0, None))
            adjusted = _penalised(adjusted, tokens, column(prompt_lens, torch.int64, logits.device), values)
    if allowed is not None:
        adjusted = _masked(adjusted, allowed)
    if not is_constant(min_p, 0):
        adjusted = _without_unlikely(adjusted, min_p, temperature)
    return adjusted


def token_logprobs(logits: Tensor, tokens: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """How likely each row's token was, and the `top` likeliest tokens of the row.

    Args: logits (B, V); tokens (B,) integers; top from 0 to V.
    Returns: logarithms of probabilities (B,); the likeliest tokens (B, top) int64, the likeliest first, of
        equal ones the lowest; their logarithms (B, top); float32, or float64 for such logits.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also ids out of range.

    Example:
        >>> import layerzero as lz
        >>> lz.token_logprobs(torch.zeros(1, 4), torch.tensor([2]))[0].exp()
        tensor([0.2500])
    """
    checks.need_rows("logits", logits, rank=2)
    vocab = logits.shape[1]
    checks.need_index("tokens", tokens, rank=1)
    checks.need_count("tokens", tokens, logits)
    checks.need_int("top", top, low=0, high=vocab)
    index = checks.ids_in_range("tokens", tokens, vocab, "the vocabulary").long().unsqueeze(-1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(wide, -1)
    likeliest = _largest(logprobs, top)
    return logprobs.gather(-1, index).squeeze(-1), likeliest, logprobs.gather(-1, likeliest)


def _largest(values: Tensor, count: int) -> Tensor:
    """The places (B, count) of each row's largest: the first ones of any larger count."""
    if not count:
        return values.new_empty((*values.shape[:-1], 0), dtype=torch.int64)
    threshold = values.topk(count, -1).values.amin(-1, keepdim=True)
    is_above, is_last = values > threshold, values == threshold
    room = count - is_above.sum(-1, keepdim=True)
    place = torch.arange(values.shape[-1], device=values.device)
    # `topk` takes any of equal ones: the lowest are kept here. A row of NaN has some places.
    places = torch.where(is_above | (is_last & (is_last.cumsum(-1) <= room)), place, place[-1])
    lowest = places.topk(count, -1, largest=False).values.sort(-1).values
    order = values.gather(-1, lowest).sort(dim=-1, descending=True, stable=True).indices
    return lowest.gather(-1, order)


# -- the steps ------------------------------------------------------------------------------------------


def _biased(logits: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
    checks.need_tensor("bias", bias, rank=2)
    checks.need_shape("bias", bias, tokens.shape, " like bias_tokens")
    checks.need_same_device("logits", logits, bias=bias)
    added = torch.where(tokens < 0, 0.0, bias.to(logits.dtype))
    return logits.scatter_add(-1, tokens.clamp_min(0), added)


def _penalised(
    logits: Tensor, tokens: Tensor, prompt_lens: Tensor, values: tuple[Number, Number, Number]
) -> Tensor:
    repetition, presence, frequency = (column(value, logits.dtype, logits.device) for value in values)
    is_token = tokens >= 0
    # A place without a token repeats one of its row: all writes of one column write the same.
    index = torch.where(is_token, tokens, tokens.amax(-1, keepdim=True)).clamp_min(0)
    is_generated = is_token & (torch.arange(tokens.shape[1], device=tokens.device) >= prompt_lens)
    counts = torch.zeros_like(logits).scatter_add_(-1, index, is_generated.to(logits.dtype)).gather(-1, index)
    before = logits.gather(-1, index)
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(is_token.any(-1, keepdim=True), repeated, before)
    return logits.scatter(-1, index, after - frequency * counts - presence * (counts > 0))


def _masked(logits: Tensor, allowed: Tensor) -> Tensor:
    rows, vocab = logits.shape
    words = -(-vocab // MASK_BITS)
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.int32:
        got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
        raise TypeError(f"allowed needs a tensor of int32, got {got}")
    checks.need_shape("allowed", allowed, (rows, words), ", a bit a token")
    checks.need_same_device("logits", logits, allowed=allowed)
    bits = (allowed.unsqueeze(-1) >> torch.arange(MASK_BITS, device=allowed.device, dtype=torch.int32)) & 1
    return logits.masked_fill(bits.flatten(1)[:, :vocab] == 0, -torch.inf)


def _without_unlikely(logits: Tensor, min_p: Number, temperature: Number) -> Tensor:
    share, heat = (column(value, torch.float64, logits.device) for value in (min_p, temperature))
    # At 0 of either the product has no value, or none that says what is meant: nothing is masked.
    distance = torch.where((share > 0) & (heat > 0), share.log() * heat, -torch.inf)
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + distance.to(logits.dtype), -torch.inf)


# -- checks ---------------------------------------------------------------------------------------------


def _ids(name: str, tokens: Tensor, logits: Tensor) -> Tensor:
    checks.need_index(name, tokens, rank=2)
    checks.need_like(name, "{} rows", tokens.shape[0], logits.shape[0], "logits")
    checks.need_same_device("logits", logits, **{name: tokens})
    return checks.ids_in_range(name, tokens, logits.shape[1], "the vocabulary, or -1", ignore=-1).long()
