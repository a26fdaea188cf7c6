"""The loop of one request: its pages, its steps, and what each token was drawn by."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

import anyio
import torch
from models.sampling import LogitRules, SampleArgs
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import PagedCache, PagedRequests, PrefixCache, TokenRange
from layerzero.ops.host_copies import to_device_with_host_copy
from server.protocol import Sampling

# Rows of a prompt that one step takes: longer prompts go in pieces, so that no next token waits long.
PREFILL_CHUNK = 256


class Model(Protocol):
    """What a request asks of the model: two coroutines over its rows, which meet in batches."""

    @property
    def cache(self) -> PagedCache:
        """Where its keys and values lie."""
        ...

    async def step(self, ids: Tensor, span: TokenRange) -> Tensor:
        """Fill the places `span` with the tokens `ids` (n,)."""
        ...

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """Fill the places `span` with the tokens `ids` (n,), and draw the token (1,) behind them."""
        ...


class Grammar(Protocol):
    """What a text has to be."""

    def allowed(self) -> Tensor:
        """The tokens that may come next, a bit each."""
        ...

    def accept(self, token: int) -> None:
        """Continue after `token`."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        ...


class Drawn(NamedTuple):
    """One token; with it, if they were asked for, its logarithm and the likeliest tokens with theirs.

    `ends`: the text ends with it; `is_text` is False for a token that only says so.
    """

    token: int
    logprob: float | None
    likeliest: tuple[tuple[int, float], ...]
    ends: bool
    is_text: bool


class _Rules:
    """The rules of one request, from step to step; `args` are None where it has none."""

    def __init__(
        self,
        prompt: Sequence[int],
        so_far: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        grammar: Grammar | None,
    ) -> None:
        self._grammar = grammar
        for token in so_far if grammar is not None else ():
            grammar.accept(token)
        self.args: LogitRules | None = None
        if sampling.has_rules or grammar is not None:
            self._history = torch.zeros(len(prompt) + max_tokens, dtype=torch.int64)
            self._history[: len(prompt) + len(so_far)] = torch.tensor([*prompt, *so_far])
            self.args = LogitRules(
                self._history[: len(prompt)],
                prompt_len=len(prompt),
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                bias=sampling.logit_bias,
                min_p=sampling.min_p,
                top_logprobs=sampling.top_logprobs,
            )

    def prepare(self, tokens: Sequence[int]) -> LogitRules | None:
        """The rules for the token behind `tokens`, of which only the last is new."""
        if self.args is not None:
            self._history[len(tokens) - 1] = tokens[-1]
            self.args.history = self._history[: len(tokens)]
            if self._grammar is not None:
                self.args.allowed = self._grammar.allowed()
        return self.args


class Engine:
    """The requests of one model: they share its pages, its batches and the prefixes of their prompts."""

    def __init__(
        self, model: Model, eos_token_ids: frozenset[int], *, max_waiting_tokens: int | None = None
    ) -> None:
        self.model, self.eos_token_ids = model, eos_token_ids
        cache = model.cache
        self.requests = PagedRequests(
            cache, prefixes=PrefixCache(cache), max_waiting_tokens=max_waiting_tokens
        )

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        *,
        user: str = "",
        grammar: Grammar | None = None,
        ignore_eos: bool = False,
        patient: bool = False,
        so_far: Sequence[int] = (),
    ) -> AsyncGenerator[Drawn, None]:
        """Yield what continues `prompt`, until a token ends the text or `max_tokens` are drawn.

        `so_far` was drawn before, here or elsewhere, and is not yielded again.

        With `ignore_eos` no token ends it. A full batcher or queue is an error before the first token, unless
        the request is `patient`; later it is waited out. Cancelled or closed, it takes its call back from the
        batcher and gives its pages back.
        Raises: OverloadedError. ValueError: the prompt is empty, or too long.
        """
        tokens = [*prompt, *so_far]
        newest: Tensor | None = None
        rules = _Rules(prompt, so_far, sampling, max_tokens, grammar)
        with self.requests.open(user) as request:
            while (drawn := len(tokens) - len(prompt)) < max_tokens:
                try:
                    async with request.step(tokens, PREFILL_CHUNK) as span:
                        if span.end < len(tokens):
                            await self.model.step(self._ids(tokens, span), span)
                            continue
                        ids = newest if newest is not None and span.count == 1 else self._ids(tokens, span)
                        draw = SampleArgs(
                            sampling.temperature,
                            sampling.top_p,
                            sampling.seed,
                            drawn,
                            sampling.top_k,
                            rules.prepare(tokens),
                        )
                        newest = await self.model.sample_next(ids, span, draw)
                except lz.OverloadedError as overloaded:
                    if not drawn and not patient:
                        raise
                    await anyio.sleep(overloaded.retry_after)
                    continue
                told = await self._told(newest, draw, frozenset() if ignore_eos else self.eos_token_ids)
                tokens.append(told.token)
                if grammar is not None and told.is_text:
                    grammar.accept(told.token)
                    told = told._replace(ends=grammar.ended)
                yield told
                if told.ends:
                    return

    def _ids(self, tokens: Sequence[int], span: TokenRange) -> Tensor:
        ids = torch.tensor(tokens[span.start : span.end])
        return to_device_with_host_copy(ids, self.model.cache.device)

    async def _told(self, newest: Tensor, draw: SampleArgs, eos_token_ids: frozenset[int]) -> Drawn:
        """The token on the host, and what was asked about it."""
        token = int(await lz.to_host(newest))
        logprob: float | None = None
        likeliest: tuple[tuple[int, float], ...] = ()
        if draw.rules is not None and draw.rules.logprobs is not None:
            host = await lz.to_host(draw.rules.logprobs)
            logprob, *others = [float(number) for number in host]
            count = len(others) // 2  # the likeliest tokens, then their logarithms
            likeliest = tuple(zip(map(int, others[:count]), others[count:], strict=True))
        ends = token in eos_token_ids
        return Drawn(token, logprob, likeliest, ends, is_text=not ends)
