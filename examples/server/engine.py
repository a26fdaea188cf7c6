"""The loop of one request: its pages, its steps, and what each token was drawn by."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

import anyio
import torch
from models.sampling import NO_DRAW, LogitRules, SampleArgs
from torch import Tensor

import layerzero as lz
from layerzero.api.readback import HostReadback
from layerzero.kvcache import PagedCache, PagedRequest, PagedRequests, PrefixCache, TokenRange
from layerzero.ops.host_copies import to_device_with_host_copy
from server.protocol import Sampling

# Rows of a prompt that one step takes: longer prompts go in pieces, so that no next token waits long, and
# beside as many rows that decode as a graph has, a step has room for one.
PREFILL_CHUNK = 1024
# In place of tokens that are not read yet: never twice the same, so that no two pages look alike.
_PLACES = itertools.count(-1, -1)


class Model(Protocol):
    """What a request asks of the model: a coroutine over its rows, which meet in batches."""

    @property
    def cache(self) -> PagedCache:
        """Where its keys and values lie."""
        ...

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """Fill the places `span` with the tokens `ids` (n,), and draw the token (1,) behind them."""
        ...


class Grammar(Protocol):
    """What a text has to be; `allowed` and `accept` raise GrammarLimitError where it takes too much work."""

    def copy(self) -> Grammar:
        """The same for another text."""
        ...

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
        if grammar is not None:
            for token in so_far:
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


class _Unread(NamedTuple):
    """A drawn token on its way to the host, and how it was drawn."""

    reading: HostReadback
    draw: SampleArgs


class _Generation:
    """One request on its way: its tokens, of which the last may be drawn and not read yet."""

    def __init__(
        self,
        engine: Engine,
        request: PagedRequest,
        prompt: Sequence[int],
        so_far: Sequence[int],
        sampling: Sampling,
        rules: _Rules,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._engine, self._request, self._sampling = engine, request, sampling
        self._rules, self._eos_token_ids = rules, eos_token_ids
        self._tokens = [*prompt, *so_far]
        self._prompt_len = len(prompt)
        self._newest: Tensor | None = None
        self.unread: _Unread | None = None
        self.told: Drawn | None = None  # what was read, until it is taken

    @property
    def drawn(self) -> int:
        """How many tokens were drawn, read or not."""
        return len(self._tokens) - self._prompt_len

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may begin before the last token is read."""
        behind, unread = self._engine.reads_behind, self.unread
        if behind is None:
            behind = unread is not None and not unread.reading.done
        return behind and self._rules.args is None

    async def step(self) -> None:
        """Compute the next rows, and draw a token behind them where they are the last; read the one before.

        Raises: OverloadedError. ValueError: the prompt is empty, or too long.
        """
        tokens, model, sampling = self._tokens, self._engine.model, self._sampling
        async with self._request.step(tokens, self._engine.prefill_chunk) as span:
            if self.unread is not None and span.count > 1:  # preempted: computed again, from all tokens
                await self.read()
            if span.end < len(tokens):
                await model.sample_next(self._ids(span), span, NO_DRAW)
                return
            draw = SampleArgs(
                sampling.temperature, sampling.top_p, sampling.seed, self.drawn, sampling.top_k,
                self._rules.prepare(tokens),
            )  # fmt: skip
            ids = self._newest if self._newest is not None and span.count == 1 else self._ids(span)
            newest = await model.sample_next(ids, span, draw)
            if self.unread is not None:  # pages are published by what is in them
                await self.read()
        # The copy begins here: behind this step, before the next one.
        self._newest, self.unread = newest, _Unread(lz.to_host(newest), draw)
        tokens.append(next(_PLACES))

    async def read(self) -> None:
        """Read the token that was drawn last, and what was asked about it."""
        assert self.unread is not None
        reading, draw = self.unread
        token = int(await reading)
        logprob: float | None = None
        likeliest: tuple[tuple[int, float], ...] = ()
        if draw.rules is not None and draw.rules.logprobs is not None:
            host = await lz.to_host(draw.rules.logprobs)
            logprob, *others = [float(number) for number in host]
            count = len(others) // 2  # the likeliest tokens, then their logarithms
            likeliest = tuple(zip(map(int, others[:count]), others[count:], strict=True))
        ends = token in self._eos_token_ids
        self._tokens[-1], self.unread = token, None
        self.told = Drawn(token, logprob, likeliest, ends, is_text=not ends)

    def _ids(self, span: TokenRange) -> Tensor:
        ids = torch.tensor(self._tokens[span.start : span.end])
        return to_device_with_host_copy(ids, self._engine.model.cache.device)


class Engine:
    """The requests of one model: they share its pages, its batches and the prefixes of their prompts.

    Where tokens take their time to the host, as on CUDA, a request's next step begins before its last token
    is there, so that the device has work while tokens are sent; a text that ends by a token has computed one
    row in vain. Rules and grammars need each token first. `reads_behind` says so for every device.
    A step has at most `prefill_chunk` tokens of one prompt.
    """

    def __init__(
        self,
        model: Model,
        eos_token_ids: frozenset[int],
        *,
        max_waiting_tokens: int | None = None,
        reads_behind: bool | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.model, self.eos_token_ids = model, eos_token_ids
        self.prefill_chunk = prefill_chunk
        cache = model.cache
        self.reads_behind = reads_behind
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
        rules = _Rules(prompt, so_far, sampling, max_tokens, grammar)
        eos_token_ids = frozenset[int]() if ignore_eos else self.eos_token_ids
        with self.requests.open(user) as request:
            way = _Generation(self, request, prompt, so_far, sampling, rules, eos_token_ids)
            while way.drawn < max_tokens or way.unread is not None:
                if way.drawn < max_tokens:
                    try:
                        await way.step()
                    except lz.OverloadedError as overloaded:
                        if not way.drawn and not patient:
                            raise
                        await anyio.sleep(overloaded.retry_after)
                is_ahead = way.drawn < max_tokens and way.may_run_ahead
                if way.unread is not None and way.told is None and not is_ahead:
                    await way.read()
                told, way.told = way.told, None
                if told is None:
                    continue
                if grammar is not None and told.is_text:
                    grammar.accept(told.token)
                    told = told._replace(ends=grammar.ended)
                request.is_idle = True  # no other code runs meanwhile, unless the client does not read
                yield told
                request.is_idle = False
                if told.ends:
                    return
